/* SPDX-License-Identifier: Apache-2.0
 *
 * The numbers of a run's state that no step can have: a checkpoint has none of them, and one that does is refused.
 */
#ifndef RFI_STATE_CHECK_H
#define RFI_STATE_CHECK_H

#include "train/run.h"

/* The fault of the values of a tensor of weights or of the optimizer, as the end of a sentence; NULL: none. */
const char *rfi_state_wrong(const rfr_run *run, const rfr_tensor *x, const void *values);

#endif
