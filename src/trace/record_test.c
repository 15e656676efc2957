/* SPDX-License-Identifier: Apache-2.0
 *
 * Recording: a trace keeps the first error, with its source line.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "refrain/ops.h"
#include "support/context.h"

static void test_latched_error(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value a = rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){3, 5}));
  rfr_value b = rfr_input(t, "b", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){4, 7}));
  rfr_scope(t, "layer2.mlp");
  int line = __LINE__ + 1;
  rfr_value y = rfr_linear(t, a, b, RFR_NONE);
  assert_int_equal(y, RFR_NONE);
  assert_int_equal(rfr_add(t, y, a), RFR_NONE); /* does not replace the first error */
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  char place[32];
  snprintf(place, sizeof place, "record_test.c:%d: ", line);
  assert_non_null(strstr(rfr_last_error()->message, place));
  assert_non_null(strstr(rfr_last_error()->message, "layer2.mlp"));
  assert_string_equal(rfr_last_error()->slug, "trace.shape");
  rfr_trace_destroy(t);
}

static void test_names(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 0, NULL);
  rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 0, NULL);
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "trace.name");
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_latched_error),
      rft_context_test(test_names),
  };
  return cmocka_run_group_tests_name("record", tests, NULL, NULL);
}
