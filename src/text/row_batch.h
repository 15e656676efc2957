/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads a file of rows and tokenizes its rows on all threads, some thousand at a time.
 */
#ifndef RFI_ROW_BATCH_H
#define RFI_ROW_BATCH_H

#include "text/row_encoder.h"

typedef struct rfi_row_batch rfi_row_batch;
/* Receives the ids of a row, with RFI_TOKEN_TRAINED, the bytes of text of each, the hash of the line and its number. */
typedef rfr_status (*rfi_row_tokens_fn)(void *user, const uint32_t *ids, const uint16_t *widths, int64_t n,
                                        uint64_t hash, int64_t line);

/* The encoder must outlive the batch. */
rfr_status rfi_row_batch_create(const rfi_row_encoder *encoder, rfi_row_batch **out);
void rfi_row_batch_destroy(rfi_row_batch *b); /* accepts NULL */
/* Calls `add` for each row of the file, in order, on this thread. `form`: see rfi_row_dataset_options. The error is
 * that of the first row that has one. Errors: data.row, data.format, data.preference, data.compressed, those of `add`
 * and of the encoder, file.*. */
rfr_status rfi_row_batch_read(rfi_row_batch *b, const char *path, rfi_row_form form, rfi_row_tokens_fn add, void *user);

#endif
