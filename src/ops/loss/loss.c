/* SPDX-License-Identifier: Apache-2.0
 *
 * The losses: shapes, gradient rule and recording calls.
 *
 * A loss is a sum over rows times inv_valid, one over the number of valid targets of the full step. inv_valid is a
 * device value, so that microbatches and ranks with different numbers of tokens add up to the mean over all tokens. It
 * counts targets and has no gradient; lse is the forward's result that the backward needs, 4 bytes per row instead of
 * the probabilities. token_loss is the same without the sum, for losses of sequences (preference.c).
 */
#include <math.h>

#include "base/base.h"
#include "ops/op_index.h"
#include "trace/trace.h"

static bool is_scalar(const rfr_type *t) { return t->dtype == RFR_F32 && t->rank == 1 && t->shape[0] == 1; }
static rfr_type vector(rfr_dtype dtype, int64_t n) { return (rfr_type){.dtype = dtype, .rank = 1, .shape = {n}}; }
static bool same_type(const rfr_type *a, const rfr_type *b) {
  if (a->dtype != b->dtype || a->rank != b->rank) return false;
  for (int d = 0; d < a->rank; d++)
    if (a->shape[d] != b->shape[d]) return false;
  return true;
}

rfr_status rfi_infer_token_count(const rfi_infer *c) {
  for (int i = 0; i < c->n_in; i++)
    if (c->in[i].dtype != RFR_I32) return rfi_fail(RFI_E_TRACE_SHAPE, "targets %d are not i32", i);
  c->out[0] = c->out[1] = vector(RFR_F32, 1);
  return RFR_OK;
}

/* Checks logits (T,V) with their targets (T), inv_valid (1; NULL: a loss per row) and, in the backward, lse (T). */
static rfr_status check_rows(const rfr_type *logits, const rfr_type *targets, const rfr_type *inv_valid,
                             const rfr_type *lse) {
  if (logits->rank != 2 || !rfr_dtype_is_float(logits->dtype) || rfr_dtype_bits(logits->dtype) < 16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "logits are %s of rank %d; they must be (T,V) in f32, bf16 or f16",
                    rfr_dtype_name(logits->dtype), logits->rank);
  int64_t rows = logits->shape[0];
  if (targets->dtype != RFR_I32 || targets->rank != 1 || targets->shape[0] != rows)
    return rfi_fail(RFI_E_TRACE_SHAPE, "targets must be i32 (%lld), one per row of logits", (long long)rows);
  if (inv_valid && !is_scalar(inv_valid))
    return rfi_fail(RFI_E_TRACE_SHAPE, "inv_valid must be f32 (1), as from token_count");
  if (lse && (lse->dtype != RFR_F32 || lse->rank != 1 || lse->shape[0] != rows))
    return rfi_fail(RFI_E_TRACE_SHAPE, "lse must be f32 (%lld)", (long long)rows);
  return RFR_OK;
}

rfr_status rfi_infer_cross_entropy(const rfi_infer *c) {
  RFI_TRY(check_rows(&c->in[0], &c->in[1], &c->in[2], NULL));
  c->out[0] = vector(RFR_F32, 1);
  c->out[1] = vector(RFR_F32, c->in[0].shape[0]);
  return RFR_OK;
}

rfr_status rfi_infer_cross_entropy_bwd(const rfi_infer *c) {
  if (!is_scalar(&c->in[0])) return rfi_fail(RFI_E_TRACE_SHAPE, "dloss must be f32 (1)");
  RFI_TRY(check_rows(&c->in[1], &c->in[2], &c->in[4], &c->in[3]));
  c->out[0] = c->in[1];
  return RFR_OK;
}

rfr_status rfi_grad_cross_entropy(rfi_grad *g) {
  const rfi_opr *op = g->op;
  if (g->need[2] || g->dy[1] != RFR_NONE)
    return rfi_fail(RFI_E_GRAD_NO_RULE, "cross_entropy has a gradient only from loss to logits");
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  g->dx[0] = rfi_record(g->t, g->at, RFI_OP_cross_entropy_bwd, 5,
                        (rfr_value[]){g->dy[0], op->in[0], op->in[1], op->out[1], op->in[2]}, &op->attr[0], NULL);
  return rfr_trace_status(g->t);
}

static rfr_status check_row_losses(const rfr_type *dnll, int64_t rows) {
  if (dnll->dtype == RFR_F32 && dnll->rank == 1 && dnll->shape[0] == rows) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "dnll must be f32 (%lld)", (long long)rows);
}

rfr_status rfi_infer_token_loss(const rfi_infer *c) {
  RFI_TRY(check_rows(&c->in[0], &c->in[1], NULL, NULL));
  c->out[0] = c->out[1] = vector(RFR_F32, c->in[0].shape[0]);
  return RFR_OK;
}

rfr_status rfi_infer_token_loss_bwd(const rfi_infer *c) {
  RFI_TRY(check_rows(&c->in[1], &c->in[2], NULL, &c->in[3]));
  RFI_TRY(check_row_losses(&c->in[0], c->in[1].shape[0]));
  c->out[0] = c->in[1];
  return RFR_OK;
}

