/* SPDX-License-Identifier: Apache-2.0
 *
 * From a configuration to the spec of a step. Patterns: the experts of a layer have two kinds of names; a pattern that
 * matches nothing, or a part of a parameter, is refused with the nearest name. Factors of the router's losses: those of
 * the folder unless the configuration has them. The warmup is shorter than the run.
 */
#include <stdio.h>
#include <string.h>

#include "support/context.h"
#include "train/settings.h"

#define MIXTRAL_RUN                                                                                    \
  "refrain: 1\nmodel: {model_type: mixtral, hidden_size: 24, intermediate_size: 20, num_experts: 4,\n" \
  "        num_hidden_layers: 2, num_attention_heads: 4}\n"                                            \
  "data: {train: [x], tokenizer: bytes, sequence: 16}\nbatch: {tokens: 64, microbatch: 2}\n"           \
  "optimizer: {name: adamw, lr: 1e-3}\nrun: {steps: 1}\n"

static rfr_status read(const char *override, rfi_settings **s) {
  rfr_run_options o = rfr_run_options_default();
  o.overrides = &override, o.n_overrides = 1;
  return rfi_settings_read(ctx, MIXTRAL_RUN, &o, false, s);
}

/* A pattern must match the same parameters as `own`, which matches our parameter names. */
static void matched(void **state) {
  (void)state;
  static const struct {
    const char *pattern, *own;
    int n;
  } cases[] = {
      {"*.1.mlp.experts.*", "*.1.mlp.experts.*", 2},
      {"*block_sparse_moe*", "*.mlp.*", 6},
      {"*block_sparse_moe.experts.*", "*.experts.*", 4},
      {"*block_sparse_moe.gate.weight", "*.mlp.gate.weight", 2},
      {"model.layers.1.block_sparse_moe.experts.?.w2.weight", "*.1.mlp.experts.down_proj", 1},
      {"*norm*", "*norm*", 5},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char override[200];
    rfi_settings *s;
    rfr_parameter p;
    int n = 0;
    snprintf(override, sizeof override, "optimizer.frozen=[\"%s\"]", cases[i].pattern);
    OK(read(override, &s));
    for (int k = 0; rfr_model_parameter(&s->spec.model, k, &p) == RFR_OK; k++) {
      const int frozen = s->spec.rules[k].frozen;
      if (frozen != rfr_name_matches(cases[i].own, p.name)) fail_msg("%s: %s", cases[i].pattern, p.name);
      n += frozen;
    }
    assert_int_equal(n, cases[i].n);
    rfi_settings_destroy(s);
    snprintf(override, sizeof override,
             "optimizer.groups=[{match: \"%s\", lr_scale: 0.5, weight_decay: 0.25}, {match: \"*\"}]", cases[i].pattern);
    OK(read(override, &s));
    for (int k = 0; rfr_model_parameter(&s->spec.model, k, &p) == RFR_OK; k++) {
      const bool first = rfr_name_matches(cases[i].own, p.name);
      assert_true(s->spec.rules[k].lr_scale == (first ? 0.5 : 1.0));
      assert_true(s->spec.rules[k].weight_decay == (first ? 0.25 : s->config->optimizer_weight_decay));
    }
    rfi_settings_destroy(s);
  }
}

static void refused(void **state) {
  (void)state;
  static const char *const cases[][2] = {
      {"optimizer.frozen=[\"*norm*\", \"lm_haed.*\"]",
       "optimizer.frozen: no parameter matches \"lm_haed.*\"; the nearest is lm_head.weight"},
      {"optimizer.frozen=[\"*q_porj*\"]", "the nearest is model.layers.0.self_attn.q_proj.weight"},
      {"optimizer.frozen=[\"*block_sparse_mo.experts.*.w2.*\"]",
       "the nearest is model.layers.0.block_sparse_moe.experts.0.w2.weight"},
      {"optimizer.frozen=[\"*.experts.3.*\"]",
       "model.layers.0.block_sparse_moe.experts.3.w1.weight is a part of model.layers.0.mlp.experts.gate_up_proj, "
       "which is trained as one parameter"},
      {"optimizer.frozen=[\"*.w1.*\"]", "is a part of model.layers.0.mlp.experts.gate_up_proj"},
      {"optimizer.groups=[{match: \"*\"}, {match: \"*.bias\", weight_decay: 0}]",
       "optimizer.groups: no parameter matches \"*.bias\"; the nearest is "},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfi_settings *s;
    assert_int_equal(read(cases[i][0], &s), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "config.value");
    if (!strstr(rfr_last_error()->message, cases[i][1])) fail_msg("%s", rfr_last_error()->message);
  }
}

