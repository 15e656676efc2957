/* SPDX-License-Identifier: Apache-2.0
 *
 * The usual schedules against published figures, closed forms and a simulation that uses only the lists: it sweeps over
 * all ranks until nothing changes, finds the inputs of an action by comparing texts of completed actions, and counts
 * microbatches in flight.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schedule/schedule.h"
#include "support/context.h"
#include "support/text.h"

static rfr_schedule *made(rfr_schedule_kind kind, int p, int m, int v, int g) {
  rfr_schedule *s;
  rfr_schedule_options o = rfr_schedule_options_default();
  o.kind = kind;
  o.ranks = p;
  o.microbatches = m;
  o.chunks = v;
  o.group = g;
  OK(rfr_schedule_generate(ctx, &o, &s));
  return s;
}

/* ---- the reference simulation ---- */

enum { STAGES = 32, BATCHES = 32, RANKS = 12 };
typedef struct plain {
  bool through;
  double makespan, busy[RANKS];
  int slots[STAGES], live[RANKS];
} plain;

/* When F, I and W of each stage and microbatch were done; 0: not yet. */
static double done[3][STAGES][BATCHES];

static bool ready(const rfr_action a, int stages, double *when) {
  *when = 0;
  if (a.op == RFR_ACTION_F) {
    if (a.stage > 0) *when = done[0][a.stage - 1][a.microbatch];
    return a.stage == 0 || *when > 0;
  }
  if (a.op == RFR_ACTION_W) return done[1][a.stage][a.microbatch] > 0;
  if (done[0][a.stage][a.microbatch] == 0) return false;
  if (a.stage + 1 < stages) *when = done[1][a.stage + 1][a.microbatch];
  return a.stage + 1 == stages || *when > 0;
}

/* F, I, W cost 1, 2 and 3. */
static plain plainly(const rfr_action *const *lists, const int *n, int ranks, int stages) {
  plain q = {.through = true};
  int at[RANKS] = {0}, in_flight[STAGES] = {0}, live[RANKS] = {0};
  double now[RANKS] = {0}, when;
  memset(done, 0, sizeof done);
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < ranks; r++)
      while (at[r] < n[r] && ready(lists[r][at[r]], stages, &when)) {
        const rfr_action a = lists[r][at[r]++];
        const double cost = a.op == RFR_ACTION_F ? 1 : a.op == RFR_ACTION_I ? 2 : a.op == RFR_ACTION_W ? 3 : 5;
        now[r] = (now[r] > when ? now[r] : when) + cost;
        q.busy[r] += cost;
        if (a.op == RFR_ACTION_F) done[0][a.stage][a.microbatch] = now[r];
        if (a.op == RFR_ACTION_I || a.op == RFR_ACTION_B) done[1][a.stage][a.microbatch] = now[r];
        if (a.op == RFR_ACTION_W || a.op == RFR_ACTION_B) done[2][a.stage][a.microbatch] = now[r];
        if (a.op == RFR_ACTION_F && ++in_flight[a.stage] > q.slots[a.stage]) q.slots[a.stage]++;
        if (a.op == RFR_ACTION_F && ++live[r] > q.live[r]) q.live[r]++;
        if (a.op == RFR_ACTION_W || a.op == RFR_ACTION_B) in_flight[a.stage]--, live[r]--;
        moved = true;
      }
  }
  for (int r = 0; r < ranks; r++) {
    if (now[r] > q.makespan) q.makespan = now[r];
    q.through &= at[r] == n[r];
  }
  return q;
}

static plain plainly_of(const rfr_schedule *s, int ranks, int stages) {
  const rfr_action *lists[RANKS];
  int n[RANKS];
  for (int r = 0; r < ranks; r++) lists[r] = rfr_schedule_actions(s, r, &n[r]);
  return plainly(lists, n, ranks, stages);
}

static void check_slots(const rfr_schedule *s) {
  for (int r = 0; r < s->ranks; r++) {
    int holder[STAGES][BATCHES];
    memset(holder, -1, sizeof holder);
    for (int i = s->begin[r]; i < s->begin[r + 1]; i++) {
      const rfr_action a = s->action[i];
      if (!rfi_action_of_microbatch(a.op)) continue;
      const int slot = rfr_schedule_slot(s, a.stage, a.microbatch);
      assert_in_range(slot, 0, rfr_schedule_slots(s, a.stage) - 1);
      int *h = &holder[a.stage][slot];
      if (i == rfi_schedule_first(s, a.stage, a.microbatch)) assert_int_equal(*h, -1), *h = a.microbatch;
      assert_int_equal(*h, a.microbatch);
      if (i == rfi_schedule_last(s, a.stage, a.microbatch)) *h = -1;
    }
  }
}

