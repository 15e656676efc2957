/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs on the CPU: the blocks of gemm_block.h, over tiles that never cross a group.
 *
 * A tile's rows of C are rows of one group (forward, dgrad) or of one weight (wgrad, which sums over the group's rows).
 * Offsets decide where tiles begin; shapes alone decide how large they may be, and scratch is sized for the largest. A
 * row is bitwise equal to that of a matmul of its group alone, because the split of K depends only on K.
 */
#include "backend/cpu/cpu.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/gemm_block.h"

enum {
  LEAST_M = 4 * RFI_MR,
  TILE_M = 32 * RFI_MR,
  TILE_N = 256,
  MIN_TILE_WORK = 1 << 18, /* with fewer multiply-adds per thread, another thread is not worthwhile */
};

typedef struct grid {
  int64_t groups, R, M, N; /* C is (M, N): one for all groups (M = R), or one per group */
  int64_t tile_m, tile_n, tiles_n;
  int threads;
  rfi_scratch scratch; /* per thread */
} grid;

static int64_t tile_of(int64_t n, int64_t unit, int64_t most) {
  return n < most ? rfi_round_up(n > 0 ? n : 1, unit) : most;
}

/* Chooses tiles of at most m rows; sums have at most K terms. */
static void cut(grid *g, const rfi_call *call, int64_t m, int64_t K, int64_t work) {
  const int64_t most = work / MIN_TILE_WORK;
  g->tile_m = tile_of(m, RFI_MR, TILE_M);
  g->tile_n = tile_of(g->N, RFI_NR, TILE_N);
  g->tiles_n = rfi_ceil_div(g->N, g->tile_n);
  g->threads = call->threads < 1 || most < 2 ? 1 : call->threads < most ? call->threads : (int)most;
  g->scratch = rfi_scratch_make(g->tile_m, g->tile_n, K < RFI_BLOCK_K ? rfi_round_up(K > 0 ? K : 1, 4) : RFI_BLOCK_K);
}

static float *scratch_of(const rfi_call *call, const grid *g, size_t before) {
  return (float *)((char *)call->workspace + before) + rfi_scratch_floats(&g->scratch) * (size_t)rfi_thread();
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- grouped_matmul ---- */

enum { SEPARATE = 5 }; /* operand index of the first separate weight */

static rfi_arg weight_of(const rfi_call *call, int64_t group) {
  if (call->n_in > SEPARATE) return call->in[SEPARATE + group];
  rfi_arg w = call->in[1];
  w.data = (void *)rfi_at(w.data, w.type.dtype, group * w.stride[0]);
  w.stride[0] = w.stride[1];
  w.stride[1] = w.stride[2];
  return w;
}

static grid matmul_grid(const rfi_call *call) {
  const rfi_arg *x = &call->in[0];
  grid g = {.groups = call->in[2].type.shape[0] - 1, .R = x->type.shape[0], .N = call->out[0].type.shape[1]};
  const int64_t K = x->type.shape[1], even = g.groups > 0 ? 2 * rfi_ceil_div(g.R, g.groups) : g.R;
  g.M = g.R;
  cut(&g, call, even > LEAST_M ? even : LEAST_M, K, g.R * g.N * (K > 0 ? K : 1));
  return g;
}

/* Bytes before the threads' scratch: it begins with the number of row tiles before each group. */
static size_t starts_bytes(const grid *g) { return ((size_t)(g->groups + 1) * sizeof(int64_t) + 63) & ~(size_t)63; }

static size_t matmul_workspace(const rfi_call *call) {
  const grid g = matmul_grid(call);
  return starts_bytes(&g) + (size_t)g.threads * rfi_scratch_floats(&g.scratch) * 4;
}

static void find_starts(const grid *g, const int32_t *offsets, int64_t *start) {
  start[0] = 0;
  for (int64_t k = 0; k < g->groups; k++)
    start[k + 1] =
        start[k] + rfi_ceil_div(rfi_group_end(offsets, k, g->R) - rfi_group_begin(offsets, k, g->R), g->tile_m);
}

/* The group that contains row tile i. */
static int64_t group_of(const grid *g, const int64_t *start, int64_t i) {
  int64_t low = 0, high = g->groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (start[middle] <= i) low = middle;
    else high = middle;
  }
  return low;
}

/* y rows = C + bias (* scale), rounded once. */
static void finish(const rfi_call *call, int64_t group, int64_t row, int64_t j0, int64_t m, int64_t n, float *c,
                   int64_t ldc) {
  const rfi_arg *bias = &call->in[3], *scale = &call->in[4], *y = &call->out[0];
  const bool has_bias = call->n_in > 3 && bias->data, has_scale = call->n_in > 4 && scale->data;
  for (int64_t i = 0; i < m; i++) {
    float *to = c + i * ldc;
    const int64_t b0 = has_bias ? group * bias->stride[0] + j0 * bias->stride[1] : 0;
    if (has_bias && !has_scale) {
      rfi_add_bias(to, rfi_at(bias->data, bias->type.dtype, b0), bias->type.dtype, n);
    } else if (has_bias) {
      const float s = rfi_get(scale->data, scale->type.dtype, (row + i) * scale->stride[0]);
      for (int64_t j = 0; j < n; j++) to[j] += s * rfi_get(bias->data, bias->type.dtype, b0 + j);
    }
    rfi_store_row((void *)rfi_at(y->data, y->type.dtype, (row + i) * y->type.shape[1] + j0), y->type.dtype, to, n, 0);
  }
}

