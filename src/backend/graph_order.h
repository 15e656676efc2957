/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that a captured graph orders all ops that share bytes.
 */
#ifndef RFI_GRAPH_ORDER_H
#define RFI_GRAPH_ORDER_H

#include "backend/backend.h"

typedef struct rfi_unit { /* ops that were enqueued by one call, without an order among them */
  int first, n;           /* n 0: the graph's copies */
} rfi_unit;

typedef struct rfi_unit_edge { /* the graph runs all of `to` after all of `from`; from < to */
  int from, to;
} rfi_unit_edge;

/* Checks that any two ops of different units that share a byte which one of them writes have a path of edges between
 * their units, and that every op has one from the graph's copies, which are the first unit. Units are in the order of
 * enqueueing; edges are sorted here. Errors: plan.order, naming two ops without a path. */
rfr_status rfi_order_check(rfr_ctx *ctx, const rfi_bound *bound, const rfi_unit *unit, int n, rfi_unit_edge *edge,
                           int n_edges);

#endif
