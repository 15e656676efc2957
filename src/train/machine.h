/* SPDX-License-Identifier: Apache-2.0
 *
 * Properties of the host that results depend on bitwise, in addition to the configuration.
 */
#ifndef RFI_MACHINE_H
#define RFI_MACHINE_H

#include "base/base.h"

typedef struct rfi_host_info {
  char matmul[96];
  bool matmul_library, bf16_fast;
} rfi_host_info;
rfr_status rfi_host_info_read(rfr_ctx *ctx, rfi_host_info *out);

#endif
