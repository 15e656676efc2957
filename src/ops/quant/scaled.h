/* SPDX-License-Identifier: Apache-2.0
 *
 * Operands, results and layouts of the quantizers and of scaled GEMMs.
 */
#ifndef RFI_SCALED_H
#define RFI_SCALED_H

#include "ops/op_index.h"
#include "ops/quant/scaling.h"
#include "refrain/trace.h"

/* Those of grouped_quantize are the same. */
enum { RFI_Q_RESULTS = RFI_OUT_quantize_amax + 1 };

/* The scaling of a tensor with these scales; -1: none fits. mx32x32 and nv16x16 repeat a scale for each row, so they
 * count as mx32 and nv16. */
RFI_SCALING int64_t rfi_scaling_of(const rfr_type *q, const rfr_type *scale) {
  if (scale->rank == 1) return scale->dtype == RFR_F32 ? RFR_SCALING_TENSOR : -1;
  if (scale->dtype == RFR_E8M0) return RFR_SCALING_MX32;
  if (scale->dtype == RFR_E4M3) return RFR_SCALING_NV16;
  if (scale->dtype != RFR_F32) return -1;
  return scale->shape[scale->rank - 2] == q->shape[q->rank - 2] ? RFR_SCALING_ROW128 : RFR_SCALING_BLOCK128;
}

/* Where groups lie in the result col of grouped_quantize, in blocks: each group begins a block. Group g's rows need at
 * most the blocks up to where g + 1 begins, so the layout follows from the offsets without a sum over groups. */
RFI_SCALING int64_t rfi_group_block(int64_t scaling) {
  const int block = rfi_scaling_info_of(scaling).block;
  return block ? block : RFI_TENSOR_BLOCK;
}
RFI_SCALING int64_t rfi_group_columns(int64_t scaling, int64_t rows, int64_t groups) {
  const int64_t block = rfi_group_block(scaling);
  return block * (rfi_blocks_of(rows, block) + groups);
}
RFI_SCALING int64_t rfi_group_start(int64_t begin, int64_t g, int64_t block) { return begin / block + g; }

#endif
