/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs of one op, on the device that REFRAIN_DEVICE names. Operands have every layout that the op takes: as inputs
 * seen through views. The eager result is compared with the reference; captured and replayed twice, compiled for
 * debugging (guards around every value, poison in dead buffers), and with each result unused, the program must give the
 * same bits.
 *
 * Host memory is written to inputs and read from outputs only by copies. Before each run the inputs are written and the
 * outputs filled with garbage, so a run that does nothing is detected.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/program.h"
#include "support/op_check.h"

typedef struct trial { /* one program of a case */
  const rft_case *c;
  const rft_run *run; /* its operands */
  unsigned dead;      /* bit j: result j is not an output */
  rfr_trace *t;
  rfr_programs *p;
  rfi_arg view[RFT_MAX_IN]; /* strides of an operand within its input */
  int64_t offset[RFT_MAX_IN];
} trial;

typedef struct results {
  rfi_arg y[RFI_MAX_NAMES]; /* data is malloc'ed; NULL: unused */
} results;

static void *must(void *memory) {
  if (memory) return memory;
  fputs("out of memory\n", stderr);
  exit(1);
}

/* ---- recording ---- */

static bool is_alias(const rft_case *c, int operand) {
  for (int j = 0; j < c->def->n_results; j++)
    if (c->def->alias[j] == operand) return true;
  return false;
}

/* Records an input that is large enough for a value of the type in this layout, including gaps, and the views that
 * select the value. */
static rfr_value record_operand(rfr_trace *t, const char *name, rfr_role role, const rfr_type *type,
                                rft_layout layout) {
  rfr_type in = *type;
  const int r = type->rank;
  for (int d = 0; d < r; d++) {
    if (layout == RFT_REVERSED) in.shape[d] = type->shape[r - 1 - d];
    if (layout == RFT_GAPS && d > 0) in.shape[d] += 3;
    if (layout == RFT_ONE_VALUE || (layout == RFT_REPEATED && d == 0)) in.shape[d] = 1;
  }
  if (layout == RFT_TRANSPOSED) in.shape[r - 1] = type->shape[r - 2], in.shape[r - 2] = type->shape[r - 1];
  if (layout == RFT_EVERY2) in.shape[in.rank++] = 2;
  rfr_value x = rfr_input(t, name, role, in.dtype, in.rank, in.shape);
  if (layout == RFT_TRANSPOSED) x = rfr_transpose(t, x, r - 2, r - 1);
  for (int d = 0; layout == RFT_REVERSED && d < r / 2; d++) x = rfr_transpose(t, x, d, r - 1 - d);
  if (layout == RFT_EVERY2) x = rfr_reshape(t, rfr_slice(t, x, r, 0, 1), r, type->shape);
  for (int d = 1; layout == RFT_GAPS && d < r; d++) x = rfr_slice(t, x, d, 1, type->shape[d]);
  for (int d = 0; d < r; d++)
    if (in.shape[d] == 1 && type->shape[d] != 1 && (layout == RFT_ONE_VALUE || layout == RFT_REPEATED))
      x = rfr_expand(t, x, d, type->shape[d]);
  return x;
}

static rfr_status record(trial *trial, rft_layout layout) {
  const rft_case *c = trial->c;
  rfr_trace *t = trial->t;
  rfr_value in[RFT_MAX_IN], out[RFI_MAX_NAMES];
  char name[16];
  for (int i = 0; i < c->n_in; i++) {
    const rfr_type *type = &c->in[i].type;
    snprintf(name, sizeof name, "x%d", i);
    in[i] = RFR_NONE;
    if (type->rank < 0) continue;
    in[i] = record_operand(t, name, is_alias(c, i) ? RFR_ROLE_STATE : RFR_ROLE_INPUT, type,
                           rft_operand_layout(c, i, layout));
    if (in[i] < 0) return rfr_trace_finish(t);
    trial->view[i].type = *type;
    memcpy(trial->view[i].stride, t->values[in[i]].stride, sizeof trial->view[i].stride);
    trial->offset[i] = t->values[in[i]].offset;
  }
  rfr_microbatch(t, c->microbatch);
  rfi_record(t, RFR_HERE, c->def->code, c->n_in, in, c->attr, out);
  for (int j = 0; j < c->def->n_results; j++) {
    snprintf(name, sizeof name, "y%d", j);
    if (out[j] >= 0 && !(trial->dead & 1u << j)) rfr_output(t, name, out[j]);
  }
  return rfr_trace_finish(t);
}

static rfr_status trial_init(trial *trial, rfr_ctx *ctx, const rft_run *run, rft_layout layout, unsigned dead,
                             int debug) {
  rfr_compile_options o = rfr_compile_options_default();
  *trial = (struct trial){.c = run->c, .run = run, .dead = dead};
  o.debug = debug;
  rfr_status s = rfr_trace_create(ctx, &trial->t);
  if (s == RFR_OK) s = record(trial, layout);
  if (s == RFR_OK)
    s = rfr_compile(ctx, 1, (const rfr_trace *const[]){trial->t}, (const char *const[]){"op"}, &o, &trial->p);
  return s;
}

