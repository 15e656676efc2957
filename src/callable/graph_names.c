/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters, states, constants and main gradients, which callables share by name. Each has one address, in our memory
 * or the caller's. Checks of the caller's memory, and of states that several callables use.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "exec/step_memory.h"

/* ---- checks of the caller's memory ---- */

bool rfi_graphs_type_matches(const rfr_type *want, const rfr_type *type, char text[RFI_MISMATCH_TEXT]) {
  char ours[RFI_TYPE_TEXT], theirs[RFI_TYPE_TEXT] = "no type";
  const size_t shape = sizeof *want->shape * (size_t)want->rank; /* entries after the rank are ignored */
  if (type->dtype == want->dtype && type->rank == want->rank && memcmp(type->shape, want->shape, shape) == 0)
    return true;
  if ((unsigned)type->dtype < RFR_DTYPE_COUNT && type->rank >= 0 && type->rank <= RFR_MAX_RANK)
    rfi_type_text(theirs, type);
  rfi_snprintf(text, RFI_MISMATCH_TEXT, "its type is %s, needed is %s", theirs, rfi_type_text(ours, want));
  return false;
}

const char *rfi_graphs_address_defect(const rfr_graphs *g, const void *data) {
  enum { ALIGNMENT = 16 }; /* required by the selected kernels */
  const int64_t arena = g->memory.planned_bytes - g->memory.step_memory_bytes;
  return !data                                             ? "data is NULL"
         : (uintptr_t)data % ALIGNMENT                     ? "its address is not a multiple of 16 bytes"
         : !g->m.backend->reaches(g->m.device, data)       ? "it is not memory of the device"
         : rfi_step_memory_has(g->m.layout.step, data, 1)  ? "it is in the step memory, which other users overwrite"
         : rfi_overlaps(data, 1, g->m.layout.arena, arena) ? "it is in memory of these graphs"
                                                           : NULL;
}

/* ---- names ---- */

static const char *list_of(const int64_t *x, int n, char text[128]) {
  size_t at = 0;
  text[0] = 0;
  for (int i = 0; i < n && at < 100; i++)
    at += (size_t)rfi_snprintf(text + at, 128 - at, "%s%lld", i ? "," : "", (long long)x[i]);
  return text;
}

