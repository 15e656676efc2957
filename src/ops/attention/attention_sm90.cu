/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of bf16 and f16 on Hopper's tensor cores: attention_sm80.cu's algorithm and table of pieces with wgmma in
 * the place of mma.sync. Products of 64 rows read K and V where cp.async has put them, so that shared memory's
 * bandwidth, which bounds mma.sync, is needed for one operand alone; several warpgroups of a multiprocessor take turns
 * at the tensor cores and at e^x, of which a multiprocessor makes 16 a cycle: with head size 64 they take equally long.
 *
 * P is rounded to the storage type as the left operand of the next product, in registers.
 */
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_tiles_sm90.cuh"

enum { MOST_D = 128 };

/* Warpgroups of a block, and blocks of a multiprocessor: by registers, of which a thread of head size 64 needs 128. */
template <int D> struct cut;
template <> struct cut<64> { static constexpr int o_groups = 2, o_blocks = 2; };
template <> struct cut<128> { static constexpr int o_groups = 2, o_blocks = 1; };
enum { BACKWARD_GROUPS = 2 }; /* one block a multiprocessor: four sums of 64 x 64 a warpgroup are 128 registers */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- forward ---- */

/* Zeros for the rows of v that are not finite; marks the block's rows that see one of them. */
template <typename T, int D, int THREADS>
__device__ __forceinline__ void clean_tile(const problem &p, const piece &w, char *tile, int s0, int *dirty,
                                           int block) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int r = (int)threadIdx.x >> 5; r < TILE_ROWS; r += THREADS / 32) {
    bool finite = true;
#pragma unroll 1
    for (int d = lane; d < D; d += 32)
      finite = finite && isfinite(rfi_widen(((T *)(tile + d / 64 * TILE_ROWS * 128 + r * 128))[d % 64]));
    if (__all_sync(0xffffffffu, finite)) continue;
#pragma unroll 1
    for (int d = lane; d < D; d += 32) ((T *)(tile + d / 64 * TILE_ROWS * 128 + r * 128))[d % 64] = rfi_narrow<T>(0.0f);
#pragma unroll 1
    for (int i = lane; i < block; i += 32)
      if (sees(p, w, w.first + i, s0 + r)) dirty[i] = 1; /* by more than one warp, perhaps: always 1 */
  }
  rfi_shared_written();
  __syncthreads();
}

/* All of a block's work; `again`: with zeros for what is not finite in v, and for the rows that see none of it.
 * Returns whether the thread's part of o is finite. */
