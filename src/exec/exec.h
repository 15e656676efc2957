/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of compiled programs. Inputs of all programs and results of phase load are persistent. All programs share
 * the bytes that are needed only during a step (layout.h); with step memory, other executors share them too
 * (step_memory.h).
 *
 * compile.c   options, passes, plans
 * layout.c    regions of memory, the budget, allocation
 * step_memory.c  memory for the step that others use too
 * storage.c   inputs, by name
 * unit.c      bound ops, arguments, graphs; run, capture and launch
 * address.c   locations and addresses of values
 * sequence.c  the collectives of a unit, compared between the ranks
 * select.c    a kernel for every op, and its workspace
 * run.c       run, capture, replay, profile, copies to and from the host
 * debug.c     the checked runner
 * hook_lists.c    lists of hooks, of programs and of callables
 * program_hooks.c where hooks of programs run
 * tune.c      choices made by measuring
 * watched.c   statistics of watched values
 * program_info.c  queries of compiled programs
 */
#ifndef RFI_EXEC_H
#define RFI_EXEC_H

#include "exec/hook_lists.h"
#include "exec/unit.h"
#include "pass/plan.h"
#include "pass/watch_values.h"
#include "refrain/program.h"

enum { RFI_GUARD = 256, RFI_PATTERN = 0xA5, RFI_POISON = 0xFF, RFI_WINDOW = 1 << 20 };

typedef struct rfi_hook_span { /* the forward or the backward of one microbatch, enclosed by hooks */
  rfr_hook_point point;        /* the point of its pre hooks */
  int microbatch;              /* -1: the program has none */
  int first, end;              /* bound ops */
} rfi_hook_span;

typedef struct rfi_program {
  rfi_exec_unit u;
  int64_t *workspace; /* per op: bytes of its kernel's workspace */
  rfi_plan plan;
  int n_side_ops;       /* ops on the side stream */
  int64_t branch_bytes; /* bytes that the side stream adds to the plan */
  double compile_seconds;
  rfi_hook_span *span; /* in execution order; NULL without hooks */
  int n_spans;
  rfr_tensor *event_tensors; /* capacity for the tensors of one hook event */
} rfi_program;

struct rfr_programs {
  rfi_executor m;
  rfr_compile_options options;
  rfi_program *program;
  int n;
  rfr_hooks *hooks;  /* per program; NULL: none */
  bool in_hooked;    /* a program with hooks is running or being captured */
  bool attached;     /* addresses are set */
  rfi_watch watched; /* n is 0 if nothing is watched. `patterns` are valid during the compile only */
  int watched_program;
  rfr_choice *choice; /* choices made by tuning */
  int n_choices, cap_choices;
  rfi_range *watch;      /* debug: ranges that must contain one byte value; host and device access them */
  unsigned char *window; /* debug on a GPU: RFI_WINDOW bytes through which the host reads results */
};

/* The i-th program, for public calls: an error without programs or past the last. */
rfr_status rfi_program_get(const rfr_programs *p, int i, rfi_program **out);

/* Check for calls that need the programs' memory: an error without programs, or after a compile with plan_only. */
rfr_status rfi_check_allocated(const rfr_programs *p, const char *call);
/* The same check; also returns the i-th program. */
rfr_status rfi_program_get_allocated(const rfr_programs *p, int i, const char *call, rfi_program **out);

/* The GPU stream on which runs and copies are enqueued; NULL: calls are synchronous. */
void *rfi_programs_stream(const rfr_programs *p);

/* ---- compile.c ---- */
/* Sets the addresses; must precede the first run or capture. */
rfr_status rfi_programs_attach(rfr_programs *p);

/* The recompute frontier of a program whose traces are kept, and its levels. */
rfr_status rfi_program_frontier(rfr_programs *p, const rfi_program *g, rfi_frontier **out);
rfi_levels rfi_frontier_levels(rfi_frontier *l);

/* ---- program_info.c ---- */
/* The k-th output of a program; false if it is a strided view, which has no dense tensor. */
bool rfi_program_output_at(const rfr_programs *p, int program, int k, rfr_tensor *out);

/* ---- select.c ---- */
/* The workspace of each op's kernel, bytes[n_ops], as rfi_pass_options requires. */
rfr_status rfi_select_workspaces(void *executor, const rfr_trace *t, int64_t *bytes);

/* ---- run.c ---- */
/* Compares a binding with the captured type and, unless `at` is NULL, with the captured address. Errors:
 * replay.signature, naming the first field that differs. */
rfr_status rfi_check_captured(const char *name, const rfr_type *type, const void *at, const rfr_binding *now);

/* rfi_unit_agree for the step of each program; all ranks call it together. */
rfr_status rfi_programs_agree(rfr_programs *p);

/* Host memory from which rfr_programs_write copies fast: pinned if the device is a GPU. Free it with unstage before the
 * programs are destroyed. */
rfr_status rfi_programs_stage(rfr_programs *p, size_t bytes, void **out);
void rfi_programs_unstage(rfr_programs *p, void *memory); /* accepts NULL */

/* ---- program_hooks.c ---- */
bool rfi_program_has_hooks(const rfr_programs *p, const rfi_program *g);
rfr_status rfi_programs_copy_hooks(rfr_programs *p, const rfr_hooks *from); /* accepts NULL */
/* Finds the spans between hooks, once all plans are made. Errors: argument, for hooks that would never run. */
rfr_status rfi_program_place_hooks(rfr_programs *p, rfi_program *g);
/* Runs the step eagerly, and captures it. Both call the hooks. */
rfr_status rfi_program_run_hooked(rfr_programs *p, rfi_program *g);
rfr_status rfi_program_capture_hooked(rfr_programs *p, rfi_program *g);

/* ---- tune.c ---- */
/* Tunes the bound ops: applies the stored choices of the options, or measures. */
rfr_status rfi_tune(rfr_programs *p);

/* ---- debug.c ---- */
/* Fills guards and dead buffers before the first op of a part. */
rfr_status rfi_debug_begin(rfr_programs *p, const rfi_program *program);
/* Runs bound ops with a check after each: finite results, guards, poison. */
rfr_status rfi_debug_run(rfr_programs *p, rfi_program *program, int from, int end);
/* Prepends the name and the layer of op `op`, of a program or callable, to the current error. Does nothing for
 * RFR_OK. */
rfr_status rfi_name_op(rfr_status s, const rfr_trace *t, const char *name, int op);
/* Lays out the values without sharing, each followed by a guard; all workspaces share one range at the start. Buffers
 * of the plan shrink to their exact bytes. Returns the bytes needed. */
int64_t rfi_debug_layout(rfi_program *program);
/* Number of memory ranges that are checked for a plan of n buffers. */
int rfi_debug_ranges(int n);

#endif
