/* SPDX-License-Identifier: Apache-2.0
 *
 * The scaled product on a GPU, for any shape: y = (a bT) scale_a scale_b + bias (+ acc), one rounding.
 *
 * A block of 256 threads makes a tile of 64 x 64, each thread 4 x 4 of it. An E4M3 number is exact in
 * f32 and so is the product of two; the sum runs over K in order, in f32. The scales come after it, one
 * by one: their product alone might underflow.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/quant/e4m3.cuh"

enum { TILE = 64, STEP = 16, THREADS = 256, PER_THREAD = 4 };

typedef struct problem {
  const uint8_t *a, *b; /* (M,K), (N,K) */
  const float *scale_a, *scale_b;
  const void *bias; /* NULL: none */
  void *y;
  rfr_dtype bias_type, y_type;
  int64_t M, N, K;
  int accumulate;
} problem;

static __device__ void fill(float (*panel)[TILE + 1], const uint8_t *x, int64_t first, int64_t n, int64_t k0,
                            int64_t K) {
  for (int e = threadIdx.x; e < TILE * STEP; e += THREADS) {
    const int i = e / STEP, k = e % STEP;
    panel[k][i] = first + i < n && k0 + k < K ? rfi_e4m3_widen(x[(first + i) * K + k0 + k]) : 0.0f;
  }
}

static __global__ void __launch_bounds__(THREADS) matmul_scaled(const problem p, int64_t tiles_m) {
  __shared__ float a[STEP][TILE + 1], b[STEP][TILE + 1];
  const int64_t i0 = (int64_t)(blockIdx.x % tiles_m) * TILE, j0 = (int64_t)(blockIdx.x / tiles_m) * TILE;
  const int ti = (int)threadIdx.x / 16 * PER_THREAD, tj = (int)threadIdx.x % 16 * PER_THREAD;
  const float scale_a = *p.scale_a, scale_b = *p.scale_b;
  float sum[PER_THREAD][PER_THREAD] = {};
  for (int64_t k0 = 0; k0 < p.K; k0 += STEP) {
    fill(a, p.a, i0, p.M, k0, p.K);
    fill(b, p.b, j0, p.N, k0, p.K);
    __syncthreads();
    for (int k = 0; k < STEP; k++)
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) sum[i][j] = fmaf(a[k][ti + i], b[k][tj + j], sum[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      const int64_t row = i0 + ti + i, col = j0 + tj + j, at = row * p.N + col;
      if (row >= p.M || col >= p.N) continue;
      float y = sum[i][j] * scale_a * scale_b;
      if (p.bias) y += rfi_load(p.bias, p.bias_type, col);
      if (p.accumulate) y += rfi_load(p.y, p.y_type, at);
      rfi_store(p.y, p.y_type, at, y);
    }
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
  const int64_t tiles_m = rfi_blocks(p.M, TILE), tiles_n = rfi_blocks(p.N, TILE);
  if (tiles_m > 0 && tiles_n > 0)
    matmul_scaled<<<(unsigned)(tiles_m * tiles_n), THREADS, 0, rfi_stream(c)>>>(p, tiles_m);
  return rfi_cuda_launched("matmul_scaled");
}

extern "C" const rfi_cuda_kernel RFI_CUDA(matmul_scaled) = {run, NULL};
