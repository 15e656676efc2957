/* SPDX-License-Identifier: Apache-2.0
 *
 * The model: embedding, blocks, last norm, LM head.
 *
 * The forward is recorded once per microbatch with the same parameters; autodiff sums the gradient over microbatches.
 * Positions start at 0 in each document: the result for a document does not depend on the documents packed with it.
 */
#include <math.h>

#include "base/base.h"
#include "nn/adapter.h"
#include "refrain/recipe.h"

rfr_value rfi_declare_parameter(rfr_trace *t, const rfr_model_config *c, int i, rfr_role role) {
  rfr_parameter p;
  if (rfr_model_parameter(c, i, &p) != RFR_OK) return RFR_NONE;
  if (p.format == RFR_QUANT_NONE) return rfr_input(t, p.name, role, c->dtype, p.rank, p.shape);
  const int64_t bytes = rfr_quant_bytes(p.format, p.rank, p.shape);
  return rfr_input(t, p.name, RFR_ROLE_FROZEN, RFR_U8, 1, &bytes);
}

rfr_value rfi_parameter_values(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, int i) {
  rfr_parameter p;
  if (c->base_format == RFR_QUANT_NONE || rfr_model_parameter(c, i, &p) != RFR_OK || p.format == RFR_QUANT_NONE)
    return parameters[i];
  return rfr_dequantize(t, parameters[i], p.format, p.rank, p.shape, c->dtype);
}

void rfr_model_declare(rfr_trace *t, const rfr_model_config *c, const char *const *frozen, int n_frozen,
                       rfr_value *out) {
  for (int i = 0; i < rfr_model_parameter_count(c); i++) {
    rfr_role role = rfi_adapter_freezes(c, i) ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE;
    rfr_parameter p;
    if (rfr_model_parameter(c, i, &p) != RFR_OK) continue;
    for (int k = 0; k < n_frozen; k++)
      if (rfr_name_matches(frozen[k], p.name)) role = RFR_ROLE_FROZEN;
    out[i] = rfi_declare_parameter(t, c, i, role);
  }
}

/* sqrt(C), rounded to the model's dtype. */
static double embedding_scale(const rfr_model_config *c) {
  const float scale = (float)sqrt((double)c->hidden_size);
  return rfr_float_from_bits(c->dtype, rfr_float_to_bits(c->dtype, scale));
}

static rfr_value embed(const rfi_nn *n, rfr_value tokens) {
  rfr_trace *t = n->t;
  rfr_value x = rfr_embedding(t, rfi_nn_parameter(n, RFI_PARAM_TOKENS), tokens); /* (T,C) */
  x = rfi_adapter_embedding(t, n->c, n->parameters, tokens, x);
  if (n->c->type == RFR_MODEL_GPT2)
    x = rfr_add(t, x, rfr_embedding(t, rfi_nn_parameter(n, RFI_PARAM_POSITIONS), n->positions));
  if (rfi_is_gemma(n->c)) x = rfr_scale(t, x, embedding_scale(n->c), RFR_NONE);
  x = rfi_nn_scale(n, x, n->c->embedding_multiplier);
  return rfi_nn_dropout(n, x);
}

/* The layers from `first` to `end`. For the first layer x are the tokens; after the last layer the result is that of
 * the final norm. */
static rfr_value forward(rfi_nn *n, rfr_value x, int64_t first, int64_t end) {
  rfi_nn_prepare(n, first, end);
  if (first == 0) x = embed(n, x);
  for (n->layer = first; n->layer < end; n->layer++) {
    x = rfi_nn_block(n, x);
    n->routers += rfr_model_has_experts(n->c, n->layer);
  }
  if (end == n->c->layers) {
    rfr_scope(n->t, "norm");
    x = rfi_nn_norm(n, x, RFI_PARAM_NORM);
  }
  rfr_scope(n->t, "");
  return x;
}

static rfr_value record_layers(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value x,
                               rfr_value offsets, rfr_value step, const rfr_experts *experts, int64_t first,
                               int64_t end) {
  rfi_nn n = {.t = t,
              .c = c,
              .parameters = parameters,
              .offsets = offsets,
              .cursor = RFR_NONE,
              .step = step,
              .experts = experts ? *experts : (rfr_experts){0}};
  n.tokens = rfr_value_type(t, x).shape[0];
  rfr_scope(t, "embed");
  n.positions = rfr_positions(t, offsets, n.tokens);
  return forward(&n, x, first, end);
}

rfr_value rfr_model_forward_experts(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                    rfr_value tokens, rfr_value offsets, rfr_value step, const rfr_experts *experts) {
  return record_layers(t, c, parameters, tokens, offsets, step, experts, 0, c->layers);
}

rfr_value rfi_model_layers(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value x,
                           rfr_value offsets, rfr_value step, int64_t first, int64_t end) {
  return record_layers(t, c, parameters, x, offsets, step, NULL, first, end);
}

rfr_value rfr_model_forward(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value tokens,
                            rfr_value offsets, rfr_value step) {
  return rfr_model_forward_experts(t, c, parameters, tokens, offsets, step, NULL);
}

rfr_value rfr_model_forward_cached(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                   rfr_value tokens, rfr_value positions, rfr_value cursor, int64_t capacity) {
  rfi_nn n = {.t = t,
              .c = c,
              .parameters = parameters,
              .offsets = RFR_NONE,
              .cursor = cursor,
              .capacity = capacity,
              .positions = positions,
              .step = RFR_NONE};
  n.tokens = rfr_value_type(t, tokens).shape[0];
  rfr_scope(t, "embed");
  return forward(&n, tokens, 0, c->layers);
}

rfr_value rfr_model_logits(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters, rfr_value hidden,
                           rfr_dtype to) {
  const int w = rfi_parameter_index(c, c->tie_embeddings ? RFI_PARAM_TOKENS : RFI_PARAM_HEAD, 0);
  rfr_scope(t, "head");
  /* scales the hidden state: the loss computes its logits in chunks and stores none */
  if (c->logits_scaling > 0.0 && c->logits_scaling != 1.0)
    hidden = rfr_scale(t, hidden, 1.0 / c->logits_scaling, RFR_NONE);
  rfr_recipe_begin(t, NULL);
  rfr_value y = rfi_adapter_linear(t, c, parameters, w, hidden, RFR_NONE, RFR_NONE, RFR_NONE, to); /* (T,V) */
  rfr_recipe_end(t);
  if (c->logit_cap > 0.0) y = rfr_softcap(t, y, c->logit_cap);
  rfr_scope(t, "");
  return y;
}
