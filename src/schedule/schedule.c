/* SPDX-License-Identifier: Apache-2.0
 *
 * Schedule handles: creation from lists, queries, destruction. All memory of a schedule is in its arena.
 */
#include "schedule/schedule.h"

#include <string.h>

enum { MOST_ACTIONS = 1 << 28 }; /* action indices are ints, also when doubled */

const char *rfi_action_name(int op) {
  static const char *const names[] = {
#define NAME(name, microbatch, what) #name,
      RFR_ACTIONS(NAME)
#undef NAME
  };
  return op >= 0 && op < RFR_ACTION_COUNT ? names[op] : "?";
}

const char *rfr_action_print(rfr_action a, char *out) {
  if (rfi_action_of_microbatch(a.op))
    rfi_snprintf(out, RFR_ACTION_TEXT, "%d%s%d", a.stage, rfi_action_name(a.op), a.microbatch);
  else rfi_snprintf(out, RFR_ACTION_TEXT, "%d%s", a.stage, rfi_action_name(a.op));
  return out;
}

/* ---- creation ---- */

rfr_status rfi_schedule_open(rfr_ctx *ctx, const char *file, rfr_schedule **out) {
  rfi_arena *arena = NULL;
  *out = NULL;
  RFI_TRY(rfi_arena_create(ctx, &arena));
  rfr_schedule *s = rfi_arena_alloc(arena, sizeof *s);
  if (s) *s = (rfr_schedule){.ctx = ctx, .arena = arena};
  if (s) s->file = rfi_arena_strdup(arena, file);
  if (!s || !s->file) {
    rfi_arena_destroy(arena);
    return RFR_NO_MEMORY;
  }
  *out = s;
  return RFR_OK;
}

rfr_status rfi_schedule_rank(rfr_schedule *s, int line) {
  if (s->ranks >= MOST_ACTIONS) return rfi_fail(RFI_E_OVERFLOW, "a schedule has at most %d ranks", MOST_ACTIONS);
  if (!rfi_arena_grow(s->arena, (void **)&s->begin, &s->begin_capacity, s->ranks + 2, sizeof *s->begin) ||
      !rfi_arena_grow(s->arena, (void **)&s->line, &s->line_capacity, s->ranks + 1, sizeof *s->line))
    return RFR_NO_MEMORY;
  s->begin[s->ranks] = s->n;
  s->begin[s->ranks + 1] = s->n;
  s->line[s->ranks++] = line;
  return RFR_OK;
}

rfr_status rfi_schedule_add(rfr_schedule *s, int op, int stage, int microbatch) {
  if (s->n >= MOST_ACTIONS) return rfi_fail(RFI_E_OVERFLOW, "a schedule has at most %d actions", MOST_ACTIONS);
  if (!rfi_arena_grow(s->arena, (void **)&s->action, &s->capacity, s->n + 1, sizeof *s->action)) return RFR_NO_MEMORY;
  s->action[s->n++] = (rfr_action){op, stage, microbatch};
  s->begin[s->ranks] = s->n;
  return RFR_OK;
}

rfr_status rfi_schedule_close(rfr_schedule **s) {
  rfr_status status = rfi_schedule_check(*s);
  if (status == RFR_OK) status = rfi_schedule_color(*s);
  if (status == RFR_OK) return status;
  rfr_schedule_destroy(*s);
  *s = NULL;
  return status;
}

rfr_status rfr_schedule_create(rfr_ctx *ctx, int ranks, const rfr_action *const *actions, const int *n_actions,
                               rfr_schedule **out) {
  rfr_status s = RFR_OK;
  rfr_schedule *made;
  *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (ranks < 1) return rfi_fail(RFI_E_ARGUMENT, "ranks is %d; it must be at least 1", ranks);
  RFI_TRY(rfi_check_handle(actions, "list of lists"));
  RFI_TRY(rfi_check_handle(n_actions, "list of lengths"));
  RFI_TRY(rfi_schedule_open(ctx, "", &made));
  for (int r = 0; r < ranks; r++) {
    RFI_GOTO(rfi_schedule_rank(made, 0));
    if (n_actions[r] > 0 && !actions[r]) RFI_GOTO(rfi_fail(RFI_E_ARGUMENT, "the list of rank %d is NULL", r));
    for (int i = 0; i < n_actions[r]; i++)
      RFI_GOTO(rfi_schedule_add(made, actions[r][i].op, actions[r][i].stage, actions[r][i].microbatch));
  }
  RFI_TRY(rfi_schedule_close(&made));
  *out = made;
  return RFR_OK;
fail:
  rfr_schedule_destroy(made);
  return s;
}

