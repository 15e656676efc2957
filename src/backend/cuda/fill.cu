/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel of graph_fill.c and of the op fill.
 */
#include "backend/cuda/kernels.cuh"

static __global__ void fill(unsigned char *to, uint4 pattern, int64_t n) {
  const int64_t first = (int64_t)blockIdx.x * RFI_FILL_THREADS + threadIdx.x,
                step = (int64_t)gridDim.x * RFI_FILL_THREADS;
  const int64_t packs = (uintptr_t)to % 16 == 0 ? n / 16 : 0;
  for (int64_t i = first; i < packs; i += step) ((uint4 *)to)[i] = pattern;
  for (int64_t i = packs * 16 + first; i < n; i += step)
    to[i] = ((const unsigned char *)&pattern)[(uintptr_t)(to + i) % 16];
}

extern "C" void *rfi_fill_kernel(void) { return (void *)fill; }
