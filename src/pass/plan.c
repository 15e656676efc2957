/* SPDX-License-Identifier: Apache-2.0
 *
 * Planning: lifetimes in list order become offsets in one arena. Two buffers may share
 * bytes only if every op on the one comes before every op on the other; on one stream the
 * list is the order, so lifetimes are intervals.
 *
 * Placing is greedy: buffers in some order, each at the lowest offset that no buffer alive
 * at the same time covers. Large ones first gets within a few percent of the lower bound
 * (Pisarchyk and Lee, arXiv 2001.03288). Then the order is changed a little, mostly by moving
 * what sticks out forward, and kept when that is no worse, a bounded number of times, until
 * the bound is all but met; steps of training nest their lifetimes, so it mostly is at once.
 */
#include "pass/plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/base.h"

static int by_first(const void *a, const void *b) {
  const rfi_buffer *x = a, *y = b;
  if (x->first != y->first) return x->first < y->first ? -1 : 1;
  if (x->last != y->last) return x->last > y->last ? -1 : 1;
  return x->value < y->value ? -1 : x->value > y->value;
}

static rfr_status collect(const rfr_trace *t, const int64_t *workspace, rfi_plan *p) {
  rfi_life *life;
  RFI_TRY(rfi_lives(t, &life));
  rfr_status s = RFI_ALLOC(t->ctx, sizeof *p->buffer * (size_t)(t->n_values + t->n_ops + 1), &p->buffer);
  if (s == RFR_OK) {
    for (rfr_value v = 0; v < t->n_values; v++)
      if (t->values[v].base == v && life[v].first >= 0 && !life[v].persistent)
        p->buffer[p->n++] = (rfi_buffer){rfi_storage_bytes(&t->values[v].type), 0, life[v].first, life[v].last, v};
    for (int i = 0; i < t->n_ops; i++)
      if (workspace[i] > 0) p->buffer[p->n++] = (rfi_buffer){rfi_align(workspace[i]), 0, i, i, RFR_NONE};
    qsort(p->buffer, (size_t)p->n, sizeof *p->buffer, by_first);
  }
  rfi_free(t->ctx, life);
  return s;
}

static rfr_status find_bound(rfi_plan *p, int n_ops) {
  int64_t *change, live = 0;
  RFI_TRY(RFI_ALLOC(p->ctx, sizeof *change * (size_t)(n_ops + 2), &change));
  for (int i = 0; i < p->n; i++) {
    change[p->buffer[i].first] += p->buffer[i].bytes;
    change[p->buffer[i].last + 1] -= p->buffer[i].bytes;
  }
  for (int i = 0; i <= n_ops; i++) {
    live += change[i];
    if (live > p->lower_bound) p->lower_bound = live;
  }
  rfi_free(p->ctx, change);
  return RFR_OK;
}

static bool overlap(const rfi_buffer *a, const rfi_buffer *b) { return a->first <= b->last && b->first <= a->last; }

/* Places buffers in the given order; `placed` holds those done, sorted by offset. Returns
 * the highest end. */
static int64_t place(rfi_buffer *buffer, const int *order, int n, int *placed) {
  int64_t end = 0;
  int done = 0;
  for (int i = 0; i < n; i++) {
    rfi_buffer *b = &buffer[order[i]];
    int64_t at = 0;
    for (int k = 0; k < done; k++) {
      const rfi_buffer *other = &buffer[placed[k]];
      if (!overlap(b, other)) continue;
      if (other->offset >= at + b->bytes) break; /* the gap before it is wide enough */
      if (other->offset + other->bytes > at) at = other->offset + other->bytes;
    }
    b->offset = at;
    int k = done++;
    for (; k > 0 && buffer[placed[k - 1]].offset > at; k--) placed[k] = placed[k - 1];
    placed[k] = order[i];
    if (at + b->bytes > end) end = at + b->bytes;
  }
  return end;
}

typedef struct key {
  double major, minor;
  int index;
} key;
static int by_key(const void *a, const void *b) {
  const key *x = a, *y = b;
  if (x->major != y->major) return x->major > y->major ? -1 : 1;
  if (x->minor != y->minor) return x->minor > y->minor ? -1 : 1;
  return x->index - y->index;
}

