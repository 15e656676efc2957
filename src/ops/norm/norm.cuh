/* SPDX-License-Identifier: Apache-2.0
 *
 * layernorm and rmsnorm on a GPU; MEAN selects layernorm (without it m is 0):
 *
 *   h = (x - m) r   y = h w + b   g = dy w   dx = r (g - mean(g) - h mean(g h))   dw = sum dy h   db = sum dy
 *   ds = sum dx
 *
 * In the forward a row stays in the registers of some lanes of a warp, or of a block if it is longer, so it is read and
 * written once, 16 bytes per thread at a time. In the backward a block processes every gridDim-th row. The next rows
 * are copied to shared memory, each thread's own pieces, while this one is summed; a thread adds dw, db and ds of its
 * own columns. A block's sums are lines of the workspace, and a second kernel adds the lines in f64 in a fixed order.
 * Rows that are too long, or not a multiple of 16 bytes, are read once per sum.
 *
 * X_dx, X_dw, X_db and X_bwd are the same kernel with some results absent, so they are bitwise equal. X_db has no x: dy
 * is passed in its place, and there are no statistics.
 */
#ifndef RFI_NORM_CUH
#define RFI_NORM_CUH

#include "backend/cuda/kernels.cuh"

enum { RFI_NORM_WARPS = 4, RFI_NORM_THREADS = 32 * RFI_NORM_WARPS, RFI_NORM_MOST = 512, RFI_NORM_ANY = 256 };

typedef struct rfi_norm_fwd {
  const void *x, *other, *w, *b; /* NULL: there is no other, no bias */
  void *sum, *y;                 /* sum = x + other, rounded; y = the norm of sum. NULL: not computed */
  float *mean, *rstd;
  rfr_dtype x_type, w_type, b_type;
  int64_t rows, C;
  float eps;
} rfi_norm_fwd;

typedef struct rfi_norm_bwd_args {
  const void *dy, *x, *w, *residual; /* residual NULL: there is none */
  const float *mean, *rstd;
  void *dx;            /* NULL: not stored */
  float *dw, *db, *ds; /* partial sums (parts, C) in the workspace; NULL: not computed. ds: of dx as it is stored */
  rfr_dtype x_type, w_type;
  int64_t rows, C;
} rfi_norm_bwd_args;

/* ---- rows in registers ---- */

static __device__ __forceinline__ float rfi_norm_load(const void *x, rfr_dtype dtype, int64_t i) {
  switch (dtype) {
    case RFR_BF16: return rfi_widen(((const rfi_bf16 *)x)[i]);
    case RFR_F16: return rfi_widen(((const rfi_f16 *)x)[i]);
    default: return ((const float *)x)[i];
  }
}

/* Loads N adjacent elements of read-only memory; N is a multiple of 4, i a multiple of N. */
template <int N>
static __device__ __forceinline__ void rfi_norm_load_n(float *to, const void *x, rfr_dtype dtype, int64_t i) {
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    if (dtype == RFR_F32) {
      const float4 v = __ldg((const float4 *)((const float *)x + i + k));
      to[k] = v.x, to[k + 1] = v.y, to[k + 2] = v.z, to[k + 3] = v.w;
    } else {
      const uint2 bits = __ldg((const uint2 *)((const uint16_t *)x + i + k));
      const uint32_t h[4] = {bits.x & 0xffffu, bits.x >> 16, bits.y & 0xffffu, bits.y >> 16};
      if (dtype == RFR_BF16)
        for (int j = 0; j < 4; j++) to[k + j] = __uint_as_float(h[j] << 16);
      else
        for (int j = 0; j < 4; j++) to[k + j] = __half2float(__ushort_as_half((unsigned short)h[j]));
    }
  }
}

/* Sums over the threads of a row: LANES lanes of a warp, or with 0 the block. A block's slot may be reused after
 * another slot's sum. */
typedef struct rfi_norm_slot {
  float x[32], y[32];
} rfi_norm_slot;

