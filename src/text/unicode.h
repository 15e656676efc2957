/* SPDX-License-Identifier: Apache-2.0
 *
 * UTF-8, and the general categories of Unicode 16. The table is part of the library, so that the same text has the same
 * tokens on every machine.
 */
#ifndef RFI_UNICODE_H
#define RFI_UNICODE_H

#include "base/base.h"

/* In the order of unicode_categories.def. */
typedef enum rfi_category {
  RFI_LU,
  RFI_LL,
  RFI_LT,
  RFI_LM,
  RFI_LO,
  RFI_MN,
  RFI_MC,
  RFI_ME,
  RFI_ND,
  RFI_NL,
  RFI_NO,
  RFI_PC,
  RFI_PD,
  RFI_PS,
  RFI_PE,
  RFI_PI,
  RFI_PF,
  RFI_PO,
  RFI_SM,
  RFI_SC,
  RFI_SK,
  RFI_SO,
  RFI_ZS,
  RFI_ZL,
  RFI_ZP,
  RFI_CC,
  RFI_CF,
  RFI_CO,
  RFI_CN /* not assigned, and surrogates */
} rfi_category;
#define RFI_IN(category) (1u << (category))
#define RFI_LETTER (RFI_IN(RFI_LU) | RFI_IN(RFI_LL) | RFI_IN(RFI_LT) | RFI_IN(RFI_LM) | RFI_IN(RFI_LO))
#define RFI_MARK (RFI_IN(RFI_MN) | RFI_IN(RFI_MC) | RFI_IN(RFI_ME))
#define RFI_NUMBER (RFI_IN(RFI_ND) | RFI_IN(RFI_NL) | RFI_IN(RFI_NO))
#define RFI_PUNCTUATION \
  (RFI_IN(RFI_PC) | RFI_IN(RFI_PD) | RFI_IN(RFI_PS) | RFI_IN(RFI_PE) | RFI_IN(RFI_PI) | RFI_IN(RFI_PF) | RFI_IN(RFI_PO))
#define RFI_SYMBOL (RFI_IN(RFI_SM) | RFI_IN(RFI_SC) | RFI_IN(RFI_SK) | RFI_IN(RFI_SO))

enum { RFI_CODE_POINTS = 0x110000, RFI_CATEGORY_MASK = 31 };

/* Flags in addition to the category: the class of a character in components of tokenizers that use older tables. */
enum {
  RFI_IS_MARK = 1 << 5, /* StripAccents, and combining classes */
  RFI_IS_BERT_MARK = 1 << 6,
  RFI_IS_PUNCTUATION = 1 << 7,
  RFI_IS_CONTROL = 1 << 8,
  RFI_IS_CHINESE = 1 << 9,
  RFI_IS_NUMERIC = 1 << 10,
  RFI_NO_DECOMPOSITION = 1 << 11,
  RFI_HAS_LOWER = 1 << 12 /* a lower case that utf8proc may lack */
};

/* Category and flags of every code point, by pages of 256; equal pages are shared. Free with rfi_free. */
typedef struct rfi_unicode {
  uint16_t page[RFI_CODE_POINTS / 256];
  uint16_t pages[512][256];
  int n;
} rfi_unicode;
static inline uint16_t rfi_flags(const rfi_unicode *u, uint32_t c) { return u->pages[u->page[c >> 8]][c & 255]; }
rfr_status rfi_unicode_create(rfr_ctx *ctx, rfi_unicode **out);

/* Whether the category of c is in a set of them. */
static inline bool rfi_in(const rfi_unicode *u, uint32_t c, uint32_t categories) {
  return 1u << (rfi_flags(u, c) & RFI_CATEGORY_MASK) & categories;
}

/* Sets of code points, one bit each. They are large, and a pattern may have thousands of classes: none of these visits
 * single code points. */
enum { RFI_SET_BYTES = RFI_CODE_POINTS / 8 };
void rfi_set_add(uint64_t *set, uint32_t first, uint32_t last); /* adds [first, last] */
void rfi_set_add_categories(uint64_t *set, uint32_t categories);
void rfi_set_add_spaces(uint64_t *set); /* White_Space */
void rfi_set_invert(uint64_t *set);
void rfi_set_unite(uint64_t *set, const uint64_t *other);
void rfi_set_intersect(uint64_t *set, const uint64_t *other);
/* The first code point from c on that is in the set (or is not in it); RFI_CODE_POINTS: there is none. */
uint32_t rfi_set_next(const uint64_t *set, uint32_t c, bool in);

/* The property White_Space. */
static inline bool rfi_is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

/* \\w of Rust's regular expressions. */
bool rfi_is_word(const rfi_unicode *categories, uint32_t c);
/* The simple lower case mapping of a character: one character. */
uint32_t rfi_lower(const rfi_unicode *categories, uint32_t c);

/* The code point at s[*i] of valid UTF-8; advances *i. */
static inline uint32_t rfi_utf8_next(const char *s, size_t *i) {
  const unsigned char *p = (const unsigned char *)s + *i;
  if (p[0] < 0x80) return *i += 1, p[0];
  if (p[0] < 0xE0) return *i += 2, (uint32_t)(p[0] & 0x1F) << 6 | (p[1] & 0x3F);
  if (p[0] < 0xF0) return *i += 3, (uint32_t)(p[0] & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);
  *i += 4;
  return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12 | (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);
}

/* Whether s[0] continues a character of valid UTF-8. */
static inline bool rfi_utf8_continues(char s) { return ((unsigned char)s & 0xC0) == 0x80; }

/* Bytes of c in UTF-8, 1 to 4, written to `out`. */
size_t rfi_utf8_put(uint32_t c, char out[4]);
/* Bytes of the character at s, of which n > 0 bytes remain; -k if the first k bytes are a maximal invalid part, which
 * one U+FFFD replaces, as Unicode recommends. */
int rfi_utf8_length(const char *s, size_t n);
/* The first byte that is not part of a valid character; n if all are valid. */
size_t rfi_utf8_valid(const char *s, size_t n);

#endif
