/* SPDX-License-Identifier: Apache-2.0
 *
 * New addresses for the caller's memory: tensors, main gradients and fixed ports. Addresses are arguments of captured
 * kernels, so every graph is captured again. The old graphs are destroyed only after that, so a failure changes neither
 * addresses nor graphs. No hook runs, because no kernel runs.
 */
#include <stdlib.h>

#include "base/base.h"
#include "callable/graphed.h"

/* ---- which ---- */

typedef struct move {
  void **at;   /* the pointer to exchange */
  void *other; /* the new address; after the exchange, the old one */
  const char *name;
} move;

typedef struct moves {
  move *at;
  int n;
} moves;

static int by_pointer(const void *a, const void *b) {
  const uintptr_t x = (uintptr_t)((const move *)a)->at, y = (uintptr_t)((const move *)b)->at;
  return (x > y) - (x < y);
}

static rfr_status add_named(rfr_graphs *g, rfi_named *x, const void *to, moves *m) {
  if (x->offset >= 0)
    return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" is in memory of the graphs, which does not move", x->tensor.name);
  const char *defect = rfi_graphs_address_defect(g, to);
  if (defect) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\": %s", x->tensor.name, defect);
  m->at[m->n++] = (move){&x->tensor.data, (void *)to, x->tensor.name};
  return RFR_OK;
}

static rfr_status add_tensor(rfr_graphs *g, const rfr_binding *b, moves *m) {
  rfi_named *named;
  RFI_TRY(rfi_graphs_get(g, b->name, &named));
  RFI_TRY(add_named(g, named, b->data, m));
  return rfi_check_captured(b->name, &named->tensor.type, NULL, b);
}

static rfr_status add_gradient(rfr_graphs *g, const rfr_main_gradient *x, moves *m) {
  rfi_named *named;
  RFI_TRY(rfi_graphs_get_gradient(g, x->parameter, &named));
  RFI_TRY(add_named(g, named, x->data, m));
  const rfr_type *type = &named->tensor.type;
  if (x->type.dtype != type->dtype)
    return rfi_fail(RFI_E_PROGRAM_STATE, "main gradient of \"%s\": captured as %s, now %s: create new graphs",
                    x->parameter, rfr_dtype_name(type->dtype), rfr_dtype_name(x->type.dtype));
  return rfi_graphs_check_gradient_entry(x, type);
}

static rfr_status add_fixed(const rfr_graphs *g, const rfr_callable_moved *x, moves *m) {
  void **addresses;
  RFI_TRY(rfi_graphs_fixed_of(g, x->callable, &x->to, &addresses));
  for (int k = 0; k < x->to.n_data; k++) m->at[m->n++] = (move){&addresses[k], x->to.data[k], x->to.port};
  return RFR_OK;
}

static rfr_status check_once(moves *m) {
  qsort(m->at, (size_t)m->n, sizeof *m->at, by_pointer);
  for (int i = 1; i < m->n; i++)
    if (m->at[i].at == m->at[i - 1].at) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" is listed twice", m->at[i].name);
  return RFR_OK;
}

/* ---- recapture ---- */

static void exchange(rfr_graphs *g, moves *m) {
  for (int i = 0; i < m->n; i++) {
    void *was = *m->at[i].at;
    *m->at[i].at = m->at[i].other;
    m->at[i].other = was;
  }
  rfi_graphs_set_addresses(g);
}

typedef struct recaptured {
  rfi_graph **at, *other; /* the new graph; after the exchange, the old one */
} recaptured;

static rfr_status capture_again(rfr_graphs *g) {
  recaptured *x;
  rfr_status s = RFR_OK;
  int n = 0;
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *x * (size_t)(g->memory.graphs + 1), &x));
  for (const rfi_callable *c = g->callable; c < g->callable + g->n; c++)
    for (int slot = 0; slot < c->u.slots; slot++)
      for (int part = 0; part < RFI_PARTS && s == RFR_OK; part++) {
        x[n].at = &c->u.instance[slot].graph[part];
        if (*x[n].at) s = rfi_graphs_capture_part(g, c, slot, (rfi_part)part, &x[n].other);
        n += *x[n].at && s == RFR_OK;
      }
  for (int i = 0; i < n; i++) {
    rfi_graph *old = *x[i].at;
    if (s == RFR_OK) *x[i].at = x[i].other, x[i].other = old;
    g->m.backend->graph_destroy(g->m.device, x[i].other);
  }
  rfi_free(g->m.ctx, x);
  return s;
}

static rfr_status move_all(rfr_graphs *g, moves *m) {
  RFI_TRY(check_once(m));
  RFI_TRY(g->m.backend->wait(g->m.device)); /* enqueued work uses the old addresses */
  exchange(g, m);
  rfr_status s = rfi_graphs_check_overlap(g, &g->calls);
  if (s == RFR_OK) s = rfi_graphs_order_side_stream(g, &g->calls);
  if (s == RFR_OK) s = capture_again(g);
  if (s != RFR_OK) {
    exchange(g, m);
    rfi_graphs_order_side_stream(g, &g->calls); /* for the old addresses */
  }
  return s;
}

rfr_status rfr_graphs_rebind(rfr_graphs *g, const rfr_binding *tensors, int n_tensors,
                             const rfr_main_gradient *gradients, int n_gradients, const rfr_callable_moved *fixed,
                             int n_fixed) {
  moves m = {0};
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_NONE) return rfi_fail(RFI_E_GRAPHS_ORDER, "a step has begun: end or abort it first");
  if (!rfi_is_list(tensors, n_tensors) || !rfi_is_list(gradients, n_gradients) || !rfi_is_list(fixed, n_fixed))
    return rfi_fail(RFI_E_ARGUMENT, "%d tensors, %d main gradients, %d fixed: a count is negative or its list is NULL",
                    n_tensors, n_gradients, n_fixed);
  RFI_TRY(rfi_graphs_check_gradient_list(gradients, n_gradients));
  int slots = 0;
  for (int i = 0; i < g->n_stages; i++) slots = g->stage[i].slots > slots ? g->stage[i].slots : slots;
  const size_t most = (size_t)n_tensors + (size_t)n_gradients + (size_t)n_fixed * (size_t)slots;
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *m.at * (most + 1), &m.at));
  rfr_status s = RFR_OK;
  for (int i = 0; i < n_tensors && s == RFR_OK; i++) s = add_tensor(g, &tensors[i], &m);
  for (int i = 0; i < n_gradients && s == RFR_OK; i++) s = add_gradient(g, &gradients[i], &m);
  for (int i = 0; i < n_fixed && s == RFR_OK; i++) s = add_fixed(g, &fixed[i], &m);
  if (s == RFR_OK) s = move_all(g, &m);
  if (s == RFR_OK && n_tensors > 0) g->loaded = false;
  rfi_free(g->m.ctx, m.at);
  return s;
}
