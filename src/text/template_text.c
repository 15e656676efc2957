/* SPDX-License-Identifier: Apache-2.0
 *
 * Methods of strings, as Python's str has them. Positions are code points in arguments and results, bytes inside.
 *
 * Upper, lower and title case use the full mappings of Unicode: utf8proc has the simple ones, the table below has those
 * that give several code points.
 */
#include <string.h>
#include <utf8proc.h>

#include "text/template_value.h"

static const struct {
  int32_t code, upper[3], title[3];
} long_cases[] = {
    {0xDF, {0x53, 0x53}, {0x53, 0x73}},
    {0x149, {0x2BC, 0x4E}, {0x2BC, 0x4E}},
    {0x1F0, {0x4A, 0x30C}, {0x4A, 0x30C}},
    {0x390, {0x399, 0x308, 0x301}, {0x399, 0x308, 0x301}},
    {0x3B0, {0x3A5, 0x308, 0x301}, {0x3A5, 0x308, 0x301}},
    {0x587, {0x535, 0x552}, {0x535, 0x582}},
    {0x1E96, {0x48, 0x331}, {0x48, 0x331}},
    {0x1E97, {0x54, 0x308}, {0x54, 0x308}},
    {0x1E98, {0x57, 0x30A}, {0x57, 0x30A}},
    {0x1E99, {0x59, 0x30A}, {0x59, 0x30A}},
    {0x1E9A, {0x41, 0x2BE}, {0x41, 0x2BE}},
    {0x1F50, {0x3A5, 0x313}, {0x3A5, 0x313}},
    {0x1F52, {0x3A5, 0x313, 0x300}, {0x3A5, 0x313, 0x300}},
    {0x1F54, {0x3A5, 0x313, 0x301}, {0x3A5, 0x313, 0x301}},
    {0x1F56, {0x3A5, 0x313, 0x342}, {0x3A5, 0x313, 0x342}},
    {0x1F80, {0x1F08, 0x399}, {0x1F88}},
    {0x1F81, {0x1F09, 0x399}, {0x1F89}},
    {0x1F82, {0x1F0A, 0x399}, {0x1F8A}},
    {0x1F83, {0x1F0B, 0x399}, {0x1F8B}},
    {0x1F84, {0x1F0C, 0x399}, {0x1F8C}},
    {0x1F85, {0x1F0D, 0x399}, {0x1F8D}},
    {0x1F86, {0x1F0E, 0x399}, {0x1F8E}},
    {0x1F87, {0x1F0F, 0x399}, {0x1F8F}},
    {0x1F88, {0x1F08, 0x399}, {0x1F88}},
    {0x1F89, {0x1F09, 0x399}, {0x1F89}},
    {0x1F8A, {0x1F0A, 0x399}, {0x1F8A}},
    {0x1F8B, {0x1F0B, 0x399}, {0x1F8B}},
    {0x1F8C, {0x1F0C, 0x399}, {0x1F8C}},
    {0x1F8D, {0x1F0D, 0x399}, {0x1F8D}},
    {0x1F8E, {0x1F0E, 0x399}, {0x1F8E}},
    {0x1F8F, {0x1F0F, 0x399}, {0x1F8F}},
    {0x1F90, {0x1F28, 0x399}, {0x1F98}},
    {0x1F91, {0x1F29, 0x399}, {0x1F99}},
    {0x1F92, {0x1F2A, 0x399}, {0x1F9A}},
    {0x1F93, {0x1F2B, 0x399}, {0x1F9B}},
    {0x1F94, {0x1F2C, 0x399}, {0x1F9C}},
    {0x1F95, {0x1F2D, 0x399}, {0x1F9D}},
    {0x1F96, {0x1F2E, 0x399}, {0x1F9E}},
    {0x1F97, {0x1F2F, 0x399}, {0x1F9F}},
    {0x1F98, {0x1F28, 0x399}, {0x1F98}},
    {0x1F99, {0x1F29, 0x399}, {0x1F99}},
    {0x1F9A, {0x1F2A, 0x399}, {0x1F9A}},
    {0x1F9B, {0x1F2B, 0x399}, {0x1F9B}},
    {0x1F9C, {0x1F2C, 0x399}, {0x1F9C}},
    {0x1F9D, {0x1F2D, 0x399}, {0x1F9D}},
    {0x1F9E, {0x1F2E, 0x399}, {0x1F9E}},
    {0x1F9F, {0x1F2F, 0x399}, {0x1F9F}},
    {0x1FA0, {0x1F68, 0x399}, {0x1FA8}},
    {0x1FA1, {0x1F69, 0x399}, {0x1FA9}},
    {0x1FA2, {0x1F6A, 0x399}, {0x1FAA}},
    {0x1FA3, {0x1F6B, 0x399}, {0x1FAB}},
    {0x1FA4, {0x1F6C, 0x399}, {0x1FAC}},
    {0x1FA5, {0x1F6D, 0x399}, {0x1FAD}},
    {0x1FA6, {0x1F6E, 0x399}, {0x1FAE}},
    {0x1FA7, {0x1F6F, 0x399}, {0x1FAF}},
    {0x1FA8, {0x1F68, 0x399}, {0x1FA8}},
    {0x1FA9, {0x1F69, 0x399}, {0x1FA9}},
    {0x1FAA, {0x1F6A, 0x399}, {0x1FAA}},
    {0x1FAB, {0x1F6B, 0x399}, {0x1FAB}},
    {0x1FAC, {0x1F6C, 0x399}, {0x1FAC}},
    {0x1FAD, {0x1F6D, 0x399}, {0x1FAD}},
    {0x1FAE, {0x1F6E, 0x399}, {0x1FAE}},
    {0x1FAF, {0x1F6F, 0x399}, {0x1FAF}},
    {0x1FB2, {0x1FBA, 0x399}, {0x1FBA, 0x345}},
    {0x1FB3, {0x391, 0x399}, {0x1FBC}},
    {0x1FB4, {0x386, 0x399}, {0x386, 0x345}},
    {0x1FB6, {0x391, 0x342}, {0x391, 0x342}},
    {0x1FB7, {0x391, 0x342, 0x399}, {0x391, 0x342, 0x345}},
    {0x1FBC, {0x391, 0x399}, {0x1FBC}},
    {0x1FC2, {0x1FCA, 0x399}, {0x1FCA, 0x345}},
    {0x1FC3, {0x397, 0x399}, {0x1FCC}},
    {0x1FC4, {0x389, 0x399}, {0x389, 0x345}},
    {0x1FC6, {0x397, 0x342}, {0x397, 0x342}},
    {0x1FC7, {0x397, 0x342, 0x399}, {0x397, 0x342, 0x345}},
    {0x1FCC, {0x397, 0x399}, {0x1FCC}},
    {0x1FD2, {0x399, 0x308, 0x300}, {0x399, 0x308, 0x300}},
    {0x1FD3, {0x399, 0x308, 0x301}, {0x399, 0x308, 0x301}},
    {0x1FD6, {0x399, 0x342}, {0x399, 0x342}},
    {0x1FD7, {0x399, 0x308, 0x342}, {0x399, 0x308, 0x342}},
    {0x1FE2, {0x3A5, 0x308, 0x300}, {0x3A5, 0x308, 0x300}},
    {0x1FE3, {0x3A5, 0x308, 0x301}, {0x3A5, 0x308, 0x301}},
    {0x1FE4, {0x3A1, 0x313}, {0x3A1, 0x313}},
    {0x1FE6, {0x3A5, 0x342}, {0x3A5, 0x342}},
    {0x1FE7, {0x3A5, 0x308, 0x342}, {0x3A5, 0x308, 0x342}},
    {0x1FF2, {0x1FFA, 0x399}, {0x1FFA, 0x345}},
    {0x1FF3, {0x3A9, 0x399}, {0x1FFC}},
    {0x1FF4, {0x38F, 0x399}, {0x38F, 0x345}},
    {0x1FF6, {0x3A9, 0x342}, {0x3A9, 0x342}},
    {0x1FF7, {0x3A9, 0x342, 0x399}, {0x3A9, 0x342, 0x345}},
    {0x1FFC, {0x3A9, 0x399}, {0x1FFC}},
    {0xFB00, {0x46, 0x46}, {0x46, 0x66}},
    {0xFB01, {0x46, 0x49}, {0x46, 0x69}},
    {0xFB02, {0x46, 0x4C}, {0x46, 0x6C}},
    {0xFB03, {0x46, 0x46, 0x49}, {0x46, 0x66, 0x69}},
    {0xFB04, {0x46, 0x46, 0x4C}, {0x46, 0x66, 0x6C}},
    {0xFB05, {0x53, 0x54}, {0x53, 0x74}},
    {0xFB06, {0x53, 0x54}, {0x53, 0x74}},
    {0xFB13, {0x544, 0x546}, {0x544, 0x576}},
    {0xFB14, {0x544, 0x535}, {0x544, 0x565}},
    {0xFB15, {0x544, 0x53B}, {0x544, 0x56B}},
    {0xFB16, {0x54E, 0x546}, {0x54E, 0x576}},
    {0xFB17, {0x544, 0x53D}, {0x544, 0x56D}},
};

