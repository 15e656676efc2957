/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels against their references, and checks of their memory accesses.
 *
 * The tolerance. r is the reference in f64 of the operands as stored (rounded to their types), y the kernel's result of
 * type D. The plain low-precision computation takes the same operands, computes in f32 and rounds once to D; its error
 * has two parts:
 *
 *   rounding     half a unit in the last place of D at each r: at most that, and its
 *                1/sqrt(3) in the mean square
 *   arithmetic   the error of f32: the largest of those measured with the reference's loops
 *                in f32 (op_plain.h), and with the reference in f64 after each float operand
 *                element was changed at random by up to 2^-23 of itself, and after all of an
 *                operand was, as the rounding of a constant factor does. A single f32 run may
 *                be exact by chance, especially for a scalar result. Plus 2^-24 of r, for
 *                functions that are flat at the probes.
 *                If an op keeps intermediates in the type under test (the logits' gradient in
 *                the LM head), as the ops that it replaces do, 2^-23 is half that type's unit.
 *
 * The kernel may have twice the sum, in the relative L2 norm and in the maximum: sums kept in bf16 are far outside. Ops
 * that only move values must give the reference rounded once, bit for bit, and integers must be equal.
 *
 * With a sanitizer the kernels run in the same layouts, but their results are not compared with references: these took
 * half of the time, and a build without sanitizers compares the results of the same kernels.
 */
#include "support/op_check.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "ops/loss/head.h"
#include "support/thin.h"

int rft_isas(const char *isas[3]) {
  static const char *const names[] = {"v4", "v3", "v2"};
  int n = 0;
  for (int i = 0; i < 3; i++) {
    rfr_ctx_options o = rfr_ctx_options_default();
    rfr_ctx *ctx;
    o.isa = names[i];
    if (rfr_ctx_create(&o, &ctx) == RFR_OK) isas[n++] = names[i];
    rfr_ctx_destroy(ctx);
  }
  return n;
}

void rft_cell_fail(rft_cell *cell, const rft_case *c, rfr_dtype type, const char *format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  cell->failed++;
  fprintf(stderr, "FAIL %s: %s: %s\n", rfr_dtype_name(type), c->text, text);
}

/* ---- the tolerance ---- */

static bool moves_values(rfi_opcode code) {
  switch (code) {
    case RFI_OP_embedding:
    case RFI_OP_quantize:
    case RFI_OP_grouped_quantize:
    case RFI_OP_collect_amax:
    case RFI_OP_scale_update: /* tolerance 0: the formula determines the result bitwise */
    case RFI_OP_dequantize:
    case RFI_OP_transposed:
    case RFI_OP_permute_codes:
    case RFI_OP_cast:
    case RFI_OP_copy:
    case RFI_OP_fill:
    case RFI_OP_max:
    case RFI_OP_max_bwd:
    case RFI_OP_pad:
    case RFI_OP_concat:
    case RFI_OP_cache_write:
    case RFI_OP_ring_read:
    case RFI_OP_metrics_write: return true;
    default: return false;
  }
}

static bool has_narrow_intermediates(rfi_opcode code) {
  return rfi_is_head(code) || code == RFI_OP_grouped_swiglu || code == RFI_OP_lora_matmul ||
         code == RFI_OP_matmul_gelu_bwd || code == RFI_OP_layernorm_bwd;
}

static int mantissa(rfr_dtype d) {
  switch (d) {
    case RFR_E5M2: return 3;
    case RFR_E4M3: return 4;
    case RFR_BF16: return 8;
    case RFR_F16: return 11;
    case RFR_F32: return 24;
    default: return 53;
  }
}
static double half_ulp(rfr_dtype d, double x) {
  /* exponent of the smallest normal number, as from frexp */
  const int lowest = d == RFR_E4M3 ? -5 : d == RFR_F16 || d == RFR_E5M2 ? -13 : d == RFR_F64 ? -1021 : -125;
  int e;
  frexp(x, &e);
  return ldexp(0.5, (e > lowest ? e : lowest) - mantissa(d));
}
static double rounded(rfr_dtype d, double x) {
  if (d == RFR_F64) return x;
  return d == RFR_F32 ? (float)x : rfr_float_from_bits(d, rfr_float_to_bits(d, (float)x));
}

/* The plain computation in f32, and two probes with changed operands. */
enum { N_PROBES = 3 };

/* Sums and maxima over the finite elements of one result. */
typedef struct error {
  double square, max;
} error;

static void error_add(error *e, double d) {
  e->square += d * d;
  if (fabs(d) > e->max) e->max = fabs(d);
}

