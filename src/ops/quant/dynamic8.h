/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of 8 bits for optimizer states: 256 numbers of -1 ... 1 (or 0 ... 1), spaced by magnitude, times a scale for
 * each block of RFI_DYNAMIC_BLOCK elements, its largest magnitude. Source: Dettmers et al., arXiv 2110.02861.
 */
#ifndef RFI_DYNAMIC8_H
#define RFI_DYNAMIC8_H

#include <stdbool.h>
#include <string.h>

#include "ops/quant/formats.h"

#ifdef __CUDACC__
#define RFI_DYNAMIC8 static __host__ __device__ __forceinline__
#else
#define RFI_DYNAMIC8 static inline
#endif

/* The midpoint between number k of an ascending map and the next; a larger value is nearer to the next one. */
RFI_DYNAMIC8 float rfi_dynamic8_middle(const float *map, int k) { return (map[k] + map[k + 1]) / 2; }

/* The factor that maps a block onto -1 ... 1; the lower bound is that of bitsandbytes. */
RFI_DYNAMIC8 float rfi_dynamic8_inverse(float most) { return 1.0f / (most > 1e-38f ? most : 1e-38f); }

/* The index of the number nearest to x, the smaller of two equally near ones; `middle` has 255 entries. */
RFI_DYNAMIC8 int rfi_dynamic8_nearest(const float *middle, float x) {
  int k = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int step = 128; step > 0; step /= 2) k += x > middle[k + step - 1] ? step : 0;
  return k;
}

RFI_DYNAMIC8 uint32_t rfi_dynamic8_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
RFI_DYNAMIC8 float rfi_dynamic8_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The same index for x = -1 ... 1 (rounding may exceed it by some ulps) or NaN, from a table. The leading bits of x
 * choose an entry. The high part of an entry is the index at the least value of the entry; its low part is compared
 * with the other bits of x. So an entry may have at most one midpoint. With `drop` trailing bits in the low part, this
 * holds up to RFI_DYNAMIC8_SIGNED_DROP for the signed map and RFI_DYNAMIC8_UNSIGNED_DROP for the unsigned one.
 * Magnitudes below 2^-23 share one entry; NaNs share the entry after that of 1. Entries of negative numbers follow
 * those of positive ones. */
enum { RFI_DYNAMIC8_SIGNED_DROP = 17, RFI_DYNAMIC8_UNSIGNED_DROP = 16 };
enum { RFI_DYNAMIC8_LEAST = 0x34000000, RFI_DYNAMIC8_ONE = 0x3f800000 };
#define RFI_DYNAMIC8_ENTRIES(drop) (((RFI_DYNAMIC8_ONE - RFI_DYNAMIC8_LEAST) >> (drop)) + 2)

/* Entry i of one sign. */
RFI_DYNAMIC8 uint32_t rfi_dynamic8_entry(const float *middle, int drop, bool negative, int i) {
  const uint32_t low = (1u << drop) - 1, first = ((RFI_DYNAMIC8_LEAST >> drop) + (uint32_t)i) << drop,
                 last = first | low;
  if (i == RFI_DYNAMIC8_ENTRIES(drop) - 1) return low; /* a NaN is above no midpoint */
  const float a = rfi_dynamic8_float(first), b = rfi_dynamic8_float(last);
  const int begin = rfi_dynamic8_nearest(middle, negative ? -b : a);
  const bool split = rfi_dynamic8_nearest(middle, negative ? -a : b) != begin;
  const uint32_t bits = split ? rfi_dynamic8_bits(middle[begin]) : 0;
  return (uint32_t)begin << drop | (split ? (negative ? ~bits : bits) & low : low);
}

RFI_DYNAMIC8 int rfi_dynamic8_find(const uint32_t *table, int drop, float x) {
  const uint32_t bits = rfi_dynamic8_bits(x), sign = 0u - (bits >> 31), low = (1u << drop) - 1;
  const uint32_t most = RFI_DYNAMIC8_ONE + (1u << drop);
  uint32_t size = bits & 0x7fffffffu;
  size = size < RFI_DYNAMIC8_LEAST ? RFI_DYNAMIC8_LEAST : size > most ? most : size;
  const uint32_t at = (size >> drop) - (RFI_DYNAMIC8_LEAST >> drop) + (sign & RFI_DYNAMIC8_ENTRIES(drop));
  const uint32_t entry = table[at];
  return (int)((entry >> drop) + (((size ^ sign) & low) > (entry & low)));
}

/* Byte offset of the scales after n codes. */
RFI_DYNAMIC8 int64_t rfi_dynamic8_scales(int64_t n) { return (n + RFI_SECTION - 1) / RFI_SECTION * RFI_SECTION; }

#endif
