/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of bf16 and f16 on tensor cores, forward and backward, without a T x T buffer (Dao, arXiv 2307.08691). A
 * block owns some rows of one head and loops over tiles of the other side; the next tile is copied while the current
 * one is multiplied. The formulas are in attention_any.cu.
 *
 * A block's rows belong to one document: a table made on the device cuts the work, so which rows attend to which keys
 * is arithmetic, and rows of another document are neither read nor waited for. Tiles that all rows of a warp attend to
 * are not masked; tiles that none of them attends to are skipped.
 *
 * The backward has one kernel for dq and one for dk and dv. p is computed twice, and in exchange every sum has one
 * order and nothing is added atomically. P and dS are rounded to the storage type as operands of the next GEMM; all
 * sums are f32.
 *
 * A non-finite v affects only the rows that attend to it: a block with a non-finite row of o is computed again with
 * zeros for such v. In the backward a non-finite value stays within its document.
 */
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_tiles.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, MOST_D = 256 };

/* Tile sizes by the padded head size. Two blocks per multiprocessor, each with at most 99 KiB of shared memory and 255
 * registers per thread. A warp owns 16 or 32 rows; with 32 it reads a fragment of the other operand from shared memory
 * once for two MMAs. */
template <int D> struct cut;
template <> struct cut<64> {
  static constexpr int o_rows = 32, o_tile = 64;                 /* rows per warp, keys per tile */
  static constexpr int dq_rows = 32, dq_tile = 64, dq_part = 32; /* keys per iteration */
  static constexpr int dkv_rows = 32, dkv_tile = 64, dkv_part = 32;
};
template <> struct cut<128> {
  static constexpr int o_rows = 32, o_tile = 32; /* 64 keys' scores and o do not fit into the registers */
  static constexpr int dq_rows = 32, dq_tile = 32, dq_part = 32;
  /* dk and dv of 32 rows do not fit into the registers */
  static constexpr int dkv_rows = 16, dkv_tile = 64, dkv_part = 32;
};
template <> struct cut<256> {
  static constexpr int o_rows = 16, o_tile = 32;
  static constexpr int dq_rows = 16, dq_tile = 16, dq_part = 16;
  static constexpr int dkv_rows = 16, dkv_tile = 16, dkv_part = 16; /* dk and dv in separate launches */
};

/* ---- tiles ---- */

/* Loads rows of a head into a tile, zeros past `rows` and past D. */
template <typename T, int D, int ROWS>
__device__ __forceinline__ void load_tile(uint32_t tile, const problem &p, const matrix &x, int t, int h, int rows) {
  constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
  const int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
  const T *head = (const T *)x.data + (int64_t)h * x.head, *from = head + (int64_t)(t + row) * x.row + chunk * 8;
  const bool inside = chunk * 8 < p.D;
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP) {
    const int r = row + i;
    if (ROWS % STEP != 0 && r >= ROWS) break;
    const bool present = inside && r < rows;
    rfi_copy16(tile + (uint32_t)(r * D * 2 + ((chunk ^ (r & 7)) << 4)), present ? from : (const T *)x.data, present);
    from += STEP * x.row;
  }
}

/* The address that a lane reads in a tile: of A (16 rows of k = 16), of B by rows (16 columns), of B by columns (16
 * rows). */
template <int D> __device__ __forceinline__ uint32_t a_of(uint32_t tile, int lane) {
  return tile + (uint32_t)((lane & 15) * D * 2 + (((lane >> 4) ^ (lane & 7)) << 4));
}
template <int D> __device__ __forceinline__ uint32_t b_of(uint32_t tile, int lane) {
  return tile + (uint32_t)(((lane & 7) + (lane >> 4) * 8) * D * 2 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4));
}
template <int D> __device__ __forceinline__ uint32_t bt_of(uint32_t tile, int lane) { return a_of<D>(tile, lane); }

