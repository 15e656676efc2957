/* SPDX-License-Identifier: Apache-2.0
 *
 * Lifetimes: the first and the last op that touch each storage. A view or a next version counts for its base. Inputs
 * are always live; the storage of an output is live to the end. Printing and planning both use these lifetimes, so the
 * bytes in a printed trace are those of the plan.
 */
#include "trace/live.h"

#include "base/base.h"

static void touch(rfi_life *life, int op) {
  if (life->first < 0) life->first = op;
  life->last = op;
}

rfr_status rfi_lives(const rfr_trace *t, rfi_life **out) {
  rfi_life *life;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *life * (size_t)t->n_values, &life));
  for (int v = 0; v < t->n_values; v++) life[v] = (rfi_life){-1, -1, false};
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    /* A view reads nothing: only its readers keep the base alive. */
    if (op->def->flags & RFI_VIEW) continue;
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= 0) touch(&life[t->values[op->in[k]].base], i);
    for (int k = 0; k < op->n_out; k++)
      if (op->out[k] >= 0) touch(&life[t->values[op->out[k]].base], i);
  }
  for (int i = 0; i < t->n_outputs; i++) {
    rfi_life *l = &life[t->values[t->outputs[i].value].base];
    if (l->first < 0) l->first = 0;
    l->last = t->n_ops;
  }
  for (int v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    bool owner = x->base == v;
    life[v].persistent = owner && (x->op < 0 || t->ops[x->op].phase == RFR_PHASE_LOAD);
    if (!owner) life[v].first = life[v].last = -1;
  }
  *out = life;
  return RFR_OK;
}

rfr_status rfi_live_bytes(const rfr_trace *t, int64_t **out) {
  rfi_life *life;
  int64_t *bytes;
  *out = NULL;
  RFI_TRY(rfi_lives(t, &life));
  rfr_status s = RFI_ALLOC(t->ctx, sizeof *bytes * (size_t)(t->n_ops + 2), &bytes);
  if (s == RFR_OK) {
    for (int v = 0; v < t->n_values; v++)
      if (t->values[v].base == v && life[v].first >= 0 && !life[v].persistent) {
        bytes[life[v].first] += rfi_storage_bytes(&t->values[v].type);
        bytes[life[v].last + 1] -= rfi_storage_bytes(&t->values[v].type);
      }
    for (int i = 1; i <= t->n_ops; i++) bytes[i] += bytes[i - 1];
    *out = bytes;
  }
  rfi_free(t->ctx, life);
  return s;
}

rfr_status rfi_live_peak(const rfr_trace *t, int64_t *peak) {
  int64_t *live;
  RFI_TRY(rfi_live_bytes(t, &live));
  *peak = 0;
  for (int i = 0; i < t->n_ops; i++)
    if (live[i] > *peak) *peak = live[i];
  rfi_free(t->ctx, live);
  return RFR_OK;
}
