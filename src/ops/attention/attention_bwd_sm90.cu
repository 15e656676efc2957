/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradients of attention on Hopper's tensor cores, in one kernel: it needs five GEMMs and computes p once, where
 * one kernel for dq and one for dk and dv need seven GEMMs.
 *
 * A block takes 128 keys of a head of k and v and loops over the tiles of queries that see them, the last tile first,
 * each tile for all query heads of the group. dk and dv stay in registers; a tile's part of dq is added to f32 sums in
 * memory. Several blocks add to the same sums in a fixed order: the block with the first keys stores, the others add,
 * each when its turn has come. With a causal mask the first keys have the most queries. They start first, and keys of
 * other heads and documents start between them: later blocks hardly wait, and the last ones to start are short. Blocks
 * take their work by a ticket in that order, so a block waits only for blocks that have started.
 *
 * Two warpgroups multiply, 64 keys each. Of the four other warps, one loads tiles, one takes tickets, and two in
 * alternation start TMA's adds to dq, wait for turns and pass them on, so that slow operations do not stall the
 * multiplying warps. dq of a tile needs the ds of both warpgroups: its GEMM starts one step later and ends in the step
 * after that. So one warpgroup may be half a step ahead of the other: while one computes p and ds, the other uses the
 * tensor cores.
 *
 * With a causal mask, head size 64 and as many heads of k and v as of q, the last block that adds to a tile of dq is
 * the block of the tile's own keys, and the tile is its last one. This block adds in registers and stores dq. In all
 * other cases a second kernel rounds the sums.
 */
#include "backend/cuda/tma_sm90.cuh"
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_tiles_sm90.cuh"

enum { SIDE = 128, ITEMS = 4, MOST_D = 128, ADDERS = 2 };
enum { THREADS = 384, MATH_WARPS = 8, TAKERS = MATH_WARPS + 2 + ADDERS, ROUND_THREADS = 256 };
enum { HALF = 64 * 128, TILE = 2 * HALF, SUMS = 2 * TILE }; /* bytes of a tile of q, and of its dq */
enum { LOAD_REGISTERS = 24, MATH_REGISTERS = 240 };

/* Tile sizes and the layout of a block's shared memory. */
template <int D> struct smem {
  static constexpr int QUERIES = TILE / (D * 2); /* rows of a tile of queries */
  /* work items whose keys are in shared memory; tile stages */
  static constexpr int SLOTS = D == 64 ? 2 : 1, STAGES = D == 64 ? 2 : 3;
  static constexpr int KEYS = SIDE * D * 2, DS = SIDE * QUERIES * 2, STATS = QUERIES * 8;
  static constexpr int STAGES_AT = SLOTS * 2 * KEYS, DS_AT = STAGES_AT + STAGES * 2 * TILE;
  static constexpr int SUMS_AT = DS_AT + 2 * DS, STATS_AT = SUMS_AT + SUMS;
  static constexpr int STATE_AT = STATS_AT + STAGES * STATS, BYTES = STATE_AT + 512;
  static_assert(BYTES <= 232448, "shared memory of a block");
};

typedef struct maps {
  CUtensorMap q, k, v, dy;
} maps;

/* Whether the block of a tile's own keys stores its dq. */
template <int D> static __host__ __device__ __forceinline__ bool stores_dq(const problem &p) {
  return D == 64 && p.causal && p.H == p.Hk && p.out[0];
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A block's work item: a piece of keys for a head of k and v. */
typedef struct item {
  piece w;
  int kv; /* -1: end of the work */
} item;

/* State that the warps of a block share: barriers, tickets and the work items. */
typedef struct block_state {
  uint64_t keys_full[2], keys_empty[2], full[3], empty[3], ds_full[2], ds_empty[2];
  uint64_t sums_full[ADDERS], sums_empty[ADDERS], items_full[ITEMS], items_empty[ITEMS];
  /* `arrived`: a tile has rows to be cleared; `begun`: the last tile of an item was reached */
  uint64_t arrived, begun;
  item items[ITEMS];
} block_state;
static_assert(sizeof(block_state) <= 512, "the state of a block fits");

typedef struct place {
  int t, g;
} place; /* a tile of queries: its first row, and which head of the group */

/* The tiles of queries that see an item's keys, the last tile first, each for all `group` heads. */
typedef struct walk {
  int start, end, last, group, steps; /* last: first row of the last tile */
} walk;

template <int D> __device__ __forceinline__ walk walk_of(const problem &p, const piece &w) {
  walk x;
  x.start = p.causal ? w.first : w.first - (w.first - w.from + SIDE - 1) / SIDE * SIDE;
  x.end = p.window ? min(w.end, w.last - 1 + p.window) : w.end;
  const int tiles = w.last > w.from ? (x.end - x.start + smem<D>::QUERIES - 1) / smem<D>::QUERIES : 0;
  x.last = x.start + (tiles - 1) * smem<D>::QUERIES;
  x.group = p.H / p.Hk;
  x.steps = tiles * x.group;
  return x;
}
template <int D> __device__ __forceinline__ place next_place(const walk &x, place at) {
  return at.g + 1 < x.group ? place{at.t, at.g + 1} : place{at.t - smem<D>::QUERIES, 0};
}
/* How many blocks add to a tile before w's block does: those of earlier keys that the tile attends to. */
static __device__ __forceinline__ int blocks_before(const problem &p, const piece &w, place at) {
  const int before = (max(0, w.first - w.from) + SIDE - 1) / SIDE;
  if (!p.window) return before;
  /* rows of them before the tile's window */
  const int unseen = at.t - (SIDE - 2) - p.window - (w.first - before * SIDE);
  return before - (unseen > 0 ? (unseen + SIDE - 1) / SIDE : 0);
}

static __device__ __forceinline__ unsigned load_acquire(const unsigned *at) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
static __device__ __forceinline__ void add_release(unsigned *at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

/* Returns the i-th item, called by a single thread of the TAKERS. */
static __device__ __forceinline__ item take_alone(block_state *d, unsigned i) {
  rfi_mbarrier_wait(rfi_shared_address(&d->items_full[i % ITEMS]), (int)(i / ITEMS) & 1);
  const item x = d->items[i % ITEMS];
  rfi_mbarrier_arrive(rfi_shared_address(&d->items_empty[i % ITEMS]));
  return x;
}
/* Returns the i-th item, called by a full warp. */
static __device__ __forceinline__ item take(block_state *d, unsigned i) {
  rfi_mbarrier_wait(rfi_shared_address(&d->items_full[i % ITEMS]), (int)(i / ITEMS) & 1);
  const item x = d->items[i % ITEMS];
  __syncwarp();
  if ((threadIdx.x & 31) == 0) rfi_mbarrier_arrive(rfi_shared_address(&d->items_empty[i % ITEMS]));
  return x;
}

/* ---- loading: a warp ---- */

/* Writes zeros to rows first ... end - 1 of a tile. */
template <int D, int ROWS> __device__ __forceinline__ void clear_rows(char *tile, int first, int end) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int i = first * 8 + lane; i < end * 8; i += 32)
#pragma unroll
    for (int d = 0; d < D; d += 64) *(uint4 *)(tile + d * ROWS * 2 + i * 16) = make_uint4(0, 0, 0, 0);
}