template <int LANES> static __device__ __forceinline__ float rfi_norm_sum(float x, rfi_norm_slot *slot) {
#pragma unroll
  for (int offset = (LANES ? LANES : 32) / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (LANES) return x;
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  if (lane == 0) slot->x[threadIdx.x >> 5] = x;
  __syncthreads();
  return rfi_warp_sum(lane < warps ? slot->x[lane] : 0.0f);
}

/* Computes two sums at once: half of the lanes continue with one, half with the other. For up to 16 warps. */
template <int LANES> static __device__ __forceinline__ float2 rfi_norm_sums(float x, float y, rfi_norm_slot *slot) {
  constexpr int L = LANES ? LANES : 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const bool second = lane & L / 2;
  float mine = (second ? y : x) + __shfl_xor_sync(0xffffffffu, second ? x : y, L / 2);
#pragma unroll
  for (int offset = L / 4; offset > 0; offset /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  if (!LANES) {
    if (lane % 16 == 0) (second ? slot->y : slot->x)[warp] = mine;
    __syncthreads();
    mine = lane % 16 < warps ? (second ? slot->y : slot->x)[lane % 16] : 0.0f;
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  }
  const float other = __shfl_xor_sync(0xffffffffu, mine, L / 2);
  return second ? make_float2(other, mine) : make_float2(mine, other);
}

/* R rows at a time for LANES lanes of a warp, or with 0 one row per block. */
template <typename T, bool MEAN, int K, int LANES, int R>
static __global__ void __launch_bounds__(LANES ? RFI_NORM_THREADS : RFI_NORM_MOST) rfi_norm_rows(const rfi_norm_fwd a) {
  constexpr int P = rfi_pack_width<T>, GROUPS = LANES ? RFI_NORM_THREADS / LANES : 1;
  typedef rfi_pack<T, P> pack;
  __shared__ rfi_norm_slot slot[2];
  const int lanes = LANES ? LANES : blockDim.x, me = LANES ? threadIdx.x % LANES : threadIdx.x;
  const int packs = (int)(a.C / P);
  const int64_t first = (int64_t)blockIdx.x * (GROUPS * R) + (LANES ? threadIdx.x / LANES : 0);
  pack x[R][K];
  float m[R] = {}, r[R];
#pragma unroll
  for (int i = 0; i < R; i++)
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int64_t row = first + i * GROUPS;
      x[i][k] = pack();
      if (row < a.rows && k * lanes + me < packs)
        x[i][k] = ((const pack *)((const T *)a.x + row * a.C))[k * lanes + me];
    }
  if (a.other) {
    pack other[R][K];
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int k = 0; k < K; k++) {
        const int64_t row = first + i * GROUPS;
        other[i][k] = pack();
        if (row < a.rows && k * lanes + me < packs)
          other[i][k] = ((const pack *)((const T *)a.other + row * a.C))[k * lanes + me];
      }
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int k = 0; k < K; k++) {
        const int64_t row = first + i * GROUPS;
#pragma unroll
        for (int j = 0; j < P; j++) x[i][k].x[j] = rfi_narrow<T>(rfi_widen(x[i][k].x[j]) + rfi_widen(other[i][k].x[j]));
        if (a.sum && row < a.rows && k * lanes + me < packs)
          rfi_put((pack *)((T *)a.sum + row * a.C) + k * lanes + me, x[i][k]);
      }
  }
  if (MEAN) {
#pragma unroll
    for (int i = 0; i < R; i++) {
      float s = 0.0f;
#pragma unroll
      for (int k = 0; k < K; k++)
#pragma unroll
        for (int j = 0; j < P; j++) s += rfi_widen(x[i][k].x[j]); /* zeros outside the row */
      m[i] = rfi_norm_sum<LANES>(s, &slot[0]) / (float)a.C;
    }
  }
#pragma unroll
  for (int i = 0; i < R; i++) {
    const int64_t row = first + i * GROUPS;
    float s = 0.0f;
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (k * lanes + me >= packs) break;
#pragma unroll
      for (int j = 0; j < P; j++) {
        const float d = rfi_widen(x[i][k].x[j]) - m[i];
        s += d * d;
      }
    }
    r[i] = 1.0f / sqrtf(rfi_norm_sum<LANES>(s, &slot[1]) / (float)a.C + a.eps);
    if (me == 0 && row < a.rows) {
      if (MEAN && a.mean) a.mean[row] = m[i];
      if (a.rstd) a.rstd[row] = r[i];
    }
  }
  if (!a.y) return;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int at = k * lanes + me;
    float w[P], b[P] = {};
    if (at >= packs) break;
    rfi_norm_load_n<P>(w, a.w, a.w_type, (int64_t)at * P);
    if (MEAN && a.b) rfi_norm_load_n<P>(b, a.b, a.b_type, (int64_t)at * P);
#pragma unroll
    for (int i = 0; i < R; i++) {
      const int64_t row = first + i * GROUPS;
      pack y;
#pragma unroll
      for (int j = 0; j < P; j++) y.x[j] = rfi_narrow<T>((rfi_widen(x[i][k].x[j]) - m[i]) * r[i] * w[j] + b[j]);
      if (row < a.rows) rfi_put((pack *)((T *)a.y + row * a.C) + at, y);
    }
  }
}

