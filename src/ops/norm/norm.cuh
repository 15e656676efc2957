/* SPDX-License-Identifier: Apache-2.0
 *
 * layernorm and rmsnorm on a GPU; MEAN tells them apart (without it m is 0):
 *
 *   h = (x - m) r   y = h w + b   g = dy w   dx = r (g - mean(g) - h mean(g h))   dw = sum dy h   db = sum dy
 *
 * A row lies in the registers of one warp, or of one block where it is longer, from its one reading to
 * its one writing, 16 bytes a thread at a time. The backward's blocks stay and take every gridDim-th row:
 * the next row is on its way while this one is summed, and a thread adds up dw and db of its own columns.
 * A block's sums are one line of the workspace, and a second kernel adds the lines in f64 in a fixed
 * order. Rows that are too long, or not made of whole 16 bytes, are read once per sum.
 *
 * X_dx, X_dw and X_bwd are the same kernel with some of its results absent, so their bits agree.
 */
#ifndef RFI_NORM_CUH
#define RFI_NORM_CUH

#include "backend/cuda/kernels.cuh"

enum { RFI_NORM_WARPS = 4, RFI_NORM_THREADS = 32 * RFI_NORM_WARPS, RFI_NORM_MOST = 512, RFI_NORM_ANY = 256 };

typedef struct rfi_norm_fwd {
  const void *x, *other, *w, *b; /* other, b NULL: none */
  void *sum, *y;                 /* x + other, rounded; its norm. Each result: NULL where it is not wanted */
  float *mean, *rstd;
  rfr_dtype x_type, w_type, b_type;
  int64_t rows, C;
  float eps;
} rfi_norm_fwd;

typedef struct rfi_norm_bwd {
  const void *dy, *x, *w, *residual; /* residual NULL: none */
  const float *mean, *rstd;
  void *dx;       /* NULL: not wanted */
  float *dw, *db; /* lines (parts, C) in the workspace; NULL: not wanted */
  rfr_dtype x_type, w_type;
  int64_t rows, C;
} rfi_norm_bwd;

/* ---- rows in registers ---- */

static __device__ __forceinline__ float rfi_norm_load(const void *x, rfr_dtype dtype, int64_t i) {
  switch (dtype) {
    case RFR_BF16: return rfi_widen(((const rfi_bf16 *)x)[i]);
    case RFR_F16: return rfi_widen(((const rfi_f16 *)x)[i]);
    default: return ((const float *)x)[i];
  }
}

/* N neighbours, N a multiple of 4, i of N. */
template <int N>
static __device__ __forceinline__ void rfi_norm_load_n(float *to, const void *x, rfr_dtype dtype, int64_t i) {
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    if (dtype == RFR_F32) {
      const float4 v = *(const float4 *)((const float *)x + i + k);
      to[k] = v.x, to[k + 1] = v.y, to[k + 2] = v.z, to[k + 3] = v.w;
    } else if (dtype == RFR_BF16) {
      const rfi_pack<rfi_bf16, 4> v = *(const rfi_pack<rfi_bf16, 4> *)((const rfi_bf16 *)x + i + k);
      for (int j = 0; j < 4; j++) to[k + j] = rfi_widen(v.x[j]);
    } else {
      const rfi_pack<rfi_f16, 4> v = *(const rfi_pack<rfi_f16, 4> *)((const rfi_f16 *)x + i + k);
      for (int j = 0; j < 4; j++) to[k + j] = rfi_widen(v.x[j]);
    }
  }
}

/* Sums over the threads of a row. A block's slot may be written again after another slot's sum. */
template <bool WARP> static __device__ __forceinline__ float2 rfi_norm_sum(float2 x, float2 *slot) {
  x = make_float2(rfi_warp_sum(x.x), rfi_warp_sum(x.y));
  if (WARP) return x;
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  if (lane == 0) slot[threadIdx.x >> 5] = x;
  __syncthreads();
  x = lane < warps ? slot[lane] : make_float2(0.0f, 0.0f);
  return make_float2(rfi_warp_sum(x.x), rfi_warp_sum(x.y));
}

