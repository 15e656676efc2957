/* SPDX-License-Identifier: Apache-2.0
 *
 * One step, and the loop around it.
 *
 * A step is: see that the slot is filled, launch, read the metrics of the step. The loop
 * adds what happens every so many steps, and ends early on a stop request. Step numbers
 * count from the run's beginning, so a resumed run evaluates and saves at the same steps
 * as one that was never interrupted.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "core/rng.h"
#include "train/run.h"

enum { SKIPS_IN_A_ROW = 20, RANDOM_STREAM = 4, ZERO_STEPS = 10 };

rfr_status rfi_fill_rows(rfr_run *run, rfi_split split, int64_t first, int64_t rows, int32_t *tokens, int32_t *targets,
                         int32_t *offsets) {
  const rfi_settings *s = run->settings;
  const int64_t S = s->sequence;
  int64_t n = 0;
  for (int64_t r = 0; r < rows; r++) {
    int documents = 1;
    offsets[n] = 0;
    if (run->data)
      RFI_TRY(rfi_dataset_window(run->data, split, s->seed, first + r, tokens + r * S, targets + r * S, offsets + n,
                                 &documents));
    for (int d = 0; d < documents; d++) offsets[n++] += (int32_t)(r * S);
  }
  while (n <= rows * S) offsets[n++] = (int32_t)(rows * S);
  if (run->data) return RFR_OK;
  const uint64_t key = rfi_stream_key(s->seed, RANDOM_STREAM);
  const uint32_t vocab = (uint32_t)s->spec.model.vocab_size;
  for (int64_t i = 0; i < rows * S; i++) {
    rfi_u32x4 r = rfi_draw4(key, (uint64_t)(first * S + i), 0, 0, 0);
    tokens[i] = (int32_t)(r.v[0] % vocab);
    targets[i] = (int32_t)(r.v[1] % vocab);
  }
  return RFR_OK;
}

rfr_status rfi_fill_slot(rfr_run *run, int64_t step) {
  const rfi_settings *s = run->settings;
  const int64_t slot = step % s->spec.slots, k = s->spec.microbatches;
  for (int64_t m = 0; m < k; m++) {
    const int64_t at = slot * k + m;
    RFI_TRY(rfi_fill_rows(
        run, RFI_TRAIN, (step * k + m) * s->rows, s->rows, (int32_t *)run->tokens.data + at * s->spec.tokens,
        (int32_t *)run->targets.data + at * s->spec.tokens, (int32_t *)run->offsets.data + at * (s->spec.tokens + 1)));
  }
  return RFR_OK;
}

rfr_status rfi_launch(rfr_run *run, int program) {
  RFI_TRY(rfi_run_check(run, program));
  const int i = rfr_run_program_index(run, program);
  if (run->options.eager || run->options.debug) return rfr_program_run(run->programs, i);
  return rfr_program_replay(run->programs, i, NULL, 0);
}

/* The metrics of step `step`, once its slot shows its number, which is what the device writes last. */
static rfr_status read_metrics(rfr_run *run, int64_t step, double *values) {
  const int n = rfi_metric_count(&run->settings->spec);
  const double *slot = (const double *)run->metrics.data + (step % run->settings->spec.slots) * (1 + n);
  const double number = (double)(step + 1);
  double seen;
  for (int idle = 0;;) {
    __atomic_load(slot, &seen, __ATOMIC_ACQUIRE);
    if (seen == number) break;
    if (idle) return rfi_fail(RFI_E_INTERNAL, "metrics of step %lld carry the number %g", (long long)(step + 1), seen);
    RFI_TRY(rfr_programs_poll(run->programs, &idle));
  }
  memcpy(values, slot + 1, (size_t)n * sizeof *values);
  return RFR_OK;
}

/* A weight whose gradient is exactly zero from the start learns nothing; it is told once, by name. */
static rfr_status warn_of_zeros(rfr_run *run) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int n = rfr_model_parameter_count(c);
  char names[320] = "";
  size_t length = 0;
  int found = 0, named = 0, gradient = 0;
  rfr_tensor zeros, w;
  rfr_parameter p;
  if (run->step != ZERO_STEPS) return RFR_OK;
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_ZERO_STEPS, &zeros));
  void *counts;
  RFI_TRY(rfi_host_open(run, &zeros, RFI_HOST_READ, &counts));
  for (int i = 0; i < n; i++) {
    if (rfr_model_parameter(c, i, &p) != RFR_OK || rfr_programs_tensor(run->programs, p.name, &w) != RFR_OK) continue;
    if (w.role != RFR_ROLE_TRAINABLE || ((const int32_t *)counts)[gradient++] < ZERO_STEPS) continue;
    if (found++ > named || length + strlen(p.name) + 3 > sizeof names) continue;
    length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", named++ ? ", " : "", p.name);
  }
  RFI_TRY(rfi_host_close(run, &zeros, RFI_HOST_READ, counts, RFR_OK));
  if (found > named)
    rfi_warn(run, "in all of the first %d steps the gradients of %d parameters were exactly zero: %s and %d more",
             ZERO_STEPS, found, names, found - named);
  else if (found) rfi_warn(run, "in all of the first %d steps the gradient of %s was exactly zero", ZERO_STEPS, names);
  return RFR_OK;
}

