/* SPDX-License-Identifier: Apache-2.0
 *
 * Shard: inputs become shards of padded length, gathers precede their readers, gradients are scattered at the end.
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

static const rfr_value *input_of(const rfr_trace *t, const char *name) {
  const int i = rfi_names_find(&t->input_names, name);
  return i < 0 ? NULL : &t->inputs[i];
}

static int64_t elements(const rfr_trace *t, const char *name) {
  const rfr_value *v = input_of(t, name);
  return v ? rfi_count(&t->values[*v].type) : -1;
}

static void test_shards(void **state) {
  (void)state;
  enum { RANKS = 3, ROWS = 5, COLUMNS = 7, SHARD = 12 /* 35 elements over 3 ranks, rounded up */ };
  const rfi_shard o = {RANKS, "grad.", "full."};
  rfi_report report = {.text = {.ctx = ctx}};
  const rfi_pass_options none = {0};
  rfr_trace *t, *joint, *sharded;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){4, COLUMNS}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){ROWS, COLUMNS}));
  rfr_value f = rfr_input(t, "f", RFR_ROLE_FROZEN, RFR_F32, 1, ((int64_t[]){ROWS}));
  rfr_value g = rfr_input(t, "grad.w", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){ROWS, COLUMNS}));
  rfr_value loss = rfr_sum(t, rfr_linear(t, x, w, f), -1);
  rfr_output(t, "grad.w", rfr_gradient_onto(t, loss, w, g));
  OK(rfr_trace_finish(t));
  OK(rfi_pass_autodiff(t, &none, &report, &joint));
  OK(rfi_shard_callable(joint, &o, &sharded));
  assert_int_equal(elements(sharded, "w"), SHARD);
  assert_int_equal(elements(sharded, "f"), 2);
  assert_int_equal(elements(sharded, "grad.w"), SHARD);
  assert_int_equal(elements(sharded, "full.grad.w"), ROWS * COLUMNS);
  assert_int_equal(elements(sharded, "x"), 4 * COLUMNS);
  int gathers = 0, scatters = 0;
  for (int i = 0; i < sharded->n_ops; i++) {
    const rfi_opr *op = &sharded->ops[i];
    if (op->def->code == RFI_OP_matmul) assert_int_equal(gathers, 2);
    gathers += op->def->code == RFI_OP_all_gather && op->phase == RFR_PHASE_SETUP;
    scatters += op->def->code == RFI_OP_reduce_scatter && op->phase == RFR_PHASE_OPTIM;
  }
  assert_int_equal(gathers, 2);
  assert_int_equal(scatters, 1);
  const rfr_value out = sharded->outputs[0].value;
  assert_int_equal(sharded->values[out].base, *input_of(sharded, "grad.w")); /* accumulated into the shard */
  assert_int_equal(sharded->ops[sharded->n_ops - 1].def->code, RFI_OP_accumulate);
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
  rfr_trace_destroy(joint);
  rfr_trace_destroy(sharded);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_shards)};
  return cmocka_run_group_tests_name("shard_callable", tests, NULL, NULL);
}
