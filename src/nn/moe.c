/* SPDX-License-Identifier: Apache-2.0
 *
 * A layer of experts: route, sort tokens by expert, two grouped GEMMs, and restore the order of tokens.
 *
 * All experts of a layer share one packed weight with the rows of gate before those of up: both are one grouped GEMM,
 * and each gradient is one op. Forward and backward use the same offsets. Routing weights are applied between the two
 * GEMMs, where the result of SwiGLU is rounded anyway: the gradient of the routing weights then needs only what the
 * backward of SwiGLU keeps, and the output rows of the second GEMM need not be kept. The router computes in f32, or
 * with router_narrow in dtype as the transformers library does.
 */
#include "nn/adapter.h"
#include "refrain/recipe.h"

static void return_value(const rfi_nn *n, rfr_value *out, rfr_value x) {
  if (out) out[n->routers] = x;
}

/* Returns the routing weights; *index gets the experts of each token. */
static rfr_value route(const rfi_nn *n, rfr_value x, rfr_value *index) {
  const rfr_model_config *c = n->c;
  rfr_moe_options o = rfr_moe_options_default();
  const rfr_dtype dtype = c->router_narrow ? c->dtype : RFR_F32;
  rfr_recipe_begin(n->t, NULL);
  rfr_value logits = rfr_matmul(n->t, x, rfi_nn_parameter(n, RFI_PARAM_ROUTER), RFR_NONE, 0, 1, dtype);
  rfr_recipe_end(n->t);
  o.k = c->experts_per_token;
  o.norm = c->expert_norm;
  rfr_value weight = rfr_moe_route(n->t, logits, RFR_NONE, &o, index);
  return_value(n, n->experts.logits, logits);
  return_value(n, n->experts.index, *index);
  return dtype == RFR_F32 ? weight : rfr_cast(n->t, weight, dtype);
}

/* The shared expert: an MLP for all tokens times sigmoid(x . gate). A router with one expert and sigmoid scores
 * computes this factor. */
static rfr_value shared_expert(const rfi_nn *n, rfr_value x) {
  const rfr_moe_options one_expert = {
      .size = sizeof one_expert, .k = 1, .score = RFR_MOE_SIGMOID, .groups = 1, .group_k = 1, .scale = 1};
  rfr_recipe_begin(n->t, NULL);
  rfr_value gate = rfr_matmul(n->t, x, rfi_nn_parameter(n, RFI_PARAM_SHARED_GATE), RFR_NONE, 0, 1, n->c->dtype);
  rfr_recipe_end(n->t);
  gate = rfr_moe_route(n->t, gate, RFR_NONE, &one_expert, NULL);
  if (n->c->dtype != RFR_F32) gate = rfr_cast(n->t, gate, n->c->dtype);
  return rfr_mul(n->t, rfi_nn_mlp(n, x), rfr_expand(n->t, gate, 1, n->c->hidden_size));
}

/* x (R,K) times the weight of each row's expert, plus the adapter of the weight. */
static rfr_value experts_linear(const rfi_nn *n, rfr_value x, rfi_param_kind weight, rfr_value offsets) {
  const rfr_value y = rfr_grouped_linear(n->t, x, rfi_nn_parameter(n, weight), offsets, RFR_NONE, RFR_NONE);
  return rfi_adapter_experts(n->t, n->c, n->parameters, rfi_parameter_index(n->c, weight, n->layer), x, offsets, y);
}

/* The MLP of each row's expert, times the row's weight. */
static rfr_value experts_mlp(const rfi_nn *n, rfr_value rows, rfr_value offsets, rfr_value weight) {
  const int64_t I = n->c->expert_size;
  rfr_value y = experts_linear(n, rows, RFI_PARAM_EXPERT_UP, offsets);
  y = rfr_swiglu_weighted(n->t, rfr_slice(n->t, y, 1, 0, I), rfr_slice(n->t, y, 1, I, I), weight);
  return experts_linear(n, y, RFI_PARAM_EXPERT_DOWN, offsets);
}

/* The chosen experts, and the rows sorted by expert. */
typedef struct routing {
  rfr_value weight, splits, order, place;
} routing;

