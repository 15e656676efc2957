/* SPDX-License-Identifier: Apache-2.0
 *
 * Filters and tests, as jinja2 defines them. Filters that jinja2 writes as generators give iterators: their items can
 * be taken once, and they have no length.
 */
#include <math.h>
#include <string.h>

#include "text/template_value.h"

#define FILTER(name) static rfi_tval name(rfi_render *r, const rfi_tval *self, const rfi_targs *args)
#define NONE rfi_tval_none()
#define TEXT_VALUE(s) ((rfi_tval){.kind = RFI_T_TEXT, .as.text = (s)})

/* ---- helpers ---- */

static rfi_tval absent_or(const rfi_tval *v, rfi_tval other) { return v->kind == RFI_T_ABSENT ? other : *v; }

/* The value of an attribute path such as "a.b.0"; texts in lower case if `fold`. */
static rfi_tval attribute_of(rfi_render *r, const rfi_tval *item, const rfi_tval *path, const rfi_tval *otherwise,
                             bool fold) {
  rfi_tval v = *item;
  if (path->kind == RFI_T_TEXT) {
    const rfi_text *s = path->as.text;
    for (uint32_t begin = 0; begin <= s->n && r->status == RFR_OK;) {
      const char *dot = memchr(s->data + begin, '.', s->n - begin);
      const uint32_t end = dot ? (uint32_t)(dot - s->data) : s->n;
      rfi_tval key = rfi_text_slice(r, s, begin, end);
      if (rfi_text_is_class(r, key.as.text, "isdigit")) {
        const char *digits = rfi_text_string(r, key.as.text);
        const double index = digits ? rfi_strtod(digits, NULL) : 0;
        key = rfi_tval_int(index < 0x1p62 ? (int64_t)index : INT64_MAX);
      }
      v = rfi_tval_item(r, &v, &key);
      if (v.kind == RFI_T_UNDEFINED && otherwise && otherwise->kind != RFI_T_ABSENT && otherwise->kind != RFI_T_NONE)
        v = *otherwise;
      begin = end + 1;
    }
  } else if (path->kind != RFI_T_ABSENT && path->kind != RFI_T_NONE) {
    v = rfi_tval_item(r, &v, path);
    if (v.kind == RFI_T_UNDEFINED && otherwise && otherwise->kind != RFI_T_ABSENT && otherwise->kind != RFI_T_NONE)
      v = *otherwise;
  }
  if (fold && v.kind == RFI_T_TEXT) v.as.text = rfi_text_case(r, v.as.text, 'l');
  return v;
}

/* A stable merge sort of items by keys. */
static void sort_items(rfi_render *r, rfi_tval *keys, rfi_tval *items, int64_t n, bool descending, rfi_tval *scratch) {
  if (n < 2 || !rfi_render_step(r, n)) return;
  const int64_t half = n / 2;
  sort_items(r, keys, items, half, descending, scratch);
  sort_items(r, keys + half, items + half, n - half, descending, scratch);
  int64_t i = 0, k = half;
  for (int64_t out = 0; out < n; out++) {
    bool second = i == half;
    if (!second && k < n) {
      /* keys without an order may be equal, because jinja2 compares lists of keys */
      const int order = rfi_tval_equal(r, &keys[k], &keys[i]) ? 0 : rfi_tval_order(r, &keys[k], &keys[i]);
      second = descending ? order == 1 : order == -1;
    }
    const int64_t from = second ? k++ : i++;
    scratch[2 * out] = keys[from];
    scratch[2 * out + 1] = items[from];
  }
  for (int64_t out = 0; out < n; out++) {
    keys[out] = scratch[2 * out];
    items[out] = scratch[2 * out + 1];
  }
}

static rfi_tval sorted_by(rfi_render *r, const rfi_tlist *items, rfi_tval *keys, bool descending) {
  rfi_tlist *list = rfi_tlist_new(r);
  for (int64_t i = 0; i < items->n && r->status == RFR_OK; i++) rfi_tlist_add(r, list, items->items[i]);
  rfi_tval *scratch = rfi_render_alloc(r, (size_t)(2 * items->n + 1) * sizeof *scratch);
  if (scratch && list && r->status == RFR_OK) sort_items(r, keys, list->items, list->n, descending, scratch);
  return rfi_tlist_value(list, RFI_T_LIST);
}

static rfi_tval *keys_of(rfi_render *r, const rfi_tlist *items, const rfi_tval *path, bool fold) {
  rfi_tval *keys = rfi_render_alloc(r, (size_t)(items->n + 1) * sizeof *keys);
  for (int64_t i = 0; keys && i < items->n && r->status == RFR_OK; i++)
    keys[i] = attribute_of(r, &items->items[i], path, NULL, fold);
  return keys;
}

static bool int_of(rfi_render *r, const rfi_tval *v, const char *what, int64_t *out) {
  if (v->kind == RFI_T_ABSENT || rfi_tval_as_int(v, out)) return true;
  rfi_render_fail(r, "%s needs an integer, not %s", what, rfi_tval_type(v));
  return false;
}

