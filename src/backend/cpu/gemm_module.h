/* SPDX-License-Identifier: Apache-2.0
 *
 * What a module of matrix products gives: one exported function that returns this
 * table. Plain C and numbers alone, so that the module needs no symbol of the library
 * and the library none of the module's; `abi` refuses a module of another build.
 *
 * A handle is one product: shapes, strides, types, threads. It is made at bind, where
 * it may take its time and memory; execute then only runs it, with scratch that the
 * plan owns, and gives the same bits for the same inputs.
 */
#ifndef RFI_GEMM_MODULE_H
#define RFI_GEMM_MODULE_H

#include <stddef.h>
#include <stdint.h>

enum { RFI_GEMM_ABI = 4 };

typedef enum rfi_gemm_type { RFI_GEMM_NONE, RFI_GEMM_F32, RFI_GEMM_BF16, RFI_GEMM_F16 } rfi_gemm_type;

/* What each run of a product says anew: nothing, or M or K, which are then the largest there are. */
typedef enum rfi_gemm_varies { RFI_GEMM_FIXED, RFI_GEMM_VARIES_M, RFI_GEMM_VARIES_K } rfi_gemm_varies;

/* y (batch, M, N) = op(a) (batch, M, K) op(b) (batch, K, N) + bias (N); y dense. */
typedef struct rfi_gemm_desc {
  int64_t batch, M, N, K;
  int64_t a_stride[3], b_stride[3]; /* elements, of op(a) and op(b): batch, row, column */
  int32_t a, b, bias, y;            /* rfi_gemm_type; bias may be NONE */
  int32_t accumulate;               /* y += */
  int32_t threads;
  int32_t varies; /* rfi_gemm_varies; else than FIXED: no batch, no bias */
} rfi_gemm_desc;

/* One run of a product of which something varies: n is that, 0: there is nothing to do. */
typedef struct rfi_gemm_group {
  int64_t n;
  const void *a, *b;
  void *y;
} rfi_gemm_group;
typedef rfi_gemm_group (*rfi_gemm_group_fn)(const void *user, int64_t g);

typedef enum rfi_gemm_status { RFI_GEMM_OK, RFI_GEMM_UNSUPPORTED, RFI_GEMM_NO_MEMORY, RFI_GEMM_FAILED } rfi_gemm_status;

typedef struct rfi_gemm_module {
  int32_t abi;
  /* An engine; `name` becomes "oneDNN 2.6.3", `isa` the instruction set it uses, `level` 2, 3 or 4 for what the
   * x86-64 level of that set is, bf16_fast 1 where bf16 products are faster than f32 ones (AMX, AVX512-BF16). */
  rfi_gemm_status (*open)(void **engine, char name[32], char isa[32], int32_t *level, int32_t *bf16_fast);
  void (*close)(void *engine);
  /* UNSUPPORTED: there is no fast way, use the portable kernel; *why says what is in the way. */
  rfi_gemm_status (*create)(void *engine, const rfi_gemm_desc *desc, void **handle, size_t *scratch, const char **why);
  rfi_gemm_status (*execute)(void *handle, const void *a, const void *b, const void *bias, void *y, void *scratch);
  /* Of a product of which something varies: one after the other, each thread asks `group` for each. */
  rfi_gemm_status (*execute_groups)(void *handle, int64_t groups, rfi_gemm_group_fn group, const void *user,
                                    void *scratch);
  void (*destroy)(void *handle);
} rfi_gemm_module;

#define RFI_GEMM_ENTRY "rfi_gemm_module_get"
typedef const rfi_gemm_module *(*rfi_gemm_entry)(void);

#endif
