/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of families: the fields that each reads from config.json and writes to it.
 *
 * The library's classes have defaults for most fields. A field is required here if its default is an arbitrary number,
 * which no published folder means.
 */
#include "model/hf_families.h"

#include <math.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "model/hf.h"
#include "nn/nn.h"

/* ---- fields ---- */

typedef struct field {
  const char *key;
  int64_t *to;
  int64_t most;
  bool required;
} field;

static rfr_status read_sizes(const json_t *o, const char *file, const field *fields, int n) {
  for (int i = 0; i < n; i++)
    RFI_TRY(rfi_json_get_int(o, file, fields[i].key, fields[i].required, 1, fields[i].most, fields[i].to));
  return RFR_OK;
}

static rfr_status read_flag(const json_t *o, const char *file, const char *key, int *to) {
  bool value = *to != 0;
  RFI_TRY(rfi_json_get_bool(o, file, key, false, &value));
  *to = value;
  return RFR_OK;
}

/* An optional text with two accepted values. */
static rfr_status check_text(const json_t *o, const char *file, const char *key, const char *only, const char *alias) {
  const char *value = only;
  RFI_TRY(rfi_json_get_string(o, file, key, false, &value));
  if (strcmp(value, only) == 0 || strcmp(value, alias) == 0) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is %.100s; only %s is supported", key, value, only);
}

/* A required number above 0. `missing`: the value for which null stands; NULL: null is an error. */
static rfr_status read_positive(const json_t *o, const char *file, const char *key, const double *missing, double *to) {
  if (!json_object_get(o, key)) return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is missing", key);
  if (missing) *to = *missing;
  RFI_TRY(rfi_json_get_real(o, file, key, !missing, to));
  if (*to > 0.0 || (missing && *to == *missing)) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is %g; it must be positive", key, *to);
}

/* The library checks types, so an integral value must be written as an integer. */
static json_t *number(double x) { return x == floor(x) && x < 1e15 ? json_integer((json_int_t)x) : json_real(x); }

static json_t *cap(double x) { return x > 0.0 ? json_real(x) : json_null(); }

/* ---- sliding windows ---- */

/* Number of layers without a sliding window. */
static int64_t full_layers(const rfr_model_config *c) {
  int64_t n = 0;
  for (int64_t l = 0; l < c->layers; l++) n += !rfr_model_has_window(c, l);
  return n;
}

const char *rfi_hf_layer_type(rfr_model_config *c, int64_t layer, const char *type) {
  const uint64_t bit = (uint64_t)1 << (layer % 64);
  if (layer < 0 || layer >= RFR_MAX_LAYERS) return "is past the last layer";
  if (strcmp(type, "sliding_attention") == 0) {
    c->no_window[layer / 64] &= ~bit;
    return c->window > 0 ? NULL : "is sliding_attention, but there is no sliding_window";
  }
  c->no_window[layer / 64] |= bit;
  return strcmp(type, "full_attention") == 0 ? NULL : "is neither full_attention nor sliding_attention";
}

/* `listed`: the model type reads the list; for other types the list must agree with what they compute. */
static rfr_status read_layer_types(const json_t *o, const char *file, bool listed, rfr_model_config *c) {
  const json_t *types = json_object_get(o, "layer_types");
  if (!types || json_is_null(types)) return RFR_OK;
  if (!json_is_array(types) || (int64_t)json_array_size(types) != c->layers)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "layer_types is not a list of %lld texts, one for each layer",
                       (long long)c->layers);
  for (int64_t i = 0; i < c->layers; i++) {
    const bool before = rfr_model_has_window(c, i);
    const char *name = json_string_value(json_array_get(types, (size_t)i));
    const char *wrong = name ? rfi_hf_layer_type(c, i, name) : "is not a text";
    if (!wrong && !listed && before != rfr_model_has_window(c, i)) wrong = "is not what this model_type computes";
    if (wrong) return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "layer_types[%lld] %s", (long long)i, wrong);
  }
  return RFR_OK;
}

/* The layers that have a window: none, all, or those that layer_types names. */
typedef enum layers { NONE, ALL, LISTED } layers;

