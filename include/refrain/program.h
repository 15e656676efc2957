/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled programs. rfr_compile rewrites traces with the passes, plans them into one arena and selects kernels. A
 * program then runs eagerly, or is captured and replayed.
 *
 * Programs compiled together share their inputs by name (weights, states, rings) and one arena, which is as large as
 * the largest program needs. Running and replaying do not call the context's allocator. oneDNN still calls malloc for
 * the argument list of each GEMM, and the GPU driver allocates too. One thread at a time may use an rfr_programs.
 *
 *   rfr_programs *p;
 *   rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, (const char *const[]){"train"}, NULL, &p);
 *   rfr_tensor w;
 *   rfr_programs_tensor(p, "w", &w);      // fill w.data
 *   rfr_programs_load(p);                 // once, after weights were written
 *   rfr_program_capture(p, 0);
 *   rfr_program_replay(p, 0, NULL, 0);    // any number of times
 */
#ifndef REFRAIN_PROGRAM_H
#define REFRAIN_PROGRAM_H

#include "refrain/dist.h"
#include "refrain/hooks.h"
#include "refrain/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_programs rfr_programs;

/* Memory for the step-scoped bytes of programs and graphs of one context that never run at the same time. Their steps
 * take turns using it, so the plan is the maximum of their bytes instead of the sum. Set it in rfr_compile_options and
 * rfr_graphs_options.
 *
 *   rfr_step_memory_create(ctx, 0, &m);
 *   options.step_memory = m;                          // of rfr_compile: the optimizer, an evaluation
 *   graphs_options.step_memory = m;                   // of rfr_graphs_create: the callables of a training step
 *
 * It is allocated by rfr_graphs_create or, if that comes first, when one of the programs is loaded, run or captured.
 * Later users must fit (plan.over_budget), so create the largest user first, or give `bytes` at creation. Compiling
 * alone does not allocate it. Outputs of programs have no data before it is allocated.
 *
 * Only one user at a time uses the memory. Outputs of a program, and outputs and input gradients of graphs, are valid
 * only until another user runs; reading them later is an error (tensor, argument). From the begin to the end of a step
 * of graphs other users are refused: memory.in_use, and nothing was executed. On a GPU the same holds while work of the
 * last user still runs, unless both work in one stream (rfr_graphs_set_stream). */
typedef struct rfr_step_memory rfr_step_memory;
/* `bytes`: the least to allocate, 0 or more. */
RFR_API rfr_status rfr_step_memory_create(rfr_ctx *ctx, int64_t bytes, rfr_step_memory **out);
/* Its users keep the memory until the last of them is destroyed. Accepts NULL. */
RFR_API void rfr_step_memory_destroy(rfr_step_memory *m);
/* The bytes of the largest user so far. -1: NULL. */
RFR_API int64_t rfr_step_memory_bytes(const rfr_step_memory *m);

/* The passes in their order; "record" names the trace before the first. */
#define RFR_PASSES(X) X(autodiff) X(quantize) X(prune) X(fuse) X(recompute) X(shard) X(lower)

/* Recomputation of the values that the backward reads, for ops whose policy is auto (rfr_set_recompute). */
typedef enum rfr_recompute {
  RFR_RECOMPUTE_KEEP, /* nothing is recomputed */
  RFR_RECOMPUTE_ALL,  /* every op is recomputed that lowers the peak */
  RFR_RECOMPUTE_AUTO, /* as many ops as the budget requires are recomputed, cheapest first */
} rfr_recompute;

/* Tensors of a data-parallel step that are sharded over the ranks. All modes are bitwise equal, except that
 * RFR_SHARD_FULL sums in another order if a rank has several microbatches. The updates and the norm must read gradients
 * through rfr_all_reduce over all ranks. A sharded tensor is a one-dimensional input of ceil(n / ranks) elements,
 * rounded up to 256; the shards are in rank order, zero-padded at the end. */
typedef enum rfr_shard {
  RFR_SHARD_NONE,      /* nothing */
  RFR_SHARD_OPTIMIZER, /* trainable parameters, moments, master weights; parameters are gathered once per step */
  RFR_SHARD_FULL,      /* also frozen parameters; each layer is gathered for its forward and for its backward */
} rfr_shard;
RFR_API const char *rfr_shard_name(rfr_shard shard); /* as in parallel.shard; NULL: there is none */

