/* SPDX-License-Identifier: Apache-2.0
 *
 * For tests of rewrites: runs a trace, and counts the ops of a trace.
 */
#ifndef RFT_REWRITE_H
#define RFT_REWRITE_H

#include "support/context.h"
#include "trace/trace.h"

/* Compiles a trace, fills its f32 inputs, and runs it once. `o` may be NULL. */
rfr_programs *rft_run_filled(const rfr_trace *t, const rfr_compile_options *o);

/* Whether the output of this name has the same size and bits in both programs. */
bool rft_same_output(rfr_programs *p, rfr_programs *q, const char *name);

/* Number of ops with this code; `phase` -1: in all phases. */
int rft_count_ops(const rfr_trace *t, rfi_opcode code, int phase);
/* The same for a program after the pass "lower", in all phases. */
int rft_count_lowered(const rfr_programs *p, rfi_opcode code);

#endif
