/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files (data/token_file.h) as a data set. The windows are those of text files whose tokens are these ids; a
 * document is one of the index of a Megatron file, or all of another file.
 *
 * When the files are opened, each id is read once: it is compared with the vocabulary, and hashed. After that windows
 * read their ids from the files; no more than a window is in memory, and 16 bytes for each document. Files are
 * read, not mapped (data/file.h).
 *
 * A fraction f holds out documents by a hash of their ids, so equal documents lie in one split, and adding files moves
 * no document. Where a file has no documents, it holds out blocks of 256 to 65536 ids. Of files with equal ids one is
 * kept, as for text.
 */
#ifndef RFI_TOKEN_DATASET_H
#define RFI_TOKEN_DATASET_H

#include "data/dataset.h"

/* `options` without an encoder. Without patterns, the data set has held-out files alone. `vocab` is one more than the
 * largest id. `raw_width`: bytes of an id in files without a header; 0: 2 if the vocabulary permits, otherwise 4.
 * Errors: data.tokens, data.empty, data.held_out, file.*. */
rfr_status rfi_token_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                                  const rfi_dataset_options *options, int64_t vocab, int raw_width, rfi_dataset **out);

#endif
