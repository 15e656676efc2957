/* SPDX-License-Identifier: Apache-2.0
 *
 * Benchmarks that are no training step.
 */
#ifndef BENCH_H
#define BENCH_H

#include "cli.h"

rfr_status bench_replay(cli *c);
rfr_status bench_small(cli *c);

#endif
