/* SPDX-License-Identifier: Apache-2.0
 *
 * Batch ramps (batch.ramp): smaller batches or shorter sequences at the start of a run. A phase is a sequence of steps
 * of one size and has its own program; all programs share weights, states and the arena. Everything that depends on the
 * size of a step is a function of its number, so a resumed run needs no state of the ramp: the phase, the data and the
 * random numbers follow from the step.
 *
 * A phase with a shorter `sequence` has the same windows of the data. They are cut into sequences of so many tokens,
 * which do not attend to each other; each token keeps its target.
 */
#ifndef RFI_RAMP_H
#define RFI_RAMP_H

#include "train/settings.h"

/* Reads the phases of a configuration, after the sizes of the last phase. Errors: config.value; unsupported for
 * combinations that a ramp does not support. */
rfr_status rfi_ramp_read(rfi_settings *s);
/* Checks that no phase ends after the last step of the run. Errors: config.value, once the steps are known. */
rfr_status rfi_ramp_check_steps(const rfi_settings *s);
/* The phase of step `step`, counted from 0; s->n_ramp: the last phase, whose sizes are those of spec. */
int rfi_ramp_phase(const rfi_settings *s, int64_t step);
/* Microbatches of a rank, and tokens of a sequence, in a phase. */
int64_t rfi_ramp_microbatches(const rfi_settings *s, int phase);
int64_t rfi_ramp_sequence(const rfi_settings *s, int phase);
/* Tokens of a step, over all ranks. */
int64_t rfi_ramp_tokens(const rfi_settings *s, int phase);
/* The spec of a phase's training program. */
rfi_step_spec rfi_ramp_spec(const rfi_settings *s, int phase);
/* The number of windows of the first `steps` steps, over all ranks, which is the next step's first window. */
int64_t rfi_ramp_windows(const rfi_settings *s, int64_t steps);
/* The number of steps that `windows` windows fill; `part`: count a last step that is only partly filled. */
int64_t rfi_ramp_steps(const rfi_settings *s, int64_t windows, bool part);
/* Adds the starts of sequences to those of documents. offsets (tokens + 1) are ascending, unused ones are `tokens`;
 * `sequence` divides `tokens`. */
void rfi_ramp_cut(int32_t *offsets, int64_t tokens, int64_t sequence);

#endif
