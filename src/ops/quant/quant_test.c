/* SPDX-License-Identifier: Apache-2.0
 *
 * E4M3 on every instruction set, bit for bit: all 16-bit inputs, every tie and its neighbours to E4M3, and every E4M3
 * number back. Gradients against the formula; an op without a gradient is refused.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "pass/pass.h"
#include "refrain/program.h"
#include "support/op_check.h"

static rfi_arg arg2(void *data, rfr_dtype dtype, int64_t m, int64_t n) {
  return (rfi_arg){data, {.dtype = dtype, .rank = 2, .shape = {m, n}}, {n, 1}};
}

/* An infinity among the values makes the scale 1. */
static void encode(rfr_dtype dtype, void *x, int64_t m, int64_t n, const float *value) {
  static uint8_t row[1 << 16], col[1 << 16];
  uint32_t partial[4];
  float scale_inv;
  const char *isas[3];
  int count = rft_isas(isas);
  for (int k = 0; k < count; k++) {
    rfi_arg in = arg2(x, dtype, m, n);
    rfi_arg out[3] = {arg2(row, RFR_E4M3, m, n), arg2(col, RFR_E4M3, n, m), arg2(&scale_inv, RFR_F32, 1, 1)};
    rfi_call call = {.n_in = 1, .n_out = 3, .in = &in, .out = out, .workspace = partial, .threads = 2};
    assert_int_equal(rfi_cpu_kernel(isas[k], RFI_OP_quantize)->run(&call), RFR_OK);
    assert_true(scale_inv == 1);
    for (int64_t i = 0; i < m * n; i++) {
      uint8_t want = (uint8_t)rfr_float_to_bits(RFR_E4M3, value[i]);
      if (row[i] != want || col[i % n * m + i / n] != want)
        fail_msg("%s: %.9g is %02x, in the transposed copy %02x, want %02x", isas[k], value[i], row[i],
                 col[i % n * m + i / n], want);
    }
  }
}

static void test_encode(void **state) {
  static uint16_t half[1 << 16];
  static float value[1 << 16];
  (void)state;
  for (int i = 0; i < 1 << 16; i++) half[i] = (uint16_t)i, value[i] = rfr_float_from_bits(RFR_BF16, half[i]);
  encode(RFR_BF16, half, 64, 1024, value);
  for (int i = 0; i < 1 << 16; i++) value[i] = rfr_float_from_bits(RFR_F16, half[i]);
  encode(RFR_F16, half, 128, 512, value);
  int n = 0;
  for (uint32_t q = 0; q < 0x7E; q++) {
    float tie = (rfr_float_from_bits(RFR_E4M3, q) + rfr_float_from_bits(RFR_E4M3, q + 1)) / 2;
    for (int sign = -1; sign <= 1; sign += 2) {
      value[n++] = (float)sign * tie;
      value[n++] = (float)sign * nextafterf(tie, 1e9f);
      value[n++] = (float)sign * nextafterf(tie, 0);
    }
  }
  value[n++] = INFINITY;
  encode(RFR_F32, value, 1, n, value);
}

static void test_decode(void **state) {
  static float scratch[1 << 18];
  uint8_t a[256], one = (uint8_t)rfr_float_to_bits(RFR_E4M3, 1);
  float y[256], scale = 1;
  const char *isas[3];
  int count = rft_isas(isas);
  (void)state;
  for (int i = 0; i < 256; i++) a[i] = (uint8_t)i;
  for (int k = 0; k < count; k++) {
    rfi_arg in[6] = {arg2(a, RFR_E4M3, 256, 1), arg2(&one, RFR_E4M3, 1, 1), arg2(&scale, RFR_F32, 1, 1),
                     arg2(&scale, RFR_F32, 1, 1)};
    rfi_arg out = arg2(y, RFR_F32, 256, 1);
    rfi_call call = {.n_in = 6, .n_out = 1, .in = in, .out = &out, .workspace = scratch, .threads = 1};
    const rfi_kernel *kernel = rfi_cpu_kernel(isas[k], RFI_OP_matmul_scaled);
    assert_true(kernel->workspace(&call) <= sizeof scratch);
    assert_int_equal(kernel->run(&call), RFR_OK);
    for (int i = 0; i < 256; i++) {
      float want = rfr_float_from_bits(RFR_E4M3, (uint32_t)i);
      assert_true(y[i] == want || (isnan(y[i]) && isnan(want)));
    }
  }
}

/* ---- gradients ---- */

enum { T = 5, N = 3, K = 7 };

