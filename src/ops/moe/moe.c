/* SPDX-License-Identifier: Apache-2.0
 *
 * The ops of a mixture of experts around its GEMMs: routing, sorting tokens by expert and back, and the aux losses that
 * balance the load. Shapes, gradients, recording.
 *
 * T tokens always make T k rows: nothing is dropped, and no shape depends on the routing. With expert parallelism, the
 * rows are in parts of a fixed size, one for each rank (moe_parts.c), which the same ops fill and read. Permute and
 * unpermute are each other's gradients, so both take both maps: `order` from rows to slots, `place` from slots to rows.
 * The choice itself has no gradient; the weights of the chosen experts have one.
 */
#include <math.h>
#include <string.h>

#include "ops/moe/load.h"
#include "ops/rule.h"

/* ---- shapes ---- */

static rfr_status integers(const rfi_infer *c, int i, int rank) {
  RFI_TRY(rfi_rule_dtype(c, i, RFR_I32));
  return rfi_rule_rank(c, i, rank, rank);
}

static rfr_status check_score(int64_t score, double scale) {
  if (score < RFR_MOE_SOFTMAX || score > RFR_MOE_SIGMOID)
    return rfi_fail(RFI_E_TRACE_SHAPE, "score is %lld, which is not an rfr_moe_score", (long long)score);
  if (!isfinite(scale)) return rfi_fail(RFI_E_TRACE_SHAPE, "scale must be finite");
  return RFR_OK;
}

static rfr_status check_groups(int64_t experts, int64_t k, int64_t groups, int64_t group_k) {
  if (groups == 1 && group_k == 1) return RFR_OK;
  if (groups < 1 || experts % groups != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "groups is %lld, which does not divide %lld experts", (long long)groups,
                    (long long)experts);
  if (group_k < 1 || group_k > groups || k % group_k != 0 || k / group_k > experts / groups)
    return rfi_fail(RFI_E_TRACE_SHAPE, "cannot choose %lld experts evenly from %lld groups of %lld", (long long)k,
                    (long long)group_k, (long long)(experts / groups));
  return RFR_OK;
}

rfr_status rfi_infer_moe_route(const rfi_infer *c) {
  const rfi_attr *a = c->attr;
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  const int64_t tokens = c->in[0].shape[0], experts = c->in[0].shape[1], k = a[0].i;
  if (k < 1 || k > experts)
    return rfi_fail(RFI_E_TRACE_SHAPE, "k is %lld; it must be 1 to the number of experts, %lld", (long long)k,
                    (long long)experts);
  RFI_TRY(check_score(a[1].i, a[5].f));
  RFI_TRY(check_groups(experts, k, a[3].i, a[4].i));
  if (rfi_present(c, 1)) {
    RFI_TRY(rfi_rule_dtype(c, 1, RFR_F32));
    RFI_TRY(rfi_rule_vector(c, 1, experts));
  }
  c->out[0] = (rfr_type){.dtype = RFR_F32, .rank = 2, .shape = {tokens, k}};
  c->out[1] = (rfr_type){.dtype = RFR_I32, .rank = 2, .shape = {tokens, k}};
  return RFR_OK;
}

rfr_status rfi_infer_moe_route_bwd(const rfi_infer *c) {
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_F32));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  RFI_TRY(rfi_rule_float(c, 1));
  RFI_TRY(rfi_rule_rank(c, 1, 2, 2));
  RFI_TRY(rfi_rule_dtype(c, 2, RFR_I32));
  RFI_TRY(rfi_rule_same(c, 2, 0, false));
  if (c->in[0].shape[0] != c->in[1].shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "dweight has %lld tokens, logits have %lld", (long long)c->in[0].shape[0],
                    (long long)c->in[1].shape[0]);
  RFI_TRY(check_score(c->attr[0].i, c->attr[2].f));
  c->out[0] = c->in[1];
  return RFR_OK;
}

