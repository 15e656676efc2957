/* SPDX-License-Identifier: Apache-2.0
 *
 * Stochastic rounding of a weight to bf16, the same on a CPU and a GPU. A value between two bf16 numbers becomes the
 * upper one with the probability (value - lower) / (upper - lower): 16 random bits are added to the 16 bits that bf16
 * drops, and the sum is cut off. The expected value is exact, so an update that is smaller than half a bit of the
 * weight is not lost. A draw is addressed by seed, weight, step and element (core/rng.h): it does not depend on
 * threads, on replay, or on the rank that has the element.
 */
#ifndef RFI_ROUNDING_H
#define RFI_ROUNDING_H

#include "core/rng.h"

enum { RFI_DRAWS_PER_BLOCK = 8 }; /* 16-bit draws per block of the generator */

/* The draws of one weight in one step. */
typedef struct rfi_weight_draws {
  uint64_t key, attempted;
  uint32_t number;
} rfi_weight_draws;

/* Uses a separate stream, "rounding" in ASCII: a dropout site with the same number has other draws. */
RFI_BOTH_SIDES static inline rfi_weight_draws rfi_weight_draws_of(const int64_t *step, int64_t number) {
  const rfi_weight_draws d = {rfi_stream_key((uint64_t)step[2], 0x726F756E64696E67u), (uint64_t)step[0],
                              (uint32_t)number};
  return d;
}

/* Word k % 2 of v[k / 2] is the draw of element 8 block + k. */
RFI_BOTH_SIDES static inline rfi_u32x4 rfi_weight_draw8(const rfi_weight_draws *d, uint64_t block) {
  return rfi_draw4(d->key, block, d->number, 0, d->attempted);
}

/* Rounds the bits of an f32 with a 16-bit draw. Infinities stay infinite; NaN becomes a quiet NaN. */
RFI_BOTH_SIDES static inline uint16_t rfi_round_bf16(uint32_t bits, uint32_t draw) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + draw) >> 16);
}

#endif
