/* SPDX-License-Identifier: Apache-2.0
 *
 * Muon's own ops on the CPU: the momentum, and the polynomial of a Gram matrix. Both are memory-bound. The factor of
 * `unit` is computed in f64, by each thread for the matrices whose rows it has.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/walk.h"

enum { STRIP = 256 };

static void momentum_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const float clip = c->in[2].data ? *(const float *)c->in[2].data : 1.0f;
  const float keep = (float)c->attr[0].f, add = (float)(1 - c->attr[0].f);
  const bool skip = c->in[3].data && *(const int32_t *)c->in[3].data;
  float gb[STRIP], bb[STRIP], next[STRIP], ub[STRIP];
  (void)part;
  for (int64_t i = begin; i < end; i += STRIP) {
    const int64_t n = end - i < STRIP ? end - i : STRIP;
    const float *g = rfi_read(gb, &c->in[0], i, 1, n), *b = rfi_read(bb, &c->in[1], i, 1, n);
    float *u = rfi_target(ub, &c->out[0], i);
    for (int64_t j = 0; j < n; j++) {
      const float x = add * (g[j] * clip);
      next[j] = keep * b[j] + x;
      u[j] = x + keep * next[j];
    }
    rfi_flush(u, &c->out[0], i, n);
    for (int64_t j = 0; j < n && !skip; j++) rfi_write1(&c->in[1], i + j, next[j]);
  }
}

static rfr_status momentum_run(const rfi_call *c) {
  rfi_parallel(c, rfi_count(&c->in[0].type), 3, momentum_part);
  return RFR_OK;
}

/* The coefficients of the three terms for matrix k. */
typedef struct terms {
  float a, b, c;
} terms;

static terms terms_of(const rfi_call *c, int64_t k, int64_t m) {
  double r = 1, trace = 0;
  for (int64_t i = 0; i < m && c->attr[3].i; i++) trace += (double)rfi_read1(&c->in[0], (k * m + i) * m + i);
  if (c->attr[3].i) r = 1 / (sqrt(trace) + 1e-7);
  return (terms){(float)(r * c->attr[0].f), (float)(r * r * r * c->attr[1].f),
                 (float)(r * r * r * r * r * c->attr[2].f)};
}

/* Items are rows. */
static void polynomial_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const int64_t m = c->in[0].type.shape[c->in[0].type.rank - 1];
  float gb[STRIP], pb[STRIP], qb[STRIP];
  terms f = {0};
  (void)part;
  for (int64_t row = begin; row < end; row++) {
    if (row == begin || row % m == 0) f = terms_of(c, row / m, m);
    for (int64_t j = 0; j < m; j += STRIP) {
      const int64_t n = m - j < STRIP ? m - j : STRIP, at = row * m + j, diagonal = row % m - j;
      const float *g = rfi_read(gb, &c->in[0], at, 1, n), *p = rfi_read(pb, &c->in[1], at, 1, n);
      float *q = rfi_target(qb, &c->out[0], at);
      for (int64_t i = 0; i < n; i++) q[i] = f.b * g[i] + f.c * p[i];
      if (diagonal >= 0 && diagonal < n) q[diagonal] += f.a;
      rfi_flush(q, &c->out[0], at, n);
    }
  }
}

static rfr_status polynomial_run(const rfi_call *c) {
  const rfr_type *g = &c->in[0].type;
  rfi_parallel(c, (g->rank == 3 ? g->shape[0] : 1) * g->shape[g->rank - 1], 3 * g->shape[g->rank - 1], polynomial_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(muon_momentum) = {momentum_run, NULL};
const rfi_kernel RFI_CPU(muon_polynomial) = {polynomial_run, NULL};