static bool is_main_dtype(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

static bool is_dense(const rfr_main_gradient *m) {
  int64_t dense = 1;
  bool flat = true;
  for (int d = m->type.rank - 1; m->strides && d >= 0; d--) {
    flat = flat && (m->type.shape[d] == 1 || m->strides[d] == dense);
    dense *= m->type.shape[d];
  }
  return flat || dense == 0;
}

static rfr_status refuse_gradient(const rfr_main_gradient *m, const char *what) {
  return rfi_fail(RFI_E_PROGRAM_STATE, "main gradient of \"%s\": %s", m->parameter, what);
}

rfr_status rfi_graphs_check_gradient_list(const rfr_main_gradient *m, int n) {
  for (int i = 0; i < n; i++) {
    if (m[i].size != sizeof m[i])
      return rfi_fail(RFI_E_ARGUMENT, "main gradient %d: size is %zu, but rfr_main_gradient_default sets %zu", i,
                      m[i].size, sizeof m[i]);
    if (!m[i].parameter) return rfi_fail(RFI_E_ARGUMENT, "main gradient %d: parameter is NULL", i);
    if (!is_main_dtype(m[i].type.dtype))
      return refuse_gradient(&m[i], "its type must have dtype f32, bf16 or f16, and the parameter's shape");
  }
  return RFR_OK;
}

rfr_status rfi_graphs_check_gradient_entry(const rfr_main_gradient *m, const rfr_type *parameter) {
  char text[RFI_MISMATCH_TEXT], shape[128], strides[128];
  rfr_type want = *parameter;
  want.dtype = m->type.dtype;
  if (!rfi_graphs_type_matches(&want, &m->type, text)) return refuse_gradient(m, text);
  if (m->strides ? m->n_strides != m->type.rank : m->n_strides != 0)
    return rfi_fail(RFI_E_PROGRAM_STATE, "main gradient of \"%s\": %d strides for rank %d", m->parameter,
                    m->strides ? m->n_strides : 0, m->type.rank);
  if (!is_dense(m))
    return rfi_fail(RFI_E_PROGRAM_STATE,
                    "main gradient of \"%s\", shape [%s]: strides [%s] are not dense: pass dense memory, or data NULL "
                    "and copy the result",
                    m->parameter, list_of(want.shape, want.rank, shape), list_of(m->strides, want.rank, strides));
  const int64_t bytes = m->data ? rfi_bytes(&want) : 0;
  if (m->bytes != bytes)
    return rfi_fail(RFI_E_PROGRAM_STATE, "main gradient of \"%s\": bytes is %lld, %s needs %lld", m->parameter,
                    (long long)m->bytes, m->data ? rfi_type_text(text, &want) : "data NULL", (long long)bytes);
  return RFR_OK;
}

static rfr_status add_name(rfr_graphs *g, const rfi_callable *c, const rfi_value *x) {
  const size_t n = strlen(RFI_GRAD_PREFIX);
  rfi_named *own;
  if (c->sharded && rfi_is_parameter(x->role) && rfi_storage_find(&g->m.store, x->name))
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": parameter \"%s\" is also used by another callable: a sharded callable cannot "
                    "share parameters",
                    c->u.name, x->name);
  RFI_TRY(rfi_storage_add(&g->m.store, g->m.strings, x, "callable", c->u.name, &own));
  if (!own) return RFR_OK;
  const char *name = own->tensor.name;
  const int parameter = strncmp(name, RFI_GRAD_PREFIX, n) == 0 ? rfi_names_find(&g->m.store.names, name + n) : -1;
  if (strncmp(name, RFI_UNREDUCED_PREFIX, strlen(RFI_UNREDUCED_PREFIX)) == 0) own->region = RFI_REGION_WINDOW;
  if (parameter < 0 || g->m.store.named[parameter].tensor.role != RFR_ROLE_TRAINABLE) return RFR_OK;
  own->parameter = parameter;
  own->writer = c->u.index, own->writer_part = RFI_PART_W;
  g->m.store.named[parameter].gradient = g->m.store.n - 1;
  return RFR_OK;
}

/* A main gradient belongs to one stage: with several stages the order of sums would depend on the schedule. */
static rfr_status check_tied(const rfr_graphs *g, const rfi_callable *c, const rfi_named *gradient) {
  const rfi_callable *first = &g->callable[gradient->writer];
  if (first->stage == c->stage) return RFR_OK;
  return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                  "callable \"%s\": parameter \"%s\" is also trained by callable \"%s\" of another stage: use one "
                  "parameter per stage and add the gradients",
                  c->u.name, g->m.store.named[gradient->parameter].tensor.name, first->u.name);
}

/* The named entry of a value that owns storage; NULL: it has no name. */
static rfi_named *named_of(const rfr_graphs *g, const rfr_trace *t, rfr_value owner) {
  const rfi_value *x = &t->values[owner];
  return x->op < 0 && rfi_is_shared(x->role) ? rfi_storage_find(&g->m.store, x->name) : NULL;
}

