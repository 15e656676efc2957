/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of graphed callables. Names have one address each (graph_names.c). Values that live from one part of a
 * microbatch to another are planned on a time axis of their stage:
 *
 *   load, setup | F of the first callable ... F of the last | I W of the last ... I W of the first [| W again] | end
 *
 * with one tick per op, and one before each part for copied inputs. With separate W actions, all W may come after all
 * I. Then W is on the axis twice: a value that W reads is live until the second W, and a value that is dead before the
 * second W may be in a block that slots share. Results returned to the caller are live to the end. The offsets come
 * from the planner that plans programs. Fixed ports use the caller's memory, and scratch memory during warm-up.
 *
 * The W's that may run on the side stream (graph_side_stream.c) share a separate scratch area, after the shared bytes
 * of all other parts. If such a W is not on the axis a second time, the values that it reads live until the I of the
 * next callable in backward order has run.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "exec/step_memory.h"

/* ---- storage ---- */

typedef struct item { /* a value, or the workspace of a bound op */
  rfi_exec_unit *u;
  int index;
  bool workspace;
} item;

typedef struct timed { /* a callable on the axis */
  int at[RFI_PARTS];   /* the time before each part */
  int late_w;          /* the time before the second W; -1: none */
  rfi_life *life;      /* per value */
} timed;

typedef struct axis {
  rfr_graphs *g;
  const rfi_stage_plan *stage;
  timed *timed;  /* per callable of the stage */
  int late, end; /* the time before all second W; the end of time */
} axis;

static timed *timed_of(const axis *x, const rfi_exec_unit *u) { return &x->timed[u->index - x->stage->first]; }

static void touch(const axis *x, const rfi_exec_unit *u, rfr_value owner, int tick) {
  for (const rfi_location *place = &u->place[owner]; place->unit; place = &u->place[owner]) {
    u = place->unit;
    owner = place->owner;
  }
  rfi_life *life = &timed_of(x, u)->life[owner];
  if (life->first < 0 || tick < life->first) life->first = tick;
  if (tick > life->last) life->last = tick;
}

static rfr_status assign_result_storage(const rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->u.trace;
  uint8_t *parts; /* per value: a bit per part that uses it */
  RFI_TRY(RFI_ALLOC(g->m.ctx, (size_t)t->n_values + 1, &parts));
  for (rfi_use u = {0}; rfi_next_use(c, &u);) parts[u.owner] |= (uint8_t)(1 << u.part);
  for (int i = 0; i < t->n_outputs; i++) parts[t->values[t->outputs[i].value].base] |= 0x80; /* live after all parts */
  for (rfr_value v = 0; v < t->n_values; v++) {
    if (t->values[v].base != v || t->values[v].op < 0 || parts[v] == 0) continue;
    const bool early = parts[v] & (1 << RFI_PART_LOAD | 1 << RFI_PART_SETUP), alone = (parts[v] & (parts[v] - 1)) == 0;
    const bool gathered = c->sharded && parts[v] & 1 << RFI_PART_SETUP;
    c->u.place[v].region = gathered ? RFI_REGION_WINDOW
                           : alone  ? RFI_REGION_SHARED
                           : early  ? RFI_REGION_PERSISTENT
                                    : RFI_REGION_SLOT;
  }
  rfi_free(g->m.ctx, parts);
  return RFR_OK;
}

/* Makes the value that a linked port takes an alias of the value that the other callable returns. */
static void link_storage(const rfr_graphs *g, rfi_callable *c, const rfi_port *p) {
  const rfi_exec_unit *from = p->link ? &g->callable[p->link->callable].u : NULL;
  const rfr_value v = rfi_port_of(p, p->output)->value;
  if (!from || v < 0) return;
  const rfi_value *x = &from->trace->values[rfi_port_of(p->link, p->output)->value];
  c->u.place[v] =
      (rfi_location){.region = RFI_REGION_SLOT, .offset = rfi_bytes_into(x), .unit = from, .owner = x->base};
}

