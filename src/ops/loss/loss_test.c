/* SPDX-License-Identifier: Apache-2.0
 *
 * Losses beyond the op matrix: extreme logits, no valid target at all, results that depend neither on threads nor, for
 * the loss, on the chunk; and the fused head against the separate ops.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "ops/loss/head.h"
#include "support/op_check.h"

static void start(const char *text, rfr_dtype type, rft_case *c, rft_run *run) {
  const char *wrong = rft_case_parse(text, type, c);
  if (wrong) fail_msg("%s: %s", text, wrong);
  rft_run_init(run, c, RFT_DENSE, 0xFF, 0);
}
static void finish(rft_run *run, int threads) {
  const char *isas[3];
  rft_isas(isas);
  const char *wrong = rft_run_kernel(run, rfi_cpu_kernel(isas[0], run->c->def->code), threads);
  if (wrong) fail_msg("%s: %s", run->c->text, wrong);
}

static void test_extremes(void **state) {
  rft_case c;
  rft_run run;
  (void)state;
  start("cross_entropy(f[5,1031]=0, i[5]=7,1030,3,0,5, F[1]=1) ignore=-100", RFR_F32, &c, &run);
  for (int64_t v = 0; v < 1031; v++) {
    rft_set(&run.in_arg[0], v, v == 7 ? 3e38 : -3e38);                  /* the target has almost all probability */
    rft_set(&run.in_arg[0], 1031 + v, 1e4);                             /* equal logits, far from 0 */
    rft_set(&run.in_arg[0], 2 * 1031 + v, v < 4 ? 0 : -INFINITY);       /* most are -inf */
    rft_set(&run.in_arg[0], 3 * 1031 + v, -1e4 + (v == 1030 ? 50 : 0)); /* the maximum comes last */
  }
  finish(&run, 2);
  const float *lse = (const float *)run.out[1].data;
  assert_true(lse[0] == 3e38f);
  assert_float_equal(lse[1], 1e4 + log(1031), 1e-2);
  assert_float_equal(lse[2], log(4), 1e-6);
  assert_float_equal(lse[3], -9950, 1e-3);
  double want = 0 + log(1031) + log(4) + 50 + log(1031);
  assert_float_equal(rft_get(&run.out_arg[0], 0), want, 1e-4 * want);
  rft_run_deinit(&run);
}

static void test_nan_is_not_hidden(void **state) {
  rft_case c;
  rft_run run;
  (void)state;
  start("cross_entropy(f[3,517], i[3]=1,2,3, F[1]=1) ignore=-100", RFR_BF16, &c, &run);
  rft_set(&run.in_arg[0], 2 * 517 + 515, NAN);
  finish(&run, 1);
  assert_true(isnan(rft_get(&run.out_arg[0], 0)));
  assert_true(isfinite(rft_get(&run.out_arg[1], 1)));
  rft_run_deinit(&run);
}

static void test_none_valid(void **state) {
  rft_case c;
  rft_run run;
  (void)state;
  start("token_count(i[7]=-100, i[3]=-100) ignore=-100", RFR_F32, &c, &run);
  finish(&run, 1);
  assert_true(rft_get(&run.out_arg[0], 0) == 0 && rft_get(&run.out_arg[1], 0) == 0);
  rft_run_deinit(&run);
  start("linear_cross_entropy(f[9,6], f[5,6], i[9]=-100, F[1]=0, F[1]=1, _) ignore=-100 chunk=4 cap=0 to=f32", RFR_BF16,
        &c, &run);
  finish(&run, 1);
  assert_true(rft_get(&run.out_arg[0], 0) == 0);
  for (int64_t i = 0; i < 30; i++) assert_true(rft_get(&run.out_arg[2], i) == 0);
  rft_run_deinit(&run);
}

/* Runs the case and copies result j. */
static void *result_of(const char *text, rfr_dtype type, int threads, int j, size_t *bytes) {
  rft_case c;
  rft_run run;
  start(text, type, &c, &run);
  finish(&run, threads);
  *bytes = (size_t)rfi_bytes(&run.out_arg[j].type);
  void *copy = malloc(*bytes + 1);
  assert_non_null(copy);
  memcpy(copy, run.out_arg[j].data, *bytes);
  rft_run_deinit(&run);
  return copy;
}

