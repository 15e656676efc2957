/* SPDX-License-Identifier: Apache-2.0
 *
 * Exports: a GGUF file of gguf-py is written again with the same tensors, a folder has the same weights after both
 * formats, an adapter is merged, and a failed export leaves nothing.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/gguf.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "model/hf.h"
#include "model/weights.h"
#include "refrain/model.h"
#include "support/folder.h"

#define FILES RFT_SOURCE_DIR "/tests/data/gguf/"
#define MODELS RFT_SOURCE_DIR "/tests/models/"
#define OK(call) assert_ok(call, #call, __LINE__)

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

static void export_as(rft_folder *f, const char *model, const char *format, const char *dtype, const char *out) {
  rfr_export_options o = rfr_export_options_default();
  o.format = format;
  o.dtype = dtype;
  rfi_tree_discard(rft_path(f, out));
  OK(rfr_export(f->ctx, model, rft_path(f, out), &o));
}

static void *bytes_of(rfi_gguf *g, const rfi_gguf_tensor *t) {
  void *data = malloc((size_t)t->bytes);
  const int64_t width = t->shape[t->rank - 1];
  assert_non_null(data);
  OK(rfi_gguf_read(g, t, 0, t->elements / width, 0, t->format->dtype, data));
  return data;
}

/* The tensors that gguf-py wrote for each architecture. */
static void same_file(void **state) {
  static const char *const names[] = {"llama", "llama-shards", "mixtral", "qwen2", "qwen2-moe", "gemma", "gpt2"};
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    char path[512];
    rfi_gguf *a, *b;
    snprintf(path, sizeof path, FILES "%s.gguf", names[i]);
    export_as(f, path, "gguf", "bf16", "m.gguf");
    OK(rfi_gguf_open(f->ctx, path, &a));
    OK(rfi_gguf_open(f->ctx, rft_path(f, "m.gguf"), &b));
    assert_int_equal(rfi_gguf_tensor_count(a), rfi_gguf_tensor_count(b));
    for (int k = 0; k < rfi_gguf_tensor_count(a); k++) {
      const rfi_gguf_tensor *x = rfi_gguf_tensor_at(a, k), *y = rfi_gguf_tensor_find(b, x->name);
      if (!y || x->rank != y->rank || memcmp(x->shape, y->shape, sizeof x->shape) != 0 || x->elements != y->elements)
        fail_msg("%s: %s has another shape", names[i], x->name);
      if (x->format != y->format) { /* the package keeps the weights of routers as BF16 */
        assert_non_null(strstr(x->name, "ffn_gate_inp"));
        continue;
      }
      void *p = bytes_of(a, x), *q = bytes_of(b, y);
      const bool frequencies = strcmp(x->name, "rope_freqs.weight") == 0;
      for (int64_t e = 0; frequencies && e < x->elements; e++)
        assert_true(fabsf(((float *)p)[e] - ((float *)q)[e]) <= 1e-6f * ((float *)p)[e]);
      if (!frequencies && memcmp(p, q, (size_t)x->bytes) != 0) fail_msg("%s: %s differs", names[i], x->name);
      free(p);
      free(q);
    }
    rfi_gguf_close(a);
    rfi_gguf_close(b);
  }
}

static float *read_f32(rfr_ctx *ctx, const char *model, const char *name, int64_t *n) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfi_weights *w;
  rfr_parameter p;
  float *data = NULL;
  c.dtype = RFR_F32;
  OK(rfi_hf_read(ctx, model, false, &c));
  OK(rfi_weights_open(ctx, model, &w));
  for (int i = 0; rfr_model_parameter(&c, i, &p) == RFR_OK; i++) {
    if (strcmp(p.name, name) != 0) continue;
    rfr_tensor x = {.name = p.name, .type = {.dtype = RFR_F32, .rank = p.rank}, .bytes = 4};
    for (int d = 0; d < p.rank; d++) x.bytes *= x.type.shape[d] = p.shape[d];
    x.data = data = malloc((size_t)x.bytes);
    OK(rfi_weights_read(w, &c, &x));
    *n = x.bytes / 4;
  }
  rfi_weights_close(w);
  assert_non_null(data);
  return data;
}

