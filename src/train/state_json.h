/* SPDX-License-Identifier: Apache-2.0
 *
 * state.json, the part of a checkpoint that is neither a weight nor a moment:
 *
 *   {"format": 1, "step_block": [attempted, applied, seed, skipped],
 *    "configuration": {NAME: VALUE, ...}, "environment": {NAME: VALUE, ...},
 *    "seconds": SECONDS, "position": POSITION, "skipped_in_row": COUNT, "skipped_for_routing": 1,
 *    "tuned": {NAME: VALUE, ...}, "base": {"model": FOLDER, "hash": HASH}}
 *
 * A resume needs the same configuration; results also depend on the environment. "seconds" is the time that a run given
 * in time has used, "position" that of rfr_window, "skipped_in_row" how many of the last steps were skipped, "tuned"
 * the algorithms of a run with run.tune. The reader accepts counts that steps can lead to, and flat objects of texts
 * and integers. Printed text reads back equal.
 */
#ifndef RFI_STATE_JSON_H
#define RFI_STATE_JSON_H

#include <jansson.h>

#include "base/base.h"

/* Number of elements of the step block. */
enum { RFI_STEP_ATTEMPTED, RFI_STEP_APPLIED, RFI_STEP_SEED, RFI_STEP_SKIPPED, RFI_STEP_N };

typedef struct rfi_state_json {
  int64_t block[RFI_STEP_N];
  double seconds;   /* 0: the run is given in steps */
  int64_t position; /* position in the program's own data */
  /* steps skipped at the end; whether the last one had an invalid routing */
  int64_t skipped_in_row, skipped_for_routing;
  json_t *configuration, *environment;
  json_t *tuned; /* NULL: the run was not tuned */
  json_t *base;  /* NULL: the run has no adapter */
} rfi_state_json;

/* `file` is the name in errors; after an error *out needs no deinit. */
rfr_status rfi_state_json_parse(const char *file, const char *text, size_t n, rfi_state_json *out);
rfr_status rfi_state_json_print(const rfi_state_json *state, rfi_string *out);
void rfi_state_json_deinit(rfi_state_json *state);

#endif
