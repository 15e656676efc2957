/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs with batch.ramp: the data of each step, the programs and their arena, bitwise equal eager, replayed, resumed in
 * the middle of a ramp and over ranks; the numbers of steps and windows; what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "train/batch.h"
#include "train/ramp.h"
#include "train/state.h"

/* Microbatches of 4 x 16 tokens: one per step up to step 4, two in sequences of 8 up to step 9, three in sequences of 4
 * up to step 11, then two. */
#define RAMP                                                                                                         \
  "batch: {tokens: 128, microbatch: 4, ramp: [{until: 4, tokens: 64}, {until: 9, sequence: 8}, {until: 11, tokens: " \
  "192, "                                                                                                            \
  "sequence: 4}]}\n"
#define DROPPED                                                                                \
  "model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 2, dropout: 0.1}\n"
#define WITH(model, batch, rest) "refrain: 1\n" model DATA batch ADAM rest RUN

enum { STEPS = 14, S = 16, ROWS = 4, T = S * ROWS };

static const int microbatches[STEPS] = {1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 2, 2, 2};
static const int sequences[STEPS] = {16, 16, 16, 16, 8, 8, 8, 8, 8, 4, 4, 16, 16, 16};

/* ---- data ---- */

/* Each step takes the windows that follow those of the previous step, cut into its sequences. */
static void test_data(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(own, WITH(LLAMA, RAMP, SINGLE), NULL, &o);
  int64_t first = 0;
  (void)state;
  for (int step = 0; step < STEPS; step++) {
    const rfi_settings *s = run->settings;
    const int64_t slot = step % s->spec.slots, most = rfi_ring_microbatches(&s->spec);
    assert_int_equal(most, 3);
    assert_int_equal(rfi_ramp_windows(s, step), first);
    OK(rfi_fill_slot(run, step));
    for (int m = 0; m < microbatches[step]; m++, first += ROWS) {
      const int64_t at = slot * most + m;
      int32_t tokens[T], targets[T], offsets[T + 1];
      const rfi_batch batch = {.rows = ROWS, .tokens = tokens, .targets = targets, .offsets = offsets};
      OK(rfi_fill_batch(run, RFI_TRAIN, false, first, &batch));
      assert_memory_equal(tokens, (int32_t *)run->tokens.data + at * T, sizeof tokens);
      assert_memory_equal(targets, (int32_t *)run->targets.data + at * T, sizeof targets);
      const int32_t *cut = (int32_t *)run->offsets.data + at * (T + 1);
      int n = 0, k = 0;
      for (int i = 0; i < T; i++) {
        while (offsets[k] < i) k++;
        if (offsets[k] != i && i % sequences[step] != 0) continue;
        assert_int_equal(cut[n++], i);
      }
      for (; n <= T; n++) assert_int_equal(cut[n], T);
    }
  }
  rfr_run_close(run);
  rfr_ctx_destroy(own);
}

static void test_cut(void **state) {
  (void)state;
  int32_t offsets[13] = {0, 1, 3, 4, 5, 11, 12, 12, 12, 12, 12, 12, 12};
  static const int32_t by_4[13] = {0, 1, 3, 4, 5, 8, 11, 12, 12, 12, 12, 12, 12},
                       ones[13] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  rfi_ramp_cut(offsets, 12, 4);
  assert_memory_equal(offsets, by_4, sizeof by_4);
  rfi_ramp_cut(offsets, 12, 12);
  assert_memory_equal(offsets, by_4, sizeof by_4);
  rfi_ramp_cut(offsets, 12, 1);
  assert_memory_equal(offsets, ones, sizeof ones);
}

static void test_counts(void **state) {
  rfi_settings s = {.sequence = S, .rows = ROWS, .n_ramp = 2};
  (void)state;
  s.spec.ranks = 2;
  s.spec.microbatches = 5;
  s.ramp[0] = (rfi_ramp_size){3, 1, S}, s.ramp[1] = (rfi_ramp_size){4, 2, S};
  static const int64_t windows[] = {0, 8, 16, 24, 40, 80, 120}; /* before each step */
  for (int step = 0; step < 7; step++) {
    assert_int_equal(rfi_ramp_windows(&s, step), windows[step]);
    assert_int_equal(rfi_ramp_steps(&s, windows[step], true), step);
    assert_int_equal(rfi_ramp_steps(&s, windows[step], false), step);
    assert_int_equal(rfi_ramp_steps(&s, windows[step] + 1, true), step + 1);
    assert_int_equal(rfi_ramp_steps(&s, windows[step] + 1, false), step);
  }
}

/* ---- programs ---- */

