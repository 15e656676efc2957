/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of the quantizers, once for the CPU and for GPUs: an element to and from 8 or 4 bits, and a scale from
 * a largest magnitude. Every function is a chain of IEEE f32 operations, so both are bitwise equal.
 *
 * A largest magnitude is compared as a bit pattern, which has the order of the numbers, with NaN above all. So NaN
 * needs no special case, and the maximum does not depend on the order of the elements.
 */
#ifndef RFI_SCALING_H
#define RFI_SCALING_H

#include <stdint.h>
#include <string.h>

#include "core/rng.h"
#include "refrain/ops.h"

#ifdef __CUDACC__
#define RFI_SCALING static __host__ __device__ __forceinline__
#else
#define RFI_SCALING static inline
#endif

enum { RFI_TENSOR_BLOCK = 128, RFI_HADAMARD = 16, RFI_F32_INFINITE = 0x7F800000, RFI_F32_LARGEST = 0x7F7FFFFF };

typedef struct rfi_scaling_info {
  int block, rows; /* elements of a scale along a row, rows of a scale; tensor: 0 */
  rfr_dtype scale; /* type of a scale */
} rfi_scaling_info;

RFI_SCALING rfi_scaling_info rfi_scaling_info_of(int64_t scaling) {
  switch (scaling) {
#define RFI_SCALING_CASE(e, name, block, rows, scale) \
  case e: {                                           \
    const rfi_scaling_info i = {block, rows, scale};  \
    return i;                                         \
  }
    RFR_SCALINGS(RFI_SCALING_CASE)
#undef RFI_SCALING_CASE
    default: {
      const rfi_scaling_info none = {0, 0, RFR_F32};
      return none;
    }
  }
}

RFI_SCALING int64_t rfi_blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }

/* ---- bits ---- */

