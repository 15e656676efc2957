/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows as windows: masks, packing, epochs, weights, the split, truncation and the cache, with bytes as tokens.
 */
#include "text/row_dataset.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/folder.h"

enum { S = 48 };

typedef struct opened {
  rfi_row_encoder encoder;
  rfi_token_cache cache;
  rfi_row_dataset_options options;
  rfi_dataset *ds;
  int warnings;
} opened;

static void count_warning(void *user, const char *line) {
  assert_non_null(strstr(line, "not cached"));
  ++*(int *)user;
}

static opened defaults(rft_folder *f) {
  opened o = {.encoder = {.ctx = f->ctx}, .cache = {.ctx = f->ctx, .warn = count_warning}};
  o.options = (rfi_row_dataset_options){.root = f->path, .sequence = S, .packing = true, .form = RFI_ROW_FORM_COUNT};
  return o;
}

static rfr_status open_rows(opened *o, const char *pattern) {
  o->cache.user = &o->warnings;
  o->options.cache = &o->cache;
  const char *patterns[] = {pattern};
  if (pattern) o->options.patterns = patterns, o->options.n_patterns = 1;
  return rfi_row_dataset_open(&o->encoder, &o->options, &o->ds);
}

/* Rows "p<number>:" -> answers of various lengths. */
static void write_rows(rft_folder *f, const char *name, int first, int n) {
  char *text = malloc((size_t)n * 128 + 1), *at = text;
  for (int i = first; i < first + n; i++)
    at += sprintf(at, "{\"prompt\": \"p%d:\", \"completion\": \"%.*s.\"}\n", i, i * 7 % 29,
                  "abcdefghijklmnopqrstuvwxyzabcdef");
  rft_write(f, name, text, (size_t)(at - text));
  free(text);
}

static void write_text(rft_folder *f, const char *name, const char *text) { rft_write(f, name, text, strlen(text)); }

typedef struct window {
  int32_t tokens[S], targets[S], docs[S];
  int n;
} window;

static window get(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample) {
  window w;
  assert_int_equal(rfi_dataset_window(ds, split, seed, sample, w.tokens, w.targets, w.docs, &w.n), RFR_OK);
  assert_int_equal(w.docs[0], 0);
  return w;
}

/* Checks the documents of a window against the form of the rows, and counts each row. */
static void count_rows(const window *w, int *seen) {
  for (int d = 0; d < w->n; d++) {
    const int end = d + 1 < w->n ? w->docs[d + 1] : S;
    int at = w->docs[d];
    char text[S + 1];
    for (int i = at; i < end; i++) text[i - at] = (char)w->tokens[i];
    text[end - at] = 0;
    if (text[0] == 0) { /* padding */
      assert_int_equal(d, w->n - 1);
      for (; at < end; at++) assert_true(w->tokens[at] == 0 && w->targets[at] == RFI_IGNORED_TARGET);
      continue;
    }
    const int prompt = (int)(strchr(text, ':') - text) + 1;
    for (int i = 0; at + i < end; i++) {
      const int next = at + i + 1 < end ? w->tokens[at + i + 1] : RFI_IGNORED_TARGET;
      assert_int_equal(w->targets[at + i], i + 1 >= prompt ? next : RFI_IGNORED_TARGET);
    }
    seen[atoi(text + 1)]++;
  }
}

static void test_epochs(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 500);
  opened o = defaults(f);
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(o.ds);
  const int64_t W = stats->windows[RFI_TRAIN];
  assert_int_equal(stats->documents[RFI_TRAIN], 500);
  assert_true(W < 260 && W * S >= stats->tokens[RFI_TRAIN]);
  int moved = 0;
  for (int64_t epoch = 0; epoch < 3; epoch++) {
    int seen[500] = {0};
    for (int64_t i = 0; i < W; i++) {
      const window w = get(o.ds, RFI_TRAIN, 5, epoch * W + i), before = get(o.ds, RFI_TRAIN, 5, i);
      count_rows(&w, seen);
      moved += epoch > 0 && memcmp(w.tokens, before.tokens, sizeof w.tokens) != 0;
    }
    for (int i = 0; i < 500; i++) assert_int_equal(seen[i], 1);
  }
  assert_true(moved > W);
  /* A window depends on seed and number alone. */
  const window a = get(o.ds, RFI_TRAIN, 5, 7), other = get(o.ds, RFI_TRAIN, 6, 7), b = get(o.ds, RFI_TRAIN, 5, 7);
  assert_memory_equal(a.tokens, b.tokens, sizeof a.tokens);
  assert_memory_not_equal(a.tokens, other.tokens, sizeof a.tokens);
  int64_t windows;
  assert_int_equal(rfi_dataset_windows(o.ds, 5, 2.5, &windows), RFR_OK);
  assert_int_equal(windows, 2 * W + (W + 1) / 2);
  rfi_dataset_close(o.ds);
}

