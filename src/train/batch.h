/* SPDX-License-Identifier: Apache-2.0
 *
 * Windows of the data as the inputs of a program.
 */
#ifndef RFI_BATCH_H
#define RFI_BATCH_H

#include "train/run.h"

/* Where a batch is written: `rows` windows in packed arrays. */
typedef struct rfi_batch {
  int64_t rows;
  int32_t *tokens, *targets; /* (rows * sequence) */
  int32_t *offsets;          /* (rows * sequence + 1), the last ones repeat the end */
  int32_t *pairs;            /* (rfi_most_pairs(rows * sequence)) RFI_IGNORE after the last; NULL without preferences */
} rfi_batch;

/* Windows of a split, from window `first`; `once`: with preferences, of all its rows in the order of the files. Without
 * data: random tokens. */
rfr_status rfi_fill_batch(rfr_run *run, rfi_split split, bool once, int64_t first, const rfi_batch *batch);
/* Puts the inputs of step `step` into its slot of the ring. */
rfr_status rfi_fill_slot(rfr_run *run, int64_t step);

#endif
