/* SPDX-License-Identifier: Apache-2.0
 *
 * gelu, silu, swiglu, softcap and their gradients on the CPU.
 *
 *   gelu (erf)   y = x P(x), P the normal distribution;  dx = dy (P(x) + x p(x))
 *   gelu (tanh)  y = x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3): 1 + tanh(u) = 2 s(2u)
 *   silu         y = x s(x);  dx = dy s (1 + x (1 - s))
 *   swiglu       y = silu(gate) up
 *   weighted     y = silu(gate) up weight[row];  dweight[row] = sum of dy silu(gate) up over the row
 *   softcap      y = cap tanh(x / cap);  dx = dy (1 - (y / cap)^2)
 *
 * s is the logistic function: one exp and one division, without cancellation at either end. The gradients need s(x) and
 * 1 - s(x) = s(-x): the same exp and division give both.
 */
#include "backend/cpu/cpu.h"
#include "ops/elementwise/halves.h"
#include "ops/walk.h"

/* ---- gelu ---- */

/* Returns 2u and, in `slope`, its derivative. x is clamped to [-20, 20], because the logistic function is exactly 0 or
 * 1 beyond; so infinity is never multiplied by that 0. */
static inline float gelu_argument(float x, float *slope) {
  x = x > 20.0f ? 20.0f : x;
  x = x < -20.0f ? -20.0f : x;
  float s = x * x;
  *slope = 1.59576912f + 0.214064385f * s;
  return x * (1.59576912f + 0.0713547950f * s);
}

static void gelu_erf_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *a = x[0];
  float *o = y[0], density;
  for (int64_t j = 0; j < n; j++) o[j] = a[j] * rfi_normal_cdf(a[j], &density);
}
static void gelu_tanh_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *a = x[0];
  float *o = y[0], slope;
  for (int64_t j = 0; j < n; j++) o[j] = a[j] * rfi_sigmoidf(gelu_argument(a[j], &slope));
}
static void gelu_erf_bwd_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *dy = x[0], *a = x[1];
  float *dx = y[0];
  for (int64_t j = 0; j < n; j++) {
    float density, p = rfi_normal_cdf(a[j], &density);
    dx[j] = dy[j] * (p + a[j] * density);
  }
}
static void gelu_tanh_bwd_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *dy = x[0], *a = x[1];
  float *dx = y[0];
  for (int64_t j = 0; j < n; j++) {
    float slope, rest, s = rfi_sigmoids(gelu_argument(a[j], &slope), &rest);
    dx[j] = dy[j] * (s + a[j] * (s * rest) * slope);
  }
}

static void gelu_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 1, c->attr[0].i ? gelu_tanh_block : gelu_erf_block);
}
static void gelu_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 2, c->attr[0].i ? gelu_tanh_bwd_block : gelu_erf_bwd_block);
}

/* ---- silu ---- */

static void silu_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *a = x[0];
  float *o = y[0];
  for (int64_t j = 0; j < n; j++) o[j] = a[j] * rfi_sigmoidf(a[j]);
}
static void silu_bwd_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *dy = x[0], *a = x[1];
  float *dx = y[0];
  for (int64_t j = 0; j < n; j++) {
    float rest, s = rfi_sigmoids(a[j], &rest);
    dx[j] = dy[j] * (s + s * a[j] * rest);
  }
}
static void silu_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 1, silu_block);
}
static void silu_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 2, silu_bwd_block);
}

/* ---- swiglu ---- */

enum { SWIGLU_RESULTS = 3, WEIGHTED_RESULTS = 4 }; /* results of the gradients, including h */

