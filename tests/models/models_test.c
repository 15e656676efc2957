/* SPDX-License-Identifier: Apache-2.0
 *
 * Model folders that the transformers library wrote (tools/make_reference_models.py). Compares logits, gradients, the
 * aux loss and greedy text with the library's results in f32. Then: the variants of config.json, fields that are
 * refused, the files of a checkpoint, foreign tokenizers, names without the outer module, and indexes that leave the
 * folder.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "data/safetensors.h"
#include "model/hf.h"
#include "model/weights.h"
#include "ops/decode/cursor.h"
#include "refrain/program.h"
#include "refrain/train.h"
#include "support/context.h"
#include "support/folder.h"
#include "train/step_trace.h"

#define MODELS RFT_SOURCE_DIR "/tests/models/"

static const char *const models[] = {
    "gpt2",  "gpt2-untied", "llama",          "llama-shards", "qwen2",     "qwen3",       "mistral",     "qwen2-window",
    "gemma", "gemma2",      "mixtral",        "qwen2-moe",    "qwen3-moe", "qwen2-mixed", "qwen3-mixed", "gemma3",
    "olmo2", "smollm3",     "smollm3-window", "granite",      "phi3",      "phi3-short",  "phi3-long",   "qwen3-yarn"};
enum { N_MODELS = sizeof models / sizeof models[0], MOST = 64 };

/* ---- logits and gradients ---- */

static const double tolerance = 1e-5;

typedef struct reference {
  rfi_safetensors *file;
  rfr_programs *programs;
} reference;

/* The largest difference between an output and the library's result `name`. */
static double difference(reference *r, const char *output, const char *name) {
  rfr_tensor got;
  double worst = 0, largest = 0;
  OK(rfr_program_output(r->programs, 0, output, &got));
  const rfi_stored *stored = rfi_safetensors_find(r->file, name);
  if (!stored) fail_msg("no %s in the reference", name);
  assert_int_equal(stored->bytes, got.bytes);
  float *want = malloc((size_t)stored->bytes);
  OK(rfi_safetensors_read_as(r->file, stored, RFR_F32, want, stored->elements));
  for (int64_t i = 0; i < stored->elements; i++) {
    double d = fabs((double)((float *)got.data)[i] - (double)want[i]);
    if (!(d <= worst)) worst = d; /* NaN too */
    largest = fmax(largest, fabs((double)want[i]));
  }
  free(want);
  if (!(largest > 10 * tolerance)) fail_msg("%s: %g at most; nothing to compare", name, largest);
  if (!(worst <= tolerance)) fail_msg("%s differs by %g", name, worst);
  return worst;
}

static void read_i32(reference *r, const char *name) {
  rfr_tensor x;
  OK(rfr_programs_tensor(r->programs, name, &x));
  const rfi_stored *stored = rfi_safetensors_find(r->file, name);
  assert_non_null(stored);
  OK(rfi_safetensors_read(r->file, stored, x.data, (size_t)x.bytes));
}

static rfr_programs *compile(rfr_ctx *ctx, const rfr_model_config *c, int64_t tokens) {
  rfr_trace *t;
  rfr_programs *p;
  rfr_value w[MOST];
  char name[128];
  OK(rfr_trace_create(ctx, &t));
  assert_true(rfr_model_parameter_count(c) <= MOST);
  rfr_model_declare(t, c, NULL, 0, w);
  rfr_value ids = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){2});
  rfr_value router[MOST], index[MOST];
  const rfr_experts experts = {.logits = router, .index = index};
  rfr_value h = rfr_model_forward_experts(t, c, w, ids, offsets, RFR_NONE, &experts);
  rfr_value balance = rfr_model_routing_loss(t, c, &experts, targets, -100);
  rfr_value logits = rfr_model_logits(t, c, w, h, RFR_F32);
  rfr_value loss = rfr_cross_entropy(t, logits, targets, rfr_token_count(t, 1, &targets, -100, NULL), -100);
  rfr_output(t, "logits", logits);
  rfr_output(t, "loss", loss);
  if (balance != RFR_NONE) {
    rfr_output(t, "balance", balance);
    loss = rfr_add(t, loss, balance);
  }
  for (int i = 0; i < rfr_model_parameter_count(c); i++) {
    snprintf(name, sizeof name, "d_%s", rfr_value_name(t, w[i]));
    rfr_output(t, name, rfr_gradient(t, loss, w[i], RFR_F32));
  }
  OK(rfr_trace_finish(t));
  OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p));
  rfr_trace_destroy(t);
  return p;
}

/* Loads all weights of a folder. */
static rfr_status load(rfr_ctx *ctx, rfr_programs *p, const rfr_model_config *c, const char *folder) {
  rfi_weights *w;
  rfr_tensor x;
  rfr_status s = rfi_weights_open(ctx, folder, &w);
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (x.role == RFR_ROLE_TRAINABLE) s = rfi_weights_read(w, c, &x);
  rfi_weights_close(w);
  return s;
}

