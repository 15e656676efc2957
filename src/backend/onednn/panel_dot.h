/* SPDX-License-Identifier: Apache-2.0
 *
 * Panels of bf16, multiplied by AVX512-BF16, for machines without AMX; panel_gemm.c defines panels.
 *
 * An instruction adds two terms to each of 16 sums, so an entry of a panel is a pair of adjacent elements along K. For
 * each pair of steps a panel of A has 16 entries, a panel of B 48. The blocks are those of panel_f32.h: a slice of 8
 * rows of C stays in 24 registers over all steps.
 *
 * Element (i, p) of an operand, i along M or N and p along K, is x[i*is + p*ps]; one of the strides is 1.
 */
#ifndef RFI_PANEL_DOT_H
#define RFI_PANEL_DOT_H

#include "backend/onednn/panel_f32.h"

enum { DOT_STEP = 32 };

/* Up to 16 rows along K (ps == 1) of up to 32 elements, as transposed pairs; padded with zeros. */
static inline void dot_turn(uint16_t *restrict to, int64_t width, const uint16_t *restrict x, int64_t n, int64_t k,
                            int64_t is) {
  uint16_t rows[AMX_TILE] __attribute__((aligned(64)));
  if (n >= 16 && k >= DOT_STEP) {
    amx_transpose(to, width * 4, x, is * 2);
    return;
  }
  amx_rows(rows, x, n, k, is);
  amx_transpose(to, width * 4, rows, 64);
}

/* Row p of 32 elements from i on; zeros outside the operand. */
static inline __m512i dot_row(const uint16_t *x, int64_t i, int64_t p, int64_t n, int64_t k, int64_t ps) {
  const __mmask32 in = p >= k || i >= n ? 0 : n - i >= 32 ? 0xFFFFFFFFu : (1u << (n - i)) - 1;
  return _mm512_maskz_loadu_epi16(in, x + (in ? p * ps + i : 0));
}

/* Panels of `width`, a multiple of 16. */
static inline void dot_pack(uint16_t *to, int64_t width, const uint16_t *x, int64_t n, int64_t k, int64_t is,
                            int64_t ps) {
  const int64_t deep = (k + DOT_STEP - 1) / DOT_STEP * DOT_STEP, rounded = (n + width - 1) / width * width;
  for (int64_t i = 0; ps == 1 && i < rounded; i += 16)
    for (int64_t p = 0; p < k; p += DOT_STEP)
      dot_turn(to + i / width * width * deep + i % width * 2 + p * width, width, x + i * is + p, n - i, k - p, is);
  for (int64_t p = 0; ps != 1 && p < deep; p += 2)
    for (int64_t i = 0; i < rounded; i += 32) {
      uint16_t beyond[32] __attribute__((aligned(64))); /* the right half of the last 16 columns */
      uint16_t *left = to + i / width * width * deep + i % width * 2 + p * width;
      uint16_t *right =
          i + 16 < rounded ? to + (i + 16) / width * width * deep + (i + 16) % width * 2 + p * width : beyond;
      amx_pair(left, right, dot_row(x, i, p, n, k, ps), dot_row(x, i, p + 1, n, k, ps));
    }
}

static inline void dot_pack_a(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps) {
  dot_pack(to, F32_A, x, n, k, is, ps);
}
static inline void dot_pack_b(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps) {
  dot_pack(to, F32_B, x, n, k, is, ps);
}

/* F32_SLICE rows of C, F32_B columns, are c = from + A B over k, or A B where `from` is NULL. */
static inline void dot_slice(int64_t k, const uint32_t *restrict a, const __m512i *restrict b, const float *from,
                             float *c) {
  __m512 sum[F32_SLICE][F32_VECTORS];
  __m512bh x, y[F32_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < F32_SLICE; i++)
#pragma GCC unroll 3
    for (int h = 0; h < F32_VECTORS; h++)
      sum[i][h] = from ? _mm512_load_ps(from + i * F32_B + 16 * h) : _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int64_t p = 0; p < k; p += 2, a += F32_A, b += F32_VECTORS) {
#pragma GCC unroll 3
    for (int h = 0; h < F32_VECTORS; h++) y[h] = (__m512bh)_mm512_load_si512(b + h);
#pragma GCC unroll 8
    for (int i = 0; i < F32_SLICE; i++) {
      x = (__m512bh)_mm512_set1_epi32((int)a[i]);
#pragma GCC unroll 3
      for (int h = 0; h < F32_VECTORS; h++) sum[i][h] = _mm512_dpbf16_ps(sum[i][h], x, y[h]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < F32_SLICE; i++)
#pragma GCC unroll 3
    for (int h = 0; h < F32_VECTORS; h++) _mm512_store_ps(c + i * F32_B + 16 * h, sum[i][h]);
}

#endif
