/* SPDX-License-Identifier: Apache-2.0
 *
 * The formulas of routing, for forward and backward: a token's scores, and the weights of its chosen experts. They
 * process RFI_LANES tokens at once, because experts are few and tokens are many; row e of a table is expert e of all
 * these tokens. A token's results do not depend on the other tokens: they are computed in the order of its experts.
 */
#ifndef RFI_ROUTE_H
#define RFI_ROUTE_H

#include "ops/vec.h"

#define RFI_ROUTE_TINY 1e-20f /* added to a divisor, because all scores may be 0 */

enum { RFI_LANES = 16 };
typedef float rfi_lanes[RFI_LANES];
typedef int32_t rfi_int_lanes[RFI_LANES];

/* Replaces l by e^(l - max); sum gets the sum. */
static inline void rfi_route_exp(rfi_lanes *l, int64_t n, rfi_lanes max, rfi_lanes sum) {
  for (int i = 0; i < RFI_LANES; i++) max[i] = l[0][i], sum[i] = 0;
  for (int64_t e = 1; e < n; e++)
    for (int i = 0; i < RFI_LANES; i++) max[i] = l[e][i] > max[i] ? l[e][i] : max[i];
  for (int64_t e = 0; e < n; e++)
    for (int i = 0; i < RFI_LANES; i++) l[e][i] = rfi_expf(l[e][i] - max[i]);
  for (int64_t e = 0; e < n; e++)
    for (int i = 0; i < RFI_LANES; i++) sum[i] += l[e][i];
}

static inline void rfi_route_softmax(rfi_lanes *l, int64_t n) {
  rfi_lanes max, sum;
  rfi_route_exp(l, n, max, sum);
  for (int i = 0; i < RFI_LANES; i++) sum[i] = 1 / sum[i];
  for (int64_t e = 0; e < n; e++)
    for (int i = 0; i < RFI_LANES; i++) l[e][i] *= sum[i];
}

static inline void rfi_route_sigmoids(const rfi_lanes *l, int64_t n, rfi_lanes *to) {
  for (int64_t e = 0; e < n; e++)
    for (int i = 0; i < RFI_LANES; i++) to[e][i] = rfi_sigmoidf(l[e][i]);
}

/* Replaces l by the scores of all experts; for RFR_MOE_SOFTMAX_CHOSEN these are the logits. */
static inline void rfi_route_scores(rfi_lanes *l, int64_t n, int64_t kind) {
  if (kind == RFR_MOE_SOFTMAX) rfi_route_softmax(l, n);
  if (kind == RFR_MOE_SIGMOID) rfi_route_sigmoids(l, n, l);
}

/* r: the scores of the chosen experts, before norm and scale; 0 for an index out of range. */
static inline void rfi_route_chosen(const rfi_lanes *scores, int64_t n, const rfi_int_lanes *index, int64_t k,
                                    int64_t kind, rfi_lanes *r) {
  const float none = kind == RFR_MOE_SOFTMAX_CHOSEN ? -3e38f : 0.0f;
  for (int64_t j = 0; j < k; j++)
    for (int i = 0; i < RFI_LANES; i++) r[j][i] = index[j][i] >= 0 && index[j][i] < n ? scores[index[j][i]][i] : none;
  if (kind == RFR_MOE_SOFTMAX_CHOSEN) rfi_route_softmax(r, k);
}

#endif