static void trial_deinit(trial *trial) {
  rfr_programs_destroy(trial->p);
  rfr_trace_destroy(trial->t);
}

/* ---- values ---- */

static rfr_status poison_output(rfr_programs *p, const rfr_tensor *y) {
  void *garbage = must(malloc((size_t)y->bytes + 1));
  memset(garbage, 0xFF, (size_t)y->bytes);
  rfr_status s = rfr_programs_write(p, y, garbage);
  free(garbage);
  return s;
}

static rfr_status write_operand(const trial *trial, int i, const rfr_tensor *x) {
  rfi_arg view = trial->view[i];
  char *storage = must(malloc((size_t)x->bytes + 1));
  memset(storage, 0xFF, (size_t)x->bytes);
  view.data = storage + trial->offset[i] * rfr_dtype_bits(x->type.dtype) / 8;
  for (int64_t k = rfi_count(&view.type) - 1; k >= 0; k--) rft_set(&view, k, rft_get(&trial->run->in_arg[i], k));
  rfr_status s = rfr_programs_write(trial->p, x, storage);
  free(storage);
  return s;
}

/* Fills the outputs with garbage before it writes the inputs, because some outputs share an input's storage. */
static rfr_status prepare(const trial *trial) {
  const rft_case *c = trial->c;
  rfr_status s = RFR_OK;
  rfr_tensor x;
  char name[16];
  for (int j = 0; j < c->def->n_results && c->n_in > 0; j++) { /* an op without operands runs once, at load */
    snprintf(name, sizeof name, "y%d", j);
    if (s == RFR_OK && rfr_program_output(trial->p, 0, name, &x) == RFR_OK) s = poison_output(trial->p, &x);
  }
  for (int i = 0; i < c->n_in && s == RFR_OK; i++) {
    if (c->in[i].type.rank < 0) continue;
    snprintf(name, sizeof name, "x%d", i);
    s = rfr_programs_tensor(trial->p, name, &x);
    if (s == RFR_OK) s = write_operand(trial, i, &x);
  }
  return s;
}

static rfr_status results_init(results *r, const trial *trial) {
  rfr_status s = RFR_OK;
  *r = (results){0};
  for (int j = 0; j < trial->c->def->n_results && s == RFR_OK; j++) {
    rfr_tensor y;
    char name[16];
    snprintf(name, sizeof name, "y%d", j);
    if (rfr_program_output(trial->p, 0, name, &y) != RFR_OK) continue;
    rfi_value dense = {.type = y.type};
    rfi_dense_strides(&dense);
    r->y[j] = (rfi_arg){.data = must(malloc((size_t)y.bytes + 1)), .type = y.type};
    memcpy(r->y[j].stride, dense.stride, sizeof dense.stride);
    s = rfr_programs_read(trial->p, &y, r->y[j].data);
  }
  return s;
}

static void results_deinit(results *r) {
  for (int j = 0; j < RFI_MAX_NAMES; j++) free(r->y[j].data);
}

/* ---- runs ---- */

/* Reads the results of the last run and compares them bitwise with `kept`. */
static rfr_status compare(const trial *trial, const results *kept, rfr_dtype type, const char *what, rft_cell *cell) {
  results r;
  rfr_status s = results_init(&r, trial);
  for (int j = 0; j < RFI_MAX_NAMES && s == RFR_OK; j++)
    if (r.y[j].data && kept->y[j].data && memcmp(r.y[j].data, kept->y[j].data, (size_t)rfi_bytes(&r.y[j].type)) != 0)
      rft_cell_fail(cell, trial->c, type, "%s: other bits than eager in %s", what, trial->c->def->result[j]);
  results_deinit(&r);
  return s;
}

static rfr_status run_eager(trial *trial) {
  rfr_status s = prepare(trial);
  if (s == RFR_OK) s = rfr_programs_load(trial->p);
  if (s == RFR_OK) s = rfr_program_run(trial->p, 0);
  return s;
}

/* Compiles and runs the program in another form, which must be bitwise equal. */
static rfr_status run_variant(rfr_ctx *ctx, const rft_run *run, const results *kept, unsigned dead, int debug,
                              rfr_dtype type, const char *what, rft_cell *cell) {
  trial trial;
  rfr_status s = trial_init(&trial, ctx, run, RFT_DENSE, dead, debug);
  if (s == RFR_OK) s = run_eager(&trial);
  if (s == RFR_OK) s = compare(&trial, kept, type, what, cell);
  trial_deinit(&trial);
  return s;
}

