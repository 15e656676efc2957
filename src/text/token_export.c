/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes the tokens of text files and rows as a token file, in the order of the files.
 */
#include "data/dataset.h"
#include "data/file.h"
#include "data/token_file.h"
#include "text/row_batch.h"
#include "text/tokenizer_parts.h"

typedef struct export {
  rfi_token_writer *writer;
  rfi_row_batch *rows;
  int64_t documents, tokens;
}
token_export;

static rfr_status add_document(void *user, const uint32_t *ids, const uint16_t *widths, int64_t n, uint64_t hash,
                               int64_t line) {
  (void)widths, (void)hash, (void)line;
  token_export *e = user;
  e->documents++;
  e->tokens += n;
  return rfi_token_writer_add(e->writer, ids, n);
}

static rfr_status add_text(token_export *e, const rfi_row_encoder *encoder, const char *path) {
  rfi_row_tokens tokens = {0};
  char *text;
  size_t n;
  RFI_TRY(rfi_file_read(encoder->ctx, path, &text, &n));
  rfr_status s = rfi_check_text(path, text, n);
  if (s == RFR_OK && n > 0) {
    s = rfi_text_encode(encoder, text, n, true, &tokens);
    if (s != RFR_OK && s != RFR_NO_MEMORY) rfi_fail_prefix("%s: ", path);
    if (s == RFR_OK) s = add_document(e, tokens.ids, tokens.widths, tokens.n, 0, 0);
  }
  rfi_row_tokens_deinit(&tokens);
  rfi_free(encoder->ctx, text);
  return s;
}

static rfr_status add_files(token_export *e, const rfi_row_encoder *encoder, const char *const *paths, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    if (rfi_is_row_file(paths[i])) RFI_TRY(rfi_row_batch_read(e->rows, paths[i], RFI_ROW_text, add_document, e));
    else RFI_TRY(add_text(e, encoder, paths[i]));
  }
  return e->documents > 0 ? RFR_OK : rfi_fail(RFI_E_DATA_EMPTY, "the %lld files have no text", (long long)n);
}

rfr_status rfr_tokenizer_write_files(const rfr_tokenizer *tokenizer, const char *const *paths, int64_t n,
                                     rfr_token_format format, const char *out, int64_t *documents, int64_t *tokens) {
  if (documents) *documents = 0;
  if (tokens) *tokens = 0;
  RFI_TRY(rfi_check_handle(tokenizer, "rfr_tokenizer"));
  if (n < 1 || !paths || !out)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_write_files: paths is empty, or out is NULL");
  if (format < RFR_TOKENS_NANOGPT || format > RFR_TOKENS_MEGATRON)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_write_files: no format %d", (int)format);
  const rfi_row_encoder encoder = {.ctx = rfi_tokenizer_ctx(tokenizer), .tokenizer = tokenizer};
  token_export e = {0};
  rfr_status s = rfi_token_writer_create(encoder.ctx, out, format, rfi_row_encoder_vocab(&encoder), &e.writer);
  if (s == RFR_OK) s = rfi_row_batch_create(&encoder, &e.rows);
  if (s == RFR_OK) s = add_files(&e, &encoder, paths, n);
  if (s == RFR_OK) s = rfi_token_writer_finish(e.writer);
  rfi_row_batch_destroy(e.rows);
  rfi_token_writer_destroy(e.writer);
  if (s == RFR_OK && documents) *documents = e.documents;
  if (s == RFR_OK && tokens) *tokens = e.tokens;
  return s;
}
