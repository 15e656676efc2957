/* SPDX-License-Identifier: Apache-2.0
 *
 * Normalizers: each step writes a new text with the origin of every byte. A step that does not change an ASCII text
 * copies nothing.
 *
 * utf8proc decomposes and composes single characters and pairs. The loops over the text are here, because they track
 * origins. Characters that are newer than the tables of tokenizers have no decomposition (unicode_crates.def).
 */
#include <string.h>
#include <utf8proc.h>

#include "text/tokenizer_parts.h"

typedef struct step {
  rfi_step_kind kind;
  rfi_pattern *pattern;
  char *content;
  size_t n_content;
  bool left, right, clean, chinese, strip_accents, lowercase;
  uint32_t *trie; /* charsmap: a double array, and the texts to which it points */
  size_t n_trie;
  const char *texts;
  size_t n_texts;
} step;

struct rfi_normalizer {
  const rfi_unicode *categories;
  step steps[RFI_STEPS_LIMIT];
  int n;
};

/* A code point of a normal form; it replaces 1 - change characters of the text. As in tokenizers, offsets are counted
 * after the sort. */
typedef struct point {
  uint32_t c;
  int32_t change;
  uint8_t class;
} point;

/* ---- creation ---- */

static int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* A charsmap of sentencepiece in base64: the bytes of the double array, the array, and texts that end with NUL. */
static rfr_status read_charsmap(rfr_ctx *ctx, const char *file, const rfi_step *s, step *out) {
  const char *text = s->content.text;
  size_t n = s->content.n, at = 0;
  while (n > 0 && text[n - 1] == '=') n--;
  RFI_TRY(RFI_ALLOC(ctx, n + 8, &out->content));
  uint32_t bits = 0, size;
  for (size_t i = 0; i < n; i++) {
    const int digit = base64_digit(text[i]);
    if (digit < 0) return rfi_fail_at(RFI_E_TOKENIZER, file, 0, "%s.precompiled_charsmap is not base64", s->where);
    bits = bits << 6 | (uint32_t)digit;
    if (i % 4) out->content[at++] = (char)(bits >> (6 - 2 * (i % 4)));
  }
  if (at >= 4) memcpy(&size, out->content, 4);
  if (at < 4 || size > at - 4 || size % 4 || size < 4)
    return rfi_fail_at(RFI_E_TOKENIZER, file, 0, "%s.precompiled_charsmap is truncated", s->where);
  out->n_trie = size / 4;
  RFI_TRY(RFI_ALLOC(ctx, size, &out->trie));
  memcpy(out->trie, out->content + 4, size);
  out->texts = out->content + 4 + size;
  out->n_texts = at - 4 - size;
  if (rfi_utf8_valid(out->texts, out->n_texts) != out->n_texts)
    return rfi_fail_at(RFI_E_TOKENIZER, file, 0, "%s.precompiled_charsmap has texts that are not UTF-8", s->where);
  return RFR_OK;
}

static rfr_status create_step(rfr_ctx *ctx, const char *file, const rfi_step *s, step *out) {
  *out = (step){.kind = s->kind,
                .left = s->left,
                .right = s->right,
                .clean = s->clean,
                .chinese = s->chinese,
                .strip_accents = s->strip_accents,
                .lowercase = s->lowercase};
  if (s->kind == RFI_NORM_PRECOMPILED) return read_charsmap(ctx, file, s, out);
  RFI_TRY(RFI_ALLOC(ctx, s->content.n + 1, &out->content));
  if (s->content.n) memcpy(out->content, s->content.text, s->content.n);
  out->n_content = s->content.n;
  if (s->kind != RFI_NORM_REPLACE) return RFR_OK;
  if (s->is_regex) return rfi_pattern_create(ctx, file, s->where, s->pattern, &out->pattern);
  return rfi_pattern_create_literal(ctx, s->pattern, &out->pattern);
}

rfr_status rfi_normalizer_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_unicode *categories,
                                 rfi_normalizer **out) {
  rfr_status s;
  rfi_normalizer *p = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p, &p));
  p->categories = categories;
  for (int i = 0; i < spec->n_normalizers; i++)
    RFI_GOTO(create_step(ctx, spec->name, &spec->normalizers[i], &p->steps[p->n++]));
  *out = p;
  return RFR_OK;
fail:
  rfi_normalizer_destroy(ctx, p);
  return s;
}

