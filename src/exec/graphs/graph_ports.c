/* SPDX-License-Identifier: Apache-2.0
 *
 * Where what callables read and give lies, as far as the caller says so: a link is an output and an input in the same
 * bytes, fixed memory is the caller's. All else lies in the slot. What the caller gives to one
 * callable does not overlap what that writes of it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

/* ---- links ---- */

static rfr_status make_link(rfr_graphs *g, int index, const rfr_callable_link *link) {
  rfi_callable *c = &g->callable[index];
  const int in = rfi_port_find(c->in, c->n_in, link->input);
  if (in < 0 || link->callable < 0 || link->callable >= index || g->callable[link->callable].stage != c->stage)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": a link to input \"%s\" from callable %d, which is no earlier "
                    "one of its stage",
                    c->name, link->input ? link->input : "", link->callable);
  rfi_callable *from = &g->callable[link->callable];
  const int out = rfi_port_find(from->out, from->n_out, link->output);
  if (out < 0 || from->out[out].callable >= 0 || c->in[in].callable >= 0)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" of callable \"%s\" is not there, or linked "
                    "already, as its input \"%s\" may be",
                    c->name, link->output ? link->output : "", from->name, link->input);
  rfi_port *a = &from->out[out], *b = &c->in[in];
  if (a->fixed || a->fixed_grad)
    return rfi_fail(
        RFI_E_GRAPHS_CALLABLE,
        "callable \"%s\": output \"%s\" of callable \"%s\" cannot be linked: it, or its gradient, has fixed "
        "memory",
        c->name, link->output, from->name);
  if (memcmp(&a->tensor.type, &b->tensor.type, sizeof a->tensor.type) != 0)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": input \"%s\" has another type than output \"%s\" of callable "
                    "\"%s\"",
                    c->name, link->input, link->output, from->name);
  if (a->grad >= 0 && b->grad < 0)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": input \"%s\" gives no gradient, but callable \"%s\" wants it "
                    "for its output \"%s\": give it the role input_grad",
                    c->name, link->input, from->name, link->output);
  a->callable = index, a->port = in;
  b->callable = link->callable, b->port = out;
  return RFR_OK;
}

/* ---- fixed memory ---- */

static rfr_status refuse_fixed(const rfi_callable *c, const rfr_callable_fixed *f, const char *what) {
  return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": fixed memory for %s\"%s\": %s", c->name,
                  f->gradient ? "the gradient of " : "", f->port ? f->port : "", what);
}

static rfr_status check_addresses(const rfr_graphs *g, const rfi_callable *c, const rfr_callable_fixed *f) {
  const int slots = g->stage[c->stage].slots;
  if (f->n_data != slots || !f->data)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": fixed memory for \"%s\": %d addresses, the stage has %d slots: give one for each",
                    c->name, f->port, f->data ? f->n_data : 0, slots);
  for (int k = 0; k < slots; k++)
    if (!f->data[k] || (uintptr_t)f->data[k] % RFI_CALLERS_ALIGNMENT)
      return refuse_fixed(c, f, "an address is NULL, or not at a multiple of 16 bytes");
  return RFR_OK;
}

static rfr_status make_fixed(rfr_graphs *g, int index, const rfr_callable_fixed *f) {
  rfi_callable *c = &g->callable[index];
  const int in = rfi_port_find(c->in, c->n_in, f->port), out = rfi_port_find(c->out, c->n_out, f->port);
  if (in < 0 && out < 0) return refuse_fixed(c, f, "there is no such input or output");
  if (in >= 0 && out >= 0) return refuse_fixed(c, f, "an input and an output have this name");
  rfi_port *p = in >= 0 ? &c->in[in] : &c->out[out];
  void *const **to = f->gradient ? &p->fixed_grad : &p->fixed;
  if (p->callable >= 0) return refuse_fixed(c, f, "it is linked");
  if (f->gradient && p->grad < 0) return refuse_fixed(c, f, "there is none");
  if (*to) return refuse_fixed(c, f, "it is given twice");
  RFI_TRY(check_addresses(g, c, f));
  void **own = rfi_arena_alloc(g->m.strings, sizeof *own * (size_t)f->n_data);
  if (!own) return RFR_NO_MEMORY;
  memcpy(own, f->data, sizeof *own * (size_t)f->n_data);
  *to = own;
  return RFR_OK;
}

/* ---- samples ---- */

