/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding: y[t] = table[ids[t]], and the gradient of its table. Ids are data, so a bad id cannot be an error of the
 * program: it reads zeros and gets no gradient.
 */
#include "ops/op_index.h"
#include "ops/rule.h"

rfr_status rfi_infer_embedding(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  RFI_TRY(rfi_rule_dtype(c, 1, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, 1, 1, 1));
  c->out[0] = c->in[0];
  c->out[0].shape[0] = c->in[1].shape[0];
  return RFR_OK;
}

rfr_status rfi_infer_embedding_grad(const rfi_infer *c) {
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  RFI_TRY(rfi_rule_dtype(c, 1, RFR_I32));
  RFI_TRY(rfi_rule_vector(c, 1, c->in[0].shape[0]));
  int64_t rows = c->attr[0].i, bits;
  if (rows < 0 || __builtin_mul_overflow(rows, c->in[0].shape[1], &bits) || __builtin_mul_overflow(bits, 32, &bits))
    return rfi_fail(RFI_E_TRACE_SHAPE, "rows is %lld, negative or too large", (long long)rows);
  c->out[0] = (rfr_type){.dtype = RFR_F32, .rank = 2, .shape = {rows, c->in[0].shape[1]}};
  if (rfi_present(c, 2)) RFI_TRY(rfi_rule_type(c, 2, &c->out[0]));
  return RFR_OK;
}

static double bytes_of(const rfr_type *x) { return x->rank < 0 ? 0 : (double)rfi_bytes(x); }

/* Only the gathered or updated rows of the table are accessed. */
static double rows_of(const rfr_type *table, const rfr_type *like) {
  return (double)rfi_count(like) * rfr_dtype_bits(table->dtype) / 8;
}

double rfi_bytes_embedding(const rfi_infer *c) {
  const rfr_type *table = &c->in[RFI_IN_embedding_table], *y = &c->out[RFI_OUT_embedding_y];
  const double ids = bytes_of(&c->in[RFI_IN_embedding_ids]);
  return ids + (y->rank < 0 ? bytes_of(table) : rows_of(table, y) + bytes_of(y));
}

double rfi_bytes_embedding_grad(const rfi_infer *c) {
  const rfr_type *dy = &c->in[RFI_IN_embedding_grad_dy], *dtable = &c->out[RFI_OUT_embedding_grad_dtable];
  const double read = bytes_of(dy) + bytes_of(&c->in[RFI_IN_embedding_grad_ids]);
  if (!rfi_present(c, RFI_IN_embedding_grad_acc)) return read + bytes_of(dtable);
  return read + (dtable->rank < 0 ? 1 : 2) * rows_of(&c->in[RFI_IN_embedding_grad_acc], dy);
}

rfr_status rfi_grad_embedding(rfi_grad *g) {
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_attr rows = rfi_i(rfr_value_type(g->t, g->op->in[0]).shape[0]);
  rfr_value in[2] = {g->dy[0], g->op->in[1]};
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_embedding_grad, 2, in, &rows));
  return g->t->status;
}

rfr_value rfr_embedding_at(rfr_trace *t, rfr_source at, rfr_value table, rfr_value ids) {
  return rfi_record(t, at, RFI_OP_embedding, 2, (rfr_value[]){table, ids}, NULL, NULL);
}
