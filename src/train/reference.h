/* SPDX-License-Identifier: Apache-2.0
 *
 * The reference of training on preferences.
 */
#ifndef RFI_REFERENCE_H
#define RFI_REFERENCE_H

#include "train/run.h"

/* Computes run->reference, if there are preferences and data: from the cache, or with the evaluation program. The
 * programs must have the weights of step 0, as rfi_state_prepare leaves them before a checkpoint is loaded. Errors:
 * run.stopped. */
rfr_status rfi_reference_prepare(rfr_run *run);

#endif
