/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels for measuring GEMMs: random operands, because zeros would run faster, and a
 * comparison of two results by their bytes. Every thread that finds a difference stores the
 * same 1.
 */
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/tune.h"

enum { THREADS = 512, MOST_BLOCKS = 4096 };

static __device__ uint32_t mix(uint64_t x) { /* splitmix64 */
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return (uint32_t)((x ^ (x >> 31)) >> 32);
}

/* Uniform in [-1, 1). */
template <typename T> static __global__ void random_numbers(T *to, int64_t n, uint32_t seed) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
    to[i] = rfi_narrow<T>((float)(int32_t)mix(((uint64_t)seed << 40) + (uint64_t)i) * 0x1p-31f);
}

/* Finite codes of 8 bits. */
static __global__ void random_codes(uint8_t *to, int64_t n, uint32_t seed) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
    const uint32_t draw = mix(((uint64_t)seed << 40) + (uint64_t)i);
    to[i] = (uint8_t)((draw & 0x80u) | (draw >> 8) % 0x70u);
  }
}

static __global__ void compare(const uint16_t *a, const uint16_t *b, int64_t n, int *differs) {
  const int64_t step = (int64_t)gridDim.x * THREADS;
  bool other = false;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) other |= a[i] != b[i];
  if (other) *differs = 1;
}

static unsigned blocks_for(int64_t n) {
  const int64_t blocks = (n + THREADS - 1) / THREADS;
  return (unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
}

extern "C" rfr_status rfi_cuda_random(void *to, rfr_dtype dtype, int64_t n, uint32_t seed, cudaStream_t stream) {
  if (n == 0) return RFR_OK;
  if (dtype == RFR_E4M3 || dtype == RFR_E5M2)
    random_codes<<<blocks_for(n), THREADS, 0, stream>>>((uint8_t *)to, n, seed);
  RFI_WITH_FLOAT(dtype, T, random_numbers<T><<<blocks_for(n), THREADS, 0, stream>>>((T *)to, n, seed));
  return rfi_cuda_launched("random numbers");
}

extern "C" rfr_status rfi_cuda_compare(const void *a, const void *b, int64_t bytes, int *differs, cudaStream_t stream) {
  const int64_t n = bytes / 2;
  if (n == 0) return RFR_OK;
  compare<<<blocks_for(n), THREADS, 0, stream>>>((const uint16_t *)a, (const uint16_t *)b, n, differs);
  return rfi_cuda_launched("compare");
}