/* Reads sliding_window, which must be given, and layer_types. Without layer_types the pattern in `c` stays. */
static rfr_status read_window(const json_t *o, const char *file, layers which, rfr_model_config *c) {
  c->window = 0;
  if (which != NONE && !json_object_get(o, "sliding_window"))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0,
                       "sliding_window is missing; give a number of tokens, or null for no window");
  if (which != NONE) RFI_TRY(rfi_json_get_int(o, file, "sliding_window", false, 1, INT32_MAX, &c->window));
  RFI_TRY(read_layer_types(o, file, which == LISTED, c));
  if (full_layers(c) == c->layers) c->window = 0;
  return RFR_OK;
}

static int write_window(json_t *o, const rfr_model_config *c) {
  return json_object_set_new(o, "sliding_window", c->window > 0 ? json_integer(c->window) : json_null());
}

static int write_layer_types(json_t *o, const rfr_model_config *c) {
  json_t *types = json_array();
  int wrong = 0;
  for (int64_t l = 0; l < c->layers; l++)
    wrong |=
        json_array_append_new(types, json_string(rfr_model_has_window(c, l) ? "sliding_attention" : "full_attention"));
  return wrong | json_object_set_new(o, "layer_types", types);
}

/* ---- Llama and types that only add flags ---- */

enum { KV_HEADS = 1, HEAD_DIM = 2 };

static rfr_status read_gemma_activation(const json_t *o, const char *file, const rfr_model_config *c) {
  RFI_TRY(check_text(o, file, "hidden_activation", "gelu_pytorch_tanh", "gelu_new"));
  /* in Gemma's files "gelu" also means the tanh form */
  return c->type == RFR_MODEL_GEMMA ? check_text(o, file, "hidden_act", "gelu_pytorch_tanh", "gelu") : RFR_OK;
}

/* Fields of all types except GPT-2. `required`: sizes without a usable default. */
static rfr_status read_base(const json_t *o, const char *file, unsigned required, rfr_model_config *c) {
  const field fields[] = {{"vocab_size", &c->vocab_size, INT32_MAX, true},
                          {"hidden_size", &c->hidden_size, RFI_MOST_WIDTH, true},
                          {"intermediate_size", &c->intermediate_size, RFI_MOST_INNER, true},
                          {"num_hidden_layers", &c->layers, RFR_MAX_LAYERS, true},
                          {"num_attention_heads", &c->heads, RFI_MOST_HEADS, true},
                          {"max_position_embeddings", &c->max_positions, INT32_MAX, true}};
  RFI_TRY(rfi_is_gemma(c) ? read_gemma_activation(o, file, c) : check_text(o, file, "hidden_act", "silu", "swish"));
  RFI_TRY(read_sizes(o, file, fields, (int)(sizeof fields / sizeof fields[0])));
  c->kv_heads = c->heads;
  c->head_dim = c->hidden_size / c->heads;
  const field late[] = {{"num_key_value_heads", &c->kv_heads, RFI_MOST_HEADS, (required & KV_HEADS) != 0},
                        {"head_dim", &c->head_dim, RFI_MOST_HEADS, (required & HEAD_DIM) != 0}};
  RFI_TRY(read_sizes(o, file, late, 2));
  RFI_TRY(rfi_json_get_real(o, file, "rms_norm_eps", false, &c->norm_eps));
  RFI_TRY(rfi_json_get_real(o, file, "initializer_range", false, &c->init_std));
  RFI_TRY(rfi_hf_read_rope(o, file, c));
  return read_flag(o, file, "tie_word_embeddings", &c->tie_embeddings);
}

static int write_nothing(json_t *o, const rfr_model_config *c) {
  (void)o, (void)c;
  return 0;
}

static rfr_status read_llama(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, 0, c));
  RFI_TRY(read_window(o, file, NONE, c));
  RFI_TRY(read_flag(o, file, "attention_bias", &c->attention_bias));
  return read_flag(o, file, "mlp_bias", &c->mlp_bias);
}

static rfr_status read_mistral(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS, c));
  return read_window(o, file, ALL, c);
}

static rfr_status read_ministral(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS, c));
  return read_window(o, file, LISTED, c);
}

static int write_ministral(json_t *o, const rfr_model_config *c) {
  return write_window(o, c) | write_layer_types(o, c);
}

/* ---- Qwen: Llama with biases on q, k and v (2) or norms of q and k (3) ---- */

