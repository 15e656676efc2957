/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the time of a step goes: the ops of some profiled steps, put together by what they
 * are, where they stand or when they run, and held against the machine's ceilings.
 */
#ifndef OP_TIMES_H
#define OP_TIMES_H

#include "cli.h"

typedef struct op_times {
  int n, steps;
  rfr_op_time *all;  /* steps x n, in the order of time */
  rfr_op_time *op;   /* n; start and seconds are medians over the steps */
  rfr_plan_op *what; /* n */
  int middle;        /* the step whose ops take the median of time */
  double seconds;    /* of all ops of that step */
} op_times;

/* Takes `steps` training steps, or for steps 0 as many as two seconds hold and five at least. */
rfr_status op_times_take(rfr_run *run, int64_t steps, op_times *out);
void op_times_deinit(op_times *t); /* accepts zeros */

typedef enum op_group { BY_KIND, BY_LAYER, BY_PHASE, BY_OP } op_group;
typedef struct op_row {
  char name[96];
  const char *kernel; /* "": several */
  int calls;
  double seconds, flops, bytes, least; /* least: what the ceilings allow */
} op_row;
/* The rows of a grouping, longest time first (phases in their order); the caller frees *rows. */
rfr_status op_times_group(const op_times *t, op_group group, const cli_ceilings *ceilings, op_row **rows, int *n);

/* `most` rows under a heading, then what the rest takes and the sum. */
void op_rows_print(const char *heading, const op_row *rows, int n, int most);
void op_rows_json(json *j, const char *key, const op_row *rows, int n, int most);
void ceilings_print(const cli_ceilings *c);
void ceilings_json(json *j, const cli_ceilings *c);

#endif
