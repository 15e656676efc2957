/* SPDX-License-Identifier: Apache-2.0
 *
 * The quantizers on the CPU: tables of ties, subnormals, zeros, overflow and NaN for every format; the
 * mean of stochastic rounding; the Hadamard transform is orthogonal; and every quantizer against its
 * formula on many values, bit for bit, on every instruction set. `quant_test N` compares at
 * least N values per quantizer; ctest runs it with few.
 */
#include <inttypes.h>
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
#include "base/base.h"
#include "ops/quant/scaled.h"
#include "support/op_check.h"

/* ---- single conversions ---- */

static void codes_of(float x) {
  const struct {
    rfr_dtype format;
    uint32_t code;
  } rows[] = {{RFR_E4M3, rfi_e4m3_encode(x, 1)}, {RFR_E5M2, rfi_e5m2_encode(x, 1)}, {RFR_E2M1, rfi_e2m1_narrow(x)}};
  for (int i = 0; i < 3; i++)
    if (rows[i].code != rfr_float_to_bits(rows[i].format, x))
      fail_msg("%.9g (%08x) in %s: %02x, want %02x", x, rfi_pattern(x), rfr_dtype_name(rows[i].format), rows[i].code,
               rfr_float_to_bits(rows[i].format, x));
  const float a = rfi_number(rfi_magnitude(x));
  assert_int_equal(rfi_e8m0_narrow(a), rfr_float_to_bits(RFR_E8M0, a));
}

static void test_codes(void **state) {
  static const rfr_dtype formats[] = {RFR_E4M3, RFR_E5M2, RFR_E2M1, RFR_E8M0};
  (void)state;
  for (uint32_t h = 0; h < 1 << 16; h++) {
    codes_of(rfr_float_from_bits(RFR_BF16, h));
    codes_of(rfr_float_from_bits(RFR_F16, h));
  }
  for (int f = 0; f < 4; f++)
    for (uint32_t q = 0; q + 1 < (f == 2 ? 8u : 255u); q++) {
      const float a = rfr_float_from_bits(formats[f], q), b = rfr_float_from_bits(formats[f], q + 1), tie = (a + b) / 2;
      if (!isfinite(tie)) continue;
      for (int sign = -1; sign <= 1; sign += 2) {
        codes_of((float)sign * tie);
        codes_of((float)sign * nextafterf(tie, INFINITY));
        codes_of((float)sign * nextafterf(tie, 0));
      }
    }
  codes_of(INFINITY), codes_of(-INFINITY), codes_of(NAN), codes_of(0.0f), codes_of(-0.0f);
  for (uint32_t q = 0; q < 256; q++) {
    const float want[] = {rfr_float_from_bits(RFR_E4M3, q), rfr_float_from_bits(RFR_E5M2, q),
                          rfr_float_from_bits(RFR_E8M0, q), rfr_float_from_bits(RFR_E2M1, q & 15)};
    const float got[] = {rfi_e4m3_widen((uint8_t)q), rfi_e5m2_widen((uint8_t)q), rfi_e8m0_widen((uint8_t)q),
                         rfi_e2m1_widen((uint8_t)(q & 15))};
    for (int i = 0; i < 4; i++)
      assert_true(rfi_pattern(got[i]) == rfi_pattern(want[i]) || (isnan(got[i]) && isnan(want[i])));
  }
}

static void test_scales(void **state) {
  static const struct {
    float amax, tensor, pow2, block_bf16;
  } rows[] = {{0, 1, 1, 1},
              {INFINITY, 1, 1, 1},
              {NAN, 1, 1, 1},
              {448, 1, 1, 1},
              {447, 448 / 447.0f, 1, 448 / 447.0f},
              {449, 448 / 449.0f, 0.5f, 448 / 449.0f},
              {1e-38f, 0x1.FFFFFEp127f, 0x1p127f, 0x1.FEp127f},
              {0x1p-149f, 0x1.FFFFFEp127f, 0x1p127f, 0x1.FEp127f}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const uint32_t amax = rfi_magnitude(rows[i].amax);
    assert_true(rfi_scale_of(amax, 448, RFI_F32_LARGEST, 0) == rows[i].tensor);
    assert_true(rfi_scale_of(amax, 448, RFI_F32_LARGEST, 1) == rows[i].pow2);
    assert_true(rfi_scale_of(amax, 448, rfi_largest_input(RFR_BF16), 0) == rows[i].block_bf16);
  }
  assert_true(rfi_number(rfi_largest_input(RFR_F16)) == 65504);
  assert_true(rfi_number(rfi_largest_input(RFR_BF16)) == rfr_float_from_bits(RFR_BF16, 0x7F7F));
}

/* For a value between two E2M1 numbers the mean of many draws equals the value; an E2M1 number is not changed by any
 * draw. */
