/* SPDX-License-Identifier: Apache-2.0
 *
 * Strides and offsets of values, in elements of the value that owns the bytes. A view is a new shape over the bytes of
 * operand 0 and has no kernel; its op's rule gives the strides.
 */
#include <string.h>

#include "trace/trace.h"

void rfi_dense_strides(rfi_value *v) {
  int64_t stride = 1;
  for (int d = v->type.rank - 1; d >= 0; d--) {
    v->stride[d] = stride;
    stride *= v->type.shape[d];
  }
}

bool rfi_is_dense(const rfi_value *v) {
  int64_t stride = 1;
  for (int d = v->type.rank - 1; d >= 0; d--) {
    if (v->type.shape[d] != 1 && v->stride[d] != stride) return rfi_count(&v->type) == 0;
    stride *= v->type.shape[d];
  }
  return true;
}

bool rfi_view(const rfi_op_def *def, const rfi_value *x, const rfi_attr *attr, rfi_value *y) {
  const rfi_infer c = {def, 1, &x->type, attr, &y->type, NULL};
  int64_t stride[RFR_MAX_RANK] = {0}, offset = x->offset;
  if (!def->view(&c, x->stride, stride, &offset)) return false;
  memcpy(y->stride, stride, sizeof stride);
  y->offset = offset;
  y->base = x->base;
  return true;
}
