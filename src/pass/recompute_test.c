/* SPDX-License-Identifier: Apache-2.0
 *
 * Results with recompute are bitwise equal: eager and captured, by none, some and all, with dropout, in f32 and bf16.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "support/training.h"

static void test_bits(void **state) {
  (void)state;
  enum { LAYERS = 2, MICROBATCHES = 2, STEPS = 50, CAREFUL_STEPS = 5, RUNS = 7 };
  rfr_trace *t = rft_llama(LAYERS, MICROBATCHES, RFR_POLICY_AUTO);
  int64_t budget = rft_between(t, 0.5);
  rfr_programs *p[RUNS];
  for (int i = 0; i < RUNS; i++) {
    int policy = i < 6 ? i / 2 : RFR_RECOMPUTE_ALL;
    rfr_compile_options o = rfr_compile_options_default();
    o.recompute = (rfr_recompute)policy;
    o.budget = policy == RFR_RECOMPUTE_AUTO ? budget : 0;
    o.debug = i == 6; /* in debug mode every value has separate memory, and dead values are filled with NaN */
    OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p[i]));
    rft_init_llama(p[i], LAYERS, MICROBATCHES);
    if (i % 2) OK(rfr_program_capture(p[i], 0));
  }
  int none = rft_clones(p[0]), all = rft_clones(p[2]), some = rft_clones(p[4]);
  assert_int_equal(none, 0);
  assert_true(some > 0 && some < all);
  float first = 0, loss[RUNS];
  for (int k = 0; k < STEPS; k++) {
    const int runs = k < CAREFUL_STEPS ? RUNS : RUNS - 1; /* the debug mode is slow */
    for (int i = 0; i < runs; i++) {
      rfr_tensor x;
      if (i % 2) OK(rfr_program_replay(p[i], 0, NULL, 0));
      else OK(rfr_program_run(p[i], 0));
      OK(rfr_program_output(p[i], 0, "loss", &x));
      loss[i] = *(float *)x.data;
      assert_memory_equal(&loss[i], &loss[0], sizeof loss[0]);
    }
    if (k == 0) first = loss[0];
    if (k + 1 == CAREFUL_STEPS) assert_true(rft_state_hash(p[6]) == rft_state_hash(p[0]));
  }
  assert_true(loss[0] < 0.9f * first);
  for (int i = 1; i < RUNS - 1; i++) assert_true(rft_state_hash(p[i]) == rft_state_hash(p[0]));
  for (int i = 0; i < RUNS; i++) {
    OK(rfr_programs_check(p[i]));
    rfr_programs_destroy(p[i]);
  }
  rfr_trace_destroy(t);
}

/* GPT-2 in bf16: biases, packed projections that are read through views, tied embeddings, residual gradients that are
 * accumulated in place. */
static void test_bits_gpt2(void **state) {
  (void)state;
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_GPT2);
  c.vocab_size = RFT_VOCAB;
  c.hidden_size = 24;
  c.intermediate_size = 72;
  c.layers = 3;
  c.heads = c.kv_heads = 3;
  c.head_dim = 8;
  c.max_positions = RFT_TOKENS;
  c.dropout = 0.1;
  c.tie_embeddings = 1;
  c.dtype = RFR_BF16;
  rfr_trace *t = rft_training(&c, 3, RFR_POLICY_AUTO);
  rfr_programs *none = rft_recompute(t, RFR_RECOMPUTE_KEEP, 0), *all = rft_recompute(t, RFR_RECOMPUTE_ALL, 0);
  assert_true(rft_clones(all) > 20);
  assert_true(rft_plan(all).planned_bytes < rft_plan(none).planned_bytes);
  rft_init_model(none, &c, 3);
  rft_init_model(all, &c, 3);
  OK(rfr_program_capture(all, 0));
  for (int i = 0; i < 6; i++) {
    OK(rfr_program_run(none, 0));
    OK(rfr_program_replay(all, 0, NULL, 0));
  }
  assert_true(rft_state_hash(none) == rft_state_hash(all));
  rfr_programs_destroy(none);
  rfr_programs_destroy(all);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_bits),
      rft_context_test(test_bits_gpt2),
  };
  return cmocka_run_group_tests_name("recompute", tests, NULL, NULL);
}
