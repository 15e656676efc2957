/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of the parts of all ranks. The CPU's definition (rfi_collective_sum):
 *
 *   to[i] = round((((f32)part[0][i] + part[1][i]) + part[2][i]) + ...)
 *
 * Memory-bound. It runs concurrently with GEMMs, so it has few blocks, which occupy multiprocessors for a short time.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/collective/collective_sum.h"

enum { THREADS = 256, MOST_BLOCKS = 528 }; /* 4 blocks on each multiprocessor of an H100 reach its bandwidth */

template <typename T, int V>
static __global__ void __launch_bounds__(THREADS) sum_parts(const T *parts, int ranks, int64_t n, T *to) {
  typedef rfi_pack<T, V> pack;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n / V; i += (int64_t)gridDim.x * THREADS) {
    const pack a = ((const pack *)parts)[i], b = ((const pack *)(parts + n))[i];
    float total[V];
#pragma unroll
    for (int v = 0; v < V; v++) total[v] = rfi_widen(a.x[v]) + rfi_widen(b.x[v]);
    for (int r = 2; r < ranks; r++) {
      const pack next = ((const pack *)(parts + r * n))[i];
#pragma unroll
      for (int v = 0; v < V; v++) total[v] += rfi_widen(next.x[v]);
    }
    pack sum;
#pragma unroll
    for (int v = 0; v < V; v++) sum.x[v] = rfi_narrow<T>(total[v]);
    rfi_put((pack *)to + i, sum);
  }
}

template <typename T, int V>
static rfr_status launch(const T *parts, int ranks, int64_t n, T *to, cudaStream_t stream) {
  const int64_t blocks = rfi_blocks(n / V, THREADS);
  sum_parts<T, V><<<(unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), THREADS, 0, stream>>>(parts, ranks, n, to);
  return rfi_cuda_launched("reduce_scatter");
}

extern "C" rfr_status rfi_collective_sum_cuda(rfr_dtype dtype, int ranks, const void *parts, int64_t n, void *to,
                                              void *stream) {
  rfr_status s = RFR_OK;
  if (n == 0) return RFR_OK;
  const bool aligned = ((uintptr_t)parts | (uintptr_t)to) % 16 == 0;
  RFI_WITH_FLOAT(dtype, T, {
    if (aligned && n % rfi_pack_width<T> == 0)
      s = launch<T, rfi_pack_width<T>>((const T *)parts, ranks, n, (T *)to, (cudaStream_t)stream);
    else s = launch<T, 1>((const T *)parts, ranks, n, (T *)to, (cudaStream_t)stream);
  });
  return s;
}
