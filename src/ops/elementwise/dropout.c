/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout: y = x / (1-p) where the addressed random draw keeps the element, else 0. The mask is never stored: it is a
 * function of (seed and attempted count of the step block, stream; element, site, microbatch), so the gradient is the
 * same op on dy with the same attributes, and a recomputed or replayed op draws the same mask.
 */
#include "ops/rule.h"

rfr_status rfi_infer_dropout(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_dtype(c, 1, RFR_I64));
  RFI_TRY(rfi_rule_vector(c, 1, 4));
  if (rfi_present(c, 2)) {
    RFI_TRY(rfi_rule_dtype(c, 2, RFR_I32));
    RFI_TRY(rfi_rule_vector(c, 2, 1));
  }
  double p = c->attr[0].f;
  char text[32];
  if (!(p >= 0 && p < 1))
    return rfi_fail(RFI_E_TRACE_SHAPE, "p is %s; it must be at least 0 and below 1", rfi_format_double(text, p));
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_grad_dropout(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfr_value in[3] = {g->dy[0], g->op->in[1], g->op->in[2]};
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_dropout, 3, in, g->op->attr));
  return g->t->status;
}

rfr_value rfr_dropout_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value step, double p, int stream) {
  if (!rfi_trace_records(t)) return RFR_NONE;
  rfi_attr attr[3] = {rfi_f(p), rfi_i(t->next_site++), rfi_i(rfi_stream_number(t, step, stream))};
  return rfi_record(t, at, RFI_OP_dropout, 2, (rfr_value[]){x, step}, attr, NULL);
}
