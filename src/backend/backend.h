/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends execute programs. A backend is one table of entry points: the CPU's is linked in,
 * a GPU's is in a module that is loaded on first use. Trace, passes, plan, programs and runs
 * are the same for all backends.
 *
 * Bound ops are enqueued in order on the device's stream, or on the caller's stream; ops of
 * the side stream (pass/branch.h) may run concurrently with later ones. On the CPU a call
 * returns when it is done, on a GPU when it is enqueued; `wait` and `copy` wait. A graph is
 * the same calls, captured once and launched as one, after copies whose sources are given
 * at each launch.
 *
 * There are two kinds of memory. The arena belongs to the device; step memory is a part of it
 * that any device of the context may free. A ring is written and read by the host and by the
 * device concurrently, at one address; programs access it by ring ops alone.
 */
#ifndef RFI_BACKEND_H
#define RFI_BACKEND_H

#include "backend/range.h"
#include "base/arena.h"
#include "dist/comm.h"
#include "ops/call.h"
#include "refrain/program.h"
#include "refrain/train.h"

typedef struct rfi_device rfi_device; /* an open device; each backend defines its own */
typedef struct rfi_graph rfi_graph;

typedef struct rfi_bound { /* one op, ready to run */
  int op;                  /* index in the lowered trace */
  rfi_kernel_fn run;
  const char *kernel;      /* name of `run` for reports: rfr_op_time */
  const char *why;         /* why there is no kernel, or no faster one; NULL: no known reason */
  const rfi_opr *recorded; /* the op, for messages and profilers */
  rfi_call call;
  int64_t workspace;
  int side;   /* number of the op on the side stream, from 1 on; 0: it runs on the main stream */
  int waits;  /* number of the last side-stream op that must run before it; 0: none */
  bool forks; /* later side-stream ops run after all ops enqueued before this one */
} rfi_bound;

typedef struct rfi_copy { /* a copy that a graph makes before its ops */
  void *to;               /* in the arena */
  size_t n;               /* > 0 */
} rfi_copy;

enum { RFI_CHOICE = 256 }; /* length of the text of a choice */

typedef enum rfi_memory { RFI_MEMORY_ARENA, RFI_MEMORY_STEP, RFI_MEMORY_RING } rfi_memory;

