/* SPDX-License-Identifier: Apache-2.0
 *
 * swiglu_weighted and its gradients on a GPU, by the formulas of activation_cpu.c. One warp per row, because dweight
 * needs a sum over the row.
 *
 *   y = silu(gate) up weight[row]
 *   dgate = dy weight[row] up s (1 + gate (1 - s)),  dup = dy weight[row] silu(gate)
 *   dweight[row] = sum of dy silu(gate) up
 *
 * Each element is read and written once. A lane adds its groups of elements in f32, in order, then the warp adds its
 * lanes. The assignment of groups to lanes does not depend on strides and addresses, so neither do the results. The sum
 * may be wider than the operands, so its s is accurate for every type.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/elementwise/halves.h"
#include "ops/elementwise/logistic.cuh"
#include "ops/elementwise/map.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES };
enum { PARTS = 3 }; /* groups of a row in flight at once: all of an expert's 768 columns in 16 bits */

struct weighted_args {
  const void *dy, *gate, *up, *weight;     /* forward: no dy */
  void *y, *dgate, *dup, *dweight;         /* NULL: unused, or not a result of this op; backward: y is h */
  int64_t dy_row, gate_row, up_row, d_row; /* row strides in elements */
  int64_t rows, columns;
  rfr_dtype weight_type;
};

/* The group of a row that begins at element j. ALIGNED: groups do not cross the row's end and are aligned to 16
 * bytes. */
template <typename X, bool ALIGNED, int V = rfi_pack_width<X>>
static __device__ __forceinline__ rfi_group<X, V> take(const X *row, int64_t j, int64_t columns) {
  if constexpr (ALIGNED) {
    return rfi_load<X, V>(row + j);
  } else {
    rfi_group<X, V> g;
#pragma unroll
    for (int v = 0; v < V; v++) g.part[0].x[v] = j + v < columns ? row[j + v] : rfi_narrow<X>(0.0f);
    return g;
  }
}
template <typename X, bool ALIGNED, int V>
static __device__ __forceinline__ void give(X *row, int64_t j, int64_t columns, const float (&x)[V]) {
  if constexpr (ALIGNED) {
    rfi_store<X, V>(row + j, x);
  } else {
#pragma unroll
    for (int v = 0; v < V; v++)
      if (j + v < columns) row[j + v] = rfi_narrow<X>(x[v]);
  }
}

template <typename X, bool ALIGNED>
static __global__ void __launch_bounds__(THREADS, 4) weighted(const __grid_constant__ weighted_args a) {
  constexpr int V = rfi_pack_width<X>;
  const int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES, columns = a.columns;
  if (r >= a.rows) return;
  const X *gate = (const X *)a.gate + r * a.gate_row, *up = (const X *)a.up + r * a.up_row;
  const float weight = rfi_load(a.weight, a.weight_type, r);
  for (int64_t first = threadIdx.x % LANES * V; first < columns; first += LANES * V * PARTS) {
    rfi_group<X, V> in[PARTS][2];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const int64_t beyond = first + p * (LANES * V), j = beyond < columns ? beyond : first;
      in[p][0] = take<X, ALIGNED>(gate, j, columns);
      in[p][1] = take<X, ALIGNED>(up, j, columns);
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const int64_t j = first + p * (LANES * V);
      if (j >= columns) break;
      float g[V], u[V], y[V];
      rfi_widen(in[p][0], g);
      rfi_widen(in[p][1], u);
#pragma unroll
      for (int v = 0; v < V; v++) y[v] = rfi_swiglu<X>(g[v], u[v], weight);
      give<X, ALIGNED>((X *)a.y + r * a.d_row, j, columns, y);
    }
  }
}

