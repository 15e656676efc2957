/* SPDX-License-Identifier: Apache-2.0
 *
 * Prune: common subexpression elimination (CSE), dead code elimination (DCE, per result), and hoisting. An op that
 * depends only on frozen inputs moves to phase load and runs once. An op that depends only on weights and serves
 * several microbatches moves to phase setup and runs once per step.
 *
 * CSE merges pure ops with the same op, operands and attributes. The numbers of a random op depend on its microbatch,
 * so random ops merge only within one microbatch. An op that writes into its operand's storage (acc, state) never
 * merges, nor does a collective. An op that reads a gathered parameter is not hoisted: its result would keep the
 * gathered bytes for the rest of the step. A dequantize is not hoisted either: its purpose is that the dequantized
 * weight is not kept.
 */
#include <string.h>

#include "pass/pass.h"

/* ---- DCE ---- */

rfr_status rfi_dce(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  bool *needed;
  rfi_rewrite r = {.from = in};
  rfr_status s;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(in->ctx, (size_t)(in->n_values + in->n_ops) + 1, &needed));
  bool *keep = needed + in->n_values;
  for (int i = 0; i < in->n_outputs; i++) needed[in->outputs[i].value] = true;
  for (int i = in->n_ops - 1; i >= 0; i--) {
    const rfi_opr *op = &in->ops[i];
    keep[i] = op->def->flags & (RFI_STATE | RFI_HOST);
    for (int j = 0; j < op->n_out; j++) keep[i] = keep[i] || (op->out[j] >= 0 && needed[op->out[j]]);
    if (!keep[i]) continue;
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= 0) needed[op->in[k]] = true;
  }
  RFI_GOTO(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    const rfi_opr *op = &in->ops[i];
    bool dead[RFI_MAX_NAMES];
    if (!keep[i]) {
      int64_t bytes = 0;
      for (int j = 0; j < op->n_out; j++)
        if (op->out[j] >= 0 && in->values[op->out[j]].base == op->out[j])
          bytes += rfi_bytes(&in->values[op->out[j]].type);
      RFI_GOTO(rfi_report_line(report, "pruned: op %d %s%s%s, no reader: -%lld bytes", i, op->def->name,
                               op->scope[0] ? " in " : "", op->scope, (long long)bytes));
      continue;
    }
    for (int j = 0; j < op->n_out; j++) {
      /* The next version of a state is a side effect, so it is kept even without a reader. */
      dead[j] = op->out[j] >= 0 && !needed[op->out[j]] && !(op->def->flags & RFI_STATE);
      if (dead[j])
        RFI_GOTO(rfi_report_line(report, "pruned: result %s of op %d %s%s%s, no reader: -%lld bytes",
                                 op->def->result[j], i, op->def->name, op->scope[0] ? " in " : "", op->scope,
                                 (long long)rfi_bytes(&in->values[op->out[j]].type)));
    }
    RFI_GOTO(rfi_rewrite_op(&r, i, dead));
  }
  s = rfi_rewrite_end(&r, out);
  rfi_free(in->ctx, needed);
  return s;
fail:
  if (r.map) rfi_rewrite_abort(&r);
  rfi_free(in->ctx, needed);
  return s;
}

/* ---- CSE ---- */

typedef struct cse {
  const rfr_trace *t;
  rfr_value *same;   /* per value: the earlier value that equals it */
  bool *gone;        /* per op: merged into an earlier one */
  bool *shared;      /* per op: merged with equal ops of other microbatches */
  int8_t *to;        /* per op: the phase to which it is hoisted; -1: it is not hoisted */
  bool split_phases; /* the trace has one microbatch, but values that depend only on weights serve all microbatches */
  bool sharded;      /* weights are gathered only temporarily */
  int *slot;         /* hash table of op indices with open addressing; -1: empty */
  uint64_t mask;
} cse;

static bool mergeable(const rfi_opr *op) {
  if (op->def->flags & (RFI_STATE | RFI_HOST | RFI_COLLECTIVE)) return false;
  for (int j = 0; j < op->n_out; j++)
    if (op->def->alias[j] >= 0 && op->def->alias[j] < op->n_in && op->in[op->def->alias[j]] >= 0) return false;
  return true;
}

