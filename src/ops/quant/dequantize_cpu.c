/* SPDX-License-Identifier: Apache-2.0
 *
 * dequantize on the CPU: y = number of the code * scale, rounded to f32, then to y's type.
 *
 * With AVX-512 the 16 numbers of NF4 are one register, and one permutation decodes 16 codes.
 */
#include "backend/cpu/cpu.h"
#include "ops/quant/formats.h"
#include "ops/quant/scaling.h"
#include "ops/walk.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

static const float nf4[16] = {
#include "ops/quant/nf4.def"
};
static const float dynamic_signed[256] = {
#include "ops/quant/dynamic_signed.def"
};
static const float dynamic_unsigned[256] = {
#include "ops/quant/dynamic_unsigned.def"
};

enum { RUN = 16384 }; /* elements per part of the work: a multiple of every block size except a row */

typedef struct work {
  rfi_call call; /* must be the first field: the parts get a pointer to it */
  rfi_quant_layout layout;
} work;

/* Prevents the compiler from contracting the product with the following sum, so that all machines round after each
 * operation. */
static inline float rounded(float x) {
#if defined(__x86_64__)
  __asm__("" : "+x"(x));
#else
  volatile float y = x;
  x = y;
#endif
  return x;
}

static void decode_nf4(float *restrict y, const uint8_t *restrict codes, float scale, int64_t n) {
  int64_t i = 0;
#ifdef __AVX512F__
  const __m512 map = _mm512_loadu_ps(nf4), factor = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16) {
    /* each 64-bit lane has one byte: its high code goes to the low half, its low code to the high half */
    const __m512i byte = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)(codes + i / 2)));
    const __m512i index = _mm512_or_si512(_mm512_srli_epi64(byte, 4), _mm512_slli_epi64(byte, 32));
    _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_permutexvar_ps(index, map), factor));
  }
#endif
  for (; i < n; i++) y[i] = nf4[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * scale;
}

static void decode_map(float *restrict y, const uint8_t *restrict codes, const float *restrict map, float scale,
                       int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = map[codes[i]] * scale;
}

static void decode_int8(float *restrict y, const int8_t *restrict codes, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float product = (float)codes[i] * scale;
    y[i] = product * RFI_INT8_STEP;
  }
}

static void decode_fp8(float *restrict y, const uint8_t *restrict codes, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = rfi_e4m3_widen(codes[i]) * scale;
}

static float scale_of(const work *w, rfr_quant format, const uint8_t *x, int64_t block) {
  const rfi_quant_layout *l = &w->layout;
  if (format != RFR_QUANT_NF4) return ((const float *)(const void *)(x + l->scales_at))[block];
  const float *factor = (const float *)(const void *)(x + l->nested_at);
  const float offset = factor[(l->scales + RFI_NESTED - 1) / RFI_NESTED];
  return rounded(dynamic_signed[x[l->scales_at + block]] * factor[block / RFI_NESTED]) + offset;
}

/* Runs begin ... end - 1 of RUN elements each. */
static void decode_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const work *w = (const work *)c;
  const rfi_quant_layout *l = &w->layout;
  const rfr_quant format = (rfr_quant)c->attr[0].i;
  const uint8_t *x = c->in[0].data;
  const rfi_arg *y = &c->out[0];
  float buffer[RFI_BLOCK] __attribute__((aligned(64)));
  const int64_t last = end * RUN < l->n ? end * RUN : l->n;
  for (int64_t i = begin * RUN, n; i < last; i += n) {
    const int64_t block = i / l->block, next = (block + 1) * l->block;
    n = (next < last ? next : last) - i;
    n = n < RFI_BLOCK ? n : RFI_BLOCK;
    const float scale = scale_of(w, format, x, block);
    float *to = rfi_target(buffer, y, i);
    switch (format) {
      case RFR_QUANT_NF4: decode_nf4(to, x + i / 2, scale, n); break;
      case RFR_QUANT_INT8: decode_int8(to, (const int8_t *)x + i, scale, n); break;
      case RFR_QUANT_FP8: decode_fp8(to, x + i, scale, n); break;
      case RFR_QUANT_DYNAMIC8: decode_map(to, x + i, dynamic_signed, scale, n); break;
      default: decode_map(to, x + i, dynamic_unsigned, scale, n);
    }
    rfi_flush(to, y, i, n);
  }
}

static rfr_status run(const rfi_call *call) {
  const rfr_type *y = &call->out[0].type;
  const work w = {*call, rfi_quant_layout_for((rfr_quant)call->attr[0].i, y->rank, y->shape)};
  rfi_parallel(&w.call, (w.layout.n + RUN - 1) / RUN, RUN, decode_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(dequantize) = {run, NULL};
