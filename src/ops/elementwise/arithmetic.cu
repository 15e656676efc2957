/* SPDX-License-Identifier: Apache-2.0
 *
 * add, accumulate, mul and scale on a GPU; memory-bound.
 *
 *   add  y = a + b      mul  y = a b      scale  y = x (by s), the factor in f64 and rounded once
 */
#include "ops/elementwise/map.cuh"

struct add_op : rfi_map_op {
  template <int V> __device__ void operator()(int64_t, const float (&x)[2][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v] + x[1][v];
  }
};

struct mul_op : rfi_map_op {
  template <int V> __device__ void operator()(int64_t, const float (&x)[2][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v] * x[1][v];
  }
};

struct scale_op : rfi_map_op {
  double by;
  const float *s; /* NULL: 1 */
  float factor;
  __device__ void begin() { factor = (float)(s ? by * (double)*s : by); }
  template <int V> __device__ void operator()(int64_t, const float (&x)[1][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v] * factor;
  }
};

static rfr_status run_add(const rfr_call *call) {
  rfr_status s = RFR_OK;
  RFI_WITH_FLOAT(call->out[0].type.dtype, T, s = rfi_map<T, T, 2, 1>(call, "add", add_op()));
  return s;
}
static rfr_status run_mul(const rfr_call *call) {
  rfr_status s = RFR_OK;
  RFI_WITH_FLOAT(call->out[0].type.dtype, T, s = rfi_map<T, T, 2, 1>(call, "mul", mul_op()));
  return s;
}
static rfr_status run_scale(const rfr_call *call) {
  rfr_status s = RFR_OK;
  const float *factor = call->n_in > 1 ? (const float *)call->in[1].data : NULL;
  const scale_op op = {{}, call->attr[0].f, factor, 0};
  RFI_WITH_FLOAT(call->out[0].type.dtype, T, s = rfi_map<T, T, 1, 1>(call, "scale", op));
  return s;
}

extern "C" const rfi_cuda_kernel RFI_CUDA(add) = {run_add, NULL, rfi_takes_floats};
/* in place: a thread reads its groups before it writes them, and no other thread touches them */
extern "C" const rfi_cuda_kernel RFI_CUDA(accumulate) = {run_add, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(mul) = {run_mul, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(scale) = {run_scale, NULL, rfi_takes_floats};
