/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads and writes config.json with the keys that the transformers library reads for each model type, so that the
 * library loads a checkpoint unchanged.
 *
 * A folder's config.json is foreign data: each field is checked against its limit before it is used. A byte model has
 * no special tokens; their ids are written as null, which never ends generation. A run from a folder keeps the folder's
 * ids (rfi_hf_notes).
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "data/json_file.h"
#include "model/hf.h"
#include "model/hf_families.h"
#include "model/source.h"

/* ---- writing ---- */

const char *rfi_hf_dtype_name(rfr_dtype dtype) {
  return dtype == RFR_BF16 ? "bfloat16" : dtype == RFR_F16 ? "float16" : "float32";
}

static json_t *llama(const rfr_model_config *c, const rfi_hf_family *f) {
  json_t *o = json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:b, s:b, s:b, s:s, s:f, s:f, "
                        "s:n, s:n, s:s, s:b}",
                        "architectures", f->architecture, "model_type", f->type, "vocab_size",
                        (json_int_t)c->vocab_size, "hidden_size", (json_int_t)c->hidden_size, "intermediate_size",
                        (json_int_t)c->intermediate_size, "num_hidden_layers", (json_int_t)c->layers,
                        "num_attention_heads", (json_int_t)c->heads, "num_key_value_heads", (json_int_t)c->kv_heads,
                        "head_dim", (json_int_t)c->head_dim, "max_position_embeddings", (json_int_t)c->max_positions,
                        "rms_norm_eps", c->norm_eps, "rope_theta", c->rope_theta, "tie_word_embeddings",
                        c->tie_embeddings, "attention_bias", c->attention_bias, "mlp_bias", c->mlp_bias, "hidden_act",
                        "silu", "attention_dropout", 0.0, "initializer_range", c->init_std, "bos_token_id",
                        "eos_token_id", "torch_dtype", rfi_hf_dtype_name(c->dtype), "use_cache", 1);
  if (o && !(f->write(o, c) | rfi_hf_write_rope(o, c))) return o;
  json_decref(o);
  return NULL;
}

static json_t *gpt2(const rfr_model_config *c, const rfi_hf_family *f) {
  return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:b, s:s, s:f, s:f, s:f, s:f, s:n, s:n, s:s, s:b}",
                   "architectures", f->architecture, "model_type", f->type, "vocab_size", (json_int_t)c->vocab_size,
                   "n_embd", (json_int_t)c->hidden_size, "n_inner", (json_int_t)c->intermediate_size, "n_layer",
                   (json_int_t)c->layers, "n_head", (json_int_t)c->heads, "n_positions", (json_int_t)c->max_positions,
                   "layer_norm_epsilon", c->norm_eps, "tie_word_embeddings", c->tie_embeddings, "activation_function",
                   "gelu_new", "embd_pdrop", c->dropout, "resid_pdrop", c->dropout, "attn_pdrop", 0.0,
                   "initializer_range", c->init_std, "bos_token_id", "eos_token_id", "torch_dtype",
                   rfi_hf_dtype_name(c->dtype), "use_cache", 1);
}

json_t *rfi_hf_config(const rfr_model_config *c) {
  const rfi_hf_family *f = rfi_hf_family_of(c);
  return c->type == RFR_MODEL_GPT2 ? gpt2(c, f) : llama(c, f);
}

/* ---- fields that are refused ---- */

/* Fields that change what a model computes. A family that does not list the field (rfi_hf_family.fields) must have the
 * one supported value. */
typedef enum neutral { ABSENT, FALSE, TRUE, ZERO, ONE, EMPTY, OFF } neutral;
static const struct {
  const char *key;
  neutral only;
} refused[] = {{"compression_config", ABSENT},
               {"num_experts", ABSENT},
               {"num_local_experts", ABSENT},
               {"decoder_sparse_step", ONE},
               {"mlp_only_layers", EMPTY},
               {"router_jitter_noise", ZERO},
               {"qkv_bias", TRUE},
               {"attn_logit_softcapping", ABSENT},
               {"final_logit_softcapping", ABSENT},
               {"query_pre_attn_scalar", ABSENT},
               {"rope_local_base_freq", ABSENT},
               {"no_rope_layers", ABSENT},
               {"no_rope_layer_interval", ABSENT},
               {"attention_multiplier", ABSENT},
               {"use_bidirectional_attention", FALSE},
               {"partial_rotary_factor", ONE},
               {"embedding_multiplier", ONE},
               {"residual_multiplier", ONE},
               {"logits_scaling", ONE},
               {"is_encoder_decoder", FALSE},
               {"add_cross_attention", FALSE},
               {"scale_attn_weights", TRUE},
               {"scale_attn_by_inverse_layer_idx", FALSE},
               {"pruned_heads", EMPTY}};

/* Fields that change the mathematics of other model types of the library, version 5.23. The library ignores them for
 * the families here, but a folder with such a field was made for other code. They are accepted if they are null, false,
 * 0 or empty, or for factors if they are 1. */
