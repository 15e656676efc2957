/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention in f32 arithmetic for every type, head size and stride that the tensor-core kernels do not support. With s
 * the score of a row t and a key, capped if the call has a cap,
 *
 *   o = sum p v,  p = e^(s - lse),  lse = log sum e^s
 *   dv = sum p do,  ds = p (do v - delta) s',  delta = do o,  dq = sum ds k,  dk = sum ds q
 *
 * A block owns 16 rows (of q for o and dq, of k for dk and dv) of one head, 8 threads per row, and loops over tiles of
 * 16 rows of the other side. So every sum has one order and nothing is added atomically. The backward computes p once
 * for dq and once for dk and dv.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_limits.h"
#include "ops/attention/documents.cuh"

enum { ROWS = 16, LANES = 8, THREADS = ROWS * LANES, MOST_D = RFI_ATTENTION_MOST_D, PER_LANE = MOST_D / LANES };

typedef struct matrix { /* (T, heads, D) */
  const void *data;
  int64_t row, head, col;
  rfr_dtype dtype;
} matrix;

typedef struct problem {
  matrix q, k, v, o, dy;
  rfi_documents documents;
  float *lse, *delta;        /* (H, T) */
  int64_t lse_head, lse_row; /* strides */
  int T, H, Hk, D;
  float scale, cap;
  void *out[3]; /* o; dq, dk, dv in q's type, heads adjacent; NULL: not computed */
  int64_t row[3];
} problem;

static __device__ float load(const matrix &x, int64_t t, int64_t h, int64_t d) {
  return rfi_load(x.data, x.dtype, t * x.row + h * x.head + d * x.col);
}

/* Loads rows t0 ... t0 + 15 of a head into shared memory, zeros past T. */
static __device__ void fill(float *tile, const problem &p, const matrix &x, int t0, int h) {
  for (int e = (int)threadIdx.x; e < ROWS * p.D; e += THREADS) {
    const int r = e / p.D, d = e % p.D;
    tile[r * (p.D + 1) + d] = t0 + r < p.T ? load(x, t0 + r, h, d) : 0.0f;
  }
}

static __device__ float dot(const float *a, const float *b, int D) {
  float sum = 0;
  for (int d = 0; d < D; d++) sum = fmaf(a[d], b[d], sum);
  return sum;
}

/* The score from a dot product; *slope is its derivative with respect to the dot product. */
static __device__ float score(const problem &p, float product, float *slope) {
  const float s = p.scale * product;
  *slope = p.scale;
  if (p.cap == 0) return s;
  const float bent = tanhf(s / p.cap);
  *slope *= 1 - bent * bent;
  return p.cap * bent;
}