static void compare(const rfr_schedule *s) {
  rfr_stage_costs costs = rfr_stage_costs_default();
  rfr_schedule_result result;
  rfr_rank_result ranks[RANKS];
  costs.seconds[RFR_ACTION_I] = 2;
  costs.seconds[RFR_ACTION_W] = 3;
  OK(rfr_schedule_simulate(s, &costs, 1, &result, ranks, NULL, NULL));
  const plain q = plainly_of(s, s->ranks, s->stages);
  assert_true(q.through);
  assert_true(result.makespan == q.makespan);
  double most = 0;
  for (int r = 0; r < s->ranks; r++) {
    assert_true(ranks[r].busy == q.busy[r]);
    assert_int_equal(ranks[r].live, q.live[r]);
    assert_int_equal(ranks[r].live_bytes, q.live[r]); /* one byte each */
    if (q.makespan - q.busy[r] > most) most = q.makespan - q.busy[r];
  }
  assert_true(fabs(result.bubble - most / q.makespan) < 1e-12);
  for (int i = 0; i < s->stages; i++) assert_int_equal(rfr_schedule_slots(s, i), q.slots[i]);
  check_slots(s);
}

/* ---- all of them ---- */

static void check_ascending(const rfr_schedule *s) {
  for (int stage = 0; stage < s->stages; stage++)
    for (int m = 1; m < s->microbatches; m++)
      for (int op = RFR_ACTION_F; op <= RFR_ACTION_W; op++)
        assert_true(rfi_schedule_at(s, op, stage, m - 1) < rfi_schedule_at(s, op, stage, m));
}

/* With messages, the same actions must be in the same order. Messages cost nothing here, so no action may take
 * longer. */
static void check_communication(const rfr_schedule *s) {
  rfr_schedule *with, *again;
  rfr_schedule_result a, b;
  rft_text text = {0};
  OK(rfr_schedule_add_communication(s, &with));
  int messages = 0, left = 0, n = 0;
  for (int stage = 1; stage < s->stages; stage++) messages += s->rank_of[stage] != s->rank_of[stage - 1];
  for (int i = 0; i < with->n; i++) {
    const rfr_action x = with->action[i];
    if (x.op >= RFR_ACTION_SEND_F) {
      left++;
      continue;
    }
    assert_memory_equal(&x, &s->action[n], sizeof x);
    n++;
  }
  assert_int_equal(n, s->n);
  assert_int_equal(left, 4 * messages * s->microbatches);
  OK(rfr_schedule_simulate(s, NULL, 0, &a, NULL, NULL, NULL));
  OK(rfr_schedule_simulate(with, NULL, 0, &b, NULL, NULL, NULL));
  assert_true(a.makespan == b.makespan && a.bubble == b.bubble);
  OK(rfr_schedule_print(with, rft_text_add, &text));
  OK(rfr_schedule_parse(ctx, "again", text.data, text.n, &again));
  assert_int_equal(again->n, with->n);
  assert_memory_equal(again->action, with->action, sizeof *with->action * (size_t)with->n);
  check_slots(with);
  free(text.data);
  rfr_schedule_destroy(again);
  assert_int_equal(rfr_schedule_add_communication(with, &again), messages ? RFR_INVALID : RFR_OK);
  rfr_schedule_destroy(again);
  rfr_schedule_destroy(with);
}

static void check_all(rfr_schedule *s, int p, int m, int v) {
  assert_int_equal(s->ranks, p);
  assert_int_equal(s->microbatches, m);
  assert_int_equal(s->stages, p * v);
  compare(s);
  check_ascending(s);
  check_communication(s);
  rfr_schedule_destroy(s);
}

