/* SPDX-License-Identifier: Apache-2.0
 *
 * Tiles of attention on Hopper's tensor cores: how warpgroups of 64 rows each multiply a head's rows from shared
 * memory, and store results.
 */
#ifndef RFI_ATTENTION_TILES_SM90_CUH
#define RFI_ATTENTION_TILES_SM90_CUH

#include "backend/cuda/tma_sm90.cuh"
#include "ops/attention/attention_tiles.cuh"

enum { GROUP = 64, TILE_ROWS = 64 }; /* rows per warpgroup; rows per tile of the other operand */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A warpgroup's rows of a tile, as left operands in shared memory. If they were loaded into registers, nvcc 13.0 would
 * assign a loop-invariant left operand and a packed one to the same registers. */
template <int D, int ROWS> struct left_rows {
  uint32_t group;
  __device__ __forceinline__ void load(uint32_t tile, int warp) { group = tile + (uint32_t)(warp / 4 * GROUP * 128); }
  __device__ __forceinline__ uint64_t part(int k) const {
    return rfi_wgmma_panel(group, (uint32_t)(k / 4 * ROWS * 128 + k % 4 * 32));
  }
};

/* Starts c (64 x 64) = rows of a times rows of the tile. */
template <typename T, int D, typename A>
__device__ __forceinline__ void multiply(float (&c)[1][8][4], const A &a, uint32_t tile) {
  rfi_wgmma_new(c[0]);
#pragma unroll
  for (int k = 0; k < D / 16; k++)
    rfi_wgmma<T, false>(c[0], a.part(k), rfi_wgmma_panel(tile, (uint32_t)(k / 4 * TILE_ROWS * 128 + k % 4 * 32)),
                        k > 0);
  rfi_wgmma_commit();
}

/* Rounds 16 N columns of sums to a left operand. */
template <typename T, int N> __device__ __forceinline__ void pack(uint32_t (&a)[N][4], const float (&c)[1][2 * N][4]) {
#pragma unroll
  for (int k = 0; k < N; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *x = &c[0][2 * k + i / 2][i % 2 * 2];
      a[k][i] = rfi_pair<T>(x[0], x[1]);
    }
}

/* Starts acc (64 x D) += a times rows of the tile. */
template <typename T, int D>
__device__ __forceinline__ void accumulate(float (&acc)[1][D / 8][4], const uint32_t (&a)[TILE_ROWS / 16][4],
                                           uint32_t tile) {
  rfi_wgmma_tie(acc[0]);
  rfi_wgmma_begin();
#pragma unroll
  for (int k = 0; k < TILE_ROWS / 16; k++)
    if constexpr (D == 64) rfi_wgmma<T, true>(acc[0], a[k], rfi_wgmma_panel(tile, (uint32_t)(k * 2048)), true);
    else rfi_wgmma128<T, true>(acc[0], a[k], rfi_panels(tile + (uint32_t)(k * 2048), TILE_ROWS * 128), true);
  rfi_wgmma_commit();
}

/* Writes a warp's 16 rows t0 ... of a head of a dense (T, heads, D) result, except rows from t1 on and rows marked in
 * `skip`. The rows are staged in their own part of a tile with ROWS rows. */
template <typename T, int D, int ROWS>
__device__ __forceinline__ void store_rows(void *out, int64_t out_row, const problem &p, int h, int t0, int t1,
                                           const float (&acc)[1][D / 8][4], char *tile, int row, const int *skip) {
  constexpr int CHUNKS = D / 8;
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < CHUNKS; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *(uint32_t *)(tile + n / 8 * ROWS * 128 + (row + half * 8 + g) * 128 + (((n ^ g) & 7) << 4) + c * 4) =
          rfi_pair<T>(acc[0][n][2 * half], acc[0][n][2 * half + 1]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * CHUNKS; i += 32) {
    const int r = (i + lane) / CHUNKS, chunk = (i + lane) % CHUNKS, t = t0 + r;
    if (t >= t1 || chunk * 8 >= p.D || (skip && skip[r])) continue;
    *(uint4 *)((T *)out + t * out_row + h * p.D + chunk * 8) =
        *(const uint4 *)(tile + chunk / 8 * ROWS * 128 + (row + r) * 128 + (((chunk ^ r) & 7) << 4));
  }
  __syncwarp();
}

#endif
#endif
