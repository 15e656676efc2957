/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs with a low-precision recipe: replayed, eager, recomputed and resumed runs are bitwise equal, the losses stay
 * close to those without a recipe, and the states of fp8_delayed count trained steps alone.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/run.h"
#include "support/thin.h"
#include "trace/trace.h"

#define DENSE                                                                                  \
  "model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3,\n" \
  "        num_attention_heads: 4, num_key_value_heads: 4}\n"
#define SPARSE                                                                                                   \
  "model: {model_type: mixtral, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 3, num_experts: 4,\n" \
  "        num_attention_heads: 4}\n"
#define BEGIN "refrain: 1\n"
enum { TEXT = 1200 };

static const char *const recipes[] = {"fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"};
enum { RECIPES = sizeof recipes / sizeof *recipes };

static const char *config_of(char *to, const char *model, const char *precision, int steps) {
  snprintf(to, TEXT, BEGIN "%s%sprecision: {%s}\nrun: {steps: %d, seed: 3, log_every: 1, evaluate_windows: 0}\n", model,
           DATA TWO_BATCHES ADAM, precision, steps);
  return to;
}

static const char *precision_of(char *to, const char *dtype, const char *recipe, const char *more) {
  snprintf(to, 200, "dtype: %s, recipe: %s%s", dtype, recipe, more);
  return to;
}

static rfr_run *train(rfr_ctx *ctx, const char *config, const char *name, bool eager, int steps, rft_record *r) {
  *r = (rft_record){0};
  rfr_run_options o = rft_run_options(r);
  o.eager = eager;
  rfr_run *run = rft_run_open(ctx, config, name, &o);
  rft_run_steps(run, steps);
  return run;
}

/* Replayed, eager, recomputed, and resumed from a checkpoint. */
static void same_bits(const char *model, const char *precision, const char *name) {
  enum { STEPS = 12 };
  rfr_ctx *ctx = rft_run_ctx(2);
  char config[TEXT], recomputed[TEXT];
  rft_record replayed, other;
  config_of(config, model, precision, STEPS);
  rfr_run *a = train(ctx, config, NULL, false, STEPS, &replayed);
  assert_int_equal(replayed.skipped, 0);
  rfr_run *b = train(ctx, config, NULL, true, STEPS, &other);
  rft_assert_same_losses(&replayed, &other);
  rft_assert_same_state(a, b);
  rfr_run_close(b);

  snprintf(recomputed, sizeof recomputed, "%smemory: {recompute: all}\n", config);
  b = train(ctx, recomputed, NULL, false, STEPS, &other);
  rft_assert_same_losses(&replayed, &other);
  rft_assert_same_state(a, b);
  rfr_run_close(b);

  rfr_run_options o = rft_run_options(&other);
  b = rft_run_open(ctx, config, name, &o);
  rft_run_steps(b, 5);
  assert_int_equal(rfr_run_save(b), RFR_OK);
  rft_run_steps(b, 2); /* lost: not in the checkpoint */
  rfr_run_close(b);
  o.resume = o.strict = 1;
  b = rft_run_open(ctx, config, name, &o);
  rft_run_steps(b, STEPS - 5);
  rft_assert_same_losses(&replayed, &other);
  rft_assert_same_state(a, b);
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

static void bits(void **state) {
  (void)state;
  char precision[200], name[64];
  for (int i = 0; i < RECIPES; i++)
    for (int sparse = 0; sparse < 2; sparse++) {
      if (RFT_LEFT_OUT(i + sparse, 2)) continue;
      snprintf(name, sizeof name, "%s-%d", recipes[i], sparse);
      same_bits(sparse ? SPARSE : DENSE, precision_of(precision, sparse ? "bf16" : "f32", recipes[i], ", keep: []"),
                name);
    }
}

static void bits_options(void **state) {
  (void)state;
  same_bits(DENSE, "dtype: bf16, recipe: fp8_delayed, history: 3, history_rule: most_recent, margin: 1, format: e4m3",
            "options");
  same_bits(DENSE, "dtype: bf16, recipe: fp8_current, backward: high, keep: [first-and-last, \"*.o_proj.weight\"]",
            "high");
}

/* Mean loss of the last steps. */
static double last_losses(const rft_record *r, int steps) {
  double sum = 0;
  for (int i = steps - 9; i <= steps; i++) sum += r->loss[i];
  return sum / 10;
}

/* Compares with the same run in f32. The bounds are those of docs/recipes.md. */
static void losses(void **state) {
  (void)state;
  static const double bound[RECIPES] = {0.03, 0.02, 0.02, 0.02, 0.06};
  rfr_ctx *ctx = rft_run_ctx(1);
  char config[TEXT], precision[200];
  rft_record wide, narrow;
  for (int sparse = 0; sparse < 2; sparse++) {
    const char *model = sparse ? SPARSE : DENSE;
    rfr_run_close(train(ctx, config_of(config, model, "dtype: f32", RFT_STEPS), NULL, false, RFT_STEPS, &wide));
    for (int i = 0; i < RECIPES; i++) {
      if (RFT_LEFT_OUT(i + sparse, RECIPES)) continue;
      precision_of(precision, "f32", recipes[i], ", keep: []");
      rfr_run_close(train(ctx, config_of(config, model, precision, RFT_STEPS), NULL, false, RFT_STEPS, &narrow));
      const double a = last_losses(&wide, RFT_STEPS), b = last_losses(&narrow, RFT_STEPS);
      if (!(fabs(b / a - 1) <= bound[i]))
        fail_msg("%s: loss %g, in f32 %g: %+.2f %%", precision, b, a, 100 * (b / a - 1));
      assert_true(narrow.loss[RFT_STEPS] != wide.loss[RFT_STEPS]); /* the recipe was applied */
      assert_true(b < 0.9 * narrow.loss[1]);
    }
  }
  rfr_ctx_destroy(ctx);
}

static const float *state_of(rfr_run *run, const char *name, int64_t *n) {
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), name, &x), RFR_OK);
  *n = rfi_count(&x.type);
  return x.data;
}

