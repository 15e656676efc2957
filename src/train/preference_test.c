/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs on pairs of answers: bitwise equal eager, recomputed and resumed; the mean over all pairs of a step; the
 * reference and its cache; accuracy on held-out pairs; refused settings.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/run.h"

#define PAIRS "data: {train: [\"pairs.jsonl\"], validation: 20%, format: preference, tokenizer: bytes, sequence: 48}\n"
#define BATCH "batch: {tokens: 384, microbatch: 4}\n"
#define BETA "preference: {beta: 0.3, label_smoothing: 0.05}\n"
#define PLAIN "optimizer: {name: adamw, lr: 3e-3, clip: 1.0}\nrun: {steps: 50, seed: 3, log_every: 1}\n"
#define LORA "adapter: {type: lora, rank: 4}\noptimizer: {name: adamw, lr: 1e-2, clip: 1.0}\n"
#define STEPS "run: {steps: 50, seed: 3, log_every: 1}\n"
#define CONFIG "refrain: 1\n" LLAMA SINGLE PAIRS BATCH BETA PLAIN
#define DEFAULTS "refrain: 1\n" LLAMA SINGLE PAIRS BATCH PLAIN

/* Pairs of different lengths; the chosen answer contains the letter x. */
static void write_pairs(const char *name, int n) {
  char *text = malloc((size_t)n * 128 + 1), *at = text;
  for (int i = 0; i < n; i++)
    at += sprintf(at, "{\"prompt\": \"%d?\", \"chosen\": \"%.*sx\", \"rejected\": \"%.*sy\"}\n", i, 1 + i * 5 % 11,
                  "xxxxxxxxxxxx", 1 + i * 3 % 7, "yyyyyyyy");
  rft_write_text(name, text);
  free(text);
}

typedef struct seen {
  rft_record record;
  double margin[RFT_STEPS + 1], accuracy[RFT_STEPS + 1];
  int references;
} seen;

static void see(const rfr_event *e, void *user) {
  seen *s = user;
  if (e->kind == RFR_EVENT_METRICS) s->margin[e->step] = e->margin, s->accuracy[e->step] = e->accuracy;
  s->references += e->kind == RFR_EVENT_COMPILE && strstr(e->message, "reference") != NULL;
  const rfr_run_options o = rft_run_options(&s->record);
  o.on_event(e, &s->record);
}

static rfr_run_options options_of(seen *s) {
  rfr_run_options o = rft_run_options(&s->record);
  o.on_event = see;
  o.event_user = s;
  return o;
}

/* Runs 50 steps with an override. */
static rfr_run *trained(rfr_ctx *ctx, const char *config, const char *set, int eager, seen *s) {
  rfr_run_options o = options_of(s);
  o.overrides = &set;
  o.n_overrides = set != NULL;
  o.eager = eager;
  rfr_run *run = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(run, RFT_STEPS);
  return run;
}

static void same_bits(const char *config, const char *name) {
  write_pairs("pairs.jsonl", 60);
  rfr_ctx *ctx = rft_run_ctx(2);
  seen straight = {0}, other[3] = {0};
  rfr_run *a = trained(ctx, config, NULL, 0, &straight);
  assert_float_equal(straight.record.loss[1], log(2.0), 1e-4); /* the model equals the reference */
  assert_float_equal(straight.margin[1], 0, 1e-4);
  assert_true(straight.record.loss[RFT_STEPS] < 0.6 && straight.accuracy[RFT_STEPS] == 1);
  for (int k = 0; k < 2; k++) {
    rfr_run *b = trained(ctx, config, k ? "memory.recompute=all" : "data.cache=none", !k, &other[k]);
    rft_assert_same_losses(&straight.record, &other[k].record);
    rft_assert_same_state(a, b);
    assert_memory_equal(straight.margin, other[k].margin, sizeof straight.margin);
    rfr_run_close(b);
  }
  rfr_run_options o = options_of(&other[2]);
  rfr_run *c = rft_run_open(ctx, config, name, &o);
  rft_run_steps(c, 20);
  assert_int_equal(rfr_run_save(c), RFR_OK);
  rfr_run_close(c);
  o.resume = o.strict = 1;
  c = rft_run_open(ctx, config, name, &o);
  rft_run_steps(c, 30);
  rft_assert_same_losses(&straight.record, &other[2].record);
  rft_assert_same_state(a, c);
  assert_int_equal(other[2].record.warnings, 0);
  rfr_run_close(c);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

static void bits(void **state) {
  (void)state;
  same_bits(CONFIG, "pairs");
}

static void bits_lora(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA "precision: {dtype: bf16}\n" PAIRS BATCH BETA LORA STEPS, "pairs-lora");
}

/* Each step is the mean over its pairs, however these are distributed over microbatches. */
static void microbatches(void **state) {
  (void)state;
  write_pairs("pairs.jsonl", 60);
  rfr_ctx *ctx = rft_run_ctx(2);
  seen one = {0}, four = {0};
  rfr_run *a = trained(ctx, CONFIG, "batch.microbatch=8", 0, &one);
  rfr_run *b = trained(ctx, CONFIG, "batch.microbatch=2", 0, &four);
  for (int i = 1; i <= 10; i++) {
    assert_float_equal(one.record.loss[i], four.record.loss[i], 1e-5);
    assert_float_equal(one.margin[i], four.margin[i], 1e-4);
    assert_float_equal(one.record.norm[i] / four.record.norm[i], 1, 1e-4);
    assert_float_equal(one.accuracy[i], four.accuracy[i], 1e-6);
  }
  rfr_run_close(a);
  rfr_run_close(b);
  rfr_ctx_destroy(ctx);
}