/* c (M x N) = rows of a times rows of b. */
template <typename T, int D, int M, int N>
__device__ __forceinline__ void multiply(float (&c)[M / 16][N / 8][4], uint32_t a, uint32_t b) {
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][n][e] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t left[M / 16][4], right[4];
#pragma unroll
    for (int m = 0; m < M / 16; m++) rfi_ldmatrix(left[m], (a ^ (uint32_t)(k << 5)) + (uint32_t)(m * 16 * D * 2));
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      rfi_ldmatrix(right, (b ^ (uint32_t)(k << 5)) + (uint32_t)(n * 16 * D * 2));
#pragma unroll
      for (int m = 0; m < M / 16; m++) {
        rfi_mma<T>(c[m][2 * n], left[m], right[0], right[1]);
        rfi_mma<T>(c[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

/* acc (M x D) += c (M x K, rounded) times K rows of b. */
template <typename T, int D, int M, int K>
__device__ __forceinline__ void accumulate(float (&acc)[M / 16][D / 8][4], const float (&c)[M / 16][K / 8][4],
                                           uint32_t b) {
#pragma unroll
  for (int k = 0; k < K / 16; k++) {
    uint32_t left[M / 16][4], right[4];
#pragma unroll
    for (int m = 0; m < M / 16; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float *x = &c[m][2 * k + i / 2][i % 2 * 2];
        left[m][i] = rfi_pair<T>(x[0], x[1]);
      }
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      rfi_ldmatrix_transposed(right, (b ^ (uint32_t)(n << 5)) + (uint32_t)(k * 16 * D * 2));
#pragma unroll
      for (int m = 0; m < M / 16; m++) {
        rfi_mma<T>(acc[m][2 * n], left[m], right[0], right[1]);
        rfi_mma<T>(acc[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

/* Writes a warp's rows t0 ... of a head of a dense (T, heads, D) result, except rows from t1 on and rows marked in
 * `skip`. The rows are staged in their own part of a tile, which no other warp reads. */
template <typename T, int D, int M>
__device__ __forceinline__ void store_rows(void *out, int64_t out_row, const problem &p, int h, int t0, int t1,
                                           const float (&acc)[M / 16][D / 8][4], char *tile, const int *skip) {
  constexpr int CHUNKS = D / 8;
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = m * 16 + half * 8 + g;
        *(uint32_t *)(tile + r * D * 2 + ((n ^ (r & 7)) << 4) + c * 4) =
            rfi_pair<T>(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
      }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < M * CHUNKS; i += 32) {
    const int r = (i + lane) / CHUNKS, chunk = (i + lane) % CHUNKS, t = t0 + r;
    if (t >= t1 || chunk * 8 >= p.D || (skip && skip[r])) continue;
    *(uint4 *)((T *)out + t * out_row + h * p.D + chunk * 8) =
        *(const uint4 *)(tile + r * D * 2 + ((chunk ^ (r & 7)) << 4));
  }
  __syncwarp();
}

/* ---- forward ---- */

/* Zeroes the rows of v that are not finite; marks the block's rows that attend to one of them. */
template <typename T, int D, int ROWS>
__device__ __forceinline__ void clean_tile(const problem &p, const piece &w, char *tile, int s0, int *dirty,
                                           int block) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int r = (int)threadIdx.x >> 5; r < ROWS; r += WARPS) {
    T *row = (T *)(tile + r * D * 2);
    bool finite = true;
#pragma unroll 1
    for (int d = lane; d < D; d += 32) finite = finite && isfinite(rfi_widen(row[d]));
    if (__all_sync(0xffffffffu, finite)) continue;
#pragma unroll 1
    for (int d = lane; d < D; d += 32) row[d] = rfi_narrow<T>(0.0f);
#pragma unroll 1
    for (int i = lane; i < block; i += 32)
      if (sees(p, w, w.first + i, s0 + r)) dirty[i] = 1; /* several warps may write this, always 1 */
  }
  __syncthreads();
}

/* Computes a block. `again`: with zeros for the non-finite rows of v, writing only the rows that attend to none of
 * them. Returns whether the thread's part of o is finite. */
template <typename T, int D, class C, bool again>
__device__ __forceinline__ bool attend(const problem &p, const piece &w, int h, char *shared, int *dirty) {
  constexpr int M = C::o_rows, N = C::o_tile, BLOCK = M * WARPS, TILE = N * D * 2;
  const int kv = h / (p.H / p.Hk), lane = threadIdx.x & 31, mine = ((int)threadIdx.x >> 5) * M;
  const int t0 = w.first + mine, t1 = min(t0 + M, w.last); /* the warp's rows; none if t1 <= t0 */
  char *const own = shared + mine * D * 2, *const ring = shared + BLOCK * D * 2;
  const uint32_t q = a_of<D>(rfi_shared_address(own), lane), stages = rfi_shared_address(ring);
  const int end = w.last <= w.from ? w.from : p.causal ? w.last : w.end;
  const int start = w.from + (first_key(p, w.from, w.first) - w.from) / N * N;
  float acc[M / 16][D / 8][4] = {};
  softmax<M> x;
#pragma unroll
  for (int i = 0; i < M / 8; i++) {
    x.max[i / 2][i % 2] = -INFINITY;
    x.sum[i / 2][i % 2] = 0;
  }
  load_tile<T, D, BLOCK>(rfi_shared_address(shared), p, p.q, w.first, h, w.last - w.first);
  load_tile<T, D, N>(stages, p, p.k, start, kv, end - start);
  load_tile<T, D, N>(stages + TILE, p, p.v, start, kv, end - start);
  rfi_copies_commit();
  for (int s0 = start, stage = 0; s0 < end; s0 += N, stage ^= 1) {
    const uint32_t k = stages + (uint32_t)(stage * 2 * TILE), v = k + TILE;
    rfi_copies_wait();
    __syncthreads();
    if (s0 + N < end) {
      const uint32_t next = stages + (uint32_t)((stage ^ 1) * 2 * TILE);
      load_tile<T, D, N>(next, p, p.k, s0 + N, kv, end - s0 - N);
      load_tile<T, D, N>(next + TILE, p, p.v, s0 + N, kv, end - s0 - N);
      rfi_copies_commit();
    }
    if (again) clean_tile<T, D, N>(p, w, ring + stage * 2 * TILE + TILE, s0, dirty, BLOCK);
    if (t1 <= t0 || !any_sees(p, w, t0, t1, s0, s0 + N)) continue;
    float s[M / 16][N / 8][4];
    multiply<T, D, M, N>(s, q, b_of<D>(k, lane));
    if (p.cap != 0) bend(p, s);
    if (!all_see(p, w, t0, t1, s0, s0 + N)) {
#pragma unroll
      for (int m = 0; m < M / 16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int t = t0 + m * 16 + half * 8 + (lane >> 2), c = s0 + (lane & 3) * 2;
          const int from = first_key(p, w.from, t) - c, to = end_key(p, w, t) - c;
#pragma unroll
          for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
              if (n * 8 + e < from || n * 8 + e >= to) s[m][n][2 * half + e] = -INFINITY;
        }
    }
    float shrink[M / 16][2];
    if (!soften<M, N>(p, s, x, shrink)) shrink_rows<M, D>(acc, shrink);
    accumulate<T, D, M, N>(acc, s, bt_of<D>(v, lane));
  }
  bool finite = true;
  rfi_copies_wait(); /* q was copied even if there was no tile */
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = t0 + m * 16 + half * 8 + (lane >> 2);
      const float sum = quad_sum(x.sum[m][half]), inverse = sum == 0 ? 0.0f : 1.0f / sum;
      if (p.lse && (lane & 3) == 0 && t < t1 && !again)
        p.lse[(int64_t)h * p.T + t] = sum == 0 ? -INFINITY : fmaf(x.max[m][half], p.factor, log2f(sum)) * LN2;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          acc[m][n][e] *= inverse;
          finite = finite && isfinite(acc[m][n][e]);
        }
    }
  if (p.out[0]) store_rows<T, D, M>(p.out[0], p.row[0], p, h, t0, t1, acc, own, again ? dirty + mine : NULL);
  return finite;
}

template <typename T, int D, class C> static __device__ __forceinline__ void o_of(const problem &p, char *shared) {
  constexpr int BLOCK = C::o_rows * WARPS;
  __shared__ int dirty[BLOCK];
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h); __syncthreads()) {
    for (int i = (int)threadIdx.x; i < BLOCK; i += THREADS) dirty[i] = 0;
    if (!__syncthreads_and(attend<T, D, C, false>(p, w, h, shared, dirty)))
      attend<T, D, C, true>(p, w, h, shared, dirty);
  }
}

template <typename T, int D> static __global__ void __launch_bounds__(THREADS, 2) attention_o(const problem p) {
  extern __shared__ __align__(1024) char shared[];
  o_of<T, D, cut<D>>(p, shared);
}

/* ---- backward ---- */

template <typename T, int D, class C>
static __device__ __forceinline__ void dq_of(const problem &p, const piece w, const int h, char *shared) {
  constexpr int M = C::dq_rows, N = C::dq_tile, PART = C::dq_part, BLOCK = M * WARPS, TILE = N * D * 2;
  const int kv = h / (p.H / p.Hk);
  const int lane = threadIdx.x & 31, mine = ((int)threadIdx.x >> 5) * M;
  const int t0 = w.first + mine, t1 = min(t0 + M, w.last);
  const uint32_t base = rfi_shared_address(shared), stages = base + 2 * BLOCK * D * 2;
  const uint32_t q = a_of<D>(base + (uint32_t)(mine * D * 2), lane), dy = q + BLOCK * D * 2;
  const int end = w.last <= w.from ? w.from : p.causal ? w.last : w.end;
  const int start = w.from + (first_key(p, w.from, w.first) - w.from) / N * N;
  float acc[M / 16][D / 8][4] = {}, lse[M / 16][2], delta[M / 16][2];
  load_tile<T, D, BLOCK>(base, p, p.q, w.first, h, w.last - w.first);
  load_tile<T, D, BLOCK>(base + BLOCK * D * 2, p, p.dy, w.first, h, w.last - w.first);
  load_tile<T, D, N>(stages, p, p.k, start, kv, end - start);
  load_tile<T, D, N>(stages + TILE, p, p.v, start, kv, end - start);
  rfi_copies_commit();
#pragma unroll
  for (int i = 0; i < M / 8; i++) {
    const int t = t0 + i * 8 + (lane >> 2);
    const float2 x = t < t1 ? p.stats[(int64_t)h * p.T + t] : make_float2(0, 0);
    lse[i / 2][i % 2] = x.x;
    delta[i / 2][i % 2] = x.y;
  }
  for (int s0 = start, stage = 0; s0 < end; s0 += N, stage ^= 1) {
    rfi_copies_wait();
    __syncthreads();
    if (s0 + N < end) {
      const uint32_t next = stages + (uint32_t)((stage ^ 1) * 2 * TILE);
      load_tile<T, D, N>(next, p, p.k, s0 + N, kv, end - s0 - N);
      load_tile<T, D, N>(next + TILE, p, p.v, s0 + N, kv, end - s0 - N);
      rfi_copies_commit();
    }
#pragma unroll 1
    for (int part = 0; part < N; part += PART) {
      const uint32_t k = stages + (uint32_t)(stage * 2 * TILE + part * D * 2), v = k + TILE;
      const int s1 = s0 + part;
      if (t1 <= t0 || !any_sees(p, w, t0, t1, s1, s1 + PART)) continue;
      float s[M / 16][PART / 8][4], ds[M / 16][PART / 8][4];
      multiply<T, D, M, PART>(s, q, b_of<D>(k, lane));
      if (p.cap != 0) bend(p, s);
      multiply<T, D, M, PART>(ds, dy, b_of<D>(v, lane));
#pragma unroll
      for (int m = 0; m < M / 16; m++)
#pragma unroll
        for (int n = 0; n < PART / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) ds[m][n][e] -= delta[m][e / 2];
      if (p.cap != 0) slope(p, ds, s);
#pragma unroll
      for (int m = 0; m < M / 16; m++)
#pragma unroll
        for (int n = 0; n < PART / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) ds[m][n][e] *= rfi_exp2(fmaf(s[m][n][e], p.factor, -lse[m][e / 2]));
      if (!all_see(p, w, t0, t1, s1, s1 + PART)) {
#pragma unroll
        for (int m = 0; m < M / 16; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int t = t0 + m * 16 + half * 8 + (lane >> 2), c = s1 + (lane & 3) * 2;
            const int from = first_key(p, w.from, t) - c, to = end_key(p, w, t) - c;
#pragma unroll
            for (int n = 0; n < PART / 8; n++)
#pragma unroll
              for (int e = 0; e < 2; e++)
                if (n * 8 + e < from || n * 8 + e >= to) ds[m][n][2 * half + e] = 0;
          }
      }
      accumulate<T, D, M, PART>(acc, ds, bt_of<D>(k, lane));
    }
  }
  rfi_copies_wait();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] *= p.scale;
  store_rows<T, D, M>(p.out[0], p.row[0], p, h, t0, t1, acc, shared + mine * D * 2, NULL);
}

