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
  int32_t *tokens = run->eval_tokens.data, *targets = run->eval_targets.data, *offsets = run->eval_offsets.data;
  RFI_TRY(rfi_fill_rows(run, RFI_VALIDATION, first, s->eval_rows, tokens, targets, offsets));
  for (int64_t i = 0; i < s->spec.eval_tokens; i++) *predicted += targets[i] != RFI_IGNORE;
  return RFR_OK;
}

rfr_status rfi_evaluate(rfr_run *run, int64_t windows, rfr_evaluation *out) {
  memset(out, 0, sizeof *out);
  const int program = rfr_run_program_index(run, RFR_RUN_EVALUATE);
  if (program < 0 || !run->data) return rfi_fail(RFI_E_ARGUMENT, "the run was opened without data for evaluation");
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(run->data);
  if (stats->validation_predicted <= 0)
    return rfi_fail(RFI_E_DATA_EMPTY, "data.validation holds out nothing to evaluate on");
  if (windows == 0 || windows > stats->windows[RFI_VALIDATION]) windows = stats->windows[RFI_VALIDATION];
  const double start = rfi_now();
  double nats = 0.0;
  for (int64_t w = 0; w < windows; w += run->settings->eval_rows) {
    rfr_tensor nll;
    RFI_TRY(fill_batch(run, w, &out->tokens));
    RFI_TRY(rfi_launch(run, RFR_RUN_EVALUATE));
    RFI_TRY(rfr_program_output(run->programs, program, RFI_NAME_NLL, &nll));
    nats += *(const float *)nll.data;
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
