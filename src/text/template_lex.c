/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of a template, with trim_blocks and lstrip_blocks on, as transformers sets them.
 *
 * The rules are those of jinja2's lexer, in its order: data up to the next tag, then the inside of the tag. A tag ends
 * only when all its brackets are closed, so "}}" of a nested dictionary does not end it. Two rules remove white space:
 * "-" at a tag removes all white space on that side; without a sign, a block or comment removes the blanks before it on
 * its line and the line end after it.
 */
#include <stdlib.h>
#include <string.h>

#include "text/template_node.h"
#include "text/template_value.h"

enum { MAX_TOKENS = 1 << 20, MAX_BRACKETS = 256 };

typedef struct lexer {
  rfi_template *t;
  const char *s;
  uint32_t n, at;
} lexer;

rfr_status rfi_template_fail(const rfi_template *t, rfi_error error, uint32_t at, const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(text, sizeof text, format, args);
  va_end(args);
  int64_t line = 1, column = 1;
  for (uint32_t i = 0; i < at && i < t->n; i++) {
    if (t->source[i] == '\n') {
      line++;
      column = 1;
    } else if (((unsigned char)t->source[i] & 0xC0) != 0x80) {
      column++;
    }
  }
  return rfi_fail_at(error, t->name, line, "column %lld: %s", (long long)column, text);
}

static rfr_status fail(const lexer *x, uint32_t at, const char *text) {
  return rfi_template_fail(x->t, RFI_E_TEMPLATE_SYNTAX, at, "%s", text);
}

static rfr_status add(lexer *x, rfi_ttoken token) {
  rfi_template *t = x->t;
  if (t->n_tokens >= MAX_TOKENS) return fail(x, token.at, "the template has too many tokens");
  if (!rfi_arena_grow(t->arena, (void **)&t->tokens, &t->capacity, t->n_tokens + 1, sizeof *t->tokens))
    return rfr_last_error()->status;
  t->tokens[t->n_tokens++] = token;
  return RFR_OK;
}

static char at(const lexer *x, uint32_t i) { return i < x->n ? x->s[i] : 0; }

static bool is_at(const lexer *x, uint32_t i, const char *text) {
  const size_t n = strlen(text);
  return x->n - i >= n && i <= x->n && memcmp(x->s + i, text, n) == 0;
}

/* The first byte from i on that is not white space. */
static uint32_t skip_space(const lexer *x, uint32_t i) {
  while (i < x->n) {
    uint32_t size;
    const int32_t c = rfi_utf8_at(x->s + i, x->n - i, &size);
    if (!rfi_unicode_is_space(c)) break;
    i += size;
  }
  return i;
}

/* The end of [begin, end) without trailing white space. */
static uint32_t strip_end(const lexer *x, uint32_t begin, uint32_t end) {
  while (end > begin) {
    uint32_t i = end - 1;
    while (i > begin && ((unsigned char)x->s[i] & 0xC0) == 0x80) i--;
    uint32_t size;
    if (!rfi_unicode_is_space(rfi_utf8_at(x->s + i, end - i, &size))) break;
    end = i;
  }
  return end;
}

/* Recognizes the end of a tag: returns the byte after "%}" and so on, including its sign and the white space that it
 * removes; otherwise 0. */
static uint32_t tag_end(const lexer *x, uint32_t i, const char *end, bool trims) {
  if (at(x, i) == '-' && is_at(x, i + 1, end)) return skip_space(x, i + 3);
  if (trims && at(x, i) == '+' && is_at(x, i + 1, end)) return i + 3;
  if (!is_at(x, i, end)) return 0;
  return i + 2 + (trims && at(x, i + 2) == '\n');
}

