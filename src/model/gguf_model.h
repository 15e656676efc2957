/* SPDX-License-Identifier: Apache-2.0
 *
 * Models in GGUF files: converts metadata to the config.json of transformers, and gives tensors their Hugging Face
 * names. In GGUF, names differ, rows of q and k of architecture llama are interleaved, norms of Gemma have 1 added,
 * GEMM weights of GPT-2 are transposed, and the experts of a layer are one tensor.
 *
 * Architectures: llama (also Mistral, SmolLM2 and Mixtral), qwen2, qwen3, qwen2moe, qwen3moe, gemma, gemma2, gemma3,
 * phi3, olmo2, smollm3, granite, gpt2. A hyperparameter that is not known is refused by its name.
 */
#ifndef RFI_GGUF_MODEL_H
#define RFI_GGUF_MODEL_H

#include <jansson.h>

#include "data/gguf.h"
#include "data/gguf_write.h"
#include "refrain/nn.h"

/* config.json of the model; `torch_dtype` is missing if the weights are in blocks. A new reference. Errors:
 * model.config names the key. */
rfr_status rfi_gguf_config(rfr_ctx *ctx, rfi_gguf *g, json_t **out);
/* Reads the tensor of a Hugging Face name (one of rfi_hf_piece) into `out`, as `dtype`. *from is the tensor of the file
 * that has it; NULL: there is none, and nothing was read. Errors: model.weights for another shape; those of
 * rfi_gguf_read. */
rfr_status rfi_gguf_parameter(rfr_ctx *ctx, rfi_gguf *g, const rfr_model_config *c, const char *name, int rank,
                              const int64_t *shape, rfr_dtype dtype, void *out, const rfi_gguf_tensor **from);

/* ---- writing ---- */

/* Adds the metadata of a model, without its vocabulary, and the descriptions of its tensors: GEMM weights and
 * embeddings in `format`, vectors, router weights and position tables as F32. Rows that are not full blocks are BF16;
 * with Q4_0 the embeddings and the head are Q8_0. Errors: model.config names what the file format cannot describe. */
rfr_status rfi_gguf_put_model(rfi_gguf_writer *w, const rfr_model_config *c, const rfi_block_format *format);
/* Writes the tensors of the i-th parameter from its values (f32, in the model's layout, which are changed). Call it for
 * all parameters in order, after rfi_gguf_write_header; before the first one, frequency factors of RoPE are written. */
rfr_status rfi_gguf_write_parameter(rfr_ctx *ctx, rfi_gguf_writer *w, rfi_file *file, const rfr_model_config *c, int i,
                                    float *values);

/* Adds the keys of an adapter on a model; alpha is the scale times the rank. Errors: model.config. */
rfr_status rfi_gguf_put_adapter(rfi_gguf_writer *w, const rfr_model_config *c, double alpha);
/* The tensor of a block's parameter that is a single matrix. *head_dim: its rows are stored interleaved
 * (rfi_gguf_read), or 0. False: there is no such matrix. */
bool rfi_gguf_matrix_name(const rfr_model_config *c, int parameter, char *out, size_t size, int64_t *head_dim);
/* Copies the rows of a matrix into the order of the file; the two arrays must not overlap. */
void rfi_gguf_interleave(const float *from, int64_t rows, int64_t width, int64_t head_dim, float *to);

/* Refuses a model that llama.cpp would compute differently; type: the model_type of config.json, for errors. */
rfr_status rfi_gguf_limits(const rfr_model_config *c, const char *architecture, const char *type);

#endif