/* With use_sliding_window, layer_types names the layers with a window. Older files have max_window_layers, the number
 * of leading layers without one. */
static rfr_status read_qwen_window(const json_t *o, const char *file, rfr_model_config *c) {
  bool used = false;
  RFI_TRY(rfi_json_get_bool(o, file, "use_sliding_window", false, &used));
  const json_t *types = json_object_get(o, "layer_types"), *window = json_object_get(o, "sliding_window");
  if (used && window && !json_is_null(window) && (!types || json_is_null(types))) {
    int64_t full = 0;
    RFI_TRY(rfi_json_get_int(o, file, "max_window_layers", true, 0, INT32_MAX, &full));
    for (int64_t l = 0; l < full && l < c->layers; l++) rfi_hf_layer_type(c, l, "full_attention");
  }
  if (used) return read_window(o, file, LISTED, c);
  c->window = 0;
  return read_layer_types(o, file, true, c);
}

static int write_qwen(json_t *o, const rfr_model_config *c) {
  if (c->window == 0) return 0;
  int64_t first = 0;
  while (first < c->layers && !rfr_model_has_window(c, first)) first++;
  return write_window(o, c) | json_object_set_new(o, "use_sliding_window", json_true()) |
         json_object_set_new(o, "max_window_layers", json_integer(first)) | write_layer_types(o, c);
}

static rfr_status read_qwen2(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS, c));
  c->qkv_bias = 1;
  return read_qwen_window(o, file, c);
}

static rfr_status read_qwen3(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS | HEAD_DIM, c));
  c->qk_norm = 1;
  RFI_TRY(read_qwen_window(o, file, c));
  return read_flag(o, file, "attention_bias", &c->attention_bias);
}

/* ---- experts ---- */

void rfi_hf_mlp_only(rfr_model_config *c, int64_t layer) {
  if (layer >= 0 && layer < c->layers && layer < RFR_MAX_LAYERS) c->mlp_only[layer / 64] |= (uint64_t)1 << (layer % 64);
}

void rfi_hf_sparse_step(rfr_model_config *c, int64_t step) {
  for (int64_t l = 0; l < c->layers; l++)
    if ((l + 1) % step != 0) rfi_hf_mlp_only(c, l);
}

/* Only Qwen's classes read these fields. */
static rfr_status read_mlp_only(const json_t *o, const char *file, rfr_model_config *c) {
  int64_t step = 1;
  RFI_TRY(rfi_json_get_int(o, file, "decoder_sparse_step", false, 1, INT32_MAX, &step));
  rfi_hf_sparse_step(c, step);
  const json_t *list = json_object_get(o, "mlp_only_layers");
  if (!list || json_is_null(list)) return RFR_OK;
  bool numbers = json_is_array(list);
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *layer = json_array_get(list, i);
    numbers = numbers && json_is_integer(layer);
    rfi_hf_mlp_only(c, json_is_integer(layer) ? json_integer_value(layer) : -1);
  }
  return numbers ? RFR_OK : rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "mlp_only_layers is not a list of layer numbers");
}

/* `size`: the field with the size of an expert. The name of the number of experts depends on the model type and on the
 * library's version. */
static rfr_status read_experts(const json_t *o, const char *file, const char *size, rfr_model_config *c) {
  const char *count = json_object_get(o, "num_local_experts") ? "num_local_experts" : "num_experts";
  const field fields[] = {{count, &c->experts, RFI_MOST_EXPERTS, true},
                          {"num_experts_per_tok", &c->experts_per_token, RFI_MOST_EXPERTS, true},
                          {size, &c->expert_size, RFI_MOST_INNER, true}};
  bool balances = false;
  RFI_TRY(read_sizes(o, file, fields, 3));
  RFI_TRY(rfi_json_get_real(o, file, "router_z_loss_coef", false, &c->z_loss));
  RFI_TRY(rfi_json_get_bool(o, file, "output_router_logits", false, &balances));
  return balances ? rfi_json_get_real(o, file, "router_aux_loss_coef", true, &c->balance_loss) : RFR_OK;
}

static rfr_status read_mixtral(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS, c));
  RFI_TRY(read_experts(o, file, "intermediate_size", c));
  c->expert_norm = 1;
  return read_window(o, file, ALL, c);
}

