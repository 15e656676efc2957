/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and collectives of sharded callables. If a stage has UNSHARD, RESHARD or REDUCE in the schedule, it has two
 * blocks of memory: gathered parameters, from UNSHARD to RESHARD, and unreduced gradients, from their first W to
 * REDUCE. A block has one address, because graphs capture it, and is live in several windows of the schedule. Two
 * blocks may share bytes if none of their windows overlap. Larger blocks are placed first, each at the lowest free
 * address. In a stage without these actions each call gathers what it reads and reduces what it computes; callables
 * run one after the other, so all of them share one block.
 *
 * Shard actions of the schedule run after the call before them, so the caller's loop does not contain them.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"

enum { GATHERED, UNREDUCED, KINDS };

bool rfi_stage_has_windows(const rfi_stage_plan *s) { return s->fsdp_actions && s->sharded; }

static bool adds(int op) { return rfi_parts_of(op) & 1 << RFI_PART_W; }

/* ---- windows of a schedule ---- */

typedef struct windows { /* windows of blocks; block 2 * stage + kind */
  rfr_graphs *g;
  int n;        /* actions in the rank's list */
  bool *open;   /* per block */
  bool *live;   /* per block and action: the action lies in a window of the block, or begins or ends one */
  int64_t most; /* maximum over the actions of live bytes */
} windows;

static rfr_status wrong(const rfr_graphs *g, const rfr_action *a, int i, const char *what) {
  char text[RFR_ACTION_TEXT];
  return rfi_fail(RFI_E_GRAPHS_CALLABLE, "rank %d, action %d (%s): %s", g->options.rank, i, rfr_action_print(*a, text),
                  what);
}

static int64_t *offset_of(rfr_graphs *g, int block) { return &g->stage[block / KINDS].window[block % KINDS]; }
static int64_t bytes_of(const rfr_graphs *g, int block) { return g->stage[block / KINDS].window_bytes[block % KINDS]; }

static bool is_parameter(const rfr_graphs *g, const rfi_location *x) {
  return x->region == RFI_NAMED ? rfi_is_parameter(g->m.store.named[x->offset].tensor.role)
                                : x->region == RFI_REGION_WINDOW;
}

static bool reads_in_wgrad(const rfr_graphs *g, const rfi_callable *c) {
  for (rfi_use u = {0}; rfi_next_use(c, &u);)
    if (u.part == RFI_PART_W && !u.result && is_parameter(g, &c->u.place[u.owner])) return true;
  return false;
}

/* rfr_schedule has checked that UNSHARD and RESHARD alternate. */
static rfr_status read_action(windows *w, int stage, const rfr_action *a, int i) {
  const rfi_stage_plan *s = &w->g->stage[stage];
  bool *gathered = &w->open[stage * KINDS + GATHERED], *unreduced = &w->open[stage * KINDS + UNREDUCED];
  const bool reads = rfi_parts_of(a->op) != 0 && (a->op != RFR_ACTION_W || s->wgrad_reads);
  if (reads && !*gathered)
    return wrong(w->g, a, i, "it reads parameters of sharded callables, which are not gathered: add UNSHARD before it");
  if (a->op == RFR_ACTION_REDUCE && s->reduces && !*unreduced)
    return wrong(w->g, a, i, "REDUCE without a weight gradient since the last REDUCE of the stage");
  if (a->op == RFR_ACTION_UNSHARD || a->op == RFR_ACTION_RESHARD) *gathered = a->op == RFR_ACTION_UNSHARD;
  if (a->op == RFR_ACTION_REDUCE || adds(a->op)) *unreduced = adds(a->op) && s->reduces;
  return RFR_OK;
}

/* Marks the blocks that are open before or after action i as live. */
static void mark_live(windows *w, int i) {
  int64_t bytes = 0;
  for (int b = 0; b < w->g->n_stages * KINDS; b++) {
    bool *live = &w->live[b * w->n + i];
    *live = *live || w->open[b];
    bytes += *live ? bytes_of(w->g, b) : 0;
  }
  if (bytes > w->most) w->most = bytes;
}

