/* SPDX-License-Identifier: Apache-2.0
 *
 * layernorm on the CPU, rows of C elements:
 *
 *   m = mean(x)   r = 1 / sqrt(mean((x-m)^2) + eps)   h = (x-m) r   y = h w + b
 *   dx = r (g - mean(g) - h mean(g h)), g = dy w      dw = sum over rows of dy h
 *
 * The variance about the mean has a separate pass: the one-pass form loses all digits when the mean is large. The
 * passes after the first read from cache.
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

/* The separate and the fused ops call the same functions on the same blocks. If these were inlined into different
 * loops, they might be contracted differently and round differently. */
#define SHARED __attribute__((noinline)) static

/* ---- forward ---- */

static float sum(const float *x, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += x[j];
  return s;
}
static float sum_squares(const float *x, float m, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += (x[j] - m) * (x[j] - m);
  return s;
}
static void normalize(float *y, const float *x, const float *w, const float *b, float m, float r, int64_t n) {
  if (b)
    for (int64_t j = 0; j < n; j++) y[j] = (x[j] - m) * r * w[j] + b[j];
  else
    for (int64_t j = 0; j < n; j++) y[j] = (x[j] - m) * r * w[j];
}

/* Computes one row of x, which may be y itself. */
SHARED void forward_row(const rfi_call *c, int64_t row, const rfi_arg *x, int w, const rfi_arg *y, float *mean,
                        float *rstd) {
  const rfi_arg *scale = &c->in[w], *b = c->n_in > w + 1 && c->in[w + 1].data ? &c->in[w + 1] : NULL;
  float bx[RFI_BLOCK], bw[RFI_BLOCK], bb[RFI_BLOCK], by[RFI_BLOCK], s = 0, v = 0;
  int64_t C = width(x);
  for (int64_t j = 0; j < C; j += RFI_BLOCK) s += sum(rfi_read(bx, x, row * C + j, 1, block(j, C)), block(j, C));
  float m = C ? s / (float)C : 0;
  for (int64_t j = 0; j < C; j += RFI_BLOCK)
    v += sum_squares(rfi_read(bx, x, row * C + j, 1, block(j, C)), m, block(j, C));
  float r = 1.0f / sqrtf((C ? v / (float)C : 0) + (float)c->attr[0].f);
  if (mean) mean[row] = m;
  if (rstd) rstd[row] = r;
  for (int64_t j = 0, n; y->data && j < C; j += n) {
    n = block(j, C);
    float *o = rfi_target(by, y, row * C + j);
    normalize(o, rfi_read(bx, x, row * C + j, 1, n), rfi_read(bw, scale, j, 1, n), b ? rfi_read(bb, b, j, 1, n) : NULL,
              m, r, n);
    rfi_flush(o, y, row * C + j, n);
  }
}
static void layernorm_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  for (int64_t row = begin; row < end; row++)
    forward_row(c, row, &c->in[0], 1, &c->out[0], c->out[1].data, c->out[2].data);
}
static rfr_status run_fwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, height(&c->in[0]), 3 * width(&c->in[0]), layernorm_part);
  return RFR_OK;
}

static void add_layernorm_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  for (int64_t row = begin; row < end; row++)
    forward_row(c, row, rfi_norm_sum_row(c, row), 2, &c->out[1], c->out[2].data, c->out[3].data);
}
static rfr_status run_add_fwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  RFI_TRY(rfi_norm_check_sum(c));
  rfi_parallel(c, height(&c->in[0]), 4 * width(&c->in[0]), add_layernorm_part);
  return RFR_OK;
}

/* ---- backward ---- */

SHARED float sum_g(const float *dy, const float *w, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += dy[j] * w[j];
  return s;
}
SHARED float sum_gh(const float *dy, const float *w, const float *x, float m, float r, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += dy[j] * w[j] * ((x[j] - m) * r);
  return s;
}
SHARED void backward_row(float *dx, const float *dy, const float *w, const float *x, float m, float r, float g,
                         float gh, int64_t n) {
  for (int64_t j = 0; j < n; j++) dx[j] = r * (dy[j] * w[j] - g - (x[j] - m) * r * gh);
}

