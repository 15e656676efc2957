/* SPDX-License-Identifier: Apache-2.0
 *
 * The description of a scaled GEMM on a GPU, y = a bT, that its kernels get. matmul_scaled.cu supports every such GEMM,
 * scaled_sm90.cu FP8 on sm_90.
 */
#ifndef RFI_SCALED_GEMM_CUH
#define RFI_SCALED_GEMM_CUH

#include "ops/grouped/walk.cuh"
#include "ops/quant/scaled.h"

typedef struct rfi_factor {
  const uint8_t *q;
  const void *scale;
  const float *global; /* NULL: none */
  rfr_dtype dtype;
  int64_t scaling, rows, row, scale_row; /* as on the CPU */
} rfi_factor;

typedef struct rfi_scaled_gemm {
  rfi_factor a, b;
  /* Groups are rows of a and y. If along is set, they are elements of the rows of a and b, and each group has a result
   * (a.rows, b.rows). A GEMM without groups has one group in either case. */
  rfi_groups groups;
  bool along;
  /* one scale per tensor: the tensor core accumulates over all of K, as forwards do; otherwise sums are promoted to
   * f32 */
  bool narrow;
  const void *bias, *bias_scale; /* NULL: none */
  void *y;
  rfr_dtype bias_type, bias_scale_type, y_type;
  int64_t first, block, slices; /* along: number of the first group; elements per block of a line */
  int accumulate;
} rfi_scaled_gemm;

/* Why scaled_sm90.cu does not support a GEMM; NULL: it does. It needs RFI_GROUPED_TAKEN bytes at `taken`. */
const char *rfi_scaled_sm90_lacks(const rfi_scaled_gemm &p);
rfr_status rfi_scaled_sm90(const rfi_scaled_gemm &p, int32_t *taken, int sms, cudaStream_t stream);

#endif
