/* SPDX-License-Identifier: Apache-2.0
 *
 * States that a step advances when it ends. Step counters: the step block and the states of named random streams, from which random ops read the step. Each step
 * advances the counters in the graphs' memory when it ends or is aborted, on the device and in stream order, as
 * rfr_step_end does; an aborted step counts as skipped. A counter that a callable writes, or that lies in the caller's
 * memory, is advanced by the callable or the caller.
 *
 * The states of delayed scaling are updated when a step ends, from the amaxes that its microbatches have collected
 * (pass/quantize_delayed.c). An aborted step leaves them as they are, and so do an evaluation and warm-up, which end
 * no step. With a communicator all its ranks have the same linears and get the same states.
 */
#include <string.h>

#include "base/base.h"
#include "core/rng.h"
#include "exec/graphs/graphed.h"

static bool is_counted(const rfi_named *x) {
  const rfr_type *type = &x->tensor.type;
  const char *name = x->tensor.name;
  return x->tensor.role == RFR_ROLE_STATE && x->offset >= 0 && !x->written && type->dtype == RFR_I64 &&
         type->rank == 1 && type->shape[0] == 4 &&
         (strcmp(name, "step") == 0 || strncmp(name, RFI_STREAM_PREFIX, strlen(RFI_STREAM_PREFIX)) == 0);
}

int rfi_graphs_counted(const rfr_graphs *g) {
  int n = 0;
  for (int i = 0; i < g->n_named; i++) n += is_counted(&g->named[i]);
  return n;
}

static unsigned char *address(const void *user, rfr_value owner) {
  const rfr_graphs *g = user;
  const rfr_trace *t = g->counts.trace;
  if (owner == t->inputs[0]) return g->arena + g->counts.skip_at;
  return g->named[rfi_names_find(&g->names, t->values[owner].name)].tensor.data;
}

static rfr_value state_like(const rfr_graphs *g, rfr_trace *t, const char *name) {
  const rfr_type *type = &g->named[rfi_names_find(&g->names, name)].tensor.type;
  return rfr_input(t, name, RFR_ROLE_STATE, type->dtype, type->rank, type->shape);
}

static bool is_delayed(const rfr_graphs *g) { return rfi_names_find(&g->names, RFI_RECIPE_AMAX) >= 0; }

/* The update of delayed scaling, with the largest amaxes of all ranks. */
static rfr_status record_update(const rfr_graphs *g, rfr_trace *t) {
  const rfr_source nowhere = {NULL, 0};
  const rfi_attr ranks = rfi_i(g->m.comm ? g->m.comm->size : 1);
  const rfi_attr rule[] = {rfi_i(g->recipe.delayed.margin), rfi_i(g->recipe.delayed.rule == RFR_AMAX_MOST_RECENT)};
  rfr_value amax = state_like(g, t, RFI_RECIPE_AMAX), out[RFI_MAX_NAMES];
  if (ranks.i > 1) {
    rfr_scope(t, "recipe");
    amax = rfi_record(t, nowhere, RFI_OP_all_gather, 1, &amax, &ranks, NULL);
  }
  rfr_value in[] = {state_like(g, t, RFR_RECIPE_HISTORY), state_like(g, t, RFR_RECIPE_SCALE), RFR_NONE, amax};
  rfi_record(t, nowhere, RFI_OP_scale_update, 4, in, rule, out);
  return rfr_trace_status(t);
}

void rfi_graphs_counts_address(rfr_graphs *g) {
  if (g->counts.n > 0) rfi_set_op_addresses(g->counts.trace, g->counts.bound, g->counts.n, address, g);
}

rfr_status rfi_graphs_counts_create(rfr_graphs *g) {
  rfi_counts *x = &g->counts;
  x->n_counters = rfi_graphs_counted(g);
  if (x->n_counters == 0 && !is_delayed(g)) return RFR_OK;
  RFI_TRY(rfr_trace_create(g->m.ctx, &x->trace));
  const rfr_value skip = rfr_input(x->trace, "skip", RFR_ROLE_STATE, RFR_I32, 1, ((int64_t[]){1}));
  for (int i = 0; i < g->n_named; i++) {
    const char *name = g->named[i].tensor.name;
    if (!is_counted(&g->named[i])) continue;
    const rfr_value block = rfr_input(x->trace, name, RFR_ROLE_STATE, RFR_I64, 1, ((int64_t[]){4}));
    rfr_output(x->trace, name, rfr_step_end(x->trace, block, skip));
  }
  if (is_delayed(g)) RFI_TRY(record_update(g, x->trace));
  RFI_TRY(rfr_trace_finish(x->trace));
  x->bound = rfi_arena_alloc(g->m.strings, sizeof *x->bound * (size_t)(x->trace->n_ops + 1));
  if (!x->bound) return RFR_NO_MEMORY;
  RFI_TRY(rfi_select_ops(&g->m, x->trace, x->bound, &x->n));
  rfi_graphs_counts_address(g);
  return RFR_OK;
}

rfr_status rfi_graphs_clear_amaxes(rfr_graphs *g) {
  if (!is_delayed(g)) return RFR_OK;
  const rfr_tensor *x = &g->named[rfi_names_find(&g->names, RFI_RECIPE_AMAX)].tensor;
  return g->m.backend->fill(g->m.device, x->data, 0, (size_t)x->bytes);
}

rfr_status rfi_graphs_count(rfr_graphs *g, bool skipped) {
  const rfi_backend *b = g->m.backend;
  unsigned char *skip = g->arena + g->counts.skip_at;
  if (g->counts.n == 0) return RFR_OK;
  if (!skipped) return b->run(g->m.device, g->counts.bound, g->counts.n);
  if (g->counts.n_counters == 0) return RFR_OK;
  RFI_TRY(b->fill(g->m.device, skip, 1, 1));
  RFI_TRY(b->run(g->m.device, g->counts.bound, g->counts.n_counters));
  return b->fill(g->m.device, skip, 0, 1);
}
