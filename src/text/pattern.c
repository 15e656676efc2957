/* SPDX-License-Identifier: Apache-2.0
 *
 * Regular expressions of tokenizer.json. They are written for Oniguruma; PCRE2 runs them here. Every class is expanded
 * to ranges of the library's own table of categories, because \s and \p differ between libraries and their versions.
 * Constructs that mean something else in PCRE2 are refused by name.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer_parts.h"

enum { NESTING = 8, PATTERN_LIMIT = 16384, MATCH_LIMIT = 20000000 / RFI_WORK_DIVISOR, HEAP_KIB = 262144 };

struct rfi_pattern {
  char *literal; /* NULL: a regular expression */
  size_t n;
  pcre2_general_context *memory;
  pcre2_code *code;
  char where[64];
};

/* ---- translation ---- */

typedef uint64_t *set; /* of code points, see unicode.h */

typedef struct translation {
  rfr_ctx *ctx;
  const char *file, *where;
  const char *s;
  size_t n, i;
  rfi_string out;
  set sets[NESTING + 1]; /* one per level of nesting */
} translation;

#define REFUSE(t, ...) rfi_fail_at(RFI_E_TOKENIZER_UNSUPPORTED, (t)->file, 0, __VA_ARGS__)

static rfr_status unsupported(const translation *t, const char *what) {
  return REFUSE(t, "%s.pattern, byte %zu: %s is not supported in a regular expression", t->where, t->i, what);
}

static bool has_property(const translation *t, const char *name, uint32_t *mask) {
  static const struct {
    const char *name;
    uint32_t mask;
  } names[] = {{"L", RFI_LETTER},
               {"M", RFI_MARK},
               {"N", RFI_NUMBER},
               {"P", RFI_PUNCTUATION},
               {"S", RFI_SYMBOL},
               {"Z", RFI_IN(RFI_ZS) | RFI_IN(RFI_ZL) | RFI_IN(RFI_ZP)},
               {"C", RFI_IN(RFI_CC) | RFI_IN(RFI_CF) | RFI_IN(RFI_CO) | RFI_IN(RFI_CN)},
               {"Lu", RFI_IN(RFI_LU)},
               {"Ll", RFI_IN(RFI_LL)},
               {"Lt", RFI_IN(RFI_LT)},
               {"Lm", RFI_IN(RFI_LM)},
               {"Lo", RFI_IN(RFI_LO)},
               {"Mn", RFI_IN(RFI_MN)},
               {"Mc", RFI_IN(RFI_MC)},
               {"Me", RFI_IN(RFI_ME)},
               {"Nd", RFI_IN(RFI_ND)},
               {"Nl", RFI_IN(RFI_NL)},
               {"No", RFI_IN(RFI_NO)},
               {"Pc", RFI_IN(RFI_PC)},
               {"Pd", RFI_IN(RFI_PD)},
               {"Ps", RFI_IN(RFI_PS)},
               {"Pe", RFI_IN(RFI_PE)},
               {"Pi", RFI_IN(RFI_PI)},
               {"Pf", RFI_IN(RFI_PF)},
               {"Po", RFI_IN(RFI_PO)},
               {"Sm", RFI_IN(RFI_SM)},
               {"Sc", RFI_IN(RFI_SC)},
               {"Sk", RFI_IN(RFI_SK)},
               {"So", RFI_IN(RFI_SO)},
               {"Zs", RFI_IN(RFI_ZS)},
               {"Zl", RFI_IN(RFI_ZL)},
               {"Zp", RFI_IN(RFI_ZP)},
               {"Cc", RFI_IN(RFI_CC)},
               {"Cf", RFI_IN(RFI_CF)},
               {"Co", RFI_IN(RFI_CO)}};
  (void)t;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strcmp(names[i].name, name) == 0) return *mask = names[i].mask, true;
  return false;
}

/* Scripts that published patterns name; Unicode 16. */
static bool add_script(set x, const char *name) {
  static const struct {
    const char *name;
    uint32_t from, to;
  } rows[] = {
#include "text/unicode_scripts.def"
  };
  bool found = false;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if (strcmp(rows[i].name, name) == 0) rfi_set_add(x, rows[i].from, rows[i].to), found = true;
  return found;
}