enum { SIGMA = 0x3A3, FINAL_SIGMA = 0x3C2, DOTTED_I = 0x130 };

typedef struct reader {
  const rfi_text *s;
  uint32_t at, size;
  int32_t c;
} reader;

static bool next_char(reader *x) {
  x->at += x->size;
  if (x->at >= x->s->n) return false;
  x->c = rfi_utf8_at(x->s->data + x->at, x->s->n - x->at, &x->size);
  return true;
}

static bool is_lower(int32_t c) {
  return utf8proc_category(c) == UTF8PROC_CATEGORY_LL || (utf8proc_toupper(c) != c && utf8proc_tolower(c) == c) ||
         c == 0xAA || c == 0xBA;
}

static bool is_upper(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LU; }

static bool is_cased(int32_t c) { return is_lower(c) || is_upper(c) || utf8proc_category(c) == UTF8PROC_CATEGORY_LT; }

static bool is_case_ignorable(int32_t c) {
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK: return true;
    default: return c == '\'' || c == '.' || c == ':' || c == 0xB7 || c == 0x2019;
  }
}

/* A capital sigma at the end of a word becomes the final form. */
static bool ends_word(const rfi_text *s, uint32_t at) {
  bool before = false;
  for (uint32_t i = at; i > 0 && !before;) {
    uint32_t size;
    i--;
    while (i > 0 && ((unsigned char)s->data[i] & 0xC0) == 0x80) i--;
    const int32_t c = rfi_utf8_at(s->data + i, at - i, &size);
    if (is_case_ignorable(c)) continue;
    before = is_cased(c);
    break;
  }
  for (reader x = {.s = s, .at = at, .size = 2}; before && next_char(&x);)
    if (!is_case_ignorable(x.c)) return !is_cased(x.c);
  return before;
}

