/* SPDX-License-Identifier: Apache-2.0
 *
 * Copying a trace: an unchanged copy is equal, also after the original is gone; order by phase; uses.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "pass/pass.h"
#include "refrain/ops.h"
#include "support/trace_sample.h"

/* A copy of a trace owns its strings: it prints the same text after the original, a parsed trace, was destroyed. */
static void test_copy(void **state) {
  (void)state;
  rfr_trace *t = rft_trace_sample(), *parsed, *copy;
  rft_text first = {0}, second = {0};
  rft_trace_print(t, 1, &first);
  OK(rfr_trace_parse(ctx, "sample", first.data, first.n, &parsed));
  OK(rfi_copy_trace(parsed, &copy));
  assert_true(rfr_trace_equal(t, copy));
  rfr_trace_destroy(parsed);
  rft_trace_print(copy, 1, &second);
  assert_string_equal(first.data, second.data);
  rfr_trace_destroy(t);
  rfr_trace_destroy(copy);
  free(first.data);
  free(second.data);
}

/* Marks of autodiff follow their storage through a rewrite. */
static void test_marks(void **state) {
  (void)state;
  rfr_trace *t = rft_trace_sample(), *copy;
  rfr_value v = t->ops[t->n_ops / 2].out[0];
  v = t->values[v].base;
  t->values[v].if_trained = RFI_READ_LATER;
  OK(rfi_copy_trace(t, &copy));
  assert_int_equal(copy->values[v].if_trained, RFI_READ_LATER);
  rfr_trace_destroy(t);
  rfr_trace_destroy(copy);
}

static rfr_trace *chain(void) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){5}));
  rfr_value a = rfr_scale(t, x, 2, RFR_NONE), b = rfr_mul(t, a, x);
  rfr_output(t, "c", rfr_add(t, a, a));
  rfr_output(t, "b", b);
  OK(rfr_trace_finish(t));
  return t;
}

static void test_uses(void **state) {
  (void)state;
  rfr_trace *t = chain();
  rfi_uses *uses;
  OK(rfi_count_uses(t, &uses));
  assert_int_equal(uses[0].count, 2);
  assert_int_equal(uses[0].last, 1);
  assert_int_equal(uses[1].count, 3);
  assert_int_equal(uses[1].last, 2);
  assert_int_equal(uses[2].count, 1);
  assert_int_equal(uses[2].last, -1);
  assert_true(uses[2].output && !uses[1].output);
  rfi_free(ctx, uses);
  rfr_trace_destroy(t);
}

/* If an earlier phase reads the result of an op, the op moves there together with its producers. */
static void test_order_phases(void **state) {
  (void)state;
  rfr_trace *t = chain(), *ordered;
  uint8_t phase[3] = {RFR_PHASE_WGRAD, RFR_PHASE_WGRAD, RFR_PHASE_DGRAD};
  OK(rfi_order_phases(t, phase, &ordered));
  assert_int_equal(phase[0], RFR_PHASE_DGRAD);
  assert_int_equal(ordered->ops[0].def->code, RFI_OP_scale);
  assert_int_equal(ordered->ops[1].def->code, RFI_OP_add);
  assert_int_equal(ordered->ops[2].def->code, RFI_OP_mul);
  assert_int_equal(ordered->ops[2].phase, RFR_PHASE_WGRAD);
  rfr_trace_destroy(t);
  rfr_trace_destroy(ordered);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_copy),
      rft_context_test(test_marks),
      rft_context_test(test_uses),
      rft_context_test(test_order_phases),
  };
  return cmocka_run_group_tests_name("rewrite", tests, NULL, NULL);
}
