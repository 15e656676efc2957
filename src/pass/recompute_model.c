/* SPDX-License-Identifier: Apache-2.0
 *
 * The rules of recomputing. A chosen op is cloned once, just before the first op of the backward that needs one of its
 * results, directly or for another clone. All ops of the backward then read the clone, and the original is dead after
 * its last reader in the forward. An operand of a clone is the clone of its producer if that is chosen too, else the
 * original, which then lives until the clone has read it. A chosen op is not cloned if an op of the backward can also
 * compute its result, and if all ops that need the result can run after that op (recompute_bwd.c).
 *
 * Never cloned: an op that writes into an operand's storage, writes state or has a host effect; an op whose result is
 * overwritten later; an op with a reader in another microbatch, because a clone belongs to one. A choice is impossible
 * if a clone would read a storage after its next version was written.
 *
 * With split_phases, forward (F), dgrad (I) and wgrad (W) are separate programs, and the trace has their ops in this
 * order. So there are two backwards. If both need a clone, it is computed in I and kept for W, or W has a separate
 * clone; this is a part of the choice. A value that lives from one program to the next takes bytes once per microbatch
 * in flight; a value that lives within one program takes bytes once.
 *
 * The memory of a choice comes from one backward sweep (when each clone is needed), one forward sweep over the new
 * order (lifetimes) and a running sum. These are the lifetimes that the planner sees, except for copies that lowering
 * adds.
 */
#include "pass/recompute_model.h"

#include <string.h>

#include "trace/live.h"

/* ---- facts of the trace ---- */

static void find_roots(rfi_recompute_model *m) {
  const rfr_trace *t = m->t;
  rfr_value *newest = m->last; /* per base; uses m->last, which is unused until the first evaluation */
  for (rfr_value v = 0; v < t->n_values; v++) {
    m->root[v] = newest[v] = v;
    m->overwritten[v] = RFI_NEVER;
  }
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    for (int j = 0; j < op->n_out; j++) {
      rfr_value v = op->out[j];
      if (v < 0) continue;
      if (op->def->flags & RFI_VIEW) {
        m->root[v] = m->root[op->in[0]];
      } else if (t->values[v].base != v) {
        rfr_value base = t->values[v].base;
        m->overwritten[newest[base]] = i;
        newest[base] = v;
      }
    }
  }
}

/* The op that computes v, or the value that v is a view of; -1: an input. */
static int producer(const rfi_recompute_model *m, rfr_value v) { return m->t->values[m->root[v]].op; }

/* Whether v is a state that is written: another microbatch may write it before a clone reads it. */
static bool is_written_state(const rfi_recompute_model *m, const rfi_pass_options *o, rfr_value v) {
  const rfr_value root = m->root[v], base = m->t->values[root].base;
  const rfi_value *x = &m->t->values[base];
  if (x->op >= 0 || x->role != RFR_ROLE_STATE) return false;
  return root != base || m->overwritten[root] != RFI_NEVER || (o->is_written && o->is_written(o->user, x->name));
}

static bool is_gathered(const rfr_trace *t, rfr_value v) {
  const rfi_value *x = &t->values[t->values[v].base];
  return x->op >= 0 ? t->ops[x->op].phase == RFR_PHASE_SETUP : rfi_is_parameter(x->role);
}

