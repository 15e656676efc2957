/* SPDX-License-Identifier: Apache-2.0
 *
 * Interface of a GEMM module: one exported function that returns this table. It uses only plain C and numbers: neither
 * the module nor the library needs a symbol of the other. A module of another build is refused by `abi`.
 *
 * A handle is one GEMM: shapes, strides, types, threads. It is created at compile, where it
 * may use time and memory. Execute runs it in scratch memory of the plan and gives the same
 * bits for the same inputs. (oneDNN itself calls malloc and free for the argument list.)
 */
#ifndef RFI_GEMM_MODULE_H
#define RFI_GEMM_MODULE_H

#include <stddef.h>
#include <stdint.h>

enum { RFI_GEMM_ABI = 4 };

typedef enum rfi_gemm_type { RFI_GEMM_NONE, RFI_GEMM_F32, RFI_GEMM_BF16, RFI_GEMM_F16 } rfi_gemm_type;

/* The dimension that may differ between runs: none, M or K. The descriptor has its maximum. */
typedef enum rfi_module_varies { RFI_MODULE_FIXED, RFI_MODULE_VARIES_M, RFI_MODULE_VARIES_K } rfi_module_varies;

/* y (batch, M, N) = op(a) (batch, M, K) op(b) (batch, K, N) + bias (N); y dense. */
typedef struct rfi_module_gemm {
  int64_t batch, M, N, K;
  int64_t a_stride[3], b_stride[3]; /* elements, of op(a) and op(b): batch, row, column */
  int32_t a, b, bias, y;            /* rfi_gemm_type; bias may be NONE */
  int32_t accumulate;               /* y += */
  int32_t threads;
  int32_t varies; /* rfi_module_varies; unless FIXED: no batch, no bias */
} rfi_module_gemm;

/* One run of a GEMM with a varying dimension. n: the dimension's value; 0: nothing to do. */
typedef struct rfi_gemm_group {
  int64_t n;
  const void *a, *b;
  void *y;
} rfi_gemm_group;
typedef rfi_gemm_group (*rfi_gemm_group_fn)(const void *user, int64_t g);

typedef enum rfi_gemm_status { RFI_GEMM_OK, RFI_GEMM_UNSUPPORTED, RFI_GEMM_NO_MEMORY, RFI_GEMM_FAILED } rfi_gemm_status;

typedef struct rfi_gemm_module {
  int32_t abi;
  /* Creates an engine. Sets `name` to text such as "oneDNN 2.6.3", `isa` to its instruction set, `level` to the x86-64
   * level of that set (2, 3 or 4), and bf16_fast to 1 if bf16 GEMMs are faster than f32 ones (AMX, AVX512-BF16). */
  rfi_gemm_status (*open)(void **engine, char name[32], char isa[32], int32_t *level, int32_t *bf16_fast);
  void (*close)(void *engine);
  /* UNSUPPORTED: there is no fast kernel, use the portable one; *why is the reason. */
  rfi_gemm_status (*create)(void *engine, const rfi_module_gemm *desc, void **handle, size_t *scratch,
                            const char **why);
  rfi_gemm_status (*execute)(void *handle, const void *a, const void *b, const void *bias, void *y, void *scratch);
  /* For a GEMM with a varying dimension: runs all groups in order. Each thread calls `group` for each group. */
  rfi_gemm_status (*execute_groups)(void *handle, int64_t groups, rfi_gemm_group_fn group, const void *user,
                                    void *scratch);
  void (*destroy)(void *handle);
} rfi_gemm_module;

#define RFI_GEMM_ENTRY "rfi_gemm_module_get"
typedef const rfi_gemm_module *(*rfi_gemm_entry)(void);

#endif
