/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize and matmul_scaled: E4M3 with one scale per tensor, computed from the tensor itself ("current scaling").
 *
 *   amax = max |x|,  scale = 448 / amax,  row = E4M3(x * scale),  scale_inv = 1 / scale
 *
 * scale is 1 if amax is 0, infinite or NaN, and the largest f32 if the quotient overflows. The formula is that of
 * TransformerEngine's recipe of this name, with its default settings.
 *
 * Tensor cores multiply FP8 in one layout only, y = a bT with both operands contiguous along the reduction. So dx = dy
 * w needs wT, and dw = dyT x needs dyT and xT: each is the result `col` of the quantize op whose `row` the other GEMM
 * reads. Unused results are pruned one by one, so frozen weights need no special case: without dw, xT and dyT are not
 * computed, and without dx, wT is not. The rounding has the gradient of the identity, the scale has none.
 */
#include "ops/op_index.h"
#include "ops/rule.h"

enum { ROW, COL, SCALE_INV }; /* results of quantize */

/* ---- shapes ---- */

static bool is_wide(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

rfr_status rfi_infer_quantize(const rfi_infer *c) {
  const rfr_type *x = &c->in[0];
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  if (!is_wide(x->dtype)) return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, not f32, bf16 or f16", rfr_dtype_name(x->dtype));
  c->out[ROW] = (rfr_type){.dtype = RFR_E4M3, .rank = 2, .shape = {x->shape[0], x->shape[1]}};
  c->out[COL] = (rfr_type){.dtype = RFR_E4M3, .rank = 2, .shape = {x->shape[1], x->shape[0]}};
  c->out[SCALE_INV] = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {1}};
  return RFR_OK;
}

rfr_status rfi_infer_matmul_scaled(const rfi_infer *c) {
  const rfr_type scalar = {.dtype = RFR_F32, .rank = 1, .shape = {1}};
  rfr_dtype to = (rfr_dtype)c->attr[0].i;
  for (int i = 0; i < 2; i++) {
    RFI_TRY(rfi_rule_rank(c, i, 2, 2));
    RFI_TRY(rfi_rule_dtype(c, i, RFR_E4M3));
    RFI_TRY(rfi_rule_type(c, 2 + i, &scalar));
  }
  if (!is_wide(to)) return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  int64_t M = c->in[0].shape[0], K = c->in[0].shape[1], N = c->in[1].shape[0];
  if (c->in[1].shape[1] != K)
    return rfi_fail(RFI_E_TRACE_SHAPE, "inner dimensions differ: a gives %lld, b gives %lld", (long long)K,
                    (long long)c->in[1].shape[1]);
  c->out[0] = (rfr_type){.dtype = to, .rank = 2, .shape = {M, N}};
  if (rfi_present(c, 4)) {
    RFI_TRY(rfi_rule_vector(c, 4, N));
    if (!is_wide(c->in[4].dtype)) return rfi_fail(RFI_E_TRACE_SHAPE, "bias must be f32, bf16 or f16");
  }
  return rfi_present(c, 5) ? rfi_rule_type(c, 5, &c->out[0]) : RFR_OK;
}

void rfi_gemm_matmul_scaled(const rfi_infer *c, rfi_gemm_desc *d) {
  const rfr_type *a = &c->in[RFI_IN_matmul_scaled_a], *b = &c->in[RFI_IN_matmul_scaled_b];
  d->tb = true;
  d->M = a->shape[0];
  d->K = a->shape[1];
  d->N = b->shape[0];
  if (rfi_present(c, RFI_IN_matmul_scaled_bias)) d->bias = RFI_IN_matmul_scaled_bias;
  if (rfi_present(c, RFI_IN_matmul_scaled_acc)) d->acc = RFI_IN_matmul_scaled_acc;
}

/* ---- gradients ---- */

rfr_status rfi_grad_quantize(rfi_grad *g) {
  rfr_value row = g->dy[ROW], col = g->dy[COL];
  if (!g->need[0] || (row == RFR_NONE && col == RFR_NONE)) return RFR_OK;
  rfi_emit_begin(g, 0);
  if (col != RFR_NONE) {
    col = rfr_transpose_at(g->t, g->at, col, 0, 1);
    row = row == RFR_NONE ? col : rfr_add_at(g->t, g->at, row, rfi_emit_cast(g, col, rfr_value_type(g->t, row).dtype));
  }
  rfi_emit_end(g, 0, row);
  return rfr_trace_status(g->t);
}