/* ---- texts ---- */

FILTER(f_trim) {
  rfi_tval chars;
  if (!rfi_targs_bind(r, "trim", args, "chars", 0, &chars)) return NONE;
  if (chars.kind > RFI_T_NONE && chars.kind != RFI_T_TEXT)
    return rfi_render_fail(r, "trim needs a string, not %s", rfi_tval_type(&chars)), NONE;
  const rfi_text *set = chars.kind == RFI_T_TEXT ? chars.as.text : NULL;
  const rfi_text *s = rfi_tval_str(r, self);
  rfi_text *stripped = rfi_text_strip(r, s, set, true, true);
  return s->safe ? rfi_text_mark_safe(r, stripped) : TEXT_VALUE(stripped);
}

static rfi_tval cased(rfi_render *r, const rfi_tval *self, const rfi_targs *args, int how) {
  rfi_targs_bind(r, "this filter", args, "", 0, NULL);
  const rfi_text *s = rfi_tval_str(r, self);
  rfi_text *result = rfi_text_case(r, s, how);
  return s->safe && how != 'w' ? rfi_text_mark_safe(r, result) : TEXT_VALUE(result);
}

FILTER(f_upper) { return cased(r, self, args, 'u'); }
FILTER(f_lower) { return cased(r, self, args, 'l'); }
FILTER(f_capitalize) { return cased(r, self, args, 'c'); }
FILTER(f_title) { return cased(r, self, args, 'w'); }

FILTER(f_string) {
  rfi_targs_bind(r, "string", args, "", 0, NULL);
  return TEXT_VALUE(rfi_tval_str(r, self));
}

FILTER(f_safe) {
  rfi_targs_bind(r, "safe", args, "", 0, NULL);
  return rfi_text_mark_safe(r, rfi_tval_str(r, self));
}

FILTER(f_escape) {
  rfi_targs_bind(r, "escape", args, "", 0, NULL);
  return rfi_text_mark_safe(r, rfi_text_escape(r, rfi_tval_str(r, self)));
}

FILTER(f_replace) {
  rfi_tval v[3];
  int64_t count = -1;
  if (!rfi_targs_bind(r, "replace", args, "old new count", 2, v)) return NONE;
  if (v[2].kind != RFI_T_NONE && !int_of(r, &v[2], "replace", &count)) return NONE;
  return TEXT_VALUE(rfi_text_replace(r, rfi_tval_str(r, self), rfi_tval_str(r, &v[0]), rfi_tval_str(r, &v[1]), count));
}

