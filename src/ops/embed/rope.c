/* SPDX-License-Identifier: Apache-2.0
 *
 * rope: element pairs (d, d + D/2) of each head are rotated by position * theta^(-2d/D); `inverse` rotates back, which
 * is also the gradient (the transpose of a rotation). positions: the position of each row of packed documents within
 * its document.
 *
 * For longer documents than a model was trained on, every frequency is divided by `factor` (original 0), or only the
 * low ones (Llama 3.1), see rfr_rope_scaling.
 *
 * rope_table: the same with given frequencies for the first columns of each head; the gradient keeps `scale`.
 */
#include <math.h>
#include <string.h>

#include "ops/rule.h"

static rfr_status check_operands(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 3, 3));
  RFI_TRY(rfi_rule_dtype(c, 1, RFR_I32));
  return rfi_rule_vector(c, 1, c->in[0].shape[0]);
}

rfr_status rfi_infer_rope_table(const rfi_infer *c) {
  const rfr_list *frequency = &c->attr[2].l;
  char text[32];
  RFI_TRY(check_operands(c));
  if (frequency->n < 1 || 2 * frequency->n > c->in[0].shape[2])
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld frequencies; there must be 1 to half of the last dimension of x, %lld",
                    (long long)frequency->n, (long long)c->in[0].shape[2]);
  for (int64_t d = 0; d < frequency->n; d++)
    if (!isfinite(frequency->x[d]))
      return rfi_fail(RFI_E_TRACE_SHAPE, "frequency %lld is %s; it must be finite", (long long)d,
                      rfi_format_double(text, frequency->x[d]));
  if (!(c->attr[1].f > 0) || !isfinite(c->attr[1].f))
    return rfi_fail(RFI_E_TRACE_SHAPE, "scale is %s; it must be positive", rfi_format_double(text, c->attr[1].f));
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_rope(const rfi_infer *c) {
  RFI_TRY(check_operands(c));
  char text[32];
  if (c->in[0].shape[2] % 2)
    return rfi_fail(RFI_E_TRACE_SHAPE, "the last dimension of x is %lld; it must be even",
                    (long long)c->in[0].shape[2]);
  if (!(c->attr[0].f > 0))
    return rfi_fail(RFI_E_TRACE_SHAPE, "theta is %s; it must be positive", rfi_format_double(text, c->attr[0].f));
  if (!(c->attr[2].f > 0))
    return rfi_fail(RFI_E_TRACE_SHAPE, "factor is %s; it must be positive", rfi_format_double(text, c->attr[2].f));
  if (c->attr[5].i < 0 || (c->attr[5].i > 0 && !(c->attr[3].f > 0 && c->attr[4].f > c->attr[3].f)))
    return rfi_fail(RFI_E_TRACE_SHAPE, "original is %lld; then 0 < low < high must hold", (long long)c->attr[5].i);
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_positions(const rfi_infer *c) {
  int64_t tokens = c->attr[0].i;
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, 0, 1, 1));
  if (tokens < 0 || tokens > INT32_MAX)
    return rfi_fail(RFI_E_TRACE_SHAPE, "tokens is %lld; it must be 0 to %d", (long long)tokens, INT32_MAX);
  c->out[0] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {tokens}};
  return RFR_OK;
}

/* `inverse`: the index of this attribute, the only one that changes. */
static rfr_status rotate_back(rfi_grad *g, rfi_opcode code, int n_attrs, int inverse) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_attr attr[6];
  memcpy(attr, g->op->attr, sizeof *attr * (size_t)n_attrs);
  attr[inverse] = rfi_i(!attr[inverse].i);
  rfr_value in[2] = {g->dy[0], g->op->in[1]};
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, code, 2, in, attr));
  return g->t->status;
}

rfr_status rfi_grad_rope(rfi_grad *g) { return rotate_back(g, RFI_OP_rope, 6, 1); }
rfr_status rfi_grad_rope_table(rfi_grad *g) { return rotate_back(g, RFI_OP_rope_table, 3, 0); }

rfr_value rfr_rope_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value positions, double theta,
                      const rfr_rope_scaling *scaling) {
  const rfr_rope_scaling s = scaling ? *scaling : (rfr_rope_scaling){.factor = 1};
  rfi_attr attr[6] = {rfi_f(theta), rfi_i(0), rfi_f(s.factor), rfi_f(s.low), rfi_f(s.high), rfi_i(s.original)};
  return rfi_record(t, at, RFI_OP_rope, 2, (rfr_value[]){x, positions}, attr, NULL);
}

rfr_value rfr_rope_table_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value positions, const double *frequency,
                            int n, double scale) {
  rfi_attr attr[3] = {rfi_i(0), rfi_f(scale), rfi_i(0)};
  attr[2].l = (rfr_list){n, frequency};
  return rfi_record(t, at, RFI_OP_rope_table, 2, (rfr_value[]){x, positions}, attr, NULL);
}

rfr_value rfr_positions_at(rfr_trace *t, rfr_source at, rfr_value offsets, int64_t tokens) {
  rfi_attr attr = rfi_i(tokens);
  return rfi_record(t, at, RFI_OP_positions, 1, &offsets, &attr, NULL);
}