static void test_all_sizes(void **state) {
  (void)state;
  for (int p = 1; p <= 6; p++)
    for (int m = 1; m <= 9; m++) {
      check_all(made(RFR_SCHEDULE_1F1B, p, m, 0, 0), p, m, 1);
      check_all(made(RFR_SCHEDULE_ZB_V, p, m, 0, 0), p, m, 2);
      for (int v = 1; v <= 3; v++) {
        check_all(made(RFR_SCHEDULE_GPIPE, p, m, v, 0), p, m, v);
        check_all(made(RFR_SCHEDULE_INTERLEAVED, p, m, v, 0), p, m, v);
        for (int g = 0; g <= m + 1; g++)
          if (v > 1 || g == 0) check_all(made(RFR_SCHEDULE_ZB_H1, p, m, v, g), p, m, v);
        for (int g = 1; v > 1 && g <= m + 1; g++) check_all(made(RFR_SCHEDULE_INTERLEAVED, p, m, v, g), p, m, v);
      }
    }
}

/* ---- published figures ---- */

static void test_figures(void **state) {
  (void)state;
  static const struct {
    rfr_schedule_kind kind;
    int p, m, v;
    double percent; /* at equal costs, to one digit */
    int live[4];    /* of the first ranks; 0: not checked */
  } rows[] = {
      {RFR_SCHEDULE_GPIPE, 4, 8, 1, 27.3, {8, 8, 8, 8}},
      {RFR_SCHEDULE_1F1B, 4, 8, 1, 27.3, {4, 3, 2, 1}},
      {RFR_SCHEDULE_INTERLEAVED, 4, 8, 2, 15.8, {11, 9, 7, 5}},
      {RFR_SCHEDULE_INTERLEAVED, 4, 8, 4, 8.6, {0}},
      {RFR_SCHEDULE_ZB_H1, 4, 8, 1, 11.1, {4, 4, 4, 4}},
      {RFR_SCHEDULE_ZB_V, 4, 8, 2, 5.9, {8, 8, 8, 8}},
      {RFR_SCHEDULE_1F1B, 4, 16, 1, 15.8, {0}},
      {RFR_SCHEDULE_INTERLEAVED, 4, 16, 2, 8.6, {0}},
      {RFR_SCHEDULE_ZB_H1, 4, 16, 1, 5.9, {0}},
      {RFR_SCHEDULE_ZB_V, 4, 16, 2, 3.0, {0}},
      {RFR_SCHEDULE_1F1B, 8, 32, 1, 17.9, {8, 7, 6, 5}},
      {RFR_SCHEDULE_INTERLEAVED, 8, 32, 2, 9.9, {0}},
      {RFR_SCHEDULE_ZB_H1, 8, 32, 1, 6.8, {8, 8, 8, 8}},
      {RFR_SCHEDULE_ZB_V, 8, 32, 2, 3.5, {0}},
      {RFR_SCHEDULE_1F1B, 8, 16, 1, 30.4, {0}},
      {RFR_SCHEDULE_INTERLEAVED, 8, 16, 2, 17.9, {0}},
      {RFR_SCHEDULE_ZB_H1, 8, 16, 1, 12.7, {0}},
      {RFR_SCHEDULE_ZB_V, 8, 16, 2, 6.8, {0}},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_schedule *s = made(rows[i].kind, rows[i].p, rows[i].m, rows[i].v, 0);
    rfr_schedule_result result;
    rfr_rank_result ranks[RANKS];
    OK(rfr_schedule_simulate(s, NULL, 0, &result, ranks, NULL, NULL));
    if (fabs(100 * result.bubble - rows[i].percent) > 0.0501)
      fail_msg("%s: p %d, m %d, v %d: %.2f %%, wanted %.1f %%", rfr_schedule_kind_name(rows[i].kind), rows[i].p,
               rows[i].m, rows[i].v, 100 * result.bubble, rows[i].percent);
    for (int r = 0; r < 4; r++)
      if (rows[i].live[r]) assert_int_equal(ranks[r].live, rows[i].live[r]);
    rfr_schedule_destroy(s);
  }
}

/* GPipe and 1F1B take (m + p - 1) (F + B). A step is never shorter than the work of one rank, nor than one microbatch's
 * path through all ranks. */
static void test_closed_forms(void **state) {
  (void)state;
  rfr_stage_costs costs = rfr_stage_costs_default();
  rfr_schedule_result result;
  costs.seconds[RFR_ACTION_F] = 2;
  costs.seconds[RFR_ACTION_B] = 3.5;
  for (int p = 1; p <= 7; p++)
    for (int m = p; m <= 3 * p; m += p)
      for (int kind = RFR_SCHEDULE_GPIPE; kind <= RFR_SCHEDULE_INTERLEAVED; kind++)
        for (int v = 1; v <= (kind == RFR_SCHEDULE_INTERLEAVED ? 3 : 1); v++) {
          rfr_schedule *s = made(kind, p, m, v, 0);
          OK(rfr_schedule_simulate(s, &costs, 1, &result, NULL, NULL, NULL));
          assert_true(fabs(result.makespan - (m * v + p - 1) * 5.5) < 1e-9);
          assert_true(fabs(result.bubble - (p - 1) / (double)(m * v + p - 1)) < 1e-12);
          rfr_schedule_destroy(s);
        }
}

