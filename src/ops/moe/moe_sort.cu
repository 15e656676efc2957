/* SPDX-License-Identifier: Apache-2.0
 *
 * Slots sorted by expert, and how evenly experts are loaded, on a GPU.
 *
 *   order: slots by expert, of one expert by number;  place[order[r]] = r;  splits[e] = slots of e
 *
 * Three launches: each warp counts the experts of its neighbouring slots, the counts of an expert become what warps
 * before have of it, and each warp writes its slots where they belong, 32 at a time: a slot's rank among them is how
 * many lanes before it have its expert. A warp's counts are in shared memory unless there are very many experts; it
 * has at least as many slots as there are experts, so the counts are never more than the slots.
 */
#include <climits>

#include "backend/cuda/kernels.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES, AT_ONCE = 8 };
enum { LEAST_SLOTS = LANES * AT_ONCE, MOST_WARPS = 2048, MOST_SHARED = 1024 };
static const unsigned ALL = 0xffffffffu;

struct sort_args {
  const int32_t *index;
  int32_t *splits, *order, *place; /* order, place: NULL where nobody wants them */
  int32_t *count;                  /* (warps, experts) */
  int64_t slots, per_warp;
  int experts, warps;
};

static __device__ __forceinline__ int expert_of(const sort_args &a, int64_t slot, int64_t end) {
  const int e = slot < end ? a.index[slot] : -1;
  return e >= 0 && e < a.experts ? e : -1;
}

/* ---- counts ---- */

template <bool SHARED> static __global__ void __launch_bounds__(THREADS) count_slots(const sort_args a) {
  extern __shared__ int32_t rows[];
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, warp = blockIdx.x * WARPS + own;
  if (warp >= a.warps) return;
  int32_t *to = a.count + (int64_t)warp * a.experts, *count = SHARED ? rows + own * a.experts : to;
  const int64_t begin = warp * a.per_warp, end = begin + a.per_warp < a.slots ? begin + a.per_warp : a.slots;
  for (int e = lane; e < a.experts; e += LANES) count[e] = 0;
  __syncwarp();
  for (int64_t first = begin + lane; first < end; first += LEAST_SLOTS) {
    int e[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) e[u] = expert_of(a, first + u * LANES, end);
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++)
      if (e[u] >= 0) atomicAdd(&count[e[u]], 1); /* integers: in any order */
  }
  __syncwarp();
  for (int e = lane; SHARED && e < a.experts; e += LANES) to[e] = count[e];
}

/* ---- sums of what is before ---- */

enum { SCAN_THREADS = 1024, COLUMNS = 8, SEGMENTS = SCAN_THREADS / COLUMNS };

/* A block has neighbouring experts, a thread a segment of one's warps. */
static __global__ void __launch_bounds__(SCAN_THREADS) sum_before(const sort_args a) {
  __shared__ int32_t sum[2][SEGMENTS][COLUMNS];
  const int column = threadIdx.x % COLUMNS, segment = threadIdx.x / COLUMNS, e = blockIdx.x * COLUMNS + column;
  const int each = (a.warps + SEGMENTS - 1) / SEGMENTS, begin = segment * each;
  const int end = begin + each < a.warps ? begin + each : a.warps;
  int32_t own = 0, n[MOST_WARPS / SEGMENTS], *count = a.count + e;
#pragma unroll
  for (int i = 0; i < MOST_WARPS / SEGMENTS; i++)
    n[i] = e < a.experts && begin + i < end ? count[(int64_t)(begin + i) * a.experts] : 0;
#pragma unroll
  for (int i = 0; i < MOST_WARPS / SEGMENTS; i++) own += n[i];
  sum[0][segment][column] = own;
  __syncthreads();
  int now = 0;
  for (int back = 1; back < SEGMENTS; back *= 2, now = !now) {
    sum[!now][segment][column] = sum[now][segment][column] + (segment >= back ? sum[now][segment - back][column] : 0);
    __syncthreads();
  }
  if (e >= a.experts) return;
  int32_t before = sum[now][segment][column] - own;
#pragma unroll
  for (int i = 0; i < MOST_WARPS / SEGMENTS; i++) {
    if (begin + i < end) count[(int64_t)(begin + i) * a.experts] = before;
    before += n[i];
  }
  if (segment == SEGMENTS - 1) a.splits[e] = sum[now][segment][column];
}

