/* SPDX-License-Identifier: Apache-2.0 */
#include "support/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

void rft_text_add(const char *piece, size_t n, void *user) {
  rft_text *t = user;
  t->data = realloc(t->data, t->n + n + 1);
  assert_non_null(t->data);
  memcpy(t->data + t->n, piece, n);
  t->n += n;
  t->data[t->n] = 0;
}
