/* SPDX-License-Identifier: Apache-2.0
 *
 * Loops of elementwise kernels over operands of any strides and storage type, in blocks of at most RFI_BLOCK elements
 * that the kernel sees as plain f32 arrays.
 *
 * A loop (dims.h) follows the flat order of a dense result; a block never crosses the end of its merged last dimension.
 * A block of dense f32 is the operand's own memory; any other block is converted into a buffer on the stack, which
 * stays in the L1 cache and costs far less than a kernel per storage type would. Results do not depend on where blocks
 * end.
 */
#ifndef RFI_OPS_WALK_H
#define RFI_OPS_WALK_H

#include "base/base.h"
#include "ops/dims.h"
#include "ops/vec.h"

enum { RFI_BLOCK = 512 };

/* ---- blocks ---- */

static inline const char *rfi_element(const rfi_arg *a, int64_t offset) {
  return (const char *)a->data + offset * (rfr_dtype_bits(a->type.dtype) / 8);
}

/* Conversions of a block. Each kernel file has them once and calls them: if they were inlined at every access to a
 * block, they would take two fifths of the compile time of the kernels, and make no kernel faster. */
#define RFI_BLOCK_FN static __attribute__((noinline, unused)) void
RFI_BLOCK_FN rfi_widen_bf16(float *restrict to, const uint16_t *restrict from, int64_t stride, int64_t n) {
  if (stride == 1)
    for (int64_t i = 0; i < n; i++) to[i] = rfi_bf16_to_f32(from[i]);
  else
    for (int64_t i = 0; i < n; i++) to[i] = rfi_bf16_to_f32(from[i * stride]);
}
RFI_BLOCK_FN rfi_widen_f16(float *restrict to, const uint16_t *restrict from, int64_t stride, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = rfi_f16_to_f32(from[i * stride]);
}
RFI_BLOCK_FN rfi_gather_f32(float *restrict to, const float *restrict from, int64_t stride, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = from[i * stride];
}
RFI_BLOCK_FN rfi_narrow_bf16(uint16_t *restrict to, const float *restrict from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = rfi_f32_to_bf16(from[i]);
}
RFI_BLOCK_FN rfi_narrow_f16(uint16_t *restrict to, const float *restrict from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = rfi_f32_to_f16(from[i]);
}

/* Returns n <= RFI_BLOCK elements from `offset` on as f32: the operand's own memory or `buffer`. */
static inline const float *rfi_read(float *buffer, const rfi_arg *a, int64_t offset, int64_t stride, int64_t n) {
  switch (a->type.dtype) {
    case RFR_BF16: rfi_widen_bf16(buffer, (const uint16_t *)a->data + offset, stride, n); break;
    case RFR_F16: rfi_widen_f16(buffer, (const uint16_t *)a->data + offset, stride, n); break;
    default: {
      const float *from = (const float *)a->data + offset;
      if (stride == 1) return from;
      rfi_gather_f32(buffer, from, stride, n);
    }
  }
  return buffer;
}

/* The memory for a block of a dense result; rfi_flush stores it. A block of an unused result is written to the buffer
 * and discarded. */
static inline float *rfi_target(float *buffer, const rfi_arg *a, int64_t offset) {
  return a->data && a->type.dtype == RFR_F32 ? (float *)a->data + offset : buffer;
}
static inline void rfi_flush(const float *block, const rfi_arg *a, int64_t offset, int64_t n) {
  if (!a->data) return;
  if (a->type.dtype == RFR_BF16) rfi_narrow_bf16((uint16_t *)a->data + offset, block, n);
  else if (a->type.dtype == RFR_F16) rfi_narrow_f16((uint16_t *)a->data + offset, block, n);
}

/* One element of a float operand. */
static inline float rfi_read1(const rfi_arg *a, int64_t offset) {
  switch (a->type.dtype) {
    case RFR_BF16: return rfi_bf16_to_f32(((const uint16_t *)a->data)[offset]);
    case RFR_F16: return rfi_f16_to_f32(((const uint16_t *)a->data)[offset]);
    default: return ((const float *)a->data)[offset];
  }
}
static inline void rfi_write1(const rfi_arg *a, int64_t offset, float x) {
  if (!a->data) return;
  if (a->type.dtype == RFR_BF16) ((uint16_t *)a->data)[offset] = rfi_f32_to_bf16(x);
  else if (a->type.dtype == RFR_F16) ((uint16_t *)a->data)[offset] = rfi_f32_to_f16(x);
  else if (a->type.dtype == RFR_F32) ((float *)a->data)[offset] = x;
}

