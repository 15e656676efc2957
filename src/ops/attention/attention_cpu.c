/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention within packed documents, forward and backward, without a T x T buffer:
 *
 *   S = scale q kT,  P = exp(S - lse),  o = P v
 *   delta = rowsum(do * o),  dS = P * (do vT - delta)
 *   dv = PT do,  dk = scale dST q,  dq = scale dS k
 *
 * With a cap, S = cap tanh(scale q kT / cap), and dS has the factor 1 - (S / cap)^2.
 *
 * Work is cut into blocks of BLOCK_Q rows of q; each loops over the keys that its rows attend to, in tiles of BLOCK_K.
 * Scores are stored transposed, keys down and rows of q across: a row's maximum and sum then are in one lane of a
 * vector, k and v enter the register tile without a transpose, and the transposed scores are the operand that dk and dv
 * need. The forward keeps a running maximum and sum per row (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv
 * 2307.08691). exp is 2^x of scores scaled by log2 e.
 *
 * `offsets`, a device value, and the window decide which rows attend to which keys. They decide which tiles are
 * skipped, never how the work is split. Offsets that descend or are out of range are clamped; rows outside all
 * documents give o = 0, lse = -inf, gradients 0.
 *
 * A non-finite v affects only the rows that attend to it. The backward does not ensure this: a non-finite gradient
 * skips the step.
 *
 * With cached keys the rows of q are at positions of a text, and the cursor has the length of the text. A single row,
 * the usual step of generation, is computed without padding to a block.
 *
 * In the backward one thread computes all of dk and dv of a kv head, so no two threads write the same memory and no sum
 * depends on timing. If the row blocks of a kv head are split into `segments` interleaved shares, one thread computes
 * each share, and the shares are added in order at the end.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/attention/packed.h"
#include "ops/decode/cursor.h"
#include "ops/decode/sequences.h"
#include "ops/matmul/tile.h"

enum {
  /* a multiple of RFI_NR for every instruction set; small, because tiles on the diagonal waste half their work */
  BLOCK_Q = 32,
  BLOCK_K = 64,
  VECTORS = BLOCK_Q / RFI_LANES,
  MIN_WORK = 1 << 16, /* with less work one thread does everything */
};
enum { SCALE, CAUSAL, WINDOW, CAP }; /* attributes */

typedef struct shape {
  int64_t T, H, Hk, D, P; /* P: D rounded up to full panels */
  int64_t group, blocks;  /* heads of q per head of k; blocks of rows */
  int threads, segments;  /* segments of a head's rows; backward only */
  size_t ranges, scratch; /* in floats: ranges that all threads share, blocks of each thread */
  size_t sums, n_sums;    /* floats of one (dk, dv) pair, and the number of pairs (backward) */
} shape;

static int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

static shape shape_make(const rfi_call *call, const rfi_arg *q, const rfi_arg *k, bool backward) {
  shape s = {.T = q->type.shape[0], .H = q->type.shape[1], .Hk = k->type.shape[1], .D = q->type.shape[2]};
  s.P = round_up(s.D, RFI_NR);
  s.group = s.H / s.Hk;
  s.blocks = (s.T + BLOCK_Q - 1) / BLOCK_Q;
  s.segments = 1;
  int64_t tasks = s.H * s.blocks,
          seen = call->attr[WINDOW].i > 0 && call->attr[WINDOW].i < s.T ? call->attr[WINDOW].i : s.T;
  s.threads = call->threads < 1 || s.H * s.T * seen < MIN_WORK ? 1 : call->threads;
  if (backward) { /* the number of tasks is a multiple of the threads, or several per thread */
    while (s.Hk * s.segments % s.threads != 0 && s.Hk * s.segments < 4 * s.threads && s.segments < s.blocks)
      s.segments++;
    tasks = s.Hk * s.segments;
  }
  if (s.threads > tasks) s.threads = tasks > 0 ? (int)tasks : 1;
  s.ranges = (size_t)round_up(2 * s.T, 16);
  /* forward: qT, S, o, k, v, five vectors; backward: qT, doT, q, do, o and dq, S, dP, k, v, four vectors */
  s.scratch = (size_t)((backward ? 2 : 1) * s.D * BLOCK_Q + (backward ? 3 : 1) * s.P * BLOCK_Q +
                       (backward ? 2 : 1) * BLOCK_K * BLOCK_Q + 2 * s.P * BLOCK_K + 5 * BLOCK_Q);
  s.scratch = (size_t)round_up((int64_t)s.scratch, 16);
  if (backward) {
    s.sums = (size_t)(2 * s.T * s.P);
    s.n_sums = s.segments == 1 ? (size_t)s.threads : (size_t)(s.Hk * s.segments);
  }
  return s;
}