/* Loads rows t ... t + ROWS - 1 of a head of a and of b into two adjacent tiles. Rows outside from ... end - 1 belong
 * to another document; they are zeroed before `full` completes. `cut` counts the tiles that had such rows. */
template <int D, int ROWS>
__device__ __forceinline__ void load_two(char *to, const CUtensorMap *a, const CUtensorMap *b, uint32_t full,
                                         block_state *d, unsigned &cut, int t, int h, int from, int end) {
  constexpr int BYTES = ROWS * D * 2;
  const int lane = threadIdx.x & 31;
  const bool one_document = t >= from && t + ROWS <= end;
  const uint32_t arrived = one_document ? full : rfi_shared_address(&d->arrived);
  if (lane == 0) {
    const uint32_t at = rfi_shared_address(to);
    rfi_barrier_expect(arrived, 2 * BYTES);
#pragma unroll
    for (int x = 0; x < D; x += 64) rfi_tma_load(at + (uint32_t)(x * ROWS * 2), a, arrived, x, t, h);
#pragma unroll
    for (int x = 0; x < D; x += 64) rfi_tma_load(at + (uint32_t)(BYTES + x * ROWS * 2), b, arrived, x, t, h);
  }
  __syncwarp();
  if (one_document) return;
  rfi_mbarrier_wait(arrived, (int)cut++ & 1);
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    clear_rows<D, ROWS>(to + i * BYTES, 0, min(from - t, ROWS));
    clear_rows<D, ROWS>(to + i * BYTES, max(end - t, 0), ROWS);
  }
  rfi_shared_written();
  __syncwarp();
  if (lane == 0) rfi_mbarrier_arrive(full);
}

/* Loads lse and -delta of a tile's queries in fragment order: queries 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of 16 are
 * adjacent. */
template <int QUERIES>
__device__ __forceinline__ void load_stats(uint32_t stats, const problem &p, const piece &w, int t, int h,
                                           uint32_t full) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < QUERIES; j += 32) {
    const int i = j + lane, r = t + i, pair = i % 8 / 2;
    const bool present = r >= w.from && r < w.end;
    const float2 *from = p.stats + (int64_t)h * p.T + (present ? r : 0);
    const uint32_t lse = stats + (uint32_t)(i / 16 * 64 + pair * 16 + i / 8 % 2 * 8 + i % 2 * 4);
    rfi_copy4(lse, &from->x, present);
    rfi_copy4(lse + QUERIES * 4, &from->y, present);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
}

