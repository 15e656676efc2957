/* SPDX-License-Identifier: Apache-2.0
 *
 * Weighted SwiGLU after a grouped GEMM of sm_90: computes h from the GEMM's tiles.
 *
 * A tile is 128 columns of gate and the corresponding 128 of up, so that a thread has both factors. At the end of a
 * tile they are stored and also kept, rounded, in half the registers of the sums. h is computed in parts, a few columns
 * in each of the first steps of the next tile's GEMM, which hides its exponentials and divisions: at a tile's end they
 * would take nearly as long as the separate op. h is computed from the stored (rounded) gate and up, so it is bitwise
 * equal to the separate ops.
 */
#ifndef RFI_SWIGLU_SM90_CUH
#define RFI_SWIGLU_SM90_CUH

#include "backend/cuda/any_type.cuh"
#include "ops/elementwise/logistic.cuh"
#include "ops/grouped/tile_sm90.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename O> static __device__ __forceinline__ void rfi_widen_two(uint32_t bits, float (&x)[2]) {
  rfi_pack<O, 2> p;
  __builtin_memcpy(&p, &bits, 4);
  x[0] = rfi_widen(p.x[0]), x[1] = rfi_widen(p.x[1]);
}

/* ---- 16 bytes of a lane ---- */

static __device__ __forceinline__ void rfi_look(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
static __device__ __forceinline__ void rfi_write_four(void *to, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/* ---- strips: a warp's 16 rows of 64 columns, as they are stored ---- */

/* 8 columns each; a lane has two rows, r and r + 8. */
typedef uint32_t rfi_strip[8][2];

/* Rounds here, not at the use: otherwise the compiler would read accumulators that the next MMAs already write. */
template <typename O>
static __device__ __forceinline__ void rfi_strip_of(rfi_strip &to, const float (&sum)[32][4], int q) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    to[n][0] = rfi_narrow_two<O>(sum[8 * q + n][0], sum[8 * q + n][1]);
    to[n][1] = rfi_narrow_two<O>(sum[8 * q + n][2], sum[8 * q + n][3]);
    asm volatile("" : "+r"(to[n][0]), "+r"(to[n][1])::"memory");
  }
}

static __device__ __forceinline__ void rfi_strip_stage(const rfi_strip &x, uint32_t slab) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; n += 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     slab + rfi_swizzled(lane % 16, n + lane / 16)),
                 "r"(x[n][0]), "r"(x[n][1]), "r"(x[n + 1][0]), "r"(x[n + 1][1])
                 : "memory");
}

/* Stores all rows with TMA, which skips columns out of range. */
static __device__ __forceinline__ void rfi_strip_store(const rfi_strip &x, uint32_t slab, const CUtensorMap *map,
                                                       bool any, int column, int row, int z) {
  if (threadIdx.x % 32 == 0) rfi_tma_wait_read<1>();
  __syncwarp();
  rfi_strip_stage(x, slab);
  rfi_shared_written();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if (any) rfi_tma_store(map, slab, column, row, z);
    rfi_tma_commit();
  }
}

/* Stores the first `left` rows and `columns` with the threads. */
template <typename O>
static __device__ __forceinline__ void rfi_strip_write(const rfi_strip &x, uint32_t slab, O *y, int64_t pitch,
                                                       int columns, int left) {
  const int lane = threadIdx.x % 32, c = lane % 8;
  rfi_strip_stage(x, slab);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = lane / 8 + 4 * i;
    uint32_t got[4];
    rfi_look(got, slab + rfi_swizzled(r, c));
    if (c * 8 < columns && r < left) rfi_write_four(y + r * pitch + c * 8, got);
  }
  __syncwarp();
}

/* ---- forward ---- */

/* The remaining work of a tile: computing h, in PARTS parts. */
struct rfi_swiglu_rest {
  enum { PARTS = 8 };
  rfi_strip gate[2], up[2];
  float weight[2];       /* row weights of the lane's two rows */
  int column, row, left; /* left <= 0: nothing remains */
};

/* P has the fields columns (of h); y and out: gate and up adjacent, out NULL if unused; h and act; weight. */
template <typename O, class P>
static __device__ __forceinline__ void rfi_swiglu_part(rfi_swiglu_rest &r, const P &p, uint32_t staging, int k) {
  const int q = k / 4;
#pragma unroll
  for (int n = k % 4 * 2; n < k % 4 * 2 + 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float gate[2], up[2];
      rfi_widen_two<O>(r.gate[q][n][e], gate), rfi_widen_two<O>(r.up[q][n][e], up);
      r.gate[q][n][e] =
          rfi_narrow_two<O>(rfi_swiglu<O>(gate[0], up[0], r.weight[e]), rfi_swiglu<O>(gate[1], up[1], r.weight[e]));
    }
  }
  if (k % 4 == 3) {
    const int column = r.column + 64 * q, columns = p.columns - column;
    const uint32_t slab = staging + q * RFI_SLAB;
    if (r.left >= 16) rfi_strip_store(r.gate[q], slab, &p.h, columns > 0, column, r.row, 0);
    else if (r.left > 0)
      rfi_strip_write(r.gate[q], slab, (O *)p.act + (int64_t)r.row * p.columns + column, p.columns, columns, r.left);
  }
}

/* Starts a warp's 16 rows of a tile, of which `left` are valid. The slabs are used in the order gate, up, gate, up, h,
 * h. */
template <typename O, class P>
static __device__ __forceinline__ void rfi_swiglu_begin(rfi_swiglu_rest &r, const float (&sum)[32][4], const P &p,
                                                        uint32_t staging, int column, int row, int left) {
  const int64_t pitch = 2 * (int64_t)p.columns;
#pragma unroll
  for (int q = 0; q < 2; q++) rfi_strip_of<O>(r.gate[q], sum, q), rfi_strip_of<O>(r.up[q], sum, q + 2);
  r.column = column, r.row = row, r.left = left;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int mine = threadIdx.x % 32 / 4 + 8 * e;
    r.weight[e] = mine < left ? rfi_load(p.weight, p.weight_dtype, row + mine) : 0;
  }
  if (left < 16) {
    if (threadIdx.x % 32 == 0) rfi_tma_wait_read<0>();
    __syncwarp();
  }
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const int c = column + 64 * q, columns = p.out ? p.columns - c : 0;
    O *const y = (O *)p.out + row * pitch + c;
    if (left >= 16) {
      rfi_strip_store(r.gate[q], staging, &p.y, columns > 0, c, row, 0);
      rfi_strip_store(r.up[q], staging + RFI_SLAB, &p.y, columns > 0, c, row, 1);
    } else {
      rfi_strip_write(r.gate[q], staging, y, pitch, columns, left);
      rfi_strip_write(r.up[q], staging + RFI_SLAB, y + p.columns, pitch, columns, left);
    }
  }
}

#endif

#endif
