/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize and grouped_quantize on a GPU, bitwise equal to the CPU's kernel (scaling.h).
 *
 *   amax      the largest magnitude of each slice whose scale follows from the slice, by an integer maximum in global
 *             memory, which does not depend on the order
 *   tiles     full tiles with one scale for a slice and codes of 8 bits (codes.cuh). If the scale is given, the largest
 *             magnitude is found on the way
 *   blocks    full tiles with a scale for each 128 elements of a row or column, or for 128 x 128
 *   convert   everything else: a block of threads loads 128 x 128 elements into shared memory once and writes both
 *             results from there: `row` straight from registers, `col` through a transposed tile of codes. A block of
 *             scaling never crosses such a tile, because a tile begins where a slice or a group does.
 *   clear     grouped: zeros after the last row, and between the groups of `col` where the tiles leave them
 */
#include <type_traits>

#include "backend/cuda/kernels.cuh"
#include "ops/grouped/grouped.h"
#include "ops/quant/codes.cuh"
#include "ops/quant/scaled.h"

enum { SIDE = 128, THREADS = 256, RUN = 16, RUNS = SIDE / RUN, CODES = SIDE + 4 /* bytes of a line of codes */ };

typedef struct plan {
  const void *x;
  int64_t batch, down, across; /* strides of x */
  int64_t slices, M, K;
  const int32_t *offsets;         /* NULL: not grouped */
  int64_t col_row;                /* elements of a line of the result col */
  int64_t row_scales, col_scales; /* per line */
  const float *given;             /* NULL: none */
  int64_t given_stride;
  const int64_t *step; /* NULL: no random numbers */
  int64_t step_stride;
  const int32_t *microbatch_at;
  uint32_t microbatch, site;
  uint64_t stream;
  rfr_dtype format, scale;
  uint32_t overflow;
  int rows, pow2, hadamard;
  uint32_t *found; /* (2, slices): of x, of x transformed */
  uint8_t *row, *col;
  void *row_scale, *col_scale;
  float *row_global, *col_global, *amax;
  int64_t tiles, tiles_k;
} plan;

typedef struct tile {
  int64_t slice, at;     /* offset in x */
  int64_t i0, j0, line;  /* within the slice; `line`: of the row result */
  int64_t col_at;        /* column in a line of col */
  int rows, cols, write; /* write: the columns of col that this tile writes, including zeros at the end of a group */
} tile;

/* The group of rows that contains tile *down, counted from the top; *down becomes the tile's number in the group. Each
 * warp tests 32 groups at a time. */
static __device__ bool find_group(const int32_t *offsets, int64_t groups, int64_t rows, int64_t *down, int64_t *group) {
  const int lane = threadIdx.x % 32;
  for (int64_t first = 0; first < groups; first += 32) {
    const int64_t g = first + lane;
    int64_t own = 0;
    if (g < groups) own = rfi_blocks_of(rfi_group_end(offsets, g, rows) - rfi_group_begin(offsets, g, rows), SIDE);
    int64_t sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    const unsigned has = __ballot_sync(0xffffffffu, *down < sum);
    if (has) {
      const int at = __ffs((int)has) - 1;
      *group = first + at;
      *down -= __shfl_sync(0xffffffffu, sum - own, at);
      return true;
    }
    *down -= __shfl_sync(0xffffffffu, sum, 31);
  }
  return false;
}

static __device__ bool find(const plan &p, int64_t unit, tile *t) {
  int64_t down = unit / p.tiles_k;
  t->j0 = unit % p.tiles_k * SIDE;
  t->cols = (int)min((int64_t)SIDE, p.K - t->j0);
  if (!p.offsets) {
    const int64_t each = rfi_blocks_of(p.M, SIDE);
    t->slice = down / each;
    t->i0 = down % each * SIDE;
    t->line = t->slice * p.M + t->i0;
    t->rows = t->write = (int)min((int64_t)SIDE, p.M - t->i0);
    t->col_at = t->i0;
    t->at = t->slice * p.batch + t->i0 * p.down + t->j0 * p.across;
    return true;
  }
  int64_t g;
  if (!find_group(p.offsets, p.slices, p.M, &down, &g)) return false;
  const int64_t begin = rfi_group_begin(p.offsets, g, p.M), rows = rfi_group_end(p.offsets, g, p.M) - begin;
  const int64_t block = p.rows == 0 ? RFI_TENSOR_BLOCK : p.col_row / p.col_scales;
  t->slice = g;
  t->i0 = down * SIDE;
  t->line = begin + t->i0;
  t->rows = (int)min((int64_t)SIDE, rows - t->i0);
  t->write = (int)(rfi_blocks_of(t->rows, block) * block);
  t->col_at = rfi_group_start(begin, g, block) * block + t->i0;
  t->at = t->line * p.down + t->j0 * p.across;
  return true;
}