static void add_case(rfi_tbuilder *b, const reader *x, int how) {
  const uint32_t flags = rfi_text_flags_at(x->s, x->at);
  if (how == 'l') {
    if (x->c == SIGMA && ends_word(x->s, x->at)) {
      rfi_tbuilder_add_char(b, FINAL_SIGMA, flags);
      return;
    }
    rfi_tbuilder_add_char(b, x->c == DOTTED_I ? 'i' : utf8proc_tolower(x->c), flags);
    if (x->c == DOTTED_I) rfi_tbuilder_add_char(b, 0x307, flags);
    return;
  }
  for (size_t i = 0; x->c >= 0xDF && i < sizeof long_cases / sizeof *long_cases; i++) {
    if (long_cases[i].code != x->c) continue;
    const int32_t *to = how == 'u' ? long_cases[i].upper : long_cases[i].title;
    for (int k = 0; k < 3 && to[k]; k++) rfi_tbuilder_add_char(b, to[k], flags);
    return;
  }
  rfi_tbuilder_add_char(b, how == 'u' ? utf8proc_toupper(x->c) : utf8proc_totitle(x->c), flags);
}

/* The beginning of a word, for the filter title. */
static bool splits_words(int32_t c) {
  return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || rfi_unicode_is_space(c);
}

rfi_text *rfi_text_case(rfi_render *r, const rfi_text *s, int how) {
  rfi_tbuilder b = {.r = r};
  bool first = true;
  for (reader x = {.s = s}; next_char(&x) && rfi_render_step(r, 1);) {
    switch (how) {
      case 'c': add_case(&b, &x, first ? 't' : 'l'); break;
      case 't': add_case(&b, &x, first ? 't' : 'l'); break;
      case 'w': add_case(&b, &x, first ? 'u' : 'l'); break;
      case 's': add_case(&b, &x, is_upper(x.c) ? 'l' : is_lower(x.c) ? 'u' : 0); break;
      default: add_case(&b, &x, how);
    }
    first = how == 't' ? !is_cased(x.c) : how == 'w' ? splits_words(x.c) : false;
  }
  return rfi_tbuilder_finish(&b).as.text;
}

bool rfi_text_is_class(rfi_render *r, const rfi_text *s, const char *name) {
  bool any = false;
  if (strcmp(name, "isascii") == 0) {
    for (uint32_t i = 0; i < s->n; i++)
      if ((unsigned char)s->data[i] >= 0x80) return false;
    return true;
  }
  for (reader x = {.s = s}; next_char(&x) && rfi_render_step(r, 1);) {
    const utf8proc_category_t k = utf8proc_category(x.c);
    const bool digit = k == UTF8PROC_CATEGORY_ND;
    const bool numeric = digit || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
    const bool alpha = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
    if (strcmp(name, "islower") == 0) {
      if (is_upper(x.c) || k == UTF8PROC_CATEGORY_LT) return false;
      any |= is_lower(x.c);
      continue;
    }
    if (strcmp(name, "isupper") == 0) {
      if (is_lower(x.c) || k == UTF8PROC_CATEGORY_LT) return false;
      any |= is_upper(x.c);
      continue;
    }
    const bool holds = strcmp(name, "isspace") == 0     ? rfi_unicode_is_space(x.c)
                       : strcmp(name, "isalpha") == 0   ? alpha
                       : strcmp(name, "isalnum") == 0   ? alpha || numeric
                       : strcmp(name, "isnumeric") == 0 ? numeric
                       : strcmp(name, "isdecimal") == 0
                           ? digit
                           : digit || x.c == 0xB2 || x.c == 0xB3 || x.c == 0xB9 || (x.c >= 0x2070 && x.c <= 0x2089);
    if (!holds) return false;
    any = true;
  }
  return any;
}