/* Moves a port's data or gradient to the caller's memory. The value must own its storage and differ between
 * microbatches. If the callable returns it, an op must compute it; otherwise it must be an input. */
static rfr_status fix_storage(rfi_callable *c, const rfi_port *p, bool grad) {
  const rfi_port_data *data = rfi_port_of(p, grad);
  const bool computed = p->output != grad;
  if (!data->fixed) return RFR_OK;
  const rfi_value *x = &c->u.trace->values[data->value], *owner = &c->u.trace->values[x->base];
  rfi_location *place = &c->u.place[x->base];
  if ((place->region == RFI_REGION_SLOT || place->region == RFI_REGION_SHARED) && !place->unit &&
      (owner->op >= 0) == computed && x->offset == 0 && rfi_bytes(&x->type) == rfi_bytes(&owner->type)) {
    place->region = RFI_FIXED;
    place->fixed = data->fixed;
    return RFR_OK;
  }
  return rfi_fail(
      RFI_E_GRAPHS_CALLABLE,
      "callable \"%s\": fixed memory for %s\"%s\" is impossible, because it aliases an input or another value, "
      "or does not change between microbatches: use the address that the call returns",
      c->u.name, grad ? "the gradient of " : "", p->name);
}

static rfr_status assign_storage(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->u.trace;
  RFI_TRY(rfi_unit_place(&g->m, &c->u, g->placed, 0));
  for (int i = 0; i < t->n_inputs; i++)
    if (!rfi_is_shared(t->values[t->inputs[i]].role))
      c->u.place[t->inputs[i]].region = t->inputs[i] == c->microbatch ? RFI_REGION_PERSISTENT : RFI_REGION_SLOT;
  RFI_TRY(assign_result_storage(g, c));
  for (const rfi_port *p = c->in; p < rfi_ports_end(c); p++) {
    link_storage(g, c, p);
    RFI_TRY(fix_storage(c, p, false));
    RFI_TRY(fix_storage(c, p, true));
  }
  return RFR_OK;
}

/* ---- the axis ---- */

static int ops_in(const rfi_exec_unit *u, rfi_part part) { return u->start[part + 1] - u->start[part]; }

static int lay_part(axis *x, int callable, rfi_part part, int at) {
  const rfi_exec_unit *u = &x->g->callable[callable].u;
  timed_of(x, u)->at[part] = at;
  return at + 1 + ops_in(u, part);
}

static void lay_axis(axis *x) {
  const rfi_stage_plan *s = x->stage;
  int at = 0;
  for (int part = RFI_PART_LOAD; part <= RFI_PART_F; part++)
    for (int c = s->first; c < s->end; c++) at = lay_part(x, c, (rfi_part)part, at);
  for (int c = s->end - 1; c >= s->first; c--)
    for (int part = RFI_PART_I; part <= RFI_PART_REDUCE; part++) at = lay_part(x, c, (rfi_part)part, at);
  x->late = at;
  for (int c = s->end - 1; c >= s->first; c--) {
    x->timed[c - s->first].late_w = s->separate_wgrad ? at : -1;
    if (s->separate_wgrad) at += 1 + ops_in(&x->g->callable[c].u, RFI_PART_W);
  }
  x->end = at;
}

/* The time until which the values that a W reads must live; 0: only as long as the W runs. */
static int side_stream_end(const axis *x, const rfi_callable *c) {
  const int before = c->u.index - 1;
  if (c->in_order || before < x->stage->first) return 0;
  return x->timed[before - x->stage->first].at[RFI_PART_I] + ops_in(&x->g->callable[before].u, RFI_PART_I);
}

static void touch_ops(const axis *x, const rfi_callable *c) {
  const timed *when = timed_of(x, &c->u);
  const int end = side_stream_end(x, c);
  for (rfi_use u = {0}; rfi_next_use(c, &u);) {
    const int after = 1 + u.op - c->u.start[u.part];
    touch(x, &c->u, u.owner, when->at[u.part] + after);
    if (u.part == RFI_PART_W && when->late_w >= 0 && c->u.place[u.owner].region != RFI_REGION_SHARED)
      touch(x, &c->u, u.owner, when->late_w + after);
    if (u.part == RFI_PART_W && end > 0 && c->u.place[u.owner].region != RFI_REGION_SHARED)
      touch(x, &c->u, u.owner, end);
  }
}