static size_t bytes(const shape *s) { return 4 * (s->ranges + s->scratch * (size_t)s->threads + s->sums * s->n_sums); }
static size_t forward_workspace(const rfi_call *call) {
  shape s = shape_make(call, &call->in[0], &call->in[1], false);
  return bytes(&s);
}
static size_t backward_workspace(const rfi_call *call) {
  shape s = shape_make(call, &call->in[1], &call->in[2], true);
  return bytes(&s);
}

/* ---- vectors ---- */

RFI_INLINE rfi_vf splat(float x) { return (rfi_vf){0} + x; }
RFI_INLINE rfi_vf choose(rfi_vi mask, rfi_vf yes, rfi_vf no) {
  return (rfi_vf)(((rfi_vi)yes & mask) | ((rfi_vi)no & ~mask));
}

/* 2^x for x <= 126 within 2 units in the last place; 0 below 2^-126. NaN stays NaN, because the power of two is
 * multiplied and not added to the exponent bits. x = n + f, |f| <= 1/2, minimax polynomial in f. */
RFI_INLINE rfi_vf exp2_of(rfi_vf x) {
  const rfi_vf magic = splat(0x1.8p23f);
  rfi_vf shifted = x + magic, f = x - (shifted - magic);
  rfi_vf p = splat(0x1.444p-13f);
  p = p * f + splat(0x1.5f48c0p-10f);
  p = p * f + splat(0x1.3b2a1cp-7f);
  p = p * f + splat(0x1.c6aeccp-5f);
  p = p * f + splat(0x1.ebfbe0p-3f);
  p = p * f + splat(0x1.62e430p-1f);
  p = p * f + splat(1.0f);
  rfi_vf power = (rfi_vf)(((rfi_vi)shifted - (rfi_vi)magic + 127) << 23);
  return (rfi_vf)((rfi_vi)(p * power) & ~(rfi_vi)(x < splat(-126.0f)));
}

/* ---- which rows attend to which keys ---- */

/* Row t's document is rows lo[t] ... hi[t] - 1, an empty range for a row outside all documents. */
static void find_ranges(const shape *s, const rfi_arg *offsets, int32_t *lo, int32_t *hi) {
  const int32_t *x = offsets->data;
  int64_t step = offsets->stride[0], next = 0, end = s->T < INT32_MAX ? s->T : INT32_MAX;
  memset(lo, 0, (size_t)s->T * sizeof *lo);
  memset(hi, 0, (size_t)s->T * sizeof *hi);
  for (int64_t d = 0; d + 1 < offsets->type.shape[0]; d++) {
    int64_t from = x[d * step], to = x[(d + 1) * step];
    if (from < next) from = next;
    if (to > end) to = end;
    for (int64_t t = from; t < to; t++) {
      lo[t] = (int32_t)from;
      hi[t] = (int32_t)to;
    }
    if (to > next) next = to;
  }
}

typedef struct block {
  int64_t t0, first, last; /* rows t0 ... t0 + n - 1 attend only to keys among first ... last - 1 */
  int n;
  int32_t all_from, all_to; /* every row attends to keys all_from ... all_to - 1 */
  int32_t from[BLOCK_Q], to[BLOCK_Q];
} block;

static block block_make(const shape *s, int64_t t0, const int32_t *lo, const int32_t *hi, const rfi_attr *attr) {
  block b = {.t0 = t0, .first = INT32_MAX, .n = s->T - t0 < BLOCK_Q ? (int)(s->T - t0) : BLOCK_Q, .all_to = INT32_MAX};
  for (int i = 0; i < b.n; i++) {
    int64_t t = t0 + i;
    b.from[i] = attr[WINDOW].i > 0 && t - lo[t] >= attr[WINDOW].i ? (int32_t)(t - attr[WINDOW].i + 1) : lo[t];
    b.to[i] = attr[CAUSAL].i && hi[t] > t ? (int32_t)(t + 1) : hi[t];
    if (b.all_from < b.from[i]) b.all_from = b.from[i];
    if (b.all_to > b.to[i]) b.all_to = b.to[i];
    if (b.from[i] >= b.to[i]) continue;
    if (b.first > b.from[i]) b.first = b.from[i];
    if (b.last < b.to[i]) b.last = b.to[i];
  }
  if (b.first > b.last) b.first = b.last;
  return b;
}

