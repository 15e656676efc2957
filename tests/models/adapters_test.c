/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters that the PEFT library wrote (tools/make_reference_adapters.py). Compares logits, gradients, and the losses
 * and values of 20 steps of AdamW with torch's in f32, and the logits of merged weights with those of the adapter. It
 * also tests the adapter_config.json that we write for PEFT, and fields and tensors that are refused.
 *
 * `adapters_test BASE FOLDER` prints the differences of one adapter of any size. `adapters_test --logits BASE FOLDER`
 * prints the logits of 24 tokens for tools/check_peft.py.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "data/safetensors.h"
#include "model/hf.h"
#include "model/peft.h"
#include "model/weights.h"
#include "refrain/program.h"
#include "support/context.h"
#include "support/folder.h"
#include "train/step_trace.h"

#define MODELS RFT_SOURCE_DIR "/tests/models/"
enum { STEPS = 20 };

static const char *const cases[][2] = {{"llama", "llama-lora"},      {"llama", "llama-rslora"},
                                       {"gpt2-untied", "gpt2-lora"}, {"qwen3", "qwen3-dora"},
                                       {"gpt2", "gpt2-dora"},        {"qwen3-moe", "experts-lora"}};

typedef struct scene {
  rfr_ctx *ctx;
  rfr_model_config c;
  rfr_adapter *adapter;
  rfi_peft *peft;
  rfi_weights *weights;
  rfi_safetensors *reference;
} scene;

static void open_scene(scene *s, rfr_ctx *ctx, const char *base, const char *folder, bool reference) {
  char path[600];
  *s = (scene){.ctx = ctx, .c = {.dtype = RFR_F32}};
  OK(rfi_hf_read(ctx, base, false, &s->c));
  OK(rfi_peft_open(ctx, folder, &s->peft));
  OK(rfi_peft_adapter(s->peft, &s->c, 0.0, &s->adapter));
  OK(rfi_weights_open(ctx, base, &s->weights));
  snprintf(path, sizeof path, "%s/reference.safetensors", folder);
  if (reference) OK(rfi_safetensors_open(ctx, path, &s->reference));
  s->c.adapter = s->adapter;
}

static void close_scene(scene *s) {
  rfi_safetensors_close(s->reference);
  rfi_weights_close(s->weights);
  rfi_peft_close(s->peft);
  rfr_adapter_destroy(s->adapter);
}

static void load_weights(scene *s, rfr_programs *p) {
  rfr_parameter q;
  rfr_tensor x;
  for (int i = 0; rfr_model_parameter(&s->c, i, &q) == RFR_OK; i++) {
    OK(rfr_programs_tensor(p, q.name, &x));
    assert_int_equal(x.role, s->c.adapter && i < s->adapter->base_count ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE);
    if (i < s->adapter->base_count) OK(rfi_weights_read(s->weights, &s->c, &x));
    else OK(rfi_peft_read(s->peft, &s->c, i, x.data));
  }
}

/* The largest difference to a tensor of the reference, relative to the largest element of that. */
static double difference(const scene *s, const char *name, const float *got, int64_t elements) {
  double worst = 0, largest = 0;
  const rfi_stored *stored = rfi_safetensors_find(s->reference, name);
  if (!stored) fail_msg("no %s in the reference", name);
  assert_true(stored->elements <= elements);
  float *want = malloc((size_t)stored->elements * sizeof *want);
  OK(rfi_safetensors_read_as(s->reference, stored, RFR_F32, want, stored->elements));
  for (int64_t i = 0; i < stored->elements; i++) {
    const double d = fabs((double)got[i] - (double)want[i]);
    if (!(d <= worst)) worst = d; /* also fails for NaN */
    largest = fmax(largest, fabs((double)want[i]));
  }
  free(want);
  if (!(largest > 1e-6)) fail_msg("%s: %g at most; nothing to compare", name, largest);
  return worst / largest;
}

static int64_t length_of(const scene *s) { return rfi_safetensors_find(s->reference, "tokens")->shape[1]; }

