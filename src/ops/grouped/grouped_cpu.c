/* SPDX-License-Identifier: Apache-2.0
 *
 * Ops around grouped GEMMs, on the CPU: offsets, and the gradients of bias and scale.
 *
 * A bias gradient adds its group's rows as a sum over rows does (columns.h), so the result of a group does not depend
 * on other groups, nor on how groups and columns are split between threads.
 */
#include "backend/cpu/cpu.h"
#include "ops/columns.h"
#include "ops/grouped/grouped.h"

static int64_t integer_at(const rfi_arg *a, int64_t i) {
  return a->type.dtype == RFR_I64 ? ((const int64_t *)a->data)[i] : ((const int32_t *)a->data)[i];
}

static rfr_status run_offsets(const rfi_call *c) {
  const int64_t rows = c->attr[0].i, groups = c->in[0].type.shape[0];
  int32_t *offsets = c->out[0].data, *bad = c->out[1].data;
  int64_t at = 0, first = 0;
  if (offsets) offsets[0] = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t wanted = integer_at(&c->in[0], g), n = wanted < 0 ? 0 : wanted < rows - at ? wanted : rows - at;
    if (n != wanted && !first) first = g + 1;
    at += n;
    if (offsets) offsets[g + 1] = (int32_t)at;
  }
  if (bad) *bad = (int32_t)first;
  return RFR_OK;
}

/* ---- grouped_dbias ---- */

static int64_t blocks_of(int64_t columns) { return (columns + RFI_BLOCK - 1) / RFI_BLOCK; }

static void add_scaled(float *sum, const float *x, float by, int64_t n) {
  for (int64_t j = 0; j < n; j++) sum[j] += x[j] * by;
}
static void add_row(float *sum, const float *x, int64_t n) {
  for (int64_t j = 0; j < n; j++) sum[j] += x[j];
}

/* Sums rows first ... last - 1 of n <= RFI_BLOCK columns. */
static void sum_group(const rfi_call *c, int64_t first, int64_t last, int64_t column, int64_t n, float *total) {
  const rfi_arg *dy = &c->in[0], *scale = &c->in[2];
  const bool scaled = c->n_in > 2 && scale->data;
  float buffer[RFI_BLOCK], chunk[RFI_BLOCK];
  double wide[RFI_BLOCK] = {0};
  for (int64_t r = first; r < last; r += RFI_COLUMN_ROWS) {
    const int64_t end = r + RFI_COLUMN_ROWS < last ? r + RFI_COLUMN_ROWS : last;
    memset(chunk, 0, (size_t)n * sizeof *chunk);
    for (int64_t k = r; k < end; k++) {
      const float *x = rfi_read(buffer, dy, k * dy->stride[0] + column * dy->stride[1], dy->stride[1], n);
      if (scaled) add_scaled(chunk, x, rfi_read1(scale, k * scale->stride[0]), n);
      else add_row(chunk, x, n);
    }
    for (int64_t j = 0; j < n; j++) wide[j] += chunk[j];
  }
  for (int64_t j = 0; j < n; j++) total[j] = (float)wide[j];
}

static void dbias_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *db = &c->out[0];
  const int32_t *offsets = c->in[1].data;
  const int64_t R = c->in[0].type.shape[0], columns = db->type.shape[1], blocks = blocks_of(columns);
  const bool accumulate = c->n_in > 3 && c->in[3].data;
  float total[RFI_BLOCK], old[RFI_BLOCK];
  for (int64_t i = begin; i < end; i++) {
    const int64_t g = i / blocks, column = i % blocks * RFI_BLOCK, at = g * columns + column;
    const int64_t n = columns - column < RFI_BLOCK ? columns - column : RFI_BLOCK;
    const int64_t first = rfi_group_begin(offsets, g, R), last = rfi_group_end(offsets, g, R);
    if (first == last && accumulate) continue;
    sum_group(c, first, last, column, n, total);
    if (accumulate) add_row(total, rfi_read(old, db, at, 1, n), n);
    float *to = rfi_target(total, db, at);
    if (to != total) memcpy(to, total, (size_t)n * sizeof *to);
    rfi_flush(total, db, at, n);
  }
}

static rfr_status run_dbias(const rfi_call *c) {
  const rfr_type *db = &c->out[0].type;
  RFI_TRY(rfi_check_floats(c));
  const int64_t items = db->shape[0] * blocks_of(db->shape[1]);
  if (items) rfi_parallel(c, items, c->in[0].type.shape[0] * db->shape[1] / items, dbias_part);
  return RFR_OK;
}

/* ---- grouped_dscale ---- */

static double dot_row(const rfi_call *c, int64_t row, int64_t group) {
  const rfi_arg *dy = &c->in[0], *bias = &c->in[1];
  const int64_t columns = dy->type.shape[1];
  float buffer[2][RFI_BLOCK];
  double total = 0;
  for (int64_t j = 0, n; j < columns; j += n) {
    n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
    total += rfi_dot(rfi_read(buffer[0], dy, row * dy->stride[0] + j * dy->stride[1], dy->stride[1], n),
                     rfi_read(buffer[1], bias, group * bias->stride[0] + j * bias->stride[1], bias->stride[1], n), n);
  }
  return total;
}

static void dscale_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const int64_t R = c->in[0].type.shape[0], groups = c->in[1].type.shape[0];
  const int32_t *offsets = c->in[2].data;
  int64_t g = 0;
  for (int64_t row = begin; row < end; row++) {
    while (g < groups && row >= rfi_group_end(offsets, g, R)) g++;
    rfi_write1(&c->out[0], row, g < groups ? (float)dot_row(c, row, g) : 0.0f);
  }
}

static rfr_status run_dscale(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, c->in[0].type.shape[0], c->in[0].type.shape[1], dscale_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(splits_to_offsets) = {run_offsets, NULL};
const rfi_kernel RFI_CPU(grouped_dbias) = {run_dbias, NULL};
const rfi_kernel RFI_CPU(grouped_dscale) = {run_dscale, NULL};
