/* SPDX-License-Identifier: Apache-2.0
 *
 * Planning: gives every buffer an offset in one arena, by its lifetime. Two buffers may share bytes only if every op on
 * one comes before every op on the other. On one stream the op list is the order, so lifetimes are intervals. With a
 * side stream (branch.h) they stay intervals: the buffers of a side op are in use from its earliest start to the op
 * that waits for it.
 *
 * Placement is best fit on a skyline, the height reached at each op. The lowest stretch takes the highest-ranked buffer
 * that lives within it; if there is none, it rises to the lower of its adjacent stretches. (Rectangles: Burke, Kendall
 * and Whitwell, Operations Research 52, 2004; lifetimes: Sekiyama, Imai, Negishi and Kawachiya, arXiv 1804.10001.) A
 * heap of stretches and a tree of unplaced buffers keep this near n log n.
 *
 * The nested lifetimes of training steps stack without gaps; most others leave small ones. If one ranking ends above
 * the lower bound, the next is tried. If none comes close, the buffers above the bound get a higher rank and placement
 * runs again, a fixed number of times.
 */
#include "pass/plan.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

static int by_first(const void *a, const void *b) {
  const rfi_buffer *x = a, *y = b;
  if (x->first != y->first) return x->first < y->first ? -1 : 1;
  if (x->last != y->last) return x->last > y->last ? -1 : 1;
  return x->value < y->value ? -1 : x->value > y->value;
}

/* Extends the lifetimes of a side op's buffers to the time in which it may run. */
static void extend(const rfr_trace *t, const rfi_side_op *side, rfi_life *life) {
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    for (int k = 0; side[i].until && k < op->n_in + op->n_out; k++) {
      const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
      rfi_life *l = v < 0 ? NULL : &life[t->values[v].base];
      if (l && l->last < side[i].until - 1) l->last = side[i].until - 1;
      if (l && l->first > side[i].from) l->first = side[i].from;
    }
  }
}

static rfr_status collect(const rfr_trace *t, const int64_t *workspace, const rfi_side_op *side, rfi_plan *p) {
  rfi_life *life;
  RFI_TRY(rfi_lives(t, &life));
  if (side) extend(t, side, life);
  rfr_status s = RFI_ALLOC(t->ctx, sizeof *p->buffer * (size_t)(t->n_values + t->n_ops + 1), &p->buffer);
  if (s == RFR_OK) {
    for (rfr_value v = 0; v < t->n_values; v++)
      if (t->values[v].base == v && life[v].first >= 0 && !life[v].persistent)
        p->buffer[p->n++] = (rfi_buffer){rfi_storage_bytes(&t->values[v].type), 0, life[v].first, life[v].last, v};
    for (int i = 0; i < t->n_ops; i++)
      if (workspace[i] > 0) {
        const int last = side && side[i].until ? side[i].until - 1 : i;
        p->buffer[p->n++] = (rfi_buffer){rfi_align(workspace[i]), 0, i, last, RFR_NONE};
      }
  }
  rfi_free(t->ctx, life);
  return s;
}

/* ---- the skyline ---- */

typedef struct stretch { /* a range of ops at which the skyline has one height */
  int64_t height;
  int first, last, before, after; /* ops, inclusive; adjacent stretches, -1: none */
  bool gone;                      /* merged into the previous one */
} stretch;

/* A tree over the buffers: node k has the children 2k and 2k + 1, buffer i is node leaves + i. */
typedef struct node { /* over the unplaced buffers of a subtree */
  int rank, last;     /* the minimum of each; INT_MAX: none */
} node;

typedef struct packer {
  rfi_plan *p;
  int *rank; /* per buffer, all different; buffers are placed in ascending order */
  node *tree;
  int leaves, n_stretches, n_heap;
  int span; /* points in time: the ops, and the end of the step */
  stretch *stretch;
  int *heap; /* a heap of stretches: the lowest, of equal ones the first, is on top */
  int64_t *live;
} packer;

static bool is_lower(const packer *w, int a, int b) {
  const stretch *x = &w->stretch[a], *y = &w->stretch[b];
  return x->height != y->height ? x->height < y->height : x->first < y->first;
}

