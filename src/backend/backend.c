/* SPDX-License-Identifier: Apache-2.0
 *
 * Which backend a context's programs run on.
 */
#include "backend/backend.h"

#include <string.h>

#include "base/base.h"

rfr_status rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out) {
  (void)ctx;
  *out = &rfi_backend_cpu;
  return RFR_OK;
}
