/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding and its gradient on a GPU.
 *
 *   y[t] = table[ids[t]], zeros for an id out of range;  dtable[r] (+)= sum of dy[t] over t with ids[t] = r
 *
 * The gradient sorts the tokens by row with a stable radix sort of 8 bits per pass; the rows of dy that belong to one
 * row of the table are then adjacent, in the order of tokens. They are added in chunks of CHUNK tokens. A chunk writes
 * the sums of the runs that begin in it, and stores the sum of a run that continues from the previous chunk separately.
 * A second kernel adds those to the row, chunk by chunk. So there are no atomics, the work is tokens x columns however
 * often a token occurs, and the order of additions depends on ids only.
 */
#include "ops/elementwise/copy.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES };

/* ---- gather ---- */

template <typename UNIT>
static __global__ void __launch_bounds__(THREADS)
    gather(const UNIT *table, const int32_t *ids, UNIT *y, int64_t rows, int64_t n, int64_t width) {
  const int64_t step = (int64_t)gridDim.x * THREADS * RFI_COPY_UNITS;
  for (int64_t first = (int64_t)blockIdx.x * THREADS * RFI_COPY_UNITS + threadIdx.x; first < n; first += step) {
    UNIT x[RFI_COPY_UNITS];
#pragma unroll
    for (int u = 0; u < RFI_COPY_UNITS; u++) {
      int64_t p = first + u * THREADS;
      p = p < n ? p : n - 1;
      const int64_t t = (int64_t)((uint64_t)p / (uint64_t)width), id = ids[t];
      const bool is_row = id >= 0 && id < rows;
      x[u] = UNIT();
      if (is_row) x[u] = table[id * width + (p - t * width)];
    }
#pragma unroll
    for (int u = 0; u < RFI_COPY_UNITS; u++)
      if (first + u * THREADS < n) y[first + u * THREADS] = x[u];
  }
}

template <typename UNIT> static void launch_gather(const rfr_call *call, int64_t bytes) {
  const int64_t width = bytes / (int64_t)sizeof(UNIT), n = call->out[0].type.shape[0] * width;
  gather<UNIT><<<rfi_grid(call, n, THREADS * RFI_COPY_UNITS), THREADS, 0, rfi_stream(call)>>>(
      (const UNIT *)call->in[0].data, (const int32_t *)call->in[1].data, (UNIT *)call->out[0].data,
      call->in[0].type.shape[0], n, width);
}

static rfr_status run_gather(const rfr_call *call) {
  const rfr_arg *table = &call->in[0], *y = &call->out[0];
  const int64_t bytes = y->type.shape[1] * rfi_element_bytes(y->type.dtype);
  const uintptr_t all = (uintptr_t)table->data | (uintptr_t)y->data | (uintptr_t)bytes;
  if (rfi_elements(y) == 0) return RFR_OK;
  if (all % 16 == 0) launch_gather<uint4>(call, bytes);
  else if (all % 4 == 0) launch_gather<uint32_t>(call, bytes);
  else launch_gather<uint16_t>(call, bytes);
  return rfi_cuda_launched("embedding");
}

/* ---- sort: row and token of each place ---- */

enum { BITS = 8, DIGITS = 1 << BITS, ROUNDS = 8, TILE = THREADS * ROUNDS, SCAN_THREADS = 1024 };

/* The workspace: two lists of (row, token), the tiles' digit counts, and the chunks' sums. */
enum { CHUNK = 32 };
struct space {
  uint32_t *row[2], *token[2], *count;
  float *carried;
  size_t bytes;
};
static space lay_out(const rfr_call *call) {
  const int64_t T = call->in[0].type.shape[0], C = call->in[0].type.shape[1];
  const size_t list = (size_t)rfi_blocks(T * 4, 64) * 64, counts = (size_t)rfi_blocks(T, TILE) * DIGITS * 4;
  char *at = (char *)call->workspace;
  space s;
  s.row[0] = (uint32_t *)at;
  s.row[1] = (uint32_t *)(at + list);
  s.token[0] = (uint32_t *)(at + 2 * list);
  s.token[1] = (uint32_t *)(at + 3 * list);
  s.count = (uint32_t *)(at + 4 * list);
  s.carried = (float *)(at + 4 * list + counts);
  s.bytes = 4 * list + counts + (size_t)rfi_blocks(T, CHUNK) * (size_t)C * sizeof(float);
  return s;
}

