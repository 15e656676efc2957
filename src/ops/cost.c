/* SPDX-License-Identifier: Apache-2.0
 *
 * FLOP and bytes of an op. Attention counts the pairs of rows that the causal mask and the window allow. Document
 * offsets are values, not shapes: each document counts as `longest` rows if that is given, else all rows count as one
 * document. In grouped GEMMs every row counts as in a group; a row of cached attention counts the mean over a full
 * text. Bytes count each operand once, as with perfect caches: this compares ops and does not predict time.
 */
#include "ops/cost.h"

#include "ops/decode/cursor.h"

static const rfr_type *type_of(const rfr_trace *t, rfr_value v) { return &t->values[v].type; }

/* Pairs of rows of one document that see each other, per head. */
static double pairs_of(double rows, const rfi_attr *attr) {
  const bool causal = attr[1].i;
  const double window = attr[2].i > 0 && (double)attr[2].i < rows ? (double)attr[2].i : rows;
  /* the first rows see 1, 2, ... window - 1 keys, the others `window` */
  return causal ? rows * window - window * (window - 1) / 2 : rows * rows;
}

/* Pairs of T rows in documents of the greatest allowed length. */
static double most_pairs(double T, const rfi_attr *attr) {
  const double longest = attr[4].i > 0 && (double)attr[4].i < T ? (double)attr[4].i : T;
  return T > 0 ? T / longest * pairs_of(longest, attr) : 0;
}

/* Keys per row of cached attention: the mean over a text that fills the cache. */
static double cached_pairs(const rfr_type *cache, const rfi_attr *attr) {
  const double capacity = (double)cache->shape[0];
  return capacity > 0 ? pairs_of(capacity, attr) / capacity : 0;
}

static double flops_of(const rfr_trace *t, const rfi_opr *op) {
  switch (op->def->code) {
    case RFI_OP_matmul: {
      const rfr_type *a = type_of(t, op->in[0]);
      if (op->out[0] < 0) return 0;
      double k = (double)a->shape[op->attr[0].i ? a->rank - 2 : a->rank - 1];
      return 2 * k * (double)rfi_count(type_of(t, op->out[0]));
    }
    case RFI_OP_lora_matmul: {
      if (op->out[0] < 0) return 0;
      const double k = (double)(type_of(t, op->in[0])->shape[1] + type_of(t, op->in[2])->shape[1]);
      return 2 * k * (double)rfi_count(type_of(t, op->out[0]));
    }
    case RFI_OP_grouped_matmul:
      if (op->out[0] < 0) return 0;
      return 2 * (double)type_of(t, op->in[0])->shape[1] * (double)rfi_count(type_of(t, op->out[0]));
    case RFI_OP_grouped_swiglu: {
      const rfr_type *w = type_of(t, op->in[1]);
      return 2 * (double)type_of(t, op->in[0])->shape[0] * (double)w->shape[1] * (double)w->shape[2];
    }
    case RFI_OP_grouped_wgrad:
      if (op->out[0] < 0) return 0;
      return 2 * (double)type_of(t, op->in[1])->shape[1] * (double)rfi_count(type_of(t, op->in[0]));
    case RFI_OP_matmul_scaled:
    case RFI_OP_grouped_matmul_scaled:
    case RFI_OP_grouped_wgrad_scaled: {
      const rfr_type *a = type_of(t, op->in[0]);
      const bool wgrad = op->def->code == RFI_OP_grouped_wgrad_scaled;
      double terms = (double)(wgrad ? type_of(t, op->in[1])->shape[0] : 1);
      terms *= (double)a->shape[1] * (a->dtype == RFR_U8 ? 2 : 1);
      if (op->out[0] < 0) return 0;
      return 2 * terms * (wgrad ? (double)a->shape[0] : (double)rfi_count(type_of(t, op->out[0])));
    }
    case RFI_OP_linear_cross_entropy: {
      double product = 2 * (double)rfi_count(type_of(t, op->in[0])) * (double)type_of(t, op->in[1])->shape[0];
      return product * (1 + (op->out[1] >= 0) + (op->out[2] >= 0));
    }
    case RFI_OP_attention:
    case RFI_OP_attention_bwd:
    case RFI_OP_attention_bwd_packed: {
      bool forward = op->def->code == RFI_OP_attention;
      const rfr_type *q = type_of(t, op->in[forward ? 0 : 1]);
      double products = forward ? 2 : 5;
      return 2 * products * most_pairs((double)q->shape[0], op->attr) * (double)(q->shape[1] * q->shape[2]);
    }
    case RFI_OP_attention_cached:
      return 2 * 2 * cached_pairs(type_of(t, op->in[1]), op->attr) * (double)rfi_count(type_of(t, op->in[0]));
    default: return op->flops;
  }
}

