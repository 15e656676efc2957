/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads and writes adapters in the format of the PEFT library.
 *
 * A folder is foreign data. Its tensors determine the targets and ranks; adapter_config.json must agree with them
 * (peft_targets.c) and gives the scales. A field that changes the mathematics and is not supported is refused unless it
 * has a neutral value, and so is every field that is not known.
 */
#include "model/peft.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "data/file.h"
#include "data/json_file.h"
#include "data/safetensors.h"
#include "nn/adapter.h"

static const char outer[] = "base_model.model.";

/* The experts of a layer are one module with two packed weights, gate_up_proj and down_proj. PEFT wraps the module once
 * for each weight that has an adapter, gate_up_proj first: "experts.base_layer.lora_A.weight" is then that of
 * gate_up_proj, "experts.lora_A.weight" that of down_proj. With an adapter on one of them there is only the latter. */
void rfi_peft_name(const char *parameter, bool inner, char out[RFI_PEFT_NAME]) {
  const char *experts = strstr(parameter, ".mlp.experts."), *part = strstr(parameter, ".lora_");
  if (!experts || !part) snprintf(out, RFI_PEFT_NAME, "%s%s", outer, parameter);
  else
    snprintf(out, RFI_PEFT_NAME, "%s%.*s%s%s", outer, (int)(experts - parameter + strlen(".mlp.experts")), parameter,
             inner ? ".base_layer" : "", part);
}

/* Whether the target is gate_up_proj of a layer in which down_proj has an adapter too. */
static bool is_inner(const rfr_model_config *c, int parameter) {
  return rfi_parameter_kind(c, parameter) == RFI_PARAM_EXPERT_UP && parameter + 1 < c->adapter->base_count &&
         rfi_adapter_find(c->adapter, parameter + 1) != NULL;
}

void rfi_peft_tensor(const rfr_model_config *c, int i, char name[RFI_PEFT_NAME], rfr_type *type) {
  rfr_parameter p = {.name = ""};
  rfi_adapter_part part;
  const rfi_adapter_target *target = rfi_adapter_owner(c, i, &part);
  (void)rfr_model_parameter(c, i, &p);
  rfi_peft_name(p.name, target && is_inner(c, target->parameter), name);
  *type = (rfr_type){.dtype = RFR_F32, .rank = p.rank};
  memcpy(type->shape, p.shape, sizeof p.shape);
  if (p.rank < 3) return;
  type->rank = 2; /* A (E r,in), B (out,r E) */
  type->shape[0] = part == RFI_ADAPTER_A ? p.shape[0] * p.shape[1] : p.shape[1];
  type->shape[1] = part == RFI_ADAPTER_A ? p.shape[2] : p.shape[2] * p.shape[0];
}

void rfi_peft_order(const rfr_type *type, bool is_b, bool to_peft, size_t size, const void *from, void *to) {
  const int64_t E = type->shape[0], n = type->shape[1], r = type->shape[2];
  if (type->rank < 3 || !is_b) {
    int64_t elements = 1;
    for (int d = 0; d < type->rank; d++) elements *= type->shape[d];
    memcpy(to, from, (size_t)elements * size);
    return;
  }
  for (int64_t e = 0; e < E; e++) /* (E,out,r) here, (out,r,E) there */
    for (int64_t i = 0; i < n * r; i++) {
      const size_t here = (size_t)(e * n * r + i) * size, there = (size_t)(i * E + e) * size;
      memcpy((char *)to + (to_peft ? there : here), (const char *)from + (to_peft ? here : there), size);
    }
}

/* ---- writing ---- */

static const char *last_of(const char *module) {
  const char *dot = strrchr(module, '.');
  return dot ? dot + 1 : module;
}

static void module_of(const rfr_model_config *c, int parameter, char out[96]) {
  rfr_parameter p = {.name = ""};
  (void)rfr_model_parameter(c, parameter, &p);
  rfi_module_name(p.name, out);
}

typedef enum property { TARGETED, RANK, ALPHA } property;

static double value_of(const rfi_adapter_target *t, property what) {
  return what == TARGETED ? t != NULL : !t ? 0.0 : what == RANK ? (double)t->rank : t->alpha;
}

/* Whether all modules with the last component of `module` have the same value. For a rank or alpha only targets
 * count. */