rfr_status rfi_graphs_names(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->u.trace;
  c->gradients = rfi_arena_alloc(g->m.strings, sizeof *c->gradients * (size_t)(t->n_inputs + 1));
  c->unreduced = rfi_arena_alloc(g->m.strings, sizeof *c->unreduced * (size_t)(t->n_inputs + 1));
  c->parameters = rfi_arena_alloc(g->m.strings, sizeof *c->parameters * (size_t)(t->n_inputs + 1));
  if (!c->gradients || !c->unreduced || !c->parameters) return RFR_NO_MEMORY;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    if (!rfi_is_shared(x->role)) continue;
    RFI_TRY(add_name(g, c, x));
    const int id = rfi_names_find(&g->m.store.names, x->name);
    if (rfi_is_parameter(x->role)) c->parameters[c->n_parameters++] = id;
    if (g->m.store.named[id].region == RFI_REGION_WINDOW) c->unreduced[c->n_unreduced++] = id;
    if (g->m.store.named[id].parameter < 0) continue;
    RFI_TRY(check_tied(g, c, &g->m.store.named[id]));
    c->gradients[c->n_gradients++] = id;
  }
  for (rfi_use u = {0}; rfi_next_use(c, &u);) {
    rfi_named *named = u.result ? named_of(g, t, u.owner) : NULL;
    if (named && named->region != RFI_REGION_WINDOW) named->written = true;
  }
  return RFR_OK;
}

/* ---- states that callables share ---- */

/* The parameter, state or constant that a value aliases. NULL: none, a main gradient, or the amaxes of the step; every
 * part may write amaxes in any order, because they are maxima. */
static rfi_named *state_of(const rfr_graphs *g, const rfr_trace *t, rfr_value v) {
  rfi_named *x = v < 0 ? NULL : named_of(g, t, t->values[v].base);
  return x && x->parameter < 0 && strcmp(x->tensor.name, RFR_RECIPE_AMAX) != 0 ? x : NULL;
}

/* Only one part of callables of one stage may use a written state, because these run in a fixed order for each
 * microbatch. Otherwise the schedule would decide which version is read. */
static rfr_status check_access(const rfr_graphs *g, int callable, rfi_part part, const rfi_named *x) {
  const rfi_callable *c = &g->callable[callable];
  if (!x || x->writer < 0) return RFR_OK;
  const rfi_callable *writer = &g->callable[x->writer];
  if (c->stage == writer->stage && part == x->writer_part) return RFR_OK;
  return rfi_fail(
      RFI_E_GRAPHS_CALLABLE,
      "callable \"%s\": state \"%s\" is written by callable \"%s\" in another %s: with several microbatches in flight "
      "the value read would depend on the schedule",
      c->u.name, x->tensor.name, writer->u.name, c->stage == writer->stage ? "part" : "stage");
}

static rfr_status check_states(rfr_graphs *g) {
  for (int write = 1; write >= 0; write--) /* first find all writers, then check readers */
    for (int i = 0; i < g->n; i++)
      for (rfi_use u = {0}; rfi_next_use(&g->callable[i], &u);) {
        if (u.part < RFI_PART_F || u.part > RFI_PART_W || u.result != write) continue;
        rfi_named *x = state_of(g, g->callable[i].u.trace, u.owner);
        RFI_TRY(check_access(g, i, u.part, x));
        if (write && x) x->writer = i, x->writer_part = u.part;
      }
  return RFR_OK;
}

/* An output must not alias a written state (unless it has the state's name), because the next microbatch overwrites it.
 * It must not alias a gathered parameter, because the next callable reuses its memory. */
static rfr_status check_output(const rfr_graphs *g, const rfi_callable *c, const rfi_port *p) {
  const rfr_trace *t = c->u.trace;
  const rfi_named *state = state_of(g, t, p->data.value);
  const int maker = p->data.value < 0 ? -1 : t->values[t->values[p->data.value].base].op;
  if (state && state->written && (p->link || strcmp(p->name, state->tensor.name) != 0))
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" aliases state \"%s\", which every microbatch overwrites: output "
                    "rfr_copy of it%s",
                    c->u.name, p->name, state->tensor.name, p->link ? ", and link that" : "");
  if (c->sharded && maker >= c->u.start[RFI_PART_SETUP] && maker < c->u.start[RFI_PART_SETUP + 1])
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" aliases a parameter of a sharded callable, which is gathered only "
                    "during the call: output rfr_copy of it",
                    c->u.name, p->name);
  return RFR_OK;
}

