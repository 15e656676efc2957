/* SPDX-License-Identifier: Apache-2.0
 *
 * Deadlock check for GPUs, where a message is transferred only when its receiver has reached the RECV.
 * (rfi_schedule_check assumes that senders never wait.)
 *
 * An output is sent from its slot. The slot keeps it until its gradient has arrived, so the sender does not wait. An
 * input gradient is sent from one of `buffers` buffers of the rank, which are used in rotation. This gives the rules:
 *
 *   an action   waits for the earlier actions of its rank; a SEND ends for its rank when it begins
 *   a RECV      also waits until its SEND has begun
 *   a SEND_B    also waits until the receiver has reached the RECV of the previous gradient in the same buffer
 *
 * The messages of a link are received in the order in which they are sent (rfi_schedule_check), so they do not block
 * each other. The check runs every rank as far as possible until none can continue. The sums over data-parallel ranks
 * follow the last action of a step, and no action waits for them, so they cannot be part of a cycle.
 */
#include "schedule/schedule.h"

typedef struct waits {
  const rfr_schedule *s;
  int buffers;
  int *next; /* per rank: its first action that has not begun */
  int *n;    /* per rank: the number of its SEND_B so far */
  int *sent; /* per rank and buffer: its last SEND_B */
} waits;

static int *buffer_of(const waits *w, int rank) { return &w->sent[rank * w->buffers + w->n[rank] % w->buffers]; }

/* The RECV that a SEND_B waits for; -1: none. */
static int receive_of(const waits *w, int index) {
  const rfr_schedule *s = w->s;
  const int rank = rfi_schedule_rank_of(s, index);
  if (s->action[index].op != RFR_ACTION_SEND_B || w->n[rank] < w->buffers) return -1;
  const rfr_action before = s->action[*buffer_of(w, rank)];
  return rfi_schedule_at(s, RFR_ACTION_RECV_B, before.stage - 1, before.microbatch);
}

static bool can_begin(const waits *w, int index) {
  const rfr_schedule *s = w->s;
  const int need = rfi_schedule_need(s, index), receive = receive_of(w, index);
  return (need < 0 || w->next[rfi_schedule_rank_of(s, need)] > need) &&
         (receive < 0 || w->next[rfi_schedule_rank_of(s, receive)] >= receive);
}

/* The number of actions that can begin. */
static int advance(const waits *w, int rank) {
  const int from = w->next[rank];
  for (int *i = &w->next[rank]; *i < w->s->begin[rank + 1] && can_begin(w, *i); ++*i) {
    if (w->s->action[*i].op != RFR_ACTION_SEND_B) continue;
    *buffer_of(w, rank) = *i;
    w->n[rank]++;
  }
  return w->next[rank] - from;
}

static rfr_status run_through(const waits *w) {
  const rfr_schedule *s = w->s;
  char text[RFR_ACTION_TEXT];
  int left = s->n, r = 0;
  for (int i = 0; i < s->ranks; i++) w->next[i] = s->begin[i];
  for (int n = 1; n > 0; left -= n) {
    n = 0;
    for (int i = 0; i < s->ranks; i++) n += advance(w, i);
  }
  if (left == 0) return RFR_OK;
  while (w->next[r] == s->begin[r + 1]) r++;
  return rfi_fail(RFI_E_SCHEDULE_DEADLOCK,
                  "the ranks deadlock if senders wait for receivers; rank %d stops at %s, action %d", r,
                  rfr_action_print(s->action[w->next[r]], text), w->next[r] - s->begin[r]);
}

rfr_status rfi_schedule_check_waits(const rfr_schedule *s, int buffers) {
  waits w = {.s = s, .buffers = buffers};
  const size_t ranks = (size_t)s->ranks;
  RFI_TRY(RFI_ALLOC(s->ctx, sizeof *w.next * ranks * (size_t)(2 + buffers), &w.next));
  w.n = w.next + ranks;
  w.sent = w.n + ranks;
  const rfr_status status = run_through(&w);
  rfi_free(s->ctx, w.next);
  return status;
}