static void find_candidates(rfi_recompute_model *m, const rfi_pass_options *o) {
  const rfr_trace *t = m->t;
  const bool split_phases = o->split_phases;
  m->begins[0] = m->begins[1] = t->n_ops;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    m->late[i] = op->phase == RFR_PHASE_DGRAD   ? RFI_LATE
                 : op->phase != RFR_PHASE_WGRAD ? RFI_EARLY
                 : split_phases                 ? RFI_LATER
                                                : RFI_LATE;
    for (int k = 0; k < RFI_LATES; k++)
      if (m->late[i] >= RFI_LATE + k && i < m->begins[k]) m->begins[k] = i;
    m->can[i] = op->phase == RFR_PHASE_FORWARD && op->policy != RFR_POLICY_KEEP &&
                !(op->def->flags & (RFI_VIEW | RFI_STATE | RFI_HOST | RFI_COLLECTIVE));
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0 && (t->values[op->out[j]].base != op->out[j] || m->overwritten[op->out[j]] != RFI_NEVER))
        m->can[i] = false;
  }
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->flags & RFI_VIEW) continue;
    for (int k = 0; k < op->n_in; k++) {
      int p = op->in[k] < 0 ? -1 : producer(m, op->in[k]);
      if (split_phases && op->in[k] >= 0 && is_written_state(m, o, op->in[k])) m->can[i] = false;
      if (o->gathered && op->in[k] >= 0 && is_gathered(t, op->in[k])) m->gone[i] = true;
      if (p < 0) continue;
      if (m->late[i]) m->read_late[p] = true;
      if (m->late[i] == RFI_LATER) m->read_later[p] = true;
      if (t->ops[p].microbatch != op->microbatch) m->can[p] = false;
    }
  }
}

/* With split_phases, inputs exist once per microbatch in flight, and results of setup once for all microbatches. */
static bool is_step_scoped(const rfr_trace *t, const rfi_value *x, bool split_phases) {
  if (x->op < 0) return split_phases && (x->role == RFR_ROLE_INPUT || x->role == RFR_ROLE_INPUT_GRAD);
  const int phase = t->ops[x->op].phase;
  return phase != RFR_PHASE_LOAD && !(split_phases && phase == RFR_PHASE_SETUP);
}

static void find_bytes(rfi_recompute_model *m, bool split_phases) {
  const rfr_trace *t = m->t;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    if (x->base == v && is_step_scoped(t, x, split_phases)) m->bytes[v] = rfi_storage_bytes(&x->type);
  }
}

/* The pass shard reduces a gradient as soon as it is complete; then only this rank's shard stays live.
 * RFR_SHARD_OPTIMIZER is the exception: it sums the gradients of several microbatches first. */
static void find_reduced_bytes(rfi_recompute_model *m, const rfi_pass_options *o) {
  const rfr_trace *t = m->t;
  for (int i = 0; i < t->n_ops && o->ranks > 1 && o->shard != RFR_SHARD_NONE; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->code != RFI_OP_all_reduce || op->attr[0].i != o->ranks) continue;
    const rfi_value *x = &t->values[op->in[0]], *begun = &t->values[x->base];
    m->bytes[op->out[0]] = rfi_storage_bytes(&t->values[op->out[0]].type) / o->ranks;
    if (m->bytes[x->base] == 0 || begun->op < 0) continue;
    if (o->shard == RFR_SHARD_FULL || t->ops[x->op].microbatch == t->ops[begun->op].microbatch)
      m->bytes[x->base] = rfi_storage_bytes(&begun->type) / o->ranks;
  }
}

/* Whether a late op in op i's layer reads v. */
static bool is_gathered_late(const rfi_recompute_model *m, int i, rfr_value v) {
  const rfr_trace *t = m->t;
  for (int j = 0; j < t->n_ops; j++)
    for (int k = 0; k < t->ops[j].n_in && m->late[j]; k++) {
      const rfr_value x = t->ops[j].in[k];
      if (x >= 0 && m->root[x] == v && rfi_same_layer(&t->ops[j], &t->ops[i])) return true;
    }
  return false;
}

/* With fully sharded parameters, the clone of an op needs another gather of each parameter that no op of the backward
 * reads in the same layer, such as an embedding. The memory of this gather is not counted. */
