/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types: their names, and one element to and from float.
 *
 * All conversions work on bit patterns, never by float arithmetic, so that results depend neither on the rounding mode
 * nor on flush-to-zero of the host program. One routine serves every sign-exponent-mantissa type. It counts the value
 * in units of the target's last place, rounds that count to nearest even, and adds it to the exponent field. A carry
 * out of the mantissa gives the next binade, the first normal number, or a pattern beyond the largest, which then
 * saturates or becomes infinity.
 *
 * Sources: OCP 8-bit Floating Point (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0.
 */
#include "refrain/dtype.h"

#include <stdbool.h>
#include <string.h>

typedef struct dtype_row {
  const char *name, *safetensors;
  int bits;
} dtype_row;

static const dtype_row rows[RFR_DTYPE_COUNT] = {
#define DTYPE_ROW(e, name, bits, st) [e] = {name, st, bits},
    RFR_DTYPES(DTYPE_ROW)
#undef DTYPE_ROW
};

/* A type with sign, exponent and mantissa. */
typedef struct layout {
  int exponent, mantissa, bias;
  uint32_t largest;  /* pattern of the largest finite value */
  uint32_t overflow; /* what a larger value becomes: `largest`, or infinity */
  uint32_t nan;      /* the pattern that a NaN becomes; 0: the type has none */
} layout;

/* NULL for types that are not of this kind; bf16 is the upper half of f32 and needs none. */
static const layout *layout_of(rfr_dtype dtype) {
  static const layout f16 = {5, 10, 15, 0x7BFF, 0x7C00, 0x7E00}, e4m3 = {4, 3, 7, 0x7E, 0x7E, 0x7F},
                      e5m2 = {5, 2, 15, 0x7B, 0x7B, 0x7E}, e3m2 = {3, 2, 3, 0x1F, 0x1F, 0},
                      e2m3 = {2, 3, 1, 0x1F, 0x1F, 0}, e2m1 = {2, 1, 1, 0x7, 0x7, 0};
  switch (dtype) {
    case RFR_F16: return &f16;
    case RFR_E4M3: return &e4m3;
    case RFR_E5M2: return &e5m2;
    case RFR_E3M2: return &e3m2;
    case RFR_E2M3: return &e2m3;
    case RFR_E2M1: return &e2m1;
    default: return NULL;
  }
}

enum { F32_QUIET = 0x00400000, F32_INFINITY = 0x7F800000, F32_HIDDEN = 0x00800000 };

static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

static uint32_t encode(const layout *f, uint32_t u) {
  const uint32_t sign = (u >> 31) << (f->exponent + f->mantissa), magnitude = u & 0x7FFFFFFF;
  if (magnitude > F32_INFINITY) return f->nan == 0 ? f->largest : sign | f->nan;
  /* value = significand * 2^(e - 23). A subnormal f32 is far below half of any smallest value here, so its missing
   * hidden bit does not matter. */
  const int e = (int)(magnitude >> 23) - 127, smallest = 1 - f->bias;
  const uint32_t significand = (magnitude & 0x7FFFFF) | F32_HIDDEN;
  const int shift = 23 - f->mantissa + (e < smallest ? smallest - e : 0);
  if (shift > 25) return sign;
  uint32_t count = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
  if (rest > half || (rest == half && (count & 1))) count++;
  const uint32_t pattern = e < smallest ? count : ((uint32_t)(e - smallest) << f->mantissa) + count;
  return sign | (pattern > f->largest ? f->overflow : pattern);
}

static float decode(const layout *f, uint32_t bits) {
  const int width = f->exponent + f->mantissa;
  const uint32_t sign = (bits >> width & 1) << 31, magnitude = bits & ((1u << width) - 1);
  if (magnitude > f->largest) {
    /* e5m2 has an infinity too, though nothing is rounded to it. */
    const bool is_infinity = (magnitude & ((1u << f->mantissa) - 1)) == 0;
    return float_of(sign | F32_INFINITY | (is_infinity ? 0 : F32_QUIET));
  }
  uint32_t exponent = magnitude >> f->mantissa, mantissa = magnitude & ((1u << f->mantissa) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return float_of(sign);
    /* Subnormal here but normal in f32: shift the leading one to the place of the hidden bit. */
    int up = 0;
    while ((mantissa << up >> f->mantissa) == 0) up++;
    const uint32_t rest = (mantissa << up) & ((1u << f->mantissa) - 1);
    return float_of(sign | (uint32_t)(128 - f->bias - up) << 23 | rest << (23 - f->mantissa));
  }
  return float_of(sign | (exponent + 127 - (uint32_t)f->bias) << 23 | mantissa << (23 - f->mantissa));
}

static uint32_t encode_bf16(uint32_t u) {
  if ((u & 0x7FFFFFFF) > F32_INFINITY) return (u | F32_QUIET) >> 16;
  return (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
}

/* The smallest exponent that is not below the value: scaled by its inverse, nothing overflows. */
static uint32_t encode_e8m0(uint32_t u) {
  u &= 0x7FFFFFFF;
  if (u > F32_INFINITY) return 0xFF;
  if (u >= 0x7F000000) return 0xFE; /* 2^127 and more, and infinity */
  if (u <= F32_QUIET) return 0;     /* 2^-127 and less, and zero */
  return (u + (F32_HIDDEN - 1)) >> 23;
}

static float decode_e8m0(uint32_t bits) {
  bits &= 0xFF;
  if (bits == 0xFF) return float_of(F32_INFINITY | F32_QUIET);
  return float_of(bits == 0 ? F32_QUIET : bits << 23);
}

uint32_t rfr_float_to_bits(rfr_dtype dtype, float x) {
  const uint32_t u = bits_of(x);
  const layout *f = layout_of(dtype);
  if (f != NULL) return encode(f, u);
  switch (dtype) {
    case RFR_F32: return u;
    case RFR_BF16: return encode_bf16(u);
    case RFR_E8M0: return encode_e8m0(u);
    default: return 0;
  }
}

float rfr_float_from_bits(rfr_dtype dtype, uint32_t bits) {
  const layout *f = layout_of(dtype);
  if (f != NULL) return decode(f, bits);
  switch (dtype) {
    case RFR_F32: return float_of(bits);
    case RFR_BF16: return float_of(bits << 16);
    case RFR_E8M0: return decode_e8m0(bits);
    default: return 0;
  }
}

static bool is_known(rfr_dtype dtype) { return (unsigned)dtype < RFR_DTYPE_COUNT; }

const char *rfr_dtype_name(rfr_dtype dtype) { return is_known(dtype) ? rows[dtype].name : "?"; }
const char *rfr_dtype_safetensors_name(rfr_dtype dtype) { return is_known(dtype) ? rows[dtype].safetensors : "?"; }
int rfr_dtype_bits(rfr_dtype dtype) { return is_known(dtype) ? rows[dtype].bits : 0; }
int rfr_dtype_is_float(rfr_dtype dtype) { return is_known(dtype) && dtype < RFR_I64; }

rfr_dtype rfr_dtype_parse(const char *name) {
  for (int i = 0; i < RFR_DTYPE_COUNT; i++)
    if (strcmp(name, rows[i].name) == 0) return (rfr_dtype)i;
  return RFR_DTYPE_COUNT;
}