/* The line of col that a tile's first column becomes. */
static __device__ int64_t col_line(const plan &p, const tile &t) { return t.slice * (p.offsets ? 0 : p.K) + t.j0; }

/* Calls put(i, j, pack) for packs of PACK elements along K of the tile; elements outside the tensor are zeros. */
template <typename T, class PUT>
static __device__ __forceinline__ void load(const plan &p, const tile &t, const PUT &put) {
  constexpr int P = rfi_pack_width<T>;
  const T *x = (const T *)p.x + t.at;
  const bool packed = p.across == 1 && p.down % P == 0 && (uintptr_t)x % 16 == 0 && t.cols == SIDE;
  if (packed) {
#pragma unroll 4
    for (int e = threadIdx.x; e < SIDE * SIDE / P; e += THREADS) {
      const int i = e / (SIDE / P), j = e % (SIDE / P) * P;
      rfi_pack<T, P> v = {};
      if (i < t.rows) v = *(const rfi_pack<T, P> *)(x + i * p.down + j);
      put(i, j, v);
    }
    return;
  }
  const bool by_row = p.across == 1 || p.down != 1;
  for (int e = threadIdx.x; e < SIDE * SIDE; e += THREADS) {
    const int i = by_row ? e / SIDE : e % SIDE, j = by_row ? e % SIDE : e / SIDE;
    rfi_pack<T, 1> v = {};
    if (i < t.rows && j < t.cols) v.x[0] = x[i * p.down + j * p.across];
    put(i, j, v);
  }
}

/* ---- the largest magnitude of a slice ---- */

template <typename T> static __global__ void __launch_bounds__(THREADS) amax_tiles(const plan p) {
  tile t;
  uint32_t most = 0;
  if (!find(p, blockIdx.x, &t)) return;
  load<T>(p, t, [&](int, int, const auto &v) {
    for (int k = 0; k < (int)(sizeof v / sizeof v.x[0]); k++) most = max(most, rfi_magnitude(rfi_widen(v.x[k])));
  });
  rfi_note_largest(p.found + t.slice, most);
}

/* Of x transformed: a thread has 16 rows of a column. */
template <typename T> static __global__ void __launch_bounds__(THREADS) amax_transformed(const plan p) {
  tile t;
  uint32_t most = 0;
  if (!find(p, blockIdx.x, &t)) return;
  for (int e = threadIdx.x; e < SIDE * RUNS; e += THREADS) {
    const int j = e % SIDE, i0 = e / SIDE * RUN;
    float v[RUN];
    if (j >= t.cols || i0 >= t.rows) continue;
#pragma unroll
    for (int i = 0; i < RUN; i++)
      v[i] = i0 + i < t.rows ? rfi_widen(((const T *)p.x)[t.at + (i0 + i) * p.down + j * p.across]) : 0.0f;
    rfi_hadamard(v);
#pragma unroll
    for (int i = 0; i < RUN; i++) most = max(most, rfi_magnitude(v[i]));
  }
  rfi_note_largest(p.found + p.slices + t.slice, most);
}

/* Computes the scales of slices, one thread per slice. */
static __device__ float slice_factor(const plan &p, int64_t slice, bool transformed) {
  if (p.scale == RFR_E4M3) return rfi_global_of(p.found[slice + (transformed ? p.slices : 0)]);
  if (p.rows != 0) return 1.0f;
  return p.given ? p.given[slice * p.given_stride]
                 : rfi_scale_of(p.found[slice], rfi_largest(p.format), RFI_F32_LARGEST, p.pow2);
}

static __global__ void finish_slices(const plan p) {
  const int64_t s = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (s >= p.slices) return;
  const bool global = p.scale == RFR_E4M3;
  const float row = slice_factor(p, s, false), col = slice_factor(p, s, p.hadamard);
  if (p.amax) p.amax[s] = rfi_number(p.found[s]);
  if (p.row_global) p.row_global[s] = global ? 1.0f / row : 1.0f;
  if (p.col_global) p.col_global[s] = global ? 1.0f / col : 1.0f;
  if (p.rows == 0 && p.row_scale) ((float *)p.row_scale)[s] = 1.0f / row;
  if (p.rows == 0 && p.col_scale) ((float *)p.col_scale)[s] = 1.0f / col;
}

/* ---- codes ---- */

static __device__ rfi_rounding rounding_of(const plan &p) {
  rfi_rounding r = {0, 0, p.site, p.microbatch};
  if (!p.step) return r;
  r.key = rfi_stream_key((uint64_t)p.step[2 * p.step_stride], p.stream);
  r.attempted = (uint64_t)p.step[0];
  if (p.microbatch_at) r.microbatch = *p.microbatch_at > 0 ? (uint32_t)*p.microbatch_at : 0;
  return r;
}

