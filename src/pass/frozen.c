/* SPDX-License-Identifier: Apache-2.0
 *
 * What freezing saves, exactly: the joint trace as it is against the joint trace as it
 * would be if every frozen input were trained, both made by the same rules.
 *
 * A value is saved when the forward made it and a backward op that is needed reads it.
 * Bytes belong to storages, so views count for what they look into; inputs, and what
 * depends on frozen inputs alone and so lives across steps anyway, do not count. All
 * sweeps are linear in the two traces.
 */
#include "pass/frozen.h"

/* The earliest needed backward op of r->to that reads each storage, -1: none. */
static rfr_status find_readers(const rfi_rewrite *r, const rfr_value *cotangent, int **out) {
  const rfr_trace *t = r->to, *from = r->from;
  bool *needed;
  int *reader;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(t->ctx, (size_t)t->n_values + 1, &needed));
  rfr_status s = RFI_ALLOC(t->ctx, sizeof *reader * (size_t)(t->n_values + 1), &reader);
  for (int i = 0; s == RFR_OK && i < from->n_outputs; i++) needed[r->map[from->outputs[i].value]] = true;
  for (int i = 0; s == RFR_OK && cotangent && i < from->n_inputs; i++)
    if (cotangent[from->inputs[i]] >= 0) needed[cotangent[from->inputs[i]]] = true;
  for (int v = 0; s == RFR_OK && v < t->n_values; v++) reader[v] = -1;
  for (int i = t->n_ops - 1; s == RFR_OK && i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    bool keep = op->def->flags & (RFI_STATE | RFI_HOST);
    for (int j = 0; j < op->n_out; j++) keep = keep || (op->out[j] >= 0 && needed[op->out[j]]);
    bool backward = (op->phase == RFR_PHASE_DGRAD || op->phase == RFR_PHASE_WGRAD) && !(op->def->flags & RFI_VIEW);
    for (int k = 0; keep && k < op->n_in; k++) {
      if (op->in[k] < 0) continue;
      needed[op->in[k]] = true;
      if (backward) reader[t->values[op->in[k]].base] = i;
    }
  }
  rfi_free(t->ctx, needed);
  *out = s == RFR_OK ? reader : NULL;
  return s;
}

/* For each op of whole->to a frozen input whose gradient it leads to, the one that is nearest. */
static void find_purpose(const rfi_rewrite *whole, const rfr_value *cotangent, rfr_value *value, rfr_value *purpose) {
  const rfr_trace *t = whole->to, *from = whole->from;
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

/* Whether a value changes from step to step: what depends on frozen inputs alone does not. */
static void find_changing(const rfr_trace *t, bool *changes) {
  for (int v = 0; v < t->n_values; v++)
    changes[v] = t->values[v].op < 0 && t->values[v].role != RFR_ROLE_FROZEN && t->values[v].role != RFR_ROLE_CONST;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    bool any = false;
    for (int k = 0; k < op->n_in; k++) any = any || (op->in[k] >= 0 && changes[op->in[k]]);
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0) changes[op->out[j]] = any;
  }
}

static rfr_status report_value(const rfr_trace *t, rfr_value v, const char *weight, rfi_report *report) {
  const rfi_value *x = &t->values[v];
  const rfi_opr *op = &t->ops[x->op];
  return rfi_report_line(report, "pruned: %s%s%s of op %d %s%s%s, saved for the gradient of %s: -%lld bytes",
                         op->def->result[x->result], x->name[0] ? " " : "", x->name, x->op, op->def->name,
                         op->scope[0] ? " in " : "", op->scope, weight, (long long)rfi_bytes(&x->type));
}

rfr_status rfi_report_pruned(const rfi_rewrite *real, const rfi_rewrite *whole, const rfr_value *cotangent,
                             rfi_report *report) {
  const rfr_trace *from = real->from;
  rfr_ctx *ctx = from->ctx;
  rfr_status s;
  int *read = NULL, *whole_read = NULL;
  rfr_value *value = NULL, *purpose = NULL, *first = NULL; /* first: of a weight's values; next: of a value */
  bool *changes = NULL;
  int64_t gradients = 0, gradient_bytes = 0, saved = 0, saved_bytes = 0;
  RFI_GOTO(find_readers(real, NULL, &read));
  RFI_GOTO(find_readers(whole, cotangent, &whole_read));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *value * (size_t)(whole->to->n_values + 1), &value));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *purpose * (size_t)(whole->to->n_ops + 1), &purpose));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *first * 2 * (size_t)(from->n_values + 1), &first));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)from->n_values + 1, &changes));
  rfr_value *next = first + from->n_values + 1;
  find_purpose(whole, cotangent, value, purpose);
  find_changing(from, changes);
  for (rfr_value v = 0; v < from->n_values; v++) first[v] = RFR_NONE;
  for (rfr_value v = from->n_values - 1; v >= 0; v--) {
    const rfi_value *x = &from->values[v];
    if (x->op < 0 || x->base != v || !changes[v] || real->map[v] < 0 || whole->map[v] < 0) continue;
    int reader = whole_read[whole->map[v]];
    if (reader < 0 || read[real->map[v]] >= 0 || purpose[reader] < 0) continue;
    next[v] = first[purpose[reader]];
    first[purpose[reader]] = v;
  }
  for (int i = 0; i < from->n_inputs; i++) {
    rfr_value w = from->inputs[i];
    const rfi_value *x = &from->values[w];
    if (!rfi_is_frozen_float(from, w) || cotangent[w] < 0) continue;
    gradients++;
    gradient_bytes += rfi_count(&x->type) * 4;
    RFI_GOTO(rfi_report_line(report, "pruned: the gradient of %s, it is frozen: -%lld bytes", x->name,
                             (long long)rfi_count(&x->type) * 4));
    for (rfr_value v = first[w]; v >= 0; v = next[v]) {
      saved++;
      saved_bytes += rfi_bytes(&from->values[v].type);
      RFI_GOTO(report_value(from, v, x->name, report));
    }
  }
  s = rfi_report_line(report, "pruned in all: gradients %lld, -%lld bytes; saved values %lld, -%lld bytes",
                      (long long)gradients, (long long)gradient_bytes, (long long)saved, (long long)saved_bytes);
fail:
  rfi_free(ctx, read);
  rfi_free(ctx, whole_read);
  rfi_free(ctx, value);
  rfi_free(ctx, purpose);
  rfi_free(ctx, first);
  rfi_free(ctx, changes);
  return s;
}
