/* SPDX-License-Identifier: Apache-2.0
 *
 * Moves rows of tokens to rows sorted by expert and back, on a GPU: a warp per token or, for rows of at most 16 bytes,
 * a thread per element.
 *
 *   permute      y[place[t,j]] = x[t] (* weight[t,j]), and zeros in rows without a slot
 *   unpermute    out[t] = sum over j of y[place[t,j]] (* weight[t,j]), in the order of j
 *   unpermute_dw dw[t,j] = y[place[t,j]] . dout[t]
 *
 * Going by tokens, each row is read once: gathering the sorted rows one by one would read a token's row k times, at
 * distant moments. The sort guarantees that place and order agree; rows without a slot have order -1.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/elementwise/map.cuh"
#include "ops/reduce/dot_rows.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES };

struct rows_args {
  const void *from, *weight; /* weight: NULL for ones */
  void *to;
  const int32_t *order, *place;
  rfr_dtype weight_type;
  int64_t tokens, rows, columns;
  int k;
};

static __device__ __forceinline__ float weight_of(const rows_args &a, int64_t slot) {
  return a.weight ? rfi_load(a.weight, a.weight_type, slot) : 1.0f;
}

/* ---- moe_permute ---- */

enum { PARTS = 4 }; /* groups of a row per lane */

template <typename X, int V>
static __global__ void __launch_bounds__(THREADS) permute(const __grid_constant__ rows_args a) {
  const int lane = threadIdx.x % LANES;
  const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
  const int64_t step = (int64_t)gridDim.x * WARPS;
  if (t < a.tokens) {
    const X *from = (const X *)a.from + t * a.columns;
    for (int64_t first = lane * V; first < a.columns; first += LANES * V * PARTS) {
      rfi_group<X, V> x[PARTS];
#pragma unroll
      for (int u = 0; u < PARTS; u++) {
        const int64_t j = first + u * (LANES * V);
        if (j < a.columns) x[u] = rfi_load<X, V>(from + j);
      }
      for (int64_t slot = t * a.k; slot < (t + 1) * a.k; slot++) {
        const int64_t row = a.place[slot];
        if (row < 0 || row >= a.rows) continue;
        X *to = (X *)a.to + row * a.columns;
        const float weight = weight_of(a, slot);
#pragma unroll
        for (int u = 0; u < PARTS; u++) {
          const int64_t j = first + u * (LANES * V);
          if (j >= a.columns) break;
          if (a.weight) {
            float y[V];
            rfi_widen(x[u], y);
#pragma unroll
            for (int v = 0; v < V; v++) y[v] *= weight;
            rfi_store<X, V>(to + j, y);
          } else {
            rfi_put((rfi_pack<X, V> *)(to + j), x[u].part[0]);
          }
        }
      }
    }
  }
  for (int64_t row = t; row < a.rows; row += step) {
    if (a.order[row] >= 0) continue;
    float zeros[V] = {};
    for (int64_t j = lane * V; j < a.columns; j += LANES * V) rfi_store<X, V>((X *)a.to + row * a.columns + j, zeros);
  }
}

/* ---- moe_unpermute ---- */

/* Lane l % 32 reads the row of the l-th slot, or -1, and its weight, once. */
struct slot {
  int row;
  float weight;
  __device__ __forceinline__ slot(const rows_args &a, int64_t t, int l) : row(-1), weight(0) {
    if (l >= a.k) return;
    row = a.place[t * a.k + l];
    if (row >= a.rows) row = -1;
    if (row >= 0) weight = weight_of(a, t * a.k + l);
  }
};

/* SLOTS rows of WIDE groups each are in flight at once. Three blocks per multiprocessor: with the registers of four,
 * the compiler waits for two of the loads at a time. A missing row counts as zeros. */
template <typename X, int V, int SLOTS, int WIDE>
static __global__ void __launch_bounds__(THREADS, 3) unpermute(const __grid_constant__ rows_args a) {
  const int lane = threadIdx.x % LANES;
  const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
  if (t >= a.tokens) return;
  slot mine(a, t, lane);
  for (int64_t at = 0; at < a.columns; at += LANES * V * WIDE) {
    const int64_t column = at + lane * V;
    float sum[WIDE][V] = {};
    for (int first = 0; first < a.k; first += SLOTS) {
      rfi_group<X, V> x[SLOTS][WIDE];
      int row[SLOTS];
      float weight[SLOTS];
      if (a.k > LANES && first % LANES == 0) mine = slot(a, t, first + lane);
#pragma unroll
      for (int s = 0; s < SLOTS; s++) {
        row[s] = __shfl_sync(0xffffffffu, mine.row, (first + s) % LANES);
        weight[s] = __shfl_sync(0xffffffffu, mine.weight, (first + s) % LANES);
      }
#pragma unroll
      for (int s = 0; s < SLOTS; s++)
#pragma unroll
        for (int u = 0; u < WIDE; u++) { /* an extra load costs less than a branch between loads */
          const int64_t j = column + u * (LANES * V), r = row[s] < 0 ? 0 : row[s];
          x[s][u] = rfi_load<X, V>((const X *)a.from + r * a.columns + (j < a.columns ? j : 0));
        }
#pragma unroll
      for (int s = 0; s < SLOTS; s++)
#pragma unroll
        for (int u = 0; u < WIDE; u++) {
          float y[V];
          rfi_widen(x[s][u], y);
#pragma unroll
          for (int v = 0; v < V; v++) sum[u][v] += row[s] < 0 ? 0.0f : y[v] * weight[s];
        }
    }
#pragma unroll
    for (int u = 0; u < WIDE; u++)
      if (column + u * (LANES * V) < a.columns)
        rfi_store<X, V>((X *)a.to + t * a.columns + column + u * (LANES * V), sum[u]);
  }
}

