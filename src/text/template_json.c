/* SPDX-License-Identifier: Apache-2.0
 *
 * The filter tojson as transformers defines it: json.dumps(value, ensure_ascii=False, indent, separators, sort_keys).
 *
 * Punctuation and numbers of a list or dictionary that came from the conversation are foreign like its strings.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "text/template_value.h"

typedef struct writer {
  rfi_tbuilder b;
  rfi_render *r;
  const rfi_text *indent; /* indentation of one level, or NULL */
  const rfi_text *item_separator, *key_separator;
  bool ascii, sorted;
} writer;

static void add(writer *w, const char *text, uint32_t flags) { rfi_tbuilder_add(&w->b, text, strlen(text), flags); }

static void add_part(writer *w, const rfi_text *s, uint32_t flags) { rfi_tbuilder_add(&w->b, s->data, s->n, flags); }

static void add_string(writer *w, const rfi_text *s, uint32_t flags) {
  add(w, "\"", flags);
  uint32_t plain = 0;
  for (uint32_t i = 0, size; i < s->n && w->r->status == RFR_OK; i += size) {
    const int32_t c = rfi_utf8_at(s->data + i, s->n - i, &size);
    if (c != '"' && c != '\\' && c >= 32 && !(w->ascii && c > 126)) continue;
    char escape[16];
    static const char named[] = "\"\"\\\\\nn\rr\tt\bb\ff";
    const char *known = c != 0 && c < 128 ? NULL : "";
    for (const char *p = named; *p && !known; p += 2)
      if (*p == c) known = p + 1;
    if (known && *known) rfi_snprintf(escape, sizeof escape, "\\%c", *known);
    else if (c < 65536) rfi_snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
    else
      rfi_snprintf(escape, sizeof escape, "\\u%04x\\u%04x", 0xD800 + ((unsigned)(c - 65536) >> 10),
                   0xDC00 + ((unsigned)(c - 65536) & 0x3FF));
    rfi_tbuilder_add_text(&w->b, s, plain, i);
    rfi_tbuilder_add(&w->b, escape, strlen(escape), rfi_text_flags_at(s, i));
    plain = i + size;
  }
  rfi_tbuilder_add_text(&w->b, s, plain, s->n);
  add(w, "\"", flags);
}

static void add_break(writer *w, int level, uint32_t flags) {
  if (!w->indent) return;
  add(w, "\n", flags);
  for (int i = 0; i < level && rfi_render_step(w->r, 1); i++) add_part(w, w->indent, flags);
}

static void add_value(writer *w, const rfi_tval *v, int level, uint32_t flags);

/* The key as a string: numbers, booleans and none have their JSON form. */
static void add_key(writer *w, const rfi_tval *key, uint32_t flags) {
  if (key->kind == RFI_T_TEXT) {
    add_string(w, key->as.text, flags);
  } else if (rfi_tval_is_number(key) || key->kind == RFI_T_NONE) {
    add(w, "\"", flags);
    add_value(w, key, 0, flags);
    add(w, "\"", flags);
  } else {
    rfi_render_fail(w->r, "%s cannot be a key of JSON", rfi_tval_type(key));
  }
}

static void merge_sort(rfi_render *r, rfi_tval *pairs, rfi_tval *scratch, int64_t n) {
  if (n < 2 || !rfi_render_step(r, n)) return;
  const int64_t half = n / 2;
  merge_sort(r, pairs, scratch, half);
  merge_sort(r, pairs + 2 * half, scratch, n - half);
  int64_t i = 0, k = half;
  for (int64_t out = 0; out < n; out++) {
    const bool second = i == half || (k < n && rfi_tval_order(r, &pairs[2 * k], &pairs[2 * i]) < 0);
    const int64_t from = second ? k++ : i++;
    memcpy(scratch + 2 * out, pairs + 2 * from, 2 * sizeof *pairs);
  }
  memcpy(pairs, scratch, (size_t)(2 * n) * sizeof *pairs);
}

