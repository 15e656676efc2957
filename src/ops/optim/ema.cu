/* SPDX-License-Identifier: Apache-2.0
 *
 * The moving averages of weights on a GPU, in place, one pass over memory. As in update.cu, adjacent averages are one
 * launch whose arguments have the tensors' addresses, and chunks are dealt to the blocks in rotation. A thread has 4
 * adjacent elements where both addresses allow it. If skip is set, a block ends before it writes.
 */
#include "ops/elementwise/map.cuh"
#include "ops/optim/ema.h"

enum { THREADS = 256, CHUNK = 4096, PER_SM = 8 };
enum { MOST = 512 }; /* tensors per launch: arguments have at most 32,764 bytes */

typedef struct average {
  float *average;
  const void *w;
  int64_t n, first; /* number of elements; first chunk, numbered over all tensors */
  rfr_dtype dtype;  /* of w */
  bool wide;        /* the addresses allow accesses of 4 elements */
} average;

typedef struct averages {
  const int32_t *skip; /* NULL: 0 */
  const int64_t *step;
  double decay;
  int64_t start, chunks;
  int warmup, n;
  average of[MOST];
} averages;

template <typename W>
static __device__ __forceinline__ void average_range(const average &x, float share, int64_t begin, int64_t end) {
  const W *const w = (const W *)x.w;
  const int64_t fours = x.wide ? begin + (end - begin) / 4 * 4 : begin;
  for (int64_t i = begin + (int64_t)threadIdx.x * 4; i < fours; i += THREADS * 4) {
    const rfi_pack<W, 4> wp = *(const rfi_pack<W, 4> *)(w + i);
    rfi_pack<float, 4> a = *(const rfi_pack<float, 4> *)(x.average + i);
#pragma unroll
    for (int k = 0; k < 4; k++)
      a.x[k] = share == 1 ? rfi_widen(wp.x[k]) : a.x[k] + share * (rfi_widen(wp.x[k]) - a.x[k]);
    rfi_put((rfi_pack<float, 4> *)(x.average + i), a);
  }
  for (int64_t i = fours + threadIdx.x; i < end; i += THREADS) {
    const float v = rfi_widen(w[i]), a = x.average[i];
    x.average[i] = share == 1 ? v : a + share * (v - a);
  }
}

static __global__ void __launch_bounds__(THREADS) average_all(const __grid_constant__ averages all) {
  if (all.skip && *all.skip) return;
  const float share = rfi_ema_share(all.decay, all.start, all.warmup, all.step[1]);
  int i = 0; /* the last tensor that begins at or before the chunk; empty tensors are skipped */
  for (int64_t chunk = blockIdx.x; chunk < all.chunks; chunk += gridDim.x) {
    while (i + 1 < all.n && all.of[i + 1].first <= chunk) i++;
    const average &x = all.of[i];
    const int64_t begin = (chunk - x.first) * CHUNK, end = min(x.n, begin + CHUNK);
    if (x.dtype == RFR_F32) average_range<float>(x, share, begin, end);
    else if (x.dtype == RFR_BF16) average_range<rfi_bf16>(x, share, begin, end);
    else average_range<rfi_f16>(x, share, begin, end);
  }
}

static bool share_launch(const averages &a, const averages &b) {
  return a.skip == b.skip && a.step == b.step && a.decay == b.decay && a.start == b.start && a.warmup == b.warmup;
}

/* Launches the first of n calls, as many as fit into one launch; returns how many. */
static int launch_some(const rfr_call *const *calls, int n) {
  averages all = {};
  for (; all.n < n && all.n < MOST; all.n++) {
    const rfr_call *c = calls[all.n];
    averages own = {};
    own.skip = (const int32_t *)c->in[2].data;
    own.step = (const int64_t *)c->in[3].data;
    own.decay = c->attr[0].f;
    own.start = c->attr[1].i;
    own.warmup = (int)c->attr[2].i;
    if (all.n == 0) all = own;
    else if (!share_launch(all, own)) break;
    average x = {(float *)c->in[0].data, c->in[1].data, rfi_elements(&c->in[0]), all.chunks,
                 c->in[1].type.dtype,    false};
    x.wide = (uintptr_t)x.average % 16 == 0 && (uintptr_t)x.w % (x.dtype == RFR_F32 ? 16 : 8) == 0;
    all.of[all.n] = x;
    all.chunks += rfi_blocks(x.n, CHUNK);
  }
  const int64_t most = (int64_t)rfi_cuda_info_of(calls[0])->sms * PER_SM;
  const unsigned grid = (unsigned)(all.chunks < most ? all.chunks : most);
  if (grid > 0) average_all<<<grid, THREADS, 0, rfi_stream(calls[0])>>>(all);
  return all.n;
}

static rfr_status ema_all(const rfr_call *const *calls, int n) {
  for (int i = 0; i < n;) i += launch_some(calls + i, n - i);
  return rfi_cuda_launched("ema");
}
static rfr_status ema_run(const rfr_call *c) { return ema_all(&c, 1); }

struct same_op : rfi_map_op {
  template <int V> __device__ void operator()(int64_t, const float (&x)[1][V], float (&y)[1][V]) const {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v];
  }
};

static rfr_status weight_run(const rfr_call *c) {
  rfr_status s = RFR_OK;
  RFI_WITH_FLOAT(c->out[0].type.dtype, T, s = rfi_map<float, T, 1, 1>(c, "ema_weight", same_op()));
  return s;
}

extern "C" const rfi_cuda_kernel RFI_CUDA(ema) = {ema_run, NULL, NULL, ema_all};
extern "C" const rfi_cuda_kernel RFI_CUDA(ema_weight) = {weight_run, NULL};