/* The error that the plain computation may have. */
static void plain_error(const rfi_arg *r, const rfi_arg *const probe[N_PROBES], rfr_dtype type, error *plain) {
  error rounding = {0}, arithmetic[N_PROBES] = {{0}}, size = {0};
  double square = 0, max = 0;
  int64_t n = rfi_count(&r->type);
  for (int64_t i = 0; i < n; i++) {
    double x = rft_get(r, i);
    if (!isfinite(x)) continue;
    error_add(&size, x);
    error_add(&rounding, half_ulp(type, x));
    for (int k = 0; k < N_PROBES; k++) error_add(&arithmetic[k], rft_get(probe[k], i) - x);
  }
  for (int k = 0; k < N_PROBES; k++) {
    square = fmax(square, arithmetic[k].square);
    max = fmax(max, arithmetic[k].max);
  }
  double l2 = sqrt(rounding.square / 3) + sqrt(square) + 0x1p-24 * sqrt(size.square);
  *plain = (error){l2 * l2, rounding.max + max + 0x1p-24 * size.max};
}

/* Compares one result; raises cell->worst. */
static void compare(const rft_case *c, int j, const rfi_arg *y, const rfi_arg *r, const error *plain, const char *where,
                    rfr_dtype type, rft_cell *cell) {
  const char *name = c->def->result[j];
  bool integer = !rfr_dtype_is_float(y->type.dtype), exact = moves_values(c->def->code);
  error e = {0}, size = {0};
  for (int64_t i = 0; i < rfi_count(&y->type); i++) {
    double a = rft_get(y, i), b = rft_get(r, i);
    bool same = a == b || (isnan(a) && isnan(b));
    if (!integer && exact && !isnan(b)) same = a == rounded(y->type.dtype, b);
    if ((integer || exact || !isfinite(b)) ? !same : !isfinite(a)) {
      rft_cell_fail(cell, c, type, "%s: %s[%lld] is %.9g, want %.9g", where, name, (long long)i, a, b);
      return;
    }
    if (!isfinite(b)) continue;
    error_add(&e, a - b);
    error_add(&size, b);
  }
  if (integer || exact) return;
  double l2 = sqrt(e.square), bar_l2 = 2 * sqrt(plain->square), bar_max = 2 * plain->max;
  double ratio = fmax(bar_l2 > 0 ? l2 / bar_l2 : 0, bar_max > 0 ? e.max / bar_max : 0);
  if (ratio > cell->worst) cell->worst = ratio;
  if (!(l2 <= bar_l2) || !(e.max <= bar_max))
    rft_cell_fail(cell, c, type, "%s: %s has relative L2 error %.3g (bar %.3g), largest error %.3g (bar %.3g)", where,
                  name, l2 / fmax(sqrt(size.square), DBL_MIN), bar_l2 / fmax(sqrt(size.square), DBL_MIN), e.max,
                  bar_max);
}

/* ---- reference ---- */

/* The references of a case and the operands that they were computed from. */
typedef struct standard {
  char *text; /* NULL: there is none */
  rfr_dtype type;
  unsigned results; /* bit j: result j exists */
  int64_t n;
  double *operands; /* n elements, of all operands; 64-bit integers keep their bits */
  rft_reference ref;
  error plain[RFI_MAX_NAMES];
} standard;

static double *operands_of(const rft_run *run, int64_t *n) {
  *n = 0;
  for (int i = 0; i < run->c->n_in; i++) *n += run->in_arg[i].data ? rfi_count(&run->in_arg[i].type) : 0;
  double *x = calloc((size_t)*n + 1, sizeof *x), *to = x;
  if (!x) abort();
  for (int i = 0; i < run->c->n_in; i++) {
    const rfi_arg *a = &run->in_arg[i];
    for (int64_t k = 0; a->data && k < rfi_count(&a->type); k++, to++) {
      *to = rft_get(a, k);
      if (a->type.dtype == RFR_I64) memcpy(to, (const char *)a->data + 8 * rft_offset(a, k), sizeof *to);
    }
  }
  return x;
}

static void compute(standard *s, const rft_op *op, const rft_run *run) {
  rft_reference probe[N_PROBES];
  double unit = has_narrow_intermediates(op->def->code) ? ldexp(1, -mantissa(s->type)) : 0x1p-23;
  rft_reference_init(&s->ref, run, op->ref, RFR_F64, 0, 0);
  if (moves_values(op->def->code)) return; /* compared without a tolerance */
  rft_reference_init(&probe[0], run, op->plain, RFR_F32, 0, 0);
  rft_reference_init(&probe[1], run, op->ref, RFR_F64, unit, 0);
  rft_reference_init(&probe[2], run, op->ref, RFR_F64, 0, unit);
  for (int j = 0; j < op->def->n_results; j++) {
    const rfi_arg *const results[] = {&probe[0].out_arg[j], &probe[1].out_arg[j], &probe[2].out_arg[j]};
    rfr_dtype out = run->c->out[j].dtype;
    if (run->out_arg[j].data && rfr_dtype_is_float(out)) plain_error(&s->ref.out_arg[j], results, out, &s->plain[j]);
  }
  for (int k = 0; k < N_PROBES; k++) rft_reference_deinit(&probe[k]);
}

/* The references of a run. The last ones are kept, because most layouts of a case have the same operands, and several
 * checks need them. To compute them for each check took most of the time of ops_test. NULL with a sanitizer. */
