/* SPDX-License-Identifier: Apache-2.0
 *
 * config.json of model folders: the fields of each family in the spellings of versions 4 and 5 of the transformers
 * library, fields that are refused, windows, and fields that are reported.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "model/hf.h"
#include "model/hf_families.h"
#include "nn/nn.h"
#include "refrain/train.h"
#include "support/model_folder.h"

static void assert_same(const rfr_model_config *a, const rfr_model_config *b) {
  json_t *x = rfi_hf_config(a), *y = rfi_hf_config(b);
  assert_non_null(x);
  if (!json_equal(x, y)) fail_msg("%s\n%s", json_dumps(x, 0), json_dumps(y, 0));
  json_decref(x);
  json_decref(y);
}

static void written_config_reads_back(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < RFT_N_MODELS; i++) {
    rfr_model_config a, b;
    OK(rft_model_read(f, rft_model_config(rft_models[i]), &a));
    OK(rft_model_read(f, rfi_hf_config(&a), &b));
    assert_same(&a, &b);
    assert_int_equal(a.type, b.type);
  }
}

static void fields(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  OK(rft_model_read(f, rft_model_config("llama"), &c));
  assert_true(c.attention_bias && c.mlp_bias && !c.tie_embeddings && !c.qkv_bias && !c.qk_norm);
  assert_true(c.rope_theta == 1000 && c.rope_scaling.factor == 4 && c.rope_scaling.original == 16);
  OK(rft_model_read(f, rft_model_config("llama-shards"), &c));
  assert_true(c.head_dim == 10 && c.tie_embeddings && c.norm_eps == 1e-6);
  assert_true(c.rope_scaling.factor == 2.5 && c.rope_scaling.original == 0);
  OK(rft_model_read(f, rft_model_config("qwen3"), &c));
  assert_true(c.qk_norm && !c.qkv_bias);
  OK(rft_model_read(f, rft_model_config("gpt2-untied"), &c));
  assert_true(c.type == RFR_MODEL_GPT2 && !c.tie_embeddings && c.intermediate_size == 40);
  OK(rft_model_read(f, rft_model_config("gpt2"), &c));
  assert_true(c.tie_embeddings && c.intermediate_size == 64 && c.dropout == 0.1);
  OK(rft_model_read(f, rft_model_config("gemma"), &c));
  assert_true(c.type == RFR_MODEL_GEMMA && c.tie_embeddings && c.head_dim == 10 && c.logit_cap == 0);
  OK(rft_model_read(f, rft_model_config("gemma2"), &c));
  assert_true(c.type == RFR_MODEL_GEMMA2 && c.experts == 0 && c.attention_scalar == 12 && c.attention_cap == 1.5 &&
              c.logit_cap == 2);
}

/* Fields of experts under the names of version 4 and 5. */
static void expert_fields(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  OK(rft_model_read(f, rft_model_config("mixtral"), &c));
  assert_true(c.experts == 5 && c.experts_per_token == 2 && c.expert_size == 24 && c.expert_norm && !c.shared_size);
  OK(rft_model_read(f, rft_model_config("qwen2-moe"), &c));
  assert_true(c.experts == 4 && c.experts_per_token == 3 && c.expert_size == 10 && !c.expert_norm && c.qkv_bias);
  assert_true(c.shared_size == 14 && c.balance_loss == 0.0);
  json_t *o = rft_model_config("qwen3-moe");
  json_object_set(o, "num_experts", json_object_get(o, "num_local_experts"));
  json_object_del(o, "num_local_experts");
  json_object_set_new(o, "output_router_logits", json_true());
  OK(rft_model_read(f, o, &c));
  assert_true(c.experts == 6 && c.experts_per_token == 2 && c.expert_size == 12 && c.expert_norm && c.qk_norm);
  assert_true(c.balance_loss == 0.001 && c.z_loss == 0.0);
  c.z_loss = 0.25;
  OK(rft_model_read(f, rfi_hf_config(&c), &c));
  assert_true(c.balance_loss == 0.001 && c.z_loss == 0.25);
  static const struct {
    const char *model;
    int64_t layers;
    const char *experts;
  } mixed[] = {{"qwen2-mixed", 4, "0101"}, {"qwen3-mixed", 3, "101"}, {"qwen3-moe", 2, "11"}};
  for (int i = 0; i < 3; i++) {
    OK(rft_model_read(f, rft_model_config(mixed[i].model), &c));
    assert_int_equal(c.layers, mixed[i].layers);
    for (int l = 0; l < c.layers; l++) assert_int_equal(rfr_model_has_experts(&c, l), mixed[i].experts[l] == '1');
  }
}

