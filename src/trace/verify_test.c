/* SPDX-License-Identifier: Apache-2.0
 *
 * The rules of a trace, each broken once.
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
static void test_stale_version(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value step = rfr_step_block(t);
  rfr_value skip = rfr_fill(t, 0, RFR_I32, 1, ((int64_t[]){1}));
  rfr_step_end(t, step, skip);
  rfr_lr_options lr = rfr_lr_options_default();
  rfr_lr_schedule(t, step, &lr); /* the old step, after its next version was made */
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "trace.stale_version");
  rfr_trace_destroy(t);
}

/* Each rule is broken by changing one field of a valid trace. */
static void test_rules(void **state) {
  (void)state;
  rfr_trace *t = rft_trace_sample();
  int mul = -1;
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].def->code == RFI_OP_matmul && mul < 0) mul = i;
  rfi_opr *op = &t->ops[mul];
  rfi_value *y = &t->values[op->out[0]];
#define BROKEN(field, value, text)                               \
  do {                                                           \
    const __typeof__(field) old = field;                         \
    field = (value);                                             \
    assert_int_equal(rfr_trace_verify(t), RFR_INTERNAL);         \
    assert_string_equal(rfr_last_error()->slug, "trace.verify"); \
    assert_non_null(strstr(rfr_last_error()->message, text));    \
    field = old;                                                 \
    OK(rfr_trace_verify(t));                                     \
  } while (0)
  BROKEN(op->in[0], op->out[0], "later");
  BROKEN(y->op, mul + 1, "producer");
  BROKEN(y->type.shape[0], y->type.shape[0] + 1, "type");
  BROKEN(y->stride[0], y->stride[0] + 1, "storage");
  BROKEN(op->token_in, 0, "token");
  BROKEN(op->clone_of, mul, "clone_of");
  BROKEN(t->values[t->inputs[0]].role, RFR_ROLE_NONE, "role");
#undef BROKEN
  rfr_trace_destroy(t);
}

static rfr_status load_of(rfr_role role) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", role, RFR_F32, 1, ((int64_t[]){3}));
  rfr_set_phase(t, RFR_PHASE_LOAD);
  rfr_output(t, "y", rfr_add(t, x, x));
  const rfr_status s = rfr_trace_finish(t);
  rfr_trace_destroy(t);
  return s;
}

/* Phase load may read only inputs that never change. */
static void test_load(void **state) {
  (void)state;
  OK(load_of(RFR_ROLE_FROZEN));
  OK(load_of(RFR_ROLE_CONST));
  assert_int_equal(load_of(RFR_ROLE_TRAINABLE), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "trace.state");
}

/* All values of a trace together have at most 2^56 bytes. */
static void test_bytes(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){(int64_t)1 << 53}));
  OK(rfr_trace_finish(t));
  rfr_input(t, "b", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){(int64_t)1 << 54}));
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "overflow");
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_stale_version),
      rft_context_test(test_rules),
      rft_context_test(test_load),
      rft_context_test(test_bytes),
  };
  return cmocka_run_group_tests_name("verify", tests, NULL, NULL);
}
