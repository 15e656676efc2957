/* SPDX-License-Identifier: Apache-2.0
 *
 * Pseudorandom numbers for tests: a linear congruential generator with the constants of Knuth's MMIX. A test owns the
 * state, so a case can be repeated from its seed, which may be any number. Low bits have short periods, so numbers come
 * from the high bits. Tensors that must not depend on the order of calls use rft_fill (context.h).
 */
#ifndef RFT_RANDOM_H
#define RFT_RANDOM_H

#include <stdint.h>

/* The next state. */
static inline uint64_t rft_next(uint64_t *state) {
  return *state = *state * 6364136223846793005u + 1442695040888963407u;
}

/* 0 .. n - 1 */
static inline uint32_t rft_below(uint64_t *state, uint32_t n) { return (uint32_t)(rft_next(state) >> 33) % n; }

/* -1 .. 1, without 1 */
static inline double rft_uniform(uint64_t *state) { return (double)(int32_t)(rft_next(state) >> 32) * 0x1p-31; }

#endif
