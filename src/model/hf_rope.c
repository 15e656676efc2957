/* SPDX-License-Identifier: Apache-2.0
 *
 * Settings of rotary embeddings in config.json. Version 5 of the library writes theta and scaling into rope_parameters.
 * Version 4 wrote rope_theta and rope_scaling, at first with "type" for "rope_type".
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "model/hf_families.h"

const char rfi_hf_rope_fields[] =
    "type rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor "
    "partial_rotary_factor full_attention sliding_attention";

typedef struct settings {
  const json_t *o;         /* the object with the scaling; NULL: none */
  const char *file, *name; /* keys of the object */
  const json_t *top;       /* config.json */
} settings;

/* A field of config.json itself has priority. */
static rfr_status read_original(const settings *s, const rfr_model_config *c, int64_t *original) {
  static const char key[] = "original_max_position_embeddings";
  *original = c->max_positions;
  RFI_TRY(rfi_json_get_int(s->o, s->file, key, false, 1, INT32_MAX, original));
  return rfi_json_get_int(s->top, s->file, key, false, 1, INT32_MAX, original);
}

/* The library uses 0 for a missing value. */
static rfr_status read_or(const settings *s, const char *key, double missing, double *to) {
  *to = 0.0;
  RFI_TRY(rfi_json_get_real(s->o, s->file, key, false, to));
  if (*to == 0.0) *to = missing;
  return RFR_OK;
}

static double mscale(double factor, double by) { return factor <= 1.0 ? 1.0 : 0.1 * by * log(factor) + 1.0; }

static rfr_status read_yarn(const settings *s, rfr_model_config *c) {
  rfr_rope_extension *e = &c->rope_extension;
  double numerator, denominator;
  bool truncate = true;
  RFI_TRY(read_original(s, c, &e->original));
  if (!json_object_get(s->o, "factor"))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.factor is missing", s->name);
  e->factor = (double)c->max_positions / (double)e->original;
  RFI_TRY(rfi_json_get_real(s->o, s->file, "factor", false, &e->factor));
  RFI_TRY(read_or(s, "beta_fast", 32.0, &e->beta_fast));
  RFI_TRY(read_or(s, "beta_slow", 1.0, &e->beta_slow));
  RFI_TRY(rfi_json_get_bool(s->o, s->file, "truncate", false, &truncate));
  e->truncate = truncate;
  RFI_TRY(read_or(s, "mscale", 0.0, &numerator));
  RFI_TRY(read_or(s, "mscale_all_dim", 0.0, &denominator));
  const bool both = numerator != 0.0 && denominator != 0.0;
  e->attention_factor = both ? mscale(e->factor, numerator) / mscale(e->factor, denominator) : mscale(e->factor, 1.0);
  RFI_TRY(rfi_json_get_real(s->o, s->file, "attention_factor", false, &e->attention_factor));
  e->type = RFR_ROPE_YARN;
  return RFR_OK;
}

static int64_t pairs_of(const rfr_model_config *c) { return (c->rotary_dim > 0 ? c->rotary_dim : c->head_dim) / 2; }

static rfr_status read_factors(const settings *s, const char *key, int64_t n, double *to) {
  const json_t *list = json_object_get(s->o, key);
  if (!json_is_array(list) || n > RFR_MAX_FACTORS || (int64_t)json_array_size(list) != n)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0,
                       "%s.%s is not a list of %lld numbers, one for each pair of rotated columns; at most %d are "
                       "supported",
                       s->name, key, (long long)n, RFR_MAX_FACTORS);
  for (int64_t i = 0; i < n; i++) {
    const json_t *x = json_array_get(list, (size_t)i);
    if (!json_is_number(x))
      return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.%s[%lld] is not a number", s->name, key, (long long)i);
    to[i] = json_number_value(x);
  }
  return RFR_OK;
}

static double longrope_attention(const rfr_model_config *c, double factor) {
  return factor <= 1.0 ? 1.0 : sqrt(1.0 + log(factor) / log((double)c->rope_extension.original));
}

static double length_ratio(const rfr_model_config *c) {
  return (double)c->max_positions / (double)c->rope_extension.original;
}