void rfi_normalizer_destroy(rfr_ctx *ctx, rfi_normalizer *p) {
  if (!p) return;
  for (int i = 0; i < p->n; i++) {
    rfi_pattern_destroy(ctx, p->steps[i].pattern);
    rfi_free(ctx, p->steps[i].content);
    rfi_free(ctx, p->steps[i].trie);
  }
  rfi_free(ctx, p);
}

/* ---- normal forms ---- */

static rfr_status put_char(rfi_encoder *e, rfi_text_buffer *b, uint32_t c, uint32_t origin) {
  char text[4];
  return rfi_text_buffer_put(e->ctx, b, text, rfi_utf8_put(c, text), origin);
}

static rfr_status add_point(rfi_encoder *e, size_t *n, uint32_t c, int32_t change, const rfi_unicode *categories) {
  point *x = e->points[0];
  if (*n == e->points_capacity[0]) {
    RFI_TRY(rfi_grow(e->ctx, &e->points[0], &e->points_capacity[0], *n, *n + 1, sizeof *x));
    x = e->points[0];
  }
  const uint8_t class = (uint8_t)utf8proc_get_property((utf8proc_int32_t)c)->combining_class;
  x[(*n)++] = (point){c, change, rfi_flags(categories, c) & RFI_IS_MARK ? class : 0};
  return RFR_OK;
}

/* Sorts sequences of marks by their class; equal ones keep their order. Long sequences use counting, which takes linear
 * time. */
static rfr_status sort_marks(rfi_encoder *e, size_t n) {
  point *x = e->points[0];
  for (size_t i = 0; i < n;) {
    size_t end = i;
    while (end < n && x[end].class) end++;
    if (end - i > 1 && end - i <= 32) {
      for (size_t k = i + 1; k < end; k++) {
        const point moved = x[k];
        size_t j = k;
        for (; j > i && x[j - 1].class > moved.class; j--) x[j] = x[j - 1];
        x[j] = moved;
      }
    } else if (end - i > 32) {
      size_t start[257] = {0};
      if (end - i > e->points_capacity[1])
        RFI_TRY(rfi_grow(e->ctx, &e->points[1], &e->points_capacity[1], 0, end - i, sizeof *x));
      point *y = e->points[1];
      for (size_t k = i; k < end; k++) start[x[k].class + 1]++;
      for (int c = 0; c < 256; c++) start[c + 1] += start[c];
      for (size_t k = i; k < end; k++) y[start[x[k].class]++] = x[k];
      memcpy(x + i, y, (end - i) * sizeof *x);
    }
    i = end > i ? end : i + 1;
  }
  return RFR_OK;
}

/* The character that a pair composes to; 0: none. */
static uint32_t composed(const rfi_unicode *categories, uint32_t a, uint32_t b) {
  utf8proc_int32_t pair[2] = {(utf8proc_int32_t)a, (utf8proc_int32_t)b};
  if (b < 0x300 || utf8proc_normalize_utf32(pair, 2, UTF8PROC_COMPOSE | UTF8PROC_STABLE) != 1) return 0;
  return rfi_flags(categories, pair[0]) & RFI_NO_DECOMPOSITION ? 0 : (uint32_t)pair[0];
}

static size_t compose(const rfi_unicode *categories, point *x, size_t n) {
  size_t out = 0, starter = SIZE_MAX;
  int last = -1; /* class of the last character that was kept after the starter */
  for (size_t i = 0; i < n; i++) {
    if (starter != SIZE_MAX && (last < 0 || last < x[i].class)) {
      const uint32_t c = composed(categories, x[starter].c, x[i].c);
      if (c) {
        x[starter].c = c;
        x[starter].change += x[i].change - 1;
        continue;
      }
    }
    if (x[i].class == 0) starter = out, last = -1;
    else last = x[i].class;
    x[out++] = x[i];
  }
  return out;
}

static bool is_ascii(const rfi_view *v) {
  for (size_t i = 0; i < v->n; i++)
    if ((unsigned char)v->s[i] >= 0x80) return false;
  return true;
}