/* The example of Megatron's comments: 2 ranks, 2 chunks, 5 microbatches in groups of 3. */
static void test_groups(void **state) {
  (void)state;
  static const int wanted[] = {1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1};
  rfr_schedule *s = made(RFR_SCHEDULE_INTERLEAVED, 2, 5, 2, 3);
  int n;
  const rfr_action *a = rfr_schedule_actions(s, 0, &n);
  assert_int_equal(n, 20);
  for (int i = 0; i < n; i++) {
    assert_int_equal(a[i].stage, 2 * (abs(wanted[i]) - 1));
    assert_int_equal(a[i].op, wanted[i] > 0 ? RFR_ACTION_F : RFR_ACTION_B);
  }
  assert_int_equal(rfr_schedule_slots(s, 0), 5);
  assert_int_equal(rfr_schedule_slots(s, 2), 3);
  rfr_schedule_destroy(s);
}

/* 4 ranks, 4 chunks, 32 microbatches: the number of graphs follows from those in flight. */
static void test_slots(void **state) {
  (void)state;
  static const int first[] = {8, 8, 4, 4}, last[] = {8, 5, 4, 1};
  rfr_schedule *s = made(RFR_SCHEDULE_INTERLEAVED, 4, 32, 4, 0);
  rfr_schedule_result result;
  rfr_rank_result ranks[4];
  OK(rfr_schedule_simulate(s, NULL, 0, &result, ranks, NULL, NULL));
  for (int c = 0; c < 4; c++) {
    assert_int_equal(rfr_schedule_slots(s, 4 * c), first[c]);
    assert_int_equal(rfr_schedule_slots(s, 4 * c + 3), last[c]);
  }
  assert_int_equal(ranks[0].slots, 24);
  assert_int_equal(ranks[0].slot_bytes, 24);
  assert_int_equal(ranks[0].live, 19);
  assert_int_equal(ranks[0].live_bytes, 19);
  assert_int_equal(result.slot_bytes, 24);
  rfr_schedule_destroy(s);
}

/* ---- time and bytes by hand ---- */

static rfr_schedule *parsed(const char *text) {
  rfr_schedule *s;
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &s));
  return s;
}

static void test_times(void **state) {
  (void)state;
  /* rank 1 begins 1 + 0.5 late; the gradient needs 0.25 back */
  static const char *const texts[] = {
      "0F0 0I0 0W0 0OPT\n1F0 1I0 1W0",
      "0F0 0SEND_F0 0RECV_B0 0I0 0W0 0OPT\n1RECV_F0 1F0 1I0 1SEND_B0 1W0",
  };
  rfr_stage_costs costs[2] = {rfr_stage_costs_default(), rfr_stage_costs_default()};
  costs[0].seconds[RFR_ACTION_SEND_F] = 0.5;
  costs[1].seconds[RFR_ACTION_SEND_B] = 0.25;
  costs[0].seconds[RFR_ACTION_SEND_B] = costs[1].seconds[RFR_ACTION_SEND_F] = 100; /* no rank sends these messages */
  costs[0].seconds[RFR_ACTION_OPT] = 8;
  costs[1].seconds[RFR_ACTION_F] = 2;
  costs[1].seconds[RFR_ACTION_I] = 3;
  costs[1].seconds[RFR_ACTION_W] = 4;
  for (int k = 0; k < 2; k++) {
    rfr_schedule *s = parsed(texts[k]);
    rfr_schedule_result result;
    rfr_rank_result ranks[2];
    double start[11];
    OK(rfr_schedule_simulate(s, costs, 2, &result, ranks, start, NULL));
    assert_true(start[rfi_schedule_at(s, RFR_ACTION_F, 1, 0)] == (k ? 1.5 : 1.5));
    assert_true(start[rfi_schedule_at(s, RFR_ACTION_I, 0, 0)] == 6.75); /* 1.5 + 2 + 3 + 0.25 */
    assert_true(start[rfi_schedule_at(s, RFR_ACTION_W, 1, 0)] == 6.5);
    assert_true(result.makespan == 16.75); /* 6.75 + 1 + 1 + 8 */
    assert_true(ranks[0].busy == 11 && ranks[0].idle == 5.75);
    assert_true(ranks[1].busy == 9 && ranks[1].idle == 7.75);
    assert_true(result.bubble == 7.75 / 16.75);
    rfr_schedule_destroy(s);
  }
}

