/* SPDX-License-Identifier: Apache-2.0
 *
 * The portable matrix product: y = op(a) op(b) + bias (+ acc).
 *
 * C is cut into tiles of at most TILE_M x TILE_N; a thread owns a tile from first to
 * last step, so nothing is reduced between threads. For each block of K it packs a
 * strip of B (into panels of RFI_NR columns) and a block of A, both widened to f32,
 * and runs the register tile over them into an f32 tile of its workspace; bias, acc
 * and the one rounding come at the end. K is cut by K alone: the bits depend on K
 * and the instruction set, not on tile sizes or on the number of threads.
 *
 * Packing per tile repeats work between tiles (about 5 % at 256 x 256), and in
 * exchange needs no barrier and no scratch that grows with the matrices.
 */
#include "backend/cpu/cpu.h"
#include "ops/matmul/tile.h"

enum {
  BLOCK_K = 256, /* a panel of B (32 KiB in f32 at 32 columns) stays in the L1 cache */
  TILE_M = 32 * RFI_MR,
  TILE_N = 256,            /* A, B and C blocks together stay in a 1 MiB L2 cache */
  MIN_TILE_WORK = 1 << 18, /* multiply-adds below which another thread does not pay */
};

typedef struct grid {
  int64_t batch, M, N, K;
  int64_t tile_m, tile_n, tiles_m, tiles_n, block_k;
  int threads;
  size_t a_floats, b_floats, c_floats; /* a thread's scratch, in multiples of 16 */
} grid;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

static grid grid_make(const rfi_call *call) {
  const rfr_type *y = &call->out[0].type, *a = &call->in[0].type;
  int r = y->rank, ta = (int)call->attr[0].i;
  grid g = {.batch = r == 3 ? y->shape[0] : 1, .M = y->shape[r - 2], .N = y->shape[r - 1]};
  g.K = a->shape[ta ? r - 2 : r - 1];
  int64_t blocks = g.K > 0 ? ceil_div(g.K, BLOCK_K) : 1;
  g.block_k = round_up(ceil_div(g.K > 0 ? g.K : 1, blocks), 4);
  g.tile_m = g.M < TILE_M ? round_up(g.M > 0 ? g.M : 1, RFI_MR) : TILE_M;
  g.tile_n = g.N < TILE_N ? round_up(g.N > 0 ? g.N : 1, RFI_NR) : TILE_N;
  int64_t work = g.batch * g.M * g.N * (g.K > 0 ? g.K : 1), most = work / MIN_TILE_WORK;
  g.threads = call->threads < 1 || most < 2 ? 1 : call->threads < most ? call->threads : (int)most;
  for (;;) { /* enough tiles to keep all threads busy to the end */
    g.tiles_m = ceil_div(g.M, g.tile_m);
    g.tiles_n = ceil_div(g.N, g.tile_n);
    if (g.threads == 1 || g.batch * g.tiles_m * g.tiles_n >= 4 * g.threads) break;
    if (g.tile_m > 4 * RFI_MR && g.tile_m >= g.tile_n / 2) g.tile_m = round_up(g.tile_m / 2, RFI_MR);
    else if (g.tile_n > RFI_NR) g.tile_n = round_up(g.tile_n / 2, RFI_NR);
    else break;
  }
  g.a_floats = (size_t)round_up(g.tile_m * g.block_k, 16);
  g.b_floats = (size_t)round_up(g.tile_n * g.block_k, 16);
  g.c_floats = (size_t)round_up(g.tile_m * g.tile_n, 16);
  return g;
}

static size_t workspace(const rfi_call *call) {
  grid g = grid_make(call);
  return (size_t)g.threads * (g.a_floats + g.b_floats + g.c_floats) * 4;
}