/* Loads a tile of q, one of do, and the statistics of their rows. NEAR: the statistics are already in shared memory. */
template <typename T, int D, int N, bool NEAR>
__device__ __forceinline__ void load_rows(uint32_t stage, uint32_t stats, const problem &p, int t, int h, int rows) {
  load_tile<T, D, N>(stage, p, p.q, t, h, rows);
  load_tile<T, D, N>(stage + N * D * 2, p, p.dy, t, h, rows);
  if (threadIdx.x < N) {
    const bool present = (int)threadIdx.x < rows;
    const float2 *from = p.stats + (int64_t)h * p.T + t + (present ? (int)threadIdx.x : 0);
    if (NEAR) {
      const float2 x = present ? *from : make_float2(0, 0);
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(stats + threadIdx.x * 8), "f"(x.x), "f"(x.y) : "memory");
    } else {
      rfi_copy8(stats + threadIdx.x * 8, from, present);
    }
  }
  rfi_copies_commit();
}

/* DK, DV: the gradients to compute; both, unless their accumulators do not fit into the registers together. */
template <typename T, int D, class C, bool DK, bool DV, bool NEAR>
static __device__ __forceinline__ void dkv_of(const problem &p, const piece w, const int kv, char *shared,
                                              float2 (*stats)[C::dkv_tile]) {
  constexpr int M = C::dkv_rows, N = C::dkv_tile, PART = C::dkv_part, BLOCK = M * WARPS, TILE = N * D * 2;
  const int group = p.H / p.Hk;
  const int lane = threadIdx.x & 31, mine = ((int)threadIdx.x >> 5) * M;
  const int s0 = w.first + mine, s1 = min(s0 + M, w.last);
  const uint32_t base = rfi_shared_address(shared), stages = base + 2 * BLOCK * D * 2;
  const uint32_t k = a_of<D>(base + (uint32_t)(mine * D * 2), lane), v = k + BLOCK * D * 2;
  const uint32_t stats_at = rfi_shared_address(stats);
  const int first = p.causal ? max(w.from, w.first) : w.from, start = w.from + (first - w.from) / N * N;
  const int end = w.last <= w.from ? start : p.window ? min(w.end, w.last - 1 + p.window) : w.end;
  const int tiles = max(0, (end - start + N - 1) / N), steps = tiles * group;
  float dk[DK ? M / 16 : 1][DK ? D / 8 : 1][4] = {}, dv[DV ? M / 16 : 1][DV ? D / 8 : 1][4] = {};
  load_tile<T, D, BLOCK>(base, p, p.k, w.first, kv, w.last - w.first);
  if (DK) load_tile<T, D, BLOCK>(base + BLOCK * D * 2, p, p.v, w.first, kv, w.last - w.first);
  if (steps > 0) load_rows<T, D, N, NEAR>(stages, stats_at, p, start, kv * group, end - start);
  int t0 = start, h = kv * group;
  for (int step = 0; step < steps; step++) {
    const int stage = step & 1, next_t0 = t0 + N < end ? t0 + N : start, next_h = t0 + N < end ? h : h + 1;
    rfi_copies_wait();
    __syncthreads();
    if (step + 1 < steps)
      load_rows<T, D, N, NEAR>(stages + (uint32_t)((stage ^ 1) * 2 * TILE), stats_at + (uint32_t)((stage ^ 1) * N * 8),
                               p, next_t0, next_h, end - next_t0);
#pragma unroll 1
    for (int part = 0; part < N; part += PART) {
      const uint32_t q = stages + (uint32_t)(stage * 2 * TILE + part * D * 2), dy = q + TILE;
      const int t1 = t0 + part;
      if (t1 >= end || s1 <= s0 || !any_sees(p, w, t1, min(t1 + PART, end), s0, s1)) continue;
      float s[M / 16][PART / 8][4], ds[M / 16][PART / 8][4];
      multiply<T, D, M, PART>(s, k, b_of<D>(q, lane));
      if (p.cap != 0) bend(p, s);
      if (DK) multiply<T, D, M, PART>(ds, v, b_of<D>(dy, lane));
#pragma unroll
      for (int n = 0; n < PART / 8 && DK; n++) {
        const float4 x = *(const float4 *)&stats[stage][part + n * 8 + (lane & 3) * 2];
#pragma unroll
        for (int m = 0; m < M / 16; m++)
#pragma unroll
          for (int e = 0; e < 4; e++) ds[m][n][e] -= e & 1 ? x.w : x.y;
      }
      if (DK && p.cap != 0) slope(p, ds, s);
#pragma unroll
      for (int n = 0; n < PART / 8; n++) {
        const float4 x = *(const float4 *)&stats[stage][part + n * 8 + (lane & 3) * 2];
#pragma unroll
        for (int m = 0; m < M / 16; m++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            s[m][n][e] = rfi_exp2(fmaf(s[m][n][e], p.factor, -(e & 1 ? x.z : x.x)));
            if (DK) ds[m][n][e] *= s[m][n][e];
          }
      }
      if (t1 + PART > end || !all_see(p, w, t1, t1 + PART, s0, s1)) {
#pragma unroll
        for (int n = 0; n < PART / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int t = t1 + n * 8 + (lane & 3) * 2 + e, c = s0 + (lane >> 2);
            const int from = first_key(p, w.from, t) - c, to = t < end ? end_key(p, w, t) - c : from;
#pragma unroll
            for (int i = 0; i < M / 8; i++)
              if (i * 8 < from || i * 8 >= to) s[i / 2][n][i % 2 * 2 + e] = ds[i / 2][n][i % 2 * 2 + e] = 0;
          }
      }
      if constexpr (DV) accumulate<T, D, M, PART>(dv, s, bt_of<D>(dy, lane));
      if constexpr (DK) accumulate<T, D, M, PART>(dk, ds, bt_of<D>(q, lane));
    }
    t0 = next_t0;
    h = next_h;
  }
  rfi_copies_wait();
  __syncthreads();
  char *const own = shared + mine * D * 2;
  if constexpr (DV)
    if (p.out[2]) store_rows<T, D, M>(p.out[2], p.row[2], p, kv, s0, s1, dv, own, NULL);
  if constexpr (DK) {
    if (!p.out[1]) return;
#pragma unroll
    for (int m = 0; m < M / 16; m++)
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dk[m][n][e] *= p.scale;
    store_rows<T, D, M>(p.out[1], p.row[1], p, kv, s0, s1, dk, own, NULL);
  }
}

