/* SPDX-License-Identifier: Apache-2.0
 *
 * rope, rope_table and positions on a GPU.
 *
 *   y[t,h,d]       = x[t,h,d] cos a - x[t,h,d+D/2] sin a       a = positions[t] frequency[d]
 *   y[t,h,d+D/2]   = x[t,h,d+D/2] cos a + x[t,h,d] sin a
 *
 * A block has a few tokens at a time: while the loads of their first heads are in flight it computes each token's sines
 * and cosines, which all heads use. Angles are f64, for the reason given in rope_cpu.c; the host passes the frequencies
 * with the launch. rope_table multiplies sines and cosines by its scale; the launch of its last pairs also copies the
 * columns that are not rotated.
 */
#include "ops/elementwise/map.cuh"
#include "ops/embed/rope.h"

enum { THREADS = 256, PAIRS = 256, TURNS = 1024, AT_ONCE = 4, SCAN_THREADS = 1024, SCAN_EACH = 8 };

/* ---- rope ---- */

/* For angles up to about 1e9: reduced in f64 to [-pi/4, pi/4] and a number of quarter turns. */
static __device__ void sine_cosine(double angle, float *sine, float *cosine) {
  const double q = rint(angle * 0.63661977236758134308);
  const float r = (float)fma(-q, 6.1232339957367658e-17, fma(-q, 1.5707963267948965580, angle));
  const uint32_t k = (uint32_t)(int64_t)q;
  const float s2 = r * r;
  const float sp = r + r * s2 * ((-0.000195866053f * s2 + 0.00833274230f) * s2 - 0.166666646f);
  const float cp = 1.0f - 0.5f * s2 + s2 * s2 * ((2.45466538e-5f * s2 - 0.00138882971f) * s2 + 0.0416666646f);
  const float s = k & 1u ? cp : sp, c = k & 1u ? sp : cp;
  *sine = k & 2u ? -s : s;
  *cosine = (k + 1u) & 2u ? -c : c;
}

/* A block handles `pairs` of a head's D/2 pairs, from pair `first` on, `tokens` tokens at a time. */
struct rope_args {
  double frequency[PAIRS];
  const int32_t *position;
  int64_t position_step, T, x_row, x_head, x_step;
  int H, half, first, pairs, tokens;
  int D, rest; /* columns per head; columns at its end that are copied */
  float scale;
  bool inverse;
};

/* Keeps loaded values in their narrow type until here: the compiler would widen them early, which takes twice as many
 * registers. */
template <typename G> static __device__ __forceinline__ void keep_narrow(G *g) {
  if constexpr (sizeof(G) == 16) {
    uint32_t w[4];
    __builtin_memcpy(w, g, 16);
    asm volatile("" : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]));
    __builtin_memcpy(g, w, 16);
  }
}

