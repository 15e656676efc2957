/* SPDX-License-Identifier: Apache-2.0
 *
 * Values of a running template: texts with flags, lists, dictionaries, equality, order and what they print.
 */
#include "text/template_value.h"

#include <float.h>
#include <math.h>
#include <string.h>
#include <utf8proc.h>

static void *latch(rfi_render *r, rfi_error error, const char *format, va_list args) {
  char text[1024];
  if (r->status != RFR_OK) return NULL;
  rfi_vsnprintf(text, sizeof text, format, args);
  r->status = rfi_template_fail(r->t, error, r->at, "%s", text);
  return NULL;
}

void *rfi_render_fail(rfi_render *r, const char *format, ...) {
  va_list args;
  va_start(args, format);
  latch(r, RFI_E_TEMPLATE_RENDER, format, args);
  va_end(args);
  return NULL;
}

void *rfi_render_limit(rfi_render *r, const char *format, ...) {
  va_list args;
  va_start(args, format);
  latch(r, RFI_E_TEMPLATE_LIMIT, format, args);
  va_end(args);
  return NULL;
}

bool rfi_render_step(rfi_render *r, int64_t steps) {
  if (r->status != RFR_OK) return false;
  r->steps += steps;
  if (r->steps <= RFI_RENDER_STEPS) return true;
  rfi_render_limit(r, "the template takes more than %d steps", RFI_RENDER_STEPS);
  return false;
}

void *rfi_render_alloc(rfi_render *r, size_t bytes) {
  if (r->status != RFR_OK) return NULL;
  if (bytes > RFI_RENDER_BYTES || (r->bytes += bytes) > RFI_RENDER_BYTES)
    return rfi_render_limit(r, "the template takes more than %d bytes of memory", RFI_RENDER_BYTES);
  void *memory = rfi_arena_alloc(r->arena, bytes);
  if (!memory) r->status = rfr_last_error()->status;
  return memory;
}

/* ---- UTF-8 ---- */

int32_t rfi_utf8_at(const char *s, size_t n, uint32_t *size) {
  const unsigned char *u = (const unsigned char *)s;
  if (u[0] < 0x80 || n < 2) return *size = 1, u[0];
  if (u[0] < 0xE0 || n < 3) return *size = 2, (u[0] & 0x1F) << 6 | (u[1] & 0x3F);
  if (u[0] < 0xF0 || n < 4) return *size = 3, (u[0] & 0x0F) << 12 | (u[1] & 0x3F) << 6 | (u[2] & 0x3F);
  return *size = 4, (u[0] & 0x07) << 18 | (u[1] & 0x3F) << 12 | (u[2] & 0x3F) << 6 | (u[3] & 0x3F);
}

/* Python's str.isspace and the "\s" of its regular expressions. */
bool rfi_unicode_is_space(int32_t c) {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* ---- texts ---- */

/* Shared by all; its count is already known, so it is never written. */
static const rfi_text empty_text = {.data = "", .chars = 0};

rfi_text *rfi_text_constant(rfi_arena *arena, const char *data, uint32_t n) {
  rfi_text *s = rfi_arena_alloc(arena, sizeof *s);
  if (!s) return NULL;
  *s = (rfi_text){.data = data, .n = n, .chars = 0};
  for (uint32_t i = 0; i < n; i++) s->chars += ((unsigned char)data[i] & 0xC0) != 0x80;
  return s;
}

rfi_tval rfi_text_new(rfi_render *r, const char *data, size_t n, uint32_t flags) {
  rfi_text *s = NULL;
  if (n > RFI_RENDER_OUTPUT) rfi_render_limit(r, "a text has more than %d bytes", RFI_RENDER_OUTPUT);
  else s = rfi_render_alloc(r, sizeof *s);
  if (!s) return (rfi_tval){.kind = RFI_T_TEXT, .as.text = (rfi_text *)&empty_text};
  *s = (rfi_text){.data = data, .n = (uint32_t)n, .flags = flags, .chars = -1};
  return (rfi_tval){.kind = RFI_T_TEXT, .as.text = s};
}

rfi_tval rfi_text_copy(rfi_render *r, const char *data, size_t n, uint32_t flags) {
  char *copy = rfi_render_alloc(r, n);
  if (copy) memcpy(copy, data, n);
  return rfi_text_new(r, copy, copy ? n : 0, flags);
}

/* Finds the run that contains a byte, by bisection. */
static int run_at(const rfi_text *s, size_t byte) {
  int low = 0, high = s->n_runs - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (s->runs[middle].end <= byte) low = middle + 1;
    else high = middle;
  }
  return low;
}

