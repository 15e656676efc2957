/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of segments and direct preference optimization on the CPU. Sums are in f64 and in the order of the elements; a
 * segment is on one thread. Offsets are cut to the operand, so that wrong values read and write nothing outside.
 */
#include "backend/cpu/cpu.h"
#include "ops/loss/dpo_pair.h"
#include "ops/walk.h"

enum { BETA, SMOOTHING };

/* Elements of segment s in an operand of `rows`; none if *end <= *begin. */
static void find_segment(const int32_t *offsets, int64_t s, int64_t rows, int64_t *begin, int64_t *end) {
  *begin = offsets[s] > 0 ? offsets[s] : 0;
  *end = offsets[s + 1] < rows ? offsets[s + 1] : rows;
}

static void sum_segments(const rfi_call *c, int64_t first, int64_t last, int part) {
  (void)part;
  const rfi_arg *x = &c->in[0];
  int64_t begin, end;
  for (int64_t s = first; s < last; s++) {
    double sum = 0;
    find_segment(c->in[1].data, s, x->type.shape[0], &begin, &end);
    for (int64_t t = begin; t < end; t++) sum += rfi_read1(x, t);
    ((float *)c->out[0].data)[s] = (float)sum;
  }
}

static rfr_status sum_run(const rfi_call *c) {
  const int64_t segments = c->out[0].type.shape[0];
  if (segments > 0) rfi_parallel(c, segments, c->in[0].type.shape[0] / segments + 1, sum_segments);
  return RFR_OK;
}

static rfr_status sum_bwd_run(const rfi_call *c) {
  const int64_t segments = c->in[0].type.shape[0], rows = c->out[0].type.shape[0];
  int64_t begin, end;
  for (int64_t t = 0; t < rows; t++) rfi_write1(&c->out[0], t, 0);
  for (int64_t s = 0; s < segments; s++) {
    find_segment(c->in[1].data, s, rows, &begin, &end);
    for (int64_t t = begin; t < end; t++) rfi_write1(&c->out[0], t, ((const float *)c->in[0].data)[s]);
  }
  return RFR_OK;
}

static double gain(const rfi_arg *sums, const rfi_arg *reference, int64_t p) {
  return rfi_dpo_gain(rfi_read1(sums, 2 * p), rfi_read1(sums, 2 * p + 1), ((const float *)reference->data)[p]);
}

static rfr_status dpo_run(const rfi_call *c) {
  const int32_t *pairs = c->in[2].data;
  const double beta = c->attr[BETA].f, inv = *(const float *)c->in[3].data;
  double sums[3] = {0};
  for (int64_t p = 0; p < c->in[2].type.shape[0]; p++) {
    if (pairs[p] < 0) continue;
    const double h = gain(&c->in[0], &c->in[1], p);
    sums[0] += rfi_dpo_loss(beta * h, c->attr[SMOOTHING].f);
    sums[1] += beta * h;
    sums[2] += h > 0;
  }
  for (int j = 0; j < 3; j++)
    if (c->out[j].data) *(float *)c->out[j].data = (float)(sums[j] * inv);
  return RFR_OK;
}

static rfr_status dpo_bwd_run(const rfi_call *c) {
  const int32_t *pairs = c->in[3].data;
  const double beta = c->attr[BETA].f;
  const double by = beta * *(const float *)c->in[0].data * *(const float *)c->in[4].data;
  for (int64_t p = 0; c->out[0].data && p < c->in[3].type.shape[0]; p++) {
    double d = 0;
    if (pairs[p] >= 0) d = by * rfi_dpo_slope(beta * gain(&c->in[1], &c->in[2], p), c->attr[SMOOTHING].f);
    rfi_write1(&c->out[0], 2 * p, (float)-d);
    rfi_write1(&c->out[0], 2 * p + 1, (float)d);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(segment_sum) = {sum_run, NULL};
const rfi_kernel RFI_CPU(segment_sum_bwd) = {sum_bwd_run, NULL};
const rfi_kernel RFI_CPU(dpo_loss) = {dpo_run, NULL};
const rfi_kernel RFI_CPU(dpo_loss_bwd) = {dpo_bwd_run, NULL};
