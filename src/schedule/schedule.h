/* SPDX-License-Identifier: Apache-2.0
 *
 * The internal interface of schedules. A generator or parser fills `action` and `begin` through rfi_schedule_open,
 * _rank and _add, and ends with rfi_schedule_close, which checks everything and derives the rest; no other call returns
 * a schedule to users. Actions are numbered across ranks, rank after rank: `index` is this number, `position` counts
 * within a rank.
 */
#ifndef RFI_SCHEDULE_H
#define RFI_SCHEDULE_H

#include "base/arena.h"
#include "base/base.h"
#include "refrain/schedule.h"

struct rfr_schedule {
  rfr_ctx *ctx;
  rfi_arena *arena;
  int ranks, stages, microbatches;
  bool training, communication;

  int n, capacity;
  rfr_action *action;
  int n_begin, begin_capacity, line_capacity;
  int *begin; /* [ranks + 1]: index of a rank's first action */

  const char *file; /* for error messages during creation; "": none */
  int *line;        /* [ranks]: in that file; 0: none */

  int *rank_of; /* [stages] */
  int *layers;  /* [stages] */
  int *
      /* [stages * microbatches]: index of an action, or -1; NULL for actions of a full stage. For a B, I and W are the
       * B */
      at[RFR_ACTION_COUNT];
  int *order; /* all actions, each after those on which it depends */
  int *slots; /* [stages] */
  int *slot;  /* [stages * microbatches] */
};

/* ---- creation ---- */

/* An empty schedule; `file` is copied and may be "". */
rfr_status rfi_schedule_open(rfr_ctx *ctx, const char *file, rfr_schedule **out);
/* Begins the next rank's list; `line` is its line in the file, or 0. */
rfr_status rfi_schedule_rank(rfr_schedule *s, int line);
rfr_status rfi_schedule_add(rfr_schedule *s, int op, int stage, int microbatch);
/* Checks the actions and derives the other members. On failure destroys the schedule and sets *s to NULL. */
rfr_status rfi_schedule_close(rfr_schedule **s);

/* The steps of rfi_schedule_close. check.c: counts and order of the actions; sets at, rank_of, order. slots.c:
 * slots. */
rfr_status rfi_schedule_check(rfr_schedule *s);
rfr_status rfi_schedule_color(rfr_schedule *s);

/* ---- queries ---- */

static inline bool rfi_action_of_microbatch(int op) {
  return op != RFR_ACTION_OPT && op != RFR_ACTION_UNSHARD && op != RFR_ACTION_RESHARD && op != RFR_ACTION_REDUCE;
}
const char *rfi_action_name(int op);
/* Index of an action of a microbatch; -1: no such action or stage. */
static inline int rfi_schedule_at(const rfr_schedule *s, int op, int stage, int microbatch) {
  return stage < 0 || stage >= s->stages ? -1 : s->at[op][(size_t)stage * (size_t)s->microbatches + (size_t)microbatch];
}
/* The rank of an action. */
static inline int rfi_schedule_rank_of(const rfr_schedule *s, int index) { return s->rank_of[s->action[index].stage]; }
/* The only action on which an action depends besides the earlier ones of its rank; -1: none. */
int rfi_schedule_need(const rfr_schedule *s, int index);
/* The window of a microbatch in a stage: indices of its first and last action. */
int rfi_schedule_first(const rfr_schedule *s, int stage, int microbatch);
int rfi_schedule_last(const rfr_schedule *s, int stage, int microbatch);
/* Checks that the ranks do not deadlock if senders wait for their receivers, as between GPUs (waits.c). `buffers`: the
 * number of buffers of each rank for gradients that it sends, at least 1. Errors: schedule.deadlock. */
rfr_status rfi_schedule_check_waits(const rfr_schedule *s, int buffers);

#endif
