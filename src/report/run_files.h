/* SPDX-License-Identifier: Apache-2.0
 *
 * Files of a run other than its log, as members of the report's object of the run. A missing file writes nothing; a
 * damaged one is an error with its place.
 */
#ifndef RFI_RUN_FILES_H
#define RFI_RUN_FILES_H

#include "report/inert.h"

/* "config": [[key, value, source], ...], from config.yaml and the sources of run.json; "facts": [[name, value], ...] */
rfr_status rfi_run_files_config(rfr_ctx *ctx, const char *folder, rfi_inert *j);
/* "plan": the arena of the step, from plan.json; at most `most` buffers, those with the largest product of bytes and
 * ops. */
rfr_status rfi_run_files_plan(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j);
/* "profile": ops and ceilings, from profile.json, which `refrain profile --json` prints. */
rfr_status rfi_run_files_profile(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j);
/* "samples": [[step, prompt, text], ...], from samples.jsonl. */
rfr_status rfi_run_files_samples(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j);

#endif