template <typename T> constexpr bool rfi_is_bf16 = false;
template <> constexpr bool rfi_is_bf16<rfi_bf16> = true;

template <typename T> static __device__ __forceinline__ float rfi_norm_element(const uint4 &v, int i) {
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
  if (sizeof(T) == 4) return __uint_as_float(word[i & 3]);
  const uint32_t w = word[(i >> 1) & 3];
  if (sizeof(T) == 2 && rfi_is_bf16<T>) return __uint_as_float(i & 1 ? w & 0xFFFF0000u : w << 16);
  return __half2float(__ushort_as_half((unsigned short)(i & 1 ? w >> 16 : w)));
}

/* Starts an asynchronous copy of 16 bytes to shared memory; zeros if not `there`. */
static __device__ __forceinline__ void rfi_norm_request(uint4 *to, const uint4 *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

/* Writes a line of partial sums. Thread groups with different rows are added in order. */
template <int P, int K, int LANES>
static __device__ __forceinline__ void rfi_norm_line(float *line, float (*sum)[P], float4 *space, int me, int lanes,
                                                     int packs) {
  constexpr int Q = P / 4;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int offset = 16; LANES && offset >= LANES; offset /= 2)
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
      for (int i = 0; i < P; i++) sum[k][i] += __shfl_xor_sync(0xffffffffu, sum[k][i], offset);
  for (int turn = 0; turn < (LANES ? RFI_NORM_WARPS : 1); turn++) {
    __syncthreads();
    if (LANES && (warp != turn || lane >= LANES)) continue;
#pragma unroll
    for (int k = 0; k < K; k++)
      for (int q = 0; q < Q; q++) {
        const int at = (k * Q + q) * lanes + me;
        float4 v = make_float4(sum[k][4 * q], sum[k][4 * q + 1], sum[k][4 * q + 2], sum[k][4 * q + 3]);
        if (k * lanes + me >= packs) continue;
        if (LANES && turn > 0) {
          const float4 u = space[at];
          v = make_float4(u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w);
        }
        if (LANES && turn < RFI_NORM_WARPS - 1) space[at] = v;
        else ((float4 *)line)[(k * lanes + me) * Q + q] = v;
      }
  }
}

/* Blocks per multiprocessor; this bounds the registers per thread. */
template <int K, int LANES> constexpr int rfi_norm_resident = LANES ? K == 1 ? 8 : 3 : K == 1 ? 2 : 1;
/* Bytes of shared memory that a kernel declares, and that it may use without opting in. */
enum { RFI_NORM_OWN = 512, RFI_NORM_FREE = 49152 - RFI_NORM_OWN };
/* Stages of rows in shared memory: the row being summed, and the rows in flight. */
template <int K> constexpr int rfi_norm_stages = K == 2 ? 2 : 3;

