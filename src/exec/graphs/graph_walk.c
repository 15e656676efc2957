/* SPDX-License-Identifier: Apache-2.0
 *
 * Warm-up and capture walk over the calls of a step, each part of each callable and slot once: what is done for a
 * part, between its hooks, is a run of its kernels in warm-up and a capture, which runs nothing, afterwards. While
 * warm-up runs, whatever outlives a step has the scratch memory for an address, so that nothing has to be put back;
 * states begin there with their values. Inputs are the caller's samples, else zeros, as output gradients are.
 */
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

void rfi_graphs_drop(rfr_graphs *g, int callable, int slot) {
  rfi_instance *x = &g->callable[callable].instance[slot];
  for (int part = 0; part < RFI_PARTS; part++) {
    g->memory.graphs -= x->graph[part] != NULL;
    g->m.backend->graph_destroy(g->m.device, x->graph[part]);
    x->graph[part] = NULL;
  }
}

/* ---- hooks ---- */

typedef struct walk {
  rfr_graphs *g;
  bool capture;
  int iteration;
  bool *done; /* per callable, slot and part */
} walk;

static const char *const point_names[] = {"pre_warmup",   "post_warmup",   "pre_forward", "post_forward",
                                          "pre_backward", "post_backward", "pre_wgrad",   "post_wgrad"};

/* A hook that passes on the status of a call of the library's: its error is told too. */
static rfr_status run_hook(const rfr_hook_list *list, int i, const rfr_hook_event *event) {
  rfi_fail_status(RFR_OK); /* errors from before are not the hook's */
  const rfr_status s = list->hooks[i].fn(event, list->hooks[i].user);
  const rfr_error *e = rfr_last_error();
  const bool own = e->status == s;
  if (s == RFR_OK) return RFR_OK;
  rfi_fail(RFI_E_GRAPHS_HOOK, "%s hook %d of callable %d, microbatch %d, in %s%s%s%s%s", point_names[event->point], i,
           event->callable, event->microbatch, event->capture ? "capture" : "warm-up", own ? ": " : "",
           own ? e->slug : "", own ? ": " : "", own ? e->message : "");
  return rfi_fail_status(s);
}

/* Those of a pre list that succeed, up to one that does not. */
static rfr_status run_pre(const rfr_hook_list *list, const rfr_hook_event *event, int *done) {
  rfr_status s = RFR_OK;
  for (*done = 0; *done < list->n && s == RFR_OK; *done += s == RFR_OK) s = run_hook(list, *done, event);
  return s;
}

/* Hooks of a post list from number i on, after a failure: nothing that they do takes the place of the first error. */
static void run_failed(const rfr_hook_list *post, int i, rfr_hook_event *event) {
  const rfr_error e = *rfr_last_error();
  char text[2048];
  rfr_error row;
  rfi_snprintf(text, sizeof text, "%s", e.message);
  event->failed = 1;
  for (; i < post->n; i++) run_hook(post, i, event);
  for (int k = 0; rfr_error_row(k, &row); k++)
    if (strcmp(row.slug, e.slug) == 0) rfi_fail((rfi_error)k, "%s", text);
  rfi_fail_status(e.status);
}

/* All of a post list: what a hook of it undoes has begun, whatever became of the ones before it. */
static rfr_status run_post(const rfr_hook_list *list, rfr_hook_event *event) {
  for (int i = 0; i < list->n; i++) {
    const rfr_status s = run_hook(list, i, event);
    if (s == RFR_OK) continue;
    run_failed(list, i + 1, event);
    return s;
  }
  return RFR_OK;
}

typedef rfr_status (*work_fn)(walk *w, const rfi_step_call *call, rfi_part part);

/* `work` between the two lists. */
static rfr_status between(const rfr_hook_list *pre, const rfr_hook_list *post, rfr_hook_event *event, work_fn work,
                          walk *w, const rfi_step_call *call, rfi_part part) {
  int done;
  const rfr_hook_point point = event->point;
  rfr_status s = run_pre(pre, event, &done);
  const bool begun = done > 0 || pre->n == 0;
  if (s == RFR_OK) s = work(w, call, part);
  event->point = (rfr_hook_point)(point + 1);
  if (s == RFR_OK) return run_post(post, event);
  if (begun) run_failed(post, 0, event);
  return s;
}

/* ---- one part ---- */