static void find_gathers(rfi_recompute_model *m, const rfi_pass_options *o) {
  const rfr_trace *t = m->t;
  for (int i = 0; i < t->n_ops && o->ranks > 1 && o->shard == RFR_SHARD_FULL; i++)
    for (int k = 0; k < t->ops[i].n_in && m->can[i]; k++) {
      const rfr_value v = t->ops[i].in[k] < 0 ? RFR_NONE : m->root[t->ops[i].in[k]];
      if (v >= 0 && is_gathered(t, v) && !is_gathered_late(m, i, v)) m->gathered[i] += rfi_bytes(&t->values[v].type);
    }
}

rfr_status rfi_recompute_model_init(rfi_recompute_model *m, const rfr_trace *t, const rfi_pass_options *o) {
  rfr_status s;
  size_t ops = (size_t)t->n_ops + 1, values = (size_t)t->n_values + 1;
  *m = (rfi_recompute_model){.t = t,
                             .lates = o->split_phases ? RFI_LATES : 1,
                             .copies = o->split_phases ? o->copies : 1,
                             .separate_wgrad = o->split_phases && o->separate_wgrad};
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->late));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->can));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->near));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->gone));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->read_late));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->read_later));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * ops, &m->chosen));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops * sizeof *m->by, &m->by));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops, &m->early));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops * sizeof *m->order, &m->order));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops * sizeof *m->place, &m->place));
  RFI_GOTO(RFI_ALLOC(t->ctx, values * sizeof *m->root, &m->root));
  RFI_GOTO(RFI_ALLOC(t->ctx, values * sizeof *m->overwritten, &m->overwritten));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops * sizeof *m->workspace, &m->workspace));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * ops * sizeof *m->time, &m->time));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops * sizeof *m->start, &m->start));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * ops * sizeof *m->rank, &m->rank));
  RFI_GOTO(RFI_ALLOC(t->ctx, values * sizeof *m->first, &m->first));
  RFI_GOTO(RFI_ALLOC(t->ctx, values * sizeof *m->last, &m->last));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * values * sizeof *m->clone_first, &m->clone_first));
  RFI_GOTO(RFI_ALLOC(t->ctx, RFI_LATES * values * sizeof *m->clone_last, &m->clone_last));
  RFI_GOTO(RFI_ALLOC(t->ctx, ((1 + RFI_LATES) * ops + 1) * sizeof *m->live, &m->live));
  RFI_GOTO(RFI_ALLOC(t->ctx, values * sizeof *m->bytes, &m->bytes));
  RFI_GOTO(RFI_ALLOC(t->ctx, ops * sizeof *m->gathered, &m->gathered));
  find_roots(m);
  find_candidates(m, o);
  find_bytes(m, o->split_phases);
  find_reduced_bytes(m, o);
  find_gathers(m, o);
  rfi_find_by_bwd(m);
  if (o->workspace) RFI_GOTO(o->workspace(o->user, t, m->workspace));
  return RFR_OK;
fail:
  rfi_recompute_model_deinit(m);
  return s;
}

void rfi_recompute_model_deinit(rfi_recompute_model *m) {
  if (!m->t) return;
  rfr_ctx *ctx = m->t->ctx;
  void *const owned[] = {m->late,       m->can,       m->near,        m->gone,  m->read_late, m->read_later,
                         m->chosen,     m->root,      m->overwritten, m->by,    m->early,     m->order,
                         m->place,      m->workspace, m->time,        m->first, m->last,      m->clone_first,
                         m->clone_last, m->start,     m->rank,        m->live,  m->bytes,     m->gathered};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) rfi_free(ctx, owned[i]);
  *m = (rfi_recompute_model){0};
}

/* ---- when each clone is needed ---- */

static bool is_view(const rfi_recompute_model *m, int i) { return m->t->ops[i].def->flags & RFI_VIEW; }

/* Iterates over clones by number; gives their ops and programs. */
static int op_of(const rfi_recompute_model *m, int clone) { return clone % m->t->n_ops; }
static int n_clones(const rfi_recompute_model *m) { return m->lates * m->t->n_ops; }
static bool is_made(const rfi_recompute_model *m, int clone) { return m->time[clone] != RFI_NEVER; }