static void one_reference(rfr_ctx *ctx, const char *model) {
  char folder[512], path[600];
  reference r;
  rfr_tensor offsets;
  rfr_parameter p;
  rfr_model_config c = {.dtype = RFR_F32};
  snprintf(folder, sizeof folder, MODELS "%s", model);
  snprintf(path, sizeof path, "%s/reference.safetensors", folder);
  OK(rfi_hf_read(ctx, folder, true, &c));
  OK(rfi_safetensors_open(ctx, path, &r.file));
  const rfi_stored *tokens = rfi_safetensors_find(r.file, "tokens");
  assert_non_null(tokens);
  c.balance_loss = c.experts > 0;
  r.programs = compile(ctx, &c, tokens->elements);
  OK(load(ctx, r.programs, &c, folder));
  read_i32(&r, "tokens");
  read_i32(&r, "targets");
  OK(rfr_programs_tensor(r.programs, "offsets", &offsets));
  memcpy(offsets.data, (int32_t[]){0, (int32_t)tokens->elements}, 2 * sizeof(int32_t));
  OK(rfr_programs_load(r.programs));
  OK(rfr_program_run(r.programs, 0));
  difference(&r, "loss", "loss");
  double logits = difference(&r, "logits", "logits"), gradients = 0;
  for (int i = 0; rfr_model_parameter(&c, i, &p) == RFR_OK; i++) {
    char name[128];
    snprintf(name, sizeof name, "d_%s", p.name);
    gradients = fmax(gradients, difference(&r, name, name));
  }
  if (c.experts > 0) difference(&r, "balance", "balance");
  print_message("%-12s logits within %.1e, gradients within %.1e\n", model, logits, gradients);
  /* all but tokens, targets, logits, loss, greedy and balance are gradients: the library trains the same parameters */
  assert_int_equal(rfi_safetensors_count(r.file), 5 + (c.experts > 0) + rfr_model_parameter_count(&c));
  rfr_programs_destroy(r.programs);
  rfi_safetensors_close(r.file);
}

static void references(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < N_MODELS; i++) one_reference(f->ctx, models[i]);
}

/* Routers with equal logits: each expert has probability 1/E and each token goes to the first k. For any number of
 * layers and ignored tokens, the losses are k and (log E)^2 times their factors. */
static void even_routing(void **state) {
  rft_folder *f = *state;
  static const int32_t targets[6] = {3, -100, 7, 1, -100, 2};
  rfr_model_config c = {.dtype = RFR_F32};
  rfr_tensor x;
  OK(rfi_hf_read(f->ctx, MODELS "qwen3-mixed", true, &c));
  assert_true(rfr_model_expert_layers(&c) == 2 && c.experts_per_token == 2);
  c.balance_loss = 0.5;
  c.z_loss = 0.25;
  rfr_programs *p = compile(f->ctx, &c, 6);
  OK(load(f->ctx, p, &c, MODELS "qwen3-mixed"));
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (strstr(x.name, ".mlp.gate.weight")) memset(x.data, 0, (size_t)x.bytes);
  OK(rfr_programs_tensor(p, "targets", &x));
  memcpy(x.data, targets, sizeof targets);
  OK(rfr_programs_tensor(p, "tokens", &x));
  memset(x.data, 0, sizeof targets);
  OK(rfr_programs_tensor(p, "offsets", &x));
  memcpy(x.data, (int32_t[]){0, 6}, 2 * sizeof(int32_t));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "balance", &x));
  const double want = 0.5 * 2 + 0.25 * log(5) * log(5), got = (double)*(float *)x.data;
  if (!(fabs(got - want) <= 1e-6)) fail_msg("%.9g, not %.9g", got, want);
  rfr_programs_destroy(p);
}

/* ---- greedy text ---- */

static void one_text(rfr_ctx *ctx, const char *model) {
  enum { PROMPT = 8, LENGTH = 32 };
  char folder[512], path[600];
  rfi_safetensors *file;
  rfr_trace *t[2];
  rfr_programs *p;
  rfr_tensor text, cursor;
  int32_t want[LENGTH];
  rfi_step_spec spec = {.model = {.dtype = RFR_F32}, .window = LENGTH - 1, .microbatches = 1};
  snprintf(folder, sizeof folder, MODELS "%s", model);
  snprintf(path, sizeof path, "%s/reference.safetensors", folder);
  OK(rfi_hf_read(ctx, folder, true, &spec.model));
  OK(rfi_safetensors_open(ctx, path, &file));
  const rfi_stored *greedy = rfi_safetensors_find(file, "greedy");
  assert_true(greedy && greedy->elements == LENGTH);
  OK(rfi_safetensors_read(file, greedy, want, sizeof want));
  OK(rfi_trace_prefill(ctx, &spec, &t[0]));
  OK(rfi_trace_decode(ctx, &spec, &t[1]));
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)t, NULL, NULL, &p));
  OK(load(ctx, p, &spec.model, folder));
  OK(rfr_programs_load(p));
  OK(rfr_programs_tensor(p, RFI_NAME_TEXT, &text)); /* temperature is 0 */
  OK(rfr_programs_tensor(p, RFI_NAME_CURSOR, &cursor));
  memcpy(text.data, want, PROMPT * sizeof *want);
  ((int64_t *)cursor.data)[RFI_CURSOR_KNOWN] = PROMPT;
  for (int i = 0; i < LENGTH - PROMPT; i++) OK(rfr_program_run(p, i > 0));
  assert_memory_equal(text.data, want, sizeof want);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  rfr_programs_destroy(p);
  rfi_safetensors_close(file);
}

