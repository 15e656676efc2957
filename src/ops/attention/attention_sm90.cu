/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of bf16 and f16 on Hopper's tensor cores. A block stays on its multiprocessor and takes pieces of rows by a
 * ticket, long ones first. One of its threads starts TMA copies of a piece's q and for tiles of 128 keys and values,
 * the last tile that the piece attends to first. Warpgroups of 64 rows each run independently: while one uses the
 * tensor cores, another computes e^x, of which a multiprocessor does 16 per cycle; with head size 64 both take equally
 * long.
 *
 * P is rounded to the storage type as the left operand of the next GEMM, in registers.
 *
 * 0 x NaN is NaN, so in a masked tile a non-finite v would make rows NaN that do not attend to it. A piece with a
 * non-finite row is computed again with zeros for such v; rows that attend to one of them keep the first result.
 */
#include "backend/cuda/tma_sm90.cuh"
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_tiles_sm90.cuh"

enum { MOST_D = 128, KEYS = 128, SLOTS = 2 };

/* Number of consumer warpgroups and tile stages, limited by shared memory and registers per thread. */
template <int D> struct cut;
template <> struct cut<64> { static constexpr int groups = 3, stages = 3, registers = 160, loader = 32; };
template <> struct cut<128> { static constexpr int groups = 2, stages = 2, registers = 240, loader = 24; };

/* A block's work item: a piece of rows for a head. */
typedef struct item {
  piece w;
  int h;                 /* IDLE: the slot has no item, the next one may; DONE: end of the work */
  int again, not_finite; /* again: recompute with zeros for non-finite v; not_finite: a row of o is not finite */
} item;
enum { IDLE = -1, DONE = -2 };

/* The layout of a block's shared memory. Each full or empty slot has a barrier to wait for. */
template <int D> struct smem {
  static constexpr int ROWS = cut<D>::groups * GROUP, STAGES = cut<D>::stages, THREADS = 128 + 2 * ROWS;
  static constexpr int Q = ROWS * D * 2, TILE = KEYS * D * 2;
  static constexpr int Q_AT = 0, K_AT = SLOTS * Q, V_AT = K_AT + STAGES * TILE;
  static constexpr int Q_FULL = V_AT + STAGES * TILE, Q_EMPTY = Q_FULL + 8 * SLOTS;
  static constexpr int K_FULL = Q_EMPTY + 8 * SLOTS, K_EMPTY = K_FULL + 8 * STAGES;
  static constexpr int V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES;
  static constexpr int ITEMS_AT = V_EMPTY + 8 * STAGES, DIRTY_AT = ITEMS_AT + SLOTS * (int)sizeof(item);
  static constexpr int BYTES = DIRTY_AT + ROWS * (int)sizeof(int); /* dirty: rows that attend to a non-finite v */
  static_assert(ITEMS_AT % 16 == 0, "items are aligned");
};

typedef struct maps {
  CUtensorMap q, k, v;
} maps;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The tiles of keys that a piece's rows attend to: they begin at start + i KEYS, i < count. */
typedef struct path {
  int start, count;
} path;

static __device__ __forceinline__ path path_of(const problem &p, const piece &w) {
  const int end = w.last <= w.from ? w.from : p.causal ? w.last : w.end;
  path x;
  x.start = w.from + (first_key(p, w.from, w.first) - w.from) / KEYS * KEYS;
  x.count = end > x.start ? (end - x.start + KEYS - 1) / KEYS : 0;
  return x;
}

/* ---- loading: a thread ---- */

/* Starts loading rows t ... of a head, `rows` of them, into panels. */
template <int D>
__device__ __forceinline__ void ask_for(uint32_t to, const CUtensorMap *map, uint32_t full, int t, int h, int rows) {
  rfi_barrier_expect(full, (uint32_t)(rows * D * 2));
#pragma unroll
  for (int d = 0; d < D; d += 64) rfi_tma_load(to + (uint32_t)(d * rows * 2), map, full, d, t, h);
}

/* Waits for an empty stage; `tile` counts the tiles requested before. */
template <int STAGES> __device__ __forceinline__ void await_empty(uint32_t barriers, unsigned tile) {
  if (tile >= STAGES) rfi_mbarrier_wait(barriers + tile % STAGES * 8, (int)(tile / STAGES - 1) & 1);
}

