/* SPDX-License-Identifier: Apache-2.0
 *
 * Converts a captured graph to the units and edges that backend/graph_order.h checks. A unit's nodes are a chain,
 * because they were enqueued on one stream: its last node was noted when it was enqueued; the others are the nodes that
 * lead to it and belong to no earlier unit. An edge between units counts if it leads from the last node of one to the
 * first node of another; any other edge would order only a part of them. A node without a unit was enqueued by an op on
 * another stream: its memory accesses are unknown, so such a graph is refused.
 */
#include "backend/cuda/units.h"

#include <stdlib.h>

#include "backend/cuda/node_type.h"

#define CUDA(call) RFI_TRY(rfi_cuda_check(call, "reading a graph"))

rfr_status rfi_units_init(const rfi_cuda_host *core, rfr_ctx *ctx, int n, rfi_units *u) {
  *u = (rfi_units){0};
  const rfr_status s = core->alloc(ctx, sizeof *u->unit * (size_t)(n + 1), (void **)&u->unit);
  return s == RFR_OK ? core->alloc(ctx, sizeof *u->last * (size_t)(n + 1), (void **)&u->last) : s;
}

void rfi_units_deinit(const rfi_cuda_host *core, rfr_ctx *ctx, rfi_units *u) {
  core->free(ctx, u->unit);
  core->free(ctx, u->last);
}

rfr_status rfi_units_note(rfi_units *u, cudaStream_t stream, int first, int n) {
  enum cudaStreamCaptureStatus status;
  const cudaGraphNode_t *ends;
  const cudaGraphEdgeData *data; /* must be requested: without it, edges with data are an error */
  size_t n_ends;
  CUDA(cudaStreamGetCaptureInfo(stream, &status, NULL, NULL, &ends, &data, &n_ends));
  if (status != cudaStreamCaptureStatusActive || n_ends != 1) return RFR_OK;
  for (int i = u->n - 1; i >= 0; i--)
    if (u->last[i] == ends[0]) return RFR_OK; /* no node was added, because the ops have no elements */
  u->unit[u->n] = (rfi_unit){first, n};
  u->last[u->n++] = ends[0];
  return RFR_OK;
}

/* ---- edges ---- */

typedef struct node {
  cudaGraphNode_t node;
  int owner; /* index of its unit; -1: not known yet */
} node;
typedef struct link {
  node *from, *to;
} link;

static int by_node(const void *a, const void *b) {
  const node *x = a, *y = b;
  return (x->node > y->node) - (x->node < y->node);
}
static int by_end(const void *a, const void *b) {
  const link *x = a, *y = b;
  return x->to != y->to ? (x->to > y->to) - (x->to < y->to) : (x->from > y->from) - (x->from < y->from);
}

static node *find(node *nodes, size_t n, cudaGraphNode_t x) {
  const node key = {x, -1};
  return bsearch(&key, nodes, n, sizeof key, by_node);
}

/* The links to x. Links are sorted by their ends, so these are adjacent. */
static const link *links_to(const link *links, size_t n, const node *x, size_t *count) {
  size_t low = 0, high = n;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (links[middle].to < x) low = middle + 1;
    else high = middle;
  }
  for (*count = 0; low + *count < n && links[low + *count].to == x;) ++*count;
  return links + low;
}

/* Finds the nodes of a unit, from its last one backwards, and the edges that lead to its first. */
static rfr_status own(const rfi_cuda_host *core, const rfi_units *u, int unit, node *nodes, size_t n, const link *links,
                      size_t n_links, rfi_unit_edge *edges, int *n_edges) {
  node *x = find(nodes, n, u->last[unit]);
  while (x) {
    size_t count;
    const link *to = links_to(links, n_links, x, &count);
    x->owner = unit;
    node *inside = NULL;
    for (size_t i = 0; i < count; i++)
      if (to[i].from->owner < 0) inside = to[i].from;
    if (inside && count > 1) return core->fail(RFI_E_PLAN_ORDER, "an op has two parallel branches in the graph");
    for (size_t i = 0; !inside && i < count; i++)
      if (u->last[to[i].from->owner] == to[i].from->node)
        edges[(*n_edges)++] = (rfi_unit_edge){to[i].from->owner, unit};
    x = inside;
  }
  return RFR_OK;
}

