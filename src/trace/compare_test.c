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
      rft_context_test(test_unequal),
  };
  return cmocka_run_group_tests_name("compare", tests, NULL, NULL);
}
