/* SPDX-License-Identifier: Apache-2.0
 *
 * Best-fit-decreasing packing of rows into windows.
 *
 * Rows are placed in order of decreasing length, each in the window where it leaves the fewest free tokens. A row that
 * fits nowhere opens a new window. Rows of equal length keep their order. The order of the rows changes the windows but
 * not their number, which depends only on the lengths. O(rows + capacity) time.
 */
#ifndef RFI_PACKING_H
#define RFI_PACKING_H

#include "base/base.h"

typedef struct rfi_packing {
  rfr_ctx *ctx;
  int64_t windows;
  int64_t *first; /* (windows + 1) of each window in `rows`; the last is their number */
  int64_t *rows;  /* (rows) indices into the lengths, window after window */
} rfi_packing;    /* starts as {ctx} */

/* Packs `n` rows of 1 .. capacity tokens. Replaces the contents of `out`. Errors: memory.alloc. */
rfr_status rfi_pack_rows(rfi_packing *out, const int32_t *lengths, int64_t n, int32_t capacity);
void rfi_packing_deinit(rfi_packing *packing);

#endif