/* The number of history rows with an amax: the number of trained steps. */
static int history_rows(rfr_run *run, int slots) {
  int64_t n;
  const float *history = state_of(run, RFR_RECIPE_HISTORY, &n);
  int rows = 0;
  for (int64_t h = 0; h < n / slots; h++) {
    bool any = false;
    for (int s = 0; s < slots; s++) any = any || history[h * slots + s] != 0;
    rows += any;
  }
  return rows;
}

/* One layer with seven linears is quantized. Evaluation does not change the states; a step adds a row to the
 * history. */
static void delayed_states(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  char config[TEXT];
  rft_record r;
  rfr_evaluation e;
  int64_t n, slots;
  config_of(config, DENSE, "dtype: f32, recipe: fp8_delayed, history: 6", 20);
  rfr_run *run = train(ctx, config, NULL, false, 0, &r);
  const float *scale = state_of(run, RFR_RECIPE_SCALE, &slots);
  assert_int_equal(slots % 3, 0);
  for (int64_t i = 0; i < slots; i++) assert_true(scale[i] == 1);
  for (int step = 1; step <= 8; step++) {
    rft_run_steps(run, 1);
    assert_int_equal(history_rows(run, (int)slots), step < 6 ? step : 6);
    float *before = malloc(sizeof *before * (size_t)slots);
    assert_non_null(before);
    memcpy(before, state_of(run, RFR_RECIPE_SCALE, &n), sizeof *before * (size_t)slots);
    assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
    assert_memory_equal(before, state_of(run, RFR_RECIPE_SCALE, &n), sizeof *before * (size_t)slots);
    assert_int_equal(history_rows(run, (int)slots), step < 6 ? step : 6);
    free(before);
  }
  /* the scale of a slot is the maximum of its format divided by the largest amax */
  const float *history = state_of(run, RFR_RECIPE_HISTORY, &n);
  int used = 0;
  scale = state_of(run, RFR_RECIPE_SCALE, &slots);
  for (int64_t s = 0; s < slots; s++) {
    float amax = 0;
    for (int64_t h = 0; h < n / slots; h++) amax = fmaxf(amax, history[h * slots + s]);
    if (amax > 0) assert_true(scale[s] == (s % 3 == 2 ? 57344.0f : 448.0f) / amax);
    else assert_true(scale[s] == 1);
    used += amax > 0;
  }
  assert_int_equal(used, 7 + 7 + 4); /* w and dy of seven linears; q, k and v share x, and so do gate and up */
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* A step with a NaN is skipped and does not change the states. */
static void skipped_step(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  char config[TEXT];
  rft_record r;
  rfr_tensor w, states[2];
  void *before[2];
  config_of(config, DENSE, "dtype: f32, recipe: fp8_delayed, history: 6", 20);
  rfr_run *run = train(ctx, config, NULL, false, 3, &r);
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), "model.norm.weight", &w), RFR_OK);
  const char *const names[2] = {RFR_RECIPE_HISTORY, RFR_RECIPE_SCALE};
  for (int i = 0; i < 2; i++) {
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), names[i], &states[i]), RFR_OK);
    assert_non_null(before[i] = malloc((size_t)states[i].bytes));
    memcpy(before[i], states[i].data, (size_t)states[i].bytes);
  }
  const float was = *(float *)w.data;
  *(float *)w.data = NAN;
  rft_run_steps(run, 1);
  assert_int_equal(r.skipped, 1);
  for (int i = 0; i < 2; i++) assert_memory_equal(before[i], states[i].data, (size_t)states[i].bytes);
  *(float *)w.data = was;
  rft_run_steps(run, 1);
  assert_int_equal(r.skipped, 1);
  for (int i = 0; i < 2; i++) {
    assert_memory_not_equal(before[i], states[i].data, (size_t)states[i].bytes);
    free(before[i]);
  }
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* 200 steps of a tiny Llama and a tiny MoE. */
static void trains(void **state) {
  (void)state;
  enum { STEPS = 200 };
  rfr_ctx *ctx = rft_run_ctx(1);
  char config[TEXT];
  rft_record r;
  for (int sparse = 0; sparse < 2; sparse++) /* fp8_delayed, which has states, and the recipe with the fewest bits */
    for (int i = 0; i < RECIPES; i += RECIPES - 1) {
      if (RFT_LEFT_OUT(i + sparse, 2)) continue;
      char precision[200];
      config_of(config, sparse ? SPARSE : DENSE, precision_of(precision, "bf16", recipes[i], ""), STEPS);
      r = (rft_record){0};
      rfr_run_options o = rft_run_options(&r);
      rfr_run *run = rft_run_open(ctx, config, NULL, &o);
      rft_run_steps(run, RFT_STEPS);
      const double early = r.loss[1];
      for (int k = RFT_STEPS; k < STEPS; k += RFT_STEPS) rft_run_steps(run, RFT_STEPS);
      if (!(r.last_loss < 0.6 * early)) fail_msg("%s: loss %g, at first %g", precision, r.last_loss, early);
      assert_int_equal(r.skipped, 0);
      rfr_run_close(run);
    }
  rfr_ctx_destroy(ctx);
}