template <int D>
__device__ __forceinline__ void load_all(const problem &p, const maps &m, block_state *d, char *shared) {
  typedef smem<D> R;
  unsigned tile = 0, kept = 0, cut = 0;
  for (unsigned i = 0;; i++) {
    const item x = take(d, i);
    if (x.kv < 0) return;
    const walk v = walk_of<D>(p, x.w);
    if (v.steps == 0) continue;
    const unsigned slot = kept % R::SLOTS;
    if (kept >= R::SLOTS) rfi_mbarrier_wait(rfi_shared_address(&d->keys_empty[slot]), (int)(kept / R::SLOTS - 1) & 1);
    load_two<D, SIDE>(shared + slot * 2 * R::KEYS, &m.k, &m.v, rfi_shared_address(&d->keys_full[slot]), d, cut,
                      x.w.first, x.kv, x.w.from, x.w.last);
    place at = place{v.last, 0};
#pragma unroll 1
    for (int step = 0; step < v.steps; step++, tile++) {
      const unsigned stage = tile % R::STAGES;
      const uint32_t full = rfi_shared_address(&d->full[stage]);
      const int h = x.kv * v.group + at.g;
      if (tile >= R::STAGES) rfi_mbarrier_wait(rfi_shared_address(&d->empty[stage]), (int)(tile / R::STAGES - 1) & 1);
      load_two<D, R::QUERIES>(shared + R::STAGES_AT + stage * 2 * TILE, &m.q, &m.dy, full, d, cut, at.t, h, x.w.from,
                              x.w.end);
      load_stats<R::QUERIES>(rfi_shared_address(shared) + R::STATS_AT + stage * R::STATS, p, x.w, at.t, h, full);
      at = next_place<D>(v, at);
    }
    kept++;
  }
}

/* ---- turns: a thread that takes work, two that add dq ---- */

static __device__ __forceinline__ void publish(const problem &p, block_state *d, unsigned i) {
  if (i >= ITEMS) rfi_mbarrier_wait(rfi_shared_address(&d->items_empty[i % ITEMS]), (int)(i / ITEMS - 1) & 1);
  const unsigned count = (unsigned)*p.count;
  item x = {};
  const unsigned ticket = atomicAdd(p.ticket, 1u), at = ticket / (unsigned)p.Hk;
  x.kv = at < count ? (int)(ticket % (unsigned)p.Hk) : -1;
  if (at < count) x.w = p.pieces[at];
  d->items[i % ITEMS] = x;
  rfi_mbarrier_arrive(rfi_shared_address(&d->items_full[i % ITEMS]));
}

static __device__ __forceinline__ void take_work(const problem &p, block_state *d) {
  publish(p, d, 0);
  for (unsigned i = 0;; i++) {
    if (take_alone(d, i).kv < 0) return;
    /* Only at the last tile of this item: another block may wait for an item that is taken but not started. */
    rfi_mbarrier_wait(rfi_shared_address(&d->begun), (int)i & 1);
    publish(p, d, i + 1);
  }
}

static __device__ __forceinline__ void proxies_agree(void) { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* Adds tiles of dq from shared memory to the sums, each when its turn has come: this adder's tiles are every
 * ADDERS-th. If the multiplying warps store a tile's dq, the adder only waits for the turn. */
template <int D>
__device__ __forceinline__ void add_tiles(const problem &p, block_state *d, uint32_t base, unsigned adder) {
  const uint32_t sums = base + smem<D>::SUMS_AT;
  unsigned tile = 0;
  for (unsigned i = 0;; i++) {
    const item x = take_alone(d, i);
    if (x.kv < 0) return;
    if (!p.out[0]) continue;
    const walk v = walk_of<D>(p, x.w);
    place at = place{v.last, 0};
#pragma unroll 1
    for (int step = 0; step < v.steps; step++, tile++) {
      if (tile % ADDERS == adder) {
        const int h = x.kv * v.group + at.g;
        const unsigned before = (unsigned)blocks_before(p, x.w, at);
        unsigned *const turn = p.turns + (int64_t)h * p.T + at.t;
        float *const to = p.sums + ((int64_t)h * p.T + at.t) * D;
        const int bytes = min(smem<D>::QUERIES, x.w.end - at.t) * D * (int)sizeof(float);
        if (before > 0)
          while (load_acquire(turn) < before) __nanosleep(40);
        proxies_agree();
        rfi_mbarrier_wait(rfi_shared_address(&d->sums_full[adder]), (int)(tile / ADDERS) & 1);
        if (stores_dq<D>(p) && step + 1 == v.steps) {
          rfi_mbarrier_arrive(rfi_shared_address(&d->sums_empty[adder]));
          continue;
        }
        if (before > 0)
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                       "r"(sums), "r"(bytes)
                       : "memory");
        else
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(sums), "r"(bytes)
                       : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
        rfi_mbarrier_arrive(rfi_shared_address(&d->sums_empty[adder]));
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        proxies_agree();
        add_release(turn);
      }
      at = next_place<D>(v, at);
    }
  }
}

/* ---- GEMMs ---- */

/* Starts c (64 x 64) = columns of a times columns of b, both of 128 rows. */
template <typename T> __device__ __forceinline__ void multiply_columns(float (&c)[1][8][4], uint32_t a, uint32_t b) {
  rfi_wgmma_tie(c[0]);
#pragma unroll
  for (int k = 0; k < SIDE / 16; k++)
    rfi_wgmma<T, true, true>(c[0], rfi_wgmma_panel(a, (uint32_t)(k * 2048)), rfi_wgmma_panel(b, (uint32_t)(k * 2048)),
                             k > 0);
  rfi_wgmma_commit();
}

/* Stores a warp's 16 keys of a packed left operand as rows of 64 queries. */
static __device__ __forceinline__ void store_left(uint32_t tile, const uint32_t (&a)[4][4], int warp, int lane) {
  const uint32_t row = tile + (uint32_t)((warp * 16 + (lane & 15)) * 128);
#pragma unroll
  for (int k = 0; k < 4; k++) rfi_stmatrix(row + (uint32_t)(((k * 2 + (lane >> 4)) ^ (lane & 7)) << 4), a[k]);
}

