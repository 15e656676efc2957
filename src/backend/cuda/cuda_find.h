/* SPDX-License-Identifier: Apache-2.0
 *
 * Which GPU there is, and what else of what GPUs need: said with versions, or with what a missing piece costs.
 */
#ifndef RFI_CUDA_FIND_H
#define RFI_CUDA_FIND_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

/* "cuda", "cuda:1"; -1: "cuda:none". */
rfr_status rfi_cuda_parse_device(const rfi_cuda_host *core, const char *text, int *ordinal);
/* Errors: backend.missing, with what is there and what is wanted. */
rfr_status rfi_cuda_find(const rfi_cuda_host *core, int ordinal, bool portable, rfi_cuda_info *info);
/* The context's GPU, the first one for a context of the CPU, and its libraries. */
rfr_status rfi_cuda_describe(const rfi_cuda_host *core, rfr_ctx *ctx, char *text, size_t size);
/* rfr_cuda_piece behind the module itself: i from 0 on. */
rfr_status rfi_cuda_piece(const rfi_cuda_host *core, int i, rfr_piece *out);

#endif