template <typename T, bool MEAN, bool SUM, int K, int LANES>
static __global__ void __launch_bounds__(LANES ? RFI_NORM_THREADS : RFI_NORM_MOST, rfi_norm_resident<K, LANES>)
    rfi_norm_rows_bwd(const rfi_norm_bwd_args a) {
  constexpr int P = rfi_pack_width<T>, Q = P / 4, STAGES = rfi_norm_stages<K>;
  constexpr int GROUPS = LANES ? RFI_NORM_THREADS / LANES : 1, OF_WARP = LANES ? 32 / LANES : 1;
  extern __shared__ float4 space[]; /* w in the order in which the threads read it: [K][Q][lanes] */
  __shared__ rfi_norm_slot slot[2];
  const int lanes = LANES ? LANES : blockDim.x, me = LANES ? threadIdx.x % LANES : threadIdx.x;
  const int threads = LANES ? RFI_NORM_THREADS : blockDim.x, packs = (int)(a.C / P);
  /* index of this thread's row in the warp; all lanes of the warp run together */
  const int own = LANES ? threadIdx.x % 32 / LANES : 0;
  const int64_t first = (int64_t)blockIdx.x * GROUPS + (LANES ? threadIdx.x / 32 * OF_WARP : 0);
  const int64_t step = (int64_t)gridDim.x * GROUPS;
  /* [stage][dy, x, residual][K], separate for each thread */
  uint4 *const ring = (uint4 *)(space + K * Q * lanes) + threadIdx.x;
  float dw[K][P] = {}, db[K][P] = {}, ds[K][P] = {};
  const bool with_dx = SUM || a.dx;
  const auto place = [&](int stage, int of, int k) { return ring + ((stage * 3 + of) * K + k) * threads; };
  const auto fetch = [&](int stage, int64_t row) {
    const bool there = row < a.rows;
    const int64_t at = there ? row * packs : 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (k * lanes + me >= packs) break;
      const int64_t piece = at + k * lanes + me;
      rfi_norm_request(place(stage, 0, k), (const uint4 *)a.dy + piece, there);
      rfi_norm_request(place(stage, 1, k), (const uint4 *)a.x + piece, there);
      if (a.residual) rfi_norm_request(place(stage, 2, k), (const uint4 *)a.residual + piece, there);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto mean_of = [&](int64_t row) { return MEAN && a.mean && row < a.rows ? a.mean[row] : 0.0f; };
  const auto rstd_of = [&](int64_t row) { return a.rstd && row < a.rows ? a.rstd[row] : 0.0f; };
  float next_m = mean_of(first + own), next_r = rstd_of(first + own);
#pragma unroll
  for (int s = 0; s + 1 < STAGES; s++) fetch(s, first + own + s * step);
  if (with_dx && threadIdx.x < lanes)
    for (int k = 0; k < K && k * lanes + me < packs; k++) {
      float w[P];
      rfi_norm_load_n<P>(w, a.w, a.w_type, (int64_t)(k * lanes + me) * P);
      for (int q = 0; q < Q; q++)
        space[(k * Q + q) * lanes + me] = make_float4(w[4 * q], w[4 * q + 1], w[4 * q + 2], w[4 * q + 3]);
    }
  __syncthreads();
  int turn = 0, stage = 0;
  for (int64_t row = first + own; row - own < a.rows;
       row += step, turn ^= 1, stage = stage + 1 < STAGES ? stage + 1 : 0) {
    const float m = next_m, r = next_r;
    /* kept for one piece; with more pieces they are recomputed */
    float g_sum = 0.0f, gh_sum = 0.0f, kept_d[P], kept_h[P];
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    fetch(stage > 0 ? stage - 1 : STAGES - 1, row + (STAGES - 1) * step); /* into the stage of the previous row */
    next_m = mean_of(row + step), next_r = rstd_of(row + step);
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (k * lanes + me >= packs) break;
      const uint4 dy = *place(stage, 0, k), x = *place(stage, 1, k);
#pragma unroll
      for (int q = 0; q < Q; q++) {
        const float4 w4 = with_dx ? space[(k * Q + q) * lanes + me] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = 4 * q + j;
          const float d = rfi_norm_element<T>(dy, i), h = (rfi_norm_element<T>(x, i) - m) * r, g = d * w[j];
          if (K == 1) kept_d[i] = d, kept_h[i] = h;
          if (MEAN) g_sum += g;
          gh_sum += g * h;
          dw[k][i] += d * h;
          if (MEAN) db[k][i] += d;
        }
      }
    }
    if (!with_dx) continue;
    if (MEAN) {
      const float2 sums = rfi_norm_sums<LANES>(g_sum, gh_sum, &slot[turn]);
      g_sum = sums.x, gh_sum = sums.y;
    } else {
      gh_sum = rfi_norm_sum<LANES>(gh_sum, &slot[turn]);
    }
    const float g_mean = g_sum / (float)a.C, gh_mean = gh_sum / (float)a.C;
    asm volatile("" ::: "memory"); /* forces a second read of shared memory instead of registers */
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int at = k * lanes + me;
      rfi_pack<T, P> dx;
      if (at >= packs) break;
      uint4 dy, x;
      if (K > 1) dy = *place(stage, 0, k), x = *place(stage, 1, k);
#pragma unroll
      for (int q = 0; q < Q; q++) {
        const float4 w4 = space[(k * Q + q) * lanes + me];
        const float w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = 4 * q + j;
          const float d = K == 1 ? kept_d[i] : rfi_norm_element<T>(dy, i);
          const float h = K == 1 ? kept_h[i] : (rfi_norm_element<T>(x, i) - m) * r;
          dx.x[i] = rfi_narrow<T>(r * (d * w[j] - g_mean - h * gh_mean));
        }
      }
      if (a.residual) {
        const uint4 residual = *place(stage, 2, k);
#pragma unroll
        for (int i = 0; i < P; i++) dx.x[i] = rfi_narrow<T>(rfi_widen(dx.x[i]) + rfi_norm_element<T>(residual, i));
      }
      if (row >= a.rows) continue;
      if (SUM)
