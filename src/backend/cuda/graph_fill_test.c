/* SPDX-License-Identifier: Apache-2.0
 *
 * Replacing the fills of a captured graph by kernels, without a GPU: graph_fill.c over a synthetic graph. The test runs
 * the fills on its own memory.
 */
#include "backend/cuda/graph_fill.c"

#include <string.h>

#include "support/context.h"

enum { MOST = 16, EDGES = 32 };
typedef struct node {
  enum cudaGraphNodeType type;
  struct cudaMemsetParams fill;
  unsigned char *to; /* of a kernel */
  uint4 pattern;
  int64_t bytes;
  unsigned blocks;
  bool gone;
} node;
static node nodes[MOST];
static struct { int from, to; } edges[EDGES];
static int n_nodes, n_edges, calls, fails_at; /* call fails_at, from 1 on, fails; 0: none */

static cudaError_t outcome(void) { return ++calls == fails_at ? cudaErrorInvalidValue : cudaSuccess; }
static cudaGraphNode_t handle(int i) { return (cudaGraphNode_t)&nodes[i]; }
static int number(cudaGraphNode_t x) { return (int)((node *)x - nodes); }
static bool lives(int edge) { return !nodes[edges[edge].from].gone && !nodes[edges[edge].to].gone; }

cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *out, size_t *n) {
  (void)g;
  if (out && n_nodes == 0) return cudaErrorInvalidValue; /* as CUDA 13.0 does */
  for (int i = 0; out && i < n_nodes; i++) out[i] = handle(i);
  *n = (size_t)n_nodes;
  return outcome();
}
rfr_status rfi_cuda_node_type(cudaGraphNode_t x, enum cudaGraphNodeType *type) {
  *type = nodes[number(x)].type;
  return RFR_OK;
}
cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t x, struct cudaMemsetParams *p) {
  *p = nodes[number(x)].fill;
  return outcome();
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t x, cudaGraphNode_t *out, cudaGraphEdgeData *data, size_t *n) {
  (void)data;
  *n = 0;
  for (int i = 0; i < n_edges; i++)
    if (lives(i) && edges[i].to == number(x) && ++*n && out) out[*n - 1] = handle(edges[i].from);
  return outcome();
}
cudaError_t cudaGraphNodeGetDependentNodes(cudaGraphNode_t x, cudaGraphNode_t *out, cudaGraphEdgeData *data,
                                           size_t *n) {
  (void)data;
  *n = 0;
  for (int i = 0; i < n_edges; i++)
    if (lives(i) && edges[i].from == number(x) && ++*n && out) out[*n - 1] = handle(edges[i].to);
  return outcome();
}
static void join(int from, int to) {
  assert_in_range(n_edges, 0, EDGES - 1);
  edges[n_edges].from = from, edges[n_edges++].to = to;
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *out, cudaGraph_t g, const cudaGraphNode_t *after, size_t n,
                                   const struct cudaKernelNodeParams *p) {
  (void)g;
  assert_in_range(n_nodes, 0, MOST - 1);
  assert_ptr_equal(p->func, rfi_fill_kernel());
  assert_int_equal(p->blockDim.x * p->blockDim.y * p->blockDim.z, RFI_FILL_THREADS);
  assert_int_equal(p->gridDim.y * p->gridDim.z, 1);
  nodes[n_nodes] = (node){.type = cudaGraphNodeTypeKernel,
                          .to = *(unsigned char **)p->kernelParams[0],
                          .pattern = *(uint4 *)p->kernelParams[1],
                          .bytes = *(int64_t *)p->kernelParams[2],
                          .blocks = p->gridDim.x};
  for (size_t i = 0; i < n; i++) join(number(after[i]), n_nodes);
  *out = handle(n_nodes++);
  return outcome();
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t g, const cudaGraphNode_t *from, const cudaGraphNode_t *to,
                                     const cudaGraphEdgeData *data, size_t n) {
  (void)g, (void)data;
  for (size_t i = 0; i < n; i++) join(number(from[i]), number(to[i]));
  return outcome();
}
cudaError_t cudaGraphDestroyNode(cudaGraphNode_t x) {
  nodes[number(x)].gone = true;
  return outcome();
}
void *rfi_fill_kernel(void) { return nodes; }
rfr_status rfi_cuda_check(cudaError_t e, const char *what) {
  return e == cudaSuccess ? RFR_OK : rfi_fail(RFI_E_CUDA, "%s", what);
}

