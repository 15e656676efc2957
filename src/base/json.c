/* SPDX-License-Identifier: Apache-2.0
 *
 * jansson's allocator is a global of the process, which the host may have set. So texts are printed into the context's
 * memory, and jansson's objects are freed by json_decref alone.
 */
#include "base/json.h"

#include <string.h>

static rfr_status parse(const char *file, const char *text, size_t n, size_t flags, json_t **out) {
  json_error_t error;
  *out = json_loadb(text, n, JSON_REJECT_DUPLICATES | flags, &error);
  if (*out) return RFR_OK;
  /* jansson reports some failed allocations without a text. */
  if (json_error_code(&error) == json_error_out_of_memory || error.text[0] == 0)
    return rfi_fail_at(RFI_E_NO_MEMORY, file, 0, "out of memory while reading JSON");
  return rfi_fail_at(RFI_E_JSON, file, error.line > 0 ? error.line : 0, "column %d: %s", error.column, error.text);
}

rfr_status rfi_json_parse(const char *file, const char *text, size_t n, json_t **out) {
  return parse(file, text, n, 0, out);
}

rfr_status rfi_json_parse_reals(const char *file, const char *text, size_t n, json_t **out) {
  return parse(file, text, n, JSON_DECODE_INT_AS_REAL, out);
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
  RFI_TRY(p.status); /* jansson ignores that some pieces fail */
  return failed ? rfi_fail(RFI_E_NO_MEMORY, "out of memory while printing JSON") : RFR_OK;
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

rfr_status rfi_json_set(json_t *object, const char *key, json_t *value) {
  if (!value || json_object_set_new(object, key, value) != 0)
    return rfi_fail(RFI_E_JSON,
                    "\"%s\" cannot be stored: out of memory, text that is not UTF-8, or a number that is not finite",
                    key);
  return RFR_OK;
}

/* *out is NULL if the member is absent and not required. */
static rfr_status member(const json_t *object, const char *file, const char *key, bool required, const json_t **out) {
  *out = NULL;
  if (!json_is_object(object))
    return rfi_fail_at(RFI_E_JSON, file, 0, "the member \"%s\" is read from a value that is not an object", key);
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
  if (!json_is_integer(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is not an integer", key);
  json_int_t x = json_integer_value(value);
  if (x < min || x > max)
    return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is %lld; it must be %lld to %lld", key, (long long)x,
                       (long long)min, (long long)max);
  *out = x;
  return RFR_OK;
}

rfr_status rfi_json_get_real(const json_t *object, const char *file, const char *key, bool required, double *out) {
  const json_t *value;
  RFI_TRY(member(object, file, key, required, &value));
  if (!value) return RFR_OK;
  if (!json_is_number(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is not a number", key);
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
  if (!json_is_string(value)) return rfi_fail_at(RFI_E_JSON, file, 0, "\"%s\" is not a string", key);
  *out = json_string_value(value);
  return RFR_OK;
}