static rfr_status take_sample(rfi_callable *c, const rfr_binding *b) {
  const int in = rfi_port_find(c->in, c->n_in, b->name);
  const char *what = in < 0                                                          ? "there is no such input"
                     : c->in[in].callable >= 0                                       ? "it is linked"
                     : c->in[in].sample                                              ? "it is given twice"
                     : !b->data                                                      ? "it has no data"
                     : memcmp(&b->type, &c->in[in].tensor.type, sizeof b->type) != 0 ? "the input has another type"
                                                                                     : NULL;
  if (what)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": a sample for \"%s\": %s", c->name, b->name ? b->name : "",
                    what);
  c->in[in].sample = b->data;
  return RFR_OK;
}

rfr_status rfi_graph_links(rfr_graphs *g, int index, const rfr_callable *desc) {
  for (int k = 0; k < desc->n_links; k++) RFI_TRY(make_link(g, index, &desc->links[k]));
  for (int k = 0; k < desc->n_fixed; k++) RFI_TRY(make_fixed(g, index, &desc->fixed[k]));
  for (int k = 0; k < desc->n_samples; k++) RFI_TRY(take_sample(&g->callable[index], &desc->samples[k]));
  return RFR_OK;
}

rfr_tensor rfi_port_tensor(const rfr_graphs *g, int callable, int slot, const rfi_port *port, bool grad) {
  const rfr_value v = grad ? port->grad : port->value;
  rfr_tensor t = grad ? port->grad_tensor : port->tensor;
  if (v >= 0) t.data = rfi_graph_address(g, callable, slot, v);
  return t;
}

/* ---- whether it is apart ---- */

typedef struct range { /* of the caller's memory */
  uintptr_t first, end;
  const char *what, *name;
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

static void add_range(ranges *r, const void *data, const rfr_type *type, bool written, const char *what,
                      const char *name) {
  const int64_t bytes = rfi_bytes(type);
  if (!data || bytes == 0) return;
  r->at[r->n++] = (range){(uintptr_t)data, (uintptr_t)data + (uintptr_t)bytes, what, name, written};
}

static void add_named(const rfr_graphs *g, ranges *r, const rfi_callable *c) {
  for (int i = 0; i < c->trace->n_inputs; i++) {
    const int id = rfi_names_find(&g->names, c->trace->values[c->trace->inputs[i]].name);
    const rfi_named *x = id < 0 ? NULL : &g->named[id];
    if (!x || x->offset >= 0) continue;
    if (x->parameter < 0) add_range(r, x->tensor.data, &x->tensor.type, x->written, "", x->tensor.name);
    else
      add_range(r, x->tensor.data, &x->tensor.type, true, "the main gradient of ", g->named[x->parameter].tensor.name);
  }
}

static void add_port(const rfr_graphs *g, ranges *r, const rfi_callable *c, const rfi_port *p, bool input) {
  for (int k = 0; k < g->stage[c->stage].slots; k++) {
    if (p->fixed) add_range(r, p->fixed[k], &p->tensor.type, !input, "", p->name);
    if (p->fixed_grad) add_range(r, p->fixed_grad[k], &p->grad_tensor.type, input, "the gradient of ", p->name);
  }
}

/* Of those before it in the order of addresses the furthest is enough, and the furthest that is written. */
static rfr_status check_apart(const rfi_callable *c, ranges *r) {
  const range *far = NULL, *written = NULL;
  qsort(r->at, (size_t)r->n, sizeof *r->at, by_address);
  for (int i = 0; i < r->n; i++) {
    const range *x = &r->at[i], *with = x->written ? far : written;
    if (with && with->end > x->first)
      return rfi_fail(
          RFI_E_GRAPHS_CALLABLE,
          "callable \"%s\": %s\"%s\" and %s\"%s\" lie in the same memory, which it writes: give each its own", c->name,
          with->what, with->name, x->what, x->name);
    if (!far || x->end > far->end) far = x;
    if (x->written && (!written || x->end > written->end)) written = x;
  }
  return RFR_OK;
}

/* Two callables may be given the same: gathered parameters one after the other, one's output as the other's input. */
rfr_status rfi_graph_check_apart(const rfr_graphs *g) {
  rfr_status s = RFR_OK;
  for (int i = 0; i < g->n && s == RFR_OK; i++) {
    const rfi_callable *c = &g->callable[i];
    ranges r = {0};
    const int most = c->trace->n_inputs + 2 * (c->n_in + c->n_out) * g->stage[c->stage].slots;
    RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *r.at * (size_t)(most + 1), &r.at));
    add_named(g, &r, c);
    for (int k = 0; k < c->n_in; k++) add_port(g, &r, c, &c->in[k], true);
    for (int k = 0; k < c->n_out; k++) add_port(g, &r, c, &c->out[k], false);
    s = check_apart(c, &r);
    rfi_free(g->m.ctx, r.at);
  }
  return s;
}
