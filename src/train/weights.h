/* SPDX-License-Identifier: Apache-2.0
 *
 * The weights of a model folder, wherever they lie: model.safetensors, or the shards that
 * model.safetensors.index.json names. A name that is not there as we spell it is looked for
 * without the outer module's ("transformer.", "model."), which is how the base models'
 * own folders have it.
 *
 * An index is foreign data: its file names must be plain names within the folder.
 */
#ifndef RFI_WEIGHTS_H
#define RFI_WEIGHTS_H

#include "refrain/nn.h"
#include "refrain/tensor.h"

typedef struct rfi_weights rfi_weights;

rfr_status rfi_weights_open(rfr_ctx *ctx, const char *folder, rfi_weights **out);
void rfi_weights_close(rfi_weights *w); /* accepts NULL */
/* Reads the tensor x->name into x->data, converting float types; where it is not there, the pieces of it that a folder
 * of the model has (hf.h). A missing tensor or one of another shape is model.weights. */
rfr_status rfi_weights_read(rfi_weights *w, const rfr_model_config *c, const rfr_tensor *x);
/* How many tensors nothing has read, and the name of one. Those do not count that folders of such models have and no
 * model does: masks and frequencies that the library once saved, and the head of a model that ties it. */
int64_t rfi_weights_left(const rfi_weights *w, const rfr_model_config *c, const char **name);

#endif
