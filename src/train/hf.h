/* SPDX-License-Identifier: Apache-2.0
 *
 * A model description as Hugging Face's config.json.
 */
#ifndef RFI_HF_H
#define RFI_HF_H

#include <jansson.h>

#include "refrain/nn.h"

/* New references; NULL when out of memory. */
json_t *rfi_hf_config(const rfr_model_config *c);
json_t *rfi_hf_generation_config(const rfr_model_config *c);
/* Reads folder/config.json, as versions 4 and 5 of the transformers library write it, over
 * the defaults in `c`; its dtype stays, weights are converted when they are loaded. A field
 * that changes what the model computes in a way that is not built is refused by name
 * (model.config); others are of no concern here and left alone. */
/* Says that a layer is "full_attention" or "sliding_attention"; c->window is known. NULL, or what is wrong. */
const char *rfi_hf_layer_type(rfr_model_config *c, int64_t layer, const char *type);
rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, rfr_model_config *c);

#endif