static void test_stochastic(void **state) {
  static const float values[] = {0.1f, 0.35f, 0.75f, 1.25f, 1.9f, 2.2f, 3.5f, 5.0f, 5.9f, 0, 0.5f, 3, 6, 100};
  (void)state;
  for (size_t i = 0; i < sizeof values / sizeof *values; i++)
    for (int sign = -1; sign <= 1; sign += 2) {
      double sum = 0;
      const float x = (float)sign * values[i], bound = values[i] > 6 ? (float)sign * 6 : x;
      for (uint32_t r = 0; r < 256; r++) sum += rfi_e2m1_widen(rfi_e2m1_narrow_random(x, r)) / 256;
      if (fabs(sum - bound) > 2.0 / 256) fail_msg("the mean of %.9g is %.9g", x, sum);
    }
}

static void test_hadamard(void **state) {
  float m[RFI_HADAMARD][RFI_HADAMARD];
  (void)state;
  for (int i = 0; i < RFI_HADAMARD; i++) {
    for (int j = 0; j < RFI_HADAMARD; j++) m[i][j] = i == j;
    rfi_hadamard(m[i]);
  }
  for (int i = 0; i < RFI_HADAMARD; i++)
    for (int j = 0; j < RFI_HADAMARD; j++) {
      double dot = 0;
      for (int k = 0; k < RFI_HADAMARD; k++) dot += m[i][k] * m[j][k];
      assert_true(dot == (i == j));
      assert_true(fabsf(m[i][j]) == 0.25f);
    }
  assert_true(m[3][0] == -0.25f && m[0][3] == 0.25f);
}

/* ---- quantizers against their formulas ---- */

enum { ROWS = 160, COLS = 272, N = ROWS * COLS, RESULTS = RFI_Q_RESULTS, BYTES = N * 8 };

static int64_t values_each = 2 * N;

