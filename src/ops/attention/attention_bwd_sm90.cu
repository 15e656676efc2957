/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradients of attention to head size 64 on Hopper's tensor cores, in one pass: five products instead of the seven
 * of a kernel for dq and one for dk and dv, and p made once.
 *
 * A block takes 128 keys of a head of k and v and walks over the queries that see them, 128 at a time, in tiles of 64
 * (a, b) so that one's products run while the other's p is made. dk and dv stay in registers; a tile's part of dq is
 * added to f32 sums in memory. Several blocks add to the same sums, in one order: the last keys that a tile sees first
 * (they store), then those before them, each when its turn has come. With a causal mask blocks run behind each other
 * that way and hardly wait. They take their work by a ticket, in that order, so that whoever waits, waits for work that
 * was begun before.
 *
 * Two warpgroups multiply, 64 keys each. Of the four other warps two load, one takes work and waits for turns, one
 * hands turns on when all have added: what takes long is on nobody's way. Between two barriers of the warpgroups, and
 * after the one that says that ds is in shared memory:
 *   dq = ds k of the tile before, s(a), dp(a), s(b) begin   add dq   p(a)  dv += p(a) do(a)   ds(a)  dp(b) begins,
 *   dk += ds(a) q(a)   p(b)  dv += p(b) do(b)   ds(b)  dk += ds(b) q(b)
 */
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_tiles_sm90.cuh"

enum { SIDE = 128, STAGES = 2, ITEMS = 4, MOST_D = 64 };
enum { THREADS = 384, LOADERS = 64, MATH_WARPS = 8, TAKERS = MATH_WARPS + LOADERS / 32 + 2, ROUND_THREADS = 256 };
enum { HALF = 64 * 128, TILE = 2 * HALF, STATS = SIDE * 12 }; /* bytes */
enum { KEYS_AT = 0, STAGES_AT = 2 * 2 * TILE, DS_AT = STAGES_AT + STAGES * 2 * TILE, STATS_AT = DS_AT + 4 * TILE };
enum { SHARED_BYTES = STATS_AT + STAGES * STATS };
enum { LOAD_REGISTERS = 24, MATH_REGISTERS = 240 };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A block's work: a piece of keys for a head of k and v. */
typedef struct item {
  piece w;
  int kv; /* -1: no more */
} item;

/* What the warps of a block tell each other. Counters only grow. */
typedef struct desk {
  uint64_t keys_full[2], keys_empty[2], full[STAGES], empty[STAGES];
  item items[ITEMS];
  unsigned published, begun; /* items; those that are as good as done */
  unsigned taken[ITEMS];     /* by each of the warps that read them */
  unsigned granted, added;   /* tiles whose turn has come; added by each of the warps that have dq */
} desk;

typedef struct place { int t, h; } place; /* a tile of queries: its first row, its head */

/* The tiles of queries that see an item's keys, one behind the other for each of its heads. */
typedef struct walk {
  int start, end, steps;
} walk;

static __device__ __forceinline__ walk walk_of(const problem &p, const piece &w) {
  walk x;
  x.start = p.causal ? w.first : w.first - (w.first - w.from + SIDE - 1) / SIDE * SIDE;
  x.end = p.window ? min(w.end, w.last - 1 + p.window) : w.end;
  x.steps = w.last > w.from ? (x.end - x.start + SIDE - 1) / SIDE * (p.H / p.Hk) : 0;
  return x;
}
static __device__ __forceinline__ place next_place(const walk &x, place at) {
  return at.t + SIDE < x.end ? place{at.t + SIDE, at.h} : place{x.start, at.h + 1};
}
/* Blocks that add to a tile before w's does. */
static __device__ __forceinline__ int blocks_before(const problem &p, const piece &w, place at) {
  return ((p.causal ? at.t : w.end - 1) - w.first) / SIDE;
}

static __device__ __forceinline__ void rest(void) { __nanosleep(64); }

