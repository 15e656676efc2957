/* SPDX-License-Identifier: Apache-2.0
 *
 * Causal self-attention over packed documents, (T,C) -> (T,C), with a sliding window if the layer has one.
 *
 * Heads are views: (T, H*D) as (T, H, D), and a packed projection of q, k and v as three slices. The attention kernel
 * takes any strides, so that nothing is copied.
 */
#include <math.h>
#include <stdio.h>

#include "nn/nn.h"

/* (T, heads*D) as (T, heads, D). */
static rfr_value heads_of(const rfi_nn *n, rfr_value x, int64_t heads) {
  const int64_t shape[3] = {n->tokens, heads, n->c->head_dim};
  return rfr_reshape(n->t, x, 3, shape);
}

/* Writes x into the layer's cache of keys ("k") or values ("v") and returns the cache. */
static rfr_value cached(const rfi_nn *n, const char *which, rfr_value x) {
  const rfr_type cursor = rfr_value_type(n->t, n->cursor);
  const int64_t shape[4] = {cursor.shape[0], n->capacity, n->c->kv_heads, n->c->head_dim};
  const int one = cursor.rank == 1; /* a single text's cache has no dimension of texts */
  char name[40];
  snprintf(name, sizeof name, "cache.%lld.%s", (long long)n->layer, which);
  rfr_value cache = rfr_input(n->t, name, RFR_ROLE_STATE, n->c->dtype, 4 - one, shape + one);
  return rfr_cache_write(n->t, cache, x, n->cursor);
}

/* Rows of the longest document that this program accepts. */
static int64_t longest_document(const rfi_nn *n) {
  const int64_t rows = n->cursor == RFR_NONE ? n->tokens : n->capacity;
  const int64_t longest = n->c->longest > 0 ? n->c->longest : n->c->max_positions;
  return longest < rows ? longest : rows;
}

static rfr_value attend(const rfi_nn *n, rfr_value q, rfr_value k, rfr_value v) {
  const rfr_model_config *c = n->c;
  rfr_attention_options options = {.causal = 1, .cap = c->attention_cap, .longest = longest_document(n)};
  if (c->attention_scalar > 0.0) options.scale = 1.0 / sqrt(c->attention_scalar);
  if (c->attention_multiplier > 0.0) options.scale = c->attention_multiplier;
  /* a window of at least the longest document has no effect */
  if (rfr_model_has_window(c, n->layer) && c->window < options.longest) options.window = c->window;
  if (n->cursor == RFR_NONE) return rfr_attention(n->t, q, k, v, n->offsets, &options);
  k = cached(n, "k", k);
  v = cached(n, "v", v);
  return rfr_attention_cached(n->t, q, k, v, n->cursor, &options);
}

static rfr_value rotate(const rfi_nn *n, rfr_value x) {
  const rfr_model_config *c = n->c;
  if (!rfr_model_has_rope(c, n->layer)) return x;
  if (c->local_theta > 0.0 && rfr_model_has_window(c, n->layer))
    return rfr_rope(n->t, x, n->positions, c->local_theta, NULL);
  if (c->rope_extension.type != RFR_ROPE_PLAIN || c->rotary_dim > 0) {
    double frequency[RFR_MAX_LIST], scale;
    const int pairs = rfi_rope_frequencies(c, longest_document(n), frequency, &scale);
    return rfr_rope_table(n->t, x, n->positions, frequency, pairs, scale);
  }
  return rfr_rope(n->t, x, n->positions, c->rope_theta, &c->rope_scaling);
}

/* q or k: (T, heads, D) with the norm of the row, if the model has one. */
static rfr_value project(const rfi_nn *n, rfr_value x, rfi_param_kind weight, rfr_value u, rfi_param_kind norm,
                         int64_t heads) {
  x = rfi_nn_linear_with(n, x, weight, u);
  if (rfi_has_row_norms(n->c)) x = rfi_nn_norm(n, x, norm);
  return heads_of(n, x, heads);
}

rfr_value rfi_nn_attention(const rfi_nn *n, rfr_value x) {
  const rfr_model_config *c = n->c;
  rfr_trace *t = n->t;
  rfr_value q, k, v;
  if (c->type == RFR_MODEL_GPT2 || rfi_is_packed(c)) {
    const int64_t Q = c->heads * c->head_dim, K = c->kv_heads * c->head_dim;
    rfr_value qkv = rfi_nn_linear(n, x, RFI_PARAM_QKV); /* (T, Q+2K) */
    q = heads_of(n, rfr_slice(t, qkv, 1, 0, Q), c->heads);
    k = heads_of(n, rfr_slice(t, qkv, 1, Q, K), c->kv_heads);
    v = heads_of(n, rfr_slice(t, qkv, 1, Q + K, K), c->kv_heads);
  } else {
    static const rfi_param_kind weights[3] = {RFI_PARAM_Q, RFI_PARAM_K, RFI_PARAM_V};
    rfr_value u[3];
    rfi_nn_project(n, x, weights, 3, u);
    q = project(n, x, RFI_PARAM_Q, u[0], RFI_PARAM_Q_NORM, c->heads);
    k = project(n, x, RFI_PARAM_K, u[1], RFI_PARAM_K_NORM, c->kv_heads);
    v = heads_of(n, rfi_nn_linear_with(n, x, RFI_PARAM_V, u[2]), c->kv_heads);
    if (c->qk_norm && !rfi_has_row_norms(c)) {
      q = rfi_nn_norm(n, q, RFI_PARAM_Q_NORM);
      k = rfi_nn_norm(n, k, RFI_PARAM_K_NORM);
    }
  }
  q = rotate(n, q);
  k = rotate(n, k);
  rfr_value o = attend(n, q, k, v); /* (T,H,D) */
  const int64_t flat[2] = {n->tokens, c->heads * c->head_dim};
  return rfi_nn_linear(n, rfr_reshape(t, o, 2, flat), RFI_PARAM_O);
}
