/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs with optimizer.ema: the averages against f64 after every step; bitwise equal eager, replayed, resumed and over
 * ranks; evaluation, texts, reading and export of the averages; what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/model.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "trace/live.h"
#include "train/state.h"

#define OPTIMIZER(keys) "optimizer: {name: adamw, lr: 1e-2, weight_decay: 0.1, clip: 1.0, " keys "}\n"
#define EMA OPTIMIZER("ema: 0.9")
#define RAMPED OPTIMIZER("ema: 0.9, ema_start: 3, ema_warmup: true")
#define BF16 "precision: {dtype: bf16}\n"
#define LORA "adapter: {type: lora, rank: 2}\n"
#define WITH(model, optimizer, rest) "refrain: 1\n" model DATA TWO_BATCHES optimizer rest RUN

enum { STEPS = 12, MOST = 64 };

/* ---- against f64 ---- */

/* Reads a tensor as f64; NULL: it does not exist. */
static double *values_of(rfr_run *run, const char *name, const char *suffix, int64_t *n) {
  char full[160];
  rfr_tensor x;
  snprintf(full, sizeof full, "%s%s", name, suffix);
  if (rfr_programs_tensor(run->programs, full, &x) != RFR_OK) return NULL;
  *n = x.bytes * 8 / rfr_dtype_bits(x.type.dtype);
  char *bytes = malloc((size_t)x.bytes);
  double *d = malloc((size_t)*n * sizeof *d);
  OK(rfr_programs_read(run->programs, &x, bytes));
  for (int64_t i = 0; i < *n; i++)
    d[i] = x.type.dtype == RFR_F32 ? (double)((float *)(void *)bytes)[i]
                                   : (double)rfr_float_from_bits(x.type.dtype, ((uint16_t *)(void *)bytes)[i]);
  free(bytes);
  return d;
}

/* The values that an average follows: the master weight if there is one, else the weight. */
static double *weight_of(rfr_run *run, const char *name, int64_t *n) {
  double *w = values_of(run, name, ".master", n);
  return w ? w : values_of(run, name, "", n);
}

static double decay_of(bool ramped, int step) {
  const int n = ramped ? step - 3 : step;
  if (n < 1) return 0;
  return ramped ? fmin(0.9, (1.0 + n) / (10.0 + n)) : 0.9;
}

static void check(const char *config, bool ramped, int trained) {
  rfr_ctx *own = rft_run_ctx(2);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(own, config, NULL, &o);
  const rfi_step_spec *spec = &run->settings->spec;
  double *want[MOST] = {NULL};
  int64_t n;
  int found = 0;
  assert_int_equal(rfi_state_prepare(run, false), RFR_OK);
  for (int step = 0; step <= STEPS; step++) {
    found = 0;
    if (step > 0) rft_run_steps(run, 1);
    for (int i = 0; i < rfr_model_parameter_count(&spec->model); i++) {
      rfr_parameter p;
      OK(rfr_model_parameter(&spec->model, i, &p));
      double *average = values_of(run, p.name, ".ema", &n);
      assert_int_equal(average == NULL, rfi_step_rule(spec, i).frozen);
      if (!average) continue;
      double *w = weight_of(run, p.name, &n), most = 0, moved = 0;
      if (step == 0) want[i] = weight_of(run, p.name, &n);
      const double d = decay_of(ramped, step);
      for (int64_t k = 0; k < n; k++) {
        if (step > 0) want[i][k] = d * want[i][k] + (1 - d) * w[k];
        most = fmax(most, fabs(average[k] - want[i][k]));
        moved = fmax(moved, fabs(w[k] - want[i][k]));
      }
      if (most > (d == 0 ? 0 : 1e-6)) fail_msg("step %d: %s.ema differs by %g", step, p.name, most);
      assert_true(step < STEPS || moved > 1e-4);
      found++;
      free(average), free(w);
    }
  }
  assert_int_equal(found, trained);
  for (int i = 0; i < MOST; i++) free(want[i]);
  rfr_run_close(run);
  rfr_ctx_destroy(own);
}

