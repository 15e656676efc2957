/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs whose optimizer has 8-bit moments: their bytes in closed form, losses close to those of f32, bitwise equal eager
 * and resumed, with masters and with an adapter; refused with SGD.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "support/run.h"
#include "trace/trace.h"

#define WIDE                                                                                   \
  "model: {model_type: llama, hidden_size: 64, intermediate_size: 72, num_hidden_layers: 1,\n" \
  "        num_attention_heads: 4}\n"
#define BF16 "precision: {dtype: bf16}\n"
#define LORA "adapter: {type: lora, rank: 64, alpha: 64}\n"
#define F32 "optimizer: {lr: 3e-3, clip: 1.0}\n"
#define U8 "optimizer: {lr: 3e-3, clip: 1.0, state_dtype: u8}\n"

enum { STEPS = 40, LEAST = 4096, BLOCK = 256 };

/* Codes, padded to a multiple of 16 bytes, and one scale per block. */
static int64_t bytes_of(int64_t n) { return n < LEAST ? 4 * n : (n + 15) / 16 * 16 + 4 * ((n + BLOCK - 1) / BLOCK); }

static void test_bytes(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" WIDE BF16 DATA TWO_BATCHES U8 RUN, NULL, &o);
  int small = 0, large = 0;
  rfr_tensor x, w;
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++) {
    char name[128];
    const char *suffix = rfi_ends_in(x.name, ".exp_avg") ? ".exp_avg" : ".exp_avg_sq";
    if (!rfi_ends_in(x.name, suffix)) continue;
    snprintf(name, sizeof name, "%.*s", (int)(strlen(x.name) - strlen(suffix)), x.name);
    assert_int_equal(rfr_programs_tensor(run->programs, name, &w), RFR_OK);
    const int64_t n = rfi_count(&w.type);
    assert_int_equal(x.bytes, bytes_of(n));
    assert_int_equal(x.type.dtype, n < LEAST ? RFR_F32 : RFR_U8);
    small += n < LEAST, large += n >= LEAST;
  }
  assert_true(small > 0 && large > 0);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void same_bits(const char *config, const char *wide, const char *name) {
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record replayed = {0}, full = {0};
  rfr_run_options o = rft_run_options(&replayed);
  rfr_run *a = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(a, STEPS);
  rft_assert_eager_and_resumed(a, config, name, STEPS);
  rfr_run_close(a);
  o = rft_run_options(&full);
  a = rft_run_open(ctx, wide, NULL, &o);
  rft_run_steps(a, STEPS);
  rfr_run_close(a);
  assert_true(full.loss[STEPS] < 0.9 * full.loss[1]);
  assert_true(fabs(replayed.loss[STEPS] / full.loss[STEPS] - 1) < 0.01);
  assert_true(replayed.loss[STEPS] != full.loss[STEPS]);
  rfr_ctx_destroy(ctx);
}

static void test_runs(void **state) {
  (void)state;
  same_bits("refrain: 1\n" WIDE SINGLE DATA TWO_BATCHES U8 RUN, "refrain: 1\n" WIDE SINGLE DATA TWO_BATCHES F32 RUN,
            "f32");
  same_bits("refrain: 1\n" WIDE BF16 DATA TWO_BATCHES U8 RUN, "refrain: 1\n" WIDE BF16 DATA TWO_BATCHES F32 RUN,
            "bf16");
}

static void test_adapter(void **state) {
  (void)state;
  same_bits("refrain: 1\n" WIDE BF16 LORA DATA TWO_BATCHES U8 RUN,
            "refrain: 1\n" WIDE BF16 LORA DATA TWO_BATCHES F32 RUN, "lora");
}

static void test_sgd(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  o.config_folder = rft_run_root;
  assert_int_equal(rfr_run_open(ctx,
                                "refrain: 1\n" WIDE SINGLE DATA TWO_BATCHES
                                "optimizer: {name: sgd, lr: 1e-2, state_dtype: u8}\n" RUN,
                                NULL, &o, &run),
                   RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "u8 is for adamw"));
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes), cmocka_unit_test(test_runs),
                                     cmocka_unit_test(test_adapter), cmocka_unit_test(test_sgd)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
