/* SPDX-License-Identifier: Apache-2.0
 *
 * sum and max over one axis, which is removed, or over everything (axis -1). The smallest result has shape (1), not
 * rank 0, so that all scalars of a program look the same. Elements are added in f32 for every type; a mean is a sum in
 * f32, scaled, and only then rounded.
 */
#include "ops/rule.h"

/* ---- shapes ---- */

/* x's type without the axis. */
static rfr_status reduced(const rfi_infer *c, int64_t axis, rfr_type *y) {
  RFI_TRY(rfi_rule_float(c, 0));
  *y = (rfr_type){.dtype = c->in[0].dtype, .rank = 1, .shape = {1}};
  if (axis == -1) return RFR_OK;
  RFI_TRY(rfi_rule_axis(c, 0, axis));
  if (c->in[0].rank == 1) return RFR_OK;
  y->rank = 0;
  for (int d = 0; d < c->in[0].rank; d++)
    if (d != axis) y->shape[y->rank++] = c->in[0].shape[d];
  return RFR_OK;
}

rfr_status rfi_infer_sum(const rfi_infer *c) {
  int64_t to = c->attr[1].i;
  RFI_TRY(reduced(c, c->attr[0].i, &c->out[0]));
  if (to < 0 || to >= RFR_DTYPE_COUNT || !rfr_dtype_is_float((rfr_dtype)to) || rfr_dtype_bits((rfr_dtype)to) < 16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  c->out[0].dtype = (rfr_dtype)to;
  if (rfi_present(c, 1)) RFI_TRY(rfi_rule_type(c, 1, &c->out[0]));
  return RFR_OK;
}

rfr_status rfi_infer_max(const rfi_infer *c) {
  int64_t axis = c->attr[0].i;
  rfr_type y;
  RFI_TRY(reduced(c, axis, &y));
  if ((axis == -1 ? rfi_count(&c->in[0]) : c->in[0].shape[axis]) == 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "an empty axis has no maximum");
  c->out[0] = y;
  return RFR_OK;
}

rfr_status rfi_infer_max_bwd(const rfi_infer *c) {
  rfi_infer x = *c;
  rfr_type y;
  x.in = c->in + 1;
  x.n_in = 1;
  RFI_TRY(reduced(&x, c->attr[0].i, &y));
  RFI_TRY(rfi_rule_type(c, 0, &y));
  RFI_TRY(rfi_rule_type(c, 2, &y));
  c->out[0] = c->in[1];
  return RFR_OK;
}

/* ---- gradients ---- */

/* Every element gets its sum's gradient: cast while it is small, then expanded as a view. */
rfr_status rfi_grad_sum(rfi_grad *g) {
  if (g->dy[0] == RFR_NONE) return RFR_OK;
  if (g->need[0]) {
    rfr_type x = rfr_value_type(g->t, g->op->in[0]), one = x;
    int64_t axis = g->op->attr[0].i;
    for (int d = 0; d < one.rank; d++)
      if (axis == -1 || d == axis) one.shape[d] = 1;
    rfi_emit_begin(g, 0);
    rfr_value v = rfi_emit_cast(g, g->dy[0], rfi_emit_dtype(g, 0));
    v = rfr_reshape_at(g->t, g->at, v, one.rank, one.shape);
    for (int d = 0; d < x.rank; d++)
      if ((axis == -1 || d == axis) && x.shape[d] != 1) v = rfr_expand_at(g->t, g->at, v, d, x.shape[d]);
    rfi_emit_end(g, 0, v);
  }
  if (g->op->n_in > 1 && g->op->in[1] != RFR_NONE && g->need[1]) {
    rfi_emit_begin(g, 1);
    rfi_emit_end(g, 1, g->dy[0]);
  }
  return g->t->status;
}

rfr_status rfi_grad_max(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfr_value in[3] = {g->dy[0], g->op->in[0], g->op->out[0]};
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_max_bwd, 3, in, g->op->attr));
  return g->t->status;
}

/* ---- recording ---- */

static rfr_value sum(rfr_trace *t, rfr_source at, rfr_value x, int axis, rfr_dtype to) {
  rfi_attr attr[2] = {rfi_i(axis), rfi_i(to)};
  return rfi_record(t, at, RFI_OP_sum, 2, (rfr_value[]){x, RFR_NONE}, attr, NULL);
}

rfr_value rfr_sum_at(rfr_trace *t, rfr_source at, rfr_value x, int axis) {
  return sum(t, at, x, axis, rfr_value_type(t, x).dtype);
}

rfr_value rfr_mean_at(rfr_trace *t, rfr_source at, rfr_value x, int axis) {
  rfr_type type = rfr_value_type(t, x);
  rfr_dtype wide = type.dtype == RFR_F64 ? RFR_F64 : RFR_F32;
  int64_t n = axis >= 0 && axis < type.rank ? type.shape[axis] : rfi_count(&type);
  rfr_value y = rfr_scale_at(t, at, sum(t, at, x, axis, wide), n ? 1 / (double)n : 0, RFR_NONE);
  return type.dtype == wide ? y : rfr_cast_at(t, at, y, type.dtype);
}

rfr_value rfr_max_at(rfr_trace *t, rfr_source at, rfr_value x, int axis) {
  rfi_attr attr = rfi_i(axis);
  return rfi_record(t, at, RFI_OP_max, 1, &x, &attr, NULL);
}
