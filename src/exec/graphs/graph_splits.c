/* SPDX-License-Identifier: Apache-2.0
 *
 * Splits that do not fit, as routings of the caller's may have them: kernels clamp them, so nothing is read or written
 * that should not be, and the caller is told. What splits_to_offsets says of each forward's is copied behind it, in the
 * stream's order, to a ring that the host can read without waiting: -1 while the forward has yet to run, else 0, or 1
 * and the first bad group. The host looks at a step's beginning and end and where it waits anyway, and only waits when
 * the ring is full: so it hears of a bad split at most a ring of forwards late.
 */
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

enum { FORWARDS = 64 }; /* of each callable, in the ring */

rfr_status rfi_graphs_splits_create(rfr_graphs *g) {
  rfi_splits *s = &g->splits;
  for (int i = 0; i < g->n; i++) s->size += FORWARDS * g->callable[i].n_checked;
  s->found = -1;
  if (s->size == 0) return RFR_OK;
  s->look = rfi_arena_alloc(g->m.strings, sizeof *s->look * (size_t)s->size);
  if (!s->look) return RFR_NO_MEMORY;
  return g->m.backend->alloc(g->m.device, RFI_MEMORY_RING, sizeof *s->said * (size_t)s->size, (void **)&s->said);
}

/* What has run by now; of what was bad, the first is kept. */
static void look(rfi_splits *s) {
  for (; s->seen < s->launched; s->seen++) {
    const int at = (int)(s->seen % s->size);
    const int32_t said = __atomic_load_n(&s->said[at], __ATOMIC_ACQUIRE);
    if (said < 0) return;
    if (said == 0 || s->found >= 0 || s->seen < s->left) continue;
    s->found = said - 1;
    s->first = s->look[at];
  }
}

rfr_status rfi_graphs_splits_launched(rfr_graphs *g, const rfi_step_call *call) {
  rfi_splits *s = &g->splits;
  const rfi_callable *c = &g->callable[call->callable];
  for (int k = 0; k < c->n_checked; k++) {
    if (s->launched - s->seen == s->size) {
      RFI_TRY(g->m.backend->wait(g->m.device));
      look(s);
    }
    const int at = (int)(s->launched % s->size);
    s->look[at] = (rfi_look){call->callable, k, call->microbatch, s->step};
    s->said[at] = -1;
    RFI_TRY(g->m.backend->move(g->m.device, &s->said[at],
                               rfi_graphs_address(g, call->callable, call->slot, c->checked[k].bad), sizeof *s->said));
    s->launched++;
  }
  return RFR_OK;
}

void rfi_graphs_splits_leave(rfr_graphs *g) {
  rfi_splits *s = &g->splits;
  s->left = s->launched;
  if (s->found >= 0 && s->first.step == s->step) s->found = -1;
}

rfr_status rfi_graphs_splits_report(rfr_graphs *g) {
  rfi_splits *s = &g->splits;
  look(s);
  if (s->found < 0) return RFR_OK;
  const rfi_callable *c = &g->callable[s->first.callable];
  const char *scope = c->checked[s->first.check].scope;
  const int group = s->found;
  s->found = -1;
  return rfi_fail(RFI_E_GRAPHS_SPLITS,
                  "step %lld, callable \"%s\"%s%s, microbatch %d: the split of group %d is negative, or goes past the "
                  "rows: what that step gave is not to be used",
                  (long long)s->first.step, c->name, scope[0] ? ", in " : "", scope, s->first.microbatch, group);
}