#pragma unroll
        for (int i = 0; i < P; i++) ds[k][i] += rfi_widen(dx.x[i]);
      if (!SUM || a.dx) rfi_put((rfi_pack<T, P> *)((T *)a.dx + row * a.C) + at, dx);
    }
  }
  if (a.dw) rfi_norm_line<P, K, LANES>(a.dw + blockIdx.x * a.C, dw, space, me, lanes, packs);
  if (MEAN && a.db) rfi_norm_line<P, K, LANES>(a.db + blockIdx.x * a.C, db, space, me, lanes, packs);
  if (SUM) rfi_norm_line<P, K, LANES>(a.ds + blockIdx.x * a.C, ds, space, me, lanes, packs);
}

/* ---- rows of any length and place ---- */

template <typename T, bool MEAN>
static __global__ void __launch_bounds__(RFI_NORM_ANY) rfi_norm_rows_any(const rfi_norm_fwd a) {
  const int64_t row = blockIdx.x;
  const T *x = (const T *)a.x + row * a.C, *other = (const T *)a.other + row * a.C;
  auto element = [&](int64_t j) {
    return a.other ? rfi_widen(rfi_narrow<T>(rfi_widen(x[j]) + rfi_widen(other[j]))) : rfi_widen(x[j]);
  };
  float m = 0.0f, s = 0.0f;
  if (MEAN && a.C) {
    for (int64_t j = threadIdx.x; j < a.C; j += RFI_NORM_ANY) s += element(j);
    m = rfi_block_sum(s) / (float)a.C;
  }
  s = 0.0f;
  for (int64_t j = threadIdx.x; j < a.C; j += RFI_NORM_ANY) s += (element(j) - m) * (element(j) - m);
  s = rfi_block_sum(s);
  const float r = 1.0f / sqrtf((a.C ? s / (float)a.C : 0.0f) + a.eps);
  if (threadIdx.x == 0) {
    if (MEAN && a.mean) a.mean[row] = m;
    if (a.rstd) a.rstd[row] = r;
  }
  for (int64_t j = threadIdx.x; a.sum && j < a.C; j += RFI_NORM_ANY)
    ((T *)a.sum)[row * a.C + j] = rfi_narrow<T>(element(j));
  for (int64_t j = threadIdx.x; a.y && j < a.C; j += RFI_NORM_ANY) {
    const float b = MEAN && a.b ? rfi_norm_load(a.b, a.b_type, j) : 0.0f;
    ((T *)a.y)[row * a.C + j] = rfi_narrow<T>((element(j) - m) * r * rfi_norm_load(a.w, a.w_type, j) + b);
  }
}

/* A block adds its rows of dx to its line of ds, each thread its own columns. */
template <typename T, bool MEAN>
static __global__ void __launch_bounds__(RFI_NORM_ANY) rfi_norm_dx_any(const rfi_norm_bwd_args a) {
  float *const line = a.ds ? a.ds + blockIdx.x * a.C : NULL;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t at = row * a.C;
    const T *dy = (const T *)a.dy + at, *x = (const T *)a.x + at, *residual = (const T *)a.residual;
    const float m = MEAN ? a.mean[row] : 0.0f, r = a.rstd[row];
    float g = 0.0f, gh = 0.0f;
    for (int64_t j = threadIdx.x; j < a.C; j += RFI_NORM_ANY) {
      const float d = rfi_widen(dy[j]) * rfi_norm_load(a.w, a.w_type, j);
      if (MEAN) g += d;
      gh += d * ((rfi_widen(x[j]) - m) * r);
    }
    if (MEAN) g = rfi_block_sum(g) / (float)a.C;
    gh = rfi_block_sum(gh) / (float)a.C;
    for (int64_t j = threadIdx.x; j < a.C; j += RFI_NORM_ANY) {
      const float h = (rfi_widen(x[j]) - m) * r;
      T dx = rfi_narrow<T>(r * (rfi_widen(dy[j]) * rfi_norm_load(a.w, a.w_type, j) - g - h * gh));
      if (residual) dx = rfi_narrow<T>(rfi_widen(dx) + rfi_widen(residual[at + j]));
      if (a.dx) ((T *)a.dx)[at + j] = dx;
      if (line) line[j] = row < gridDim.x ? rfi_widen(dx) : line[j] + rfi_widen(dx);
    }
  }
}

template <typename T, bool MEAN>
static __global__ void __launch_bounds__(RFI_NORM_ANY) rfi_norm_dw_any(const rfi_norm_bwd_args a) {
  const int64_t j = (int64_t)blockIdx.x * RFI_NORM_ANY + threadIdx.x;
  float dw = 0.0f, db = 0.0f;
  if (j >= a.C) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float d = rfi_widen(((const T *)a.dy)[row * a.C + j]), x = rfi_widen(((const T *)a.x)[row * a.C + j]);
    if (a.dw) dw += d * ((x - (MEAN ? a.mean[row] : 0.0f)) * a.rstd[row]);
    db += d;
  }
  if (a.dw) a.dw[blockIdx.y * a.C + j] = dw;
  if (MEAN && a.db) a.db[blockIdx.y * a.C + j] = db;
}

