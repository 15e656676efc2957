/* SPDX-License-Identifier: Apache-2.0
 *
 * Sorts slots by expert, and measures how evenly experts are loaded, on a GPU.
 *
 *   order: slots by expert, within an expert by number;  place[order[r]] = r;  splits[e] = slots of e
 *
 * Two launches. In the first, a block has a tile of adjacent slots and counts their experts. In the second, each block
 * adds, for each expert, the counts of all tiles and of those before its own, counts its tile again by warp, and writes
 * its slots to their places, 32 at a time: a slot's rank among them is the number of lanes before it with the same
 * expert. A tile has at least as many slots as there are experts, so the counts never outnumber the slots.
 */
#include <climits>

#include "backend/cuda/kernels.cuh"
#include "ops/moe/load.h"

enum { THREADS = 1024, LANES = 32, AT_ONCE = 2, MOST_TILES = 128 };
static const unsigned ALL = 0xffffffffu;

struct sort_args {
  const int32_t *index;
  int32_t *splits, *order, *place; /* NULL: unused */
  /* (tiles, experts); next: the second launch's counters, if they do not fit into shared memory */
  int32_t *count, *next;
  int64_t slots, per_tile;
  int experts, tiles;
};

static __device__ __forceinline__ int expert_of(const sort_args &a, int64_t slot, int64_t end) {
  const int e = slot < end ? a.index[slot] : -1;
  return e >= 0 && e < a.experts ? e : -1;
}

/* Counts the slots of each expert among every `step`-th slot from `first` up to `end`. */
static __device__ __forceinline__ void count_slots(const sort_args &a, int32_t *count, int64_t first, int64_t end,
                                                   int step) {
  for (; first < end; first += AT_ONCE * step) {
    int e[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) e[u] = expert_of(a, first + u * step, end);
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++)
      if (e[u] >= 0) atomicAdd(&count[e[u]], 1); /* integers, so the order does not matter */
  }
}

/* ---- counts ---- */

template <bool SHARED> static __global__ void __launch_bounds__(THREADS) count_tiles(const sort_args a) {
  extern __shared__ int32_t own[];
  int32_t *to = a.count + (int64_t)blockIdx.x * a.experts, *count = SHARED ? own : to;
  const int64_t begin = blockIdx.x * a.per_tile, end = min(begin + a.per_tile, a.slots);
  for (int e = threadIdx.x; e < a.experts; e += THREADS) count[e] = 0;
  __syncthreads();
  count_slots(a, count, begin + threadIdx.x, end, THREADS);
  __syncthreads();
  for (int e = threadIdx.x; SHARED && e < a.experts; e += THREADS) to[e] = count[e];
}

/* ---- places ---- */