/* Checks that all arguments are f32, bf16 or f16: these kernels would silently truncate f64. */
static inline rfr_status rfi_check_floats(const rfi_call *c) {
  for (int i = 0; i < c->n_in + c->n_out; i++) {
    const rfi_arg *a = i < c->n_in ? &c->in[i] : &c->out[i - c->n_in];
    if (a->data && rfr_dtype_is_float(a->type.dtype) && a->type.dtype != RFR_F32 && a->type.dtype != RFR_BF16 &&
        a->type.dtype != RFR_F16)
      return rfi_fail(RFI_E_BIND_NO_KERNEL, "the CPU kernel computes in f32 and does not support %s",
                      rfr_dtype_name(a->type.dtype));
  }
  return RFR_OK;
}

static inline int64_t rfi_arg_count(const rfi_arg *a) { return rfi_count(&a->type); }

/* ---- loops over strided arguments ---- */

/* The offset of flat element i in each argument. Returns the number of elements up to the end of the row, `end`, or a
 * block. */
static inline int64_t rfi_strided_loop_at(const rfi_strided_loop *w, int64_t i, int64_t end, int64_t *offset) {
  int last = w->rank - 1;
  int64_t rest = i / w->dim[last], at = i % w->dim[last], run = w->dim[last] - at;
  for (int k = 0; k < w->n; k++) offset[k] = at * w->stride[k][last];
  for (int d = last - 1; d >= 0; d--, rest /= w->dim[d + 1])
    for (int k = 0; k < w->n; k++) offset[k] += rest % w->dim[d] * w->stride[k][d];
  run = run < end - i ? run : end - i;
  return run < RFI_BLOCK ? run : RFI_BLOCK;
}
static inline int64_t rfi_strided_loop_stride(const rfi_strided_loop *w, int k) { return w->stride[k][w->rank - 1]; }

/* ---- element by element ---- */

/* Computes n elements from flat element i; x and y are blocks of operands and results. */
typedef void (*rfi_map_fn)(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x);

/* Loops over elements begin ... end - 1 of the results and of the first n_in operands, which all have the first
 * result's shape; results may be slices of a wider tensor. */
static inline void rfi_map(const rfi_call *c, int64_t begin, int64_t end, int n_in, rfi_map_fn fn) {
  const rfi_arg *arg[RFI_STRIDED_LOOP_ARGS];
  float buffer[RFI_STRIDED_LOOP_ARGS][RFI_BLOCK] __attribute__((aligned(64)));
  float *y[RFI_STRIDED_LOOP_ARGS];
  const float *x[RFI_STRIDED_LOOP_ARGS];
  int64_t offset[RFI_STRIDED_LOOP_ARGS], n;
  rfi_strided_loop w;
  for (int k = 0; k < n_in; k++) arg[k] = &c->in[k];
  for (int k = 0; k < c->n_out; k++) arg[n_in + k] = &c->out[k];
  rfi_strided_loop_init(&w, n_in + c->n_out, arg);
  bool scattered = false; /* parts one column wide: the elements of a result are not adjacent */
  for (int k = 0; k < c->n_out; k++) scattered = scattered || rfi_strided_loop_stride(&w, n_in + k) != 1;
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    if (scattered) n = 1;
    for (int k = 0; k < n_in; k++) x[k] = rfi_read(buffer[k], arg[k], offset[k], rfi_strided_loop_stride(&w, k), n);
    for (int k = 0; k < c->n_out; k++) y[k] = rfi_target(buffer[n_in + k], &c->out[k], offset[n_in + k]);
    fn(c, i, n, y, x);
    for (int k = 0; k < c->n_out; k++) rfi_flush(y[k], &c->out[k], offset[n_in + k], n);
  }
}

/* ---- bytes ---- */

/* Copies elements begin ... end - 1 of `from` to `to`: same shape and type, any strides. */
static inline void rfi_copy_part(const rfi_arg *to, const rfi_arg *from, int64_t begin, int64_t end) {
  int64_t size = rfr_dtype_bits(to->type.dtype) / 8, offset[2], n;
  rfi_strided_loop w;
  rfi_strided_loop_init(&w, 2, (const rfi_arg *const[]){to, from});
  int64_t ts = rfi_strided_loop_stride(&w, 0), fs = rfi_strided_loop_stride(&w, 1);
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    char *t = (char *)to->data + offset[0] * size;
    const char *f = (const char *)from->data + offset[1] * size;
    if (ts == 1 && fs == 1) memcpy(t, f, (size_t)(n * size));
    else if (size == 4)
      for (int64_t j = 0; j < n; j++) ((uint32_t *)t)[j * ts] = ((const uint32_t *)f)[j * fs];
    else if (size == 2)
      for (int64_t j = 0; j < n; j++) ((uint16_t *)t)[j * ts] = ((const uint16_t *)f)[j * fs];
    else if (size == 8)
      for (int64_t j = 0; j < n; j++) ((uint64_t *)t)[j * ts] = ((const uint64_t *)f)[j * fs];
    else
      for (int64_t j = 0; j < n; j++) t[j * ts] = f[j * fs];
  }
}

#endif