/* Inputs are live before their part; results for the caller are live to the end. */
static void touch_ports(const axis *x, const rfi_callable *c) {
  const rfi_value *values = c->u.trace->values;
  const int *at = timed_of(x, &c->u)->at;
  for (int k = 0; k < c->n_checked; k++) /* read by the copy to the ring after F */
    touch(x, &c->u, values[c->checked[k].bad].base, at[RFI_PART_F] + ops_in(&c->u, RFI_PART_F));
  for (const rfi_port *p = c->in; p < rfi_ports_end(c); p++) {
    const rfr_value taken = rfi_port_of(p, p->output)->value, returned = rfi_port_of(p, !p->output)->value;
    if (taken >= 0) touch(x, &c->u, taken, at[p->output ? RFI_PART_I : RFI_PART_F]);
    if (returned >= 0 && !p->link) touch(x, &c->u, values[returned].base, x->end);
  }
}

/* ---- planning a stage ---- */

/* The plans of a stage: bytes shared by all slots, and those for W's on the side stream; one plan per slot, or one for
 * values that live after I and one for the block. */
enum { SHARED, WGRAD, SLOT, KEPT, BLOCK, PLANS };

typedef struct planned {
  rfi_plan plan;
  item *items;
} planned;

static void add_buffer(planned *p, int64_t bytes, const rfi_life *life, item what) {
  p->items[p->plan.n] = what;
  p->plan.buffer[p->plan.n] = (rfi_buffer){bytes, 0, life->first, life->last, p->plan.n};
  p->plan.n++;
}

/* The plan for the bytes that live within a part. */
static int shared_plan(const rfi_callable *c, int op) {
  return !c->in_order && op >= c->u.start[RFI_PART_W] && op < c->u.start[RFI_PART_W + 1] ? WGRAD : SHARED;
}

static void collect(const axis *x, rfi_callable *c, planned p[PLANS]) {
  const timed *when = timed_of(x, &c->u);
  const rfr_trace *t = c->u.trace;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_location *place = &c->u.place[v];
    const rfi_life *life = &when->life[v];
    const bool in_slot = place->region == RFI_REGION_SLOT;
    const int64_t bytes = rfi_storage_bytes(&t->values[v].type);
    const item value = {&c->u, v, false};
    if (t->values[v].base != v || place->unit || life->first < 0) continue;
    if (!in_slot && place->region != RFI_REGION_SHARED) continue;
    add_buffer(&p[in_slot ? SLOT : shared_plan(c, t->values[v].op)], bytes, life, value);
    if (in_slot && x->stage->blocks > 0) add_buffer(&p[life->last < x->late ? BLOCK : KEPT], bytes, life, value);
  }
  for (int i = 0, part = 0; i < c->u.n_bound; i++) {
    while (i >= c->u.first[part + 1]) part++;
    const int tick = when->at[part] + 1 + c->u.bound[i].op - c->u.start[part];
    if (c->u.bound[i].workspace > 0)
      add_buffer(&p[x->g->m.workspaces == RFI_REGION_SLOT ? SLOT : shared_plan(c, c->u.bound[i].op)],
                 rfi_align(c->u.bound[i].workspace), &(rfi_life){tick, tick, false}, (item){&c->u, i, true});
  }
}

/* `first`: the location of the first byte of the plan. */
static void keep_offsets(const planned *p, rfi_location first) {
  for (int i = 0; i < p->plan.n; i++) {
    const item *what = &p->items[p->plan.buffer[i].value];
    rfi_location at = first;
    at.offset += p->plan.buffer[i].offset;
    if (what->workspace) what->u->workspace_at[what->index] = at.offset;
    else what->u->place[what->index] = at;
  }
}