/* An id out of range sorts after the last row. */
static __global__ void __launch_bounds__(THREADS)
    number(const int32_t *ids, uint32_t *row, uint32_t *token, uint32_t T, uint32_t rows) {
  for (uint32_t t = blockIdx.x * THREADS + threadIdx.x; t < T; t += gridDim.x * THREADS) {
    const int32_t id = ids[t];
    row[t] = id >= 0 && (uint32_t)id < rows ? (uint32_t)id : rows;
    token[t] = t;
  }
}

/* Counts each warp's digits, those of warp w in of[w]; a warp has ROUNDS * LANES adjacent places of the tile. */
static __device__ __forceinline__ uint32_t first_place(int warp) {
  return blockIdx.x * TILE + warp * (ROUNDS * LANES) + threadIdx.x % LANES;
}
static __device__ void count_digits(uint32_t (*of)[DIGITS], const uint32_t *row, uint32_t T, int shift) {
  const int warp = threadIdx.x / LANES;
  for (int d = threadIdx.x % LANES; d < DIGITS; d += LANES) of[warp][d] = 0;
  __syncwarp();
  for (int k = 0; k < ROUNDS; k++) {
    const uint32_t at = first_place(warp) + k * LANES;
    if (at < T) atomicAdd(&of[warp][row[at] >> shift & (DIGITS - 1)], 1u);
  }
  __syncthreads();
}

static __global__ void __launch_bounds__(THREADS)
    count_tiles(const uint32_t *row, uint32_t *count, uint32_t T, int shift) {
  __shared__ uint32_t of[WARPS][DIGITS];
  count_digits(of, row, T, shift);
  for (int d = threadIdx.x; d < DIGITS; d += THREADS) {
    uint32_t n = 0;
    for (int w = 0; w < WARPS; w++) n += of[w][d];
    count[d * gridDim.x + blockIdx.x] = n; /* ordered by digit: their prefix sums are the places */
  }
}

/* Exclusive prefix sum of count, by one block. */
static __global__ void __launch_bounds__(SCAN_THREADS) scan(uint32_t *count, uint32_t n) {
  __shared__ uint32_t sum[SCAN_THREADS];
  uint32_t before = 0;
  for (uint32_t first = 0; first < n; first += SCAN_THREADS) {
    const uint32_t i = first + threadIdx.x, own = i < n ? count[i] : 0;
    sum[threadIdx.x] = own;
    __syncthreads();
    for (int back = 1; back < SCAN_THREADS; back *= 2) {
      const uint32_t x = threadIdx.x >= back ? sum[threadIdx.x - back] : 0;
      __syncthreads();
      sum[threadIdx.x] += x;
      __syncthreads();
    }
    if (i < n) count[i] = before + sum[threadIdx.x] - own;
    before += sum[SCAN_THREADS - 1];
    __syncthreads();
  }
}

