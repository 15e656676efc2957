/* SPDX-License-Identifier: Apache-2.0
 *
 * The dynamic loss scale, a power of two, so that scaling and unscaling are exact unless a value overflows or
 * underflows. Its state is {exponent - RFI_SCALE_START, good steps since it changed}: zeros are the initial state. CPU
 * and GPU kernels share these functions.
 */
#ifndef RFI_LOSS_SCALE_H
#define RFI_LOSS_SCALE_H

#include "core/rng.h"
#include "refrain/op.h"

enum { RFI_SCALE_START = 16, RFI_SCALE_LEAST = 0, RFI_SCALE_MOST = 24 };

/* The exponent, clamped so that any state is valid. */
RFI_BOTH_SIDES static inline int32_t rfi_scale_exponent(const int32_t *state) {
  if (state[0] < RFI_SCALE_LEAST - RFI_SCALE_START) return RFI_SCALE_LEAST;
  return state[0] > RFI_SCALE_MOST - RFI_SCALE_START ? RFI_SCALE_MOST : RFI_SCALE_START + state[0];
}

RFI_BOTH_SIDES static inline void rfi_scale_step(int32_t *state, bool skip, int64_t every) {
  const int32_t exponent = rfi_scale_exponent(state);
  const bool grows = !skip && state[1] + 1 >= every;
  int32_t next = skip ? exponent - 1 : exponent + grows;
  if (next < RFI_SCALE_LEAST) next = RFI_SCALE_LEAST;
  if (next > RFI_SCALE_MOST) next = RFI_SCALE_MOST;
  state[1] = skip || grows || state[1] < 0 ? 0 : state[1] + 1;
  state[0] = next - RFI_SCALE_START;
}

#endif