static rfr_status read_qwen_experts(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_experts(o, file, "moe_intermediate_size", c));
  c->expert_norm = 0;
  RFI_TRY(read_flag(o, file, "norm_topk_prob", &c->expert_norm));
  return read_mlp_only(o, file, c);
}

static rfr_status read_qwen2_moe(const json_t *o, const char *file, rfr_model_config *c) {
  const field shared = {"shared_expert_intermediate_size", &c->shared_size, RFI_MOST_INNER, true};
  RFI_TRY(read_qwen2(o, file, c));
  RFI_TRY(read_qwen_experts(o, file, c));
  return read_sizes(o, file, &shared, 1);
}

static rfr_status read_qwen3_moe(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_qwen3(o, file, c));
  return read_qwen_experts(o, file, c);
}

/* Adds the fields and releases them. */
static int add(json_t *o, json_t *fields) {
  const int wrong = json_object_update(o, fields);
  json_decref(fields);
  return wrong;
}

/* The library adds the aux loss if output_router_logits is true. It has no z-loss. */
static int write_experts(json_t *o, const rfr_model_config *c) {
  int wrong = add(o, json_pack("{s:I, s:f, s:b}", "num_experts_per_tok", (json_int_t)c->experts_per_token,
                               "router_aux_loss_coef", c->balance_loss, "output_router_logits", c->balance_loss > 0.0));
  if (c->z_loss > 0.0) wrong |= json_object_set_new(o, "router_z_loss_coef", json_real(c->z_loss));
  return wrong;
}

static int write_mixtral(json_t *o, const rfr_model_config *c) {
  return write_experts(o, c) |
         add(o, json_pack("{s:I, s:I, s:f}", "num_local_experts", (json_int_t)c->experts, "intermediate_size",
                          (json_int_t)c->expert_size, "router_jitter_noise", 0.0)) |
         write_window(o, c);
}

/* Indices of the layers that have an MLP instead of experts. NULL when out of memory. */
static json_t *mlp_only_layers(const rfr_model_config *c) {
  json_t *list = json_array();
  for (int64_t l = 0; list && l < c->layers; l++) {
    if (rfr_model_has_experts(c, l) || json_array_append_new(list, json_integer(l)) == 0) continue;
    json_decref(list);
    list = NULL;
  }
  return list;
}

static int write_qwen_moe(json_t *o, const rfr_model_config *c) {
  int wrong = write_qwen(o, c) | write_experts(o, c) |
              add(o, json_pack("{s:I, s:I, s:b, s:i, s:o}", "num_experts", (json_int_t)c->experts,
                               "moe_intermediate_size", (json_int_t)c->expert_size, "norm_topk_prob", c->expert_norm,
                               "decoder_sparse_step", 1, "mlp_only_layers", mlp_only_layers(c)));
  if (c->shared_size > 0)
    wrong |= json_object_set_new(o, "shared_expert_intermediate_size", json_integer(c->shared_size));
  return wrong;
}

bool rfi_hf_is_mixtral(const rfr_model_config *c) { return c->experts > 0 && !c->qk_norm && !c->qkv_bias; }

/* ---- Gemma ---- */

/* Older Gemma classes read hidden_act, newer ones hidden_activation. */
static int write_gemma(json_t *o, const rfr_model_config *c) {
  static const char gelu[] = "gelu_pytorch_tanh";
  (void)c;
  return json_object_set_new(o, "hidden_act", json_string(gelu)) |
         json_object_set_new(o, "hidden_activation", json_string(gelu));
}

static rfr_status read_gemma(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS | HEAD_DIM, c));
  RFI_TRY(read_window(o, file, NONE, c));
  return read_flag(o, file, "attention_bias", &c->attention_bias);
}

static const double no_cap = 0.0;

static rfr_status read_gemma2(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, KV_HEADS | HEAD_DIM, c));
  RFI_TRY(read_positive(o, file, "query_pre_attn_scalar", NULL, &c->attention_scalar));
  RFI_TRY(read_positive(o, file, "attn_logit_softcapping", &no_cap, &c->attention_cap));
  RFI_TRY(read_positive(o, file, "final_logit_softcapping", &no_cap, &c->logit_cap));
  RFI_TRY(read_window(o, file, LISTED, c));
  return read_flag(o, file, "attention_bias", &c->attention_bias);
}

