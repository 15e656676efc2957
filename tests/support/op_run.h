/* SPDX-License-Identifier: Apache-2.0
 *
 * Running a case: its operands in guarded memory, the kernel, the reference in f64.
 *
 * Values are a pure function of the case's text, the operand and the element, so every run of a case has the same ones,
 * in any layout. Results, workspace, gaps between strided rows and guards contain garbage before the run: unwritten
 * elements show, and a read out of bounds makes the result depend on the garbage.
 */
#ifndef RFT_OP_RUN_H
#define RFT_OP_RUN_H

#include "support/op_case.h"

/* The layouts of a case, each with the flags of ops that support it (0: all ops). */
enum { RFT_LAYOUTS = 7 };
typedef struct rft_layout_row {
  rft_layout layout;
  unsigned flags;
  const char *where; /* for messages: "", ", transposed" */
} rft_layout_row;
extern const rft_layout_row rft_layout_rows[RFT_LAYOUTS];

/* The layout of operand i when a case runs with a layout: that of the case's text if given, otherwise this one if it
 * applies. */
rft_layout rft_operand_layout(const rft_case *c, int i, rft_layout layout);
/* Whether the op supports the layout and it applies to some operand. */
bool rft_layout_applies(const rft_case *c, const rft_layout_row *row);

typedef struct rft_buffer {
  unsigned char *block, *data;
  size_t bytes;
} rft_buffer;

typedef struct rft_run {
  const rft_case *c;
  unsigned char garbage;
  rft_buffer in[RFT_MAX_IN], out[RFI_MAX_NAMES], workspace;
  rfi_arg in_arg[RFT_MAX_IN], out_arg[RFI_MAX_NAMES]; /* aliased results point to their operand */
  rfi_call call;
} rft_run;

/* `dead`: bit j marks result j. */
void rft_run_init(rft_run *run, const rft_case *c, rft_layout layout, unsigned char garbage, unsigned dead);
void rft_run_deinit(rft_run *run);
/* Runs the kernel of an instruction set. Returns NULL, or the failure: its status, a write outside its results and
 * workspace, or a changed operand. */
const char *rft_run_kernel(rft_run *run, const rfi_kernel *kernel, int threads);
/* Element i of operand `operand`, not rounded to its type: a number in [-2, 2) determined by case, stream and i. */
double rft_case_value(const rft_case *c, int operand, int64_t i);
double rft_random(const rft_case *c, int stream, int64_t i);
/* Where dense element i of an argument lies, in elements. */
int64_t rft_offset(const rfi_arg *a, int64_t i);
/* Dense element i of an argument as a double, in any layout. */
double rft_get(const rfi_arg *a, int64_t i);
void rft_set(const rfi_arg *a, int64_t i, double x);

/* The case in f64 (or, plain, in f32), from the float operands that `run` has before its kernel ran, each multiplied by
 * 1 + u: u is random up to `own` for each element, plus `common` or -common for all elements of an operand. */
typedef void (*rft_ref_fn)(const rfi_call *call);
typedef struct rft_reference {
  void *in[RFT_MAX_IN], *out[RFI_MAX_NAMES]; /* malloc'ed; aliased results share their operand's memory */
  rfi_arg in_arg[RFT_MAX_IN], out_arg[RFI_MAX_NAMES];
  int n_in, n_out;
} rft_reference;
void rft_reference_init(rft_reference *ref, const rft_run *run, rft_ref_fn fn, rfr_dtype real, double own,
                        double common);
void rft_reference_deinit(rft_reference *ref);

#endif