uint32_t rfi_text_flags_at(const rfi_text *s, size_t byte) {
  return s->n_runs == 0 ? s->flags : s->runs[run_at(s, byte)].flags;
}

rfi_tval rfi_text_slice(rfi_render *r, const rfi_text *s, size_t begin, size_t end) {
  if (end > s->n) end = s->n;
  if (begin > end) begin = end;
  if (s->n_runs == 0) return rfi_text_new(r, s->data + begin, end - begin, s->flags);
  rfi_tbuilder b = {.r = r};
  rfi_tbuilder_add_text(&b, s, begin, end);
  return rfi_tbuilder_finish(&b);
}

int64_t rfi_text_chars(rfi_render *r, rfi_text *s) {
  if (s->chars >= 0) return s->chars;
  rfi_render_step(r, s->n / 64);
  int64_t chars = 0;
  for (uint32_t i = 0; i < s->n; i++) chars += ((unsigned char)s->data[i] & 0xC0) != 0x80;
  return s->chars = chars;
}

size_t rfi_text_offset(rfi_render *r, rfi_text *s, int64_t chars) {
  if (rfi_text_chars(r, s) == s->n) return chars > s->n ? s->n : (size_t)chars;
  size_t i = 0;
  for (; chars > 0 && i < s->n; chars--) {
    i++;
    while (i < s->n && ((unsigned char)s->data[i] & 0xC0) == 0x80) i++;
  }
  rfi_render_step(r, (int64_t)i / 16);
  return i;
}

bool rfi_text_is(const rfi_text *s, const char *literal) {
  return s->n == strlen(literal) && memcmp(s->data, literal, s->n) == 0;
}

const char *rfi_text_string(rfi_render *r, const rfi_text *s) {
  char *copy = rfi_render_alloc(r, (size_t)s->n + 1);
  if (copy) memcpy(copy, s->data, s->n);
  return copy;
}

void rfi_tbuilder_add(rfi_tbuilder *b, const char *data, size_t n, uint32_t flags) {
  rfi_render *r = b->r;
  if (n == 0 || !rfi_render_step(r, (int64_t)(n / 64))) return;
  if (n > RFI_RENDER_OUTPUT || b->n + n > RFI_RENDER_OUTPUT) {
    rfi_render_limit(r, "a text has more than %d bytes", RFI_RENDER_OUTPUT);
    return;
  }
  if (b->n + n > b->capacity) {
    size_t capacity = b->capacity < 64 ? 64 : 2 * b->capacity;
    if (capacity < b->n + n) capacity = b->n + n;
    char *memory = rfi_render_alloc(r, capacity);
    if (!memory) return;
    if (b->n > 0) memcpy(memory, b->data, b->n);
    b->data = memory;
    b->capacity = capacity;
  }
  if (b->n_runs == 0 || b->runs[b->n_runs - 1].flags != flags) {
    if (b->n_runs == b->capacity_runs) {
      const int capacity = b->capacity_runs == 0 ? 4 : 2 * b->capacity_runs;
      rfi_trun *memory = rfi_render_alloc(r, (size_t)capacity * sizeof *memory);
      if (!memory) return;
      if (b->n_runs > 0) memcpy(memory, b->runs, (size_t)b->n_runs * sizeof *memory);
      b->runs = memory;
      b->capacity_runs = capacity;
    }
    b->runs[b->n_runs++].flags = flags;
  }
  memcpy(b->data + b->n, data, n);
  b->n += n;
  b->runs[b->n_runs - 1].end = (uint32_t)b->n;
}

void rfi_tbuilder_add_text(rfi_tbuilder *b, const rfi_text *s, size_t begin, size_t end) {
  if (end > s->n) end = s->n;
  if (begin >= end) return;
  if (s->n_runs == 0) {
    rfi_tbuilder_add(b, s->data + begin, end - begin, s->flags);
    return;
  }
  for (int k = run_at(s, begin); begin < end && b->r->status == RFR_OK; k++) {
    const size_t stop = s->runs[k].end < end ? s->runs[k].end : end;
    rfi_tbuilder_add(b, s->data + begin, stop - begin, s->runs[k].flags);
    begin = stop;
  }
}