static void test_average(void **state) {
  (void)state;
  check(WITH(LLAMA, EMA, SINGLE), false, 21);
  check(WITH(LLAMA, RAMPED, BF16), true, 21);
  check(WITH(LLAMA, OPTIMIZER("ema: 0.9, master_weights: false, frozen: [\"*norm*\"]"), BF16), false, 16);
  check(WITH(LLAMA, RAMPED, LORA BF16), true, 28);
  check(WITH(LLAMA, "optimizer: {name: sgd, lr: 1e-1, momentum: 0.9, ema: 0.9}\n", HALF), false, 21);
  check(WITH(EXPERTS, "optimizer: {name: muon, lr: 1e-2, ema: 0.9}\n", BF16), false, 25);
}

/* ---- the plan ---- */

/* A plan lists averages and the momentum of Muon as states, and counts them with the optimizer's. */
static void test_plan(void **state) {
  (void)state;
  static const char *const suffix[] = {".ema", ".master", ".momentum", ".exp_avg", ".exp_avg_sq"};
  rfr_ctx *own = rft_run_ctx(1);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(own, WITH(LLAMA, "optimizer: {name: muon, lr: 1e-2, ema: 0.9}\n", BF16), NULL, &o);
  rfr_plan_summary sum;
  rfr_memory m;
  int64_t bytes = 0;
  int found[5] = {0};
  OK(rfr_program_plan(run->programs, 0, &sum));
  OK(rfr_programs_memory(run->programs, &m));
  for (int i = 0; i < sum.n_buffers; i++) {
    rfr_plan_buffer b;
    rfr_tensor x;
    OK(rfr_program_plan_buffer(run->programs, 0, i, &b));
    for (int k = 0; k < 5; k++) {
      if (!rfi_ends_in(b.name, suffix[k])) continue;
      assert_string_equal(b.kind, "state");
      OK(rfr_programs_tensor(run->programs, b.name, &x));
      bytes += rfi_storage_bytes(&x.type);
      found[k]++;
    }
  }
  for (int k = 0; k < 5; k++) assert_true(found[k] > 0);
  assert_int_equal(m.optimizer, bytes);
  rfr_run_close(run);
  rfr_ctx_destroy(own);
}

/* ---- bits ---- */

static void test_resume(void **state) {
  (void)state;
  rft_assert_same_bits(WITH(LLAMA, RAMPED, BF16), "bf16", STEPS);
  rft_assert_same_bits(WITH(LLAMA, EMA, LORA BF16), "lora", STEPS);
}

/* Averages do not change training bitwise, and a skipped step changes no average. */
static void test_training(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  rft_record r[2] = {{{0}}};
  rfr_run *run[2];
  (void)state;
  for (int k = 0; k < 2; k++) {
    const rfr_run_options o = rft_run_options(&r[k]);
    run[k] = rft_run_open(own, k ? WITH(LLAMA, EMA, SINGLE) : WITH(LLAMA, OPTIMIZER("ema: 0"), SINGLE), NULL, &o);
    rft_run_steps(run[k], STEPS);
  }
  for (int i = 1; i <= STEPS; i++) assert_true(r[0].loss[i] == r[1].loss[i]);
  rfr_tensor w, average;
  float bad = NAN;
  OK(rfr_programs_tensor(run[1]->programs, "model.layers.1.mlp.down_proj.weight.ema", &average));
  char *before = malloc((size_t)average.bytes);
  memcpy(before, average.data, (size_t)average.bytes);
  OK(rfr_programs_tensor(run[1]->programs, "model.norm.weight", &w));
  memcpy(w.data, &bad, sizeof bad);
  rft_run_steps(run[1], 1);
  assert_int_equal(r[1].skipped, 1);
  assert_memory_equal(before, average.data, (size_t)average.bytes);
  free(before);
  for (int k = 0; k < 2; k++) rfr_run_close(run[k]);
  rfr_ctx_destroy(own);
}

/* ---- reading ---- */