/* ---- partial sums ---- */

typedef struct rfi_norm_total {
  const float *lines, *acc; /* acc NULL: there is none */
  float *y;                 /* NULL: not computed */
} rfi_norm_total;

enum { RFI_NORM_SLICES = 16, RFI_NORM_TOTALS = 3 };

typedef struct rfi_norm_totals {
  rfi_norm_total of[RFI_NORM_TOTALS]; /* dw, db, ds */
} rfi_norm_totals;

/* Adds the existing values in f64, as the CPU does. */
static __global__ void __launch_bounds__(32 * RFI_NORM_SLICES)
    rfi_norm_add_lines(const __grid_constant__ rfi_norm_totals totals, int64_t parts, int64_t C) {
  __shared__ double part[RFI_NORM_SLICES][32];
  const float *lines = totals.of[blockIdx.y].lines, *acc = totals.of[blockIdx.y].acc;
  float *y = totals.of[blockIdx.y].y;
  const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5;
  const int64_t j = (int64_t)blockIdx.x * 32 + lane;
  double sum = 0.0;
  if (!y) return;
  for (int64_t k = slice; j < C && k < parts; k += RFI_NORM_SLICES) sum += (double)lines[k * C + j];
  part[slice][lane] = sum;
  __syncthreads();
  if (slice > 0 || j >= C) return;
  for (int k = 1; k < RFI_NORM_SLICES; k++) sum += part[k][lane];
  y[j] = (float)(acc ? sum + (double)acc[j] : sum);
}

/* ---- choice ---- */

static inline bool rfi_norm_aligned(const void *const *pointers, int n) {
  for (int i = 0; i < n; i++)
    if ((uintptr_t)pointers[i] % 16) return false;
  return true;
}

static inline int64_t rfi_norm_height(const rfr_arg *x) {
  int64_t n = 1;
  for (int d = 0; d < x->type.rank - 1; d++) n *= x->type.shape[d];
  return n;
}

/* 16-byte pieces per row; 0 if rows are not a multiple of them. */
static inline int64_t rfi_norm_packs(rfr_dtype dtype, int64_t C) {
  const int64_t width = dtype == RFR_F32 ? 4 : 8;
  return C % width == 0 ? C / width : 0;
}

/* How the backward assigns rows: `pieces` 16-byte pieces per thread. */
typedef struct rfi_norm_shape {
  int lanes, pieces, threads; /* lanes of a warp per row, 0: one block per row; pieces 0: rows of any length */
  int64_t parts;              /* number of lines of partial sums, which is the number of blocks */
} rfi_norm_shape;

static inline rfi_norm_shape rfi_norm_shape_of(rfr_dtype dtype, int64_t rows, int64_t C, int sms) {
  const int64_t packs = rfi_norm_packs(dtype, C), most = 256;
  rfi_norm_shape s = {0, 0, 0, rows < most ? rows : most};
  if (packs == 0 || packs > 2 * RFI_NORM_MOST) return s;
  s.lanes = packs <= 8 ? 8 : packs <= 16 ? 16 : packs <= 96 ? 32 : 0;
  s.pieces = packs <= 32 ? 1 : packs <= 96 ? 3 : packs <= RFI_NORM_MOST ? 1 : 2;
  s.threads = s.lanes ? RFI_NORM_THREADS : (int)rfi_blocks(packs, 32 * s.pieces) * 32;
  const int64_t resident = s.lanes         ? s.pieces == 1 ? rfi_norm_resident<1, 32> : rfi_norm_resident<3, 32>
                                   : s.pieces == 1 ? rfi_norm_resident<1, 0> * RFI_NORM_MOST / s.threads
                                           : rfi_norm_resident<2, 0>;
  s.parts = rfi_blocks(rows, s.lanes ? s.threads / s.lanes : 1);
  if (s.parts > sms * resident) s.parts = sms * resident;
  return s;
}