RFI_SCALING uint32_t rfi_pattern(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
RFI_SCALING float rfi_number(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
RFI_SCALING uint32_t rfi_magnitude(float x) { return rfi_pattern(x) & 0x7FFFFFFFu; }

RFI_SCALING float rfi_to_bf16(float x) {
  const uint32_t u = rfi_pattern(x);
  return rfi_magnitude(x) > 0x7F800000u ? x : rfi_number((u + 0x7FFFu + (u >> 16 & 1u)) & 0xFFFF0000u);
}

/* ---- elements ---- */

/* E4M3: 4 exponent bits with bias 7, 3 bits of mantissa, no infinity; largest 448 (0x7E), NaN 0x7F. */
RFI_SCALING float rfi_e4m3_widen(uint8_t q) {
  const uint32_t sign = (uint32_t)(q & 0x80u) << 24, magnitude = q & 0x7Fu;
  const uint32_t finite = rfi_pattern(rfi_number(magnitude << 20) * 0x1p120f);
  return rfi_number(sign | (magnitude == 0x7Fu ? 0x7FC00000u : finite));
}
/* The code of a magnitude's pattern. Rounds to nearest even; larger values, infinity too, become 448. A normal number
 * is rebiased and rounded; for a subnormal one the addition of a power of two rounds. */
RFI_SCALING uint32_t rfi_e4m3_code(uint32_t a) {
  const uint32_t normal = (a - 0x3C000000u + 0x7FFFFu + ((a >> 20) & 1u)) >> 20;
  const uint32_t subnormal = rfi_pattern(rfi_number(a) + 0x1p14f) - 0x46800000u;
  uint32_t r = a < 0x3C800000u ? subnormal : normal;
  r = r > 0x7Eu ? 0x7Eu : r;
  return a > 0x7F800000u ? 0x7Fu : r;
}

/* E5M2: the upper half of an f16; largest 57344 (0x7B). Rounding never gives infinity; NaN becomes 0x7E. */
RFI_SCALING float rfi_e5m2_widen(uint8_t q) {
  const uint32_t sign = (uint32_t)(q & 0x80u) << 24, magnitude = q & 0x7Fu;
  const uint32_t finite = rfi_pattern(rfi_number(magnitude << 21) * 0x1p112f);
  const uint32_t special = magnitude == 0x7Cu ? 0x7F800000u : 0x7FC00000u;
  return rfi_number(sign | (magnitude >= 0x7Cu ? special : finite));
}
RFI_SCALING uint32_t rfi_e5m2_code(uint32_t a) {
  const uint32_t normal = (a - 0x38000000u + 0xFFFFFu + ((a >> 21) & 1u)) >> 21;
  const uint32_t subnormal = rfi_pattern(rfi_number(a) + 0x1p7f) - 0x43000000u;
  uint32_t r = a < 0x38800000u ? subnormal : normal;
  r = r > 0x7Bu ? 0x7Bu : r;
  return a > 0x7F800000u ? 0x7Eu : r;
}

/* x * by in 8 bits, by > 0 or NaN. The result has the sign of x even if it is NaN: devices differ in the sign of a NaN
 * product. */
RFI_SCALING uint8_t rfi_e4m3_encode(float x, float by) {
  return (uint8_t)((rfi_pattern(x) >> 24 & 0x80u) | rfi_e4m3_code(rfi_magnitude(x * by)));
}
RFI_SCALING uint8_t rfi_e5m2_encode(float x, float by) {
  return (uint8_t)((rfi_pattern(x) >> 24 & 0x80u) | rfi_e5m2_code(rfi_magnitude(x * by)));
}

/* E2M1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. */
RFI_SCALING float rfi_e2m1_widen(uint8_t q) {
  const uint32_t m = q & 7u, sign = (uint32_t)(q & 8u) << 28;
  const uint32_t finite = m < 2 ? (m ? 0x3F000000u : 0) : 0x3F800000u + ((m - 2u) << 22);
  return rfi_number(sign | finite);
}
/* Rounds to nearest, ties to the even code; larger values become 6, and NaN the positive 6. */
RFI_SCALING uint8_t rfi_e2m1_narrow(float x) {
  const uint32_t u = rfi_pattern(x);
  const float a = rfi_number(u & 0x7FFFFFFFu);
  const unsigned r = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return (uint8_t)(a != a ? 7u : (u >> 28 & 8u) | r);
}
/* Rounds up with a probability equal to the distance from the lower number: adds random / 256 of a step to |x| and
 * truncates. */
RFI_SCALING uint8_t rfi_e2m1_narrow_random(float x, uint32_t random) {
  const uint32_t u = rfi_pattern(x);
  const float a = rfi_number(u & 0x7FFFFFFFu);
  const float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f, t = a + (float)(random & 255u) * 0.00390625f * step;
  const unsigned r = (t >= 0.5f) + (t >= 1.0f) + (t >= 1.5f) + (t >= 2.0f) + (t >= 3.0f) + (t >= 4.0f) + (t >= 6.0f);
  return (uint8_t)(a != a ? 7u : (u >> 28 & 8u) | r);
}

/* E8M0: 2^(e - 127), NaN 0xFF. */
RFI_SCALING float rfi_e8m0_widen(uint8_t e) {
  return rfi_number(e == 0xFFu ? 0x7FC00000u : e == 0 ? 0x00400000u : (uint32_t)e << 23);
}
/* The smallest power of two that is at least x >= 0, from 2^-127 to 2^127. */
RFI_SCALING uint8_t rfi_e8m0_narrow(float x) {
  const uint32_t u = rfi_pattern(x);
  if (u > 0x7F800000u) return 0xFF;
  if (u >= 0x7F000000u) return 0xFE;
  return (uint8_t)(u <= 0x00400000u ? 0 : (u + 0x7FFFFFu) >> 23);
}

/* ---- scales ---- */

RFI_SCALING float rfi_largest(rfr_dtype format) {
  return format == RFR_E4M3 ? 448.0f : format == RFR_E5M2 ? 57344.0f : 6.0f;
}
/* The pattern of the largest number of x's type: the maximum of a block's scale. */
RFI_SCALING uint32_t rfi_largest_input(rfr_dtype x) {
  return x == RFR_BF16 ? 0x7F7F0000u : x == RFR_F16 ? 0x477FE000u : (uint32_t)RFI_F32_LARGEST;
}

/* The factor that maps the magnitude `amax` to the maximum of the format; 1 if amax is 0, infinite or NaN. */
RFI_SCALING float rfi_scale_of(uint32_t amax, float largest, uint32_t overflow, int pow2) {
  if (amax == 0 || amax >= RFI_F32_INFINITE) return 1.0f;
  uint32_t u = rfi_pattern(largest / rfi_number(amax));
  if (u >= RFI_F32_INFINITE) u = overflow;
  return rfi_number(pow2 ? u & 0x7F800000u : u);
}

/* nv16's factor for a tensor; its reciprocal is the global scale. */
RFI_SCALING float rfi_global_of(uint32_t amax) {
  if (amax == 0 || amax >= RFI_F32_INFINITE) return 1.0f;
  const float s = 2688.0f / rfi_number(amax);
  return rfi_pattern(s) >= RFI_F32_INFINITE ? rfi_number(RFI_F32_LARGEST) : s;
}

/* The factors of a block: its elements are multiplied by `by`; the stored scale is `stored` (u8) or `inverse`. */
typedef struct rfi_block_scale {
  float by, inverse;
  uint8_t stored;
} rfi_block_scale;

RFI_SCALING float rfi_finite(float x) { return x > rfi_number(RFI_F32_LARGEST) ? rfi_number(RFI_F32_LARGEST) : x; }

RFI_SCALING rfi_block_scale rfi_block_scale_of(uint32_t amax, rfr_dtype scale, rfr_dtype format, uint32_t overflow,
                                               int pow2, float global) {
  rfi_block_scale s = {1.0f, 1.0f, 0};
  if (scale == RFR_F32) {
    s.by = rfi_scale_of(amax, rfi_largest(format), overflow, pow2);
    s.inverse = 1.0f / s.by;
  } else if (scale == RFR_E8M0) {
    s.stored = rfi_e8m0_narrow(rfi_number(amax) * (1.0f / rfi_largest(format)));
    s.by = s.stored == 0xFFu ? rfi_number(0x7FC00000u) : rfi_e8m0_widen((uint8_t)(254u - s.stored));
  } else {
    s.stored = (uint8_t)rfi_e4m3_code(rfi_magnitude(rfi_finite(rfi_number(amax) * (global * (1.0f / 6.0f)))));
    s.by = rfi_finite(1.0f / (rfi_e4m3_widen(s.stored) * (1.0f / global)));
  }
  return s;
}

/* ---- Hadamard ---- */

/* 16 numbers times signs, times the Hadamard matrix / 4, each rounded to bf16: four stages of sums and differences. */
RFI_SCALING void rfi_hadamard(float *x) {
  for (int i = 0; i < RFI_HADAMARD; i++) x[i] = 0xd7e8u >> i & 1u ? -x[i] : x[i];
  for (int h = 1; h < RFI_HADAMARD; h *= 2)
    for (int i = 0; i < RFI_HADAMARD; i++)
      if ((i & h) == 0) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
  for (int i = 0; i < RFI_HADAMARD; i++) x[i] = rfi_to_bf16(x[i] * 0.25f);
}

/* ---- random numbers ---- */

typedef struct rfi_rounding {
  uint64_t key, attempted;
  uint32_t site, microbatch;
} rfi_rounding;

/* 8 random bits for element e of x; those for a row (0) and for a column (1) are independent. */
RFI_SCALING uint32_t rfi_rounding_bits(const rfi_rounding *r, uint64_t e, int col) {
  return rfi_draw4(r->key, e / 4, r->site, r->microbatch, r->attempted).v[e % 4] >> (8 * col) & 255u;
}

#endif
