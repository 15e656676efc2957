/* SPDX-License-Identifier: Apache-2.0
 *
 * Compares a differentiated trace with the trace in which every frozen input is trained. Both come from the same rules.
 * The report counts the bytes and ops that freezing saves. The marks of rfi_mark_reads make fusions independent of the
 * choice of frozen inputs.
 *
 * A value counts as saved if the forward computes it and a needed backward op reads it. Bytes belong to storages, so a
 * view counts for its base. Inputs do not count, nor do values that depend only on frozen inputs, because both live
 * across steps anyway. All sweeps are linear in the two traces.
 */
#include "pass/frozen.h"

#include <string.h>

/* The reads of each storage of one trace. */
typedef struct reads {
  int *first; /* the earliest backward op that is not a view; -1: none */
  int *last;  /* the latest op; -1: none */
  int *count;
  bool *by_view;
} reads;

static void reads_deinit(rfr_ctx *ctx, reads *r) {
  rfi_free(ctx, r->first);
  rfi_free(ctx, r->by_view);
}

static rfr_status find_reads(const rfi_rewrite *r, const rfr_value *cotangent, reads *out) {
  const rfr_trace *t = r->to, *from = r->from;
  const size_t n = (size_t)t->n_values + 1;
  bool *needed;
  RFI_TRY(RFI_ALLOC(t->ctx, n, &needed));
  rfr_status s = RFI_ALLOC(t->ctx, sizeof *out->first * 3 * n, &out->first);
  if (s == RFR_OK) s = RFI_ALLOC(t->ctx, n, &out->by_view);
  if (s == RFR_OK) {
    out->last = out->first + n, out->count = out->last + n;
    for (size_t v = 0; v < n; v++) out->first[v] = out->last[v] = -1;
    for (int i = 0; i < from->n_outputs; i++) needed[r->map[from->outputs[i].value]] = true;
    for (int i = 0; cotangent && i < from->n_inputs; i++)
      if (cotangent[from->inputs[i]] >= 0) needed[cotangent[from->inputs[i]]] = true;
  }
  for (int i = t->n_ops - 1; s == RFR_OK && i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    bool keep = op->def->flags & (RFI_STATE | RFI_HOST);
    for (int j = 0; j < op->n_out; j++) keep = keep || (op->out[j] >= 0 && needed[op->out[j]]);
    const bool backward =
        (op->phase == RFR_PHASE_DGRAD || op->phase == RFR_PHASE_WGRAD) && !(op->def->flags & RFI_VIEW);
    for (int k = 0; keep && k < op->n_in; k++) {
      if (op->in[k] < 0) continue;
      const rfr_value base = t->values[op->in[k]].base;
      needed[op->in[k]] = true;
      out->count[base]++;
      if (out->last[base] < 0) out->last[base] = i;
      if (op->in[k] != base) out->by_view[base] = true;
      if (backward) out->first[base] = i;
    }
  }
  rfi_free(t->ctx, needed);
  return s;
}

/* ---- matching values and ops of the two traces ---- */

typedef struct matching {
  rfr_value *value; /* per value of real->to: the same value of full->to, or RFR_NONE */
  int *op;          /* per op of real->to: the same op of full->to, or -1 */
} matching;

static bool is_same_op(const rfi_opr *a, const rfi_opr *b, const rfr_value *value) {
  if (a->def != b->def || a->n_in != b->n_in || a->microbatch != b->microbatch) return false;
  for (int k = 0; k < a->n_in; k++)
    if ((a->in[k] < 0 ? RFR_NONE : value[a->in[k]]) != b->in[k]) return false;
  return rfi_attrs_equal(a, b);
}

