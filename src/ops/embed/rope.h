/* SPDX-License-Identifier: Apache-2.0
 *
 * The angle per position of a head's pairs, for the rope kernels of all devices.
 */
#ifndef RFI_ROPE_H
#define RFI_ROPE_H

#include <math.h>

#include "ops/call.h"

/* The frequency of pair d of a head of D columns, from rope's attributes. With scaling, a frequency that makes at least
 * `high` turns over the original length stays, one that makes at most `low` turns is divided by the factor, and between
 * them both are mixed in proportion to the turns. */
static inline double rfi_rope_frequency(const rfr_attr *attr, int64_t d, int64_t D) {
  double plain = pow(attr[0].f, -2.0 * (double)d / (double)D), factor = attr[2].f;
  double low = attr[3].f, high = attr[4].f, kept = 0;
  if (attr[5].i > 0) kept = ((double)attr[5].i * plain / (2 * M_PI) - low) / (high - low);
  kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
  return factor == 1 ? plain : plain * (kept + (1 - kept) / factor);
}

#endif