/* The loss of a folder's checkpoint, or of the model of a configuration. */
static double loss_of(rfr_ctx *own, const char *config, const char *folder, int ema) {
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  rfr_evaluation e;
  o.programs = RFR_RUN_EVALUATE;
  o.config_folder = rft_run_root;
  o.ema = ema;
  OK(rfr_run_open(own, config, folder, &o, &run));
  OK(rfr_run_evaluate(run, &e));
  rfr_run_close(run);
  return e.loss;
}

/* Trains in folder `name` and returns the loss of an evaluation during training. Reading the averages from the folder
 * must give the same loss bitwise. */
static double train_and_read(rfr_ctx *own, const char *config, const char *name) {
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(own, config, name, &o);
  rfr_evaluation e;
  rft_run_steps(run, STEPS);
  OK(rfr_run_evaluate(run, &e));
  OK(rfr_run_save(run));
  rfr_run_close(run);
  assert_true(loss_of(own, NULL, rft_run_folder(name), 1) == e.loss);
  assert_true(fabs(loss_of(own, NULL, rft_run_folder(name), 0) - e.loss) > 1e-3);
  return e.loss;
}

/* The logits of a prompt, and greedy tokens after it, from the generation programs of a run. */
typedef struct text {
  float logits[20][256];
  int32_t tokens[12];
  int n;
} text;

static int take_token(int32_t token, void *user) {
  text *t = user;
  t->tokens[t->n++] = token;
  return 0;
}

static void write_text(rfr_run *run, text *out) {
  int32_t prompt[20];
  rfr_generate_options o = rfr_generate_options_default();
  memset(out, 0, sizeof *out);
  for (int i = 0; i < 20; i++) prompt[i] = (unsigned char)"the averaged weights"[i];
  o.temperature = 0, o.tokens = 12;
  OK(rfr_run_score(run, prompt, 16, out->logits[0]));
  OK(rfr_run_generate_tokens(run, prompt, 20, &o, take_token, out));
  assert_int_equal(out->n, 12);
}

/* Training generates texts with the averages, and so does reading a folder with averages; reading without averages
 * gives another text. */
static void check_text(rfr_ctx *own, const char *config, const char *name) {
  static text x[3];
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  o.programs |= RFR_RUN_GENERATE;
  rfr_run *run = rft_run_open(own, config, name, &o);
  rft_run_steps(run, STEPS);
  write_text(run, &x[0]);
  rft_run_steps(run, 1); /* generation changed no state */
  write_text(run, &x[0]);
  OK(rfr_run_save(run));
  rfr_run_close(run);
  for (int ema = 0; ema < 2; ema++) {
    rfr_run_options reads = rfr_run_options_default();
    reads.programs = RFR_RUN_GENERATE;
    reads.ema = ema;
    OK(rfr_run_open(own, NULL, rft_run_folder(name), &reads, &run));
    write_text(run, &x[1 + ema]);
    rfr_run_close(run);
  }
  assert_memory_equal(&x[0], &x[2], sizeof x[0]);
  assert_memory_not_equal(x[0].logits, x[1].logits, sizeof x[0].logits);
}

static void test_texts(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  (void)state;
  check_text(own, WITH(LLAMA, EMA, SINGLE), "text-f32");
  check_text(own, WITH(LLAMA, RAMPED, BF16), "text-bf16");
  check_text(own, WITH(EXPERTS, EMA, LORA BF16), "text-lora");
  rfr_ctx_destroy(own);
}

static void export_averages(rfr_ctx *own, const char *name, const char *format, const char *dtype, const char *out) {
  char folder[160];
  rfr_export_options o = rfr_export_options_default();
  snprintf(folder, sizeof folder, "%s", rft_run_folder(name));
  o.format = format, o.dtype = dtype;
  o.ema = 1;
  OK(rfr_export(own, folder, rft_run_folder(out), &o));
}

#define ON_FOLDER(rest) "refrain: 1\nmodel: exported\n" DATA TWO_BATCHES EMA SINGLE RUN rest

