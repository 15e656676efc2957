/* SPDX-License-Identifier: Apache-2.0
 *
 * A range of memory that must be filled with one byte: a guard, or poison. For C and for kernels.
 */
#ifndef RFI_RANGE_H
#define RFI_RANGE_H

#include <stdint.h>

typedef struct rfi_range {
  const unsigned char *at;
  int64_t bytes;
  int32_t byte;
  int32_t broken; /* set by a check that finds another byte; a check never clears it */
} rfi_range;

#endif
