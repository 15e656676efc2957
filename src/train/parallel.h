/* SPDX-License-Identifier: Apache-2.0
 *
 * How a run is distributed over ranks: the section `parallel` of the configuration, and what works together.
 */
#ifndef RFI_PARALLEL_H
#define RFI_PARALLEL_H

#include "base/base.h"
#include "refrain/schedule.h"
#include "refrain/train.h"

struct rfi_settings;

typedef struct rfi_parallel {
  int rank, ranks;
  int data; /* ranks that train on different microbatches */
  rfr_shard shard;
  int pipeline; /* ranks over which the layers are distributed; 1: no pipeline */
  rfr_schedule_kind schedule;
  int expert;     /* ranks over which the experts are distributed; 1: each rank has all experts */
  double timeout; /* timeout in seconds of a wait within a step */
} rfi_parallel;

/* Reads the section for the ranks of options->comm into s->parallel. Errors: config.value at the key; unsupported for a
 * combination that is not supported. */
rfr_status rfi_parallel_read(struct rfi_settings *s, const rfr_run_options *options);

/* The same for checks that depend on the model: experts on every rank, and layers in every stage. */
rfr_status rfi_parallel_check_model(const struct rfi_settings *s);

#endif