static uint64_t op_hash(const cse *c, const rfi_opr *op) {
  uint64_t h = 0xcbf29ce484222325u ^ (uint64_t)op->def->code;
  for (int k = 0; k < op->n_in; k++) h = (h ^ (uint64_t)(op->in[k] < 0 ? -1 : c->same[op->in[k]])) * 0x100000001b3u;
  h = rfi_attrs_hash(op, h);
  return h ^ h >> 29;
}

static bool ops_same(const cse *c, const rfi_opr *a, const rfi_opr *b) {
  if (a->def != b->def || a->n_in != b->n_in) return false;
  if (rfi_is_random(a) && a->microbatch != b->microbatch) return false;
  if (!rfi_attrs_equal(a, b)) return false;
  for (int k = 0; k < a->n_in; k++)
    if ((a->in[k] < 0 ? -1 : c->same[a->in[k]]) != (b->in[k] < 0 ? -1 : c->same[b->in[k]])) return false;
  for (int j = 0; j < a->n_out; j++)
    if ((a->out[j] < 0) != (b->out[j] < 0)) return false;
  return true;
}

static void find_same(cse *c) {
  const rfr_trace *t = c->t;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (!mergeable(op)) continue;
    uint64_t h = op_hash(c, op) & c->mask;
    while (c->slot[h] >= 0 && !ops_same(c, &t->ops[c->slot[h]], op)) h = (h + 1) & c->mask;
    int first = c->slot[h];
    if (first < 0) {
      c->slot[h] = i;
      continue;
    }
    c->gone[i] = true;
    if (t->ops[first].microbatch != op->microbatch) c->shared[first] = true;
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0) c->same[op->out[j]] = c->same[t->ops[first].out[j]];
  }
}

/* ---- hoisting ---- */

/* The kind of input that a value depends on, in ascending order: constants, frozen inputs, weights, the step. A value
 * has the maximum over its inputs. */
enum { DEPENDS_NONE, DEPENDS_FROZEN, DEPENDS_WEIGHT, DEPENDS_STEP };

/* Whether an input is a scale of delayed scaling: it changes only when a step ends. */
static bool is_scale(const rfr_trace *t, int input) {
  return strcmp(t->values[t->inputs[input]].name, RFR_RECIPE_SCALE) == 0;
}

static void find_dependence(const rfr_trace *t, const cse *c, uint8_t *depends) {
  for (int i = 0; i < t->n_inputs; i++) {
    int role = t->values[t->inputs[i]].role;
    depends[t->inputs[i]] = role == RFR_ROLE_CONST              ? DEPENDS_FROZEN
                            : c->sharded                        ? DEPENDS_STEP
                            : is_scale(t, i) && c->split_phases ? DEPENDS_WEIGHT
                            : role == RFR_ROLE_FROZEN           ? DEPENDS_FROZEN
                            : role == RFR_ROLE_TRAINABLE        ? DEPENDS_WEIGHT
                                                                : DEPENDS_STEP;
  }
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    uint8_t most = op->def->flags & (RFI_STATE | RFI_HOST) ? DEPENDS_STEP : DEPENDS_NONE;
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= 0 && depends[c->same[op->in[k]]] > most) most = depends[c->same[op->in[k]]];
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0) depends[op->out[j]] = most;
  }
}

/* The phase to which op i is hoisted; -1: it is not hoisted. */
static int hoisted(const rfr_trace *t, const cse *c, const uint8_t *depends, int i) {
  const rfi_opr *op = &t->ops[i];
  if (c->gone[i] || op->n_out == 0 || op->out[0] < 0 || !mergeable(op)) return -1;
  if (op->def->flags & RFI_LOCAL) return -1;
  int d = depends[op->out[0]];
  if (d == DEPENDS_FROZEN) return RFR_PHASE_LOAD; /* includes views, which need no kernel */
  if (d == DEPENDS_WEIGHT && c->split_phases) return RFR_PHASE_SETUP;
  if (d <= DEPENDS_WEIGHT && c->shared[i]) return RFR_PHASE_SETUP;
  return -1;
}

/* An op is hoisted only if the producers of its operands are hoisted at least as early. The constant cotangent of a
 * loss, for example, depends on nothing and is not hoisted. */
static void find_hoisted(const rfr_trace *t, const cse *c, const uint8_t *depends) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    c->to[i] = (int8_t)hoisted(t, c, depends, i);
    for (int k = 0; k < op->n_in && c->to[i] >= 0; k++) {
      int maker = op->in[k] < 0 ? -1 : t->values[c->same[op->in[k]]].op;
      if (maker >= 0 && (c->to[maker] < 0 || c->to[maker] > c->to[i])) c->to[i] = -1;
    }
  }
}

