/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs through their public functions: stops, full disks, checkpoints, logs, warnings, generated text, and effects that
 * a library must not have on its process. Reproducibility is tested in run_bits_test.c, folders in run_folder_test.c,
 * evaluation in run_evaluate_test.c.
 */
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "base/json.h"
#include "data/file.h"
#include "support/comma_locale.h"
#include "support/run.h"
#include "train/state_json.h"

static void mismatches(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "mismatch", &o), *none;
  rft_run_steps(run, 2);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  /* a second run in the folder would remove this run's unfinished checkpoints */
  o.resume = 1;
  assert_int_equal(rfr_run_open(ctx, NULL, rft_run_folder("mismatch"), &o, &none), RFR_INVALID);
  assert_null(none);
  assert_string_equal(rfr_last_error()->slug, "run.busy");
  o.resume = 0;
  rfr_run_close(run);
  /* a second run in the same folder */
  assert_int_equal(
      rfr_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, rft_run_folder("mismatch"), &o, &none),
      RFR_INVALID);
  assert_null(none);
  assert_string_equal(rfr_last_error()->slug, "run.exists");
  o.resume = 1;
  const char *const wider[] = {"model.hidden_size=32"};
  o.overrides = wider;
  o.n_overrides = 1;
  assert_int_equal(
      rfr_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, rft_run_folder("mismatch"), &o, &none),
      RFR_MISMATCH);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  assert_non_null(strstr(rfr_last_error()->message, "hidden_size"));
  o.n_overrides = 0;
  /* with another number of threads results may differ */
  rfr_ctx *two = rft_run_ctx(2);
  o.strict = 1;
  assert_int_equal(
      rfr_run_open(two, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, rft_run_folder("mismatch"), &o, &none),
      RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "threads"));
  o.strict = 0;
  run = rft_run_open(two, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "mismatch", &o);
  assert_int_equal(r.warnings, 1);
  assert_non_null(strstr(r.warning, "threads"));
  rfr_run_close(run);
  rfr_ctx_destroy(two);
  rfr_ctx_destroy(ctx);
}

static void stop_and_continue(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0}, full = {0};
  const char *config =
      "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 12, evaluate_every: 6, evaluate_windows: 0, keep: 1}\n";
  rfr_run_options o = rft_run_options(&full);
  rfr_run *run = rft_run_open(ctx, config, NULL, &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(full.evaluations, 2);
  rfr_run_close(run);
  o = rft_run_options(&r);
  run = rft_run_open(ctx, config, "stop", &o);
  r.stop_at_5 = run;
  assert_int_equal(rfr_run_train(run), RFR_STOPPED);
  assert_string_equal(rfr_last_error()->slug, "run.stopped");
  assert_int_equal(r.last, 5);
  assert_int_equal(r.checkpoints, 1);
  rfr_run_close(run);
  r.stop_at_5 = NULL;
  o.resume = 1;
  run = rft_run_open(ctx, config, "stop", &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(r.last, 12);
  for (int i = 1; i <= 12; i++) assert_true(r.loss[i] == full.loss[i]);
  assert_true(r.bits == full.bits && r.bits > 0.0);
  rfr_run_close(run);

  /* the finished run, opened for reading */
  rfr_evaluation e;
  o = rft_run_options(&r);
  o.programs = RFR_RUN_EVALUATE;
  run = rft_run_open(ctx, NULL, "stop", &o);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  assert_true(e.bits_per_byte == full.bits);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  /* every byte is predicted except the first of each file */
  assert_int_equal(e.tokens, info.validation_bytes - info.validation_files);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void collect(const char *text, size_t n, void *user) {
  char *all = user;
  strncat(all, text, n);
}

static void generation(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  o.programs = RFR_RUN_ALL;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rft_run_steps(run, 50);
  rfr_generate_options g = rfr_generate_options_default();
  char a[128] = "", b[128] = "", c[128] = "", d[128] = "";
  g.tokens = 40;
  g.temperature = 1.0;
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, a), RFR_OK);
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, b), RFR_OK);
  assert_true(strlen(a) <= 40 && strcmp(a, b) == 0);
  g.seed = 1;
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, c), RFR_OK);
  assert_string_not_equal(a, c);
  g.top_k = 1; /* greedy, whatever the temperature */
  b[0] = 0;
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, b), RFR_OK);
  g.temperature = 0.0;
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, d), RFR_OK);
  assert_string_equal(b, d);
  assert_int_equal(rfr_run_generate(run, "", 0, &g, collect, d), RFR_INVALID);
  rfr_run_close(run);
  o.programs = RFR_RUN_TRAIN; /* allocates no caches */
  run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "cache.0.k", &x), RFR_INVALID);
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, d), RFR_INVALID);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