static const standard *standard_of(const rft_op *op, const rft_run *run, rfr_dtype type) {
  static standard last;
  if (RFT_LEFT_OUT(1, 2)) return NULL;
  unsigned results = 0;
  int64_t n;
  double *operands = operands_of(run, &n);
  for (int j = 0; j < op->def->n_results; j++) results |= (unsigned)(run->out_arg[j].data != NULL) << j;
  if (last.text && strcmp(last.text, run->c->text) == 0 && last.type == type && last.results == results &&
      last.n == n && memcmp(last.operands, operands, (size_t)n * sizeof *operands) == 0) {
    free(operands);
    return &last;
  }
  if (last.text) rft_reference_deinit(&last.ref);
  free(last.text);
  free(last.operands);
  last = (standard){.text = strdup(run->c->text), .type = type, .results = results, .n = n, .operands = operands};
  if (!last.text) abort();
  compute(&last, op, run);
  return &last;
}

static void compare_all(const standard *s, const rft_case *c, const rfi_arg *out, const char *where, rfr_dtype type,
                        rft_cell *cell) {
  for (int j = 0; s && j < c->def->n_results; j++)
    if (out[j].data) compare(c, j, &out[j], &s->ref.out_arg[j], &s->plain[j], where, type, cell);
}

static void check_layout(const rft_op *op, const rft_case *c, rfr_dtype type, const rft_layout_row *row,
                         const char *const *isas, int n_isas, rft_cell *cell) {
  rft_run run;
  rft_run_init(&run, c, row->layout, 0xFF, 0);
  const standard *s = standard_of(op, &run, type);
  for (int k = 0; k < n_isas; k++) {
    char place[64];
    snprintf(place, sizeof place, "%s%s", isas[k], row->where);
    if (k > 0) {
      rft_run_deinit(&run);
      rft_run_init(&run, c, row->layout, 0xFF, 0);
    }
    const rfi_kernel *kernel = rfi_cpu_kernel(isas[k], op->def->code);
    const char *wrong = kernel ? rft_run_kernel(&run, kernel, k == 0 ? 2 : 1) : "there is no kernel";
    if (wrong) rft_cell_fail(cell, c, type, "%s: %s", place, wrong);
    else compare_all(s, c, run.out_arg, place, type, cell);
    cell->done++;
  }
  rft_run_deinit(&run);
}

void rft_check_results(const rft_op *op, const rft_run *run, rfr_dtype type, const rfi_arg *out, const char *where,
                       rft_cell *cell) {
  compare_all(standard_of(op, run, type), run->c, out, where, type, cell);
}

void rft_check_reference(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  const char *isas[3];
  int n = rft_isas(isas);
  for (int k = 0; k < RFT_LAYOUTS; k++) {
    const rft_layout_row *row = &rft_layout_rows[k];
    if (rft_layout_applies(c, row)) check_layout(op, c, type, row, isas, row->layout == RFT_DENSE ? n : 1, cell);
  }
}

/* ---- memory accesses ---- */

/* Whether the results that both runs have are bitwise equal; *which: the first one that is not. */
static bool same_bits(const rft_run *a, const rft_run *b, int *which) {
  for (*which = 0; *which < a->c->def->n_results; ++*which) {
    const rfi_arg *x = &a->out_arg[*which], *y = &b->out_arg[*which];
    if (x->data && y->data && memcmp(x->data, y->data, (size_t)rfi_bytes(&x->type)) != 0) return false;
  }
  return true;
}

static void check_against(const rft_op *op, const rft_case *c, rfr_dtype type, const rfi_kernel *kernel,
                          const rft_run *first, unsigned char garbage, unsigned dead, const char *what,
                          rft_cell *cell) {
  rft_run run;
  int which;
  rft_run_init(&run, c, RFT_DENSE, garbage, dead);
  const char *wrong = rft_run_kernel(&run, kernel, 3);
  if (wrong) rft_cell_fail(cell, c, type, "%s: %s", what, wrong);
  else if (!same_bits(first, &run, &which))
    rft_cell_fail(cell, c, type, "%s: other bits in %s", what, op->def->result[which]);
  rft_run_deinit(&run);
  cell->done++;
}

void rft_check_bounds(const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  const char *isas[3];
  int n = rft_isas(isas);
  for (int k = 0; k < n; k++) {
    const rfi_kernel *kernel = rfi_cpu_kernel(isas[k], op->def->code);
    if (!kernel) continue; /* the reference check reports this */
    rft_run first;
    rft_run_init(&first, c, RFT_DENSE, 0xFF, 0);
    const char *wrong = rft_run_kernel(&first, kernel, 3);
    if (wrong) rft_cell_fail(cell, c, type, "%s: %s", isas[k], wrong);
    check_against(op, c, type, kernel, &first, 0xA5, 0, "over other garbage", cell);
    if (op->def->n_results > 1 && !(op->def->flags & RFI_STATE))
      for (int j = 0; j < op->def->n_results; j++)
        check_against(op, c, type, kernel, &first, 0x3C, 1u << j, "one result dead", cell);
    rft_run_deinit(&first);
  }
}
