/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types against an independent formula, over every bit pattern.
 *
 * The reference reads a pattern as sign * 2^e * (1 + m / 2^k) in double and rounds with rint on a scaled long double;
 * the library uses neither. Between every two adjacent values the midpoint and the two floats next to it are tested, so
 * that every rounding decision of a type is tested once.
 */
#include "refrain/dtype.h"

#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/convert.h"
#include "support/random.h"

/* How the standards describe a type. */
typedef struct spec {
  rfr_dtype dtype;
  int exponent, mantissa, bias;
  double largest;
  int overflows; /* to infinity */
  int has_nan;
} spec;

static const spec specs[] = {
    {RFR_F32, 8, 23, 127, 0x1.fffffep127, 1, 1},
    {RFR_BF16, 8, 7, 127, 0x1.fep127, 1, 1},
    {RFR_F16, 5, 10, 15, 65504, 1, 1},
    {RFR_E4M3, 4, 3, 7, 448, 0, 1},
    {RFR_E5M2, 5, 2, 15, 57344, 0, 1},
    {RFR_E3M2, 3, 2, 3, 28, 0, 0},
    {RFR_E2M3, 2, 3, 1, 7.5, 0, 0},
    {RFR_E2M1, 2, 1, 1, 6, 0, 0},
};
enum { N_SPECS = sizeof specs / sizeof *specs };

static double formula(const spec *s, uint32_t bits) {
  const uint32_t m = bits & ((1u << s->mantissa) - 1), e = bits >> s->mantissa & ((1u << s->exponent) - 1);
  const double fraction = (double)m / (1 << s->mantissa);
  const double x = e == 0 ? ldexp(fraction, 1 - s->bias) : ldexp(1 + fraction, (int)e - s->bias);
  return bits >> (s->mantissa + s->exponent) & 1 ? -x : x;
}

/* Nearest value of the type, ties to even; the tie is decided by rintl. */
static long double rounded(const spec *s, long double x) {
  if (isnan(x)) return s->has_nan ? x : s->largest;
  int e;
  frexpl(x, &e);
  e = isinf(x) ? 200 : e - 1;
  const int unit = (x == 0 || e < 1 - s->bias ? 1 - s->bias : e) - s->mantissa;
  long double r = isinf(x) ? x : ldexpl(rintl(ldexpl(x, -unit)), unit);
  if (fabsl(r) > s->largest) r = copysignl(s->overflows ? INFINITY : s->largest, x);
  return r;
}

static void assert_same_value(rfr_dtype dtype, double x, double got, double want) {
  if (isnan(want) ? isnan(got) : got == want && signbit(got) == signbit(want)) return;
  fail_msg("%s of %a: got %a, want %a", rfr_dtype_name(dtype), x, got, want);
}

static float round_trip(rfr_dtype dtype, float x) { return rfr_float_from_bits(dtype, rfr_float_to_bits(dtype, x)); }

static void test_every_pattern(void **state) {
  (void)state;
  for (int i = 1; i < N_SPECS; i++) {
    const spec *s = &specs[i];
    const uint32_t n = 1u << (1 + s->exponent + s->mantissa);
    int n_finite = 0, n_nan = 0, n_infinite = 0;
    for (uint32_t bits = 0; bits < n; bits++) {
      const float x = rfr_float_from_bits(s->dtype, bits);
      if (isnan(x)) {
        n_nan++;
        assert_int_equal(!!signbit(x), bits >= n / 2);
        const uint32_t back = rfr_float_to_bits(s->dtype, x);
        assert_true(isnan(rfr_float_from_bits(s->dtype, back)));
        assert_int_equal(back >= n / 2, bits >= n / 2);
      } else if (isinf(x)) {
        n_infinite++;
        assert_int_equal(x < 0, bits >= n / 2);
      } else {
        n_finite++;
        assert_same_value(s->dtype, bits, x, formula(s, bits));
        assert_int_equal(rfr_float_to_bits(s->dtype, x), bits);
      }
    }
    /* Counted by hand from the standards: which patterns are special. */
    const int mantissas = 1 << s->mantissa;
    const int ieee = s->dtype == RFR_BF16 || s->dtype == RFR_F16 || s->dtype == RFR_E5M2;
    assert_int_equal(n_infinite, ieee ? 2 : 0);
    assert_int_equal(n_nan, ieee ? 2 * (mantissas - 1) : s->dtype == RFR_E4M3 ? 2 : 0);
    assert_int_equal(n_finite + n_nan + n_infinite, (int)n);
  }
}