/* Adds the class of an escape's letter; \p also reads its name. */
static rfr_status add_class(translation *t, char letter, set x) {
  set y = NULL;
  const bool invert = letter >= 'A' && letter <= 'Z';
  rfr_status s = RFI_ALLOC(t->ctx, RFI_SET_BYTES, &y);
  char name[24] = "";
  uint32_t mask = 0;
  bool negated = false;
  if (s != RFR_OK) return s;
  if (letter == 'p' || letter == 'P') {
    size_t n = 0;
    if (t->i < t->n && t->s[t->i] == '{') t->i++;
    if (t->i < t->n && t->s[t->i] == '^') negated = true, t->i++;
    while (t->i < t->n && t->s[t->i] != '}' && n + 1 < sizeof name) name[n++] = t->s[t->i++];
    if (t->i >= t->n || t->s[t->i] != '}' || (!has_property(t, name, &mask) && !add_script(y, name)))
      s = REFUSE(t, "%s.pattern: the property \\%c{%s} is not supported", t->where, letter, name);
    t->i++;
  } else if (letter == 's' || letter == 'S') {
    rfi_set_add_spaces(y);
  } else if (letter == 'd' || letter == 'D') mask = RFI_IN(RFI_ND);
  else if (letter == 'h' || letter == 'H') rfi_set_add(y, '0', '9'), rfi_set_add(y, 'a', 'f'), rfi_set_add(y, 'A', 'F');
  else { /* w: as in Oniguruma, with all numbers and without the joiners */
    mask = RFI_LETTER | RFI_MARK | RFI_NUMBER | RFI_IN(RFI_PC);
    rfi_set_add(y, 0x24B6, 0x24E9);
    rfi_set_add(y, 0x1F130, 0x1F149);
    rfi_set_add(y, 0x1F150, 0x1F169);
    rfi_set_add(y, 0x1F170, 0x1F189);
  }
  if (mask) rfi_set_add_categories(y, mask);
  if (invert != negated) rfi_set_invert(y);
  rfi_set_unite(x, y);
  rfi_free(t->ctx, y);
  return s;
}

/* Writes the set as a class of PCRE2, which has no surrogates. */
static rfr_status emit_set(translation *t, const uint64_t *x) {
  bool any = false;
  RFI_TRY(rfi_string_append(&t->out, "[", 1));
  for (uint32_t c = 0; (c = rfi_set_next(x, c, true)) < RFI_CODE_POINTS;) {
    const uint32_t from = c;
    c = rfi_set_next(x, c, false);
    if (from < 0xD800 && c > 0xD800) c = 0xD800;
    else if (from >= 0xD800 && from < 0xE000) {
      c = 0xE000;
      continue;
    }
    RFI_TRY(rfi_string_printf(&t->out, "\\x{%X}-\\x{%X}", from, c - 1));
    any = true;
  }
  if (!any) return unsupported(t, "an empty class");
  return rfi_string_append(&t->out, "]", 1);
}

/* The code point of an escape; *is_one false: the escape is something else, and t->i is unchanged. Starts after the
 * backslash. */