/* For one key of a tile, a mask over rows: all bits are set if row i of the block attends to the key. */
RFI_INLINE rfi_vi sees(const block *b, int v, int64_t key) {
  rfi_vi s = (rfi_vi){0} + (int32_t)key;
  return (*(const rfi_vi *)(b->from + v * RFI_LANES) <= s) & (s < *(const rfi_vi *)(b->to + v * RFI_LANES));
}

/* ---- operands ---- */

/* Returns rows t0 ... of a head as f32. Returns the operand itself if it is f32 and, for an operand that is read in
 * full panels, if the panels are full; otherwise a copy in `space`, padded with zeros. *ld receives the row stride. */
static const float *rows_of(const rfi_arg *x, const shape *s, int64_t head, int64_t t0, int64_t n, bool full_panels,
                            float *space, int64_t *ld) {
  rfr_dtype dtype = x->type.dtype;
  const void *from = rfi_at(x->data, dtype, t0 * x->stride[0] + head * x->stride[1]);
  if (dtype == RFR_F32 && x->stride[2] == 1 && (!full_panels || s->D == s->P)) {
    *ld = x->stride[0];
    return from;
  }
  rfi_pack(space, s->P, n, s->D, s->P, from, dtype, x->stride[0], x->stride[2]);
  *ld = s->P;
  return space;
}

/* out (D x BLOCK_Q) = scale * transposed rows of a block. */
static void columns_of(const rfi_arg *x, const shape *s, int64_t head, const block *b, float scale, float *out) {
  rfr_dtype dtype = x->type.dtype;
  rfi_pack(out, BLOCK_Q, s->D, b->n, BLOCK_Q, rfi_at(x->data, dtype, b->t0 * x->stride[0] + head * x->stride[1]), dtype,
           x->stride[2], x->stride[0]);
  if (scale != 1)
    for (int64_t i = 0; i < s->D * BLOCK_Q; i++) out[i] *= scale;
}

/* c (rows x n rounded up to panels) = or += a b. a is read by rows, or by columns if `t`. */
static void multiply(int64_t rows, int64_t n, int64_t k, const float *a, int64_t lda, bool t, const float *b,
                     int64_t ldb, float *c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n; j += RFI_NR)
    for (int64_t i = 0; i < rows; i += RFI_MR) {
      int mr = rows - i < RFI_MR ? (int)(rows - i) : RFI_MR;
      if (t) rfi_tile_t(mr, k, a + i, lda, b + j, ldb, c + i * ldc + j, ldc, add);
      else rfi_tile_n(mr, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
    }
}

/* ---- scores ---- */

/* The factor by which q is multiplied before the GEMM: scores are then in units of log2 e, or of the cap before
 * tanh. */
static float score_factor(const rfi_call *call) {
  return (float)(call->attr[SCALE].f * (call->attr[CAP].f > 0 ? 1 / call->attr[CAP].f : M_LOG2E));
}
/* The cap in units of log2 e; 0: none. */
static float score_cap(const rfi_call *call) { return (float)(call->attr[CAP].f * M_LOG2E); }
static void cap_tile(float *S, int keys, float cap) {
  for (int i = 0; i < keys * BLOCK_Q; i++) S[i] = cap * rfi_tanhf(S[i]);
}

/* ---- forward ---- */

typedef struct rows {
  float max[BLOCK_Q], sum[BLOCK_Q], shrink[BLOCK_Q];
} rows;

