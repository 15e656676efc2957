/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON inside a page. Texts come from file names, configurations and models, so any of them may be hostile: no byte of
 * them can end the element that the JSON is in, and bytes that are not UTF-8 become U+FFFD.
 */
#ifndef RFI_INERT_H
#define RFI_INERT_H

#include <jansson.h>

#include "base/base.h"

/* Appends to a text and latches the first error; a comma before each but the first value of a list or object. */
typedef struct rfi_inert {
  rfi_string text;
  rfr_status status;
  bool comma;
} rfi_inert;

void rfi_inert_begin(rfi_inert *j, const char *key, char bracket); /* key NULL: in a list */
void rfi_inert_end(rfi_inert *j, char bracket);
void rfi_inert_text(rfi_inert *j, const char *key, const char *value);
void rfi_inert_number(rfi_inert *j, const char *key, double value); /* six digits; null if not finite */
void rfi_inert_integer(rfi_inert *j, const char *key, int64_t value);
/* A scalar of a parsed file; null for lists and objects. */
void rfi_inert_value(rfi_inert *j, const char *key, const json_t *value);

/* Length of the UTF-8 sequence at s, 0 if there is none (RFC 3629: shortest form, no surrogates). */
int rfi_inert_utf8(const unsigned char *s);

#endif
