/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantized storage in a step: each op that reads the result of a local op (dequantize, transposed) gets a separate
 * local op, just before it and with its labels. The same holds for ops that read a cast or quantized copy of such a
 * result. So the values of a weight are live for one GEMM: the plan reuses their bytes, they are not kept for the
 * backward, and a recomputed GEMM recomputes them. Without this, CSE would give all microbatches and the backward one
 * result that is live for the full step. A result that is an output is not changed.
 */
#include "pass/pass.h"

typedef struct split {
  rfi_rewrite r;
  const rfi_uses *uses;
  int made; /* number of local ops in the new trace */
} split;

/* Whether each reader of op i gets a separate op. */
static bool is_local(const split *s, int i) {
  const rfr_trace *t = s->r.from;
  const rfi_opr *op = &t->ops[i];
  const unsigned other = RFI_VIEW | RFI_STATE | RFI_HOST | RFI_COLLECTIVE;
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] >= 0 && s->uses[op->out[j]].output) return false;
  if (op->def->flags & RFI_LOCAL) return true;
  return op->def->flags & RFI_FORM && !(op->def->flags & other) && op->n_in <= RFI_MAX_NAMES && op->in[0] >= 0 &&
         t->values[op->in[0]].op >= 0 && is_local(s, t->values[op->in[0]].op);
}

/* The local op that computes v; -1: none. */
static int local_of(const split *s, rfr_value v) {
  const int op = v < 0 ? -1 : s->r.from->values[v].op;
  return op >= 0 && is_local(s, op) ? op : -1;
}

static bool reads(const rfi_opr *op, rfr_value v) {
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] == v) return true;
  return false;
}

/* Appends the local ops whose results `reader` reads, with the labels of `labels`. The chain is short: it ends at a
 * stored weight. */
static rfr_status make_operands(split *s, const rfi_opr *reader, const rfi_opr *labels) {
  const rfr_trace *t = s->r.from;
  for (int k = 0; k < reader->n_in; k++) {
    const int maker = local_of(s, reader->in[k]);
    bool again = false, dead[RFI_MAX_NAMES];
    rfr_value in[RFI_MAX_NAMES], out[RFI_MAX_NAMES];
    for (int j = 0; j < k; j++) again = again || (reader->in[j] >= 0 && t->values[reader->in[j]].op == maker);
    if (maker < 0 || again) continue;
    const rfi_opr *op = &t->ops[maker];
    RFI_TRY(make_operands(s, op, labels));
    for (int j = 0; j < op->n_in; j++) in[j] = op->in[j] < 0 ? RFR_NONE : s->r.map[op->in[j]];
    for (int j = 0; j < op->n_out; j++) dead[j] = op->out[j] < 0 || !reads(reader, op->out[j]);
    rfi_opr own = *op;
    own.in = in;
    own.phase = labels->phase;
    own.microbatch = labels->microbatch;
    own.scope = labels->scope;
    RFI_TRY(rfi_rewrite_new(&s->r, &own, dead, out));
    for (int j = 0; j < op->n_out; j++)
      if (!dead[j]) s->r.map[op->out[j]] = out[j];
    s->made += (op->def->flags & RFI_LOCAL) != 0;
  }
  return RFR_OK;
}

rfr_status rfi_split_dequantize(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  rfr_status s;
  split p = {.r = {.from = in}};
  rfi_uses *uses = NULL;
  int results = 0;
  *out = NULL;
  RFI_TRY(rfi_count_uses(in, &uses));
  p.uses = uses;
  RFI_GOTO(rfi_rewrite_begin(in, &p.r));
  for (int i = 0; i < in->n_ops; i++) {
    if (is_local(&p, i)) {
      results += (in->ops[i].def->flags & RFI_LOCAL) != 0;
      continue;
    }
    RFI_GOTO(make_operands(&p, &in->ops[i], &in->ops[i]));
    RFI_GOTO(rfi_rewrite_op(&p.r, i, NULL));
  }
  if (results > 0)
    RFI_GOTO(
        rfi_report_line(report, "local: %d results from stored weights, %d times, each for one GEMM", results, p.made));
  s = rfi_rewrite_end(&p.r, out);
  rfi_free(in->ctx, uses);
  return s;
fail:
  if (p.r.map) rfi_rewrite_abort(&p.r);
  rfi_free(in->ctx, uses);
  return s;
}