static void test_every_midpoint(void **state) {
  (void)state;
  for (int i = 1; i < N_SPECS; i++) {
    const spec *s = &specs[i];
    const uint32_t sign = 1u << (s->exponent + s->mantissa);
    for (uint32_t low = 0; formula(s, low) < s->largest; low++) {
      const double a = formula(s, low), b = formula(s, low + 1);
      const float middle = (float)((a + b) / 2);
      assert_true(middle == (a + b) / 2); /* exact, otherwise the test proves nothing */
      const uint32_t even = low % 2 == 0 ? low : low + 1;
      assert_int_equal(rfr_float_to_bits(s->dtype, middle), even);
      assert_int_equal(rfr_float_to_bits(s->dtype, -middle), sign | even);
      assert_int_equal(rfr_float_to_bits(s->dtype, nextafterf(middle, 0)), low);
      assert_int_equal(rfr_float_to_bits(s->dtype, nextafterf(middle, INFINITY)), low + 1);
      assert_int_equal(rfr_float_to_bits(s->dtype, -nextafterf(middle, 0)), sign | low);
      assert_int_equal(rfr_float_to_bits(s->dtype, -nextafterf(middle, INFINITY)), sign | (low + 1));
    }
  }
}

static void test_beyond_the_largest(void **state) {
  (void)state;
  for (int i = 1; i < N_SPECS; i++) {
    const spec *s = &specs[i];
    int e;
    frexp(s->largest, &e);
    const float last = (float)s->largest, half_unit = ldexpf(1, e - 1 - s->mantissa - 1);
    const float edge = last + half_unit; /* halfway to the next value, if there were one */
    const double over = s->overflows ? INFINITY : s->largest;
    assert_true((double)edge == s->largest + half_unit);
    assert_same_value(s->dtype, edge, round_trip(s->dtype, nextafterf(edge, 0)), s->largest);
    assert_same_value(s->dtype, edge, round_trip(s->dtype, edge), over);
    assert_same_value(s->dtype, -edge, round_trip(s->dtype, -edge), -over);
    assert_same_value(s->dtype, 0x1.fffffep127, round_trip(s->dtype, 0x1.fffffep127f), over);
    assert_same_value(s->dtype, INFINITY, round_trip(s->dtype, INFINITY), over);
    assert_same_value(s->dtype, -INFINITY, round_trip(s->dtype, -INFINITY), -over);
    assert_same_value(s->dtype, NAN, round_trip(s->dtype, NAN), s->has_nan ? NAN : s->largest);
    if (!s->has_nan) assert_same_value(s->dtype, -NAN, round_trip(s->dtype, -NAN), s->largest);
    assert_same_value(s->dtype, 0, round_trip(s->dtype, 0.0f), 0);
    assert_same_value(s->dtype, -0.0, round_trip(s->dtype, -0.0f), -0.0);
    if (s->dtype != RFR_BF16) {
      assert_same_value(s->dtype, 0x1p-149, round_trip(s->dtype, 0x1p-149f), 0);
      assert_same_value(s->dtype, -0x1p-126, round_trip(s->dtype, -0x1p-126f), -0.0);
    }
  }
  /* A NaN stays a NaN even if its payload is only in the bits that bf16 drops. */
  assert_int_equal(rfr_float_to_bits(RFR_BF16, rfr_float_from_bits(RFR_F32, 0x7F800001)) & 0x7FC0, 0x7FC0);
  assert_int_equal(rfr_float_to_bits(RFR_BF16, rfr_float_from_bits(RFR_F32, 0xFFA50001)), 0xFFE5);
}