static void test_threads(void **state) {
  static const char *const texts[] = {
      "cross_entropy(f[67,1031], i[67]<1031, F[1]=0.015) ignore=-100",
      "linear_cross_entropy(f[131,40], f[259,40], i[131]<259, F[1]=0.0156, F[1]=1, F[259,40]) ignore=-100 chunk=50 "
      "cap=0 to=f32"};
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int j = 0; j < 2 + k; j++)
      for (int type = 0; type < 2; type++) {
        size_t n;
        void *one = result_of(texts[k], type ? RFR_BF16 : RFR_F32, 1, j, &n);
        for (int threads = 2; threads < 5; threads++) {
          void *more = result_of(texts[k], type ? RFR_BF16 : RFR_F32, threads, j, &n);
          assert_memory_equal(one, more, n);
          free(more);
        }
        free(one);
      }
}

/* The chunk size affects only memory: loss and dx are computed row by row and do not depend on it. */
static void test_chunks(void **state) {
  rft_case c;
  rft_run full;
  (void)state;
  start("linear_cross_entropy(f[71,24], f[101,24], i[71]<101, F[1]=0.0156, F[1]=1, _) ignore=-100 chunk=71 cap=0 "
        "to=f32",
        RFR_BF16, &c, &full);
  finish(&full, 2);
  for (int chunk = 1; chunk < 90; chunk += 22) {
    rft_case other = c;
    rft_run run;
    other.attr[1] = rfi_i(chunk);
    rft_run_init(&run, &other, RFT_DENSE, 0xFF, 0);
    finish(&run, 2);
    for (int j = 0; j < 2; j++)
      assert_memory_equal(full.out[j].data, run.out[j].data, (size_t)rfi_bytes(&run.out_arg[j].type));
    rft_run_deinit(&run);
  }
  rft_run_deinit(&full);
}

/* ---- recording ---- */

static void test_inv_valid_has_no_gradient(void **state) {
  rfr_ctx *ctx;
  rfr_trace *t;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){3, 5});
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){3});
  rfr_value inv = rfr_input(t, "inv", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, (int64_t[]){1});
  rfi_record(t, RFR_HERE, RFI_OP_cross_entropy, 3, (rfr_value[]){logits, targets, inv}, (rfi_attr[]){rfi_i(0)}, NULL);
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  rfr_value dy[2] = {t->ops[0].out[0], RFR_NONE}, dx[3] = {RFR_NONE, RFR_NONE, RFR_NONE};
  bool need[3] = {false, false, true}, weight[3] = {false};
  rfi_grad g = {.t = t, .op = &t->ops[0], .need = need, .dy = dy, .dx = dx, .is_weight = weight};
  assert_int_equal(t->ops[0].def->grad(&g), RFR_UNSUPPORTED);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
}

static void test_refused(void **state) {
  static const struct {
    rfr_dtype logits, targets;
    int64_t rows;
  } wrong[] = {{RFR_I32, RFR_I32, 3}, {RFR_F32, RFR_I64, 3}, {RFR_F32, RFR_I32, 4}, {RFR_E4M3, RFR_I32, 3}};
  rfr_ctx *ctx;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    rfr_trace *t;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT, wrong[i].logits, 2, (int64_t[]){3, 5});
    rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, wrong[i].targets, 1, (int64_t[]){wrong[i].rows});
    rfr_value inv = rfr_input(t, "inv", RFR_ROLE_INPUT, RFR_F32, 1, (int64_t[]){1});
    assert_int_equal(rfr_cross_entropy(t, logits, targets, inv, -100), RFR_NONE);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* On a GPU, dx of a chunk must have as many full waves of tiles as possible. */
static void test_rows_at_once(void **state) {
  static const struct {
    int64_t T, C, rows;
  } rows[] = {{65536, 768, 5632}, {16384, 2048, 4096}, {8192, 4096, 4096}, {100, 768, 4096}, {0, 768, 4096}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    assert_int_equal(rfi_head_rows_at_once(rows[i].T, rows[i].C), rows[i].rows);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_extremes),   cmocka_unit_test(test_nan_is_not_hidden),
      cmocka_unit_test(test_none_valid), cmocka_unit_test(test_threads),
      cmocka_unit_test(test_chunks),     cmocka_unit_test(test_inv_valid_has_no_gradient),
      cmocka_unit_test(test_refused),    cmocka_unit_test(test_rows_at_once)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
