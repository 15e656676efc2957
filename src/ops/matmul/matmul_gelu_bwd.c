/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul_gelu_bwd: dx = gelu_bwd(op(a) op(b), x), the gradient of GELU (tanh form) after the dgrad that it reads. The
 * fuse pass creates it after autodiff (pass/fuse_gelu.c), so it has neither a gradient nor a recording call.
 */
#include "base/base.h"
#include "ops/op_index.h"
#include "ops/rule.h"

rfr_status rfi_infer_matmul_gelu_bwd(const rfi_infer *c) {
  const rfr_type *a = &c->in[0], *b = &c->in[1];
  const int ta = (int)c->attr[0].i, tb = (int)c->attr[1].i;
  const rfr_dtype to = (rfr_dtype)c->attr[2].i;
  for (int i = 0; i < 2; i++) {
    RFI_TRY(rfi_rule_rank(c, i, 2, 2));
    RFI_TRY(rfi_rule_float(c, i));
    if (c->in[i].dtype == RFR_F64) return rfi_fail(RFI_E_TRACE_SHAPE, "types must be f32, bf16 or f16");
  }
  if (to != RFR_F32 && to != RFR_BF16 && to != RFR_F16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  if (a->shape[ta ? 0 : 1] != b->shape[tb ? 1 : 0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "inner dimensions differ: a gives %lld, b gives %lld",
                    (long long)a->shape[ta ? 0 : 1], (long long)b->shape[tb ? 1 : 0]);
  c->out[0] = (rfr_type){.dtype = to, .rank = 2, .shape = {a->shape[ta ? 1 : 0], b->shape[tb ? 0 : 1]}};
  return rfi_rule_type(c, RFI_IN_matmul_gelu_bwd_x, &c->out[0]);
}

void rfi_gemm_matmul_gelu_bwd(const rfi_infer *c, rfi_gemm_desc *d) {
  const rfr_type *a = &c->in[0], *b = &c->in[1];
  d->ta = c->attr[0].i != 0;
  d->tb = c->attr[1].i != 0;
  d->M = a->shape[d->ta ? 1 : 0];
  d->K = a->shape[d->ta ? 0 : 1];
  d->N = b->shape[d->tb ? 0 : 1];
  d->gelu_x = RFI_IN_matmul_gelu_bwd_x;
}
