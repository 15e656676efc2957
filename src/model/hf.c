/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads and writes config.json and generation_config.json with the keys that the transformers library reads for each
 * model type, so that the library loads a checkpoint unchanged.
 *
 * A folder's config.json is foreign data: each field is checked against its limit before it is used. A byte model has
 * no special tokens; their ids are written as null, which never ends generation. A run from a folder keeps the folder's
 * ids (rfi_hf_notes).
 */
#include "model/hf.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "data/file.h"
#include "data/json_file.h"
#include "model/gguf_model.h"
#include "nn/nn.h"

/* Number of layers without a sliding window. */
static int64_t full_layers(const rfr_model_config *c) {
  int64_t n = 0;
  for (int64_t l = 0; l < c->layers; l++) n += !rfr_model_has_window(c, l);
  return n;
}

/* Qwen2 is Llama with biases on q, k and v. Qwen3 is Llama with norms on q and k. Mistral is Llama with a sliding
 * window in all layers, Ministral in some. */
typedef struct family {
  const char *type, *architecture;
} family;
static family family_of(const rfr_model_config *c) {
  if (c->type == RFR_MODEL_GEMMA) return (family){"gemma", "GemmaForCausalLM"};
  if (c->type == RFR_MODEL_GEMMA2) return (family){"gemma2", "Gemma2ForCausalLM"};
  if (c->experts > 0 && c->qk_norm) return (family){"qwen3_moe", "Qwen3MoeForCausalLM"};
  if (c->experts > 0 && c->qkv_bias) return (family){"qwen2_moe", "Qwen2MoeForCausalLM"};
  if (c->experts > 0) return (family){"mixtral", "MixtralForCausalLM"};
  if (c->qk_norm) return (family){"qwen3", "Qwen3ForCausalLM"};
  if (c->qkv_bias) return (family){"qwen2", "Qwen2ForCausalLM"};
  if (c->window == 0) return (family){"llama", "LlamaForCausalLM"};
  if (full_layers(c) == 0) return (family){"mistral", "MistralForCausalLM"};
  return (family){"ministral", "MinistralForCausalLM"};
}

/* Mistral's window is in all layers. Qwen's classes read layer_types; older ones read max_window_layers, the number of
 * leading layers without a window. */
static int add_window(json_t *o, const rfr_model_config *c) {
  const bool gemma2 = c->type == RFR_MODEL_GEMMA2;
  if (c->window == 0 && !gemma2) return 0; /* Gemma 2 needs the null: its default is a number */
  json_t *types = json_array();
  int64_t first = 0;
  while (first < c->layers && !rfr_model_has_window(c, first)) first++;
  int wrong = json_object_set_new(o, "sliding_window", c->window > 0 ? json_integer(c->window) : json_null());
  for (int64_t l = 0; l < c->layers; l++)
    wrong |=
        json_array_append_new(types, json_string(rfr_model_has_window(c, l) ? "sliding_attention" : "full_attention"));
  if (c->qkv_bias || c->qk_norm) {
    wrong |= json_object_set_new(o, "use_sliding_window", json_true());
    wrong |= json_object_set_new(o, "max_window_layers", json_integer(first));
  }
  if (gemma2 || c->qkv_bias || c->qk_norm || full_layers(c) > 0) wrong |= json_object_set(o, "layer_types", types);
  json_decref(types);
  return wrong;
}

/* The library checks types: an integral value must be written as an integer. */
static json_t *number(double x) { return x == floor(x) && x < 1e15 ? json_integer((json_int_t)x) : json_real(x); }

static json_t *cap(double x) { return x > 0.0 ? json_real(x) : json_null(); }

/* Older Gemma classes read hidden_act, newer ones hidden_activation. */
static int add_gemma(json_t *o, const rfr_model_config *c) {
  static const char gelu[] = "gelu_pytorch_tanh";
  if (!rfi_is_gemma(c)) return 0;
  int wrong = json_object_set_new(o, "hidden_act", json_string(gelu));
  wrong |= json_object_set_new(o, "hidden_activation", json_string(gelu));
  if (c->type == RFR_MODEL_GEMMA) return wrong;
  const double scalar = c->attention_scalar > 0.0 ? c->attention_scalar : (double)c->head_dim;
  wrong |= json_object_set_new(o, "query_pre_attn_scalar", number(scalar));
  wrong |= json_object_set_new(o, "attn_logit_softcapping", cap(c->attention_cap));
  wrong |= json_object_set_new(o, "final_logit_softcapping", cap(c->logit_cap));
  return wrong;
}

static bool is_mixtral(const rfr_model_config *c) { return c->experts > 0 && !c->qk_norm && !c->qkv_bias; }

