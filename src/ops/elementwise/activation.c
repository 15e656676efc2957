/* SPDX-License-Identifier: Apache-2.0
 *
 * gelu, silu, swiglu (weighted or not) and softcap, and the ops of their gradients. A backward op reads the input of
 * the forward and computes the function again: saving its result would cost memory, and computing it is cheaper than
 * reading it back. The backward of softcap reads the result, which the loss that follows keeps anyway.
 */
#include <math.h>

#include "ops/op_index.h"
#include "ops/rule.h"

static rfr_status infer_same(const rfi_infer *c, int n_out) {
  RFI_TRY(rfi_rule_float(c, 0));
  for (int i = 1; i < c->n_in; i++)
    if (c->in[i].rank >= 0) RFI_TRY(rfi_rule_same(c, 0, i, true));
  for (int j = 0; j < n_out; j++) c->out[j] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_gelu(const rfi_infer *c) { return infer_same(c, 1); }
rfr_status rfi_infer_gelu_bwd(const rfi_infer *c) { return infer_same(c, 1); }
rfr_status rfi_infer_silu(const rfi_infer *c) { return infer_same(c, 1); }
rfr_status rfi_infer_silu_bwd(const rfi_infer *c) { return infer_same(c, 1); }
rfr_status rfi_infer_swiglu(const rfi_infer *c) { return infer_same(c, 1); }
rfr_status rfi_infer_swiglu_bwd(const rfi_infer *c) { return infer_same(c, 3); }

rfr_status rfi_infer_swiglu_bwd_packed(const rfi_infer *c) {
  RFI_TRY(infer_same(c, 2));
  if (c->out[0].rank == 0) return rfi_fail(RFI_E_TRACE_SHAPE, "operands of rank 0 cannot be packed side by side");
  c->out[0].shape[c->out[0].rank - 1] *= 2;
  return RFR_OK;
}

/* Checks that operand `weight` has a weight per row, and that the other operands are matrices of one type. */
static rfr_status check_weighted(const rfi_infer *c, int weight) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  for (int i = 1; i < c->n_in; i++)
    if (i != weight && c->in[i].rank >= 0) RFI_TRY(rfi_rule_same(c, 0, i, true));
  RFI_TRY(rfi_rule_float(c, weight));
  return rfi_rule_vector(c, weight, c->in[0].shape[0]);
}

