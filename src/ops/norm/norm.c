/* SPDX-License-Identifier: Apache-2.0
 *
 * layernorm and rmsnorm over the last dimension. The forward keeps one or two f32 numbers per row (mean, rstd); the
 * backward recomputes the normalized row from x. dx, dw and db are separate ops, so that a frozen weight costs nothing.
 * If all of them are requested, the fuse pass replaces them by one op, X_bwd, which is bitwise equal on every device.
 * add_X has two results: a sum, which is the residual stream, and its norm.
 */
#include "ops/rule.h"

/* ---- shapes ---- */

/* The type of a row statistic of x: the leading dimensions, (1) if there are none. */
static rfr_type statistic(const rfr_type *x) {
  rfr_type s = *x;
  s.dtype = RFR_F32;
  s.shape[--s.rank] = 0;
  if (s.rank == 0) {
    s.rank = 1;
    s.shape[0] = 1;
  }
  return s;
}

static rfr_status check_weight(const rfi_infer *c, int x, int i) {
  RFI_TRY(rfi_rule_float(c, i));
  return rfi_rule_vector(c, i, c->in[x].shape[c->in[x].rank - 1]);
}

static rfr_status check_x(const rfi_infer *c, int x) {
  RFI_TRY(rfi_rule_float(c, x));
  return rfi_rule_rank(c, x, 1, RFR_MAX_RANK);
}

/* Checks dy, x and n row statistics that begin at operand `first`. */
static rfr_status check_backward(const rfi_infer *c, int first, int n) {
  RFI_TRY(check_x(c, 1));
  RFI_TRY(rfi_rule_same(c, 0, 1, true));
  rfr_type s = statistic(&c->in[1]);
  for (int i = first; i < first + n; i++) RFI_TRY(rfi_rule_type(c, i, &s));
  return RFR_OK;
}

static rfr_status infer_dw(const rfi_infer *c, int statistics) {
  RFI_TRY(check_backward(c, 2, statistics));
  int acc = 2 + statistics;
  rfr_type w = {.dtype = RFR_F32, .rank = 1, .shape = {c->in[1].shape[c->in[1].rank - 1]}};
  if (rfi_present(c, acc)) RFI_TRY(rfi_rule_type(c, acc, &w));
  c->out[0] = w;
  return RFR_OK;
}

/* Infers dx and the vectors; their acc operands follow the residual. */
static rfr_status infer_bwd(const rfi_infer *c, int statistics, int vectors) {
  int residual = 3 + statistics;
  RFI_TRY(check_backward(c, 3, statistics));
  RFI_TRY(check_weight(c, 1, 2));
  if (rfi_present(c, residual)) RFI_TRY(rfi_rule_same(c, 1, residual, true));
  rfr_type w = {.dtype = RFR_F32, .rank = 1, .shape = {c->in[1].shape[c->in[1].rank - 1]}};
  c->out[0] = c->in[1];
  for (int j = 1; j <= vectors; j++) {
    if (rfi_present(c, residual + j)) RFI_TRY(rfi_rule_type(c, residual + j, &w));
    c->out[j] = w;
  }
  return RFR_OK;
}

/* Infers y and the statistics from result `first` on; w and an optional bias begin at operand `w`. */
static rfr_status infer_forward(const rfi_infer *c, int w, int first, int statistics) {
  RFI_TRY(check_x(c, 0));
  RFI_TRY(check_weight(c, 0, w));
  if (rfi_present(c, w + 1)) RFI_TRY(check_weight(c, 0, w + 1));
  c->out[first] = c->in[0];
  for (int j = 1; j <= statistics; j++) c->out[first + j] = statistic(&c->in[0]);
  return RFR_OK;
}

/* The same for the norm of a sum, which is result 0. */
static rfr_status infer_sum_forward(const rfi_infer *c, int statistics) {
  RFI_TRY(check_x(c, 0));
  RFI_TRY(rfi_rule_same(c, 0, 1, true));
  c->out[0] = c->in[0];
  return infer_forward(c, 2, 1, statistics);
}

