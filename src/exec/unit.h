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
  bool shares;       /* other ranks access its memory (only programs: ranks compare before capture and run) */
  void *sequences;   /* RFI_SEQUENCE_BYTES per rank; NULL with one rank */
  rfi_storage store; /* the inputs of programs (a ring if ring ops access it); the named tensors of callables */
  rfi_layout layout;
  rfi_region workspaces; /* the region of the workspaces: RFI_REGION_SLOT if there is one slot, or RFI_REGION_SHARED */
  bool in_warmup;        /* updates go to scratch memory */
} rfi_executor;

typedef struct rfi_location { /* the storage of a value that owns storage */
  rfi_region region;
  int64_t offset; /* in the region; RFI_NAMED: the index; RFI_FIXED: the offset in scratch memory during warm-up */
  int64_t stride; /* bytes from one slot, or RFI_BLOCK, to the next; 0: all slots have the same storage */
  void *const *fixed;
  const struct rfi_exec_unit *unit; /* not NULL: an alias of value `owner` of that unit, at `offset` */
  rfr_value owner;
} rfi_location;

typedef struct rfi_instance { /* a unit in a slot */
  rfi_bound *bound;
  rfi_graph *graph[RFI_PARTS]; /* NULL: not captured */
  int block;                   /* the block of the slot */
  int32_t microbatch;          /* the value in the slot's memory, 0 at first; -1: unknown */
  uint8_t visited;             /* a bit per part: a walk of warm-up or capture has visited it */
  bool agreed[RFI_PARTS];      /* set for the first slot: all ranks have the same collectives in the part */
} rfi_instance;

typedef struct rfi_exec_unit {
  const char *name;
  int index; /* in its set */
  rfi_pipeline pipeline;
  rfr_trace *trace;         /* after lowering */
  int start[RFI_PARTS + 1]; /* first op of each part */
  rfi_bound *bound;         /* every op with a kernel, in order */
  int n_bound, first[RFI_PARTS + 1];
  int64_t *workspace_at;          /* per bound op */
  int recomputed;                 /* bound ops that are recomputed */
  double flops, recomputed_flops; /* flops includes recomputed_flops */
  rfi_location *place;            /* per value; set for owners of storage */
  rfi_instance *instance;
  int slots;
} rfi_exec_unit;

static inline bool rfi_has(const rfi_exec_unit *u, rfi_part part) { return u->first[part + 1] > u->first[part]; }
/* The stream on which work is enqueued; NULL: calls are synchronous. */
static inline void *rfi_executor_stream(const rfi_executor *m) {
  return m->backend->stream ? m->backend->stream(m->device) : NULL;
}
static inline rfr_status rfi_executor_fill(const rfi_executor *m, void *to, unsigned char byte, int64_t bytes) {
  return bytes > 0 ? m->backend->fill(m->device, to, byte, (size_t)bytes) : RFR_OK;
}
static inline int64_t rfi_bytes_into(const rfi_value *x) { return x->offset * rfr_dtype_bits(x->type.dtype) / 8; }

/* Opens the device of a context, and gives it the communicator for its ops if it can use it. Sets `ctx` first. `step`:
 * the memory of the regions from RFI_REGION_SLOT on, or NULL. */
rfr_status rfi_executor_open(rfi_executor *m, rfr_ctx *ctx, rfr_comm *comm, bool shares, rfr_step_memory *step);
void rfi_executor_close(rfi_executor *m); /* also frees the memory; valid after a failed open */
/* The pass options that depend on the backend. */
rfi_pass_options rfi_executor_pass_options(rfi_executor *m);

/* Sets the parts of a program: LOAD, then F. */
void rfi_unit_set_step(rfi_exec_unit *u);
/* select.c. Selects a kernel for every op except views, with its workspace and placeholder addresses; allocates in
 * `memory`. The report, unless NULL, gets a line for each grouped GEMM. */
rfr_status rfi_unit_select(const rfi_executor *m, rfi_exec_unit *u, rfi_arena *memory, rfi_report *report);
/* Creates an instance per slot, still without addresses. */
rfr_status rfi_unit_instantiate(const rfi_executor *m, rfi_exec_unit *u, int slots);

/* ---- address.c ---- */
/* Allocates the locations, in `memory`: named tensors for inputs, persistent memory for results of the first n ops; all
 * other values are not placed. */
rfr_status rfi_unit_place(rfi_executor *m, rfi_exec_unit *u, rfi_arena *memory, int n);
/* The address of a named tensor; during warm-up, that in scratch memory if the tensor is written. */
unsigned char *rfi_named_data(const rfi_executor *m, const rfi_named *x);
/* The address of a value in a slot. */
unsigned char *rfi_unit_address(const rfi_executor *m, const rfi_exec_unit *u, int slot, rfr_value v);
/* Writes addresses into the kernels of all slots. */
void rfi_unit_set_addresses(const rfi_executor *m, const rfi_exec_unit *u);

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
