/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays from one element type to another, in blocks through one of three carriers: int64
 * (integer to integer), float (f32 and narrower floats), double (the rest).
 *
 * Where a value passes through a narrower form on its way to a still narrower one (i64 to
 * double to f32, f64 to the float that the encoders take), the step in between rounds to
 * odd: it cuts, and sets the last bit if anything was cut. A number rounded to odd with two more bits than the target
 * then rounds to the same result as the exact number.
 */
#include "core/convert.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 512 };

static inline uint32_t f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static int is_integer(rfr_dtype dtype) { return !rfr_dtype_is_float(dtype); }

/* ---- into a carrier ---- */

static void load_ints(int64_t *out, rfr_dtype from, const unsigned char *src, int n) {
  for (int i = 0; i < n; i++) {
    int32_t x;
    switch (from) {
      case RFR_I64: memcpy(&out[i], src + 8 * (size_t)i, 8); break;
      case RFR_I32:
        memcpy(&x, src + 4 * (size_t)i, 4);
        out[i] = x;
        break;
      case RFR_BOOL: out[i] = src[i] != 0; break;
      default: out[i] = src[i]; break;
    }
  }
}

static void load_floats(float *out, rfr_dtype from, const unsigned char *src, int n) {
  uint16_t half;
  uint32_t bits;
  switch (from) {
    case RFR_F32: memcpy(out, src, 4 * (size_t)n); break;
    case RFR_BF16:
      for (int i = 0; i < n; i++) {
        memcpy(&half, src + 2 * (size_t)i, 2);
        bits = (uint32_t)half << 16;
        memcpy(out + i, &bits, 4);
      }
      break;
    case RFR_F16:
      for (int i = 0; i < n; i++) {
        memcpy(&half, src + 2 * (size_t)i, 2);
        out[i] = rfr_float_from_bits(RFR_F16, half);
      }
      break;
    default:
      for (int i = 0; i < n; i++) out[i] = rfr_float_from_bits(from, src[i]);
      break;
  }
}

/* The double next to x toward zero, with its last bit set unless it equals x. */
static double odd_double(int64_t x) {
  uint64_t magnitude = x < 0 ? 0 - (uint64_t)x : (uint64_t)x, cut = 0;
  int shift = 0;
  while (magnitude >> shift >= (uint64_t)1 << 53) shift++;
  if (shift > 0) {
    cut = magnitude & (((uint64_t)1 << shift) - 1);
    magnitude = (magnitude >> shift) | (cut != 0);
  }
  const double y = ldexp((double)magnitude, shift);
  return x < 0 ? -y : y;
}

/* `is_last`: the double is the result; otherwise it is rounded further. */
static void load_doubles(double *out, rfr_dtype from, const unsigned char *src, int n, int is_last) {
  if (from == RFR_F64) {
    memcpy(out, src, 8 * (size_t)n);
  } else if (is_integer(from)) {
    int64_t ints[BLOCK];
    load_ints(ints, from, src, n);
    for (int i = 0; i < n; i++) out[i] = is_last ? (double)ints[i] : odd_double(ints[i]);
  } else {
    float floats[BLOCK];
    load_floats(floats, from, src, n);
    for (int i = 0; i < n; i++) out[i] = floats[i];
  }
}

/* ---- out of a carrier ---- */

static void store_ints(rfr_dtype to, unsigned char *dst, const int64_t *in, int n) {
  for (int i = 0; i < n; i++) {
    const int64_t x = in[i];
    const int32_t clamped = x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : (int32_t)x;
    switch (to) {
      case RFR_I64: memcpy(dst + 8 * (size_t)i, &x, 8); break;
      case RFR_I32: memcpy(dst + 4 * (size_t)i, &clamped, 4); break;
      case RFR_BOOL: dst[i] = x != 0; break;
      default: dst[i] = (unsigned char)(x < 0 ? 0 : x > 255 ? 255 : x); break;
    }
  }
}

static void store_floats(rfr_dtype to, unsigned char *dst, const float *in, int n) {
  uint16_t half;
  switch (to) {
    case RFR_F32: memcpy(dst, in, 4 * (size_t)n); break;
    case RFR_BF16:
      for (int i = 0; i < n; i++) {
        const uint32_t u = f32_bits(in[i]), rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
        half = (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000 ? (u >> 16) | 0x40 : rounded);
        memcpy(dst + 2 * (size_t)i, &half, 2);
      }
      break;
    case RFR_F16:
      for (int i = 0; i < n; i++) {
        half = (uint16_t)rfr_float_to_bits(RFR_F16, in[i]);
        memcpy(dst + 2 * (size_t)i, &half, 2);
      }
      break;
    default:
      for (int i = 0; i < n; i++) dst[i] = (unsigned char)rfr_float_to_bits(to, in[i]);
      break;
  }
}

/* The float next to x toward zero, with its last bit set unless it equals x. */
static float odd_float(double x) {
  float y = (float)x;
  if (isnan(x) || y == x) return y;
  if (fabs((double)y) > fabs(x)) y = nextafterf(y, 0); /* from infinity too: the largest float */
  uint32_t u = f32_bits(y) | 1;
  memcpy(&y, &u, 4);
  return y;
}

static int64_t cut_to_int(double x) {
  if (isnan(x)) return 0;
  if (x >= 0x1p63) return INT64_MAX;
  if (x < -0x1p63) return INT64_MIN;
  return (int64_t)x;
}

static void store_doubles(rfr_dtype to, unsigned char *dst, const double *in, int n) {
  if (to == RFR_F64) {
    memcpy(dst, in, 8 * (size_t)n);
  } else if (to == RFR_BOOL) {
    for (int i = 0; i < n; i++) dst[i] = in[i] != 0; /* 0.5 and NaN are true */
  } else if (is_integer(to)) {
    int64_t ints[BLOCK];
    for (int i = 0; i < n; i++) ints[i] = cut_to_int(in[i]);
    store_ints(to, dst, ints, n);
  } else {
    float floats[BLOCK];
    for (int i = 0; i < n; i++) floats[i] = to == RFR_F32 ? (float)in[i] : odd_float(in[i]);
    store_floats(to, dst, floats, n);
  }
}

static size_t stride_of(rfr_dtype dtype) {
  const int bits = rfr_dtype_bits(dtype);
  return bits <= 8 ? 1 : (size_t)bits / 8;
}

void rfi_convert(rfr_dtype to, void *dst, rfr_dtype from, const void *src, int64_t n) {
  const size_t to_stride = stride_of(to), from_stride = stride_of(from);
  unsigned char *d = dst;
  const unsigned char *s = src;
  if (n > 0 && to == from && to != RFR_BOOL) {
    memcpy(d, s, (size_t)n * to_stride);
    return;
  }
  const int is_wide = to == RFR_F64 || from == RFR_F64 || is_integer(to) || is_integer(from);
  union {
    int64_t ints[BLOCK];
    double doubles[BLOCK];
    float floats[BLOCK];
  } carrier;
  for (int64_t done = 0; done < n;) {
    const int count = n - done < BLOCK ? (int)(n - done) : BLOCK;
    if (is_integer(to) && is_integer(from)) {
      load_ints(carrier.ints, from, s, count);
      store_ints(to, d, carrier.ints, count);
    } else if (is_wide) {
      load_doubles(carrier.doubles, from, s, count, to == RFR_F64);
      store_doubles(to, d, carrier.doubles, count);
    } else {
      load_floats(carrier.floats, from, s, count);
      store_floats(to, d, carrier.floats, count);
    }
    s += (size_t)count * from_stride;
    d += (size_t)count * to_stride;
    done += count;
  }
}
