/* SPDX-License-Identifier: Apache-2.0
 *
 * route.h for a warp: a token's scores and those of its chosen experts. Functions whose comment requires it must be
 * called by all lanes of the warp. Rows are read from memory, after the first time from the cache.
 */
#ifndef RFI_ROUTE_ROWS_CUH
#define RFI_ROUTE_ROWS_CUH

#include "backend/cuda/kernels.cuh"
#include "refrain/ops.h"

#define RFI_ROUTE_TINY 1e-20f /* equals the constant in route.h */

static __device__ __forceinline__ float rfi_route_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename X> struct rfi_route {
  const X *logits;
  int experts, kind;
  float max, sum, by; /* of the softmax over all experts */

  __device__ __forceinline__ rfi_route(const X *logits, int experts, int kind)
      : logits(logits), experts(experts), kind(kind), max(0), sum(1), by(1) {}
  __device__ __forceinline__ float logit(int e) const { return rfi_widen(logits[e]); }
  /* Called by the full warp, before scores of RFR_MOE_SOFTMAX. */
  __device__ __forceinline__ void softmax() {
    float high = -INFINITY, all = 0;
    for (int e = threadIdx.x % 32; e < experts; e += 32) high = fmaxf(high, logit(e));
    max = rfi_warp_max(high);
    for (int e = threadIdx.x % 32; e < experts; e += 32) all += expf(logit(e) - max);
    sum = rfi_warp_sum(all);
    by = 1 / sum;
  }
  /* The same for logits in registers, -INFINITY where there is no expert; high: the warp's maximum. */
  template <int V> __device__ __forceinline__ void softmax_in(const float (&logit)[V], float high) {
    float all = 0;
    max = high;
#pragma unroll
    for (int v = 0; v < V; v++) all += expf(logit[v] - max);
    sum = rfi_warp_sum(all);
    by = 1 / sum;
  }
  __device__ __forceinline__ float score_of(float logit) const {
    if (kind == RFR_MOE_SOFTMAX) return expf(logit - max) * by;
    return kind == RFR_MOE_SIGMOID ? rfi_route_sigmoid(logit) : logit;
  }
  __device__ __forceinline__ float score(int e) const { return score_of(logit(e)); }
};

/* Lane j % 32 reads choice j; FEW: at most 32 choices, and each lane keeps its one. An index out of range has score
 * 0. */
template <typename X, bool FEW> struct rfi_chosen {
  const rfi_route<X> &route;
  const int32_t *index;
  int k, mine;
  float own, max, by;

  __device__ __forceinline__ int expert(int j) const {
    const int e = FEW ? mine : index[j];
    return e >= 0 && e < route.experts ? e : -1;
  }
  __device__ __forceinline__ float raw(int j) const {
    const int e = expert(j);
    return e >= 0 ? route.score(e) : route.kind == RFR_MOE_SOFTMAX_CHOSEN ? -3e38f : 0.0f;
  }
  __device__ __forceinline__ float score(int j) const {
    if (FEW) return own;
    return route.kind == RFR_MOE_SOFTMAX_CHOSEN ? expf(raw(j) - max) * by : raw(j);
  }
  /* This lane's next choice after j. */
  __device__ __forceinline__ int next(int j) const { return FEW ? k : j + 32; }
  /* Called by the full warp. mine: the lane's index, if FEW. */
  __device__ __forceinline__ rfi_chosen(const rfi_route<X> &route, const int32_t *index, int k, int mine)
      : route(route), index(index), k(k), mine(mine), own(0), max(0), by(1) {
    const int lane = threadIdx.x % 32;
    if (FEW && lane < k) own = raw(lane);
    if (route.kind != RFR_MOE_SOFTMAX_CHOSEN) return;
    float high = -INFINITY, all = 0;
    for (int j = lane; j < k; j = next(j)) high = fmaxf(high, FEW ? own : raw(j));
    max = rfi_warp_max(high);
    for (int j = lane; j < k; j = next(j)) all += expf((FEW ? own : raw(j)) - max);
    by = 1 / rfi_warp_sum(all);
    if (FEW) own = expf(own - max) * by;
  }
};

#endif