template <int D> __device__ __forceinline__ void load_all(const problem &p, const maps &m, char *shared) {
  typedef smem<D> R;
  const uint32_t base = rfi_shared_address(shared);
  item *const items = (item *)(shared + R::ITEMS_AT);
  const unsigned count = (unsigned)*p.count;
  unsigned tile = 0, idle = 0, ticket = atomicAdd(p.ticket, 1u);
  for (unsigned i = 0;; i++) {
    const unsigned slot = i % SLOTS, at = ticket / (unsigned)p.H;
    const uint32_t full = base + R::Q_FULL + slot * 8;
    item x = {};
    x.h = IDLE;
    if (at < count) x.w = p.pieces[count - 1 - at], x.h = (int)(ticket % (unsigned)p.H);
    await_empty<SLOTS>(base + R::Q_EMPTY, i);
    if (i >= SLOTS && items[slot].not_finite) {
      x = items[slot];
      x.again = 1;
      x.not_finite = 0;
    } else if (x.h >= 0) {
      ticket = atomicAdd(p.ticket, 1u);
    }
    idle = x.h < 0 ? idle + 1 : 0;
    if (idle == SLOTS) x.h = DONE; /* no item is left that might be recomputed */
    items[slot] = x;
    if (x.h < 0) {
      rfi_mbarrier_arrive(full);
      if (x.h == DONE) return;
      continue;
    }
    const path v = path_of(p, x.w);
    const int kv = x.h / (p.H / p.Hk);
    ask_for<D>(base + R::Q_AT + slot * R::Q, &m.q, full, x.w.first, x.h, R::ROWS);
#pragma unroll 1
    for (int j = v.count - 1; j >= 0; j--, tile++) {
      const unsigned stage = tile % R::STAGES;
      await_empty<R::STAGES>(base + R::K_EMPTY, tile);
      ask_for<D>(base + R::K_AT + stage * R::TILE, &m.k, base + R::K_FULL + stage * 8, v.start + j * KEYS, kv, KEYS);
      await_empty<R::STAGES>(base + R::V_EMPTY, tile);
      ask_for<D>(base + R::V_AT + stage * R::TILE, &m.v, base + R::V_FULL + stage * 8, v.start + j * KEYS, kv, KEYS);
    }
  }
}

/* ---- MMAs ---- */

/* Starts s (64 x 128) = rows of q times rows of the tile. */
template <typename T, int D>
__device__ __forceinline__ void multiply_keys(float (&s)[1][KEYS / 8][4], uint32_t q, uint32_t k) {
  rfi_wgmma_new(s[0]);
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    rfi_wgmma128<T, false>(s[0], rfi_wgmma_panel(q, (uint32_t)(i / 4 * smem<D>::ROWS * 128 + i % 4 * 32)),
                           rfi_wgmma_panel(k, (uint32_t)(i / 4 * KEYS * 128 + i % 4 * 32)), i > 0);
  rfi_wgmma_commit();
}

/* Starts acc (64 x D) += a times rows of the tile. */
template <typename T, int D>
__device__ __forceinline__ void add_values(float (&acc)[1][D / 8][4], const uint32_t (&a)[KEYS / 16][4], uint32_t v) {
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
    if constexpr (D == 64) rfi_wgmma<T, true>(acc[0], a[i], rfi_wgmma_panel(v, (uint32_t)(i * 2048)), true);
    else rfi_wgmma128<T, true>(acc[0], a[i], rfi_panels(v + (uint32_t)(i * 2048), KEYS * 128), true);
  rfi_wgmma_commit();
}

/* Sets scores to -inf where a row does not attend to the key. */
static __device__ __forceinline__ void hide(const problem &p, const piece &w, float (&s)[1][KEYS / 8][4], int t0,
                                            int s0) {
  if (all_see(p, w, t0, t0 + 16, s0, s0 + KEYS)) return;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = t0 + half * 8 + (lane >> 2), c = s0 + (lane & 3) * 2;
    const int from = first_key(p, w.from, t) - c, to = end_key(p, w, t) - c;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (n * 8 + e < from || n * 8 + e >= to) s[0][n][2 * half + e] = -INFINITY;
  }
}

