/* SPDX-License-Identifier: Apache-2.0
 *
 * Host access to the bytes of a tensor: its own memory if that is host memory, otherwise a copy between open and close.
 * Copies that every step or evaluation needs are allocated once and kept, so that neither allocates.
 */
#include "train/host.h"

#include "base/base.h"
#include "train/parts.h"

rfr_status rfi_host_keep(rfr_run *run, const rfr_tensor *x) {
  if (x->host || x->bytes == 0) return RFR_OK;
  rfi_host_copy *copy = &run->copies[run->n_copies];
  RFI_TRY(rfi_alloc(run->ctx, (size_t)x->bytes, &copy->host));
  copy->data = x->data;
  run->n_copies++;
  return RFR_OK;
}

void rfi_host_forget(rfr_run *run) {
  while (run->n_copies > 0) rfi_free(run->ctx, run->copies[--run->n_copies].host);
}

static void *copy_of(const rfr_run *run, const rfr_tensor *x) {
  for (int i = 0; i < run->n_copies; i++)
    if (run->copies[i].data == x->data) return run->copies[i].host;
  return NULL;
}

static void release(rfr_run *run, const rfr_tensor *x, void *host) {
  if (host != copy_of(run, x)) rfi_free(run->ctx, host);
}

rfr_status rfi_host_open(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void **out) {
  *out = x->data;
  if (x->host) return RFR_OK;
  *out = copy_of(run, x);
  if (!*out) RFI_TRY(rfi_alloc(run->ctx, (size_t)x->bytes, out));
  if (access == RFI_HOST_WRITE) return RFR_OK;
  rfr_status s = rfi_is_part(run, x) ? rfi_parts_read(run, x, *out) : rfr_programs_read(run->programs, x, *out);
  if (s == RFR_OK) return RFR_OK;
  release(run, x, *out);
  *out = NULL;
  return s;
}

rfr_status rfi_host_close(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void *host, rfr_status so_far) {
  if (x->host || !host) return so_far;
  if (so_far == RFR_OK && access == RFI_HOST_WRITE) so_far = rfi_parts_write(run, x, host);
  release(run, x, host);
  return so_far;
}
