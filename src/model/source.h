/* SPDX-License-Identifier: Apache-2.0
 *
 * A published model is a Hugging Face folder or a GGUF file; everything that reads one takes the path of either. A GGUF
 * file stands for the folder that it was converted from: its metadata give config.json and the tokenizer's files.
 */
#ifndef RFI_SOURCE_H
#define RFI_SOURCE_H

#include <jansson.h>

#include "base/base.h"

/* config.json of a model. *path, set on most errors too: the file that they should name; free with rfi_free. Errors:
 * file.open with how to get a model, if there is no such path; json, gguf, model.config, file.*; run.folder, if the
 * folder is a run's. */
rfr_status rfi_source_config(rfr_ctx *ctx, const char *model, char **path, json_t **out);

#endif
