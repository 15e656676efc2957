/* SPDX-License-Identifier: Apache-2.0
 *
 * Text generation token by token, on a GPU: the semantics of decode_cpu.c.
 *
 * The draw needs no sort. Each candidate has a key, and smaller keys come first: its id or, when top_k or top_p exclude
 * some, a number that falls as its logit grows. Its weight e^((x - max) / temperature) is an integer in units of 2^-40,
 * so that sums of weights are exact in any order. The candidate at which the sum of weights (or the count) reaches a
 * bound is found digit by digit of the key, with one pass over all candidates per digit: first the end of top_k and
 * top_p, then the draw among the kept candidates. min_p sets weights to 0. One block does all of it, without the host.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/decode/cursor.h"
#include "ops/decode/sequences.h"

/* ---- text, cursor, caches ---- */

static __global__ void __launch_bounds__(256)
    read_text(const int32_t *text, const __grid_constant__ rfr_arg cursor, int64_t rows, int64_t capacity,
              int64_t before, int32_t *tokens, int32_t *positions, int32_t *last) {
  const rfi_take take = rfi_take_next(&cursor, rows, capacity);
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i < rows && tokens) tokens[i] = i < take.count ? text[take.first + i] : 0;
  if (i < rows && positions) positions[i] = (int32_t)(take.first + i);
  if (i == 0 && last) *last = (int32_t)(before + (take.count > 0 ? take.count - 1 : 0));
}

static rfr_status run_read(const rfr_call *call) {
  const int64_t rows = call->attr[0].i;
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&call->in[1].type); b++) {
    const rfr_call one = rfi_call_of_text(call, &rfi_split_text_read, b, &of), *c = &one;
    read_text<<<(unsigned)(rows > 256 ? rfi_blocks(rows, 256) : 1), 256, 0, rfi_stream(c)>>>(
        (const int32_t *)c->in[0].data, c->in[1], rows, c->in[0].type.shape[0] - 1, b * rows, (int32_t *)c->out[0].data,
        (int32_t *)c->out[1].data, (int32_t *)c->out[2].data);
  }
  return rfi_cuda_launched("text_read");
}

template <typename UNIT>
static __global__ void __launch_bounds__(256)
    write_cache(const __grid_constant__ rfr_arg cache, const __grid_constant__ rfr_arg x,
                const __grid_constant__ rfr_arg cursor, int64_t n) {
  const rfi_take take = rfi_take_next(&cursor, x.type.shape[0], cache.type.shape[0]);
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, D = x.type.shape[2], H = x.type.shape[1];
  if (i >= n) return;
  const int64_t d = i % D, h = i / D % H, t = i / D / H;
  if (t >= take.count) return;
  ((UNIT *)cache.data)[(take.first + t) * cache.stride[0] + h * cache.stride[1] + d * cache.stride[2]] =
      ((const UNIT *)x.data)[t * x.stride[0] + h * x.stride[1] + d * x.stride[2]];
}

static void launch_write(const rfr_call *c) {
  const rfr_arg *cache = &c->out[0], *x = &c->in[1];
  const int64_t n = rfi_elements(x);
  const unsigned blocks = (unsigned)rfi_blocks(n, 256);
  if (n == 0) return;
  switch (rfi_element_bytes(x->type.dtype)) {
    case 2: write_cache<uint16_t><<<blocks, 256, 0, rfi_stream(c)>>>(*cache, *x, c->in[2], n); break;
    case 4: write_cache<uint32_t><<<blocks, 256, 0, rfi_stream(c)>>>(*cache, *x, c->in[2], n); break;
    default: write_cache<uint64_t><<<blocks, 256, 0, rfi_stream(c)>>>(*cache, *x, c->in[2], n);
  }
}

static rfr_status run_write(const rfr_call *call) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&call->in[2].type); b++) {
    const rfr_call one = rfi_call_of_text(call, &rfi_split_cache_write, b, &of);
    launch_write(&one);
  }
  return rfi_cuda_launched("cache_write");
}

static __global__ void end_text(int64_t *cursor, const __grid_constant__ rfr_arg before, int64_t rows,
                                int64_t capacity) {
  const rfi_take take = rfi_take_next(&before, rows, capacity);
  cursor[RFI_CURSOR_CACHED] = take.first + take.count;
  cursor[RFI_CURSOR_KNOWN] += take.all;
}

static rfr_status run_end(const rfr_call *call) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&call->in[0].type); b++) {
    const rfr_call one = rfi_call_of_text(call, &rfi_split_text_end, b, &of), *c = &one;
    end_text<<<1, 1, 0, rfi_stream(c)>>>((int64_t *)c->out[0].data, c->in[0], c->attr[0].i, c->in[1].type.shape[0] - 1);
  }
  return rfi_cuda_launched("text_end");
}

/* ---- the draw ---- */

enum { THREADS = 1024, DIGIT = 2, STEPS = 1 << DIGIT };
static constexpr double UNIT = 1099511627776.0; /* weight of the most probable candidate */

