/* SPDX-License-Identifier: Apache-2.0
 *
 * The data set: its files, the split, and the bytes that windows cover.
 */
#include "data/dataset.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/folder.h"

static rfr_status open_it(rft_folder *f, const char *pattern, double fraction, int sequence, rfi_dataset **out) {
  rfi_dataset_options o = {.root = f->path, .validation_fraction = fraction, .sequence = sequence};
  return rfi_dataset_open(f->ctx, &pattern, 1, &o, out);
}

/* `n` files of different sizes, without NUL bytes. */
static void make_files(rft_folder *f, int n) {
  for (int i = 0; i < n; i++) {
    char name[32], data[64];
    int size = 1 + i * 7 % 40;
    snprintf(name, sizeof name, "d%d/f%03d.txt", i % 3, i);
    for (int j = 0; j < size; j++) data[j] = (char)(1 + (i * 31 + j) % 255);
    data[0] = (char)(1 + i); /* all different */
    rft_write(f, name, data, (size_t)size);
  }
}

static void test_permutation(void **state) {
  (void)state;
  for (uint64_t n = 1; n < 300; n += n < 20 ? 1 : 37) {
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
      uint8_t seen[300] = {0};
      for (uint64_t i = 0; i < n; i++) {
        uint64_t x = rfi_permute(i, n, 5, epoch);
        assert_true(x < n && !seen[x]);
        seen[x] = 1;
      }
    }
  }
  int same_epoch = 0, same_key = 0, fixed = 0;
  for (uint64_t i = 0; i < 1000; i++) {
    uint64_t x = rfi_permute(i, 1000, 1, 0);
    same_epoch += x == rfi_permute(i, 1000, 1, 1);
    same_key += x == rfi_permute(i, 1000, 2, 0);
    fixed += x == i;
  }
  assert_true(same_epoch < 20 && same_key < 20 && fixed < 20);
  assert_true(rfi_permute((uint64_t)1 << 40, ((uint64_t)1 << 40) + 1, 1, 0) <= (uint64_t)1 << 40);
}

/* In every epoch every training byte is an input; the targets are the next bytes. */
static void test_training_windows(void **state) {
  rft_folder *f = *state;
  make_files(f, 30);
  enum { S = 13 };
  rfi_dataset *ds;
  assert_int_equal(open_it(f, "**/*.txt", 0, S, &ds), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
  assert_int_equal(stats->files[RFI_TRAIN], 30);
  int64_t N = stats->bytes[RFI_TRAIN], W = stats->windows[RFI_TRAIN];
  assert_int_equal(W, (N + S - 1) / S);

  uint8_t *stream = malloc((size_t)N);
  int *document = malloc((size_t)N * sizeof *document);
  int64_t at = 0;
  for (int i = 0; i < 30; i++) {
    int64_t bytes;
    size_t n;
    char *data = rft_read(f, rfi_dataset_file(ds, RFI_TRAIN, i, &bytes), &n);
    assert_int_equal(bytes, n);
    for (size_t j = 0; j < n; j++, at++) stream[at] = (uint8_t)data[j], document[at] = i;
    free(data);
  }
  assert_int_equal(at, N);

  int from_zero = 0; /* the number of windows that begin at byte 0: one per epoch if the ring always began there */
  for (int64_t epoch = 0; epoch < 4; epoch++) {
    int *times = calloc((size_t)N, sizeof *times);
    for (int64_t k = 0; k < W; k++) {
      int32_t tokens[S], targets[S], offsets[S];
      int n_docs, doc = 0;
      assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 9, epoch * W + k, tokens, targets, offsets, &n_docs), RFR_OK);
      int64_t start = rfi_dataset_position(ds, 9, epoch * W + k);
      from_zero += start == 0;
      assert_int_equal(offsets[0], 0);
      for (int i = 0; i < S; i++) {
        int64_t p = (start + i) % N, next = (p + 1) % N;
        times[p]++;
        assert_int_equal(tokens[i], stream[p]);
        bool inside = next != 0 && document[next] == document[p];
        assert_int_equal(targets[i], inside ? stream[next] : RFI_IGNORED_TARGET);
        if (i > 0 && (p == 0 || document[p] != document[p - 1])) assert_int_equal(offsets[++doc], i);
      }
      assert_int_equal(n_docs, doc + 1);
    }
    int64_t twice = 0;
    for (int64_t p = 0; p < N; p++) {
      assert_in_range(times[p], 1, 2);
      twice += times[p] == 2;
    }
    assert_int_equal(twice, W * S - N);
    free(times);
  }
  assert_true(from_zero < 4);
  int moved = 0; /* each epoch has another order, not only another first byte */
  for (int64_t k = 0; k < W; k++) {
    int64_t distance = rfi_dataset_position(ds, 9, k) - rfi_dataset_position(ds, 9, 0);
    int64_t later = rfi_dataset_position(ds, 9, W + k) - rfi_dataset_position(ds, 9, W);
    moved += (distance - later) % N != 0;
  }
  assert_true(moved > W / 2);
  free(stream);
  free(document);

  /* Sample i does not depend on earlier calls, even far ahead, or from another object. */
  rfi_dataset *again;
  int32_t a[3][S], b[3][S];
  int n;
  assert_int_equal(open_it(f, "**/*.txt", 0, S, &again), RFR_OK);
  assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 9, 1000000007, a[0], a[1], a[2], &n), RFR_OK);
  assert_int_equal(rfi_dataset_window(again, RFI_TRAIN, 9, 1000000007, b[0], b[1], b[2], &n), RFR_OK);
  assert_memory_equal(a[0], b[0], sizeof a[0]);
  assert_memory_equal(a[1], b[1], sizeof a[1]);
  assert_true(rfi_hash_equal(stats->hash, rfi_dataset_get_stats(again)->hash));
  rfi_dataset_close(again);
  rfi_dataset_close(ds);
}