static int write_gemma2(json_t *o, const rfr_model_config *c) {
  const double scalar = c->attention_scalar > 0.0 ? c->attention_scalar : (double)c->head_dim;
  return write_gemma(o, c) | write_window(o, c) |
         write_layer_types(o, c) | /* the default of sliding_window is a number */
         json_object_set_new(o, "query_pre_attn_scalar", number(scalar)) |
         json_object_set_new(o, "attn_logit_softcapping", cap(c->attention_cap)) |
         json_object_set_new(o, "final_logit_softcapping", cap(c->logit_cap));
}

/* The class ignores attn_logit_softcapping. Layers with a window use rope_local_base_freq: sliding_window must be a
 * number. */
static rfr_status read_gemma3(const json_t *o, const char *file, rfr_model_config *c) {
  int64_t step = 0;
  RFI_TRY(read_base(o, file, KV_HEADS | HEAD_DIM, c));
  RFI_TRY(read_positive(o, file, "query_pre_attn_scalar", NULL, &c->attention_scalar));
  RFI_TRY(rfi_json_get_real(o, file, "final_logit_softcapping", false, &c->logit_cap));
  RFI_TRY(rfi_json_get_int(o, file, "sliding_window", true, 1, INT32_MAX, &c->window));
  RFI_TRY(rfi_json_get_int(o, file, "sliding_window_pattern", false, 1, RFR_MAX_LAYERS, &step));
  for (int64_t l = 0; step > 0 && l < c->layers; l++)
    rfi_hf_layer_type(c, l, (l + 1) % step == 0 ? "full_attention" : "sliding_attention");
  RFI_TRY(read_window(o, file, LISTED, c));
  return read_flag(o, file, "attention_bias", &c->attention_bias);
}

static int write_gemma3(json_t *o, const rfr_model_config *c) {
  const int wrong = write_gemma2(o, c) | json_object_set_new(o, "rope_local_base_freq", number(c->local_theta));
  if (c->window > 0) return wrong;
  return wrong | json_object_set_new(o, "sliding_window", json_integer(c->max_positions)); /* no layer uses it */
}

/* ---- OLMo 2, SmolLM3, Granite ---- */

static rfr_status read_olmo2(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, 0, c));
  RFI_TRY(read_window(o, file, NONE, c));
  return read_flag(o, file, "attention_bias", &c->attention_bias);
}

static void set_rope(rfr_model_config *c, int64_t layer, bool rope) {
  const uint64_t bit = (uint64_t)1 << (layer % 64);
  if (rope) c->no_rope[layer / 64] &= ~bit;
  else c->no_rope[layer / 64] |= bit;
}

/* no_rope_layers has a 1 for each layer with RoPE. With use_sliding_window the layers without RoPE have a window,
 * unless layer_types names others. */
static rfr_status read_smollm3(const json_t *o, const char *file, rfr_model_config *c) {
  int64_t step = 4;
  bool windows = false;
  RFI_TRY(read_base(o, file, KV_HEADS, c));
  RFI_TRY(rfi_json_get_int(o, file, "no_rope_layer_interval", false, 1, INT32_MAX, &step));
  const json_t *list = json_object_get(o, "no_rope_layers");
  const bool listed = list && !json_is_null(list);
  if (listed && (!json_is_array(list) || (int64_t)json_array_size(list) < c->layers))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "no_rope_layers is not a list of at least %lld numbers",
                       (long long)c->layers);
  for (int64_t l = 0; l < c->layers; l++) {
    const json_t *given = json_array_get(list, (size_t)l);
    const json_int_t rope = listed ? json_integer_value(given) : (l + 1) % step != 0;
    if ((listed && !json_is_integer(given)) || rope < 0 || rope > 1)
      return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "no_rope_layers[%lld] is neither 0 nor 1", (long long)l);
    set_rope(c, l, rope);
  }
  RFI_TRY(rfi_json_get_bool(o, file, "use_sliding_window", false, &windows));
  for (int64_t l = 0; windows && l < c->layers; l++)
    rfi_hf_layer_type(c, l, rfr_model_has_rope(c, l) ? "full_attention" : "sliding_attention");
  RFI_TRY(read_window(o, file, windows ? LISTED : NONE, c));
  RFI_TRY(read_flag(o, file, "attention_bias", &c->attention_bias));
  return read_flag(o, file, "mlp_bias", &c->mlp_bias);
}