/* ---- probabilities and their gradient ---- */

/* lse or -delta of a thread's 16 of 64 queries: 8 n + 2 (lane % 4) and the next one, for n = 0 ... 7. They are loaded
 * before the wait for a GEMM, whose time hides theirs. */
struct column_stats {
  float4 at[4];
  __device__ __forceinline__ void load(const float4 *from) {
#pragma unroll
    for (int i = 0; i < 4; i++) at[i] = from[i * 4];
  }
};

template <bool CAPPED>
static __device__ __forceinline__ void probabilities(const problem &p, float (&s)[1][8][4], const column_stats &lse) {
  if (CAPPED) bend(p, s);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float4 y = lse.at[n / 2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[0][n][e] = rfi_exp2(fmaf(s[0][n][e], p.factor, -(e & 1 ? y.y : y.x)));
      s[0][n + 1][e] = rfi_exp2(fmaf(s[0][n + 1][e], p.factor, -(e & 1 ? y.w : y.z)));
    }
  }
}

/* Adds -delta of the columns to each row. */
static __device__ __forceinline__ void add_delta(float (&c)[1][8][4], const column_stats &delta) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float4 x = delta.at[n / 2];
    c[0][n][0] += x.x, c[0][n][1] += x.y, c[0][n][2] += x.x, c[0][n][3] += x.y;
    c[0][n + 1][0] += x.z, c[0][n + 1][1] += x.w, c[0][n + 1][2] += x.z, c[0][n + 1][3] += x.w;
  }
}

template <bool CAPPED>
static __device__ __forceinline__ void slopes(const problem &p, float (&ds)[1][8][4], const float (&s)[1][8][4],
                                              const column_stats &lse) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      ds[0][n][e] *= s[0][n][e];
      if (CAPPED && s[0][n][e] != 0) {
        const float4 y = lse.at[n / 2];
        const float bent = __fdividef(log2f(s[0][n][e]) + (n & 1 ? (e & 1 ? y.w : y.z) : (e & 1 ? y.y : y.x)), p.cap);
        ds[0][n][e] *= 1.0f - bent * bent;
      }
    }
}

/* The range of queries that see each of a thread's two keys. */
typedef struct seen {
  int from[2];
  unsigned count[2];
} seen;

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

/* Sets p to 0 where a query does not see the key; t is the thread's first query. */
static __device__ __forceinline__ void hide(float (&c)[1][8][4], const seen &x, int t) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if ((unsigned)(t + n * 8 + (e & 1) - x.from[e / 2]) >= x.count[e / 2]) c[0][n][e] = 0;
}

/* ---- dq ---- */

/* Stores 16 rows of a tile, 64 columns each, to the shared memory that the adders read; `tile` counts the tiles before
 * it. 16 rows of one document keep the order that they have in a warp: four elements of lane i of n are at 128 n + 4 i.
 * Fewer rows, at a document's end, are stored row by row. */
template <int D>
__device__ __forceinline__ void stage_rows(const problem &p, block_state *d, const piece &w, const float (&dq)[1][8][4],
                                           int t, char *shared, int warp, unsigned tile) {
  if (!p.out[0]) return;
  int lane; /* read here, so that no address occupies a register across the loop */
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int row = D == 64 ? warp * 16 : warp % 4 * 16, panel = D == 64 ? 0 : warp / 4;
  float *const slab = (float *)(shared + smem<D>::SUMS_AT) + row * D;
  if (tile > 0)
    rfi_mbarrier_wait(rfi_shared_address(&d->sums_empty[(tile - 1) % ADDERS]), (int)((tile - 1) / ADDERS) & 1);
  if (t + row + 16 <= w.end) {
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
  if (lane == 0) rfi_mbarrier_arrive(rfi_shared_address(&d->sums_full[tile % ADDERS]));
}

/* Adds the sums of earlier blocks to a warp's 16 rows of dq, in the tile of its own keys, and scales. Rows of no
 * document get zeros. */
static __device__ __forceinline__ void finish_dq(const problem &p, const piece &w, int h, int warp,
                                                 float (&dq)[1][8][4]) {
  const int lane = threadIdx.x & 31, row = w.first + warp * 16;
  const unsigned before = (unsigned)blocks_before(p, w, place{w.first, 0});
  const float *const slab = p.sums + ((int64_t)h * p.T + row) * 64;
  if (before > 0) {
    if (row + 16 <= w.end) {
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float4 x = __ldcg((const float4 *)(slab + n * 128 + lane * 4));
        dq[0][n][0] += x.x, dq[0][n][1] += x.y, dq[0][n][2] += x.z, dq[0][n][3] += x.w;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
          const int r = half * 8 + (lane >> 2);
          float2 x = make_float2(0, 0);
          if (row + r < w.end) x = __ldcg((const float2 *)(slab + r * 64 + n * 8 + (lane & 3) * 2));
          dq[0][n][2 * half] += x.x, dq[0][n][2 * half + 1] += x.y;
        }
    }
  }
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) dq[0][n][e] = row + (lane >> 2) + e / 2 * 8 >= w.from ? dq[0][n][e] * p.scale : 0.0f;
}