static void show_ports(const walk *w, const rfi_step_call *call, const rfi_port *port, int n, bool grad,
                       rfr_tensor *to) {
  for (int i = 0; i < n; i++) to[i] = rfi_port_tensor(w->g, call->callable, call->slot, &port[i], grad);
}

static void show(const walk *w, const rfi_step_call *call, rfi_part part, rfr_hook_event *event) {
  const rfi_callable *c = &w->g->callable[call->callable];
  rfr_tensor *room = w->g->event_tensors;
  const bool grad = part == RFI_PART_I;
  event->inputs = room;
  if (part == RFI_PART_W) {
    event->outputs = room;
    event->n_outputs = c->n_gradients;
    for (int i = 0; i < c->n_gradients; i++) {
      const rfi_named *x = &w->g->named[c->gradients[i]];
      room[i] = x->tensor;
      room[i].data = rfi_graphs_named_data(w->g, x);
    }
    return;
  }
  event->n_inputs = grad ? c->n_out : c->n_in;
  event->n_outputs = grad ? c->n_in : c->n_out;
  event->outputs = room + event->n_inputs;
  show_ports(w, call, grad ? c->out : c->in, event->n_inputs, grad, room);
  show_ports(w, call, grad ? c->in : c->out, event->n_outputs, grad, room + event->n_inputs);
}

/* What a call would give a part: samples, or zeros, since its bytes were something else's before; so were those of main
 * gradients in the scratch memory. */
static rfr_status give_inputs(rfr_graphs *g, const rfi_step_call *call, rfi_part part) {
  const rfi_callable *c = &g->callable[call->callable];
  const bool grad = part == RFI_PART_I;
  for (int i = 0; part == RFI_PART_W && i < c->n_gradients; i++) {
    const rfi_named *x = &g->named[c->gradients[i]];
    if (x->written) RFI_TRY(g->m.backend->fill(g->m.device, rfi_graphs_named_data(g, x), 0, (size_t)x->tensor.bytes));
  }
  for (int i = 0; part != RFI_PART_W && i < (grad ? c->n_out : c->n_in); i++) {
    const rfi_port *p = grad ? &c->out[i] : &c->in[i];
    const rfr_tensor t = rfi_port_tensor(g, call->callable, call->slot, p, grad);
    if (p->callable >= 0 || !t.data) continue;
    if (p->sample && !grad) RFI_TRY(g->m.backend->move(g->m.device, t.data, p->sample, (size_t)t.bytes));
    else RFI_TRY(g->m.backend->fill(g->m.device, t.data, 0, (size_t)t.bytes));
  }
  return g->m.backend->wait(g->m.device); /* a hook may look */
}

/* A hook behind a part may free what the part reads, so it has run by then, also where it failed. */
static rfr_status run_and_wait(rfr_graphs *g, const rfi_step_call *call, rfi_part part) {
  rfr_status s = RFR_OK;
  if (part == RFI_PART_F) s = rfi_graphs_set_microbatch(g, call->callable, call->slot, call->microbatch);
  if (s == RFR_OK) s = rfi_graphs_run(g, call->callable, call->slot, part, true);
  const rfr_status waited = g->m.backend->wait(g->m.device);
  return s == RFR_OK ? waited : s;
}

static rfr_status work_on_part(walk *w, const rfi_step_call *call, rfi_part part) {
  rfr_graphs *g = w->g;
  const rfi_callable *c = &g->callable[call->callable];
  if (!w->capture) return run_and_wait(g, call, part);
  if (!rfi_has(c, part)) return RFR_OK;
  RFI_TRY(rfi_graphs_capture_part(g, call->callable, call->slot, part, &c->instance[call->slot].graph[part]));
  g->memory.graphs++;
  return RFR_OK;
}