static rfr_status replay_twice(trial *trial, const results *kept, rfr_dtype type, const char *where, rft_cell *cell) {
  rfr_status s = rfr_program_capture(trial->p, 0);
  for (int k = 0; k < 2 && s == RFR_OK; k++) {
    char what[64];
    snprintf(what, sizeof what, "replay %d%s", k + 1, where);
    s = prepare(trial);
    if (s == RFR_OK) s = rfr_program_replay(trial->p, 0, NULL, 0);
    if (s == RFR_OK) s = compare(trial, kept, type, what, cell);
  }
  return s;
}

/* Debug mode refuses non-finite values, which some cases test. */
static bool is_finite(const results *r) {
  for (int j = 0; j < RFI_MAX_NAMES; j++)
    for (int64_t k = 0; r->y[j].data && k < rfi_count(&r->y[j].type); k++)
      if (!isfinite(rft_get(&r->y[j], k))) return false;
  return true;
}

static rfr_status check_layout(rfr_ctx *ctx, const rft_op *op, const rft_run *run, rfr_dtype type,
                               const rft_layout_row *row, rft_cell *cell) {
  const rfi_op_def *def = op->def;
  trial trial;
  results kept = {0};
  rfr_status s = trial_init(&trial, ctx, run, row->layout, 0, 0);
  if (s == RFR_OK) s = run_eager(&trial);
  if (s == RFR_OK) s = results_init(&kept, &trial);
  if (s == RFR_OK) {
    char where[64];
    snprintf(where, sizeof where, "compiled%s", row->where);
    rft_check_results(op, run, type, kept.y, where, cell);
    s = replay_twice(&trial, &kept, type, row->where, cell);
  }
  if (row->layout == RFT_DENSE) {
    if (s == RFR_OK && is_finite(&kept)) s = run_variant(ctx, run, &kept, 0, 1, type, "debugging", cell);
    int made = 0;
    for (int j = 0; j < def->n_results; j++) made += kept.y[j].data != NULL;
    for (int j = 0; j < def->n_results && made > 1 && !(def->flags & RFI_STATE); j++)
      if (s == RFR_OK) s = run_variant(ctx, run, &kept, 1u << j, 0, type, "one result dead", cell);
  }
  results_deinit(&kept);
  trial_deinit(&trial);
  return s;
}

void rft_check_bind(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  rfr_ctx *ctx;
  (void)op;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) abort();
  for (int k = 0; k < RFT_LAYOUTS; k++) {
    const rft_layout_row *row = &rft_layout_rows[k];
    rft_run run;
    trial trial;
    if (!rft_layout_applies(c, row)) continue;
    rft_run_init(&run, c, row->layout, 0xFF, 0);
    if (trial_init(&trial, ctx, &run, row->layout, 0, 0) != RFR_OK)
      rft_cell_fail(cell, c, type, "compiled%s: %s", row->where, rfr_last_error()->message);
    cell->done++;
    trial_deinit(&trial);
    rft_run_deinit(&run);
  }
  rfr_ctx_destroy(ctx);
}

static void count_check(rfr_status s, const rft_case *c, rfr_dtype type, const char *where, rft_cell *cell) {
  if (s != RFR_OK && strcmp(rfr_last_error()->slug, "bind.no_kernel") == 0) {
    cell->refused++;
    return;
  }
  if (s != RFR_OK) rft_cell_fail(cell, c, type, "compiled%s: %s", where, rfr_last_error()->message);
  cell->done++;
}

void rft_check_replay(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  rfr_ctx *ctx;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) abort();
  for (int k = 0; k < RFT_LAYOUTS; k++) {
    const rft_layout_row *row = &rft_layout_rows[k];
    rft_run run;
    if (!rft_layout_applies(c, row)) continue;
    rft_run_init(&run, c, row->layout, 0xFF, 0);
    rfr_status s = check_layout(ctx, op, &run, type, row, cell);
    rft_run_deinit(&run);
    count_check(s, c, type, row->where, cell);
  }
  rfr_ctx_destroy(ctx);
}

static rfr_status check_guarded(rfr_ctx *ctx, const rft_op *op, const rft_run *run, rfr_dtype type, int debug,
                                rft_cell *cell) {
  trial trial;
  results y = {0};
  rfr_status s = trial_init(&trial, ctx, run, RFT_DENSE, 0, debug);
  if (s == RFR_OK) s = run_eager(&trial);
  if (s == RFR_OK) s = results_init(&y, &trial);
  if (s == RFR_OK) rft_check_results(op, run, type, y.y, debug ? "guarded" : "compiled", cell);
  results_deinit(&y);
  trial_deinit(&trial);
  return s;
}

void rft_check_guarded(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  rfr_ctx *ctx;
  rft_run run;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) abort();
  rft_run_init(&run, c, RFT_DENSE, 0xFF, 0);
  rfr_status s = check_guarded(ctx, op, &run, type, 1, cell);
  if (s == RFR_NUMERIC) s = check_guarded(ctx, op, &run, type, 0, cell); /* some cases test non-finite values */
  rft_run_deinit(&run);
  count_check(s, c, type, "", cell);
  rfr_ctx_destroy(ctx);
}