/* Waits until it is the turn of a tile that is not staged, and until the tile before it has left shared memory. */
static __device__ __forceinline__ void await_turn(block_state *d, unsigned tile) {
  if (tile > 0)
    rfi_mbarrier_wait(rfi_shared_address(&d->sums_empty[(tile - 1) % ADDERS]), (int)((tile - 1) / ADDERS) & 1);
  rfi_mbarrier_wait(rfi_shared_address(&d->sums_empty[tile % ADDERS]), (int)(tile / ADDERS) & 1);
}

/* ---- two warpgroups ---- */

static __device__ __forceinline__ void arrive_alone(uint64_t *barrier) {
  asm volatile("{\n"
               ".reg .pred chosen;\n"
               "elect.sync _|chosen, 0xffffffff;\n"
               "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
               "}" ::"r"(rfi_shared_address(barrier))
               : "memory");
}
static __device__ __forceinline__ void left_by_warp(uint64_t *barrier) {
  __syncwarp();
  arrive_alone(barrier);
}

/* Starts a warpgroup's part of a tile's dq: half of the 128 queries for head size 64, half of the columns for 128. */
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

/* A tile of queries. The GEMM of its dq starts one step later, and its rows are staged in the step after that. */
typedef struct step_of {
  int t, t_staged; /* first rows of it and of the tile two steps before */
  uint32_t q, ds, ds_before;
  const float4 *lse, *delta;
  unsigned tile; /* number of tiles before it */
  int step;      /* of the item */
} step_of;

/* await_ds_buffer waits until both warpgroups have computed dq from the ds buffer that this tile reuses; await_ds waits
 * until both have written the tile's ds. */
static __device__ __forceinline__ void await_ds_buffer(block_state *d, unsigned tile) {
  if (tile >= 2) rfi_mbarrier_wait(rfi_shared_address(&d->ds_empty[tile % 2]), (int)(tile / 2 - 1) & 1);
}
static __device__ __forceinline__ void await_ds(block_state *d, unsigned tile) {
  rfi_mbarrier_wait(rfi_shared_address(&d->ds_full[tile % 2]), (int)(tile / 2) & 1);
}

/* After the GEMMs of the previous step of an item: releases what they have read and stages their dq, that of the tile
 * at row t, two before number `tile`. */
template <int D>
static __device__ __forceinline__ void finish_previous(const problem &p, block_state *d, const piece &w,
                                                       const part<D> &my, int step, unsigned tile, int t,
                                                       const float (&dq)[1][8][4]) {
  if (step == 0) return;
  left_by_warp(&d->empty[(tile - 1) % smem<D>::STAGES]);
  if (step == 1) return;
  left_by_warp(&d->ds_empty[tile % 2]);
  stage_rows<D>(p, d, w, dq, t, my.shared, my.warp, tile - 2);
}

/* Publishes the tile's ds and starts dq of the previous tile. */
template <typename T, int D>
static __device__ __forceinline__ void end_step(block_state *d, const part<D> &my, const step_of &x,
                                                float (&dq)[1][8][4]) {
  rfi_shared_written();
  left_by_warp(&d->ds_full[x.tile % 2]);
  if (x.step > 0) await_ds(d, x.tile - 1);
  rfi_wgmma_begin();
  start_dq<T, D>(dq, x.ds_before, my.keys, my.warp / 4);
}

/* 128 queries by 128 keys of head size 64, in two halves: the GEMMs of one run while p of the other is computed. */
template <typename T, bool CAPPED>
static __device__ __forceinline__ void take_step(const problem &p, block_state *d, const piece &w, const part<64> &my,
                                                 const step_of &x, float (&dk)[1][8][4], float (&dv)[1][8][4],
                                                 float (&dq)[1][8][4]) {
  const uint32_t q = x.q, dy = x.q + TILE;
  const int t = x.t + (my.lane & 3) * 2;
  float sa[1][8][4], da[1][8][4], sb[1][8][4], db[1][8][4];
  uint32_t left[4][4], right[4][4], left_b[4][4], right_b[4][4];
  column_stats lse, delta;
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(dq[0]);
  rfi_wgmma_begin();
  multiply<T, 64>(sa, my.k, q);
  multiply<T, 64>(da, my.v, dy);
  lse.load(x.lse);
  finish_previous<64>(p, d, w, my, x.step, x.tile, x.t_staged, dq);
  rfi_wgmma_begin();
  multiply<T, 64>(sb, my.k, q + HALF);
  rfi_wgmma_wait<2>();
  rfi_wgmma_tie(sa[0]);
  delta.load(x.delta);
  probabilities<CAPPED>(p, sa, lse);
  if (x.t + 64 > w.end || !all_see(p, w, x.t, x.t + 64, my.s0, my.s0 + 16)) hide(sa, my.sight, t);
  pack<T>(left, sa);
  accumulate<T, 64>(dv, left, dy);
  rfi_wgmma_wait<2>();
  rfi_wgmma_tie(da[0]);
  add_delta(da, delta);
  slopes<CAPPED>(p, da, sa, lse);
  pack<T>(right, da);
  lse.load(x.lse + 16);
  await_ds_buffer(d, x.tile);
  store_left(x.ds, right, my.warp, my.lane);
  rfi_wgmma_begin();
  multiply<T, 64>(db, my.v, dy + HALF);
  accumulate<T, 64>(dk, right, q);
  rfi_wgmma_wait<3>();
  rfi_wgmma_tie(sb[0]);
  delta.load(x.delta + 16);
  probabilities<CAPPED>(p, sb, lse);
  if (x.t + 128 > w.end || !all_see(p, w, x.t + 64, x.t + 128, my.s0, my.s0 + 16)) hide(sb, my.sight, t + 64);
  pack<T>(left_b, sb);
  accumulate<T, 64>(dv, left_b, dy + HALF);
  rfi_wgmma_wait<2>();
  rfi_wgmma_tie(db[0]);
  add_delta(db, delta);
  slopes<CAPPED>(p, db, sb, lse);
  pack<T>(right_b, db);
  store_left(x.ds + TILE, right_b, my.warp, my.lane);
  accumulate<T, 64>(dk, right_b, q + HALF);
  end_step<T, 64>(d, my, x, dq);
}