static bool has_char(const rfi_text *chars, int32_t c) {
  for (reader x = {.s = chars}; next_char(&x);)
    if (x.c == c) return true;
  return false;
}

rfi_text *rfi_text_strip(rfi_render *r, const rfi_text *s, const rfi_text *chars, bool left, bool right) {
  uint32_t begin = 0, end = s->n, size;
  const int64_t cost = 1 + (chars ? chars->n / 16 : 0);
  while (left && begin < end && rfi_render_step(r, cost)) {
    const int32_t c = rfi_utf8_at(s->data + begin, s->n - begin, &size);
    if (chars ? !has_char(chars, c) : !rfi_unicode_is_space(c)) break;
    begin += size;
  }
  while (right && begin < end && rfi_render_step(r, cost)) {
    uint32_t i = end - 1;
    while (i > begin && ((unsigned char)s->data[i] & 0xC0) == 0x80) i--;
    const int32_t c = rfi_utf8_at(s->data + i, s->n - i, &size);
    if (chars ? !has_char(chars, c) : !rfi_unicode_is_space(c)) break;
    end = i;
  }
  return rfi_text_slice(r, s, begin, end).as.text;
}

rfi_text *rfi_text_replace(rfi_render *r, const rfi_text *s, const rfi_text *old, const rfi_text *with, int64_t count) {
  rfi_tbuilder b = {.r = r};
  size_t at = 0;
  if (old->n == 0) { /* between all code points */
    for (reader x = {.s = s}; count != 0 && rfi_render_step(r, 1); count--) {
      rfi_tbuilder_add_text(&b, with, 0, with->n);
      if (!next_char(&x)) {
        at = s->n;
        break;
      }
      rfi_tbuilder_add_text(&b, s, x.at, x.at + x.size);
      at = x.at + x.size;
    }
  }
  while (old->n > 0 && count != 0 && rfi_render_step(r, 1)) {
    const int64_t found = rfi_text_find(s, old, at);
    if (found < 0) break;
    rfi_tbuilder_add_text(&b, s, at, (size_t)found);
    rfi_tbuilder_add_text(&b, with, 0, with->n);
    at = (size_t)found + old->n;
    count--;
  }
  rfi_render_step(r, s->n / 32);
  rfi_tbuilder_add_text(&b, s, at, s->n);
  return rfi_tbuilder_finish(&b).as.text;
}

static bool is_line_end(int32_t c) {
  return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

rfi_tlist *rfi_text_lines(rfi_render *r, const rfi_text *s, bool keep_ends) {
  rfi_tlist *list = rfi_tlist_new(r);
  uint32_t begin = 0;
  for (reader x = {.s = s}; next_char(&x) && rfi_render_step(r, 1);) {
    if (!is_line_end(x.c)) continue;
    const uint32_t end = x.at;
    if (x.c == '\r' && x.at + 1 < s->n && s->data[x.at + 1] == '\n') next_char(&x);
    rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, keep_ends ? x.at + x.size : end));
    begin = x.at + x.size;
  }
  if (begin < s->n) rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, s->n));
  return list;
}

/* ---- arguments ---- */

static const rfi_text *text_argument(rfi_render *r, const rfi_tval *v, const char *what) {
  if (v->kind == RFI_T_TEXT) return v->as.text;
  return rfi_render_fail(r, "%s needs a string, not %s", what, rfi_tval_type(v));
}

static bool int_argument(rfi_render *r, const rfi_tval *v, const char *what, int64_t *out) {
  if (v->kind == RFI_T_ABSENT || rfi_tval_as_int(v, out)) return true;
  rfi_render_fail(r, "%s needs an integer, not %s", what, rfi_tval_type(v));
  return false;
}

/* ---- methods ---- */

#define METHOD(name) static rfi_tval name(rfi_render *r, const rfi_tval *self, const rfi_targs *args)
#define TEXT_VALUE(s) ((rfi_tval){.kind = RFI_T_TEXT, .as.text = (s)})

static rfi_tval stripped(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool left, bool right) {
  rfi_tval chars;
  if (!rfi_targs_bind(r, "strip", args, "chars", 0, &chars)) return rfi_tval_none();
  const rfi_text *set = NULL;
  if (chars.kind != RFI_T_ABSENT && chars.kind != RFI_T_NONE && !(set = text_argument(r, &chars, "strip")))
    return rfi_tval_none();
  return TEXT_VALUE(rfi_text_strip(r, self->as.text, set, left, right));
}

METHOD(strip) { return stripped(r, self, args, true, true); }
METHOD(lstrip) { return stripped(r, self, args, true, false); }
METHOD(rstrip) { return stripped(r, self, args, false, true); }