template <typename T, bool MEAN, int K, bool WARP>
static __global__ void __launch_bounds__(WARP ? RFI_NORM_THREADS : 1024) rfi_norm_rows(const rfi_norm_fwd a) {
  constexpr int P = rfi_pack_width<T>;
  typedef rfi_pack<T, P> pack;
  __shared__ float2 slot[2][32];
  const int lanes = WARP ? 32 : blockDim.x, me = WARP ? threadIdx.x & 31 : threadIdx.x, packs = (int)(a.C / P);
  const int64_t row = WARP ? (int64_t)blockIdx.x * RFI_NORM_WARPS + (threadIdx.x >> 5) : blockIdx.x;
  if (WARP && row >= a.rows) return;
  const pack *from = (const pack *)((const T *)a.x + row * a.C);
  pack x[K];
  float m = 0.0f, s = 0.0f;
#pragma unroll
  for (int k = 0; k < K; k++)
    if (k * lanes + me < packs) x[k] = from[k * lanes + me];
  if (a.other) {
    const pack *other = (const pack *)((const T *)a.other + row * a.C);
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (k * lanes + me >= packs) break;
      const pack o = other[k * lanes + me];
      for (int i = 0; i < P; i++) x[k].x[i] = rfi_narrow<T>(rfi_widen(x[k].x[i]) + rfi_widen(o.x[i]));
      if (a.sum) ((pack *)((T *)a.sum + row * a.C))[k * lanes + me] = x[k];
    }
  }
  if (MEAN) {
#pragma unroll
    for (int k = 0; k < K; k++)
      if (k * lanes + me < packs)
        for (int i = 0; i < P; i++) s += rfi_widen(x[k].x[i]);
    m = rfi_norm_sum<WARP>(make_float2(s, 0.0f), slot[0]).x / (float)a.C;
  }
  s = 0.0f;
#pragma unroll
  for (int k = 0; k < K; k++)
    if (k * lanes + me < packs)
      for (int i = 0; i < P; i++) {
        const float d = rfi_widen(x[k].x[i]) - m;
        s += d * d;
      }
  const float r = 1.0f / sqrtf(rfi_norm_sum<WARP>(make_float2(s, 0.0f), slot[1]).x / (float)a.C + a.eps);
  if (me == 0) {
    if (MEAN && a.mean) a.mean[row] = m;
    if (a.rstd) a.rstd[row] = r;
  }
  if (!a.y) return;
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int at = k * lanes + me;
    float w[P], b[P] = {};
    pack y;
    if (at >= packs) break;
    rfi_norm_load_n<P>(w, a.w, a.w_type, (int64_t)at * P);
    if (MEAN && a.b) rfi_norm_load_n<P>(b, a.b, a.b_type, (int64_t)at * P);
    for (int i = 0; i < P; i++) y.x[i] = rfi_narrow<T>((rfi_widen(x[k].x[i]) - m) * r * w[i] + b[i]);
    ((pack *)((T *)a.y + row * a.C))[at] = y;
  }
}

template <typename T> constexpr bool rfi_is_bf16 = false;
template <> constexpr bool rfi_is_bf16<rfi_bf16> = true;

/* 16 bytes of T as words: two of them are in flight for each that is at work, so none may be kept widened. */
template <typename T> static __device__ __forceinline__ float rfi_norm_element(const uint4 &v, int i) {
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
  if (sizeof(T) == 4) return __uint_as_float(word[i & 3]);
  const uint32_t w = word[(i >> 1) & 3];
  if (sizeof(T) == 2 && rfi_is_bf16<T>) return __uint_as_float(i & 1 ? w & 0xFFFF0000u : w << 16);
  return __half2float(__ushort_as_half((unsigned short)(i & 1 ? w >> 16 : w)));
}
/* From here on the compiler takes v for something new: what was widened of it before is not kept. */
static __device__ __forceinline__ void rfi_norm_forget(uint4 *v) {
  asm volatile("" : "+r"(v->x), "+r"(v->y), "+r"(v->z), "+r"(v->w));
}

