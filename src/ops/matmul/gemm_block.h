/* SPDX-License-Identifier: Apache-2.0
 *
 * A block of a GEMM, from packing to rounding, in the scratch of one thread. The portable kernels of matmul and of
 * grouped GEMMs share it, so that both are bitwise equal.
 *
 * For each part of K it packs a strip of B (into panels of RFI_NR columns) and a block of A, both widened to f32. The
 * register tile multiplies them into an f32 block of C, which receives a sum of at most RFI_SUM_K terms at a time.
 * Added operands and the only rounding come at the end. The split of K depends only on K, so results depend on K and
 * the instruction set, not on the block's size.
 */
#ifndef RFI_GEMM_BLOCK_H
#define RFI_GEMM_BLOCK_H

#include "ops/matmul/tile.h"

enum {
  RFI_BLOCK_K = 256, /* a panel of B (32 KiB in f32 at 32 columns) stays in the L1 cache */
  /* Terms per partial sum. With n terms of random sign, partial sums of s terms have an error of sqrt(s / 2 + n / 2s)
   * units; one sum of all terms has sqrt(n / 2). */
  RFI_SUM_K = 64,
};

/* Element (i, j) is at i*rs + j*cs. */
typedef struct rfi_matrix {
  const void *data;
  rfr_dtype dtype;
  int64_t rs, cs;
} rfi_matrix;

/* Sizes of a thread's scratch in floats, each a multiple of 16. */
typedef struct rfi_scratch {
  size_t a, b, c;
  int64_t ldc; /* row stride of C: the columns of the largest block */
} rfi_scratch;

RFI_INLINE int64_t rfi_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
RFI_INLINE int64_t rfi_round_up(int64_t a, int64_t b) { return rfi_ceil_div(a, b) * b; }

/* The number of elements of K packed at a time: at most RFI_BLOCK_K. */
RFI_INLINE int64_t rfi_block_k(int64_t K) {
  int64_t blocks = K > 0 ? rfi_ceil_div(K, RFI_BLOCK_K) : 1;
  return rfi_round_up(rfi_ceil_div(K > 0 ? K : 1, blocks), 4);
}

/* For blocks of at most m x n, multiples of RFI_MR and RFI_NR, with at most block_k of K at a time. */
RFI_INLINE rfi_scratch rfi_scratch_make(int64_t m, int64_t n, int64_t block_k) {
  return (rfi_scratch){.a = (size_t)rfi_round_up(m * block_k, 16),
                       .b = (size_t)rfi_round_up(n * block_k, 16),
                       .c = (size_t)rfi_round_up(m * n, 16),
                       .ldc = n};
}
RFI_INLINE size_t rfi_scratch_floats(const rfi_scratch *s) { return s->a + s->b + s->c; }

RFI_INLINE const void *rfi_matrix_at(const rfi_matrix *x, int64_t i, int64_t j) {
  return rfi_at(x->data, x->dtype, i * x->rs + j * x->cs);
}

/* C (mr x RFI_NR) = or += A B over k steps, in partial sums of at most RFI_SUM_K terms. */
RFI_INLINE void rfi_tile_sums(int mr, int64_t k, const float *a, int by_row, const float *b, float *c, int64_t ldc,
                              int add) {
  const int64_t terms = RFI_SUM_K;
  for (int64_t p = 0; p < k; p += terms, add = 1) {
    const int64_t n = k - p < terms ? k - p : terms;
    if (by_row) rfi_tile_n(mr, n, a + p, k, b + p * RFI_NR, RFI_NR, c, ldc, add);
    else rfi_tile_t(mr, n, a + p * RFI_MR, RFI_MR, b + p * RFI_NR, RFI_NR, c, ldc, add);
  }
}

/* C (m x n) = A (m x K) B (K x n); returns C, in the scratch, with row stride ldc. */
RFI_COLD float *rfi_gemm_block(const rfi_scratch *s, const rfi_matrix *a, const rfi_matrix *b, int64_t m, int64_t n,
                               int64_t K, float *scratch) {
  float *ap = scratch, *bp = ap + s->a, *c = bp + s->b;
  const int64_t block_k = rfi_block_k(K);
  int by_row = a->cs == 1 || a->rs != 1;
  if (K == 0) memset(c, 0, (size_t)(m * s->ldc) * 4);
  for (int64_t k0 = 0; k0 < K; k0 += block_k) {
    int64_t k = K - k0 < block_k ? K - k0 : block_k;
    for (int64_t j = 0; j < n; j += RFI_NR)
      rfi_pack(bp + j * k, RFI_NR, k, n - j < RFI_NR ? n - j : RFI_NR, RFI_NR, rfi_matrix_at(b, k0, j), b->dtype, b->rs,
               b->cs);
    if (by_row) {
      rfi_pack(ap, k, m, k, k, rfi_matrix_at(a, 0, k0), a->dtype, a->rs, a->cs);
    } else {
      for (int64_t i = 0; i < m; i += RFI_MR)
        rfi_pack(ap + i * k, RFI_MR, k, m - i < RFI_MR ? m - i : RFI_MR, RFI_MR, rfi_matrix_at(a, i, k0), a->dtype,
                 a->cs, a->rs);
    }
    for (int64_t j = 0; j < n; j += RFI_NR)
      for (int64_t i = 0; i < m; i += RFI_MR) {
        int mr = m - i < RFI_MR ? (int)(m - i) : RFI_MR;
        rfi_tile_sums(mr, k, ap + i * k, by_row, bp + j * k, c + i * s->ldc + j, s->ldc, k0 > 0);
      }
  }
  return c;
}

/* row += bias */
RFI_COLD void rfi_add_bias(float *row, const void *bias, rfr_dtype dtype, int64_t n) {
  if (dtype == RFR_F32)
    for (int64_t j = 0; j < n; j++) row[j] += ((const float *)bias)[j];
  else
    for (int64_t j = 0; j < n; j++) row[j] += rfi_get(bias, dtype, j);
}

/* y = row, or y += row if `accumulate`, rounded once. */
RFI_COLD void rfi_store_row(void *y, rfr_dtype dtype, float *row, int64_t n, int accumulate) {
  if (accumulate && dtype == RFR_F32) {
    for (int64_t j = 0; j < n; j++) ((float *)y)[j] += row[j];
    return;
  }
  for (int64_t j = 0; accumulate && j < n; j++) row[j] += rfi_get(y, dtype, j);
  rfi_narrow(y, dtype, row, n);
}

#endif
