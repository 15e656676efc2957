/* SPDX-License-Identifier: Apache-2.0
 *
 * A tile of a GEMM on a GPU for any operands. Sums over K are f32 and in order, so results depend on the GEMM alone. A
 * block of 256 threads computes 64 x 64, each thread 4 x 4 of it; both operands pass through shared memory as f32, 16
 * elements of K at a time.
 *
 *   a(i, k), b(j, k)   element of an operand as f32, i < M, j < N, k < K
 *   end(i, j, sum)     receives an element of the result
 */
#ifndef RFI_TILE_ANY_CUH
#define RFI_TILE_ANY_CUH

#include "backend/cuda/kernels.cuh"

enum { RFI_TILE = 64, RFI_TILE_STEP = 16, RFI_TILE_THREADS = 256, RFI_TILE_PER_THREAD = 4 };

/* Adjacent threads read adjacent elements along K (by_k) or along the other dimension: whichever is dense. */
template <class X>
static __device__ __forceinline__ void rfi_tile_fill(float (*panel)[RFI_TILE + 1], const X &x, int64_t first, int64_t n,
                                                     int64_t k0, int64_t K, bool by_k) {
  for (int e = threadIdx.x; e < RFI_TILE * RFI_TILE_STEP; e += RFI_TILE_THREADS) {
    const int i = by_k ? e / RFI_TILE_STEP : e % RFI_TILE, k = by_k ? e % RFI_TILE_STEP : e / RFI_TILE;
    panel[k][i] = first + i < n && k0 + k < K ? x(first + i, k0 + k) : 0.0f;
  }
}

/* Computes the tile at (i0, j0). All threads of the block must call it. */
template <class A, class B, class END>
static __device__ __forceinline__ void rfi_tile(int64_t i0, int64_t M, int64_t j0, int64_t N, int64_t K, const A &a,
                                                bool a_by_k, const B &b, bool b_by_k, const END &end) {
  enum { P = RFI_TILE_PER_THREAD };
  __shared__ float x[RFI_TILE_STEP][RFI_TILE + 1], w[RFI_TILE_STEP][RFI_TILE + 1];
  const int ti = (int)threadIdx.x / 16 * P, tj = (int)threadIdx.x % 16 * P;
  float sum[P][P] = {};
  for (int64_t k0 = 0; k0 < K; k0 += RFI_TILE_STEP) {
    rfi_tile_fill(x, a, i0, M, k0, K, a_by_k);
    rfi_tile_fill(w, b, j0, N, k0, K, b_by_k);
    __syncthreads();
    for (int k = 0; k < RFI_TILE_STEP; k++)
#pragma unroll
      for (int i = 0; i < P; i++)
#pragma unroll
        for (int j = 0; j < P; j++) sum[i][j] = fmaf(x[k][ti + i], w[k][tj + j], sum[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < P; i++)
#pragma unroll
    for (int j = 0; j < P; j++)
      if (i0 + ti + i < M && j0 + tj + j < N) end(i0 + ti + i, j0 + tj + j, sum[i][j]);
}

#endif