/* H: also computes h, which may overwrite dy. */
template <typename X, bool ALIGNED, bool H>
static __global__ void __launch_bounds__(THREADS, 3) weighted_bwd(const __grid_constant__ weighted_args a) {
  constexpr int V = rfi_pack_width<X>;
  const int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES, columns = a.columns;
  if (r >= a.rows) return;
  const X *dy = (const X *)a.dy + r * a.dy_row, *gate = (const X *)a.gate + r * a.gate_row,
          *up = (const X *)a.up + r * a.up_row;
  const float weight = rfi_load(a.weight, a.weight_type, r);
  float sum = 0;
  for (int64_t first = threadIdx.x % LANES * V; first < columns; first += LANES * V * PARTS) {
    rfi_group<X, V> in[PARTS][3];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const int64_t beyond = first + p * (LANES * V), j = beyond < columns ? beyond : first;
      in[p][0] = take<X, ALIGNED>(dy, j, columns);
      in[p][1] = take<X, ALIGNED>(gate, j, columns);
      in[p][2] = take<X, ALIGNED>(up, j, columns);
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const int64_t j = first + p * (LANES * V);
      if (j >= columns) break;
      float d[V], g[V], u[V], dgate[V], dup[V];
      rfi_widen(in[p][0], d);
      rfi_widen(in[p][1], g);
      rfi_widen(in[p][2], u);
#pragma unroll
      for (int v = 0; v < V; v++) {
        float rest;
        const float s = rfi_logistic(g[v], &rest), silu = g[v] * s, dw = d[v] * weight;
        dgate[v] = dw * u[v] * (s + silu * rest);
        dup[v] = dw * silu;
        sum += d[v] * (silu * u[v]);
      }
      if (a.dgate) give<X, ALIGNED>((X *)a.dgate + r * a.d_row, j, columns, dgate);
      if (a.dup) give<X, ALIGNED>((X *)a.dup + r * a.d_row, j, columns, dup);
      if constexpr (H) {
#pragma unroll
        for (int v = 0; v < V; v++) d[v] = rfi_swiglu<X>(g[v], u[v], weight);
        give<X, ALIGNED>((X *)a.y + r * columns, j, columns, d);
      }
    }
  }
  if (!a.dweight) return;
  sum = rfi_warp_sum(sum);
  if (threadIdx.x % LANES == 0) rfi_store(a.dweight, a.weight_type, r, sum);
}

/* ---- launches ---- */

/* Whether all rows of X consist of aligned groups. */
template <typename X> static bool is_aligned(const weighted_args &a) {
  const uintptr_t base =
      (uintptr_t)a.dy | (uintptr_t)a.gate | (uintptr_t)a.up | (uintptr_t)a.y | (uintptr_t)a.dgate | (uintptr_t)a.dup;
  const int64_t row = a.dy_row | a.gate_row | a.up_row | a.d_row | a.columns;
  return base % 16 == 0 && row % rfi_pack_width<X> == 0;
}

/* Fills in gate, up and weight. */
static weighted_args args_of(const rfr_arg *gate) {
  weighted_args a = {};
  a.gate = gate[0].data, a.gate_row = gate[0].stride[0];
  a.up = gate[1].data, a.up_row = gate[1].stride[0];
  a.weight = gate[2].data, a.weight_type = gate[2].type.dtype;
  a.rows = gate[0].type.shape[0], a.columns = gate[0].type.shape[1];
  return a;
}

template <typename X> static void launch(const rfr_call *call, const weighted_args &a) {
  const unsigned grid = (unsigned)rfi_blocks(a.rows, WARPS);
  if (is_aligned<X>(a)) weighted<X, true><<<grid, THREADS, 0, rfi_stream(call)>>>(a);
  else weighted<X, false><<<grid, THREADS, 0, rfi_stream(call)>>>(a);
}
static rfr_status run_weighted(const rfr_call *call) {
  weighted_args a = args_of(&call->in[0]);
  a.y = call->out[0].data, a.d_row = a.columns;
  if (a.rows == 0 || a.columns == 0) return RFR_OK;
  RFI_WITH_FLOAT(call->in[0].type.dtype, X, launch<X>(call, a));
  return rfi_cuda_launched("swiglu_weighted");
}

template <typename X, bool H> static void launch_bwd(const rfr_call *call, const weighted_args &a) {
  const unsigned grid = (unsigned)rfi_blocks(a.rows, WARPS);
  if (is_aligned<X>(a)) weighted_bwd<X, true, H><<<grid, THREADS, 0, rfi_stream(call)>>>(a);
  else weighted_bwd<X, false, H><<<grid, THREADS, 0, rfi_stream(call)>>>(a);
}
static rfr_status run_rows(const rfr_call *call, int64_t d_row) {
  weighted_args a = args_of(&call->in[1]);
  a.dy = call->in[0].data, a.dy_row = call->in[0].stride[0];
  a.dweight = call->out[0].data, a.dgate = call->out[1].data, a.dup = call->out[2].data, a.d_row = d_row;
  if (a.rows == 0) return RFR_OK; /* rows without columns still have sums */
  if (call->n_out == 4) a.y = call->out[3].data;
  RFI_WITH_FLOAT(call->in[0].type.dtype, X, {
    if (a.y) launch_bwd<X, true>(call, a);
    else launch_bwd<X, false>(call, a);
  });
  return rfi_cuda_launched("swiglu_weighted_bwd");
}
static rfr_status run_weighted_bwd(const rfr_call *call) { return run_rows(call, call->in[0].type.shape[1]); }
static rfr_status run_weighted_bwd_packed(const rfr_call *call) {
  rfr_arg out[RFI_HALVES_MOST];
  const rfr_call halves = rfi_swiglu_halves(call, 1, out);
  return run_rows(&halves, 2 * call->in[0].type.shape[1]);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_weighted) = {run_weighted, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_weighted_bwd) = {run_weighted_bwd, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_weighted_bwd_packed) = {run_weighted_bwd_packed, NULL,
                                                                         rfi_takes_floats};