/* An item is V pairs of a head. TABLE: of rope_table. */
template <typename T, int V, bool TABLE>
static __global__ void __launch_bounds__(THREADS, 3) rope(const T *x, T *y, const __grid_constant__ rope_args a) {
  __shared__ double frequency[PAIRS];
  __shared__ float2 turn[TURNS]; /* sine and cosine of each token's pairs */
  const int groups = a.pairs / V, items = a.tokens * a.H * groups, turns = a.tokens * a.pairs;
  for (int d = threadIdx.x; d < a.pairs; d += THREADS) frequency[d] = a.frequency[d];
  for (int64_t t0 = (int64_t)blockIdx.x * a.tokens; t0 < a.T; t0 += (int64_t)gridDim.x * a.tokens) {
    rfi_group<T, V> x0[AT_ONCE], x1[AT_ONCE];
    const auto token_of = [&](int i) { return i / groups / a.H; };
    const auto there = [&](int i) { return i < items && t0 + token_of(i) < a.T; };
    const auto fetch = [&](int first) {
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        const int i = first + u * THREADS, h = i / groups % a.H, d = i % groups * V;
        if (!there(i)) continue;
        const T *from = x + (t0 + token_of(i)) * a.x_row + h * a.x_head + (a.first + d) * a.x_step;
        x0[u] = rfi_load<T, V>(from);
        x1[u] = rfi_load<T, V>(from + a.half * a.x_step);
      }
    };
    fetch(threadIdx.x);
    __syncthreads();
    for (int i = threadIdx.x; i < turns; i += THREADS) {
      const int64_t t = t0 + i / a.pairs;
      if (t >= a.T) break;
      const double position = a.position[t * a.position_step] * (a.inverse ? -1.0 : 1.0);
      sine_cosine(position * frequency[i % a.pairs], &turn[i].x, &turn[i].y);
      if (TABLE) turn[i].x *= a.scale, turn[i].y *= a.scale;
    }
    __syncthreads();
    for (int first = threadIdx.x; first < items; first += AT_ONCE * THREADS) {
      if (first >= THREADS) fetch(first);
      int begin = first; /* recomputed, because the loads in flight need the registers */
      asm volatile("" : "+r"(begin));
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        const int i = begin + u * THREADS, h = i / groups % a.H, d = i % groups * V, token = token_of(i);
        float a0[V], a1[V], y0[V], y1[V];
        if (!there(i)) break;
        keep_narrow(&x0[u]);
        keep_narrow(&x1[u]);
        rfi_widen(x0[u], a0);
        rfi_widen(x1[u], a1);
#pragma unroll
        for (int v = 0; v < V; v++) {
          const float2 by = turn[token * a.pairs + d + v];
          y0[v] = a0[v] * by.y - a1[v] * by.x;
          y1[v] = a1[v] * by.y + a0[v] * by.x;
        }
        T *to = y + ((t0 + token) * a.H + h) * (TABLE ? a.D : 2 * a.half) + a.first + d;
        rfi_store<T, V>(to, y0);
        rfi_store<T, V>(to + a.half, y1);
      }
    }
    const int copied = TABLE ? a.tokens * a.H * a.rest : 0;
    for (int i = threadIdx.x; i < copied; i += THREADS) {
      const int d = i % a.rest + 2 * a.half, h = i / a.rest % a.H;
      const int64_t t = t0 + i / a.rest / a.H;
      if (t < a.T) y[(t * a.H + h) * a.D + d] = x[t * a.x_row + h * a.x_head + d * a.x_step];
    }
  }
}

template <typename T, int V, bool TABLE>
static void launch_items(const rfr_call *call, const T *x, T *y, rope_args &a) {
  const int row = a.H * (a.pairs / V), most = TURNS / a.pairs;
  a.tokens = row >= AT_ONCE * THREADS ? 1 : AT_ONCE * THREADS / row;
  if (a.tokens > most) a.tokens = most;
  const int64_t spread = rfi_blocks(a.T, (int64_t)rfi_cuda_info_of(call)->sms * 8);
  if (a.tokens > spread) a.tokens = (int)spread;
  rope<T, V, TABLE><<<rfi_grid(call, a.T, a.tokens), THREADS, 0, rfi_stream(call)>>>(x, y, a);
}
template <typename T, bool TABLE> static void launch_rope(const rfr_call *call, rope_args &a) {
  constexpr int V = rfi_pack_width<T>;
  const T *x = (const T *)call->in[0].data;
  T *y = (T *)call->out[0].data;
  const bool aligned = ((uintptr_t)x | (uintptr_t)y) % 16 == 0;
  if (a.x_step == 1 && aligned && a.half % V == 0 && a.D % V == 0 && a.x_row % V == 0 && a.x_head % V == 0)
    launch_items<T, V, TABLE>(call, x, y, a);
  else launch_items<T, 1, TABLE>(call, x, y, a);
}

static rfr_status rotate(const rfr_call *call, const rfi_rotation &r) {
  const rfr_arg *x = &call->in[0], *positions = &call->in[1];
  if (rfi_elements(&call->out[0]) == 0) return RFR_OK;
  rope_args a;
  a.position = (const int32_t *)positions->data, a.position_step = positions->stride[0];
  a.T = x->type.shape[0], a.H = (int)x->type.shape[1], a.half = (int)r.pairs;
  a.D = (int)r.D, a.scale = r.scale;
  a.x_row = x->stride[0], a.x_head = x->stride[1], a.x_step = x->stride[2];
  a.inverse = r.inverse;
  for (a.first = 0; a.first < a.half; a.first += PAIRS) {
    a.pairs = a.half - a.first < PAIRS ? a.half - a.first : PAIRS;
    a.rest = a.first + a.pairs == a.half ? a.D - 2 * a.half : 0;
    for (int d = 0; d < a.pairs; d++) a.frequency[d] = rfi_rotation_frequency(&r, a.first + d);
    RFI_WITH_FLOAT(x->type.dtype, T, (r.table ? launch_rope<T, true>(call, a) : launch_rope<T, false>(call, a)));
  }
  return rfi_cuda_launched("rope");
}
static rfr_status run_rope(const rfr_call *call) { return rotate(call, rfi_rope_rotation(call)); }
static rfr_status run_rope_table(const rfr_call *call) { return rotate(call, rfi_rope_table_rotation(call)); }

