/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of a failed run.
 */
#ifndef RFI_FAILURE_H
#define RFI_FAILURE_H

#include "train/run.h"

/* Appends the thread's last error to failures.jsonl of the run's folder, one line for each rank. Of several ranks each
 * writes what it saw, because the one at fault may be unable to. Keeps the last error; a folder that cannot be written
 * is left as it is. */
void rfi_run_record_failure(rfr_run *run);

#endif
