/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of a failed run.
 */
#ifndef RFI_FAILURE_H
#define RFI_FAILURE_H

#include "train/run.h"

/* Appends the thread's last error to failures.jsonl of the run's folder, one line per rank. Every rank writes what it
 * saw, because the rank at fault may be unable to. Keeps the last error; if the folder cannot be written, nothing
 * happens. */
void rfi_run_record_failure(rfr_run *run);

#endif
