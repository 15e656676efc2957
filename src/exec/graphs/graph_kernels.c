/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of callables: selected once per callable, with a range per part; arguments per slot; and running a part, as a
 * graph or kernel by kernel.
 */
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

static rfr_status select_kernels(rfr_graphs *g, rfi_callable *c) {
  rfi_exec_target m = g->m;
  m.strings = g->placed;
  c->bound = rfi_arena_alloc(g->placed, sizeof *c->bound * (size_t)(c->trace->n_ops + 1));
  if (!c->bound) return RFR_NO_MEMORY;
  RFI_TRY(rfi_select_ops(&m, c->trace, c->bound, &c->n_bound));
  for (int part = 0, i = 0; part <= RFI_PARTS; part++) {
    while (part > 0 && i < c->n_bound && c->bound[i].op < c->start[part]) i++;
    c->first[part] = i;
  }
  return RFR_OK;
}

rfr_status rfi_graphs_select_kernels(rfr_graphs *g) {
  rfi_arena_destroy(g->placed);
  g->placed = NULL;
  RFI_TRY(rfi_arena_create(g->m.ctx, &g->placed));
  for (int i = 0; i < g->n; i++)
    if (select_kernels(g, &g->callable[i]) != RFR_OK) return rfi_fail_prefix("callable %d: ", i);
  return RFR_OK;
}

/* Copies the bound ops of a callable, with their own arguments. */
static rfr_status make_instance(rfr_graphs *g, rfi_callable *c, rfi_instance *x) {
  x->bound = rfi_arena_alloc(g->m.strings, sizeof *x->bound * (size_t)(c->n_bound + 1));
  if (!x->bound) return RFR_NO_MEMORY;
  for (int i = 0; i < c->n_bound; i++) {
    const size_t n = (size_t)(c->bound[i].call.n_in + c->bound[i].call.n_out);
    rfi_arg *args = rfi_arena_alloc(g->m.strings, sizeof *args * (n + 1));
    if (!args) return RFR_NO_MEMORY;
    memcpy(args, c->bound[i].call.in, sizeof *args * n);
    x->bound[i] = c->bound[i];
    x->bound[i].call.in = args;
    x->bound[i].call.out = args + x->bound[i].call.n_in;
  }
  return RFR_OK;
}

rfr_status rfi_graphs_make_instances(rfr_graphs *g) {
  for (int i = 0; i < g->n; i++) {
    rfi_callable *c = &g->callable[i];
    const int slots = g->stage[c->stage].slots;
    if (!(c->instance = rfi_arena_alloc(g->m.strings, sizeof *c->instance * (size_t)(slots + 1)))) return RFR_NO_MEMORY;
    for (int k = 0; k < slots; k++) RFI_TRY(make_instance(g, c, &c->instance[k]));
  }
  return RFR_OK;
}

rfr_status rfi_graphs_run_part(rfr_graphs *g, int callable, int slot, rfi_part part, bool eager) {
  const rfi_callable *c = &g->callable[callable];
  const rfi_instance *x = &c->instance[slot];
  if (!rfi_has(c, part)) return RFR_OK;
  const rfi_bound *bound = x->bound + c->first[part];
  const rfr_status s = !eager && x->graph[part]
                           ? g->m.backend->launch(g->m.device, x->graph[part], g->from)
                           : g->m.backend->run(g->m.device, bound, c->first[part + 1] - c->first[part]);
  return rfi_name_failed(s, g->m.backend, g->m.device, c->trace, c->name, bound);
}