/* Restores the heap after its top has changed. */
static void sink(packer *w) {
  int k = 0, top = w->heap[0];
  for (int child; (child = 2 * k + 1) < w->n_heap; k = child) {
    if (child + 1 < w->n_heap && is_lower(w, w->heap[child + 1], w->heap[child])) child++;
    if (!is_lower(w, w->heap[child], top)) break;
    w->heap[k] = w->heap[child];
  }
  w->heap[k] = top;
}

static void add_stretch(packer *w, stretch x) {
  int s = w->n_stretches++, k = w->n_heap++;
  w->stretch[s] = x;
  if (x.before >= 0) w->stretch[x.before].after = s;
  if (x.after >= 0) w->stretch[x.after].before = s;
  for (; k > 0 && is_lower(w, s, w->heap[(k - 1) / 2]); k = (k - 1) / 2) w->heap[k] = w->heap[(k - 1) / 2];
  w->heap[k] = s;
}

/* Stretch s is the first of the lowest ones. Merges the following stretches of equal height into it. */
static void merge_equal(packer *w, int s) {
  stretch *x = &w->stretch[s];
  while (x->after >= 0 && w->stretch[x->after].height == x->height) {
    stretch *y = &w->stretch[x->after];
    y->gone = true;
    x->last = y->last;
    x->after = y->after;
    if (x->after >= 0) w->stretch[x->after].before = s;
  }
}

static void set_node(packer *w, int k) {
  const node *a = &w->tree[2 * k], *b = a + 1;
  w->tree[k] = (node){a->rank < b->rank ? a->rank : b->rank, a->last < b->last ? a->last : b->last};
}

/* Searches the buffers [from, to) of the subtree k, which has [low, low + width), for the one with the lowest rank that
 * ends by `last`; updates *found if its rank is lower. */
static void search(const packer *w, int k, int low, int width, int from, int to, int last, int *found) {
  const node *x = &w->tree[k];
  if (low >= to || low + width <= from || x->last > last || x->rank >= (*found < 0 ? INT_MAX : w->rank[*found])) return;
  if (width == 1) {
    *found = low;
    return;
  }
  int half = width / 2, second = w->tree[2 * k + 1].rank < w->tree[2 * k].rank; /* search the better child first */
  search(w, 2 * k + second, low + second * half, half, from, to, last, found);
  search(w, 2 * k + !second, low + !second * half, half, from, to, last, found);
}

/* The buffer to place into a stretch of ops; -1 if no buffer lives within it. */
static int best_within(const packer *w, int first, int last) {
  int bounds[2], found = -1;
  /* buffers before bounds[0] start before `first`; buffers before bounds[1] start by `last` */
  for (int k = 0; k < 2; k++) {
    int low = 0, high = w->p->n;
    while (low < high) {
      int middle = low + (high - low) / 2;
      if (w->p->buffer[middle].first < (k ? last + 1 : first)) low = middle + 1;
      else high = middle;
    }
    bounds[k] = low;
  }
  search(w, 1, 0, w->leaves, bounds[0], bounds[1], last, &found);
  return found;
}

static void put(packer *w, int s, int i) {
  stretch *x = &w->stretch[s];
  rfi_buffer *b = &w->p->buffer[i];
  if (x->first < b->first) add_stretch(w, (stretch){x->height, x->first, b->first - 1, x->before, s, false});
  if (x->last > b->last) add_stretch(w, (stretch){x->height, b->last + 1, x->last, s, x->after, false});
  x->first = b->first;
  x->last = b->last;
  b->offset = x->height;
  x->height += b->bytes;
  w->tree[w->leaves + i] = (node){INT_MAX, INT_MAX};
  for (int k = (w->leaves + i) / 2; k > 0; k /= 2) set_node(w, k);
}

