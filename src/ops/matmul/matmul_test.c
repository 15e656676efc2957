/* SPDX-License-Identifier: Apache-2.0
 *
 * Recording of matmul: shapes of all transposes and their gradients, type and phase of weight gradients and activation
 * gradients, and refusals that name the mismatch and the source line. The op matrix tests values.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "refrain/ops.h"
#include "trace/trace.h"

static rfr_value input(rfr_trace *t, const char *name, rfr_dtype dtype, int rank, int64_t batch, int64_t rows,
                       int64_t cols) {
  const int64_t shape[3] = {batch, rows, cols};
  return rfr_input(t, name, RFR_ROLE_INPUT, dtype, rank, shape + 3 - rank);
}

static void expect(const rfr_trace *t, rfr_value v, rfr_dtype dtype, rfr_value like, rfr_phase phase) {
  rfr_type a = rfr_value_type(t, v), b = rfr_value_type(t, like);
  assert_int_equal(a.dtype, dtype);
  assert_int_equal(a.rank, b.rank);
  assert_memory_equal(a.shape, b.shape, sizeof a.shape);
  assert_int_equal(t->ops[t->values[v].op].phase, phase);
}

/* a (batch 2) 3 x 5 and b 5 x 7 with all four transposes, with and without a batch. */
static void gradients(void **state) {
  (void)state;
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (int k = 0; k < 8; k++) {
    int ta = k & 1, tb = k >> 1 & 1, rank = 2 + (k >> 2);
    rfr_trace *t;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value a = input(t, "a", RFR_BF16, rank, 2, ta ? 5 : 3, ta ? 3 : 5);
    rfr_value b = input(t, "b", RFR_BF16, rank, 2, tb ? 7 : 5, tb ? 5 : 7);
    rfr_value bias = input(t, "bias", RFR_BF16, 1, 1, 1, 7), want = input(t, "y", RFR_F32, rank, 2, 3, 7);
    rfr_value y = rfr_matmul(t, a, b, bias, ta, tb, RFR_F32);
    expect(t, y, RFR_F32, want, RFR_PHASE_FORWARD);
    rfi_opr op = t->ops[t->n_ops - 1]; /* a copy, because recording moves the array */
    const bool need[4] = {true, true, true, false}, is_weight[4] = {false, true, true, false};
    rfr_value dx[4] = {RFR_NONE, RFR_NONE, RFR_NONE, RFR_NONE};
    rfi_grad g = {.t = t, .op = &op, .need = need, .dy = &want, .dx = dx, .is_weight = is_weight, .at = RFR_HERE};
    rfr_set_phase(t, RFR_PHASE_DGRAD);
    assert_int_equal(op.def->grad(&g), RFR_OK);
    expect(t, dx[0], RFR_BF16, a, RFR_PHASE_DGRAD);
    expect(t, dx[1], RFR_F32, b, RFR_PHASE_WGRAD);
    expect(t, dx[2], RFR_F32, bias, RFR_PHASE_WGRAD);

    int before = t->n_ops; /* unused gradients are not recorded */
    const bool none[4] = {false, false, false, false};
    g.need = none;
    assert_int_equal(op.def->grad(&g), RFR_OK);
    assert_int_equal(t->n_ops, before);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

static void refusals(void **state) {
  (void)state;
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  static const char *const texts[] = {"inner dimensions differ", "batches differ",         "rank 2 or 3", "bias must",
                                      "f32, bf16 or f16",        "inner dimensions differ"};
  for (int k = 0; k < 6; k++) {
    rfr_trace *t;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value a = input(t, "a", k == 4 ? RFR_I32 : RFR_F32, k == 1 ? 3 : 2, 2, 3, 5);
    rfr_value b = input(t, "b", RFR_F32, k == 1 || k == 2 ? 3 : 2, 4, k == 0 ? 6 : k == 5 ? 4 : 5, 7);
    rfr_value bias = input(t, "bias", RFR_F32, 1, 1, 1, k == 3 ? 5 : 7);
    assert_int_equal(rfr_matmul(t, a, b, bias, 0, 0, RFR_F32), RFR_NONE);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    assert_non_null(strstr(rfr_last_error()->message, texts[k]));
    assert_non_null(strstr(rfr_last_error()->message, "matmul_test.c"));
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(gradients), cmocka_unit_test(refusals)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