static rfr_status write_form(const rfi_unicode *categories, rfi_encoder *e, const rfi_view *v, bool compat,
                             bool composes, rfi_text_buffer *b) {
  size_t n = 0;
  for (size_t i = 0; i < v->n;) {
    const uint32_t c = rfi_utf8_next(v->s, &i);
    utf8proc_int32_t parts[32];
    int state = 0;
    utf8proc_ssize_t count = 1;
    parts[0] = (utf8proc_int32_t)c;
    if (c >= 0xA0 && !(rfi_flags(categories, c) & RFI_NO_DECOMPOSITION))
      count = utf8proc_decompose_char((utf8proc_int32_t)c, parts, 32,
                                      UTF8PROC_DECOMPOSE | (compat ? UTF8PROC_COMPAT : 0), &state);
    if (count < 1 || count > 32) parts[0] = (utf8proc_int32_t)c, count = 1;
    for (utf8proc_ssize_t k = 0; k < count; k++) RFI_TRY(add_point(e, &n, (uint32_t)parts[k], k > 0, categories));
  }
  RFI_TRY(sort_marks(e, n));
  if (composes) n = compose(categories, e->points[0], n);
  const point *x = e->points[0];
  size_t from = 0, last = 0;
  for (size_t i = 0; i < n; i++) {
    RFI_TRY(put_char(e, b, x[i].c, rfi_origin(v, x[i].change > 0 || from == v->n ? last : from)));
    for (int32_t k = x[i].change; k <= 0 && from < v->n; k++) {
      last = from;
      rfi_utf8_next(v->s, &from);
    }
  }
  return RFR_OK;
}

/* Copies sequences of characters that the form does not change and that start no decomposition: below U+0300 for NFC,
 * else ASCII. The last character before others is not copied, because it may compose with them. */
static rfr_status write_runs(const rfi_unicode *categories, rfi_encoder *e, const rfi_view *v, bool compat,
                             bool composes, rfi_text_buffer *b) {
  const unsigned char lead = composes && !compat ? 0xCC : 0x80;
  for (size_t i = 0; i < v->n;) {
    size_t run = i;
    while (run < v->n && (unsigned char)v->s[run] < lead) run++;
    size_t begin = run, end = run;
    if (run < v->n && run > i) {
      begin--;
      while (rfi_utf8_continues(v->s[begin])) begin--;
    }
    RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, i, begin));
    while (end < v->n && (unsigned char)v->s[end] >= lead) rfi_utf8_next(v->s, &end);
    const rfi_view part = rfi_view_part(v, begin, end);
    if (begin < end) RFI_TRY(write_form(categories, e, &part, compat, composes, b));
    i = end;
  }
  return RFR_OK;
}

/* ---- single characters ---- */