/* n <= 8 codes of 4 bits, of elements e, e + step ... */
static __device__ __forceinline__ uint32_t encode4(const float *x, float by, int n, const plan &p,
                                                   const rfi_rounding &random, int64_t e, int64_t step, int col) {
  uint32_t q = 0;
#pragma unroll
  for (int k = 0; k < n; k++) {
    const float v = x[k] * by;
    const uint32_t code = p.step ? rfi_e2m1_narrow_random(v, rfi_rounding_bits(&random, (uint64_t)(e + k * step), col))
                                 : rfi_e2m1_narrow(v);
    q |= code << (4 * k);
  }
  return q;
}

static __device__ rfi_block_scale block_scale(const plan &p, uint32_t amax, float global) {
  return rfi_block_scale_of(amax, p.scale, p.format, p.overflow, p.pow2, global);
}

static __device__ void store_scale(const plan &p, void *to, int64_t at, const rfi_block_scale &s) {
  if (!to) return;
  if (p.scale == RFR_F32) ((float *)to)[at] = s.inverse;
  else ((uint8_t *)to)[at] = s.stored;
}

/* ---- convert ---- */

template <typename T> struct shared_tile {
  static constexpr int PITCH = SIDE + 16 / (int)sizeof(T);
  alignas(16) T x[SIDE][PITCH];
  alignas(16) uint8_t q[SIDE][CODES]; /* col's codes: a line per column of x */
  uint32_t square[RUNS][RUNS];        /* largest magnitudes of 16 x 16 elements */
  uint32_t half[2][SIDE];
};

/* Finds the largest magnitude of each square of p.rows, and stores it for every 16 x 16 block in it. */
template <typename T> static __device__ void find_squares(shared_tile<T> &s, int n) {
  for (int r = threadIdx.x / SIDE; r < RUNS; r += THREADS / SIDE) {
    const int j = threadIdx.x % SIDE;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < RUN; i++) most = max(most, rfi_magnitude(rfi_widen(s.x[r * RUN + i][j])));
    for (int d = 1; d < RUN; d *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    if (j % RUN == 0) s.square[r][j / RUN] = most;
  }
  __syncthreads();
  const int i = threadIdx.x / RUNS, j = threadIdx.x % RUNS;
  uint32_t most = 0;
  for (int a = 0; i < RUNS && a < n; a++)
    for (int b = 0; b < n; b++) most = max(most, s.square[i / n * n + a][j / n * n + b]);
  __syncthreads();
  if (i < RUNS) s.square[i][j] = most;
  __syncthreads();
}

