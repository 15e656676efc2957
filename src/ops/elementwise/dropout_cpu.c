/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout on the CPU. Element e uses word e mod 4 of the draw at block e / 4, for any strides of x and any split: e
 * counts in the order of the dense result. The draws of a block of elements are computed in a separate loop, which
 * vectorizes.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "core/rng.h"
#include "ops/walk.h"

static uint32_t microbatch_of(const rfi_call *c) {
  const int32_t m = c->n_in > 2 && c->in[2].data ? *(const int32_t *)c->in[2].data : c->microbatch;
  return m > 0 ? (uint32_t)m : 0;
}

static void dropout_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  uint32_t word[RFI_BLOCK / 4 + 1][4];
  const int64_t *step = c->in[1].data;
  uint64_t key = rfi_stream_key((uint64_t)step[2], (uint64_t)c->attr[2].i), first = (uint64_t)i / 4;
  uint32_t site = (uint32_t)c->attr[1].i, microbatch = microbatch_of(c);
  uint64_t attempted = (uint64_t)step[0], skip = (uint64_t)i % 4, blocks = (skip + (uint64_t)n + 3) / 4;
  for (uint64_t b = 0; b < blocks; b++) {
    rfi_u32x4 draw = rfi_draw4(key, first + b, site, microbatch, attempted);
    for (int k = 0; k < 4; k++) word[b][k] = draw.v[k];
  }
  /* An element is kept if its draw is at least p 2^32; for an integer, at least the ceiling of that. */
  double p = c->attr[0].f, edge = ceil(p * 0x1p32);
  uint32_t least = edge < 0x1p32 ? (uint32_t)edge : UINT32_MAX, *w = &word[0][skip];
  const float *a = x[0];
  float *o = y[0], by = (float)(1 / (1 - p));
  for (int64_t j = 0; j < n; j++) o[j] = w[j] >= least ? a[j] * by : 0.0f;
}

static void dropout_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 1, dropout_block);
}

static rfr_status run(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 4, dropout_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(dropout) = {run, NULL};
