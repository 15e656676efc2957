/* SPDX-License-Identifier: Apache-2.0
 *
 * Selects the ops of the side stream. No op of the backward waits for weight gradients, and a step of small ops is
 * bound by launch time. So a wgrad op runs on the side stream, after earlier side ops, if a full device would compute
 * it in less time than its launch takes. Two ops conflict if they touch the same storage and one of them writes it. A
 * side op starts after the last op of the main stream that it conflicts with (searched only a few ops back). The first
 * later op of the main stream that conflicts with a side op waits for the side stream.
 *
 * In a program with collectives over ranks, the side stream runs only the collectives, in the order of the trace, which
 * is the same on every rank. The first op of the main stream that conflicts with a collective waits for this collective
 * alone. The result of a reduction is read late, so the main stream waits for it only after the reductions of the next
 * layer have begun. So the unreduced gradients of at most two layers are live.
 *
 * The work of an op is computed from its shapes, so a trace has the same side stream on every device. Steps with large
 * ops have none. The sums of an op do not depend on its stream, so the side stream does not change results.
 */
#include "pass/branch.h"

#include "base/base.h"

/* The maximum size of a side op: about a microsecond on the largest device; a launch takes two. */
enum { MOST_FLOPS = 1 << 29, MOST_BYTES = 4 << 20 };

static bool is_small(const rfi_opr *op, int64_t workspace) {
  return op->cost.flops <= MOST_FLOPS && op->cost.bytes + (double)workspace <= MOST_BYTES;
}

static bool is_side_op(const rfr_trace *t, int i, const int64_t *workspace) {
  const rfi_opr *op = &t->ops[i];
  return op->phase == RFR_PHASE_WGRAD && !(op->def->flags & (RFI_VIEW | RFI_HOST | RFI_COLLECTIVE)) &&
         is_small(op, workspace[i]);
}

/* Per storage: the last interval in which a side op read or wrote it. Intervals are separated by waits of the main
 * stream. */
typedef struct marks {
  int *read, *written;
  int interval;
} marks;

static void mark(const rfr_trace *t, const rfi_opr *op, marks *m) {
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] >= 0) m->read[t->values[op->in[k]].base] = m->interval;
  for (int k = 0; k < op->n_out; k++)
    if (op->out[k] >= 0) m->written[t->values[op->out[k]].base] = m->interval;
}

static bool conflicts(const rfr_trace *t, const rfi_opr *op, const marks *m) {
  bool found = false;
  for (int k = 0; k < op->n_in; k++) found |= op->in[k] >= 0 && m->written[t->values[op->in[k]].base] == m->interval;
  for (int k = 0; k < op->n_out; k++) {
    const int base = op->out[k] < 0 ? -1 : t->values[op->out[k]].base;
    found |= base >= 0 && (m->written[base] == m->interval || m->read[base] == m->interval);
  }
  return found;
}

/* ---- the earliest start ---- */

static rfr_value storage(const rfr_trace *t, const rfi_opr *op, int k) {
  const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
  return v < 0 ? RFR_NONE : t->values[v].base;
}

bool rfi_ops_conflict(const rfr_trace *t, const rfi_opr *a, const rfi_opr *b) {
  for (int i = 0; i < a->n_in + a->n_out; i++)
    for (int k = 0; k < b->n_in + b->n_out; k++)
      if ((i >= a->n_in || k >= b->n_in) && storage(t, a, i) >= 0 && storage(t, a, i) == storage(t, b, k)) return true;
  return false;
}

/* An op with a workspace cannot start earlier, because a workspace is live only at its own op. */
static int earliest_start(const rfr_trace *t, int i, const int64_t *workspace, const rfi_side_op *side) {
  enum { FAR = 8 };
  int from = i;
  for (int k = i - 1; k >= 0 && i - k <= FAR && workspace[i] == 0; k--) {
    if (side[k].until || t->ops[k].def->flags & RFI_VIEW) continue;
    if (rfi_ops_conflict(t, &t->ops[i], &t->ops[k])) break;
    from = k;
  }
  return from;
}

static int walk(const rfr_trace *t, const int64_t *workspace, marks *m, rfi_side_op *side) {
  int n = 0, first = 0; /* count and first op of the interval */
  m->interval = 1;
  for (int i = 0; i <= t->n_ops; i++) {
    const bool end = i == t->n_ops;
    if (!end && is_side_op(t, i, workspace)) {
      side[i] = (rfi_side_op){earliest_start(t, i, workspace, side), t->n_ops};
      mark(t, &t->ops[i], m);
      n++;
    } else if (end || (!(t->ops[i].def->flags & RFI_VIEW) && conflicts(t, &t->ops[i], m))) {
      for (; first < i; first++)
        if (side[first].until) side[first].until = i;
      m->interval++;
    }
  }
  return n;
}

/* ---- collectives ---- */

static bool is_collective(const rfi_opr *op) {
  return (op->def->flags & RFI_COLLECTIVE) && op->attr[0].i > 1; /* over one rank it is a copy */
}

static bool has_collectives(const rfr_trace *t) {
  bool found = false;
  for (int i = 0; i < t->n_ops && !found; i++) found = is_collective(&t->ops[i]) && t->ops[i].phase != RFR_PHASE_LOAD;
  return found;
}

/* The first op from i on that is on the main stream. */
static int next_on_main(const rfr_trace *t, int i) {
  while (i < t->n_ops && ((t->ops[i].def->flags & RFI_VIEW) || is_collective(&t->ops[i]))) i++;
  return i;
}

/* The op that waits for the reduction at op i at the latest: the first op after a later reduction, if a dgrad op is
 * between the two reductions. If only wgrad ops are between the remaining reductions, the backward ends. Then the
 * memory of the reduction is not needed soon, and the result is n_ops; but if another microbatch follows, it is the op
 * after the next reduction. */
static int after_next_group(const rfr_trace *t, int i) {
  bool between = false;
  int k = next_on_main(t, i), next = t->n_ops;
  for (; k < t->n_ops; k++) {
    const bool reduces = t->ops[k].def->code == RFI_OP_reduce_scatter;
    if (reduces && next == t->n_ops) next = k;
    if (reduces && between) break;
    if (t->ops[k].phase == RFR_PHASE_FORWARD && !between && next < t->n_ops) return next_on_main(t, next);
    between = between || t->ops[k].phase == RFR_PHASE_DGRAD;
  }
  return next_on_main(t, k);
}

static void walk_collectives(const rfr_trace *t, rfi_side_op *side) {
  for (int i = 0; i < t->n_ops; i++) {
    if (!is_collective(&t->ops[i]) || t->ops[i].phase == RFR_PHASE_LOAD) continue;
    const int most = t->ops[i].def->code == RFI_OP_reduce_scatter ? after_next_group(t, i) : t->n_ops;
    int until = next_on_main(t, i);
    while (until < most && !rfi_ops_conflict(t, &t->ops[i], &t->ops[until])) until = next_on_main(t, until + 1);
    side[i] = (rfi_side_op){i, until < most ? until : most};
  }
}

rfr_status rfi_branch(const rfr_trace *t, const int64_t *workspace, rfi_side_op **out) {
  marks m = {0};
  rfr_status s;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof **out * (size_t)(t->n_ops + 1), out));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *m.read * (size_t)(t->n_values + 1), &m.read));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *m.written * (size_t)(t->n_values + 1), &m.written));
  if (has_collectives(t)) {
    walk_collectives(t, *out);
    goto done;
  }
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