/* Indices of the layers that have an MLP instead of experts. */
static json_t *mlp_only_layers(const rfr_model_config *c) {
  json_t *list = json_array();
  for (int64_t l = 0; list && l < c->layers; l++) {
    if (rfr_model_has_experts(c, l) || json_array_append_new(list, json_integer(l)) == 0) continue;
    json_decref(list);
    list = NULL;
  }
  return list;
}

/* The library adds the aux loss if output_router_logits is true. It has no z-loss. */
static int add_experts(json_t *o, const rfr_model_config *c) {
  if (c->experts == 0) return 0;
  json_t *own = json_pack("{s:I, s:f, s:b}", "num_experts_per_tok", (json_int_t)c->experts_per_token,
                          "router_aux_loss_coef", c->balance_loss, "output_router_logits", c->balance_loss > 0.0);
  int wrong = json_object_update(o, own);
  json_decref(own);
  own = is_mixtral(c) ? json_pack("{s:I, s:I, s:f, s:o}", "num_local_experts", (json_int_t)c->experts,
                                  "intermediate_size", (json_int_t)c->expert_size, "router_jitter_noise", 0.0,
                                  "sliding_window", c->window > 0 ? json_integer(c->window) : json_null())
                      : json_pack("{s:I, s:I, s:b, s:i, s:o}", "num_experts", (json_int_t)c->experts,
                                  "moe_intermediate_size", (json_int_t)c->expert_size, "norm_topk_prob", c->expert_norm,
                                  "decoder_sparse_step", 1, "mlp_only_layers", mlp_only_layers(c));
  wrong |= json_object_update(o, own);
  json_decref(own);
  if (c->z_loss > 0.0) wrong |= json_object_set_new(o, "router_z_loss_coef", json_real(c->z_loss));
  if (c->shared_size > 0)
    wrong |= json_object_set_new(o, "shared_expert_intermediate_size", json_integer(c->shared_size));
  return wrong;
}

static json_t *scaling(const rfr_rope_scaling *r) {
  if (r->original == 0) return json_pack("{s:s, s:f}", "rope_type", "linear", "factor", r->factor);
  return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", r->factor, "low_freq_factor", r->low,
                   "high_freq_factor", r->high, "original_max_position_embeddings", (json_int_t)r->original);
}

static const char *torch_dtype(rfr_dtype dtype) {
  return dtype == RFR_BF16 ? "bfloat16" : dtype == RFR_F16 ? "float16" : "float32";
}

static json_t *llama(const rfr_model_config *c) {
  const family own = family_of(c);
  json_t *o =
      json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:b, s:b, s:b, s:s, s:f, s:f, "
                "s:n, s:n, s:s, s:b}",
                "architectures", own.architecture, "model_type", own.type, "vocab_size", (json_int_t)c->vocab_size,
                "hidden_size", (json_int_t)c->hidden_size, "intermediate_size", (json_int_t)c->intermediate_size,
                "num_hidden_layers", (json_int_t)c->layers, "num_attention_heads", (json_int_t)c->heads,
                "num_key_value_heads", (json_int_t)c->kv_heads, "head_dim", (json_int_t)c->head_dim,
                "max_position_embeddings", (json_int_t)c->max_positions, "rms_norm_eps", c->norm_eps, "rope_theta",
                c->rope_theta, "tie_word_embeddings", c->tie_embeddings, "attention_bias", c->attention_bias,
                "mlp_bias", c->mlp_bias, "hidden_act", "silu", "attention_dropout", 0.0, "initializer_range",
                c->init_std, "bos_token_id", "eos_token_id", "torch_dtype", torch_dtype(c->dtype), "use_cache", 1);
  int wrong = o ? add_window(o, c) | add_gemma(o, c) | add_experts(o, c) : 1;
  if (!wrong && c->rope_scaling.factor != 1.0)
    wrong = json_object_set_new(o, "rope_scaling", scaling(&c->rope_scaling));
  if (!wrong) return o;
  json_decref(o);
  return NULL;
}

static json_t *gpt2(const rfr_model_config *c) {
  return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:b, s:s, s:f, s:f, s:f, s:f, s:n, s:n, s:s, s:b}",
                   "architectures", "GPT2LMHeadModel", "model_type", "gpt2", "vocab_size", (json_int_t)c->vocab_size,
                   "n_embd", (json_int_t)c->hidden_size, "n_inner", (json_int_t)c->intermediate_size, "n_layer",
                   (json_int_t)c->layers, "n_head", (json_int_t)c->heads, "n_positions", (json_int_t)c->max_positions,
                   "layer_norm_epsilon", c->norm_eps, "tie_word_embeddings", c->tie_embeddings, "activation_function",
                   "gelu_new", "embd_pdrop", c->dropout, "resid_pdrop", c->dropout, "attn_pdrop", 0.0,
                   "initializer_range", c->init_std, "bos_token_id", "eos_token_id", "torch_dtype",
                   torch_dtype(c->dtype), "use_cache", 1);
}

