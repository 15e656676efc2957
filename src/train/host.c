/* SPDX-License-Identifier: Apache-2.0
 *
 * A tensor's bytes where the host can work on them: the tensor's own memory when that is
 * the host's, else a copy that lives between open and close.
 */
#include "base/base.h"
#include "train/run.h"

rfr_status rfi_host_open(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void **out) {
  *out = x->data;
  if (x->host) return RFR_OK;
  RFI_TRY(rfi_alloc(run->ctx, (size_t)x->bytes, out));
  if (access == RFI_HOST_WRITE) return RFR_OK;
  rfr_status s = rfr_programs_read(run->programs, x, *out);
  if (s == RFR_OK) return RFR_OK;
  rfi_free(run->ctx, *out);
  *out = NULL;
  return s;
}

rfr_status rfi_host_close(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void *host, rfr_status so_far) {
  if (x->host || !host) return so_far;
  if (so_far == RFR_OK && access == RFI_HOST_WRITE) so_far = rfr_programs_write(run->programs, x, host);
  rfi_free(run->ctx, host);
  return so_far;
}
