/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/node_type.h"

#include <cuda.h>
#include <string.h>

#include "backend/cuda/cuda.h"

static rfr_status fail(cudaError_t e) { return rfi_cuda_check(e, "reading a graph: cuGraphNodeGetType"); }

/* Driver and runtime have the same number for each type that the runtime knows. */
rfr_status rfi_cuda_node_type(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
  CUresult (*get_type)(CUgraphNode, CUgraphNodeType *);
  void *entry = NULL;
  enum cudaDriverEntryPointQueryResult found;
  CUgraphNodeType known;
  const cudaError_t e =
      cudaGetDriverEntryPointByVersion("cuGraphNodeGetType", &entry, 12000, cudaEnableDefault, &found);
  if (e != cudaSuccess || !entry) return fail(e != cudaSuccess ? e : cudaErrorSymbolNotFound);
  memcpy(&get_type, &entry, sizeof get_type);
  if (get_type(node, &known) != CUDA_SUCCESS) return fail(cudaErrorInvalidValue);
  *type = (enum cudaGraphNodeType)known;
  return RFR_OK;
}
