/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW and SGD on a GPU, in place, one pass over memory; the formulas are those of update_cpu.c.
 *
 * Updates that follow each other are one launch, which the tensors' places travel in by value: most
 * tensors are too small to fill the device. Their chunks are dealt to the blocks in turns, so that at
 * any time all blocks are within a few pages of each array. Each thread takes 4 neighbours of every
 * tensor at once: 16 bytes of f32. What is constant is folded in f64 from what the step's values on the
 * device say, once a block, and once a tensor where it differs. When skip is set a block ends before it
 * writes. Types are told apart at run time, the same way for all threads: a template would be made 72
 * times for a kernel that waits for memory anyway.
 */
#include "backend/cuda/kernels.cuh"

enum { THREADS = 256, PER_SM = 4, WIDTH = 4, CHUNK = 4096 };
enum { MOST = 256 }; /* tensors a launch: 32,764 bytes may travel in it */

typedef struct tensor {
  void *data; /* NULL: none */
  rfr_dtype dtype;
} tensor;

typedef enum kind { ADAMW, MOMENTUM, SGD } kind;

typedef struct update {
  tensor w, g, m, v, master;
  double decay, lr_scale;
  int64_t n, first; /* elements; of its chunks, among all tensors' */
  bool wide;        /* its addresses are those of whole pieces of WIDTH */
} update;

typedef struct updates {
  const float *lr, *clip; /* clip NULL: 1 */
  const int32_t *skip;    /* NULL: 0 */
  const int64_t *step;    /* ADAMW alone */
  double beta1, beta2, eps;
  int64_t chunks;
  int n;
  update of[MOST];
} updates;

/* Of the step: what moments are divided by before an update. */
typedef struct corrections {
  double first, inv_sqrt2;
} corrections;

typedef struct factors {
  float beta1, rest1, beta2, rest2, step, inv_sqrt2, eps, decay, clip;
} factors;

/* x^n by squaring: pow costs more than a small tensor's whole update. */
static __device__ double power(double x, int64_t n) {
  double y = 1;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) y *= x;
  return y;
}