template <typename T, int D>
__device__ __forceinline__ bool attend(const problem &p, const piece &w, int h, char *shared, int *dirty, bool again) {
  constexpr int THREADS = cut<D>::o_groups * 128, BLOCK = cut<D>::o_groups * GROUP, N = TILE_ROWS, TILE = N * D * 2;
  const int kv = h / (p.H / p.Hk), lane = threadIdx.x & 31, mine = ((int)threadIdx.x >> 5) * 16;
  const int t0 = w.first + mine, t1 = min(t0 + 16, w.last);                              /* the warp's rows */
  const int g0 = w.first + (int)threadIdx.x / 128 * GROUP, g1 = min(g0 + GROUP, w.last); /* the warpgroup's */
  char *const ring = shared + BLOCK * D * 2;
  const uint32_t own = rfi_shared_address(shared), stages = rfi_shared_address(ring);
  const int end = w.last <= w.from ? w.from : p.causal ? w.last : w.end;
  const int start = w.from + (first_key(p, w.from, w.first) - w.from) / N * N;
  float acc[1][D / 8][4] = {};
  softmax<16> x = {{{-INFINITY, -INFINITY}}, {{0, 0}}};
  left_rows<D, BLOCK, D == 128> q;
  load_tile<T, D, BLOCK, THREADS>(own, p, p.q, w.first, h, w.last - w.first);
  rfi_copies_commit();
  load_tile<T, D, N, THREADS>(stages, p, p.k, start, kv, end - start);
  load_tile<T, D, N, THREADS>(stages + TILE, p, p.v, start, kv, end - start);
  rfi_copies_commit();
  rfi_copies_wait();
  __syncthreads();
  q.load(own, (int)threadIdx.x >> 5, lane);
  for (int s0 = start, stage = 0; s0 < end; s0 += N, stage ^= 1) {
    const uint32_t k = stages + (uint32_t)(stage * 2 * TILE), v = k + TILE;
    rfi_copies_wait();
    rfi_shared_written();
    __syncthreads();
    if (s0 + N < end) {
      const uint32_t next = stages + (uint32_t)((stage ^ 1) * 2 * TILE);
      load_tile<T, D, N, THREADS>(next, p, p.k, s0 + N, kv, end - s0 - N);
      load_tile<T, D, N, THREADS>(next + TILE, p, p.v, s0 + N, kv, end - s0 - N);
      rfi_copies_commit();
    }
    if (again) clean_tile<T, D, THREADS>(p, w, ring + stage * 2 * TILE + TILE, s0, dirty, BLOCK);
    if (g1 <= g0 || !any_sees(p, w, g0, g1, s0, s0 + N)) continue;
    float s[1][N / 8][4];
    rfi_wgmma_begin();
    multiply<T, D>(s, q, k);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(s[0]);
    if (p.cap != 0) bend(p, s);
    if (!all_see(p, w, t0, t0 + 16, s0, s0 + N)) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int t = t0 + half * 8 + (lane >> 2), c = s0 + (lane & 3) * 2;
        const int from = first_key(p, w.from, t) - c, to = end_key(p, w, t) - c;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (n * 8 + e < from || n * 8 + e >= to) s[0][n][2 * half + e] = -INFINITY;
      }
    }
    float shrink[1][2];
    if (!soften<16, N>(p, s, x, shrink)) shrink_rows<16, D>(acc, shrink);
    uint32_t left[N / 16][4];
    pack<T>(left, s);
    accumulate<T, D>(acc, left, v);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(acc[0]);
  }
  bool finite = true;
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = t0 + half * 8 + (lane >> 2);
    const float sum = quad_sum(x.sum[0][half]), inverse = sum == 0 ? 0.0f : 1.0f / sum;
    if (p.lse && (lane & 3) == 0 && t < t1 && !again)
      p.lse[(int64_t)h * p.T + t] = sum == 0 ? -INFINITY : fmaf(x.max[0][half], p.factor, log2f(sum)) * LN2;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; e++) {
        acc[0][n][e] *= inverse;
        finite = finite && isfinite(acc[0][n][e]);
      }
  }
  const int *const skip = again ? dirty + mine : NULL;
  if (p.out[0]) store_rows<T, D, BLOCK>(p.out[0], p.row[0], p, h, t0, t1, acc, shared, mine, skip);
  return finite;
}

/* ---- backward ---- */

/* p, its place taken by p's own factor (score units of log2 e, or 0): what capped scores are times in the gradient. */
static __device__ __forceinline__ float slope_of(const problem &p, float probability, float lse) {
  if (probability == 0) return 0.0f;
  const float x = __fdividef(log2f(probability) + lse, p.cap);
  return 1.0f - x * x;
}

