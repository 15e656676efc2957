/* SPDX-License-Identifier: Apache-2.0
 *
 * The watch ring on the CPU. Each part of the elements has sums in the workspace, which are added in the order of
 * parts. The elements of a block are split over LANES independent sums, so that the loop has no chain of additions.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/ring/watch_sums.h"
#include "ops/walk.h"

enum { LANES = 16 };

static double *row_of(const rfi_call *c, int64_t row) {
  const rfi_arg *ring = &c->in[0];
  const int64_t slots = ring->type.shape[0], slot = *(const int64_t *)c->in[1].data % slots;
  return (double *)ring->data + ((slot < 0 ? slot + slots : slot) * ring->type.shape[1] + row) * RFI_WATCH_SUMS;
}

typedef struct lanes {
  double sum[LANES], squares[LANES];
  float max[LANES], least[LANES];
  int32_t zeros[LANES], nans[LANES], infs[LANES]; /* of one block */
} lanes;

/* n <= LANES elements; the others of x are not read. */
static inline void add(lanes *l, const float *x, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; j++) {
    const float size = fabsf(x[j]);
    const int finite = size < INFINITY, zero = size == 0;
    const float counted = finite ? x[j] : 0;
    l->sum[j] += (double)counted;
    l->squares[j] += (double)counted * (double)counted;
    l->max[j] = finite && size > l->max[j] ? size : l->max[j];
    l->least[j] = finite && !zero && size < l->least[j] ? size : l->least[j];
    l->zeros[j] += zero;
    l->nans[j] += x[j] != x[j];
    l->infs[j] += size == INFINITY;
  }
}

static void sums_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_arg *x = &c->in[2];
  double *to = (double *)c->workspace + part * RFI_WATCH_SUMS;
  float buffer[RFI_BLOCK];
  int64_t offset[1], n, zeros = 0, nans = 0, infs = 0;
  lanes l = {.sum = {0}};
  rfi_strided_loop w;
  rfi_strided_loop_init(&w, 1, &x);
  for (int j = 0; j < LANES; j++) l.least[j] = INFINITY;
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    const float *a = rfi_read(buffer, x, offset[0], rfi_strided_loop_stride(&w, 0), n);
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) add(&l, a + k, LANES);
    add(&l, a + k, n - k);
    for (int j = 0; j < LANES; j++) {
      zeros += l.zeros[j], nans += l.nans[j], infs += l.infs[j];
      l.zeros[j] = l.nans[j] = l.infs[j] = 0;
    }
  }
  to[RFI_WATCH_COUNT] = (double)(end - begin);
  to[RFI_WATCH_SUM] = to[RFI_WATCH_SQUARES] = to[RFI_WATCH_MAX] = 0;
  to[RFI_WATCH_LEAST] = INFINITY;
  to[RFI_WATCH_ZEROS] = (double)zeros;
  to[RFI_WATCH_NANS] = (double)nans;
  to[RFI_WATCH_INFS] = (double)infs;
  for (int j = 0; j < LANES; j++) {
    to[RFI_WATCH_SUM] += l.sum[j];
    to[RFI_WATCH_SQUARES] += l.squares[j];
    to[RFI_WATCH_MAX] = fmax(to[RFI_WATCH_MAX], (double)l.max[j]);
    to[RFI_WATCH_LEAST] = fmin(to[RFI_WATCH_LEAST], (double)l.least[j]);
  }
  if (isinf(to[RFI_WATCH_LEAST])) to[RFI_WATCH_LEAST] = 0;
}

static double smaller(double a, double b) { return a == 0 || (b != 0 && b < a) ? b : a; }

static size_t row_workspace(const rfi_call *c) {
  return (size_t)rfi_parts(c, rfi_arg_count(&c->in[2]), 1) * RFI_WATCH_SUMS * sizeof(double);
}

static rfr_status row_run(const rfi_call *c) {
  const int64_t n = rfi_arg_count(&c->in[2]);
  double *row = row_of(c, c->attr[0].i);
  const double *part = c->workspace;
  rfi_parallel(c, n, 1, sums_part);
  for (int p = 0; p < rfi_parts(c, n, 1); p++, part += RFI_WATCH_SUMS)
    for (int k = 0; k < RFI_WATCH_SUMS; k++) {
      if (p == 0 && !c->attr[1].i) row[k] = part[k];
      else if (k == RFI_WATCH_MAX) row[k] = fmax(row[k], part[k]);
      else if (k == RFI_WATCH_LEAST) row[k] = smaller(row[k], part[k]);
      else row[k] += part[k];
    }
  return RFR_OK;
}

static rfr_status end_run(const rfi_call *c) {
  double sequence = (double)(*(const int64_t *)c->in[1].data + 1);
  __atomic_store(row_of(c, 0), &sequence, __ATOMIC_RELEASE);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(watch_row) = {row_run, row_workspace};
const rfi_kernel RFI_CPU(watch_end) = {end_run, NULL};
