/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of segments and direct preference optimization on a GPU.
 *
 *   y[s]  = sum of x[offsets[s]] ... x[offsets[s+1] - 1]        dx[t] = dy[segment of t]
 *   loss  = inv_pairs sum over pairs of softplus(-beta h)       h = sums[2p+1] - sums[2p] - reference[p]
 *
 * One warp adds a segment, and one block all pairs, in f64 and in a fixed order. A batch has a few hundred pairs.
 */
#include "backend/cuda/kernels.cuh"
#include "ops/loss/dpo_pair.h"

enum { BETA, SMOOTHING };
enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES };

/* Every warp adds in the same order; all lanes get the sum. */
static __device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/* ---- segment_sum ---- */

template <typename X>
static __global__ void __launch_bounds__(THREADS)
    segment_sum(const X *x, const int32_t *offsets, int64_t rows, int64_t segments, float *y) {
  const int64_t s = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
  if (s >= segments) return;
  const int64_t begin = max(offsets[s], 0), end = min((int64_t)offsets[s + 1], rows);
  double sum = 0;
  for (int64_t t = begin + threadIdx.x % LANES; t < end; t += LANES) sum += (double)rfi_widen(x[t]);
  sum = warp_sum(sum);
  if (threadIdx.x % LANES == 0) y[s] = (float)sum;
}

static rfr_status sum_run(const rfr_call *c) {
  const int64_t segments = c->out[0].type.shape[0];
  if (segments == 0) return RFR_OK;
  RFI_WITH_FLOAT(c->in[0].type.dtype, X,
                 (segment_sum<X><<<(unsigned)rfi_blocks(segments, WARPS), THREADS, 0, rfi_stream(c)>>>(
                     (const X *)c->in[0].data, (const int32_t *)c->in[1].data, c->in[0].type.shape[0], segments,
                     (float *)c->out[0].data)))
  return rfi_cuda_launched("segment_sum");
}

/* The segment of an element is found by bisection: offsets ascend. Empty segments have no element. */
template <typename X>
static __global__ void __launch_bounds__(THREADS)
    segment_sum_bwd(const float *dy, const int32_t *offsets, int64_t rows, int64_t segments, X *dx) {
  const int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (t >= rows) return;
  int64_t low = 0, high = segments; /* the last s with offsets[s] <= t lies in [low, high) */
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= t) low = middle;
    else high = middle;
  }
  const bool inside = segments > 0 && offsets[low] <= t && t < offsets[low + 1];
  dx[t] = rfi_narrow<X>(inside ? dy[low] : 0.0f);
}

static rfr_status sum_bwd_run(const rfr_call *c) {
  const int64_t rows = c->out[0].type.shape[0];
  if (rows == 0) return RFR_OK;
  RFI_WITH_FLOAT(c->out[0].type.dtype, X,
                 (segment_sum_bwd<X><<<(unsigned)rfi_blocks(rows, THREADS), THREADS, 0, rfi_stream(c)>>>(
                     (const float *)c->in[0].data, (const int32_t *)c->in[1].data, rows, c->in[0].type.shape[0],
                     (X *)c->out[0].data)))
  return rfi_cuda_launched("segment_sum_bwd");
}

/* ---- dpo_loss ---- */

struct dpo_args {
  const void *sums;
  const float *reference, *inv_pairs, *dloss;
  const int32_t *pairs;
  int64_t n;
  double beta, smoothing;
  float *out[3]; /* loss, margin, accuracy; NULL: not computed */
  void *dsums;
};

template <typename X> static __device__ __forceinline__ double gain(const dpo_args &a, int64_t p) {
  const X *sums = (const X *)a.sums;
  return rfi_dpo_gain((double)rfi_widen(sums[2 * p]), (double)rfi_widen(sums[2 * p + 1]), (double)a.reference[p]);
}

template <typename X> static __global__ void __launch_bounds__(THREADS) dpo_loss(const __grid_constant__ dpo_args a) {
  __shared__ double part[WARPS][3];
  double sums[3] = {};
  for (int64_t p = threadIdx.x; p < a.n; p += THREADS) {
    if (a.pairs[p] < 0) continue;
    const double h = gain<X>(a, p);
    sums[0] += rfi_dpo_loss(a.beta * h, a.smoothing);
    sums[1] += a.beta * h;
    sums[2] += h > 0;
  }
#pragma unroll
  for (int j = 0; j < 3; j++) {
    sums[j] = warp_sum(sums[j]);
    if (threadIdx.x % LANES == 0) part[threadIdx.x / LANES][j] = sums[j];
  }
  __syncthreads();
  if (threadIdx.x >= 3 || !a.out[threadIdx.x]) return;
  double sum = 0;
  for (int w = 0; w < WARPS; w++) sum += part[w][threadIdx.x];
  *a.out[threadIdx.x] = (float)(sum * (double)*a.inv_pairs);
}

template <typename X>
static __global__ void __launch_bounds__(THREADS) dpo_loss_bwd(const __grid_constant__ dpo_args a) {
  const int64_t p = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (p >= a.n) return;
  const double by = a.beta * (double)*a.dloss * (double)*a.inv_pairs;
  const double d = a.pairs[p] >= 0 ? by * rfi_dpo_slope(a.beta * gain<X>(a, p), a.smoothing) : 0.0;
  ((X *)a.dsums)[2 * p] = rfi_narrow<X>((float)-d);
  ((X *)a.dsums)[2 * p + 1] = rfi_narrow<X>((float)d);
}

static dpo_args args_of(const rfr_call *c, int first) {
  dpo_args a = {};
  a.sums = c->in[first].data;
  a.reference = (const float *)c->in[first + 1].data;
  a.pairs = (const int32_t *)c->in[first + 2].data;
  a.inv_pairs = (const float *)c->in[first + 3].data;
  a.n = c->in[first + 2].type.shape[0];
  a.beta = c->attr[BETA].f;
  a.smoothing = c->attr[SMOOTHING].f;
  return a;
}

static rfr_status dpo_run(const rfr_call *c) {
  dpo_args a = args_of(c, 0);
  for (int j = 0; j < 3; j++) a.out[j] = (float *)c->out[j].data;
  RFI_WITH_FLOAT(c->in[0].type.dtype, X, (dpo_loss<X><<<1, THREADS, 0, rfi_stream(c)>>>(a)))
  return rfi_cuda_launched("dpo_loss");
}

static rfr_status dpo_bwd_run(const rfr_call *c) {
  dpo_args a = args_of(c, 1);
  a.dloss = (const float *)c->in[0].data;
  a.dsums = c->out[0].data;
  if (a.n == 0 || !a.dsums) return RFR_OK;
  RFI_WITH_FLOAT(c->in[1].type.dtype, X,
                 (dpo_loss_bwd<X><<<(unsigned)rfi_blocks(a.n, THREADS), THREADS, 0, rfi_stream(c)>>>(a)))
  return rfi_cuda_launched("dpo_loss_bwd");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(segment_sum) = {sum_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(segment_sum_bwd) = {sum_bwd_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(dpo_loss) = {dpo_run, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(dpo_loss_bwd) = {dpo_bwd_run, NULL};