/* A lane has 8 elements of a row; 16 lanes have a row. */
template <typename T, int BLOCK>
static __device__ __forceinline__ void write_rows(const plan &p, const tile &t, const shared_tile<T> &s, float factor,
                                                  const rfi_rounding &random) {
  enum { EACH = 8, LANES = SIDE / EACH };
  const int lane = threadIdx.x % LANES, j = lane * EACH;
  for (int i = threadIdx.x / LANES; i < SIDE; i += THREADS / LANES) {
    const int64_t line = t.line + i, at = line * p.K + t.j0 + j;
    float v[EACH], by = factor;
#pragma unroll
    for (int k = 0; k < EACH; k++) v[k] = rfi_widen(s.x[i][j + k]);
    if (BLOCK > 0) {
      uint32_t most = 0;
#pragma unroll
      for (int k = 0; k < EACH; k++) most = max(most, rfi_magnitude(v[k]));
#pragma unroll
      for (int d = 1; d < BLOCK / EACH; d *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
      if (p.rows > 1) most = s.square[i / RUN][j / RUN];
      const rfi_block_scale scale = block_scale(p, most, factor);
      by = scale.by;
      const bool once = p.scale == RFR_F32 && p.rows > 1;
      const int64_t to = once ? (t.slice * rfi_blocks_of(p.M, SIDE) + t.i0 / SIDE) * p.row_scales + t.j0 / SIDE
                              : line * p.row_scales + (t.j0 + j) / (BLOCK ? BLOCK : 1);
      if (i < t.rows && j < t.cols && j % (BLOCK ? BLOCK : 1) == 0 && (!once || i == 0))
        store_scale(p, p.row_scale, to, scale);
    }
    const int n = min(t.cols - j, (int)EACH);
    if (!p.row || i >= t.rows || n <= 0) continue;
    if (BLOCK == 16) {
      const uint32_t q = encode4(v, by, EACH, p, random, at, 1, 0);
      uint8_t *to = p.row + at / 2;
      if (n == EACH && (uintptr_t)to % 4 == 0) *(uint32_t *)to = q;
      else
        for (int k = 0; k < n / 2; k++) to[k] = (uint8_t)(q >> (8 * k));
    } else {
      const uint32_t low = rfi_encode8(v, by, p.format), high = rfi_encode8(v + 4, by, p.format);
      uint8_t *to = p.row + at;
      if (n == EACH && (uintptr_t)to % 8 == 0) *(uint2 *)to = make_uint2(low, high);
      else
        for (int k = 0; k < n; k++) to[k] = (uint8_t)((k < 4 ? low : high) >> (8 * (k % 4)));
    }
  }
}

template <typename T>
static __device__ __forceinline__ void read_run(const shared_tile<T> &s, int i, int j, bool hadamard, float *v) {
#pragma unroll
  for (int k = 0; k < RUN; k++) v[k] = rfi_widen(s.x[i + k][j]);
  if (hadamard) rfi_hadamard(v);
}

/* A thread has 64 rows of a column. */
template <typename T, int BLOCK>
static __device__ __forceinline__ void encode_columns(const plan &p, const tile &t, shared_tile<T> &s, float factor,
                                                      const rfi_rounding &random) {
  enum { EACH = SIDE * SIDE / THREADS, HAS = EACH / RUN };
  const int j = threadIdx.x % SIDE, half = threadIdx.x / SIDE, i0 = half * EACH;
  float v[RUN], by[HAS];
  uint32_t most[HAS];
#pragma unroll
  for (int r = 0; r < HAS; r++) by[r] = factor, most[r] = 0;
  if (BLOCK > 0) {
    const bool once = p.scale == RFR_F32 && p.rows > 1;
#pragma unroll
    for (int r = 0; r < HAS; r++) {
      if (p.rows > 1) {
        most[r] = s.square[i0 / RUN + r][j / RUN];
        continue;
      }
      read_run(s, i0 + r * RUN, j, p.hadamard, v);
#pragma unroll
      for (int k = 0; k < RUN; k++) most[r] = max(most[r], rfi_magnitude(v[k]));
    }
    if (BLOCK == 32) {
#pragma unroll
      for (int r = 0; r < HAS; r += 2) most[r] = most[r + 1] = max(most[r], most[r + 1]);
    }
    if (BLOCK == 128) {
      s.half[half][j] = max(max(most[0], most[1]), max(most[2], most[3]));
      __syncthreads();
#pragma unroll
      for (int r = 0; r < HAS; r++) most[r] = max(s.half[0][j], s.half[1][j]);
    }
#pragma unroll
    for (int r = 0; r < HAS; r++) {
      const int i = i0 + r * RUN, block = BLOCK ? BLOCK : 1;
      const rfi_block_scale scale = block_scale(p, most[r], factor);
      by[r] = scale.by;
      const int64_t line = col_line(p, t) + j;
      const int64_t to = once ? (t.slice * rfi_blocks_of(p.K, SIDE) + t.j0 / SIDE) * p.col_scales + t.i0 / SIDE
                              : line * p.col_scales + (t.col_at + i) / block;
      if (j < t.cols && i < t.rows && i % block == 0 && (!once || j == 0)) store_scale(p, p.col_scale, to, scale);
    }
  }
  if (!p.col) return;
#pragma unroll
  for (int r = 0; r < HAS; r++) {
    const int i = i0 + r * RUN;
    read_run(s, i, j, p.hadamard, v);
    if (BLOCK == 16) {
      const int64_t e = (t.line + i) * p.K + t.j0 + j;
      uint32_t *to = (uint32_t *)&s.q[j][i / 2];
      to[0] = encode4(v, by[r], 8, p, random, e, p.K, 1);
      to[1] = encode4(v + 8, by[r], 8, p, random, e + 8 * p.K, p.K, 1);
    } else {
      uint32_t *to = (uint32_t *)&s.q[j][i];
#pragma unroll
      for (int k = 0; k < 4; k++) to[k] = rfi_encode8(v + 4 * k, by[r], p.format);
    }
  }
}

/* Adjacent lanes write adjacent words of a line. */
static __device__ void write_columns(const plan &p, const tile &t, const uint8_t (*q)[CODES], bool four) {
  const int bytes = four ? t.write / 2 : t.write;
  const int64_t base = col_line(p, t) * p.col_row + t.col_at;
  for (int e = threadIdx.x; e < SIDE * SIDE / 4; e += THREADS) {
    const int j = e / (SIDE / 4), k = e % (SIDE / 4) * 4;
    if (j >= t.cols || k >= bytes) continue;
    uint8_t *to = p.col + (base + j * p.col_row) / (four ? 2 : 1) + k;
    if (k + 4 <= bytes && (uintptr_t)to % 4 == 0) *(uint32_t *)to = *(const uint32_t *)&q[j][k];
    else
      for (int b = 0; b < 4 && k + b < bytes; b++) to[b] = q[j][k + b];
  }
}

template <typename T, int BLOCK> static __global__ void __launch_bounds__(THREADS) convert(const plan p) {
  extern __shared__ __align__(16) unsigned char memory[];
  shared_tile<T> &s = *(shared_tile<T> *)memory;
  tile t;
  if (!find(p, blockIdx.x, &t)) return;
  const rfi_rounding random = rounding_of(p);
  const float row = slice_factor(p, t.slice, false), col = slice_factor(p, t.slice, p.hadamard);
  load<T>(p, t, [&](int i, int j, const auto &v) {
    using pack = typename std::remove_cv<typename std::remove_reference<decltype(v)>::type>::type;
    *(pack *)&s.x[i][j] = v;
  });
  __syncthreads();
  if (BLOCK > 0 && p.rows > 1) find_squares(s, p.rows / RUN);
  if (p.row || (BLOCK > 0 && p.row_scale)) write_rows<T, BLOCK>(p, t, s, row, random);
  if (!p.col && !(BLOCK > 0 && p.col_scale)) return;
  encode_columns<T, BLOCK>(p, t, s, col, random);
  __syncthreads();
  if (p.col) write_columns(p, t, s.q, BLOCK == 16);
}

/* ---- blocks of 128, full tiles ---- */

/* x times a factor > 0, with the sign of x even if x is NaN. */
static __device__ __forceinline__ float scaled(float x, float by) {
  return __uint_as_float(rfi_magnitude(x * by) | (rfi_pattern(x) & 0x80000000u));
}

/* A tile stays in registers from its largest magnitudes to its codes. SQUARE: one scale for the tile, else one for each
 * row in `row` and one for each column in `col`. */
template <typename T, bool SQUARE> static __global__ void __launch_bounds__(THREADS) convert_blocks(const plan p) {
  enum {
    EACH = RFI_CODES_EACH,
    LANES = RFI_CODES_LANES,
    DOWN = RFI_CODES_DOWN,
    ROUNDS = SIDE / DOWN,
    WARPS = THREADS / 32
  };
  __shared__ uint32_t codes[SIDE][RFI_CODES_WORDS], largest[WARPS][SIDE];
  __shared__ float factor[SIDE];
  tile t;
  if (!find(p, blockIdx.x, &t)) return;
  const int lane = threadIdx.x % LANES, down = threadIdx.x / LANES, j = lane * EACH, warp = threadIdx.x / 32;
  const T *x = (const T *)p.x + t.at + j;
  uint8_t *row = p.row ? p.row + (t.line + down) * p.K + t.j0 + j : NULL;
  rfi_pack<T, EACH> v[ROUNDS] = {};
  uint32_t most[EACH] = {};
#pragma unroll
  for (int r = 0; r < ROUNDS; r++)
    if (r * DOWN + down < t.rows) v[r] = rfi_load8(x + (r * DOWN + down) * p.down);
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    uint32_t of_row = 0;
    float f[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      f[k] = rfi_widen(v[r].x[k]);
      of_row = max(of_row, rfi_magnitude(f[k]));
      most[k] = max(most[k], rfi_magnitude(f[k]));
    }
    if constexpr (!SQUARE) {
#pragma unroll
      for (int d = 1; d < LANES; d *= 2) of_row = max(of_row, __shfl_xor_sync(0xffffffffu, of_row, d));
      if (r * DOWN + down >= t.rows) continue;
      const rfi_block_scale s = block_scale(p, of_row, 1.0f);
      if (lane == 0) store_scale(p, p.row_scale, (t.line + r * DOWN + down) * p.row_scales + t.j0 / SIDE, s);
      if (row)
        *(uint2 *)(row + r * DOWN * p.K) =
            make_uint2(rfi_encode8(f, s.by, p.format), rfi_encode8(f + 4, s.by, p.format));
    }
  }
#pragma unroll
  for (int k = 0; k < EACH; k++) {
    most[k] = max(most[k], __shfl_xor_sync(0xffffffffu, most[k], LANES));
    if (threadIdx.x % 32 < LANES) largest[warp][j + k] = most[k];
  }
  __syncthreads();
  if (threadIdx.x < SIDE) {
    uint32_t of_column = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) of_column = max(of_column, largest[w][threadIdx.x]);
    if (SQUARE) {
      of_column = __reduce_max_sync(0xffffffffu, of_column);
      if (threadIdx.x % 32 == 0) largest[0][warp] = of_column;
    } else {
      const rfi_block_scale s = block_scale(p, of_column, 1.0f);
      store_scale(p, p.col_scale, (col_line(p, t) + threadIdx.x) * p.col_scales + t.col_at / SIDE, s);
      factor[threadIdx.x] = s.by;
    }
  }
  __syncthreads();
  float by[EACH];
  if (SQUARE) {
    const rfi_block_scale s =
        block_scale(p, max(max(largest[0][0], largest[0][1]), max(largest[0][2], largest[0][3])), 1.0f);
    if (threadIdx.x == 0) {
      store_scale(p, p.row_scale, (t.slice * (p.M / SIDE) + t.i0 / SIDE) * p.row_scales + t.j0 / SIDE, s);
      store_scale(p, p.col_scale, (t.slice * (p.K / SIDE) + t.j0 / SIDE) * p.col_scales + t.i0 / SIDE, s);
    }
    by[0] = s.by;
  } else {
#pragma unroll
    for (int k = 0; k < EACH; k++) by[k] = factor[j + k];
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int i = r * DOWN + down;
    float f[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) f[k] = SQUARE ? rfi_widen(v[r].x[k]) : scaled(rfi_widen(v[r].x[k]), by[k]);
    const float rest = SQUARE ? by[0] : 1.0f;
    const uint32_t low = rfi_encode8(f, rest, p.format), high = rfi_encode8(f + 4, rest, p.format);
    if (SQUARE && row) *(uint2 *)(row + r * DOWN * p.K) = make_uint2(low, high);
    codes[i][2 * lane ^ i / 4] = low;
    codes[i][(2 * lane + 1) ^ i / 4] = high;
  }
  if (!p.col) return;
  __syncthreads();
  rfi_write_columns(codes, p.col + col_line(p, t) * p.col_row + t.col_at, p.col_row);
}

