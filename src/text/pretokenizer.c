/* SPDX-License-Identifier: Apache-2.0
 *
 * Pre-tokenizers: each step splits the pieces of the previous step, or writes a new text with prefixes or printable
 * bytes.
 *
 * The patterns of GPT-2, Llama 3 and Qwen have handwritten matchers, which are ten times as fast as PCRE2; the test
 * compares the two.
 */
#include <string.h>

#include "text/tokenizer_parts.h"

typedef enum matcher { NO_MATCHER, GPT2, LLAMA3, QWEN2 } matcher;

typedef struct step {
  rfi_step_kind kind;
  matcher matcher;
  rfi_pattern *pattern;
  rfi_split_behavior behavior;
  rfi_prepend_scheme scheme;
  bool invert, prefix, print, split, individual;
  char content[8]; /* one character */
  size_t n_content;
} step;

struct rfi_pretokenizer {
  const rfi_unicode *categories;
  step steps[RFI_STEPS_LIMIT];
  int n;
};

/* ---- creation ---- */

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
static const struct {
  matcher matcher;
  const char *text;
} known[] = {
    {GPT2, "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    {GPT2, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    {LLAMA3, CONTRACTIONS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
                          "\\s+(?!\\S)|\\s+"},
    {LLAMA3, CONTRACTIONS "[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|"
                          "\\s+(?!\\S)|\\s+"},
    {QWEN2, CONTRACTIONS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
                         "\\s+(?!\\S)|\\s+"},
};

rfi_bytes rfi_word_pattern_text(rfr_word_pattern pattern) {
  const matcher wanted = pattern == RFR_WORDS_LLAMA3 ? LLAMA3 : pattern == RFR_WORDS_QWEN2 ? QWEN2 : GPT2;
  size_t i = 0;
  while (known[i].matcher != wanted) i++;
  return (rfi_bytes){known[i].text, strlen(known[i].text)};
}

/* The matches of a known pattern cover the text, so keeping and isolating matches give the same pieces. */
static matcher find_matcher(const rfi_step *s) {
  const bool covers = s->behavior == RFI_SPLIT_ISOLATED || (s->behavior == RFI_SPLIT_REMOVED && s->invert);
  for (size_t i = 0; s->is_regex && covers && i < sizeof known / sizeof *known; i++)
    if (strlen(known[i].text) == s->pattern.n && memcmp(known[i].text, s->pattern.text, s->pattern.n) == 0)
      return known[i].matcher;
  return NO_MATCHER;
}

static rfr_status create_step(rfr_ctx *ctx, const char *file, const rfi_step *s, bool is_raw, step *out) {
  *out = (step){.kind = s->kind,
                .behavior = s->behavior,
                .scheme = s->scheme,
                .invert = s->invert,
                .prefix = s->prefix,
                .split = s->split,
                .individual = s->individual};
  if (s->kind == RFI_PRE_METASPACE) {
    if (s->content.n > sizeof out->content || s->content.n == 0)
      return rfi_fail_at(RFI_E_TOKENIZER, file, 0, "%s.replacement must be one character", s->where);
    memcpy(out->content, s->content.text, s->content.n);
    out->n_content = s->content.n;
  }
  if (s->kind == RFI_PRE_BYTE_LEVEL) {
    out->matcher = s->use_regex ? GPT2 : NO_MATCHER;
    out->print = !is_raw;
  }
  if (s->kind != RFI_PRE_SPLIT) return RFR_OK;
  out->matcher = find_matcher(s);
  if (out->matcher != NO_MATCHER) return RFR_OK;
  if (s->is_regex) return rfi_pattern_create(ctx, file, s->where, s->pattern, &out->pattern);
  return rfi_pattern_create_literal(ctx, s->pattern, &out->pattern);
}

rfr_status rfi_pretokenizer_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_unicode *categories,
                                   bool is_raw, rfi_pretokenizer **out) {
  rfr_status s;
  rfi_pretokenizer *p = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p, &p));
  p->categories = categories;
  for (int i = 0; i < spec->n_pre_tokenizers; i++, p->n++)
    RFI_GOTO(create_step(ctx, spec->name, &spec->pre_tokenizers[i], is_raw, &p->steps[i]));
  *out = p;
  return RFR_OK;
fail:
  rfi_pretokenizer_destroy(ctx, p);
  return s;
}