static void test_unpacked(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 100);
  opened o = defaults(f);
  o.options.packing = false;
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  assert_int_equal(rfi_dataset_get_stats(o.ds)->windows[RFI_TRAIN], 100);
  int seen[100] = {0};
  for (int64_t i = 0; i < 100; i++) {
    const window w = get(o.ds, RFI_TRAIN, 1, i);
    assert_int_equal(w.n, 2); /* the row and the padding */
    count_rows(&w, seen);
  }
  for (int i = 0; i < 100; i++) assert_int_equal(seen[i], 1);
  rfi_dataset_close(o.ds);
}

static void test_weights(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 40);
  write_rows(f, "b.jsonl", 40, 41);
  const char *patterns[] = {"a.jsonl", "*.jsonl"};
  const double weights[] = {2, 0.25};
  opened o = defaults(f);
  o.options.patterns = patterns;
  o.options.weights = weights;
  o.options.n_patterns = 2;
  assert_int_equal(open_rows(&o, NULL), RFR_OK);
  int seen[81] = {0};
  int64_t before = 0, after;
  for (int epoch = 0; epoch < 8; epoch++) {
    assert_int_equal(rfi_dataset_windows(o.ds, 3, epoch + 1, &after), RFR_OK);
    for (int64_t i = before; i < after; i++) {
      const window w = get(o.ds, RFI_TRAIN, 3, i);
      count_rows(&w, seen);
    }
    before = after;
    for (int i = 0; i < 40; i++) assert_int_equal(seen[i], 2 * (epoch + 1));
    int total = 0;
    for (int i = 40; i < 81; i++) total += seen[i];
    assert_int_equal(total, 41 * (epoch + 1) / 4);
    for (int i = 40; i < 81; i++) assert_true(seen[i] <= epoch / 4 + 1);
  }
  for (int i = 40; i < 81; i++) assert_int_equal(seen[i], 2);
  rfi_dataset_close(o.ds);
  /* Starts in the middle, without requesting the samples before. */
  const window w = (assert_int_equal(open_rows(&o, NULL), RFR_OK), get(o.ds, RFI_TRAIN, 3, before - 1));
  rfi_dataset_close(o.ds);
  assert_int_equal(open_rows(&o, NULL), RFR_OK);
  for (int64_t i = 0; i < before - 1; i++) get(o.ds, RFI_TRAIN, 3, i);
  const window again = get(o.ds, RFI_TRAIN, 3, before - 1);
  assert_memory_equal(w.tokens, again.tokens, sizeof w.tokens);
  rfi_dataset_close(o.ds);
}

