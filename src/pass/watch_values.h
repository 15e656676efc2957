/* SPDX-License-Identifier: Apache-2.0
 *
 * Watched values: names for the values of a step, and the ops that sum up those that patterns match.
 */
#ifndef RFI_WATCH_VALUES_H
#define RFI_WATCH_VALUES_H

#include "pass/pass.h"

#define RFI_WATCH_NAME "watch" /* the state f64 (slots, 1 + values, RFI_WATCH_SUMS) */

/* Watched values of a program. */
typedef struct rfi_watch {
  const char *const *patterns; /* syntax: rfr_name_matches */
  int n;
  int64_t slots; /* number of steps in the ring */
} rfi_watch;

/* Names the unnamed values of the forward and the backward in the trace after autodiff: see rfr_watch_options. */
rfr_status rfi_watch_name(rfr_trace *t);
/* Adds the ring and its ops to `last`, the trace after all other passes. `named`: the trace after autodiff. *names gets
 * the n names of rows 1 to n, in the new trace's arena. Errors: watch.name; argument, without a step block. */
rfr_status rfi_watch_values(const rfr_trace *named, const rfr_trace *last, const rfi_watch *w, rfi_report *report,
                            rfr_trace **out, const char *const **names, int *n);

#endif
