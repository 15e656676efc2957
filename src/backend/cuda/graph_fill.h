/* SPDX-License-Identifier: Apache-2.0
 *
 * Replaces the fills of a captured graph by kernels. cuBLASLt clears four bytes before most GEMMs. As a memset node,
 * such a fill waits for concurrent copies by copy engines.
 */
#ifndef RFI_GRAPH_FILL_H
#define RFI_GRAPH_FILL_H

#include "backend/cuda/cuda.h"

struct rfi_cuda_host;

/* Replaces memset nodes by kernels, except fills of more than 16 MiB, of several rows, or of unaligned memory. */
rfr_status rfi_cuda_fill_by_kernels(const struct rfi_cuda_host *core, rfr_ctx *ctx, cudaGraph_t graph);

#endif
