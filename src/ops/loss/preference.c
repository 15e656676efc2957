/* SPDX-License-Identifier: Apache-2.0
 *
 * Losses of sequences, for training on pairs of answers: shapes, gradient rules and recording calls.
 *
 * The loss of a sequence is the sum of its tokens' losses (token_loss), which segment_sum adds. dpo_loss compares the
 * two sequences of each pair. All of this is on the device, with a few numbers per pair, so a step has no host work
 * between forward and backward. Which pairs exist is a value, not a shape: windows hold different numbers of pairs.
 */
#include <math.h>

#include "ops/rule.h"

enum { BETA, SMOOTHING };

static rfr_type vector(rfr_dtype dtype, int64_t n) { return (rfr_type){.dtype = dtype, .rank = 1, .shape = {n}}; }

/* Operand i is i32 (segments + 1). */
static rfr_status check_offsets(const rfi_infer *c, int i) {
  RFI_TRY(rfi_rule_dtype(c, i, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, i, 1, 1));
  if (c->in[i].shape[0] < 1) return rfi_fail(RFI_E_TRACE_SHAPE, "offsets are empty; they have one more than segments");
  return RFR_OK;
}

rfr_status rfi_infer_segment_sum(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 1, 1));
  RFI_TRY(check_offsets(c, 1));
  c->out[0] = vector(RFR_F32, c->in[1].shape[0] - 1);
  return RFR_OK;
}

rfr_status rfi_infer_segment_sum_bwd(const rfi_infer *c) {
  RFI_TRY(check_offsets(c, 1));
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, 0, c->in[1].shape[0] - 1));
  if (c->attr[0].i < 0) return rfi_fail(RFI_E_TRACE_SHAPE, "rows is %lld", (long long)c->attr[0].i);
  c->out[0] = vector((rfr_dtype)c->attr[1].i, c->attr[0].i);
  return RFR_OK;
}

rfr_status rfi_grad_segment_sum(rfi_grad *g) {
  const rfr_type x = rfr_value_type(g->t, g->op->in[0]);
  if (!g->need[0]) return RFR_OK;
  rfi_emit_begin(g, 0);
  const rfr_value dx = rfi_emit(g, RFI_OP_segment_sum_bwd, 2, (rfr_value[]){g->dy[0], g->op->in[1]},
                                (rfi_attr[]){rfi_i(x.shape[0]), rfi_i(x.dtype)});
  rfi_emit_end(g, 0, dx);
  return rfr_trace_status(g->t);
}

/* sums (2P), reference f32 (P), pairs i32 (P), inv_pairs f32 (1), from operand `first`. */
static rfr_status check_pairs(const rfi_infer *c, int first) {
  RFI_TRY(rfi_rule_float(c, first));
  RFI_TRY(rfi_rule_dtype(c, first + 2, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, first + 2, 1, 1));
  const int64_t pairs = c->in[first + 2].shape[0];
  RFI_TRY(rfi_rule_vector(c, first, 2 * pairs));
  RFI_TRY(rfi_rule_dtype(c, first + 1, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, first + 1, pairs));
  RFI_TRY(rfi_rule_dtype(c, first + 3, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, first + 3, 1));
  const double beta = c->attr[BETA].f, smoothing = c->attr[SMOOTHING].f;
  if (!(beta > 0) || !isfinite(beta)) return rfi_fail(RFI_E_TRACE_SHAPE, "beta is %g; it must be greater than 0", beta);
  if (!(smoothing >= 0 && smoothing < 0.5))
    return rfi_fail(RFI_E_TRACE_SHAPE, "smoothing is %g; it must lie in [0, 0.5)", smoothing);
  return RFR_OK;
}

rfr_status rfi_infer_dpo_loss(const rfi_infer *c) {
  RFI_TRY(check_pairs(c, 0));
  c->out[0] = c->out[1] = c->out[2] = vector(RFR_F32, 1);
  return RFR_OK;
}

rfr_status rfi_infer_dpo_loss_bwd(const rfi_infer *c) {
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, 0, 1));
  RFI_TRY(check_pairs(c, 1));
  c->out[0] = c->in[1];
  return RFR_OK;
}

rfr_status rfi_grad_dpo_loss(rfi_grad *g) {
  const rfi_opr *op = g->op;
  if (g->need[1] || g->need[3] || g->dy[1] != RFR_NONE || g->dy[2] != RFR_NONE)
    return rfi_fail(RFI_E_GRAD_NO_RULE, "dpo_loss has a gradient only from loss to sums");
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  g->dx[0] = rfi_record(g->t, g->at, RFI_OP_dpo_loss_bwd, 5,
                        (rfr_value[]){g->dy[0], op->in[0], op->in[1], op->in[2], op->in[3]}, op->attr, NULL);
  return rfr_trace_status(g->t);
}

rfr_value rfr_segment_sum_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value offsets) {
  return rfi_record(t, at, RFI_OP_segment_sum, 2, (rfr_value[]){x, offsets}, NULL, NULL);
}

rfr_value rfr_dpo_loss_at(rfr_trace *t, rfr_source at, rfr_value sums, rfr_value reference, rfr_value pairs,
                          rfr_value inv_pairs, double beta, double smoothing, rfr_value *margin, rfr_value *accuracy) {
  rfr_value out[3] = {RFR_NONE, RFR_NONE, RFR_NONE};
  rfi_record(t, at, RFI_OP_dpo_loss, 4, (rfr_value[]){sums, reference, pairs, inv_pairs},
             (rfi_attr[]){rfi_f(beta), rfi_f(smoothing)}, out);
  if (margin) *margin = out[1];
  if (accuracy) *accuracy = out[2];
  return out[0];
}
