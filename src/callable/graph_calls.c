/* SPDX-License-Identifier: Apache-2.0
 *
 * The stages of a rank, the calls of a step, their order, and the main gradients that each call completes. All of them
 * follow from the schedule alone. Without a schedule, a step repeats the calls of one microbatch until the caller ends
 * it; so does an evaluation.
 *
 * Graphs are captured per slot, not per microbatch. So another schedule of the same stages needs no new graphs under
 * three conditions. It has no more microbatches in flight. It has no separate W in a stage whose saved activations were
 * planned without it. Slots that share a block never hold microbatches between F and I at the same time.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "schedule/schedule.h"

/* ---- the list ---- */

/* Whether an action calls the callable. */
static bool has_call(const rfi_callable *c, int op) {
  if (op == RFR_ACTION_F) return true;
  if (op == RFR_ACTION_W) return rfi_has(&c->u, RFI_PART_W);
  return rfi_has_backward(c);
}

/* Appends the calls of an action. */
static rfr_status add_calls(const rfr_graphs *g, const rfi_stage_plan *s, int op, int microbatch, int slot,
                            rfi_calls *to) {
  const int before = to->n;
  for (int k = 0; k < s->end - s->first; k++) {
    const int c = op == RFR_ACTION_F ? s->first + k : s->end - 1 - k;
    if (!has_call(&g->callable[c], op)) continue;
    if (!rfi_arena_grow(to->arena, (void **)&to->call, &to->cap_calls, to->n + 1, sizeof *to->call))
      return RFR_NO_MEMORY;
    to->call[to->n++] = (rfi_step_call){(rfr_action_op)op, &g->callable[c], microbatch, slot};
  }
  if (to->n > before && rfi_parts_of(op) & 1 << RFI_PART_I) to->call[to->n - 1].frees_block = true;
  return RFR_OK;
}

static const rfi_stage_plan *stage_of(const rfr_graphs *g, int number) {
  for (int i = 0; i < g->n_stages; i++)
    if (g->stage[i].number == number) return &g->stage[i];
  return NULL;
}

static rfr_status list(const rfr_graphs *g, const rfr_schedule *schedule, bool evaluation, rfi_calls *c) {
  int n = 0;
  const rfr_action *a = schedule ? rfr_schedule_actions(schedule, g->options.rank, &n) : NULL;
  for (int i = 0; i < g->n_stages && !schedule; i++) RFI_TRY(add_calls(g, &g->stage[i], RFR_ACTION_F, 0, 0, c));
  if (!schedule && !evaluation && !g->inference) RFI_TRY(add_calls(g, &g->stage[0], RFR_ACTION_B, 0, 0, c));
  for (int i = 0; i < n; i++) {
    const rfi_stage_plan *s = stage_of(g, a[i].stage);
    if (!s) continue;
    RFI_TRY(rfi_graphs_add_shard_actions(g, s, a, i, c));
    if (rfi_parts_of(a[i].op))
      RFI_TRY(add_calls(g, s, a[i].op, a[i].microbatch, rfr_schedule_slot(schedule, a[i].stage, a[i].microbatch), c));
  }
  return RFR_OK;
}

/* Marks the calls that take and free slots: the first call of a microbatch in a slot, in either direction. */
static rfr_status mark_ends(const rfr_graphs *g, rfi_calls *c) {
  int most = 1;
  for (int i = 0; i < g->n_stages; i++) most = g->stage[i].slots > most ? g->stage[i].slots : most;
  int *occupant = rfi_arena_alloc(c->arena, sizeof *occupant * (size_t)(g->n_stages * most));
  if (!occupant) return RFR_NO_MEMORY;
  for (int end = 0; end < 2; end++) {
    for (int i = 0; i < g->n_stages * most; i++) occupant[i] = -1;
    for (int i = 0; i < c->n; i++) {
      rfi_step_call *call = &c->call[end ? c->n - 1 - i : i];
      int *now = &occupant[(call->of->stage - g->stage) * most + call->slot];
      *(end ? &call->last : &call->first) = *now != call->microbatch;
      *now = call->microbatch;
    }
  }
  return RFR_OK;
}