/* S (keys x BLOCK_Q) becomes 2^(S - max); earlier sums must be multiplied by `shrink`. */
static void softmax_tile(float *S, int keys, int64_t key0, const block *b, bool masked, rows *r) {
  const rfi_vf none = splat(-INFINITY);
  for (int v = 0; v < VECTORS; v++) {
    float *column = S + v * RFI_LANES;
    rfi_vf *max = (rfi_vf *)(r->max + v * RFI_LANES), *sum = (rfi_vf *)(r->sum + v * RFI_LANES);
    rfi_vf m = *max;
    for (int i = 0; i < keys; i++) {
      rfi_vf *x = (rfi_vf *)(column + i * BLOCK_Q);
      if (masked) *x = choose(sees(b, v, key0 + i), *x, none);
      m = choose((rfi_vi)(*x > m), *x, m);
    }
    rfi_vf base = choose((rfi_vi)(m > none), m, splat(0)); /* -inf: the row has attended to no key yet */
    rfi_vf shrink = exp2_of(*max - base), total = *sum * shrink;
    for (int i = 0; i < keys; i++) {
      rfi_vf *x = (rfi_vf *)(column + i * BLOCK_Q);
      *x = exp2_of(*x - base);
      total += *x;
    }
    *max = m;
    *sum = total;
    *(rfi_vf *)(r->shrink + v * RFI_LANES) = shrink;
  }
}

/* True if 0 times every element is 0, so there is no NaN and no infinity. */
RFI_INLINE bool is_finite_row(const float *x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < n; d++) sum += x[d] * 0;
  return sum == 0;
}

/* Copies a tile of v with zeros for keys that are not finite; marks the rows that attend to one of those keys. */
static const float *finite_rows(const float *v, int64_t ld, int64_t P, const block *b, int64_t key0, int n,
                                float *space, bool *dirty) {
  for (int k = 0; k < n; k++) {
    const bool finite = is_finite_row(v + k * ld, P);
    if (finite) memmove(space + k * P, v + k * ld, (size_t)P * sizeof *space);
    else memset(space + k * P, 0, (size_t)P * sizeof *space);
    for (int i = 0; i < b->n && !finite; i++) dirty[i] |= b->from[i] <= key0 + k && key0 + k < b->to[i];
  }
  return space;
}

/* Returns false if a row of o is not finite. In a tile, keys that a row does not attend to have probability 0, and 0
 * times a non-finite v is NaN. Such a block is computed a second time (`again`) with zeros for those v, and then writes
 * only the rows that attend to none of them. */
static bool forward_block(const rfi_call *call, const shape *s, int64_t head, const block *b, bool again,
                          float *scratch) {
  const rfi_arg *k = &call->in[1], *v = &call->in[2], *o = &call->out[0], *lse = &call->out[1];
  float *qT = scratch, *S = qT + s->D * BLOCK_Q, *acc = S + BLOCK_K * BLOCK_Q, *k_space = acc + s->P * BLOCK_Q;
  float *v_space = k_space + s->P * BLOCK_K;
  const float cap = score_cap(call);
  int64_t kv = head / s->group, ldk, ldv;
  bool dirty[BLOCK_Q] = {false}, finite = true;
  rows r;
  for (int i = 0; i < BLOCK_Q; i++) {
    r.max[i] = -INFINITY;
    r.sum[i] = 0;
  }
  columns_of(&call->in[0], s, head, b, score_factor(call), qT);
  memset(acc, 0, (size_t)(s->P * BLOCK_Q) * sizeof *acc);
  for (int64_t key = b->first; key < b->last; key += BLOCK_K) {
    int n = b->last - key < BLOCK_K ? (int)(b->last - key) : BLOCK_K;
    const float *kr = rows_of(k, s, kv, key, n, false, k_space, &ldk);
    const float *vr = rows_of(v, s, kv, key, n, true, v_space, &ldv);
    if (again) vr = finite_rows(vr, ldv, s->P, b, key, n, v_space, dirty), ldv = s->P;
    multiply(n, BLOCK_Q, s->D, kr, ldk, false, qT, BLOCK_Q, S, BLOCK_Q, false);
    if (cap > 0) cap_tile(S, n, cap);
    softmax_tile(S, n, key, b, key < b->all_from || key + n > b->all_to, &r);
    if (key > b->first)
      for (int i = 0; i < b->n; i++)
        for (int64_t d = 0; d < s->P; d++) acc[i * s->P + d] *= r.shrink[i];
    multiply(b->n, s->P, n, S, BLOCK_Q, true, vr, ldv, acc, s->P, true);
  }
  for (int i = 0; i < b->n; i++) {
    if (dirty[i]) continue;
    float *row = acc + i * s->P, inverse = r.sum[i] == 0 ? 0 : 1 / r.sum[i];
    for (int64_t d = 0; d < s->D; d++) row[d] *= inverse;
    finite = finite && is_finite_row(row, s->D);
    int64_t at = ((b->t0 + i) * s->H + head) * s->D;
    if (o->data) rfi_narrow((char *)o->data + at * (o->type.dtype == RFR_F32 ? 4 : 2), o->type.dtype, row, s->D);
    if (lse->data)
      ((float *)lse->data)[head * s->T + b->t0 + i] =
          r.sum[i] == 0 ? -INFINITY : (float)((double)(r.max[i] + log2f(r.sum[i])) * M_LN2);
  }
  return finite;
}

