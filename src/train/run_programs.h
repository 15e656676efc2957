/* SPDX-License-Identifier: Apache-2.0
 *
 * The compiled programs of a run.
 */
#ifndef RFI_RUN_PROGRAMS_H
#define RFI_RUN_PROGRAMS_H

#include "train/run.h"

/* An error without a run, or if the run was opened without one of the programs (bits). */
rfr_status rfi_run_check(const rfr_run *run, int programs);
/* Records and compiles the programs of run->options, and finds the tensors that the host fills and reads. */
rfr_status rfi_run_compile(rfr_run *run);
/* Writes each program after each pass to FOLDER/traces. */
rfr_status rfi_run_write_traces(rfr_run *run);
/* Whether step number `step`, from 0, is one in which values are watched. */
static inline bool rfi_watches(const rfr_run *run, int64_t step) {
  return run->watched >= 0 && (step == 0 || (step + 1) % run->settings->config->run_watch_every == 0);
}
/* The index of the program that is step `step`, counted from 0. */
int rfi_training_program(const rfr_run *run, int64_t step);
/* Runs one of the programs (RFR_RUN_...) as the options say: replay, or kernel by kernel. */
rfr_status rfi_launch(rfr_run *run, int program);
/* The same of program i, without the schedule of a pipeline. */
rfr_status rfi_launch_at(rfr_run *run, int i);

#endif
