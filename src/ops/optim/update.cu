/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW and SGD on a GPU, in place, one pass over memory; the formulas are those of update_cpu.c.
 *
 * Adjacent updates are one launch, whose arguments have the tensors' addresses: most tensors are too small to fill the
 * device. Chunks are dealt to the blocks in rotation, so that at any time all blocks are within a few pages of each
 * array. A thread has 4 adjacent elements of every tensor in flight, 16 bytes of f32 each, with many blocks; twice 4
 * elements in half as many blocks had less throughput. Tensors in f16, or with an unaligned address, are processed one
 * element at a time. Factors are computed in f64 from the step's values on the device, once per block, and once per
 * tensor where they differ. If skip is set, a block ends before it writes.
 *
 * 8-bit moments have a separate kernel: a warp holds the 256 elements of a scale in registers, from the old codes to
 * the new ones. The nearest code is one read of a table in shared memory; a binary search, eight dependent reads, took
 * twice the time that the memory needs.
 *
 * Weights that are rounded stochastically (rounding.h) have separate kernels, so that the others need no registers for
 * the generator. They are bf16 without a master weight.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/optim/rounding.h"
#include "ops/quant/dynamic8.h"

enum { THREADS = 256, CHUNK = 4096 };
enum { MOST = 255 }; /* tensors per launch: arguments have at most 32,764 bytes */

typedef struct tensor {
  void *data; /* NULL: none */
  rfr_dtype dtype;
} tensor;

typedef enum kind { ADAMW, ADAMW8, MOMENTUM, SGD } kind;

/* Blocks per multiprocessor; with three, 8-bit moments need no register spills. */
static constexpr int per_sm(kind k) { return k == ADAMW8 ? 3 : 4; }

typedef struct update {
  tensor w, g, m, v, master;
  double decay, lr_scale;
  int64_t n, first; /* number of elements; first chunk, numbered over all tensors */
  int64_t element;  /* with draws: the element of the full weight at which w begins */
  int32_t draws;    /* 0: w is rounded to nearest */
  bool wide;        /* types and addresses allow accesses of 4 elements */
} update;

typedef struct updates {
  const float *lr, *clip; /* clip NULL: 1 */
  const int32_t *skip;    /* NULL: 0 */
  const int64_t *step;    /* NULL: neither ADAMW nor draws */
  double beta1, beta2, eps;
  int64_t chunks;
  int n;
  update of[MOST];
} updates;

/* Bias correction of the step: divisors of the moments. */
typedef struct corrections {
  double first, inv_sqrt2;
} corrections;

typedef struct factors {
  float beta1, rest1, beta2, rest2, step, inv_sqrt2, eps, decay, clip;
} factors;

/* x^n by squaring, because pow takes longer than the update of a small tensor. */
static __device__ double power(double x, int64_t n) {
  double y = 1;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) y *= x;
  return y;
}

static __device__ corrections make_corrections(const updates &all, kind k) {
  if (k != ADAMW && k != ADAMW8) return {1, 1};
  const int64_t t = all.step[1] + 1;
  return {1 - power(all.beta1, t), 1 / sqrt(1 - power(all.beta2, t))};
}

static __device__ factors make_factors(const updates &all, const update &u, const corrections &c) {
  const double lr = (double)*all.lr * u.lr_scale;
  factors f;
  f.beta1 = (float)all.beta1;
  f.rest1 = (float)(1 - all.beta1);
  f.beta2 = (float)all.beta2;
  f.rest2 = (float)(1 - all.beta2);
  f.step = (float)(lr / c.first);
  f.inv_sqrt2 = (float)c.inv_sqrt2;
  f.eps = (float)all.eps;
  f.decay = (float)(lr * u.decay);
  f.clip = all.clip ? *all.clip : 1.0f;
  return f;
}

