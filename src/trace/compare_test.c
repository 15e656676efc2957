/* SPDX-License-Identifier: Apache-2.0
 *
 * Equality and difference of two traces.
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
#include "support/trace_sample.h"
#include "trace/trace.h"
static void test_diff(void **state) {
  (void)state;
  rfr_trace *a = rft_trace_sample(), *b = rft_trace_sample();
  rft_text out = {0};
  assert_int_equal(rfr_trace_diff(a, b, rft_text_add, &out), RFR_OK);
  assert_int_equal(out.n, 0);
  rfi_attr attr[3];
  memcpy(attr, b->ops[2].attr, sizeof attr);
  attr[1].i++; /* a slice that starts elsewhere */
  b->ops[2].attr = attr;
  assert_int_equal(rfr_trace_diff(a, b, rft_text_add, &out), RFR_OK);
  assert_int_equal(out.data[0], '-');
  assert_non_null(strstr(out.data, "\n+ "));
  int lines = 0;
  for (size_t i = 0; i < out.n; i++) lines += out.data[i] == '\n';
  assert_int_equal(lines, 2);
  free(out.data);
  rfr_trace_destroy(a);
  rfr_trace_destroy(b);
}

static rfr_trace *rotated(double frequency) {
  const int64_t shape[3] = {5, 1, 6};
  double list[2] = {1.0, frequency};
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 3, shape);
  rfr_value p = rfr_input(t, "p", RFR_ROLE_INPUT, RFR_I32, 1, shape);
  rfr_output(t, "y", rfr_rope_table(t, x, p, list, 2, 1.0));
  list[1] = 7.0; /* the trace has a copy */
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  return t;
}

/* Lists are compared by their numbers, and printed with all digits. */
static void test_lists(void **state) {
  (void)state;
  rfr_trace *a = rotated(0.1), *b = rotated(0.1), *c = rotated(0.10000000000000002), *back;
  rft_text text = {0};
  assert_true(rfr_trace_equal(a, b));
  assert_false(rfr_trace_equal(a, c));
  assert_int_equal(rfr_trace_diff(a, b, rft_text_add, &text), RFR_OK);
  assert_int_equal(text.n, 0);
  rft_trace_print(c, 1, &text);
  assert_int_equal(rfr_trace_parse(ctx, "c", text.data, text.n, &back), RFR_OK);
  assert_true(rfr_trace_equal(c, back));
  free(text.data);
  rfr_trace *const all[] = {a, b, c, back};
  for (int i = 0; i < 4; i++) rfr_trace_destroy(all[i]);
}

/* A change of any field that the text shows makes two traces unequal. */
static void test_unequal(void **state) {
  (void)state;
  rfr_trace *a = rft_trace_sample(), *b = rft_trace_sample();
  rfi_opr *op = &b->ops[b->n_ops - 1];
  rfi_value *x = &b->values[b->inputs[0]];
  assert_true(rfr_trace_equal(a, b));
#define CHANGED(field, value)            \
  do {                                   \
    const __typeof__(field) old = field; \
    field = (value);                     \
    assert_false(rfr_trace_equal(a, b)); \
    field = old;                         \
    assert_true(rfr_trace_equal(a, b));  \
  } while (0)
  CHANGED(op->phase, RFR_PHASE_LOAD);
  CHANGED(op->policy, RFR_POLICY_KEEP);
  CHANGED(op->microbatch, 3);
  CHANGED(op->token_in, 7);
  CHANGED(op->clone_of, 1);
  CHANGED(op->scope, "elsewhere");
  CHANGED(op->at.line, 1);
  CHANGED(op->in[0], 0);
  CHANGED(x->type.dtype, RFR_I64);
  CHANGED(x->name, "other");
  CHANGED(x->role, RFR_ROLE_CONST);
  CHANGED(b->outputs[0].name, "other");
#undef CHANGED
  assert_false(rfr_trace_equal(a, NULL));
  rfr_trace_destroy(a);
  rfr_trace_destroy(b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_diff),
      rft_context_test(test_lists),
      rft_context_test(test_unequal),
  };
  return cmocka_run_group_tests_name("compare", tests, NULL, NULL);
}
