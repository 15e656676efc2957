/* SPDX-License-Identifier: Apache-2.0
 *
 * Block formats of ggml. Layouts and rounding: ggml-common.h and ggml-quants.c of llama.cpp. Each value is computed in
 * f32 with one rounding for each operation, in the order of the reference. f16 scales are little-endian.
 */
#include "data/block_formats.h"

#include <math.h>
#include <string.h>
#include <strings.h>

static float half_at(const uint8_t *p) { return rfr_float_from_bits(RFR_F16, (uint32_t)p[0] | (uint32_t)p[1] << 8); }

static void put_half(uint8_t *p, float x) {
  const uint32_t bits = rfr_float_to_bits(RFR_F16, x);
  p[0] = (uint8_t)bits;
  p[1] = (uint8_t)(bits >> 8);
}

/* ---- plain floats ---- */

static void decode_f32(const uint8_t *b, int64_t n, float *out) { memcpy(out, b, (size_t)n * 4); }
static void encode_f32(const float *x, int64_t n, uint8_t *b) { memcpy(b, x, (size_t)n * 4); }

static void decode_f16(const uint8_t *b, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) out[i] = half_at(b + 2 * i);
}
static void encode_f16(const float *x, int64_t n, uint8_t *b) {
  for (int64_t i = 0; i < n; i++) put_half(b + 2 * i, x[i]);
}

static void decode_bf16(const uint8_t *b, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = (uint32_t)b[2 * i] << 16 | (uint32_t)b[2 * i + 1] << 24;
    memcpy(out + i, &bits, 4);
  }
}
static void encode_bf16(const float *x, int64_t n, uint8_t *b) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = rfr_float_to_bits(RFR_BF16, x[i]);
    b[2 * i] = (uint8_t)bits;
    b[2 * i + 1] = (uint8_t)(bits >> 8);
  }
}

/* ---- blocks of 32 ---- */

/* Elements 0 to 15 are the low four bits of the bytes, 16 to 31 the high four. `high`: a fifth bit of each element. */
static int nibble(const uint8_t *q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

static int high_bit(const uint8_t *q, int i) { return q[i / 8] >> (i % 8) & 1; }

static void decode_q4_0(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 18, out += 32) {
    const float d = half_at(b);
    for (int i = 0; i < 16; i++) {
      out[i] = d * (float)((b[2 + i] & 15) - 8);
      out[i + 16] = d * (float)((b[2 + i] >> 4) - 8);
    }
  }
}

static void decode_q4_1(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 20, out += 32) {
    const float d = half_at(b), m = half_at(b + 2);
    for (int i = 0; i < 16; i++) {
      out[i] = d * (float)(b[4 + i] & 15) + m;
      out[i + 16] = d * (float)(b[4 + i] >> 4) + m;
    }
  }
}

static void decode_q5_0(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 22, out += 32) {
    const float d = half_at(b);
    for (int i = 0; i < 32; i++) out[i] = d * (float)((nibble(b + 6, i) | high_bit(b + 2, i) << 4) - 16);
  }
}

static void decode_q5_1(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 24, out += 32) {
    const float d = half_at(b), m = half_at(b + 2);
    for (int i = 0; i < 32; i++) out[i] = d * (float)(nibble(b + 8, i) | high_bit(b + 4, i) << 4) + m;
  }
}

static void decode_q8_0(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 34, out += 32) {
    const float d = half_at(b);
    for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)b[2 + i] * d;
  }
}

/* The scale is computed in f32 and stored as f16; the elements are rounded with the f32 scale, away from zero. */
static void encode_q8_0(const float *x, int64_t n, uint8_t *b) {
  for (; n > 0; n--, b += 34, x += 32) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    const float d = most / 127.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    put_half(b, d);
    for (int i = 0; i < 32; i++) {
      const float q = roundf(x[i] * inverse); /* not finite if 1 / d overflows */
      b[2 + i] = (uint8_t)(int8_t)(q >= -127.0f && q <= 127.0f ? q : 0.0f);
    }
  }
}

/* The element of largest magnitude becomes -8. */
static void encode_q4_0(const float *x, int64_t n, uint8_t *b) {
  for (; n > 0; n--, b += 18, x += 32) {
    float most = 0.0f, signed_most = 0.0f;
    for (int i = 0; i < 32; i++) {
      if (fabsf(x[i]) <= most) continue;
      most = fabsf(x[i]);
      signed_most = x[i];
    }
    const float d = signed_most / -8.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    put_half(b, d);
    for (int i = 0; i < 16; i++) {
      int q[2];
      for (int k = 0; k < 2; k++) {
        const float shifted = x[i + 16 * k] * inverse + 8.5f; /* not finite if 1 / d overflows */
        q[k] = shifted < 16.0f && shifted >= 0.0f ? (int)shifted : shifted >= 16.0f ? 15 : 0;
      }
      b[2 + i] = (uint8_t)(q[0] | q[1] << 4);
    }
  }
}

/* ---- blocks of 256 ---- */

/* Scale and minimum of sub-block i of Q4_K and Q5_K: 8 of each, 6 bits each, in 12 bytes. */
static void scale_and_min(const uint8_t *s, int i, int *scale, int *min) {
  if (i < 4) {
    *scale = s[i] & 63;
    *min = s[i + 4] & 63;
  } else {
    *scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
    *min = s[i + 4] >> 4 | (s[i] >> 6) << 4;
  }
}

