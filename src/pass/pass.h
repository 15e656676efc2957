/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes: each reads one trace and writes another, with a report that gives a reason
 * for every decision. A pass never changes its input.
 *
 * In order (pipeline.c): autodiff -> prune -> fuse -> lower; then plan.
 */
#ifndef RFI_PASS_H
#define RFI_PASS_H

#include "base/base.h"
#include "trace/trace.h"

/* What a pass did, one line per decision. */
typedef struct rfi_report {
  rfi_string text;
  int decisions;
} rfi_report;
rfr_status rfi_report_line(rfi_report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- copying ops from one trace into another ---- */

typedef struct rfi_rewrite {
  const rfr_trace *from;
  rfr_trace *to;
  rfr_value *map; /* from's value -> to's value; RFR_NONE while not copied */
} rfi_rewrite;

/* Starts a new trace with all inputs of `from`, in order. */
rfr_status rfi_rewrite_begin(const rfr_trace *from, rfi_rewrite *r);
/* Copies op i with its operands mapped; dead (may be NULL) marks results to leave out
 * besides those that are dead already. */
rfr_status rfi_rewrite_op(rfi_rewrite *r, int i, const bool *dead);
/* The same with operands, label and reason given in `proto`; its results take the place of
 * op i's results, one by one. */
rfr_status rfi_rewrite_as(rfi_rewrite *r, int i, const rfi_opr *proto, const bool *dead);
/* Maps the outputs, verifies, hands the new trace over. */
rfr_status rfi_rewrite_end(rfi_rewrite *r, rfr_trace **out);
/* After an error: frees everything. */
void rfi_rewrite_abort(rfi_rewrite *r);

/* The whole trace as it is. */
rfr_status rfi_copy_trace(const rfr_trace *in, rfr_trace **out);

/* How often each value is read (outputs count), and by which op last; from the context. */
typedef struct rfi_uses {
  int count, last, output;
} rfi_uses;
rfr_status rfi_count_uses(const rfr_trace *t, rfi_uses **out);

/* ---- the passes ---- */

typedef struct rfi_pass_options {
  bool fuse, prune;
  int64_t loss_chunk; /* rows of logits at a time in a fused LM head */
} rfi_pass_options;

rfr_status rfi_pass_autodiff(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_prune(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_fuse(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_lower(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Removes what no output and no effect needs; used by prune and, last of all, by lower. */
rfr_status rfi_dce(const rfr_trace *in, rfi_report *report, rfr_trace **out);

/* ---- the pipeline ---- */

typedef struct rfi_stage {
  const char *pass; /* "record", "autodiff", ... */
  rfr_trace *trace;
  rfi_report report;
  int64_t peak; /* most step-scoped bytes live at once */
} rfi_stage;
enum { RFI_STAGES = 5 };
typedef struct rfi_pipeline {
  rfr_ctx *ctx;
  rfi_stage stage[RFI_STAGES];
  int n;
} rfi_pipeline;
/* Runs all passes over `recorded`; the stages keep every trace. */
rfr_status rfi_pipeline_run(const rfr_trace *recorded, const rfi_pass_options *o, rfi_pipeline *p);
void rfi_pipeline_deinit(rfi_pipeline *p);

#endif
