/* SPDX-License-Identifier: Apache-2.0
 *
 * The checks of one op, type and case list: each fills a cell of the matrix.
 */
#ifndef RFT_OP_CHECK_H
#define RFT_OP_CHECK_H

#include "support/op_run.h"

typedef struct rft_op {
  const rfi_op_def *def;
  rft_ref_fn ref, plain;    /* in f64 and in f32; NULL: not found */
  rft_ref_fn operands;      /* NULL: random operands are used */
  const char *const *cases; /* NULL: not found */
} rft_op;

rft_op rft_op_get(rfi_opcode code);

/* The result of a check: it ran `done` times, failed `failed` times and found no kernel `refused` times; or it does not
 * apply, and `word` is the reason. */
typedef struct rft_cell {
  int done, failed, refused;
  double worst; /* largest error divided by its tolerance: below 1 if nothing failed */
  char word[32];
} rft_cell;

/* Lists the instruction sets of this machine, best first; returns their number. */
int rft_isas(const char *isas[3]);

/* Counts a failure and prints the reason, with op, type and case. */
void rft_cell_fail(rft_cell *cell, const rft_case *c, rfr_dtype type, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Compares kernels with the reference in f64: every instruction set and, if the op supports them, operands with gaps,
 * transposed, every second element, broadcast. */
void rft_check_reference(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* The same comparison for dense results that another computation made from the run's operands. */
void rft_check_results(const rft_op *op, const rft_run *run, rfr_dtype type, const rfi_arg *out, const char *where,
                       rft_cell *cell);
/* Compares the gradient rule with central differences, in f64; if that is impossible, `word` is the reason. */
void rft_check_gradient(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* Compiles the op alone as a program, with operands in all layouts that the op supports. Eager is compared with the
 * reference. Captured and replayed twice, in debug mode, and with one result unused, results must be bitwise equal. */
void rft_check_replay(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* The same programs, but only compiled: the op, its types and layouts must have a kernel and a plan. */
void rft_check_bind(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* One eager run of the dense case between guards, compared with the reference: for tools under which launches are
 * slow. */
void rft_check_guarded(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* Checks that nothing outside results and workspace is written, that no operand changes, and that results are bitwise
 * equal for any previous contents of memory and any unused other result. */
void rft_check_bounds(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);

#endif
