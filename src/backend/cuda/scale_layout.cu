/* SPDX-License-Identifier: Apache-2.0
 *
 * Scales of blocks in the layout of cuBLASLt. quantize writes the scales of a line one after another, as grouped GEMMs
 * read them; cuBLASLt expects the scales of one block along K for all lines together.
 */
#include "backend/cuda/scale_layout.h"

#include "backend/cuda/kernels.cuh"

enum { SIDE = 32, DOWN = 8 };

static __global__ void __launch_bounds__(SIDE *DOWN)
    transpose(const float *from, int64_t lines, int64_t blocks, float *to) {
  __shared__ float tile[SIDE][SIDE + 1];
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  const int64_t line = (int64_t)blockIdx.x * SIDE, block = (int64_t)blockIdx.y * SIDE;
  for (int i = y; i < SIDE; i += DOWN)
    if (line + i < lines && block + x < blocks) tile[i][x] = from[(line + i) * blocks + block + x];
  __syncthreads();
  for (int i = y; i < SIDE; i += DOWN)
    if (block + i < blocks && line + x < lines) to[(block + i) * lines + line + x] = tile[x][i];
}

static __global__ void pad_rows(const float *from, int64_t lines, int64_t blocks, int64_t pitch, float *to) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < lines * pitch) to[i] = i % pitch < blocks ? from[i / pitch * blocks + i % pitch] : 0.0f;
}

extern "C" rfr_status rfi_cuda_scale_layout(const float *from, int64_t lines, int64_t blocks, bool each_line, float *to,
                                            cudaStream_t stream) {
  const int64_t pitch = (blocks + 3) / 4 * 4;
  const dim3 tiles((unsigned)rfi_blocks(lines, SIDE), (unsigned)rfi_blocks(blocks, SIDE));
  if (each_line) transpose<<<tiles, SIDE * DOWN, 0, stream>>>(from, lines, blocks, to);
  else pad_rows<<<(unsigned)rfi_blocks(lines * pitch, 256), 256, 0, stream>>>(from, lines, blocks, pitch, to);
  return rfi_cuda_launched("layout of scales");
}
