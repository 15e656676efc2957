/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs with optimizer.rounding: stochastic: small updates are not lost; bitwise equal eager, replayed, resumed and over
 * ranks, for each optimizer and type of moments; what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"

#define BF16 "precision: {dtype: bf16}\n"
#define STOCHASTIC(keys) "optimizer: {lr: 3e-3, clip: 1.0, master_weights: false, rounding: stochastic, " keys "}\n"
#define WITH(model, optimizer, rest) "refrain: 1\n" model DATA TWO_BATCHES optimizer rest RUN
#define LARGE                                                                                  \
  "model: {model_type: llama, hidden_size: 64, intermediate_size: 72, num_hidden_layers: 1,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 2}\n"

enum { STEPS = 10 };

/* ---- bits ---- */

static void test_bits(void **state) {
  (void)state;
  rft_assert_same_bits(WITH(LLAMA, STOCHASTIC("name: adamw"), BF16), "adamw", STEPS);
  rft_assert_same_bits(WITH(LARGE, STOCHASTIC("name: adamw, state_dtype: u8, gradient_dtype: model"), BF16), "adamw8",
                       STEPS);
  rft_assert_same_bits(WITH(LLAMA, STOCHASTIC("name: sgd, momentum: 0.9, state_dtype: bf16"), BF16), "sgd", STEPS);
  rft_assert_same_bits(WITH(EXPERTS, STOCHASTIC("name: muon"), BF16), "muon", STEPS);
}

/* ---- small updates ---- */

/* The mean movement of a weight if every update is much smaller than half an ulp: SGD with a tiny rate. */
static double moved(rfr_ctx *own, const char *rounding) {
  char set[64];
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  const char *sets[1] = {set};
  rfr_tensor x;
  rfr_run *run;
  snprintf(set, sizeof set, "optimizer.rounding=%s", rounding);
  o.overrides = sets, o.n_overrides = 1;
  run = rft_run_open(own,
                     WITH(LLAMA, "optimizer: {name: sgd, lr: 1e-6, weight_decay: 100, master_weights: false}\n",
                          BF16 "schedule: {name: constant}\n"),
                     NULL, &o);
  OK(rfr_programs_tensor(run->programs, "model.embed_tokens.weight", &x));
  const int64_t n = x.bytes / 2;
  double before = 0, after = 0;
  for (int64_t i = 0; i < n; i++) before += fabs(rfr_float_from_bits(RFR_BF16, ((uint16_t *)x.data)[i]));
  rft_run_steps(run, 40);
  for (int64_t i = 0; i < n; i++) after += fabs(rfr_float_from_bits(RFR_BF16, ((uint16_t *)x.data)[i]));
  rfr_run_close(run);
  return (before - after) / before;
}

/* 40 steps shrink a weight by 40 lr decay = 0.004 of its value. Half an ulp of bf16 is 0.002 to 0.004 of the value, so
 * rounding to nearest loses each update of 0.0001. */
static void test_small_updates(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  (void)state;
  assert_true(moved(own, "nearest") == 0.0);
  const double share = moved(own, "stochastic");
  if (fabs(share - 0.004) > 0.0005) fail_msg("moved by %g", share);
  rfr_ctx_destroy(own);
}

/* ---- ranks ---- */

typedef struct job {
  const char *config, *set;
  rfi_hash hash;
  double loss;
} job;

static void keep_loss(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_METRICS) ((job *)user)->loss = e->loss;
}

static rfr_status train(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.overrides = &j->set, o.n_overrides = 1;
  o.on_event = keep_loss, o.event_user = j;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, NULL, &o, &run);
  for (int i = 0; i < STEPS && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rft_hash_state(run, &j->hash);
  rfr_run_close(run);
  return s;
}

/* An element has the same draw on whichever rank its part is. */
static void test_ranks(void **state) {
  static const char *const modes[] = {"parallel.shard=none", "parallel.shard=optimizer", "parallel.shard=full"};
  static const char *const configs[] = {WITH(LARGE, STOCHASTIC("name: adamw"), BF16),
                                        WITH(LARGE, STOCHASTIC("name: sgd, momentum: 0.5"), BF16)};
  job first = {0}, jobs[3];
  (void)state;
  for (int c = 0; c < 2; c++)
    for (int m = 0; m < 3; m++) {
      for (int r = 0; r < 2; r++) jobs[r] = (job){.config = configs[c], .set = modes[m]};
      rft_run_ranks(2, jobs, sizeof *jobs, train);
      if (m == 0) first = jobs[0];
      for (int r = 0; r < 2; r++) assert_memory_equal(&jobs[r].hash, &first.hash, sizeof first.hash);
    }
  for (int r = 0; r < 2; r++) jobs[r] = (job){.config = configs[0], .set = "model.num_hidden_layers=2"};
  rft_run_ranks(1, jobs, sizeof *jobs, train);
  first = jobs[0];
  for (int r = 0; r < 2; r++)
    jobs[r] = (job){.config = WITH(LARGE, STOCHASTIC("name: adamw"), BF16 "parallel: {pipeline: 2}\n"),
                    .set = "model.num_hidden_layers=2"};
  rft_run_ranks(2, jobs, sizeof *jobs, train);
  assert_true(fabs(jobs[0].loss - first.loss) < 1e-3); /* the same draws, but sums in another order */
}

static void refuse(const char *config, const char *text) {
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  o.config_folder = rft_run_root;
  assert_int_not_equal(rfr_run_open(ctx, config, NULL, &o, &run), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "config.value");
  if (!strstr(rfr_last_error()->message, text)) fail_msg("%s", rfr_last_error()->message);
}

static void test_refused(void **state) {
  (void)state;
  refuse(WITH(LLAMA, STOCHASTIC("name: adamw"), SINGLE), "is for weights in bf16, and these are f32");
  refuse(WITH(LLAMA, STOCHASTIC("name: adamw"), HALF), "is for weights in bf16, and these are f16");
  refuse(WITH(LLAMA, "optimizer: {name: adamw, lr: 1e-3, rounding: stochastic}\n", BF16),
         "optimizer.master_weights: false");
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_one_thread_test(test_bits), rft_one_thread_test(test_small_updates),
                                     rft_context_test(test_ranks), rft_context_test(test_refused)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
