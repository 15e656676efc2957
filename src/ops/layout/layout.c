/* SPDX-License-Identifier: Apache-2.0
 *
 * pad and concat, the layout ops that move bytes, and the two placeholders of autodiff: `gradient` stands for d loss /
 * d w, `cotangent` for a loss whose gradient with respect to y is given.
 */
#include "ops/rule.h"

/* ---- shapes ---- */

rfr_status rfi_infer_pad(const rfi_infer *c) {
  int64_t axis = c->attr[0].i, start = c->attr[1].i, count = c->attr[2].i, bits = rfr_dtype_bits(c->in[0].dtype);
  RFI_TRY(rfi_rule_axis(c, 0, axis));
  if (bits < 8)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, whose elements are smaller than a byte",
                    rfr_dtype_name(c->in[0].dtype));
  int64_t n = c->in[0].shape[axis];
  if (start < 0 || count < n || start > count - n)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld elements at %lld do not fit into %lld", (long long)n, (long long)start,
                    (long long)count);
  c->out[0] = c->in[0];
  c->out[0].shape[axis] = count;
  for (int d = 0; d < c->out[0].rank; d++)
    if (__builtin_mul_overflow(bits, c->out[0].shape[d] ? c->out[0].shape[d] : 1, &bits))
      return rfi_fail(RFI_E_OVERFLOW, "the padded size overflows");
  return RFR_OK;
}

rfr_status rfi_infer_concat(const rfi_infer *c) {
  int64_t axis = c->attr[0].i, total = 0;
  if (c->n_in < 1) return rfi_fail(RFI_E_TRACE_SHAPE, "there are no operands");
  RFI_TRY(rfi_rule_axis(c, 0, axis));
  if (rfr_dtype_bits(c->in[0].dtype) < 8)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, whose elements are smaller than a byte",
                    rfr_dtype_name(c->in[0].dtype));
  for (int i = 0; i < c->n_in; i++) {
    rfr_type like = c->in[0];
    if (c->in[i].rank == like.rank) like.shape[axis] = c->in[i].shape[axis];
    RFI_TRY(rfi_rule_type(c, i, &like));
    if (__builtin_add_overflow(total, like.shape[axis], &total))
      return rfi_fail(RFI_E_OVERFLOW, "the concatenated size overflows");
  }
  c->out[0] = c->in[0];
  c->out[0].shape[axis] = total;
  return RFR_OK;
}

rfr_status rfi_infer_gradient(const rfi_infer *c) {
  int64_t to = c->attr[0].i;
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, 0, 1));
  RFI_TRY(rfi_rule_float(c, 1));
  if (to < 0 || to >= RFR_DTYPE_COUNT || !rfr_dtype_is_float((rfr_dtype)to) || rfr_dtype_bits((rfr_dtype)to) < 16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "a gradient must be f32, bf16 or f16");
  c->out[0] = c->in[1];
  c->out[0].dtype = (rfr_dtype)to;
  return rfi_present(c, 2) ? rfi_rule_type(c, 2, &c->out[0]) : RFR_OK;
}

rfr_status rfi_infer_cotangent(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_same(c, 0, 1, true));
  c->out[0] = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {1}};
  return RFR_OK;
}

/* ---- gradients ---- */

/* A loss is a sum of these ops, so the gradient with respect to the loss is 1. */
rfr_status rfi_grad_cotangent(rfi_grad *g) {
  if (g->need[0] && g->dy[0] != RFR_NONE) g->dx[0] = g->op->in[1];
  return RFR_OK;
}

static void emit_slice(rfi_grad *g, int i, int64_t axis, int64_t start) {
  rfr_type x = rfr_value_type(g->t, g->op->in[i]);
  rfi_attr slice[3] = {rfi_i(axis), rfi_i(start), rfi_i(x.shape[axis])};
  rfi_emit_begin(g, i);
  rfi_emit_end(g, i, rfi_emit(g, RFI_OP_slice, 1, &g->dy[0], slice));
}

rfr_status rfi_grad_pad(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  emit_slice(g, 0, g->op->attr[0].i, g->op->attr[1].i);
  return g->t->status;
}

rfr_status rfi_grad_concat(rfi_grad *g) {
  int64_t axis = g->op->attr[0].i, start = 0;
  if (g->dy[0] == RFR_NONE) return RFR_OK;
  for (int i = 0; i < g->op->n_in; i++) {
    if (g->need[i]) emit_slice(g, i, axis, start);
    start += rfr_value_type(g->t, g->op->in[i]).shape[axis];
  }
  return g->t->status;
}

/* ---- recording ---- */

rfr_value rfr_concat_at(rfr_trace *t, rfr_source at, int n, const rfr_value *xs, int axis) {
  rfi_attr attr = rfi_i(axis);
  return rfi_record(t, at, RFI_OP_concat, n, xs, &attr, NULL);
}

static rfr_value record_gradient(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_value onto,
                                 rfr_dtype to) {
  rfi_attr attr = rfi_i(to);
  if (rfi_trace_records(t) && w >= 0 && w < t->n_values) {
    const rfi_value *v = &t->values[w];
    if (v->op >= 0 || (v->role != RFR_ROLE_TRAINABLE && v->role != RFR_ROLE_INPUT_GRAD))
      return rfi_trace_fail(t, at, "gradient", RFI_E_GRAD_ROLE,
                            "%s%s%s is not an input of role trainable or input_grad", v->name[0] ? "\"" : "w", v->name,
                            v->name[0] ? "\"" : "");
  }
  return rfi_record(t, at, RFI_OP_gradient, onto == RFR_NONE ? 2 : 3, (rfr_value[]){loss, w, onto}, &attr, NULL);
}

rfr_value rfr_gradient_at(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_dtype to) {
  return record_gradient(t, at, loss, w, RFR_NONE, to);
}

rfr_value rfr_gradient_onto_at(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_value onto) {
  if (!rfi_trace_records(t)) return RFR_NONE;
  if (onto < 0 || onto >= t->n_values || t->values[onto].op >= 0 || t->values[onto].role != RFR_ROLE_STATE)
    return rfi_trace_fail(t, at, "gradient", RFI_E_GRAD_ROLE, "onto is not an input of role state");
  return record_gradient(t, at, loss, w, onto, t->values[onto].type.dtype);
}