template <typename T, int D> static __global__ void __launch_bounds__(THREADS, 2) attention_dq(const problem p) {
  extern __shared__ __align__(1024) char shared[];
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h); __syncthreads()) dq_of<T, D, cut<D>>(p, w, h, shared);
}

template <typename T, int D, bool DK, bool DV>
static __global__ void __launch_bounds__(THREADS, 2) attention_dkv(const problem p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(16) float2 stats[2][cut<D>::dkv_tile];
  piece w;
  int kv;
  for (unsigned at = blockIdx.x; next_piece(p, p.Hk, &at, &w, &kv); __syncthreads())
    dkv_of<T, D, cut<D>, DK, DV, false>(p, w, kv, shared, stats);
}

/* ---- few rows ----
 *
 * One launch per direction, for calls whose time is mostly launch time. Each block finds the pieces itself. In the
 * backward the first blocks compute dq and the others dk and dv, each with the statistics of the rows that it reads.
 * The loops are the same as above, so a wrong `longest` costs time, not correctness. */

enum { FEW_ROWS = 1024, FEW_DOCUMENTS = 31, FEW_STATS = 2048, FEW_LONGEST = 128, FEW_MOST_D = 128 };

struct few_cut { /* a block covers a document of up to 64 rows */
  static constexpr int o_rows = 16, o_tile = 64;
  static constexpr int dq_rows = 16, dq_tile = 64, dq_part = 32;
  static constexpr int dkv_rows = 16, dkv_tile = 64, dkv_part = 32;
};
enum { FEW_BLOCK = WARPS * 16, FEW_PIECES = FEW_ROWS / FEW_BLOCK + FEW_DOCUMENTS + 1 };

