/* SPDX-License-Identifier: Apache-2.0
 *
 * The operands of scaled GEMMs from a weight that is stored in FP8 (rfr_quant fp8): codes and scales are views of its
 * bytes, and the transposed codes are written before the GEMM that reads them. So the weight has one byte per element,
 * and results are bitwise equal to those of the op quantize on the weight's values.
 */
#include "base/base.h"
#include "ops/op_index.h"
#include "ops/rule.h"

rfr_status rfi_infer_bytes_as(const rfi_infer *c) {
  const rfi_shape *shape = &c->attr[RFI_AT_bytes_as_shape].s;
  const rfr_dtype to = (rfr_dtype)c->attr[RFI_AT_bytes_as_to].i;
  const int64_t start = c->attr[RFI_AT_bytes_as_start].i, bits = rfr_dtype_bits(to);
  int64_t end = bits / 8;
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_U8));
  RFI_TRY(rfi_rule_rank(c, 0, 1, 1));
  if (!rfr_dtype_is_float(to)) return rfi_fail(RFI_E_TRACE_SHAPE, "to is %s, not a float", rfr_dtype_name(to));
  if (bits % 8 != 0 || start < 0 || start % (bits / 8) != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "start %lld is not an element of %s", (long long)start, rfr_dtype_name(to));
  if (shape->rank < 0 || shape->rank > RFR_MAX_RANK)
    return rfi_fail(RFI_E_TRACE_SHAPE, "rank is %d; it must be at most %d", shape->rank, RFR_MAX_RANK);
  c->out[0] = (rfr_type){.dtype = to, .rank = shape->rank};
  for (int d = 0; d < shape->rank; d++) {
    if (shape->dim[d] < 0 || __builtin_mul_overflow(end, shape->dim[d], &end))
      return rfi_fail(RFI_E_TRACE_SHAPE, "dimension %d is %lld, or the size overflows", d, (long long)shape->dim[d]);
    c->out[0].shape[d] = shape->dim[d];
  }
  if (__builtin_add_overflow(end, start, &end) || end > c->in[0].shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "x has %lld bytes; the values need %lld", (long long)c->in[0].shape[0],
                    (long long)end);
  return RFR_OK;
}

/* In elements of the result. */
bool rfi_view_bytes_as(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  const rfr_type *y = &c->out[0];
  const int64_t size = rfr_dtype_bits(y->dtype) / 8, at = *offset + c->attr[RFI_AT_bytes_as_start].i;
  int64_t step = 1;
  if (stride[0] != 1 || at % size != 0) return false;
  for (int d = y->rank - 1; d >= 0; d--) {
    y_stride[d] = step;
    step *= y->shape[d];
  }
  *offset = at / size;
  return true;
}

rfr_status rfi_infer_transposed(const rfi_infer *c) {
  const rfr_type *x = &c->in[0];
  RFI_TRY(rfi_rule_rank(c, 0, 2, 3));
  if (rfr_dtype_bits(x->dtype) != 8)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, whose elements do not have one byte", rfr_dtype_name(x->dtype));
  c->out[0] = *x;
  c->out[0].shape[x->rank - 1] = x->shape[x->rank - 2];
  c->out[0].shape[x->rank - 2] = x->shape[x->rank - 1];
  return RFR_OK;
}
