/* SPDX-License-Identifier: Apache-2.0
 *
 * Autodiff: which ops the backward has, in which order, and which losses are refused. The values of gradients are
 * compared with finite differences per op (ops_test) and bitwise per mask (frozen_test).
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

enum { M = 6, K = 5, N = 4 };

static rfr_value weight(rfr_trace *t, const char *name, int64_t rows, int64_t columns) {
  return rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){rows, columns}));
}
static rfr_value input(rfr_trace *t, const char *name, int64_t rows, int64_t columns) {
  return rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){rows, columns}));
}

static rfr_trace *differentiate(const rfr_trace *t) {
  rfi_report report = {.text = {.ctx = ctx}};
  const rfi_pass_options o = {.prune = true};
  rfr_trace *out;
  OK(rfi_pass_autodiff(t, &o, &report, &out));
  rfi_string_deinit(&report.text);
  return out;
}

static void expect_refused(rfr_trace *t, const char *slug, const char *text) {
  rfi_report report = {.text = {.ctx = ctx}};
  const rfi_pass_options o = {.prune = true};
  rfr_trace *out;
  OK(rfr_trace_status(t));
  if (rfi_pass_autodiff(t, &o, &report, &out) != RFR_INVALID) fail_msg("accepted: %s", text);
  assert_null(out);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, text)) fail_msg("no \"%s\" in: %s", text, rfr_last_error()->message);
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
}

static rfr_trace *linears(rfr_trace **t, rfr_dtype to) {
  OK(rfr_trace_create(ctx, t));
  rfr_value w0 = weight(*t, "w0", K, K), w1 = weight(*t, "w1", N, K);
  rfr_value h = rfr_linear(*t, rfr_linear(*t, input(*t, "x", M, K), w0, RFR_NONE), w1, RFR_NONE);
  rfr_output(*t, "g", rfr_gradient(*t, rfr_sum(*t, h, -1), w0, to));
  return differentiate(*t);
}

/* Only the requested gradient is computed: w1 is trainable, but has no wgrad. */
static void test_requested(void **state) {
  (void)state;
  rfr_trace *t, *d = linears(&t, RFR_F32);
  assert_int_equal(rft_count_ops(d, RFI_OP_matmul, RFR_PHASE_FORWARD), 2);
  assert_int_equal(rft_count_ops(d, RFI_OP_matmul, RFR_PHASE_DGRAD), 1);
  assert_int_equal(rft_count_ops(d, RFI_OP_matmul, RFR_PHASE_WGRAD), 1);
  assert_int_equal(rft_count_ops(d, RFI_OP_gradient, RFR_PHASE_FORWARD), 0);
  assert_string_equal(rfr_value_name(d, d->outputs[0].value), "d_w0");
  rfr_trace_destroy(t);
  rfr_trace_destroy(d);
}

/* A gradient requested in bf16 is computed and summed in bf16. */
static void test_type(void **state) {
  (void)state;
  for (int narrow = 0; narrow < 2; narrow++) {
    rfr_trace *t, *d = linears(&t, narrow ? RFR_BF16 : RFR_F32);
    const rfi_value *g = &d->values[d->outputs[0].value];
    assert_int_equal(g->type.dtype, narrow ? RFR_BF16 : RFR_F32);
    assert_int_equal(d->ops[g->op].def->code, RFI_OP_matmul);
    rfr_trace_destroy(t);
    rfr_trace_destroy(d);
  }
}

/* The backward of a microbatch precedes the forward of the next, and weight gradients add up in ascending order. */
static void test_microbatches(void **state) {
  (void)state;
  enum { MICROBATCHES = 3 };
  rfr_trace *t;
  rfr_value loss = RFR_NONE;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = input(t, "x", M, K), w = weight(t, "w", N, K);
  for (int m = 0; m < MICROBATCHES; m++) {
    rfr_microbatch(t, m);
    rfr_value y = rfr_linear(t, rfr_slice(t, x, 0, 2 * m, 2), w, RFR_NONE), part = rfr_sum(t, rfr_mul(t, y, y), -1);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  rfr_trace *d = differentiate(t);
  int current = 0, sums = 0;
  for (int i = 0; i < d->n_ops; i++) {
    const rfi_opr *op = &d->ops[i];
    if (op->microbatch < 0) continue;
    assert_true(op->microbatch >= current);
    current = op->microbatch;
    if (op->phase != RFR_PHASE_WGRAD || op->def->code != RFI_OP_add) continue;
    sums++; /* sum of the earlier microbatches + this one */
    assert_true(d->ops[d->values[op->in[0]].op].microbatch < op->microbatch);
    assert_int_equal(d->ops[d->values[op->in[1]].op].microbatch, op->microbatch);
  }
  assert_int_equal(sums, MICROBATCHES - 1);
  rfr_trace_destroy(t);
  rfr_trace_destroy(d);
}

static void test_refused(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = weight(t, "x", M, K), w = weight(t, "w", N, K), y = rfr_linear(t, x, w, RFR_NONE);
  rfr_output(t, "g", rfr_gradient(t, rfr_sum(t, y, -1), x, RFR_F32));
  t->values[x].role = RFR_ROLE_INPUT; /* recording refuses it, but a parsed trace may contain it */
  expect_refused(t, "autodiff.role", "\"x\"");

  OK(rfr_trace_create(ctx, &t));
  x = input(t, "x", M, K), w = weight(t, "w", N, K), y = rfr_linear(t, x, weight(t, "v", N, K), RFR_NONE);
  rfr_output(t, "g", rfr_gradient(t, rfr_sum(t, y, -1), w, RFR_F32));
  expect_refused(t, "autodiff.unreached", "no gradient path leads to the loss from \"w\"");

  OK(rfr_trace_create(ctx, &t));
  x = input(t, "x", M, K), w = weight(t, "w", N, K), y = rfr_linear(t, x, w, RFR_NONE);
  rfr_output(t, "g", rfr_gradient(t, rfr_sum(t, y, -1), w, RFR_F32));
  rfr_output(t, "h", rfr_gradient(t, rfr_sum(t, rfr_mul(t, y, y), -1), w, RFR_F32));
  expect_refused(t, "autodiff.coupled", "one loss");

  OK(rfr_trace_create(ctx, &t));
  x = input(t, "x", M, K), w = weight(t, "w", N, K);
  rfr_microbatch(t, 0);
  y = rfr_linear(t, x, w, RFR_NONE);
  rfr_value first = rfr_sum(t, y, -1);
  rfr_microbatch(t, 1);
  rfr_value second = rfr_sum(t, rfr_mul(t, y, y), -1);
  rfr_microbatch(t, -1);
  rfr_output(t, "g", rfr_gradient(t, rfr_add(t, first, second), w, RFR_F32));
  expect_refused(t, "autodiff.coupled", "another microbatch");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_requested),
      rft_context_test(test_type),
      rft_context_test(test_microbatches),
      rft_context_test(test_refused),
  };
  return cmocka_run_group_tests_name("autodiff", tests, NULL, NULL);
}
