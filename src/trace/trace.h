/* SPDX-License-Identifier: Apache-2.0
 *
 * The trace as the library sees it: dense arrays of values and ops.
 *
 * Invariants that verify.c checks and everything else relies on:
 *  - values[i].op < j for every op j that reads i: list order is a valid order.
 *  - an op never changes once recorded; a pass reads one trace and writes another.
 *  - storage: `base` is the value that owns the bytes (itself, unless it is a view or
 *    the next version of a state); strides and offset are in elements of that base.
 *  - a result that shares its operand's storage ("w1@w") is that storage's next
 *    version: no later op reads an older one.
 */
#ifndef RFI_TRACE_H
#define RFI_TRACE_H

#include <stdbool.h>
#include <string.h>

#include "base/arena.h"
#include "base/names.h"
#include "refrain/op.h"
#include "refrain/ops.h"
#include "refrain/recipe.h"
#include "refrain/trace.h"

enum { RFI_MAX_ATTR = 8, RFI_MAX_MICROBATCH = (1 << 20) - 1 };

/* Types shared with registered ops are declared in refrain/op.h. */
typedef rfr_shape rfi_shape;
typedef rfr_attr rfi_attr;
typedef rfr_infer rfi_infer;
typedef struct rfr_op rfi_op_def;

/* RFI_OP_COUNT is the code of every registered op; tables have no entry for it. */
typedef enum rfi_opcode {
#define RFI_OP(name, family, operands, results, attributes, flags) RFI_OP_##name,
#include "ops/ops.def"
#undef RFI_OP
  RFI_OP_COUNT
} rfi_opcode;

enum {
  RFI_GRAD = 1 << 0,
  RFI_VIEW = RFR_OP_VIEW,
  RFI_ROWS = RFR_OP_ROWS,
  RFI_ANY = RFR_OP_ANY,
  RFI_STATE = RFR_OP_STATE,
  RFI_HOST = RFR_OP_HOST,
  RFI_RNG = RFR_OP_RNG,
  RFI_COLLECTIVE = 1 << 7,
  RFI_FORM = RFR_OP_FORM,
  RFI_STOP = RFR_OP_STOP,
  RFI_LOCAL = RFR_OP_LOCAL,
};

typedef struct rfi_grad rfi_grad;
typedef rfr_share rfi_share;

/* The dimension whose size each group provides: none, M or K; the description has its maximum. */
typedef enum rfi_gemm_varies { RFI_GEMM_FIXED, RFI_GEMM_VARIES_M, RFI_GEMM_VARIES_K } rfi_gemm_varies;

/* A description of an op as one GEMM, with what costs, backends and their libraries need. The op's rule rfi_gemm_NAME
 * fills it. Operands are given by index; -1: the op has no such operand, or it is absent. */
typedef struct rfi_gemm_desc {
  int64_t batch, M, N, K; /* y (batch, M, N) = op(a) (batch, M, K) op(b) (batch, K, N) */
  int a, b, bias, acc;
  bool ta, tb;
  rfi_gemm_varies varies; /* unless FIXED, rows offsets[g] ... offsets[g+1] - 1 of a belong to group g */
  int offsets;
  int separate; /* the first of the separate b, which has one per group */
  int gelu_x;   /* operand x if the gradient of GELU at x is applied to the product */
} rfi_gemm_desc;

static inline double rfi_gemm_flops(const rfi_gemm_desc *d) {
  return 2 * (double)d->K * ((double)d->batch * (double)d->M * (double)d->N);
}

static inline rfi_gemm_desc rfi_gemm_desc_make(void) {
  return (rfi_gemm_desc){
      .batch = 1, .a = 0, .b = 1, .bias = -1, .acc = -1, .offsets = -1, .separate = -1, .gelu_x = -1};
}

typedef struct rfi_kernel {
  rfr_kernel_fn run;
  rfr_workspace_fn workspace; /* NULL: none */
} rfi_kernel;