void rfi_graphs_count_live(rfr_graphs *g) {
  rfr_graphs_memory *m = &g->memory;
  int64_t bytes = 0;
  m->live = 0, m->live_bytes = 0;
  for (int i = 0, n = 0; i < g->calls.n; i++) {
    const rfi_step_call *call = &g->calls.call[i];
    const rfi_stage_plan *s = call->of->stage;
    n += call->first;
    bytes += call->first ? s->bytes + s->block_bytes : 0;
    if (n > m->live) m->live = n;
    if (bytes > m->live_bytes) m->live_bytes = bytes;
    n -= call->last;
    bytes -= (call->frees_block ? s->block_bytes : 0) + (call->last ? s->bytes : 0);
  }
}

static const rfi_calls *current_calls(const rfr_graphs *g) { return g->evaluating ? &g->evaluation : &g->calls; }

void rfi_graphs_explain_order(const rfr_graphs *g, int callable, int microbatch, bool forward, char text[96]) {
  const rfi_calls *c = current_calls(g);
  const rfi_stage_plan *stage = g->callable[callable].stage;
  const int64_t begin = c->endless ? g->next / c->n * c->n : 0, now = c->endless ? g->next / c->n : -1;
  bool begun = false, done = c->endless && microbatch >= 0 && microbatch < now;
  int in_flight = 0;
  for (int64_t i = begin; i < g->next; i++) {
    const rfi_step_call *call = &c->call[i - begin];
    if (call->of->stage != stage) continue;
    in_flight += call->first - call->last;
    if ((c->endless ? now : call->microbatch) != microbatch) continue;
    begun = true;
    done = call->last;
  }
  text[0] = 0;
  if (done) rfi_snprintf(text, 96, ", which is complete and has no slot");
  else if (!begun && !forward) rfi_snprintf(text, 96, ", which is not in flight");
  else if (!begun && in_flight >= stage->slots)
    rfi_snprintf(text, 96, ", but all %d slots hold a microbatch in flight", in_flight);
}

/* ---- completed gradients ---- */

bool rfi_call_runs(const rfi_step_call *call, rfi_part part) {
  return rfi_parts_of(call->op) & 1 << part && (part != RFI_PART_W || rfi_has(&call->of->u, part));
}

/* Finds the last call that adds to each main gradient. A main gradient without such a call is complete when a step
 * begins. */
static rfr_status find_last_calls(const rfr_graphs *g, rfi_calls *c) {
  int *last = c->last = rfi_arena_alloc(c->arena, sizeof *last * (size_t)(g->m.store.n + 1));
  if (!last) return RFR_NO_MEMORY;
  for (int i = 0; i < g->m.store.n; i++) last[i] = -1;
  for (int i = 0; i < c->n; i++) {
    const rfi_callable *of = c->call[i].of;
    for (int k = 0; rfi_call_runs(&c->call[i], RFI_PART_W) && k < of->n_gradients; k++) last[of->gradients[k]] = i;
  }
  for (int i = 0; i < c->n_shard_actions; i++) { /* sharded: the call before the last REDUCE */
    const rfi_callable *of = c->shard_action[i].of;
    for (int k = 0; c->shard_action[i].op == RFR_ACTION_REDUCE && k < of->n_gradients; k++)
      last[of->gradients[k]] = c->shard_action[i].at - 1;
  }
  return RFR_OK;
}

/* Lists the main gradients that each call completes. */
static rfr_status list_last_calls(const rfr_graphs *g, rfi_calls *c) {
  c->completes = rfi_arena_alloc(c->arena, sizeof *c->completes * (size_t)(c->n + 1));
  c->next = rfi_arena_alloc(c->arena, sizeof *c->next * (size_t)(g->m.store.n + 1));
  if (!c->completes || !c->next) return RFR_NO_MEMORY;
  for (int i = 0; i <= c->n; i++) c->completes[i] = -1;
  for (int i = g->m.store.n - 1; i >= 0; i--) {
    if (g->m.store.named[i].parameter < 0) continue;
    int *first = &c->completes[c->last[i] + 1];
    c->next[i] = *first;
    *first = i;
  }
  return RFR_OK;
}

/* ---- creation ---- */

