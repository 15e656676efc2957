/* SPDX-License-Identifier: Apache-2.0
 *
 * rope, rope_table and positions on the CPU.
 *
 * A row's sines and cosines are computed once and used by all its heads. Angles are double: in f32, position 10^6 would
 * leave no fractional digit. The workspace has the frequencies, and for each part one row's table and the row itself in
 * f32.
 */
#include "backend/cpu/cpu.h"
#include "ops/embed/rope.h"
#include "ops/walk.h"

static void fill_tables(float *sine, float *cosine, const double *frequency, double position, int64_t n) {
  for (int64_t d = 0; d < n; d++) rfi_sincosf(position * frequency[d], &sine[d], &cosine[d]);
}
static void scale_tables(float *sine, float *cosine, float by, int64_t n) {
  for (int64_t d = 0; d < n; d++) sine[d] *= by, cosine[d] *= by;
}
static void turn(float *y, const float *x, const float *sine, const float *cosine, int64_t half) {
#pragma omp simd
  for (int64_t d = 0; d < half; d++) {
    float a = x[d], b = x[half + d];
    y[d] = a * cosine[d] - b * sine[d];
    y[half + d] = b * cosine[d] + a * sine[d];
  }
}

/* All heads of row t, contiguous. */
static const float *read_row(float *row, const rfi_arg *x, int64_t t) {
  int64_t H = x->type.shape[1], D = x->type.shape[2], from = t * x->stride[0];
  if (x->stride[2] == 1 && (H == 1 || x->stride[1] == D)) return rfi_read(row, x, from, 1, H * D);
  for (int64_t h = 0; h < H; h++) {
    const float *head = rfi_read(row + h * D, x, from + h * x->stride[1], x->stride[2], D);
    if (head != row + h * D) memcpy(row + h * D, head, (size_t)D * sizeof *row);
  }
  return row;
}

/* Floats per part: sines and cosines, a row of x and one of y. */
static int64_t part_floats(const rfi_call *c) { return (1 + 2 * c->in[0].type.shape[1]) * c->in[0].type.shape[2]; }

static void rotate_rows(const rfi_call *c, const rfi_rotation *r, int64_t begin, int64_t end, int part) {
  const rfi_arg *x = &c->in[0], *y = &c->out[0];
  int64_t H = x->type.shape[1], D = x->type.shape[2], half = r->pairs;
  const double *frequency = c->workspace;
  float *sine = (float *)(frequency + D / 2) + part * part_floats(c), *cosine = sine + half;
  float *from = sine + D, *to = from + H * D;
  for (int64_t t = begin; t < end; t++) {
    double position = ((const int32_t *)c->in[1].data)[t * c->in[1].stride[0]];
    fill_tables(sine, cosine, frequency, r->inverse ? -position : position, half);
    if (r->scale != 1.0f) scale_tables(sine, cosine, r->scale, half);
    const float *row = read_row(from, x, t);
    float *turned = rfi_target(to, y, t * H * D);
    for (int64_t h = 0; h < H; h++) {
      turn(turned + h * D, row + h * D, sine, cosine, half);
      if (2 * half < D) memcpy(turned + h * D + 2 * half, row + h * D + 2 * half, (size_t)(D - 2 * half) * sizeof *row);
    }
    rfi_flush(turned, y, t * H * D, H * D);
  }
}
static void rope_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_rotation r = rfi_rope_rotation(c);
  rotate_rows(c, &r, begin, end, part);
}
static void rope_table_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_rotation r = rfi_rope_table_rotation(c);
  rotate_rows(c, &r, begin, end, part);
}

static int64_t row_cost(const rfi_call *c) { return (c->in[0].type.shape[1] + 2) * c->in[0].type.shape[2]; }

static size_t rope_workspace(const rfi_call *c) {
  int64_t half = c->in[0].type.shape[2] / 2, parts = rfi_parts(c, c->in[0].type.shape[0], row_cost(c));
  return (size_t)half * sizeof(double) + (size_t)(parts * part_floats(c)) * sizeof(float);
}
static rfr_status rotate(const rfi_call *c, rfi_rotation r, rfi_part_fn part) {
  RFI_TRY(rfi_check_floats(c));
  double *frequency = c->workspace;
  if (rfi_arg_count(&c->out[0]) == 0) return RFR_OK;
  for (int64_t d = 0; d < r.pairs; d++) frequency[d] = rfi_rotation_frequency(&r, d);
  rfi_parallel(c, c->in[0].type.shape[0], row_cost(c), part);
  return RFR_OK;
}
static rfr_status run_rope(const rfi_call *c) { return rotate(c, rfi_rope_rotation(c), rope_part); }
static rfr_status run_rope_table(const rfi_call *c) { return rotate(c, rfi_rope_table_rotation(c), rope_table_part); }

/* Offsets are data: one below its predecessor counts as equal to it, one above the number of tokens as that number.
 * Rows in no document have position 0. */
static rfr_status run_positions(const rfi_call *c) {
  const int32_t *offsets = c->in[0].data;
  int64_t documents = c->in[0].type.shape[0] - 1, tokens = c->out[0].type.shape[0], begin = 0, end;
  int32_t *y = c->out[0].data;
  if (tokens == 0) return RFR_OK;
  memset(y, 0, (size_t)tokens * sizeof *y);
  for (int64_t d = 0; d <= documents; d++, begin = end) {
    end = offsets[d] > begin ? offsets[d] : begin;
    end = end < tokens ? end : tokens;
    for (int64_t t = begin; d > 0 && t < end; t++) y[t] = (int32_t)(t - begin);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(rope) = {run_rope, rope_workspace};
const rfi_kernel RFI_CPU(rope_table) = {run_rope_table, rope_workspace};
const rfi_kernel RFI_CPU(positions) = {run_positions, NULL};
