/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of graphed callables. Names first: parameters, states, constants and main gradients, one place each. Then
 * what a microbatch leaves from one part to another, on a stage's axis of time:
 *
 *   load, setup | F of the first callable ... F of the last | I W of the last ... I W of the first [| W again] | end
 *
 * with one tick per op and one before each part for what is copied in. Where some W comes by itself, all of them may
 * come after all I: then W stands on the axis twice, so that a value which W reads lives until either. What the
 * caller is given lives to the end. Lifetimes become offsets by the planner that a program's are planned by. What has
 * fixed memory is the caller's, and has a place in the scratch memory while warm-up runs.
 */
#include <string.h>

#include "base/base.h"
#include "exec/graphs/graphed.h"

/* ---- what the caller gives ---- */

bool rfi_graphs_is_type(const rfr_type *want, const rfr_type *given, char text[RFI_GIVEN_TEXT]) {
  char ours[RFI_TYPE_TEXT], theirs[RFI_TYPE_TEXT] = "no type";
  const size_t shape = sizeof *want->shape * (size_t)want->rank; /* what is behind it is the caller's to leave */
  if (given->dtype == want->dtype && given->rank == want->rank && memcmp(given->shape, want->shape, shape) == 0)
    return true;
  if ((unsigned)given->dtype < RFR_DTYPE_COUNT && given->rank >= 0 && given->rank <= RFR_MAX_RANK)
    rfi_type_text(theirs, given);
  rfi_snprintf(text, RFI_GIVEN_TEXT, "it is %s, %s is given", rfi_type_text(ours, want), theirs);
  return false;
}

const char *rfi_graphs_place_lacks(const rfr_graphs *g, const void *data) {
  enum { ALIGNMENT = 16 }; /* what kernels are chosen for */
  return !data                                       ? "no data is given"
         : (uintptr_t)data % ALIGNMENT               ? "it is not at a multiple of 16 bytes"
         : !g->m.backend->reaches(g->m.device, data) ? "it is not memory of the device"
                                                     : NULL;
}

/* ---- names ---- */

static rfi_named *find_named(const rfr_graphs *g, const char *name) {
  const int i = rfi_names_find(&g->names, name);
  return i < 0 ? NULL : &g->named[i];
}

/* The caller's memory for a name; NULL: ours. */
static rfr_status callers_memory(const rfr_graphs *g, const char *name, const rfr_type *type, void **data) {
  const rfr_graphs_options *o = &g->options;
  char other[RFI_GIVEN_TEXT];
  *data = NULL;
  for (int i = 0; i < o->n_tensors; i++) {
    const rfr_binding *b = &o->tensors[i];
    if (!b->name || strcmp(b->name, name) != 0) continue;
    if (!rfi_graphs_is_type(type, &b->type, other))
      return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" of rfr_graphs_options.tensors: %s", name, other);
    if (*data) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" is given twice in rfr_graphs_options.tensors", name);
    const char *lacks = rfi_graphs_place_lacks(g, b->data);
    if (lacks) return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" of rfr_graphs_options.tensors: %s", name, lacks);
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

rfr_status rfi_graphs_check_view(const rfr_main_gradient *m, const rfr_type *type) {
  char shape[128], strides[128];
  int64_t dense = 1;
  bool flat = true;
  for (int d = type->rank - 1; m->strides && d >= 0; d--) {
    flat = flat && (type->shape[d] == 1 || m->strides[d] == dense);
    dense *= type->shape[d];
  }
  if (flat || dense == 0) return RFR_OK;
  return rfi_fail(RFI_E_PROGRAM_STATE,
                  "the main gradient of \"%s\", shape [%s], is a view with strides [%s], which cannot be seen as flat "
                  "memory: give dense memory, or let it be ours and copy it",
                  m->parameter, list_of(type->shape, type->rank, shape), list_of(m->strides, type->rank, strides));
}

