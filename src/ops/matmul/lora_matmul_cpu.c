/* SPDX-License-Identifier: Apache-2.0
 *
 * The portable lora_matmul: both GEMMs of a tile in f32, added, then rounded once. Programs for the CPU do not have
 * this op: lower replaces it by two GEMMs, for which there are faster kernels.
 */
#include "backend/cpu/cpu.h"
#include "ops/matmul/gemm_block.h"

enum { TILE_M = 16 * RFI_MR, TILE_N = 128 };

typedef struct grid {
  int64_t M, N, K, R, tiles_m, tiles_n;
  int threads;
  rfi_scratch scratch; /* of one GEMM; a thread has an f32 tile after it */
  size_t floats;       /* of a thread */
} grid;

static grid grid_make(const rfi_call *c) {
  grid g = {c->out[0].type.shape[0], c->out[0].type.shape[1], c->in[0].type.shape[1], c->in[2].type.shape[1]};
  const int64_t a = rfi_block_k(g.K), b = rfi_block_k(g.R);
  g.tiles_m = rfi_ceil_div(g.M, TILE_M), g.tiles_n = rfi_ceil_div(g.N, TILE_N);
  const int64_t tiles = g.tiles_m * g.tiles_n;
  g.threads = c->threads < 1 || tiles < 2 ? 1 : c->threads < tiles ? c->threads : (int)tiles;
  g.scratch = rfi_scratch_make(TILE_M, TILE_N, a > b ? a : b);
  g.floats = rfi_scratch_floats(&g.scratch) + TILE_M * TILE_N;
  return g;
}

static size_t workspace(const rfi_call *c) {
  const grid g = grid_make(c);
  return (size_t)g.threads * g.floats * sizeof(float);
}

/* op(x) with rows from i and columns from j on. */
static rfi_matrix matrix_of(const rfi_arg *x, int transposed, int64_t i, int64_t j) {
  const int64_t rs = x->stride[transposed ? 1 : 0], cs = x->stride[transposed ? 0 : 1];
  return (rfi_matrix){rfi_at(x->data, x->type.dtype, i * rs + j * cs), x->type.dtype, rs, cs};
}

static void multiply(const rfi_call *c, const grid *g, int64_t i0, int64_t j0, float *scratch) {
  const int tb = (int)c->attr[0].i;
  const int64_t m = g->M - i0 < TILE_M ? g->M - i0 : TILE_M, n = g->N - j0 < TILE_N ? g->N - j0 : TILE_N;
  const rfi_arg *bias = &c->in[4], *y = &c->out[0];
  const bool has_bias = c->n_in > 4 && bias->data, has_acc = c->n_in > 5 && c->in[5].data;
  const rfi_matrix x = matrix_of(&c->in[0], 0, i0, 0), w = matrix_of(&c->in[1], tb, 0, j0);
  const rfi_matrix u = matrix_of(&c->in[2], 0, i0, 0), b = matrix_of(&c->in[3], tb, 0, j0);
  float *sum = scratch + rfi_scratch_floats(&g->scratch);
  memcpy(sum, rfi_gemm_block(&g->scratch, &x, &w, m, n, g->K, scratch), sizeof(float) * TILE_M * TILE_N);
  const float *more = rfi_gemm_block(&g->scratch, &u, &b, m, n, g->R, scratch);
  for (int64_t i = 0; i < m; i++) {
    float *row = sum + i * TILE_N;
    for (int64_t j = 0; j < n; j++) row[j] += more[i * TILE_N + j];
    if (has_bias) rfi_add_bias(row, rfi_at(bias->data, bias->type.dtype, j0), bias->type.dtype, n);
    rfi_store_row((void *)rfi_at(y->data, y->type.dtype, (i0 + i) * g->N + j0), y->type.dtype, row, n, has_acc);
  }
}

static rfr_status run(const rfi_call *c) {
  const grid g = grid_make(c);
  const int64_t tiles = g.tiles_m * g.tiles_n;
#pragma omp parallel for schedule(dynamic, 1) num_threads(g.threads) if (g.threads > 1)
  for (int64_t tile = 0; tile < tiles; tile++)
    multiply(c, &g, tile / g.tiles_n * TILE_M, tile % g.tiles_n * TILE_N,
             (float *)c->workspace + g.floats * (size_t)rfi_thread());
  return RFR_OK;
}

const rfi_kernel RFI_CPU(lora_matmul) = {run, workspace};
