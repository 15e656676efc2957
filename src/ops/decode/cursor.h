/* SPDX-License-Identifier: Apache-2.0
 *
 * The cursor of a text that is being made: which tokens a program takes. Every op of it asks
 * here, so that all agree. The cursor is data and may hold anything: what is taken lies
 * within the caches' capacity all the same.
 */
#ifndef RFI_CURSOR_H
#define RFI_CURSOR_H

#include "ops/call.h"

enum { RFI_CURSOR_CACHED, RFI_CURSOR_KNOWN, RFI_CURSOR_DROPPED, RFI_CURSOR_SEED, RFI_CURSOR_N };

/* Stream of the draws. */
enum { RFI_DRAW_STREAM = 3 };

typedef struct rfi_take {
  int64_t first, count; /* positions first .. first + count - 1 */
  bool all;             /* the last known token is among them: the next one can be drawn */
} rfi_take;

static inline int64_t rfi_cursor_get(const rfi_arg *cursor, int i) {
  return ((const int64_t *)cursor->data)[i * cursor->stride[0]];
}

static inline rfi_take rfi_take_next(const rfi_arg *cursor, int64_t rows, int64_t capacity) {
  const int64_t known = rfi_cursor_get(cursor, RFI_CURSOR_KNOWN);
  int64_t first = rfi_cursor_get(cursor, RFI_CURSOR_CACHED), end = known;
  if (first < 0 || first > capacity) first = capacity;
  if (end > capacity) end = capacity;
  int64_t count = end > first ? end - first : 0;
  if (count > rows) count = rows;
  return (rfi_take){first, count, count > 0 && first + count == known};
}

#endif
