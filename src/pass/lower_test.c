/* SPDX-License-Identifier: Apache-2.0
 *
 * Lower: copies where a kernel needs a dense operand, dense outputs, and add + norm.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "pass/pass.h"
#include "refrain/ops.h"
#include "support/context.h"
#include "support/rewrite.h"

static rfi_report report;

static rfr_trace *lower(rfr_trace *t, bool fuse) {
  const rfi_pass_options o = {.fuse = fuse, .prune = true};
  rfr_trace *out;
  report = (rfi_report){.text = {.ctx = ctx}};
  OK(rfr_trace_finish(t));
  OK(rfi_pass_lower(t, &o, &report, &out));
  rfr_trace_destroy(t);
  return out;
}

static void done(rfr_trace *t) {
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
}

static rfr_value matrix(rfr_trace *t, const char *name) {
  return rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){6, 8}));
}

/* Two readers of one strided view share a copy; an op that accepts strides reads the view. */
static void test_copies(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = matrix(t, "x"), view = rfr_slice(t, x, 1, 2, 4);
  rfr_output(t, "a", rfr_grad_norm(t, 1, &view, NULL));
  rfr_output(t, "b", rfr_grad_norm(t, 1, (rfr_value[]){view}, NULL));
  rfr_output(t, "c", rfr_add(t, view, view));
  t = lower(t, true);
  assert_int_equal(rft_count_ops(t, RFI_OP_copy, -1), 1);
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].def->code == RFI_OP_add) assert_int_equal(t->values[t->ops[i].in[0]].base, t->inputs[0]);
  assert_non_null(strstr(report.text.data, "needs it dense: +96 bytes"));
  done(t);
}

/* A strided output is copied once, after all other ops; a dense one is not copied. */
static void test_outputs(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value y = rfr_scale(t, matrix(t, "x"), 2, RFR_NONE);
  rfr_output(t, "a", rfr_slice(t, y, 1, 2, 4));
  rfr_output(t, "b", t->outputs[0].value);
  rfr_output(t, "c", y);
  t = lower(t, true);
  assert_int_equal(rft_count_ops(t, RFI_OP_copy, -1), 1);
  assert_int_equal(t->ops[t->n_ops - 1].def->code, RFI_OP_copy);
  for (int i = 0; i < t->n_outputs; i++) assert_true(rfi_is_dense(&t->values[t->outputs[i].value]));
  assert_int_equal(t->outputs[0].value, t->outputs[1].value);
  done(t);
}

/* An add and the norm after it become one op if the sum has another reader and fusion is enabled. */
static void test_add_norm(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    const bool fuse = i & 1, shared = i & 2;
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = matrix(t, "x"), y = matrix(t, "y");
    rfr_value scale = rfr_input(t, "scale", RFR_ROLE_FROZEN, RFR_F32, 1, ((int64_t[]){8}));
    rfr_value sum = rfr_add(t, x, y);
    rfr_output(t, "n", rfr_rmsnorm(t, sum, scale, 1e-5));
    if (shared) rfr_output(t, "s", sum);
    t = lower(t, fuse);
    assert_int_equal(rft_count_ops(t, RFI_OP_add_rmsnorm, -1), fuse && shared);
    assert_int_equal(rft_count_ops(t, RFI_OP_add, -1), !(fuse && shared));
    if (fuse && shared) assert_string_equal(t->ops[0].reason, "fused: add + rmsnorm");
    done(t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_copies),
      rft_context_test(test_outputs),
      rft_context_test(test_add_norm),
  };
  return cmocka_run_group_tests_name("lower", tests, NULL, NULL);
}
