/* SPDX-License-Identifier: Apache-2.0
 *
 * The matrix product for what cuBLASLt does not take: mixed types, rows that are not 16-byte
 * aligned, operands of any strides, empty sums.
 *
 *   y[z,i,j] = sum_k op(a)[z,i,k] op(b)[z,k,j] + bias[j] + acc[z,i,j]      f32, one rounding
 *
 * A block of 256 threads makes a tile of 64 x 64, each thread 4 x 4 of it; both operands pass
 * through shared memory as f32, 16 of K at a time. The sum runs over K in order, so the bits
 * depend on the product alone.
 */
#include "backend/cuda/any_type.cuh"

enum { TILE = 64, STEP = 16, THREADS = 256, PER_THREAD = 4 };

typedef struct operand {
  const void *data;
  int64_t batch, row, col; /* strides of op(x), elements */
  rfr_dtype dtype;
} operand;

typedef struct problem {
  operand a, b;
  const void *bias; /* NULL: none */
  void *y;
  rfr_dtype bias_type, y_type;
  int64_t M, N, K;
  int64_t y_batch, y_row;
  int accumulate;
} problem;

/* A STEP x TILE panel of an operand; `along` is the dimension of 64, the other one is K. Neighbouring threads
 * take neighbouring elements in memory, whichever dimension is dense. */
static __device__ void fill(float (*panel)[TILE + 1], const operand &x, int64_t z, int64_t first, int64_t n, int64_t k0,
                            int64_t K, int64_t along, int64_t across) {
  const bool by_k = across == 1;
  for (int e = threadIdx.x; e < TILE * STEP; e += THREADS) {
    const int i = by_k ? e / STEP : e % TILE, k = by_k ? e % STEP : e / TILE;
    const bool inside = first + i < n && k0 + k < K;
    panel[k][i] = inside ? rfi_load(x.data, x.dtype, z * x.batch + (first + i) * along + (k0 + k) * across) : 0.0f;
  }
}

static __global__ void __launch_bounds__(THREADS) matmul_any(const problem p, int64_t tiles_m) {
  __shared__ float a[STEP][TILE + 1], b[STEP][TILE + 1];
  const int64_t i0 = (int64_t)(blockIdx.x % tiles_m) * TILE, j0 = (int64_t)(blockIdx.x / tiles_m) * TILE,
                z = blockIdx.y;
  const int ti = (int)threadIdx.x / 16 * PER_THREAD, tj = (int)threadIdx.x % 16 * PER_THREAD;
  float sum[PER_THREAD][PER_THREAD] = {};
  for (int64_t k0 = 0; k0 < p.K; k0 += STEP) {
    fill(a, p.a, z, i0, p.M, k0, p.K, p.a.row, p.a.col);
    fill(b, p.b, z, j0, p.N, k0, p.K, p.b.col, p.b.row);
    __syncthreads();
    for (int k = 0; k < STEP; k++)
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) sum[i][j] = fmaf(a[k][ti + i], b[k][tj + j], sum[i][j]);
    __syncthreads();
  }
  for (int i = 0; i < PER_THREAD; i++)
    for (int j = 0; j < PER_THREAD; j++) {
      const int64_t row = i0 + ti + i, col = j0 + tj + j;
      if (row >= p.M || col >= p.N) continue;
      const int64_t at = z * p.y_batch + row * p.y_row + col;
      float y = sum[i][j];
      if (p.bias) y += rfi_load(p.bias, p.bias_type, col);
      if (p.accumulate) y += rfi_load(p.y, p.y_type, at);
      rfi_store(p.y, p.y_type, at, y);
    }
}

static operand operand_of(const rfr_arg *x, bool transposed) {
  const int r = x->type.rank;
  return operand{x->data, r == 3 ? x->stride[0] : 0, x->stride[transposed ? r - 1 : r - 2],
                 x->stride[transposed ? r - 2 : r - 1], x->type.dtype};
}

static rfr_status run(const rfr_call *call) {
  const rfr_arg *a = &call->in[0], *y = &call->out[0];
  const rfr_arg *bias = call->n_in > 2 && call->in[2].data ? &call->in[2] : NULL;
  const int r = y->type.rank;
  const bool ta = call->attr[0].i != 0, tb = call->attr[1].i != 0;
  const int64_t batch = r == 3 ? y->type.shape[0] : 1;
  problem p = {operand_of(a, ta),
               operand_of(&call->in[1], tb),
               bias ? bias->data : NULL,
               y->data,
               bias ? bias->type.dtype : RFR_F32,
               y->type.dtype,
               y->type.shape[r - 2],
               y->type.shape[r - 1],
               a->type.shape[ta ? r - 2 : r - 1],
               r == 3 ? y->stride[0] : 0,
               y->stride[r - 2],
               call->n_in > 3 && call->in[3].data};
  if (batch == 0 || p.M == 0 || p.N == 0) return RFR_OK;
  const int64_t tiles_m = rfi_blocks(p.M, TILE), tiles_n = rfi_blocks(p.N, TILE);
  for (int64_t z = 0; z < batch; z += 65535) { /* what the grid's second dimension holds */
    const int64_t part = batch - z < 65535 ? batch - z : 65535;
    problem q = p;
    const int64_t size = p.y_type == RFR_F32 ? 4 : 2;
    q.a.data = (const char *)p.a.data + z * p.a.batch * (p.a.dtype == RFR_F32 ? 4 : 2);
    q.b.data = (const char *)p.b.data + z * p.b.batch * (p.b.dtype == RFR_F32 ? 4 : 2);
    q.y = (char *)p.y + z * p.y_batch * size;
    matmul_any<<<dim3((unsigned)(tiles_m * tiles_n), (unsigned)part), THREADS, 0, rfi_stream(call)>>>(q, tiles_m);
  }
  return rfi_cuda_launched("matmul_any");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(matmul) = {run, NULL};