static bool is_common(const rfr_model_config *c, const char *module, property what, double value) {
  for (int i = 0; i < c->adapter->base_count; i++) {
    char other[96];
    const rfi_adapter_target *t = rfi_adapter_find(c->adapter, i);
    module_of(c, i, other);
    if (strcmp(last_of(other), last_of(module)) != 0 || (what != TARGETED && !t)) continue;
    bool in_block;
    const char *reason;
    if (what == TARGETED && !rfi_adapter_can(c, i, &in_block, &reason)) continue; /* a bias of the module */
    if (value_of(t, what) != value) return false;
  }
  return true;
}

/* The last component of the module's name if it identifies modules that are all alike, otherwise the full name. */
static const char *shortest(const rfr_model_config *c, const char *module, property what, double value) {
  return is_common(c, module, what, value) ? last_of(module) : module;
}

/* Writes a number as an integer if it is one. */
static json_t *number(double x) { return x == floor(x) && x < 1e15 ? json_integer((json_int_t)x) : json_real(x); }

/* The value that most targets have. */
static double usual(const rfr_adapter *a, property what) {
  double best = value_of(&a->targets[0], what);
  int most = 0;
  for (int i = 0; i < a->n; i++) {
    const double value = value_of(&a->targets[i], what);
    int n = 0;
    for (int k = 0; k < a->n; k++) n += value_of(&a->targets[k], what) == value;
    if (n > most) most = n, best = value;
  }
  return best;
}

static json_t *pattern(const rfr_model_config *c, property what, double otherwise) {
  json_t *o = json_object();
  int wrong = o == NULL;
  for (int i = 0; i < c->adapter->n && !wrong; i++) {
    const rfi_adapter_target *t = &c->adapter->targets[i];
    const double value = value_of(t, what);
    char module[96];
    if (value == otherwise) continue;
    module_of(c, t->parameter, module);
    wrong = json_object_set_new(o, shortest(c, module, what, value), number(value));
  }
  if (!wrong) return o;
  json_decref(o);
  return NULL;
}

static bool is_packed(const rfr_model_config *c, int parameter) {
  const rfi_param_kind kind = rfi_parameter_kind(c, parameter);
  return kind == RFI_PARAM_EXPERT_UP || kind == RFI_PARAM_EXPERT_DOWN;
}

/* The targets that are modules, or those that are packed parameters of experts; null for none. */
static json_t *list_targets(const rfr_model_config *c, bool packed) {
  json_t *list = json_array();
  int wrong = list == NULL;
  for (int i = 0; i < c->adapter->n && !wrong; i++) {
    char module[96];
    module_of(c, c->adapter->targets[i].parameter, module);
    const char *name = shortest(c, module, TARGETED, 1.0);
    if (is_packed(c, c->adapter->targets[i].parameter) != packed) continue;
    if (packed) name = module;
    bool there = false;
    for (size_t k = 0; k < json_array_size(list); k++)
      there = there || strcmp(json_string_value(json_array_get(list, k)), name) == 0;
    if (!there) wrong = json_array_append_new(list, json_string(name));
  }
  if (!wrong && json_array_size(list) > 0) return list;
  json_decref(list);
  return wrong ? NULL : json_null();
}

json_t *rfi_peft_config(const rfr_model_config *c, const char *base) {
  const rfr_adapter *a = c->adapter;
  const double rank = usual(a, RANK), alpha = usual(a, ALPHA);
  return json_pack("{s:s, s:s, s:o, s:o, s:o, s:f, s:b, s:b, s:b, s:s, s:o, s:o, s:o, s:o, s:b, s:b, s:n}", "peft_type",
                   "LORA", "task_type", "CAUSAL_LM", "base_model_name_or_path", *base ? json_string(base) : json_null(),
                   "r", number(rank), "lora_alpha", number(alpha), "lora_dropout", a->dropout, "use_rslora", a->rslora,
                   "use_dora", a->dora, "fan_in_fan_out", c->type == RFR_MODEL_GPT2, "bias", "none", "target_modules",
                   list_targets(c, false), "target_parameters", list_targets(c, true), "rank_pattern",
                   pattern(c, RANK, rank), "alpha_pattern", pattern(c, ALPHA, alpha), "init_lora_weights", 1,
                   "inference_mode", 1, "modules_to_save");
}

/* ---- reading ---- */

struct rfi_peft {
  rfr_ctx *ctx;
  char *config_path, *weights_path;
  json_t *config;
  rfi_safetensors *st;
};

