/* SPDX-License-Identifier: Apache-2.0
 *
 * dequantize on a GPU, limited by memory bandwidth: y = number of the code * scale, bitwise equal to the CPU.
 *
 * A thread computes 16 adjacent elements: one load of 8 bytes (nf4) or 16 bytes of codes, one scale, and stores of 16
 * bytes. Blocks of 64 and 256 elements begin at multiples of 16, so the 16 elements share a scale; rows of int8 may
 * not. The maps are in shared memory; NF4's is repeated for every lane, because lanes that read different words of
 * one bank wait for each other.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/quant/formats.h"
#include "ops/quant/scaling.h"

static __constant__ float nf4_map[16] = {
#include "ops/quant/nf4.def"
};
static __device__ const float signed_map[256] = {
#include "ops/quant/dynamic_signed.def"
};
static __device__ const float unsigned_map[256] = {
#include "ops/quant/dynamic_unsigned.def"
};

enum { THREADS = 256, EACH = 16, PER_SM = 8, LANES = 32 };

struct problem {
  const uint8_t *x;
  void *y;
  rfi_quant_layout layout;
};

/* Decodes EACH elements from i on, fewer at the end of the tensor. */
template <typename T> static __device__ __forceinline__ void put(T *y, const float (&v)[EACH], int64_t i, int64_t n) {
  constexpr int P = rfi_pack_width<T>;
  if (i + EACH <= n) {
#pragma unroll
    for (int k = 0; k < EACH; k += P) {
      rfi_pack<T, P> p;
#pragma unroll
      for (int j = 0; j < P; j++) p.x[j] = rfi_narrow<T>(v[k + j]);
      rfi_put((rfi_pack<T, P> *)(y + i + k), p);
    }
  } else {
    for (int k = 0; i + k < n; k++) y[i + k] = rfi_narrow<T>(v[k]);
  }
}

static __device__ __forceinline__ float f32_at(const uint8_t *x, int64_t at, int64_t i) {
  return ((const float *)(x + at))[i];
}

template <typename T> static __global__ void __launch_bounds__(THREADS) nf4(const __grid_constant__ problem p) {
  __shared__ float map[16 * LANES], scale_map[256];
  const rfi_quant_layout &l = p.layout;
  for (int i = threadIdx.x; i < 16 * LANES; i += THREADS) map[i] = nf4_map[i / LANES];
  for (int i = threadIdx.x; i < 256; i += THREADS) scale_map[i] = signed_map[i];
  __syncthreads();
  const float offset = f32_at(p.x, l.nested_at, (l.scales + RFI_NESTED - 1) / RFI_NESTED);
  const float *own = map + (threadIdx.x & (LANES - 1));
  const int64_t step = (int64_t)gridDim.x * THREADS * EACH;
  for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EACH; i < l.n; i += step) {
    const int64_t block = i / RFI_NF4_BLOCK;
    const uint2 code = *(const uint2 *)(p.x + i / 2); /* the section of codes ends at a multiple of 16 */
    const float nested = f32_at(p.x, l.nested_at, block / RFI_NESTED);
    const float scale = __fadd_rn(__fmul_rn(scale_map[p.x[l.scales_at + block]], nested), offset);
    float v[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const uint32_t word = k < 8 ? code.x : code.y;
      const int shift = (k % 8 / 2) * 8 + (k % 2 ? 0 : 4); /* the first code of a byte has the high bits */
      v[k] = __fmul_rn(own[(word >> shift & 15) * LANES], scale);
    }
    put((T *)p.y, v, i, l.n);
  }
}

/* The 8-bit formats. */
template <typename T, rfr_quant F>
static __global__ void __launch_bounds__(THREADS) bytes(const __grid_constant__ problem p) {
  __shared__ float map[256];
  const rfi_quant_layout &l = p.layout;
  if (F == RFR_QUANT_DYNAMIC8 || F == RFR_QUANT_DYNAMIC8U) {
    for (int i = threadIdx.x; i < 256; i += THREADS) map[i] = F == RFR_QUANT_DYNAMIC8 ? signed_map[i] : unsigned_map[i];
    __syncthreads();
  }
  const int64_t step = (int64_t)gridDim.x * THREADS * EACH;
  for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EACH; i < l.n; i += step) {
    const rfi_pack<uint8_t, EACH> code = *(const rfi_pack<uint8_t, EACH> *)(p.x + i);
    float v[EACH];
    int64_t block = i / l.block, left = (block + 1) * l.block - i;
    float scale = f32_at(p.x, l.scales_at, block);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      if (k >= left && i + k < l.n) {
        block = (i + k) / l.block;
        left = (block + 1) * l.block - i;
        scale = f32_at(p.x, l.scales_at, block);
      }
      v[k] = F == RFR_QUANT_INT8  ? __fmul_rn(__fmul_rn((float)(int8_t)code.x[k], scale), RFI_INT8_STEP)
             : F == RFR_QUANT_FP8 ? __fmul_rn(rfi_e4m3_widen(code.x[k]), scale)
                                  : __fmul_rn(map[code.x[k]], scale);
    }
    put((T *)p.y, v, i, l.n);
  }
}

template <typename T> static void launch(const rfr_call *c, rfr_quant format, const problem &p) {
  const int64_t most = (int64_t)rfi_cuda_info_of(c)->sms * PER_SM, need = rfi_blocks(p.layout.n, THREADS * EACH);
  const unsigned blocks = (unsigned)(need < most ? need : most);
  if (blocks == 0) return;
  switch (format) {
    case RFR_QUANT_NF4: nf4<T><<<blocks, THREADS, 0, rfi_stream(c)>>>(p); break;
    case RFR_QUANT_INT8: bytes<T, RFR_QUANT_INT8><<<blocks, THREADS, 0, rfi_stream(c)>>>(p); break;
    case RFR_QUANT_FP8: bytes<T, RFR_QUANT_FP8><<<blocks, THREADS, 0, rfi_stream(c)>>>(p); break;
    case RFR_QUANT_DYNAMIC8: bytes<T, RFR_QUANT_DYNAMIC8><<<blocks, THREADS, 0, rfi_stream(c)>>>(p); break;
    default: bytes<T, RFR_QUANT_DYNAMIC8U><<<blocks, THREADS, 0, rfi_stream(c)>>>(p);
  }
}

static rfr_status run(const rfr_call *c) {
  const rfr_arg *x = &c->in[0], *y = &c->out[0];
  const rfr_quant format = (rfr_quant)c->attr[0].i;
  const problem p = {(const uint8_t *)x->data, y->data, rfi_quant_layout_for(format, y->type.rank, y->type.shape)};
  RFI_WITH_FLOAT(y->type.dtype, T, launch<T>(c, format, p))
  return rfi_cuda_launched("dequantize");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(dequantize) = {run, NULL};
