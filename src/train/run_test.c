/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs: eager, captured and resumed ones hold the same bits; microbatches mean what one
 * batch means; stops, full disks and strangers' checkpoints; what a guest must not do.
 */
#include <dirent.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "data/json.h"
#include "support/comma_locale.h"
#include "train/run.h"

#define LLAMA                                                                                  \
  "model: {model_type: llama, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 2}\n"
#define GPT2                                                                            \
  "model: {model_type: gpt2, vocab_size: 256, hidden_size: 24, num_hidden_layers: 2,\n" \
  "        num_attention_heads: 3, max_position_embeddings: 64, dropout: 0.1}\n"        \
  "precision: {dtype: bf16}\n"
#define EXPERTS                                                                                                     \
  "model: {model_type: qwen3_moe, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_experts: 5,\n" \
  "        moe_intermediate_size: 20, router_z_loss_coef: 0.001}\n"
#define MIXTRAL                                                                                                  \
  "model: {model_type: mixtral, hidden_size: 24, intermediate_size: 20, num_hidden_layers: 2, num_experts: 4,\n" \
  "        num_attention_heads: 4, dropout: 0.05}\nprecision: {dtype: bf16, router_dtype: model}\n"
#define SINGLE "precision: {dtype: f32}\n"
#define HALF "precision: {dtype: f16}\n"
#define DATA "data: {train: [\"*.txt\"], validation: 30%, tokenizer: bytes, sequence: 16}\n"
#define ADAM "optimizer: {name: adamw, lr: 3e-3, weight_decay: 0.1, clip: 1.0}\n"
#define TWO_BATCHES "batch: {tokens: 128, microbatch: 4}\n"
#define RUN "run: {steps: 50, seed: 3, log_every: 1}\n"

enum { STEPS = 50 };

static char root[64];

static void write_text(const char *name, const char *text) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", root, name);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

static int set_up(void **state) {
  (void)state;
  snprintf(root, sizeof root, P_tmpdir "/refrain-run-XXXXXX");
  if (!mkdtemp(root)) return -1;
  for (int i = 0; i < 10; i++) {
    char name[16], text[4096];
    int n = 0;
    for (int k = 0; k < 40 + 7 * i; k++)
      n += snprintf(text + n, sizeof text - (size_t)n, "line %d of %d: %d apples\n", k, i, k * k % 23);
    snprintf(name, sizeof name, "%d.txt", i);
    write_text(name, text);
  }
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  rfr_ctx *ctx;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) return -1;
  rfi_tree_remove(ctx, root);
  rfr_ctx_destroy(ctx);
  return 0;
}

/* Losses by step, and whatever else the events said. */
typedef struct record {
  double loss[STEPS + 1], norm[STEPS + 1];
  double most_load, least_load; /* of the last step */
  int64_t last;
  int skipped, warnings, checkpoints, evaluations;
  double bits;
  rfr_run *stop_at_5;
  char warning[256];
} record;

static void on_event(const rfr_event *e, void *user) {
  record *r = user;
  switch (e->kind) {
    case RFR_EVENT_METRICS:
      if (e->step <= STEPS) r->loss[e->step] = e->loss, r->norm[e->step] = e->grad_norm;
      r->most_load = e->most_load, r->least_load = e->least_load;
      r->last = e->step;
      r->skipped += e->skipped;
      if (r->stop_at_5 && e->step == 5) rfr_run_request_stop(r->stop_at_5);
      break;
    case RFR_EVENT_WARNING:
      r->warnings++;
      snprintf(r->warning, sizeof r->warning, "%s", e->message);
      break;
    case RFR_EVENT_CHECKPOINT: r->checkpoints++; break;
    case RFR_EVENT_EVALUATION:
      r->evaluations++;
      r->bits = e->bits_per_byte;
      break;
    default: break;
  }
}

static rfr_ctx *new_ctx(int threads) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = threads;
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  return ctx;
}

static rfr_run_options options_for(record *r) {
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = root;
  o.on_event = on_event;
  o.event_user = r;
  return o;
}

static const char *folder_of(const char *name) {
  static char folder[128];
  snprintf(folder, sizeof folder, "%s/%s", root, name);
  return folder;
}

