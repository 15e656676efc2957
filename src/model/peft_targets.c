/* SPDX-License-Identifier: Apache-2.0
 *
 * Determines the modules that adapter_config.json selects, by the rules of the PEFT library. There a module that the
 * fields name gets an adapter, also without tensors in the folder, and tensors of other modules are ignored. So a
 * folder whose fields and tensors differ is ambiguous.
 *
 * Regular expressions are Python's there and PCRE2's here; for names of modules the two agree. Their time is limited,
 * because the folder is foreign data.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "model/peft.h"

enum { MATCH_LIMIT = 100000, HEAP_KIB = 1024, PATTERN_LIMIT = 16384 };

typedef struct target_query {
  rfr_ctx *ctx;
  const json_t *config;
  const char *path, *module;
  bool in_block;     /* all-linear includes it */
  const char *field; /* the field that selected it; NULL: no field */
  bool wanted;
} target_query;

#define BAD(q, ...) rfi_fail_at(RFI_E_ADAPTER, (q)->path, 0, __VA_ARGS__)

/* ---- one name or pattern ---- */

static void *get_memory(PCRE2_SIZE n, void *ctx) {
  void *memory;
  return rfi_alloc(ctx, n, &memory) == RFR_OK ? memory : NULL;
}

static void free_memory(void *memory, void *ctx) { rfi_free(ctx, memory); }

static rfr_status no_memory(void) { return rfi_fail(RFI_E_NO_MEMORY, "out of memory in a regular expression"); }

/* Whether the pattern matches the full name. */
static rfr_status run_pattern(const target_query *q, const char *field, const pcre2_code *code,
                              pcre2_general_context *memory, bool *out) {
  pcre2_match_context *limits = pcre2_match_context_create(memory);
  pcre2_match_data *match = limits ? pcre2_match_data_create(1, memory) : NULL;
  int rc = PCRE2_ERROR_NOMEMORY;
  if (match) {
    pcre2_set_match_limit(limits, MATCH_LIMIT);
    pcre2_set_heap_limit(limits, HEAP_KIB);
    rc = pcre2_match(code, (PCRE2_SPTR)q->module, strlen(q->module), 0, 0, match, limits);
  }
  pcre2_match_data_free(match);
  pcre2_match_context_free(limits);
  *out = rc >= 0;
  if (*out || rc == PCRE2_ERROR_NOMATCH) return RFR_OK;
  if (rc == PCRE2_ERROR_NOMEMORY) return no_memory();
  return BAD(q, "%s: the regular expression takes too long on %s; list the names of modules", field, q->module);
}

static rfr_status match_pattern(const target_query *q, const char *field, const char *pattern, bool *out) {
  int error;
  PCRE2_SIZE at;
  if (strlen(pattern) > PATTERN_LIMIT)
    return BAD(q, "%s: the regular expression has more than %d bytes", field, PATTERN_LIMIT);
  pcre2_general_context *memory = pcre2_general_context_create(get_memory, free_memory, q->ctx);
  if (!memory) return no_memory();
  rfr_status s = RFR_OK;
  pcre2_compile_context *c = pcre2_compile_context_create(memory);
  pcre2_code *code =
      c ? pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED | PCRE2_ENDANCHORED, &error, &at, c)
        : NULL;
  if (code) s = run_pattern(q, field, code, memory, out);
  else if (!c || error == PCRE2_ERROR_HEAP_FAILED) s = no_memory();
  else s = BAD(q, "%s: \"%.100s\" is not a valid regular expression at byte %zu", field, pattern, at);
  pcre2_code_free(code);
  pcre2_compile_context_free(c);
  pcre2_general_context_free(memory);
  return s;
}

/* Whether the first n bytes of `text` are `name`, or end in it after a dot. */
static bool ends_in_name(const char *text, size_t n, const char *name) {
  const size_t k = strlen(name);
  return k <= n && strncmp(text + n - k, name, k) == 0 && (k == n || text[n - k - 1] == '.');
}

/* Whether a list contains the name, or the end of it after a dot; *full: the list contains the full name. */
static rfr_status match_list(const target_query *q, const char *field, const json_t *list, bool *out, bool *full) {
  *out = *full = false;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const char *name = json_string_value(json_array_get(list, i));
    if (!name) return BAD(q, "%s: element %zu is not a string", field, i);
    *full |= strcmp(name, q->module) == 0;
    *out |= ends_in_name(q->module, strlen(q->module), name);
  }
  return RFR_OK;
}

/* A field that is a list of names or a regular expression. */
static rfr_status match_field(const target_query *q, const char *field, bool *out, bool *full) {
  const json_t *value = json_object_get(q->config, field);
  *out = *full = false;
  if (json_is_string(value)) {
    *full = true;
    return match_pattern(q, field, json_string_value(value), out);
  }
  if (json_is_array(value)) return match_list(q, field, value, out, full);
  return !value || json_is_null(value) ? RFR_OK : BAD(q, "%s is neither a string nor a list", field);
}

