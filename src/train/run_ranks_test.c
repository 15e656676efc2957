/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs over several ranks, which are threads: their end, their folders, ranks that differ, and what is refused.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "train/evaluate.h"

/* ---- stop requests ---- */

typedef struct job {
  const char *config;
  rfr_run *run;
  int steps;
  int stops; /* the request comes after this step; 0: no request */
} job;

static void request_stop(const rfr_event *e, void *user) {
  job *j = user;
  if (e->kind == RFR_EVENT_METRICS) j->steps = (int)e->step;
  if (e->kind == RFR_EVENT_METRICS && e->step == j->stops) rfr_run_request_stop(j->run);
}

static rfr_status train_until_stop(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rfr_run_options o = rfr_run_options_default();
  (void)number;
  o.config_folder = rft_run_root;
  o.on_event = request_stop, o.event_user = j;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, NULL, &o, &j->run);
  if (s == RFR_OK) s = rfr_run_train(j->run);
  rfr_run_close(j->run);
  return s == RFR_STOPPED ? RFR_OK : s == RFR_OK ? rfi_fail(RFI_E_INTERNAL, "the run did not stop") : s;
}

/* A stop request on one rank ends the run on all ranks after the same step. */
static void stop(void **state) {
  job jobs[3];
  (void)state;
  for (int r = 0; r < 3; r++)
    jobs[r] = (job){.config = "refrain: 1\n" LLAMA DATA "batch: {tokens: 96, microbatch: 2}\n" ADAM SINGLE
                              "run: {steps: 40, evaluate_every: 10}\n",
                    .stops = r == 1 ? 2 : 0};
  rft_run_ranks(3, jobs, sizeof *jobs, train_until_stop);
  assert_true(jobs[0].steps >= 3 && jobs[0].steps < 10);
  for (int r = 1; r < 3; r++) assert_int_equal(jobs[r].steps, jobs[0].steps);
}

/* A stop request before an evaluation ends it, and no step follows. */
static void stop_of_evaluation(void **state) {
  job jobs[3];
  (void)state;
  for (int r = 0; r < 3; r++)
    jobs[r] = (job){.config = "refrain: 1\n" LLAMA DATA "batch: {tokens: 96, microbatch: 2}\n" ADAM SINGLE
                              "run: {steps: 40, evaluate_every: 10}\n",
                    .stops = r == 1 ? 10 : 0};
  rft_run_ranks(3, jobs, sizeof *jobs, train_until_stop);
  for (int r = 0; r < 3; r++) assert_int_equal(jobs[r].steps, 10);
}

/* ---- evaluation ---- */

typedef struct reading {
  const char *mode;
  rfr_evaluation e, five; /* over all windows; over five batches */
} reading;

static rfr_status evaluate_folder(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  reading *x = rank;
  char folder[160];
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  (void)number;
  snprintf(folder, sizeof folder, "%s/evaluated", rft_run_root);
  o.overrides = &x->mode, o.n_overrides = 1;
  o.programs = RFR_RUN_EVALUATE;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, NULL, folder, &o, &run);
  if (s == RFR_OK) s = rfr_run_evaluate(run, &x->e);
  if (s == RFR_OK) s = rfi_evaluate(run, 5 * run->settings->eval_rows, &x->five);
  rfr_run_close(run);
  return s;
}

/* Any number of ranks is bitwise equal to one. */
static void evaluation(void **state) {
  static const char *const modes[] = {"parallel.shard=none", "parallel.shard=optimizer", "parallel.shard=full"};
  (void)state;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = rft_run_root;
  rfr_run *run = rft_run_open(
      ctx, "refrain: 1\n" LLAMA DATA "batch: {tokens: 384, microbatch: 2}\n" ADAM SINGLE "run: {steps: 4, seed: 3}\n",
      "evaluated", &o);
  OK(rfr_run_train(run));
  rfr_run_close(run);
  reading one = {.mode = modes[0]};
  rft_run_ranks(1, &one, sizeof one, evaluate_folder);
  for (int ranks = 2; ranks <= 4; ranks++)
    for (int m = 0; m < 3; m++) {
      if (RFT_LEFT_OUT(ranks + m, 3)) continue;
      reading all[4];
      for (int r = 0; r < ranks; r++) all[r] = (reading){.mode = modes[m]};
      rft_run_ranks(ranks, all, sizeof *all, evaluate_folder);
      for (int r = 0; r < ranks; r++) {
        assert_int_equal(all[r].e.windows, one.e.windows);
        assert_int_equal(all[r].e.tokens, one.e.tokens);
        assert_int_equal(all[r].five.tokens, one.five.tokens);
        if (all[r].e.loss != one.e.loss || all[r].five.loss != one.five.loss)
          fail_msg("%s, rank %d of %d: %.17g instead of %.17g", modes[m], r, ranks, all[r].e.loss, one.e.loss);
      }
    }
}

