/* SPDX-License-Identifier: Apache-2.0
 *
 * Storage of quantized tensors: one u8 tensor has the codes, then the scales, each section at a multiple of 16 bytes.
 *
 *   codes    `bits` per element, in the order of memory; of two codes in a byte the first has the high bits
 *   scales   one for each block of `block` adjacent elements of the flat tensor, or for each row if block is 0,
 *            for each matrix (the last two dimensions) if it is -1
 *   fp8      E4M3; a value is the code's number times the scale
 *   nf4      a scale is a code of the signed dynamic map; for each RFI_NESTED scales an f32 factor, and at the end an
 *            f32 offset: scale = map[code] * factor + offset, rounded after each operation
 *
 * These are the codes and scales of bitsandbytes: quantize_4bit(compress_statistics=True) for nf4,
 * int8_vectorwise_quant(threshold=0) for int8, quantize_blockwise for the dynamic ones. bitsandbytes sums the mean that
 * is nf4's offset in another order; here it is summed in f64. Those of fp8 are the op quantize's.
 */
#ifndef RFI_FORMATS_H
#define RFI_FORMATS_H

#include <stdint.h>

#include "refrain/ops.h"

enum { RFI_NESTED = 256, RFI_NF4_BLOCK = 64, RFI_DYNAMIC_BLOCK = 256, RFI_SECTION = 16 };

/* The largest code of int8 is 127; bitsandbytes multiplies by this f32 instead of dividing by it. */
#define RFI_INT8_STEP 7.874015718698502e-3f

typedef struct rfi_quant_layout {
  int64_t n, block;  /* number of elements; elements per scale */
  int64_t scales;    /* number of scales */
  int64_t scales_at; /* byte offset of the scales */
  int64_t nested_at; /* byte offset of nf4's factors; 0: none */
  int64_t bytes;     /* size of the tensor */
} rfi_quant_layout;

static inline int64_t rfi_section(int64_t bytes) { return (bytes + RFI_SECTION - 1) / RFI_SECTION * RFI_SECTION; }

/* For n elements with rows of `row` elements and matrices of `matrix`; `format` is not RFR_QUANT_NONE. */
static inline rfi_quant_layout rfi_quant_layout_of(rfr_quant format, int64_t n, int64_t row, int64_t matrix) {
  static const int blocks[] = {
#define RFI_QUANT_BLOCK(e, name, bits, block, scale) block,
      RFR_QUANTS(RFI_QUANT_BLOCK)
#undef RFI_QUANT_BLOCK
  };
  const int64_t own = blocks[format] > 0 ? blocks[format] : blocks[format] < 0 ? matrix : row;
  rfi_quant_layout l = {n, own > 0 ? own : 1, 0, 0, 0, 0};
  l.scales = (n + l.block - 1) / l.block;
  l.scales_at = rfi_section(format == RFR_QUANT_NF4 ? (n + 1) / 2 : n);
  if (format != RFR_QUANT_NF4) {
    l.bytes = l.scales_at + 4 * l.scales;
    return l;
  }
  l.nested_at = rfi_section(l.scales_at + l.scales);
  l.bytes = l.nested_at + 4 * ((l.scales + RFI_NESTED - 1) / RFI_NESTED + 1);
  return l;
}

/* The layout of a tensor of this shape. */
static inline rfi_quant_layout rfi_quant_layout_for(rfr_quant format, int rank, const int64_t *shape) {
  const int64_t row = rank > 0 ? shape[rank - 1] : 1;
  int64_t n = 1;
  for (int d = 0; d < rank; d++) n *= shape[d];
  return rfi_quant_layout_of(format, n, row, rank > 1 ? row * shape[rank - 2] : row);
}

#ifndef __cplusplus
/* The numbers of a quantized tensor as f32, on the host; x at a multiple of 4. */
void rfi_quant_decode(rfr_quant format, int rank, const int64_t *shape, const void *x, float *values);
#endif

#endif
