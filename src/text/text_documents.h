/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of text files, as an encoder of data/dataset.h: each document is tokenized as one text.
 */
#ifndef RFI_TEXT_DOCUMENTS_H
#define RFI_TEXT_DOCUMENTS_H

#include "data/dataset.h"
#include "text/row_encoder.h"
#include "text/token_cache.h"

typedef struct rfi_text_documents {
  const rfi_row_encoder *encoder;
  rfi_token_cache *cache;
  const char *root; /* paths of files are relative to it */
} rfi_text_documents;

/* An rfi_dataset_encode_fn; `user` is an rfi_text_documents. Errors: tokenizer, memory.alloc. */
rfr_status rfi_text_documents_encode(void *user, const char *path, rfi_hash file, const char *data,
                                     const rfi_extent *documents, int n, rfi_token_table *out);

#endif