void rfi_pretokenizer_destroy(rfr_ctx *ctx, rfi_pretokenizer *p) {
  if (!p) return;
  for (int i = 0; i < p->n; i++) rfi_pattern_destroy(ctx, p->steps[i].pattern);
  rfi_free(ctx, p);
}

/* ---- classes of characters ---- */

typedef enum class { SPACE, LETTER, NUMBER, OTHER } class;

static inline class class_of(const rfi_unicode *categories, uint32_t c) {
  if (rfi_is_space(c)) return SPACE;
  const uint32_t bit = 1u << (rfi_flags(categories, c) & RFI_CATEGORY_MASK);
  return bit & RFI_LETTER ? LETTER : bit & RFI_NUMBER ? NUMBER : OTHER;
}

static const uint8_t ascii_class[128] = {
#define O OTHER
#define S SPACE
#define N NUMBER
#define L LETTER
    O, O, O, O, O, O, O, O, O, S, S, S, S, S, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O,
    S, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, N, N, N, N, N, N, N, N, N, N, O, O, O, O, O, O,
    O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O,
    O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O,
#undef O
#undef S
#undef N
#undef L
};

/* The class of the character at s[i]; *next is the start of the next character. */
static inline class class_at(const rfi_unicode *categories, const char *s, size_t i, size_t *next) {
  const unsigned char byte = (unsigned char)s[i];
  *next = i + 1;
  if (byte < 0x80) return (class)ascii_class[byte];
  *next = i;
  return class_of(categories, rfi_utf8_next(s, next));
}

/* The end of the sequence of one class that begins at or before i. */
static inline size_t run_end(const rfi_unicode *categories, const char *s, size_t n, size_t i, class c) {
  size_t next;
  while (i < n && class_at(categories, s, i, &next) == c) i = next;
  return i;
}

/* ---- matchers ---- */

/* The end of the white space at i, without its last character if a visible character follows and others remain:
 * \s+(?!\S)|\s+ */
static size_t space_end(const rfi_unicode *categories, const char *s, size_t n, size_t i) {
  const size_t end = run_end(categories, s, n, i, SPACE);
  if (end == n) return end;
  size_t last = end - 1;
  while (rfi_utf8_continues(s[last])) last--;
  return last > i ? last : end;
}