#define BAD(p, ...) rfi_fail_at(RFI_E_ADAPTER, (p)->config_path, 0, __VA_ARGS__)

rfr_status rfi_peft_open(rfr_ctx *ctx, const char *folder, rfi_peft **out) {
  rfr_status s;
  rfi_peft *p;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *p, &p));
  p->ctx = ctx;
  RFI_GOTO(rfi_path_join(ctx, folder, RFI_PEFT_CONFIG, &p->config_path));
  RFI_GOTO(rfi_path_join(ctx, folder, RFI_PEFT_WEIGHTS, &p->weights_path));
  RFI_GOTO(rfi_json_load(ctx, p->config_path, &p->config));
  if (!json_is_object(p->config)) RFI_GOTO(BAD(p, "the file is not a JSON object"));
  RFI_GOTO(rfi_safetensors_open(ctx, p->weights_path, &p->st));
  *out = p;
  return RFR_OK;
fail:
  rfi_peft_close(p);
  return s;
}

void rfi_peft_close(rfi_peft *p) {
  if (!p) return;
  json_decref(p->config);
  rfi_safetensors_close(p->st);
  rfi_free(p->ctx, p->config_path);
  rfi_free(p->ctx, p->weights_path);
  rfi_free(p->ctx, p);
}

/* Fields that are read below, or that do not change the result of a trained adapter. */
static const char known[] =
    "peft_type task_type base_model_name_or_path r lora_alpha lora_dropout use_rslora use_dora fan_in_fan_out "
    "target_modules target_parameters exclude_modules rank_pattern alpha_pattern init_lora_weights inference_mode "
    "revision auto_mapping "
    "peft_version layers_to_transform layers_pattern megatron_core runtime_config loftq_config eva_config "
    "qalora_group_size "
    "lora_ga_config ensure_weight_tying";

/* Null, false, zero, empty and "none" switch a field off. */
static bool is_off(const json_t *x) {
  if (json_is_null(x) || json_is_false(x)) return true;
  if (json_is_number(x)) return json_number_value(x) == 0.0;
  if (json_is_string(x)) return strcmp(json_string_value(x), "") == 0 || strcmp(json_string_value(x), "none") == 0;
  return json_object_size(x) + json_array_size(x) == 0 && !json_is_true(x);
}

/* Initializations that change the base model's weights, which the folder does not have. */
static bool changes_base(const json_t *init) {
  const char *text = json_string_value(init);
  return text && !rfi_has_word("gaussian eva orthogonal mica", text);
}

static rfr_status check_fields(const rfi_peft *p) {
  const char *key, *type = "";
  json_t *value;
  char text[80];
  RFI_TRY(rfi_json_get_string(p->config, p->config_path, "peft_type", true, &type));
  if (strcmp(type, "LORA") != 0) return BAD(p, "peft_type is %.60s; only LORA is supported", type);
  const json_t *init = json_object_get(p->config, "init_lora_weights");
  if (changes_base(init))
    return BAD(p,
               "init_lora_weights is %s, which changes the base model's weights; only adapters of the unchanged "
               "model are supported",
               rfi_json_brief(init, text, sizeof text));
  json_object_foreach(p->config, key, value) {
    if (rfi_has_word(known, key) || is_off(value)) continue;
    return BAD(p, "%.80s is %s, which is not supported", key, rfi_json_brief(value, text, sizeof text));
  }
  return RFR_OK;
}

/* PEFT's patterns are regular expressions that match the end of a module's name, after a dot. Supported are names of
 * modules, with ^ for the full name; a dot matches any character, as in PEFT. */
static bool pattern_matches(const char *key, const char *module) {
  const bool full = *key == '^';
  key += full;
  const size_t n = strlen(key), m = strlen(module);
  if (n > m || (n < m && (full || module[m - n - 1] != '.'))) return false;
  for (size_t i = 0; i < n; i++)
    if (key[i] != '.' && key[i] != module[m - n + i]) return false;
  return true;
}

static rfr_status find_number(const rfi_peft *p, const char *patterns, const char *usual_key, const char *module,
                              double otherwise, double *out) {
  json_t *o = json_object_get(p->config, patterns), *value;
  const char *key;
  *out = otherwise;
  if (o && !json_is_object(o) && !is_off(o)) return BAD(p, "%s is not an object", patterns);
  RFI_TRY(rfi_json_get_real(p->config, p->config_path, usual_key, false, out));
  json_object_foreach(o, key, value) {
    if (strpbrk(key + (*key == '^'), "^$*+?()[]{}|\\"))
      return BAD(p, "%s: \"%.80s\" is a regular expression; only names of modules are supported", patterns, key);
    if (!pattern_matches(key, module)) continue;
    if (!json_is_number(value)) return BAD(p, "%s: \"%.80s\" is not a number", patterns, key);
    *out = json_number_value(value);
    return RFR_OK;
  }
  return RFR_OK;
}