static void decode_q4_k(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 144, out += 256) {
    const float d = half_at(b), dmin = half_at(b + 2);
    for (int j = 0; j < 8; j++) {
      const uint8_t *q = b + 16 + j / 2 * 32;
      int scale, min;
      scale_and_min(b + 4, j, &scale, &min);
      const float ds = d * (float)scale, m = dmin * (float)min;
      for (int i = 0; i < 32; i++) out[32 * j + i] = ds * (float)(j % 2 ? q[i] >> 4 : q[i] & 15) - m;
    }
  }
}

static void decode_q5_k(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 176, out += 256) {
    const float d = half_at(b), dmin = half_at(b + 2);
    for (int j = 0; j < 8; j++) {
      const uint8_t *q = b + 48 + j / 2 * 32, *high = b + 16;
      int scale, min;
      scale_and_min(b + 4, j, &scale, &min);
      const float ds = d * (float)scale, m = dmin * (float)min;
      for (int i = 0; i < 32; i++)
        out[32 * j + i] = ds * (float)((j % 2 ? q[i] >> 4 : q[i] & 15) | (high[i] >> j & 1) << 4) - m;
    }
  }
}

/* 128 bytes of low nibbles, 64 bytes of two high bits, 16 scales of 8 bits, and the f16 scale of the block. */
static void decode_q6_k(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 210, out += 256) {
    const float d = half_at(b + 208);
    for (int j = 0; j < 8; j++) { /* 32 elements each */
      const uint8_t *low = b + j / 4 * 64 + j % 2 * 32, *high = b + 128 + j / 4 * 32;
      const int shift = j % 4 / 2 * 4;
      for (int i = 0; i < 32; i++) {
        const int q = (low[i] >> shift & 15) | (high[i] >> (2 * (j % 4)) & 3) << 4;
        const float scale = d * (float)(int8_t)b[192 + 2 * j + i / 16];
        out[32 * j + i] = scale * (float)(q - 32);
      }
    }
  }
}

/*  X(name, id, elements, bytes, dtype, decode, encode) */
#define FORMATS(X)                                                \
  X("F32", 0, 1, 4, RFR_F32, decode_f32, encode_f32)              \
  X("F16", 1, 1, 2, RFR_F16, decode_f16, encode_f16)              \
  X("BF16", 30, 1, 2, RFR_BF16, decode_bf16, encode_bf16)         \
  X("Q4_0", 2, 32, 18, RFR_DTYPE_COUNT, decode_q4_0, encode_q4_0) \
  X("Q4_1", 3, 32, 20, RFR_DTYPE_COUNT, decode_q4_1, NULL)        \
  X("Q5_0", 6, 32, 22, RFR_DTYPE_COUNT, decode_q5_0, NULL)        \
  X("Q5_1", 7, 32, 24, RFR_DTYPE_COUNT, decode_q5_1, NULL)        \
  X("Q8_0", 8, 32, 34, RFR_DTYPE_COUNT, decode_q8_0, encode_q8_0) \
  X("Q4_K", 12, 256, 144, RFR_DTYPE_COUNT, decode_q4_k, NULL)     \
  X("Q5_K", 13, 256, 176, RFR_DTYPE_COUNT, decode_q5_k, NULL)     \
  X("Q6_K", 14, 256, 210, RFR_DTYPE_COUNT, decode_q6_k, NULL)     \
  X("Q2_K", 10, 256, 84, RFR_DTYPE_COUNT, NULL, NULL)             \
  X("Q3_K", 11, 256, 110, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("IQ2_XXS", 16, 256, 66, RFR_DTYPE_COUNT, NULL, NULL)          \
  X("IQ2_XS", 17, 256, 74, RFR_DTYPE_COUNT, NULL, NULL)           \
  X("IQ3_XXS", 18, 256, 98, RFR_DTYPE_COUNT, NULL, NULL)          \
  X("IQ1_S", 19, 256, 50, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("IQ4_NL", 20, 32, 18, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("IQ3_S", 21, 256, 110, RFR_DTYPE_COUNT, NULL, NULL)           \
  X("IQ2_S", 22, 256, 82, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("IQ4_XS", 23, 256, 136, RFR_DTYPE_COUNT, NULL, NULL)          \
  X("I8", 24, 1, 1, RFR_DTYPE_COUNT, NULL, NULL)                  \
  X("I16", 25, 1, 2, RFR_DTYPE_COUNT, NULL, NULL)                 \
  X("I32", 26, 1, 4, RFR_DTYPE_COUNT, NULL, NULL)                 \
  X("I64", 27, 1, 8, RFR_DTYPE_COUNT, NULL, NULL)                 \
  X("F64", 28, 1, 8, RFR_DTYPE_COUNT, NULL, NULL)                 \
  X("IQ1_M", 29, 256, 56, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("TQ1_0", 34, 256, 54, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("TQ2_0", 35, 256, 66, RFR_DTYPE_COUNT, NULL, NULL)            \
  X("MXFP4", 39, 32, 17, RFR_DTYPE_COUNT, NULL, NULL)

#define FORMAT(name, id, elements, bytes, dtype, decode, encode) {name, id, elements, bytes, dtype, decode, encode},
static const rfi_block_format formats[] = {FORMATS(FORMAT)};
enum { COUNT = sizeof formats / sizeof formats[0] };
const char rfi_block_formats_decoded[] = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

const rfi_block_format *rfi_block_format_of(uint32_t id) {
  for (int i = 0; i < COUNT; i++)
    if (formats[i].id == id) return &formats[i];
  return NULL;
}

const rfi_block_format *rfi_block_format_named(const char *name) {
  for (int i = 0; i < COUNT; i++)
    if (strcasecmp(formats[i].name, name) == 0) return &formats[i];
  return NULL;
}
