/* SPDX-License-Identifier: Apache-2.0
 *
 * Invalid group sizes (splits) in the caller's routing. Kernels clamp them, so no access is out of bounds, and the
 * error is reported to the caller. After each forward the result of splits_to_offsets is copied, in stream order, to a
 * ring in host memory: -1 until the copy has run, then 0, or 1 + the first bad group. The host reads the ring when a
 * step begins or ends and in rfr_graphs_wait, and waits only if the ring is full. So an error is reported at most one
 * ring of forwards late.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"

enum { FORWARDS = 64 }; /* ring entries per check */

rfr_status rfi_graphs_splits_create(rfr_graphs *g) {
  rfi_splits *s = &g->splits;
  for (int i = 0; i < g->n; i++) s->size += FORWARDS * g->callable[i].n_checked;
  s->found = -1;
  if (s->size == 0) return RFR_OK;
  s->check = rfi_arena_alloc(g->m.strings, sizeof *s->check * (size_t)s->size);
  if (!s->check) return RFR_NO_MEMORY;
  return g->m.backend->alloc(g->m.device, RFI_MEMORY_RING, sizeof *s->result * (size_t)s->size, (void **)&s->result);
}

/* Reads the results that have arrived; keeps the first invalid one. */
static void read_ring(rfi_splits *s) {
  for (; s->seen < s->launched; s->seen++) {
    const int at = (int)(s->seen % s->size);
    const int32_t result = __atomic_load_n(&s->result[at], __ATOMIC_ACQUIRE);
    if (result < 0) return;
    if (result == 0 || s->found >= 0 || s->seen < s->aborted) continue;
    s->found = result - 1;
    s->first = s->check[at];
  }
}

rfr_status rfi_graphs_splits_launched(rfr_graphs *g, const rfi_step_call *call) {
  rfi_splits *s = &g->splits;
  const rfi_callable *c = call->of;
  for (int k = 0; k < c->n_checked; k++) {
    if (s->launched - s->seen == s->size) {
      RFI_TRY(g->m.backend->wait(g->m.device));
      read_ring(s);
    }
    const int at = (int)(s->launched % s->size);
    s->check[at] = (rfi_split_check){c->u.index, k, call->microbatch, s->step};
    s->result[at] = -1;
    RFI_TRY(g->m.backend->move(g->m.device, &s->result[at],
                               rfi_unit_address(&g->m, &c->u, call->slot, c->checked[k].bad), sizeof *s->result));
    s->launched++;
  }
  return RFR_OK;
}

void rfi_graphs_splits_abort(rfr_graphs *g) {
  rfi_splits *s = &g->splits;
  s->aborted = s->launched;
  if (s->found >= 0 && s->first.step == s->step) s->found = -1;
}

rfr_status rfi_graphs_splits_report(rfr_graphs *g) {
  rfi_splits *s = &g->splits;
  read_ring(s);
  if (s->found < 0) return RFR_OK;
  const rfi_callable *c = &g->callable[s->first.callable];
  const char *scope = c->checked[s->first.check].scope;
  const int group = s->found;
  s->found = -1;
  return rfi_fail(RFI_E_GRAPHS_SPLITS,
                  "step %lld, callable \"%s\"%s%s, microbatch %d: the size of group %d is negative or exceeds the "
                  "rows: do not use the results of that step",
                  (long long)s->first.step, c->u.name, scope[0] ? ", in " : "", scope, s->first.microbatch, group);
}