static void add_dict(writer *w, const rfi_tdict *d, int level) {
  const uint32_t flags = d->foreign ? RFI_TEXT_FOREIGN : 0;
  rfi_tval *items = d->items;
  if (w->sorted && d->n > 1) {
    const size_t bytes = (size_t)(2 * d->n) * sizeof *items;
    items = rfi_render_alloc(w->r, bytes);
    rfi_tval *scratch = rfi_render_alloc(w->r, bytes);
    if (!items || !scratch) return;
    memcpy(items, d->items, bytes);
    merge_sort(w->r, items, scratch, d->n);
  }
  add(w, "{", flags);
  for (int64_t i = 0; i < d->n && rfi_render_step(w->r, 1); i++) {
    if (i > 0) add_part(w, w->item_separator, flags);
    add_break(w, level + 1, flags);
    add_key(w, &items[2 * i], flags);
    add_part(w, w->key_separator, flags);
    add_value(w, &items[2 * i + 1], level + 1, flags);
  }
  if (d->n > 0) add_break(w, level, flags);
  add(w, "}", flags);
}

static void add_value(writer *w, const rfi_tval *v, int level, uint32_t flags) {
  char text[48];
  switch (v->kind) {
    case RFI_T_NONE: add(w, "null", flags); return;
    case RFI_T_BOOL: add(w, v->as.b ? "true" : "false", flags); return;
    case RFI_T_INT:
      rfi_snprintf(text, sizeof text, "%lld", (long long)v->as.i);
      add(w, text, flags);
      return;
    case RFI_T_FLOAT:
      if (isnan(v->as.f)) strcpy(text, "NaN");
      else if (isinf(v->as.f)) strcpy(text, v->as.f < 0 ? "-Infinity" : "Infinity");
      else rfi_float_repr(text, v->as.f);
      add(w, text, flags);
      return;
    case RFI_T_TEXT: add_string(w, v->as.text, flags); return;
    case RFI_T_LIST:
    case RFI_T_TUPLE: {
      const rfi_tlist *list = v->as.list;
      const uint32_t own = list->foreign ? RFI_TEXT_FOREIGN : 0;
      add(w, "[", own);
      for (int64_t i = 0; i < list->n && rfi_render_step(w->r, 1); i++) {
        if (i > 0) add_part(w, w->item_separator, own);
        add_break(w, level + 1, own);
        add_value(w, &list->items[i], level + 1, own);
      }
      if (list->n > 0) add_break(w, level, own);
      add(w, "]", own);
      return;
    }
    case RFI_T_DICT: add_dict(w, v->as.dict, level); return;
    default: rfi_render_fail(w->r, "%s cannot be written as JSON", rfi_tval_type(v));
  }
}

rfi_tval rfi_tval_to_json(rfi_render *r, const rfi_tval *v, const rfi_targs *args) {
  rfi_tval a[4];
  int64_t width = 0;
  if (!rfi_targs_bind(r, "tojson", args, "ensure_ascii indent separators sort_keys", 0, a)) return rfi_tval_none();
  const bool indented = a[1].kind != RFI_T_ABSENT && a[1].kind != RFI_T_NONE;
  rfi_text comma = {.data = indented ? "," : ", ", .n = indented ? 1 : 2}, colon = {.data = ": ", .n = 2}, blanks;
  writer w = {.b = {.r = r},
              .r = r,
              .item_separator = &comma,
              .key_separator = &colon,
              .ascii = rfi_tval_truth(&a[0]),
              .sorted = rfi_tval_truth(&a[3])};
  if (indented) {
    if (a[1].kind == RFI_T_TEXT) {
      w.indent = a[1].as.text;
    } else if (rfi_tval_as_int(&a[1], &width)) {
      static const char spaces[65] = "                                                                ";
      if (width > 64) return rfi_render_fail(r, "tojson: an indent of more than 64 blanks"), rfi_tval_none();
      blanks = (rfi_text){.data = spaces, .n = width < 0 ? 0 : (uint32_t)width};
      w.indent = &blanks;
    } else {
      return rfi_render_fail(r, "tojson: indent is %s", rfi_tval_type(&a[1])), rfi_tval_none();
    }
  }
  if (a[2].kind != RFI_T_ABSENT && a[2].kind != RFI_T_NONE) {
    const rfi_tlist *pair = a[2].kind == RFI_T_TUPLE || a[2].kind == RFI_T_LIST ? a[2].as.list : NULL;
    if (!pair || pair->n != 2 || pair->items[0].kind != RFI_T_TEXT || pair->items[1].kind != RFI_T_TEXT)
      return rfi_render_fail(r, "tojson: separators are two strings"), rfi_tval_none();
    w.item_separator = pair->items[0].as.text;
    w.key_separator = pair->items[1].as.text;
  }
  add_value(&w, v, 0, 0);
  return rfi_tbuilder_finish(&w.b);
}
