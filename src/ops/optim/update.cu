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
 * Moments of 8 bits have a kernel of their own: a warp holds the 256 elements of a scale in registers, from the old
 * codes to the new ones.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/quant/dynamic8.h"

enum { THREADS = 256, PER_SM = 4, CHUNK = 4096 };
enum { MOST = 256 }; /* tensors per launch: arguments have at most 32,764 bytes */

typedef struct tensor {
  void *data; /* NULL: none */
  rfr_dtype dtype;
} tensor;

typedef enum kind { ADAMW, ADAMW8, MOMENTUM, SGD } kind;

typedef struct update {
  tensor w, g, m, v, master;
  double decay, lr_scale;
  int64_t n, first; /* elements; first chunk, among all tensors' */
  bool wide;        /* its types and addresses allow 4 elements at a time */
} update;

typedef struct updates {
  const float *lr, *clip; /* clip NULL: 1 */
  const int32_t *skip;    /* NULL: 0 */
  const int64_t *step;    /* ADAMW only */
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

/* x^n by squaring: pow costs more than the update of a small tensor. */
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

/* ---- one by one, of any types ---- */

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

template <kind KIND>
static __device__ void update_singly(const update &u, const factors &f, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    float w = fetch(u.master.data ? u.master : u.w, i), m = KIND == SGD ? 0 : fetch(u.m, i);
    float v = KIND == ADAMW ? fetch(u.v, i) : 0;
    update_one<KIND>(f, &w, fetch(u.g, i), &m, &v);
    if (KIND == ADAMW) store(u.v, i, v);
    if (KIND != SGD) store(u.m, i, m);
    store(u.w, i, w);
    store(u.master, i, w);
  }
}

/* ---- four by four ---- */

template <typename T> static __device__ __forceinline__ void put(T *to, const float (&x)[4]) {
  rfi_pack<T, 4> p;
#pragma unroll
  for (int k = 0; k < 4; k++) p.x[k] = rfi_narrow<T>(x[k]);
  rfi_put((rfi_pack<T, 4> *)to, p);
}

/* W: type of the updated weights, the master if there is one; M: of the moments. */
template <kind KIND, typename W, typename G, typename M>
static __device__ __forceinline__ void update_fours(const update &u, const factors &f, int64_t begin, int64_t end) {
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
    put(w + i, x);
    if (!copy.data) continue;
    if (copy.dtype == RFR_F32) put((float *)copy.data + begin + i, x);
    else if (copy.dtype == RFR_BF16) put((rfi_bf16 *)copy.data + begin + i, x);
    else put((rfi_f16 *)copy.data + begin + i, x);
  }
}

template <kind KIND, typename W, typename G>
static __device__ void update_by_moments(const update &u, const factors &f, int64_t begin, int64_t end) {
  if (u.m.dtype == RFR_BF16) update_fours<KIND, W, G, rfi_bf16>(u, f, begin, end);
  else update_fours<KIND, W, G, float>(u, f, begin, end);
}
template <kind KIND, typename W>
static __device__ void update_by_gradient(const update &u, const factors &f, int64_t begin, int64_t end) {
  if (u.g.dtype == RFR_BF16) update_by_moments<KIND, W, rfi_bf16>(u, f, begin, end);
  else update_by_moments<KIND, W, float>(u, f, begin, end);
}

template <kind KIND>
static __device__ void update_range(const update &u, const factors &f, int64_t begin, int64_t end) {
  const int64_t fours = u.wide ? begin + (end - begin) / 4 * 4 : begin;
  if ((u.master.data ? u.master : u.w).dtype == RFR_BF16) update_by_gradient<KIND, rfi_bf16>(u, f, begin, fours);
  else update_by_gradient<KIND, float>(u, f, begin, fours);
  update_singly<KIND>(u, f, fours, end);
}

/* ---- moments of 8 bits ---- */

enum { M, V, BLOCK = RFI_DYNAMIC_BLOCK, PER_LANE = BLOCK / 32 };

static __constant__ float numbers[2][256] = {{
#include "ops/quant/dynamic_signed.def"
                                             },
                                             {
#include "ops/quant/dynamic_unsigned.def"
                                             }};

/* The numbers of both moments, and what is halfway between them. */
typedef struct tables {
  float map[2][256], middle[2][256];
} tables;

static __device__ void fill(tables *t) {
  const int k = (int)threadIdx.x;
  for (int s = M; s <= V; s++) {
    t->map[s][k] = numbers[s][k];
    t->middle[s][k] = k < 255 ? rfi_dynamic8_middle(numbers[s], k) : 0;
  }
}

typedef struct moment {
  uint8_t *codes;
  float *scales;
} moment;

static __device__ moment moment_of(const tensor &x, int64_t n) {
  return {(uint8_t *)x.data, (float *)((char *)x.data + rfi_dynamic8_scales(n))};
}

static __device__ float most_of(float x) {
#pragma unroll
  for (int k = 16; k > 0; k /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, k));
  return x;
}

