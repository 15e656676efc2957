/* SPDX-License-Identifier: Apache-2.0
 *
 * Training on pairs over ranks, which are threads, against one rank: losses, margins and evaluation in each mode of
 * parallel.shard. If a rank has no cached reference, all ranks compute it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"

#define STEPS RFT_FEWER(8, 4)

#define SPREAD                                                                                                      \
  "model: {model_type: qwen3_moe, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_experts: 4,\n" \
  "        moe_intermediate_size: 20}\n"
#define CONFIG(model)                                                                         \
  "refrain: 1\n" model SINGLE                                                                 \
  "data: {train: [\"pairs.jsonl\"], validation: 20%, format: preference, tokenizer: bytes,\n" \
  "       sequence: 48}\nbatch: {tokens: 384, microbatch: 2}\npreference: {beta: 0.3}\n"      \
  "optimizer: {name: adamw, lr: 3e-3, clip: 1.0}\nrun: {steps: " RFT_STRING(STEPS) ", seed: 3, log_every: 1}\n"

typedef struct job {
  const char *shard, *cache, *adapter;
  int expert; /* parallel.expert, with experts; 0: a dense model */
  int references;
  double loss[STEPS + 1], norm[STEPS + 1], margin[STEPS + 1];
  rfr_evaluation evaluation;
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  if (e->kind == RFR_EVENT_METRICS) j->loss[e->step] = e->loss, j->norm[e->step] = e->grad_norm;
  if (e->kind == RFR_EVENT_METRICS) j->margin[e->step] = e->margin;
  j->references += e->kind == RFR_EVENT_COMPILE && strstr(e->message, "reference") != NULL;
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  char shard[64], cache[128], expert[64];
  const char *const adapters[] = {shard, cache, "adapter.type=lora", "adapter.rank=4"};
  const char *const experts[] = {shard, cache, expert};
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  (void)number;
  snprintf(shard, sizeof shard, "parallel.shard=%s", j->shard);
  snprintf(cache, sizeof cache, "data.cache=%s", j->cache);
  o.config_folder = rft_run_root;
  snprintf(expert, sizeof expert, "parallel.expert=%d", j->expert);
  o.overrides = j->expert ? experts : adapters, o.n_overrides = j->expert ? 3 : j->adapter ? 4 : 2;
  o.on_event = on_event, o.event_user = j;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->expert ? CONFIG(SPREAD) : CONFIG(LLAMA), NULL, &o, &run);
  if (s == RFR_OK) s = rfr_run_train(run);
  if (s == RFR_OK) s = rfr_run_evaluate(run, &j->evaluation);
  if (s != RFR_OK && comm) rfr_comm_abort(comm);
  rfr_run_close(run);
  return s;
}

/* Pairs of different lengths; the chosen answer contains the letter x. */
static void write_pairs(void) {
  char text[60 * 64], *at = text;
  for (int i = 0; i < 60; i++)
    at += sprintf(at, "{\"prompt\": \"%d?\", \"chosen\": \"%.*sx\", \"rejected\": \"%.*sy\"}\n", i, 1 + i * 5 % 11,
                  "xxxxxxxxxxxx", 1 + i * 3 % 7, "yyyyyyyy");
  rft_write_text("pairs.jsonl", text);
}

static double relative(double a, double b) { return fabs(a - b) / fmax(fabs(b), 1e-3); }

static void against_one_rank(void **state) {
  static const char *const modes[] = {"none", "optimizer", "full"};
  (void)state;
  write_pairs();
  for (int adapts = 0; adapts < 2; adapts++) {
    const char *adapter = adapts ? "lora" : NULL;
    job one = {.shard = "none", .cache = "none", .adapter = adapter}, first = {0};
    rft_run_ranks(1, &one, sizeof one, work);
    assert_true(one.loss[STEPS] < one.loss[1] && one.margin[STEPS] > 0);
    for (int m = 0; m < 3; m++)
      for (int ranks = 2; ranks <= (adapts ? 2 : 4); ranks += 2) {
        job jobs[RFT_MOST_RANKS];
        for (int r = 0; r < ranks; r++) jobs[r] = (job){.shard = modes[m], .cache = "none", .adapter = adapter};
        rft_run_ranks(ranks, jobs, sizeof *jobs, work);
        for (int i = 1; i <= STEPS; i++) {
          const double d = fmax(fmax(relative(jobs[0].loss[i], one.loss[i]), relative(jobs[0].norm[i], one.norm[i])),
                                relative(jobs[0].margin[i], one.margin[i]));
          if (!(d < 1e-4)) fail_msg("%s, %d ranks, step %d: differs by %g", modes[m], ranks, i, d);
        }
        assert_int_equal(jobs[0].evaluation.pairs, one.evaluation.pairs);
        assert_true(relative(jobs[0].evaluation.loss, one.evaluation.loss) < 1e-4);
        for (int r = 1; r < ranks; r++) assert_memory_equal(jobs[r].loss, jobs[0].loss, sizeof one.loss);
        if (m == 0 && ranks == 2) first = jobs[0];
        if (m == 1 && ranks == 2) assert_memory_equal(jobs[0].loss, first.loss, sizeof one.loss);
      }
  }
}

/* Expert parallelism, in two modes of parallel.shard. */
static void spread_experts(void **state) {
  static const char *const modes[] = {"none", "full"};
  (void)state;
  write_pairs();
  job one = {.shard = "none", .cache = "none", .expert = 1};
  rft_run_ranks(1, &one, sizeof one, work);
  for (int m = 0; m < 2; m++) {
    job jobs[2];
    for (int r = 0; r < 2; r++) jobs[r] = (job){.shard = modes[m], .cache = "none", .expert = 2};
    rft_run_ranks(2, jobs, sizeof *jobs, work);
    for (int i = 1; i <= STEPS; i++) {
      const double d = fmax(relative(jobs[0].loss[i], one.loss[i]), relative(jobs[0].margin[i], one.margin[i]));
      if (!(d < 1e-4)) fail_msg("%s, step %d: differs by %g", modes[m], i, d);
    }
  }
}

/* Each host has its own cache. */
static void caches(void **state) {
  char folder[2][160];
  (void)state;
  write_pairs();
  for (int k = 0; k < 2; k++) snprintf(folder[k], sizeof folder[k], "%s/cache-%d", rft_run_root, k);
  job one = {.shard = "none", .cache = folder[0]}, jobs[2];
  rft_run_ranks(1, &one, sizeof one, work);
  for (int times = 0; times < 2; times++) {
    for (int r = 0; r < 2; r++) jobs[r] = (job){.shard = "full", .cache = folder[r]};
    rft_run_ranks(2, jobs, sizeof *jobs, work);
    for (int r = 0; r < 2; r++) assert_int_equal(jobs[r].references, times == 0);
    for (int i = 1; i <= STEPS; i++) assert_true(relative(jobs[0].loss[i], one.loss[i]) < 1e-4);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(against_one_rank), rft_context_test(spread_experts),
                                     rft_context_test(caches)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
