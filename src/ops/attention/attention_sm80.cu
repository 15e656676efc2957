/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of bf16 and f16 on tensor cores, forward and backward, without a T x T buffer (Dao,
 * arXiv 2307.08691): a block owns some rows of one head and walks over tiles of the other side,
 * which are copied while the tile before is worked on. What the formulas are, attention_any.cu says.
 *
 * A block's rows belong to one document: the work is cut by a table made on the device, so which
 * rows see which keys is arithmetic, and another document's rows are neither read nor waited for.
 * Tiles that a warp's rows see wholly are not masked, those that they do not see are skipped.
 *
 * The backward has one kernel for dq and one for dk and dv, which makes p twice; for that every
 * sum has one order and nothing is added atomically. P and dS are rounded to the storage type,
 * as operands of the next product; all sums are in f32.
 *
 * A v that is not finite stays with the rows that see it: a block with a row of o that is not
 * finite is done again with zeros for such v. In the backward it stays with its document.
 */
#include "ops/attention/attention_cuda.h"
#include "ops/attention/mma_sm80.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, CUTTERS = 1024, MOST_D = 256 };

static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/* How a block cuts its work, by the padded head size. Two blocks to a multiprocessor, each of at
 * most 99 KiB of shared memory and 255 registers a thread. A warp owns 16 or 32 rows; with 32
 * it reads a fragment of the other side from shared memory once for two products. */
template <int D> struct cut;
template <> struct cut<64> {
  static constexpr int o_rows = 32, o_tile = 64;                 /* rows a warp, keys a tile */
  static constexpr int dq_rows = 32, dq_tile = 64, dq_part = 32; /* keys worked on at once */
  static constexpr int dkv_rows = 32, dkv_tile = 64, dkv_part = 32;
};
template <> struct cut<128> {
  static constexpr int o_rows = 32, o_tile = 64;
  static constexpr int dq_rows = 32, dq_tile = 32, dq_part = 32;
  static constexpr int dkv_rows = 16, dkv_tile = 64, dkv_part = 32; /* dk and dv of 32 rows were all registers */
};
template <> struct cut<256> {
  static constexpr int o_rows = 16, o_tile = 32;
  static constexpr int dq_rows = 16, dq_tile = 16, dq_part = 16;
  static constexpr int dkv_rows = 16, dkv_tile = 16, dkv_part = 16; /* dk and dv in launches of their own */
};

typedef struct matrix { /* (T, heads, D), D dense */
  const void *data;
  int64_t row, head;
} matrix;

/* Rows first ... last - 1 for a block, of a document of rows from ... end - 1. Rows before `from` see nothing. */
typedef struct __align__(16) piece {
  int first, last, from, end;
}
piece;

typedef struct problem {
  matrix q, k, v, dy;
  const piece *pieces;
  const int *count; /* of them, on the device */
  int reverse;      /* the last first: with a causal mask they have the most to do */
  float *lse;
  float2 *stats;                   /* (H, T): lse in units of log2 e, delta */
  int T, H, Hk, D, causal, window; /* window 0: none */
  float scale, factor, bend, cap;  /* 2^(factor x), x the product of q and k, or cap tanh(bend x) */
  void *out[3];                    /* o; dq, dk, dv: dense; NULL: not wanted */
} problem;

/* ---- who sees whom ---- */

static __device__ __forceinline__ int first_key(const problem &p, int from, int t) {
  return p.window ? max(from, t + 1 - p.window) : from;
}
static __device__ __forceinline__ int end_key(const problem &p, const piece &w, int t) {
  return t < w.from ? w.from : p.causal ? t + 1 : w.end;
}
static __device__ __forceinline__ bool sees(const problem &p, const piece &w, int t, int s) {
  return s >= first_key(p, w.from, t) && s < end_key(p, w, t);
}

/* Some row of t0 ... t1 - 1 sees some key of s0 ... s1 - 1; may say so when none does. */
static __device__ __forceinline__ bool any_sees(const problem &p, const piece &w, int t0, int t1, int s0, int s1) {
  return t1 > w.from && s0 < (p.causal ? t1 : w.end) && s1 > first_key(p, w.from, t0);
}
static __device__ __forceinline__ bool all_see(const problem &p, const piece &w, int t0, int t1, int s0, int s1) {
  return t0 >= w.from && s0 >= first_key(p, w.from, t1 - 1) && s1 <= (p.causal ? t0 + 1 : w.end);
}

/* ---- tiles ---- */

/* Rows of a head into a tile, zeros past `rows` and past D. */
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

