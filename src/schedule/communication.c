/* SPDX-License-Identifier: Apache-2.0
 *
 * Adds SEND and RECV: each message is sent right after the action that produces it, and received right before the
 * action that reads it. If one rank sends several kinds of message to another, the reader may need a later message
 * first. The channel keeps their order, so the earlier messages are received with it. This adds no wait, because they
 * were sent earlier.
 */
#include "schedule/schedule.h"

/* Whether an action produces a message, and for which rank. */
static bool sends(const rfr_schedule *s, int index, int *op, int *to) {
  const rfr_action a = s->action[index];
  const int other = a.op == RFR_ACTION_F ? a.stage + 1 : a.stage - 1;
  if (a.op != RFR_ACTION_F && a.op != RFR_ACTION_I && a.op != RFR_ACTION_B) return false;
  if (other < 0 || other >= s->stages || s->rank_of[other] == s->rank_of[a.stage]) return false;
  *op = a.op == RFR_ACTION_F ? RFR_ACTION_SEND_F : RFR_ACTION_SEND_B;
  *to = s->rank_of[other];
  return true;
}

/* before[index]: the previous message to the same rank; -1: none. */
static rfr_status chain(const rfr_schedule *s, int *before) {
  int *newest, op, to;
  RFI_TRY(RFI_ALLOC(s->ctx, sizeof *newest * (size_t)s->ranks, &newest));
  for (int i = 0; i < s->ranks; i++) newest[i] = -1;
  for (int i = 0; i < s->n; i++) {
    if (!sends(s, i, &op, &to)) continue;
    const bool ours = newest[to] >= 0 && rfi_schedule_rank_of(s, newest[to]) == rfi_schedule_rank_of(s, i);
    before[i] = ours ? newest[to] : -1;
    newest[to] = i;
  }
  rfi_free(s->ctx, newest);
  return RFR_OK;
}

/* Receives the message that action `made` sends, and the earlier ones before it. taken[i]: 1 + the next message in the
 * chain, or -1 once it is received. */
static rfr_status receive(const rfr_schedule *s, const int *before, int *taken, int made, rfr_schedule *out) {
  int i = made;
  taken[made] = 0;
  while (before[i] >= 0 && taken[before[i]] >= 0) {
    taken[before[i]] = i + 1;
    i = before[i];
  }
  for (int next; i >= 0; i = next) {
    const rfr_action a = s->action[i];
    next = taken[i] - 1;
    taken[i] = -1;
    if (a.op == RFR_ACTION_F) RFI_TRY(rfi_schedule_add(out, RFR_ACTION_RECV_F, a.stage + 1, a.microbatch));
    else RFI_TRY(rfi_schedule_add(out, RFR_ACTION_RECV_B, a.stage - 1, a.microbatch));
  }
  return RFR_OK;
}

rfr_status rfr_schedule_add_communication(const rfr_schedule *s, rfr_schedule **out) {
  rfr_status status = RFR_OK;
  rfr_schedule *made = NULL;
  int *before = NULL, *taken, op, to;
  *out = NULL;
  RFI_TRY(rfi_check_handle(s, "rfr_schedule"));
  if (s->communication) return rfi_fail(RFI_E_ARGUMENT, "the schedule has SEND and RECV already");
  RFI_TRY(RFI_ALLOC(s->ctx, sizeof *before * 2 * (size_t)s->n, &before));
  taken = before + s->n;
  status = chain(s, before);
  if (status == RFR_OK) status = rfi_schedule_open(s->ctx, "", &made);
  for (int r = 0; status == RFR_OK && r < s->ranks; r++) {
    status = rfi_schedule_rank(made, 0);
    for (int i = s->begin[r]; status == RFR_OK && i < s->begin[r + 1]; i++) {
      const rfr_action a = s->action[i];
      const int need = rfi_schedule_need(s, i);
      if (need >= 0 && rfi_schedule_rank_of(s, need) != r && taken[need] >= 0)
        status = receive(s, before, taken, need, made);
      if (status == RFR_OK) status = rfi_schedule_add(made, a.op, a.stage, a.microbatch);
      if (status == RFR_OK && sends(s, i, &op, &to)) status = rfi_schedule_add(made, op, a.stage, a.microbatch);
    }
  }
  rfi_free(s->ctx, before);
  if (status == RFR_OK) status = rfi_schedule_close(&made);
  else rfr_schedule_destroy(made);
  if (status != RFR_OK) return status;
  for (int i = 0; i < s->stages; i++) made->layers[i] = s->layers[i];
  *out = made;
  return RFR_OK;
}
