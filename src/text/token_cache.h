/* SPDX-License-Identifier: Apache-2.0
 *
 * The cache of the tokens of data files. The keys are those of token_table.h. If a cache cannot be written, one warning
 * reports it; training continues without the cache. Threads may share a cache: one of them writes at a time.
 */
#ifndef RFI_TOKEN_CACHE_H
#define RFI_TOKEN_CACHE_H

#include "data/token_table.h"

typedef struct rfi_token_cache {
  rfr_ctx *ctx;
  const char *folder; /* NULL: no cache; "": a folder .refrain in the folder of each file, which git ignores */
  void (*warn)(void *user, const char *line); /* NULL: none */
  void *user;
  bool warned;
  int hits; /* number of files whose tokens were found */
} rfi_token_cache;

/* The cached tokens of the file at `path`; *found is false if there are none. Errors: memory.alloc. */
rfr_status rfi_token_cache_load(rfi_token_cache *cache, const char *path, rfi_hash key, int64_t vocab,
                                rfi_token_table *table, bool *found);
rfr_status rfi_token_cache_save(rfi_token_cache *cache, const char *path, rfi_hash key, const rfi_token_table *table);
/* Writes a .gitignore into a cache folder, because the data and this folder may be in a repository. */
rfr_status rfi_token_cache_hide(rfr_ctx *ctx, const char *folder);

#endif