/* One block by one warp. */
static __device__ void update_block(const update &u, const factors &f, const tables &t, int64_t begin) {
  const int lane = (int)threadIdx.x % 32;
  const moment moments[2] = {moment_of(u.m, u.n), moment_of(u.v, u.n)};
  float x[2][PER_LANE], scale[2];
#pragma unroll
  for (int s = M; s <= V; s++) scale[s] = moments[s].scales[begin / BLOCK];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int64_t i = begin + j * 32 + lane;
    x[M][j] = x[V][j] = 0;
    if (i >= u.n) continue;
    float w = fetch(u.master.data ? u.master : u.w, i);
#pragma unroll
    for (int s = M; s <= V; s++) x[s][j] = t.map[s][moments[s].codes[i]] * scale[s];
    update_one<ADAMW>(f, &w, fetch(u.g, i), &x[M][j], &x[V][j]);
    store(u.w, i, w);
    store(u.master, i, w);
  }
#pragma unroll
  for (int s = M; s <= V; s++) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) most = fmaxf(most, fabsf(x[s][j]));
    most = most_of(most); /* of all lanes: every code of the block was read */
    const float inverse = rfi_dynamic8_inverse(most);
    if (lane == 0) moments[s].scales[begin / BLOCK] = most;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const int64_t i = begin + j * 32 + lane;
      if (i < u.n) moments[s].codes[i] = (uint8_t)rfi_dynamic8_nearest(t.middle[s], x[s][j] * inverse);
    }
  }
}

static __device__ void update_blocks(const update &u, const factors &f, const tables &t, int64_t begin, int64_t end) {
  for (int64_t b = begin + threadIdx.x / 32 * BLOCK; b < end; b += THREADS / 32 * BLOCK) update_block(u, f, t, b);
}

template <kind KIND>
static __global__ void __launch_bounds__(THREADS, PER_SM) update_all(const __grid_constant__ updates all) {
  __shared__ corrections step;
  __shared__ tables t;
  if (all.skip && *all.skip) return;
  if constexpr (KIND == ADAMW8) fill(&t);
  if (threadIdx.x == 0) step = make_corrections(all, KIND);
  __syncthreads();
  int i = 0; /* the last tensor that begins at the chunk or before; never an empty one */
  factors f = make_factors(all, all.of[0], step);
  for (int64_t chunk = blockIdx.x; chunk < all.chunks; chunk += gridDim.x) {
    if (i + 1 < all.n && all.of[i + 1].first <= chunk) {
      do i++;
      while (i + 1 < all.n && all.of[i + 1].first <= chunk);
      f = make_factors(all, all.of[i], step);
    }
    const update &u = all.of[i];
    const int64_t begin = (chunk - u.first) * CHUNK, end = min(u.n, begin + CHUNK);
    if constexpr (KIND == ADAMW8) update_blocks(u, f, t, begin, end);
    else update_range<KIND>(u, f, begin, end);
  }
}

static tensor tensor_of(const rfr_arg *x) { return tensor{x->data, x->type.dtype}; }

static bool aligned(const tensor &x) { return (uintptr_t)x.data % (x.dtype == RFR_F32 ? 16 : 8) == 0; }
static bool by_fours(const update &u) {
  const bool typed = (u.master.data ? u.master : u.w).dtype != RFR_F16 && u.g.dtype != RFR_F16 &&
                     u.m.dtype != RFR_F16 && (!u.v.data || u.v.dtype == u.m.dtype);
  return typed && aligned(u.w) && aligned(u.g) && aligned(u.m) && aligned(u.v) && aligned(u.master);
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
  shared->lr = (const float *)c->in[4].data;
  shared->clip = (const float *)c->in[5].data;
  shared->skip = (const int32_t *)c->in[6].data;
  shared->beta1 = c->attr[0].f;
  return u;
}

static bool share(const updates &a, const updates &b) {
  return a.lr == b.lr && a.clip == b.clip && a.skip == b.skip && a.step == b.step && a.beta1 == b.beta1 &&
         a.beta2 == b.beta2 && a.eps == b.eps;
}

static void launch(const rfr_call *c, kind k, const updates &all) {
  const int64_t most = (int64_t)rfi_cuda_info_of(c)->sms * PER_SM;
  const unsigned grid = (unsigned)(all.chunks < most ? all.chunks : most);
  if (grid == 0) return;
  if (k == ADAMW) update_all<ADAMW><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else if (k == ADAMW8) update_all<ADAMW8><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else if (k == MOMENTUM) update_all<MOMENTUM><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else update_all<SGD><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
}

/* Launches the first of n calls, as many as fit into one launch; returns their number. */
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
    } else if (k != first || !share(all, own)) {
      break;
    }
    u.n = rfi_elements(&calls[all.n]->in[0]);
    u.first = all.chunks;
    u.wide = by_fours(u);
    all.of[all.n] = u;
    all.chunks += rfi_blocks(u.n, CHUNK);
  }
  launch(calls[0], first, all);
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
