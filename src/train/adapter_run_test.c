/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs that train an adapter: the same bits eager, recomputed and resumed; bytes of weights, masters and moments in
 * closed form; nothing but the weights of the frozen base; the checkpoint is an adapter's folder that another run
 * starts from; another base is refused; a tensor without a gradient stops the run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nn/adapter.h"
#include "support/run.h"
#include "trace/trace.h"

#define LORA "adapter: {type: lora, rank: 3, alpha: 6, dropout: 0.1, ranks: {\"*.q_proj\": 5}}\n"
#define PLAIN "adapter: {type: lora, rank: 3, alpha: 6, ranks: {\"*.q_proj\": 5}}\n"
#define DORA "adapter: {type: dora, rank: 2, targets: [\"*_proj\"], rslora: true}\n"
#define BF16 "precision: {dtype: bf16}\n"
#define FAST "optimizer: {lr: 1e-2, clip: 1.0}\n"

static void same_bits(const char *config, const char *name) {
  rfr_ctx *ctx = rft_run_ctx(2);
  char recomputed[2000];
  rft_record replayed = {0}, eager = {0}, less = {0}, resumed = {0};
  rfr_run_options o = rft_run_options(&replayed);
  rfr_run *a = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(a, 16);
  assert_int_equal(replayed.skipped, 0);
  o = rft_run_options(&eager);
  o.eager = 1;
  rfr_run *b = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(b, 16);
  rft_assert_same_state(a, b);
  rfr_run_close(b);
  o = rft_run_options(&less);
  snprintf(recomputed, sizeof recomputed, "%smemory: {recompute: all}\n", config);
  b = rft_run_open(ctx, recomputed, NULL, &o);
  rft_run_steps(b, 16);
  rft_assert_same_state(a, b);
  rfr_run_close(b);
  o = rft_run_options(&resumed);
  b = rft_run_open(ctx, config, name, &o);
  rft_run_steps(b, 6);
  assert_int_equal(rfr_run_save(b), RFR_OK);
  rft_run_steps(b, 2);
  rfr_run_close(b);
  o.resume = o.strict = 1;
  b = rft_run_open(ctx, config, name, &o);
  rft_run_steps(b, 10);
  rft_assert_same_state(a, b);
  assert_int_equal(resumed.warnings, 0);
  rfr_run_close(b);
  rfr_run_close(a);
  rfr_ctx_destroy(ctx);
}

static void bits_lora(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA SINGLE LORA DATA TWO_BATCHES FAST RUN, "lora-f32");
  same_bits("refrain: 1\n" LLAMA BF16 LORA DATA TWO_BATCHES FAST RUN, "lora-bf16");
}

static void bits_dora(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA BF16 DORA DATA TWO_BATCHES FAST RUN, "dora");
}

/* ---- bytes ---- */

/* The base in 16 bits has its weights and nothing else: no master weights, no moments, no gradient. */
static void planned_bytes(void **state) {
  (void)state;
  enum { C = 24, I = 40, KV = 12, L = 2, V = 256, R = 3, RQ = 5 };
  const int64_t base = 2 * V * C + C + L * (2 * C * C + 2 * KV * C + 3 * C * I + 2 * C);
  const int64_t adapter = L * (RQ * (C + C) + R * (2 * (C + KV) + (C + C) + 3 * (C + I)));
  int64_t frozen = 0, trained = 0, masters = 0, moments = 0, gradients = 0;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  o.keep_traces = 1;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA BF16 PLAIN DATA TWO_BATCHES FAST RUN, NULL, &o);
  rfr_tensor x;
  rfr_run_info info;
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++) {
    const bool of_adapter = strstr(x.name, ".lora_") != NULL;
    if (x.role == RFR_ROLE_FROZEN) frozen += x.bytes;
    else if (x.role == RFR_ROLE_TRAINABLE) trained += x.bytes;
    else if (rfi_ends_in(x.name, ".master")) masters += x.bytes;
    else if (rfi_ends_in(x.name, ".exp_avg") || rfi_ends_in(x.name, ".exp_avg_sq")) moments += x.bytes;
    else continue;
    assert_int_equal(of_adapter, x.role != RFR_ROLE_FROZEN);
  }
  assert_int_equal(frozen, 2 * base);
  assert_int_equal(trained, 2 * adapter);
  assert_int_equal(masters, 4 * adapter);
  assert_int_equal(moments, 8 * adapter);
  const rfr_trace *t = rfr_program_trace(run->programs, rfr_run_program_index(run, RFR_RUN_TRAIN), "lower");
  assert_non_null(t);
  for (int v = 0; v < t->n_values; v++)
    if (strncmp(t->values[v].name, "d_", 2) == 0) gradients += rfi_bytes(&t->values[v].type);
  assert_int_equal(gradients, 4 * adapter);
  int adds = 0; /* that of the losses of two microbatches: GEMMs of the adapter accumulate onto y and dx */
  for (int i = 0; i < t->n_ops; i++) adds += t->ops[i].def->code == RFI_OP_add;
  assert_int_equal(adds, 1);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.parameters, base);
  assert_int_equal(info.adapter_parameters, adapter);
  assert_int_equal(info.trainable_parameters, adapter);
  assert_int_equal(info.checkpoint_bytes, 14 * adapter + 4 * 28);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* ---- folders ---- */

/* The run reports to `r` as long as it is open. */
static rfr_status open_again(rfr_ctx *ctx, const char *config, const char *name, int programs, rft_record *r,
                             rfr_run **run) {
  rfr_run_options o = rft_run_options(r);
  o.resume = 1, o.programs = programs;
  o.config_folder = rft_run_root;
  return rfr_run_open(ctx, config, rft_run_folder(name), &o, run);
}