static rfr_status read_windows(windows *w, const rfr_action *a) {
  const rfr_graphs *g = w->g;
  for (int i = 0; i < w->n; i++) {
    mark_live(w, i);
    for (int k = 0; k < g->n_stages; k++)
      if (g->stage[k].number == a[i].stage && rfi_stage_has_windows(&g->stage[k])) RFI_TRY(read_action(w, k, &a[i], i));
    mark_live(w, i);
  }
  for (int b = 0; b < g->n_stages * KINDS; b++)
    if (w->open[b])
      return rfi_fail(RFI_E_GRAPHS_CALLABLE, "at the end of the schedule stage %d is %s", g->stage[b / KINDS].number,
                      b % KINDS == GATHERED ? "still gathered: add RESHARD" : "not reduced: add REDUCE");
  return RFR_OK;
}

/* ---- placement ---- */

/* Iterates over the values of a callable that are in windows, from v = -1 on. Returns the offset; NULL: the end. */
static int64_t *next_in_windows(rfr_graphs *g, const rfi_callable *c, rfr_value *v, int *kind) {
  while (++*v < c->u.trace->n_values) {
    rfi_location *place = &c->u.place[*v];
    rfi_named *x = place->region == RFI_NAMED ? &g->m.store.named[place->offset] : NULL;
    *kind = x ? UNREDUCED : GATHERED;
    if (place->region == RFI_REGION_WINDOW) return &place->offset;
    if (x && x->region == RFI_REGION_WINDOW) return &x->offset;
  }
  return NULL;
}

/* Adds the sizes of a callable's values to the bytes of each kind. */
static void append(rfr_graphs *g, const rfi_callable *c, int64_t bytes[KINDS]) {
  int kind;
  int64_t *offset;
  for (rfr_value v = -1; (offset = next_in_windows(g, c, &v, &kind));) {
    *offset = bytes[kind];
    bytes[kind] += rfi_storage_bytes(&c->u.trace->values[v].type);
  }
}

/* Converts offsets within a kind to offsets within the windows. */
static void move(rfr_graphs *g, const rfi_callable *c, const int64_t to[KINDS]) {
  int kind;
  int64_t *offset;
  for (rfr_value v = -1; (offset = next_in_windows(g, c, &v, &kind));) *offset += to[kind];
}

static void size_blocks(rfr_graphs *g, rfi_stage_plan *s) {
  memset(s->window_bytes, 0, sizeof s->window_bytes);
  for (int c = s->first; c < s->end && s->fsdp_actions; c++) append(g, &g->callable[c], s->window_bytes);
}

static bool overlap(const windows *w, int a, int b) {
  for (int i = 0; i < w->n; i++)
    if (w->live[a * w->n + i] && w->live[b * w->n + i]) return true;
  return false;
}

/* The lowest address at which a block overlaps no placed block whose windows overlap its own. */
static int64_t lowest(const windows *w, int block, const bool *placed) {
  rfr_graphs *g = w->g;
  int64_t at = 0;
  for (int b = 0; b < g->n_stages * KINDS; b++) {
    const int64_t other = *offset_of(g, b);
    if (!placed[b] || other >= at + bytes_of(g, block) || at >= other + bytes_of(g, b) || !overlap(w, block, b))
      continue;
    at = other + bytes_of(g, b);
    b = -1; /* check all blocks again */
  }
  return at;
}

static void place_blocks(const windows *w, bool *placed) {
  rfr_graphs *g = w->g;
  const int n = g->n_stages * KINDS;
  for (int round = 0; round < n; round++) {
    int largest = -1;
    for (int b = 0; b < n; b++)
      if (!placed[b] && (largest < 0 || bytes_of(g, b) > bytes_of(g, largest))) largest = b;
    const int64_t at = lowest(w, largest, placed), end = at + bytes_of(g, largest);
    *offset_of(g, largest) = at;
    placed[largest] = true;
    if (end > g->m.layout.bytes[RFI_REGION_WINDOW]) g->m.layout.bytes[RFI_REGION_WINDOW] = end;
  }
}

