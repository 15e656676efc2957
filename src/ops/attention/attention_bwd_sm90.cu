/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradients of attention on Hopper's tensor cores, in one pass: five products instead of the seven of a kernel for
 * dq and one for dk and dv, and p made once.
 *
 * A block takes 128 keys of a head of k and v and walks over the tiles of queries that see them, the last tile first,
 * each tile for all of the heads of q. dk and dv stay in registers; a tile's part of dq is added to f32 sums in memory.
 * Several blocks add to the same sums, in one order: the first keys first (they store), each when its turn has come.
 * With a causal mask the first keys have the most to do: they are begun first, the others run behind them and hardly
 * wait, and the last that are begun are short. Blocks take their work by a ticket, in that order, so that whoever
 * waits, waits for work that was begun before.
 *
 * Two warpgroups multiply, 64 keys each. Of the four other warps two load, one takes work, and one has the copy engine
 * add dq, waits for turns and hands them on: what takes long is on nobody's way. A step ends with a barrier of both
 * warpgroups, when ds is in shared memory: dq of a tile is made in the step after its own.
 */
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_tiles_sm90.cuh"

enum { SIDE = 128, STAGES = 2, ITEMS = 4, MOST_D = 128 };
enum { THREADS = 384, LOADERS = 64, MATH_WARPS = 8, TAKERS = MATH_WARPS + LOADERS / 32 + 2, ROUND_THREADS = 256 };
enum { HALF = 64 * 128, TILE = 2 * HALF, SUMS = 2 * TILE }; /* bytes: of a tile of q, of its dq */
enum { LOAD_REGISTERS = 24, MATH_REGISTERS = 240 };