typedef struct few {
  const int32_t *offsets;
  int documents;
  unsigned dq_blocks; /* blocks of the backward that compute dq */
  matrix o;
} few;

/* Like attention_pieces: a document is all rows since the end of the previous one; the rows after the last document
 * count as one more. */
static __device__ __forceinline__ void find_pieces(problem *p, const few &x) {
  __shared__ piece pieces[FEW_PIECES];
  __shared__ int offsets[FEW_DOCUMENTS + 1], count;
  if ((int)threadIdx.x <= x.documents) offsets[threadIdx.x] = x.offsets[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    int owned = 0, n = 0;
    for (int d = 0; d <= x.documents && owned < p->T; d++) {
      const bool rest = d == x.documents;
      const int last = rest ? p->T : max(min(offsets[d + 1], p->T), owned);
      const int from = rest ? p->T : min(max(offsets[d], owned), last);
      for (int first = owned; first < last; first += FEW_BLOCK)
        pieces[n++] = piece{first, min(first + FEW_BLOCK, last), from, last};
      owned = last;
    }
    count = n;
  }
  __syncthreads();
  p->pieces = pieces;
  p->count = &count;
}

/* Like attention_stats, for rows t0 ... t1 - 1 and `heads` heads from h0 on. p->stats is offset so that row t of head h
 * is at its usual index. */