/* ---- folders ---- */

typedef struct visit {
  const char *config, *folder, *set[RFT_MOST_RANKS];
  int resume, steps;
  rfr_status status;
  char slug[48], message[512];
  double loss[13];
  rfi_hash state;
} visit;

static void keep_loss(const rfr_event *e, void *user) {
  visit *v = user;
  if (e->kind == RFR_EVENT_METRICS) v->loss[e->step] = e->loss;
}

/* Runs in a folder to the end; returns the error, which some tests expect. */
static rfr_status train_in_folder(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  visit *v = rank;
  char folder[160], steps[32];
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  snprintf(folder, sizeof folder, "%s/%s", rft_run_root, v->folder);
  snprintf(steps, sizeof steps, "run.steps=%d", v->steps);
  const char *const sets[] = {steps, v->set[number]};
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = v->set[number] ? 2 : 1;
  o.on_event = keep_loss, o.event_user = v;
  o.resume = v->resume;
  o.comm = comm;
  v->status = rfr_run_open(own, v->config, folder, &o, &run);
  if (v->status == RFR_OK) v->status = rfr_run_train(run);
  if (v->status == RFR_OK) v->status = rft_hash_state(run, &v->state);
  if (v->status != RFR_OK) {
    snprintf(v->slug, sizeof v->slug, "%s", rfr_last_error()->slug);
    snprintf(v->message, sizeof v->message, "%s", rfr_last_error()->message);
  }
  rfr_run_close(run);
  return RFR_OK;
}

static visit visit_folder(int ranks, visit v) {
  visit all[RFT_MOST_RANKS];
  for (int r = 0; r < ranks; r++) all[r] = v;
  rft_run_ranks(ranks, all, sizeof *all, train_in_folder);
  for (int r = 1; r < ranks; r++) {
    assert_int_equal(all[r].status, all[0].status);
    assert_string_equal(all[r].message, all[0].message);
    assert_true(rfi_hash_equal(all[r].state, all[0].state));
  }
  return all[0];
}

#define FOLDER_CONFIG                                                                                 \
  "refrain: 1\n" LLAMA DATA "batch: {tokens: 384, microbatch: 2}\n" ADAM "precision: {dtype: bf16}\n" \
  "schedule: {name: constant}\nrun: {steps: 6, seed: 3, checkpoint_every: 4, evaluate_windows: 4}\n"

/* Several ranks write the same folder as one rank, and continue from it bitwise equal. */
static void folders(void **state) {
  static const char *const modes[] = {"parallel.shard=none", "parallel.shard=optimizer", "parallel.shard=full"};
  (void)state;
  for (int m = 0; m < 3; m++) {
    if (RFT_LEFT_OUT(m, 2)) continue;
    char at_once[32], parts[32];
    snprintf(at_once, sizeof at_once, "once-%d", m);
    snprintf(parts, sizeof parts, "parts-%d", m);
    const char *mode = modes[m];
    const visit once = visit_folder(3, (visit){FOLDER_CONFIG, at_once, {mode, mode, mode}, 0, 8});
    if (once.status != RFR_OK) fail_msg("%s: %s", mode, once.message);
    visit v = visit_folder(3, (visit){FOLDER_CONFIG, parts, {mode, mode, mode}, 0, 5});
    assert_int_equal(v.status, RFR_OK);
    v = visit_folder(3, (visit){FOLDER_CONFIG, parts, {mode, mode, mode}, 1, 8});
    if (v.status != RFR_OK) fail_msg("%s: %s", mode, v.message);
    assert_true(rfi_hash_equal(v.state, once.state));
    assert_true(v.loss[6] == once.loss[6] && v.loss[5] == 0);
    /* resumed by another number of ranks, in another mode */
    v = visit_folder(2, (visit){FOLDER_CONFIG, parts, {modes[2 - m], modes[2 - m]}, 1, 9});
    if (v.status != RFR_OK) fail_msg("%s: %s", mode, v.message);
    assert_true(v.loss[9] > 0 && v.loss[8] == 0);
    v = visit_folder(1, (visit){FOLDER_CONFIG, parts, {NULL}, 1, 10});
    if (v.status != RFR_OK) fail_msg("%s: %s", mode, v.message);
    assert_true(v.loss[10] > 0 && v.loss[9] == 0);
  }
}