static rfr_status read_longrope(const settings *s, rfr_model_config *c) {
  rfr_rope_extension *e = &c->rope_extension;
  RFI_TRY(read_original(s, c, &e->original));
  double factor = length_ratio(c);
  RFI_TRY(read_factors(s, "short_factor", pairs_of(c), e->short_factor));
  RFI_TRY(read_factors(s, "long_factor", pairs_of(c), e->long_factor));
  RFI_TRY(rfi_json_get_real(s->o, s->file, "factor", false, &factor));
  e->attention_factor = longrope_attention(c, factor);
  RFI_TRY(rfi_json_get_real(s->o, s->file, "attention_factor", false, &e->attention_factor));
  e->type = RFR_ROPE_LONGROPE;
  return RFR_OK;
}

static rfr_status read_partial(const json_t *o, const char *file, rfr_model_config *c) {
  double part = 0.0;
  RFI_TRY(rfi_json_get_real(o, file, "partial_rotary_factor", false, &part));
  if (part == 0.0) return RFR_OK;
  if (!(part > 0.0 && part <= 1.0))
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "partial_rotary_factor is %g; it must be above 0 and at most 1",
                       part);
  c->rotary_dim = (int64_t)((double)c->head_dim * part);
  if (c->rotary_dim < 2)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "partial_rotary_factor is %g: no pair of %lld columns is rotated",
                       part, (long long)c->head_dim);
  if (c->rotary_dim == c->head_dim) c->rotary_dim = 0;
  return RFR_OK;
}

static rfr_status read_scaling(const settings *s, rfr_model_config *c) {
  rfr_rope_scaling r = {.factor = 1.0, .low = 1.0, .high = 4.0};
  const char *type = "default";
  RFI_TRY(rfi_json_get_string(s->o, s->file, "type", false, &type));
  RFI_TRY(rfi_json_get_string(s->o, s->file, "rope_type", false, &type));
  RFI_TRY(rfi_json_get_real(s->o, s->file, "rope_theta", false, &c->rope_theta));
  const bool phi3 = c->type == RFR_MODEL_PHI3;
  RFI_TRY(rfi_hf_refuse(s->o, s->file, phi3 ? "partial_rotary_factor" : ""));
  if (phi3) RFI_TRY(read_partial(s->o, s->file, c));
  if (strcmp(type, "default") == 0) return RFR_OK;
  /* Phi-3's class accepts older names for longrope */
  if (strcmp(type, "longrope") == 0 || (phi3 && (strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0)))
    return read_longrope(s, c);
  if (strcmp(type, "yarn") == 0 && !phi3) return read_yarn(s, c);
  const bool llama3 = strcmp(type, "llama3") == 0;
  if ((!llama3 && strcmp(type, "linear") != 0) || phi3)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.rope_type is %.100s; supported are %s", s->name, type,
                       phi3 ? "default and longrope" : "default, linear, llama3, yarn and longrope");
  RFI_TRY(rfi_json_get_real(s->o, s->file, "factor", true, &r.factor));
  if (llama3) {
    RFI_TRY(rfi_json_get_real(s->o, s->file, "low_freq_factor", true, &r.low));
    RFI_TRY(rfi_json_get_real(s->o, s->file, "high_freq_factor", true, &r.high));
    RFI_TRY(read_original(s, c, &r.original));
  } else {
    r.low = r.high = 0.0;
  }
  c->rope_scaling = r;
  return RFR_OK;
}

/* Gemma 3 of version 5: settings per kind of layer. Layers with a window have no scaling. */
static rfr_status read_kinds(const settings *s, rfr_model_config *c) {
  static const char *const kinds[] = {"full_attention", "sliding_attention"};
  const char *key;
  const json_t *value;
  json_object_foreach((json_t *)s->o, key, value) {
    if (!json_is_object(value) || (strcmp(key, kinds[0]) != 0 && strcmp(key, kinds[1]) != 0))
      return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.%.100s is not an object of RoPE settings", s->name, key);
  }
  settings full = *s, local = *s;
  full.o = full.top = json_object_get(s->o, kinds[0]);
  local.o = local.top = json_object_get(s->o, kinds[1]);
  if (full.o) RFI_TRY(read_scaling(&full, c));
  if (!local.o) return RFR_OK;
  rfr_model_config other = *c;
  other.rope_theta = c->local_theta;
  other.rope_scaling = (rfr_rope_scaling){.factor = 1.0};
  other.rope_extension.type = RFR_ROPE_PLAIN;
  RFI_TRY(read_scaling(&local, &other));
  if (other.rope_scaling.factor != 1.0 || other.rope_extension.type != RFR_ROPE_PLAIN)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.%s has a scaling, which is not supported", s->name,
                       kinds[1]);
  c->local_theta = other.rope_theta;
  return RFR_OK;
}

