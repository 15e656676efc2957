/* SPDX-License-Identifier: Apache-2.0
 *
 * Ops around grouped GEMMs, on a GPU: offsets, and the gradients of bias and scale.
 *
 * A bias gradient adds chunks of CHUNK adjacent rows, wherever groups begin and end, then for each group the chunks
 * that contain rows of it: one group with all rows is as much work as many groups. The part of chunk c that belongs to
 * group g has the index c + g; rows are sorted by group, so this index is unique.
 */
#include <climits>

#include "backend/cuda/any_type.cuh"
#include "ops/grouped/grouped.h"
#include "ops/reduce/dot_rows.cuh"

enum { THREADS = 256, LANES = 32 };

/* The first group that ends after `row`, or `groups`. */
static __device__ __forceinline__ int64_t first_ending_after(const int32_t *offsets, int64_t groups, int64_t R,
                                                             int64_t row) {
  int64_t low = 0, high = groups;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (rfi_group_end(offsets, middle, R) > row) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* ---- splits_to_offsets ---- */

enum { SCAN_THREADS = 1024, SCAN_WARPS = SCAN_THREADS / LANES };

/* One block. A group begins at the sum of the splits before it, but at most at `rows`. Each split counts as at most
 * `rows`, so no sum overflows. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    to_offsets(const void *splits, bool wide, int64_t groups, int64_t rows, int32_t *offsets, int32_t *bad) {
  __shared__ int64_t part[SCAN_WARPS];
  __shared__ int first_bad;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  int64_t base = 0;
  if (threadIdx.x == 0) first_bad = INT_MAX;
  if (threadIdx.x == 0 && offsets) offsets[0] = 0;
  for (int64_t first = 0; first < groups; first += SCAN_THREADS) {
    const int64_t g = first + threadIdx.x;
    int64_t wanted = 0, before = base, all = base;
    if (g < groups) wanted = wide ? ((const int64_t *)splits)[g] : ((const int32_t *)splits)[g];
    const int64_t n = wanted < 0 ? 0 : wanted < rows ? wanted : rows;
    int64_t sum = n;
#pragma unroll
    for (int back = 1; back < LANES; back *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, sum, back);
      if (lane >= back) sum += other;
    }
    __syncthreads();
    if (lane == LANES - 1) part[warp] = sum;
    __syncthreads();
    for (int w = 0; w < SCAN_WARPS; w++) {
      before += w < warp ? part[w] : 0;
      all += part[w];
    }
    before += sum - n;
    const int64_t begin = before < rows ? before : rows, end = before + n < rows ? before + n : rows;
    /* integer minimum, so the order does not matter */
    if (g < groups && wanted != end - begin) atomicMin(&first_bad, (int)g);
    if (g < groups && offsets) offsets[g + 1] = (int32_t)end;
    base = all < rows ? all : rows;
  }
  __syncthreads();
  if (threadIdx.x == 0 && bad) *bad = first_bad == INT_MAX ? 0 : first_bad + 1;
}

static rfr_status run_offsets(const rfr_call *c) {
  to_offsets<<<1, SCAN_THREADS, 0, rfi_stream(c)>>>(c->in[0].data, c->in[0].type.dtype == RFR_I64,
                                                    c->in[0].type.shape[0], c->attr[0].i, (int32_t *)c->out[0].data,
                                                    (int32_t *)c->out[1].data);
  return rfi_cuda_launched("splits_to_offsets");
}

/* ---- grouped_dbias ---- */

enum { CHUNK = 128, RUN = 32 }; /* rows per chunk; rows per run: runs are summed in f32, their sums are added in f64 */
enum { END_WARPS = 8 };

struct dbias_args {
  const void *dy, *scale; /* scale: NULL for ones */
  const int32_t *offsets;
  rfr_dtype scale_type, type;
  int64_t rows, groups, columns, row_stride, scale_stride;
  float *part;
  void *to;
  bool accumulate;
};

/* A thread has V columns of a chunk. */
template <typename X, int V>
static __global__ void __launch_bounds__(THREADS) add_chunks(const __grid_constant__ dbias_args a) {
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * V, chunk = blockIdx.x;
  const int64_t begin = chunk * CHUNK, end = begin + CHUNK < a.rows ? begin + CHUNK : a.rows;
  if (column >= a.columns) return;
  for (int64_t g = first_ending_after(a.offsets, a.groups, a.rows, begin); g < a.groups; g++) {
    int64_t first = rfi_group_begin(a.offsets, g, a.rows), last = rfi_group_end(a.offsets, g, a.rows);
    if (first >= end) break;
    first = first > begin ? first : begin;
    last = last < end ? last : end;
    if (first >= last) continue;
    double total[V] = {};
    for (int64_t r = first; r < last; r += RUN) {
      const int64_t stop = r + RUN < last ? r + RUN : last;
      float run[V] = {};
#pragma unroll 8
      for (int64_t row = r; row < stop; row++) {
        float x[V];
        rfi_widen(rfi_load<X, V>((const X *)a.dy + row * a.row_stride + column), x);
        const float by = a.scale ? rfi_load(a.scale, a.scale_type, row * a.scale_stride) : 1.0f;
#pragma unroll
        for (int v = 0; v < V; v++) run[v] += x[v] * by;
      }
#pragma unroll
      for (int v = 0; v < V; v++) total[v] += run[v];
    }
#pragma unroll
    for (int v = 0; v < V; v++) a.part[(chunk + g) * a.columns + column + v] = (float)total[v];
  }
}