/* The first phase is bitwise equal to a run with its size; programs of all sizes share one arena. */
static void test_programs(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  rft_record r = {0}, plain = {0};
  rfr_run_options o = rft_run_options(&r), p = rft_run_options(&plain);
  rfr_run *run = rft_run_open(own, WITH(DROPPED, RAMP, SINGLE), NULL, &o);
  rfr_run *other = rft_run_open(own, WITH(DROPPED, "batch: {tokens: 64, microbatch: 4}\n", SINGLE), NULL, &p);
  rfr_run_phase phase;
  rfr_plan_summary sum, main_sum;
  int64_t most = 0;
  (void)state;
  rft_run_steps(run, STEPS);
  rft_run_steps(other, 5);
  for (int i = 1; i <= 4; i++) assert_true(r.loss[i] == plain.loss[i] && r.norm[i] == plain.norm[i]);
  assert_true(r.loss[5] != plain.loss[5]);
  assert_int_equal(r.schedules, 3);
  OK(rfr_program_plan(run->programs, rfr_run_program_index(run, RFR_RUN_TRAIN), &main_sum));
  for (int i = 0; i < 4; i++) {
    OK(rfr_run_phase_at(run, i, &phase));
    assert_int_equal(phase.until, i == 0 ? 4 : i == 1 ? 9 : i == 2 ? 11 : 0);
    assert_int_equal(phase.tokens, i == 0 ? 64 : i == 2 ? 192 : 128);
    assert_int_equal(phase.sequence, i == 1 ? 8 : i == 2 ? 4 : 16);
    assert_int_equal(phase.program == rfr_run_program_index(run, RFR_RUN_TRAIN), i == 3);
    OK(rfr_program_plan(run->programs, phase.program, &sum));
    assert_int_equal(sum.planned_bytes, main_sum.planned_bytes);
    assert_int_equal(sum.persistent_bytes, main_sum.persistent_bytes);
    if (sum.transient_planned_bytes > most) most = sum.transient_planned_bytes;
  }
  assert_int_equal(main_sum.planned_bytes, main_sum.persistent_bytes + most);
  assert_int_equal(rfr_run_phase_at(run, 4, &phase), RFR_INVALID);
  rfr_run_close(run);
  rfr_run_close(other);
  rfr_ctx_destroy(own);
}

static void same_bits(const char *config, const char *name) {
  /* saves at step 6, and loses steps 7 and 8 */
  assert_int_equal(rft_assert_same_bits(config, name, STEPS).skipped, 0);
}

static void test_bits(void **state) {
  (void)state;
  same_bits(WITH(DROPPED, RAMP, SINGLE), "f32");
  same_bits(WITH(EXPERTS, RAMP, "precision: {dtype: bf16}\nadapter: {type: lora, rank: 2}\n"), "experts");
  same_bits(WITH(LLAMA, RAMP, HALF), "f16");
}

/* A complete run with evaluations and checkpoints, in epochs. */
static void test_train(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(own,
                              "refrain: 1\n" LLAMA DATA RAMP ADAM SINGLE
                              "run: {epochs: 1, seed: 3, evaluate_every: 5, checkpoint_every: 10}\n",
                              "epochs", &o);
  const rfi_settings *s = run->settings;
  (void)state;
  const int64_t windows = rfi_dataset_get_stats(run->data)->windows[RFI_TRAIN];
  assert_true(rfi_ramp_windows(s, s->steps) >= windows && rfi_ramp_windows(s, s->steps - 1) < windows);
  assert_true(s->steps > 11);
  OK(rfr_run_train(run));
  assert_int_equal(r.last, s->steps);
  assert_true(r.evaluations > 1);
  rfr_run_close(run);
  rfr_ctx_destroy(own);
}

/* ---- ranks ---- */

typedef struct job {
  const char *config, *set;
  rfi_hash hash;
} job;

static rfr_status train(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.overrides = &j->set, o.n_overrides = 1;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, NULL, &o, &run);
  for (int i = 0; i < STEPS && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rft_hash_state(run, &j->hash);
  rfr_run_close(run);
  return s;
}

#define RANKS_RAMP "batch: {tokens: 128, microbatch: 2, ramp: [{until: 4, tokens: 64}, {until: 9, sequence: 8}]}\n"

static void test_ranks(void **state) {
  static const char *const modes[] = {"parallel.shard=none", "parallel.shard=optimizer"};
  rfi_hash first = {0};
  job jobs[2];
  (void)state;
  for (int m = 0; m < 2; m++) {
    for (int r = 0; r < 2; r++) jobs[r] = (job){.config = WITH(DROPPED, RANKS_RAMP, SINGLE), .set = modes[m]};
    rft_run_ranks(2, jobs, sizeof *jobs, train);
    if (m == 0) first = jobs[0].hash;
    for (int r = 0; r < 2; r++) assert_memory_equal(&jobs[r].hash, &first, sizeof first);
  }
  for (int r = 0; r < 2; r++)
    jobs[r] = (job){.config = WITH(EXPERTS, RANKS_RAMP, SINGLE), .set = "parallel.shard=full"};
  rft_run_ranks(2, jobs, sizeof *jobs, train);
  assert_memory_equal(&jobs[0].hash, &jobs[1].hash, sizeof first);
}