void rfi_tbuilder_add_char(rfi_tbuilder *b, int32_t c, uint32_t flags) {
  char bytes[4];
  rfi_tbuilder_add(b, bytes, rfi_utf8_put((uint32_t)c, bytes), flags);
}

rfi_tval rfi_tbuilder_finish(rfi_tbuilder *b) {
  rfi_tval v = rfi_text_new(b->r, b->n ? b->data : "", b->n, b->n_runs > 0 ? b->runs[0].flags : 0);
  if (b->n_runs > 1 && v.as.text != &empty_text) {
    v.as.text->runs = b->runs;
    v.as.text->n_runs = b->n_runs;
  }
  return v;
}

rfi_tval rfi_text_mark_safe(rfi_render *r, const rfi_text *s) {
  rfi_text *copy = rfi_render_alloc(r, sizeof *copy);
  if (!copy) return (rfi_tval){.kind = RFI_T_TEXT, .as.text = (rfi_text *)&empty_text};
  *copy = *s;
  copy->safe = true;
  return (rfi_tval){.kind = RFI_T_TEXT, .as.text = copy};
}

rfi_text *rfi_text_escape(rfi_render *r, const rfi_text *s) {
  if (s->safe) return (rfi_text *)s;
  rfi_tbuilder b = {.r = r};
  for (uint32_t i = 0; i < s->n && rfi_render_step(r, 1); i++) {
    const char *entity = s->data[i] == '&'    ? "&amp;"
                         : s->data[i] == '<'  ? "&lt;"
                         : s->data[i] == '>'  ? "&gt;"
                         : s->data[i] == '\'' ? "&#39;"
                         : s->data[i] == '"'  ? "&#34;"
                                              : NULL;
    if (entity) rfi_tbuilder_add(&b, entity, strlen(entity), rfi_text_flags_at(s, i));
    else rfi_tbuilder_add_text(&b, s, i, i + 1);
  }
  return rfi_tbuilder_finish(&b).as.text;
}

/* ---- lists and dictionaries ---- */

static int depth_of(const rfi_tval *v) {
  switch (v->kind) {
    case RFI_T_LIST:
    case RFI_T_TUPLE:
    case RFI_T_RANGE:
    case RFI_T_VIEW: return v->as.list->depth;
    case RFI_T_DICT: return v->as.dict->depth;
    case RFI_T_ITERATOR: return v->as.iterator->list->depth;
    default: return 0;
  }
}

static void nest(rfi_render *r, int *depth, const rfi_tval *v) {
  const int inner = depth_of(v) + 1;
  if (inner > *depth) *depth = inner;
  if (*depth > RFI_RENDER_NESTING)
    rfi_render_limit(r, "lists and dictionaries are nested more than %d levels deep", RFI_RENDER_NESTING);
}

rfi_tlist *rfi_tlist_new(rfi_render *r) {
  rfi_tlist *list = rfi_render_alloc(r, sizeof *list);
  if (list) list->depth = 1;
  return list;
}

/* Doubles an array of values. */
static bool grow(rfi_render *r, rfi_tval **items, int64_t used, int64_t *capacity, int64_t width) {
  const int64_t wanted = *capacity == 0 ? 4 : 2 * *capacity;
  rfi_tval *memory = rfi_render_alloc(r, (size_t)(wanted * width) * sizeof *memory);
  if (!memory) return false;
  if (used > 0) memcpy(memory, *items, (size_t)(used * width) * sizeof *memory);
  *items = memory;
  *capacity = wanted;
  return true;
}

void rfi_tlist_add(rfi_render *r, rfi_tlist *list, rfi_tval v) {
  if (!list || !rfi_render_step(r, 1)) return;
  if (list->n == list->capacity && !grow(r, &list->items, list->n, &list->capacity, 1)) return;
  nest(r, &list->depth, &v);
  list->items[list->n++] = v;
}