typedef struct taken {
  int32_t tokens[64];
  int n, most;
} taken;
static int take_token(int32_t token, void *user) {
  taken *t = user;
  t->tokens[t->n++] = token;
  return t->n == t->most;
}

/* Tokens as input and output: stop tokens, the end by the callback, min_p, the penalty, and the logits of given
 * tokens. */
static void generated_tokens(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  o.programs = RFR_RUN_ALL;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rft_run_steps(run, 50);
  rfr_generate_options g = rfr_generate_options_default();
  int32_t text[16] = {'l', 'i', 'n', 'e', ' '};
  taken all = {.most = 64}, part = {.most = 3}, other = {.most = 64};
  g.tokens = 9;
  g.temperature = 0.0;
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &all), RFR_OK);
  assert_int_equal(all.n, 9);
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &part), RFR_OK);
  assert_int_equal(part.n, 3);
  assert_memory_equal(part.tokens, all.tokens, 3 * sizeof(int32_t));
  int stop = 4; /* the first token that has not occurred before */
  for (int i = 0; i < stop; i++)
    if (all.tokens[i] == all.tokens[stop]) stop++, i = -1;
  g.stop = &all.tokens[stop];
  g.n_stop = 1;
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &other), RFR_OK);
  assert_int_equal(other.n, stop);
  g.n_stop = 0;
  /* min_p = 1 keeps only the most probable token */
  g.temperature = 1.5;
  g.min_p = 1.0;
  other.n = 0;
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &other), RFR_OK);
  assert_memory_equal(other.tokens, all.tokens, 9 * sizeof(int32_t));
  /* a penalty this large excludes every token of the text */
  g.min_p = 0.0, g.temperature = 0.0, g.repetition_penalty = 1e6;
  other.n = 0;
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &other), RFR_OK);
  for (int i = 0; i < 9; i++) {
    for (int k = 0; k < 5; k++) assert_int_not_equal(other.tokens[i], text[k]);
    for (int k = 0; k < i; k++) assert_int_not_equal(other.tokens[i], other.tokens[k]);
  }
  /* row i predicts the token after i: the greedy text */
  static float logits[16][256];
  memcpy(text + 5, all.tokens, 9 * sizeof(int32_t));
  assert_int_equal(rfr_run_score(run, text, 14, logits[0]), RFR_OK);
  for (int i = 4; i < 13; i++) {
    int best = 0;
    for (int k = 1; k < 256; k++)
      if (logits[i][k] > logits[i][best]) best = k;
    assert_int_equal(best, text[i + 1]);
  }
  g.repetition_penalty = 0.0;
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &other), RFR_INVALID);
  g.repetition_penalty = 1.0, text[2] = 256;
  assert_int_equal(rfr_run_generate_tokens(run, text, 5, &g, take_token, &other), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "token 2 is 256; the vocabulary has 256"));
  assert_int_equal(rfr_run_score(run, text, 2, logits[0]), RFR_OK);
  assert_int_equal(rfr_run_score(run, text, 17, logits[0]), RFR_INVALID);
  assert_int_equal(rfr_run_score(run, text, 0, logits[0]), RFR_INVALID);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* In a vocabulary with more than bytes, a token that is not a byte must not be truncated to one. */
