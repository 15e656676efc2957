/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation: held-out windows in order, each once, in batches of the evaluation program's shape. An evaluation of
 * fewer windows takes batches at equal distances, because files are in the order of their names, and the first ones may
 * be unlike the others. Windows past the end are padding without targets. Each batch gives a sum in nats, with
 * preferences one for each answer; the sums are added in double, in a fixed order.
 *
 * Data-parallel ranks take turns: rank b % ranks computes batch b. All ranks get the sums of all batches and add them
 * in the order of the batches, so the result does not depend on the number of ranks. The same exchange carries the
 * request to stop, so that all ranks stop after the same batch. All ranks launch equally often, because the program may
 * have collectives.
 */
#include "train/evaluate.h"

#include <math.h>
#include <string.h>

#include "base/base.h"
#include "dist/comm.h"
#include "ops/loss/dpo_pair.h"
#include "train/batch.h"
#include "train/events.h"
#include "train/host.h"
#include "train/run_programs.h"
#include "train/stage_evaluate.h"

#define PROGRESS_SECONDS 0.2 /* minimum time between progress events */
enum { GROUP_BATCHES = 8 };  /* the first rank of a pipeline may be so many batches ahead of the last */

/* Fills the next batch, from window `first`; adds its number of targets to *predicted. `pairs`: see rfi_batch. */
static rfr_status fill_batch(rfr_run *run, rfi_split split, int64_t first, int32_t *pairs, int64_t *predicted) {
  const rfi_settings *s = run->settings;
  const rfr_tensor *const x[3] = {&run->eval_tokens, &run->eval_targets, &run->eval_offsets};
  void *host[3] = {NULL};
  rfr_status status = RFR_OK;
  for (int i = 0; i < 3 && status == RFR_OK; i++) status = rfi_host_open(run, x[i], RFI_HOST_WRITE, &host[i]);
  const rfi_batch batch = {s->eval_rows, host[0], host[1], host[2], pairs};
  if (status == RFR_OK) status = rfi_fill_batch(run, split, pairs != NULL, first, &batch);
  for (int64_t i = 0; i < s->spec.eval_tokens && status == RFR_OK; i++) *predicted += batch.targets[i] != RFI_IGNORE;
  for (int i = 0; i < 3; i++) status = rfi_host_close(run, x[i], RFI_HOST_WRITE, host[i], status);
  return status;
}

/* Launches the program and reads its losses. */
static rfr_status read_losses(rfr_run *run, float *losses) {
  rfr_tensor nll;
  RFI_TRY(rfi_launch(run, RFR_RUN_EVALUATE));
  RFI_TRY(rfr_program_output(run->programs, rfr_run_program_index(run, RFR_RUN_EVALUATE), RFI_NAME_NLL, &nll));
  return rfr_programs_read(run->programs, &nll, losses);
}

rfr_status rfi_evaluate_pairs(rfr_run *run, rfi_split split, int64_t first, int32_t *pairs, float *losses,
                              int64_t *predicted) {
  rfi_ctx_advance(run->ctx);
  RFI_TRY(fill_batch(run, split, first, pairs, predicted));
  return read_losses(run, losses);
}

bool rfi_run_evaluates(const rfr_run *run) {
  return run->data && rfi_dataset_get_stats(run->data)->validation_predicted > 0 &&
         rfr_run_program_index(run, RFR_RUN_EVALUATE) >= 0;
}

/* Sums over an evaluation. nats: sum of token losses, with preferences of pair losses. */
typedef struct totals {
  double nats, margin, accuracy;
  int64_t pairs, tokens;
} totals;

static void add(totals *sum, const totals *x) {
  sum->nats += x->nats;
  sum->margin += x->margin;
  sum->accuracy += x->accuracy;
  sum->pairs += x->pairs;
  sum->tokens += x->tokens;
}

static void add_pairs(const rfr_run *run, const int32_t *pairs, const float *losses, totals *sum) {
  const rfi_step_spec *s = &run->settings->spec;
  for (int64_t p = 0; p < rfi_most_pairs(s->eval_tokens); p++) {
    if (pairs[p] < 0) continue;
    const double h = rfi_dpo_gain(losses[2 * p], losses[2 * p + 1], run->reference[RFI_VALIDATION][pairs[p]]);
    sum->nats += rfi_dpo_loss(s->beta * h, s->smoothing);
    sum->margin += s->beta * h;
    sum->accuracy += h > 0;
    sum->pairs++;
  }
}