static rfr_status add_name(rfr_graphs *g, const rfi_callable *c, const rfi_value *x) {
  const size_t n = strlen(RFI_GRAD_PREFIX);
  rfi_named *have = find_named(g, x->name);
  void *data = NULL;
  if (have && c->sharded && (x->role == RFR_ROLE_TRAINABLE || x->role == RFR_ROLE_FROZEN))
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": \"%s\" is another callable's too: one that is sharded shares no parameter",
                    c->name, x->name);
  if (have) {
    if (memcmp(&have->tensor.type, &x->type, sizeof x->type) != 0 || have->tensor.role != (rfr_role)x->role)
      return rfi_fail(RFI_E_PROGRAM_STATE, "\"%s\" has another type or role in callable \"%s\" than before", x->name,
                      c->name);
    return RFR_OK;
  }
  if (!rfi_arena_grow(g->m.strings, (void **)&g->named, &g->cap_named, g->n_named + 1, sizeof *g->named))
    return RFR_NO_MEMORY;
  const char *name = rfi_arena_strdup(g->m.strings, x->name);
  if (!name || !rfi_names_add(&g->names, g->m.strings, name, g->n_named)) return RFR_NO_MEMORY;
  const int parameter = strncmp(name, RFI_GRAD_PREFIX, n) == 0 ? rfi_names_find(&g->names, name + n) : -1;
  rfi_named *own = &g->named[g->n_named];
  const bool window = strncmp(name, RFI_WHOLE_PREFIX, strlen(RFI_WHOLE_PREFIX)) == 0, ours = window || parameter >= 0;
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
    bool given = false;
    for (int i = 0; i < g->options.n_gradients; i++) {
      const rfr_main_gradient *m = &g->options.gradients[i];
      if (!m->parameter || strcmp(m->parameter, name + n) != 0) continue;
      if (given) return rfi_fail(RFI_E_PROGRAM_STATE, "the main gradient of \"%s\" is given twice", name + n);
      given = true;
      const char *lacks = m->data ? rfi_graphs_place_lacks(g, m->data) : NULL;
      if (lacks) return rfi_fail(RFI_E_PROGRAM_STATE, "the main gradient of \"%s\": %s", name + n, lacks);
      RFI_TRY(rfi_graphs_check_view(m, &x->type));
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

/* One main gradient is for one stage: those of several would have to be added up in stage order. */
static rfr_status check_tied(const rfr_graphs *g, const rfi_callable *c, const char *name) {
  for (const rfi_callable *o = g->callable; o < c; o++) {
    if (o->stage == c->stage) continue;
    for (int i = 0; i < o->n_gradients; i++)
      if (strcmp(g->named[o->gradients[i]].tensor.name, name) == 0)
        return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                        "callable \"%s\": \"%s\" is trained in callable \"%s\" too, which is of "
                        "another stage: give each stage a parameter of its own",
                        c->name, name + strlen(RFI_GRAD_PREFIX), o->name);
  }
  return RFR_OK;
}

rfr_status rfi_graphs_names(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->trace;
  c->gradients = rfi_arena_alloc(g->m.strings, sizeof *c->gradients * (size_t)(t->n_inputs + 1));
  c->wholes = rfi_arena_alloc(g->m.strings, sizeof *c->wholes * (size_t)(t->n_inputs + 1));
  if (!c->gradients || !c->wholes) return RFR_NO_MEMORY;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    if (!is_shared(x->role)) continue;
    RFI_TRY(add_name(g, c, x));
    const int id = rfi_names_find(&g->names, x->name);
    if (g->named[id].window) c->wholes[c->n_wholes++] = id;
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

/* The state whose bytes a value is, of those that outlive a step and are no main gradient; NULL. */
static rfi_named *state_of(const rfr_graphs *g, const rfr_trace *t, rfr_value v) {
  const rfi_value *owner = v < 0 ? NULL : &t->values[t->values[v].base];
  rfi_named *x = owner && owner->op < 0 && is_shared(owner->role) ? find_named(g, owner->name) : NULL;
  return x && x->parameter < 0 ? x : NULL;
}

/* Parts that follow each other, microbatch by microbatch, may share a state that one of them writes: the same part of
 * the callables of a stage. Between others the schedule would decide what is read. */
static rfr_status check_access(const rfr_graphs *g, int callable, rfi_part part, const rfi_named *x) {
  const rfi_callable *c = &g->callable[callable];
  if (!x || x->writer < 0) return RFR_OK;
  const rfi_callable *writer = &g->callable[x->writer];
  if (c->stage == writer->stage && part == x->writer_part) return RFR_OK;
  return rfi_fail(
      RFI_E_GRAPHS_CALLABLE,
      "callable \"%s\": callable \"%s\" writes state \"%s\", which is used here in another %s: microbatches in "
      "flight would see each other's",
      c->name, writer->name, x->tensor.name, c->stage == writer->stage ? "part" : "stage");
}

static rfr_status check_states(rfr_graphs *g) {
  for (int write = 1; write >= 0; write--) /* all writers are known before readers are looked at */
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

/* What the caller is given is the microbatch's own: not a state's bytes, which other microbatches write too, unless the
 * name says that it is the state; nor a gathered parameter's, where the next callable's are. */
static rfr_status check_output(const rfr_graphs *g, const rfi_callable *c, const rfi_port *p) {
  const rfr_trace *t = c->trace;
  const rfi_named *state = state_of(g, t, p->value);
  const int maker = p->value < 0 ? -1 : t->values[t->values[p->value].base].op;
  if (state && state->written && (p->callable >= 0 || strcmp(p->name, state->tensor.name) != 0))
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" is the memory of state \"%s\", which microbatches write one after "
                    "another: output rfr_copy of it%s",
                    c->name, p->name, state->tensor.name, p->callable >= 0 ? ", and link that" : "");
  if (c->sharded && maker >= c->start[RFI_PART_SETUP] && maker < c->start[RFI_PART_SETUP + 1])
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": output \"%s\" is a parameter of a sharded callable, or a part of one, which is "
                    "whole only while it is gathered: output rfr_copy of it",
                    c->name, p->name);
  return RFR_OK;
}

