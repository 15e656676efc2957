/* SPDX-License-Identifier: Apache-2.0
 *
 * dx, dw, db and the column sums of dx in one loop over dy and x, bitwise equal to the separate ops. All of them use
 * the same functions on blocks, and dx is rounded before the residual stream's gradient is added. The sums over rows
 * have the order of columns.h: chunks of rows from zero in f32, the chunks in f64.
 *
 * Threads split the rows at the ends of chunks. Each chunk's sums go to the workspace, and a second loop, split over
 * columns, adds them. A row of dy, x and w is widened once.
 */
#ifndef RFI_NORM_BWD_H
#define RFI_NORM_BWD_H

#include "ops/columns.h"

enum { RFI_NORM_SCALARS = 4 };

/* The differences between layernorm and rmsnorm; k has the scalars of a row. */
typedef struct rfi_norm_kind {
  int residual; /* operand index of the residual; the acc operands of the vectors follow */
  int vectors;  /* 1: dw; 3: dw, db and the sum of dx */
  void (*scalars)(const rfi_call *c, int64_t row, const float *dy, const float *w, const float *x, int64_t C, float *k);
  void (*dx)(float *dx, const float *dy, const float *w, const float *x, const float *k, int64_t n);
  void (*dw)(float *sum, const float *dy, const float *x, const float *k, int64_t n);
} rfi_norm_kind;

/* The call as rfi_parallel passes it to its parts; it must be the first field. */
typedef struct rfi_norm_bwd {
  rfi_call call;
  const rfi_norm_kind *kind;
  int64_t C, rows, chunks;
  float *sums; /* (vectors, chunks, C), then rfi_norm_rows rows of C per part */
} rfi_norm_bwd;

static inline rfi_norm_bwd rfi_norm_bwd_make(const rfi_call *c, const rfi_norm_kind *kind) {
  const rfr_type *x = &c->in[1].type;
  rfi_norm_bwd b = {.call = *c, .kind = kind, .C = x->shape[x->rank - 1], .rows = 1, .sums = c->workspace};
  for (int d = 0; d < x->rank - 1; d++) b.rows *= x->shape[d];
  b.chunks = (b.rows + RFI_COLUMN_ROWS - 1) / RFI_COLUMN_ROWS;
  return b;
}

/* A part's rows in f32: w, dy, x, and dx if that is summed but not a result. */
static inline int64_t rfi_norm_rows(const rfi_norm_kind *kind) { return kind->vectors > 1 ? 4 : 3; }

static inline int64_t rfi_norm_bwd_cost(const rfi_norm_bwd *b) { return 8 * RFI_COLUMN_ROWS * b->C; }

static inline size_t rfi_norm_bwd_workspace(const rfi_call *c, const rfi_norm_kind *kind) {
  rfi_norm_bwd b = rfi_norm_bwd_make(c, kind);
  int64_t parts = rfi_parts(c, b.chunks, rfi_norm_bwd_cost(&b));
  return (size_t)(b.C * (kind->vectors * b.chunks + rfi_norm_rows(kind) * parts)) * sizeof(float);
}

static inline void rfi_norm_add(float *restrict y, const float *restrict x, int64_t n) {
  for (int64_t j = 0; j < n; j++) y[j] += x[j];
}

/* Computes one row of dx and rounds it, then adds the gradient of the residual stream. Adds the row to sum unless that
 * is NULL. Without a result dx, the row is in `space`. */
static inline void rfi_norm_dx_row(const rfi_norm_bwd *b, int64_t row, const float *dy, const float *w, const float *x,
                                   const float *k, float *space, float *sum) {
  const rfi_arg *residual = &b->call.in[b->kind->residual];
  rfi_arg dx = b->call.out[0];
  const int64_t first = dx.data ? row * b->C : 0;
  float block[RFI_BLOCK], other[RFI_BLOCK];
  if (!dx.data) dx.data = space;
  for (int64_t j = 0, n; j < b->C; j += n) {
    n = b->C - j < RFI_BLOCK ? b->C - j : RFI_BLOCK;
    const int64_t at = first + j;
    float *o = rfi_target(block, &dx, at);
    b->kind->dx(o, dy + j, w + j, x + j, k, n);
    rfi_flush(o, &dx, at, n);
    if (residual->data) {
      if (o == block) rfi_read(block, &dx, at, 1, n); /* rounded */
      rfi_norm_add(o, rfi_read(other, residual, row * b->C + j, 1, n), n);
      rfi_flush(o, &dx, at, n);
    }
    if (sum) rfi_norm_add(sum + j, rfi_read(other, &dx, at, 1, n), n);
  }
}