/* Every kernel, copy and fill must belong to a unit. Other nodes may be NCCL's events. */
static rfr_status refuse_strays(const rfi_cuda_host *core, const node *nodes, size_t n) {
  for (size_t i = 0; i < n; i++) {
    enum cudaGraphNodeType type;
    if (nodes[i].owner >= 0) continue;
    RFI_TRY(rfi_cuda_node_type(nodes[i].node, &type));
    if (type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemcpy || type == cudaGraphNodeTypeMemset)
      return core->fail(RFI_E_PLAN_ORDER, "an op enqueued work on a stream other than its own");
  }
  return RFR_OK;
}

typedef struct graph_buffers { /* for queries of a graph */
  cudaGraphNode_t *node, *from, *to;
  cudaGraphEdgeData *data;
  node *nodes;
  link *links;
  rfi_unit_edge *edges;
} graph_buffers;

static rfr_status check(const rfi_cuda_host *core, rfr_ctx *ctx, const rfi_units *u, cudaGraph_t graph,
                        const rfi_bound *bound, graph_buffers *r) {
  size_t n = 0, n_links = 0;
  int n_edges = 0;
  CUDA(cudaGraphGetNodes(graph, NULL, &n));
  CUDA(cudaGraphGetEdges(graph, NULL, NULL, NULL, &n_links));
  RFI_TRY(core->alloc(ctx, sizeof *r->node * (n + 1), (void **)&r->node));
  RFI_TRY(core->alloc(ctx, sizeof *r->nodes * (n + 1), (void **)&r->nodes));
  RFI_TRY(core->alloc(ctx, sizeof *r->from * (n_links + 1), (void **)&r->from));
  RFI_TRY(core->alloc(ctx, sizeof *r->to * (n_links + 1), (void **)&r->to));
  RFI_TRY(core->alloc(ctx, sizeof *r->data * (n_links + 1), (void **)&r->data));
  RFI_TRY(core->alloc(ctx, sizeof *r->links * (n_links + 1), (void **)&r->links));
  RFI_TRY(core->alloc(ctx, sizeof *r->edges * (n_links + 1), (void **)&r->edges));
  CUDA(cudaGraphGetNodes(graph, r->node, &n));
  CUDA(cudaGraphGetEdges(graph, r->from, r->to, r->data, &n_links));
  for (size_t i = 0; i < n; i++) r->nodes[i] = (node){r->node[i], -1};
  qsort(r->nodes, n, sizeof *r->nodes, by_node);
  for (size_t i = 0; i < n_links; i++) r->links[i] = (link){find(r->nodes, n, r->from[i]), find(r->nodes, n, r->to[i])};
  qsort(r->links, n_links, sizeof *r->links, by_end);
  for (int i = 0; i < u->n; i++) RFI_TRY(own(core, u, i, r->nodes, n, r->links, n_links, r->edges, &n_edges));
  RFI_TRY(refuse_strays(core, r->nodes, n));
  return core->check_order(ctx, bound, u->unit, u->n, r->edges, n_edges);
}

rfr_status rfi_units_check(const rfi_cuda_host *core, rfr_ctx *ctx, const rfi_units *u, cudaGraph_t graph,
                           const rfi_bound *bound) {
  graph_buffers r = {0};
  const rfr_status s = check(core, ctx, u, graph, bound, &r);
  core->free(ctx, r.node);
  core->free(ctx, r.nodes);
  core->free(ctx, r.from);
  core->free(ctx, r.to);
  core->free(ctx, r.data);
  core->free(ctx, r.links);
  core->free(ctx, r.edges);
  return s;
}