template <typename T>
static __device__ __forceinline__ void find_stats(problem *p, const matrix &o, int h0, int heads, int t0, int t1) {
  __shared__ float2 stats[FEW_STATS];
  p->stats = stats - (int64_t)h0 * p->T;
  for (int i = (int)threadIdx.x / 8; i < (t1 - t0) * heads; i += THREADS / 8) {
    const int t = t0 + i / heads, h = h0 + i % heads;
    const T *a = (const T *)p->dy.data + t * p->dy.row + h * p->dy.head,
            *b = (const T *)o.data + t * o.row + h * o.head;
    float sum = 0;
    for (int d = (int)(threadIdx.x & 7) * 8; d < p->D; d += 64) {
      const rfi_pack<T, 8> x = *(const rfi_pack<T, 8> *)(a + d), y = *(const rfi_pack<T, 8> *)(b + d);
#pragma unroll
      for (int e = 0; e < 8; e++) sum = fmaf(rfi_widen(x.x[e]), rfi_widen(y.x[e]), sum);
    }
#pragma unroll
    for (int step = 4; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffu << (threadIdx.x & 24), sum, step);
    if ((threadIdx.x & 7) == 0) stats[(h - h0) * p->T + t] = make_float2(p->lse[(int64_t)h * p->T + t] * LOG2E, sum);
  }
  __syncthreads();
}

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 2) attention_few_o(const problem given, const few x) {
  extern __shared__ __align__(1024) char shared[];
  problem p = given;
  find_pieces(&p, x);
  o_of<T, D, few_cut>(p, shared);
}

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 2) attention_few_bwd(const problem given, const few x) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(16) float2 stats[2][few_cut::dkv_tile];
  problem p = given;
  piece w;
  int h;
  find_pieces(&p, x);
  if (blockIdx.x < x.dq_blocks) {
    const unsigned at = blockIdx.x, count = (unsigned)*p.count;
    if (at / (unsigned)p.H >= count) return;
    w = p.pieces[at / (unsigned)p.H];
    h = (int)(at % (unsigned)p.H);
    find_stats<T>(&p, x.o, h, 1, w.first, w.last);
    dq_of<T, D, few_cut>(p, w, h, shared);
  } else {
    const unsigned at = blockIdx.x - x.dq_blocks, count = (unsigned)*p.count;
    if (at / (unsigned)p.Hk >= count) return;
    w = p.pieces[at / (unsigned)p.Hk];
    h = (int)(at % (unsigned)p.Hk);
    find_stats<T>(&p, x.o, h * (p.H / p.Hk), p.H / p.Hk, w.from, w.end);
    dkv_of<T, D, few_cut, true, true, true>(p, w, h, shared, stats);
  }
}

