/* SPDX-License-Identifier: Apache-2.0
 *
 * Converts texts to typed values and back. A parser consumes all of the text or fails. Numbers do not depend on the
 * locale. A printed value reads back as the same value.
 */
#include "train/config_value.h"

#include <math.h>
#include <string.h>

#include "refrain/nn.h"

typedef struct place {
  rfi_arena *arena;
  const rfi_config_row *row;
  const char *file;
  int64_t line;
} place;

#define BAD(p, ...) rfi_fail_at(RFI_E_CONFIG_VALUE, (p)->file, (p)->line, __VA_ARGS__)

static const char *const accepted_types[] = {
#define RFI_CONFIG_TYPE(type, ctype, text) text,
    RFI_CONFIG_TYPES(RFI_CONFIG_TYPE)
#undef RFI_CONFIG_TYPE
};

const char *rfi_config_type_text(rfi_config_kind kind) { return accepted_types[kind]; }

static rfr_status refuse(const place *p, const char *text) {
  const rfi_config_kind kind = p->row->kind;
  const char *accepted = kind == RFI_KIND_BOOL ? "" : p->row->accepted; /* the type's text allows both values */
  const char *between = !*accepted ? "" : kind == RFI_KIND_CHOICE || kind == RFI_KIND_DTYPE ? " " : "; range ";
  return BAD(p, "%s: \"%.100s\" is not accepted; expected: %s%s%s", p->row->path, text, accepted_types[kind], between,
             accepted);
}

/* Parses a decimal number; *rest is the text after it. False if there is none or it is too large. */
static bool number(const char *text, double *x, const char **rest) {
  const char *p = text + (*text == '-' || *text == '+');
  size_t digits = strspn(p, "0123456789");
  p += digits;
  if (*p == '.') {
    size_t more = strspn(p + 1, "0123456789");
    p += 1 + more;
    digits += more;
  }
  if (digits == 0) return false;
  if (*p == 'e' || *p == 'E') {
    const char *exponent = p + 1 + (p[1] == '-' || p[1] == '+');
    size_t more = strspn(exponent, "0123456789");
    if (more) p = exponent + more;
  }
  *x = rfi_strtod(text, NULL);
  *rest = p;
  return isfinite(*x);
}

/* Parses an integer; *rest is the text after it. False if there is none or it overflows. */
static bool integer(const char *text, int64_t *x, const char **rest) {
  bool negative = *text == '-';
  const char *p = text + negative;
  *x = 0;
  if (*p < '0' || *p > '9') return false;
  for (; *p >= '0' && *p <= '9'; p++) {
    int digit = *p - '0';
    if (__builtin_mul_overflow(*x, 10, x) || __builtin_add_overflow(*x, negative ? -digit : digit, x)) return false;
  }
  *rest = p;
  return true;
}

bool rfi_config_in_range(const rfi_config_row *row, double x) {
  const char *text = row->accepted, *rest;
  double low, high;
  if (*text == '>') return number(text + 1, &low, &rest) && x > low;
  const char *dots = strstr(text, "..");
  if (!dots) return true;
  low = rfi_strtod(text, NULL);
  if (x < low) return false;
  if (!dots[2]) return true;
  high = rfi_strtod(dots + 2, NULL);
  return x <= high;
}

static rfr_status parse_int(const place *p, const char *text, int64_t *out) {
  static const struct {
    char suffix;
    int64_t factor;
  } factors[] = {{'k', 1 << 10}, {'M', 1 << 20}, {'G', 1 << 30}};
  const char *rest;
  if (!integer(text, out, &rest)) return refuse(p, text);
  for (size_t i = 0; i < sizeof factors / sizeof *factors && *rest; i++)
    if (*rest == factors[i].suffix && rest[1] == 0) {
      if (__builtin_mul_overflow(*out, factors[i].factor, out)) return refuse(p, text);
      rest++;
    }
  return *rest || !rfi_config_in_range(p->row, (double)*out) ? refuse(p, text) : RFR_OK;
}

