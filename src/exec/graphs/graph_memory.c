/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of graphed callables. Parameters, states, constants and main gradients have one address each. Values that
 * live from one part of a microbatch to another are planned on a time axis of their stage:
 *
 *   load, setup | F of the first callable ... F of the last | I W of the last ... I W of the first [| W again] | end
 *
 * with one tick per op, and one before each part for copied inputs. With separate W actions all W may come after all I:
 * then W is on the axis twice, so that a value that W reads lives until the later one. Results returned to the caller
 * live to the end. The offsets come from the planner that plans programs. Fixed ports use the caller's memory, and
 * scratch memory during warm-up.
 */
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

/* ---- checks of the caller's memory ---- */

bool rfi_graphs_type_matches(const rfr_type *want, const rfr_type *type, char text[RFI_MISMATCH_TEXT]) {
  char ours[RFI_TYPE_TEXT], theirs[RFI_TYPE_TEXT] = "no type";
  const size_t shape = sizeof *want->shape * (size_t)want->rank; /* entries after the rank are not compared */
  if (type->dtype == want->dtype && type->rank == want->rank && memcmp(type->shape, want->shape, shape) == 0)
    return true;
  if ((unsigned)type->dtype < RFR_DTYPE_COUNT && type->rank >= 0 && type->rank <= RFR_MAX_RANK)
    rfi_type_text(theirs, type);
  rfi_snprintf(text, RFI_MISMATCH_TEXT, "its type is %s, needed is %s", theirs, rfi_type_text(ours, want));
  return false;
}

const char *rfi_graphs_address_defect(const rfr_graphs *g, const void *data) {
  enum { ALIGNMENT = 16 }; /* kernels are selected for it */
  return !data                                       ? "data is NULL"
         : (uintptr_t)data % ALIGNMENT               ? "its address is not a multiple of 16 bytes"
         : !g->m.backend->reaches(g->m.device, data) ? "it is not memory of the device"
                                                     : NULL;
}

/* ---- names ---- */

static rfi_named *find_named(const rfr_graphs *g, const char *name) {
  const int i = rfi_names_find(&g->names, name);
  return i < 0 ? NULL : &g->named[i];
}

/* The caller's memory for a name; NULL: the graphs allocate it. */
static rfr_status callers_memory(const rfr_graphs *g, const char *name, const rfr_type *type, void **data) {
  const rfr_graphs_options *o = &g->options;
  char other[RFI_MISMATCH_TEXT];
  *data = NULL;
  for (int i = 0; i < o->n_tensors; i++) {
    const rfr_binding *b = &o->tensors[i];
    if (!b->name || strcmp(b->name, name) != 0) continue;
    if (!rfi_graphs_type_matches(type, &b->type, other))
      return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" of rfr_graphs_options.tensors: %s", name, other);
    if (*data) return rfi_fail(RFI_E_PROGRAM_STATE, "rfr_graphs_options.tensors lists \"%s\" twice", name);
    const char *defect = rfi_graphs_address_defect(g, b->data);
    if (defect) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" of rfr_graphs_options.tensors: %s", name, defect);
    *data = (void *)b->data;
  }
  return RFR_OK;
}

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
      return rfi_fail(RFI_E_ARGUMENT, "main gradient %d: size %zu, rfr_main_gradient_default sets %zu", i, m[i].size,
                      sizeof m[i]);
    if (!m[i].parameter) return rfi_fail(RFI_E_ARGUMENT, "main gradient %d: parameter is NULL", i);
    if (!is_main_dtype(m[i].type.dtype))
      return refuse_gradient(&m[i], "set type: dtype f32, bf16 or f16, and the parameter's shape");
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
  rfi_named *have = find_named(g, x->name);
  void *data = NULL;
  if (have && c->sharded && (x->role == RFR_ROLE_TRAINABLE || x->role == RFR_ROLE_FROZEN))
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": parameter \"%s\" is also used by another callable: a sharded callable cannot "
                    "share parameters",
                    c->name, x->name);
  if (have) {
    if (memcmp(&have->tensor.type, &x->type, sizeof x->type) != 0 || have->tensor.role != (rfr_role)x->role)
      return rfi_fail(RFI_E_PROGRAM_STATE,
                      "\"%s\" has another type or role in callable \"%s\" than in an earlier callable", x->name,
                      c->name);
    return RFR_OK;
  }
  if (!rfi_arena_grow(g->m.strings, (void **)&g->named, &g->cap_named, g->n_named + 1, sizeof *g->named))
    return RFR_NO_MEMORY;
  const char *name = rfi_arena_strdup(g->m.strings, x->name);
  if (!name || !rfi_names_add(&g->names, g->m.strings, name, g->n_named)) return RFR_NO_MEMORY;
  const int parameter = strncmp(name, RFI_GRAD_PREFIX, n) == 0 ? rfi_names_find(&g->names, name + n) : -1;
  rfi_named *own = &g->named[g->n_named];
  const bool window = strncmp(name, RFI_UNREDUCED_PREFIX, strlen(RFI_UNREDUCED_PREFIX)) == 0,
             ours = window || parameter >= 0;
  if (!ours) RFI_TRY(callers_memory(g, name, &x->type, &data));
  *own = (rfi_named){.tensor = {.name = name,
                                .role = (rfr_role)x->role,
                                .type = x->type,
                                .bytes = rfi_bytes(&x->type),
                                .host = g->m.backend->host,
                                .data = data},
                     .offset = -1,
                     .writer = -1,
                     .window = window,
                     .parameter = -1,
                     .gradient = -1};
  if (parameter >= 0 && g->named[parameter].tensor.role == RFR_ROLE_TRAINABLE) {
    own->parameter = parameter;
    g->named[parameter].gradient = g->n_named;
    bool found = false;
    for (int i = 0; i < g->options.n_gradients; i++) {
      const rfr_main_gradient *m = &g->options.gradients[i];
      if (strcmp(m->parameter, name + n) != 0) continue;
      if (found) return refuse_gradient(m, "rfr_graphs_options.gradients lists it twice");
      found = true;
      RFI_TRY(rfi_graphs_check_gradient_entry(m, &x->type));
      const char *defect = m->data ? rfi_graphs_address_defect(g, m->data) : NULL;
      if (defect) return refuse_gradient(m, defect);
      own->tensor.data = m->data;
      own->accumulate = m->accumulate != 0;
    }
  }
  g->n_named++;
  return RFR_OK;
}