/* Blocks are used only if they make the stage smaller: two ranges can take more bytes than one. */
static void take_smaller(rfr_graphs *g, rfi_stage_plan *s, const planned p[PLANS]) {
  const rfi_plan *slot = &p[SLOT].plan, *kept = &p[KEPT].plan, *block = &p[BLOCK].plan;
  const int64_t slots = s->slots, blocks = s->blocks;
  const bool split = blocks > 0 && kept->bytes * slots + block->bytes * blocks < slot->bytes * slots;
  s->bytes = split ? kept->bytes : slot->bytes;
  s->block_bytes = split ? block->bytes : 0;
  s->offset = rfi_layout_add(&g->m.layout, RFI_REGION_SLOT, s->bytes * slots + s->block_bytes * blocks);
  keep_offsets(&p[SHARED], (rfi_location){.region = RFI_REGION_SHARED});
  keep_offsets(&p[WGRAD], (rfi_location){.region = RFI_REGION_SHARED});
  keep_offsets(&p[split ? KEPT : SLOT],
               (rfi_location){.region = RFI_REGION_SLOT, .offset = s->offset, .stride = s->bytes});
  if (split)
    keep_offsets(&p[BLOCK],
                 (rfi_location){.region = RFI_BLOCK, .offset = s->offset + s->bytes * slots, .stride = s->block_bytes});
  g->memory.lower_bound_bytes +=
      split ? kept->lower_bound * slots + block->lower_bound * blocks : slot->lower_bound * slots;
}

/* Allocates the lifetimes and buffers of a stage. */
static rfr_status make_room(axis *x, rfi_arena *a, planned p[PLANS]) {
  const rfi_stage_plan *s = x->stage;
  size_t most = 1;
  if (!(x->timed = rfi_arena_alloc(a, sizeof *x->timed * (size_t)(s->end - s->first)))) return RFR_NO_MEMORY;
  for (int c = s->first; c < s->end; c++) {
    const rfr_trace *t = x->g->callable[c].u.trace;
    rfi_life *life = x->timed[c - s->first].life = rfi_arena_alloc(a, sizeof *life * (size_t)(t->n_values + 1));
    if (!life) return RFR_NO_MEMORY;
    for (rfr_value v = 0; v < t->n_values; v++) life[v] = (rfi_life){-1, -1, false};
    most += (size_t)(t->n_values + t->n_ops);
  }
  for (int k = 0; k < PLANS; k++) {
    p[k].plan = (rfi_plan){.ctx = x->g->m.ctx, .buffer = rfi_arena_alloc(a, sizeof *p[k].plan.buffer * most)};
    if (!p[k].plan.buffer || !(p[k].items = rfi_arena_alloc(a, sizeof *p[k].items * most))) return RFR_NO_MEMORY;
  }
  return RFR_OK;
}

/* Maxima over the stages. */
typedef struct shared_bytes {
  int64_t bytes[2], bound[2]; /* index 0: SHARED, 1: WGRAD */
} shared_bytes;

static rfr_status plan_stage(rfr_graphs *g, rfi_stage_plan *s, rfi_arena *a, shared_bytes *most) {
  axis x = {.g = g, .stage = s};
  planned p[PLANS];
  RFI_TRY(make_room(&x, a, p));
  lay_axis(&x);
  for (int c = s->first; c < s->end; c++) {
    touch_ops(&x, &g->callable[c]);
    touch_ports(&x, &g->callable[c]);
  }
  for (int c = s->first; c < s->end; c++) collect(&x, &g->callable[c], p);
  for (int k = 0; k < PLANS; k++) RFI_TRY(rfi_plan_place(&p[k].plan, x.end));
  take_smaller(g, s, p);
  for (int k = SHARED; k <= WGRAD; k++) {
    if (p[k].plan.bytes > most->bytes[k]) most->bytes[k] = p[k].plan.bytes;
    if (p[k].plan.lower_bound > most->bound[k]) most->bound[k] = p[k].plan.lower_bound;
  }
  return RFR_OK;
}

