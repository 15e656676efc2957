/* SPDX-License-Identifier: Apache-2.0
 *
 * Best-fit-decreasing packing of rows into windows.
 *
 * Rows are placed by falling length, each in the window that it leaves the least room in; a row that fits nowhere opens
 * a window. Rows of equal length are placed in the order in which they come, so another order gives other windows, but
 * never another number of them: the number depends on the lengths alone. O(rows + capacity) time.
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
