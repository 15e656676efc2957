/* SPDX-License-Identifier: Apache-2.0
 *
 * Ports are inputs, outputs and their gradients. A link lets an output and an input share memory; a fixed port is in
 * memory of the caller; all other ports are in the slot. If callables write memory of the caller, it must not overlap
 * other memory that they use, except where one callable passes a result to another.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"

/* ---- links ---- */

static rfr_status make_link(rfr_graphs *g, int index, const rfr_callable_link *link) {
  const rfi_callable *c = &g->callable[index];
  const char *input = link->input ? link->input : "", *output = link->output ? link->output : "";
  if (link->callable < 0 || link->callable >= index || g->callable[link->callable].stage != c->stage)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": input \"%s\" cannot be linked to callable %d: it is not an earlier callable of "
                    "the same stage",
                    c->u.name, input, link->callable);
  const rfi_callable *from = &g->callable[link->callable];
  const int in = rfi_port_find(c->in, c->n_in, link->input), out = rfi_port_find(from->out, from->n_out, link->output);
  rfi_port *a = out < 0 ? NULL : &from->out[out], *b = in < 0 ? NULL : &c->in[in];
  const char *what = !b                               ? "there is no such input"
                     : !a                             ? "there is no such output"
                     : a->link || b->link             ? "one of them is already linked"
                     : a->data.fixed || a->grad.fixed ? "the output or its gradient has fixed memory"
                     : memcmp(&a->data.tensor.type, &b->data.tensor.type, sizeof(rfr_type)) != 0 ? "their types differ"
                     : a->grad.value >= 0 && b->grad.value < 0
                         ? "the output needs a gradient, which the input does not have: record the input with role "
                           "input_grad"
                         : NULL;
  if (what)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": input \"%s\" cannot be linked to output \"%s\" of callable \"%s\": %s", c->u.name,
                    input, output, from->u.name, what);
  a->link = b;
  b->link = a;
  return RFR_OK;
}

/* ---- fixed memory ---- */

static rfr_status refuse_fixed(const rfi_callable *c, const rfr_callable_fixed *f, const char *what) {
  return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": fixed memory for %s\"%s\": %s", c->u.name,
                  f->gradient ? "the gradient of " : "", f->port ? f->port : "", what);
}

static rfr_status check_addresses(const rfr_graphs *g, const rfi_callable *c, const rfr_callable_fixed *f) {
  const int slots = c->stage->slots;
  if (f->n_data != slots || !f->data)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": fixed memory for \"%s\": %d addresses for %d slots: pass one per slot", c->u.name,
                    f->port, f->data ? f->n_data : 0, slots);
  for (int k = 0; k < slots; k++) {
    const char *defect = rfi_graphs_address_defect(g, f->data[k]);
    if (defect) return refuse_fixed(c, f, defect);
  }
  return RFR_OK;
}

/* Returns the port and its data or gradient, whichever `f` fixes. */
static rfr_status find_data(const rfi_callable *c, const rfr_callable_fixed *f, rfi_port **port, rfi_port_data **data) {
  const int i = rfi_port_find(c->in, c->n_in, f->port), k = rfi_port_find(c->out, c->n_out, f->port);
  if (i < 0 && k < 0) return refuse_fixed(c, f, "there is no such input or output");
  if (i >= 0 && k >= 0) return refuse_fixed(c, f, "both an input and an output have this name");
  *port = i >= 0 ? &c->in[i] : &c->out[k];
  *data = f->gradient ? &(*port)->grad : &(*port)->data;
  return RFR_OK;
}

static rfr_status make_fixed(rfr_graphs *g, int index, const rfr_callable_fixed *f) {
  rfi_callable *c = &g->callable[index];
  rfi_port *p;
  rfi_port_data *to;
  RFI_TRY(find_data(c, f, &p, &to));
  if (p->link) return refuse_fixed(c, f, "it is linked");
  if (f->gradient && to->value < 0) return refuse_fixed(c, f, "it has no gradient");
  if (to->fixed) return refuse_fixed(c, f, "it is listed twice");
  RFI_TRY(check_addresses(g, c, f));
  if (!(to->fixed = rfi_arena_alloc(g->m.strings, sizeof *to->fixed * (size_t)f->n_data))) return RFR_NO_MEMORY;
  memcpy(to->fixed, f->data, sizeof *to->fixed * (size_t)f->n_data);
  return RFR_OK;
}

