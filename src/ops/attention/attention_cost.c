/* SPDX-License-Identifier: Apache-2.0
 *
 * The work of attention: pairs of rows that the causal mask and the window allow.
 *
 * Document offsets are values, not shapes: each document counts as `longest` rows if that is given, else all rows count
 * as one document. A row of cached attention counts the mean over a full text. Profiles take the share that is left
 * for the offsets or the cursor of a step.
 */
#include "ops/decode/cursor.h"
#include "ops/decode/sequences.h"
#include "ops/op_index.h"
#include "ops/rule.h"

/* All ops of the family have these attributes in this order. */
enum { CAUSAL = RFI_AT_attention_causal, WINDOW = RFI_AT_attention_window, LONGEST = RFI_AT_attention_longest };

/* The number of pairs of rows of one document in which one row attends to the other, per head. */
static double pairs_of(double rows, const rfi_attr *attr) {
  const double window = attr[WINDOW].i > 0 && (double)attr[WINDOW].i < rows ? (double)attr[WINDOW].i : rows;
  /* the first rows attend to 1, 2, ... window - 1 keys, the others `window` */
  return attr[CAUSAL].i ? rows * window - window * (window - 1) / 2 : rows * rows;
}

/* The number of pairs for T rows in documents of the maximum length. */
static double most_pairs(double T, const rfi_attr *attr) {
  const double longest = attr[LONGEST].i > 0 && (double)attr[LONGEST].i < T ? (double)attr[LONGEST].i : T;
  return T > 0 ? T / longest * pairs_of(longest, attr) : 0;
}

/* Keys per row of cached attention: the mean over a text that fills the cache. */
static double cached_pairs(const rfr_type *cache, const rfi_attr *attr) {
  const double capacity = (double)cache->shape[cache->rank - 3];
  return capacity > 0 ? pairs_of(capacity, attr) / capacity : 0;
}

static double flops(const rfr_type *q, const rfi_attr *attr, double gemms) {
  return 2 * gemms * most_pairs((double)q->shape[0], attr) * (double)(q->shape[1] * q->shape[2]);
}

double rfi_flops_attention(const rfi_infer *c) { return flops(&c->in[RFI_IN_attention_q], c->attr, 2); }
double rfi_flops_attention_bwd(const rfi_infer *c) { return flops(&c->in[RFI_IN_attention_bwd_q], c->attr, 5); }
double rfi_flops_attention_bwd_packed(const rfi_infer *c) { return rfi_flops_attention_bwd(c); }
double rfi_flops_attention_cached(const rfi_infer *c) {
  const rfr_type *q = &c->in[RFI_IN_attention_cached_q], *cache = &c->in[RFI_IN_attention_cached_k];
  return 2 * 2 * cached_pairs(cache, c->attr) * (double)rfi_count(q);
}

/* ---- the fraction of the work that the values of an operand leave (rfi_share) ---- */

static double share_of(const rfr_call *call, const rfr_type *q, const rfr_arg *offsets, const int32_t *at) {
  const double T = (double)q->shape[0];
  const int64_t stride = offsets->stride[0];
  double pairs = 0;
  for (int64_t i = 0; i + 1 < offsets->type.shape[0]; i++) {
    const double rows = (double)at[(i + 1) * stride] - (double)at[i * stride];
    if (rows > 0 && rows <= T) pairs += pairs_of(rows, call->attr);
  }
  return T > 0 ? pairs / most_pairs(T, call->attr) : 1;
}

static double share_forward(const rfr_call *call, const void *values) {
  return share_of(call, &call->in[RFI_IN_attention_q].type, &call->in[RFI_IN_attention_offsets], values);
}

static double share_backward(const rfr_call *call, const void *values) {
  return share_of(call, &call->in[RFI_IN_attention_bwd_q].type, &call->in[RFI_IN_attention_bwd_offsets], values);
}

/* Each processed row attends to the text up to its own position. */
static double share_cached(const rfr_call *call, const void *values) {
  const rfr_type *q = &call->in[RFI_IN_attention_cached_q].type, *cache = &call->in[RFI_IN_attention_cached_k].type;
  rfr_call known = *call;
  rfr_arg in[4];
  rfi_text_call of;
  for (int i = 0; i < 4; i++) in[i] = call->in[i];
  in[RFI_IN_attention_cached_cursor].data = (void *)values;
  known.in = in;
  const double most = (double)q->shape[0] * cached_pairs(cache, call->attr);
  double pairs = 0;
  for (int64_t b = 0; b < rfi_texts(&in[RFI_IN_attention_cached_cursor].type); b++) {
    const rfr_call one = rfi_call_of_text(&known, &rfi_split_attention_cached, b, &of);
    const rfi_take take = rfi_take_next(&one.in[RFI_IN_attention_cached_cursor], one.in[0].type.shape[0],
                                        one.in[RFI_IN_attention_cached_k].type.shape[0]);
    pairs += pairs_of((double)(take.first + take.count), call->attr) - pairs_of((double)take.first, call->attr);
  }
  return most > 0 ? pairs / most : 1;
}

const rfi_share rfi_share_attention = {RFI_IN_attention_offsets, share_forward};
const rfi_share rfi_share_attention_bwd = {RFI_IN_attention_bwd_offsets, share_backward};
const rfi_share rfi_share_attention_bwd_packed = {RFI_IN_attention_bwd_packed_offsets, share_backward};
const rfi_share rfi_share_attention_cached = {RFI_IN_attention_cached_cursor, share_cached};
