/* SPDX-License-Identifier: Apache-2.0 */
#include "support/backend.h"

#include <stddef.h>

const rfi_backend *rft_backend;

rfr_status __real_rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out);
rfr_status __wrap_rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out);
rfr_status __wrap_rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out) {
  if (!rft_backend) return __real_rfi_backend_find(ctx, out);
  *out = rft_backend;
  return RFR_OK;
}

rfi_backend *rft_change_backend(void) {
  static rfi_backend copy;
  copy = rfi_backend_cpu;
  rft_backend = &copy;
  return &copy;
}
