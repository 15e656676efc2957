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

/* A check ran `done` times, failed `failed` times and found no kernel `refused` times; or it did not apply, and `word`
 * says why. */
typedef struct rft_cell {
  int done, failed, refused;
  double worst; /* largest error divided by its tolerance: below 1 if nothing failed */
  char word[32];
} rft_cell;

/* The instruction sets of this machine, best first; returns their number. */
int rft_isas(const char *isas[3]);

/* Counts a failure and prints why, with op, type and case. */
void rft_cell_fail(rft_cell *cell, const rft_case *c, rfr_dtype type, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Kernels against the reference in f64: every instruction set and, if the op takes them, operands with gaps,
 * transposed, every second element, broadcast. */
void rft_check_reference(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* The same tolerance for dense results that another computation made from the run's operands. */
void rft_check_results(const rft_op *op, const rft_run *run, rfr_dtype type, const rfi_arg *out, const char *where,
                       rft_cell *cell);
/* The gradient rule against central differences, in f64; `word` says why there is none. */
void rft_check_gradient(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* A compiled program of the op alone, with operands in all layouts that the op takes. Eager is compared with the
 * reference; captured and replayed twice, in debug mode, and with one result unused, the bits must be the same. */
void rft_check_replay(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* The same programs, only compiled: there is a kernel for the op, types and layouts, and a plan. */
void rft_check_bind(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* One eager run of the dense case between guards, against the reference: for tools under which launches are slow. */
void rft_check_guarded(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);
/* Nothing outside results and workspace is written, no operand changes, and results have the same bits for any previous
 * contents of memory and any other result unused. */
void rft_check_bounds(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell);

#endif
