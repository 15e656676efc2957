/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_packed as a call of attention_bwd: dq, dk and dv are the first H, the next Hk and the last Hk heads of
 * each row of the result.
 */
#ifndef RFI_ATTENTION_PACKED_H
#define RFI_ATTENTION_PACKED_H

#include "refrain/op.h"

static inline rfr_call rfi_attention_parts(const rfr_call *call, rfr_arg out[3]) {
  const rfr_arg *all = &call->out[0];
  const int64_t bytes = all->type.dtype == RFR_F32 ? 4 : 2;
  int64_t head = 0;
  rfr_call parts = *call;
  for (int i = 0; i < 3; i++) {
    out[i] = *all;
    out[i].type.shape[1] = call->in[1 + i].type.shape[1];
    if (all->data) out[i].data = (char *)all->data + head * all->stride[1] * bytes;
    head += out[i].type.shape[1];
  }
  parts.n_out = 3;
  parts.out = out;
  return parts;
}

#endif
