/* SPDX-License-Identifier: Apache-2.0
 *
 * The differences of two runs as one JSON value, from which the text is printed too.
 *
 *   {"runs", "equal", "config": [{"key", "values", "sources"}], "facts": [{"name", "values"}],
 *    "curves": [{"name", "points", "last", "best", "area", "first_step", "counts"}], "steps",
 *    "weights": {"steps", "tensors", "equal", "different": [{"name", "dtypes", "shapes", "max_abs", "relative"}],
 *                "missing", "extra"}}
 *
 * Pairs are lists of two, null where a run has none. A run's own time and speed are shown and never count as a
 * difference.
 */
#ifndef RFI_DIFF_H
#define RFI_DIFF_H

#include <jansson.h>

#include "base/base.h"
#include "report/run_log.h"

/* Adds "config" and "facts". */
rfr_status rfi_diff_config(rfr_ctx *ctx, const char *const folders[2], json_t *out, bool *different);
/* Adds "steps" and "curves". */
rfr_status rfi_diff_curves(const rfi_run_log *const logs[2], json_t *out, bool *different);
/* Adds "weights", of the newest checkpoints; null if no run has one. */
rfr_status rfi_diff_weights(rfr_ctx *ctx, const char *const folders[2], json_t *out, bool *different);
/* Appends the differences as text; at most `most` tensors. */
rfr_status rfi_diff_print(const json_t *diff, int64_t most, rfi_string *out);

/* object[key] = [a, b], taking the references; NULL becomes null. */
rfr_status rfi_diff_set_pair(json_t *object, const char *key, json_t *a, json_t *b);
/* A number as a new reference; null if it is not finite. */
json_t *rfi_diff_real(double x);

#endif
