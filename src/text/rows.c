/* SPDX-License-Identifier: Apache-2.0
 *
 * jansson does not record where values are, so an error finds its column by walking the line along the value's
 * path. The line is known to be valid JSON at that point.
 */
#include "text/rows.h"

#include <string.h>

#include "data/file.h"

enum { DEEPEST = 4 };

/* A member of an object, or, without a key, an element of a list. */
typedef struct step {
  const char *key;
  size_t index;
} step;

typedef struct place {
  rfr_ctx *ctx;
  const char *file;
  int64_t line;
  const char *text;
  size_t n;
  step path[DEEPEST];
  int depth;
} place;

const char *rfi_row_form_name(rfi_row_form form) {
  static const char *const names[] = {
#define RFI_ROW_FORM(form, keys) #form,
      RFI_ROW_FORMS(RFI_ROW_FORM)
#undef RFI_ROW_FORM
  };
  return names[form];
}

/* ---- places ---- */

static const char *skip_blanks(const char *p, const char *end) {
  while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
  return p;
}

static const char *skip_string(const char *p, const char *end) {
  for (p++; p < end && *p != '"'; p++)
    if (*p == '\\') p++;
  return p < end ? p + 1 : end;
}

static const char *skip_value(const char *p, const char *end) {
  int depth = 0;
  do {
    p = skip_blanks(p, end);
    if (p >= end) return end;
    if (*p == '"') {
      p = skip_string(p, end);
    } else if (strchr("{[", *p)) {
      depth++;
      p++;
    } else if (strchr("}]", *p)) {
      depth--;
      p++;
    } else if (strchr(",:", *p)) {
      p++;
    } else {
      while (p < end && !strchr(",:{}[] \t\r\n", *p)) p++;
    }
  } while (depth > 0);
  return p;
}

/* The value one step below the container at `p`, or NULL. A key that is spelled with escapes is not found. */
static const char *descend(const char *p, const char *end, step to) {
  p = skip_blanks(p, end);
  if (p >= end || *p != (to.key ? '{' : '[')) return NULL;
  p++;
  for (size_t i = 0;; i++) {
    p = skip_blanks(p, end);
    if (p >= end || *p == '}' || *p == ']') return NULL;
    bool found = !to.key && i == to.index;
    if (to.key) {
      const char *key = p + 1;
      p = skip_string(p, end);
      const size_t n = (size_t)(p - key) - 1;
      found = strlen(to.key) == n && memcmp(key, to.key, n) == 0;
      p = skip_blanks(p, end);
      if (p < end) p++; /* the colon */
      p = skip_blanks(p, end);
    }
    if (found) return p;
    p = skip_blanks(skip_value(p, end), end);
    if (p < end && *p == ',') p++;
  }
}

static int64_t column_of(const place *at) {
  const char *p = skip_blanks(at->text, at->text + at->n), *end = at->text + at->n;
  for (int i = 0; i < at->depth; i++) {
    const char *below = descend(p, end, at->path[i]);
    if (!below) break;
    p = below;
  }
  int64_t column = 1;
  for (const char *c = at->text; c < p; c++) column += ((unsigned char)*c & 0xC0) != 0x80;
  return column;
}

/* data.row at the value of `at`, with its path: "messages[2].content: ...". */
static rfr_status bad(const place *at, const char *what) {
  char path[256] = "";
  size_t n = 0;
  for (int i = 0; i < at->depth && n < sizeof path; i++) {
    const step *s = &at->path[i];
    const int more = s->key ? rfi_snprintf(path + n, sizeof path - n, "%s%.60s", i ? "." : "", s->key)
                            : rfi_snprintf(path + n, sizeof path - n, "[%zu]", s->index);
    n += more > 0 ? (size_t)more : 0;
  }
  return rfi_fail_at_column(RFI_E_DATA_ROW, at->file, at->line, column_of(at), "%s%s%s", path, *path ? ": " : "", what);
}

static place below(const place *at, const char *key, size_t index) {
  place p = *at;
  if (p.depth < DEEPEST) p.path[p.depth++] = (step){key, index};
  return p;
}

static const char *type_name(const json_t *value) {
  if (!value) return "is missing";
  switch (json_typeof(value)) {
    case JSON_OBJECT: return "is an object";
    case JSON_ARRAY: return "is a list";
    case JSON_STRING: return "is a text";
    case JSON_INTEGER:
    case JSON_REAL: return "is a number";
    case JSON_NULL: return "is null";
    default: return "is a boolean";
  }
}

static rfr_status wrong_type(const place *at, const json_t *value, const char *wanted) {
  char what[96];
  rfi_snprintf(what, sizeof what, "%s, not %s", type_name(value), wanted);
  if (!value) rfi_snprintf(what, sizeof what, "the key is missing; it must be %s", wanted);
  return bad(at, what);
}