static __device__ __forceinline__ unsigned seen_by_block(const unsigned *at) {
  unsigned x;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(x) : "r"(rfi_shared_address(at)) : "memory");
  return x;
}
static __device__ __forceinline__ void tell_block(unsigned *at, unsigned more) {
  asm volatile("red.release.cta.shared.add.u32 [%0], %1;" ::"r"(rfi_shared_address(at)), "r"(more) : "memory");
}
static __device__ __forceinline__ unsigned load_acquire(const unsigned *at) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
static __device__ __forceinline__ void add_release(unsigned *at) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

/* A warp's i-th item. */
static __device__ __forceinline__ item take(desk *d, unsigned i) {
  while (seen_by_block(&d->published) <= i) rest();
  const item x = d->items[i % ITEMS];
  __syncwarp();
  if ((threadIdx.x & 31) == 0) tell_block(&d->taken[i % ITEMS], 1);
  return x;
}

/* ---- loading: two warps ---- */

/* Rows t ... t + 127 of a head; zeros for those that are not of from ... end - 1. */
template <typename T>
__device__ __forceinline__ void load_side(uint32_t tile, const problem &p, const matrix &x, int t, int h, int from,
                                          int end) {
  constexpr int STEP = LOADERS / 8;
  const int row = (int)threadIdx.x / 8, chunk = (int)threadIdx.x % 8;
  const T *at = (const T *)x.data + (int64_t)h * x.head + (int64_t)(t + row) * x.row + chunk * 8;
  const int64_t step = STEP * x.row;
  const bool inside = chunk * 8 < p.D;
  tile += (uint32_t)(row * 128 + (((chunk ^ row) & 7) << 4));
  if (t >= from && t + SIDE <= end && p.D == 64) {
#pragma unroll
    for (int i = 0; i < SIDE; i += STEP, at += step) rfi_copy16(tile + (uint32_t)(i * 128), at, true);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < SIDE; i += STEP, at += step) {
    const bool present = inside && t + row + i >= from && t + row + i < end;
    rfi_copy16(tile + (uint32_t)(i * 128), present ? at : (const T *)x.data, present);
  }
}

/* lse and -delta of a tile's queries, as fragments want them. */
static __device__ __forceinline__ void load_stats(uint32_t stats, const problem &p, const piece &w, place at) {
#pragma unroll
  for (int i = (int)threadIdx.x; i < SIDE; i += LOADERS) {
    const int r = at.t + i, half = i / 64, pair = i % 8 / 2, n = i % 64 / 8, e = i & 1;
    const bool present = r >= w.from && r < w.end;
    const float2 *from = p.stats + (int64_t)at.h * p.T + (present ? r : 0);
    const uint32_t delta = stats + (uint32_t)(SIDE * 4 + half * 512 + n * 64 + pair * 16 + e * 4);
    rfi_copy4(stats + (uint32_t)(half * 256 + pair * 64 + n * 8 + e * 4), &from->x, present);
    rfi_copy4(delta, &from->y, present);
    rfi_copy4(delta + 8, &from->y, present);
  }
}

static __device__ __forceinline__ void loaded(uint32_t barrier) {
  rfi_copies_commit();
  rfi_copies_wait();
  rfi_shared_written();
  rfi_mbarrier_arrive(barrier);
}