/* Where a lane reads A (16 rows of k = 16), B of rows (16 columns), B of columns (16 rows) in a tile. */
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

/* Writes a warp's rows t0 ... of a head of a dense (T, heads, D) result, those before t1 and not marked in `skip`,
 * by way of the rows' place in a tile, which this warp alone reads. */
template <typename T, int D, int M>
__device__ __forceinline__ void store_rows(void *out, const problem &p, int heads, int h, int t0, int t1,
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
    *(uint4 *)((T *)out + ((int64_t)t * heads + h) * p.D + chunk * 8) =
        *(const uint4 *)(tile + r * D * 2 + ((chunk ^ (r & 7)) << 4));
  }
  __syncwarp();
}

/* ---- scores ---- */

/* tanh within 2e-7 of the value. */
static __device__ __forceinline__ float bent(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + rfi_exp2(x * (2 * LOG2E)));
}

template <int M, int N> __device__ __forceinline__ void bend(const problem &p, float (&c)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][n][e] = p.cap * bent(p.bend * c[m][n][e]);
}

/* ---- forward ---- */

/* The running maximum and sum of a thread's rows. The sum is over the thread's own columns until the end. */
template <int M> struct softmax { float max[M / 16][2], sum[M / 16][2]; };

/* Over the four lanes of a row. */
static __device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Scores become 2^(factor (score - max)); what was summed so far shrinks. */
template <int D, int M, int N>
__device__ __forceinline__ void soften(const problem &p, float (&s)[M / 16][N / 8][4], softmax<M> &x,
                                       float (&acc)[M / 16][D / 8][4]) {
  float shrink[M / 16][2];
  bool same = true;
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = x.max[m][half];
#pragma unroll
      for (int n = 0; n < N / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = quad_max(top);
      const float base = top == -INFINITY ? 0.0f : top * p.factor; /* -inf: a row that has seen no key yet */
      shrink[m][half] = rfi_exp2(fmaf(x.max[m][half], p.factor, -base));
      same = same && top == x.max[m][half];
      x.max[m][half] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[m][n][e] = rfi_exp2(fmaf(s[m][n][e], p.factor, -base));
          sum += s[m][n][e];
        }
      x.sum[m][half] = fmaf(x.sum[m][half], shrink[m][half], sum);
    }
  if (__all_sync(0xffffffffu, same)) return; /* all factors are 1, or what they shrink is 0 */
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] *= shrink[m][e / 2];
}

/* Zeros for the rows of v that are not finite; marks the block's rows that see one of them. */
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
      if (sees(p, w, w.first + i, s0 + r)) dirty[i] = 1; /* by more than one warp, perhaps: always 1 */
  }
  __syncthreads();
}

/* All of a block's work; `again`: with zeros for what is not finite in v, and for the rows that see none of it.
 * Returns whether the thread's part of o is finite. */
template <typename T, int D, bool again>
__device__ __forceinline__ bool attend(const problem &p, const piece &w, int h, char *shared, int *dirty) {
  constexpr int M = cut<D>::o_rows, N = cut<D>::o_tile, BLOCK = M * WARPS, TILE = N * D * 2;
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
    soften<D, M, N>(p, s, x, acc);
    accumulate<T, D, M, N>(acc, s, bt_of<D>(v, lane));
  }
  bool finite = true;
  rfi_copies_wait(); /* of q, when there was no tile */
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
  if (p.out[0]) store_rows<T, D, M>(p.out[0], p, p.H, h, t0, t1, acc, own, again ? dirty + mine : NULL);
  return finite;
}

/* A block's next piece, for each of `heads`; false: there is none left. Documents decide how many pieces there are, and
 * shapes the grid, which is enough for few documents: with many a block has more than one. */
static __device__ __forceinline__ bool next_piece(const problem &p, int heads, unsigned *at, piece *w, int *head) {
  const unsigned i = *at / (unsigned)heads, count = (unsigned)*p.count;
  if (i >= count) return false;
  *w = p.pieces[p.reverse ? count - 1 - i : i];
  *head = (int)(*at % (unsigned)heads);
  *at += gridDim.x;
  return true;
}

template <typename T, int D> static __global__ void __launch_bounds__(THREADS, 2) attention_o(const problem p) {
  constexpr int BLOCK = cut<D>::o_rows * WARPS;
  extern __shared__ __align__(1024) char shared[];
  __shared__ int dirty[BLOCK];
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h); __syncthreads()) {
    for (int i = (int)threadIdx.x; i < BLOCK; i += THREADS) dirty[i] = 0;
    if (!__syncthreads_and(attend<T, D, false>(p, w, h, shared, dirty))) attend<T, D, true>(p, w, h, shared, dirty);
  }
}