/* Adds the data [begin, end) before a tag with this sign. */
static rfr_status add_data(lexer *x, uint32_t begin, uint32_t end, char sign, bool is_variable) {
  if (sign == '-') {
    end = strip_end(x, begin, end);
  } else if (sign != '+' && !is_variable) {
    uint32_t line = end;
    while (line > begin && x->s[line - 1] != '\n') line--;
    if ((line > begin || begin == 0 || x->s[begin - 1] == '\n') && line < end && skip_space(x, line) >= end) end = line;
  }
  if (begin == end) return RFR_OK;
  return add(x, (rfi_ttoken){.type = RFI_TOKEN_DATA, .at = begin, .text = x->s + begin, .n = end - begin});
}

/* The byte after `{% raw %}` if that is at i, otherwise 0. */
static uint32_t raw_begin(const lexer *x, uint32_t i) {
  uint32_t k = i + 2;
  if (at(x, k) == '-' || at(x, k) == '+') k++;
  k = skip_space(x, k);
  if (!is_at(x, k, "raw")) return 0;
  k = skip_space(x, k + 3);
  if (at(x, k) == '-' && is_at(x, k + 1, "%}")) return skip_space(x, k + 3);
  return is_at(x, k, "%}") ? k + 2 : 0;
}

static rfr_status lex_raw(lexer *x, uint32_t tag) {
  const uint32_t begin = x->at;
  for (uint32_t i = begin; i < x->n; i++) {
    if (!is_at(x, i, "{%")) continue;
    uint32_t k = i + 2;
    const char sign = at(x, k);
    if (sign == '-' || sign == '+') k++;
    k = skip_space(x, k);
    if (!is_at(x, k, "endraw")) continue;
    const uint32_t end = tag_end(x, skip_space(x, k + 6), "%}", true);
    if (end == 0) continue;
    x->at = end;
    return add_data(x, begin, i, sign, false);
  }
  if (begin == x->n) return RFR_OK; /* jinja2 accepts an unclosed tag at the very end */
  return fail(x, tag, "{% raw %} has no {% endraw %}");
}

static rfr_status lex_comment(lexer *x, uint32_t tag) {
  for (uint32_t i = x->at; i < x->n; i++) {
    const uint32_t end = tag_end(x, i, "#}", true);
    if (end == 0) continue;
    x->at = end;
    return RFR_OK;
  }
  if (x->at == x->n) return RFR_OK;
  return fail(x, tag, "the comment has no end (#})");
}

