/* SPDX-License-Identifier: Apache-2.0
 *
 * Elementwise kernels on a GPU over operands of any strides: code that all ops of this family share.
 *
 * An op is a functor that sees a group of V adjacent elements as f32, in the flat order of the dense result. V is 16
 * bytes of the narrowest type if every operand allows it, else 1:
 *
 *   flat   all operands are dense: group p is at element p V of each; the elements after the last group
 *          are computed one by one
 *   rows   rows are dense and begin at multiples of 16 bytes (halves of a wider matrix, a bias repeated over
 *          rows): groups never cross a row, and the strided loop gives their offsets
 *   any    one element at a time
 *
 * The result of an element does not depend on which of them runs. A thread has several independent groups in flight,
 * and reads all of them before it computes the first.
 */
#ifndef RFI_MAP_CUH
#define RFI_MAP_CUH

#include "backend/cuda/kernels.cuh"
#include "ops/dims.h"

enum { RFI_MAP_THREADS = 256 };

/* ---- groups of elements ---- */

/* V adjacent elements in memory, in parts of at most 16 bytes. */
template <typename T, int V> struct rfi_group {
  static constexpr int width = V < rfi_pack_width<T> ? V : rfi_pack_width<T>;
  rfi_pack<T, width> part[V / width];
};

template <typename T, int V> __device__ __forceinline__ rfi_group<T, V> rfi_load(const T *from) {
  rfi_group<T, V> g;
#pragma unroll
  for (int k = 0; k < V / g.width; k++) g.part[k] = ((const rfi_pack<T, rfi_group<T, V>::width> *)from)[k];
  return g;
}
template <typename T, int V> __device__ __forceinline__ void rfi_widen(const rfi_group<T, V> &g, float (&x)[V]) {
#pragma unroll
  for (int v = 0; v < V; v++) x[v] = rfi_widen(g.part[v / g.width].x[v % g.width]);
}
template <typename T, int V> __device__ __forceinline__ void rfi_store(T *to, const float (&x)[V]) {
  rfi_group<T, V> g;
#pragma unroll
  for (int v = 0; v < V; v++) g.part[v / g.width].x[v % g.width] = rfi_narrow<T>(x[v]);
#pragma unroll
  for (int k = 0; k < V / g.width; k++) rfi_put((rfi_pack<T, rfi_group<T, V>::width> *)to + k, g.part[k]);
}

/* ---- loops over strided arguments ---- */

/* The offset of item i in argument k. */
static __device__ __forceinline__ int64_t rfi_strided_loop_offset(const rfi_strided_loop &w, int k, int64_t i) {
  uint64_t rest = (uint64_t)i;
  int64_t offset = 0;
  for (int d = w.rank - 1; d > 0; d--) {
    const uint64_t outer = rest / (uint64_t)w.dim[d];
    offset += (int64_t)(rest - outer * (uint64_t)w.dim[d]) * w.stride[k][d];
    rest = outer;
  }
  return offset + (int64_t)rest * w.stride[k][0];
}

/* The offsets of item i in the first N arguments, with one division per outer dimension for all arguments together. R:
 * an unsigned type that can count the items. */
template <typename R, int N>
static __device__ __forceinline__ void rfi_strided_loop_offsets(const rfi_strided_loop &w, int64_t i,
                                                                int64_t (&offset)[N]) {
  R rest = (R)i;
#pragma unroll
  for (int k = 0; k < N; k++) offset[k] = 0;
  for (int d = w.rank - 1; d > 0; d--) {
    const R dim = (R)w.dim[d], outer = rest / dim, at = rest - outer * dim;
#pragma unroll
    for (int k = 0; k < N; k++) offset[k] += (int64_t)at * w.stride[k][d];
    rest = outer;
  }
#pragma unroll
  for (int k = 0; k < N; k++) offset[k] += (int64_t)rest * w.stride[k][0];
}

/* Whether groups of V elements are adjacent in every argument; then they do not cross the last dimension. `base` has
 * the arguments' addresses, NULL for absent ones. */
static inline bool rfi_strided_loop_groups(const rfi_strided_loop *w, int V, int n, const void *const *base,
                                           const int *size) {
  const int last = w->rank - 1;
  bool flat = w->rank == 1;
  for (int k = 0; k < n; k++) {
    if (w->stride[k][last] != 1 && w->dim[last] != 1) return false;
    const int64_t bytes = V * size[k] < 16 ? V * size[k] : 16;
    if ((uintptr_t)base[k] % bytes) return false;
    for (int d = 0; d < last; d++)
      if (w->stride[k][d] * size[k] % bytes) return false;
  }
  return flat || w->dim[last] % V == 0;
}

/* The same loop with a group as the item. */
static inline void rfi_strided_loop_by_groups(rfi_strided_loop *w, int V) {
  const int last = w->rank - 1;
  w->dim[last] /= V;
  for (int k = 0; k < w->n; k++) w->stride[k][last] = V;
}

/* Blocks for n items, `per_block` per block at a time: enough to fill the device several times. */
static inline unsigned rfi_grid(const rfr_call *call, int64_t n, int64_t per_block) {
  const int64_t need = rfi_blocks(n, per_block), most = (int64_t)rfi_cuda_info_of(call)->sms * 32;
  return (unsigned)(need < most ? need : most);
}

/* ---- the map ---- */

/* Members of a functor besides operator()<V>(first element, x[IN][V], y[OUT][V]): `begin` runs once in each thread;
 * strided_results: results are slices of a wider tensor, and the strided loop gives their offsets. */
