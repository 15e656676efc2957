/* SPDX-License-Identifier: Apache-2.0
 *
 * A sweep expands a configuration and a grid of values into a list of runs, and records the state of each run. The
 * caller trains the runs, in its own process or in others: `refrain sweep` starts `refrain train` for each.
 *
 *   rfr_sweep *sweep;
 *   rfr_sweep_run run;
 *   rfr_status s = rfr_sweep_open(ctx, "grid.yaml", "sweeps/lr", NULL, &sweep);
 *   for (int i = 0; s == RFR_OK && i < rfr_sweep_count(sweep); i++) {
 *     rfr_sweep_get(sweep, i, &run);
 *     s = rfr_sweep_set(sweep, i, RFR_SWEEP_RUNNING, NULL);
 *     if (s == RFR_OK) s = rfr_sweep_set(sweep, i, train(&run) ? RFR_SWEEP_DONE : RFR_SWEEP_FAILED, "");
 *   }
 *   rfr_sweep_close(sweep);
 *
 * docs/sweeps.md documents the grid. One thread at a time may use a sweep.
 */
#ifndef REFRAIN_SWEEP_H
#define REFRAIN_SWEEP_H

#include <stddef.h>
#include <stdint.h>

#include "refrain/ctx.h"
#include "refrain/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_sweep rfr_sweep;
enum { RFR_SWEEP_RUNS = 1000 }; /* of a sweep, at most */

typedef enum rfr_sweep_state {
  RFR_SWEEP_WAITING,
  RFR_SWEEP_RUNNING,
  RFR_SWEEP_STOPPED, /* can be resumed */
  RFR_SWEEP_FAILED,
  RFR_SWEEP_DONE
} rfr_sweep_state;

typedef struct rfr_sweep_options {
  size_t size;                  /* sizeof (rfr_sweep_options) */
  const char *const *overrides; /* "run.steps=100": of all runs; a key of the grid may not be among them */
  int n_overrides;
  int resume; /* 1: continue the sweep in the folder, or start one */
} rfr_sweep_options;
RFR_API rfr_sweep_options rfr_sweep_options_default(void);

/* Reads the grid and checks the configuration of every run. Creates `folder` with sweep.json, which has the state of
 * all runs, or continues it. The folder stays locked until the sweep is closed. Errors: sweep.grid, config.* with the
 * grid's file and line; sweep.exists; sweep.changed: the grid or its configuration is not the one of the folder;
 * run.busy; file.*; json. */
RFR_API rfr_status rfr_sweep_open(rfr_ctx *ctx, const char *grid, const char *folder, const rfr_sweep_options *options,
                                  rfr_sweep **out);
RFR_API void rfr_sweep_close(rfr_sweep *sweep); /* accepts NULL */
RFR_API int rfr_sweep_count(const rfr_sweep *sweep);
/* Path of the configuration that all runs start from. Borrowed. */
RFR_API const char *rfr_sweep_config(const rfr_sweep *sweep);

typedef struct rfr_sweep_run {
  const char *name, *folder;    /* "run-001", FOLDER/run-001; all texts are borrowed */
  const char *const *overrides; /* for rfr_run_options: those of all runs, then its own */
  int n_overrides, n_common;    /* n_common: those of all runs */
  rfr_sweep_state state;
  int started;                /* 1: the folder has a run, which is continued with resume */
  double loss, bits_per_byte; /* of the last evaluation; NaN: none */
  int64_t step;               /* last one logged */
  double seconds;             /* of training */
  const char *error;          /* of a failed run, or "" */
} rfr_sweep_run;
RFR_API rfr_status rfr_sweep_get(const rfr_sweep *sweep, int run, rfr_sweep_run *out);
/* Records a state and what the run has logged, and writes sweep.json. `error` may be NULL. Errors: argument;
 * sweep.changed: a run is to start, but its configuration has changed; file.*. */
RFR_API rfr_status rfr_sweep_set(rfr_sweep *sweep, int run, rfr_sweep_state state, const char *error);
/* The runs that are done and were evaluated, the best first, by bits per byte if all of them have those, else by loss.
 * `out` has rfr_sweep_count elements; returns the number of these runs. */
RFR_API int rfr_sweep_rank(const rfr_sweep *sweep, int *out);

#ifdef __cplusplus
}
#endif
#endif
