/* SPDX-License-Identifier: Apache-2.0 */
#include "text/token_cache.h"

#include <string.h>

#include "data/file.h"

/* The cache folder for a file. Free with rfi_free. */
static rfr_status folder_of(const rfi_token_cache *cache, const char *path, char **out) {
  static const char name[] = ".refrain";
  const char *slash = strrchr(path, '/');
  const size_t before = *cache->folder ? 0 : slash ? (size_t)(slash - path) + 1 : 0;
  const char *last = *cache->folder ? cache->folder : name;
  RFI_TRY(RFI_ALLOC(cache->ctx, before + strlen(last) + 1, out));
  memcpy(*out, path, before);
  strcpy(*out + before, last);
  return RFR_OK;
}

rfr_status rfi_token_cache_load(rfi_token_cache *cache, const char *path, rfi_hash key, int64_t vocab,
                                rfi_token_table *table, bool *found) {
  char *folder;
  *found = false;
  if (!cache->folder) return RFR_OK;
  RFI_TRY(folder_of(cache, path, &folder));
  const rfr_status s = rfi_token_table_load(table, folder, key, vocab, found);
  rfi_free(cache->ctx, folder);
#pragma omp atomic
  cache->hits += *found;
  return s;
}

rfr_status rfi_token_cache_hide(rfr_ctx *ctx, const char *folder) {
  char *path, kind;
  RFI_TRY(rfi_path_join(ctx, folder, ".gitignore", &path));
  rfr_status s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind == 0) s = rfi_file_write(ctx, path, "*\n", 2);
  rfi_free(ctx, path);
  return s;
}

static rfr_status save(rfi_token_cache *cache, const char *path, rfi_hash key, const rfi_token_table *table) {
  char *folder, line[512];
  if (!cache->folder) return RFR_OK;
  RFI_TRY(folder_of(cache, path, &folder));
  rfr_status s = rfi_token_table_save(table, folder, key);
  if (s == RFR_OK && !*cache->folder) s = rfi_token_cache_hide(cache->ctx, folder);
  rfi_free(cache->ctx, folder);
  if (s == RFR_OK || s == RFR_NO_MEMORY) return s;
  if (!cache->warned && cache->warn) {
    rfi_snprintf(line, sizeof line, "the tokens of the data are not cached: %.400s", rfr_last_error()->message);
    cache->warn(cache->user, line);
  }
  cache->warned = true;
  return RFR_OK;
}

rfr_status rfi_token_cache_save(rfi_token_cache *cache, const char *path, rfi_hash key, const rfi_token_table *table) {
  rfr_status s;
#pragma omp critical(token_cache)
  s = save(cache, path, key, table);
  return s;
}
