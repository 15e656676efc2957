/* SPDX-License-Identifier: Apache-2.0
 *
 * Layouts of runs over ranks, which are threads, against one rank with as many microbatches, and the modes of
 * parallel.shard against each other, bit by bit.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"

#define STEPS RFT_FEWER(6, 3)

typedef struct job {
  const char *config, *shard;
  int expert;                 /* parallel.expert */
  int skipped;                /* steps */
  char warning[256], end[32]; /* end: how rfr_run_train ended */
  double loss[STEPS + 1], norm[STEPS + 1];
  int64_t tokens, bytes; /* bytes: persistent bytes */
  double bits;           /* bits per byte of the evaluation */
  rfi_hash state;
} job;

static void on_event(const rfr_event *e, void *user) {
  job *j = user;
  if (e->kind == RFR_EVENT_METRICS && e->step <= STEPS)
    j->loss[e->step] = e->loss, j->norm[e->step] = e->grad_norm, j->tokens = e->tokens;
  if (e->kind == RFR_EVENT_METRICS) j->skipped += e->skipped;
  if (e->kind == RFR_EVENT_WARNING) snprintf(j->warning, sizeof j->warning, "%s", e->message);
  if (e->kind == RFR_EVENT_END) snprintf(j->end, sizeof j->end, "%s", e->message);
  if (e->kind == RFR_EVENT_EVALUATION) j->bits = e->bits_per_byte;
}

static rfr_status work(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  char set[64], expert[64];
  const char *const sets[] = {set, expert};
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  (void)number;
  snprintf(set, sizeof set, "parallel.shard=%s", j->shard);
  snprintf(expert, sizeof expert, "parallel.expert=%d", j->expert);
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 2;
  o.on_event = on_event, o.event_user = j;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, NULL, &o, &run);
  for (int i = 0; s == RFR_OK && i < STEPS; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rfr_run_train(run); /* runs only the final evaluation */
  if (s == RFR_NUMERIC) s = RFR_OK;        /* the tests compare j->end */
  if (s == RFR_OK) s = rft_hash_state(run, &j->state);
  rfr_plan_summary plan = {0};
  if (s == RFR_OK) s = rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), &plan);
  j->bytes = plan.persistent_bytes;
  if (s != RFR_OK && comm) rfr_comm_abort(comm);
  rfr_run_close(run);
  return s;
}

static job train_spread(int ranks, const char *config, const char *shard, int expert) {
  job jobs[RFT_MOST_RANKS];
  for (int r = 0; r < ranks; r++) jobs[r] = (job){.config = config, .shard = shard, .expert = expert};
  rft_run_ranks(ranks, jobs, sizeof *jobs, work);
  for (int r = 1; r < ranks; r++) {
    if (!rfi_hash_equal(jobs[r].state, jobs[0].state)) fail_msg("%d ranks, %s: rank %d differs", ranks, shard, r);
    assert_memory_equal(jobs[r].loss, jobs[0].loss, sizeof jobs[0].loss);
    assert_true(jobs[r].bits == jobs[0].bits);
  }
  return jobs[0];
}

static job train(int ranks, const char *config, const char *shard) { return train_spread(ranks, config, shard, 1); }

static double largest_difference(const job *a, const job *b) {
  double most = 0;
  for (int i = 1; i <= STEPS; i++) {
    most = fmax(most, fabs(a->loss[i] / b->loss[i] - 1));
    most = fmax(most, fabs(a->norm[i] / b->norm[i] - 1));
  }
  return most;
}

#define BATCH "batch: {tokens: 384, microbatch: 2}\n" /* 12 microbatches */
#define STEPS_RUN "run: {steps: " RFT_STRING(STEPS) ", seed: 3, evaluate_windows: 8}\n"

#define RECIPE(name)                                                                                             \
  "refrain: 1\nmodel: {model_type: llama, hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4}\n" DATA \
  "batch: {tokens: 384, microbatch: 2}\n" ADAM "precision: {dtype: bf16, recipe: " name "}\n" STEPS_RUN
#define LORA(more) "refrain: 1\n" LLAMA DATA BATCH ADAM SINGLE "adapter: {type: lora, rank: 4" more "}\n" STEPS_RUN