/* Many documents may begin in a window: in the smallest case one at every byte. */
static void test_small_documents(void **state) {
  rft_folder *f = *state;
  rft_write(f, "a", "1", 1);
  rft_write(f, "b", "2", 1);
  rft_write(f, "c", "3", 1);
  rft_write(f, "d", "45678", 5);
  rfi_dataset *ds;
  assert_int_equal(open_it(f, "*", 0, 7, &ds), RFR_OK);
  int32_t tokens[7], targets[7], offsets[7];
  int n_docs;
  for (int64_t sample = 0; sample < 40; sample++) {
    assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 0, sample, tokens, targets, offsets, &n_docs), RFR_OK);
    int k = 0;
    for (int i = 0; i < 7; i++)
      if (i == 0 || tokens[i] <= '4') assert_int_equal(offsets[k++], i);
    assert_int_equal(n_docs, k);
  }
  assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 0, -1, tokens, targets, offsets, &n_docs), RFR_INVALID);
  rfi_dataset_close(ds);
}

/* One pass over the held-out split predicts every byte except the first of each document exactly once, in order. It is
 * predicted from at least `context` earlier bytes, if its document has so many. */
static void check_validation(rft_folder *f, int S, int context) {
  const char *const pattern = "**/*.txt";
  rfi_dataset_options o = {.root = f->path, .validation_fraction = 0.4, .sequence = S, .context = context};
  rfi_dataset *ds;
  assert_int_equal(rfi_dataset_open(f->ctx, &pattern, 1, &o, &ds), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
  int files = stats->files[RFI_VALIDATION];
  assert_true(files > 5 && stats->files[RFI_TRAIN] > 5);
  assert_int_equal(files + stats->files[RFI_TRAIN], 60);
  uint8_t expected[4096], got[4096];
  size_t n_expected = 0, n_got = 0;
  for (int i = 0; i < files; i++) {
    size_t n;
    char *data = rft_read(f, rfi_dataset_file(ds, RFI_VALIDATION, i, NULL), &n);
    memcpy(expected + n_expected, data + 1, n - 1);
    n_expected += n - 1;
    free(data);
  }
  int32_t tokens[64], targets[64], offsets[64];
  int n_docs;
  for (int64_t k = 0; k < stats->windows[RFI_VALIDATION] + 2; k++) {
    assert_int_equal(rfi_dataset_window(ds, RFI_VALIDATION, (uint64_t)k, k, tokens, targets, offsets, &n_docs), RFR_OK);
    for (int i = 0; i < S; i++) {
      if (targets[i] != RFI_IGNORED_TARGET) got[n_got++] = (uint8_t)targets[i];
      if (i + 1 < S && targets[i] != RFI_IGNORED_TARGET) assert_int_equal(tokens[i + 1], targets[i]);
      if (k > 0 && targets[i] != RFI_IGNORED_TARGET) assert_true(i >= context);
    }
    if (k >= stats->windows[RFI_VALIDATION]) assert_int_equal(n_docs, 1);
  }
  assert_int_equal(n_got, n_expected);
  assert_int_equal(n_got, stats->validation_predicted);
  assert_memory_equal(got, expected, n_got);
  rfi_dataset_close(ds);
}

static void test_validation_windows(void **state) {
  rft_folder *f = *state;
  make_files(f, 60);
  for (int S = 1; S < 50; S += 12)
    for (int context = 0; context < S; context += 5) check_validation(f, S, context);
  const char *const pattern = "**/*.txt";
  for (int context = -1; context < 9; context += 9) {
    rfi_dataset_options o = {.root = f->path, .sequence = 8, .context = context};
    rfi_dataset *ds;
    assert_int_equal(rfi_dataset_open(f->ctx, &pattern, 1, &o, &ds), RFR_INVALID);
    assert_null(ds);
  }
}

static void test_split_is_stable(void **state) {
  rft_folder *f = *state;
  rfi_dataset *before, *after;
  make_files(f, 40);
  assert_int_equal(open_it(f, "**/*.txt", 0.25, 4, &before), RFR_OK);
  make_files(f, 55);
  assert_int_equal(open_it(f, "**/*.txt", 0.25, 4, &after), RFR_OK);
  const rfi_dataset_stats *a = rfi_dataset_get_stats(before), *b = rfi_dataset_get_stats(after);
  assert_false(rfi_hash_equal(a->hash, b->hash));
  for (int i = 0; i < a->files[RFI_VALIDATION]; i++) { /* held-out text is not trained on after files are added */
    int found = 0;
    for (int j = 0; j < b->files[RFI_VALIDATION]; j++)
      found += strcmp(rfi_dataset_file(before, RFI_VALIDATION, i, NULL),
                      rfi_dataset_file(after, RFI_VALIDATION, j, NULL)) == 0;
    assert_int_equal(found, 1);
  }
  rfi_dataset_close(before);
  rfi_dataset_close(after);
}

static void test_duplicates(void **state) {
  rft_folder *f = *state;
  rft_write(f, "a.txt", "same text", 9);
  rft_write(f, "b.txt", "same text", 9);
  rft_write(f, "held/z.txt", "same text", 9);
  rft_write(f, "c.txt", "another text", 12);
  rft_write(f, "empty.txt", "", 0);
  rft_write(f, "held/empty.txt", "", 0);
  rfi_dataset *ds;
  assert_int_equal(open_it(f, "**/*.txt", 0, 4, &ds), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
  assert_int_equal(stats->duplicates, 2);
  assert_int_equal(stats->empty, 2);
  assert_int_equal(stats->bytes[RFI_TRAIN], 21);
  assert_string_equal(rfi_dataset_file(ds, RFI_TRAIN, 0, NULL), "a.txt");
  rfi_dataset_close(ds);

  /* If one of several equal files is held out by name, the copies leave the training split. */
  const char *train[] = {"*.txt", "**/*.txt"}, *held[] = {"held/*"};
  rfi_dataset_options o = {.root = f->path, .validation_patterns = held, .n_validation_patterns = 1, .sequence = 4};
  assert_int_equal(rfi_dataset_open(f->ctx, train, 2, &o, &ds), RFR_OK);
  stats = rfi_dataset_get_stats(ds);
  assert_int_equal(stats->files[RFI_TRAIN], 1);
  assert_string_equal(rfi_dataset_file(ds, RFI_TRAIN, 0, NULL), "c.txt");
  assert_int_equal(stats->files[RFI_VALIDATION], 1);
  assert_string_equal(rfi_dataset_file(ds, RFI_VALIDATION, 0, NULL), "held/z.txt");
  rfi_dataset_close(ds);
}

/* ---- few files: blocks of text ---- */

/* `n` lines of text, each once. */
static void write_lines(rft_folder *f, const char *name, int first, int n) {
  char *text = malloc((size_t)n * 64 + 1), *p = text;
  for (int i = first; i < first + n; i++)
    p += sprintf(p, "line %d has the square %lld and more\n", i, (long long)i * i);
  rft_write(f, name, text, (size_t)(p - text));
  free(text);
}

enum { MOST_LINES = 70000 };

/* Marks the lines of a split. Every document must consist of complete lines. */
static int64_t mark_lines(rfi_dataset *ds, rfi_split split, unsigned char *line) {
  enum { S = 64 };
  static char text[4 << 20];
  int32_t tokens[S], targets[S], offsets[S];
  int n_docs;
  int64_t n = 0, lines = 0;
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
  memset(line, 0, MOST_LINES);
  if (split == RFI_TRAIN) { /* windows of an epoch in the order of the text */
    for (int64_t w = 0; w < stats->windows[split]; w++) {
      const int64_t at = rfi_dataset_position(ds, 1, w);
      assert_int_equal(rfi_dataset_window(ds, split, 1, w, tokens, targets, offsets, &n_docs), RFR_OK);
      for (int i = 0; i < S; i++) text[(at + i) % stats->bytes[split]] = (char)tokens[i];
    }
    n = stats->bytes[split];
  } else {
    for (int64_t w = 0; w < stats->windows[split]; w++) {
      assert_int_equal(rfi_dataset_window(ds, split, 0, w, tokens, targets, offsets, &n_docs), RFR_OK);
      for (int i = 0; i < S && n < stats->bytes[split]; i++) text[n++] = (char)tokens[i];
    }
  }
  for (char *p = text, *end = text + n; p < end; lines++) {
    int number, length = 0;
    if (sscanf(p, "line %d has the square %*d and more%n", &number, &length) != 1 || p[length] != '\n')
      fail_msg("not a line: %.40s", p);
    line[number] = 1;
    p += length + 1;
  }
  return lines;
}

static void test_blocks(void **state) {
  rft_folder *f = *state;
  static unsigned char train[MOST_LINES], held[MOST_LINES], before[MOST_LINES];
  rfi_dataset *ds;
  int64_t sizes[] = {200, 2000, 25000};
  for (int i = 0; i < 3; i++) {
    write_lines(f, "a.txt", 0, (int)sizes[i]);
    assert_int_equal(open_it(f, "a.txt", 0.1, 64, &ds), RFR_OK);
    const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
    const double part = (double)stats->bytes[1] / (double)(stats->bytes[0] + stats->bytes[1]);
    if (i == 2) assert_true(stats->bytes[0] + stats->bytes[1] > 1000000);
    if (part < (i ? 0.06 : 0.01) || part > (i ? 0.14 : 0.3)) fail_msg("%g of %d lines", part, (int)sizes[i]);
    assert_true(stats->blocks > 0 && stats->held_out_blocks > 0);
    assert_int_equal(stats->files[0], 1);
    assert_int_equal(stats->files[1], 1);
    assert_true(stats->documents[0] > 1);
    assert_int_equal(stats->validation_predicted, stats->bytes[1] - stats->documents[1]);
    assert_int_equal(mark_lines(ds, RFI_TRAIN, train) + mark_lines(ds, RFI_VALIDATION, held), sizes[i]);
    for (int k = 0; k < (int)sizes[i]; k++) assert_int_equal(train[k] + held[k], 1);
    rfi_dataset_close(ds);
  }
  /* With more files, held-out text must stay held out. */
  memcpy(before, held, sizeof before);
  write_lines(f, "b.txt", 30000, 9000);
  assert_int_equal(open_it(f, "[ab].txt", 0.1, 64, &ds), RFR_OK);
  assert_int_equal(rfi_dataset_get_stats(ds)->files[0], 2);
  assert_true(rfi_dataset_get_stats(ds)->blocks > 0);
  mark_lines(ds, RFI_VALIDATION, held);
  assert_memory_equal(held, before, 25000);
  rfi_dataset_close(ds);
}

/* With few blocks whose hashes are all on one side, one block changes sides. */
static void test_few_blocks(void **state) {
  rft_folder *f = *state;
  rfi_dataset *ds;
  write_lines(f, "few.txt", 0, 30);
  for (int most = 0; most < 2; most++) {
    assert_int_equal(open_it(f, "few.txt", most ? 0.9999 : 0.0001, 64, &ds), RFR_OK);
    const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
    assert_in_range(stats->blocks, 2, 8);
    assert_int_equal(stats->held_out_blocks, most ? stats->blocks - 1 : 1);
    rfi_dataset_close(ds);
  }
}

/* Equal blocks, of one file or of two, are never in both splits. */
static void test_equal_blocks(void **state) {
  rft_folder *f = *state;
  static char text[2][256 * 300];
  for (int i = 0; i < 300; i++)
    for (int j = 0; j < 2; j++) {
      memset(text[j] + 256 * i, 'a' + i % 20, 255);
      text[j][256 * i + 255] = '\n';
    }
  memset(text[1], 'Z', 255); /* a similar file that is not equal */
  rft_write(f, "a.txt", text[0], sizeof text[0]);
  rft_write(f, "b.txt", text[1], sizeof text[1]);
  rfi_dataset *ds;
  assert_int_equal(open_it(f, "*.txt", 0.3, 64, &ds), RFR_OK);
  assert_true(rfi_dataset_get_stats(ds)->blocks > 0);
  bool seen[2][256] = {{0}};
  int32_t tokens[64], targets[64], offsets[64];
  int n_docs;
  for (int split = 0; split < 2; split++)
    for (int64_t w = 0; w < rfi_dataset_get_stats(ds)->windows[split]; w++) {
      assert_int_equal(rfi_dataset_window(ds, (rfi_split)split, 1, w, tokens, targets, offsets, &n_docs), RFR_OK);
      for (int i = 0; i < 64; i++) seen[split][tokens[i]] = true;
    }
  int held = 0;
  for (int c = 'a'; c < 'a' + 20; c++) {
    assert_false(seen[0][c] && seen[1][c]);
    held += seen[1][c];
  }
  assert_in_range(held, 1, 19);
  rfi_dataset_close(ds);
}

static void test_binary(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *name, *data, *says;
    size_t n;
  } files[] = {
      {"program",
       "\x7f"
       "ELF\2\1\1",
       "an ELF file", 7},
      {"table.parquet", "PAR1\x15\4", "a Parquet file", 6},
      {"text.gz", "\x1f\x8b\x08\x08", "a gzip file", 4},
      {"picture.png", "\x89PNG\r\n", "a PNG picture", 6},
      {"wide.txt", "\xff\xfeh\0i\0", "UTF-16", 6},
      {"zero.txt", "text\0text", "NUL byte at offset 4", 9},
  };
  rft_write(f, "good.txt", "some text that is long enough", 29);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    char pattern[64];
    rfi_dataset *ds;
    snprintf(pattern, sizeof pattern, "data%zu/*", i);
    char name[128];
    snprintf(name, sizeof name, "data%zu/good.txt", i);
    rft_write(f, name, "some text that is long enough", 29);
    snprintf(name, sizeof name, "data%zu/%s", i, files[i].name);
    rft_write(f, name, files[i].data, files[i].n);
    assert_int_equal(open_it(f, pattern, 0, 4, &ds), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "data.binary");
    if (!strstr(rfr_last_error()->message, name) || !strstr(rfr_last_error()->message, files[i].says))
      fail_msg("%s", rfr_last_error()->message);
    /* The same if it is held out by name. */
    const char *train = "good.txt", *held = pattern;
    rfi_dataset_options o = {.root = f->path, .validation_patterns = &held, .n_validation_patterns = 1, .sequence = 4};
    assert_int_equal(rfi_dataset_open(f->ctx, &train, 1, &o, &ds), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "data.binary");
  }
}