rfr_status rfi_graphs_make_calls(rfr_graphs *g, const rfr_schedule *schedule, bool evaluation, rfi_calls *c) {
  *c = (rfi_calls){.endless = !schedule};
  RFI_TRY(rfi_arena_create(g->m.ctx, &c->arena));
  RFI_TRY(list(g, schedule, evaluation, c));
  RFI_TRY(mark_ends(g, c));
  RFI_TRY(find_last_calls(g, c));
  RFI_TRY(list_last_calls(g, c));
  return evaluation ? RFR_OK : rfi_graphs_order_side_stream(g, c);
}

const char *rfi_call_text(int op) {
  return op == RFR_ACTION_F   ? "forward"
         : op == RFR_ACTION_W ? "wgrad"
         : op == RFR_ACTION_B ? "backward (B)"
                              : "backward (I)";
}

bool rfi_graphs_next_call(const rfr_graphs *g, rfi_step_call *out) {
  const rfi_calls *c = current_calls(g);
  if (!c->endless && g->next >= c->n) return false;
  *out = c->call[g->next % c->n];
  if (c->endless) out->microbatch = (int)(g->next / c->n);
  return true;
}

bool rfi_graphs_is_complete(const rfr_graphs *g) {
  const rfi_calls *c = current_calls(g);
  return c->endless ? g->next % c->n == 0 : g->next >= c->n;
}

/* Lists the main gradients that the last call completed, unless `to` is NULL; returns their number. */
static int list_completed(const rfr_graphs *g, rfr_tensor *to) {
  const rfi_calls *c = &g->calls;
  int first = 0, end = 0, n = 0; /* a range of calls; -1: the start of the step */
  if (c->endless && g->ended) first = -1, end = c->n;
  if (!c->endless && g->state == RFI_STEP_OPEN && !g->evaluating) end = (int)g->next, first = end - 1;
  for (int call = first; call < end; call++)
    for (int i = c->completes[call + 1]; i >= 0; i = c->next[i], n++)
      if (to) to[n] = g->m.store.named[i].tensor;
  return n;
}

rfr_status rfr_graphs_grads_ready(const rfr_graphs *g, rfr_tensor *gradients, int max, int *n) {
  RFI_TRY(RFI_CHECK_OUT(n, "n"));
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  *n = list_completed(g, NULL);
  if (gradients && max < *n) return rfi_fail(RFI_E_ARGUMENT, "max is %d, but %d main gradients are complete", max, *n);
  list_completed(g, gradients);
  return RFR_OK;
}

/* Without a schedule a step may end after every full microbatch, but not before the first. */
rfr_status rfi_graphs_check_gradient(const rfr_graphs *g, int gradient) {
  const rfi_calls *c = &g->calls;
  const int64_t begun = c->endless ? g->next / c->n * c->n : 0;
  const int last = c->last[gradient];
  if (g->state == RFI_STEP_NONE || g->evaluating || (begun > 0 && g->next == begun)) return RFR_OK;
  if (last < g->next - begun) return RFR_OK;
  const rfi_step_call *call = &c->call[last];
  return rfi_fail(RFI_E_GRAPHS_ORDER,
                  "main gradient \"%s\" is available only after %s of callable \"%s\", microbatch %d",
                  g->m.store.named[gradient].tensor.name, rfi_call_text(call->op), call->of->u.name,
                  c->endless ? (int)(begun / c->n) : call->microbatch);
}

/* ---- stages ---- */

/* A bit per action of a stage. */
static unsigned actions_of(const rfr_schedule *s, int rank, int stage) {
  unsigned ops = 0;
  int n;
  const rfr_action *a = rfr_schedule_actions(s, rank, &n);
  for (int i = 0; i < n; i++)
    if (a[i].stage == stage) ops |= 1u << a[i].op;
  return ops;
}