/* ---- clear ---- */

/* Zeroes lines 0 ... K - 1 of y between the groups, in columns; a block has `each` bytes. */
static __global__ void __launch_bounds__(THREADS) clear_gaps(const plan p, uint8_t *y, int64_t block, int64_t each) {
  const int64_t g = blockIdx.y, all = p.col_row / block;
  int64_t from = 0, to = all;
  if (g > 0) {
    const int64_t begin = rfi_group_begin(p.offsets, g - 1, p.M), rows = rfi_group_end(p.offsets, g - 1, p.M) - begin;
    from = rfi_group_start(begin, g - 1, block) + rfi_blocks_of(rows, block);
  }
  if (g < p.slices) to = rfi_group_start(rfi_group_begin(p.offsets, g, p.M), g, block);
  if (each % 16 == 0) {
    uint4 *line = (uint4 *)y;
    for (int64_t j = blockIdx.x; j < p.K; j += gridDim.x)
      for (int64_t b = from * (each / 16) + threadIdx.x; b < to * (each / 16); b += THREADS)
        line[j * all * (each / 16) + b] = make_uint4(0, 0, 0, 0);
    return;
  }
  for (int64_t j = blockIdx.x; j < p.K; j += gridDim.x)
    for (int64_t b = from * each + threadIdx.x; b < to * each; b += THREADS) y[j * all * each + b] = 0;
}

