/* SPDX-License-Identifier: Apache-2.0
 *
 * transposed on a GPU, limited by memory bandwidth: tiles of 128 x 128 bytes through shared memory.
 *
 * A thread reads 16 bytes of each of four rows and transposes their 4 x 4 blocks in registers, so that a word in shared
 * memory has four adjacent bytes of a result row. The words of result row k are rotated by 4 (k / 16). So threads that
 * write the same word of rows with a distance of 16 use different banks, and four adjacent words stay adjacent. If a
 * side is not a multiple of 16, single bytes are moved.
 */
#include "backend/cuda/kernels.cuh"

enum { SIDE = 128, THREADS = 256, EACH = 16, WORDS = SIDE / 4 };

struct problem {
  const uint8_t *x;
  uint8_t *y;
  int64_t N, K;
};

/* Byte k of word r becomes byte r of word k. */
static __device__ __forceinline__ void turn(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
  const uint32_t p = __byte_perm(a, b, 0x5140), q = __byte_perm(c, d, 0x5140);
  const uint32_t r = __byte_perm(a, b, 0x7362), s = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(p, q, 0x5410);
  out[1] = __byte_perm(p, q, 0x7632);
  out[2] = __byte_perm(r, s, 0x5410);
  out[3] = __byte_perm(r, s, 0x7632);
}

static __global__ void __launch_bounds__(THREADS) tiles(const __grid_constant__ problem p) {
  __shared__ __align__(16) uint32_t words[SIDE * WORDS];
  const int64_t slice = (int64_t)blockIdx.z * p.N * p.K, n0 = (int64_t)blockIdx.y * SIDE,
                k0 = (int64_t)blockIdx.x * SIDE;
  const int chunk = threadIdx.x % 8, four = threadIdx.x / 8; /* 16 columns, four rows */
  if (n0 + four * 4 < p.N && k0 + chunk * EACH < p.K) {
    uint4 row[4];
#pragma unroll
    for (int r = 0; r < 4; r++) row[r] = *(const uint4 *)(p.x + slice + (n0 + four * 4 + r) * p.K + k0 + chunk * EACH);
    const uint32_t *w[4] = {(const uint32_t *)&row[0], (const uint32_t *)&row[1], (const uint32_t *)&row[2],
                            (const uint32_t *)&row[3]};
    const int at = (four + 4 * chunk) % WORDS;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t column[4];
      turn(w[0][j], w[1][j], w[2][j], w[3][j], column);
#pragma unroll
      for (int k = 0; k < 4; k++) words[(chunk * EACH + j * 4 + k) * WORDS + at] = column[k];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SIDE * SIDE / EACH / THREADS; i++) {
    const int unit = threadIdx.x + i * THREADS, k = unit / 8, part = unit % 8;
    if (k0 + k < p.K && n0 + part * EACH < p.N)
      *(uint4 *)(p.y + slice + (k0 + k) * p.N + n0 + part * EACH) =
          *(const uint4 *)&words[k * WORDS + (part + k / EACH) % 8 * 4];
  }
}

static __global__ void __launch_bounds__(THREADS) elements(const __grid_constant__ problem p, int64_t n) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
    const int64_t slice = i / (p.N * p.K), k = i / p.N % p.K;
    p.y[i] = p.x[(slice * p.N + i % p.N) * p.K + k];
  }
}

static rfr_status run(const rfr_call *c) {
  enum { MOST_SIDE = 65535 };
  const rfr_type *x = &c->in[0].type;
  const int64_t n = rfi_elements(&c->in[0]), slices = x->rank == 3 ? x->shape[0] : 1;
  const problem p = {(const uint8_t *)c->in[0].data, (uint8_t *)c->out[0].data, x->shape[x->rank - 2],
                     x->shape[x->rank - 1]};
  if (n == 0) return RFR_OK;
  const int64_t high = rfi_blocks(p.N, SIDE), most = (int64_t)rfi_cuda_info_of(c)->sms * 8;
  const bool whole = p.N % EACH == 0 && p.K % EACH == 0 && ((uintptr_t)p.x | (uintptr_t)p.y) % EACH == 0;
  if (whole && high <= MOST_SIDE && slices <= MOST_SIDE) {
    tiles<<<dim3((unsigned)rfi_blocks(p.K, SIDE), (unsigned)high, (unsigned)slices), THREADS, 0, rfi_stream(c)>>>(p);
  } else {
    const int64_t need = rfi_blocks(n, THREADS);
    elements<<<(unsigned)(need < most ? need : most), THREADS, 0, rfi_stream(c)>>>(p, n);
  }
  return rfi_cuda_launched("transposed");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(transposed) = {run, NULL};
