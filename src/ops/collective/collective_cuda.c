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

enum { MOST = 64 }; /* collectives of a launch */

static int64_t received_bytes(const rfi_collective *c, int64_t ranks) {
  return rfi_collective_bytes(c) * (c->kind == RFI_REDUCE_SCATTER ? 1 : ranks);
}
static int64_t sent_bytes(const rfi_collective *c, int64_t ranks) {
  return rfi_collective_bytes(c) * (c->kind == RFI_ALL_GATHER ? 1 : ranks);
}
static bool overlap(const char *x, int64_t x_bytes, const char *y, int64_t y_bytes) {
  return x && y && x < y + y_bytes && y < x + x_bytes;
}

/* Whether a later collective can run concurrently with the n before it. A plan without a side stream reuses the memory
 * of an op for the next one: what it receives can overlap what the earlier ones send or receive. */
static bool is_disjoint(const rfi_collective *earlier, int n, const rfi_collective *later, int64_t ranks) {
  const int64_t bytes = received_bytes(later, ranks);
  for (int k = 0; k < n; k++)
    if (overlap(later->to, bytes, earlier[k].to, received_bytes(&earlier[k], ranks)) ||
        overlap(later->to, bytes, earlier[k].from, sent_bytes(&earlier[k], ranks)))
      return false;
  return true;
}

/* The exchanges of the leading reduce-scatters that can run concurrently; returns their number. */
static int find_parts(const rfr_call *const *calls, int n, rfi_collective parts[MOST]) {
  int many = 0;
  for (; many < n && many < MOST && calls[many]->workspace && calls[many]->out[0].data; many++) {
    parts[many] = rfi_collective_parts(calls[many]);
    if (!is_disjoint(parts, many, &parts[many], rfi_collective_ranks(calls[0]))) break;
  }
  return many;
}

/* All exchanges precede all sums: a sum waits for multiprocessors that a GEMM uses, an exchange does not. */
static rfr_status exchange_and_sum(const rfr_call *const *calls, int n, void *stream, int *many) {
  rfi_collective parts[MOST];
  rfr_comm *comm = calls[0]->library;
  *many = 1;
  if (!calls[0]->out[0].data) return RFR_OK;
  *many = find_parts(calls, n, parts);
  rfr_status s = comm->table->run_all(comm, parts, *many, stream);
  for (int i = 0; i < *many && s == RFR_OK; i++)
    s = rfi_collective_sum_cuda(parts[i].dtype, (int)rfi_collective_ranks(calls[i]), parts[i].to, parts[i].n,
                                calls[i]->out[0].data, stream);
  return s;
}

static rfr_status run(const rfr_call *call, rfi_collective_kind kind) {
  const rfi_collective c = rfi_collective_of(call, kind);
  int many;
  if (call->workspace) return exchange_and_sum(&call, 1, call->stream, &many);
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
  rfi_collective group[MOST];
  rfr_comm *comm = calls[0]->library;
  rfr_status s = RFR_OK;
  for (int i = 0, many; i < n && s == RFR_OK; i += many) {
    if (calls[i]->workspace) {
      s = exchange_and_sum(calls + i, n - i, calls[0]->stream, &many);
      continue;
    }
    for (many = 0; i + many < n && many < MOST && rfi_collective_ranks(calls[i + many]) > 1; many++) {
      if (calls[i + many]->workspace) break;
      group[many] = rfi_collective_of(calls[i + many], kind);
      if (!is_disjoint(group, many, &group[many], rfi_collective_ranks(calls[i]))) break;
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
