/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings between the host and the step: shapes and recording calls.
 *
 * A ring has R entries; step number `attempted` uses entry attempted mod R, so that values that change per step are
 * read from device memory and a captured step needs no argument. The host refills an input entry only after it has
 * read, in the metrics ring, the sequence number of the step that used it.
 */
#include "base/base.h"
#include "trace/trace.h"

enum { MAX_METRICS = 31 };

static bool is_step_block(const rfr_type *t) { return t->dtype == RFR_I64 && t->rank == 1 && t->shape[0] == 4; }

rfr_status rfi_infer_ring_read(const rfi_infer *c) {
  const rfr_type *ring = &c->in[0];
  if (ring->rank < 1 || ring->shape[0] < 1) return rfi_fail(RFI_E_TRACE_SHAPE, "a ring needs at least one entry");
  if (rfr_dtype_bits(ring->dtype) % 8 != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "elements of a ring must be at least a byte");
  if (!is_step_block(&c->in[1])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  rfr_type *x = &c->out[0];
  *x = (rfr_type){.dtype = ring->dtype, .rank = ring->rank > 1 ? ring->rank - 1 : 1, .shape = {1}};
  for (int d = 1; d < ring->rank; d++) x->shape[d - 1] = ring->shape[d];
  return RFR_OK;
}

rfr_status rfi_infer_metrics_write(const rfi_infer *c) {
  const rfr_type *ring = &c->in[0];
  const int n = c->n_in - 2;
  const rfr_type *last = n > 0 ? &c->in[1 + n] : NULL;
  const bool vector = last && last->rank == 1 && last->dtype == RFR_F32;
  const int64_t width = vector ? n + last->shape[0] : 1 + n;
  if (n > MAX_METRICS) return rfi_fail(RFI_E_TRACE_SHAPE, "%d metrics; at most %d are allowed", n, MAX_METRICS);
  if (ring->dtype != RFR_F64 || ring->rank != 2 || ring->shape[0] < 1 || ring->shape[1] != width)
    return rfi_fail(RFI_E_TRACE_SHAPE, "ring must be f64 (R,%lld) for %d metrics", (long long)width, n);
  if (!is_step_block(&c->in[1])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  for (int i = 0; i < n; i++) {
    const rfr_type *v = &c->in[2 + i];
    if (vector && v == last) continue;
    if (v->rank != 1 || v->shape[0] != 1 || (v->dtype != RFR_F32 && v->dtype != RFR_I32 && v->dtype != RFR_I64))
      return rfi_fail(RFI_E_TRACE_SHAPE, "metric %d is not a scalar (1) of f32, i32 or i64", i);
  }
  c->out[0] = *ring;
  return RFR_OK;
}

rfr_value rfr_ring_read_at(rfr_trace *t, rfr_source at, rfr_value ring, rfr_value step) {
  return rfi_record(t, at, RFI_OP_ring_read, 2, (rfr_value[]){ring, step}, NULL, NULL);
}

rfr_value rfr_metrics_write_at(rfr_trace *t, rfr_source at, rfr_value ring, rfr_value step, int n,
                               const rfr_value *values) {
  rfr_value in[2 + MAX_METRICS] = {ring, step};
  if (n < 0 || n > MAX_METRICS || (n > 0 && !values))
    return rfi_trace_fail(t, at, "metrics_write", RFI_E_ARGUMENT, "%d metrics; at most %d are allowed", n, MAX_METRICS);
  for (int i = 0; i < n; i++) in[2 + i] = values[i];
  return rfi_record(t, at, RFI_OP_metrics_write, 2 + n, in, NULL, NULL);
}
