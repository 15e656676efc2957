/* SPDX-License-Identifier: Apache-2.0
 *
 * Maps the nodes of a captured graph to ops, for the check of its order.
 */
#ifndef RFI_UNITS_H
#define RFI_UNITS_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

typedef struct rfi_units { /* records what is enqueued while a graph is captured */
  rfi_unit *unit;
  cudaGraphNode_t *last; /* per unit */
  int n;
} rfi_units;

/* Allocates n units. */
rfr_status rfi_units_init(const rfi_cuda_host *core, rfr_ctx *ctx, int n, rfi_units *u);
void rfi_units_deinit(const rfi_cuda_host *core, rfr_ctx *ctx, rfi_units *u);
/* Records that the latest node of a captured stream belongs to ops first ... first + n - 1; n 0: to the graph's
 * copies. */
rfr_status rfi_units_note(rfi_units *u, cudaStream_t stream, int first, int n);
/* Errors: plan.order (backend/graph_order.h). */
rfr_status rfi_units_check(const rfi_cuda_host *core, rfr_ctx *ctx, const rfi_units *u, cudaGraph_t graph,
                           const rfi_bound *bound);

#endif
