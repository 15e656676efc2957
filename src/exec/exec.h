/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside compiled programs. The arena is one allocation:
 *
 *   [ inputs of all programs | results of phase load | step-scoped, shared by all | guard ]
 *
 * compile.c fills it in, bind.c picks kernels and writes addresses, run.c runs, captures
 * and replays, debug.c is the careful runner.
 */
#ifndef RFI_EXEC_H
#define RFI_EXEC_H

#include "ops/call.h"
#include "pass/pass.h"
#include "pass/plan.h"
#include "refrain/program.h"

enum { RFI_GUARD = 256, RFI_PATTERN = 0xA5, RFI_POISON = 0xFF };

typedef struct rfi_slot { /* a program input: memory shared by name */
  rfr_tensor tensor;
  int64_t offset;
} rfi_slot;

typedef struct rfi_bound { /* one op, ready to run */
  int op;                  /* in the lowered trace */
  rfi_kernel_fn run;
  const char *kernel; /* what `run` is, for people: rfr_op_time */
  rfi_call call;
  int64_t workspace;
} rfi_bound;

/* What a replay is checked against. */
typedef struct rfi_graph {
  bool captured;
  rfi_bound **node;
  int n;
} rfi_graph;

typedef struct rfi_program {
  const char *name;
  rfi_pipeline pipeline;
  const rfr_trace *trace; /* the lowered one */
  rfi_bound *bound;       /* every op with a kernel, in order */
  int n_bound, n_load;    /* the first n_load of them are of phase load */
  rfi_plan plan;
  int64_t *offset; /* per value: offset of its storage in the arena, -1 if it has none */
  rfi_graph graph;
  double flops;
} rfi_program;

struct rfi_cpu_library;

struct rfr_programs {
  rfr_ctx *ctx;
  rfi_arena *strings;
  rfr_compile_options options;
  struct rfi_cpu_library *library;
  rfi_program *program;
  int n;
  rfi_slot *slot;
  rfi_names names; /* of the slots */
  int n_slots, cap_slots;
  unsigned char *arena;
  int64_t persistent_bytes, transient_bytes, arena_bytes; /* arena_bytes: without the guard behind */
};

/* ---- bind.c ---- */
/* Picks a kernel for every op; fills bound[] with shapes, workspace sizes and fake addresses. */
rfr_status rfi_bind_kernels(rfr_programs *p, rfi_program *program);
/* Writes the addresses that the plan gives. */
void rfi_bind_addresses(rfr_programs *p, rfi_program *program);
/* Workspace of each op's kernel, bytes[n_ops]; for passes, as rfi_pass_options wants it. */
rfr_status rfi_bind_workspaces(void *programs, const rfr_trace *t, int64_t *bytes);

/* ---- debug.c ---- */
/* Runs bound ops [first, last) with a check after each: finite results, guards, poison. */
rfr_status rfi_debug_run(rfr_programs *p, rfi_program *program, int first, int last);
/* Offsets that never share a byte, a guard between any two: bytes needed. */
int64_t rfi_debug_layout(rfi_plan *plan);

#endif