/* Zeroes the rows before the first and after the last group. */
static __global__ void __launch_bounds__(THREADS) clear_rows(const plan p, uint8_t *y, int64_t bytes) {
  const int64_t first = rfi_group_begin(p.offsets, 0, p.M) * bytes;
  const int64_t last = rfi_group_begin(p.offsets, p.slices, p.M) * bytes, n = p.M * bytes;
  const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, threads = (int64_t)gridDim.x * THREADS;
  for (int64_t b = thread; b < first; b += threads) y[b] = 0;
  for (int64_t b = last + thread; b < n; b += threads) y[b] = 0;
}

/* ---- launch ---- */

template <typename T, int BLOCK> static rfr_status launch_convert(const plan &p, cudaStream_t stream) {
  const int bytes = (int)sizeof(shared_tile<T>);
  cudaFuncSetAttribute(convert<T, BLOCK>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  convert<T, BLOCK><<<(unsigned)p.tiles, THREADS, bytes, stream>>>(p);
  return RFR_OK;
}

/* Whether full tiles support the call. The last tile of a group may have fewer rows; col has zeros after them. */
template <typename T> static bool is_full(const plan &p, int block) {
  return (block == 0 || (block == SIDE && sizeof(T) == 2)) && !p.hadamard && p.tiles > 0 &&
         (p.offsets || p.M % SIDE == 0) && p.K % SIDE == 0 && p.across == 1 && p.down % 8 == 0 && p.batch % 8 == 0 &&
         (uintptr_t)p.x % 16 == 0 && (uintptr_t)p.row % 8 == 0 && (uintptr_t)p.col % 4 == 0 && (p.row || p.col) &&
         p.slices > 0 && p.slices <= UINT16_MAX;
}

template <typename T, class LAYOUT>
static void launch_full(const plan &p, const LAYOUT &layout, const dim3 &tiles, bool needs_amax, cudaStream_t stream) {
  using S = rfi_source_tensor<T>;
  const S source = {(const T *)p.x, p.batch, p.down};
  rfi_codes_of<1> to = {};
  rfi_codes *c = &to.part[0];
  c->given = p.given, c->given_stride = p.given_stride;
  c->largest = needs_amax ? p.amax ? (uint32_t *)p.amax : p.found : NULL;
  c->row = p.row, c->col = p.col;
  c->row_scale = (float *)p.row_scale, c->col_scale = (float *)p.col_scale;
  c->format = p.format, c->pow2 = p.pow2;
  if (needs_amax) cudaMemsetAsync(c->largest, 0, sizeof(uint32_t) * (size_t)p.slices, stream);
  if (needs_amax && p.given) {
    rfi_codes_tiles<T, S, true, true><<<tiles, THREADS, 0, stream>>>(source, to, layout, p.K);
    return;
  }
  if (needs_amax) rfi_codes_tiles<T, S, false, true><<<tiles, THREADS, 0, stream>>>(source, to, layout, p.K);
  to.backwards = needs_amax;
  rfi_codes_tiles<T, S, true, false><<<tiles, THREADS, 0, stream>>>(source, to, layout, p.K);
}

template <typename T> static void launch_tensor(const plan &p, bool needs_amax, cudaStream_t stream) {
  if (p.offsets) {
    const rfi_codes_groups groups = {p.offsets, p.slices, p.M, p.col_row};
    launch_full<T>(p, groups, dim3((unsigned)(p.col_row / SIDE * p.tiles_k)), needs_amax, stream);
  } else {
    const rfi_codes_slices slices = {p.M};
    launch_full<T>(p, slices, dim3((unsigned)(p.tiles / p.slices), (unsigned)p.slices), needs_amax, stream);
  }
}

template <typename T> static void launch_blocks(const plan &p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (p.rows > 1) convert_blocks<T, true><<<(unsigned)p.tiles, THREADS, 0, stream>>>(p);
    else convert_blocks<T, false><<<(unsigned)p.tiles, THREADS, 0, stream>>>(p);
  }
}

