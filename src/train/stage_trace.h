/* SPDX-License-Identifier: Apache-2.0
 *
 * The stages of a pipeline: the layers of a stage, the rank that owns a stage or a parameter, and the forward of a
 * layer as a trace.
 */
#ifndef RFI_STAGE_TRACE_H
#define RFI_STAGE_TRACE_H

#include "train/step_trace.h"

/* Stages per rank: 2 for interleaved and zb-v, otherwise 1. */
static inline int rfi_pipeline_chunks(const rfi_pipeline_part *p) {
  return p->schedule == RFR_SCHEDULE_INTERLEAVED || p->schedule == RFR_SCHEDULE_ZB_V ? 2 : 1;
}
static inline int rfi_pipeline_stages(const rfi_pipeline_part *p) { return p->ranks * rfi_pipeline_chunks(p); }
/* The same as rfr_schedule_rank of the generated schedule. */
static inline int rfi_pipeline_rank(const rfi_pipeline_part *p, int stage) {
  return p->schedule == RFR_SCHEDULE_ZB_V && stage >= p->ranks ? 2 * p->ranks - 1 - stage : stage % p->ranks;
}

/* The rank of the run that is rank `rank` in this rank's pipeline. */
static inline int rfi_pipeline_peer(const rfi_step_spec *s, int rank) {
  return s->ranks > 1 ? rank * s->ranks + s->rank : rank;
}

/* The layers of a stage, from *first (may be NULL) on. */
int64_t rfi_stage_layers(const rfi_step_spec *s, int stage, int64_t *first);

/* The schedule of a step, with communication. */
rfr_status rfi_pipeline_schedule(rfr_ctx *ctx, const rfi_step_spec *s, rfr_schedule **out);
/* Sets s->pipeline.activations, gradients and scales. */
rfr_status rfi_pipeline_count_slots(rfr_ctx *ctx, rfi_step_spec *s);
/* Whether a stage receives its input, or the gradient of its output, from another rank. */
bool rfi_stage_receives(const rfi_pipeline_part *p, int stage, bool gradient);

/* The embedding of a model with a tied head, if it is trained; -1: none. */
int rfi_pipeline_tied(const rfi_step_spec *s);
/* Whether the layer reads parameter i, an embedding, as its LM head. */
bool rfi_is_tied_head(const rfi_step_spec *s, int64_t layer, int i);
/* Whether a stage, or any stage of the rank, reads parameter i of the model. */
bool rfi_stage_reads(const rfi_step_spec *s, int stage, int i);
bool rfi_pipeline_owns(const rfi_step_spec *s, int rank, int i);
/* Whether a stage has a backward: every stage except a first one without trained parameters. */
bool rfi_stage_trains(const rfi_step_spec *s, int stage);
bool rfi_pipeline_draws(const rfi_step_spec *s); /* layers draw random numbers: dropout, nvfp4 */

/* Whether a layer reads parameter i. The first layer also reads the embedding, the last one the final norm and the
 * head. */
bool rfi_layer_reads(const rfi_step_spec *s, int64_t layer, int i);
/* The forward of a layer for one microbatch, a callable of its stage. Inputs: i32 "tokens" (T) of the first layer, "x"
 * (T,C) of the others; i32 "offsets" (T+1); of the last layer also i32 "targets" (T) and f32 "inv" (1), see
 * rfr_cross_entropy_at. Outputs: "loss" f32 (1) of the last layer, "y" (T,C) of the others. */
rfr_status rfi_trace_layer(rfr_ctx *ctx, const rfi_step_spec *s, int64_t layer, rfr_trace **out);

#endif
