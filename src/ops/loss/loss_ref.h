/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the reference kernels of the losses: rows of logits in double, and which targets count.
 */
#ifndef RFT_LOSS_REF_H
#define RFT_LOSS_REF_H

#include <math.h>
#include <stdint.h>

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
