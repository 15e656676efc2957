/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of nearest 8-bit codes gives the same codes as the binary search: at each midpoint and the floats next to
 * it, at both ends of each entry, for a step through all bit patterns of -1 ... 1, and for NaNs.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "ops/quant/dynamic8.h"

static const float numbers[2][256] = {{
#include "ops/quant/dynamic_signed.def"
                                      },
                                      {
#include "ops/quant/dynamic_unsigned.def"
                                      }};

enum { MOST = 2 * RFI_DYNAMIC8_ENTRIES(RFI_DYNAMIC8_UNSIGNED_DROP), STEP = 97 };

typedef struct map {
  float middle[255];
  uint32_t table[MOST];
  int drop;
} map;

static void check(const map *m, float x) {
  const int found = rfi_dynamic8_find(m->table, m->drop, x), want = rfi_dynamic8_nearest(m->middle, x);
  if (found != want) fail_msg("%a is nearest to number %d, not %d", x, want, found);
}

static void make_map(map *m, const float *from, int drop) {
  const int n = RFI_DYNAMIC8_ENTRIES(drop);
  m->drop = drop;
  for (int k = 0; k < 255; k++) m->middle[k] = rfi_dynamic8_middle(from, k);
  for (int i = 0; i < 2 * n; i++) m->table[i] = rfi_dynamic8_entry(m->middle, drop, i >= n, i % n);
}

static void check_map(const float *from, int drop) {
  static map m;
  make_map(&m, from, drop);
  for (int k = 0; k < 255; k++) {
    check(&m, m.middle[k]);
    check(&m, nextafterf(m.middle[k], -2));
    check(&m, nextafterf(m.middle[k], 2));
  }
  for (uint32_t size = 0; size <= RFI_DYNAMIC8_ONE + 4; size += STEP) {
    check(&m, rfi_dynamic8_float(size));
    check(&m, rfi_dynamic8_float(size | 1u << 31));
  }
  for (uint32_t size = RFI_DYNAMIC8_LEAST; size < RFI_DYNAMIC8_ONE; size += 1u << drop)
    for (uint32_t sign = 0; sign < 2; sign++) {
      check(&m, rfi_dynamic8_float((size - 1) | sign << 31));
      check(&m, rfi_dynamic8_float(size | sign << 31));
    }
  const float special[] = {0, -0.0f, 1, -1, NAN, -NAN, rfi_dynamic8_float(RFI_DYNAMIC8_ONE + 2)};
  for (size_t i = 0; i < sizeof special / sizeof *special; i++) check(&m, special[i]);
}

static void test_tables(void **state) {
  (void)state;
  check_map(numbers[0], RFI_DYNAMIC8_SIGNED_DROP);
  check_map(numbers[1], RFI_DYNAMIC8_UNSIGNED_DROP);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_tables)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