static rfr_status forward(const rfi_call *call) {
  const shape s = shape_make(call, &call->in[0], &call->in[1], false);
  int32_t *lo = call->workspace, *hi = lo + s.T;
  float *scratch = (float *)call->workspace + s.ranges;
  int64_t tasks = s.H * s.blocks;
  if (tasks == 0) return RFR_OK;
  find_ranges(&s, &call->in[3], lo, hi);
#pragma omp parallel for schedule(dynamic, 1) num_threads(s.threads) if (s.threads > 1)
  for (int64_t task = 0; task < tasks; task++) {
    block b = block_make(&s, task % s.blocks * BLOCK_Q, lo, hi, call->attr);
    float *own = scratch + s.scratch * (size_t)rfi_thread();
    if (!forward_block(call, &s, task / s.blocks, &b, false, own))
      forward_block(call, &s, task / s.blocks, &b, true, own);
  }
  return RFR_OK;
}

/* ---- cached keys ---- */

enum { FEW_ROWS = 8 }; /* with fewer rows, a loop over rows is faster than a block of BLOCK_Q */

/* The shape of the call for one text. Threads share the tasks of all texts. */
static shape shape_cached(const rfi_call *call) {
  rfi_text_call of;
  const int64_t texts = rfi_texts(&call->in[3].type);
  const rfi_call one = rfi_call_of_text(call, &rfi_split_attention_cached, 0, &of);
  shape s = shape_make(call, &one.in[0], &one.in[1], false);
  int64_t tasks = texts * s.H * (s.T < FEW_ROWS ? s.T : s.blocks);
  s.threads = call->threads < 1 || texts * s.H * s.T * one.in[1].type.shape[0] < MIN_WORK ? 1 : call->threads;
  if (s.threads > tasks) s.threads = tasks > 0 ? (int)tasks : 1;
  s.ranges = 0;
  return s;
}

static size_t cached_workspace(const rfi_call *call) {
  shape s = shape_cached(call);
  return bytes(&s);
}

/* The first key that the row at `position` attends to. */
static int64_t first_seen(const rfi_call *call, int64_t position) {
  const int64_t window = call->attr[WINDOW].i;
  return window > 0 && position >= window ? position - window + 1 : 0;
}

