/* SPDX-License-Identifier: Apache-2.0
 *
 * collect_amax and scale_update on the CPU. An amax is compared as a bit pattern; an amax that is not finite is
 * ignored. A step without an amax does not change the slot, so that a tensor that is quantized only in some steps keeps
 * its history.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "ops/op_index.h"
#include "ops/quant/scaling.h"

/* ---- collect_amax ---- */

/* The larger of two magnitudes, as bit patterns, of which `u` counts only if it is finite. */
static uint32_t larger(uint32_t most, uint32_t u) { return u < RFI_F32_INFINITE && u > most ? u : most; }

static rfr_status collect(const rfi_call *c) {
  float *y = c->out[0].data;
  if (!c->in[RFI_IN_collect_amax_onto].data) memset(y, 0, sizeof *y * 2 * (size_t)c->attr[RFI_AT_collect_amax_slots].i);
  for (int i = RFI_IN_collect_amax_amax; i < c->n_in; i++) {
    float *at = y + (int64_t)c->attr[RFI_AT_collect_amax_at].l.x[i - RFI_IN_collect_amax_amax];
    const float *x = c->in[i].data;
    for (int64_t k = 0; k < c->in[i].type.shape[0]; k++)
      *at = rfi_number(larger(rfi_magnitude(*at), rfi_magnitude(x[k])));
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(collect_amax) = {collect, NULL};

/* ---- scale_update ---- */

/* The newest amax of a slot, and the format that it belongs to: 0 for E4M3, 1 for E5M2. */
static float newest_of(const rfi_arg *amax, int64_t slot, int *format) {
  const int64_t rows = amax->type.shape[0], S = amax->type.shape[1];
  uint32_t most = 0;
  for (int64_t r = 0; r < rows; r++) {
    const uint32_t u = larger(most, rfi_magnitude(((const float *)amax->data)[r * S + slot]));
    if (u != most) *format = (int)(r % 2);
    most = u;
  }
  return rfi_number(most);
}

static rfr_status update(const rfi_call *c) {
  const rfi_arg *in = c->in, *skip = &in[RFI_IN_scale_update_skip];
  const int64_t H = in[RFI_IN_scale_update_history].type.shape[0], S = in[RFI_IN_scale_update_history].type.shape[1];
  const int margin = (int)c->attr[RFI_AT_scale_update_margin].i;
  const float largest[2] = {ldexpf(rfi_largest(RFR_E4M3), -margin), ldexpf(rfi_largest(RFR_E5M2), -margin)};
  float *history = c->out[RFI_OUT_scale_update_history1].data, *scale = c->out[RFI_OUT_scale_update_scale1].data;
  if (skip->data && *(const int32_t *)skip->data != 0) return RFR_OK;
  for (int64_t s = 0; s < S; s++) {
    int format = 0;
    float amax = newest_of(&in[RFI_IN_scale_update_amax], s, &format);
    if (!(amax > 0)) continue;
    for (int64_t h = H - 1; h > 0; h--) history[h * S + s] = history[(h - 1) * S + s];
    history[s] = amax;
    for (int64_t h = 1; h < H && !c->attr[RFI_AT_scale_update_newest].i; h++)
      amax = history[h * S + s] > amax ? history[h * S + s] : amax;
    scale[s] = rfi_scale_of(rfi_magnitude(amax), largest[format], RFI_F32_LARGEST, 0);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(scale_update) = {update, NULL};
