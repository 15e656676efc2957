/* SPDX-License-Identifier: Apache-2.0
 *
 * Delayed scaling: the scales of a step come from the amax of earlier steps, which two states hold: the history (H,S)
 * and the scales (S). Each linear layer has three slots, numbered in the order of recording: 3 l for x, 3 l + 1 for w,
 * 3 l + 2 for dy. Microbatches share them, and so do the experts of a layer; linear layers that read the same x use the
 * slot of the first.
 *
 * In a program of a complete step, the last ops update the states, with the largest amax of each slot over all
 * microbatches and, in a program with collectives, over all ranks: one all_gather of scope "recipe" gives every rank
 * the amax values of all ranks, so that all ranks compute the same states. A skipped step does not change the states. A
 * collect_amax takes at most RFR_MAX_LIST amax values. So there may be several in a row, each with the result of the
 * previous one as an operand.
 *
 * In graphed callables, each part collects its amax values into a third state, recipe.amax (2,S). All callables of the
 * set share this state, and the graphs clear it when a step begins. When the step ends, the graphs update history and
 * scales (callable/graph_counts.c).
 */
#include "pass/quantize.h"

#include "ops/op_index.h"

rfr_status rfi_recipes_agree(const rfr_recipe *a, const rfr_recipe *b) {
  if (a->history == b->history && a->margin == b->margin && a->rule == b->rule) return RFR_OK;
  return rfi_fail(RFI_E_RECIPE, "two fp8_delayed recipes have different history, margin or rule, but a program or a "
                                "set of callables has one pair of states: use one recipe");
}

rfr_status rfi_delayed_begin(rfi_delayed *d, rfi_rewrite *r, rfi_arena *arena, int slots) {
  const int64_t shape[2] = {d->recipe->history, slots}, both[2] = {2, slots};
  d->arena = arena;
  d->amax_state = RFR_NONE;
  d->history = rfr_input_at(r->to, (rfr_source){NULL, 0}, RFR_RECIPE_HISTORY, RFR_ROLE_STATE, RFR_F32, 2, shape);
  d->scale = rfr_input_at(r->to, (rfr_source){NULL, 0}, RFR_RECIPE_SCALE, RFR_ROLE_STATE, RFR_F32, 1, &shape[1]);
  if (d->collects)
    d->amax_state = rfr_input_at(r->to, (rfr_source){NULL, 0}, RFR_RECIPE_AMAX, RFR_ROLE_STATE, RFR_F32, 2, both);
  return rfr_trace_status(r->to);
}

/* Appends an op with one operand and the labels of `like`. */
static rfr_status append(rfi_rewrite *r, const rfi_opr *like, rfi_opcode code, rfr_value x, const rfi_attr *attr,
                         rfr_value *out) {
  rfi_opr op = *like;
  op.def = rfi_op_def_get(code);
  op.n_in = 1, op.in = &x, op.attr = attr;
  return rfi_rewrite_new(r, &op, NULL, out);
}

rfr_status rfi_delayed_scale(const rfi_delayed *d, rfi_rewrite *r, const rfi_opr *like, int slot, int64_t slices,
                             rfr_value *out) {
  const rfi_attr slice[3] = {rfi_i(0), rfi_i(slot), rfi_i(1)}, expand[2] = {rfi_i(0), rfi_i(slices)};
  RFI_TRY(append(r, like, RFI_OP_slice, d->scale, slice, out));
  return slices == 1 ? RFR_OK : append(r, like, RFI_OP_expand, *out, expand, out);
}

rfr_status rfi_delayed_note(rfi_delayed *d, rfi_amax amax) {
  if (!rfi_arena_grow(d->arena, (void **)&d->list, &d->cap, d->n + 1, sizeof *d->list)) return RFR_NO_MEMORY;
  d->list[d->n++] = amax;
  return RFR_OK;
}

/* ---- the end of the step ---- */

/* The number of ranks of the program, as its collectives have it. */
static int64_t ranks_of(const rfr_trace *t) {
  int64_t ranks = 1;
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].def->flags & RFI_COLLECTIVE && t->ops[i].attr[0].i > ranks) ranks = t->ops[i].attr[0].i;
  return ranks;
}

static rfi_opr last_op(rfi_opcode code, int n_in, rfr_value *in, const rfi_attr *attr) {
  return (rfi_opr){.def = rfi_op_def_get(code),
                   .n_in = n_in,
                   .in = in,
                   .attr = attr,
                   .phase = RFR_PHASE_OPTIM,
                   .microbatch = -1,
                   .clone_of = -1,
                   .scope = "recipe",
                   .reason = "quantized"};
}