/* The rows of step `step`; -1: of all steps. */
static void read_i32(const scene *s, const char *name, int step, int32_t *out) {
  const rfi_stored *stored = rfi_safetensors_find(s->reference, name);
  const int64_t n = stored->elements / STEPS;
  int32_t *all = malloc((size_t)stored->bytes);
  OK(rfi_safetensors_read((rfi_safetensors *)s->reference, stored, all, (size_t)stored->bytes));
  if (step < 0) memcpy(out, all, (size_t)stored->bytes);
  else memcpy(out, all + step * n, (size_t)n * sizeof *out);
  free(all);
}

/* ---- step 0 ---- */

static rfr_programs *compile_step(scene *s, int64_t tokens) {
  rfr_trace *t;
  rfr_programs *p;
  rfr_parameter q;
  char name[128];
  const int n = rfr_model_parameter_count(&s->c);
  rfr_value *w = malloc((size_t)n * sizeof *w);
  OK(rfr_trace_create(s->ctx, &t));
  rfr_model_declare(t, &s->c, NULL, 0, w);
  rfr_value ids = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){2});
  rfr_value logits = rfr_model_logits(t, &s->c, w, rfr_model_forward(t, &s->c, w, ids, offsets, RFR_NONE), RFR_F32);
  rfr_value loss = rfr_cross_entropy(t, logits, targets, rfr_token_count(t, 1, &targets, -100, NULL), -100);
  rfr_output(t, "logits", logits);
  rfr_output(t, "loss", loss);
  for (int i = s->c.adapter ? s->adapter->base_count : n; i < n; i++) {
    OK(rfr_model_parameter(&s->c, i, &q));
    snprintf(name, sizeof name, "d_%s", q.name);
    rfr_output(t, name, rfr_gradient(t, loss, w[i], RFR_F32));
  }
  OK(rfr_trace_finish(t));
  OK(rfr_compile(s->ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p));
  rfr_trace_destroy(t);
  free(w);
  return p;
}

static void fill_step(scene *s, rfr_programs *p) {
  rfr_tensor x;
  OK(rfr_programs_tensor(p, "tokens", &x));
  read_i32(s, "tokens", 0, x.data);
  OK(rfr_programs_tensor(p, "targets", &x));
  read_i32(s, "targets", 0, x.data);
  OK(rfr_programs_tensor(p, "offsets", &x));
  memcpy(x.data, (int32_t[]){0, (int32_t)length_of(s)}, 2 * sizeof(int32_t));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
}

/* `prints`: print the difference of each gradient. */
static void first_step(scene *s, bool prints, double *logits, double *gradients) {
  rfr_programs *p = compile_step(s, length_of(s));
  rfr_parameter q;
  rfr_tensor x;
  load_weights(s, p);
  fill_step(s, p);
  OK(rfr_program_output(p, 0, "logits", &x));
  *logits = difference(s, "logits", x.data, x.bytes / 4);
  *gradients = 0;
  for (int i = s->adapter->base_count; rfr_model_parameter(&s->c, i, &q) == RFR_OK; i++) {
    char name[128];
    snprintf(name, sizeof name, "d_%s", q.name);
    OK(rfr_program_output(p, 0, name, &x));
    const double own = difference(s, name, x.data, x.bytes / 4);
    if (prints) printf("%s %.2e\n", name, own);
    *gradients = fmax(*gradients, own);
  }
  rfr_programs_destroy(p);
}

/* The model without an adapter, with merged weights. */
static double merged(scene *s) {
  rfr_parameter q;
  rfr_tensor x;
  double worst;
  s->c.adapter = NULL;
  rfr_programs *p = compile_step(s, length_of(s));
  for (int i = 0; rfr_model_parameter(&s->c, i, &q) == RFR_OK; i++) {
    OK(rfr_programs_tensor(p, q.name, &x));
    OK(rfi_weights_read(s->weights, &s->c, &x));
    const rfi_adapter_target *target = rfi_adapter_find(s->adapter, i);
    if (!target) continue;
    float *part[3] = {NULL};
    s->c.adapter = s->adapter;
    for (int k = 0; k < 2 + s->adapter->dora; k++) {
      int64_t n = 1;
      OK(rfr_model_parameter(&s->c, target->first + k, &q));
      for (int d = 0; d < q.rank; d++) n *= q.shape[d];
      part[k] = malloc(sizeof(float) * (size_t)n);
      OK(rfi_peft_read(s->peft, &s->c, target->first + k, part[k]));
    }
    s->c.adapter = NULL;
    rfi_adapter_merge(&s->c, target, part[0], part[1], part[2], 2, x.data);
    for (int k = 0; k < 3; k++) free(part[k]);
  }
  fill_step(s, p);
  OK(rfr_program_output(p, 0, "logits", &x));
  worst = difference(s, "logits", x.data, x.bytes / 4);
  rfr_programs_destroy(p);
  s->c.adapter = s->adapter;
  return worst;
}