static bool is_name_byte(char c, bool first) {
  return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (unsigned char)c >= 0x80 ||
         (!first && c >= '0' && c <= '9');
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static uint32_t digits(const lexer *x, uint32_t i) {
  while (is_digit(at(x, i)) || (at(x, i) == '_' && is_digit(at(x, i + 1)))) i++;
  return i;
}

static rfr_status lex_number(lexer *x) {
  const uint32_t begin = x->at;
  uint32_t end = digits(x, begin);
  bool real = false;
  if (begin == 0 || x->s[begin - 1] != '.') {
    if (at(x, end) == '.' && is_digit(at(x, end + 1))) {
      end = digits(x, end + 1);
      real = true;
    }
    if (at(x, end) == 'e' || at(x, end) == 'E') {
      const uint32_t k = end + 1 + (at(x, end + 1) == '+' || at(x, end + 1) == '-');
      if (is_digit(at(x, k))) {
        end = digits(x, k);
        real = true;
      }
    }
  }
  int base = 10;
  if (!real && x->s[begin] == '0') {
    const char mark = at(x, begin + 1) | 0x20;
    const int wanted = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
    uint32_t k = begin + 2;
    if (wanted != 10) {
      for (;; k++) {
        const char c = at(x, k) == '_' ? at(x, k + 1) : at(x, k);
        const int digit = is_digit(c) ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : 99;
        if (digit >= wanted) break;
      }
      if (k > begin + 2) {
        base = wanted;
        end = k;
      }
    } else { /* "0" and "00" are numbers, but "01" is two numbers */
      for (k = begin + 1; at(x, k) == '0' || (at(x, k) == '_' && at(x, k + 1) == '0');) k++;
      end = k;
    }
  }
  char number[128];
  size_t n = 0;
  for (uint32_t i = begin + (base == 10 ? 0 : 2); i < end && n < sizeof number; i++)
    if (x->s[i] != '_') number[n++] = x->s[i];
  if (n == sizeof number) return fail(x, begin, "the number is too long");
  number[n] = 0;
  x->at = end;
  if (real) return add(x, (rfi_ttoken){.type = RFI_TOKEN_FLOAT, .at = begin, .f = rfi_strtod(number, NULL)});
  int64_t value = 0;
  for (const char *c = number; *c; c++) {
    const int digit = is_digit(*c) ? *c - '0' : (*c | 0x20) - 'a' + 10;
    if (__builtin_mul_overflow(value, base, &value) || __builtin_add_overflow(value, digit, &value))
      return fail(x, begin, "the integer does not fit in 64 bits");
  }
  return add(x, (rfi_ttoken){.type = RFI_TOKEN_INTEGER, .at = begin, .i = value});
}

/* The code point of `count` hexadecimal digits at i, or -1. */
static int32_t hexadecimal(const lexer *x, uint32_t i, int count) {
  uint32_t value = 0;
  for (int k = 0; k < count; k++) {
    const char c = at(x, i + (uint32_t)k);
    const int digit = is_digit(c) ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : -1;
    if (digit < 0) return -1;
    value = value * 16 + (uint32_t)digit;
    if (value > 0x10FFFF) return -1;
  }
  return (int32_t)value;
}

static rfr_status lex_string(lexer *x) {
  const uint32_t begin = x->at;
  const char quote = x->s[begin];
  uint32_t end = begin + 1;
  while (end < x->n && x->s[end] != quote) end += x->s[end] == '\\' ? 2 : 1;
  if (end >= x->n) return fail(x, begin, "the string has no end");
  char *text = rfi_arena_alloc(x->t->arena, 2 * (size_t)(end - begin) + 1);
  if (!text) return rfr_last_error()->status;
  uint32_t n = 0;
  for (uint32_t i = begin + 1; i < end;) {
    if (x->s[i] != '\\') {
      text[n++] = x->s[i++];
      continue;
    }
    static const char plain[] = "n\nt\tr\rb\bf\fv\va\a\\\\'\'\"\"";
    const char c = x->s[i + 1];
    const char *known = NULL;
    for (const char *p = plain; *p && !known; p += 2)
      if (*p == c) known = p + 1;
    int32_t code = -1;
    uint32_t used = 2;
    if (known) {
      code = (unsigned char)*known;
    } else if (c == '\n') {
      i += 2;
      continue;
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const int count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      code = hexadecimal(x, i + 2, count);
      if (code < 0) return fail(x, i, "the escape is not a code point in hexadecimal digits");
      if (code >= 0xD800 && code < 0xE000) return fail(x, i, "the escape is half of a surrogate pair");
      used += (uint32_t)count;
    } else if (c >= '0' && c <= '7') {
      code = 0;
      for (used = 1; used < 4 && at(x, i + used) >= '0' && at(x, i + used) <= '7'; used++)
        code = code * 8 + (at(x, i + used) - '0');
    } else if (c == 'N') {
      return fail(x, i, "escapes of names (\\N) are not supported");
    } else { /* Python keeps the backslash */
      text[n++] = '\\';
      i++;
      continue;
    }
    n += (uint32_t)rfi_utf8_put((uint32_t)code, text + n);
    i += used;
  }
  text[n] = 0;
  x->at = end + 1;
  return add(x, (rfi_ttoken){.type = RFI_TOKEN_STRING, .at = begin, .text = text, .n = n});
}

static rfr_status lex_operator(lexer *x, char *brackets, int *open) {
  static const struct {
    char text[3];
    int type;
  } pairs[] = {{"//", RFI_TOKEN_FLOORDIV}, {"**", RFI_TOKEN_POW}, {"==", RFI_TOKEN_EQ},
               {"!=", RFI_TOKEN_NE},       {">=", RFI_TOKEN_GE},  {"<=", RFI_TOKEN_LE}};
  const uint32_t begin = x->at;
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
    if (!is_at(x, begin, pairs[i].text)) continue;
    x->at += 2;
    return add(x, (rfi_ttoken){.type = pairs[i].type, .at = begin});
  }
  const char c = x->s[begin];
  if (c == 0 || !strchr("+-/*%~[](){}><=.:|,;", c))
    return rfi_template_fail(x->t, RFI_E_TEMPLATE_SYNTAX, begin, "unexpected character '%c'",
                             c >= 32 && c < 127 ? c : '?');
  if (strchr("[({", c)) {
    if (*open == MAX_BRACKETS) return fail(x, begin, "brackets are nested too deeply");
    brackets[(*open)++] = c == '[' ? ']' : c == '(' ? ')' : '}';
  } else if (strchr("])}", c)) {
    if (*open == 0 || brackets[--*open] != c)
      return rfi_template_fail(x->t, RFI_E_TEMPLATE_SYNTAX, begin, "unexpected '%c'", c);
  }
  x->at++;
  return add(x, (rfi_ttoken){.type = c, .at = begin});
}

