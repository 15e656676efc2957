/* SPDX-License-Identifier: Apache-2.0
 *
 * One block a row: log sum exp with a running maximum per thread, merged in a fixed order, then
 *
 *   nll = lse - logit[target]        dlogits = (e^(logit - lse) - onehot) dloss inv_valid
 *
 * With a cap a logit is cap tanh(logit / cap) wherever it is read, and dlogits has the factor
 * 1 - (capped / cap)^2. An invalid target (ignored, or outside the vocabulary) gives 0 and a row of zeros. dlogits of a
 * narrower type may lie over the logits they come from: a block reads a stretch of its row whole
 * before it writes it, and what is written never reaches what is still to be read.
 */
#include "ops/loss/ce_cuda.h"

#include "backend/cuda/kernels.cuh"

enum { THREADS = 512, PER_THREAD = 4 };

/* (maximum, sum of e^(x - maximum)) of two parts. */
static __device__ float2 merge(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  if (top == -INFINITY) return make_float2(top, 0.0f);
  return make_float2(top, a.y * expf(a.x - top) + b.y * expf(b.x - top));
}

static __device__ float softcap(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

static __device__ float2 block_merge(float2 x) {
  __shared__ float2 part[THREADS / 32];
  for (int step = 16; step > 0; step >>= 1)
    x = merge(x, make_float2(__shfl_xor_sync(0xffffffffu, x.x, step), __shfl_xor_sync(0xffffffffu, x.y, step)));
  if ((threadIdx.x & 31) == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  x = part[0];
  for (int w = 1; w < THREADS / 32; w++) x = merge(x, part[w]);
  return x;
}

template <typename X, typename D> static __global__ void __launch_bounds__(THREADS) ce_rows(const rfi_ce_rows r) {
  const int64_t row = blockIdx.x;
  const X *x = (const X *)r.logits + row * r.logits_ld;
  const int32_t target = r.targets[row];
  const bool valid = target != r.ignore && target >= 0 && target < r.V;
  float2 mine = make_float2(-INFINITY, 0.0f);
  for (int64_t i = threadIdx.x; i < r.V; i += THREADS) {
    const float v = softcap(rfi_widen(x[i]), r.cap);
    if (v > mine.x) mine = make_float2(v, mine.y * expf(mine.x - v) + 1.0f);
    else mine.y += expf(v - mine.x); /* -inf - -inf is NaN, as on the CPU when a whole row is -inf */
  }
  const float2 all = block_merge(mine);
  const double lse = (double)all.x + log((double)all.y);
  const float hit = valid ? softcap(rfi_widen(x[target]), r.cap) : 0.0f;
  if (threadIdx.x == 0) {
    if (r.lse) r.lse[row] = (float)lse;
    if (r.nll) r.nll[row] = valid ? lse - (double)hit : 0.0;
  }
  if (!r.dlogits) return;
  D *d = (D *)r.dlogits + row * r.dlogits_ld;
  const float scale = *r.dloss * *r.inv_valid, high = (float)lse, low = (float)(lse - (double)high);
  for (int64_t i0 = 0; i0 < r.V; i0 += THREADS * PER_THREAD) {
    float v[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
      const int64_t i = i0 + k * THREADS + threadIdx.x;
      v[k] = i < r.V ? softcap(rfi_widen(x[i]), r.cap) : 0.0f;
    }
    __syncthreads(); /* also: every thread has read its target's logit */
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
      const int64_t i = i0 + k * THREADS + threadIdx.x;
      if (i >= r.V) continue;
      const float p = expf(v[k] - high - low);
      const float slope = r.cap > 0.0f ? (1.0f - v[k] / r.cap) * (1.0f + v[k] / r.cap) : 1.0f;
      d[i] = rfi_narrow<D>(valid ? (i == target ? p - 1.0f : p) * scale * slope : 0.0f);
    }
  }
}

static __global__ void __launch_bounds__(1024)
    ce_loss(const double *nll, int64_t T, const float *inv_valid, float *loss) {
  __shared__ double part[1024];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < T; i += 1024) sum += nll[i];
  part[threadIdx.x] = sum;
  for (int half = 512; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss = (float)(part[0] * (double)*inv_valid);
}

template <typename X> static void launch(const rfi_ce_rows *r, cudaStream_t stream) {
  const rfr_dtype to = r->dlogits ? r->dlogits_type : RFR_F32;
  RFI_WITH_FLOAT(to, D, (ce_rows<X, D><<<(unsigned)r->rows, THREADS, 0, stream>>>(*r)))
}

rfr_status rfi_ce_rows_cuda(const rfi_ce_rows *r, void *stream) {
  if (r->rows == 0) return RFR_OK;
  RFI_WITH_FLOAT(r->logits_type, X, launch<X>(r, (cudaStream_t)stream))
  return rfi_cuda_launched("cross_entropy");
}

rfr_status rfi_ce_loss_cuda(const double *nll, int64_t T, const float *inv_valid, float *loss, void *stream) {
  ce_loss<<<1, 1024, 0, (cudaStream_t)stream>>>(nll, T, inv_valid, loss);
  return rfi_cuda_launched("cross_entropy's sum");
}