/* An algorithm that a tuned compile selected by measurement. `name` has shapes and types, `value` the algorithm. */
typedef struct rfr_choice {
  const char *name, *value;
} rfr_choice;

/* Statistics of values of one program, computed on the device while it runs. The program's trace must have the step
 * block (rfr_step_block), which numbers the steps. Watching changes no bit that the program computes. Names:
 *   NAME                  a weight or an optimizer state, as the step leaves it
 *   grad:NAME             the gradient of a parameter, as the optimizer reads it: summed over microbatches and reduced
 *                         over ranks, before clipping; in f16 with the loss scale
 *   MODULE.output         the result of an op that reads the parameter MODULE.weight
 *   grad:MODULE.input     the gradient of that op's input
 *   SCOPE.OP              the result of another op of the forward, grad:SCOPE.OP one of the backward; further results
 *                         end in their name, and further values of the same name in .1, .2, ...
 * and names given by rfr_value_set_name. Values of all microbatches count as one. Only values that exist when the
 * program runs have statistics: pass fuse removes some. */
typedef struct rfr_watch_options {
  size_t size;
  const char *const *patterns; /* n, rfr_name_matches: each must match a value of f32, bf16 or f16; borrowed until the
                                  compile returns */
  int n;
  int program;   /* which of the programs */
  int64_t slots; /* steps whose statistics are kept, from the last one on; default 1 */
} rfr_watch_options;
RFR_API rfr_watch_options rfr_watch_options_default(void);

typedef struct rfr_compile_options {
  size_t size;
  int64_t budget;          /* bytes of the arena and of `step_memory`; 0: no limit. A plan over it is an error that
                          names the peak. The side stream uses only bytes that are left within it. Guards of `debug`
                          do not count */
  int fuse;                /* 1: the fuse pass runs (default) */
  int prune;               /* 1: CSE, DCE and hoisting run (default); 0: autodiff's result is used as it is */
  int64_t loss_chunk;      /* rows of logits at a time in a fused LM head; 0: 1024 on the CPU, 4096 to 6144 on a GPU */
  int debug;               /* 1: every value has separate, guarded bytes, dead buffers are filled with NaN (floats) or
                          -1 (integers), and every result is checked for NaN */
  int keep_traces;         /* 1: rfr_programs_trace can give the trace after each pass */
  rfr_recompute recompute; /* default: keep. Never changes a bit of any result */
  int tune;                /* 1: measure a GPU library's algorithms for each GEMM and take the fastest with repeatable
                           bits; 0: the library's first one (default) */
  const rfr_choice *choices; /* with tune: take these choices of an earlier compile, measure nothing. NULL: measure */
  int n_choices;
  rfr_comm *comm;  /* this rank's handle, for collectives; outlives the programs. NULL: no collectives, or one rank */
  int plan_only;   /* 1: plan, but allocate no memory for the programs. All queries of the plan work; data pointers are
                     NULL; calls that run, read or write fail with program.plan_only. A plan over `budget` is not an
                     error: compare planned_bytes. `tune` measures nothing */
  rfr_shard shard; /* over the ranks of `comm`; default: none. Errors: dist.shard, naming the tensor */
  rfr_step_memory *step_memory;   /* for the step-scoped bytes, which others use too. NULL: they are in the arena */
  const rfr_watch_options *watch; /* NULL: nothing is watched. Errors: watch.name, with near names */
  /* Hooks, one entry per program, or NULL and n_hooks 0. They run in rfr_program_run, before and after the forward and
   * the backward of each microbatch (hooks.h). Programs with hooks have no side stream. Borrowed until the compile
   * returns. Errors: argument, for hooks of a part that the program does not have, and for wgrad hooks, because weight
   * gradients are part of the backward. */
  const rfr_hooks *hooks;
  int n_hooks;
} rfr_compile_options;
RFR_API rfr_compile_options rfr_compile_options_default(void);

/* Compiles n traces; the names are for messages. The traces may be destroyed afterwards. They belong to `ctx`, are
 * finished, and have an output or an op with an effect.
 * Errors: argument; those of the passes (autodiff.*, plan.over_budget, bind.no_kernel); memory.alloc; tune.stored, when
 * one of `choices` cannot be made here or is missing. */
RFR_API rfr_status rfr_compile(rfr_ctx *ctx, int n, const rfr_trace *const *traces, const char *const *names,
                               const rfr_compile_options *options, rfr_programs **out);
