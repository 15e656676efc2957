/* SPDX-License-Identifier: Apache-2.0
 *
 * rmsnorm on the CPU, rows of C elements:
 *
 *   r = 1 / sqrt(mean(x^2) + eps)      y = x r w
 *   dx = r (dy w - x r^2 mean(dy w x))      dw = sum over rows of dy x r
 *
 * A row is read twice; for the C of real models the second read comes from cache. Sums use f32 lanes within a block,
 * and blocks are added in order.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/norm/norm_bwd.h"
#include "ops/norm/norm_sum.h"

static int64_t width(const rfi_arg *x) { return x->type.shape[x->type.rank - 1]; }
/* Rows with C = 0 count as rows: their statistics, those of zeros, are results too. */
static int64_t height(const rfi_arg *x) {
  int64_t n = 1;
  for (int d = 0; d < x->type.rank - 1; d++) n *= x->type.shape[d];
  return n;
}
static int64_t block(int64_t j, int64_t n) { return n - j < RFI_BLOCK ? n - j : RFI_BLOCK; }

/* As in layernorm_cpu.c: the separate and the fused ops call the same functions, so that their results are bitwise
 * equal. */
#define SHARED __attribute__((noinline)) static

/* ---- forward ---- */

static float sum_squares(const float *x, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += x[j] * x[j];
  return s;
}
static void scale_row(float *y, const float *x, const float *w, float r, int64_t n) {
  for (int64_t j = 0; j < n; j++) y[j] = x[j] * r * w[j];
}

/* Computes one row of x, which may be y itself. */
SHARED void forward_row(const rfi_call *c, int64_t row, const rfi_arg *x, const rfi_arg *w, const rfi_arg *y,
                        float *rstd) {
  float bx[RFI_BLOCK], bw[RFI_BLOCK], by[RFI_BLOCK], s = 0;
  int64_t C = width(x);
  for (int64_t j = 0; j < C; j += RFI_BLOCK)
    s += sum_squares(rfi_read(bx, x, row * C + j, 1, block(j, C)), block(j, C));
  float r = 1.0f / sqrtf((C ? s / (float)C : 0) + (float)c->attr[0].f);
  if (rstd) rstd[row] = r;
  for (int64_t j = 0, n; y->data && j < C; j += n) {
    n = block(j, C);
    const float *a = rfi_read(bx, x, row * C + j, 1, n), *b = rfi_read(bw, w, j, 1, n);
    float *o = rfi_target(by, y, row * C + j);
    scale_row(o, a, b, r, n);
    rfi_flush(o, y, row * C + j, n);
  }
}
static void rmsnorm_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  for (int64_t row = begin; row < end; row++) forward_row(c, row, &c->in[0], &c->in[1], &c->out[0], c->out[1].data);
}
static rfr_status run_fwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, height(&c->in[0]), 2 * width(&c->in[0]), rmsnorm_part);
  return RFR_OK;
}

static void add_rmsnorm_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  for (int64_t row = begin; row < end; row++)
    forward_row(c, row, rfi_norm_sum_row(c, row), &c->in[2], &c->out[1], c->out[2].data);
}
static rfr_status run_add_fwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  RFI_TRY(rfi_norm_check_sum(c));
  rfi_parallel(c, height(&c->in[0]), 3 * width(&c->in[0]), add_rmsnorm_part);
  return RFR_OK;
}

/* ---- backward ---- */

SHARED float sum_products(const float *dy, const float *w, const float *x, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += dy[j] * w[j] * x[j];
  return s;
}
SHARED void backward_row(float *dx, const float *dy, const float *w, const float *x, float r, float m, int64_t n) {
  for (int64_t j = 0; j < n; j++) dx[j] = r * (dy[j] * w[j] - x[j] * m);
}

