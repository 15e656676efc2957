/* SPDX-License-Identifier: Apache-2.0
 *
 * The grid of a sweep: a YAML file with a configuration, lists of values for keys, seeds, and single runs.
 */
#ifndef RFI_GRID_H
#define RFI_GRID_H

#include "train/config.h"

/* One run. */
typedef struct rfi_point {
  const char **sets;   /* KEY=VALUE */
  rfi_config_id *keys; /* overrides of each run */
  int n;
  int64_t line; /* line in the grid's file, for errors */
} rfi_point;

typedef struct rfi_grid {
  const char *file;
  const char *config; /* path as written, absolute or from the grid's folder */
  rfi_point *points;
  int n;
} rfi_grid;

/* Everything lies in the arena. Errors: config.syntax; sweep.grid; config.key: an unknown key, with its line. */
rfr_status rfi_grid_read(rfr_ctx *ctx, rfi_arena *arena, const char *file, const char *text, size_t n, rfi_grid *out);

#endif