static void swiglu_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *gate = x[0], *up = x[1];
  float *o = y[0];
  for (int64_t j = 0; j < n; j++) o[j] = gate[j] * rfi_sigmoidf(gate[j]) * up[j];
}
static void swiglu_bwd_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  const float *dy = x[0], *gate = x[1], *up = x[2];
  float *dgate = y[0], *dup = y[1];
  for (int64_t j = 0; j < n; j++) {
    float g = gate[j], d = dy[j], u = up[j], rest, s = rfi_sigmoids(g, &rest);
    dgate[j] = d * u * (s + s * g * rest);
    dup[j] = d * g * s;
  }
  if (c->n_out == SWIGLU_RESULTS) swiglu_block(c, i, n, y + 2, x + 1); /* last: it may overwrite dy */
}
static void swiglu_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 2, swiglu_block);
}
static void swiglu_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 3, swiglu_bwd_block);
}

/* ---- swiglu_weighted: row by row ---- */

static void weighted_block(float *y, const float *gate, const float *up, float weight, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = gate[i] * rfi_sigmoidf(gate[i]) * up[i] * weight;
}

static void weighted_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *gate = &c->in[0], *up = &c->in[1], *weight = &c->in[2], *y = &c->out[0];
  const int64_t columns = gate->type.shape[1];
  float buffer[3][RFI_BLOCK] __attribute__((aligned(64)));
  for (int64_t r = begin; r < end; r++) {
    const float w = rfi_read1(weight, r * weight->stride[0]);
    for (int64_t j = 0, n; j < columns; j += n) {
      n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
      const float *g = rfi_read(buffer[0], gate, r * gate->stride[0] + j, 1, n);
      const float *u = rfi_read(buffer[1], up, r * up->stride[0] + j, 1, n);
      float *o = rfi_target(buffer[2], y, r * columns + j);
      weighted_block(o, g, u, w, n);
      rfi_flush(o, y, r * columns + j, n);
    }
  }
}

/* Sums in f64: in a short row the f32 error of the sum would exceed the errors of its elements. */
static double dot(const float *a, const float *b, int64_t n) {
  double s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < n; i++) s += (double)a[i] * (double)b[i];
  return s;
}

/* A row's sum is computed in blocks that begin with the row, so it does not depend on the number of threads. */
static void weighted_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *dy = &c->in[0], *gate = &c->in[1], *up = &c->in[2], *weight = &c->in[3];
  const rfi_arg *dweight = &c->out[0], *dgate = &c->out[1], *dup = &c->out[2];
  const rfi_arg *h = c->n_out == WEIGHTED_RESULTS ? &c->out[3] : NULL;
  const int64_t columns = dy->type.shape[1];
  float buffer[5][RFI_BLOCK] __attribute__((aligned(64))), y[RFI_BLOCK];
  for (int64_t r = begin; r < end; r++) {
    const float w = rfi_read1(weight, r * weight->stride[0]);
    double total = 0;
    for (int64_t j = 0, n; j < columns; j += n) {
      n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
      const float *d = rfi_read(buffer[0], dy, r * dy->stride[0] + j, 1, n);
      const float *g = rfi_read(buffer[1], gate, r * gate->stride[0] + j, 1, n);
      const float *u = rfi_read(buffer[2], up, r * up->stride[0] + j, 1, n);
      float *dg = rfi_target(buffer[3], dgate, r * dgate->stride[0] + j);
      float *du = rfi_target(buffer[4], dup, r * dup->stride[0] + j);
      for (int64_t i = 0; i < n; i++) {
        float gi = g[i], ui = u[i], dw = d[i] * w, rest, s = rfi_sigmoids(gi, &rest);
        dg[i] = dw * ui * (s + s * gi * rest);
        du[i] = dw * gi * s;
        y[i] = gi * s * ui;
      }
      total += dot(d, y, n);
      rfi_flush(dg, dgate, r * dgate->stride[0] + j, n);
      rfi_flush(du, dup, r * dup->stride[0] + j, n);
      if (!h) continue;
      float *o = rfi_target(y, h, r * columns + j); /* last: it may overwrite dy */
      weighted_block(o, g, u, w, n);
      rfi_flush(o, h, r * columns + j, n);
    }
    rfi_write1(dweight, r, (float)total);
  }
}

/* ---- softcap ---- */

