/* SPDX-License-Identifier: Apache-2.0
 *
 * The file run-ID.wandb of Weights & Biases: records of protocol buffers in the framing of LevelDB's log, which its
 * client reads to upload a run.
 *
 * Formats: LevelDB's log (blocks of 32 KiB; here with CRC-32 of the type and the data, and a head of 7 bytes) and
 * wandb_internal.proto, of which the few messages below are written. All versions of the client since 0.12 have both.
 */
#ifndef RFI_WANDB_FILE_H
#define RFI_WANDB_FILE_H

#include "base/base.h"

/* The bytes of a file. Starts as {.text.ctx = ctx}; the first error is latched. */
typedef struct rfi_wandb {
  rfi_string text;
  rfr_status status;
  int64_t records;
  rfi_string message, item; /* scratch */
} rfi_wandb;
void rfi_wandb_deinit(rfi_wandb *w);

typedef struct rfi_wandb_value {
  const char *key;
  const char *json;
} rfi_wandb_value;

/* The first two records: the format, and the run with its configuration. `time`: its start, seconds since 1970. */
void rfi_wandb_begin(rfi_wandb *w, const char *id, const char *project, const char *name, double time,
                     const rfi_wandb_value *config, size_t n);
/* Values of a step. */
void rfi_wandb_history(rfi_wandb *w, int64_t step, const rfi_wandb_value *values, size_t n);
/* The last values, and the end of the run after `runtime` seconds. */
void rfi_wandb_end(rfi_wandb *w, const rfi_wandb_value *values, size_t n, double runtime, int exit_code);

#endif