/* Places every buffer in the order of ranks; returns the highest end. */
static int64_t place(packer *w) {
  int64_t end = 0;
  for (int i = 0; i < w->leaves; i++)
    w->tree[w->leaves + i] = i < w->p->n ? (node){w->rank[i], w->p->buffer[i].last} : (node){INT_MAX, INT_MAX};
  for (int k = w->leaves - 1; k > 0; k--) set_node(w, k);
  w->n_heap = w->n_stretches = 0;
  add_stretch(w, (stretch){0, 0, w->span - 1, -1, -1, false});
  for (int left = w->p->n; left > 0;) {
    int s = w->heap[0], i;
    stretch *x = &w->stretch[s];
    if (x->gone) {
      w->heap[0] = w->heap[--w->n_heap];
    } else {
      merge_equal(w, s);
      if ((i = best_within(w, x->first, x->last)) >= 0) {
        put(w, s, i);
        left--;
        if (x->height > end) end = x->height;
      } else { /* every unplaced buffer needs a wider stretch, so there is an adjacent one */
        int64_t before = x->before < 0 ? INT64_MAX : w->stretch[x->before].height;
        int64_t after = x->after < 0 ? INT64_MAX : w->stretch[x->after].height;
        x->height = before < after ? before : after;
      }
    }
    sink(w);
  }
  return end;
}

/* ---- rankings ---- */

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

/* Live bytes during each op and at the end, as a tree of maxima; the maximum of all is the lower bound. Node k has the
 * children 2k and 2k + 1, op i is node span + i. */
static rfr_status find_live(packer *w) {
  rfi_plan *p = w->p;
  RFI_TRY(RFI_ALLOC(p->ctx, sizeof *w->live * (2 * (size_t)w->span + 1), &w->live));
  int64_t *leaf = w->live + w->span;
  for (int i = 0; i < p->n; i++) {
    leaf[p->buffer[i].first] += p->buffer[i].bytes;
    leaf[p->buffer[i].last + 1] -= p->buffer[i].bytes;
  }
  for (int i = 0; i < w->span; i++) {
    if (i) leaf[i] += leaf[i - 1];
    if (leaf[i] > p->lower_bound) p->lower_bound = leaf[i];
  }
  for (int k = w->span - 1; k > 0; k--)
    w->live[k] = w->live[2 * k] > w->live[2 * k + 1] ? w->live[2 * k] : w->live[2 * k + 1];
  return RFR_OK;
}

/* Maximum of live bytes over the ops of a lifetime. */
static int64_t most_live(const packer *w, const rfi_buffer *b) {
  int64_t most = 0;
  for (int l = b->first + w->span, r = b->last + w->span + 1; l < r; l /= 2, r /= 2) {
    if (l % 2 && w->live[l++] > most) most = w->live[l - 1];
    if (r % 2 && w->live[--r] > most) most = w->live[r];
  }
  return most;
}

/* The first ranking places buffers that are live at the peak first, longest lifetime first. The others are for traces
 * that it cannot pack without gaps. */
enum { RANKINGS = 6 };
static key rank_of(const packer *w, int ranking, int i) {
  const rfi_buffer *b = &w->p->buffer[i];
  double size = (double)b->bytes, life = b->last - b->first + 1;
  switch (ranking) {
    case 0: return (key){(double)most_live(w, b), life, i};
    case 1: return (key){life, size, i};
    case 2: return (key){b->last, life, i};
    case 3: return (key){(double)most_live(w, b), size * life, i};
    case 4: return (key){-b->first, life, i};
    default: return (key){size * life, size, i};
  }
}

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
  uint64_t z = *state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static void set_ranks(packer *w, key *keys) {
  qsort(keys, (size_t)w->p->n, sizeof *keys, by_key);
  for (int i = 0; i < w->p->n; i++) w->rank[keys[i].index] = i;
}

static void set_ranking(packer *w, int ranking, key *keys) {
  for (int i = 0; i < w->p->n; i++) keys[i] = rank_of(w, ranking, i);
  set_ranks(w, keys);
}

/* Raises the priority of the buffers above the bound, each by a random fraction, and sometimes that of other buffers
 * ("squeaky wheel" optimization: Joslin and Clements, JAIR 10, 1999). */
static void raise_priority(packer *w, key *keys, uint64_t *random) {
  bool all = next_random(random) % 2; /* every buffer above the bound, or about one in eight */
  for (int i = 0; i < w->p->n; i++) {
    const rfi_buffer *b = &w->p->buffer[i];
    uint64_t draw = next_random(random);
    bool out = b->offset + b->bytes > w->p->lower_bound && (all || draw % 8 == 0);
    double part = out || draw % 128 == 1 ? (double)(draw >> 40) / (1 << 24) : 1;
    keys[i] = (key){-w->rank[i] * part, 0, i};
  }
  set_ranks(w, keys);
}