static void tokens_other_than_bytes(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  const char *const wide[] = {"model.vocab_size=4096"};
  o.programs = RFR_RUN_ALL;
  o.overrides = wide, o.n_overrides = 1;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  char text[128] = "";
  assert_int_equal(rfr_run_generate(run, "line ", 5, NULL, collect, text), RFR_UNSUPPORTED);
  assert_non_null(strstr(rfr_last_error()->message, "which is not a byte"));
  assert_true(strlen(text) < 8); /* one draw in 16 is a byte */
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The caches have 16 tokens. A text of 17 continues from its last 8, as if they were a prompt. */
static void long_texts(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  o.programs = RFR_RUN_ALL;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rft_run_steps(run, 50);
  rfr_generate_options g = rfr_generate_options_default();
  char all[128] = "line ", rest[128] = "", again[128] = "";
  g.tokens = 55;
  g.temperature = 0.0;
  assert_int_equal(rfr_run_generate(run, all, 5, &g, collect, all + 5), RFR_OK);
  assert_int_equal(strlen(all), 60);
  g.tokens = 43;
  assert_int_equal(rfr_run_generate(run, all + 9, 8, &g, collect, rest), RFR_OK);
  assert_string_equal(rest, all + 17);
  assert_int_equal(rfr_run_generate(run, all, 17, &g, collect, again), RFR_OK); /* the prompt is too long */
  assert_string_equal(again, rest);
  /* draws are addressed by the position in the full text */
  g.temperature = 1.5;
  g.tokens = 30;
  all[0] = again[0] = 0;
  strcpy(all, "line ");
  assert_int_equal(rfr_run_generate(run, all, 5, &g, collect, all + 5), RFR_OK);
  assert_int_equal(rfr_run_generate(run, all, 17, &g, collect, again), RFR_OK);
  assert_memory_equal(again, all + 17, 18);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void disk_full(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN;
  rfr_run *run = rft_run_open(ctx, config, "full", &o);
  rft_run_steps(run, 3);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rft_run_steps(run, 2);
  rfi_io_fault count = {0};
  rfi_io_set_fault(&count);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  const int64_t calls = count.calls;
  assert_true(calls > 10);
  rft_run_steps(run, 1);
  for (int64_t k = 1; k <= calls / 2; k += 3) {
    rfi_io_fault fault = {.fail_at = k, .error = ENOSPC, .sticky = true};
    rfi_io_set_fault(&fault);
    assert_int_equal(rfr_run_save(run), RFR_IO);
  }
  rfi_io_set_fault(NULL);
  rfr_run_close(run);
  o.resume = 1;
  run = rft_run_open(ctx, config, "full", &o);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  assert_int_equal(info.step, 5);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void diverged(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx,
                              "refrain: 1\n" LLAMA DATA TWO_BATCHES
                              "optimizer: {name: adamw, lr: 1000, weight_decay: 100}\nschedule: {name: constant}\n" RUN,
                              NULL, &o);
  assert_int_equal(rfr_run_train(run), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "run.diverged");
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  assert_int_equal(info.skipped, r.skipped);
  assert_true(r.skipped >= 20);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* A run that is given in time: the checkpoint has the steps at which the decay begins and ends. From then on no clock
 * decides anything, so two resumes are bitwise equal. */
static void given_in_time(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0}, again[2];
  rfr_run_options o = rft_run_options(&r);
  const char *cosine = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {time: 1s, seed: 3}\n";
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM
                       "schedule: {name: wsd, warmup: 4%, decay: 60%}\nrun: {time: 1s, seed: 3, log_every: 1}\n";
  rfr_run *run;
  rfr_run_info info;
  assert_int_equal(rfr_run_open(ctx, cosine, NULL, &o, &run), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "config.value");
  assert_non_null(strstr(rfr_last_error()->message, "schedule.name: cosine needs the number of steps"));
  run = rft_run_open(ctx, config, "time", &o);
  rfr_run_get_info(run, &info);
  assert_true(info.steps_estimated && info.time == 1.0);
  for (int i = 0; info.steps_estimated && i < 100000; i++) {
    rft_run_steps(run, 1);
    rfr_run_get_info(run, &info);
  }
  assert_false(info.steps_estimated);
  assert_int_equal(r.schedules, 1);
  assert_true(info.steps > info.step);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  const int64_t decay = info.step, steps = info.steps;
  rfr_run_close(run);
  for (int i = 0; i < 2; i++) {
    again[i] = (rft_record){0};
    o = rft_run_options(&again[i]);
    o.resume = 1;
    run = rft_run_open(ctx, NULL, "time", &o);
    rfr_run_get_info(run, &info);
    assert_int_equal(info.steps, steps);
    assert_int_equal(info.step, decay);
    while (info.step < steps) {
      rft_run_steps(run, 1);
      if (i == 1) usleep(2000); /* simulates a slower machine */
      rfr_run_get_info(run, &info);
    }
    assert_int_equal(again[i].schedules, 0);
    assert_int_equal(again[i].warnings, 0);
    assert_true(again[i].last_lr > 0.0 && again[i].last_lr < 3e-3);
    rfr_run_close(run);
  }
  assert_true(again[0].last_loss == again[1].last_loss);
  /* a run that was given in time cannot continue with a number of steps */
  o.resume = 1;
  const char *const sets[] = {"run.steps=50000"};
  o.overrides = sets, o.n_overrides = 1;
  assert_int_equal(rfr_run_open(ctx, config, rft_run_folder("time"), &o, &run), RFR_MISMATCH);
  assert_non_null(
      strstr(rfr_last_error()->message, "started with run.epochs or run.time and cannot be resumed with run.steps"));
  rfr_ctx_destroy(ctx);
}

/* Every line of a run's log is valid JSON, and its metrics equal those of the events. */
static void check_log(const char *name, const rft_record *r, int steps) {
  char path[160], line[4096];
  snprintf(path, sizeof path, "%s/log.jsonl", rft_run_folder(name));
  FILE *f = fopen(path, "r");
  assert_non_null(f);
  int metrics = 0;
  while (fgets(line, sizeof line, f)) {
    json_t *v;
    assert_int_equal(rfi_json_parse("log.jsonl", line, strlen(line), &v), RFR_OK);
    const char *event = json_string_value(json_object_get(v, "event"));
    if (strcmp(event, "metrics") == 0) {
      metrics++;
      assert_int_equal(json_number_value(json_object_get(v, "step")), metrics);
      assert_true(json_number_value(json_object_get(v, "loss")) == r->loss[metrics]);
    }
    json_decref(v);
  }
  fclose(f);
  assert_int_equal(metrics, steps);
}

static void log_lines(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "log", &o);
  rft_run_steps(run, 3);
  rfr_run_close(run);
  check_log("log", &r, 3);
  rfr_ctx_destroy(ctx);
}

/* Steps and evaluations do not allocate, and no memory grows. */
static void quiet_allocator(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record r = {0};
  rfr_evaluation e;
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  const rfr_ctx_stats before = rfr_ctx_get_stats(ctx);
  rft_run_steps(run, 10);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  const rfr_ctx_stats after = rfr_ctx_get_stats(ctx);
  assert_int_equal(after.alloc_calls, before.alloc_calls);
  rfr_run_close(run);
  assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  rfr_ctx_destroy(ctx);
}

/* A locale with a decimal comma, no standard output, and signal handlers of the embedding program. */
static void embedded(void **state) {
  (void)state;
  const int signals[] = {SIGINT, SIGTERM, SIGFPE, SIGSEGV, SIGBUS, SIGPIPE, SIGABRT};
  enum { N = sizeof signals / sizeof signals[0] };
  struct sigaction before[N], after;
  rft_record plain = {0}, comma = {0};
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 6, seed: 3, log_every: 1}\n";
  rfr_ctx *ctx = rft_run_ctx(2);
  rfr_run_options o = rft_run_options(&plain);
  rfr_run *run = rft_run_open(ctx, config, NULL, &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  rfr_run_close(run);

  for (int i = 0; i < N; i++) sigaction(signals[i], NULL, &before[i]);
  fflush(stdout);
  const int out = dup(STDOUT_FILENO);
  close(STDOUT_FILENO);
  const int has_comma = rft_set_comma_locale(rft_run_root);
  o = rft_run_options(&comma);
  rfr_status s = rfr_run_open(ctx, config, rft_run_folder("embedded"), &o, &run);
  if (s == RFR_OK) s = rfr_run_train(run);
  rfr_run_close(run);
  setlocale(LC_NUMERIC, "C");
  dup2(out, STDOUT_FILENO);
  close(out);
  for (int i = 0; i < N; i++) {
    sigaction(signals[i], NULL, &after);
    assert_true(after.sa_handler == before[i].sa_handler);
  }
  assert_true(has_comma);
  assert_int_equal(s, RFR_OK);
  for (int i = 1; i <= 6; i++) assert_true(plain.loss[i] == comma.loss[i]);
  /* files written under this locale can be read */
  check_log("embedded", &comma, 6);
  o.resume = 1;
  run = rft_run_open(ctx, config, "embedded", &o);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* With weights of zero, weights get no gradient: one warning after the tenth step, with a name. */
static void zero_gradients(void **state) {
  (void)state;
  static const char *const frozen_keys[] = {"", ", frozen: [\"model.embed*\", \"model.layers.*\", \"lm_head*\"]"};
  static const char *const said[] = {
      "were exactly zero: model.embed_tokens.weight, model.layers.0.input_layernorm.weight",
      "the gradient of model.norm.weight was exactly zero"};
  for (int i = 0; i < 2; i++) {
    char config[600];
    snprintf(config, sizeof config,
             "refrain: 1\nmodel: {model_type: llama, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 4,\n"
             "        init_std: 0}\n"
             "optimizer: {name: adamw, lr: 3e-3%s}\n%s",
             frozen_keys[i], DATA TWO_BATCHES RUN);
    rfr_ctx *ctx = rft_run_ctx(2);
    rft_record r = {0};
    rfr_run_options o = rft_run_options(&r);
    rfr_run *run = rft_run_open(ctx, config, NULL, &o);
    rft_run_steps(run, 9);
    assert_int_equal(r.warnings, 0);
    rft_run_steps(run, 3);
    assert_int_equal(r.warnings, 1);
    if (!strstr(r.warning, said[i])) fail_msg("%s", r.warning);
    rfr_run_close(run);
    rfr_ctx_destroy(ctx);
  }
}

/* Documents of two bytes that begin with '@': offsets must have each that begins in a window. */
static void small_documents(void **state) {
  (void)state;
  for (int i = 0; i < 60; i++) {
    char name[16];
    snprintf(name, sizeof name, "%02d.tiny", i);
    rft_write_text(name, (char[]){'@', (char)('A' + i % 64), 0});
  }
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx,
                              "refrain: 1\n" LLAMA TWO_BATCHES ADAM RUN
                              "data: {train: [\"*.tiny\"], validation: 0%, tokenizer: bytes, sequence: 32}\n",
                              NULL, &o);
  rft_run_steps(run, 1);
  rfr_tensor tokens, offsets;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), RFI_NAME_TOKENS, &tokens), RFR_OK);
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), RFI_NAME_OFFSETS, &offsets), RFR_OK);
  const int64_t batches = tokens.type.shape[0] * tokens.type.shape[1], T = tokens.type.shape[2];
  const int64_t room = offsets.type.shape[2];
  int found = 0;
  for (int64_t b = 0; b < batches; b++) {
    const int32_t *token = (const int32_t *)tokens.data + b * T, *offset = (const int32_t *)offsets.data + b * room;
    int64_t k = 0;
    for (int64_t i = 0; i < T; i++)
      if (i % 32 == 0 || token[i] == '@') assert_int_equal(offset[k++], i);
    found += (int)k;
    for (; k < room; k++) assert_int_equal(offset[k], T);
  }
  assert_true(found > batches * T / 3);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* ---- values that are not finite ---- */

