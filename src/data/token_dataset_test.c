/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files as a data set: their windows against those of text files with the same tokens, the split, files that are
 * refused, and failing calls.
 */
#include "data/token_dataset.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/token_file.h"
#include "support/folder.h"
#include "support/random.h"

#define OK(call) assert_ok(call, #call, __LINE__)
enum { VOCAB = 1000, FILES = 30, SEQUENCE = 13, MOST = 64 };

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

static rfr_status open_tokens(rft_folder *f, const char *pattern, double fraction, int sequence, rfi_dataset **out) {
  rfi_dataset_options o = {.root = f->path, .validation_fraction = fraction, .sequence = sequence};
  return rfi_token_dataset_open(f->ctx, &pattern, 1, &o, VOCAB, 0, out);
}

/* Text `i` and its ids: one for each byte. */
static int make_text(int i, char *text, uint32_t *ids) {
  const int n = 1 + i * 7 % 40;
  for (int j = 0; j < n; j++) {
    text[j] = (char)(1 + (i * 31 + j) % 255);
    if (j == 0) text[j] = (char)(1 + i);
    ids[j] = 3u * (uint8_t)text[j] + 7;
  }
  return n;
}

static rfr_status encode(void *user, const char *path, rfi_hash file, const char *data, const rfi_extent *documents,
                         int n, rfi_token_table *out) {
  (void)user, (void)path, (void)file;
  for (int d = 0; d < n; d++) {
    uint32_t ids[MOST];
    uint16_t widths[MOST] = {0};
    for (int64_t i = 0; i < documents[d].size; i++) ids[i] = 3u * (uint8_t)data[documents[d].offset + i] + 7;
    RFI_TRY(rfi_token_table_add(out, ids, widths, documents[d].size, 0, 0));
  }
  return RFR_OK;
}

/* Writes texts to train and held, and the same documents to t.bin and h.bin. */
static void write_both(rft_folder *f) {
  rfi_token_writer *w[2];
  OK(rfi_token_writer_create(f->ctx, rft_path(f, "t.bin"), RFR_TOKENS_MEGATRON, VOCAB, &w[0]));
  OK(rfi_token_writer_create(f->ctx, rft_path(f, "h.bin"), RFR_TOKENS_MEGATRON, VOCAB, &w[1]));
  for (int i = 0; i < FILES; i++) {
    char name[32], text[MOST];
    uint32_t ids[MOST];
    const int n = make_text(i, text, ids), held = i % 5 == 2;
    snprintf(name, sizeof name, "%s/%02d.txt", held ? "held" : "train", i);
    rft_write(f, name, text, (size_t)n);
    OK(rfi_token_writer_add(w[held], ids, n));
  }
  for (int k = 0; k < 2; k++) {
    OK(rfi_token_writer_finish(w[k]));
    rfi_token_writer_destroy(w[k]);
  }
}

