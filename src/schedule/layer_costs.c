/* SPDX-License-Identifier: Apache-2.0
 *
 * Measured costs of a model of equal layers, and the stages that its layers are split into. A profile measures a model
 * of a few layers; a plan needs the costs of one with more.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "schedule/layer_costs.h"

enum { MOST_LAYERS = 1 << 20 };

int64_t rfr_stage_layers(int64_t layers, int stages, int stage, int64_t *first) {
  const int64_t begin = layers / stages * stage + layers % stages * stage / stages,
                end = layers / stages * (stage + 1) + layers % stages * (stage + 1) / stages;
  if (first) *first = begin;
  return end - begin;
}

rfr_status rfr_layer_costs_stages(const rfr_layer_costs *costs, int64_t layers, int stages, rfr_stage_costs *out) {
  static const int ops[3] = {RFR_ACTION_F, RFR_ACTION_I, RFR_ACTION_W};
  RFI_TRY(rfi_check_handle(costs, "costs"));
  RFI_TRY(rfi_check_handle(out, "out"));
  if (stages < 1 || layers < stages)
    return rfi_fail(RFI_E_ARGUMENT, "%lld layers cannot be split into %d stages; each stage needs at least one",
                    (long long)layers, stages);
  for (int i = 0; i < stages; i++) {
    out[i] = (rfr_stage_costs){0};
    for (int op = 0; op < RFR_ACTION_COUNT; op++) out[i].seconds[op] = -1;
    for (int k = 0; k < 3; k++)
      out[i].seconds[ops[k]] = costs->layer[k] * (double)rfr_stage_layers(layers, stages, i, NULL) +
                               (i == 0 ? costs->first[k] : 0) + (i == stages - 1 ? costs->last[k] : 0);
  }
  return RFR_OK;
}

/* ---- JSON ---- */

static rfr_status read_seconds(const char *file, const json_t *object, const char *key, double *out) {
  const json_t *x = json_object_get(object, key);
  const double seconds = json_is_number(x) ? json_number_value(x) : -1;
  if (!(seconds >= 0 && seconds <= 1e30))
    return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "%s is missing, or is not a number of seconds", key);
  *out = seconds;
  return RFR_OK;
}

static rfr_status read_part(const char *file, const json_t *root, const char *key, double out[3]) {
  static const char *const ops[3] = {"F", "I", "W"};
  const json_t *part = json_object_get(root, key);
  if (!json_is_object(part) || json_object_size(part) != 3)
    return rfi_fail_at(RFI_E_SCHEDULE_PARSE, file, 0, "%s is missing, or is not an object of F, I and W", key);
  for (int k = 0; k < 3; k++) RFI_TRY(read_seconds(file, part, ops[k], &out[k]));
  return RFR_OK;
}

bool rfi_layer_costs_has_key(const char *key) {
  static const char *const keys[] = {"layer", "first", "last", "update", "layers", "tokens"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (strcmp(keys[i], key) == 0) return true;
  return false;
}

rfr_status rfi_layer_costs_read(const char *file, const json_t *root, rfr_layer_costs *out) {
  rfr_layer_costs c;
  RFI_TRY(read_part(file, root, "layer", c.layer));
  RFI_TRY(read_part(file, root, "first", c.first));
  RFI_TRY(read_part(file, root, "last", c.last));
  RFI_TRY(read_seconds(file, root, "update", &c.update));
  RFI_TRY(rfi_json_get_int(root, file, "layers", true, 1, MOST_LAYERS, &c.layers));
  RFI_TRY(rfi_json_get_int(root, file, "tokens", true, 1, INT64_MAX, &c.tokens));
  *out = c;
  return RFR_OK;
}

rfr_status rfr_layer_costs_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_layer_costs *out) {
  json_t *root;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(text, "text"));
  RFI_TRY(RFI_CHECK_OUT(out, "out"));
  RFI_TRY(rfi_json_parse(name ? name : "", text, n, &root));
  const rfr_status s = rfi_layer_costs_read(name ? name : "", root, out);
  json_decref(root);
  return s;
}
