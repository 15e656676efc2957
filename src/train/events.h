/* SPDX-License-Identifier: Apache-2.0
 *
 * Events of a run: to the caller's callback and the log.
 */
#ifndef RFI_EVENTS_H
#define RFI_EVENTS_H

#include "train/run.h"

/* Sets size and steps, and passes the event to the log and the callback. */
void rfi_run_emit(rfr_run *run, rfr_event *e);
/* Writes the lines that were logged while the run opened. Errors: memory.alloc. */
rfr_status rfi_run_log_opened(rfr_run *run);
void rfi_run_warn(rfr_run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Appends lines to a file of the run's folder, creating it if needed. False: `wrong` has the reason. */
bool rfi_run_append(const rfr_run *run, const char *file, const char *lines, size_t n, char wrong[256]);
/* Opens and locks FOLDER/log.jsonl. Errors: run.busy, file.write. */
rfr_status rfi_log_open(rfr_run *run, const char *folder);

#endif
