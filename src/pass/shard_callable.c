/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards of a callable: each rank has one shard of every parameter and of its main gradient, flat and zero-padded to
 * equal length. The schedule decides when parameters are gathered and gradients reduced (UNSHARD, REDUCE), so this runs
 * after the passes and leaves all other ops unchanged:
 *
 *   "w" (shard) -> all_gather -> view of w's shape                        phase setup, before every reader of w
 *   the ops, which accumulate into the gathered gradient
 *   gathered gradient -> reduce_scatter -> added to "grad.w" (shard)      phase optim, at the end
 *
 * No op may read a parameter before its gather: prune hoists nothing where parameters are sharded.
 */
#include <string.h>

#include "pass/pass.h"

typedef struct sharding {
  const rfi_shard *o;
  rfi_rewrite r;
  rfr_value *shard; /* per input of the old trace: the input with this rank's shard; RFR_NONE: not sharded */
} sharding;

static const rfr_source nowhere;

static bool is_gradient(const sharding *s, const rfi_value *x) {
  const rfr_trace *t = s->r.from;
  const size_t n = strlen(s->o->gradient);
  if (x->role != RFR_ROLE_STATE || strncmp(x->name, s->o->gradient, n) != 0) return false;
  const int of = rfi_names_find(&t->input_names, x->name + n);
  return of >= 0 && t->values[t->inputs[of]].role == RFR_ROLE_TRAINABLE;
}

static int64_t shard_size(const sharding *s, const rfr_type *type) {
  return (rfi_count(type) + s->o->ranks - 1) / s->o->ranks;
}

/* ---- inputs ---- */

static rfr_value add_shard(sharding *s, const rfi_value *x) {
  return rfr_input_at(s->r.to, nowhere, x->name, (rfr_role)x->role, x->type.dtype, 1,
                      (int64_t[]){shard_size(s, &x->type)});
}

static rfr_status add_inputs(sharding *s) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  for (int i = 0; i < from->n_inputs; i++) {
    const rfi_value *x = &from->values[from->inputs[i]];
    s->shard[i] = RFR_NONE;
    if (rfi_is_parameter(x->role)) {
      s->shard[i] = add_shard(s, x);
    } else if (is_gradient(s, x)) {
      char *name = rfi_arena_printf(to->arena, "%s%s", s->o->gathered, x->name);
      if (!name) return RFR_NO_MEMORY;
      s->r.map[from->inputs[i]] =
          rfr_input_at(to, nowhere, name, RFR_ROLE_STATE, x->type.dtype, x->type.rank, x->type.shape);
      s->shard[i] = add_shard(s, x);
    } else {
      RFI_TRY(rfi_rewrite_input(&s->r, i));
    }
  }
  return rfr_trace_status(to);
}

/* ---- ops ---- */

static rfr_status gather(sharding *s) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  rfr_set_phase(to, RFR_PHASE_SETUP);
  for (int i = 0; i < from->n_inputs; i++) {
    const rfi_value *x = &from->values[from->inputs[i]];
    if (!rfi_is_parameter(x->role)) continue;
    rfr_value y = rfr_all_gather_at(to, nowhere, s->shard[i], s->o->ranks);
    if (shard_size(s, &x->type) * s->o->ranks != rfi_count(&x->type))
      y = rfr_slice_at(to, nowhere, y, 0, 0, rfi_count(&x->type));
    s->r.map[from->inputs[i]] = rfr_reshape_at(to, nowhere, y, x->type.rank, x->type.shape);
  }
  return rfr_trace_status(to);
}

/* Reduce-scatters the last version of the gathered gradient. */
static rfr_status reduce(sharding *s, int i) {
  const rfr_trace *from = s->r.from;
  rfr_trace *to = s->r.to;
  const rfi_value *x = &from->values[from->inputs[i]];
  const int out = rfi_names_find(&from->output_names, x->name);
  RFI_CHECK(out >= 0);
  const int64_t n = rfi_count(&x->type), padded = shard_size(s, &x->type) * s->o->ranks;
  rfr_value y = rfr_reshape_at(to, nowhere, s->r.map[from->outputs[out].value], 1, &n);
  const rfi_attr pad[3] = {rfi_i(0), rfi_i(0), rfi_i(padded)};
  if (padded != n) y = rfi_record(to, nowhere, RFI_OP_pad, 1, &y, pad, NULL);
  y = rfr_reduce_scatter_at(to, nowhere, y, s->o->ranks);
  s->r.map[from->outputs[out].value] =
      rfi_record(to, nowhere, RFI_OP_accumulate, 2, (rfr_value[]){y, s->shard[i]}, NULL, NULL);
  return rfr_trace_status(to);
}

static rfr_status rewrite(sharding *s) {
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

rfr_status rfi_shard_callable(const rfr_trace *in, const rfi_shard *o, rfr_trace **out) {
  sharding s = {.o = o};
  rfr_status st;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(in->ctx, sizeof *s.shard * (size_t)(in->n_inputs + 1), &s.shard));
  st = rfi_rewrite_open(in, &s.r);
  if (st == RFR_OK) st = rewrite(&s);
  if (st == RFR_OK) st = rfi_rewrite_end(&s.r, out);
  else if (s.r.map) rfi_rewrite_abort(&s.r);
  rfi_free(in->ctx, s.shard);
  return st;
}
