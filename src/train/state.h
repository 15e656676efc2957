/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a run: initial values, and checkpoints.
 */
#ifndef RFI_STATE_H
#define RFI_STATE_H

#include "data/checkpoint.h"
#include "train/run.h"
#include "train/state_json.h"

/* Initializes the state and captures the programs, unless already done. `resumes`: rfi_state_load follows, so only the
 * base of an adapter is read. */
rfr_status rfi_state_prepare(rfr_run *run, bool resumes);
/* Loads weights (and, with `training`, everything that a resume needs) from a checkpoint. */
rfr_status rfi_state_load(rfr_run *run, const rfi_checkpoint *checkpoint, bool training);
/* Reads the choices of a tuned run from its checkpoint, for the next compile. */
rfr_status rfi_state_load_tuned(rfr_run *run, const rfi_checkpoint *checkpoint);
/* Writes the tensor lr_steps from run->clock; it applies from the next launch on. */
rfr_status rfi_state_set_lr_steps(rfr_run *run);
/* The current state.json: the position of the run, and the keys that a resume compares. */
rfr_status rfi_state_describe(rfr_run *run, rfi_state_json *out);
/* Writes a checkpoint and emits its event. All ranks call it together. Errors: run.diverged for values that are
 * impossible (state_check.h). */
rfr_status rfi_state_save(rfr_run *run);
rfr_status rfi_state_check_finite(const rfr_run *run, const rfr_tensor *x, const void *host);
/* Size of all tensors of one checkpoint. */
int64_t rfi_state_bytes(const rfr_run *run);

#endif
