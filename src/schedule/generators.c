/* SPDX-License-Identifier: Apache-2.0
 *
 * Generators of the usual schedules. There are p ranks with v chunks each. Chunk c of rank r is stage c p + r; in ZB-V
 * it is stage r or 2 p - 1 - r, so that the pipeline turns around on the last rank.
 *
 * 1F1B, interleaved and ZB-H1 share one walk: forwards until every rank has work when the last rank's first backward
 * arrives, then forwards and backwards alternately, then the remaining backwards. With several chunks, microbatches run
 * in groups: one group's forwards of chunk 0, of chunk 1, ..., then those of the next group. The walk keeps every rank
 * busy only if a group has as many microbatches as there are ranks. So a smaller group is walked at that size, and
 * actions of missing microbatches are left out: the remaining actions keep their order, so there is no deadlock. ZB-V
 * treats fewer than 2 p - 1 microbatches the same way.
 *
 * The backwards of every stage, and so the W of each parameter, run in ascending microbatches: sums of gradients are
 * the same in all schedules.
 */
#include <string.h>

#include "schedule/schedule.h"

enum { MOST = 1 << 28 }; /* number of actions, including those that are left out */

rfr_schedule_options rfr_schedule_options_default(void) {
  return (rfr_schedule_options){
      .size = sizeof(rfr_schedule_options), .kind = RFR_SCHEDULE_1F1B, .ranks = 1, .microbatches = 1};
}

typedef struct maker {
  rfr_schedule *s;
  rfr_status status;
  int p, m, v, g;
} maker;

static void add(maker *k, int op, int stage, int microbatch) {
  if (k->status == RFR_OK && microbatch < k->m) k->status = rfi_schedule_add(k->s, op, stage, microbatch);
}

/* ---- GPipe ---- */

static void gpipe(maker *k, int r) {
  for (int c = 0; c < k->v; c++)
    for (int i = 0; i < k->m; i++) add(k, RFR_ACTION_F, c * k->p + r, i);
  for (int c = k->v - 1; c >= 0; c--)
    for (int i = 0; i < k->m; i++) add(k, RFR_ACTION_B, c * k->p + r, i);
}

/* ---- 1F1B, interleaved, ZB-H1 ---- */

/* The size at which a group of n microbatches is walked. */
static int64_t walked(const maker *k, int n) { return n == 0 ? 0 : k->v > 1 && n < k->p ? k->p : n; }
/* The number of forwards that a rank walks. */
static int64_t walk_length(const maker *k) { return (walked(k, k->g) * (k->m / k->g) + walked(k, k->m % k->g)) * k->v; }

/* The i-th action of the walk; if it does not exist, its microbatch is k->m. */
static void place_of(const maker *k, int64_t i, int *chunk, int *microbatch) {
  const int64_t whole = walked(k, k->g) * k->v, groups = k->m / k->g, group = i / whole < groups ? i / whole : groups;
  const int size = group < groups ? k->g : k->m % k->g;
  const int64_t within = i - group * whole, n = walked(k, size);
  *chunk = (int)(within / n);
  *microbatch = within % n < size ? (int)(group * k->g + within % n) : k->m;
}

static void forward(maker *k, int r, int64_t i) {
  int c, m;
  place_of(k, i, &c, &m);
  add(k, RFR_ACTION_F, c * k->p + r, m);
}

static void backward(maker *k, int op, int r, int64_t i) {
  int c, m;
  place_of(k, i, &c, &m);
  add(k, op, (k->v - 1 - c) * k->p + r, m);
}

/* split: W is a separate action, r backwards after its I, so that every rank needs about as much memory as the
 * first. */
static void one_forward_one_backward(maker *k, int r, bool split) {
  const int64_t total = walk_length(k),
                ahead = (int64_t)(k->p - r - 1) * (k->v > 1 ? 2 : 1) + (int64_t)(k->v - 1) * walked(k, k->g);
  const int64_t warm = ahead < total ? ahead : total;
  int64_t w = 0;
  for (int64_t i = 0; i < warm; i++) forward(k, r, i);
  for (int64_t i = warm; i < total + warm; i++) {
    if (i < total) forward(k, r, i);
    backward(k, split ? RFR_ACTION_I : RFR_ACTION_B, r, i - warm);
    if (split && i - warm >= r) backward(k, RFR_ACTION_W, r, w++);
  }
  for (; split && w < total; w++) backward(k, RFR_ACTION_W, r, w);
}

/* ---- ZB-V ---- */

/* The next microbatch of each op in one of a rank's two stages. */
typedef struct arm {
  int stage, f, i, w;
} arm;

static void next_f(maker *k, arm *a) { add(k, RFR_ACTION_F, a->stage, a->f++); }
static void next_i(maker *k, arm *a) { add(k, RFR_ACTION_I, a->stage, a->i++); }
static void next_w(maker *k, arm *a) { add(k, RFR_ACTION_W, a->stage, a->w++); }