rfi_tval rfi_tlist_value(rfi_tlist *list, rfi_tkind kind) {
  return list ? (rfi_tval){.kind = kind, .as.list = list} : rfi_tval_none();
}

rfi_tval rfi_titerator_new(rfi_render *r, rfi_tlist *list) {
  rfi_titerator *it = list ? rfi_render_alloc(r, sizeof *it) : NULL;
  if (!it) return rfi_tval_none();
  it->list = list;
  return (rfi_tval){.kind = RFI_T_ITERATOR, .as.iterator = it};
}

rfi_tval rfi_ttuple_of(rfi_render *r, rfi_tval a, rfi_tval b) {
  rfi_tlist *list = rfi_tlist_new(r);
  rfi_tlist_add(r, list, a);
  rfi_tlist_add(r, list, b);
  return rfi_tlist_value(list, RFI_T_TUPLE);
}

rfi_tdict *rfi_tdict_new(rfi_render *r) {
  rfi_tdict *d = rfi_render_alloc(r, sizeof *d);
  if (d) d->depth = 1;
  return d;
}

static bool is_hashable(const rfi_tval *v) {
  if (v->kind == RFI_T_LIST || v->kind == RFI_T_DICT) return false;
  if (v->kind != RFI_T_TUPLE) return true;
  for (int64_t i = 0; i < v->as.list->n; i++)
    if (!is_hashable(&v->as.list->items[i])) return false;
  return true;
}

rfi_tval *rfi_tdict_find(rfi_render *r, const rfi_tdict *d, const rfi_tval *key) {
  if (!d || !rfi_render_step(r, d->n / 8)) return NULL;
  for (int64_t i = 0; i < d->n; i++)
    if (rfi_tval_equal(r, &d->items[2 * i], key)) return &d->items[2 * i + 1];
  return NULL;
}

rfi_tval *rfi_tdict_find_name(rfi_render *r, const rfi_tdict *d, const char *name) {
  rfi_text text = {.data = name, .n = (uint32_t)strlen(name), .chars = -1};
  const rfi_tval key = {.kind = RFI_T_TEXT, .as.text = &text};
  return rfi_tdict_find(r, d, &key);
}

/* Appends without checking for an equal key. */
static void append_pair(rfi_render *r, rfi_tdict *d, rfi_tval key, rfi_tval value) {
  if (!rfi_render_step(r, 1)) return;
  if (d->n == d->capacity && !grow(r, &d->items, d->n, &d->capacity, 2)) return;
  nest(r, &d->depth, &key);
  nest(r, &d->depth, &value);
  d->items[2 * d->n] = key;
  d->items[2 * d->n + 1] = value;
  d->n++;
}

void rfi_tdict_set(rfi_render *r, rfi_tdict *d, rfi_tval key, rfi_tval value) {
  if (!d || r->status != RFR_OK) return;
  if (!is_hashable(&key)) {
    rfi_render_fail(r, "%s cannot be the key of a dictionary", rfi_tval_type(&key));
    return;
  }
  rfi_tval *old = rfi_tdict_find(r, d, &key);
  if (!old) {
    append_pair(r, d, key, value);
    return;
  }
  nest(r, &d->depth, &value);
  *old = value;
}

rfi_tval rfi_tval_from_json(rfi_render *r, const json_t *json, uint32_t flags) {
  if (!rfi_render_step(r, 1)) return rfi_tval_none();
  switch (json_typeof(json)) {
    case JSON_OBJECT: {
      rfi_tdict *d = rfi_tdict_new(r);
      if (!d) return rfi_tval_none();
      d->foreign = flags & RFI_TEXT_FOREIGN;
      const char *key;
      json_t *member;
      json_object_foreach((json_t *)json, key, member) {
        const rfi_tval name = rfi_text_new(r, key, strlen(key), flags);
        append_pair(r, d, name, rfi_tval_from_json(r, member, flags));
        if (r->status != RFR_OK) break;
      }
      return (rfi_tval){.kind = RFI_T_DICT, .as.dict = d};
    }
    case JSON_ARRAY: {
      rfi_tlist *list = rfi_tlist_new(r);
      if (!list) return rfi_tval_none();
      list->foreign = flags & RFI_TEXT_FOREIGN;
      for (size_t i = 0; i < json_array_size(json) && r->status == RFR_OK; i++)
        rfi_tlist_add(r, list, rfi_tval_from_json(r, json_array_get(json, i), flags));
      return rfi_tlist_value(list, RFI_T_LIST);
    }
    case JSON_STRING: return rfi_text_new(r, json_string_value(json), json_string_length(json), flags);
    case JSON_INTEGER: return rfi_tval_int(json_integer_value(json));
    case JSON_REAL: return rfi_tval_float(json_real_value(json));
    case JSON_TRUE: return rfi_tval_bool(true);
    case JSON_FALSE: return rfi_tval_bool(false);
    default: return rfi_tval_none();
  }
}

