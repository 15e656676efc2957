/* SPDX-License-Identifier: Apache-2.0
 *
 * swiglu_bwd_packed as a call of swiglu_bwd, and swiglu_weighted_bwd_packed as one of swiglu_weighted_bwd: dgate and
 * dup are the halves of each row of one result.
 */
#ifndef RFI_HALVES_H
#define RFI_HALVES_H

#include "refrain/op.h"

enum { RFI_HALVES_MOST = 4 }; /* number of results */

/* The call without the last of its `most` results, h, if h is not wanted. */
static inline rfr_call rfi_swiglu_results(const rfr_call *call, int most) {
  rfr_call wanted = *call;
  if (call->n_out == most && !call->out[most - 1].data) wanted.n_out--;
  return wanted;
}

/* The call with result `wide` split into two; `out` stores the results. */
static inline rfr_call rfi_swiglu_halves(const rfr_call *call, int wide, rfr_arg out[RFI_HALVES_MOST]) {
  rfr_call halves = *call;
  const int last = call->out[wide].type.rank - 1;
  const int64_t columns = call->out[wide].type.shape[last] / 2, bytes = call->out[wide].type.dtype == RFR_F32 ? 4 : 2;
  for (int i = 0; i < wide; i++) out[i] = call->out[i];
  for (int i = 0; i < 2; i++) {
    rfr_arg *half = &out[wide + i];
    *half = call->out[wide];
    half->type.shape[last] = columns;
    if (half->data) half->data = (char *)half->data + i * columns * bytes;
  }
  for (int i = wide + 1; i < call->n_out; i++) out[i + 1] = call->out[i];
  halves.n_out = call->n_out + 1;
  halves.out = out;
  return halves;
}

#endif