/* ---- backward ---- */

/* lse in units of log2 e, and delta = do o: eight threads a row. */
template <typename T>
static __global__ void __launch_bounds__(THREADS) attention_stats(const problem p, const matrix o) {
  const int64_t i = (int64_t)blockIdx.x * (THREADS / 8) + threadIdx.x / 8;
  const bool inside = i < (int64_t)p.T * p.H;
  const int64_t t = inside ? i / p.H : 0, h = inside ? i % p.H : 0;
  const T *a = (const T *)p.dy.data + t * p.dy.row + h * p.dy.head, *b = (const T *)o.data + t * o.row + h * o.head;
  float sum = 0;
  for (int d = (int)(threadIdx.x & 7) * 8; d < p.D; d += 64) {
    const rfi_pack<T, 8> x = *(const rfi_pack<T, 8> *)(a + d), y = *(const rfi_pack<T, 8> *)(b + d);
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(rfi_widen(x.x[e]), rfi_widen(y.x[e]), sum);
  }
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (inside && (threadIdx.x & 7) == 0) p.stats[h * p.T + t] = make_float2(p.lse[h * p.T + t] * LOG2E, sum);
}

/* Times the slope of capped scores. */
template <int M, int N>
__device__ __forceinline__ void slope(const problem &p, float (&ds)[M][N][4], const float (&s)[M][N][4]) {
  const float inverse = 1.0f / p.cap;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) ds[m][n][e] *= 1.0f - s[m][n][e] * inverse * (s[m][n][e] * inverse);
}

template <typename T, int D>
static __device__ __forceinline__ void dq_of(const problem &p, const piece w, const int h, char *shared) {
  constexpr int M = cut<D>::dq_rows, N = cut<D>::dq_tile, PART = cut<D>::dq_part, BLOCK = M * WARPS, TILE = N * D * 2;
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
  store_rows<T, D, M>(p.out[0], p, p.H, h, t0, t1, acc, shared + mine * D * 2, NULL);
}

/* A tile of q, one of do, and stats of their rows. */
template <typename T, int D, int N>
__device__ __forceinline__ void load_rows(uint32_t stage, uint32_t stats, const problem &p, int t, int h, int rows) {
  load_tile<T, D, N>(stage, p, p.q, t, h, rows);
  load_tile<T, D, N>(stage + N * D * 2, p, p.dy, t, h, rows);
  if (threadIdx.x < N) {
    const bool present = (int)threadIdx.x < rows;
    rfi_copy8(stats + threadIdx.x * 8, p.stats + (int64_t)h * p.T + t + (present ? (int)threadIdx.x : 0), present);
  }
  rfi_copies_commit();
}

/* DK, DV: which of them; both, unless their sums are too large together. */
template <typename T, int D, bool DK, bool DV>
static __device__ __forceinline__ void dkv_of(const problem &p, const piece w, const int kv, char *shared,
                                              float2 (*stats)[cut<D>::dkv_tile]) {
  constexpr int M = cut<D>::dkv_rows, N = cut<D>::dkv_tile, PART = cut<D>::dkv_part, BLOCK = M * WARPS,
                TILE = N * D * 2;
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
  if (steps > 0) load_rows<T, D, N>(stages, stats_at, p, start, kv * group, end - start);
  int t0 = start, h = kv * group;
  for (int step = 0; step < steps; step++) {
    const int stage = step & 1, next_t0 = t0 + N < end ? t0 + N : start, next_h = t0 + N < end ? h : h + 1;
    rfi_copies_wait();
    __syncthreads();
    if (step + 1 < steps)
      load_rows<T, D, N>(stages + (uint32_t)((stage ^ 1) * 2 * TILE), stats_at + (uint32_t)((stage ^ 1) * N * 8), p,
                         next_t0, next_h, end - next_t0);
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
    if (p.out[2]) store_rows<T, D, M>(p.out[2], p, p.Hk, kv, s0, s1, dv, own, NULL);
  if constexpr (DK) {
    if (!p.out[1]) return;
#pragma unroll
    for (int m = 0; m < M / 16; m++)
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dk[m][n][e] *= p.scale;
    store_rows<T, D, M>(p.out[1], p, p.Hk, kv, s0, s1, dk, own, NULL);
  }
}

template <typename T, int D> static __global__ void __launch_bounds__(THREADS, 2) attention_dq(const problem p) {
  extern __shared__ __align__(1024) char shared[];
  piece w;
  int h;
  for (unsigned at = blockIdx.x; next_piece(p, p.H, &at, &w, &h); __syncthreads()) dq_of<T, D>(p, w, h, shared);
}

template <typename T, int D, bool DK, bool DV>
static __global__ void __launch_bounds__(THREADS, 2) attention_dkv(const problem p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(16) float2 stats[2][cut<D>::dkv_tile];
  piece w;
  int kv;
  for (unsigned at = blockIdx.x; next_piece(p, p.Hk, &at, &w, &kv); __syncthreads())
    dkv_of<T, D, DK, DV>(p, w, kv, shared, stats);
}

/* ---- cutting the rows into pieces ---- */

typedef struct table {
  piece *pieces;
  int *count; /* of them */
  int rows;   /* of a piece */
} table;

/* Over a block of 1024: the inclusive running maximum or sum. `part` may be used again after it. */
template <bool SUM> static __device__ __forceinline__ int running(int x, int *part) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x = SUM ? x + other : max(x, other);
  }
  if (lane == 31) part[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; i++) x = SUM ? x + part[i] : max(x, part[i]);
  __syncthreads();
  return x;
}