static rfr_run *open_run(rfr_ctx *ctx, const char *config, const char *name, const rfr_run_options *o) {
  rfr_run *run;
  rfr_status s = rfr_run_open(ctx, config, name ? folder_of(name) : NULL, o, &run);
  if (s != RFR_OK) print_error("%s [%s]\n", rfr_last_error()->message, rfr_last_error()->slug);
  assert_int_equal(s, RFR_OK);
  return run;
}

static void steps(rfr_run *run, int n) {
  for (int i = 0; i < n; i++) {
    rfr_status s = rfr_run_step(run);
    if (s != RFR_OK) print_error("%s\n", rfr_last_error()->message);
    assert_int_equal(s, RFR_OK);
  }
}

/* Every tensor that outlives a step. */
static void assert_same_state(rfr_run *a, rfr_run *b) {
  rfr_tensor x, y;
  int n = 0;
  for (int i = 0; rfr_programs_tensor_at(rfr_run_programs(a), i, &x) == RFR_OK; i++) {
    if (x.role == RFR_ROLE_INPUT || strcmp(x.name, RFI_NAME_METRICS) == 0) continue;
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(b), x.name, &y), RFR_OK);
    assert_int_equal(x.bytes, y.bytes);
    if (memcmp(x.data, y.data, (size_t)x.bytes) != 0) fail_msg("%s differs", x.name);
    n++;
  }
  assert_true(n > 20);
}

static void assert_same_losses(const record *a, const record *b) {
  for (int i = 1; i <= STEPS; i++) {
    if (a->loss[i] != b->loss[i]) fail_msg("step %d: %.17g and %.17g", i, a->loss[i], b->loss[i]);
    assert_true(a->norm[i] == b->norm[i]);
  }
}

static void same_bits(const char *config, const char *name) {
  rfr_ctx *ctx = new_ctx(2);
  record replayed = {0}, eager = {0}, resumed = {0};
  rfr_run_options o = options_for(&replayed);
  rfr_run *a = open_run(ctx, config, NULL, &o);
  steps(a, STEPS);
  assert_int_equal(replayed.skipped, 0);
  assert_true(replayed.loss[STEPS] < 0.8 * replayed.loss[1]);

  o = options_for(&eager);
  o.eager = 1;
  rfr_run *b = open_run(ctx, config, NULL, &o);
  steps(b, STEPS);
  assert_same_losses(&replayed, &eager);
  assert_same_state(a, b);
  rfr_run_close(b);

  o = options_for(&resumed);
  rfr_run *c = open_run(ctx, config, name, &o);
  steps(c, 20);
  assert_int_equal(rfr_run_save(c), RFR_OK);
  steps(c, 3); /* lost: after the checkpoint */
  rfr_run_close(c);
  o.resume = o.strict = 1;
  c = open_run(ctx, config, name, &o);
  rfr_run_info info;
  rfr_run_get_info(c, &info);
  assert_int_equal(info.step, 20);
  steps(c, 30);
  assert_same_losses(&replayed, &resumed);
  assert_same_state(a, c);
  assert_int_equal(resumed.warnings, 0);
  rfr_run_close(c);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

static void bits_llama(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "llama");
}

static void bits_gpt2_bf16_dropout(void **state) {
  (void)state;
  same_bits("refrain: 1\n" GPT2 DATA TWO_BATCHES ADAM RUN, "gpt2");
}

static void bits_experts(void **state) {
  (void)state;
  same_bits("refrain: 1\n" EXPERTS SINGLE DATA TWO_BATCHES ADAM RUN, "experts");
}

static void bits_mixtral_bf16_dropout(void **state) {
  (void)state;
  same_bits("refrain: 1\n" MIXTRAL DATA TWO_BATCHES ADAM RUN, "mixtral");
}

static void bits_experts_f16(void **state) {
  (void)state;
  same_bits("refrain: 1\n" EXPERTS HALF DATA TWO_BATCHES ADAM RUN, "half-experts");
}

