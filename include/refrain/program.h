/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled programs: traces, rewritten by the passes, planned into one arena, bound
 * to kernels, run eagerly or captured and replayed.
 *
 * Programs compiled together share their inputs by name (weights, states, rings) and
 * one arena: the peak is that of the largest, not the sum. Nothing is allocated after
 * rfr_compile. Calls on one rfr_programs are for one thread at a time.
 *
 *   rfr_programs *p;
 *   rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, (const char *const[]){"train"}, NULL, &p);
 *   rfr_tensor w;
 *   rfr_programs_tensor(p, "w", &w);      // fill w.data
 *   rfr_programs_load(p);                 // once, after weights were written
 *   rfr_program_capture(p, 0);
 *   rfr_program_replay(p, 0, NULL, 0);    // as often as wanted
 */
#ifndef REFRAIN_PROGRAM_H
#define REFRAIN_PROGRAM_H

#include "refrain/dist.h"
#include "refrain/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_programs rfr_programs;

/* The passes in their order; "record" names the trace before the first. */
#define RFR_PASSES(X) X(autodiff) X(prune) X(fuse) X(recompute) X(lower)

/* What becomes of values that the backward reads and that rfr_set_recompute left at auto. */
typedef enum rfr_recompute {
  RFR_RECOMPUTE_KEEP, /* all are kept */
  RFR_RECOMPUTE_ALL,  /* whatever lowers the peak is made again */
  RFR_RECOMPUTE_AUTO, /* as much is made again, cheapest first, as the budget demands */
} rfr_recompute;

/* What a tuned compile decided by measuring: about what, as shapes and types, and how. */
typedef struct rfr_choice {
  const char *name, *value;
} rfr_choice;

typedef struct rfr_compile_options {
  size_t size;
  int64_t budget;          /* bytes of the whole arena; 0: no limit. More is an error naming the peak. A side branch
                          takes what is left of them; what debugging needs beyond them does not count */
  int fuse;                /* 1: the fuse pass runs (default) */
  int prune;               /* 1: CSE, DCE and hoisting run (default); 0: what autodiff made */
  int64_t loss_chunk;      /* rows of logits at a time in a fused LM head; 0: 1024 on the CPU, 4096 on a GPU */
  int debug;               /* 1: every value has guarded bytes of its own, what is not live is
                          poisoned, every result is checked for NaN */
  int keep_traces;         /* 1: rfr_programs_trace can give the trace after each pass */
  rfr_recompute recompute; /* default: keep. Never changes a bit of any result */
  int tune;                /* 1: a clock chooses among a GPU library's algorithms for each product, of those whose bits
                           repeat; 0: the library's first one (default) */
  const rfr_choice *choices; /* with tune: make these, of an earlier compile, and measure nothing. NULL: measure */
  int n_choices;
  rfr_comm *comm; /* of collective ops, this rank's end; outlives the programs. NULL: there are none, or of one rank */
  int plan_only;  /* 1: plan, but allocate no memory for the programs. All queries of the plan work; data pointers are
                     NULL; calls that run, read or write fail with program.plan_only. A plan over `budget` is not an
                     error: compare planned_bytes. `tune` measures nothing */
} rfr_compile_options;
RFR_API rfr_compile_options rfr_compile_options_default(void);

/* Compiles n traces; the names are for messages. The traces may be destroyed after.
 * Errors: those of the passes (autodiff.*, plan.over_budget, bind.no_kernel); tune.stored, when a choice that was
 * given cannot be made here, or one is missing. */
RFR_API rfr_status rfr_compile(rfr_ctx *ctx, int n, const rfr_trace *const *traces, const char *const *names,
                               const rfr_compile_options *options, rfr_programs **out);
RFR_API void rfr_programs_destroy(rfr_programs *p);

/* The memory of an input (any role) by name; of the i-th, 0 based: RFR_INVALID past the end. */
RFR_API rfr_status rfr_programs_tensor(const rfr_programs *p, const char *name, rfr_tensor *out);
RFR_API rfr_status rfr_programs_tensor_at(const rfr_programs *p, int i, rfr_tensor *out);
/* The memory of an output of one program; dense: of a strided view it is a copy. */
RFR_API rfr_status rfr_program_output(const rfr_programs *p, int program, const char *name, rfr_tensor *out);

/* The i-th choice of a compile with `tune`, 0 based: RFR_INVALID past the end. Device and library come first, since
 * the others hold for these alone. There are none on the CPU: its products have one algorithm. Borrowed. */
RFR_API rfr_status rfr_programs_choice_at(const rfr_programs *p, int i, rfr_choice *out);