/* How queries go through a block, and where what lies in its shared memory. */
template <int D> struct room {
  static constexpr int QUERIES = TILE / (D * 2), SLOTS = D == 64 ? 2 : 1; /* of a tile; items' keys at once */
  static constexpr int KEYS = SIDE * D * 2, DS = SIDE * QUERIES * 2, STATS = QUERIES * 8;
  static constexpr int STAGES_AT = SLOTS * 2 * KEYS, DS_AT = STAGES_AT + STAGES * 2 * TILE;
  static constexpr int SUMS_AT = DS_AT + STAGES * DS, STATS_AT = SUMS_AT + SUMS;
  static constexpr int DESK_AT = STATS_AT + STAGES * STATS, BYTES = DESK_AT + 512;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A block's work: a piece of keys for a head of k and v. */
typedef struct item {
  piece w;
  int kv; /* -1: no more */
} item;

/* What the warps of a block tell each other. */
typedef struct desk {
  uint64_t keys_full[2], keys_empty[2], full[STAGES], empty[STAGES], sums_full, sums_empty;
  uint64_t items_full[ITEMS], items_empty[ITEMS], begun; /* begun: an item is as good as done */
  item items[ITEMS];
} desk;
static_assert(sizeof(desk) <= 512, "room for the desk");

typedef struct place { int t, h; } place; /* a tile of queries: its first row, its head */

/* The tiles of queries that see an item's keys, the last first, each for all of its heads. */
typedef struct walk {
  int start, end, last, steps; /* last: where the last tile begins */
} walk;

template <int D> __device__ __forceinline__ walk walk_of(const problem &p, const piece &w) {
  walk x;
  x.start = p.causal ? w.first : w.first - (w.first - w.from + SIDE - 1) / SIDE * SIDE;
  x.end = p.window ? min(w.end, w.last - 1 + p.window) : w.end;
  const int tiles = w.last > w.from ? (x.end - x.start + room<D>::QUERIES - 1) / room<D>::QUERIES : 0;
  x.last = x.start + (tiles - 1) * room<D>::QUERIES;
  x.steps = tiles * (p.H / p.Hk);
  return x;
}
static __device__ __forceinline__ place first_place(const problem &p, const walk &x, int kv) {
  return place{x.last, kv * (p.H / p.Hk)};
}
template <int D> __device__ __forceinline__ place next_place(const problem &p, place at) {
  const int group = p.H / p.Hk;
  return (at.h + 1) % group != 0 ? place{at.t, at.h + 1} : place{at.t - room<D>::QUERIES, at.h + 1 - group};
}
/* Blocks that add to a tile before w's does: those of the keys before w's that the tile sees. */
static __device__ __forceinline__ int blocks_before(const problem &p, const piece &w, place at) {
  const int before = (max(0, w.first - w.from) + SIDE - 1) / SIDE;
  if (!p.window) return before;
  const int unseen = at.t - (SIDE - 2) - p.window - (w.first - before * SIDE); /* rows of them before its window */
  return before - (unseen > 0 ? (unseen + SIDE - 1) / SIDE : 0);
}

static __device__ __forceinline__ unsigned load_acquire(const unsigned *at) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
static __device__ __forceinline__ void add_release(unsigned *at) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

/* The i-th item, for a thread that is one of TAKERS. */
static __device__ __forceinline__ item take_alone(desk *d, unsigned i) {
  rfi_mbarrier_wait(rfi_shared_address(&d->items_full[i % ITEMS]), (int)(i / ITEMS) & 1);
  const item x = d->items[i % ITEMS];
  rfi_mbarrier_arrive(rfi_shared_address(&d->items_empty[i % ITEMS]));
  return x;
}
/* For a warp that is. */
static __device__ __forceinline__ item take(desk *d, unsigned i) {
  rfi_mbarrier_wait(rfi_shared_address(&d->items_full[i % ITEMS]), (int)(i / ITEMS) & 1);
  const item x = d->items[i % ITEMS];
  __syncwarp();
  if ((threadIdx.x & 31) == 0) rfi_mbarrier_arrive(rfi_shared_address(&d->items_empty[i % ITEMS]));
  return x;
}

/* ---- loading: two warps ---- */

/* Rows t ... t + ROWS - 1 of a head; zeros for those that are not of from ... end - 1. */
template <typename T, int D, int ROWS>
__device__ __forceinline__ void load_side(uint32_t tile, const problem &p, const matrix &x, int t, int h, int from,
                                          int end) {
  constexpr int CHUNKS = D / 8, STEP = LOADERS / CHUNKS;
  const int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
  const T *at = (const T *)x.data + (int64_t)h * x.head + (int64_t)(t + row) * x.row + chunk * 8;
  const int64_t step = STEP * x.row;
  const bool inside = chunk * 8 < p.D;
  tile += (uint32_t)(chunk / 8 * ROWS * 128 + row * 128 + (((chunk ^ row) & 7) << 4));
  if (t >= from && t + ROWS <= end && p.D == D) {
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, at += step) rfi_copy16((tile ^ (i & 7) << 4) + (uint32_t)(i * 128), at, true);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < ROWS; i += STEP, at += step) {
    const bool present = inside && t + row + i >= from && t + row + i < end;
    rfi_copy16((tile ^ (i & 7) << 4) + (uint32_t)(i * 128), present ? at : (const T *)x.data, present);
  }
}

/* lse and -delta of a tile's queries, as fragments want them. */
template <int QUERIES>
__device__ __forceinline__ void load_stats(uint32_t stats, const problem &p, const piece &w, place at) {
#pragma unroll
  for (int i = (int)threadIdx.x; i < QUERIES; i += LOADERS) {
    const int r = at.t + i, half = i / 64, pair = i % 8 / 2, n = i % 64 / 8, e = i & 1;
    const bool present = r >= w.from && r < w.end;
    const float2 *from = p.stats + (int64_t)at.h * p.T + (present ? r : 0);
    const uint32_t lse = stats + (uint32_t)(half * 256 + pair * 64 + n * 8 + e * 4);
    rfi_copy4(lse, &from->x, present);
    rfi_copy4(lse + QUERIES * 4, &from->y, present);
  }
}