/* ---- launching ---- */

static int padded(int D) { return D <= 64 ? 64 : D <= 128 ? 128 : 256; }

template <int D> static int rows_of(int backward, int keys) {
  return WARPS * (keys ? cut<D>::dkv_rows : backward ? cut<D>::dq_rows : cut<D>::o_rows);
}

static layout make_layout(const rfr_call *call, int backward) {
  const int D = padded((int)call->in[backward].type.shape[2]);
  int rows[BLOCK_TABLES];
  for (int i = 0; i < BLOCK_TABLES; i++)
    rows[i] = D == 64 ? rows_of<64>(backward, i) : D == 128 ? rows_of<128>(backward, i) : rows_of<256>(backward, i);
  return layout_of(call, backward, backward ? 6 : 3, rows, backward ? 2 : 1);
}

/* Bytes for the `kept` matrices of rows that stay in shared memory, and two stages of two tiles. */
static constexpr int shared_bytes(int kept, int rows, int tile, int D) {
  return (kept * rows * WARPS + 4 * tile) * D * 2;
}

template <typename T, int D> static rfr_status launch_forward(const rfr_call *call, const problem *p, const layout *l) {
  return launch(call, attention_o<T, D>, p, l, 0, p->H, THREADS, shared_bytes(1, cut<D>::o_rows, cut<D>::o_tile, D));
}

template <typename T, int D> static rfr_status launch_backward(const rfr_call *call, problem p, const layout *l) {
  const int dkv_bytes = shared_bytes(2, cut<D>::dkv_rows, cut<D>::dkv_tile, D);
  const bool together = D <= 128;
  rfr_status s = RFR_OK;
  if (p.out[0])
    s = launch(call, attention_dq<T, D>, &p, l, 0, p.H, THREADS, shared_bytes(2, cut<D>::dq_rows, cut<D>::dq_tile, D));
  if constexpr (together) {
    if (s == RFR_OK && (p.out[1] || p.out[2]))
      s = launch(call, attention_dkv<T, D, true, true>, &p, l, 1, p.Hk, THREADS, dkv_bytes);
  } else {
    if (s == RFR_OK && p.out[1]) s = launch(call, attention_dkv<T, D, true, false>, &p, l, 1, p.Hk, THREADS, dkv_bytes);
    if (s == RFR_OK && p.out[2]) s = launch(call, attention_dkv<T, D, false, true>, &p, l, 1, p.Hk, THREADS, dkv_bytes);
  }
  return s;
}

template <typename T> static rfr_status forward_of(const rfr_call *call, const problem *p, const layout *l) {
  switch (padded(p->D)) {
    case 64: return launch_forward<T, 64>(call, p, l);
    case 128: return launch_forward<T, 128>(call, p, l);
    default: return launch_forward<T, 256>(call, p, l);
  }
}

template <typename T> static rfr_status backward_of(const rfr_call *call, const problem *p, const layout *l) {
  switch (padded(p->D)) {
    case 64: return launch_backward<T, 64>(call, *p, l);
    case 128: return launch_backward<T, 128>(call, *p, l);
    default: return launch_backward<T, 256>(call, *p, l);
  }
}

static rfr_status forward(const rfr_call *call) {
  const layout l = make_layout(call, 0);
  return run_forward(call, &l, forward_of<rfi_bf16>, forward_of<rfi_f16>);
}

static rfr_status backward(const rfr_call *call) {
  const layout l = make_layout(call, 1);
  return run_backward(call, &l, 2, 1, backward_of<rfi_bf16>, backward_of<rfi_f16>);
}

