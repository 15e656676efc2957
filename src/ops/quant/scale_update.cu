/* SPDX-License-Identifier: Apache-2.0
 *
 * scale_update on a GPU, as on the CPU: first the largest finite amax of each slot, by integer maxima, then the history
 * of each slot.
 */
#include <math.h>

#include "backend/cuda/kernels.cuh"
#include "ops/quant/scaling.h"

enum { HISTORY, SCALE, SKIP, AMAX, THREADS = 128, MOST = 128 };

typedef struct amaxes {
  const float *x[MOST];
  int slot[MOST], count[MOST], n;
} amaxes;

static __global__ void collect(const __grid_constant__ amaxes a, uint32_t *newest) {
  for (int i = blockIdx.x; i < a.n; i += gridDim.x)
    for (int k = threadIdx.x; k < a.count[i]; k += THREADS) {
      const uint32_t u = rfi_magnitude(a.x[i][k]);
      if (u > 0 && u < RFI_F32_INFINITE) atomicMax(newest + a.slot[i] + k, u);
    }
}

/* A block has SLOTS slots, and DOWN threads for the rows of each. Rows move down by one, the last ones first: every row
 * is read before the barrier that precedes its first write. */
enum { SLOTS = 32, DOWN = 16, EACH = 4 };

static __global__ void __launch_bounds__(SLOTS *DOWN)
    update(float *history, float *scale, const int32_t *skip, const uint32_t *newest, int64_t H, int64_t S,
           float largest, int only_newest) {
  __shared__ float most[DOWN][SLOTS];
  const int lane = threadIdx.x % SLOTS, down = threadIdx.x / SLOTS;
  const int64_t s = (int64_t)blockIdx.x * SLOTS + lane;
  const bool active = s < S && !(skip && *skip != 0) && newest[s] != 0;
  float amax = active ? rfi_number(newest[s]) : 0.0f;
  for (int64_t end = H; end > 1; end -= DOWN * EACH) {
    float row[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const int64_t h = end - 1 - down - k * DOWN;
      row[k] = active && h > 0 ? history[(h - 1) * S + s] : 0.0f;
      if (!only_newest) amax = row[k] > amax ? row[k] : amax;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const int64_t h = end - 1 - down - k * DOWN;
      if (active && h > 0) history[h * S + s] = row[k];
    }
  }
  most[down][lane] = amax;
  __syncthreads();
  if (down > 0 || !active) return;
  for (int k = 1; k < DOWN; k++) amax = most[k][lane] > amax ? most[k][lane] : amax;
  history[s] = rfi_number(newest[s]);
  scale[s] = rfi_scale_of(rfi_magnitude(amax), largest, RFI_F32_LARGEST, 0);
}

static rfr_status run(const rfr_call *c) {
  const int64_t H = c->in[HISTORY].type.shape[0], S = c->in[HISTORY].type.shape[1];
  const float largest = ldexpf(rfi_largest((rfr_dtype)c->attr[0].i), -(int)c->attr[1].i);
  const int32_t *skip = (const int32_t *)c->in[SKIP].data;
  uint32_t *newest = (uint32_t *)c->workspace;
  if (S == 0) return RFR_OK;
  cudaMemsetAsync(newest, 0, sizeof *newest * (size_t)S, rfi_stream(c));
  for (int first = AMAX; first < c->n_in; first += MOST) {
    amaxes a = {};
    for (; a.n < MOST && first + a.n < c->n_in; a.n++) {
      a.x[a.n] = (const float *)c->in[first + a.n].data;
      a.slot[a.n] = (int)c->attr[3].l.x[first + a.n - AMAX];
      a.count[a.n] = (int)c->in[first + a.n].type.shape[0];
    }
    collect<<<a.n, THREADS, 0, rfi_stream(c)>>>(a, newest);
  }
  update<<<(unsigned)rfi_blocks(S, SLOTS), SLOTS * DOWN, 0, rfi_stream(c)>>>(
      (float *)c->out[0].data, (float *)c->out[1].data, skip, newest, H, S, largest, (int)c->attr[2].i);
  return rfi_cuda_launched("scale_update");
}

static size_t workspace(const rfr_call *c) { return sizeof(uint32_t) * (size_t)c->in[HISTORY].type.shape[1]; }

extern "C" const rfi_cuda_kernel RFI_CUDA(scale_update) = {run, workspace};