static __device__ __forceinline__ void loaded(uint32_t barrier) {
  rfi_copies_commit();
  rfi_copies_wait();
  rfi_shared_written();
  rfi_mbarrier_arrive(barrier);
}

template <typename T, int D> __device__ __forceinline__ void load_all(const problem &p, desk *d, uint32_t base) {
  typedef room<D> R;
  unsigned tile = 0, kept = 0;
  for (unsigned i = 0;; i++) {
    const item x = take(d, i);
    if (x.kv < 0) return;
    const walk v = walk_of<D>(p, x.w);
    if (v.steps == 0) continue;
    const unsigned slot = kept % R::SLOTS;
    const uint32_t keys = base + slot * 2 * R::KEYS;
    if (kept >= R::SLOTS) rfi_mbarrier_wait(rfi_shared_address(&d->keys_empty[slot]), (int)(kept / R::SLOTS - 1) & 1);
    load_side<T, D, SIDE>(keys, p, p.k, x.w.first, x.kv, x.w.from, x.w.last);
    load_side<T, D, SIDE>(keys + R::KEYS, p, p.v, x.w.first, x.kv, x.w.from, x.w.last);
    place at = first_place(p, v, x.kv);
    for (int step = 0; step < v.steps; step++, tile++) {
      const unsigned stage = tile % STAGES;
      const uint32_t to = base + R::STAGES_AT + stage * 2 * TILE;
      if (tile >= STAGES) rfi_mbarrier_wait(rfi_shared_address(&d->empty[stage]), (int)(tile / STAGES - 1) & 1);
      load_side<T, D, R::QUERIES>(to, p, p.q, at.t, at.h, x.w.from, x.w.end);
      load_side<T, D, R::QUERIES>(to + TILE, p, p.dy, at.t, at.h, x.w.from, x.w.end);
      load_stats<R::QUERIES>(base + R::STATS_AT + stage * R::STATS, p, x.w, at);
      loaded(rfi_shared_address(&d->full[stage]));
      if (step == 0) rfi_mbarrier_arrive(rfi_shared_address(&d->keys_full[slot]));
      at = next_place<D>(p, at);
    }
    kept++;
  }
}

/* ---- turns: a thread that takes work, one that adds dq ---- */

static __device__ __forceinline__ void publish(const problem &p, desk *d, unsigned i) {
  if (i >= ITEMS) rfi_mbarrier_wait(rfi_shared_address(&d->items_empty[i % ITEMS]), (int)(i / ITEMS - 1) & 1);
  const unsigned count = (unsigned)*p.count;
  item x = {};
  const unsigned ticket = atomicAdd(p.ticket, 1u), at = ticket / (unsigned)p.Hk;
  x.kv = at < count ? (int)(ticket % (unsigned)p.Hk) : -1;
  if (at < count) x.w = p.pieces[at];
  d->items[i % ITEMS] = x;
  rfi_mbarrier_arrive(rfi_shared_address(&d->items_full[i % ITEMS]));
}

static __device__ __forceinline__ void take_work(const problem &p, desk *d) {
  publish(p, d, 0);
  for (unsigned i = 0;; i++) {
    if (take_alone(d, i).kv < 0) return;
    /* asked for in the last tile: others may wait for work that is held and not begun */
    rfi_mbarrier_wait(rfi_shared_address(&d->begun), (int)i & 1);
    publish(p, d, i + 1);
  }
}

static __device__ __forceinline__ void proxies_agree(void) { asm volatile("fence.proxy.async;" ::: "memory"); }