/* ---- properties ---- */

const char *rfi_tval_type(const rfi_tval *v) {
  static const char *const names[] = {
      [RFI_T_ABSENT] = "a missing argument",
      [RFI_T_UNDEFINED] = "an undefined value",
      [RFI_T_NONE] = "none",
      [RFI_T_BOOL] = "a boolean",
      [RFI_T_INT] = "an integer",
      [RFI_T_FLOAT] = "a float",
      [RFI_T_TEXT] = "a string",
      [RFI_T_LIST] = "a list",
      [RFI_T_TUPLE] = "a tuple",
      [RFI_T_RANGE] = "a range",
      [RFI_T_VIEW] = "a dictionary view",
      [RFI_T_DICT] = "a dictionary",
      [RFI_T_ITERATOR] = "a generator",
      [RFI_T_NAMESPACE] = "a namespace",
      [RFI_T_LOOP] = "a loop",
      [RFI_T_MACRO] = "a macro",
      [RFI_T_METHOD] = "a method",
      [RFI_T_FUNCTION] = "a function",
      [RFI_T_CYCLER] = "a cycler",
      [RFI_T_JOINER] = "a joiner",
  };
  return names[v->kind];
}

bool rfi_tval_truth(const rfi_tval *v) {
  switch (v->kind) {
    case RFI_T_ABSENT:
    case RFI_T_UNDEFINED:
    case RFI_T_NONE: return false;
    case RFI_T_BOOL: return v->as.b;
    case RFI_T_INT: return v->as.i != 0;
    case RFI_T_FLOAT: return v->as.f != 0;
    case RFI_T_TEXT: return v->as.text->n > 0;
    case RFI_T_LIST:
    case RFI_T_TUPLE:
    case RFI_T_RANGE:
    case RFI_T_VIEW: return v->as.list->n > 0;
    case RFI_T_DICT: return v->as.dict->n > 0;
    default: return true;
  }
}

bool rfi_tval_is_number(const rfi_tval *v) {
  return v->kind == RFI_T_INT || v->kind == RFI_T_FLOAT || v->kind == RFI_T_BOOL;
}

bool rfi_tval_as_int(const rfi_tval *v, int64_t *i) {
  if (v->kind == RFI_T_BOOL) *i = v->as.b;
  else if (v->kind == RFI_T_INT) *i = v->as.i;
  else return false;
  return true;
}

double rfi_tval_as_float(const rfi_tval *v) {
  return v->kind == RFI_T_FLOAT ? v->as.f : v->kind == RFI_T_BOOL ? (double)v->as.b : (double)v->as.i;
}

/* Exact for 64-bit integers: the 64-bit significand of a long double holds them. */
static int order_numbers(const rfi_tval *a, const rfi_tval *b) {
  int64_t i, k;
  if (rfi_tval_as_int(a, &i) && rfi_tval_as_int(b, &k)) return i < k ? -1 : i > k;
  const long double x = rfi_tval_as_int(a, &i) ? (long double)i : (long double)a->as.f;
  const long double y = rfi_tval_as_int(b, &k) ? (long double)k : (long double)b->as.f;
  return isnan(x) || isnan(y) ? 2 : x < y ? -1 : x > y;
}

static int order_texts(const rfi_text *a, const rfi_text *b) {
  const int c = memcmp(a->data, b->data, a->n < b->n ? a->n : b->n);
  return c < 0 ? -1 : c > 0 ? 1 : a->n < b->n ? -1 : a->n > b->n;
}

