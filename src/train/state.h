/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a run: initial values, and checkpoints.
 */
#ifndef RFI_STATE_H
#define RFI_STATE_H

#include "data/checkpoint.h"
#include "train/run.h"
#include "train/state_json.h"

/* Fills the state and captures the programs, unless that was done. `resumes`: rfi_state_load follows, so that only the
 * base of an adapter is read. */
rfr_status rfi_state_prepare(rfr_run *run, bool resumes);
/* Weights (and, with `training`, everything that a resume needs) from a checkpoint. */
rfr_status rfi_state_load(rfr_run *run, const rfi_checkpoint *checkpoint, bool training);
/* Takes the algorithms of a tuned run from its checkpoint, for the next compile. */
rfr_status rfi_state_load_tuned(rfr_run *run, const rfi_checkpoint *checkpoint);
/* Writes the tensor lr_steps from run->clock: the programs read it from the next launch on. */
rfr_status rfi_state_set_lr_steps(rfr_run *run);
/* The present state.json: the position of the run, and what a resume must agree with. */
rfr_status rfi_state_describe(rfr_run *run, rfi_state_json *out);
/* Writes a checkpoint, all ranks together; emits its event. */
rfr_status rfi_state_save(rfr_run *run);
/* Errors: run.diverged for values that no step can have (state_check.h). */
rfr_status rfi_state_check_finite(const rfr_run *run, const rfr_tensor *x, const void *host);
/* Bytes of the tensors of one checkpoint. */
int64_t rfi_state_bytes(const rfr_run *run);

#endif
