/* SPDX-License-Identifier: Apache-2.0
 *
 * swiglu_bwd_packed as a call of swiglu_bwd: dgate and dup are the halves of each of the result's rows.
 */
#ifndef RFI_HALVES_H
#define RFI_HALVES_H

#include "refrain/op.h"

/* The call with its result seen as two, which `out` holds. */
static inline rfr_call rfi_swiglu_halves(const rfr_call *call, rfr_arg out[2]) {
  rfr_call halves = *call;
  const int last = call->out[0].type.rank - 1;
  const int64_t columns = call->out[0].type.shape[last] / 2, bytes = call->out[0].type.dtype == RFR_F32 ? 4 : 2;
  for (int i = 0; i < 2; i++) {
    out[i] = call->out[0];
    out[i].type.shape[last] = columns;
    if (out[i].data) out[i].data = (char *)out[i].data + i * columns * bytes;
  }
  halves.n_out = 2;
  halves.out = out;
  return halves;
}

#endif