RFR_API void rfr_programs_destroy(rfr_programs *p);

/* The memory of an input of any role, by its name. Errors: program.name. */
RFR_API rfr_status rfr_programs_tensor(const rfr_programs *p, const char *name, rfr_tensor *out);
/* The memory of the i-th input, from 0. Errors: RFR_INVALID, past the end. */
RFR_API rfr_status rfr_programs_tensor_at(const rfr_programs *p, int i, rfr_tensor *out);
/* The memory of an output of one program, always dense. Before the program's first run its bytes are undefined (the
 * arena starts as a fixed pattern); after it they are valid until the next run of any of these programs. Errors:
 * program.name, also for an output that is a strided view (record rfr_copy of it). */
RFR_API rfr_status rfr_program_output(const rfr_programs *p, int program, const char *name, rfr_tensor *out);

/* The i-th choice of a compile with `tune`, from 0; borrowed. The first choices name the device and the library; the
 * others are valid only for these. The CPU has no choices. Errors: RFR_INVALID, past the end. */
RFR_API rfr_status rfr_programs_choice_at(const rfr_programs *p, int i, rfr_choice *out);

/* Copies x->bytes between host memory and a tensor of these programs, on any device, after all earlier launches. To
 * copy a part, change `data` and `bytes` of the rfr_tensor; its type stays. Errors: tensor, when the bytes are not
 * within one input or output of these programs, or the type differs; argument; nothing was copied then. */
RFR_API rfr_status rfr_programs_write(rfr_programs *p, const rfr_tensor *to, const void *from);
RFR_API rfr_status rfr_programs_read(rfr_programs *p, const rfr_tensor *from, void *to);

/* ---- watched values ---- */

/* Statistics of one value in one step. With several ranks, each has those of its own shard and microbatches. */
typedef struct rfr_watched {
  const char *name;   /* borrowed from the programs */
  int64_t elements;   /* of all microbatches */
  int64_t nans, infs; /* elements that are NaN, or infinite; the numbers below leave them out */
  double mean, rms;   /* 0 without elements */
  double largest;     /* magnitude */
  double smallest;    /* magnitude of those that are not 0; 0: there are none */
  double zeros;       /* share of the elements that are 0 */
} rfr_watched;
/* Name of the i-th watched value, 0 based: NULL past the end. Works with `plan_only` too. Borrowed. */
RFR_API const char *rfr_programs_watched_name(const rfr_programs *p, int i);
/* Statistics of the i-th watched value in step number `step`, 0 for the first one (the attempted count of the step
 * block). Reads host memory; never waits. Errors: argument, past the end; program.order, when that step has not
 * ended yet or a later one has replaced it. */
RFR_API rfr_status rfr_programs_watched(const rfr_programs *p, int64_t step, int i, rfr_watched *out);

/* ---- random numbers ---- */

/* State of a stream of random numbers. Drawing does not change it: numbers are a function of the seed, the stream's
 * name, the step, and the op's site (rfr_dropout). */
typedef struct rfr_rng {
  uint64_t seed;
  int64_t step;
} rfr_rng;
/* The state of a stream by its name (rfr_rng_stream); NULL: the default one, in the step block. Waits for earlier
 * launches. Ranks with the same state draw the same numbers; give each rank a fork for different ones. Errors:
 * program.name. */
RFR_API rfr_status rfr_programs_get_rng(rfr_programs *p, const char *stream, rfr_rng *out);
RFR_API rfr_status rfr_programs_set_rng(rfr_programs *p, const char *stream, const rfr_rng *rng);
/* A state at the same step, whose numbers are independent of those of `rng` and of its other forks. */
RFR_API rfr_rng rfr_rng_fork(rfr_rng rng, uint64_t number);

/* ---- running ---- */

/* Runs the ops of phase load, which depend only on frozen inputs and constants. Call it before the first run, and after
 * weights were written. */
RFR_API rfr_status rfr_programs_load(rfr_programs *p);
/* Runs a program kernel by kernel (eager), with its hooks. The first run or replay of a program with collectives
 * compares them with those of the other ranks. Errors then: dist.mismatch on all ranks, naming the first that differs;
 * dist.peer. Nothing has run. With `step_memory` all calls that run programs may return memory.in_use. With hooks:
 * graphs.hook, and the rest of the program has not run. */
