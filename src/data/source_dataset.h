/* SPDX-License-Identifier: Apache-2.0
 *
 * A data set whose windows are filled by a callback of the caller (rfr_data_source).
 *
 * The windows of training are requested in order, and so are those of an evaluation, from 0. The function's own place
 * in its data is the number `position`, which is saved with a checkpoint.
 */
#ifndef RFI_SOURCE_DATASET_H
#define RFI_SOURCE_DATASET_H

#include "data/dataset.h"
#include "refrain/train.h"

/* Copies *source. Errors: argument. */
rfr_status rfi_source_dataset_open(rfr_ctx *ctx, const rfr_data_source *source, int64_t sequence, int64_t vocab_size,
                                   rfi_dataset **out);
/* The position after the last training window; `seek` sets the position of the next one. */
int64_t rfi_source_dataset_position(const rfi_dataset *ds);
void rfi_source_dataset_seek(rfi_dataset *ds, int64_t position);

#endif
