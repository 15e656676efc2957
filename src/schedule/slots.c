/* SPDX-License-Identifier: Apache-2.0
 *
 * Slots: the windows of a stage's microbatches are intervals of one list. A window takes any free slot when it begins,
 * and a new slot only if none is free, so a stage has exactly as many slots as microbatches in flight. The slot that
 * was freed last is taken first, because its bytes are most likely still in the cache.
 */
#include "schedule/schedule.h"

int rfi_schedule_first(const rfr_schedule *s, int stage, int microbatch) {
  const int recv = rfi_schedule_at(s, RFR_ACTION_RECV_F, stage, microbatch);
  return recv >= 0 ? recv : rfi_schedule_at(s, RFR_ACTION_F, stage, microbatch); /* a RECV_F comes before its F */
}

int rfi_schedule_last(const rfr_schedule *s, int stage, int microbatch) {
  static const int ends[] = {RFR_ACTION_I, RFR_ACTION_W, RFR_ACTION_SEND_F, RFR_ACTION_SEND_B};
  int last = rfi_schedule_at(s, RFR_ACTION_F, stage, microbatch);
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    const int index = rfi_schedule_at(s, ends[i], stage, microbatch);
    if (index > last) last = index;
  }
  return last;
}

rfr_status rfi_schedule_color(rfr_schedule *s) {
  const size_t pairs = (size_t)s->stages * (size_t)s->microbatches;
  s->slots = rfi_arena_alloc(s->arena, sizeof *s->slots * (size_t)s->stages);
  s->slot = rfi_arena_alloc(s->arena, sizeof *s->slot * pairs);
  /* A list of free slots per stage: `newest` is the one freed last, or -1; free_slot links to the one freed before
   * each. */
  int *free_slot = NULL;
  int *newest = NULL;
  rfr_status status = RFR_NO_MEMORY;
  if (s->slots && s->slot) status = RFI_ALLOC(s->ctx, sizeof *free_slot * pairs, &free_slot);
  if (status == RFR_OK) status = RFI_ALLOC(s->ctx, sizeof *newest * (size_t)s->stages, &newest);
  for (int i = 0; status == RFR_OK && i < s->stages; i++) newest[i] = -1;
  for (int i = 0; status == RFR_OK && i < s->n; i++) {
    const rfr_action a = s->action[i];
    if (!rfi_action_of_microbatch(a.op)) continue;
    const size_t stage = (size_t)a.stage * (size_t)s->microbatches;
    int *slot = &s->slot[stage + (size_t)a.microbatch];
    if (i == rfi_schedule_first(s, a.stage, a.microbatch)) {
      *slot = newest[a.stage] >= 0 ? newest[a.stage] : s->slots[a.stage]++;
      if (newest[a.stage] >= 0) newest[a.stage] = free_slot[stage + (size_t)*slot];
    }
    if (i == rfi_schedule_last(s, a.stage, a.microbatch)) {
      free_slot[stage + (size_t)*slot] = newest[a.stage];
      newest[a.stage] = *slot;
    }
  }
  rfi_free(s->ctx, free_slot);
  rfi_free(s->ctx, newest);
  return status;
}