/* C tile (m x n, row stride tile_n) over all of K. Strides are those of op(a), op(b). */
static void product(const grid *g, const rfi_arg *a, int64_t a0, int64_t ars, int64_t acs, const rfi_arg *b, int64_t b0,
                    int64_t brs, int64_t bcs, int64_t m, int64_t n, float *scratch) {
  float *ap = scratch, *bp = ap + g->a_floats, *c = bp + g->b_floats;
  int by_row = acs == 1 || ars != 1;
  if (g->K == 0) memset(c, 0, (size_t)(m * g->tile_n) * 4);
  for (int64_t k0 = 0; k0 < g->K; k0 += g->block_k) {
    int64_t k = g->K - k0 < g->block_k ? g->K - k0 : g->block_k;
    for (int64_t j = 0; j < n; j += RFI_NR)
      rfi_pack(bp + j * k, RFI_NR, k, n - j < RFI_NR ? n - j : RFI_NR, RFI_NR,
               rfi_at(b->data, b->type.dtype, b0 + k0 * brs + j * bcs), b->type.dtype, brs, bcs);
    if (by_row) {
      rfi_pack(ap, k, m, k, k, rfi_at(a->data, a->type.dtype, a0 + k0 * acs), a->type.dtype, ars, acs);
    } else {
      for (int64_t i = 0; i < m; i += RFI_MR)
        rfi_pack(ap + i * k, RFI_MR, k, m - i < RFI_MR ? m - i : RFI_MR, RFI_MR,
                 rfi_at(a->data, a->type.dtype, a0 + k0 * acs + i * ars), a->type.dtype, acs, ars);
    }
    for (int64_t j = 0; j < n; j += RFI_NR)
      for (int64_t i = 0; i < m; i += RFI_MR) {
        int mr = m - i < RFI_MR ? (int)(m - i) : RFI_MR;
        float *ct = c + i * g->tile_n + j;
        if (by_row) rfi_tile_n(mr, k, ap + i * k, k, bp + j * k, RFI_NR, ct, g->tile_n, k0 > 0);
        else rfi_tile_t(mr, k, ap + i * k, RFI_MR, bp + j * k, RFI_NR, ct, g->tile_n, k0 > 0);
      }
  }
}

/* y rows = C + bias + acc, one rounding. */
static void finish(const rfi_call *call, const grid *g, int64_t y0, int64_t j0, int64_t m, int64_t n, float *c) {
  const rfi_arg *bias = &call->in[2], *y = &call->out[0];
  bool has_bias = call->n_in > 2 && bias->data, has_acc = call->n_in > 3 && call->in[3].data;
  rfr_dtype dt = y->type.dtype;
  for (int64_t i = 0; i < m; i++) {
    float *row = c + i * g->tile_n;
    char *out = (char *)y->data + (y0 + i * g->N) * (dt == RFR_F32 ? 4 : 2);
    if (has_bias && bias->type.dtype == RFR_F32) {
      const float *x = (const float *)bias->data + j0;
      for (int64_t j = 0; j < n; j++) row[j] += x[j];
    } else if (has_bias) {
      for (int64_t j = 0; j < n; j++) row[j] += rfi_get(bias->data, bias->type.dtype, j0 + j);
    }
    if (has_acc && dt == RFR_F32) {
      for (int64_t j = 0; j < n; j++) ((float *)out)[j] += row[j];
    } else {
      if (has_acc)
        for (int64_t j = 0; j < n; j++) row[j] += rfi_get(out, dt, j);
      rfi_narrow(out, dt, row, n);
    }
  }
}

static rfr_status run(const rfi_call *call) {
  const grid g = grid_make(call);
  const rfi_arg *a = &call->in[0], *b = &call->in[1];
  int r = call->out[0].type.rank, ta = (int)call->attr[0].i, tb = (int)call->attr[1].i;
  int64_t ars = a->stride[ta ? r - 1 : r - 2], acs = a->stride[ta ? r - 2 : r - 1];
  int64_t brs = b->stride[tb ? r - 1 : r - 2], bcs = b->stride[tb ? r - 2 : r - 1];
  int64_t tiles = g.batch * g.tiles_m * g.tiles_n;
  size_t each = g.a_floats + g.b_floats + g.c_floats;
#pragma omp parallel for schedule(dynamic, 1) num_threads(g.threads) if (g.threads > 1)
  for (int64_t tile = 0; tile < tiles; tile++) {
    float *scratch = (float *)call->workspace + each * (size_t)rfi_thread();
    int64_t z = tile / (g.tiles_m * g.tiles_n), at = tile % (g.tiles_m * g.tiles_n);
    int64_t i0 = at / g.tiles_n * g.tile_m, j0 = at % g.tiles_n * g.tile_n;
    int64_t m = g.M - i0 < g.tile_m ? g.M - i0 : g.tile_m, n = g.N - j0 < g.tile_n ? g.N - j0 : g.tile_n;
    product(&g, a, (r == 3 ? z * a->stride[0] : 0) + i0 * ars, ars, acs, b, (r == 3 ? z * b->stride[0] : 0) + j0 * bcs,
            brs, bcs, m, n, scratch);
    finish(call, &g, (z * g.M + i0) * g.N + j0, j0, m, n, scratch + g.a_floats + g.b_floats);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(matmul) = {run, workspace};
