/* SPDX-License-Identifier: Apache-2.0
 *
 * The arguments of a collective for its communicator, which kernel selection puts into call->library. One rank needs no
 * communicator: the op is a copy.
 */
#ifndef RFI_OPS_COLLECTIVE_H
#define RFI_OPS_COLLECTIVE_H

#include "dist/comm.h"
#include "refrain/op.h"

static inline rfi_collective rfi_collective_of(const rfr_call *call, rfi_collective_kind kind) {
  const rfr_type *part = kind == RFI_REDUCE_SCATTER ? &call->out[0].type : &call->in[0].type;
  rfi_collective c;
  c.kind = kind;
  c.dtype = part->dtype;
  c.n = 1;
  for (int d = 0; d < part->rank; d++) c.n *= part->shape[d];
  if (kind == RFI_ALL_TO_ALL) c.n /= call->attr[0].i;
  c.from = call->in[0].data;
  c.to = call->out[0].data;
  c.sent = c.received = NULL;
  return c;
}

/* The all_to_all of a reduce_scatter whose kernel has a workspace: the workspace receives every rank's part. */
static inline rfi_collective rfi_collective_parts(const rfr_call *call) {
  rfi_collective c = rfi_collective_of(call, RFI_REDUCE_SCATTER);
  c.kind = RFI_ALL_TO_ALL;
  c.to = call->workspace;
  return c;
}

static inline int64_t rfi_collective_ranks(const rfr_call *call) { return call->attr[0].i; }
static inline int64_t rfi_collective_bytes(const rfi_collective *c) { return c->n * rfi_collective_element(c->dtype); }

#endif
