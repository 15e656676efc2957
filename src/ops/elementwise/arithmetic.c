/* SPDX-License-Identifier: Apache-2.0
 *
 * add, accumulate, mul and scale. The ops themselves require equal shapes and types: a broadcast is a view (expand,
 * stride 0), so that its gradient is a separate sum that can be pruned. The recording calls insert that view for the
 * two cases that models use: a scalar, and a vector along the last dimension.
 */
#include "ops/rule.h"

static rfr_status infer_binary(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_same(c, 0, 1, true));
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_add(const rfi_infer *c) { return infer_binary(c); }
rfr_status rfi_infer_mul(const rfi_infer *c) { return infer_binary(c); }
rfr_status rfi_infer_accumulate(const rfi_infer *c) { return infer_binary(c); }

rfr_status rfi_infer_scale(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  if (rfi_present(c, 1)) {
    RFI_TRY(rfi_rule_dtype(c, 1, RFR_F32));
    RFI_TRY(rfi_rule_vector(c, 1, 1));
  }
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_grad_add(rfi_grad *g) {
  for (int i = 0; i < 2; i++) {
    if (!g->need[i] || g->dy[0] == RFR_NONE) continue;
    rfi_emit_begin(g, i);
    rfi_emit_end(g, i, g->dy[0]);
  }
  return g->t->status;
}

/* The gradient of a weight is multiplied in f32, before it is rounded to a narrower type. */
rfr_status rfi_grad_mul(rfi_grad *g) {
  for (int i = 0; i < 2; i++) {
    if (!g->need[i] || g->dy[0] == RFR_NONE) continue;
    rfi_emit_begin(g, i);
    rfr_dtype to = rfi_emit_dtype(g, i);
    rfr_value in[2] = {rfi_emit_cast(g, g->dy[0], to), rfi_emit_cast(g, g->op->in[1 - i], to)};
    rfi_emit_end(g, i, rfi_emit(g, RFI_OP_mul, 2, in, NULL));
  }
  return g->t->status;
}

rfr_status rfi_grad_scale(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfr_value in[2] = {g->dy[0], g->op->in[1]};
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_scale, 2, in, g->op->attr));
  return g->t->status;
}

/* Expands b to a's shape if it is a scalar or a vector along a's last dimension: one expand op, so that its gradient is
 * one sum. Any other b is returned unchanged, and the shape rule checks it. */
static rfr_value broadcast(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b) {
  rfr_type ta = rfr_value_type(t, a), tb = rfr_value_type(t, b);
  int64_t n = tb.shape[0], count = rfi_count(&ta);
  if (!rfi_trace_records(t) || tb.rank != 1 || ta.rank < 1) return b;
  if (ta.rank == 1 && ta.shape[0] == n) return b;
  if (n != 1 && n != ta.shape[ta.rank - 1]) return b;
  int64_t rows = n ? count / n : 0, row[2] = {1, n};
  b = rfr_expand_at(t, at, rfr_reshape_at(t, at, b, 2, row), 0, rows);
  return ta.rank == 2 ? b : rfr_reshape_at(t, at, b, ta.rank, ta.shape);
}

rfr_value rfr_add_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b) {
  rfr_value in[2] = {a, broadcast(t, at, a, b)};
  return rfi_record(t, at, RFI_OP_add, 2, in, NULL, NULL);
}

rfr_value rfr_mul_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b) {
  rfr_value in[2] = {a, broadcast(t, at, a, b)};
  return rfi_record(t, at, RFI_OP_mul, 2, in, NULL, NULL);
}

rfr_value rfr_scale_at(rfr_trace *t, rfr_source at, rfr_value x, double by, rfr_value s) {
  rfi_attr attr = rfi_f(by);
  return rfi_record(t, at, RFI_OP_scale, 2, (rfr_value[]){x, s}, &attr, NULL);
}