template <kind KIND>
static __device__ __forceinline__ void update_one(const factors &f, float *w, float g, float *m, float *v) {
  const float x = g * f.clip;
  if (KIND == ADAMW) {
    float root;
    *m = f.beta1 * *m + f.rest1 * x;
    *v = f.beta2 * *v + f.rest2 * (x * x);
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(*v));
    *w -= __fdividef(f.step * *m, root * f.inv_sqrt2 + f.eps) + f.decay * *w;
  } else if (KIND == MOMENTUM) {
    *m = f.beta1 * *m + x;
    *w -= f.step * *m + f.decay * *w;
  } else {
    *w -= f.step * x + f.decay * *w;
  }
}

/* ---- stochastic rounding ---- */

static __device__ __forceinline__ rfi_weight_draws draws_of(const updates &all, const update &u) {
  return rfi_weight_draws_of(all.step, u.draws);
}

static __device__ __forceinline__ uint16_t round_one(const rfi_weight_draws &d, int64_t element, float w) {
  const int k = (int)(element % RFI_DRAWS_PER_BLOCK);
  const rfi_u32x4 draw = rfi_weight_draw8(&d, (uint64_t)element / RFI_DRAWS_PER_BLOCK);
  const uint32_t word = k < 2 ? draw.v[0] : k < 4 ? draw.v[1] : k < 6 ? draw.v[2] : draw.v[3];
  return rfi_round_bf16(__float_as_uint(w), word >> 16 * (k % 2) & 0xFFFFu);
}

/* Of 4 adjacent elements, the first of which is a multiple of 4. */
static __device__ __forceinline__ void put_rounded(const rfi_weight_draws &d, int64_t element, rfi_bf16 *to,
                                                   const float (&w)[4]) {
  const rfi_u32x4 draw = rfi_weight_draw8(&d, (uint64_t)element / RFI_DRAWS_PER_BLOCK);
  const bool upper = element % RFI_DRAWS_PER_BLOCK != 0;
  const uint32_t word[2] = {upper ? draw.v[2] : draw.v[0], upper ? draw.v[3] : draw.v[1]};
  uint32_t y[4];
#pragma unroll
  for (int k = 0; k < 4; k++) y[k] = rfi_round_bf16(__float_as_uint(w[k]), word[k / 2] >> 16 * (k % 2) & 0xFFFFu);
  *(uint2 *)to = make_uint2(y[0] | y[1] << 16, y[2] | y[3] << 16);
}

/* ---- one element at a time, of any type ---- */

static __device__ float fetch(const tensor &x, int64_t i) {
  return x.dtype == RFR_F32    ? ((const float *)x.data)[i]
         : x.dtype == RFR_BF16 ? rfi_widen(((const rfi_bf16 *)x.data)[i])
                               : rfi_widen(((const rfi_f16 *)x.data)[i]);
}
static __device__ void store(const tensor &x, int64_t i, float y) {
  if (!x.data) return;
  if (x.dtype == RFR_F32) ((float *)x.data)[i] = y;
  else if (x.dtype == RFR_BF16) ((rfi_bf16 *)x.data)[i] = rfi_narrow<rfi_bf16>(y);
  else ((rfi_f16 *)x.data)[i] = rfi_narrow<rfi_f16>(y);
}

/* D: rfi_weight_draws, or `nothing` to round to nearest. */
struct nothing {};

template <typename D>
static __device__ __forceinline__ void store_weight(const update &u, const D &d, int64_t i, float w) {
  if constexpr (sizeof(D) > sizeof(nothing)) ((uint16_t *)u.w.data)[i] = round_one(d, u.element + i, w);
  else store(u.w, i, w);
}

template <kind KIND, typename D>
static __device__ void update_singly(const update &u, const factors &f, const D &d, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    float w = fetch(u.master.data ? u.master : u.w, i), m = KIND == SGD ? 0 : fetch(u.m, i);
    float v = KIND == ADAMW ? fetch(u.v, i) : 0;
    update_one<KIND>(f, &w, fetch(u.g, i), &m, &v);
    if (KIND == ADAMW) store(u.v, i, v);
    if (KIND != SGD) store(u.m, i, m);
    store_weight(u, d, i, w);
    store(u.master, i, w);
  }
}