static void test_split(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 400);
  opened o = defaults(f);
  o.options.validation_fraction = 0.1;
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(o.ds);
  assert_in_range(stats->documents[RFI_VALIDATION], 20, 60);
  assert_int_equal(stats->documents[RFI_TRAIN] + stats->documents[RFI_VALIDATION], 400);
  int seen[400] = {0}, held[400] = {0};
  int64_t predicted = 0, bytes = 0;
  for (int64_t i = 0; i < stats->windows[RFI_TRAIN]; i++) {
    const window w = get(o.ds, RFI_TRAIN, 1, i);
    count_rows(&w, seen);
  }
  for (int64_t i = 0; i < stats->windows[RFI_VALIDATION] + 2; i++) {
    const window w = get(o.ds, RFI_VALIDATION, 1, i);
    count_rows(&w, held);
    int64_t targets = 0;
    for (int k = 0; k < S; k++) targets += w.targets[k] != RFI_IGNORED_TARGET;
    assert_int_equal(rfi_dataset_window_bytes(o.ds, i), targets);
    predicted += targets;
    bytes += rfi_dataset_window_bytes(o.ds, i);
  }
  assert_int_equal(predicted, stats->validation_predicted);
  assert_int_equal(bytes, predicted);
  for (int i = 0; i < 400; i++) assert_int_equal(seen[i] + held[i], 1);
  rfi_dataset_close(o.ds);
  /* A row stays in its split when files are added. */
  write_rows(f, "b.jsonl", 400, 100);
  assert_int_equal(open_rows(&o, "*.jsonl"), RFR_OK);
  int again[500] = {0};
  for (int64_t i = 0; i < rfi_dataset_get_stats(o.ds)->windows[RFI_VALIDATION]; i++) {
    const window w = get(o.ds, RFI_VALIDATION, 1, i);
    count_rows(&w, again);
  }
  assert_memory_equal(again, held, sizeof held);
  rfi_dataset_close(o.ds);
  /* With few rows, a split that the hashes leave empty gets one row. */
  write_rows(f, "c.jsonl", 0, 2);
  for (double fraction = 0.001; fraction < 1; fraction += 0.99) {
    o.options.validation_fraction = fraction;
    assert_int_equal(open_rows(&o, "c.jsonl"), RFR_OK);
    assert_int_equal(rfi_dataset_get_stats(o.ds)->documents[RFI_TRAIN], 1);
    assert_int_equal(rfi_dataset_get_stats(o.ds)->documents[RFI_VALIDATION], 1);
    rfi_dataset_close(o.ds);
  }
  write_rows(f, "d.jsonl", 0, 1);
  assert_int_equal(open_rows(&o, "d.jsonl"), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.held_out");
}

static void test_held_out_files(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 30);
  write_rows(f, "b.jsonl", 30, 10);
  write_rows(f, "copy.jsonl", 30, 10);
  write_rows(f, "aa.jsonl", 30, 10);
  write_rows(f, "again.jsonl", 0, 30);
  write_text(f, "empty.jsonl", "");
  const char *held = "b.jsonl";
  opened o = defaults(f);
  o.options.validation_patterns = &held;
  o.options.n_validation_patterns = 1;
  assert_int_equal(open_rows(&o, "*.jsonl"), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(o.ds);
  assert_int_equal(stats->documents[RFI_TRAIN], 30);
  assert_int_equal(stats->documents[RFI_VALIDATION], 10);
  assert_int_equal(stats->duplicates, 3);
  assert_int_equal(stats->empty, 1);
  assert_string_equal(rfi_dataset_file(o.ds, RFI_TRAIN, 0, NULL), "a.jsonl");
  assert_string_equal(rfi_dataset_file(o.ds, RFI_VALIDATION, 0, NULL), "b.jsonl");
  rfi_dataset_close(o.ds);
}