static bool equal_lists(rfi_render *r, const rfi_tlist *a, const rfi_tlist *b) {
  if (a->n != b->n || !rfi_render_step(r, a->n)) return false;
  for (int64_t i = 0; i < a->n; i++)
    if (!rfi_tval_equal(r, &a->items[i], &b->items[i])) return false;
  return true;
}

static bool equal_dicts(rfi_render *r, const rfi_tdict *a, const rfi_tdict *b) {
  if (a->n != b->n || !rfi_render_step(r, a->n)) return false;
  for (int64_t i = 0; i < a->n; i++) {
    const rfi_tval *other = rfi_tdict_find(r, b, &a->items[2 * i]);
    if (!other || !rfi_tval_equal(r, &a->items[2 * i + 1], other)) return false;
  }
  return true;
}

bool rfi_tval_equal(rfi_render *r, const rfi_tval *a, const rfi_tval *b) {
  if (rfi_tval_is_number(a) && rfi_tval_is_number(b)) return order_numbers(a, b) == 0;
  if (a->kind != b->kind || r->status != RFR_OK) return false;
  switch (a->kind) {
    case RFI_T_ABSENT:
    case RFI_T_UNDEFINED:
    case RFI_T_NONE: return true;
    case RFI_T_TEXT:
      return a->as.text->n == b->as.text->n && rfi_render_step(r, a->as.text->n / 64) &&
             memcmp(a->as.text->data, b->as.text->data, a->as.text->n) == 0;
    case RFI_T_LIST:
    case RFI_T_TUPLE:
    case RFI_T_RANGE: return a->as.list == b->as.list || equal_lists(r, a->as.list, b->as.list);
    case RFI_T_DICT: return a->as.dict == b->as.dict || equal_dicts(r, a->as.dict, b->as.dict);
    case RFI_T_FUNCTION: return a->as.function == b->as.function;
    default: return a->as.dict == b->as.dict; /* the same object */
  }
}

int rfi_tval_order(rfi_render *r, const rfi_tval *a, const rfi_tval *b) {
  if (rfi_tval_is_number(a) && rfi_tval_is_number(b)) return order_numbers(a, b);
  if (a->kind == RFI_T_TEXT && b->kind == RFI_T_TEXT) {
    rfi_render_step(r, a->as.text->n / 64);
    return order_texts(a->as.text, b->as.text);
  }
  if (a->kind == b->kind && (a->kind == RFI_T_LIST || a->kind == RFI_T_TUPLE)) {
    const rfi_tlist *x = a->as.list, *y = b->as.list;
    for (int64_t i = 0; i < x->n && i < y->n && rfi_render_step(r, 1); i++)
      if (!rfi_tval_equal(r, &x->items[i], &y->items[i])) return rfi_tval_order(r, &x->items[i], &y->items[i]);
    return x->n < y->n ? -1 : x->n > y->n;
  }
  rfi_render_fail(r, "%s and %s have no order", rfi_tval_type(a), rfi_tval_type(b));
  return 2;
}

int64_t rfi_text_find(const rfi_text *s, const rfi_text *what, size_t from) {
  if (what->n == 0) return from <= s->n ? (int64_t)from : -1;
  if (from > s->n || s->n - from < what->n) return -1;
  const char *found = memmem(s->data + from, s->n - from, what->data, what->n);
  return found ? found - s->data : -1;
}

bool rfi_tval_contains(rfi_render *r, const rfi_tval *container, const rfi_tval *item) {
  switch (container->kind) {
    case RFI_T_TEXT:
      if (item->kind != RFI_T_TEXT) {
        rfi_render_fail(r, "\"in\" a string needs a string, not %s", rfi_tval_type(item));
        return false;
      }
      rfi_render_step(r, container->as.text->n / 32);
      return rfi_text_find(container->as.text, item->as.text, 0) >= 0;
    case RFI_T_DICT:
      if (!is_hashable(item)) rfi_render_fail(r, "%s cannot be the key of a dictionary", rfi_tval_type(item));
      return rfi_tdict_find(r, container->as.dict, item) != NULL;
    case RFI_T_UNDEFINED: return false;
    default: {
      rfi_tlist *items = rfi_tval_items(r, container);
      for (int64_t i = 0; items && i < items->n && rfi_render_step(r, 1); i++)
        if (rfi_tval_equal(r, &items->items[i], item)) return true;
      return false;
    }
  }
}