/* ---- four elements at a time ---- */

template <typename T> static __device__ __forceinline__ void put(T *to, const float (&x)[4]) {
  rfi_pack<T, 4> p;
#pragma unroll
  for (int k = 0; k < 4; k++) p.x[k] = rfi_narrow<T>(x[k]);
  rfi_put((rfi_pack<T, 4> *)to, p);
}

/* W: type of the updated weights, the master if there is one; M: of the moments. */
/* Four weights from element i; those of W are in bf16 if there are draws. */
template <typename W, typename D>
static __device__ __forceinline__ void put_weights(const update &u, const D &d, W *to, int64_t i, const float (&w)[4]) {
  if constexpr (sizeof(D) > sizeof(nothing)) put_rounded(d, u.element + i, to, w);
  else put(to, w);
}

template <kind KIND, typename W, typename G, typename M, typename D>
static __device__ __forceinline__ void update_fours(const update &u, const factors &f, const D &d, int64_t begin,
                                                    int64_t end) {
  W *const w = (W *)(u.master.data ? u.master.data : u.w.data) + begin;
  const tensor copy = u.master.data ? u.w : tensor{};
  const G *const g = (const G *)u.g.data + begin;
  M *const m = (M *)u.m.data + begin, *const v = (M *)u.v.data + begin;
  const int n = (int)(end - begin);
  for (int i = (int)threadIdx.x * 4; i < n; i += THREADS * 4) {
    const rfi_pack<W, 4> wp = *(const rfi_pack<W, 4> *)(w + i);
    const rfi_pack<G, 4> gp = *(const rfi_pack<G, 4> *)(g + i);
    rfi_pack<M, 4> mp, vp;
    if (KIND != SGD) mp = *(const rfi_pack<M, 4> *)(m + i);
    if (KIND == ADAMW) vp = *(const rfi_pack<M, 4> *)(v + i);
    float x[4], m4[4] = {}, v4[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      x[j] = rfi_widen(wp.x[j]);
      if (KIND != SGD) m4[j] = rfi_widen(mp.x[j]);
      if (KIND == ADAMW) v4[j] = rfi_widen(vp.x[j]);
      update_one<KIND>(f, &x[j], rfi_widen(gp.x[j]), &m4[j], &v4[j]);
    }
    if (KIND == ADAMW) put(v + i, v4);
    if (KIND != SGD) put(m + i, m4);
    put_weights(u, d, w + i, begin + i, x);
    if (!copy.data) continue;
    if (copy.dtype == RFR_F32) put((float *)copy.data + begin + i, x);
    else if (copy.dtype == RFR_BF16) put((rfi_bf16 *)copy.data + begin + i, x);
    else put((rfi_f16 *)copy.data + begin + i, x);
  }
}

template <kind KIND, typename W, typename G, typename D>
static __device__ void update_by_moments(const update &u, const factors &f, const D &d, int64_t begin, int64_t end) {
  if (u.m.dtype == RFR_BF16) update_fours<KIND, W, G, rfi_bf16>(u, f, d, begin, end);
  else update_fours<KIND, W, G, float>(u, f, d, begin, end);
}
template <kind KIND, typename W, typename D>
static __device__ void update_by_gradient(const update &u, const factors &f, const D &d, int64_t begin, int64_t end) {
  if (u.g.dtype == RFR_BF16) update_by_moments<KIND, W, rfi_bf16>(u, f, d, begin, end);
  else update_by_moments<KIND, W, float>(u, f, d, begin, end);
}

