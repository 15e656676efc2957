/* SPDX-License-Identifier: Apache-2.0
 *
 * Text generation token by token: shapes and recording calls.
 *
 * Text, cursor and the caches of keys and values are states. Positions, the number of valid rows and the last token are
 * read from them, so a program takes no argument: the same program reads a prompt in chunks or, with one row, appends a
 * token per replay. The host writes text and cursor before it starts and may read the text at any time.
 */
#include "ops/decode/cursor.h"
#include "ops/decode/sequence_rule.h"
#include "ops/op_index.h"
#include "ops/rule.h"

rfr_status rfi_infer_text_read(const rfi_infer *c);
rfr_status rfi_infer_cache_write(const rfi_infer *c);
rfr_status rfi_infer_text_append(const rfi_infer *c);
rfr_status rfi_infer_text_end(const rfi_infer *c);

rfr_status rfi_infer_text(const rfi_infer *c, const rfi_split *s, int n, rfr_type *in, rfi_infer *one) {
  const rfr_type *cursor = &c->in[s->cursor];
  *one = *c;
  if (cursor->rank != 2) return RFR_OK;
  const int64_t texts = cursor->shape[0];
  for (int i = 0; i < n; i++) {
    rfr_type *x = &in[i];
    *x = c->in[i];
    if (s->in_front >> i & 1) {
      if (x->rank < 2 || x->shape[0] != texts)
        return rfi_fail(RFI_E_TRACE_SHAPE, "operand %d must have %lld texts, as the cursor", i, (long long)texts);
      x->rank--;
      for (int d = 0; d < x->rank; d++) x->shape[d] = x->shape[d + 1];
      x->shape[x->rank] = 0;
    } else if (s->in_rows >> i & 1) {
      if (x->rank < 1 || texts < 1 || x->shape[0] % texts != 0)
        return rfi_fail(RFI_E_TRACE_SHAPE, "the rows of operand %d cannot be divided among %lld texts", i,
                        (long long)texts);
      x->shape[0] /= texts;
    }
  }
  one->in = in;
  return RFR_OK;
}

static rfr_status check_cursor(const rfi_infer *c, int i) {
  RFI_TRY(rfi_rule_dtype(c, i, RFR_I64));
  return rfi_rule_vector(c, i, RFI_CURSOR_N);
}

static rfr_status check_text(const rfi_infer *c, int i, int64_t rows) {
  RFI_TRY(rfi_rule_dtype(c, i, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, i, 1, 1));
  if (c->in[i].shape[0] < 1)
    return rfi_fail(RFI_E_TRACE_SHAPE, "text is empty; it needs one element more than a cache has rows");
  if (rows < 0 || rows > INT32_MAX - c->in[i].shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "rows is %lld, but the text has %lld", (long long)rows,
                    (long long)c->in[i].shape[0]);
  return RFR_OK;
}

rfr_status rfi_infer_text_read(const rfi_infer *call) {
  rfr_type in[2];
  rfi_infer one, *c = &one;
  const int64_t rows = call->attr[0].i, texts = rfi_texts(&call->in[1]);
  RFI_TRY(rfi_infer_text(call, &rfi_split_text_read, 2, in, c));
  RFI_TRY(check_text(c, 0, rows));
  RFI_TRY(check_cursor(c, 1));
  if (rows > INT32_MAX / (texts > 0 ? texts : 1))
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld texts have too many rows", (long long)texts);
  c->out[0] = c->out[1] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {texts * rows}};
  c->out[2] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {texts}};
  return RFR_OK;
}

