/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that must hold one byte throughout, as guards and poison do. For C and for kernels.
 */
#ifndef RFI_RANGE_H
#define RFI_RANGE_H

#include <stdint.h>

typedef struct rfi_range {
  const unsigned char *at;
  int64_t bytes;
  int32_t byte;
  int32_t broken; /* set where some byte is another; never cleared by who looks */
} rfi_range;

#endif