static __device__ corrections make_corrections(const updates &all, kind k) {
  if (k != ADAMW) return {1, 1};
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

/* N neighbours as they lie in memory, and as numbers: all loads are on their way before the first is looked at. */
template <int N> struct bits { uint32_t word[N]; /* of 16-bit types the first half */ };

template <int N> static __device__ __forceinline__ bits<N> fetch(const tensor &x, int64_t i) {
  bits<N> b = {};
  if (!x.data) return b;
  if (N == 1) {
    b.word[0] = x.dtype == RFR_F32 ? ((const uint32_t *)x.data)[i] : ((const uint16_t *)x.data)[i];
  } else if (x.dtype == RFR_F32) {
    const uint4 v = *(const uint4 *)((const uint32_t *)x.data + i);
    b.word[0] = v.x, b.word[1 % N] = v.y, b.word[2 % N] = v.z, b.word[3 % N] = v.w;
  } else {
    const uint2 v = *(const uint2 *)((const uint16_t *)x.data + i);
    b.word[0] = v.x, b.word[1 % N] = v.y;
  }
  return b;
}

static __device__ __forceinline__ float half_word(uint32_t h, rfr_dtype dtype) {
  return dtype == RFR_BF16 ? __uint_as_float(h << 16) : __half2float(__ushort_as_half((unsigned short)h));
}
template <int N> static __device__ __forceinline__ void widen(float *to, const bits<N> &b, rfr_dtype dtype) {
#pragma unroll
  for (int k = 0; k < N; k++) {
    if (dtype == RFR_F32) to[k] = __uint_as_float(b.word[k]);
    else to[k] = half_word(k & 1 ? b.word[k / 2] >> 16 : b.word[k / 2] & 0xFFFFu, dtype);
  }
}

static __device__ __forceinline__ uint32_t narrow(float x, rfr_dtype dtype) {
  return dtype == RFR_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}
template <int N> static __device__ __forceinline__ void store(const tensor &x, int64_t i, const float *from) {
  if (!x.data) return;
  if (x.dtype == RFR_F32) {
    if (N == 1) ((float *)x.data)[i] = from[0];
    else *(float4 *)((float *)x.data + i) = make_float4(from[0], from[1 % N], from[2 % N], from[3 % N]);
  } else if (N == 1) {
    ((uint16_t *)x.data)[i] = (uint16_t)narrow(from[0], x.dtype);
  } else {
    *(uint2 *)((uint16_t *)x.data + i) = make_uint2(narrow(from[0], x.dtype) | narrow(from[1 % N], x.dtype) << 16,
                                                    narrow(from[2 % N], x.dtype) | narrow(from[3 % N], x.dtype) << 16);
  }
}

template <kind KIND>
static __device__ __forceinline__ void update_one(const factors &f, float *w, float g, float *m, float *v) {
  const float x = g * f.clip;
  if (KIND == ADAMW) {
    *m = f.beta1 * *m + f.rest1 * x;
    *v = f.beta2 * *v + f.rest2 * (x * x);
    *w -= f.step * *m / (sqrtf(*v) * f.inv_sqrt2 + f.eps) + f.decay * *w;
  } else if (KIND == MOMENTUM) {
    *m = f.beta1 * *m + x;
    *w -= f.step * *m + f.decay * *w;
  } else {
    *w -= f.step * x + f.decay * *w;
  }
}

template <kind KIND, int N>
static __device__ __forceinline__ void update_n(const update &u, const factors &f, int64_t i) {
  const tensor &target = u.master.data ? u.master : u.w;
  const bits<N> wb = fetch<N>(target, i), gb = fetch<N>(u.g, i), mb = fetch<N>(u.m, i), vb = fetch<N>(u.v, i);
  float w[N], g[N], m[N] = {}, v[N] = {};
  widen(w, wb, target.dtype);
  widen(g, gb, u.g.dtype);
  if (KIND != SGD) widen(m, mb, u.m.dtype);
  if (KIND == ADAMW) widen(v, vb, u.v.dtype);
#pragma unroll
  for (int k = 0; k < N; k++) update_one<KIND>(f, &w[k], g[k], &m[k], &v[k]);
  if (KIND == ADAMW) store<N>(u.v, i, v);
  if (KIND != SGD) store<N>(u.m, i, m);
  store<N>(u.w, i, w);
  store<N>(u.master, i, w);
}

/* Elements begin ... end - 1: N neighbours at a time, what is left over one by one. `begin` is that of a chunk. */
template <kind KIND, int N>
static __device__ __forceinline__ void update_range(const update &u, const factors &f, int64_t begin, int64_t end) {
  for (int64_t i = begin + (int64_t)threadIdx.x * N; i + N <= end; i += THREADS * N) update_n<KIND, N>(u, f, i);
  for (int64_t i = end - (end - begin) % N + threadIdx.x; i < end; i += THREADS) update_n<KIND, 1>(u, f, i);
}

template <kind KIND>
static __global__ void __launch_bounds__(THREADS, PER_SM) update_all(const __grid_constant__ updates all) {
  __shared__ corrections step;
  if (all.skip && *all.skip) return;
  if (threadIdx.x == 0) step = make_corrections(all, KIND);
  __syncthreads();
  int i = 0; /* the last tensor that begins at the chunk or before: an empty one never is */
  factors f = make_factors(all, all.of[0], step);
  for (int64_t chunk = blockIdx.x; chunk < all.chunks; chunk += gridDim.x) {
    if (i + 1 < all.n && all.of[i + 1].first <= chunk) {
      do i++;
      while (i + 1 < all.n && all.of[i + 1].first <= chunk);
      f = make_factors(all, all.of[i], step);
    }
    const update &u = all.of[i];
    const int64_t begin = (chunk - u.first) * CHUNK, end = min(u.n, begin + CHUNK);
    if (u.wide) update_range<KIND, WIDTH>(u, f, begin, end);
    else update_range<KIND, 1>(u, f, begin, end);
  }
}

static tensor tensor_of(const rfr_arg *x) { return tensor{x->data, x->type.dtype}; }

static bool aligned(const tensor &x) { return (uintptr_t)x.data % (x.dtype == RFR_F32 ? 16 : 8) == 0; }

/* One op's tensors, and what it shares with others of the same launch. */
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
  else if (k == MOMENTUM) update_all<MOMENTUM><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
  else update_all<SGD><<<grid, THREADS, 0, rfi_stream(c)>>>(all);
}

/* The first few of n calls, as many as one launch takes; how many. */
static int launch_some(const rfr_call *const *calls, int n, update (*of)(const rfr_call *c, updates *shared),
                       bool adamw) {
  updates all = {};
  kind first = SGD;
  for (; all.n < n && all.n < MOST; all.n++) {
    updates own = {};
    update u = of(calls[all.n], &own);
    const kind k = adamw ? ADAMW : u.m.data ? MOMENTUM : SGD;
    if (all.n == 0) {
      all = own;
      first = k;
    } else if (k != first || !share(all, own)) {
      break;
    }
    u.n = rfi_elements(&calls[all.n]->in[0]);
    u.first = all.chunks;
    u.wide = aligned(u.w) && aligned(u.g) && aligned(u.m) && aligned(u.v) && aligned(u.master);
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
