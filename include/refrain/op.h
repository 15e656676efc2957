/* SPDX-License-Identifier: Apache-2.0
 *
 * Your own ops. A description registered with a context becomes an op like those of the library: it can be recorded,
 * printed and parsed, has a gradient, and is pruned, recomputed, planned, captured and replayed. examples/custom_op.c
 * has a CPU kernel, examples/custom_op_cuda.cu a CUDA launcher.
 *
 *   rfr_op_desc d = rfr_op_desc_default();
 *   d.name = "mine.softcap", d.operands = "x", d.results = "y", d.attributes = "cap:f";
 *   d.flags = RFR_OP_ROWS, d.shape = shape, d.gradient = gradient, d.cpu = kernel;
 *   const rfr_op *softcap;
 *   rfr_op_register(ctx, &d, &softcap);
 *   rfr_attr cap = rfr_attr_float(30);
 *   rfr_value y = rfr_record(t, softcap, 1, &x, &cap, NULL);
 */
#ifndef REFRAIN_OP_H
#define REFRAIN_OP_H

#include <stdbool.h>
#include <string.h>

#include "refrain/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_op rfr_op; /* a definition; lives as long as its context */

typedef struct rfr_shape {
  int rank;
  int64_t dim[RFR_MAX_RANK];
} rfr_shape;

enum { RFR_MAX_LIST = 512 };

typedef struct rfr_list {
  int64_t n; /* 0 to RFR_MAX_LIST */
  const double *x;
} rfr_list;

/* One attribute; the op's `attributes` say which member is used. A trace copies the numbers of a list. */
typedef struct rfr_attr {
  union {
    int64_t i; /* b, i, t */
    double f;
    rfr_shape s;
    rfr_list l;
  };
} rfr_attr;

static inline rfr_attr rfr_attr_int(int64_t i) {
  rfr_attr a;
  memset(&a, 0, sizeof a);
  a.i = i;
  return a;
}
static inline rfr_attr rfr_attr_float(double f) {
  rfr_attr a;
  memset(&a, 0, sizeof a);
  a.f = f;
  return a;
}

enum {
  RFR_OP_VIEW = 1 << 1,   /* no kernel: the result is a view of operand 0, by rfr_op_desc.view */
  RFR_OP_ROWS = 1 << 2,   /* the kernel takes operands of which only the last dimension is dense */
  RFR_OP_ANY = 1 << 3,    /* the kernel takes operands with any strides */
  RFR_OP_STATE = 1 << 4,  /* writes state that outlives the step */
  RFR_OP_HOST = 1 << 5,   /* has an effect that the host sees; such ops keep their order */
  RFR_OP_RNG = 1 << 6,    /* draws addressed random numbers: equal ops of two microbatches differ */
  RFR_OP_FORM = 1 << 8,   /* the result is operand 0 in another form: if that is a weight, so is the result. True of
                             views without the flag */
  RFR_OP_STOP = 1 << 9,   /* the gradient stops here, without an error */
  RFR_OP_LOCAL = 1 << 10, /* each reader of the result gets a separate op, just before it */
};

/* Input of a shape rule. Operands may have any type and shape: check before use. Also the input of the rules for views
 * and costs, whose types are checked already; there a dead result has rank -1. */
typedef struct rfr_infer {
  const rfr_op *def;
  int n_in;
  const rfr_type *in; /* rank -1: absent */
  const rfr_attr *attr;
  rfr_type *out; /* a shape rule gets zeros and fills all of them */
  void *user;
} rfr_infer;

/* Input of a gradient rule. The rule records with any rfr_* call into `t`, with source `at`, and
 * sets dx[k], with operand k's shape, where need[k]; RFR_NONE means zero. It may be
 * called more than once for one op and must record the same ops each time. */
typedef struct rfr_grad {
  rfr_trace *t;
  rfr_source at; /* of the forward call */
  int n_in, n_out;
  const rfr_value *in, *out; /* RFR_NONE: absent, dead */
  const rfr_attr *attr;
  const bool *need;
  const bool *is_weight; /* operand k is a parameter: record its gradient in RFR_PHASE_WGRAD, which is set already if
                            all needed operands are parameters */
  const rfr_value *dy;   /* cotangent of each result, RFR_NONE: none */
  rfr_value *dx;         /* all RFR_NONE at first; the library casts them to the required type */
  void *user;
} rfr_grad;

typedef struct rfr_arg {
  void *data; /* NULL: absent operand (rank -1) or dead result (typed all the same) */
  rfr_type type;
  int64_t stride[RFR_MAX_RANK]; /* elements */
} rfr_arg;

/* Input of a kernel. Results are dense; operands too, unless the flags say otherwise. */
typedef struct rfr_call {
  int n_in, n_out;
  const rfr_arg *in;
  const rfr_arg *out; /* out[j].data == in[k].data where the result is the next version of operand k */
  const rfr_attr *attr;
  int32_t microbatch; /* for addressed random numbers; -1 counts as 0 */
  void *workspace;    /* 64-byte aligned, as many bytes as the kernel's workspace rule returned */
  int threads;        /* number of threads of a parallel region; results may depend on it */
  void *stream;       /* where to enqueue, a cudaStream_t; NULL on the CPU */
  void *library;      /* private data of the library's own ops; NULL for registered ops */
  void *user;         /* rfr_op_desc.user; NULL for the library's own ops */
} rfr_call;