/* Every f32 weight of a folder must be unchanged by an export, by the names of the model `c`. */
static void compare_all(rfr_ctx *ctx, const char *from, const char *to) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfr_parameter p;
  OK(rfi_hf_read(ctx, from, false, &c));
  for (int i = 0; rfr_model_parameter(&c, i, &p) == RFR_OK; i++) {
    int64_t n = 0, m = 0;
    float *a = read_f32(ctx, from, p.name, &n), *b = read_f32(ctx, to, p.name, &m);
    assert_int_equal(n, m);
    /* The norms of Gemma lose a bit because 1 is added. */
    for (int64_t k = 0; k < n; k++)
      if (fabsf(a[k] - b[k]) > (strstr(p.name, "norm") ? 1e-6f : 0.0f)) fail_msg("%s: %s differs", to, p.name);
    free(a);
    free(b);
  }
}

static void folders(void **state) {
  static const char *const names[] = {"qwen3", "qwen3-moe", "gemma", "llama", "gpt2-untied", "mistral", "gemma2"};
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    char path[512];
    snprintf(path, sizeof path, MODELS "%s", names[i]);
    export_as(f, path, "hf", NULL, "folder");
    compare_all(f->ctx, path, rft_path(f, "folder"));
    if (i >= 5) continue; /* GGUF has no key for the window of Mistral, or for Gemma 2's scale */
    export_as(f, path, "gguf", "f32", "m.gguf");
    compare_all(f->ctx, path, rft_path(f, "m.gguf"));
  }
}

/* Compares numbers up to f32 precision. */
static bool same_json(const json_t *a, const json_t *b) {
  const char *key;
  const json_t *x;
  size_t i;
  if (json_is_number(a) && json_is_number(b))
    return fabs(json_number_value(a) - json_number_value(b)) <= 1e-6 * fabs(json_number_value(a));
  if (json_is_object(a) && json_object_size(a) == json_object_size(b)) {
    json_object_foreach((json_t *)a, key, x) if (!same_json(x, json_object_get(b, key))) return false;
    return true;
  }
  if (json_is_array(a) && json_array_size(a) == json_array_size(b)) {
    json_array_foreach(a, i, x) if (!same_json(x, json_array_get(b, i))) return false;
    return true;
  }
  return json_equal(a, b);
}

/* A folder of tests/models with other fields in its config.json. */
static void vary(rft_folder *f, const char *name, const char *fields, const char *out) {
  char path[512], file[64];
  size_t n;
  json_t *o, *changes = json_loads(fields, 0, NULL);
  rft_folder from = {.ctx = f->ctx};
  snprintf(path, sizeof path, MODELS "%s/config.json", name);
  OK(rfi_json_load(f->ctx, path, &o));
  assert_non_null(changes);
  assert_int_equal(json_object_update(o, changes), 0);
  char *text = json_dumps(o, 0);
  snprintf(file, sizeof file, "%s/config.json", out);
  rft_write(f, file, text, strlen(text));
  snprintf(from.path, sizeof from.path, MODELS "%s", name);
  char *weights = rft_read(&from, "model.safetensors", &n);
  snprintf(file, sizeof file, "%s/model.safetensors", out);
  rft_write(f, file, weights, n);
  free(weights);
  free(text);
  json_decref(changes);
  json_decref(o);
}

/* Description and weights of a GGUF file are those of the folder. */
static void families(void **state) {
  static const struct {
    const char *name, *fields;
  } cases[] = {{"granite", "{}"},
               {"phi3-short", "{}"},
               {"phi3-long", "{\"sliding_window\": 64}"},
               {"olmo2", "{\"attention_bias\": false}"},
               {"smollm3", "{\"no_rope_layers\": [1, 1]}"},
               {"qwen3-yarn",
                "{\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 1000.0, \"factor\": 4.0, "
                "\"original_max_position_embeddings\": 16}}"},
               {"gemma3", "{\"query_pre_attn_scalar\": 10, \"final_logit_softcapping\": null, \"layer_types\": "
                          "[\"sliding_attention\", \"sliding_attention\", \"sliding_attention\"], \"rope_parameters\": "
                          "{\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 4.0, \"rope_theta\": 5000.0}, "
                          "\"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": 10000.0}}}"}};
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_model_config a = rfr_model_config_default(RFR_MODEL_LLAMA), b = a;
    vary(f, cases[i].name, cases[i].fields, "varied");
    export_as(f, rft_path(f, "varied"), "gguf", "f32", "m.gguf");
    compare_all(f->ctx, rft_path(f, "varied"), rft_path(f, "m.gguf"));
    OK(rfi_hf_read(f->ctx, rft_path(f, "varied"), false, &a));
    OK(rfi_hf_read(f->ctx, rft_path(f, "m.gguf"), false, &b));
    json_t *x = rfi_hf_config(&a), *y = rfi_hf_config(&b);
    if (!same_json(x, y)) fail_msg("%s: %s is now %s", cases[i].name, json_dumps(x, 0), json_dumps(y, 0));
    json_decref(x);
    json_decref(y);
  }
  rfi_tree_discard(rft_path(f, "varied"));
  rfi_tree_discard(rft_path(f, "m.gguf"));
}

