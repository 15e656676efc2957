/* SPDX-License-Identifier: Apache-2.0
 *
 * Files of token ids that other programs write and read, all little-endian:
 *
 *   nanoGPT   X.bin: ids of 2 or 4 bytes, without a header
 *   llm.c     X.bin: 256 int32 (magic number, version, number of ids, zeros), then the ids:
 *             20240520, version 1: of 2 bytes; 20240801, version 7: of 4 bytes
 *   Megatron  X.bin: ids; X.idx: "MMIDIDX\0\0", version 1 (8 bytes), type of the ids (1), number of sequences S (8) and
 *             of document bounds D (8), lengths of the sequences (S x 4), their first bytes in X.bin (S x 8), and the
 *             sequence with which each document begins, and S (D x 8)
 *
 * X.bin with an X.idx in its folder is Megatron's; otherwise a magic number decides. In a file that is accepted, sizes,
 * counts and offsets agree with the size of the files. Ids are read in pieces and compared with the vocabulary at every
 * read, because the file may have changed.
 */
#ifndef RFI_TOKEN_FILE_H
#define RFI_TOKEN_FILE_H

#include "data/file.h"
#include "refrain/text.h"

typedef struct rfi_token_file {
  rfr_token_format format;
  int width; /* bytes of an id: 1, 2, 4 or 8 */
  bool is_signed;
  int64_t start; /* byte of the first id */
  int64_t tokens, size;
  int64_t documents,
      *ends; /* Megatron: number of documents that are not empty, and one past the last id of each; otherwise 0, NULL */
} rfi_token_file;

/* Describes the file at `path`; ids without a header have `raw_width` bytes. Errors: data.tokens, file.*. */
rfr_status rfi_token_file_inspect(rfr_ctx *ctx, const char *path, int raw_width, rfi_token_file *out);
void rfi_token_file_deinit(rfr_ctx *ctx, rfi_token_file *f); /* accepts a zeroed one */
/* Reads ids first to first + n - 1; each must be less than `vocab`. `file` belongs to `f`. Errors: data.tokens with the
 * place of the first invalid id, file.read. */
rfr_status rfi_token_file_read(rfi_file *file, const rfi_token_file *f, int64_t first, int64_t n, int64_t vocab,
                               int32_t *out);

typedef struct rfi_token_writer rfi_token_writer;
/* Starts X.bin with ids less than `vocab`; neither X.bin nor X.idx may exist. The files appear when they are finished.
 * Ids have 2 bytes if the vocabulary permits. Errors: data.tokens, export.exists, file.*. */
rfr_status rfi_token_writer_create(rfr_ctx *ctx, const char *path, rfr_token_format format, int64_t vocab,
                                   rfi_token_writer **out);
/* Appends a document; the marks of data/token_table.h are not written. Errors: data.tokens (more ids than the format
 * can count), file.*. */
rfr_status rfi_token_writer_add(rfi_token_writer *w, const uint32_t *ids, int64_t n);
rfr_status rfi_token_writer_finish(rfi_token_writer *w);
/* Removes unfinished files. Accepts NULL. */
void rfi_token_writer_destroy(rfi_token_writer *w);

#endif