/* Moves the scratch of W's on the side stream after the shared bytes of all other parts. */
static void separate_wgrad(rfr_graphs *g, int64_t others) {
  for (rfi_callable *c = g->callable; c < g->callable + g->n; c++) {
    const rfr_trace *t = c->u.trace;
    if (c->in_order) continue;
    for (rfr_value v = 0; v < t->n_values; v++)
      if (t->values[v].base == v && c->u.place[v].region == RFI_REGION_SHARED &&
          shared_plan(c, t->values[v].op) == WGRAD)
        c->u.place[v].offset += others;
    for (int i = c->u.first[RFI_PART_W]; i < c->u.first[RFI_PART_W + 1]; i++) c->u.workspace_at[i] += others;
  }
}

/* If there is only one slot, parts run in time order, so values that live within a part are planned together with the
 * rest. */
static void merge_shared_into_slot(rfr_graphs *g) {
  for (int i = 0; i < g->n; i++)
    for (rfr_value v = 0; v < g->callable[i].u.trace->n_values; v++)
      if (g->callable[i].u.place[v].region == RFI_REGION_SHARED) g->callable[i].u.place[v].region = RFI_REGION_SLOT;
}

static rfr_status plan_stages(rfr_graphs *g) {
  const rfi_stage_plan *s = g->stage;
  shared_bytes most = {0};
  rfi_arena *a;
  rfr_status st = rfi_arena_create(g->m.ctx, &a);
  const bool single_slot =
      g->n_stages == 1 && s->slots == 1 && !s->separate_wgrad && !rfi_stage_has_windows(s) && !g->has_side_stream;
  g->m.workspaces = single_slot ? RFI_REGION_SLOT : RFI_REGION_SHARED;
  if (single_slot) merge_shared_into_slot(g);
  for (int i = 0; i < g->n_stages && st == RFR_OK; i++) st = plan_stage(g, &g->stage[i], a, &most);
  rfi_arena_destroy(a);
  separate_wgrad(g, most.bytes[SHARED]);
  g->m.layout.bytes[RFI_REGION_SHARED] = most.bytes[SHARED] + most.bytes[WGRAD];
  g->memory.lower_bound_bytes += most.bound[SHARED] + most.bound[WGRAD];
  return st;
}

/* ---- the arena ---- */

/* Places the values of `kind` in a region. The microbatch number of each slot is persistent, so that the host knows its
 * contents. */
static void place_values(rfr_graphs *g, rfi_region kind, rfi_region region) {
  for (int i = 0; i < g->n; i++) {
    const rfi_callable *c = &g->callable[i];
    for (rfr_value v = 0; v < c->u.trace->n_values; v++) {
      rfi_location *place = &c->u.place[v];
      const int64_t bytes = rfi_storage_bytes(&c->u.trace->values[v].type);
      if (place->region != kind) continue;
      place->stride = v == c->microbatch ? bytes : 0;
      place->offset = rfi_layout_add(&g->m.layout, region, v == c->microbatch ? bytes * c->stage->slots : bytes);
    }
  }
}

static rfr_status place_persistent(rfr_graphs *g) {
  rfi_storage_place(&g->m.store, &g->m.layout, RFI_REGION_PERSISTENT);
  if (g->counts.trace) RFI_TRY(rfi_unit_place(&g->m, &g->counts, g->placed, g->counts.trace->n_ops));
  place_values(g, RFI_REGION_PERSISTENT, RFI_REGION_PERSISTENT);
  return RFR_OK;
}

static int64_t scratch_end(const rfi_named *x) { return x->scratch + rfi_storage_bytes(&x->tensor.type); }

/* Scratch main gradients are used only while a callable's W and its post_wgrad hooks run, so all callables share the
 * same bytes. A gradient that two callables have in common keeps its offset from the first. */
static int64_t place_scratch_gradients(rfr_graphs *g) {
  int64_t most = 0;
  for (int i = 0; i < g->m.store.n; i++) g->m.store.named[i].scratch = -1;
  for (int c = 0; c < g->n; c++) {
    int64_t end = 0;
    for (int add = 0; add < 2; add++)
      for (int i = 0; i < g->callable[c].n_gradients; i++) {
        rfi_named *x = &g->m.store.named[g->callable[c].gradients[i]];
        if (add && x->scratch < 0) x->scratch = end;
        if (x->scratch >= 0 && scratch_end(x) > end) end = scratch_end(x);
      }
    if (end > most) most = end;
  }
  return most;
}

