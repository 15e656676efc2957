/* SPDX-License-Identifier: Apache-2.0
 *
 * Step counters: the step block and the states of named random streams, from which random ops read the step. Each step
 * advances the counters in the graphs' memory when it ends or is aborted, on the device and in stream order, as
 * rfr_step_end does; an aborted step counts as skipped. A counter that a callable writes, or that lies in the caller's
 * memory, is advanced by the callable or the caller.
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

static unsigned char *skip_flag(const rfr_graphs *g) {
  return rfi_address(&g->layout, RFI_REGION_PERSISTENT, g->counts.skip_at);
}

static unsigned char *address(const void *user, rfr_value owner) {
  const rfr_graphs *g = user;
  const rfr_trace *t = g->counts.trace;
  if (owner == t->inputs[0]) return skip_flag(g);
  return g->named[rfi_names_find(&g->names, t->values[owner].name)].tensor.data;
}

rfr_status rfi_graphs_counts_create(rfr_graphs *g) {
  rfi_counts *x = &g->counts;
  const int n = rfi_graphs_counted(g);
  if (n == 0) return RFR_OK;
  RFI_TRY(rfr_trace_create(g->m.ctx, &x->trace));
  const rfr_value skip = rfr_input(x->trace, "skip", RFR_ROLE_STATE, RFR_I32, 1, ((int64_t[]){1}));
  for (int i = 0; i < g->n_named; i++) {
    const char *name = g->named[i].tensor.name;
    if (!is_counted(&g->named[i])) continue;
    const rfr_value block = rfr_input(x->trace, name, RFR_ROLE_STATE, RFR_I64, 1, ((int64_t[]){4}));
    rfr_output(x->trace, name, rfr_step_end(x->trace, block, skip));
  }
  RFI_TRY(rfr_trace_finish(x->trace));
  if (!(x->bound = rfi_arena_alloc(g->m.strings, sizeof *x->bound * (size_t)n))) return RFR_NO_MEMORY;
  RFI_TRY(rfi_select_ops(&g->m, x->trace, x->bound, &x->n));
  rfi_set_op_addresses(x->trace, x->bound, x->n, address, g);
  return RFR_OK;
}

rfr_status rfi_graphs_count(rfr_graphs *g, bool skipped) {
  const rfi_backend *b = g->m.backend;
  unsigned char *skip = skip_flag(g);
  if (g->counts.n == 0) return RFR_OK;
  if (skipped) RFI_TRY(b->fill(g->m.device, skip, 1, 1));
  RFI_TRY(b->run(g->m.device, g->counts.bound, g->counts.n));
  return skipped ? b->fill(g->m.device, skip, 0, 1) : RFR_OK;
}
