/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs whose layers are spread over the ranks of a pipeline, which are threads, against one rank; a plan of a rank
 * against its memory; and what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "train/run.h"

#define STEPS RFT_FEWER(6, 3)

typedef struct job {
  const char *config, *schedule;
  int ranks;
  double loss[STEPS + 1], norm[STEPS + 1];
  int64_t tokens, planned;
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  if (e->kind == RFR_EVENT_METRICS && e->step <= STEPS)
    j->loss[e->step] = e->loss, j->norm[e->step] = e->grad_norm, j->tokens = e->tokens;
}

static int64_t planned_bytes(const rfr_run *run) {
  rfr_plan_summary plan;
  rfr_graphs_memory m;
  if (rfr_program_plan(run->programs, 0, &plan) != RFR_OK) return -1;
  if (!run->stages) return plan.planned_bytes;
  rfi_stages_memory(run->stages, &m);
  /* programs and callables share the step memory */
  if (plan.planned_bytes - plan.persistent_bytes != m.step_memory_bytes) return -1;
  return plan.planned_bytes + m.planned_bytes - m.step_memory_bytes;
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  char pipeline[64], schedule[64];
  const char *const sets[] = {schedule, pipeline};
  rfr_run *run;
  (void)number;
  snprintf(schedule, sizeof schedule, "parallel.schedule=%s", j->schedule);
  snprintf(pipeline, sizeof pipeline, "parallel.pipeline=%d", j->ranks);
  for (int plan_only = 1; plan_only >= 0; plan_only--) {
    rfr_run_options o = rfr_run_options_default();
    o.config_folder = rft_run_root;
    o.overrides = sets, o.n_overrides = j->ranks > 1 ? 2 : 0;
    o.on_event = on_event, o.event_user = j;
    o.comm = comm;
    o.plan_only = plan_only;
    rfr_status s = rfr_run_open(own, j->config, NULL, &o, &run);
    if (s == RFR_OK && plan_only) j->planned = planned_bytes(run);
    if (s == RFR_OK && (j->planned < 0 || planned_bytes(run) != j->planned))
      s = rfi_fail(RFI_E_INTERNAL, "%lld bytes are planned, %lld used", (long long)j->planned,
                   (long long)planned_bytes(run));
    for (int i = 0; s == RFR_OK && !plan_only && i < STEPS; i++) s = rfr_run_step(run);
    if (s != RFR_OK) return rfr_run_close(run), s;
    rfr_run_close(run);
  }
  return RFR_OK;
}

static job train(int ranks, const char *config, const char *schedule) {
  job jobs[RFT_MOST_RANKS];
  for (int r = 0; r < ranks; r++) jobs[r] = (job){.config = config, .schedule = schedule, .ranks = ranks};
  rft_run_ranks(ranks, jobs, sizeof *jobs, work);
  for (int r = 1; r < ranks; r++) assert_memory_equal(jobs[r].loss, jobs[0].loss, sizeof jobs[0].loss);
  return jobs[0];
}

#define EIGHT                                                                                                \
  "model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 8, dropout: 0.1,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 2}\n"
#define BATCH "batch: {tokens: 192, microbatch: 2}\n" /* 6 microbatches */
#define STEPS_RUN "run: {steps: " RFT_STRING(STEPS) ", seed: 3}\n"
#define RECIPE(name)                                                                                                   \
  "refrain: 1\nmodel: {model_type: llama, hidden_size: 64, num_hidden_layers: 8, num_attention_heads: 4}\n" DATA BATCH \
      ADAM "precision: {dtype: bf16, recipe: " name "}\n" STEPS_RUN