/* Packed pairs are compared with their own reference values, like pairs that have a window each. */
static void evaluates(void **state) {
  (void)state;
  write_pairs("pairs.jsonl", 60);
  rfr_ctx *ctx = rft_run_ctx(2);
  seen s = {0};
  rfr_evaluation before, after, single;
  rfr_run_options o = options_of(&s);
  rfr_run *run = rft_run_open(ctx, CONFIG, "pairs-evaluated", &o);
  assert_int_equal(rfr_run_evaluate(run, &before), RFR_OK);
  assert_float_equal(before.loss, log(2.0), 1e-6);
  assert_float_equal(before.margin, 0, 1e-6);
  assert_int_equal(before.pairs, 12);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(rfr_run_evaluate(run, &after), RFR_OK);
  assert_true(after.accuracy > 0.9 && after.margin > 0.5 && after.loss < before.loss);
  rfr_run_close(run);
  o.programs = RFR_RUN_EVALUATE;
  o.overrides = (const char *[]){"data.packing=false"};
  o.n_overrides = 1;
  run = rft_run_open(ctx, NULL, "pairs-evaluated", &o);
  assert_int_equal(rfr_run_evaluate(run, &single), RFR_OK);
  assert_int_equal(single.pairs, after.pairs);
  assert_true(single.windows > after.windows);
  assert_float_equal(single.loss, after.loss, 1e-5);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The reference is read from the cache as long as the model and the rows are the same. Of the keys below, epsilon,
 * theta and window change the function that the weights compute; DoRA, packing, microbatch and threads change its
 * rounding. */
static void cached(void **state) {
  (void)state;
  static const struct {
    const char *set;
    int computed, threads;
  } cases[] = {{"run.seed=17", 1, 2},          {"run.seed=17", 0, 2},
               {"preference.beta=0.2", 1, 2},  {"preference.beta=1", 0, 2},
               {"precision.dtype=bf16", 1, 2}, {"data.packing=true", 0, 2},
               {"data.packing=false", 1, 2},   {"batch.microbatch=2", 1, 2},
               {"preference.beta=1", 1, 1},    {"preference.beta=1", 0, 1},
               {"data.cache=none", 1, 2},      {"model.rms_norm_eps=0.1", 1, 2},
               {"model.rope_theta=500", 1, 2}, {"model.sliding_window=8", 1, 2},
               {"adapter.type=lora", 0, 2},    {"adapter.type=dora", 1, 2}};
  write_pairs("pairs.jsonl", 31);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_ctx *ctx = rft_run_ctx(cases[i].threads);
    seen s = {0};
    rfr_run_options o = options_of(&s);
    o.overrides = &cases[i].set;
    o.n_overrides = 1;
    rfr_run_close(rft_run_open(ctx, CONFIG, NULL, &o));
    if (s.references != cases[i].computed) fail_msg("%s: computed %d times", cases[i].set, s.references);
    rfr_ctx_destroy(ctx);
  }
}

static void refused(void **state) {
  (void)state;
  static const struct {
    const char *set, *slug, *message;
    int resume;
  } cases[] = {
      {"data.format=auto", "config.value", "preference.beta: it applies only with data.format: preference", 0},
      {"data.loss=all", "data.format", "only the answers", 0},
      {"data.sequence=2", "config.value", "too few", 0},
      {"precision={dtype: bf16, logits: model}", "config.value", "precision.logits: DPO compares losses", 0},
      {"preference.beta=0", "config.value", "preference.beta", 0},
      {"preference.beta=1e-50", "config.value", "is 0 or infinite", 0},
      {"preference.beta=1e39", "config.value", "is 0 or infinite", 0},
      {"preference.beta=0.2", "resume.mismatch", "preference.beta", 1},
      {"data.train=plain.txt", "data.row", "", 1},
  };
  write_pairs("pairs.jsonl", 60);
  rfr_ctx *ctx = rft_run_ctx(1);
  seen s = {0};
  rfr_run *run;
  rfr_run_options o = options_of(&s);
  run = rft_run_open(ctx, CONFIG, "pairs-refused", &o);
  rft_run_steps(run, 1);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  rft_write_text("plain.txt", "no row\n");
  o.n_overrides = 1;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    o.resume = cases[i].resume;
    o.overrides = &cases[i].set;
    assert_int_not_equal(rfr_run_open(ctx, CONFIG, cases[i].resume ? rft_run_folder("pairs-refused") : NULL, &o, &run),
                         RFR_OK);
    assert_string_equal(rfr_last_error()->slug, cases[i].slug);
    if (!strstr(rfr_last_error()->message, cases[i].message)) fail_msg("%s", rfr_last_error()->message);
  }
  o.resume = 0;
  o.overrides = (const char *[]){"data.format=auto"};
  assert_int_equal(rfr_run_open(ctx, DEFAULTS, NULL, &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.preference");
  o.resume = 1; /* a checkpoint cannot be continued with another loss */
  o.overrides = (const char *[]){"data.format=completion"};
  assert_int_equal(rfr_run_open(ctx, DEFAULTS, rft_run_folder("pairs-refused"), &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.row");
  o.overrides = (const char *[]){"data.format=text", "data.train=*.txt"};
  o.n_overrides = 2;
  assert_int_equal(rfr_run_open(ctx, DEFAULTS, rft_run_folder("pairs-refused"), &o, &run), RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "data.format was preference"));
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bits),      cmocka_unit_test(bits_lora), cmocka_unit_test(microbatches),
      cmocka_unit_test(evaluates), cmocka_unit_test(cached),    cmocka_unit_test(refused),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