json_t *rfi_hf_config(const rfr_model_config *c) { return c->type == RFR_MODEL_GPT2 ? gpt2(c) : llama(c); }

/* ---- names ---- */

/* Points at ".mlp.experts." in the name of a packed expert weight (gate_up_proj or down_proj); NULL for other names. */
static const char *experts_of(const char *name) {
  const char *at = strstr(name, ".mlp.experts.");
  return at && strchr(at + strlen(".mlp.experts."), '.') ? NULL : at;
}

int rfi_hf_pieces(const char *name, const rfr_type *type) {
  const char *at = experts_of(name);
  if (!at) return 1;
  return (int)type->shape[0] * (strcmp(at, ".mlp.experts.gate_up_proj") == 0 ? 2 : 1);
}

void rfi_hf_piece(const rfr_model_config *c, const char *name, const rfr_type *type, int i, rfi_hf_tensor *out) {
  static const char *const names[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
  const char *at = experts_of(name), *gate = strstr(name, ".mlp.gate.weight");
  const char *block = is_mixtral(c) ? "block_sparse_moe" : "mlp";
  *out = (rfi_hf_tensor){.rank = type->rank};
  memcpy(out->shape, type->shape, sizeof out->shape);
  if (!at) {
    if (gate) snprintf(out->name, sizeof out->name, "%.*s.%s.gate.weight", (int)(gate - name), name, block);
    else snprintf(out->name, sizeof out->name, "%s", name);
    return;
  }
  const bool up = rfi_hf_pieces(name, type) > type->shape[0];
  out->rank = 2;
  out->shape[0] = up ? type->shape[1] / 2 : type->shape[1];
  out->shape[1] = type->shape[2];
  snprintf(out->name, sizeof out->name, "%.*s.%s.experts.%d.%s.weight", (int)(at - name), name, block, up ? i / 2 : i,
           names[is_mixtral(c)][up ? i % 2 : 2]);
}

/* ---- reading ---- */

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

/* Fields that change what a model computes. Other model types than those of `built` must have the one supported value.
 * */
typedef enum neutral { ABSENT, FALSE, TRUE, ZERO, ONE, EMPTY } neutral;
#define WITH_EXPERTS "mixtral qwen2_moe qwen3_moe"
static const struct {
  const char *key;
  neutral only;
  const char *built; /* model types, separated by blanks */
} refused[] = {{"quantization_config", ABSENT, ""},
               {"compression_config", ABSENT, ""},
               {"num_experts", ABSENT, WITH_EXPERTS},
               {"num_local_experts", ABSENT, WITH_EXPERTS},
               {"decoder_sparse_step", ONE, WITH_EXPERTS},
               {"mlp_only_layers", EMPTY, WITH_EXPERTS},
               {"router_jitter_noise", ZERO, ""},
               {"qkv_bias", TRUE, ""},
               {"attn_logit_softcapping", ABSENT, "gemma2"},
               {"final_logit_softcapping", ABSENT, "gemma2"},
               {"query_pre_attn_scalar", ABSENT, "gemma2"},
               {"use_bidirectional_attention", FALSE, ""},
               {"partial_rotary_factor", ONE, ""},
               {"embedding_multiplier", ONE, ""},
               {"residual_multiplier", ONE, ""},
               {"logits_scaling", ONE, ""},
               {"is_encoder_decoder", FALSE, ""},
               {"add_cross_attention", FALSE, ""},
               {"scale_attn_weights", TRUE, ""},
               {"scale_attn_by_inverse_layer_idx", FALSE, ""},
               {"pruned_heads", EMPTY, ""}};

static bool is_neutral(const json_t *value, neutral only) {
  if (!value || json_is_null(value)) return true;
  switch (only) {
    case FALSE: return json_is_false(value);
    case TRUE: return json_is_true(value);
    case ZERO: return json_is_number(value) && json_number_value(value) == 0.0;
    case ONE: return json_is_number(value) && json_number_value(value) == 1.0;
    case EMPTY: return json_object_size(value) + json_array_size(value) == 0 && !json_is_number(value);
    default: return false;
  }
}

static rfr_status refuse(const json_t *o, const char *file, const char *type) {
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    const json_t *value = json_object_get(o, refused[i].key);
    if (is_neutral(value, refused[i].only) || rfi_has_word(refused[i].built, type)) continue;
    char text[80];
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is %s, which is not supported", refused[i].key,
                       rfi_json_brief(value, text, sizeof text));
  }
  return RFR_OK;
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