static bool is_shared(int role) {
  return role == RFR_ROLE_TRAINABLE || role == RFR_ROLE_FROZEN || role == RFR_ROLE_STATE || role == RFR_ROLE_CONST;
}

/* A main gradient belongs to one stage: the order of sums over several stages would depend on the schedule. */
static rfr_status check_tied(const rfr_graphs *g, const rfi_callable *c, const char *name) {
  for (const rfi_callable *o = g->callable; o < c; o++) {
    if (o->stage == c->stage) continue;
    for (int i = 0; i < o->n_gradients; i++)
      if (strcmp(g->named[o->gradients[i]].tensor.name, name) == 0)
        return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                        "callable \"%s\": parameter \"%s\" is also trained by callable \"%s\" of another stage: use "
                        "one parameter per stage and add the gradients",
                        c->name, name + strlen(RFI_GRAD_PREFIX), o->name);
  }
  return RFR_OK;
}

rfr_status rfi_graphs_names(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->trace;
  c->gradients = rfi_arena_alloc(g->m.strings, sizeof *c->gradients * (size_t)(t->n_inputs + 1));
  c->unreduced = rfi_arena_alloc(g->m.strings, sizeof *c->unreduced * (size_t)(t->n_inputs + 1));
  c->parameters = rfi_arena_alloc(g->m.strings, sizeof *c->parameters * (size_t)(t->n_inputs + 1));
  if (!c->gradients || !c->unreduced || !c->parameters) return RFR_NO_MEMORY;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    if (!is_shared(x->role)) continue;
    RFI_TRY(add_name(g, c, x));
    const int id = rfi_names_find(&g->names, x->name);
    if (x->role == RFR_ROLE_TRAINABLE || x->role == RFR_ROLE_FROZEN) c->parameters[c->n_parameters++] = id;
    if (g->named[id].window) c->unreduced[c->n_unreduced++] = id;
    if (g->named[id].parameter < 0) continue;
    RFI_TRY(check_tied(g, c, x->name));
    c->gradients[c->n_gradients++] = id;
  }
  for (int i = 0; i < t->n_ops; i++)
    for (int j = 0; j < t->ops[i].n_out; j++) {
      const rfr_value v = t->ops[i].out[j];
      if (v < 0 || (t->ops[i].def->flags & RFI_VIEW)) continue;
      const rfi_value *owner = &t->values[t->values[v].base];
      rfi_named *named = owner->op < 0 && is_shared(owner->role) ? find_named(g, owner->name) : NULL;
      if (named && !named->window) named->written = true;
    }
  return RFR_OK;
}

/* ---- states that callables share ---- */

/* The parameter, state or constant that a value aliases; NULL: none, a main gradient, or the amaxes of the step, which
 * every part may write in any order: they are maxima. */
static rfi_named *state_of(const rfr_graphs *g, const rfr_trace *t, rfr_value v) {
  const rfi_value *owner = v < 0 ? NULL : &t->values[t->values[v].base];
  rfi_named *x = owner && owner->op < 0 && is_shared(owner->role) ? find_named(g, owner->name) : NULL;
  return x && x->parameter < 0 && strcmp(x->tensor.name, RFI_RECIPE_AMAX) != 0 ? x : NULL;
}