static void greedy_texts(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < N_MODELS; i++) one_text(f->ctx, models[i]);
}

/* ---- config.json ---- */

static json_t *config_of(const char *model) {
  char path[512];
  json_t *o = NULL;
  snprintf(path, sizeof path, MODELS "%s/config.json", model);
  o = json_load_file(path, 0, NULL);
  assert_non_null(o);
  return o;
}

/* Writes o as config.json of the test folder, releases it, and reads the file. */
static rfr_status read_config(rft_folder *f, json_t *o, rfr_model_config *c) {
  char *text = json_dumps(o, 0);
  assert_non_null(text);
  rft_write(f, "config.json", text, strlen(text));
  free(text);
  json_decref(o);
  *c = (rfr_model_config){.dtype = RFR_F32};
  return rfi_hf_read(f->ctx, f->path, true, c);
}

static void assert_same(const rfr_model_config *a, const rfr_model_config *b) {
  json_t *x = rfi_hf_config(a), *y = rfi_hf_config(b);
  assert_non_null(x);
  if (!json_equal(x, y)) fail_msg("%s\n%s", json_dumps(x, 0), json_dumps(y, 0));
  json_decref(x);
  json_decref(y);
}

static void written_config_reads_back(void **state) {
  rft_folder *f = *state;
  for (int i = 0; i < N_MODELS; i++) {
    rfr_model_config a, b;
    OK(read_config(f, config_of(models[i]), &a));
    OK(read_config(f, rfi_hf_config(&a), &b));
    assert_same(&a, &b);
    assert_int_equal(a.type, b.type);
  }
}

static void fields(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  OK(read_config(f, config_of("llama"), &c));
  assert_true(c.attention_bias && c.mlp_bias && !c.tie_embeddings && !c.qkv_bias && !c.qk_norm);
  assert_true(c.rope_theta == 1000 && c.rope_scaling.factor == 4 && c.rope_scaling.original == 16);
  OK(read_config(f, config_of("llama-shards"), &c));
  assert_true(c.head_dim == 10 && c.tie_embeddings && c.norm_eps == 1e-6);
  assert_true(c.rope_scaling.factor == 2.5 && c.rope_scaling.original == 0);
  OK(read_config(f, config_of("qwen3"), &c));
  assert_true(c.qk_norm && !c.qkv_bias);
  OK(read_config(f, config_of("gpt2-untied"), &c));
  assert_true(c.type == RFR_MODEL_GPT2 && !c.tie_embeddings && c.intermediate_size == 40);
  OK(read_config(f, config_of("gpt2"), &c));
  assert_true(c.tie_embeddings && c.intermediate_size == 64 && c.dropout == 0.1);
  OK(read_config(f, config_of("gemma"), &c));
  assert_true(c.type == RFR_MODEL_GEMMA && c.tie_embeddings && c.head_dim == 10 && c.logit_cap == 0);
  OK(read_config(f, config_of("gemma2"), &c));
  assert_true(c.type == RFR_MODEL_GEMMA2 && c.experts == 0 && c.attention_scalar == 12 && c.attention_cap == 1.5 &&
              c.logit_cap == 2);
}

/* Experts under the names of version 4 and 5. */
static void expert_fields(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  OK(read_config(f, config_of("mixtral"), &c));
  assert_true(c.experts == 5 && c.experts_per_token == 2 && c.expert_size == 24 && c.expert_norm && !c.shared_size);
  OK(read_config(f, config_of("qwen2-moe"), &c));
  assert_true(c.experts == 4 && c.experts_per_token == 3 && c.expert_size == 10 && !c.expert_norm && c.qkv_bias);
  assert_true(c.shared_size == 14 && c.balance_loss == 0.0);
  json_t *o = config_of("qwen3-moe");
  json_object_set(o, "num_experts", json_object_get(o, "num_local_experts"));
  json_object_del(o, "num_local_experts");
  json_object_set_new(o, "output_router_logits", json_true());
  OK(read_config(f, o, &c));
  assert_true(c.experts == 6 && c.experts_per_token == 2 && c.expert_size == 12 && c.expert_norm && c.qk_norm);
  assert_true(c.balance_loss == 0.001 && c.z_loss == 0.0);
  c.z_loss = 0.25;
  OK(read_config(f, rfi_hf_config(&c), &c));
  assert_true(c.balance_loss == 0.001 && c.z_loss == 0.25);
  static const struct {
    const char *model;
    int64_t layers;
    const char *experts;
  } mixed[] = {{"qwen2-mixed", 4, "0101"}, {"qwen3-mixed", 3, "101"}, {"qwen3-moe", 2, "11"}};
  for (int i = 0; i < 3; i++) {
    OK(read_config(f, config_of(mixed[i].model), &c));
    assert_int_equal(c.layers, mixed[i].layers);
    for (int l = 0; l < c.layers; l++) assert_int_equal(rfr_model_has_experts(&c, l), mixed[i].experts[l] == '1');
  }
}