/* A block has columns of one group: each lane one of them, each warp every END_WARPS-th chunk of the group. */
static __global__ void __launch_bounds__(END_WARPS *LANES) add_parts(const __grid_constant__ dbias_args a) {
  __shared__ double joined[END_WARPS][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int64_t g = blockIdx.x, column = (int64_t)blockIdx.y * LANES + lane;
  const int64_t first = rfi_group_begin(a.offsets, g, a.rows), last = rfi_group_end(a.offsets, g, a.rows);
  double total = 0;
  if (first == last && a.accumulate) return;
  if (column < a.columns && first < last) {
#pragma unroll 4
    for (int64_t c = first / CHUNK + warp; c <= (last - 1) / CHUNK; c += END_WARPS)
      total += a.part[(c + g) * a.columns + column];
  }
  joined[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || column >= a.columns) return;
  for (int w = 1; w < END_WARPS; w++) total += joined[w][lane];
  const int64_t at = g * a.columns + column;
  float sum = (float)total;
  if (a.accumulate) sum += rfi_load(a.to, a.type, at);
  rfi_store(a.to, a.type, at, sum);
}

static size_t dbias_workspace(const rfr_call *c) {
  const rfr_type *db = &c->out[0].type;
  return (size_t)(rfi_blocks(c->in[0].type.shape[0], CHUNK) + db->shape[0]) * (size_t)db->shape[1] * sizeof(float);
}

template <typename X, int V> static void launch_chunks(const rfr_call *c, const dbias_args &a) {
  const int64_t lanes = rfi_blocks(rfi_blocks(a.columns, V), LANES) * LANES;
  const unsigned threads = (unsigned)(lanes < THREADS ? lanes : THREADS);
  const dim3 grid((unsigned)rfi_blocks(a.rows, CHUNK), (unsigned)rfi_blocks(a.columns, (int64_t)threads * V));
  add_chunks<X, V><<<grid, threads, 0, rfi_stream(c)>>>(a);
}
template <typename X> static void launch_dbias(const rfr_call *c, const dbias_args &a) {
  constexpr int V = rfi_pack_width<X>;
  const bool groups = a.columns % V == 0 && a.row_stride % V == 0 && (uintptr_t)a.dy % 16 == 0;
  if (groups) launch_chunks<X, V>(c, a);
  else launch_chunks<X, 1>(c, a);
}

static rfr_status run_dbias(const rfr_call *c) {
  const rfr_arg *dy = &c->in[0], *db = &c->out[0];
  const bool scaled = c->n_in > 2 && c->in[2].data;
  dbias_args a;
  a.dy = dy->data;
  a.scale = scaled ? c->in[2].data : NULL;
  a.scale_type = scaled ? c->in[2].type.dtype : RFR_F32;
  a.scale_stride = scaled ? c->in[2].stride[0] : 0;
  a.offsets = (const int32_t *)c->in[1].data;
  a.type = db->type.dtype;
  a.rows = dy->type.shape[0], a.groups = db->type.shape[0], a.columns = db->type.shape[1];
  a.row_stride = dy->stride[0];
  a.part = (float *)c->workspace;
  a.to = db->data;
  a.accumulate = c->n_in > 3 && c->in[3].data;
  if (rfi_elements(db) == 0) return RFR_OK;
  if (a.rows) RFI_WITH_FLOAT(dy->type.dtype, X, launch_dbias<X>(c, a));
  const dim3 grid((unsigned)a.groups, (unsigned)rfi_blocks(a.columns, LANES));
  add_parts<<<grid, END_WARPS * LANES, 0, rfi_stream(c)>>>(a);
  return rfi_cuda_launched("grouped_dbias");
}

/* ---- grouped_dscale ---- */

struct find_group {
  const int32_t *offsets;
  int64_t groups, rows;
  __device__ __forceinline__ bool operator()(int64_t i, int64_t *row, int64_t *group) const {
    *row = i;
    *group = first_ending_after(offsets, groups, rows, i);
    return *group < groups && i >= rfi_group_begin(offsets, *group, rows);
  }
};

static rfr_status run_dscale(const rfr_call *c) {
  const find_group find = {(const int32_t *)c->in[2].data, c->in[1].type.shape[0], c->in[0].type.shape[0]};
  return rfi_dot_rows(c, 0, 1, find);
}

/* The second grid dimension covers the columns of a group. */
static int dbias_takes(const rfr_call *c) {
  return rfi_takes_floats(c) && rfi_blocks(c->in[0].type.shape[1], LANES) <= 65535;
}

extern "C" const rfi_cuda_kernel RFI_CUDA(splits_to_offsets) = {run_offsets, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(grouped_dbias) = {run_dbias, dbias_workspace, dbias_takes};
extern "C" const rfi_cuda_kernel RFI_CUDA(grouped_dscale) = {run_dscale, NULL, rfi_takes_floats};