int64_t rfi_tval_length(rfi_render *r, const rfi_tval *v) {
  switch (v->kind) {
    case RFI_T_UNDEFINED: return 0;
    case RFI_T_TEXT: return rfi_text_chars(r, v->as.text);
    case RFI_T_LIST:
    case RFI_T_TUPLE:
    case RFI_T_RANGE:
    case RFI_T_VIEW: return v->as.list->n;
    case RFI_T_DICT: return v->as.dict->n;
    default: rfi_render_fail(r, "%s has no length", rfi_tval_type(v)); return 0;
  }
}

bool rfi_tval_is_iterable(const rfi_tval *v) {
  return v->kind == RFI_T_UNDEFINED || (v->kind >= RFI_T_TEXT && v->kind <= RFI_T_ITERATOR) || v->kind == RFI_T_LOOP;
}

rfi_tlist *rfi_tval_items(rfi_render *r, const rfi_tval *v) {
  rfi_tlist *list;
  switch (v->kind) {
    case RFI_T_LIST:
    case RFI_T_TUPLE:
    case RFI_T_RANGE:
    case RFI_T_VIEW: return v->as.list;
    case RFI_T_UNDEFINED: return rfi_tlist_new(r);
    case RFI_T_DICT:
      list = rfi_tlist_new(r);
      for (int64_t i = 0; i < v->as.dict->n; i++) rfi_tlist_add(r, list, v->as.dict->items[2 * i]);
      return list;
    case RFI_T_ITERATOR:
      list = rfi_tlist_new(r);
      for (rfi_titerator *it = v->as.iterator; it->next < it->list->n && r->status == RFR_OK;)
        rfi_tlist_add(r, list, it->list->items[it->next++]);
      return list;
    case RFI_T_TEXT: {
      const rfi_text *s = v->as.text;
      list = rfi_tlist_new(r);
      for (uint32_t i = 0, size; i < s->n && r->status == RFR_OK; i += size) {
        rfi_utf8_at(s->data + i, s->n - i, &size);
        rfi_tlist_add(r, list, rfi_text_new(r, s->data + i, size, rfi_text_flags_at(s, i)));
      }
      return list;
    }
    default: return rfi_render_fail(r, "%s is not iterable", rfi_tval_type(v));
  }
}

/* ---- printing ---- */

/* Python's repr of a float: the shortest digits that read back equal. */
void rfi_float_repr(char out[40], double f) {
  if (isnan(f)) {
    strcpy(out, "nan");
    return;
  }
  if (isinf(f)) {
    strcpy(out, f < 0 ? "-inf" : "inf");
    return;
  }
  char text[40];
  int digits = 1;
  for (; digits <= 17; digits++) {
    rfi_snprintf(text, sizeof text, "%.*e", digits - 1, f);
    if (rfi_strtod(text, NULL) == f) break;
  }
  char *e = strchr(text, 'e');
  const int exponent = (int)rfi_strtod(e + 1, NULL);
  if (exponent >= 16 || exponent < -4) { /* as 1e+16, 1.5e-07 */
    strcpy(out, text);
    return;
  }
  const int decimals = digits - 1 - exponent;
  rfi_snprintf(out, 40, "%.*f", decimals < 1 ? 1 : decimals, f);
}

static bool is_printable(int32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
  }
}

static void repr_text(rfi_tbuilder *b, const rfi_text *s, uint32_t flags) {
  const char quote = memchr(s->data, '\'', s->n) && !memchr(s->data, '"', s->n) ? '"' : '\'';
  if (s->safe) rfi_tbuilder_add(b, "Markup(", 7, flags);
  rfi_tbuilder_add(b, &quote, 1, flags);
  for (uint32_t i = 0, size; i < s->n && b->r->status == RFR_OK; i += size) {
    char escape[16];
    const int32_t c = rfi_utf8_at(s->data + i, s->n - i, &size);
    const uint32_t own = rfi_text_flags_at(s, i);
    if (c == quote || c == '\\') rfi_snprintf(escape, sizeof escape, "\\%c", (char)c);
    else if (c == '\n') strcpy(escape, "\\n");
    else if (c == '\r') strcpy(escape, "\\r");
    else if (c == '\t') strcpy(escape, "\\t");
    else if (is_printable(c)) {
      rfi_tbuilder_add(b, s->data + i, size, own);
      continue;
    } else rfi_snprintf(escape, sizeof escape, c < 256 ? "\\x%02x" : c < 65536 ? "\\u%04x" : "\\U%08x", (unsigned)c);
    rfi_tbuilder_add(b, escape, strlen(escape), own);
  }
  rfi_tbuilder_add(b, &quote, 1, flags);
  if (s->safe) rfi_tbuilder_add(b, ")", 1, flags);
}