/* Version 5 has theta in rope_parameters and "dtype" for "torch_dtype"; early version 4 has "type" for "rope_type". */
static void versions(void **state) {
  rft_folder *f = *state;
  rfr_model_config a, b;
  OK(rft_model_read(f, rft_model_config("llama"), &a));
  json_t *o = rft_model_config("llama"), *rope = json_incref(json_object_get(o, "rope_scaling"));
  json_object_set_new(rope, "rope_theta", json_real(1000));
  json_object_del(o, "rope_scaling");
  json_object_del(o, "rope_theta");
  json_object_del(o, "torch_dtype");
  json_object_set_new(o, "dtype", json_string("float32"));
  json_object_set_new(o, "rope_parameters", rope);
  OK(rft_model_read(f, o, &b));
  assert_same(&a, &b);
  o = rft_model_config("llama");
  rope = json_object_get(o, "rope_scaling");
  json_object_del(rope, "rope_type");
  json_object_set_new(rope, "type", json_string("llama3"));
  OK(rft_model_read(f, o, &b));
  assert_same(&a, &b);
  /* Gemma 2 of version 4: no layer_types, theta at the top level, both names of the activation */
  OK(rft_model_read(f, rft_model_config("gemma2"), &a));
  o = rft_model_config("gemma2");
  json_object_del(o, "layer_types");
  json_object_del(o, "rope_parameters");
  json_object_del(o, "dtype");
  json_object_set_new(o, "torch_dtype", json_string("float32"));
  json_object_set_new(o, "rope_theta", json_real(10000));
  json_object_set_new(o, "hidden_act", json_string("gelu_pytorch_tanh"));
  json_object_set_new(o, "cache_implementation", json_string("hybrid"));
  OK(rft_model_read(f, o, &b));
  assert_same(&a, &b);
  o = rft_model_config("gemma2");
  json_object_del(o, "final_logit_softcapping");
  assert_int_equal(rft_model_read(f, o, &b), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "final_logit_softcapping is missing"));
}

/* Files of version 4, as changes of those of version 5; a null deletes a field. */
static void older_files(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *model, *changes;
  } cases[] = {
      {"gemma3",
       "{\"rope_parameters\": null, \"layer_types\": null, \"sliding_window_pattern\": 2, \"rope_theta\": 5000.0, "
       "\"rope_local_base_freq\": 300.0, \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4.0}}"},
      {"phi3-short",
       "{\"rope_parameters\": null, \"rope_theta\": 10000.0, \"partial_rotary_factor\": 0.75, \"rope_scaling\": "
       "{\"type\": \"su\", \"short_factor\": [1.0, 1.25, 2.0], \"long_factor\": [1.5, 4.0, 9.0]}}"},
      {"phi3-long", "{\"rope_parameters\": null, \"rope_theta\": 10000.0, \"rope_scaling\": {\"type\": \"yarn\", "
                    "\"short_factor\": [1.0, 1.25, 2.0, 2.5], \"long_factor\": [1.5, 4.0, 9.0, 11.0]}}"},
      {"qwen3-yarn",
       "{\"rope_parameters\": null, \"rope_theta\": 1000.0, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
       "\"beta_fast\": 4, \"original_max_position_embeddings\": 16}}"},
      {"smollm3", "{\"no_rope_layers\": null, \"layer_types\": null}"},
      {"smollm3-window", "{\"layer_types\": null}"},
      {"granite", "{\"rope_parameters\": null, \"rope_theta\": 10000}"},
      {"olmo2", "{\"rope_parameters\": null, \"rope_theta\": 10000}"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_model_config a, b;
    const char *key;
    json_t *o = rft_model_config(cases[i].model), *changes = json_loads(cases[i].changes, 0, NULL), *value;
    assert_non_null(changes);
    OK(rft_model_read(f, rft_model_config(cases[i].model), &a));
    json_object_foreach(changes, key, value) {
      if (json_is_null(value)) json_object_del(o, key);
      else json_object_set(o, key, value);
    }
    json_decref(changes);
    OK(rft_model_read(f, o, &b));
    assert_same(&a, &b);
    rfi_hf_notes n;
    OK(rfi_hf_notes_read(f->ctx, f->path, &n));
    assert_int_equal(json_array_size(n.unknown), 0);
    rfi_hf_notes_deinit(&n);
  }
}

