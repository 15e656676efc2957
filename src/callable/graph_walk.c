/* SPDX-License-Identifier: Apache-2.0
 *
 * Warm-up and capture walk over the calls of a step and visit each part of each callable and slot once, between its
 * hooks: warm-up runs the part's kernels, capture records them without running. During warm-up everything that
 * outlives a step has an address in scratch memory, so nothing has to be restored; states start there with copies of
 * their values. Inputs are the caller's samples or zeros; output gradients are zeros.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "exec/step_memory.h"

/* ---- hooks ---- */

typedef struct walk {
  rfr_graphs *g;
  bool capture;
  int iteration;
  bool *done; /* per callable, slot and part */
} walk;

const char *const RFI_HOOK_NAMES[] = {"pre_warmup",   "post_warmup",   "pre_forward", "post_forward",
                                      "pre_backward", "post_backward", "pre_wgrad",   "post_wgrad"};

const rfr_hook_list *rfi_hooks_at(const rfr_hooks *h, int point) {
  const rfr_hook_list *const lists[] = {&h->pre_forward,   &h->post_forward, &h->pre_backward,
                                        &h->post_backward, &h->pre_wgrad,    &h->post_wgrad};
  return lists[point - RFR_HOOK_PRE_FORWARD];
}

/* If a hook returns the status of a failed library call, that call's error becomes part of the message. */
static rfr_status run_hook(const rfr_hook_list *list, int i, const rfr_hook_event *event) {
  rfi_fail_status(RFR_OK); /* clears earlier errors */
  const rfr_status s = list->hooks[i].fn(event, list->hooks[i].user);
  const rfr_error *e = rfr_last_error();
  const bool own = e->status == s;
  if (s == RFR_OK) return RFR_OK;
  rfi_fail(RFI_E_GRAPHS_HOOK, "%s hook %d of callable %d, microbatch %d, in %s%s%s%s%s", RFI_HOOK_NAMES[event->point],
           i, event->callable, event->microbatch, event->capture ? "capture" : "warm-up", own ? ": " : "",
           own ? e->slug : "", own ? ": " : "", own ? e->message : "");
  return rfi_fail_status(s);
}

/* Runs a pre list up to the first failure; *done: the number of hooks that succeeded. */
static rfr_status run_pre(const rfr_hook_list *list, const rfr_hook_event *event, int *done) {
  rfr_status s = RFR_OK;
  for (*done = 0; *done < list->n && s == RFR_OK; *done += s == RFR_OK) s = run_hook(list, *done, event);
  return s;
}

/* After a failure: runs a post list from hook i on and keeps the first error. */
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

/* Runs all of a post list, also after a hook of it failed, because each hook undoes something of its own. */
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

