/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on a GPU: the communicator enqueues them on the program's stream, also during capture.
 */
#include "backend/cuda/cuda.h"
#include "ops/collective/collective.h"

static rfr_status run(const rfr_call *call, rfi_collective_kind kind) {
  const rfi_collective c = rfi_collective_of(call, kind);
  if (rfi_collective_ranks(call) > 1) {
    rfr_comm *comm = call->library;
    return comm->table->run(comm, &c, call->stream);
  }
  if (!c.to || c.n == 0) return RFR_OK;
  return rfi_cuda_check(cudaMemcpyAsync(c.to, c.from, (size_t)rfi_collective_bytes(&c), cudaMemcpyDeviceToDevice,
                                        (cudaStream_t)call->stream),
                        rfi_collective_name(kind));
}

static rfr_status run_all_gather(const rfr_call *call) { return run(call, RFI_ALL_GATHER); }
static rfr_status run_reduce_scatter(const rfr_call *call) { return run(call, RFI_REDUCE_SCATTER); }
static rfr_status run_all_reduce(const rfr_call *call) { return run(call, RFI_ALL_REDUCE); }
static rfr_status run_all_to_all(const rfr_call *call) { return run(call, RFI_ALL_TO_ALL); }

/* NCCL wants the sizes of messages when the graph is captured, so it sends the parts with their zeros. */
static rfr_status run_all_to_all_rows(const rfr_call *call) { return run(call, RFI_ALL_TO_ALL); }

const rfi_cuda_kernel RFI_CUDA(all_gather) = {run_all_gather, NULL, NULL, NULL, NULL};
const rfi_cuda_kernel RFI_CUDA(reduce_scatter) = {run_reduce_scatter, NULL, NULL, NULL, NULL};
const rfi_cuda_kernel RFI_CUDA(all_reduce) = {run_all_reduce, NULL, NULL, NULL, NULL};
const rfi_cuda_kernel RFI_CUDA(all_to_all) = {run_all_to_all, NULL, NULL, NULL, NULL};
const rfi_cuda_kernel RFI_CUDA(all_to_all_rows) = {run_all_to_all_rows, NULL, NULL, NULL, NULL};