#define CONFIG "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN

static void poison(rfr_run *run) {
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "model.norm.weight", &x), RFR_OK);
  ((float *)x.data)[3] = NAN;
}

/* A run with weights that are not finite writes no checkpoint, so good ones are not deleted. */
static void bad_weights_are_not_saved(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(
      ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 8, checkpoint_every: 2, keep: 1, log_every: 1}\n",
      "bad", &o);
  rfr_run_info info;
  rft_run_steps(run, 2);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  poison(run);
  assert_int_equal(rfr_run_train(run), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "run.diverged");
  assert_non_null(strstr(rfr_last_error()->message, "model.norm.weight has elements that are NaN or infinite"));
  assert_non_null(strstr(rfr_last_error()->message, "step-000002"));
  rfr_run_close(run);
  o.resume = 1;
  run = rft_run_open(ctx, NULL, "bad", &o);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.step, 2);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The same in 16 bits: an infinite element is refused, the largest finite one is not. */
static void bad_weights_in_16_bits(void **state) {
  (void)state;
  static const struct {
    const char *precision;
    uint16_t largest, infinite;
  } types[] = {{"precision: {dtype: bf16}\n", 0x7F7F, 0x7F80}, {"precision: {dtype: f16}\n", 0x7BFF, 0x7C00}};
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  for (int i = 0; i < 2; i++) {
    char config[1024];
    rfr_tensor x;
    snprintf(config, sizeof config, "%s%s", CONFIG, types[i].precision);
    rfr_run *run = rft_run_open(ctx, config, i ? "bad-f16" : "bad-bf16", &o);
    rft_run_steps(run, 1);
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "model.norm.weight", &x), RFR_OK);
    ((uint16_t *)x.data)[3] = types[i].largest;
    assert_int_equal(rfr_run_save(run), RFR_OK);
    ((uint16_t *)x.data)[3] = types[i].infinite;
    assert_int_equal(rfr_run_save(run), RFR_NUMERIC);
    assert_string_equal(rfr_last_error()->slug, "run.diverged");
    rfr_run_close(run);
  }
  rfr_ctx_destroy(ctx);
}

