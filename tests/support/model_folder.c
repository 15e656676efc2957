/* SPDX-License-Identifier: Apache-2.0 */
#include "support/model_folder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/hf.h"
#include "model/weights.h"

const char *const rft_models[RFT_N_MODELS] = {
    "gpt2",  "gpt2-untied", "llama",          "llama-shards", "qwen2",     "qwen3",       "mistral",     "qwen2-window",
    "gemma", "gemma2",      "mixtral",        "qwen2-moe",    "qwen3-moe", "qwen2-mixed", "qwen3-mixed", "gemma3",
    "olmo2", "smollm3",     "smollm3-window", "granite",      "phi3",      "phi3-short",  "phi3-long",   "qwen3-yarn"};

json_t *rft_model_config(const char *model) {
  char path[512];
  json_t *o = NULL;
  snprintf(path, sizeof path, RFT_MODELS "%s/config.json", model);
  o = json_load_file(path, 0, NULL);
  assert_non_null(o);
  return o;
}

rfr_status rft_model_read(rft_folder *f, json_t *o, rfr_model_config *c) {
  char *text = json_dumps(o, 0);
  assert_non_null(text);
  rft_write(f, "config.json", text, strlen(text));
  free(text);
  json_decref(o);
  *c = (rfr_model_config){.dtype = RFR_F32};
  return rfi_hf_read(f->ctx, f->path, true, c);
}

bool rft_expect(rfr_status s, const char *text, const char *what, const char *value) {
  if (s == RFR_OK && text) fail_msg("%s %s was taken", what, value);
  if (s != RFR_OK && (!text || !strstr(rfr_last_error()->message, text)))
    fail_msg("%s %s: %s", what, value, rfr_last_error()->message);
  return s == RFR_OK;
}

rfr_programs *rft_model_compile(rfr_ctx *ctx, const rfr_model_config *c, int64_t tokens) {
  rfr_trace *t;
  rfr_programs *p;
  rfr_value w[RFT_MOST];
  char name[128];
  OK(rfr_trace_create(ctx, &t));
  assert_true(rfr_model_parameter_count(c) <= RFT_MOST);
  rfr_model_declare(t, c, NULL, 0, w);
  rfr_value ids = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){2});
  rfr_value router[RFT_MOST], index[RFT_MOST];
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

rfr_status rft_model_load(rfr_ctx *ctx, rfr_programs *p, const rfr_model_config *c, const char *folder) {
  rfi_weights *w;
  rfr_tensor x;
  rfr_status s = rfi_weights_open(ctx, folder, &w);
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (x.role == RFR_ROLE_TRAINABLE) s = rfi_weights_read(w, c, &x);
  rfi_weights_close(w);
  return s;
}

char *rft_model_file(const char *model, const char *name, size_t *n) {
  char path[512];
  snprintf(path, sizeof path, RFT_MODELS "%s/%s", model, name);
  FILE *in = fopen(path, "rb");
  assert_non_null(in);
  char *data = malloc(1 << 20);
  *n = fread(data, 1, 1 << 20, in);
  fclose(in);
  return data;
}

void rft_model_text(rft_folder *f) {
  char text[1024];
  for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(i % 32 == 31 ? '\n' : 'a' + i * i % 26);
  rft_write(f, "text", text, sizeof text);
}

void rft_model_folder(rft_folder *f, const char *model, const char *fields) {
  size_t n;
  rfr_model_config c;
  json_t *o = rft_model_config(model), *changes = fields ? json_loads(fields, 0, NULL) : json_object();
  assert_int_equal(json_object_update(o, changes), 0);
  json_decref(changes);
  OK(rft_model_read(f, o, &c));
  char *data = rft_model_file(model, "model.safetensors", &n);
  rft_write(f, "model.safetensors", data, n);
  rft_model_text(f);
  free(data);
}

const char *rft_model_run(const char *folder) {
  static char config[2048];
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: %s\ndata: {train: [text], root: %s, sequence: 16}\nbatch: {tokens: 32, microbatch: 2}\n"
           "optimizer: {lr: 1e-3}\nrun: {steps: 1}\n",
           folder, folder);
  return config;
}
