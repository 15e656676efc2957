/* SPDX-License-Identifier: Apache-2.0
 *
 * Detects values in a run's state that no step can produce. Such a state is not saved, and such a checkpoint is
 * refused.
 */
#ifndef RFI_STATE_CHECK_H
#define RFI_STATE_CHECK_H

#include "train/run.h"

/* Describes what is wrong in the values of a weight or an optimizer state, as the end of a sentence; NULL: nothing. */
const char *rfi_state_wrong(const rfr_run *run, const rfr_tensor *x, const void *values);
/* The same for a part, as a tensor of the programs. */
const char *rfi_part_wrong(const rfr_tensor *own, const void *values);

#endif