static rfr_status parse_float(const place *p, const char *text, double *out) {
  const char *rest;
  return !number(text, out, &rest) || *rest || !rfi_config_in_range(p->row, *out) ? refuse(p, text) : RFR_OK;
}

static rfr_status parse_size(const place *p, const char *text, int64_t *out) {
  static const struct {
    const char *suffix;
    double factor;
  } factors[] = {{"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
                 {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const char *rest;
  double x;
  if (integer(text, out, &rest) && !*rest) return rfi_config_in_range(p->row, (double)*out) ? RFR_OK : refuse(p, text);
  if (!number(text, &x, &rest)) return refuse(p, text);
  while (*rest == ' ') rest++;
  for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
    if (strcmp(rest, factors[i].suffix) == 0) {
      x *= factors[i].factor;
      if (x >= 0x1p63 || x != floor(x) || !rfi_config_in_range(p->row, x)) return refuse(p, text);
      *out = (int64_t)x;
      return RFR_OK;
    }
  return refuse(p, text);
}

static rfr_status parse_duration(const place *p, const char *text, double *out) {
  static const struct {
    const char *suffix;
    double factor;
  } factors[] = {{"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}, {"d", 86400}};
  const char *rest;
  if (!number(text, out, &rest)) return refuse(p, text);
  while (*rest == ' ') rest++;
  for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
    if (strcmp(rest, factors[i].suffix) == 0) {
      *out *= factors[i].factor;
      return rfi_config_in_range(p->row, *out) ? RFR_OK : refuse(p, text);
    }
  return refuse(p, text);
}

static rfr_status parse_bool(const place *p, const char *text, bool *out) {
  *out = strcmp(text, "true") == 0;
  return *out || strcmp(text, "false") == 0 ? RFR_OK : refuse(p, text);
}

/* The index of the text in the accepted values "a|b|c"; -1: it is none of them. */
static int choice(const rfi_config_row *row, const char *text) {
  const size_t n = strlen(text);
  int i = 0;
  for (const char *c = row->accepted; n > 0 && *c; i++) {
    size_t length = strcspn(c, "|");
    if (length == n && memcmp(c, text, n) == 0) return i;
    c += length + (c[length] == '|');
  }
  return -1;
}

static rfr_status parse_choice(const place *p, const char *text, int *out) {
  *out = choice(p->row, text);
  return *out < 0 ? refuse(p, text) : RFR_OK;
}

static rfr_status parse_dtype(const place *p, const char *text, rfr_dtype *out) {
  *out = rfr_dtype_parse(text);
  return choice(p->row, text) < 0 ? refuse(p, text) : RFR_OK;
}

/* "5%" */
static bool percent(const char *text, double *out) {
  const char *rest;
  return number(text, out, &rest) && strcmp(rest, "%") == 0;
}

static rfr_status parse_amount(const place *p, const char *text, rfi_config_amount *out) {
  int64_t steps;
  const char *rest;
  out->percent = percent(text, &out->value);
  if (out->percent) return out->value >= 0 && out->value <= 100 ? RFR_OK : refuse(p, text);
  if (!integer(text, &steps, &rest) || *rest || !rfi_config_in_range(p->row, (double)steps)) return refuse(p, text);
  out->value = (double)steps;
  return RFR_OK;
}

/* A list of texts, or one text. */
static rfr_status parse_strings(const place *p, const rfi_yaml *node, rfi_config_list *out) {
  if (node->kind == RFI_YAML_MAP) return refuse(p, "a map");
  int n = node->kind == RFI_YAML_LIST ? node->n : 1;
  const char **items = rfi_arena_alloc(p->arena, (size_t)(n + 1) * sizeof *items);
  if (!items) return RFR_NO_MEMORY;
  const rfi_yaml *item = node->kind == RFI_YAML_LIST ? node->first : node;
  for (int i = 0; i < n; i++, item = item->next) {
    place at = *p;
    at.line = item->line;
    if (item->kind != RFI_YAML_SCALAR || item->null)
      return refuse(&at, item->null ? "nothing" : "a list within a list");
    items[i] = rfi_arena_strdup(p->arena, item->text);
    if (!items[i]) return RFR_NO_MEMORY;
  }
  *out = (rfi_config_list){items, n};
  return RFR_OK;
}

static rfr_status parse_pair(const place *p, const rfi_yaml *node, rfi_config_pair *out) {
  if (node->kind != RFI_YAML_LIST || node->n != 2) return refuse(p, "something else");
  const rfi_yaml *item = node->first;
  for (int i = 0; i < 2; i++, item = item->next) {
    place at = *p;
    at.line = item->line;
    if (item->kind != RFI_YAML_SCALAR) return refuse(&at, "a list within a list");
    RFI_TRY(parse_float(&at, item->text, &out->v[i]));
  }
  return RFR_OK;
}

static rfr_status parse_split(const place *p, const rfi_yaml *node, rfi_config_split *out) {
  *out = (rfi_config_split){0};
  if (node->kind == RFI_YAML_SCALAR && percent(node->text, &out->percent))
    return rfi_config_in_range(p->row, out->percent) ? RFR_OK : refuse(p, node->text);
  const char *rest;
  double x;
  if (node->kind == RFI_YAML_SCALAR && number(node->text, &x, &rest) && !*rest)
    return BAD(p, "%s: \"%s\" has no unit; write a percentage as \"5%%\"", p->row->path, node->text);
  return parse_strings(p, node, &out->patterns);
}

static rfr_status parse_group(const place *p, const rfi_yaml *node, rfi_config_group *out) {
  static const char *const keys[] = {"match", "weight_decay", "lr_scale"};
  static const rfi_config_row number_row = {
      .path = "optimizer.groups", .kind = RFI_KIND_FLOAT, .accepted = "0..1000000"};
  *out = (rfi_config_group){.weight_decay = NAN, .lr_scale = 1};
  if (node->kind != RFI_YAML_MAP) return refuse(p, "something else");
  for (const rfi_yaml *item = node->first; item; item = item->next) {
    place at = {p->arena, &number_row, p->file, item->line};
    const char *near = rfi_nearest(item->key, keys, 3);
    bool match = strcmp(item->key, "match") == 0, decay = strcmp(item->key, "weight_decay") == 0;
    if (!match && !decay && strcmp(item->key, "lr_scale") != 0)
      return rfi_fail_at(RFI_E_CONFIG_KEY, p->file, item->line, "unknown key \"%.100s\" in optimizer.groups; %s%s%s",
                         item->key, near ? "did you mean \"" : "the keys are match, weight_decay and lr_scale",
                         near ? near : "", near ? "\"?" : "");
    if (item->kind != RFI_YAML_SCALAR || item->null) return BAD(&at, "optimizer.groups: %s has no value", item->key);
    if (match) {
      out->match = rfi_arena_strdup(p->arena, item->text);
      if (!out->match) return RFR_NO_MEMORY;
    } else {
      RFI_TRY(parse_float(&at, item->text, decay ? &out->weight_decay : &out->lr_scale));
    }
  }
  return out->match ? RFR_OK : BAD(p, "optimizer.groups: a group needs the key match, a pattern of parameter names");
}

static rfr_status parse_groups(const place *p, const rfi_yaml *node, rfi_config_groups *out) {
  if (node->kind != RFI_YAML_LIST) return refuse(p, node->kind == RFI_YAML_MAP ? "a map" : node->text);
  rfi_config_group *items = rfi_arena_alloc(p->arena, (size_t)(node->n + 1) * sizeof *items);
  if (!items) return RFR_NO_MEMORY;
  int i = 0;
  for (const rfi_yaml *item = node->first; item; item = item->next) {
    place at = *p;
    at.line = item->line;
    RFI_TRY(parse_group(&at, item, &items[i++]));
  }
  *out = (rfi_config_groups){items, node->n};
  return RFR_OK;
}

static rfr_status parse_phase(const place *p, const rfi_yaml *node, rfi_config_phase *out) {
  static const char *const keys[] = {"until", "tokens", "sequence"};
  static const rfi_config_row number_row = {.path = "batch.ramp", .kind = RFI_KIND_INT, .accepted = "1..1099511627776"};
  int64_t *const values[] = {&out->until, &out->tokens, &out->sequence};
  *out = (rfi_config_phase){0};
  if (node->kind != RFI_YAML_MAP) return refuse(p, "something else");
  for (const rfi_yaml *item = node->first; item; item = item->next) {
    place at = {p->arena, &number_row, p->file, item->line};
    const char *near = rfi_nearest(item->key, keys, 3);
    int k = 0;
    while (k < 3 && strcmp(item->key, keys[k]) != 0) k++;
    if (k == 3)
      return rfi_fail_at(RFI_E_CONFIG_KEY, p->file, item->line, "unknown key \"%.100s\" in batch.ramp; %s%s%s",
                         item->key, near ? "did you mean \"" : "the keys are until, tokens and sequence",
                         near ? near : "", near ? "\"?" : "");
    if (item->kind != RFI_YAML_SCALAR || item->null) return BAD(&at, "batch.ramp: %s has no value", item->key);
    RFI_TRY(parse_int(&at, item->text, values[k]));
  }
  return out->until > 0 ? RFR_OK : BAD(p, "batch.ramp: a phase needs the key until, its last step");
}

static rfr_status parse_ramp(const place *p, const rfi_yaml *node, rfi_config_ramp *out) {
  if (node->kind != RFI_YAML_LIST) return refuse(p, node->kind == RFI_YAML_MAP ? "a map" : node->text);
  if (node->n > RFI_RAMP_MOST) return BAD(p, "batch.ramp: %d phases; give at most %d", node->n, RFI_RAMP_MOST);
  rfi_config_phase *items = rfi_arena_alloc(p->arena, (size_t)(node->n + 1) * sizeof *items);
  if (!items) return RFR_NO_MEMORY;
  int i = 0;
  for (const rfi_yaml *item = node->first; item; item = item->next) {
    place at = *p;
    at.line = item->line;
    RFI_TRY(parse_phase(&at, item, &items[i++]));
  }
  *out = (rfi_config_ramp){items, node->n};
  return RFR_OK;
}

static rfr_status parse_numbers(const place *p, const rfi_yaml *node, rfi_config_numbers *out) {
  if (node->kind != RFI_YAML_MAP) return refuse(p, node->kind == RFI_YAML_LIST ? "a list" : node->text);
  rfr_adapter_number *items = rfi_arena_alloc(p->arena, (size_t)(node->n + 1) * sizeof *items);
  if (!items) return RFR_NO_MEMORY;
  int n = 0;
  for (const rfi_yaml *item = node->first; item; item = item->next, n++) {
    place at = *p;
    at.line = item->line;
    if (item->kind != RFI_YAML_SCALAR || item->null) return BAD(&at, "%s: %s has no value", p->row->path, item->key);
    items[n].match = rfi_arena_strdup(p->arena, item->key);
    if (!items[n].match) return RFR_NO_MEMORY;
    RFI_TRY(parse_float(&at, item->text, &items[n].value));
  }
  *out = (rfi_config_numbers){items, n};
  return RFR_OK;
}

rfr_status rfi_config_parse(rfi_arena *arena, const rfi_config_row *row, const char *file, const rfi_yaml *node,
                            void *value) {
  const place at = {arena, row, file, node->line}, *p = &at;
  if (node->null) return BAD(p, "%s has no value; expected: %s", row->path, accepted_types[row->kind]);
  switch (row->kind) { /* types that are not scalars */
    case RFI_KIND_STRINGS: return parse_strings(p, node, value);
    case RFI_KIND_PAIR: return parse_pair(p, node, value);
    case RFI_KIND_SPLIT: return parse_split(p, node, value);
    case RFI_KIND_GROUPS: return parse_groups(p, node, value);
    case RFI_KIND_RAMP: return parse_ramp(p, node, value);
    case RFI_KIND_NUMBERS: return parse_numbers(p, node, value);
    default: break;
  }
  if (node->kind != RFI_YAML_SCALAR) return refuse(p, node->kind == RFI_YAML_MAP ? "a map" : "a list");
  switch (row->kind) {
    case RFI_KIND_INT: return parse_int(p, node->text, value);
    case RFI_KIND_FLOAT: return parse_float(p, node->text, value);
    case RFI_KIND_SIZE: return parse_size(p, node->text, value);
    case RFI_KIND_DURATION: return parse_duration(p, node->text, value);
    case RFI_KIND_BOOL: return parse_bool(p, node->text, value);
    case RFI_KIND_CHOICE: return parse_choice(p, node->text, value);
    case RFI_KIND_DTYPE: return parse_dtype(p, node->text, value);
    case RFI_KIND_AMOUNT: return parse_amount(p, node->text, value);
    default: {
      const char **text = value;
      *text = rfi_arena_strdup(arena, node->text);
      return *text ? RFR_OK : RFR_NO_MEMORY;
    }
  }
}

/* ---- printing ---- */

/* The code point of a character of 2 or 3 bytes that YAML folds or refuses: C1 controls, U+2028, U+2029 and byte order
 * marks. 0: any other character. */
static unsigned special_at(const unsigned char *s) {
  if (s[0] == 0xC2 && s[1] >= 0x80 && s[1] < 0xA0) return s[1];
  if (s[0] == 0xE2 && s[1] == 0x80 && (s[2] == 0xA8 || s[2] == 0xA9)) return 0x2000u + (s[2] & 0x3Fu);
  return s[0] == 0xEF && s[1] == 0xBB && s[2] == 0xBF ? 0xFEFFu : 0;
}

/* In double quotes, with escapes that JSON and YAML share. */
static rfr_status format_text(const char *text, rfi_string *out) {
  RFI_TRY(rfi_string_append(out, "\"", 1));
  for (; *text; text++) {
    unsigned char c = (unsigned char)*text;
    const unsigned special = special_at((const unsigned char *)text);
    if (special) {
      RFI_TRY(rfi_string_printf(out, "\\u%04x", special));
      text += special < 0x100 ? 1 : 2;
      continue;
    }
    if (c == '"' || c == '\\') RFI_TRY(rfi_string_printf(out, "\\%c", c));
    else if (c < 0x20 || c == 0x7f) RFI_TRY(rfi_string_printf(out, "\\u%04x", c));
    else RFI_TRY(rfi_string_append(out, text, 1));
  }
  return rfi_string_append(out, "\"", 1);
}

static rfr_status format_number(double x, const char *unit, rfi_string *out) {
  char text[32];
  return rfi_string_printf(out, "%s%s", rfi_format_double(text, x), unit);
}

static rfr_status format_list(const rfi_config_list *list, rfi_string *out) {
  RFI_TRY(rfi_string_append(out, "[", 1));
  for (int i = 0; i < list->n; i++) {
    if (i) RFI_TRY(rfi_string_append(out, ", ", 2));
    RFI_TRY(format_text(list->items[i], out));
  }
  return rfi_string_append(out, "]", 1);
}

static rfr_status format_numbers(const rfi_config_numbers *numbers, rfi_string *out) {
  RFI_TRY(rfi_string_append(out, "{", 1));
  for (int i = 0; i < numbers->n; i++) {
    if (i) RFI_TRY(rfi_string_append(out, ", ", 2));
    RFI_TRY(format_text(numbers->items[i].match, out));
    RFI_TRY(rfi_string_append(out, ": ", 2));
    RFI_TRY(format_number(numbers->items[i].value, "", out));
  }
  return rfi_string_append(out, "}", 1);
}

static rfr_status format_groups(const rfi_config_groups *groups, rfi_string *out) {
  RFI_TRY(rfi_string_append(out, "[", 1));
  for (int i = 0; i < groups->n; i++) {
    const rfi_config_group *g = &groups->items[i];
    RFI_TRY(rfi_string_printf(out, "%s{match: ", i ? ", " : ""));
    RFI_TRY(format_text(g->match, out));
    RFI_TRY(rfi_string_printf(out, ", weight_decay: "));
    RFI_TRY(format_number(g->weight_decay, "", out));
    RFI_TRY(rfi_string_printf(out, ", lr_scale: "));
    RFI_TRY(format_number(g->lr_scale, "}", out));
  }
  return rfi_string_append(out, "]", 1);
}

static rfr_status format_ramp(const rfi_config_ramp *ramp, rfi_string *out) {
  RFI_TRY(rfi_string_append(out, "[", 1));
  for (int i = 0; i < ramp->n; i++)
    RFI_TRY(rfi_string_printf(out, "%s{until: %lld, tokens: %lld, sequence: %lld}", i ? ", " : "",
                              (long long)ramp->items[i].until, (long long)ramp->items[i].tokens,
                              (long long)ramp->items[i].sequence));
  return rfi_string_append(out, "]", 1);
}

static rfr_status format_choice(const rfi_config_row *row, int i, rfi_string *out) {
  const char *c = row->accepted;
  for (; i > 0; i--) c += strcspn(c, "|") + 1;
  return rfi_string_append(out, c, strcspn(c, "|"));
}

rfr_status rfi_config_format(const rfi_config_row *row, const void *value, rfi_string *out) {
  switch (row->kind) {
    case RFI_KIND_INT:
    case RFI_KIND_SIZE: return rfi_string_printf(out, "%lld", (long long)*(const int64_t *)value);
    case RFI_KIND_FLOAT: return format_number(*(const double *)value, "", out);
    case RFI_KIND_DURATION: return format_number(*(const double *)value, "s", out);
    case RFI_KIND_BOOL: return rfi_string_printf(out, "%s", *(const bool *)value ? "true" : "false");
    case RFI_KIND_STRING: return format_text(*(const char *const *)value, out);
    case RFI_KIND_CHOICE: return format_choice(row, *(const int *)value, out);
    case RFI_KIND_DTYPE: return rfi_string_printf(out, "%s", rfr_dtype_name(*(const rfr_dtype *)value));
    case RFI_KIND_STRINGS: return format_list(value, out);
    case RFI_KIND_GROUPS: return format_groups(value, out);
    case RFI_KIND_RAMP: return format_ramp(value, out);
    case RFI_KIND_NUMBERS: return format_numbers(value, out);
    case RFI_KIND_PAIR: {
      const rfi_config_pair *pair = value;
      RFI_TRY(rfi_string_append(out, "[", 1));
      RFI_TRY(format_number(pair->v[0], ", ", out));
      return format_number(pair->v[1], "]", out);
    }
    case RFI_KIND_AMOUNT: {
      const rfi_config_amount *amount = value;
      return amount->percent ? format_number(amount->value, "%", out)
                             : rfi_string_printf(out, "%lld", (long long)amount->value);
    }
    case RFI_KIND_SPLIT: {
      const rfi_config_split *split = value;
      return split->patterns.n ? format_list(&split->patterns, out) : format_number(split->percent, "%", out);
    }
  }
  return RFR_OK;
}

/* ---- similar names ---- */

enum { MOST_NAME = 48 };

/* Edit distance including transpositions; MOST_NAME for longer names. */
static int distance(const char *a, const char *b) {
  int n = (int)strlen(a), m = (int)strlen(b);
  int rows[3][MOST_NAME + 1], *before = rows[0], *last = rows[1], *row = rows[2];
  if (n > MOST_NAME || m > MOST_NAME) return MOST_NAME;
  for (int j = 0; j <= m; j++) last[j] = j, before[j] = j;
  for (int i = 1; i <= n; i++) {
    row[0] = i;
    for (int j = 1; j <= m; j++) {
      int best = last[j - 1] + (a[i - 1] != b[j - 1]);
      if (last[j] + 1 < best) best = last[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
        best = before[j - 2] + 1;
      row[j] = best;
    }
    int *free_row = before;
    before = last, last = row, row = free_row;
  }
  return last[m];
}

const char *rfi_nearest(const char *name, const char *const *names, int n) {
  const char *best = NULL;
  int least = MOST_NAME, length = (int)strlen(name);
  for (int i = 0; i < n; i++) {
    int d = distance(name, names[i]);
    if (d < least) least = d, best = names[i];
  }
  return least <= (length < 6 ? 1 : length / 3) ? best : NULL;
}