static int write_smollm3(json_t *o, const rfr_model_config *c) {
  json_t *rope = json_array();
  int wrong = 0;
  for (int64_t l = 0; l < c->layers; l++) wrong |= json_array_append_new(rope, json_integer(rfr_model_has_rope(c, l)));
  return wrong | json_object_set_new(o, "no_rope_layers", rope) | write_window(o, c) |
         json_object_set_new(o, "use_sliding_window", json_boolean(c->window > 0)) | write_layer_types(o, c);
}

static rfr_status read_granite(const json_t *o, const char *file, rfr_model_config *c) {
  const struct {
    const char *key;
    double *to;
  } factors[] = {{"attention_multiplier", &c->attention_multiplier},
                 {"embedding_multiplier", &c->embedding_multiplier},
                 {"residual_multiplier", &c->residual_multiplier},
                 {"logits_scaling", &c->logits_scaling}};
  RFI_TRY(read_base(o, file, 0, c));
  for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
    *factors[i].to = 1.0;
    RFI_TRY(rfi_json_get_real(o, file, factors[i].key, false, factors[i].to));
    if (!(*factors[i].to > 0.0))
      return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is %g; it must be positive", factors[i].key, *factors[i].to);
  }
  RFI_TRY(read_window(o, file, NONE, c));
  RFI_TRY(read_flag(o, file, "attention_bias", &c->attention_bias));
  return read_flag(o, file, "mlp_bias", &c->mlp_bias);
}

static double or_one(double x) { return x > 0.0 ? x : 1.0; }

static int write_granite(json_t *o, const rfr_model_config *c) {
  const double scale = c->attention_multiplier > 0.0 ? c->attention_multiplier : 1.0 / sqrt((double)c->head_dim);
  return json_object_set_new(o, "attention_multiplier", json_real(scale)) |
         json_object_set_new(o, "embedding_multiplier", json_real(or_one(c->embedding_multiplier))) |
         json_object_set_new(o, "residual_multiplier", json_real(or_one(c->residual_multiplier))) |
         json_object_set_new(o, "logits_scaling", json_real(or_one(c->logits_scaling)));
}

/* ---- Phi-3, Phi-4 ---- */

static rfr_status read_phi3(const json_t *o, const char *file, rfr_model_config *c) {
  RFI_TRY(read_base(o, file, 0, c));
  RFI_TRY(rfi_json_get_int(o, file, "sliding_window", false, 1, INT32_MAX, &c->window));
  return read_layer_types(o, file, false, c);
}

static int write_phi3(json_t *o, const rfr_model_config *c) {
  const rfr_rope_extension *e = &c->rope_extension;
  double part = c->rotary_dim > 0 ? (double)c->rotary_dim / (double)c->head_dim : 1.0;
  if ((int64_t)((double)c->head_dim * part) < c->rotary_dim) part = nextafter(part, 1.0); /* readers round down */
  const int64_t original = e->type == RFR_ROPE_LONGROPE ? e->original : c->max_positions;
  return write_window(o, c) | json_object_set_new(o, "partial_rotary_factor", json_real(part)) |
         json_object_set_new(o, "original_max_position_embeddings", json_integer(original)) |
         json_object_set_new(o, "resid_pdrop", json_real(0.0)) | json_object_set_new(o, "embd_pdrop", json_real(0.0));
}

/* ---- GPT-2 ---- */

static rfr_status read_gpt2(const json_t *o, const char *file, rfr_model_config *c) {
  const field fields[] = {{"vocab_size", &c->vocab_size, INT32_MAX, true},
                          {"n_embd", &c->hidden_size, RFI_MOST_WIDTH, true},
                          {"n_layer", &c->layers, RFR_MAX_LAYERS, true},
                          {"n_head", &c->heads, RFI_MOST_HEADS, true},
                          {"n_positions", &c->max_positions, INT32_MAX, true}};
  RFI_TRY(check_text(o, file, "activation_function", "gelu_new", "gelu_pytorch_tanh"));
  RFI_TRY(read_sizes(o, file, fields, (int)(sizeof fields / sizeof fields[0])));
  c->kv_heads = c->heads;
  c->head_dim = c->hidden_size / c->heads;
  c->intermediate_size = 4 * c->hidden_size;
  const field late[] = {{"n_inner", &c->intermediate_size, RFI_MOST_INNER, false}};
  RFI_TRY(read_sizes(o, file, late, 1));
  RFI_TRY(rfi_json_get_real(o, file, "layer_norm_epsilon", false, &c->norm_eps));
  RFI_TRY(rfi_json_get_real(o, file, "initializer_range", false, &c->init_std));
  return read_flag(o, file, "tie_word_embeddings", &c->tie_embeddings);
}

