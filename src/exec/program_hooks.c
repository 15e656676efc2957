/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks of programs. A span is the forward or the backward of one microbatch: its bound ops from the first to the last,
 * without those that passes have moved into an earlier span. Spans are in order and do not overlap; ops between them
 * belong to the step. An eager run stops at both ends of a span, and waits there, because a hook may read results. A
 * capture is one graph, so hooks can only run before and after all of it.
 */
#include "base/base.h"
#include "exec/exec.h"
#include "exec/step_memory.h"

static const rfr_hooks *hooks_of(const rfr_programs *p, const rfi_program *g) { return &p->hooks[g - p->program]; }

bool rfi_program_has_hooks(const rfr_programs *p, const rfi_program *g) {
  bool any = false;
  for (int at = RFR_HOOK_PRE_FORWARD; p->hooks && at <= RFR_HOOK_POST_WGRAD; at++)
    any = any || rfi_hooks_at(hooks_of(p, g), at)->n > 0;
  return any;
}

/* ---- compilation ---- */

rfr_status rfi_programs_copy_hooks(rfr_programs *p, const rfr_hooks *from) {
  if (!from) return RFR_OK;
  if (!(p->hooks = rfi_arena_alloc(p->m.strings, sizeof *p->hooks * (size_t)p->n))) return RFR_NO_MEMORY;
  for (int i = 0; i < p->n; i++) {
    p->hooks[i] = from[i];
    for (int at = RFR_HOOK_PRE_FORWARD; at <= RFR_HOOK_POST_WGRAD; at++) {
      rfr_hook_list *l = (rfr_hook_list *)rfi_hooks_at(&p->hooks[i], at);
      rfr_hook *own = rfi_arena_alloc(p->m.strings, sizeof *own * (size_t)(l->n + 1));
      if (!own) return RFR_NO_MEMORY;
      for (int k = 0; k < l->n; k++) own[k] = l->hooks[k];
      l->hooks = own;
    }
  }
  return RFR_OK;
}

static bool is_of(const rfi_program *g, int bound, rfr_hook_point point, int microbatch) {
  const rfi_opr *op = &g->u.trace->ops[g->u.bound[bound].op];
  const bool backward = op->phase == RFR_PHASE_DGRAD || op->phase == RFR_PHASE_WGRAD;
  return op->microbatch == microbatch && (point == RFR_HOOK_PRE_FORWARD ? op->phase == RFR_PHASE_FORWARD : backward);
}

/* Appends the span of a microbatch, unless it is empty. */
static rfr_status add_span(rfi_program *g, rfr_hook_point point, int microbatch) {
  const int after = g->n_spans > 0 ? g->span[g->n_spans - 1].end : g->u.first[RFI_PART_F];
  rfi_hook_span s = {point, microbatch, -1, -1};
  bool any = false;
  for (int i = g->u.first[RFI_PART_F]; i < g->u.n_bound; i++) {
    if (!is_of(g, i, point, microbatch)) continue;
    any = true;
    if (i < after) continue;
    if (s.first < 0) s.first = i;
    s.end = i + 1;
  }
  if (s.first >= 0) g->span[g->n_spans++] = s;
  if (!any || s.first >= 0) return RFR_OK;
  return rfi_fail(RFI_E_ARGUMENT, "program \"%s\" cannot have hooks: the %s of microbatch %d ends within another part",
                  g->u.name, point == RFR_HOOK_PRE_FORWARD ? "forward" : "backward", microbatch);
}

/* Without microbatches all ops belong to microbatch -1. */
static rfr_status find_spans(rfr_programs *p, rfi_program *g) {
  int last = -1;
  for (int i = g->u.first[RFI_PART_F]; i < g->u.n_bound; i++) {
    const int m = g->u.trace->ops[g->u.bound[i].op].microbatch;
    if (m > last) last = m;
  }
  if (!(g->span = rfi_arena_alloc(p->m.strings, sizeof *g->span * 2 * (size_t)(last + 2)))) return RFR_NO_MEMORY;
  for (int m = last < 0 ? -1 : 0; m <= last; m++) {
    RFI_TRY(add_span(g, RFR_HOOK_PRE_FORWARD, m));
    RFI_TRY(add_span(g, RFR_HOOK_PRE_BACKWARD, m));
  }
  return RFR_OK;
}

static rfr_status check_points(const rfr_programs *p, const rfi_program *g) {
  const char *lacks[] = {"forward", "backward", "wgrad: weight gradients are part of the backward"};
  for (int i = 0; i < g->n_spans; i++) lacks[(g->span[i].point - RFR_HOOK_PRE_FORWARD) / 2] = NULL;
  return rfi_check_hook_parts(hooks_of(p, g), lacks, RFI_E_ARGUMENT, "program", g->u.name);
}

