/* SPDX-License-Identifier: Apache-2.0
 *
 * Mixtures: shares in every prefix, each source's windows in its own order, limits, and any order of reading.
 */
#include "data/mixture.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "support/folder.h"

enum { S = 8, SOURCES = 3, WINDOWS = 4000 };

static rfi_dataset *open_source(rft_folder *f, int i) {
  char name[16], text[1024];
  const char *pattern = name;
  const int size = 200 + 100 * i;
  snprintf(name, sizeof name, "%c.txt", 'a' + i);
  for (int k = 0; k < size; k++) text[k] = (char)('a' + i);
  rft_write(f, name, text, (size_t)size);
  rfi_dataset *ds;
  const rfi_dataset_options o = {.root = f->path, .sequence = S};
  assert_int_equal(rfi_dataset_open(f->ctx, &pattern, 1, &o, &ds), RFR_OK);
  return ds;
}

static rfi_dataset *open_mixture(rft_folder *f, const double *shares, const double *epochs) {
  rfi_mixture_source sources[SOURCES];
  rfi_dataset *ds;
  for (int i = 0; i < SOURCES; i++) sources[i] = (rfi_mixture_source){open_source(f, i), shares[i], epochs[i]};
  assert_int_equal(rfi_mixture_open(f->ctx, sources, SOURCES, false, &ds), RFR_OK);
  assert_int_equal(rfi_mixture_sources(ds), SOURCES);
  return ds;
}

static int source_of(rfi_dataset *ds, uint64_t seed, int64_t sample) {
  int32_t tokens[S], targets[S], documents[S];
  int n;
  assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, seed, sample, tokens, targets, documents, &n), RFR_OK);
  return tokens[0] - 'a';
}

static const double no_limit[] = {INFINITY, INFINITY, INFINITY};

/* Every prefix has the given shares, and the counts agree with the windows. */
static void test_shares(void **state) {
  rft_folder *f = *state;
  const double shares[] = {5, 3, 0.5};
  rfi_dataset *ds = open_mixture(f, shares, no_limit);
  static int drawn[WINDOWS];
  int64_t seen[SOURCES] = {0}, counts[SOURCES], total;
  int differ = 0;
  for (int64_t i = 0; i < WINDOWS; i++) {
    seen[drawn[i] = source_of(ds, 7, i)]++;
    assert_int_equal(rfi_mixture_counts(ds, 7, i + 1, counts, &total), RFR_OK);
    assert_memory_equal(counts, seen, sizeof seen);
    for (int k = 0; k < SOURCES; k++) assert_true(fabs((double)seen[k] - (double)(i + 1) * shares[k] / 8.5) < SOURCES);
  }
  for (int64_t i = WINDOWS - 1; i >= 0; i -= 97) assert_int_equal(source_of(ds, 7, i), drawn[i]);
  for (int64_t i = 0; i < 100; i++) differ += source_of(ds, 8, i) != drawn[i];
  assert_true(differ > 0);
  rfi_dataset_close(ds);
}

/* A source provides as many windows as its epochs allow; then the others continue until none is left. */
static void test_limits(void **state) {
  rft_folder *f = *state;
  const double shares[] = {6, 1, 1}, epochs[] = {2, 3, 1};
  rfi_dataset *ds = open_mixture(f, shares, epochs);
  const int64_t all[] = {2 * 25, 3 * 38, 50}, sum = 2 * 25 + 3 * 38 + 50;
  int64_t counts[SOURCES], total, seen[SOURCES] = {0};
  int32_t tokens[S], targets[S], documents[S];
  int n;
  for (int64_t i = 0; i < sum; i++) seen[source_of(ds, 1, i)]++;
  assert_memory_equal(seen, all, sizeof all);
  assert_int_equal(rfi_mixture_counts(ds, 1, 1000, counts, &total), RFR_OK);
  assert_memory_equal(counts, all, sizeof all);
  assert_int_equal(total, sum);
  assert_int_equal(rfi_dataset_window(ds, RFI_TRAIN, 1, sum, tokens, targets, documents, &n), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.empty");
  rfi_dataset_close(ds);
}

static void test_refused(void **state) {
  rft_folder *f = *state;
  const double bad[] = {0, -1, NAN, INFINITY};
  for (int i = 0; i < 4; i++) {
    rfi_mixture_source source = {open_source(f, 0), bad[i], INFINITY};
    rfi_dataset *ds;
    assert_int_equal(rfi_mixture_open(f->ctx, &source, 1, false, &ds), RFR_INVALID);
    assert_null(ds);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_shares),
      rft_folder_test(test_limits),
      rft_folder_test(test_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
