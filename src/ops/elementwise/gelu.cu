/* SPDX-License-Identifier: Apache-2.0
 *
 * gelu, softcap and their gradients on a GPU, by the formulas of activation_cpu.c:
 *
 *   gelu (erf)   y = x P(x), P the normal distribution;  dx = dy (P(x) + x p(x))
 *   gelu (tanh)  y = x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
 *   softcap      y = cap tanh(x / cap);  dx = dy (1 - y / cap) (1 + y / cap)
 *
 * s is the logistic function, computed as in activation.cu.
 */
#include "ops/elementwise/logistic.cuh"
#include "ops/elementwise/map.cuh"

/* ---- functions ---- */

/* Returns 2u and, in `slope`, its derivative. x is clamped to [-20, 20], because the logistic function is exactly 0 or
 * 1 beyond; so infinity is never multiplied by that 0. NaN stays NaN. */
static __device__ __forceinline__ float gelu_argument(float x, float *slope) {
  x = x > 20.0f ? 20.0f : x;
  x = x < -20.0f ? -20.0f : x;
  const float s = x * x;
  *slope = 1.59576912f + 0.214064385f * s;
  return x * (1.59576912f + 0.0713547950f * s);
}

/* ---- ops: T is the storage type ---- */

struct activation : rfi_map_op {
  void take(const rfr_call *) {} /* reads the attributes that the functor needs */
};

template <typename T, bool TANH> struct gelu_op : activation {
  static const char *name() { return "gelu"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[1][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) {
      const float a = x[0][v];
      float slope;
      y[0][v] = a * (TANH ? rfi_sigmoid<rfi_is_fast<T>>(gelu_argument(a, &slope)) : normcdff(a));
    }
  }
};

template <typename T, bool TANH> struct gelu_bwd_op : activation {
  static const char *name() { return "gelu_bwd"; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[2][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) {
      const float dy = x[0][v], a = x[1][v];
      float slope, rest;
      if (TANH) {
        const float s = rfi_sigmoids<rfi_is_fast<T>>(gelu_argument(a, &slope), &rest);
        y[0][v] = dy * (s + a * (s * rest) * slope);
      } else {
        y[0][v] = dy * (normcdff(a) + a * (0.398942280f * rfi_exponential<rfi_is_fast<T>>(-0.5f * a * a)));
      }
    }
  }
};

template <typename T> struct softcap_op : activation {
  static const char *name() { return "softcap"; }
  float cap;
  void take(const rfr_call *call) { cap = (float)call->attr[0].f; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[1][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = cap * tanhf(x[0][v] / cap);
  }
};

template <typename T> struct softcap_bwd_op : activation {
  static const char *name() { return "softcap_bwd"; }
  float cap;
  void take(const rfr_call *call) { cap = (float)call->attr[0].f; }
  template <int V> __device__ void operator()(int64_t, const float (&x)[2][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v] * ((1.0f - x[1][v] / cap) * (1.0f + x[1][v] / cap));
  }
};

/* ---- launchers ---- */

template <typename T> using gelu_erf = gelu_op<T, false>;
template <typename T> using gelu_tanh = gelu_op<T, true>;
template <typename T> using gelu_erf_bwd = gelu_bwd_op<T, false>;
template <typename T> using gelu_tanh_bwd = gelu_bwd_op<T, true>;

template <template <typename> class F, int IN, int OUT> static rfr_status run(const rfr_call *call) {
  rfr_status s = RFR_OK;
  RFI_WITH_FLOAT(call->out[0].type.dtype, T, {
    F<T> f;
    f.take(call);
    s = rfi_map<T, T, IN, OUT>(call, F<T>::name(), f);
  });
  return s;
}
static rfr_status run_gelu(const rfr_call *call) {
  return call->attr[0].i ? run<gelu_tanh, 1, 1>(call) : run<gelu_erf, 1, 1>(call);
}
static rfr_status run_gelu_bwd(const rfr_call *call) {
  return call->attr[0].i ? run<gelu_tanh_bwd, 2, 1>(call) : run<gelu_erf_bwd, 2, 1>(call);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(gelu) = {run_gelu, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(gelu_bwd) = {run_gelu_bwd, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(softcap) = {run<softcap_op, 1, 1>, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(softcap_bwd) = {run<softcap_bwd_op, 2, 1>, NULL, rfi_takes_floats};
