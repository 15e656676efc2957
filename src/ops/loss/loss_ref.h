/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the reference kernels of the losses: rows of logits in double, and which targets count.
 */
#ifndef RFT_LOSS_REF_H
#define RFT_LOSS_REF_H

#include <math.h>
#include <stdint.h>

#include "refrain/dtype.h"

/* A logit in type `to`. */
static inline double dot(const double *x, const double *w, int64_t C, rfr_dtype to) {
  double sum = 0;
  for (int64_t c = 0; c < C; c++) sum += x[c] * w[c];
  return to == RFR_F32 ? sum : (double)rfr_float_from_bits(to, rfr_float_to_bits(to, (float)sum));
}
static inline double row_lse(const double *logits, int64_t V) {
  double max = -INFINITY, sum = 0;
  for (int64_t v = 0; v < V; v++) max = logits[v] > max ? logits[v] : max;
  for (int64_t v = 0; v < V; v++) sum += exp(logits[v] - max);
  return max + log(sum);
}
static inline int is_valid(int32_t target, int64_t ignore, int64_t V) {
  return target != ignore && target >= 0 && target < V;
}

#endif
