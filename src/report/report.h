/* SPDX-License-Identifier: Apache-2.0
 *
 * The struct of a report. Only the logs are in memory: all other files are read when a page is written.
 */
#ifndef RFI_REPORT_H
#define RFI_REPORT_H

#include "refrain/report.h"
#include "report/run_log.h"

typedef struct rfi_report_run {
  char *folder;
  char *name; /* the last name of the folder's path, or all of it if two runs have the same */
  rfi_run_log log;
} rfi_report_run;

struct rfr_report {
  rfr_ctx *ctx;
  int n;
  rfi_report_run runs[RFR_REPORT_RUNS];
};

#endif