template <int K> struct rfi_norm_row {
  uint4 dy[K], x[K], residual[K];
  float m, r;
};

template <typename T, int K>
static __device__ __forceinline__ void rfi_norm_fetch(rfi_norm_row<K> *to, const rfi_norm_bwd &a, int64_t row, int me,
                                                      int lanes, int packs) {
  const uint4 *dy = (const uint4 *)((const T *)a.dy + row * a.C), *x = (const uint4 *)((const T *)a.x + row * a.C),
              *residual = (const uint4 *)((const T *)a.residual + row * a.C);
  to->m = a.mean ? a.mean[row] : 0.0f;
  to->r = a.rstd[row];
#pragma unroll
  for (int k = 0; k < K; k++) {
    const int at = k * lanes + me;
    if (at >= packs) break;
    to->dy[k] = dy[at];
    to->x[k] = x[at];
    if (a.residual) to->residual[k] = residual[at];
  }
}

/* A line of sums: the warps' own ones added in their order where each has rows of its own. */
template <int P, int K, bool WARP>
static __device__ __forceinline__ void rfi_norm_line(float *line, float (*sum)[P], float4 *space, int me, int lanes,
                                                     int packs) {
  constexpr int Q = P / 4;
  const int warp = threadIdx.x >> 5;
  for (int turn = 0; turn < (WARP ? RFI_NORM_WARPS : 1); turn++) {
    __syncthreads();
    if (WARP && warp != turn) continue;
#pragma unroll
    for (int k = 0; k < K; k++)
      for (int q = 0; q < Q; q++) {
        const int at = (k * Q + q) * lanes + me;
        float4 v = make_float4(sum[k][4 * q], sum[k][4 * q + 1], sum[k][4 * q + 2], sum[k][4 * q + 3]);
        if (k * lanes + me >= packs) continue;
        if (WARP && turn > 0) {
          const float4 u = space[at];
          v = make_float4(u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w);
        }
        if (WARP && turn < RFI_NORM_WARPS - 1) space[at] = v;
        else ((float4 *)line)[(k * lanes + me) * Q + q] = v;
      }
  }
}

template <typename T, bool MEAN, int K, bool WARP>
static __global__ void __launch_bounds__(WARP ? RFI_NORM_THREADS : RFI_NORM_MOST, WARP ? 3 : 1)
    rfi_norm_rows_bwd(const rfi_norm_bwd a) {
  constexpr int P = rfi_pack_width<T>, Q = P / 4;
  extern __shared__ float4 space[]; /* w, as its threads read it: [K][Q][lanes] */
  __shared__ float2 slot[2][32];
  const int lanes = WARP ? 32 : blockDim.x, me = WARP ? threadIdx.x & 31 : threadIdx.x, packs = (int)(a.C / P);
  const int64_t first = WARP ? (int64_t)blockIdx.x * RFI_NORM_WARPS + (threadIdx.x >> 5) : blockIdx.x;
  const int64_t step = (int64_t)gridDim.x * (WARP ? RFI_NORM_WARPS : 1);
  float dw[K][P] = {}, db[K][P] = {};
  rfi_norm_row<K> next;
  if (first < a.rows) rfi_norm_fetch<T>(&next, a, first, me, lanes, packs);
  if (a.dx && threadIdx.x < lanes)
    for (int k = 0; k < K && k * lanes + me < packs; k++) {
      float w[P];
      rfi_norm_load_n<P>(w, a.w, a.w_type, (int64_t)(k * lanes + me) * P);
      for (int q = 0; q < Q; q++)
        space[(k * Q + q) * lanes + me] = make_float4(w[4 * q], w[4 * q + 1], w[4 * q + 2], w[4 * q + 3]);
    }
  __syncthreads();
  int turn = 0;
  for (int64_t row = first; row < a.rows; row += step, turn ^= 1) {
    rfi_norm_row<K> now = next;
    if (row + step < a.rows) rfi_norm_fetch<T>(&next, a, row + step, me, lanes, packs);
    float2 s = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (k * lanes + me >= packs) break;
#pragma unroll
      for (int q = 0; q < Q; q++) {
        const float4 w4 = a.dx ? space[(k * Q + q) * lanes + me] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = 4 * q + j;
          const float d = rfi_norm_element<T>(now.dy[k], i), h = (rfi_norm_element<T>(now.x[k], i) - now.m) * now.r,
                      g = d * w[j];
          if (MEAN) s.x += g;
          s.y += g * h;
          dw[k][i] += d * h;
          if (MEAN) db[k][i] += d;
        }
      }
    }
    if (!a.dx) continue;
    s = rfi_norm_sum<WARP>(s, slot[turn]);
    const float g_mean = MEAN ? s.x / (float)a.C : 0.0f, gh_mean = s.y / (float)a.C;
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int at = k * lanes + me;
      rfi_pack<T, P> dx;
      if (at >= packs) break;
      rfi_norm_forget(&now.dy[k]);
      rfi_norm_forget(&now.x[k]);