static void test_bytes(void **state) {
  (void)state;
  /* One rank, two stages; a of 100 bytes, W keeps 30, the gradient has 7; stage 1: 1000, 200, 50. */
  rfr_stage_costs costs[2] = {rfr_stage_costs_default(), rfr_stage_costs_default()};
  costs[0].activation_bytes = 100;
  costs[0].wgrad_bytes = 30;
  costs[0].gradient_bytes = 7;
  costs[0].weight_bytes = 5000;
  costs[1].activation_bytes = 1000;
  costs[1].wgrad_bytes = 200;
  costs[1].gradient_bytes = 50;
  costs[1].weight_bytes = 60000;
  static const struct {
    const char *text;
    int64_t live, slots;
  } rows[] = {
      /* 1I0: both activations, both gradients */
      {"0F0 1F0 1I0 0I0 0W0 1W0", 100 + 1000 + 50 + 7, 100 + 7 + 1000 + 50},
      /* 0F1 after 1I0: what 1W0 keeps, stage 0's gradient */
      {"0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", 1157, 1157},
      /* two in flight in stage 0, one in stage 1 until 1I1: 2 x 100 + 1000 + 200 + 2 x 50 + 2 x 7 */
      {"0F0 0F1 1F0 1I0 1F1 1I1 1W0 1W1 0B0 0B1", 200 + 1000 + 200 + 100 + 14, 2 * 107 + 2 * 1050},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_schedule *s = parsed(rows[i].text);
    rfr_schedule_result result;
    OK(rfr_schedule_simulate(s, costs, 2, &result, NULL, NULL, NULL));
    assert_int_equal(result.live_bytes, 65000 + rows[i].live);
    assert_int_equal(result.slot_bytes, 65000 + rows[i].slots);
    rfr_schedule_destroy(s);
  }
  rfr_schedule *s = parsed("0F0 0F1\n1F0 1F1"); /* nothing is saved for a backward */
  rfr_schedule_result result;
  OK(rfr_schedule_simulate(s, costs, 2, &result, NULL, NULL, NULL));
  assert_int_equal(result.live_bytes, 61000);
  rfr_schedule_destroy(s);
}

/* ---- refusals ---- */

static void test_options_refused(void **state) {
  (void)state;
  static const struct {
    int kind, p, m, v, g;
    const char *message;
  } rows[] = {
      {-1, 1, 1, 0, 0, "there is no schedule kind -1"},
      {5, 1, 1, 0, 0, "there is no schedule kind 5"},
      {RFR_SCHEDULE_GPIPE, 0, 1, 0, 0, "gpipe: ranks is 0; it must be at least 1"},
      {RFR_SCHEDULE_GPIPE, 1, 0, 0, 0, "gpipe: microbatches is 0; it must be at least 1"},
      {RFR_SCHEDULE_GPIPE, 1, 1, -1, 0, "gpipe: chunks is -1"},
      {RFR_SCHEDULE_ZB_H1, 1, 1, 2, -1, "zb-h1: group is -1"},
      {RFR_SCHEDULE_1F1B, 2, 2, 2, 0, "1f1b has 1 chunk per rank, not 2; interleaved has several"},
      {RFR_SCHEDULE_ZB_V, 2, 2, 3, 0, "zb-v has 2 chunks per rank, not 3"},
      {RFR_SCHEDULE_GPIPE, 2, 2, 2, 2, "gpipe with 2 chunks has no groups"},
      {RFR_SCHEDULE_INTERLEAVED, 2, 2, 1, 2, "interleaved with 1 chunks has no groups"},
      {RFR_SCHEDULE_ZB_V, INT32_MAX, 1, 0, 0, "are more than"},
      {RFR_SCHEDULE_GPIPE, 1, INT32_MAX, 0, 0, "are more than"},
      {RFR_SCHEDULE_INTERLEAVED, 1 << 16, 1 << 16, 1 << 16, 1, "are more than"},
      {RFR_SCHEDULE_INTERLEAVED, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, "are more than"},
  };
  rfr_schedule_options o = rfr_schedule_options_default();
  rfr_schedule *s;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    o.kind = (rfr_schedule_kind)rows[i].kind;
    o.ranks = rows[i].p;
    o.microbatches = rows[i].m;
    o.chunks = rows[i].v;
    o.group = rows[i].g;
    assert_int_equal(rfr_schedule_generate(ctx, &o, &s), RFR_INVALID);
    assert_null(s);
    if (!strstr(rfr_last_error()->message, rows[i].message))
      fail_msg("%s, wanted %s", rfr_last_error()->message, rows[i].message);
  }
  o = rfr_schedule_options_default();
  o.size = 4;
  assert_int_equal(rfr_schedule_generate(ctx, &o, &s), RFR_INVALID);
  assert_int_equal(rfr_schedule_generate(ctx, NULL, &s), RFR_INVALID);
}

