/* SPDX-License-Identifier: Apache-2.0
 *
 * E4M3 on a GPU, with the bits of the CPU's conversions in vec.h.
 */
#ifndef RFI_E4M3_CUH
#define RFI_E4M3_CUH

#include "backend/cuda/kernels.cuh"

static __device__ __forceinline__ float rfi_e4m3_widen(uint8_t q) {
  const uint32_t sign = (uint32_t)(q & 0x80u) << 24, magnitude = q & 0x7Fu;
  const uint32_t finite = __float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f);
  return __uint_as_float(sign | (magnitude == 0x7Fu ? 0x7FC00000u : finite));
}

/* Rounds to nearest even; larger values, infinity too, become 448. */
static __device__ __forceinline__ uint8_t rfi_e4m3_narrow(float x) {
  const uint32_t u = __float_as_uint(x), sign = (u >> 24) & 0x80u, a = u & 0x7FFFFFFFu;
  const uint32_t normal = (a - 0x3C000000u + 0x7FFFFu + ((a >> 20) & 1u)) >> 20;
  const uint32_t subnormal = __float_as_uint(__uint_as_float(a) + 0x1p14f) - 0x46800000u;
  uint32_t r = a < 0x3C800000u ? subnormal : normal;
  r = r > 0x7Eu ? 0x7Eu : r;
  r = a > 0x7F800000u ? 0x7Fu : r;
  return (uint8_t)(sign | r);
}

#endif
