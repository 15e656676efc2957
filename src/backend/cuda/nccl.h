/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators of GPUs by NCCL, which is loaded when the first one is created.
 */
#ifndef RFI_NCCL_H
#define RFI_NCCL_H

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_module.h"
#include "dist/comm.h"

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
/* Whether the ranks exchange program memory by copy engines: the same on all ranks (nccl_copies.c). */
bool rfi_nccl_copies(const rfr_comm *comm);
/* Allocates memory for programs with collectives; `free` returns false for memory that `alloc` did not return. */
bool rfi_nccl_alloc(rfr_comm *comm, size_t bytes, void **out);
bool rfi_nccl_free(rfr_comm *comm, void *memory);
/* Registers the memory of n collectives for the copy engines of all ranks. All ranks call it together, before these
 * collectives run for the first time. Errors: dist.mismatch, if the offsets of operands differ between ranks. */
rfr_status rfi_nccl_share(rfr_comm *comm, const rfi_collective *what, int n);
/* After an abort: whether the stream still waits for another rank. The wait of a copy engine cannot be ended. CUDA
 * calls that free memory would wait for it, so nothing may be freed. */
bool rfi_nccl_stuck(rfr_comm *comm, cudaStream_t stream);
/* Writes "NCCL 2.28.9"; if there is none, returns false and writes why. */
bool rfi_nccl_describe(const rfi_cuda_host *core, char *text, size_t size);

#endif