rfr_status rfi_program_place_hooks(rfr_programs *p, rfi_program *g) {
  const size_t most = (size_t)(g->u.trace->n_inputs + g->u.trace->n_outputs + 1);
  if (!rfi_program_has_hooks(p, g)) return RFR_OK;
  if (!(g->event_tensors = rfi_arena_alloc(p->m.strings, sizeof *g->event_tensors * most))) return RFR_NO_MEMORY;
  RFI_TRY(find_spans(p, g));
  return check_points(p, g);
}

/* ---- running ---- */

typedef struct work {
  rfr_programs *p;
  rfi_program *g;
  int from, end; /* bound ops */
} work;

/* Waits even after a failure, because a hook may read or free memory that the ops use. */
static rfr_status run_ops(void *user) {
  const work *w = user;
  const rfr_status s = w->p->options.debug ? rfi_debug_run(w->p, w->g, w->from, w->end)
                                           : rfi_unit_run_ops(&w->p->m, &w->g->u, 0, w->from, w->end);
  const rfr_status waited = w->p->m.backend->wait(w->p->m.device);
  return s == RFR_OK ? waited : s;
}

static rfr_status capture(void *user) {
  const work *w = user;
  return rfi_unit_capture(&w->p->m, &w->g->u, 0, RFI_PART_F, NULL, 0, &w->g->u.instance->graph[RFI_PART_F]);
}

static int list_inputs(const work *w, bool parameters, rfr_tensor *to) {
  const rfr_trace *t = w->g->u.trace;
  int n = 0;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    if (rfi_is_parameter(x->role) == parameters) to[n++] = rfi_storage_find(&w->p->m.store, x->name)->tensor;
  }
  return n;
}

static rfr_status run_span(work *w, const rfi_hook_span *span, bool captures) {
  const rfi_program *g = w->g;
  rfr_tensor *room = g->event_tensors;
  rfr_hook_event event = {.size = sizeof event,
                          .point = span->point,
                          .callable = (int)(g - w->p->program),
                          .microbatch = span->microbatch,
                          .capture = captures,
                          .name = g->u.name};
  event.parameters = room;
  event.n_parameters = list_inputs(w, true, room);
  event.inputs = room += event.n_parameters;
  event.n_inputs = list_inputs(w, false, room);
  event.outputs = room += event.n_inputs;
  event.n_outputs = g->u.trace->n_outputs;
  for (int k = 0; k < event.n_outputs; k++)
    if (!rfi_program_output_at(w->p, event.callable, k, &room[k]))
      room[k] = (rfr_tensor){.name = g->u.trace->outputs[k].name};
  const rfr_hooks *h = hooks_of(w->p, g);
  w->from = span->first, w->end = span->end;
  const rfi_hooked x = {rfi_hooks_at(h, span->point),
                        rfi_hooks_at(h, span->point + 1),
                        captures ? capture : run_ops,
                        w,
                        "program",
                        "a run"};
  return rfi_run_hooked(&x, &event);
}

static rfr_status run_spans(rfr_programs *p, rfi_program *g) {
  work w = {.p = p, .g = g, .end = g->u.first[RFI_PART_F]};
  for (int i = 0; i < g->n_spans; i++) {
    w.from = w.end, w.end = g->span[i].first;
    RFI_TRY(run_ops(&w));
    RFI_TRY(run_span(&w, &g->span[i], false));
  }
  w.from = w.end, w.end = g->u.n_bound;
  return run_ops(&w);
}

/* Keeps the step memory until the end, because it holds the values that one part computes for the next. */
rfr_status rfi_program_run_hooked(rfr_programs *p, rfi_program *g) {
  RFI_TRY(rfi_step_memory_take(&p->m, true));
  p->in_hooked = true;
  const rfr_status s = run_spans(p, g);
  p->in_hooked = false;
  rfi_step_memory_release(&p->m);
  return s;
}

rfr_status rfi_program_capture_hooked(rfr_programs *p, rfi_program *g) {
  work w = {.p = p, .g = g};
  const rfi_hook_span *all = g->span;
  if (g->n_spans > 1 || all->first > g->u.first[RFI_PART_F] || all->end < g->u.n_bound)
    return rfi_fail(RFI_E_ARGUMENT,
                    "program \"%s\" cannot be captured: its hooks run within the step, where a graph does not stop: "
                    "run it with rfr_program_run, or use graphed callables (rfr_graphs_create)",
                    g->u.name);
  p->in_hooked = true;
  const rfr_status s = run_span(&w, all, true);
  p->in_hooked = false;
  return s;
}
