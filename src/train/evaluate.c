/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation: every held-out window once, in order, in batches of the evaluation
 * program's shape. Windows past the end are padding without targets. The program gives a
 * sum in nats; the sums add up in double here, in a fixed order.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "train/run.h"

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

rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out) {
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_run_check(run, RFR_RUN_EVALUATE));
  if (!run->data) return rfi_fail(RFI_E_ARGUMENT, "the run was opened without data for evaluation");
  const int program = rfr_run_program_index(run, RFR_RUN_EVALUATE);
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(run->data);
  if (stats->validation_predicted <= 0)
    return rfi_fail(
        RFI_E_DATA_HELD_OUT, "data.validation holds out nothing to evaluate on: %lld of %lld files, %lld bytes",
        (long long)stats->files[RFI_VALIDATION], (long long)(stats->files[RFI_TRAIN] + stats->files[RFI_VALIDATION]),
        (long long)stats->bytes[RFI_VALIDATION]);
  if (windows == 0 || windows > stats->windows[RFI_VALIDATION]) windows = stats->windows[RFI_VALIDATION];
  const double start = rfi_now();
  double nats = 0.0;
  for (int64_t w = 0; w < windows; w += run->settings->eval_rows) {
    rfr_tensor nll;
    RFI_TRY(fill_batch(run, w, &out->tokens));
    RFI_TRY(rfi_launch(run, RFR_RUN_EVALUATE));
    RFI_TRY(rfr_program_output(run->programs, program, RFI_NAME_NLL, &nll));
    float sum;
    RFI_TRY(rfr_programs_read(run->programs, &nll, &sum));
    nats += sum;
  }
  out->bytes = out->tokens; /* a token is a byte */
  out->loss = nats / (double)out->tokens;
  out->bits_per_byte = nats / log(2.0) / (double)out->bytes;
  out->seconds = rfi_now() - start;
  rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_EVALUATION,
                             .step = run->step,
                             .loss = out->loss,
                             .bits_per_byte = out->bits_per_byte,
                             .tokens = out->tokens,
                             .seconds = out->seconds});
  return RFR_OK;
}

rfr_status rfr_run_evaluate(rfr_run *run, rfr_evaluation *out) { return rfi_evaluate(run, 0, out); }