/* Places memory for gathering within a call, after all blocks. */
static int64_t place_for_calls(rfr_graphs *g, const rfi_stage_plan *s, int64_t first) {
  int64_t most = 0;
  for (int c = s->first; c < s->end && !s->fsdp_actions; c++) {
    int64_t bytes[KINDS] = {0};
    append(g, &g->callable[c], bytes);
    move(g, &g->callable[c], (int64_t[KINDS]){first, first + bytes[GATHERED]});
    if (bytes[GATHERED] + bytes[UNREDUCED] > most) most = bytes[GATHERED] + bytes[UNREDUCED];
  }
  return most;
}

static rfr_status place(rfr_graphs *g, rfi_arena *arena) {
  windows w = {.g = g};
  const rfr_schedule *schedule = g->options.schedule;
  const rfr_action *a = schedule ? rfr_schedule_actions(schedule, g->options.rank, &w.n) : NULL;
  const size_t blocks = (size_t)(g->n_stages * KINDS);
  bool *placed = rfi_arena_alloc(arena, blocks);
  w.open = rfi_arena_alloc(arena, blocks);
  w.live = rfi_arena_alloc(arena, blocks * (size_t)(w.n + 1));
  if (!placed || !w.open || !w.live) return RFR_NO_MEMORY;
  for (int i = 0; i < g->n_stages; i++) size_blocks(g, &g->stage[i]);
  RFI_TRY(read_windows(&w, a));
  place_blocks(&w, placed);
  const int64_t end = g->m.layout.bytes[RFI_REGION_WINDOW];
  int64_t most = 0;
  for (int i = 0; i < g->n_stages; i++) {
    const rfi_stage_plan *stage = &g->stage[i];
    const int64_t bytes = place_for_calls(g, stage, end);
    if (bytes > most) most = bytes;
    for (int c = stage->first; c < stage->end && stage->fsdp_actions; c++) move(g, &g->callable[c], stage->window);
  }
  g->m.layout.bytes[RFI_REGION_WINDOW] = end + most;
  g->memory.lower_bound_bytes += w.most + most;
  return RFR_OK;
}

rfr_status rfi_graphs_place_windows(rfr_graphs *g) {
  rfi_arena *arena;
  bool any = false;
  for (rfi_stage_plan *s = g->stage; s < g->stage + g->n_stages; s++) {
    any = any || s->sharded;
    s->reduces = s->wgrad_reads = false;
    for (rfi_callable *c = g->callable + s->first; c < g->callable + s->end; c++) {
      c->wgrad_reads = reads_in_wgrad(g, c);
      s->reduces = s->reduces || (c->sharded && rfi_has(&c->u, RFI_PART_W));
      s->wgrad_reads = s->wgrad_reads || (c->sharded && c->wgrad_reads);
    }
  }
  if (!any) return RFR_OK;
  RFI_TRY(rfi_arena_create(g->m.ctx, &arena));
  const rfr_status s = place(g, arena);
  rfi_arena_destroy(arena);
  return s;
}

/* ---- execution ---- */

static rfr_status run_part(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, bool eager) {
  return rfi_unit_run(&g->m, &c->u, slot, part, eager, g->from);
}

static bool is_first_sum(const rfi_stage_plan *s, const rfr_action *a, int i) {
  for (int k = i - 1; k >= 0; k--) {
    if (a[k].stage != s->number) continue;
    if (a[k].op == RFR_ACTION_REDUCE) return true;
    if (adds(a[k].op)) return false;
  }
  return true;
}

rfr_status rfi_graphs_add_shard_actions(const rfr_graphs *g, const rfi_stage_plan *s, const rfr_action *a, int i,
                                        rfi_calls *to) {
  const bool clear = adds(a[i].op) && rfi_stage_has_windows(s) && is_first_sum(s, a, i);
  const bool reduce = a[i].op == RFR_ACTION_REDUCE;
  if (!clear && !reduce && a[i].op != RFR_ACTION_UNSHARD && a[i].op != RFR_ACTION_RESHARD) return RFR_OK;
  for (int c = s->first; c < s->end; c++) {
    const rfi_callable *of = &g->callable[c];
    if (!of->sharded || ((clear || reduce) && !rfi_has(&of->u, RFI_PART_W))) continue;
    if (!rfi_arena_grow(to->arena, (void **)&to->shard_action, &to->cap_shard_actions, to->n_shard_actions + 1,
                        sizeof *to->shard_action))
      return RFR_NO_MEMORY;
    to->shard_action[to->n_shard_actions++] = (rfi_shard_action){clear ? RFR_ACTION_W : a[i].op, of, to->n};
  }
  return RFR_OK;
}