/* Version 5 has theta in rope_parameters and "dtype" for "torch_dtype"; early version 4 has "type" for "rope_type". */
static void versions(void **state) {
  rft_folder *f = *state;
  rfr_model_config a, b;
  OK(read_config(f, config_of("llama"), &a));
  json_t *o = config_of("llama"), *rope = json_incref(json_object_get(o, "rope_scaling"));
  json_object_set_new(rope, "rope_theta", json_real(1000));
  json_object_del(o, "rope_scaling");
  json_object_del(o, "rope_theta");
  json_object_del(o, "torch_dtype");
  json_object_set_new(o, "dtype", json_string("float32"));
  json_object_set_new(o, "rope_parameters", rope);
  OK(read_config(f, o, &b));
  assert_same(&a, &b);
  o = config_of("llama");
  rope = json_object_get(o, "rope_scaling");
  json_object_del(rope, "rope_type");
  json_object_set_new(rope, "type", json_string("llama3"));
  OK(read_config(f, o, &b));
  assert_same(&a, &b);
  /* Gemma 2 of version 4: no layer_types, theta at the top level, both names of the activation */
  OK(read_config(f, config_of("gemma2"), &a));
  o = config_of("gemma2");
  json_object_del(o, "layer_types");
  json_object_del(o, "rope_parameters");
  json_object_del(o, "dtype");
  json_object_set_new(o, "torch_dtype", json_string("float32"));
  json_object_set_new(o, "rope_theta", json_real(10000));
  json_object_set_new(o, "hidden_act", json_string("gelu_pytorch_tanh"));
  json_object_set_new(o, "cache_implementation", json_string("hybrid"));
  OK(read_config(f, o, &b));
  assert_same(&a, &b);
  o = config_of("gemma2");
  json_object_del(o, "final_logit_softcapping");
  assert_int_equal(read_config(f, o, &b), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "final_logit_softcapping is missing"));
}

/* Expects an error that contains `text`, or success if it is NULL. Returns true for success. */
static bool as_expected(rfr_status s, const char *text, const char *what, const char *value) {
  if (s == RFR_OK && text) fail_msg("%s %s was taken", what, value);
  if (s != RFR_OK && (!text || !strstr(rfr_last_error()->message, text)))
    fail_msg("%s %s: %s", what, value, rfr_last_error()->message);
  return s == RFR_OK;
}

static void refused(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *model, *key, *value, *text; /* text NULL: taken */
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
      {"qwen2", "sliding_window", "7", NULL},        /* and not used */
      {"qwen3", "head_dim", "null", "head_dim"},
      {"gemma", "hidden_act", "\"gelu\"", NULL}, /* the tanh form all the same */
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
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_model_config c;
    json_t *o = config_of(cases[i].model);
    json_object_set_new(o, cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
    as_expected(read_config(f, o, &c), cases[i].text, cases[i].key, cases[i].value);
  }
}

/* A published folder has dropout inside attention: refused with a workaround that works. */
static void published_dropout(void **state) {
  rft_folder *f = *state;
  rfr_model_config c;
  json_t *o = config_of("gpt2");
  json_object_set_new(o, "attn_pdrop", json_real(0.1));
  assert_int_equal(read_config(f, o, &c), RFR_INVALID);
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
    const char *model, *changes, *want; /* f or s for each layer, or the error */
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
      {"mistral", "{\"model_type\": \"llama\"}", "ff", "llama"}, /* the class does not look at it */
      {"qwen2-window", "{}", "fs", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null}", "fs", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"max_window_layers\": 0}", "ss", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"max_window_layers\": 28}", "ff", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"max_window_layers\": null}", "max_window_layers", NULL},
      {"qwen2-window", "{\"layer_types\": [\"sliding_attention\", \"full_attention\"]}", "sf", "qwen2"},
      {"qwen2-window", "{\"layer_types\": null, \"use_sliding_window\": false}", "ff", "qwen2"},
      {"qwen2-window", "{\"use_sliding_window\": false}", "there is no sliding_window", NULL},
      {"qwen2-window", "{\"model_type\": \"qwen3\", \"head_dim\": 8}", "fs", "qwen3"},
      {"gemma", "{\"sliding_window\": 7}", "ff", "gemma"}, /* the class does not look at it */
      {"gemma2", "{}", "sf", "gemma2"},
      {"gemma2", "{\"layer_types\": null}", "sf", "gemma2"},
      {"gemma2", "{\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"]}", "fs", "gemma2"},
      {"gemma2", "{\"layer_types\": null, \"sliding_window\": null}", "ff", "gemma2"},
      {"gemma2", "{\"sliding_window\": null}", "there is no sliding_window", NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_model_config c, again;
    char got[3] = "";
    json_t *o = config_of(cases[i].model), *changes = json_loads(cases[i].changes, 0, NULL);
    assert_int_equal(json_object_update(o, changes), 0);
    json_decref(changes);
    const char *text = cases[i].type ? NULL : cases[i].want;
    if (!as_expected(read_config(f, o, &c), text, cases[i].model, cases[i].changes)) continue;
    for (int l = 0; l < 2; l++) got[l] = rfr_model_has_window(&c, l) ? 's' : 'f';
    assert_string_equal(got, cases[i].want);
    o = rfi_hf_config(&c);
    assert_string_equal(json_string_value(json_object_get(o, "model_type")), cases[i].type);
    OK(read_config(f, o, &again));
    assert_int_equal(again.window, c.window);
    for (int l = 0; l < 2; l++) assert_int_equal(rfr_model_has_window(&again, l), rfr_model_has_window(&c, l));
  }
  json_t *o = config_of("mistral");
  json_object_del(o, "sliding_window");
  rfr_model_config c;
  assert_int_equal(read_config(f, o, &c), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "sliding_window is missing"));
}

