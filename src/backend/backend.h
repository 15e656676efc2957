/* SPDX-License-Identifier: Apache-2.0
 *
 * What executes programs. A backend is one table of entry points: the CPU's is linked in,
 * a GPU's comes from a module that is loaded when it is asked for. Everything above this
 * line (trace, passes, plan, programs, runs) is the same for all of them.
 *
 * Bound ops are enqueued in order on the device's one stream, or on the caller's in its
 * place, but for those of the side branch (pass/branch.h), which may run beside what
 * follows them. On the CPU a call returns when it is done; elsewhere when it is enqueued,
 * and `wait` or `copy` waits. A graph is the same calls, recorded once and launched as one,
 * behind copies whose sources each launch names.
 *
 * There are two kinds of memory. The arena is the device's own. A ring's memory is
 * written and read by the host and by the device at once, at one address; a program
 * reaches it with ring ops alone.
 */
#ifndef RFI_BACKEND_H
#define RFI_BACKEND_H

#include "backend/range.h"
#include "base/arena.h"
#include "dist/comm.h"
#include "ops/call.h"
#include "refrain/program.h"
#include "refrain/train.h"

typedef struct rfi_device rfi_device; /* an open device: the backend's own */
typedef struct rfi_graph rfi_graph;

typedef struct rfi_bound { /* one op, ready to run */
  int op;                  /* in the lowered trace */
  rfi_kernel_fn run;
  const char *kernel;      /* what `run` is, for people: rfr_op_time */
  const char *why;         /* what keeps the op from faster code, or from any; NULL: nothing that is known */
  const rfi_opr *recorded; /* the op, for what names it: messages, profilers */
  rfi_call call;
  int64_t workspace;
  bool aside, waits; /* is of the side branch; waits for all of it that was enqueued before */
  bool forks;        /* what is aside from here on is behind all that was enqueued before */
} rfi_bound;

typedef struct rfi_copy { /* what a graph does before its ops */
  void *to;               /* in the arena */
  size_t n;               /* > 0 */
} rfi_copy;

enum { RFI_CHOICE = 256 }; /* bytes of what was chosen, as text */

typedef enum rfi_memory { RFI_MEMORY_ARENA, RFI_MEMORY_RING } rfi_memory;

typedef struct rfi_backend {
  const char *name; /* "the CPU", "CUDA": in messages */
  bool host;        /* the host may read and write the arena, and a call returns when it is done */
  bool branches;    /* it runs what is aside beside the rest */
  int guard;        /* bytes behind the arena that nobody may write */
  int loss_chunk;   /* rows of logits at a time in an LM head: so many make its products large */
  rfr_status (*open)(rfr_ctx *ctx, rfi_device **out);
  /* From now on what waits for the device looks whether other ranks are still there; refused when the communicator is
   * another device's (dist.communicator). NULL: a call returns when they have come. */
  rfr_status (*join)(rfi_device *d, rfr_comm *comm);
  void (*close)(rfi_device *d); /* accepts NULL */

  rfr_status (*alloc)(rfi_device *d, rfi_memory kind, size_t bytes, void **out);
  void (*free)(rfi_device *d, rfi_memory kind, void *memory);
  rfr_status (*fill)(rfi_device *d, void *to, unsigned char byte, size_t n);
  rfr_status (*copy)(rfi_device *d, void *to, const void *from, size_t n); /* host or device on either side; waits */
  rfr_status (*move)(rfi_device *d, void *to, const void *from, size_t n); /* the same without waiting: enqueued */
  bool (*reaches)(const rfi_device *d, const void *memory);       /* kernels may be given it; false: surely not */
  rfr_status (*inspect)(rfi_device *d, rfi_range *ranges, int n); /* marks the broken; they lie in a ring; waits */
  rfr_status (*memory_use)(rfi_device *d, rfr_memory_use *out);   /* *out is zeroed */

  /* Picks the kernel of an op whose call is described in b->call, with placeholders for addresses (absent
   * operands and dead results are NULL already); sets run, kernel, workspace, stream and library of it. What it
   * makes for the op lives in `memory` or in the device. `run` stays NULL: there is none. */
  rfr_status (*bind)(rfi_device *d, const rfi_opr *op, rfi_arena *memory, rfi_bound *b);

  /* What a clock may decide, of all that was bound until now. `choice`: the name of the i-th, 0 based, by shapes and
   * types and never by addresses; NULL past the last, and at once where there is nothing to choose. `choose` makes it:
   * `stored` NULL measures, else the value that an earlier call gave; *value is what it is now, another one than
   * `stored` where that cannot be; NULL where there never is a choice. While it runs it takes memory of the device. */
  const char *(*choice)(rfi_device *d, int i);
  rfr_status (*choose)(rfi_device *d, int i, const char *stored, char value[RFI_CHOICE]);

  rfr_status (*run)(rfi_device *d, const rfi_bound *bound, int n);                 /* no branch is open at the end */
  rfr_status (*run_timed)(rfi_device *d, const rfi_bound *bound, double *seconds); /* one op; waits */
  rfr_status (*capture)(rfi_device *d, const rfi_copy *copies, int n_copies, const rfi_bound *bound, int n,
                        rfi_graph **out);
  /* `from`: for each copy what `move` takes; its own bytes: they are there. Not read where there are no copies. */
  rfr_status (*launch)(rfi_device *d, rfi_graph *graph, const void *const *from);
  /* Which op of the last run, capture or launch its error is about; -1: it is not known, or there was none. */
  int (*failed)(const rfi_device *d);
  void (*graph_destroy)(rfi_device *d, rfi_graph *graph); /* accepts NULL */
  rfr_status (*wait)(rfi_device *d);                      /* errors of what was enqueued, here and in poll */
  /* What is enqueued from now on goes into the caller's stream, behind all before; NULL: the device's own again. */
  rfr_status (*set_stream)(rfi_device *d, void *stream);
  rfr_status (*poll)(rfi_device *d, bool *idle);
} rfi_backend;

/* The backend of the context's device. Errors: backend.missing, with what was looked for and why it is not there. */
rfr_status rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out);

/* What the CUDA module found: device and libraries, as one line. Errors: backend.missing, with the reason. */
rfr_status rfi_backend_describe_cuda(rfr_ctx *ctx, char *text, size_t size);
rfr_status rfi_backend_cuda_piece(rfr_ctx *ctx, int i, rfr_piece *out); /* rfr_cuda_piece */

extern const rfi_backend rfi_backend_cpu;

#endif