struct rfi_map_op {
  static constexpr bool strided_results = false;
  __device__ void begin() {}
};

template <typename X, typename Y, int IN, int OUT> struct rfi_map_args {
  const X *x[IN];
  Y *y[OUT]; /* NULL: unused */
  int64_t n; /* elements */
  rfi_strided_loop walk;
};

template <bool FLAT, int V, int U, class F, typename X, typename Y, int IN, int OUT>
static __global__ void __launch_bounds__(RFI_MAP_THREADS)
    rfi_map_kernel(const __grid_constant__ rfi_map_args<X, Y, IN, OUT> a, F f) {
  constexpr int PLACES = IN + (F::strided_results ? OUT : 0); /* arguments whose offsets come from the strided loop */
  const int64_t groups = a.n / V, step = (int64_t)gridDim.x * RFI_MAP_THREADS * U;
  const bool narrow = groups <= UINT32_MAX;
  f.begin();
  for (int64_t first = (int64_t)blockIdx.x * RFI_MAP_THREADS * U + threadIdx.x; first < groups; first += step) {
    rfi_group<X, V> in[U][IN];
    int64_t at[U][PLACES];
#pragma unroll
    for (int u = 0; u < U; u++) {
      int64_t p = first + u * RFI_MAP_THREADS;
      p = p < groups ? p : groups - 1; /* clamped, because an extra load costs less than a branch between loads */
      if (!FLAT && narrow) rfi_strided_loop_offsets<uint32_t>(a.walk, p, at[u]);
      else if (!FLAT) rfi_strided_loop_offsets<uint64_t>(a.walk, p, at[u]);
#pragma unroll
      for (int k = 0; k < IN; k++) in[u][k] = rfi_load<X, V>(a.x[k] + (FLAT ? p * V : at[u][k]));
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int64_t p = first + u * RFI_MAP_THREADS;
      if (p >= groups) break;
      float x[IN][V], y[OUT][V];
#pragma unroll
      for (int k = 0; k < IN; k++) rfi_widen(in[u][k], x[k]);
      f(p * V, x, y);
#pragma unroll
      for (int k = 0; k < OUT; k++) {
        const bool flat = FLAT || !F::strided_results;
        if (a.y[k]) rfi_store<Y, V>(a.y[k] + (flat ? p * V : at[u][flat ? 0 : IN + k]), y[k]);
      }
    }
  }
  if (V > 1 && FLAT && blockIdx.x == 0 && threadIdx.x < a.n % V) {
    const int64_t i = groups * V + threadIdx.x;
    float x[IN][1], y[OUT][1];
#pragma unroll
    for (int k = 0; k < IN; k++) x[k][0] = rfi_widen(a.x[k][i]);
    f(i, x, y);
#pragma unroll
    for (int k = 0; k < OUT; k++)
      if (a.y[k]) a.y[k][i] = rfi_narrow<Y>(y[k][0]);
  }
}

/* Enqueues f over the first IN operands and OUT results, which all have the first result's shape. */
template <typename X, typename Y, int IN, int OUT, class F>
static rfr_status rfi_map(const rfr_call *call, const char *name, F f) {
  constexpr int V = 16 / (int)(sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y)), U = IN == 1 ? 4 : 2;
  rfi_map_args<X, Y, IN, OUT> a;
  const rfr_arg *arg[IN + OUT];
  const void *base[IN + OUT];
  int size[IN + OUT];
  for (int k = 0; k < IN + OUT; k++) {
    arg[k] = k < IN ? &call->in[k] : &call->out[k - IN];
    base[k] = arg[k]->data;
    size[k] = k < IN ? (int)sizeof(X) : (int)sizeof(Y);
    if (k < IN) a.x[k] = (const X *)base[k];
    else a.y[k - IN] = (Y *)base[k];
  }
  a.n = rfi_elements(&call->out[0]);
  if (a.n == 0) return RFR_OK;
  rfi_strided_loop_init(&a.walk, IN + OUT, arg);
  cudaStream_t stream = rfi_stream(call);
  const unsigned grouped = rfi_grid(call, rfi_blocks(a.n, V), RFI_MAP_THREADS * U);
  if (!rfi_strided_loop_groups(&a.walk, V, IN + OUT, base, size)) {
    rfi_map_kernel<false, 1, U, F, X, Y, IN, OUT>
        <<<rfi_grid(call, a.n, RFI_MAP_THREADS * U), RFI_MAP_THREADS, 0, stream>>>(a, f);
  } else if (a.walk.rank == 1) {
    rfi_map_kernel<true, V, U, F, X, Y, IN, OUT><<<grouped, RFI_MAP_THREADS, 0, stream>>>(a, f);
  } else {
    rfi_strided_loop_by_groups(&a.walk, V);
    rfi_map_kernel<false, V, U, F, X, Y, IN, OUT><<<grouped, RFI_MAP_THREADS, 0, stream>>>(a, f);
  }
  return rfi_cuda_launched(name);
}

/* For ops that compute in f32: f64 is not supported, because it would silently lose precision. */
static inline int rfi_takes_floats(const rfr_call *call) {
  for (int k = 0; k < call->n_in + call->n_out; k++) {
    const rfr_type *t = k < call->n_in ? &call->in[k].type : &call->out[k - call->n_in].type;
    if (t->rank >= 0 && t->dtype == RFR_F64) return 0;
  }
  return 1;
}

#endif