template <typename T> static __device__ __forceinline__ void load_all(const problem &p, desk *d, uint32_t base) {
  unsigned tile = 0, kept = 0;
  for (unsigned i = 0;; i++) {
    const item x = take(d, i);
    if (x.kv < 0) return;
    const walk v = walk_of(p, x.w);
    if (v.steps == 0) continue;
    const uint32_t keys = base + (uint32_t)(KEYS_AT + (kept & 1) * 2 * TILE);
    if (kept >= 2) rfi_mbarrier_wait(rfi_shared_address(&d->keys_empty[kept & 1]), (int)(kept / 2 - 1) & 1);
    load_side<T>(keys, p, p.k, x.w.first, x.kv, x.w.from, x.w.last);
    load_side<T>(keys + TILE, p, p.v, x.w.first, x.kv, x.w.from, x.w.last);
    place at = {v.start, x.kv * (p.H / p.Hk)};
    for (int step = 0; step < v.steps; step++, tile++) {
      const unsigned stage = tile % STAGES;
      const uint32_t to = base + STAGES_AT + stage * 2 * TILE;
      if (tile >= STAGES) rfi_mbarrier_wait(rfi_shared_address(&d->empty[stage]), (int)(tile / STAGES - 1) & 1);
      load_side<T>(to, p, p.q, at.t, at.h, x.w.from, x.w.end);
      load_side<T>(to + TILE, p, p.dy, at.t, at.h, x.w.from, x.w.end);
      load_stats(base + STATS_AT + stage * STATS, p, x.w, at);
      loaded(rfi_shared_address(&d->full[stage]));
      if (step == 0) rfi_mbarrier_arrive(rfi_shared_address(&d->keys_full[kept & 1]));
      at = next_place(v, at);
    }
    kept++;
  }
}

/* ---- turns: a thread that takes work and waits for turns, one that hands them on ---- */

static __device__ __forceinline__ void publish(const problem &p, desk *d, unsigned i) {
  while (seen_by_block(&d->taken[i % ITEMS]) < i / ITEMS * TAKERS) rest();
  const unsigned count = (unsigned)*p.count;
  item x = {};
  const unsigned ticket = atomicAdd(p.turns - 1, 1u), at = ticket / (unsigned)p.Hk;
  x.kv = at < count ? (int)(ticket % (unsigned)p.Hk) : -1;
  if (at < count) x.w = p.pieces[count - 1 - at];
  d->items[i % ITEMS] = x;
  tell_block(&d->published, 1);
}

static __device__ __forceinline__ item take_alone(desk *d, unsigned i) {
  while (seen_by_block(&d->published) <= i) rest();
  const item x = d->items[i % ITEMS];
  tell_block(&d->taken[i % ITEMS], 1);
  return x;
}

static __device__ __forceinline__ void wait_for_turns(const problem &p, desk *d) {
  publish(p, d, 0);
  for (unsigned i = 0;; i++) {
    const item x = take_alone(d, i);
    if (x.kv < 0) return;
    const walk v = walk_of(p, x.w);
    place at = {v.start, x.kv * (p.H / p.Hk)};
    for (int step = 0; step < v.steps && p.out[0]; step++) {
      const unsigned before = (unsigned)blocks_before(p, x.w, at);
      while (load_acquire(p.turns + (int64_t)at.h * p.T + at.t) < before) {}
      tell_block(&d->granted, 1);
      at = next_place(v, at);
    }
    /* asked for in the last tile: others may wait for work that is held and not begun */
    while (seen_by_block(&d->begun) <= i) rest();
    publish(p, d, i + 1);
  }
}

static __device__ __forceinline__ void hand_turns_on(const problem &p, desk *d) {
  unsigned tile = 0;
  for (unsigned i = 0;; i++) {
    const item x = take_alone(d, i);
    if (x.kv < 0) return;
    if (!p.out[0]) continue;
    const walk v = walk_of(p, x.w);
    place at = {v.start, x.kv * (p.H / p.Hk)};
    for (int step = 0; step < v.steps; step++) {
      tile++;
      while (seen_by_block(&d->added) < tile * MATH_WARPS) __nanosleep(20);
      add_release(p.turns + (int64_t)at.h * p.T + at.t);
      at = next_place(v, at);
    }
  }
}

/* ---- products ---- */

/* c (64 x 64) += rows of a times the tile's rows, c being -delta of its columns. */
template <typename T, typename A>
__device__ __forceinline__ void multiply_less_delta(float (&c)[1][8][4], const float4 *delta, const A &a,
                                                    uint32_t tile) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float4 x = delta[n * 4];
    c[0][n][0] = x.x, c[0][n][1] = x.y, c[0][n][2] = x.z, c[0][n][3] = x.w;
  }
  rfi_wgmma_tie(c[0]);
  rfi_wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; k++) rfi_wgmma<T, false>(c[0], a.part(k), rfi_wgmma_panel(tile, (uint32_t)(k * 32)), true);
  rfi_wgmma_commit();
}

