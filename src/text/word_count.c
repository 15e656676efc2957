/* SPDX-License-Identifier: Apache-2.0
 *
 * Texts are collected into a batch of some megabytes, cut into units where no word is cut, and each thread counts units
 * into a table of its own. The tables are added at the end; a sum does not depend on which thread counted what.
 */
#include "text/word_count.h"

#include <limits.h>
#include <string.h>

#include "data/dataset.h"
#include "data/lines.h"
#include "text/bpe_train.h"
#include "text/rows.h"
#include "text/tokenizer_parts.h"

enum { UNIT_BYTES = 256 << 10, BATCH_BYTES = 32 << 20, READ_BYTES = 8 << 20 };

typedef struct thread {
  rfi_word_table table;
  rfr_tokens tokens; /* the encoder */
} thread;

typedef struct unit {
  size_t begin, n; /* in the batch */
} unit;

struct rfi_word_counter {
  rfr_ctx *ctx;
  rfi_unicode *categories;
  rfi_pretokenizer *pretokenizer;
  thread *threads;
  int n_threads;
  rfi_string batch;
  unit *units;
  size_t n_units, units_capacity;
};

/* ---- words of a text ---- */

static rfr_status count_unit(const rfi_word_counter *c, thread *t, const char *text, size_t n) {
  rfi_encoder *e = t->tokens.scratch;
  rfi_view v = {.s = text, .n = n};
  rfi_pieces *pieces;
  const size_t valid = rfi_utf8_valid(text, n);
  if (n >= UINT32_MAX)
    return rfi_fail(RFI_E_OVERFLOW,
                    "the text has %zu bytes without a line that ends and another that begins with a "
                    "letter; insert line feeds",
                    n);
  if (valid < n) RFI_TRY(rfi_repair(e, &v, valid));
  RFI_TRY(rfi_pretokenize(c->pretokenizer, e, &v, &pieces));
  for (size_t i = 0; i < pieces->n; i++)
    RFI_TRY(
        rfi_word_table_add(&t->table, v.s + pieces->items[i].begin, pieces->items[i].end - pieces->items[i].begin, 1));
  return RFR_OK;
}

static rfr_status count_batch(rfi_word_counter *c) {
  const int n = (int)c->n_units, threads = c->n_threads < n ? c->n_threads : n;
  int failed = INT_MAX;
  if (threads > 1) RFI_TRY(rfi_check_fork(threads));
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(min : failed) if (threads > 1)
  for (int k = 0; k < threads; k++)
    for (int i = k; i < n && failed == INT_MAX; i += threads)
      if (count_unit(c, &c->threads[k], c->batch.data + c->units[i].begin, c->units[i].n) != RFR_OK) failed = i;
  /* Errors are thread-local, so this thread encodes the text again. */
  const rfr_status s = failed == INT_MAX
                           ? RFR_OK
                           : count_unit(c, &c->threads[0], c->batch.data + c->units[failed].begin, c->units[failed].n);
  c->n_units = 0;
  c->batch.n = 0;
  if (s == RFR_OK && failed != INT_MAX) return rfi_fail(RFI_E_NO_MEMORY, "out of memory while words were counted");
  return s;
}

rfr_status rfi_word_counter_add(rfi_word_counter *c, const char *text, size_t n) {
  for (size_t begin = 0, end; begin < n; begin = end) {
    end = n - begin > UNIT_BYTES ? begin + rfi_words_cut(text + begin, n - begin, UNIT_BYTES) : n;
    if (c->n_units == c->units_capacity)
      RFI_TRY(rfi_grow(c->ctx, (void **)&c->units, &c->units_capacity, c->n_units, c->n_units + 1, sizeof *c->units));
    c->units[c->n_units++] = (unit){c->batch.n, end - begin};
    RFI_TRY(rfi_string_append(&c->batch, text + begin, end - begin));
    if (c->batch.n >= BATCH_BYTES) RFI_TRY(count_batch(c));
  }
  return RFR_OK;
}