struct tally { /* a number of candidates and the sum of their weights */
  uint64_t count, weight;
};

struct candidates {
  const uint64_t *weight;
  const void *x;
  rfr_dtype dtype;
  int64_t V;
  bool by_id;
};

/* A key that is smaller for larger x. NaN sorts after all numbers, and -0 equals 0. */
static __device__ uint32_t likeliness(float x) {
  if (x != x) return UINT32_MAX;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return ~(bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}
static __device__ uint32_t key_of(const candidates &c, int64_t i) {
  return c.by_id ? (uint32_t)i : likeliness(rfi_load(c.x, c.dtype, i));
}

/* Minimum over the block; every thread gets the result. May be called again immediately. */
static __device__ uint64_t block_min(uint64_t x) {
  __shared__ uint64_t part[32];
  for (int step = 16; step > 0; step >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other < x ? other : x;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  for (int w = 0; w < THREADS / 32; w++) x = part[w] < x ? part[w] : x;
  return x;
}
static __device__ uint64_t block_sum(uint64_t x) {
  __shared__ uint64_t part[32];
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = part[threadIdx.x & 31];
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/* A search ends at the first candidate at which there are `most` candidates or their weights sum to `enough`. */
struct bound {
  uint64_t most, enough;
};
static __device__ bool is_reached(const bound &b, const tally &t) {
  return t.count > 0 && (t.count >= b.most || t.weight >= b.enough);
}

/* The candidate at which the search ends: the `nth` of those with key `key`. */
struct place {
  uint32_t key;
  uint64_t nth;
  tally before, same; /* candidates with a smaller key, and with this key */
};

static __device__ place find(const candidates &c, const bound &b) {
  place at = {0, 1, {0, 0}, {0, 0}};
  for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
    tally digit[STEPS] = {};
    for (int64_t i = threadIdx.x; i < c.V; i += THREADS) {
      const uint32_t key = key_of(c, i);
      if ((uint64_t)key >> (shift + DIGIT) != (uint64_t)at.key >> (shift + DIGIT)) continue;
      const uint32_t mine = key >> shift & (STEPS - 1);
#pragma unroll
      for (uint32_t d = 0; d < STEPS; d++)
        if (mine == d) {
          digit[d].count++;
          digit[d].weight += c.weight[i];
        }
    }
    tally sum = at.before;
    uint32_t chosen = 0;
    bool is_found = false;
#pragma unroll
    for (uint32_t d = 0; d < STEPS; d++) {
      const tally these = {block_sum(digit[d].count), block_sum(digit[d].weight)};
      if (is_found) continue;
      at.before = sum;
      at.same = these;
      chosen = d;
      sum.count += these.count;
      sum.weight += these.weight;
      is_found = is_reached(b, sum);
    }
    at.key |= chosen << shift;
  }
  /* candidates with equal keys have equal weights */
  const uint64_t weight = at.same.count ? at.same.weight / at.same.count : 0;
  uint64_t nth = at.same.count;
  if (b.most > at.before.count && b.most - at.before.count < nth) nth = b.most - at.before.count;
  if (b.enough <= at.before.weight) nth = 1;
  else if (weight > 0) {
    const uint64_t need = (b.enough - at.before.weight + weight - 1) / weight;
    if (need < nth) nth = need;
  }
  at.nth = nth > 0 ? nth : 1;
  return at;
}

/* Finds the id of the nth candidate with a key, in order of ids. */
static __device__ int64_t id_of(const candidates &c, const place &at) {
  __shared__ uint64_t found;
  uint64_t before = 0;
  if (c.by_id) return at.key;
  for (int64_t i0 = 0; i0 < c.V; i0 += THREADS) {
    const int64_t i = i0 + threadIdx.x;
    const bool is_same = i < c.V && key_of(c, i) == at.key;
    const uint64_t n = (uint64_t)__syncthreads_count(is_same);
    if (before + n >= at.nth) { /* it is among these: count the candidates before each */
      __shared__ int warp_count[THREADS / 32];
      const unsigned mine = __ballot_sync(0xffffffffu, is_same);
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      if (lane == 0) warp_count[warp] = __popc(mine);
      __syncthreads();
      uint64_t rank = before + (uint64_t)__popc(mine & ((1u << lane) - 1));
      for (int w = 0; w < warp; w++) rank += (uint64_t)warp_count[w];
      if (is_same && rank + 1 == at.nth) found = (uint64_t)i;
      __syncthreads();
      return (int64_t)found;
    }
    before += n;
  }
  return 0;
}

struct draw_args {
  int32_t *text;
  const void *logits;
  rfr_dtype dtype;
  int64_t V, rows, capacity;
  rfr_arg cursor;
  const double *sampling;
  uint64_t *weight; /* (V) */
  float *x;         /* (V): logits with the penalty */
};

/* Applies the penalty to the logits of tokens in the text, in a copy. A token that occurs several times is written
 * several times, with the same value. */
static __device__ void penalize(draw_args &a) {
  for (int64_t i = threadIdx.x; i < a.V; i += THREADS) a.x[i] = rfi_load(a.logits, a.dtype, i);
  __syncthreads();
  const int64_t known = rfi_cursor_get(&a.cursor, RFI_CURSOR_KNOWN);
  for (int64_t i = threadIdx.x; i < known; i += THREADS) {
    const int32_t token = a.text[i];
    if (token >= 0 && token < a.V) a.x[token] = rfi_sampling_penalize(a.sampling, rfi_load(a.logits, a.dtype, token));
  }
  __syncthreads();
  a.logits = a.x;
  a.dtype = RFR_F32;
}

static __device__ int64_t draw(draw_args a) {
  const double temperature = a.sampling[RFI_SAMPLING_TEMPERATURE], top_p = a.sampling[RFI_SAMPLING_TOP_P];
  const double min_p = a.sampling[RFI_SAMPLING_MIN_P];
  const int64_t top_k = rfi_sampling_top_k(a.sampling, a.V);
  if (rfi_sampling_penalizes(a.sampling)) penalize(a);
  uint64_t first = UINT64_MAX;
  for (int64_t i = threadIdx.x; i < a.V; i += THREADS) {
    const uint64_t at = (uint64_t)likeliness(rfi_load(a.logits, a.dtype, i)) << 32 | (uint64_t)i;
    first = at < first ? at : first;
  }
  const int64_t best = (int64_t)(block_min(first) & UINT32_MAX);
  if (!(temperature > 0.0)) return best;
  const double most = (double)rfi_load(a.logits, a.dtype, best);
  uint64_t sum = 0, sum_kept = 0;
  for (int64_t i = threadIdx.x; i < a.V; i += THREADS) {
    const double p = exp(((double)rfi_load(a.logits, a.dtype, i) - most) / temperature);
    const uint64_t weight = p > 0.0 ? (uint64_t)(p * UNIT + 0.5) : 0; /* NaN has weight 0 */
    a.weight[i] = p < min_p ? 0 : weight;
    sum += weight;
    sum_kept += a.weight[i];
  }
  const double all = (double)block_sum(sum);
  uint64_t total = block_sum(sum_kept);
  if (total == 0) return best;
  candidates c = {a.weight, a.logits, a.dtype, a.V, true};
  if (top_k < a.V || top_p < 1.0) {
    const double enough = top_p * all;
    c.by_id = false;
    const bound kept = {(uint64_t)top_k, enough < (double)total ? (enough > 0.0 ? (uint64_t)ceil(enough) : 0) : total};
    const place end = find(c, kept);
    total = end.before.weight + end.nth * (end.same.count ? end.same.weight / end.same.count : 0);
    if (total == 0) return best;
  }
  const double u = rfi_cursor_draw(&a.cursor) * (double)total;
  const uint64_t in_front = u < (double)total ? (uint64_t)u : total - 1;
  const bound drawn = {UINT64_MAX, (in_front < total ? in_front : total - 1) + 1};
  return id_of(c, find(c, drawn));
}

static __global__ void __launch_bounds__(THREADS) append_text(const __grid_constant__ draw_args a) {
  const rfi_take take = rfi_take_next(&a.cursor, a.rows, a.capacity);
  if (!take.all) return;
  const int64_t id = draw(a);
  if (threadIdx.x == 0) a.text[take.first + take.count] = (int32_t)id;
}

static size_t append_workspace(const rfr_call *c) {
  return (size_t)c->in[1].type.shape[1] * (sizeof(uint64_t) + sizeof(float));
}

static void launch_append(const rfr_call *c) {
  draw_args a = {};
  a.text = (int32_t *)c->out[0].data;
  a.logits = c->in[1].data;
  a.dtype = c->in[1].type.dtype;
  a.V = c->in[1].type.shape[1];
  a.rows = c->attr[0].i;
  a.capacity = c->out[0].type.shape[0] - 1;
  a.cursor = c->in[2];
  a.sampling = (const double *)c->in[3].data;
  a.weight = (uint64_t *)c->workspace;
  a.x = (float *)(a.weight + a.V);
  append_text<<<1, THREADS, 0, rfi_stream(c)>>>(a);
}

static rfr_status run_append(const rfr_call *call) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&call->in[2].type); b++) { /* sequential, because they share the workspace */
    const rfr_call one = rfi_call_of_text(call, &rfi_split_text_append, b, &of);
    launch_append(&one);
  }
  return rfi_cuda_launched("text_append");
}

/* Sums of weights fit into 63 bits. */
static int append_takes(const rfr_call *c) { return c->in[1].type.shape[1] <= 1 << 22; }

extern "C" const rfi_cuda_kernel RFI_CUDA(text_read) = {run_read, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(cache_write) = {run_write, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(text_append) = {run_append, append_workspace, append_takes};
extern "C" const rfi_cuda_kernel RFI_CUDA(text_end) = {run_end, NULL, NULL};
