/* SPDX-License-Identifier: Apache-2.0
 *
 * Time of compiling a training program, from the recorded trace to the plan, including the creation of its kernels.
 */
#ifndef COMPILE_TIME_H
#define COMPILE_TIME_H

#include "cli.h"

typedef struct compile_time {
  double ms, us_per_op;
  int ops; /* ops of the lowered program */
} compile_time;

compile_time compile_time_of(rfr_run *run);
void compile_time_json(json *j, const compile_time *t);

/* refrain bench compile */
rfr_status bench_compile(cli *c);

#endif
