/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation: held-out windows in order, each once, in batches of the evaluation program's shape. Windows past the end
 * are padding without targets. Each batch gives a sum in nats; the sums are added in double, in a fixed order.
 */
#include "train/evaluate.h"

#include <math.h>
#include <string.h>

#include "base/base.h"
#include "train/batch.h"
#include "train/events.h"
#include "train/host.h"
#include "train/run_programs.h"

#define PROGRESS_SECONDS 0.2 /* between progress events, at least */

/* The next batch of windows, from `first`; *predicted grows by its targets. */
static rfr_status fill_batch(rfr_run *run, int64_t first, int64_t *predicted) {
  const rfi_settings *s = run->settings;
  const rfr_tensor *const x[3] = {&run->eval_tokens, &run->eval_targets, &run->eval_offsets};
  void *host[3] = {NULL};
  rfr_status status = RFR_OK;
  for (int i = 0; i < 3 && status == RFR_OK; i++) status = rfi_host_open(run, x[i], RFI_HOST_WRITE, &host[i]);
  if (status == RFR_OK) status = rfi_fill_rows(run, RFI_VALIDATION, first, s->eval_rows, host[0], host[1], host[2]);
  for (int64_t i = 0; i < s->spec.eval_tokens && status == RFR_OK; i++)
    *predicted += ((const int32_t *)host[1])[i] != RFI_IGNORE;
  for (int i = 0; i < 3; i++) status = rfi_host_close(run, x[i], RFI_HOST_WRITE, host[i], status);
  return status;
}

bool rfi_run_evaluates(const rfr_run *run) {
  return run->data && rfi_dataset_get_stats(run->data)->validation_predicted > 0 &&
         rfr_run_program_index(run, RFR_RUN_EVALUATE) >= 0;
}

/* The sum of the losses of one batch. */
static rfr_status evaluate_batch(rfr_run *run, int64_t first, int64_t *predicted, double *nats) {
  rfr_tensor nll;
  float sum;
  RFI_TRY(fill_batch(run, first, predicted));
  RFI_TRY(rfi_launch(run, RFR_RUN_EVALUATE));
  RFI_TRY(rfr_program_output(run->programs, rfr_run_program_index(run, RFR_RUN_EVALUATE), RFI_NAME_NLL, &nll));
  RFI_TRY(rfr_programs_read(run->programs, &nll, &sum));
  *nats += sum;
  return RFR_OK;
}

rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out) {
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_run_check(run, RFR_RUN_EVALUATE));
  if (!run->data) return rfi_fail(RFI_E_ARGUMENT, "the run was opened without data");
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(run->data);
  const int64_t held_out = stats->windows[RFI_VALIDATION];
  if (stats->validation_predicted <= 0)
    return rfi_fail(
        RFI_E_DATA_HELD_OUT, "data.validation holds out nothing to evaluate on: %lld of %lld files, %lld bytes",
        (long long)stats->files[RFI_VALIDATION], (long long)(stats->files[RFI_TRAIN] + stats->files[RFI_VALIDATION]),
        (long long)stats->bytes[RFI_VALIDATION]);
  if (windows == 0 || windows > held_out) windows = held_out;
  const double start = rfi_now();
  double nats = 0.0, reported = start;
  for (int64_t w = 0; w < windows; w += run->settings->eval_rows) {
    if (rfi_stop_requested(run))
      return rfi_fail(RFI_E_STOPPED, "the evaluation was stopped after %lld of %lld windows", (long long)w,
                      (long long)windows);
    RFI_TRY(evaluate_batch(run, w, &out->tokens, &nats));
    out->windows = w + run->settings->eval_rows < held_out ? w + run->settings->eval_rows : held_out;
    const double now = rfi_now();
    if (now - reported < PROGRESS_SECONDS || out->windows >= windows) continue;
    reported = now;
    rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_PROGRESS,
                                   .step = run->step,
                                   .windows = out->windows,
                                   .windows_planned = windows,
                                   .windows_held_out = held_out,
                                   .seconds = now - start});
  }
  if (out->tokens == 0) return rfi_fail(RFI_E_DATA_SOURCE, "no held-out window of the program has a target");
  out->windows_held_out = held_out;
  for (int64_t w = 0; w < out->windows; w++) out->bytes += rfi_dataset_window_bytes(run->data, w);
  out->loss = nats / (double)out->tokens;
  out->bits_per_byte = out->bytes > 0 ? nats / log(2.0) / (double)out->bytes : 0.0;
  out->seconds = rfi_now() - start;
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_EVALUATION,
                                 .step = run->step,
                                 .loss = out->loss,
                                 .bits_per_byte = out->bits_per_byte,
                                 .tokens = out->tokens,
                                 .windows = out->windows,
                                 .windows_planned = windows,
                                 .windows_held_out = held_out,
                                 .seconds = out->seconds});
  return RFR_OK;
}

rfr_status rfr_run_evaluate(rfr_run *run, rfr_evaluation *out) { return rfi_evaluate(run, 0, out); }