/* The metrics say how full experts are; the loss that balances them does; frozen ones stay. */
static void expert_load(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  static const char *const sets[2] = {"model.router_aux_loss_coef=0", "model.router_aux_loss_coef=1"};
  const char *frozen[2] = {NULL, "optimizer.frozen=[\"*.0.mlp.experts.*\"]"};
  record r[2] = {{{0}}};
  rfr_run_info info;
  for (int i = 0; i < 2; i++) {
    rfr_run_options o = options_for(&r[i]);
    frozen[0] = sets[i];
    o.overrides = frozen;
    o.n_overrides = 2;
    rfr_run *run = open_run(ctx, "refrain: 1\n" EXPERTS SINGLE DATA TWO_BATCHES ADAM RUN, NULL, &o);
    rfr_tensor x;
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "model.layers.0.mlp.experts.down_proj", &x), RFR_OK);
    void *before = malloc((size_t)x.bytes);
    assert_non_null(before);
    memcpy(before, x.data, (size_t)x.bytes);
    rfr_run_get_info(run, &info);
    assert_true(info.experts == 5 && info.expert_rows == 128 && info.expert_bytes == 5 * 3 * 20 * 24 * 4);
    steps(run, STEPS);
    assert_memory_equal(before, x.data, (size_t)x.bytes);
    assert_int_equal(r[i].warnings, 0);
    assert_true(r[i].most_load > 1 && r[i].most_load <= 2.5 && r[i].least_load >= 0 && r[i].least_load < 1);
    assert_true(r[i].loss[STEPS] < 0.8 * r[i].loss[1]);
    free(before);
    rfr_run_close(run);
  }
  assert_true(r[1].most_load - r[1].least_load < r[0].most_load - r[0].least_load);
  rfr_ctx_destroy(ctx);
}

/* A checkpoint is a model folder from which another run starts with the same bits: all `parameters` tensors of it. */
static void child_of(const char *model, const char *set, const char *name, int parameters, rfr_run_info *info) {
  rfr_ctx *ctx = new_ctx(1);
  record r = {0}, s = {0};
  char config[512];
  rfr_run_options o = options_for(&r);
  o.overrides = &set;
  o.n_overrides = set != NULL;
  snprintf(config, sizeof config, "refrain: 1\n%s%s", model, DATA TWO_BATCHES ADAM RUN);
  rfr_run *a = open_run(ctx, config, name, &o);
  steps(a, 5);
  assert_int_equal(rfr_run_save(a), RFR_OK);
  snprintf(config, sizeof config, "refrain: 1\nmodel: %s/step-000005\n%s", folder_of(name), DATA TWO_BATCHES ADAM RUN);
  o = options_for(&s);
  rfr_run *b = open_run(ctx, config, NULL, &o);
  rfr_tensor x, y;
  int n = 0;
  for (int i = 0; rfr_programs_tensor_at(rfr_run_programs(a), i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_TRAINABLE) continue;
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(b), x.name, &y), RFR_OK);
    assert_int_equal(x.bytes, y.bytes);
    assert_memory_equal(x.data, y.data, (size_t)x.bytes);
    n++;
  }
  assert_int_equal(n, parameters);
  rfr_run_get_info(b, info);
  steps(b, 1);
  assert_true(s.loss[1] < r.loss[1]); /* the same windows, seen after training */
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

static void from_folder(void **state) {
  (void)state;
  rfr_run_info info;
  child_of(LLAMA, NULL, "parent", 21, &info);
  assert_true(info.experts == 0 && info.expert_layers == 0);
  child_of(EXPERTS, NULL, "expert-parent", 25, &info);
  assert_true(info.experts == 5 && info.expert_layers == 2);
  child_of(EXPERTS, "model.mlp_only_layers=[1]", "mixed-parent", 25, &info);
  assert_true(info.experts == 5 && info.expert_layers == 1);
  assert_int_equal(info.expert_bytes, 5 * 3 * 20 * 24 * rfr_dtype_bits(info.dtype) / 8);
}