rfr_status rfi_graphs_fixed_of(const rfr_graphs *g, int callable, const rfr_callable_fixed *f, void ***addresses) {
  rfi_port *p;
  rfi_port_data *data;
  if (callable < 0 || callable >= g->n) return rfi_fail(RFI_E_ARGUMENT, "callable %d of %d", callable, g->n);
  const rfi_callable *c = &g->callable[callable];
  RFI_TRY(find_data(c, f, &p, &data));
  *addresses = data->fixed;
  return *addresses ? check_addresses(g, c, f) : refuse_fixed(c, f, "it was not fixed at creation");
}

/* ---- samples ---- */

static rfr_status take_sample(rfi_callable *c, const rfr_binding *b) {
  char other[RFI_MISMATCH_TEXT];
  const int in = rfi_port_find(c->in, c->n_in, b->name);
  const rfi_port *p = in < 0 ? NULL : &c->in[in];
  const char *what = !p                                                                ? "there is no such input"
                     : p->link                                                         ? "it is linked"
                     : p->sample                                                       ? "it is listed twice"
                     : !b->data                                                        ? "it has no data"
                     : !rfi_graphs_type_matches(&p->data.tensor.type, &b->type, other) ? other
                                                                                       : NULL;
  if (what)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": a sample for \"%s\": %s", c->u.name,
                    b->name ? b->name : "", what);
  c->in[in].sample = b->data;
  return RFR_OK;
}

rfr_status rfi_graphs_links(rfr_graphs *g, int index, const rfr_callable *desc) {
  for (int k = 0; k < desc->n_links; k++) RFI_TRY(make_link(g, index, &desc->links[k]));
  for (int k = 0; k < desc->n_fixed; k++) RFI_TRY(make_fixed(g, index, &desc->fixed[k]));
  for (int k = 0; k < desc->n_samples; k++) RFI_TRY(take_sample(&g->callable[index], &desc->samples[k]));
  return RFR_OK;
}

rfi_ports rfi_ports_taken(const rfi_callable *c, rfi_part part) {
  return part == RFI_PART_F   ? (rfi_ports){c->in, c->n_in, false}
         : part == RFI_PART_I ? (rfi_ports){c->out, c->n_out, true}
                              : (rfi_ports){0};
}

rfi_ports rfi_ports_returned(const rfi_callable *c, rfi_part part) {
  return part == RFI_PART_F   ? (rfi_ports){c->out, c->n_out, false}
         : part == RFI_PART_I ? (rfi_ports){c->in, c->n_in, true}
                              : (rfi_ports){0};
}

rfr_tensor rfi_port_tensor(const rfr_graphs *g, int slot, const rfi_port *port, bool grad) {
  const rfi_port_data *data = rfi_port_of(port, grad);
  rfr_tensor t = data->tensor;
  if (data->value >= 0) t.data = rfi_unit_address(&g->m, &g->callable[port->callable].u, slot, data->value);
  return t;
}

/* ---- overlap ---- */

typedef struct range { /* the caller's memory for one tensor of one callable */
  uintptr_t first, end;
  uintptr_t reach; /* the largest end of this range and all ranges that start before it */
  const char *what, *name;
  int callable, slot;
  int named; /* index of the named entry; -1: a port */
  bool grad; /* the port's gradient, not its value */
  bool adds; /* a main gradient with `accumulate` */
  bool written;
} range;

typedef struct ranges {
  range *at;
  int n;
} ranges;

static int by_address(const void *a, const void *b) {
  const uintptr_t x = ((const range *)a)->first, y = ((const range *)b)->first;
  return (x > y) - (x < y);
}

static void add_range(ranges *r, const void *data, const rfr_type *type, range x) {
  const int64_t bytes = rfi_bytes(type);
  if (!data || bytes == 0) return;
  x.first = (uintptr_t)data;
  x.end = x.first + (uintptr_t)bytes;
  r->at[r->n++] = x;
}

static void add_named(const rfr_graphs *g, ranges *r, int callable) {
  const rfr_trace *t = g->callable[callable].u.trace;
  for (int i = 0; i < t->n_inputs; i++) {
    const int id = rfi_names_find(&g->m.store.names, t->values[t->inputs[i]].name);
    const rfi_named *x = id < 0 ? NULL : &g->m.store.named[id];
    if (!x || x->offset >= 0) continue;
    const bool sum = x->parameter >= 0;
    add_range(r, x->tensor.data, &x->tensor.type,
              (range){.what = sum ? "the main gradient of " : "",
                      .name = sum ? g->m.store.named[x->parameter].tensor.name : x->tensor.name,
                      .callable = callable,
                      .named = id,
                      .adds = sum && x->accumulate,
                      .written = sum || x->written});
  }
}

