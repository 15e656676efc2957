/* SPDX-License-Identifier: Apache-2.0
 *
 * The averaged weights of a checkpoint (optimizer.ema): tensors NAME.ema in f32 among those of the optimizer.
 */
#ifndef RFI_AVERAGES_H
#define RFI_AVERAGES_H

#include "data/safetensors.h"

#define RFI_SUFFIX_EMA ".ema"

/* Opens the optimizer's files of a checkpoint. Errors: run.ema if it has no averages; safetensors; file.*. */
rfr_status rfi_averages_open(rfr_ctx *ctx, const char *folder, rfi_safetensors **out);
/* The average of the parameter `name`; NULL: it has none, because it was not trained. */
const rfi_stored *rfi_averages_find(const rfi_safetensors *st, const char *name);
/* Reads the average of `name`, n elements, as f32; *found false: it has none, and `values` is unchanged. Errors: those
 * of reading; checkpoint for another size or a value that is not finite. */
rfr_status rfi_averages_read(rfi_safetensors *st, const char *folder, const char *name, int64_t n, float *values,
                             bool *found);

#endif