/* The folder has a factor of 0.001 but does not use it: output_router_logits is false. */
static void losses(void **state) {
  (void)state;
  static const struct {
    const char *model, *override;
    double balance, z;
    const char *wrong;
  } cases[] = {
      {"mixtral", "run.seed=1", 0, 0, NULL},
      {"mixtral", "optimizer.router_aux_loss_coef=0.02", 0.02, 0, NULL},
      {"mixtral", "optimizer.router_z_loss_coef=0.5", 0, 0.5, NULL},
      {"llama", "run.seed=1", 0, 0, NULL},
      {"llama", "optimizer.router_z_loss_coef=0.5", 0, 0, "need a model with experts"},
      {NULL, "run.seed=1", 0.01, 0, NULL},
      {NULL, "optimizer.router_aux_loss_coef=0", 0, 0, NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char model[300];
    const char *const overrides[] = {cases[i].override, model};
    rfi_settings *s;
    rfi_string text = {.ctx = ctx};
    rfr_run_options o = rfr_run_options_default();
    snprintf(model, sizeof model, "model=%s%s", RFT_SOURCE_DIR "/tests/models/", cases[i].model ? cases[i].model : "");
    o.overrides = overrides, o.n_overrides = 1 + (cases[i].model != NULL);
    const rfr_status status = rfi_settings_read(ctx, MIXTRAL_RUN, &o, false, &s);
    if (cases[i].wrong) {
      assert_int_equal(status, RFR_INVALID);
      assert_non_null(strstr(rfr_last_error()->message, cases[i].wrong));
      continue;
    }
    OK(status);
    assert_true(s->spec.model.balance_loss == cases[i].balance && s->spec.model.z_loss == cases[i].z);
    /* the printed configuration has the effective values and reads back equal */
    OK(rfi_settings_print(s, false, &text));
    assert_true((s->spec.model.experts > 0) == (strstr(text.data, "router_z_loss_coef: ") != NULL));
    rfi_settings_destroy(s);
    o.overrides = NULL, o.n_overrides = 0;
    OK(rfi_settings_read(ctx, text.data, &o, false, &s));
    assert_true(s->spec.model.balance_loss == cases[i].balance && s->spec.model.z_loss == cases[i].z);
    rfi_settings_destroy(s);
    rfi_string_deinit(&text);
  }
}

/* A warmup over all steps leaves no steps for the decay; a constant schedule needs none. */
static void warmup(void **state) {
  (void)state;
  rfi_settings *s;
  OK(read("schedule={name: constant, warmup: 1}", &s));
  rfi_settings_destroy(s);
  OK(read("schedule={name: cosine, warmup: 40%}", &s));
  rfi_settings_destroy(s);
  assert_int_equal(read("schedule={name: cosine, warmup: 1}", &s), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "config.value");
  assert_non_null(strstr(rfr_last_error()->message, "schedule.warmup: 1 "));
}

/* precision.* sets the recipe; keys without effect are refused. */
static void recipes(void **state) {
  (void)state;
  static const char *const wrong[][2] = {
      {"precision={history: 4}", "precision.history: it applies only with fp8_delayed"},
      {"precision={recipe: fp8_current, margin: 1}", "precision.margin: it applies only with fp8_delayed"},
      {"precision={recipe: mxfp8, history_rule: max}", "precision.history_rule: it applies only with fp8_delayed"},
      {"precision={recipe: nvfp4, format: e4m3}", "precision.format: it applies only with an FP8 recipe"},
      {"precision={backward: high}", "precision.backward: it applies only with a recipe"},
      {"precision={keep: []}", "precision.keep: it applies only with a recipe"},
      {"precision={recipe: fp9}", "precision.recipe: \"fp9\""},
      {"precision={recipe: fp8_block, keep: [\"*.q_porj*\"]}", "precision.keep: no parameter matches"},
      {"precision={recipe: fp8_block, keep: [\"*\"]}", "precision.keep: every linear layer is kept"},
      {"precision={recipe: fp8_block}", "precision.keep: every linear layer is kept"}, /* the model has two layers */
  };
  static const struct {
    const char *set;
    rfr_recipe r;
  } right[] = {
      {"precision={recipe: none}", {.kind = RFR_RECIPE_NONE}},
      {"precision={recipe: fp8_delayed, margin: 2, history: 16, history_rule: most_recent, format: e4m3, keep: []}",
       {.kind = RFR_RECIPE_FP8_DELAYED, .margin = 2, .history = 16, .rule = RFR_AMAX_MOST_RECENT}},
      {"precision={recipe: fp8_delayed, keep: []}",
       {.kind = RFR_RECIPE_FP8_DELAYED, .history = 1024, .format = RFR_RECIPE_FORMAT_HYBRID}},
      {"precision={recipe: fp8_block, backward: high, keep: [\"*.o_proj.weight\", \"*.1.self_attn.q*\"]}",
       {.kind = RFR_RECIPE_FP8_BLOCK, .powers_of_two = 1, .high_backward = 1, .n_keep = 3}},
      {"precision={recipe: nvfp4, keep: []}", {.kind = RFR_RECIPE_NVFP4}},
  };
  rfi_settings *s;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    if (read(wrong[i][0], &s) != RFR_INVALID) fail_msg("accepted: %s", wrong[i][0]);
    if (!strstr(rfr_last_error()->message, wrong[i][1])) fail_msg("%s: %s", wrong[i][0], rfr_last_error()->message);
  }
  for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
    OK(read(right[i].set, &s));
    const rfr_recipe *a = &s->spec.recipe, *b = &right[i].r;
    if (a->kind != b->kind || a->format != b->format || a->margin != b->margin || a->history != b->history ||
        a->rule != b->rule || a->powers_of_two != b->powers_of_two || a->high_backward != b->high_backward ||
        a->n_keep != b->n_keep)
      fail_msg("%s", right[i].set);
    rfi_settings_destroy(s);
  }
}