/* ---- layers ---- */

/* The number of the module's layer: the first component that is a number, follows the name `after` (NULL: follows at
 * least two components) and is not the last component. -1: none. */
static int64_t layer_of(const char *module, const char *after) {
  for (const char *dot = strchr(module, '.'); dot; dot = strchr(dot + 1, '.')) {
    const size_t before = (size_t)(dot - module), digits = strspn(dot + 1, "0123456789");
    if (digits == 0 || digits > 9 || dot[1 + digits] != '.') continue;
    if (after ? ends_in_name(module, before, after) : memchr(module, '.', before) != NULL)
      return strtoll(dot + 1, NULL, 10);
  }
  return -1;
}

static rfr_status find_layer(const target_query *q, int64_t *out) {
  static const char field[] = "layers_pattern";
  const json_t *patterns = json_object_get(q->config, field);
  const size_t n = json_is_string(patterns) ? json_string_length(patterns) > 0 : json_array_size(patterns);
  *out = n == 0 ? layer_of(q->module, NULL) : -1;
  for (size_t i = 0; i < n && *out < 0; i++) {
    const char *name = json_string_value(json_is_string(patterns) ? patterns : json_array_get(patterns, i));
    if (!name || strpbrk(name, "^$*+?()[]{}|\\"))
      return BAD(q, "%s: \"%.80s\" is not the name of a list of layers", field, name ? name : "");
    *out = layer_of(q->module, name);
  }
  return RFR_OK;
}

/* Whether layers_to_transform contains the module's layer; without the field every layer is selected. */
static rfr_status match_layer(const target_query *q, bool *limited, bool *out) {
  static const char field[] = "layers_to_transform";
  const json_t *layers = json_object_get(q->config, field);
  int64_t layer;
  *limited = json_is_integer(layers) || json_array_size(layers) > 0;
  *out = true;
  if (layers && !*limited && !json_is_null(layers) && !json_is_array(layers))
    return BAD(q, "%s is neither a number nor a list", field);
  if (!*limited) return RFR_OK;
  RFI_TRY(find_layer(q, &layer));
  *out = json_is_integer(layers) && json_integer_value(layers) == layer && layer >= 0;
  for (size_t i = 0; i < json_array_size(layers); i++) {
    const json_t *number = json_array_get(layers, i);
    if (!json_is_integer(number)) return BAD(q, "%s: element %zu is not an integer", field, i);
    *out |= layer >= 0 && json_integer_value(number) == layer;
  }
  return RFR_OK;
}

/* ---- a module ---- */

static rfr_status decide_module(target_query *q) {
  static const char targets[] = "target_modules";
  const json_t *value = json_object_get(q->config, targets),
               *parameters = json_object_get(q->config, "target_parameters");
  bool full, limited, in_layer;
  RFI_TRY(match_field(q, "exclude_modules", &q->wanted, &full));
  if (q->wanted) {
    q->wanted = false;
    q->field = "exclude_modules";
    return RFR_OK;
  }
  if ((!value || json_is_null(value)) && (!parameters || json_is_null(parameters))) return RFR_OK;
  q->field = targets;
  if (json_is_string(value) && strcmp(json_string_value(value), "all-linear") == 0) {
    q->wanted = q->in_block;
    full = false;
  } else {
    RFI_TRY(match_field(q, targets, &q->wanted, &full));
  }
  if (!q->wanted || full) return RFR_OK;
  RFI_TRY(match_layer(q, &limited, &in_layer));
  if (limited) q->field = "layers_to_transform";
  q->wanted = in_layer;
  return RFR_OK;
}

static rfr_status decide_packed(target_query *q) {
  bool full;
  q->field = "target_parameters";
  return match_field(q, q->field, &q->wanted, &full);
}

rfr_status rfi_peft_check_target(rfr_ctx *ctx, const json_t *config, const char *path, const char *module, bool packed,
                                 bool in_block, bool has_tensors) {
  target_query q = {.ctx = ctx, .config = config, .path = path, .module = module, .in_block = in_block};
  char text[200];
  RFI_TRY(packed ? decide_packed(&q) : decide_module(&q));
  if (!q.field || q.wanted == has_tensors) return RFR_OK;
  const char *value = rfi_json_brief(json_object_get(config, q.field), text, sizeof text);
  if (q.wanted)
    return BAD(&q, "%s is %s, which includes %s, but " RFI_PEFT_WEIGHTS " has no tensor of it", q.field, value, module);
  return BAD(&q, RFI_PEFT_WEIGHTS " has tensors of %s, but %s is %s", module, q.field, value ? value : "missing");
}