static void dx_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *dy = &c->in[0], *x = &c->in[1], *w = &c->in[2], *dx = &c->out[0];
  const float *mean = c->in[3].data, *rstd = c->in[4].data;
  float bd[RFI_BLOCK], bx[RFI_BLOCK], bw[RFI_BLOCK], bo[RFI_BLOCK];
  int64_t C = width(x);
  for (int64_t row = begin; row < end; row++) {
    float g = 0, gh = 0, m = mean[row], r = rstd[row];
    for (int64_t j = 0, n; j < C; j += n) {
      n = block(j, C);
      const float *d = rfi_read(bd, dy, row * C + j, 1, n), *b = rfi_read(bw, w, j, 1, n);
      g += sum_g(d, b, n);
      gh += sum_gh(d, b, rfi_read(bx, x, row * C + j, 1, n), m, r, n);
    }
    for (int64_t j = 0, n; j < C; j += n) {
      n = block(j, C);
      float *o = rfi_target(bo, dx, row * C + j);
      backward_row(o, rfi_read(bd, dy, row * C + j, 1, n), rfi_read(bw, w, j, 1, n), rfi_read(bx, x, row * C + j, 1, n),
                   m, r, g / (float)C, gh / (float)C, n);
      rfi_flush(o, dx, row * C + j, n);
    }
  }
}
static rfr_status run_dx(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  if (c->out[0].data) rfi_parallel(c, height(&c->in[1]), 5 * width(&c->in[1]), dx_part);
  return RFR_OK;
}

SHARED void add_terms(float *total, const float *dy, const float *x, float m, float r, int64_t n) {
  for (int64_t j = 0; j < n; j++) total[j] += dy[j] * ((x[j] - m) * r);
}
static void add_row(const rfi_call *c, int64_t row, int64_t column, int64_t n, float *total) {
  float bd[RFI_BLOCK], bx[RFI_BLOCK];
  int64_t at = row * width(&c->in[1]) + column;
  add_terms(total, rfi_read(bd, &c->in[0], at, 1, n), rfi_read(bx, &c->in[1], at, 1, n),
            ((const float *)c->in[2].data)[row], ((const float *)c->in[3].data)[row], n);
}
static void dw_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[1];
  bool accumulate = c->n_in > 4 && c->in[4].data;
  rfi_columns_part(c, &c->out[0], height(x), width(x), begin, end, accumulate, add_row);
}
static rfr_status run_dw(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_column_units(width(&c->in[1])), height(&c->in[1]) * RFI_COLUMN_UNIT, dw_part);
  return RFR_OK;
}

SHARED void add_values(float *total, const float *dy, int64_t n) {
  for (int64_t j = 0; j < n; j++) total[j] += dy[j];
}
static void add_values_of_row(const rfi_call *c, int64_t row, int64_t column, int64_t n, float *total) {
  float block[RFI_BLOCK];
  add_values(total, rfi_read(block, &c->in[0], row * width(&c->in[0]) + column, 1, n), n);
}
static void db_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *dy = &c->in[0];
  bool accumulate = c->n_in > 1 && c->in[1].data;
  rfi_columns_part(c, &c->out[0], height(dy), width(dy), begin, end, accumulate, add_values_of_row);
}
static rfr_status run_db(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_column_units(width(&c->in[0])), height(&c->in[0]) * RFI_COLUMN_UNIT, db_part);
  return RFR_OK;
}

/* ---- all at once ---- */

static void row_scalars(const rfi_call *c, int64_t row, const float *dy, const float *w, const float *x, int64_t C,
                        float *k) {
  float g = 0, gh = 0, m = ((const float *)c->in[3].data)[row], r = ((const float *)c->in[4].data)[row];
  for (int64_t j = 0; j < C; j += RFI_BLOCK) {
    g += sum_g(dy + j, w + j, block(j, C));
    gh += sum_gh(dy + j, w + j, x + j, m, r, block(j, C));
  }
  k[0] = m;
  k[1] = r;
  k[2] = g / (float)C;
  k[3] = gh / (float)C;
}
static void row_dx(float *dx, const float *dy, const float *w, const float *x, const float *k, int64_t n) {
  backward_row(dx, dy, w, x, k[0], k[1], k[2], k[3], n);
}
static void row_dw(float *sum, const float *dy, const float *x, const float *k, int64_t n) {
  add_terms(sum, dy, x, k[0], k[1], n);
}
static const rfi_norm_kind kind = {.residual = 5, .vectors = 3, .scalars = row_scalars, .dx = row_dx, .dw = row_dw};
static rfr_status run_bwd(const rfi_call *c) { return rfi_norm_bwd_run(c, &kind); }
static size_t bwd_workspace(const rfi_call *c) { return rfi_norm_bwd_workspace(c, &kind); }

const rfi_kernel RFI_CPU(layernorm) = {run_fwd, NULL};
const rfi_kernel RFI_CPU(add_layernorm) = {run_add_fwd, NULL};
const rfi_kernel RFI_CPU(layernorm_dx) = {run_dx, NULL};
const rfi_kernel RFI_CPU(layernorm_dw) = {run_dw, NULL};
const rfi_kernel RFI_CPU(layernorm_db) = {run_db, NULL};
const rfi_kernel RFI_CPU(layernorm_bwd) = {run_bwd, bwd_workspace};