/* The best placement so far. */
typedef struct choice {
  int64_t *offset;
  int *rank;
} choice;

static bool try_ranks(packer *w, choice *best) {
  int64_t end = place(w);
  if (end >= w->p->bytes) return false;
  w->p->bytes = end;
  for (int i = 0; i < w->p->n; i++) best->offset[i] = w->p->buffer[i].offset;
  memcpy(best->rank, w->rank, sizeof *w->rank * (size_t)w->p->n);
  return true;
}

static void restore(packer *w, const choice *best) {
  for (int i = 0; i < w->p->n; i++) w->p->buffer[i].offset = best->offset[i];
  memcpy(w->rank, best->rank, sizeof *w->rank * (size_t)w->p->n);
}

static rfr_status solve(rfi_plan *p, int n_ops) {
  enum { ROUNDS = 64, PLACEMENTS = 1 << 16, PATIENCE = 24 }; /* PATIENCE: rounds without improvement before a restart */
  rfr_status s;
  packer w = {.p = p, .leaves = 1, .span = n_ops + 1};
  key *keys = NULL;
  choice best = {NULL, NULL};
  size_t n = (size_t)p->n;
  uint64_t random = 1; /* a fixed seed: plans are deterministic */
  while (w.leaves < p->n) w.leaves *= 2;
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *w.rank, &w.rank));
  RFI_GOTO(RFI_ALLOC(p->ctx, 2 * (size_t)w.leaves * sizeof *w.tree, &w.tree));
  RFI_GOTO(RFI_ALLOC(p->ctx, (2 * n + 1) * sizeof *w.stretch, &w.stretch)); /* each buffer adds at most two */
  RFI_GOTO(RFI_ALLOC(p->ctx, (2 * n + 1) * sizeof *w.heap, &w.heap));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *keys, &keys));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *best.offset, &best.offset));
  RFI_GOTO(RFI_ALLOC(p->ctx, n * sizeof *best.rank, &best.rank));
  RFI_GOTO(find_live(&w));
  p->bytes = INT64_MAX;
  int64_t near = p->lower_bound / 1000; /* close enough to the bound: no other ranking is tried */
  for (int ranking = 0; ranking < RANKINGS && p->bytes > p->lower_bound + near; ranking++) {
    set_ranking(&w, ranking, keys);
    try_ranks(&w, &best);
  }
  int rounds = PLACEMENTS / p->n < ROUNDS ? PLACEMENTS / p->n : ROUNDS;
  for (int idle = PATIENCE; rounds > 0 && p->bytes > p->lower_bound + 5 * near; rounds--) {
    if (idle++ >= PATIENCE) {
      restore(&w, &best);
      idle = 0;
    }
    raise_priority(&w, keys, &random);
    if (try_ranks(&w, &best)) idle = 0;
  }
  restore(&w, &best);
fail:
  rfi_free(p->ctx, w.rank);
  rfi_free(p->ctx, w.tree);
  rfi_free(p->ctx, w.stretch);
  rfi_free(p->ctx, w.heap);
  rfi_free(p->ctx, w.live);
  rfi_free(p->ctx, keys);
  rfi_free(p->ctx, best.offset);
  rfi_free(p->ctx, best.rank);
  return s;
}

rfr_status rfi_plan_place(rfi_plan *p, int end) {
  if (p->n == 0) return RFR_OK;
  qsort(p->buffer, (size_t)p->n, sizeof *p->buffer, by_first);
  return solve(p, end);
}

rfr_status rfi_plan_make(const rfr_trace *t, const int64_t *workspace, const rfi_side_op *side, rfi_plan *out) {
  *out = (rfi_plan){.ctx = t->ctx};
  rfr_status s = collect(t, workspace, side, out);
  if (s == RFR_OK) s = rfi_plan_place(out, t->n_ops);
  if (s != RFR_OK) rfi_plan_deinit(out);
  return s;
}

void rfi_plan_deinit(rfi_plan *plan) {
  if (plan->ctx) rfi_free(plan->ctx, plan->buffer);
  *plan = (rfi_plan){0};
}