template <typename T, bool MEAN, int LANES> static void rfi_norm_launch_short(const rfi_norm_fwd &a, cudaStream_t s) {
  constexpr int R = 4;
  rfi_norm_rows<T, MEAN, 1, LANES, R>
      <<<(unsigned)rfi_blocks(a.rows, RFI_NORM_THREADS / LANES * R), RFI_NORM_THREADS, 0, s>>>(a);
}
template <typename T, bool MEAN> static void rfi_norm_launch_fwd(const rfi_norm_fwd &a, cudaStream_t stream) {
  const void *pointers[] = {a.x, a.other, a.w, a.b, a.sum, a.y};
  const int64_t packs = rfi_norm_packs(a.x_type, a.C);
  const unsigned blocks = (unsigned)a.rows, warps = (unsigned)rfi_blocks(a.rows, RFI_NORM_WARPS);
  if (packs == 0 || packs > 4096 || !rfi_norm_aligned(pointers, 6))
    rfi_norm_rows_any<T, MEAN><<<blocks, RFI_NORM_ANY, 0, stream>>>(a);
  else if (packs <= 8) rfi_norm_launch_short<T, MEAN, 8>(a, stream);
  else if (packs <= 16) rfi_norm_launch_short<T, MEAN, 16>(a, stream);
  else if (packs <= 32) rfi_norm_launch_short<T, MEAN, 32>(a, stream);
  else if (packs <= 128) rfi_norm_rows<T, MEAN, 4, 32, 1><<<warps, RFI_NORM_THREADS, 0, stream>>>(a);
  else if (packs <= 4 * RFI_NORM_MOST)
    rfi_norm_rows<T, MEAN, 4, 0, 1><<<blocks, (unsigned)rfi_blocks(packs, 128) * 32, 0, stream>>>(a);
  else rfi_norm_rows<T, MEAN, 8, 0, 1><<<blocks, (unsigned)rfi_blocks(packs, 256) * 32, 0, stream>>>(a);
}

template <typename T, bool MEAN, int K, int LANES>
static cudaError_t rfi_norm_launch_rows_bwd(const rfi_norm_bwd_args &a, const rfi_norm_shape &s, size_t space,
                                            cudaStream_t stream) {
  void (*const kernel)(rfi_norm_bwd_args) =
      MEAN && a.ds ? rfi_norm_rows_bwd<T, MEAN, MEAN, K, LANES> : rfi_norm_rows_bwd<T, MEAN, false, K, LANES>;
  cudaError_t e = cudaSuccess;
  if (space > RFI_NORM_FREE) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)space);
  if (e == cudaSuccess) kernel<<<(unsigned)s.parts, (unsigned)s.threads, space, stream>>>(a);
  return e;
}

template <typename T, bool MEAN>
static rfr_status rfi_norm_launch_bwd(const rfi_norm_bwd_args &a, const rfi_norm_shape &s, cudaStream_t stream) {
  const void *pointers[] = {a.dy, a.x, a.w, a.residual, a.dx};
  /* memory for all lanes in the last round, which the row alone may not fill */
  const int stages = s.pieces == 2 ? rfi_norm_stages<2> : rfi_norm_stages<1>;
  const size_t space = (size_t)s.pieces * ((size_t)(s.lanes ? s.lanes : s.threads) * rfi_pack_width<T> * sizeof(float) +
                                           (size_t)s.threads * stages * 3 * 16);
  int device = 0, most = RFI_NORM_FREE;
  cudaError_t e = cudaSuccess;
  if (space > RFI_NORM_FREE) {
    e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e != cudaSuccess) return rfi_cuda_check(e, "reading the device");
    most -= RFI_NORM_OWN;
  }
  if (s.pieces == 0 || space > (size_t)most || !rfi_norm_aligned(pointers, 5)) {
    if (a.dx || a.ds) rfi_norm_dx_any<T, MEAN><<<(unsigned)(a.ds ? s.parts : a.rows), RFI_NORM_ANY, 0, stream>>>(a);
    if (a.dw || a.db)
      rfi_norm_dw_any<T, MEAN>
          <<<dim3((unsigned)rfi_blocks(a.C, RFI_NORM_ANY), (unsigned)s.parts), RFI_NORM_ANY, 0, stream>>>(a);
  } else if (s.pieces == 3) {
    e = rfi_norm_launch_rows_bwd<T, MEAN, 3, 32>(a, s, space, stream);
  } else if (s.pieces == 2) {
    e = rfi_norm_launch_rows_bwd<T, MEAN, 2, 0>(a, s, space, stream);
  } else if (s.lanes == 0) {
    e = rfi_norm_launch_rows_bwd<T, MEAN, 1, 0>(a, s, space, stream);
  } else if (s.lanes == 8) {
    e = rfi_norm_launch_rows_bwd<T, MEAN, 1, 8>(a, s, space, stream);
  } else if (s.lanes == 16) {
    e = rfi_norm_launch_rows_bwd<T, MEAN, 1, 16>(a, s, space, stream);
  } else {
    e = rfi_norm_launch_rows_bwd<T, MEAN, 1, 32>(a, s, space, stream);
  }
  return rfi_cuda_check(e, "raising the shared memory limit");
}

