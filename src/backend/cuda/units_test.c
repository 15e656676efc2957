/* SPDX-License-Identifier: Apache-2.0
 *
 * Converting a captured graph to units, without a GPU: units.c over a synthetic graph. Node k is enqueued after the
 * named nodes, and is then the end of its stream.
 */
#include "backend/cuda/units.c"

#include <string.h>

#include "support/context.h"

enum { MOST = 8 };
static struct {
  enum cudaGraphNodeType type[MOST];
  cudaGraphNode_t from[MOST], to[MOST];
  size_t n, n_edges;
  cudaGraphNode_t ends[2]; /* the ends of the queried stream */
  size_t n_ends;
} graph;

static cudaGraphNode_t node_at(size_t i) { return (cudaGraphNode_t)&graph.type[i]; }

cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) {
  (void)g;
  for (size_t i = 0; nodes && i < graph.n; i++) nodes[i] = node_at(i);
  *n = graph.n;
  return cudaSuccess;
}
cudaError_t cudaGraphGetEdges(cudaGraph_t g, cudaGraphNode_t *from, cudaGraphNode_t *to, cudaGraphEdgeData *data,
                              size_t *n) {
  (void)g, (void)data;
  if (from) memcpy(from, graph.from, sizeof *from * graph.n_edges);
  if (to) memcpy(to, graph.to, sizeof *to * graph.n_edges);
  *n = graph.n_edges;
  return cudaSuccess;
}
rfr_status rfi_cuda_node_type(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
  *type = *(enum cudaGraphNodeType *)node;
  return RFR_OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **ends, const cudaGraphEdgeData **data,
                                     size_t *n) {
  (void)stream, (void)id, (void)g;
  *status = cudaStreamCaptureStatusActive;
  *ends = graph.ends;
  *data = NULL;
  *n = graph.n_ends;
  return cudaSuccess;
}
rfr_status rfi_cuda_check(cudaError_t e, const char *what) {
  return e == cudaSuccess ? RFR_OK : rfi_fail(RFI_E_CUDA, "%s", what);
}

static const rfi_cuda_host host = {
    .fail = rfi_fail, .alloc = rfi_alloc, .free = rfi_free, .check_order = rfi_order_check};

/* ---- graphs ---- */

enum { OPS = 3 };
static char bytes[OPS + 1][64];
static rfi_arg arg[OPS][2];
static rfi_bound bound[OPS];

/* Op i reads what op i - 1 writes. */
static void make_ops(void) {
  for (int i = 0; i < OPS; i++) {
    for (int k = 0; k < 2; k++)
      arg[i][k] = (rfi_arg){.data = bytes[i + k], .type = {.dtype = RFR_F32, .rank = 1, .shape = {16}}, .stride = {1}};
    bound[i] = (rfi_bound){.op = i, .call = {.n_in = 1, .n_out = 1, .in = &arg[i][0], .out = &arg[i][1]}};
  }
}

/* After nodes a and b; -1: none. */
static void put(enum cudaGraphNodeType type, int a, int b) {
  const cudaGraphNode_t x = node_at(graph.n);
  graph.type[graph.n++] = type;
  for (int i = 0; i < 2; i++) {
    if ((i ? b : a) < 0) continue;
    graph.from[graph.n_edges] = node_at((size_t)(i ? b : a));
    graph.to[graph.n_edges++] = x;
  }
  graph.ends[0] = x, graph.n_ends = 1;
}
static void kernel(int a, int b) { put(cudaGraphNodeTypeKernel, a, b); }

static void begin(rfi_units *u) {
  memset(&graph, 0, sizeof graph);
  make_ops();
  assert_int_equal(rfi_units_init(&host, ctx, OPS, u), RFR_OK);
}
static void note(rfi_units *u, int op) { assert_int_equal(rfi_units_note(u, NULL, op, 1), RFR_OK); }
static rfr_status finish(rfi_units *u) {
  const rfr_status s = rfi_units_check(&host, ctx, u, NULL, bound);
  rfi_units_deinit(&host, ctx, u);
  return s;
}

/* Op 1 has two nodes, a fill and a kernel. */
static void test_line(void **state) {
  rfi_units u;
  (void)state;
  begin(&u);
  kernel(-1, -1), note(&u, 0);
  put(cudaGraphNodeTypeMemset, 0, -1), kernel(1, -1), note(&u, 1);
  kernel(2, -1), note(&u, 2);
  assert_int_equal(finish(&u), RFR_OK);
  begin(&u);
  kernel(-1, -1), note(&u, 0);
  put(cudaGraphNodeTypeMemset, -1, -1), kernel(1, -1), note(&u, 1); /* without a predecessor */
  kernel(0, 2), note(&u, 2);
  assert_int_equal(finish(&u), RFR_INTERNAL);
  assert_non_null(strstr(rfr_last_error()->message, "ops 0 and 1"));
}

/* Op 1 uses a second stream, which begins after op 0. */
static void test_second_stream(void **state) {
  static const enum cudaGraphNodeType types[] = {cudaGraphNodeTypeKernel, cudaGraphNodeTypeMemcpy,
                                                 cudaGraphNodeTypeMemset};
  rfi_units u;
  (void)state;
  for (int i = 0; i < 3; i++) {
    begin(&u); /* the second stream is not joined, or joined after all ops */
    kernel(-1, -1), note(&u, 0);
    put(types[i], 0, -1);
    kernel(0, -1), note(&u, 1);
    kernel(2, -1), note(&u, 2);
    assert_int_equal(finish(&u), RFR_INTERNAL);
    assert_string_equal(rfr_last_error()->slug, "plan.order");
    assert_non_null(strstr(rfr_last_error()->message, "a stream other than its own"));
  }
  begin(&u); /* joined by an event after op 1's last kernel: the stream has two ends, so no node is recorded */
  kernel(-1, -1), note(&u, 0);
  kernel(0, -1), kernel(0, -1);
  graph.ends[0] = node_at(1), graph.ends[1] = node_at(2), graph.n_ends = 2;
  note(&u, 1);
  kernel(1, 2), note(&u, 2);
  assert_int_equal(finish(&u), RFR_INTERNAL);
  begin(&u); /* joined by op 1's last kernel */
  kernel(-1, -1), note(&u, 0);
  kernel(0, -1), kernel(0, -1), kernel(1, 2), note(&u, 1);
  kernel(3, -1), note(&u, 2);
  assert_int_equal(finish(&u), RFR_INTERNAL);
  assert_non_null(strstr(rfr_last_error()->message, "two parallel branches"));
}

/* Events and empty nodes access no memory. */
static void test_events(void **state) {
  rfi_units u;
  (void)state;
  begin(&u);
  kernel(-1, -1), note(&u, 0);
  put(cudaGraphNodeTypeEventRecord, 0, -1), put(cudaGraphNodeTypeEmpty, 0, -1);
  kernel(0, -1), note(&u, 1);
  kernel(3, -1), note(&u, 2);
  assert_int_equal(finish(&u), RFR_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_line), rft_context_test(test_second_stream),
                                     rft_context_test(test_events)};
  return cmocka_run_group_tests_name("units", tests, NULL, NULL);
}