static rfr_status read_stages(const rfr_graphs *g, const rfr_schedule *s, rfi_arena *a, rfi_stage_plan **stages,
                              int *n) {
  rfr_schedule_info info = {.stages = 1};
  const int rank = g->options.rank;
  int next = 0;
  *n = 0;
  if (s) RFI_TRY(rfr_schedule_get_info(s, &info));
  if (!(*stages = rfi_arena_alloc(a, sizeof **stages * (size_t)info.stages))) return RFR_NO_MEMORY;
  if (!s) {
    (*stages)[(*n)++] = (rfi_stage_plan){.end = g->n, .slots = 1, .number = g->stage ? g->stage->number : 0};
    return RFR_OK;
  }
  if (rank < 0 || rank >= info.ranks)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_graphs_options.rank is %d, the schedule has %d ranks", rank, info.ranks);
  if (!info.training != g->inference)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE, "the schedule is for %s, the callables are not",
                    info.training ? "training" : "inference");
  for (int k = 0; k < info.stages; k++) {
    if (rfr_schedule_rank(s, k) != rank) continue;
    const unsigned ops = actions_of(s, rank, k);
    if (ops & 1 << RFR_ACTION_OPT)
      return rfi_fail(
          RFI_E_GRAPHS_CALLABLE,
          "the schedule has OPT for stage %d, but callables have no optimizer: run it after rfr_graphs_end_step", k);
    const int end = next + rfr_schedule_layers(s, k);
    (*stages)[(*n)++] = (rfi_stage_plan){
        .first = next,
        .end = end,
        .number = k,
        .separate_wgrad = ops & 1 << RFR_ACTION_W,
        .fsdp_actions = ops & (1 << RFR_ACTION_UNSHARD | 1 << RFR_ACTION_RESHARD | 1 << RFR_ACTION_REDUCE),
        .slots = rfr_schedule_slots(s, k)};
    next = end;
  }
  if (next != g->n)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "the stages of rank %d have %d layers, but there are %d callables: call rfr_schedule_set_layers",
                    rank, next, g->n);
  return RFR_OK;
}

/* Sets (*out)[i * slots + k] for slots whose microbatches are between F and their last I at the same time. The caller
 * frees it. */
static rfr_status find_overlaps(const rfr_graphs *g, const rfr_schedule *s, int stage, bool **out) {
  const size_t slots = (size_t)rfr_schedule_slots(s, stage);
  int n;
  const rfr_action *a = rfr_schedule_actions(s, g->options.rank, &n);
  RFI_TRY(RFI_ALLOC(g->m.ctx, (slots + 1) * slots, out));
  bool *live = *out + slots * slots;
  for (int i = 0; i < n; i++) {
    if (a[i].stage != stage || rfi_parts_of(a[i].op) == 0) continue;
    const size_t slot = (size_t)rfr_schedule_slot(s, stage, a[i].microbatch);
    for (size_t k = 0; k < slots && a[i].op == RFR_ACTION_F; k++)
      if (live[k]) (*out)[slot * slots + k] = (*out)[k * slots + slot] = true;
    live[slot] = a[i].op == RFR_ACTION_F;
  }
  return RFR_OK;
}

/* Assigns blocks to the slots of a stage with separate W. */
static rfr_status assign_blocks(rfr_graphs *g, rfi_stage_plan *s) {
  bool *overlaps;
  if (!(s->block = rfi_arena_alloc(g->m.strings, sizeof *s->block * (size_t)(s->slots + 1)))) return RFR_NO_MEMORY;
  if (!s->separate_wgrad) return RFR_OK;
  RFI_TRY(find_overlaps(g, g->options.schedule, s->number, &overlaps));
  for (int slot = 0; slot < s->slots; slot++) {
    for (int k = 0; k < slot; k++)
      if (s->block[k] == s->block[slot] && overlaps[(size_t)slot * (size_t)s->slots + (size_t)k])
        s->block[slot]++, k = -1; /* compare with all slots again */
    if (s->blocks <= s->block[slot]) s->blocks = s->block[slot] + 1;
  }
  rfi_free(g->m.ctx, overlaps);
  return RFR_OK;
}

rfr_status rfi_graphs_make_stages(rfr_graphs *g) {
  RFI_TRY(read_stages(g, g->options.schedule, g->m.strings, &g->stage, &g->n_stages));
  for (int k = 0; k < g->n_stages; k++) {
    rfi_stage_plan *s = &g->stage[k];
    if (!(s->valid = rfi_arena_alloc(g->m.strings, sizeof *s->valid * (size_t)(s->slots + 1)))) return RFR_NO_MEMORY;
    RFI_TRY(assign_blocks(g, s));
    for (int slot = 0; slot < s->slots; slot++) rfi_graphs_invalidate(s, slot);
    for (int c = s->first; c < s->end; c++) g->callable[c].stage = s;
  }
  return RFR_OK;
}

