/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds the GPU and the libraries that GPUs need, with their versions or the effect of a missing one.
 */
#ifndef RFI_CUDA_FIND_H
#define RFI_CUDA_FIND_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

/* "cuda", "cuda:1"; -1: "cuda:none". */
rfr_status rfi_cuda_parse_device(const rfi_cuda_host *core, const char *text, int *ordinal);
/* Errors: backend.missing, with the found and the required version. */
rfr_status rfi_cuda_find(const rfi_cuda_host *core, int ordinal, bool portable, rfi_cuda_info *info);
/* Describes the context's GPU (of a CPU context: the first GPU) and its libraries. */
rfr_status rfi_cuda_describe(const rfi_cuda_host *core, rfr_ctx *ctx, char *text, size_t size);
/* rfr_cuda_piece without the module itself; i starts at 0. */
rfr_status rfi_cuda_piece(const rfi_cuda_host *core, int i, rfr_piece *out);

#endif
