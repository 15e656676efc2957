/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation over held-out data.
 */
#ifndef RFI_EVALUATE_H
#define RFI_EVALUATE_H

#include "train/run.h"

/* The run has a program for it, and held-out windows. */
bool rfi_run_evaluates(const rfr_run *run);
/* Over the first `windows` held-out windows, rounded up to full batches; 0: all. */
rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out);

#endif
