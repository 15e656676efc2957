/* SPDX-License-Identifier: Apache-2.0
 *
 * scale_update on the CPU: slot by slot. An amax is compared as a bit pattern; one that is not finite is ignored, and a
 * step without an amax leaves a slot as it is, so that a tensor that is quantized seldom keeps its history.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/quant/scaling.h"

enum { HISTORY, SCALE, SKIP, AMAX };

static float newest_of(const rfi_call *c, int64_t slot) {
  uint32_t most = 0;
  for (int i = AMAX; i < c->n_in; i++) {
    const int64_t at = slot - (int64_t)c->attr[3].l.x[i - AMAX];
    if (at < 0 || at >= c->in[i].type.shape[0]) continue;
    const uint32_t u = rfi_magnitude(((const float *)c->in[i].data)[at]);
    if (u < RFI_F32_INFINITE && u > most) most = u;
  }
  return rfi_number(most);
}

static rfr_status run(const rfi_call *c) {
  const int64_t H = c->in[HISTORY].type.shape[0], S = c->in[HISTORY].type.shape[1];
  const float largest = ldexpf(rfi_largest((rfr_dtype)c->attr[0].i), -(int)c->attr[1].i);
  float *history = c->out[0].data, *scale = c->out[1].data;
  if (c->in[SKIP].data && *(const int32_t *)c->in[SKIP].data != 0) return RFR_OK;
  for (int64_t s = 0; s < S; s++) {
    float amax = newest_of(c, s);
    if (!(amax > 0)) continue;
    for (int64_t h = H - 1; h > 0; h--) history[h * S + s] = history[(h - 1) * S + s];
    history[s] = amax;
    for (int64_t h = 1; h < H && !c->attr[2].i; h++) amax = history[h * S + s] > amax ? history[h * S + s] : amax;
    scale[s] = rfi_scale_of(rfi_magnitude(amax), largest, RFI_F32_LARGEST, 0);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(scale_update) = {run, NULL};