/* A state that is written may be used only by the same part of callables of one stage, which run in a fixed order for
 * each microbatch. Otherwise the schedule would decide which value is read. */
static rfr_status check_access(const rfr_graphs *g, int callable, rfi_part part, const rfi_named *x) {
  const rfi_callable *c = &g->callable[callable];
  if (!x || x->writer < 0) return RFR_OK;
  const rfi_callable *writer = &g->callable[x->writer];
  if (c->stage == writer->stage && part == x->writer_part) return RFR_OK;
  return rfi_fail(
      RFI_E_GRAPHS_CALLABLE,
      "callable \"%s\": state \"%s\" is written by callable \"%s\" in another %s: with several microbatches in flight "
      "the value read would depend on the schedule",
      c->name, x->tensor.name, writer->name, c->stage == writer->stage ? "part" : "stage");
}

static rfr_status check_states(rfr_graphs *g) {
  for (int write = 1; write >= 0; write--) /* find all writers, then check readers */
    for (int i = 0; i < g->n; i++) {
      const rfr_trace *t = g->callable[i].trace;
      for (int part = RFI_PART_F; part <= RFI_PART_W; part++)
        for (int k = g->callable[i].start[part]; k < g->callable[i].start[part + 1]; k++) {
          const rfi_opr *op = &t->ops[k];
          if (op->def->flags & RFI_VIEW) continue;
          for (int j = 0; j < (write ? op->n_out : op->n_in); j++) {
            rfi_named *x = state_of(g, t, write ? op->out[j] : op->in[j]);
            RFI_TRY(check_access(g, i, (rfi_part)part, x));
            if (write && x) x->writer = i, x->writer_part = (rfi_part)part;
          }
        }
    }
  return RFR_OK;
}

/* An output must not alias a written state (unless it has the state's name), because the next microbatch overwrites it,
 * nor a gathered parameter, whose memory the next callable reuses. */
static rfr_status check_output(const rfr_graphs *g, const rfi_callable *c, const rfi_port *p) {
  const rfr_trace *t = c->trace;
  const rfi_named *state = state_of(g, t, p->value);
  const int maker = p->value < 0 ? -1 : t->values[t->values[p->value].base].op;
  if (state && state->written && (p->callable >= 0 || strcmp(p->name, state->tensor.name) != 0))
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" aliases state \"%s\", which every microbatch overwrites: output "
                    "rfr_copy of it%s",
                    c->name, p->name, state->tensor.name, p->callable >= 0 ? ", and link that" : "");
  if (c->sharded && maker >= c->start[RFI_PART_SETUP] && maker < c->start[RFI_PART_SETUP + 1])
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" aliases a parameter of a sharded callable, which is gathered only "
                    "during the call: output rfr_copy of it",
                    c->name, p->name);
  return RFR_OK;
}

static rfr_status check_names(const rfr_graphs *g) {
  const rfr_graphs_options *o = &g->options;
  for (int i = 0; i < o->n_tensors; i++) {
    const rfi_named *x = o->tensors[i].name ? find_named(g, o->tensors[i].name) : NULL;
    if (!x || x->parameter >= 0 || x->window)
      return rfi_fail(RFI_E_PROGRAM_NAME,
                      "rfr_graphs_options.tensors: no callable has a parameter, state or constant \"%s\"%s",
                      o->tensors[i].name ? o->tensors[i].name : "",
                      x ? "; list main gradients in rfr_graphs_options.gradients" : "");
  }
  for (int i = 0; i < o->n_gradients; i++) {
    const rfi_named *p = find_named(g, o->gradients[i].parameter);
    if (!p || p->gradient < 0)
      return rfi_fail(RFI_E_PROGRAM_NAME, "rfr_graphs_options.gradients: no callable trains \"%s\"",
                      o->gradients[i].parameter);
  }
  return RFR_OK;
}

/* ---- storage ---- */

typedef struct item { /* a value, or the workspace of a bound op */
  int callable, index;
  bool workspace;
} item;

typedef struct axis {
  rfr_graphs *g;
  const rfi_stage_plan *stage;
  int (*at)[RFI_PARTS]; /* per callable of the stage: the tick before each part */
  int *late_w;          /* the same of the second W; -1 */
  int end;
  rfi_life **life; /* per callable and value */
} axis;

static int tick_of(const axis *x, int callable, rfi_part part, int op) {
  return x->at[callable - x->stage->first][part] + 1 + op - x->g->callable[callable].start[part];
}