/* Exclusive prefix sum of x over the block's threads, and the total. All threads must call it. */
template <int WARPS> static __device__ int32_t block_before(int32_t x, int32_t *all) {
  __shared__ int32_t part[LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  int32_t sum = x;
#pragma unroll
  for (int back = 1; back < LANES; back *= 2) {
    const int32_t other = __shfl_up_sync(ALL, sum, back);
    if (lane >= back) sum += other;
  }
  __syncthreads();
  if (lane == LANES - 1) part[warp] = sum;
  __syncthreads();
  const int32_t here = lane < WARPS ? part[lane] : 0;
  *all = __reduce_add_sync(ALL, here);
  return (int32_t)__reduce_add_sync(ALL, lane < warp ? here : 0) + sum - x;
}

/* The number of slots of expert e in tiles `first` ... `end` - 1, and in those before this block's tile. */
static __device__ __forceinline__ void add_tiles(const sort_args &a, int e, int first, int end, int32_t *all,
                                                 int32_t *before) {
  *all = *before = 0;
#pragma unroll 8
  for (int tile = first; tile < end; tile++) {
    const int32_t n = a.count[(int64_t)tile * a.experts + e];
    *all += n;
    *before += tile < blockIdx.x ? n : 0;
  }
}
/* The number of threads that share an expert's tiles. */
template <int WARPS> static __host__ __device__ __forceinline__ int parts_of(int experts) {
  return experts < WARPS * LANES ? WARPS * LANES / experts : 1;
}

/* The lanes with the same expert, or without one: one ballot per bit of the index. */
static __device__ __forceinline__ unsigned peers_of(int e, int experts) {
  unsigned peers = ALL;
  for (int bit = 0; experts >> bit; bit++) {
    const bool set = (e < 0 ? experts : e) >> bit & 1;
    const unsigned others = __ballot_sync(ALL, set);
    peers &= set ? others : ~others;
  }
  return peers;
}

/* Writes the slots. Each warp counts the next place of each expert: in shared memory, or for a single warp in global
 * memory. */
template <int WARPS> static __global__ void __launch_bounds__(WARPS *LANES) scatter(const sort_args a) {
  /* [WARPS][experts] with several warps; then [2][parts][experts] with several parts */
  extern __shared__ int32_t rows[];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, threads = WARPS * LANES, E = a.experts;
  const int parts = parts_of<WARPS>(E), each = (a.tiles + parts - 1) / parts;
  const int64_t share = a.per_tile / WARPS, begin = blockIdx.x * a.per_tile + warp * share;
  const int64_t end = min(begin + share, a.slots);
  int32_t *const warps = WARPS > 1 ? rows : a.next + (int64_t)blockIdx.x * E, *const next = warps + warp * E;
  int32_t *const all = rows + WARPS * E, *const before = all + parts * E;
  for (int e = lane; e < E; e += LANES) next[e] = 0;
  __syncwarp();
  count_slots(a, next, begin + lane, end, LANES);
  for (int i = threadIdx.x; parts > 1 && i < parts * E; i += threads) {
    const int first = i / E * each;
    add_tiles(a, i % E, first, min(first + each, a.tiles), &all[i], &before[i]);
  }
  __syncthreads();
  int32_t base = 0;
  for (int first = 0; first < E; first += threads) {
    const int e = first + threadIdx.x;
    int32_t mine = 0, at = 0, sum;
    if (parts == 1 && e < E) add_tiles(a, e, 0, a.tiles, &mine, &at);
    for (int p = 0; parts > 1 && e < E && p < parts; p++) {
      mine += all[p * E + e];
      at += before[p * E + e];
    }
    at += base + block_before<WARPS>(mine, &sum);
    base += sum;
    if (e >= E) continue;
    if (blockIdx.x == 0 && a.splits) a.splits[e] = mine;
    constexpr int N = WARPS < 8 ? WARPS : 8;
    for (int w = 0; w < WARPS; w += N) {
      int32_t n[N];
#pragma unroll
      for (int u = 0; u < N; u++) n[u] = warps[(w + u) * E + e];
#pragma unroll
      for (int u = 0; u < N; u++) {
        warps[(w + u) * E + e] = at;
        at += n[u];
      }
    }
  }
  __syncthreads();
  for (int64_t r = begin + lane; a.order && r < end; r += LANES)
    if (r >= base) a.order[r] = -1;
  for (int64_t first = begin; first < end; first += AT_ONCE * LANES) {
    int e[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) e[u] = expert_of(a, first + u * LANES + lane, end);
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int64_t slot = first + u * LANES + lane;
      if (first + u * LANES >= end) break;
      const unsigned peers = peers_of(e[u], E);
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
  const int64_t share = rfi_blocks(a.slots, MOST_TILES);
  a.per_tile = rfi_blocks(share > a.experts ? share : a.experts, THREADS) * THREADS;
  a.tiles = (int)rfi_blocks(a.slots, a.per_tile);
  if (a.tiles == 0) a.tiles = 1; /* one empty tile, which writes splits of zero */
  a.splits = (int32_t *)c->out[0].data, a.order = (int32_t *)c->out[1].data, a.place = (int32_t *)c->out[2].data;
  a.count = (int32_t *)c->workspace;
  a.next = a.count + (int64_t)a.tiles * a.experts;
  return a;
}
static size_t sort_workspace(const rfr_call *c) {
  const sort_args a = lay_out(c);
  return (size_t)2 * (size_t)a.tiles * (size_t)a.experts * sizeof(int32_t);
}

template <int WARPS> static void launch_scatter(const sort_args &a, cudaStream_t stream) {
  const int parts = parts_of<WARPS>(a.experts), rows = (WARPS > 1 ? WARPS : 0) + (parts > 1 ? 2 * parts : 0);
  scatter<WARPS><<<(unsigned)a.tiles, WARPS * LANES, (size_t)rows *(size_t)a.experts * 4, stream>>>(a);
}
static rfr_status run_sort(const rfr_call *c) {
  const sort_args a = lay_out(c);
  cudaStream_t stream = rfi_stream(c);
  if (a.experts <= 8192) count_tiles<true><<<(unsigned)a.tiles, THREADS, (size_t)a.experts * 4, stream>>>(a);
  else count_tiles<false><<<(unsigned)a.tiles, THREADS, 0, stream>>>(a);
  if (a.experts <= 256) launch_scatter<32>(a, stream);
  else if (a.experts <= 1024) launch_scatter<8>(a, stream);
  else launch_scatter<1>(a, stream);
  return rfi_cuda_launched("moe_sort");
}

/* ---- moe_load ---- */

enum { MOST_LISTS = 128, LOAD_THREADS = 1024, LOAD_WARPS = LOAD_THREADS / LANES };

struct list_args {
  const int32_t *splits[MOST_LISTS];
  int64_t experts[MOST_LISTS];
  int rows[MOST_LISTS]; /* number of routings at splits[i] */
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

/* A warp per routing; so_far: the result of the previous launches, which had `done` routings. A load is not negative,
 * so floats and their bits have the same order. */
static __global__ void __launch_bounds__(LOAD_THREADS)
    load(const __grid_constant__ list_args all, bool first, bool last, loads *so_far, float *most, float *least,
         float *by_layer, int layers, int64_t done) {
  __shared__ loads found[LOAD_WARPS];
  __shared__ int of_layer[RFI_MAX_LOAD_LAYERS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  loads mine = {0, 0, 0};
  for (int l = threadIdx.x; l < layers; l += LOAD_THREADS)
    of_layer[l] = first || !by_layer ? 0 : __float_as_int(by_layer[l]);
  __syncthreads();
  for (int i = 0, before = 0; i < all.lists; before += all.rows[i++]) {
    const int64_t experts = all.experts[i];
    for (int r = (warp + LOAD_WARPS - before % LOAD_WARPS) % LOAD_WARPS; r < all.rows[i]; r += LOAD_WARPS) {
      long long sum = 0;
      int high = INT_MIN, low = INT_MAX;
      for (int64_t e = lane; e < experts; e += LANES) {
        const int n = all.splits[i][r * experts + e];
        sum += n;
        high = n > high ? n : high;
        low = n < low ? n : low;
      }
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL, sum, offset);
      high = __reduce_max_sync(ALL, high);
      low = __reduce_min_sync(ALL, low);
      if (sum <= 0) continue;
      const double highest = high * (double)experts / (double)sum;
      join(&mine, {highest, low * (double)experts / (double)sum, 1});
      if (lane == 0) atomicMax(&of_layer[(done + before + r) % layers], __float_as_int((float)highest));
    }
  }
  if (lane == 0) found[warp] = mine;
  __syncthreads();
  for (int l = threadIdx.x; by_layer && l < layers; l += LOAD_THREADS) by_layer[l] = __int_as_float(of_layer[l]);
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
  int64_t done = 0;
  do {
    const bool first = i == 0;
    const int64_t before = done;
    list_args all;
    for (all.lists = 0; i < c->n_in && all.lists < MOST_LISTS; i++, all.lists++) {
      all.splits[all.lists] = (const int32_t *)c->in[i].data;
      all.experts[all.lists] = c->in[i].type.shape[c->in[i].type.rank - 1];
      all.rows[all.lists] = c->in[i].type.rank == 2 ? (int)c->in[i].type.shape[0] : 1;
      done += all.rows[all.lists];
    }
    load<<<1, LOAD_THREADS, 0, rfi_stream(c)>>>(all, first, i == c->n_in, (loads *)c->workspace,
                                                (float *)c->out[0].data, (float *)c->out[1].data,
                                                (float *)c->out[2].data, (int)c->attr[0].i, before);
  } while (i < c->n_in);
  return rfi_cuda_launched("moe_load");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(moe_sort) = {run_sort, sort_workspace};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_load) = {run_load, load_workspace};
