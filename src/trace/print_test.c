/* SPDX-License-Identifier: Apache-2.0
 *
 * The form for humans, and the live bytes that it shows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "refrain/ops.h"
#include "support/trace_sample.h"
#include "trace/live.h"
#include "trace/trace.h"
/* Two equal layers print as one; the bytes are those of a count by hand. */
static void test_pretty(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value h = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){16, 16}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){16, 16}));
  for (int l = 0; l < 3; l++) {
    char scope[16];
    snprintf(scope, sizeof scope, "layer%d.mlp", l);
    rfr_scope(t, scope);
    h = rfr_linear(t, h, w, RFR_NONE);
  }
  rfr_output(t, "y", h);
  int64_t *live;
  assert_int_equal(rfi_live_bytes(t, &live), RFR_OK);
  assert_int_equal(live[0], 1024);
  assert_int_equal(live[1], 2048);
  assert_int_equal(live[2], 2048);
  rfi_free(ctx, live);
  rft_text out = {0};
  rft_trace_print(t, 0, &out);
  assert_non_null(strstr(out.data, "layer[0..2] {"));
  assert_null(strstr(out.data, "layer[1"));
  assert_non_null(strstr(out.data, "live 1.0 KiB"));
  free(out.data);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_pretty),
  };
  return cmocka_run_group_tests_name("print", tests, NULL, NULL);
}
