/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation over held-out data.
 */
#ifndef RFI_EVALUATE_H
#define RFI_EVALUATE_H

#include "train/run.h"

/* The run has a program for it, and held-out windows. */
bool rfi_run_evaluates(const rfr_run *run);
/* With preferences: of the batch that begins at window `first` of the windows that have each row of a split once, the
 * row of each pair (RFI_IGNORE: none) and the losses in nats of its two answers. The arrays have
 * rfi_most_pairs(eval_tokens) and twice as many elements. *predicted grows by the batch's targets. */
rfr_status rfi_evaluate_pairs(rfr_run *run, rfi_split split, int64_t first, int32_t *pairs, float *losses,
                              int64_t *predicted);
/* Over the first `windows` held-out windows, rounded up to full batches; 0: all. */
rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out);

#endif
