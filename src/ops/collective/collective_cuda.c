/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on a GPU: the communicator enqueues them on the program's stream, also during capture.
 *
 * Copy engines cannot add. If the ranks exchange memory by copy engines, a reduce-scatter is an all-to-all into its
 * workspace (cuda_select.c) and a sum there, in rank order like the sum of ranks on the CPU.
 */
#include "backend/cuda/cuda.h"
#include "ops/collective/collective.h"
#include "ops/collective/collective_sum.h"

static rfr_status sum_parts(const rfr_call *call, void *stream) {
  const rfi_collective parts = rfi_collective_parts(call);
  rfr_comm *comm = call->library;
  if (!call->out[0].data) return RFR_OK;
  const rfr_status s = comm->table->run(comm, &parts, stream);
  if (s != RFR_OK) return s;
  return rfi_collective_sum_cuda(parts.dtype, (int)rfi_collective_ranks(call), parts.to, parts.n, call->out[0].data,
                                 stream);
}

static rfr_status run(const rfr_call *call, rfi_collective_kind kind) {
  const rfi_collective c = rfi_collective_of(call, kind);
  if (call->workspace) return sum_parts(call, call->stream);
  if (rfi_collective_ranks(call) > 1) {
    rfr_comm *comm = call->library;
    return comm->table->run(comm, &c, call->stream);
  }
  if (!c.to || c.n == 0) return RFR_OK;
  return rfi_cuda_check(cudaMemcpyAsync(c.to, c.from, (size_t)rfi_collective_bytes(&c), cudaMemcpyDeviceToDevice,
                                        (cudaStream_t)call->stream),
                        rfi_collective_name(kind));
}

/* Runs independent collectives on the first one's stream. */
static rfr_status run_many(const rfr_call *const *calls, int n, rfi_collective_kind kind) {
  enum { MOST = 64 };
  rfi_collective group[MOST];
  rfr_comm *comm = calls[0]->library;
  rfr_status s = RFR_OK;
  for (int i = 0, many; i < n && s == RFR_OK; i += many) {
    if (calls[i]->workspace) {
      many = 1, s = sum_parts(calls[i], calls[0]->stream);
      continue;
    }
    for (many = 0; i + many < n && many < MOST && rfi_collective_ranks(calls[i + many]) > 1; many++) {
      if (calls[i + many]->workspace) break;
      group[many] = rfi_collective_of(calls[i + many], kind);
    }
    if (many > 0) s = comm->table->run_all(comm, group, many, calls[0]->stream);
    else many = 1, s = run(calls[i], kind);
  }
  return s;
}

static rfr_status run_all_gather(const rfr_call *call) { return run(call, RFI_ALL_GATHER); }
static rfr_status run_reduce_scatter(const rfr_call *call) { return run(call, RFI_REDUCE_SCATTER); }
static rfr_status run_all_reduce(const rfr_call *call) { return run(call, RFI_ALL_REDUCE); }
static rfr_status run_all_to_all(const rfr_call *call) { return run(call, RFI_ALL_TO_ALL); }
static rfr_status gather_many(const rfr_call *const *calls, int n) { return run_many(calls, n, RFI_ALL_GATHER); }
static rfr_status scatter_many(const rfr_call *const *calls, int n) { return run_many(calls, n, RFI_REDUCE_SCATTER); }

const rfi_cuda_kernel RFI_CUDA(all_gather) = {.run = run_all_gather, .run_all = gather_many};
const rfi_cuda_kernel RFI_CUDA(reduce_scatter) = {.run = run_reduce_scatter, .run_all = scatter_many};
const rfi_cuda_kernel RFI_CUDA(all_reduce) = {.run = run_all_reduce};
const rfi_cuda_kernel RFI_CUDA(all_to_all) = {.run = run_all_to_all};
/* NCCL needs message sizes at capture, so it sends complete parts, including their zeros. */
const rfi_cuda_kernel RFI_CUDA(all_to_all_rows) = {.run = run_all_to_all};
