/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation over the ranks of a pipeline: forwards through the stages.
 */
#ifndef RFI_STAGE_EVALUATE_H
#define RFI_STAGE_EVALUATE_H

#include "train/run.h"

/* Evaluates a batch that is in the evaluation inputs of all ranks. *loss: its sum in nats on the rank of the last
 * stage, 0 on the other ranks, which do not wait for it. */
rfr_status rfi_stages_evaluate(rfr_run *run, float *loss);

#endif
