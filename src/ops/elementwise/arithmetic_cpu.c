/* SPDX-License-Identifier: Apache-2.0
 *
 * add, accumulate, mul and scale on the CPU; memory-bound: one pass, blocks in the L1 cache, and no copy of an expanded
 * operand (stride 0).
 */
#include "backend/cpu/cpu.h"
#include "ops/walk.h"

static void add_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *a = x[0], *b = x[1];
  float *o = y[0];
  for (int64_t j = 0; j < n; j++) o[j] = a[j] + b[j];
}
static void mul_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  const float *a = x[0], *b = x[1];
  float *o = y[0];
  for (int64_t j = 0; j < n; j++) o[j] = a[j] * b[j];
}
static void scale_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)i;
  const float *a = x[0];
  float *o = y[0], by = (float)c->attr[0].f;
  if (c->n_in > 1 && c->in[1].data) by = (float)(c->attr[0].f * *(const float *)c->in[1].data);
  for (int64_t j = 0; j < n; j++) o[j] = a[j] * by;
}

static void add_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 2, add_block);
}
static void mul_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 2, mul_block);
}
static void scale_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 1, scale_block);
}

static rfr_status run(const rfi_call *c, rfi_part_fn part) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 1, part);
  return RFR_OK;
}
static rfr_status run_add(const rfi_call *c) { return run(c, add_part); }
static rfr_status run_mul(const rfi_call *c) { return run(c, mul_part); }
static rfr_status run_scale(const rfi_call *c) { return run(c, scale_part); }

const rfi_kernel RFI_CPU(add) = {run_add, NULL};
const rfi_kernel RFI_CPU(accumulate) = {run_add, NULL}; /* in place: a block is read before it is written */
const rfi_kernel RFI_CPU(mul) = {run_mul, NULL};
const rfi_kernel RFI_CPU(scale) = {run_scale, NULL};
