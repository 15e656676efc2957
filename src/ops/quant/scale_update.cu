/* SPDX-License-Identifier: Apache-2.0
 *
 * collect_amax and scale_update on a GPU, as on the CPU: the largest finite amax of each slot, by integer maxima, then
 * the history of each slot.
 */
#include <math.h>

#include "backend/cuda/kernels.cuh"
#include "ops/op_index.h"
#include "ops/quant/scaling.h"

/* ---- collect_amax ---- */

enum { THREADS = 128, MOST = 128 };

typedef struct amaxes {
  const float *x[MOST];
  int at[MOST], count[MOST], n;
} amaxes;

static __global__ void collect(const __grid_constant__ amaxes a, uint32_t *y) {
  for (int i = blockIdx.x; i < a.n; i += gridDim.x)
    for (int k = threadIdx.x; k < a.count[i]; k += THREADS) {
      const uint32_t u = rfi_magnitude(a.x[i][k]);
      if (u > 0 && u < RFI_F32_INFINITE) atomicMax(y + a.at[i], u);
    }
}

static rfr_status run_collect(const rfr_call *c) {
  enum { AMAX = RFI_IN_collect_amax_amax };
  uint32_t *y = (uint32_t *)c->out[0].data;
  const size_t bytes = sizeof *y * 2 * (size_t)c->attr[RFI_AT_collect_amax_slots].i;
  if (!c->in[RFI_IN_collect_amax_onto].data) cudaMemsetAsync(y, 0, bytes, rfi_stream(c));
  for (int first = AMAX; first < c->n_in; first += MOST) {
    amaxes a = {};
    for (; a.n < MOST && first + a.n < c->n_in; a.n++) {
      a.x[a.n] = (const float *)c->in[first + a.n].data;
      a.at[a.n] = (int)c->attr[RFI_AT_collect_amax_at].l.x[first + a.n - AMAX];
      a.count[a.n] = (int)c->in[first + a.n].type.shape[0];
    }
    collect<<<a.n, THREADS, 0, rfi_stream(c)>>>(a, y);
  }
  return rfi_cuda_launched("collect_amax");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(collect_amax) = {run_collect, NULL};

/* ---- scale_update ---- */

/* A block has SLOTS slots, with DOWN threads for the rows of each. Rows move down by one, the last ones first: every
 * row is read before the barrier that precedes its first write. */
enum { SLOTS = 32, DOWN = 16, EACH = 4 };

static __global__ void __launch_bounds__(SLOTS *DOWN)
    update(float *history, float *scale, const int32_t *skip, const float *collected, int rows, int64_t H,
           int64_t S, float largest_e4m3, float largest_e5m2, int only_newest) {
  __shared__ float most[DOWN][SLOTS];
  const int lane = threadIdx.x % SLOTS, down = threadIdx.x / SLOTS;
  const int64_t s = (int64_t)blockIdx.x * SLOTS + lane;
  uint32_t newest = 0;
  float largest = largest_e4m3;
  for (int r = 0; s < S && r < rows; r++) {
    const uint32_t u = rfi_magnitude(collected[r * S + s]);
    if (u <= newest || u >= RFI_F32_INFINITE) continue;
    newest = u;
    largest = r % 2 ? largest_e5m2 : largest_e4m3;
  }
  const bool active = s < S && !(skip && *skip != 0) && newest != 0;
  float amax = active ? rfi_number(newest) : 0.0f;
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
  history[s] = rfi_number(newest);
  scale[s] = rfi_scale_of(rfi_magnitude(amax), largest, RFI_F32_LARGEST, 0);
}

static rfr_status run_update(const rfr_call *c) {
  const rfr_arg *in = c->in, *amax = &in[RFI_IN_scale_update_amax];
  const int64_t H = in[RFI_IN_scale_update_history].type.shape[0], S = in[RFI_IN_scale_update_history].type.shape[1];
  const int margin = (int)c->attr[RFI_AT_scale_update_margin].i;
  if (S == 0) return RFR_OK;
  update<<<(unsigned)rfi_blocks(S, SLOTS), SLOTS * DOWN, 0, rfi_stream(c)>>>(
      (float *)c->out[RFI_OUT_scale_update_history1].data, (float *)c->out[RFI_OUT_scale_update_scale1].data,
      (const int32_t *)in[RFI_IN_scale_update_skip].data, (const float *)amax->data, (int)amax->type.shape[0], H, S,
      ldexpf(rfi_largest(RFR_E4M3), -margin), ldexpf(rfi_largest(RFR_E5M2), -margin),
      (int)c->attr[RFI_AT_scale_update_newest].i);
  return rfi_cuda_launched("scale_update");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(scale_update) = {run_update, NULL};
