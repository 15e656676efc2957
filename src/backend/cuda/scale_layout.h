/* SPDX-License-Identifier: Apache-2.0
 *
 * Scales of blocks in the layout of cuBLASLt.
 */
#ifndef RFI_SCALE_LAYOUT_H
#define RFI_SCALE_LAYOUT_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues a copy of block scales along the reduction, (lines, blocks). With a scale per line, the result is (blocks,
 * lines); otherwise rows are padded to a multiple of four blocks. */
rfr_status rfi_cuda_scale_layout(const float *from, int64_t lines, int64_t blocks, bool each_line, float *to,
                                 cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
