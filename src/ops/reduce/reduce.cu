/* SPDX-License-Identifier: Apache-2.0
 *
 * sum, max and max_bwd on a GPU, over operands of any strides.
 *
 *   y[r] = sum_k x[r,k] (+ acc)      y[r] = max_k x[r,k], NaN if any is      dx[r,k] = dy[r] at the first maximum
 *
 * Shapes and strides choose one of three ways: to one scalar, blocks over all elements; along an axis whose elements
 * are adjacent, a block per result; across an axis whose elements are not adjacent, a lane per column and the rows
 * split over warps and blocks. Elements are added in f32 in runs of at most 32, the runs in f64, partial results in a
 * fixed order; the width of loads does not change the order.
 */
#include "ops/elementwise/map.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES, END_WARPS = 32, RUN = 32 };
enum { MOST_PARTS = 1024, SPLIT_TARGET = 1056, SPLIT_ROWS = 64 };
/* with so many rows, each warp of a block adds one run; more parts would only start later */
enum { ONE_RUN = WARPS * RUN };

struct sum_kind {
  static __device__ __forceinline__ double nothing() { return 0; }
  static __device__ __forceinline__ float run_nothing() { return 0; }
  static __device__ __forceinline__ float step(float a, float x) { return a + x; }
  static __device__ __forceinline__ double join(double a, double b) { return a + b; }
};
struct max_kind {
  static __device__ __forceinline__ double nothing() { return -INFINITY; }
  static __device__ __forceinline__ float run_nothing() { return -INFINITY; }
  static __device__ __forceinline__ float step(float a, float x) { return x > a || x != x ? x : a; }
  static __device__ __forceinline__ double join(double a, double b) { return b > a || b != b ? b : a; }
};

/* Over a block, in a fixed order; thread 0 has the result. */
template <class KIND> static __device__ double block_join(double x) {
  __shared__ double part[WARPS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x = KIND::join(x, __shfl_down_sync(0xffffffffu, x, offset));
  if (lane == 0) part[warp] = x;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < WARPS; w++) x = KIND::join(x, part[w]);
  return x;
}

struct result { /* the type is tested at the store, which avoids one kernel per type */
  void *y;
  rfr_dtype dtype;
  bool accumulate;
};
template <typename Y> static __device__ __forceinline__ void put_as(const result &to, int64_t i, double total) {
  Y *y = (Y *)to.y + i;
  *y = rfi_narrow<Y>((float)(to.accumulate ? total + (double)rfi_widen(*y) : total));
}
static __device__ __forceinline__ void put(const result &to, int64_t i, double total) {
  if (to.dtype == RFR_F32) put_as<float>(to, i, total);
  else if (to.dtype == RFR_BF16) put_as<rfi_bf16>(to, i, total);
  else put_as<rfi_f16>(to, i, total);
}

struct extent {
  rfi_strided_loop walk; /* iterates over the results in x, or over all elements */
  int64_t results, rows; /* rows: elements per result */
  int64_t step;          /* stride between them */
};

/* ---- to one scalar ---- */

enum { ALL_GROUP = 8 }; /* elements that a thread adds in f32 */

template <class KIND, typename X, bool FLAT>
static __global__ void __launch_bounds__(THREADS)
    all_parts(const X *x, const __grid_constant__ extent e, double *part) {
  const int64_t groups = (e.rows + ALL_GROUP - 1) / ALL_GROUP;
  double total = KIND::nothing();
  for (int64_t g = (int64_t)blockIdx.x * THREADS + threadIdx.x; g < groups; g += (int64_t)gridDim.x * THREADS) {
    const int64_t first = g * ALL_GROUP;
    float a[ALL_GROUP], run = KIND::run_nothing();
    if (FLAT && first + ALL_GROUP <= e.rows) {
      rfi_widen(rfi_load<X, ALL_GROUP>(x + first), a);
    } else {
#pragma unroll
      for (int v = 0; v < ALL_GROUP; v++)
        a[v] = first + v < e.rows ? rfi_widen(x[rfi_strided_loop_offset(e.walk, 0, first + v)]) : KIND::run_nothing();
    }
#pragma unroll
    for (int v = 0; v < ALL_GROUP; v++) run = KIND::step(run, a[v]);
    total = KIND::join(total, run);
  }
  total = block_join<KIND>(total);
  if (threadIdx.x == 0) part[blockIdx.x] = total;
}

