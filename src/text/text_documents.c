/* SPDX-License-Identifier: Apache-2.0 */
#include "text/text_documents.h"

static rfr_status cache_key(const rfi_text_documents *t, rfi_hash file, const rfi_extent *documents, int n,
                            rfi_hash *key) {
  rfi_hash encoder;
  rfi_hasher *h;
  RFI_TRY(rfi_row_encoder_hash(t->encoder, &encoder));
  RFI_TRY(rfi_hasher_create(t->encoder->ctx, &h));
  rfi_hasher_add(h, "text", 4);
  rfi_hasher_add_u64(h, file.high);
  rfi_hasher_add_u64(h, file.low);
  rfi_hasher_add_u64(h, encoder.high);
  rfi_hasher_add_u64(h, encoder.low);
  for (int i = 0; i < n; i++) {
    rfi_hasher_add_u64(h, (uint64_t)documents[i].offset);
    rfi_hasher_add_u64(h, (uint64_t)documents[i].size);
  }
  *key = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return RFR_OK;
}

rfr_status rfi_text_documents_encode(void *user, const char *path, rfi_hash file, const char *data,
                                     const rfi_extent *documents, int n, rfi_token_table *out) {
  const rfi_text_documents *t = user;
  rfr_ctx *ctx = t->encoder->ctx;
  rfi_row_tokens tokens = {0};
  rfi_hash key;
  char *full;
  bool found;
  RFI_TRY(cache_key(t, file, documents, n, &key));
  RFI_TRY(rfi_path_join(ctx, t->root, path, &full));
  rfr_status s = rfi_token_cache_load(t->cache, full, key, rfi_row_encoder_vocab(t->encoder), out, &found);
  for (int i = 0; i < n && s == RFR_OK && !found; i++) {
    s = rfi_text_encode(t->encoder, data + documents[i].offset, (size_t)documents[i].size, true, &tokens);
    if (s == RFR_OK) s = rfi_token_table_add(out, tokens.ids, tokens.widths, tokens.n, 0, 0);
    else if (s != RFR_NO_MEMORY) rfi_fail_prefix("%s, from byte %lld: ", full, (long long)documents[i].offset);
  }
  if (s == RFR_OK && found && out->rows != n)
    s = rfi_fail_at(RFI_E_INTERNAL, full, 0, "the cache does not have %d documents", n);
  if (s == RFR_OK && !found) s = rfi_token_cache_save(t->cache, full, key, out);
  rfi_row_tokens_deinit(&tokens);
  rfi_free(ctx, full);
  return s;
}
