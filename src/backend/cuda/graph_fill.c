/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/graph_fill.h"

#include "backend/cuda/cuda_module.h"
#include "backend/cuda/node_type.h"

#define CUDA(call) RFI_TRY(rfi_cuda_check(call, "changing a graph"))

enum { MOST_BLOCKS = 132, MOST_BYTES = 16 << 20 };

static uint32_t repeated(unsigned value, unsigned size) {
  return size == 4 ? value : size == 2 ? (value & 0xFFFF) * 0x10001u : (value & 0xFF) * 0x1010101u;
}

static rfr_status replace(const rfi_cuda_host *core, rfr_ctx *ctx, cudaGraph_t graph, cudaGraphNode_t node,
                          const struct cudaMemsetParams *p) {
  cudaGraphNode_t kernel, *all;
  size_t before = 0, after = 0;
  unsigned char *to = (unsigned char *)p->dst;
  int64_t n = (int64_t)(p->width * p->elementSize);
  const uint32_t word = repeated(p->value, p->elementSize);
  uint4 pattern = {word, word, word, word};
  void *args[] = {&to, &pattern, &n};
  CUDA(cudaGraphNodeGetDependencies(node, NULL, NULL, &before));
  CUDA(cudaGraphNodeGetDependentNodes(node, NULL, NULL, &after));
  RFI_TRY(core->alloc(ctx, sizeof *all * (before + after + 1), (void **)&all));
  const int64_t blocks = (n + 16 * RFI_FILL_THREADS - 1) / (16 * RFI_FILL_THREADS);
  const struct cudaKernelNodeParams with = {.func = rfi_fill_kernel(),
                                            .gridDim = {(unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), 1, 1},
                                            .blockDim = {RFI_FILL_THREADS, 1, 1},
                                            .kernelParams = args};
  cudaError_t e = before > 0 ? cudaGraphNodeGetDependencies(node, all, NULL, &before) : cudaSuccess;
  if (e == cudaSuccess && after > 0) e = cudaGraphNodeGetDependentNodes(node, all + before, NULL, &after);
  if (e == cudaSuccess) e = cudaGraphAddKernelNode(&kernel, graph, all, before, &with);
  for (size_t i = 0; i < after && e == cudaSuccess; i++)
    e = cudaGraphAddDependencies(graph, &kernel, &all[before + i], NULL, 1);
  if (e == cudaSuccess) e = cudaGraphDestroyNode(node);
  core->free(ctx, all);
  return rfi_cuda_check(e, "changing a graph");
}

static rfr_status replace_all(const rfi_cuda_host *core, rfr_ctx *ctx, cudaGraph_t graph, const cudaGraphNode_t *nodes,
                              size_t n) {
  for (size_t i = 0; i < n; i++) {
    enum cudaGraphNodeType type;
    struct cudaMemsetParams p;
    RFI_TRY(rfi_cuda_node_type(nodes[i], &type));
    if (type != cudaGraphNodeTypeMemset) continue;
    CUDA(cudaGraphMemsetNodeGetParams(nodes[i], &p));
    const bool small = p.height == 1 && p.width * p.elementSize <= MOST_BYTES;
    if (small && (uintptr_t)p.dst % p.elementSize == 0) RFI_TRY(replace(core, ctx, graph, nodes[i], &p));
  }
  return RFR_OK;
}

rfr_status rfi_cuda_fill_by_kernels(const rfi_cuda_host *core, rfr_ctx *ctx, cudaGraph_t graph) {
  cudaGraphNode_t *nodes;
  size_t n = 0;
  CUDA(cudaGraphGetNodes(graph, NULL, &n));
  if (n == 0) return RFR_OK; /* cudaGraphGetNodes fails for a graph without nodes */
  RFI_TRY(core->alloc(ctx, sizeof *nodes * (n + 1), (void **)&nodes));
  rfr_status s = rfi_cuda_check(cudaGraphGetNodes(graph, nodes, &n), "reading a graph");
  if (s == RFR_OK) s = replace_all(core, ctx, graph, nodes, n);
  core->free(ctx, nodes);
  return s;
}