static rfr_value own_experts(const rfi_nn *n, rfr_value x, const routing *r) {
  rfr_trace *t = n->t;
  rfr_value bad;
  const rfr_value offsets = rfr_splits_to_offsets(t, r->splits, n->tokens * n->c->experts_per_token, &bad);
  return_value(n, n->experts.bad, bad);
  rfr_value y = rfr_moe_permute(t, x, r->order, r->place, RFR_NONE); /* (T*k,C) */
  y = experts_mlp(n, y, offsets, rfr_moe_row_weight(t, r->weight, r->order, r->place));
  return rfr_moe_unpermute(t, y, r->order, r->place, RFR_NONE);
}

/* Expert parallelism: rows and their weights are sent to the ranks that have the experts, are sorted there, and are
 * sent back. So a row is computed as on one rank, and its terms are added in the same order. */
static rfr_value spread_experts(const rfi_nn *n, rfr_value x, const routing *r) {
  const rfr_model_config *c = n->c;
  rfr_trace *t = n->t;
  const int ranks = c->expert_ranks;
  const int64_t most = n->tokens * c->experts_per_token;
  const int64_t capacity = c->expert_capacity > 0 && c->expert_capacity < most ? c->expert_capacity : most;
  const int64_t column[2] = {ranks * capacity, 1};
  rfr_value part_place, need, order, place;
  const rfr_value part_order = rfr_moe_parts(t, r->splits, r->order, r->place, ranks, capacity, &part_place, &need);
  const rfr_value received = rfr_all_to_all(t, r->splits, ranks); /* (ranks experts of this rank) */
  return_value(n, n->experts.bad, need);
  rfr_value rows = rfr_moe_permute(t, x, part_order, part_place, RFR_NONE); /* (ranks capacity,C) */
  rows = rfr_all_to_all_rows(t, rows, r->splits, received, ranks);
  rfr_value weight = rfr_reshape(t, rfr_moe_row_weight(t, r->weight, part_order, part_place), 2, column);
  weight = rfr_all_to_all_rows(t, weight, r->splits, received, ranks);
  const rfr_value index = rfr_moe_part_experts(t, received, ranks, capacity);
  const rfr_value splits = rfr_moe_sort(t, index, c->experts / ranks, &order, &place);
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, ranks * capacity, NULL);
  rfr_value y = experts_mlp(n, rfr_moe_permute(t, rows, order, place, RFR_NONE), offsets,
                            rfr_moe_row_weight(t, weight, order, place));
  y = rfr_moe_unpermute(t, y, order, place, RFR_NONE);
  y = rfr_all_to_all_rows(t, y, received, r->splits, ranks);
  return rfr_moe_unpermute(t, y, part_order, part_place, RFR_NONE);
}

rfr_value rfi_nn_moe(const rfi_nn *n, rfr_value x) {
  const rfr_model_config *c = n->c;
  routing r;
  rfr_value index;
  r.weight = route(n, x, &index);
  r.splits = rfr_moe_sort(n->t, index, c->experts, &r.order, &r.place);
  return_value(n, n->experts.splits, r.splits);
  const rfr_value y = c->expert_ranks > 1 ? spread_experts(n, x, &r) : own_experts(n, x, &r);
  return c->shared_size > 0 ? rfr_add(n->t, y, shared_expert(n, x)) : y;
}

rfr_value rfr_model_routing_loss(rfr_trace *t, const rfr_model_config *c, const rfr_experts *experts, rfr_value targets,
                                 int ignore) {
  const int64_t layers = rfr_model_expert_layers(c);
  const bool given = experts && experts->logits && experts->index;
  const double balance = c->balance_loss / (double)layers, z = c->z_loss / (double)layers;
  rfr_value loss = RFR_NONE;
  if (c->balance_loss == 0.0 && c->z_loss == 0.0) return loss;
  rfr_scope(t, "routing");
  for (int64_t l = 0; l < layers; l++) {
    const rfr_value logits = given ? experts->logits[l] : RFR_NONE, index = given ? experts->index[l] : RFR_NONE;
    const rfr_value part = rfr_moe_loss(t, logits, index, targets, 0, balance, z, ignore);
    loss = l == 0 ? part : rfr_add(t, loss, part);
  }
  rfr_scope(t, "");
  return loss;
}