static rfr_status read_escaped(translation *t, uint32_t *c, bool *is_one) {
  static const char from[] = "nrtfvae", to[] = "\n\r\t\f\v\a\x1B";
  const char letter = t->i < t->n ? t->s[t->i] : 0;
  const char *at = letter ? strchr(from, letter) : NULL;
  *is_one = true;
  if (t->i >= t->n) return unsupported(t, "a backslash at the end");
  if (at) return *c = (unsigned char)to[at - from], t->i++, RFR_OK;
  if (letter == 'x' || letter == 'u') {
    const bool braces = letter == 'x' && t->i + 1 < t->n && t->s[t->i + 1] == '{';
    const size_t most = braces ? 6 : letter == 'x' ? 2 : 4;
    char digits[8] = "";
    size_t n = 0, i = t->i + 1 + braces;
    while (n < most && i < t->n && strchr("0123456789abcdefABCDEF", t->s[i]) && t->s[i]) digits[n++] = t->s[i++];
    if (n == 0 || (letter == 'u' && n < 4) || (braces && (i >= t->n || t->s[i] != '}')))
      return unsupported(t, "an incomplete code point");
    *c = (uint32_t)strtoul(digits, NULL, 16);
    if (*c >= RFI_CODE_POINTS || (*c >= 0xD800 && *c < 0xE000) || (letter == 'x' && !braces && *c >= 0x80))
      return unsupported(t, "this code point");
    t->i = i + braces;
    return RFR_OK;
  }
  if ((letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || (letter >= '0' && letter <= '9'))
    return *is_one = false, RFR_OK;
  *c = rfi_utf8_next(t->s, &t->i);
  return RFR_OK;
}

static bool names_class(char letter) { return letter && strchr("pPsSdDwWhH", letter) != NULL; }

/* Reads a class; starts after its bracket. */
static rfr_status read_set(translation *t, int depth) {
  set *level = &t->sets[depth];
  if (depth > NESTING) return unsupported(t, "so deep a class");
  if (!*level) RFI_TRY(RFI_ALLOC(t->ctx, RFI_SET_BYTES, level));
  set x = *level, all = NULL;
  memset(x, 0, RFI_SET_BYTES);
  const bool invert = t->i < t->n && t->s[t->i] == '^';
  rfr_status s = RFR_OK;
  t->i += invert;
  if (t->i < t->n && t->s[t->i] == ']') return unsupported(t, "a class that begins with ]");
  while (s == RFR_OK) {
    uint32_t from = 0, to;
    bool is_one = true;
    if (t->i >= t->n) s = unsupported(t, "a class without its end");
    if (s != RFR_OK) break;
    const char c = t->s[t->i];
    if (c == ']') {
      t->i++;
      break;
    }
    if (c == '[') {
      if (t->i + 1 < t->n && t->s[t->i + 1] == ':') s = unsupported(t, "a POSIX bracket");
      t->i++;
      if (s == RFR_OK) s = read_set(t, depth + 1);
      if (s == RFR_OK) rfi_set_unite(x, t->sets[depth + 1]);
      continue;
    }
    if (c == '&' && t->i + 1 < t->n && t->s[t->i + 1] == '&') {
      /* The set so far is the first operand; the second is read into an empty set. */
      t->i += 2;
      if (all) rfi_set_intersect(all, x);
      else if ((s = RFI_ALLOC(t->ctx, RFI_SET_BYTES, &all)) == RFR_OK) memcpy(all, x, RFI_SET_BYTES);
      memset(x, 0, RFI_SET_BYTES);
      continue;
    }
    if (c == '\\') {
      t->i++;
      if (t->i < t->n && names_class(t->s[t->i])) {
        s = add_class(t, t->s[t->i++], x);
        continue;
      }
      if (t->i < t->n && t->s[t->i] == 'b') from = 8, t->i++;
      else s = read_escaped(t, &from, &is_one);
      if (s == RFR_OK && !is_one) s = unsupported(t, "this escape");
    } else {
      from = rfi_utf8_next(t->s, &t->i);
    }
    to = from;
    if (s == RFR_OK && t->i + 1 < t->n && t->s[t->i] == '-' && t->s[t->i + 1] != ']') {
      t->i++;
      if (t->s[t->i] == '[') s = unsupported(t, "a range that ends with a class");
      else if (t->s[t->i] == '\\') {
        t->i++;
        s = read_escaped(t, &to, &is_one);
      } else to = rfi_utf8_next(t->s, &t->i);
      if (s == RFR_OK && (!is_one || to < from)) s = unsupported(t, "this range");
    }
    if (s == RFR_OK) rfi_set_add(x, from, to);
  }
  if (all) rfi_set_intersect(x, all);
  rfi_free(t->ctx, all);
  if (invert) rfi_set_invert(x);
  return s;
}

/* Reads "(": only groups that mean the same in PCRE2. */
static rfr_status read_group(translation *t) {
  static const char *const starts[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?i)", "(?-i:"};
  const char *rest = t->s + t->i;
  const size_t left = t->n - t->i;
  if (left < 2 || rest[1] != '?') return t->i++, rfi_string_append(&t->out, "(", 1);
  for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
    const size_t n = strlen(starts[i]);
    if (left < n || memcmp(rest, starts[i], n) != 0) continue;
    t->i += n;
    return rfi_string_append(&t->out, starts[i], n);
  }
  return unsupported(t, "this kind of group");
}

static rfr_status read_quantifier(translation *t) {
  size_t i = t->i + 1;
  while (i < t->n && (t->s[i] == ',' || (t->s[i] >= '0' && t->s[i] <= '9'))) i++;
  if (i >= t->n || t->s[i] != '}' || i == t->i + 1 || t->s[t->i + 1] == ',') return unsupported(t, "this use of {");
  if (i + 1 < t->n && t->s[i + 1] == '+') return unsupported(t, "}+");
  const size_t n = i + 1 - t->i;
  t->i = i + 1;
  return rfi_string_append(&t->out, t->s + t->i - n, n);
}

static rfr_status translate(translation *t) {
  while (t->i < t->n) {
    const char c = t->s[t->i];
    if (c == '\\') {
      uint32_t point;
      bool is_one;
      t->i++;
      const char letter = t->i < t->n ? t->s[t->i] : 0;
      if (names_class(letter)) {
        if (!t->sets[0]) RFI_TRY(RFI_ALLOC(t->ctx, RFI_SET_BYTES, &t->sets[0]));
        memset(t->sets[0], 0, RFI_SET_BYTES);
        t->i++;
        RFI_TRY(add_class(t, letter, t->sets[0]));
        RFI_TRY(emit_set(t, t->sets[0]));
        continue;
      }
      if (letter == 'A' || letter == 'z') {
        RFI_TRY(rfi_string_append(&t->out, t->s + t->i++ - 1, 2));
        continue;
      }
      RFI_TRY(read_escaped(t, &point, &is_one));
      if (!is_one) return unsupported(t, "this escape");
      RFI_TRY(rfi_string_printf(&t->out, "\\x{%X}", point));
    } else if (c == '[') {
      t->i++;
      RFI_TRY(read_set(t, 0));
      RFI_TRY(emit_set(t, t->sets[0]));
    } else if (c == '(') RFI_TRY(read_group(t));
    else if (c == '{') RFI_TRY(read_quantifier(t));
    else if (c == '^' || c == '$') return unsupported(t, "an anchor");
    else if (strchr("|)*+?.", c) && c) RFI_TRY(rfi_string_append(&t->out, t->s + t->i++, 1));
    else RFI_TRY(rfi_string_printf(&t->out, "\\x{%X}", rfi_utf8_next(t->s, &t->i)));
    if (t->out.n > (size_t)4 << 20) return unsupported(t, "a pattern of this length");
  }
  return RFR_OK;
}

/* ---- PCRE2 ---- */

static void *get_memory(PCRE2_SIZE n, void *ctx) {
  void *memory;
  return rfi_alloc(ctx, n, &memory) == RFR_OK ? memory : NULL;
}

static void free_memory(void *memory, void *ctx) { rfi_free(ctx, memory); }

static rfr_status no_memory(void) { return rfi_fail(RFI_E_NO_MEMORY, "out of memory in a regular expression"); }

static rfr_status compile(rfi_pattern *p, const translation *t) {
  int error;
  PCRE2_SIZE at;
  pcre2_compile_context *c = pcre2_compile_context_create(p->memory);
  if (!c) return no_memory();
  pcre2_set_newline(c, PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(c, 100);
  p->code = pcre2_compile((PCRE2_SPTR)(t->out.data ? t->out.data : ""), t->out.n, PCRE2_UTF | PCRE2_NO_UTF_CHECK,
                          &error, &at, c);
  pcre2_compile_context_free(c);
  if (p->code) {
    pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* if it fails, the interpreter gives the same matches */
    return RFR_OK;
  }
  char text[128] = "";
  if (error == PCRE2_ERROR_HEAP_FAILED) return no_memory();
  pcre2_get_error_message(error, (PCRE2_UCHAR *)text, sizeof text);
  return rfi_fail_at(RFI_E_TOKENIZER, t->file, 0, "%s.pattern is not a regular expression: %s", t->where, text);
}

rfr_status rfi_pattern_create(rfr_ctx *ctx, const char *file, const char *where, rfi_bytes text, rfi_pattern **out) {
  translation t = {.ctx = ctx, .file = file, .where = where, .s = text.text, .n = text.n};
  rfi_pattern *p = NULL;
  rfr_status s;
  *out = NULL;
  t.out.ctx = ctx;
  if (text.n > PATTERN_LIMIT) return REFUSE(&t, "%s.pattern has %zu bytes", where, text.n);
  if (rfi_utf8_valid(text.text, text.n) != text.n) return REFUSE(&t, "%s.pattern is not UTF-8", where);
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *p, &p));
  rfi_snprintf(p->where, sizeof p->where, "%s", where);
  p->memory = pcre2_general_context_create(get_memory, free_memory, ctx);
  if (!p->memory) RFI_GOTO(no_memory());
  RFI_GOTO(translate(&t));
  RFI_GOTO(compile(p, &t));
  *out = p;
fail: /* reached on success too */
  for (int i = 0; i <= NESTING; i++) rfi_free(ctx, t.sets[i]);
  rfi_string_deinit(&t.out);
  if (s != RFR_OK) rfi_pattern_destroy(ctx, p);
  return s;
}