static void touch(const axis *x, int callable, rfr_value owner, int tick) {
  const rfi_storage *place = &x->g->callable[callable].place[owner];
  while (place->callable >= 0) {
    callable = place->callable;
    owner = place->owner;
    place = &x->g->callable[callable].place[owner];
  }
  rfi_life *life = &x->life[callable - x->stage->first][owner];
  if (life->first < 0 || tick < life->first) life->first = tick;
  if (tick > life->last) life->last = tick;
}

static rfi_part part_at(const rfi_callable *c, int op) {
  int part = RFI_PART_LOAD;
  while (op >= c->start[part + 1]) part++;
  return (rfi_part)part;
}

static rfr_status assign_result_storage(const rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->trace;
  uint8_t *parts; /* per value: a bit for each part that uses it */
  RFI_TRY(RFI_ALLOC(g->m.ctx, (size_t)t->n_values + 1, &parts));
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    const uint8_t bit = (uint8_t)(1 << part_at(c, i));
    if (op->def->flags & RFI_VIEW) continue;
    for (int k = 0; k < op->n_in + op->n_out; k++) {
      const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
      if (v >= 0) parts[t->values[v].base] |= bit;
    }
  }
  for (int i = 0; i < t->n_outputs; i++) parts[t->values[t->outputs[i].value].base] |= 0x80; /* used after all parts */
  for (rfr_value v = 0; v < t->n_values; v++) {
    if (t->values[v].base != v || t->values[v].op < 0 || parts[v] == 0) continue;
    const bool early = parts[v] & (1 << RFI_PART_LOAD | 1 << RFI_PART_SETUP), alone = (parts[v] & (parts[v] - 1)) == 0;
    const bool gathered = c->sharded && parts[v] & 1 << RFI_PART_SETUP;
    c->place[v].kind = gathered ? RFI_STORAGE_WINDOW
                       : alone  ? RFI_STORAGE_SHARED
                       : early  ? RFI_STORAGE_PERSISTENT
                                : RFI_STORAGE_SLOT;
  }
  rfi_free(g->m.ctx, parts);
  return RFR_OK;
}

static int64_t bytes_into(const rfi_value *x) { return x->offset * rfr_dtype_bits(x->type.dtype) / 8; }

/* `v` is an alias of value `of` of another callable. */
static void link_storage(rfr_graphs *g, rfi_callable *c, rfr_value v, int callable, rfr_value of) {
  const rfi_value *x = &g->callable[callable].trace->values[of];
  c->place[v] =
      (rfi_storage){.kind = RFI_STORAGE_SLOT, .offset = bytes_into(x), .callable = callable, .owner = x->base};
}

/* Moves value `v` to the caller's memory. It must own its storage, be computed by the callable (`computed`) or passed
 * in, and change with each microbatch. */
static rfr_status fix_storage(rfi_callable *c, const rfi_port *p, bool computed, rfr_value v, void *const *fixed) {
  if (!fixed) return RFR_OK;
  const rfi_value *x = &c->trace->values[v], *owner = &c->trace->values[x->base];
  rfi_storage *place = &c->place[x->base];
  if ((place->kind == RFI_STORAGE_SLOT || place->kind == RFI_STORAGE_SHARED) && place->callable < 0 &&
      (owner->op >= 0) == computed && x->offset == 0 && rfi_bytes(&x->type) == rfi_bytes(&owner->type)) {
    place->kind = RFI_STORAGE_FIXED;
    place->fixed = fixed;
    return RFR_OK;
  }
  return rfi_fail(
      RFI_E_GRAPHS_CALLABLE,
      "callable \"%s\": fixed memory for %s\"%s\" is impossible, because it aliases an input or another value, "
      "or does not change between microbatches: use the address that the call returns",
      c->name, fixed == p->fixed_grad ? "the gradient of " : "", p->name);
}

static rfr_status fix_all_storage(rfi_callable *c) {
  for (int i = 0; i < c->n_in; i++) {
    RFI_TRY(fix_storage(c, &c->in[i], false, c->in[i].value, c->in[i].fixed));
    RFI_TRY(fix_storage(c, &c->in[i], true, c->in[i].grad, c->in[i].fixed_grad));
  }
  for (int k = 0; k < c->n_out; k++) {
    RFI_TRY(fix_storage(c, &c->out[k], false, c->out[k].grad, c->out[k].fixed_grad));
    RFI_TRY(fix_storage(c, &c->out[k], true, c->out[k].value, c->out[k].fixed));
  }
  return RFR_OK;
}

