/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on the CPU: calls the communicator.
 */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "ops/collective/collective.h"

static rfr_status run(const rfi_call *call, rfi_collective_kind kind) {
  const rfi_collective c = rfi_collective_of(call, kind);
  if (rfi_collective_ranks(call) > 1) {
    rfr_comm *comm = call->library;
    return comm->table->run(comm, &c, call->stream);
  }
  if (c.to && c.n > 0) memcpy(c.to, c.from, (size_t)rfi_collective_bytes(&c));
  return RFR_OK;
}

static rfr_status run_all_gather(const rfi_call *call) { return run(call, RFI_ALL_GATHER); }
static rfr_status run_reduce_scatter(const rfi_call *call) { return run(call, RFI_REDUCE_SCATTER); }
static rfr_status run_all_reduce(const rfi_call *call) { return run(call, RFI_ALL_REDUCE); }
static rfr_status run_all_to_all(const rfi_call *call) { return run(call, RFI_ALL_TO_ALL); }

/* ---- rows ---- */

static size_t rows_workspace(const rfi_call *c) { return 2 * sizeof(int64_t) * (size_t)rfi_collective_ranks(c); }

/* The number of elements of each rank's part, from the counts of its groups. */
static void count_elements(const rfi_call *c, int operand, int64_t *out) {
  const int32_t *counts = c->in[operand].data;
  const int64_t ranks = rfi_collective_ranks(c), groups = rfi_count(&c->in[operand].type) / ranks;
  const int64_t most = c->in[0].type.shape[0] / ranks, columns = c->in[0].type.shape[1];
  for (int64_t r = 0; r < ranks; r++) {
    int64_t rows = 0;
    for (int64_t g = 0; g < groups; g++) rows += counts[r * groups + g] > 0 ? counts[r * groups + g] : 0;
    out[r] = (rows < most ? rows : most) * columns;
  }
}

static rfr_status run_all_to_all_rows(const rfi_call *call) {
  const int64_t ranks = rfi_collective_ranks(call);
  rfi_collective c = rfi_collective_of(call, RFI_ALL_TO_ALL);
  int64_t *elements = call->workspace;
  if (c.n == 0 || !c.to) return ranks > 1 ? run(call, RFI_ALL_TO_ALL) : RFR_OK;
  count_elements(call, 1, elements);
  count_elements(call, 2, elements + ranks);
  c.sent = elements, c.received = elements + ranks;
  const int64_t size = rfi_collective_element(c.dtype);
  for (int64_t r = 0; r < ranks; r++)
    memset((char *)c.to + (r * c.n + c.received[r]) * size, 0, (size_t)((c.n - c.received[r]) * size));
  if (ranks > 1) {
    rfr_comm *comm = call->library;
    return comm->table->run(comm, &c, call->stream);
  }
  memcpy(c.to, c.from, (size_t)(c.received[0] * size));
  return RFR_OK;
}

const rfi_kernel RFI_CPU(all_gather) = {run_all_gather, NULL};
const rfi_kernel RFI_CPU(reduce_scatter) = {run_reduce_scatter, NULL};
const rfi_kernel RFI_CPU(all_reduce) = {run_all_reduce, NULL};
const rfi_kernel RFI_CPU(all_to_all) = {run_all_to_all, NULL};
const rfi_kernel RFI_CPU(all_to_all_rows) = {run_all_to_all_rows, rows_workspace};
