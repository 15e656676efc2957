/* SPDX-License-Identifier: Apache-2.0
 *
 * sum, max and max_bwd on the CPU, over operands of any strides.
 *
 * Strides decide whether to reduce along the axis (one result at a time) or across it (a block of results at a time):
 * the inner loop has the smaller stride. Threads split the results or, for the row sum of a matrix, the rows at the
 * ends of chunks, so results do not depend on the number of threads. Only a reduction to one scalar splits the
 * elements: each part stores one partial result in the workspace, and these are added in the order of parts.
 */
#include "backend/cpu/cpu.h"
#include "ops/columns.h"

enum reduction { SUM, MAX };
enum { RUN = 128 }; /* elements summed in f32 before the sum is added to an f64 total */

static float larger(float m, float x) { return x > m || x != x ? x : m; } /* NaN if either is */

/* ---- blocks ---- */

static float sum_run(const float *x, int64_t n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t j = 0; j < n; j++) s += x[j];
  return s;
}
static double sum_block(const float *x, int64_t n) {
  double s = 0;
  for (int64_t j = 0; j < n; j += RUN) s += sum_run(x + j, n - j < RUN ? n - j : RUN);
  return s;
}
static float max_block(const float *x, int64_t n) {
  float m = x[0];
  for (int64_t j = 1; j < n; j++) m = larger(m, x[j]);
  return m;
}
static void add_rows(float *sum, const float *x, int64_t n) {
  for (int64_t j = 0; j < n; j++) sum[j] += x[j];
}
static void max_rows(float *m, const float *x, int64_t n) {
  for (int64_t j = 0; j < n; j++) m[j] = larger(m[j], x[j]);
}

/* ---- one axis ---- */

/* The loop over the results in x, in the order of the dense result; k indexes args. */
static void walk_results(rfi_strided_loop *w, int n, const rfi_arg *const *args, const rfi_arg *x, int64_t axis) {
  int64_t stride[RFI_STRIDED_LOOP_ARGS];
  rfi_strided_loop_start(w, n);
  for (int d = 0, r = 0; d < x->type.rank; d++) {
    if (d == axis) continue;
    /* x-shaped arguments have the axis, result-shaped ones do not */
    for (int k = 0; k < n; k++) stride[k] = args[k]->stride[args[k]->type.rank == x->type.rank ? d : r];
    rfi_strided_loop_dim(w, x->type.shape[d], stride);
    r++;
  }
  rfi_strided_loop_end(w);
}

static float along(const rfi_arg *x, int64_t offset, int64_t step, int64_t n, enum reduction kind) {
  float buffer[RFI_BLOCK], result = 0;
  double total = 0;
  for (int64_t j = 0; j < n; j += RFI_BLOCK) {
    int64_t m = n - j < RFI_BLOCK ? n - j : RFI_BLOCK;
    const float *a = rfi_read(buffer, x, offset + j * step, step, m);
    if (kind == SUM) total += sum_block(a, m);
    else result = j ? larger(result, max_block(a, m)) : max_block(a, m);
  }
  return kind == SUM ? (float)total : result;
}

/* n <= RFI_BLOCK results; sums in chunks from zero, as in columns.h. */
static void across(const rfi_arg *x, int64_t offset, int64_t stride, int64_t step, int64_t rows, int64_t n,
                   enum reduction kind, float *total) {
  float buffer[RFI_BLOCK], chunk[RFI_BLOCK];
  double wide[RFI_BLOCK];
  if (kind == MAX) {
    memcpy(total, rfi_read(buffer, x, offset, stride, n), (size_t)n * sizeof *total);
    for (int64_t r = 1; r < rows; r++) max_rows(total, rfi_read(buffer, x, offset + r * step, stride, n), n);
    return;
  }
  memset(wide, 0, (size_t)n * sizeof *wide);
  for (int64_t r = 0; r < rows; r += RFI_COLUMN_ROWS) {
    int64_t end = r + RFI_COLUMN_ROWS < rows ? r + RFI_COLUMN_ROWS : rows;
    memset(chunk, 0, (size_t)n * sizeof *chunk);
    for (int64_t k = r; k < end; k++) add_rows(chunk, rfi_read(buffer, x, offset + k * step, stride, n), n);
    for (int64_t j = 0; j < n; j++) wide[j] += chunk[j];
  }
  for (int64_t j = 0; j < n; j++) total[j] = (float)wide[j];
}

