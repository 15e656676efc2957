/* SPDX-License-Identifier: Apache-2.0
 *
 * run.sample_every: texts that the model writes during training, in samples.jsonl of the run's folder.
 */
#ifndef RFI_SAMPLES_H
#define RFI_SAMPLES_H

#include "train/run.h"

/* Refuses a run over several ranks, and a prompt that the tokenizer cannot read. */
rfr_status rfi_samples_check(rfr_run *run);
/* Continues run.sample_prompt, and appends {"step", "prompt", "text"}. Weights and random states of training do not
 * change. If the file cannot be written, the run warns once and continues without samples. */
rfr_status rfi_samples_take(rfr_run *run);

#endif
