/* SPDX-License-Identifier: Apache-2.0
 *
 * The log of a run in memory: one row per logged step, the evaluations, and all other events. Reading again adds the
 * lines that were appended since. A run that continues from an older checkpoint logs steps twice; the later line
 * counts.
 */
#ifndef RFI_RUN_LOG_H
#define RFI_RUN_LOG_H

#include "base/base.h"

/* Numbers of a row: columns of the report, by their keys in log.jsonl; tokens_per_second is computed. */
#define RFI_SERIES(X) \
  X(loss)             \
  X(bits_per_byte)    \
  X(lr)               \
  X(grad_norm) X(tokens_per_second) X(resident_bytes) X(device_bytes) X(most_load) X(least_load) X(margin) X(accuracy)
typedef enum rfi_series {
#define RFI_SERIES_ENUM(name) RFI_SERIES_##name,
  RFI_SERIES(RFI_SERIES_ENUM)
#undef RFI_SERIES_ENUM
      RFI_SERIES_N
} rfi_series;
const char *rfi_series_name(rfi_series s);

/* A number that a line lacks is NaN. */
typedef struct rfi_log_row {
  int64_t step;
  double elapsed; /* seconds of the run up to this row, without the pauses between a stop and a resume */
  bool skipped;   /* no weight was updated */
  double value[RFI_SERIES_N];
} rfi_log_row;
typedef struct rfi_log_rows {
  rfi_log_row *items;
  int64_t n, capacity;
} rfi_log_rows;

typedef struct rfi_log_event {
  int64_t step;
  double elapsed;
  char *kind, *text; /* text of the event, "" for none */
} rfi_log_event;

typedef struct rfi_run_log {
  rfr_ctx *ctx;
  char *path;
  int64_t offset, line; /* read so far */
  int64_t step, steps;  /* the step logged last; steps of the run, 0: unknown */
  /* of the last line; at the start of its session; time of the last line within the session */
  double elapsed, since, last;
  double written;     /* time of the last line, seconds since 1970; 0: the log has no times */
  int64_t paced_step; /* step and time of the row from which speed is measured; 0: start with the next row */
  double paced_time;
  int64_t tokens; /* tokens of the last row */
  rfi_log_rows rows, evaluations;
  rfi_log_event *events;
  int64_t n_events, events_capacity;
  int layers;   /* number of layers with experts, columns of `loads` */
  float *loads; /* (rows.n, layers): most_load of each layer; NaN: not logged */
  int64_t loads_capacity;
} rfi_run_log;

/* Opens FOLDER/log.jsonl and reads it. Errors: run.folder, file.*, json. */
rfr_status rfi_run_log_open(rfr_ctx *ctx, const char *folder, rfi_run_log *out);
/* Reads complete lines that are new. Errors: file.*, json with the line. */
rfr_status rfi_run_log_read(rfi_run_log *log);
void rfi_run_log_close(rfi_run_log *log); /* accepts a zeroed one */
/* The message of the last "end" after the last "start": "done", "stopped", a slug; NULL: the run continues, or was
 * killed. */
const char *rfi_run_log_end(const rfi_run_log *log);

#endif
