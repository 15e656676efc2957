/* SPDX-License-Identifier: Apache-2.0
 *
 * The adapter of a run in a checkpoint: its values, and the checks of a load.
 */
#ifndef RFI_STATE_ADAPTER_H
#define RFI_STATE_ADAPTER_H

#include "data/checkpoint.h"
#include "train/run.h"
#include "train/state_json.h"

/* Whether a checkpoint of a run with an adapter stores this tensor: of a parameter the master weight, or the weight if
 * there is none. */
bool rfi_adapter_state_stores(const rfr_run *run, const rfr_tensor *x);
/* Loads the adapter's values and master weights from a folder in PEFT's format; NULL: initializes them. `resumes`: the
 * folder is a checkpoint, which must have unrounded master weights. Errors: adapter; resume.mismatch; file.*. */
rfr_status rfi_adapter_state_start(rfr_run *run, const char *folder, bool resumes);
/* Writes adapter_config.json and adapter_model.safetensors on rank 0; all ranks call it. Errors: run.diverged for
 * values that are not finite; file.*. */
rfr_status rfi_adapter_state_save(rfr_run *run, rfi_checkpoint_writer *w);
/* Refuses a base other than the one that the checkpoint's adapter was trained on. Errors: adapter.base. */
rfr_status rfi_adapter_state_check_base(const rfr_run *run, const char *path, const rfi_state_json *theirs);
/* Refuses adapter keys that differ from the checkpoint's: the same weights would compute another function. Errors:
 * resume.mismatch. */
rfr_status rfi_adapter_state_check_keys(const rfr_run *run, const char *path, const rfi_state_json *theirs);

#endif