static void test_known_values(void **state) {
  (void)state;
  /* The ties of the 4-bit type, on which block formats rely. */
  static const float ties[][2] = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5, 4}};
  for (size_t i = 0; i < sizeof ties / sizeof *ties; i++) assert_true(round_trip(RFR_E2M1, ties[i][0]) == ties[i][1]);
  assert_int_equal(rfr_float_to_bits(RFR_E4M3, 448), 0x7E);
  assert_int_equal(rfr_float_to_bits(RFR_E4M3, 464), 0x7E);
  assert_int_equal(rfr_float_to_bits(RFR_E5M2, 1), 0x3C);
  assert_int_equal(rfr_float_to_bits(RFR_F16, 1), 0x3C00);
  assert_int_equal(rfr_float_to_bits(RFR_BF16, 1), 0x3F80);
  assert_int_equal(rfr_float_to_bits(RFR_F32, -2), 0xC0000000);
}

static void test_e8m0(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < 255; bits++) {
    const float x = rfr_float_from_bits(RFR_E8M0, bits);
    assert_true(x == ldexp(1, (int)bits - 127));
    assert_int_equal(rfr_float_to_bits(RFR_E8M0, x), bits);
    assert_int_equal(rfr_float_to_bits(RFR_E8M0, -x), bits);
    assert_int_equal(rfr_float_to_bits(RFR_E8M0, nextafterf(x, INFINITY)), bits < 254 ? bits + 1 : 254);
    if (bits > 0) assert_int_equal(rfr_float_to_bits(RFR_E8M0, nextafterf(x, 0)), bits);
  }
  assert_true(isnan(rfr_float_from_bits(RFR_E8M0, 255)));
  assert_int_equal(rfr_float_to_bits(RFR_E8M0, NAN), 255);
  assert_int_equal(rfr_float_to_bits(RFR_E8M0, INFINITY), 254);
  assert_int_equal(rfr_float_to_bits(RFR_E8M0, 0), 0);
  assert_int_equal(rfr_float_to_bits(RFR_E8M0, 0x1p-149f), 0);
}

static void test_host_rounding_mode(void **state) {
  (void)state;
  static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  for (int m = 0; m < 3; m++) {
    fesetround(modes[m]);
    const uint32_t down = rfr_float_to_bits(RFR_BF16, 0x1.01p0f), up = rfr_float_to_bits(RFR_F16, 0x1.003p0f);
    fesetround(FE_TONEAREST);
    assert_int_equal(down, 0x3F80);
    assert_int_equal(up, 0x3C01);
  }
}

static void test_names(void **state) {
  (void)state;
  for (int i = 0; i < RFR_DTYPE_COUNT; i++) {
    assert_int_equal(rfr_dtype_parse(rfr_dtype_name((rfr_dtype)i)), i);
    for (int j = 0; j < i; j++)
      assert_string_not_equal(rfr_dtype_safetensors_name((rfr_dtype)i), rfr_dtype_safetensors_name((rfr_dtype)j));
  }
  assert_int_equal(rfr_dtype_parse("f8"), RFR_DTYPE_COUNT);
  assert_int_equal(rfr_dtype_parse(""), RFR_DTYPE_COUNT);
  assert_string_equal(rfr_dtype_name(RFR_BF16), "bf16");
  assert_string_equal(rfr_dtype_safetensors_name(RFR_E4M3), "F8_E4M3");
  assert_int_equal(rfr_dtype_bits(RFR_E2M1), 4);
  assert_int_equal(rfr_dtype_bits(RFR_I64), 64);
  assert_true(rfr_dtype_is_float(RFR_E2M1) && !rfr_dtype_is_float(RFR_I64) && !rfr_dtype_is_float(RFR_BOOL));
  assert_string_equal(rfr_dtype_name(RFR_DTYPE_COUNT), "?");
  assert_int_equal(rfr_dtype_bits((rfr_dtype)-1), 0);
}

/* ---- arrays ---- */

static uint64_t next_random(uint64_t *s) {
  const uint64_t bits = rft_next(s), x = bits ^ (bits >> 29);
  return x * 0xBF58476D1CE4E5B9u ^ x >> 32;
}