static void equal_to_text(void **state) {
  rft_folder *f = *state;
  const char *text = "train/*.txt", *held_text = "held/*.txt", *bin = "t.*", *held_bin = "h.bin";
  write_both(f);
  for (int context = 0; context < SEQUENCE; context += 5) {
    rfi_dataset *a, *b;
    rfi_dataset_options o = {.root = f->path,
                             .validation_patterns = &held_text,
                             .n_validation_patterns = 1,
                             .sequence = SEQUENCE,
                             .context = context,
                             .encode = encode};
    OK(rfi_dataset_open(f->ctx, &text, 1, &o, &a));
    o.validation_patterns = &held_bin;
    o.encode = NULL;
    OK(rfi_token_dataset_open(f->ctx, &bin, 1, &o, VOCAB, 0, &b));
    const rfi_dataset_stats *x = rfi_dataset_get_stats(a), *y = rfi_dataset_get_stats(b);
    assert_true(y->token_files && !x->token_files);
    assert_int_equal(x->validation_predicted, y->validation_predicted);
    for (int split = 0; split < 2; split++) {
      assert_int_equal(x->tokens[split], y->tokens[split]);
      assert_int_equal(x->trained[split], y->trained[split]);
      assert_int_equal(x->documents[split], y->documents[split]);
      assert_int_equal(x->windows[split], y->windows[split]);
      for (int64_t i = 0; i < (split ? 1 : 3) * x->windows[split] + 1; i++) {
        int32_t tokens[2][SEQUENCE], targets[2][SEQUENCE], offsets[2][SEQUENCE];
        int n[2];
        OK(rfi_dataset_window(a, (rfi_split)split, 9, i, tokens[0], targets[0], offsets[0], &n[0]));
        OK(rfi_dataset_window(b, (rfi_split)split, 9, i, tokens[1], targets[1], offsets[1], &n[1]));
        assert_int_equal(n[0], n[1]);
        assert_memory_equal(tokens[0], tokens[1], sizeof tokens[0]);
        assert_memory_equal(targets[0], targets[1], sizeof targets[0]);
        assert_memory_equal(offsets[0], offsets[1], (size_t)n[0] * sizeof **offsets);
        if (split) assert_int_equal(rfi_dataset_window_bytes(b, i), 0);
      }
    }
    rfi_dataset_close(a);
    rfi_dataset_close(b);
  }
}

/* n ids of 2 bytes from `seed`. */
static void write_raw(rft_folder *f, const char *name, int n, int seed) {
  uint16_t *ids = malloc((size_t)n * sizeof *ids);
  uint64_t random = (uint64_t)seed;
  for (int i = 0; i < n; i++) ids[i] = (uint16_t)rft_below(&random, VOCAB);
  rft_write(f, name, ids, (size_t)n * sizeof *ids);
  free(ids);
}

/* More files than can be open at the same time; each is a document. Every id is an input in every epoch. */
static void many_files(void **state) {
  rft_folder *f = *state;
  enum { N = 40, S = 50 };
  int64_t total = 0;
  uint16_t *ids = calloc(N * 200, sizeof *ids);
  for (int i = 0; i < N; i++) {
    char name[32];
    size_t n;
    snprintf(name, sizeof name, "s%02d.bin", i);
    write_raw(f, name, 20 + 3 * i, i);
    char *data = rft_read(f, name, &n);
    memcpy(ids + total, data, n);
    total += (int64_t)n / 2;
    free(data);
  }
  rfi_dataset *ds;
  OK(open_tokens(f, "*.bin", 0, S, &ds));
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
  assert_int_equal(stats->tokens[RFI_TRAIN], total);
  assert_int_equal(stats->documents[RFI_TRAIN], N);
  assert_int_equal(stats->files[RFI_TRAIN], N);
  assert_string_equal(rfi_dataset_file(ds, RFI_TRAIN, 7, NULL), "s07.bin");
  for (int64_t epoch = 0; epoch < 2; epoch++) {
    int *times = calloc((size_t)total, sizeof *times);
    for (int64_t i = 0; i < stats->windows[RFI_TRAIN]; i++) {
      int32_t tokens[S], targets[S], offsets[S];
      int n;
      const int64_t sample = epoch * stats->windows[RFI_TRAIN] + i, at = rfi_dataset_position(ds, 4, sample);
      OK(rfi_dataset_window(ds, RFI_TRAIN, 4, sample, tokens, targets, offsets, &n));
      for (int k = 0; k < S; k++) {
        assert_int_equal(tokens[k], ids[(at + k) % total]);
        times[(at + k) % total]++;
      }
    }
    for (int64_t i = 0; i < total; i++) assert_in_range(times[i], 1, 2);
    free(times);
  }
  rfi_dataset_close(ds);
  free(ids);
}

/* ---- the split ---- */