/* Which layers have a window, by the library's class:
 *   Llama, Gemma  none, whatever the file says
 *   Mistral       all
 *   Qwen          with use_sliding_window: those that layer_types names; without layer_types all after the first
 *                 max_window_layers
 *   Gemma 2       those that layer_types names; without layer_types every second one, from the first
 * sliding_window must be given: the library's default is an arbitrary number. */
static rfr_status read_window(const json_t *o, const char *file, const char *type, rfr_model_config *c) {
  const bool qwen = c->qkv_bias || c->qk_norm, mistral = strcmp(type, "mistral") == 0 || strcmp(type, "mixtral") == 0,
             none = strcmp(type, "llama") == 0 || c->type == RFR_MODEL_GEMMA;
  bool used = !qwen && !none;
  c->window = 0;
  if (qwen) RFI_TRY(rfi_json_get_bool(o, file, "use_sliding_window", false, &used));
  if (used && !json_object_get(o, "sliding_window"))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0,
                       "sliding_window is missing; give a number of tokens, or null for no window");
  if (used) RFI_TRY(rfi_json_get_int(o, file, "sliding_window", false, 1, INT32_MAX, &c->window));
  const json_t *types = json_object_get(o, "layer_types");
  if (qwen && c->window > 0 && (!types || json_is_null(types))) {
    int64_t full = 0;
    RFI_TRY(rfi_json_get_int(o, file, "max_window_layers", true, 0, INT32_MAX, &full));
    for (int64_t l = 0; l < full && l < c->layers; l++) rfi_hf_layer_type(c, l, "full_attention");
  }
  RFI_TRY(read_layer_types(o, file, !mistral && !none, c));
  if (full_layers(c) == c->layers) c->window = 0;
  return RFR_OK;
}

/* Version 5 of the library writes theta and scaling into rope_parameters. Version 4 wrote rope_theta and rope_scaling,
 * at first with "type" for "rope_type". */
static rfr_status read_rope(const json_t *o, const char *file, rfr_model_config *c) {
  rfr_rope_scaling r = {.factor = 1.0, .low = 1.0, .high = 4.0};
  const char *type = "default", *name = "rope_parameters";
  RFI_TRY(rfi_json_get_real(o, file, "rope_theta", false, &c->rope_theta));
  const json_t *p = json_object_get(o, name);
  if (!json_is_object(p)) p = json_object_get(o, name = "rope_scaling");
  if (!p || json_is_null(p)) return RFR_OK;
  if (!json_is_object(p)) return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is not an object", name);
  RFI_TRY(rfi_json_get_string(p, file, "type", false, &type));
  RFI_TRY(rfi_json_get_string(p, file, "rope_type", false, &type));
  RFI_TRY(rfi_json_get_real(p, file, "rope_theta", false, &c->rope_theta));
  RFI_TRY(refuse(p, file, ""));
  const char *key;
  const json_t *value;
  json_object_foreach((json_t *)p, key, value) {
    if (json_is_object(value))
      return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s.%.100s: RoPE settings per kind of layer are not supported",
                         name, key);
  }
  if (strcmp(type, "default") == 0) return RFR_OK;
  const bool llama3 = strcmp(type, "llama3") == 0;
  if (!llama3 && strcmp(type, "linear") != 0)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s.rope_type is %.100s; default, linear and llama3 are supported",
                       name, type);
  RFI_TRY(rfi_json_get_real(p, file, "factor", true, &r.factor));
  if (llama3) {
    RFI_TRY(rfi_json_get_real(p, file, "low_freq_factor", true, &r.low));
    RFI_TRY(rfi_json_get_real(p, file, "high_freq_factor", true, &r.high));
    r.original = c->max_positions;
    RFI_TRY(rfi_json_get_int(p, file, "original_max_position_embeddings", false, 1, INT32_MAX, &r.original));
  } else {
    r.low = r.high = 0.0;
  }
  c->rope_scaling = r;
  return RFR_OK;
}

#define WITHOUT_DROPOUT "run.dropout=none trains without dropout"

static rfr_status no_attention_dropout(const json_t *o, const char *file, const char *key) {
  double p = 0.0;
  RFI_TRY(rfi_json_get_real(o, file, key, false, &p));
  if (p == 0.0) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0,
                     "%s is %g; dropout inside attention is not supported; " WITHOUT_DROPOUT, key, p);
}

