/* SPDX-License-Identifier: Apache-2.0
 *
 * run.tensorboard: the numbers of the log in an event file of each session, in the folder of log.jsonl.
 */
#ifndef RFI_TENSORBOARD_H
#define RFI_TENSORBOARD_H

#include "train/run.h"

/* Opens the session's event file with the start event, and writes metrics and evaluations. If the file cannot be
 * written, the run warns and continues without it. `time`: seconds since 1970. */
void rfi_tensorboard_event(rfr_run *run, const rfr_event *e, double time);

#endif
