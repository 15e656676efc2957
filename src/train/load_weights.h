/* SPDX-License-Identifier: Apache-2.0
 *
 * Weights of a run: from a model's folder, a GGUF file or a checkpoint, or drawn from the seed; and the hash of a base.
 */
#ifndef RFI_LOAD_WEIGHTS_H
#define RFI_LOAD_WEIGHTS_H

#include "train/run.h"

/* WEIGHT: in a run with an adapter, the tensors that a checkpoint stores for the adapter; the model's weights are then
 * BASE. OTHER is not saved. */
typedef enum rfi_kind { RFI_KIND_WEIGHT, RFI_KIND_BASE, RFI_KIND_OPTIMIZER, RFI_KIND_OTHER } rfi_kind;
rfi_kind rfi_kind_of(const rfr_run *run, const rfr_tensor *x);

/* Loads all weights from `model`, a folder or a GGUF file; NULL: initializes them. In a run with an adapter, loads the
 * base and sets its hash. Errors: those of rfi_weights_read; model.nonfinite. */
rfr_status rfi_load_weights(rfr_run *run, const char *model);
/* Writes the initial values of a parameter to x: the weight itself, or its master weight. */
rfr_status rfi_fill_weight(rfr_run *run, const rfr_parameter *p, const rfr_tensor *x);
/* Whether all floats are finite; true for other types. */
bool rfi_values_finite(rfr_dtype dtype, const void *values, int64_t bytes);

#endif
