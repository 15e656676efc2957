/* SPDX-License-Identifier: Apache-2.0
 *
 * The watch ring on a GPU: blocks over all elements write sums to the workspace, one block adds them in a fixed order
 * into the row, which is host memory.
 */
#include "ops/elementwise/map.cuh"
#include "ops/ring/watch_sums.h"

enum { THREADS = 256, WARPS = THREADS / 32, GROUP = 8, MOST_PARTS = 1024 };

struct sums {
  double sum, squares;
  float max, least;
  uint32_t zeros, nans, infs; /* a thread reads fewer than 2^32 elements */
};

static __device__ __forceinline__ void add(sums &s, float x) {
  const float size = fabsf(x);
  const bool finite = size < INFINITY;
  s.nans += x != x;
  s.infs += size == INFINITY;
  s.zeros += size == 0;
  if (!finite) return;
  s.sum += (double)x;
  s.squares += (double)x * (double)x;
  s.max = fmaxf(s.max, size);
  if (size > 0) s.least = fminf(s.least, size);
}

/* Combines two sums; in LEAST, 0 means that there is no value. */
static __device__ __forceinline__ double join(int k, double a, double b) {
  if (k == RFI_WATCH_LEAST) return a == 0 || (b != 0 && b < a) ? b : a;
  return k == RFI_WATCH_MAX ? fmax(a, b) : a + b;
}

/* Combines x[] over a block in a fixed order; thread k < RFI_WATCH_SUMS returns number k. */
static __device__ double block_join(double (&x)[RFI_WATCH_SUMS]) {
  __shared__ double part[WARPS][RFI_WATCH_SUMS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < RFI_WATCH_SUMS; k++) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x[k] = join(k, x[k], __shfl_down_sync(0xffffffffu, x[k], offset));
    if (lane == 0) part[warp][k] = x[k];
  }
  __syncthreads();
  if (threadIdx.x >= RFI_WATCH_SUMS) return 0;
  const int k = (int)threadIdx.x;
  double all = part[0][k];
  for (int w = 1; w < WARPS; w++) all = join(k, all, part[w][k]);
  return all;
}

template <typename X, bool FLAT>
static __global__ void __launch_bounds__(THREADS)
    parts_of(const X *x, int64_t n, const __grid_constant__ rfi_strided_loop walk, double *part) {
  sums s = {0, 0, 0, INFINITY, 0, 0, 0};
  const int64_t groups = (n + GROUP - 1) / GROUP;
  uint64_t count = 0;
  for (int64_t g = (int64_t)blockIdx.x * THREADS + threadIdx.x; g < groups; g += (int64_t)gridDim.x * THREADS) {
    const int64_t first = g * GROUP;
    float a[GROUP];
    if (FLAT && first + GROUP <= n) {
      rfi_widen(rfi_load<X, GROUP>(x + first), a);
#pragma unroll
      for (int v = 0; v < GROUP; v++) add(s, a[v]);
      count += GROUP;
      continue;
    }
    for (int v = 0; v < GROUP && first + v < n; v++, count++)
      add(s, rfi_widen(x[rfi_strided_loop_offset(walk, 0, first + v)]));
  }
  double all[RFI_WATCH_SUMS];
  all[RFI_WATCH_COUNT] = (double)count;
  all[RFI_WATCH_SUM] = s.sum;
  all[RFI_WATCH_SQUARES] = s.squares;
  all[RFI_WATCH_MAX] = s.max;
  all[RFI_WATCH_ZEROS] = s.zeros;
  all[RFI_WATCH_NANS] = s.nans;
  all[RFI_WATCH_INFS] = s.infs;
  all[RFI_WATCH_LEAST] = isinf(s.least) ? 0 : s.least;
  const double mine = block_join(all);
  if (threadIdx.x < RFI_WATCH_SUMS) part[(int64_t)blockIdx.x * RFI_WATCH_SUMS + threadIdx.x] = mine;
}

static __device__ double *row_of(double *ring, const int64_t *step, int64_t slots, int64_t rows, int64_t row) {
  const int64_t slot = step[0] % slots;
  return ring + ((slot < 0 ? slot + slots : slot) * rows + row) * RFI_WATCH_SUMS;
}

static __global__ void __launch_bounds__(THREADS)
    write_row(double *ring, const int64_t *step, int64_t slots, int64_t rows, int64_t row, bool more,
              const double *part, int parts) {
  double all[RFI_WATCH_SUMS];
#pragma unroll
  for (int k = 0; k < RFI_WATCH_SUMS; k++) {
    all[k] = 0;
    for (int p = threadIdx.x; p < parts; p += THREADS) all[k] = join(k, all[k], part[p * RFI_WATCH_SUMS + k]);
  }
  const double mine = block_join(all);
  if (threadIdx.x >= RFI_WATCH_SUMS) return;
  double *to = row_of(ring, step, slots, rows, row) + threadIdx.x;
  *to = more ? join((int)threadIdx.x, *to, mine) : mine;
}

static __global__ void write_end(double *ring, const int64_t *step, int64_t slots, int64_t rows) {
  __threadfence_system();
  *(volatile double *)row_of(ring, step, slots, rows, 0) = (double)(step[0] + 1);
}

static int grid_of(int64_t n) {
  const int64_t parts = rfi_blocks(n, (int64_t)THREADS * GROUP * 2);
  return (int)(parts < 1 ? 1 : parts < MOST_PARTS ? parts : MOST_PARTS);
}

static size_t row_workspace(const rfr_call *call) {
  return (size_t)grid_of(rfi_elements(&call->in[2])) * RFI_WATCH_SUMS * sizeof(double);
}

template <typename X> static void launch(const rfr_call *call) {
  const rfr_arg *x = &call->in[2], *ring = &call->in[0];
  const int64_t n = rfi_elements(x);
  const int grid = grid_of(n);
  double *part = (double *)call->workspace;
  rfi_strided_loop walk;
  rfi_strided_loop_init(&walk, 1, &x);
  const bool flat = walk.rank == 1 && walk.stride[0][0] == 1 && (uintptr_t)x->data % 16 == 0;
  if (flat) parts_of<X, true><<<(unsigned)grid, THREADS, 0, rfi_stream(call)>>>((const X *)x->data, n, walk, part);
  else parts_of<X, false><<<(unsigned)grid, THREADS, 0, rfi_stream(call)>>>((const X *)x->data, n, walk, part);
  write_row<<<1, THREADS, 0, rfi_stream(call)>>>((double *)ring->data, (const int64_t *)call->in[1].data,
                                                 ring->type.shape[0], ring->type.shape[1], call->attr[0].i,
                                                 call->attr[1].i != 0, part, grid);
}

static rfr_status row_run(const rfr_call *call) {
  RFI_WITH_FLOAT(call->in[2].type.dtype, X, launch<X>(call));
  return rfi_cuda_launched("watch_row");
}

static rfr_status end_run(const rfr_call *call) {
  const rfr_arg *ring = &call->in[0];
  write_end<<<1, 1, 0, rfi_stream(call)>>>((double *)ring->data, (const int64_t *)call->in[1].data, ring->type.shape[0],
                                           ring->type.shape[1]);
  return rfi_cuda_launched("watch_end");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(watch_row) = {row_run, row_workspace, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(watch_end) = {end_run, NULL, NULL};
