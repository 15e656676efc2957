/* SPDX-License-Identifier: Apache-2.0
 *
 * Warm-up and capture walk over the calls of a step and visit each part of each callable and slot once, between its
 * hooks: warm-up runs the part's kernels, capture records them without running. During warm-up, all memory that
 * outlives a step is replaced by scratch memory, so nothing has to be restored; states start there with copies of their
 * values. Inputs are the caller's samples or zeros; output gradients are zeros.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "exec/hook_lists.h"
#include "exec/step_memory.h"

typedef struct walk {
  rfr_graphs *g;
  bool capture;
  int iteration;
  const rfi_step_call *call; /* the current position */
  rfi_part part;
} walk;

/* ---- one part ---- */

static int describe_ports(const walk *w, const rfi_step_call *call, const rfi_ports *x, rfr_tensor *to) {
  for (int i = 0; i < x->n; i++) to[i] = rfi_port_tensor(w->g, call->slot, &x->port[i], x->grad);
  return x->n;
}

static void describe_named(const rfr_graphs *g, const int *index, int n, rfr_tensor *to) {
  for (int i = 0; i < n; i++) {
    to[i] = g->m.store.named[index[i]].tensor;
    to[i].data = rfi_named_data(&g->m, &g->m.store.named[index[i]]);
  }
}

static void describe(const walk *w, const rfi_step_call *call, rfi_part part, rfr_hook_event *event) {
  const rfi_callable *c = call->of;
  const rfi_ports taken = rfi_ports_taken(c, part), returned = rfi_ports_returned(c, part);
  rfr_tensor *room = w->g->event_tensors;
  event->name = c->u.name;
  event->has_wgrad = rfi_has(&c->u, RFI_PART_W);
  event->wgrad_reads = c->wgrad_reads;
  event->parameters = room;
  event->n_parameters = c->n_parameters;
  describe_named(w->g, c->parameters, c->n_parameters, room);
  event->inputs = room += c->n_parameters;
  event->n_inputs = describe_ports(w, call, &taken, room);
  event->outputs = room += event->n_inputs;
  event->n_outputs = part == RFI_PART_W ? c->n_gradients : describe_ports(w, call, &returned, room);
  if (part == RFI_PART_W) describe_named(w->g, c->gradients, c->n_gradients, room);
}

/* Inputs of a part in warm-up are samples or zeros. Scratch main gradients are zeroed as well, because callables share
 * them. */
static rfr_status set_inputs(rfr_graphs *g, const rfi_step_call *call, rfi_part part) {
  const rfi_callable *c = call->of;
  const rfi_ports x = rfi_ports_taken(c, part);
  for (int i = 0; part == RFI_PART_W && i < c->n_gradients; i++) {
    const rfi_named *x = &g->m.store.named[c->gradients[i]];
    if (x->written) RFI_TRY(rfi_executor_fill(&g->m, rfi_named_data(&g->m, x), 0, x->tensor.bytes));
  }
  for (const rfi_port *p = x.port; p < x.port + x.n; p++) {
    const rfr_tensor t = rfi_port_tensor(g, call->slot, p, x.grad);
    if (p->link || !t.data) continue;
    if (p->sample && !x.grad) RFI_TRY(g->m.backend->move(g->m.device, t.data, p->sample, (size_t)t.bytes));
    else RFI_TRY(rfi_executor_fill(&g->m, t.data, 0, t.bytes));
  }
  return g->m.backend->wait(g->m.device); /* a hook may read the results */
}

/* Waits even after a failure, because a post hook may free memory that the part reads. */
static rfr_status run_and_wait(rfr_graphs *g, const rfi_step_call *call, rfi_part part) {
  rfr_status s = RFR_OK;
  if (part == RFI_PART_F) s = rfi_graphs_set_microbatch(g, call);
  if (s == RFR_OK) s = rfi_graphs_run(g, call->of, call->slot, part, true);
  const rfr_status waited = g->m.backend->wait(g->m.device);
  return s == RFR_OK ? waited : s;
}

static rfr_status capture(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part) {
  if (!rfi_has(&c->u, part)) return RFR_OK;
  RFI_TRY(rfi_graphs_capture_part(g, c, slot, part, &c->u.instance[slot].graph[part]));
  g->memory.graphs++;
  return RFR_OK;
}

static rfr_status work_on_part(void *user) {
  const walk *w = user;
  if (w->capture) return capture(w->g, w->call->of, w->call->slot, w->part);
  return run_and_wait(w->g, w->call, w->part);
}