static void test_truncation(void **state) {
  rft_folder *f = *state;
  static const char text[] =
      "{\"prompt\": \"p1:\", \"completion\": \"0123456789012345678901234567890123456789012345678901234567890123\"}\n"
      "{\"prompt\": \"p2:0123456789012345678901234567890123456789012345678\", \"completion\": \"x\"}\n"
      "{\"prompt\": \"p3:\", \"completion\": \"\"}\n"
      "{\"prompt\": \"p4:\", \"completion\": \"ok\"}\n";
  rft_write(f, "a.jsonl", text, sizeof text - 1);
  opened o = defaults(f);
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(o.ds);
  assert_int_equal(stats->documents[RFI_TRAIN], 2);
  assert_int_equal(stats->truncated, 1);
  assert_int_equal(stats->cut, 3 + 64 - S);
  assert_int_equal(stats->untrained, 2);
  assert_int_equal(stats->trained[RFI_TRAIN], S - 3 + 2);
  int64_t n;
  const uint32_t *row = rfi_row_dataset_row(o.ds, RFI_TRAIN, 1, &n);
  assert_int_equal(n, 5);
  assert_true(row[3] == ('o' | RFI_TOKEN_TRAINED) && row[2] == ':');
  assert_null(rfi_row_dataset_row(o.ds, RFI_TRAIN, 2, &n));
  rfi_dataset_close(o.ds);
  o.options.truncate = RFI_ROW_DROP;
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  assert_int_equal(rfi_dataset_get_stats(o.ds)->dropped, 2);
  assert_int_equal(rfi_dataset_get_stats(o.ds)->documents[RFI_TRAIN], 1);
  rfi_dataset_close(o.ds);
  o.options.truncate = RFI_ROW_REFUSE;
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.long");
  assert_non_null(strstr(rfr_last_error()->message, "a.jsonl:1: the row has 67 tokens; data.sequence is 48"));
  write_text(f, "b.jsonl", "{\"prompt\": \"a\", \"completion\": \"\"}");
  assert_int_equal(open_rows(&o, "b.jsonl"), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.untrained");
}

static void test_loss(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 10);
  opened o = defaults(f);
  o.encoder.loss = RFI_ROW_LOSS_ALL;
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(o.ds);
  assert_int_equal(stats->trained[RFI_TRAIN], stats->tokens[RFI_TRAIN] - 10);
  rfi_dataset_close(o.ds);
  write_text(f, "t.jsonl", "{\"text\": \"abc\"}\n\n  \n{\"text\": \"d\"}\n");
  o.encoder.loss = RFI_ROW_LOSS_AUTO;
  assert_int_equal(open_rows(&o, "t.jsonl"), RFR_OK);
  assert_int_equal(rfi_dataset_get_stats(o.ds)->trained[RFI_TRAIN], 2);
  rfi_dataset_close(o.ds);
  o.encoder.loss = RFI_ROW_LOSS_ASSISTANT;
  assert_int_equal(open_rows(&o, "t.jsonl"), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "t.jsonl:1: a text row has no answer"));
  o.encoder.loss = RFI_ROW_LOSS_AUTO;
  write_text(f, "m.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}");
  assert_int_equal(open_rows(&o, "m.jsonl"), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "m.jsonl:1: messages need a chat template"));
  write_text(f, "p.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}");
  assert_int_equal(open_rows(&o, "p.jsonl"), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.preference");
  /* The error is that of the first bad line, whichever thread reads it. */
  char text[4096], *at = text;
  for (int i = 0; i < 90; i++) at += sprintf(at, i > 60 ? "{\"text\": %d}\n" : "{\"text\": \"%d\"}\n", i);
  rft_write(f, "e.jsonl", text, (size_t)(at - text));
  assert_int_equal(open_rows(&o, "e.jsonl"), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "e.jsonl:62:10: text: is a number"));
}

/* Each pair must be two documents of one window, in all kinds of passes. A pair that is too long loses the end of its
 * longer answer. */
