/* SPDX-License-Identifier: Apache-2.0
 *
 * Muon's own ops on a GPU: the momentum, and the polynomial of a Gram matrix. Both are memory-bound; a thread has four
 * adjacent elements where all addresses allow it, else one. A block of the polynomial adds up the diagonal of its
 * matrix itself, in a fixed order: that is as many elements as one row has.
 */
#include "backend/cuda/kernels.cuh"

enum { THREADS = 256, GROUPS = 4 }; /* GROUPS: per thread, in a block of the polynomial */

/* ---- the momentum ---- */

typedef struct momentum {
  const void *g;
  void *b, *u;
  const float *clip;   /* NULL: 1 */
  const int32_t *skip; /* NULL: 0 */
  float keep, add;
  int64_t n;
} momentum;

template <int V, typename G, typename B, typename U>
static __global__ void __launch_bounds__(THREADS) momentum_kernel(const momentum a) {
  const float clip = a.clip ? *a.clip : 1.0f;
  const bool skip = a.skip && *a.skip;
  for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V; i < a.n; i += (int64_t)gridDim.x * THREADS * V) {
    const rfi_pack<G, V> g = *(const rfi_pack<G, V> *)((const G *)a.g + i);
    rfi_pack<B, V> b = *(const rfi_pack<B, V> *)((const B *)a.b + i);
    rfi_pack<U, V> u;
#pragma unroll
    for (int k = 0; k < V; k++) {
      const float x = a.add * (rfi_widen(g.x[k]) * clip), next = a.keep * rfi_widen(b.x[k]) + x;
      b.x[k] = rfi_narrow<B>(next);
      u.x[k] = rfi_narrow<U>(x + a.keep * next);
    }
    rfi_put((rfi_pack<U, V> *)((U *)a.u + i), u);
    if (!skip) rfi_put((rfi_pack<B, V> *)((B *)a.b + i), b);
  }
}

static bool aligned(const rfr_arg *x) { return (uintptr_t)x->data % (x->type.dtype == RFR_F32 ? 16 : 8) == 0; }

template <typename G, typename B, typename U> static void momentum_launch(const rfr_call *c, const momentum &a) {
  const bool fours = a.n % 4 == 0 && aligned(&c->in[0]) && aligned(&c->in[1]) && aligned(&c->out[0]);
  const int64_t need = rfi_blocks(fours ? a.n / 4 : a.n, THREADS), most = (int64_t)rfi_cuda_info_of(c)->sms * 32;
  const unsigned grid = (unsigned)(need < most ? need : most);
  if (fours) momentum_kernel<4, G, B, U><<<grid, THREADS, 0, rfi_stream(c)>>>(a);
  else momentum_kernel<1, G, B, U><<<grid, THREADS, 0, rfi_stream(c)>>>(a);
}

template <typename G, typename B> static void momentum_by_result(const rfr_call *c, const momentum &a) {
  if (c->out[0].type.dtype == RFR_BF16) momentum_launch<G, B, rfi_bf16>(c, a);
  else momentum_launch<G, B, float>(c, a);
}

static rfr_status momentum_run(const rfr_call *c) {
  const double keep = c->attr[0].f;
  const momentum a = {c->in[0].data,
                      c->in[1].data,
                      c->out[0].data,
                      (const float *)c->in[2].data,
                      (const int32_t *)c->in[3].data,
                      (float)keep,
                      (float)(1 - keep),
                      rfi_elements(&c->in[0])};
  if (a.n == 0) return RFR_OK;
  RFI_WITH_FLOAT(c->in[0].type.dtype, G, if (c->in[1].type.dtype == RFR_BF16) momentum_by_result<G, rfi_bf16>(c, a);
                 else momentum_by_result<G, float>(c, a));
  return rfi_cuda_launched("muon_momentum");
}

/* ---- the polynomial ---- */

typedef struct polynomial {
  const void *g, *p;
  void *q;
  double a, b, c;
  bool unit;
  int64_t m, blocks; /* rows of a matrix; blocks of a matrix */
} polynomial;

template <int V, typename T> static __global__ void __launch_bounds__(THREADS) polynomial_kernel(const polynomial x) {
  const int64_t size = x.m * x.m, base = blockIdx.x / x.blocks * size;
  const T *const g = (const T *)x.g + base, *const p = (const T *)x.p + base;
  T *const q = (T *)x.q + base;
  double r = 1;
  if (x.unit) {
    float part = 0;
    for (int64_t i = threadIdx.x; i < x.m; i += THREADS) part += rfi_widen(g[i * x.m + i]);
    r = 1 / (sqrt((double)rfi_block_sum(part)) + 1e-7);
  }
  const float a = (float)(r * x.a), b = (float)(r * r * r * x.b), c = (float)(r * r * r * r * r * x.c);
  const int64_t first = blockIdx.x % x.blocks * (GROUPS * THREADS * V);
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    const int64_t i = first + ((int64_t)k * THREADS + threadIdx.x) * V;
    if (i >= size) break;
    const rfi_pack<T, V> gp = *(const rfi_pack<T, V> *)(g + i), pp = *(const rfi_pack<T, V> *)(p + i);
    const int64_t row = i / x.m, diagonal = row * x.m + row - i;
    rfi_pack<T, V> y;
#pragma unroll
    for (int j = 0; j < V; j++)
      y.x[j] = rfi_narrow<T>(b * rfi_widen(gp.x[j]) + c * rfi_widen(pp.x[j]) + (j == diagonal ? a : 0.0f));
    rfi_put((rfi_pack<T, V> *)(q + i), y);
  }
}

template <typename T> static void polynomial_launch(const rfr_call *c, polynomial x, int64_t batch) {
  const bool fours = x.m % 4 == 0 && aligned(&c->in[0]) && aligned(&c->in[1]) && aligned(&c->out[0]);
  x.blocks = rfi_blocks(x.m * x.m, (int64_t)GROUPS * THREADS * (fours ? 4 : 1));
  const unsigned grid = (unsigned)(x.blocks * batch);
  if (fours) polynomial_kernel<4, T><<<grid, THREADS, 0, rfi_stream(c)>>>(x);
  else polynomial_kernel<1, T><<<grid, THREADS, 0, rfi_stream(c)>>>(x);
}

static rfr_status polynomial_run(const rfr_call *c) {
  const rfr_type *g = &c->in[0].type;
  const int64_t m = g->shape[g->rank - 1], batch = g->rank == 3 ? g->shape[0] : 1;
  const polynomial x = {
      c->in[0].data, c->in[1].data, c->out[0].data, c->attr[0].f, c->attr[1].f, c->attr[2].f, c->attr[3].i != 0, m, 0};
  if (m == 0 || batch == 0) return RFR_OK;
  RFI_WITH_FLOAT(g->dtype, T, polynomial_launch<T>(c, x, batch));
  return rfi_cuda_launched("muon_polynomial");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(muon_momentum) = {momentum_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(muon_polynomial) = {polynomial_run, NULL};