/* One probability for both places: after the embedding and before each residual addition. */
static rfr_status read_dropout(const json_t *o, const char *file, rfr_model_config *c) {
  double embedding = 0.0;
  if (c->type != RFR_MODEL_GPT2) return no_attention_dropout(o, file, "attention_dropout");
  RFI_TRY(no_attention_dropout(o, file, "attn_pdrop"));
  RFI_TRY(rfi_json_get_real(o, file, "resid_pdrop", false, &c->dropout));
  RFI_TRY(rfi_json_get_real(o, file, "embd_pdrop", false, &embedding));
  if (embedding == c->dropout) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0,
                     "embd_pdrop is %g and resid_pdrop is %g; different values are not supported; " WITHOUT_DROPOUT,
                     embedding, c->dropout);
}

/* A required number above 0. `missing`: the value that null stands for; NULL: null is an error. */
static rfr_status read_positive(const json_t *o, const char *file, const char *key, const double *missing, double *to) {
  if (!json_object_get(o, key)) return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is missing", key);
  if (missing) *to = *missing;
  RFI_TRY(rfi_json_get_real(o, file, key, !missing, to));
  if (*to > 0.0 || (missing && *to == *missing)) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is %g; it must be positive", key, *to);
}

/* In Gemma's files "gelu" also means the tanh form. */
static rfr_status read_gemma(const json_t *o, const char *file, rfr_model_config *c) {
  static const double none = 0.0;
  RFI_TRY(check_text(o, file, "hidden_activation", "gelu_pytorch_tanh", "gelu_new"));
  if (c->type == RFR_MODEL_GEMMA) return check_text(o, file, "hidden_act", "gelu_pytorch_tanh", "gelu");
  RFI_TRY(read_positive(o, file, "query_pre_attn_scalar", NULL, &c->attention_scalar));
  RFI_TRY(read_positive(o, file, "attn_logit_softcapping", &none, &c->attention_cap));
  return read_positive(o, file, "final_logit_softcapping", &none, &c->logit_cap);
}

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

static rfr_status read_experts(const json_t *o, const char *file, const char *type, rfr_model_config *c) {
  const bool mixtral = strcmp(type, "mixtral") == 0, shared = strcmp(type, "qwen2_moe") == 0;
  /* the name depends on the model type and on the library's version */
  const char *number = json_object_get(o, "num_local_experts") ? "num_local_experts" : "num_experts";
  const field fields[] = {
      {number, &c->experts, RFI_MOST_EXPERTS, true},
      {"num_experts_per_tok", &c->experts_per_token, RFI_MOST_EXPERTS, true},
      {mixtral ? "intermediate_size" : "moe_intermediate_size", &c->expert_size, RFI_MOST_INNER, true},
      {"shared_expert_intermediate_size", &c->shared_size, RFI_MOST_INNER, true}};
  bool balances = false;
  RFI_TRY(read_sizes(o, file, fields, shared ? 4 : 3));
  c->expert_norm = mixtral;
  if (!mixtral) RFI_TRY(read_flag(o, file, "norm_topk_prob", &c->expert_norm));
  if (!mixtral) RFI_TRY(read_mlp_only(o, file, c));
  RFI_TRY(rfi_json_get_real(o, file, "router_z_loss_coef", false, &c->z_loss));
  RFI_TRY(rfi_json_get_bool(o, file, "output_router_logits", false, &balances));
  return balances ? rfi_json_get_real(o, file, "router_aux_loss_coef", true, &c->balance_loss) : RFR_OK;
}

static rfr_status read_llama(const json_t *o, const char *file, const char *type, rfr_model_config *c) {
  const bool plain = strcmp(type, "llama") == 0, gemma = rfi_is_gemma(c);
  const bool qwen3 = strncmp(type, "qwen3", 5) == 0;
  const field fields[] = {{"vocab_size", &c->vocab_size, INT32_MAX, true},
                          {"hidden_size", &c->hidden_size, RFI_MOST_WIDTH, true},
                          {"intermediate_size", &c->intermediate_size, RFI_MOST_INNER, true},
                          {"num_hidden_layers", &c->layers, RFR_MAX_LAYERS, true},
                          {"num_attention_heads", &c->heads, RFI_MOST_HEADS, true},
                          {"max_position_embeddings", &c->max_positions, INT32_MAX, true}};
  RFI_TRY(gemma ? read_gemma(o, file, c) : check_text(o, file, "hidden_act", "silu", "swish"));
  RFI_TRY(read_sizes(o, file, fields, (int)(sizeof fields / sizeof fields[0])));
  c->kv_heads = c->heads;
  c->head_dim = c->hidden_size / c->heads;
  /* Required where the library's default is an arbitrary number. */
  const field late[] = {{"num_key_value_heads", &c->kv_heads, RFI_MOST_HEADS, !plain},
                        {"head_dim", &c->head_dim, RFI_MOST_HEADS, qwen3 || gemma}};
  RFI_TRY(read_sizes(o, file, late, 2));
  c->norm_eps = 1e-6;
  RFI_TRY(rfi_json_get_real(o, file, "rms_norm_eps", false, &c->norm_eps));
  RFI_TRY(rfi_json_get_real(o, file, "initializer_range", false, &c->init_std));
  RFI_TRY(read_rope(o, file, c));
  RFI_TRY(read_flag(o, file, "tie_word_embeddings", &c->tie_embeddings));
  c->qk_norm = qwen3;
  c->qkv_bias = strncmp(type, "qwen2", 5) == 0;
  if (rfi_has_word(WITH_EXPERTS, type)) RFI_TRY(read_experts(o, file, type, c));
  RFI_TRY(read_window(o, file, type, c));
  /* Other classes ignore these flags. */
  if (plain || qwen3 || gemma) RFI_TRY(read_flag(o, file, "attention_bias", &c->attention_bias));
  return plain ? read_flag(o, file, "mlp_bias", &c->mlp_bias) : RFR_OK;
}

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