/* Copies a tensor of these programs from or to host memory, x->bytes of it, wherever it lies; waits
 * for all that was launched before. A part: a tensor whose data and bytes say which. */
RFR_API rfr_status rfr_programs_write(rfr_programs *p, const rfr_tensor *to, const void *from);
RFR_API rfr_status rfr_programs_read(rfr_programs *p, const rfr_tensor *from, void *to);

/* ---- random numbers ---- */

/* Where a stream of random numbers is. Nothing is drawn from it and so moves it: what is drawn is a function of the
 * seed, the stream's name, the step, and where it is drawn (rfr_dropout). */
typedef struct rfr_rng {
  uint64_t seed;
  int64_t step;
} rfr_rng;
/* The state of a stream by its name (rfr_rng_stream); NULL: the default one, in the step block. Waits for what was
 * launched. Ranks with the same state draw the same; for others each takes a fork. Errors: program.name. */
RFR_API rfr_status rfr_programs_get_rng(rfr_programs *p, const char *stream, rfr_rng *out);
RFR_API rfr_status rfr_programs_set_rng(rfr_programs *p, const char *stream, const rfr_rng *rng);
/* A state at the same step, whose numbers have nothing to do with those of `rng` or of its fork of another number. */
RFR_API rfr_rng rfr_rng_fork(rfr_rng rng, uint64_t number);

/* ---- running ---- */

/* Runs the ops of phase load, which depend on frozen inputs alone. Call it after
 * weights were written and before the first run. */
RFR_API rfr_status rfr_programs_load(rfr_programs *p);
/* Runs a program kernel by kernel (eager). */
RFR_API rfr_status rfr_program_run(rfr_programs *p, int program);
/* Records the same calls as a graph; executes nothing. */
RFR_API rfr_status rfr_program_capture(rfr_programs *p, int program);
/* What the caller believes an input to be; compared with what was captured. */
typedef struct rfr_binding {
  const char *name;
  rfr_type type;
  const void *data;
} rfr_binding;
/* Compares the bindings (n may be 0), then launches. Errors: replay.signature, naming
 * the first field that differs, and nothing has run. */
RFR_API rfr_status rfr_program_replay(rfr_programs *p, int program, const rfr_binding *bindings, int n);
/* Waits until all that was launched is done. On the CPU it is when the call returns. */
RFR_API rfr_status rfr_programs_wait(rfr_programs *p);
/* *idle = 1 when all that was launched is done; never waits. Errors: those of what was launched. */
RFR_API rfr_status rfr_programs_poll(rfr_programs *p, int *idle);

/* One op of a profiled run. */
typedef struct rfr_op_time {
  int op;                /* rfr_program_op has its name, layer and phase */
  const char *kernel;    /* what ran it: "oneDNN", the instruction set of an own kernel ("v4"), "registered" */
  double start, seconds; /* since the run began; of the op */
  double flops;          /* of products and attention, a multiply-add as two; 0 for what memory bounds */
  double bytes;          /* each operand read once, each result written once */
  rfr_dtype dtype;       /* of its first floating-point operand: what its FLOPs are to be compared with */
} rfr_op_time;
/* Runs a program as rfr_program_run does, the same calls with a clock around each, and fills one
 * entry per op that has a kernel, in order. *n gets their number; times NULL: that alone, and
 * nothing runs. Errors: argument, when `max` is less than that or the program was compiled for
 * debugging (nothing has run), and those of the kernels. */
RFR_API rfr_status rfr_program_profile(rfr_programs *p, int program, rfr_op_time *times, int max, int *n);

/* One buffer of the plan. `first` and `last` are op indices; persistent ones live always. */
typedef struct rfr_plan_buffer {
  const char *name; /* value, or "workspace of OP" */
  const char *kind; /* weight, state, input, output, activation, gradient, workspace, load */
  int64_t bytes, offset;
  int first, last;
} rfr_plan_buffer;
typedef struct rfr_plan_summary {
  int64_t planned_bytes; /* the arena: persistent + step-scoped */
  int64_t persistent_bytes;
  int64_t transient_planned_bytes;     /* step-scoped, largest program */
  int64_t transient_lower_bound_bytes; /* most bytes live at once in that program */
  int n_buffers;
  int64_t budget;         /* the compile option; 0: none */
  double compile_seconds; /* that this program took from the recorded trace to the plan, its kernels included */
  int branch_ops;         /* run on a side branch, beside others; 0: all run one after the other */
  int64_t branch_bytes;   /* what the step has more of for it; with branch_ops 0: would have, but that was over the
                             budget, or more than the device had */
} rfr_plan_summary;
RFR_API rfr_status rfr_program_plan(const rfr_programs *p, int program, rfr_plan_summary *out);
RFR_API rfr_status rfr_program_plan_buffer(const rfr_programs *p, int program, int i, rfr_plan_buffer *out);
/* The op that a buffer's `first` and `last` count. Strings are borrowed, never NULL. */
typedef struct rfr_plan_op {
  const char *name, *scope;
  const char *reason; /* of the pass that made or changed it, or "" */
  rfr_phase phase;
  int microbatch;   /* -1: of the whole step */
  int recompute_of; /* the op that this one repeats, -1 */
} rfr_plan_op;
/* Errors: argument, past the last op. */
RFR_API rfr_status rfr_program_op(const rfr_programs *p, int program, int i, rfr_plan_op *out);
/* Bytes of the arena that were ever written since compile (the arena starts as a known
 * pattern). Walks the whole arena. */