static uint64_t draw(uint64_t i) {
  uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* Alternates between arbitrary bit patterns, numbers of one scale, numbers close to ties, and mostly zeros. */
static float value_of(uint64_t turn, uint64_t i) {
  const uint64_t z = draw(turn * N + i);
  const uint32_t low = (uint32_t)z, any = (uint32_t)(z >> 32);
  const uint32_t exponent = turn % 4 == 0 ? any & 0xFFu : 120u + any % 12u;
  uint32_t mantissa = low & 0x7FFFFFu;
  if (turn % 4 == 2) mantissa = (mantissa & 0x780000u) + (uint32_t)((any >> 9) % 3u) - 1u;
  if (turn % 4 == 3 && any % 16u != 0) return any & 16u ? 0.0f : -0.0f;
  return rfi_number((low & 0x80000000u) | exponent << 23 | (mantissa & 0x7FFFFFu));
}

static rfi_arg arg(void *data, const rfr_type *type) {
  rfi_arg a = {.data = data, .type = *type};
  int64_t stride = 1;
  for (int d = type->rank - 1; d >= 0; d--) a.stride[d] = stride, stride *= type->shape[d];
  return a;
}

static void same(const char *where, const char *name, const rfi_arg *y, const rfi_arg *want) {
  for (int64_t i = 0; i < rfi_count(&y->type); i++) {
    if (y->type.dtype == RFR_U8) {
      const unsigned a = ((const uint8_t *)y->data)[i], b = ((const uint8_t *)want->data)[i];
      if (a != b) fail_msg("%s: %s[%" PRId64 "] is %02x, want %02x", where, name, i, a, b);
      continue;
    }
    const double a = rft_get(y, i), b = rft_get(want, i);
    if (!(a == b && signbit(a) == signbit(b)) && !(isnan(a) && isnan(b)))
      fail_msg("%s: %s[%" PRId64 "] is %.9g, want %.9g", where, name, i, a, b);
  }
}

static void compare(rfr_dtype format, int64_t scaling, int64_t options, uint64_t turn, const char *const *isas, int n) {
  static float x[N];
  static double wide[N];
  static unsigned char got[RESULTS][BYTES], want[RESULTS][BYTES];
  static uint32_t workspace[64];
  int64_t step[4] = {(int64_t)turn, 1, 99, 0};
  const rfi_op_def *def = rfi_op_def_get(RFI_OP_quantize);
  rfr_type in[4] = {{.dtype = RFR_F32, .rank = 2, .shape = {ROWS, COLS}},
                    {.rank = -1},
                    {.dtype = RFR_I64, .rank = 1, .shape = {4}},
                    {.rank = -1}},
           out[RESULTS];
  const bool random = options & RFR_QUANTIZE_STOCHASTIC;
  if (!random) in[2].rank = -1;
  const rfi_attr attr[5] = {rfi_i(format), rfi_i(scaling), rfi_i(options), rfi_i(7), rfi_i(3)};
  memset(out, 0, sizeof out);
  assert_int_equal(def->infer(&(rfi_infer){def, 4, in, attr, out}), RFR_OK);
  for (int i = 0; i < N; i++) wide[i] = x[i] = value_of(turn, (uint64_t)i);
  rfi_arg given[4] = {arg(x, &in[0]), {.type = {.rank = -1}}, {.type = {.rank = -1}}, {.type = {.rank = -1}}};
  rfi_arg results[RESULTS], formula[RESULTS];
  if (random) given[2] = arg(step, &in[2]);
  for (int j = 0; j < RESULTS; j++) {
    rfr_type real = out[j];
    if (real.dtype != RFR_U8) real.dtype = RFR_F64;
    results[j] = arg(got[j], &out[j]);
    formula[j] = arg(want[j], &real);
  }
  rfi_call call = {.n_in = 4, .n_out = RESULTS, .in = given, .out = formula, .attr = attr, .threads = 2};
  given[0].data = wide;
  rft_op_get(RFI_OP_quantize).ref(&call);
  given[0].data = x;
  call.out = results;
  call.workspace = workspace;
  for (int k = 0; k < n; k++) {
    char where[80];
    snprintf(where, sizeof where, "%s, %s, scaling %d, options %d, turn %d", isas[k], rfr_dtype_name(format),
             (int)scaling, (int)options, (int)turn);
    assert_int_equal(rfi_cpu_kernel(isas[k], RFI_OP_quantize)->run(&call), RFR_OK);
    for (int j = 0; j < RESULTS; j++) same(where, def->result[j], &results[j], &formula[j]);
  }
}

static void test_values(void **state) {
  const char *isas[3];
  const int n = rft_isas(isas);
  (void)state;
  for (int64_t scaling = 0; scaling < RFR_SCALING_COUNT; scaling++) {
    const rfr_dtype type = rfi_scaling_info_of(scaling).scale;
    for (int format = 0; format < (type == RFR_E4M3 ? 1 : 2); format++)
      for (int64_t options = 0; options < 8; options++) {
        if (options != 0 && type == RFR_E8M0) continue;
        if (type == RFR_F32 && options > RFR_QUANTIZE_POW2) continue;
        if (type == RFR_E4M3 &&
            ((options & RFR_QUANTIZE_POW2) || ((options & RFR_QUANTIZE_HADAMARD) && scaling != RFR_SCALING_NV16)))
          continue;
        for (int64_t turn = 0; turn * N < values_each; turn++)
          compare(type == RFR_E4M3 ? RFR_E2M1
                  : format         ? RFR_E5M2
                                   : RFR_E4M3,
                  scaling, options, (uint64_t)turn, isas, n);
      }
  }
}

/* ---- refused ---- */

static void test_refused(void **state) {
  static const struct {
    rfr_dtype format;
    int64_t scaling, options, rows;
    const char *text;
  } rows[] = {{RFR_E2M1, RFR_SCALING_TENSOR, 0, 16, "format must be e4m3 or e5m2"},
              {RFR_E4M3, RFR_SCALING_NV16, 0, 16, "format must be e2m1"},
              {RFR_E4M3, 99, 0, 16, "99 is not an rfr_scaling"},
              {RFR_E4M3, RFR_SCALING_MX32, RFR_QUANTIZE_POW2, 16, "only f32 scales"},
              {RFR_E4M3, RFR_SCALING_TENSOR, RFR_QUANTIZE_STOCHASTIC, 16, "only e2m1 is rounded stochastically"},
              {RFR_E2M1, RFR_SCALING_NV16, RFR_QUANTIZE_STOCHASTIC, 16, "stochastic rounding and the operand step"},
              {RFR_E2M1, RFR_SCALING_NV16X16, RFR_QUANTIZE_HADAMARD, 16, "needs the scaling nv16"},
              {RFR_E2M1, RFR_SCALING_NV16, RFR_QUANTIZE_HADAMARD, 18, "a multiple of 16 rows, not 18"},
              {RFR_E2M1, RFR_SCALING_NV16, 0, 17, "has an odd side"}};
  const rfi_op_def *def = rfi_op_def_get(RFI_OP_quantize);
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const rfr_type x = {.dtype = RFR_F32, .rank = 2, .shape = {rows[i].rows, 32}};
    const rfi_attr attr[5] = {rfi_i(rows[i].format), rfi_i(rows[i].scaling), rfi_i(rows[i].options), rfi_i(0),
                              rfi_i(0)};
    rfr_type out[RESULTS];
    assert_int_not_equal(def->infer(&(rfi_infer){def, 1, &x, attr, out}), RFR_OK);
    if (!strstr(rfr_last_error()->message, rows[i].text)) fail_msg("%s", rfr_last_error()->message);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_codes),    cmocka_unit_test(test_scales), cmocka_unit_test(test_stochastic),
      cmocka_unit_test(test_hadamard), cmocka_unit_test(test_values), cmocka_unit_test(test_refused),
  };
  if (argc > 1) values_each = strtoll(argv[1], NULL, 10);
  return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