static void dx_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *dy = &c->in[0], *x = &c->in[1], *w = &c->in[2], *dx = &c->out[0];
  const float *rstd = c->in[3].data;
  float bd[RFI_BLOCK], bx[RFI_BLOCK], bw[RFI_BLOCK], bo[RFI_BLOCK];
  int64_t C = width(x);
  for (int64_t row = begin; row < end; row++) {
    float s = 0, r = rstd[row];
    for (int64_t j = 0, n; j < C; j += n) {
      n = block(j, C);
      s += sum_products(rfi_read(bd, dy, row * C + j, 1, n), rfi_read(bw, w, j, 1, n),
                        rfi_read(bx, x, row * C + j, 1, n), n);
    }
    float m = s / (float)C * r * r;
    for (int64_t j = 0, n; j < C; j += n) {
      n = block(j, C);
      float *o = rfi_target(bo, dx, row * C + j);
      backward_row(o, rfi_read(bd, dy, row * C + j, 1, n), rfi_read(bw, w, j, 1, n), rfi_read(bx, x, row * C + j, 1, n),
                   r, m, n);
      rfi_flush(o, dx, row * C + j, n);
    }
  }
}
static rfr_status run_dx(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  if (c->out[0].data) rfi_parallel(c, height(&c->in[1]), 4 * width(&c->in[1]), dx_part);
  return RFR_OK;
}

SHARED void add_terms(float *sum, const float *dy, const float *x, float r, int64_t n) {
  for (int64_t j = 0; j < n; j++) sum[j] += dy[j] * x[j] * r;
}
static void add_row(const rfi_call *c, int64_t row, int64_t column, int64_t n, float *sum) {
  float bd[RFI_BLOCK], bx[RFI_BLOCK];
  int64_t at = row * width(&c->in[1]) + column;
  add_terms(sum, rfi_read(bd, &c->in[0], at, 1, n), rfi_read(bx, &c->in[1], at, 1, n),
            ((const float *)c->in[2].data)[row], n);
}
static void dw_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[1];
  bool accumulate = c->n_in > 3 && c->in[3].data;
  rfi_columns_part(c, &c->out[0], height(x), width(x), begin, end, accumulate, add_row);
}
static rfr_status run_dw(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_column_units(width(&c->in[1])), height(&c->in[1]) * RFI_COLUMN_UNIT, dw_part);
  return RFR_OK;
}

/* ---- all at once ---- */

static void row_scalars(const rfi_call *c, int64_t row, const float *dy, const float *w, const float *x, int64_t C,
                        float *k) {
  float s = 0, r = ((const float *)c->in[3].data)[row];
  for (int64_t j = 0; j < C; j += RFI_BLOCK) s += sum_products(dy + j, w + j, x + j, block(j, C));
  k[0] = r;
  k[1] = s / (float)C * r * r;
}
static void row_dx(float *dx, const float *dy, const float *w, const float *x, const float *k, int64_t n) {
  backward_row(dx, dy, w, x, k[0], k[1], n);
}
static void row_dw(float *sum, const float *dy, const float *x, const float *k, int64_t n) {
  add_terms(sum, dy, x, k[0], n);
}
static const rfi_norm_kind kind = {.residual = 4, .vectors = 1, .scalars = row_scalars, .dx = row_dx, .dw = row_dw};
static rfr_status run_bwd(const rfi_call *c) { return rfi_norm_bwd_run(c, &kind); }
static size_t bwd_workspace(const rfi_call *c) { return rfi_norm_bwd_workspace(c, &kind); }

const rfi_kernel RFI_CPU(rmsnorm) = {run_fwd, NULL};
const rfi_kernel RFI_CPU(add_rmsnorm) = {run_add_fwd, NULL};
const rfi_kernel RFI_CPU(rmsnorm_dx) = {run_dx, NULL};
const rfi_kernel RFI_CPU(rmsnorm_dw) = {run_dw, NULL};
const rfi_kernel RFI_CPU(rmsnorm_bwd) = {run_bwd, bwd_workspace};