/* Whether an op of the backward recomputes the result of a clone. The clone is then not recorded. */
static bool is_by_bwd(const rfi_recompute_model *m, int clone) {
  return clone < m->t->n_ops && m->by[clone].bwd >= 0 && m->chosen[clone] && !m->early[clone];
}
static bool is_recorded(const rfi_recompute_model *m, int clone) { return is_made(m, clone) && !is_by_bwd(m, clone); }

/* The storage of this result: that of dy of the op of the backward. */
static rfr_value storage_by_bwd(const rfi_recompute_model *m, int clone) {
  return m->t->values[m->t->ops[m->by[clone].bwd].in[0]].base;
}

/* The clone of op p that a reader in `late` reads; -1: the reader reads the original. */
static int clone_for(const rfi_recompute_model *m, int p, int late) {
  const int own = p + m->t->n_ops;
  if (p < 0 || late == RFI_EARLY) return -1;
  return late == RFI_LATER && m->chosen[own] ? own : m->chosen[p] ? p : -1;
}

/* The same for value v. */
static int clone_read(const rfi_recompute_model *m, rfr_value v, int late) {
  const int clone = clone_for(m, producer(m, v), late);
  return clone >= 0 && is_made(m, clone) ? clone : -1;
}
/* The clone's result for value v. */
static int clone_result(const rfi_recompute_model *m, rfr_value v, int clone) {
  return clone < m->t->n_ops ? v : v + m->t->n_values;
}

/* Computes the order of the ops; clones are not in it. */
static void order_ops(rfi_recompute_model *m) {
  int n = 0;
  for (int i = 0; i < m->t->n_ops; i++) {
    const rfi_by_bwd *by = &m->by[i];
    if (by->after >= 0 && is_by_bwd(m, by->after)) continue;
    m->order[n++] = i;
    for (int k = by->source >= 0 && is_by_bwd(m, by->source) ? by->first : i; k < i; k++)
      if (m->by[k].after == by->source) m->order[n++] = k;
  }
  for (int k = 0; k < n; k++) m->place[m->order[k]] = k;
}

/* Marks the operands of op i as needed at place `when` of the backward, or by a clone before it. */
static bool need_operands(rfi_recompute_model *m, int i, int when) {
  const rfi_opr *op = &m->t->ops[i];
  bool possible = true;
  for (int k = 0; k < op->n_in; k++) {
    if (op->in[k] < 0) continue;
    const int clone = clone_for(m, producer(m, op->in[k]), m->late[m->order[when]]);
    const int overwritten = m->overwritten[m->root[op->in[k]]];
    if (clone >= 0) {
      if (when < m->time[clone]) m->time[clone] = when;
    } else if (overwritten != RFI_NEVER && m->place[overwritten] < when) {
      possible = false;
    }
  }
  return possible;
}

static bool find_times(rfi_recompute_model *m) {
  bool possible = true;
  for (int c = 0; c < n_clones(m); c++) m->time[c] = RFI_NEVER;
  for (int at = m->t->n_ops - 1; at >= 0; at--) {
    const int i = m->order[at];
    if (is_view(m, i)) continue;
    if (m->late[i]) need_operands(m, i, at);
    for (int c = i; c < n_clones(m) && !m->late[i]; c += m->t->n_ops)
      if (is_recorded(m, c)) {
        possible = need_operands(m, i, m->time[c]) && possible;
        if (m->gone[i] && m->late[m->order[m->time[c]]] == RFI_LATER) possible = false;
      }
  }
  return possible;
}

/* Marks chosen ops whose result another clone needs before the op of the backward computes it. */
static bool mark_early(rfi_recompute_model *m) {
  bool found = false;
  for (int i = 0; i < m->t->n_ops; i++) {
    if (!is_by_bwd(m, i) || m->time[i] > m->place[m->by[i].bwd]) continue;
    m->early[i] = found = true;
  }
  return found;
}

