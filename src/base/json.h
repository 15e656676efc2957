/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON through jansson, always strict: no duplicate keys, no bytes after the value, no
 * NaN, valid UTF-8. Errors name the file and line. A json_t is released with json_decref.
 *
 * Typed getters: with a missing key (or null) *out stays the caller's default, or the call
 * fails if the key is required. A value of another type or out of range is always an error
 * that names the key.
 */
#ifndef RFI_JSON_H
#define RFI_JSON_H

#include <jansson.h>

#include "base/base.h"

/* `file` is named in errors. */
rfr_status rfi_json_parse(const char *file, const char *text, size_t n, json_t **out);
/* The same with integers as reals, for files whose integers may exceed 64 bits: tokenizer_config.json. */
rfr_status rfi_json_parse_reals(const char *file, const char *text, size_t n, json_t **out);
/* Appends the value's text, indented by two, keys in order of insertion, with a newline. */
rfr_status rfi_json_print(const json_t *value, rfi_string *out);
/* The same on one line, without a space or newline. */
rfr_status rfi_json_print_compact(const json_t *value, rfi_string *out);
/* The value's text for a message, in `buffer`; "..." when it does not fit. */
const char *rfi_json_brief(const json_t *value, char *buffer, size_t size);
/* object[key] = value, taking the reference; fails when value is NULL (out of memory, bad UTF-8, not finite). */
rfr_status rfi_json_set(json_t *object, const char *key, json_t *value);

rfr_status rfi_json_get_int(const json_t *object, const char *file, const char *key, bool required, int64_t min,
                            int64_t max, int64_t *out);
/* Also accepts an integer. */
rfr_status rfi_json_get_real(const json_t *object, const char *file, const char *key, bool required, double *out);
rfr_status rfi_json_get_bool(const json_t *object, const char *file, const char *key, bool required, bool *out);
/* The string lives as long as the object. */
rfr_status rfi_json_get_string(const json_t *object, const char *file, const char *key, bool required,
                               const char **out);

#endif