static void test_pairs(void **state) {
  rft_folder *f = *state;
  char text[8192], *at = text;
  for (int i = 0; i < 40; i++)
    at += sprintf(at, "{\"prompt\": \"p\", \"chosen\": \"%.*s\", \"rejected\": \"%.*s\"}\n", 1 + i * 7 % 60,
                  "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc", 1 + i * 3 % 50,
                  "rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr");
  at += sprintf(at, "{\"prompt\": \"p\", \"chosen\": \"\", \"rejected\": \"r\"}\n");
  at += sprintf(at, "{\"prompt\": \"p\", \"chosen\": \"same\", \"rejected\": \"same\"}\n");
  rft_write(f, "p.jsonl", text, (size_t)(at - text));
  opened o = defaults(f);
  o.options.form = RFI_ROW_preference;
  for (int packing = 0; packing < 2; packing++) {
    int seen[40] = {0};
    int64_t windows;
    o.options.packing = packing;
    assert_int_equal(open_rows(&o, "p.jsonl"), RFR_OK);
    const rfi_dataset_stats *stats = rfi_dataset_get_stats(o.ds);
    assert_int_equal(stats->documents[RFI_TRAIN], 40);
    assert_int_equal(stats->untrained, 1); /* an answer without a token */
    assert_int_equal(stats->equal, 1);
    assert_int_equal(stats->trained[RFI_TRAIN], stats->tokens[RFI_TRAIN] - 80);
    assert_int_equal(rfi_row_dataset_windows_once(o.ds, RFI_TRAIN, &windows), RFR_OK);
    for (int64_t i = 0; i < windows; i++) {
      window w = {.n = 0};
      int32_t rows[S];
      int n;
      assert_int_equal(rfi_row_dataset_window(o.ds, RFI_TRAIN, true, 9, i, w.tokens, w.targets, w.docs, &w.n, rows, &n),
                       RFR_OK);
      assert_int_equal(w.n, 2 * n);
      assert_true(packing || n == 1);
      for (int d = 0; d < w.n; d++) {
        const int r = rows[d / 2], chosen = 2 + r * 7 % 60, rejected = 2 + r * 3 % 50;
        int a = chosen, b = rejected, length = 0;
        if (a + b > S && a <= S / 2) b = S - a;
        else if (a + b > S && b <= S / 2) a = S - b;
        else if (a + b > S) a = b = S / 2;
        seen[r] += d % 2;
        assert_int_equal(w.tokens[w.docs[d]], 'p');
        while (w.docs[d] + length + 1 < S && w.tokens[w.docs[d] + length + 1] == (d % 2 ? 'r' : 'c')) {
          assert_int_equal(w.targets[w.docs[d] + length], d % 2 ? 'r' : 'c');
          length++;
        }
        assert_int_equal(length + 1, d % 2 ? b : a);
      }
    }
    for (int r = 0; r < 40; r++) assert_int_equal(seen[r], 1);
    rfi_dataset_close(o.ds);
  }
}

static void test_cache(void **state) {
  rft_folder *f = *state;
  write_rows(f, "a.jsonl", 0, 300);
  opened o = defaults(f);
  o.cache.folder = "";
  window first[3];
  char name[64] = "";
  for (int pass = 0; pass < 4; pass++) {
    o.cache.hits = 0;
    assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
    assert_int_equal(rfi_dataset_get_stats(o.ds)->cached, pass == 1 || pass == 3);
    for (int i = 0; i < 3; i++) {
      const window w = get(o.ds, RFI_TRAIN, 1, i);
      if (pass == 0) first[i] = w;
      assert_memory_equal(w.tokens, first[i].tokens, sizeof w.tokens);
      assert_memory_equal(w.targets, first[i].targets, sizeof w.targets);
    }
    rfi_dataset_close(o.ds);
    rfi_paths names = {.ctx = f->ctx};
    assert_int_equal(rfi_dir_list(rft_path(f, ".refrain"), &names), RFR_OK);
    assert_int_equal(names.n, 2);
    assert_string_equal(names.items[0], ".gitignore");
    snprintf(name, sizeof name, ".refrain/%.50s", names.items[1]);
    rfi_paths_deinit(&names);
    if (pass != 1) continue;
    size_t n; /* damage one byte: the file is ignored and written again */
    char *data = rft_read(f, name, &n);
    data[n - 5] ^= 1;
    rft_write(f, name, data, n);
    free(data);
  }
  /* Other bytes, another key. */
  write_rows(f, "a.jsonl", 1, 300);
  o.cache.hits = 0;
  assert_int_equal(open_rows(&o, "a.jsonl"), RFR_OK);
  assert_int_equal(rfi_dataset_get_stats(o.ds)->cached, 0);
  rfi_dataset_close(o.ds);
  /* A folder that cannot be made: one warning. */
  write_rows(f, "b.jsonl", 0, 10);
  rft_write(f, "file", "x", 1);
  o.cache.folder = rft_path(f, "file");
  assert_int_equal(open_rows(&o, "*.jsonl"), RFR_OK);
  assert_int_equal(o.warnings, 1);
  rfi_dataset_close(o.ds);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_epochs), rft_folder_test(test_unpacked),       rft_folder_test(test_weights),
      rft_folder_test(test_split),  rft_folder_test(test_held_out_files), rft_folder_test(test_truncation),
      rft_folder_test(test_loss),   rft_folder_test(test_cache),          rft_folder_test(test_pairs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