/* Sum over the 8 threads of a row; each of them gets it. */
static __device__ float row_sum(float x) {
  for (int step = 4; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
static __device__ float row_max(float x) {
  for (int step = 4; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

/* The union of the spans of the block's rows, the same for all threads. */
static __device__ rfi_span union_of(rfi_span mine) {
  __shared__ int first, end;
  if (threadIdx.x == 0) {
    first = INT32_MAX;
    end = 0;
  }
  __syncthreads();
  if (mine.end > mine.first) {
    atomicMin(&first, mine.first); /* integer minimum, so the order does not matter */
    atomicMax(&end, mine.end);
  }
  __syncthreads();
  return rfi_span{first, end};
}

static __global__ void __launch_bounds__(THREADS) attention_forward(const problem p) {
  extern __shared__ float shared[];
  float *q = shared, *k = q + ROWS * (p.D + 1), *v = k + ROWS * (p.D + 1);
  const int row = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES, group = (int)threadIdx.x & 24;
  const int t0 = (int)blockIdx.x * ROWS, t = t0 + row, h = (int)blockIdx.y, g = h / (p.H / p.Hk);
  const rfi_span mine = rfi_keys_of(p.documents, t), all = union_of(mine);
  float acc[PER_LANE] = {}, top = -INFINITY, sum = 0, slope;
  fill(q, p, p.q, t0, h);
  for (int s0 = all.first; s0 < all.end; s0 += ROWS) {
    __syncthreads();
    fill(k, p, p.k, s0, g);
    fill(v, p, p.v, s0, g);
    __syncthreads();
    float e[2];
    for (int i = 0; i < 2; i++) {
      const int j = lane + i * LANES, s = s0 + j;
      e[i] = s >= mine.first && s < mine.end ? score(p, dot(q + row * (p.D + 1), k + j * (p.D + 1), p.D), &slope)
                                             : -INFINITY;
    }
    const float next = fmaxf(top, row_max(fmaxf(e[0], e[1])));
    const float shrink = top == -INFINITY ? 0.0f : expf(top - next);
    for (int i = 0; i < 2; i++) e[i] = e[i] == -INFINITY ? 0.0f : expf(e[i] - next);
    sum = sum * shrink + row_sum(e[0] + e[1]);
    top = next;
#pragma unroll
    for (int c = 0; c < PER_LANE; c++) acc[c] *= shrink;
    for (int j = 0; j < ROWS; j++) {
      const float pj = __shfl_sync(0xffffffffu, e[j / LANES], group | (j % LANES));
      if (pj == 0) continue; /* skip the value of a key that the row does not attend to, because 0 x NaN is NaN */
#pragma unroll
      for (int c = 0; c < PER_LANE; c++)
        if (lane + c * LANES < p.D) acc[c] = fmaf(pj, v[j * (p.D + 1) + lane + c * LANES], acc[c]);
    }
  }
  if (t >= p.T) return;
  /* A row without keys has sum 0. A row with a NaN or infinite score has sum NaN, which differs from 0. */
  if (p.lse && lane == 0) p.lse[h * p.lse_head + t * p.lse_row] = sum == 0 ? -INFINITY : top + logf(sum);
  if (!p.out[0]) return;
#pragma unroll
  for (int c = 0; c < PER_LANE; c++) {
    const int d = lane + c * LANES;
    if (d < p.D) rfi_store(p.out[0], p.q.dtype, t * p.row[0] + h * p.D + d, sum == 0 ? 0.0f : acc[c] / sum);
  }
}

/* delta[h,t] = do o, one warp per row. */
static __global__ void __launch_bounds__(128) attention_delta(const problem p) {
  const int64_t i = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (i >= (int64_t)p.T * p.H) return;
  const int64_t t = i / p.H, h = i % p.H;
  float sum = 0;
  for (int d = lane; d < p.D; d += 32) sum = fmaf(load(p.dy, t, h, d), load(p.o, t, h, d), sum);
  sum = rfi_warp_sum(sum);
  if (lane == 0) p.delta[h * p.T + t] = sum;
}

static __global__ void __launch_bounds__(THREADS) attention_dq(const problem p) {
  extern __shared__ float shared[];
  const int W = p.D + 1;
  float *q = shared, *dy = q + ROWS * W, *k = dy + ROWS * W, *v = k + ROWS * W;
  const int row = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES, group = (int)threadIdx.x & 24;
  const int t0 = (int)blockIdx.x * ROWS, t = t0 + row, h = (int)blockIdx.y, g = h / (p.H / p.Hk);
  const rfi_span mine = rfi_keys_of(p.documents, t), all = union_of(mine);
  const float lse = t < p.T ? p.lse[h * p.lse_head + t * p.lse_row] : 0,
              delta = t < p.T ? p.delta[(int64_t)h * p.T + t] : 0;
  float acc[PER_LANE] = {};
  fill(q, p, p.q, t0, h);
  fill(dy, p, p.dy, t0, h);
  for (int s0 = all.first; s0 < all.end; s0 += ROWS) {
    __syncthreads();
    fill(k, p, p.k, s0, g);
    fill(v, p, p.v, s0, g);
    __syncthreads();
    float ds[2] = {0, 0};
    bool seen[2];
    for (int i = 0; i < 2; i++) {
      const int j = lane + i * LANES, s = s0 + j;
      float slope;
      seen[i] = s >= mine.first && s < mine.end;
      if (!seen[i]) continue;
      const float x = score(p, dot(q + row * W, k + j * W, p.D), &slope);
      ds[i] = slope * expf(x - lse) * (dot(dy + row * W, v + j * W, p.D) - delta);
    }
    for (int j = 0; j < ROWS; j++) {
      const float d = __shfl_sync(0xffffffffu, ds[j / LANES], group | (j % LANES));
      const int see = __shfl_sync(0xffffffffu, (int)seen[j / LANES], group | (j % LANES));
      if (!see) continue;
#pragma unroll
      for (int c = 0; c < PER_LANE; c++)
        if (lane + c * LANES < p.D) acc[c] = fmaf(d, k[j * W + lane + c * LANES], acc[c]);
    }
  }
  if (t >= p.T) return;
#pragma unroll
  for (int c = 0; c < PER_LANE; c++)
    if (lane + c * LANES < p.D) rfi_store(p.out[0], p.q.dtype, t * p.row[0] + h * p.D + lane + c * LANES, acc[c]);
}

static __global__ void __launch_bounds__(THREADS) attention_dkv(const problem p) {
  extern __shared__ float shared[];
  __shared__ rfi_span span[ROWS];
  __shared__ float lse[ROWS], delta[ROWS];
  const int W = p.D + 1;
  float *k = shared, *v = k + ROWS * W, *q = v + ROWS * W, *dy = q + ROWS * W;
  const int row = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES, group = (int)threadIdx.x & 24;
  const int s0 = (int)blockIdx.x * ROWS, s = s0 + row, g = (int)blockIdx.y, heads = p.H / p.Hk;
  const rfi_span all = union_of(rfi_rows_of(p.documents, s));
  float dk[PER_LANE] = {}, dv[PER_LANE] = {};
  fill(k, p, p.k, s0, g);
  fill(v, p, p.v, s0, g);
  for (int h = g * heads; h < (g + 1) * heads; h++)
    for (int t0 = all.first; t0 < all.end; t0 += ROWS) {
      __syncthreads();
      fill(q, p, p.q, t0, h);
      fill(dy, p, p.dy, t0, h);
      if (threadIdx.x < ROWS) {
        const int t = t0 + (int)threadIdx.x;
        span[threadIdx.x] = t < p.T ? rfi_keys_of(p.documents, t) : rfi_span{0, 0};
        lse[threadIdx.x] = t < p.T ? p.lse[h * p.lse_head + t * p.lse_row] : 0;
        delta[threadIdx.x] = t < p.T ? p.delta[(int64_t)h * p.T + t] : 0;
      }
      __syncthreads();
      float e[2] = {0, 0}, ds[2] = {0, 0};
      bool seen[2];
      for (int i = 0; i < 2; i++) {
        const int j = lane + i * LANES;
        float slope;
        seen[i] = s >= span[j].first && s < span[j].end;
        if (!seen[i]) continue;
        e[i] = expf(score(p, dot(q + j * W, k + row * W, p.D), &slope) - lse[j]);
        ds[i] = slope * e[i] * (dot(dy + j * W, v + row * W, p.D) - delta[j]);
      }
      for (int j = 0; j < ROWS; j++) {
        const float pj = __shfl_sync(0xffffffffu, e[j / LANES], group | (j % LANES));
        const float dj = __shfl_sync(0xffffffffu, ds[j / LANES], group | (j % LANES));
        const int see = __shfl_sync(0xffffffffu, (int)seen[j / LANES], group | (j % LANES));
        if (!see) continue;
#pragma unroll
        for (int c = 0; c < PER_LANE; c++) {
          if (lane + c * LANES >= p.D) continue;
          dk[c] = fmaf(dj, q[j * W + lane + c * LANES], dk[c]);
          dv[c] = fmaf(pj, dy[j * W + lane + c * LANES], dv[c]);
        }
      }
    }
  if (s >= p.T) return;
#pragma unroll
  for (int c = 0; c < PER_LANE; c++) {
    const int d = lane + c * LANES;
    if (d >= p.D) continue;
    if (p.out[1]) rfi_store(p.out[1], p.q.dtype, s * p.row[1] + g * p.D + d, dk[c]);
    if (p.out[2]) rfi_store(p.out[2], p.q.dtype, s * p.row[2] + g * p.D + d, dv[c]);
  }
}

/* ---- launching ---- */

static matrix matrix_of(const rfr_arg *x) {
  return matrix{x->data, x->stride[0], x->stride[1], x->stride[2], x->type.dtype};
}

/* The fields that forward and backward share. `first` is q's operand, `offsets` the operand of document offsets. The
 * workspace begins with the ends of the documents. */
static problem problem_of(const rfr_call *call, int first, int offsets) {
  const rfr_arg *q = &call->in[first];
  problem p = {};
  p.q = matrix_of(q);
  p.k = matrix_of(q + 1);
  p.v = matrix_of(q + 2);
  p.T = (int)q->type.shape[0];
  p.H = (int)q->type.shape[1];
  p.Hk = (int)q[1].type.shape[1];
  p.D = (int)q->type.shape[2];
  p.scale = (float)call->attr[0].f;
  p.cap = (float)call->attr[3].f;
  p.documents = rfi_documents{(const int32_t *)call->in[offsets].data,
                              (const int32_t *)call->workspace,
                              call->in[offsets].stride[0],
                              (int)call->in[offsets].type.shape[0] - 1,
                              p.T,
                              (int)call->attr[1].i,
                              (int)call->attr[2].i};
  return p;
}

static size_t ends_bytes(const rfr_call *call, int offsets) {
  return ((size_t)call->in[offsets].type.shape[0] * sizeof(int32_t) + 255) / 256 * 256;
}

static void find_ends(const rfr_call *call, const problem *p) {
  rfi_document_ends<<<1, 1024, 0, rfi_stream(call)>>>(p->documents.offsets, p->documents.stride, p->documents.n, p->T,
                                                      (int32_t *)call->workspace);
}

static size_t tiles(const problem *p, int n) { return (size_t)n * ROWS * (size_t)(p->D + 1) * sizeof(float); }

static rfr_status allow(const void *kernel, size_t bytes) {
  return bytes <= 48 << 10
             ? RFR_OK
             : rfi_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                              "raising the shared memory limit");
}

static rfr_status forward(const rfr_call *call) {
  problem p = problem_of(call, 0, 3);
  p.out[0] = call->out[0].data;
  p.row[0] = call->out[0].stride[0];
  p.lse = (float *)call->out[1].data;
  p.lse_head = p.T;
  p.lse_row = 1;
  if (p.T == 0 || p.H == 0) return RFR_OK;
  const rfr_status s = allow((const void *)attention_forward, tiles(&p, 3));
  if (s != RFR_OK) return s;
  find_ends(call, &p);
  attention_forward<<<dim3((unsigned)rfi_blocks(p.T, ROWS), (unsigned)p.H), THREADS, tiles(&p, 3), rfi_stream(call)>>>(
      p);
  return rfi_cuda_launched("attention");
}

static rfr_status backward(const rfr_call *call) {
  problem p = problem_of(call, 1, 6);
  p.dy = matrix_of(&call->in[0]);
  p.o = matrix_of(&call->in[4]);
  p.lse = (float *)call->in[5].data;
  p.lse_head = call->in[5].stride[0];
  p.lse_row = call->in[5].stride[1];
  p.delta = (float *)((char *)call->workspace + ends_bytes(call, 6));
  for (int i = 0; i < 3; i++) {
    p.out[i] = call->out[i].data;
    p.row[i] = call->out[i].stride[0];
  }
  if (p.T == 0 || p.H == 0) return RFR_OK;
  const size_t bytes = tiles(&p, 4);
  rfr_status s = allow((const void *)attention_dq, bytes);
  if (s == RFR_OK) s = allow((const void *)attention_dkv, bytes);
  if (s != RFR_OK) return s;
  const unsigned blocks = (unsigned)rfi_blocks(p.T, ROWS);
  find_ends(call, &p);
  attention_delta<<<(unsigned)rfi_blocks((int64_t)p.T * p.H, 4), 128, 0, rfi_stream(call)>>>(p);
  if (p.out[0]) attention_dq<<<dim3(blocks, (unsigned)p.H), THREADS, bytes, rfi_stream(call)>>>(p);
  if (p.out[1] || p.out[2]) attention_dkv<<<dim3(blocks, (unsigned)p.Hk), THREADS, bytes, rfi_stream(call)>>>(p);
  return rfi_cuda_launched("attention_bwd");
}

static size_t forward_workspace(const rfr_call *call) { return ends_bytes(call, 3); }

static size_t backward_workspace(const rfr_call *call) {
  return ends_bytes(call, 6) + (size_t)(call->in[1].type.shape[0] * call->in[1].type.shape[1]) * sizeof(float);
}

static int takes_of(const rfr_arg *q) {
  return q->type.shape[2] <= MOST_D && q->type.shape[1] <= RFI_ATTENTION_MOST_HEADS;
}
static int takes(const rfr_call *call) { return takes_of(&call->in[0]); }
static int takes_bwd(const rfr_call *call) { return takes_of(&call->in[1]); }

extern "C" const rfi_cuda_kernel rfi_attention_any = {forward, forward_workspace, takes};
extern "C" const rfi_cuda_kernel rfi_attention_any_bwd = {backward, backward_workspace, takes_bwd};
