/* SPDX-License-Identifier: Apache-2.0
 *
 * Prune: which ops merge, which are removed, and which are hoisted to which phase.
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

static rfr_trace *prune(rfr_trace *t, rfi_pass_options o) {
  rfr_trace *out;
  report = (rfi_report){.text = {.ctx = ctx}};
  o.prune = true;
  OK(rfr_trace_finish(t));
  OK(rfi_pass_prune(t, &o, &report, &out));
  rfr_trace_destroy(t);
  return out;
}

static void done(rfr_trace *t) {
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
}

static rfr_value vector(rfr_trace *t, const char *name, rfr_role role) {
  return rfr_input(t, name, role, RFR_F32, 1, ((int64_t[]){7}));
}

/* Equal pure ops merge; ops with other attributes or another operand order do not. */
static void test_merge(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = vector(t, "x", RFR_ROLE_INPUT), y = vector(t, "y", RFR_ROLE_INPUT);
  rfr_output(t, "a", rfr_mul(t, rfr_add(t, x, y), rfr_add(t, x, y)));
  rfr_output(t, "b", rfr_add(t, y, x));
  rfr_output(t, "c", rfr_scale(t, x, 2, RFR_NONE));
  rfr_output(t, "d", rfr_scale(t, x, 3, RFR_NONE));
  t = prune(t, (rfi_pass_options){0});
  assert_int_equal(rft_count_ops(t, RFI_OP_add, -1), 2);
  assert_int_equal(rft_count_ops(t, RFI_OP_scale, -1), 2);
  assert_non_null(strstr(report.text.data, "merged: op 1 add equals an earlier one"));
  done(t);
}

/* Random ops of one site merge within a microbatch, not across microbatches. */
static void test_random(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = vector(t, "x", RFR_ROLE_INPUT), step = rfr_step_block(t);
  const rfi_opr *op;
  for (int m = 0; m < 2; m++) {
    rfr_microbatch(t, m);
    rfr_output(t, m ? "b" : "a", rfr_dropout(t, x, step, 0.5, 0));
  }
  op = &t->ops[t->n_ops - 1]; /* has the same site as the first */
  memcpy((rfi_attr *)op->attr, t->ops[0].attr, sizeof *op->attr * (size_t)op->def->n_attrs);
  t = prune(t, (rfi_pass_options){0});
  assert_int_equal(rft_count_ops(t, RFI_OP_dropout, -1), 2);
  done(t);
}

/* Ops without a reader are removed, and so are results; updates of a state are kept. */
static void test_dead(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){3, 8}));
  rfr_value scale = rfr_input(t, "scale", RFR_ROLE_FROZEN, RFR_F32, 1, ((int64_t[]){8}));
  rfr_mul(t, x, x);
  rfr_output(t, "y", rfr_rmsnorm(t, x, scale, 1e-5));
  rfr_step_end(t, rfr_step_block(t), rfr_fill(t, 0, RFR_I32, 1, ((int64_t[]){1})));
  t = prune(t, (rfi_pass_options){0});
  assert_int_equal(rft_count_ops(t, RFI_OP_mul, -1), 0);
  assert_int_equal(rft_count_ops(t, RFI_OP_step_end, -1), 1);
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].def->code == RFI_OP_rmsnorm) assert_int_equal(t->ops[i].out[1], RFR_NONE);
  assert_non_null(strstr(report.text.data, "no reader"));
  done(t);
}

/* Ops on frozen inputs are hoisted to load. Ops on weights are hoisted to setup if several microbatches share them or
 * phases are split. Ops on shards are not hoisted. */
static void test_hoist(void **state) {
  (void)state;
  static const struct {
    rfr_role role;
    int microbatches;
    bool split, sharded;
    rfr_phase phase;
  } cases[] = {
      {RFR_ROLE_FROZEN, 1, false, false, RFR_PHASE_LOAD},       {RFR_ROLE_CONST, 1, false, false, RFR_PHASE_LOAD},
      {RFR_ROLE_TRAINABLE, 1, false, false, RFR_PHASE_FORWARD}, {RFR_ROLE_TRAINABLE, 2, false, false, RFR_PHASE_SETUP},
      {RFR_ROLE_TRAINABLE, 1, true, false, RFR_PHASE_SETUP},    {RFR_ROLE_TRAINABLE, 1, true, true, RFR_PHASE_FORWARD},
      {RFR_ROLE_FROZEN, 1, true, true, RFR_PHASE_FORWARD},      {RFR_ROLE_STATE, 2, false, false, RFR_PHASE_FORWARD},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value w = vector(t, "w", cases[i].role), x = vector(t, "x", RFR_ROLE_INPUT);
    for (int m = 0; m < cases[i].microbatches; m++) {
      rfr_microbatch(t, m);
      rfr_output(t, m ? "b" : "a", rfr_mul(t, x, rfr_scale(t, w, 2, RFR_NONE)));
    }
    t = prune(t, (rfi_pass_options){.split_phases = cases[i].split, .sharded = cases[i].sharded});
    if (rft_count_ops(t, RFI_OP_scale, (int)cases[i].phase) != 1) fail_msg("case %zu", i);
    assert_int_equal(rft_count_ops(t, RFI_OP_scale, -1), 1);
    done(t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_merge),
      rft_context_test(test_random),
      rft_context_test(test_dead),
      rft_context_test(test_hoist),
  };
  return cmocka_run_group_tests_name("prune", tests, NULL, NULL);
}