template <class KIND>
static __global__ void __launch_bounds__(THREADS) all_end(const result y, const double *part, int n) {
  double total = KIND::nothing();
  for (int k = threadIdx.x; k < n; k += THREADS) total = KIND::join(total, part[k]);
  total = block_join<KIND>(total);
  if (threadIdx.x == 0) put(y, 0, total);
}

static int all_grid(int64_t n) {
  const int64_t parts = rfi_blocks(n, (int64_t)THREADS * ALL_GROUP * 4);
  return (int)(parts < 1 ? 1 : parts < MOST_PARTS ? parts : MOST_PARTS);
}

/* ---- along an axis ---- */

template <class KIND, typename X>
static __global__ void __launch_bounds__(THREADS) along(const X *x, const result y, const __grid_constant__ extent e) {
  for (int64_t r = blockIdx.x; r < e.results; r += gridDim.x) {
    const X *from = x + rfi_strided_loop_offset(e.walk, 0, r);
    double total = KIND::nothing();
    for (int64_t k = threadIdx.x; k < e.rows; k += THREADS * RUN / 8) {
      float run = KIND::run_nothing();
#pragma unroll
      for (int j = 0; j < RUN / 8; j++)
        if (k + j * THREADS < e.rows) run = KIND::step(run, rfi_widen(from[(k + j * THREADS) * e.step]));
      total = KIND::join(total, run);
    }
    __syncthreads(); /* thread 0 may still read the parts of the previous result */
    total = block_join<KIND>(total);
    if (threadIdx.x == 0) put(y, r, total);
  }
}

/* ---- across an axis ---- */