/* One block a table, which ends as soon as all rows have an owner: offsets are often as many as rows may be. A document
 * is all rows since the end of the one before, so that every row has an owner; the rows after the last are one more,
 * which has no keys. */
static __global__ void __launch_bounds__(CUTTERS)
    attention_pieces(const int32_t *offsets, int n, int T, const table a, const table b) {
  __shared__ int part[32], ends[CUTTERS + 1], counts[CUTTERS + 1]; /* of 1024 documents, from those before them on */
  const table x = blockIdx.x == 0 ? a : b;
  const int me = threadIdx.x;
  int owned = 0, pieces = 0; /* rows and pieces until now */
  for (int d0 = 0; d0 < n && owned < T; d0 += CUTTERS) {
    const int d = d0 + me, end = running<false>(max(d < n ? min(offsets[d + 1], T) : 0, owned), part);
    if (me == 0) ends[0] = owned, counts[0] = 0;
    ends[me + 1] = end;
    __syncthreads();
    counts[me + 1] = running<true>((end - ends[me] + x.rows - 1) / x.rows, part);
    __syncthreads();
    for (int i = me; i < counts[CUTTERS]; i += CUTTERS) {
      int low = 0, high = CUTTERS - 1; /* the first document with more than i pieces up to its end */
      while (low < high) {
        const int middle = (low + high) / 2;
        if (counts[middle + 1] > i) high = middle;
        else low = middle + 1;
      }
      const int first = ends[low] + (i - counts[low]) * x.rows, last = ends[low + 1];
      x.pieces[pieces + i] =
          piece{first, min(first + x.rows, last), min(max(offsets[d0 + low], ends[low]), last), last};
    }
    owned = ends[CUTTERS];
    pieces += counts[CUTTERS];
    __syncthreads();
  }
  const int rest = (T - owned + x.rows - 1) / x.rows;
  for (int i = me; i < rest; i += CUTTERS) {
    const int first = owned + i * x.rows;
    x.pieces[pieces + i] = piece{first, min(first + x.rows, T), T, T};
  }
  if (me == 0) *x.count = pieces + rest;
}

/* ---- launching ---- */

enum { BLOCK_TABLES = 2 };

/* Where things lie in the workspace; the same from shapes alone and when running. */
typedef struct layout {
  size_t count[BLOCK_TABLES], pieces[BLOCK_TABLES], stats, bytes;
  int rows[BLOCK_TABLES], most[BLOCK_TABLES];
} layout;

static int padded(int D) { return D <= 64 ? 64 : D <= 128 ? 128 : 256; }

template <int D> static int rows_of(int backward, int keys) {
  return WARPS * (keys ? cut<D>::dkv_rows : backward ? cut<D>::dq_rows : cut<D>::o_rows);
}

static size_t reserve(size_t *bytes, int64_t n) {
  const size_t at = *bytes;
  *bytes += ((size_t)n + 255) / 256 * 256;
  return at;
}

