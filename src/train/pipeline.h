/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of a training step over the ranks of a pipeline. The gradients of a step are those of graphed callables, one
 * for each stage of this rank, in the order of a schedule; the update is the program of rfi_trace_update, which the
 * caller launches after rfi_pipeline_step. Parameters, the step block, gradients and received tensors are inputs of
 * that program.
 */
#ifndef RFI_PIPELINE_H
#define RFI_PIPELINE_H

#include "refrain/graphs.h"
#include "train/stage_trace.h"

typedef struct rfi_pipeline rfi_pipeline;

typedef struct rfi_pipeline_options {
  rfr_comm *comm;
  bool fuse, eager, debug;
  rfr_recompute recompute;
  int64_t budget; /* of the callables; 0: no limit */
} rfi_pipeline_options;

/* `update`: has the tensors of rfi_trace_update, and outlives the pipeline. The schedule has communication, and belongs
 * to `ctx`. Errors: argument (fewer layers than stages); unsupported, for what pipelines cannot train; those of
 * rfr_graphs_create. */
rfr_status rfi_pipeline_create(rfr_ctx *ctx, const rfi_step_spec *spec, rfr_programs *update,
                               const rfi_pipeline_options *options, rfi_pipeline **out);
void rfi_pipeline_destroy(rfi_pipeline *p); /* accepts NULL */
/* Refuses by name what a pipeline cannot train. */
rfr_status rfi_pipeline_check(const rfi_step_spec *spec);

/* The inputs of a step's microbatches, in memory of the host: (k,T), (k,T), (k,T+1). */
typedef struct rfi_pipeline_batch {
  const int32_t *tokens, *targets, *offsets;
} rfi_pipeline_batch;
/* Runs the schedule of one step: afterwards the gradients are complete. */
rfr_status rfi_pipeline_step(rfi_pipeline *p, const rfi_pipeline_batch *batch);
/* Borrowed. */
const rfr_graphs *rfi_pipeline_graphs(const rfi_pipeline *p);

#endif
