/* SPDX-License-Identifier: Apache-2.0
 *
 * The register tile of GEMMs and attention, and the packing of its operands.
 *
 * rfi_tile adds (or stores) an mr x RFI_NR block of C, mr <= RFI_MR, over k steps: each step loads one row of RFI_NR
 * columns of B as two vectors and multiplies it by mr broadcast elements of A. The block stays in registers, so a step
 * costs mr + 2 loads for 2 mr multiply-adds. The order of the sum over k is fixed: an element of C does not depend on
 * where its tile starts. The sum over k begins with zero and is added to C at the end: one sum over all of a long K
 * would round each term to the size of the sum so far.
 *
 * Operands are f32 in scratch: narrower types are widened once, during packing. Only kernel files, which are compiled
 * once per instruction set, include this header.
 */
#ifndef RFI_TILE_H
#define RFI_TILE_H

#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "ops/vec.h"

/* Two vectors of columns, and as many rows as leave registers for B and one broadcast element. */
#if defined(__AVX512F__)
enum { RFI_LANES = 16, RFI_MR = 8 };
#elif defined(__AVX__)
enum { RFI_LANES = 8, RFI_MR = 6 };
#else
enum { RFI_LANES = 4, RFI_MR = 4 };
#endif
enum { RFI_NR = 2 * RFI_LANES };

#define RFI_INLINE static inline __attribute__((always_inline, unused))
#define RFI_COLD static __attribute__((noinline, unused))

typedef float rfi_vf __attribute__((vector_size(RFI_LANES * 4), aligned(4), may_alias));
typedef int32_t rfi_vi __attribute__((vector_size(RFI_LANES * 4), aligned(4), may_alias));
typedef float rfi_v4f __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t rfi_v4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint16_t rfi_v4h __attribute__((vector_size(8), aligned(2), may_alias));

/* The index of the calling thread in its team. */
RFI_INLINE int rfi_thread(void) {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

/* Element i of an array of f32, bf16 or f16. */
RFI_INLINE float rfi_get(const void *x, rfr_dtype dtype, int64_t i) {
  if (dtype == RFR_F32) return ((const float *)x)[i];
  if (dtype == RFR_BF16) return rfi_bf16_to_f32(((const uint16_t *)x)[i]);
  return rfi_f16_to_f32(((const uint16_t *)x)[i]);
}

/* ---- rows ---- */

/* dst[i] = src[i], widened. */
RFI_COLD void rfi_widen(float *restrict dst, const void *restrict src, rfr_dtype dtype, int64_t n) {
  if (dtype == RFR_F32) {
    memcpy(dst, src, (size_t)n * 4);
  } else if (dtype == RFR_BF16) {
    const uint16_t *s = src;
    for (int64_t i = 0; i < n; i++) dst[i] = rfi_bf16_to_f32(s[i]);
  } else {
    const uint16_t *s = src;
    for (int64_t i = 0; i < n; i++) dst[i] = rfi_f16_to_f32(s[i]);
  }
}
/* dst[i] = src[i], rounded. */
RFI_COLD void rfi_narrow(void *restrict dst, rfr_dtype dtype, const float *restrict src, int64_t n) {
  if (dtype == RFR_F32) {
    memcpy(dst, src, (size_t)n * 4);
  } else if (dtype == RFR_BF16) {
    uint16_t *d = dst;
    for (int64_t i = 0; i < n; i++) d[i] = rfi_f32_to_bf16(src[i]);
  } else {
    uint16_t *d = dst;
    for (int64_t i = 0; i < n; i++) d[i] = rfi_f32_to_f16(src[i]);
  }
}
RFI_INLINE const void *rfi_at(const void *x, rfr_dtype dtype, int64_t i) {
  return (const char *)x + i * (dtype == RFR_F32 ? 4 : 2);
}

/* ---- packing ---- */

RFI_INLINE rfi_v4f rfi_load4(const void *x, int wide, int64_t i) {
  if (wide) return *(const rfi_v4f *)((const float *)x + i);
  rfi_v4u u = __builtin_convertvector(*(const rfi_v4h *)((const uint16_t *)x + i), rfi_v4u) << 16;
  return (rfi_v4f)u;
}

/* dst[r*ld + c] = src[r + c*cs]: a transpose, four by four in registers. */
RFI_INLINE void rfi_pack_transposed(float *restrict dst, int64_t ld, int64_t rows, int64_t cols, const void *src,
                                    int wide, int64_t cs) {
  rfr_dtype dtype = wide ? RFR_F32 : RFR_BF16;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      rfi_v4f x0 = rfi_load4(src, wide, r + c * cs), x1 = rfi_load4(src, wide, r + (c + 1) * cs);
      rfi_v4f x2 = rfi_load4(src, wide, r + (c + 2) * cs), x3 = rfi_load4(src, wide, r + (c + 3) * cs);
      rfi_v4f lo01 = __builtin_shufflevector(x0, x1, 0, 4, 1, 5), hi01 = __builtin_shufflevector(x0, x1, 2, 6, 3, 7);
      rfi_v4f lo23 = __builtin_shufflevector(x2, x3, 0, 4, 1, 5), hi23 = __builtin_shufflevector(x2, x3, 2, 6, 3, 7);
      *(rfi_v4f *)(dst + r * ld + c) = __builtin_shufflevector(lo01, lo23, 0, 1, 4, 5);
      *(rfi_v4f *)(dst + (r + 1) * ld + c) = __builtin_shufflevector(lo01, lo23, 2, 3, 6, 7);
      *(rfi_v4f *)(dst + (r + 2) * ld + c) = __builtin_shufflevector(hi01, hi23, 0, 1, 4, 5);
      *(rfi_v4f *)(dst + (r + 3) * ld + c) = __builtin_shufflevector(hi01, hi23, 2, 3, 6, 7);
    }
    for (; c < cols; c++)
      for (int i = 0; i < 4; i++) dst[(r + i) * ld + c] = rfi_get(src, dtype, r + i + c * cs);
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) dst[r * ld + c] = rfi_get(src, dtype, r + c * cs);
}

