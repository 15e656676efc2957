/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON: jansson's errors turned into ours, and typed getters. jansson's allocator is a
 * global of the process and so not ours to set, nor to guess: texts are printed into memory
 * of the context, so that nothing of jansson's is freed here but by json_decref.
 */
#include "data/json.h"

#include <string.h>

#include "data/file.h"

rfr_status rfi_json_parse(const char *file, const char *text, size_t n, json_t **out) {
  json_error_t error;
  *out = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
  if (*out) return RFR_OK;
  /* Some failures to allocate leave no text. */
  if (json_error_code(&error) == json_error_out_of_memory || error.text[0] == 0)
    return rfi_fail_at(RFI_E_NO_MEMORY, file, 0, "reading JSON");
  return rfi_fail_at(RFI_E_JSON, file, error.line > 0 ? error.line : 0, "column %d: %s", error.column, error.text);
}

rfr_status rfi_json_load(rfr_ctx *ctx, const char *path, json_t **out) {
  char *text;
  size_t n;
  *out = NULL;
  RFI_TRY(rfi_file_read_limited(ctx, path, RFI_JSON_LIMIT, &text, &n));
  rfr_status s = rfi_json_parse(path, text, n, out);
  rfi_free(ctx, text);
  return s;
}

typedef struct printing {
  rfi_string *out;
  rfr_status status;
} printing;

static int print_piece(const char *text, size_t n, void *user) {
  printing *p = user;
  if (p->status == RFR_OK) p->status = rfi_string_append(p->out, text, n);
  return p->status == RFR_OK ? 0 : -1;
}

static rfr_status print(const json_t *value, size_t form, rfi_string *out) {
  printing p = {.out = out, .status = RFR_OK};
  const int failed = json_dump_callback(value, print_piece, &p, form | JSON_ENCODE_ANY);
  RFI_TRY(p.status); /* jansson goes on after some pieces that failed, and succeeds: ours counts */
  return failed ? rfi_fail(RFI_E_NO_MEMORY, "printing JSON") : RFR_OK;
}

rfr_status rfi_json_print(const json_t *value, rfi_string *out) {
  RFI_TRY(print(value, JSON_INDENT(2), out));
  return rfi_string_append(out, "\n", 1);
}

rfr_status rfi_json_print_compact(const json_t *value, rfi_string *out) { return print(value, JSON_COMPACT, out); }

const char *rfi_json_brief(const json_t *value, char *buffer, size_t size) {
  const size_t n = json_dumpb(value, buffer, size - 1, JSON_COMPACT | JSON_ENCODE_ANY);
  if (n == 0 || n > size - 1) return "...";
  buffer[n] = 0;
  return buffer;
}

rfr_status rfi_json_save(rfr_ctx *ctx, const char *path, const json_t *value) {
  rfi_string text = {.ctx = ctx};
  rfr_status s = rfi_json_print(value, &text);
  if (s == RFR_OK) s = rfi_file_write(ctx, path, text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

rfr_status rfi_json_set(json_t *object, const char *key, json_t *value) {
  if (!value || json_object_set_new(object, key, value) != 0)
    return rfi_fail(RFI_E_JSON,
                    "\"%s\" cannot be stored: out of memory, text that is not UTF-8, or a number that is not finite",
                    key);
  return RFR_OK;
}

/* The member, or NULL when it is absent and that is fine. */
static rfr_status member(const json_t *object, const char *file, const char *key, bool required, const json_t **out) {
  *out = NULL;
  if (!json_is_object(object))
    return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is looked for in something that is no object", key);
  const json_t *value = json_object_get(object, key);
  if (value && !json_is_null(value)) *out = value;
  else if (required) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is missing", key);
  return RFR_OK;
}

rfr_status rfi_json_get_int(const json_t *object, const char *file, const char *key, bool required, int64_t min,
                            int64_t max, int64_t *out) {
  const json_t *value;
  RFI_TRY(member(object, file, key, required, &value));
  if (!value) return RFR_OK;
  if (!json_is_integer(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is no integer", key);
  json_int_t x = json_integer_value(value);
  if (x < min || x > max)
    return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is %lld, it must lie in %lld .. %lld", key, (long long)x,
                       (long long)min, (long long)max);
  *out = x;
  return RFR_OK;
}

rfr_status rfi_json_get_real(const json_t *object, const char *file, const char *key, bool required, double *out) {
  const json_t *value;
  RFI_TRY(member(object, file, key, required, &value));
  if (!value) return RFR_OK;
  if (!json_is_number(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is no number", key);
  *out = json_number_value(value);
  return RFR_OK;
}

rfr_status rfi_json_get_bool(const json_t *object, const char *file, const char *key, bool required, bool *out) {
  const json_t *value;
  RFI_TRY(member(object, file, key, required, &value));
  if (!value) return RFR_OK;
  if (!json_is_boolean(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is neither true nor false", key);
  *out = json_is_true(value);
  return RFR_OK;
}

rfr_status rfi_json_get_string(const json_t *object, const char *file, const char *key, bool required,
                               const char **out) {
  const json_t *value;
  RFI_TRY(member(object, file, key, required, &value));
  if (!value) return RFR_OK;
  if (!json_is_string(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is no string", key);
  *out = json_string_value(value);
  return RFR_OK;
}
