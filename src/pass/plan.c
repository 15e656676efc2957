/* SPDX-License-Identifier: Apache-2.0
 *
 * Planning: lifetimes in list order become offsets in one arena. Two buffers may share
 * bytes only if every op on the one comes before every op on the other; on one stream the
 * list is the order, so lifetimes are intervals.
 *
 * Placing is greedy: buffers in some order, each at the lowest or the tightest offset that no
 * buffer alive at the same time covers. Large ones first gets within a few percent of the
 * lower bound (Pisarchyk and Lee, arXiv 2001.03288). Then what sticks out above the bound
 * moves forward in the order and all is placed again, a bounded number of times, until the
 * bound is all but met; steps of training nest their lifetimes, so it mostly is at once.
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

/* Bytes live during each op, whose highest is the bound; from the context. */
static rfr_status find_live(rfi_plan *p, int n_ops, int64_t **out) {
  int64_t *live;
  RFI_TRY(RFI_ALLOC(p->ctx, sizeof *live * (size_t)(n_ops + 2), &live));
  for (int i = 0; i < p->n; i++) {
    live[p->buffer[i].first] += p->buffer[i].bytes;
    live[p->buffer[i].last + 1] -= p->buffer[i].bytes;
  }
  for (int i = 0; i <= n_ops; i++) {
    if (i) live[i] += live[i - 1];
    if (live[i] > p->lower_bound) p->lower_bound = live[i];
  }
  *out = live;
  return RFR_OK;
}

static bool overlap(const rfi_buffer *a, const rfi_buffer *b) { return a->first <= b->last && b->first <= a->last; }

/* Places buffers in the given order; `placed` holds those done, sorted by offset. Returns
 * the highest end. */
static int64_t place(rfi_buffer *buffer, const int *order, int n, int *placed, bool tight) {
  int64_t end = 0;
  int done = 0;
  for (int i = 0; i < n; i++) {
    rfi_buffer *b = &buffer[order[i]];
    int64_t at = 0, best = -1, best_gap = INT64_MAX;
    for (int k = 0; k < done; k++) {
      const rfi_buffer *other = &buffer[placed[k]];
      if (!overlap(b, other)) continue;
      int64_t gap = other->offset - at;
      if (gap >= b->bytes && gap < best_gap) {
        best = at;
        best_gap = gap;
        if (!tight) break;
      }
      if (other->offset + other->bytes > at) at = other->offset + other->bytes;
    }
    if (best >= 0) at = best;
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

/* Orders worth trying: by size; by size times lifetime; by lifetime; and by the most bytes
 * that are ever live beside the buffer, so that those of the peak, which have no room to
 * spare, come first, then by size or by lifetime. */
enum { ORDERS = 5 };
static void make_order(const rfi_plan *p, const int64_t *live, int kind, key *keys, int *order) {
  for (int i = 0; i < p->n; i++) {
    const rfi_buffer *b = &p->buffer[i];
    double size = (double)b->bytes, life = b->last - b->first + 1;
    int64_t most = 0;
    for (int op = b->first; kind >= 3 && op <= b->last; op++) most = live[op] > most ? live[op] : most;
    keys[i] = kind == 0   ? (key){size, life, i}
              : kind == 1 ? (key){size * life, size, i}
              : kind == 2 ? (key){life, size, i}
                          : (key){(double)most, kind == 3 ? size : life, i};
  }
  qsort(keys, (size_t)p->n, sizeof *keys, by_key);
  for (int i = 0; i < p->n; i++) order[i] = keys[i].index;
}

/* One try: places in the given order; true when the result is better than the best so far. */
static bool try_order(rfi_plan *p, const int *order, int *placed, bool tight, int64_t *best) {
  int64_t end = place(p->buffer, order, p->n, placed, tight);
  if (end >= p->bytes) return false;
  p->bytes = end;
  for (int i = 0; i < p->n; i++) best[i] = p->buffer[i].offset;
  return true;
}

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
  uint64_t z = *state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* Moves what sticks out above the bound forward in the order, each by a part of its way
 * ("squeaky wheel": Joslin and Clements, JAIR 10, 1999), and now and then anything else. */
static void blame(const rfi_plan *p, key *keys, int *order, uint64_t *random) {
  bool all = next_random(random) % 2; /* all of it, or about one in eight */
  for (int i = 0; i < p->n; i++) {
    const rfi_buffer *b = &p->buffer[order[i]];
    uint64_t draw = next_random(random);
    bool out = b->offset + b->bytes > p->lower_bound && (all || draw % 8 == 0);
    double part = (double)(draw >> 40) / (1 << 24);
    keys[i] = (key){out || draw % 128 == 1 ? -(double)i * part : -(double)i, 0, order[i]};
  }
  qsort(keys, (size_t)p->n, sizeof *keys, by_key);
  for (int i = 0; i < p->n; i++) order[i] = keys[i].index;
}

static rfr_status solve(rfi_plan *p, const int64_t *live) {
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
  bool tight = false, kept_tight = false;
  for (int kind = 0; kind < 2 * ORDERS && p->bytes > enough; kind++) {
    make_order(p, live, kind / 2, keys, order);
    tight = kind % 2;
    if (try_order(p, order, placed, tight, best)) {
      memcpy(kept, order, sizeof *order * (size_t)p->n);
      kept_tight = tight;
    }
  }
  enum { PATIENCE = 24 }; /* tries without gain before it starts again from the best order */
  for (int i = 0, idle = PATIENCE; i < tries && p->bytes > enough; i++) {
    if (idle++ >= PATIENCE) {
      memcpy(order, kept, sizeof *order * (size_t)p->n);
      for (int k = 0; k < p->n; k++) p->buffer[k].offset = best[k];
      idle = 0;
    }
    blame(p, keys, order, &random);
    if (!try_order(p, order, placed, kept_tight, best)) continue;
    memcpy(kept, order, sizeof *order * (size_t)p->n);
    idle = 0;
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
  int64_t *live = NULL;
  *out = (rfi_plan){.ctx = t->ctx};
  RFI_GOTO(collect(t, workspace, out));
  RFI_GOTO(find_live(out, t->n_ops, &live));
  RFI_GOTO(solve(out, live));
  if (out->n == 0) out->bytes = 0;
  rfi_free(t->ctx, live);
  return RFR_OK;
fail:
  rfi_free(t->ctx, live);
  rfi_plan_deinit(out);
  return s;
}

void rfi_plan_deinit(rfi_plan *plan) {
  if (plan->ctx) rfi_free(plan->ctx, plan->buffer);
  *plan = (rfi_plan){0};
}