/* Computes row t of a head, which attends to keys first ... last - 1. */
static void cached_row(const rfi_call *call, const shape *s, int64_t head, int64_t t, int64_t first, int64_t last,
                       float *scratch) {
  const rfi_arg *q = &call->in[0], *k = &call->in[1], *v = &call->in[2], *o = &call->out[0];
  float *S = scratch, *acc = S + BLOCK_K, *k_space = acc + s->P, *v_space = k_space + s->P * BLOCK_K;
  float *x = v_space + s->P * BLOCK_K, max = -INFINITY, sum = 0;
  const float by = score_factor(call), cap = score_cap(call);
  int64_t kv = head / s->group, ldk, ldv;
  rfi_pack(x, s->D, 1, s->D, s->D, rfi_at(q->data, q->type.dtype, t * q->stride[0] + head * q->stride[1]),
           q->type.dtype, q->stride[0], q->stride[2]);
  memset(acc, 0, (size_t)s->P * sizeof *acc);
  for (int64_t key = first; key < last; key += BLOCK_K) {
    int n = last - key < BLOCK_K ? (int)(last - key) : BLOCK_K;
    const float *kr = rows_of(k, s, kv, key, n, false, k_space, &ldk);
    const float *vr = rows_of(v, s, kv, key, n, true, v_space, &ldv);
    float before = max;
    for (int i = 0; i < n; i++) {
      const float *y = kr + i * ldk;
      float score = 0;
#pragma omp simd reduction(+ : score)
      for (int64_t d = 0; d < s->D; d++) score += x[d] * y[d];
      S[i] = cap > 0 ? cap * rfi_tanhf(score * by) : score * by;
      max = S[i] > max ? S[i] : max;
    }
    for (int i = n; i < BLOCK_K; i++) S[i] = -INFINITY;
    rfi_vf base = splat(max > -INFINITY ? max : 0), total = splat(0), shrink = exp2_of(splat(before) - base);
    for (int i = 0; i < BLOCK_K; i += RFI_LANES) {
      rfi_vf p = exp2_of(*(rfi_vf *)(S + i) - base);
      *(rfi_vf *)(S + i) = p;
      total += p;
    }
    sum *= shrink[0];
    for (int i = 0; i < RFI_LANES; i++) sum += total[i];
    for (int64_t d = 0; d < s->P && key > first; d++) acc[d] *= shrink[0];
    multiply(1, s->P, n, S, BLOCK_K, false, vr, ldv, acc, s->P, true);
  }
  for (int64_t d = 0; d < s->D; d++) acc[d] *= sum == 0 ? 0 : 1 / sum;
  rfi_narrow((char *)o->data + (t * s->H + head) * s->D * (o->type.dtype == RFR_F32 ? 4 : 2), o->type.dtype, acc, s->D);
}

/* Computes one block of rows, or with few rows one row, of a head of one text. */
static void cached_part(const rfi_call *call, const shape *s, int64_t head, int64_t part, float *scratch) {
  const rfi_take take = rfi_take_next(&call->in[3], s->T, call->in[1].type.shape[0]);
  const rfi_arg out[2] = {call->out[0], {.type = {.rank = -1}}}; /* no lse */
  rfi_call forward = *call;
  forward.out = out;
  if (s->T < FEW_ROWS) {
    const int64_t position = take.first + part;
    cached_row(call, s, head, part, first_seen(call, position), part < take.count ? position + 1 : 0, scratch);
    return;
  }
  const int64_t t0 = part * BLOCK_Q;
  block b = {.t0 = t0, .n = s->T - t0 < BLOCK_Q ? (int)(s->T - t0) : BLOCK_Q};
  for (int i = 0; i < b.n; i++) {
    const int64_t position = take.first + b.t0 + i;
    b.from[i] = (int32_t)first_seen(call, position);
    b.to[i] = b.t0 + i < take.count ? (int32_t)(position + 1) : 0;
    if (i == 0) b.first = b.from[0]; /* `from` and `to` ascend over the valid rows */
    if (b.from[i] > b.all_from) b.all_from = b.from[i];
    if (b.to[i] > b.last) b.last = b.to[i];
    if (i == 0 || b.to[i] < b.all_to) b.all_to = b.to[i];
  }
  if (!forward_block(&forward, s, head, &b, false, scratch)) forward_block(&forward, s, head, &b, true, scratch);
}

/* Cached attention: rows of q are positions of a text, keys are in its cache. The cursor determines which tiles are
 * read. */
static rfr_status cached(const rfi_call *call) {
  const shape s = shape_cached(call);
  const int64_t parts = s.T < FEW_ROWS ? s.T : s.blocks, texts = rfi_texts(&call->in[3].type);
  if (!call->out[0].data) return RFR_OK;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s.threads) if (s.threads > 1)
  for (int64_t task = 0; task < texts * s.H * parts; task++) {
    rfi_text_call of;
    const rfi_call one = rfi_call_of_text(call, &rfi_split_attention_cached, task / (s.H * parts), &of);
    float *scratch = (float *)call->workspace + s.scratch * (size_t)rfi_thread();
    cached_part(&one, &s, task / parts % s.H, task % parts, scratch);
  }
  return RFR_OK;
}

/* ---- backward ---- */

/* S becomes P = 2^(S - lse), 0 where a row does not attend to the key, and dP becomes dS = P (dP - delta). If
 * inverse_cap > 0, dS is also multiplied by the slope of the cap, 1 - (S inverse_cap)^2. */
