/* SPDX-License-Identifier: Apache-2.0
 *
 * One row of softmax cross-entropy, shared by the op on logits and by the fused LM head.
 *
 * The forward reads the row once: block after block, with a running maximum; when it rises, the sum so far is scaled
 * down. Sums within a block use 16 lanes, which the compiler vectorizes, and are added in a fixed order. The backward
 * needs only lse. With a cap the logits are softcapped before the forward (rfi_ce_softcap), and the gradient is that of
 * the uncapped logits.
 */
#ifndef RFI_CE_ROW_H
#define RFI_CE_ROW_H

#include <math.h>
#include <string.h>

#include "ops/walk.h"

enum { RFI_CE_LANES = 16 };

static inline bool rfi_ce_valid(int32_t target, int64_t ignore, int64_t V) {
  return target != ignore && target >= 0 && target < V;
}

typedef float rfi_ce_vector __attribute__((vector_size(RFI_CE_LANES * 4)));
typedef int32_t rfi_ce_mask __attribute__((vector_size(RFI_CE_LANES * 4)));

/* Explicit vectors, because compilers must not reorder a float reduction. */
static inline float rfi_ce_block_max(const float *x, int64_t n) {
  rfi_ce_vector top, v;
  float max = -INFINITY;
  int64_t i = 0;
  for (int j = 0; j < RFI_CE_LANES; j++) top[j] = -INFINITY;
  for (; i + RFI_CE_LANES <= n; i += RFI_CE_LANES) {
    memcpy(&v, x + i, sizeof v);
    rfi_ce_mask above = v > top;
    top = (rfi_ce_vector)(((rfi_ce_mask)v & above) | ((rfi_ce_mask)top & ~above));
  }
  for (; i < n; i++) max = x[i] > max ? x[i] : max;
  for (int j = 0; j < RFI_CE_LANES; j++) max = top[j] > max ? top[j] : max;
  return max;
}

static inline double rfi_ce_block_sum(const float *x, int64_t n, float max) {
  float lane[RFI_CE_LANES] = {0};
  double sum = 0;
  int64_t i = 0;
  for (; i + RFI_CE_LANES <= n; i += RFI_CE_LANES)
    for (int j = 0; j < RFI_CE_LANES; j++) lane[j] += rfi_expf(x[i + j] - max);
  for (int j = 0; i < n; i++, j++) lane[j] += rfi_expf(x[i] - max);
  for (int j = 0; j < RFI_CE_LANES; j++) sum += lane[j];
  return sum;
}

/* Softcaps a row of f32 logits in place. */
static inline void rfi_ce_softcap(float *x, int64_t V, float cap) {
  for (int64_t i = 0; i < V; i++) x[i] = rfi_softcap(x[i], cap);
}

/* Log-sum-exp of the V logits that begin at element `at`. */
static inline double rfi_ce_lse(const rfi_arg *logits, int64_t at, int64_t V) {
  float buffer[RFI_BLOCK], max = -INFINITY;
  double sum = 0;
  for (int64_t i = 0; i < V; i += RFI_BLOCK) {
    int64_t n = V - i < RFI_BLOCK ? V - i : RFI_BLOCK;
    const float *x = rfi_read(buffer, logits, at + i, 1, n);
    float top = rfi_ce_block_max(x, n);
    if (top > max) {
      sum *= exp((double)max - top);
      max = top;
    }
    sum += rfi_ce_block_sum(x, n, max);
  }
  return max + log(sum);
}

/* dlogits = (e^(logits - lse) - onehot) scale, times the slope of the softcap if cap > 0; zeros for an invalid target.
 * May overwrite the logits in place. lse is subtracted in two parts: one float at 25 has an error of up to 1e-6, and so
 * would the largest p. */
static inline void rfi_ce_backward(const rfi_arg *logits, int64_t at, const rfi_arg *dlogits, int64_t dat, int64_t V,
                                   bool valid, int32_t target, double lse, float scale, float cap) {
  float buffer[RFI_BLOCK], d[RFI_BLOCK], high = (float)lse, low = (float)(lse - high);
  for (int64_t i = 0; i < V; i += RFI_BLOCK) {
    int64_t n = V - i < RFI_BLOCK ? V - i : RFI_BLOCK;
    if (valid) {
      const float *x = rfi_read(buffer, logits, at + i, 1, n);
      for (int64_t k = 0; k < n; k++) d[k] = rfi_expf(x[k] - high - low);
      if (target >= i && target < i + n) d[target - i] -= 1.0f;
      for (int64_t k = 0; k < n; k++) d[k] *= scale;
      for (int64_t k = 0; cap > 0 && k < n; k++) d[k] *= rfi_softcap_slope(x[k], cap);
    } else {
      memset(d, 0, (size_t)n * sizeof *d);
    }
    if (dlogits->type.dtype == RFR_F32) memcpy((float *)dlogits->data + dat + i, d, (size_t)n * sizeof *d);
    else rfi_flush(d, dlogits, dat + i, n);
  }
}

#endif
