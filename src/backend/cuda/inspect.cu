/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks ranges of memory for the checked runner (exec/debug.c). The ranges are in memory that host
 * and device share; a block reads one range, and every thread that finds a wrong byte stores the
 * same 1.
 */
#include "backend/cuda/kernels.cuh"

enum { THREADS = 512, SHARES = 8 }; /* SHARES blocks read a range: some ranges have 32 MiB, most have 256 bytes */

static __global__ void inspect(rfi_range *ranges) {
  rfi_range *range = &ranges[blockIdx.x];
  const unsigned char *at = range->at;
  const int64_t bytes = range->bytes, step = (int64_t)THREADS * SHARES;
  const int64_t first = (int64_t)blockIdx.y * THREADS + threadIdx.x;
  const uint32_t byte = (uint32_t)range->byte & 0xFF, word = byte * 0x01010101u;
  const int64_t head = (int64_t)(-(uintptr_t)at & 15) < bytes ? (int64_t)(-(uintptr_t)at & 15) : bytes;
  const int64_t packs = (bytes - head) / 16;
  const uint4 *pack = (const uint4 *)(at + head);
  bool broken = false;
  for (int64_t i = first; i < packs; i += step) {
    const uint4 x = pack[i];
    broken |= x.x != word || x.y != word || x.z != word || x.w != word;
  }
  for (int64_t i = first; i < bytes - packs * 16; i += step) broken |= at[i < head ? i : i + packs * 16] != byte;
  if (broken) range->broken = 1;
}

extern "C" rfr_status rfi_cuda_inspect(rfi_range *ranges, int n, cudaStream_t stream) {
  if (n == 0) return RFR_OK;
  inspect<<<dim3((unsigned)n, SHARES), THREADS, 0, stream>>>(ranges);
  return rfi_cuda_launched("inspect");
}
