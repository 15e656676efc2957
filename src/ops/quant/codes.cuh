/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit codes with one scale per tensor: the tiles that quantize and its fused forms share.
 *
 * A block of threads has a tile of 128 x 128 elements. A source gives the elements, eight adjacent ones of a row at a
 * time: it loads them, or computes them from other tensors. Each element is rounded to the storage type and encoded
 * once; `row` is written from registers, and `col`, the transposed copy, from a tile of codes in shared memory. The
 * largest magnitude is an integer maximum in global memory, which does not depend on the order. A layout defines the
 * positions of tiles: in slices of one shape, or in groups of rows.
 */
#ifndef RFI_CODES_CUH
#define RFI_CODES_CUH

#include "backend/cuda/kernels.cuh"
#include "ops/grouped/grouped.h"
#include "ops/quant/scaled.h"

enum {
  RFI_CODES_SIDE = 128,
  RFI_CODES_THREADS = 256,
  RFI_CODES_EACH = 8, /* elements of a thread at a time */
  RFI_CODES_LANES = RFI_CODES_SIDE / RFI_CODES_EACH,
  RFI_CODES_DOWN = RFI_CODES_THREADS / RFI_CODES_LANES, /* rows of a block at a time */
  RFI_CODES_WORDS = RFI_CODES_SIDE / 4
};

/* One quantized tensor, or slices of one shape with a scale each. */
typedef struct rfi_codes {
  const float *given; /* scales; NULL: derived from the largest magnitudes, which must be complete */
  int64_t given_stride;
  uint32_t *largest;            /* largest magnitudes, initialized to zeros. NULL: not needed */
  uint8_t *row, *col;           /* (M,K) and (K,M); NULL: not needed */
  float *row_scale, *col_scale; /* NULL: not needed */
  void *wide;                   /* (M,K) in the storage type; NULL: not needed */
  rfr_dtype format;
  int pow2;
} rfi_codes;

/* Reads before the atomic: most warps find no larger magnitude, so they do not wait for each other. */
static __device__ __forceinline__ void rfi_note_largest(uint32_t *largest, uint32_t most) {
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0 && most > __ldcg(largest)) atomicMax(largest, most);
}

/* Four codes of 8 bits. */
static __device__ __forceinline__ uint32_t rfi_encode8(const float *x, float by, rfr_dtype format) {
  uint32_t q = 0;
#if __CUDA_ARCH__ >= 890
  uint16_t low, high;
  const float a0 = fabsf(x[0] * by), a1 = fabsf(x[1] * by), a2 = fabsf(x[2] * by), a3 = fabsf(x[3] * by);
  if (format == RFR_E4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(a1), "f"(a0));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(a3), "f"(a2));
    q = (uint32_t)low | (uint32_t)high << 16;
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(a1), "f"(a0));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(a3), "f"(a2));
    q = (uint32_t)low | (uint32_t)high << 16;
    q -= __vcmpeq4(q, 0x7F7F7F7Fu) & 0x01010101u; /* NaN is 0x7E */
  }
#pragma unroll
  for (int k = 0; k < 4; k++) q |= (rfi_pattern(x[k]) >> 24 & 0x80u) << (8 * k);
#else
#pragma unroll
  for (int k = 0; k < 4; k++)
    q |= (uint32_t)(format == RFR_E4M3 ? rfi_e4m3_encode(x[k], by) : rfi_e5m2_encode(x[k], by)) << (8 * k);
#endif
  return q;
}

/* Byte k of word r of x becomes byte r of word k. */
static __device__ __forceinline__ void rfi_transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
  const uint32_t c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, c, 0x5410);
  x[1] = __byte_perm(a, c, 0x7632);
  x[2] = __byte_perm(b, d, 0x5410);
  x[3] = __byte_perm(b, d, 0x7632);
}

static __device__ __forceinline__ float rfi_codes_factor(const rfi_codes &c, int64_t slice) {
  return c.given ? c.given[slice * c.given_stride]
                 : rfi_scale_of(c.largest[slice], rfi_largest(c.format), RFI_F32_LARGEST, c.pow2);
}

/* Reads eight adjacent elements, 16 bytes at a time, through the read-only cache, so that the compiler may move the
 * loads before stores. */
template <typename T> static __device__ __forceinline__ rfi_pack<T, RFI_CODES_EACH> rfi_load8(const T *from) {
  union {
    uint4 word[RFI_CODES_EACH * sizeof(T) / 16];
    rfi_pack<T, RFI_CODES_EACH> pack;
  } u;
#pragma unroll
  for (int k = 0; k < (int)(RFI_CODES_EACH * sizeof(T) / 16); k++) u.word[k] = __ldg((const uint4 *)from + k);
  return u.pack;
}

template <int PARTS> struct rfi_codes_of {
  rfi_codes part[PARTS];
  /* the last tile first, because the data that an earlier kernel accessed last is still in the L2 cache */
  bool backwards;
};

/* Writes a tile of codes, transposed, to `col`, whose lines have M elements. Word w of row i is stored at w ^ i / 4, so
 * that neither rows nor columns of words have bank conflicts. */