rfr_status rfi_infer_moe_sort(const rfi_infer *c) {
  const int64_t experts = c->attr[0].i;
  RFI_TRY(integers(c, 0, 2));
  const int64_t slots = rfi_count(&c->in[0]);
  if (experts < 1 || experts > INT32_MAX || slots > INT32_MAX)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld slots and %lld experts; both must fit in 32 bits, and experts be positive",
                    (long long)slots, (long long)experts);
  c->out[0] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {experts}};
  c->out[1] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {slots}};
  c->out[2] = c->in[0];
  return RFR_OK;
}

/* Checks operands order, place and optionally weight: (rows), (T,k), (T,k). There are T*k rows, or the number of rows
 * of moe_parts. */
static rfr_status maps(const rfi_infer *c, int order, int place, int weight) {
  RFI_TRY(integers(c, place, 2));
  RFI_TRY(integers(c, order, 1));
  if (!rfi_present(c, weight)) return RFR_OK;
  RFI_TRY(rfi_rule_float(c, weight));
  return rfi_rule_same(c, weight, place, false);
}

static rfr_status rows_of(const rfi_infer *c, int i, int64_t rows) {
  RFI_TRY(rfi_rule_float(c, i));
  RFI_TRY(rfi_rule_rank(c, i, 2, 2));
  if (c->in[i].shape[0] == rows) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s has %lld rows; it must have %lld", c->def->operand[i],
                  (long long)c->in[i].shape[0], (long long)rows);
}

rfr_status rfi_infer_moe_permute(const rfi_infer *c) {
  RFI_TRY(maps(c, 1, 2, 3));
  RFI_TRY(rows_of(c, 0, c->in[2].shape[0]));
  c->out[0] = c->in[0];
  c->out[0].shape[0] = c->in[1].shape[0];
  return RFR_OK;
}

rfr_status rfi_infer_moe_unpermute(const rfi_infer *c) {
  RFI_TRY(maps(c, 1, 2, 3));
  RFI_TRY(rows_of(c, 0, c->in[1].shape[0]));
  c->out[0] = c->in[0];
  c->out[0].shape[0] = c->in[2].shape[0];
  return RFR_OK;
}

rfr_status rfi_infer_moe_unpermute_dw(const rfi_infer *c) {
  const int64_t to = c->attr[0].i;
  RFI_TRY(integers(c, 1, 2));
  RFI_TRY(rfi_rule_float(c, 0));
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  RFI_TRY(rows_of(c, 2, c->in[1].shape[0]));
  if (c->in[0].shape[1] != c->in[2].shape[1])
    return rfi_fail(RFI_E_TRACE_SHAPE, "y has rows of %lld, dout of %lld", (long long)c->in[0].shape[1],
                    (long long)c->in[2].shape[1]);
  c->out[0] = c->in[1];
  c->out[0].dtype = (rfr_dtype)to;
  const rfi_infer result = {.def = c->def, .in = c->out};
  return to >= 0 && to < RFR_DTYPE_COUNT ? rfi_rule_float(&result, 0) : rfi_fail(RFI_E_TRACE_SHAPE, "to is not a type");
}

static rfr_status check_loss(const rfi_infer *c, int first) {
  RFI_TRY(rfi_rule_float(c, first));
  RFI_TRY(rfi_rule_rank(c, first, 2, 2));
  RFI_TRY(integers(c, first + 1, 2));
  RFI_TRY(integers(c, first + 2, 1));
  RFI_TRY(rfi_rule_vector(c, first + 2, c->in[first].shape[0]));
  if (c->in[first + 1].shape[0] != c->in[first].shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "logits have %lld tokens, index has %lld", (long long)c->in[first].shape[0],
                    (long long)c->in[first + 1].shape[0]);
  if (!isfinite(c->attr[1].f) || !isfinite(c->attr[2].f))
    return rfi_fail(RFI_E_TRACE_SHAPE, "balance and z must be finite");
  return RFR_OK;
}

