/* SPDX-License-Identifier: Apache-2.0
 *
 * Strides and offsets of values, in elements of the value that owns the bytes. A view is a new shape over the bytes of
 * operand 0 and has no kernel.
 *
 * Only a reshape can have no strides: it may split any dimension, but merge neighbours only if the stride of the outer
 * one equals extent times stride of the inner one.
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

/* Matches groups of dimensions with equal products from the left; the old dimensions of a group must be mergeable into
 * one, which the new ones then divide. */
static bool view_reshape(const rfi_value *x, const rfi_shape *shape, rfi_value *y) {
  int64_t dim[RFR_MAX_RANK], step[RFR_MAX_RANK], stride = 1;
  int n = 0, i = 0, j = 0;
  for (int d = shape->rank - 1; d >= 0; d--) {
    y->stride[d] = stride;
    stride *= shape->dim[d];
  }
  if (stride == 0) return true; /* no elements: any strides are valid */
  for (int d = 0; d < x->type.rank; d++) {
    if (x->type.shape[d] == 1) continue;
    dim[n] = x->type.shape[d];
    step[n++] = x->stride[d];
  }
  while (i < n) {
    int64_t old = dim[i], new = 1;
    int last = i, end = j;
    for (; new != old;) {
      if (new < old && end == shape->rank) return false;
      if (new < old) new *= shape->dim[end++];
      else if (++last == n) return false;
      else old *= dim[last];
    }
    for (int k = i; k < last; k++)
      if (step[k] != step[k + 1] * dim[k + 1]) return false;
    stride = step[last];
    for (int d = end - 1; d >= j; d--) {
      y->stride[d] = stride;
      stride *= shape->dim[d];
    }
    i = last + 1;
    j = end;
  }
  return true;
}

bool rfi_view(const rfi_op_def *def, const rfi_value *x, const rfi_attr *attr, rfi_value *y) {
  int64_t stride[RFR_MAX_RANK];
  memcpy(stride, x->stride, sizeof stride);
  y->base = x->base;
  y->offset = x->offset;
  switch (def->code) {
    case RFI_OP_reshape: return view_reshape(x, &attr[0].s, y);
    case RFI_OP_transpose:
      stride[attr[0].i] = x->stride[attr[1].i];
      stride[attr[1].i] = x->stride[attr[0].i];
      break;
    case RFI_OP_slice: y->offset += attr[1].i * stride[attr[0].i]; break;
    case RFI_OP_expand: stride[attr[0].i] = 0; break;
    default: break; /* detach */
  }
  memcpy(y->stride, stride, sizeof stride);
  return true;
}
