/* SPDX-License-Identifier: Apache-2.0
 *
 * rope and positions on a GPU.
 *
 *   y[t,h,d]       = x[t,h,d] cos a - x[t,h,d+D/2] sin a       a = positions[t] frequency[d]
 *   y[t,h,d+D/2]   = x[t,h,d+D/2] cos a + x[t,h,d] sin a
 *
 * A block has one row at a time: its sines and cosines are computed once, in shared memory, and serve all heads.
 * Angles are taken in f64, as rope_cpu.c says why; the frequencies are computed by a kernel of their own.
 */
#include "ops/elementwise/map.cuh"

enum { THREADS = 256, TABLE = 512, SCAN_THREADS = 1024 };

/* ---- rope ---- */

struct frequencies {
  double theta, factor, low, high;
  int64_t original, D;
};

/* Pair d's angle per position: a frequency that turns `high` times or more over the original length stays, one that
 * turns `low` times or less is divided by the factor, between them both are mixed in proportion to the turns. */
static __global__ void __launch_bounds__(THREADS) fill_frequencies(double *frequency, const frequencies f) {
  const int64_t d = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (d >= f.D / 2) return;
  const double plain = pow(f.theta, -2.0 * (double)d / (double)f.D);
  double kept = 0;
  if (f.original > 0) kept = ((double)f.original * plain / 6.283185307179586477 - f.low) / (f.high - f.low);
  kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
  frequency[d] = f.factor == 1 ? plain : plain * (kept + (1 - kept) / f.factor);
}

/* Angles up to about 1e9, reduced in f64 to [-pi/4, pi/4] and a quarter turn's number. */
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

struct rope_args {
  const double *frequency;
  const int32_t *position;
  int64_t position_step, T, H, half, x_row, x_head, x_step;
  bool inverse;
};

template <typename T, int V>
static __global__ void __launch_bounds__(THREADS) rope(const T *x, T *y, const __grid_constant__ rope_args a) {
  __shared__ float sine[TABLE], cosine[TABLE];
  for (int64_t t = blockIdx.x; t < a.T; t += gridDim.x) {
    const double position = a.position[t * a.position_step] * (a.inverse ? -1.0 : 1.0);
    for (int64_t d0 = 0; d0 < a.half; d0 += TABLE) {
      const int n = (int)(a.half - d0 < TABLE ? a.half - d0 : TABLE), groups = n / V;
      __syncthreads();
      for (int d = threadIdx.x; d < n; d += blockDim.x)
        sine_cosine(position * a.frequency[d0 + d], &sine[d], &cosine[d]);
      __syncthreads();
      for (int64_t i = threadIdx.x; i < a.H * groups; i += blockDim.x) {
        const int64_t h = (int64_t)((uint64_t)i / (uint32_t)groups);
        const int d = (int)(i - h * groups) * V;
        const T *from = x + t * a.x_row + h * a.x_head + (d0 + d) * a.x_step;
        T *to = y + (t * a.H + h) * 2 * a.half + d0 + d;
        float x0[V], x1[V], y0[V], y1[V];
        rfi_widen(rfi_load<T, V>(from), x0);
        rfi_widen(rfi_load<T, V>(from + a.half * a.x_step), x1);
#pragma unroll
        for (int v = 0; v < V; v++) {
          y0[v] = x0[v] * cosine[d + v] - x1[v] * sine[d + v];
          y1[v] = x1[v] * cosine[d + v] + x0[v] * sine[d + v];
        }
        rfi_store<T, V>(to, y0);
        rfi_store<T, V>(to + a.half, y1);
      }
    }
  }
}

template <typename T> static void launch_rope(const rfr_call *call, const rope_args &a) {
  constexpr int V = rfi_pack_width<T>;
  const T *x = (const T *)call->in[0].data;
  T *y = (T *)call->out[0].data;
  const bool aligned = ((uintptr_t)x | (uintptr_t)y) % 16 == 0;
  const bool groups = a.x_step == 1 && aligned && a.half % V == 0 && a.x_row % V == 0 && a.x_head % V == 0;
  const int64_t items = a.H * a.half / (groups ? V : 1), lanes = rfi_blocks(items, 32) * 32;
  const unsigned threads = (unsigned)(lanes < 64 ? 64 : lanes < THREADS ? lanes : THREADS);
  if (groups) rope<T, V><<<rfi_grid(call, a.T, 1), threads, 0, rfi_stream(call)>>>(x, y, a);
  else rope<T, 1><<<rfi_grid(call, a.T, 1), threads, 0, rfi_stream(call)>>>(x, y, a);
}

static size_t rope_workspace(const rfr_call *call) { return (size_t)(call->in[0].type.shape[2] / 2) * sizeof(double); }

static rfr_status run_rope(const rfr_call *call) {
  const rfr_arg *x = &call->in[0], *positions = &call->in[1];
  const rfr_attr *attr = call->attr;
  const int64_t D = x->type.shape[2];
  const frequencies f = {attr[0].f, attr[2].f, attr[3].f, attr[4].f, attr[5].i, D};
  const rope_args a = {(const double *)call->workspace,
                       (const int32_t *)positions->data,
                       positions->stride[0],
                       x->type.shape[0],
                       x->type.shape[1],
                       D / 2,
                       x->stride[0],
                       x->stride[1],
                       x->stride[2],
                       attr[1].i != 0};
  if (rfi_elements(&call->out[0]) == 0) return RFR_OK;
  fill_frequencies<<<(unsigned)rfi_blocks(D / 2, THREADS), THREADS, 0, rfi_stream(call)>>>((double *)call->workspace,
                                                                                           f);
  RFI_WITH_FLOAT(x->type.dtype, T, launch_rope<T>(call, a));
  return rfi_cuda_launched("rope");
}

/* ---- positions ---- */

/* Document d begins where the largest offset up to d says: an offset below its predecessor counts as equal to it, a
 * negative one as 0. One block; documents may be as many as tokens. */
static __global__ void __launch_bounds__(SCAN_THREADS) ascend(const int32_t *offset, int32_t *edge, int64_t n) {
  __shared__ int32_t most[SCAN_THREADS];
  int32_t before = 0;
  for (int64_t first = 0; first < n; first += SCAN_THREADS) {
    const int64_t i = first + threadIdx.x;
    most[threadIdx.x] = i < n ? offset[i] : 0;
    __syncthreads();
    for (int back = 1; back < SCAN_THREADS; back *= 2) {
      const int32_t x = threadIdx.x >= back ? most[threadIdx.x - back] : 0;
      __syncthreads();
      if (x > most[threadIdx.x]) most[threadIdx.x] = x;
      __syncthreads();
    }
    if (i < n) edge[i] = most[threadIdx.x] > before ? most[threadIdx.x] : before;
    before = most[SCAN_THREADS - 1] > before ? most[SCAN_THREADS - 1] : before;
    __syncthreads();
  }
}

/* Row t is in the document whose edge is the last at or before it, if another edge follows; else in none, at 0. */
static __global__ void __launch_bounds__(THREADS) place(const int32_t *edge, int64_t n, int32_t *y, int64_t tokens) {
  for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < tokens; t += (int64_t)gridDim.x * THREADS) {
    int64_t low = 0, high = n; /* edges before `low` are at or before t, those from `high` on behind it */
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

extern "C" const rfi_cuda_kernel RFI_CUDA(rope) = {run_rope, rope_workspace, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(positions) = {run_positions, positions_workspace, NULL};
