/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMM for the calls that cuBLASLt does not support: mixed types, rows that are not 16-byte aligned, operands of any
 * strides, empty sums.
 *
 *   y[z,i,j] = sum_k op(a)[z,i,k] op(b)[z,k,j] + bias[j] + acc[z,i,j]      f32, one rounding
 *
 * It uses the tiles of tile_any.cuh.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/matmul/tile_any.cuh"

typedef struct operand {
  const void *data;
  int64_t batch, row, col; /* strides of op(x) in elements */
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

static __global__ void __launch_bounds__(RFI_TILE_THREADS) matmul_any(const problem p, int64_t tiles_m) {
  const int64_t i0 = (int64_t)(blockIdx.x % tiles_m) * RFI_TILE, j0 = (int64_t)(blockIdx.x / tiles_m) * RFI_TILE,
                z = blockIdx.y;
  rfi_tile(
      i0, p.M, j0, p.N, p.K,
      [&](int64_t i, int64_t k) { return rfi_load(p.a.data, p.a.dtype, z * p.a.batch + i * p.a.row + k * p.a.col); },
      p.a.col == 1,
      [&](int64_t j, int64_t k) { return rfi_load(p.b.data, p.b.dtype, z * p.b.batch + j * p.b.col + k * p.b.row); },
      p.b.row == 1,
      [&](int64_t i, int64_t j, float y) {
        const int64_t at = z * p.y_batch + i * p.y_row + j;
        if (p.bias) y += rfi_load(p.bias, p.bias_type, j);
        if (p.accumulate) y += rfi_load(p.y, p.y_type, at);
        rfi_store(p.y, p.y_type, at, y);
      });
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
  const int64_t tiles_m = rfi_blocks(p.M, RFI_TILE), tiles_n = rfi_blocks(p.N, RFI_TILE);
  for (int64_t z = 0; z < batch; z += 65535) { /* the limit of the grid's second dimension */
    const int64_t part = batch - z < 65535 ? batch - z : 65535;
    problem q = p;
    const int64_t size = p.y_type == RFR_F32 ? 4 : 2;
    q.a.data = (const char *)p.a.data + z * p.a.batch * (p.a.dtype == RFR_F32 ? 4 : 2);
    q.b.data = (const char *)p.b.data + z * p.b.batch * (p.b.dtype == RFR_F32 ? 4 : 2);
    q.y = (char *)p.y + z * p.y_batch * size;
    matmul_any<<<dim3((unsigned)(tiles_m * tiles_n), (unsigned)part), RFI_TILE_THREADS, 0, rfi_stream(call)>>>(q,
                                                                                                               tiles_m);
  }
  return rfi_cuda_launched("matmul_any");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(matmul) = {run, NULL};
