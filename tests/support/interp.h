/* SPDX-License-Identifier: Apache-2.0
 *
 * Interprets a trace in f64: every op by its reference kernel, every float value stored as f64 whatever its type,
 * integers unchanged, views by their strides. So the result of a pass can be compared without rounding errors.
 */
#ifndef RFT_INTERP_H
#define RFT_INTERP_H

#include "support/op_check.h"

typedef struct rft_interp {
  const rfr_trace *trace;
  void **storage; /* per value that owns storage: dense data */
  rfi_arg *arg;   /* one per value */
} rft_interp;

/* Allocates zeroed storage for all values; rft_set on arg[input] fills an input. */
void rft_interp_init(rft_interp *in, const rfr_trace *t);
void rft_interp_deinit(rft_interp *in);
/* Runs all ops. Returns NULL, or the name of an op without a reference. */
const char *rft_interp_run(rft_interp *in);
/* The value id of a name. */
rfr_value rft_input_of(const rfr_trace *t, const char *name);
rfr_value rft_output_of(const rfr_trace *t, const char *name);

#endif