static bool is_nmt_control(uint32_t c) {
  return (c >= 1 && c <= 8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F;
}

static bool is_nmt_space(uint32_t c) {
  return c == 9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 || (c >= 0x200B && c <= 0x200F) || c == 0x2028 ||
         c == 0x2029 || c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
}

typedef enum pass { LOWER, STRIP_MARKS, STRIP_BERT_MARKS, CLEAN, CHINESE, NMT } pass;

static rfr_status write_char(const rfi_unicode *categories, rfi_encoder *e, pass what, uint32_t c, uint32_t origin,
                             rfi_text_buffer *b) {
  const uint16_t flags = rfi_flags(categories, c);
  switch (what) {
    case LOWER:
      RFI_TRY(put_char(e, b, c == 0x130 ? 'i' : rfi_lower(categories, c), origin));
      return c == 0x130 ? put_char(e, b, 0x307, origin) : RFR_OK;
    case STRIP_MARKS: return flags & RFI_IS_MARK ? RFR_OK : put_char(e, b, c, origin);
    case STRIP_BERT_MARKS: return flags & RFI_IS_BERT_MARK ? RFR_OK : put_char(e, b, c, origin);
    case CLEAN:
      if (c == '\t' || c == '\n' || c == '\r') return put_char(e, b, ' ', origin);
      if (c == 0xFFFD || flags & RFI_IS_CONTROL) return RFR_OK;
      return put_char(e, b, rfi_is_space(c) ? ' ' : c, origin);
    case CHINESE:
      if (flags & RFI_IS_CHINESE) RFI_TRY(put_char(e, b, ' ', origin));
      RFI_TRY(put_char(e, b, c, origin));
      return flags & RFI_IS_CHINESE ? put_char(e, b, ' ', origin) : RFR_OK;
    default: return is_nmt_control(c) ? RFR_OK : put_char(e, b, is_nmt_space(c) ? ' ' : c, origin);
  }
}

static rfr_status write_chars(const rfi_unicode *categories, rfi_encoder *e, const rfi_view *v, pass what,
                              rfi_text_buffer *b) {
  for (size_t i = 0; i < v->n;) {
    const uint32_t origin = rfi_origin(v, i);
    RFI_TRY(write_char(categories, e, what, rfi_utf8_next(v->s, &i), origin, b));
  }
  return RFR_OK;
}

/* ---- sentencepiece's charsmap ---- */

/* The replacement of the shortest prefix of s in the map, as in tokenizers. False: none. */
static bool charsmap_find(const step *t, const char *s, size_t n, rfi_bytes *out) {
  size_t at = 0;
  uint32_t unit = t->trie[0];
#define OFFSET(unit) ((size_t)((unit) >> 10) << (((unit) & (1u << 9)) >> 6))
  at ^= OFFSET(unit);
  for (size_t i = 0; i < n && s[i]; i++) {
    at ^= (unsigned char)s[i];
    if (at >= t->n_trie) return false;
    unit = t->trie[at];
    if ((unit & (1u << 31 | 0xFF)) != (unsigned char)s[i]) return false;
    at ^= OFFSET(unit);
    if (!(unit >> 8 & 1)) continue;
    if (at >= t->n_trie) return false;
    const size_t begin = t->trie[at] & 0x7FFFFFFF;
    if (begin > t->n_texts) return false;
    const char *end = memchr(t->texts + begin, 0, t->n_texts - begin);
    *out = (rfi_bytes){t->texts + begin, (end ? (size_t)(end - t->texts) : t->n_texts) - begin};
    return begin == t->n_texts || !rfi_utf8_continues(t->texts[begin]);
  }
#undef OFFSET
  return false;
}

/* The end of the grapheme cluster at i. */
static size_t grapheme_end(const rfi_view *v, size_t i) {
  utf8proc_int32_t state = 0;
  uint32_t before = rfi_utf8_next(v->s, &i);
  while (i < v->n) {
    size_t next = i;
    const uint32_t c = rfi_utf8_next(v->s, &next);
    if (utf8proc_grapheme_break_stateful((utf8proc_int32_t)before, (utf8proc_int32_t)c, &state)) break;
    before = c;
    i = next;
  }
  return i;
}

/* Writes a replacement; the origin of its k-th character is the k-th replaced character, or the last. */
static rfr_status write_replaced(rfi_encoder *e, const rfi_view *v, size_t begin, size_t end, rfi_bytes by,
                                 rfi_text_buffer *b) {
  size_t from = begin;
  for (size_t i = 0; i < by.n;) {
    const size_t at = i;
    size_t next = from;
    rfi_utf8_next(by.text, &i);
    RFI_TRY(rfi_text_buffer_put(e->ctx, b, by.text + at, i - at, rfi_origin(v, from)));
    rfi_utf8_next(v->s, &next);
    if (next < end) from = next;
  }
  return RFR_OK;
}

static rfr_status write_charsmap(const step *t, rfi_encoder *e, const rfi_view *v, rfi_text_buffer *b) {
  rfi_bytes by;
  for (size_t i = 0, end; i < v->n; i = end) {
    end = grapheme_end(v, i);
    if (end - i < 6 && charsmap_find(t, v->s + i, end - i, &by)) {
      RFI_TRY(write_replaced(e, v, i, end, by, b));
      continue;
    }
    for (size_t at = i, next; at < end; at = next) {
      next = at;
      rfi_utf8_next(v->s, &next);
      if (charsmap_find(t, v->s + at, next - at, &by)) RFI_TRY(write_replaced(e, v, at, next, by, b));
      else RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, at, next));
    }
  }
  return RFR_OK;
}

/* ---- all steps ---- */

/* The origin of `content` is the last character that it replaces. */
static rfr_status write_replace(const step *t, rfi_encoder *e, const rfi_view *v, rfi_text_buffer *b) {
  size_t at = 0, last = SIZE_MAX, done = 0, begin, end;
  for (;;) {
    RFI_TRY(rfi_pattern_next(t->pattern, e, v->s, v->n, at, last, &begin, &end));
    if (begin == SIZE_MAX) break;
    RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, done, begin));
    size_t from = end > begin ? end - 1 : begin > 0 ? begin - 1 : 0;
    while (from > 0 && rfi_utf8_continues(v->s[from])) from--;
    RFI_TRY(rfi_text_buffer_put(e->ctx, b, t->content, t->n_content, rfi_origin(v, from)));
    done = last = at = end;
  }
  return rfi_text_buffer_copy(e->ctx, b, v, done, v->n);
}