/* Bytes of operand v. Lookups touch only the rows of a table that they gather or add to. */
static double bytes_of(const rfr_trace *t, const rfi_opr *op, rfr_value v) {
  const rfr_type *x = type_of(t, v);
  const bool gathers = op->def->code == RFI_OP_embedding && v == op->in[0] && op->out[0] >= 0;
  const bool adds = op->def->code == RFI_OP_embedding_grad && op->n_in > 2 && op->in[2] >= 0;
  if (gathers || (adds && (v == op->in[2] || v == op->out[0])))
    return (double)rfi_count(type_of(t, gathers ? op->out[0] : op->in[0])) * rfr_dtype_bits(x->dtype) / 8;
  if (op->def->code == RFI_OP_cache_write && v == op->in[0]) return 0; /* only the rows of x are written to it */
  if (op->def->code == RFI_OP_cache_write && v == op->out[0]) x = type_of(t, op->in[1]);
  return (double)rfi_bytes(x);
}

rfi_cost rfi_op_cost(const rfr_trace *t, const rfi_opr *op) {
  rfi_cost cost = {0, 0};
  if (op->def->flags & RFI_VIEW) return cost;
  cost.flops = flops_of(t, op);
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] >= 0) cost.bytes += bytes_of(t, op, op->in[k]);
  for (int j = 0; j < op->n_out; j++)
    if (op->out[j] >= 0) cost.bytes += bytes_of(t, op, op->out[j]);
  return cost;
}

int rfi_pairs_operand(const rfi_opr *op) {
  switch (op->def->code) {
    case RFI_OP_attention:
    case RFI_OP_attention_cached: return 3;
    case RFI_OP_attention_bwd:
    case RFI_OP_attention_bwd_packed: return 6;
    default: return -1;
  }
}

static double documents_share(const rfi_opr *op, const rfr_type *q, const rfi_arg *offsets) {
  const double T = (double)q->shape[0];
  const int64_t stride = offsets->stride[0];
  const int32_t *at = offsets->data;
  double pairs = 0;
  for (int64_t i = 0; i + 1 < offsets->type.shape[0]; i++) {
    const double rows = (double)at[(i + 1) * stride] - (double)at[i * stride];
    if (rows > 0 && rows <= T) pairs += pairs_of(rows, op->attr);
  }
  return T > 0 ? pairs / most_pairs(T, op->attr) : 1;
}

/* Share of cached attention: the rows that are taken see the text up to their positions. */
static double cached_share(const rfi_opr *op, const rfr_type *q, const rfr_type *cache, const rfi_arg *cursor) {
  const double most = (double)q->shape[0] * cached_pairs(cache, op->attr);
  const rfi_take take = rfi_take_next(cursor, q->shape[0], cache->shape[0]);
  const double before = (double)take.first, after = (double)(take.first + take.count);
  return most > 0 ? (pairs_of(after, op->attr) - pairs_of(before, op->attr)) / most : 1;
}

double rfi_share_of_pairs(const rfi_opr *op, const rfi_call *call, const void *values) {
  rfi_arg decides = call->in[rfi_pairs_operand(op)];
  decides.data = (void *)values;
  if (op->def->code == RFI_OP_attention_cached) return cached_share(op, &call->in[0].type, &call->in[1].type, &decides);
  return documents_share(op, &call->in[op->def->code == RFI_OP_attention ? 0 : 1].type, &decides);
}