static rfi_tval cased(rfi_render *r, const rfi_tval *self, const rfi_targs *args, int how) {
  rfi_targs_bind(r, "this method", args, "", 0, NULL);
  return TEXT_VALUE(rfi_text_case(r, self->as.text, how));
}

METHOD(upper) { return cased(r, self, args, 'u'); }
METHOD(lower) { return cased(r, self, args, 'l'); }
METHOD(title) { return cased(r, self, args, 't'); }
METHOD(capitalize) { return cased(r, self, args, 'c'); }
METHOD(swapcase) { return cased(r, self, args, 's'); }

/* Whether [begin, end), in code points, of a text starts (or ends) with the part. */
static bool matches_edge(rfi_render *r, const rfi_text *s, const rfi_tval *part, size_t begin, size_t end,
                         bool at_end) {
  if (part->kind == RFI_T_TUPLE) {
    for (int64_t i = 0; i < part->as.list->n; i++)
      if (matches_edge(r, s, &part->as.list->items[i], begin, end, at_end)) return true;
    return false;
  }
  const rfi_text *p = text_argument(r, part, at_end ? "endswith" : "startswith");
  if (!p || begin > end || p->n > end - begin || !rfi_render_step(r, p->n / 64)) return false;
  return memcmp(s->data + (at_end ? end - p->n : begin), p->data, p->n) == 0;
}

/* The byte range of [start, stop) in code points; negative ones count from the end. */
static bool bounds(rfi_render *r, rfi_text *s, const rfi_tval *start, const rfi_tval *stop, size_t *begin,
                   size_t *end) {
  const int64_t n = rfi_text_chars(r, s);
  int64_t i = 0, k = n;
  if (start->kind != RFI_T_NONE && !int_argument(r, start, "a position", &i)) return false;
  if (stop->kind != RFI_T_NONE && !int_argument(r, stop, "a position", &k)) return false;
  if (i < 0 && (i += n) < 0) i = 0;
  if (k < 0 && (k += n) < 0) k = 0;
  if (k > n) k = n;
  if (i > n) return *begin = 1, *end = 0, true;
  *begin = rfi_text_offset(r, s, i);
  *end = rfi_text_offset(r, s, k);
  return true;
}

static rfi_tval edge(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool at_end) {
  rfi_tval v[3];
  size_t begin, end;
  if (!rfi_targs_bind(r, at_end ? "endswith" : "startswith", args, "prefix start end", 1, v) ||
      !bounds(r, self->as.text, &v[1], &v[2], &begin, &end))
    return rfi_tval_none();
  return rfi_tval_bool(matches_edge(r, self->as.text, &v[0], begin, end, at_end));
}

METHOD(startswith) { return edge(r, self, args, false); }
METHOD(endswith) { return edge(r, self, args, true); }

/* Byte of the last occurrence in [begin, end), or -1. */
static int64_t find_last(rfi_render *r, const rfi_text *s, const rfi_text *what, size_t begin, size_t end) {
  if (end < begin || end - begin < what->n) return -1;
  for (size_t i = end - what->n + 1; i-- > begin;) {
    if (what->n > 0 && s->data[i] != what->data[0]) continue;
    if (!rfi_render_step(r, 1 + what->n / 64)) return -1;
    if (memcmp(s->data + i, what->data, what->n) == 0) return (int64_t)i;
  }
  return -1;
}

static rfi_tval position(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool last, bool must) {
  rfi_tval v[3];
  size_t begin, end;
  rfi_text *s = self->as.text;
  if (!rfi_targs_bind(r, "find", args, "sub start end", 1, v) || !bounds(r, s, &v[1], &v[2], &begin, &end))
    return rfi_tval_none();
  const rfi_text *what = text_argument(r, &v[0], "find");
  if (!what) return rfi_tval_none();
  int64_t found = -1;
  rfi_render_step(r, s->n / 32);
  if (begin <= end) {
    rfi_text part = *s;
    part.n = (uint32_t)end;
    found = last ? find_last(r, s, what, begin, end) : rfi_text_find(&part, what, begin);
  }
  if (found < 0 && must) rfi_render_fail(r, "the string does not contain the substring");
  if (found < 0) return rfi_tval_int(-1);
  int64_t chars = 0;
  for (int64_t i = 0; i < found; i++) chars += ((unsigned char)s->data[i] & 0xC0) != 0x80;
  return rfi_tval_int(chars);
}

METHOD(find) { return position(r, self, args, false, false); }
METHOD(rfind) { return position(r, self, args, true, false); }
METHOD(index_of) { return position(r, self, args, false, true); }
METHOD(rindex_of) { return position(r, self, args, true, true); }

