/* SPDX-License-Identifier: Apache-2.0
 *
 * The scaled GEMM on a GPU, for any shape: y = (a bT) scale_a scale_b + bias (+ acc), one rounding.
 *
 * It uses the tiles of tile_any.cuh. An E4M3 number is exact in f32 and so is the product of two. The scales are
 * applied after the sum, one by one: their product alone might underflow.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/matmul/tile_any.cuh"
#include "ops/quant/e4m3.cuh"

typedef struct problem {
  const uint8_t *a, *b; /* (M,K), (N,K) */
  const float *scale_a, *scale_b;
  const void *bias; /* NULL: none */
  void *y;
  rfr_dtype bias_type, y_type;
  int64_t M, N, K;
  int accumulate;
} problem;

static __global__ void __launch_bounds__(RFI_TILE_THREADS) matmul_scaled(const problem p, int64_t tiles_m) {
  const int64_t i0 = (int64_t)(blockIdx.x % tiles_m) * RFI_TILE, j0 = (int64_t)(blockIdx.x / tiles_m) * RFI_TILE;
  const float scale_a = *p.scale_a, scale_b = *p.scale_b;
  rfi_tile(
      i0, p.M, j0, p.N, p.K, [&](int64_t i, int64_t k) { return rfi_e4m3_widen(p.a[i * p.K + k]); }, true,
      [&](int64_t j, int64_t k) { return rfi_e4m3_widen(p.b[j * p.K + k]); }, true,
      [&](int64_t i, int64_t j, float sum) {
        const int64_t at = i * p.N + j;
        float y = sum * scale_a * scale_b;
        if (p.bias) y += rfi_load(p.bias, p.bias_type, j);
        if (p.accumulate) y += rfi_load(p.y, p.y_type, at);
        rfi_store(p.y, p.y_type, at, y);
      });
}

static rfr_status run(const rfr_call *c) {
  const rfr_arg *a = &c->in[0], *b = &c->in[1], *y = &c->out[0];
  const rfr_arg *bias = c->n_in > 4 && c->in[4].data ? &c->in[4] : NULL;
  const problem p = {(const uint8_t *)a->data,
                     (const uint8_t *)b->data,
                     (const float *)c->in[2].data,
                     (const float *)c->in[3].data,
                     bias ? bias->data : NULL,
                     y->data,
                     bias ? bias->type.dtype : RFR_F32,
                     y->type.dtype,
                     a->type.shape[0],
                     b->type.shape[0],
                     a->type.shape[1],
                     c->n_in > 5 && c->in[5].data};
  const int64_t tiles_m = rfi_blocks(p.M, RFI_TILE), tiles_n = rfi_blocks(p.N, RFI_TILE);
  if (tiles_m > 0 && tiles_n > 0)
    matmul_scaled<<<(unsigned)(tiles_m * tiles_n), RFI_TILE_THREADS, 0, rfi_stream(c)>>>(p, tiles_m);
  return rfi_cuda_launched("matmul_scaled");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(matmul_scaled) = {run, NULL};