/* ---- twenty steps ---- */

/* Losses and final values: the largest relative difference of each tensor. */
static void train(scene *s, double *losses, double *after) {
  const int64_t length = length_of(s);
  rfr_trace *t;
  rfr_programs *p;
  rfr_tensor x;
  rfr_parameter q;
  rfi_step_spec spec = {.model = s->c,
                        .slots = STEPS,
                        .microbatches = 1,
                        .tokens = length,
                        .adamw = rfr_adamw_options_default(),
                        .gradient_dtype = RFR_F32,
                        .logits_dtype = RFR_F32,
                        .state_dtype = RFR_F32,
                        .lr = rfr_lr_options_default()};
  float lr;
  OK(rfi_safetensors_read_as(s->reference, rfi_safetensors_find(s->reference, "lr"), RFR_F32, &lr, 1));
  spec.adamw.beta1 = 0.9, spec.adamw.beta2 = 0.95, spec.adamw.eps = 1e-8, spec.adamw.decay = 0.01;
  spec.lr.kind = RFR_LR_CONSTANT, spec.lr.base = (double)lr, spec.lr.total = STEPS;
  OK(rfi_trace_train(s->ctx, &spec, &t));
  OK(rfr_compile(s->ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p));
  rfr_trace_destroy(t);
  load_weights(s, p);
  OK(rfr_programs_tensor(p, RFI_NAME_TOKENS, &x));
  read_i32(s, "tokens", -1, x.data);
  OK(rfr_programs_tensor(p, RFI_NAME_TARGETS, &x));
  read_i32(s, "targets", -1, x.data);
  OK(rfr_programs_tensor(p, RFI_NAME_OFFSETS, &x));
  for (int i = 0; i < STEPS; i++)
    for (int64_t k = 0; k <= length; k++)
      ((int32_t *)x.data)[i * (length + 1) + k] = k == 0 ? 0 : (int32_t)length; /* one document, then empty ones */
  OK(rfr_programs_load(p));
  for (int i = 0; i < STEPS; i++) OK(rfr_program_run(p, 0));
  OK(rfr_programs_tensor(p, RFI_NAME_METRICS, &x));
  float want[STEPS];
  *losses = *after = 0;
  OK(rfi_safetensors_read_as(s->reference, rfi_safetensors_find(s->reference, "losses"), RFR_F32, want, STEPS));
  for (int i = 0; i < STEPS; i++) {
    const double *row = (double *)x.data + i * rfi_metric_width(&spec);
    assert_true(row[0] == i + 1);
    const double d = fabs(row[1 + RFI_METRIC_LOSS] - (double)want[i]) / (double)want[i];
    if (!(d <= *losses)) *losses = d;
  }
  for (int i = s->adapter->base_count; rfr_model_parameter(&s->c, i, &q) == RFR_OK; i++) {
    char name[128];
    snprintf(name, sizeof name, "after_%s", q.name);
    OK(rfr_programs_tensor(p, q.name, &x));
    *after = fmax(*after, difference(s, name, x.data, x.bytes / 4));
  }
  rfr_programs_destroy(p);
}

static void compare(rfr_ctx *ctx, const char *base, const char *folder, bool prints, double tolerance) {
  scene s;
  double logits, gradients, losses, after;
  open_scene(&s, ctx, base, folder, true);
  first_step(&s, prints, &logits, &gradients);
  const double merge = merged(&s);
  train(&s, &losses, &after);
  print_message(
      "%s: logits within %.1e, merged %.1e, gradients %.1e, losses of %d steps %.1e, values after them %.1e\n",
      strrchr(folder, '/') + 1, logits, merge, gradients, STEPS, losses, after);
  assert_true(logits <= tolerance && merge <= tolerance && gradients <= tolerance && losses <= tolerance);
  assert_true(after <= 1e-3 ||
              /* the first updates of AdamW are signs of gradients: a small gradient may have another sign after
               * rounding */
              isinf(tolerance));
  close_scene(&s);
}