static __global__ void fill_ones(float *row, float *col, int64_t n) {
  const int64_t s = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (s >= n) return;
  if (row) row[s] = 1.0f;
  if (col) col[s] = 1.0f;
}

/* gaps: also in col; else the tiles write zeros there. */
static void clear(const plan &p, int block, bool gaps, cudaStream_t stream) {
  enum { LINES = 64, BLOCKS = 128 };
  const dim3 grid(LINES, (unsigned)p.slices + 1);
  const int64_t size = p.scale == RFR_F32 ? 4 : 1, unit = block ? block : RFI_TENSOR_BLOCK;
  const int64_t bits = p.format == RFR_E2M1 ? 4 : 8;
  if (gaps && p.col && p.K > 0) clear_gaps<<<grid, THREADS, 0, stream>>>(p, p.col, unit, unit * bits / 8);
  if (p.row && p.K > 0) clear_rows<<<BLOCKS, THREADS, 0, stream>>>(p, p.row, p.K * bits / 8);
  if (!block) return;
  if (p.col_scale && p.K > 0) clear_gaps<<<grid, THREADS, 0, stream>>>(p, (uint8_t *)p.col_scale, unit, size);
  if (p.row_scale) clear_rows<<<BLOCKS, THREADS, 0, stream>>>(p, (uint8_t *)p.row_scale, p.row_scales * size);
}

template <typename T> static void launch(const plan &p, int block, bool needs_amax, cudaStream_t stream) {
  const bool full = is_full<T>(p, block);
  if (p.offsets) clear(p, block, !full || block != 0, stream);
  if (full && block == 0) {
    launch_tensor<T>(p, needs_amax, stream);
    if (p.row_global || p.col_global)
      fill_ones<<<(unsigned)rfi_blocks(p.slices, THREADS), THREADS, 0, stream>>>(p.row_global, p.col_global, p.slices);
    return;
  }
  if (needs_amax) cudaMemsetAsync(p.found, 0, 2 * sizeof(uint32_t) * (size_t)p.slices, stream);
  if (needs_amax && p.tiles > 0) amax_tiles<T><<<(unsigned)p.tiles, THREADS, 0, stream>>>(p);
  if (p.hadamard && p.tiles > 0) amax_transformed<T><<<(unsigned)p.tiles, THREADS, 0, stream>>>(p);
  if (p.slices > 0 && (block == 0 || p.amax || p.row_global || p.col_global))
    finish_slices<<<(unsigned)rfi_blocks(p.slices, THREADS), THREADS, 0, stream>>>(p);
  if (p.tiles == 0 || !(p.row || p.col || (block && (p.row_scale || p.col_scale)))) return;
  if (block == 0) launch_convert<T, 0>(p, stream);
  else if (full) launch_blocks<T>(p, stream);
  else if (block == 128) launch_convert<T, 128>(p, stream);
  else if (block == 32) launch_convert<T, 32>(p, stream);
  else launch_convert<T, 16>(p, stream);
}