/* The documents of 5 ids in `split`, by their first id; each must be complete. */
static void mark(rfi_dataset *ds, rfi_split split, char *seen) {
  enum { S = 5 };
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
  for (int64_t at = 0; at < stats->tokens[split]; at += S) {
    int32_t ids[S];
    OK(ds->calls->read(ds, split, at, S, ids));
    assert_int_equal(ds->calls->document_end(ds, split, at), at + S);
    for (int k = 1; k < S; k++) assert_int_equal(ids[k], ids[0]);
    seen[ids[0]]++;
  }
}

static void write_documents(rft_folder *f, const char *name, int first, int n, int step) {
  rfi_token_writer *w;
  OK(rfi_token_writer_create(f->ctx, rft_path(f, name), RFR_TOKENS_MEGATRON, VOCAB, &w));
  for (int i = 0; i < n; i++) {
    const uint32_t id = (uint32_t)(first + i * step), ids[] = {id, id, id, id, id};
    OK(rfi_token_writer_add(w, ids, 5));
  }
  OK(rfi_token_writer_finish(w));
  rfi_token_writer_destroy(w);
}

/* Documents are held out by their ids: more files do not move them, and equal ones are in one split. */
static void documents_split(void **state) {
  rft_folder *f = *state;
  char before[VOCAB] = {0}, train[VOCAB] = {0}, held[VOCAB] = {0};
  rfi_dataset *ds;
  write_documents(f, "b.bin", 100, 200, 1);
  OK(open_tokens(f, "*.bin", 0.2, 5, &ds));
  mark(ds, RFI_VALIDATION, before);
  const int n = rfi_dataset_get_stats(ds)->documents[RFI_VALIDATION];
  assert_in_range(n, 20, 65);
  assert_int_equal(rfi_dataset_get_stats(ds)->trained[RFI_VALIDATION], 4 * n);
  const rfi_hash hash = rfi_dataset_get_stats(ds)->hash;
  rfi_dataset_close(ds);
  write_documents(f, "a.bin", 0, 200, 2); /* half of them are in b.bin */
  OK(open_tokens(f, "*.bin", 0.2, 5, &ds));
  mark(ds, RFI_TRAIN, train);
  mark(ds, RFI_VALIDATION, held);
  for (int id = 0; id < VOCAB; id++) {
    assert_false(train[id] && held[id]);
    if (id >= 100 && id < 300) assert_int_equal(held[id] > 0, before[id]);
    assert_int_equal(train[id] + held[id], (id >= 100 && id < 300) + (id < 400 && id % 2 == 0));
  }
  assert_false(rfi_hash_equal(hash, rfi_dataset_get_stats(ds)->hash));
  rfi_dataset_close(ds);
}

/* A file without documents is held out in blocks; both splits together have its ids once. */
static void blocks_split(void **state) {
  rft_folder *f = *state;
  enum { N = 100000 };
  rfi_dataset *ds;
  size_t n;
  write_raw(f, "x.bin", N, 3);
  char *data = rft_read(f, "x.bin", &n);
  const uint16_t *ids = (const uint16_t *)data;
  OK(open_tokens(f, "x.bin", 0.1, 64, &ds));
  const rfi_dataset_stats *s = rfi_dataset_get_stats(ds);
  assert_int_equal(s->tokens[0] + s->tokens[1], N);
  assert_int_equal(s->bytes[0] + s->bytes[1], 2 * N);
  assert_int_equal(s->blocks, (N + 255) / 256);
  assert_in_range(s->held_out_blocks, 15, 70);
  assert_int_equal(s->files[RFI_TRAIN] + s->files[RFI_VALIDATION], 2);
  int64_t at[2] = {0, 0}, block = 0;
  for (int64_t i = 0; i < N; i += 256, block++) { /* the next number of each block is in one of the splits */
    const int64_t some = N - i < 256 ? N - i : 256;
    int found = 0;
    for (int split = 0; split < 2 && !found; split++) {
      int32_t got[256];
      if (at[split] + some > s->tokens[split]) continue;
      if (ds->calls->document_end(ds, (rfi_split)split, at[split]) < at[split] + some) continue;
      OK(ds->calls->read(ds, (rfi_split)split, at[split], some, got));
      found = 1;
      for (int64_t k = 0; k < some; k++) found &= got[k] == ids[i + k];
      if (found) at[split] += some;
    }
    assert_true(found);
  }
  rfi_dataset_close(ds);
  free(data);
}

