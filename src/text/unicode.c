/* SPDX-License-Identifier: Apache-2.0 */
#include "text/unicode.h"

#include <string.h>

rfr_status rfi_unicode_create(rfr_ctx *ctx, uint8_t **out) {
  static const uint32_t ranges[] = {
#include "text/unicode_categories.def"
  };
  const size_t n = sizeof ranges / sizeof *ranges;
  RFI_TRY(RFI_ALLOC(ctx, RFI_CODE_POINTS, out));
  for (size_t i = 0; i < n; i++) {
    const uint32_t begin = ranges[i] >> 5, end = i + 1 < n ? ranges[i + 1] >> 5 : RFI_CODE_POINTS;
    memset(*out + begin, (int)(ranges[i] & 31), end - begin);
  }
  return RFR_OK;
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

bool rfi_is_numeric(const uint8_t *categories, uint32_t c) { return (1u << categories[c] & RFI_NUMBER) != 0; }

bool rfi_is_punctuation(const uint8_t *categories, uint32_t c) {
  if (c < 0x80) return c > ' ' && c < 0x7F && !(1u << categories[c] & (RFI_LETTER | RFI_NUMBER));
  return (1u << categories[c] & RFI_PUNCTUATION) != 0;
}

bool rfi_is_word(const uint8_t *categories, uint32_t c) {
  const uint32_t word = RFI_LETTER | RFI_MARK | RFI_IN(RFI_ND) | RFI_IN(RFI_NL) | RFI_IN(RFI_PC);
  if (1u << categories[c] & word) return true;
  return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
         (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}
