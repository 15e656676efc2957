/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs by cuBLASLt, which is loaded when a GPU is used.
 */
#ifndef RFI_LT_H
#define RFI_LT_H

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_module.h"

typedef struct rfi_lt rfi_lt;

/* `info` must outlive the result. */
rfr_status rfi_lt_open(const rfi_cuda_host *core, rfr_ctx *ctx, const rfi_cuda_info *info, rfi_lt **out);
void rfi_lt_close(rfi_lt *lt); /* accepts NULL */

/* Sets run, kernel, workspace and library of a call of `def`, a GEMM, if cuBLASLt supports it. Otherwise run stays NULL
 * (mixed types, rows that are not 16-byte aligned) and the module's own kernel is used. The algorithm is one of
 * cuBLASLt's first heuristic results, chosen only by shapes, types and strides. `lt` NULL: there is no device; the
 * workspace is the same as with one. */
rfr_status rfi_lt_select(rfi_lt *lt, const rfi_op_def *def, rfi_bound *b);

/* The same for matmul_scaled: FP8 with a scale per tensor. fast: the accumulator of forwards; gradients are accumulated
 * in f32. */
rfr_status rfi_lt_select_scaled(rfi_lt *lt, bool fast, rfi_bound *b);

/* The i-th GEMM selected so far, as rfi_backend's `choice` and `choose`. Ops that were selected earlier use the new
 * algorithm from then on. */
const char *rfi_lt_choice(const rfi_lt *lt, int i);
rfr_status rfi_lt_choose(rfi_lt *lt, int i, cudaStream_t stream, const char *stored, char value[RFI_CHOICE]);

/* Writes "cuBLASLt 13.1.0"; if there is none, returns false and writes why. */
bool rfi_lt_describe(const rfi_cuda_host *core, char *text, size_t size);

#endif