static void equal_files(void **state) {
  rft_folder *f = *state;
  const char *train = "*.bin", *held = "b.bin";
  rfi_dataset *ds;
  write_raw(f, "a.bin", 300, 1);
  write_raw(f, "b.bin", 300, 1);
  write_raw(f, "c.bin", 200, 2);
  rft_write(f, "empty.bin", "", 0);
  OK(open_tokens(f, train, 0, 8, &ds));
  assert_int_equal(rfi_dataset_get_stats(ds)->duplicates, 1);
  assert_int_equal(rfi_dataset_get_stats(ds)->empty, 1);
  assert_int_equal(rfi_dataset_get_stats(ds)->tokens[RFI_TRAIN], 500);
  assert_string_equal(rfi_dataset_file(ds, RFI_TRAIN, 0, NULL), "a.bin");
  rfi_dataset_close(ds);
  rfi_dataset_options o = {.root = f->path, .validation_patterns = &held, .n_validation_patterns = 1, .sequence = 8};
  OK(rfi_token_dataset_open(f->ctx, &train, 1, &o, VOCAB, 0, &ds)); /* of equal files the held-out one is kept */
  assert_int_equal(rfi_dataset_get_stats(ds)->tokens[RFI_TRAIN], 200);
  assert_int_equal(rfi_dataset_get_stats(ds)->tokens[RFI_VALIDATION], 300);
  assert_string_equal(rfi_dataset_file(ds, RFI_VALIDATION, 0, NULL), "b.bin");
  rfi_dataset_close(ds);
  OK(rfi_token_dataset_open(f->ctx, NULL, 0, &o, VOCAB, 0, &ds)); /* for an evaluation */
  assert_int_equal(rfi_dataset_get_stats(ds)->tokens[RFI_TRAIN], 0);
  assert_int_equal(rfi_dataset_get_stats(ds)->windows[RFI_VALIDATION], (299 + 7) / 8);
  rfi_dataset_close(ds);
}

/* ---- refused ---- */

static void expect(rft_folder *f, const char *pattern, double fraction, int raw_width, const char *slug,
                   const char *message) {
  rfi_dataset *ds;
  rfi_dataset_options o = {.root = f->path, .validation_fraction = fraction, .sequence = 8};
  const rfr_status s = rfi_token_dataset_open(f->ctx, &pattern, 1, &o, VOCAB, raw_width, &ds);
  if (s == RFR_OK || strcmp(rfr_last_error()->slug, slug) != 0 || !strstr(rfr_last_error()->message, message))
    fail_msg("%s: %s", message, s == RFR_OK ? "accepted" : rfr_last_error()->message);
  assert_null(ds);
}