/* ---- rows of a few bytes ---- */

/* For short rows, such as slots' weights: a thread gathers each element of the result, because a warp per token would
 * have almost nothing to move. */
enum { FEW_BYTES = 16 };

template <typename X>
static __global__ void __launch_bounds__(THREADS) permute_few(const __grid_constant__ rows_args a) {
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= a.rows * a.columns) return;
  const int64_t slot = a.order[i / a.columns];
  X x = rfi_narrow<X>(0.0f);
  if (slot >= 0 && slot < a.tokens * a.k) {
    x = ((const X *)a.from)[slot / a.k * a.columns + i % a.columns];
    if (a.weight) x = rfi_narrow<X>(rfi_widen(x) * weight_of(a, slot));
  }
  ((X *)a.to)[i] = x;
}

template <typename X>
static __global__ void __launch_bounds__(THREADS) unpermute_few(const __grid_constant__ rows_args a) {
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, t = i / a.columns;
  if (t >= a.tokens) return;
  float sum = 0;
  for (int64_t slot = t * a.k; slot < (t + 1) * a.k; slot++) {
    const int64_t row = a.place[slot];
    if (row >= 0 && row < a.rows)
      sum += rfi_widen(((const X *)a.from)[row * a.columns + i % a.columns]) * weight_of(a, slot);
  }
  ((X *)a.to)[i] = rfi_narrow<X>(sum);
}

/* ---- launches ---- */

static rows_args args_of(const rfr_call *c) {
  const bool weighted = c->n_in > 3 && c->in[3].data;
  rows_args a;
  a.from = c->in[0].data;
  a.weight = weighted ? c->in[3].data : NULL;
  a.weight_type = weighted ? c->in[3].type.dtype : RFR_F32;
  a.to = c->out[0].data;
  a.order = (const int32_t *)c->in[1].data;
  a.place = (const int32_t *)c->in[2].data;
  a.tokens = c->in[2].type.shape[0];
  a.rows = c->in[1].type.shape[0];
  a.columns = c->in[0].type.shape[1];
  a.k = (int)c->in[2].type.shape[1];
  return a;
}
template <typename X> static bool is_few(const rows_args &a) { return a.columns * (int)sizeof(X) <= FEW_BYTES; }
static bool in_groups(const rows_args &a, int width) {
  return a.columns % width == 0 && ((uintptr_t)a.from | (uintptr_t)a.to) % 16 == 0;
}

template <typename X> static void launch_permute(const rfr_call *c, const rows_args &a) {
  constexpr int V = rfi_pack_width<X>;
  const unsigned grid = (unsigned)rfi_blocks(a.tokens > 0 ? a.tokens : 1, WARPS); /* zeros without tokens */
  if (is_few<X>(a)) permute_few<X><<<(unsigned)rfi_blocks(a.rows * a.columns, THREADS), THREADS, 0, rfi_stream(c)>>>(a);
  else if (in_groups(a, V)) permute<X, V><<<grid, THREADS, 0, rfi_stream(c)>>>(a);
  else permute<X, 1><<<grid, THREADS, 0, rfi_stream(c)>>>(a);
}
static rfr_status run_permute(const rfr_call *c) {
  if (rfi_elements(&c->out[0]) == 0) return RFR_OK;
  RFI_WITH_FLOAT(c->in[0].type.dtype, X, launch_permute<X>(c, args_of(c)));
  return rfi_cuda_launched("moe_permute");
}

template <typename X, int V> static void launch_slots(const rfr_call *c, const rows_args &a) {
  const unsigned grid = (unsigned)rfi_blocks(a.tokens, WARPS);
  cudaStream_t stream = rfi_stream(c);
  if (a.k <= 2) unpermute<X, V, 2, 4><<<grid, THREADS, 0, stream>>>(a);
  else if (a.k <= 4) unpermute<X, V, 4, 2><<<grid, THREADS, 0, stream>>>(a);
  else unpermute<X, V, 8, 1><<<grid, THREADS, 0, stream>>>(a);
}
template <typename X> static void launch_unpermute(const rfr_call *c, const rows_args &a) {
  constexpr int V = rfi_pack_width<X>;
  if (is_few<X>(a))
    unpermute_few<X><<<(unsigned)rfi_blocks(a.tokens * a.columns, THREADS), THREADS, 0, rfi_stream(c)>>>(a);
  else if (in_groups(a, V)) launch_slots<X, V>(c, a);
  else launch_slots<X, 1>(c, a);
}
static rfr_status run_unpermute(const rfr_call *c) {
  if (rfi_elements(&c->out[0]) == 0) return RFR_OK;
  RFI_WITH_FLOAT(c->in[0].type.dtype, X, launch_unpermute<X>(c, args_of(c)));
  return rfi_cuda_launched("moe_unpermute");
}

/* ---- moe_unpermute_dw ---- */

struct find_slot {
  const int32_t *place;
  int64_t rows, k;
  __device__ __forceinline__ bool operator()(int64_t slot, int64_t *row, int64_t *token) const {
    *row = place[slot];
    *token = slot / k;
    return *row >= 0 && *row < rows;
  }
};

static rfr_status run_dweight(const rfr_call *c) {
  const find_slot find = {(const int32_t *)c->in[1].data, c->in[0].type.shape[0], c->in[1].type.shape[1]};
  return rfi_dot_rows(c, 0, 2, find);
}

extern "C" const rfi_cuda_kernel RFI_CUDA(moe_permute) = {run_permute, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_unpermute) = {run_unpermute, NULL, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_unpermute_dw) = {run_dweight, NULL, rfi_takes_floats};
