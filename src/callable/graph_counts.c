/* SPDX-License-Identifier: Apache-2.0
 *
 * States that a step advances when it ends, on the device and in stream order.
 *
 * Step counters: the step block and the states of named random streams, from which random ops read the step. They
 * advance as rfr_step_end does, also when a step is aborted, which counts as skipped. A counter that a callable writes,
 * or that is in the caller's memory, is advanced by the callable or the caller.
 *
 * History and scales of delayed scaling: they are updated from the amax values that the parts have collected in
 * recipe.amax. An aborted step does not change them. If recipe.amax is in the caller's memory, the caller updates them.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "core/rng.h"
#include "ops/op_index.h"

static const char SKIP[] = "graphs.skip"; /* a flag for the counters: 1 only while a step is aborted */

/* A state in our memory that no callable writes. */
static bool is_counted(const rfi_named *x) {
  const rfr_type *type = &x->tensor.type;
  const char *name = x->tensor.name;
  return x->tensor.role == RFR_ROLE_STATE && !x->tensor.data && !x->written && type->dtype == RFR_I64 &&
         type->rank == 1 && type->shape[0] == 4 &&
         (strcmp(name, "step") == 0 || strncmp(name, RFI_STREAM_PREFIX, strlen(RFI_STREAM_PREFIX)) == 0);
}

static int counted(const rfr_graphs *g) {
  int n = 0;
  for (int i = 0; i < g->m.store.n; i++) n += is_counted(&g->m.store.named[i]);
  return n;
}

static const rfi_named *amaxes(const rfr_graphs *g) { return rfi_storage_find(&g->m.store, RFR_RECIPE_AMAX); }

static int ranks(const rfr_graphs *g) { return g->m.comm ? g->m.comm->size : 1; }

static rfr_value state_like(const rfr_graphs *g, rfr_trace *t, const char *name) {
  const rfr_type *type = &rfi_storage_find(&g->m.store, name)->tensor.type;
  return rfr_input(t, name, RFR_ROLE_STATE, type->dtype, type->rank, type->shape);
}

/* The update of delayed scaling, with the largest amaxes of all ranks. */
static rfr_status record_update(const rfr_graphs *g, rfr_trace *t) {
  const rfr_source nowhere = {NULL, 0};
  const rfi_attr all = rfi_i(ranks(g));
  const rfi_attr rule[] = {rfi_i(g->recipe.delayed.margin), rfi_i(g->recipe.delayed.rule == RFR_AMAX_MOST_RECENT)};
  rfr_value amax = state_like(g, t, RFR_RECIPE_AMAX), out[RFI_MAX_NAMES];
  rfr_scope(t, "recipe");
  if (all.i > 1) amax = rfi_record(t, nowhere, RFI_OP_all_gather, 1, &amax, &all, NULL);
  rfr_value in[] = {state_like(g, t, RFR_RECIPE_HISTORY), state_like(g, t, RFR_RECIPE_SCALE), RFR_NONE, amax};
  rfi_record(t, nowhere, RFI_OP_scale_update, 4, in, rule, out);
  return rfr_trace_status(t);
}

rfr_status rfi_graphs_counts_create(rfr_graphs *g) {
  rfi_exec_unit *u = &g->counts;
  rfi_named *fresh;
  const int n = g->m.store.n;
  const bool updates = amaxes(g) && !amaxes(g)->tensor.data; /* else the caller updates history and scales */
  if (counted(g) == 0 && !updates) return RFR_OK;
  u->name = "counters";
  RFI_TRY(rfr_trace_create(g->m.ctx, &u->trace));
  const rfr_value skip = rfr_input(u->trace, SKIP, RFR_ROLE_STATE, RFR_I32, 1, ((int64_t[]){1}));
  RFI_TRY(rfr_trace_status(u->trace));
  RFI_TRY(rfi_storage_add(&g->m.store, g->m.strings, &u->trace->values[skip], "callable", u->name, &fresh));
  for (int i = 0; i < n; i++) {
    const char *name = g->m.store.named[i].tensor.name;
    if (!is_counted(&g->m.store.named[i])) continue;
    const rfr_value block = rfr_input(u->trace, name, RFR_ROLE_STATE, RFR_I64, 1, ((int64_t[]){4}));
    rfr_output(u->trace, name, rfr_step_end(u->trace, block, skip));
  }
  const int counters = u->trace->n_ops;
  if (updates) RFI_TRY(record_update(g, u->trace));
  RFI_TRY(rfr_trace_finish(u->trace));
  rfi_unit_set_step(u);
  for (int part = RFI_PART_I; part <= RFI_PART_REDUCE; part++) u->start[part] = counters;
  RFI_TRY(rfi_unit_select(&g->m, u, g->m.strings, NULL));
  return rfi_unit_instantiate(&g->m, u, 1);
}

rfr_status rfi_graphs_clear_amaxes(rfr_graphs *g) {
  const rfi_named *x = amaxes(g);
  return x ? rfi_executor_fill(&g->m, x->tensor.data, 0, x->tensor.bytes) : RFR_OK;
}

rfr_status rfi_graphs_count(rfr_graphs *g, bool skipped) {
  if (!g->counts.trace) return RFR_OK;
  void *flag = rfi_storage_find(&g->m.store, SKIP)->tensor.data;
  if (skipped) RFI_TRY(rfi_executor_fill(&g->m, flag, 1, 1));
  RFI_TRY(rfi_unit_run(&g->m, &g->counts, 0, RFI_PART_F, true, NULL));
  if (skipped) return rfi_executor_fill(&g->m, flag, 0, 1);
  return rfi_unit_run(&g->m, &g->counts, 0, RFI_PART_REDUCE, true, NULL);
}
