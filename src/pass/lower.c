/* SPDX-License-Identifier: Apache-2.0
 *
 * Lower: the last pass before planning. It fuses an add with the norm that reads it (fuse_norm.c), moves quantize
 * before permute (fuse_permute.c), fuses an op with the quantize that reads it (fuse_quantize.c), and a grouped GEMM
 * with the SwiGLU that reads it (fuse_swiglu.c). Where an op's kernels need a denser operand than a view is (ops.def:
 * ROWS, ANY, or dense), it inserts a copy and reports its bytes. It copies strided outputs, because callers read
 * outputs as dense. At the end it removes dead ops.
 */
#include "pass/pass.h"

static bool accepts(const rfi_op_def *def, const rfi_value *x) {
  if (def->flags & (RFI_ANY | RFI_VIEW) || rfi_is_dense(x)) return true;
  int last = x->type.rank - 1;
  return (def->flags & RFI_ROWS) && (x->type.shape[last] == 1 || x->stride[last] == 1);
}

/* Appends a dense copy of x with the labels of `of`, the op that reads it; NULL: of an output. */
static rfr_status emit_copy(rfi_rewrite *r, const rfi_opr *of, rfr_value x, const char *reason, rfr_value *dense) {
  rfi_opr copy = {.def = rfi_op_def_get(RFI_OP_copy),
                  .n_in = 1,
                  .in = &x,
                  .phase = of ? of->phase : RFR_PHASE_OPTIM,
                  .microbatch = of ? of->microbatch : -1,
                  .clone_of = -1,
                  .scope = of ? of->scope : "",
                  .at = of ? of->at : r->to->values[x].at,
                  .reason = reason};
  return rfi_rewrite_new(r, &copy, NULL, dense);
}

/* dense[v]: the dense copy of old value v, RFR_NONE if there is none yet. Only ops that need a dense operand read it: a
 * kernel that accepts both layouts may sum in another order, and the result of an op must not depend on other ops. */
static rfr_status lower_op(rfi_rewrite *r, int i, rfr_value *dense, rfi_report *report) {
  const rfi_opr *op = &r->from->ops[i];
  rfr_value stack[32], *in = stack;
  bool dead[RFI_MAX_NAMES];
  if (op->n_in > 32) RFI_TRY(RFI_ALLOC(r->from->ctx, sizeof *in * (size_t)op->n_in, &in));
  rfr_status s = RFR_OK;
  for (int k = 0; k < op->n_in && s == RFR_OK; k++) {
    in[k] = op->in[k] < 0 ? RFR_NONE : r->map[op->in[k]];
    if (op->in[k] < 0 || accepts(op->def, &r->to->values[in[k]])) continue;
    rfr_value x = in[k];
    in[k] = dense[op->in[k]];
    if (in[k] >= 0) continue;
    s = emit_copy(r, op, x, "lowered: the next op needs a dense operand", &in[k]);
    dense[op->in[k]] = in[k];
    if (s != RFR_OK) break;
    s = rfi_report_line(report, "copied: operand %s of op %d %s%s%s, which needs it dense: +%lld bytes",
                        op->def->operand[k < op->def->n_operands ? k : op->def->n_operands - 1], i, op->def->name,
                        op->scope[0] ? " in " : "", op->scope, (long long)rfi_bytes(&r->to->values[x].type));
  }
  rfi_opr lowered = *op;
  lowered.in = in;
  for (int j = 0; j < op->n_out; j++) dead[j] = op->out[j] < 0;
  if (s == RFR_OK) s = rfi_rewrite_as(r, i, &lowered, dead);
  if (in != stack) rfi_free(r->from->ctx, in);
  return s;
}

/* Copied at the end of the trace, so that a view of a state shows the state after the step. */
static rfr_status lower_outputs(rfi_rewrite *r, const rfr_value *copied, rfi_report *report) {
  for (int i = 0; i < r->from->n_outputs; i++) {
    rfr_value old = r->from->outputs[i].value, x = r->map[old], dense = copied[old];
    if (rfi_is_dense(&r->to->values[x])) continue;
    if (dense < 0) RFI_TRY(emit_copy(r, NULL, x, "lowered: outputs are dense", &dense));
    RFI_TRY(rfi_report_line(report, "copied: output \"%s\", a strided view: +%lld bytes", r->from->outputs[i].name,
                            (long long)rfi_bytes(&r->to->values[x].type)));
    r->map[old] = dense; /* also used by a second output of the same value */
  }
  return RFR_OK;
}

static rfr_status lower(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  rfi_rewrite r;
  *out = NULL;
  RFI_TRY(rfi_rewrite_begin(in, &r));
  rfr_value *dense;
  rfr_status s = RFI_ALLOC(in->ctx, sizeof *dense * (size_t)(in->n_values + 1), &dense);
  for (int v = 0; v < in->n_values && s == RFR_OK; v++) dense[v] = RFR_NONE;
  for (int i = 0; i < in->n_ops && s == RFR_OK; i++) s = lower_op(&r, i, dense, report);
  if (s == RFR_OK) s = lower_outputs(&r, dense, report);
  rfi_free(in->ctx, dense);
  if (s == RFR_OK) return rfi_rewrite_end(&r, out);
  rfi_rewrite_abort(&r);
  return s;
}

rfr_status rfi_pass_lower(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  static rfr_status (*const rewrites[])(const rfr_trace *in, rfi_report *report, rfr_trace **out) = {
      rfi_split_lora, rfi_fuse_sums, rfi_fuse_permute, rfi_fuse_quantize, rfi_fuse_swiglu, lower, rfi_dce};
  const bool wanted[] = {o->fuse && !o->lora, o->fuse, o->fuse, o->fuse, o->fuse, true, o->prune};
  rfr_trace *before = NULL;
  for (size_t i = 0; i < sizeof rewrites / sizeof *rewrites; i++) {
    if (!wanted[i]) continue;
    rfr_status s = rewrites[i](before ? before : in, report, out);
    rfr_trace_destroy(before);
    RFI_TRY(s);
    before = *out;
  }
  return RFR_OK;
}
