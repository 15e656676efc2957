/* SPDX-License-Identifier: Apache-2.0
 *
 * Measured costs of the stages of a pipeline, for the simulator: a step with a wait around each action. A rank has the
 * times of its stages; the ranks exchange their medians.
 */
#include <stdlib.h>

#include "base/base.h"
#include "dist/comm.h"
#include "train/run.h"
#include "train/run_programs.h"
#include "train/stages.h"

enum { COSTS = 4 };
static const int measured[COSTS] = {RFR_ACTION_F, RFR_ACTION_I, RFR_ACTION_W, RFR_ACTION_B};

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The median time of an op in a stage; -1: the stage has no such op. `room`: scratch for n times. */
static double median(const rfr_action *a, const double *seconds, int n, int stage, int op, double *room) {
  int k = 0;
  for (int i = 0; i < n; i++)
    if (a[i].stage == stage && a[i].op == op) room[k++] = seconds[i];
  if (k == 0) return -1;
  qsort(room, (size_t)k, sizeof *room, compare);
  return room[k / 2];
}

/* Gathers the costs of all ranks. A stage has its costs on one rank of each pipeline, and -1 on the other ranks. */
static rfr_status share(rfr_run *run, const double *own, int stages, rfr_stage_costs *costs) {
  const int ranks = rfr_comm_size(run->options.comm);
  double *all;
  RFI_TRY(rfi_comm_collect(run->ctx, run->options.comm, own, (int64_t)sizeof *own * COSTS * stages, (void **)&all));
  for (int stage = 0; stage < stages; stage++) {
    costs[stage] = rfr_stage_costs_default();
    for (int k = 0; k < COSTS; k++) {
      double *to = &costs[stage].seconds[measured[k]];
      *to = -1;
      for (int r = 0; r < ranks && *to < 0; r++) *to = all[(r * stages + stage) * COSTS + k];
    }
  }
  rfi_free(run->ctx, all);
  return RFR_OK;
}

static rfr_status measure(rfr_run *run, const rfr_action *a, int n, rfr_stage_costs *costs, double *update) {
  const int stages = rfi_pipeline_stages(&run->settings->spec.pipeline);
  double *own;
  RFI_TRY(RFI_ALLOC(run->ctx, sizeof *own * (size_t)(COSTS * stages + n), &own));
  rfr_status s = rfr_run_step(run);
  *update = rfi_now() - run->update_start;
  for (int i = 0; i < COSTS * stages && s == RFR_OK; i++)
    own[i] = median(a, run->stage_seconds, n, i / COSTS, measured[i % COSTS], own + COSTS * stages);
  if (s == RFR_OK) s = share(run, own, stages, costs);
  rfi_free(run->ctx, own);
  return s;
}

rfr_status rfr_run_stage_costs(rfr_run *run, rfr_stage_costs *costs, double *update) {
  int n;
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  RFI_TRY(rfi_check_handle(costs, "costs"));
  RFI_TRY(rfi_check_handle(update, "update"));
  if (!run->stages) return rfi_fail(RFI_E_ARGUMENT, "a run without a pipeline has no stages");
  const rfr_action *a = rfi_stages_actions(run->stages, &n);
  RFI_TRY(RFI_ALLOC(run->ctx, sizeof *run->stage_seconds * (size_t)n, &run->stage_seconds));
  const rfr_status s = measure(run, a, n, costs, update);
  rfi_free(run->ctx, run->stage_seconds);
  run->stage_seconds = NULL;
  return s;
}
