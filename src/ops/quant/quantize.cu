/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize on a GPU: one launch computes the largest magnitude per block, a second one converts.
 *
 * Magnitudes are compared as bit patterns, which have the order of the numbers, with NaN above all; a maximum does not
 * depend on its order. In the second launch every block computes the scale from all blocks' maxima, loads tiles of 64 x
 * 64 into shared memory and writes both copies from there.
 */
#include <float.h>

#include "ops/quant/e4m3.cuh"

enum { TILE = 64, THREADS = 256, PER_SM = 4, MOST_BLOCKS = 1024 };

typedef struct matrix {
  const void *data;
  int64_t M, N, row, col; /* strides in elements */
} matrix;

static __device__ uint32_t block_max(uint32_t x) {
  __shared__ uint32_t part[THREADS / 32];
  x = __reduce_max_sync(0xffffffffu, x);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  for (int w = 0; w < THREADS / 32; w++) x = part[w] > x ? part[w] : x;
  return x;
}

static __device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

/* Maximum over all elements, in the order of memory. */
template <typename T> static __global__ void __launch_bounds__(THREADS) amax(const matrix x, uint32_t *found) {
  const int64_t n = x.M * x.N, thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t threads = (int64_t)gridDim.x * THREADS;
  const bool by_row = x.col == 1 || x.row != 1;
  const int64_t inner = by_row ? x.N : x.M, outer_stride = by_row ? x.row : x.col, stride = by_row ? x.col : x.row;
  const T *data = (const T *)x.data;
  uint32_t m = 0;
  int64_t i = 0;
  if (stride == 1 && outer_stride == inner && (uintptr_t)data % 16 == 0) {
    constexpr int P = rfi_pack_width<T>;
    const rfi_pack<T, P> *packs = (const rfi_pack<T, P> *)data;
    for (int64_t k = thread; k < n / P; k += threads) {
      const rfi_pack<T, P> v = packs[k];
      for (int j = 0; j < P; j++) m = max(m, magnitude(rfi_widen(v.x[j])));
    }
    i = n / P * P;
  }
  for (i += thread; i < n; i += threads)
    m = max(m, magnitude(rfi_widen(data[i / inner * outer_stride + i % inner * stride])));
  m = block_max(m);
  if (threadIdx.x == 0) found[blockIdx.x] = m;
}

static __device__ float scale_of(const uint32_t *found, int n) {
  uint32_t m = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) m = max(m, found[i]);
  m = block_max(m);
  if (m == 0 || m >= 0x7F800000u) return 1.0f;
  const float scale = 448.0f / __uint_as_float(m);
  return isinf(scale) ? FLT_MAX : scale;
}

/* Writes rows i0 ... of `to` (rows, n), from column j0: tile[i][j], or tile[j][i] if flipped. */
static __device__ void write_tile(uint8_t *to, const uint8_t (*tile)[TILE + 4], bool flipped, int64_t i0, int64_t j0,
                                  int64_t rows, int64_t n) {
  for (int e = threadIdx.x; e < TILE * TILE / 4; e += THREADS) {
    const int i = e / (TILE / 4), j = e % (TILE / 4) * 4;
    uint8_t q[4];
    if (i0 + i >= rows || j0 + j >= n) continue;
    for (int k = 0; k < 4; k++) q[k] = flipped ? tile[j + k][i] : tile[i][j + k];
    uint8_t *at = to + (i0 + i) * n + j0 + j;
    if (j0 + j + 4 <= n && (uintptr_t)at % 4 == 0) *(uchar4 *)at = make_uchar4(q[0], q[1], q[2], q[3]);
    else
      for (int k = 0; k < 4 && j0 + j + k < n; k++) at[k] = q[k];
  }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    convert(const matrix x, const uint32_t *found, int n_found, uint8_t *row, uint8_t *col, float *scale_inv) {
  __shared__ uint8_t tile[TILE][TILE + 4];
  const float scale = scale_of(found, n_found);
  const bool by_row = x.col == 1 || x.row != 1;
  const int64_t across = (x.N + TILE - 1) / TILE, tiles = (x.M + TILE - 1) / TILE * across;
  if (scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
  for (int64_t k = blockIdx.x; k < tiles; k += gridDim.x) {
    const int64_t i0 = k / across * TILE, j0 = k % across * TILE;
#pragma unroll
    for (int e = threadIdx.x; e < TILE * TILE; e += THREADS) {
      const int i = by_row ? e / TILE : e % TILE, j = by_row ? e % TILE : e / TILE;
      const bool inside = i0 + i < x.M && j0 + j < x.N;
      tile[i][j] = inside ? rfi_e4m3_narrow(rfi_widen(((const T *)x.data)[(i0 + i) * x.row + (j0 + j) * x.col]) * scale)
                          : (uint8_t)0;
    }
    __syncthreads();
    if (row) write_tile(row, tile, false, i0, j0, x.M, x.N);
    if (col) write_tile(col, tile, true, j0, i0, x.N, x.M);
    __syncthreads();
  }
}

static int blocks_of(const rfr_call *c) {
  const int n = rfi_cuda_info_of(c)->sms * PER_SM;
  return n < MOST_BLOCKS ? n : MOST_BLOCKS;
}

static size_t workspace(const rfr_call *c) { return (size_t)blocks_of(c) * sizeof(uint32_t); }

template <typename T> static void launch(const rfr_call *c, const matrix &x) {
  const int blocks = blocks_of(c);
  uint32_t *found = (uint32_t *)c->workspace;
  amax<T><<<blocks, THREADS, 0, rfi_stream(c)>>>(x, found);
  convert<T><<<blocks, THREADS, 0, rfi_stream(c)>>>(x, found, blocks, (uint8_t *)c->out[0].data,
                                                    (uint8_t *)c->out[1].data, (float *)c->out[2].data);
}

static rfr_status run(const rfr_call *c) {
  const rfr_arg *x = &c->in[0];
  const matrix m = {x->data, x->type.shape[0], x->type.shape[1], x->stride[0], x->stride[1]};
  RFI_WITH_FLOAT(x->type.dtype, T, launch<T>(c, m))
  return rfi_cuda_launched("quantize");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(quantize) = {run, workspace};