/* The step was skipped: its rows did not fit into the groups. */
static void warn_of_routing(rfr_run *run, const double *m) {
  const rfr_model_config *model = &run->settings->spec.model;
  const int64_t layers = rfr_model_expert_layers(model), which = (int64_t)m[RFI_METRIC_BAD_ROUTING] - 1;
  int64_t layer = 0;
  if (which < 0) return;
  for (int64_t left = which % layers; left > 0 || !rfr_model_has_experts(model, layer); layer++)
    left -= rfr_model_has_experts(model, layer);
  rfi_warn(run, "step %lld: layer %lld, microbatch %lld: the rows of expert %lld are negative or too many; skipped",
           (long long)run->step, (long long)layer, (long long)(which / layers), (long long)m[RFI_METRIC_BAD_GROUP]);
}

/* One step, and its metrics. On a device of its own the steps behind it, up to number `until`, are
 * launched before the wait, as far as the ring goes, so that it is never idle. */
static rfr_status step(rfr_run *run, int64_t until, rfr_op_time *times, int max, int *n) {
  double m[RFI_METRIC_N] = {0};
  RFI_TRY(rfi_state_ready(run));
  const double start = rfi_now();
  for (; run->filled < run->step + run->settings->spec.slots; run->filled++) RFI_TRY(rfi_fill_slot(run, run->filled));
  const bool ahead = !run->block.host && !times;
  for (; run->launched <= run->step || (ahead && run->launched < until && run->launched < run->filled);
       run->launched++) {
    if (times) RFI_TRY(rfr_program_profile(run->programs, rfr_run_program_index(run, RFR_RUN_TRAIN), times, max, n));
    else RFI_TRY(rfi_launch(run, RFR_RUN_TRAIN));
  }
  RFI_TRY(read_metrics(run, run->step, m));
  run->step++;
  const bool skipped = m[RFI_METRIC_SKIP] != 0.0;
  run->skipped_in_row = skipped ? run->skipped_in_row + 1 : 0;
  rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_METRICS,
                             .step = run->step,
                             .loss = m[RFI_METRIC_LOSS],
                             .bits_per_byte = m[RFI_METRIC_LOSS] / log(2.0),
                             .grad_norm = m[RFI_METRIC_NORM],
                             .lr = m[RFI_METRIC_LR],
                             .tokens = (int64_t)m[RFI_METRIC_COUNT],
                             .skipped = skipped,
                             .most_load = m[RFI_METRIC_MOST_LOAD],
                             .least_load = m[RFI_METRIC_LEAST_LOAD],
                             .seconds = rfi_now() - start});
  warn_of_routing(run, m);
  RFI_TRY(warn_of_zeros(run));
  if (run->skipped_in_row >= SKIPS_IN_A_ROW)
    return rfi_fail(RFI_E_RUN_DIVERGED, "step %lld: the gradients of %d steps in a row were not finite",
                    (long long)run->step, run->skipped_in_row);
  return RFR_OK;
}

rfr_status rfr_run_step(rfr_run *run) {
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  return step(run, run->step + 1, NULL, 0, NULL);
}

rfr_status rfr_run_profile(rfr_run *run, rfr_op_time *times, int max, int *n) {
  *n = 0;
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  if (times) return step(run, run->step + 1, times, max, n);
  return rfr_program_profile(run->programs, rfr_run_program_index(run, RFR_RUN_TRAIN), NULL, 0, n);
}

static bool every(int64_t step, int64_t period) { return period > 0 && step % period == 0; }

static rfr_status train(rfr_run *run) {
  const rfi_settings *s = run->settings;
  const bool evaluates = rfi_run_evaluates(run);
  int64_t saved = -1, until = run->step;
  rfr_evaluation e;
  while (run->launched > run->step || (run->step < run->steps && !rfi_stop_requested(run))) {
    if (until <= run->step) /* the next step behind which something looks at the state */
      for (until = run->step + 1; until < run->steps && !every(until, s->evaluate_every) &&
                                  !every(until, s->checkpoint_every) && until != ZERO_STEPS;)
        until++;
    RFI_TRY(step(run, rfi_stop_requested(run) ? run->launched : until, NULL, 0, NULL));
    if (evaluates && run->step < run->steps && every(run->step, s->evaluate_every))
      RFI_TRY(rfi_evaluate(run, s->evaluate_windows, &e));
    if (run->folder && every(run->step, s->checkpoint_every)) {
      RFI_TRY(rfi_state_save(run));
      saved = run->step;
    }
  }
  const bool stopped = run->step < run->steps;
  if (run->folder && saved != run->step) RFI_TRY(rfi_state_save(run));
  if (stopped)
    return rfi_fail(RFI_E_STOPPED, "stopped after step %lld of %lld", (long long)run->step, (long long)run->steps);
  return evaluates ? rfr_run_evaluate(run, &e) : RFR_OK;
}

rfr_status rfr_run_train(rfr_run *run) {
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  rfr_status s = train(run);
  const char *how = s == RFR_OK ? "done" : s == RFR_STOPPED ? "stopped" : rfr_last_error()->slug;
  rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_END, .step = run->step, .message = how});
  return s;
}

void rfr_run_request_stop(rfr_run *run) {
  if (run) atomic_store_explicit(&run->stop, 1, memory_order_relaxed);
}