/* Runs an op, or launches it on a GPU. The same inputs and number of threads must give bitwise the same results. The
 * amount of work may depend only on shapes. A kernel writes nothing but results and workspace, and handles empty
 * tensors. Any status but RFR_OK ends the run with that status and the error op.kernel, which names the op and its
 * place.
 *   On the CPU, data pointers are host addresses, and the call returns when the op is done. It allocates nothing and
 *   waits only for its own threads.
 *   On a GPU, data pointers and the workspace are device addresses. The launcher runs on the host: it enqueues into
 *   (cudaStream_t)call->stream, checks cudaGetLastError() and returns. It is called at each eager run, and once by
 *   rfr_program_capture; a replay repeats the captured kernels without calling it. So it must not wait, allocate, use
 *   another stream, or read device memory, and values that change from step to step come from operands. */
typedef rfr_status (*rfr_kernel_fn)(const rfr_call *call);
/* For ops whose amount of work depends on the values of one operand, such as document offsets. */
typedef struct rfr_share {
  int operand;                                            /* of rank 1 */
  double (*of)(const rfr_call *call, const void *values); /* share of the counted work, 0 to 1; host-readable values */
} rfr_share;
/* Bytes of workspace, from shapes. It is called at compile; data pointers say only whether an operand or a result is
 * there (not NULL). */
typedef size_t (*rfr_workspace_fn)(const rfr_call *call);

/* The description of an op. Strings are copied. Their notation is that of the library's table (ops.def):
 *   operands    names in order. "b?" may be absent (RFR_NONE); "rest*", as the last one, stands for any number of
 *               operands; "by~" is a float without a gradient
 *   results     names in order, at least one. "lse!" may be infinite by definition. "w1@w" is in the storage of operand
 *               w, as its next version, and needs RFR_OP_STATE. If that operand may be absent, RFR_OP_STATE is not
 *               needed: with the operands "x acc?", the result "y@acc" is added to acc if acc is given; the fuse pass
 *               may give it
 *   attributes  name:type; the types are b (0 or 1), i (integer), f (double), t (dtype), s (shape) */
typedef struct rfr_op_desc {
  size_t size;
  const char *name; /* "mine.swish": words of letters, digits and _, with a dot between, at most 63 bytes */
  const char *operands, *results, *attributes;
  unsigned flags; /* RFR_OP_ROWS or RFR_OP_ANY, and effects */
  /* Fills c->out. Returns NULL, or a static text that says what is wrong with the operands. */
  const char *(*shape)(const rfr_infer *c);
  void (*gradient)(rfr_grad *g); /* NULL: none; not together with RFR_OP_STATE or RFR_OP_HOST */
  rfr_kernel_fn cpu;             /* NULL: compiling for the CPU fails with bind.no_kernel */
  rfr_workspace_fn cpu_workspace;
  double (*flops)(const rfr_infer *c); /* of a call, from the types, a multiply-add as two; NULL: 0, memory-bound */
  double (*bytes)(const rfr_infer *c); /* read and written; NULL: each operand and result once */
  rfr_share share;                     /* the part of the work that profiles count; share.of NULL: all of it */
  /* For RFR_OP_VIEW: computes the strides of the result from those of operand 0, in elements, and adds the offset of
   * its first element to *offset. Returns false if no strides express the view; then recording it is an error. */
  bool (*view)(const rfr_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset);
  void *user;         /* for the callbacks; outlives the context */
  rfr_kernel_fn cuda; /* launches the op on a GPU; NULL: compiling for one fails with bind.no_kernel */
  rfr_workspace_fn cuda_workspace;
} rfr_op_desc;
RFR_API rfr_op_desc rfr_op_desc_default(void);

/* Registers an op with a context, for all of its traces, until the context is destroyed. Callbacks run on the thread of
 * the library call that needs them. Errors: argument, naming the field; the name must be new in this context. */
RFR_API rfr_status rfr_op_register(rfr_ctx *ctx, const rfr_op_desc *desc, const rfr_op **out);
/* An op by name, the library's own included; NULL: there is none, or the name is NULL. */
RFR_API const rfr_op *rfr_op_find(const rfr_ctx *ctx, const char *name);

/* Records any op. `in` has n_in values (RFR_NONE: absent; trailing absent ones may be left out),
 * `attr` one entry per attribute, in order. Returns the first result; `out`, unless NULL, has room
 * for all of them. Errors are latched in the trace, as by every recording call. */
RFR_API rfr_value rfr_record_at(rfr_trace *t, rfr_source at, const rfr_op *op, int n_in, const rfr_value *in,
                                const rfr_attr *attr, rfr_value *out);
#define rfr_record(t, op, n_in, in, attr, out) rfr_record_at(t, RFR_HERE, op, n_in, in, attr, out)

#ifdef __cplusplus
}
#endif
#endif
