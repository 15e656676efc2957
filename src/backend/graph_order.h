/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that a captured graph orders all ops that share bytes.
 */
#ifndef RFI_GRAPH_ORDER_H
#define RFI_GRAPH_ORDER_H

#include "backend/backend.h"

typedef struct rfi_unit { /* ops that were enqueued by one call and are not ordered among themselves */
  int first, n;           /* n 0: the graph's copies */
} rfi_unit;

typedef struct rfi_unit_edge { /* the graph runs all of `to` after all of `from`; from < to */
  int from, to;
} rfi_unit_edge;

/* Two ops of different units conflict if they share a byte which one of them writes. Checks that a path of edges
 * connects the units of any two conflicting ops, and that one leads from the graph's copies, the first unit, to every
 * op. Units are in the order of enqueueing; edges are sorted here. Errors: plan.order, naming two ops without a
 * path. */
rfr_status rfi_order_check(rfr_ctx *ctx, const rfi_bound *bound, const rfi_unit *unit, int n, rfi_unit_edge *edge,
                           int n_edges);

#endif