/* The backward ops of `real` are a subsequence of those of `full`: rules record an op for each requested gradient. */
static void match_ops(const rfi_rewrite *real, const rfi_rewrite *full, matching *m) {
  enum { MISSES = 64 }; /* the search ends after so many ops of `real` without a match, so that it stays linear */
  const rfr_trace *t = real->to, *u = full->to;
  for (int i = 0; i < t->n_ops; i++) m->op[i] = -1;
  for (rfr_value v = 0; v < t->n_values; v++) m->value[v] = RFR_NONE;
  for (rfr_value v = 0; v < real->from->n_values; v++)
    if (real->map[v] >= 0) m->value[real->map[v]] = full->map[v];
  for (int i = 0; i < real->from->n_ops; i++)
    if (real->op_map[i] >= 0) m->op[real->op_map[i]] = full->op_map[i];
  for (int i = 0, next = 0, misses = 0; i < t->n_ops && misses < MISSES; i++) {
    int j = next;
    if (m->op[i] < 0) {
      while (j < u->n_ops && !is_same_op(&t->ops[i], &u->ops[j], m->value)) j++;
      if (j == u->n_ops) {
        misses++;
        continue;
      }
      m->op[i] = j;
    }
    next = m->op[i] + 1;
    for (int k = 0; k < t->ops[i].n_out; k++)
      if (t->ops[i].out[k] >= 0) m->value[t->ops[i].out[k]] = u->ops[m->op[i]].out[k];
  }
}

static void mark_reads(const rfi_rewrite *real, const rfi_rewrite *full, const reads *read, const reads *full_read,
                       const matching *m) {
  rfr_trace *t = real->to;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfr_value same = m->value[v];
    if (t->values[v].base != v || same < 0 || full->to->values[same].base != same) continue;
    const int last = read->last[v] < 0 ? -1 : m->op[read->last[v]];
    if (full_read->count[same] > read->count[v]) t->values[v].if_trained |= RFI_READ_MORE;
    if (full_read->last[same] > last || (full_read->by_view[same] && !read->by_view[v]))
      t->values[v].if_trained |= RFI_READ_LATER;
  }
}

rfr_status rfi_mark_reads(const rfi_rewrite *real, const rfi_rewrite *full, const rfr_value *cotangent) {
  rfr_ctx *ctx = real->from->ctx;
  rfr_status s;
  reads read = {NULL}, full_read = {NULL};
  matching m = {NULL, NULL};
  RFI_GOTO(find_reads(real, NULL, &read));
  RFI_GOTO(find_reads(full, cotangent, &full_read));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *m.value * (size_t)(real->to->n_values + 1), &m.value));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *m.op * (size_t)(real->to->n_ops + 1), &m.op));
  match_ops(real, full, &m);
  mark_reads(real, full, &read, &full_read, &m);
fail:
  reads_deinit(ctx, &read);
  reads_deinit(ctx, &full_read);
  rfi_free(ctx, m.value);
  rfi_free(ctx, m.op);
  return s;
}

/* ---- the report ---- */

/* purpose: per op of full->to, the nearest frozen input whose gradient depends on it. */
static void find_purpose(const rfi_rewrite *full, const rfr_value *cotangent, rfr_value *value, rfr_value *purpose) {
  const rfr_trace *t = full->to, *from = full->from;
  for (int v = 0; v < t->n_values; v++) value[v] = RFR_NONE;
  for (int i = 0; i < from->n_inputs; i++)
    if (rfi_is_frozen_float(from, from->inputs[i]) && cotangent[from->inputs[i]] >= 0)
      value[cotangent[from->inputs[i]]] = from->inputs[i];
  for (int i = t->n_ops - 1; i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    purpose[i] = RFR_NONE;
    for (int j = 0; j < op->n_out && purpose[i] < 0; j++)
      if (op->out[j] >= 0) purpose[i] = value[op->out[j]];
    for (int k = 0; purpose[i] >= 0 && k < op->n_in; k++)
      if (op->in[k] >= 0) value[op->in[k]] = purpose[i];
  }
}