/* Finds order and times. Both change if an op is marked early, so this repeats until no op is. */
static bool find_order_and_times(rfi_recompute_model *m) {
  bool possible;
  memset(m->early, 0, (size_t)m->t->n_ops);
  do {
    order_ops(m);
    possible = find_times(m);
  } while (mark_early(m));
  return possible;
}

/* Adds the clones to the order: each op is preceded by the clones that it is the first to need, in forward order.
 * start[k]: number of clones before those of place k; rank[c]: index of clone c among those of its place. */
static int place_clones(rfi_recompute_model *m) {
  int n = m->t->n_ops, clones = 0;
  memset(m->start, 0, sizeof *m->start * (size_t)(n + 1));
  for (int i = 0; i < n; i++)
    for (int c = i; c < n_clones(m); c += n)
      if (is_recorded(m, c)) m->rank[c] = m->start[m->time[c]]++;
  for (int i = 0; i < n; i++) {
    int here = m->start[i];
    m->start[i] = clones;
    clones += here;
  }
  m->start[n] = clones;
  return clones;
}

static int position(const rfi_recompute_model *m, int i) { return m->place[i] + m->start[m->place[i] + 1]; }
static int clone_position(const rfi_recompute_model *m, int c) {
  if (is_by_bwd(m, c)) return position(m, m->by[c].bwd);
  return m->time[c] + m->start[m->time[c]] + m->rank[c];
}

/* ---- lifetimes ---- */

static void touch(rfi_recompute_model *m, rfr_value base, int at) {
  if (m->first[base] < 0 || at < m->first[base]) m->first[base] = at;
  if (at > m->last[base]) m->last[base] = at;
}

static void read_operands(rfi_recompute_model *m, int i, int at, int late) {
  const rfi_opr *op = &m->t->ops[i];
  for (int k = 0; k < op->n_in; k++) {
    if (op->in[k] < 0) continue;
    const rfr_value root = m->root[op->in[k]];
    const int clone = clone_read(m, root, late);
    if (clone < 0) {
      touch(m, m->t->values[root].base, at);
      continue;
    }
    int *last = &m->clone_last[clone_result(m, root, clone)];
    if (at > *last) *last = at;
    if (is_by_bwd(m, clone)) touch(m, storage_by_bwd(m, clone), at);
  }
}

static void find_lives(rfi_recompute_model *m) {
  const rfr_trace *t = m->t;
  for (rfr_value v = 0; v < t->n_values; v++) m->first[v] = m->last[v] = -1;
  for (int v = 0; v < m->lates * t->n_values; v++) m->clone_first[v] = m->clone_last[v] = -1;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (is_view(m, i)) continue;
    int at = position(m, i);
    read_operands(m, i, at, m->late[i]);
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0) touch(m, t->values[op->out[j]].base, at);
    for (int c = i; c < n_clones(m); c += t->n_ops) {
      if (!is_recorded(m, c)) continue;
      at = clone_position(m, c);
      read_operands(m, i, at, m->late[m->order[m->time[c]]]);
      for (int j = 0; j < op->n_out; j++)
        if (op->out[j] >= 0) m->clone_first[clone_result(m, op->out[j], c)] = at;
    }
  }
  for (int i = 0; i < t->n_outputs; i++) m->last[t->values[t->outputs[i].value].base] = t->n_ops + m->start[t->n_ops];
}

/* Bytes that are live from before program `late` into it. */
static int64_t bytes_across(const rfi_recompute_model *m, int late) {
  const rfr_trace *t = m->t;
  const int begin = m->begins[late - RFI_LATE], at = begin + m->start[begin];
  int64_t bytes = 0;
  for (int v = 0; v < m->lates * t->n_values; v++) {
    const rfr_value own = v % t->n_values;
    if (m->clone_first[v] >= 0 && m->clone_first[v] < at && m->clone_last[v] >= at) bytes += m->bytes[own];
    if (v == own && m->first[v] >= 0 && m->first[v] < at && m->last[v] >= at) bytes += m->bytes[own];
  }
  return bytes;
}