#pragma unroll
      for (int q = 0; q < Q; q++) {
        const float4 w4 = space[(k * Q + q) * lanes + me];
        const float w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = 4 * q + j;
          const float d = rfi_norm_element<T>(now.dy[k], i), h = (rfi_norm_element<T>(now.x[k], i) - now.m) * now.r;
          dx.x[i] = rfi_narrow<T>(now.r * (d * w[j] - g_mean - h * gh_mean));
          if (a.residual) dx.x[i] = rfi_narrow<T>(rfi_widen(dx.x[i]) + rfi_norm_element<T>(now.residual[k], i));
        }
      }
      ((rfi_pack<T, P> *)((T *)a.dx + row * a.C))[at] = dx;
    }
  }
  if (a.dw) rfi_norm_line<P, K, WARP>(a.dw + blockIdx.x * a.C, dw, space, me, lanes, packs);
  if (MEAN && a.db) rfi_norm_line<P, K, WARP>(a.db + blockIdx.x * a.C, db, space, me, lanes, packs);
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

template <typename T, bool MEAN>
static __global__ void __launch_bounds__(RFI_NORM_ANY) rfi_norm_dx_any(const rfi_norm_bwd a) {
  const int64_t row = blockIdx.x, at = row * a.C;
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
    ((T *)a.dx)[at + j] = dx;
  }
}

template <typename T, bool MEAN>
static __global__ void __launch_bounds__(RFI_NORM_ANY) rfi_norm_dw_any(const rfi_norm_bwd a) {
  const int64_t j = (int64_t)blockIdx.x * RFI_NORM_ANY + threadIdx.x;
  float dw = 0.0f, db = 0.0f;
  if (j >= a.C) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float d = rfi_widen(((const T *)a.dy)[row * a.C + j]), x = rfi_widen(((const T *)a.x)[row * a.C + j]);
    dw += d * ((x - (MEAN ? a.mean[row] : 0.0f)) * a.rstd[row]);
    db += d;
  }
  if (a.dw) a.dw[blockIdx.y * a.C + j] = dw;
  if (MEAN && a.db) a.db[blockIdx.y * a.C + j] = db;
}

/* ---- lines of sums ---- */

typedef struct rfi_norm_total {
  const float *lines, *acc; /* acc NULL: none */
  float *y;                 /* NULL: not wanted */
} rfi_norm_total;

enum { RFI_NORM_SLICES = 16 };

