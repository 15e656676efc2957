/* SPDX-License-Identifier: Apache-2.0
 *
 * The logistic function and SwiGLU. The op and a GEMM that applies it use these functions, so both are bitwise equal.
 */
#ifndef RFI_LOGISTIC_CUH
#define RFI_LOGISTIC_CUH

#include "backend/cuda/kernels.cuh"

/* The logistic function of x and, in `rest`, of -x. 1 + e is between 1 and 2, where one Newton step makes the
 * approximate reciprocal as accurate as a division. */
static __device__ __forceinline__ float rfi_logistic(float x, float *rest) {
  const float e = expf(-fabsf(x)), n = 1.0f + e;
  float large;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(large) : "f"(n));
  large = fmaf(large, fmaf(-n, large, 1.0f), large);
  const float small = e * large;
  *rest = x < 0 ? large : small;
  return x < 0 ? small : large;
}

/* ---- elementwise ops ---- */

/* T is the storage type. For results narrower than f32, exp and division are the hardware's approximations. */
template <typename T> constexpr bool rfi_is_fast = sizeof(T) < sizeof(float);

template <bool FAST> static __device__ __forceinline__ float rfi_exponential(float x) {
  return FAST ? __expf(x) : expf(x);
}
template <bool FAST> static __device__ __forceinline__ float rfi_inverse(float x) {
  return FAST ? __fdividef(1.0f, x) : 1.0f / x;
}
template <bool FAST> static __device__ __forceinline__ float rfi_sigmoid(float x) {
  return rfi_inverse<FAST>(1.0f + rfi_exponential<FAST>(-x));
}
/* The logistic function of x and, in `rest`, of -x. Both are computed from e^(-|x|), neither by a subtraction. */
template <bool FAST> static __device__ __forceinline__ float rfi_sigmoids(float x, float *rest) {
  const float e = rfi_exponential<FAST>(-fabsf(x)), large = rfi_inverse<FAST>(1.0f + e), small = e * large;
  *rest = x < 0 ? large : small;
  return x < 0 ? small : large;
}

template <typename T> static __device__ __forceinline__ float rfi_swiglu(float gate, float up) {
  return gate * rfi_sigmoid<rfi_is_fast<T>>(gate) * up;
}
template <typename T>
static __device__ __forceinline__ void rfi_swiglu_bwd(float dy, float gate, float up, float *dgate, float *dup) {
  float rest;
  const float s = rfi_sigmoids<rfi_is_fast<T>>(gate, &rest);
  *dgate = dy * up * (s + s * gate * rest);
  *dup = dy * gate * s;
}

/* ---- in a GEMM ---- */

/* SwiGLU of a row with a weight. T is the storage type: if it is narrower than f32, exp and division are the hardware's
 * approximations, whose error is a thousandth of the rounding that follows. */
template <typename T> static __device__ __forceinline__ float rfi_swiglu(float gate, float up, float weight) {
  float s, rest;
  if constexpr (sizeof(T) < sizeof(float)) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(gate * -1.4426950216f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + s));
  } else {
    s = rfi_logistic(gate, &rest);
  }
  return gate * s * up * weight;
}

#endif