static void test_reading(void **state) {
  rfr_ctx *own = rft_run_ctx(2);
  (void)state;
  const double loss = train_and_read(own, WITH(LLAMA, EMA, SINGLE), "trained");
  export_averages(own, "trained", "hf", "f32", "exported");
  assert_true(loss_of(own, ON_FOLDER(""), NULL, 0) == loss);
  const double adapted = train_and_read(own, ON_FOLDER(LORA), "adapted");
  assert_true(adapted < loss);
  export_averages(own, "adapted", "peft", NULL, "adapter");
  assert_true(loss_of(own, ON_FOLDER("adapter: {from: adapter}\n"), NULL, 0) == adapted);
  export_averages(own, "adapted", "hf", "f32", "merged");
  assert_true(fabs(loss_of(own, "refrain: 1\nmodel: merged\n" DATA TWO_BATCHES EMA SINGLE RUN, NULL, 0) - adapted) <
              1e-5);
  train_and_read(own, WITH(EXPERTS, EMA, BF16), "experts");
  rfr_ctx_destroy(own);
}

/* ---- ranks ---- */

typedef struct job {
  const char *config, *set, *folder;
  rfi_hash hash;
  double loss;
  int gathers; /* of a training step */
} job;

static int count_gathers(const rfr_run *run) {
  const int program = rfr_run_program_index(run, RFR_RUN_TRAIN);
  const char *report = rfr_program_report(run->programs, program, "shard");
  const char *line = report ? strstr(report, "shard: ") : NULL;
  int gathers = -1;
  if (line) sscanf(line, "shard: %*d ranks, %d gathers", &gathers);
  return gathers;
}

static rfr_status train(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  rfr_evaluation e;
  (void)number;
  o.config_folder = rft_run_root;
  o.overrides = &j->set, o.n_overrides = 1;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, j->folder, &o, &run);
  if (s == RFR_OK) j->gathers = count_gathers(run);
  for (int i = 0; i < STEPS && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rft_hash_state(run, &j->hash);
  if (s == RFR_OK) s = rfr_run_evaluate(run, &e);
  if (s == RFR_OK) j->loss = e.loss;
  if (s == RFR_OK && j->folder) s = rfr_run_save(run);
  rfr_run_close(run);
  return s;
}

/* Every mode of parallel.shard is bitwise equal to none, including the averages read from saved shards. */
static void test_ranks(void **state) {
  static const char *const modes[] = {"parallel.shard=none", "parallel.shard=optimizer", "parallel.shard=full"};
  char folder[3][160];
  job jobs[3][2];
  (void)state;
  for (int m = 0; m < 3; m++) {
    snprintf(folder[m], sizeof folder[m], "%s", rft_run_folder(modes[m] + 15));
    for (int r = 0; r < 2; r++)
      jobs[m][r] = (job){.config = WITH(LLAMA, RAMPED, BF16), .set = modes[m], .folder = folder[m]};
    rft_run_ranks(2, jobs[m], sizeof *jobs[m], train);
    for (int r = 0; r < 2; r++) {
      assert_memory_equal(&jobs[m][r].hash, &jobs[0][0].hash, sizeof jobs[0][0].hash);
      assert_true(jobs[m][r].loss == jobs[0][0].loss);
    }
    assert_true(loss_of(ctx, NULL, folder[m], 1) == jobs[0][0].loss);
  }
  /* A step does not gather averages. */
  for (int r = 0; r < 2; r++) jobs[0][r] = (job){.config = WITH(LLAMA, OPTIMIZER("ema: 0"), BF16), .set = modes[2]};
  rft_run_ranks(2, jobs[0], sizeof *jobs[0], train);
  assert_true(jobs[0][0].gathers > 0);
  assert_int_equal(jobs[2][0].gathers, jobs[0][0].gathers);
  for (int r = 0; r < 2; r++)
    jobs[0][r] = (job){.config = WITH(LLAMA, RAMPED, SINGLE), .set = "parallel.pipeline=2", .folder = NULL};
  rft_run_ranks(2, jobs[0], sizeof *jobs[0], train);
  rfr_run_options o = rfr_run_options_default();
  rfr_evaluation e;
  o.config_folder = rft_run_root;
  rfr_run *run = rft_run_open(ctx, WITH(LLAMA, RAMPED, SINGLE), NULL, &o);
  rft_run_steps(run, STEPS);
  OK(rfr_run_evaluate(run, &e));
  rfr_run_close(run);
  assert_true(fabs(jobs[0][0].loss - e.loss) < 1e-5);
  for (int r = 0; r < 2; r++) jobs[0][r] = (job){.config = WITH(EXPERTS, EMA, SINGLE), .set = "parallel.expert=1"};
  rft_run_ranks(2, jobs[0], sizeof *jobs[0], train);
}