/* Defaults and computed values of the library's classes. */
static void defaults(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  json_t *o = rft_model_config("granite");
  static const char *const factors[] = {"attention_multiplier", "embedding_multiplier", "residual_multiplier",
                                        "logits_scaling"};
  for (int i = 0; i < 4; i++) json_object_del(o, factors[i]);
  OK(rft_model_read(f, o, &c));
  assert_true(c.attention_multiplier == 1 && c.embedding_multiplier == 1 && c.residual_multiplier == 1);
  o = rft_model_config("smollm3");
  json_object_del(o, "rope_parameters");
  json_object_del(o, "tie_word_embeddings");
  OK(rft_model_read(f, o, &c));
  assert_true(c.rope_theta == 2e6 && c.tie_embeddings);
  o = rft_model_config("gemma3");
  json_object_del(o, "rope_parameters");
  OK(rft_model_read(f, o, &c));
  assert_true(c.rope_theta == 1e6 && c.local_theta == 1e4);
  OK(rft_model_read(f, rft_model_config("phi3-short"), &c));
  assert_true(c.rotary_dim == 6 && c.norm_eps == 1e-5 && c.rope_extension.original == 40);
}

/* docs/families.md must name each family. */
static void documented(void **state) {
  (void)state;
  FILE *in = fopen(RFT_SOURCE_DIR "/docs/families.md", "rb");
  static char text[32768];
  char name[64];
  assert_non_null(in);
  text[fread(text, 1, sizeof text - 1, in)] = 0;
  fclose(in);
  for (int i = 0; rfi_hf_family_at(i); i++) {
    snprintf(name, sizeof name, "`%s`", rfi_hf_family_at(i)->type);
    if (!strstr(text, name)) fail_msg("docs/families.md does not have %s", name);
  }
}

/* Frequencies and attention factors as the library computes them (modeling_rope_utils.py, version 5.23, in f32). */
static void frequencies(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *changes;
    int64_t longest;
    double attention;
    int pairs, at[4];
    double want[4];
  } cases[] = {
      {"{\"head_dim\": 128, \"max_position_embeddings\": 131072, \"rope_scaling\": {\"rope_type\": \"yarn\", "
       "\"rope_theta\": 1e6, \"factor\": 4.0, \"original_max_position_embeddings\": 32768}}",
       1,
       1.138629436111989,
       64,
       {1, 24, 30, 63},
       {0.8058422207832336, 0.005375321488827467, 0.0010643609566614032, 3.102344408034696e-07}},
      {"{\"head_dim\": 32, \"rope_scaling\": {\"rope_type\": \"yarn\", \"rope_theta\": 1e4, \"factor\": 40.0, "
       "\"mscale\": 0.707, \"mscale_all_dim\": 0.5, \"beta_fast\": 16, \"beta_slow\": 2, \"truncate\": false, "
       "\"original_max_position_embeddings\": 100}}",
       1,
       1.064468903941252,
       16,
       {1, 2, 3, 15},
       {0.4101741313934326, 0.14508797228336334, 0.03346948325634003, 4.445698323252145e-06}},
      {"{\"model_type\": \"phi3\", \"hidden_size\": 64, \"head_dim\": 32, \"max_position_embeddings\": 131072, "
       "\"original_max_position_embeddings\": 4096, \"partial_rotary_factor\": 0.75, \"rope_theta\": 1e4, "
       "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, "
       "1.9, 2.0, 2.1], \"long_factor\": [1.0, 4.5, 8.0, 11.5, 15.0, 18.5, 22.0, 25.5, 29.0, 32.5, 36.0, 39.5]}}",
       4096,
       1.1902380714238083,
       12,
       {0, 1, 5, 11},
       {1.0, 0.42196258902549744, 0.014362899586558342, 0.00010259211558150128}},
      {NULL,
       4097,
       1.1902380714238083,
       12,
       {0, 1, 5, 11},
       {1.0, 0.10314641892910004, 0.0011645592749118805, 5.454263828141848e-06}},
  };
  rfr_model_config c;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    double frequency[RFR_MAX_LIST], scale;
    if (cases[i].changes) {
      json_t *o = rft_model_config("qwen2"), *changes = json_loads(cases[i].changes, 0, NULL);
      assert_int_equal(json_object_update(o, changes), 0);
      json_object_del(o, "rope_parameters");
      json_decref(changes);
      OK(rft_model_read(f, o, &c));
    }
    assert_int_equal(rfi_rope_frequencies(&c, cases[i].longest, frequency, &scale), cases[i].pairs);
    assert_true(fabs(scale / cases[i].attention - 1) < 1e-15);
    for (int k = 0; k < 4; k++) {
      const double got = frequency[cases[i].at[k]];
      if (!(fabs(got / cases[i].want[k] - 1) < 4e-7)) fail_msg("%zu: %.17g, not %.17g", i, got, cases[i].want[k]);
    }
  }
}

