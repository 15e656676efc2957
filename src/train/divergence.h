/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks whose states have diverged.
 */
#ifndef RFI_DIVERGENCE_H
#define RFI_DIVERGENCE_H

#include "train/run.h"

/* Compares the tensors that every rank has in full: without parallel.shard weights and optimizer states, with it the
 * small states. All ranks call it together, between steps. Errors: dist.diverged, which names the rank that differs
 * from most others. */
rfr_status rfi_check_same(rfr_run *run);

#endif