/* Zeroes the rows of v that are not finite; marks the piece's rows that attend to one of them. Called by all consumer
 * warps. */
template <typename T, int D>
__device__ __forceinline__ void clean_tile(const problem &p, const piece &w, char *tile, int s0, int *dirty) {
  constexpr int ROWS = smem<D>::ROWS;
  const int lane = threadIdx.x & 31;
  rfi_named_sync(1 + cut<D>::groups, 2 * ROWS);
#pragma unroll 1
  for (int r = ((int)threadIdx.x >> 5) - 4; r < KEYS; r += ROWS / 16) {
    bool finite = true;
#pragma unroll 1
    for (int d = lane; d < D; d += 32)
      finite = finite && isfinite(rfi_widen(((T *)(tile + d / 64 * KEYS * 128 + r * 128))[d % 64]));
    if (__all_sync(0xffffffffu, finite)) continue;
#pragma unroll 1
    for (int d = lane; d < D; d += 32) ((T *)(tile + d / 64 * KEYS * 128 + r * 128))[d % 64] = rfi_narrow<T>(0.0f);
#pragma unroll 1
    for (int i = lane; i < ROWS; i += 32)
      if (sees(p, w, w.first + i, s0 + r)) dirty[i] = 1; /* several warps may write this, always 1 */
  }
  rfi_shared_written();
  rfi_named_sync(1 + cut<D>::groups, 2 * ROWS);
}

static __device__ __forceinline__ void left_by_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) rfi_mbarrier_arrive(barrier);
}

