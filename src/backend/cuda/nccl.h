/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators of GPUs by NCCL, which is loaded when the first one is created.
 */
#ifndef RFI_NCCL_H
#define RFI_NCCL_H

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_module.h"

rfr_status rfi_nccl_id(const rfi_cuda_host *core, void *id);
rfr_status rfi_nccl_create(const rfi_cuda_host *core, rfr_ctx *ctx, int ordinal, const void *id, int size, int rank,
                           double timeout, rfr_comm **out);
/* Errors: dist.communicator, for a communicator of another GPU. */
rfr_status rfi_nccl_fits(const rfr_comm *comm, int ordinal);
/* dist.peer after an abort: graphs that were captured with it must not be launched. */
rfr_status rfi_nccl_alive(rfr_comm *comm);
/* After a query of a stream: dist.peer if other ranks have failed, or if the stream has been busy for longer than the
 * timeout. `*since`: the time at which it was first found busy; 0: not yet. */
rfr_status rfi_nccl_poll(rfr_comm *comm, bool idle, double *since);
/* Waits for a stream, until a rank has failed or the timeout has passed. */
rfr_status rfi_nccl_wait(rfr_comm *comm, cudaStream_t stream, const char *what);
/* Writes "NCCL 2.28.9"; if there is none, returns false and writes why. */
bool rfi_nccl_describe(const rfi_cuda_host *core, char *text, size_t size);

#endif
