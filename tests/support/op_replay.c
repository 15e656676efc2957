/* SPDX-License-Identifier: Apache-2.0
 *
 * A program of one op: eager, captured and replayed, and replayed again must give the same
 * bits, in results and in the states that the op writes. Before each run the inputs are
 * written anew and the outputs filled with garbage, so a replay that does nothing is seen.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/program.h"
#include "support/op_check.h"

static bool is_alias(const rft_case *c, int operand) {
  for (int j = 0; j < c->def->n_results; j++)
    if (c->def->alias[j] == operand) return true;
  return false;
}

static rfr_status record(rfr_trace *t, const rft_case *c) {
  rfr_value in[RFT_MAX_IN], out[RFI_MAX_NAMES];
  char name[16];
  for (int i = 0; i < c->n_in; i++) {
    const rfr_type *type = &c->in[i].type;
    snprintf(name, sizeof name, "x%d", i);
    in[i] = RFR_NONE;
    if (type->rank >= 0)
      in[i] =
          rfr_input(t, name, is_alias(c, i) ? RFR_ROLE_STATE : RFR_ROLE_INPUT, type->dtype, type->rank, type->shape);
  }
  rfr_microbatch(t, c->microbatch);
  rfi_record(t, RFR_HERE, c->def->code, c->n_in, in, c->attr, out);
  for (int j = 0; j < c->def->n_results; j++) {
    snprintf(name, sizeof name, "y%d", j);
    if (out[j] >= 0) rfr_output(t, name, out[j]);
  }
  return rfr_trace_finish(t);
}

static rfi_arg dense_arg(const rfr_tensor *x) {
  rfi_value dense = {.type = x->type};
  rfi_arg a = {.data = x->data, .type = x->type};
  rfi_dense_strides(&dense);
  memcpy(a.stride, dense.stride, sizeof a.stride);
  return a;
}

/* Garbage into the outputs, then values into the inputs: some outputs are inputs' storage. */
static rfr_status prepare(rfr_programs *p, const rft_case *c) {
  rfr_tensor x;
  char name[16];
  for (int j = 0; j < c->def->n_results && c->n_in > 0; j++) { /* an op without operands runs once, at load */
    snprintf(name, sizeof name, "y%d", j);
    if (rfr_program_output(p, 0, name, &x) == RFR_OK) memset(x.data, 0xFF, (size_t)x.bytes);
  }
  for (int i = 0; i < c->n_in; i++) {
    if (c->in[i].type.rank < 0) continue;
    snprintf(name, sizeof name, "x%d", i);
    if (rfr_programs_tensor(p, name, &x) != RFR_OK) return RFR_INTERNAL;
    rfi_arg a = dense_arg(&x);
    for (int64_t k = 0; k < rfi_count(&x.type); k++) rft_set(&a, k, rft_case_value(c, i, k));
  }
  return RFR_OK;
}

/* Copies the results into kept[] (first) or compares them; the result that differs, or -1. */
static int keep_or_compare(rfr_programs *p, const rft_case *c, void *kept[RFI_MAX_NAMES], bool first) {
  for (int j = 0; j < c->def->n_results; j++) {
    rfr_tensor y;
    char name[16];
    snprintf(name, sizeof name, "y%d", j);
    if (rfr_program_output(p, 0, name, &y) != RFR_OK) continue;
    if (first) {
      kept[j] = malloc((size_t)y.bytes + 1);
      if (!kept[j]) abort();
      memcpy(kept[j], y.data, (size_t)y.bytes);
    } else if (memcmp(kept[j], y.data, (size_t)y.bytes) != 0) {
      return j;
    }
  }
  return -1;
}

/* A program's products may be the library's, which the kernel table knows nothing of. */
static void check_library(const rft_op *op, rfr_programs *p, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  rfi_arg out[RFI_MAX_NAMES] = {0};
  if (op->def->code != RFI_OP_matmul && op->def->code != RFI_OP_linear_cross_entropy) return;
  for (int j = 0; j < c->def->n_results; j++) {
    rfr_tensor y;
    char name[16];
    snprintf(name, sizeof name, "y%d", j);
    if (rfr_program_output(p, 0, name, &y) == RFR_OK) out[j] = dense_arg(&y);
  }
  rft_check_results(op, c, type, out, "compiled", cell);
}

static rfr_status run_three(const rft_op *op, rfr_programs *p, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  void *kept[RFI_MAX_NAMES] = {0};
  rfr_status s = prepare(p, c);
  if (s == RFR_OK) s = rfr_programs_load(p);
  if (s == RFR_OK) s = rfr_program_run(p, 0);
  if (s == RFR_OK) {
    keep_or_compare(p, c, kept, true);
    check_library(op, p, c, type, cell);
  }
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  for (int k = 0; k < 2 && s == RFR_OK; k++) {
    s = prepare(p, c);
    if (s == RFR_OK) s = rfr_program_replay(p, 0, NULL, 0);
    int other = s == RFR_OK ? keep_or_compare(p, c, kept, false) : -1;
    if (other >= 0)
      rft_cell_fail(cell, c, type, "replay %d: other bits than eager in %s", k + 1, c->def->result[other]);
  }
  for (int j = 0; j < c->def->n_results; j++) free(kept[j]);
  return s;
}

void rft_check_replay(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  rfr_ctx *ctx;
  rfr_trace *t = NULL;
  rfr_programs *p = NULL;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) abort();
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s == RFR_OK) s = record(t, c);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, (const char *const[]){"op"}, NULL, &p);
  if (s == RFR_OK) s = run_three(op, p, c, type, cell);
  if (s != RFR_OK) rft_cell_fail(cell, c, type, "replay: %s", rfr_last_error()->message);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
  cell->done++;
}