rfr_status rfi_infer_cache_write(const rfi_infer *call) {
  rfr_type in[3];
  rfi_infer one, *c = &one;
  RFI_TRY(rfi_infer_text(call, &rfi_split_cache_write, 3, in, c));
  const rfr_type *cache = &c->in[0], *x = &c->in[1];
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_dtype(c, 1, cache->dtype));
  RFI_TRY(rfi_rule_rank(c, 0, 3, 3));
  RFI_TRY(rfi_rule_rank(c, 1, 3, 3));
  if (cache->shape[1] != x->shape[1] || cache->shape[2] != x->shape[2])
    return rfi_fail(RFI_E_TRACE_SHAPE, "cache has %lld heads of %lld, x has %lld of %lld", (long long)cache->shape[1],
                    (long long)cache->shape[2], (long long)x->shape[1], (long long)x->shape[2]);
  RFI_TRY(check_cursor(c, 2));
  c->out[0] = call->in[0];
  return RFR_OK;
}

/* Only the rows of x are written to the cache. */
double rfi_bytes_cache_write(const rfi_infer *c) {
  const double x = (double)rfi_bytes(&c->in[RFI_IN_cache_write_x]);
  return (c->out[0].rank < 0 ? 1 : 2) * x + (double)rfi_bytes(&c->in[RFI_IN_cache_write_cursor]);
}

rfr_status rfi_infer_text_append(const rfi_infer *call) {
  rfr_type in[4];
  rfi_infer one, *c = &one;
  RFI_TRY(rfi_infer_text(call, &rfi_split_text_append, 4, in, c));
  RFI_TRY(check_text(c, 0, c->attr[0].i));
  RFI_TRY(rfi_rule_float(c, 1));
  RFI_TRY(rfi_rule_rank(c, 1, 2, 2));
  if (c->in[1].dtype == RFR_F64) return rfi_fail(RFI_E_TRACE_SHAPE, "logits must be f32, bf16 or f16");
  if (c->in[1].shape[0] != 1 || c->in[1].shape[1] < 1)
    return rfi_fail(RFI_E_TRACE_SHAPE, "logits must be one row of each text, (1,V)");
  RFI_TRY(check_cursor(c, 2));
  RFI_TRY(rfi_rule_dtype(c, 3, RFR_F64));
  RFI_TRY(rfi_rule_vector(c, 3, RFI_SAMPLING_N));
  c->out[0] = call->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_text_end(const rfi_infer *call) {
  rfr_type in[2];
  rfi_infer one, *c = &one;
  RFI_TRY(rfi_infer_text(call, &rfi_split_text_end, 2, in, c));
  RFI_TRY(check_cursor(c, 0));
  RFI_TRY(check_text(c, 1, c->attr[0].i));
  c->out[0] = call->in[0];
  return RFR_OK;
}

rfr_value rfr_text_read_at(rfr_trace *t, rfr_source at, rfr_value text, rfr_value cursor, int64_t rows,
                           rfr_value *positions, rfr_value *last) {
  rfr_value out[3];
  rfi_record(t, at, RFI_OP_text_read, 2, (rfr_value[]){text, cursor}, (rfi_attr[]){rfi_i(rows)}, out);
  if (positions) *positions = out[1];
  if (last) *last = out[2];
  return out[0];
}

rfr_value rfr_cache_write_at(rfr_trace *t, rfr_source at, rfr_value cache, rfr_value x, rfr_value cursor) {
  return rfi_record(t, at, RFI_OP_cache_write, 3, (rfr_value[]){cache, x, cursor}, NULL, NULL);
}

rfr_value rfr_text_append_at(rfr_trace *t, rfr_source at, rfr_value text, rfr_value logits, rfr_value cursor,
                             rfr_value sampling, int64_t rows) {
  rfr_value in[4] = {text, logits, cursor, sampling};
  return rfi_record(t, at, RFI_OP_text_append, 4, in, (rfi_attr[]){rfi_i(rows)}, NULL);
}

rfr_value rfr_text_end_at(rfr_trace *t, rfr_source at, rfr_value cursor, rfr_value text, int64_t rows) {
  return rfi_record(t, at, RFI_OP_text_end, 2, (rfr_value[]){cursor, text}, (rfi_attr[]){rfi_i(rows)}, NULL);
}