static rfr_status assign_storage(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->trace;
  if (!(c->place = rfi_arena_alloc(g->layout, sizeof *c->place * (size_t)(t->n_values + 1)))) return RFR_NO_MEMORY;
  for (rfr_value v = 0; v < t->n_values; v++) c->place[v].callable = -1;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    const int name = is_shared(x->role) ? rfi_names_find(&g->names, x->name) : -1;
    c->place[t->inputs[i]].kind = name >= 0 ? RFI_STORAGE_NAMED : RFI_STORAGE_SLOT;
    c->place[t->inputs[i]].offset = name;
  }
  RFI_TRY(assign_result_storage(g, c));
  for (int i = 0; i < c->n_in; i++)
    if (c->in[i].callable >= 0)
      link_storage(g, c, c->in[i].value, c->in[i].callable, g->callable[c->in[i].callable].out[c->in[i].port].value);
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k].callable >= 0 && c->out[k].grad >= 0)
      link_storage(g, c, c->out[k].grad, c->out[k].callable, g->callable[c->out[k].callable].in[c->out[k].port].grad);
  return fix_all_storage(c);
}

/* ---- the axis ---- */

static int lay_part(axis *x, int callable, rfi_part part, int at) {
  const rfi_callable *c = &x->g->callable[callable];
  x->at[callable - x->stage->first][part] = at;
  return at + 1 + c->start[part + 1] - c->start[part];
}

static void lay_axis(axis *x) {
  const rfi_stage_plan *s = x->stage;
  int at = 0;
  for (int part = RFI_PART_LOAD; part <= RFI_PART_F; part++)
    for (int c = s->first; c < s->end; c++) at = lay_part(x, c, (rfi_part)part, at);
  for (int c = s->end - 1; c >= s->first; c--) {
    at = lay_part(x, c, RFI_PART_I, at);
    at = lay_part(x, c, RFI_PART_W, at);
    at = lay_part(x, c, RFI_PART_REDUCE, at);
  }
  for (int c = s->end - 1; c >= s->first; c--) {
    const rfi_callable *callable = &x->g->callable[c];
    x->late_w[c - s->first] = s->delayed ? at : -1;
    if (s->delayed) at += 1 + callable->start[RFI_PART_W + 1] - callable->start[RFI_PART_W];
  }
  x->end = at;
}

static void touch_ops(const axis *x, int callable) {
  const rfi_callable *c = &x->g->callable[callable];
  const rfr_trace *t = c->trace;
  const int late_w = x->late_w[callable - x->stage->first];
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    const rfi_part part = part_at(c, i);
    const int tick = tick_of(x, callable, part, i);
    if (op->def->flags & RFI_VIEW) continue;
    for (int k = 0; k < op->n_in + op->n_out; k++) {
      const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
      if (v < 0) continue;
      const rfr_value owner = t->values[v].base;
      touch(x, callable, owner, tick);
      if (part == RFI_PART_W && late_w >= 0 && c->place[owner].kind != RFI_STORAGE_SHARED)
        touch(x, callable, owner, late_w + 1 + i - c->start[part]);
    }
  }
}

/* Inputs are live before their part; results for the caller live to the end. */
static void touch_ports(const axis *x, int callable) {
  const rfi_callable *c = &x->g->callable[callable];
  const rfi_value *values = c->trace->values;
  const int *at = x->at[callable - x->stage->first];
  if (c->microbatch >= 0) { /* never shares bytes, so the host knows its contents */
    touch(x, callable, c->microbatch, 0);
    touch(x, callable, c->microbatch, x->end);
  }
  for (int k = 0; k < c->n_checked; k++) /* copied to the ring after F */
    touch(x, callable, values[c->checked[k].bad].base, at[RFI_PART_F] + c->start[RFI_PART_I] - c->start[RFI_PART_F]);
  for (int i = 0; i < c->n_in; i++) {
    if (c->in[i].value >= 0) touch(x, callable, c->in[i].value, at[RFI_PART_F]);
    if (c->in[i].callable < 0 && c->in[i].grad >= 0) touch(x, callable, values[c->in[i].grad].base, x->end);
  }
  for (int k = 0; k < c->n_out; k++) {
    if (c->out[k].grad >= 0) touch(x, callable, c->out[k].grad, at[RFI_PART_I]);
    if (c->out[k].callable < 0 && c->out[k].value >= 0) touch(x, callable, values[c->out[k].value].base, x->end);
  }
}

/* ---- planning a stage ---- */

typedef struct planned {
  rfi_plan plan;
  item *items;
} planned;

static void add_buffer(planned *p, int64_t bytes, int first, int last, item what) {
  p->items[p->plan.n] = what;
  p->plan.buffer[p->plan.n] = (rfi_buffer){bytes, 0, first, last, p->plan.n};
  p->plan.n++;
}

static rfr_status room(rfr_ctx *ctx, int n, planned *p) {
  p->plan.ctx = ctx;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *p->plan.buffer * (size_t)(n + 1), &p->plan.buffer));
  return RFI_ALLOC(ctx, sizeof *p->items * (size_t)(n + 1), &p->items);
}