static size_t next_gpt2(const rfi_unicode *categories, const char *s, size_t n, size_t i) {
  size_t next, after;
  if (s[i] == '\'' && i + 1 < n) {
    const char a = s[i + 1], b = i + 2 < n ? s[i + 2] : 0;
    if (a == 's' || a == 'd' || a == 'm' || a == 't') return i + 2;
    if ((a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e')) return i + 3;
  }
  class c = class_at(categories, s, i, &next);
  if (s[i] == ' ' && next < n) {
    c = class_at(categories, s, next, &after);
    if (c != SPACE) next = after;
  }
  if (c != SPACE) return run_end(categories, s, n, next, c);
  return space_end(categories, s, n, i);
}

static char lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c; }

/* The end of 's, 't, 're, 've, 'm, 'll or 'd, in either case, at i; else 0. The long s is a form of s. */
static size_t contraction_end(const char *s, size_t n, size_t i) {
  if (s[i] != '\'' || i + 1 >= n) return 0;
  const char a = lower(s[i + 1]), b = i + 2 < n ? lower(s[i + 2]) : 0;
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return i + 3;
  return (unsigned char)s[i + 1] == 0xC5 && (unsigned char)b == 0xBF ? i + 3 : 0;
}

/* The pattern of Llama 3 with up to `digits` digits in a piece; the pattern of Qwen 2 has one. */
static size_t next_llama3(const rfi_unicode *categories, const char *s, size_t n, size_t i, int digits) {
  size_t next, after = 0;
  const size_t end = contraction_end(s, n, i);
  if (end) return end;
  class c = class_at(categories, s, i, &next);
  if (c == LETTER) return run_end(categories, s, n, next, LETTER);
  if (c == NUMBER) {
    for (int k = 1; k < digits && next < n && class_at(categories, s, next, &after) == NUMBER; k++) next = after;
    return next;
  }
  const class follows = next < n ? class_at(categories, s, next, &after) : SPACE;
  if (follows == LETTER && s[i] != '\r' && s[i] != '\n') return run_end(categories, s, n, after, LETTER);
  if (c == OTHER || (s[i] == ' ' && follows == OTHER)) {
    size_t k = run_end(categories, s, n, next, OTHER);
    while (k < n && (s[k] == '\r' || s[k] == '\n')) k++;
    return k;
  }
  const size_t spaces = run_end(categories, s, n, i, SPACE);
  for (size_t k = spaces; k > i; k--)
    if (s[k - 1] == '\r' || s[k - 1] == '\n') return k;
  return space_end(categories, s, n, i);
}

static rfr_status match_known(const rfi_pretokenizer *p, matcher m, rfr_ctx *ctx, const char *s, rfi_piece piece,
                              rfi_pieces *out) {
  const rfi_unicode *categories = p->categories;
  size_t end;
  for (size_t i = piece.begin; i < piece.end; i = end) {
    end = m == GPT2 ? next_gpt2(categories, s, piece.end, i)
                    : next_llama3(categories, s, piece.end, i, m == LLAMA3 ? 3 : 1);
    RFI_TRY(rfi_pieces_add(ctx, out, i, end));
  }
  return RFR_OK;
}

/* ---- splitting by a behavior ---- */

static rfr_status add_segment(rfi_encoder *e, size_t *n, size_t begin, size_t end, bool is_match) {
  if (*n == e->segments_capacity)
    RFI_TRY(rfi_grow(e->ctx, (void **)&e->segments, &e->segments_capacity, *n, *n + 1, sizeof *e->segments));
  e->segments[(*n)++] = (rfi_segment){(uint32_t)begin, (uint32_t)end, is_match};
  return RFR_OK;
}

static rfr_status keep(rfr_ctx *ctx, rfi_pieces *out, size_t begin, size_t end) {
  return begin < end ? rfi_pieces_add(ctx, out, begin, end) : RFR_OK;
}

/* Joins segments as the behavior requires. */
static rfr_status join(rfi_encoder *e, size_t n, rfi_split_behavior behavior, rfi_pieces *out) {
  const rfi_segment *x = e->segments;
  for (size_t i = 0, next; i < n; i = next) {
    size_t end = x[i].end;
    next = i + 1;
    if (behavior == RFI_SPLIT_REMOVED && x[i].is_match) continue;
    if (behavior == RFI_SPLIT_CONTIGUOUS)
      for (; next < n && x[next].is_match == x[i].is_match; next++) end = x[next].end;
    /* A match that follows another match is a separate piece. */
    if (behavior == RFI_SPLIT_MERGED_WITH_PREVIOUS && !x[i].is_match && next < n && x[next].is_match)
      end = x[next++].end;
    if (behavior == RFI_SPLIT_MERGED_WITH_NEXT && x[i].is_match && next < n && !x[next].is_match) end = x[next++].end;
    RFI_TRY(keep(e->ctx, out, x[i].begin, end));
  }
  return RFR_OK;
}

static rfr_status split_pattern(const step *t, rfi_encoder *e, const char *s, rfi_piece piece, rfi_pieces *out) {
  const size_t length = piece.end - piece.begin;
  size_t n = 0, before = 0, last = SIZE_MAX, at = 0, begin, end;
  for (;;) {
    RFI_TRY(rfi_pattern_next(t->pattern, e, s + piece.begin, length, at, last, &begin, &end));
    if (begin == SIZE_MAX) break;
    if (before < begin) RFI_TRY(add_segment(e, &n, piece.begin + before, piece.begin + begin, t->invert));
    RFI_TRY(add_segment(e, &n, piece.begin + begin, piece.begin + end, !t->invert));
    before = last = at = end;
  }
  if (before < length) RFI_TRY(add_segment(e, &n, piece.begin + before, piece.end, t->invert));
  return join(e, n, t->behavior, out);
}

/* Characters that the step's kind looks for. */
static bool is_matched(const rfi_pretokenizer *p, const step *t, uint32_t c) {
  switch (t->kind) {
    case RFI_PRE_DIGITS: return rfi_flags(p->categories, c) & RFI_IS_NUMERIC;
    case RFI_PRE_PUNCTUATION: return rfi_flags(p->categories, c) & RFI_IS_PUNCTUATION;
    default: return rfi_is_space(c);
  }
}

static rfr_status split_chars(const rfi_pretokenizer *p, const step *t, rfi_encoder *e, const char *s, rfi_piece piece,
                              rfi_split_behavior behavior, rfi_pieces *out) {
  size_t n = 0, before = piece.begin;
  for (size_t i = piece.begin; i < piece.end;) {
    const size_t at = i;
    if (!is_matched(p, t, rfi_utf8_next(s, &i))) continue;
    if (before < at) RFI_TRY(add_segment(e, &n, before, at, false));
    RFI_TRY(add_segment(e, &n, at, i, true));
    before = i;
  }
  if (before < piece.end) RFI_TRY(add_segment(e, &n, before, piece.end, false));
  return join(e, n, behavior, out);
}

/* Splits into sequences of word characters, and sequences of others that are not white space. */
static rfr_status split_words(const rfi_pretokenizer *p, rfr_ctx *ctx, const char *s, rfi_piece piece,
                              rfi_pieces *out) {
  size_t begin = piece.begin;
  int run = 0; /* 0: white space, 1: word, 2: other */
  for (size_t i = piece.begin; i < piece.end;) {
    const size_t at = i;
    const uint32_t c = rfi_utf8_next(s, &i);
    const int now = rfi_is_space(c) ? 0 : rfi_is_word(p->categories, c) ? 1 : 2;
    if (now == run) continue;
    if (run) RFI_TRY(keep(ctx, out, begin, at));
    begin = at;
    run = now;
  }
  return run ? keep(ctx, out, begin, piece.end) : RFR_OK;
}

/* Removes white space; each punctuation character is a piece. */
static rfr_status split_bert(const rfi_pretokenizer *p, rfr_ctx *ctx, const char *s, rfi_piece piece, rfi_pieces *out) {
  size_t begin = piece.begin;
  for (size_t i = piece.begin; i < piece.end;) {
    const size_t at = i;
    const uint32_t c = rfi_utf8_next(s, &i);
    const bool is_space = rfi_is_space(c);
    if (!is_space && !(rfi_flags(p->categories, c) & RFI_IS_PUNCTUATION)) continue;
    RFI_TRY(keep(ctx, out, begin, at));
    if (!is_space) RFI_TRY(keep(ctx, out, at, i));
    begin = i;
  }
  return keep(ctx, out, begin, piece.end);
}

/* A piece ends before each occurrence of the character. */
static rfr_status split_before(const step *t, rfr_ctx *ctx, const char *s, rfi_piece piece, rfi_pieces *out) {
  size_t begin = piece.begin;
  const size_t width = t->n_content;
  for (size_t i = begin; i < piece.end;) {
    const char *at = memchr(s + i, t->content[0], piece.end - i);
    if (!at) break;
    i = (size_t)(at - s);
    if (piece.end - i >= width && memcmp(at, t->content, width) == 0) {
      RFI_TRY(keep(ctx, out, begin, i));
      begin = i;
      i += width;
    } else {
      i++;
    }
  }
  return keep(ctx, out, begin, piece.end);
}

/* ---- steps that write a new text ---- */

static bool starts_with(const rfi_view *v, rfi_piece piece, const char *s, size_t n) {
  return piece.end - piece.begin >= n && memcmp(v->s + piece.begin, s, n) == 0;
}

/* Blanks become the replacement. */
static rfr_status write_metaspace(const step *t, rfi_encoder *e, const rfi_view *v, rfi_piece piece,
                                  rfi_text_buffer *b) {
  const bool at_start = rfi_origin(v, piece.begin) == 0;
  const bool has_it = v->s[piece.begin] == ' ' || starts_with(v, piece, t->content, t->n_content);
  if (!has_it && (t->scheme == RFI_PREPEND_ALWAYS || (t->scheme == RFI_PREPEND_FIRST && at_start)))
    RFI_TRY(rfi_text_buffer_put(e->ctx, b, t->content, t->n_content, rfi_origin(v, piece.begin)));
  for (size_t i = piece.begin; i < piece.end;) {
    const char *blank = memchr(v->s + i, ' ', piece.end - i);
    const size_t end = blank ? (size_t)(blank - v->s) : piece.end;
    RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, i, end));
    if (blank) RFI_TRY(rfi_text_buffer_put(e->ctx, b, t->content, t->n_content, rfi_origin(v, end)));
    i = end + (blank != NULL);
  }
  return RFR_OK;
}