METHOD(count) {
  rfi_tval v[3];
  size_t begin, end;
  rfi_text *s = self->as.text;
  if (!rfi_targs_bind(r, "count", args, "sub start end", 1, v) || !bounds(r, s, &v[1], &v[2], &begin, &end))
    return rfi_tval_none();
  const rfi_text *what = text_argument(r, &v[0], "count");
  if (!what || begin > end) return rfi_tval_int(0);
  rfi_text part = *s;
  part.n = (uint32_t)end;
  int64_t n = 0;
  rfi_render_step(r, s->n / 32);
  if (what->n == 0) {
    for (size_t i = begin; i < end; i++) n += ((unsigned char)s->data[i] & 0xC0) != 0x80;
    return rfi_tval_int(n + 1);
  }
  for (int64_t at = (int64_t)begin; (at = rfi_text_find(&part, what, (size_t)at)) >= 0; at += what->n) n++;
  return rfi_tval_int(n);
}

METHOD(replace) {
  rfi_tval v[3];
  int64_t limit = -1;
  if (!rfi_targs_bind(r, "replace", args, "old new count", 2, v)) return rfi_tval_none();
  const rfi_text *old = text_argument(r, &v[0], "replace"), *with = text_argument(r, &v[1], "replace");
  if (!old || !with || !int_argument(r, &v[2], "replace", &limit)) return rfi_tval_none();
  return TEXT_VALUE(rfi_text_replace(r, self->as.text, old, with, limit));
}

/* Words between white space, from the left. */
static void split_words(rfi_render *r, const rfi_text *s, int64_t limit, rfi_tlist *list) {
  reader x = {.s = s};
  bool more = next_char(&x);
  while (more && rfi_render_step(r, 1)) {
    while (more && rfi_unicode_is_space(x.c)) more = next_char(&x);
    if (!more) return;
    const uint32_t begin = x.at;
    if (limit == 0) {
      rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, s->n));
      return;
    }
    while (more && !rfi_unicode_is_space(x.c)) more = next_char(&x);
    rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, more ? x.at : s->n));
    if (limit > 0) limit--;
  }
}

static void reverse(rfi_tlist *list) {
  for (int64_t i = 0; list && i < list->n / 2; i++) {
    const rfi_tval v = list->items[i];
    list->items[i] = list->items[list->n - 1 - i];
    list->items[list->n - 1 - i] = v;
  }
}

static void split_words_right(rfi_render *r, const rfi_text *s, int64_t limit, rfi_tlist *list) {
  const rfi_text *rest = rfi_text_strip(r, s, NULL, false, true);
  while (rest->n > 0 && rfi_render_step(r, 1)) {
    if (limit == 0) {
      rfi_tlist_add(r, list, rfi_text_slice(r, rest, 0, rest->n));
      break;
    }
    uint32_t begin = rest->n, size;
    for (uint32_t i = begin; i > 0;) {
      i--;
      while (i > 0 && ((unsigned char)rest->data[i] & 0xC0) == 0x80) i--;
      if (rfi_unicode_is_space(rfi_utf8_at(rest->data + i, rest->n - i, &size))) break;
      begin = i;
    }
    rfi_tlist_add(r, list, rfi_text_slice(r, rest, begin, rest->n));
    rest = rfi_text_strip(r, rfi_text_slice(r, rest, 0, begin).as.text, NULL, false, true);
    if (limit > 0) limit--;
  }
  reverse(list);
}

static rfi_tval split_at(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool right) {
  rfi_tval v[2];
  const rfi_text *s = self->as.text;
  int64_t limit = -1;
  if (!rfi_targs_bind(r, "split", args, "sep maxsplit", 0, v) || !int_argument(r, &v[1], "split", &limit))
    return rfi_tval_none();
  rfi_tlist *list = rfi_tlist_new(r);
  if (v[0].kind == RFI_T_ABSENT || v[0].kind == RFI_T_NONE) {
    if (right && limit >= 0) split_words_right(r, s, limit, list);
    else split_words(r, s, limit, list);
    return rfi_tlist_value(list, RFI_T_LIST);
  }
  const rfi_text *by = text_argument(r, &v[0], "split");
  if (!by) return rfi_tval_none();
  if (by->n == 0) return rfi_render_fail(r, "split needs a separator that is not empty"), rfi_tval_none();
  rfi_render_step(r, s->n / 32);
  if (right && limit >= 0) {
    size_t end = s->n;
    for (int64_t found; limit > 0 && (found = find_last(r, s, by, 0, end)) >= 0 && rfi_render_step(r, 1); limit--) {
      rfi_tlist_add(r, list, rfi_text_slice(r, s, (size_t)found + by->n, end));
      end = (size_t)found;
    }
    rfi_tlist_add(r, list, rfi_text_slice(r, s, 0, end));
    reverse(list);
    return rfi_tlist_value(list, RFI_T_LIST);
  }
  size_t begin = 0;
  for (int64_t found; limit != 0 && (found = rfi_text_find(s, by, begin)) >= 0 && rfi_render_step(r, 1); limit--) {
    rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, (size_t)found));
    begin = (size_t)found + by->n;
  }
  rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, s->n));
  return rfi_tlist_value(list, RFI_T_LIST);
}