/* Tiles of dq from shared memory to the sums, each when its turn has come. */
template <int D> __device__ __forceinline__ void add_tiles(const problem &p, desk *d, uint32_t base) {
  const uint32_t sums = base + room<D>::SUMS_AT;
  unsigned tile = 0;
  for (unsigned i = 0;; i++) {
    const item x = take_alone(d, i);
    if (x.kv < 0) return;
    if (!p.out[0]) continue;
    const walk v = walk_of<D>(p, x.w);
    place at = first_place(p, v, x.kv);
    for (int step = 0; step < v.steps; step++, tile++) {
      const unsigned before = (unsigned)blocks_before(p, x.w, at);
      unsigned *const turn = p.turns + (int64_t)at.h * p.T + at.t;
      float *const to = p.sums + ((int64_t)at.h * p.T + at.t) * D;
      const int bytes = min(room<D>::QUERIES, x.w.end - at.t) * D * (int)sizeof(float);
      if (before > 0)
        while (load_acquire(turn) < before) {}
      rfi_mbarrier_wait(rfi_shared_address(&d->sums_full), (int)tile & 1);
      proxies_agree();
      if (before > 0)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                     "r"(sums), "r"(bytes)
                     : "memory");
      else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(sums),
                     "r"(bytes)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      rfi_mbarrier_arrive(rfi_shared_address(&d->sums_empty));
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      proxies_agree();
      add_release(turn);
      at = next_place<D>(p, at);
    }
  }
}

/* ---- products ---- */

/* Starts c (64 x 64) += rows of a times the tile's rows. */
template <typename T, int D, typename A>
__device__ __forceinline__ void multiply_onto(float (&c)[1][8][4], const A &a, uint32_t tile) {
#pragma unroll
  for (int k = 0; k < D / 16; k++)
    rfi_wgmma<T, false>(c[0], a.part(k), rfi_wgmma_panel(tile, (uint32_t)(k / 4 * TILE_ROWS * 128 + k % 4 * 32)), true);
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

/* -delta of the columns, in each row. Not between products: nvcc would wait for all of them. */
static __device__ __forceinline__ void start_with(float (&c)[1][8][4], const float4 *delta) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float4 x = delta[n / 2];
    c[0][n][0] = c[0][n][2] = x.x, c[0][n][1] = c[0][n][3] = x.y;
    c[0][n + 1][0] = c[0][n + 1][2] = x.z, c[0][n + 1][1] = c[0][n + 1][3] = x.w;
  }
  rfi_wgmma_tie(c[0]);
}
static __device__ __forceinline__ void add_delta(float (&c)[1][8][4], const float4 *delta) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float4 x = delta[n / 2];
    c[0][n][0] += x.x, c[0][n][1] += x.y, c[0][n][2] += x.x, c[0][n][3] += x.y;
    c[0][n + 1][0] += x.z, c[0][n + 1][1] += x.w, c[0][n + 1][2] += x.z, c[0][n + 1][3] += x.w;
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

/* 16 rows of a tile, 64 columns each, to where they are added from; `tile`: so many were before. 16 rows of a document
 * lie as they do in a warp: four elements of lane i of n are at 128 n + 4 i. Fewer, at its end, lie row by row. */
template <int D>
__device__ __forceinline__ void stage_rows(const problem &p, desk *d, const piece &w, const float (&dq)[1][8][4],
                                           place at, char *shared, int warp, unsigned tile) {
  if (!p.out[0]) return;
  int lane; /* asked for here, so that no address is kept all the while */
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int row = D == 64 ? warp * 16 : warp % 4 * 16, panel = D == 64 ? 0 : warp / 4;
  float *const slab = (float *)(shared + room<D>::SUMS_AT) + row * D;
  if (tile > 0) rfi_mbarrier_wait(rfi_shared_address(&d->sums_empty), (int)(tile - 1) & 1);
  if (at.t + row + 16 <= w.end) {
#pragma unroll
    for (int n = 0; n < 8; n++)
      *(float4 *)(slab + panel * 1024 + n * 128 + lane * 4) =
          make_float4(dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < 8; n++)
        *(float2 *)(slab + (half * 8 + (lane >> 2)) * D + panel * 64 + n * 8 + (lane & 3) * 2) =
            make_float2(dq[0][n][2 * half], dq[0][n][2 * half + 1]);
  }
  rfi_shared_written();
  __syncwarp();
  if (lane == 0) rfi_mbarrier_arrive(rfi_shared_address(&d->sums_full));
}