static const rfi_cuda_host host = {.fail = rfi_fail, .alloc = rfi_alloc, .free = rfi_free};

/* Kernel 0 precedes fills 1 and 2, and these precede kernel 3. */
static void make(struct cudaMemsetParams first, struct cudaMemsetParams second) {
  memset(nodes, 0, sizeof nodes);
  n_nodes = 4, n_edges = calls = fails_at = 0;
  nodes[1] = (node){.type = cudaGraphNodeTypeMemset, .fill = first};
  nodes[2] = (node){.type = cudaGraphNodeTypeMemset, .fill = second};
  for (int fill = 1; fill < 3; fill++) join(0, fill), join(fill, 3);
}

static rfr_status change(void) { return rfi_cuda_fill_by_kernels(&host, ctx, NULL); }

static bool is_joined(int from, int to) {
  for (int i = 0; i < n_edges; i++)
    if (lives(i) && edges[i].from == from && edges[i].to == to) return true;
  return false;
}

static void test_values(void **state) {
  (void)state;
  static const struct {
    unsigned value, size;
    size_t elements;
    uint32_t word;
    unsigned blocks;
  } cases[] = {{0, 1, 4, 0, 1},
               {0x1ab, 1, 5, 0xabababab, 1},
               {0x12cd, 2, 3, 0x12cd12cd, 1},
               {0x12345678, 4, 1024, 0x12345678, 1},
               {7, 1, 4097, 0x07070707, 2},
               {0, 1, 2097152, 0, 132}};
  static uint32_t memory[4];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct cudaMemsetParams p = {
        .dst = memory, .value = cases[i].value, .elementSize = cases[i].size, .width = cases[i].elements, .height = 1};
    make(p, p);
    assert_int_equal(change(), RFR_OK);
    assert_int_equal(n_nodes, 6);
    for (int k = 4; k < 6; k++) {
      assert_ptr_equal(nodes[k].to, memory);
      const uint4 all = {cases[i].word, cases[i].word, cases[i].word, cases[i].word};
      assert_memory_equal(&nodes[k].pattern, &all, sizeof all);
      assert_int_equal(nodes[k].bytes, cases[i].elements * cases[i].size);
      assert_int_equal(nodes[k].blocks, cases[i].blocks);
      assert_true(is_joined(0, k) && is_joined(k, 3));
    }
    assert_true(nodes[1].gone && nodes[2].gone);
  }
}

/* Large fills, fills of several rows and unaligned fills stay memset nodes. */
static void test_kept(void **state) {
  (void)state;
  static uint32_t memory[4];
  const struct cudaMemsetParams large = {.dst = memory, .elementSize = 4, .width = (4 << 20) + 1, .height = 1},
                                rows = {.dst = memory, .elementSize = 1, .width = 4, .height = 2, .pitch = 8};
  struct cudaMemsetParams odd = {.dst = (char *)memory + 2, .elementSize = 4, .width = 1, .height = 1};
  make(large, rows);
  assert_int_equal(change(), RFR_OK);
  assert_int_equal(n_nodes, 4);
  make(odd, rows);
  assert_int_equal(change(), RFR_OK);
  assert_int_equal(n_nodes, 4);
  assert_false(nodes[1].gone || nodes[2].gone);
}

static void test_no_nodes(void **state) {
  (void)state;
  n_nodes = n_edges = calls = fails_at = 0;
  assert_int_equal(change(), RFR_OK);
}

static void test_errors(void **state) {
  (void)state;
  static uint32_t memory[4];
  const struct cudaMemsetParams p = {.dst = memory, .elementSize = 4, .width = 1, .height = 1};
  make(p, p);
  assert_int_equal(change(), RFR_OK);
  const int all = calls;
  for (int k = 1; k <= all; k++) {
    make(p, p);
    fails_at = k;
    assert_int_not_equal(change(), RFR_OK);
    assert_string_equal(rfr_last_error()->slug, "cuda");
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_values), rft_context_test(test_kept),
                                     rft_context_test(test_no_nodes), rft_context_test(test_errors)};
  return cmocka_run_group_tests_name("graph_fill", tests, NULL, NULL);
}
