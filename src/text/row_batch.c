/* SPDX-License-Identifier: Apache-2.0 */
#include "text/row_batch.h"

#include <string.h>

#include "data/lines.h"

enum { BATCH_ROWS = 8192, BATCH_BYTES = 16 << 20 }; /* maximum rows that are tokenized at a time */

typedef struct line {
  size_t offset, n; /* offsets in the batch's text */
  int64_t number;
  rfr_status status;
  uint32_t *ids;
  uint16_t *widths;
  int64_t tokens;
} line;

struct rfi_row_batch {
  const rfi_row_encoder *encoder;
  const char *path;
  rfi_row_form form;
  rfi_string text;
  line *lines; /* BATCH_ROWS */
  int n, threads;
  rfi_row_tokens *scratch; /* (threads) */
};

static rfr_status encode_line(const rfi_row_batch *b, line *l, rfi_row_tokens *scratch) {
  rfr_ctx *ctx = b->encoder->ctx;
  const char *text = b->text.data + l->offset;
  rfi_row row;
  rfr_status s = rfi_row_read(ctx, b->form, b->path, l->number, text, l->n, &row);
  if (s == RFR_OK) s = rfi_row_encode(b->encoder, &row, b->path, l->number, scratch);
  rfi_row_deinit(ctx, &row);
  RFI_TRY(s);
  l->tokens = scratch->n;
  if (l->tokens == 0) return RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)l->tokens * sizeof *l->ids, &l->ids));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)l->tokens * sizeof *l->widths, &l->widths));
  memcpy(l->ids, scratch->ids, (size_t)l->tokens * sizeof *l->ids);
  memcpy(l->widths, scratch->widths, (size_t)l->tokens * sizeof *l->widths);
  return RFR_OK;
}

static void free_lines(rfi_row_batch *b) {
  for (int i = 0; i < b->n; i++) {
    rfi_free(b->encoder->ctx, b->lines[i].ids);
    rfi_free(b->encoder->ctx, b->lines[i].widths);
  }
  b->n = 0;
  b->text.n = 0;
}

/* Tokenizes the lines of a batch on all threads. The error is that of the first line that has one. This thread encodes
 * that line again, because errors are thread-local. */
static rfr_status encode_batch(rfi_row_batch *b, rfi_row_tokens_fn add, void *user) {
  const int threads = b->threads;
  rfr_status s = threads > 1 ? rfi_check_fork(threads) : RFR_OK;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1 && s == RFR_OK)
  for (int t = 0; t < threads; t++)
    for (int i = t; i < b->n && s == RFR_OK; i += threads)
      b->lines[i].status = encode_line(b, &b->lines[i], &b->scratch[t]);
  for (int i = 0; i < b->n && s == RFR_OK; i++) {
    line *l = &b->lines[i];
    if (l->status != RFR_OK) {
      rfi_free(b->encoder->ctx, l->ids);
      rfi_free(b->encoder->ctx, l->widths);
      l->ids = NULL;
      l->widths = NULL;
      s = encode_line(b, l, &b->scratch[0]);
    }
    if (s == RFR_OK)
      s = add(user, l->ids, l->widths, l->tokens, rfi_hash_bytes(b->text.data + l->offset, l->n).low, l->number);
  }
  free_lines(b);
  return s;
}

rfr_status rfi_row_batch_read(rfi_row_batch *b, const char *path, rfi_row_form form, rfi_row_tokens_fn add,
                              void *user) {
  rfi_lines *lines;
  rfr_status s;
  b->path = path;
  b->form = form;
  RFI_TRY(rfi_lines_open(b->encoder->ctx, path, &lines));
  for (;;) {
    const char *text;
    size_t n;
    int64_t number;
    RFI_GOTO(rfi_lines_next(lines, &text, &n, &number));
    if (!text) break;
    if (number == 1 && n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) text += 3, n -= 3; /* a byte order mark */
    if (rfi_row_is_blank(text, n)) continue;
    if (b->form == RFI_ROW_FORM_COUNT) {
      RFI_GOTO(rfi_row_detect(path, number, text, n, &b->form));
      if (b->form == RFI_ROW_preference)
        RFI_GOTO(rfi_fail_at(RFI_E_DATA_PREFERENCE, path, number, "the rows have chosen and rejected answers"));
    }
    b->lines[b->n++] = (line){.offset = b->text.n, .n = n, .number = number};
    RFI_GOTO(rfi_string_append(&b->text, text, n));
    if (b->n == BATCH_ROWS || b->text.n >= BATCH_BYTES) RFI_GOTO(encode_batch(b, add, user));
  }
  s = encode_batch(b, add, user);
fail:
  free_lines(b);
  rfi_lines_close(lines);
  return s;
}

rfr_status rfi_row_batch_create(const rfi_row_encoder *encoder, rfi_row_batch **out) {
  rfi_row_batch *b;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(encoder->ctx, sizeof *b, &b));
  *b = (rfi_row_batch){.encoder = encoder, .text = {.ctx = encoder->ctx}, .threads = rfi_ctx_threads(encoder->ctx)};
  rfr_status s = RFI_ALLOC(encoder->ctx, BATCH_ROWS * sizeof *b->lines, &b->lines);
  if (s == RFR_OK) s = RFI_ALLOC(encoder->ctx, (size_t)b->threads * sizeof *b->scratch, &b->scratch);
  if (s == RFR_OK) *out = b;
  else rfi_row_batch_destroy(b);
  return s;
}

void rfi_row_batch_destroy(rfi_row_batch *b) {
  if (!b) return;
  rfr_ctx *ctx = b->encoder->ctx;
  for (int t = 0; t < b->threads && b->scratch; t++) rfi_row_tokens_deinit(&b->scratch[t]);
  rfi_free(ctx, b->scratch);
  rfi_free(ctx, b->lines);
  rfi_string_deinit(&b->text);
  rfi_free(ctx, b);
}