static void expect_empty(rft_folder *f, const char *pattern, double fraction, int sequence, const char *text) {
  rfi_dataset *ds;
  assert_int_equal(open_it(f, pattern, fraction, sequence, &ds), RFR_INVALID);
  assert_null(ds);
  assert_string_equal(rfr_last_error()->slug, "data.empty");
  if (!strstr(rfr_last_error()->message, text)) fail_msg("\"%s\" does not say \"%s\"", rfr_last_error()->message, text);
}

static void test_no_files(void **state) {
  rft_folder *f = *state;
  rft_write(f, "empty.txt", "", 0);
  rft_write(f, "short.md", "12345", 5);
  rft_write(f, "other.md", "12345", 5);
  expect_empty(f, "missing/*.txt", 0, 4, "missing/*.txt");
  expect_empty(f, "empty.txt", 0, 4, "0 bytes");
  expect_empty(f, "*.md", 0, 5, "5 bytes");
  rfi_dataset *ds;
  for (int i = 0; i < 2; i++) { /* a single block can be neither held out nor trained on alone */
    assert_int_equal(open_it(f, "short.md", i ? 0.99995 : 0.00005, 1, &ds), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "data.held_out");
  }
  assert_int_equal(open_it(f, "*.md", 0, 4, &ds), RFR_OK);
  rfi_dataset_close(ds);
  assert_int_equal(open_it(f, "*.md", 1, 4, &ds), RFR_INVALID);
  const char *train = "empty.txt", *held = "short.md"; /* the empty file is not held out */
  rfi_dataset_options o = {.root = f->path, .validation_patterns = &held, .n_validation_patterns = 1, .sequence = 4};
  assert_int_equal(rfi_dataset_open(f->ctx, &train, 1, &o, &ds), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "no other file has bytes to train on"));
}