/* ---- two warpgroups ---- */

static __device__ __forceinline__ void math_barrier(void) {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}
static __device__ __forceinline__ void left_by_warp(uint64_t *barrier, int lane) {
  __syncwarp();
  if (lane == 0) rfi_mbarrier_arrive(rfi_shared_address(barrier));
}

/* Starts a warpgroup's part of a tile's dq: with head size 64 half of the 128 queries, with 128 half of the columns. */
template <typename T, int D>
__device__ __forceinline__ void start_dq(float (&dq)[1][8][4], uint32_t ds, uint32_t keys, int group) {
  const uint32_t mine = (uint32_t)(group * TILE);
  multiply_columns<T>(dq, ds + (D == 64 ? mine : 0), keys + (D == 64 ? 0 : mine));
}

/* A warp's part of an item. */
template <int D> struct part {
  left_rows<D, SIDE> k, v;
  seen sight;
  uint32_t keys;
  int s0, warp, lane;
  char *shared;
};

/* A tile of queries, and the one before, whose dq is still to be made. */
typedef struct step_of {
  place at, before;
  uint32_t q, ds, ds_before;
  const float4 *lse, *delta;
  unsigned tile; /* so many were before */
  bool first;
} step_of;

/* 128 queries by 128 keys of head size 64: as two halves, so that one's products run while the other's p is made. */
template <typename T, bool CAPPED>
static __device__ __forceinline__ void take_step(const problem &p, desk *d, const piece &w, const part<64> &my,
                                                 const step_of &x, float (&dk)[1][8][4], float (&dv)[1][8][4]) {
  const uint32_t q = x.q, dy = x.q + TILE;
  const int t = x.at.t + (my.lane & 3) * 2;
  float dq[1][8][4], sa[1][8][4], da[1][8][4], sb[1][8][4], db[1][8][4];
  uint32_t left[4][4], right[4][4], left_b[4][4], right_b[4][4];
  start_with(da, x.delta);
  rfi_wgmma_begin();
  start_dq<T, 64>(dq, x.ds_before, my.keys, my.warp / 4); /* of what lay there, in the first step */
  multiply<T, 64>(sa, my.k, q);
  multiply_onto<T, 64>(da, my.v, dy);
  multiply<T, 64>(sb, my.k, q + HALF);
  rfi_wgmma_wait<3>();
  rfi_wgmma_tie(dq[0]);
  if (!x.first) stage_rows<64>(p, d, w, dq, x.before, my.shared, my.warp, x.tile - 1);
  rfi_wgmma_wait<2>();
  rfi_wgmma_tie(sa[0]);
  probabilities<CAPPED>(p, sa, x.lse);
  if (x.at.t + 64 > w.end || !all_see(p, w, x.at.t, x.at.t + 64, my.s0, my.s0 + 16)) hide(sa, my.sight, t);
  pack<T>(left, sa);
  accumulate<T, 64>(dv, left, dy);
  rfi_wgmma_wait<2>();
  rfi_wgmma_tie(da[0]);
  slopes<CAPPED>(p, da, sa, x.lse);
  pack<T>(right, da);
  store_left(x.ds, right, my.warp, my.lane);
  start_with(db, x.delta + 16);
  rfi_wgmma_begin();
  multiply_onto<T, 64>(db, my.v, dy + HALF);
  accumulate<T, 64>(dk, right, q);
  rfi_wgmma_wait<3>();
  rfi_wgmma_tie(sb[0]);
  probabilities<CAPPED>(p, sb, x.lse + 16);
  if (x.at.t + 128 > w.end || !all_see(p, w, x.at.t + 64, x.at.t + 128, my.s0, my.s0 + 16))
    hide(sb, my.sight, t + 64);
  pack<T>(left_b, sb);
  accumulate<T, 64>(dv, left_b, dy + HALF);
  rfi_wgmma_wait<2>();
  rfi_wgmma_tie(db[0]);
  slopes<CAPPED>(p, db, sb, x.lse + 16);
  pack<T>(right_b, db);
  store_left(x.ds + TILE, right_b, my.warp, my.lane);
  accumulate<T, 64>(dk, right_b, q + HALF);
  rfi_shared_written();
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(dv[0]);
  rfi_wgmma_tie(dk[0]);
  left_by_warp(&d->empty[x.tile % STAGES], my.lane);
}

