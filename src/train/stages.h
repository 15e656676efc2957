/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of a training step over the ranks of a pipeline. The gradients of a step are those of graphed callables, one
 * for each stage of this rank, in the order of a schedule; the update is the program of rfi_trace_train, which the
 * caller launches after rfi_stages_step. Parameters, the step block, gradients and received tensors are inputs of
 * that program.
 */
#ifndef RFI_STAGES_H
#define RFI_STAGES_H

#include "refrain/graphs.h"
#include "train/stage_trace.h"

typedef struct rfi_stages rfi_stages;

typedef struct rfi_stages_options {
  rfr_comm *comm;
  bool fuse, eager, debug, plan_only; /* plan_only: no step can be run */
  rfr_recompute recompute;
  int64_t budget;               /* for the callables, including the entire step memory; 0: no limit */
  rfr_step_memory *step_memory; /* shared with `update`, whose programs run between steps; NULL: not shared */
} rfi_stages_options;

/* `update`: its programs have the tensors of rfi_trace_train, and outlive the pipeline. The schedule has communication
 * and belongs to `ctx`; each stage has a layer (parallel.h). Errors: unsupported, for models that pipelines cannot
 * train; those of rfr_graphs_create. */
rfr_status rfi_stages_create(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_programs *update,
                             const rfi_stages_options *options, rfi_stages **out);
void rfi_stages_destroy(rfi_stages *p); /* accepts NULL */
/* Refuses, by name, everything that a pipeline cannot train. */
rfr_status rfi_pipeline_check(const rfi_step_spec *spec);

/* The inputs of a step's microbatches, in host memory: (k,T), (k,T), (k,T+1). They must stay unchanged until the update
 * of the step is done. */
typedef struct rfi_stages_batch {
  const int32_t *tokens, *targets, *offsets;
} rfi_stages_batch;
/* Runs the schedule of one step; afterwards the gradients are complete. On a GPU the calls are enqueued on the stream
 * of `update`. */
rfr_status rfi_stages_step(rfi_stages *p, const rfi_stages_batch *batch);
/* The same with a wait before and after each action; `seconds`: per action of this rank. */
rfr_status rfi_stages_time(rfi_stages *p, const rfi_stages_batch *batch, double *seconds);
/* The actions of this rank. */
const rfr_action *rfi_stages_actions(const rfi_stages *p, int *n);
/* Bytes per message, and messages that this rank sends per step. */
void rfi_stages_messages(const rfi_stages *p, int64_t *bytes, int64_t *n);
/* The memory of the callables; with plan_only, live, live_bytes and graphs are not set. */
void rfi_stages_memory(const rfi_stages *p, rfr_graphs_memory *out);

#endif