/* ---- values ---- */

static rfr_status parse(const char *file, int64_t line, const char *text, size_t n, json_t **out) {
  json_error_t error;
  *out = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
  if (!*out) {
    if (json_error_code(&error) == json_error_out_of_memory || error.text[0] == 0)
      return rfi_fail_at(RFI_E_NO_MEMORY, file, line, "out of memory while reading JSON");
    const char *near = strstr(error.text, "end of file"); /* jansson's errors name the line as a file */
    return rfi_fail_at_column(RFI_E_DATA_ROW, file, line, error.column > 0 ? error.column : 1, "%.*s%s%s",
                              (int)(near ? near - error.text : 0), error.text, near ? "end of the line" : "",
                              near ? near + strlen("end of file") : error.text);
  }
  if (json_is_object(*out)) return RFR_OK;
  const rfr_status s =
      rfi_fail_at_column(RFI_E_DATA_ROW, file, line, 1, "the row %s, not an object with keys", type_name(*out));
  json_decref(*out);
  *out = NULL;
  return s;
}

static rfr_status no_memory(const place *at) {
  return rfi_fail_at(RFI_E_NO_MEMORY, at->file, at->line, "out of memory while reading a row");
}

static bool has(const json_t *object, const char *key) {
  const json_t *value = json_object_get(object, key);
  return value && !json_is_null(value);
}

/* object[key] as text. */
static rfr_status get_text(const place *at, const json_t *object, const char *key, const char **out, size_t *n) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_string(value)) {
    const place p = below(at, key, 0);
    return wrong_type(&p, value, "a text");
  }
  *out = json_string_value(value);
  if (n) *n = json_string_length(value);
  return RFR_OK;
}

/* The content of a message: a text, null, or a list of texts as {"type": "text", "text": ...}. */
static rfr_status check_content(const place *at, const json_t *message) {
  const json_t *content = json_object_get(message, "content");
  const place p = below(at, "content", 0);
  if (json_is_string(content)) return RFR_OK;
  if ((!content || json_is_null(content)) && has(message, "tool_calls")) return RFR_OK;
  if (!json_is_array(content)) return wrong_type(&p, content, "a text or a list of texts");
  for (size_t i = 0; i < json_array_size(content); i++) {
    const json_t *part = json_array_get(content, i);
    const place q = below(&p, NULL, i);
    const char *type = json_string_value(json_object_get(part, "type"));
    if (!type || strcmp(type, "text") != 0 || !json_is_string(json_object_get(part, "text")))
      return bad(&q, "is not {\"type\": \"text\", \"text\": ...}; only texts are supported");
  }
  return RFR_OK;
}

static rfr_status check_list(const place *at, const json_t *list) {
  if (!json_is_array(list)) return wrong_type(at, list, "a list of messages");
  if (json_array_size(list) == 0) return bad(at, "the list is empty");
  if (json_array_size(list) > RFI_ROW_MESSAGES) return bad(at, "the list has more than 100000 messages");
  return RFR_OK;
}

/* Messages of {role, content}. */
static rfr_status check_messages(const place *at, const json_t *list) {
  RFI_TRY(check_list(at, list));
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *message = json_array_get(list, i);
    const place p = below(at, NULL, i);
    const char *role;
    if (!json_is_object(message)) return wrong_type(&p, message, "an object with role and content");
    RFI_TRY(get_text(&p, message, "role", &role, NULL));
    if (!*role) {
      const place q = below(&p, "role", 0);
      return bad(&q, "is empty");
    }
    RFI_TRY(check_content(&p, message));
  }
  return RFR_OK;
}

static rfr_status append_message(const place *at, json_t *list, const char *role, const char *content) {
  json_t *message = json_pack("{s:s,s:s}", "role", role, "content", content);
  if (!message || json_array_append_new(list, message) != 0) return no_memory(at);
  return RFR_OK;
}

/* `tools`: a list, or a text that contains a list, as tables store it. */
static rfr_status read_tools(const place *at, const json_t *object, rfi_row *row) {
  json_t *tools = json_object_get(object, "tools");
  const place p = below(at, "tools", 0);
  if (!tools || json_is_null(tools)) return RFR_OK;
  if (json_is_string(tools)) {
    if (json_string_length(tools) == 0) return RFR_OK;
    json_error_t error;
    row->tools = json_loadb(json_string_value(tools), json_string_length(tools), JSON_REJECT_DUPLICATES, &error);
    if (!row->tools) return bad(&p, "is a text that is not valid JSON");
  } else {
    row->tools = json_incref(tools);
  }
  if (!json_is_array(row->tools)) return wrong_type(&p, row->tools, "a list of tools");
  if (json_array_size(row->tools) > 0) return RFR_OK;
  json_decref(row->tools);
  row->tools = NULL;
  return RFR_OK;
}

