/* SPDX-License-Identifier: Apache-2.0
 *
 * cast, copy and fill. A cast rounds to nearest even; to an integer it truncates and saturates (NaN gives 0), so that
 * every input is defined. The gradient of a cast is a cast back; for a weight there is none, because its gradient is
 * f32 already.
 */
#include "ops/rule.h"

static bool castable(rfr_dtype d) {
  return d == RFR_F64 || d == RFR_F32 || d == RFR_BF16 || d == RFR_F16 || d == RFR_I64 || d == RFR_I32;
}

rfr_status rfi_infer_cast(const rfi_infer *c) {
  int64_t to = c->attr[0].i;
  if (to < 0 || to >= RFR_DTYPE_COUNT || !castable((rfr_dtype)to) || !castable(c->in[0].dtype))
    return rfi_fail(RFI_E_TRACE_SHAPE, "cannot cast %s to %s", rfr_dtype_name(c->in[0].dtype),
                    to < 0 || to >= RFR_DTYPE_COUNT ? "an unknown type" : rfr_dtype_name((rfr_dtype)to));
  c->out[0] = c->in[0];
  c->out[0].dtype = (rfr_dtype)to;
  return RFR_OK;
}

rfr_status rfi_infer_copy(const rfi_infer *c) {
  if (rfr_dtype_bits(c->in[0].dtype) < 8)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, whose elements are smaller than a byte",
                    rfr_dtype_name(c->in[0].dtype));
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_fill(const rfi_infer *c) {
  int64_t to = c->attr[1].i, bits;
  const rfi_shape *s = &c->attr[2].s;
  if (to < 0 || to >= RFR_DTYPE_COUNT || !castable((rfr_dtype)to))
    return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f64, f32, bf16, f16, i64 or i32");
  if (s->rank < 0 || s->rank > RFR_MAX_RANK)
    return rfi_fail(RFI_E_TRACE_SHAPE, "rank is %d; it must be at most %d", s->rank, RFR_MAX_RANK);
  bits = rfr_dtype_bits((rfr_dtype)to);
  c->out[0].dtype = (rfr_dtype)to;
  c->out[0].rank = s->rank;
  for (int d = 0; d < s->rank; d++) {
    if (s->dim[d] < 0 || __builtin_mul_overflow(bits, s->dim[d] ? s->dim[d] : 1, &bits))
      return rfi_fail(RFI_E_TRACE_SHAPE, "dimension %d is %lld, or the size overflows", d, (long long)s->dim[d]);
    c->out[0].shape[d] = s->dim[d];
  }
  return RFR_OK;
}

static rfr_status identity_gradient(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, g->dy[0]);
  return g->t->status;
}

rfr_status rfi_grad_cast(rfi_grad *g) { return identity_gradient(g); }
rfr_status rfi_grad_copy(rfi_grad *g) { return identity_gradient(g); }

rfr_value rfr_cast_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_dtype to) {
  rfi_attr attr = rfi_i(to);
  return rfi_record(t, at, RFI_OP_cast, 1, &x, &attr, NULL);
}

rfr_value rfr_copy_at(rfr_trace *t, rfr_source at, rfr_value x) {
  return rfi_record(t, at, RFI_OP_copy, 1, &x, NULL, NULL);
}

rfr_value rfr_fill_at(rfr_trace *t, rfr_source at, double value, rfr_dtype dtype, int rank, const int64_t *shape) {
  rfi_attr attr[3] = {rfi_f(value), rfi_i(dtype)};
  if (rank > 0 && !shape) return rfi_trace_fail(t, at, "fill", RFI_E_ARGUMENT, "shape is NULL");
  attr[2].s = (rfi_shape){.rank = rank};
  for (int d = 0; d < rank && d < RFR_MAX_RANK; d++) attr[2].s.dim[d] = shape[d];
  return rfi_record(t, at, RFI_OP_fill, 0, NULL, attr, NULL);
}
