/* SPDX-License-Identifier: Apache-2.0
 *
 * Benchmarks other than a training step.
 */
#ifndef BENCH_H
#define BENCH_H

#include "cli.h"

/* --dtype, or the fastest type of this machine. */
rfr_status bench_dtype(const cli *c, rfr_dtype *out);
/* The name of a benchmark that has no training step. */
bool bench_is_other(const char *name);

rfr_status bench_graphs(cli *c);
rfr_status bench_kernels(cli *c);
rfr_status bench_replay(cli *c);
rfr_status bench_small(cli *c);
/* The program of `bench small`, with values, to be profiled. The caller destroys *out. */
rfr_status bench_small_open(cli *c, rfr_dtype *dtype, rfr_programs **out);

#endif
