/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantized storage against bitsandbytes (tools/make_quant_golden.py made the file): codes and scales byte by byte, and
 * a hash of the dequantized values in every type, on every instruction set.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "data/safetensors.h"
#include "ops/quant/formats.h"
#include "support/op_check.h"

#define GOLDEN RFT_SOURCE_DIR "/tests/data/quant/bitsandbytes.safetensors"

enum { MOST = 48 * 384 };

/* The weights that the script uses, as bf16. */
static void make_weights(uint16_t *w, int64_t n, uint64_t seed) {
  for (int64_t i = 0; i < n; i++) {
    uint64_t h = ((uint64_t)i + seed) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9u;
    h ^= h >> 32;
    const double sum = (double)((h & 1023) + (h >> 10 & 1023) + (h >> 20 & 1023)) - 1534;
    const float x = i == 777 % n ? 2.5f : i >= 64 && i < 128 ? 0 : (float)(sum / 32768);
    w[i] = (uint16_t)rfr_float_to_bits(RFR_BF16, x);
  }
}

static uint64_t fnv(const void *data, size_t n) {
  uint64_t h = 0xCBF29CE484222325u;
  for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001B3u;
  return h;
}

static void check_section(rfi_safetensors *st, const char *format, const char *part, const uint8_t *have) {
  static uint8_t want[MOST];
  char name[40];
  snprintf(name, sizeof name, "%s.%s", format, part);
  const rfi_stored *stored = rfi_safetensors_find(st, name);
  assert_non_null(stored);
  assert_true(stored->bytes <= (int64_t)sizeof want);
  assert_int_equal(rfi_safetensors_read(st, stored, want, (size_t)stored->bytes), RFR_OK);
  for (int64_t i = 0; i < stored->bytes; i++)
    if (have[i] != want[i]) fail_msg("%s: byte %lld is %d, want %d", name, (long long)i, have[i], want[i]);
}

/* The values in each type for which the file has a hash. */
static void check_values(rfi_safetensors *st, rfr_quant format, const uint8_t *x, const rfi_quant_layout *l,
                         const int64_t *shape) {
  static float y[MOST];
  const char *isas[3];
  const int count = rft_isas(isas);
  for (int dtype = RFR_F32; dtype <= RFR_F16; dtype++) {
    char name[40];
    snprintf(name, sizeof name, "%s.%s", rfr_quant_name(format), rfr_dtype_name((rfr_dtype)dtype));
    const rfi_stored *stored = rfi_safetensors_find(st, name);
    uint64_t want;
    if (!stored) continue;
    assert_int_equal(rfi_safetensors_read(st, stored, &want, sizeof want), RFR_OK);
    for (int k = 0; k < count; k++) {
      const rfi_attr attr[3] = {rfi_i(format), rfi_i(dtype), {.s = {2, {shape[0], shape[1]}}}};
      const rfi_arg in = {(void *)(uintptr_t)x, {.dtype = RFR_U8, .rank = 1, .shape = {l->bytes}}, {1}};
      const rfi_arg out = {y, {.dtype = (rfr_dtype)dtype, .rank = 2, .shape = {shape[0], shape[1]}}, {shape[1], 1}};
      const rfi_call call = {.n_in = 1, .n_out = 1, .in = &in, .out = &out, .attr = attr, .threads = 2};
      assert_int_equal(rfi_cpu_kernel(isas[k], RFI_OP_dequantize)->run(&call), RFR_OK);
      if (fnv(y, (size_t)(l->n * rfr_dtype_bits((rfr_dtype)dtype) / 8)) != want)
        fail_msg("%s: the values on %s have another hash", name, isas[k]);
    }
  }
}

static void test_bitsandbytes(void **state) {
  static const struct {
    rfr_quant format;
    int64_t shape[2];
    uint64_t seed;
  } cases[] = {{RFR_QUANT_NF4, {48, 384}, 1},
               {RFR_QUANT_INT8, {7, 96}, 2},
               {RFR_QUANT_DYNAMIC8, {3, 301}, 3},
               {RFR_QUANT_DYNAMIC8U, {3, 301}, 3}};
  static uint16_t w[MOST];
  static uint8_t x[MOST + 4096] __attribute__((aligned(16))), again[MOST + 4096] __attribute__((aligned(16)));
  rfr_ctx *ctx;
  rfi_safetensors *st;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfi_safetensors_open(ctx, GOLDEN, &st), RFR_OK);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const rfr_quant format = cases[i].format;
    const int64_t *shape = cases[i].shape, n = shape[0] * shape[1];
    const char *name = rfr_quant_name(format);
    const rfi_quant_layout l = rfi_quant_layout_for(format, 2, shape);
    make_weights(w, n, cases[i].seed);
    for (int64_t k = 0; k < n && format == RFR_QUANT_DYNAMIC8U; k++) w[k] &= 0x7FFF;
    assert_int_equal(rfr_quant_bytes(format, 2, shape), l.bytes);
    assert_true(l.bytes <= (int64_t)sizeof x);
    assert_int_equal(rfr_quant_encode(ctx, format, 2, shape, RFR_BF16, w, 3, x), RFR_OK);
    assert_int_equal(rfr_quant_encode(ctx, format, 2, shape, RFR_BF16, w, 1, again), RFR_OK);
    assert_memory_equal(x, again, (size_t)l.bytes);
    check_section(st, name, "codes", x);
    check_section(st, name, "scales", x + l.scales_at);
    if (format == RFR_QUANT_NF4) {
      check_section(st, name, "factors", x + l.nested_at);
      check_section(st, name, "offset", x + l.nested_at + 4 * ((l.scales + RFI_NESTED - 1) / RFI_NESTED));
    }
    check_values(st, format, x, &l, shape);
  }
  rfi_safetensors_close(st);
  rfr_ctx_destroy(ctx);
}