/* Those of the options that no callable knows are mistakes. */
static rfr_status check_names(const rfr_graphs *g) {
  const rfr_graphs_options *o = &g->options;
  for (int i = 0; i < o->n_tensors; i++) {
    const rfi_named *x = o->tensors[i].name ? find_named(g, o->tensors[i].name) : NULL;
    if (!x || x->parameter >= 0 || x->window)
      return rfi_fail(RFI_E_PROGRAM_NAME, "rfr_graphs_options.tensors: no callable has \"%s\"%s",
                      o->tensors[i].name ? o->tensors[i].name : "",
                      x ? ": memory for a main gradient is given in rfr_graphs_options.gradients" : "");
  }
  for (int i = 0; i < o->n_gradients; i++) {
    const rfi_named *p = o->gradients[i].parameter ? find_named(g, o->gradients[i].parameter) : NULL;
    if (!p || p->gradient < 0)
      return rfi_fail(RFI_E_PROGRAM_NAME, "rfr_graphs_options.gradients: no callable trains \"%s\"",
                      o->gradients[i].parameter ? o->gradients[i].parameter : "");
  }
  return RFR_OK;
}

/* ---- homes ---- */

typedef struct item { /* what is planned: a value, or the workspace of a bound op */
  int callable, index;
  bool workspace;
} item;

typedef struct axis {
  rfr_graphs *g;
  const rfi_stage_plan *stage;
  int (*at)[RFI_PARTS]; /* per callable of the stage: the tick before each part */
  int *again;           /* that of W once more; -1 */
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

static rfr_status homes_of_made(const rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->trace;
  uint8_t *parts; /* per value: which parts touch it, a bit each */
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
  for (int i = 0; i < t->n_outputs; i++) parts[t->values[t->outputs[i].value].base] |= 0x80; /* lives on */
  for (rfr_value v = 0; v < t->n_values; v++) {
    if (t->values[v].base != v || t->values[v].op < 0 || parts[v] == 0) continue;
    const bool early = parts[v] & (1 << RFI_PART_LOAD | 1 << RFI_PART_SETUP), alone = (parts[v] & (parts[v] - 1)) == 0;
    const bool gathered = c->sharded && parts[v] & 1 << RFI_PART_SETUP;
    c->place[v].home = gathered ? RFI_STORAGE_WINDOW
                       : alone  ? RFI_STORAGE_SHARED
                       : early  ? RFI_STORAGE_PERSISTENT
                                : RFI_STORAGE_SLOT;
  }
  rfi_free(g->m.ctx, parts);
  return RFR_OK;
}

static int64_t bytes_into(const rfi_value *x) { return x->offset * rfr_dtype_bits(x->type.dtype) / 8; }

/* The bytes of `v` are those of value `of` of another callable. */
static void link_place(rfr_graphs *g, rfi_callable *c, rfr_value v, int callable, rfr_value of) {
  const rfi_value *x = &g->callable[callable].trace->values[of];
  c->place[v] =
      (rfi_storage){.home = RFI_STORAGE_SLOT, .offset = bytes_into(x), .callable = callable, .owner = x->base};
}

/* Value `v` lies in the caller's memory: one that has bytes to itself, is given or made as its port says, and anew by
 * each microbatch. */
static rfr_status fix_place(rfi_callable *c, const rfi_port *p, bool made, rfr_value v, void *const *fixed) {
  if (!fixed) return RFR_OK;
  const rfi_value *x = &c->trace->values[v], *owner = &c->trace->values[x->base];
  rfi_storage *place = &c->place[x->base];
  if ((place->home == RFI_STORAGE_SLOT || place->home == RFI_STORAGE_SHARED) && place->callable < 0 &&
      (owner->op >= 0) == made && x->offset == 0 && rfi_bytes(&x->type) == rfi_bytes(&owner->type)) {
    place->home = RFI_STORAGE_FIXED;
    place->fixed = fixed;
    return RFR_OK;
  }
  return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                  "callable \"%s\": fixed memory for %s\"%s\", which is an input, a part of another value, or the same "
                  "in each step: take it from where the call says that it is",
                  c->name, fixed == p->fixed_grad ? "the gradient of " : "", p->name);
}