METHOD(split) { return split_at(r, self, args, false); }
METHOD(rsplit) { return split_at(r, self, args, true); }

static rfi_tval partitioned(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool right) {
  rfi_tval by;
  const rfi_text *s = self->as.text;
  if (!rfi_targs_bind(r, "partition", args, "sep", 1, &by)) return rfi_tval_none();
  const rfi_text *p = text_argument(r, &by, "partition");
  if (!p || p->n == 0) return rfi_render_fail(r, "partition needs a separator"), rfi_tval_none();
  rfi_render_step(r, s->n / 32);
  const int64_t found = right ? find_last(r, s, p, 0, s->n) : rfi_text_find(s, p, 0);
  const size_t begin = found >= 0 ? (size_t)found : right ? 0 : s->n, end = found >= 0 ? begin + p->n : begin;
  rfi_tlist *list = rfi_tlist_new(r);
  rfi_tlist_add(r, list, rfi_text_slice(r, s, 0, begin));
  rfi_tlist_add(r, list, rfi_text_slice(r, s, begin, end));
  rfi_tlist_add(r, list, rfi_text_slice(r, s, end, s->n));
  return rfi_tlist_value(list, RFI_T_TUPLE);
}

METHOD(partition) { return partitioned(r, self, args, false); }
METHOD(rpartition) { return partitioned(r, self, args, true); }

METHOD(splitlines) {
  rfi_tval keep;
  if (!rfi_targs_bind(r, "splitlines", args, "keepends", 0, &keep)) return rfi_tval_none();
  return rfi_tlist_value(rfi_text_lines(r, self->as.text, rfi_tval_truth(&keep)), RFI_T_LIST);
}

METHOD(join) {
  rfi_tval v;
  if (!rfi_targs_bind(r, "join", args, "iterable", 1, &v)) return rfi_tval_none();
  const rfi_tlist *items = rfi_tval_items(r, &v);
  rfi_tbuilder b = {.r = r};
  for (int64_t i = 0; items && i < items->n && rfi_render_step(r, 1); i++) {
    const rfi_text *s = text_argument(r, &items->items[i], "join");
    if (i > 0) rfi_tbuilder_add_text(&b, self->as.text, 0, self->as.text->n);
    if (s) rfi_tbuilder_add_text(&b, s, 0, s->n);
  }
  return rfi_tbuilder_finish(&b);
}

static rfi_tval without_edge(rfi_render *r, const rfi_tval *self, const rfi_targs *args, bool at_end) {
  rfi_tval part;
  const rfi_text *s = self->as.text;
  if (!rfi_targs_bind(r, "removeprefix", args, "prefix", 1, &part)) return rfi_tval_none();
  const rfi_text *p = text_argument(r, &part, "removeprefix");
  if (!p || !matches_edge(r, s, &part, 0, s->n, at_end)) return *self;
  return at_end ? rfi_text_slice(r, s, 0, s->n - p->n) : rfi_text_slice(r, s, p->n, s->n);
}

METHOD(removeprefix) { return without_edge(r, self, args, false); }
METHOD(removesuffix) { return without_edge(r, self, args, true); }

static rfi_tval padded(rfi_render *r, const rfi_tval *self, const rfi_targs *args, int how) {
  rfi_tval v[2];
  int64_t width = 0;
  if (!rfi_targs_bind(r, "ljust", args, "width fillchar", 1, v) || !int_argument(r, &v[0], "ljust", &width))
    return rfi_tval_none();
  rfi_text space = {.data = " ", .n = 1, .chars = 1};
  rfi_text *fill = v[1].kind == RFI_T_TEXT ? v[1].as.text : &space;
  if (rfi_text_chars(r, fill) != 1) return rfi_render_fail(r, "the fill must be one character"), rfi_tval_none();
  const int64_t n = rfi_text_chars(r, self->as.text), missing = width > n ? width - n : 0;
  const int64_t left = how == 'l' ? 0 : how == 'r' ? missing : missing / 2 + (missing & width & 1);
  rfi_tbuilder b = {.r = r};
  for (int64_t i = 0; i < left && rfi_render_step(r, 1); i++) rfi_tbuilder_add_text(&b, fill, 0, fill->n);
  rfi_tbuilder_add_text(&b, self->as.text, 0, self->as.text->n);
  for (int64_t i = left; i < missing && rfi_render_step(r, 1); i++) rfi_tbuilder_add_text(&b, fill, 0, fill->n);
  return rfi_tbuilder_finish(&b);
}

METHOD(ljust) { return padded(r, self, args, 'l'); }
METHOD(rjust) { return padded(r, self, args, 'r'); }
METHOD(center) { return padded(r, self, args, 'c'); }

