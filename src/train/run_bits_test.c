/* SPDX-License-Identifier: Apache-2.0
 *
 * Reproducibility of training: eager, captured, recomputed and resumed runs are bitwise equal; microbatches are
 * equivalent to one batch; a checkpoint is a folder to start from; experts, frozen weights, the loss scale.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/op_index.h"
#include "support/run.h"
#include "trace/trace.h"

static void same_bits(const char *config, const char *name) {
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record replayed = {0}, eager = {0}, resumed = {0};
  rfr_run_options o = rft_run_options(&replayed);
  rfr_run *a = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(a, RFT_STEPS);
  assert_int_equal(replayed.skipped, 0);
  assert_true(replayed.loss[RFT_STEPS] < 0.8 * replayed.loss[1]);

  o = rft_run_options(&eager);
  o.eager = 1;
  rfr_run *b = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(b, RFT_STEPS);
  rft_assert_same_losses(&replayed, &eager);
  rft_assert_same_state(a, b);
  rfr_run_close(b);

  o = rft_run_options(&resumed);
  rfr_run *c = rft_run_open(ctx, config, name, &o);
  rft_run_steps(c, 20);
  assert_int_equal(rfr_run_save(c), RFR_OK);
  rft_run_steps(c, 3); /* lost: not in the checkpoint */
  rfr_run_close(c);
  o.resume = o.strict = 1;
  c = rft_run_open(ctx, config, name, &o);
  rfr_run_info info;
  rfr_run_get_info(c, &info);
  assert_int_equal(info.step, 20);
  rft_run_steps(c, 30);
  rft_assert_same_losses(&replayed, &resumed);
  rft_assert_same_state(a, c);
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
  same_bits("refrain: 1\n" EXPERTS SINGLE DATA TWO_BATCHES BALANCED RUN, "experts");
}

static void bits_mixtral_bf16_dropout(void **state) {
  (void)state;
  same_bits("refrain: 1\n" MIXTRAL DATA TWO_BATCHES ADAM RUN, "mixtral");
}

static void bits_experts_f16(void **state) {
  (void)state;
  same_bits("refrain: 1\n" EXPERTS HALF DATA TWO_BATCHES BALANCED RUN, "half-experts");
}

static void bits_narrow_gradients(void **state) {
  (void)state;
  same_bits("refrain: 1\n" MIXTRAL DATA TWO_BATCHES NARROW RUN, "narrow");
}

/* A GPT-2 whose configuration has one more value. */
static rfr_run *open_with(rfr_ctx *ctx, const char *set, rft_record *r) {
  rfr_run_options o = rft_run_options(r);
  o.overrides = &set;
  o.n_overrides = 1;
  return rft_run_open(ctx, "refrain: 1\n" GPT2 DATA TWO_BATCHES ADAM RUN, NULL, &o);
}

/* 16-bit gradients, rounded after each microbatch, train like f32 gradients up to bf16's precision. */
static void narrow_gradients(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r[2] = {{{0}}};
  for (int i = 0; i < 2; i++) {
    const char *set = i ? "optimizer.gradient_dtype=model" : "optimizer.gradient_dtype=f32";
    int products = 0;
    rfr_run *run = open_with(ctx, set, &r[i]);
    const rfr_trace *t = rfr_program_trace(rfr_run_programs(run), 0, "lower");
    assert_non_null(t);
    for (int k = 0; k < t->n_ops; k++) {
      if (t->ops[k].def->code != RFI_OP_matmul || t->ops[k].phase != RFR_PHASE_WGRAD) continue;
      assert_int_equal(t->values[t->ops[k].out[0]].type.dtype, i ? RFR_BF16 : RFR_F32);
      products++;
    }
    /* microbatches, layers, weights of a layer: each wgrad accumulates in bf16 */
    assert_int_equal(products, 2 * 2 * 4);
    rft_run_steps(run, RFT_STEPS);
    rfr_run_close(run);
  }
  assert_true(r[0].norm[1] != r[1].norm[1] && fabs(r[1].norm[1] / r[0].norm[1] - 1) < 0.01);
  assert_true(fabs(r[1].loss[RFT_STEPS] / r[0].loss[RFT_STEPS] - 1) < 0.02);
  rfr_ctx_destroy(ctx);
}

static void bits_narrow_logits(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA "precision: {dtype: bf16, logits: model}\n" DATA TWO_BATCHES ADAM RUN,
            "narrow-logits");
}

