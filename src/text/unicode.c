/* SPDX-License-Identifier: Apache-2.0 */
#include "text/unicode.h"

#include <string.h>
#include <utf8proc.h>

enum kind {
  NO_PUNCTUATION,
  PUNCTUATION,
  NO_MARK,
  MARK,
  NO_BERT_MARK,
  BERT_MARK,
  NO_CONTROL,
  CHINESE,
  NO_DECOMPOSITION,
  NUMERIC,
  LOWER
};
static const struct {
  enum kind kind;
  uint32_t first, last;
  int lower;
} exceptions[] = {
#include "text/unicode_crates.def"
};
enum { N_EXCEPTIONS = sizeof exceptions / sizeof *exceptions };

static const struct {
  uint16_t set, clear;
} changes[] = {[NO_PUNCTUATION] = {0, RFI_IS_PUNCTUATION},
               [PUNCTUATION] = {RFI_IS_PUNCTUATION, 0},
               [NO_MARK] = {0, RFI_IS_MARK},
               [MARK] = {RFI_IS_MARK, 0},
               [NO_BERT_MARK] = {0, RFI_IS_BERT_MARK},
               [BERT_MARK] = {RFI_IS_BERT_MARK, 0},
               [NO_CONTROL] = {0, RFI_IS_CONTROL},
               [CHINESE] = {RFI_IS_CHINESE, 0},
               [NO_DECOMPOSITION] = {RFI_NO_DECOMPOSITION, 0},
               [NUMERIC] = {RFI_IS_NUMERIC, 0},
               [LOWER] = {RFI_HAS_LOWER, 0}};

static uint16_t flags_of(uint32_t category) {
  const uint32_t bit = 1u << category;
  return (uint16_t)((bit & RFI_MARK ? RFI_IS_MARK : 0) | (category == RFI_MN ? RFI_IS_BERT_MARK : 0) |
                    (bit & RFI_PUNCTUATION ? RFI_IS_PUNCTUATION : 0) | (bit & RFI_NUMBER ? RFI_IS_NUMERIC : 0) |
                    (bit & (RFI_IN(RFI_CC) | RFI_IN(RFI_CF) | RFI_IN(RFI_CO)) ? RFI_IS_CONTROL : 0) | category);
}

/* Sets [first, last] to flags, or adds and removes flags if `set` and `clear` are given. */
static void change(rfi_unicode *u, uint32_t first, uint32_t last, uint16_t set, uint16_t clear) {
  for (uint32_t c = first; c <= last;) {
    const uint32_t end = (c | 255) < last ? (c | 255) : last;
    uint16_t *index = &u->page[c >> 8];
    const uint16_t old = *index;
    /* A page with one value is shared, so it is copied before a change. */
    if (old < RFI_CN + 1) {
      *index = (uint16_t)u->n++;
      memcpy(u->pages[*index], u->pages[old], sizeof u->pages[old]);
    }
    uint16_t *flags = u->pages[*index] + (c & 255);
    const uint32_t n = end + 1 - c;
    for (uint32_t i = 0; i < n; i++) flags[i] = (uint16_t)((flags[i] | set) & ~clear);
    c = end + 1;
  }
}

/* First code point and category of each range, ascending. */
static const uint32_t ranges[] = {
#include "text/unicode_categories.def"
};
enum { N_RANGES = sizeof ranges / sizeof *ranges };

static uint32_t range_end(int i) { return i + 1 < N_RANGES ? ranges[i + 1] >> 5 : RFI_CODE_POINTS; }

rfr_status rfi_unicode_create(rfr_ctx *ctx, rfi_unicode **out) {
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  rfi_unicode *u = *out;
  /* The first pages have one category each. */
  for (uint32_t k = 0; k <= RFI_CN; k++)
    for (int i = 0; i < 256; i++) u->pages[k][i] = flags_of(k);
  u->n = RFI_CN + 1;
  for (int i = 0; i < N_RANGES; i++) {
    const uint32_t first = ranges[i] >> 5, end = range_end(i);
    const uint32_t category = ranges[i] & RFI_CATEGORY_MASK, full = (first + 255) & ~255u;
    for (uint32_t c = full; c + 256 <= end; c += 256) u->page[c >> 8] = (uint16_t)category;
    const uint32_t head = full < end ? full : end, tail = end & ~255u;
    if (first < head) change(u, first, head - 1, flags_of(category), (uint16_t)~flags_of(category));
    if (tail >= full && tail < end) change(u, tail, end - 1, flags_of(category), (uint16_t)~flags_of(category));
  }
  for (int i = 0; i < N_EXCEPTIONS; i++)
    change(u, exceptions[i].first, exceptions[i].last, changes[exceptions[i].kind].set,
           changes[exceptions[i].kind].clear);
  /* All visible ASCII characters that are no letters or digits are punctuation. */
  for (uint32_t c = '!'; c < 0x7F; c++)
    if (!(1u << (rfi_flags(u, c) & RFI_CATEGORY_MASK) & (RFI_LETTER | RFI_NUMBER)))
      change(u, c, c, RFI_IS_PUNCTUATION, 0);
  RFI_CHECK(u->n <= (int)(sizeof u->pages / sizeof *u->pages));
  return RFR_OK;
}

