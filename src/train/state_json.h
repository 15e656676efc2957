/* SPDX-License-Identifier: Apache-2.0
 *
 * state.json, the part of a checkpoint that is neither a weight nor a moment:
 *
 *   {"format": 1, "step_block": [attempted, applied, seed, skipped],
 *    "configuration": {NAME: VALUE, ...}, "environment": {NAME: VALUE, ...},
 *    "tuned": {NAME: VALUE, ...}}
 *
 * The configuration is what a resume must agree with, the environment what else the bits
 * depend on; "tuned" is there when a clock chose algorithms, and is what it chose. What is
 * read holds: counts that steps can have led to, and flat objects of texts and integers. It
 * prints as text that reads back equal.
 */
#ifndef RFI_STATE_JSON_H
#define RFI_STATE_JSON_H

#include <jansson.h>

#include "train/run.h"

typedef struct rfi_state_json {
  int64_t block[RFI_STEP_N];
  json_t *configuration, *environment, *tuned; /* tuned: NULL for a run that was not */
} rfi_state_json;

/* `file` is named in errors; *out needs no deinit after one. */
rfr_status rfi_state_json_parse(const char *file, const char *text, size_t n, rfi_state_json *out);
rfr_status rfi_state_json_print(const rfi_state_json *state, rfi_string *out);
void rfi_state_json_deinit(rfi_state_json *state);

#endif