/* The parsed row of ops.def, or a registered op. */
enum { RFI_MAX_NAMES = 12, RFI_OP_NAME = 64 };
struct rfr_op {
  rfi_opcode code;
  const char *name, *family;
  unsigned flags;
  int n_operands; /* number of names, including the variadic tail */
  int n_required; /* number of leading operands up to the last required one */
  bool optional[RFI_MAX_NAMES];
  bool given[RFI_MAX_NAMES];    /* operands that have no gradient */
  bool infinite[RFI_MAX_NAMES]; /* results that may be infinite by definition */
  bool variadic;                /* the last name stands for all further operands, possibly none */
  int n_results, n_attrs;
  char operand[RFI_MAX_NAMES][16];
  char result[RFI_MAX_NAMES][16];
  int alias[RFI_MAX_NAMES];      /* per result: the operand whose storage it uses, or -1 */
  bool only_onto[RFI_MAX_NAMES]; /* results that exist only if that operand is given */
  char attr[RFI_MAX_ATTR][16];
  char attr_type[RFI_MAX_ATTR]; /* b i f t s l */
  /* Shape rule: reads in[] and attr[], fills out[]. Absent operands have rank -1; types of absent results are ignored.
   * Fails with rfi_fail(RFI_E_TRACE_SHAPE, ...); the caller adds source line and op. */
  rfr_status (*infer)(const rfi_infer *c);
  /* Gradient rule; NULL: none. */
  rfr_status (*grad)(rfi_grad *g);
  /* Views: computes strides and offset of the result, in elements of the base. False: no strides express it. */
  bool (*view)(const rfi_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset);
  /* Describes the op as one GEMM, from its types; NULL: the op is not a GEMM. */
  void (*gemm)(const rfi_infer *c, rfi_gemm_desc *d);
  /* FLOPs, and bytes read and written, from the types; a dead result has rank -1. NULL: the FLOPs of its GEMM, or 0;
   * each operand is read once, each result written once. */
  double (*flops)(const rfi_infer *c);
  double (*bytes)(const rfi_infer *c);
  const rfi_share *share; /* NULL: the amount of work depends only on shapes */
  /* Registered ops only: the functions above call these, with `user`. */
  const struct rfi_outside {
    rfr_ctx *ctx;
    const char *(*shape)(const rfr_infer *c);
    void (*gradient)(rfr_grad *g);
    bool (*view)(const rfr_infer *c, const int64_t *stride, int64_t *y_stride, int64_t *offset);
    rfi_kernel cpu, cuda; /* run is NULL: none */
    double (*flops)(const rfr_infer *c);
    double (*bytes)(const rfr_infer *c);
    rfi_share share;
    void *user;
  } * outside;
};

/* Never NULL for a valid code. */
const rfi_op_def *rfi_op_def_get(rfi_opcode code);
/* An op of the table, or registered with the context (NULL: only the table); NULL for an unknown name. */
const rfi_op_def *rfi_op_def_find(const rfr_ctx *ctx, const char *name, size_t n);
/* Fills names, aliases and counts of *d, which must be zeroed, from the strings of a well-formed row. */
void rfi_op_def_parse(const char *operands, const char *results, const char *attributes, rfi_op_def *d);

/* Ops with a token keep their order. Ops with a host effect form one chain, collectives another. -1: no token. */
enum { RFI_CHAINS = 2 };
static inline int rfi_chain(const rfi_op_def *d) {
  return d->flags & RFI_HOST ? 0 : d->flags & RFI_COLLECTIVE ? 1 : -1;
}

/* Whether a storage has further readers in the program with every frozen input trained. MORE: it has; LATER: one of
 * them comes after the last reader here, or is the only one through a view. Set by autodiff; fuse checks it before a
 * rewrite that changes results. */
enum { RFI_READ_MORE = 1, RFI_READ_LATER = 2 };

typedef struct rfi_value {
  rfr_type type;
  int64_t stride[RFR_MAX_RANK]; /* strides in elements */
  int64_t offset;               /* in elements, from the start of the base */
  rfr_value base;               /* owner of the storage; itself, unless it is a view or a version */
  int32_t op;                   /* producer, -1 for an input */
  int16_t result;               /* index of the result */
  uint8_t role;                 /* rfr_role, inputs only */
  uint8_t if_trained;           /* RFI_READ_MORE, RFI_READ_LATER; set on the base; not printed */
  const char *name;             /* "" or a name */
  rfr_source at;
} rfi_value;

typedef struct rfi_cost {
  double flops; /* of GEMMs and attention, a multiply-add counts 2; 0 for memory-bound ops */
  double bytes; /* each operand read once, each result written once, as with perfect caches; 0 for views */
} rfi_cost;

/* The recipe of the GEMMs of a linear layer. The forward GEMM gets a number when it is recorded; the GEMMs of its
 * backward inherit the label. The pass `quantize` reads labels; no op has a label after it. */
enum { RFI_RECIPE_KEEP = 255, RFI_MAX_RECIPES = 64, RFI_MAX_RECIPE_SCOPES = 8 };
typedef struct rfi_label {
  int32_t linear; /* number of the linear layer, from 0; meaningless without a recipe */
  uint8_t recipe; /* 0: none; index into the trace's recipes plus 1; RFI_RECIPE_KEEP: its weight is kept by name */
} rfi_label;

