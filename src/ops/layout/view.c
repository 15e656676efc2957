/* SPDX-License-Identifier: Apache-2.0
 *
 * Views: reshape, transpose, slice, expand and detach do not move data.
 *
 * Only a reshape can have no strides: it may split any dimension, but merge adjacent dimensions only if the stride of
 * the outer one equals extent times stride of the inner one. One that strides cannot express is recorded as an explicit
 * copy and a reshape, so that the trace shows its cost. Gradients are the inverse views; a slice gives a pad, an expand
 * gives a sum.
 */

#include <string.h>

#include "ops/op_index.h"
#include "ops/rule.h"

/* ---- shapes ---- */

rfr_status rfi_infer_reshape(const rfi_infer *c) {
  const rfi_shape *s = &c->attr[0].s;
  int64_t n = 1;
  char text[RFI_TYPE_TEXT];
  if (s->rank < 0 || s->rank > RFR_MAX_RANK)
    return rfi_fail(RFI_E_TRACE_SHAPE, "rank is %d; it must be at most %d", s->rank, RFR_MAX_RANK);
  c->out[0].dtype = c->in[0].dtype;
  c->out[0].rank = s->rank;
  for (int d = 0; d < s->rank; d++) {
    c->out[0].shape[d] = s->dim[d];
    if (s->dim[d] < 0 || __builtin_mul_overflow(n, s->dim[d], &n))
      return rfi_fail(RFI_E_TRACE_SHAPE, "dimension %d is %lld, or the size overflows", d, (long long)s->dim[d]);
  }
  if (n == rfi_count(&c->in[0])) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, which is not the %lld elements of the new shape",
                  rfi_type_text(text, &c->in[0]), (long long)n);
}

rfr_status rfi_infer_transpose(const rfi_infer *c) {
  int64_t a = c->attr[0].i, b = c->attr[1].i;
  RFI_TRY(rfi_rule_axis(c, 0, a));
  RFI_TRY(rfi_rule_axis(c, 0, b));
  c->out[0] = c->in[0];
  c->out[0].shape[a] = c->in[0].shape[b];
  c->out[0].shape[b] = c->in[0].shape[a];
  return RFR_OK;
}

rfr_status rfi_infer_slice(const rfi_infer *c) {
  int64_t axis = c->attr[0].i, start = c->attr[1].i, count = c->attr[2].i;
  RFI_TRY(rfi_rule_axis(c, 0, axis));
  int64_t n = c->in[0].shape[axis];
  if (start < 0 || count < 0 || start > n || count > n - start)
    return rfi_fail(RFI_E_TRACE_SHAPE, "start %lld and count %lld, but axis %lld has %lld elements", (long long)start,
                    (long long)count, (long long)axis, (long long)n);
  c->out[0] = c->in[0];
  c->out[0].shape[axis] = count;
  return RFR_OK;
}

rfr_status rfi_infer_expand(const rfi_infer *c) {
  int64_t axis = c->attr[0].i, count = c->attr[1].i, bits = rfr_dtype_bits(c->in[0].dtype);
  RFI_TRY(rfi_rule_axis(c, 0, axis));
  if (c->in[0].shape[axis] != 1 || count < 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "axis %lld has %lld elements, not 1, or the count %lld is negative",
                    (long long)axis, (long long)c->in[0].shape[axis], (long long)count);
  c->out[0] = c->in[0];
  c->out[0].shape[axis] = count;
  for (int d = 0; d < c->out[0].rank; d++)
    if (__builtin_mul_overflow(bits, c->out[0].shape[d] ? c->out[0].shape[d] : 1, &bits))
      return rfi_fail(RFI_E_OVERFLOW, "the expanded size overflows");
  return RFR_OK;
}

rfr_status rfi_infer_detach(const rfi_infer *c) {
  c->out[0] = c->in[0];
  return RFR_OK;
}

/* ---- strides ---- */

/* Matches groups of dimensions with equal products from the left; the old dimensions of a group must be mergeable into
 * one, which the new ones then divide. */
bool rfi_view_reshape(const rfi_infer *c, const int64_t *x_stride, int64_t *y_stride, int64_t *offset) {
  const rfr_type *x = &c->in[0], *y = &c->out[0];
  int64_t dim[RFR_MAX_RANK], step[RFR_MAX_RANK], stride = 1;
  int n = 0, i = 0, j = 0;
  (void)offset;
  for (int d = y->rank - 1; d >= 0; d--) {
    y_stride[d] = stride;
    stride *= y->shape[d];
  }
  if (stride == 0) return true; /* no elements: any strides are valid */
  for (int d = 0; d < x->rank; d++) {
    if (x->shape[d] == 1) continue;
    dim[n] = x->shape[d];
    step[n++] = x_stride[d];
  }
  while (i < n) {
    int64_t old = dim[i], new = 1;
    int last = i, end = j;
    for (; new != old;) {
      if (new < old && end == y->rank) return false;
      if (new < old) new *= y->shape[end++];
      else if (++last == n) return false;
      else old *= dim[last];
    }
    for (int k = i; k < last; k++)
      if (step[k] != step[k + 1] * dim[k + 1]) return false;
    stride = step[last];
    for (int d = end - 1; d >= j; d--) {
      y_stride[d] = stride;
      stride *= y->shape[d];
    }
    i = last + 1;
    j = end;
  }
  return true;
}