static void references(void **state) {
  rft_folder *f = *state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char base[512], folder[512];
    snprintf(base, sizeof base, MODELS "%s", cases[i][0]);
    snprintf(folder, sizeof folder, MODELS "adapters/%s", cases[i][1]);
    compare(f->ctx, base, folder, false, 1e-5);
  }
}

/* ---- descriptions ---- */

static rfr_status describe(rfr_ctx *ctx, const char *model, const rfr_adapter_options *o, json_t **out) {
  char folder[512];
  rfr_adapter *a = NULL;
  rfr_model_config c = {.dtype = RFR_F32};
  snprintf(folder, sizeof folder, MODELS "%s", model);
  OK(rfi_hf_read(ctx, folder, false, &c));
  const rfr_status s = rfr_adapter_create(ctx, &c, o, &a);
  c.adapter = a;
  *out = s == RFR_OK ? rfi_peft_config(&c, "") : NULL;
  rfr_adapter_destroy(a);
  return s;
}

static void check_field(const json_t *o, const char *key, const char *want) {
  char text[400];
  rfi_json_brief(json_object_get(o, key), text, sizeof text);
  if (strcmp(text, want) != 0) fail_msg("%s is %s, not %s", key, text, want);
}

/* Names are short if all modules of that name are alike, otherwise full. */
static void written_config(void **state) {
  rft_folder *f = *state;
  json_t *o;
  rfr_adapter_options options = rfr_adapter_options_default();
  OK(describe(f->ctx, "llama", &options, &o));
  check_field(o, "target_modules",
              "[\"q_proj\",\"k_proj\",\"v_proj\",\"o_proj\",\"gate_proj\",\"up_proj\",\"down_proj\"]");
  check_field(o, "r", "16");
  check_field(o, "lora_alpha", "32");
  check_field(o, "rank_pattern", "{}");
  json_decref(o);
  const char *targets[] = {"*.q_proj", "*.1.mlp.up_proj", "lm_head"};
  const rfr_adapter_number ranks[] = {{"*q_proj", 4}, {"*.1.*q_proj", 8}}, alphas[] = {{"lm_head", 2.5}};
  options.targets = targets, options.n_targets = 3;
  options.ranks = ranks, options.n_ranks = 2, options.alphas = alphas, options.n_alphas = 1;
  options.rslora = 1;
  OK(describe(f->ctx, "llama", &options, &o));
  check_field(o, "target_modules", "[\"q_proj\",\"model.layers.1.mlp.up_proj\",\"lm_head\"]");
  check_field(o, "r", "16");
  check_field(o, "rank_pattern", "{\"model.layers.0.self_attn.q_proj\":4,\"model.layers.1.self_attn.q_proj\":8}");
  check_field(o, "alpha_pattern", "{\"lm_head\":2.5}");
  check_field(o, "use_rslora", "true");
  json_decref(o);
}

static void targets_refused(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *model, *target, *text;
  } rows[] = {
      {"llama", "*.q_porj", "no module matches \"*.q_porj\"; modules that can have an adapter end in: embed_tokens"},
      {"llama", "*norm*", "which cannot have an adapter: it is neither a linear layer"},
      {"qwen2", "*embed_tokens", "would untie them"},
      {"qwen3-moe", "*.mlp.gate", "which cannot have an adapter"},
      {"gpt2", "*.q_proj", "c_attn c_proj c_fc"}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    rfr_adapter_options o = rfr_adapter_options_default();
    json_t *out;
    o.targets = &rows[i].target;
    assert_int_equal(describe(f->ctx, rows[i].model, &o, &out), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "adapter");
    if (!strstr(rfr_last_error()->message, rows[i].text)) fail_msg("%s", rfr_last_error()->message);
  }
  rfr_adapter_options o = rfr_adapter_options_default();
  json_t *out;
  const rfr_adapter_number none = {"*.c_attn", 3}, half = {"*", 2.5};
  o.ranks = &none, o.n_ranks = 1;
  assert_int_equal(describe(f->ctx, "llama", &o, &out), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "ranks: no target matches"));
  o.ranks = &half;
  assert_int_equal(describe(f->ctx, "llama", &o, &out), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "2.5 is not an integer"));
}

