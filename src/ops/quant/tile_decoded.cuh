/* SPDX-License-Identifier: Apache-2.0
 *
 * A tile of a scaled GEMM on tensor cores of sm_80, whose operands are decoded to bf16 while they are loaded. This is
 * exact for 4-bit and 8-bit codes without a scale or with an E8M0 scale, and for E2M1 codes with an E4M3 scale: a
 * product of two numbers with four significant bits each fits into the eight bits of bf16. Sums are f32 and in the
 * order of K, so results depend on the GEMM alone.
 *
 * A block of 256 threads computes 128 x 128, each of its eight warps 64 x 32. The codes of the next 64 elements of K
 * are loaded into registers while the tensor cores multiply; of two blocks on a multiprocessor, one decodes while the
 * other multiplies.
 */
#ifndef RFI_TILE_DECODED_CUH
#define RFI_TILE_DECODED_CUH

#include "backend/cuda/mma_sm80.cuh"
#include "ops/quant/scaled_gemm.cuh"

enum {
  RFI_DECODED = 128, /* rows and columns of a tile */
  RFI_DECODED_STEP = 64,
  RFI_DECODED_THREADS = 256,
  /* 8-element chunks of an operand per thread */
  RFI_DECODED_EACH = RFI_DECODED * RFI_DECODED_STEP / 8 / RFI_DECODED_THREADS
};

/* Eight adjacent codes of a line and their scale. */
struct rfi_decoded_chunk {
  uint2 q;
  float scale;
};

/* Loads a chunk of a line from element k on, a multiple of 8; `left` elements are valid, the others become zeros. */
static __device__ __forceinline__ rfi_decoded_chunk rfi_decoded_load(const rfi_factor &f, int64_t line, int64_t k,
                                                                     int64_t left) {
  rfi_decoded_chunk c = {{0, 0}, 0};
  if (left <= 0) return c;
  const int64_t at = line * f.row + k;
  uint64_t q;
  if (f.dtype == RFR_U8) q = __ldg((const uint32_t *)(f.q + at / 2));
  else q = __ldg((const unsigned long long *)(f.q + at));
  if (left < 8) q &= (1ull << left * (f.dtype == RFR_U8 ? 4 : 8)) - 1;
  c.q = make_uint2((uint32_t)q, (uint32_t)(q >> 32));
  const uint8_t *const scales = (const uint8_t *)f.scale + line * f.scale_row;
  c.scale = f.scaling == RFR_SCALING_MX32   ? rfi_e8m0_widen(__ldg(scales + k / 32))
            : f.scaling == RFR_SCALING_NV16 ? rfi_e4m3_widen(__ldg(scales + k / 16))
                                            : 1.0f;
  return c;
}

static __device__ __forceinline__ uint4 rfi_decoded(const rfi_decoded_chunk &c, rfr_dtype dtype) {
  float x[8];
  uint32_t pair[4];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const uint32_t word = dtype == RFR_U8 || e < 4 ? c.q.x : c.q.y;
    if (dtype == RFR_U8) {
      x[e] = rfi_e2m1_widen((uint8_t)(word >> 4 * e));
    } else {
      const uint8_t q = (uint8_t)(word >> e % 4 * 8);
      x[e] = dtype == RFR_E4M3 ? rfi_e4m3_widen(q) : rfi_e5m2_widen(q);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; e++) pair[e] = rfi_pair<rfi_bf16>(x[2 * e] * c.scale, x[2 * e + 1] * c.scale);
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* Stores a thread's chunks; chunk i of row r lies at chunk i ^ r % 8. */
static __device__ __forceinline__ void rfi_decoded_store(uint4 (*to)[8], const rfi_decoded_chunk (&c)[RFI_DECODED_EACH],
                                                         rfr_dtype dtype) {
#pragma unroll
  for (int n = 0; n < RFI_DECODED_EACH; n++) {
    const int row = (int)threadIdx.x / 8 + n * (RFI_DECODED_THREADS / 8), i = (int)threadIdx.x % 8;
    to[row][i ^ row % 8] = rfi_decoded(c[n], dtype);
  }
}

/* The tile at (i0, j0). The M rows i of a are lines `a_line` + i, the N rows j of b are lines `b_line` + j. The sum
 * begins at element `start` of the lines, a multiple of 8, and has K elements. end(i, j, sum) gets each result. All
 * threads of the block must call it. */
template <class END>
static __device__ __forceinline__ void rfi_tile_decoded(const rfi_factor &a, int64_t a_line, int64_t i0, int64_t M,
                                                        const rfi_factor &b, int64_t b_line, int64_t j0, int64_t N,
                                                        int64_t start, int64_t K, const END &end) {
  __shared__ uint4 shared[2][RFI_DECODED][8];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, i1 = warp / 4 * 64, j1 = warp % 4 * 32;
  const uint32_t at_a = rfi_shared_address(shared[0]), at_b = rfi_shared_address(shared[1]);
  rfi_decoded_chunk x[RFI_DECODED_EACH], w[RFI_DECODED_EACH];
  float sum[4][4][4] = {};
  const auto load = [&](int64_t k0) {
#pragma unroll
    for (int n = 0; n < RFI_DECODED_EACH; n++) {
      const int64_t row = (int64_t)threadIdx.x / 8 + n * (RFI_DECODED_THREADS / 8), k = k0 + threadIdx.x % 8 * 8;
      x[n] = rfi_decoded_load(a, a_line + i0 + row, start + k, i0 + row < M ? K - k : 0);
      w[n] = rfi_decoded_load(b, b_line + j0 + row, start + k, j0 + row < N ? K - k : 0);
    }
  };
  load(0);
  for (int64_t k0 = 0; k0 < K; k0 += RFI_DECODED_STEP) {
    __syncthreads();
    rfi_decoded_store(shared[0], x, a.dtype);
    rfi_decoded_store(shared[1], w, b.dtype);
    __syncthreads();
    load(k0 + RFI_DECODED_STEP);
#pragma unroll
    for (int k = 0; k < RFI_DECODED_STEP / 16; k++) {
      uint32_t left[4][4], right[2][4];
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const int row = i1 + m * 16 + lane % 16, chunk = 2 * k + lane / 16;
        rfi_ldmatrix(left[m], at_a + (uint32_t)(row * 128 + (chunk ^ row % 8) * 16));
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int row = j1 + n * 16 + lane / 16 * 8 + lane % 8, chunk = 2 * k + lane / 8 % 2;
        rfi_ldmatrix(right[n], at_b + (uint32_t)(row * 128 + (chunk ^ row % 8) * 16));
      }
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
          rfi_mma<rfi_bf16>(sum[m][n], left[m], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int64_t i = i0 + i1 + m * 16 + lane / 4 + e / 2 * 8, j = j0 + j1 + n * 8 + lane % 4 * 2 + e % 2;
        if (i < M && j < N) end(i, j, sum[m][n][e]);
      }
  __syncthreads();
}

#endif