/* The tensor of a name; older versions of PEFT have ".weight" after the magnitudes' name. */
static const rfi_stored *find_named(const rfi_peft *p, const char *tensor) {
  char name[RFI_PEFT_NAME + 8];
  snprintf(name, sizeof name, "%s", tensor);
  const rfi_stored *found = rfi_safetensors_find(p->st, name);
  if (found) return found;
  strcat(name, ".weight");
  return rfi_safetensors_find(p->st, name);
}

static const rfi_stored *find_part(const rfi_peft *p, const rfr_model_config *c, int i, rfr_type *type) {
  char name[RFI_PEFT_NAME];
  rfi_peft_tensor(c, i, name, type);
  return find_named(p, name);
}

/* Finds A of a parameter of the model, before the targets are known; NULL: none. A single A of a module of experts
 * belongs to the weight with as many inputs. */
static const rfi_stored *find_a(const rfi_peft *p, const rfr_model_config *c, int i, const char *module) {
  static const char *const suffixes[] = {"lora_A.weight", "lora_embedding_A"};
  const rfi_stored *found[2] = {NULL};
  rfr_parameter q;
  for (int k = 0; k < 2; k++) {
    char name[128], tensor[RFI_PEFT_NAME];
    snprintf(name, sizeof name, "%s.%s", module, suffixes[is_packed(c, i) ? 0 : k]);
    rfi_peft_name(name, k > 0, tensor);
    found[k] = find_named(p, tensor);
  }
  if (!is_packed(c, i)) return found[0] ? found[0] : found[1];
  if (found[1]) return found[rfi_parameter_kind(c, i) == RFI_PARAM_EXPERT_UP];
  const bool fits =
      found[0] && rfr_model_parameter(c, i, &q) == RFR_OK && found[0]->rank == 2 && found[0]->shape[1] == q.shape[2];
  return fits ? found[0] : NULL;
}

/* The target of one parameter of the model; *found false: the folder has none. */
static rfr_status find_target(const rfi_peft *p, const rfr_model_config *c, int i, rfi_adapter_target *target,
                              bool *found) {
  char module[96];
  double rank, alpha;
  rfr_parameter q;
  bool in_block;
  const char *reason;
  *found = false;
  if (!rfi_adapter_can(c, i, &in_block, &reason)) return RFR_OK;
  module_of(c, i, module);
  const rfi_stored *a = find_a(p, c, i, module);
  RFI_TRY(rfi_peft_check_target(p->ctx, p->config, p->config_path, module, is_packed(c, i), in_block, a != NULL));
  if (!a) return RFR_OK;
  RFI_TRY(rfr_model_parameter(c, i, &q));
  const double experts = q.rank == 3 ? (double)q.shape[0] : 1.0;
  RFI_TRY(find_number(p, "rank_pattern", "r", module, 8.0, &rank));
  RFI_TRY(find_number(p, "alpha_pattern", "lora_alpha", module, 8.0, &alpha));
  if (a->rank != 2 || (double)a->shape[0] != rank * experts)
    return rfi_fail_at(RFI_E_ADAPTER, p->weights_path, 0, "%s has %lld rows; r or rank_pattern is %g", a->name,
                       a->rank == 2 ? (long long)a->shape[0] : 0LL, rank);
  *target = (rfi_adapter_target){.parameter = i, .rank = (int64_t)rank, .alpha = alpha};
  *found = true;
  return RFR_OK;
}

