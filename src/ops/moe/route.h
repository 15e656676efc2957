/* SPDX-License-Identifier: Apache-2.0
 *
 * The formulas of routing, for forward and backward alike: a token's scores, and the weights of the chosen ones. Of
 * RFI_LANES tokens side by side, row e of a table being all tokens' expert e: experts are few, tokens are many, and
 * each token's numbers are made in the order of its experts whatever stands beside it.
 */
#ifndef RFI_ROUTE_H
#define RFI_ROUTE_H

#include "ops/vec.h"

#define RFI_ROUTE_TINY 1e-20f /* added to a sum that divides: all scores may be 0 */

enum { RFI_LANES = 16 };
typedef float rfi_lanes[RFI_LANES];
typedef int32_t rfi_int_lanes[RFI_LANES];

/* l becomes e^(l - max); sum gets the sum. */
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

/* l becomes the scores of all experts; of RFR_MOE_SOFTMAX_CHOSEN they are the logits themselves. */
static inline void rfi_route_scores(rfi_lanes *l, int64_t n, int64_t kind) {
  if (kind == RFR_MOE_SOFTMAX) rfi_route_softmax(l, n);
  if (kind == RFR_MOE_SIGMOID) rfi_route_sigmoids(l, n, l);
}

/* r: the scores of the chosen, before norm and scale. An index that is no expert's has none. */
static inline void rfi_route_chosen(const rfi_lanes *scores, int64_t n, const rfi_int_lanes *index, int64_t k,
                                    int64_t kind, rfi_lanes *r) {
  const float none = kind == RFR_MOE_SOFTMAX_CHOSEN ? -3e38f : 0.0f;
  for (int64_t j = 0; j < k; j++)
    for (int i = 0; i < RFI_LANES; i++) r[j][i] = index[j][i] >= 0 && index[j][i] < n ? scores[index[j][i]][i] : none;
  if (kind == RFR_MOE_SOFTMAX_CHOSEN) rfi_route_softmax(r, k);
}

#endif