static void refused(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *model, *key, *value, *text; /* text NULL: accepted */
  } cases[] = {
      {"llama", "model_type", "\"mamba\"", "model_type is mamba"},
      {"llama", "hidden_act", "\"gelu\"", "hidden_act is gelu"},
      {"llama", "rope_scaling", "{\"rope_type\": \"dynamic\", \"factor\": 2.0}", "rope_type is dynamic"},
      {"llama", "rope_scaling", "{\"rope_type\": \"linear\"}", "factor"},
      {"llama", "rope_scaling", "{\"rope_type\": \"linear\", \"factor\": 0}", "factor"},
      {"llama", "rope_parameters", "{\"full_attention\": {\"rope_type\": \"default\"}}", "full_attention"},
      {"llama", "rope_scaling", "{\"rope_type\": \"default\"}", NULL},
      {"llama", "rope_scaling", "null", NULL},
      {"llama", "quantization_config", "{\"quant_method\": \"gptq\"}", "quantization_config"},
      {"llama", "partial_rotary_factor", "0.5", "partial_rotary_factor"},
      {"llama", "final_logit_softcapping", "30.0", "final_logit_softcapping"},
      {"llama", "layer_types", "[\"full_attention\", \"sliding_attention\"]", "layer_types[1]"},
      {"llama", "layer_types", "[\"full_attention\", \"full_attention\"]", NULL},
      {"llama", "num_key_value_heads", "3", "num_key_value_heads"},
      {"llama", "something_new", "17", NULL},
      {"qwen2", "use_sliding_window", "true", NULL}, /* its sliding_window is null */
      {"qwen2", "sliding_window", "7", NULL},        /* its sliding_window is not used */
      {"qwen3", "head_dim", "null", "head_dim"},
      {"gemma", "hidden_act", "\"gelu\"", NULL}, /* the tanh form is used all the same */
      {"gemma", "hidden_act", "\"silu\"", "hidden_act is silu"},
      {"gemma", "head_dim", "null", "head_dim"},
      {"gemma", "tie_word_embeddings", "false", "needs tied embeddings"},
      {"gemma", "final_logit_softcapping", "30.0", "final_logit_softcapping"},
      {"gemma", "use_bidirectional_attention", "true", "use_bidirectional_attention"},
      {"gemma2", "hidden_activation", "\"gelu\"", "hidden_activation is gelu"},
      {"gemma2", "query_pre_attn_scalar", "0", "query_pre_attn_scalar is 0"},
      {"gemma2", "query_pre_attn_scalar", "null", "query_pre_attn_scalar"},
      {"gemma2", "attn_logit_softcapping", "-1.0", "attn_logit_softcapping is -1"},
      {"gemma2", "attn_logit_softcapping", "null", NULL},
      {"gemma2", "final_logit_softcapping", "null", NULL},
      {"llama", "num_experts", "8", "num_experts is 8"},
      {"mixtral", "num_experts_per_tok", "6", "num_experts_per_tok is 6"},
      {"mixtral", "num_local_experts", "null", "num_local_experts"},
      {"mixtral", "router_jitter_noise", "0.1", "router_jitter_noise"},
      {"mixtral", "output_router_logits", "true", NULL},
      {"qwen3-moe", "decoder_sparse_step", "2", NULL},
      {"qwen3-moe", "decoder_sparse_step", "0", "decoder_sparse_step"},
      {"qwen3-moe", "decoder_sparse_step", "3", "0 of 2 layers have experts"},
      {"qwen3-moe", "mlp_only_layers", "[1]", NULL},
      {"qwen3-moe", "mlp_only_layers", "[0, 1]", "0 of 2 layers have experts"},
      {"qwen3-moe", "mlp_only_layers", "[1.5]", "mlp_only_layers"},
      {"qwen3-moe", "mlp_only_layers", "1", "mlp_only_layers"},
      {"llama", "mlp_only_layers", "[1]", "mlp_only_layers"},
      {"qwen3-moe", "norm_topk_prob", "false", NULL},
      {"qwen3-moe", "moe_intermediate_size", "null", "moe_intermediate_size"},
      {"qwen2-moe", "qkv_bias", "false", "qkv_bias"},
      {"qwen2-moe", "shared_expert_intermediate_size", "0", "shared_expert_intermediate_size"},
      {"gpt2", "activation_function", "\"relu\"", "activation_function is relu"},
      {"gpt2", "scale_attn_weights", "false", "scale_attn_weights"},
      {"gpt2", "scale_attn_by_inverse_layer_idx", "true", "scale_attn_by_inverse_layer_idx"},
      {"gpt2", "add_cross_attention", "true", "add_cross_attention"},
      {"gpt2", "attn_pdrop", "0.1", "attn_pdrop is 0.1"},
      {"gpt2", "resid_pdrop", "0.5", "embd_pdrop is 0.1 and resid_pdrop is 0.5"},
      {"llama", "attention_dropout", "0.2", "attention_dropout is 0.2"},
      {"qwen3-moe", "num_hidden_layers", "2147483647", "\"num_hidden_layers\" is 2147483647"},
      {"qwen3-moe", "num_hidden_layers", "4097", "\"num_hidden_layers\" is 4097"},
      {"qwen3-moe", "num_hidden_layers", "-1", "num_hidden_layers"},
      {"qwen3-moe", "mlp_only_layers", "[2147483646, -1, 9223372036854775807]", NULL},
      {"qwen3-moe", "decoder_sparse_step", "2147483647", "0 of 2 layers have experts"},
      {"qwen3-moe", "num_local_experts", "65537", "num_local_experts"},
      {"qwen2-window", "max_window_layers", "2147483647", NULL},
      {"gpt2", "n_layer", "4097", "n_layer"},
      {"llama", "head_dim", "65536", NULL},
      {"llama", "hidden_size", "1048577", "hidden_size"},
      {"llama", "model_type", "\"gemma3\"", "save it with Gemma3ForCausalLM"},
      {"llama", "rope_scaling", "{\"rope_type\": \"yarn\"}", "rope_scaling.factor is missing"},
      {"llama", "rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": null}", NULL},
      {"llama", "rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": -1}", "factor is -1"},
      {"llama", "rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": 4, \"beta_fast\": -1}", "beta_fast -1"},
      {"llama", "rope_scaling", "{\"rope_type\": \"longrope\"}", "rope_scaling.short_factor is not a list of 4"},
      {"llama", "rope_scaling",
       "{\"rope_type\": \"longrope\", \"short_factor\": [1, 1, 1, 1], \"long_factor\": [1, 1, 0, 1]}",
       "long_factor[2] is 0"},
      {"llama", "rope_scaling",
       "{\"rope_type\": \"longrope\", \"short_factor\": [1, 1, 1, 1], \"long_factor\": [1, 1, \"2\", 1]}",
       "long_factor[2] is not a number"},
      {"llama", "rope_scaling", "{\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5}",
       "partial_rotary_factor"},
      {"phi3", "rope_parameters", "{\"rope_type\": \"linear\", \"factor\": 2}", "supported are default and longrope"},
      {"phi3", "rope_parameters", "{\"partial_rotary_factor\": 0.5}", NULL},
      {"phi3", "rope_parameters", "{\"partial_rotary_factor\": 0.4}", "rotates 3 of 8 columns"},
      {"phi3", "rope_parameters", "{\"partial_rotary_factor\": 1.5}", "partial_rotary_factor is 1.5"},
      {"phi3", "rope_parameters", "{\"partial_rotary_factor\": 0.1}", "no pair of 8 columns"},
      {"phi3", "resid_pdrop", "0.1", "dropout of phi3"},
      {"phi3", "interpolate_factor", "1", NULL},
      {"gemma3", "attn_logit_softcapping", "50.0", "attn_logit_softcapping is 50.0"},
      {"gemma3", "sliding_window", "null", "sliding_window"},
      {"gemma3", "rope_parameters", "{\"full_attention\": {}, \"other\": 1}", "rope_parameters.other"},
      {"gemma3", "rope_parameters", "{\"sliding_attention\": {\"rope_type\": \"linear\", \"factor\": 2}}",
       "sliding_attention has a scaling"},
      {"gemma3", "use_bidirectional_attention", "true", "use_bidirectional_attention"},
      {"smollm3", "no_rope_layers", "[1]", "not a list of at least 2"},
      {"smollm3", "no_rope_layers", "[1, 2]", "no_rope_layers[1]"},
      {"smollm3", "no_rope_layers", "[1, 1, 0]", NULL},
      {"smollm3", "no_rope_layers", "[true, 1]", "no_rope_layers[0]"},
      {"smollm3", "layer_types", "[\"sliding_attention\", \"full_attention\"]", "there is no sliding_window"},
      {"granite", "logits_scaling", "0", "logits_scaling is 0"},
      {"granite", "residual_multiplier", "-1", "residual_multiplier is -1"},
      {"olmo2", "qk_layernorm", "true", "qk_layernorm is true"},
      {"llama", "no_rope_layers", "[1, 0]", "no_rope_layers"},
      {"llama", "attention_multiplier", "0.5", "attention_multiplier"},
      {"llama", "rope_local_base_freq", "10000.0", "rope_local_base_freq"},
      {"llama", "clip_qkv", "8.0", "clip_qkv is 8.0"},
      {"llama", "clip_qkv", "null", NULL},
      {"llama", "use_mrope", "false", NULL},
      {"llama", "use_mrope", "true", "use_mrope is true"},
      {"llama", "scoring_func", "\"sigmoid\"", "scoring_func"},
      {"llama", "vision_config", "{\"hidden_size\": 3}", "vision_config"},
      {"llama", "vision_config", "{}", NULL},
      {"llama", "logit_scale", "0.0625", "logit_scale is 0.0625"},
      {"llama", "logit_scale", "1.0", NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_model_config c;
    json_t *o = rft_model_config(cases[i].model);
    json_object_set_new(o, cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
    rft_expect(rft_model_read(f, o, &c), cases[i].text, cases[i].key, cases[i].value);
  }
}

/* A published folder has dropout inside attention: it is refused with a workaround, which works. */
static void published_dropout(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  json_t *o = rft_model_config("gpt2");
  json_object_set_new(o, "attn_pdrop", json_real(0.1));
  assert_int_equal(rft_model_read(f, o, &c), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "run.dropout=none"));
  rfr_run *run;
  char config[1024];
  rfr_run_options options = rfr_run_options_default();
  static const char *const none[] = {"run.dropout=none"};
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: %s\ndata: {train: [x], sequence: 16}\nbatch: {tokens: 32, microbatch: 2}\n"
           "optimizer: {lr: 1e-3}\nprecision: {dtype: f32}\nrun: {steps: 1}\n",
           f->path);
  options.no_data = 1;
  assert_int_equal(rfr_run_open(f->ctx, config, NULL, &options, &run), RFR_INVALID);
  options.overrides = none;
  options.n_overrides = 1;
  OK(rfr_run_open(f->ctx, config, NULL, &options, &run));
  const rfr_programs *p = rfr_run_programs(run);
  rfr_plan_op op;
  for (int i = 0; rfr_program_op(p, 0, i, &op) == RFR_OK; i++) assert_string_not_equal(op.name, "dropout");
  rfr_run_close(run);
}

