/* SPDX-License-Identifier: Apache-2.0
 *
 * Settings of rotary embeddings in config.json. Version 5 of the library writes theta and scaling into rope_parameters.
 * Version 4 wrote rope_theta and rope_scaling, at first with "type" for "rope_type".
 */
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "model/hf_families.h"

const char rfi_hf_rope_fields[] =
    "type rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
    "full_attention sliding_attention";

typedef struct settings {
  const json_t *o;         /* the object with the scaling; NULL: none */
  const char *file, *name; /* of the object */
} settings;

static rfr_status read_scaling(const settings *s, rfr_model_config *c) {
  rfr_rope_scaling r = {.factor = 1.0, .low = 1.0, .high = 4.0};
  const char *type = "default";
  RFI_TRY(rfi_json_get_string(s->o, s->file, "type", false, &type));
  RFI_TRY(rfi_json_get_string(s->o, s->file, "rope_type", false, &type));
  RFI_TRY(rfi_json_get_real(s->o, s->file, "rope_theta", false, &c->rope_theta));
  RFI_TRY(rfi_hf_refuse(s->o, s->file, ""));
  if (strcmp(type, "default") == 0) return RFR_OK;
  const bool llama3 = strcmp(type, "llama3") == 0;
  if (!llama3 && strcmp(type, "linear") != 0)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0,
                       "%s.rope_type is %.100s; default, linear and llama3 are supported", s->name, type);
  RFI_TRY(rfi_json_get_real(s->o, s->file, "factor", true, &r.factor));
  if (llama3) {
    RFI_TRY(rfi_json_get_real(s->o, s->file, "low_freq_factor", true, &r.low));
    RFI_TRY(rfi_json_get_real(s->o, s->file, "high_freq_factor", true, &r.high));
    r.original = c->max_positions;
    RFI_TRY(rfi_json_get_int(s->o, s->file, "original_max_position_embeddings", false, 1, INT32_MAX, &r.original));
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
      return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.%.100s is not settings of a kind of layer", s->name, key);
  }
  settings full = *s, local = *s;
  full.o = json_object_get(s->o, kinds[0]), local.o = json_object_get(s->o, kinds[1]);
  if (full.o) RFI_TRY(read_scaling(&full, c));
  if (!local.o) return RFR_OK;
  rfr_model_config other = *c;
  other.rope_theta = c->local_theta;
  other.rope_scaling = (rfr_rope_scaling){.factor = 1.0};
  RFI_TRY(read_scaling(&local, &other));
  if (other.rope_scaling.factor != 1.0)
    return rfi_fail_at(RFI_E_MODEL_CONFIG, s->file, 0, "%s.%s has a scaling, which is not supported", s->name,
                       kinds[1]);
  c->local_theta = other.rope_theta;
  return RFR_OK;
}

rfr_status rfi_hf_read_rope(const json_t *o, const char *file, rfr_model_config *c) {
  settings s = {json_object_get(o, "rope_parameters"), file, "rope_parameters"};
  const bool local = c->local_theta > 0.0;
  RFI_TRY(rfi_json_get_real(o, file, "rope_theta", false, &c->rope_theta));
  if (local) RFI_TRY(rfi_json_get_real(o, file, "rope_local_base_freq", false, &c->local_theta));
  if (!json_is_object(s.o)) s = (settings){json_object_get(o, "rope_scaling"), file, "rope_scaling"};
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

int rfi_hf_write_rope(json_t *o, const rfr_model_config *c) {
  if (c->rope_scaling.factor == 1.0) return 0;
  return json_object_set_new(o, "rope_scaling", scaling(&c->rope_scaling));
}