/* ---- positions ---- */

/* The maximum of x over the threads before this one, INT32_MIN for the first; *all: over the block of 1024 threads.
 * `part` may be reused after another scan. */
static __device__ __forceinline__ int32_t largest_before(int32_t x, int32_t *part, int32_t *all) {
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
  for (int back = 1; back < 32; back *= 2) {
    const int32_t y = __shfl_up_sync(0xffffffffu, x, back);
    if (lane >= back) x = max(x, y);
  }
  if (lane == 31) part[warp] = x;
  const int32_t y = __shfl_up_sync(0xffffffffu, x, 1);
  __syncthreads();
  const int32_t of_warp = part[lane];
  *all = __reduce_max_sync(0xffffffffu, of_warp);
  return max(lane > 0 ? y : INT32_MIN, __reduce_max_sync(0xffffffffu, lane < warp ? of_warp : INT32_MIN));
}

/* Document d begins at the largest offset up to d: an offset below its predecessor counts as equal to it, a negative
 * one as 0. One block, because there may be as many documents as tokens. A thread has SCAN_EACH adjacent offsets, all
 * in flight. */
static __global__ void __launch_bounds__(SCAN_THREADS) ascend(const int32_t *offset, int32_t *edge, int64_t n) {
  __shared__ int32_t part[2][SCAN_THREADS / 32];
  int32_t before = 0;
  int odd = 0;
  for (int64_t first = 0; first < n; first += SCAN_THREADS * SCAN_EACH, odd ^= 1) {
    const int64_t i = first + threadIdx.x * SCAN_EACH;
    int32_t x[SCAN_EACH], all;
#pragma unroll
    for (int j = 0; j < SCAN_EACH; j++) x[j] = i + j < n ? offset[i + j] : 0;
    int32_t most = x[0];
#pragma unroll
    for (int j = 1; j < SCAN_EACH; j++) most = max(most, x[j]);
    most = max(before, largest_before(most, part[odd], &all));
#pragma unroll
    for (int j = 0; j < SCAN_EACH; j++) {
      most = max(most, x[j]);
      if (i + j < n) edge[i + j] = most;
    }
    before = max(before, all);
  }
}

/* Row t is in the document whose edge is the last one at or before t, if another edge follows. Otherwise it is in none,
 * at position 0. */
static __global__ void __launch_bounds__(THREADS) place(const int32_t *edge, int64_t n, int32_t *y, int64_t tokens) {
  for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < tokens; t += (int64_t)gridDim.x * THREADS) {
    int64_t low = 0, high = n; /* edges before `low` are at or before t, edges from `high` are after it */
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (edge[middle] <= t) low = middle + 1;
      else high = middle;
    }
    y[t] = low > 0 && low < n ? (int32_t)(t - edge[low - 1]) : 0;
  }
}

static size_t positions_workspace(const rfr_call *call) { return (size_t)call->in[0].type.shape[0] * sizeof(int32_t); }

static rfr_status run_positions(const rfr_call *call) {
  const int64_t n = call->in[0].type.shape[0], tokens = call->out[0].type.shape[0];
  int32_t *edge = (int32_t *)call->workspace;
  if (tokens == 0) return RFR_OK;
  ascend<<<1, SCAN_THREADS, 0, rfi_stream(call)>>>((const int32_t *)call->in[0].data, edge, n);
  place<<<rfi_grid(call, tokens, THREADS), THREADS, 0, rfi_stream(call)>>>(edge, n, (int32_t *)call->out[0].data,
                                                                           tokens);
  return rfi_cuda_launched("positions");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(rope) = {run_rope, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(rope_table) = {run_rope_table, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(positions) = {run_positions, positions_workspace, NULL};
