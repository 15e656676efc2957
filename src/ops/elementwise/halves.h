/* SPDX-License-Identifier: Apache-2.0
 *
 * swiglu_bwd_packed as a call of swiglu_bwd, and swiglu_weighted_bwd_packed as one of swiglu_weighted_bwd: dgate and
 * dup are the halves of each row of the last result.
 */
#ifndef RFI_HALVES_H
#define RFI_HALVES_H

#include "refrain/op.h"

enum { RFI_HALVES_MOST = 3 }; /* number of results */

/* The call with its last result split into two; `out` stores the results. */
static inline rfr_call rfi_swiglu_halves(const rfr_call *call, rfr_arg out[RFI_HALVES_MOST]) {
  rfr_call halves = *call;
  const int wide = call->n_out - 1, last = call->out[wide].type.rank - 1;
  const int64_t columns = call->out[wide].type.shape[last] / 2, bytes = call->out[wide].type.dtype == RFR_F32 ? 4 : 2;
  for (int i = 0; i < wide; i++) out[i] = call->out[i];
  for (int i = 0; i < 2; i++) {
    rfr_arg *half = &out[wide + i];
    *half = call->out[wide];
    half->type.shape[last] = columns;
    if (half->data) half->data = (char *)half->data + i * columns * bytes;
  }
  halves.n_out = wide + 2;
  halves.out = out;
  return halves;
}

#endif