/* 64 queries by 128 keys of head size 128. dk goes on over the step's end: the stage is empty in the next step. */
template <typename T, bool CAPPED>
static __device__ __forceinline__ void take_step(const problem &p, desk *d, const piece &w, const part<128> &my,
                                                 const step_of &x, float (&dk)[1][16][4], float (&dv)[1][16][4]) {
  const uint32_t q = x.q, dy = x.q + TILE;
  const int t = x.at.t + (my.lane & 3) * 2;
  float dq[1][8][4], s[1][8][4], ds[1][8][4];
  uint32_t left[4][4], right[4][4];
  rfi_wgmma_begin();
  multiply<T, 128>(s, my.k, q);
  multiply<T, 128>(ds, my.v, dy);
  rfi_wgmma_wait<1>();
  rfi_wgmma_tie(s[0]);
  if (!x.first) left_by_warp(&d->empty[(x.tile - 1) % STAGES], my.lane);
  probabilities<CAPPED>(p, s, x.lse);
  if (x.at.t + 64 > w.end || !all_see(p, w, x.at.t, x.at.t + 64, my.s0, my.s0 + 16)) hide(s, my.sight, t);
  pack<T>(left, s);
  accumulate<T, 128>(dv, left, dy);
  rfi_wgmma_wait<1>();
  rfi_wgmma_tie(ds[0]);
  add_delta(ds, x.delta);
  slopes<CAPPED>(p, ds, s, x.lse);
  pack<T>(right, ds);
  store_left(x.ds, right, my.warp, my.lane);
  rfi_shared_written();
  rfi_wgmma_begin();
  start_dq<T, 128>(dq, x.ds_before, my.keys, my.warp / 4);
  accumulate<T, 128>(dk, right, q);
  rfi_wgmma_wait<1>();
  rfi_wgmma_tie(dq[0]);
  if (!x.first) stage_rows<128>(p, d, w, dq, x.before, my.shared, my.warp, x.tile - 1);
}

/* dk and dv of rows that none sees. */
template <typename T>
__device__ __forceinline__ void store_zeros(const problem &p, int kv, int s0, int s1, int lane) {
  for (int which = 1; which < 3; which++)
    for (int s = s0; s < s1 && p.out[which]; s++)
      for (int i = lane * 8; i < p.D; i += 32 * 8)
        *(uint4 *)((T *)p.out[which] + s * p.row[which] + kv * p.D + i) = make_uint4(0, 0, 0, 0);
}