rfr_status rfi_infer_layernorm(const rfi_infer *c) { return infer_forward(c, 1, 0, 2); }
rfr_status rfi_infer_add_layernorm(const rfi_infer *c) { return infer_sum_forward(c, 2); }
rfr_status rfi_infer_layernorm_dx(const rfi_infer *c) {
  RFI_TRY(check_backward(c, 3, 2));
  RFI_TRY(check_weight(c, 1, 2));
  c->out[0] = c->in[1];
  return RFR_OK;
}
rfr_status rfi_infer_layernorm_dw(const rfi_infer *c) { return infer_dw(c, 2); }
rfr_status rfi_infer_layernorm_db(const rfi_infer *c) {
  RFI_TRY(check_x(c, 0));
  const rfr_type b = {.dtype = RFR_F32, .rank = 1, .shape = {c->in[0].shape[c->in[0].rank - 1]}};
  if (rfi_present(c, 1)) RFI_TRY(rfi_rule_type(c, 1, &b));
  c->out[0] = b;
  return RFR_OK;
}
rfr_status rfi_infer_layernorm_bwd(const rfi_infer *c) { return infer_bwd(c, 2, 3); }

rfr_status rfi_infer_rmsnorm(const rfi_infer *c) { return infer_forward(c, 1, 0, 1); }
rfr_status rfi_infer_add_rmsnorm(const rfi_infer *c) { return infer_sum_forward(c, 1); }
rfr_status rfi_infer_rmsnorm_dx(const rfi_infer *c) {
  RFI_TRY(check_backward(c, 3, 1));
  RFI_TRY(check_weight(c, 1, 2));
  c->out[0] = c->in[1];
  return RFR_OK;
}
rfr_status rfi_infer_rmsnorm_dw(const rfi_infer *c) { return infer_dw(c, 1); }
rfr_status rfi_infer_rmsnorm_bwd(const rfi_infer *c) { return infer_bwd(c, 1, 1); }

/* ---- gradients ---- */

rfr_status rfi_grad_layernorm(rfi_grad *g) {
  const rfi_opr *op = g->op;
  rfr_value dy = g->dy[0], x = op->in[0], w = op->in[1], mean = op->out[1], rstd = op->out[2];
  if (dy == RFR_NONE) return RFR_OK;
  if (g->need[0]) {
    rfi_emit_begin(g, 0);
    rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_layernorm_dx, 5, (rfr_value[]){dy, x, w, mean, rstd}, NULL));
  }
  if (g->need[1]) {
    rfi_emit_begin(g, 1);
    rfi_emit_end(g, 1, rfi_emit(g, RFI_OP_layernorm_dw, 4, (rfr_value[]){dy, x, mean, rstd}, NULL));
  }
  if (op->n_in > 2 && op->in[2] != RFR_NONE && g->need[2]) {
    rfi_emit_begin(g, 2);
    rfi_emit_end(g, 2, rfi_emit(g, RFI_OP_layernorm_db, 1, &dy, NULL));
  }
  return g->t->status;
}

rfr_status rfi_grad_rmsnorm(rfi_grad *g) {
  rfr_value dy = g->dy[0], x = g->op->in[0], w = g->op->in[1], rstd = g->op->out[1];
  if (dy == RFR_NONE) return RFR_OK;
  if (g->need[0]) {
    rfi_emit_begin(g, 0);
    rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_rmsnorm_dx, 4, (rfr_value[]){dy, x, w, rstd}, NULL));
  }
  if (g->need[1]) {
    rfi_emit_begin(g, 1);
    rfi_emit_end(g, 1, rfi_emit(g, RFI_OP_rmsnorm_dw, 3, (rfr_value[]){dy, x, rstd}, NULL));
  }
  return g->t->status;
}

/* ---- recording ---- */

rfr_value rfr_layernorm_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b, double eps) {
  rfi_attr attr = rfi_f(eps);
  return rfi_record(t, at, RFI_OP_layernorm, 3, (rfr_value[]){x, w, b}, &attr, NULL);
}

rfr_value rfr_rmsnorm_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, double eps) {
  rfi_attr attr = rfi_f(eps);
  return rfi_record(t, at, RFI_OP_rmsnorm, 2, (rfr_value[]){x, w}, &attr, NULL);
}