rfr_status rfi_grad_token_loss(rfi_grad *g) {
  const rfi_opr *op = g->op;
  if (g->dy[1] != RFR_NONE) return rfi_fail(RFI_E_GRAD_NO_RULE, "token_loss has a gradient only from nll to logits");
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  g->dx[0] = rfi_record(g->t, g->at, RFI_OP_token_loss_bwd, 4,
                        (rfr_value[]){g->dy[0], op->in[0], op->in[1], op->out[1]}, &op->attr[0], NULL);
  return rfr_trace_status(g->t);
}

/* The fused heads: x, w, targets and, for the summed loss, inv_valid; then the cotangent and acc. */
static rfr_status infer_head(const rfi_infer *c, bool per_row) {
  const rfr_type *x = &c->in[0], *w = &c->in[1], *dloss = &c->in[per_row ? 3 : 4], *acc = dloss + 1;
  if (x->rank != 2 || w->rank != 2 || x->dtype != w->dtype || x->shape[1] != w->shape[1])
    return rfi_fail(RFI_E_TRACE_SHAPE, "x and w must be (T,C) and (V,C) of one type");
  rfr_type logits = {.dtype = x->dtype, .rank = 2, .shape = {x->shape[0], w->shape[0]}};
  RFI_TRY(check_rows(&logits, &c->in[2], per_row ? NULL : &c->in[3], NULL));
  if (per_row && dloss->rank >= 0) RFI_TRY(check_row_losses(dloss, x->shape[0]));
  if (!per_row && dloss->rank >= 0 && !is_scalar(dloss)) return rfi_fail(RFI_E_TRACE_SHAPE, "dloss must be f32 (1)");
  if (c->attr[1].i < 1) return rfi_fail(RFI_E_TRACE_SHAPE, "chunk must be at least one row");
  if (!(c->attr[2].f >= 0) || !isfinite(c->attr[2].f))
    return rfi_fail(RFI_E_TRACE_SHAPE, "cap is %g; it must be positive and finite", c->attr[2].f);
  const rfr_dtype to = (rfr_dtype)c->attr[3].i;
  if (to != RFR_F32 && (to != x->dtype || c->attr[2].f > 0))
    return rfi_fail(RFI_E_TRACE_SHAPE, "logits must be f32 or, without a cap, x's type %s", rfr_dtype_name(x->dtype));
  c->out[0] = vector(RFR_F32, per_row ? x->shape[0] : 1);
  c->out[1] = *x;
  c->out[2] = *w;
  c->out[2].dtype = RFR_F32;
  if (acc->rank >= 0 && !same_type(acc, &c->out[2]))
    return rfi_fail(RFI_E_TRACE_SHAPE, "acc must be f32 (%lld,%lld), as w", (long long)w->shape[0],
                    (long long)w->shape[1]);
  return RFR_OK;
}

rfr_status rfi_infer_linear_cross_entropy(const rfi_infer *c) { return infer_head(c, false); }
rfr_status rfi_infer_linear_token_loss(const rfi_infer *c) { return infer_head(c, true); }

/* Counts one GEMM for the logits, and one per gradient. */
double rfi_flops_linear_cross_entropy(const rfi_infer *c) {
  const rfr_type *x = &c->in[RFI_IN_linear_cross_entropy_x], *w = &c->in[RFI_IN_linear_cross_entropy_w];
  const int gemms =
      1 + (c->out[RFI_OUT_linear_cross_entropy_dx].rank >= 0) + (c->out[RFI_OUT_linear_cross_entropy_dw].rank >= 0);
  return 2 * (double)rfi_count(x) * (double)w->shape[0] * gemms;
}

double rfi_flops_linear_token_loss(const rfi_infer *c) {
  const rfr_type *x = &c->in[RFI_IN_linear_token_loss_x], *w = &c->in[RFI_IN_linear_token_loss_w];
  const int gemms =
      1 + (c->out[RFI_OUT_linear_token_loss_dx].rank >= 0) + (c->out[RFI_OUT_linear_token_loss_dw].rank >= 0);
  return 2 * (double)rfi_count(x) * (double)w->shape[0] * gemms;
}

rfr_value rfr_token_count_at(rfr_trace *t, rfr_source at, int n, const rfr_value *targets, int ignore,
                             rfr_value *count) {
  rfr_value out[2];
  rfi_record(t, at, RFI_OP_token_count, n, targets, (rfi_attr[]){rfi_i(ignore)}, out);
  if (count) *count = out[1];
  return out[0];
}

rfr_value rfr_cross_entropy_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value targets, rfr_value inv_valid,
                               int ignore) {
  return rfi_record(t, at, RFI_OP_cross_entropy, 3, (rfr_value[]){logits, targets, inv_valid},
                    (rfi_attr[]){rfi_i(ignore)}, NULL);
}

rfr_value rfr_token_loss_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value targets, int ignore) {
  return rfi_record(t, at, RFI_OP_token_loss, 2, (rfr_value[]){logits, targets}, (rfi_attr[]){rfi_i(ignore)}, NULL);
}