/* Which layers have experts, by either key, and what is none. */
static void layers_with_experts(void **state) {
  (void)state;
  static const struct {
    const char *model, *set;
    int64_t layers;    /* with experts, of two */
    const char *wrong; /* NULL: taken */
  } cases[] = {{EXPERTS, "model.decoder_sparse_step=2", 1, NULL},
               {EXPERTS, "model.mlp_only_layers=[0]", 1, NULL},
               {EXPERTS, "model.mlp_only_layers=[]", 2, NULL},
               {EXPERTS, "model.mlp_only_layers=[2]", 0, "2 is no block of 2"},
               {EXPERTS, "model.mlp_only_layers=[1x]", 0, "1x is no block of 2"},
               {EXPERTS, "model.mlp_only_layers=[0, 1]", 0, "0 of 2 layers have experts"},
               {MIXTRAL, "model.mlp_only_layers=[0]", 0, "1 of 2 layers have experts"},
               {LLAMA, "model.mlp_only_layers=[0]", 0, "without experts"}};
  rfr_ctx *ctx = new_ctx(1);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char config[600];
    record r = {0};
    rfr_run_options o = options_for(&r);
    rfr_run *run;
    rfr_run_info info;
    o.overrides = &cases[i].set;
    o.n_overrides = 1;
    snprintf(config, sizeof config, "refrain: 1\n%s%s", cases[i].model, DATA TWO_BATCHES ADAM RUN);
    rfr_status s = rfr_run_open(ctx, config, NULL, &o, &run);
    if (cases[i].wrong) {
      if (s == RFR_OK) fail_msg("%s was taken", cases[i].set);
      if (!strstr(rfr_last_error()->message, cases[i].wrong)) fail_msg("%s", rfr_last_error()->message);
      continue;
    }
    assert_int_equal(s, RFR_OK);
    rfr_run_get_info(run, &info);
    assert_int_equal(info.expert_layers, cases[i].layers);
    steps(run, 1);
    rfr_run_close(run);
  }
  rfr_ctx_destroy(ctx);
}

static void bits_llama_f16(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA HALF DATA TWO_BATCHES ADAM RUN, "half");
}

/* A loss scale under which f16 overflows: steps are skipped, each halves it, until one is not; then training goes on.
 * Without overflow the losses are those of f32, as far as f16 goes. */
static void loss_scale(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record half = {0}, single = {0};
  rfr_run_options o = options_for(&single);
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  steps(run, STEPS);
  rfr_run_close(run);
  o = options_for(&half);
  run = open_run(ctx, "refrain: 1\n" LLAMA HALF DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "loss_scale", &x), RFR_OK);
  steps(run, STEPS);
  int32_t *scale = x.data;
  assert_true(scale[0] == 0 && scale[1] == STEPS && half.skipped == 0);
  for (int i = 1; i <= STEPS; i++) assert_true(fabs(half.loss[i] - single.loss[i]) < 5e-3 * single.loss[i]);
  for (int i = 1; i <= STEPS; i++) assert_true(fabs(half.norm[i] - single.norm[i]) < 3e-2 * single.norm[i]);
  scale[0] = 99; /* more than the largest there is, 2^24 */
  steps(run, 12);
  assert_true(half.skipped > 0 && half.skipped < 12);
  assert_int_equal(scale[0], 8 - half.skipped);
  assert_int_equal(scale[1], 12 - half.skipped);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* What is computed again is the same: less memory, no bit changed. */
