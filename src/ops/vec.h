/* SPDX-License-Identifier: Apache-2.0
 *
 * Scalar arithmetic that the compiler vectorizes: conversions of the narrow float types, exp, tanh, erf and related
 * functions in f32, and the split of a kernel's work.
 *
 * All functions are branch-free (conditions become blends), call nothing and need no special instruction, so one source
 * serves every instruction set. Approximations are near-minimax polynomials fitted over the stated ranges; their
 * relative error is at most about 2e-7, a little more than that of libm's f32 functions.
 *
 * Work is split into `parts` that depend only on shapes and on the call's thread count, never on how many threads the
 * run-time system provides: therefore results are reproducible.
 */
#ifndef RFI_VEC_H
#define RFI_VEC_H

#include <stdint.h>
#include <string.h>

#include "ops/call.h"

/* ---- bits ---- */

static inline uint32_t rfi_bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
static inline float rfi_float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

static inline float rfi_bf16_to_f32(uint16_t h) { return rfi_float_of((uint32_t)h << 16); }
/* Rounds to nearest even; NaN stays NaN with its sign. */
static inline uint16_t rfi_f32_to_bf16(float x) {
  uint32_t u = rfi_bits_of(x), rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

/* One multiplication shifts the exponent and converts subnormals exactly. */
static inline float rfi_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = (uint32_t)(h & 0x7FFFu);
  uint32_t finite = rfi_bits_of(rfi_float_of(magnitude << 13) * 0x1p112f);
  uint32_t special = 0x7F800000u | (magnitude << 13);
  return rfi_float_of(sign | (magnitude >= 0x7C00u ? special : finite));
}
static inline uint16_t rfi_f32_to_f16(float x) {
  uint32_t u = rfi_bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  /* normal: rebias, then round; subnormal: adding 0.5 aligns the last bit and the addition rounds */
  uint32_t normal = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  uint32_t subnormal = rfi_bits_of(rfi_float_of(a) + 0.5f) - 0x3F000000u;
  uint32_t r = a < 0x38800000u ? subnormal : normal;
  r = a >= 0x47800000u ? 0x7C00u : r;
  r = a > 0x7F800000u ? 0x7E00u : r;
  return (uint16_t)(sign | r);
}

/* ---- functions ---- */

/* e^x: x = n ln2 + r, |r| <= ln2 / 2. 2^n is split into two factors, so that subnormal results and those close to the
 * largest are correct too; beyond them, the clamps give 0 and infinity. */
static inline float rfi_expf(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.5f ? -104.5f : x;
  float shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
  float r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  float p = 0.00139263760f;
  p = p * r + 0.00836333308f;
  p = p * r + 0.0416665535f;
  p = p * r + 0.166665761f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  int32_t k = (int32_t)(rfi_bits_of(shifted) - 0x4B400000u), half = k >> 1;
  return p * rfi_float_of((uint32_t)(half + 127) << 23) * rfi_float_of((uint32_t)(k - half + 127) << 23);
}

static inline float rfi_sigmoidf(float x) { return 1.0f / (1.0f + rfi_expf(-x)); }

/* The logistic function of x and, in `rest`, of -x. Both come from e^(-|x|), neither from a subtraction. */
static inline float rfi_sigmoids(float x, float *rest) {
  float e = rfi_expf(-rfi_float_of(rfi_bits_of(x) & 0x7FFFFFFFu)), large = 1.0f / (1.0f + e), small = e * large;
  *rest = x < 0 ? large : small;
  return x < 0 ? small : large;
}

static inline float rfi_tanhf(float x) {
  float a = rfi_float_of(rfi_bits_of(x) & 0x7FFFFFFFu), s = x * x;
  float p = -0.0060451651f;
  p = p * s + 0.0209613291f;
  p = p * s - 0.0538432632f;
  p = p * s + 0.133327188f;
  p = p * s - 0.333333284f;
  float small = x + x * s * p; /* |x| <= 0.63 */
  float large = 1.0f - 2.0f / (rfi_expf(2.0f * a) + 1.0f);
  large = rfi_float_of(rfi_bits_of(large) | (rfi_bits_of(x) & 0x80000000u));
  return a < 0.63f ? small : large;
}

/* cap tanh(x / cap), and its derivative from the result y: 1 - (y / cap)^2 without a difference of squares. */
static inline float rfi_softcap(float x, float cap) { return cap * rfi_tanhf(x / cap); }
static inline float rfi_softcap_slope(float y, float cap) { return (1.0f - y / cap) * (1.0f + y / cap); }