static void refused(void **state) {
  rft_folder *f = *state;
  static uint32_t wide[100000];
  for (int i = 0; i < 100000; i++) wide[i] = (uint32_t)i % VOCAB;
  rft_write(f, "wide.bin", wide, sizeof wide);
  write_raw(f, "good.bin", 100000, 1);
  write_raw(f, "short.bin", 8, 1);
  write_documents(f, "one.bin", 5, 2, 1);
  expect(f, "wide.bin", 0, 0, "data.tokens", "every second id of 2 bytes is 0");
  expect(f, "good.bin", 0, 4, "data.tokens", "the file has no header and is read as uint32 (data.token_dtype)");
  expect(f, "short.bin", 0, 0, "data.empty", "there are 8 tokens to train on; a window of sequence 8 needs 9");
  expect(f, "*.txt", 0, 0, "data.empty", "*.txt");
  expect(f, "one.bin", 0.00005, 0, "data.held_out", "of 2 documents or blocks of tokens leave");
  expect(f, "one.idx", 0, 0, "data.tokens", "is the index of a Megatron file; name its .bin file");
  write_raw(f, "torn.bin", 100, 1);
  assert_int_equal(symlink("gone.idx", rft_path(f, "torn.idx")), 0);
  expect(f, "torn.bin", 0, 0, "data.tokens", "the link leads to no file");
  rfi_dataset *ds;
  rfi_dataset_options o = {.root = f->path, .sequence = 8};
  OK(rfi_token_dataset_open(f->ctx, &(const char *){"wide.bin"}, 1, &o, VOCAB, 4, &ds));
  rfi_dataset_close(ds);
  OK(rfi_token_dataset_open(f->ctx, &(const char *){"wide.bin"}, 1, &o, VOCAB, 2, &ds)); /* the zeros are right */
  rfi_dataset_close(ds);
  /* The first id outside the vocabulary, in the second piece that is read. */
  wide[70001] = VOCAB, wide[70002] = VOCAB + 5;
  rft_write(f, "wide.bin", wide, sizeof wide);
  expect(f, "wide.bin", 0, 4, "data.tokens",
         "wide.bin: byte 280004: token 70001 is 1000; the model has vocab_size 1000");
}

/* A file that changes while it is in use cannot bring an id outside the vocabulary. */
static void changed(void **state) {
  rft_folder *f = *state;
  rfi_dataset *ds;
  int32_t tokens[8], targets[8], offsets[8];
  int n;
  uint16_t ids[300];
  write_raw(f, "a.bin", 300, 1);
  OK(open_tokens(f, "a.bin", 0, 8, &ds));
  memset(ids, 0xff, sizeof ids);
  rft_write(f, "a.bin", ids, sizeof ids);
  assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 1, 0, tokens, targets, offsets, &n), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.tokens");
  rfi_dataset_close(ds);
  write_raw(f, "a.bin", 300, 1);
  OK(open_tokens(f, "a.bin", 0, 8, &ds));
  write_raw(f, "a.bin", 200, 1);
  assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 1, 0, tokens, targets, offsets, &n), RFR_IO);
  assert_non_null(strstr(rfr_last_error()->message, "it had 600 bytes, now 400"));
  rfi_dataset_close(ds);
}

static rfr_status open_and_read(rft_folder *f) {
  rfi_dataset *ds;
  int32_t tokens[8], targets[8], offsets[8];
  int n;
  rfr_status s = open_tokens(f, "*", 0.3, 8, &ds);
  if (s == RFR_OK) s = rfi_dataset_window(ds, RFI_TRAIN, 1, 3, tokens, targets, offsets, &n);
  rfi_dataset_close(ds);
  return s;
}

static void faults(void **state) {
  rft_folder *f = *state;
  write_documents(f, "a.bin", 100, 70, 1);
  write_documents(f, "b.bin", 200, 70, 1);
  write_raw(f, "c.bin", 300, 1);
  write_raw(f, "d.bin", 300, 1);
  for (int k = 1;; k++) {
    rfr_ctx_fail_alloc(f->ctx, k);
    const rfr_status s = open_and_read(f);
    rfr_ctx_fail_alloc(f->ctx, 0);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 500);
  }
  for (int k = 1;; k++) {
    rfi_io_fault fault = {.fail_at = k, .error = 5};
    rfi_io_set_fault(&fault);
    const rfr_status s = open_and_read(f);
    rfi_io_set_fault(NULL);
    if (fault.calls < k) break;
    assert_true(s == RFR_IO || s == RFR_OK); /* a failed close after reading does no harm */
    assert_true(k < 500);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(equal_to_text), rft_folder_test(many_files),  rft_folder_test(documents_split),
      rft_folder_test(blocks_split),  rft_folder_test(equal_files), rft_folder_test(refused),
      rft_folder_test(changed),       rft_folder_test(faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