/* Processes a warpgroup's 64 rows of the block's items. */
template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void attend_all(const problem &p, char *shared, const int group) {
  typedef smem<D> R;
  const uint32_t base = rfi_shared_address(shared);
  item *const items = (item *)(shared + R::ITEMS_AT);
  int *const dirty = (int *)(shared + R::DIRTY_AT);
  const int lane = threadIdx.x & 31, mine = group * GROUP + ((int)threadIdx.x >> 5 & 3) * 16;
  unsigned tile = 0;
  for (unsigned i = 0;; i++) {
    const unsigned slot = i % SLOTS;
    rfi_mbarrier_wait(base + R::Q_FULL + slot * 8, (int)(i / SLOTS) & 1);
    const item x = items[slot];
    if (x.h == DONE) return;
    if (x.h == IDLE) {
      left_by_warp(base + R::Q_EMPTY + slot * 8, lane);
      continue;
    }
    if (x.again) dirty[mine + (lane & 15)] = 0; /* marking waits for all warps, so this follows it */
    const piece &w = x.w;
    const path v = path_of(p, w);
    const int t0 = w.first + mine, t1 = min(t0 + 16, w.last);             /* the warp's rows */
    const int g0 = w.first + group * GROUP, g1 = min(g0 + GROUP, w.last); /* rows of the warpgroup */
    /* When an item is recomputed, every warpgroup processes all tiles, because they zero the rows of v together. */
    const bool none = x.again ? v.count == 0 : g1 <= g0 || g1 <= w.from; /* no row attends to a key */
    const int high = none      ? -1
                     : x.again ? v.count - 1
                               : ((p.causal ? g1 : w.end) - 1 - v.start) / KEYS; /* tiles that the rows attend to */
    const int low = none || x.again ? 0 : (first_key(p, w.from, g0) - v.start) / KEYS;
    const uint32_t q = base + R::Q_AT + slot * R::Q + (uint32_t)(group * GROUP * 128);
    float acc[1][D / 8][4] = {};
    softmax<16> sums = {{{-INFINITY, -INFINITY}}, {{0, 0}}};
    int j = v.count - 1; /* number, within the block, of the item's current tile */
    auto await_keys = [&](unsigned n) {
      rfi_mbarrier_wait(base + R::K_FULL + n % R::STAGES * 8, (int)(n / R::STAGES) & 1);
    };
    auto await_values = [&](unsigned n, int which) {
      const unsigned stage = n % R::STAGES;
      rfi_mbarrier_wait(base + R::V_FULL + stage * 8, (int)(n / R::STAGES) & 1);
      if (x.again) clean_tile<T, D>(p, w, shared + R::V_AT + stage * R::TILE, v.start + which * KEYS, dirty);
    };
    auto leave_keys = [&](unsigned n) { left_by_warp(base + R::K_EMPTY + n % R::STAGES * 8, lane); };
    auto leave_values = [&](unsigned n) { left_by_warp(base + R::V_EMPTY + n % R::STAGES * 8, lane); };
    auto skip_to = [&](int to) {
#pragma unroll 1
      for (; j > to; j--, tile++) {
        await_keys(tile);
        leave_keys(tile);
        await_values(tile, j);
        leave_values(tile);
      }
    };
    skip_to(high);
    if (!none) {
      float s[1][KEYS / 8][4], shrink[1][2];
      uint32_t left[KEYS / 16][4];
      await_keys(tile);
      rfi_wgmma_begin();
      multiply_keys<T, D>(s, q, base + R::K_AT + tile % R::STAGES * R::TILE);
      rfi_wgmma_wait<0>();
      rfi_wgmma_tie(s[0]);
      leave_keys(tile);
      if (CAPPED) bend(p, s);
      hide(p, w, s, t0, v.start + j * KEYS);
      soften<16, KEYS>(p, s, sums, shrink);
      pack<T>(left, s);
      if (j > low) await_keys(tile + 1);
#pragma unroll 1
      for (j--, tile++; j >= low; j--, tile++) {
        await_values(tile - 1, j + 1);
        rfi_wgmma_tie(acc[0]);
        rfi_wgmma_begin();
        multiply_keys<T, D>(s, q, base + R::K_AT + tile % R::STAGES * R::TILE);
        add_values<T, D>(acc, left, base + R::V_AT + (tile - 1) % R::STAGES * R::TILE);
        rfi_wgmma_wait<1>();
        rfi_wgmma_tie(s[0]);
        leave_keys(tile);
        if (CAPPED) bend(p, s);
        hide(p, w, s, t0, v.start + j * KEYS);
        const bool same = soften<16, KEYS>(p, s, sums, shrink);
        /* the branch is needed: without it nvcc waits for the GEMM before it computes e^x */
        if (j > low) await_keys(tile + 1);
        rfi_wgmma_wait<0>();
        rfi_wgmma_tie(acc[0]);
        rfi_wgmma_tie(s[0]);
        leave_values(tile - 1);
        if (!same) shrink_rows<16, D>(acc, shrink);
        pack<T>(left, s);
      }
      await_values(tile - 1, j + 1);
      rfi_wgmma_tie(acc[0]);
      rfi_wgmma_begin();
      add_values<T, D>(acc, left, base + R::V_AT + (tile - 1) % R::STAGES * R::TILE);
      rfi_wgmma_wait<0>();
      rfi_wgmma_tie(acc[0]);
      leave_values(tile - 1);
    }
    skip_to(-1);
    rfi_named_sync(1 + group, 128);
    bool finite = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = t0 + half * 8 + (lane >> 2);
      const float sum = quad_sum(sums.sum[0][half]), inverse = sum == 0 ? 0.0f : 1.0f / sum;
      if (p.lse && (lane & 3) == 0 && t < t1)
        p.lse[(int64_t)x.h * p.T + t] = sum == 0 ? -INFINITY : fmaf(sums.max[0][half], p.factor, log2f(sum)) * LN2;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          acc[0][n][e] *= inverse;
          finite = finite && (t >= t1 || isfinite(acc[0][n][e]));
        }
    }
    if (!finite && !x.again) items[slot].not_finite = 1;
    const int *const skip = x.again ? dirty + mine : NULL;
    char *const own = shared + R::Q_AT + slot * R::Q;
    if (p.out[0]) store_rows<T, D, R::ROWS>(p.out[0], p.row[0], p, x.h, t0, t1, acc, own, mine, skip);
    rfi_shared_written();
    left_by_warp(base + R::Q_EMPTY + slot * 8, lane);
  }
}

#endif

