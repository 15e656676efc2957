/* SPDX-License-Identifier: Apache-2.0
 *
 * Values in the text of JSON, which need not be valid: where they begin and end, and replacing them.
 */
#ifndef RFT_JSON_TEXT_H
#define RFT_JSON_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Returns the end of the value at `at`, at most `end`. */
const char *rft_json_value_end(const char *at, const char *end);
/* Returns the start of the next value that follows a byte of `after`, from `at` on; NULL: none. */
const char *rft_json_next_value(const char *at, const char *end, const char *after);

/* Values at the limits of what readers accept. */
enum { RFT_EXTREMES = 34 };
extern const char *const rft_extremes[RFT_EXTREMES];

#endif