/* Is the folder a run's? Its newest checkpoint is what the caller wanted. */
static rfr_status refuse_run(rfr_ctx *ctx, const char *folder, const char *config_path) {
  char kind;
  const char *newest = NULL;
  rfi_paths names = {.ctx = ctx};
  RFI_TRY(rfi_path_kind(config_path, &kind));
  if (kind || rfi_path_kind(folder, &kind) != RFR_OK || (kind != 'd' && kind != 'l')) return RFR_OK;
  rfr_status s = rfi_dir_list(folder, &names);
  for (int i = 0; i < names.n; i++) {
    const char *number = strncmp(names.items[i], "step-", 5) == 0 ? names.items[i] + 5 : "x";
    if (!number[strspn(number, "0123456789")]) newest = names.items[i];
  }
  if (newest)
    s = rfi_fail(RFI_E_RUN_FOLDER, "model: %s is a run's folder, not a model's; give one of its checkpoints: %s/%s",
                 folder, folder, newest);
  rfi_paths_deinit(&names);
  return s;
}

/* config.json of a folder, or what the metadata of a GGUF file say. *path, also on error: the file; *gguf, if it is not
 * NULL: that file, open, or NULL. */
static rfr_status load_config(rfr_ctx *ctx, const char *model, char **path, rfi_gguf **gguf, json_t **o) {
  rfi_gguf *g = NULL;
  bool is_gguf;
  RFI_TRY(rfi_gguf_is(ctx, model, &is_gguf));
  RFI_TRY(is_gguf ? rfi_path_join(ctx, "", model, path) : rfi_path_join(ctx, model, "config.json", path));
  if (!is_gguf) {
    RFI_TRY(refuse_run(ctx, model, *path));
    return rfi_json_load(ctx, *path, o);
  }
  RFI_TRY(rfi_gguf_open(ctx, model, &g));
  const rfr_status s = rfi_gguf_config(ctx, g, o);
  if (gguf) *gguf = g;
  else rfi_gguf_close(g);
  return s;
}

rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, bool dropout, rfr_model_config *c) {
  rfr_status s;
  char *path = NULL;
  json_t *o = NULL;
  const char *type = "";
  const rfr_dtype dtype = c->dtype;
  RFI_GOTO(load_config(ctx, folder, &path, NULL, &o));
  RFI_GOTO(rfi_json_get_string(o, path, "model_type", true, &type));
  static const struct {
    const char *name;
    rfr_model_type type;
  } types[] = {{"gpt2", RFR_MODEL_GPT2},       {"llama", RFR_MODEL_LLAMA},     {"mistral", RFR_MODEL_LLAMA},
               {"ministral", RFR_MODEL_LLAMA}, {"qwen2", RFR_MODEL_LLAMA},     {"qwen3", RFR_MODEL_LLAMA},
               {"mixtral", RFR_MODEL_LLAMA},   {"qwen2_moe", RFR_MODEL_LLAMA}, {"qwen3_moe", RFR_MODEL_LLAMA},
               {"gemma", RFR_MODEL_GEMMA},     {"gemma2", RFR_MODEL_GEMMA2}};
  size_t which = 0;
  while (which < sizeof types / sizeof types[0] && strcmp(type, types[which].name) != 0) which++;
  if (which == sizeof types / sizeof types[0]) {
    s = rfi_fail_at(
        RFI_E_MODEL_CONFIG, path, 0,
        "model_type is %.100s; supported are gpt2, llama, mistral, ministral, mixtral, qwen2, qwen2_moe, qwen3, "
        "qwen3_moe, gemma and gemma2",
        type);
    goto fail;
  }
  RFI_GOTO(refuse(o, path, type));
  *c = rfr_model_config_default(types[which].type);
  c->dtype = dtype;
  if (dropout) RFI_GOTO(read_dropout(o, path, c));
  s = c->type == RFR_MODEL_GPT2 ? read_gpt2(o, path, c) : read_llama(o, path, type, c);
  if (s == RFR_OK) s = rfr_model_config_check(c);
fail:
  json_decref(o);
  rfi_free(ctx, path);
  return s;
}

