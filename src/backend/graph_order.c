/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that a captured graph orders all ops that share bytes. The plan decides which ops may run concurrently and
 * lets others share bytes; the device executes the graph. So this check uses neither the plan nor the side stream, but
 * the graph's edges and the addresses of operands, results and workspaces.
 *
 * The predecessors of a unit are a bit set: the union of its direct predecessors' sets and these predecessors. A graph
 * without a side stream orders every pair, and no pair is compared.
 */
#include "backend/graph_order.h"

#include <stdlib.h>

#include "base/base.h"

/* ---- bytes ---- */

typedef struct bytes {
  const char *from, *to; /* to <= from: empty */
  bool written;
} bytes;

static bytes bytes_of(const rfi_arg *x, bool written) {
  if (!x->data || x->type.rank < 0) return (bytes){0};
  int64_t last = 0;
  for (int d = 0; d < x->type.rank; d++) {
    if (x->type.shape[d] == 0) return (bytes){0};
    last += (x->type.shape[d] - 1) * x->stride[d];
  }
  const char *from = x->data;
  return (bytes){from, from + ((last + 1) * rfr_dtype_bits(x->type.dtype) + 7) / 8, written};
}

/* The bytes of the k-th of an op's operands, results and workspace, in this order. */
static bytes nth(const rfi_bound *b, int k) {
  const rfi_call *c = &b->call;
  if (k < c->n_in) return bytes_of(&c->in[k], false);
  if (k < c->n_in + c->n_out) return bytes_of(&c->out[k - c->n_in], true);
  const char *workspace = c->workspace;
  return (bytes){workspace, workspace ? workspace + b->workspace : NULL, true};
}

static bool share(const rfi_bound *a, const rfi_bound *b) {
  for (int i = 0; i <= a->call.n_in + a->call.n_out; i++) {
    const bytes x = nth(a, i);
    for (int k = 0; x.from < x.to && k <= b->call.n_in + b->call.n_out; k++) {
      const bytes y = nth(b, k);
      if (y.from < y.to && (x.written || y.written) && x.from < y.to && y.from < x.to) return true;
    }
  }
  return false;
}

static rfr_status check_pair(const rfi_bound *bound, const rfi_unit *x, const rfi_unit *y) {
  if (x->n == 0)
    return rfi_fail(RFI_E_PLAN_ORDER, "the graph has no path from its copies to op %d of the lowered program",
                    bound[y->first].op);
  for (int i = x->first; i < x->first + x->n; i++)
    for (int k = y->first; k < y->first + y->n; k++)
      if (share(&bound[i], &bound[k]))
        return rfi_fail(RFI_E_PLAN_ORDER,
                        "ops %d and %d of the lowered program share bytes, but the graph has no path "
                        "between them",
                        bound[i].op, bound[k].op);
  return RFR_OK;
}

/* ---- order ---- */

static int by_end(const void *a, const void *b) {
  const rfi_unit_edge *x = a, *y = b;
  return x->to != y->to ? x->to - y->to : x->from - y->from;
}

rfr_status rfi_order_check(rfr_ctx *ctx, const rfi_bound *bound, const rfi_unit *unit, int n, rfi_unit_edge *edge,
                           int n_edges) {
  const int words = (n + 63) / 64;
  uint64_t *before; /* per unit, a bitmap of its predecessors */
  RFI_TRY(RFI_ALLOC(ctx, sizeof *before * ((size_t)n * (size_t)words + 1), &before));
  if (n_edges > 0) qsort(edge, (size_t)n_edges, sizeof *edge, by_end);
  rfr_status s = RFR_OK;
  for (int u = 0, e = 0; u < n && s == RFR_OK; u++) {
    uint64_t *mine = before + (size_t)u * (size_t)words;
    for (; e < n_edges && edge[e].to == u; e++) {
      const uint64_t *theirs = before + (size_t)edge[e].from * (size_t)words;
      for (int w = 0; w < words; w++) mine[w] |= theirs[w];
      mine[edge[e].from / 64] |= (uint64_t)1 << edge[e].from % 64;
    }
    for (int k = 0; k < u && s == RFR_OK; k++) {
      if (k % 64 == 0 && k + 64 <= u && mine[k / 64] == UINT64_MAX) k += 63;
      else if (!(mine[k / 64] >> k % 64 & 1)) s = check_pair(bound, &unit[k], &unit[u]);
    }
  }
  rfi_free(ctx, before);
  return s;
}
