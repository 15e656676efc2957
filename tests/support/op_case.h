/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of each op family that the tests use, in X_ref.c next to its kernels:
 *
 *   RFT_REF(rmsnorm) { ... }       reference kernel: plain loops; float operands and results are
 *                                  f64, dense; integers keep their types. Absent operands and
 *                                  unused results have data == NULL. A result that shares its
 *                                  operand's storage (acc, state) arrives with the same pointer.
 *   RFT_CASES(rmsnorm) = {"rmsnorm(f[7,13], f[13]) eps=1e-5", ..., NULL};
 *
 *   RFT_OPERANDS(op) { ... }       optional: changes the reference's operands so that they agree
 *                                  with each other, before anything reads them (such as the
 *                                  forward's results that a backward reads)
 *
 * A case is one op in text. Operands: f[..] a float of the type under test (f32, bf16), F[..] always f32 (statistics,
 * master weights, scalars of the step: not differentiated), h[..] always bf16, e[..] always e4m3, g[..] e5m2,
 * p[..] e8m0, D[..] always f64,
 * i[..]<50 int32 below 50, i[..]=0,3,7 given int32 (one value is repeated), I[..]=... and
 * D[..]=... given int64 and f64, b[..]<256 bytes,
 * _ absent. After a float shape: ">0"
 * positive values, "=1" a constant, "@3=nan" or "@3=inf" all of row 3 of the first dimension (such a case has no
 * gradient check), "^T" stored transposed (last two dimensions swapped in memory: a strided view), "/2" every second
 * column of a wider row (a strided view). The last two are only for ops that take such strides; these are also tested
 * with all kinds of strides automatically. "@mb=3" after the operands sets the microbatch. Attributes are written as in
 * a printed trace: eps=1e-05 ta=1 shape=[3,4] to=f32 (to=f: the type under test).
 *
 * At least four cases per op: primes, a dimension of size 1, a length that is not a multiple of 16, an empty tensor.
 * Dimensions within a case differ, so that swapped ones show.
 */
#ifndef RFT_OP_CASE_H
#define RFT_OP_CASE_H

#include "ops/call.h"

#ifndef RFT_PLAIN
#define RFT_NAME(op) rft_ref_##op
#define RFT_CASES(op) const char *const rft_cases_##op[]
#define RFT_OPERANDS(op) void rft_operands_##op(const rfi_call *call)
#else /* the same in f32: see op_plain.h */
#define RFT_NAME(op) rft_plain_##op
#define RFT_CASES(op) const char *const rft_plain_cases_##op[]
#define RFT_OPERANDS(op) void rft_plain_operands_##op(const rfi_call *call)
#endif
#define RFT_REF(op) void RFT_NAME(op)(const rfi_call *call)

/* ---- a case, parsed ---- */

enum { RFT_MAX_IN = 16, RFT_MAX_LIST = 64 };

/* The layout of an operand in memory. */
typedef enum rft_layout {
  RFT_DENSE,
  RFT_TRANSPOSED, /* the last two dimensions swapped */
  RFT_EVERY2,     /* every second element of a row */
  RFT_GAPS,       /* dense rows with gaps between them */
  RFT_REVERSED,   /* all dimensions in reverse order */
  RFT_REPEATED,   /* stride 0 in the first dimension; further ones follow */
  RFT_ONE_VALUE,  /* stride 0 in every dimension */
} rft_layout;

typedef struct rft_operand {
  char kind;     /* f F h e g p D i I b _ */
  rfr_type type; /* rank -1: absent */
  rft_layout layout;
  bool positive, constant;
  double value; /* value of a constant operand */
  bool has_row; /* all elements of row `row` are this non-finite value */
  int64_t row;
  double row_value;
  int64_t below; /* limit of random integers; 0: none */
  int n_list;
  double list[RFT_MAX_LIST]; /* given values */
} rft_operand;

typedef struct rft_case {
  const char *text;
  uint64_t key; /* seed of its random values: a hash of the text */
  const rfi_op_def *def;
  int n_in;
  rft_operand in[RFT_MAX_IN];
  rfi_attr attr[RFI_MAX_ATTR];
  double numbers[32]; /* values of a list; a case has at most one list */
  int32_t microbatch;
  rfr_type out[RFI_MAX_NAMES]; /* results, inferred */
  bool varies;                 /* some operand has the type under test */
} rft_case;

/* For references: rounds x to the type of the op's first result, for values that the op itself rounds. */
double rft_round(double x);

/* Parses a case for a type under test and infers its results. Returns NULL, or the mistake. */
const char *rft_case_parse(const char *text, rfr_dtype under_test, rft_case *out);

#endif
