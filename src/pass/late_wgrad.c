/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of a data-parallel backward. The gradient of an embedding is the last one, and often the largest, so no op
 * would overlap with its reduction. The wgrad GEMMs of the first layer, which precede it in the backward, move to the
 * positions after it. No bit of a result changes. The operands of these GEMMs live longer; if that raises the peak of
 * live bytes, the order does not change.
 */
#include "pass/pass.h"
#include "trace/live.h"

/* Whether op i is a wgrad GEMM, or a view of that phase, in the layer of op `near` and the microbatch of `last`. */
static bool is_late(const rfr_trace *t, int i, const rfi_opr *last, const rfi_opr *near) {
  const rfi_opr *op = &t->ops[i];
  return op->phase == RFR_PHASE_WGRAD && op->microbatch == last->microbatch && rfi_same_layer(op, near) &&
         (op->def->gemm || (op->def->flags & RFI_VIEW));
}

static bool is_wgrad_gemm(const rfi_opr *op) { return op->phase == RFR_PHASE_WGRAD && op->def->gemm; }

/* Marks the ops that move to the positions after op `last`. busy[], per storage: bit 0 if a later op that stays reads
 * or writes it, bit 1 if such an op writes it. */
static int mark(const rfr_trace *t, int last, uint8_t *busy, bool *moves) {
  int near = last - 1, n = 0;
  while (near >= 0 && !is_wgrad_gemm(&t->ops[near])) near--;
  for (int i = last; near >= 0 && i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    bool free = i <= near && is_late(t, i, &t->ops[last], &t->ops[near]);
    for (int k = 0; k < op->n_in; k++) free = free && (op->in[k] < 0 || busy[t->values[op->in[k]].base] < 2);
    for (int j = 0; j < op->n_out; j++) free = free && (op->out[j] < 0 || !busy[t->values[op->out[j]].base]);
    moves[i] = free;
    n += free && op->def->gemm;
    for (int k = 0; !free && k < op->n_in; k++)
      if (op->in[k] >= 0) busy[t->values[op->in[k]].base] |= 1;
    for (int j = 0; !free && j < op->n_out; j++)
      if (op->out[j] >= 0) busy[t->values[op->out[j]].base] |= 3;
  }
  return n;
}

static rfr_status move(const rfr_trace *in, int last, const bool *moves, rfr_trace **out) {
  rfi_rewrite r;
  rfr_status s = RFR_OK;
  RFI_TRY(rfi_rewrite_begin(in, &r));
  for (int late = 0; late < 2; late++) /* op `last` stays, so the ops that move come directly after it */
    for (int i = 0; i <= last && s == RFR_OK; i++)
      if (moves[i] == late) s = rfi_rewrite_op(&r, i, NULL);
  for (int i = last + 1; i < in->n_ops && s == RFR_OK; i++) s = rfi_rewrite_op(&r, i, NULL);
  if (s == RFR_OK) return rfi_rewrite_end(&r, out);
  rfi_rewrite_abort(&r);
  return s;
}

static rfr_status delay(const rfr_trace *in, int last, int n, const bool *moves, rfi_report *report, rfr_trace **out) {
  int64_t before, after;
  RFI_TRY(move(in, last, moves, out));
  rfr_status s = rfi_live_peak(in, &before);
  if (s == RFR_OK) s = rfi_live_peak(*out, &after);
  const bool kept = s == RFR_OK && after <= before;
  if (!kept) rfr_trace_destroy(*out), *out = NULL;
  if (kept) s = rfi_report_line(report, "delayed after op %d, a gradient of an embedding: %d wgrad GEMMs", last, n);
  return s;
}

rfr_status rfi_delay_wgrads(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  int last = in->n_ops - 1;
  uint8_t *busy;
  bool *moves = NULL;
  *out = NULL;
  while (last >= 0 && in->ops[last].def->code != RFI_OP_embedding_grad) last--;
  RFI_TRY(RFI_ALLOC(in->ctx, (size_t)in->n_values + 1, &busy));
  rfr_status s = RFI_ALLOC(in->ctx, sizeof *moves * (size_t)(in->n_ops + 1), &moves);
  const int n = s == RFR_OK && last >= 0 ? mark(in, last, busy, moves) : 0;
  if (n > 0) s = delay(in, last, n, moves, report, out);
  rfi_free(in->ctx, busy);
  rfi_free(in->ctx, moves);
  return s;
}
