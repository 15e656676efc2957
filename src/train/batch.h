/* SPDX-License-Identifier: Apache-2.0
 *
 * Windows of the data as the inputs of a program.
 */
#ifndef RFI_BATCH_H
#define RFI_BATCH_H

#include "train/run.h"

/* The destination of a batch: packed arrays for `rows` windows. */
typedef struct rfi_batch {
  int64_t rows;
  int32_t *tokens, *targets; /* (rows * sequence) */
  int32_t *offsets;          /* (rows * sequence + 1); unused entries repeat the end */
  int32_t *pairs; /* (rfi_most_pairs(rows * sequence)); unused entries are RFI_IGNORE; NULL without preferences */
} rfi_batch;

/* Fills a batch with windows of a split, from window `first` on. `once`: with preferences, the windows contain each row
 * of the split once, in the order of the files. Without data: random tokens. */
rfr_status rfi_fill_batch(rfr_run *run, rfi_split split, bool once, int64_t first, const rfi_batch *batch);
/* Writes the inputs of step `step` into its slot of the ring. */
rfr_status rfi_fill_slot(rfr_run *run, int64_t step);

#endif
