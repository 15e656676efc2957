/* SPDX-License-Identifier: Apache-2.0
 *
 * Benchmarks that are no training step.
 */
#ifndef BENCH_H
#define BENCH_H

#include "cli.h"

/* --dtype, or the best of this machine. */
rfr_status bench_dtype(const cli *c, rfr_dtype *out);
/* `refrain bench` knows the name, and it is none of a configuration. */
bool bench_is_other(const char *name);

rfr_status bench_graphs(cli *c);
rfr_status bench_kernels(cli *c);
rfr_status bench_replay(cli *c);
rfr_status bench_schedule(cli *c);
rfr_status bench_small(cli *c);

#endif
