/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads the weights of a model: a GGUF file, or a folder with model.safetensors or the shards that
 * model.safetensors.index.json names. In a folder, a tensor name may lack the outer module ("transformer.", "model."),
 * as in folders of base models.
 *
 * An index is foreign data: it must name files of the folder, without a path.
 */
#ifndef RFI_WEIGHTS_H
#define RFI_WEIGHTS_H

#include "refrain/nn.h"
#include "refrain/tensor.h"

typedef struct rfi_weights rfi_weights;

/* `model`: a folder or a GGUF file. */
rfr_status rfi_weights_open(rfr_ctx *ctx, const char *model, rfi_weights **out);
void rfi_weights_close(rfi_weights *w); /* accepts NULL */
/* Reads the tensor x->name into x->data (x->bytes bytes) and converts float types, or decodes the blocks of a GGUF
 * file. If the model does not have it, reads its pieces (rfi_hf_pieces). Errors: model.weights for a missing tensor
 * or another shape; safetensors; gguf; file.*. */
rfr_status rfi_weights_read(rfi_weights *w, const rfr_model_config *c, const rfr_tensor *x);
/* A tensor whose elements are contiguous in the files, so that threads can read ranges of it. */
typedef struct rfi_weight_piece {
  struct rfi_safetensors *file;
  const struct rfi_stored *stored;
} rfi_weight_piece;
typedef struct rfi_weight_range {
  rfi_weight_piece *pieces; /* of equal size, in order; free with rfi_free */
  int n;                    /* 0: only the complete tensor can be read, because it is stored in blocks of codes */
} rfi_weight_range;
/* Finds the tensor x->name and counts it as read. Errors: those of rfi_weights_read except read errors. */
rfr_status rfi_weights_find_range(rfi_weights *w, const rfr_model_config *c, const rfr_tensor *x,
                                  rfi_weight_range *out);
/* Reads n elements from `first` on as `dtype`. Thread-safe. */
rfr_status rfi_weight_range_read(const rfi_weight_range *from, rfr_dtype dtype, void *data, int64_t first, int64_t n);
/* The number of tensors that were not read, and the name of one. Does not count tensors that are not parameters: masks
 * and RoPE frequencies of older library versions, and the head of a model with tied embeddings. */
int64_t rfi_weights_left(const rfi_weights *w, const rfr_model_config *c, const char **name);

#endif