rfr_status rfi_pattern_create_literal(rfr_ctx *ctx, rfi_bytes text, rfi_pattern **out) {
  rfi_pattern *p;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *p, &p));
  rfr_status s = RFI_ALLOC(ctx, text.n + 1, &p->literal);
  if (s == RFR_OK) memcpy(p->literal, text.text, p->n = text.n);
  if (s == RFR_OK) *out = p;
  else rfi_pattern_destroy(ctx, p);
  return s;
}

void rfi_pattern_destroy(rfr_ctx *ctx, rfi_pattern *p) {
  if (!p) return;
  pcre2_code_free(p->code);
  pcre2_general_context_free(p->memory);
  rfi_free(ctx, p->literal);
  rfi_free(ctx, p);
}

/* ---- matching ---- */

void rfi_pattern_release(rfi_encoder *e) {
  pcre2_match_data_free(e->match);
  pcre2_match_context_free(e->match_context);
  pcre2_jit_stack_free(e->jit_stack);
  pcre2_general_context_free(e->match_memory);
  e->match = e->match_context = e->jit_stack = e->match_memory = NULL;
}

static rfr_status prepare(rfi_encoder *e) {
  if (e->match) return RFR_OK;
  e->match_memory = pcre2_general_context_create(get_memory, free_memory, e->ctx);
  if (e->match_memory) e->match_context = pcre2_match_context_create(e->match_memory);
  if (e->match_context) e->jit_stack = pcre2_jit_stack_create(32768, (size_t)8 << 20, e->match_memory);
  if (e->jit_stack || (e->match_context && !e->jit_stack)) e->match = pcre2_match_data_create(1, e->match_memory);
  if (!e->match) {
    rfi_pattern_release(e);
    return no_memory();
  }
  pcre2_set_match_limit(e->match_context, MATCH_LIMIT);
  pcre2_set_heap_limit(e->match_context, HEAP_KIB);
  if (e->jit_stack) pcre2_jit_stack_assign(e->match_context, NULL, e->jit_stack);
  return RFR_OK;
}