/* Two tokens per byte; a file that begins with byte 255 is refused. */
static rfr_status encode_twice(void *user, const char *path, rfi_hash file, const char *data,
                               const rfi_extent *documents, int n, rfi_token_table *out) {
  (void)user, (void)file;
  if (*data == (char)255) return rfi_fail_at(RFI_E_DATA_BINARY, path, 0, "begins with 255");
  for (int d = 0; d < n; d++) {
    uint32_t ids[128];
    uint16_t widths[128];
    for (int64_t i = 0; i < 2 * documents[d].size; i++) {
      ids[i] = (uint8_t)data[documents[d].offset + i / 2] + 256u * (i % 2);
      widths[i] = i % 2;
    }
    RFI_TRY(rfi_token_table_add(out, ids, widths, 2 * documents[d].size, 0, 0));
  }
  return RFR_OK;
}

/* Files are tokenized on all threads; tokens, their order and the error must not depend on the number of threads. */
static void test_threads(void **state) {
  rft_folder *f = *state;
  const char *pattern = "**/*.txt";
  rfi_hash first = {0};
  make_files(f, 200);
  for (int threads = 1; threads <= 4; threads += 3) {
    rfr_ctx *ctx;
    rfi_dataset *ds;
    const rfr_ctx_options options = {.size = sizeof options, .threads = threads};
    const rfi_dataset_options o = {.root = f->path, .validation_fraction = 0.2, .sequence = 16, .encode = encode_twice};
    assert_int_equal(rfr_ctx_create(&options, &ctx), RFR_OK);
    assert_int_equal(rfi_dataset_open(ctx, &pattern, 1, &o, &ds), RFR_OK);
    const rfi_dataset_stats *stats = rfi_dataset_get_stats(ds);
    for (int split = 0; split < 2; split++) {
      assert_true(stats->files[split] > 20);
      assert_int_equal(stats->tokens[split], 2 * stats->bytes[split]);
    }
    if (threads == 1) first = stats->hash;
    assert_true(rfi_hash_equal(stats->hash, first));
    rfi_dataset_close(ds);
    rfr_ctx_destroy(ctx);
  }
  rft_write(f, "d0/bad.txt", "\377one", 4);
  rft_write(f, "d2/bad.txt", "\377two", 4);
  for (int threads = 1; threads <= 4; threads += 3) {
    rfr_ctx *ctx;
    rfi_dataset *ds;
    const rfr_ctx_options options = {.size = sizeof options, .threads = threads};
    const rfi_dataset_options o = {.root = f->path, .sequence = 16, .encode = encode_twice};
    assert_int_equal(rfr_ctx_create(&options, &ctx), RFR_OK);
    assert_int_equal(rfi_dataset_open(ctx, &pattern, 1, &o, &ds), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "data.binary");
    assert_non_null(strstr(rfr_last_error()->message, "d0/bad.txt"));
    rfr_ctx_destroy(ctx);
  }
}