rfr_status rfi_print_bytes(rfr_ctx *ctx, const rfi_view *v, size_t begin, size_t end, rfi_text_buffer *b) {
  char text[4];
  uint32_t origin = 0;
  for (size_t i = begin; i < end; i++) {
    if (!rfi_utf8_continues(v->s[i])) origin = rfi_origin(v, i);
    RFI_TRY(rfi_text_buffer_put(ctx, b, text, rfi_utf8_put(rfi_byte_char((unsigned char)v->s[i]), text), origin));
  }
  return RFR_OK;
}

typedef enum rewrite { METASPACE, PREFIX, PRINT } rewrite;

/* Writes all pieces into a buffer; *v becomes the buffer, and the pieces refer to it. */
static rfr_status rewrite_pieces(const step *t, rewrite what, rfi_encoder *e, rfi_view *v, const rfi_pieces *in,
                                 rfi_pieces *out) {
  rfi_text_buffer *b = &e->mapped[v->s == e->mapped[0].s && v->s];
  b->n = 0;
  out->n = 0;
  for (size_t k = 0; k < in->n; k++) {
    const rfi_piece piece = in->items[k];
    const size_t begin = b->n;
    if (what == METASPACE) RFI_TRY(write_metaspace(t, e, v, piece, b));
    else if (what == PRINT) RFI_TRY(rfi_print_bytes(e->ctx, v, piece.begin, piece.end, b));
    else {
      if (v->s[piece.begin] != ' ') RFI_TRY(rfi_text_buffer_put(e->ctx, b, " ", 1, rfi_origin(v, piece.begin)));
      RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, piece.begin, piece.end));
    }
    RFI_TRY(rfi_pieces_add(e->ctx, out, begin, b->n));
  }
  *v = rfi_text_buffer_view(b);
  return RFR_OK;
}

