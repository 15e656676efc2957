/* SPDX-License-Identifier: Apache-2.0
 *
 * Text and numbers that do not depend on the locale.
 *
 * The host program may have set a locale whose decimal sign is a comma; then printf writes "1,5" and strtod reads "1.5"
 * as 1. Every number that the library prints or reads goes through this file. The C locale is requested by name at each
 * call: the C library returns a constant object, so nothing has to be initialized, freed or shared between threads.
 * Only the calling thread's locale is switched, and it is switched back.
 */
#include "base/base.h"

#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int rfi_vsnprintf(char *out, size_t n, const char *format, va_list args) {
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  locale_t before = c == (locale_t)0 ? (locale_t)0 : uselocale(c);
  int length = vsnprintf(out, n, format, args);
  if (before != (locale_t)0) uselocale(before);
  if (c != (locale_t)0) freelocale(c);
  return length;
}

int rfi_snprintf(char *out, size_t n, const char *format, ...) {
  va_list args;
  va_start(args, format);
  int length = rfi_vsnprintf(out, n, format, args);
  va_end(args);
  return length;
}

double rfi_strtod(const char *s, char **end) {
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (c == (locale_t)0) {
    if (end != NULL) *end = (char *)s; /* not a number, instead of another number */
    return 0;
  }
  double x = strtod_l(s, end, c);
  freelocale(c);
  return x;
}

char *rfi_format_double(char buf[32], double x) {
  if (isnan(x)) return strcpy(buf, "nan");
  if (isinf(x)) return strcpy(buf, x < 0 ? "-inf" : "inf");
  /* integers of a readable size are printed as such: 100, not 1e+02 */
  int digits = 1;
  if (x == trunc(x) && fabs(x) < 1e15)
    for (double power = 10; power <= fabs(x); power *= 10) digits++;
  for (; digits <= 17; digits++) {
    rfi_snprintf(buf, 32, "%.*g", digits, x);
    if (rfi_strtod(buf, NULL) == x) break;
  }
  return buf;
}

/* Reserves memory for `more` bytes and the NUL. */
static rfr_status reserve(rfi_string *s, size_t more) {
  if (more >= (SIZE_MAX >> 2) - s->n) return rfi_fail(RFI_E_OVERFLOW, "a string cannot grow by %zu bytes", more);
  size_t want = s->n + more + 1;
  if (want <= s->capacity) return RFR_OK;
  size_t capacity = s->capacity == 0 ? 128 : 2 * s->capacity;
  if (capacity < want) capacity = want;
  char *data;
  RFI_TRY(RFI_ALLOC(s->ctx, capacity, &data));
  if (s->n > 0) memcpy(data, s->data, s->n);
  rfi_free(s->ctx, s->data);
  s->data = data;
  s->capacity = capacity;
  return RFR_OK;
}

rfr_status rfi_string_printf(rfi_string *s, const char *format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  rfr_status status = RFR_OK;
  size_t room = s->capacity - s->n;
  int n = rfi_vsnprintf(room == 0 ? NULL : s->data + s->n, room, format, args);
  if (n < 0) {
    status = rfi_fail(RFI_E_INTERNAL, "the C library refuses the format: %s", format);
  } else if ((size_t)n >= room) {
    if (room > 0) s->data[s->n] = '\0'; /* on failure the string is unchanged */
    status = reserve(s, (size_t)n);
    if (status == RFR_OK) rfi_vsnprintf(s->data + s->n, (size_t)n + 1, format, again);
  }
  if (status == RFR_OK) s->n += (size_t)n;
  va_end(again);
  va_end(args);
  return status;
}

rfr_status rfi_string_append(rfi_string *s, const char *text, size_t n) {
  if (n == 0) return RFR_OK;
  RFI_TRY(reserve(s, n));
  memcpy(s->data + s->n, text, n);
  s->n += n;
  s->data[s->n] = '\0';
  return RFR_OK;
}

void rfi_string_deinit(rfi_string *s) {
  if (s->data != NULL) rfi_free(s->ctx, s->data);
  s->data = NULL;
  s->n = s->capacity = 0;
}

bool rfi_has_word(const char *words, const char *word) {
  const size_t n = strlen(word);
  for (const char *at = words; n > 0 && (at = strstr(at, word)); at += n)
    if ((at == words || at[-1] == ' ') && (at[n] == ' ' || !at[n])) return true;
  return false;
}