RFR_API rfr_status rfr_program_run(rfr_programs *p, int program);
/* Captures the same calls as a graph; executes nothing. A program with hooks can be captured only if all of it is one
 * forward, so that they run before and after the capture; otherwise argument, and nothing was captured. With
 * collectives, all ranks capture, profile, run and replay the same programs in the same order; a capture or profile
 * that comes first compares the collectives like a first run, with the same errors. */
RFR_API rfr_status rfr_program_capture(rfr_programs *p, int program);
/* An input as the caller sees it; a replay compares it with the captured one. */
typedef struct rfr_binding {
  const char *name;
  rfr_type type;
  const void *data;
} rfr_binding;
/* Compares the bindings (n may be 0), then launches the captured graph. Errors: program.order before
 * rfr_program_capture; replay.signature, naming the first field that differs. Nothing has run then. */
RFR_API rfr_status rfr_program_replay(rfr_programs *p, int program, const rfr_binding *bindings, int n);
/* Waits until all launches are done. On the CPU they are done when their call returns. */
RFR_API rfr_status rfr_programs_wait(rfr_programs *p);
/* *idle = 1 when all launches are done; never waits. Errors: those of the launches. */
RFR_API rfr_status rfr_programs_poll(rfr_programs *p, int *idle);

/* One op of a profiled run. */
typedef struct rfr_op_time {
  int op;                /* rfr_program_op has its name, layer and phase */
  const char *kernel;    /* "oneDNN", the instruction set of a kernel of the library ("v4"), "registered" */
  double start, seconds; /* seconds from the beginning of the run to the op; duration of the op */
  double flops;          /* of GEMMs and attention, a multiply-add as two; 0 for memory-bound ops */
  double bytes;          /* each operand read once, each result written once */
  rfr_dtype dtype;       /* of its first floating-point operand, for a comparison of its FLOPs with a peak */
} rfr_op_time;
/* Runs a program as rfr_program_run does and times each op. Fills one entry per op that has a kernel, in order; *n gets
 * their number. With `times` NULL nothing runs. Errors: argument, if `max` is too small, the program was compiled with
 * `debug`, or it has hooks (then nothing has run); those of the kernels. */
RFR_API rfr_status rfr_program_profile(rfr_programs *p, int program, rfr_op_time *times, int max, int *n);

/* One buffer of the plan. `first` and `last` are op indices; persistent buffers are live from the first op to the
 * end. */
typedef struct rfr_plan_buffer {
  const char *name; /* of the input or value; else the op, for a result of phase load the weight that it is from */
  const char *kind; /* weight, state, input, output, activation, gradient, workspace, load */
  int64_t bytes, offset;
  int first, last;
} rfr_plan_buffer;
typedef struct rfr_plan_summary {
  int64_t planned_bytes; /* the arena: persistent + step-scoped, or all of the step memory */
  int64_t persistent_bytes;
  int64_t transient_planned_bytes;     /* step-scoped bytes of the largest program */
  int64_t transient_lower_bound_bytes; /* largest number of bytes live at one op of that program */
  int n_buffers;
  int64_t budget;         /* the compile option; 0: none */
  double compile_seconds; /* of this program, from the recorded trace to the plan, kernel selection included */
  int branch_ops;         /* ops that run on the side stream, concurrently with others; 0: none */
  int64_t branch_bytes;   /* bytes that the side stream adds to the step. With branch_ops 0: bytes that it would have
                             added, but they exceeded the budget or the device's memory */
} rfr_plan_summary;
RFR_API rfr_status rfr_program_plan(const rfr_programs *p, int program, rfr_plan_summary *out);
RFR_API rfr_status rfr_program_plan_buffer(const rfr_programs *p, int program, int i, rfr_plan_buffer *out);
/* An op; `first` and `last` of a buffer are indices of ops. Strings are borrowed, never NULL. */
typedef struct rfr_plan_op {
  const char *name, *scope;
  const char *reason; /* of the pass that recorded or changed it, or "" */
  rfr_phase phase;
  int microbatch;     /* -1: once per step */
  int recompute_of;   /* the op that this one recomputes, -1 */
  int64_t sent_bytes; /* of a collective: bytes that a rank sends, if they pass through a ring; otherwise 0 */
} rfr_plan_op;
/* Errors: argument, past the last op. */
RFR_API rfr_status rfr_program_op(const rfr_programs *p, int program, int i, rfr_plan_op *out);
/* The planned bytes that were written at least once. Compile fills the step-scoped part with a pattern; 64-byte lines
 * that still have it do not count, such as the unwritten tail of a workspace. The persistent part counts in full. Reads
 * the step-scoped part. -1: it could not be read, or there is none (plan_only). */
