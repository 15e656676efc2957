/* SPDX-License-Identifier: Apache-2.0
 *
 * How much a step moves an average towards the weight; the same on a CPU and a GPU.
 */
#ifndef RFI_EMA_H
#define RFI_EMA_H

#include "core/rng.h"

/* 1 - d; 1: the average becomes the weight itself. `applied`: from the step block. */
RFI_BOTH_SIDES static inline float rfi_ema_share(double decay, int64_t start, int warmup, int64_t applied) {
  const double n = (double)(applied + 1 - start), most = (1 + n) / (10 + n);
  if (n < 1) return 1;
  return (float)(1 - (warmup && most < decay ? most : decay));
}

#endif