static rfr_status fix_places(rfi_callable *c) {
  for (int i = 0; i < c->n_in; i++) {
    RFI_TRY(fix_place(c, &c->in[i], false, c->in[i].value, c->in[i].fixed));
    RFI_TRY(fix_place(c, &c->in[i], true, c->in[i].grad, c->in[i].fixed_grad));
  }
  for (int k = 0; k < c->n_out; k++) {
    RFI_TRY(fix_place(c, &c->out[k], false, c->out[k].grad, c->out[k].fixed_grad));
    RFI_TRY(fix_place(c, &c->out[k], true, c->out[k].value, c->out[k].fixed));
  }
  return RFR_OK;
}

static rfr_status homes(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->trace;
  if (!(c->place = rfi_arena_alloc(g->layout, sizeof *c->place * (size_t)(t->n_values + 1)))) return RFR_NO_MEMORY;
  for (rfr_value v = 0; v < t->n_values; v++) c->place[v].callable = -1;
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    const int name = is_shared(x->role) ? rfi_names_find(&g->names, x->name) : -1;
    c->place[t->inputs[i]].home = name >= 0 ? RFI_STORAGE_NAMED : RFI_STORAGE_SLOT;
    c->place[t->inputs[i]].offset = name;
  }
  RFI_TRY(homes_of_made(g, c));
  for (int i = 0; i < c->n_in; i++)
    if (c->in[i].callable >= 0)
      link_place(g, c, c->in[i].value, c->in[i].callable, g->callable[c->in[i].callable].out[c->in[i].port].value);
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k].callable >= 0 && c->out[k].grad >= 0)
      link_place(g, c, c->out[k].grad, c->out[k].callable, g->callable[c->out[k].callable].in[c->out[k].port].grad);
  return fix_places(c);
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
    x->again[c - s->first] = s->delayed ? at : -1;
    if (s->delayed) at += 1 + callable->start[RFI_PART_W + 1] - callable->start[RFI_PART_W];
  }
  x->end = at;
}

static void touch_ops(const axis *x, int callable) {
  const rfi_callable *c = &x->g->callable[callable];
  const rfr_trace *t = c->trace;
  const int again = x->again[callable - x->stage->first];
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
      if (part == RFI_PART_W && again >= 0 && c->place[owner].home != RFI_STORAGE_SHARED)
        touch(x, callable, owner, again + 1 + i - c->start[part]);
    }
  }
}

/* What comes from outside is there before its part; what goes outside stays. */
static void touch_ports(const axis *x, int callable) {
  const rfi_callable *c = &x->g->callable[callable];
  const rfi_value *values = c->trace->values;
  const int *at = x->at[callable - x->stage->first];
  if (c->microbatch >= 0) { /* nothing else has its bytes: what they say is known without a look */
    touch(x, callable, c->microbatch, 0);
    touch(x, callable, c->microbatch, x->end);
  }
  for (int k = 0; k < c->n_checked; k++) /* copied behind F */
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
      if (place->home != RFI_STORAGE_SLOT && place->home != RFI_STORAGE_SHARED) continue;
      add_buffer(place->home == RFI_STORAGE_SLOT ? slot : shared, rfi_storage_bytes(&t->values[v].type), life->first,
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

static rfr_status plan_collected(axis *x, rfi_stage_plan *s, bool joint, planned *slot, planned *shared,
                                 int64_t *shared_bound) {
  rfr_graphs *g = x->g;
  for (int c = s->first; c < s->end; c++) {
    touch_ops(x, c);
    touch_ports(x, c);
  }
  collect(x, slot, joint ? slot : shared);
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

static rfr_status plan_stage(rfr_graphs *g, rfi_stage_plan *s, bool joint, int64_t *shared_bound) {
  rfr_ctx *ctx = g->m.ctx;
  axis x = {.g = g, .stage = s};
  planned slot = {{0}}, shared = {{0}};
  const int n = s->end - s->first;
  int values = 0;
  rfr_status st;
  st = RFI_ALLOC(ctx, sizeof *x.at * (size_t)n, &x.at);
  if (st == RFR_OK) st = RFI_ALLOC(ctx, sizeof *x.again * (size_t)n, &x.again);
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
    st = plan_collected(&x, s, joint, &slot, &shared, shared_bound);
  }
  for (int c = 0; c < n && x.life; c++) rfi_free(ctx, x.life[c]);
  rfi_free(ctx, x.life);
  rfi_free(ctx, x.again);
  rfi_free(ctx, x.at);
  rfi_plan_deinit(&slot.plan);
  rfi_plan_deinit(&shared.plan);
  rfi_free(ctx, slot.items);
  rfi_free(ctx, shared.items);
  return st;
}

/* With one slot in all, whose parts come in the order of the axis, what lives within a part fits between the rest. */
static void share_slot(rfr_graphs *g) {
  for (int i = 0; i < g->n; i++)
    for (rfr_value v = 0; v < g->callable[i].trace->n_values; v++)
      if (g->callable[i].place[v].home == RFI_STORAGE_SHARED) g->callable[i].place[v].home = RFI_STORAGE_SLOT;
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
      if (c->place[v].home != RFI_STORAGE_PERSISTENT) continue;
      c->place[v].offset = *at;
      *at += rfi_storage_bytes(&c->trace->values[v].type);
    }
  }
}