/* ---- sets ---- */

enum { WORDS = RFI_CODE_POINTS / 64 };

void rfi_set_add(uint64_t *set, uint32_t first, uint32_t last) {
  for (uint32_t word = first / 64; word <= last / 64; word++) {
    uint64_t bits = UINT64_MAX;
    if (word == first / 64) bits &= UINT64_MAX << first % 64;
    if (word == last / 64) bits &= UINT64_MAX >> (63 - last % 64);
    set[word] |= bits;
  }
}

void rfi_set_add_categories(uint64_t *set, uint32_t categories) {
  for (int i = 0; i < N_RANGES; i++)
    if (categories >> (ranges[i] & RFI_CATEGORY_MASK) & 1) rfi_set_add(set, ranges[i] >> 5, range_end(i) - 1);
}

void rfi_set_add_spaces(uint64_t *set) {
  static const uint16_t spaces[][2] = {{9, 13},          {' ', ' '},       {0x85, 0x85},     {0xA0, 0xA0},
                                       {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                                       {0x205F, 0x205F}, {0x3000, 0x3000}};
  for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) rfi_set_add(set, spaces[i][0], spaces[i][1]);
}

void rfi_set_invert(uint64_t *set) {
  for (int i = 0; i < WORDS; i++) set[i] = ~set[i];
}

void rfi_set_unite(uint64_t *set, const uint64_t *other) {
  for (int i = 0; i < WORDS; i++) set[i] |= other[i];
}

void rfi_set_intersect(uint64_t *set, const uint64_t *other) {
  for (int i = 0; i < WORDS; i++) set[i] &= other[i];
}

uint32_t rfi_set_next(const uint64_t *set, uint32_t c, bool in) {
  while (c < RFI_CODE_POINTS) {
    const uint64_t word = (in ? set[c / 64] : ~set[c / 64]) >> c % 64;
    if (word) return c + (uint32_t)__builtin_ctzll(word);
    c = (c / 64 + 1) * 64;
  }
  return RFI_CODE_POINTS;
}

uint32_t rfi_lower(const rfi_unicode *categories, uint32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  if (!(rfi_flags(categories, c) & RFI_HAS_LOWER)) return (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
  for (int i = 0; i < N_EXCEPTIONS; i++)
    if (exceptions[i].kind == LOWER && c >= exceptions[i].first && c <= exceptions[i].last)
      return (uint32_t)((int64_t)c + exceptions[i].lower);
  return c;
}

size_t rfi_utf8_put(uint32_t c, char out[4]) {
  unsigned char *p = (unsigned char *)out;
  if (c < 0x80) return p[0] = (unsigned char)c, 1;
  if (c < 0x800) return p[0] = (unsigned char)(0xC0 | c >> 6), p[1] = (unsigned char)(0x80 | (c & 0x3F)), 2;
  if (c < 0x10000) {
    p[0] = (unsigned char)(0xE0 | c >> 12);
    p[1] = (unsigned char)(0x80 | (c >> 6 & 0x3F));
    p[2] = (unsigned char)(0x80 | (c & 0x3F));
    return 3;
  }
  p[0] = (unsigned char)(0xF0 | c >> 18);
  p[1] = (unsigned char)(0x80 | (c >> 12 & 0x3F));
  p[2] = (unsigned char)(0x80 | (c >> 6 & 0x3F));
  p[3] = (unsigned char)(0x80 | (c & 0x3F));
  return 4;
}

int rfi_utf8_length(const char *s, size_t n) {
  const unsigned char *p = (const unsigned char *)s;
  if (p[0] < 0x80) return 1;
  if (p[0] < 0xC2 || p[0] > 0xF4) return -1;
  const int length = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
  /* The second byte excludes overlong forms, surrogates and code points above 0x10FFFF. */
  const unsigned least = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;
  const unsigned most = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;
  if (n < 2 || p[1] < least || p[1] > most) return -1;
  for (int i = 2; i < length; i++)
    if ((size_t)i >= n || (p[i] & 0xC0) != 0x80) return -i;
  return length;
}

size_t rfi_utf8_valid(const char *s, size_t n) {
  size_t i = 0;
  while (i < n) {
    uint64_t word;
    if (n - i >= 8 && (memcpy(&word, s + i, 8), (word & 0x8080808080808080u) == 0)) {
      i += 8;
      continue;
    }
    const int length = rfi_utf8_length(s + i, n - i);
    if (length < 0) return i;
    i += (size_t)length;
  }
  return n;
}

bool rfi_is_word(const rfi_unicode *categories, uint32_t c) {
  const uint32_t word = RFI_LETTER | RFI_MARK | RFI_IN(RFI_ND) | RFI_IN(RFI_NL) | RFI_IN(RFI_PC);
  if (1u << (rfi_flags(categories, c) & RFI_CATEGORY_MASK) & word) return true;
  return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
         (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}
