/* SPDX-License-Identifier: Apache-2.0
 *
 * attention: o = softmax(scale q kT) v within packed documents; H heads of q share Hk heads of k and v. Optionally
 * causal, with a window, with a soft cap. Shapes, gradient and recording.
 *
 * The forward keeps o and lse, the logarithm of each row's sum of exponentials. From them one op computes all three
 * gradients without a T x T matrix. The three gradients share most of their work, so they are results of one op; an
 * unused result costs nothing.
 */
#include <math.h>

#include "ops/decode/cursor.h"
#include "ops/decode/sequence_rule.h"
#include "ops/rule.h"

rfr_status rfi_infer_attention(const rfi_infer *c);
rfr_status rfi_infer_attention_bwd(const rfi_infer *c);
rfr_status rfi_infer_attention_bwd_packed(const rfi_infer *c);
rfr_status rfi_infer_attention_cached(const rfi_infer *c);
rfr_status rfi_grad_attention(rfi_grad *g);

/* Checks q, k, v, which are operands `first` to `first` + 2. */
static rfr_status check_heads(const rfi_infer *c, int first) {
  const rfr_type *q = &c->in[first], *k = q + 1;
  for (int i = first; i < first + 3; i++) {
    RFI_TRY(rfi_rule_float(c, i));
    RFI_TRY(rfi_rule_dtype(c, i, q->dtype));
    RFI_TRY(rfi_rule_rank(c, i, 3, 3));
  }
  RFI_TRY(rfi_rule_same(c, first + 1, first + 2, true));
  if (q->dtype == RFR_F64) return rfi_fail(RFI_E_TRACE_SHAPE, "q, k and v must be f32, bf16 or f16");
  if (q->shape[2] != k->shape[2])
    return rfi_fail(RFI_E_TRACE_SHAPE, "q has rows of %lld, k has rows of %lld", (long long)q->shape[2],
                    (long long)k->shape[2]);
  if (k->shape[1] < 1 || q->shape[1] % k->shape[1] != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld heads of k and v do not divide %lld heads of q", (long long)k->shape[1],
                    (long long)q->shape[1]);
  return RFR_OK;
}

static rfr_status check_mask(const rfi_infer *c) {
  const int64_t window = c->attr[2].i;
  if (window < 0 || (window > 0 && !c->attr[1].i))
    return rfi_fail(RFI_E_TRACE_SHAPE, "window is %lld; it must be positive, and attention causal", (long long)window);
  if (!(c->attr[3].f >= 0) || !isfinite(c->attr[3].f))
    return rfi_fail(RFI_E_TRACE_SHAPE, "cap is %g; it must be positive and finite", c->attr[3].f);
  return RFR_OK;
}

/* Checks q, k, v, which must have equal numbers of rows, and the offsets at operand `offsets`. */
static rfr_status check(const rfi_infer *c, int first, int offsets) {
  const rfr_type *q = &c->in[first], *k = q + 1;
  RFI_TRY(check_heads(c, first));
  RFI_TRY(rfi_rule_rank(c, offsets, 1, 1));
  RFI_TRY(rfi_rule_dtype(c, offsets, RFR_I32));
  if (q->shape[0] != k->shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "q has %lld rows, k has %lld", (long long)q->shape[0], (long long)k->shape[0]);
  if (c->in[offsets].shape[0] < 1)
    return rfi_fail(RFI_E_TRACE_SHAPE, "offsets are empty; they need one element more than there are documents");
  RFI_TRY(check_mask(c));
  if (c->attr[4].i < 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "longest is %lld; it must be at least 0", (long long)c->attr[4].i);
  return RFR_OK;
}

rfr_status rfi_infer_attention(const rfi_infer *c) {
  RFI_TRY(check(c, 0, 3));
  c->out[0] = c->in[0];
  c->out[1] = (rfr_type){.dtype = RFR_F32, .rank = 2, .shape = {c->in[0].shape[1], c->in[0].shape[0]}};
  return RFR_OK;
}

