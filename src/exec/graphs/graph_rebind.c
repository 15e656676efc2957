/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the caller's that has moved. Addresses are arguments of captured kernels, so every graph is captured again,
 * before the old ones go: whatever fails, addresses and graphs are as they were. No hook runs, since no kernel does.
 */
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

/* ---- which ---- */

static rfr_status check_moved(const rfr_graphs *g, int id, const char *name, const void *to, void **now) {
  if (id < 0) return rfi_fail(RFI_E_PROGRAM_NAME, "no callable has \"%s\", or trains it", name ? name : "");
  if (g->named[id].offset >= 0)
    return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" lies in the graphs' own memory, which never moves",
                    g->named[id].tensor.name);
  if (!to || (uintptr_t)to % RFI_CALLERS_ALIGNMENT)
    return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" has no data, or not at a multiple of %d bytes",
                    g->named[id].tensor.name, RFI_CALLERS_ALIGNMENT);
  if (now[id]) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" is given twice", g->named[id].tensor.name);
  now[id] = (void *)to;
  return RFR_OK;
}

/* What the new place is of is what was captured; its type 0 stands for that. */
static rfr_status check_gradient(const rfr_main_gradient *m, const rfr_type *type) {
  if (m->dtype != 0 && m->dtype != type->dtype)
    return rfi_fail(RFI_E_PROGRAM_STATE, "the main gradient of \"%s\" was captured as %s, and is now %s: create anew",
                    m->parameter, rfr_dtype_name(type->dtype), rfr_dtype_name(m->dtype));
  return rfi_graph_check_view(m, type);
}

static rfr_status collect(const rfr_graphs *g, const rfr_binding *tensors, int n, const rfr_main_gradient *gradients,
                          int n_gradients, void **now) {
  for (int i = 0; i < n; i++) {
    int id = tensors[i].name ? rfi_names_find(&g->names, tensors[i].name) : -1;
    if (id >= 0 && g->named[id].parameter >= 0) id = -1;
    RFI_TRY(check_moved(g, id, tensors[i].name, tensors[i].data, now));
    RFI_TRY(rfi_check_type(tensors[i].name, &g->named[id].tensor.type, &tensors[i].type));
  }
  for (int i = 0; i < n_gradients; i++) {
    const rfr_main_gradient *m = &gradients[i];
    const int parameter = m->parameter ? rfi_names_find(&g->names, m->parameter) : -1;
    const int id = parameter < 0 ? -1 : g->named[parameter].gradient;
    RFI_TRY(check_moved(g, id, m->parameter, m->data, now));
    RFI_TRY(check_gradient(m, &g->named[id].tensor.type));
  }
  return RFR_OK;
}

/* ---- graphs for it ---- */

/* Addresses as `now` has them, which gets the ones from before. */
static void exchange(rfr_graphs *g, void **now) {
  for (int i = 0; i < g->n_named; i++) {
    void *was = g->named[i].tensor.data;
    if (!now[i]) continue;
    g->named[i].tensor.data = now[i];
    now[i] = was;
  }
  rfi_graph_bind_all(g);
}

/* The next graph of those that were captured, from (c, slot, part) on; false: there are no more. */
static bool next_graph(const rfr_graphs *g, int *c, int *slot, int *part) {
  for (; *c < g->n; ++*c, *slot = 0)
    for (; *slot < g->stage[g->callable[*c].stage].slots; ++*slot, *part = 0)
      for (; *part < RFI_PARTS; ++*part)
        if (g->callable[*c].instance[*slot].graph[*part]) return true;
  return false;
}

static rfr_status capture_again(rfr_graphs *g) {
  const rfi_backend *b = g->m.backend;
  rfi_graph **fresh;
  rfr_status s = RFR_OK;
  int n = 0;
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *fresh * (size_t)(g->memory.graphs + 1), &fresh));
  for (int c = 0, slot = 0, part = 0; s == RFR_OK && next_graph(g, &c, &slot, &part); part++) {
    s = rfi_graph_capture_part(g, c, slot, (rfi_part)part, &fresh[n]);
    n += s == RFR_OK;
  }
  n = s == RFR_OK ? 0 : n;
  for (int c = 0, slot = 0, part = 0; s == RFR_OK && next_graph(g, &c, &slot, &part); part++, n++) {
    rfi_graph **graph = &g->callable[c].instance[slot].graph[part], *old = *graph;
    *graph = fresh[n];
    fresh[n] = old;
  }
  for (int i = 0; i < n; i++) b->graph_destroy(g->m.device, fresh[i]);
  rfi_free(g->m.ctx, fresh);
  return s;
}

rfr_status rfr_graphs_rebind(rfr_graphs *g, const rfr_binding *tensors, int n_tensors,
                             const rfr_main_gradient *gradients, int n_gradients) {
  void **now;
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_NONE) return rfi_fail(RFI_E_GRAPHS_ORDER, "a step has begun: end or abort it first");
  if (n_tensors < 0 || n_gradients < 0 || (n_tensors > 0 && !tensors) || (n_gradients > 0 && !gradients))
    return rfi_fail(RFI_E_ARGUMENT, "%d tensors and %d main gradients, or none", n_tensors, n_gradients);
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *now * (size_t)(g->n_named + 1), &now));
  rfr_status s = collect(g, tensors, n_tensors, gradients, n_gradients, now);
  if (s == RFR_OK) s = g->m.backend->wait(g->m.device); /* what was launched has the old addresses */
  if (s == RFR_OK) {
    exchange(g, now);
    s = rfi_graph_check_apart(g, &g->calls);
    if (s == RFR_OK) s = capture_again(g);
    if (s == RFR_OK) g->loaded = false;
    else exchange(g, now);
  }
  rfi_free(g->m.ctx, now);
  return s;
}

rfr_status rfi_graph_check_current(const rfr_graphs *g, const rfr_tensor *x) {
  const int id = x->name ? rfi_names_find(&g->names, x->name) : -1;
  const rfr_tensor *now = id < 0 ? NULL : &g->named[id].tensor;
  if (!now || now->role != x->role) return RFR_OK; /* of a slot */
  const uintptr_t first = (uintptr_t)now->data, at = (uintptr_t)x->data;
  if (at >= first && at + (uintptr_t)x->bytes <= first + (uintptr_t)now->bytes) return RFR_OK;
  return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": this tensor says %p, it lies at %p: ask for it anew", x->name,
                  x->data, now->data);
}