static void add_live(rfi_recompute_model *m, int first, int last, int64_t bytes) {
  m->live[first] += bytes;
  m->live[last + 1] -= bytes;
}

/* Returns the peak; afterwards m->live[i] is the number of live bytes at position i. */
static int64_t sum_live(rfi_recompute_model *m, int clones, int64_t others) {
  const rfr_trace *t = m->t;
  int n = t->n_ops + clones;
  int64_t peak = 0, live = others;
  memset(m->live, 0, sizeof *m->live * (size_t)(n + 2));
  for (rfr_value v = 0; v < t->n_values; v++) {
    if (m->bytes[v] == 0 || m->last[v] < 0) continue;
    add_live(m, m->first[v], m->last[v], m->bytes[v]);
    for (int c = v; c < m->lates * t->n_values; c += t->n_values) /* an unread result of a clone is dead */
      if (m->clone_first[c] >= 0 && m->clone_last[c] >= 0)
        add_live(m, m->clone_first[c], m->clone_last[c], m->bytes[v]);
  }
  for (int i = 0; i < t->n_ops; i++) {
    const int64_t bytes = rfi_align(m->workspace[i]);
    if (bytes == 0) continue;
    add_live(m, position(m, i), position(m, i), bytes);
    for (int c = i; c < n_clones(m); c += t->n_ops)
      if (is_recorded(m, c)) add_live(m, clone_position(m, c), clone_position(m, c), bytes);
  }
  for (int i = 0; i <= n; i++) {
    m->live[i] = live += m->live[i];
    if (live > peak) peak = live;
  }
  return peak;
}

/* Work of a clone, including the gathers for it. If an op of the backward recomputes the result, the only bytes
 * are those of the write. */
static rfi_cost cost_of(const rfi_recompute_model *m, int clone) {
  const rfi_opr *op = &m->t->ops[op_of(m, clone)];
  if (is_by_bwd(m, clone)) return (rfi_cost){op->cost.flops, (double)rfi_bytes(&m->t->values[op->out[0]].type)};
  return (rfi_cost){op->cost.flops, op->cost.bytes + (double)m->gathered[op_of(m, clone)]};
}

rfi_choice_cost rfi_recompute_evaluate(rfi_recompute_model *m) {
  rfi_choice_cost c = {.possible = find_order_and_times(m)};
  c.clones = place_clones(m);
  find_lives(m);
  if (m->copies > 1) {
    const int64_t later = m->separate_wgrad ? bytes_across(m, RFI_LATER) : 0;
    c.across = bytes_across(m, RFI_LATE);
    if (later > c.across) c.across = later;
  }
  c.peak = sum_live(m, c.clones, (m->copies - 1) * c.across);
  for (int i = 0; i < m->t->n_ops; i++)
    if (m->near[i]) c.near += (double)m->live[position(m, i)];
  for (int i = 0; i < n_clones(m); i++) {
    if (!is_made(m, i)) continue;
    const rfi_cost cost = cost_of(m, i);
    c.flops += cost.flops;
    c.bytes += cost.bytes;
    c.recomputed++;
  }
  return c;
}

void rfi_recompute_mark_near(rfi_recompute_model *m, double level) {
  for (int i = 0; i < m->t->n_ops; i++) m->near[i] = (double)m->live[position(m, i)] > level;
}

/* ---- the new trace ---- */

typedef struct writer {
  rfi_recompute_model *m;
  rfi_rewrite r;
  rfr_value *clone; /* per result of a clone: its value in the new trace, or RFR_NONE */
  int *order;       /* the clones in the new order */
  rfi_report *report;
} writer;