static void test_costs_refused(void **state) {
  (void)state;
  rfr_schedule *s = parsed("0F0 0B0\n1F0 1I0 1W0");
  rfr_schedule_result result;
  rfr_stage_costs costs[2] = {rfr_stage_costs_default(), rfr_stage_costs_default()};
#define REFUSED(part)                                                                             \
  do {                                                                                            \
    assert_int_equal(rfr_schedule_simulate(s, costs, 2, &result, NULL, NULL, NULL), RFR_INVALID); \
    if (!strstr(rfr_last_error()->message, part)) fail_msg("%s", rfr_last_error()->message);      \
    costs[0] = costs[1] = rfr_stage_costs_default();                                              \
  } while (0)
  assert_int_equal(rfr_schedule_simulate(s, costs, 3, &result, NULL, NULL, NULL), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "n_costs is 3, but the schedule has 2 stages"));
  costs[1].seconds[RFR_ACTION_I] = -1;
  REFUSED("stage 1 has no cost of I");
  costs[0].seconds[RFR_ACTION_W] = -1;
  REFUSED("stage 0 has no cost of W");
  costs[0].seconds[RFR_ACTION_OPT] = NAN;
  REFUSED("stage 0: the cost of OPT is not finite");
  costs[1].seconds[RFR_ACTION_F] = INFINITY;
  REFUSED("stage 1: the cost of F is not finite");
  costs[1].gradient_bytes = -1;
  REFUSED("stage 1: bytes must not be negative");
  costs[1].wgrad_bytes = 2;
  REFUSED("stage 1: bytes must not be negative, and wgrad_bytes at most");
  costs[0].weight_bytes = INT64_MAX;
  REFUSED("rank 0: the bytes of its stages");
  costs[1].activation_bytes = INT64_MAX;
  costs[1].gradient_bytes = 1;
  REFUSED("rank 1: the bytes of its stages");
  costs[1].seconds[RFR_ACTION_F] = costs[1].seconds[RFR_ACTION_I] = 1e308;
  REFUSED("duration of the schedule overflows");
  costs[0].seconds[RFR_ACTION_I] = costs[0].seconds[RFR_ACTION_W] = -1;
  costs[0].seconds[RFR_ACTION_B] = 2;
  OK(rfr_schedule_simulate(s, costs, 2, &result, NULL, NULL, NULL));
  rfr_schedule_destroy(s);
}

