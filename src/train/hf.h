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
/* Reads folder/config.json over the defaults in `c`; its dtype stays, weights are
 * converted when they are loaded. What we cannot run (another type, scaled rotary
 * embedding, another activation) is refused by name. */
rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, rfr_model_config *c);

#endif