template <kind KIND, typename D>
static __device__ void update_range(const update &u, const factors &f, const D &d, int64_t begin, int64_t end) {
  constexpr bool draws = sizeof(D) > sizeof(nothing);
  const int64_t fours = u.wide ? begin + (end - begin) / 4 * 4 : begin;
  if (draws || (u.master.data ? u.master : u.w).dtype == RFR_BF16)
    update_by_gradient<KIND, rfi_bf16>(u, f, d, begin, fours);
  else if constexpr (!draws) update_by_gradient<KIND, float>(u, f, d, begin, fours);
  update_singly<KIND>(u, f, d, fours, end);
}

/* ---- 8-bit moments ---- */

enum { M, V, BLOCK = RFI_DYNAMIC_BLOCK, PER_LANE = BLOCK / 32 };

static __constant__ float numbers[2][256] = {{
#include "ops/quant/dynamic_signed.def"
                                             },
                                             {
#include "ops/quant/dynamic_unsigned.def"
                                             }};

/* The numbers of both moments, and the tables that find the nearest. */
typedef struct tables {
  float map[2][256], middle[2][256];
  uint32_t m[2 * RFI_DYNAMIC8_ENTRIES(RFI_DYNAMIC8_SIGNED_DROP)], v[RFI_DYNAMIC8_ENTRIES(RFI_DYNAMIC8_UNSIGNED_DROP)];
} tables;

/* Called by all threads of a block. */
static __device__ void fill(tables *t) {
  const int k = (int)threadIdx.x, n_m = RFI_DYNAMIC8_ENTRIES(RFI_DYNAMIC8_SIGNED_DROP);
  for (int s = M; s <= V; s++) {
    t->map[s][k] = numbers[s][k];
    t->middle[s][k] = k < 255 ? rfi_dynamic8_middle(numbers[s], k) : 0;
  }
  __syncthreads();
  for (int i = k; i < 2 * n_m; i += THREADS)
    t->m[i] = rfi_dynamic8_entry(t->middle[M], RFI_DYNAMIC8_SIGNED_DROP, i >= n_m, i % n_m);
  for (int i = k; i < RFI_DYNAMIC8_ENTRIES(RFI_DYNAMIC8_UNSIGNED_DROP); i += THREADS)
    t->v[i] = rfi_dynamic8_entry(t->middle[V], RFI_DYNAMIC8_UNSIGNED_DROP, false, i);
}

template <int S> static __device__ __forceinline__ uint32_t nearest(const tables &t, float x) {
  return (uint32_t)(S == M ? rfi_dynamic8_find(t.m, RFI_DYNAMIC8_SIGNED_DROP, x)
                           : rfi_dynamic8_find(t.v, RFI_DYNAMIC8_UNSIGNED_DROP, x));
}

typedef struct moment {
  uint8_t *codes;
  float *scales;
} moment;

static __device__ moment moment_of(const tensor &x, int64_t n) {
  return {(uint8_t *)x.data, (float *)((char *)x.data + rfi_dynamic8_scales(n))};
}

/* The largest magnitude of a warp's numbers; NaNs do not count. */
static __device__ __forceinline__ float most_of(const float (&x)[PER_LANE]) {
  float most = 0;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) most = fmaxf(most, fabsf(x[j]));
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(most)));
}

/* Encodes one block by one warp. A lane's codes are read before its warp's are written: most_of synchronizes in
 * between. */
template <int S>
static __device__ void encode_singly(const moment &m, const tables &t, int64_t n, int64_t begin,
                                     const float (&x)[PER_LANE]) {
  const int lane = (int)threadIdx.x % 32;
  const float most = most_of(x), inverse = rfi_dynamic8_inverse(most);
  if (lane == 0) m.scales[begin / BLOCK] = most;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (begin + j * 32 + lane < n) m.codes[begin + j * 32 + lane] = (uint8_t)nearest<S>(t, x[j] * inverse);
}

