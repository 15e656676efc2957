/* SPDX-License-Identifier: Apache-2.0
 *
 * The formulas of routing, for forward and backward alike: a token's scores, and the weights of the chosen ones.
 */
#ifndef RFI_ROUTE_H
#define RFI_ROUTE_H

#include "ops/vec.h"

#define RFI_ROUTE_TINY 1e-20f /* added to a sum that divides: all scores may be 0 */

/* l becomes e^(l - max); returns the sum. */
static inline float rfi_route_exp(float *l, int64_t n, float *max) {
  float sum = 0;
  *max = l[0];
  for (int64_t e = 1; e < n; e++) *max = l[e] > *max ? l[e] : *max;
  for (int64_t e = 0; e < n; e++) l[e] = rfi_expf(l[e] - *max);
  for (int64_t e = 0; e < n; e++) sum += l[e];
  return sum;
}

/* l becomes the scores of all experts; of RFR_MOE_SOFTMAX_CHOSEN they are the logits themselves. */
static inline void rfi_route_scores(float *l, int64_t n, int64_t kind) {
  float max;
  if (kind == RFR_MOE_SOFTMAX) {
    const float by = 1 / rfi_route_exp(l, n, &max);
    for (int64_t e = 0; e < n; e++) l[e] *= by;
  } else if (kind == RFR_MOE_SIGMOID) {
    for (int64_t e = 0; e < n; e++) l[e] = rfi_sigmoidf(l[e]);
  }
}

/* r: the scores of the chosen, before norm and scale. An index that is no expert's has none. */
static inline void rfi_route_chosen(const float *scores, int64_t n, const int32_t *index, int64_t k, int64_t kind,
                                    float *r) {
  float max;
  for (int64_t j = 0; j < k; j++)
    r[j] = index[j] >= 0 && index[j] < n ? scores[index[j]] : kind == RFR_MOE_SOFTMAX_CHOSEN ? -3e38f : 0.0f;
  if (kind != RFR_MOE_SOFTMAX_CHOSEN) return;
  const float by = 1 / rfi_route_exp(r, k, &max);
  for (int64_t j = 0; j < k; j++) r[j] *= by;
}

#endif
