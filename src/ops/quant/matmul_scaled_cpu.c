/* SPDX-License-Identifier: Apache-2.0
 *
 * The scaled GEMM on the CPU: y = (a bT) scale_a scale_b + bias (+ acc), the reference of what tensor cores do with
 * FP8.
 *
 * An E4M3 number is exact in f32, and so is the product of two; only the sum rounds. Tiles of fixed size are decoded
 * into scratch, block of K by block of K, and multiplied by the register tile of the other GEMMs. One thread computes a
 * tile completely, so the bits do not depend on the number of threads. The scales are applied after the sum, one by
 * one: their product alone might underflow.
 */
#include "backend/cpu/cpu.h"
#include "ops/matmul/tile.h"

enum {
  BLOCK_K = 256,
  TILE_M = 96, /* a multiple of every RFI_MR */
  TILE_N = 128,
  A_FLOATS = TILE_M * BLOCK_K,
  B_FLOATS = TILE_N * BLOCK_K,
  SCRATCH = A_FLOATS + B_FLOATS + TILE_M * TILE_N,
  MIN_TILE_WORK = 1 << 18, /* with fewer multiply-adds, another thread does not pay */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int threads_of(const rfi_call *c) {
  const rfr_type *a = &c->in[0].type, *y = &c->out[0].type;
  int64_t most = rfi_count(y) * a->shape[1] / MIN_TILE_WORK;
  return c->threads < 1 || most < 2 ? 1 : (int)least(c->threads, most);
}

static size_t workspace(const rfi_call *c) { return (size_t)threads_of(c) * SCRATCH * sizeof(float); }

static void decode(float *restrict to, const uint8_t *restrict from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = rfi_e4m3_to_f32(from[i]);
}

/* Decodes rows of b as columns of a panel of RFI_NR; columns from n on are zero. */
static void decode_panel(float *panel, const uint8_t *b, int64_t K, int64_t k, int64_t n) {
  float row[BLOCK_K];
  for (int64_t j = 0; j < RFI_NR; j++) {
    if (j < n) decode(row, b + j * K, k);
    else memset(row, 0, sizeof row);
    for (int64_t i = 0; i < k; i++) panel[i * RFI_NR + j] = row[i];
  }
}

static void product(const uint8_t *a, const uint8_t *b, int64_t K, int64_t m, int64_t n, float *scratch) {
  float *ap = scratch, *bp = ap + A_FLOATS, *c = bp + B_FLOATS;
  if (K == 0) memset(c, 0, sizeof *c * TILE_M * TILE_N);
  for (int64_t k0 = 0; k0 < K; k0 += BLOCK_K) {
    int64_t k = least(K - k0, BLOCK_K);
    for (int64_t j = 0; j < n; j += RFI_NR) decode_panel(bp + j * k, b + j * K + k0, K, k, least(n - j, RFI_NR));
    for (int64_t i = 0; i < m; i++) decode(ap + i * k, a + i * K + k0, k);
    for (int64_t j = 0; j < n; j += RFI_NR)
      for (int64_t i = 0; i < m; i += RFI_MR)
        rfi_tile_n((int)least(m - i, RFI_MR), k, ap + i * k, k, bp + j * k, RFI_NR, c + i * TILE_N + j, TILE_N, k0 > 0);
  }
}

/* y rows = C scale_a scale_b + bias + acc, rounded once. */
static void finish(const rfi_call *call, int64_t y0, int64_t j0, int64_t m, int64_t n, float *c) {
  const rfi_arg *bias = &call->in[4], *acc = &call->in[5], *y = &call->out[0];
  float scale_a = *(const float *)call->in[2].data, scale_b = *(const float *)call->in[3].data;
  rfr_dtype to = y->type.dtype;
  for (int64_t i = 0; i < m; i++) {
    float *row = c + i * TILE_N;
    int64_t at = y0 + i * y->type.shape[1];
    for (int64_t j = 0; j < n; j++) row[j] = row[j] * scale_a * scale_b;
    if (bias->data)
      for (int64_t j = 0; j < n; j++) row[j] += rfi_get(bias->data, bias->type.dtype, j0 + j);
    if (acc->data)
      for (int64_t j = 0; j < n; j++) row[j] += rfi_get(y->data, to, at + j);
    rfi_narrow((void *)rfi_at(y->data, to, at), to, row, n);
  }
}

static rfr_status run(const rfi_call *call) {
  const rfi_arg *a = &call->in[0], *b = &call->in[1];
  int64_t M = a->type.shape[0], K = a->type.shape[1], N = b->type.shape[0];
  int64_t across = (N + TILE_N - 1) / TILE_N, tiles = (M + TILE_M - 1) / TILE_M * across;
  int threads = threads_of(call);
  (void)threads; /* unused without OpenMP */
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t tile = 0; tile < tiles; tile++) {
    float *scratch = (float *)call->workspace + SCRATCH * (int64_t)rfi_thread();
    int64_t i0 = tile / across * TILE_M, j0 = tile % across * TILE_N;
    int64_t m = least(M - i0, TILE_M), n = least(N - j0, TILE_N);
    product((const uint8_t *)a->data + i0 * K, (const uint8_t *)b->data + j0 * K, K, m, n, scratch);
    finish(call, i0 * N + j0, j0, m, n, scratch + A_FLOATS + B_FLOATS);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(matmul_scaled) = {run, workspace};