typedef struct rfi_opr {
  const rfi_op_def *def;
  int n_in, n_out;
  rfr_value *in;        /* RFR_NONE: absent */
  rfr_value *out;       /* RFR_NONE: a dead result, printed as _ */
  const rfi_attr *attr; /* def->n_attrs entries; in a recorded op, bytes that a type does not use are zero */
  uint8_t phase;        /* rfr_phase */
  uint8_t policy;       /* rfr_policy of its results */
  rfi_label label;
  int32_t microbatch; /* -1: once per step */
  int32_t token_in;   /* previous op of its token chain, -1: none */
  int32_t clone_of;   /* the op that this one recomputes, -1: none */
  rfi_cost cost;
  const char *scope;  /* "" or "layer3.attention" */
  const char *reason; /* comment of a pass, "" or text */
  rfr_source at;
} rfi_opr;

typedef struct rfi_output {
  const char *name;
  rfr_value value;
} rfi_output;

struct rfr_trace {
  rfr_ctx *ctx;
  rfi_arena *arena; /* owns everything below */
  rfi_value *values;
  int n_values, cap_values;
  rfi_opr *ops;
  int n_ops, cap_ops;
  rfr_value *inputs;
  int n_inputs, cap_inputs;
  rfi_names input_names, output_names;
  rfi_output *outputs;
  int n_outputs, cap_outputs;
  rfr_recipe *recipes; /* distinct recipes, without patterns */
  int n_recipes, cap_recipes;
  /* recording state */
  rfr_status status; /* first error; later calls return RFR_NONE */
  rfr_error error;   /* its text, copied into the arena */
  const char *scope;
  int microbatch;
  rfr_phase phase;
  rfr_policy policy;
  const char *reason;
  rfr_recipe scopes[RFI_MAX_RECIPE_SCOPES]; /* open recipe scopes, the innermost last */
  int n_scopes;
  rfi_label inherited; /* label of the op whose gradient rule runs; it takes precedence over the scopes */
  bool inherits;
  int32_t next_linear;
  int32_t last_token[RFI_CHAINS]; /* the last op of each token chain */
  int64_t next_site;              /* dropout sites are numbered as recorded, from first_site in each microbatch */
  int64_t first_site;
  int newest_microbatch; /* the highest number so far; -1: none */
  int finished_at;       /* rfi_trace_size when the trace was finished; 0: never */
};

/* The number of recorded objects, which changes with each recording call. */
static inline int rfi_trace_size(const rfr_trace *t) { return 1 + t->n_values + t->n_ops + t->n_outputs; }
/* Whether rfr_trace_finish or rfr_trace_parse succeeded, and nothing was recorded since. */
static inline bool rfi_trace_is_finished(const rfr_trace *t) { return t->finished_at == rfi_trace_size(t); }

/* FLOPs and bytes of an op, from its types. Errors: argument, for a registered op's negative count. */
rfr_status rfi_op_cost(const rfi_infer *c, rfi_cost *out);
/* The index of an attribute, by name; -1: there is none. */
int rfi_attr_find(const rfi_op_def *d, const char *name);

/* ---- recipes (recipe.c) ---- */

/* Whether the op is a GEMM that may have a label, that is, a GEMM of a linear layer. */
static inline bool rfi_takes_recipe(const rfi_op_def *d) {
  return d->code == RFI_OP_matmul || d->code == RFI_OP_grouped_matmul || d->code == RFI_OP_grouped_wgrad;
}
/* The label for a call that is being recorded. */
rfr_status rfi_label_now(rfr_trace *t, const rfi_op_def *def, int n_in, const rfr_value *in, const rfi_attr *attr,
                         rfi_label *out);
/* The input of which value v is a view, cast or dequantized copy; NULL: none. */
const rfi_value *rfi_input_of(const rfr_trace *t, rfr_value v);
/* The index of an equal recipe plus 1; adds the recipe if it is new. */
rfr_status rfi_recipe_intern(rfr_trace *t, const rfr_recipe *recipe, uint8_t *out);
bool rfi_labels_equal(const rfr_trace *a, rfi_label la, const rfr_trace *b, rfi_label lb);
/* Converts a label's recipe to text, such as "fp8_current format=hybrid ...", and back. */
enum { RFI_RECIPE_TEXT = 160 };
const char *rfi_recipe_text(const rfr_trace *t, rfi_label label, char buf[RFI_RECIPE_TEXT]);
rfr_status rfi_recipe_parse(rfr_trace *t, const char *text, uint8_t *out);

