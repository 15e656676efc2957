/* SPDX-License-Identifier: Apache-2.0
 *
 * The data set: which files, the split, and that windows cover what they promise.
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

/* `n` files of different sizes; byte j of file i is i * 31 + j. */
static void make_files(rft_folder *f, int n) {
  for (int i = 0; i < n; i++) {
    char name[32], data[64];
    int size = 1 + i * 7 % 40;
    snprintf(name, sizeof name, "d%d/f%03d.txt", i % 3, i);
    for (int j = 0; j < size; j++) data[j] = (char)(i * 31 + j);
    data[0] = (char)i; /* all different */
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

/* In every epoch every training byte is an input; the targets are the bytes behind. */
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
    char *data = rft_read(f, rfi_dataset_document(ds, RFI_TRAIN, i, &bytes), &n);
    assert_int_equal(bytes, n);
    for (size_t j = 0; j < n; j++, at++) stream[at] = (uint8_t)data[j], document[at] = i;
    free(data);
  }
  assert_int_equal(at, N);

  int from_zero = 0; /* windows that begin at byte 0: one in every epoch if the ring began there */
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
  int moved = 0; /* each epoch has an order of its own, not only another first byte */
  for (int64_t k = 0; k < W; k++) {
    int64_t apart = rfi_dataset_position(ds, 9, k) - rfi_dataset_position(ds, 9, 0);
    int64_t later = rfi_dataset_position(ds, 9, W + k) - rfi_dataset_position(ds, 9, W);
    moved += (apart - later) % N != 0;
  }
  assert_true(moved > W / 2);
  free(stream);
  free(document);

  /* Sample i is the same whatever was asked before, also far ahead, also from another object. */
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

/* As many documents begin in a window as there are: in the smallest case one at every byte. */
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

/* One pass over the held-out split predicts every byte but the first of each document, once, in order, from at least
 * as many bytes before it as windows have for context, where its document has so many. */
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
    char *data = rft_read(f, rfi_dataset_document(ds, RFI_VALIDATION, i, NULL), &n);
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
  for (int i = 0; i < a->files[RFI_VALIDATION]; i++) { /* nothing that was held out is trained on later */
    int found = 0;
    for (int j = 0; j < b->files[RFI_VALIDATION]; j++)
      found += strcmp(rfi_dataset_document(before, RFI_VALIDATION, i, NULL),
                      rfi_dataset_document(after, RFI_VALIDATION, j, NULL)) == 0;
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
  assert_string_equal(rfi_dataset_document(ds, RFI_TRAIN, 0, NULL), "a.txt");
  rfi_dataset_close(ds);

  /* Held out by name: the copies leave the training split, not the held-out one. */
  const char *train[] = {"*.txt", "**/*.txt"}, *held[] = {"held/*"};
  rfi_dataset_options o = {.root = f->path, .validation_patterns = held, .n_validation_patterns = 1, .sequence = 4};
  assert_int_equal(rfi_dataset_open(f->ctx, train, 2, &o, &ds), RFR_OK);
  stats = rfi_dataset_get_stats(ds);
  assert_int_equal(stats->files[RFI_TRAIN], 1);
  assert_string_equal(rfi_dataset_document(ds, RFI_TRAIN, 0, NULL), "c.txt");
  assert_int_equal(stats->files[RFI_VALIDATION], 1);
  assert_string_equal(rfi_dataset_document(ds, RFI_VALIDATION, 0, NULL), "held/z.txt");
  rfi_dataset_close(ds);
}

static void expect_empty(rft_folder *f, const char *pattern, double fraction, int sequence, const char *text) {
  rfi_dataset *ds;
  assert_int_equal(open_it(f, pattern, fraction, sequence, &ds), RFR_INVALID);
  assert_null(ds);
  assert_string_equal(rfr_last_error()->slug, "data.empty");
  if (!strstr(rfr_last_error()->message, text)) fail_msg("\"%s\" does not say \"%s\"", rfr_last_error()->message, text);
}

static void test_nothing_there(void **state) {
  rft_folder *f = *state;
  rft_write(f, "empty.txt", "", 0);
  rft_write(f, "short.md", "12345", 5);
  rft_write(f, "other.md", "12345", 5);
  expect_empty(f, "missing/*.txt", 0, 4, "missing/*.txt");
  expect_empty(f, "empty.txt", 0, 4, "0 bytes");
  expect_empty(f, "*.md", 0, 5, "5 bytes");
  expect_empty(f, "short.md", 0.99995, 1, "held out");
  rfi_dataset *ds;
  assert_int_equal(open_it(f, "*.md", 0, 4, &ds), RFR_OK);
  rfi_dataset_close(ds);
  assert_int_equal(open_it(f, "*.md", 1, 4, &ds), RFR_INVALID);
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
      rft_folder_test(test_nothing_there),   rft_folder_test(test_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