/* The value that a reader in the backward uses for v; views of it are recorded again in the given phase. */
static rfr_status late_operand(writer *w, rfr_value v, int late, int phase, rfr_value *out) {
  const rfr_trace *t = w->m->t;
  *out = RFR_NONE;
  if (v < 0) return RFR_OK;
  const int made = clone_read(w->m, v, late);
  if (made < 0) {
    *out = w->r.map[v];
    return RFR_OK;
  }
  rfr_value chain[64];
  int n = 0;
  while (w->clone[clone_result(w->m, v, made)] < 0) {
    if (n == 64) return rfi_fail(RFI_E_UNSUPPORTED, "a chain of more than 64 views");
    chain[n++] = v;
    v = t->ops[t->values[v].op].in[0];
  }
  for (*out = w->clone[clone_result(w->m, v, made)]; n > 0; n--) {
    const rfi_value *x = &t->values[chain[n - 1]];
    rfi_opr op = t->ops[x->op];
    op.in = out;
    op.phase = (uint8_t)phase;
    op.clone_of = w->r.op_map[x->op];
    rfr_value view;
    RFI_TRY(rfi_rewrite_new(&w->r, &op, NULL, &view));
    *out = w->clone[clone_result(w->m, chain[n - 1], made)] = view;
  }
  return RFR_OK;
}

static rfr_status late_operands(writer *w, const rfi_opr *op, int late, int phase, rfr_value *in) {
  for (int k = 0; k < op->n_in; k++) RFI_TRY(late_operand(w, op->in[k], late, phase, &in[k]));
  return RFR_OK;
}

static rfr_status report_clone(const writer *w, int c) {
  const rfi_recompute_model *m = w->m;
  const rfr_trace *t = m->t;
  const int i = op_of(m, c);
  const rfi_opr *op = &t->ops[i];
  int64_t freed = 0;
  int from = 0;
  rfr_value shown = RFR_NONE;
  for (int j = 0; j < op->n_out; j++) {
    if (op->out[j] < 0 || m->clone_last[clone_result(m, op->out[j], c)] < 0) continue;
    freed += rfi_storage_bytes(&t->values[op->out[j]].type);
    if (m->last[op->out[j]] > from) from = m->last[op->out[j]];
    if (shown == RFR_NONE) shown = op->out[j];
  }
  const rfi_cost cost = cost_of(m, c);
  if (c != i)
    return rfi_report_line(w->report, "recomputed for wgrad: %%%d %s%s%s: +%.0f bytes moved, +%.0f FLOPs", shown,
                           op->def->name, op->scope[0] ? " in " : "", op->scope, cost.bytes, cost.flops);
  if (!m->read_late[i])
    return rfi_report_line(w->report, "recomputed: %%%d %s%s%s for another clone: +%.0f bytes moved, +%.0f FLOPs",
                           shown, op->def->name, op->scope[0] ? " in " : "", op->scope, cost.bytes, cost.flops);
  const char *by = is_by_bwd(m, c) ? t->ops[m->by[c].bwd].def->name : "";
  return rfi_report_line(w->report,
                         "recomputed: %%%d %s%s%s%s%s: -%lld bytes for %d ops, +%.0f bytes moved, +%.0f FLOPs", shown,
                         op->def->name, op->scope[0] ? " in " : "", op->scope, by[0] ? " by " : "", by,
                         (long long)freed, clone_position(m, c) - from, cost.bytes, cost.flops);
}

/* Records clone c for an op of the given phase. */
static rfr_status write_clone(writer *w, int c, int phase, rfr_value *in) {
  const rfi_recompute_model *m = w->m;
  const int i = op_of(m, c);
  rfi_opr op = m->t->ops[i];
  rfr_value out[RFI_MAX_NAMES];
  bool dead[RFI_MAX_NAMES];
  RFI_TRY(late_operands(w, &op, m->late[m->order[m->time[c]]], phase, in));
  for (int j = 0; j < op.n_out; j++) dead[j] = op.out[j] < 0 || m->clone_last[clone_result(m, op.out[j], c)] < 0;
  const rfr_value *results = op.out;
  op.in = in;
  op.phase = (uint8_t)phase;
  op.clone_of = w->r.op_map[i];
  op.reason = "";
  RFI_TRY(rfi_rewrite_new(&w->r, &op, dead, out));
  for (int j = 0; j < op.n_out; j++)
    if (results[j] >= 0) w->clone[clone_result(m, results[j], c)] = out[j];
  return w->report ? report_clone(w, c) : RFR_OK;
}

