/* SPDX-License-Identifier: Apache-2.0
 *
 * Shard: each rank holds its part of every parameter and of its gradient, flat and padded so that the parts are equally
 * long. Where the whole is there comes from outside (a schedule's UNSHARD and REDUCE), so this pass runs last, over a
 * trace whose ops stand in their order, and changes none of them:
 *
 *   "w" (its part) -> all_gather -> a view of w's shape      phase setup, in front of all that reads w
 *   the ops, which add onto the whole gradient
 *   the whole gradient -> reduce_scatter -> added onto "grad.w" (its part)      phase optim, at the end
 *
 * Nothing else may have been made of a parameter ahead of its gather: prune does not hoist where parameters are parts.
 */
#include <string.h>

#include "pass/pass.h"

typedef struct shard {
  const rfi_shard *o;
  rfi_rewrite r;
  rfr_value *part; /* per input of the old trace: the input that is this rank's part of it; RFR_NONE: it is whole */
} shard;

static const rfr_source nowhere;

static bool is_parameter(int role) { return role == RFR_ROLE_TRAINABLE || role == RFR_ROLE_FROZEN; }

static bool is_gradient(const shard *s, const rfi_value *x) {
  const rfr_trace *t = s->r.from;
  const size_t n = strlen(s->o->gradient);
  if (x->role != RFR_ROLE_STATE || strncmp(x->name, s->o->gradient, n) != 0) return false;
  const int of = rfi_names_find(&t->input_names, x->name + n);
  return of >= 0 && t->values[t->inputs[of]].role == RFR_ROLE_TRAINABLE;
}

static int64_t part_size(const shard *s, const rfr_type *whole) {
  return (rfi_count(whole) + s->o->ranks - 1) / s->o->ranks;
}

/* ---- inputs ---- */

static rfr_value add_part(shard *s, const rfi_value *x) {
  return rfr_input_at(s->r.to, nowhere, x->name, (rfr_role)x->role, x->type.dtype, 1,
                      (int64_t[]){part_size(s, &x->type)});
}

static rfr_status add_inputs(shard *s) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  for (int i = 0; i < from->n_inputs; i++) {
    const rfi_value *x = &from->values[from->inputs[i]];
    s->part[i] = RFR_NONE;
    if (is_parameter(x->role)) {
      s->part[i] = add_part(s, x);
    } else if (is_gradient(s, x)) {
      char *name = rfi_arena_printf(to->arena, "%s%s", s->o->whole, x->name);
      if (!name) return RFR_NO_MEMORY;
      s->r.map[from->inputs[i]] =
          rfr_input_at(to, nowhere, name, RFR_ROLE_STATE, x->type.dtype, x->type.rank, x->type.shape);
      s->part[i] = add_part(s, x);
    } else {
      RFI_TRY(rfi_rewrite_input(&s->r, i));
    }
  }
  return rfr_trace_status(to);
}

/* ---- ops ---- */

static rfr_status gather(shard *s) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  rfr_set_phase(to, RFR_PHASE_SETUP);
  for (int i = 0; i < from->n_inputs; i++) {
    const rfi_value *x = &from->values[from->inputs[i]];
    if (!is_parameter(x->role)) continue;
    rfr_value y = rfr_all_gather_at(to, nowhere, s->part[i], s->o->ranks);
    if (part_size(s, &x->type) * s->o->ranks != rfi_count(&x->type))
      y = rfr_slice_at(to, nowhere, y, 0, 0, rfi_count(&x->type));
    s->r.map[from->inputs[i]] = rfr_reshape_at(to, nowhere, y, x->type.rank, x->type.shape);
  }
  return rfr_trace_status(to);
}

/* The last version of the whole gradient goes to the ranks. */
static rfr_status reduce(shard *s, int i) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  const rfi_value *x = &from->values[from->inputs[i]];
  const int out = rfi_names_find(&from->output_names, x->name);
  RFI_CHECK(out >= 0);
  const int64_t n = rfi_count(&x->type), padded = part_size(s, &x->type) * s->o->ranks;
  rfr_value y = rfr_reshape_at(to, nowhere, s->r.map[from->outputs[out].value], 1, &n);
  const rfi_attr pad[3] = {rfi_i(0), rfi_i(0), rfi_i(padded)};
  if (padded != n) y = rfi_record(to, nowhere, RFI_OP_pad, 1, &y, pad, NULL);
  y = rfr_reduce_scatter_at(to, nowhere, y, s->o->ranks);
  s->r.map[from->outputs[out].value] =
      rfi_record(to, nowhere, RFI_OP_accumulate, 2, (rfr_value[]){y, s->part[i]}, NULL, NULL);
  return rfr_trace_status(to);
}

static rfr_status rewrite(shard *s) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  RFI_TRY(add_inputs(s));
  int i = 0;
  for (; i < from->n_ops && from->ops[i].phase == RFR_PHASE_LOAD; i++) RFI_TRY(rfi_rewrite_op(&s->r, i, NULL));
  rfr_scope(to, "");
  rfr_microbatch(to, -1);
  RFI_TRY(gather(s));
  for (; i < from->n_ops; i++) RFI_TRY(rfi_rewrite_op(&s->r, i, NULL));
  rfr_set_phase(to, RFR_PHASE_OPTIM);
  for (i = 0; i < from->n_inputs; i++)
    if (is_gradient(s, &from->values[from->inputs[i]])) RFI_TRY(reduce(s, i));
  return rfr_trace_status(to);
}

rfr_status rfi_pass_shard(const rfr_trace *in, const rfi_shard *o, rfr_trace **out) {
  shard s = {.o = o};
  rfr_status st;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(in->ctx, sizeof *s.part * (size_t)(in->n_inputs + 1), &s.part));
  st = rfi_rewrite_open(in, &s.r);
  if (st == RFR_OK) st = rewrite(&s);
  if (st == RFR_OK) st = rfi_rewrite_end(&s.r, out);
  else if (s.r.map) rfi_rewrite_abort(&s.r);
  rfi_free(in->ctx, s.part);
  return st;
}
