/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulator. Time: a rank runs its actions one after another; each starts when the rank is free and its inputs have
 * arrived. A message takes the cost of its SEND, also where the list has no SEND action, and the sender does not wait
 * for it to arrive. One pass over the checked order is enough. Memory: one pass over each rank's list; bytes are
 * allocated at the first action of their window and freed after the last one.
 */
#include <math.h>
#include <string.h>

#include "schedule/schedule.h"

rfr_stage_costs rfr_stage_costs_default(void) {
  rfr_stage_costs c = {.activation_bytes = 1, .wgrad_bytes = 1};
  for (int op = 0; op < RFR_ACTION_COUNT; op++) c.seconds[op] = -1;
  c.seconds[RFR_ACTION_F] = c.seconds[RFR_ACTION_I] = c.seconds[RFR_ACTION_W] = 1;
  return c;
}

typedef struct simulation {
  const rfr_schedule *s;
  const rfr_stage_costs *costs;
  int n_costs;
} simulation;

static const rfr_stage_costs *costs_of(const simulation *q, int stage) {
  return &q->costs[q->n_costs == 1 ? 0 : stage];
}

/* A cost, 0 if none is given; the cost of B is that of I plus W. */
static double cost(const simulation *q, int op, int stage) {
  const double *seconds = costs_of(q, stage)->seconds;
  if (op == RFR_ACTION_B && seconds[op] < 0) return seconds[RFR_ACTION_I] + seconds[RFR_ACTION_W];
  return seconds[op] < 0 ? 0 : seconds[op];
}

static rfr_status check_costs(const simulation *q) {
  static const int wanted[] = {RFR_ACTION_F, RFR_ACTION_I, RFR_ACTION_W};
  if (q->n_costs != 1 && q->n_costs != q->s->stages)
    return rfi_fail(RFI_E_ARGUMENT, "n_costs is %d, but the schedule has %d stages: give one entry, or one per stage",
                    q->n_costs, q->s->stages);
  for (int i = 0; i < q->n_costs; i++) {
    const rfr_stage_costs *c = &q->costs[i];
    for (int op = 0; op < RFR_ACTION_COUNT; op++)
      if (!isfinite(c->seconds[op]))
        return rfi_fail(RFI_E_ARGUMENT, "stage %d: the cost of %s is not finite", i, rfi_action_name(op));
    if (c->activation_bytes < 0 || c->wgrad_bytes < 0 || c->gradient_bytes < 0 || c->weight_bytes < 0 ||
        c->wgrad_bytes > c->activation_bytes)
      return rfi_fail(RFI_E_ARGUMENT, "stage %d: bytes must not be negative, and wgrad_bytes at most activation_bytes",
                      i);
  }
  for (int i = 0; i < q->s->n; i++) {
    const rfr_action a = q->s->action[i];
    const double *seconds = costs_of(q, a.stage)->seconds;
    for (int k = 0; k < 3; k++)
      if (seconds[wanted[k]] < 0 &&
          (a.op == wanted[k] || (a.op == RFR_ACTION_B && seconds[a.op] < 0 && wanted[k] != RFR_ACTION_F)))
        return rfi_fail(RFI_E_ARGUMENT, "stage %d has no cost of %s", a.stage, rfi_action_name(wanted[k]));
  }
  return RFR_OK;
}

/* ---- time ---- */

/* The time that the message of action `index` needs to reach another rank. */
static double transit(const simulation *q, int index) {
  const rfr_action a = q->s->action[index];
  const bool is_forward = a.op == RFR_ACTION_F || a.op == RFR_ACTION_SEND_F;
  return cost(q, is_forward ? RFR_ACTION_SEND_F : RFR_ACTION_SEND_B, a.stage);
}

static void run(const simulation *q, double *start, double *end, double *now, rfr_rank_result *ranks) {
  const rfr_schedule *s = q->s;
  for (int k = 0; k < s->n; k++) {
    const int i = s->order[k], r = rfi_schedule_rank_of(s, i), need = rfi_schedule_need(s, i), op = s->action[i].op;
    const bool sends = op == RFR_ACTION_SEND_F || op == RFR_ACTION_SEND_B;
    const double length = sends ? 0 : cost(q, op, s->action[i].stage);
    double begin = now[r];
    if (need >= 0) {
      const double there = end[need] + (rfi_schedule_rank_of(s, need) == r ? 0 : transit(q, need));
      if (there > begin) begin = there;
    }
    start[i] = begin;
    now[r] = end[i] = begin + length;
    ranks[r].busy += length;
  }
}

/* ---- memory ---- */

/* The action that makes a microbatch's output gradient available. */
static int gradient_first(const rfr_schedule *s, int stage, int microbatch) {
  const int recv = rfi_schedule_at(s, RFR_ACTION_RECV_B, stage, microbatch);
  if (recv >= 0) return recv;
  const bool adjacent = stage + 1 < s->stages && s->rank_of[stage] == s->rank_of[stage + 1];
  return rfi_schedule_at(s, RFR_ACTION_I, adjacent ? stage + 1 : stage, microbatch);
}

/* Bytes of a rank: with all slots allocated separately, and at the peak of live bytes. */
typedef struct level {
  int64_t slots, live, most;
  bool overflow;
} level;

static void change(level *l, int64_t bytes) {
  l->overflow |= __builtin_add_overflow(l->live, bytes, &l->live);
  if (l->live > l->most) l->most = l->live;
}

