/* SPDX-License-Identifier: Apache-2.0
 *
 * Training steps over the ranks of a pipeline, which are threads, against one rank with as many microbatches: weights,
 * optimizer states and metrics after three steps, for every schedule.
 */
#include "train/stages.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "nn/nn.h"
#include "refrain/recipe.h"
#include "support/context.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/thin.h"
#include "trace/trace.h"

enum { SLOTS = 2, MICROBATCHES = 5, STEPS = 3, MOST_RANKS = 4, TENSORS = 400, COLUMNS = 6 };

static int64_t T = 24; /* tokens of a microbatch */

typedef struct setting {
  rfr_model_type type;
  rfr_recipe_kind recipe;
  bool tied, frozen_first, bf16, fuse, sgd;
  double dropout;
  rfr_recompute recompute;
} setting;

/* `rules`: memory for TENSORS rules; the result points to it. */
static rfi_step_spec spec_of(const setting *s, int ranks, int rank, rfr_schedule_kind kind, rfi_param_rule *rules) {
  rfi_step_spec spec = {.model = rfr_model_config_default(s->type),
                        .slots = SLOTS,
                        .microbatches = MICROBATCHES,
                        .tokens = T,
                        .adamw = rfr_adamw_options_default(),
                        .gradient_dtype = RFR_F32,
                        .logits_dtype = RFR_F32,
                        .state_dtype = RFR_F32,
                        .clip = 0.5,
                        .pipeline = {ranks, rank, kind}};
  rfr_model_config *c = &spec.model;
  c->vocab_size = 61, c->hidden_size = 32, c->intermediate_size = 48, c->layers = 9, c->heads = 4, c->head_dim = 8;
  c->kv_heads = s->type == RFR_MODEL_GPT2 ? 4 : 2;
  c->max_positions = T;
  c->tie_embeddings = s->tied;
  c->dropout = s->dropout;
  c->dtype = s->bf16 ? RFR_BF16 : RFR_F32;
  spec.master = s->bf16;
  spec.sgd = s->sgd;
  spec.momentum = 0.9;
  spec.adamw.decay = 0.1;
  spec.lr = rfr_lr_options_default();
  spec.lr.base = 0.01;
  if (s->recipe) spec.recipe = rfr_recipe_default(s->recipe);
  if (s->recipe == RFR_RECIPE_FP8_DELAYED) spec.recipe.history = 2;
  for (int i = 0; i < rfr_model_parameter_count(c); i++)
    rules[i] = (rfi_param_rule){s->frozen_first && rfi_parameter_layer(c, i) < 1, 1.0, spec.adamw.decay};
  spec.rules = rules;
  return spec;
}

typedef struct rank {
  const setting *setting;
  rfi_param_rule rules[TENSORS];
  int ranks, number;
  rfr_schedule_kind kind;
  int n;
  struct {
    char name[96];
    rfr_dtype dtype;
    int64_t bytes;
    char *data;
  } tensor[TENSORS];
  double metrics[SLOTS * COLUMNS];
} rank;

/* The inputs of a step: some targets have no loss, documents begin anywhere. */
static void fill(rfr_programs *p, int64_t step) {
  rfr_tensor x;
  uint64_t random = 17 + 1000 * (uint64_t)step;
  const int64_t at = step % SLOTS * MICROBATCHES;
  static const char *const names[] = {RFI_NAME_TOKENS, RFI_NAME_TARGETS};
  for (int k = 0; k < 2; k++) {
    OK(rfr_programs_tensor(p, names[k], &x));
    for (int64_t i = at * T; i < (at + MICROBATCHES) * T; i++) {
      const int32_t id = (int32_t)rft_below(&random, 61);
      ((int32_t *)x.data)[i] = k == 1 && rft_below(&random, 16) == 3 ? RFI_IGNORE : id;
    }
  }
  OK(rfr_programs_tensor(p, RFI_NAME_OFFSETS, &x));
  for (int64_t m = at; m < at + MICROBATCHES; m++)
    for (int64_t i = 0; i <= T; i++)
      ((int32_t *)x.data)[m * (T + 1) + i] = i == 0 ? 0 : i == 1 ? 7 + (int32_t)(m % 5) : T;
}