static void gradient_tile(float *S, float *dP, int keys, int64_t key0, const block *b, bool masked, const float *lse,
                          const float *delta, float inverse_cap) {
  for (int v = 0; v < VECTORS; v++) {
    rfi_vf l = *(const rfi_vf *)(lse + v * RFI_LANES), d = *(const rfi_vf *)(delta + v * RFI_LANES);
    for (int i = 0; i < keys; i++) {
      rfi_vf *x = (rfi_vf *)(S + i * BLOCK_Q + v * RFI_LANES), *y = (rfi_vf *)(dP + i * BLOCK_Q + v * RFI_LANES);
      rfi_vf p = exp2_of(*x - l), ds = p * (*y - d), bent = *x * inverse_cap;
      if (inverse_cap > 0) ds *= 1 - bent * bent;
      if (masked) {
        rfi_vi seen = sees(b, v, key0 + i);
        p = (rfi_vf)((rfi_vi)p & seen);
        ds = (rfi_vf)((rfi_vi)ds & seen);
      }
      *x = p;
      *y = ds;
    }
  }
}

/* One head's block of rows: writes dq, accumulates dk and dv (T x P, not scaled yet). */
static void backward_block(const rfi_call *call, const shape *s, int64_t head, const block *b, float *scratch,
                           float *dk, float *dv) {
  const rfi_arg *dout = &call->in[0], *q = &call->in[1], *k = &call->in[2], *v = &call->in[3], *dq = &call->out[0];
  float *qT = scratch, *doT = qT + s->D * BLOCK_Q, *q_space = doT + s->D * BLOCK_Q,
        *do_space = q_space + s->P * BLOCK_Q;
  float *acc = do_space + s->P * BLOCK_Q, *S = acc + s->P * BLOCK_Q, *dP = S + BLOCK_K * BLOCK_Q;
  float *k_space = dP + BLOCK_K * BLOCK_Q, *v_space = k_space + s->P * BLOCK_K;
  float lse[BLOCK_Q] = {0}, delta[BLOCK_Q] = {0};
  const float cap = score_cap(call);
  int64_t kv = head / s->group, ldq, ldo, ldk, ldv, ld;
  bool want_dk = call->out[1].data, want_dv = call->out[2].data;
  columns_of(q, s, head, b, score_factor(call), qT);
  columns_of(dout, s, head, b, 1, doT);
  const float *qr = rows_of(q, s, head, b->t0, b->n, true, q_space, &ldq);
  const float *dor = rows_of(dout, s, head, b->t0, b->n, true, do_space, &ldo);
  const float *o = rows_of(&call->in[4], s, head, b->t0, b->n, false, acc, &ld);
  for (int i = 0; i < b->n; i++) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < s->D; d++) sum += dor[i * ldo + d] * o[i * ld + d];
    delta[i] = sum;
    const rfi_arg *l = &call->in[5];
    lse[i] = ((const float *)l->data)[head * l->stride[0] + (b->t0 + i) * l->stride[1]] * (float)M_LOG2E;
  }
  memset(acc, 0, (size_t)(s->P * BLOCK_Q) * sizeof *acc);
  for (int64_t key = b->first; key < b->last; key += BLOCK_K) {
    int n = b->last - key < BLOCK_K ? (int)(b->last - key) : BLOCK_K;
    const float *kr = rows_of(k, s, kv, key, n, true, k_space, &ldk);
    const float *vr = rows_of(v, s, kv, key, n, false, v_space, &ldv);
    multiply(n, BLOCK_Q, s->D, kr, ldk, false, qT, BLOCK_Q, S, BLOCK_Q, false);
    multiply(n, BLOCK_Q, s->D, vr, ldv, false, doT, BLOCK_Q, dP, BLOCK_Q, false);
    if (cap > 0) cap_tile(S, n, cap);
    gradient_tile(S, dP, n, key, b, key < b->all_from || key + n > b->all_to, lse, delta, cap > 0 ? 1 / cap : 0);
    if (want_dv) multiply(n, s->P, b->n, S, BLOCK_Q, false, dor, ldo, dv + key * s->P, s->P, true);
    if (want_dk) multiply(n, s->P, b->n, dP, BLOCK_Q, false, qr, ldq, dk + key * s->P, s->P, true);
    if (dq->data) multiply(b->n, s->P, n, dP, BLOCK_Q, true, kr, ldk, acc, s->P, true);
  }
  for (int i = 0; i < b->n && dq->data; i++) {
    float *row = acc + i * s->P;
    for (int64_t d = 0; d < s->D; d++) row[d] *= (float)call->attr[SCALE].f;
    int64_t at = (b->t0 + i) * dq->stride[0] + head * s->D;
    rfi_narrow((char *)dq->data + at * (dq->type.dtype == RFR_F32 ? 4 : 2), dq->type.dtype, row, s->D);
  }
}