/* The closed form: 4 bits, 8 bits per 64, 32 bits per 64 * 256, and one offset. */
static void test_bytes(void **state) {
  (void)state;
  assert_int_equal(rfr_quant_bytes(RFR_QUANT_NF4, 2, (int64_t[]){4096, 14336}),
                   4096 * 14336 / 2 + 4096 * 14336 / 64 + 4096 * 14336 / 64 / 256 * 4 + 4);
  assert_int_equal(rfr_quant_bytes(RFR_QUANT_INT8, 2, (int64_t[]){4096, 14336}), 4096 * 14336 + 4096 * 4);
  assert_int_equal(rfr_quant_bytes(RFR_QUANT_DYNAMIC8, 1, (int64_t[]){1 << 20}), (1 << 20) + (1 << 20) / 256 * 4);
  assert_int_equal(rfr_quant_bytes(RFR_QUANT_NONE, 1, (int64_t[]){5}), 0);
}

/* A row longer than one pass, with its largest element in the second pass; zeros; non-finite weights, which must not
 * disappear. */
static void test_rows(void **state) {
  enum { LONG = 5000 };
  static float w[2 * LONG];
  static uint8_t x[2 * LONG + 64] __attribute__((aligned(16)));
  rfr_ctx *ctx;
  float scale[2];
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (int i = 0; i < LONG; i++) w[i] = 0.25f;
  w[4999] = -127;
  assert_int_equal(rfr_quant_encode(ctx, RFR_QUANT_INT8, 2, (int64_t[]){2, LONG}, RFR_F32, w, 1, x), RFR_OK);
  memcpy(scale, x + 2 * LONG, sizeof scale);
  assert_true(scale[0] == 127 && scale[1] == 0);
  assert_int_equal((int8_t)x[4999], -127);
  assert_int_equal(x[0], 0);
  assert_int_equal(x[LONG], 0);
  w[17] = NAN;
  assert_int_equal(rfr_quant_encode(ctx, RFR_QUANT_INT8, 2, (int64_t[]){2, LONG}, RFR_F32, w, 1, x), RFR_OK);
  memcpy(scale, x + 2 * LONG, sizeof scale);
  assert_true(isnan(scale[0]));
  rfr_ctx_destroy(ctx);
}

static void test_errors(void **state) {
  rfr_ctx *ctx;
  float w[4] = {0};
  uint8_t x[64];
  const int64_t shape[1] = {4};
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_not_equal(rfr_quant_encode(ctx, RFR_QUANT_NONE, 1, shape, RFR_F32, w, 1, x), RFR_OK);
  assert_int_not_equal(rfr_quant_encode(ctx, RFR_QUANT_NF4, 1, shape, RFR_I32, w, 1, x), RFR_OK);
  assert_int_not_equal(rfr_quant_encode(ctx, RFR_QUANT_NF4, 1, shape, RFR_F32, w, 0, x), RFR_OK);
  assert_string_equal(rfr_quant_name((rfr_quant)99), "?");
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value v = rfr_input(t, "x", RFR_ROLE_FROZEN, RFR_U8, 1, ((int64_t[]){39}));
  assert_int_equal(rfr_dequantize(t, v, RFR_QUANT_NF4, 1, ((int64_t[]){1}), RFR_F32), RFR_NONE);
  assert_string_equal(rfr_last_error()->slug, "trace.shape");
  assert_non_null(strstr(rfr_last_error()->message, "u8 (40)"));
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bitsandbytes),
      cmocka_unit_test(test_bytes),
      cmocka_unit_test(test_rows),
      cmocka_unit_test(test_errors),
  };
  return cmocka_run_group_tests_name("dequantize", tests, NULL, NULL);
}
