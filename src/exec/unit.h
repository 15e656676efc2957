/* SPDX-License-Identifier: Apache-2.0
 *
 * A unit is a trace with kernels: a program, or a callable. Its ops are in the order of their parts; programs have LOAD
 * and F, which is the step. Each slot has an instance of the unit: its kernels with the slot's addresses, and a graph
 * per part.
 */
#ifndef RFI_UNIT_H
#define RFI_UNIT_H

#include "dist/comm.h"
#include "exec/storage.h"
#include "pass/pass.h"

/* The device and memory of a set of programs, or of a set of callables. */
typedef struct rfi_executor {
  rfr_ctx *ctx;
  rfi_arena *strings; /* allocates for bound ops */
  const rfi_backend *backend;
  rfi_device *device;
  rfr_comm *comm;    /* for collective ops, or NULL */
  bool shares;       /* other ranks access its memory: programs, whose ranks agree before capture and run */
  void *sequences;   /* RFI_SEQUENCE_BYTES per rank; NULL with one rank */
  rfi_storage store; /* the inputs of programs (a ring if ring ops access it); the named tensors of callables */
  rfi_layout layout;
} rfi_executor;

typedef struct rfi_instance { /* a unit in a slot */
  rfi_bound *bound;
  rfi_graph *graph[RFI_PARTS]; /* NULL: not captured */
  int32_t microbatch;          /* the value in the slot's memory, 0 at first; -1: unknown */
  bool agreed[RFI_PARTS];      /* set for the first slot: all ranks have the same collectives in the part */
} rfi_instance;

typedef struct rfi_exec_unit {
  const char *name;
  rfi_pipeline pipeline;
  rfr_trace *trace;         /* after lowering */
  int start[RFI_PARTS + 1]; /* first op of each part */
  rfi_bound *bound;         /* every op with a kernel, in order */
  int n_bound, first[RFI_PARTS + 1];
  int64_t *workspace_at; /* per bound op */
  rfi_instance *instance;
  int slots;
} rfi_exec_unit;

static inline bool rfi_has(const rfi_exec_unit *u, rfi_part part) { return u->first[part + 1] > u->first[part]; }
static inline int64_t rfi_bytes_into(const rfi_value *x) { return x->offset * rfr_dtype_bits(x->type.dtype) / 8; }

/* Opens the device of a context, and gives it the communicator for its ops if it can use it. Sets `ctx` first. `step`:
 * the memory of the regions from RFI_REGION_SLOT on, or NULL. */
rfr_status rfi_executor_open(rfi_executor *m, rfr_ctx *ctx, rfr_comm *comm, bool shares, rfr_step_memory *step);
void rfi_executor_close(rfi_executor *m); /* also frees the memory; valid after a failed open */
/* The pass options that depend on the backend. */
rfi_pass_options rfi_executor_pass_options(rfi_executor *m);

/* Sets the parts of a program: LOAD, then F. */
void rfi_unit_set_step(rfi_exec_unit *u);
/* Selects a kernel for every op, with workspaces and placeholder addresses. */
rfr_status rfi_unit_select(const rfi_executor *m, rfi_exec_unit *u);
/* Creates an instance per slot, still without addresses. */
rfr_status rfi_unit_instantiate(const rfi_executor *m, rfi_exec_unit *u, int slots);
/* Writes addresses into the kernels of a slot; `address` returns the address of a value that owns storage. */
void rfi_unit_set_addresses(rfi_exec_unit *u, int slot, unsigned char *(*address)(const void *user, rfr_value owner),
                            const void *user, unsigned char *workspaces);
/* Runs bound ops of a slot eagerly. Errors name the op. */
rfr_status rfi_unit_run_ops(const rfi_executor *m, const rfi_exec_unit *u, int slot, int from, int end);
/* Runs a part by its graph, or eagerly if `eager`. `from`: the sources of the graph's copies. Errors name the op. */
rfr_status rfi_unit_run(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfi_part part, bool eager,
                        const void **from);
/* sequence.c. Compares the collectives of a part over all ranks, which call this together; the first run and
 * the capture of a program call it too.
 * A second call, or a part without collectives: no effect. Errors: dist.mismatch on all ranks, dist.peer. */
enum { RFI_SEQUENCE_BYTES = 1008 };
rfr_status rfi_unit_agree(const rfi_executor *m, const rfi_exec_unit *u, rfi_part part);
/* Captures a part, preceded by n copies into the slot. */
rfr_status rfi_unit_capture(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfi_part part,
                            const rfi_copy *copies, int n, rfi_graph **out);
/* The trace after a pass; NULL: the pass does not exist. */
const rfi_stage *rfi_unit_stage(const rfi_exec_unit *u, const char *pass);
const char *rfi_stage_report(const rfi_stage *s); /* accepts NULL */
void rfi_unit_deinit(const rfi_executor *m, rfi_exec_unit *u);

#endif