/* Training with 16-bit logits matches f32 logits within bf16's precision; evaluation uses f32 logits. */
static void narrow_logits(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r[2] = {{{0}}};
  for (int i = 0; i < 2; i++) {
    const char *set = i ? "precision.logits=model" : "precision.logits=f32";
    rfr_run *run = open_with(ctx, set, &r[i]);
    const rfr_programs *programs = rfr_run_programs(run);
    int heads = 0;
    for (int p = 0; p < 2; p++) {
      const rfr_trace *t = rfr_program_trace(programs, p, "lower");
      assert_non_null(t);
      for (int k = 0; k < t->n_ops; k++) {
        if (t->ops[k].def->code != RFI_OP_linear_cross_entropy) continue;
        const rfi_attr to = t->ops[k].attr[RFI_AT_linear_cross_entropy_to];
        assert_int_equal(to.i, i && p == 0 ? RFR_BF16 : RFR_F32);
        heads++;
      }
    }
    assert_int_equal(heads, 3); /* two microbatches and the evaluation */
    rft_run_steps(run, RFT_STEPS);
    rfr_run_close(run);
  }
  assert_true(r[0].loss[1] != r[1].loss[1] && fabs(r[1].loss[1] / r[0].loss[1] - 1) < 1e-3);
  assert_true(fabs(r[1].loss[RFT_STEPS] / r[0].loss[RFT_STEPS] - 1) < 0.02);
  rfr_ctx_destroy(ctx);
}

/* Metrics report the load of experts; the aux loss balances it; frozen experts do not change. */
static void expert_load(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  static const char *const sets[2] = {"optimizer.router_aux_loss_coef=0", "optimizer.router_aux_loss_coef=1"};
  const char *frozen[2] = {NULL, "optimizer.frozen=[\"*.0.mlp.experts.*\"]"};
  rft_record r[2] = {{{0}}};
  rfr_run_info info;
  for (int i = 0; i < 2; i++) {
    rfr_run_options o = rft_run_options(&r[i]);
    frozen[0] = sets[i];
    o.overrides = frozen;
    o.n_overrides = 2;
    rfr_run *run = rft_run_open(ctx, "refrain: 1\n" EXPERTS SINGLE DATA TWO_BATCHES BALANCED RUN, NULL, &o);
    rfr_tensor x;
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "model.layers.0.mlp.experts.down_proj", &x), RFR_OK);
    void *before = malloc((size_t)x.bytes);
    assert_non_null(before);
    memcpy(before, x.data, (size_t)x.bytes);
    rfr_run_get_info(run, &info);
    assert_true(info.experts == 5 && info.expert_rows == 128 && info.expert_bytes == 5 * 3 * 20 * 24 * 4);
    rft_run_steps(run, RFT_STEPS);
    assert_memory_equal(before, x.data, (size_t)x.bytes);
    assert_int_equal(r[i].warnings, 0);
    assert_true(r[i].most_load > 1 && r[i].most_load <= 2.5 && r[i].least_load >= 0 && r[i].least_load < 1);
    assert_true(r[i].loss[RFT_STEPS] < 0.8 * r[i].loss[1]);
    free(before);
    rfr_run_close(run);
  }
  assert_true(r[1].most_load - r[1].least_load < r[0].most_load - r[0].least_load);
  rfr_ctx_destroy(ctx);
}

/* A checkpoint is a model folder: a run that starts from it has bitwise equal weights, all `parameters` tensors. */
static void child_of(const char *model, const char *set, const char *name, int parameters, rfr_run_info *info) {
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0}, s = {0};
  char config[512];
  rfr_run_options o = rft_run_options(&r);
  o.overrides = &set;
  o.n_overrides = set != NULL;
  snprintf(config, sizeof config, "refrain: 1\n%s%s", model, DATA TWO_BATCHES ADAM RUN);
  rfr_run *a = rft_run_open(ctx, config, name, &o);
  rft_run_steps(a, 5);
  assert_int_equal(rfr_run_save(a), RFR_OK);
  snprintf(config, sizeof config, "refrain: 1\nmodel: %s/step-000005\n%s", rft_run_folder(name),
           DATA TWO_BATCHES ADAM RUN);
  o = rft_run_options(&s);
  rfr_run *b = rft_run_open(ctx, config, NULL, &o);
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
  rft_run_steps(b, 1);
  assert_true(s.loss[1] < r.loss[1]); /* the same windows, which the model has already trained on */
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

/* Both keys that choose the layers with experts, and values that are refused. */
static void layers_with_experts(void **state) {
  (void)state;
  static const struct {
    const char *model, *set;
    int64_t layers;    /* number of layers with experts, of two */
    const char *wrong; /* text of the error; NULL: accepted */
  } cases[] = {{EXPERTS, "model.decoder_sparse_step=2", 1, NULL},
               {EXPERTS, "model.mlp_only_layers=[0]", 1, NULL},
               {EXPERTS, "model.mlp_only_layers=[]", 2, NULL},
               {EXPERTS, "model.mlp_only_layers=[2]", 0, "2 is not a layer; they are 0 to 1"},
               {EXPERTS, "model.mlp_only_layers=[1x]", 0, "1x is not a layer"},
               {EXPERTS, "model.mlp_only_layers=[0, 1]", 0, "0 of 2 layers have experts"},
               {MIXTRAL, "model.mlp_only_layers=[0]", 0, "1 of 2 layers have experts"},
               {LLAMA, "model.mlp_only_layers=[0]", 0, "need a model with experts"}};
  rfr_ctx *ctx = rft_run_ctx(1);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char config[600];
    rft_record r = {0};
    rfr_run_options o = rft_run_options(&r);
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
    rft_run_steps(run, 1);
    rfr_run_close(run);
  }
  rfr_ctx_destroy(ctx);
}

