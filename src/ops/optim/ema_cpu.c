/* SPDX-License-Identifier: Apache-2.0
 *
 * The moving average of a weight on the CPU, in place, one pass over memory, and its value as a weight.
 */
#include "backend/cpu/cpu.h"
#include "ops/optim/ema.h"
#include "ops/walk.h"

enum { STRIP = 256 };

static void average_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const int64_t applied = ((const int64_t *)c->in[3].data)[1];
  const float share = rfi_ema_share(c->attr[0].f, c->attr[1].i, (int)c->attr[2].i, applied);
  float *average = c->in[0].data, wb[STRIP];
  (void)part;
  for (int64_t i = begin; i < end; i += STRIP) {
    const int64_t n = end - i < STRIP ? end - i : STRIP;
    const float *w = rfi_read(wb, &c->in[1], i, 1, n);
    float *a = average + i;
    if (share == 1) memcpy(a, w, (size_t)n * sizeof *a); /* exact; a + (w - a) is not */
    else
      for (int64_t j = 0; j < n; j++) a[j] += share * (w[j] - a[j]);
  }
}

static rfr_status ema_run(const rfi_call *c) {
  if (c->in[2].data && *(const int32_t *)c->in[2].data) return RFR_OK;
  rfi_parallel(c, rfi_count(&c->in[0].type), 2, average_part);
  return RFR_OK;
}

static void same_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  if (y[0] != x[0]) memmove(y[0], x[0], (size_t)n * sizeof(float));
}

static void weight_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_map(c, begin, end, 1, same_block);
}

static rfr_status weight_run(const rfi_call *c) {
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 2, weight_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(ema) = {ema_run, NULL};
const rfi_kernel RFI_CPU(ema_weight) = {weight_run, NULL};