/* Starts c (64 x 64) = columns of a times columns of b, both of 128 rows. */
template <typename T>
__device__ __forceinline__ void multiply_columns(float (&c)[1][8][4], uint32_t a, uint32_t b) {
  rfi_wgmma_new(c[0]);
#pragma unroll
  for (int k = 0; k < SIDE / 16; k++)
    rfi_wgmma<T, true, true>(c[0], rfi_wgmma_panel(a, (uint32_t)(k * 2048)), rfi_wgmma_panel(b, (uint32_t)(k * 2048)),
                             k > 0);
  rfi_wgmma_commit();
}

/* A warp's 16 keys of a packed left operand, as rows of 64 queries. */
static __device__ __forceinline__ void store_left(uint32_t tile, const uint32_t (&a)[4][4], int warp, int lane) {
  const uint32_t row = tile + (uint32_t)((warp * 16 + (lane & 15)) * 128);
#pragma unroll
  for (int k = 0; k < 4; k++) rfi_stmatrix(row + (uint32_t)(((k * 2 + (lane >> 4)) ^ (lane & 7)) << 4), a[k]);
}

/* ---- probabilities and their gradient ---- */

/* lse: of queries 8 n + 2 (lane % 4) and next, for n = 0 ... 7. */
template <bool CAPPED>
static __device__ __forceinline__ void probabilities(const problem &p, float (&s)[1][8][4], const float4 *lse) {
  if (CAPPED) bend(p, s);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float4 y = lse[n / 2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[0][n][e] = rfi_exp2(fmaf(s[0][n][e], p.factor, -(e & 1 ? y.y : y.x)));
      s[0][n + 1][e] = rfi_exp2(fmaf(s[0][n + 1][e], p.factor, -(e & 1 ? y.w : y.z)));
    }
  }
}

template <bool CAPPED>
static __device__ __forceinline__ void slopes(const problem &p, float (&ds)[1][8][4], const float (&s)[1][8][4],
                                              const float4 *lse) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      ds[0][n][e] *= s[0][n][e];
      if (CAPPED && s[0][n][e] != 0) {
        const float4 y = lse[n / 2];
        const float bent = __fdividef(log2f(s[0][n][e]) + (n & 1 ? (e & 1 ? y.w : y.z) : (e & 1 ? y.y : y.x)), p.cap);
        ds[0][n][e] *= 1.0f - bent * bent;
      }
    }
}

/* The queries that see a thread's two keys. */
typedef struct seen { int from[2]; unsigned count[2]; } seen;

static __device__ __forceinline__ seen seen_by(const problem &p, const piece &w, int s0) {
  seen x;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int s = s0 + half * 8;
    x.from[half] = p.causal ? max(w.from, s) : w.from;
    const int end = p.window ? min(w.end, s + p.window) : w.end;
    x.count[half] = s >= w.from && s < w.last && end > x.from[half] ? (unsigned)(end - x.from[half]) : 0u;
  }
  return x;
}

/* Zeros where a query, the thread's first being t, does not see the key. */
static __device__ __forceinline__ void hide(float (&c)[1][8][4], const seen &x, int t) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if ((unsigned)(t + n * 8 + (e & 1) - x.from[e / 2]) >= x.count[e / 2]) c[0][n][e] = 0;
}

/* ---- dq ---- */