/* ---- places ---- */

/* The sum of x over the threads before this one, and over all. The block calls it. */
static __device__ int32_t block_before(int32_t x, int32_t *all) {
  __shared__ int32_t part[WARPS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  int32_t sum = x, before = 0;
#pragma unroll
  for (int back = 1; back < LANES; back *= 2) {
    const int32_t other = __shfl_up_sync(ALL, sum, back);
    if (lane >= back) sum += other;
  }
  __syncthreads();
  if (lane == LANES - 1) part[warp] = sum;
  __syncthreads();
  *all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    before += w < warp ? part[w] : 0;
    *all += part[w];
  }
  return before + sum - x;
}

template <bool SHARED> static __global__ void __launch_bounds__(THREADS) scatter(const sort_args a) {
  extern __shared__ int32_t rows[];
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, warp = blockIdx.x * WARPS + own;
  const int here = a.warps - blockIdx.x * WARPS < WARPS ? a.warps - blockIdx.x * WARPS : WARPS;
  int32_t *from = a.count + (int64_t)blockIdx.x * WARPS * a.experts, base = 0;
  int32_t *next = (SHARED ? rows : from) + (int64_t)own * a.experts;
  /* where each of the block's warps has its next row of each expert */
  for (int first = 0; first < a.experts; first += THREADS) {
    const int e = first + threadIdx.x;
    int32_t before[WARPS], all;
#pragma unroll
    for (int w = 0; w < WARPS; w++) before[w] = e < a.experts && w < here ? from[(int64_t)w * a.experts + e] : 0;
    const int32_t at = base + block_before(e < a.experts ? a.splits[e] : 0, &all);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      if (e < a.experts && w < here) (SHARED ? rows : from)[(int64_t)w * a.experts + e] = at + before[w];
    base += all;
  }
  __syncthreads();
  if (warp >= a.warps) return;
  const int64_t begin = warp * a.per_warp, end = begin + a.per_warp < a.slots ? begin + a.per_warp : a.slots;
  for (int64_t r = begin + lane; a.order && r < end; r += LANES)
    if (r >= base) a.order[r] = -1;
  for (int64_t first = begin; first < end; first += LEAST_SLOTS) {
    int e[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) e[u] = expert_of(a, first + u * LANES + lane, end);
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int64_t slot = first + u * LANES + lane;
      const unsigned peers = __match_any_sync(ALL, e[u]);
      const int ahead = __popc(peers & ((1u << lane) - 1));
      int32_t row = -1;
      if (e[u] >= 0) row = next[e[u]] + ahead;
      __syncwarp();
      if (e[u] >= 0 && ahead == 0) next[e[u]] = row + __popc(peers);
      __syncwarp();
      if (slot >= end) continue;
      if (a.place) a.place[slot] = row;
      if (a.order && row >= 0) a.order[row] = (int32_t)slot;
    }
  }
}

/* ---- launches ---- */

static sort_args lay_out(const rfr_call *c) {
  sort_args a;
  a.index = (const int32_t *)c->in[0].data;
  a.slots = rfi_elements(&c->in[0]);
  a.experts = (int)c->attr[0].i;
  const int64_t share = rfi_blocks(a.slots, MOST_WARPS);
  a.per_warp = rfi_blocks(share > a.experts ? share : a.experts, LEAST_SLOTS) * LEAST_SLOTS;
  a.warps = (int)rfi_blocks(a.slots, a.per_warp);
  a.splits = (int32_t *)c->out[0].data, a.order = (int32_t *)c->out[1].data, a.place = (int32_t *)c->out[2].data;
  a.count = (int32_t *)c->workspace;
  if (!a.splits) a.splits = a.count + (int64_t)a.warps * a.experts;
  return a;
}
static size_t sort_workspace(const rfr_call *c) {
  const sort_args a = lay_out(c);
  return ((size_t)a.warps + 1) * (size_t)a.experts * sizeof(int32_t);
}

