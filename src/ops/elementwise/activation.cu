/* SPDX-License-Identifier: Apache-2.0
 *
 * silu, swiglu and their gradients on a GPU, by the formulas of activation_cpu.c; gelu.cu has the other activations:
 *
 *   silu         y = x s(x);  dx = dy s (1 + x (1 - s))
 *   swiglu       y = silu(gate) up
 *
 * s is the logistic function: one exp and one division. For results narrower than f32 both are the hardware's
 * approximations, whose error is a thousandth of the rounding that follows; with the accurate ones the kernel would be
 * compute-bound.
 */
#include "ops/elementwise/halves.h"
#include "ops/elementwise/logistic.cuh"
#include "ops/elementwise/map.cuh"

/* ---- ops: T is the storage type ---- */

template <typename T> struct silu_op : rfi_map_op {
  static const char *name() { return "silu"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[1][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v] * rfi_sigmoid<rfi_is_fast<T>>(x[0][v]);
  }
};

template <typename T> struct silu_bwd_op : rfi_map_op {
  static const char *name() { return "silu_bwd"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[2][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) {
      float rest;
      const float a = x[1][v], s = rfi_sigmoids<rfi_is_fast<T>>(a, &rest);
      y[0][v] = x[0][v] * (s + s * a * rest);
    }
  }
};

template <typename T> struct swiglu_op : rfi_map_op {
  static const char *name() { return "swiglu"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[2][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = rfi_swiglu<T>(x[0][v], x[1][v]);
  }
};

template <typename T> struct swiglu_bwd_op : rfi_map_op {
  static const char *name() { return "swiglu_bwd"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[3][V], float (&y)[2][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) rfi_swiglu_bwd<T>(x[0][v], x[1][v], x[2][v], &y[0][v], &y[1][v]);
  }
};

/* Also computes h, by the formula of the forward, so that the bits are equal. */
template <typename T> struct swiglu_bwd_h_op : rfi_map_op {
  static const char *name() { return "swiglu_bwd"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[3][V], float (&y)[3][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) {
      rfi_swiglu_bwd<T>(x[0][v], x[1][v], x[2][v], &y[0][v], &y[1][v]);
      y[2][v] = rfi_swiglu<T>(x[1][v], x[2][v]);
    }
  }
};

template <typename T> struct swiglu_bwd_halves_h_op : swiglu_bwd_h_op<T> {
  static constexpr bool strided_results = true;
};
template <typename T> struct swiglu_bwd_halves_op : swiglu_bwd_op<T> { static constexpr bool strided_results = true; };

/* ---- launchers ---- */

template <template <typename> class F, int IN, int OUT> static rfr_status run(const rfr_call *call) {
  rfr_status s = RFR_OK;
  RFI_WITH_FLOAT(call->out[0].type.dtype, T, { s = rfi_map<T, T, IN, OUT>(call, F<T>::name(), F<T>{}); });
  return s;
}
static bool has_h(const rfr_call *call) { return call->n_out == 3 && call->out[2].data; }
static rfr_status run_swiglu_bwd(const rfr_call *call) {
  return has_h(call) ? run<swiglu_bwd_h_op, 3, 3>(call) : run<swiglu_bwd_op, 3, 2>(call);
}
static rfr_status run_swiglu_bwd_packed(const rfr_call *call) {
  rfr_arg out[RFI_HALVES_MOST];
  const rfr_call halves = rfi_swiglu_halves(call, 0, out);
  return has_h(&halves) ? run<swiglu_bwd_halves_h_op, 3, 3>(&halves) : run<swiglu_bwd_halves_op, 3, 2>(&halves);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(silu) = {run<silu_op, 1, 1>, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(silu_bwd) = {run<silu_bwd_op, 2, 1>, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu) = {run<swiglu_op, 2, 1>, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_bwd) = {run_swiglu_bwd, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(swiglu_bwd_packed) = {run_swiglu_bwd_packed, NULL, rfi_takes_floats};
