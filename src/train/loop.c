/* SPDX-License-Identifier: Apache-2.0
 *
 * One step, and the training loop.
 *
 * A step fills its slot of the ring, launches, and reads its metrics. The loop adds evaluations and checkpoints, and
 * ends early on a stop request. Step numbers count from the beginning of the run, so that a resumed run evaluates and
 * saves at the same steps as one that was not interrupted.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "train/batch.h"
#include "train/evaluate.h"
#include "train/events.h"
#include "train/failure.h"
#include "train/host.h"
#include "train/ramp.h"
#include "train/run_programs.h"
#include "train/samples.h"
#include "train/state.h"
#include "train/watched_log.h"

enum { SKIPS_IN_A_ROW = 20, ZERO_STEPS = 10, LEAST_WINDOWS = 64 };

/* Reads the metrics of step `step`. *by_layer: the load of each layer with experts, valid until the slot is written
 * again. The device writes the step number into the slot last. */
static rfr_status read_metrics(rfr_run *run, int64_t step, double *values, const double **by_layer) {
  const int64_t width = rfi_metric_width(&run->settings->spec);
  const double *slot = (const double *)run->metrics.data + (step % run->settings->spec.slots) * width;
  const double number = (double)(step + 1);
  double seen;
  for (int idle = 0;;) {
    __atomic_load(slot, &seen, __ATOMIC_ACQUIRE);
    if (seen == number) break;
    if (idle) return rfi_fail(RFI_E_INTERNAL, "metrics of step %lld have the value %g", (long long)(step + 1), seen);
    RFI_TRY(rfr_programs_poll(run->programs, &idle));
  }
  for (int m = 0, column = 1; m < RFI_METRIC_N; m++)
    if (rfi_metric_exists(&run->settings->spec, (rfi_metric)m)) values[m] = slot[column++];
  *by_layer = slot + width - rfi_metric_layers(&run->settings->spec);
  return RFR_OK;
}

/* A weight whose gradient is exactly zero from the start is not trained: one warning with its name; for an adapter an
 * error. The gradient of A is zero in the first step, because B is zero. */
static rfr_status check_zeros(rfr_run *run) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int n = rfr_model_parameter_count(c);
  char names[320] = "";
  size_t length = 0;
  int found = 0, named = 0, gradient = 0;
  rfr_tensor zeros;
  rfr_parameter p;
  const bool adapter = run->settings->adapter != NULL, last = run->step == run->steps && run->step > 1;
  if (run->step != ZERO_STEPS && !(adapter && last && run->step < ZERO_STEPS)) return RFR_OK;
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_ZERO_STEPS, &zeros));
  void *counts;
  RFI_TRY(rfi_host_open(run, &zeros, RFI_HOST_READ, &counts));
  for (int i = 0; i < n; i++) {
    if (rfr_model_parameter(c, i, &p) != RFR_OK || rfi_step_rule(&run->settings->spec, i).frozen) continue;
    if (((const int32_t *)counts)[gradient++] < run->step) continue;
    if (found++ > named || length + strlen(p.name) + 3 > sizeof names) continue;
    length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", named++ ? ", " : "", p.name);
  }
  RFI_TRY(rfi_host_close(run, &zeros, RFI_HOST_READ, counts, RFR_OK));
  if (found && adapter)
    return rfi_fail(RFI_E_ADAPTER_GRADIENT,
                    "in all of the first %lld steps the gradients of %d of the adapter's tensors "
                    "were exactly zero: %s%s",
                    (long long)run->step, found, names, found > named ? ", ..." : "");
  if (found > named)
    rfi_run_warn(run, "in all of the first %d steps the gradients of %d parameters were exactly zero: %s and %d more",
                 ZERO_STEPS, found, names, found - named);
  else if (found)
    rfi_run_warn(run, "in all of the first %d steps the gradient of %s was exactly zero", ZERO_STEPS, names);
  return RFR_OK;
}

