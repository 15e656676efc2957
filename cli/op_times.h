/* SPDX-License-Identifier: Apache-2.0
 *
 * Time of a step per op: profiled steps, grouped by op, kind, layer or phase, and compared with the machine's ceilings.
 */
#ifndef OP_TIMES_H
#define OP_TIMES_H

#include "cli.h"

typedef struct op_times {
  int n, steps;
  rfr_op_time *all;  /* steps x n, in order of execution */
  rfr_op_time *op;   /* n; start and seconds are medians over the steps */
  rfr_plan_op *what; /* n */
  int middle;        /* index of the step with the median total time */
  double seconds;    /* sum over the ops of that step */
} op_times;

/* Profiles `steps` training steps of a run, or with run NULL executions of program 0 of `p`. steps 0: as many as fit in
 * two seconds, and at least five. */
rfr_status op_times_take(rfr_run *run, rfr_programs *p, int64_t steps, op_times *out);
void op_times_deinit(op_times *t); /* accepts a zeroed one */

typedef enum op_group { BY_KIND, BY_LAYER, BY_PHASE, BY_OP } op_group;
typedef struct op_row {
  char name[96];
  const char *kernel; /* "": several kernels */
  int calls;
  double seconds, flops, bytes, least; /* least: the minimum time under the ceilings */
} op_row;
/* The rows of a grouping, longest time first (phases in their order); the caller frees *rows. */
rfr_status op_times_group(const op_times *t, op_group group, const cli_ceilings *ceilings, op_row **rows, int *n);

/* Prints `most` rows under a heading, then one row for the rest, and the sum. */
void op_rows_print(const char *heading, const op_row *rows, int n, int most);
void op_rows_json(json *j, const char *key, const op_row *rows, int n, int most);
/* The costs of a layer of the run, as JSON. */
rfr_status write_costs(const char *path, const op_times *t, const rfr_run *run);
void ceilings_print(const cli_ceilings *c);
void ceilings_json(json *j, const cli_ceilings *c);

#endif
