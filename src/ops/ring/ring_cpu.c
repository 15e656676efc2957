/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings on the CPU. The last store of a metrics entry is element 0, the step's sequence number, with release order: a
 * host thread that reads it with acquire order and finds attempted + 1 sees all of that step's metrics.
 */
#include <string.h>

#include "backend/cpu/cpu.h"

static int64_t slot_of(const rfi_arg *ring, const rfi_arg *step) {
  int64_t attempted = *(const int64_t *)step->data, slot = attempted % ring->type.shape[0];
  return slot < 0 ? slot + ring->type.shape[0] : slot;
}

static rfr_status read_run(const rfi_call *c) {
  const rfi_arg *x = &c->out[0];
  if (!x->data) return RFR_OK;
  size_t bytes = (size_t)rfi_bytes(&x->type);
  if (bytes) memcpy(x->data, (const char *)c->in[0].data + (size_t)slot_of(&c->in[0], &c->in[1]) * bytes, bytes);
  return RFR_OK;
}

static double scalar(const rfi_arg *v) {
  switch (v->type.dtype) {
    case RFR_I32: return *(const int32_t *)v->data;
    case RFR_I64: return (double)*(const int64_t *)v->data;
    default: return *(const float *)v->data;
  }
}

static rfr_status write_run(const rfi_call *c) {
  double *row = (double *)c->in[0].data + slot_of(&c->in[0], &c->in[1]) * c->in[0].type.shape[1];
  double sequence = (double)(*(const int64_t *)c->in[1].data + 1);
  const int last = c->n_in - 1;
  for (int i = 2; i < last; i++) row[i - 1] = scalar(&c->in[i]);
  if (last >= 2 && c->in[last].type.dtype != RFR_F32) row[last - 1] = scalar(&c->in[last]);
  for (int64_t k = 0; last >= 2 && c->in[last].type.dtype == RFR_F32 && k < c->in[last].type.shape[0]; k++)
    row[last - 1 + k] = ((const float *)c->in[last].data)[k];
  __atomic_store(&row[0], &sequence, __ATOMIC_RELEASE);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(ring_read) = {read_run, NULL};
const rfi_kernel RFI_CPU(metrics_write) = {write_run, NULL};
