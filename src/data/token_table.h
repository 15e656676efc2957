/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of one file, row by row, in memory and as a cache file. For a text file a row is a document.
 *
 * The name of a cache file is a key: the hash of the file's bytes and of everything else that determines the tokens. It
 * is written atomically and checked by a hash when it is read. If the cache is missing or damaged, the tokens are
 * computed again. A folder that cannot be written is not an error.
 */
#ifndef RFI_TOKEN_TABLE_H
#define RFI_TOKEN_TABLE_H

#include "data/hash.h"

/* Set in an id whose token gets a loss, and in the first token of the rejected answer of a preference row, after the
 * chosen one. Ids are less than 2^24. */
#define RFI_TOKEN_TRAINED ((uint32_t)1 << 31)
#define RFI_TOKEN_REJECTED ((uint32_t)1 << 30)
#define RFI_TOKEN_ID(id) ((int32_t)((id) & ~(RFI_TOKEN_TRAINED | RFI_TOKEN_REJECTED)))

typedef struct rfi_token_table {
  rfr_ctx *ctx;
  int64_t rows, tokens;
  int64_t *ends;                        /* (rows) one past the last token of each row */
  uint64_t *hashes;                     /* (rows) of the row's bytes in the file; decides the split */
  int64_t *lines;                       /* (rows) of the file, from 1 */
  uint32_t *ids;                        /* (tokens) with RFI_TOKEN_TRAINED */
  uint16_t *widths;                     /* (tokens) bytes of text that the token stands for, at most 65535 */
  int64_t row_capacity, token_capacity; /* 0: the arrays are parts of `block` */
  char *block;
} rfi_token_table; /* starts as {ctx} */

rfr_status rfi_token_table_add(rfi_token_table *table, const uint32_t *ids, const uint16_t *widths, int64_t n,
                               uint64_t hash, int64_t line);
void rfi_token_table_deinit(rfi_token_table *table);

/* Fills an empty table from the cache file of `key` in `folder`. *found is false, without an error, if there is none or
 * it is damaged. Ids are less than `vocab`. Errors: memory.alloc. */
rfr_status rfi_token_table_load(rfi_token_table *table, const char *folder, rfi_hash key, int64_t vocab, bool *found);
/* Writes the cache file and creates the folder. Errors: file.*, memory.alloc. */
rfr_status rfi_token_table_save(const rfi_token_table *table, const char *folder, rfi_hash key);

#endif