static void add_port(const rfr_graphs *g, ranges *r, const rfi_port *p, bool grad) {
  const rfi_port_data *data = rfi_port_of(p, grad);
  for (int k = 0; data->fixed && k < g->callable[p->callable].stage->slots; k++)
    add_range(r, data->fixed[k], &data->tensor.type,
              (range){.what = grad ? "the gradient of " : "",
                      .name = p->name,
                      .callable = p->callable,
                      .slot = k,
                      .named = -1,
                      .grad = grad,
                      .written = p->output != grad});
}

/* Whether each call in the later callable's slot has the microbatch that used the earlier callable's slot last. */
static bool same_microbatches(const rfr_graphs *g, const rfi_calls *calls, const range *early, const range *late) {
  int last = -1;
  for (int i = 0; i < calls->n; i++) {
    const rfi_step_call *call = &calls->call[i];
    const rfi_stage_plan *stage = call->of->stage;
    if (stage == g->callable[early->callable].stage && call->slot == early->slot) last = call->microbatch;
    if (stage == g->callable[late->callable].stage && call->slot == late->slot && call->microbatch != last)
      return false;
  }
  return true;
}

/* Whether one tensor is passed on: an output is a later callable's input, or an input gradient an earlier callable's
 * output gradient. */
static bool is_handed_over(const rfr_graphs *g, const rfi_calls *calls, const range *a, const range *b) {
  const range *written = a->written ? a : b, *read = a->written ? b : a;
  const range *early = written->grad ? read : written, *late = written->grad ? written : read;
  return a->named < 0 && b->named < 0 && !read->written && a->grad == b->grad && a->first == b->first &&
         a->end == b->end && early->callable < late->callable && same_microbatches(g, calls, early, late);
}

static bool may_share(const rfr_graphs *g, const rfi_calls *calls, const range *a, const range *b) {
  if (!a->written && !b->written) return true;
  if (a->named >= 0 && a->named == b->named) return true;
  if (a->callable == b->callable) return false;
  return (a->adds && b->adds) || is_handed_over(g, calls, a, b);
}

static rfr_status refuse_shared(const rfr_graphs *g, const range *a, const range *b) {
  const bool same = a->callable == b->callable;
  return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                  "callable \"%s\": %s\"%s\" and %s%s%s%s\"%s\" overlap in memory that is written: use separate memory",
                  g->callable[a->callable].u.name, a->what, a->name, same ? "" : "callable \"",
                  same ? "" : g->callable[b->callable].u.name, same ? "" : "\": ", b->what, b->name);
}

static rfr_status check_ranges(const rfr_graphs *g, const rfi_calls *calls, ranges *r) {
  qsort(r->at, (size_t)r->n, sizeof *r->at, by_address);
  for (int i = 0; i < r->n; i++) {
    range *x = &r->at[i];
    x->reach = i > 0 && r->at[i - 1].reach > x->end ? r->at[i - 1].reach : x->end;
    for (const range *with = x; with > r->at && with[-1].reach > x->first;)
      if ((--with)->end > x->first && !may_share(g, calls, with, x)) return refuse_shared(g, with, x);
  }
  return RFR_OK;
}

rfr_status rfi_graphs_check_overlap(const rfr_graphs *g, const rfi_calls *calls) {
  ranges r = {0};
  size_t most = 1;
  for (int i = 0; i < g->n; i++) {
    const rfi_callable *c = &g->callable[i];
    most += (size_t)c->u.trace->n_inputs + 2 * (size_t)(c->n_in + c->n_out) * (size_t)c->stage->slots;
  }
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *r.at * most, &r.at));
  for (int i = 0; i < g->n; i++) {
    const rfi_callable *c = &g->callable[i];
    add_named(g, &r, i);
    for (const rfi_port *p = c->in; p < rfi_ports_end(c); p++) {
      add_port(g, &r, p, false);
      add_port(g, &r, p, true);
    }
  }
  const rfr_status s = check_ranges(g, calls, &r);
  rfi_free(g->m.ctx, r.at);
  return s;
}
