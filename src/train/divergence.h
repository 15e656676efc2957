/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that have drifted apart.
 */
#ifndef RFI_DIVERGENCE_H
#define RFI_DIVERGENCE_H

#include "train/run.h"

/* Compares what every rank holds in full: without parallel.shard weights and optimizer, with it the small states. All
 * ranks call it together, between steps. Errors: dist.diverged, which names the rank that differs from most others. */
rfr_status rfi_check_same(rfr_run *run);

#endif