/* `first` is q's operand, `offsets` the documents'. */
static layout layout_of(const rfr_call *call, int first, int offsets) {
  const int64_t T = call->in[first].type.shape[0], H = call->in[first].type.shape[1];
  const int64_t n = call->in[offsets].type.shape[0] - 1, owners = n + 1 < T ? n + 1 : T;
  const int D = padded((int)call->in[first].type.shape[2]), backward = first > 0;
  layout l = {};
  for (int i = 0; i <= backward; i++) {
    l.rows[i] = D == 64 ? rows_of<64>(backward, i) : D == 128 ? rows_of<128>(backward, i) : rows_of<256>(backward, i);
    l.most[i] = (int)((T + owners * (l.rows[i] - 1)) / l.rows[i]);
    l.count[i] = reserve(&l.bytes, sizeof(int));
    l.pieces[i] = reserve(&l.bytes, (int64_t)sizeof(piece) * l.most[i]);
  }
  l.stats = reserve(&l.bytes, backward ? 8 * T * H : 0);
  return l;
}

static problem problem_of(const rfr_call *call, int first) {
  const rfr_arg *q = &call->in[first];
  const float scale = (float)call->attr[0].f, cap = (float)call->attr[3].f;
  problem p = {};
  p.q = matrix{q[0].data, q[0].stride[0], q[0].stride[1]};
  p.k = matrix{q[1].data, q[1].stride[0], q[1].stride[1]};
  p.v = matrix{q[2].data, q[2].stride[0], q[2].stride[1]};
  p.T = (int)q->type.shape[0];
  p.H = (int)q->type.shape[1];
  p.Hk = (int)q[1].type.shape[1];
  p.D = (int)q->type.shape[2];
  p.causal = (int)call->attr[1].i;
  p.window = call->attr[2].i < p.T ? (int)call->attr[2].i : 0; /* a window of all rows is none */
  p.scale = scale;
  p.cap = cap * LOG2E;
  p.bend = cap != 0 ? scale / cap : 0;
  p.factor = cap != 0 ? 1 : scale * LOG2E;
  return p;
}

/* The tables of pieces, on the device. */
static void cut_rows(const rfr_call *call, const problem *p, const layout *l, int offsets, int tables) {
  char *at = (char *)call->workspace;
  const int n = (int)call->in[offsets].type.shape[0] - 1;
  const int32_t *documents = (const int32_t *)call->in[offsets].data;
  table x[BLOCK_TABLES] = {};
  for (int i = 0; i < tables; i++) x[i] = table{(piece *)(at + l->pieces[i]), (int *)(at + l->count[i]), l->rows[i]};
  attention_pieces<<<(unsigned)tables, CUTTERS, 0, rfi_stream(call)>>>(documents, n, p->T, x[0], x[1]);
}

static rfr_status allow(const void *kernel, int bytes) {
  return rfi_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                        "asking for shared memory");
}

/* The rows that a block keeps, `kept` matrices of them, and two stages of two tiles. */
static constexpr int shared_bytes(int kept, int rows, int tile, int D) {
  return (kept * rows * WARPS + 4 * tile) * D * 2;
}

typedef void (*kernel_fn)(problem);
static rfr_status launch(const rfr_call *call, kernel_fn kernel, const problem *given, const layout *l, int which,
                         int heads, int bytes) {
  enum { DOCUMENTS = 256 }; /* so many make the grid as large as their pieces may be */
  const int whole = (given->T + l->rows[which] - 1) / l->rows[which] + DOCUMENTS, most = l->most[which];
  problem p = *given;
  p.pieces = (const piece *)((char *)call->workspace + l->pieces[which]);
  p.count = (const int *)((char *)call->workspace + l->count[which]);
  p.reverse = which == 0;
  const rfr_status s = allow((const void *)kernel, bytes);
  if (s != RFR_OK) return s;
  kernel<<<(unsigned)((most < whole ? most : whole) * heads), THREADS, (size_t)bytes, rfi_stream(call)>>>(p);
  return RFR_OK;
}

template <typename T, int D> static rfr_status launch_forward(const rfr_call *call, const problem *p, const layout *l) {
  return launch(call, attention_o<T, D>, p, l, 0, p->H, shared_bytes(1, cut<D>::o_rows, cut<D>::o_tile, D));
}

