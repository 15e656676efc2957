/* SPDX-License-Identifier: Apache-2.0
 *
 * permute_codes on a GPU. A tile is 128 rows by 128 columns; the tiles are the blocks of `col`, gaps between groups
 * included, as in quantize.cu. Tiles of the same columns come one after the other: those columns of all tokens fit into
 * the L2 cache, so memory sees each token once and not once for each of its experts.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/quant/codes.cuh"

enum { SIDE = RFI_CODES_SIDE, THREADS = RFI_CODES_THREADS, PITCH = SIDE + 4 };

typedef struct args {
  const uint8_t *q;
  const float *scale;
  const int32_t *order;
  uint8_t *row, *col;                 /* NULL: not needed */
  float *row_scale, *col_scale;       /* NULL: not needed */
  int64_t rows, columns, slots, down; /* down: number of tile rows */
  int k;
  rfi_codes_groups layout;
} args;

/* The token of a sorted row; -1: none. */
static __device__ __forceinline__ int64_t token_of(const args &a, int64_t row) {
  const int64_t slot = a.order[row];
  return slot >= 0 && slot < a.slots ? slot / a.k : -1;
}

static __device__ __forceinline__ void repeat_scale(const args &a) {
  if (blockIdx.x > 0) return;
  for (int64_t g = threadIdx.x; g < a.layout.groups; g += THREADS) {
    if (a.row_scale) a.row_scale[g] = *a.scale;
    if (a.col_scale) a.col_scale[g] = *a.scale;
  }
}

/* Columns are a multiple of 128, and pointers aligned: 16 codes of a row at a time. */
static __global__ void __launch_bounds__(THREADS) permute_full(const __grid_constant__ args a) {
  enum { LANES = SIDE / 16, DOWN = THREADS / LANES, ROUNDS = SIDE / DOWN };
  __shared__ uint32_t codes[SIDE][RFI_CODES_WORDS];
  const int64_t j0 = blockIdx.x / a.down * SIDE;
  const int lane = threadIdx.x % LANES, down = threadIdx.x / LANES;
  rfi_codes_tile t;
  repeat_scale(a);
  a.layout.find(blockIdx.x % a.down, a.columns, &t);
  if (t.rows == 0) {
    if (a.col) rfi_clear_columns(a.col + t.column + j0 * a.layout.pitch, a.layout.pitch);
    return;
  }
  uint4 x[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int i = r * DOWN + down;
    const int64_t token = i < t.rows ? token_of(a, t.first + i) : -1;
    x[r] = token >= 0 ? __ldg((const uint4 *)(a.q + token * a.columns + j0) + lane) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int i = r * DOWN + down;
    if (a.row && i < t.rows) *((uint4 *)(a.row + (t.line + i) * a.columns + j0) + lane) = x[r];
    /* four rows of a warp begin with different words, which avoids bank conflicts */
    const uint32_t words[4] = {x[r].x, x[r].y, x[r].z, x[r].w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const int own = (w + i) % 4;
      const uint32_t low = own & 1 ? words[1] : words[0], high = own & 1 ? words[3] : words[2];
      codes[i][(4 * lane + own) ^ i / 4] = own & 2 ? high : low;
    }
  }
  if (!a.col) return;
  __syncthreads();
  rfi_write_columns(codes, a.col + t.column + j0 * a.layout.pitch, a.layout.pitch);
}

static __global__ void __launch_bounds__(THREADS) permute_any(const __grid_constant__ args a) {
  __shared__ uint8_t codes[SIDE][PITCH];
  const int64_t j0 = blockIdx.x / a.down * SIDE;
  rfi_codes_tile t;
  repeat_scale(a);
  a.layout.find(blockIdx.x % a.down, a.columns, &t);
  for (int e = threadIdx.x; e < SIDE * SIDE; e += THREADS) {
    const int i = e / SIDE;
    const int64_t j = j0 + e % SIDE, token = i < t.rows && j < a.columns ? token_of(a, t.first + i) : -1;
    const uint8_t x = token >= 0 ? a.q[token * a.columns + j] : 0;
    if (a.row && i < t.rows && j < a.columns) a.row[(t.line + i) * a.columns + j] = x;
    codes[i][e % SIDE] = x;
  }
  __syncthreads();
  for (int e = threadIdx.x; a.col && e < SIDE * SIDE; e += THREADS) {
    const int64_t j = j0 + e / SIDE;
    if (j < a.columns) a.col[j * a.layout.pitch + t.column + e % SIDE] = codes[e % SIDE][e / SIDE];
  }
}

/* Zeros the rows before the first and after the last group. */
static __global__ void __launch_bounds__(THREADS) clear_rows(const __grid_constant__ args a) {
  const int64_t first = rfi_group_begin(a.layout.offsets, 0, a.rows) * a.columns;
  const int64_t last = rfi_group_begin(a.layout.offsets, a.layout.groups, a.rows) * a.columns;
  const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, threads = (int64_t)gridDim.x * THREADS;
  for (int64_t b = thread; b < first; b += threads) a.row[b] = 0;
  for (int64_t b = last + thread; b < a.rows * a.columns; b += threads) a.row[b] = 0;
}

static rfr_status run(const rfr_call *c) {
  enum { CLEARING = 128 };
  const rfr_arg *place = &c->in[RFI_IN_permute_codes_place], *offsets = &c->in[RFI_IN_permute_codes_offsets];
  args a = {};
  a.q = (const uint8_t *)c->in[RFI_IN_permute_codes_q].data;
  a.scale = (const float *)c->in[RFI_IN_permute_codes_scale].data;
  a.order = (const int32_t *)c->in[RFI_IN_permute_codes_order].data;
  a.row = (uint8_t *)c->out[RFI_OUT_permute_codes_row].data;
  a.col = (uint8_t *)c->out[RFI_OUT_permute_codes_col].data;
  a.row_scale = (float *)c->out[RFI_OUT_permute_codes_row_scale].data;
  a.col_scale = (float *)c->out[RFI_OUT_permute_codes_col_scale].data;
  a.rows = c->in[RFI_IN_permute_codes_order].type.shape[0];
  a.columns = c->in[RFI_IN_permute_codes_q].type.shape[1];
  a.slots = rfi_elements(place);
  a.k = (int)place->type.shape[1];
  const int64_t groups = offsets->type.shape[0] - 1, pitch = rfi_group_columns(RFR_SCALING_TENSOR, a.rows, groups);
  a.layout = {(const int32_t *)offsets->data, groups, a.rows, pitch};
  if (a.row && a.rows * a.columns > 0) clear_rows<<<CLEARING, THREADS, 0, rfi_stream(c)>>>(a);
  a.down = pitch / SIDE;
  const int64_t grid = a.down * rfi_blocks(a.columns, SIDE);
  if (groups == 0 && a.col) cudaMemsetAsync(a.col, 0, (size_t)(a.columns * pitch), rfi_stream(c));
  if (groups == 0 || grid == 0) return rfi_cuda_launched("permute_codes");
  const bool full = a.columns % SIDE == 0 && ((uintptr_t)a.q | (uintptr_t)a.row) % 16 == 0 && (uintptr_t)a.col % 4 == 0;
  if (full) permute_full<<<(unsigned)grid, THREADS, 0, rfi_stream(c)>>>(a);
  else permute_any<<<(unsigned)grid, THREADS, 0, rfi_stream(c)>>>(a);
  return rfi_cuda_launched("permute_codes");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(permute_codes) = {run, NULL};
