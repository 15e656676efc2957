/* SPDX-License-Identifier: Apache-2.0
 *
 * The work and memory that frozen inputs save, for the report of autodiff and for the decisions of fuse.
 */
#ifndef RFI_FROZEN_H
#define RFI_FROZEN_H

#include "pass/pass.h"

static inline bool rfi_is_frozen_float(const rfr_trace *t, rfr_value v) {
  const rfi_value *x = &t->values[v];
  return x->op < 0 && x->role == RFR_ROLE_FROZEN && rfr_dtype_is_float(x->type.dtype);
}

/* Both functions compare two differentiated traces of the same recorded trace, before their rewrites end: `real`, and
 * `full`, in which frozen inputs have gradients too. `cotangent`: per recorded value its cotangent in `full`, or
 * RFR_NONE. */

/* Sets if_trained of the values of real->to. */
rfr_status rfi_mark_reads(const rfi_rewrite *real, const rfi_rewrite *full, const rfr_value *cotangent);
/* Reports a line for each gradient that only `full` computes, followed by the values that only `full` saves from
 * forward to backward for it; then a line of totals. A value saved for several gradients is listed once, at the
 * gradient that reads it first. `sum`: per recorded value the element type of its gradient. */
rfr_status rfi_report_pruned(const rfi_rewrite *real, const rfi_rewrite *full, const rfr_value *cotangent,
                             const rfr_dtype *sum, rfi_report *report);

#endif
