/* SPDX-License-Identifier: Apache-2.0
 *
 * The compiled programs of a run.
 */
#ifndef RFI_RUN_PROGRAMS_H
#define RFI_RUN_PROGRAMS_H

#include "train/run.h"

/* An error if run is NULL, or was opened without one of the programs (bits). */
rfr_status rfi_run_check(const rfr_run *run, int programs);
/* Records and compiles the programs of run->options, and finds the tensors that the host writes and reads. */
rfr_status rfi_run_compile(rfr_run *run);
/* Writes each program after each pass to FOLDER/traces. */
rfr_status rfi_run_write_traces(rfr_run *run);
/* Whether values are watched in step number `step`, counted from 0. */
static inline bool rfi_watches(const rfr_run *run, int64_t step) {
  return run->watched >= 0 && (step == 0 || (step + 1) % run->settings->config->run_watch_every == 0);
}
/* The index of the program that runs step `step`, counted from 0. */
int rfi_training_program(const rfr_run *run, int64_t step);
/* Runs one of the programs (RFR_RUN_...), replayed or eagerly, according to the options. */
rfr_status rfi_launch(rfr_run *run, int program);
/* The same for program i, without the schedule of a pipeline. */
rfr_status rfi_launch_at(rfr_run *run, int i);

#endif
