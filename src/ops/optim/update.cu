/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW and SGD on a GPU, in place, one pass over memory; the formulas are those of update_cpu.c.
 *
 * Each thread takes 4 neighbours of every tensor at once: 16 bytes of f32. What is constant over the
 * tensor is folded in f64, once a block, from what the step's values on the device say. When skip is
 * set a block ends before it writes. Types are told apart at run time, the same way for all threads:
 * a template would be made 72 times for a kernel that waits for memory anyway.
 */
#include "backend/cuda/kernels.cuh"

enum { THREADS = 256, PER_SM = 5, WIDTH = 4 };

typedef struct tensor {
  void *data; /* NULL: none */
  rfr_dtype dtype;
} tensor;

typedef enum kind { ADAMW, MOMENTUM, SGD } kind;

typedef struct update {
  tensor w, g, m, v, master;
  const float *lr, *clip; /* clip NULL: 1 */
  const int32_t *skip;    /* NULL: 0 */
  const int64_t *step;    /* ADAMW alone */
  double beta1, beta2, eps, decay, lr_scale;
  int64_t n;
} update;

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

static __device__ factors make_factors(const update &u, kind k) {
  const double lr = (double)*u.lr * u.lr_scale;
  factors f = {};
  f.beta1 = (float)u.beta1;
  f.rest1 = (float)(1 - u.beta1);
  f.step = (float)lr;
  if (k == ADAMW) {
    const int64_t t = u.step[1] + 1;
    f.beta2 = (float)u.beta2;
    f.rest2 = (float)(1 - u.beta2);
    f.step = (float)(lr / (1 - power(u.beta1, t)));
    f.inv_sqrt2 = (float)(1 / sqrt(1 - power(u.beta2, t)));
    f.eps = (float)u.eps;
  }
  f.decay = (float)(lr * u.decay);
  f.clip = u.clip ? *u.clip : 1.0f;
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

/* N neighbours at a time, what is left over one by one. */
template <kind KIND, int N> static __global__ void __launch_bounds__(THREADS, PER_SM) update_all(const update u) {
  __shared__ factors shared;
  if (u.skip && *u.skip) return;
  if (threadIdx.x == 0) shared = make_factors(u, KIND);
  __syncthreads();
  const factors f = shared;
  const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, threads = (int64_t)gridDim.x * THREADS;
  for (int64_t i = thread; i < u.n / N; i += threads) update_n<KIND, N>(u, f, i * N);
  for (int64_t i = u.n / N * N + thread; i < u.n; i += threads) update_n<KIND, 1>(u, f, i);
}

static tensor tensor_of(const rfr_arg *x) { return tensor{x->data, x->type.dtype}; }

static bool aligned(const tensor &x) { return (uintptr_t)x.data % (x.dtype == RFR_F32 ? 16 : 8) == 0; }

template <kind KIND> static rfr_status launch(const rfr_call *c, const update &u) {
  const bool wide = aligned(u.w) && aligned(u.g) && aligned(u.m) && aligned(u.v) && aligned(u.master);
  const int64_t most = (int64_t)rfi_cuda_info_of(c)->sms * PER_SM,
                blocks = rfi_blocks(u.n, THREADS * (wide ? WIDTH : 1));
  const unsigned grid = (unsigned)(blocks < most ? blocks : most);
  if (grid == 0) return RFR_OK;
  if (wide) update_all<KIND, WIDTH><<<grid, THREADS, 0, rfi_stream(c)>>>(u);
  else update_all<KIND, 1><<<grid, THREADS, 0, rfi_stream(c)>>>(u);
  return rfi_cuda_launched("update");
}

static rfr_status adamw_run(const rfr_call *c) {
  update u = {};
  u.w = tensor_of(&c->in[0]);
  u.g = tensor_of(&c->in[1]);
  u.m = tensor_of(&c->in[2]);
  u.v = tensor_of(&c->in[3]);
  u.master = tensor_of(&c->in[4]);
  u.lr = (const float *)c->in[5].data;
  u.clip = (const float *)c->in[6].data;
  u.skip = (const int32_t *)c->in[7].data;
  u.step = (const int64_t *)c->in[8].data;
  u.beta1 = c->attr[0].f;
  u.beta2 = c->attr[1].f;
  u.eps = c->attr[2].f;
  u.decay = c->attr[3].f;
  u.lr_scale = c->attr[4].f;
  u.n = rfi_elements(&c->in[0]);
  return launch<ADAMW>(c, u);
}

static rfr_status sgd_run(const rfr_call *c) {
  update u = {};
  u.w = tensor_of(&c->in[0]);
  u.g = tensor_of(&c->in[1]);
  u.m = tensor_of(&c->in[2]);
  u.master = tensor_of(&c->in[3]);
  u.lr = (const float *)c->in[4].data;
  u.clip = (const float *)c->in[5].data;
  u.skip = (const int32_t *)c->in[6].data;
  u.beta1 = c->attr[0].f;
  u.decay = c->attr[1].f;
  u.lr_scale = c->attr[2].f;
  u.n = rfi_elements(&c->in[0]);
  return u.m.data ? launch<MOMENTUM>(c, u) : launch<SGD>(c, u);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(adamw) = {adamw_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(sgd) = {sgd_run, NULL};