template <typename D>
static __device__ void update_block(const update &u, const factors &f, const D &d, const tables &t, int64_t begin) {
  const moment m = moment_of(u.m, u.n), v = moment_of(u.v, u.n);
  const float m_scale = m.scales[begin / BLOCK], v_scale = v.scales[begin / BLOCK];
  float m8[PER_LANE], v8[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int64_t i = begin + j * 32 + (int)threadIdx.x % 32;
    m8[j] = v8[j] = 0;
    if (i >= u.n) continue;
    float w = fetch(u.master.data ? u.master : u.w, i);
    m8[j] = t.map[M][m.codes[i]] * m_scale;
    v8[j] = t.map[V][v.codes[i]] * v_scale;
    update_one<ADAMW>(f, &w, fetch(u.g, i), &m8[j], &v8[j]);
    store_weight(u, d, i, w);
    store(u.master, i, w);
  }
  encode_singly<M>(m, t, u.n, begin, m8);
  encode_singly<V>(v, t, u.n, begin, v8);
}

/* Encodes a complete block of tensors that allow accesses of 4 elements: a lane has 2 x 4 of them. */
template <int S>
static __device__ __forceinline__ void encode_fours(const moment &m, const tables &t, int64_t begin,
                                                    const float (&x)[PER_LANE]) {
  const int lane = (int)threadIdx.x % 32;
  const float most = most_of(x), inverse = rfi_dynamic8_inverse(most);
  if (lane == 0) m.scales[begin / BLOCK] = most;
#pragma unroll
  for (int h = 0; h < PER_LANE; h += 4) {
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) codes |= nearest<S>(t, x[h + k] * inverse) << 8 * k;
    ((uint32_t *)(m.codes + begin))[h * 8 + lane] = codes;
  }
}

template <typename W, typename G, typename D>
static __device__ __forceinline__ void update_block_by_fours(const update &u, const factors &f, const D &d,
                                                             const tables &t, int64_t begin) {
  const int lane = (int)threadIdx.x % 32;
  const tensor copy = u.master.data ? u.w : tensor{};
  W *const w = (W *)(u.master.data ? u.master.data : u.w.data) + begin + lane * 4;
  const G *const g = (const G *)u.g.data + begin + lane * 4;
  const moment m = moment_of(u.m, u.n), v = moment_of(u.v, u.n);
  const float m_scale = m.scales[begin / BLOCK], v_scale = v.scales[begin / BLOCK];
  rfi_pack<W, 4> wp[PER_LANE / 4];
  rfi_pack<G, 4> gp[PER_LANE / 4];
  uint32_t m_codes[PER_LANE / 4], v_codes[PER_LANE / 4];
  float m8[PER_LANE], v8[PER_LANE];
#pragma unroll
  for (int h = 0; h < PER_LANE / 4; h++) {
    wp[h] = *(const rfi_pack<W, 4> *)(w + h * 128);
    gp[h] = *(const rfi_pack<G, 4> *)(g + h * 128);
    m_codes[h] = ((const uint32_t *)(m.codes + begin))[h * 32 + lane];
    v_codes[h] = ((const uint32_t *)(v.codes + begin))[h * 32 + lane];
  }
#pragma unroll
  for (int h = 0; h < PER_LANE / 4; h++) {
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int j = h * 4 + k;
      x[k] = rfi_widen(wp[h].x[k]);
      m8[j] = t.map[M][m_codes[h] >> 8 * k & 255] * m_scale;
      v8[j] = t.map[V][v_codes[h] >> 8 * k & 255] * v_scale;
      update_one<ADAMW>(f, &x[k], rfi_widen(gp[h].x[k]), &m8[j], &v8[j]);
    }
    const int64_t i = begin + h * 128 + lane * 4;
    put_weights(u, d, w + h * 128, i, x);
    if (!copy.data) continue;
    if (copy.dtype == RFR_F32) put((float *)copy.data + i, x);
    else if (copy.dtype == RFR_BF16) put((rfi_bf16 *)copy.data + i, x);
    else put((rfi_f16 *)copy.data + i, x);
  }
  encode_fours<M>(m, t, begin, m8);
  encode_fours<V>(v, t, begin, v8);
}