static rfr_status expect_refusal(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  const char *const *config = rank;
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.comm = comm;
  const rfr_status s = rfr_run_open(own, *config, NULL, &o, &run);
  const bool refused = s == RFR_UNSUPPORTED && strstr(rfr_last_error()->message, "optimizer.ema with parallel.shard");
  rfr_run_close(run);
  return refused ? RFR_OK : rfi_fail(RFI_E_INTERNAL, "not refused");
}

static void refuse(const char *config, const char *folder, int programs, int ema, const char *slug, const char *text) {
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run;
  o.config_folder = rft_run_root;
  o.programs = programs;
  o.ema = ema;
  assert_int_not_equal(rfr_run_open(ctx, config, folder, &o, &run), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, text)) fail_msg("%s", rfr_last_error()->message);
}

static void test_refused(void **state) {
  const char *spread[2];
  rfr_export_options x = rfr_export_options_default();
  char folder[160];
  (void)state;
  for (int r = 0; r < 2; r++)
    spread[r] = "refrain: 1\n" MIXTRAL DATA TWO_BATCHES EMA RUN "parallel: {expert: 2, shard: optimizer}\n";
  rft_run_ranks(2, spread, sizeof *spread, expect_refusal);
  refuse(WITH(LLAMA, OPTIMIZER("ema_start: 5"), SINGLE), NULL, RFR_RUN_TRAIN, 0, "config.value",
         "optimizer.ema_start: it applies only with optimizer.ema");
  refuse(WITH(LLAMA, OPTIMIZER("ema: 1"), SINGLE), NULL, RFR_RUN_TRAIN, 0, "config.value", "optimizer.ema");
  refuse(WITH(LLAMA, EMA, SINGLE), NULL, RFR_RUN_TRAIN, 1, "argument", "for reading");
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = rft_run_root;
  rfr_run *run = rft_run_open(ctx, WITH(LLAMA, OPTIMIZER("ema: 0"), SINGLE), "without", &o);
  rft_run_steps(run, 1);
  OK(rfr_run_save(run));
  rfr_run_close(run);
  snprintf(folder, sizeof folder, "%s", rft_run_folder("without"));
  refuse(NULL, folder, RFR_RUN_EVALUATE, 1, "run.ema", "has no averaged weights");
  refuse(ON_FOLDER(""), NULL, RFR_RUN_EVALUATE, 1, "run.ema", "is a model");
  x.ema = 1;
  assert_int_equal(rfr_export(ctx, folder, rft_run_folder("nothing"), &x), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "run.ema");
  o.resume = 1; /* averages cannot be enabled at a resume */
  assert_int_not_equal(rfr_run_open(ctx, WITH(LLAMA, EMA, SINGLE), folder, &o, &run), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  o.resume = 0;
  run = rft_run_open(ctx, WITH(LLAMA, EMA, SINGLE), "with", &o);
  rft_run_steps(run, 1);
  OK(rfr_run_save(run));
  rfr_run_close(run);
  o.resume = 1; /* nor disabled */
  assert_int_not_equal(rfr_run_open(ctx, WITH(LLAMA, OPTIMIZER("ema: 0"), SINGLE), rft_run_folder("with"), &o, &run),
                       RFR_OK);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  assert_non_null(strstr(rfr_last_error()->message, "and \"0\" in the configuration"));
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_one_thread_test(test_average),
                                     rft_one_thread_test(test_plan),
                                     rft_one_thread_test(test_resume),
                                     rft_one_thread_test(test_training),
                                     cmocka_unit_test(test_reading) /* writes the folder that test_refused reads */,
                                     rft_one_thread_test(test_texts),
                                     rft_context_test(test_ranks),
                                     rft_context_test(test_refused)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