static void zb_v(maker *k, int r) {
  const int p = k->p, n = k->m > 2 * p - 1 ? k->m : 2 * p - 1;
  arm down = {.stage = r}, up = {.stage = 2 * p - 1 - r};
  for (int i = 0; i < 2 * (p - r) - 1; i++) next_f(k, &down);
  for (int i = 0; i < r; i++) next_f(k, &up), next_f(k, &down);
  for (int i = 0; i < p - r; i++) next_f(k, &up), next_i(k, &up), next_w(k, &up);
  while (up.f < down.f || down.f < n) {
    if (down.f < n) next_f(k, &down);
    next_i(k, &down), next_w(k, &down);
    next_f(k, &up), next_i(k, &up), next_w(k, &up);
  }
  for (int i = 0; i < r; i++) next_i(k, &down), next_i(k, &up);
  for (int i = 0; i < p - r; i++) next_i(k, &down), next_w(k, &down);
  while (up.w < up.i) next_w(k, &up);
  while (down.w < down.i) next_w(k, &down);
}

/* ---- the public function ---- */

static rfr_status check_options(const rfr_schedule_options *o, maker *k) {
  const char *const name = rfr_schedule_kind_name(o->kind);
  if (!name) return rfi_fail(RFI_E_ARGUMENT, "there is no schedule kind %d", (int)o->kind);
  if (o->ranks < 1) return rfi_fail(RFI_E_ARGUMENT, "%s: ranks is %d; it must be at least 1", name, o->ranks);
  if (o->microbatches < 1)
    return rfi_fail(RFI_E_ARGUMENT, "%s: microbatches is %d; it must be at least 1", name, o->microbatches);
  if (o->chunks < 0)
    return rfi_fail(RFI_E_ARGUMENT, "%s: chunks is %d; it must be at least 1, or 0 for the default", name, o->chunks);
  if (o->group < 0)
    return rfi_fail(RFI_E_ARGUMENT, "%s: group is %d; it must be at least 1, or 0 for the number of ranks", name,
                    o->group);
  const bool two = o->kind == RFR_SCHEDULE_INTERLEAVED || o->kind == RFR_SCHEDULE_ZB_V;
  *k = (maker){.p = o->ranks, .m = o->microbatches, .v = o->chunks ? o->chunks : two ? 2 : 1};
  if (o->kind == RFR_SCHEDULE_1F1B && k->v != 1)
    return rfi_fail(RFI_E_ARGUMENT, "1f1b has 1 chunk per rank, not %d; interleaved has several", k->v);
  if (o->kind == RFR_SCHEDULE_ZB_V && k->v != 2)
    return rfi_fail(RFI_E_ARGUMENT, "zb-v has 2 chunks per rank, not %d; zb-h1 allows any number", k->v);
  const bool grouped = k->v > 1 && (o->kind == RFR_SCHEDULE_INTERLEAVED || o->kind == RFR_SCHEDULE_ZB_H1);
  if (o->group && !grouped)
    return rfi_fail(RFI_E_ARGUMENT,
                    "%s with %d chunks has no groups; only interleaved and zb-h1 with several chunks have them", name,
                    k->v);
  k->g = grouped ? o->group ? o->group : k->p : k->m;
  if (k->g > k->m) k->g = k->m;
  const int64_t longest = (int64_t)k->m + 2 * (int64_t)k->p; /* size of a group and of ZB-V, in microbatches */
  if ((int64_t)k->p * k->v > MOST || longest * k->v > MOST || walk_length(k) * 3 > MOST / k->p ||
      longest * k->v * 3 > MOST / k->p)
    return rfi_fail(RFI_E_OVERFLOW, "%s: %d ranks x %d chunks x %d microbatches are more than %d actions", name, k->p,
                    k->v, k->m, MOST);
  return RFR_OK;
}

const char *rfr_schedule_kind_name(rfr_schedule_kind kind) {
  static const char *const names[] = {
#define NAME(name, text) text,
      RFR_SCHEDULE_KINDS(NAME)
#undef NAME
  };
  return (unsigned)kind < sizeof names / sizeof *names ? names[kind] : NULL;
}

rfr_status rfr_schedule_generate(rfr_ctx *ctx, const rfr_schedule_options *options, rfr_schedule **out) {
  maker k;
  *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(options, "rfr_schedule_options"));
  RFI_TRY(rfi_check_options("rfr_schedule_options", options, options->size, sizeof *options));
  RFI_TRY(check_options(options, &k));
  RFI_TRY(rfi_schedule_open(ctx, "", &k.s));
  for (int r = 0; r < k.p && k.status == RFR_OK; r++) {
    k.status = rfi_schedule_rank(k.s, 0);
    switch (options->kind) {
      case RFR_SCHEDULE_GPIPE: gpipe(&k, r); break;
      case RFR_SCHEDULE_1F1B:
      case RFR_SCHEDULE_INTERLEAVED: one_forward_one_backward(&k, r, false); break;
      case RFR_SCHEDULE_ZB_H1: one_forward_one_backward(&k, r, true); break;
      case RFR_SCHEDULE_ZB_V: zb_v(&k, r); break;
    }
  }
  if (k.status == RFR_OK) {
    RFI_TRY(rfi_schedule_close(&k.s));
    *out = k.s;
  } else {
    rfr_schedule_destroy(k.s);
  }
  return k.status;
}