template <typename W, typename D>
static __device__ void update_block_of(const update &u, const factors &f, const D &d, const tables &t, int64_t begin) {
  if (u.g.dtype == RFR_BF16) update_block_by_fours<W, rfi_bf16>(u, f, d, t, begin);
  else update_block_by_fours<W, float>(u, f, d, t, begin);
}

template <typename D>
static __device__ void update_blocks(const update &u, const factors &f, const D &d, const tables &t, int64_t begin,
                                     int64_t end) {
  constexpr bool draws = sizeof(D) > sizeof(nothing);
  const bool is_bf16 = (u.master.data ? u.master : u.w).dtype == RFR_BF16;
  for (int64_t b = begin + threadIdx.x / 32 * BLOCK; b < end; b += THREADS / 32 * BLOCK) {
    if (!u.wide || b + BLOCK > end) update_block(u, f, d, t, b);
    else if (draws || is_bf16) update_block_of<rfi_bf16>(u, f, d, t, b);
    else if constexpr (!draws) update_block_of<float>(u, f, d, t, b);
  }
}

template <kind KIND, typename D>
static __device__ __forceinline__ void update_chunk(const update &u, const factors &f, const D &d, const tables &t,
                                                    int64_t begin, int64_t end) {
  if constexpr (KIND == ADAMW8) update_blocks(u, f, d, t, begin, end);
  else update_range<KIND>(u, f, d, begin, end);
}

template <kind KIND, bool DRAWS>
static __global__ void __launch_bounds__(THREADS, per_sm(KIND)) update_all(const __grid_constant__ updates all) {
  __shared__ corrections step;
  __shared__ tables t;
  if (all.skip && *all.skip) return;
  if constexpr (KIND == ADAMW8) fill(&t);
  if (threadIdx.x == 0) step = make_corrections(all, KIND);
  __syncthreads();
  int i = 0; /* the last tensor that begins at or before the chunk; empty tensors are skipped */
  factors f = make_factors(all, all.of[0], step);
  for (int64_t chunk = blockIdx.x; chunk < all.chunks; chunk += gridDim.x) {
    if (i + 1 < all.n && all.of[i + 1].first <= chunk) {
      do i++;
      while (i + 1 < all.n && all.of[i + 1].first <= chunk);
      f = make_factors(all, all.of[i], step);
    }
    const update &u = all.of[i];
    const int64_t begin = (chunk - u.first) * CHUNK, end = min(u.n, begin + CHUNK);
    if constexpr (DRAWS) update_chunk<KIND>(u, f, draws_of(all, u), t, begin, end);
    else update_chunk<KIND>(u, f, nothing{}, t, begin, end);
  }
}

static tensor tensor_of(const rfr_arg *x) { return tensor{x->data, x->type.dtype}; }

static bool aligned(const tensor &x) { return (uintptr_t)x.data % (x.dtype == RFR_F32 ? 16 : 8) == 0; }
static bool by_fours(const update &u) {
  const bool typed = (u.master.data ? u.master : u.w).dtype != RFR_F16 && u.g.dtype != RFR_F16 &&
                     u.m.dtype != RFR_F16 && (!u.v.data || u.v.dtype == u.m.dtype);
  return typed && u.element % 4 == 0 && aligned(u.w) && aligned(u.g) && aligned(u.m) && aligned(u.v) &&
         aligned(u.master);
}

/* One op's tensors, and the fields that it shares with other ops of the launch. */
static update adamw_of(const rfr_call *c, updates *shared) {
  update u = {};
  u.w = tensor_of(&c->in[0]);
  u.g = tensor_of(&c->in[1]);
  u.m = tensor_of(&c->in[2]);
  u.v = tensor_of(&c->in[3]);
  u.master = tensor_of(&c->in[4]);
  u.decay = c->attr[3].f;
  u.lr_scale = c->attr[4].f;
  u.draws = (int32_t)c->attr[5].i;
  u.element = c->attr[6].i;
  shared->lr = (const float *)c->in[5].data;
  shared->clip = (const float *)c->in[6].data;
  shared->skip = (const int32_t *)c->in[7].data;
  shared->step = (const int64_t *)c->in[8].data;
  shared->beta1 = c->attr[0].f;
  shared->beta2 = c->attr[1].f;
  shared->eps = c->attr[2].f;
  return u;
}