rfr_status rfi_hf_read_rope(const json_t *o, const char *file, rfr_model_config *c) {
  settings s = {json_object_get(o, "rope_parameters"), file, "rope_parameters", o};
  const bool local = c->local_theta > 0.0;
  RFI_TRY(rfi_json_get_real(o, file, "rope_theta", false, &c->rope_theta));
  if (c->type == RFR_MODEL_PHI3) RFI_TRY(read_partial(o, file, c));
  if (local) RFI_TRY(rfi_json_get_real(o, file, "rope_local_base_freq", false, &c->local_theta));
  if (!json_is_object(s.o)) s = (settings){json_object_get(o, "rope_scaling"), file, "rope_scaling", o};
  if (!s.o || json_is_null(s.o)) return RFR_OK;
  if (!json_is_object(s.o)) return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s is not an object", s.name);
  const char *key;
  const json_t *value;
  json_object_foreach((json_t *)s.o, key, value) {
    if (!json_is_object(value)) continue;
    if (local) return read_kinds(&s, c);
    return rfi_fail_at(RFI_E_MODEL_CONFIG, file, 0, "%s.%.100s: RoPE settings per kind of layer are not supported",
                       s.name, key);
  }
  return read_scaling(&s, c);
}

static json_t *scaling(const rfr_rope_scaling *r) {
  if (r->original == 0) return json_pack("{s:s, s:f}", "rope_type", "linear", "factor", r->factor);
  return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", r->factor, "low_freq_factor", r->low,
                   "high_freq_factor", r->high, "original_max_position_embeddings", (json_int_t)r->original);
}

static json_t *list_of(const double *x, int64_t n) {
  json_t *list = json_array();
  for (int64_t i = 0; list && i < n; i++) {
    if (json_array_append_new(list, json_real(x[i])) == 0) continue;
    json_decref(list);
    list = NULL;
  }
  return list;
}

static json_t *yarn(const rfr_rope_extension *e) {
  return json_pack("{s:s, s:f, s:f, s:f, s:b, s:f, s:I}", "rope_type", "yarn", "factor", e->factor, "beta_fast",
                   e->beta_fast, "beta_slow", e->beta_slow, "truncate", e->truncate, "attention_factor",
                   e->attention_factor, "original_max_position_embeddings", (json_int_t)e->original);
}

/* Version 4 of Phi-3's class accepts exactly three fields. */
static json_t *longrope(const rfr_model_config *c) {
  const rfr_rope_extension *e = &c->rope_extension;
  const bool phi3 = c->type == RFR_MODEL_PHI3;
  json_t *o = json_pack("{s:s, s:o, s:o}", phi3 ? "type" : "rope_type", "longrope", "short_factor",
                        list_of(e->short_factor, pairs_of(c)), "long_factor", list_of(e->long_factor, pairs_of(c)));
  int wrong = o == NULL;
  if (!wrong && (!phi3 || e->attention_factor != longrope_attention(c, length_ratio(c))))
    wrong = json_object_set_new(o, "attention_factor", json_real(e->attention_factor));
  if (!wrong && !phi3) wrong = json_object_set_new(o, "original_max_position_embeddings", json_integer(e->original));
  if (!wrong) return o;
  json_decref(o);
  return NULL;
}

int rfi_hf_write_rope(json_t *o, const rfr_model_config *c) {
  const rfr_rope_extension *e = &c->rope_extension;
  if (e->type != RFR_ROPE_PLAIN)
    return json_object_set_new(o, "rope_scaling", e->type == RFR_ROPE_YARN ? yarn(e) : longrope(c));
  if (c->rope_scaling.factor == 1.0) return 0;
  return json_object_set_new(o, "rope_scaling", scaling(&c->rope_scaling));
}