/* `work` between its pre and post hooks. */
static rfr_status run_with_hooks(const rfr_hook_list *pre, const rfr_hook_list *post, rfr_hook_event *event,
                                 work_fn work, walk *w, const rfi_step_call *call, rfi_part part) {
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

static int describe_ports(const walk *w, const rfi_step_call *call, const rfi_ports *x, rfr_tensor *to) {
  for (int i = 0; i < x->n; i++) to[i] = rfi_port_tensor(w->g, call->callable, call->slot, &x->port[i], x->grad);
  return x->n;
}

static void describe_named(const rfr_graphs *g, const int *index, int n, rfr_tensor *to) {
  for (int i = 0; i < n; i++) {
    to[i] = g->m.store.named[index[i]].tensor;
    to[i].data = rfi_graphs_named_data(g, &g->m.store.named[index[i]]);
  }
}

static void describe(const walk *w, const rfi_step_call *call, rfi_part part, rfr_hook_event *event) {
  const rfi_callable *c = &w->g->callable[call->callable];
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

/* Inputs of a part in warm-up: samples or zeros. Scratch main gradients are zeroed too, because callables share them.
 */
static rfr_status set_inputs(rfr_graphs *g, const rfi_step_call *call, rfi_part part) {
  const rfi_callable *c = &g->callable[call->callable];
  const rfi_ports x = rfi_ports_taken(c, part);
  for (int i = 0; part == RFI_PART_W && i < c->n_gradients; i++) {
    const rfi_named *x = &g->m.store.named[c->gradients[i]];
    if (x->written) RFI_TRY(g->m.backend->fill(g->m.device, rfi_graphs_named_data(g, x), 0, (size_t)x->tensor.bytes));
  }
  for (const rfi_port *p = x.port; p < x.port + x.n; p++) {
    const rfr_tensor t = rfi_port_tensor(g, call->callable, call->slot, p, x.grad);
    if (p->callable >= 0 || !t.data) continue;
    if (p->sample && !x.grad) RFI_TRY(g->m.backend->move(g->m.device, t.data, p->sample, (size_t)t.bytes));
    else RFI_TRY(g->m.backend->fill(g->m.device, t.data, 0, (size_t)t.bytes));
  }
  return g->m.backend->wait(g->m.device); /* a hook may read them */
}

/* Waits, also after a failure, because a post hook may free what the part reads. */
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
  if (!rfi_has(&c->u, part)) return RFR_OK;
  RFI_TRY(rfi_graphs_capture_part(g, call->callable, call->slot, part, &c->u.instance[call->slot].graph[part]));
  g->memory.graphs++;
  return RFR_OK;
}

static rfr_status walk_part(walk *w, const rfi_step_call *call, rfi_part part) {
  static const rfr_hooks none;
  const rfr_hook_point point = part == RFI_PART_F   ? RFR_HOOK_PRE_FORWARD
                               : part == RFI_PART_I ? RFR_HOOK_PRE_BACKWARD
                                                    : RFR_HOOK_PRE_WGRAD;
  const rfr_graphs_options *o = &w->g->options;
  const rfr_hooks *h = o->n_hooks > 0 ? &o->hooks[call->callable] : &none;
  int before = 0;
  for (int i = 0; i < call->callable; i++) before += w->g->stage[w->g->callable[i].stage].slots;
  bool *done = &w->done[(before + call->slot) * RFI_PARTS + (int)part];
  if (*done) return RFR_OK;
  *done = true;
  rfr_hook_event event = {.size = sizeof event,
                          .point = point,
                          .callable = call->callable,
                          .microbatch = call->microbatch,
                          .capture = w->capture,
                          .iteration = w->iteration};
  if (!w->capture) RFI_TRY(set_inputs(w->g, call, part));
  describe(w, call, part, &event);
  return run_with_hooks(rfi_hooks_at(h, point), rfi_hooks_at(h, point + 1), &event, work_on_part, w, call, part);
}

/* ---- the walk ---- */

static rfr_status walk_calls(walk *w) {
  rfr_graphs *g = w->g;
  int places = 0;
  for (int i = 0; i < g->n; i++) places += g->stage[g->callable[i].stage].slots;
  RFI_TRY(RFI_ALLOC(g->m.ctx, (size_t)places * RFI_PARTS + 1, &w->done));
  rfr_status s = RFR_OK;
  int action = 0;
  for (int i = 0; i < g->calls.n && s == RFR_OK; i++) {
    const rfi_step_call *call = &g->calls.call[i];
    if (!w->capture && (s = rfi_graphs_run_shard_actions(g, i, &action, true)) != RFR_OK) break;
    for (int part = RFI_PART_F; part <= RFI_PART_W && s == RFR_OK; part++)
      if (rfi_call_runs(g, call, (rfi_part)part)) s = walk_part(w, call, (rfi_part)part);
  }
  if (s == RFR_OK && !w->capture) s = rfi_graphs_run_shard_actions(g, g->calls.n, &action, true);
  rfi_free(g->m.ctx, w->done);
  return s;
}

/* Copies states into the scratch memory that warm-up uses for them. */
static rfr_status copy_states(rfr_graphs *g) {
  for (int i = 0; i < g->m.store.n; i++) {
    const rfi_named *x = &g->m.store.named[i];
    if (x->written && x->parameter < 0)
      RFI_TRY(g->m.backend->move(g->m.device, rfi_address(&g->m.layout, RFI_REGION_SCRATCH, x->scratch), x->tensor.data,
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
  RFI_TRY(rfi_step_memory_take(&g->m, true));
  g->in_warmup = true;
  rfi_graphs_set_addresses(g);
  rfr_status s =
      run_with_hooks(&g->options.pre_warmup, &g->options.post_warmup, &event, warm_up, &w, NULL, RFI_PART_LOAD);
  g->in_warmup = false;
  rfi_step_memory_release(&g->m);
  rfi_graphs_set_addresses(g);
  return s;
}

rfr_status rfi_graphs_capture(rfr_graphs *g) {
  walk w = {.g = g, .capture = true};
  for (int c = 0; c < g->n; c++) { /* once for all slots, without hooks */
    RFI_TRY(work_on_part(&w, &(rfi_step_call){.callable = c}, RFI_PART_SETUP));
    RFI_TRY(work_on_part(&w, &(rfi_step_call){.callable = c}, RFI_PART_REDUCE));
  }
  return walk_calls(&w);
}