/* ---- another schedule ---- */

static rfr_status check_blocks(const rfr_graphs *g, const rfi_stage_plan *s, const rfr_schedule *schedule, int slots) {
  bool *overlaps;
  rfr_status st = RFR_OK;
  if (s->block_bytes == 0) return RFR_OK;
  RFI_TRY(find_overlaps(g, schedule, s->number, &overlaps));
  for (int i = 0; i < slots && st == RFR_OK; i++)
    for (int k = 0; k < i && st == RFR_OK; k++)
      if (s->block[i] == s->block[k] && overlaps[(size_t)i * (size_t)slots + (size_t)k])
        st = rfi_fail(RFI_E_GRAPHS_SCHEDULE,
                      "slots %d and %d of stage %d share a block, but it has microbatches of both between F and I "
                      "at the same time: create new graphs for it",
                      k, i, s->number);
  rfi_free(g->m.ctx, overlaps);
  return st;
}

static rfr_status check_stage(const rfr_graphs *g, const rfi_stage_plan *was, const rfi_stage_plan *now) {
  for (int c = was->first; c < was->end; c++)
    if (g->callable[c].sharded && (was->fsdp_actions || now->fsdp_actions))
      return rfi_fail(
          RFI_E_GRAPHS_SCHEDULE,
          "callable \"%s\" is sharded: the memory of its gathered parameters was planned for the UNSHARD, RESHARD and "
          "REDUCE of the schedule at creation",
          g->callable[c].u.name);
  if (now->number != was->number || now->first != was->first || now->end != was->end)
    return rfi_fail(RFI_E_GRAPHS_SCHEDULE, "it has stage %d with %d callables, but stage %d with %d was captured",
                    now->number, now->end - now->first, was->number, was->end - was->first);
  if (now->slots > was->slots)
    return rfi_fail(RFI_E_GRAPHS_SCHEDULE, "it has %d microbatches of stage %d in flight, but %d slots were captured",
                    now->slots, now->number, was->slots);
  if (now->separate_wgrad && !was->separate_wgrad)
    return rfi_fail(RFI_E_GRAPHS_SCHEDULE,
                    "it has separate W actions for stage %d, whose memory was planned for W directly after I",
                    now->number);
  return RFR_OK;
}

static rfr_status check_stages(const rfr_graphs *g, const rfr_schedule *schedule) {
  rfi_arena *scratch;
  rfi_stage_plan *now;
  int n;
  RFI_TRY(rfi_arena_create(g->m.ctx, &scratch));
  rfr_status s = read_stages(g, schedule, scratch, &now, &n);
  if (s == RFR_OK && n != g->n_stages)
    s = rfi_fail(RFI_E_GRAPHS_SCHEDULE, "it has %d stages on this rank, but %d were captured", n, g->n_stages);
  for (int i = 0; i < n && s == RFR_OK; i++) {
    s = check_stage(g, &g->stage[i], &now[i]);
    if (s == RFR_OK && schedule) s = check_blocks(g, &g->stage[i], schedule, now[i].slots);
  }
  rfi_arena_destroy(scratch);
  return s;
}

rfr_status rfr_graphs_reschedule(rfr_graphs *g, const rfr_schedule *schedule) {
  rfi_calls calls;
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_NONE) return rfi_fail(RFI_E_GRAPHS_ORDER, "a step has begun: end or abort it first");
  if (schedule && schedule->ctx != g->m.ctx)
    return rfi_fail(RFI_E_ARGUMENT, "the schedule belongs to another context: create it in the context of the graphs");
  RFI_TRY(check_stages(g, schedule));
  rfr_status s = rfi_graphs_make_calls(g, schedule, false, &calls);
  if (s == RFR_OK) s = rfi_graphs_check_overlap(g, &calls);
  rfi_arena_destroy(s == RFR_OK ? g->calls.arena : calls.arena);
  RFI_TRY(s);
  g->calls = calls;
  g->ended = false;
  rfi_graphs_count_live(g);
  return RFR_OK;
}