static __device__ __forceinline__ void add4(float *to, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}
static __device__ __forceinline__ void add2(float *to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

/* A warpgroup's 64 rows of a tile into the sums, when their turn has come; `tile`: so many were before. 16 rows of a
 * document lie as they do in a warp: four elements of lane i of n are at 128 n + 4 i. Fewer, at its end, lie row by
 * row. */
static __device__ __forceinline__ void add_rows(const problem &p, desk *d, const piece &w, const float (&dq)[1][8][4],
                                                place at, int group, unsigned tile) {
  if (!p.out[0]) return;
  const bool add = blocks_before(p, w, at) > 0;
  int lane; /* asked for here, so that no address is kept all the while */
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int t0 = at.t + group * 64 + ((int)threadIdx.x >> 5 & 3) * 16;
  float *const slab = p.sums + ((int64_t)at.h * p.T + t0) * 64;
  while (seen_by_block(&d->granted) <= tile) {}
  if (t0 + 16 <= w.end) {
    if (add) {
#pragma unroll
      for (int n = 0; n < 8; n++) add4(slab + n * 128 + lane * 4, dq[0][n]);
    } else {
#pragma unroll
      for (int n = 0; n < 8; n++)
        *(float4 *)(slab + n * 128 + lane * 4) = make_float4(dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = half * 8 + (lane >> 2);
      if (t0 + row >= w.end) continue;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        float *const to = slab + row * 64 + n * 8 + (lane & 3) * 2;
        if (add) add2(to, dq[0][n][2 * half], dq[0][n][2 * half + 1]);
        else *(float2 *)to = make_float2(dq[0][n][2 * half], dq[0][n][2 * half + 1]);
      }
    }
  }
  __syncwarp();
  if (lane == 0) tell_block(&d->added, 1);
}

/* ---- two warpgroups ---- */

static __device__ __forceinline__ void math_barrier(void) {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}
static __device__ __forceinline__ void left_by_warp(uint64_t *barrier, int lane) {
  __syncwarp();
  if (lane == 0) rfi_mbarrier_arrive(rfi_shared_address(barrier));
}

/* `warp` of the math warps; `tile`, `kept`: tiles and items with tiles that were before. */
template <typename T, bool CAPPED>
static __device__ __forceinline__ void gradients_of(const problem &p, desk *d, const item &work, char *shared, int warp,
                                                    unsigned &tile, unsigned &kept) {
  const piece &w = work.w;
  const int lane = threadIdx.x & 31, group = warp / 4, kv = work.kv;
  const uint32_t base = rfi_shared_address(shared), keys = base + (uint32_t)(KEYS_AT + (kept & 1) * 2 * TILE);
  const walk path = walk_of(p, w);
  const int s0 = w.first + warp * 16;
  const seen sight = seen_by(p, w, s0 + (lane >> 2));
  float dk[1][8][4] = {}, dv[1][8][4] = {};
  if (path.steps == 0 && threadIdx.x == 128) tell_block(&d->begun, 1);
  if (path.steps > 0) {
    left_rows<64, SIDE, false> k, v;
    k.load(keys, warp, lane);
    v.load(keys + TILE, warp, lane);
    place at = {path.start, kv * (p.H / p.Hk)}, before = at;
    rfi_mbarrier_wait(rfi_shared_address(&d->keys_full[kept & 1]), (int)(kept / 2) & 1);
    for (int step = 0; step < path.steps; step++, tile++) {
      const int stage = (int)(tile % STAGES), t = at.t + (lane & 3) * 2;
      const uint32_t q = base + (uint32_t)(STAGES_AT + stage * 2 * TILE), dy = q + TILE;
      const uint32_t ds = base + (uint32_t)(DS_AT + stage * 2 * TILE);
      const uint32_t ds_before = base + (uint32_t)(DS_AT + (stage ^ 1) * 2 * TILE);
      const float4 *const lse = (const float4 *)(shared + STATS_AT + stage * STATS) + (lane & 3) * 4;
      const float4 *const delta = (const float4 *)(shared + STATS_AT + stage * STATS + SIDE * 4) + (lane & 3);
      float dq[1][8][4], sa[1][8][4], da[1][8][4], sb[1][8][4], db[1][8][4];
      uint32_t left[4][4], right[4][4], left_b[4][4], right_b[4][4];
      rfi_mbarrier_wait(rfi_shared_address(&d->full[stage]), (int)(tile / STAGES) & 1);
      if (step == path.steps - 1 && threadIdx.x == 128) tell_block(&d->begun, 1);
      rfi_wgmma_begin();
      multiply_columns<T>(dq, ds_before + (uint32_t)(group * TILE), keys); /* of what lay there, in the first step */
      multiply<T, 64>(sa, k, q);
      multiply_less_delta<T>(da, delta, v, dy);
      multiply<T, 64>(sb, k, q + HALF);
      rfi_wgmma_wait<3>();
      rfi_wgmma_tie(dq[0]);
      if (step > 0) add_rows(p, d, w, dq, before, group, tile - 1);
      rfi_wgmma_wait<2>();
      rfi_wgmma_tie(sa[0]);
      probabilities<CAPPED>(p, sa, lse);
      if (at.t + 64 > w.end || !all_see(p, w, at.t, at.t + 64, s0, s0 + 16)) hide(sa, sight, t);
      pack<T>(left, sa);
      accumulate<T, 64>(dv, left, dy);
      rfi_wgmma_wait<2>();
      rfi_wgmma_tie(da[0]);
      slopes<CAPPED>(p, da, sa, lse);
      pack<T>(right, da);
      store_left(ds, right, warp, lane);
      multiply_less_delta<T>(db, delta + 32, v, dy + HALF);
      accumulate<T, 64>(dk, right, q);
      rfi_wgmma_wait<3>();
      rfi_wgmma_tie(sb[0]);
      probabilities<CAPPED>(p, sb, lse + 16);
      if (at.t + 128 > w.end || !all_see(p, w, at.t + 64, at.t + 128, s0, s0 + 16)) hide(sb, sight, t + 64);
      pack<T>(left_b, sb);
      accumulate<T, 64>(dv, left_b, dy + HALF);
      rfi_wgmma_wait<2>();
      rfi_wgmma_tie(db[0]);
      slopes<CAPPED>(p, db, sb, lse + 16);
      pack<T>(right_b, db);
      store_left(ds + TILE, right_b, warp, lane);
      accumulate<T, 64>(dk, right_b, q + HALF);
      rfi_shared_written();
      rfi_wgmma_wait<0>();
      rfi_wgmma_tie(dv[0]);
      rfi_wgmma_tie(dk[0]);
      left_by_warp(&d->empty[stage], lane);
      math_barrier();
      before = at;
      at = next_place(path, at);
    }
    float dq[1][8][4];
    rfi_wgmma_begin();
    multiply_columns<T>(dq, base + (uint32_t)(DS_AT + (tile - 1) % STAGES * 2 * TILE + group * TILE), keys);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(dq[0]);
    left_by_warp(&d->keys_empty[kept & 1], lane);
    kept++;
    add_rows(p, d, w, dq, before, group, tile - 1);
  }
  const int s1 = min(s0 + 16, w.last);
  char *const free_tiles = shared + DS_AT + tile % STAGES * 2 * TILE; /* not those that a dq is still made of */
  if (p.out[2]) store_rows<T, 64, SIDE>(p.out[2], p.row[2], p, kv, s0, s1, dv, free_tiles, warp * 16, NULL);
  if (!p.out[1]) return;
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) dk[0][n][e] *= p.scale;
  store_rows<T, 64, SIDE>(p.out[1], p.row[1], p, kv, s0, s1, dk, free_tiles + TILE, warp * 16, NULL);
}