static rfr_status clear(rfr_graphs *g, const rfi_callable *c) {
  for (int i = 0; i < c->n_unreduced; i++) {
    const rfr_tensor *x = &g->m.store.named[c->unreduced[i]].tensor;
    RFI_TRY(rfi_executor_fill(&g->m, x->data, 0, x->bytes));
  }
  return RFR_OK;
}

/* Debug mode: fills the gathered parameters or unreduced gradients of a callable. */
static rfr_status poison_block(rfr_graphs *g, const rfi_callable *c, int kind) {
  const int64_t *offset;
  int of;
  for (rfr_value v = -1; g->options.debug && (offset = next_in_windows(g, c, &v, &of));)
    if (of == kind)
      RFI_TRY(rfi_executor_fill(&g->m, rfi_address(&g->m.layout, RFI_REGION_WINDOW, *offset), RFI_POISON,
                                rfi_storage_bytes(&c->u.trace->values[v].type)));
  return RFR_OK;
}

static rfr_status reduce(rfr_graphs *g, const rfi_callable *c, bool eager) {
  RFI_TRY(run_part(g, c, 0, RFI_PART_REDUCE, eager));
  return poison_block(g, c, UNREDUCED);
}

rfr_status rfi_graphs_run_shard_actions(rfr_graphs *g, int64_t at, int *next, bool eager) {
  for (; *next < g->calls.n_shard_actions && g->calls.shard_action[*next].at <= at; ++*next) {
    const rfi_shard_action *o = &g->calls.shard_action[*next];
    switch (o->op) {
      case RFR_ACTION_UNSHARD: RFI_TRY(run_part(g, o->of, 0, RFI_PART_SETUP, eager)); break;
      case RFR_ACTION_RESHARD: RFI_TRY(poison_block(g, o->of, GATHERED)); break;
      case RFR_ACTION_REDUCE: RFI_TRY(reduce(g, o->of, eager)); break;
      default: RFI_TRY(clear(g, o->of));
    }
  }
  return RFR_OK;
}

/* Whether a call gathers and reduces by itself; in an evaluation every call does. */
static bool gathers_per_call(const rfr_graphs *g, const rfi_callable *c) {
  return c->sharded && (g->evaluating || !c->stage->fsdp_actions);
}

static rfr_status run_gathered(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, bool eager) {
  const bool adds_up = part == RFI_PART_W;
  if (!rfi_has(&c->u, part)) return RFR_OK;
  if (!adds_up || c->wgrad_reads) RFI_TRY(run_part(g, c, 0, RFI_PART_SETUP, eager));
  if (adds_up) RFI_TRY(clear(g, c));
  RFI_TRY(run_part(g, c, slot, part, eager));
  RFI_TRY(poison_block(g, c, GATHERED));
  return adds_up ? reduce(g, c, eager) : RFR_OK;
}

rfr_status rfi_graphs_run(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, bool eager) {
  return (part >= RFI_PART_F && gathers_per_call(g, c) ? run_gathered : run_part)(g, c, slot, part, eager);
}

rfr_status rfi_graphs_set_up(rfr_graphs *g, bool loaded, bool eager) {
  for (int part = loaded ? RFI_PART_SETUP : RFI_PART_LOAD; part <= RFI_PART_SETUP; part++)
    for (const rfi_callable *c = g->callable; c < g->callable + g->n; c++)
      if (part == RFI_PART_LOAD || !c->sharded) RFI_TRY(run_part(g, c, 0, (rfi_part)part, eager));
  return RFR_OK;
}
