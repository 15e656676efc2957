/* SPDX-License-Identifier: Apache-2.0
 *
 * The text files of a model: of a Hugging Face folder, or made from the metadata of a GGUF file.
 */
#ifndef RFI_MODEL_FILE_H
#define RFI_MODEL_FILE_H

#include "base/base.h"

/* Whether a path is a model that has such files: a folder or a GGUF file. */
rfr_status rfi_model_has_files(rfr_ctx *ctx, const char *path, bool *has);
/* The file `name` of a model, at most `limit` bytes, followed by a NUL; free with rfi_free. *data NULL: the model does
 * not have it. Errors: file.*; those of rfi_gguf_text_file. */
rfr_status rfi_model_file(rfr_ctx *ctx, const char *model, const char *name, int64_t limit, char **data, size_t *n);

#endif