static const char changing[] =
    "activation_sparsity_pattern alibi altup_num_inputs apply_residual_connection_post_layernorm "
    "attention_chunk_size attention_k_eq_v attn_temperature_tuning audio_config block_types cca_time0 clip_qkv "
    "conv_L_cache conv_kernel d_rel dim_model_base enable_moe_block expert_layer_period first_k_dense_replace "
    "full_attn_idxs gate_soft_cap gated_norm_rank gating global_attn_every_n_layers hc_count hc_mult "
    "hidden_size_per_layer_input index_topk input_jitter_noise interleave_moe_layer_step is_moe kv_lora_rank "
    "lambda_std_dev laurel_rank layer_rope_theta layers_block_type learnable_sink_init learned_pos_emb "
    "linear_head_dim linear_num_heads linear_num_key_heads linear_num_value_heads lm_head_bias local_layer_ids "
    "log_scaling_alpha logits_soft_cap long_mscale mamba_d_state mamba_num_heads mlp_alpha_factor mlp_layer_types "
    "moe_k moe_latent_size moe_layers moe_num_experts moe_num_shared_experts moe_router_logit_softcapping "
    "moe_topk mrope_section multi_query mup_enabled n_group n_routed_experts n_shared_experts "
    "new_decoder_architecture num_attention_heads_per_layer num_kv_shared_layers num_shared_experts "
    "output_gate_type output_logit_soft_cap parallel_attn pre_norm q_lora_rank qk_l2_clip_threshold qk_layernorm "
    "qk_nope_head_dim qk_rope_head_dim rope_interleave rotary_dim scale_depth scale_embedding scoring_func "
    "shared_expert_sink shared_intermediate_size short_mscale sliding_window_size ssm_state_size state_size "
    "swiglu_alpha swiglu_limit text_config time_step_rank top_k_experts topk_group topk_method use_attention_gate "
    "use_bias use_expert_bias use_learned_position_embeddings use_mrope use_parallel_residual use_post_norm "
    "use_qk_norm use_qkv_bias use_sandwich_norm v_head_dim vision_config word_embed_proj_dim";
static const char factors[] =
    "attention_in_multiplier attention_out_multiplier attention_value_scale attn_scale embedding_scale "
    "full_attn_mod interpolate_factor key_multiplier lm_head_multiplier logit_scale logits_mup_width_multiplier "
    "mlp_multipliers route_scale routed_scaling_factor router_scaling_factor scale_emb";

static bool is_neutral(const json_t *value, neutral only) {
  if (!value || json_is_null(value)) return true;
  switch (only) {
    case FALSE: return json_is_false(value);
    case TRUE: return json_is_true(value);
    case ZERO: return json_is_number(value) && json_number_value(value) == 0.0;
    case ONE: return json_is_number(value) && json_number_value(value) == 1.0;
    case EMPTY: return json_object_size(value) + json_array_size(value) == 0 && !json_is_number(value);
    case OFF:
      return json_is_false(value) || is_neutral(value, ZERO) ||
             (!json_is_boolean(value) && json_string_length(value) == 0 && is_neutral(value, EMPTY));
    default: return false;
  }
}

static rfr_status refuse(const char *file, const char *key, const json_t *value) {
  char text[80];
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%.100s is %s, which is not supported", key,
                     rfi_json_brief(value, text, sizeof text));
}

rfr_status rfi_hf_refuse(const json_t *o, const char *file, const char *fields) {
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    const json_t *value = json_object_get(o, refused[i].key);
    if (is_neutral(value, refused[i].only) || rfi_has_word(fields, refused[i].key)) continue;
    return refuse(file, refused[i].key, value);
  }
  const char *key;
  const json_t *value;
  json_object_foreach((json_t *)o, key, value) {
    if ((rfi_has_word(changing, key) && !is_neutral(value, OFF)) ||
        (rfi_has_word(factors, key) && !is_neutral(value, ONE)))
      return refuse(file, key, value);
  }
  return RFR_OK;
}

/* Weights that rfi_quantized_read decodes. */
static rfr_status check_quantization(const json_t *o, const char *file) {
  static const char key[] = "quantization_config";
  const json_t *q = json_object_get(o, key), *block = json_object_get(q, "weight_block_size");
  const char *method = "";
  if (!q || json_is_null(q)) return RFR_OK;
  if (!json_is_object(q)) return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is not an object", key);
  RFI_TRY(rfi_json_get_string(q, file, "quant_method", true, &method));
  if (strcmp(method, "bitsandbytes") == 0 && json_is_true(json_object_get(q, "load_in_4bit"))) return RFR_OK;
  if (strcmp(method, "fp8") == 0 && json_array_size(block) == 2 &&
      json_integer_value(json_array_get(block, 0)) == 128 && json_integer_value(json_array_get(block, 1)) == 128)
    return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0,
                     "%s.quant_method is %.60s; fp8 with weight_block_size [128, 128] and bitsandbytes with "
                     "load_in_4bit are supported",
                     key, method);
}

/* ---- reading ---- */

#define WITHOUT_DROPOUT "run.dropout=none trains without dropout"