rfr_status rfi_infer_swiglu_weighted(const rfi_infer *c) {
  RFI_TRY(check_weighted(c, RFI_IN_swiglu_weighted_weight));
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_swiglu_weighted_bwd(const rfi_infer *c) {
  RFI_TRY(check_weighted(c, RFI_IN_swiglu_weighted_bwd_weight));
  c->out[0] = c->in[3];
  c->out[1] = c->out[2] = c->out[3] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_swiglu_weighted_bwd_packed(const rfi_infer *c) {
  RFI_TRY(check_weighted(c, RFI_IN_swiglu_weighted_bwd_packed_weight));
  c->out[0] = c->in[3];
  c->out[1] = c->out[2] = c->in[0];
  c->out[1].shape[1] *= 2;
  return RFR_OK;
}

/* `onto`, the last operand, is not read: result h overwrites it. */
static double bytes_without_onto(const rfi_infer *c) {
  double bytes = 0;
  for (int k = 0; k < c->n_in - 1; k++) bytes += (double)rfi_bytes(&c->in[k]);
  for (int j = 0; j < c->def->n_results; j++)
    if (c->out[j].rank >= 0) bytes += (double)rfi_bytes(&c->out[j]);
  return bytes;
}
double rfi_bytes_swiglu_bwd(const rfi_infer *c) { return bytes_without_onto(c); }
double rfi_bytes_swiglu_bwd_packed(const rfi_infer *c) { return bytes_without_onto(c); }
double rfi_bytes_swiglu_weighted_bwd(const rfi_infer *c) { return bytes_without_onto(c); }
double rfi_bytes_swiglu_weighted_bwd_packed(const rfi_infer *c) { return bytes_without_onto(c); }

static rfr_status infer_softcap(const rfi_infer *c) {
  if (!(c->attr[0].f > 0) || !isfinite(c->attr[0].f))
    return rfi_fail(RFI_E_TRACE_SHAPE, "cap is %g; it must be positive and finite", c->attr[0].f);
  return infer_same(c, 1);
}
rfr_status rfi_infer_softcap(const rfi_infer *c) { return infer_softcap(c); }
rfr_status rfi_infer_softcap_bwd(const rfi_infer *c) { return infer_softcap(c); }

/* `of`: the operand or result of the forward that the backward reads. */
static rfr_status grad_unary(rfi_grad *g, rfi_opcode bwd, rfr_value of) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfr_value in[2] = {g->dy[0], of};
  rfi_emit_end(g, 0, rfi_emit(g, bwd, 2, in, g->op->attr));
  return g->t->status;
}

rfr_status rfi_grad_gelu(rfi_grad *g) { return grad_unary(g, RFI_OP_gelu_bwd, g->op->in[0]); }
rfr_status rfi_grad_silu(rfi_grad *g) { return grad_unary(g, RFI_OP_silu_bwd, g->op->in[0]); }
rfr_status rfi_grad_softcap(rfi_grad *g) { return grad_unary(g, RFI_OP_softcap_bwd, g->op->out[0]); }

/* One op for both gradients, because they share the sigmoid and all operands; an unused result costs nothing. */
rfr_status rfi_grad_swiglu(rfi_grad *g) {
  if ((!g->need[0] && !g->need[1]) || g->dy[0] == RFR_NONE) return RFR_OK;
  rfr_value in[3] = {g->dy[0], g->op->in[0], g->op->in[1]}, out[RFI_MAX_NAMES];
  rfi_record(g->t, g->at, RFI_OP_swiglu_bwd, 3, in, NULL, out);
  for (int i = 0; i < 2; i++) {
    if (!g->need[i]) continue;
    rfi_emit_begin(g, i);
    rfi_emit_end(g, i, out[i]);
  }
  return g->t->status;
}

/* Also one op: the sum over a row reads the same operands as the other two gradients. */
rfr_status rfi_grad_swiglu_weighted(rfi_grad *g) {
  enum { WEIGHT = 2 };
  static const int result[] = {1, 2, 0};
  const rfr_value *x = g->op->in;
  rfr_value out[RFI_MAX_NAMES];
  if ((!g->need[0] && !g->need[1] && !g->need[WEIGHT]) || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_record(g->t, g->at, RFI_OP_swiglu_weighted_bwd, 4, (rfr_value[]){g->dy[0], x[0], x[1], x[WEIGHT]}, NULL, out);
  for (int i = 0; i <= WEIGHT; i++) {
    if (!g->need[i]) continue;
    rfi_emit_begin(g, i);
    rfi_emit_end(g, i, out[result[i]]);
  }
  return g->t->status;
}

rfr_value rfr_gelu_at(rfr_trace *t, rfr_source at, rfr_value x, int tanh_form) {
  rfi_attr attr = rfi_i(tanh_form != 0);
  return rfi_record(t, at, RFI_OP_gelu, 1, &x, &attr, NULL);
}

rfr_value rfr_silu_at(rfr_trace *t, rfr_source at, rfr_value x) {
  return rfi_record(t, at, RFI_OP_silu, 1, &x, NULL, NULL);
}

rfr_value rfr_swiglu_at(rfr_trace *t, rfr_source at, rfr_value gate, rfr_value up) {
  return rfi_record(t, at, RFI_OP_swiglu, 2, (rfr_value[]){gate, up}, NULL, NULL);
}

rfr_value rfr_swiglu_weighted_at(rfr_trace *t, rfr_source at, rfr_value gate, rfr_value up, rfr_value weight) {
  return rfi_record(t, at, RFI_OP_swiglu_weighted, 3, (rfr_value[]){gate, up, weight}, NULL, NULL);
}

rfr_value rfr_softcap_at(rfr_trace *t, rfr_source at, rfr_value x, double cap) {
  rfi_attr attr = rfi_f(cap);
  return rfi_record(t, at, RFI_OP_softcap, 1, &x, &attr, NULL);
}
