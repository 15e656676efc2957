/* SPDX-License-Identifier: Apache-2.0
 *
 * matmul: y = op(a) op(b) + bias (+ acc), op(x) = x or its transpose; with rank 3 the first dimension is a batch.
 * Shapes, gradient and recording.
 *
 * The gradients are separate matmuls that share operands. dgrad and wgrad each set their own transpose flags instead of
 * moving data, so pruning one of them also frees the operands that only it reads. A bias gradient is the sum over rows.
 */
#include "base/base.h"
#include "ops/op_index.h"
#include "ops/rule.h"

rfr_status rfi_infer_matmul(const rfi_infer *c);
rfr_status rfi_grad_matmul(rfi_grad *g);

static bool is_operand(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

rfr_status rfi_infer_matmul(const rfi_infer *c) {
  const rfr_type *a = &c->in[0], *b = &c->in[1], *bias = &c->in[2], *acc = &c->in[3];
  int ta = (int)c->attr[0].i, tb = (int)c->attr[1].i, r = a->rank;
  rfr_dtype to = (rfr_dtype)c->attr[2].i;
  if (r != b->rank || (r != 2 && r != 3))
    return rfi_fail(RFI_E_TRACE_SHAPE, "a and b must both have rank 2 or 3, got %d and %d", a->rank, b->rank);
  if (!is_operand(a->dtype) || !is_operand(b->dtype) || !is_operand(to))
    return rfi_fail(RFI_E_TRACE_SHAPE,
                    "types must be f32, bf16 or f16, got %s and %s to %s; rfr_matmul_scaled takes quantized ones",
                    rfr_dtype_name(a->dtype), rfr_dtype_name(b->dtype),
                    to < RFR_DTYPE_COUNT ? rfr_dtype_name(to) : "?");
  if (r == 3 && a->shape[0] != b->shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "batches differ: %lld and %lld", (long long)a->shape[0], (long long)b->shape[0]);
  int64_t M = a->shape[ta ? r - 1 : r - 2], K = a->shape[ta ? r - 2 : r - 1];
  int64_t Kb = b->shape[tb ? r - 1 : r - 2], N = b->shape[tb ? r - 2 : r - 1];
  if (K != Kb)
    return rfi_fail(RFI_E_TRACE_SHAPE, "inner dimensions differ: a gives %lld, b gives %lld", (long long)K,
                    (long long)Kb);
  if (c->n_in > 2 && bias->rank >= 0 && (bias->rank != 1 || bias->shape[0] != N || !is_operand(bias->dtype)))
    return rfi_fail(RFI_E_TRACE_SHAPE, "bias must have shape (%lld)", (long long)N);
  rfr_type y = {.dtype = to, .rank = r};
  if (r == 3) y.shape[0] = a->shape[0];
  y.shape[r - 2] = M;
  y.shape[r - 1] = N;
  if (c->n_in > 3 && acc->rank >= 0) {
    bool same = acc->dtype == to && acc->rank == r;
    for (int d = 0; same && d < r; d++) same = acc->shape[d] == y.shape[d];
    if (!same) return rfi_fail(RFI_E_TRACE_SHAPE, "acc must have the type of the result");
  }
  c->out[0] = y;
  return RFR_OK;
}

void rfi_gemm_matmul(const rfi_infer *c, rfi_gemm_desc *d) {
  const rfr_type *a = &c->in[RFI_IN_matmul_a], *b = &c->in[RFI_IN_matmul_b];
  const int r = a->rank;
  d->ta = c->attr[RFI_AT_matmul_ta].i != 0;
  d->tb = c->attr[RFI_AT_matmul_tb].i != 0;
  if (r == 3) d->batch = a->shape[0];
  d->M = a->shape[d->ta ? r - 1 : r - 2];
  d->K = a->shape[d->ta ? r - 2 : r - 1];
  d->N = b->shape[d->tb ? r - 2 : r - 1];
  if (rfi_present(c, RFI_IN_matmul_bias)) d->bias = RFI_IN_matmul_bias;
  if (rfi_present(c, RFI_IN_matmul_acc)) d->acc = RFI_IN_matmul_acc;
}

static rfr_value record(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b, rfr_value bias, int ta, int tb,
                        rfr_dtype to) {
  rfr_value in[3] = {a, b, bias};
  rfi_attr attr[3] = {rfi_i(ta), rfi_i(tb), rfi_i(to)};
  return rfi_record(t, at, RFI_OP_matmul, bias == RFR_NONE ? 2 : 3, in, attr, NULL);
}

/* Begins operand i's gradient and returns its type. */
static rfr_dtype begin(rfi_grad *g, int i) {
  rfi_emit_begin(g, i);
  return rfi_emit_dtype(g, i);
}

/* dy as an operand of the GEMMs: cast to the operands' type if that is narrower, because tensor cores require it. */
static rfr_value as_operand(const rfi_grad *g) {
  const rfr_dtype a = rfr_value_type(g->t, g->op->in[0]).dtype, b = rfr_value_type(g->t, g->op->in[1]).dtype;
  const bool wide = rfr_value_type(g->t, g->dy[0]).dtype == RFR_F32 && a == b && a != RFR_F32;
  return wide && (g->need[0] || g->need[1]) ? rfr_cast_at(g->t, g->at, g->dy[0], a) : g->dy[0];
}

/* With y = op(a) op(b): d op(a) = dy op(b)T and d op(b) = op(a)T dy. For an operand used transposed, the transposed
 * GEMM gives its gradient in the stored layout. */
rfr_status rfi_grad_matmul(rfi_grad *g) {
  const rfi_opr *op = g->op;
  rfr_value a = op->in[0], b = op->in[1], dy = g->dy[0];
  int ta = (int)op->attr[0].i, tb = (int)op->attr[1].i;
  if (dy == RFR_NONE) return RFR_OK;
  const rfr_value d = as_operand(g);
  if (g->need[0]) {
    rfr_dtype to = begin(g, 0);
    g->dx[0] = ta ? record(g->t, g->at, b, d, RFR_NONE, tb, 1, to) : record(g->t, g->at, d, b, RFR_NONE, 0, !tb, to);
  }
  if (g->need[1]) {
    rfr_dtype to = begin(g, 1);
    g->dx[1] = tb ? record(g->t, g->at, d, a, RFR_NONE, 1, ta, to) : record(g->t, g->at, a, d, RFR_NONE, !ta, 0, to);
  }
  if (op->n_in > 2 && op->in[2] != RFR_NONE && g->need[2]) {
    rfr_dtype to = begin(g, 2);
    rfr_value sum = dy;
    for (int left = rfr_value_type(g->t, dy).rank - 1; left > 0; left--) { /* the batch, then rows */
      rfi_attr attr[2] = {rfi_i(0), rfi_i(left > 1 ? RFR_F32 : to)};
      sum = rfi_record(g->t, g->at, RFI_OP_sum, 1, &sum, attr, NULL);
    }
    g->dx[2] = sum;
  }
  if (op->n_in > 3 && op->in[3] != RFR_NONE && g->need[3]) g->dx[3] = dy;
  rfr_set_phase(g->t, RFR_PHASE_DGRAD);
  return rfr_trace_status(g->t);
}

rfr_value rfr_matmul_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b, rfr_value bias, int ta, int tb,
                        rfr_dtype to) {
  return record(t, at, a, b, bias, ta != 0, tb != 0, to);
}

rfr_value rfr_linear_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b) {
  return record(t, at, x, w, b, 0, 1, rfr_value_type(t, x).dtype);
}