/* Adds a kv head's segments, in order, to the first one and writes rows t0 ... of it. */
static void write_sums(const shape *s, int64_t kv, int64_t t0, int64_t n, float *sums, float scale, const rfi_arg *y) {
  if (!y->data) return;
  for (int64_t t = t0; t < t0 + n; t++) {
    float *row = sums + t * s->P;
    for (int g = 1; g < s->segments; g++)
      for (int64_t d = 0; d < s->D; d++) row[d] += row[(size_t)g * s->sums + (size_t)d];
    if (scale != 1)
      for (int64_t d = 0; d < s->D; d++) row[d] *= scale;
    int64_t at = t * y->stride[0] + kv * s->D;
    rfi_narrow((char *)y->data + at * (y->type.dtype == RFR_F32 ? 4 : 2), y->type.dtype, row, s->D);
  }
}

static rfr_status backward(const rfi_call *call) {
  const shape s = shape_make(call, &call->in[1], &call->in[2], true);
  int32_t *lo = call->workspace, *hi = lo + s.T;
  float *scratch = (float *)call->workspace + s.ranges, *sums = scratch + s.scratch * (size_t)s.threads;
  float scale = (float)call->attr[SCALE].f;
  int64_t half = s.T * s.P;
  if (s.blocks == 0) return RFR_OK;
  find_ranges(&s, &call->in[6], lo, hi);
#pragma omp parallel for schedule(dynamic, 1) num_threads(s.threads) if (s.threads > 1)
  for (int64_t task = 0; task < s.Hk * s.segments; task++) {
    int64_t kv = task / s.segments, slot = s.segments == 1 ? rfi_thread() : task;
    float *own = scratch + s.scratch * (size_t)rfi_thread(), *dk = sums + s.sums * (size_t)slot, *dv = dk + half;
    memset(dk, 0, s.sums * sizeof *dk);
    for (int64_t g = 0; g < s.group; g++)
      for (int64_t i = task % s.segments; i < s.blocks; i += s.segments) {
        block b = block_make(&s, i * BLOCK_Q, lo, hi, call->attr);
        backward_block(call, &s, kv * s.group + g, &b, own, dk, dv);
      }
    if (s.segments > 1) continue;
    write_sums(&s, kv, 0, s.T, dk, scale, &call->out[1]);
    write_sums(&s, kv, 0, s.T, dv, 1, &call->out[2]);
  }
  if (s.segments == 1) return RFR_OK;
#pragma omp parallel for schedule(static) num_threads(s.threads) if (s.threads > 1)
  for (int64_t task = 0; task < s.Hk * s.blocks; task++) {
    int64_t kv = task / s.blocks, t0 = task % s.blocks * BLOCK_Q, n = s.T - t0 < BLOCK_Q ? s.T - t0 : BLOCK_Q;
    float *dk = sums + s.sums * (size_t)(kv * s.segments);
    write_sums(&s, kv, t0, n, dk, scale, &call->out[1]);
    write_sums(&s, kv, t0, n, dk + half, 1, &call->out[2]);
  }
  return RFR_OK;
}

/* dq, dk and dv are slices of the rows of one result. */
static rfr_status backward_packed(const rfi_call *call) {
  rfi_arg out[3];
  const rfi_call parts = rfi_attention_parts(call, out);
  return backward(&parts);
}

const rfi_kernel RFI_CPU(attention) = {forward, forward_workspace};
const rfi_kernel RFI_CPU(attention_cached) = {cached, cached_workspace};
const rfi_kernel RFI_CPU(attention_bwd) = {backward, backward_workspace};
const rfi_kernel RFI_CPU(attention_bwd_packed) = {backward_packed, backward_workspace};
