/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of the parts that a GPU received from all ranks.
 */
#ifndef RFI_OPS_COLLECTIVE_SUM_H
#define RFI_OPS_COLLECTIVE_SUM_H

#include "refrain/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[i] = parts[0][i] + parts[1][i] + ..., n elements of f32, bf16 or f16 each. */
rfr_status rfi_collective_sum_cuda(rfr_dtype dtype, int ranks, const void *parts, int64_t n, void *to, void *stream);

#ifdef __cplusplus
}
#endif
#endif