/* ---- fields that do not describe the model ---- */

/* Fields that are read above, and fields that never change what a model of these types computes. Names that begin with
 * _ are private to the library. */
static const char *const known[] = {
    /* read above; the rows of `refused` are known too */
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "hidden_act", "hidden_activation", "rms_norm_eps",
    "initializer_range", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_dropout",
    "bos_token_id", "eos_token_id", "pad_token_id", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "norm_topk_prob", "router_aux_loss_coef", "output_router_logits",
    "router_z_loss_coef",
    /* of GPT-2 */
    "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "n_ctx", "activation_function", "layer_norm_epsilon",
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
    /* of all model types */
    "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache", "cache_implementation",
    "pretraining_tp", "attn_implementation", "return_dict", "output_hidden_states", "output_attentions", "torchscript",
    "use_bfloat16", "gradient_checkpointing", "chunk_size_feed_forward", "is_decoder", "tie_encoder_decoder",
    "cross_attention_hidden_size", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type",
    "tokenizer_class", "prefix", "task_specific_params", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "tf_legacy_loss",
    /* of generation: version 4 wrote them here too */
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens"};

static const char *const known_of_rope[] = {"type",
                                            "rope_type",
                                            "rope_theta",
                                            "factor",
                                            "low_freq_factor",
                                            "high_freq_factor",
                                            "original_max_position_embeddings"};

static bool is_known(const char *key, const char *const *names, size_t n) {
  bool found = key[0] == '_';
  for (size_t i = 0; i < n; i++) found = found || strcmp(key, names[i]) == 0;
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) found = found || strcmp(key, refused[i].key) == 0;
  return found;
}

/* Adds the unknown field names of an object to the list; nonzero when out of memory. */
static int add_unknown(json_t *list, const json_t *o, const char *prefix, const char *const *names, size_t n) {
  const char *key;
  json_t *value;
  int wrong = 0;
  json_object_foreach((json_t *)o, key, value) {
    if (!is_known(key, names, n)) wrong |= json_array_append_new(list, json_sprintf("%s%s", prefix, key));
  }
  return wrong;
}

/* router_aux_loss_coef, if the folder has it but does not use it. NULL when out of memory. */
static json_t *unused_loss_of(const json_t *o) {
  static const char key[] = "router_aux_loss_coef";
  json_t *unused = json_object(), *factor = json_object_get(o, key);
  if (!unused || !json_is_number(factor) || json_is_true(json_object_get(o, "output_router_logits"))) return unused;
  if (json_object_set(unused, key, factor) == 0) return unused;
  json_decref(unused);
  return NULL;
}

/* The ids of special tokens that an object has. NULL when out of memory. */
static json_t *ids_of(const json_t *o) {
  static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
  json_t *ids = json_object();
  int wrong = ids == NULL;
  for (size_t i = 0; i < sizeof keys / sizeof keys[0] && !wrong; i++) {
    json_t *value = json_object_get(o, keys[i]);
    if (json_is_integer(value) || json_is_array(value)) wrong = json_object_set(ids, keys[i], value);
  }
  if (!wrong) return ids;
  json_decref(ids);
  return NULL;
}

/* Version 5 of the library writes "dtype", version 4 "torch_dtype". */
static rfr_dtype dtype_of(const json_t *o) {
  static const rfr_dtype dtypes[] = {RFR_F32, RFR_BF16, RFR_F16};
  const char *name = json_string_value(json_object_get(o, "dtype"));
  if (!name) name = json_string_value(json_object_get(o, "torch_dtype"));
  for (size_t i = 0; name && i < sizeof dtypes / sizeof dtypes[0]; i++)
    if (strcmp(name, torch_dtype(dtypes[i])) == 0) return dtypes[i];
  return RFR_DTYPE_COUNT;
}

#define FILE_NAME(name) name,
static const char *const file_names[RFI_HF_N_FILES] = {RFI_HF_FILES(FILE_NAME)};
#undef FILE_NAME

/* The files are held in memory for every checkpoint; the largest tokenizer.json in use has about 35 MB. */
enum { KEPT_FILE_LIMIT = 256 << 20 };