rfr_status rfi_infer_moe_loss(const rfi_infer *c) {
  RFI_TRY(check_loss(c, 0));
  c->out[0] = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {1}};
  return RFR_OK;
}

rfr_status rfi_infer_moe_loss_bwd(const rfi_infer *c) {
  RFI_TRY(rfi_rule_dtype(c, 0, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, 0, 1));
  RFI_TRY(check_loss(c, 1));
  c->out[0] = c->in[1];
  return RFR_OK;
}

rfr_status rfi_infer_moe_load(const rfi_infer *c) {
  for (int i = 0; i < c->n_in; i++) RFI_TRY(integers(c, i, c->in[i].rank == 2 ? 2 : 1));
  const int64_t layers = c->attr[0].i;
  if (layers < 1 || layers > RFI_MAX_LOAD_LAYERS)
    return rfi_fail(RFI_E_TRACE_SHAPE, "layers is %lld; it is 1 to %d", (long long)layers, RFI_MAX_LOAD_LAYERS);
  c->out[0] = c->out[1] = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {1}};
  c->out[2] = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {layers}};
  return RFR_OK;
}

/* ---- gradients ---- */

rfr_status rfi_grad_moe_route(rfi_grad *g) {
  const rfi_attr *a = g->op->attr;
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  const rfi_attr attr[3] = {a[1], a[2], a[5]};
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_moe_route_bwd, 3, (rfr_value[]){g->dy[0], g->op->in[0], g->op->out[1]}, attr));
  return g->t->status;
}

/* The gradient of permute and unpermute: rows are moved in the opposite direction along the same maps with the same
 * weights. `rows` is the sorted side, `tokens` the other. */
static rfr_status grad_rows(rfi_grad *g, rfi_opcode back, rfr_value rows, rfr_value tokens) {
  const rfr_value *in = g->op->in, weight = g->op->n_in > 3 ? in[3] : RFR_NONE;
  if (g->dy[0] == RFR_NONE) return RFR_OK;
  if (g->need[0]) {
    rfi_emit_begin(g, 0);
    rfi_emit_end(g, 0, rfi_emit(g, back, 4, (rfr_value[]){g->dy[0], in[1], in[2], weight}, NULL));
  }
  if (weight != RFR_NONE && g->need[3]) {
    const rfi_attr to = rfi_i(rfi_emit_dtype(g, 3));
    rfi_emit_begin(g, 3);
    rfi_emit_end(g, 3, rfi_emit(g, RFI_OP_moe_unpermute_dw, 3, (rfr_value[]){rows, in[2], tokens}, &to));
  }
  return g->t->status;
}

rfr_status rfi_grad_moe_permute(rfi_grad *g) { return grad_rows(g, RFI_OP_moe_unpermute, g->dy[0], g->op->in[0]); }
rfr_status rfi_grad_moe_unpermute(rfi_grad *g) { return grad_rows(g, RFI_OP_moe_permute, g->op->in[0], g->dy[0]); }

rfr_status rfi_grad_moe_loss(rfi_grad *g) {
  const rfr_value *in = g->op->in;
  if (!g->need[0] || g->dy[0] == RFR_NONE) return RFR_OK;
  rfi_emit_begin(g, 0);
  rfi_emit_end(g, 0, rfi_emit(g, RFI_OP_moe_loss_bwd, 4, (rfr_value[]){g->dy[0], in[0], in[1], in[2]}, g->op->attr));
  return g->t->status;
}

/* ---- recording ---- */

rfr_moe_options rfr_moe_options_default(void) {
  return (rfr_moe_options){.size = sizeof(rfr_moe_options),
                           .k = 2,
                           .score = RFR_MOE_SOFTMAX,
                           .norm = 1,
                           .groups = 1,
                           .group_k = 1,
                           .scale = 1};
}

