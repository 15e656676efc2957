/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing against a plain best-fit-decreasing search.
 */
#include "text/packing.h"

#include <stdlib.h>
#include <string.h>

#include "support/folder.h"
#include "support/random.h"

/* The reference search: the window with the smallest sufficient number of free tokens. */
static int64_t plain_windows(const int32_t *lengths, int64_t n, int32_t capacity) {
  int32_t *room = malloc(((size_t)n + 1) * sizeof *room);
  int64_t windows = 0;
  for (int32_t length = capacity; length > 0; length--)
    for (int64_t i = 0; i < n; i++) {
      if (lengths[i] != length) continue;
      int64_t best = -1;
      for (int64_t w = 0; w < windows; w++)
        if (room[w] >= length && (best < 0 || room[w] < room[best])) best = w;
      if (best < 0) room[best = windows++] = capacity;
      room[best] -= length;
    }
  free(room);
  return windows;
}

static void check(rfi_packing *p, const int32_t *lengths, int64_t n, int32_t capacity) {
  uint8_t *seen = calloc((size_t)n + 1, 1);
  assert_int_equal(rfi_pack_rows(p, lengths, n, capacity), RFR_OK);
  assert_int_equal(p->windows, plain_windows(lengths, n, capacity));
  assert_int_equal(p->first[0], 0);
  assert_int_equal(p->first[p->windows], n);
  for (int64_t w = 0; w < p->windows; w++) {
    int64_t used = 0;
    assert_true(p->first[w] < p->first[w + 1]);
    for (int64_t k = p->first[w]; k < p->first[w + 1]; k++) {
      used += lengths[p->rows[k]];
      assert_int_equal(seen[p->rows[k]]++, 0);
    }
    assert_true(used <= capacity);
  }
  free(seen);
}

static void test_against_plain(void **state) {
  rft_folder *f = *state;
  static const int32_t capacities[] = {1, 2, 63, 64, 65, 100, 4095, 4096, 4097, 70000};
  rfi_packing p = {.ctx = f->ctx};
  uint64_t seed = 1;
  int32_t lengths[700];
  for (size_t c = 0; c < sizeof capacities / sizeof *capacities; c++)
    for (int form = 0; form < 4; form++) {
      const int64_t n = (int64_t)rft_below(&seed, 700) + (form > 0);
      const int32_t capacity = capacities[c], most = form == 1 ? (capacity + 3) / 4 : capacity;
      for (int64_t i = 0; i < n; i++) lengths[i] = 1 + (int32_t)rft_below(&seed, (uint32_t)most);
      check(&p, lengths, n, capacity);
    }
  rfi_packing_deinit(&p);
}

static void test_largest_capacity(void **state) {
  rft_folder *f = *state;
  const int32_t capacity = 16777216, lengths[] = {16777216, 16777215, 1, 8388608, 8388607, 2, 262144};
  rfi_packing p = {.ctx = f->ctx};
  check(&p, lengths, 7, capacity);
  rfi_packing_deinit(&p);
}

/* The order of rows of equal length affects the windows, not their number. */
static void test_order(void **state) {
  rft_folder *f = *state;
  const int32_t a[] = {5, 5, 3, 3, 2}, b[] = {5, 3, 5, 2, 3};
  rfi_packing p = {.ctx = f->ctx}, q = {.ctx = f->ctx};
  check(&p, a, 5, 8);
  check(&q, b, 5, 8);
  assert_int_equal(p.windows, q.windows);
  assert_true(p.rows[1] != q.rows[1]);
  rfi_packing_deinit(&p);
  rfi_packing_deinit(&q);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_against_plain),
      rft_folder_test(test_largest_capacity),
      rft_folder_test(test_order),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