/* The other copy of the quantized tensor v, and the type that it was quantized from. */
static rfr_status transposed(const rfi_grad *g, rfr_value v, rfr_value *other, rfr_dtype *from) {
  rfr_trace *t = g->t;
  const rfi_value *x = &t->values[v];
  if (x->op < 0 || t->ops[x->op].def->code != RFI_OP_quantize)
    return rfi_fail_at(RFI_E_GRAD_NO_RULE, g->at.file ? g->at.file : "", g->at.line,
                       "a matmul_scaled whose operands were not quantized in this trace has no gradient");
  const rfi_opr *q = &t->ops[x->op];
  bool is_row = x->result == ROW;
  *from = t->values[q->in[0]].type.dtype;
  *other = q->out[is_row ? COL : ROW];
  if (*other == RFR_NONE) { /* a pass has dropped it: quantize again */
    rfr_value col, row = rfr_quantize_at(t, g->at, q->in[0], &col, NULL);
    *other = is_row ? col : row;
  }
  return rfr_trace_status(t);
}

static rfr_value product(const rfi_grad *g, rfr_value a, rfr_value b, rfr_value scale_a, rfr_value scale_b,
                         rfr_dtype to) {
  return rfr_matmul_scaled_at(g->t, g->at, a, b, scale_a, scale_b, RFR_NONE, to);
}

/* With y = a bT: da = dy b and db = dyT a. dy is quantized once for both. */
rfr_status rfi_grad_matmul_scaled(rfi_grad *g) {
  const rfi_opr *op = g->op;
  rfr_value dy = g->dy[0], row = RFR_NONE, col = RFR_NONE, scale = RFR_NONE, other;
  rfr_dtype from_a, from_b;
  if (dy == RFR_NONE) return RFR_OK;
  if (g->need[0] || g->need[1]) {
    rfr_set_phase(g->t, g->need[0] ? RFR_PHASE_DGRAD : RFR_PHASE_WGRAD);
    row = rfr_quantize_at(g->t, g->at, dy, &col, &scale);
  }
  if (g->need[0]) {
    rfi_emit_begin(g, 0);
    RFI_TRY(transposed(g, op->in[0], &other, &from_a));
    RFI_TRY(transposed(g, op->in[1], &other, &from_b));
    g->dx[0] = product(g, row, other, scale, op->in[3], g->is_weight[0] ? rfi_emit_dtype(g, 0) : from_a);
  }
  if (g->need[1]) {
    rfi_emit_begin(g, 1);
    RFI_TRY(transposed(g, op->in[1], &other, &from_b));
    RFI_TRY(transposed(g, op->in[0], &other, &from_a));
    g->dx[1] = product(g, col, other, scale, op->in[2], g->is_weight[1] ? rfi_emit_dtype(g, 1) : from_b);
  }
  if (op->in[4] != RFR_NONE && g->need[4]) {
    rfi_attr attr[2] = {rfi_i(0), rfi_i(rfi_emit_dtype(g, 4))};
    rfi_emit_begin(g, 4);
    g->dx[4] = rfi_emit(g, RFI_OP_sum, 1, &dy, attr);
  }
  if (op->in[5] != RFR_NONE && g->need[5]) g->dx[5] = dy;
  rfr_set_phase(g->t, RFR_PHASE_DGRAD);
  return rfr_trace_status(g->t);
}

/* ---- recording ---- */

rfr_value rfr_quantize_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value *col, rfr_value *scale_inv) {
  rfr_value out[3];
  rfi_record(t, at, RFI_OP_quantize, 1, &x, NULL, out);
  if (col) *col = out[COL];
  if (scale_inv) *scale_inv = out[SCALE_INV];
  return out[ROW];
}

rfr_value rfr_matmul_scaled_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b, rfr_value scale_a,
                               rfr_value scale_b, rfr_value bias, rfr_dtype to) {
  rfr_value in[] = {a, b, scale_a, scale_b, bias, RFR_NONE};
  rfi_attr attr = rfi_i(to);
  return rfi_record(t, at, RFI_OP_matmul_scaled, 6, in, &attr, NULL);
}

rfr_value rfr_linear_e4m3_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b) {
  rfr_value scale_x, scale_w, qx = rfr_quantize_at(t, at, x, NULL, &scale_x);
  rfr_value qw = rfr_quantize_at(t, at, w, NULL, &scale_w);
  return rfr_matmul_scaled_at(t, at, qx, qw, scale_x, scale_w, b, rfr_value_type(t, x).dtype);
}