RFR_API int64_t rfr_programs_touched_bytes(const rfr_programs *p);

/* Bytes that the plan gives to values of a program, workspaces left out, and that nothing has written since compile:
 * 0 once the program has run. A byte counts for each value that has it. -1: it could not be read. */
RFR_API int64_t rfr_program_unwritten_bytes(const rfr_programs *p, int program);
/* Errors: debug.overrun if a byte behind the arena was ever written: the next 256, on a GPU 2 MiB. */
RFR_API rfr_status rfr_programs_check(const rfr_programs *p);

/* Where a device's memory went, by its own count of free bytes before and after each was made; what others take on
 * the device at that moment counts with it. All 0 on the CPU. */
typedef struct rfr_memory_use {
  int64_t libraries; /* handles, and what choosing kernels made */
  int64_t arena;
  int64_t kernels; /* code, and what it needs, loaded when programs first ran or were captured */
  int64_t graphs;
  int64_t taken; /* from when the device was opened until now: these and what no row has */
} rfr_memory_use;
RFR_API rfr_status rfr_programs_memory_use(const rfr_programs *p, rfr_memory_use *out);

/* Planned bytes of all programs together, by kind. The persistent part is counted exactly; the step-scoped part is what
 * the program with the largest one has live at its peak. The fields up to `unused` sum to `total`. */
typedef struct rfr_memory {
  int64_t weights;   /* inputs of role trainable and frozen */
  int64_t optimizer; /* states that an optimizer op updates with a parameter: moments, master weights */
  int64_t states;    /* other states: step block, metrics, caches */
  int64_t inputs;    /* all other inputs, rings included */
  int64_t loaded;    /* results of phase load */
  int64_t activations, gradients, workspaces, outputs; /* live at the peak of the step */
  int64_t unused;                                      /* step-scoped bytes that hold nothing at the peak */
  int64_t total;                                       /* planned_bytes of rfr_plan_summary */
  int peak_program, peak_op;                           /* where the peak is */
} rfr_memory;
/* Works with `plan_only` too. Errors: argument (NULL), memory.alloc. */
RFR_API rfr_status rfr_programs_memory(const rfr_programs *p, rfr_memory *out);

/* The trace of a program after a pass ("record", "autodiff", "prune", "fuse", "recompute",
 * "lower"); NULL if it was not kept. Borrowed. */
RFR_API const rfr_trace *rfr_program_trace(const rfr_programs *p, int program, const char *pass);
/* What a pass decided, one line per decision with its reason. NULL for an unknown pass. */
RFR_API const char *rfr_program_report(const rfr_programs *p, int program, const char *pass);
/* Floating-point operations of one run, counting a multiply-add as two; the second: those of
 * them that only recompute adds. */
RFR_API double rfr_program_flops(const rfr_programs *p, int program);
RFR_API double rfr_program_recomputed_flops(const rfr_programs *p, int program);

/* One trade of memory against work. */
typedef struct rfr_frontier_point {
  int64_t planned_bytes; /* the arena; a budget of so many bytes is enough */
  double extra_flops;    /* per run, against recomputing nothing, a multiply-add as two */
  double extra_bytes;    /* read and written by what is recomputed, per run */
  int recomputed;        /* ops made again */
} rfr_frontier_point;
/* The trades that RFR_RECOMPUTE_AUTO chooses from for this program, largest arena first;
 * the last is the smallest budget that works. Fills at most `max` (2 or more) points, *n
 * gets their number. Plans each one: for tools, not for every step. Errors: argument, when
 * the traces were not kept. */
RFR_API rfr_status rfr_program_frontier(rfr_programs *p, int program, rfr_frontier_point *points, int max, int *n);

#ifdef __cplusplus
}
#endif
#endif