static void init(rfr_programs *p, const rfi_step_spec *spec) {
  rfr_tensor x;
  for (int i = 0; i < rfr_model_parameter_count(&spec->model); i++) {
    rfr_parameter w;
    char master[128];
    OK(rfr_model_parameter(&spec->model, i, &w));
    if (rfr_programs_tensor(p, w.name, &x) != RFR_OK) continue;
    w.std *= 4;
    OK(rfr_parameter_fill(&w, 3, spec->model.dtype, 1, x.data));
    snprintf(master, sizeof master, "%s" RFI_SUFFIX_MASTER, w.name);
    if (rfr_programs_tensor(p, master, &x) == RFR_OK) OK(rfr_parameter_fill(&w, 3, RFR_F32, 1, x.data));
  }
  OK(rfr_programs_tensor(p, "step", &x));
  ((int64_t *)x.data)[2] = 77;
  if (rfr_programs_tensor(p, RFR_RECIPE_SCALE, &x) != RFR_OK) return;
  for (int64_t i = 0; i < rfi_count(&x.type); i++) ((float *)x.data)[i] = 1;
}

static void keep(rank *r, rfr_programs *p) {
  rfr_tensor x;
  r->n = 0;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    /* the rows of a pipeline also have the count of stop requests */
    for (int row = 0; strcmp(x.name, RFI_NAME_METRICS) == 0 && row < SLOTS; row++)
      memcpy(r->metrics + row * COLUMNS, (double *)x.data + row * x.type.shape[1], COLUMNS * sizeof *r->metrics);
    if (x.role == RFR_ROLE_INPUT || strcmp(x.name, RFI_NAME_METRICS) == 0 || strcmp(x.name, RFI_NAME_ZERO_STEPS) == 0)
      continue;
    snprintf(r->tensor[r->n].name, sizeof r->tensor->name, "%s", x.name);
    r->tensor[r->n].bytes = x.bytes;
    r->tensor[r->n].dtype = x.type.dtype;
    r->tensor[r->n].data = malloc((size_t)x.bytes);
    memcpy(r->tensor[r->n++].data, x.data, (size_t)x.bytes);
  }
}

static rfr_status train(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  const rfi_step_spec spec = spec_of(r->setting, r->ranks, number, r->kind, r->rules);
  rfr_trace *t = NULL;
  rfr_programs *p = NULL;
  rfi_stages *pipeline = NULL;
  rfr_compile_options o = rfr_compile_options_default();
  const rfi_stages_options how = {.comm = comm, .fuse = r->setting->fuse, .recompute = r->setting->recompute};
  o.comm = comm;
  o.fuse = r->setting->fuse;
  rfr_status s = rfi_trace_train(own, &spec, &t);
  if (s == RFR_OK) s = rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  if (s == RFR_OK) init(p, &spec);
  if (s == RFR_OK && comm) s = rfi_stages_create(own, &spec, p, &how, &pipeline);
  for (int64_t step = 0; s == RFR_OK && step < STEPS; step++) {
    rfr_tensor x[3];
    fill(p, step);
    OK(rfr_programs_tensor(p, RFI_NAME_TOKENS, &x[0]));
    OK(rfr_programs_tensor(p, RFI_NAME_TARGETS, &x[1]));
    OK(rfr_programs_tensor(p, RFI_NAME_OFFSETS, &x[2]));
    const int64_t at = step % SLOTS * MICROBATCHES;
    const rfi_stages_batch batch = {(int32_t *)x[0].data + at * T, (int32_t *)x[1].data + at * T,
                                    (int32_t *)x[2].data + at * (T + 1)};
    if (comm) s = rfi_stages_step(pipeline, &batch);
    if (s == RFR_OK) s = rfr_program_run(p, 0);
  }
  if (s == RFR_OK) keep(r, p);
  rfi_stages_destroy(pipeline);
  rfr_programs_destroy(p);
  return s;
}

/* The largest difference of two tensors, relative to the largest element. */
static double difference(rfr_dtype dtype, const char *a, const char *b, int64_t bytes) {
  double most = 0, large = 1e-30;
  const int64_t each = rfr_dtype_bits(dtype) / 8;
  for (int64_t i = 0; i < bytes / each; i++) {
    uint32_t x = 0, y = 0;
    memcpy(&x, a + i * each, (size_t)each), memcpy(&y, b + i * each, (size_t)each);
    const double p = rfr_float_from_bits(dtype, x), q = rfr_float_from_bits(dtype, y);
    most = fmax(most, fabs(p - q)), large = fmax(large, fabs(q));
  }
  return most / large;
}