/* Makes *op, with operands in[], recompute the result of clone c as its last result, in the storage of its dy. */
static void add_result(const rfi_recompute_model *m, int c, rfi_opr *op, rfr_value *in, char *reason, size_t n) {
  in[op->def->alias[op->n_out - 1]] = in[0];
  rfi_snprintf(reason, n, "%s%srecomputes %s", op->reason, op->reason[0] ? "; " : "", m->t->ops[c].def->name);
  op->reason = reason;
}

static rfr_status write_op(writer *w, int place, int *next, rfr_value *in) {
  const rfr_trace *t = w->m->t;
  const int i = w->m->order[place], source = w->m->by[i].source;
  const rfi_opr *op = &t->ops[i];
  bool dead[RFI_MAX_NAMES];
  char reason[160];
  if (!w->m->late[i] || is_view(w->m, i)) return rfi_rewrite_op(&w->r, i, NULL);
  for (; w->order[*next] >= 0 && w->m->time[w->order[*next]] == place; ++*next)
    RFI_TRY(write_clone(w, w->order[*next], op->phase, in));
  rfi_opr copy = *op;
  RFI_TRY(late_operands(w, op, w->m->late[i], op->phase, in));
  copy.in = in;
  for (int j = 0; j < op->n_out; j++) dead[j] = op->out[j] < 0;
  if (source < 0 || !is_by_bwd(w->m, source) || !is_made(w->m, source)) return rfi_rewrite_as(&w->r, i, &copy, dead);
  dead[op->n_out - 1] = false;
  add_result(w->m, source, &copy, in, reason, sizeof reason);
  RFI_TRY(rfi_rewrite_as(&w->r, i, &copy, dead));
  w->clone[t->ops[source].out[0]] = w->r.to->ops[w->r.to->n_ops - 1].out[op->n_out - 1];
  return w->report ? report_clone(w, source) : RFR_OK;
}

rfr_status rfi_recompute_apply(rfi_recompute_model *m, rfi_report *report, rfr_trace **out) {
  rfr_status s;
  const rfr_trace *t = m->t;
  writer w = {.m = m, .report = report};
  rfr_value *in = NULL;
  int most = 0, next = 0;
  *out = NULL;
  rfi_choice_cost c = rfi_recompute_evaluate(m);
  RFI_CHECK(c.possible);
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].n_in > most) most = t->ops[i].n_in;
  RFI_GOTO(rfi_rewrite_begin(t, &w.r));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *in * (size_t)(most + 1), &in));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *w.clone * (size_t)(RFI_LATES * t->n_values + 1), &w.clone));
  RFI_GOTO(RFI_ALLOC(t->ctx, sizeof *w.order * (size_t)(c.clones + 1), &w.order));
  for (int v = 0; v < m->lates * t->n_values; v++) w.clone[v] = RFR_NONE;
  for (int k = 0; k < n_clones(m); k++)
    if (is_recorded(m, k)) w.order[m->start[m->time[k]] + m->rank[k]] = k;
  w.order[c.clones] = -1;
  for (int place = 0; place < t->n_ops; place++) RFI_GOTO(write_op(&w, place, &next, in));
  s = rfi_rewrite_end(&w.r, out);
  goto done;
fail:
  if (w.r.map) rfi_rewrite_abort(&w.r);
done:
  rfi_free(t->ctx, in);
  rfi_free(t->ctx, w.clone);
  rfi_free(t->ctx, w.order);
  return s;
}
