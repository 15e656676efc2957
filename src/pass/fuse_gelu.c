/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion of a dgrad with the gradient of GELU that reads it (fuse), for backends whose GEMMs apply it. Results change:
 * the GEMM result is not rounded before it is multiplied by the slope. So this pass runs before recompute, and neither
 * recompute nor frozen weights change what is fused. GELU itself stays a separate op: if it were fused with the GEMM
 * before it, it could be recomputed only together with that GEMM. Applies only to the tanh form in 16 bits: libraries
 * support no other form, and approximate the tanh.
 */
#include "ops/op_index.h"
#include "pass/pass.h"

static bool is_16_bits(rfr_dtype d) { return d == RFR_BF16 || d == RFR_F16; }

/* A GEMM of two matrices of one 16-bit type, to which nothing is added. */
static bool is_gemm(const rfr_trace *t, const rfi_opr *op) {
  if (op->def->code != RFI_OP_matmul || op->out[0] < 0 || t->values[op->out[0]].type.rank != 2) return false;
  for (int k = RFI_IN_matmul_bias; k < op->n_in; k++)
    if (op->in[k] >= 0) return false;
  const rfr_dtype a = t->values[op->in[RFI_IN_matmul_a]].type.dtype, b = t->values[op->in[RFI_IN_matmul_b]].type.dtype;
  return a == b && is_16_bits(a) && t->values[op->out[0]].type.dtype == a;
}

/* Whether op k reads y, and x exists before op i, which computes y. */
static bool is_gelu_bwd(const rfr_trace *t, int i, rfr_value y, int k) {
  const rfi_opr *op = &t->ops[k], *gemm = &t->ops[i];
  return op->def->code == RFI_OP_gelu_bwd && op->attr[RFI_AT_gelu_bwd_tanh].i && op->out[0] >= 0 &&
         op->in[RFI_IN_gelu_bwd_dy] == y && t->values[op->in[RFI_IN_gelu_bwd_x]].op < i && op->phase == gemm->phase &&
         op->microbatch == gemm->microbatch;
}

static rfr_status visit(rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *gemm = &t->ops[i];
  const rfr_value y = is_gemm(t, gemm) ? gemm->out[0] : RFR_NONE;
  if (y < 0 || w->uses[y].count != 1 || w->uses[y].output || !is_gelu_bwd(t, i, y, w->uses[y].last))
    return rfi_rewrite_op(&w->to, i, NULL);
  const rfi_opr *gelu = &t->ops[w->uses[y].last];
  rfr_value in[3], out[RFI_MAX_NAMES];
  rfi_opr op = *gemm;
  for (int k = 0; k < 2; k++) in[k] = w->to.map[gemm->in[k]];
  in[RFI_IN_matmul_gelu_bwd_x] = w->to.map[gelu->in[RFI_IN_gelu_bwd_x]];
  op.def = rfi_op_def_get(RFI_OP_matmul_gelu_bwd);
  op.n_in = 3, op.in = in;
  op.reason = "fused: dgrad + gradient of GELU";
  RFI_TRY(rfi_rewrite_new(&w->to, &op, NULL, out));
  rfi_replace_value(&w->to, gelu->out[0], out[0]);
  w->skip[w->uses[y].last] = true;
  RFI_TRY(rfr_trace_status(w->to.to));
  return rfi_report_line(w->report, "fused: op %d matmul + gelu_bwd%s%s: -%lld bytes; changes bits", i,
                         gemm->scope[0] ? " in " : "", gemm->scope, (long long)rfi_bytes(&t->values[y].type));
}

rfr_status rfi_fuse_gelu(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  return o->gelu_bwd ? rfi_rewrite_walk(in, o, report, NULL, visit, out) : rfi_copy_trace(in, out);
}