/* ---- forms ---- */

static rfr_status read_text(const place *at, rfi_row *row) {
  return get_text(at, row->value, "text", &row->text, &row->text_n);
}

static rfr_status read_chat(const place *at, rfi_row *row) {
  json_t *list = json_object_get(row->value, "messages");
  const place p = below(at, "messages", 0);
  RFI_TRY(check_messages(&p, list));
  row->messages = json_incref(list);
  return read_tools(at, row->value, row);
}

static rfr_status copy_text(const place *at, const char *text, char **out) {
  RFI_TRY(RFI_ALLOC(at->ctx, strlen(text) + 1, out));
  strcpy(*out, text);
  return RFR_OK;
}

static rfr_status read_completion(const place *at, rfi_row *row) {
  json_t *prompt = json_object_get(row->value, "prompt"), *completion = json_object_get(row->value, "completion");
  const place p = below(at, "prompt", 0), q = below(at, "completion", 0);
  RFI_TRY(read_tools(at, row->value, row));
  if (json_is_string(prompt)) {
    RFI_TRY(get_text(at, row->value, "completion", &row->completion, NULL));
    return copy_text(at, json_string_value(prompt), &row->prompt);
  }
  if (!json_is_array(prompt)) return wrong_type(&p, prompt, "a text or a list of messages");
  if (!json_is_array(completion)) return wrong_type(&q, completion, "a list of messages, as the prompt is");
  RFI_TRY(check_messages(&p, prompt));
  RFI_TRY(check_messages(&q, completion));
  row->messages = json_copy(prompt);
  if (!row->messages || json_array_extend(row->messages, completion) != 0) return no_memory(at);
  row->n_prompt = (int)json_array_size(prompt);
  return RFR_OK;
}

static rfr_status read_alpaca(const place *at, rfi_row *row) {
  const char *instruction, *input = "";
  rfi_string prompt = {.ctx = at->ctx};
  RFI_TRY(get_text(at, row->value, "instruction", &instruction, NULL));
  if (has(row->value, "input")) RFI_TRY(get_text(at, row->value, "input", &input, NULL));
  RFI_TRY(get_text(at, row->value, "output", &row->completion, NULL));
  rfr_status s = rfi_string_append(&prompt, instruction, strlen(instruction));
  if (s == RFR_OK && *input) s = rfi_string_append(&prompt, "\n\n", 2);
  if (s == RFR_OK && *input) s = rfi_string_append(&prompt, input, strlen(input));
  if (s == RFR_OK) s = copy_text(at, prompt.data ? prompt.data : "", &row->prompt);
  rfi_string_deinit(&prompt);
  return s;
}

static const char *sharegpt_role(const char *from) {
  static const struct {
    const char *names, *role;
  } roles[] = {{"human user", "user"},
               {"gpt assistant model chatgpt bard bing function_call", "assistant"},
               {"system", "system"},
               {"tool function_response observation", "tool"}};
  for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
    if (rfi_has_word(roles[i].names, from)) return roles[i].role;
  return NULL;
}

static rfr_status read_sharegpt(const place *at, rfi_row *row) {
  json_t *list = json_object_get(row->value, "conversations");
  const place p = below(at, "conversations", 0);
  RFI_TRY(check_list(&p, list));
  RFI_TRY(read_tools(at, row->value, row));
  if (json_object_get(json_array_get(list, 0), "role")) { /* messages under another name */
    RFI_TRY(check_messages(&p, list));
    row->messages = json_incref(list);
    return RFR_OK;
  }
  if (!(row->messages = json_array())) return no_memory(at);
  if (has(row->value, "system")) {
    const char *system;
    RFI_TRY(get_text(at, row->value, "system", &system, NULL));
    if (*system) RFI_TRY(append_message(at, row->messages, "system", system));
  }
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *turn = json_array_get(list, i);
    const place q = below(&p, NULL, i);
    const char *from, *value;
    if (!json_is_object(turn)) return wrong_type(&q, turn, "an object with from and value");
    RFI_TRY(get_text(&q, turn, "from", &from, NULL));
    RFI_TRY(get_text(&q, turn, "value", &value, NULL));
    const char *role = sharegpt_role(from);
    if (!role) {
      const place r = below(&q, "from", 0);
      return bad(&r, "is none of human, gpt, system, tool, function_call and observation");
    }
    RFI_TRY(append_message(at, row->messages, role, value));
  }
  return RFR_OK;
}

