/* SPDX-License-Identifier: Apache-2.0
 *
 * cast, copy and fill on the CPU. Casts between f32, bf16 and f16 go block by block through f32; those from or to f64
 * or an integer convert each element through the widest type of its kind, so that only f64 to a 16-bit float rounds
 * twice.
 */
#include "backend/cpu/cpu.h"
#include "ops/walk.h"

static void copy_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  rfi_copy_part(&c->out[0], &c->in[0], begin, end);
}
static void same_block(const rfi_call *c, int64_t i, int64_t n, float *const *y, const float *const *x) {
  (void)c, (void)i;
  if (y[0] != x[0]) memmove(y[0], x[0], (size_t)n * sizeof(float));
}

/* Truncates and saturates; NaN gives 0. The bounds are exact in f64; 2^63 is the first value that is too large. */
static int64_t to_int(double x, bool narrow) {
  if (x != x) return 0;
  if (narrow) return x >= INT32_MAX ? INT32_MAX : x <= INT32_MIN ? INT32_MIN : (int64_t)x;
  return x >= 0x1p63 ? INT64_MAX : x <= -0x1p63 ? INT64_MIN : (int64_t)x;
}

static double get_float(const rfi_arg *a, int64_t i) {
  return a->type.dtype == RFR_F64 ? ((const double *)a->data)[i] : (double)rfi_read1(a, i);
}
static void put_float(const rfi_arg *a, int64_t i, double x) {
  if (a->type.dtype == RFR_F64) ((double *)a->data)[i] = x;
  else rfi_write1(a, i, (float)x);
}
static int64_t get_int(const rfi_arg *a, int64_t i) {
  return a->type.dtype == RFR_I64 ? ((const int64_t *)a->data)[i] : ((const int32_t *)a->data)[i];
}
static void put_int(const rfi_arg *a, int64_t i, int64_t x) {
  if (a->type.dtype == RFR_I64) ((int64_t *)a->data)[i] = x;
  else ((int32_t *)a->data)[i] = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x;
}

static void convert_element(const rfi_arg *to, int64_t i, const rfi_arg *from, int64_t j) {
  bool to_float = rfr_dtype_is_float(to->type.dtype), from_float = rfr_dtype_is_float(from->type.dtype);
  if (to_float && from_float) put_float(to, i, get_float(from, j));
  else if (to_float && to->type.dtype == RFR_F64) put_float(to, i, (double)get_int(from, j));
  else if (to_float) rfi_write1(to, i, (float)get_int(from, j));
  else if (from_float) put_int(to, i, to_int(get_float(from, j), to->type.dtype == RFR_I32));
  else put_int(to, i, get_int(from, j));
}

static bool in_blocks(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

static void cast_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *to = &c->out[0], *from = &c->in[0];
  if (in_blocks(to->type.dtype) && in_blocks(from->type.dtype)) {
    rfi_map(c, begin, end, 1, same_block);
    return;
  }
  rfi_strided_loop w;
  int64_t offset[1], n;
  rfi_strided_loop_init(&w, 1, &from);
  for (int64_t i = begin; i < end; i += n) {
    n = rfi_strided_loop_at(&w, i, end, offset);
    for (int64_t j = 0; j < n; j++) convert_element(to, i + j, from, offset[0] + j * rfi_strided_loop_stride(&w, 0));
  }
}
static rfr_status run_cast(const rfi_call *c) {
  bool same = c->out[0].type.dtype == c->in[0].type.dtype;
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 1, same ? copy_part : cast_part);
  return RFR_OK;
}

static rfr_status run_copy(const rfi_call *c) {
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 1, copy_part);
  return RFR_OK;
}

static void fill_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *y = &c->out[0];
  double value = c->attr[0].f;
  if (y->type.dtype == RFR_F32) {
    float *o = y->data, v = (float)value;
    for (int64_t i = begin; i < end; i++) o[i] = v;
  } else if (y->type.dtype == RFR_BF16 || y->type.dtype == RFR_F16) {
    uint16_t *o = y->data;
    uint16_t v = y->type.dtype == RFR_BF16 ? rfi_f32_to_bf16((float)value) : rfi_f32_to_f16((float)value);
    for (int64_t i = begin; i < end; i++) o[i] = v;
  } else if (y->type.dtype == RFR_F64) {
    double *o = y->data;
    for (int64_t i = begin; i < end; i++) o[i] = value;
  } else {
    for (int64_t i = begin; i < end; i++) put_int(y, i, to_int(value, y->type.dtype == RFR_I32));
  }
}
static rfr_status run_fill(const rfi_call *c) {
  rfi_parallel(c, rfi_arg_count(&c->out[0]), 1, fill_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(cast) = {run_cast, NULL};
const rfi_kernel RFI_CPU(copy) = {run_copy, NULL};
const rfi_kernel RFI_CPU(fill) = {run_fill, NULL};