/* All fields that the library or Refrain writes are known; any other is reported. */
static void notes(void **state) {
  rft_folder *f = *state;
  rfi_hf_notes n;
  rfr_model_config c;
  char folder[512];
  for (int i = 0; i < N_MODELS; i++) {
    snprintf(folder, sizeof folder, MODELS "%s", models[i]);
    OK(rfi_hf_notes_read(f->ctx, folder, &n));
    if (json_array_size(n.unknown) != 0)
      fail_msg("%s: %s is unknown", models[i], json_string_value(json_array_get(n.unknown, 0)));
    rfi_hf_notes_deinit(&n);
    OK(read_config(f, config_of(models[i]), &c));
    OK(read_config(f, rfi_hf_config(&c), &c));
    OK(rfi_hf_notes_read(f->ctx, f->path, &n));
    assert_int_equal(json_array_size(n.unknown), 0);
    rfi_hf_notes_deinit(&n);
  }
  json_t *o = config_of("llama");
  json_object_set_new(o, "something_new", json_integer(17));
  json_object_set_new(json_object_get(o, "rope_scaling"), "beta_new", json_integer(32));
  OK(read_config(f, o, &c));
  OK(rfi_hf_notes_read(f->ctx, f->path, &n));
  assert_int_equal(json_array_size(n.unknown), 2);
  assert_string_equal(json_string_value(json_array_get(n.unknown, 0)), "something_new");
  assert_string_equal(json_string_value(json_array_get(n.unknown, 1)), "rope_scaling.beta_new");
  /* the ids are kept in the saved file */
  json_t *saved = rfi_hf_config_with(&c, &n), *want = config_of("llama");
  assert_true(json_equal(json_object_get(saved, "eos_token_id"), json_object_get(want, "eos_token_id")));
  assert_true(json_equal(json_object_get(saved, "bos_token_id"), json_object_get(want, "bos_token_id")));
  rfi_hf_notes_deinit(&n);
  json_decref(saved);
  json_decref(want);
}

static void write_text(rft_folder *f) {
  char text[1024];
  for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(i % 32 == 31 ? '\n' : 'a' + i * i % 26);
  rft_write(f, "text", text, sizeof text);
}

static char *read_model_file(const char *model, const char *name, size_t *n) {
  char path[512];
  snprintf(path, sizeof path, MODELS "%s/%s", model, name);
  FILE *in = fopen(path, "rb");
  assert_non_null(in);
  char *data = malloc(1 << 20);
  *n = fread(data, 1, 1 << 20, in);
  fclose(in);
  return data;
}

static const char *run_config(const char *folder) {
  static char config[2048];
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: %s\ndata: {train: [text], root: %s, sequence: 16}\nbatch: {tokens: 32, microbatch: 2}\n"
           "optimizer: {lr: 1e-3}\nrun: {steps: 1}\n",
           folder, folder);
  return config;
}

/* The folder of a reference model with text to train on. `fields`: changes of its config.json, or NULL. */
static void make_folder(rft_folder *f, const char *model, const char *fields) {
  size_t n;
  rfr_model_config c;
  json_t *o = config_of(model), *changes = fields ? json_loads(fields, 0, NULL) : json_object();
  assert_int_equal(json_object_update(o, changes), 0);
  json_decref(changes);
  OK(read_config(f, o, &c));
  char *data = read_model_file(model, "model.safetensors", &n);
  rft_write(f, "model.safetensors", data, n);
  write_text(f);
  free(data);
}