static int bytes_of(rfr_dtype dtype) { return rfr_dtype_bits(dtype) < 8 ? 1 : rfr_dtype_bits(dtype) / 8; }

static const spec *spec_of(rfr_dtype dtype) {
  for (int i = 0; i < N_SPECS; i++)
    if (specs[i].dtype == dtype) return &specs[i];
  return NULL;
}

/* One element as a long double, which holds each type's values exactly. */
static long double element(rfr_dtype dtype, const void *p) {
  uint32_t bits = 0;
  double d;
  float f;
  int64_t i64;
  int32_t i32;
  switch (dtype) {
    case RFR_F64: memcpy(&d, p, 8); return d;
    case RFR_F32: memcpy(&f, p, 4); return f;
    case RFR_I64: memcpy(&i64, p, 8); return i64;
    case RFR_I32: memcpy(&i32, p, 4); return i32;
    case RFR_U8: return *(const unsigned char *)p;
    case RFR_BOOL: return *(const unsigned char *)p != 0;
    default: memcpy(&bits, p, (size_t)bytes_of(dtype)); return rfr_float_from_bits(dtype, bits);
  }
}

static long double expected(rfr_dtype to, long double x) {
  long double low = 0, high = 255;
  switch (to) {
    case RFR_F64: return (double)x;
    case RFR_BOOL: return isnan(x) || x != 0;
    case RFR_E8M0: {
      if (isnan(x)) return NAN;
      int e;
      const long double m = frexpl(fabsl(x), &e);
      if (fabsl(x) <= 0x1p-127L) return 0x1p-127L;
      if (fabsl(x) >= 0x1p127L) return 0x1p127L;
      return ldexpl(1, m == 0.5L ? e - 1 : e);
    }
    case RFR_I64:
      low = INT64_MIN;
      high = INT64_MAX;
      break;
    case RFR_I32:
      low = INT32_MIN;
      high = INT32_MAX;
      break;
    case RFR_U8: break;
    default: return rounded(spec_of(to), x);
  }
  return isnan(x) ? 0 : x <= low ? low : x >= high ? high : truncl(x);
}

/* A source element that is likely to be near a rounding decision: few bits, or a tie and slightly more. */
static void fill_element(rfr_dtype dtype, unsigned char *p, uint64_t *s) {
  const uint64_t r = next_random(s), kind = r % 4;
  int64_t i = (int64_t)(next_random(s) >> (r >> 8) % 64);
  if (kind == 1) i = (int64_t)((next_random(s) % 1024) << (r >> 8) % 53) + (int64_t)(r >> 20) % 3 - 1;
  if (r >> 40 & 1) i = (int64_t)(0 - (uint64_t)i);
  double d = ldexp((double)(next_random(s) % 4096), (int)(r >> 8) % 300 - 170);
  if (kind == 1) d = nextafter(d, r >> 41 & 1 ? INFINITY : -INFINITY);
  if (kind == 2) d = ldexp((double)(next_random(s) >> 11), (int)(r >> 8) % 120 - 110);
  if (kind == 3 && r % 128 == 3) d = r >> 41 & 1 ? INFINITY : NAN;
  if (r >> 40 & 1) d = -d;
  const float f = (float)d;
  const int32_t i32 = (int32_t)i;
  const uint64_t bits = next_random(s);
  switch (dtype) {
    case RFR_F64: memcpy(p, &d, 8); break;
    case RFR_F32: memcpy(p, &f, 4); break;
    case RFR_I64: memcpy(p, &i, 8); break;
    case RFR_I32: memcpy(p, &i32, 4); break;
    case RFR_E3M2:
    case RFR_E2M3: p[0] = bits & 63; break;
    case RFR_E2M1: p[0] = bits & 15; break;
    default: memcpy(p, &bits, (size_t)bytes_of(dtype)); break;
  }
}

