/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion with quantize (lower): a norm, SwiGLU or its gradients, and the quantize ops that read the result, become one
 * op, X_quantize (src/ops/quant/fused.h). If no other op reads the result, it is not stored in 16 bits. Exact: the
 * result is rounded before it is quantized. It runs after recompute, because a recomputed norm or SwiGLU needs fewer
 * operands than it has here, and after an add is fused with its norm. Only one scale for a tensor: the other scalings
 * have separate kernels.
 */
#include "ops/quant/fused.h"
#include "pass/pass.h"

/* Whether the value exists before op i, or is a slice of an input and can be recorded there. */
static bool is_ready(const rfr_trace *t, rfr_value v, int i) {
  const int op = v < 0 ? -1 : t->values[v].op;
  if (op < i) return true;
  return t->ops[op].def->code == RFI_OP_slice && t->values[t->ops[op].in[0]].op < 0;
}

/* Whether quantize at op k encodes value x in a way that the fused op has. */
static bool takes(const rfi_rewriter *w, int i, int k, rfr_value x) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *q = &t->ops[k];
  return q->def->code == RFI_OP_quantize && q->in[RFI_IN_quantize_x] == x && rfi_run_together(&t->ops[i], q) &&
         q->attr[RFI_AT_quantize_scaling].i == RFR_SCALING_TENSOR && t->values[x].type.rank == 2 &&
         is_ready(t, q->in[RFI_IN_quantize_scale], i) && rfi_is_unread(w, q->out[RFI_OUT_quantize_row_global]) &&
         rfi_is_unread(w, q->out[RFI_OUT_quantize_col_global]);
}

/* Finds the quantize op of each quantized result of op i; false: the ops stay separate. */
static bool match(const rfi_rewriter *w, int i, rfi_fused_form *form, int found[RFI_FUSED_PARTS]) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *op = &t->ops[i];
  if (op->def->outside || !rfi_fused_find(op->def->code, false, form)) return false;
  for (int k = form->n_in; k < op->n_in; k++)
    if (op->in[k] >= 0) return false; /* op i also recomputes a value of the forward */
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] >= 0 && !rfi_is_dense(&t->values[op->in[k]])) return false;
  for (int p = 0; p < form->parts; p++) {
    const rfr_value x = op->out[form->first + p];
    found[p] = -1;
    for (int k = i + 1; x >= 0 && found[p] < 0 && k <= w->uses[x].last && k < t->n_ops; k++)
      if (!w->skip[k] && takes(w, i, k, x)) found[p] = k;
    if (found[p] < 0) return false;
    const rfi_attr *a = t->ops[found[0]].attr, *b = t->ops[found[p]].attr;
    if (a[RFI_AT_quantize_format].i != b[RFI_AT_quantize_format].i ||
        a[RFI_AT_quantize_options].i != b[RFI_AT_quantize_options].i ||
        (t->ops[found[0]].in[RFI_IN_quantize_scale] < 0) != (t->ops[found[p]].in[RFI_IN_quantize_scale] < 0))
      return false;
  }
  return true;
}

/* The scale in the new trace; records its slice now if that comes later in the old trace. */
static rfr_status scale_of(rfi_rewriter *w, rfr_value scale, rfr_value *out) {
  *out = RFR_NONE;
  if (scale < 0) return RFR_OK;
  if (w->to.map[scale] < 0) {
    const int op = w->to.from->values[scale].op;
    RFI_TRY(rfi_rewrite_op(&w->to, op, NULL));
    w->skip[op] = true;
  }
  *out = w->to.map[scale];
  return RFR_OK;
}

static rfr_status emit(rfi_rewriter *w, int i, const rfi_fused_form *form, const int found[RFI_FUSED_PARTS]) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *op = &t->ops[i];
  rfr_value in[RFI_MAX_NAMES], out[RFI_MAX_NAMES];
  rfi_attr attr[4];
  bool dead[RFI_MAX_NAMES] = {false};
  int64_t bytes = 0;
  rfi_opr fused = *op;
  for (int k = 0; k < form->n_in; k++) in[k] = k < op->n_in && op->in[k] >= 0 ? w->to.map[op->in[k]] : RFR_NONE;
  for (int k = 0; k < form->n_attrs; k++) attr[k] = op->attr[k];
  attr[form->n_attrs] = t->ops[found[0]].attr[RFI_AT_quantize_format];
  attr[form->n_attrs + 1] = t->ops[found[0]].attr[RFI_AT_quantize_options];
  for (int j = 0; j < form->n_out; j++) dead[j] = op->out[j] < 0;
  for (int p = 0; p < form->parts; p++) {
    const rfi_opr *q = &t->ops[found[p]];
    const int x = form->first + p;
    RFI_TRY(scale_of(w, q->in[RFI_IN_quantize_scale], &in[form->n_in + p]));
    const bool alone = w->uses[op->out[x]].count == 1 && !w->uses[op->out[x]].output;
    dead[x] = dead[x] || alone;
    bytes += rfi_bytes(&t->values[op->out[x]].type) * (alone ? 2 : 1);
    for (int k = 0; k < RFI_FUSED_RESULTS; k++)
      dead[form->n_out + p * RFI_FUSED_RESULTS + k] = q->out[rfi_fused_result(k)] < 0;
  }
  fused.def = rfi_op_def_get(form->fused);
  fused.n_in = form->n_in + form->parts;
  fused.in = in;
  fused.attr = attr;
  fused.clone_of = op->clone_of < 0 ? -1 : w->to.op_map[op->clone_of];
  fused.reason = "fused: with quantize";
  RFI_TRY(rfi_rewrite_new(&w->to, &fused, dead, out));
  w->to.op_map[i] = w->to.to->n_ops - 1;
  for (int j = 0; j < form->n_out; j++)
    if (!dead[j]) rfi_replace_value(&w->to, op->out[j], out[j]);
  for (int p = 0; p < form->parts; p++) {
    const rfi_opr *q = &t->ops[found[p]];
    const int first = form->n_out + p * RFI_FUSED_RESULTS;
    w->to.op_map[found[p]] = w->to.to->n_ops - 1;
    w->skip[found[p]] = true;
    for (int k = 0; k < RFI_FUSED_RESULTS; k++)
      if (!dead[first + k]) rfi_replace_value(&w->to, q->out[rfi_fused_result(k)], out[first + k]);
  }
  RFI_TRY(rfr_trace_status(w->to.to));
  return rfi_report_line(w->report, "fused: op %d %s%s%s with quantize: -%lld bytes moved; exact", i, op->def->name,
                         op->scope[0] ? " in " : "", op->scope, (long long)bytes);
}

static rfr_status visit(rfi_rewriter *w, int i) {
  rfi_fused_form form;
  int found[RFI_FUSED_PARTS];
  return match(w, i, &form, found) ? emit(w, i, &form, found) : rfi_rewrite_op(&w->to, i, NULL);
}

rfr_status rfi_fuse_quantize(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, NULL, report, NULL, visit, out);
}