static void refuse(rft_folder *f, const char *model, const char *format, const char *dtype, const char *says) {
  rfr_export_options o = rfr_export_options_default();
  char kind;
  o.format = format;
  o.dtype = dtype;
  rfi_tree_discard(rft_path(f, "out"));
  const rfr_status s = rfr_export(f->ctx, model, rft_path(f, "out"), &o);
  if (s == RFR_OK || !strstr(rfr_last_error()->message, says)) fail_msg("%s: %s", says, rfr_last_error()->message);
  OK(rfi_path_kind(rft_path(f, "out"), &kind));
  assert_int_equal(kind, 0);
}

static void refused(void **state) {
  rft_folder *f = *state;
  rfi_paths names = {.ctx = f->ctx};
  refuse(f, MODELS "mistral", "gguf", NULL, "models of type mistral");
  refuse(f, MODELS "qwen2-window", "gguf", NULL, "sliding window");
  refuse(f, MODELS "gemma2", "gguf", NULL, "query_pre_attn_scalar 12");
  refuse(f, MODELS "gemma3", "gguf", NULL, "sliding window");
  refuse(f, MODELS "smollm3", "gguf", NULL, "have no RoPE");
  refuse(f, MODELS "phi3", "gguf", NULL, "sliding window");
  refuse(f, MODELS "olmo2", "gguf", NULL, "attention_bias of olmo2");
  refuse(f, MODELS "qwen3-yarn", "gguf", NULL, "rope_type yarn");
  refuse(f, MODELS "qwen2-mixed", "gguf", NULL, "experts in only some layers");
  refuse(f, MODELS "qwen3", "onnx", NULL, "\"onnx\" is none of");
  refuse(f, MODELS "qwen3", "hf", "q8_0", "cannot be written as hf");
  refuse(f, MODELS "qwen3", "gguf", "q4_k", "cannot be written as gguf");
  refuse(f, MODELS "qwen3", "peft", NULL, "has no adapter");
  refuse(f, MODELS "missing", "hf", NULL, "missing");
  rft_write(f, "here", "x", 1);
  rfr_export_options o = rfr_export_options_default();
  assert_int_equal(rfr_export(f->ctx, MODELS "qwen3", rft_path(f, "here"), &o), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "export.exists");
  /* After any failed file call no file is left. */
  for (int k = 1; k < 60; k++) {
    rfi_io_fault fault = {.fail_at = k, .error = 28};
    o.format = k % 2 ? "gguf" : "hf";
    rfi_io_set_fault(&fault);
    const rfr_status s = rfr_export(f->ctx, MODELS "qwen3", rft_path(f, "out"), &o);
    rfi_io_set_fault(NULL);
    if (s == RFR_OK) rfi_tree_discard(rft_path(f, "out"));
  }
  OK(rfi_dir_list(f->path, &names));
  assert_int_equal(names.n, 1); /* here */
  rfi_paths_deinit(&names);
}

