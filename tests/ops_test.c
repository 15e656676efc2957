/* SPDX-License-Identifier: Apache-2.0
 *
 * Every op, every type, every check: prints the matrix and fails on a blank or failing
 * cell, on an op without a reference, and on one with fewer than four cases. The checks
 * are in support/op_check.h; the ops come from ops.def, their references and cases from the
 * X_ref.c beside the kernels, found by name, so that a new op cannot be forgotten.
 *
 * Arguments are names of ops to check alone; the matrix then has their rows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "support/op_check.h"

enum { MIN_CASES = 4, N_TYPES = 2, N_CHECKS = 4 };
static const rfr_dtype types[N_TYPES] = {RFR_F32, RFR_BF16};
static const char *const titles[N_CHECKS] = {"reference", "gradient", "replay", "bounds"};
static void (*const checks[N_CHECKS])(const rft_op *, const rft_case *, rfr_dtype, rft_cell *) = {
    rft_check_reference, rft_check_gradient, rft_check_replay, rft_check_bounds};

static int wanted_count;
static char **wanted;

static bool is_wanted(const char *name) {
  for (int i = 0; i < wanted_count; i++)
    if (strcmp(wanted[i], name) == 0) return true;
  return wanted_count == 0;
}

static void print_cell(const rft_cell *cell) {
  char text[40];
  if (cell->failed) snprintf(text, sizeof text, "FAILED %d/%d", cell->failed, cell->done);
  else if (cell->done && cell->worst > 0) snprintf(text, sizeof text, "%d (%.2f)", cell->done, cell->worst);
  else if (cell->done) snprintf(text, sizeof text, "%d", cell->done);
  else snprintf(text, sizeof text, "%s", cell->word);
  printf(" %-17s", text);
}

/* Runs all checks of one op on one type; returns the number of cases. */
static int check_type(const rft_op *op, rfr_dtype type, rft_cell cells[N_CHECKS]) {
  int n = 0;
  bool varies = false;
  for (; op->cases[n]; n++) {
    rft_case c;
    const char *wrong = rft_case_parse(op->cases[n], type, &c);
    if (wrong) {
      rft_cell_fail(&cells[0], &c, type, "%s", wrong);
      continue;
    }
    varies |= c.varies;
    if (type != types[0] && !c.varies) continue; /* it would be the same run */
    for (int k = 0; k < N_CHECKS; k++) checks[k](op, &c, type, &cells[k]);
  }
  for (int k = 0; !varies && type != types[0] && k < N_CHECKS; k++)
    snprintf(cells[k].word, sizeof cells[k].word, "as f32");
  return n;
}

/* Prints the row of one op; returns how many of its cells are not green. */
static int check_op(const rft_op *op) {
  int red = 0, n = 0;
  rft_cell cells[N_TYPES][N_CHECKS] = {0};
  if (op->ref && op->cases)
    for (int t = 0; t < N_TYPES; t++) n = check_type(op, types[t], cells[t]);
  printf("%-22s %5d ", op->def->name, n);
  for (int t = 0; t < N_TYPES; t++)
    for (int k = 0; k < N_CHECKS; k++) {
      print_cell(&cells[t][k]);
      red += cells[t][k].failed || (!cells[t][k].done && !cells[t][k].word[0]);
    }
  if (n < MIN_CASES) printf(" %s", op->ref && op->cases ? "too few cases" : "no reference or cases");
  printf("\n");
  return red + (n < MIN_CASES);
}

static void test_matrix(void **state) {
  int red = 0;
  (void)state;
  printf("%-22s %5s ", "op", "cases");
  for (int t = 0; t < N_TYPES; t++)
    for (int k = 0; k < N_CHECKS; k++) {
      char title[32];
      snprintf(title, sizeof title, "%s %s", rfr_dtype_name(types[t]), titles[k]);
      printf(" %-17s", title);
    }
  printf("\n");
  for (int i = 0; i < RFI_OP_COUNT; i++) {
    rft_op op = rft_op_get((rfi_opcode)i);
    if ((op.def->flags & RFI_VIEW) || i == RFI_OP_gradient || !is_wanted(op.def->name)) continue;
    red += check_op(&op);
  }
  printf("a number: how often the check ran; in brackets: the largest error over its bar\n");
  fflush(stdout);
  assert_int_equal(red, 0);
}

int main(int argc, char **argv) {
  wanted_count = argc - 1;
  wanted = argv + 1;
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_matrix)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
