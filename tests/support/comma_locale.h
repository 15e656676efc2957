/* SPDX-License-Identifier: Apache-2.0
 *
 * A locale that writes 1.5 as "1,5", even on machines without such a locale.
 *
 * If the usual ones are not installed, one is generated: LC_NUMERIC in the compiled form that glibc reads (a magic
 * number, a count, offsets, then the strings), under a folder of the build that LOCPATH names. Call it before other
 * threads start: it sets LOCPATH.
 */
#ifndef RFT_COMMA_LOCALE_H
#define RFT_COMMA_LOCALE_H

#include <locale.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static inline int rft_try_comma(const char *name) {
  return setlocale(LC_NUMERIC, name) != NULL && strcmp(localeconv()->decimal_point, ",") == 0;
}

/* Writes folder/comma/LC_NUMERIC; returns 0 if it cannot be written. */
static inline int rft_write_comma_locale(const char *folder) {
  enum { FIELDS = 6, MAGIC = 0x20031115 ^ LC_NUMERIC };
  /* decimal point, thousands separator, grouping, the first two as wide characters, code set */
  static const char strings[] = ",\0\0\0\0\0\0\0"
                                ",\0\0\0\0\0\0\0"
                                "ANSI_X3.4-1968";
  static const uint32_t at[FIELDS] = {0, 1, 2, 8, 12, 16};
  uint32_t head[2 + FIELDS] = {MAGIC, FIELDS};
  for (int i = 0; i < FIELDS; i++) head[2 + i] = (uint32_t)sizeof head + at[i];
  char path[4096];
  snprintf(path, sizeof path, "%s/comma", folder);
  mkdir(folder, 0777);
  mkdir(path, 0777);
  snprintf(path, sizeof path, "%s/comma/LC_NUMERIC", folder);
  FILE *f = fopen(path, "wb");
  if (f == NULL) return 0;
  const int ok = fwrite(head, sizeof head, 1, f) == 1 && fwrite(strings, sizeof strings, 1, f) == 1;
  return fclose(f) == 0 && ok;
}

/* Sets the process's LC_NUMERIC to such a locale; setlocale(LC_NUMERIC, "C") resets it. Returns 0 if there is none.
 * `folder` may be written to. */
static inline int rft_set_comma_locale(const char *folder) {
  static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "es_ES.UTF-8", "ru_RU.UTF-8"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (rft_try_comma(names[i])) return 1;
  if (rft_write_comma_locale(folder) && setenv("LOCPATH", folder, 1) == 0 && rft_try_comma("comma")) return 1;
  setlocale(LC_NUMERIC, "C");
  return 0;
}

#endif