static update sgd_of(const rfr_call *c, updates *shared) {
  update u = {};
  u.w = tensor_of(&c->in[0]);
  u.g = tensor_of(&c->in[1]);
  u.m = tensor_of(&c->in[2]);
  u.master = tensor_of(&c->in[3]);
  u.decay = c->attr[1].f;
  u.lr_scale = c->attr[2].f;
  u.draws = (int32_t)c->attr[3].i;
  u.element = c->attr[4].i;
  shared->lr = (const float *)c->in[4].data;
  shared->clip = (const float *)c->in[5].data;
  shared->skip = (const int32_t *)c->in[6].data;
  shared->step = c->n_in > 7 ? (const int64_t *)c->in[7].data : NULL;
  shared->beta1 = c->attr[0].f;
  return u;
}

static bool share(const updates &a, const updates &b) {
  return a.lr == b.lr && a.clip == b.clip && a.skip == b.skip && a.step == b.step && a.beta1 == b.beta1 &&
         a.beta2 == b.beta2 && a.eps == b.eps;
}

template <bool DRAWS> static void launch(const rfr_call *c, kind k, const updates &all) {
  const int64_t most = (int64_t)rfi_cuda_info_of(c)->sms * per_sm(k);
  const unsigned grid = (unsigned)(all.chunks < most ? all.chunks : most);
  if (grid == 0) return;
  if (k == ADAMW) update_all<ADAMW, DRAWS><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else if (k == ADAMW8) update_all<ADAMW8, DRAWS><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else if (k == MOMENTUM) update_all<MOMENTUM, DRAWS><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else update_all<SGD, DRAWS><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
}

/* Launches the first of n calls, as many as fit into one launch; returns how many. */
static int launch_some(const rfr_call *const *calls, int n, update (*of)(const rfr_call *c, updates *shared),
                       bool adamw) {
  updates all = {};
  kind first = SGD;
  for (; all.n < n && all.n < MOST; all.n++) {
    updates own = {};
    update u = of(calls[all.n], &own);
    const kind k = adamw ? (u.m.dtype == RFR_U8 ? ADAMW8 : ADAMW) : u.m.data ? MOMENTUM : SGD;
    if (all.n == 0) {
      all = own;
      first = k;
    } else if (k != first || !share(all, own) || (u.draws == 0) != (all.of[0].draws == 0)) {
      break;
    }
    u.n = rfi_elements(&calls[all.n]->in[0]);
    u.first = all.chunks;
    u.wide = by_fours(u);
    all.of[all.n] = u;
    all.chunks += rfi_blocks(u.n, CHUNK);
  }
  if (all.of[0].draws == 0) launch<false>(calls[0], first, all);
  else launch<true>(calls[0], first, all);
  return all.n;
}

static rfr_status adamw_all(const rfr_call *const *calls, int n) {
  for (int i = 0; i < n;) i += launch_some(calls + i, n - i, adamw_of, true);
  return rfi_cuda_launched("adamw");
}
static rfr_status sgd_all(const rfr_call *const *calls, int n) {
  for (int i = 0; i < n;) i += launch_some(calls + i, n - i, sgd_of, false);
  return rfi_cuda_launched("sgd");
}

static rfr_status adamw_run(const rfr_call *c) { return adamw_all(&c, 1); }
static rfr_status sgd_run(const rfr_call *c) { return sgd_all(&c, 1); }

extern "C" const rfi_cuda_kernel RFI_CUDA(adamw) = {adamw_run, NULL, NULL, adamw_all};
extern "C" const rfi_cuda_kernel RFI_CUDA(sgd) = {sgd_run, NULL, NULL, sgd_all};