static rfr_status no_dropout(const json_t *o, const char *file, const char *key, const char *what) {
  double p = 0.0;
  RFI_TRY(rfi_json_get_real(o, file, key, false, &p));
  if (p == 0.0) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is %g; dropout %s is not supported; " WITHOUT_DROPOUT, key, p,
                     what);
}

/* One probability for both places: after the embedding and before each residual addition. */
static rfr_status read_dropout(const json_t *o, const char *file, rfr_model_config *c) {
  double embedding = 0.0;
  if (c->type == RFR_MODEL_PHI3) RFI_TRY(no_dropout(o, file, "resid_pdrop", "of phi3"));
  if (c->type == RFR_MODEL_PHI3) RFI_TRY(no_dropout(o, file, "embd_pdrop", "of phi3"));
  if (c->type != RFR_MODEL_GPT2) return no_dropout(o, file, "attention_dropout", "inside attention");
  RFI_TRY(no_dropout(o, file, "attn_pdrop", "inside attention"));
  RFI_TRY(rfi_json_get_real(o, file, "resid_pdrop", false, &c->dropout));
  RFI_TRY(rfi_json_get_real(o, file, "embd_pdrop", false, &embedding));
  if (embedding == c->dropout) return RFR_OK;
  return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0,
                     "embd_pdrop is %g and resid_pdrop is %g; different values are not supported; " WITHOUT_DROPOUT,
                     embedding, c->dropout);
}

static rfr_status unknown_type(rfr_ctx *ctx, const char *path, const char *type) {
  rfi_string list = {.ctx = ctx};
  rfr_status s = RFR_OK;
  for (int i = 0; s == RFR_OK && rfi_hf_family_at(i); i++)
    s = rfi_string_printf(&list, "%s%s", i ? ", " : "", rfi_hf_family_at(i)->type);
  if (s == RFR_OK && strcmp(type, "gemma3") == 0)
    s = rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0,
                    "model_type is gemma3, a model of text and images; only its text model, gemma3_text, is supported: "
                    "save it with Gemma3ForCausalLM of the transformers library");
  else if (s == RFR_OK)
    s = rfi_fail_at(RFI_E_MODEL_CONFIG, path, 0, "model_type is %.100s; supported are %s", type, list.data);
  rfi_string_deinit(&list);
  return s;
}

rfr_status rfi_hf_read(rfr_ctx *ctx, const char *folder, bool dropout, rfr_model_config *c) {
  rfr_status s;
  char *path = NULL;
  json_t *o = NULL;
  const char *type = "";
  const rfr_dtype dtype = c->dtype;
  RFI_GOTO(rfi_source_config(ctx, folder, &path, &o));
  RFI_GOTO(rfi_json_get_string(o, path, "model_type", true, &type));
  const rfi_hf_family *f = rfi_hf_family_find(type);
  if (!f) RFI_GOTO(unknown_type(ctx, path, type));
  RFI_GOTO(rfi_hf_refuse(o, path, f->fields));
  RFI_GOTO(check_quantization(o, path));
  *c = rfr_model_config_default(f->model);
  c->dtype = dtype;
  c->norm_eps = f->norm_eps;
  c->rope_theta = f->rope_theta;
  c->tie_embeddings = f->tied;
  if (dropout) RFI_GOTO(read_dropout(o, path, c));
  RFI_GOTO(f->read(o, path, c));
  s = rfr_model_config_check(c);
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
    "router_z_loss_coef", "original_max_position_embeddings", "sliding_window_pattern",
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

static bool is_known(const char *key) {
  bool found = key[0] == '_' || rfi_has_word(changing, key) || rfi_has_word(factors, key);
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) found = found || strcmp(key, known[i]) == 0;
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) found = found || strcmp(key, refused[i].key) == 0;
  return found;
}

/* Adds the unknown field names of an object to the list; returns nonzero when out of memory. `known_names`: NULL for
 * fields of config.json itself. */
static int add_unknown(json_t *list, const json_t *o, const char *prefix, const char *known_names) {
  const char *key;
  json_t *value;
  int wrong = 0;
  json_object_foreach((json_t *)o, key, value) {
    const bool found = known_names ? rfi_has_word(known_names, key) : is_known(key);
    if (!found) wrong |= json_array_append_new(list, json_sprintf("%s%s", prefix, key));
  }
  return wrong;
}

int rfi_hf_unknown_fields(const json_t *o, json_t *list) {
  static const char *const objects[] = {"rope_scaling", "rope_parameters"}, *const kinds[] = {"full_attention",
                                                                                              "sliding_attention"};
  int wrong = add_unknown(list, o, "", NULL);
  for (int i = 0; i < 2; i++) {
    const json_t *settings = json_object_get(o, objects[i]);
    char prefix[64];
    snprintf(prefix, sizeof prefix, "%s.", objects[i]);
    wrong |= add_unknown(list, settings, prefix, rfi_hf_rope_fields);
    for (int k = 0; k < 2; k++) {
      snprintf(prefix, sizeof prefix, "%s.%s.", objects[i], kinds[k]);
      wrong |= add_unknown(list, json_object_get(settings, kinds[k]), prefix, rfi_hf_rope_fields);
    }
  }
  return wrong;
}