static __device__ __forceinline__ void rfi_write_columns(const uint32_t (&codes)[RFI_CODES_SIDE][RFI_CODES_WORDS],
                                                         uint8_t *col, int64_t M) {
  const int own = threadIdx.x % 32;
  col += own * 4;
#pragma unroll
  for (int w = threadIdx.x / 32; w < RFI_CODES_WORDS; w += RFI_CODES_THREADS / 32) {
    uint32_t q[4];
#pragma unroll
    for (int r = 0; r < 4; r++) q[r] = codes[own * 4 + r][w ^ own];
    rfi_transpose_bytes(q);
#pragma unroll
    for (int k = 0; k < 4; k++) *(uint32_t *)(col + (w * 4 + k) * M) = q[k];
  }
}

/* Writes zeros instead of a tile of codes. */
static __device__ __forceinline__ void rfi_clear_columns(uint8_t *col, int64_t M) {
  for (int e = threadIdx.x; e < RFI_CODES_SIDE * RFI_CODES_WORDS; e += RFI_CODES_THREADS)
    *(uint32_t *)(col + e / RFI_CODES_WORDS * M + e % RFI_CODES_WORDS * 4) = 0;
}

/* A tile of a slice, from row `first` of the source on. Its rows begin at line `line` of `row`; its columns, for j = 0,
 * at element `column` of `col`. Rows from `rows` on are zeros in `col`. */
typedef struct rfi_codes_tile {
  int64_t slice, first, line, column;
  int rows;
} rfi_codes_tile;

/* The layout of slices of one shape (M,K), M a multiple of 128; the grid is (tiles of a slice, slices). A layout has
 *   WHOLE             every tile has 128 rows
 *   pitch             elements of a line of `col`
 *   begin, end        the slices whose scales this block of threads writes
 *   find              the tile `down` tiles from the top; without rows, it is a tile of zeros in `col` alone */
struct rfi_codes_slices {
  enum { WHOLE = true };
  int64_t pitch;
  __device__ int64_t begin() const { return blockIdx.y; }
  __device__ int64_t end() const { return blockIdx.y + (blockIdx.x == 0); }
  __device__ void find(int64_t down, int64_t K, rfi_codes_tile *t) const {
    t->slice = blockIdx.y;
    t->first = down * RFI_CODES_SIDE;
    t->line = t->slice * pitch + t->first;
    t->column = t->slice * K * pitch + t->first;
    t->rows = RFI_CODES_SIDE;
  }
};

/* The layout of grouped_quantize with one scale for a group. The tiles are the blocks of `col`, where each group begins
 * one, so they include the gaps between groups. */
struct rfi_codes_groups {
  enum { WHOLE = false };
  const int32_t *offsets;
  int64_t groups, rows, pitch;
  __device__ int64_t begin() const { return 0; }
  __device__ int64_t end() const { return blockIdx.x == 0 ? groups : 0; }
  /* The last group that starts at or before tile `down`: starts increase, and a warp tests 32 of them at a time. */
  __device__ void find(int64_t down, int64_t, rfi_codes_tile *t) const {
    const int lane = threadIdx.x % 32;
    int64_t group = 0;
    for (int64_t n = groups, step; n > 1; n = min(step, n)) {
      step = rfi_blocks_of(n, 32);
      const int64_t g = group + lane * step;
      const bool starts =
          lane * step < n && rfi_group_start(rfi_group_begin(offsets, g, rows), g, RFI_CODES_SIDE) <= down;
      const int64_t skipped = step * max(__popc(__ballot_sync(0xffffffffu, starts)) - 1, 0);
      group += skipped, n -= skipped;
    }
    const int64_t begin = rfi_group_begin(offsets, group, rows), end = rfi_group_end(offsets, group, rows);
    const int64_t at = (down - rfi_group_start(begin, group, RFI_CODES_SIDE)) * RFI_CODES_SIDE;
    t->slice = group;
    t->first = t->line = begin + at;
    t->column = down * RFI_CODES_SIDE;
    t->rows = at < 0 ? 0 : (int)max(min(end - t->first, (int64_t)RFI_CODES_SIDE), (int64_t)0);
  }
};

/* A tile. Members of a source S, which has rows of the storage type T:
 *   S::PARTS                     tensors that it gives
 *   S::column                    what a thread keeps of its eight columns; column at(int64_t j)
 *   S::raw                       eight elements of each of its operands; raw fetch(slice, i, j)
 *   give(raw, column, y)         y[PARTS][8], as f32
 *   S::STORED                    y has values of T: rounding them again would only lose the sign of a NaN
 *   S::FLIGHT                    rows that a thread has in flight
 * CODES: encodes; else only finds the largest magnitude. */