static inline void rfi_norm_rows_part(const rfi_call *call, int64_t begin, int64_t end, int part) {
  const rfi_norm_bwd *b = (const rfi_norm_bwd *)call;
  const rfi_norm_kind *kind = b->kind;
  int64_t C = b->C;
  float *space = b->sums + C * (kind->vectors * b->chunks + rfi_norm_rows(kind) * part), k[RFI_NORM_SCALARS];
  const float *w = rfi_read(space, &call->in[2], 0, 1, C);
  const bool want_dw = call->out[1].data, want_db = kind->vectors > 1 && call->out[2].data;
  const bool want_sum = kind->vectors > 1 && call->out[3].data;
  for (int64_t chunk = begin; chunk < end; chunk++) {
    float *dw = b->sums + chunk * C, *db = dw + b->chunks * C, *sum = want_sum ? db + b->chunks * C : NULL;
    int64_t first = chunk * RFI_COLUMN_ROWS, last = first + RFI_COLUMN_ROWS;
    if (want_dw) memset(dw, 0, (size_t)C * sizeof *dw);
    if (want_db) memset(db, 0, (size_t)C * sizeof *db);
    if (want_sum) memset(sum, 0, (size_t)C * sizeof *sum);
    for (int64_t row = first; row < last && row < b->rows; row++) {
      const float *dy = rfi_read(space + C, &call->in[0], row * C, 1, C);
      const float *x = rfi_read(space + 2 * C, &call->in[1], row * C, 1, C);
      kind->scalars(call, row, dy, w, x, C, k);
      if (call->out[0].data || want_sum) rfi_norm_dx_row(b, row, dy, w, x, k, space + 3 * C, sum);
      if (want_dw) kind->dw(dw, dy, x, k, C);
      if (want_db) rfi_norm_add(db, dy, C);
    }
  }
}

/* The acc operands are added in f64, as in the separate ops. */
static inline void rfi_norm_columns_part(const rfi_call *call, int64_t begin, int64_t end, int part) {
  const rfi_norm_bwd *b = (const rfi_norm_bwd *)call;
  int64_t C = b->C, last = end * RFI_COLUMN_UNIT < C ? end * RFI_COLUMN_UNIT : C;
  (void)part;
  for (int v = 0; v < b->kind->vectors; v++) {
    float *y = call->out[1 + v].data;
    const float *acc = call->in[b->kind->residual + 1 + v].data;
    for (int64_t j = begin * RFI_COLUMN_UNIT, n; y && j < last; j += n) {
      double total[RFI_BLOCK] = {0};
      n = last - j < RFI_BLOCK ? last - j : RFI_BLOCK;
      rfi_sum_chunks(b->sums + v * b->chunks * C + j, b->chunks, C, n, total);
      for (int64_t i = 0; i < n && acc; i++) total[i] += acc[j + i];
      for (int64_t i = 0; i < n; i++) y[j + i] = (float)total[i];
    }
  }
}

static inline rfr_status rfi_norm_bwd_run(const rfi_call *c, const rfi_norm_kind *kind) {
  RFI_TRY(rfi_check_floats(c));
  rfi_norm_bwd b = rfi_norm_bwd_make(c, kind);
  rfi_parallel(&b.call, b.chunks, rfi_norm_bwd_cost(&b), rfi_norm_rows_part);
  rfi_parallel(&b.call, rfi_column_units(b.C), b.chunks * RFI_COLUMN_UNIT, rfi_norm_columns_part);
  return RFR_OK;
}

#endif
