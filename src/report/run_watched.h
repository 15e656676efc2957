/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of watched values, from watch.jsonl, as a member of the report's object of a run.
 */
#ifndef RFI_RUN_WATCHED_H
#define RFI_RUN_WATCHED_H

#include "report/inert.h"

/* "watched": {"steps", "names", "names_in_all", and for each statistic a list of a list per name with a number or null
 * per step}: at most `most` numbers. A run that continues from an older checkpoint has steps twice; the later line
 * counts. Names are those of the last line. Without the file nothing is written. Errors: file.*, json with the line. */
rfr_status rfi_run_watched(rfr_ctx *ctx, const char *folder, int64_t most, rfi_inert *j);

#endif
