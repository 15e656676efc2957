/* SPDX-License-Identifier: Apache-2.0
 *
 * Delayed scaling: the scales of a step come from the amax of earlier steps, which two states hold: the history (H,S)
 * and the scales (S). Three slots belong to each linear, numbered as recorded: 3 l for x, 3 l + 1 for w, 3 l + 2 for
 * dy. Microbatches share them, and so do the experts of a layer; linears that read one x use the slot of the first.
 *
 * The states are updated by the last ops of the step, with the largest amax of each slot over all microbatches and,
 * in a program with collectives, over all ranks: one all_gather of scope "recipe" brings their amaxes to every rank, so
 * that all ranks update their states to the same bits. A skipped step leaves them as they are. An op takes at most
 * RFR_MAX_LIST amaxes of one format, so several may update the states one after the other; all amaxes of a slot are in
 * one of them.
 */
#include "pass/quantize.h"

#include <stdlib.h>
#include <string.h>

enum { HISTORY, STATE_SCALE, SKIP, FIRST_AMAX };

rfr_status rfi_delayed_recipe(rfi_delayed *d, const rfr_recipe *recipe) {
  const rfr_recipe *r = d->recipe;
  if (r && (r->history != recipe->history || r->margin != recipe->margin || r->rule != recipe->rule))
    return rfi_fail(RFI_E_RECIPE, "a program has two fp8_delayed recipes with different history, margin or rule; its "
                                  "states have one");
  d->recipe = recipe;
  return RFR_OK;
}

rfr_status rfi_delayed_begin(rfi_delayed *d, rfi_rewrite *r, rfi_arena *arena, int slots) {
  const int64_t shape[2] = {d->recipe->history, slots};
  d->arena = arena;
  d->history = rfr_input_at(r->to, (rfr_source){NULL, 0}, RFR_RECIPE_HISTORY, RFR_ROLE_STATE, RFR_F32, 2, shape);
  d->scale = rfr_input_at(r->to, (rfr_source){NULL, 0}, RFR_RECIPE_SCALE, RFR_ROLE_STATE, RFR_F32, 1, &shape[1]);
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

rfr_status rfi_delayed_note(rfi_delayed *d, rfi_rewrite *r, const rfi_opr *like, int slot, rfr_dtype format,
                            int64_t slices, rfr_value amax) {
  const rfi_attr all = rfi_i(-1);
  if (slices != 1) RFI_TRY(append(r, like, RFI_OP_max, amax, &all, &amax));
  if (!rfi_arena_grow(d->arena, (void **)&d->amax, &d->cap, d->n + 1, sizeof *d->amax)) return RFR_NO_MEMORY;
  d->amax[d->n] = (rfi_amax){amax, slot, d->n, format};
  d->n++;
  return RFR_OK;
}

static int by_format(const void *a, const void *b) {
  const rfi_amax *x = a, *y = b;
  if (x->format != y->format) return x->format < y->format ? -1 : 1;
  return x->slot != y->slot ? (x->slot < y->slot ? -1 : 1) : x->order - y->order;
}

/* The end of the longest run from `first` that one op may take. */
static int run_end(const rfi_delayed *d, int first) {
  int end = first, last = first; /* last: the end of the last complete slot */
  while (end < d->n && end - first < RFR_MAX_LIST && d->amax[end].format == d->amax[first].format) {
    end++;
    if (end == d->n || d->amax[end].slot != d->amax[end - 1].slot || d->amax[end].format != d->amax[first].format)
      last = end;
  }
  return last;
}

/* ---- ranks ---- */

/* The ranks of the program: those of its collectives. */
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

/* Replaces the amaxes by those of all ranks. They stay single values, as those of microbatches are: an update ignores
 * each that is not finite. */
static rfr_status gather(rfi_delayed *d, rfi_rewrite *r, int64_t ranks) {
  const int own = d->n;
  const rfi_attr axis = rfi_i(0), all = rfi_i(ranks);
  rfr_value x, *in = rfi_arena_alloc(d->arena, sizeof *in * (size_t)own);
  if (!in) return RFR_NO_MEMORY;
  if (ranks > INT32_MAX / own) return rfi_fail(RFI_E_OVERFLOW, "%d amaxes of %lld ranks", own, (long long)ranks);
  for (int i = 0; i < own; i++) in[i] = d->amax[i].value;
  const rfi_opr concat = last_op(RFI_OP_concat, own, in, &axis);
  RFI_TRY(rfi_rewrite_new(r, &concat, NULL, &x));
  const rfi_opr collect = last_op(RFI_OP_all_gather, 1, &x, &all);
  rfr_value gathered;
  RFI_TRY(rfi_rewrite_new(r, &collect, NULL, &gathered));
  const int n = own * (int)ranks;
  if (!rfi_arena_grow(d->arena, (void **)&d->amax, &d->cap, n, sizeof *d->amax)) return RFR_NO_MEMORY;
  for (int k = 0; k < n; k++) {
    const rfi_attr slice[3] = {rfi_i(0), rfi_i(k), rfi_i(1)};
    const rfi_opr op = last_op(RFI_OP_slice, 1, &gathered, slice);
    d->amax[k] = d->amax[k % own];
    d->amax[k].order = k;
    RFI_TRY(rfi_rewrite_new(r, &op, NULL, &d->amax[k].value));
  }
  d->n = n;
  return RFR_OK;
}

/* ---- the update ---- */

static rfr_status update(rfi_delayed *d, rfi_rewrite *r, int first, int end, rfr_value skip) {
  rfr_value in[FIRST_AMAX + RFR_MAX_LIST] = {d->history, d->scale, skip}, out[RFI_MAX_NAMES];
  double slots[RFR_MAX_LIST];
  rfi_attr attr[4] = {rfi_i(d->amax[first].format), rfi_i(d->recipe->margin),
                      rfi_i(d->recipe->rule == RFR_AMAX_MOST_RECENT)};
  for (int i = first; i < end; i++) in[FIRST_AMAX + i - first] = d->amax[i].value, slots[i - first] = d->amax[i].slot;
  attr[3].l.n = end - first, attr[3].l.x = slots;
  const rfi_opr op = last_op(RFI_OP_scale_update, FIRST_AMAX + end - first, in, attr);
  RFI_TRY(rfi_rewrite_new(r, &op, NULL, out));
  d->history = out[0], d->scale = out[1];
  return RFR_OK;
}

rfr_status rfi_delayed_end(rfi_delayed *d, rfi_rewrite *r) {
  const rfr_trace *t = r->from;
  rfr_value skip = RFR_NONE;
  bool backward = false;
  if (!d->recipe) return RFR_OK;
  for (int i = 0; i < t->n_ops; i++) {
    if (t->ops[i].def->code == RFI_OP_step_end) skip = r->map[t->ops[i].in[1]];
    backward = backward || t->ops[i].phase == RFR_PHASE_DGRAD || t->ops[i].phase == RFR_PHASE_WGRAD;
  }
  if (!backward) return RFR_OK; /* an evaluation reads the scales */
  if (ranks_of(t) > 1 && d->n > 0) RFI_TRY(gather(d, r, ranks_of(t)));
  qsort(d->amax, (size_t)d->n, sizeof *d->amax, by_format);
  for (int first = 0, end; first < d->n; first = end) {
    end = run_end(d, first);
    if (end == first)
      return rfi_fail(RFI_E_RECIPE,
                      "fp8_delayed supports at most %d amaxes of a tensor in a step, one per microbatch, rank and "
                      "separate expert; use fp8_current",
                      RFR_MAX_LIST);
    RFI_TRY(update(d, r, first, end, skip));
  }
  return RFR_OK;
}
