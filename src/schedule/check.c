/* SPDX-License-Identifier: Apache-2.0
 *
 * The validator. It first counts actions, so that later passes can look up an action by (op, stage, microbatch): the
 * tables are bounded by the number of actions, also for a hostile list. Then it checks the order within each rank. Last
 * it runs the ranks side by side, each waiting for the action on another rank that its next action needs. Either all
 * ranks finish, which gives the order that the simulator uses, or some wait in a cycle, which the error names. All
 * passes are linear in the number of actions.
 */
#include <stdio.h>
#include <string.h>

#include "schedule/schedule.h"

/* ---- errors with their location ---- */

static int rank_at(const rfr_schedule *s, int index) {
  int r = 0;
  while (s->begin[r + 1] <= index) r++;
  return r;
}

/* "rank 1, action 3 (0I2)" */
enum { PLACE = 96 };
static const char *place(const rfr_schedule *s, int index, char *out) {
  char text[RFR_ACTION_TEXT];
  const int r = rank_at(s, index);
  rfi_snprintf(out, PLACE, "rank %d, action %d (%s)", r, index - s->begin[r], rfr_action_print(s->action[index], text));
  return out;
}

static rfr_status bad(const rfr_schedule *s, rfi_error error, int index, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static rfr_status bad(const rfr_schedule *s, rfi_error error, int index, const char *format, ...) {
  char what[512], where[PLACE];
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(what, sizeof what, format, args);
  va_end(args);
  return rfi_fail_at(error, s->file, s->line[rank_at(s, index)], "%s: %s", place(s, index, where), what);
}

/* ---- counts ---- */

static rfr_status check_field(const rfr_schedule *s, int rank, int index) {
  const rfr_action a = s->action[index];
  if (a.op < 0 || a.op >= RFR_ACTION_COUNT)
    return rfi_fail_at(RFI_E_SCHEDULE_ACTION, s->file, s->line[rank], "rank %d, action %d: there is no op %d", rank,
                       index - s->begin[rank], a.op);
  if (a.stage < 0) return bad(s, RFI_E_SCHEDULE_ACTION, index, "there is no stage %d", a.stage);
  if (rfi_action_of_microbatch(a.op)) {
    if (a.microbatch < 0) return bad(s, RFI_E_SCHEDULE_ACTION, index, "there is no microbatch %d", a.microbatch);
  } else if (a.microbatch != -1) {
    return bad(s, RFI_E_SCHEDULE_ACTION, index, "microbatch is %d, but the op is for the stage: it must be -1",
               a.microbatch);
  }
  return RFR_OK;
}

static rfr_status check_fields(rfr_schedule *s) {
  int most_stage = -1, most_microbatch = -1;
  for (int r = 0; r < s->ranks; r++) {
    if (s->begin[r] == s->begin[r + 1])
      return rfi_fail_at(RFI_E_SCHEDULE_COUNT, s->file, s->line[r], "rank %d has no action", r);
    for (int i = s->begin[r]; i < s->begin[r + 1]; i++) {
      RFI_TRY(check_field(s, r, i));
      if (s->action[i].stage > most_stage) most_stage = s->action[i].stage;
      if (s->action[i].microbatch > most_microbatch) most_microbatch = s->action[i].microbatch;
    }
  }
  const int64_t forwards = ((int64_t)most_stage + 1) * ((int64_t)most_microbatch + 1);
  if (forwards < 1) return rfi_fail_at(RFI_E_SCHEDULE_COUNT, s->file, 0, "there is no action of a microbatch");
  if (forwards > s->n)
    return rfi_fail_at(RFI_E_SCHEDULE_COUNT, s->file, 0,
                       "stages 0 to %d and microbatches 0 to %d need %lld forwards, but there are %d actions in all",
                       most_stage, most_microbatch, (long long)forwards, s->n);
  s->stages = most_stage + 1;
  s->microbatches = most_microbatch + 1;
  return RFR_OK;
}

static rfr_status make_tables(rfr_schedule *s) {
  const size_t pairs = (size_t)s->stages * (size_t)s->microbatches;
  s->rank_of = rfi_arena_alloc(s->arena, sizeof *s->rank_of * (size_t)s->stages);
  s->layers = rfi_arena_alloc(s->arena, sizeof *s->layers * (size_t)s->stages);
  s->order = rfi_arena_alloc(s->arena, sizeof *s->order * (size_t)s->n);
  if (!s->rank_of || !s->layers || !s->order) return RFR_NO_MEMORY;
  for (int i = 0; i < s->stages; i++) s->rank_of[i] = -1, s->layers[i] = 1;
  for (int op = 0; op < RFR_ACTION_COUNT; op++) {
    if (!rfi_action_of_microbatch(op)) continue;
    s->at[op] = rfi_arena_alloc(s->arena, sizeof *s->at[op] * pairs);
    if (!s->at[op]) return RFR_NO_MEMORY;
    memset(s->at[op], -1, sizeof *s->at[op] * pairs);
  }
  return RFR_OK;
}

static rfr_status enter(rfr_schedule *s, int op, int index) {
  char where[PLACE];
  const rfr_action a = s->action[index];
  int *at = &s->at[op][(size_t)a.stage * (size_t)s->microbatches + (size_t)a.microbatch];
  if (*at >= 0)
    return bad(s, RFI_E_SCHEDULE_COUNT, index, "%d%s%d was done before, by %s", a.stage, rfi_action_name(op),
               a.microbatch, place(s, *at, where));
  *at = index;
  return RFR_OK;
}

static rfr_status enter_all(rfr_schedule *s) {
  for (int r = 0; r < s->ranks; r++)
    for (int i = s->begin[r]; i < s->begin[r + 1]; i++) {
      const rfr_action a = s->action[i];
      if (s->rank_of[a.stage] < 0) s->rank_of[a.stage] = r;
      if (s->rank_of[a.stage] != r)
        return bad(s, RFI_E_SCHEDULE_ACTION, i, "stage %d lies on rank %d, as its first action says", a.stage,
                   s->rank_of[a.stage]);
      s->training |= a.op != RFR_ACTION_F && a.op != RFR_ACTION_SEND_F && a.op != RFR_ACTION_RECV_F &&
                     a.op != RFR_ACTION_UNSHARD && a.op != RFR_ACTION_RESHARD;
      s->communication |= a.op >= RFR_ACTION_SEND_F;
      if (!rfi_action_of_microbatch(a.op)) continue;
      if (a.op == RFR_ACTION_B) {
        RFI_TRY(enter(s, RFR_ACTION_I, i));
        RFI_TRY(enter(s, RFR_ACTION_W, i));
      }
      RFI_TRY(enter(s, a.op, i));
    }
  return RFR_OK;
}

static rfr_status check_counts(const rfr_schedule *s) {
  static const int wanted[] = {RFR_ACTION_F, RFR_ACTION_I, RFR_ACTION_W};
  for (int stage = 0; stage < s->stages; stage++)
    for (int m = 0; m < s->microbatches; m++)
      for (int k = 0; k < (s->training ? 3 : 1); k++) {
        if (rfi_schedule_at(s, wanted[k], stage, m) >= 0) continue;
        int count = 0;
        for (int other = 0; other < s->microbatches; other++) count += rfi_schedule_at(s, wanted[k], stage, other) >= 0;
        const int r = s->rank_of[stage];
        return rfi_fail_at(RFI_E_SCHEDULE_COUNT, s->file, r < 0 ? 0 : s->line[r],
                           "%d%s%d is missing: stage %d has %d of its %d %s", stage, rfi_action_name(wanted[k]), m,
                           stage, count, s->microbatches, k == 0 ? "forwards" : "backwards (B, or I and W)");
      }
  return RFR_OK;
}

/* ---- order within a rank ---- */

/* If both of these actions of one rank exist, `later` must come after `sooner`. */
static rfr_status require_after(const rfr_schedule *s, int later, int sooner) {
  char where[PLACE];
  if (later < 0 || sooner < later) return RFR_OK;
  return bad(s, RFI_E_SCHEDULE_ORDER, later, "comes before %s, which it needs", place(s, sooner, where));
}

/* A message connects two actions on two ranks: `send` of `stage` and `recv` of `other`. */
static rfr_status check_message(const rfr_schedule *s, int send, int stage, int recv, int other, int m) {
  const int from = rfi_schedule_at(s, send, stage, m), to = rfi_schedule_at(s, recv, other, m);
  if (from < 0 && to < 0) return RFR_OK;
  if (stage < 0 || stage >= s->stages || other < 0 || other >= s->stages)
    return bad(s, RFI_E_SCHEDULE_ACTION, from < 0 ? to : from, "there is no stage on the other end");
  if (s->rank_of[stage] == s->rank_of[other])
    return bad(s, RFI_E_SCHEDULE_ACTION, from < 0 ? to : from, "stages %d and %d lie on one rank: nothing is sent",
               stage, other);
  if (from < 0) return bad(s, RFI_E_SCHEDULE_COUNT, to, "%d%s%d is missing", stage, rfi_action_name(send), m);
  if (to < 0) return bad(s, RFI_E_SCHEDULE_COUNT, from, "%d%s%d is missing", other, rfi_action_name(recv), m);
  return RFR_OK;
}

static rfr_status check_places(const rfr_schedule *s) {
  for (int stage = 0; stage <= s->stages;
       stage++) /* one more, because no rank sends to the last stage in the backward direction */
    for (int m = 0; m < s->microbatches; m++) {
      RFI_TRY(check_message(s, RFR_ACTION_SEND_F, stage - 1, RFR_ACTION_RECV_F, stage, m));
      RFI_TRY(check_message(s, RFR_ACTION_SEND_B, stage, RFR_ACTION_RECV_B, stage - 1, m));
    }
  for (int stage = 0; stage < s->stages; stage++)
    for (int m = 0; m < s->microbatches; m++) {
      const int f = rfi_schedule_at(s, RFR_ACTION_F, stage, m), i = rfi_schedule_at(s, RFR_ACTION_I, stage, m),
                w = rfi_schedule_at(s, RFR_ACTION_W, stage, m),
                recv_b = rfi_schedule_at(s, RFR_ACTION_RECV_B, stage, m);
      RFI_TRY(require_after(s, f, rfi_schedule_at(s, RFR_ACTION_RECV_F, stage, m)));
      RFI_TRY(require_after(s, rfi_schedule_at(s, RFR_ACTION_SEND_F, stage, m), f));
      RFI_TRY(require_after(s, i, f));
      RFI_TRY(require_after(s, recv_b, f));
      RFI_TRY(require_after(s, i, recv_b));
      if (w != i) RFI_TRY(require_after(s, w, i));
      RFI_TRY(require_after(s, rfi_schedule_at(s, RFR_ACTION_SEND_B, stage, m), i));
      if (stage + 1 == s->stages || s->rank_of[stage] != s->rank_of[stage + 1]) continue;
      RFI_TRY(require_after(s, rfi_schedule_at(s, RFR_ACTION_F, stage + 1, m), f));
      RFI_TRY(require_after(s, i, rfi_schedule_at(s, RFR_ACTION_I, stage + 1, m)));
    }
  return RFR_OK;
}

/* Actions of a full stage: weights must be gathered before they are read; OPT must follow all gradient sums. */
typedef struct stage_state {
  bool gathers, gathered;
  int last_w, last_reduce, step; /* indices; -1 */
} stage_state;

static rfr_status check_action(const rfr_schedule *s, stage_state *state, int i) {
  const rfr_action a = s->action[i];
  char where[PLACE];
  switch (a.op) {
    case RFR_ACTION_UNSHARD:
      if (state->gathered) return bad(s, RFI_E_SCHEDULE_ORDER, i, "the stage's weights are gathered already");
      state->gathered = true;
      break;
    case RFR_ACTION_RESHARD:
      if (!state->gathered) return bad(s, RFI_E_SCHEDULE_ORDER, i, "the stage's weights are not gathered here");
      state->gathered = false;
      break;
    case RFR_ACTION_REDUCE:
      if (state->last_w < 0) return bad(s, RFI_E_SCHEDULE_ORDER, i, "no W of the stage comes before it");
      state->last_reduce = i;
      break;
    case RFR_ACTION_OPT:
      if (state->step >= 0)
        return bad(s, RFI_E_SCHEDULE_COUNT, i, "was done before, by %s", place(s, state->step, where));
      state->step = i;
      return RFR_OK;
    case RFR_ACTION_W: state->last_w = i; break;
    case RFR_ACTION_B: state->last_w = i; /* fall through */
    case RFR_ACTION_F:
    case RFR_ACTION_I:
      if (state->gathers && !state->gathered)
        return bad(s, RFI_E_SCHEDULE_ORDER, i, "the stage's weights are not gathered here; put %dUNSHARD before",
                   a.stage);
      break;
    default: return RFR_OK;
  }
  if (state->step >= 0 && a.op != RFR_ACTION_UNSHARD && a.op != RFR_ACTION_RESHARD)
    return bad(s, RFI_E_SCHEDULE_ORDER, i, "is after %s", place(s, state->step, where));
  return RFR_OK;
}

static rfr_status check_stages(const rfr_schedule *s) {
  stage_state *states;
  rfr_status status = RFI_ALLOC(s->ctx, sizeof *states * (size_t)s->stages, &states);
  if (status != RFR_OK) return status;
  for (int i = 0; i < s->stages; i++) states[i] = (stage_state){.last_w = -1, .last_reduce = -1, .step = -1};
  for (int i = 0; i < s->n; i++)
    states[s->action[i].stage].gathers |=
        s->action[i].op == RFR_ACTION_UNSHARD || s->action[i].op == RFR_ACTION_RESHARD;
  for (int i = 0; status == RFR_OK && i < s->n; i++) status = check_action(s, &states[s->action[i].stage], i);
  for (int i = 0; status == RFR_OK && i < s->stages; i++)
    if (states[i].last_reduce >= 0) status = require_after(s, states[i].last_reduce, states[i].last_w);
  rfi_free(s->ctx, states);
  return status;
}

/* Messages between two ranks are received in the order in which they were sent: one channel per direction. */
static rfr_status check_channels(const rfr_schedule *s) {
  int *newest = NULL; /* by sending rank: the message received last; only valid for the current receiver */
  char where[PLACE];
  rfr_status status = RFI_ALLOC(s->ctx, sizeof *newest * (size_t)s->ranks * 2, &newest);
  if (status != RFR_OK) return status;
  int *of = newest + s->ranks; /* the receiving rank + 1 */
  for (int r = 0; r < s->ranks && status == RFR_OK; r++)
    for (int i = s->begin[r]; i < s->begin[r + 1] && status == RFR_OK; i++) {
      const rfr_action a = s->action[i];
      if (a.op != RFR_ACTION_RECV_F && a.op != RFR_ACTION_RECV_B) continue;
      const int send = a.op == RFR_ACTION_RECV_F ? rfi_schedule_at(s, RFR_ACTION_SEND_F, a.stage - 1, a.microbatch)
                                                 : rfi_schedule_at(s, RFR_ACTION_SEND_B, a.stage + 1, a.microbatch);
      const int from = rfi_schedule_rank_of(s, send);
      if (of[from] == r + 1 && newest[from] > send)
        status = bad(s, RFI_E_SCHEDULE_ORDER, i,
                     "receives a message that was sent before the last one received from the same rank, by %s",
                     place(s, newest[from], where));
      of[from] = r + 1;
      newest[from] = send;
    }
  rfi_free(s->ctx, newest);
  return status;
}

/* ---- across ranks ---- */

int rfi_schedule_need(const rfr_schedule *s, int index) {
  const rfr_action a = s->action[index];
  switch (a.op) {
    case RFR_ACTION_F:
      if (rfi_schedule_at(s, RFR_ACTION_RECV_F, a.stage, a.microbatch) >= 0) return -1;
      return rfi_schedule_at(s, RFR_ACTION_F, a.stage - 1, a.microbatch);
    case RFR_ACTION_I:
    case RFR_ACTION_B:
      if (rfi_schedule_at(s, RFR_ACTION_RECV_B, a.stage, a.microbatch) >= 0) return -1;
      return rfi_schedule_at(s, RFR_ACTION_I, a.stage + 1, a.microbatch);
    case RFR_ACTION_RECV_F: return rfi_schedule_at(s, RFR_ACTION_SEND_F, a.stage - 1, a.microbatch);
    case RFR_ACTION_RECV_B: return rfi_schedule_at(s, RFR_ACTION_SEND_B, a.stage + 1, a.microbatch);
    default: return -1;
  }
}

/* Reports the cycle in which some ranks wait. next[r]: the action at which rank r has stopped. */
static rfr_status deadlock(const rfr_schedule *s, const int *next) {
  enum { SHOWN = 6 };
  int r = 0, length = 1;
  while (next[r] == s->begin[r + 1]) r++;
  for (int i = 0; i < s->ranks; i++) r = rfi_schedule_rank_of(s, rfi_schedule_need(s, next[r])); /* reach the cycle */
  const int first = r;
  char text[1024] = "", where[PLACE], want[RFR_ACTION_TEXT];
  size_t n = 0;
  do {
    const int need = rfi_schedule_need(s, next[r]);
    if (length <= SHOWN && n < sizeof text)
      n += (size_t)rfi_snprintf(text + n, sizeof text - n, "%s%s waits for %s", length > 1 ? " -> " : "",
                                place(s, next[r], where), rfr_action_print(s->action[need], want));
    r = rfi_schedule_rank_of(s, need);
  } while (r != first && ++length);
  if (length > SHOWN && n < sizeof text) rfi_snprintf(text + n, sizeof text - n, " -> %d more", length - SHOWN);
  return rfi_fail_at(RFI_E_SCHEDULE_DEADLOCK, s->file, s->line[first], "%d ranks wait for each other: %s -> rank %d",
                     length, text, first);
}

/* Runs every rank as far as possible. The action for which a stopped rank waits resumes it. */
static rfr_status run_through(rfr_schedule *s) {
  int *next = NULL;
  const size_t ranks = (size_t)s->ranks, actions = (size_t)s->n;
  RFI_TRY(RFI_ALLOC(s->ctx, sizeof *next * (2 * ranks + actions), &next));
  int *ready = next + ranks, *waiter = ready + ranks; /* waiter[index]: rank + 1; at most one rank waits for it */
  bool *done = NULL;
  rfr_status status = RFI_ALLOC(s->ctx, sizeof *done * actions, &done);
  int n_ready = 0, n_done = 0;
  for (int r = s->ranks - 1; status == RFR_OK && r >= 0; r--) {
    next[r] = s->begin[r];
    ready[n_ready++] = r;
  }
  while (status == RFR_OK && n_ready > 0) {
    const int r = ready[--n_ready];
    for (; next[r] < s->begin[r + 1]; next[r]++) {
      const int index = next[r], need = rfi_schedule_need(s, index);
      if (need >= 0 && !done[need]) {
        waiter[need] = r + 1;
        break;
      }
      done[index] = true;
      s->order[n_done++] = index;
      if (waiter[index]) ready[n_ready++] = waiter[index] - 1;
    }
  }
  if (status == RFR_OK && n_done < s->n) status = deadlock(s, next);
  rfi_free(s->ctx, done);
  rfi_free(s->ctx, next);
  return status;
}

rfr_status rfi_schedule_check(rfr_schedule *s) {
  RFI_TRY(check_fields(s));
  RFI_TRY(make_tables(s));
  RFI_TRY(enter_all(s));
  RFI_TRY(check_counts(s));
  RFI_TRY(check_places(s));
  RFI_TRY(check_stages(s));
  RFI_TRY(check_channels(s));
  return run_through(s);
}
