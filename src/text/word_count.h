/* SPDX-License-Identifier: Apache-2.0
 *
 * Counts the words of texts on all threads. The counts do not depend on the number of threads.
 */
#ifndef RFI_WORD_COUNT_H
#define RFI_WORD_COUNT_H

#include "refrain/text.h"
#include "text/word_table.h"

typedef struct rfi_word_counter rfi_word_counter;

rfr_status rfi_word_counter_create(rfr_ctx *ctx, rfr_word_pattern pattern, rfi_word_counter **out);
void rfi_word_counter_destroy(rfi_word_counter *c); /* accepts NULL */
/* Counts the words of a text, or keeps a copy and counts them later. */
rfr_status rfi_word_counter_add(rfi_word_counter *c, const char *text, size_t n);
/* Counts the texts that were kept. The table lives as long as the counter. */
rfr_status rfi_word_counter_finish(rfi_word_counter *c, const rfi_word_table **out);

/* Adds the texts of a file: a text file, or rows of JSONL in any form. Adds at most *left bytes and subtracts the
 * number from *left; -1: no limit. Adds the number to *bytes. Errors: data.binary, data.row, data.format,
 * data.compressed, overflow, file.*, memory.alloc. */
rfr_status rfi_word_counter_add_file(rfi_word_counter *c, const char *path, int64_t *left, int64_t *bytes);

#endif