METHOD(zfill) {
  rfi_tval v;
  int64_t width = 0;
  const rfi_text *s = self->as.text;
  if (!rfi_targs_bind(r, "zfill", args, "width", 1, &v) || !int_argument(r, &v, "zfill", &width))
    return rfi_tval_none();
  rfi_tbuilder b = {.r = r};
  const size_t sign = s->n > 0 && (s->data[0] == '-' || s->data[0] == '+');
  rfi_tbuilder_add_text(&b, s, 0, sign);
  for (int64_t i = rfi_text_chars(r, self->as.text); i < width && rfi_render_step(r, 1); i++)
    rfi_tbuilder_add(&b, "0", 1, 0);
  rfi_tbuilder_add_text(&b, s, sign, s->n);
  return rfi_tbuilder_finish(&b);
}

/* "{} {0} {name}": fields without attributes, conversions and formats. */
METHOD(format) {
  const rfi_text *s = self->as.text;
  rfi_tbuilder b = {.r = r};
  int automatic = 0;
  for (uint32_t i = 0; i < s->n && rfi_render_step(r, 1);) {
    const char c = s->data[i];
    if (c != '{' && c != '}') {
      uint32_t end = i;
      while (end < s->n && s->data[end] != '{' && s->data[end] != '}') end++;
      rfi_tbuilder_add_text(&b, s, i, end);
      i = end;
      continue;
    }
    if (i + 1 < s->n && s->data[i + 1] == c) {
      rfi_tbuilder_add_text(&b, s, i, i + 1);
      i += 2;
      continue;
    }
    const char *end = c == '{' ? memchr(s->data + i, '}', s->n - i) : NULL;
    char name[64];
    const size_t n = end ? (size_t)(end - s->data) - i - 1 : sizeof name;
    if (n >= sizeof name) return rfi_render_fail(r, "a single '%c' in a format string", c), rfi_tval_none();
    memcpy(name, s->data + i + 1, n);
    name[n] = 0;
    if (strpbrk(name, ".[!:{"))
      return rfi_render_fail(r, "the format field {%s} is not supported", name), rfi_tval_none();
    const rfi_tval *value = NULL;
    if (n == 0 || (name[0] >= '0' && name[0] <= '9')) {
      const int64_t k = n == 0 ? automatic++ : (int64_t)rfi_strtod(name, NULL);
      if (k < args->n) value = &args->items[k];
    } else {
      for (int k = 0; k < args->n_named; k++)
        if (strcmp(args->names[k], name) == 0) value = &args->named[k];
    }
    if (!value) return rfi_render_fail(r, "the format field {%s} has no argument", name), rfi_tval_none();
    rfi_tval_print(&b, value);
    i += (uint32_t)n + 2;
  }
  return rfi_tbuilder_finish(&b);
}

static rfi_tval class_of(rfi_render *r, const rfi_tval *self, const rfi_targs *args, const char *name) {
  rfi_targs_bind(r, name, args, "", 0, NULL);
  return rfi_tval_bool(rfi_text_is_class(r, self->as.text, name));
}

METHOD(is_digit) { return class_of(r, self, args, "isdigit"); }
METHOD(is_alpha) { return class_of(r, self, args, "isalpha"); }
METHOD(is_alnum) { return class_of(r, self, args, "isalnum"); }
METHOD(is_numeric) { return class_of(r, self, args, "isnumeric"); }
METHOD(is_decimal) { return class_of(r, self, args, "isdecimal"); }
METHOD(is_space) { return class_of(r, self, args, "isspace"); }
METHOD(is_ascii) { return class_of(r, self, args, "isascii"); }
METHOD(is_all_lower) { return class_of(r, self, args, "islower"); }
METHOD(is_all_upper) { return class_of(r, self, args, "isupper"); }

rfi_tfunction rfi_text_method(const rfi_text *name) {
  static const struct {
    const char *name;
    rfi_tfunction call;
  } methods[] = {
      {"strip", strip},
      {"lstrip", lstrip},
      {"rstrip", rstrip},
      {"upper", upper},
      {"lower", lower},
      {"title", title},
      {"capitalize", capitalize},
      {"swapcase", swapcase},
      {"startswith", startswith},
      {"endswith", endswith},
      {"find", find},
      {"rfind", rfind},
      {"index", index_of},
      {"rindex", rindex_of},
      {"count", count},
      {"replace", replace},
      {"split", split},
      {"rsplit", rsplit},
      {"partition", partition},
      {"rpartition", rpartition},
      {"splitlines", splitlines},
      {"join", join},
      {"ljust", ljust},
      {"rjust", rjust},
      {"center", center},
      {"zfill", zfill},
      {"format", format},
      {"removeprefix", removeprefix},
      {"isdigit", is_digit},
      {"removesuffix", removesuffix},
      {"isalpha", is_alpha},
      {"isalnum", is_alnum},
      {"isnumeric", is_numeric},
      {"isdecimal", is_decimal},
      {"isspace", is_space},
      {"isascii", is_ascii},
      {"islower", is_all_lower},
      {"isupper", is_all_upper},
  };
  for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
    if (rfi_text_is(name, methods[i].name)) return methods[i].call;
  return NULL;
}