/* Random lists must be accepted exactly if the reference simulation finishes. */
static void test_random(void **state) {
  (void)state;
  uint64_t x = 88172645463325252u;
  int taken = 0, stuck = 0;
  for (int round = 0; round < 20000; round++) {
#define DRAW(n) (int)((x ^= x << 13, x ^= x >> 7, x ^= x << 17, x >> 20) % (uint64_t)(n))
    const int ranks = 1 + DRAW(3), stages = ranks + DRAW(2), m = 1 + DRAW(3);
    rfr_action lists[3][64];
    int n[3] = {0}, rank_of[4];
    for (int i = 0; i < stages; i++) rank_of[i] = i < ranks ? i : DRAW(ranks);
    for (int i = 0; i < stages; i++)
      for (int b = 0; b < m; b++) {
        const bool split = DRAW(2) == 1;
        rfr_action *list = lists[rank_of[i]];
        int *k = &n[rank_of[i]];
        list[(*k)++] = (rfr_action){RFR_ACTION_F, i, b};
        list[(*k)++] = (rfr_action){split ? RFR_ACTION_I : RFR_ACTION_B, i, b};
        if (split) list[(*k)++] = (rfr_action){RFR_ACTION_W, i, b};
      }
    for (int r = 0; r < ranks; r++) /* a few swaps from the order F first, then I of high stages first */
      for (int pass = 0; pass < n[r]; pass++)
        for (int i = 1; i < n[r]; i++) {
          const rfr_action a = lists[r][i - 1], b = lists[r][i];
          const int ka = a.op == RFR_ACTION_F ? a.stage : a.op == RFR_ACTION_W ? 100 : 50 - a.stage;
          const int kb = b.op == RFR_ACTION_F ? b.stage : b.op == RFR_ACTION_W ? 100 : 50 - b.stage;
          if (ka > kb) lists[r][i - 1] = b, lists[r][i] = a;
        }
    for (int swaps = DRAW(9); swaps > 0; swaps--) {
      const int r = DRAW(ranks), i = DRAW(n[r]), j = DRAW(n[r]);
      const rfr_action a = lists[r][i];
      lists[r][i] = lists[r][j];
      lists[r][j] = a;
    }
    const rfr_action *pointers[] = {lists[0], lists[1], lists[2]};
    rfr_schedule *s;
    const rfr_status status = rfr_schedule_create(ctx, ranks, pointers, n, &s);
    assert_int_equal(status == RFR_OK, plainly(pointers, n, ranks, stages).through);
    if (status == RFR_OK) compare(s), check_communication(s), taken++;
    else stuck += strcmp(rfr_last_error()->slug, "schedule.deadlock") == 0;
    rfr_schedule_destroy(s);
  }
  assert_true(taken > 1000 && stuck > 200);
}

/* ---- messages that are not copied ---- */

static void test_waits(void **state) {
  static const struct {
    rfr_schedule_kind kind;
    int chunks;
  } kinds[] = {{RFR_SCHEDULE_GPIPE, 1},       {RFR_SCHEDULE_1F1B, 1},  {RFR_SCHEDULE_INTERLEAVED, 2},
               {RFR_SCHEDULE_INTERLEAVED, 3}, {RFR_SCHEDULE_ZB_H1, 1}, {RFR_SCHEDULE_ZB_H1, 2},
               {RFR_SCHEDULE_ZB_V, 2}};
  (void)state;
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
    for (int ranks = 2; ranks <= 9; ranks++)
      for (int m = 1; m <= 33; m += m < 10 ? 1 : 7) {
        rfr_schedule_options o = rfr_schedule_options_default();
        rfr_schedule *s, *with;
        o.kind = kinds[k].kind, o.chunks = kinds[k].chunks, o.ranks = ranks, o.microbatches = m;
        OK(rfr_schedule_generate(ctx, &o, &s));
        OK(rfr_schedule_add_communication(s, &with));
        for (int buffers = 1; buffers <= 3; buffers++)
          if (rfi_schedule_check_waits(with, buffers) != RFR_OK)
            fail_msg("%s, %d chunks, %d ranks, %d microbatches: %s", rfr_schedule_kind_name(o.kind), o.chunks, ranks, m,
                     rfr_last_error()->message);
        rfr_schedule_destroy(with);
        rfr_schedule_destroy(s);
      }
}

/* Rank 1 has stages 1 and 4. Rank 3 receives the gradient of stage 4, microbatch 1, only after it has received
 * microbatch 2, which rank 0 sends after it has received the gradient of microbatch 0. With one buffer rank 1 cannot
 * send that. */
static void test_waits_in_a_cycle(void **state) {
  static const char stuck[] =
      "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2\n"
      "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 4RECV_F0 4F0 4B0 4SEND_B0 4RECV_F1 4F1 4B1 4SEND_B1 1RECV_B0 1B0 "
      "1SEND_B0 1RECV_F2 1F2 1SEND_F2 4RECV_F2 4F2 4B2 4SEND_B2 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2\n"
      "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1 2B1 2SEND_B1 "
      "2RECV_B2 2B2 2SEND_B2\n"
      "3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1 3RECV_B0 3B0 3SEND_B0 3RECV_F2 3F2 3SEND_F2 3RECV_B1 3B1 3SEND_B1 "
      "3RECV_B2 3B2 3SEND_B2\n";
  rfr_schedule *s;
  (void)state;
  OK(rfr_schedule_parse(ctx, "test", stuck, sizeof stuck - 1, &s));
  OK(rfi_schedule_check_waits(s, 2));
  assert_int_equal(rfi_schedule_check_waits(s, 1), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "schedule.deadlock");
  if (!strstr(rfr_last_error()->message, "rank 0 stops at 0RECV_B0, action 4"))
    fail_msg("it says: %s", rfr_last_error()->message);
  rfr_schedule_destroy(s);
}