/* A checkpoint of a run from a folder has the folder's files byte for byte, listed in the manifest, and its dtype. */
static void carried_files(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *name, *text;
  } files[] = {{"generation_config.json", "{ \"eos_token_id\" : [5,6],\"temperature\":1}"},
               {"tokenizer_config.json", "{\"model_max_length\": 64}\n\n"},
               {"special_tokens_map.json", "{}"},
               {"added_tokens.json", "not JSON"},
               {"chat_template.jinja", ""}};
  enum { N = sizeof files / sizeof files[0] };
  static const char *const dtypes[][2] = {{"float32", "F32"}, {"bfloat16", "BF16"}, {"float16", "F16"}};
  for (int k = 0; k < 3; k++) {
    rfr_run *run;
    char fields[100], out[16], name[100], *text;
    size_t n;
    rfi_safetensors *weights;
    snprintf(fields, sizeof fields, "{\"dtype\": \"%s\", \"torch_dtype\": \"%s\"}", dtypes[k][0], dtypes[k][0]);
    make_folder(f, "llama", fields);
    for (int i = 0; i < N; i++) rft_write(f, files[i].name, files[i].text, strlen(files[i].text));
    snprintf(out, sizeof out, "out%d", k);
    OK(rfr_run_open(f->ctx, run_config(f->path), rft_path(f, out), NULL, &run));
    for (int i = 0; i < N; i++) remove(rft_path(f, files[i].name)); /* the run no longer needs the folder */
    OK(rfr_run_train(run));
    rfr_run_close(run);
    snprintf(name, sizeof name, "%s/step-000001/MANIFEST.json", out);
    char *manifest = rft_read(f, name, &n);
    for (int i = 0; i < N; i++) {
      snprintf(name, sizeof name, "%s/step-000001/%s", out, files[i].name);
      text = rft_read(f, name, &n);
      assert_int_equal(n, strlen(files[i].text));
      assert_memory_equal(text, files[i].text, n);
      assert_non_null(strstr(manifest, files[i].name));
      free(text);
    }
    free(manifest);
    snprintf(name, sizeof name, "%s/step-000001/config.json", out);
    text = rft_read(f, name, &n);
    assert_non_null(strstr(text, dtypes[k][0]));
    free(text);
    snprintf(name, sizeof name, "%s/step-000001/model.safetensors", out);
    OK(rfi_safetensors_open(f->ctx, rft_path(f, name), &weights));
    assert_string_equal(rfr_dtype_safetensors_name(rfi_safetensors_at(weights, 0)->dtype), dtypes[k][1]);
    rfi_safetensors_close(weights);
    snprintf(name, sizeof name, "%s/step-000001/state.json", out);
    text = rft_read(f, name, &n);
    assert_null(strstr(text, "(null)"));
    assert_null(strstr(text, "model.hidden_act")); /* config.json decides */
    free(text);
  }
}

/* A model with a vocabulary of its own is not trained on bytes, evaluated on them or asked to continue them. */
static void foreign_tokenizers(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *fields, *file, *want, *slug;
  } cases[] = {{NULL, NULL, NULL, NULL},
               {"{\"vocab_size\": 257}", NULL, "vocab_size 257", "data.tokenizer"},
               {NULL, "tokenizer.json", "tokenizer.json", "tokenizer"},
               {NULL, "tokenizer.model", "tokenizer.model", "data.tokenizer"},
               {NULL, "vocab.json", "vocab.json", "data.tokenizer"},
               {NULL, "merges.txt", "merges.txt", "data.tokenizer"}};
  static const int programs[] = {RFR_RUN_TRAIN, RFR_RUN_EVALUATE, RFR_RUN_GENERATE};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_run *run;
    rfr_run_info info;
    rfr_run_options o = rfr_run_options_default();
    make_folder(f, "llama", cases[i].fields);
    if (cases[i].file) rft_write(f, cases[i].file, "{}", 2);
    for (size_t k = 0; k < sizeof programs / sizeof programs[0]; k++) {
      o = rfr_run_options_default();
      o.programs = programs[k];
      const rfr_status s = rfr_run_open(f->ctx, run_config(f->path), NULL, &o, &run);
      if (cases[i].want) {
        assert_int_not_equal(s, RFR_OK);
        assert_string_equal(rfr_last_error()->slug, cases[i].slug);
        assert_non_null(strstr(rfr_last_error()->message, cases[i].want));
      } else if (programs[k] == RFR_RUN_TRAIN) {
        OK(s);
        rfr_run_get_info(run, &info);
        assert_true(info.byte_tokens);
      }
      rfr_run_close(run);
    }
    o = rfr_run_options_default();
    o.no_data = 1; /* a plan or a trace needs no text */
    OK(rfr_run_open(f->ctx, run_config(f->path), NULL, &o, &run));
    rfr_run_get_info(run, &info);
    assert_int_equal(info.byte_tokens, cases[i].want == NULL);
    rfr_run_close(run);
    if (cases[i].file) remove(rft_path(f, cases[i].file));
  }
}