/* Ranks that differ, and a rank that fails, are named on all ranks; no file is written. */
static void disagree(void **state) {
  static const struct {
    const char *set, *slug, *message;
  } cases[] = {
      {"optimizer.lr=1e-4", "dist.run", "rank 1 has another optimizer.lr than rank 0"},
      {"parallel.shard=full", "dist.run", "rank 1 has another parallel.shard than rank 0"},
      {"data.validation=60%", "dist.run", "data of rank 0 is "},
      {"data.train=none/*", "data.empty", "rank 1: "},
      {"memory.budget=1KiB", "plan.over_budget", "rank 1: "},
      {"model.heads=3", "config.key", "rank 1: --set model.heads=3"},
  };
  char kind;
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const visit v = visit_folder(3, (visit){FOLDER_CONFIG, "differ", {NULL, cases[i].set}, 0, 2});
    if (strcmp(v.slug, cases[i].slug) != 0 || strncmp(v.message, cases[i].message, strlen(cases[i].message)) != 0)
      fail_msg("%s: %s: %s", cases[i].set, v.slug, v.message);
    assert_int_equal(rfi_path_kind(rft_run_folder("differ"), &kind), RFR_OK);
    assert_int_equal(kind, 0);
  }
}

/* ---- what is refused ---- */

static void refused(void **state) {
  static const struct {
    const char *set, *slug, *says;
  } cases[] = {
      {"batch.tokens=160", "config.value", "5 microbatches, which 2 ranks do not divide; give 128 or 192"},
      {"batch.tokens=32", "config.value", "which 2 ranks do not divide; give 64"},
      {"parallel.data=3", "config.value", "parallel.data: 3, but there are 2 ranks"},
      {"parallel.expert=2", "config.value", "parallel.expert: 2, but the model has no experts; give 1"},
      {"parallel.expert=3", "config.value", "parallel.expert: 3, but there are 2 ranks"},
      {"run.time=5s", "unsupported", "run.time over 2 ranks"},
      {"run.tune=true", "unsupported", "run.tune over 2 ranks"},
  };
  rfr_comm *comm[2];
  rfr_run *run;
  (void)state;
  OK(rfr_comm_threads_create(ctx, 2, 0, comm));
  rfr_comm_destroy(comm[1]); /* not used in this test */
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *const sets[] = {"parallel.shard=full", "schedule.name=constant", cases[i].set};
    rfr_run_options o = rfr_run_options_default();
    o.config_folder = rft_run_root;
    o.overrides = sets, o.n_overrides = 3;
    o.comm = comm[0];
    assert_int_not_equal(rfr_run_open(ctx,
                                      "refrain: 1\n" LLAMA DATA "batch: {tokens: 384, microbatch: 2}\n" ADAM SINGLE
                                      "run: {steps: 6}\n",
                                      NULL, &o, &run),
                         RFR_OK);
    assert_null(run);
    if (strcmp(rfr_last_error()->slug, cases[i].slug) != 0 || !strstr(rfr_last_error()->message, cases[i].says))
      fail_msg("%s: %s: %s", cases[i].set, rfr_last_error()->slug, rfr_last_error()->message);
  }
  rfr_comm_destroy(comm[0]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(stop),    rft_context_test(stop_of_evaluation), rft_context_test(evaluation),
      rft_context_test(folders), rft_context_test(disagree),           rft_context_test(refused),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
