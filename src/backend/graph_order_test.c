/* SPDX-License-Identifier: Apache-2.0
 *
 * The check of a graph's order, with synthetic ops whose results and operands are in one array of bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/graph_order.h"
#include "base/base.h"
#include "support/context.h"

enum { OPS = 4 };

/* Op i writes ten floats at write[i], reads ten at read[i] (-1: nothing), and has workspace[i] bytes at its end. */
typedef struct made {
  char bytes[4096];
  rfi_arg arg[OPS][2];
  rfi_bound bound[OPS];
  rfi_unit unit[OPS];
} made;

static void make(made *m, const int read[OPS], const int write[OPS]) {
  memset(m, 0, sizeof *m);
  for (int i = 0; i < OPS; i++) {
    for (int k = 0; k < 2; k++) {
      const int at = k ? write[i] : read[i];
      m->arg[i][k] = (rfi_arg){.data = at < 0 ? NULL : m->bytes + at,
                               .type = {.dtype = RFR_F32, .rank = at < 0 ? -1 : 1, .shape = {10}},
                               .stride = {1}};
    }
    m->bound[i] = (rfi_bound){.op = i, .call = {.n_in = 1, .n_out = 1, .in = m->arg[i], .out = m->arg[i] + 1}};
    m->unit[i] = (rfi_unit){i, 1};
  }
}

static rfr_status check(made *m, int n, const rfi_unit_edge *edges) {
  rfi_unit_edge copy[8];
  if (n > 0) memcpy(copy, edges, sizeof *edges * (size_t)n);
  return rfi_order_check(ctx, m->bound, m->unit, OPS, copy, n);
}

/* 0 -> 1 -> 3 is the main stream, 2 is concurrent with 1. */
static const rfi_unit_edge branch[] = {{2, 3}, {1, 3}, {0, 2}, {0, 1}};

static void test_order(void **state) {
  (void)state;
  made m;
  make(&m, (int[]){-1, 0, 0, 200}, (int[]){0, 100, 200, 300});
  assert_int_equal(check(&m, 4, branch), RFR_OK);       /* 1 and 2 read the same */
  assert_int_equal(check(&m, 3, branch), RFR_INTERNAL); /* 1 reads a result of 0, and no path orders them */
  assert_string_equal(rfr_last_error()->slug, "plan.order");
  assert_int_equal(check(&m, 3, branch + 1), RFR_INTERNAL); /* 3 reads a result of 2 */
}

static void test_bytes(void **state) {
  (void)state;
  made m;
  make(&m, (int[]){-1, 0, 0, -1}, (int[]){0, 100, 139, 300});
  assert_int_equal(check(&m, 4, branch), RFR_INTERNAL); /* both write the last byte of 1's result */
  make(&m, (int[]){-1, 0, 0, -1}, (int[]){0, 100, 140, 300});
  assert_int_equal(check(&m, 4, branch), RFR_OK); /* adjacent, no overlap */
  make(&m, (int[]){-1, 0, 139, -1}, (int[]){0, 100, 500, 300});
  assert_int_equal(check(&m, 4, branch), RFR_INTERNAL); /* 2 reads a result of 1 */
  make(&m, (int[]){-1, 0, 0, -1}, (int[]){0, 100, 200, 300});
  for (int i = 1; i < 3; i++) {
    m.bound[i].call.workspace = m.bytes + 1000 + 64 * i;
    m.bound[i].workspace = 64;
  }
  assert_int_equal(check(&m, 4, branch), RFR_OK);
  m.bound[1].workspace = 65;
  assert_int_equal(check(&m, 4, branch), RFR_INTERNAL);
}

/* Ops of one unit are not ordered. */
static void test_unit(void **state) {
  (void)state;
  made m;
  make(&m, (int[]){-1, 0, 0, 200}, (int[]){0, 100, 200, 300});
  m.unit[1] = (rfi_unit){1, 2};
  m.unit[2] = (rfi_unit){3, 1};
  rfi_unit_edge line[] = {{0, 1}, {1, 2}};
  assert_int_equal(rfi_order_check(ctx, m.bound, m.unit, 3, line, 2), RFR_OK);
  assert_int_equal(rfi_order_check(ctx, m.bound, m.unit, 3, line, 1), RFR_INTERNAL);
}

/* Copies must precede all ops, whatever the ops read. */
static void test_copies(void **state) {
  (void)state;
  made m;
  make(&m, (int[]){-1, -1, -1, -1}, (int[]){0, 100, 200, 300});
  m.unit[0] = (rfi_unit){0, 0};
  assert_int_equal(check(&m, 4, branch), RFR_OK);
  assert_int_equal(check(&m, 2, branch + 2), RFR_INTERNAL); /* 3 has no edge */
  assert_string_equal(rfr_last_error()->slug, "plan.order");
  assert_int_equal(check(&m, 3, branch), RFR_INTERNAL); /* 1 has no edge */
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_order), rft_context_test(test_bytes),
                                     rft_context_test(test_unit), rft_context_test(test_copies)};
  return cmocka_run_group_tests_name("graph_order", tests, NULL, NULL);
}
