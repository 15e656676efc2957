/* SPDX-License-Identifier: Apache-2.0
 *
 * Every op, every type, every check: prints the matrix and fails on an empty or failing cell, on an op without a
 * reference, and on one with fewer than four cases. The checks are in support/op_check.h. The ops come from ops.def,
 * their references and cases from the X_ref.c next to the kernels, found by name, so that a new op cannot be forgotten.
 *
 * Arguments are names of the ops to check or, with a leading -, to leave out.
 *
 * With `--device cuda` (or REFRAIN_DEVICE) the matrix is that of the device: every op, every type that it supports,
 * through compiled programs. An op without a kernel there leaves empty cells and is listed below; the exit code is 1 if
 * a check failed, 77 if there is no such device. With cuda:none, a simulated GPU, programs are only compiled: every op
 * must have a kernel. `--guarded` before it runs each case once, between guards: every kernel that the cases reach,
 * with a fraction of the launches.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/device.h"
#include "support/op_check.h"

typedef void (*check_fn)(const rft_op *, const rft_case *, rfr_dtype, rft_cell *);

enum { MIN_CASES = 4, MOST_TYPES = 3, MOST_CHECKS = 4 };

typedef struct matrix {
  int n_types, n_checks;
  rfr_dtype types[MOST_TYPES];
  const char *titles[MOST_CHECKS];
  check_fn checks[MOST_CHECKS];
} matrix;

static const matrix kernels = {2,
                               4,
                               {RFR_F32, RFR_BF16},
                               {"reference", "gradient", "replay", "bounds"},
                               {rft_check_reference, rft_check_gradient, rft_check_replay, rft_check_bounds}};
static const matrix on_device = {3, 1, {RFR_F32, RFR_BF16, RFR_F16}, {"programs"}, {rft_check_replay}};

static const matrix guarded = {3, 1, {RFR_F32, RFR_BF16, RFR_F16}, {"guarded"}, {rft_check_guarded}};
static const matrix without_device = {3, 1, {RFR_F32, RFR_BF16, RFR_F16}, {"bind"}, {rft_check_bind}};

static const matrix *m = &kernels;
static struct { int passed, failed, refused; /* results of the checks of one case */ } count;
static int wanted_count;
static char **wanted;

static bool is_wanted(const char *name) {
  for (int i = 0; i < wanted_count; i++)
    if (strcmp(wanted[i] + (wanted[i][0] == '-'), name) == 0) return wanted[i][0] != '-';
  return wanted_count == 0 || wanted[0][0] == '-';
}

static void print_cell(const rft_cell *cell) {
  char text[40];
  if (cell->failed) snprintf(text, sizeof text, "FAILED %d/%d", cell->failed, cell->done);
  else if (cell->done && cell->worst > 0) snprintf(text, sizeof text, "%d (%.2f)", cell->done, cell->worst);
  else if (cell->done) snprintf(text, sizeof text, "%d", cell->done);
  else snprintf(text, sizeof text, "%s", cell->word);
  printf(" %-17s", text);
}

static void check_case(int k, const rft_op *op, const rft_case *c, rfr_dtype type, rft_cell *cell) {
  const int failed = cell->failed, refused = cell->refused;
  m->checks[k](op, c, type, cell);
  if (cell->failed > failed) count.failed++;
  else if (cell->refused > refused) count.refused++;
  else count.passed++;
}

/* Runs all checks of one op on one type; returns the number of cases. */
static int check_type(const rft_op *op, rfr_dtype type, rft_cell cells[MOST_CHECKS]) {
  int n = 0;
  bool varies = false;
  for (; op->cases[n]; n++) {
    rft_case c;
    const char *wrong = rft_case_parse(op->cases[n], type, &c);
    /* some ops do not support f16, so f16 runs fewer cases */
    if (wrong && type == RFR_F16 && m != &kernels) continue;
    if (wrong) {
      rft_cell_fail(&cells[0], &c, type, "%s", wrong);
      continue;
    }
    varies |= c.varies;
    if (type != m->types[0] && !c.varies) continue; /* it would repeat the same run */
    for (int k = 0; k < m->n_checks; k++) check_case(k, op, &c, type, &cells[k]);
  }
  for (int k = 0; !varies && type != m->types[0] && k < m->n_checks; k++)
    snprintf(cells[k].word, sizeof cells[k].word, "as f32");
  return n;
}

/* An empty cell is a failure, unless there is no kernel and none is needed. */
static bool is_red(const rft_cell *cell) {
  if (cell->failed) return true;
  return m == &kernels ? cell->refused || (!cell->done && !cell->word[0]) : false;
}

/* Prints the row of one op; returns the number of cells that fail. */
static int check_op(const rft_op *op, bool *refused) {
  int red = 0, n = 0;
  rft_cell cells[MOST_TYPES][MOST_CHECKS] = {0};
  if (op->ref && op->cases)
    for (int t = 0; t < m->n_types; t++) n = check_type(op, m->types[t], cells[t]);
  printf("%-22s %5d ", op->def->name, n);
  for (int t = 0; t < m->n_types; t++)
    for (int k = 0; k < m->n_checks; k++) {
      print_cell(&cells[t][k]);
      red += is_red(&cells[t][k]);
      *refused |= cells[t][k].refused > 0;
    }
  if (n < MIN_CASES) printf(" %s", op->ref && op->cases ? "too few cases" : "no reference or cases");
  printf("\n");
  fflush(stdout);
  return red + (n < MIN_CASES);
}

static void print_counts(const bool *refused) {
  printf("%d checks of a case passed, %d failed, %d were refused for want of a kernel", count.passed, count.failed,
         count.refused);
  for (int i = 0, any = 0; i < RFI_OP_COUNT; i++)
    if (refused[i]) printf("%s %s", any++ ? "," : ":", rfi_op_def_get((rfi_opcode)i)->name);
  printf("\n");
}

static void test_matrix(void **state) {
  int red = 0;
  bool refused[RFI_OP_COUNT] = {0};
  (void)state;
  printf("%-22s %5s ", "op", "cases");
  for (int t = 0; t < m->n_types; t++)
    for (int k = 0; k < m->n_checks; k++) {
      char title[32];
      snprintf(title, sizeof title, "%s %s", rfr_dtype_name(m->types[t]), m->titles[k]);
      printf(" %-17s", title);
    }
  printf("\n");
  for (int i = 0; i < RFI_OP_COUNT; i++) {
    rft_op op = rft_op_get((rfi_opcode)i);
    /* placeholders, until autodiff replaces them */
    const bool stands_for = i == RFI_OP_gradient || i == RFI_OP_cotangent;
    if ((op.def->flags & RFI_VIEW) || stands_for || !is_wanted(op.def->name)) continue;
    red += check_op(&op, &refused[i]);
  }
  printf("a number: how often the check ran; in brackets: the largest error over its bar\n");
  print_counts(refused);
  fflush(stdout);
  assert_int_equal(red, 0);
}

int main(int argc, char **argv) {
  const bool once = argc > 1 && strcmp(argv[1], "--guarded") == 0;
  argc -= once;
  argv += once;
  if (!rft_device_named(&argc, argv)) return 77;
  wanted_count = argc - 1;
  wanted = argv + 1;
  if (once) m = &guarded;
  else if (getenv("REFRAIN_DEVICE"))
    m = strcmp(getenv("REFRAIN_DEVICE"), "cuda:none") == 0 ? &without_device : &on_device;
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_matrix)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
