/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads and prints state.json; state_json.h has its form. Unknown fields are ignored: a later library of the same
 * format may write more of them.
 */
#include "train/state_json.h"

#include "base/json.h"

enum { FORMAT = 1 };
/* The limit of run.steps: numbers derived from it must not overflow. */
#define MOST INT64_C(1000000000000)

#define BAD(...) rfi_fail_at(RFI_E_CHECKPOINT, file, 0, __VA_ARGS__)

static rfr_status read_block(const char *file, const json_t *array, int64_t *block) {
  if (json_array_size(array) != RFI_STEP_N) return BAD("\"step_block\" is not an array of %d integers", RFI_STEP_N);
  for (size_t i = 0; i < RFI_STEP_N; i++) {
    const json_t *x = json_array_get(array, i);
    if (!json_is_integer(x)) return BAD("\"step_block\" is not an array of %d integers", RFI_STEP_N);
    block[i] = json_integer_value(x);
  }
  const int64_t attempted = block[RFI_STEP_ATTEMPTED], applied = block[RFI_STEP_APPLIED];
  if (applied < 0 || applied > attempted || attempted > MOST || block[RFI_STEP_SKIPPED] != attempted - applied)
    return BAD("\"step_block\": %lld steps cannot be %lld applied and %lld skipped ones", (long long)attempted,
               (long long)applied, (long long)block[RFI_STEP_SKIPPED]);
  return RFR_OK;
}

static rfr_status read_names(const char *file, const json_t *root, const char *key, json_t **out) {
  const char *name;
  json_t *object = json_object_get(root, key), *value;
  if (!json_is_object(object)) return BAD("\"%s\" is not an object", key);
  json_object_foreach(object, name, value) if (!json_is_string(value) && !json_is_integer(value)) return BAD(
      "\"%.80s\" in \"%s\" is neither text nor an integer", name, key);
  *out = json_incref(object);
  return RFR_OK;
}

static rfr_status read_root(const char *file, const json_t *root, rfi_state_json *out) {
  int64_t format;
  RFI_TRY(rfi_json_get_int(root, file, "format", true, 1, INT64_MAX, &format));
  if (format != FORMAT) return BAD("format %lld, this library reads %d", (long long)format, FORMAT);
  RFI_TRY(read_block(file, json_object_get(root, "step_block"), out->block));
  RFI_TRY(rfi_json_get_real(root, file, "seconds", false, &out->seconds));
  if (!(out->seconds >= 0.0)) return BAD("\"seconds\" is %g", out->seconds);
  RFI_TRY(rfi_json_get_int(root, file, "position", false, INT64_MIN, INT64_MAX, &out->position));
  RFI_TRY(rfi_json_get_int(root, file, "skipped_in_row", false, 0, out->block[RFI_STEP_SKIPPED], &out->skipped_in_row));
  RFI_TRY(rfi_json_get_int(root, file, "skipped_for_routing", false, 0, 1, &out->skipped_for_routing));
  RFI_TRY(read_names(file, root, "configuration", &out->configuration));
  RFI_TRY(read_names(file, root, "environment", &out->environment));
  if (json_object_get(root, "base")) RFI_TRY(read_names(file, root, "base", &out->base));
  return json_object_get(root, "tuned") ? read_names(file, root, "tuned", &out->tuned) : RFR_OK;
}

rfr_status rfi_state_json_parse(const char *file, const char *text, size_t n, rfi_state_json *out) {
  json_t *root;
  *out = (rfi_state_json){0};
  RFI_TRY(rfi_json_parse(file, text, n, &root));
  rfr_status s = read_root(file, root, out);
  json_decref(root);
  if (s != RFR_OK) rfi_state_json_deinit(out);
  return s;
}

static json_t *unless_zero(int64_t x) { return x != 0 ? json_integer(x) : NULL; }

rfr_status rfi_state_json_print(const rfi_state_json *state, rfi_string *out) {
  const int64_t *block = state->block;
  json_t *seconds = state->seconds > 0.0 ? json_real(state->seconds) : NULL;
  json_t *root = json_pack("{s:i, s:[I,I,I,I], s:O, s:O, s:o*, s:o*, s:o*, s:o*, s:O*, s:O*}", "format", FORMAT,
                           "step_block", (json_int_t)block[0], (json_int_t)block[1], (json_int_t)block[2],
                           (json_int_t)block[3], "configuration", state->configuration, "environment",
                           state->environment, "seconds", seconds, "position", unless_zero(state->position),
                           "skipped_in_row", unless_zero(state->skipped_in_row), "skipped_for_routing",
                           unless_zero(state->skipped_for_routing), "tuned", state->tuned, "base", state->base);
  if (!root) return rfi_fail(RFI_E_NO_MEMORY, "building state.json");
  rfr_status s = rfi_json_print(root, out);
  json_decref(root);
  return s;
}

void rfi_state_json_deinit(rfi_state_json *state) {
  json_decref(state->configuration);
  json_decref(state->environment);
  json_decref(state->tuned);
  json_decref(state->base);
  *state = (rfi_state_json){0};
}
