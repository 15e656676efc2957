/* SPDX-License-Identifier: Apache-2.0
 *
 * A model description as Hugging Face's config.json.
 */
#ifndef RFI_HF_H
#define RFI_HF_H

#include <jansson.h>
#include <stdbool.h>

#include "refrain/nn.h"

/* New references; NULL when out of memory. */
json_t *rfi_hf_config(const rfr_model_config *c);
json_t *rfi_hf_generation_config(const rfr_model_config *c);
/* A model's folder holds each expert's weights by themselves. A parameter is `rfi_hf_pieces` tensors of such a folder,
 * all of one size, which lie one after the other in it; for most it is one, of the same name. */
typedef struct rfi_hf_tensor {
  char name[128];
  int rank;
  int64_t shape[3];
} rfi_hf_tensor;
int rfi_hf_pieces(const char *name, const rfr_type *type);
void rfi_hf_piece(const rfr_model_config *c, const char *name, const rfr_type *type, int i, rfi_hf_tensor *out);
/* Says that a layer is "full_attention" or "sliding_attention"; c->window is known. NULL, or what is wrong. */
const char *rfi_hf_layer_type(rfr_model_config *c, int64_t layer, const char *type);
/* Says that a layer has no experts; that all have none but each `step`-th one. c->layers is known. */
void rfi_hf_mlp_only(rfr_model_config *c, int64_t layer);
void rfi_hf_sparse_step(rfr_model_config *c, int64_t step);
/* Reads folder/config.json, as versions 4 and 5 of the transformers library write it, over
 * the defaults in `c`; its dtype stays, weights are converted when they are loaded. A field
 * that changes what the model computes in a way that is not built is refused by name
 * (model.config). With `dropout` false the model has none, whatever the folder says. */
rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, bool dropout, rfr_model_config *c);

/* What else the folder says. */
typedef struct rfi_hf_notes {
  json_t *ids, *generation_ids; /* of the special tokens, as config.json and generation_config.json have them */
  json_t *idle;                 /* the factor of the loss of balance, where the folder has one and does not use it */
  json_t *unknown;              /* names of fields of config.json, and of its rope_scaling or rope_parameters, whose
                                 * meaning is not known, and so not heeded */
} rfi_hf_notes;
rfr_status rfi_hf_notes_read(rfr_ctx *ctx, const char *folder, rfi_hf_notes *out);
void rfi_hf_notes_deinit(rfi_hf_notes *notes); /* accepts zeros */
/* What a run from such a folder writes into both files; notes of zeros: from none. NULL when out of memory. */
json_t *rfi_hf_config_with(const rfr_model_config *c, const rfi_hf_notes *notes);
json_t *rfi_hf_generation_config_with(const rfr_model_config *c, const rfi_hf_notes *notes);

#endif