/* The step was skipped because the routing was invalid or the expert capacity was too small. */
static void warn_of_routing(rfr_run *run, const double *m) {
  const rfr_model_config *model = &run->settings->spec.model;
  const int64_t layers = rfr_model_expert_layers(model), which = (int64_t)m[RFI_METRIC_BAD_ROUTING] - 1;
  int64_t layer = 0;
  if (which < 0) return;
  for (int64_t left = which % layers; left > 0 || !rfr_model_has_experts(model, layer); layer++)
    left -= rfr_model_has_experts(model, layer);
  if (run->settings->parallel.expert > 1) {
    rfi_run_warn(run,
                 "step %lld: layer %lld, microbatch %lld: %lld rows for the experts of one rank are more than "
                 "parallel.capacity, %lld; skipped",
                 (long long)run->step, (long long)layer, (long long)(which / layers),
                 (long long)m[RFI_METRIC_BAD_GROUP] + 1, (long long)run->settings->spec.expert_capacity);
    return;
  }
  rfi_run_warn(run, "step %lld: layer %lld, microbatch %lld: the rows of expert %lld are negative or too many; skipped",
               (long long)run->step, (long long)layer, (long long)(which / layers), (long long)m[RFI_METRIC_BAD_GROUP]);
}

/* The number of windows of an evaluation after training for `steps` steps since the previous one. */
static int64_t evaluation_windows(const rfr_run *run, int64_t steps) {
  const rfi_settings *s = run->settings;
  if (s->evaluate_windows >= 0) return s->evaluate_windows;
  const int64_t end = steps > run->step ? steps : run->step;
  const int64_t windows = rfi_ramp_windows(s, end) - rfi_ramp_windows(s, end - steps);
  const int64_t share = windows / 4; /* evaluating a window takes a third of the time of training on it */
  return share > LEAST_WINDOWS ? share : LEAST_WINDOWS;
}

/* The estimated seconds of the final evaluation: from the previous evaluation, or a third of the training time per
 * window. */
static double evaluation_seconds(const rfr_run *run, double step_seconds) {
  const rfi_settings *s = run->settings;
  if (!rfi_run_evaluates(run)) return 0.0;
  const int64_t held_out = rfi_dataset_get_stats(run->data)->windows[RFI_VALIDATION];
  int64_t windows = evaluation_windows(run, run->steps);
  if (windows == 0 || windows > held_out) windows = held_out;
  const double each =
      run->window_seconds > 0.0 ? run->window_seconds : step_seconds / (double)rfi_step_windows(s) / 3.0;
  return fmin((double)windows * each, s->time / 2.0);
}

/* Updates the clock of a run that is given in time; it may decide when the learning rate decays. */
static rfr_status tick(rfr_run *run, double seconds) {
  rfi_run_clock *c = &run->clock;
  char message[128];
  if (c->lr_steps[RFI_LR_END] == RFI_LR_LATER) c->reserve = evaluation_seconds(run, seconds);
  const rfi_clock_change change = rfi_run_clock_step(c, run->launched, seconds);
  run->steps = run->launched + (int64_t)ceil(c->steps_left);
  if (change == RFI_CLOCK_SAME) return RFR_OK;
  RFI_TRY(rfi_state_set_lr_steps(run));
  if (change == RFI_CLOCK_WARMUP) return RFR_OK;
  if (change == RFI_CLOCK_DECAY)
    snprintf(message, sizeof message, "the learning rate decays from step %lld to step %lld, the last",
             (long long)c->lr_steps[RFI_LR_DECAY] + 1, (long long)c->lr_steps[RFI_LR_END]);
  else snprintf(message, sizeof message, "step %lld is the last", (long long)c->lr_steps[RFI_LR_END]);
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_SCHEDULE, .step = run->launched, .message = message});
  return RFR_OK;
}

static rfr_status fail_skipped(const rfr_run *run) {
  const int n = run->skipped_in_row;
  const long long steps = run->step;
  if (run->skipped_for_routing && run->settings->parallel.expert > 1)
    return rfi_fail(RFI_E_RUN_CAPACITY,
                    "the last %d of %lld steps were skipped: the rows for the experts of one rank were more than "
                    "parallel.capacity, %lld",
                    n, steps, (long long)run->settings->spec.expert_capacity);
  return rfi_fail(RFI_E_RUN_DIVERGED, "the last %d of %lld steps were skipped: their %s", n, steps,
                  run->skipped_for_routing ? "routing was invalid" : "gradients were not finite");
}