/* ---- the table ---- */

#define QWEN_MOE "num_experts num_local_experts decoder_sparse_step mlp_only_layers"
static const rfi_hf_family families[] = {
    {"gpt2", "GPT2LMHeadModel", RFR_MODEL_GPT2, 1e-5, 1e4, true, read_gpt2, write_nothing, ""},
    {"llama", "LlamaForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_llama, write_nothing, ""},
    {"mistral", "MistralForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_mistral, write_window, ""},
    {"ministral", "MinistralForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_ministral, write_ministral, ""},
    {"mixtral", "MixtralForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_mixtral, write_mixtral,
     "num_experts num_local_experts"},
    {"qwen2", "Qwen2ForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_qwen2, write_qwen, ""},
    {"qwen2_moe", "Qwen2MoeForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_qwen2_moe, write_qwen_moe, QWEN_MOE},
    {"qwen3", "Qwen3ForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_qwen3, write_qwen, ""},
    {"qwen3_moe", "Qwen3MoeForCausalLM", RFR_MODEL_LLAMA, 1e-6, 1e4, false, read_qwen3_moe, write_qwen_moe, QWEN_MOE},
    {"gemma", "GemmaForCausalLM", RFR_MODEL_GEMMA, 1e-6, 1e4, true, read_gemma, write_gemma, ""},
    {"gemma2", "Gemma2ForCausalLM", RFR_MODEL_GEMMA2, 1e-6, 1e4, true, read_gemma2, write_gemma2,
     "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"},
    {"gemma3_text", "Gemma3ForCausalLM", RFR_MODEL_GEMMA3, 1e-6, 1e6, true, read_gemma3, write_gemma3,
     "query_pre_attn_scalar final_logit_softcapping rope_local_base_freq"},
    {"olmo2", "Olmo2ForCausalLM", RFR_MODEL_OLMO2, 1e-5, 1e4, false, read_olmo2, write_nothing, ""},
    {"smollm3", "SmolLM3ForCausalLM", RFR_MODEL_SMOLLM3, 1e-6, 2e6, true, read_smollm3, write_smollm3,
     "no_rope_layers no_rope_layer_interval"},
    {"phi3", "Phi3ForCausalLM", RFR_MODEL_PHI3, 1e-5, 1e4, false, read_phi3, write_phi3, "partial_rotary_factor"},
    {"granite", "GraniteForCausalLM", RFR_MODEL_GRANITE, 1e-6, 1e4, false, read_granite, write_granite,
     "attention_multiplier embedding_multiplier residual_multiplier logits_scaling"},
};
enum { N_FAMILIES = sizeof families / sizeof families[0] };

const rfi_hf_family *rfi_hf_family_at(int i) { return i >= 0 && i < N_FAMILIES ? &families[i] : NULL; }

const rfi_hf_family *rfi_hf_family_find(const char *type) {
  const size_t n = strlen(type);
  for (int i = 0; i < N_FAMILIES; i++)
    if (strlen(families[i].type) == n && memcmp(families[i].type, type, n) == 0) return &families[i];
  return NULL;
}

/* Several families are of type Llama. */
static const char *llama_type(const rfr_model_config *c) {
  if (c->experts > 0) return c->qk_norm ? "qwen3_moe" : c->qkv_bias ? "qwen2_moe" : "mixtral";
  if (c->qk_norm) return "qwen3";
  if (c->qkv_bias) return "qwen2";
  return c->window == 0 ? "llama" : full_layers(c) == 0 ? "mistral" : "ministral";
}

const rfi_hf_family *rfi_hf_family_of(const rfr_model_config *c) {
  int i = 0;
  if (c->type == RFR_MODEL_LLAMA) return rfi_hf_family_find(llama_type(c));
  while (families[i].model != c->type) i++;
  return &families[i];
}