rfr_status rfi_word_counter_finish(rfi_word_counter *c, const rfi_word_table **out) {
  RFI_TRY(count_batch(c));
  for (int i = 1; i < c->n_threads; i++) {
    RFI_TRY(rfi_word_table_join(&c->threads[0].table, &c->threads[i].table));
    rfi_word_table_deinit(&c->threads[i].table);
  }
  *out = &c->threads[0].table;
  return RFR_OK;
}

/* ---- texts of a row ---- */

typedef struct sample {
  rfi_word_counter *counter;
  int64_t *left, *bytes;
} sample;

/* The part of the text within the limit, in complete characters. */
static rfr_status add_text(const sample *x, const char *text, size_t n) {
  if (!text) return RFR_OK;
  if (*x->left >= 0 && n > (size_t)*x->left) {
    n = (size_t)*x->left;
    for (int k = 0; k < 3 && n > 0 && rfi_utf8_continues(text[n]); k++) n--;
    *x->left = (int64_t)n;
  }
  if (*x->left >= 0) *x->left -= (int64_t)n;
  *x->bytes += (int64_t)n;
  return rfi_word_counter_add(x->counter, text, n);
}

/* A message's content is a text, a list of {type, text}, or null; rows.c has checked it. */
static rfr_status add_messages(const sample *x, const json_t *messages) {
  for (size_t i = 0; i < json_array_size(messages); i++) {
    const json_t *content = json_object_get(json_array_get(messages, i), "content");
    RFI_TRY(add_text(x, json_string_value(content), json_string_length(content)));
    for (size_t k = 0; k < json_array_size(content); k++) {
      const json_t *part = json_object_get(json_array_get(content, k), "text");
      RFI_TRY(add_text(x, json_string_value(part), json_string_length(part)));
    }
  }
  return RFR_OK;
}

static rfr_status add_row(const sample *x, const rfi_row *row) {
  const char *const texts[] = {row->prompt, row->completion, row->rejected};
  if (row->form == RFI_ROW_text) return add_text(x, row->text, row->text_n);
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    RFI_TRY(add_text(x, texts[i], texts[i] ? strlen(texts[i]) : 0));
  RFI_TRY(add_messages(x, row->messages));
  RFI_TRY(add_messages(x, row->chosen_messages));
  return add_messages(x, row->rejected_messages);
}

static rfr_status add_rows(const sample *x, const char *path) {
  rfr_ctx *ctx = x->counter->ctx;
  rfi_row_form form = RFI_ROW_FORM_COUNT;
  rfi_lines *lines;
  rfr_status s;
  RFI_TRY(rfi_lines_open(ctx, path, &lines));
  while (*x->left != 0) {
    const char *text;
    size_t n;
    int64_t number;
    rfi_row row;
    RFI_GOTO(rfi_lines_next(lines, &text, &n, &number));
    if (!text) break;
    if (number == 1 && n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) text += 3, n -= 3; /* a byte order mark */
    if (rfi_row_is_blank(text, n)) continue;
    if (form == RFI_ROW_FORM_COUNT) RFI_GOTO(rfi_row_detect(path, number, text, n, &form));
    s = rfi_row_read(ctx, form, path, number, text, n, &row);
    if (s == RFR_OK) s = add_row(x, &row);
    rfi_row_deinit(ctx, &row);
    RFI_GOTO(s);
  }
  s = RFR_OK;
fail:
  rfi_lines_close(lines);
  return s;
}

/* ---- text files ---- */

/* The last position to cut in the second half; 0: there is none. */
static size_t last_cut(const char *s, size_t n) {
  size_t found = 0;
  for (size_t at = n / 2; (at = rfi_words_cut(s, n, at)) < n; at++) found = at;
  return found;
}