static const rfr_arg *given(const rfr_call *c, int i) { return i < c->n_in && c->in[i].data ? &c->in[i] : NULL; }

static plan plan_of(const rfr_call *c, bool grouped) {
  const rfr_arg *x = &c->in[0], *scale = given(c, 1 + grouped), *step = given(c, 2 + grouped);
  const rfr_arg *microbatch = given(c, 3 + grouped);
  const rfi_scaling_info info = rfi_scaling_info_of(c->attr[RFI_AT_quantize_scaling].i);
  const int r = x->type.rank;
  plan p = {};
  p.x = x->data;
  p.batch = r == 3 ? x->stride[0] : 0, p.down = x->stride[r - 2], p.across = x->stride[r - 1];
  p.M = x->type.shape[r - 2], p.K = x->type.shape[r - 1];
  p.slices = grouped ? c->in[1].type.shape[0] - 1 : r == 3 ? x->type.shape[0] : 1;
  p.offsets = grouped ? (const int32_t *)c->in[1].data : NULL;
  p.col_row = grouped ? rfi_group_columns(c->attr[RFI_AT_quantize_scaling].i, p.M, p.slices) : p.M;
  p.row_scales = info.block ? rfi_blocks_of(p.K, info.block) : 0;
  p.col_scales = info.block ? rfi_blocks_of(p.col_row, info.block) : 0;
  p.given = scale ? (const float *)scale->data : NULL;
  p.given_stride = scale ? scale->stride[0] : 0;
  p.step = step ? (const int64_t *)step->data : NULL;
  p.step_stride = step ? step->stride[0] : 0;
  p.microbatch_at = microbatch ? (const int32_t *)microbatch->data : NULL;
  p.microbatch = c->microbatch > 0 ? (uint32_t)c->microbatch : 0;
  p.site = (uint32_t)c->attr[RFI_AT_quantize_site].i;
  p.stream = (uint64_t)c->attr[RFI_AT_quantize_stream].i;
  p.format = (rfr_dtype)c->attr[RFI_AT_quantize_format].i;
  p.scale = info.scale;
  p.rows = info.rows;
  p.overflow = rfi_largest_input(x->type.dtype);
  p.pow2 = (c->attr[RFI_AT_quantize_options].i & RFR_QUANTIZE_POW2) != 0;
  p.hadamard = (c->attr[RFI_AT_quantize_options].i & RFR_QUANTIZE_HADAMARD) != 0;
  p.found = (uint32_t *)c->workspace;
  p.row = (uint8_t *)c->out[RFI_OUT_quantize_row].data;
  p.col = (uint8_t *)c->out[RFI_OUT_quantize_col].data;
  p.row_scale = c->out[RFI_OUT_quantize_row_scale].data;
  p.col_scale = c->out[RFI_OUT_quantize_col_scale].data;
  p.row_global = (float *)c->out[RFI_OUT_quantize_row_global].data;
  p.col_global = (float *)c->out[RFI_OUT_quantize_col_global].data;
  p.amax = (float *)c->out[RFI_OUT_quantize_amax].data;
  p.tiles_k = rfi_blocks_of(p.K, SIDE);
  p.tiles = grouped ? (p.M / SIDE + p.slices) * p.tiles_k : p.slices * rfi_blocks_of(p.M, SIDE) * p.tiles_k;
  return p;
}

static rfr_status run_any(const rfr_call *c, bool grouped) {
  const plan p = plan_of(c, grouped);
  const int block = rfi_scaling_info_of(c->attr[RFI_AT_quantize_scaling].i).block;
  const bool needs_amax = p.amax || p.scale == RFR_E4M3 || (block == 0 && !p.given);
  RFI_WITH_FLOAT(c->in[0].type.dtype, T, launch<T>(p, block, needs_amax, rfi_stream(c)))
  return rfi_cuda_launched("quantize");
}

static rfr_status run(const rfr_call *c) { return run_any(c, false); }
static rfr_status run_grouped(const rfr_call *c) { return run_any(c, true); }

static size_t workspace(const rfr_call *c) {
  return 2 * sizeof(uint32_t) * (size_t)(c->in[0].type.rank == 3 ? c->in[0].type.shape[0] : 1);
}
static size_t workspace_grouped(const rfr_call *c) { return 2 * sizeof(uint32_t) * (size_t)c->in[1].type.shape[0]; }

extern "C" const rfi_cuda_kernel RFI_CUDA(quantize) = {run, workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(grouped_quantize) = {run_grouped, workspace_grouped};
