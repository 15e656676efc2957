/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes. Each pass reads one trace, writes a new one, and reports a reason for every decision; it never
 * changes its input.
 *
 * Order (pipeline.c): autodiff -> quantize -> prune -> fuse -> recompute -> shard -> lower; then plan.
 */
#ifndef RFI_PASS_H
#define RFI_PASS_H

#include "base/base.h"
#include "refrain/program.h"
#include "trace/trace.h"

/* The decisions of a pass, one per line. */
typedef struct rfi_report {
  rfi_string text;
  int decisions;
} rfi_report;
rfr_status rfi_report_line(rfi_report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- copying ops from one trace into another ---- */

typedef struct rfi_rewrite {
  const rfr_trace *from;
  rfr_trace *to;
  rfr_value *map;   /* value of `from` -> value of `to`; RFR_NONE while not copied */
  int *op_map;      /* op of `from` -> op of `to`; -1 while not copied, or if none replaces it */
  const char *file; /* last source file name, in to's arena */
} rfi_rewrite;

/* Starts a new trace with all inputs of `from`, in order. */
rfr_status rfi_rewrite_begin(const rfr_trace *from, rfi_rewrite *r);
/* Starts a new trace without inputs; copies input i. */
rfr_status rfi_rewrite_open(const rfr_trace *from, rfi_rewrite *r);
rfr_status rfi_rewrite_input(rfi_rewrite *r, int i);
/* Copies the file name of a source of `from` into the arena of `to`. */
rfr_status rfi_rewrite_source(rfi_rewrite *r, rfr_source *at);
/* Copies op i with mapped operands. dead (may be NULL) marks further results to remove. */
rfr_status rfi_rewrite_op(rfi_rewrite *r, int i, const bool *dead);
/* Appends `proto` in place of op i; its results replace those of op i, in order. Operands of `proto` are values of
 * `to`; clone_of is an op of `from`. */
rfr_status rfi_rewrite_as(rfi_rewrite *r, int i, const rfi_opr *proto, const bool *dead);
/* Appends an op that replaces no op of `from`; operands and clone_of refer to `to`. */
rfr_status rfi_rewrite_new(rfi_rewrite *r, const rfi_opr *proto, const bool *dead, rfr_value *out);
/* Maps value `old` of `from` to v, and moves the name to v. */
void rfi_replace_value(rfi_rewrite *r, rfr_value old, rfr_value v);
/* Maps the outputs, verifies the new trace and returns it. */
rfr_status rfi_rewrite_end(rfi_rewrite *r, rfr_trace **out);
/* Frees everything after an error. */
void rfi_rewrite_abort(rfi_rewrite *r);

/* An unchanged copy. */
rfr_status rfi_copy_trace(const rfr_trace *in, rfr_trace **out);

/* Stable sort of the ops by phase[i]. A producer moves to the earliest phase that reads it; phase[] is updated. */
rfr_status rfi_order_phases(const rfr_trace *in, uint8_t *phase, rfr_trace **out);

/* Per value: number of readers (outputs count) and the last op that reads it; freed with rfi_free. */
typedef struct rfi_uses {
  int count, last, output;
} rfi_uses;
rfr_status rfi_count_uses(const rfr_trace *t, rfi_uses **out);
/* Whether the scopes of both ops have the same first component. */
bool rfi_same_layer(const rfi_opr *a, const rfi_opr *b);
/* Extends `reached`, per value, from inputs to the values that depend on them. along_gradients: only through floats
 * and ops that do not stop gradients. */
void rfi_reach(const rfr_trace *t, bool along_gradients, bool *reached);

/* A rewrite that visits the ops in order. `visit` copies or replaces op i and marks in skip[] later ops that must not
 * be visited. `mark` (may be NULL) runs before the first visit and may mark ops too. */
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
/* Whether phase and microbatch are equal, and both ops are clones or neither is. */
bool rfi_run_together(const rfi_opr *a, const rfi_opr *b);
/* Whether v is absent or has no reader. */
bool rfi_is_unread(const rfi_rewriter *w, rfr_value v);

/* ---- the passes ---- */

typedef struct rfi_pass_options {
  bool fuse, prune;
  const struct rfi_watch *watch; /* watch_values.h; NULL: nothing is watched */
  /* Forward, dgrad and wgrad become separate programs that run once per microbatch: no fusion crosses programs, and ops
   * that depend only on parameters move to phase setup. The next four fields apply only if it is set. */
  bool split_phases;
  int copies; /* microbatches in flight: the number of copies of values that live from one program to the next */
  bool separate_wgrad; /* wgrad may run long after dgrad, and keeps the values that live until then */
  /* parameters, and values that depend only on them, are gathered for forward and dgrad, but not for wgrad */
  bool gathered;
  /* whether another program writes the state between forward and backward; NULL: no program does */
  bool (*is_written)(void *user, const char *state);
  struct rfi_frontier *frontier; /* not NULL: recompute its level `level` and ignore `recompute` */
  int level;
  rfr_shard shard; /* sharding of a step over `ranks` ranks (shard.c); with 0 or 1 ranks nothing is sharded */
  int ranks, rank;
  bool sharded;       /* parameters are shards, gathered only temporarily, so no op on them is hoisted */
  int64_t loss_chunk; /* rows of logits per chunk in a fused LM head, unless loss_rows(T, C) is given */
  int64_t (*loss_rows)(int64_t T, int64_t C);
  /* The position of a callable in a set whose linear layers share the states of fp8_delayed and the sites of nvfp4. */
  int slots, first_slot;   /* slots of delayed scaling: of the entire set, and before this callable */
  int64_t first_linear;    /* number of linear layers under a recipe that precede this callable */
  bool trains;             /* the set trains: forwards collect amax values, frozen callables keep the bits of trained */
  bool lora;               /* the backend has kernels for lora_matmul */
  bool gelu_bwd;           /* the backend has GEMMs that apply the gradient of GELU */
  bool dx_sum;             /* layernorm_bwd sums the columns of dx */
  rfr_recompute recompute; /* `all`, else marked ops; with split_phases nothing */
  /* Sets bytes[i] to the workspace of op i's kernel; NULL: no op has one. */
  rfr_status (*workspace)(void *user, const rfr_trace *t, int64_t *bytes);
  void *user;
} rfi_pass_options;

rfr_status rfi_pass_autodiff(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_quantize(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_prune(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_fuse(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_recompute(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_shard(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
rfr_status rfi_pass_lower(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of shard: the wgrad GEMMs of the layer after an embedding follow the embedding's gradient (late_wgrad.c). *out
 * NULL: no op moves. */
rfr_status rfi_delay_wgrads(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Part of fuse: the gradients of a norm become one op (fuse_norm.c). */
rfr_status rfi_fuse_norms(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of fuse: sums of all slices of two results become one sum (fuse_parts.c). */
rfr_status rfi_fuse_parts(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of fuse: a grouped wgrad whose slices are accumulated into separate gradients is split by group
 * (fuse_parts.c). */
rfr_status rfi_fuse_own_parts(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of fuse: a dgrad and the gradient of GELU that reads it become one op (fuse_gelu.c). */
rfr_status rfi_fuse_gelu(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of fuse: a GEMM and a narrow one that is added to it become one op (fuse_lora.c). */
rfr_status rfi_fuse_lora(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of fuse: scaled GEMMs accumulate into the narrow GEMM of an adapter, not the reverse (fuse_lora.c). */
rfr_status rfi_fuse_scaled_sums(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out);
/* Part of lower: lora_matmul as two GEMMs, for a backend without a kernel for it (fuse_lora.c). */
rfr_status rfi_split_lora(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* End of fuse: each reader of a dequantized weight gets a separate dequantize op (split_dequantize.c). */
rfr_status rfi_split_dequantize(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Part of lower: an add and the norm that reads it become one op (fuse_norm.c). */
rfr_status rfi_fuse_sums(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Part of lower: tokens are quantized before their rows are sorted by expert (fuse_permute.c). */
rfr_status rfi_fuse_permute(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Part of lower: an op and the quantize ops that read its result become one op (fuse_quantize.c). */
rfr_status rfi_fuse_quantize(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Part of lower: a grouped GEMM and the SwiGLU that reads it become one op (fuse_swiglu.c). */
rfr_status rfi_fuse_swiglu(const rfr_trace *in, rfi_report *report, rfr_trace **out);
/* Removes ops and results that no output and no effect needs; used by prune and at the end of lower. */
rfr_status rfi_dce(const rfr_trace *in, rfi_report *report, rfr_trace **out);

/* The recompute frontier: each level needs less memory and more work than the previous one. */
typedef struct rfi_frontier rfi_frontier;
/* `in`: the trace after fuse, which must outlive the frontier. marked_alone: consider only ops with policy
 * recompute. */
rfr_status rfi_frontier_create(const rfr_trace *in, const rfi_pass_options *o, bool marked_alone, rfi_frontier **out);
void rfi_frontier_destroy(rfi_frontier *l);
/* The number of the last level, and of the level with exactly the marked ops. Level 0 recomputes nothing. */
int rfi_frontier_top(const rfi_frontier *l);
int rfi_frontier_marked(const rfi_frontier *l);
/* The first level, from the marked one on, whose live bytes are at most `bytes`, else the last. Earlier levels cannot
 * fit, because a plan is never smaller than its live bytes. */
int rfi_frontier_first(rfi_frontier *l, int64_t bytes);
/* Bytes freed by a level per unit of work, to compare frontiers of several traces. */
double rfi_frontier_benefit(const rfi_frontier *l, int level);
/* The step-scoped plan of a level, and its extra work. Members that do not lower the peak are left out, unless the plan
 * then exceeds `enough` and the plan with them is smaller; the pass makes the same decision later. */
rfr_status rfi_frontier_plan(rfi_frontier *l, int level, int64_t enough, rfr_frontier_point *out);
/* The trade-off between memory and recompute work, from the marked level to level `last`: planned bytes descend, extra
 * work ascends. Writes at most `max` (2 or more) points and their number to *n. */
rfr_status rfi_frontier_points(rfi_frontier *l, int last, rfr_frontier_point *points, int max, int *n);

/* The use of recipes in a recorded forward (quantize.c). */
typedef struct rfi_recipe_use {
  int linears;               /* linear layers under a recipe, including those that are not quantized */
  int slots;                 /* slots of delayed scaling; 0: none */
  bool draws;                /* gradients are rounded stochastically */
  const rfr_recipe *delayed; /* the only fp8_delayed recipe, in the trace's memory; NULL: none */
} rfi_recipe_use;
rfr_status rfi_recipe_use_of(const rfr_trace *t, rfi_recipe_use *out);
/* recipe.unsupported if two fp8_delayed recipes would need separate states. */
rfr_status rfi_recipes_agree(const rfr_recipe *a, const rfr_recipe *b);

/* The input of a callable with the microbatch number. */
#define RFI_MICROBATCH_INPUT "graphs.microbatch"

/* Replaces parameters and main gradients of a callable by the shards of one rank, after all passes
 * (shard_callable.c). */
typedef struct rfi_shard {
  int ranks;
  const char *gradient; /* name prefix of a parameter's main gradient */
  const char *gathered; /* name prefix of the gathered main gradient */
} rfi_shard;
rfr_status rfi_shard_callable(const rfr_trace *in, const rfi_shard *o, rfr_trace **out);

/* ---- the pipeline ---- */

typedef struct rfi_stage {
  const char *pass; /* "record", "autodiff", ... */
  rfr_trace *trace;
  rfi_report report;
  int64_t peak; /* maximum of step-scoped live bytes */
} rfi_stage;
enum { RFI_STAGES = 8 };
typedef struct rfi_pipeline {
  rfr_ctx *ctx;
  rfi_stage stage[RFI_STAGES];
  int n;
  const char *const *watched; /* names of the n_watched watched values, in the arena of the last trace */
  int n_watched;
} rfi_pipeline;
/* Runs all passes over `recorded`; keeps the trace after each pass. */
rfr_status rfi_pipeline_run(const rfr_trace *recorded, const rfi_pass_options *o, rfi_pipeline *p);
/* Runs `pass` and all later passes again, with other options. After an error call deinit. */
rfr_status rfi_pipeline_redo(rfi_pipeline *p, const char *pass, const rfi_pass_options *o);
void rfi_pipeline_deinit(rfi_pipeline *p);

#endif