static rfr_status evaluate_batch(rfr_run *run, int64_t first, totals *sum) {
  float loss;
  if (!run->settings->spec.preference) {
    RFI_TRY(fill_batch(run, RFI_VALIDATION, first, NULL, &sum->tokens));
    RFI_TRY(run->stages ? rfi_stages_evaluate(run, &loss) : read_losses(run, &loss));
    sum->nats = loss;
    return RFR_OK;
  }
  const size_t most = (size_t)rfi_most_pairs(run->settings->spec.eval_tokens);
  int32_t *pairs = NULL;
  float *losses = NULL;
  rfr_status s;
  RFI_GOTO(RFI_ALLOC(run->ctx, most * sizeof *pairs, &pairs));
  RFI_GOTO(RFI_ALLOC(run->ctx, 2 * most * sizeof *losses, &losses));
  RFI_GOTO(rfi_evaluate_pairs(run, RFI_VALIDATION, first, pairs, losses, &sum->tokens));
  add_pairs(run, pairs, losses, sum);
fail:
  rfi_free(run->ctx, pairs);
  rfi_free(run->ctx, losses);
  return s;
}

/* A rank's sums over its batches of a group, sent to the other ranks. */
typedef struct report {
  totals batch[GROUP_BATCHES];
  int64_t stops;
} report;
_Static_assert(sizeof(report) <= RFI_EXCHANGE_BYTES, "one exchange");

/* The batches of an evaluation, a part of the `all` batches that the held-out windows fill. */
typedef struct selection {
  int64_t batches, all, rows, held_out;
} selection;

/* The first window of batch i; for a batch that does not exist, past the end. */
static int64_t window_of(const selection *x, int64_t i) {
  return (i < x->batches ? i * x->all / x->batches : x->all) * x->rows;
}

static int64_t windows_in(const selection *x, int64_t i) {
  const int64_t left = x->held_out - window_of(x, i);
  return left < x->rows ? left : x->rows;
}

/* Evaluates a group, `each` batches of every rank from batch `first` on, and adds up their sums. */
static rfr_status evaluate_group(rfr_run *run, int64_t first, int each, const selection *x, totals *sum) {
  const rfi_parallel *p = &run->settings->parallel;
  const rfi_pipeline_part *pipeline = &run->settings->spec.pipeline;
  const int last = run->stages ? rfi_pipeline_rank(pipeline, rfi_pipeline_stages(pipeline) - 1) * p->data : 0;
  report mine = {0}, *all = &mine;
  for (int i = 0; i < each; i++)
    RFI_TRY(evaluate_batch(run, window_of(x, first + i * p->data + p->rank % p->data), &mine.batch[i]));
  mine.stops = rfi_stop_requested_here(run);
  if (p->ranks > 1) RFI_TRY(rfi_comm_collect(run->ctx, run->options.comm, &mine, sizeof mine, (void **)&all));
  for (int i = 0; i < each * p->data && first + i < x->batches; i++)
    add(sum, &all[last + i % p->data].batch[i / p->data]);
  for (int r = 0; r < p->ranks; r++) run->stop_agreed |= p->ranks > 1 && all[r].stops;
  if (p->ranks > 1) rfi_free(run->ctx, all);
  return RFR_OK;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
  totals sum = {0};
  double reported = start;
  const int64_t rows = run->settings->eval_rows, batches = (windows + rows - 1) / rows;
  const selection x = {batches, (held_out + rows - 1) / rows, rows, held_out};
  const int ranks = run->settings->parallel.data, most = run->stages ? GROUP_BATCHES : 1;
  for (int64_t done = 0, each; done < batches; done += each * ranks) {
    if (rfi_stop_requested(run))
      return rfi_fail(RFI_E_STOPPED, "the evaluation was stopped after %lld of %lld windows", (long long)out->windows,
                      (long long)windows);
    each = least(most, (batches - done + ranks - 1) / ranks);
    RFI_TRY(evaluate_group(run, done, (int)each, &x, &sum));
    for (int64_t i = done; i < least(done + each * ranks, batches); i++) out->windows += windows_in(&x, i);
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
  out->tokens = sum.tokens;
  if (out->tokens == 0) return rfi_fail(RFI_E_DATA_SOURCE, "no held-out window of the program has a target");
  out->windows_held_out = held_out;
  out->pairs = sum.pairs;
  if (sum.pairs > 0) {
    out->loss = sum.nats / (double)sum.pairs;
    out->margin = sum.margin / (double)sum.pairs;
    out->accuracy = sum.accuracy / (double)sum.pairs;
  } else {
    for (int64_t i = 0; i < batches; i++)
      for (int64_t k = 0; k < windows_in(&x, i); k++)
        out->bytes += rfi_dataset_window_bytes(run->data, window_of(&x, i) + k);
    out->loss = sum.nats / (double)out->tokens;
    out->bits_per_byte = out->bytes > 0 ? sum.nats / log(2.0) / (double)out->bytes : 0.0;
  }
  out->seconds = rfi_now() - start;
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_EVALUATION,
                                 .step = run->step,
                                 .loss = out->loss,
                                 .bits_per_byte = out->bits_per_byte,
                                 .margin = out->margin,
                                 .accuracy = out->accuracy,
                                 .tokens = out->tokens,
                                 .windows = out->windows,
                                 .windows_planned = windows,
                                 .windows_held_out = held_out,
                                 .seconds = out->seconds});
  return RFR_OK;
}

rfr_status rfr_run_evaluate(rfr_run *run, rfr_evaluation *out) { return rfi_evaluate(run, 0, out); }
