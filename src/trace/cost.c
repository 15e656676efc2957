/* SPDX-License-Identifier: Apache-2.0
 *
 * FLOPs and bytes of an op, from the rules of the op. They serve to compare ops; they do not predict time.
 */
#include "base/base.h"
#include "trace/trace.h"

static double bytes_of(const rfi_infer *c) {
  double bytes = 0;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k].rank >= 0) bytes += (double)rfi_bytes(&c->in[k]);
  for (int j = 0; j < c->def->n_results; j++)
    if (c->out[j].rank >= 0) bytes += (double)rfi_bytes(&c->out[j]);
  return bytes;
}

static double gemm_flops(const rfi_infer *c) {
  rfi_gemm_desc d = rfi_gemm_desc_make();
  if (c->out[0].rank < 0) return 0;
  c->def->gemm(c, &d);
  return rfi_gemm_flops(&d);
}

rfr_status rfi_op_cost(const rfi_infer *c, rfi_cost *out) {
  const rfi_op_def *def = c->def;
  *out = (rfi_cost){0, 0};
  if (def->flags & RFI_VIEW) return RFR_OK;
  if (def->flops) out->flops = def->flops(c);
  else if (def->gemm) out->flops = gemm_flops(c);
  out->bytes = def->bytes ? def->bytes(c) : bytes_of(c);
  if (out->flops >= 0 && out->bytes >= 0) return RFR_OK;
  return rfi_fail(RFI_E_ARGUMENT, "its cost callback returned a negative count or NaN");
}