static rfr_status check_backward(const rfi_infer *c) {
  RFI_TRY(check(c, 1, 6));
  rfr_type lse = {.dtype = RFR_F32, .rank = 2, .shape = {c->in[1].shape[1], c->in[1].shape[0]}};
  RFI_TRY(rfi_rule_same(c, 0, 1, true));
  RFI_TRY(rfi_rule_same(c, 4, 1, true));
  return rfi_rule_type(c, 5, &lse);
}

rfr_status rfi_infer_attention_bwd(const rfi_infer *c) {
  RFI_TRY(check_backward(c));
  for (int i = 0; i < 3; i++) c->out[i] = c->in[1 + i];
  return RFR_OK;
}

rfr_status rfi_infer_attention_bwd_packed(const rfi_infer *c) {
  RFI_TRY(check_backward(c));
  c->out[0] = c->in[1];
  c->out[0].shape[1] += 2 * c->in[2].shape[1];
  return RFR_OK;
}

rfr_status rfi_infer_attention_cached(const rfi_infer *call) {
  rfr_type in[4];
  rfi_infer one, *c = &one;
  RFI_TRY(rfi_infer_text(call, &rfi_split_attention_cached, 4, in, c));
  RFI_TRY(check_heads(c, 0));
  RFI_TRY(rfi_rule_dtype(c, 3, RFR_I64));
  RFI_TRY(rfi_rule_vector(c, 3, RFI_CURSOR_N));
  RFI_TRY(check_mask(c));
  if (!c->attr[1].i) return rfi_fail(RFI_E_TRACE_SHAPE, "causal is 0; attention to cached keys must be causal");
  c->out[0] = call->in[0];
  return RFR_OK;
}

rfr_status rfi_grad_attention(rfi_grad *g) {
  const rfi_opr *op = g->op;
  if (g->dy[1] != RFR_NONE) return rfi_fail(RFI_E_GRAD_NO_RULE, "result lse of attention has no gradient");
  if (g->dy[0] == RFR_NONE || !(g->need[0] || g->need[1] || g->need[2])) return RFR_OK;
  rfr_value in[7] = {g->dy[0], op->in[0], op->in[1], op->in[2], op->out[0], op->out[1], op->in[3]}, out[3];
  rfi_record(g->t, g->at, RFI_OP_attention_bwd, 7, in, op->attr, out);
  RFI_TRY(rfr_trace_status(g->t));
  for (int i = 0; i < 3; i++) {
    if (!g->need[i]) continue;
    rfi_emit_begin(g, i);
    rfi_emit_end(g, i, out[i]);
  }
  return rfr_trace_status(g->t);
}

static double scale_of(const rfr_trace *t, rfr_value q, double scale) {
  rfr_type type = rfr_value_type(t, q);
  return scale == 0 && type.rank == 3 && type.shape[2] > 0 ? 1 / sqrt((double)type.shape[2]) : scale;
}

rfr_value rfr_attention_at(rfr_trace *t, rfr_source at, rfr_value q, rfr_value k, rfr_value v, rfr_value offsets,
                           const rfr_attention_options *options) {
  rfr_attention_options o = options ? *options : (rfr_attention_options){.scale = 0};
  rfr_value in[4] = {q, k, v, offsets};
  rfi_attr attr[5] = {rfi_f(scale_of(t, q, o.scale)), rfi_i(o.causal != 0), rfi_i(o.window), rfi_f(o.cap),
                      rfi_i(o.longest)};
  return rfi_record(t, at, RFI_OP_attention, 4, in, attr, NULL);
}

rfr_value rfr_attention_cached_at(rfr_trace *t, rfr_source at, rfr_value q, rfr_value k, rfr_value v, rfr_value cursor,
                                  const rfr_attention_options *options) {
  rfr_attention_options o = options ? *options : (rfr_attention_options){.causal = 1};
  rfr_value in[4] = {q, k, v, cursor};
  rfi_attr attr[4] = {rfi_f(scale_of(t, q, o.scale)), rfi_i(o.causal != 0), rfi_i(o.window), rfi_f(o.cap)};
  return rfi_record(t, at, RFI_OP_attention_cached, 4, in, attr, NULL);
}