static void test_convert_all_pairs(void **state) {
  (void)state;
  enum { N = 2003 }; /* not a multiple of any block */
  unsigned char *src = malloc(8 * N + 1), *dst = malloc(8 * N + 2);
  uint64_t seed = 7;
  for (int from = 0; from < RFR_DTYPE_COUNT; from++) {
    for (int to = 0; to < RFR_DTYPE_COUNT; to++) {
      const int a = bytes_of((rfr_dtype)from), b = bytes_of((rfr_dtype)to);
      unsigned char *in = src + 1, *out = dst + 1; /* nothing is aligned */
      for (int i = 0; i < N; i++) fill_element((rfr_dtype)from, in + i * a, &seed);
      memset(dst, 0xA5, 8 * N + 2);
      rfi_convert((rfr_dtype)to, out, (rfr_dtype)from, in, N);
      assert_int_equal(dst[0], 0xA5);
      assert_int_equal(out[N * b], 0xA5);
      if (from == to && to != RFR_BOOL) assert_memory_equal(in, out, (size_t)(N * a));
      for (int i = 0; i < N && (from != to || to == RFR_BOOL); i++) {
        const long double x = element((rfr_dtype)from, in + i * a), got = element((rfr_dtype)to, out + i * b);
        const long double want = expected((rfr_dtype)to, x);
        if (!(isnan(want) ? isnan(got)
                          : got == want && (rfr_dtype_is_float((rfr_dtype)from) == 0 ||
                                            rfr_dtype_is_float((rfr_dtype)to) == 0 || signbit(got) == signbit(want))))
          fail_msg("%s to %s of %La: got %La, want %La", rfr_dtype_name((rfr_dtype)from), rfr_dtype_name((rfr_dtype)to),
                   x, got, want);
        if (to == RFR_BOOL) assert_true(out[i] <= 1);
      }
    }
  }
  free(src);
  free(dst);
}

static void test_convert_rounds_once(void **state) {
  (void)state;
  /* Just above the midpoint of two bf16 values, by less than f32 can hold. */
  const double d = 1 + 0x1p-8 + 0x1p-40;
  const int64_t i = ((int64_t)1 << 60) + ((int64_t)1 << 52) + 1;
  uint16_t b;
  float f;
  rfi_convert(RFR_BF16, &b, RFR_F64, &d, 1);
  assert_int_equal(b, 0x3F81);
  rfi_convert(RFR_BF16, &b, RFR_I64, &i, 1);
  assert_int_equal(b, 0x5D81);
  const int64_t j = ((int64_t)1 << 60) + ((int64_t)1 << 36) + 1; /* in f32 it would be a tie */
  rfi_convert(RFR_F32, &f, RFR_I64, &j, 1);
  assert_true(f == 0x1.000002p60f);
  int32_t n = 17;
  rfi_convert(RFR_I32, &n, RFR_F32, &f, 0);
  assert_int_equal(n, 17);
}

/* The loop for bf16 has its own copy of the rounding: tested for every upper half and the values next to it. */
static void test_convert_bf16_is_the_same(void **state) {
  (void)state;
  static const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  float *in = malloc(65536 * sizeof *in), *back = malloc(65536 * sizeof *back);
  uint16_t *out = malloc(65536 * sizeof *out);
  for (size_t k = 0; k < sizeof lower / sizeof *lower; k++) {
    for (uint32_t i = 0; i < 65536; i++) {
      const uint32_t bits = i << 16 | lower[k];
      memcpy(in + i, &bits, 4);
    }
    rfi_convert(RFR_BF16, out, RFR_F32, in, 65536);
    rfi_convert(RFR_F32, back, RFR_BF16, out, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
      assert_int_equal(out[i], rfr_float_to_bits(RFR_BF16, in[i]));
      const float one = rfr_float_from_bits(RFR_BF16, out[i]);
      assert_memory_equal(&back[i], &one, 4);
    }
  }
  free(in);
  free(out);
  free(back);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_pattern),
      cmocka_unit_test(test_every_midpoint),
      cmocka_unit_test(test_beyond_the_largest),
      cmocka_unit_test(test_known_values),
      cmocka_unit_test(test_e8m0),
      cmocka_unit_test(test_host_rounding_mode),
      cmocka_unit_test(test_names),
      cmocka_unit_test(test_convert_all_pairs),
      cmocka_unit_test(test_convert_rounds_once),
      cmocka_unit_test(test_convert_bf16_is_the_same),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
