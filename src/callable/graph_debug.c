/* SPDX-License-Identifier: Apache-2.0
 *
 * Debug mode: dead buffers are filled with NaN (floats) or -1 (integers). A slot is filled completely before its next
 * forward and when a step begins. With gradients it is also filled after its last gradient, except for the input
 * gradients, which stay valid. A block is filled after the last I. Shared bytes are filled after each part, gathered
 * parameters and unreduced gradients when they are freed. So a tensor that is used after its lifetime reads as NaN or
 * -1, not as data of the next microbatch.
 */
#include "base/base.h"
#include "callable/graphed.h"

static rfr_status poison(const rfr_graphs *g, unsigned char *from, int64_t bytes) {
  return rfi_executor_fill(&g->m, from, RFI_POISON, bytes);
}

/* Finds the first input gradient in a slot from `at` on; false: none. */
static bool next_input_gradient(const rfr_graphs *g, const rfi_stage_plan *s, int slot, const unsigned char *at,
                                const unsigned char *end_of_slot, unsigned char **from, unsigned char **to) {
  bool found = false;
  for (int c = s->first; c < s->end; c++)
    for (int i = 0; i < g->callable[c].n_in; i++) {
      const rfi_port *p = &g->callable[c].in[i];
      if (p->link || p->grad.value < 0) continue;
      const rfr_tensor grad = rfi_port_tensor(g, slot, p, true);
      unsigned char *begin = grad.data, *end = begin + grad.bytes;
      if (end <= at || begin >= end_of_slot || (found && begin >= *from)) continue;
      *from = begin, *to = end;
      found = true;
    }
  return found;
}

rfr_status rfi_graphs_poison_ended(rfr_graphs *g, const rfi_stage_plan *s, int slot) {
  unsigned char *at = rfi_graphs_slot(g, s, slot), *end = at + s->bytes, *from, *to;
  while (next_input_gradient(g, s, slot, at, end, &from, &to)) {
    RFI_TRY(poison(g, at, from - at));
    at = to;
  }
  return poison(g, at, end - at);
}

rfr_status rfi_graphs_poison_block(rfr_graphs *g, const rfi_stage_plan *s, int slot) {
  return poison(g, rfi_graphs_block(g, s, slot), s->block_bytes);
}

rfr_status rfi_graphs_poison_slot(rfr_graphs *g, const rfi_stage_plan *s, int slot) {
  RFI_TRY(poison(g, rfi_graphs_slot(g, s, slot), s->bytes));
  return rfi_graphs_poison_block(g, s, slot);
}

rfr_status rfi_graphs_poison_region(rfr_graphs *g, rfi_region region) {
  return poison(g, rfi_address(&g->m.layout, region, 0), g->m.layout.bytes[region]);
}