FILTER(f_join) {
  rfi_tval v[2];
  if (!rfi_targs_bind(r, "join", args, "d attribute", 0, v)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  const rfi_text *between = v[0].kind == RFI_T_ABSENT ? NULL : rfi_tval_str(r, &v[0]);
  rfi_tbuilder b = {.r = r};
  for (int64_t i = 0; items && i < items->n && rfi_render_step(r, 1); i++) {
    const rfi_tval item = attribute_of(r, &items->items[i], &v[1], NULL, false);
    if (i > 0 && between) rfi_tbuilder_add_text(&b, between, 0, between->n);
    rfi_tval_print(&b, &item);
  }
  return rfi_tbuilder_finish(&b);
}

FILTER(f_indent) {
  rfi_tval v[3];
  int64_t width = 4;
  if (!rfi_targs_bind(r, "indent", args, "width first blank", 0, v)) return NONE;
  if (self->kind != RFI_T_TEXT) return rfi_render_fail(r, "indent needs a string, not %s", rfi_tval_type(self)), NONE;
  rfi_tbuilder blanks = {.r = r}, b = {.r = r};
  if (v[0].kind == RFI_T_TEXT) rfi_tval_print(&blanks, &v[0]);
  else if (!int_of(r, &v[0], "indent", &width)) return NONE;
  for (int64_t i = 0; v[0].kind != RFI_T_TEXT && i < width && rfi_render_step(r, 1); i++)
    rfi_tbuilder_add(&blanks, " ", 1, 0);
  const rfi_text *indent = rfi_tbuilder_finish(&blanks).as.text;
  rfi_tbuilder with_end = {.r = r};
  rfi_tval_print(&with_end, self);
  rfi_tbuilder_add(&with_end, "\n", 1, 0);
  const rfi_tlist *lines = rfi_text_lines(r, rfi_tbuilder_finish(&with_end).as.text, false);
  for (int64_t i = 0; lines && i < lines->n && rfi_render_step(r, 1); i++) {
    const rfi_text *line = lines->items[i].as.text;
    if (i > 0) rfi_tbuilder_add(&b, "\n", 1, 0);
    if (i == 0 ? rfi_tval_truth(&v[1]) : line->n > 0 || rfi_tval_truth(&v[2]))
      rfi_tbuilder_add_text(&b, indent, 0, indent->n);
    rfi_tbuilder_add_text(&b, line, 0, line->n);
  }
  return rfi_tbuilder_finish(&b);
}

FILTER(f_format) {
  rfi_tlist *list = rfi_tlist_new(r);
  if (args && args->n_named > 0 && args->n > 0)
    return rfi_render_fail(r, "format takes arguments with or without names, not both"), NONE;
  if (args && args->n_named > 0) {
    rfi_tdict *d = rfi_tdict_new(r);
    for (int i = 0; i < args->n_named; i++)
      rfi_tdict_set(r, d, rfi_text_new(r, args->names[i], strlen(args->names[i]), 0), args->named[i]);
    const rfi_tval v = {.kind = RFI_T_DICT, .as.dict = d};
    return d ? rfi_text_format(r, rfi_tval_str(r, self), &v) : NONE;
  }
  for (int i = 0; args && i < args->n; i++) rfi_tlist_add(r, list, args->items[i]);
  const rfi_tval v = rfi_tlist_value(list, RFI_T_TUPLE);
  return list ? rfi_text_format(r, rfi_tval_str(r, self), &v) : NONE;
}

/* ---- numbers ---- */

/* A decimal number as Python's int() and float() read it: blanks around it, "_" between digits. */
static bool parse_number(rfi_render *r, const rfi_text *s, char out[128]) {
  const rfi_text *t = rfi_text_strip(r, s, NULL, true, true);
  size_t n = 0;
  for (uint32_t i = 0; i < t->n; i++) {
    const bool digits = i > 0 && i + 1 < t->n && t->data[i - 1] >= '0' && t->data[i - 1] <= '9' &&
                        t->data[i + 1] >= '0' && t->data[i + 1] <= '9';
    if (t->data[i] == '_' && digits) continue;
    if (n == 127 || t->data[i] == '_' || (unsigned char)t->data[i] >= 0x80) return false;
    out[n++] = t->data[i];
  }
  out[n] = 0;
  return n > 0;
}

static bool parse_int(const char *text, int64_t *out) {
  const bool negative = *text == '-';
  int64_t value = 0;
  if (*text == '-' || *text == '+') text++;
  if (!*text) return false;
  for (; *text; text++)
    if (*text < '0' || *text > '9' || __builtin_mul_overflow(value, 10, &value) ||
        __builtin_sub_overflow(value, *text - '0', &value))
      return false;
  if (!negative && value == INT64_MIN) return false;
  *out = negative ? value : -value;
  return true;
}

static bool parse_float(const char *text, double *out) {
  char *end;
  const char *c = text + (*text == '-' || *text == '+');
  static const char *const words[] = {"inf", "infinity", "nan"};
  bool word = false;
  for (int i = 0; i < 3; i++) word |= strcasecmp(c, words[i]) == 0;
  if (!word && ((*c < '0' || *c > '9') && *c != '.')) return false;
  if (!word && strpbrk(c, "xXpPnN")) return false;
  *out = rfi_strtod(text, &end);
  return *end == 0;
}

static bool in_range(double f) { return f > -9.2233720368547758e18 && f < 9.2233720368547758e18; }

FILTER(f_int) {
  rfi_tval v[2];
  char text[128];
  int64_t i;
  double f;
  if (!rfi_targs_bind(r, "int", args, "default base", 0, v)) return NONE;
  const rfi_tval otherwise = absent_or(&v[0], rfi_tval_int(0));
  if (rfi_tval_as_int(self, &i)) return rfi_tval_int(i);
  if (self->kind == RFI_T_UNDEFINED) return rfi_render_fail(r, "int of an undefined value"), NONE;
  if (v[1].kind != RFI_T_ABSENT && !(rfi_tval_as_int(&v[1], &i) && i == 10))
    return rfi_render_fail(r, "int: bases other than 10 are not supported"), NONE;
  if (self->kind == RFI_T_FLOAT) {
    if (isnan(self->as.f) || isinf(self->as.f)) {
      if (isinf(self->as.f)) return rfi_render_fail(r, "int of an infinite number"), NONE;
      return otherwise;
    }
    if (!in_range(self->as.f)) return rfi_render_fail(r, "an integer does not fit in 64 bits"), NONE;
    return rfi_tval_int((int64_t)self->as.f);
  }
  if (self->kind != RFI_T_TEXT || !parse_number(r, self->as.text, text)) return otherwise;
  if (parse_int(text, &i)) return rfi_tval_int(i);
  if (!parse_float(text, &f) || isnan(f) || isinf(f)) return otherwise;
  if (!in_range(f)) return rfi_render_fail(r, "an integer does not fit in 64 bits"), NONE;
  return rfi_tval_int((int64_t)f);
}

FILTER(f_float) {
  rfi_tval v;
  char text[128];
  double f;
  if (!rfi_targs_bind(r, "float", args, "default", 0, &v)) return NONE;
  if (rfi_tval_is_number(self)) return rfi_tval_float(rfi_tval_as_float(self));
  if (self->kind == RFI_T_UNDEFINED) return rfi_render_fail(r, "float of an undefined value"), NONE;
  if (self->kind == RFI_T_TEXT && parse_number(r, self->as.text, text) && parse_float(text, &f))
    return rfi_tval_float(f);
  return absent_or(&v, rfi_tval_float(0));
}

FILTER(f_abs) {
  rfi_targs_bind(r, "abs", args, "", 0, NULL);
  if (self->kind == RFI_T_FLOAT) return rfi_tval_float(fabs(self->as.f));
  int64_t i;
  if (!rfi_tval_as_int(self, &i)) return rfi_render_fail(r, "abs needs a number, not %s", rfi_tval_type(self)), NONE;
  const rfi_tval v = rfi_tval_int(i);
  return i < 0 ? rfi_tval_negate(r, &v) : v;
}

/* Python's round: to the nearest decimal, ties of the exact value to even. */
static double round_to(double f, int64_t digits) {
  char text[512];
  if (digits > 300 || !isfinite(f)) return f;
  if (digits >= 0) {
    rfi_snprintf(text, sizeof text, "%.*f", (int)digits, f);
    return rfi_strtod(text, NULL);
  }
  const double power = pow(10, (double)-digits);
  return nearbyint(f / power) * power;
}

FILTER(f_round) {
  rfi_tval v[2];
  int64_t precision = 0;
  if (!rfi_targs_bind(r, "round", args, "precision method", 0, v) || !int_of(r, &v[0], "round", &precision))
    return NONE;
  const rfi_text *method = v[1].kind == RFI_T_TEXT ? v[1].as.text : NULL;
  if (!rfi_tval_is_number(self)) return rfi_render_fail(r, "round needs a number, not %s", rfi_tval_type(self)), NONE;
  if (v[1].kind != RFI_T_ABSENT &&
      (!method || !(rfi_text_is(method, "common") || rfi_text_is(method, "ceil") || rfi_text_is(method, "floor"))))
    return rfi_render_fail(r, "round: the method is common, ceil or floor"), NONE;
  if (!method || rfi_text_is(method, "common")) {
    int64_t i;
    if (!rfi_tval_as_int(self, &i)) return rfi_tval_float(round_to(self->as.f, precision));
    if (precision >= 0) return rfi_tval_int(i);
    return rfi_render_fail(r, "round of an integer to tens is not supported"), NONE;
  }
  if (precision < 0 || precision > 15) return rfi_render_fail(r, "round: precisions are 0 to 15"), NONE;
  const double power = pow(10, (double)precision), x = rfi_tval_as_float(self) * power;
  return rfi_tval_float((rfi_text_is(method, "ceil") ? ceil(x) : floor(x)) / power);
}

/* ---- sequences ---- */

FILTER(f_length) {
  rfi_targs_bind(r, "length", args, "", 0, NULL);
  return rfi_tval_int(rfi_tval_length(r, self));
}

FILTER(f_list) {
  rfi_targs_bind(r, "list", args, "", 0, NULL);
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tlist *list = rfi_tlist_new(r);
  for (int64_t i = 0; items && i < items->n && r->status == RFR_OK; i++) rfi_tlist_add(r, list, items->items[i]);
  if (list && items) list->foreign = self->kind == RFI_T_LIST && items->foreign;
  return rfi_tlist_value(list, RFI_T_LIST);
}

FILTER(f_first) {
  rfi_targs_bind(r, "first", args, "", 0, NULL);
  if (self->kind == RFI_T_ITERATOR) {
    rfi_titerator *it = self->as.iterator;
    return it->next < it->list->n ? it->list->items[it->next++] : rfi_tval_undefined("first item of a sequence");
  }
  const rfi_tlist *items = rfi_tval_items(r, self);
  return items && items->n > 0 ? items->items[0] : rfi_tval_undefined("first item of a sequence");
}

FILTER(f_last) {
  rfi_targs_bind(r, "last", args, "", 0, NULL);
  if (self->kind == RFI_T_ITERATOR) return rfi_render_fail(r, "last does not work with a generator; use list"), NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  return items && items->n > 0 ? items->items[items->n - 1] : rfi_tval_undefined("last item of a sequence");
}

FILTER(f_reverse) {
  rfi_targs_bind(r, "reverse", args, "", 0, NULL);
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tlist *list = rfi_tlist_new(r);
  for (int64_t i = items ? items->n : 0; i > 0 && r->status == RFR_OK; i--) rfi_tlist_add(r, list, items->items[i - 1]);
  if (self->kind == RFI_T_ITERATOR) return rfi_tlist_value(list, RFI_T_LIST);
  if (self->kind != RFI_T_TEXT) return rfi_titerator_new(r, list);
  rfi_tbuilder b = {.r = r};
  for (int64_t i = 0; list && i < list->n; i++) rfi_tval_print(&b, &list->items[i]);
  return rfi_tbuilder_finish(&b);
}

FILTER(f_sort) {
  rfi_tval v[3];
  if (!rfi_targs_bind(r, "sort", args, "reverse case_sensitive attribute", 0, v)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  if (!items) return NONE;
  const bool fold = !rfi_tval_truth(&v[1]);
  if (v[2].kind == RFI_T_TEXT && memchr(v[2].as.text->data, ',', v[2].as.text->n)) {
    const rfi_tval comma = rfi_text_new(r, ",", 1, 0);
    rfi_targs by = {.items = (rfi_tval *)&comma, .n = 1};
    static const rfi_text split_name = {.data = "split", .n = 5, .chars = 5};
    const rfi_tval paths = rfi_text_method(&split_name)(r, &v[2], &by);
    rfi_tval *keys = rfi_render_alloc(r, (size_t)(items->n + 1) * sizeof *keys);
    for (int64_t i = 0; keys && i < items->n && r->status == RFR_OK; i++) {
      rfi_tlist *key = rfi_tlist_new(r);
      for (int64_t k = 0; k < paths.as.list->n; k++)
        rfi_tlist_add(r, key, attribute_of(r, &items->items[i], &paths.as.list->items[k], NULL, fold));
      keys[i] = rfi_tlist_value(key, RFI_T_LIST);
    }
    return keys ? sorted_by(r, items, keys, rfi_tval_truth(&v[0])) : NONE;
  }
  rfi_tval *keys = keys_of(r, items, &v[2], fold);
  return keys ? sorted_by(r, items, keys, rfi_tval_truth(&v[0])) : NONE;
}

FILTER(f_dictsort) {
  rfi_tval v[3];
  if (!rfi_targs_bind(r, "dictsort", args, "case_sensitive by reverse", 0, v)) return NONE;
  if (self->kind != RFI_T_DICT)
    return rfi_render_fail(r, "dictsort needs a dictionary, not %s", rfi_tval_type(self)), NONE;
  const bool by_value = v[1].kind == RFI_T_TEXT && rfi_text_is(v[1].as.text, "value");
  if (v[1].kind != RFI_T_ABSENT && !by_value && !(v[1].kind == RFI_T_TEXT && rfi_text_is(v[1].as.text, "key")))
    return rfi_render_fail(r, "dictsort sorts by key or value"), NONE;
  const rfi_tdict *d = self->as.dict;
  rfi_tlist *pairs = rfi_tlist_new(r);
  for (int64_t i = 0; i < d->n && r->status == RFR_OK; i++)
    rfi_tlist_add(r, pairs, rfi_ttuple_of(r, d->items[2 * i], d->items[2 * i + 1]));
  const rfi_tval path = rfi_tval_int(by_value);
  rfi_tval *keys = pairs ? keys_of(r, pairs, &path, !rfi_tval_truth(&v[0])) : NULL;
  return keys ? sorted_by(r, pairs, keys, rfi_tval_truth(&v[2])) : NONE;
}

FILTER(f_unique) {
  rfi_tval v[2];
  if (!rfi_targs_bind(r, "unique", args, "case_sensitive attribute", 0, v)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tval *keys = items ? keys_of(r, items, &v[1], !rfi_tval_truth(&v[0])) : NULL;
  rfi_tdict *seen = rfi_tdict_new(r);
  rfi_tlist *list = rfi_tlist_new(r);
  for (int64_t i = 0; keys && seen && i < items->n && rfi_render_step(r, 1); i++) {
    if (rfi_tdict_find(r, seen, &keys[i])) continue;
    rfi_tdict_set(r, seen, keys[i], NONE);
    rfi_tlist_add(r, list, items->items[i]);
  }
  return rfi_titerator_new(r, list);
}

static rfi_tval extreme(rfi_render *r, const rfi_tval *self, const rfi_targs *args, int wanted) {
  rfi_tval v[2];
  if (!rfi_targs_bind(r, "min", args, "case_sensitive attribute", 0, v)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tval *keys = items ? keys_of(r, items, &v[1], !rfi_tval_truth(&v[0])) : NULL;
  if (!keys) return NONE;
  if (items->n == 0) return rfi_tval_undefined("item of an empty sequence");
  int64_t best = 0;
  for (int64_t i = 1; i < items->n && rfi_render_step(r, 1); i++)
    if (rfi_tval_order(r, &keys[i], &keys[best]) == wanted) best = i;
  return items->items[best];
}

FILTER(f_min) { return extreme(r, self, args, -1); }
FILTER(f_max) { return extreme(r, self, args, 1); }

FILTER(f_sum) {
  rfi_tval v[2];
  if (!rfi_targs_bind(r, "sum", args, "attribute start", 0, v)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tval sum = absent_or(&v[1], rfi_tval_int(0));
  if (sum.kind == RFI_T_TEXT) return rfi_render_fail(r, "sum does not add strings; use join"), NONE;
  for (int64_t i = 0; items && i < items->n && rfi_render_step(r, 1); i++) {
    const rfi_tval item = attribute_of(r, &items->items[i], &v[0], NULL, false);
    sum = rfi_tval_binary(r, '+', &sum, &item);
  }
  return sum;
}

FILTER(f_items) {
  rfi_targs_bind(r, "items", args, "", 0, NULL);
  rfi_tlist *list = rfi_tlist_new(r);
  if (self->kind == RFI_T_UNDEFINED) return rfi_titerator_new(r, list);
  if (self->kind != RFI_T_DICT)
    return rfi_render_fail(r, "items needs a dictionary, not %s", rfi_tval_type(self)), NONE;
  for (int64_t i = 0; i < self->as.dict->n && r->status == RFR_OK; i++)
    rfi_tlist_add(r, list, rfi_ttuple_of(r, self->as.dict->items[2 * i], self->as.dict->items[2 * i + 1]));
  return rfi_titerator_new(r, list);
}

FILTER(f_batch) {
  rfi_tval v[2];
  int64_t count = 0;
  if (!rfi_targs_bind(r, "batch", args, "linecount fill_with", 1, v) || !int_of(r, &v[0], "batch", &count)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tlist *list = rfi_tlist_new(r), *row = NULL;
  for (int64_t i = 0; items && i < items->n && rfi_render_step(r, 1); i++) {
    if (!row) row = rfi_tlist_new(r);
    else if (row->n == count) {
      rfi_tlist_add(r, list, rfi_tlist_value(row, RFI_T_LIST));
      row = rfi_tlist_new(r);
    }
    rfi_tlist_add(r, row, items->items[i]);
  }
  while (row && v[1].kind > RFI_T_NONE && row->n < count && rfi_render_step(r, 1)) rfi_tlist_add(r, row, v[1]);
  if (row) rfi_tlist_add(r, list, rfi_tlist_value(row, RFI_T_LIST));
  return rfi_titerator_new(r, list);
}

FILTER(f_slice) {
  rfi_tval v[2];
  int64_t count = 0;
  if (!rfi_targs_bind(r, "slice", args, "slices fill_with", 1, v) || !int_of(r, &v[0], "slice", &count)) return NONE;
  const rfi_tlist *items = rfi_tval_items(r, self);
  rfi_tlist *list = rfi_tlist_new(r);
  if (count <= 0 || !items) return rfi_render_fail(r, "slice needs a positive number"), NONE;
  const int64_t each = items->n / count, extra = items->n % count;
  for (int64_t i = 0, at = 0; i < count && rfi_render_step(r, 1); i++) {
    rfi_tlist *part = rfi_tlist_new(r);
    for (int64_t end = at + each + (i < extra); at < end && r->status == RFR_OK; at++)
      rfi_tlist_add(r, part, items->items[at]);
    if (v[1].kind > RFI_T_NONE && i >= extra) rfi_tlist_add(r, part, v[1]);
    rfi_tlist_add(r, list, rfi_tlist_value(part, RFI_T_LIST));
  }
  return rfi_titerator_new(r, list);
}

FILTER(f_default) {
  rfi_tval v[2];
  if (!rfi_targs_bind(r, "default", args, "default_value boolean", 0, v)) return NONE;
  if (self->kind != RFI_T_UNDEFINED && !(rfi_tval_truth(&v[1]) && !rfi_tval_truth(self))) return *self;
  return absent_or(&v[0], rfi_text_new(r, "", 0, 0));
}

FILTER(f_attr) {
  rfi_tval name;
  if (!rfi_targs_bind(r, "attr", args, "name", 1, &name)) return NONE;
  if (self->kind == RFI_T_DICT || name.kind != RFI_T_TEXT) {
    bool refused = false;
    const rfi_tfunction method = name.kind == RFI_T_TEXT ? rfi_tmethod_find(r, self, name.as.text, &refused) : NULL;
    return method ? rfi_tmethod_new(r, self, method) : rfi_tval_undefined("attribute");
  }
  rfi_text copy = *name.as.text;
  copy.data = rfi_text_string(r, name.as.text);
  return copy.data ? rfi_tval_attribute(r, self, &copy) : NONE;
}

/* The arguments after the first `n`. */
static rfi_targs rest_of(const rfi_targs *args, int n) {
  rfi_targs rest = *args;
  rest.items += n;
  rest.n -= n;
  return rest;
}

static const char *name_argument(rfi_render *r, const rfi_tval *v, const char *what) {
  if (v->kind == RFI_T_TEXT) return rfi_text_string(r, v->as.text);
  return rfi_render_fail(r, "%s needs the name of a filter or test", what);
}

FILTER(f_map) {
  rfi_tlist *list = rfi_tlist_new(r);
  if (!rfi_tval_truth(self) || !list) return rfi_titerator_new(r, list);
  const rfi_tlist *items = rfi_tval_items(r, self);
  if (!items || !args) return args ? NONE : (rfi_render_fail(r, "map needs a filter or attribute="), NONE);
  if (args->n == 0) {
    rfi_tval v[2];
    if (!rfi_targs_bind(r, "map", args, "attribute default", 1, v)) return NONE;
    for (int64_t i = 0; i < items->n && rfi_render_step(r, 1); i++)
      rfi_tlist_add(r, list, attribute_of(r, &items->items[i], &v[0], &v[1], false));
    return rfi_titerator_new(r, list);
  }
  const char *name = name_argument(r, &args->items[0], "map");
  const rfi_targs rest = rest_of(args, 1);
  for (int64_t i = 0; name && i < items->n && rfi_render_step(r, 1); i++)
    rfi_tlist_add(r, list, rfi_filter_call(r, name, &items->items[i], &rest));
  return rfi_titerator_new(r, list);
}

static rfi_tval selected(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool wanted, bool by_attribute) {
  rfi_tlist *list = rfi_tlist_new(r);
  if (!rfi_tval_truth(self) || !list) return rfi_titerator_new(r, list);
  const rfi_tlist *items = rfi_tval_items(r, self);
  const int skip = by_attribute, n = args ? args->n : 0;
  if (!items) return NONE;
  if (n < skip) return rfi_render_fail(r, "selectattr needs the name of an attribute"), NONE;
  const char *name = n > skip ? name_argument(r, &args->items[skip], "select") : NULL;
  const rfi_targs rest = n > skip ? rest_of(args, skip + 1) : (rfi_targs){0};
  for (int64_t i = 0; i < items->n && rfi_render_step(r, 1); i++) {
    const rfi_tval v = by_attribute ? attribute_of(r, &items->items[i], &args->items[0], NULL, false) : items->items[i];
    const bool holds = n > skip ? name && rfi_test_call(r, name, &v, &rest) : rfi_tval_truth(&v);
    if (holds == wanted) rfi_tlist_add(r, list, items->items[i]);
  }
  list->foreign = false;
  return rfi_titerator_new(r, list);
}

FILTER(f_select) { return selected(r, self, args, true, false); }
FILTER(f_reject) { return selected(r, self, args, false, false); }
FILTER(f_selectattr) { return selected(r, self, args, true, true); }
FILTER(f_rejectattr) { return selected(r, self, args, false, true); }

FILTER(f_center) {
  static const rfi_text name = {.data = "center", .n = 6, .chars = 6};
  rfi_tval width = rfi_tval_int(80), v;
  if (!rfi_targs_bind(r, "center", args, "width", 0, &v)) return NONE;
  width = absent_or(&v, width);
  const rfi_tval s = TEXT_VALUE(rfi_tval_str(r, self));
  const rfi_targs one = {.items = &width, .n = 1};
  return rfi_text_method(&name)(r, &s, &one);
}

FILTER(f_wordcount) {
  rfi_targs_bind(r, "wordcount", args, "", 0, NULL);
  const rfi_text *s = rfi_tval_str(r, self);
  int64_t n = 0;
  bool inside = false;
  for (uint32_t i = 0, size; i < s->n && rfi_render_step(r, 1); i += size) {
    const int32_t c = rfi_utf8_at(s->data + i, s->n - i, &size);
    const rfi_text one = {.data = s->data + i, .n = size};
    const bool word = c == '_' || rfi_text_is_class(r, &one, "isalnum");
    n += word && !inside;
    inside = word;
  }
  return rfi_tval_int(n);
}

static const struct {
  const char *name;
  rfi_tfunction call;
} filters[] = {
    {"abs", f_abs},
    {"attr", f_attr},
    {"batch", f_batch},
    {"capitalize", f_capitalize},
    {"center", f_center},
    {"count", f_length},
    {"d", f_default},
    {"default", f_default},
    {"dictsort", f_dictsort},
    {"e", f_escape},
    {"escape", f_escape},
    {"first", f_first},
    {"float", f_float},
    {"format", f_format},
    {"indent", f_indent},
    {"int", f_int},
    {"items", f_items},
    {"join", f_join},
    {"last", f_last},
    {"length", f_length},
    {"list", f_list},
    {"lower", f_lower},
    {"map", f_map},
    {"max", f_max},
    {"min", f_min},
    {"reject", f_reject},
    {"rejectattr", f_rejectattr},
    {"replace", f_replace},
    {"reverse", f_reverse},
    {"round", f_round},
    {"safe", f_safe},
    {"select", f_select},
    {"selectattr", f_selectattr},
    {"slice", f_slice},
    {"sort", f_sort},
    {"string", f_string},
    {"sum", f_sum},
    {"title", f_title},
    {"tojson", rfi_tval_to_json},
    {"trim", f_trim},
    {"unique", f_unique},
    {"upper", f_upper},
    {"wordcount", f_wordcount},
};

rfi_tval rfi_filter_call(rfi_render *r, const char *name, const rfi_tval *value, const rfi_targs *args) {
  if (!rfi_render_step(r, 1)) return NONE;
  if (r->depth >= RFI_RENDER_DEPTH) /* map('map', 'map', ...) */
    return rfi_render_limit(r, "filters are nested more than %d levels deep", RFI_RENDER_DEPTH), NONE;
  for (size_t i = 0; i < sizeof filters / sizeof *filters; i++) {
    if (strcmp(filters[i].name, name) != 0) continue;
    r->depth++;
    const rfi_tval v = filters[i].call(r, value, args);
    r->depth--;
    return v;
  }
  rfi_render_fail(r, "unknown filter \"%s\"", name);
  return NONE;
}

/* ---- tests ---- */

static bool is_filter(const rfi_text *name) {
  for (size_t i = 0; i < sizeof filters / sizeof *filters; i++)
    if (rfi_text_is(name, filters[i].name)) return true;
  return false;
}

/* "==" and so on by their names: a token type, or 0. */
static int comparison(const char *name) {
  static const struct {
    const char *names;
    int op;
  } rows[] = {{"== eq equalto", RFI_TOKEN_EQ}, {"!= ne", RFI_TOKEN_NE}, {"> gt greaterthan", '>'},
              {">= ge", RFI_TOKEN_GE},         {"< lt lessthan", '<'},  {"<= le", RFI_TOKEN_LE}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if (rfi_has_word(rows[i].names, name)) return rows[i].op;
  return 0;
}

static bool compare(rfi_render *r, int op, const rfi_tval *a, const rfi_tval *b) {
  if (op == RFI_TOKEN_EQ) return rfi_tval_equal(r, a, b);
  if (op == RFI_TOKEN_NE) return !rfi_tval_equal(r, a, b);
  const int order = rfi_tval_order(r, a, b);
  return op == '<'            ? order == -1
         : op == '>'          ? order == 1
         : op == RFI_TOKEN_LE ? order == -1 || order == 0
                              : order == 1 || order == 0;
}

static bool remainder_is(rfi_render *r, const rfi_tval *v, int64_t by, int64_t wanted) {
  const rfi_tval divisor = rfi_tval_int(by), rest = rfi_tval_binary(r, '%', v, &divisor),
                 expected = rfi_tval_int(wanted);
  return rfi_tval_equal(r, &rest, &expected);
}

bool rfi_test_call(rfi_render *r, const char *name, const rfi_tval *v, const rfi_targs *args) {
  const int op = comparison(name);
  const bool binary = op != 0 || rfi_has_word("in divisibleby sameas", name);
  rfi_tval a;
  int64_t i;
  if (!rfi_render_step(r, 1) || !rfi_targs_bind(r, name, args, binary ? "other" : "", binary, &a)) return false;
  if (op) return compare(r, op, v, &a);
  if (strcmp(name, "defined") == 0) return v->kind != RFI_T_UNDEFINED;
  if (strcmp(name, "undefined") == 0) return v->kind == RFI_T_UNDEFINED;
  if (strcmp(name, "none") == 0) return v->kind == RFI_T_NONE;
  if (strcmp(name, "string") == 0) return v->kind == RFI_T_TEXT;
  if (strcmp(name, "mapping") == 0) return v->kind == RFI_T_DICT;
  if (strcmp(name, "iterable") == 0) return rfi_tval_is_iterable(v);
  if (strcmp(name, "sequence") == 0)
    return v->kind == RFI_T_UNDEFINED || v->kind == RFI_T_DICT || (v->kind >= RFI_T_TEXT && v->kind <= RFI_T_RANGE);
  if (strcmp(name, "number") == 0) return rfi_tval_is_number(v);
  if (strcmp(name, "integer") == 0) return v->kind == RFI_T_INT;
  if (strcmp(name, "float") == 0) return v->kind == RFI_T_FLOAT;
  if (strcmp(name, "boolean") == 0) return v->kind == RFI_T_BOOL;
  if (strcmp(name, "true") == 0) return v->kind == RFI_T_BOOL && v->as.b;
  if (strcmp(name, "false") == 0) return v->kind == RFI_T_BOOL && !v->as.b;
  if (strcmp(name, "callable") == 0)
    return v->kind == RFI_T_MACRO || v->kind == RFI_T_METHOD || v->kind == RFI_T_FUNCTION || v->kind == RFI_T_JOINER ||
           v->kind == RFI_T_UNDEFINED;
  if (strcmp(name, "odd") == 0) return remainder_is(r, v, 2, 1);
  if (strcmp(name, "even") == 0) return remainder_is(r, v, 2, 0);
  if (strcmp(name, "divisibleby") == 0) {
    if (rfi_tval_as_int(&a, &i)) return remainder_is(r, v, i, 0);
    const rfi_tval zero = rfi_tval_int(0), rest = rfi_tval_binary(r, '%', v, &a);
    return rfi_tval_equal(r, &rest, &zero);
  }
  if (strcmp(name, "in") == 0) return rfi_tval_contains(r, &a, v);
  if (strcmp(name, "lower") == 0) return rfi_text_is_class(r, rfi_tval_str(r, v), "islower");
  if (strcmp(name, "upper") == 0) return rfi_text_is_class(r, rfi_tval_str(r, v), "isupper");
  if (strcmp(name, "escaped") == 0) return v->kind == RFI_T_TEXT && v->as.text->safe;
  if (strcmp(name, "filter") == 0) return v->kind == RFI_T_TEXT && is_filter(v->as.text);
  if (strcmp(name, "sameas") == 0) {
    if (v->kind != a.kind) return false;
    if (v->kind == RFI_T_NONE) return true;
    if (v->kind == RFI_T_BOOL) return v->as.b == a.as.b;
    if (v->kind > RFI_T_TEXT) return v->as.dict == a.as.dict;
    rfi_render_fail(r, "sameas of numbers and strings depends on the interpreter");
    return false;
  }
  rfi_render_fail(r, "unknown test \"%s\"", name);
  return false;
}