/* Stable: places with the same digit keep their order, within a round by lane, within a warp by round. */
static __global__ void __launch_bounds__(THREADS)
    scatter(const uint32_t *row, const uint32_t *token, uint32_t *row_to, uint32_t *token_to, const uint32_t *count,
            uint32_t T, int shift) {
  __shared__ uint32_t of[WARPS][DIGITS]; /* the next place of each digit, per warp */
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  count_digits(of, row, T, shift);
  for (int d = threadIdx.x; d < DIGITS; d += THREADS) {
    uint32_t next = count[d * gridDim.x + blockIdx.x];
    for (int w = 0; w < WARPS; w++) {
      const uint32_t n = of[w][d];
      of[w][d] = next;
      next += n;
    }
  }
  __syncthreads();
  for (int k = 0; k < ROUNDS; k++) {
    const uint32_t at = first_place(warp) + k * LANES;
    const bool there = at < T;
    const uint32_t r = there ? row[at] : 0, digit = there ? r >> shift & (DIGITS - 1) : DIGITS;
    const uint32_t peers = __match_any_sync(0xffffffffu, digit), ahead = __popc(peers & ((1u << lane) - 1));
    uint32_t to = 0;
    if (there) to = of[warp][digit] + ahead;
    __syncwarp();
    if (there && ahead == 0) of[warp][digit] += __popc(peers);
    __syncwarp();
    if (there) {
      row_to[to] = r;
      token_to[to] = token[at];
    }
  }
}

/* ---- sums ---- */

/* A thread has V columns of a chunk; the sum of a run that continues from the previous chunk goes into
 * carried[chunk]. */
template <typename X, int V>
static __global__ void __launch_bounds__(THREADS)
    add_chunks(const X *dy, const uint32_t *row, const uint32_t *token, float *table, float *carried, uint32_t T,
               uint32_t rows, int64_t C, bool accumulate) {
  __shared__ uint32_t row_of[CHUNK + 1], token_of[CHUNK]; /* row_of[0]: row of the last place of the previous chunk */
  const uint32_t begin = blockIdx.x * CHUNK, n = T - begin < CHUNK ? T - begin : CHUNK;
  const int64_t column = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * V;
  if (threadIdx.x <= n) row_of[threadIdx.x] = begin + threadIdx.x == 0 ? rows : row[begin + threadIdx.x - 1];
  if (threadIdx.x < n) token_of[threadIdx.x] = token[begin + threadIdx.x];
  __syncthreads();
  if (column >= C) return;
  bool came_in = row_of[0] == row_of[1];
  float sum[V];
#pragma unroll
  for (int v = 0; v < V; v++) sum[v] = 0;
  for (uint32_t first = 0; first < n; first += 8) {
    rfi_group<X, V> x[8];
#pragma unroll
    for (uint32_t u = 0; u < 8; u++) {
      const uint32_t k = first + u < n ? first + u : n - 1;
      x[u] = rfi_load<X, V>(dy + token_of[k] * C + column);
    }
#pragma unroll
    for (uint32_t u = 0; u < 8; u++) {
      const uint32_t k = first + u;
      if (k >= n || row_of[k + 1] == rows) break; /* all following ids are out of range too */
      float a[V];
      rfi_widen(x[u], a);
#pragma unroll
      for (int v = 0; v < V; v++) sum[v] += a[v];
      if (k + 1 < n && row_of[k + 2] == row_of[k + 1]) continue;
      float *to = came_in ? carried + blockIdx.x * C + column : table + row_of[k + 1] * C + column;
#pragma unroll
      for (int v = 0; v < V; v++) {
        to[v] = accumulate && !came_in ? to[v] + sum[v] : sum[v];
        sum[v] = 0;
      }
      came_in = false;
    }
  }
}

/* The chunk in which a run begins adds the sums of the later chunks that continue it. */
template <int V>
static __global__ void __launch_bounds__(THREADS)
    add_carried(const uint32_t *row, float *table, const float *carried, uint32_t T, uint32_t rows, int64_t C) {
  const uint32_t begin = blockIdx.x * CHUNK, end = begin + CHUNK;
  const int64_t column = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * V;
  if (column >= C || end >= T) return;
  const uint32_t r = row[end - 1];
  if (r == rows || row[end] != r || (row[begin] == r && begin > 0 && row[begin - 1] == r)) return;
  double sum[V];
  float *to = table + r * C + column;
#pragma unroll
  for (int v = 0; v < V; v++) sum[v] = to[v];
  for (uint32_t at = end; at < T && row[at] == r; at += CHUNK) {
#pragma unroll
    for (int v = 0; v < V; v++) sum[v] += carried[at / CHUNK * C + column + v];
  }
#pragma unroll
  for (int v = 0; v < V; v++) to[v] = (float)sum[v];
}

