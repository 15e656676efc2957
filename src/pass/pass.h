/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes: each reads one trace and writes another, with a report that gives a reason
 * for every decision. A pass never changes its input.
 *
 * In order (pipeline.c): autodiff -> prune -> fuse -> recompute -> lower; then plan.
 */
#ifndef RFI_PASS_H
#define RFI_PASS_H

#include "base/base.h"
#include "refrain/program.h"
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
  rfr_value *map;   /* from's value -> to's value; RFR_NONE while not copied */
  int *op_map;      /* from's op -> to's op; -1 while, or where, it has none of its own */
  const char *file; /* last source file's name, in to's arena */
} rfi_rewrite;

/* Starts a new trace with all inputs of `from`, in order. */
rfr_status rfi_rewrite_begin(const rfr_trace *from, rfi_rewrite *r);
/* The same without inputs; input i. */
rfr_status rfi_rewrite_open(const rfr_trace *from, rfi_rewrite *r);
rfr_status rfi_rewrite_input(rfi_rewrite *r, int i);
/* Copies op i with its operands mapped; dead (may be NULL) marks results to leave out
 * besides those that are dead already. */
rfr_status rfi_rewrite_op(rfi_rewrite *r, int i, const bool *dead);
/* The same with operands, label and reason given in `proto` (clone_of: an op of `from`);
 * its results take the place of op i's results, one by one. */
rfr_status rfi_rewrite_as(rfi_rewrite *r, int i, const rfi_opr *proto, const bool *dead);
/* Appends an op that stands for none of `from`; operands and clone_of are of `to`. */
rfr_status rfi_rewrite_new(rfi_rewrite *r, const rfi_opr *proto, const bool *dead, rfr_value *out);
/* New value v takes the place and the name of `from`'s old one. */
void rfi_stand_for(rfi_rewrite *r, rfr_value old, rfr_value v);
/* Maps the outputs, verifies, hands the new trace over. */
rfr_status rfi_rewrite_end(rfi_rewrite *r, rfr_trace **out);
/* After an error: frees everything. */
void rfi_rewrite_abort(rfi_rewrite *r);

/* The whole trace as it is. */
rfr_status rfi_copy_trace(const rfr_trace *in, rfr_trace **out);

/* Its ops in the order of their phases: phase[i], or an earlier one that reads its results, which phase[] says then. */
rfr_status rfi_order_phases(const rfr_trace *in, uint8_t *phase, rfr_trace **out);

/* How often each value is read (outputs count), and by which op last; from the context. */
typedef struct rfi_uses {
  int count, last, output;
} rfi_uses;
rfr_status rfi_count_uses(const rfr_trace *t, rfi_uses **out);

/* A rewrite that goes through the ops in order. `visit` copies op i, or emits what stands for it, and marks in skip[]
 * the later ops that are done with by then; `mark` (may be NULL) marks before the first visit. */
typedef struct rfi_rewriter {
  rfi_rewrite to;
  const rfi_uses *uses;
  bool *skip; /* per op: not visited */
  rfi_report *report;
  const struct rfi_pass_options *o;
} rfi_rewriter;
rfr_status rfi_rewrite_walk(const rfr_trace *in, const struct rfi_pass_options *o, rfi_report *report,
                            void (*mark)(rfi_rewriter *w), rfr_status (*visit)(rfi_rewriter *w, int i),
                            rfr_trace **out);

/* ---- the passes ---- */