static int64_t scratch_end(const rfi_named *x) { return x->scratch + rfi_storage_bytes(&x->tensor.type); }

/* Main gradients of a callable lie side by side, those of callables in the same bytes: they are wanted while its W and
 * the hooks behind it run. One that callables share is where the first of them has it. */
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

/* What warm-up writes in place of what outlives it. A state is read too, as what it is; and so is what lies in the
 * caller's memory. */
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
      if (c->place[v].home != RFI_STORAGE_FIXED) continue;
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
        g->inference                                 ? "which nothing recomputed would lower"
        : g->options.recompute == RFR_RECOMPUTE_AUTO ? "the smallest budget that works, with all "
                                                       "recomputed that lowers them"
        : g->options.recompute == RFR_RECOMPUTE_ALL  ? "with all recomputed that lowers them"
                                                     : "with nothing recomputed: recompute auto may need less",
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
    RFI_TRY(homes(g, c));
    c->workspace_at = rfi_arena_alloc(g->layout, sizeof *c->workspace_at * (size_t)(c->n_bound + 1));
    if (!c->workspace_at) return RFR_NO_MEMORY;
  }
  bool joint = true;
  for (int i = 0; i < g->n_stages; i++) {
    slots += g->stage[i].slots;
    joint = joint && !g->stage[i].delayed && !rfi_graphs_has_windows(g, &g->stage[i]);
  }
  joint = joint && slots == 1;
  int64_t shared_bound = 0;
  for (int i = 0; i < g->n_stages; i++) RFI_TRY(plan_stage(g, &g->stage[i], joint, &shared_bound));
  g->memory.lower_bound_bytes += shared_bound;
  g->joint = joint;
  if (joint) share_slot(g);
  RFI_TRY(rfi_graphs_place_windows(g));
  place_persistent(g);
  place_scratch(g);
  place_regions(g);
  return RFR_OK;
}

/* ---- addresses ---- */

unsigned char *rfi_graphs_named_data(const rfr_graphs *g, const rfi_named *x) {
  return g->warm && x->written ? g->arena + g->scratch_at + x->scratch : x->tensor.data;
}

static unsigned char *address_of_owner(const rfr_graphs *g, int callable, int slot, rfr_value owner) {
  const rfi_callable *c = &g->callable[callable];
  const rfi_storage *place = &c->place[owner];
  const rfi_stage_plan *s = &g->stage[c->stage];
  if (place->callable >= 0) return address_of_owner(g, place->callable, slot, place->owner) + place->offset;
  switch (place->home) {
    case RFI_STORAGE_NAMED: return rfi_graphs_named_data(g, &g->named[place->offset]);
    case RFI_STORAGE_FIXED: return g->warm ? g->arena + g->scratch_at + place->offset : place->fixed[slot];
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
  unsigned char *shared = g->joint ? g->arena + s->offset + slot * s->bytes : g->arena + g->shared_at;
  rfi_set_op_addresses(c->trace, bound, c->n_bound, address, &(bound_to){g, callable, slot});
  for (int i = 0; i < c->n_bound; i++)
    if (bound[i].workspace > 0) bound[i].call.workspace = shared + c->workspace_at[i];
}

void rfi_graphs_set_all_addresses(rfr_graphs *g) {
  for (int c = 0; c < g->n; c++)
    for (int slot = 0; slot < g->stage[g->callable[c].stage].slots; slot++) rfi_graphs_set_addresses(g, c, slot);
}