static void axis_part(const rfi_call *c, int64_t begin, int64_t end, enum reduction kind) {
  const rfi_arg *x = &c->in[0], *y = &c->out[0];
  int64_t axis = c->attr[0].i, rows = x->type.shape[axis], step = x->stride[axis], offset[1], n;
  bool accumulate = kind == SUM && c->n_in > 1 && c->in[1].data;
  float total[RFI_BLOCK], old[RFI_BLOCK];
  rfi_strided_loop w;
  walk_results(&w, 1, &x, x, axis);
  int64_t stride = rfi_strided_loop_stride(&w, 0);
  bool inner = step < stride || rfi_arg_count(y) == 1;
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    if (inner)
      for (int64_t j = 0; j < n; j++) total[j] = along(x, offset[0] + j * stride, step, rows, kind);
    else across(x, offset[0], stride, step, rows, n, kind, total);
    if (accumulate) add_rows(total, rfi_read(old, y, i, 1, n), n);
    float *to = rfi_target(total, y, i);
    if (to != total) memcpy(to, total, (size_t)n * sizeof *to);
    rfi_flush(total, y, i, n);
  }
}
static void sum_axis_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  axis_part(c, begin, end, SUM);
}
static void max_axis_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  axis_part(c, begin, end, MAX);
}

/* ---- rows ---- */

/* A sum over the rows of a dense matrix, the gradient of a bias: like `across`, but split over chunks of rows. */
static bool sums_rows(const rfi_call *c) {
  const rfi_arg *x = &c->in[0];
  return c->attr[0].i == 0 && x->type.rank == 2 && x->type.shape[1] > 1 && x->stride[1] == 1 &&
         x->stride[0] == x->type.shape[1];
}
static int64_t chunks_of(const rfi_arg *x) { return (x->type.shape[0] + RFI_COLUMN_ROWS - 1) / RFI_COLUMN_ROWS; }

static void chunks_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[0];
  int64_t rows = x->type.shape[0], columns = x->type.shape[1];
  float buffer[RFI_BLOCK];
  for (int64_t chunk = begin; chunk < end; chunk++) {
    float *sum = (float *)c->workspace + chunk * columns;
    int64_t first = chunk * RFI_COLUMN_ROWS, last = first + RFI_COLUMN_ROWS < rows ? first + RFI_COLUMN_ROWS : rows;
    memset(sum, 0, (size_t)columns * sizeof *sum);
    for (int64_t row = first; row < last; row++)
      for (int64_t j = 0, n; j < columns; j += n) {
        n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
        add_rows(sum + j, rfi_read(buffer, x, row * columns + j, 1, n), n);
      }
  }
}
static void total_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[0], *y = &c->out[0];
  int64_t columns = x->type.shape[1], last = end * RFI_COLUMN_UNIT < columns ? end * RFI_COLUMN_UNIT : columns;
  bool accumulate = c->n_in > 1 && c->in[1].data;
  for (int64_t j = begin * RFI_COLUMN_UNIT, n; j < last; j += n) {
    double wide[RFI_BLOCK] = {0};
    float total[RFI_BLOCK], old[RFI_BLOCK];
    n = last - j < RFI_BLOCK ? last - j : RFI_BLOCK;
    rfi_sum_chunks((const float *)c->workspace + j, chunks_of(x), columns, n, wide);
    for (int64_t k = 0; k < n; k++) total[k] = (float)wide[k];
    if (accumulate) add_rows(total, rfi_read(old, y, j, 1, n), n);
    float *to = rfi_target(total, y, j);
    if (to != total) memcpy(to, total, (size_t)n * sizeof *to);
    rfi_flush(total, y, j, n);
  }
}

/* ---- everything ---- */

static void all_part(const rfi_call *c, int64_t begin, int64_t end, int part, enum reduction kind) {
  const rfi_arg *x = &c->in[0];
  float buffer[RFI_BLOCK];
  double total = 0;
  int64_t offset[1], n;
  rfi_strided_loop w;
  rfi_strided_loop_init(&w, 1, &x);
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    const float *a = rfi_read(buffer, x, offset[0], rfi_strided_loop_stride(&w, 0), n);
    if (kind == SUM) total += sum_block(a, n);
    else total = i == begin ? max_block(a, n) : larger((float)total, max_block(a, n));
  }
  ((double *)c->workspace)[part] = total;
}
static void sum_all_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  all_part(c, begin, end, part, SUM);
}
static void max_all_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  all_part(c, begin, end, part, MAX);
}