/* Three orders worth trying: by size, by size times lifetime, by lifetime. */
static void make_order(const rfi_plan *p, int kind, key *keys, int *order) {
  for (int i = 0; i < p->n; i++) {
    double size = (double)p->buffer[i].bytes, life = p->buffer[i].last - p->buffer[i].first + 1;
    keys[i] = (key){kind == 0 ? size : kind == 1 ? size * life : life, kind == 0 ? life : size, i};
  }
  qsort(keys, (size_t)p->n, sizeof *keys, by_key);
  for (int i = 0; i < p->n; i++) order[i] = keys[i].index;
}

/* One try: places in the given order; true when the result is no worse than the best. */
static bool try_order(rfi_plan *p, const int *order, int *placed, int64_t *best) {
  int64_t end = place(p->buffer, order, p->n, placed);
  if (end > p->bytes) return false;
  p->bytes = end;
  for (int i = 0; i < p->n; i++) best[i] = p->buffer[i].offset;
  return true;
}

/* Moves a buffer forward in the order: what reaches the top, or any other. */
static void perturb(const rfi_plan *p, const int64_t *best, const int *from, int *order, uint64_t draw) {
  int pick = -1;
  memcpy(order, from, sizeof *order * (size_t)p->n);
  for (int i = 0; i < p->n && pick < 0; i++)
    if (best[order[i]] + p->buffer[order[i]].bytes == p->bytes) pick = i;
  if (draw % 4 == 0 || pick <= 0) pick = (int)(draw >> 33) % p->n;
  int to = pick ? (int)(draw >> 8 & 0xffffff) % (pick + 1) : 0, moved = order[pick];
  if (draw % 8 == 1) to = 0;
  memmove(order + to + 1, order + to, sizeof *order * (size_t)(pick - to));
  order[to] = moved;
}

static rfr_status solve(rfi_plan *p) {
  rfr_status s;
  int *order = NULL, *kept = NULL, *placed = NULL;
  key *keys = NULL;
  int64_t *best = NULL;
  size_t n = (size_t)p->n + 1;
  /* placing costs about n*n; spend a bounded amount of work in all */
  double rounds = 1.5e8 / ((double)n * (double)n);
  int tries = rounds > 1000 ? 1000 : rounds < 4 ? 4 : (int)rounds;
  uint64_t random = 1; /* of splitmix64: any will do, but the same each time */
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *order, &order));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *kept, &kept));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *placed, &placed));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *keys, &keys));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *best, &best));
  p->bytes = INT64_MAX;
  /* within half a percent of the bound is good enough to stop */
  int64_t enough = p->lower_bound + p->lower_bound / 200;
  for (int kind = 0; kind < 3 && p->bytes > enough; kind++) {
    make_order(p, kind, keys, order);
    if (try_order(p, order, placed, best)) memcpy(kept, order, sizeof *order * (size_t)p->n);
  }
  for (int i = 0; i < tries && p->bytes > enough; i++) {
    uint64_t z = random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    perturb(p, best, kept, order, z ^ (z >> 31));
    if (try_order(p, order, placed, best)) memcpy(kept, order, sizeof *order * (size_t)p->n);
  }
  for (int i = 0; i < p->n; i++) p->buffer[i].offset = best[i];
fail:
  rfi_free(p->ctx, order);
  rfi_free(p->ctx, kept);
  rfi_free(p->ctx, placed);
  rfi_free(p->ctx, keys);
  rfi_free(p->ctx, best);
  return s;
}

rfr_status rfi_plan_make(const rfr_trace *t, const int64_t *workspace, rfi_plan *out) {
  rfr_status s;
  *out = (rfi_plan){.ctx = t->ctx};
  RFI_GOTO(collect(t, workspace, out));
  RFI_GOTO(find_bound(out, t->n_ops));
  RFI_GOTO(solve(out));
  if (out->n == 0) out->bytes = 0;
  return RFR_OK;
fail:
  rfi_plan_deinit(out);
  return s;
}

void rfi_plan_deinit(rfi_plan *plan) {
  if (plan->ctx) rfi_free(plan->ctx, plan->buffer);
  *plan = (rfi_plan){0};
}