static rfr_status walk_part(walk *w, const rfi_step_call *call, rfi_part part) {
  static const rfr_hooks none;
  const rfr_hook_point point = part == RFI_PART_F   ? RFR_HOOK_PRE_FORWARD
                               : part == RFI_PART_I ? RFR_HOOK_PRE_BACKWARD
                                                    : RFR_HOOK_PRE_WGRAD;
  const rfr_graphs_options *o = &w->g->options;
  const rfr_hooks *h = o->n_hooks > 0 ? &o->hooks[call->of->u.index] : &none;
  uint8_t *visited = &call->of->u.instance[call->slot].visited;
  if (*visited & 1 << part) return RFR_OK;
  *visited |= (uint8_t)(1 << part);
  rfr_hook_event event = {.size = sizeof event,
                          .point = point,
                          .callable = call->of->u.index,
                          .microbatch = call->microbatch,
                          .capture = w->capture,
                          .iteration = w->iteration};
  if (!w->capture) RFI_TRY(set_inputs(w->g, call, part));
  describe(w, call, part, &event);
  w->call = call, w->part = part;
  const rfi_hooked x = {rfi_hooks_at(h, point), rfi_hooks_at(h, point + 1), work_on_part, w, "callable", "warm-up"};
  return rfi_run_hooked(&x, &event);
}

/* ---- warm-up and capture of all parts ---- */

static rfr_status walk_calls(walk *w) {
  rfr_graphs *g = w->g;
  int action = 0;
  for (int i = 0; i < g->n; i++)
    for (int slot = 0; slot < g->callable[i].u.slots; slot++) g->callable[i].u.instance[slot].visited = 0;
  for (int i = 0; i < g->calls.n; i++) {
    const rfi_step_call *call = &g->calls.call[i];
    if (!w->capture) RFI_TRY(rfi_graphs_run_shard_actions(g, i, &action, true));
    for (int part = RFI_PART_F; part <= RFI_PART_W; part++)
      if (rfi_call_runs(call, (rfi_part)part)) RFI_TRY(walk_part(w, call, (rfi_part)part));
  }
  return w->capture ? RFR_OK : rfi_graphs_run_shard_actions(g, g->calls.n, &action, true);
}

/* Copies states into the scratch memory that replaces them in warm-up. */
static rfr_status copy_states(rfr_graphs *g) {
  for (int i = 0; i < g->m.store.n; i++) {
    const rfi_named *x = &g->m.store.named[i];
    if (x->written && x->parameter < 0)
      RFI_TRY(g->m.backend->move(g->m.device, rfi_address(&g->m.layout, RFI_REGION_SCRATCH, x->scratch), x->tensor.data,
                                 (size_t)x->tensor.bytes));
  }
  return RFR_OK;
}

static rfr_status warm_up(void *user) {
  walk *w = user;
  rfr_graphs *g = w->g;
  RFI_TRY(copy_states(g));
  RFI_TRY(rfi_graphs_set_up(g, false, true));
  for (; w->iteration < g->options.warmup_iterations; w->iteration++) RFI_TRY(walk_calls(w));
  return g->m.backend->wait(g->m.device);
}

rfr_status rfi_graphs_warm_up(rfr_graphs *g) {
  walk w = {.g = g};
  rfr_hook_event event = {.size = sizeof event, .point = RFR_HOOK_PRE_WARMUP, .callable = -1, .microbatch = -1};
  RFI_TRY(rfi_step_memory_take(&g->m, true));
  g->m.in_warmup = true;
  rfi_graphs_set_addresses(g);
  const rfi_hooked x = {&g->options.pre_warmup, &g->options.post_warmup, warm_up, &w, "callable", "warm-up"};
  const rfr_status s = rfi_run_hooked(&x, &event);
  g->m.in_warmup = false;
  rfi_step_memory_release(&g->m);
  rfi_graphs_set_addresses(g);
  return s;
}

rfr_status rfi_graphs_capture(rfr_graphs *g) {
  walk w = {.g = g, .capture = true};
  for (int c = 0; c < g->n; c++) { /* once for all slots, without hooks */
    RFI_TRY(capture(g, &g->callable[c], 0, RFI_PART_SETUP));
    RFI_TRY(capture(g, &g->callable[c], 0, RFI_PART_REDUCE));
  }
  return walk_calls(&w);
}