static size_t workspace(const rfi_call *c) {
  if (c->attr[0].i != -1) return 0;
  return (size_t)rfi_parts(c, rfi_arg_count(&c->in[0]), 1) * sizeof(double);
}

static size_t sum_workspace(const rfi_call *c) {
  if (!sums_rows(c)) return workspace(c);
  return (size_t)(chunks_of(&c->in[0]) * c->in[0].type.shape[1]) * sizeof(float);
}

static rfr_status run(const rfi_call *c, enum reduction kind) {
  const rfi_arg *x = &c->in[0], *y = &c->out[0];
  RFI_TRY(rfi_check_floats(c));
  if (kind == SUM && sums_rows(c)) {
    int64_t columns = x->type.shape[1];
    rfi_parallel(c, chunks_of(x), RFI_COLUMN_ROWS * columns, chunks_part);
    rfi_parallel(c, rfi_column_units(columns), chunks_of(x) * RFI_COLUMN_UNIT, total_part);
    return RFR_OK;
  }
  if (c->attr[0].i != -1) {
    rfi_parallel(c, rfi_arg_count(y), x->type.shape[c->attr[0].i], kind == SUM ? sum_axis_part : max_axis_part);
    return RFR_OK;
  }
  const double *partial = c->workspace;
  int64_t n = rfi_arg_count(x);
  rfi_parallel(c, n, 1, kind == SUM ? sum_all_part : max_all_part);
  double total = partial[0];
  for (int p = 1; p < rfi_parts(c, n, 1); p++)
    total = kind == SUM ? total + partial[p] : (double)larger((float)total, (float)partial[p]);
  if (kind == SUM && c->n_in > 1 && c->in[1].data) total += rfi_read1(y, 0);
  rfi_write1(y, 0, (float)total);
  return RFR_OK;
}
static rfr_status run_sum(const rfi_call *c) { return run(c, SUM); }
static rfr_status run_max(const rfi_call *c) { return run(c, MAX); }

/* ---- max_bwd ---- */

static bool matches(float x, float y) { return x == y || (x != x && y != y); }

/* The first element that equals the maximum gets the gradient. */
static void max_bwd_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[1], *dx = &c->out[0], *args[4] = {&c->in[0], x, &c->in[2], dx};
  int64_t axis = c->attr[0].i, offset[4], n;
  float bd[RFI_BLOCK], bx[RFI_BLOCK], by[RFI_BLOCK];
  bool found[RFI_BLOCK];
  rfi_strided_loop w;
  walk_results(&w, 4, args, x, axis);
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    const float *dy = rfi_read(bd, args[0], offset[0], rfi_strided_loop_stride(&w, 0), n);
    const float *y = rfi_read(by, args[2], offset[2], rfi_strided_loop_stride(&w, 2), n);
    memset(found, 0, sizeof found);
    for (int64_t k = 0; k < x->type.shape[axis]; k++) {
      const float *a = rfi_read(bx, x, offset[1] + k * x->stride[axis], rfi_strided_loop_stride(&w, 1), n);
      for (int64_t j = 0; j < n; j++) {
        bool hit = !found[j] && matches(a[j], y[j]);
        found[j] |= hit;
        rfi_write1(dx, offset[3] + k * dx->stride[axis] + j * rfi_strided_loop_stride(&w, 3), hit ? dy[j] : 0);
      }
    }
  }
}

static void max_bwd_all(const rfi_call *c) {
  const rfi_arg *x = &c->in[1];
  float buffer[RFI_BLOCK], dy = rfi_read1(&c->in[0], 0), y = rfi_read1(&c->in[2], 0);
  int64_t end = rfi_arg_count(x), offset[1], n;
  bool found = false;
  rfi_strided_loop w;
  rfi_strided_loop_init(&w, 1, &x);
  for (int64_t i = 0; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    const float *a = rfi_read(buffer, x, offset[0], rfi_strided_loop_stride(&w, 0), n);
    for (int64_t j = 0; j < n; j++) {
      bool hit = !found && matches(a[j], y);
      found |= hit;
      rfi_write1(&c->out[0], i + j, hit ? dy : 0);
    }
  }
}

static rfr_status run_max_bwd(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  int64_t axis = c->attr[0].i;
  if (axis == -1) max_bwd_all(c);
  else rfi_parallel(c, rfi_arg_count(&c->in[0]), c->in[1].type.shape[axis], max_bwd_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(sum) = {run_sum, sum_workspace};
const rfi_kernel RFI_CPU(max) = {run_max, workspace};
const rfi_kernel RFI_CPU(max_bwd) = {run_max_bwd, NULL};