static void recompute_all(const char *config) {
  rfr_ctx *ctx = new_ctx(2);
  record kept = {0}, again = {0};
  rfr_plan_summary more, less;
  const char *const sets[] = {"memory.recompute=all"};
  rfr_run_options o = options_for(&kept);
  rfr_run *a = open_run(ctx, config, NULL, &o);
  steps(a, STEPS);
  o = options_for(&again);
  o.overrides = sets;
  o.n_overrides = 1;
  rfr_run *b = open_run(ctx, config, NULL, &o);
  steps(b, STEPS);
  assert_same_losses(&kept, &again);
  assert_same_state(a, b);
  assert_int_equal(rfr_program_plan(rfr_run_programs(a), 0, &more), RFR_OK);
  assert_int_equal(rfr_program_plan(rfr_run_programs(b), 0, &less), RFR_OK);
  assert_true(less.transient_planned_bytes < more.transient_planned_bytes);
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

static void recomputed(void **state) {
  (void)state;
  recompute_all("refrain: 1\n" GPT2 DATA TWO_BATCHES ADAM RUN);
  recompute_all("refrain: 1\n" MIXTRAL DATA TWO_BATCHES ADAM RUN);
}

static void microbatches(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record one = {0}, four = {0};
  rfr_run_options o = options_for(&one);
  rfr_run *a = open_run(ctx, "refrain: 1\n" LLAMA DATA "batch: {tokens: 128, microbatch: 8}\n" ADAM RUN, NULL, &o);
  steps(a, 10);
  rfr_run_close(a);
  o = options_for(&four);
  a = open_run(ctx, "refrain: 1\n" LLAMA DATA "batch: {tokens: 128, microbatch: 2}\n" ADAM RUN, NULL, &o);
  steps(a, 10);
  rfr_run_close(a);
  for (int i = 1; i <= 10; i++) {
    assert_true(fabs(one.loss[i] - four.loss[i]) <= 2e-5 * one.loss[i]);
    assert_true(fabs(one.norm[i] - four.norm[i]) <= 2e-3 * one.norm[i]);
  }
  assert_true(memcmp(one.loss, four.loss, sizeof one.loss) != 0); /* they are two programs */
  rfr_ctx_destroy(ctx);
}

static void mismatches(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "mismatch", &o), *none;
  steps(run, 2);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  /* a second one beside it, which would take its unfinished checkpoints for leftovers */
  o.resume = 1;
  assert_int_equal(rfr_run_open(ctx, NULL, folder_of("mismatch"), &o, &none), RFR_INVALID);
  assert_null(none);
  assert_string_equal(rfr_last_error()->slug, "run.busy");
  o.resume = 0;
  rfr_run_close(run);
  /* a second run in the same folder */
  assert_int_equal(rfr_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, folder_of("mismatch"), &o, &none),
                   RFR_INVALID);
  assert_null(none);
  assert_string_equal(rfr_last_error()->slug, "run.exists");
  o.resume = 1;
  const char *const wider[] = {"model.hidden_size=32"};
  o.overrides = wider;
  o.n_overrides = 1;
  assert_int_equal(rfr_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, folder_of("mismatch"), &o, &none),
                   RFR_MISMATCH);
  assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
  assert_non_null(strstr(rfr_last_error()->message, "hidden_size"));
  o.n_overrides = 0;
  /* another number of threads: bits may differ */
  rfr_ctx *two = new_ctx(2);
  o.strict = 1;
  assert_int_equal(rfr_run_open(two, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, folder_of("mismatch"), &o, &none),
                   RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "threads"));
  o.strict = 0;
  run = open_run(two, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "mismatch", &o);
  assert_int_equal(r.warnings, 1);
  assert_non_null(strstr(r.warning, "threads"));
  rfr_run_close(run);
  rfr_ctx_destroy(two);
  rfr_ctx_destroy(ctx);
}

static void stop_and_go_on(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0}, whole = {0};
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 12, evaluate_every: 6, keep: 1}\n";
  rfr_run_options o = options_for(&whole);
  rfr_run *run = open_run(ctx, config, NULL, &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(whole.evaluations, 2);
  rfr_run_close(run);
  o = options_for(&r);
  run = open_run(ctx, config, "stop", &o);
  r.stop_at_5 = run;
  assert_int_equal(rfr_run_train(run), RFR_STOPPED);
  assert_string_equal(rfr_last_error()->slug, "run.stopped");
  assert_int_equal(r.last, 5);
  assert_int_equal(r.checkpoints, 1);
  rfr_run_close(run);
  r.stop_at_5 = NULL;
  o.resume = 1;
  run = open_run(ctx, config, "stop", &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  assert_int_equal(r.last, 12);
  for (int i = 1; i <= 12; i++) assert_true(r.loss[i] == whole.loss[i]);
  assert_true(r.bits == whole.bits && r.bits > 0.0);
  rfr_run_close(run);

  /* the finished run, opened for reading */
  rfr_evaluation e;
  o = options_for(&r);
  o.programs = RFR_RUN_EVALUATE;
  run = open_run(ctx, NULL, "stop", &o);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  assert_true(e.bits_per_byte == whole.bits);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  assert_int_equal(e.tokens, info.validation_bytes - info.validation_files); /* all but each file's first byte */
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void collect(const char *text, size_t n, void *user) {
  char *all = user;
  strncat(all, text, n);
}

static void generation(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  o.programs = RFR_RUN_ALL;
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  steps(run, 50);
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
  g.top_k = 1; /* the most probable one, whatever the temperature */
  b[0] = 0;
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, b), RFR_OK);
  g.temperature = 0.0;
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, d), RFR_OK);
  assert_string_equal(b, d);
  assert_int_equal(rfr_run_generate(run, "", 0, &g, collect, d), RFR_INVALID);
  rfr_run_close(run);
  o.programs = RFR_RUN_TRAIN; /* pays for no caches */
  run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "cache.0.k", &x), RFR_INVALID);
  assert_int_equal(rfr_run_generate(run, "line ", 5, &g, collect, d), RFR_INVALID);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* The caches hold 16 tokens. A text of 17 goes on from its last 8, as if they were a prompt. */