static void test_faults(void **state) {
  rft_folder *f = *state;
  make_files(f, 5);
  for (int k = 1;; k++) {
    rfi_dataset *ds;
    rfr_ctx_fail_alloc(f->ctx, k);
    rfr_status s = open_it(f, "**/*.txt", 0.2, 4, &ds);
    rfr_ctx_fail_alloc(f->ctx, 0);
    rfi_dataset_close(ds);
    if (s == RFR_OK) break;
    assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 500);
  }
  for (int k = 1;; k++) {
    rfi_dataset *ds;
    rfi_io_fault fault = {.fail_at = k, .error = 5};
    rfi_io_set_fault(&fault);
    rfr_status s = open_it(f, "**/*.txt", 0.2, 4, &ds);
    rfi_io_set_fault(NULL);
    rfi_dataset_close(ds);
    if (fault.calls < k) break;
    assert_true(s == RFR_IO || s == RFR_OK); /* a failed close after reading does no harm */
    assert_true(k < 500);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_permutation),     rft_folder_test(test_training_windows),
      rft_folder_test(test_small_documents), rft_folder_test(test_validation_windows),
      rft_folder_test(test_split_is_stable), rft_folder_test(test_duplicates),
      rft_folder_test(test_blocks),          rft_folder_test(test_few_blocks),
      rft_folder_test(test_equal_blocks),    rft_folder_test(test_binary),
      rft_folder_test(test_no_files),        rft_folder_test(test_threads),
      rft_folder_test(test_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