static rfr_status read_files(rfr_ctx *ctx, const char *folder, rfi_hf_notes *out) {
  static const char *const tokenizers[] = {"tokenizer.json", "tokenizer.model", "vocab.json",
                                           "vocab.txt",      "merges.txt",      "spiece.model"};
  for (int i = 0; i < RFI_HF_N_FILES; i++) {
    char *path = NULL, kind = 0;
    RFI_TRY(rfi_path_join(ctx, folder, file_names[i], &path));
    rfr_status s = rfi_path_kind(path, &kind);
    if (s == RFR_OK && kind)
      s = rfi_file_read_limited(ctx, path, KEPT_FILE_LIMIT, &out->files[i].data, &out->files[i].n);
    rfi_free(ctx, path);
    RFI_TRY(s);
    for (size_t k = 0; kind && !out->tokenizer && k < sizeof tokenizers / sizeof tokenizers[0]; k++)
      if (strcmp(file_names[i], tokenizers[k]) == 0) out->tokenizer = file_names[i];
  }
  return RFR_OK;
}

rfr_status rfi_hf_notes_read(rfr_ctx *ctx, const char *folder, rfi_hf_notes *out) {
  rfr_status s;
  char *path = NULL;
  json_t *o = NULL;
  rfi_gguf *gguf = NULL;
  *out = (rfi_hf_notes){.ctx = ctx};
  RFI_GOTO(load_config(ctx, folder, &path, &gguf, &o));
  out->dtype = dtype_of(o);
  out->ids = ids_of(o);
  out->unused_loss = unused_loss_of(o);
  out->unknown = json_array();
  int wrong = add_unknown(out->unknown, o, "", known, sizeof known / sizeof known[0]);
  for (int i = 0; i < 2; i++) {
    static const char *const objects[] = {"rope_scaling", "rope_parameters"}, *const prefixes[] = {"rope_scaling.",
                                                                                                   "rope_parameters."};
    wrong |= add_unknown(out->unknown, json_object_get(o, objects[i]), prefixes[i], known_of_rope,
                         sizeof known_of_rope / sizeof known_of_rope[0]);
  }
  if (wrong || !out->ids || !out->unused_loss || !out->unknown) RFI_GOTO(rfi_fail(RFI_E_NO_MEMORY, "reading %s", path));
  if (!gguf) RFI_GOTO(read_files(ctx, folder, out));
  else if (rfi_gguf_key(gguf, "tokenizer.ggml.tokens")) out->tokenizer = "tokenizer.ggml.tokens";
fail:
  rfi_gguf_close(gguf);
  if (s != RFR_OK) rfi_hf_notes_deinit(out);
  json_decref(o);
  rfi_free(ctx, path);
  return s;
}

void rfi_hf_notes_deinit(rfi_hf_notes *notes) {
  json_decref(notes->ids);
  json_decref(notes->unused_loss);
  json_decref(notes->unknown);
  for (int i = 0; i < RFI_HF_N_FILES; i++) rfi_free(notes->ctx, notes->files[i].data);
  *notes = (rfi_hf_notes){0};
}

/* ---- writing a checkpoint ---- */

/* Sets the fields in o and returns o. Out of memory: releases o, returns NULL. */
static json_t *with(json_t *o, json_t *fields) {
  if (!o || !fields || json_object_update(o, fields) == 0) return o;
  json_decref(o);
  return NULL;
}

json_t *rfi_hf_config_with(const rfr_model_config *c, const rfi_hf_notes *notes) {
  json_t *o = with(rfi_hf_config(c), notes->ids);
  return c->balance_loss > 0.0 ? o : with(o, notes->unused_loss);
}

static json_t *generation_config(const rfr_model_config *c, const rfi_hf_notes *notes) {
  json_t *o = json_pack("{s:b, s:f, s:I, s:n, s:n}", "do_sample", 1, "temperature", 0.8, "max_length",
                        (json_int_t)c->max_positions, "bos_token_id", "eos_token_id");
  return with(o, notes->ids);
}

static rfr_status add_json(rfr_ctx *ctx, rfi_checkpoint_writer *w, const char *name, json_t *value) {
  rfi_string text = {.ctx = ctx};
  if (!value) return rfi_fail(RFI_E_NO_MEMORY, "building %s", name);
  rfr_status s = rfi_json_print(value, &text);
  json_decref(value);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, name, text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

rfr_status rfi_hf_save(rfr_ctx *ctx, const rfr_model_config *c, const rfi_hf_notes *notes, rfi_checkpoint_writer *w) {
  RFI_TRY(add_json(ctx, w, "config.json", rfi_hf_config_with(c, notes)));
  for (int i = 0; i < RFI_HF_N_FILES; i++)
    if (notes->files[i].data) RFI_TRY(rfi_checkpoint_add(w, file_names[i], notes->files[i].data, notes->files[i].n));
  if (notes->files[0].data) return RFR_OK; /* generation_config.json */
  return add_json(ctx, w, "generation_config.json", generation_config(c, notes));
}