/* As many blocks as there may be pieces, for each of `heads`. */
static unsigned few_blocks(const rfr_call *call, int offsets, int T, int heads) {
  const int64_t n = call->in[offsets].type.shape[0] - 1, owners = n + 1 < T ? n + 1 : T;
  return (unsigned)((T + owners * (FEW_BLOCK - 1)) / FEW_BLOCK * heads);
}

typedef void (*few_fn)(problem, few);
static rfr_status launch_few(const rfr_call *call, few_fn kernel, const problem *p, const few &x, unsigned blocks,
                             int bytes) {
  const rfr_status s = allow((const void *)kernel, bytes);
  if (s != RFR_OK) return s;
  kernel<<<blocks, THREADS, (size_t)bytes, rfi_stream(call)>>>(*p, x);
  return rfi_cuda_launched("attention of few rows");
}

template <typename T> static rfr_status few_forward_of(const rfr_call *call, const problem *p, const few &x) {
  const unsigned blocks = few_blocks(call, 3, p->T, p->H);
  if (padded(p->D) == 64) return launch_few(call, attention_few_o<T, 64>, p, x, blocks, shared_bytes(1, 16, 64, 64));
  return launch_few(call, attention_few_o<T, 128>, p, x, blocks, shared_bytes(1, 16, 64, 128));
}

static rfr_status few_forward(const rfr_call *call) {
  problem p = problem_of(call, 0);
  p.out[0] = call->out[0].data;
  p.row[0] = call->out[0].stride[0];
  p.lse = (float *)call->out[1].data;
  const few x = {(const int32_t *)call->in[3].data, (int)call->in[3].type.shape[0] - 1};
  if (p.T == 0 || p.H == 0) return RFR_OK;
  return call->in[0].type.dtype == RFR_BF16 ? few_forward_of<rfi_bf16>(call, &p, x)
                                            : few_forward_of<rfi_f16>(call, &p, x);
}

template <typename T> static rfr_status few_backward_of(const rfr_call *call, const problem *p, const few &x) {
  const bool keys = p->out[1] || p->out[2];
  const unsigned blocks = x.dq_blocks + (keys ? few_blocks(call, 6, p->T, p->Hk) : 0);
  if (blocks == 0) return RFR_OK;
  if (padded(p->D) == 64) return launch_few(call, attention_few_bwd<T, 64>, p, x, blocks, shared_bytes(2, 16, 64, 64));
  return launch_few(call, attention_few_bwd<T, 128>, p, x, blocks, shared_bytes(2, 16, 64, 128));
}

static rfr_status few_backward(const rfr_call *call) {
  problem p = backward_problem_of(call);
  const rfr_arg *out = &call->in[4];
  if (p.T == 0 || p.H == 0) return RFR_OK;
  const few x = {(const int32_t *)call->in[6].data, (int)call->in[6].type.shape[0] - 1,
                 p.out[0] ? few_blocks(call, 6, p.T, p.H) : 0, matrix{out->data, out->stride[0], out->stride[1]}};
  return call->in[1].type.dtype == RFR_BF16 ? few_backward_of<rfi_bf16>(call, &p, x)
                                            : few_backward_of<rfi_f16>(call, &p, x);
}

static int takes_few(const rfr_call *call, int first, int offsets) {
  const rfr_arg *q = &call->in[first];
  const int64_t T = q->type.shape[0], longest = call->attr[4].i, heads = q->type.shape[1];
  return longest > 0 && longest <= FEW_LONGEST && T <= FEW_ROWS &&
         call->in[offsets].type.shape[0] - 1 <= FEW_DOCUMENTS &&
         (first == 0 || T * heads / (heads > 0 ? q[1].type.shape[1] : 1) <= FEW_STATS) &&
         takes_of(call, first, FEW_MOST_D);
}
static int takes_few_forward(const rfr_call *call) { return takes_few(call, 0, 3); }
static int takes_few_backward(const rfr_call *call) { return takes_few(call, 1, 6); }

static size_t forward_workspace(const rfr_call *call) { return make_layout(call, 0).bytes; }
static size_t backward_workspace(const rfr_call *call) { return make_layout(call, 1).bytes; }

static int takes(const rfr_call *call) { return takes_of(call, 0, MOST_D); }
static int takes_bwd(const rfr_call *call) { return takes_of(call, 1, MOST_D); }

extern "C" const rfi_cuda_kernel rfi_attention_sm80 = {forward, forward_workspace, takes};
extern "C" const rfi_cuda_kernel rfi_attention_sm80_bwd = {backward, backward_workspace, takes_bwd};
extern "C" const rfi_cuda_kernel rfi_attention_few = {few_forward, NULL, takes_few_forward};
extern "C" const rfi_cuda_kernel rfi_attention_few_bwd = {few_backward, NULL, takes_few_backward};