static const struct row {
  const char *name, *config;
  double tolerance; /* relative, of losses and norms */
  int most;         /* maximum number of ranks; 0: 2 */
} rows[] = {
    {"llama", "refrain: 1\n" LLAMA DATA BATCH ADAM SINGLE STEPS_RUN, 1e-6, 4},
    {"gpt2 with dropout",
     "refrain: 1\nmodel: {model_type: gpt2, vocab_size: 256, hidden_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 3, dropout: 0.1}\n" DATA BATCH ADAM SINGLE STEPS_RUN,
     1e-6, 4},
    {"gpt2 with dropout, bf16", "refrain: 1\n" GPT2 DATA BATCH ADAM STEPS_RUN, 1e-3},
    {"bf16 gradients and moments", "refrain: 1\n" LLAMA DATA BATCH NARROW "precision: {dtype: bf16}\n" STEPS_RUN, 5e-3},
    {"f16", "refrain: 1\n" LLAMA DATA BATCH ADAM HALF STEPS_RUN, 1e-4},
    {"experts", "refrain: 1\n" EXPERTS DATA BATCH BALANCED SINGLE STEPS_RUN, 1e-6, 3},
    {"8-bit moments",
     "refrain: 1\nmodel: {model_type: llama, hidden_size: 72, num_hidden_layers: 1, num_attention_heads: 3}\n" DATA
         BATCH "optimizer: {name: adamw, lr: 3e-3, state_dtype: u8}\n" SINGLE STEPS_RUN,
     1e-5},
    {"recompute", "refrain: 1\n" LLAMA DATA BATCH ADAM SINGLE "memory: {recompute: all}\n" STEPS_RUN, 1e-6},
    {"frozen embedding, SGD",
     "refrain: 1\n" LLAMA DATA BATCH
     "optimizer: {name: sgd, lr: 1e-2, momentum: 0.9, frozen: [\"model.embed_tokens.*\"]}\n" SINGLE STEPS_RUN,
     1e-6},
    {"lora", LORA(""), 1e-6},
    {"lora on a base of 4 bits", LORA(", base: nf4"), 1e-6},
    {"dora", "refrain: 1\n" LLAMA DATA BATCH ADAM SINGLE "adapter: {type: dora, rank: 4}\n" STEPS_RUN, 1e-6},
    {"fp8_current", RECIPE("fp8_current"), 2e-2},
    {"fp8_delayed", RECIPE("fp8_delayed"), 2e-2, 3},
    {"fp8_block", RECIPE("fp8_block"), 2e-2},
    {"mxfp8", RECIPE("mxfp8"), 2e-2},
    {"nvfp4", RECIPE("nvfp4"), 0.2} /* its random numbers differ */,
};

static void against_one_rank(void **state) {
  static const char *const modes[] = {"none", "optimizer", "full"};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const job one = train(1, rows[i].config, "none");
    for (int ranks = 2; ranks <= (rows[i].most ? rows[i].most : 2); ranks++) {
      job first = {0};
      for (int m = 0; m < 3; m++) {
        if (m > 0 && RFT_LEFT_OUT(i + m, 2)) continue;
        const job j = train(ranks, rows[i].config, modes[m]);
        const double d = largest_difference(&j, &one);
        if (d > rows[i].tolerance) fail_msg("%s, %d ranks, %s: differs by %g", rows[i].name, ranks, modes[m], d);
        if (m == 0) print_message("%s, %d ranks: differs by %.2g\n", rows[i].name, ranks, d);
        assert_int_equal(j.tokens, one.tokens);
        assert_true(fabs(j.bits / one.bits - 1) < rows[i].tolerance);
        if (m == 0) first = j;
        if (m == 1 && !rfi_hash_equal(j.state, first.state)) /* mode full sums in another order */
          fail_msg("%s, %d ranks: %s differs from none", rows[i].name, ranks, modes[m]);
      }
    }
  }
}

/* With one microbatch per rank the order of sums is that of one rank. */
static void same_bits(void **state) {
  const char *config = "refrain: 1\n" LLAMA DATA "batch: {tokens: 96, microbatch: 2}\n"
                       "optimizer: {name: sgd, lr: 1e-2, clip: 1.0, frozen: [\"*proj*\"]}\n" SINGLE STEPS_RUN;
  (void)state;
  const job one = train(1, config, "none"), three = train(3, config, "full");
  assert_memory_equal(one.loss, three.loss, sizeof one.loss);
}