/* ---- calls ---- */

/* A norm of x or, with SUM, of x + other: then every operand and result index is one higher. */
template <bool MEAN, bool SUM> static rfr_status rfi_norm_run_fwd(const rfr_call *c) {
  const rfr_arg *x = &c->in[0], *w = &c->in[1 + SUM],
                *b = MEAN && c->n_in > 2 + SUM && c->in[2 + SUM].data ? &c->in[2 + SUM] : NULL, *y = &c->out[SUM];
  const rfi_norm_fwd a = {x->data,
                          SUM ? c->in[1].data : NULL,
                          w->data,
                          b ? b->data : NULL,
                          SUM ? c->out[0].data : NULL,
                          y->data,
                          MEAN ? (float *)y[1].data : NULL,
                          (float *)y[MEAN ? 2 : 1].data,
                          x->type.dtype,
                          w->type.dtype,
                          b ? b->type.dtype : RFR_F32,
                          rfi_norm_height(x),
                          x->type.shape[x->type.rank - 1],
                          (float)c->attr[0].f};
  if (a.rows == 0) return RFR_OK;
  RFI_WITH_FLOAT(a.x_type, T, (rfi_norm_launch_fwd<T, MEAN>(a, rfi_stream(c))))
  return rfi_cuda_launched("norm");
}

/* Operand and result indices that a backward may have; -1: absent. */
typedef struct rfi_norm_places {
  int w, mean, rstd, residual, acc[RFI_NORM_TOTALS]; /* operands */
  int dx, total[RFI_NORM_TOTALS];                    /* results */
} rfi_norm_places;

static inline void *rfi_norm_in(const rfr_call *c, int i) { return i >= 0 && i < c->n_in ? c->in[i].data : NULL; }
static inline void *rfi_norm_out(const rfr_call *c, int i) { return i >= 0 ? c->out[i].data : NULL; }

static inline rfi_norm_shape rfi_norm_shape_of_call(const rfr_call *c, const rfr_arg *x) {
  return rfi_norm_shape_of(x->type.dtype, rfi_norm_height(x), x->type.shape[x->type.rank - 1],
                           rfi_cuda_info_of(c)->sms);
}

/* Bytes of the partial sums of `vectors` results. */
static inline size_t rfi_norm_workspace(const rfr_call *c, const rfr_arg *x, int vectors) {
  return (size_t)(vectors * rfi_norm_shape_of_call(c, x).parts * x->type.shape[x->type.rank - 1]) * sizeof(float);
}

template <bool MEAN> static rfr_status rfi_norm_run_bwd(const rfr_call *c, const rfi_norm_places &p) {
  const rfr_arg *x = &c->in[p.rstd >= 0];
  const rfi_norm_shape s = rfi_norm_shape_of_call(c, x);
  const int64_t C = x->type.shape[x->type.rank - 1];
  rfi_norm_totals totals = {};
  float *lines = (float *)c->workspace, *line[RFI_NORM_TOTALS] = {};
  int last = 0; /* the number of totals up to the last one */
  for (int i = 0; i < RFI_NORM_TOTALS; i++) {
    float *const y = (float *)rfi_norm_out(c, p.total[i]);
    if (!y) continue;
    line[i] = lines;
    lines += s.parts * C;
    totals.of[i] = {line[i], (const float *)rfi_norm_in(c, p.acc[i]), y};
    last = i + 1;
  }
  const rfi_norm_bwd_args a = {c->in[0].data,
                               x->data,
                               rfi_norm_in(c, p.w),
                               rfi_norm_in(c, p.residual),
                               (const float *)rfi_norm_in(c, p.mean),
                               (const float *)rfi_norm_in(c, p.rstd),
                               rfi_norm_out(c, p.dx),
                               line[0],
                               line[1],
                               line[2],
                               x->type.dtype,
                               p.w >= 0 ? c->in[p.w].type.dtype : RFR_F32,
                               rfi_norm_height(x),
                               C};
  if (C == 0) return RFR_OK;
  rfr_status made = RFR_OK;
  if (a.rows > 0 && (a.dx || last > 0))
    RFI_WITH_FLOAT(a.x_type, T, made = (rfi_norm_launch_bwd<T, MEAN>(a, s, rfi_stream(c))))
  if (made != RFR_OK) return made;
  if (last > 0)
    rfi_norm_add_lines<<<dim3((unsigned)rfi_blocks(C, 32), (unsigned)last), 32 * RFI_NORM_SLICES, 0, rfi_stream(c)>>>(
        totals, s.parts, C);
  return rfi_cuda_launched("norm's gradients");
}

#endif