/* Reads a text file in pieces; each has all words that begin in it. */
static rfr_status add_text_file(const sample *x, const char *path) {
  rfr_ctx *ctx = x->counter->ctx;
  rfi_file *f;
  char *buffer = NULL;
  size_t kept = 0, capacity = READ_BYTES;
  rfr_status s;
  RFI_TRY(rfi_file_open(ctx, path, &f));
  const int64_t size = rfi_file_size(f);
  if (size < (int64_t)capacity) capacity = (size_t)size;
  RFI_GOTO(RFI_ALLOC(ctx, capacity + 1, &buffer));
  for (int64_t at = 0; at < size && *x->left != 0;) {
    const size_t n = size - at < (int64_t)(capacity - kept) ? (size_t)(size - at) : capacity - kept;
    RFI_GOTO(rfi_file_read_at(f, buffer + kept, n, at));
    const char *nul = memchr(buffer + kept, 0, n);
    if (at == 0) RFI_GOTO(rfi_check_text(path, buffer, n));
    if (nul)
      RFI_GOTO(rfi_fail_at(RFI_E_DATA_BINARY, path, 0, "has a NUL byte at offset %lld, so it is not text",
                           (long long)(at + (nul - buffer) - (int64_t)kept)));
    at += (int64_t)n;
    kept += n;
    const size_t cut = at < size ? last_cut(buffer, kept) : kept;
    RFI_GOTO(add_text(x, buffer, cut));
    memmove(buffer, buffer + cut, kept - cut);
    kept -= cut;
    if (cut == 0) RFI_GOTO(rfi_grow(ctx, (void **)&buffer, &capacity, kept, capacity + 1, 1));
  }
  s = RFR_OK;
fail:
  rfi_free(ctx, buffer);
  rfi_file_close(f);
  return s;
}

rfr_status rfi_word_counter_add_file(rfi_word_counter *c, const char *path, int64_t *left, int64_t *bytes) {
  const sample x = {c, left, bytes};
  return rfi_is_row_file(path) ? add_rows(&x, path) : add_text_file(&x, path);
}

/* ---- creation ---- */

void rfi_word_counter_destroy(rfi_word_counter *c) {
  if (!c) return;
  for (int i = 0; i < c->n_threads && c->threads; i++) {
    rfi_word_table_deinit(&c->threads[i].table);
    rfr_tokens_deinit(&c->threads[i].tokens);
  }
  rfi_free(c->ctx, c->threads);
  rfi_free(c->ctx, c->units);
  rfi_string_deinit(&c->batch);
  rfi_pretokenizer_destroy(c->ctx, c->pretokenizer);
  rfi_free(c->ctx, c->categories);
  rfi_free(c->ctx, c);
}

rfr_status rfi_word_counter_create(rfr_ctx *ctx, rfr_word_pattern pattern, rfi_word_counter **out) {
  const rfi_step step = {.kind = RFI_PRE_SPLIT,
                         .where = "pre_tokenizer",
                         .pattern = rfi_word_pattern_text(pattern),
                         .is_regex = true,
                         .behavior = RFI_SPLIT_ISOLATED};
  const rfi_tokenizer_spec spec = {.name = "tokenizer.json", .pre_tokenizers = &step, .n_pre_tokenizers = 1};
  rfi_word_counter *c;
  rfr_status s;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *c, &c));
  *c = (rfi_word_counter){.ctx = ctx, .batch = {.ctx = ctx}, .n_threads = rfi_ctx_threads(ctx)};
  RFI_GOTO(rfi_unicode_create(ctx, &c->categories));
  RFI_GOTO(rfi_pretokenizer_create(ctx, &spec, c->categories, true, &c->pretokenizer));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)c->n_threads * sizeof *c->threads, &c->threads));
  for (int i = 0; i < c->n_threads; i++) {
    rfi_encoder *e;
    c->threads[i].table.ctx = ctx;
    RFI_GOTO(RFI_ALLOC(ctx, sizeof *e, &e));
    e->ctx = ctx;
    c->threads[i].tokens.scratch = e;
  }
  *out = c;
  return RFR_OK;
fail:
  rfi_word_counter_destroy(c);
  return s;
}
