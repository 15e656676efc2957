/* SPDX-License-Identifier: Apache-2.0
 *
 * One element of a storage type that is known when the kernel runs: for kernels that support every combination of types
 * and need not be fast.
 */
#ifndef RFI_ANY_TYPE_CUH
#define RFI_ANY_TYPE_CUH

#include "backend/cuda/kernels.cuh"

static __device__ __forceinline__ float rfi_load(const void *data, rfr_dtype dtype, int64_t i) {
  switch (dtype) {
    case RFR_BF16: return rfi_widen(((const rfi_bf16 *)data)[i]);
    case RFR_F16: return rfi_widen(((const rfi_f16 *)data)[i]);
    default: return ((const float *)data)[i];
  }
}

static __device__ __forceinline__ void rfi_store(void *data, rfr_dtype dtype, int64_t i, float x) {
  switch (dtype) {
    case RFR_BF16: ((rfi_bf16 *)data)[i] = rfi_narrow<rfi_bf16>(x); break;
    case RFR_F16: ((rfi_f16 *)data)[i] = rfi_narrow<rfi_f16>(x); break;
    default: ((float *)data)[i] = x;
  }
}

#endif