RFR_API int64_t rfr_programs_touched_bytes(const rfr_programs *p);

/* The planned bytes of a program's values that still have the fill pattern, in 64-byte lines: 0 after the program has
 * run. Workspaces do not count, because a kernel may leave the tail of one unwritten. A byte counts once for each value
 * that shares it. -1: it could not be read, or there is none (plan_only). */
RFR_API int64_t rfr_program_unwritten_bytes(const rfr_programs *p, int program);
/* Errors: debug.overrun when a byte of the guard after the arena was written: 256 bytes, on a GPU 2 MiB. */
RFR_API rfr_status rfr_programs_check(const rfr_programs *p);

/* Use of a device's memory, from its count of free bytes before and after each allocation; allocations of other
 * processes at that moment are included. All 0 on the CPU. */
typedef struct rfr_memory_use {
  int64_t libraries; /* handles, and allocations during kernel selection */
  int64_t arena;
  int64_t kernels; /* code and its static memory, loaded when programs first ran or were captured */
  int64_t graphs;
  int64_t taken;     /* all memory taken since the device was opened: the fields above and everything else */
  int64_t available; /* free bytes of the device now; 0: unknown */
} rfr_memory_use;
RFR_API rfr_status rfr_programs_memory_use(const rfr_programs *p, rfr_memory_use *out);

/* Planned bytes of all programs together, by kind. The persistent part is exact; the step-scoped part has the bytes
 * that are live at the peak of the program with the largest one. The fields up to `unused` sum to `total`. */
typedef struct rfr_memory {
  int64_t weights;   /* inputs of role trainable and frozen */
  int64_t optimizer; /* states that an optimizer op updates with a parameter: moments, master weights */
  int64_t states;    /* other states: step block, metrics, caches */
  int64_t inputs;    /* all other inputs, rings included */
  int64_t loaded;    /* results of phase load */
  int64_t activations, gradients, workspaces, outputs; /* live at the peak of the step */
  int64_t unused;                                      /* step-scoped bytes that are free at the peak, and those of
                                                          `step_memory` that only its other users need */
  int64_t total;                                       /* planned_bytes of rfr_plan_summary */
  int peak_program, peak_op;                           /* where the peak is */
} rfr_memory;
/* Works with `plan_only` too. Errors: argument (NULL), memory.alloc. */
RFR_API rfr_status rfr_programs_memory(const rfr_programs *p, rfr_memory *out);

/* The trace of a program after a pass ("record", "autodiff", "prune", "fuse", "recompute", "shard",
 * "lower"); NULL if it was not kept. Borrowed. */
RFR_API const rfr_trace *rfr_program_trace(const rfr_programs *p, int program, const char *pass);
/* The decisions of a pass, one line each with its reason. NULL for an unknown pass. Borrowed. */
RFR_API const char *rfr_program_report(const rfr_programs *p, int program, const char *pass);
/* Floating-point operations of one run, a multiply-add as two; the second call gives those that recomputation adds. */
RFR_API double rfr_program_flops(const rfr_programs *p, int program);
RFR_API double rfr_program_recomputed_flops(const rfr_programs *p, int program);

/* One recompute level: bytes of memory and the work that it costs. */
typedef struct rfr_frontier_point {
  int64_t planned_bytes; /* of the arena; a budget of this many bytes suffices */
  double extra_flops;    /* per run, compared with recomputing nothing, a multiply-add as two */
  double extra_bytes;    /* read and written by recomputed ops, with the gathers that only they need, per run */
  int recomputed;        /* recomputed ops */
} rfr_frontier_point;
/* The recompute frontier of this program, from which RFR_RECOMPUTE_AUTO chooses: from the largest arena to the smallest
 * budget that works. Fills at most `max` (2 or more) points; *n gets their number. It is slow, because it plans each
 * point. Errors: argument, if the traces were not kept (keep_traces). */
RFR_API rfr_status rfr_program_frontier(rfr_programs *p, int program, rfr_frontier_point *points, int max, int *n);

#ifdef __cplusplus
}
#endif
#endif