/* W + scale B A of one target, in f64; the other formats must have the same values. */
static void adapters(void **state) {
  rft_folder *f = *state;
  rft_folder from = {.ctx = f->ctx, .path = MODELS "adapters/llama-lora"};
  static const char *const files[] = {"adapter_config.json", "adapter_model.safetensors"};
  for (int i = 0; i < 2; i++) { /* the same folder, with the path of its base */
    size_t n;
    char *data = rft_read(&from, files[i], &n), *base = i ? NULL : strstr(data, "\"llama\""), name[64];
    snprintf(name, sizeof name, "adapter/%s", files[i]);
    rfi_string text = {.ctx = f->ctx};
    if (base) {
      OK(rfi_string_append(&text, data, (size_t)(base - data)));
      OK(rfi_string_printf(&text, "\"%s\"", MODELS "llama"));
      OK(rfi_string_append(&text, base + 7, n - (size_t)(base + 7 - data)));
    } else {
      OK(rfi_string_append(&text, data, n));
    }
    rft_write(f, name, text.data, text.n);
    rfi_string_deinit(&text);
    free(data);
  }
  export_as(f, rft_path(f, "adapter"), "hf", "f32", "merged");
  export_as(f, rft_path(f, "adapter"), "gguf", "f32", "merged.gguf");
  export_as(f, rft_path(f, "adapter"), "peft", NULL, "copy");
  int64_t n, m;
  static const char name[] = "model.layers.0.self_attn.q_proj.weight";
  float *base = read_f32(f->ctx, MODELS "llama", name, &n), *merged = read_f32(f->ctx, rft_path(f, "merged"), name, &m);
  double change = 0;
  for (int64_t k = 0; k < n; k++) change = fmax(change, fabs((double)merged[k] - (double)base[k]));
  assert_true(change > 1e-4);
  free(base);
  free(merged);
  compare_all(f->ctx, rft_path(f, "merged"), rft_path(f, "merged.gguf"));
  /* The file for llama.cpp: A is unchanged; the rows of B are interleaved like those of q. */
  export_as(f, rft_path(f, "adapter"), "gguf-lora", NULL, "lora.gguf");
  rfi_gguf *g;
  rfi_safetensors *st;
  double alpha = 0;
  OK(rfi_gguf_open(f->ctx, rft_path(f, "lora.gguf"), &g));
  OK(rfi_safetensors_open(f->ctx, rft_path(f, "adapter/adapter_model.safetensors"), &st));
  OK(rfi_gguf_real(g, rfi_gguf_key(g, "adapter.lora.alpha"), 0, &alpha));
  assert_true(alpha > 0.0);
  assert_int_equal(rfi_gguf_tensor_count(g), rfi_safetensors_count(st));
  for (int k = 0; k < 2; k++) {
    const rfi_gguf_tensor *t = rfi_gguf_tensor_find(g, k ? "blk.0.attn_q.weight.lora_b" : "blk.0.attn_q.weight.lora_a");
    const rfi_stored *from_peft =
        rfi_safetensors_find(st, k ? "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
                                   : "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    assert_non_null(t);
    assert_non_null(from_peft);
    float have[1024], want[1024];
    assert_true(t->elements == from_peft->elements && t->elements <= 1024);
    OK(rfi_gguf_read(g, t, 0, t->shape[0], k ? 8 : 0, RFR_F32, have));
    OK(rfi_safetensors_read_as(st, from_peft, RFR_F32, want, t->elements));
    assert_memory_equal(have, want, (size_t)t->elements * 4);
  }
  rfi_safetensors_close(st);
  rfi_gguf_close(g);
  size_t a, b;
  char *x = rft_read(f, "adapter/adapter_model.safetensors", &a),
       *y = rft_read(f, "copy/adapter_model.safetensors", &b);
  assert_int_equal(a, b);
  assert_memory_equal(x, y, a);
  free(x);
  free(y);
}

static void collect(const char *text, size_t n, void *user) { rfi_string_append(user, text, n); }

static void inspects(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *path, *kind;
    int tensors;
  } rows[] = {{MODELS "llama-shards", "Hugging Face folder", 20},
              {MODELS "llama/model.safetensors", "safetensors file", 0},
              {MODELS "adapters/llama-lora", "adapter", 0},
              {FILES "types.gguf", "GGUF file", 11},
              {FILES "gemma2.gguf", "GGUF file", 0}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    rfi_string text = {.ctx = f->ctx};
    json_t *o;
    OK(rfr_inspect(f->ctx, rows[i].path, 1, collect, &text));
    OK(rfi_json_parse("inspect", text.data, text.n, &o));
    assert_string_equal(json_string_value(json_object_get(o, "kind")), rows[i].kind);
    const size_t n = json_array_size(json_object_get(o, "tensors"));
    assert_true(n > 0 && (rows[i].tensors == 0 || n == (size_t)rows[i].tensors));
    json_decref(o);
    text.n = 0;
    OK(rfr_inspect(f->ctx, rows[i].path, 0, collect, &text));
    assert_non_null(strstr(text.data, "tensors:\n"));
    rfi_string_deinit(&text);
  }
  assert_int_not_equal(rfr_inspect(f->ctx, MODELS "missing", 1, collect, NULL), RFR_OK);
  rft_write(f, "step-000007/x", "", 0); /* a run folder must not be described as a model without tensors */
  rfi_string text = {.ctx = f->ctx};
  assert_int_equal(rfr_inspect(f->ctx, f->path, 0, collect, &text), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.folder");
  assert_non_null(strstr(rfr_last_error()->message, "/step-000007"));
  rfi_string_deinit(&text);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(same_file), rft_folder_test(folders),  rft_folder_test(families),
                                     rft_folder_test(refused),   rft_folder_test(adapters), rft_folder_test(inspects)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
