/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of the values of run.watch: from the watch ring to events, and from events to watch.jsonl.
 */
#ifndef RFI_WATCHED_LOG_H
#define RFI_WATCHED_LOG_H

#include "train/run.h"

/* Emits the statistics of the step whose metrics were read last. */
rfr_status rfi_watched_emit(rfr_run *run);
/* Appends an event of kind watch to watch.jsonl: {"step", "time", "values": {NAME: [elements, nans, infs, mean, rms,
 * largest, smallest, zeros], ...}}. If it cannot be written, the run warns once and continues without. */
void rfi_watched_write(rfr_run *run, const rfr_event *e, double time);

#endif
