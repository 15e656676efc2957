/* SPDX-License-Identifier: Apache-2.0
 *
 * The portable GEMM: y = op(a) op(b) + bias (+ acc).
 *
 * C is cut into tiles of at most TILE_M x TILE_N. One thread computes a tile completely, so nothing is reduced between
 * threads; gemm_block.h computes a tile. Results do not depend on tile sizes or on the number of threads.
 *
 * Packing per tile repeats work between tiles (about 5 % at 256 x 256), but needs no barrier and no scratch that grows
 * with the matrices.
 */
#include "backend/cpu/cpu.h"
#include "ops/matmul/gemm_block.h"

enum {
  TILE_M = 32 * RFI_MR,
  TILE_N = 256,            /* blocks of A, B and C together fit into a 1 MiB L2 cache */
  MIN_TILE_WORK = 1 << 18, /* with fewer multiply-adds per thread, another thread is not worthwhile */
};

typedef struct grid {
  int64_t batch, M, N, K;
  int64_t tile_m, tile_n, tiles_m, tiles_n;
  int threads;
  rfi_scratch scratch; /* per thread */
} grid;

static grid grid_make(const rfi_call *call) {
  const rfr_type *y = &call->out[0].type, *a = &call->in[0].type;
  int r = y->rank, ta = (int)call->attr[0].i;
  grid g = {.batch = r == 3 ? y->shape[0] : 1, .M = y->shape[r - 2], .N = y->shape[r - 1]};
  g.K = a->shape[ta ? r - 2 : r - 1];
  g.tile_m = g.M < TILE_M ? rfi_round_up(g.M > 0 ? g.M : 1, RFI_MR) : TILE_M;
  g.tile_n = g.N < TILE_N ? rfi_round_up(g.N > 0 ? g.N : 1, RFI_NR) : TILE_N;
  int64_t work = g.batch * g.M * g.N * (g.K > 0 ? g.K : 1), most = work / MIN_TILE_WORK;
  g.threads = call->threads < 1 || most < 2 ? 1 : call->threads < most ? call->threads : (int)most;
  for (;;) { /* enough tiles that all threads are busy until the end */
    g.tiles_m = rfi_ceil_div(g.M, g.tile_m);
    g.tiles_n = rfi_ceil_div(g.N, g.tile_n);
    if (g.threads == 1 || g.batch * g.tiles_m * g.tiles_n >= 4 * g.threads) break;
    if (g.tile_m > 4 * RFI_MR && g.tile_m >= g.tile_n / 2) g.tile_m = rfi_round_up(g.tile_m / 2, RFI_MR);
    else if (g.tile_n > RFI_NR) g.tile_n = rfi_round_up(g.tile_n / 2, RFI_NR);
    else break;
  }
  g.scratch = rfi_scratch_make(g.tile_m, g.tile_n, rfi_block_k(g.K));
  return g;
}

static size_t workspace(const rfi_call *call) {
  grid g = grid_make(call);
  return (size_t)g.threads * rfi_scratch_floats(&g.scratch) * 4;
}

/* y rows = C + bias + acc, rounded once. */
static void finish(const rfi_call *call, const grid *g, int64_t y0, int64_t j0, int64_t m, int64_t n, float *c) {
  const rfi_arg *bias = &call->in[2], *y = &call->out[0];
  bool has_bias = call->n_in > 2 && bias->data, has_acc = call->n_in > 3 && call->in[3].data;
  rfr_dtype dt = y->type.dtype;
  for (int64_t i = 0; i < m; i++) {
    float *row = c + i * g->scratch.ldc;
    char *out = (char *)y->data + (y0 + i * g->N) * (dt == RFR_F32 ? 4 : 2);
    if (has_bias) rfi_add_bias(row, rfi_at(bias->data, bias->type.dtype, j0), bias->type.dtype, n);
    rfi_store_row(out, dt, row, n, has_acc);
  }
}

static rfr_status run(const rfi_call *call) {
  const grid g = grid_make(call);
  const rfi_arg *a = &call->in[0], *b = &call->in[1];
  int r = call->out[0].type.rank, ta = (int)call->attr[0].i, tb = (int)call->attr[1].i;
  const rfi_matrix A = {a->data, a->type.dtype, a->stride[ta ? r - 1 : r - 2], a->stride[ta ? r - 2 : r - 1]};
  const rfi_matrix B = {b->data, b->type.dtype, b->stride[tb ? r - 1 : r - 2], b->stride[tb ? r - 2 : r - 1]};
  int64_t tiles = g.batch * g.tiles_m * g.tiles_n;
#pragma omp parallel for schedule(dynamic, 1) num_threads(g.threads) if (g.threads > 1)
  for (int64_t tile = 0; tile < tiles; tile++) {
    float *scratch = (float *)call->workspace + rfi_scratch_floats(&g.scratch) * (size_t)rfi_thread();
    int64_t z = tile / (g.tiles_m * g.tiles_n), at = tile % (g.tiles_m * g.tiles_n);
    int64_t i0 = at / g.tiles_n * g.tile_m, j0 = at % g.tiles_n * g.tile_n;
    int64_t m = g.M - i0 < g.tile_m ? g.M - i0 : g.tile_m, n = g.N - j0 < g.tile_n ? g.N - j0 : g.tile_n;
    rfi_matrix at_a = A, at_b = B;
    at_a.data = rfi_at(a->data, a->type.dtype, (r == 3 ? z * a->stride[0] : 0) + i0 * A.rs);
    at_b.data = rfi_at(b->data, b->type.dtype, (r == 3 ? z * b->stride[0] : 0) + j0 * B.cs);
    float *c = rfi_gemm_block(&g.scratch, &at_a, &at_b, m, n, g.K, scratch);
    finish(call, &g, (z * g.M + i0) * g.N + j0, j0, m, n, c);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(matmul) = {run, workspace};