/* The layers with a window for each class, and the model type that is written. */
static void windows(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *model, *changes, *want; /* f (full) or s (sliding) for each layer, or the error */
    const char *type;                   /* written */
  } cases[] = {
      {"mistral", "{}", "ss", "mistral"},
      {"mistral", "{\"sliding_window\": null}", "ff", "llama"},
      {"mistral", "{\"sliding_window\": 4096}", "ss", "mistral"},
      {"mistral", "{\"sliding_window\": 0}", "\"sliding_window\" is 0", NULL},
      {"mistral", "{\"layer_types\": [\"sliding_attention\", \"full_attention\"]}", "layer_types[1]", NULL},
      {"mistral", "{\"layer_types\": [\"sliding_attention\"]}", "layer_types is not a list of 2", NULL},
      {"mistral", "{\"layer_types\": [\"sliding_attention\", \"sliding_attention\", \"sliding_attention\"]}",
       "layer_types is not a list of 2", NULL},
      {"mistral", "{\"layer_types\": [\"chunked_attention\", 3]}", "layer_types[0] is neither", NULL},
      {"mistral", "{\"model_type\": \"ministral\"}", "ss", "mistral"},
      {"mistral", "{\"model_type\": \"ministral\", \"layer_types\": [\"full_attention\", \"sliding_attention\"]}", "fs",
       "ministral"},
      {"mistral", "{\"model_type\": \"llama\"}", "ff", "llama"}, /* the class ignores it */
      {"qwen2-window", "{}", "fs", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null}", "fs", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"max_window_layers\": 0}", "ss", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"max_window_layers\": 28}", "ff", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"max_window_layers\": null}", "max_window_layers", NULL},
      {"qwen2-window", "{\"layer_types\": [\"sliding_attention\", \"full_attention\"]}", "sf", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"use_sliding_window\": false}", "ff", "qwen2"},
      {"qwen2-window", "{\"use_sliding_window\": false}", "there is no sliding_window", NULL},
      {"qwen2-window", "{\"model_type\": \"qwen3\", \"head_dim\": 8}", "fs", "qwen3"},
      {"gemma", "{\"sliding_window\": 7}", "ff", "gemma"}, /* the class ignores it */
      {"gemma2", "{}", "sf", "gemma2"},
      {"gemma2", "{\"layer_types\": null}", "sf", "gemma2"},
      {"gemma2", "{\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"]}", "fs", "gemma2"},
      {"gemma2", "{\"layer_types\": null, \"sliding_window\": null}", "ff", "gemma2"},
      {"gemma2", "{\"sliding_window\": null}", "there is no sliding_window", NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_model_config c, again;
    char got[3] = "";
    json_t *o = rft_model_config(cases[i].model), *changes = json_loads(cases[i].changes, 0, NULL);
    assert_int_equal(json_object_update(o, changes), 0);
    json_decref(changes);
    const char *text = cases[i].type ? NULL : cases[i].want;
    if (!rft_expect(rft_model_read(f, o, &c), text, cases[i].model, cases[i].changes)) continue;
    for (int l = 0; l < 2; l++) got[l] = rfr_model_has_window(&c, l) ? 's' : 'f';
    assert_string_equal(got, cases[i].want);
    o = rfi_hf_config(&c);
    assert_string_equal(json_string_value(json_object_get(o, "model_type")), cases[i].type);
    OK(rft_model_read(f, o, &again));
    assert_int_equal(again.window, c.window);
    for (int l = 0; l < 2; l++) assert_int_equal(rfr_model_has_window(&again, l), rfr_model_has_window(&c, l));
  }
  json_t *o = rft_model_config("mistral");
  json_object_del(o, "sliding_window");
  rfr_model_config c;
  assert_int_equal(rft_model_read(f, o, &c), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "sliding_window is missing"));
}

