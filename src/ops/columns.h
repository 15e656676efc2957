/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over rows, one result per column: bias gradients, norm weight gradients, sum over an axis that is not the last.
 *
 * Rows are added in chunks, each from zero in f32, and the chunks are added in f64. So the error is that of one chunk,
 * however many rows there are, and the accumulators stay in the L1 cache. The work is split over columns, without
 * partial results, or over chunks, whose sums a second loop adds in order. The second way suits operands that an op
 * split over rows has just written: each thread finds its rows in its cache. Results are bitwise equal for both ways,
 * every split and every number of threads.
 */
#ifndef RFI_COLUMNS_H
#define RFI_COLUMNS_H

#include "ops/walk.h"

enum { RFI_COLUMN_UNIT = 16, RFI_COLUMN_ROWS = 32 }; /* one cache line of f32; rows per chunk */

/* Adds row `row` of columns column ... column + n - 1 to sum; n <= RFI_BLOCK. */
typedef void (*rfi_column_fn)(const rfi_call *c, int64_t row, int64_t column, int64_t n, float *sum);

/* total[0 ... n-1] += the columns' sums over all rows. */
static inline void rfi_sum_rows(const rfi_call *c, int64_t rows, int64_t column, int64_t n, double *total,
                                rfi_column_fn add) {
  float chunk[RFI_BLOCK] __attribute__((aligned(64)));
  for (int64_t r = 0; r < rows; r += RFI_COLUMN_ROWS) {
    int64_t end = r + RFI_COLUMN_ROWS < rows ? r + RFI_COLUMN_ROWS : rows;
    memset(chunk, 0, (size_t)n * sizeof *chunk);
    for (int64_t k = r; k < end; k++) add(c, k, column, n, chunk);
    for (int64_t j = 0; j < n; j++) total[j] += chunk[j];
  }
}

static inline int64_t rfi_column_units(int64_t columns) { return (columns + RFI_COLUMN_UNIT - 1) / RFI_COLUMN_UNIT; }

/* Adds column sums of chunks, `stride` floats apart from each other, to total[0 ... n-1], in order. */
static inline void rfi_sum_chunks(const float *chunk, int64_t chunks, int64_t stride, int64_t n, double *total) {
  for (int64_t k = 0; k < chunks; k++)
    for (int64_t j = 0; j < n; j++) total[j] += chunk[k * stride + j];
}

/* y (columns) = the sums, or y + the sums if `accumulate`. The items of a part are units of RFI_COLUMN_UNIT columns. */
static inline void rfi_columns_part(const rfi_call *c, const rfi_arg *y, int64_t rows, int64_t columns, int64_t begin,
                                    int64_t end, bool accumulate, rfi_column_fn add) {
  double total[RFI_BLOCK] __attribute__((aligned(64)));
  float buffer[RFI_BLOCK];
  int64_t last = end * RFI_COLUMN_UNIT < columns ? end * RFI_COLUMN_UNIT : columns;
  for (int64_t j = begin * RFI_COLUMN_UNIT, n; j < last; j += n) {
    n = last - j < RFI_BLOCK ? last - j : RFI_BLOCK;
    memset(total, 0, (size_t)n * sizeof *total);
    rfi_sum_rows(c, rows, j, n, total, add);
    if (accumulate) {
      const float *o = rfi_read(buffer, y, j, 1, n);
      for (int64_t k = 0; k < n; k++) total[k] += o[k];
    }
    float *to = rfi_target(buffer, y, j);
    for (int64_t k = 0; k < n; k++) to[k] = (float)total[k];
    rfi_flush(to, y, j, n);
  }
}

#endif