/* Adds the persistent bytes of a stage and the memory of its slots. */
static void add_stage(const simulation *q, int stage, level *l, rfr_rank_result *out) {
  const rfr_stage_costs *c = costs_of(q, stage);
  int64_t slot, all;
  l->overflow |= __builtin_add_overflow(c->activation_bytes, c->gradient_bytes, &slot);
  l->overflow |= __builtin_mul_overflow(slot, (int64_t)q->s->slots[stage], &all);
  l->overflow |= __builtin_add_overflow(l->slots, all, &l->slots);
  l->overflow |= __builtin_add_overflow(l->slots, c->weight_bytes, &l->slots);
  change(l, c->weight_bytes);
  out->slots += q->s->slots[stage];
}

/* Adds the bytes that an action allocates, then frees those that it uses last; while it runs, both are live. */
static void walk_action(const simulation *q, int i, level *l) {
  const rfr_schedule *s = q->s;
  const rfr_action a = s->action[i];
  const rfr_stage_costs *c = costs_of(q, a.stage);
  const int m = a.microbatch, w = rfi_schedule_at(s, RFR_ACTION_W, a.stage, m);
  const bool is_i = i == rfi_schedule_at(s, RFR_ACTION_I, a.stage, m);
  if (a.op == RFR_ACTION_F) change(l, c->activation_bytes);
  if (s->training && i == gradient_first(s, a.stage, m)) change(l, c->gradient_bytes);
  if (is_i && a.stage > 0 && i == gradient_first(s, a.stage - 1, m))
    change(l, costs_of(q, a.stage - 1)->gradient_bytes);
  if (is_i) change(l, c->wgrad_bytes - c->activation_bytes);
  if (i == w) change(l, -c->wgrad_bytes - c->gradient_bytes);
  if (a.op == RFR_ACTION_F && !s->training) change(l, -c->activation_bytes);
}

static rfr_status walk_memory(const simulation *q, level *levels, rfr_rank_result *ranks) {
  const rfr_schedule *s = q->s;
  for (int i = 0; i < s->stages; i++) add_stage(q, i, &levels[s->rank_of[i]], &ranks[s->rank_of[i]]);
  for (int r = 0; r < s->ranks; r++) {
    int live = 0;
    for (int i = s->begin[r]; i < s->begin[r + 1]; i++) {
      const rfr_action a = s->action[i];
      if (!rfi_action_of_microbatch(a.op)) continue;
      live += i == rfi_schedule_first(s, a.stage, a.microbatch);
      if (live > ranks[r].live) ranks[r].live = live;
      walk_action(q, i, &levels[r]);
      live -= i == rfi_schedule_last(s, a.stage, a.microbatch);
    }
    if (levels[r].overflow) return rfi_fail(RFI_E_OVERFLOW, "rank %d: the bytes of its stages overflow", r);
    ranks[r].live_bytes = levels[r].most;
    ranks[r].slot_bytes = levels[r].slots;
  }
  return RFR_OK;
}

/* ---- the public function ---- */

static rfr_status simulate(const simulation *q, rfr_rank_result *ranks, double *start, double *end, double *now,
                           level *levels, rfr_schedule_result *out) {
  const rfr_schedule *s = q->s;
  run(q, start, end, now, ranks);
  RFI_TRY(walk_memory(q, levels, ranks));
  for (int r = 0; r < s->ranks; r++) {
    if (now[r] > out->makespan) out->makespan = now[r];
    out->slots += ranks[r].slots;
  }
  if (!isfinite(out->makespan)) return rfi_fail(RFI_E_OVERFLOW, "the duration of the schedule overflows");
  for (int r = 0; r < s->ranks; r++) {
    ranks[r].idle = out->makespan - ranks[r].busy;
    const double share = out->makespan > 0 ? ranks[r].idle / out->makespan : 0;
    if (share > out->bubble) out->bubble = share;
    if (ranks[r].slot_bytes > out->slot_bytes) out->slot_bytes = ranks[r].slot_bytes;
    if (ranks[r].live_bytes > out->live_bytes) out->live_bytes = ranks[r].live_bytes;
  }
  return RFR_OK;
}

rfr_status rfr_schedule_simulate(const rfr_schedule *s, const rfr_stage_costs *costs, int n_costs,
                                 rfr_schedule_result *out, rfr_rank_result *ranks, double *start, double *end) {
  const rfr_stage_costs usual = rfr_stage_costs_default();
  *out = (rfr_schedule_result){0};
  RFI_TRY(rfi_check_handle(s, "rfr_schedule"));
  const simulation q = {.s = s, .costs = costs ? costs : &usual, .n_costs = costs ? n_costs : 1};
  RFI_TRY(check_costs(&q));
  const size_t n = (size_t)s->n, r = (size_t)s->ranks;
  double *times = NULL;
  level *levels = NULL;
  rfr_rank_result *own = NULL;
  rfr_schedule_result result = {0};
  rfr_status status = RFI_ALLOC(s->ctx, sizeof *times * (2 * n + r), &times);
  if (status == RFR_OK) status = RFI_ALLOC(s->ctx, sizeof *levels * r, &levels);
  if (status == RFR_OK) status = RFI_ALLOC(s->ctx, sizeof *own * r, &own);
  if (status == RFR_OK) status = simulate(&q, own, times, times + n, times + 2 * n, levels, &result);
  if (status == RFR_OK) {
    *out = result;
    if (ranks) memcpy(ranks, own, sizeof *own * r);
    if (start) memcpy(start, times, sizeof *start * n);
    if (end) memcpy(end, times + n, sizeof *end * n);
  }
  rfi_free(s->ctx, own);
  rfi_free(s->ctx, levels);
  rfi_free(s->ctx, times);
  return status;
}