/* All fields that the library or Refrain writes are known; any other is reported. */
static void notes(void **state) {
  rft_folder *f = *state;
  rfi_hf_notes n;
  rfr_model_config c;
  char folder[512];
  for (int i = 0; i < RFT_N_MODELS; i++) {
    snprintf(folder, sizeof folder, RFT_MODELS "%s", rft_models[i]);
    OK(rfi_hf_notes_read(f->ctx, folder, &n));
    if (json_array_size(n.unknown) != 0)
      fail_msg("%s: %s is unknown", rft_models[i], json_string_value(json_array_get(n.unknown, 0)));
    rfi_hf_notes_deinit(&n);
    OK(rft_model_read(f, rft_model_config(rft_models[i]), &c));
    OK(rft_model_read(f, rfi_hf_config(&c), &c));
    OK(rfi_hf_notes_read(f->ctx, f->path, &n));
    assert_int_equal(json_array_size(n.unknown), 0);
    rfi_hf_notes_deinit(&n);
  }
  json_t *o = rft_model_config("llama");
  json_object_set_new(o, "something_new", json_integer(17));
  json_object_set_new(json_object_get(o, "rope_scaling"), "beta_new", json_integer(32));
  OK(rft_model_read(f, o, &c));
  OK(rfi_hf_notes_read(f->ctx, f->path, &n));
  assert_int_equal(json_array_size(n.unknown), 2);
  assert_string_equal(json_string_value(json_array_get(n.unknown, 0)), "something_new");
  assert_string_equal(json_string_value(json_array_get(n.unknown, 1)), "rope_scaling.beta_new");
  /* the ids are kept in the saved file */
  json_t *saved = rfi_hf_config_with(&c, &n), *want = rft_model_config("llama");
  assert_true(json_equal(json_object_get(saved, "eos_token_id"), json_object_get(want, "eos_token_id")));
  assert_true(json_equal(json_object_get(saved, "bos_token_id"), json_object_get(want, "bos_token_id")));
  rfi_hf_notes_deinit(&n);
  json_decref(saved);
  json_decref(want);
}