/* A value that depends only on frozen inputs and constants does not change from step to step. */
static void find_changing(const rfr_trace *t, bool *changes) {
  for (int v = 0; v < t->n_values; v++)
    changes[v] = t->values[v].op < 0 && t->values[v].role != RFR_ROLE_FROZEN && t->values[v].role != RFR_ROLE_CONST;
  rfi_reach(t, false, changes);
}

static rfr_status report_value(const rfr_trace *t, rfr_value v, const char *weight, rfi_report *report) {
  const rfi_value *x = &t->values[v];
  const rfi_opr *op = &t->ops[x->op];
  return rfi_report_line(report,
                         "pruned: result %s%s%s of op %d %s%s%s, saved only for the gradient of %s: -%lld bytes",
                         op->def->result[x->result], x->name[0] ? " " : "", x->name, x->op, op->def->name,
                         op->scope[0] ? " in " : "", op->scope, weight, (long long)rfi_bytes(&x->type));
}

rfr_status rfi_report_pruned(const rfi_rewrite *real, const rfi_rewrite *full, const rfr_value *cotangent,
                             const rfr_dtype *sum, rfi_report *report) {
  const rfr_trace *from = real->from;
  rfr_ctx *ctx = from->ctx;
  rfr_status s;
  reads read = {NULL}, full_read = {NULL};
  rfr_value *value = NULL, *purpose = NULL, *first = NULL; /* first: a weight's first value; next: a value's next one */
  bool *changes = NULL;
  int64_t gradients = 0, gradient_bytes = 0, saved = 0, saved_bytes = 0;
  RFI_GOTO(find_reads(real, NULL, &read));
  RFI_GOTO(find_reads(full, cotangent, &full_read));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *value * (size_t)(full->to->n_values + 1), &value));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *purpose * (size_t)(full->to->n_ops + 1), &purpose));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *first * 2 * (size_t)(from->n_values + 1), &first));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)from->n_values + 1, &changes));
  rfr_value *next = first + from->n_values + 1;
  find_purpose(full, cotangent, value, purpose);
  find_changing(from, changes);
  for (rfr_value v = 0; v < from->n_values; v++) first[v] = RFR_NONE;
  for (rfr_value v = from->n_values - 1; v >= 0; v--) {
    const rfi_value *x = &from->values[v];
    if (x->op < 0 || x->base != v || !changes[v] || real->map[v] < 0 || full->map[v] < 0) continue;
    int reader = full_read.first[full->map[v]];
    if (reader < 0 || read.first[real->map[v]] >= 0 || purpose[reader] < 0) continue;
    next[v] = first[purpose[reader]];
    first[purpose[reader]] = v;
  }
  for (int i = 0; i < from->n_inputs; i++) {
    rfr_value w = from->inputs[i];
    const rfi_value *x = &from->values[w];
    if (!rfi_is_frozen_float(from, w) || cotangent[w] < 0) continue;
    const int64_t bytes = rfi_count(&x->type) * rfr_dtype_bits(sum[w]) / 8;
    gradients++;
    gradient_bytes += bytes;
    RFI_GOTO(rfi_report_line(report, "pruned: gradient of frozen %s: -%lld bytes", x->name, (long long)bytes));
    for (rfr_value v = first[w]; v >= 0; v = next[v]) {
      saved++;
      saved_bytes += rfi_bytes(&from->values[v].type);
      RFI_GOTO(report_value(from, v, x->name, report));
    }
  }
  s = rfi_report_line(report, "pruned: total gradients %lld, -%lld bytes; saved values %lld, -%lld bytes",
                      (long long)gradients, (long long)gradient_bytes, (long long)saved, (long long)saved_bytes);
fail:
  reads_deinit(ctx, &read);
  reads_deinit(ctx, &full_read);
  rfi_free(ctx, value);
  rfi_free(ctx, purpose);
  rfi_free(ctx, first);
  rfi_free(ctx, changes);
  return s;
}