rfr_value rfr_moe_route_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value bias,
                           const rfr_moe_options *options, rfr_value *index) {
  const rfr_moe_options o = options ? *options : rfr_moe_options_default();
  rfr_value out[2] = {RFR_NONE, RFR_NONE};
  if (index) *index = RFR_NONE;
  if (o.size != sizeof o)
    return rfi_trace_fail(t, at, "moe_route", RFI_E_ARGUMENT,
                          "options.size does not match this library; start from the default options");
  const rfi_attr attr[] = {rfi_i(o.k),      rfi_i(o.score),   rfi_i(o.norm != 0),
                           rfi_i(o.groups), rfi_i(o.group_k), rfi_f(o.scale)};
  rfi_record(t, at, RFI_OP_moe_route, 2, (rfr_value[]){logits, bias}, attr, out);
  if (index) *index = out[1];
  return out[0];
}

rfr_value rfr_moe_sort_at(rfr_trace *t, rfr_source at, rfr_value index, int64_t experts, rfr_value *order,
                          rfr_value *place) {
  rfr_value out[3] = {RFR_NONE, RFR_NONE, RFR_NONE};
  const rfi_attr attr = rfi_i(experts);
  rfi_record(t, at, RFI_OP_moe_sort, 1, &index, &attr, out);
  if (order) *order = out[1];
  if (place) *place = out[2];
  return out[0];
}

rfr_value rfr_moe_permute_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value order, rfr_value place,
                             rfr_value weight) {
  return rfi_record(t, at, RFI_OP_moe_permute, 4, (rfr_value[]){x, order, place, weight}, NULL, NULL);
}

/* The weight of a slot is moved like a token that has one slot and one column. */
rfr_value rfr_moe_row_weight_at(rfr_trace *t, rfr_source at, rfr_value weight, rfr_value order, rfr_value place) {
  const rfr_type w = rfr_value_type(t, weight), p = rfr_value_type(t, place);
  const int64_t slots = rfi_count(&p), column[2] = {slots, 1}, rows = rfr_value_type(t, order).shape[0];
  if (w.rank != p.rank || memcmp(w.shape, p.shape, sizeof w.shape) != 0)
    return rfi_trace_fail(t, at, "moe_row_weight", RFI_E_TRACE_SHAPE, "weight and place have different shapes");
  weight = rfr_reshape_at(t, at, weight, 2, column);
  place = rfr_reshape_at(t, at, place, 2, column);
  weight = rfi_record(t, at, RFI_OP_moe_permute, 4, (rfr_value[]){weight, order, place, RFR_NONE}, NULL, NULL);
  return rfr_reshape_at(t, at, weight, 1, &rows);
}

rfr_value rfr_moe_unpermute_at(rfr_trace *t, rfr_source at, rfr_value y, rfr_value order, rfr_value place,
                               rfr_value weight) {
  return rfi_record(t, at, RFI_OP_moe_unpermute, 4, (rfr_value[]){y, order, place, weight}, NULL, NULL);
}

rfr_value rfr_moe_loss_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value index, rfr_value targets,
                          int sigmoid, double balance, double z, int ignore) {
  const rfi_attr attr[] = {rfi_i(sigmoid != 0), rfi_f(balance), rfi_f(z), rfi_i(ignore)};
  return rfi_record(t, at, RFI_OP_moe_loss, 3, (rfr_value[]){logits, index, targets}, attr, NULL);
}

rfr_value rfr_moe_load_at(rfr_trace *t, rfr_source at, int n, const rfr_value *splits, int64_t layers, rfr_value *least,
                          rfr_value *by_layer) {
  rfr_value out[3] = {RFR_NONE, RFR_NONE, RFR_NONE};
  const rfi_attr attr = rfi_i(layers);
  rfi_record(t, at, RFI_OP_moe_load, n, splits, &attr, out);
  if (least) *least = out[1];
  if (by_layer) *by_layer = out[2];
  return out[0];
}