enum { ONTO = RFI_IN_collect_amax_onto, AMAX = RFI_IN_collect_amax_amax };

/* Appends the op that collects list[0 .. n) into *amax, f32 (2,S), a row per format. */
static rfr_status collect_list(const rfi_delayed *d, rfi_rewrite *r, const rfi_amax *list, int n, rfr_phase phase,
                               rfr_value *amax) {
  const int64_t slots = rfr_value_type(r->to, d->scale).shape[0];
  rfr_value in[AMAX + RFR_MAX_LIST];
  double at[RFR_MAX_LIST];
  rfi_attr attr[2] = {[RFI_AT_collect_amax_slots] = rfi_i(slots)};
  for (int i = 0; i < n; i++) {
    in[AMAX + i] = list[i].value;
    at[i] = (double)((list[i].format == RFR_E5M2 ? slots : 0) + list[i].slot);
  }
  in[ONTO] = *amax;
  attr[RFI_AT_collect_amax_at].l.n = n, attr[RFI_AT_collect_amax_at].l.x = at;
  rfi_opr op = last_op(RFI_OP_collect_amax, AMAX + n, in, attr);
  op.phase = (uint8_t)phase;
  return rfi_rewrite_new(r, &op, NULL, amax);
}

/* The largest amax of each slot of a step. */
static rfr_status collect(const rfi_delayed *d, rfi_rewrite *r, rfr_value *amax) {
  *amax = RFR_NONE;
  for (int first = 0; first < d->n; first += RFR_MAX_LIST) {
    const int n = d->n - first < RFR_MAX_LIST ? d->n - first : RFR_MAX_LIST;
    RFI_TRY(collect_list(d, r, d->list + first, n, RFR_PHASE_OPTIM, amax));
  }
  return RFR_OK;
}

/* In a callable each part collects its amax values into a state. Parts may run in any order, because a maximum does not
 * depend on the order. */
static rfr_status collect_parts(const rfi_delayed *d, rfi_rewrite *r) {
  rfi_amax list[RFR_MAX_LIST];
  rfr_value amax = d->amax_state;
  for (int phase = RFR_PHASE_FORWARD; phase <= RFR_PHASE_WGRAD; phase++) {
    int n = 0;
    for (int i = 0; i < d->n; i++) {
      if (d->list[i].phase == phase) list[n++] = d->list[i];
      if (n < RFR_MAX_LIST && i < d->n - 1) continue;
      if (n > 0) RFI_TRY(collect_list(d, r, list, n, (rfr_phase)phase, &amax));
      n = 0;
    }
  }
  rfr_output_at(r->to, (rfr_source){NULL, 0}, RFR_RECIPE_AMAX, amax);
  return rfr_trace_status(r->to);
}

/* Gathers the amaxes of all ranks, for an update with the maximum over ranks. */
static rfr_status gather(rfi_rewrite *r, int64_t ranks, rfr_value *amax) {
  const rfi_attr all = rfi_i(ranks);
  const rfi_opr op = last_op(RFI_OP_all_gather, 1, amax, &all);
  return rfi_rewrite_new(r, &op, NULL, amax);
}

static rfr_status update(const rfi_delayed *d, rfi_rewrite *r, rfr_value amax, rfr_value skip) {
  rfr_value in[] = {d->history, d->scale, skip, amax}, out[RFI_MAX_NAMES];
  const rfi_attr attr[] = {rfi_i(d->recipe->margin), rfi_i(d->recipe->rule == RFR_AMAX_MOST_RECENT)};
  const rfi_opr op = last_op(RFI_OP_scale_update, 4, in, attr);
  return rfi_rewrite_new(r, &op, NULL, out);
}

rfr_status rfi_delayed_end(const rfi_delayed *d, rfi_rewrite *r) {
  const rfr_trace *t = r->from;
  rfr_value skip = RFR_NONE, amax;
  bool backward = false;
  if (!d->recipe || d->n == 0) return RFR_OK;
  if (d->amax_state >= 0) return collect_parts(d, r);
  for (int i = 0; i < t->n_ops; i++) {
    if (t->ops[i].def->code == RFI_OP_step_end) skip = r->map[t->ops[i].in[1]];
    backward = backward || t->ops[i].phase == RFR_PHASE_DGRAD || t->ops[i].phase == RFR_PHASE_WGRAD;
  }
  if (!backward) return RFR_OK; /* an evaluation only reads the scales */
  RFI_TRY(collect(d, r, &amax));
  if (ranks_of(t) > 1) RFI_TRY(gather(r, ranks_of(t), &amax));
  return update(d, r, amax, skip);
}
