/* SPDX-License-Identifier: Apache-2.0
 *
 * The type of a graph's node. The runtime's call fails for batches of memory operations, which NCCL's copies contain.
 */
#ifndef RFI_NODE_TYPE_H
#define RFI_NODE_TYPE_H

#include <cuda_runtime_api.h>

#include "refrain/op.h"

/* A type that the runtime does not know has the driver's number. */
rfr_status rfi_cuda_node_type(cudaGraphNode_t node, enum cudaGraphNodeType *type);

#endif
