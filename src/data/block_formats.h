/* SPDX-License-Identifier: Apache-2.0
 *
 * Element formats of GGUF files: plain floats, and blocks of quantized elements. A block has `elements` elements in
 * `bytes` bytes, its scales included.
 *
 * Decoding gives the f32 values of llama.cpp's reference (ggml-quants.c) and of the Python package gguf, bit for bit.
 */
#ifndef RFI_BLOCK_FORMATS_H
#define RFI_BLOCK_FORMATS_H

#include <stdint.h>

#include "refrain/dtype.h"

typedef struct rfi_block_format {
  const char *name; /* as llama.cpp writes it: "Q4_K" */
  uint32_t id;      /* ggml_type in a GGUF file */
  int elements, bytes;
  rfr_dtype dtype; /* dtype of a plain format; RFR_DTYPE_COUNT for blocks and integers */
  /* Decodes n blocks to n * elements floats. NULL: the format is known but cannot be decoded. */
  void (*decode)(const uint8_t *blocks, int64_t n, float *out);
  /* Encodes n * elements floats to n blocks; NULL: the format cannot be written. */
  void (*encode)(const float *x, int64_t n, uint8_t *blocks);
} rfi_block_format;

/* NULL: llama.cpp has no such type, or a newer one. */
const rfi_block_format *rfi_block_format_of(uint32_t id);
/* By name, without regard to case ("q8_0"); NULL if unknown. */
const rfi_block_format *rfi_block_format_named(const char *name);
/* The formats that can be decoded, separated by ", ". */
extern const char rfi_block_formats_decoded[];
enum { RFI_BLOCK_ELEMENTS_MOST = 256 };

#endif
