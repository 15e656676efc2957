/* SPDX-License-Identifier: Apache-2.0
 *
 * A tensor's bytes for the host: as they are (READ), or to be written in full (WRITE: the tensor has them after close,
 * unless `so_far`, which close returns, is an error).
 */
#ifndef RFI_HOST_H
#define RFI_HOST_H

#include "train/run.h"

typedef enum rfi_host_access { RFI_HOST_READ, RFI_HOST_WRITE } rfi_host_access;
/* Allocates host memory for the copy; rfi_host_forget frees it. */
rfr_status rfi_host_keep(rfr_run *run, const rfr_tensor *x);
void rfi_host_forget(rfr_run *run);
rfr_status rfi_host_open(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void **out);
rfr_status rfi_host_close(rfr_run *run, const rfr_tensor *x, rfi_host_access access, void *host, rfr_status so_far);

#endif
