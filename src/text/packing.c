/* SPDX-License-Identifier: Apache-2.0
 *
 * Open windows are in lists, one for each number of free tokens. The numbers in use are a set, stored as a tree of
 * 64-bit words. It finds the smallest sufficient number in at most four steps.
 */
#include "text/packing.h"

#include <string.h>

enum { LEVELS = 4 }; /* 64^4 = 16777216 numbers of free tokens; data.sequence has the same limit */

typedef struct room_set {
  uint64_t *words[LEVELS];
} room_set;

static void set_add(room_set *set, uint32_t x) {
  for (int level = 0; level < LEVELS; level++, x >>= 6) set->words[level][x >> 6] |= (uint64_t)1 << (x & 63);
}

static void set_remove(room_set *set, uint32_t x) {
  for (int level = 0; level < LEVELS; level++, x >>= 6)
    if ((set->words[level][x >> 6] &= ~((uint64_t)1 << (x & 63))) != 0) return;
}

/* The smallest member that is at least x; -1: none. */
static int32_t set_next(const room_set *set, uint32_t x) {
  for (int level = 0; level < LEVELS; level++) {
    const uint64_t word = set->words[level][x >> 6] & (~(uint64_t)0 << (x & 63));
    if (word) {
      x = (x & ~63u) | (uint32_t)__builtin_ctzll(word);
      while (level-- > 0) x = x << 6 | (uint32_t)__builtin_ctzll(set->words[level][x]);
      return (int32_t)x;
    }
    x = (x >> 6) + 1; /* later words */
    if (level + 1 < LEVELS && x >> (6 * (LEVELS - level - 1)) != 0) return -1;
  }
  return -1;
}

/* Indices of rows in order of descending length. */
static void sort_rows(const int32_t *lengths, int64_t n, int32_t capacity, int64_t *starts, int64_t *order) {
  for (int64_t i = 0; i < n; i++) starts[lengths[i] - 1]++;
  int64_t at = 0;
  for (int32_t length = capacity; length > 0; length--) {
    const int64_t count = starts[length - 1];
    starts[length - 1] = at;
    at += count;
  }
  for (int64_t i = 0; i < n; i++) order[starts[lengths[i] - 1]++] = i;
}

typedef struct state {
  room_set set;
  int64_t *starts; /* (capacity) */
  int64_t *order;  /* (n) */
  int64_t *open;   /* (capacity + 1) first window with so many free tokens, -1: none */
  int64_t *next;   /* (n) next window with the same number, by window */
  int64_t *window; /* (n) of each row, in placing order */
} state;

static rfr_status create(rfr_ctx *ctx, int64_t n, int32_t capacity, state *s) {
  RFI_TRY(RFI_ALLOC(ctx, (size_t)capacity * sizeof *s->starts, &s->starts));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof *s->order, &s->order));
  RFI_TRY(RFI_ALLOC(ctx, ((size_t)capacity + 1) * sizeof *s->open, &s->open));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof *s->next, &s->next));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof *s->window, &s->window));
  size_t words = (size_t)capacity / 64 + 1;
  for (int level = 0; level < LEVELS; level++, words = words / 64 + 1)
    RFI_TRY(RFI_ALLOC(ctx, (words + 1) * sizeof(uint64_t), &s->set.words[level]));
  memset(s->open, 0xff, ((size_t)capacity + 1) * sizeof *s->open);
  return RFR_OK;
}

static void place(state *s, const int32_t *lengths, int64_t n, int32_t capacity, int64_t *windows) {
  for (int64_t k = 0; k < n; k++) {
    const int32_t length = lengths[s->order[k]];
    int32_t room = set_next(&s->set, (uint32_t)length);
    int64_t w = room < 0 ? (*windows)++ : s->open[room];
    if (room < 0) {
      room = capacity;
    } else if ((s->open[room] = s->next[w]) < 0) {
      set_remove(&s->set, (uint32_t)room);
    }
    s->window[k] = w;
    room -= length;
    if (room == 0) continue;
    if (s->open[room] < 0) set_add(&s->set, (uint32_t)room);
    s->next[w] = s->open[room];
    s->open[room] = w;
  }
}

rfr_status rfi_pack_rows(rfi_packing *out, const int32_t *lengths, int64_t n, int32_t capacity) {
  state s = {0};
  int64_t windows = 0;
  rfi_packing_deinit(out);
  rfr_status status = create(out->ctx, n, capacity, &s);
  if (status == RFR_OK) {
    sort_rows(lengths, n, capacity, s.starts, s.order);
    place(&s, lengths, n, capacity, &windows);
    status = RFI_ALLOC(out->ctx, ((size_t)windows + 2) * sizeof *out->first, &out->first);
  }
  if (status == RFR_OK) status = RFI_ALLOC(out->ctx, (size_t)n * sizeof *out->rows, &out->rows);
  if (status == RFR_OK) {
    out->windows = windows;
    for (int64_t k = 0; k < n; k++) out->first[s.window[k] + 2]++;
    for (int64_t w = 0; w < windows; w++) out->first[w + 2] += out->first[w + 1];
    for (int64_t k = 0; k < n; k++) out->rows[out->first[s.window[k] + 1]++] = s.order[k];
  }
  rfi_free(out->ctx, s.starts);
  rfi_free(out->ctx, s.order);
  rfi_free(out->ctx, s.open);
  rfi_free(out->ctx, s.next);
  rfi_free(out->ctx, s.window);
  for (int level = 0; level < LEVELS; level++) rfi_free(out->ctx, s.set.words[level]);
  return status;
}

void rfi_packing_deinit(rfi_packing *p) {
  rfr_ctx *ctx = p->ctx;
  rfi_free(ctx, p->first);
  rfi_free(ctx, p->rows);
  *p = (rfi_packing){.ctx = ctx};
}
