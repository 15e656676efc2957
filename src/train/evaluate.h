/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation over held-out data.
 */
#ifndef RFI_EVALUATE_H
#define RFI_EVALUATE_H

#include "train/run.h"

/* Whether the run has an evaluation program and held-out windows. */
bool rfi_run_evaluates(const rfr_run *run);
/* With preferences: evaluates the batch from window `first` on, of windows that contain each row of a split once.
 * Returns the row of each pair (RFI_IGNORE: none) and the losses in nats of its two answers. The arrays have
 * rfi_most_pairs(eval_tokens) and twice as many elements. Adds the number of targets to *predicted. */
rfr_status rfi_evaluate_pairs(rfr_run *run, rfi_split split, int64_t first, int32_t *pairs, float *losses,
                              int64_t *predicted);
/* Evaluates the first `windows` held-out windows, rounded up to full batches; 0: all. */
rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out);

#endif