rfr_status rfi_pattern_next(const rfi_pattern *p, rfi_encoder *e, const char *s, size_t n, size_t at, size_t last,
                            size_t *begin, size_t *end) {
  *begin = *end = SIZE_MAX;
  if (p->literal) {
    const char *found = at < n ? memmem(s + at, n - at, p->literal, p->n) : NULL;
    if (found) *begin = (size_t)(found - s), *end = *begin + p->n;
    return RFR_OK;
  }
  RFI_TRY(prepare(e));
  while (at <= n) {
    const int rc = pcre2_match(p->code, (PCRE2_SPTR)s, n, at, PCRE2_NO_UTF_CHECK, e->match, e->match_context);
    if (rc == PCRE2_ERROR_NOMATCH) return RFR_OK;
    if (rc == PCRE2_ERROR_NOMEMORY) return no_memory();
    if (rc < 0)
      return rfi_fail(RFI_E_TOKENIZER, "%s.pattern takes too many steps at byte %zu of a text of %zu bytes", p->where,
                      at, n);
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(e->match);
    if (found[0] != found[1] || found[1] != last) {
      *begin = found[0];
      *end = found[1];
      return RFR_OK;
    }
    at = found[1];
    if (at < n) rfi_utf8_next(s, &at);
    else at++;
  }
  return RFR_OK;
}