/* Emits an event at the first step of a phase. */
static void announce_phase(rfr_run *run, int64_t step) {
  const rfi_settings *s = run->settings;
  const int phase = rfi_ramp_phase(s, step);
  char message[128];
  if (step == 0 || phase == rfi_ramp_phase(s, step - 1)) return;
  snprintf(message, sizeof message, "from step %lld on: %lld tokens per step, sequences of %lld", (long long)step + 1,
           (long long)rfi_ramp_tokens(s, phase), (long long)rfi_ramp_sequence(s, phase));
  rfi_run_emit(
      run,
      &(rfr_event){.kind = RFR_EVENT_SCHEDULE, .step = step, .tokens = rfi_ramp_tokens(s, phase), .message = message});
}

/* Runs one step and reads its metrics. On a device with separate memory, steps up to number `until` are launched ahead,
 * as far as the ring allows, so that the device is never idle. */
static rfr_status step(rfr_run *run, int64_t until, rfr_op_time *times, int max, int *n) {
  double m[RFI_METRIC_N] = {0};
  const double *by_layer;
  RFI_TRY(rfi_state_prepare(run, false));
  const double start = rfi_now();
  for (; run->filled < run->step + run->settings->spec.slots; run->filled++) RFI_TRY(rfi_fill_slot(run, run->filled));
  const bool ahead = !run->block.host && !times;
  for (; run->launched <= run->step || (ahead && run->launched < until && run->launched < run->filled &&
                                        (run->clock.time == 0.0 || run->launched < run->steps));
       run->launched++) {
    if (run->stop_ring.data)
      ((float *)run->stop_ring.data)[run->launched % run->settings->spec.slots] = (float)rfi_stop_requested_here(run);
    if (times) RFI_TRY(rfr_program_profile(run->programs, rfi_training_program(run, run->launched), times, max, n));
    else RFI_TRY(rfi_launch(run, RFR_RUN_TRAIN));
  }
  RFI_TRY(read_metrics(run, run->step, m, &by_layer));
  run->stop_agreed |= m[RFI_METRIC_STOP] > 0.0;
  announce_phase(run, run->step);
  run->step++;
  const bool skipped = m[RFI_METRIC_SKIP] != 0.0, preference = run->settings->spec.preference;
  const double seconds = rfi_now() - start;
  run->skipped_in_row = skipped ? run->skipped_in_row + 1 : 0;
  run->skipped_for_routing = skipped && m[RFI_METRIC_BAD_ROUTING] > 0.0;
  if (run->clock.time > 0.0) RFI_TRY(tick(run, seconds));
  run->step_seconds = run->step_seconds > 0.0 ? run->step_seconds + 0.1 * (seconds - run->step_seconds) : seconds;
  rfi_run_emit(
      run, &(rfr_event){.kind = RFR_EVENT_METRICS,
                        .step = run->step,
                        .loss = m[RFI_METRIC_LOSS],
                        .bits_per_byte = preference ? 0.0 : m[RFI_METRIC_LOSS] / log(2.0) * run->tokens_per_byte,
                        .margin = m[RFI_METRIC_MARGIN],
                        .accuracy = m[RFI_METRIC_ACCURACY],
                        .grad_norm = m[RFI_METRIC_NORM],
                        .lr = m[RFI_METRIC_LR],
                        .tokens = (int64_t)m[RFI_METRIC_COUNT],
                        .skipped = skipped,
                        .most_load = m[RFI_METRIC_MOST_LOAD],
                        .least_load = m[RFI_METRIC_LEAST_LOAD],
                        .layer_loads = by_layer,
                        .layers = rfi_metric_layers(&run->settings->spec),
                        .seconds_left = run->clock.time > 0.0 ? run->clock.left
                                                              : run->step_seconds * (double)(run->steps - run->step),
                        .seconds = seconds});
  if (!times && rfi_watches(run, run->step - 1)) RFI_TRY(rfi_watched_emit(run));
  warn_of_routing(run, m);
  RFI_TRY(check_zeros(run));
  return run->skipped_in_row < SKIPS_IN_A_ROW ? RFR_OK : fail_skipped(run);
}

rfr_status rfr_run_step(rfr_run *run) {
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  return step(run, run->step + 1, NULL, 0, NULL);
}