void rfr_schedule_destroy(rfr_schedule *s) {
  if (s) rfi_arena_destroy(s->arena);
}

/* ---- queries ---- */

rfr_status rfr_schedule_get_info(const rfr_schedule *s, rfr_schedule_info *out) {
  *out = (rfr_schedule_info){0};
  RFI_TRY(rfi_check_handle(s, "rfr_schedule"));
  *out = (rfr_schedule_info){.ranks = s->ranks,
                             .stages = s->stages,
                             .microbatches = s->microbatches,
                             .n_actions = s->n,
                             .training = s->training,
                             .communication = s->communication};
  return RFR_OK;
}

const rfr_action *rfr_schedule_actions(const rfr_schedule *s, int rank, int *n) {
  *n = 0;
  if (!s || rank < 0 || rank >= s->ranks) return NULL;
  *n = s->begin[rank + 1] - s->begin[rank];
  return s->action + s->begin[rank];
}

static bool has_stage(const rfr_schedule *s, int stage) { return s && stage >= 0 && stage < s->stages; }

int rfr_schedule_rank(const rfr_schedule *s, int stage) { return has_stage(s, stage) ? s->rank_of[stage] : -1; }

int rfr_schedule_find(const rfr_schedule *s, rfr_action a) {
  if (!has_stage(s, a.stage) || a.op < 0 || a.op >= RFR_ACTION_COUNT) return -1;
  const int begin = s->begin[s->rank_of[a.stage]], end = s->begin[s->rank_of[a.stage] + 1];
  if (rfi_action_of_microbatch(a.op)) {
    if (a.microbatch < 0 || a.microbatch >= s->microbatches) return -1;
    const int index = rfi_schedule_at(s, a.op, a.stage, a.microbatch);
    return index < 0 ? -1 : index - begin;
  }
  for (int i = begin; i < end; i++)
    if (s->action[i].op == a.op && s->action[i].stage == a.stage) return i - begin;
  return -1;
}

rfr_status rfr_schedule_set_layers(rfr_schedule *s, const int *layers, int n) {
  RFI_TRY(rfi_check_handle(s, "rfr_schedule"));
  RFI_TRY(rfi_check_handle(layers, "list of layers"));
  if (n != 1 && n != s->stages)
    return rfi_fail(RFI_E_ARGUMENT, "%d counts of layers for %d stages; give one count, or one for each stage", n,
                    s->stages);
  int64_t sum = 0;
  for (int i = 0; i < s->stages; i++) {
    const int count = layers[n == 1 ? 0 : i];
    if (count < 1) return rfi_fail(RFI_E_ARGUMENT, "stage %d has %d layers; it must have at least one", i, count);
    sum += count;
  }
  if (sum > INT32_MAX) return rfi_fail(RFI_E_OVERFLOW, "%lld layers are too many", (long long)sum);
  for (int i = 0; i < s->stages; i++) s->layers[i] = layers[n == 1 ? 0 : i];
  return RFR_OK;
}

int rfr_schedule_layers(const rfr_schedule *s, int stage) { return has_stage(s, stage) ? s->layers[stage] : 0; }
int rfr_schedule_slots(const rfr_schedule *s, int stage) { return has_stage(s, stage) ? s->slots[stage] : 0; }

int rfr_schedule_slot(const rfr_schedule *s, int stage, int microbatch) {
  if (!has_stage(s, stage) || microbatch < 0 || microbatch >= s->microbatches) return -1;
  return s->slot[(size_t)stage * (size_t)s->microbatches + (size_t)microbatch];
}