/* ---- refused ---- */

static rfr_status expect_refusal(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  const char *const *set = rank;
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.overrides = set, o.n_overrides = 1;
  o.comm = comm;
  const rfr_status s = rfr_run_open(own, WITH(LLAMA, RAMP, SINGLE), NULL, &o, &run);
  const bool pipeline = strstr(*set, "pipeline") != NULL;
  const bool refused = s != RFR_OK && strstr(rfr_last_error()->message, pipeline ? "batch.ramp with parallel.pipeline"
                                                                                 : "which 2 ranks do not divide");
  rfr_run_close(run);
  return refused ? RFR_OK : rfi_fail(RFI_E_INTERNAL, "not refused");
}

static void refuse(const char *ramp, const char *slug, const char *text) {
  char set[256];
  const char *sets[1] = {set};
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  snprintf(set, sizeof set, "%s", ramp);
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 1;
  assert_int_not_equal(rfr_run_open(ctx, WITH(LLAMA, RAMP, SINGLE), NULL, &o, &run), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, text)) fail_msg("%s", rfr_last_error()->message);
}

static void test_refused(void **state) {
  static const char *const sets[2][2] = {{"parallel.pipeline=2", "parallel.pipeline=2"},
                                         {"parallel.shard=none", "parallel.shard=none"}};
  (void)state;
  for (int k = 0; k < 2; k++) {
    const char *each[2] = {sets[k][0], sets[k][1]};
    rft_run_ranks(2, each, sizeof *each, expect_refusal);
  }
  refuse("batch.ramp=[{until: 4, tokens: 100}]", "config.value",
         "is not a multiple of data.sequence 16 x batch.microbatch 4");
  refuse("batch.ramp=[{until: 4, sequence: 5}]", "config.value", "does not divide data.sequence, 16");
  refuse("batch.ramp=[{until: 4}, {until: 4, tokens: 64}]", "config.value", "until 4 follows until 4");
  refuse("batch.ramp=[{tokens: 64}]", "config.value", "needs the key until");
  refuse("batch.ramp=[{until: 4, token: 64}]", "config.key", "did you mean \"tokens\"");
  refuse("batch.ramp=[{until: 0, tokens: 64}]", "config.value", "batch.ramp");
  refuse("batch.ramp=4", "config.value", "batch.ramp");
  refuse("run.steps=8", "config.value", "batch.ramp: until 9 is after the last step, 8 of run.steps; lower until, or");
  refuse("run.epochs=0.01", "config.value", "of run.epochs; lower until, or raise run.epochs");
  refuse("run.time=5s", "unsupported", "batch.ramp with run.time");
  refuse("run.watch=[\"*\"]", "unsupported", "batch.ramp with run.watch");
  rft_write_text("rows.jsonl", "{\"text\": \"a first row of text\"}\n{\"text\": \"a second row of some more text\"}\n");
  refuse("data.train=[rows.jsonl]", "unsupported", "batch.ramp: sequence: rows would be cut");
  remove(rft_run_folder("rows.jsonl"));
}

/* A checkpoint of another ramp, or of none, is not resumed. */
static void test_mismatch(void **state) {
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run = NULL;
  (void)state;
  o.config_folder = rft_run_root;
  run = rft_run_open(ctx, WITH(LLAMA, TWO_BATCHES, SINGLE), "plain", &o);
  rft_run_steps(run, 1);
  OK(rfr_run_save(run));
  rfr_run_close(run);
  o.resume = 1;
  assert_int_not_equal(rfr_run_open(ctx, WITH(LLAMA, RAMP, SINGLE), rft_run_folder("plain"), &o, &run), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  o.resume = 0;
  run = rft_run_open(ctx, WITH(LLAMA, RAMP, SINGLE), "ramped", &o);
  rft_run_steps(run, 1);
  OK(rfr_run_save(run));
  rfr_run_close(run);
  o.resume = 1;
  assert_int_not_equal(rfr_run_open(ctx, WITH(LLAMA, TWO_BATCHES, SINGLE), rft_run_folder("ramped"), &o, &run), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  assert_non_null(strstr(rfr_last_error()->message, "batch.ramp is"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_one_thread_test(test_data),     rft_one_thread_test(test_cut),  rft_one_thread_test(test_counts),
      rft_one_thread_test(test_programs), rft_one_thread_test(test_bits), rft_one_thread_test(test_train),
      rft_context_test(test_ranks),       rft_context_test(test_refused), rft_context_test(test_mismatch)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
