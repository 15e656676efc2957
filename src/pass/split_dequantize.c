/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantized storage in a step: each op that reads the result of a dequantize op gets its own dequantize op, just before
 * it and with its labels. So the values of a weight are live for one GEMM: the plan reuses their bytes, they are not
 * kept for the backward, and a recomputed GEMM dequantizes again. Without this, CSE would give all microbatches and the
 * backward one result that is live for the full step. A result that is an output is not changed.
 */
#include "pass/pass.h"

static bool is_dequantized(const rfr_trace *t, const rfi_uses *uses, rfr_value v) {
  const int op = v < 0 ? -1 : t->values[v].op;
  return op >= 0 && (t->ops[op].def->flags & RFI_LOCAL) && !uses[v].output;
}

/* Copies op i, after dequantize ops for its operands. */
static rfr_status emit(rfi_rewrite *r, const rfi_uses *uses, int i) {
  const rfr_trace *t = r->from;
  const rfi_opr *op = &t->ops[i];
  for (int k = 0; k < op->n_in; k++) {
    bool again = false;
    for (int j = 0; j < k; j++) again = again || op->in[j] == op->in[k];
    if (again || !is_dequantized(t, uses, op->in[k])) continue;
    const rfi_opr *dequantize = &t->ops[t->values[op->in[k]].op];
    rfr_value x = r->map[dequantize->in[0]];
    rfi_opr own = *dequantize;
    own.in = &x;
    own.phase = op->phase;
    own.microbatch = op->microbatch;
    own.scope = op->scope;
    RFI_TRY(rfi_rewrite_new(r, &own, NULL, &r->map[op->in[k]]));
  }
  return rfi_rewrite_op(r, i, NULL);
}

rfr_status rfi_split_dequantize(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  rfr_status s;
  rfi_rewrite r = {.from = in};
  rfi_uses *uses = NULL;
  int weights = 0, readers = 0;
  *out = NULL;
  RFI_TRY(rfi_count_uses(in, &uses));
  RFI_GOTO(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    const rfr_value y = in->ops[i].n_out > 0 ? in->ops[i].out[0] : RFR_NONE;
    if (is_dequantized(in, uses, y)) {
      weights++;
      readers += uses[y].count;
    } else {
      RFI_GOTO(emit(&r, uses, i));
    }
  }
  if (weights > 0)
    RFI_GOTO(rfi_report_line(report, "dequantized: %d weights, before each of %d products", weights, readers));
  s = rfi_rewrite_end(&r, out);
  rfi_free(in->ctx, uses);
  return s;
fail:
  if (r.map) rfi_rewrite_abort(&r);
  rfi_free(in->ctx, uses);
  return s;
}
