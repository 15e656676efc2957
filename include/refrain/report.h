/* SPDX-License-Identifier: Apache-2.0
 *
 * Reports of runs, from the files of run folders: a page for a browser, and a screen for a terminal.
 *
 *   const char *runs[] = {"runs/first", "runs/second"};
 *   rfr_report *r;
 *   rfr_status s = rfr_report_open(ctx, runs, 2, &r);
 *   if (s == RFR_OK) s = rfr_report_page(r, 0, write_to_file, f);
 *   rfr_report_close(r);
 *
 * A report only reads files, so it may be open while the runs are in progress. One thread at a time may use a report.
 */
#ifndef REFRAIN_REPORT_H
#define REFRAIN_REPORT_H

#include "refrain/ctx.h"
#include "refrain/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_report rfr_report;
enum { RFR_REPORT_RUNS = 16 };

/* Reads the logs of 1 to RFR_REPORT_RUNS run folders, and the configurations, plans, profiles and samples that they
 * have. Errors: argument; run.folder: a folder has no log, or an empty one; file.*; json, config.syntax: a damaged
 * file, with its line. */
RFR_API rfr_status rfr_report_open(rfr_ctx *ctx, const char *const *runs, int n, rfr_report **out);
/* Reads the events that the runs have logged since; *changed is 1 if there are any. Errors: as above. */
RFR_API rfr_status rfr_report_read(rfr_report *r, int *changed);
/* Bytes of the logs that were read; it changes when the data change. */
RFR_API int64_t rfr_report_bytes(const rfr_report *r);
RFR_API void rfr_report_close(rfr_report *r); /* accepts NULL */

/* Writes the page: HTML that contains everything it needs and loads nothing. Texts of the runs are data in it and are
 * never read as markup. With `follow` the page asks the server that it came from for /data.json every two seconds.
 * Errors: memory.alloc, and those of the files above. */
RFR_API rfr_status rfr_report_page(rfr_report *r, int follow, rfr_write_fn write, void *user);
/* Writes the page's data, as the answer to /data.json?N. N is rfr_report_bytes of the data that the page has. */
RFR_API rfr_status rfr_report_data(rfr_report *r, rfr_write_fn write, void *user);

/* Writes one screen about a run (0 based) as lines of at most `columns` columns (40 to 400), with colours if `colour`:
 * progress, losses, speed, experts, memory and the last events. `now`: seconds since 1970, for the age of the last
 * line; 0 leaves it out. */
RFR_API rfr_status rfr_report_screen(rfr_report *r, int run, int columns, int colour, double now, rfr_write_fn write,
                                     void *user);

/* Writes a run (0 based) as an offline run of Weights & Biases: FOLDER/offline-run-TIME-ID/run-ID.wandb, which its
 * client uploads with `wandb sync`. The ID stays the same for a run. Errors: export.exists: the file exists; file.*,
 * and those of the run's files. */
RFR_API rfr_status rfr_report_wandb(rfr_report *r, int run, const char *folder);

/* Writes the differences of two runs: of the configurations, with the source of each value; of the curves, with the
 * first step at which they differ; of the weights in the newest checkpoints, by tensor. As text with at most `tensors`
 * tensors, or with `json` as one JSON object with all of them. *different is 1 if the configuration, a curve or the
 * weights differ; the speed, the machine and other facts do not count. Errors: those of rfr_report_open; checkpoint: a
 * run has only damaged ones; safetensors. */
RFR_API rfr_status rfr_report_diff(rfr_ctx *ctx, const char *first, const char *second, int json, int64_t tensors,
                                   rfr_write_fn write, void *user, int *different);

#ifdef __cplusplus
}
#endif
#endif