typedef struct rfi_backend {
  const char *name;                           /* "the CPU", "CUDA": in messages */
  bool host;                                  /* the host may access the arena, and calls are synchronous */
  bool branches;                              /* it has a side stream */
  int guard;                                  /* bytes after the arena that no op may access */
  bool lora;                                  /* has kernels for lora_matmul */
  bool gelu_bwd;                              /* its GEMMs apply the gradient of GELU */
  bool dx_sum;                                /* layernorm_bwd sums the columns of dx faster than `sum` */
  int loss_chunk;                             /* rows of logits per chunk of an LM head, enough for efficient GEMMs */
  int64_t (*loss_rows)(int64_t T, int64_t C); /* the chunk for T rows of C columns; NULL: loss_chunk */
  rfr_status (*open)(rfr_ctx *ctx, rfi_device **out);
  /* Sets the communicator of collectives; later waits for the device also check that the other ranks are alive. Errors:
   * dist.communicator, if it belongs to another device. `shares`: `share` is called before collectives are captured or
   * run. NULL: collectives are synchronous. */
  rfr_status (*join)(rfi_device *d, rfr_comm *comm, bool shares);
  /* Lets other ranks access the operands of collectives. All ranks call it together after they have compared the
   * collectives, and before the ops run for the first time. Errors: dist.mismatch, dist.peer. NULL: not needed. */
  rfr_status (*share)(rfi_device *d, const rfi_bound *bound, int n);
  void (*close)(rfi_device *d); /* accepts NULL */

  rfr_status (*alloc)(rfi_device *d, rfi_memory kind, size_t bytes, void **out);
  void (*free)(rfi_device *d, rfi_memory kind, void *memory);
  rfr_status (*fill)(rfi_device *d, void *to, unsigned char byte, size_t n);
  /* source and destination: host or device; synchronous */
  rfr_status (*copy)(rfi_device *d, void *to, const void *from, size_t n);
  rfr_status (*move)(rfi_device *d, void *to, const void *from, size_t n); /* the same, enqueued on the stream */
  bool (*reaches)(const rfi_device *d, const void *memory);                /* whether kernels can access the memory */
  /* marks the ranges that have changed; the list lies in a ring; synchronous */
  rfr_status (*inspect)(rfi_device *d, rfi_range *ranges, int n);
  rfr_status (*memory_use)(rfi_device *d, rfr_memory_use *out); /* *out is zeroed */

  /* Selects the kernel of an op whose call is described in b->call, with placeholder addresses; absent operands and
   * dead results are already NULL. Sets run, kernel, workspace, stream and library. Its allocations for the op live in
   * `memory` or in the device. `run` stays NULL if there is no kernel. */
  rfr_status (*select)(rfi_device *d, const rfi_opr *op, rfi_arena *memory, rfi_bound *b);

  /* Choices made by measurement, of all kernels selected so far. `choice`: the name of the i-th (from 0), derived from
   * shapes and types, never from addresses; NULL past the last. `choose` makes the choice: it measures if `stored` is
   * NULL, else it applies the value of an earlier call. *value is the choice that was made; it differs from `stored` if
   * that is not possible on this device. NULL: the backend has no choices. Tuning uses device memory while it runs. */
  const char *(*choice)(rfi_device *d, int i);
  rfr_status (*choose)(rfi_device *d, int i, const char *stored, char value[RFI_CHOICE]);

  rfr_status (*run)(rfi_device *d, const rfi_bound *bound, int n); /* joins the side stream at the end */
  /* Runs the first op and the ops after it that share its launch, *many in total; synchronous. */
  rfr_status (*run_timed)(rfi_device *d, const rfi_bound *bound, int n, int *many, double *seconds);
  rfr_status (*capture)(rfi_device *d, const rfi_copy *copies, int n_copies, const rfi_bound *bound, int n,
                        rfi_graph **out);
  /* `from`: a source for each copy, as in `move`; a source equal to the destination skips the copy. Ignored if the
   * graph has no copies. */
  rfr_status (*launch)(rfi_device *d, rfi_graph *graph, const void *const *from);
  /* launch_side launches a graph without copies on a side stream, after all work enqueued so far. Graphs run there in
   * order, concurrently with later work of the main stream. join_side makes later work of the main stream wait for all
   * of them except the last `but`. wait and poll include them. NULL: there is no side stream. */
  rfr_status (*launch_side)(rfi_device *d, rfi_graph *graph);
  rfr_status (*join_side)(rfi_device *d, int but);
  /* The op that failed in the last run, capture or launch; -1: unknown, or no error. */
  int (*failed)(const rfi_device *d);
  void (*graph_destroy)(rfi_device *d, rfi_graph *graph); /* accepts NULL */
  rfr_status (*wait)(rfi_device *d);                      /* wait and poll also return errors of enqueued work */
  /* Enqueues later work on the caller's stream, ordered after all earlier work; NULL: on the device's own stream
   * again. */
  rfr_status (*set_stream)(rfi_device *d, void *stream);
  void *(*stream)(const rfi_device *d); /* the stream on which work is enqueued; NULL: calls are synchronous */
  rfr_status (*poll)(rfi_device *d, bool *idle);
} rfi_backend;

/* The backend of the context's device. Errors: backend.missing, with the file and the reason. */
rfr_status rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out);

/* Device and libraries that the CUDA module found, as one line. Errors: backend.missing, with the reason. */
rfr_status rfi_backend_describe_cuda(rfr_ctx *ctx, char *text, size_t size);
rfr_status rfi_backend_cuda_piece(rfr_ctx *ctx, int i, rfr_piece *out); /* rfr_cuda_piece */

extern const rfi_backend rfi_backend_cpu;

#endif
