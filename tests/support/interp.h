/* SPDX-License-Identifier: Apache-2.0
 *
 * Interprets a trace in f64: every op by its reference kernel, every float value stored as
 * f64 whatever its type, integers unchanged, views by their strides. So the result of a pass can be
 * compared with the exact mathematics, without rounding.
 */
#ifndef RFT_INTERP_H
#define RFT_INTERP_H

#include "support/op_check.h"

typedef struct rft_interp {
  const rfr_trace *trace;
  void **storage; /* per value that owns its bytes: dense */
  rfi_arg *arg;   /* per value */
} rft_interp;

/* Makes zeroed storage for all values; rft_set on arg[input] fills an input. */
void rft_interp_init(rft_interp *in, const rfr_trace *t);
void rft_interp_deinit(rft_interp *in);
/* Runs all ops. NULL, or the name of an op that has no reference. */
const char *rft_interp_run(rft_interp *in);
/* Value ids by name. */
rfr_value rft_input_of(const rfr_trace *t, const char *name);
rfr_value rft_output_of(const rfr_trace *t, const char *name);

#endif