static void bits_llama_f16(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA HALF DATA TWO_BATCHES ADAM RUN, "half");
}

/* With a loss scale that overflows in f16, each skipped step halves the scale until one does not overflow; then
 * training continues. Without overflow the losses equal those of f32 within f16's precision. */
static void loss_scale(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record half = {0}, single = {0};
  rfr_run_options o = rft_run_options(&single);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rft_run_steps(run, RFT_STEPS);
  rfr_run_close(run);
  o = rft_run_options(&half);
  run = rft_run_open(ctx, "refrain: 1\n" LLAMA HALF DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "loss_scale", &x), RFR_OK);
  rft_run_steps(run, RFT_STEPS);
  int32_t *scale = x.data;
  assert_true(scale[0] == 0 && scale[1] == RFT_STEPS && half.skipped == 0);
  for (int i = 1; i <= RFT_STEPS; i++) assert_true(fabs(half.loss[i] - single.loss[i]) < 5e-3 * single.loss[i]);
  for (int i = 1; i <= RFT_STEPS; i++) assert_true(fabs(half.norm[i] - single.norm[i]) < 3e-2 * single.norm[i]);
  scale[0] = 99; /* the scale becomes 2^99; the maximum is 2^24 */
  rft_run_steps(run, 12);
  assert_true(half.skipped > 0 && half.skipped < 12);
  assert_int_equal(scale[0], 8 - half.skipped);
  assert_int_equal(scale[1], 12 - half.skipped);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* Recompute needs less memory and is bitwise equal. */
static void recompute_all(const char *config) {
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record kept = {0}, again = {0};
  rfr_plan_summary more, less;
  const char *const sets[] = {"memory.recompute=all"};
  rfr_run_options o = rft_run_options(&kept);
  rfr_run *a = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(a, RFT_STEPS);
  o = rft_run_options(&again);
  o.overrides = sets;
  o.n_overrides = 1;
  rfr_run *b = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(b, RFT_STEPS);
  rft_assert_same_losses(&kept, &again);
  rft_assert_same_state(a, b);
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
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record one = {0}, four = {0};
  rfr_run_options o = rft_run_options(&one);
  rfr_run *a = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA "batch: {tokens: 128, microbatch: 8}\n" ADAM RUN, NULL, &o);
  rft_run_steps(a, 10);
  rfr_run_close(a);
  o = rft_run_options(&four);
  a = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA "batch: {tokens: 128, microbatch: 2}\n" ADAM RUN, NULL, &o);
  rft_run_steps(a, 10);
  rfr_run_close(a);
  for (int i = 1; i <= 10; i++) {
    assert_true(fabs(one.loss[i] - four.loss[i]) <= 2e-5 * one.loss[i]);
    assert_true(fabs(one.norm[i] - four.norm[i]) <= 2e-3 * one.norm[i]);
  }
  assert_true(memcmp(one.loss, four.loss, sizeof one.loss) != 0); /* the two runs really differ */
  rfr_ctx_destroy(ctx);
}

/* Frozen weights do not change and have no optimizer state; all others train. */
static void frozen(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  const char *const sets[] = {"optimizer.frozen=[\"*embed*\", \"model.layers.0.*\"]"};
  o.overrides = sets;
  o.n_overrides = 1;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA DATA TWO_BATCHES ADAM RUN, NULL, &o);
  rfr_programs *p = rfr_run_programs(run);
  rfr_tensor x;
  float before[2], after[2];
  static const char *const names[] = {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"};
  for (int i = 0; i < 2; i++) {
    assert_int_equal(rfr_programs_tensor(p, names[i], &x), RFR_OK);
    before[i] = ((float *)x.data)[7];
  }
  rft_run_steps(run, 20);
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bits_llama),
      cmocka_unit_test(bits_gpt2_bf16_dropout),
      cmocka_unit_test(bits_llama_f16),
      cmocka_unit_test(bits_experts),
      cmocka_unit_test(bits_mixtral_bf16_dropout),
      cmocka_unit_test(bits_narrow_gradients),
      cmocka_unit_test(narrow_gradients),
      cmocka_unit_test(bits_narrow_logits),
      cmocka_unit_test(narrow_logits),
      cmocka_unit_test(bits_experts_f16),
      cmocka_unit_test(expert_load),
      cmocka_unit_test(layers_with_experts),
      cmocka_unit_test(loss_scale),
      cmocka_unit_test(microbatches),
      cmocka_unit_test(recomputed),
      cmocka_unit_test(frozen),
      cmocka_unit_test(from_folder),
  };
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