/* A copy of an adapter's folder with one field changed. */
static void fields_refused(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *key, *value, *text; /* text NULL: accepted */
    const char *more, *more_value;  /* another field */
  } rows[] = {
      {"peft_type", "\"LOHA\"", "peft_type is LOHA"},
      {"bias", "\"all\"", "bias is \"all\", which is not supported"},
      {"modules_to_save", "[\"lm_head\"]", "modules_to_save is [\"lm_head\"]"},
      {"modules_to_save", "[]", NULL},
      {"layer_replication", "[[0, 2]]", "layer_replication"},
      {"something_new", "{\"a\": 1}", "something_new is"},
      {"something_new", "null", NULL},
      {"init_lora_weights", "\"pissa\"", "changes the base model's weights"},
      {"init_lora_weights", "\"gaussian\"", NULL},
      {"r", "4", "has 3 rows; r or rank_pattern is 4"},
      {"rank_pattern", "{\"(q|k)_proj\": 3}", "is a regular expression"},
      {"rank_pattern", "{\"q_proj\": 3}", NULL},
      {"alpha_pattern", "{\"q_proj\": \"x\"}", "is not a number"},
      {"alpha_pattern", "{\"^model.layers.0.self_attn.q_proj\": 3}", NULL},
      {"lora_alpha", "0", "alpha 0; it must be more than 0"},
      {"target_modules", "[\"q_proj\", \"v_proj\"]",
       "adapter_model.safetensors has tensors of model.layers.0.self_attn.k_proj, but target_modules is "
       "[\"q_proj\",\"v_proj\"]"},
      {"target_modules", "[\"proj\"]", "has tensors of model.layers.0.self_attn.q_proj, but target_modules is"},
      {"target_modules", "\"all-linear\"", NULL},
      {"target_modules", "\"model.*_proj\"", NULL},
      {"target_modules", "\".*_proj|lm_head\"", "which includes lm_head, but adapter_model.safetensors has no tensor"},
      {"target_modules", "\"q_proj|k_proj\"", "has tensors of model.layers.0.self_attn.q_proj, but target_modules is"},
      {"target_modules", "\"(\"", "is not a valid regular expression at byte 1"},
      {"target_modules", "\"(([a-z0-9._]+)+)+[A-Z]\"", "takes too long on model.embed_tokens"},
      {"target_modules", "[3]", "element 0 is not a string"},
      {"target_modules", "3", "target_modules is neither a string nor a list"},
      {"target_modules", "null", NULL},
      {"exclude_modules", "[\"mlp.up_proj\"]", "has tensors of model.layers.0.mlp.up_proj, but exclude_modules is"},
      {"exclude_modules", "\".*1.*\"", "has tensors of model.layers.1.self_attn.q_proj, but exclude_modules is"},
      {"exclude_modules", "[\"p_proj\"]", NULL},
      {"layers_to_transform", "0", "has tensors of model.layers.1.self_attn.q_proj, but layers_to_transform is 0"},
      {"layers_to_transform", "[1]", "has tensors of model.layers.0.self_attn.q_proj, but layers_to_transform is [1]"},
      {"layers_to_transform", "[1, 0]", NULL},
      {"layers_to_transform", "[0, 1]", NULL, "layers_pattern", "[\"h\", \"layers\"]"},
      {"layers_to_transform", "[0, 1]", "has tensors of model.layers.0.self_attn.q_proj", "layers_pattern",
       "\"ayers\""},
      {"layers_to_transform", "0", "\"(h|layers)\" is not the name of a list", "layers_pattern", "\"(h|layers)\""},
      {"layers_to_transform", "\"0\"", "layers_to_transform is neither a number nor a list"},
      {"use_dora", "true", "there is no tensor base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude"}};
  char *weights;
  size_t n;
  json_t *o = json_load_file(MODELS "adapters/llama-lora/adapter_config.json", 0, NULL);
  assert_non_null(o);
  OK(rfi_file_read(f->ctx, MODELS "adapters/llama-lora/adapter_model.safetensors", &weights, &n));
  rft_write(f, "adapter_model.safetensors", weights, n);
  rfi_free(f->ctx, weights);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    json_t *changed = json_deep_copy(o);
    rfi_peft *p;
    rfr_adapter *a = NULL;
    rfr_model_config c = {.dtype = RFR_F32};
    json_object_set_new(changed, rows[i].key, json_loads(rows[i].value, JSON_DECODE_ANY, NULL));
    if (rows[i].more) json_object_set_new(changed, rows[i].more, json_loads(rows[i].more_value, JSON_DECODE_ANY, NULL));
    char *text = json_dumps(changed, 0);
    rft_write(f, "adapter_config.json", text, strlen(text));
    free(text);
    json_decref(changed);
    OK(rfi_hf_read(f->ctx, MODELS "llama", false, &c));
    OK(rfi_peft_open(f->ctx, f->path, &p));
    const rfr_status s = rfi_peft_adapter(p, &c, 0.0, &a);
    if ((s == RFR_OK) != !rows[i].text) fail_msg("%s: %s", rows[i].key, rfr_last_error()->message);
    if (rows[i].text && !strstr(rfr_last_error()->message, rows[i].text)) fail_msg("%s", rfr_last_error()->message);
    rfr_adapter_destroy(a);
    rfi_peft_close(p);
  }
  /* an adapter of another model */
  rfi_peft *p;
  rfr_adapter *a;
  rfr_model_config c = {.dtype = RFR_F32};
  OK(rfi_hf_read(f->ctx, MODELS "gpt2", false, &c));
  OK(rfi_peft_open(f->ctx, MODELS "adapters/llama-lora", &p));
  assert_int_equal(rfi_peft_adapter(p, &c, 0.0, &a), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "no tensor belongs to a module of the model"));
  rfi_peft_close(p);
  OK(rfi_peft_open(f->ctx, MODELS "adapters/gpt2-lora", &p));
  assert_int_equal(rfi_peft_adapter(p, &c, 0.0, &a), RFR_INVALID); /* tied: no adapter on wte */
  assert_non_null(strstr(rfr_last_error()->message, "belongs to no module of the model that can have an adapter"));
  rfi_peft_close(p);
  json_decref(o);
}