#endif

template <typename T, bool CAPPED>
static __global__ void __launch_bounds__(THREADS, 1) attention_gradients(const __grid_constant__ problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(16) desk d;
  const int warp = (int)threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      rfi_mbarrier_init(rfi_shared_address(&d.keys_full[i]), LOADERS);
      rfi_mbarrier_init(rfi_shared_address(&d.keys_empty[i]), MATH_WARPS);
    }
    for (int i = 0; i < STAGES; i++) {
      rfi_mbarrier_init(rfi_shared_address(&d.full[i]), LOADERS);
      rfi_mbarrier_init(rfi_shared_address(&d.empty[i]), MATH_WARPS);
    }
    d.published = d.begun = d.granted = d.added = 0;
    for (int i = 0; i < ITEMS; i++) d.taken[i] = 0;
  }
  __syncthreads();
  if (warp < 4) {
    rfi_registers_fewer<LOAD_REGISTERS>();
    if (warp < LOADERS / 32) load_all<T>(p, &d, rfi_shared_address(shared));
    else if (warp == 2 && (threadIdx.x & 31) == 0) wait_for_turns(p, &d);
    else if (warp == 3 && (threadIdx.x & 31) == 0) hand_turns_on(p, &d);
  } else {
    rfi_registers_more<MATH_REGISTERS>();
    unsigned tile = 0, kept = 0;
    for (unsigned i = 0;; i++) {
      const item x = take(&d, i);
      if (x.kv < 0) break;
      gradients_of<T, CAPPED>(p, &d, x, shared, warp - 4, tile, kept);
    }
  }