/* `model: RUN` names the checkpoint that was meant. */
static void run_folders(void **state) {
  rft_folder *f = *state;
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.no_data = 1;
  rft_write(f, "step-000009/x", "", 0);
  rft_write(f, "step-000010/x", "", 0);
  rft_write(f, "step-000011.tmp-7/x", "", 0);
  assert_int_equal(rfr_run_open(f->ctx, run_config(f->path), NULL, &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.folder");
  assert_non_null(strstr(rfr_last_error()->message, "/step-000010"));
}

/* A factor of the aux loss that the folder does not use is written back as it was, not as 0. */
static void unused_losses(void **state) {
  rft_folder *f = *state;
  for (int k = 0; k < 3; k++) { /* the folder: unused, unused but given in the configuration, used */
    rfi_hf_notes n;
    rfr_model_config c, again;
    json_t *o = config_of("qwen3-moe");
    json_object_set_new(o, "output_router_logits", json_boolean(k == 2));
    OK(read_config(f, o, &c));
    OK(rfi_hf_notes_read(f->ctx, f->path, &n));
    if (k == 1) c.balance_loss = 0.25;
    o = rfi_hf_config_with(&c, &n);
    rfi_hf_notes_deinit(&n);
    assert_true(json_number_value(json_object_get(o, "router_aux_loss_coef")) == (k == 1 ? 0.25 : 0.001));
    assert_int_equal(json_is_true(json_object_get(o, "output_router_logits")), k > 0);
    OK(read_config(f, o, &again));
    assert_true(again.balance_loss == c.balance_loss && (c.balance_loss > 0) == (k > 0));
  }
}

/* ---- weights ---- */

/* The same file without the outer module in the tensor names; blanks keep the length of the header. */
static void base_names(void **state) {
  rft_folder *f = *state;
  static const char *const cases[][2] = {{"gpt2", "\"transformer."}, {"qwen2", "\"model."}};
  for (int i = 0; i < 2; i++) {
    size_t n, cut = strlen(cases[i][1]) - 1;
    char *data = read_model_file(cases[i][0], "model.safetensors", &n), *end = data + 8;
    uint64_t header;
    memcpy(&header, data, 8);
    end += header;
    int found = 0;
    for (char *at = data + 8; at + cut < end; at++) {
      if (memcmp(at, cases[i][1], cut + 1) != 0) continue;
      memmove(at + 1, at + 1 + cut, (size_t)(end - (at + 1 + cut)));
      memset(end - cut, ' ', cut);
      found++;
    }
    assert_true(found > 10);
    rft_write(f, "model.safetensors", data, n);
    free(data);
    rfr_model_config c;
    rfr_tensor x, y;
    OK(read_config(f, config_of(cases[i][0]), &c));
    rfr_programs *p = compile(f->ctx, &c, 8), *q = compile(f->ctx, &c, 8);
    char folder[512];
    snprintf(folder, sizeof folder, MODELS "%s", cases[i][0]);
    OK(load(f->ctx, p, &c, f->path));
    OK(load(f->ctx, q, &c, folder));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++) {
      OK(rfr_programs_tensor(q, x.name, &y));
      if (x.role == RFR_ROLE_TRAINABLE) assert_memory_equal(x.data, y.data, (size_t)x.bytes);
    }
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
  }
}

/* A folder with packed experts gives the same weights. A folder without an expert is refused by its name. */
static void packed_experts(void **state) {
  rft_folder *f = *state;
  static const char *const cases[] = {"mixtral", "qwen3-moe"};
  for (int i = 0; i < 2; i++) {
    rfr_model_config c;
    rfr_tensor x, y;
    char folder[512], path[600];
    rfi_file *file;
    rfi_safetensors_entry entries[MOST];
    int n = 0;
    OK(read_config(f, config_of(cases[i]), &c));
    rfr_programs *p = compile(f->ctx, &c, 8), *q = compile(f->ctx, &c, 8);
    snprintf(folder, sizeof folder, MODELS "%s", cases[i]);
    snprintf(path, sizeof path, "%s/model.safetensors", f->path);
    OK(load(f->ctx, p, &c, folder));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++) {
      if (x.role != RFR_ROLE_TRAINABLE) continue;
      entries[n] = (rfi_safetensors_entry){.name = x.name, .dtype = x.type.dtype, .rank = x.type.rank};
      for (int d = 0; d < x.type.rank; d++) entries[n].shape[d] = x.type.shape[d];
      n++;
    }
    remove(path);
    OK(rfi_file_create(f->ctx, path, &file));
    OK(rfi_safetensors_write_header(f->ctx, file, entries, n, NULL, 0, NULL));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++)
      if (x.role == RFR_ROLE_TRAINABLE) OK(rfi_file_append(file, x.data, (size_t)x.bytes));
    rfi_file_close(file);
    OK(load(f->ctx, q, &c, f->path));
    for (int k = 0; rfr_programs_tensor_at(p, k, &x) == RFR_OK; k++) {
      OK(rfr_programs_tensor(q, x.name, &y));
      if (x.role == RFR_ROLE_TRAINABLE) assert_memory_equal(x.data, y.data, (size_t)x.bytes);
    }
    rfr_programs_destroy(q);
    c.experts++;
    q = compile(f->ctx, &c, 8);
    assert_int_equal(load(f->ctx, q, &c, folder), RFR_MISMATCH);
    assert_non_null(strstr(rfr_last_error()->message, i ? "mlp.gate.weight has shape [6, 16]" : "has shape [5, 16]"));
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
  }
}

static void keep_warning(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) snprintf(user, 512, "%s", e->message);
}

/* config.json describes more or fewer tensors than the folder has. */
static void other_tensors(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *key, *value, *warning, *error;
  } cases[] = {
      {"attention_dropout", "0.0", "", NULL},
      {"num_hidden_layers", "1", "16 tensors do not belong to the model and are ignored, as model.layers.1.", NULL},
      {"num_hidden_layers", "3", "", "there is no tensor model.layers.2.input_layernorm.weight"},
      {"tie_word_embeddings", "true", "", NULL}, /* the head is there all the same */
      {"intermediate_size", "48", "", "has shape [24, 16]; config.json describes [48, 16]"},
  };
  size_t n;
  char *data = read_model_file("llama", "model.safetensors", &n), config[1024];
  rft_write(f, "model.safetensors", data, n);
  write_text(f);
  free(data);
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: %s\ndata: {train: [text], root: %s, sequence: 16}\nbatch: {tokens: 32, microbatch: 2}\n"
           "optimizer: {lr: 1e-3}\nprecision: {dtype: f32}\nrun: {steps: 1}\n",
           f->path, f->path);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char warning[512] = "";
    rfr_model_config c;
    rfr_run *run;
    rfr_run_options o = rfr_run_options_default();
    json_t *config_json = config_of("llama");
    json_object_set_new(config_json, cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
    OK(read_config(f, config_json, &c));
    o.on_event = keep_warning, o.event_user = warning;
    const rfr_status s = rfr_run_open(f->ctx, config, NULL, &o, &run);
    as_expected(s, cases[i].error, cases[i].key, cases[i].value);
    if (s != RFR_OK) assert_string_equal(rfr_last_error()->slug, "model.weights");
    if (!strstr(warning, cases[i].warning) || !*cases[i].warning != !*warning) fail_msg("%s", warning);
    rfr_run_close(run);
  }
}