static void long_texts(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  o.programs = RFR_RUN_ALL;
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  steps(run, 50);
  rfr_generate_options g = rfr_generate_options_default();
  char all[128] = "line ", rest[128] = "", again[128] = "";
  g.tokens = 55;
  g.temperature = 0.0;
  assert_int_equal(rfr_run_generate(run, all, 5, &g, collect, all + 5), RFR_OK);
  assert_int_equal(strlen(all), 60);
  g.tokens = 43;
  assert_int_equal(rfr_run_generate(run, all + 9, 8, &g, collect, rest), RFR_OK);
  assert_string_equal(rest, all + 17);
  assert_int_equal(rfr_run_generate(run, all, 17, &g, collect, again), RFR_OK); /* too long a prompt */
  assert_string_equal(again, rest);
  /* a draw's address counts from the beginning of the text */
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
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN;
  rfr_run *run = open_run(ctx, config, "full", &o);
  steps(run, 3);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  steps(run, 2);
  rfi_io_fault count = {0};
  rfi_io_set_fault(&count);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  const int64_t calls = count.calls;
  assert_true(calls > 10);
  steps(run, 1);
  for (int64_t k = 1; k <= calls / 2; k += 3) {
    rfi_io_fault fault = {.fail_at = k, .error = ENOSPC, .sticky = true};
    rfi_io_set_fault(&fault);
    assert_int_equal(rfr_run_save(run), RFR_IO);
  }
  rfi_io_set_fault(NULL);
  rfr_run_close(run);
  o.resume = 1;
  run = open_run(ctx, config, "full", &o);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  assert_int_equal(info.step, 5);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void diverged(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  rfr_run *run = open_run(ctx,
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

static void seconds_become_steps(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0}, again = {0};
  rfr_run_options o = options_for(&r);
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {time: 1s, seed: 3}\n";
  rfr_run *run = open_run(ctx, config, "seconds", &o);
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  const int64_t n = info.steps;
  assert_true(n >= 1);
  assert_int_equal(info.step, 0); /* timing left nothing behind */
  assert_int_equal(r.last, 0);
  steps(run, 1);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  o = options_for(&again);
  o.resume = 1;
  run = open_run(ctx, config, "seconds", &o);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.steps, n);
  assert_int_equal(again.warnings, 0);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* Every line of a run's log is JSON, and the metrics are those of the events. */
static void check_log(const char *name, const record *r, int steps) {
  char path[160], line[4096];
  snprintf(path, sizeof path, "%s/log.jsonl", folder_of(name));
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
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, "log", &o);
  steps(run, 3);
  rfr_run_close(run);
  check_log("log", &r, 3);
  rfr_ctx_destroy(ctx);
}

/* What is frozen stays as it was and costs no state; the rest trains. */
static void frozen(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  const char *const sets[] = {"optimizer.frozen=[\"*embed*\", \"model.layers.0.*\"]"};
  o.overrides = sets;
  o.n_overrides = 1;
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rfr_programs *p = rfr_run_programs(run);
  rfr_tensor x;
  float before[2], after[2];
  static const char *const names[] = {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"};
  for (int i = 0; i < 2; i++) {
    assert_int_equal(rfr_programs_tensor(p, names[i], &x), RFR_OK);
    before[i] = ((float *)x.data)[7];
  }
  steps(run, 20);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(rfr_programs_tensor(p, names[i], &x), RFR_OK);
    after[i] = ((float *)x.data)[7];
  }
  assert_true(before[0] == after[0]);
  assert_true(before[1] != after[1]);
  assert_int_equal(rfr_programs_tensor(p, "model.layers.0.mlp.up_proj.weight.exp_avg", &x), RFR_INVALID);
  assert_int_equal(rfr_programs_tensor(p, "model.layers.1.mlp.up_proj.weight.exp_avg", &x), RFR_OK);
  assert_true(r.loss[20] < r.loss[1]);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* No allocation in a step or an evaluation, and nothing that grows. */
static void quiet_allocator(void **state) {
  (void)state;
  rfr_ctx *ctx = new_ctx(2);
  record r = {0};
  rfr_evaluation e;
  rfr_run_options o = options_for(&r);
  rfr_run *run = open_run(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  const rfr_ctx_stats before = rfr_ctx_get_stats(ctx);
  steps(run, 10);
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  const rfr_ctx_stats after = rfr_ctx_get_stats(ctx);
  assert_int_equal(after.alloc_calls, before.alloc_calls);
  rfr_run_close(run);
  assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  rfr_ctx_destroy(ctx);
}

/* A comma locale, no standard output, and the embedder's own handlers. */
static void guest(void **state) {
  (void)state;
  const int signals[] = {SIGINT, SIGTERM, SIGFPE, SIGSEGV, SIGBUS, SIGPIPE, SIGABRT};
  enum { N = sizeof signals / sizeof signals[0] };
  struct sigaction before[N], after;
  record plain = {0}, comma = {0};
  const char *config = "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM "run: {steps: 6, seed: 3, log_every: 1}\n";
  rfr_ctx *ctx = new_ctx(2);
  rfr_run_options o = options_for(&plain);
  rfr_run *run = open_run(ctx, config, NULL, &o);
  assert_int_equal(rfr_run_train(run), RFR_OK);
  rfr_run_close(run);

  for (int i = 0; i < N; i++) sigaction(signals[i], NULL, &before[i]);
  fflush(stdout);
  const int out = dup(STDOUT_FILENO);
  close(STDOUT_FILENO);
  const int has_comma = rft_set_comma_locale(root);
  o = options_for(&comma);
  rfr_status s = rfr_run_open(ctx, config, folder_of("guest"), &o, &run);
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
  /* and what was written under it reads back */
  check_log("guest", &comma, 6);
  o.resume = 1;
  run = open_run(ctx, config, "guest", &o);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* With weights of zero nothing gets a gradient: said once, after the tenth step, by name. */
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
    rfr_ctx *ctx = new_ctx(2);
    record r = {0};
    rfr_run_options o = options_for(&r);
    rfr_run *run = open_run(ctx, config, NULL, &o);
    steps(run, 9);
    assert_int_equal(r.warnings, 0);
    steps(run, 3);
    assert_int_equal(r.warnings, 1);
    if (!strstr(r.warning, said[i])) fail_msg("%s", r.warning);
    rfr_run_close(run);
    rfr_ctx_destroy(ctx);
  }
}

/* Documents of two bytes that begin with '@': the device is told of each that begins in a window. */
static void small_documents(void **state) {
  (void)state;
  for (int i = 0; i < 60; i++) {
    char name[16];
    snprintf(name, sizeof name, "%02d.tiny", i);
    write_text(name, (char[]){'@', (char)('A' + i % 64), 0});
  }
  rfr_ctx *ctx = new_ctx(1);
  record r = {0};
  rfr_run_options o = options_for(&r);
  rfr_run *run = open_run(ctx,
                          "refrain: 1\n" LLAMA TWO_BATCHES ADAM RUN
                          "data: {train: [\"*.tiny\"], validation: 0%, tokenizer: bytes, sequence: 32}\n",
                          NULL, &o);
  steps(run, 1);
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bits_llama),
      cmocka_unit_test(bits_gpt2_bf16_dropout),
      cmocka_unit_test(bits_llama_f16),
      cmocka_unit_test(bits_experts),
      cmocka_unit_test(bits_mixtral_bf16_dropout),
      cmocka_unit_test(bits_experts_f16),
      cmocka_unit_test(expert_load),
      cmocka_unit_test(layers_with_experts),
      cmocka_unit_test(loss_scale),
      cmocka_unit_test(microbatches),
      cmocka_unit_test(recomputed),
      cmocka_unit_test(mismatches),
      cmocka_unit_test(stop_and_go_on),
      cmocka_unit_test(generation),
      cmocka_unit_test(long_texts),
      cmocka_unit_test(disk_full),
      cmocka_unit_test(diverged),
      cmocka_unit_test(seconds_become_steps),
      cmocka_unit_test(log_lines),
      cmocka_unit_test(quiet_allocator),
      cmocka_unit_test(guest),
      cmocka_unit_test(frozen),
      cmocka_unit_test(from_folder),
      cmocka_unit_test(zero_gradients),
      cmocka_unit_test(small_documents),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