bool rfi_view_detach(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  (void)offset;
  memcpy(y_stride, stride, sizeof *stride * (size_t)c->in[0].rank);
  return true;
}

bool rfi_view_transpose(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  const int64_t a = c->attr[RFI_AT_transpose_a].i, b = c->attr[RFI_AT_transpose_b].i;
  rfi_view_detach(c, stride, y_stride, offset);
  y_stride[a] = stride[b];
  y_stride[b] = stride[a];
  return true;
}

bool rfi_view_slice(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  *offset += c->attr[RFI_AT_slice_start].i * stride[c->attr[RFI_AT_slice_axis].i];
  return rfi_view_detach(c, stride, y_stride, offset);
}

bool rfi_view_expand(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset) {
  rfi_view_detach(c, stride, y_stride, offset);
  y_stride[c->attr[RFI_AT_expand_axis].i] = 0;
  return true;
}

/* ---- gradients ---- */

rfr_status rfi_grad_reshape(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfr_type x = rfr_value_type(g->t, g->op->in[0]);
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfr_reshape_at(g->t, g->at, g->dy[0], x.rank, x.shape));
  return g->t->status;
}

rfr_status rfi_grad_transpose(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_transpose, 1, &g->dy[0], g->op->attr));
  return g->t->status;
}

rfr_status rfi_grad_slice(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfr_type x = rfr_value_type(g->t, g->op->in[0]);
  const rfi_attr *a = g->op->attr;
  rfi_attr pad[3] = {a[0], a[1], rfi_i(x.shape[a[0].i])};
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_pad, 1, &g->dy[0], pad));
  return g->t->status;
}

/* A sum over the repeats, in the type that the gradient needs: a weight's gradient is not rounded. */
rfr_status rfi_grad_expand(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfr_type x = rfr_value_type(g->t, g->op->in[0]);
  rfi_emit_begin(g, 0);
  rfi_attr sum[2] = {g->op->attr[0], rfi_i(rfi_emit_dtype(g, 0))};
  rfr_value s = rfi_emit(g, RFI_OP_sum, 1, &g->dy[0], sum);
  rfi_emit_end(g, 0, rfr_reshape_at(g->t, g->at, s, x.rank, x.shape));
  return g->t->status;
}

/* ---- recording ---- */

rfr_value rfr_reshape_at(rfr_trace *t, rfr_source at, rfr_value x, int rank, const int64_t *shape) {
  rfi_attr attr = rfi_i(0);
  if (rank > 0 && !shape) return rfi_trace_fail(t, at, "reshape", RFI_E_ARGUMENT, "shape is NULL");
  attr.s = (rfi_shape){.rank = rank};
  for (int d = 0; d < rank && d < RFR_MAX_RANK; d++) attr.s.dim[d] = shape[d];
  bool legal = rfi_trace_records(t) && x >= 0 && x < t->n_values && rank >= 0 && rank <= RFR_MAX_RANK;
  int64_t count = 1;
  for (int d = 0; legal && d < rank; d++) legal = shape[d] >= 0 && !__builtin_mul_overflow(count, shape[d], &count);
  if (legal && count == rfi_count(&t->values[x].type)) {
    rfi_value y = {.type = {.dtype = t->values[x].type.dtype, .rank = rank}};
    memcpy(y.type.shape, attr.s.dim, sizeof y.type.shape);
    if (!rfi_view(rfi_op_def_get(RFI_OP_reshape), &t->values[x], &attr, &y)) x = rfr_copy_at(t, at, x);
  }
  return rfi_record(t, at, RFI_OP_reshape, 1, &x, &attr, NULL);
}

rfr_value rfr_transpose_at(rfr_trace *t, rfr_source at, rfr_value x, int a, int b) {
  rfi_attr attr[2] = {rfi_i(a), rfi_i(b)};
  return rfi_record(t, at, RFI_OP_transpose, 1, &x, attr, NULL);
}

rfr_value rfr_slice_at(rfr_trace *t, rfr_source at, rfr_value x, int axis, int64_t start, int64_t count) {
  rfi_attr attr[3] = {rfi_i(axis), rfi_i(start), rfi_i(count)};
  return rfi_record(t, at, RFI_OP_slice, 1, &x, attr, NULL);
}

rfr_value rfr_expand_at(rfr_trace *t, rfr_source at, rfr_value x, int axis, int64_t count) {
  rfi_attr attr[2] = {rfi_i(axis), rfi_i(count)};
  return rfi_record(t, at, RFI_OP_expand, 1, &x, attr, NULL);
}

rfr_value rfr_detach_at(rfr_trace *t, rfr_source at, rfr_value x) {
  return rfi_record(t, at, RFI_OP_detach, 1, &x, NULL, NULL);
}
