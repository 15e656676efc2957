/* SPDX-License-Identifier: Apache-2.0
 *
 * The maps of parts on a GPU, one thread for each row and slot.
 *
 *   moe_parts         part_order[r C + i] = order[start_r + i] for the i-th row of rank r's experts, else -1;
 *                     part_place[s] = r C + place[s] - start_r
 *   moe_part_experts  index[r C + i] = the first e with counts[r, 0] + ... + counts[r, e] > i, else -1
 *
 * Each block sums the splits of all ranks itself: they are few, and no second launch is needed.
 */
#include "backend/cuda/kernels.cuh"

enum { THREADS = 256, MOST_RANKS = 1024 };

struct parts_args {
  const int32_t *splits, *order, *place;
  int32_t *part_order, *part_place, *need; /* NULL: unused */
  int64_t slots, capacity, experts;        /* of one rank */
  int ranks;
};

static __global__ void __launch_bounds__(THREADS) make_parts(const __grid_constant__ parts_args a) {
  __shared__ int64_t start[MOST_RANKS + 1];
  for (int r = threadIdx.x; r < a.ranks; r += THREADS) {
    int64_t rows = 0;
    for (int64_t e = r * a.experts; e < (r + 1) * a.experts; e++) rows += max(a.splits[e], 0);
    start[r + 1] = rows;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t most = 0;
    start[0] = 0;
    for (int r = 1; r <= a.ranks; r++) {
      const int64_t end = start[r - 1] + start[r];
      start[r] = end < a.slots ? end : a.slots;
      most = start[r] - start[r - 1] > most ? start[r] - start[r - 1] : most;
    }
    if (a.need && blockIdx.x == 0) *a.need = most > a.capacity ? (int32_t)most : 0;
  }
  __syncthreads();
  const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (a.part_order && n < a.ranks * a.capacity) {
    const int64_t r = n / a.capacity, i = n % a.capacity;
    a.part_order[n] = i < start[r + 1] - start[r] ? a.order[start[r] + i] : -1;
  }
  if (a.part_place && n < a.slots) {
    const int64_t row = a.place[n];
    int low = 0, high = a.ranks; /* the first rank that ends after the row */
    while (low < high) {
      const int middle = (low + high) / 2;
      if (row < start[middle + 1]) high = middle;
      else low = middle + 1;
    }
    const int64_t i = low < a.ranks ? row - start[low] : -1;
    a.part_place[n] = i >= 0 && i < a.capacity ? (int32_t)(low * a.capacity + i) : -1;
  }
}

static rfr_status run_parts(const rfr_call *c) {
  parts_args a;
  a.splits = (const int32_t *)c->in[0].data;
  a.order = (const int32_t *)c->in[1].data;
  a.place = (const int32_t *)c->in[2].data;
  a.part_order = (int32_t *)c->out[0].data;
  a.part_place = (int32_t *)c->out[1].data;
  a.need = (int32_t *)c->out[2].data;
  a.slots = rfi_elements(&c->in[2]);
  a.ranks = (int)c->attr[0].i;
  a.capacity = c->attr[1].i;
  a.experts = rfi_elements(&c->in[0]) / a.ranks;
  const int64_t rows = a.ranks * a.capacity, n = rows > a.slots ? rows : a.slots;
  make_parts<<<(unsigned)rfi_blocks(n > 0 ? n : 1, THREADS), THREADS, 0, rfi_stream(c)>>>(a);
  return rfi_cuda_launched("moe_parts");
}

static __global__ void __launch_bounds__(THREADS)
    find_experts(const int32_t *counts, int64_t rows, int64_t capacity, int64_t experts, int32_t *index) {
  const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (n >= rows) return;
  const int32_t *own = counts + n / capacity * experts;
  int64_t left = n % capacity, e = 0;
  for (; e < experts && left >= max(own[e], 0); e++) left -= max(own[e], 0);
  index[n] = e < experts ? (int32_t)e : -1;
}

static rfr_status run_part_experts(const rfr_call *c) {
  const int64_t ranks = c->attr[0].i, capacity = c->attr[1].i, rows = ranks * capacity;
  if (rows == 0 || !c->out[0].data) return RFR_OK;
  find_experts<<<(unsigned)rfi_blocks(rows, THREADS), THREADS, 0, rfi_stream(c)>>>(
      (const int32_t *)c->in[0].data, rows, capacity, rfi_elements(&c->in[0]) / ranks, (int32_t *)c->out[0].data);
  return rfi_cuda_launched("moe_part_experts");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(moe_parts) = {run_parts, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_part_experts) = {run_part_experts, NULL};