/* `warp` of the math warps; `tile`, `kept`: tiles and items with tiles that were before. */
template <typename T, int D, bool CAPPED>
static __device__ __forceinline__ void gradients_of(const problem &p, desk *d, const item &work, char *shared, int warp,
                                                    unsigned &tile, unsigned &kept) {
  typedef room<D> R;
  const piece &w = work.w;
  const int lane = threadIdx.x & 31, group = warp / 4, kv = work.kv, slot = (int)(kept % R::SLOTS);
  const uint32_t base = rfi_shared_address(shared), keys = base + (uint32_t)(slot * 2 * R::KEYS);
  const walk path = walk_of<D>(p, w);
  const int s0 = w.first + warp * 16, s1 = min(s0 + 16, w.last);
  part<D> my = {{}, {}, seen_by(p, w, s0 + (lane >> 2)), keys, s0, warp, lane, shared};
  float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
  if (path.steps == 0 && threadIdx.x == 128) rfi_mbarrier_arrive(rfi_shared_address(&d->begun));
  if (path.steps > 0) {
    my.k.load(keys, warp);
    my.v.load(keys + R::KEYS, warp);
    place at = first_place(p, path, kv), before = at;
    rfi_mbarrier_wait(rfi_shared_address(&d->keys_full[slot]), (int)(kept / R::SLOTS) & 1);
    for (int step = 0; step < path.steps; step++, tile++) {
      const int stage = (int)(tile % STAGES);
      const float4 *const lse = (const float4 *)(shared + R::STATS_AT + stage * R::STATS) + (lane & 3) * 4;
      const step_of x = {at, before, base + (uint32_t)(R::STAGES_AT + stage * 2 * TILE),
                         base + (uint32_t)(R::DS_AT + stage * R::DS), base + (uint32_t)(R::DS_AT + (stage ^ 1) * R::DS),
                         lse, lse + R::QUERIES / 4, tile, step == 0};
      rfi_mbarrier_wait(rfi_shared_address(&d->full[stage]), (int)(tile / STAGES) & 1);
      if (step == path.steps - 1 && threadIdx.x == 128) rfi_mbarrier_arrive(rfi_shared_address(&d->begun));
      take_step<T, CAPPED>(p, d, w, my, x, dk, dv);
      math_barrier();
      before = at;
      at = next_place<D>(p, at);
    }
    float dq[1][8][4];
    rfi_wgmma_begin();
    start_dq<T, D>(dq, base + (uint32_t)(R::DS_AT + (tile - 1) % STAGES * R::DS), keys, group);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(dq[0]);
    rfi_wgmma_tie(dv[0]);
    rfi_wgmma_tie(dk[0]);
    if (D == 128) left_by_warp(&d->empty[(tile - 1) % STAGES], lane);
    stage_rows<D>(p, d, w, dq, before, shared, warp, tile - 1);
  }
  if (path.steps == 0) {
    store_zeros<T>(p, kv, s0, s1, lane);
    return;
  }
  /* by way of v's rows, which the warpgroup has multiplied */
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
  char *const rows = shared + slot * 2 * R::KEYS + R::KEYS;
  if (p.out[2]) store_rows<T, D, SIDE>(p.out[2], p.row[2], p, kv, s0, s1, dv, rows, warp * 16, NULL);
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) dk[0][n][e] *= p.scale;
  if (p.out[1]) store_rows<T, D, SIDE>(p.out[1], p.row[1], p, kv, s0, s1, dk, rows, warp * 16, NULL);
  left_by_warp(&d->keys_empty[slot], lane);
  kept++;
}

#endif

template <typename T, int D, bool CAPPED>
static __global__ void __launch_bounds__(THREADS, 1) attention_gradients(const __grid_constant__ problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  desk &d = *(desk *)(shared + room<D>::DESK_AT);
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
    rfi_mbarrier_init(rfi_shared_address(&d.sums_full), MATH_WARPS);
    rfi_mbarrier_init(rfi_shared_address(&d.sums_empty), 1);
    for (int i = 0; i < ITEMS; i++) {
      rfi_mbarrier_init(rfi_shared_address(&d.items_full[i]), 1);
      rfi_mbarrier_init(rfi_shared_address(&d.items_empty[i]), TAKERS);
    }
    rfi_mbarrier_init(rfi_shared_address(&d.begun), 1);
  }
  __syncthreads();
  if (warp < 4) {
    rfi_registers_fewer<LOAD_REGISTERS>();
    if (warp < LOADERS / 32) load_all<T, D>(p, &d, rfi_shared_address(shared));
    else if (warp == 2 && (threadIdx.x & 31) == 0) take_work(p, &d);
    else if (warp == 3 && (threadIdx.x & 31) == 0) add_tiles<D>(p, &d, rfi_shared_address(shared));
  } else {
    rfi_registers_more<MATH_REGISTERS>();
    unsigned tile = 0, kept = 0;
    for (unsigned i = 0;; i++) {
      const item x = take(&d, i);
      if (x.kv < 0) break;
      gradients_of<T, D, CAPPED>(p, &d, x, shared, warp - 4, tile, kept);
    }
  }