/* e^(t^2) erfc(t) / u with u = 1 / (1 + t/2), for t >= 0: a smooth function of u on (0, 1]. */
static inline float rfi_erfcx_over_u(float u) {
  float p = 0.0453516663f;
  p = p * u - 0.245581905f;
  p = p * u + 0.516904093f;
  p = p * u - 0.482480991f;
  p = p * u + 0.151890425f;
  p = p * u - 0.0679610759f;
  p = p * u + 0.095828141f;
  p = p * u + 0.174948405f;
  p = p * u + 0.246913583f;
  p = p * u + 0.282092866f;
  p = p * u + 0.2820948f;
  return p;
}
/* erfc(t) for t >= 0 with a small relative error as long as the result is a normal number; `e` is e^(-t^2). */
static inline float rfi_erfc_positive(float t, float e) {
  float u = 1.0f / (1.0f + 0.5f * t);
  return e * u * rfi_erfcx_over_u(u);
}

static inline float rfi_erff(float x) {
  float a = rfi_float_of(rfi_bits_of(x) & 0x7FFFFFFFu), s = x * x;
  float p = 7.87587506e-5f;
  p = p * s - 0.000801686429f;
  p = p * s + 0.00518908742f;
  p = p * s - 0.0268542120f;
  p = p * s + 0.112835947f;
  p = p * s - 0.376126267f;
  p = p * s + 1.12837917f;
  float large = 1.0f - rfi_erfc_positive(a, rfi_expf(-s));
  large = rfi_float_of(rfi_bits_of(large) | (rfi_bits_of(x) & 0x80000000u));
  return a < 1.0f ? x * p : large;
}

/* The normal distribution function at x; *density is e^(-x^2/2) / sqrt(2 pi). No cancellation for negative x. */
static inline float rfi_normal_cdf(float x, float *density) {
  float a = rfi_float_of(rfi_bits_of(x) & 0x7FFFFFFFu);
  float e = rfi_expf(-0.5f * x * x), tail = 0.5f * rfi_erfc_positive(a * 0.707106781f, e);
  *density = e * 0.398942280f;
  return x < 0 ? tail : 1.0f - tail;
}

/* sin and cos of an angle up to about 1e9, reduced in double. */
static inline void rfi_sincosf(double angle, float *sine, float *cosine) {
  double shifted = angle * 0.63661977236758134308 + 0x1.8p52, q = shifted - 0x1.8p52;
  float r = (float)((angle - q * 1.5707963267948965580) - q * 6.1232339957367658e-17);
  int64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  uint32_t k = (uint32_t)bits;
  float s2 = r * r;
  float sp = r + r * s2 * ((-0.000195866053f * s2 + 0.00833274230f) * s2 - 0.166666646f);
  float cp = 1.0f - 0.5f * s2 + s2 * s2 * ((2.45466538e-5f * s2 - 0.00138882971f) * s2 + 0.0416666646f);
  float s = k & 1u ? cp : sp, c = k & 1u ? sp : cp;
  *sine = rfi_float_of(rfi_bits_of(s) ^ ((k & 2u) << 30));
  *cosine = rfi_float_of(rfi_bits_of(c) ^ (((k + 1u) & 2u) << 30));
}

/* ---- sums ---- */

static inline float rfi_dot(const float *a, const float *b, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += a[j] * b[j];
  return s;
}

/* ---- dividing work among threads ---- */

/* With fewer element visits than this a parallel region takes longer than a single thread. */
enum { RFI_GRAIN = 32768 };

/* The number of parts for n items of `cost` element visits each. */
static inline int rfi_parts(const rfi_call *c, int64_t n, int64_t cost) {
  if (c->threads <= 1 || n <= 1 || n * (cost > 0 ? cost : 1) < RFI_GRAIN) return 1;
  return n < c->threads ? (int)n : c->threads;
}

/* Computes items begin ... end - 1, which are part number `part`. */
typedef void (*rfi_part_fn)(const rfi_call *c, int64_t begin, int64_t end, int part);

static inline void rfi_parallel(const rfi_call *c, int64_t n, int64_t cost, rfi_part_fn fn) {
  int parts = rfi_parts(c, n, cost);
  if (parts == 1) {
    fn(c, 0, n, 0);
    return;
  }
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int p = 0; p < parts; p++)
    fn(c, n / parts * p + (p < n % parts ? p : n % parts),
       n / parts * (p + 1) + (p + 1 < n % parts ? p + 1 : n % parts), p);
}

#endif
