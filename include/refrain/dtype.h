/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types. Conversions round to the nearest even value; the 8, 6 and
 * 4 bit float types saturate.
 */
#ifndef REFRAIN_DTYPE_H
#define REFRAIN_DTYPE_H

#include <stddef.h>

#include "refrain/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/*  X(enumerator, name in traces, bits per element, safetensors name) */
#define RFR_DTYPES(X)               \
  X(RFR_F64, "f64", 64, "F64")      \
  X(RFR_F32, "f32", 32, "F32")      \
  X(RFR_BF16, "bf16", 16, "BF16")   \
  X(RFR_F16, "f16", 16, "F16")      \
  X(RFR_E4M3, "e4m3", 8, "F8_E4M3") \
  X(RFR_E5M2, "e5m2", 8, "F8_E5M2") \
  X(RFR_E8M0, "e8m0", 8, "F8_E8M0") \
  X(RFR_E3M2, "e3m2", 6, "F6_E3M2") \
  X(RFR_E2M3, "e2m3", 6, "F6_E2M3") \
  X(RFR_E2M1, "e2m1", 4, "F4")      \
  X(RFR_I64, "i64", 64, "I64")      \
  X(RFR_I32, "i32", 32, "I32")      \
  X(RFR_U8, "u8", 8, "U8")          \
  X(RFR_BOOL, "bool", 8, "BOOL")

typedef enum rfr_dtype {
#define RFR_DTYPE_ENUM(e, name, bits, st) e,
  RFR_DTYPES(RFR_DTYPE_ENUM)
#undef RFR_DTYPE_ENUM
      RFR_DTYPE_COUNT
} rfr_dtype;

RFR_API const char *rfr_dtype_name(rfr_dtype dtype);             /* "bf16" */
RFR_API const char *rfr_dtype_safetensors_name(rfr_dtype dtype); /* "BF16" */
RFR_API int rfr_dtype_bits(rfr_dtype dtype);
RFR_API int rfr_dtype_is_float(rfr_dtype dtype);
/* Looks a name up ("bf16"); returns RFR_DTYPE_COUNT for an unknown one. */
RFR_API rfr_dtype rfr_dtype_parse(const char *name);

/* One element to and from float. `bits` holds the pattern in its low bits; higher bits
 * are ignored. Round to nearest even, subnormals included. bf16 and f16 overflow to
 * infinity; e4m3, e5m2, e3m2, e2m3 and e2m1 saturate to their largest finite value,
 * infinity too. NaN stays NaN, with its sign, where the type has one (bf16 keeps the upper
 * payload bits) and becomes the positive largest value where it has none. e8m0 holds powers
 * of two, 2^(bits - 127), and NaN as 0xFF: the magnitude's exponent rounds up, as MX
 * requires; 2^-127 and less give 0x00 (zero too), 2^127 and more 0xFE (infinity too).
 * f32 is the identity; f64 and the integers have no such form: 0. */
RFR_API uint32_t rfr_float_to_bits(rfr_dtype dtype, float x);
RFR_API float rfr_float_from_bits(rfr_dtype dtype, uint32_t bits);

#ifdef __cplusplus
}
#endif
#endif