#endif
}

/* The sums of dq, scaled and rounded; zeros for rows that see nothing. A warp takes 16 rows. */
template <typename T, int D>
static __global__ void __launch_bounds__(ROUND_THREADS) attention_dq_rounded(const problem p) {
  const int lane = threadIdx.x & 31;
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h);) {
    const int t0 = w.first + ((int)threadIdx.x >> 5) * 16;
    if (t0 >= w.last) continue;
    const float *slab = p.sums + ((int64_t)h * p.T + t0) * D;
    const bool whole = t0 + 16 <= w.end;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = half * 8 + (lane >> 2), t = t0 + row;
      if (t >= w.last) continue;
      T *const to = (T *)p.out[0] + t * p.row[0] + h * p.D + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const float *from = slab + (whole ? n * 128 + lane * 4 + half * 2 : row * D + n * 8 + (lane & 3) * 2);
        const float2 x = t >= w.from ? *(const float2 *)from : make_float2(0, 0);
        if (n * 8 < p.D) *(uint32_t *)(to + n * 8) = rfi_pair<T>(x.x * p.scale, x.y * p.scale);
      }
    }
  }
}

/* ---- launching ---- */

static int padded(int64_t D) { return D <= 64 ? 64 : 128; }

static layout make_layout(const rfr_call *call) {
  const int rows[BLOCK_TABLES] = {SIDE, SIDE};
  const int64_t T = call->in[1].type.shape[0], H = call->in[1].type.shape[1];
  layout l = layout_of(call, 1, 6, rows, 1);
  l.sums = reserve(&l.bytes, T * H * padded(call->in[1].type.shape[2]) * 4);
  l.turns = reserve(&l.bytes, T * H * 4);
  return l;
}

template <typename T, int D> static rfr_status launch_all(const rfr_call *call, const problem *given, const layout *l) {
  problem p = *given;
  char *const at = (char *)call->workspace;
  p.pieces = (const piece *)(at + l->pieces[0]);
  p.count = (const int *)(at + l->count[0]);
  p.sums = (float *)(at + l->sums);
  p.turns = (unsigned *)(at + l->turns);
  p.ticket = (unsigned *)(at + l->count[0]) + 1;
  const kernel_fn kernel = p.cap != 0 ? attention_gradients<T, D, true> : attention_gradients<T, D, false>;
  const size_t bytes = (size_t)p.T * (size_t)p.H * sizeof(unsigned);
  rfr_status s = rfi_cuda_check(cudaMemsetAsync(p.turns, 0, bytes, rfi_stream(call)),
                                "clearing the turns of attention_bwd");
  if (s == RFR_OK) s = allow((const void *)kernel, room<D>::BYTES);
  if (s != RFR_OK) return s;
  kernel<<<(unsigned)rfi_cuda_info_of(call)->sms, THREADS, room<D>::BYTES, rfi_stream(call)>>>(p);
  return p.out[0] ? launch(call, attention_dq_rounded<T, D>, &p, l, 0, p.H, ROUND_THREADS, 0) : RFR_OK;
}

template <typename T> static rfr_status backward_of(const rfr_call *call, const problem *p, const layout *l) {
  return padded(p->D) == 64 ? launch_all<T, 64>(call, p, l) : launch_all<T, 128>(call, p, l);
}

static rfr_status backward(const rfr_call *call) {
  const layout l = make_layout(call);
  return run_backward(call, &l, 1, -1, backward_of<rfi_bf16>, backward_of<rfi_f16>);
}

static size_t workspace(const rfr_call *call) { return make_layout(call).bytes; }
static int takes(const rfr_call *call) { return takes_of(call, 1, MOST_D); }

extern "C" const rfi_cuda_kernel rfi_attention_sm90_bwd = {backward, workspace, takes};