template <typename T, int D> static rfr_status launch_backward(const rfr_call *call, problem p, const layout *l) {
  const int dkv_bytes = shared_bytes(2, cut<D>::dkv_rows, cut<D>::dkv_tile, D);
  const bool together = D <= 128;
  rfr_status s = RFR_OK;
  if (p.out[0])
    s = launch(call, attention_dq<T, D>, &p, l, 0, p.H, shared_bytes(2, cut<D>::dq_rows, cut<D>::dq_tile, D));
  if constexpr (together) {
    if (s == RFR_OK && (p.out[1] || p.out[2]))
      s = launch(call, attention_dkv<T, D, true, true>, &p, l, 1, p.Hk, dkv_bytes);
  } else {
    if (s == RFR_OK && p.out[1]) s = launch(call, attention_dkv<T, D, true, false>, &p, l, 1, p.Hk, dkv_bytes);
    if (s == RFR_OK && p.out[2]) s = launch(call, attention_dkv<T, D, false, true>, &p, l, 1, p.Hk, dkv_bytes);
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

template <typename T>
static rfr_status backward_of(const rfr_call *call, const problem *p, const layout *l, const matrix *o) {
  attention_stats<T><<<(unsigned)rfi_blocks((int64_t)p->T * p->H, THREADS / 8), THREADS, 0, rfi_stream(call)>>>(*p, *o);
  switch (padded(p->D)) {
    case 64: return launch_backward<T, 64>(call, *p, l);
    case 128: return launch_backward<T, 128>(call, *p, l);
    default: return launch_backward<T, 256>(call, *p, l);
  }
}

static rfr_status forward(const rfr_call *call) {
  const layout l = layout_of(call, 0, 3);
  problem p = problem_of(call, 0);
  p.out[0] = call->out[0].data;
  p.lse = (float *)call->out[1].data;
  if (p.T == 0 || p.H == 0) return RFR_OK;
  cut_rows(call, &p, &l, 3, 1);
  const rfr_status s =
      call->in[0].type.dtype == RFR_BF16 ? forward_of<rfi_bf16>(call, &p, &l) : forward_of<rfi_f16>(call, &p, &l);
  return s == RFR_OK ? rfi_cuda_launched("attention") : s;
}

static rfr_status backward(const rfr_call *call) {
  const layout l = layout_of(call, 1, 6);
  const rfr_arg *dy = &call->in[0], *out = &call->in[4];
  const matrix o = {out->data, out->stride[0], out->stride[1]};
  problem p = problem_of(call, 1);
  p.dy = matrix{dy->data, dy->stride[0], dy->stride[1]};
  p.lse = (float *)call->in[5].data;
  p.stats = (float2 *)((char *)call->workspace + l.stats);
  for (int i = 0; i < 3; i++) p.out[i] = call->out[i].data;
  if (p.T == 0 || p.H == 0) return RFR_OK;
  cut_rows(call, &p, &l, 6, 2);
  const rfr_status s = call->in[1].type.dtype == RFR_BF16 ? backward_of<rfi_bf16>(call, &p, &l, &o)
                                                          : backward_of<rfi_f16>(call, &p, &l, &o);
  return s == RFR_OK ? rfi_cuda_launched("attention_bwd") : s;
}

static size_t forward_workspace(const rfr_call *call) { return layout_of(call, 0, 3).bytes; }
static size_t backward_workspace(const rfr_call *call) { return layout_of(call, 1, 6).bytes; }

/* Chunks of 16 bytes, a positive scale (the largest product is the largest score), indices with room to add a tile. */
static int takes_of(const rfr_call *call, int first) {
  const rfr_arg *q = &call->in[first];
  const int64_t D = q->type.shape[2];
  if (q->type.dtype != RFR_BF16 && q->type.dtype != RFR_F16) return 0;
  if (D % 8 != 0 || D < 8 || D > MOST_D || !((float)call->attr[0].f > 0)) return 0;
  for (int i = 0; i < call->n_in; i++) {
    const rfr_arg *x = &call->in[i];
    const int r = x->type.rank;
    if (r == 3 && (x->stride[2] != 1 || x->stride[0] % 8 != 0 || x->stride[1] % 8 != 0)) return 0;
    if (r < 3 && x->type.shape[r - 1] > 1 && x->stride[r - 1] != 1) return 0; /* lse, offsets: dense */
    if (r == 2 && x->type.shape[0] > 1 && x->stride[0] != x->type.shape[1]) return 0;
  }
  return q->type.shape[0] < 1 << 30 && q->type.shape[0] * q->type.shape[1] < 1 << 30;
}
static int takes(const rfr_call *call) { return takes_of(call, 0); }
static int takes_bwd(const rfr_call *call) { return takes_of(call, 1); }

extern "C" const rfi_cuda_kernel rfi_attention_sm80 = {forward, forward_workspace, takes};
extern "C" const rfi_cuda_kernel rfi_attention_sm80_bwd = {backward, backward_workspace, takes_bwd};