static void collect(const axis *x, planned *slot, planned *shared) {
  for (int callable = x->stage->first; callable < x->stage->end; callable++) {
    const rfi_callable *c = &x->g->callable[callable];
    const rfr_trace *t = c->trace;
    for (rfr_value v = 0; v < t->n_values; v++) {
      const rfi_storage *place = &c->place[v];
      const rfi_life *life = &x->life[callable - x->stage->first][v];
      if (t->values[v].base != v || place->callable >= 0 || life->first < 0) continue;
      if (place->kind != RFI_STORAGE_SLOT && place->kind != RFI_STORAGE_SHARED) continue;
      add_buffer(place->kind == RFI_STORAGE_SLOT ? slot : shared, rfi_storage_bytes(&t->values[v].type), life->first,
                 life->last, (item){callable, v, false});
    }
    for (int i = 0; i < c->n_bound; i++) {
      const int op = c->bound[i].op, tick = tick_of(x, callable, part_at(c, op), op);
      if (c->bound[i].workspace > 0)
        add_buffer(shared, rfi_align(c->bound[i].workspace), tick, tick, (item){callable, i, true});
    }
  }
}

static void keep_offsets(rfr_graphs *g, const planned *p) {
  for (int i = 0; i < p->plan.n; i++) {
    const item *what = &p->items[p->plan.buffer[i].value];
    rfi_callable *c = &g->callable[what->callable];
    if (what->workspace) c->workspace_at[what->index] = p->plan.buffer[i].offset;
    else c->place[what->index].offset = p->plan.buffer[i].offset;
  }
}

static rfr_status plan_collected(axis *x, rfi_stage_plan *s, bool single_slot, planned *slot, planned *shared,
                                 int64_t *shared_bound) {
  rfr_graphs *g = x->g;
  for (int c = s->first; c < s->end; c++) {
    touch_ops(x, c);
    touch_ports(x, c);
  }
  collect(x, slot, single_slot ? slot : shared);
  RFI_TRY(rfi_plan_place(&slot->plan, x->end));
  RFI_TRY(rfi_plan_place(&shared->plan, x->end));
  keep_offsets(g, slot);
  keep_offsets(g, shared);
  s->bytes = slot->plan.bytes;
  g->memory.slot_bytes += s->bytes * s->slots;
  g->memory.lower_bound_bytes += slot->plan.lower_bound * s->slots;
  if (shared->plan.bytes > g->memory.shared_bytes) g->memory.shared_bytes = shared->plan.bytes;
  if (shared->plan.lower_bound > *shared_bound) *shared_bound = shared->plan.lower_bound;
  return RFR_OK;
}

static rfr_status plan_stage(rfr_graphs *g, rfi_stage_plan *s, bool single_slot, int64_t *shared_bound) {
  rfr_ctx *ctx = g->m.ctx;
  axis x = {.g = g, .stage = s};
  planned slot = {{0}}, shared = {{0}};
  const int n = s->end - s->first;
  int values = 0;
  rfr_status st;
  st = RFI_ALLOC(ctx, sizeof *x.at * (size_t)n, &x.at);
  if (st == RFR_OK) st = RFI_ALLOC(ctx, sizeof *x.late_w * (size_t)n, &x.late_w);
  if (st == RFR_OK) st = RFI_ALLOC(ctx, sizeof *x.life * (size_t)n, &x.life);
  for (int c = 0; c < n && st == RFR_OK; c++) {
    const rfr_trace *t = g->callable[s->first + c].trace;
    st = RFI_ALLOC(ctx, sizeof **x.life * (size_t)(t->n_values + 1), &x.life[c]);
    for (rfr_value v = 0; v < t->n_values && st == RFR_OK; v++) x.life[c][v] = (rfi_life){-1, -1, false};
    values += t->n_values + t->n_ops;
  }
  if (st == RFR_OK) st = room(ctx, values, &slot);
  if (st == RFR_OK) st = room(ctx, values, &shared);
  if (st == RFR_OK) {
    lay_axis(&x);
    st = plan_collected(&x, s, single_slot, &slot, &shared, shared_bound);
  }
  for (int c = 0; c < n && x.life; c++) rfi_free(ctx, x.life[c]);
  rfi_free(ctx, x.life);
  rfi_free(ctx, x.late_w);
  rfi_free(ctx, x.at);
  rfi_plan_deinit(&slot.plan);
  rfi_plan_deinit(&shared.plan);
  rfi_free(ctx, slot.items);
  rfi_free(ctx, shared.items);
  return st;
}

/* With one slot in all, parts run in the order of the axis: values that live within a part are planned with the rest.
 */
static void merge_shared_into_slot(rfr_graphs *g) {
  for (int i = 0; i < g->n; i++)
    for (rfr_value v = 0; v < g->callable[i].trace->n_values; v++)
      if (g->callable[i].place[v].kind == RFI_STORAGE_SHARED) g->callable[i].place[v].kind = RFI_STORAGE_SLOT;
}

