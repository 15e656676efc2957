/* SPDX-License-Identifier: Apache-2.0
 *
 * The keys that a row of packed attention attends to, from offsets on the device.
 *
 * ends[d], the running maximum of the documents' ends (clipped to T), never decreases, so a row finds its document by
 * bisection for any offsets: descending ones, empty documents and rows outside all documents included.
 */
#ifndef RFI_DOCUMENTS_CUH
#define RFI_DOCUMENTS_CUH

#include "backend/cuda/kernels.cuh"

typedef struct rfi_documents {
  const int32_t *offsets, *ends;
  int64_t stride; /* stride of offsets */
  int n, T;       /* documents, rows */
  int causal, window;
} rfi_documents;

typedef struct rfi_span {
  int first, end;
} rfi_span;

/* One block computes ends[d] = max(0, offsets[1], ..., offsets[d + 1]), each at most T. */
static __global__ void __launch_bounds__(1024)
    rfi_document_ends(const int32_t *offsets, int64_t stride, int n, int T, int32_t *ends) {
  __shared__ int warp_max[32];
  int before = 0;
  for (int d0 = 0; d0 < n; d0 += (int)blockDim.x) {
    if (before == T) { /* all later ends are T too */
      for (int d = d0 + (int)threadIdx.x; d < n; d += (int)blockDim.x) ends[d] = T;
      return;
    }
    const int d = d0 + (int)threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int x = d < n ? min(offsets[(d + 1) * stride], T) : 0;
    x = max(x, 0);
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(0xffffffffu, x, step);
      if (lane >= step) x = max(x, other);
    }
    if (lane == 31) warp_max[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; w++) x = max(x, warp_max[w]);
    x = max(x, before);
    if (d < n) ends[d] = x;
    for (int w = 0; w < (int)blockDim.x / 32; w++) before = max(before, warp_max[w]);
    __syncthreads();
  }
}

/* The rows of t's document; an empty range if t is in none. */
static __device__ __forceinline__ rfi_span rfi_document_of(const rfi_documents &x, int t) {
  int low = 0, high = x.n; /* the first d with ends[d] > t */
  while (low < high) {
    const int middle = (low + high) / 2;
    if (x.ends[middle] > t) high = middle;
    else low = middle + 1;
  }
  if (low == x.n || t >= x.T) return rfi_span{0, 0};
  const int from = max(x.offsets[low * x.stride], low > 0 ? x.ends[low - 1] : 0);
  return t >= from ? rfi_span{from, x.ends[low]} : rfi_span{0, 0};
}

/* The keys that row t attends to. */
static __device__ __forceinline__ rfi_span rfi_keys_of(const rfi_documents &x, int t) {
  rfi_span s = rfi_document_of(x, t);
  if (s.end == s.first) return s;
  if (x.causal) s.end = t + 1;
  if (x.window > 0 && s.end - s.first > x.window) s.first = s.end - x.window;
  return s;
}

/* A range that contains every row that attends to key s. */
static __device__ __forceinline__ rfi_span rfi_rows_of(const rfi_documents &x, int s) {
  rfi_span r = rfi_document_of(x, s);
  if (r.end == r.first) return r;
  if (x.causal) r.first = s;
  if (x.window > 0 && r.end - s > x.window) r.end = s + x.window;
  return r;
}

#endif
