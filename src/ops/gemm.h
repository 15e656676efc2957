/* SPDX-License-Identifier: Apache-2.0
 *
 * Describes the GEMM of a call, for backends and their libraries.
 */
#ifndef RFI_GEMM_H
#define RFI_GEMM_H

#include "ops/call.h"

/* Describes a call as a GEMM; false: its op is not a GEMM. */
static inline bool rfi_call_gemm(const rfi_op_def *def, const rfi_call *call, rfi_gemm_desc *d) {
  rfr_type in[RFI_MAX_NAMES], out[RFI_MAX_NAMES];
  rfi_infer c = {def, call->n_in < RFI_MAX_NAMES ? call->n_in : RFI_MAX_NAMES, in, call->attr, out, NULL};
  if (!def->gemm) return false;
  *d = rfi_gemm_desc_make();
  for (int k = 0; k < c.n_in; k++) {
    in[k] = call->in[k].type;
    if (!call->in[k].data) in[k].rank = -1;
  }
  for (int j = 0; j < call->n_out; j++) out[j] = call->out[j].type;
  def->gemm(&c, d);
  return true;
}

/* Grouped GEMMs have several kernels. */
static inline bool rfi_is_grouped_gemm(const rfi_op_def *def, const rfi_call *call) {
  rfi_gemm_desc d;
  return rfi_call_gemm(def, call, &d) && d.varies != RFI_GEMM_FIXED;
}

#endif
