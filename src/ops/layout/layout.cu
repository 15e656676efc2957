/* SPDX-License-Identifier: Apache-2.0
 *
 * pad and concat on a GPU: copies of operands into windows of the result. The rest of a padded result is two
 * rectangles, before and after the window in each row, so that every byte is written once.
 */
#include "ops/elementwise/copy.cuh"

/* The window of `y` that starts at `start` along axis and has x's shape. */
static rfr_arg window(const rfr_arg *y, const rfr_arg *x, int64_t axis, int64_t start, int size) {
  rfr_arg w = *y;
  w.type = x->type;
  w.data = (char *)y->data + start * y->stride[axis] * size;
  return w;
}

/* Zeroes elements `start` ... `end` - 1 of the axis. */
static rfr_status zero(const rfr_call *call, const rfr_arg *y, int64_t axis, int64_t start, int64_t end, int size) {
  int64_t outer = 1;
  for (int d = 0; d < axis; d++) outer *= y->type.shape[d];
  const size_t inner = (size_t)y->stride[axis] * (size_t)size, row = (size_t)y->type.shape[axis] * inner;
  char *from = (char *)y->data + (size_t)start * inner;
  const size_t bytes = (size_t)(end - start) * inner;
  if (bytes == 0 || outer == 0) return RFR_OK;
  if (outer == 1 || bytes == row)
    return rfi_cuda_check(cudaMemsetAsync(from, 0, bytes * (size_t)outer, rfi_stream(call)), "pad");
  return rfi_cuda_check(cudaMemset2DAsync(from, row, 0, bytes, (size_t)outer, rfi_stream(call)), "pad");
}

static rfr_status run_pad(const rfr_call *call) {
  const rfr_arg *x = &call->in[0], *y = &call->out[0];
  const int64_t axis = call->attr[0].i, start = call->attr[1].i, count = call->attr[2].i;
  const int size = rfi_element_bytes(y->type.dtype);
  if (rfi_elements(y) == 0) return RFR_OK;
  rfr_status s = zero(call, y, axis, 0, start, size);
  if (s == RFR_OK) s = zero(call, y, axis, start + x->type.shape[axis], count, size);
  const rfr_arg w = window(y, x, axis, start, size);
  return s == RFR_OK ? rfi_copy(call, &w, x, size, "pad") : s;
}

static rfr_status run_concat(const rfr_call *call) {
  const rfr_arg *y = &call->out[0];
  const int64_t axis = call->attr[0].i;
  const int size = rfi_element_bytes(y->type.dtype);
  rfr_status s = RFR_OK;
  int64_t start = 0;
  if (rfi_elements(y) == 0) return RFR_OK;
  for (int i = 0; i < call->n_in && s == RFR_OK; i++) {
    const rfr_arg w = window(y, &call->in[i], axis, start, size);
    s = rfi_copy(call, &w, &call->in[i], size, "concat");
    start += call->in[i].type.shape[axis];
  }
  return s;
}

extern "C" const rfi_cuda_kernel RFI_CUDA(pad) = {run_pad, NULL, NULL};
extern "C" const rfi_cuda_kernel RFI_CUDA(concat) = {run_concat, NULL, NULL};
