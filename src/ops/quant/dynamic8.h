/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of 8 bits for optimizer states: 256 numbers of -1 ... 1 (or 0 ... 1), spaced by magnitude, times a scale for
 * each block of RFI_DYNAMIC_BLOCK elements, its largest magnitude. Source: Dettmers et al., arXiv 2110.02861.
 */
#ifndef RFI_DYNAMIC8_H
#define RFI_DYNAMIC8_H

#include "ops/quant/formats.h"

#ifdef __CUDACC__
#define RFI_DYNAMIC8 static __host__ __device__ __forceinline__
#else
#define RFI_DYNAMIC8 static inline
#endif

/* Halfway between number k of an ascending map and the next; a value above it is nearer to the next one. */
RFI_DYNAMIC8 float rfi_dynamic8_middle(const float *map, int k) { return (map[k] + map[k + 1]) / 2; }

/* The factor that maps a block onto -1 ... 1; the bound is that of bitsandbytes. */
RFI_DYNAMIC8 float rfi_dynamic8_inverse(float most) { return 1.0f / (most > 1e-38f ? most : 1e-38f); }

/* The index of the number nearest to x, the smaller one of two; `middle` has 255 entries. */
RFI_DYNAMIC8 int rfi_dynamic8_nearest(const float *middle, float x) {
  int k = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int step = 128; step > 0; step /= 2) k += x > middle[k + step - 1] ? step : 0;
  return k;
}

/* Byte offset of the scales after n codes. */
RFI_DYNAMIC8 int64_t rfi_dynamic8_scales(int64_t n) { return (n + RFI_SECTION - 1) / RFI_SECTION * RFI_SECTION; }

#endif