static int compare(const rank *one, const rank *many, double tolerance) {
  int n = 0;
  for (int i = 0; i < many->n; i++) {
    int k = 0;
    while (k < one->n && strcmp(one->tensor[k].name, many->tensor[i].name) != 0) k++;
    if (k == one->n) fail_msg("one rank has no %s", many->tensor[i].name);
    assert_int_equal(one->tensor[k].bytes, many->tensor[i].bytes);
    n++;
    if (memcmp(one->tensor[k].data, many->tensor[i].data, (size_t)one->tensor[k].bytes) == 0) continue;
    if (tolerance == 0 || !rfr_dtype_is_float(one->tensor[k].dtype))
      fail_msg("rank %d of %d: %s differs", many->number, many->ranks, one->tensor[k].name);
    const double d = difference(one->tensor[k].dtype, one->tensor[k].data, many->tensor[i].data, one->tensor[k].bytes);
    if (d > tolerance) fail_msg("rank %d of %d: %s differs by %g", many->number, many->ranks, one->tensor[k].name, d);
  }
  for (int i = 0; i < SLOTS * COLUMNS; i++)
    if (fabs(one->metrics[i] - many->metrics[i]) > tolerance * fabs(one->metrics[i]))
      fail_msg("rank %d of %d: metric %d is %.17g, not %.17g", many->number, many->ranks, i % COLUMNS, many->metrics[i],
               one->metrics[i]);
  return n;
}

static void drop(rank *r) {
  for (int i = 0; i < r->n; i++) free(r->tensor[i].data);
  r->n = 0;
}

static const rfr_schedule_kind kinds[] = {RFR_SCHEDULE_GPIPE, RFR_SCHEDULE_1F1B, RFR_SCHEDULE_INTERLEAVED,
                                          RFR_SCHEDULE_ZB_H1, RFR_SCHEDULE_ZB_V};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void check(const setting *s, double tolerance) {
  static rank one, many[MOST_RANKS];
  static int checked;
  checked++;
  one = (rank){.setting = s, .ranks = 1};
  rft_run_ranks(1, &one, sizeof one, train);
  for (int ranks = 2; ranks <= MOST_RANKS; ranks += 2)
    for (int k = 0; k < KINDS; k++) {
      int n = 0;
      if (RFT_LEFT_OUT(k + ranks / 2 + checked, 3)) continue;
      for (int i = 0; i < ranks; i++) many[i] = (rank){.setting = s, .ranks = ranks, .number = i, .kind = kinds[k]};
      rft_run_ranks(ranks, many, sizeof *many, train);
      for (int i = 0; i < ranks; i++) n += compare(&one, &many[i], tolerance);
      assert_true(n >= one.n); /* more, because every rank has the step block */
      for (int i = 0; i < ranks; i++) drop(&many[i]);
    }
  drop(&one);
}

static void test_schedules(void **state) {
  (void)state;
  check(&(setting){.type = RFR_MODEL_LLAMA, .dropout = 0.1}, 0);
}

static void test_models(void **state) {
  (void)state;
  check(&(setting){.type = RFR_MODEL_GPT2, .recompute = RFR_RECOMPUTE_ALL}, 0);
  check(&(setting){.type = RFR_MODEL_LLAMA, .bf16 = true}, 0);
  check(&(setting){.type = RFR_MODEL_LLAMA, .frozen_first = true}, 0);
}

/* On every rank, the history and the scales of fp8_delayed equal those of one rank. */
static void test_delayed(void **state) {
  (void)state;
  T = 16; /* rows of a quantized GEMM are a multiple of 16 */
  check(&(setting){.type = RFR_MODEL_LLAMA, .recipe = RFR_RECIPE_FP8_DELAYED}, 0);
  T = 24;
}

/* A fused loss head and a tied embedding sum in another order. */
static void test_other_order(void **state) {
  (void)state;
  check(&(setting){.type = RFR_MODEL_LLAMA, .dropout = 0.1, .fuse = true, .sgd = true}, 1e-6);
  check(&(setting){.type = RFR_MODEL_GPT2, .tied = true, .sgd = true}, 1e-6);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_schedules), rft_context_test(test_models),
                                     rft_context_test(test_delayed), rft_context_test(test_other_order)};
  return cmocka_run_group_tests_name("stages", tests, NULL, NULL);
}