#endif
}

/* The sums of dq, scaled and rounded; zeros for rows that see nothing. A warp takes 16 rows. */
template <typename T> static __global__ void __launch_bounds__(ROUND_THREADS) attention_dq_rounded(const problem p) {
  const int lane = threadIdx.x & 31;
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h);) {
    const int t0 = w.first + ((int)threadIdx.x >> 5) * 16;
    if (t0 >= w.last) continue;
    const float *slab = p.sums + ((int64_t)h * p.T + t0) * 64;
    const bool whole = t0 + 16 <= w.end;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = half * 8 + (lane >> 2), t = t0 + row;
      if (t >= w.last) continue;
      T *const to = (T *)p.out[0] + t * p.row[0] + h * p.D + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float *from = slab + (whole ? n * 128 + lane * 4 + half * 2 : row * 64 + n * 8 + (lane & 3) * 2);
        const float2 x = t >= w.from ? *(const float2 *)from : make_float2(0, 0);
        if (n * 8 < p.D) *(uint32_t *)(to + n * 8) = rfi_pair<T>(x.x * p.scale, x.y * p.scale);
      }
    }
  }
}

/* ---- launching ---- */

static layout make_layout(const rfr_call *call) {
  const int rows[BLOCK_TABLES] = {SIDE, SIDE};
  const int64_t T = call->in[1].type.shape[0], H = call->in[1].type.shape[1];
  layout l = layout_of(call, 1, 6, rows, 1);
  l.sums = reserve(&l.bytes, T * H * 64 * 4);
  l.turns = reserve(&l.bytes, 256 + T * H * 4) + 256;
  return l;
}

template <typename T> static rfr_status backward_of(const rfr_call *call, const problem *given, const layout *l) {
  problem p = *given;
  char *const at = (char *)call->workspace;
  p.pieces = (const piece *)(at + l->pieces[0]);
  p.count = (const int *)(at + l->count[0]);
  p.sums = (float *)(at + l->sums);
  p.turns = (unsigned *)(at + l->turns);
  const kernel_fn kernel = p.cap != 0 ? attention_gradients<T, true> : attention_gradients<T, false>;
  const size_t turns = (size_t)p.T * (size_t)p.H + 1; /* and the ticket */
  rfr_status s = rfi_cuda_check(cudaMemsetAsync(p.turns - 1, 0, turns * sizeof(unsigned), rfi_stream(call)),
                                "clearing the turns of attention_bwd");
  if (s == RFR_OK) s = allow((const void *)kernel, SHARED_BYTES);
  if (s != RFR_OK) return s;
  kernel<<<(unsigned)rfi_cuda_info_of(call)->sms, THREADS, SHARED_BYTES, rfi_stream(call)>>>(p);
  return p.out[0] ? launch(call, attention_dq_rounded<T>, &p, l, 0, p.H, ROUND_THREADS, 0) : RFR_OK;
}

static rfr_status backward(const rfr_call *call) {
  const layout l = make_layout(call);
  return run_backward(call, &l, 1, -1, backward_of<rfi_bf16>, backward_of<rfi_f16>);
}

static size_t workspace(const rfr_call *call) { return make_layout(call).bytes; }
static int takes(const rfr_call *call) { return takes_of(call, 1, MOST_D); }

extern "C" const rfi_cuda_kernel rfi_attention_sm90_bwd64 = {backward, workspace, takes};
