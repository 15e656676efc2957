/* SPDX-License-Identifier: Apache-2.0
 *
 * Step counters: the step block and the states of named random streams, from which random ops read the step. Each step
 * advances the counters in the graphs' memory when it ends or is aborted, on the device and in stream order, as
 * rfr_step_end does; an aborted step counts as skipped. A counter that a callable writes, or that lies in the caller's
 * memory, is advanced by the callable or the caller.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "core/rng.h"

static bool is_counted(const rfi_named *x) {
  const rfr_type *type = &x->tensor.type;
  const char *name = x->tensor.name;
  return x->tensor.role == RFR_ROLE_STATE && x->offset >= 0 && !x->written && type->dtype == RFR_I64 &&
         type->rank == 1 && type->shape[0] == 4 &&
         (strcmp(name, "step") == 0 || strncmp(name, RFI_STREAM_PREFIX, strlen(RFI_STREAM_PREFIX)) == 0);
}

int rfi_graphs_counted(const rfr_graphs *g) {
  int n = 0;
  for (int i = 0; i < g->m.store.n; i++) n += is_counted(&g->m.store.named[i]);
  return n;
}

static unsigned char *skip_flag(const rfr_graphs *g) {
  return rfi_address(&g->m.layout, RFI_REGION_PERSISTENT, g->counts.skip_at);
}

static unsigned char *address(const void *user, rfr_value owner) {
  const rfr_graphs *g = user;
  const rfr_trace *t = g->counts.u.trace;
  if (owner == t->inputs[0]) return skip_flag(g);
  return rfi_storage_find(&g->m.store, t->values[owner].name)->tensor.data;
}

rfr_status rfi_graphs_counts_create(rfr_graphs *g) {
  rfi_exec_unit *u = &g->counts.u;
  if (rfi_graphs_counted(g) == 0) return RFR_OK;
  u->name = "counters";
  RFI_TRY(rfr_trace_create(g->m.ctx, &u->trace));
  const rfr_value skip = rfr_input(u->trace, "skip", RFR_ROLE_STATE, RFR_I32, 1, ((int64_t[]){1}));
  for (int i = 0; i < g->m.store.n; i++) {
    const char *name = g->m.store.named[i].tensor.name;
    if (!is_counted(&g->m.store.named[i])) continue;
    const rfr_value block = rfr_input(u->trace, name, RFR_ROLE_STATE, RFR_I64, 1, ((int64_t[]){4}));
    rfr_output(u->trace, name, rfr_step_end(u->trace, block, skip));
  }
  RFI_TRY(rfr_trace_finish(u->trace));
  rfi_unit_set_step(u);
  RFI_TRY(rfi_unit_select(&g->m, u));
  RFI_TRY(rfi_unit_instantiate(&g->m, u, 1));
  rfi_unit_set_addresses(u, 0, address, g, NULL);
  return RFR_OK;
}

rfr_status rfi_graphs_count(rfr_graphs *g, bool skipped) {
  const rfi_backend *b = g->m.backend;
  unsigned char *skip = skip_flag(g);
  if (!g->counts.u.trace) return RFR_OK;
  if (skipped) RFI_TRY(b->fill(g->m.device, skip, 1, 1));
  RFI_TRY(rfi_unit_run(&g->m, &g->counts.u, 0, RFI_PART_F, true, NULL));
  return skipped ? b->fill(g->m.device, skip, 0, 1) : RFR_OK;
}