static rfr_status walk_part(walk *w, const rfi_step_call *call, rfi_part part) {
  static const rfr_hooks none;
  static const rfr_hook_point points[RFI_PARTS] = {
      [RFI_PART_F] = RFR_HOOK_PRE_FORWARD, [RFI_PART_I] = RFR_HOOK_PRE_BACKWARD, [RFI_PART_W] = RFR_HOOK_PRE_WGRAD};
  const rfr_graphs_options *o = &w->g->options;
  const rfr_hooks *h = o->n_hooks > 0 ? &o->hooks[call->callable] : &none;
  const rfr_hook_list *const lists[RFI_PARTS][2] = {[RFI_PART_F] = {&h->pre_forward, &h->post_forward},
                                                    [RFI_PART_I] = {&h->pre_backward, &h->post_backward},
                                                    [RFI_PART_W] = {&h->pre_wgrad, &h->post_wgrad}};
  int before = 0;
  for (int i = 0; i < call->callable; i++) before += w->g->stage[w->g->callable[i].stage].slots;
  bool *done = &w->done[(before + call->slot) * RFI_PARTS + (int)part];
  if (*done) return RFR_OK;
  *done = true;
  rfr_hook_event event = {.size = sizeof event,
                          .point = points[part],
                          .callable = call->callable,
                          .microbatch = call->microbatch,
                          .capture = w->capture,
                          .iteration = w->iteration};
  if (!w->capture) RFI_TRY(give_inputs(w->g, call, part));
  show(w, call, part, &event);
  return between(lists[part][0], lists[part][1], &event, work_on_part, w, call, part);
}

/* ---- the walk ---- */

static rfr_status walk_calls(walk *w) {
  rfr_graphs *g = w->g;
  int places = 0;
  for (int i = 0; i < g->n; i++) places += g->stage[g->callable[i].stage].slots;
  RFI_TRY(RFI_ALLOC(g->m.ctx, (size_t)places * RFI_PARTS + 1, &w->done));
  rfr_status s = RFR_OK;
  int own = 0;
  for (int i = 0; i < g->calls.n && s == RFR_OK; i++) {
    const rfi_step_call *call = &g->calls.call[i];
    if (!w->capture && (s = rfi_graphs_run_own(g, i, &own, true)) != RFR_OK) break;
    const bool both = call->op == RFR_ACTION_B;
    if (call->op == RFR_ACTION_F) s = walk_part(w, call, RFI_PART_F);
    if (both || call->op == RFR_ACTION_I) s = walk_part(w, call, RFI_PART_I);
    if (s == RFR_OK && (call->op == RFR_ACTION_W || (both && rfi_has(&g->callable[call->callable], RFI_PART_W))))
      s = walk_part(w, call, RFI_PART_W);
  }
  if (s == RFR_OK && !w->capture) s = rfi_graphs_run_own(g, g->calls.n, &own, true);
  rfi_free(g->m.ctx, w->done);
  return s;
}

/* What warm-up writes in place of states has their values. */
static rfr_status copy_states(rfr_graphs *g) {
  for (int i = 0; i < g->n_named; i++) {
    const rfi_named *x = &g->named[i];
    if (x->written && x->parameter < 0)
      RFI_TRY(g->m.backend->move(g->m.device, g->arena + g->scratch_at + x->scratch, x->tensor.data,
                                 (size_t)x->tensor.bytes));
  }
  return RFR_OK;
}

static rfr_status warm_up(walk *w, const rfi_step_call *call, rfi_part part) {
  rfr_graphs *g = w->g;
  (void)call, (void)part;
  RFI_TRY(copy_states(g));
  for (int early = RFI_PART_LOAD; early <= RFI_PART_SETUP; early++)
    for (int c = 0; c < g->n; c++)
      if (early == RFI_PART_LOAD || !g->callable[c].sharded) RFI_TRY(rfi_graphs_run(g, c, 0, (rfi_part)early, true));
  for (; w->iteration < g->options.warmup_iterations; w->iteration++) RFI_TRY(walk_calls(w));
  return g->m.backend->wait(g->m.device);
}

rfr_status rfi_graphs_warm_up(rfr_graphs *g) {
  walk w = {.g = g};
  rfr_hook_event event = {.size = sizeof event, .point = RFR_HOOK_PRE_WARMUP, .callable = -1, .microbatch = -1};
  g->warm = true;
  rfi_graphs_set_all_addresses(g);
  rfr_status s = between(&g->options.pre_warmup, &g->options.post_warmup, &event, warm_up, &w, NULL, RFI_PART_LOAD);
  g->warm = false;
  rfi_graphs_set_all_addresses(g);
  return s;
}

rfr_status rfi_graphs_capture(rfr_graphs *g) {
  walk w = {.g = g, .capture = true};
  for (int c = 0; c < g->n; c++) { /* once for all slots, and without hooks: they belong to the step */
    RFI_TRY(work_on_part(&w, &(rfi_step_call){.callable = c}, RFI_PART_SETUP));
    RFI_TRY(work_on_part(&w, &(rfi_step_call){.callable = c}, RFI_PART_REDUCE));
  }
  return walk_calls(&w);
}
