/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of softmax cross-entropy on a GPU, shared by the op on logits and by the fused LM head.
 */
#ifndef RFI_CE_CUDA_H
#define RFI_CE_CUDA_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfi_ce_rows {
  const rfi_cuda_info *info; /* the device; may be NULL without dlogits */
  int64_t rows, V;
  const void *logits; /* (rows, V), f32, bf16 or f16 */
  rfr_dtype logits_type;
  int64_t logits_ld; /* row stride in elements */
  float cap; /* > 0: the softcap is applied when logits are read, and dlogits are gradients of the uncapped logits */
  const int32_t *targets;
  int64_t ignore;
  /* on the device. inv_valid: a scalar, NULL: 1. dloss: the gradient of the loss, NULL: compute no gradient */
  const float *inv_valid, *dloss;
  int per_row;   /* dloss has an element per row; otherwise it is a scalar */
  void *dlogits; /* NULL: no gradient; may use the memory of the logits, row by row */
  rfr_dtype dlogits_type;
  int64_t dlogits_ld;
  float *lse;  /* (rows), NULL: not computed; rfi_ce_dlogits_cuda reads it */
  double *nll; /* (rows), NULL: not computed */
  float *loss; /* (rows), nll rounded; NULL: not computed */
} rfi_ce_rows;

rfr_status rfi_ce_rows_cuda(const rfi_ce_rows *r, void *stream);
/* The Hopper version, for calls that rfi_ce_rows_sm90_takes supports. */
int rfi_ce_rows_sm90_takes(const rfi_ce_rows *r);
rfr_status rfi_ce_rows_sm90_cuda(const rfi_ce_rows *r, void *stream);
/* Writes zeros after each row of dlogits, up to `width` elements. */
rfr_status rfi_ce_tails_cuda(const rfi_ce_rows *r, int64_t width, void *stream);
/* dlogits from the lse of the forward. They must not overlap the logits. */
rfr_status rfi_ce_dlogits_cuda(const rfi_ce_rows *r, void *stream);
/* *loss = inv_valid times the sum of nll, in a fixed order; 0 if T = 0. */
rfr_status rfi_ce_loss_cuda(const double *nll, int64_t T, const float *inv_valid, float *loss, void *stream);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
#include "backend/cuda/kernels.cuh"

/* The factor by which row t's gradient is multiplied. */
static __device__ __forceinline__ float rfi_ce_scale(const rfi_ce_rows &r, int64_t t) {
  const float dloss = r.dloss[r.per_row ? t : 0];
  return r.inv_valid ? dloss * *r.inv_valid : dloss;
}

static constexpr float RFI_LOG2E = 1.4426950408889634f;

/* Terms of a row are 2^(logit log2 e - base(m)) for the row's maximum m. The error of 2^d grows as |d|, which does not
 * matter in a sum where the term is 2^d. The product with log2 e is rounded separately,
 * so that all readers subtract the same base. */
static __device__ __forceinline__ float rfi_ce_base(float most) { return __fmul_rn(most, RFI_LOG2E); }

/* Log-sum-exp of a row from (m, sum). The maximum's own term is 1 up to the rounding of the base. The sum is divided by
 * that term, so that the loss of a row with one logit is exactly 0. */
static __device__ __forceinline__ double rfi_ce_lse(float2 row) {
  const float own = isinf(row.x) ? 1.0f : rfi_exp2(fmaf(row.x, RFI_LOG2E, -rfi_ce_base(row.x)));
  return (double)row.x + log2((double)row.y / (double)own) * 0.693147180559945309417;
}
#endif
#endif
