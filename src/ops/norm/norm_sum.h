/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum before a norm: x + other, rounded to their type, which the norm then reads.
 */
#ifndef RFI_NORM_SUM_H
#define RFI_NORM_SUM_H

#include "ops/walk.h"

static inline rfr_status rfi_norm_check_sum(const rfi_call *c) {
  if (!c->out[0].data && !c->out[1].data) return rfi_fail(RFI_E_ARGUMENT, "the norm of a sum: both results are unused");
  return RFR_OK;
}

/* Computes one row of the sum and returns its address: in the sum's memory, or in y's if the sum is unused. */
static inline const rfi_arg *rfi_norm_sum_row(const rfi_call *c, int64_t row) {
  const rfi_arg *sum = c->out[0].data ? &c->out[0] : &c->out[1];
  const int64_t C = sum->type.shape[sum->type.rank - 1];
  float a[RFI_BLOCK], b[RFI_BLOCK], y[RFI_BLOCK];
  for (int64_t j = 0, n; j < C; j += n) {
    const int64_t at = row * C + j;
    n = C - j < RFI_BLOCK ? C - j : RFI_BLOCK;
    const float *x = rfi_read(a, &c->in[0], at, 1, n), *other = rfi_read(b, &c->in[1], at, 1, n);
    float *o = rfi_target(y, sum, at);
    for (int64_t k = 0; k < n; k++) o[k] = x[k] + other[k];
    rfi_flush(o, sum, at, n);
  }
  return sum;
}

#endif
