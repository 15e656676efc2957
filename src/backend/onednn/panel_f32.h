/* SPDX-License-Identifier: Apache-2.0
 *
 * Panels of f32, multiplied by FMA instructions; panel_gemm.c defines panels.
 *
 * For each step along K a panel of A has 16 adjacent elements, a panel of B 48. A slice of 8 rows of C
 * stays in 24 registers over all steps: a step loads three vectors of B and 8 elements of A, 11 loads
 * for 24 multiply-adds.
 *
 * Element (i, p) of an operand, i along M or N and p along K, is x[i*is + p*ps]; one of the strides is 1.
 */
#ifndef RFI_PANEL_F32_H
#define RFI_PANEL_F32_H

#include "backend/onednn/amx_pack.h"

enum {
  F32_A = 16,
  F32_SLICE = 8,
  F32_VECTORS = 3,
  F32_B = 16 * F32_VECTORS,
  F32_STEP = 16,
  F32_SUM = 64, /* terms per partial sum, as in ops/matmul/gemm_block.h: one sum of all terms has a larger error */
};

/* Up to 16 rows along K (ps == 1) of up to 16 elements, transposed; padded with zeros. */
static inline void f32_turn(float *restrict to, int64_t width, const float *restrict x, int64_t n, int64_t k,
                            int64_t is) {
  float rows[16 * 16] __attribute__((aligned(64)));
  if (n >= 16 && k >= 16) {
    amx_transpose(to, width * 4, x, is * 4);
    return;
  }
  const __mmask16 in = k >= 16 ? 0xFFFF : (__mmask16)((1u << k) - 1);
  for (int r = 0; r < 16; r++)
    _mm512_store_ps(rows + r * 16, r < n ? _mm512_maskz_loadu_ps(in, x + r * is) : _mm512_setzero_ps());
  amx_transpose(to, width * 4, rows, 64);
}

/* Panels of `width`, a multiple of 16. */
static inline void f32_pack(float *to, int64_t width, const float *x, int64_t n, int64_t k, int64_t is, int64_t ps) {
  const int64_t deep = (k + F32_STEP - 1) / F32_STEP * F32_STEP, rounded = (n + width - 1) / width * width;
  for (int64_t i = 0; ps == 1 && i < rounded; i += 16)
    for (int64_t p = 0; p < k; p += 16)
      f32_turn(to + i / width * width * deep + i % width + p * width, width, x + i * is + p, n - i, k - p, is);
  for (int64_t p = 0; ps != 1 && p < deep; p++)
    for (int64_t i = 0; i < rounded; i += 16) {
      const __mmask16 in = p >= k || n <= i ? 0 : n - i >= 16 ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
      _mm512_store_ps(to + i / width * width * deep + i % width + p * width, _mm512_maskz_loadu_ps(in, x + p * ps + i));
    }
}

static inline void f32_pack_a(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps) {
  f32_pack(to, F32_A, x, n, k, is, ps);
}
static inline void f32_pack_b(void *to, const void *x, int64_t n, int64_t k, int64_t is, int64_t ps) {
  f32_pack(to, F32_B, x, n, k, is, ps);
}

/* F32_SLICE rows of C, F32_B columns, are c = from + A B over k, or A B where `from` is NULL. The sum over k begins
 * with zero. */
static inline void f32_slice(int64_t k, const float *restrict a, const float *restrict b, const float *from, float *c) {
  __m512 sum[F32_SLICE][F32_VECTORS], x, y[F32_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < F32_SLICE; i++)
#pragma GCC unroll 3
    for (int h = 0; h < F32_VECTORS; h++) sum[i][h] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int64_t p = 0; p < k; p++, a += F32_A, b += F32_B) {
#pragma GCC unroll 3
    for (int h = 0; h < F32_VECTORS; h++) y[h] = _mm512_load_ps(b + 16 * h);
#pragma GCC unroll 8
    for (int i = 0; i < F32_SLICE; i++) {
      x = _mm512_set1_ps(a[i]);
#pragma GCC unroll 3
      for (int h = 0; h < F32_VECTORS; h++) sum[i][h] = _mm512_fmadd_ps(x, y[h], sum[i][h]);
    }
  }
  if (from)
#pragma GCC unroll 8
    for (int i = 0; i < F32_SLICE; i++)
#pragma GCC unroll 3
      for (int h = 0; h < F32_VECTORS; h++)
        sum[i][h] = _mm512_add_ps(sum[i][h], _mm512_load_ps(from + i * F32_B + 16 * h));
#pragma GCC unroll 8
  for (int i = 0; i < F32_SLICE; i++)
#pragma GCC unroll 3
    for (int h = 0; h < F32_VECTORS; h++) _mm512_store_ps(c + i * F32_B + 16 * h, sum[i][h]);
}

#endif
