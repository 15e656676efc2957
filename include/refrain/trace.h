/* SPDX-License-Identifier: Apache-2.0
 *
 * The trace: one flat program in SSA form for forward, backward and optimizer.
 *
 * Recording calls (refrain/ops.h) return a value id and latch the first error in the trace, so that
 * model code needs no checks; rfr_trace_finish returns that error. Recording executes nothing. Only
 * one thread at a time may use a trace.
 *
 *   rfr_trace *t;
 *   rfr_trace_create(ctx, &t);
 *   rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){8, 4});
 *   rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, (int64_t[]){3, 4});
 *   rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
 *   rfr_trace_finish(t);
 */
#ifndef REFRAIN_TRACE_H
#define REFRAIN_TRACE_H

#include "refrain/ctx.h"
#include "refrain/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RFR_MAX_RANK = 6 };

typedef struct rfr_trace rfr_trace;
typedef int32_t rfr_value; /* dense id within one trace */
#define RFR_NONE ((rfr_value)-1)

/* The role of a program's input. Trainability is a role of an input, never an attribute of an intermediate value. */
#define RFR_ROLES(X)                   \
  X(RFR_ROLE_NONE, "value")            \
  X(RFR_ROLE_TRAINABLE, "trainable")   \
  X(RFR_ROLE_FROZEN, "frozen")         \
  X(RFR_ROLE_STATE, "state")           \
  X(RFR_ROLE_INPUT, "input")           \
  X(RFR_ROLE_INPUT_GRAD, "input_grad") \
  X(RFR_ROLE_CONST, "const")
typedef enum rfr_role {
#define RFR_ROLE_ENUM(e, name) e,
  RFR_ROLES(RFR_ROLE_ENUM)
#undef RFR_ROLE_ENUM
} rfr_role;

#define RFR_PHASES(X)             \
  X(RFR_PHASE_LOAD, "load")       \
  X(RFR_PHASE_SETUP, "setup")     \
  X(RFR_PHASE_FORWARD, "forward") \
  X(RFR_PHASE_DGRAD, "dgrad")     \
  X(RFR_PHASE_WGRAD, "wgrad")     \
  X(RFR_PHASE_OPTIM, "optim")
typedef enum rfr_phase {
#define RFR_PHASE_ENUM(e, name) e,
  RFR_PHASES(RFR_PHASE_ENUM)
#undef RFR_PHASE_ENUM
} rfr_phase;

/* Source line of a recording call. */
typedef struct rfr_source {
  const char *file;
  int line;
} rfr_source;

#ifdef __cplusplus
static inline rfr_source rfr_source_make(const char *file, int line) {
  rfr_source p;
  p.file = file;
  p.line = line;
  return p;
}
#define RFR_HERE rfr_source_make(__FILE__, __LINE__)
#else
#define RFR_HERE ((rfr_source){__FILE__, __LINE__})
#endif

/* Creates an empty trace that the caller destroys; the context must outlive it. */
RFR_API rfr_status rfr_trace_create(rfr_ctx *ctx, rfr_trace **out);
RFR_API void rfr_trace_destroy(rfr_trace *t); /* accepts NULL */
/* Returns the latched error of recording, if any, then verifies the trace (rfr_trace_verify). The trace
 * stays open: more may be recorded. rfr_compile and rfr_graphs_create make both checks themselves, so that
 * a trace with an error is never compiled; this call reports the error earlier. */
RFR_API rfr_status rfr_trace_finish(rfr_trace *t);
/* The latched error of recording, without verification. */
RFR_API rfr_status rfr_trace_status(const rfr_trace *t);

/* Declares a program input; no other input may have its name. A zero in `shape` means an empty tensor, not
 * an unknown size. Errors (latched): trace.name, trace.shape (negative, or the byte count overflows). */
RFR_API rfr_value rfr_input_at(rfr_trace *t, rfr_source at, const char *name, rfr_role role, rfr_dtype dtype, int rank,
                               const int64_t *shape);
/* `shape` comes last, so that a compound literal with commas needs no parentheses. */
#define rfr_input(t, name, role, dtype, rank, ...) rfr_input_at(t, RFR_HERE, name, role, dtype, rank, __VA_ARGS__)
/* Declares a program output under a name. */
RFR_API void rfr_output_at(rfr_trace *t, rfr_source at, const char *name, rfr_value v);
#define rfr_output(t, name, v) rfr_output_at(t, RFR_HERE, name, v)