/* With a microbatch of 16 tokens the recipe quantizes no GEMM, so it is refused. */
static void recipe_tokens(void **state) {
  (void)state;
  static const char dense[] =
      "refrain: 1\nmodel: {model_type: llama, hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 4}\n"
      "data: {train: [x], tokenizer: bytes, sequence: 16}\nbatch: {tokens: 64, microbatch: 1}\n"
      "optimizer: {name: adamw, lr: 1e-3}\nrun: {steps: 1}\n";
  static const struct {
    const char *recipe, *batch;
    bool accepted;
  } cases[] = {{"precision.recipe=fp8_block", "batch.microbatch=1", true},
               {"precision.recipe=mxfp8", "batch.microbatch=1", false},
               {"precision.recipe=mxfp8", "batch.microbatch=2", true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *const sets[] = {cases[i].recipe, cases[i].batch};
    rfi_settings *s;
    rfr_run_options o = rfr_run_options_default();
    o.overrides = sets, o.n_overrides = 2;
    const rfr_status status = rfi_settings_read(ctx, dense, &o, false, &s);
    if (status != (cases[i].accepted ? RFR_OK : RFR_INVALID)) fail_msg("%s, %s", cases[i].recipe, cases[i].batch);
    if (status == RFR_OK) rfi_settings_destroy(s);
    else assert_non_null(strstr(rfr_last_error()->message, "would have no effect"));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(matched), rft_context_test(refused),
                                     rft_context_test(losses),  rft_context_test(warmup),
                                     rft_context_test(recipes), rft_context_test(recipe_tokens)};
  return cmocka_run_group_tests_name("settings", tests, NULL, NULL);
}
