/* SPDX-License-Identifier: Apache-2.0
 *
 * Hugging Face model folders: config.json as a model description, names of tensors, and the files that a checkpoint
 * copies.
 */
#ifndef RFI_HF_H
#define RFI_HF_H

#include <jansson.h>
#include <stdbool.h>

#include "data/checkpoint.h"
#include "refrain/nn.h"
#include "refrain/text.h"

/* config.json of a model. A new reference; NULL when out of memory. */
json_t *rfi_hf_config(const rfr_model_config *c);

/* A folder stores the weights of each expert as separate tensors. A packed parameter is the concatenation of
 * rfi_hf_pieces tensors of one size; any other parameter is one tensor of the same name. */
typedef struct rfi_hf_tensor {
  char name[128];
  int rank;
  int64_t shape[3];
} rfi_hf_tensor;
int rfi_hf_pieces(const char *name, const rfr_type *type);
void rfi_hf_piece(const rfr_model_config *c, const char *name, const rfr_type *type, int i, rfi_hf_tensor *out);
/* Sets a layer to "full_attention" or "sliding_attention", after c->window is set. NULL, or the error's text. */
const char *rfi_hf_layer_type(rfr_model_config *c, int64_t layer, const char *type);
/* Gives a layer an MLP instead of experts; layers past c->layers are ignored. The second function does so for all
 * layers except every `step`-th. */
void rfi_hf_mlp_only(rfr_model_config *c, int64_t layer);
void rfi_hf_sparse_step(rfr_model_config *c, int64_t step);
/* Reads folder/config.json, as versions 4 and 5 of the transformers library write it, over the defaults in `c`. Keeps
 * c->dtype: weights are converted when they are loaded. `dropout` false: the model has none, whatever the folder says.
 * Errors: model.config names a field that changes what the model computes and is not supported; json; file.open;
 * run.folder, if the folder is a run's. */
rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, bool dropout, rfr_model_config *c);

/* The files that a checkpoint copies byte for byte from the folder that the run started from. */
#define RFI_HF_FILES(X)                                                                                            \
  X("generation_config.json")                                                                                      \
  X("tokenizer.json")                                                                                              \
  X("tokenizer_config.json")                                                                                       \
  X("special_tokens_map.json")                                                                                     \
  X("tokenizer.model")                                                                                             \
  X("vocab.json") X("vocab.txt") X("merges.txt") X("added_tokens.json") X("spiece.model") X("chat_template.jinja") \
      X("chat_template.json")
#define RFI_HF_FILE_ONE(name) +1
enum { RFI_HF_N_FILES = RFI_HF_FILES(RFI_HF_FILE_ONE) };
#undef RFI_HF_FILE_ONE

/* Other contents of a model folder. */
typedef struct rfi_hf_notes {
  rfr_ctx *ctx;
  rfr_dtype dtype;       /* f32, bf16 or f16; RFR_DTYPE_COUNT: the folder has none of them */
  json_t *ids;           /* ids of special tokens in config.json */
  json_t *unused_loss;   /* router_aux_loss_coef, if the folder has it but does not use it */
  json_t *unknown;       /* ignored field names of config.json and of its rope_scaling or rope_parameters */
  const char *tokenizer; /* name of a file that shows that tokens are not bytes, or NULL */
  struct {
    char *data; /* NULL: the folder does not have the file */
    size_t n;
  } files[RFI_HF_N_FILES]; /* in the order of RFI_HF_FILES */
} rfi_hf_notes;
rfr_status rfi_hf_notes_read(rfr_ctx *ctx, const char *folder, rfi_hf_notes *out);
/* For a model that was not started from a folder: the files of a tokenizer's folder (or only its tokenizer.json)
 * without generation_config.json, and the ids that end a text. `out` must be zeroed. */
rfr_status rfi_hf_notes_read_tokenizer(rfr_ctx *ctx, const char *path, const rfr_tokenizer *tokenizer,
                                       rfi_hf_notes *out);
/* One of the files of RFI_HF_FILES, followed by a NUL; NULL: the model does not have it. */
const char *rfi_hf_notes_file(const rfi_hf_notes *notes, const char *name, size_t *n);
void rfi_hf_notes_deinit(rfi_hf_notes *notes); /* accepts a zeroed struct */
/* config.json of a checkpoint of a run that started from the folder; zeroed notes: from no folder. NULL when out of
 * memory. */
json_t *rfi_hf_config_with(const rfr_model_config *c, const rfi_hf_notes *notes);
/* Adds config.json, generation_config.json and the folder's tokenizer files to a checkpoint. */
rfr_status rfi_hf_save(rfr_ctx *ctx, const rfr_model_config *c, const rfi_hf_notes *notes, rfi_checkpoint_writer *w);
/* Adds these files alone. */
rfr_status rfi_hf_save_files(const rfi_hf_notes *notes, rfi_checkpoint_writer *w);

#endif