template <typename X, int V> static void launch_sums(const rfr_call *call, const space &s, int list, bool accumulate) {
  const int64_t T = call->in[0].type.shape[0], C = call->in[0].type.shape[1];
  const uint32_t rows = (uint32_t)call->attr[0].i;
  const dim3 grid((unsigned)rfi_blocks(T, CHUNK), (unsigned)rfi_blocks(C, THREADS * V));
  const int64_t lanes = rfi_blocks(rfi_blocks(C, V), LANES) * LANES; /* at least CHUNK threads, which load the rows */
  const unsigned threads = (unsigned)(lanes < 64 ? 64 : lanes < THREADS ? lanes : THREADS);
  float *table = (float *)call->out[0].data;
  add_chunks<X, V><<<grid, threads, 0, rfi_stream(call)>>>((const X *)call->in[0].data, s.row[list], s.token[list],
                                                           table, s.carried, (uint32_t)T, rows, C, accumulate);
  add_carried<V><<<grid, threads, 0, rfi_stream(call)>>>(s.row[list], table, s.carried, (uint32_t)T, rows, C);
}

template <typename X> static void launch_scatter(const rfr_call *call, const space &s, int list, bool accumulate) {
  const uintptr_t all = (uintptr_t)call->in[0].data | (uintptr_t)call->out[0].data | (uintptr_t)s.carried;
  if (call->in[0].type.shape[1] % 4 == 0 && all % 16 == 0) launch_sums<X, 4>(call, s, list, accumulate);
  else launch_sums<X, 1>(call, s, list, accumulate);
}

static size_t grad_workspace(const rfr_call *call) { return lay_out(call).bytes; }

static rfr_status run_grad(const rfr_call *call) {
  const bool accumulate = call->n_in > 2 && call->in[2].data;
  const rfr_arg *y = &call->out[0];
  const int64_t n = rfi_elements(y);
  const uint32_t T = (uint32_t)call->in[0].type.shape[0], rows = (uint32_t)call->attr[0].i;
  const space s = lay_out(call);
  cudaStream_t stream = rfi_stream(call);
  int list = 0;
  if (n == 0) return RFR_OK;
  if (!accumulate) {
    const rfr_status z = rfi_cuda_check(cudaMemsetAsync(y->data, 0, (size_t)n * 4, stream), "embedding_grad");
    if (z != RFR_OK) return z;
  }
  if (T == 0) return RFR_OK;
  const unsigned tiles = (unsigned)rfi_blocks(T, TILE);
  number<<<rfi_grid(call, T, THREADS), THREADS, 0, stream>>>((const int32_t *)call->in[1].data, s.row[0], s.token[0], T,
                                                             rows);
  for (int shift = 0; shift < 32 && rows >> shift; shift += BITS, list = !list) {
    count_tiles<<<tiles, THREADS, 0, stream>>>(s.row[list], s.count, T, shift);
    scan<<<1, SCAN_THREADS, 0, stream>>>(s.count, tiles * DIGITS);
    scatter<<<tiles, THREADS, 0, stream>>>(s.row[list], s.token[list], s.row[!list], s.token[!list], s.count, T, shift);
  }
  RFI_WITH_FLOAT(call->in[0].type.dtype, X, launch_scatter<X>(call, s, list, accumulate));
  return rfi_cuda_launched("embedding_grad");
}

/* Rows and tokens are counted in 32 bits. */
static int grad_takes(const rfr_call *call) {
  return rfi_takes_floats(call) && call->attr[0].i < INT32_MAX && call->in[0].type.shape[0] < INT32_MAX;
}

extern "C" const rfi_cuda_kernel RFI_CUDA(embedding) = {run_gather, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(embedding_grad) = {run_grad, grad_workspace, grad_takes};