/* Names a value for printing; copies the string. */
RFR_API void rfr_value_set_name(rfr_trace *t, rfr_value v, const char *name);
/* Scope of the ops recorded from now ("layer3.attention"); copies the string; "" for none. The printer
 * shows consecutive layers that differ only in their number as one. */
RFR_API void rfr_scope(rfr_trace *t, const char *scope);
/* Microbatch of the ops recorded from now, below 2^20; -1 (initially): once per step, for no microbatch. Record
 * microbatches in ascending order: then equal layers have equal random sites in each of them, and a mask of rfr_dropout
 * depends on the microbatch's number and the site. */
RFR_API void rfr_microbatch(rfr_trace *t, int microbatch);
/* Phase of the ops recorded from now; initially RFR_PHASE_FORWARD. Ops of RFR_PHASE_LOAD run once, before
 * all other ops; they must be recorded first and may read only frozen inputs and constants. */
RFR_API void rfr_set_phase(rfr_trace *t, rfr_phase phase);
/* The recompute policy of the ops recorded from now on, for results that the backward reads: keep them, recompute them,
 * or (auto, initially) follow the compile options. */
#define RFR_POLICIES(X)      \
  X(RFR_POLICY_AUTO, "auto") \
  X(RFR_POLICY_KEEP, "keep") \
  X(RFR_POLICY_RECOMPUTE, "recompute")
typedef enum rfr_policy {
#define RFR_POLICY_ENUM(e, name) e,
  RFR_POLICIES(RFR_POLICY_ENUM)
#undef RFR_POLICY_ENUM
} rfr_policy;
RFR_API void rfr_set_recompute(rfr_trace *t, rfr_policy policy);

/* Type of a value; entries of shape from rank on are 0. Rank 0 and f32 for RFR_NONE. */
typedef struct rfr_type {
  rfr_dtype dtype;
  int rank;
  int64_t shape[RFR_MAX_RANK];
} rfr_type;
RFR_API rfr_type rfr_value_type(const rfr_trace *t, rfr_value v);
RFR_API const char *rfr_value_name(const rfr_trace *t, rfr_value v);
RFR_API int rfr_trace_op_count(const rfr_trace *t);
/* The number of random sites (rfr_dropout calls) in a trace, which rfr_callable.first_site counts; 0 for NULL. */
RFR_API int64_t rfr_trace_sites(const rfr_trace *t);
/* The number of linear layers recorded under a recipe, which rfr_callable.first_linear counts; 0 for NULL. */
RFR_API int64_t rfr_trace_linears(const rfr_trace *t);

/* ---- text ---- */

typedef struct rfr_print_options {
  size_t size;
  int flat;       /* 1: the form that rfr_trace_parse reads; 0: for people (equal layers shown once) */
  int phase;      /* print only this phase; -1: all */
  int live_bytes; /* 1: bytes live after each op in a comment */
} rfr_print_options;
RFR_API rfr_print_options rfr_print_options_default(void);
RFR_API rfr_status rfr_trace_print(const rfr_trace *t, const rfr_print_options *options, rfr_write_fn write,
                                   void *user);
/* Reads the flat form; parse(print(t)) equals t in ops, operands, types, attributes, roles, phases, effects,
 * tokens, storage, names and sources. The text may come from anyone: it is verified, and memory is linear in n.
 * `name` is the file name in errors (NULL: "trace"). The caller destroys *out. Errors: trace.parse with the
 * line, and those of rfr_trace_verify. */
RFR_API rfr_status rfr_trace_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_trace **out);
/* 1 if the two traces are equal in everything that parse reads. */
RFR_API int rfr_trace_equal(const rfr_trace *a, const rfr_trace *b);
/* Infers every type again and checks order, phases, storage versions, tokens and total size. Errors:
 * trace.verify, trace.stale_version, trace.state, overflow. */
RFR_API rfr_status rfr_trace_verify(const rfr_trace *t);
/* Writes the ops that differ, one line each, with "-" or "+" before it. */
RFR_API rfr_status rfr_trace_diff(const rfr_trace *a, const rfr_trace *b, rfr_write_fn write, void *user);

#ifdef __cplusplus
}
#endif
#endif