/* Widths that are not multiples of a tile: a recipe that would quantize nothing is refused, one that quantizes less is
 * a warning. */
static void unfit(void **state) {
  (void)state;
  static const char none[] =
      "model: {model_type: llama, hidden_size: 40, intermediate_size: 88, num_hidden_layers: 1,\n"
      "        num_attention_heads: 4}\n",
                    some[] =
                        "model: {model_type: llama, hidden_size: 32, intermediate_size: 88, num_hidden_layers: 1,\n"
                        "        num_attention_heads: 4}\n",
                    precision[] = "dtype: f32, recipe: fp8_current, keep: []";
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run *run;
  char config[TEXT];
  rfr_run_options o = rft_run_options(&r);
  o.config_folder = rft_run_root;
  assert_int_equal(rfr_run_open(ctx, config_of(config, none, precision, 3), NULL, &o, &run), RFR_UNSUPPORTED);
  assert_non_null(strstr(rfr_last_error()->message, "it quantizes none of the 42 GEMMs"));
  assert_non_null(strstr(rfr_last_error()->message, "64 x 40 x 40 are not multiples of 16"));
  rfr_run_close(train(ctx, config_of(config, some, precision, 3), NULL, false, 0, &r));
  assert_int_equal(r.warnings, 1);
  assert_non_null(strstr(r.warning, "18 of 42 GEMMs of linear layers are not quantized"));
  rfr_run_close(train(ctx, config_of(config, DENSE, precision, 3), NULL, false, 0, &r));
  assert_int_equal(r.warnings, 0);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(bits),         cmocka_unit_test(bits_options),
                                     cmocka_unit_test(losses),       cmocka_unit_test(delayed_states),
                                     cmocka_unit_test(skipped_step), cmocka_unit_test(trains),
                                     cmocka_unit_test(unfit)};
  return cmocka_run_group_tests_name("run_recipe", tests, rft_run_setup, rft_run_teardown);
}