/* dw joins what is there in f64, db in f32: as the CPU's. */
static __global__ void __launch_bounds__(32 * RFI_NORM_SLICES)
    rfi_norm_add_lines(const rfi_norm_total dw, const rfi_norm_total db, int64_t parts, int64_t C) {
  __shared__ double part[RFI_NORM_SLICES][32];
  const float *lines = blockIdx.y ? db.lines : dw.lines, *acc = blockIdx.y ? db.acc : dw.acc;
  float *y = blockIdx.y ? db.y : dw.y;
  const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5;
  const int64_t j = (int64_t)blockIdx.x * 32 + lane;
  double sum = 0.0;
  if (!y) return;
  for (int64_t k = slice; j < C && k < parts; k += RFI_NORM_SLICES) sum += (double)lines[k * C + j];
  part[slice][lane] = sum;
  __syncthreads();
  if (slice > 0 || j >= C) return;
  for (int k = 1; k < RFI_NORM_SLICES; k++) sum += part[k][lane];
  if (blockIdx.y) y[j] = acc ? (float)sum + acc[j] : (float)sum;
  else y[j] = (float)(acc ? sum + (double)acc[j] : sum);
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

/* 16-byte pieces of a row; 0 where rows are not made of them. */
static inline int64_t rfi_norm_packs(rfr_dtype dtype, int64_t C) {
  const int64_t width = dtype == RFR_F32 ? 4 : 8;
  return C % width == 0 ? C / width : 0;
}

/* How the backward's rows lie: `pieces` 16-byte pieces a thread. */
typedef struct rfi_norm_shape {
  bool warp;
  int pieces, threads; /* pieces 0: rows of any kind */
  int64_t parts;       /* lines of sums, and blocks */
} rfi_norm_shape;

static inline rfi_norm_shape rfi_norm_shape_of(rfr_dtype dtype, int64_t rows, int64_t C, int sms) {
  const int64_t packs = rfi_norm_packs(dtype, C), most = 256;
  rfi_norm_shape s = {packs <= 96, 0, 0, rows < most ? rows : most};
  if (packs == 0 || packs > 2 * RFI_NORM_MOST) return s;
  s.pieces = !s.warp ? 2 : packs <= 32 ? 1 : 3;
  s.threads = s.warp ? RFI_NORM_THREADS : (int)rfi_blocks(packs, 64) * 32;
  const int64_t resident = sms * (s.warp ? 3 : (int64_t)(RFI_NORM_MOST / s.threads));
  s.parts = rfi_blocks(rows, s.warp ? RFI_NORM_WARPS : 1);
  if (s.parts > resident) s.parts = resident;
  return s;
}

template <typename T, bool MEAN> static void rfi_norm_launch_fwd(const rfi_norm_fwd &a, cudaStream_t stream) {
  const void *pointers[] = {a.x, a.other, a.w, a.b, a.sum, a.y};
  const int64_t packs = rfi_norm_packs(a.x_type, a.C);
  const unsigned blocks = (unsigned)a.rows, warps = (unsigned)rfi_blocks(a.rows, RFI_NORM_WARPS);
  if (packs == 0 || packs > 4096 || !rfi_norm_aligned(pointers, 6))
    rfi_norm_rows_any<T, MEAN><<<blocks, RFI_NORM_ANY, 0, stream>>>(a);
  else if (packs <= 32) rfi_norm_rows<T, MEAN, 1, true><<<warps, RFI_NORM_THREADS, 0, stream>>>(a);
  else if (packs <= 128) rfi_norm_rows<T, MEAN, 4, true><<<warps, RFI_NORM_THREADS, 0, stream>>>(a);
  else rfi_norm_rows<T, MEAN, 4, false><<<blocks, (unsigned)rfi_blocks(packs, 128) * 32, 0, stream>>>(a);
}

template <typename T, bool MEAN>
static void rfi_norm_launch_bwd(const rfi_norm_bwd &a, const rfi_norm_shape &s, cudaStream_t stream) {
  const void *pointers[] = {a.dy, a.x, a.w, a.residual, a.dx};
  const unsigned parts = (unsigned)s.parts;
  /* whole turns of the lanes: with a last one that is not full the row alone would be too little */
  const size_t space = (size_t)s.pieces * rfi_pack_width<T> * (s.warp ? 32 : s.threads) * sizeof(float);
  if (s.pieces == 0 || !rfi_norm_aligned(pointers, 5)) {
    if (a.dx) rfi_norm_dx_any<T, MEAN><<<(unsigned)a.rows, RFI_NORM_ANY, 0, stream>>>(a);
    if (a.dw || a.db)
      rfi_norm_dw_any<T, MEAN><<<dim3((unsigned)rfi_blocks(a.C, RFI_NORM_ANY), parts), RFI_NORM_ANY, 0, stream>>>(a);
  } else if (s.pieces == 1) {
    rfi_norm_rows_bwd<T, MEAN, 1, true><<<parts, RFI_NORM_THREADS, space, stream>>>(a);
  } else if (s.pieces == 3) {
    rfi_norm_rows_bwd<T, MEAN, 3, true><<<parts, RFI_NORM_THREADS, space, stream>>>(a);
  } else {
    rfi_norm_rows_bwd<T, MEAN, 2, false><<<parts, (unsigned)s.threads, space, stream>>>(a);
  }
}

/* ---- calls ---- */

/* A norm of x, or, with SUM, of x + other: then every operand and result stands one further. */
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

/* Where an op has what a backward may take; -1: nowhere. */
typedef struct rfi_norm_places {
  int w, mean, rstd, residual, acc, acc_b; /* operands */
  int dx, dw, db;                          /* results */
} rfi_norm_places;

static inline void *rfi_norm_in(const rfr_call *c, int i) { return i >= 0 && i < c->n_in ? c->in[i].data : NULL; }
static inline void *rfi_norm_out(const rfr_call *c, int i) { return i >= 0 ? c->out[i].data : NULL; }

static inline rfi_norm_shape rfi_norm_shape_of_call(const rfr_call *c) {
  const rfr_arg *x = &c->in[1];
  return rfi_norm_shape_of(x->type.dtype, rfi_norm_height(x), x->type.shape[x->type.rank - 1],
                           rfi_cuda_info_of(c)->sms);
}

/* dw's and db's lines. */
static inline size_t rfi_norm_workspace(const rfr_call *c, int vectors) {
  const rfr_arg *x = &c->in[1];
  return (size_t)(vectors * rfi_norm_shape_of_call(c).parts * x->type.shape[x->type.rank - 1]) * sizeof(float);
}

template <bool MEAN> static rfr_status rfi_norm_run_bwd(const rfr_call *c, const rfi_norm_places &p) {
  const rfr_arg *x = &c->in[1];
  const rfi_norm_shape s = rfi_norm_shape_of_call(c);
  const int64_t C = x->type.shape[x->type.rank - 1];
  float *lines = (float *)c->workspace, *dw = (float *)rfi_norm_out(c, p.dw), *db = (float *)rfi_norm_out(c, p.db);
  const rfi_norm_bwd a = {c->in[0].data,
                          x->data,
                          rfi_norm_in(c, p.w),
                          rfi_norm_in(c, p.residual),
                          (const float *)rfi_norm_in(c, p.mean),
                          (const float *)rfi_norm_in(c, p.rstd),
                          rfi_norm_out(c, p.dx),
                          dw ? lines : NULL,
                          db ? lines + s.parts * C : NULL,
                          x->type.dtype,
                          p.w >= 0 ? c->in[p.w].type.dtype : RFR_F32,
                          rfi_norm_height(x),
                          C};
  const rfi_norm_total total_dw = {a.dw, (const float *)rfi_norm_in(c, p.acc), dw},
                       total_db = {a.db, (const float *)rfi_norm_in(c, p.acc_b), db};
  if (C == 0) return RFR_OK;
  if (a.rows > 0 && (a.dx || dw || db)) RFI_WITH_FLOAT(a.x_type, T, (rfi_norm_launch_bwd<T, MEAN>(a, s, rfi_stream(c))))
  if (dw || db)
    rfi_norm_add_lines<<<dim3((unsigned)rfi_blocks(C, 32), db ? 2 : 1), 32 * RFI_NORM_SLICES, 0, rfi_stream(c)>>>(
        total_dw, total_db, s.parts, C);
  return rfi_cuda_launched("norm's gradients");
}

#endif