static rfi_view stripped(const step *t, const rfi_view *v) {
  size_t begin = 0, end = v->n;
  while (t->left && begin < end) {
    size_t next = begin;
    if (!rfi_is_space(rfi_utf8_next(v->s, &next))) break;
    begin = next;
  }
  while (t->right && end > begin) {
    size_t last = end - 1, next;
    while (rfi_utf8_continues(v->s[last])) last--;
    next = last;
    if (!rfi_is_space(rfi_utf8_next(v->s, &next))) break;
    end = last;
  }
  return rfi_view_part(v, begin, end);
}

/* Returns the buffer in which *v does not lie. */
static rfi_text_buffer *next_buffer(rfi_encoder *e, const rfi_view *v) {
  rfi_text_buffer *first = &e->normal[0];
  rfi_text_buffer *b = first->s && v->s >= first->s && v->s < first->s + first->capacity ? &e->normal[1] : first;
  b->n = 0;
  return b;
}

static rfr_status apply_chars(const rfi_normalizer *p, rfi_encoder *e, rfi_view *v, pass what) {
  rfi_text_buffer *b = next_buffer(e, v);
  RFI_TRY(write_chars(p->categories, e, v, what, b));
  *v = rfi_text_buffer_view(b);
  return RFR_OK;
}

/* Whether all characters are below U+0300: such a text is in NFC. */
static bool is_latin(const rfi_view *v) {
  for (size_t i = 0; i < v->n; i++)
    if ((unsigned char)v->s[i] >= 0xCC) return false;
  return true;
}

static rfr_status apply_form(const rfi_normalizer *p, rfi_encoder *e, rfi_view *v, bool compat, bool composes) {
  if (is_ascii(v) || (composes && !compat && is_latin(v))) return RFR_OK;
  rfi_text_buffer *b = next_buffer(e, v);
  RFI_TRY(write_runs(p->categories, e, v, compat, composes, b));
  *v = rfi_text_buffer_view(b);
  return RFR_OK;
}

static rfr_status apply_bert(const rfi_normalizer *p, const step *t, rfi_encoder *e, rfi_view *v) {
  if (t->clean) RFI_TRY(apply_chars(p, e, v, CLEAN));
  if (t->chinese && !is_ascii(v)) RFI_TRY(apply_chars(p, e, v, CHINESE));
  if (t->strip_accents && !is_ascii(v)) {
    RFI_TRY(apply_form(p, e, v, false, false));
    RFI_TRY(apply_chars(p, e, v, STRIP_BERT_MARKS));
  }
  return t->lowercase ? apply_chars(p, e, v, LOWER) : RFR_OK;
}

static rfr_status apply(const rfi_normalizer *p, const step *t, rfi_encoder *e, rfi_view *v) {
  rfi_text_buffer *b;
  switch (t->kind) {
    case RFI_NORM_NFC: return apply_form(p, e, v, false, true);
    case RFI_NORM_NFD: return apply_form(p, e, v, false, false);
    case RFI_NORM_NFKC: return apply_form(p, e, v, true, true);
    case RFI_NORM_NFKD: return apply_form(p, e, v, true, false);
    case RFI_NORM_LOWERCASE: return apply_chars(p, e, v, LOWER);
    case RFI_NORM_STRIP_ACCENTS: return is_ascii(v) ? RFR_OK : apply_chars(p, e, v, STRIP_MARKS);
    case RFI_NORM_NMT: return apply_chars(p, e, v, NMT);
    case RFI_NORM_BERT: return apply_bert(p, t, e, v);
    case RFI_NORM_STRIP: *v = stripped(t, v); return RFR_OK;
    default: break;
  }
  b = next_buffer(e, v);
  if (t->kind == RFI_NORM_REPLACE) RFI_TRY(write_replace(t, e, v, b));
  else if (t->kind == RFI_NORM_PRECOMPILED) RFI_TRY(write_charsmap(t, e, v, b));
  else if (t->kind == RFI_NORM_BYTE_LEVEL) RFI_TRY(rfi_print_bytes(e->ctx, v, 0, v->n, b));
  else { /* Prepend */ RFI_TRY(rfi_text_buffer_put(e->ctx, b, t->content, t->n_content, rfi_origin(v, 0)));
    RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, 0, v->n));
  }
  *v = rfi_text_buffer_view(b);
  return RFR_OK;
}

rfr_status rfi_normalize(const rfi_normalizer *p, rfi_encoder *e, rfi_view *v) {
  for (int i = 0; i < p->n && v->n > 0; i++) RFI_TRY(apply(p, &p->steps[i], e, v));
  return RFR_OK;
}