/* Checks that every tensor belongs to the adapter. */
static rfr_status check_tensors(const rfi_peft *p, rfr_model_config c, const rfr_adapter *a) {
  int expected = 0;
  char name[RFI_PEFT_NAME];
  rfr_type type;
  c.adapter = a;
  for (int i = a->base_count; i < a->base_count + a->count; i++) {
    rfi_peft_tensor(&c, i, name, &type);
    if (!find_named(p, name)) return rfi_fail_at(RFI_E_ADAPTER, p->weights_path, 0, "there is no tensor %s", name);
    expected++;
  }
  if (rfi_safetensors_count(p->st) == expected) return RFR_OK;
  for (int k = 0; k < rfi_safetensors_count(p->st); k++) {
    const rfi_stored *stored = rfi_safetensors_at(p->st, k);
    bool used = false;
    for (int i = a->base_count; i < a->base_count + a->count && !used; i++) used = find_part(p, &c, i, &type) == stored;
    if (!used)
      return rfi_fail_at(RFI_E_ADAPTER, p->weights_path, 0,
                         "tensor %.200s belongs to no module of the model that can have an adapter", stored->name);
  }
  return RFR_OK;
}

rfr_status rfi_peft_adapter(const rfi_peft *p, const rfr_model_config *c, double dropout, rfr_adapter **out) {
  rfr_status s;
  rfi_adapter_target *targets = NULL;
  rfr_adapter *a = NULL;
  bool rslora = false, dora = false;
  const int n = rfr_model_parameter_count(c);
  int found = 0;
  *out = NULL;
  RFI_TRY(check_fields(p));
  RFI_TRY(rfi_json_get_bool(p->config, p->config_path, "use_rslora", false, &rslora));
  RFI_TRY(rfi_json_get_bool(p->config, p->config_path, "use_dora", false, &dora));
  RFI_TRY(RFI_ALLOC(p->ctx, ((size_t)n + 1) * sizeof *targets, &targets));
  for (int i = 0; i < n; i++) {
    bool there;
    RFI_GOTO(find_target(p, c, i, &targets[found], &there));
    found += there;
  }
  if (found == 0)
    RFI_GOTO(rfi_fail_at(RFI_E_ADAPTER, p->weights_path, 0, "no tensor belongs to a module of the model"));
  RFI_GOTO(rfi_adapter_create(p->ctx, c, targets, found, rslora, dora, dropout, &a));
  RFI_GOTO(check_tensors(p, *c, a));
  *out = a;
  a = NULL;
fail:
  rfr_adapter_destroy(a);
  rfi_free(p->ctx, targets);
  return s;
}

rfr_status rfi_peft_check_f32(const rfi_peft *p, const rfr_model_config *c, int i) {
  rfr_type type;
  const rfi_stored *stored = find_part(p, c, i, &type);
  if (!stored || stored->dtype == RFR_F32) return RFR_OK; /* reading reports that it is missing */
  return rfi_fail_at(RFI_E_RESUME_MISMATCH, p->weights_path, 0,
                     "%s is %s, but a resume with master weights needs them in f32", stored->name, stored->dtype_name);
}

rfr_status rfi_peft_read(rfi_peft *p, const rfr_model_config *c, int i, float *data) {
  rfr_parameter q;
  rfr_type type, here = {.dtype = RFR_F32};
  char name[RFI_PEFT_NAME];
  rfi_adapter_part part = RFI_ADAPTER_A;
  float *there = NULL;
  RFI_TRY(rfr_model_parameter(c, i, &q));
  rfi_peft_tensor(c, i, name, &type);
  (void)rfi_adapter_owner(c, i, &part);
  const rfi_stored *stored = find_named(p, name);
  if (!stored) return rfi_fail_at(RFI_E_ADAPTER, p->weights_path, 0, "there is no tensor %s", name);
  bool same = stored->rank == type.rank;
  for (int d = 0; same && d < type.rank; d++) same = stored->shape[d] == type.shape[d];
  if (!same)
    return rfi_fail_at(RFI_E_ADAPTER, p->weights_path, 0, "%s has another shape than the model needs", stored->name);
  here.rank = q.rank;
  memcpy(here.shape, q.shape, sizeof q.shape);
  if (q.rank == 3) RFI_TRY(RFI_ALLOC(p->ctx, (size_t)stored->elements * sizeof *there, &there));
  rfr_status s = rfi_safetensors_read_as(p->st, stored, RFR_F32, there ? there : data, stored->elements);
  if (s == RFR_OK && there) rfi_peft_order(&here, part == RFI_ADAPTER_B, false, sizeof *data, there, data);
  rfi_free(p->ctx, there);
  for (int64_t k = 0; s == RFR_OK && k < stored->elements; k++)
    if (!isfinite(data[k]))
      s = rfi_fail_at(RFI_E_MODEL_NONFINITE, p->weights_path, 0, "%s has elements that are NaN or infinite",
                      stored->name);
  return s;
}