/* x after quantization by the formula: E4M3 numbers times the inverse scale. */
static void round_trip(double *to, const float *x, int n) {
  float amax = 0;
  for (int i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
  float scale = 448.0f / amax, back = 1.0f / scale;
  for (int i = 0; i < n; i++)
    to[i] = (double)rfr_float_from_bits(RFR_E4M3, rfr_float_to_bits(RFR_E4M3, x[i] * scale)) * back;
}

static void check_product(const rfr_programs *p, const char *name, const double *a, int ars, int acs, const double *b,
                          int brs, int bcs, int m, int n, int k) {
  rfr_tensor y;
  assert_int_equal(rfr_program_output(p, 0, name, &y), RFR_OK);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = 0, size = 0;
      for (int s = 0; s < k; s++) {
        double product = a[i * ars + s * acs] * b[s * brs + j * bcs];
        sum += product;
        size += fabs(product);
      }
      double got = ((const float *)y.data)[i * n + j];
      if (fabs(got - sum) > 1e-6 * size) fail_msg("%s[%d,%d] is %.9g, want %.9g", name, i, j, got, sum);
    }
}

/* The rounding has the gradient of the identity: dx = Q(dy) Q(w), dw = Q(dy)T Q(x), db the sum of dy; also for a
 * transposed weight. */
static void test_gradient(void **state) {
  (void)state;
  for (int stored_transposed = 0; stored_transposed < 2; stored_transposed++) {
    rfr_ctx *ctx;
    rfr_trace *t;
    rfr_programs *p;
    rfr_tensor x[4];
    const char *const names[4] = {"x", "w", "b", "dy"};
    double q[4][T * K];
    int64_t wshape[2] = {stored_transposed ? K : N, stored_transposed ? N : K};
    assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value in[4] = {rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){T, K})),
                       rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, wshape),
                       rfr_input(t, "b", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){N})),
                       rfr_input(t, "dy", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, N}))};
    rfr_value w = stored_transposed ? rfr_transpose(t, in[1], 0, 1) : in[1];
    rfr_value loss = rfr_sum(t, rfr_mul(t, rfr_linear_e4m3(t, in[0], w, in[2]), in[3]), -1);
    static const char *const gradients[] = {"dx", "dw", "db"};
    for (int i = 0; i < 3; i++) rfr_output(t, gradients[i], rfr_copy(t, rfr_gradient(t, loss, in[i], RFR_F32)));
    assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, NULL, &p), RFR_OK);
    for (int i = 0; i < 4; i++) {
      assert_int_equal(rfr_programs_tensor(p, names[i], &x[i]), RFR_OK);
      for (int k = 0; k < x[i].bytes / 4; k++) ((float *)x[i].data)[k] = sinf((float)(1 + k + 50 * i)) * (float)(i + 1);
      round_trip(q[i], x[i].data, (int)(x[i].bytes / 4));
    }
    assert_int_equal(rfr_programs_load(p), RFR_OK);
    assert_int_equal(rfr_program_run(p, 0), RFR_OK);
    int wrs = stored_transposed ? 1 : K, wcs = stored_transposed ? N : 1;
    check_product(p, "dx", q[3], N, 1, q[1], wrs, wcs, T, K, N);
    if (stored_transposed) check_product(p, "dw", q[0], 1, K, q[3], N, 1, K, N, T);
    else check_product(p, "dw", q[3], 1, N, q[0], K, 1, N, K, T);
    for (int i = 0; i < T; i++) q[0][i] = 1;
    for (int i = 0; i < T * N; i++) q[3][i] = ((const float *)x[3].data)[i];
    check_product(p, "db", q[0], 1, 1, q[3], N, 1, 1, N, T);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
    rfr_ctx_destroy(ctx);
  }
}

/* E4M3 inputs have no copy along the other dimension. */
static void test_no_gradient(void **state) {
  rfr_ctx *ctx;
  rfr_trace *t, *joint;
  rfi_report report = {0};
  rfi_pass_options o = {.prune = true};
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  report.text.ctx = ctx;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){5, 7})), scale;
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_E4M3, 2, ((int64_t[]){3, 7}));
  rfr_value sw = rfr_input(t, "sw", RFR_ROLE_FROZEN, RFR_F32, 1, ((int64_t[]){1}));
  rfr_value row = rfr_quantize(t, x, NULL, &scale);
  rfr_value y = rfr_matmul_scaled(t, row, w, scale, sw, RFR_NONE, RFR_F32);
  rfr_output(t, "g", rfr_gradient(t, rfr_sum(t, y, -1), x, RFR_F32));
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  assert_int_equal(rfi_pass_autodiff(t, &o, &report, &joint), RFR_UNSUPPORTED);
  assert_string_equal(rfr_last_error()->slug, "autodiff.no_rule");
  assert_null(joint);
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_encode),
      cmocka_unit_test(test_decode),
      cmocka_unit_test(test_gradient),
      cmocka_unit_test(test_no_gradient),
  };
  return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