/* ---- failed allocations ---- */

static rfr_status whole_life(const char *text, const char *order) {
  rfr_schedule *s = NULL, *with = NULL;
  rfr_schedule_result result;
  rfr_schedule_options o = rfr_schedule_options_default();
  o.kind = RFR_SCHEDULE_ZB_V;
  o.ranks = 3;
  o.microbatches = 40;
  rfr_status status = rfr_schedule_generate(ctx, &o, &s);
  if (status == RFR_OK) status = rfr_schedule_add_communication(s, &with);
  if (status == RFR_OK) status = rfr_schedule_simulate(with, NULL, 0, &result, NULL, NULL, NULL);
  assert_true(status == RFR_OK || (!s && !with) || (s && !with) || result.makespan == 0);
  rfr_schedule_destroy(with);
  rfr_schedule_destroy(s);
  if (status == RFR_OK) {
    status = rfr_schedule_parse(ctx, "test", text, strlen(text), &s);
    assert_true((status == RFR_OK) == (s != NULL));
    rfr_schedule_destroy(s);
  }
  if (status == RFR_OK) {
    status = rfr_schedule_parse_order(ctx, "test", order, strlen(order), (const int[]){2}, 1, &s);
    assert_true((status == RFR_OK) == (s != NULL));
    rfr_schedule_destroy(s);
  }
  if (status == RFR_OK) {
    status = rfr_schedule_create(ctx, 1, (const rfr_action *const[]){&(const rfr_action){0}}, (const int[]){1}, &s);
    assert_true((status == RFR_OK) == (s != NULL));
    rfr_schedule_destroy(s);
  }
  return status;
}

static void test_no_memory(void **state) {
  (void)state;
  const int64_t before = rfr_ctx_get_stats(ctx).live_blocks;
  int failed = 0;
  for (int64_t k = 1;; k++) {
    rfr_ctx_fail_alloc(ctx, k);
    const rfr_status status = whole_life("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", "1,2,-2,-1");
    rfr_ctx_fail_alloc(ctx, 0);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, before);
    if (status == RFR_OK) break;
    assert_int_equal(status, RFR_NO_MEMORY);
    assert_string_equal(rfr_last_error()->slug, "memory.alloc");
    failed++;
  }
  assert_true(failed > 30);
}

/* ---- large ---- */

static void test_large(void **state) {
  (void)state;
  rfr_schedule *s = made(RFR_SCHEDULE_ZB_H1, 64, 512, 0, 0), *with;
  rfr_stage_costs *costs = calloc(64, sizeof *costs);
  rfr_rank_result ranks[64];
  rfr_schedule_result result;
  for (int i = 0; i < 64; i++) {
    costs[i] = rfr_stage_costs_default();
    costs[i].seconds[RFR_ACTION_SEND_F] = costs[i].seconds[RFR_ACTION_SEND_B] = 0.0625;
    costs[i].activation_bytes = 1000;
    costs[i].weight_bytes = i;
  }
  OK(rfr_schedule_add_communication(s, &with));
  assert_int_equal(with->n, 64 * 512 * 3 + 63 * 512 * 4);
  OK(rfr_schedule_simulate(with, costs, 64, &result, ranks, NULL, NULL));
  for (int r = 0; r < 64; r++) assert_int_equal(ranks[r].slot_bytes, 1000 * ranks[r].slots + r);
  assert_true(result.bubble > 0.03 && result.bubble < 0.2);
  free(costs);
  rfr_schedule_destroy(with);
  rfr_schedule_destroy(s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_all_sizes), rft_context_test(test_figures),         rft_context_test(test_closed_forms),
      rft_context_test(test_groups),    rft_context_test(test_slots),           rft_context_test(test_times),
      rft_context_test(test_bytes),     rft_context_test(test_waits),           rft_context_test(test_waits_in_a_cycle),
      rft_context_test(test_random),    rft_context_test(test_options_refused), rft_context_test(test_costs_refused),
      rft_context_test(test_large),     rft_context_test(test_no_memory),
  };
  return cmocka_run_group_tests_name("generators", tests, NULL, NULL);
}