static rfr_status read_preference(const place *at, rfi_row *row) {
  json_t *prompt = json_object_get(row->value, "prompt"), *chosen = json_object_get(row->value, "chosen"),
         *rejected = json_object_get(row->value, "rejected");
  const place p = below(at, "prompt", 0), q = below(at, "chosen", 0), r = below(at, "rejected", 0);
  RFI_TRY(read_tools(at, row->value, row));
  if (json_is_string(chosen)) {
    const char *text;
    RFI_TRY(get_text(at, row->value, "prompt", &text, NULL));
    RFI_TRY(get_text(at, row->value, "rejected", &row->rejected, NULL));
    row->completion = json_string_value(chosen);
    return copy_text(at, text, &row->prompt);
  }
  RFI_TRY(check_messages(&q, chosen));
  RFI_TRY(check_messages(&r, rejected));
  if (prompt && !json_is_null(prompt)) {
    RFI_TRY(check_messages(&p, prompt));
    row->messages = json_incref(prompt);
    row->n_prompt = (int)json_array_size(prompt);
  }
  row->chosen_messages = json_incref(chosen);
  row->rejected_messages = json_incref(rejected);
  return RFR_OK;
}

/* ---- reading ---- */

bool rfi_is_row_file(const char *path) {
  path += *path != 0; /* a name before the end */
  return rfi_ends_in(path, ".jsonl") || rfi_ends_in(path, ".jsonl.gz") || rfi_ends_in(path, ".jsonl.zst");
}

bool rfi_row_is_blank(const char *text, size_t n) { return skip_blanks(text, text + n) == text + n; }

rfr_status rfi_row_detect(const char *file, int64_t line, const char *text, size_t n, rfi_row_form *form) {
  json_t *value;
  *form = RFI_ROW_FORM_COUNT;
  RFI_TRY(parse(file, line, text, n, &value));
  const bool prompt = has(value, "prompt");
  const bool found[RFI_ROW_FORM_COUNT] = {
      [RFI_ROW_text] = has(value, "text"),
      [RFI_ROW_chat] = has(value, "messages"),
      [RFI_ROW_completion] = prompt && has(value, "completion"),
      [RFI_ROW_alpaca] = has(value, "instruction") && has(value, "output"),
      [RFI_ROW_sharegpt] = has(value, "conversations"),
      [RFI_ROW_preference] = has(value, "chosen") && has(value, "rejected"),
  };
  rfr_status s = RFR_OK;
  char keys[256] = "";
  size_t used = 0;
  const char *key;
  json_t *member;
  json_object_foreach(value, key, member) {
    const int more = rfi_snprintf(keys + used, sizeof keys - used, "%s%.40s", used ? ", " : "", key);
    if (more < 0 || used + (size_t)more >= sizeof keys) break;
    used += (size_t)more;
  }
  for (int f = 0; f < RFI_ROW_FORM_COUNT && s == RFR_OK; f++) {
    if (!found[f]) continue;
    if (*form != RFI_ROW_FORM_COUNT)
      s = rfi_fail_at_column(RFI_E_DATA_FORMAT, file, line, 1,
                             "the keys of the row (%s) match the forms %s and %s; set data.format", keys,
                             rfi_row_form_name(*form), rfi_row_form_name((rfi_row_form)f));
    *form = (rfi_row_form)f;
  }
  if (s == RFR_OK && *form == RFI_ROW_FORM_COUNT)
    s = rfi_fail_at_column(RFI_E_DATA_FORMAT, file, line, 1,
                           "the keys of the row (%s) match no form; the forms have the keys text; messages; prompt and "
                           "completion; instruction and output; conversations; chosen and rejected",
                           keys);
  json_decref(value);
  return s;
}

rfr_status rfi_row_read(rfr_ctx *ctx, rfi_row_form form, const char *file, int64_t line, const char *text, size_t n,
                        rfi_row *row) {
  static rfr_status (*const readers[])(const place *, rfi_row *) = {
#define RFI_ROW_FORM(form, keys) read_##form,
      RFI_ROW_FORMS(RFI_ROW_FORM)
#undef RFI_ROW_FORM
  };
  const place at = {.ctx = ctx, .file = file, .line = line, .text = text, .n = n};
  *row = (rfi_row){.form = form};
  RFI_TRY(parse(file, line, text, n, &row->value));
  return readers[form](&at, row);
}

void rfi_row_deinit(rfr_ctx *ctx, rfi_row *row) {
  json_decref(row->value);
  json_decref(row->messages);
  json_decref(row->tools);
  json_decref(row->chosen_messages);
  json_decref(row->rejected_messages);
  rfi_free(ctx, row->prompt);
  *row = (rfi_row){0};
}