template <typename T, int D, bool CAPPED>
static __global__ void __launch_bounds__(smem<D>::THREADS, 1)
    attention_o(const __grid_constant__ problem p, const __grid_constant__ maps m) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  typedef smem<D> R;
  if (threadIdx.x == 0) {
    constexpr int WARPS = R::ROWS / 16;
    const uint32_t base = rfi_shared_address(shared);
    for (int i = 0; i < SLOTS; i++) {
      rfi_mbarrier_init(base + R::Q_FULL + i * 8, 1);
      rfi_mbarrier_init(base + R::Q_EMPTY + i * 8, WARPS);
    }
    for (int i = 0; i < R::STAGES; i++) {
      rfi_mbarrier_init(base + R::K_FULL + i * 8, 1);
      rfi_mbarrier_init(base + R::K_EMPTY + i * 8, WARPS);
      rfi_mbarrier_init(base + R::V_FULL + i * 8, 1);
      rfi_mbarrier_init(base + R::V_EMPTY + i * 8, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    rfi_shared_written();
  }
  __syncthreads();
  /* marks the value as equal in all lanes for nvcc */
  const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
  if (group == 0) {
    rfi_registers_fewer<cut<D>::loader>();
    if (threadIdx.x == 0) load_all<D>(p, m, shared);
  } else {
    rfi_registers_more<cut<D>::registers>();
    attend_all<T, D, CAPPED>(p, shared, group - 1);
  }
#endif
}

/* ---- launching ---- */

static int padded(int D) { return D <= 64 ? 64 : 128; }

static layout make_layout(const rfr_call *call) {
  const int row = padded((int)call->in[0].type.shape[2]) == 64 ? smem<64>::ROWS : smem<128>::ROWS;
  const int rows[BLOCK_TABLES] = {row, row};
  return layout_of(call, 0, 3, rows, 1);
}

static rfr_status describe(CUtensorMap *map, const rfr_arg *x, const matrix &m, int rows) {
  const int64_t *shape = x->type.shape;
  return rfi_tma_describe(map, m.data, x->type.dtype, shape[2], shape[0], shape[1], m.row, m.head, rows);
}

template <typename T, int D> static rfr_status launch_o(const rfr_call *call, const problem *given, const layout *l) {
  typedef smem<D> R;
  problem p = *given;
  maps m;
  char *const at = (char *)call->workspace;
  p.pieces = (const piece *)(at + l->pieces[0]);
  p.count = (const int *)(at + l->count[0]);
  p.ticket = (unsigned *)(at + l->count[0]) + 1;
  void (*const kernel)(problem, maps) = p.cap != 0 ? attention_o<T, D, true> : attention_o<T, D, false>;
  rfr_status s = describe(&m.q, &call->in[0], p.q, R::ROWS);
  if (s == RFR_OK) s = describe(&m.k, &call->in[1], p.k, KEYS);
  if (s == RFR_OK) s = describe(&m.v, &call->in[2], p.v, KEYS);
  if (s == RFR_OK) s = allow((const void *)kernel, R::BYTES);
  if (s != RFR_OK) return s;
  kernel<<<(unsigned)rfi_cuda_info_of(call)->sms, R::THREADS, R::BYTES, rfi_stream(call)>>>(p, m);
  return RFR_OK;
}

template <typename T> static rfr_status forward_of(const rfr_call *call, const problem *p, const layout *l) {
  return padded(p->D) == 64 ? launch_o<T, 64>(call, p, l) : launch_o<T, 128>(call, p, l);
}

static rfr_status forward(const rfr_call *call) {
  const layout l = make_layout(call);
  return run_forward(call, &l, forward_of<rfi_bf16>, forward_of<rfi_f16>);
}

static size_t workspace(const rfr_call *call) { return make_layout(call).bytes; }

/* Strides that TMA supports: a head's rows do not overlap in memory. */
static int takes(const rfr_call *call) {
  for (int i = 0; i < 3; i++) {
    const rfr_arg *x = &call->in[i];
    if (x->stride[0] <= 0 || x->stride[1] <= 0) return 0;
  }
  return takes_of(call, 0, MOST_D);
}

extern "C" const rfi_cuda_kernel rfi_attention_sm90 = {forward, workspace, takes};