template <typename T, int D>
static __device__ __forceinline__ void dq_of(const problem &p, const piece &w, const int h, char *shared) {
  constexpr int THREADS = BACKWARD_GROUPS * 128, BLOCK = BACKWARD_GROUPS * GROUP, N = TILE_ROWS, TILE = N * D * 2;
  const int kv = h / (p.H / p.Hk), lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
  const int t0 = w.first + warp * 16, t1 = min(t0 + 16, w.last);
  const int g0 = w.first + warp / 4 * GROUP, g1 = min(g0 + GROUP, w.last);
  const uint32_t base = rfi_shared_address(shared), stages = base + 2 * BLOCK * D * 2;
  const int end = w.last <= w.from ? w.from : p.causal ? w.last : w.end;
  const int start = w.from + (first_key(p, w.from, w.first) - w.from) / N * N;
  float acc[1][D / 8][4] = {}, lse[2], delta[2];
  load_tile<T, D, BLOCK, THREADS>(base, p, p.q, w.first, h, w.last - w.first);
  load_tile<T, D, BLOCK, THREADS>(base + BLOCK * D * 2, p, p.dy, w.first, h, w.last - w.first);
  load_tile<T, D, N, THREADS>(stages, p, p.k, start, kv, end - start);
  load_tile<T, D, N, THREADS>(stages + TILE, p, p.v, start, kv, end - start);
  rfi_copies_commit();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = t0 + half * 8 + (lane >> 2);
    const float2 x = t < t1 ? p.stats[(int64_t)h * p.T + t] : make_float2(0, 0);
    lse[half] = x.x;
    delta[half] = x.y;
  }
  rfi_copies_wait();
  __syncthreads();
  left_rows<D, BLOCK, false> q, dy;
  q.load(base, warp, lane);
  dy.load(base + BLOCK * D * 2, warp, lane);
  for (int s0 = start, stage = 0; s0 < end; s0 += N, stage ^= 1) {
    const uint32_t k = stages + (uint32_t)(stage * 2 * TILE), v = k + TILE;
    rfi_copies_wait();
    rfi_shared_written();
    __syncthreads();
    if (s0 + N < end) {
      const uint32_t next = stages + (uint32_t)((stage ^ 1) * 2 * TILE);
      load_tile<T, D, N, THREADS>(next, p, p.k, s0 + N, kv, end - s0 - N);
      load_tile<T, D, N, THREADS>(next + TILE, p, p.v, s0 + N, kv, end - s0 - N);
      rfi_copies_commit();
    }
    if (g1 <= g0 || !any_sees(p, w, g0, g1, s0, s0 + N)) continue;
    float s[1][N / 8][4], ds[1][N / 8][4];
    rfi_wgmma_begin();
    multiply<T, D>(s, q, k);
    multiply<T, D>(ds, dy, v);
    rfi_wgmma_wait<1>();
    rfi_wgmma_tie(s[0]);
    if (p.cap != 0) bend(p, s);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[0][n][e] = rfi_exp2(fmaf(s[0][n][e], p.factor, -lse[e / 2]));
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(ds[0]);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) ds[0][n][e] = (ds[0][n][e] - delta[e / 2]) * s[0][n][e];
    if (p.cap != 0) {
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) ds[0][n][e] *= slope_of(p, s[0][n][e], lse[e / 2]);
    }
    if (!all_see(p, w, t0, t0 + 16, s0, s0 + N)) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int t = t0 + half * 8 + (lane >> 2), c = s0 + (lane & 3) * 2;
        const int from = first_key(p, w.from, t) - c, to = end_key(p, w, t) - c;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (n * 8 + e < from || n * 8 + e >= to) ds[0][n][2 * half + e] = 0;
      }
    }
    uint32_t left[N / 16][4];
    pack<T>(left, ds);
    accumulate<T, D>(acc, left, k);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(acc[0]);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) acc[0][n][e] *= p.scale;
  store_rows<T, D, BLOCK>(p.out[0], p.row[0], p, h, t0, t1, acc, shared, warp * 16, NULL);
}

/* A tile of q, one of do, and stats of their rows. */
template <typename T, int D, int THREADS>
__device__ __forceinline__ void load_rows(uint32_t stage, uint32_t stats, const problem &p, int t, int h, int rows) {
  load_tile<T, D, TILE_ROWS, THREADS>(stage, p, p.q, t, h, rows);
  load_tile<T, D, TILE_ROWS, THREADS>(stage + TILE_ROWS * D * 2, p, p.dy, t, h, rows);
  if (threadIdx.x < TILE_ROWS) {
    const bool present = (int)threadIdx.x < rows;
    rfi_copy8(stats + threadIdx.x * 8, p.stats + (int64_t)h * p.T + t + (present ? (int)threadIdx.x : 0), present);
  }
  rfi_copies_commit();
}

/* Zeros where the query t (a column, from `at` on) does not see the key (a row, from s0 on). */
template <int N>
__device__ __forceinline__ void hide(const problem &p, const piece &w, float (&c)[1][N / 8][4], int at, int s0, int end,
                                     int lane) {
#pragma unroll
  for (int n = 0; n < N / 8; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int t = at + n * 8 + (lane & 3) * 2 + e, s = s0 + (lane >> 2);
      const int from = first_key(p, w.from, t) - s, to = t < end ? end_key(p, w, t) - s : from;
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (half * 8 < from || half * 8 >= to) c[0][n][half * 2 + e] = 0;
    }
}

