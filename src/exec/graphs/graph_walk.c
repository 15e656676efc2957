/* SPDX-License-Identifier: Apache-2.0
 *
 * Capture: of each callable and slot one graph per part that has ops. Nothing runs.
 */
#include "exec/graphs/graphed.h"

void rfi_graph_drop(rfr_graphs *g, int callable, int slot) {
  rfi_instance *x = &g->callable[callable].instance[slot];
  for (int part = 0; part < RFI_PARTS; part++) {
    g->memory.graphs -= x->graph[part] != NULL;
    g->m.backend->graph_destroy(g->m.device, x->graph[part]);
    x->graph[part] = NULL;
  }
}

static rfr_status capture_part(rfr_graphs *g, int callable, int slot, rfi_part part) {
  const rfi_callable *c = &g->callable[callable];
  rfi_instance *x = &c->instance[slot];
  if (!rfi_has(c, part)) return RFR_OK;
  RFI_TRY(g->m.backend->capture(g->m.device, x->bound + c->first[part], c->first[part + 1] - c->first[part],
                                &x->graph[part]));
  g->memory.graphs++;
  return RFR_OK;
}

rfr_status rfi_graph_capture(rfr_graphs *g) {
  for (int c = 0; c < g->n; c++) {
    RFI_TRY(capture_part(g, c, 0, RFI_PART_SETUP)); /* shared by all slots */
    for (int slot = 0; slot < g->stage[g->callable[c].stage].slots; slot++)
      for (int part = RFI_PART_F; part < RFI_PARTS; part++) RFI_TRY(capture_part(g, c, slot, (rfi_part)part));
  }
  return RFR_OK;
}