/* Gradients overflow and weights do not change: all steps are skipped, and the run counts as not done. */
static void ends_in_skipped_steps(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run =
      rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 5, log_every: 1}\n", NULL, &o);
  poison(run);
  assert_int_equal(rfr_run_train(run), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "run.diverged");
  assert_non_null(strstr(rfr_last_error()->message, "the last 5 of 5 steps were skipped"));
  assert_int_equal(r.evaluations, 0);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The checkpoint of the last step has finite weights, but a resume is not done, also with more steps. */
static void resume_after_skipped_steps(void **state) {
  static const char more[] = "run.steps=7", *const sets[] = {more};
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run =
      rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 5, log_every: 1}\n", "skips", &o);
  rfr_tensor x;
  rft_run_steps(run, 2);
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "model.norm.weight", &x), RFR_OK);
  ((float *)x.data)[3] = 3e38f; /* weights are finite, but logits are not */
  for (int k = 0; k < 3; k++) {
    assert_int_equal(rfr_run_train(run), RFR_NUMERIC);
    assert_string_equal(rfr_last_error()->slug, "run.diverged");
    const char *says = k == 2 ? "the last 5 of 7 steps were skipped: their gradients were not finite"
                              : "the last 3 of 5 steps were skipped: their gradients were not finite";
    if (!strstr(rfr_last_error()->message, says)) fail_msg("%s", rfr_last_error()->message);
    rfr_run_close(run);
    o.resume = 1;
    o.overrides = k == 1 ? sets : NULL, o.n_overrides = k == 1;
    run = rft_run_open(ctx, NULL, "skips", &o);
  }
  assert_int_equal(r.evaluations, 0);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* A NaN in the weights of a folder whose manifest is correct. */
