/* SPDX-License-Identifier: Apache-2.0
 *
 * config.json and generation_config.json of a checkpoint, with the keys that the
 * transformers library reads for each model type, so that it loads the folder as it is.
 * A byte model has no special tokens: the ids are null, which stops no generation.
 */
#include "train/hf.h"

#include <string.h>

#include "base/base.h"
#include "data/file.h"
#include "data/json.h"

static json_t *llama(const rfr_model_config *c) {
  return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:b, s:b, s:b, s:s, s:f, s:f, "
                   "s:n, s:n, s:s, s:b}",
                   "architectures", "LlamaForCausalLM", "model_type", "llama", "vocab_size", (json_int_t)c->vocab_size,
                   "hidden_size", (json_int_t)c->hidden_size, "intermediate_size", (json_int_t)c->intermediate_size,
                   "num_hidden_layers", (json_int_t)c->layers, "num_attention_heads", (json_int_t)c->heads,
                   "num_key_value_heads", (json_int_t)c->kv_heads, "head_dim", (json_int_t)c->head_dim,
                   "max_position_embeddings", (json_int_t)c->max_positions, "rms_norm_eps", c->norm_eps, "rope_theta",
                   c->rope_theta, "tie_word_embeddings", c->tie_embeddings, "attention_bias", c->attention_bias,
                   "mlp_bias", c->mlp_bias, "hidden_act", "silu", "attention_dropout", 0.0, "initializer_range",
                   c->init_std, "bos_token_id", "eos_token_id", "torch_dtype",
                   c->dtype == RFR_BF16 ? "bfloat16" : "float32", "use_cache", 1);
}

static json_t *gpt2(const rfr_model_config *c) {
  return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:b, s:s, s:f, s:f, s:f, s:f, s:n, s:n, s:s, s:b}",
                   "architectures", "GPT2LMHeadModel", "model_type", "gpt2", "vocab_size", (json_int_t)c->vocab_size,
                   "n_embd", (json_int_t)c->hidden_size, "n_inner", (json_int_t)c->intermediate_size, "n_layer",
                   (json_int_t)c->layers, "n_head", (json_int_t)c->heads, "n_positions", (json_int_t)c->max_positions,
                   "layer_norm_epsilon", c->norm_eps, "tie_word_embeddings", c->tie_embeddings, "activation_function",
                   "gelu_new", "embd_pdrop", c->dropout, "resid_pdrop", c->dropout, "attn_pdrop", 0.0,
                   "initializer_range", c->init_std, "bos_token_id", "eos_token_id", "torch_dtype",
                   c->dtype == RFR_BF16 ? "bfloat16" : "float32", "use_cache", 1);
}

json_t *rfi_hf_config(const rfr_model_config *c) { return c->type == RFR_MODEL_GPT2 ? gpt2(c) : llama(c); }

json_t *rfi_hf_generation_config(const rfr_model_config *c) {
  return json_pack("{s:b, s:f, s:I, s:n, s:n}", "do_sample", 1, "temperature", 0.8, "max_length",
                   (json_int_t)c->max_positions, "bos_token_id", "eos_token_id");
}

/* ---- reading ---- */

typedef struct field {
  const char *key;
  int64_t *to;
  bool required;
} field;

static rfr_status read_sizes(const json_t *o, const char *file, const field *fields, int n) {
  for (int i = 0; i < n; i++)
    RFI_TRY(rfi_json_get_int(o, file, fields[i].key, fields[i].required, 1, INT32_MAX, fields[i].to));
  return RFR_OK;
}

static rfr_status read_flag(const json_t *o, const char *file, const char *key, int *to) {
  bool value = *to != 0;
  RFI_TRY(rfi_json_get_bool(o, file, key, false, &value));
  *to = value;
  return RFR_OK;
}