typedef struct rfi_pass_options {
  bool fuse, prune;
  bool apart; /* forward, dgrad and wgrad will run as programs of their own, once per microbatch: no op does the work of
                 two of them, and what depends on weights alone is of phase setup. What is made again is what `level` of
                 `frontier` says: nothing without one */
  int copies; /* apart: so many times there are bytes for what lives from one of them to the next */
  bool delayed;  /* apart: wgrad may run long after dgrad, with bytes for what lives until then */
  bool gathered; /* apart: parameters, and what depends on them alone, are there for forward and dgrad, not for wgrad */
  bool (*is_written)(void *user, const char *state); /* apart: by somebody else, in between; NULL: none is */
  struct rfi_frontier *frontier;
  int level;
  bool parts;         /* parameters are parts, whole while they are gathered alone: nothing is made of them ahead */
  int64_t loss_chunk; /* rows of logits at a time in a fused LM head */
  rfr_recompute recompute;
  int64_t budget; /* of `auto`: step-scoped bytes of the plan, workspaces included; 0: no limit */
  /* Fills bytes[i] with the workspace of op i's kernel; NULL: none has any. */
  rfr_status (*workspace)(void *user, const rfr_trace *t, int64_t *bytes);
  void *user;
} rfi_pass_options;

rfr_status rfi_pass_autodiff(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_prune(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_fuse(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_recompute(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_lower(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Of fuse: the gradients of a norm become one op (fuse_norm.c). */
rfr_status rfi_fuse_norms(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Of fuse: sums of all parts of two results become one sum (fuse_parts.c). */
rfr_status rfi_fuse_parts(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Of fuse: a product whose parts are each added onto something of their own is made part by part (fuse_parts.c). */
rfr_status rfi_fuse_own_parts(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Of lower: a sum and its norm become one op (fuse_norm.c). */
rfr_status rfi_fuse_sums(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Of lower: a grouped product and the SwiGLU behind it become one op (fuse_swiglu.c). */
rfr_status rfi_fuse_swiglu(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Removes what no output and no effect needs; used by prune and, last of all, by lower. */
rfr_status rfi_dce(const rfr_trace *in, rfi_report *report, rfr_trace **out);

/* Choices of what to make again, for parts that run apart: level by level less memory and more work. */
typedef struct rfi_frontier rfi_frontier;
/* Of the trace after fuse. */
rfr_status rfi_frontier_create(const rfr_trace *in, const rfi_pass_options *o, bool marked_alone, rfi_frontier **out);
void rfi_frontier_destroy(rfi_frontier *l);
/* The last level, and the one with all that is marked and nothing else; level 0 is nothing at all. */
int rfi_frontier_top(const rfi_frontier *l);
int rfi_frontier_marked(const rfi_frontier *l);
/* Bytes that go with a level, for each unit of work: how frontiers of several traces compare. */
double rfi_frontier_benefit(const rfi_frontier *l, int level);

/* Parameters and main gradients of a trace whose passes are done become this rank's parts (shard.c). */
typedef struct rfi_shard {
  int ranks;
  const char *gradient; /* a parameter's main gradient has its name behind this */
  const char *whole;    /* and the whole of it that name behind this */
} rfi_shard;
rfr_status rfi_pass_shard(const rfr_trace *in, const rfi_shard *o, rfr_trace **out);

/* What less memory costs: from nothing recomputed to the smallest plan there is, peaks
 * descending, extra work ascending; planned_bytes are step-scoped ones. `in` is the trace
 * after fuse. At most `max` (2 or more) points; *n gets their number. */
rfr_status rfi_recompute_frontier(const rfr_trace *in, const rfi_pass_options *o, rfr_frontier_point *points, int max,
                                  int *n);

/* ---- the pipeline ---- */

typedef struct rfi_stage {
  const char *pass; /* "record", "autodiff", ... */
  rfr_trace *trace;
  rfi_report report;
  int64_t peak; /* most step-scoped bytes live at once */
} rfi_stage;
enum { RFI_STAGES = 6 };
typedef struct rfi_pipeline {
  rfr_ctx *ctx;
  rfi_stage stage[RFI_STAGES];
  int n;
} rfi_pipeline;
/* Runs all passes over `recorded`; the stages keep every trace. */
rfr_status rfi_pipeline_run(const rfr_trace *recorded, const rfi_pass_options *o, rfi_pipeline *p);
/* Runs `pass` and all after it once more, with other options. After an error: deinit. */
rfr_status rfi_pipeline_redo(rfi_pipeline *p, const char *pass, const rfi_pass_options *o);
void rfi_pipeline_deinit(rfi_pipeline *p);

#endif