/* dst[r*ld + c] = src[r*rs + c*cs] for r < rows, c < cols; columns from cols to width are zero. */
RFI_COLD void rfi_pack(float *restrict dst, int64_t ld, int64_t rows, int64_t cols, int64_t width, const void *src,
                       rfr_dtype dtype, int64_t rs, int64_t cs) {
  if (cs == 1) {
    if (dtype == RFR_F32 && cols == RFI_NR) { /* the most frequent panel, without a call per row */
      for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < RFI_NR; c++) dst[r * ld + c] = ((const float *)src)[r * rs + c];
    } else {
      for (int64_t r = 0; r < rows; r++) rfi_widen(dst + r * ld, rfi_at(src, dtype, r * rs), dtype, cols);
    }
  } else if (rs == 1 && dtype == RFR_F32) {
    rfi_pack_transposed(dst, ld, rows, cols, src, 1, cs);
  } else if (rs == 1 && dtype == RFR_BF16) {
    rfi_pack_transposed(dst, ld, rows, cols, src, 0, cs);
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < cols; c++) dst[r * ld + c] = rfi_get(src, dtype, r * rs + c * cs);
  }
  for (int64_t r = 0; r < rows && cols < width; r++)
    for (int64_t c = cols; c < width; c++) dst[r * ld + c] = 0;
}

/* ---- the tile ---- */

RFI_INLINE void rfi_tile_rows(int mr, int64_t k, const float *restrict a, int64_t ars, int64_t acs,
                              const float *restrict b, int64_t ldb, float *restrict c, int64_t ldc, int add) {
  rfi_vf acc[RFI_MR][2];
#pragma GCC unroll 8
  for (int i = 0; i < mr; i++) {
    acc[i][0] = (rfi_vf){0};
    acc[i][1] = (rfi_vf){0};
  }
  for (int64_t p = 0; p < k; p++) {
    rfi_vf b0 = *(const rfi_vf *)(b + p * ldb), b1 = *(const rfi_vf *)(b + p * ldb + RFI_LANES);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
      float x = a[i * ars + p * acs];
      acc[i][0] += x * b0;
      acc[i][1] += x * b1;
    }
  }
  if (add)
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
      acc[i][0] += *(const rfi_vf *)(c + i * ldc);
      acc[i][1] += *(const rfi_vf *)(c + i * ldc + RFI_LANES);
    }
#pragma GCC unroll 8
  for (int i = 0; i < mr; i++) {
    *(rfi_vf *)(c + i * ldc) = acc[i][0];
    *(rfi_vf *)(c + i * ldc + RFI_LANES) = acc[i][1];
  }
}
RFI_INLINE void rfi_tile_switch(int mr, int64_t k, const float *a, int64_t ars, int64_t acs, const float *b,
                                int64_t ldb, float *c, int64_t ldc, int add) {
  switch (mr) {
    case 1: rfi_tile_rows(1, k, a, ars, acs, b, ldb, c, ldc, add); break;
    case 2: rfi_tile_rows(2, k, a, ars, acs, b, ldb, c, ldc, add); break;
    case 3: rfi_tile_rows(3, k, a, ars, acs, b, ldb, c, ldc, add); break;
    case 4: rfi_tile_rows(4, k, a, ars, acs, b, ldb, c, ldc, add); break;
#if defined(__AVX__)
    case 5: rfi_tile_rows(5, k, a, ars, acs, b, ldb, c, ldc, add); break;
    case 6: rfi_tile_rows(6, k, a, ars, acs, b, ldb, c, ldc, add); break;
#endif
#if defined(__AVX512F__)
    case 7: rfi_tile_rows(7, k, a, ars, acs, b, ldb, c, ldc, add); break;
    case 8: rfi_tile_rows(8, k, a, ars, acs, b, ldb, c, ldc, add); break;
#endif
    default: break;
  }
}
/* C (mr x RFI_NR) = or += A B with A by rows: element (i, p) at a[i*lda + p]. */
RFI_COLD void rfi_tile_n(int mr, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                         int64_t ldc, int add) {
  rfi_tile_switch(mr, k, a, lda, 1, b, ldb, c, ldc, add);
}
/* The same with A by columns: element (i, p) at a[p*lda + i]. */
RFI_COLD void rfi_tile_t(int mr, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                         int64_t ldc, int add) {
  rfi_tile_switch(mr, k, a, 1, lda, b, ldb, c, ldc, add);
}

#endif
