/* SPDX-License-Identifier: Apache-2.0
 *
 * Model folders that the transformers library wrote (tools/make_reference_models.py), for the tests of tests/models.
 */
#ifndef RFT_MODEL_FOLDER_H
#define RFT_MODEL_FOLDER_H

#include <jansson.h>
#include <stdbool.h>

#include "refrain/nn.h"
#include "refrain/program.h"
#include "support/context.h"
#include "support/folder.h"

#define RFT_MODELS RFT_SOURCE_DIR "/tests/models/"
enum { RFT_N_MODELS = 24, RFT_MOST = 64 }; /* RFT_MOST: maximum number of parameters of a model */
extern const char *const rft_models[RFT_N_MODELS];

/* config.json of a model. */
json_t *rft_model_config(const char *model);
/* Writes o as config.json of the test folder, releases it, and reads the file. */
rfr_status rft_model_read(rft_folder *f, json_t *o, rfr_model_config *c);
/* Expects an error that contains `text`, or success if it is NULL. Returns true for success. */
bool rft_expect(rfr_status s, const char *text, const char *what, const char *value);

/* A program of one document: inputs tokens, targets, offsets; outputs logits, loss, and d_NAME for each parameter. */
rfr_programs *rft_model_compile(rfr_ctx *ctx, const rfr_model_config *c, int64_t tokens);
/* Loads all weights of a folder. */
rfr_status rft_model_load(rfr_ctx *ctx, rfr_programs *p, const rfr_model_config *c, const char *folder);

/* A file of a model; free with free(). */
char *rft_model_file(const char *model, const char *name, size_t *n);
/* Writes the file "text" as training data. */
void rft_model_text(rft_folder *f);
/* Makes the test folder a model folder with training data. `fields`: changes of its config.json, or NULL. */
void rft_model_folder(rft_folder *f, const char *model, const char *fields);
/* A configuration that trains one step from a model folder with rft_model_text; valid until the next call. */
const char *rft_model_run(const char *folder);

#endif