static rfr_status run_matmul(const rfi_call *call) {
  const grid g = matmul_grid(call);
  const rfi_arg *x = &call->in[0], *y = &call->out[0];
  const int tb = call->attr[0].i != 0;
  const int32_t *offsets = call->in[2].data;
  const rfi_matrix A = {x->data, x->type.dtype, x->stride[0], x->stride[1]};
  int64_t *start = call->workspace;
  find_starts(&g, offsets, start);
  const int64_t tiles = start[g.groups] * g.tiles_n;
#pragma omp parallel for schedule(dynamic, 1) num_threads(g.threads) if (g.threads > 1)
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t i = tile / g.tiles_n, group = group_of(&g, start, i), j0 = tile % g.tiles_n * g.tile_n;
    const int64_t row = rfi_group_begin(offsets, group, g.R) + (i - start[group]) * g.tile_m;
    const int64_t m = min64(rfi_group_end(offsets, group, g.R) - row, g.tile_m), n = min64(g.N - j0, g.tile_n);
    const rfi_arg w = weight_of(call, group);
    rfi_matrix a = A, b = {w.data, w.type.dtype, w.stride[tb], w.stride[!tb]};
    a.data = rfi_matrix_at(&A, row, 0);
    b.data = rfi_matrix_at(&b, 0, j0);
    float *c = rfi_gemm_block(&g.scratch, &a, &b, m, n, x->type.shape[1], scratch_of(call, &g, starts_bytes(&g)));
    finish(call, group, row, j0, m, n, c, g.scratch.ldc);
  }
  const int64_t last = rfi_group_begin(offsets, g.groups, g.R), size = y->type.dtype == RFR_F32 ? 4 : 2;
  memset((char *)y->data + last * g.N * size, 0, (size_t)((g.R - last) * g.N * size));
  return RFR_OK;
}

/* ---- grouped_wgrad ---- */

static grid wgrad_grid(const rfi_call *call) {
  const rfr_type *dw = &call->out[0].type;
  grid g = {.groups = dw->shape[0], .R = call->in[0].type.shape[0], .M = dw->shape[1], .N = dw->shape[2]};
  cut(&g, call, g.M, g.R, g.R * g.M * g.N);
  return g;
}

static size_t wgrad_workspace(const rfi_call *call) {
  const grid g = wgrad_grid(call);
  return (size_t)g.threads * rfi_scratch_floats(&g.scratch) * 4;
}

static rfr_status run_wgrad(const rfi_call *call) {
  const grid g = wgrad_grid(call);
  const rfi_arg *dy = &call->in[0], *x = &call->in[1], *dw = &call->out[0];
  const int32_t *offsets = call->in[2].data;
  const bool has_acc = call->n_in > 3 && call->in[3].data;
  const rfi_matrix A = {dy->data, dy->type.dtype, dy->stride[1], dy->stride[0]}; /* op(dy): (M, R) */
  const rfi_matrix B = {x->data, x->type.dtype, x->stride[0], x->stride[1]};
  const int64_t each = rfi_ceil_div(g.M, g.tile_m) * g.tiles_n;
#pragma omp parallel for schedule(dynamic, 1) num_threads(g.threads) if (g.threads > 1)
  for (int64_t tile = 0; tile < g.groups * each; tile++) {
    const int64_t group = tile / each, i0 = tile % each / g.tiles_n * g.tile_m, j0 = tile % g.tiles_n * g.tile_n;
    const int64_t row = rfi_group_begin(offsets, group, g.R), K = rfi_group_end(offsets, group, g.R) - row;
    const int64_t m = min64(g.M - i0, g.tile_m), n = min64(g.N - j0, g.tile_n);
    if (K == 0 && has_acc) continue;
    rfi_matrix a = A, b = B;
    a.data = rfi_matrix_at(&A, i0, row);
    b.data = rfi_matrix_at(&B, row, j0);
    float *c = rfi_gemm_block(&g.scratch, &a, &b, m, n, K, scratch_of(call, &g, 0));
    for (int64_t i = 0; i < m; i++)
      rfi_store_row((void *)rfi_at(dw->data, dw->type.dtype, ((group * g.M) + i0 + i) * g.N + j0), dw->type.dtype,
                    c + i * g.scratch.ldc, n, has_acc);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(grouped_matmul) = {run_matmul, matmul_workspace};
const rfi_kernel RFI_CPU(grouped_wgrad) = {run_wgrad, wgrad_workspace};