template <typename T, int D>
static __device__ __forceinline__ void dkv_of(const problem &p, const piece &w, const int kv, char *shared) {
  constexpr int THREADS = BACKWARD_GROUPS * 128, BLOCK = BACKWARD_GROUPS * GROUP, N = TILE_ROWS, TILE = N * D * 2;
  const int group = p.H / p.Hk, lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
  const int s0 = w.first + warp * 16, s1 = min(s0 + 16, w.last);
  const int g0 = w.first + warp / 4 * GROUP, g1 = min(g0 + GROUP, w.last);
  const uint32_t base = rfi_shared_address(shared), stages = base + 2 * BLOCK * D * 2, stats_at = stages + 4 * TILE;
  const float2 *const stats = (const float2 *)(shared + 2 * BLOCK * D * 2 + 4 * TILE);
  const int first = p.causal ? max(w.from, w.first) : w.from, start = w.from + (first - w.from) / N * N;
  const int end = w.last <= w.from ? start : p.window ? min(w.end, w.last - 1 + p.window) : w.end;
  const int tiles = max(0, (end - start + N - 1) / N), steps = tiles * group;
  float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
  load_tile<T, D, BLOCK, THREADS>(base, p, p.k, w.first, kv, w.last - w.first);
  load_tile<T, D, BLOCK, THREADS>(base + BLOCK * D * 2, p, p.v, w.first, kv, w.last - w.first);
  rfi_copies_commit();
  if (steps > 0) load_rows<T, D, THREADS>(stages, stats_at, p, start, kv * group, end - start);
  rfi_copies_wait();
  __syncthreads();
  left_rows<D, BLOCK, false> k, v;
  k.load(base, warp, lane);
  v.load(base + BLOCK * D * 2, warp, lane);
  int t0 = start, h = kv * group;
  for (int step = 0; step < steps; step++) {
    const int stage = step & 1, at = t0, next_h = t0 + N < end ? h : h + 1;
    t0 = t0 + N < end ? t0 + N : start;
    const uint32_t q = stages + (uint32_t)(stage * 2 * TILE), dy = q + TILE;
    rfi_copies_wait();
    rfi_shared_written();
    __syncthreads();
    if (step + 1 < steps)
      load_rows<T, D, THREADS>(stages + (uint32_t)((stage ^ 1) * 2 * TILE), stats_at + (uint32_t)((stage ^ 1) * N * 8),
                               p, t0, next_h, end - t0);
    h = next_h;
    if (g1 <= g0 || !any_sees(p, w, at, min(at + N, end), g0, g1)) continue;
    const float4 *const x =
        (const float4 *)(stats + stage * N) + (lane & 3); /* of queries 8 n + 2 (lane % 4) and next */
    float s[1][N / 8][4], ds[1][N / 8][4];
    rfi_wgmma_begin();
    multiply<T, D>(s, k, q);
    multiply<T, D>(ds, v, dy);
    rfi_wgmma_wait<1>();
    rfi_wgmma_tie(s[0]);
    if (p.cap != 0) bend(p, s);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const float4 y = x[n * 4];
#pragma unroll
      for (int e = 0; e < 4; e++) s[0][n][e] = rfi_exp2(fmaf(s[0][n][e], p.factor, -(e & 1 ? y.z : y.x)));
    }
    const bool edge = at + N > end || !all_see(p, w, at, at + N, s0, s0 + 16);
    if (edge) hide<N>(p, w, s, at, s0, end, lane);
    uint32_t left[N / 16][4], right[N / 16][4];
    pack<T>(left, s);
    accumulate<T, D>(dv, left, dy);
    rfi_wgmma_wait<1>();
    rfi_wgmma_tie(ds[0]);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const float4 y = x[n * 4];
#pragma unroll
      for (int e = 0; e < 4; e++) ds[0][n][e] = (ds[0][n][e] - (e & 1 ? y.w : y.y)) * s[0][n][e];
      if (p.cap != 0)
#pragma unroll
        for (int e = 0; e < 4; e++) ds[0][n][e] *= slope_of(p, s[0][n][e], e & 1 ? y.z : y.x);
    }
    if (edge) hide<N>(p, w, ds, at, s0, end, lane);
    pack<T>(right, ds);
    accumulate<T, D>(dk, right, q);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(dv[0]);
    rfi_wgmma_tie(dk[0]);
  }
  __syncthreads();
  if (p.out[2]) store_rows<T, D, BLOCK>(p.out[2], p.row[2], p, kv, s0, s1, dv, shared, warp * 16, NULL);
  if (!p.out[1]) return;
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) dk[0][n][e] *= p.scale;
  store_rows<T, D, BLOCK>(p.out[1], p.row[1], p, kv, s0, s1, dk, shared, warp * 16, NULL);
}