static rfr_status run_sort(const rfr_call *c) {
  const sort_args a = lay_out(c);
  const unsigned grid = (unsigned)rfi_blocks(a.warps, WARPS), scans = (unsigned)rfi_blocks(a.experts, COLUMNS);
  const bool shared = a.experts <= MOST_SHARED;
  const size_t bytes = shared ? WARPS * (size_t)a.experts * sizeof(int32_t) : 0;
  cudaStream_t stream = rfi_stream(c);
  if (shared && grid) count_slots<true><<<grid, THREADS, bytes, stream>>>(a);
  if (!shared && grid) count_slots<false><<<grid, THREADS, 0, stream>>>(a);
  sum_before<<<scans, SCAN_THREADS, 0, stream>>>(a);
  if (shared && grid) scatter<true><<<grid, THREADS, bytes, stream>>>(a);
  if (!shared && grid) scatter<false><<<grid, THREADS, 0, stream>>>(a);
  return rfi_cuda_launched("moe_sort");
}

/* ---- moe_load ---- */

enum { MOST_LISTS = 128, LOAD_THREADS = 1024, LOAD_WARPS = LOAD_THREADS / LANES };

struct list_args {
  const int32_t *splits[MOST_LISTS];
  int64_t experts[MOST_LISTS];
  int lists;
};
struct loads {
  double most, least;
  int any;
};
static __device__ __forceinline__ void join(loads *to, const loads &x) {
  if (!x.any) return;
  to->most = !to->any || x.most > to->most ? x.most : to->most;
  to->least = !to->any || x.least < to->least ? x.least : to->least;
  to->any = 1;
}

/* A warp for each list; so_far: what the launches before this one have found. */
static __global__ void __launch_bounds__(LOAD_THREADS)
    load(const __grid_constant__ list_args all, bool first, bool last, loads *so_far, float *most, float *least) {
  __shared__ loads found[LOAD_WARPS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  loads mine = {0, 0, 0};
  for (int i = warp; i < all.lists; i += LOAD_WARPS) {
    const int64_t experts = all.experts[i];
    long long sum = 0;
    int high = INT_MIN, low = INT_MAX;
    for (int64_t e = lane; e < experts; e += LANES) {
      const int n = all.splits[i][e];
      sum += n;
      high = n > high ? n : high;
      low = n < low ? n : low;
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL, sum, offset);
    high = __reduce_max_sync(ALL, high);
    low = __reduce_min_sync(ALL, low);
    if (sum > 0) join(&mine, {high * (double)experts / (double)sum, low * (double)experts / (double)sum, 1});
  }
  if (lane == 0) found[warp] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
  if (!first) join(&mine, *so_far);
  for (int w = 1; w < LOAD_WARPS; w++) join(&mine, found[w]);
  *so_far = mine;
  if (last && most) *most = (float)mine.most;
  if (last && least) *least = (float)mine.least;
}

static size_t load_workspace(const rfr_call *c) {
  (void)c;
  return sizeof(loads);
}

static rfr_status run_load(const rfr_call *c) {
  int i = 0;
  do {
    const bool first = i == 0;
    list_args all;
    for (all.lists = 0; i < c->n_in && all.lists < MOST_LISTS; i++, all.lists++) {
      all.splits[all.lists] = (const int32_t *)c->in[i].data;
      all.experts[all.lists] = rfi_elements(&c->in[i]);
    }
    load<<<1, LOAD_THREADS, 0, rfi_stream(c)>>>(all, first, i == c->n_in, (loads *)c->workspace,
                                                (float *)c->out[0].data, (float *)c->out[1].data);
  } while (i < c->n_in);
  return rfi_cuda_launched("moe_load");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(moe_sort) = {run_sort, sort_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_load) = {run_load, load_workspace};