/* A factor of the aux loss that the folder has but does not use is written back unchanged, not as 0. */
static void unused_losses(void **state) {
  rft_folder *f = *state;
  for (int k = 0; k < 3; k++) { /* factor in the folder: unused; unused but given in the configuration; used */
    rfi_hf_notes n;
    rfr_model_config c, again;
    json_t *o = rft_model_config("qwen3-moe");
    json_object_set_new(o, "output_router_logits", json_boolean(k == 2));
    OK(rft_model_read(f, o, &c));
    OK(rfi_hf_notes_read(f->ctx, f->path, &n));
    if (k == 1) c.balance_loss = 0.25;
    o = rfi_hf_config_with(&c, &n);
    rfi_hf_notes_deinit(&n);
    assert_true(json_number_value(json_object_get(o, "router_aux_loss_coef")) == (k == 1 ? 0.25 : 0.001));
    assert_int_equal(json_is_true(json_object_get(o, "output_router_logits")), k > 0);
    OK(rft_model_read(f, o, &again));
    assert_true(again.balance_loss == c.balance_loss && (c.balance_loss > 0) == (k > 0));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(written_config_reads_back),
      rft_folder_test(fields),
      rft_folder_test(expert_fields),
      rft_folder_test(versions),
      rft_folder_test(older_files),
      rft_folder_test(defaults),
      rft_folder_test(frequencies),
      rft_folder_test(documented),
      rft_folder_test(refused),
      rft_folder_test(published_dropout),
      rft_folder_test(windows),
      rft_folder_test(notes),
      rft_folder_test(unused_losses),
  };
  return cmocka_run_group_tests_name("model_config", tests, NULL, NULL);
}
