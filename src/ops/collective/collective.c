/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives: shapes, gradients, recording. All ranks record the same program, and the differentiated loss is the sum
 * of the ranks' losses. So the gradient of all_gather is reduce_scatter and vice versa, and those of all_reduce
 * and all_to_all are the same ops.
 */
#include "ops/rule.h"

enum { MOST_RANKS = 1 << 20 };

/* ---- shapes ---- */

static rfr_status check_ranks(const rfi_infer *c) {
  const int64_t ranks = c->attr[0].i;
  return ranks >= 1 && ranks <= MOST_RANKS
             ? RFR_OK
             : rfi_fail(RFI_E_TRACE_SHAPE, "ranks is %lld; it must be 1 to %d", (long long)ranks, (int)MOST_RANKS);
}

static rfr_status check_term(const rfi_infer *c) {
  RFI_TRY(check_ranks(c));
  RFI_TRY(rfi_rule_rank(c, 0, 1, RFR_MAX_RANK));
  RFI_TRY(rfi_rule_float(c, 0));
  if (c->in[0].dtype == RFR_F64)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is f64; a sum over ranks needs f32, bf16 or f16");
  return RFR_OK;
}

rfr_status rfi_infer_all_gather(const rfi_infer *c) {
  RFI_TRY(check_ranks(c));
  RFI_TRY(rfi_rule_rank(c, 0, 1, RFR_MAX_RANK));
  if (rfr_dtype_bits(c->in[0].dtype) % 8 != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, whose elements are smaller than a byte",
                    rfr_dtype_name(c->in[0].dtype));
  c->out[0] = c->in[0];
  if (__builtin_mul_overflow(c->in[0].shape[0], c->attr[0].i, &c->out[0].shape[0]))
    return rfi_fail(RFI_E_OVERFLOW, "the gathered size overflows");
  return RFR_OK;
}

rfr_status rfi_infer_reduce_scatter(const rfi_infer *c) {
  RFI_TRY(check_term(c));
  if (c->in[0].shape[0] % c->attr[0].i != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x has %lld rows, which %lld ranks do not divide", (long long)c->in[0].shape[0],
                    (long long)c->attr[0].i);
  c->out[0] = c->in[0];
  c->out[0].shape[0] /= c->attr[0].i;
  return RFR_OK;
}

rfr_status rfi_infer_all_reduce(const rfi_infer *c) {
  RFI_TRY(check_term(c));
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_all_to_all(const rfi_infer *c) {
  RFI_TRY(check_ranks(c));
  RFI_TRY(rfi_rule_rank(c, 0, 1, RFR_MAX_RANK));
  if (rfr_dtype_bits(c->in[0].dtype) % 8 != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, whose elements are smaller than a byte",
                    rfr_dtype_name(c->in[0].dtype));
  if (c->in[0].shape[0] % c->attr[0].i != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x has %lld rows, which %lld ranks do not divide", (long long)c->in[0].shape[0],
                    (long long)c->attr[0].i);
  c->out[0] = c->in[0];
  return RFR_OK;
}

static rfr_status check_counts(const rfi_infer *c, int i) {
  RFI_TRY(rfi_rule_dtype(c, i, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, i, 1, 1));
  if (c->in[i].shape[0] > 0 && c->in[i].shape[0] % c->attr[0].i == 0) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s has %lld counts; give as many for each of %lld ranks", c->def->operand[i],
                  (long long)c->in[i].shape[0], (long long)c->attr[0].i);
}

rfr_status rfi_infer_all_to_all_rows(const rfi_infer *c) {
  RFI_TRY(rfi_infer_all_to_all(c));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(check_counts(c, 1));
  return check_counts(c, 2);
}

/* ---- gradients ---- */

static rfr_status emit(rfi_grad *g, rfi_opcode code) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, code, 1, &g->dy[0], g->op->attr));
  return g->t->status;
}

rfr_status rfi_grad_all_gather(rfi_grad *g) { return emit(g, RFI_OP_reduce_scatter); }
rfr_status rfi_grad_reduce_scatter(rfi_grad *g) { return emit(g, RFI_OP_all_gather); }
rfr_status rfi_grad_all_reduce(rfi_grad *g) { return emit(g, RFI_OP_all_reduce); }
rfr_status rfi_grad_all_to_all(rfi_grad *g) { return emit(g, RFI_OP_all_to_all); }

/* The gradient exchanges the counts: it sends the rows that were received. */
rfr_status rfi_grad_all_to_all_rows(rfi_grad *g) {
  const rfr_value *in = g->op->in;
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_all_to_all_rows, 3, (rfr_value[]){g->dy[0], in[2], in[1]}, g->op->attr));
  return g->t->status;
}

/* ---- recording ---- */

static rfr_value record(rfr_trace *t, rfr_source at, rfi_opcode code, rfr_value x, int ranks) {
  const rfi_attr attr = rfi_i(ranks);
  return rfi_record(t, at, code, 1, &x, &attr, NULL);
}

rfr_value rfr_all_gather_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks) {
  return record(t, at, RFI_OP_all_gather, x, ranks);
}

rfr_value rfr_reduce_scatter_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks) {
  return record(t, at, RFI_OP_reduce_scatter, x, ranks);
}

rfr_value rfr_all_reduce_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks) {
  return record(t, at, RFI_OP_all_reduce, x, ranks);
}

rfr_value rfr_all_to_all_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks) {
  return record(t, at, RFI_OP_all_to_all, x, ranks);
}

rfr_value rfr_all_to_all_rows_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value sent, rfr_value received,
                                 int ranks) {
  const rfi_attr attr = rfi_i(ranks);
  return rfi_record(t, at, RFI_OP_all_to_all_rows, 3, (rfr_value[]){x, sent, received}, &attr, NULL);
}