/* ---- the arena ---- */

static void place_persistent(rfr_graphs *g) {
  int64_t *at = &g->memory.persistent_bytes;
  for (int i = 0; i < g->n_named; i++) {
    rfi_named *x = &g->named[i];
    if (x->tensor.data || x->window) continue;
    x->offset = *at;
    *at += rfi_storage_bytes(&x->tensor.type);
  }
  g->counts.skip_at = *at;
  if (rfi_graphs_counted(g) > 0) *at += rfi_align(sizeof(int32_t));
  for (int i = 0; i < g->n; i++) {
    rfi_callable *c = &g->callable[i];
    for (rfr_value v = 0; v < c->trace->n_values; v++) {
      if (c->place[v].kind != RFI_STORAGE_PERSISTENT) continue;
      c->place[v].offset = *at;
      *at += rfi_storage_bytes(&c->trace->values[v].type);
    }
  }
}

static int64_t scratch_end(const rfi_named *x) { return x->scratch + rfi_storage_bytes(&x->tensor.type); }

/* Scratch main gradients are used only while a callable's W and its post_wgrad hooks run, so all callables share the
 * same bytes. One that two callables have in common keeps the offset from the first. */
static int64_t place_scratch_gradients(rfr_graphs *g) {
  int64_t most = 0;
  for (int i = 0; i < g->n_named; i++) g->named[i].scratch = -1;
  for (int c = 0; c < g->n; c++) {
    int64_t end = 0;
    for (int add = 0; add < 2; add++)
      for (int i = 0; i < g->callable[c].n_gradients; i++) {
        rfi_named *x = &g->named[g->callable[c].gradients[i]];
        if (add && x->scratch < 0) x->scratch = end;
        if (x->scratch >= 0 && scratch_end(x) > end) end = scratch_end(x);
      }
    if (end > most) most = end;
  }
  return most;
}

/* Scratch memory takes the writes of warm-up: main gradients, written states, and ports with fixed memory. */
static void place_scratch(rfr_graphs *g) {
  int64_t *at = &g->memory.scratch_bytes;
  if (g->options.warmup_iterations == 0) return;
  *at = place_scratch_gradients(g);
  for (int i = 0; i < g->n_named; i++) {
    rfi_named *x = &g->named[i];
    if (!x->written || x->parameter >= 0) continue;
    x->scratch = *at;
    *at += rfi_storage_bytes(&x->tensor.type);
  }
  for (int i = 0; i < g->n; i++) {
    rfi_callable *c = &g->callable[i];
    for (rfr_value v = 0; v < c->trace->n_values; v++) {
      if (c->place[v].kind != RFI_STORAGE_FIXED) continue;
      c->place[v].offset = *at;
      *at += rfi_storage_bytes(&c->trace->values[v].type);
    }
  }
}

static void place_regions(rfr_graphs *g) {
  rfr_graphs_memory *m = &g->memory;
  int64_t at = m->persistent_bytes;
  for (int i = 0; i < g->n_stages; i++) {
    g->stage[i].offset = at;
    at += g->stage[i].bytes * g->stage[i].slots;
    m->slots += g->stage[i].slots * (g->stage[i].end > g->stage[i].first);
  }
  g->shared_at = at;
  g->window_at = at + m->shared_bytes;
  g->scratch_at = g->window_at + m->window_bytes;
  m->planned_bytes = g->scratch_at + m->scratch_bytes;
}

rfr_status rfi_graphs_allocate(rfr_graphs *g) {
  const rfr_graphs_memory *m = &g->memory;
  const rfi_backend *b = g->m.backend;
  if (g->options.budget > 0 && m->planned_bytes > g->options.budget)
    return rfi_fail(
        RFI_E_PLAN_OVER_BUDGET,
        "the plan needs %lld bytes, %s (%lld persistent, %lld in %d slots, %lld shared, %lld gathered), the "
        "budget is %lld",
        (long long)m->planned_bytes,
        g->inference                                 ? "which recompute cannot lower in inference"
        : g->options.recompute == RFR_RECOMPUTE_AUTO ? "the smallest budget that works, with all "
                                                       "recomputed that lowers them"
        : g->options.recompute == RFR_RECOMPUTE_ALL
            ? "with all recomputed that lowers them"
            : "without recompute: rfr_graphs_options.recompute auto may need less",
        (long long)m->persistent_bytes, (long long)m->slot_bytes, m->slots, (long long)m->shared_bytes,
        (long long)m->window_bytes, (long long)g->options.budget);
  const size_t bytes = (size_t)(m->planned_bytes + b->guard);
  RFI_TRY(b->alloc(g->m.device, RFI_MEMORY_ARENA, bytes, (void **)&g->arena));
  RFI_TRY(b->fill(g->m.device, g->arena, 0, bytes));
  for (int i = 0; i < g->n_named; i++)
    if (g->named[i].offset >= 0)
      g->named[i].tensor.data = g->arena + (g->named[i].window ? g->window_at : 0) + g->named[i].offset;
  return RFR_OK;
}