static void softcap_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)i;
  const float *a = x[0], cap = (float)c->attr[0].f;
  float *o = y[0];
  for (int64_t j = 0; j < n; j++) o[j] = rfi_softcap(a[j], cap);
}
static void softcap_bwd_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)i;
  const float *dy = x[0], *capped = x[1], cap = (float)c->attr[0].f;
  float *dx = y[0];
  for (int64_t j = 0; j < n; j++) dx[j] = dy[j] * rfi_softcap_slope(capped[j], cap);
}
static void softcap_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 1, softcap_block);
}
static void softcap_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 2, softcap_bwd_block);
}

/* ---- kernels ---- */

/* an exp and a division count as several element visits */
static rfr_status run(const rfi_call *c, rfi_part_fn part) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 4, part);
  return RFR_OK;
}
static rfr_status run_gelu(const rfi_call *c) { return run(c, gelu_part); }
static rfr_status run_gelu_bwd(const rfi_call *c) { return run(c, gelu_bwd_part); }
static rfr_status run_silu(const rfi_call *c) { return run(c, silu_part); }
static rfr_status run_silu_bwd(const rfi_call *c) { return run(c, silu_bwd_part); }
static rfr_status run_swiglu(const rfi_call *c) { return run(c, swiglu_part); }
static rfr_status run_swiglu_bwd(const rfi_call *c) {
  const rfi_call wanted = rfi_swiglu_results(c, SWIGLU_RESULTS);
  return run(&wanted, swiglu_bwd_part);
}
static rfr_status run_swiglu_bwd_packed(const rfi_call *c) {
  rfi_arg out[RFI_HALVES_MOST];
  const rfi_call halves = rfi_swiglu_halves(c, 0, out);
  return run_swiglu_bwd(&halves);
}
static rfr_status run_rows(const rfi_call *c, rfi_part_fn part) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, c->in[0].type.shape[0], 4 * c->in[0].type.shape[1], part);
  return RFR_OK;
}
static rfr_status run_weighted(const rfi_call *c) { return run_rows(c, weighted_part); }
static rfr_status run_weighted_bwd(const rfi_call *c) {
  const rfi_call wanted = rfi_swiglu_results(c, WEIGHTED_RESULTS);
  return run_rows(&wanted, weighted_bwd_part);
}
static rfr_status run_weighted_bwd_packed(const rfi_call *c) {
  rfi_arg out[RFI_HALVES_MOST];
  const rfi_call halves = rfi_swiglu_halves(c, 1, out);
  return run_weighted_bwd(&halves);
}
static rfr_status run_softcap(const rfi_call *c) { return run(c, softcap_part); }
static rfr_status run_softcap_bwd(const rfi_call *c) { return run(c, softcap_bwd_part); }

const rfi_kernel RFI_CPU(gelu) = {run_gelu, NULL};
const rfi_kernel RFI_CPU(gelu_bwd) = {run_gelu_bwd, NULL};
const rfi_kernel RFI_CPU(silu) = {run_silu, NULL};
const rfi_kernel RFI_CPU(silu_bwd) = {run_silu_bwd, NULL};
const rfi_kernel RFI_CPU(swiglu) = {run_swiglu, NULL};
const rfi_kernel RFI_CPU(swiglu_bwd) = {run_swiglu_bwd, NULL};
const rfi_kernel RFI_CPU(swiglu_bwd_packed) = {run_swiglu_bwd_packed, NULL};
const rfi_kernel RFI_CPU(swiglu_weighted) = {run_weighted, NULL};
const rfi_kernel RFI_CPU(swiglu_weighted_bwd) = {run_weighted_bwd, NULL};
const rfi_kernel RFI_CPU(swiglu_weighted_bwd_packed) = {run_weighted_bwd_packed, NULL};
const rfi_kernel RFI_CPU(softcap) = {run_softcap, NULL};
const rfi_kernel RFI_CPU(softcap_bwd) = {run_softcap_bwd, NULL};
