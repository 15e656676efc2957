/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantized tensors in safetensors folders, decoded when they are loaded:
 *   fp8           NAME as E4M3 and NAME_scale_inv (f32 or bf16), one scale for each block of 128 x 128
 *   bitsandbytes  NAME as two 4-bit codes a byte, the first in the high bits; NAME.quant_map has the 16 values,
 *                 NAME.absmax a scale for each block, which may itself be 8-bit codes with nested_absmax and
 * nested_quant_map; NAME.quant_state.bitsandbytes__nf4 (or fp4) is JSON with block sizes, dtype and shape Values are
 * those of transformers' and bitsandbytes' dequantization, bit for bit.
 */
#ifndef RFI_QUANTIZED_H
#define RFI_QUANTIZED_H

#include "data/safetensors.h"

/* Finds a tensor of a folder by name; *stored NULL: there is none. */
typedef struct rfi_tensor_files {
  rfr_ctx *ctx;
  void *user;
  rfr_status (*find)(void *user, const char *name, rfi_safetensors **file, const rfi_stored **stored);
} rfi_tensor_files;

/* Reads the tensor `name` of `rank` and `shape` as `dtype`, if it is quantized; otherwise *done is false. Errors:
 * model.weights for missing or inconsistent parts; safetensors, json, file.*. */
rfr_status rfi_quantized_read(const rfi_tensor_files *files, const char *path, const char *name, int rank,
                              const int64_t *shape, rfr_dtype dtype, void *data, bool *done);

#endif