static rfr_status emit(rfi_rewrite *r, const cse *c, int i, int phase) {
  const rfi_opr *old = &r->from->ops[i];
  for (int k = 0; k < old->n_in; k++)
    if (old->in[k] >= 0) r->map[old->in[k]] = r->map[c->same[old->in[k]]];
  if (phase < 0) return rfi_rewrite_op(r, i, NULL);
  rfi_opr op = *old;
  rfr_value in[64];
  bool dead[RFI_MAX_NAMES];
  if (op.n_in > 64) return rfi_rewrite_op(r, i, NULL);
  for (int k = 0; k < op.n_in; k++) in[k] = old->in[k] < 0 ? RFR_NONE : r->map[old->in[k]];
  for (int j = 0; j < op.n_out; j++) dead[j] = old->out[j] < 0;
  op.in = in;
  op.phase = (uint8_t)phase;
  op.microbatch = -1;
  op.reason =
      phase == RFR_PHASE_LOAD ? "hoisted: depends only on frozen inputs" : "hoisted: shared by all microbatches";
  return rfi_rewrite_as(r, i, &op, dead);
}

static rfr_status cse_and_hoist(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  rfr_status s;
  rfi_rewrite r = {.from = in};
  cse c = {.t = in, .split_phases = o->split_phases, .sharded = o->sharded};
  uint8_t *depends = NULL;
  for (c.mask = 64; c.mask < 2 * (uint64_t)in->n_ops; c.mask *= 2) {}
  RFI_GOTO(RFI_ALLOC(in->ctx, c.mask * sizeof *c.slot, &c.slot));
  memset(c.slot, 0xff, c.mask * sizeof *c.slot);
  c.mask--;
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)(in->n_values + 1) * sizeof *c.same, &c.same));
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &c.gone));
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &c.shared));
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &c.to));
  RFI_GOTO(RFI_ALLOC(in->ctx, (size_t)in->n_values + 1, &depends));
  for (int v = 0; v < in->n_values; v++) c.same[v] = v;
  find_same(&c);
  find_dependence(in, &c, depends);
  find_hoisted(in, &c, depends);
  RFI_GOTO(rfi_rewrite_begin(in, &r));
  for (int phase = RFR_PHASE_LOAD; phase <= RFR_PHASE_SETUP; phase++)
    for (int i = 0; i < in->n_ops; i++) {
      if (c.to[i] != phase) continue;
      RFI_GOTO(rfi_report_line(report, "hoisted: op %d %s%s%s to phase %s", i, in->ops[i].def->name,
                               in->ops[i].scope[0] ? " in " : "", in->ops[i].scope,
                               phase == RFR_PHASE_LOAD ? "load: depends only on frozen inputs"
                                                       : "setup: shared by all microbatches"));
      RFI_GOTO(emit(&r, &c, i, phase));
    }
  for (int i = 0; i < in->n_ops; i++) {
    if (c.gone[i]) {
      if (!(in->ops[i].def->flags & RFI_VIEW))
        RFI_GOTO(rfi_report_line(report, "merged: op %d %s%s%s equals an earlier one", i, in->ops[i].def->name,
                                 in->ops[i].scope[0] ? " in " : "", in->ops[i].scope));
    } else if (c.to[i] < 0) {
      RFI_GOTO(emit(&r, &c, i, -1));
    }
  }
  for (rfr_value v = 0; v < in->n_values; v++) r.map[v] = r.map[c.same[v]];
  s = rfi_rewrite_end(&r, out);
  goto done;
fail:
  if (r.map) rfi_rewrite_abort(&r);
done:
  rfi_free(in->ctx, c.slot);
  rfi_free(in->ctx, c.same);
  rfi_free(in->ctx, c.gone);
  rfi_free(in->ctx, c.shared);
  rfi_free(in->ctx, c.to);
  rfi_free(in->ctx, depends);
  return s;
}

rfr_status rfi_pass_prune(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  rfr_trace *live, *merged;
  *out = NULL;
  if (!o->prune) {
    RFI_TRY(rfi_report_line(report, "nothing: the pass is off"));
    return rfi_copy_trace(in, out);
  }
  RFI_TRY(rfi_dce(in, report, &live));
  rfr_status s = cse_and_hoist(live, o, report, &merged);
  rfr_trace_destroy(live);
  if (s == RFR_OK) *out = merged;
  return s;
}