/* A text that must be `only` when it is there. */
static rfr_status want(const json_t *o, const char *file, const char *key, const char *only) {
  const char *value = only;
  RFI_TRY(rfi_json_get_string(o, file, key, false, &value));
  if (strcmp(value, only) == 0) return RFR_OK;
  return rfi_fail_at(RFI_E_UNSUPPORTED, file, 0, "%s is %s; only %s is built", key, value, only);
}

static rfr_status read_llama(const json_t *o, const char *file, rfr_model_config *c) {
  const field fields[] = {{"vocab_size", &c->vocab_size, true},
                          {"hidden_size", &c->hidden_size, true},
                          {"intermediate_size", &c->intermediate_size, true},
                          {"num_hidden_layers", &c->layers, true},
                          {"num_attention_heads", &c->heads, true},
                          {"max_position_embeddings", &c->max_positions, true}};
  RFI_TRY(want(o, file, "hidden_act", "silu"));
  if (json_is_object(json_object_get(o, "rope_scaling")))
    return rfi_fail_at(RFI_E_UNSUPPORTED, file, 0, "rope_scaling is not built");
  RFI_TRY(read_sizes(o, file, fields, (int)(sizeof fields / sizeof fields[0])));
  c->kv_heads = c->heads;
  c->head_dim = c->hidden_size / c->heads;
  const field late[] = {{"num_key_value_heads", &c->kv_heads, false}, {"head_dim", &c->head_dim, false}};
  RFI_TRY(read_sizes(o, file, late, 2));
  RFI_TRY(rfi_json_get_real(o, file, "rms_norm_eps", false, &c->norm_eps));
  RFI_TRY(rfi_json_get_real(o, file, "rope_theta", false, &c->rope_theta));
  RFI_TRY(read_flag(o, file, "tie_word_embeddings", &c->tie_embeddings));
  RFI_TRY(read_flag(o, file, "attention_bias", &c->attention_bias));
  return read_flag(o, file, "mlp_bias", &c->mlp_bias);
}

static rfr_status read_gpt2(const json_t *o, const char *file, rfr_model_config *c) {
  const field fields[] = {{"vocab_size", &c->vocab_size, true},
                          {"n_embd", &c->hidden_size, true},
                          {"n_layer", &c->layers, true},
                          {"n_head", &c->heads, true},
                          {"n_positions", &c->max_positions, true}};
  RFI_TRY(want(o, file, "activation_function", "gelu_new"));
  RFI_TRY(read_sizes(o, file, fields, (int)(sizeof fields / sizeof fields[0])));
  c->kv_heads = c->heads;
  c->head_dim = c->hidden_size / c->heads;
  c->intermediate_size = 4 * c->hidden_size;
  const field late[] = {{"n_inner", &c->intermediate_size, false}};
  RFI_TRY(read_sizes(o, file, late, 1));
  RFI_TRY(rfi_json_get_real(o, file, "layer_norm_epsilon", false, &c->norm_eps));
  return read_flag(o, file, "tie_word_embeddings", &c->tie_embeddings);
}

rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, rfr_model_config *c) {
  rfr_status s;
  char *path = NULL;
  json_t *o = NULL;
  const char *type = "";
  const rfr_dtype dtype = c->dtype;
  RFI_TRY(rfi_path_join(ctx, folder, "config.json", &path));
  RFI_GOTO(rfi_json_load(ctx, path, &o));
  RFI_GOTO(rfi_json_get_string(o, path, "model_type", true, &type));
  const bool gpt2 = strcmp(type, "gpt2") == 0;
  if (!gpt2 && strcmp(type, "llama") != 0) {
    s = rfi_fail_at(RFI_E_UNSUPPORTED, path, 0, "model_type %s; llama and gpt2 are built", type);
    goto fail;
  }
  *c = rfr_model_config_default(gpt2 ? RFR_MODEL_GPT2 : RFR_MODEL_LLAMA);
  c->dtype = dtype;
  s = gpt2 ? read_gpt2(o, path, c) : read_llama(o, path, c);
fail:
  json_decref(o);
  rfi_free(ctx, path);
  return s;
}