/* 64 queries by 128 keys of head size 128. */
template <typename T, bool CAPPED>
static __device__ __forceinline__ void take_step(const problem &p, block_state *d, const piece &w, const part<128> &my,
                                                 const step_of &x, float (&dk)[1][16][4], float (&dv)[1][16][4],
                                                 float (&dq)[1][8][4]) {
  const uint32_t q = x.q, dy = x.q + TILE;
  const int t = x.t + (my.lane & 3) * 2;
  float s[1][8][4], ds[1][8][4];
  uint32_t left[4][4], right[4][4];
  column_stats lse, delta;
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(dq[0]);
  rfi_wgmma_begin();
  multiply<T, 128>(s, my.k, q);
  finish_previous<128>(p, d, w, my, x.step, x.tile, x.t_staged, dq);
  rfi_wgmma_begin();
  multiply<T, 128>(ds, my.v, dy);
  lse.load(x.lse);
  rfi_wgmma_wait<1>();
  rfi_wgmma_tie(s[0]);
  probabilities<CAPPED>(p, s, lse);
  if (x.t + 64 > w.end || !all_see(p, w, x.t, x.t + 64, my.s0, my.s0 + 16)) hide(s, my.sight, t);
  pack<T>(left, s);
  delta.load(x.delta);
  accumulate<T, 128>(dv, left, dy);
  rfi_wgmma_wait<1>();
  rfi_wgmma_tie(ds[0]);
  add_delta(ds, delta);
  slopes<CAPPED>(p, ds, s, lse);
  pack<T>(right, ds);
  await_ds_buffer(d, x.tile);
  store_left(x.ds, right, my.warp, my.lane);
  accumulate<T, 128>(dk, right, q);
  end_step<T, 128>(d, my, x, dq);
}

/* Stores zeros as results `which` to 2 of rows that no query attends to. */
template <typename T>
__device__ __forceinline__ void store_zeros(const problem &p, int which, int kv, int s0, int s1, int lane) {
  for (; which < 3; which++)
    for (int s = s0; s < s1 && p.out[which]; s++)
      for (int i = lane * 8; i < p.D; i += 32 * 8)
        *(uint4 *)((T *)p.out[which] + s * p.row[which] + kv * p.D + i) = make_uint4(0, 0, 0, 0);
}

/* `warp` is the index among the multiplying warps; `tile` and `kept` count the earlier tiles and the earlier items that
 * had tiles. */