static void add_string(rfi_tbuilder *b, const char *text, uint32_t flags) {
  rfi_tbuilder_add(b, text, strlen(text), flags);
}

static void repr_value(rfi_tbuilder *b, const rfi_tval *v, uint32_t flags);

static void repr_list(rfi_tbuilder *b, const rfi_tlist *list, const char *open, const char *close) {
  const uint32_t flags = list->foreign ? RFI_TEXT_FOREIGN : 0;
  add_string(b, open, flags);
  for (int64_t i = 0; i < list->n && rfi_render_step(b->r, 1); i++) {
    if (i > 0) add_string(b, ", ", flags);
    repr_value(b, &list->items[i], flags);
  }
  add_string(b, close, flags);
}

static void repr_value(rfi_tbuilder *b, const rfi_tval *v, uint32_t flags) {
  char text[64];
  switch (v->kind) {
    case RFI_T_UNDEFINED: add_string(b, "Undefined", flags); return;
    case RFI_T_NONE: add_string(b, "None", flags); return;
    case RFI_T_BOOL: add_string(b, v->as.b ? "True" : "False", flags); return;
    case RFI_T_INT:
      rfi_snprintf(text, sizeof text, "%lld", (long long)v->as.i);
      add_string(b, text, flags);
      return;
    case RFI_T_FLOAT:
      rfi_float_repr(text, v->as.f);
      add_string(b, text, flags);
      return;
    case RFI_T_TEXT: repr_text(b, v->as.text, flags); return;
    case RFI_T_LIST: repr_list(b, v->as.list, "[", "]"); return;
    case RFI_T_TUPLE: repr_list(b, v->as.list, "(", v->as.list->n == 1 ? ",)" : ")"); return;
    case RFI_T_VIEW:
      add_string(b, v->as.list->view, flags);
      repr_list(b, v->as.list, "([", "])");
      return;
    case RFI_T_RANGE: {
      const rfi_tlist *l = v->as.list;
      if (l->step == 1) rfi_snprintf(text, sizeof text, "range(%lld, %lld)", (long long)l->start, (long long)l->stop);
      else
        rfi_snprintf(text, sizeof text, "range(%lld, %lld, %lld)", (long long)l->start, (long long)l->stop,
                     (long long)l->step);
      add_string(b, text, flags);
      return;
    }
    case RFI_T_DICT: {
      const rfi_tdict *d = v->as.dict;
      const uint32_t own = d->foreign ? RFI_TEXT_FOREIGN : 0;
      add_string(b, "{", own);
      for (int64_t i = 0; i < d->n && rfi_render_step(b->r, 1); i++) {
        if (i > 0) add_string(b, ", ", own);
        repr_value(b, &d->items[2 * i], own);
        add_string(b, ": ", own);
        repr_value(b, &d->items[2 * i + 1], own);
      }
      add_string(b, "}", own);
      return;
    }
    default: rfi_render_fail(b->r, "%s cannot be printed", rfi_tval_type(v));
  }
}

void rfi_tval_repr(rfi_tbuilder *b, const rfi_tval *v) { repr_value(b, v, 0); }

void rfi_tval_print(rfi_tbuilder *b, const rfi_tval *v) {
  if (v->kind == RFI_T_TEXT) rfi_tbuilder_add_text(b, v->as.text, 0, v->as.text->n);
  else if (v->kind != RFI_T_UNDEFINED) repr_value(b, v, 0);
}

rfi_text *rfi_tval_str(rfi_render *r, const rfi_tval *v) {
  if (v->kind == RFI_T_TEXT) return v->as.text;
  rfi_tbuilder b = {.r = r};
  rfi_tval_print(&b, v);
  return rfi_tbuilder_finish(&b).as.text;
}
