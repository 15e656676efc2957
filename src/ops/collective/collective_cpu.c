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

const rfi_kernel RFI_CPU(all_gather) = {run_all_gather, NULL};
const rfi_kernel RFI_CPU(reduce_scatter) = {run_reduce_scatter, NULL};
const rfi_kernel RFI_CPU(all_reduce) = {run_all_reduce, NULL};
const rfi_kernel RFI_CPU(all_to_all) = {run_all_to_all, NULL};