template <typename T, int D, bool CAPPED>
static __device__ __forceinline__ void gradients_of(const problem &p, block_state *d, const item &work, char *shared,
                                                    int warp, unsigned &tile, unsigned &kept) {
  typedef smem<D> R;
  const piece &w = work.w;
  const int lane = threadIdx.x & 31, group = warp / 4, kv = work.kv, slot = (int)(kept % R::SLOTS);
  const uint32_t base = rfi_shared_address(shared), keys = base + (uint32_t)(slot * 2 * R::KEYS);
  const walk path = walk_of<D>(p, w);
  const int s0 = w.first + warp * 16, s1 = min(s0 + 16, w.last);
  part<D> my = {{}, {}, seen_by(p, w, s0 + (lane >> 2)), keys, s0, warp, lane, shared};
  if (path.steps == 0) {
    if (warp == 0) arrive_alone(&d->begun);
    store_zeros<T>(p, stores_dq<D>(p) ? 0 : 1, kv, s0, s1, lane);
    return;
  }
  float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {}, dq[1][8][4] = {};
  my.k.load(keys, warp);
  my.v.load(keys + R::KEYS, warp);
  place at = place{path.last, 0};
  int before = 0, staged = 0;
  rfi_mbarrier_wait(rfi_shared_address(&d->keys_full[slot]), (int)(kept / R::SLOTS) & 1);
  for (int step = 0; step < path.steps; step++, tile++) {
    const int stage = (int)(tile % R::STAGES);
    const float4 *const lse = (const float4 *)(shared + R::STATS_AT + stage * R::STATS) + (lane & 3);
    const uint32_t q = base + (uint32_t)(R::STAGES_AT + stage * 2 * TILE), ds = base + R::DS_AT;
    const step_of x = {at.t, staged, q, ds + tile % 2 * R::DS, ds + (tile + 1) % 2 * R::DS, lse, lse + R::QUERIES / 4,
                       tile, step};
    rfi_mbarrier_wait(rfi_shared_address(&d->full[stage]), (int)(tile / R::STAGES) & 1);
    if (step == path.steps - 1 && warp == 0) arrive_alone(&d->begun);
    take_step<T, CAPPED>(p, d, w, my, x, dk, dv, dq);
    staged = before;
    before = at.t;
    at = next_place<D>(path, at);
  }
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(dq[0]);
  finish_previous<D>(p, d, w, my, path.steps, tile, staged, dq);
  if (stores_dq<D>(p)) left_by_warp(&d->sums_full[(tile - 1) % ADDERS]); /* nothing of this tile is staged */
  await_ds(d, tile - 1);
  rfi_wgmma_begin();
  start_dq<T, D>(dq, base + (uint32_t)(R::DS_AT + (tile - 1) % 2 * R::DS), keys, group);
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(dq[0]);
  rfi_wgmma_tie(dv[0]);
  rfi_wgmma_tie(dk[0]);
  left_by_warp(&d->ds_empty[(tile - 1) % 2]);
  if (!stores_dq<D>(p)) stage_rows<D>(p, d, w, dq, before, shared, warp, tile - 1);
  /* stage the result in v's rows, which this warpgroup no longer reads */
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
  char *const rows = shared + slot * 2 * R::KEYS + R::KEYS;
  if (p.out[2]) store_rows<T, D, SIDE>(p.out[2], p.row[2], p, kv, s0, s1, dv, rows, warp * 16, NULL);
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) dk[0][n][e] *= p.scale;
  if (p.out[1]) store_rows<T, D, SIDE>(p.out[1], p.row[1], p, kv, s0, s1, dk, rows, warp * 16, NULL);
  if constexpr (D == 64)
    if (stores_dq<D>(p)) {
      await_turn(d, tile - 1);
      finish_dq(p, w, kv, warp, dq);
      store_rows<T, D, SIDE>(p.out[0], p.row[0], p, kv, s0, s1, dq, rows, warp * 16, NULL);
    }
  rfi_shared_written();
  left_by_warp(&d->keys_empty[slot]);
  kept++;
}

#endif

template <typename T, int D, bool CAPPED>
static __global__ void __launch_bounds__(THREADS, 1)
    attention_gradients(const __grid_constant__ problem p, const __grid_constant__ maps m) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  block_state &d = *(block_state *)(shared + smem<D>::STATE_AT);
  /* marks the value as equal in all lanes for nvcc */
  const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      rfi_mbarrier_init(rfi_shared_address(&d.keys_full[i]), 1);
      rfi_mbarrier_init(rfi_shared_address(&d.keys_empty[i]), MATH_WARPS);
      rfi_mbarrier_init(rfi_shared_address(&d.sums_full[i]), MATH_WARPS);
      rfi_mbarrier_init(rfi_shared_address(&d.sums_empty[i]), 1);
      rfi_mbarrier_init(rfi_shared_address(&d.ds_full[i]), MATH_WARPS);
      rfi_mbarrier_init(rfi_shared_address(&d.ds_empty[i]), MATH_WARPS);
    }
    for (int i = 0; i < smem<D>::STAGES; i++) {
      /* the tiles, and each lane's part of their statistics */
      rfi_mbarrier_init(rfi_shared_address(&d.full[i]), 1 + 32);
      rfi_mbarrier_init(rfi_shared_address(&d.empty[i]), MATH_WARPS);
    }
    for (int i = 0; i < ITEMS; i++) {
      rfi_mbarrier_init(rfi_shared_address(&d.items_full[i]), 1);
      rfi_mbarrier_init(rfi_shared_address(&d.items_empty[i]), TAKERS);
    }
    rfi_mbarrier_init(rfi_shared_address(&d.begun), 1);
    rfi_mbarrier_init(rfi_shared_address(&d.arrived), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    rfi_shared_written();
  }
  __syncthreads();
  if (warp < 4) {
    rfi_registers_fewer<LOAD_REGISTERS>();
    const bool first = (threadIdx.x & 31) == 0;
    if (warp == 0) load_all<D>(p, m, &d, shared);
    else if (warp == 1 && first) take_work(p, &d);
    else if (warp < 2 + ADDERS && first) add_tiles<D>(p, &d, rfi_shared_address(shared), (unsigned)warp - 2);
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

/* Scales and rounds the sums of dq; rows that see nothing get zeros. A thread handles 8 columns of rows g and g + 8. */
template <typename T, int D>
static __global__ void __launch_bounds__(ROUND_THREADS) attention_dq_rounded(const problem p) {
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h);)
    for (int i = (int)threadIdx.x; i < SIDE * D / 16; i += ROUND_THREADS) {
      const int g = i % 8, n = i / 8 % (D / 8), t0 = w.first + i / D * 16;
      if (t0 >= w.last || n * 8 >= p.D) continue;
      const float *const slab = p.sums + ((int64_t)h * p.T + t0) * D;
      float4 x[4] = {};
      if (t0 + 16 <= w.end) {
#pragma unroll
        for (int c = 0; c < 4; c++) x[c] = *(const float4 *)(slab + n * 128 + g * 16 + c * 4);
      } else {
        const float *const low = slab + g * D + n * 8, *const high = low + 8 * D;
#pragma unroll
        for (int c = 0; c < 4; c++) {
          if (t0 + g < w.end) x[c].x = low[c * 2], x[c].y = low[c * 2 + 1];
          if (t0 + g + 8 < w.end) x[c].z = high[c * 2], x[c].w = high[c * 2 + 1];
        }
      }
      uint32_t y[2][4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        y[0][c] = rfi_pair<T>(x[c].x * p.scale, x[c].y * p.scale);
        y[1][c] = rfi_pair<T>(x[c].z * p.scale, x[c].w * p.scale);
      }
#pragma unroll
      for (int half = 0, t = t0 + g; half < 2; half++, t += 8)
        if (t < w.last)
          *(uint4 *)((T *)p.out[0] + t * p.row[0] + h * p.D + n * 8) =
              t >= w.from ? make_uint4(y[half][0], y[half][1], y[half][2], y[half][3]) : make_uint4(0, 0, 0, 0);
    }
}

