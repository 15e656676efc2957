/* SPDX-License-Identifier: Apache-2.0
 *
 * AMX tiles and their packing; panel_gemm.c defines panels.
 *
 * Element (i, p) of an operand, i along M or N and p along K, is x[i*is + p*ps]; one of the strides is 1.
 */
#ifndef RFI_AMX_PACK_H
#define RFI_AMX_PACK_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum {
  AMX_BLOCK = 32,
  AMX_STEP = 32,
  AMX_TILE = 16 * 32, /* elements */
};

/* A compiler barrier: some compilers assume that loading a configuration or a tile reads no memory. */
static inline void amx_reads_memory(void) { __asm__ volatile("" ::: "memory"); }

/* Configures every tile with 16 rows of 64 bytes. Each thread calls begin and end around its multiplications. end
 * releases the tile state, which the operating system would otherwise save, and orders non-temporal stores. */
static inline void amx_begin(void) {
  static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
  amx_reads_memory();
  _tile_loadconfig(&config);
}
static inline void amx_end(void) {
  _tile_release();
  _mm_sfence();
}

static inline __m512 amx_widen(__mmask16 in, const uint16_t *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(in, x)), 16));
}

/* 16 x 16 elements of four bytes, transposed: rows of src have a stride of `from` bytes, of dst `to`. */
static inline void amx_transpose(void *restrict dst, int64_t to, const void *restrict src, int64_t from) {
  __m512i x[8], y[16];
#pragma GCC unroll 2
  for (int side = 0; side < 2; side++) {
    const char *at = (const char *)src + 32 * side;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { /* lanes 0 and 1 of rows r and r + 4; in the right half, lanes 2 and 3 */
      int64_t r = i < 4 ? i : i + 4;
      __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)(at + r * from)));
      x[i] = _mm512_inserti64x4(low, _mm256_loadu_si256((const void *)(at + (r + 4) * from)), 1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* y[4q + i]: lane q of rows i, i + 4, i + 8, i + 12 */
      y[8 * side + i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
      y[8 * side + 4 + i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) { /* 4 x 4 within each lane */
    __m512i a = y[4 * q], b = y[4 * q + 1], c = y[4 * q + 2], d = y[4 * q + 3];
    __m512i ab0 = _mm512_unpacklo_epi32(a, b), cd0 = _mm512_unpacklo_epi32(c, d);
    __m512i ab1 = _mm512_unpackhi_epi32(a, b), cd1 = _mm512_unpackhi_epi32(c, d);
    char *out = (char *)dst + 4 * to * q;
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(ab0, cd0));
    _mm512_storeu_si512(out + to, _mm512_unpackhi_epi64(ab0, cd0));
    _mm512_storeu_si512(out + 2 * to, _mm512_unpacklo_epi64(ab1, cd1));
    _mm512_storeu_si512(out + 3 * to, _mm512_unpackhi_epi64(ab1, cd1));
  }
}

/* Interleaves two vectors of 32 elements, from rows p and p + 1, into a row of the left tile and one of the right
 * tile. */
static inline void amx_pair(uint16_t *left, uint16_t *right, __m512i even, __m512i odd) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_or_si512(_mm512_or_si512(lane, _mm512_slli_epi32(lane, 16)), _mm512_set1_epi32(32 << 16));
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(left, _mm512_permutex2var_epi16(even, low, odd));
  _mm512_storeu_si512(right, _mm512_permutex2var_epi16(even, high, odd));
}

/* Packs B if rows of x lie along N (is == 1): two rows at a time, for all panels, in memory order. */
static inline void amx_interleave(uint16_t *restrict to, int64_t panel, const uint16_t *restrict x, int64_t n,
                                  int64_t k, int64_t ps) {
  const __m512i zero = _mm512_setzero_si512();
  for (int64_t p = 0; p < (k + 31) / 32 * 32; p += 2) {
    uint16_t *row = to + p / 32 * 2 * AMX_TILE + p % 32 * 16;
    for (int64_t j = 0; j < n; j += AMX_BLOCK, row += panel) {
      const __mmask32 in = n - j >= 32 ? 0xFFFFFFFFu : (1u << (n - j)) - 1;
      __m512i even = p < k ? _mm512_maskz_loadu_epi16(in, x + p * ps + j) : zero;
      __m512i odd = p + 1 < k ? _mm512_maskz_loadu_epi16(in, x + (p + 1) * ps + j) : zero;
      amx_pair(row, row + AMX_TILE, even, odd);
    }
  }
}

/* 16 rows along K (ps == 1) of 32 elements, not transposed; padded with zeros. */
static inline void amx_rows(uint16_t *restrict to, const uint16_t *restrict x, int64_t n, int64_t k, int64_t is) {
  const __mmask32 in = k >= 32 ? 0xFFFFFFFFu : (1u << k) - 1;
  for (int r = 0; r < 16; r++)
    _mm512_storeu_si512(to + r * 32, r < n ? _mm512_maskz_loadu_epi16(in, x + r * is) : _mm512_setzero_si512());
}

static inline void amx_pack_a(void *panels, const void *from, int64_t n, int64_t k, int64_t is, int64_t ps) {
  const int64_t panel = (k + 31) / 32 * 32 * AMX_BLOCK;
  const uint16_t *x = from;
  uint16_t *to = panels;
  uint16_t rows[AMX_TILE] __attribute__((aligned(64)));
  for (int64_t i = 0; ps == 1 && i < (n + 31) / 32 * 32; i += 16) {
    uint16_t *out = to + i / 32 * panel + i % 32 * 32;
    for (int64_t p = 0; p < k; p += 32, out += 2 * AMX_TILE) amx_rows(out, x + i * is + p, n - i, k - p, is);
  }
  if (ps == 1) return;
  amx_interleave(to, panel, x, n, k, ps); /* pack as for B, then transpose each tile */
  for (uint16_t *tile = to; tile < to + (n + 31) / 32 * panel; tile += AMX_TILE) {
    memcpy(rows, tile, sizeof rows);
    amx_transpose(tile, 64, rows, 64);
  }
}

static inline void amx_pack_b(void *panels, const void *from, int64_t n, int64_t k, int64_t is, int64_t ps) {
  const int64_t panel = (k + 31) / 32 * 32 * AMX_BLOCK;
  const uint16_t *x = from;
  uint16_t *to = panels;
  uint16_t rows[AMX_TILE] __attribute__((aligned(64)));
  if (ps != 1) {
    amx_interleave(to, panel, x, n, k, ps);
    return;
  }
  for (int64_t i = 0; i < (n + 31) / 32 * 32; i += 16) {
    uint16_t *out = to + i / 32 * panel + i % 32 * 32;
    for (int64_t p = 0; p < k; p += 32, out += 2 * AMX_TILE) {
      if (n - i >= 16 && k - p >= 32) {
        amx_transpose(out, 64, x + i * is + p, 2 * is);
      } else {
        amx_rows(rows, x + i * is + p, n - i, k - p, is);
        amx_transpose(out, 64, rows, 64);
      }
    }
  }
}

#endif