static void bad_weights_are_not_loaded(void **state) {
  (void)state;
  char config[700], path[200];
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "good", &o);
  rft_run_steps(run, 1);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  snprintf(path, sizeof path, "%s/step-000001/model.safetensors", rft_run_folder("good"));
  FILE *f = fopen(path, "r+b");
  assert_non_null(f);
  assert_int_equal(fseek(f, -4, SEEK_END), 0);
  fwrite((float[]){INFINITY}, 4, 1, f);
  fclose(f);
  snprintf(config, sizeof config, "refrain: 1\nmodel: %s/step-000001\n%s", rft_run_folder("good"),
           DATA TWO_BATCHES ADAM RUN);
  assert_int_equal(rfr_run_open(ctx, config, NULL, &o, &run), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "model.nonfinite");
  rfr_ctx_destroy(ctx);
}

/* ---- data and checkpoints ---- */

static void nothing_to_predict(void **state) {
  (void)state;
  for (int i = 0; i < 64; i++) {
    char name[16];
    snprintf(name, sizeof name, "%02d.one", i);
    rft_write_text(name, (char[]){(char)('!' + i), 0});
  }
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  assert_int_equal(rfr_run_open(ctx,
                                "refrain: 1\n" LLAMA TWO_BATCHES ADAM RUN
                                "data: {train: [\"*.one\"], validation: 0%, tokenizer: bytes, sequence: 16}\n",
                                NULL, &o, &run),
                   RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.empty");
  assert_non_null(strstr(rfr_last_error()->message, "no next token to predict"));
  rfr_ctx_destroy(ctx);
}

/* If a checkpoint is damaged, an older one is used, with a warning that names both. */
static void damaged_checkpoint(void **state) {
  (void)state;
  char path[200];
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, CONFIG, "damaged", &o);
  for (int i = 0; i < 2; i++) {
    rft_run_steps(run, 1);
    assert_int_equal(rfr_run_save(run), RFR_OK);
  }
  rfr_run_close(run);
  snprintf(path, sizeof path, "%s/step-000002/model.safetensors", rft_run_folder("damaged"));
  assert_int_equal(truncate(path, 100), 0);
  o.resume = 1;
  run = rft_run_open(ctx, NULL, "damaged", &o);
  assert_int_equal(r.warnings, 1);
  assert_non_null(strstr(r.warning, "step-000002/model.safetensors"));
  assert_non_null(strstr(r.warning, "using the older checkpoint"));
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The seed in a checkpoint's step block determines the masks: if it is not run.seed, the checkpoint is refused. */
static void other_seed_in_step_block(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  int64_t block[RFI_STEP_N];
  rfr_run *run = rft_run_open(ctx, CONFIG, "seed", &o), *none;
  rft_run_steps(run, 1);
  assert_int_equal(rfr_programs_read(run->programs, &run->block, block), RFR_OK);
  assert_int_equal(block[RFI_STEP_SEED], 3);
  block[RFI_STEP_SEED] = 4;
  assert_int_equal(rfr_programs_write(run->programs, &run->block, block), RFR_OK);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  o.resume = 1;
  assert_int_equal(rfr_run_open(ctx, NULL, rft_run_folder("seed"), &o, &none), RFR_MISMATCH);
  assert_null(none);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  assert_non_null(strstr(rfr_last_error()->message, "step_block has seed 4, but run.seed is 3"));
  rfr_ctx_destroy(ctx);
}

static void numbers(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run_info info;
  rft_write_text("copy.dup", "the same text");
  rft_write_text("copy2.dup", "the same text");
  rft_write_text("none.dup", "");
  rfr_run *run = rft_run_open(
      ctx, "refrain: 1\n" LLAMA TWO_BATCHES ADAM RUN "data: {train: [\"*.txt\", \"*.dup\"], sequence: 16}\n", NULL, &o);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.duplicate_files, 1);
  assert_int_equal(info.empty_files, 1);
  assert_int_equal(info.train_tokens, info.train_bytes);
  assert_true(info.epochs == 50.0 * 128.0 / (double)info.train_tokens);
  assert_true(info.byte_tokens && !info.steps_estimated && info.time == 0.0);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(mismatches),
      cmocka_unit_test(stop_and_continue),
      cmocka_unit_test(generation),
      cmocka_unit_test(generated_tokens),
      cmocka_unit_test(tokens_other_than_bytes),
      cmocka_unit_test(long_texts),
      cmocka_unit_test(disk_full),
      cmocka_unit_test(diverged),
      cmocka_unit_test(given_in_time),
      cmocka_unit_test(log_lines),
      cmocka_unit_test(quiet_allocator),
      cmocka_unit_test(embedded),
      cmocka_unit_test(zero_gradients),
      cmocka_unit_test(small_documents),
      cmocka_unit_test(bad_weights_are_not_saved),
      cmocka_unit_test(bad_weights_in_16_bits),
      cmocka_unit_test(ends_in_skipped_steps),
      cmocka_unit_test(resume_after_skipped_steps),
      cmocka_unit_test(bad_weights_are_not_loaded),
      cmocka_unit_test(nothing_to_predict),
      cmocka_unit_test(damaged_checkpoint),
      cmocka_unit_test(other_seed_in_step_block),
      cmocka_unit_test(numbers),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