/* ---- launching ---- */

static int padded(int64_t D) { return D <= 64 ? 64 : 128; }

/* Adjacent items of the same head wait for each other's turns; the more heads are between them, the larger are the sums
 * that the cache has to hold. A power of two; the limits are the best ones measured on an H100. */
static int documents_together(const rfr_call *call) {
  const int64_t D = call->in[1].type.shape[2], heads = call->in[padded(D) == 64 ? 1 : 2].type.shape[1];
  const int64_t most = padded(D) == 64 ? 48 : 8;
  int documents = 1;
  while (2 * documents * heads <= most) documents *= 2;
  return documents;
}

static layout make_layout(const rfr_call *call) {
  const int rows[BLOCK_TABLES] = {SIDE, SIDE};
  const int64_t T = call->in[1].type.shape[0], H = call->in[1].type.shape[1];
  layout l = layout_of(call, 1, 6, rows, 1);
  l.sums = reserve(&l.bytes, T * H * padded(call->in[1].type.shape[2]) * 4);
  l.turns = reserve(&l.bytes, T * H * 4);
  l.together = documents_together(call);
  return l;
}

static rfr_status describe(CUtensorMap *map, const rfr_arg *x, const matrix &m, int rows) {
  const int64_t *shape = x->type.shape;
  return rfi_tma_describe(map, m.data, x->type.dtype, shape[2], shape[0], shape[1], m.row, m.head, rows);
}

template <typename T, int D> static rfr_status launch_all(const rfr_call *call, const problem *given, const layout *l) {
  problem p = *given;
  char *const at = (char *)call->workspace;
  p.pieces = (const piece *)(at + l->pieces[0]);
  p.count = (const int *)(at + l->count[0]);
  p.sums = (float *)(at + l->sums);
  p.turns = (unsigned *)(at + l->turns);
  p.ticket = (unsigned *)(at + l->count[0]) + 1;
  maps m;
  void (*const kernel)(problem, maps) = p.cap != 0 ? attention_gradients<T, D, true> : attention_gradients<T, D, false>;
  const size_t bytes = (size_t)p.T * (size_t)p.H * sizeof(unsigned);
  rfr_status s =
      rfi_cuda_check(cudaMemsetAsync(p.turns, 0, bytes, rfi_stream(call)), "clearing the turns of attention_bwd");
  if (s == RFR_OK) s = describe(&m.q, &call->in[1], p.q, smem<D>::QUERIES);
  if (s == RFR_OK) s = describe(&m.k, &call->in[2], p.k, SIDE);
  if (s == RFR_OK) s = describe(&m.v, &call->in[3], p.v, SIDE);
  if (s == RFR_OK) s = describe(&m.dy, &call->in[0], p.dy, smem<D>::QUERIES);
  if (s == RFR_OK) s = allow((const void *)kernel, smem<D>::BYTES);
  if (s != RFR_OK) return s;
  kernel<<<(unsigned)rfi_cuda_info_of(call)->sms, THREADS, smem<D>::BYTES, rfi_stream(call)>>>(p, m);
  if (!p.out[0] || stores_dq<D>(p)) return RFR_OK;
  return launch(call, attention_dq_rounded<T, D>, &p, l, 0, p.H, ROUND_THREADS, 0);
}

template <typename T> static rfr_status backward_of(const rfr_call *call, const problem *p, const layout *l) {
  return padded(p->D) == 64 ? launch_all<T, 64>(call, p, l) : launch_all<T, 128>(call, p, l);
}

static rfr_status backward(const rfr_call *call) {
  const layout l = make_layout(call);
  return run_backward(call, &l, 1, -1, backward_of<rfi_bf16>, backward_of<rfi_f16>);
}

static size_t workspace(const rfr_call *call) { return make_layout(call).bytes; }

/* Strides that TMA supports: a head's rows do not overlap in memory. */
static int takes(const rfr_call *call) {
  for (int i = 0; i < 4; i++) {
    const rfr_arg *x = &call->in[i];
    if (x->stride[0] <= 0 || x->stride[1] <= 0) return 0;
  }
  return takes_of(call, 1, MOST_D);
}

extern "C" const rfi_cuda_kernel rfi_attention_sm90_bwd = {backward, workspace, takes};
