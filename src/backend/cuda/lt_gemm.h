/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs of cuBLASLt, created by lt.c and measured by lt_tune.c.
 */
#ifndef RFI_LT_GEMM_H
#define RFI_LT_GEMM_H

#include <cublasLt.h>

#include "backend/cuda/lt.h"

/* most: maximum number of candidate algorithms */
enum { RFI_LT_WORKSPACE = 32 << 20, RFI_LT_NAME = 256, RFI_LT_MOST = 8 };

typedef struct rfi_lt_functions {
#define RFI_LT_FUNCTIONS(X)               \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetVersion)                   \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoConfigGetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatrixLayoutSetAttribute)     \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute)
#define RFI_LT_MEMBER(name) __typeof__(&name) name;
  RFI_LT_FUNCTIONS(RFI_LT_MEMBER)
#undef RFI_LT_MEMBER
} rfi_lt_functions;

typedef struct rfi_lt_matrix { /* column-major, as cuBLASLt sees it */
  int64_t rows, cols, ld, batch_stride;
  int32_t type, transposed;
} rfi_lt_matrix;

typedef struct rfi_lt_key {
  rfi_lt_matrix a, b, d;
  int64_t batch;
  int32_t bias, accumulate; /* bias: a cudaDataType_t, -1 for none */
  int32_t scaled, fast;     /* FP8; fast: accumulate in the tensor core's own, narrower format */
  int32_t scale_a, scale_b; /* cublasLtMatmulMatrixScale_t */
  int64_t gelu_ld; /* leading dimension of x if the gradient of GELU at x is applied to the result; 0: it is not */
} rfi_lt_key;

typedef struct rfi_lt_gemm {
  struct rfi_lt_gemm *next;
  rfi_lt *lt;
  rfi_lt_key key;
  bool usable;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t A, B, D;
  cublasLtMatmulAlgo_t algo;
  char name[RFI_LT_NAME]; /* for tuning: the key as text */
} rfi_lt_gemm;

struct rfi_lt {
  const rfi_cuda_host *core;
  rfr_ctx *ctx;
  const rfi_cuda_info *info;
  rfi_lt_functions f;
  cublasLtHandle_t handle;
  rfi_lt_gemm *gemms;
};

typedef struct rfi_lt_operands {
  const void *a, *b, *bias, *gelu_x; /* operands in cuBLASLt's order */
  const void *scale_a, *scale_b;
  void *d, *workspace; /* workspace: rfi_lt_workspace bytes, 256-byte aligned */
} rfi_lt_operands;

/* Bytes of a matrix's scales in cuBLASLt's layout. */
size_t rfi_lt_scale_bytes(const rfi_lt_matrix *m, int32_t mode);

/* Workspace of a GEMM for split-K: RFI_LT_WORKSPACE, or 0 for a small one. */
size_t rfi_lt_workspace(const rfi_lt_key *k);

/* Enqueues a GEMM by one algorithm. */
cublasStatus_t rfi_lt_multiply(const rfi_lt_gemm *p, const cublasLtMatmulAlgo_t *algo, const rfi_lt_operands *x,
                               cudaStream_t stream);
/* Writes at most `most` algorithms in the order of the library's heuristic and returns their number. `reductions`:
 * allowed split-K schemes (cublasLtReductionScheme_t). */
int rfi_lt_heuristics(const rfi_lt_gemm *p, uint32_t reductions, cublasLtMatmulHeuristicResult_t *out, int most);

#endif
