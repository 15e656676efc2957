/* SPDX-License-Identifier: Apache-2.0
 *
 * Which ops run on a side branch. Nothing of the backward waits for the gradients of weights, and a step of small ops
 * takes what starting them takes, one after the other. So an op of phase wgrad whose work would take the whole device
 * less time than its start goes to the side, behind those that went there before it. Two ops meet where they touch one
 * storage and one of them writes: an op of the side starts behind the last op of the line that it meets (at most a few
 * further back than it is listed), and the first op listed behind it that meets any of the side's waits for the branch.
 *
 * Work is counted by shapes, so the same trace has the same branch wherever it is planned; the steps that fill a
 * device have none. An op's own sums are the same wherever it runs: no bit depends on the branch.
 */
#include "pass/branch.h"

#include "base/base.h"
#include "ops/cost.h"

/* About a microsecond of the largest device there is; starting an op takes two. */
enum { MOST_FLOPS = 1 << 29, MOST_BYTES = 4 << 20 };

static bool is_small(const rfr_trace *t, const rfi_opr *op, int64_t workspace) {
  const rfi_cost cost = rfi_op_cost(t, op);
  return cost.flops <= MOST_FLOPS && cost.bytes + (double)workspace <= MOST_BYTES;
}

static bool is_side_op(const rfr_trace *t, int i, const int64_t *workspace) {
  const rfi_opr *op = &t->ops[i];
  return op->phase == RFR_PHASE_WGRAD && !(op->def->flags & (RFI_VIEW | RFI_HOST | RFI_COLLECTIVE)) &&
         is_small(t, op, workspace[i]);
}

/* Per storage: in which stretch of the branch, from one wait to the next, it was last read or written aside. */
typedef struct marks {
  int *read, *written;
  int stretch;
} marks;

static void mark(const rfr_trace *t, const rfi_opr *op, marks *m) {
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] >= 0) m->read[t->values[op->in[k]].base] = m->stretch;
  for (int k = 0; k < op->n_out; k++)
    if (op->out[k] >= 0) m->written[t->values[op->out[k]].base] = m->stretch;
}

static bool meets(const rfr_trace *t, const rfi_opr *op, const marks *m) {
  bool met = false;
  for (int k = 0; k < op->n_in; k++) met |= op->in[k] >= 0 && m->written[t->values[op->in[k]].base] == m->stretch;
  for (int k = 0; k < op->n_out; k++) {
    const int base = op->out[k] < 0 ? -1 : t->values[op->out[k]].base;
    met |= base >= 0 && (m->written[base] == m->stretch || m->read[base] == m->stretch);
  }
  return met;
}

/* ---- from where on ---- */

static rfr_value storage(const rfr_trace *t, const rfi_opr *op, int k) {
  const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
  return v < 0 ? RFR_NONE : t->values[v].base;
}

static bool pair_meets(const rfr_trace *t, const rfi_opr *a, const rfi_opr *b) {
  for (int i = 0; i < a->n_in + a->n_out; i++)
    for (int k = 0; k < b->n_in + b->n_out; k++)
      if ((i >= a->n_in || k >= b->n_in) && storage(t, a, i) >= 0 && storage(t, a, i) == storage(t, b, k)) return true;
  return false;
}

/* A workspace is known by the op where it begins to live. */
static int first_beside(const rfr_trace *t, int i, const int64_t *workspace, const rfi_side_op *aside) {
  enum { FAR = 8 };
  int from = i;
  for (int k = i - 1; k >= 0 && i - k <= FAR && workspace[i] == 0; k--) {
    if (aside[k].until || t->ops[k].def->flags & RFI_VIEW) continue;
    if (pair_meets(t, &t->ops[i], &t->ops[k])) break;
    from = k;
  }
  return from;
}

static int walk(const rfr_trace *t, const int64_t *workspace, marks *m, rfi_side_op *aside) {
  int n = 0, first = 0; /* of the stretch */
  m->stretch = 1;
  for (int i = 0; i <= t->n_ops; i++) {
    const bool end = i == t->n_ops;
    if (!end && is_side_op(t, i, workspace)) {
      aside[i] = (rfi_side_op){first_beside(t, i, workspace, aside), t->n_ops};
      mark(t, &t->ops[i], m);
      n++;
    } else if (end || (!(t->ops[i].def->flags & RFI_VIEW) && meets(t, &t->ops[i], m))) {
      for (; first < i; first++)
        if (aside[first].until) aside[first].until = i;
      m->stretch++;
    }
  }
  return n;
}

rfr_status rfi_branch(const rfr_trace *t, const int64_t *workspace, rfi_side_op **out) {
  marks m = {0};
  rfr_status s;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof **out * (size_t)(t->n_ops + 1), out));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *m.read * (size_t)(t->n_values + 1), &m.read));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *m.written * (size_t)(t->n_values + 1), &m.written));
  const bool any = walk(t, workspace, &m, *out) > 0;
  if (any) goto done;
fail:
  rfi_free(t->ctx, *out);
  *out = NULL;
done:
  rfi_free(t->ctx, m.read);
  rfi_free(t->ctx, m.written);
  return s;
}