/* ---- expert parallelism ---- */

#define SPREAD(experts, k)                                                                                     \
  "refrain: 1\nmodel: {model_type: qwen3_moe, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 4, " \
  "num_experts: " experts ", num_experts_per_tok: " k ", moe_intermediate_size: 20}\n" DATA BATCH STEPS_RUN

/* In each mode of parallel.shard: several experts per rank, one expert per rank, all tokens to all experts, 16 bits,
 * frozen experts. */
static const struct spread_row {
  const char *name, *config;
  double tolerance;
  int ranks[2];
} spread_rows[] = {
    {"f32", SPREAD("4", "2") BALANCED SINGLE, 1e-6, {2, 4}},
    {"three experts a rank", SPREAD("12", "3") ADAM SINGLE, 1e-6, {4}},
    {"all experts", SPREAD("4", "4") ADAM SINGLE, 1e-6, {2}},
    {"SGD, frozen experts",
     SPREAD("4", "1") "optimizer: {name: sgd, lr: 1e-2, frozen: [\"*.0.mlp.experts.*\"]}\n" SINGLE,
     1e-6,
     {2}},
    {"recompute", SPREAD("4", "2") ADAM SINGLE "memory: {recompute: all}\n", 1e-6, {2}},
    {"bf16", SPREAD("4", "2") ADAM "precision: {dtype: bf16}\n", 5e-3, {2}},
    {"f16", SPREAD("4", "2") ADAM HALF, 1e-3, {2}},
};

static void spread_experts(void **state) {
  static const char *const modes[] = {"none", "optimizer", "full"};
  (void)state;
  for (size_t i = 0; i < sizeof spread_rows / sizeof *spread_rows; i++) {
    const struct spread_row *row = &spread_rows[i];
    const job one = train(1, row->config, "none");
    job none[2];
    for (int k = 0; k < 6; k++) {
      if (!row->ranks[k % 2] || (k >= 2 && RFT_LEFT_OUT(i + k / 2, 2))) continue;
      const int ranks = row->ranks[k % 2];
      const job j = train_spread(ranks, row->config, modes[k / 2], ranks);
      const double d = largest_difference(&j, &one);
      print_message("%s, %d ranks, %s: differs by %.2g\n", row->name, ranks, modes[k / 2], d);
      if (!(d <= row->tolerance)) fail_msg("%s, %d ranks, %s: differs by %g", row->name, ranks, modes[k / 2], d);
      if (k < 2) none[k] = j;
      if (k >= 2) assert_true(j.bytes < none[k % 2].bytes);
      if (k >= 2 && k < 4) assert_memory_equal(j.loss, none[k - 2].loss, sizeof j.loss);
      assert_int_equal(j.tokens, one.tokens);
      assert_int_equal(j.skipped, 0);
      assert_string_equal(j.end, "done");
      assert_true(fabs(j.bits / one.bits - 1) < row->tolerance);
    }
  }
}

/* With too small a capacity all ranks skip every step and report the required capacity; with a sufficient one results
 * are bitwise equal. */
static void capacity(void **state) {
  (void)state;
#define CAPACITY(n) SPREAD("4", "2") ADAM SINGLE "parallel: {capacity: " n "}\n"
  const job all = train_spread(2, SPREAD("4", "2") ADAM SINGLE, "none", 2);
  const job same = train_spread(2, CAPACITY("63"), "none", 2), few = train_spread(2, CAPACITY("8"), "none", 2);
  assert_memory_equal(all.loss, same.loss, sizeof all.loss);
  assert_true(rfi_hash_equal(all.state, same.state));
  assert_int_equal(few.skipped, STEPS);
  if (!strstr(few.warning, " rows for the experts of one rank are more than parallel.capacity, 8; skipped"))
    fail_msg("%s", few.warning);
  assert_string_equal(few.end, "run.capacity");
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(against_one_rank), rft_context_test(same_bits),
                                     rft_context_test(spread_experts), rft_context_test(capacity)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