/* Warm-up writes to scratch memory instead of main gradients, written states, and ports with fixed memory. */
static void place_scratch(rfr_graphs *g) {
  if (g->options.warmup_iterations == 0) return;
  g->m.layout.bytes[RFI_REGION_SCRATCH] = place_scratch_gradients(g);
  for (int i = 0; i < g->m.store.n; i++) {
    rfi_named *x = &g->m.store.named[i];
    if (x->written && x->parameter < 0)
      x->scratch = rfi_layout_add(&g->m.layout, RFI_REGION_SCRATCH, rfi_storage_bytes(&x->tensor.type));
  }
  place_values(g, RFI_FIXED, RFI_REGION_SCRATCH);
}

static void report_regions(rfr_graphs *g) {
  rfr_graphs_memory *m = &g->memory;
  const int64_t *bytes = g->m.layout.bytes;
  for (int i = 0; i < g->n_stages; i++) m->slots += g->stage[i].slots * (g->stage[i].end > g->stage[i].first);
  g->m.layout.slots = m->slots;
  m->planned_bytes = rfi_layout_at(&g->m.layout, RFI_REGIONS);
  m->persistent_bytes = bytes[RFI_REGION_PERSISTENT];
  m->slot_bytes = bytes[RFI_REGION_SLOT];
  m->shared_bytes = bytes[RFI_REGION_SHARED];
  m->window_bytes = bytes[RFI_REGION_WINDOW];
  m->scratch_bytes = bytes[RFI_REGION_SCRATCH];
  if (g->m.layout.step) m->step_memory_bytes = m->planned_bytes - m->persistent_bytes;
  for (int i = 0; i < g->n; i++) {
    m->recomputed += g->callable[i].u.recomputed;
    m->recomputed_flops += g->callable[i].u.recomputed_flops;
  }
}

rfr_status rfi_graphs_allocate(rfr_graphs *g) {
  RFI_TRY(rfi_layout_check_budget(&g->m.layout, g->options.budget, g->options.recompute, g->inference));
  RFI_TRY(rfi_step_memory_reserve(&g->m));
  RFI_TRY(rfi_layout_allocate(&g->m.layout, g->m.backend, g->m.device, 0));
  RFI_TRY(rfi_step_memory_allocate(&g->m));
  rfi_storage_attach(&g->m.store, &g->m.layout, g->m.backend->host);
  return RFR_OK;
}

rfr_status rfi_graphs_place(rfr_graphs *g, bool side_stream) {
  g->memory = (rfr_graphs_memory){.saved_bytes = g->memory.saved_bytes};
  rfi_layout_clear(&g->m.layout);
  for (int i = 0; i < g->n; i++) RFI_TRY(assign_storage(g, &g->callable[i]));
  rfi_graphs_choose_side_stream(g, side_stream);
  RFI_TRY(plan_stages(g));
  RFI_TRY(rfi_graphs_place_windows(g));
  RFI_TRY(place_persistent(g));
  place_scratch(g);
  report_regions(g);
  return RFR_OK;
}

/* ---- addresses ---- */

unsigned char *rfi_graphs_slot(const rfr_graphs *g, const rfi_stage_plan *s, int slot) {
  return rfi_address(&g->m.layout, RFI_REGION_SLOT, s->offset + slot * s->bytes);
}

unsigned char *rfi_graphs_block(const rfr_graphs *g, const rfi_stage_plan *s, int slot) {
  return rfi_graphs_slot(g, s, s->slots) + s->block[slot] * s->block_bytes;
}

void rfi_graphs_set_addresses(rfr_graphs *g) {
  for (int c = 0; c < g->n; c++) rfi_unit_set_addresses(&g->m, &g->callable[c].u);
  rfi_unit_set_addresses(&g->m, &g->counts);
}