#endif

template <typename T, int D>
static __global__ void __launch_bounds__(cut<D>::o_groups * 128, cut<D>::o_blocks) attention_o(const problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int BLOCK = cut<D>::o_groups * GROUP;
  extern __shared__ __align__(1024) char shared[];
  int *const dirty = (int *)(shared + (BLOCK + 4 * TILE_ROWS) * D * 2);
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h); __syncthreads()) {
    for (int i = (int)threadIdx.x; i < BLOCK; i += (int)blockDim.x) dirty[i] = 0;
#pragma unroll 1
    for (int again = 0; again < 2; again++)
      if (__syncthreads_and(attend<T, D>(p, w, h, shared, dirty, again != 0))) break;
  }
#endif
}

template <typename T, int D>
static __global__ void __launch_bounds__(BACKWARD_GROUPS * 128, 1) attention_dq(const problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h); __syncthreads()) dq_of<T, D>(p, w, h, shared);
#endif
}

template <typename T, int D>
static __global__ void __launch_bounds__(BACKWARD_GROUPS * 128, 1) attention_dkv(const problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  piece w;
  int kv;
  for (unsigned at = blockIdx.x; next_piece(p, p.Hk, &at, &w, &kv); __syncthreads()) dkv_of<T, D>(p, w, kv, shared);
#endif
}

/* ---- launching ---- */

static int padded(int D) { return D <= 64 ? 64 : 128; }

template <int D> static int o_bytes(void) {
  return (cut<D>::o_groups * GROUP + 4 * TILE_ROWS) * D * 2 + cut<D>::o_groups * GROUP * (int)sizeof(int);
}

static layout make_layout(const rfr_call *call, int backward) {
  const int groups = padded((int)call->in[backward].type.shape[2]) == 64 ? cut<64>::o_groups : cut<128>::o_groups;
  const int row = (backward ? BACKWARD_GROUPS : groups) * GROUP, rows[BLOCK_TABLES] = {row, row};
  return layout_of(call, backward, backward ? 6 : 3, rows, backward ? 2 : 1);
}

template <typename T> static rfr_status forward_of(const rfr_call *call, const problem *p, const layout *l) {
  if (padded(p->D) == 64)
    return launch(call, attention_o<T, 64>, p, l, 0, p->H, cut<64>::o_groups * 128, o_bytes<64>());
  return launch(call, attention_o<T, 128>, p, l, 0, p->H, cut<128>::o_groups * 128, o_bytes<128>());
}

static rfr_status forward(const rfr_call *call) {
  const layout l = make_layout(call, 0);
  return run_forward(call, &l, forward_of<rfi_bf16>, forward_of<rfi_f16>);
}

template <typename T> static rfr_status backward_of(const rfr_call *call, const problem *p, const layout *l) {
  constexpr int D = MOST_D, THREADS = BACKWARD_GROUPS * 128;
  const int bytes = (2 * BACKWARD_GROUPS * GROUP + 4 * TILE_ROWS) * D * 2, stats = 2 * TILE_ROWS * (int)sizeof(float2);
  rfr_status s = RFR_OK;
  if (p->out[0]) s = launch(call, attention_dq<T, D>, p, l, 0, p->H, THREADS, bytes);
  if (s == RFR_OK && (p->out[1] || p->out[2]))
    s = launch(call, attention_dkv<T, D>, p, l, 1, p->Hk, THREADS, bytes + stats);
  return s;
}

static rfr_status backward(const rfr_call *call) {
  const layout l = make_layout(call, 1);
  return run_backward(call, &l, 2, 1, backward_of<rfi_bf16>, backward_of<rfi_f16>);
}

static size_t forward_workspace(const rfr_call *call) { return make_layout(call, 0).bytes; }
static size_t backward_workspace(const rfr_call *call) { return make_layout(call, 1).bytes; }
static int takes(const rfr_call *call) { return takes_of(call, 0, MOST_D); }
static int takes_bwd(const rfr_call *call) { return takes_of(call, 1, MOST_D); }

extern "C" const rfi_cuda_kernel rfi_attention_sm90 = {forward, forward_workspace, takes};
extern "C" const rfi_cuda_kernel rfi_attention_sm90_bwd = {backward, backward_workspace, takes_bwd};