template <typename T, class S, bool CODES, bool LARGEST, class LAYOUT>
static __global__ void __launch_bounds__(RFI_CODES_THREADS)
    rfi_codes_tiles(const __grid_constant__ S source, const __grid_constant__ rfi_codes_of<S::PARTS> to,
                    const LAYOUT layout, int64_t K) {
  enum { SIDE = RFI_CODES_SIDE, EACH = RFI_CODES_EACH, ROUNDS = SIDE / RFI_CODES_DOWN, FLIGHT = S::FLIGHT };
  __shared__ uint32_t codes[CODES ? S::PARTS : 1][SIDE][RFI_CODES_WORDS];
  if (CODES) {
    for (int64_t e = layout.begin() + threadIdx.x; e < layout.end(); e += RFI_CODES_THREADS) {
#pragma unroll
      for (int p = 0; p < S::PARTS; p++) {
        const float inverse = 1.0f / rfi_codes_factor(to.part[p], e);
        if (to.part[p].row_scale) to.part[p].row_scale[e] = inverse;
        if (to.part[p].col_scale) to.part[p].col_scale[e] = inverse;
      }
    }
  }
  const unsigned wide = (unsigned)(K / SIDE), unit = to.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t j0 = unit % wide * SIDE;
  rfi_codes_tile t;
  layout.find(unit / wide, K, &t);
  if (!LAYOUT::WHOLE && t.rows == 0) {
#pragma unroll
    for (int p = 0; p < S::PARTS; p++)
      if (CODES && to.part[p].col) rfi_clear_columns(to.part[p].col + t.column + j0 * layout.pitch, layout.pitch);
    return;
  }
  const int lane = threadIdx.x % RFI_CODES_LANES;
  const int64_t j = j0 + lane * EACH;
  const auto column = source.at(j);
  float by[S::PARTS];
  uint32_t most[S::PARTS] = {};
#pragma unroll
  for (int p = 0; p < S::PARTS; p++) by[p] = CODES ? rfi_codes_factor(to.part[p], t.slice) : 1.0f;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round += FLIGHT) {
    typename S::raw raw[FLIGHT];
    const int first = round * RFI_CODES_DOWN + threadIdx.x / RFI_CODES_LANES;
#pragma unroll
    for (int f = 0; f < FLIGHT; f++) {
      const int i = first + f * RFI_CODES_DOWN;
      raw[f] = source.fetch(t.slice, t.first + (LAYOUT::WHOLE ? i : min(i, t.rows - 1)), j);
    }
#pragma unroll
    for (int f = 0; f < FLIGHT; f++) {
      const int i = first + f * RFI_CODES_DOWN;
      const bool present = LAYOUT::WHOLE || i < t.rows;
      float v[S::PARTS][EACH] = {};
      if (present) source.give(raw[f], column, v);
#pragma unroll
      for (int p = 0; p < S::PARTS; p++) {
        const rfi_codes &c = to.part[p];
        const int64_t at = (t.line + i) * K + j;
        rfi_pack<T, EACH> narrow;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
          if constexpr (!S::STORED) {
            narrow.x[k] = rfi_narrow<T>(v[p][k]);
            v[p][k] = rfi_widen(narrow.x[k]);
          }
          if (LARGEST) most[p] = max(most[p], rfi_magnitude(v[p][k]));
        }
        if (!S::STORED && CODES && c.wide && present) {
          const rfi_pack<T, rfi_pack_width<T>> *half = (const rfi_pack<T, rfi_pack_width<T>> *)&narrow;
#pragma unroll
          for (int k = 0; k < EACH / rfi_pack_width<T>; k++)
            rfi_put((rfi_pack<T, rfi_pack_width<T>> *)((T *)c.wide + at) + k, half[k]);
        }
        if (!CODES) continue;
        const uint32_t low = rfi_encode8(v[p], by[p], c.format), high = rfi_encode8(v[p] + 4, by[p], c.format);
        if (c.row && present) *(uint2 *)(c.row + at) = make_uint2(low, high);
        codes[p][i][2 * lane ^ i / 4] = low;
        codes[p][i][(2 * lane + 1) ^ i / 4] = high;
      }
    }
  }
#pragma unroll
  for (int p = 0; p < S::PARTS; p++)
    if (LARGEST && to.part[p].largest) rfi_note_largest(to.part[p].largest + t.slice, most[p]);
  if (!CODES) return;
  __syncthreads();
#pragma unroll
  for (int p = 0; p < S::PARTS; p++)
    if (to.part[p].col) rfi_write_columns(codes[p], to.part[p].col + t.column + j0 * layout.pitch, layout.pitch);
}

struct rfi_no_column {};

/* A tensor as it is. */
template <typename T> struct rfi_source_tensor {
  enum { PARTS = 1, FLIGHT = 4, STORED = true };
  const T *x;
  int64_t batch, down; /* strides */
  typedef rfi_no_column column;
  typedef rfi_pack<T, RFI_CODES_EACH> raw;
  __device__ column at(int64_t) const { return column(); }
  __device__ raw fetch(int64_t slice, int64_t i, int64_t j) const {
    return rfi_load8(x + slice * batch + i * down + j);
  }
  __device__ void give(const raw &r, const column &, float (&y)[1][RFI_CODES_EACH]) const {
#pragma unroll
    for (int k = 0; k < RFI_CODES_EACH; k++) y[0][k] = rfi_widen(r.x[k]);
  }
};

#endif