rfr_status rfi_graphs_get(const rfr_graphs *g, const char *name, rfi_named **out) {
  *out = name && strncmp(name, "graphs.", 7) == 0 ? NULL : rfi_storage_find(&g->m.store, name); /* reserved: our own */
  if (*out && (*out)->parameter < 0 && (*out)->region != RFI_REGION_WINDOW) return RFR_OK;
  return rfi_fail(RFI_E_PROGRAM_NAME, "no callable has a parameter, state or constant \"%s\"%s", name ? name : "",
                  *out ? ": a main gradient is named by its parameter, in rfr_graphs_gradient and in lists of gradients"
                       : "");
}

rfr_status rfi_graphs_get_gradient(const rfr_graphs *g, const char *parameter, rfi_named **out) {
  const rfi_named *x = rfi_storage_find(&g->m.store, parameter);
  *out = x && x->gradient >= 0 ? &g->m.store.named[x->gradient] : NULL;
  return *out ? RFR_OK : rfi_fail(RFI_E_PROGRAM_NAME, "no callable trains \"%s\"", parameter ? parameter : "");
}

/* ---- the lists of the options ---- */

static rfr_status bind_tensor(rfr_graphs *g, const rfr_binding *b) {
  char other[RFI_MISMATCH_TEXT];
  rfi_named *x;
  if (rfi_graphs_get(g, b->name, &x) != RFR_OK) return rfi_fail_prefix("rfr_graphs_options.tensors: ");
  const char *what = x->tensor.data                                              ? "it is listed twice"
                     : rfi_graphs_type_matches(&x->tensor.type, &b->type, other) ? rfi_graphs_address_defect(g, b->data)
                                                                                 : other;
  if (what) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" of rfr_graphs_options.tensors: %s", b->name, what);
  x->tensor.data = (void *)b->data;
  return RFR_OK;
}

static rfr_status bind_gradient(rfr_graphs *g, const rfr_main_gradient *m) {
  rfi_named *x;
  if (rfi_graphs_get_gradient(g, m->parameter, &x) != RFR_OK) return rfi_fail_prefix("rfr_graphs_options.gradients: ");
  RFI_TRY(rfi_graphs_check_gradient_entry(m, &x->tensor.type));
  const char *defect = m->data ? rfi_graphs_address_defect(g, m->data) : NULL;
  if (defect) return refuse_gradient(m, defect);
  x->tensor.data = m->data;
  x->accumulate = m->accumulate != 0;
  return RFR_OK;
}

rfr_status rfi_graphs_list_gradients(rfr_graphs *g) {
  for (int i = 0; i < g->options.n_gradients; i++) {
    const rfr_main_gradient *m = &g->options.gradients[i];
    if (rfi_main_gradient_of(g, m->parameter)) return refuse_gradient(m, "it is listed twice");
    if (!rfi_names_add(&g->gradients, g->m.strings, m->parameter, i)) return RFR_NO_MEMORY;
  }
  return RFR_OK;
}

const rfr_main_gradient *rfi_main_gradient_of(const rfr_graphs *g, const char *parameter) {
  const int i = rfi_names_find(&g->gradients, parameter);
  return i < 0 ? NULL : &g->options.gradients[i];
}

rfr_status rfi_graphs_check_names(rfr_graphs *g) {
  for (int i = 0; i < g->options.n_tensors; i++) RFI_TRY(bind_tensor(g, &g->options.tensors[i]));
  for (int i = 0; i < g->options.n_gradients; i++) RFI_TRY(bind_gradient(g, &g->options.gradients[i]));
  RFI_TRY(check_states(g));
  for (int i = 0; i < g->n; i++)
    for (int k = 0; k < g->callable[i].n_out; k++) RFI_TRY(check_output(g, &g->callable[i], &g->callable[i].out[k]));
  return RFR_OK;
}
