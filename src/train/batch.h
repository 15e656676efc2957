/* SPDX-License-Identifier: Apache-2.0
 *
 * Windows of the data as the inputs of a program.
 */
#ifndef RFI_BATCH_H
#define RFI_BATCH_H

#include "train/run.h"

/* `rows` windows of a split, from window `first`, into packed arrays; offsets has rows * sequence + 1 entries, the last
 * ones repeat the end. Without data: random tokens. */
rfr_status rfi_fill_rows(rfr_run *run, rfi_split split, int64_t first, int64_t rows, int32_t *tokens, int32_t *targets,
                         int32_t *offsets);
/* Puts the inputs of step `step` into its slot of the ring. */
rfr_status rfi_fill_slot(rfr_run *run, int64_t step);

#endif