rfr_status rfi_graphs_place(rfr_graphs *g) {
  int slots = 0;
  g->memory = (rfr_graphs_memory){0};
  RFI_TRY(check_names(g));
  RFI_TRY(check_states(g));
  for (int i = 0; i < g->n; i++)
    for (int k = 0; k < g->callable[i].n_out; k++) RFI_TRY(check_output(g, &g->callable[i], &g->callable[i].out[k]));
  for (int i = 0; i < g->n; i++) {
    rfi_callable *c = &g->callable[i];
    RFI_TRY(assign_storage(g, c));
    c->workspace_at = rfi_arena_alloc(g->layout, sizeof *c->workspace_at * (size_t)(c->n_bound + 1));
    if (!c->workspace_at) return RFR_NO_MEMORY;
  }
  bool single_slot = true;
  for (int i = 0; i < g->n_stages; i++) {
    slots += g->stage[i].slots;
    single_slot = single_slot && !g->stage[i].delayed && !rfi_graphs_has_windows(g, &g->stage[i]);
  }
  single_slot = single_slot && slots == 1;
  int64_t shared_bound = 0;
  for (int i = 0; i < g->n_stages; i++) RFI_TRY(plan_stage(g, &g->stage[i], single_slot, &shared_bound));
  g->memory.lower_bound_bytes += shared_bound;
  g->single_slot = single_slot;
  if (single_slot) merge_shared_into_slot(g);
  RFI_TRY(rfi_graphs_place_windows(g));
  place_persistent(g);
  place_scratch(g);
  place_regions(g);
  return RFR_OK;
}

/* ---- addresses ---- */

unsigned char *rfi_graphs_named_data(const rfr_graphs *g, const rfi_named *x) {
  return g->in_warmup && x->written ? g->arena + g->scratch_at + x->scratch : x->tensor.data;
}

static unsigned char *address_of_owner(const rfr_graphs *g, int callable, int slot, rfr_value owner) {
  const rfi_callable *c = &g->callable[callable];
  const rfi_storage *place = &c->place[owner];
  const rfi_stage_plan *s = &g->stage[c->stage];
  if (place->callable >= 0) return address_of_owner(g, place->callable, slot, place->owner) + place->offset;
  switch (place->kind) {
    case RFI_STORAGE_NAMED: return rfi_graphs_named_data(g, &g->named[place->offset]);
    case RFI_STORAGE_FIXED: return g->in_warmup ? g->arena + g->scratch_at + place->offset : place->fixed[slot];
    case RFI_STORAGE_PERSISTENT: return g->arena + place->offset;
    case RFI_STORAGE_WINDOW: return g->arena + g->window_at + place->offset;
    case RFI_STORAGE_SLOT: return g->arena + s->offset + slot * s->bytes + place->offset;
    default: return g->arena + g->shared_at + place->offset;
  }
}

unsigned char *rfi_graphs_address(const rfr_graphs *g, int callable, int slot, rfr_value v) {
  const rfi_value *x = &g->callable[callable].trace->values[v];
  return address_of_owner(g, callable, slot, x->base) + bytes_into(x);
}

typedef struct bound_to {
  const rfr_graphs *g;
  int callable, slot;
} bound_to;

static unsigned char *address(const void *user, rfr_value owner) {
  const bound_to *x = user;
  return address_of_owner(x->g, x->callable, x->slot, owner);
}

void rfi_graphs_set_addresses(rfr_graphs *g, int callable, int slot) {
  const rfi_callable *c = &g->callable[callable];
  const rfi_stage_plan *s = &g->stage[c->stage];
  rfi_bound *bound = c->instance[slot].bound;
  unsigned char *shared = g->single_slot ? g->arena + s->offset + slot * s->bytes : g->arena + g->shared_at;
  rfi_set_op_addresses(c->trace, bound, c->n_bound, address, &(bound_to){g, callable, slot});
  for (int i = 0; i < c->n_bound; i++)
    if (bound[i].workspace > 0) bound[i].call.workspace = shared + c->workspace_at[i];
}

void rfi_graphs_set_all_addresses(rfr_graphs *g) {
  for (int c = 0; c < g->n; c++)
    for (int slot = 0; slot < g->stage[g->callable[c].stage].slots; slot++) rfi_graphs_set_addresses(g, c, slot);
  rfi_graphs_counts_address(g);
}
