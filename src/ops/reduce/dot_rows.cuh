/* SPDX-License-Identifier: Apache-2.0
 *
 * Dot products of pairs of rows on a GPU, a warp each: to[i] = a's row . b's row, for the rows that a functor returns
 * for i, or 0 if it returns none. A lane adds every 32nd group of elements in f32, then a butterfly adds the lanes.
 */
#ifndef RFI_DOT_ROWS_CUH
#define RFI_DOT_ROWS_CUH

#include "backend/cuda/any_type.cuh"
#include "ops/elementwise/map.cuh"

enum { RFI_DOT_THREADS = 256, RFI_DOT_WARPS = RFI_DOT_THREADS / 32, RFI_DOT_GROUP = 8 };

struct rfi_dot_args {
  const void *a, *b;
  int64_t a_row, b_row, columns, n; /* row strides in elements */
  void *to;
  rfr_dtype dtype;
};

/* find(i, &row of a, &row of b) returns false if the result is 0. */
template <typename A, typename B, int V, class FIND>
static __global__ void __launch_bounds__(RFI_DOT_THREADS)
    rfi_dot_rows_kernel(const __grid_constant__ rfi_dot_args x, const FIND find) {
  const int64_t i = (int64_t)blockIdx.x * RFI_DOT_WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  int64_t a_row, b_row;
  float sum = 0;
  if (i >= x.n) return;
  if (find(i, &a_row, &b_row)) {
    const A *a = (const A *)x.a + a_row * x.a_row;
    const B *b = (const B *)x.b + b_row * x.b_row;
#pragma unroll 4
    for (int64_t j = lane * V; j < x.columns; j += 32 * V) {
      float p[V], q[V];
      rfi_widen(rfi_load<A, V>(a + j), p);
      rfi_widen(rfi_load<B, V>(b + j), q);
#pragma unroll
      for (int v = 0; v < V; v++) sum += p[v] * q[v];
    }
  }
  sum = rfi_warp_sum(sum);
  if (lane == 0) rfi_store(x.to, x.dtype, i, sum);
}

template <typename A, typename B, class FIND>
static void rfi_dot_rows_of(const rfr_call *call, const rfi_dot_args &x, const FIND &find) {
  constexpr int V = RFI_DOT_GROUP;
  const unsigned grid = (unsigned)rfi_blocks(x.n, RFI_DOT_WARPS);
  const uint64_t all = (uintptr_t)x.a | (uintptr_t)x.b | (uint64_t)(x.a_row * (int64_t)sizeof(A)) |
                       (uint64_t)(x.b_row * (int64_t)sizeof(B));
  if (all % 16 == 0 && x.columns % V == 0)
    rfi_dot_rows_kernel<A, B, V, FIND><<<grid, RFI_DOT_THREADS, 0, rfi_stream(call)>>>(x, find);
  else rfi_dot_rows_kernel<A, B, 1, FIND><<<grid, RFI_DOT_THREADS, 0, rfi_stream(call)>>>(x, find);
}

/* Enqueues out[0][i] for all i, from rows of operands a and b. */
template <class FIND> static rfr_status rfi_dot_rows(const rfr_call *call, int a, int b, const FIND &find) {
  const rfr_arg *p = &call->in[a], *q = &call->in[b], *y = &call->out[0];
  const rfi_dot_args x = {p->data,          q->data,         p->stride[0], q->stride[0],
                          p->type.shape[1], rfi_elements(y), y->data,      y->type.dtype};
  if (x.n == 0) return RFR_OK;
  RFI_WITH_FLOAT(p->type.dtype, A, RFI_WITH_FLOAT(q->type.dtype, B, rfi_dot_rows_of<A, B>(call, x, find)));
  return rfi_cuda_launched("dot_rows");
}

#endif