/* The base here is made from the seed: another seed is another base. */
static void another_base(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_evaluation mine, again;
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA SINGLE LORA DATA TWO_BATCHES FAST RUN, "base", &o), *other;
  rft_run_steps(run, 4);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  assert_int_equal(rfr_run_evaluate(run, &mine), RFR_OK);
  rfr_run_close(run);
  assert_int_equal(open_again(ctx, NULL, "base", RFR_RUN_EVALUATE, &r, &run), RFR_OK);
  assert_int_equal(rfr_run_evaluate(run, &again), RFR_OK);
  assert_true(mine.loss == again.loss);
  rfr_run_close(run);
  const char *config = "refrain: 1\n" LLAMA SINGLE LORA DATA TWO_BATCHES FAST "run: {steps: 50, seed: 4}\n";
  assert_int_equal(open_again(ctx, config, "base", RFR_RUN_EVALUATE, &r, &other), RFR_MISMATCH);
  assert_string_equal(rfr_last_error()->slug, "adapter.base");
  rfr_ctx_destroy(ctx);
}

/* A checkpoint is a folder of an adapter. A run that starts from it begins with its loss. */
static void start_from(void **state) {
  (void)state;
  static const char *const adapters[] = {LORA, DORA};
  rfr_ctx *ctx = rft_run_ctx(1);
  for (int i = 0; i < 2; i++) {
    char config[2000], from[2000], name[16];
    rft_record first = {0}, second = {0};
    rfr_run_options o = rft_run_options(&first);
    rfr_evaluation mine, again;
    snprintf(name, sizeof name, "from-%d", i);
    snprintf(config, sizeof config, "%s%s", "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES FAST RUN, adapters[i]);
    rfr_run *a = rft_run_open(ctx, config, name, &o);
    rft_run_steps(a, 5);
    assert_int_equal(rfr_run_save(a), RFR_OK);
    assert_int_equal(rfr_run_evaluate(a, &mine), RFR_OK);
    rfr_run_close(a);
    snprintf(from, sizeof from, "%sadapter: {from: \"%s/step-000005\"}\n",
             "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES FAST RUN, rft_run_folder(name));
    o = rft_run_options(&second);
    rfr_run *b = rft_run_open(ctx, from, NULL, &o);
    assert_int_equal(b->settings->adapter->dora, i);
    assert_int_equal(rfr_run_evaluate(b, &again), RFR_OK);
    assert_true(mine.loss == again.loss);
    rft_run_steps(b, 1);
    rfr_run_close(b);
  }
  rfr_ctx_destroy(ctx);
}

/* With B frozen at zero, A gets no gradient. */
static void no_gradient(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx,
                              "refrain: 1\n" LLAMA SINGLE "adapter: {type: lora, targets: [\"*.1.*.q_proj\"]}\n" DATA
                              "optimizer: {lr: 1e-2, frozen: [\"*.lora_B.*\"]}\n" TWO_BATCHES RUN,
                              NULL, &o);
  rft_run_steps(run, 9);
  assert_int_equal(rfr_run_step(run), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "adapter.gradient");
  assert_non_null(strstr(rfr_last_error()->message, "exactly zero: model.layers.1.self_attn.q_proj.lora_A.weight"));
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void refused(void **state) {
  (void)state;
  static const char *const rows[][3] = {
      {"adapter: {rank: 4}\n", "config.value", "adapter.rank: there is no adapter"},
      {"adapter: {type: lora, rank: 0}\n", "config.value", "adapter.rank: \"0\" is not accepted"},
      {"adapter: {type: lora, targets: [\"*.q_prjo\"]}\n", "config.value", "no module matches \"*.q_prjo\""},
      {"adapter: {type: lora, targets: [\"all-linear\", \"*norm*\"]}\n", "config.value", "cannot have an adapter"},
      {"adapter: {type: lora, ranks: {\"*.zz\": 4}}\n", "config.value", "ranks: no target matches \"*.zz\""},
      {"adapter: {type: lora, ranks: [4]}\n", "config.value", "adapter.ranks: \"a list\" is not accepted"},
      {"adapter: {type: dora, targets: [lm_head]}\n", "config.value", "DoRA supports only linear layers"},
      {"adapter: {type: lora, dropout: 0.1, targets: [lm_head]}\n", "config.value", "set the dropout to 0"},
      {"adapter: {from: x, rank: 4}\n", "config.value", "adapter.rank: not allowed with adapter.from"},
      {"adapter: {from: nowhere}\n", "file.open", "nowhere"},
      {"adapter: {type: none, from: x}\n", "config.value", "adapter.type is none"}};
  rfr_ctx *ctx = rft_run_ctx(1);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    char config[1000];
    rft_record r = {0};
    rfr_run_options o = rft_run_options(&r);
    rfr_run *run;
    o.config_folder = rft_run_root;
    snprintf(config, sizeof config, "%s%s", "refrain: 1\n" LLAMA SINGLE DATA TWO_BATCHES FAST RUN, rows[i][0]);
    if (rfr_run_open(ctx, config, NULL, &o, &run) == RFR_OK) fail_msg("%s was accepted", rows[i][0]);
    if (strcmp(rfr_last_error()->slug, rows[i][1]) != 0 || !strstr(rfr_last_error()->message, rows[i][2]))
      fail_msg("%s: [%s] %s", rows[i][0], rfr_last_error()->slug, rfr_last_error()->message);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(bits_lora),     cmocka_unit_test(bits_dora),
                                     cmocka_unit_test(planned_bytes), cmocka_unit_test(another_base),
                                     cmocka_unit_test(start_from),    cmocka_unit_test(no_gradient),
                                     cmocka_unit_test(refused)};
  return cmocka_run_group_tests_name("adapter runs", tests, rft_run_setup, rft_run_teardown);
}