static void indexes(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *text, *message;
  } cases[] = {
      {"{\"weight_map\": {\"a\": \"../x.safetensors\"}}", "the file of \"a\" is not a file name of this folder"},
      {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "the file of \"a\""},
      {"{\"weight_map\": {\"a\": \"..\"}}", "the file of \"a\""},
      {"{\"weight_map\": {\"a\": \"\"}}", "the file of \"a\""},
      {"{\"weight_map\": {\"a\": 3}}", "the file of \"a\""},
      {"{\"weight_map\": [\"one.safetensors\"]}", "has no object"},
      {"{}", "has no object"},
      {"{\"weight_map\": {\"a\": \"missing.safetensors\"}}", "missing.safetensors"},
      {"{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"two.safetensors\"}}", "in one.safetensors and in two"},
      {"{\"weight_map\": {}}", "there is no tensor"},
      {"{\"weight_map\": {\"x\": \"one.safetensors\"}}", NULL}, /* stale, but the files have it all */
  };
  size_t n;
  char *data = read_model_file("gpt2", "model.safetensors", &n);
  rft_write(f, "one.safetensors", data, n);
  rft_write(f, "two.safetensors", data, n);
  free(data);
  rfr_model_config c;
  OK(read_config(f, config_of("gpt2"), &c));
  rfr_programs *p = compile(f->ctx, &c, 8);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rft_write(f, "model.safetensors.index.json", cases[i].text, strlen(cases[i].text));
    as_expected(load(f->ctx, p, &c, f->path), cases[i].message, "index", cases[i].text);
  }
  rfr_programs_destroy(p);
  /* the message has both shapes */
  c.intermediate_size = 48;
  p = compile(f->ctx, &c, 8);
  assert_int_equal(load(f->ctx, p, &c, f->path), RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "has shape [16, 64]; config.json describes [16, 48]"));
  rfr_programs_destroy(p);
}

/* The logits of tokens 3, 10, 17, ... in a model folder, one per line, for tools/check_transformers.py. */
static int print_logits(const char *folder) {
  enum { TOKENS = 24 };
  rfr_ctx *ctx = NULL;
  rfr_programs *p = NULL;
  rfr_model_config c = {.dtype = RFR_F32};
  rfr_tensor x;
  rfr_status s = rfr_ctx_create(NULL, &ctx);
  if (s == RFR_OK) s = rfi_hf_read(ctx, folder, true, &c);
  if (s == RFR_OK) p = compile(ctx, &c, TOKENS);
  if (s == RFR_OK) s = load(ctx, p, &c, folder);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "offsets", &x);
  if (s == RFR_OK) ((int32_t *)x.data)[0] = 0, ((int32_t *)x.data)[1] = TOKENS;
  if (s == RFR_OK) s = rfr_programs_tensor(p, "targets", &x);
  if (s == RFR_OK) memset(x.data, 0, (size_t)x.bytes);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "tokens", &x);
  for (int i = 0; s == RFR_OK && i < TOKENS; i++) ((int32_t *)x.data)[i] = (int32_t)((3 + 7 * i) % c.vocab_size);
  if (s == RFR_OK) s = rfr_programs_load(p);
  if (s == RFR_OK) s = rfr_program_run(p, 0);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "logits", &x);
  for (int64_t i = 0; s == RFR_OK && i < x.bytes / 4; i++) printf("%.9g\n", (double)((float *)x.data)[i]);
  if (s != RFR_OK) fprintf(stderr, "%s\n", rfr_last_error()->message);
  rfr_programs_destroy(p);
  rfr_ctx_destroy(ctx);
  return s != RFR_OK;
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "--logits") == 0) return print_logits(argv[2]);
  const struct CMUnitTest tests[] = {
      rft_folder_test(references),     rft_folder_test(greedy_texts),      rft_folder_test(written_config_reads_back),
      rft_folder_test(fields),         rft_folder_test(expert_fields),     rft_folder_test(versions),
      rft_folder_test(refused),        rft_folder_test(published_dropout), rft_folder_test(base_names),
      rft_folder_test(packed_experts), rft_folder_test(indexes),           rft_folder_test(windows),
      rft_folder_test(notes),          rft_folder_test(unused_losses),     rft_folder_test(even_routing),
      rft_folder_test(other_tensors),  rft_folder_test(carried_files),     rft_folder_test(foreign_tokenizers),
      rft_folder_test(run_folders),
  };
  return cmocka_run_group_tests_name("models", tests, NULL, NULL);
}
