/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products by cuBLASLt, loaded when a GPU is used.
 */
#ifndef RFI_LT_H
#define RFI_LT_H

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

typedef struct rfi_lt rfi_lt;

/* `info` stays where it is. */
rfr_status rfi_lt_open(const rfi_cuda_host *core, rfr_ctx *ctx, const rfi_cuda_info *info, rfi_lt **out);
void rfi_lt_close(rfi_lt *lt); /* accepts NULL */

/* Sets run, kernel, workspace and library of a matmul that cuBLASLt takes; leaves run NULL for one that it
 * does not (mixed types, rows that are not 16-byte aligned), which the kernel of our own then runs. The
 * choice is made of shapes, types and strides alone, among cuBLASLt's first heuristic ones. `lt` NULL:
 * there is no device, and the workspace is what it would be. */
rfr_status rfi_lt_bind(rfi_lt *lt, rfi_bound *b);

/* Of the products bound until now, the i-th: as rfi_backend's `choice` and `choose`. A product that was bound before
 * runs by its new algorithm from then on. */
const char *rfi_lt_choice(const rfi_lt *lt, int i);
rfr_status rfi_lt_choose(rfi_lt *lt, int i, cudaStream_t stream, const char *stored, char value[RFI_CHOICE]);

/* "cuBLASLt 13.1.0"; false: there is none, which the text says. */
bool rfi_lt_describe(const rfi_cuda_host *core, char *text, size_t size);

#endif