/* The logits of tokens 3, 10, 17, ..., one per line. */
static void print_logits(rfr_ctx *own, const char *base, const char *folder) {
  enum { TOKENS = 24 };
  scene s;
  rfr_tensor x;
  open_scene(&s, own, base, folder, false);
  rfr_programs *p = compile_step(&s, TOKENS);
  load_weights(&s, p);
  OK(rfr_programs_tensor(p, "tokens", &x));
  for (int i = 0; i < TOKENS; i++) ((int32_t *)x.data)[i] = (int32_t)((3 + 7 * i) % s.c.vocab_size);
  OK(rfr_programs_tensor(p, "targets", &x));
  memset(x.data, 0, (size_t)x.bytes);
  OK(rfr_programs_tensor(p, "offsets", &x));
  memcpy(x.data, (int32_t[]){0, TOKENS}, 2 * sizeof(int32_t));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "logits", &x));
  for (int64_t i = 0; i < x.bytes / 4; i++) printf("%.9g\n", (double)((float *)x.data)[i]);
  rfr_programs_destroy(p);
  close_scene(&s);
}

int main(int argc, char **argv) {
  const bool logits = argc == 4 && strcmp(argv[1], "--logits") == 0;
  if (argc == 3 || logits) {
    rfr_ctx *own;
    OK(rfr_ctx_create(NULL, &own));
    if (logits) print_logits(own, argv[2], argv[3]);
    else compare(own, argv[1], argv[2], true, INFINITY);
    rfr_ctx_destroy(own);
    return 0;
  }
  const struct CMUnitTest tests[] = {
      rft_folder_test(references),
      rft_folder_test(written_config),
      rft_folder_test(targets_refused),
      rft_folder_test(fields_refused),
  };
  return cmocka_run_group_tests_name("adapters", tests, NULL, NULL);
}
