/* SPDX-License-Identifier: Apache-2.0
 *
 * A text that collects the output of a printer.
 */
#ifndef RFT_TEXT_H
#define RFT_TEXT_H

#include <stddef.h>

typedef struct rft_text {
  char *data; /* NULL while empty, else NUL-terminated; free with free() */
  size_t n;
} rft_text;

/* An rfr_write_fn; user: the rft_text. */
void rft_text_add(const char *piece, size_t n, void *user);

#endif
