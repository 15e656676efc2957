/* SPDX-License-Identifier: Apache-2.0
 */
#include "report/inert.h"

#include <math.h>
#include <string.h>

static void put(rfi_inert *j, const char *text, size_t n) {
  if (j->status == RFR_OK) j->status = rfi_string_append(&j->text, text, n);
}

int rfi_inert_utf8(const unsigned char *s) {
  const int n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
  for (int i = 1; i < n; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
  if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
  return n;
}

static void put_quoted(rfi_inert *j, const char *value) {
  char escape[8];
  put(j, "\"", 1);
  for (const unsigned char *s = (const unsigned char *)value; *s;) {
    const size_t plain = strcspn((const char *)s, "\"\\<>&'\x7f") /* and, below, controls and bytes over 0x7f */;
    size_t n = 0;
    while (n < plain && s[n] >= 0x20 && s[n] < 0x80) n++;
    put(j, (const char *)s, n);
    s += n;
    if (!*s) break;
    const int length = rfi_inert_utf8(s);
    if (length > 1) put(j, (const char *)s, (size_t)length);
    else put(j, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", length ? *s : 0xfffd));
    s += length ? length : 1;
  }
  put(j, "\"", 1);
}

static void put_key(rfi_inert *j, const char *key) {
  if (j->comma) put(j, ",", 1);
  j->comma = true;
  if (!key) return;
  put_quoted(j, key);
  put(j, ":", 1);
}

void rfi_inert_begin(rfi_inert *j, const char *key, char bracket) {
  put_key(j, key);
  put(j, &bracket, 1);
  j->comma = false;
}

void rfi_inert_end(rfi_inert *j, char bracket) {
  put(j, &bracket, 1);
  j->comma = true;
}

void rfi_inert_text(rfi_inert *j, const char *key, const char *value) {
  put_key(j, key);
  put_quoted(j, value);
}

void rfi_inert_number(rfi_inert *j, const char *key, double value) {
  put_key(j, key);
  if (!isfinite(value)) put(j, "null", 4);
  else if (j->status == RFR_OK) j->status = rfi_string_printf(&j->text, "%.6g", value);
}

void rfi_inert_integer(rfi_inert *j, const char *key, int64_t value) {
  put_key(j, key);
  if (j->status == RFR_OK) j->status = rfi_string_printf(&j->text, "%lld", (long long)value);
}

void rfi_inert_value(rfi_inert *j, const char *key, const json_t *value) {
  if (json_is_string(value)) rfi_inert_text(j, key, json_string_value(value));
  else if (json_is_integer(value)) rfi_inert_integer(j, key, json_integer_value(value));
  else rfi_inert_number(j, key, json_is_real(value) ? json_real_value(value) : NAN);
}