/* ---- all steps ---- */

static rfr_status split_piece(const rfi_pretokenizer *p, const step *t, rfi_encoder *e, const char *s, rfi_piece piece,
                              rfi_pieces *out) {
  if (t->matcher != NO_MATCHER) return match_known(p, t->matcher, e->ctx, s, piece, out);
  switch (t->kind) {
    case RFI_PRE_SPLIT: return split_pattern(t, e, s, piece, out);
    case RFI_PRE_METASPACE: return split_before(t, e->ctx, s, piece, out);
    case RFI_PRE_DIGITS:
      return split_chars(p, t, e, s, piece, t->individual ? RFI_SPLIT_ISOLATED : RFI_SPLIT_CONTIGUOUS, out);
    case RFI_PRE_PUNCTUATION: return split_chars(p, t, e, s, piece, t->behavior, out);
    case RFI_PRE_WHITESPACE_SPLIT: return split_chars(p, t, e, s, piece, RFI_SPLIT_REMOVED, out);
    case RFI_PRE_WHITESPACE: return split_words(p, e->ctx, s, piece, out);
    case RFI_PRE_BERT: return split_bert(p, e->ctx, s, piece, out);
    default: return rfi_pieces_add(e->ctx, out, piece.begin, piece.end);
  }
}

static void swap(rfi_pieces **a, rfi_pieces **b) {
  rfi_pieces *x = *a;
  *a = *b;
  *b = x;
}

rfr_status rfi_pretokenize(const rfi_pretokenizer *p, rfi_encoder *e, rfi_view *v, rfi_pieces **pieces) {
  rfi_pieces *in = &e->pieces[0], *out = &e->pieces[1];
  in->n = 0;
  RFI_TRY(rfi_pieces_add(e->ctx, in, 0, v->n));
  for (int i = 0; i < p->n; i++) {
    const step *t = &p->steps[i];
    const bool is_bytes = t->kind == RFI_PRE_BYTE_LEVEL, is_metaspace = t->kind == RFI_PRE_METASPACE;
    if (is_metaspace || (is_bytes && t->prefix)) {
      RFI_TRY(rewrite_pieces(t, is_metaspace ? METASPACE : PREFIX, e, v, in, out));
      swap(&in, &out);
    }
    if ((!is_bytes && !is_metaspace) || t->matcher != NO_MATCHER || (is_metaspace && t->split)) {
      out->n = 0;
      for (size_t k = 0; k < in->n; k++) RFI_TRY(split_piece(p, t, e, v->s, in->items[k], out));
      swap(&in, &out);
    }
    if (is_bytes && t->print) {
      RFI_TRY(rewrite_pieces(t, PRINT, e, v, in, out));
      swap(&in, &out);
    }
  }
  *pieces = in;
  return RFR_OK;
}
