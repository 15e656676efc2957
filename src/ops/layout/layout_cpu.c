/* SPDX-License-Identifier: Apache-2.0
 *
 * pad and concat on the CPU. Both copy operands into windows of the result, which have the result's strides and the
 * operand's shape. Only element sizes matter.
 */
#include "backend/cpu/cpu.h"
#include "ops/walk.h"

/* The window of `y` that starts at `start` along axis and has x's shape. */
static rfi_arg window(const rfi_arg *y, const rfi_arg *x, int64_t axis, int64_t start) {
  rfi_arg w = *y;
  w.type = x->type;
  w.data = (char *)y->data + start * y->stride[axis] * (rfr_dtype_bits(y->type.dtype) / 8);
  return w;
}

static void zero_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  int64_t size = rfr_dtype_bits(c->out[0].type.dtype) / 8;
  memset((char *)c->out[0].data + begin * size, 0, (size_t)((end - begin) * size));
}
static void pad_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_arg w = window(&c->out[0], &c->in[0], c->attr[0].i, c->attr[1].i);
  rfi_copy_part(&w, &c->in[0], begin, end);
}
static rfr_status run_pad(const rfi_call *c) {
  int64_t n = rfi_arg_count(&c->out[0]);
  if (n == 0) return RFR_OK;
  rfi_parallel(c, n, 1, zero_part);
  rfi_parallel(c, rfi_arg_count(&c->in[0]), 1, pad_part);
  return RFR_OK;
}

/* Items are the elements of all operands, in order. */
static void concat_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  int64_t axis = c->attr[0].i, start = 0, first = 0;
  for (int i = 0; i < c->n_in && first < end; i++) {
    const rfi_arg *x = &c->in[i];
    int64_t n = rfi_arg_count(x), from = begin > first ? begin - first : 0, to = end - first < n ? end - first : n;
    rfi_arg w = window(&c->out[0], x, axis, start);
    if (from < to) rfi_copy_part(&w, x, from, to);
    first += n;
    start += x->type.shape[axis];
  }
}
static rfr_status run_concat(const rfi_call *c) {
  int64_t n = rfi_arg_count(&c->out[0]);
  if (n) rfi_parallel(c, n, 1, concat_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(pad) = {run_pad, NULL};
const rfi_kernel RFI_CPU(concat) = {run_concat, NULL};