rfr_status rfr_run_profile(rfr_run *run, rfr_op_time *times, int max, int *n) {
  *n = 0;
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  if (run->stages)
    return rfi_fail(RFI_E_UNSUPPORTED,
                    "the ops of a pipeline's step cannot be timed; time its stages (rfr_run_stage_costs)");
  if (times) return step(run, run->step + 1, times, max, n);
  return rfr_program_profile(run->programs, rfi_training_program(run, run->step), NULL, 0, n);
}

static bool every(int64_t step, int64_t period) { return period > 0 && step % period == 0; }

static rfr_status evaluate(rfr_run *run, int64_t steps) {
  rfr_evaluation e;
  RFI_TRY(rfi_evaluate(run, evaluation_windows(run, steps), &e));
  run->window_seconds = e.seconds / (double)e.windows;
  rfi_run_clock_other(&run->clock, e.seconds);
  return RFR_OK;
}

static rfr_status save(rfr_run *run, int64_t *saved) {
  const double start = rfi_now();
  RFI_TRY(rfi_state_save(run));
  rfi_run_clock_other(&run->clock, rfi_now() - start);
  *saved = run->step;
  return RFR_OK;
}

static rfr_status take_sample(rfr_run *run) {
  const double start = rfi_now();
  RFI_TRY(rfi_samples_take(run));
  rfi_run_clock_other(&run->clock, rfi_now() - start);
  return RFR_OK;
}

static rfr_status stopped(const rfr_run *run) {
  return rfi_fail(RFI_E_STOPPED, "stopped after step %lld of %s%lld%s%s", (long long)run->step,
                  run->clock.time > 0.0 ? "about " : "", (long long)run->steps, run->folder ? "; resume from " : "",
                  run->folder ? run->folder : "");
}

/* f16 steps may be skipped while the loss scale is searched. A run that ends during such skips has not finished its
 * last steps. */
static rfr_status check_end(const rfr_run *run) {
  const int most = run->settings->spec.model.dtype == RFR_F16 ? 1 : 0;
  return run->skipped_in_row <= most ? RFR_OK : fail_skipped(run);
}

static rfr_status train(rfr_run *run) {
  const rfi_settings *s = run->settings;
  const bool evaluates = rfi_run_evaluates(run);
  int64_t saved = -1, until = run->step;
  while (run->launched > run->step || (run->step < run->steps && !rfi_stop_requested(run))) {
    if (until <= run->step) /* until: the next step after which the host reads the state */
      for (until = run->step + 1; until < run->steps && !every(until, s->evaluate_every) &&
                                  !every(until, s->sample_every) && !every(until, s->checkpoint_every) &&
                                  until != ZERO_STEPS;)
        until++;
    RFI_TRY(step(run, rfi_stop_requested(run) ? run->launched : until, NULL, 0, NULL));
    if (run->folder && every(run->step, s->checkpoint_every)) RFI_TRY(save(run, &saved));
    if (run->folder && every(run->step, s->sample_every)) RFI_TRY(take_sample(run));
    if (evaluates && run->step < run->steps && every(run->step, s->evaluate_every) && !rfi_stop_requested(run)) {
      const rfr_status status = evaluate(run, s->evaluate_every);
      if (status != RFR_OK && status != RFR_STOPPED) return status;
    }
  }
  if (run->folder && saved != run->step) RFI_TRY(save(run, &saved));
  if (run->step < run->steps) return stopped(run);
  RFI_TRY(check_end(run));
  return evaluates ? evaluate(run, run->steps) : RFR_OK;
}

rfr_status rfr_run_train(rfr_run *run) {
  RFI_TRY(rfi_run_check(run, RFR_RUN_TRAIN));
  rfr_status s = train(run);
  const char *how = s == RFR_OK ? "done" : s == RFR_STOPPED ? "stopped" : rfr_last_error()->slug;
  if (s != RFR_OK && s != RFR_STOPPED) rfi_run_record_failure(run);
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_END, .step = run->step, .message = how});
  return s;
}

void rfr_run_request_stop(rfr_run *run) {
  if (run) atomic_store_explicit(&run->stop, 1, memory_order_relaxed);
}