/* The inside of a tag up to its end. */
static rfr_status lex_tag(lexer *x, uint32_t tag, bool is_variable) {
  char brackets[MAX_BRACKETS];
  int open = 0;
  for (;;) {
    const uint32_t i = skip_space(x, x->at);
    x->at = i;
    if (i >= x->n) return fail(x, tag, "the tag has no end");
    const uint32_t end = open > 0 ? 0 : tag_end(x, i, is_variable ? "}}" : "%}", !is_variable);
    if (end > 0) {
      x->at = end;
      return add(x, (rfi_ttoken){.type = is_variable ? RFI_TOKEN_VARIABLE_END : RFI_TOKEN_BLOCK_END, .at = i});
    }
    if (is_digit(x->s[i])) {
      RFI_TRY(lex_number(x));
    } else if (is_name_byte(x->s[i], true)) {
      uint32_t k = i;
      while (k < x->n && is_name_byte(x->s[k], false)) k++;
      const char *name = rfi_arena_strndup(x->t->arena, x->s + i, k - i);
      if (!name) return rfr_last_error()->status;
      x->at = k;
      RFI_TRY(add(x, (rfi_ttoken){.type = RFI_TOKEN_NAME, .at = i, .text = name, .n = k - i}));
    } else if (x->s[i] == '\'' || x->s[i] == '"') {
      RFI_TRY(lex_string(x));
    } else {
      RFI_TRY(lex_operator(x, brackets, &open));
    }
  }
}

rfr_status rfi_template_lex(rfi_template *t) {
  lexer x = {.t = t, .s = t->source, .n = (uint32_t)t->n};
  while (x.at < x.n) {
    const uint32_t begin = x.at;
    uint32_t i = begin;
    while (i < x.n && !is_at(&x, i, "{%") && !is_at(&x, i, "{{") && !is_at(&x, i, "{#")) i++;
    if (i >= x.n)
      return add(&x, (rfi_ttoken){.type = RFI_TOKEN_DATA, .at = begin, .text = x.s + begin, .n = x.n - begin});
    const char kind = x.s[i + 1], sign = at(&x, i + 2);
    RFI_TRY(add_data(&x, begin, i, sign, kind == '{'));
    const uint32_t raw = kind == '%' ? raw_begin(&x, i) : 0;
    x.at = raw > 0 ? raw : i + 2 + (sign == '-' || sign == '+');
    if (raw > 0) {
      RFI_TRY(lex_raw(&x, i));
    } else if (kind == '#') {
      RFI_TRY(lex_comment(&x, i));
    } else {
      RFI_TRY(add(&x, (rfi_ttoken){.type = kind == '{' ? RFI_TOKEN_VARIABLE_BEGIN : RFI_TOKEN_BLOCK_BEGIN, .at = i}));
      RFI_TRY(lex_tag(&x, i, kind == '{'));
    }
  }
  return RFR_OK;
}