/* Compares or hashes the attributes of ops of one definition; `hash` is continued. */
bool rfi_attr_equal(char type, const rfi_attr *a, const rfi_attr *b);
bool rfi_attrs_equal(const rfi_opr *a, const rfi_opr *b);
uint64_t rfi_attrs_hash(const rfi_opr *op, uint64_t hash);

/* Sets the error of a registered op whose kernel returned `s`, and returns `s`; the caller adds the op's name. */
rfr_status rfi_outside_failed(const rfi_opr *op, rfr_status s);
/* Appends one op. `in` has n_in entries (absent: RFR_NONE; trailing absent ones may be left out); `attr` has
 * def->n_attrs. Returns result 0; out[] gets all results, unless it is NULL. */
rfr_value rfi_record(rfr_trace *t, rfr_source at, rfi_opcode code, int n_in, const rfr_value *in, const rfi_attr *attr,
                     rfr_value *out);
/* The same for passes: copies all of `proto` except out, token_in and n_out
 * (operands are ids of t); dead[j] marks results without readers; out[] gets the ids.
 * The error is returned, not latched. */
rfr_status rfi_append(rfr_trace *t, const rfi_opr *proto, const bool *dead, rfr_value *out);
/* Whether a recording call may proceed: false without a trace (sets the thread's last error), and after the first,
 * latched error. */
bool rfi_trace_records(const rfr_trace *t);
/* Latches an error in the trace and returns RFR_NONE; the message gets the source line and op. */
rfr_value rfi_trace_fail(rfr_trace *t, rfr_source at, const char *op, int error, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Fills stride, offset and base of a view `y`, whose type is known, from `x`; false if no strides can express it
 * (reshape of a transposed value): then the caller records a copy first. */
bool rfi_view(const rfi_op_def *def, const rfi_value *x, const rfi_attr *attr, rfi_value *y);
void rfi_dense_strides(rfi_value *v);
bool rfi_is_dense(const rfi_value *v);

static inline rfi_attr rfi_i(int64_t i) {
  rfi_attr a = {{0}};
  a.i = i;
  return a;
}
static inline rfi_attr rfi_f(double f) {
  rfi_attr a = {{0}};
  a.f = f;
  return a;
}
static inline int64_t rfi_count(const rfr_type *t) {
  int64_t n = 1;
  for (int d = 0; d < t->rank; d++) n *= t->shape[d];
  return n;
}
/* The size in bits fits in 63 bits, also with every 0 replaced by 1: no product of some of its dimensions overflows. */
bool rfi_type_fits(const rfr_type *type);
/* Bytes of a dense value of this type. */
static inline int64_t rfi_bytes(const rfr_type *t) { return (rfi_count(t) * rfr_dtype_bits(t->dtype) + 7) / 8; }

/* The index of an operand by name; -1: there is none. */
static inline int rfi_operand_index(const rfi_op_def *def, const char *name) {
  int k = 0;
  while (k < def->n_operands && strcmp(def->operand[k], name) != 0) k++;
  return k < def->n_operands ? k : -1;
}
static inline bool rfi_is_parameter(int role) { return role == RFR_ROLE_TRAINABLE || role == RFR_ROLE_FROZEN; }
/* Whether an op draws random numbers: then it has the optional operand `step`. */
static inline bool rfi_is_random(const rfi_opr *op) {
  if (!(op->def->flags & RFI_RNG)) return false;
  const int step = rfi_operand_index(op->def, "step");
  return step < 0 || (step < op->n_in && op->in[step] >= 0);
}

/* ---- gradient rules ---- */

/* The argument of a gradient rule, which records the backward of `op` into `t`. The rule sets dx[i] (RFR_NONE: zero)
 * for operands with need[i] and records nothing for the others. dy[j] is the cotangent of result j, RFR_NONE: none. A
 * weight's gradient has type sum[i] and is recorded after rfr_set_phase(t, RFR_PHASE_WGRAD); other gradients have the
 * operand's type and phase RFR_PHASE_DGRAD, which is set before the call. */
struct rfi_grad {
  rfr_trace *t;
  const rfi_opr *op; /* operands and results are ids of t */
  const bool *need;
  const rfr_value *dy;
  rfr_value *dx;
  const bool *is_weight; /* operand i is a parameter, or a view or cast of one: phase wgrad */
  const rfr_dtype *sum;  /* the type of a parameter's gradient; NULL: f32 */
  rfr_source at;         /* source line of the forward call, for the recorded ops */
};

#endif
