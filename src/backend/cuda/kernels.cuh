/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by kernels: storage types read as f32, sums over warps and blocks in a fixed order,
 * and the choice of a template by storage type.
 *
 * All arithmetic is in f32 (f64 where the CPU's kernel uses it), with one rounding into the
 * result's type. No float atomics: results are bitwise reproducible.
 */
#ifndef RFI_KERNELS_CUH
#define RFI_KERNELS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "backend/cuda/cuda.h"

typedef __nv_bfloat16 rfi_bf16;
typedef __half rfi_f16;

static __device__ __forceinline__ float rfi_widen(float x) { return x; }
static __device__ __forceinline__ float rfi_widen(rfi_bf16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ float rfi_widen(rfi_f16 x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T rfi_narrow(float x);
template <> __device__ __forceinline__ float rfi_narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ rfi_bf16 rfi_narrow<rfi_bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ rfi_f16 rfi_narrow<rfi_f16>(float x) { return __float2half_rn(x); }

/* N elements that are loaded or stored at once; a thread moves at most 16 bytes at a time. */
template <typename T, int N> struct __align__(sizeof(T) * N) rfi_pack { T x[N]; };
template <typename T> constexpr int rfi_pack_width = 16 / (int)sizeof(T);

/* Stores to global memory with one instruction. The compiler would split an assignment, down to 16-bit stores where it
 * cannot combine the addresses. */
template <typename T, int N>
static __device__ __forceinline__ void rfi_put(rfi_pack<T, N> *to, const rfi_pack<T, N> &p) {
  constexpr int words = (int)sizeof p / 4;
  if constexpr (words == 2 || words == 4) {
    uint32_t w[words];
    __builtin_memcpy(w, &p, sizeof p);
    if constexpr (words == 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                   : "memory");
    else asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
    *to = p;
  }
}

/* 2^x within 2 units in the last place; results below 2^-126 are 0. */
static __device__ __forceinline__ float rfi_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* A butterfly reduction: every warp adds in the same order, and all lanes get the sum. */
static __device__ __forceinline__ float rfi_warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
static __device__ __forceinline__ float rfi_warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

/* Sum over a block of up to 1024 threads (a multiple of 32); every thread gets the result. May be called again
 * immediately. */
static __device__ __forceinline__ float rfi_block_sum(float x) {
  __shared__ float part[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x = rfi_warp_sum(x);
  __syncthreads();
  if (lane == 0) part[warp] = x;
  __syncthreads();
  return rfi_warp_sum(lane < warps ? part[lane] : 0.0f);
}
static __device__ __forceinline__ float rfi_block_max(float x) {
  __shared__ float part[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x = rfi_warp_max(x);
  __syncthreads();
  if (lane == 0) part[warp] = x;
  __syncthreads();
  return rfi_warp_max(lane < warps ? part[lane] : -INFINITY);
}

/* Runs the statement with T as the storage type of `dtype`; the op's shape rule has refused all other types. */
#define RFI_WITH_FLOAT(dtype, T, ...) \
  switch (dtype) {                    \
    case RFR_F32: {                   \
      using T = float;                \
      __VA_ARGS__;                    \
    } break;                          \
    case RFR_BF16: {                  \
      using T = rfi_bf16;             \
      __VA_ARGS__;                    \
    } break;                          \
    case RFR_F16: {                   \
      using T = rfi_f16;              \
      __VA_ARGS__;                    \
    } break;                          \
    default: break;                   \
  }

static inline int64_t rfi_elements(const rfr_arg *x) {
  int64_t n = 1;
  for (int d = 0; d < x->type.rank; d++) n *= x->type.shape[d];
  return n;
}
/* Bytes of a byte-addressable element. */
static inline int rfi_element_bytes(rfr_dtype dtype) {
  switch (dtype) {
    case RFR_F64:
    case RFR_I64: return 8;
    case RFR_F32:
    case RFR_I32: return 4;
    case RFR_BF16:
    case RFR_F16: return 2;
    default: return 1;
  }
}
static inline int64_t rfi_blocks(int64_t n, int64_t per_block) { return (n + per_block - 1) / per_block; }
static inline cudaStream_t rfi_stream(const rfr_call *call) { return (cudaStream_t)call->stream; }

#endif