/* Each lane has V adjacent columns, each warp of a block every WARPS-th row of the block's part of the rows. */
template <class KIND, typename X, int V>
static __global__ void __launch_bounds__(THREADS)
    across(const X *x, const result y, const __grid_constant__ extent e, double *part) {
  __shared__ double joined[WARPS][V][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int64_t column = ((int64_t)blockIdx.x * LANES + lane) * V;
  const int64_t per_part = (e.rows + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * per_part;
  const int64_t end = begin + per_part < e.rows ? begin + per_part : e.rows;
  double total[V];
#pragma unroll
  for (int v = 0; v < V; v++) total[v] = KIND::nothing();
  if (column < e.results) {
    const X *from = x + rfi_strided_loop_offset(e.walk, 0, column / V);
    for (int64_t r = begin + warp; r < end; r += WARPS * RUN) {
      const int64_t last = r + WARPS * RUN < end ? r + WARPS * RUN : end;
      float run[V];
#pragma unroll
      for (int v = 0; v < V; v++) run[v] = KIND::run_nothing();
#pragma unroll 4
      for (int64_t k = r; k < last; k += WARPS) {
        float a[V];
        rfi_widen(rfi_load<X, V>(from + k * e.step), a);
#pragma unroll
        for (int v = 0; v < V; v++) run[v] = KIND::step(run[v], a[v]);
      }
#pragma unroll
      for (int v = 0; v < V; v++) total[v] = KIND::join(total[v], run[v]);
    }
  }
#pragma unroll
  for (int v = 0; v < V; v++) joined[warp][v][lane] = total[v];
  __syncthreads();
  for (int i = threadIdx.x; i < V * LANES; i += THREADS) {
    const int v = i / LANES, l = i % LANES;
    const int64_t at = ((int64_t)blockIdx.x * LANES + l) * V + v;
    double t = joined[0][v][l];
    for (int w = 1; w < WARPS; w++) t = KIND::join(t, joined[w][v][l]);
    if (at >= e.results) continue;
    if (gridDim.y == 1) put(y, at, t);
    else part[blockIdx.y * e.results + at] = t;
  }
}

/* A lane per column; each warp adds every END_WARPS-th part, because a loop of one thread over hundreds of parts would
 * take as long as reading the rows. */
template <class KIND>
static __global__ void __launch_bounds__(END_WARPS *LANES)
    across_end(const result y, const double *part, int64_t results, int parts) {
  __shared__ double joined[END_WARPS][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int64_t column = (int64_t)blockIdx.x * LANES + lane;
  double total = KIND::nothing();
  if (column < results) {
#pragma unroll 4
    for (int p = warp; p < parts; p += END_WARPS) total = KIND::join(total, part[p * results + column]);
  }
  joined[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || column >= results) return;
  for (int w = 1; w < END_WARPS; w++) total = KIND::join(total, joined[w][lane]);
  put(y, column, total);
}

/* The number of parts of the rows, from shapes alone. */
static int across_parts(int64_t results, int64_t rows) {
  const int64_t wanted = SPLIT_TARGET / rfi_blocks(results, THREADS), most = rows > ONE_RUN ? rows / SPLIT_ROWS : 1;
  const int64_t parts = wanted < most ? wanted : most;
  return (int)(parts < 1 ? 1 : parts);
}

/* ---- choice of the kernel ---- */

enum way { ALL, ALONG, ACROSS };

/* x without the axis, in the order of the dense result. */
static enum way describe(const rfr_call *call, extent *e) {
  const rfr_arg *x = &call->in[0];
  const int64_t axis = call->attr[0].i;
  e->results = rfi_elements(&call->out[0]);
  if (axis == -1 || e->results == 1) {
    e->rows = rfi_elements(x);
    e->step = 0;
    rfi_strided_loop_init(&e->walk, 1, &x);
    return ALL;
  }
  e->rows = x->type.shape[axis];
  e->step = x->stride[axis];
  rfi_strided_loop_start(&e->walk, 1);
  for (int d = 0; d < x->type.rank; d++)
    if (d != axis) rfi_strided_loop_dim(&e->walk, x->type.shape[d], &x->stride[d]);
  rfi_strided_loop_end(&e->walk);
  return e->step < e->walk.stride[0][e->walk.rank - 1] ? ALONG : ACROSS;
}

static size_t workspace(const rfr_call *call) {
  extent e;
  const enum way way = describe(call, &e);
  if (way == ALL) return (size_t)all_grid(e.rows) * sizeof(double);
  const int parts = way == ACROSS && e.results > 0 ? across_parts(e.results, e.rows) : 1;
  return parts > 1 ? (size_t)parts * (size_t)e.results * sizeof(double) : 0;
}

template <class KIND, typename X, int V>
static void launch_across(const rfr_call *call, const extent &e, const result &y) {
  const int parts = across_parts(e.results, e.rows);
  double *part = (double *)call->workspace;
  const dim3 grid((unsigned)rfi_blocks(e.results, LANES * V), (unsigned)parts);
  across<KIND, X, V><<<grid, THREADS, 0, rfi_stream(call)>>>((const X *)call->in[0].data, y, e, part);
  if (parts > 1)
    across_end<KIND>
        <<<(unsigned)rfi_blocks(e.results, LANES), END_WARPS * LANES, 0, rfi_stream(call)>>>(y, part, e.results, parts);
}

template <class KIND, typename X> static void launch(const rfr_call *call) {
  constexpr int V = rfi_pack_width<X>;
  const X *x = (const X *)call->in[0].data;
  const result y = {call->out[0].data, call->out[0].type.dtype, call->n_in > 1 && call->in[1].data};
  double *part = (double *)call->workspace;
  extent e;
  const enum way way = describe(call, &e);
  const void *base = x;
  const int size = (int)sizeof(X);
  cudaStream_t stream = rfi_stream(call);
  if (e.results == 0) return;
  if (way == ALL) {
    const int grid = all_grid(e.rows);
    const bool flat = e.walk.rank == 1 && e.walk.stride[0][0] == 1 && (uintptr_t)x % 16 == 0;
    if (flat) all_parts<KIND, X, true><<<grid, THREADS, 0, stream>>>(x, e, part);
    else all_parts<KIND, X, false><<<grid, THREADS, 0, stream>>>(x, e, part);
    all_end<KIND><<<1, THREADS, 0, stream>>>(y, part, grid);
  } else if (way == ALONG) {
    along<KIND, X><<<rfi_grid(call, e.results, 1), THREADS, 0, stream>>>(x, y, e);
  } else if (e.walk.dim[e.walk.rank - 1] % V == 0 && e.step % V == 0 &&
             rfi_strided_loop_groups(&e.walk, V, 1, &base, &size)) {
    rfi_strided_loop_by_groups(&e.walk, V);
    launch_across<KIND, X, V>(call, e, y);
  } else {
    launch_across<KIND, X, 1>(call, e, y);
  }
}

static rfr_status run_sum(const rfr_call *call) {
  RFI_WITH_FLOAT(call->in[0].type.dtype, X, launch<sum_kind, X>(call));
  return rfi_cuda_launched("sum");
}
static rfr_status run_max(const rfr_call *call) {
  RFI_WITH_FLOAT(call->in[0].type.dtype, X, launch<max_kind, X>(call));
  return rfi_cuda_launched("max");
}

/* ---- max_bwd ---- */

static __device__ __forceinline__ bool matches(float x, float y) { return x == y || (x != x && y != y); }

struct max_bwd_args {
  rfi_strided_loop walk; /* results in dy, x, y, dx */
  int64_t results, rows, x_step, dx_step;
};

/* A thread per result. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    max_bwd(const T *dy, const T *x, const T *y, T *dx, const __grid_constant__ max_bwd_args a) {
  for (int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x; r < a.results; r += (int64_t)gridDim.x * THREADS) {
    const float top = rfi_widen(y[rfi_strided_loop_offset(a.walk, 2, r)]);
    const T gradient = dy[rfi_strided_loop_offset(a.walk, 0, r)];
    const T *from = x + rfi_strided_loop_offset(a.walk, 1, r);
    T *to = dx + rfi_strided_loop_offset(a.walk, 3, r);
    bool found = false;
    for (int64_t k = 0; k < a.rows; k++) {
      const bool hit = !found && matches(rfi_widen(from[k * a.x_step]), top);
      found |= hit;
      to[k * a.dx_step] = hit ? gradient : rfi_narrow<T>(0.0f);
    }
  }
}

/* One result: the first index over the blocks' first indices. */
static __device__ int64_t block_min(int64_t x) {
  __shared__ int64_t least[THREADS];
  least[threadIdx.x] = x;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half && least[threadIdx.x + half] < least[threadIdx.x])
      least[threadIdx.x] = least[threadIdx.x + half];
  }
  __syncthreads();
  return least[0];
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    find_first(const T *x, const T *y, int64_t n, const __grid_constant__ rfi_strided_loop walk, int64_t *part) {
  const float top = rfi_widen(*y);
  int64_t first = n;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n && first == n; i += (int64_t)gridDim.x * THREADS)
    if (matches(rfi_widen(x[rfi_strided_loop_offset(walk, 0, i)]), top)) first = i;
  first = block_min(first);
  if (threadIdx.x == 0) part[blockIdx.x] = first;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    put_first(const T *dy, T *dx, int64_t n, const int64_t *part, int parts) {
  int64_t first = n;
  for (int p = threadIdx.x; p < parts; p += THREADS) first = part[p] < first ? part[p] : first;
  first = block_min(first);
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * THREADS)
    dx[i] = i == first ? *dy : rfi_narrow<T>(0.0f);
}

static size_t max_bwd_workspace(const rfr_call *call) {
  return call->attr[0].i == -1 ? (size_t)all_grid(rfi_elements(&call->in[1])) * sizeof(int64_t) : 0;
}

template <typename T> static void launch_max_bwd(const rfr_call *call) {
  const rfr_arg *x = &call->in[1], *const args[] = {&call->in[0], x, &call->in[2], &call->out[0]};
  const T *in[3] = {(const T *)call->in[0].data, (const T *)x->data, (const T *)call->in[2].data};
  T *dx = (T *)call->out[0].data;
  const int64_t axis = call->attr[0].i, n = rfi_elements(x);
  if (n == 0) return;
  if (axis == -1) {
    const int grid = all_grid(n);
    int64_t *part = (int64_t *)call->workspace;
    rfi_strided_loop walk;
    rfi_strided_loop_init(&walk, 1, &x);
    find_first<T><<<grid, THREADS, 0, rfi_stream(call)>>>(in[1], in[2], n, walk, part);
    put_first<T><<<grid, THREADS, 0, rfi_stream(call)>>>(in[0], dx, n, part, grid);
    return;
  }
  max_bwd_args a;
  a.results = n / x->type.shape[axis];
  a.rows = x->type.shape[axis];
  a.x_step = x->stride[axis];
  a.dx_step = call->out[0].stride[axis];
  rfi_strided_loop_start(&a.walk, 4);
  for (int d = 0, r = 0; d < x->type.rank; d++) {
    int64_t stride[4];
    if (d == axis) continue;
    for (int k = 0; k < 4; k++) stride[k] = args[k]->stride[k == 0 || k == 2 ? r : d];
    rfi_strided_loop_dim(&a.walk, x->type.shape[d], stride);
    r++;
  }
  rfi_strided_loop_end(&a.walk);
  max_bwd<T><<<rfi_grid(call, a.results, THREADS), THREADS, 0, rfi_stream(call)>>>(in[0], in[1], in[2], dx, a);
}

static rfr_status run_max_bwd(const rfr_call *call) {
  RFI_WITH_FLOAT(call->in[1].type.dtype, T, launch_max_bwd<T>(call));
  return rfi_cuda_launched("max_bwd");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(sum) = {run_sum, workspace, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(max) = {run_max, workspace, rfi_takes_floats};
extern "C" const rfi_cuda_kernel RFI_CUDA(max_bwd) = {run_max_bwd, max_bwd_workspace, rfi_takes_floats};
