/* SPDX-License-Identifier: Apache-2.0
 *
 * Shapes of the watch ring, f64 (R,N,RFI_WATCH_SUMS): one entry for each step as in the other rings, of which row 0 has
 * the sequence number and each further row the sums of a watched value. Compile records these ops (watch_values.c).
 */
#include "base/base.h"
#include "ops/ring/watch_sums.h"
#include "trace/trace.h"

static rfr_status check(const rfi_infer *c) {
  const rfr_type *ring = &c->in[0], *step = &c->in[1];
  if (ring->dtype != RFR_F64 || ring->rank != 3 || ring->shape[0] < 1 || ring->shape[1] < 1 ||
      ring->shape[2] != RFI_WATCH_SUMS)
    return rfi_fail(RFI_E_TRACE_SHAPE, "ring must be f64 (R,N,%d)", RFI_WATCH_SUMS);
  if (step->dtype != RFR_I64 || step->rank != 1 || step->shape[0] != 4)
    return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  c->out[0] = *ring;
  return RFR_OK;
}

rfr_status rfi_infer_watch_row(const rfi_infer *c) {
  RFI_TRY(check(c));
  const int64_t row = c->attr[0].i, rows = c->in[0].shape[1];
  const rfr_dtype dtype = c->in[2].dtype;
  if (row < 1 || row >= rows)
    return rfi_fail(RFI_E_TRACE_SHAPE, "row %lld is not between 1 and %lld", (long long)row, (long long)rows - 1);
  if (dtype != RFR_F32 && dtype != RFR_BF16 && dtype != RFR_F16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, not f32, bf16 or f16", rfr_dtype_name(dtype));
  return RFR_OK;
}

rfr_status rfi_infer_watch_end(const rfi_infer *c) { return check(c); }