static void schedules(void **state) {
  static const char *const names[] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};
  static const struct {
    const char *config;
    double tolerance;
    bool one; /* only one schedule, with two ranks: earlier rows cover the others */
  } rows[] = {
      {"refrain: 1\n" EIGHT DATA BATCH ADAM SINGLE STEPS_RUN, 1e-6},
      {"refrain: 1\nmodel: {model_type: gpt2, hidden_size: 24, num_hidden_layers: 9, num_attention_heads: 3}\n" DATA
           BATCH ADAM "precision: {dtype: bf16}\nmemory: {recompute: all}\n" STEPS_RUN,
       5e-3},
      {"refrain: 1\n" EIGHT DATA BATCH ADAM SINGLE "adapter: {type: lora, rank: 4, dropout: 0.1}\n" STEPS_RUN, 1e-6},
      {RECIPE("none"), 1e-6, true},
      {RECIPE("fp8_current"), 1e-6, true},
      {RECIPE("fp8_block"), 1e-6, true},
      {RECIPE("mxfp8"), 1e-6, true},
      {RECIPE("nvfp4"), 1e-6, true},
      {RECIPE("fp8_delayed"), 1e-6, true},
      {"refrain: 1\n" EIGHT DATA BATCH "optimizer: {name: muon, lr: 3e-3, clip: 1.0}\n" SINGLE STEPS_RUN, 1e-6, true},
  };
  double last = 0;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (RFT_LEFT_OUT(i + 1, 2)) continue;
    const job one = train(1, rows[i].config, "");
    assert_true(one.loss[STEPS] != last); /* the recipe of the row has an effect */
    last = one.loss[STEPS];
    const int first = rows[i].one ? (int)i % 5 : 0, end = rows[i].one ? first + 1 : 5, most = rows[i].one ? 2 : 4;
    for (int k = first; k < end; k++)
      for (int ranks = 2; ranks <= most; ranks++) {
        if (!rows[i].one && RFT_LEFT_OUT(k + ranks, 3)) continue;
        const job j = train(ranks, rows[i].config, names[k]);
        double d = 0;
        for (int step = 1; step <= STEPS; step++)
          d = fmax(d, fmax(fabs(j.loss[step] / one.loss[step] - 1), fabs(j.norm[step] / one.norm[step] - 1)));
        if (d > rows[i].tolerance) fail_msg("row %zu, %s, %d ranks: differs by %g", i, names[k], ranks, d);
        assert_int_equal(j.tokens, one.tokens);
      }
  }
}

static void refused(void **state) {
  static const struct {
    const char *set, *slug, *says;
  } cases[] = {
      {"parallel.pipeline=3", "config.value", "parallel.pipeline: 3 does not divide the 2 ranks"},
      {"parallel.shard=full", "config.value", "parallel.shard: full with a pipeline"},
      {"parallel.data=2", "config.value", "parallel.data: 2, but 2 ranks in pipelines of 2 are 1"},
      {"model.num_hidden_layers=3", "config.value",
       "parallel.pipeline: 2 with parallel.schedule: interleaved has 4 stages, but model.num_hidden_layers is 3; give "
       "parallel.pipeline: 1 or less, or parallel.schedule: 1f1b"},
      {"run.time=5s", "unsupported", "run.time over 2 ranks"},
  };
  rfr_comm *comm[2];
  rfr_run *run;
  (void)state;
  OK(rfr_comm_threads_create(ctx, 2, 1, comm));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *const sets[] = {"parallel.pipeline=2", "parallel.schedule=interleaved", "schedule.name=constant",
                                cases[i].set};
    rfr_run_options o = rfr_run_options_default();
    o.config_folder = rft_run_root;
    o.overrides = sets, o.n_overrides = 4;
    o.comm = comm[0];
    o.plan_only = 1; /* a plan does not connect to other ranks */
    if (rfr_run_open(ctx, "refrain: 1\n" EIGHT DATA BATCH ADAM STEPS_RUN, NULL, &o, &run) == RFR_OK)
      fail_msg("%s: accepted", cases[i].set);
    if (strcmp(rfr_last_error()->slug, cases[i].slug) != 0 || !strstr(rfr_last_error()->message, cases[i].says))
      fail_msg("%s: %s: %s", cases[i].set, rfr_last_error()->slug, rfr_last_error()->message);
  }
  rfr_comm_destroy(comm[0]);
  rfr_comm_destroy(comm[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(schedules), rft_context_test(refused)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
