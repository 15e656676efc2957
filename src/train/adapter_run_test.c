/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs that train an adapter: bitwise equal eager, recomputed and resumed; bytes of weights, masters and moments in
 * closed form; the frozen base has weights and nothing else; linear layers with the same x share a GEMM; the checkpoint
 * is an adapter's folder that another run starts from; another base is refused; a tensor without a gradient stops the
 * run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "data/safetensors.h"
#include "model/peft.h"
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
  rft_record replayed = {0}, less = {0};
  rfr_run_options o = rft_run_options(&replayed);
  rfr_run *a = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(a, 16);
  assert_int_equal(replayed.skipped, 0);
  rft_assert_eager_and_resumed(a, config, name, 16);
  o = rft_run_options(&less);
  snprintf(recomputed, sizeof recomputed, "%smemory: {recompute: all}\n", config);
  rfr_run *b = rft_run_open(ctx, recomputed, NULL, &o);
  rft_run_steps(b, 16);
  rft_assert_same_state(a, b);
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

/* With a base in 16 bits, the base has only weights: no master weights, moments or gradients. */
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
  int adds = 0; /* one add, for the losses of two microbatches: the adapter's GEMMs accumulate into y and dx */
  for (int i = 0; i < t->n_ops; i++) adds += t->ops[i].def->code == RFI_OP_add;
  assert_int_equal(adds, 1);
  rfr_run_get_info(run, &info);
  assert_int_equal(info.parameters, base);
  assert_int_equal(info.adapter_parameters, adapter);
  assert_int_equal(info.trainable_parameters, adapter);
  assert_int_equal(info.checkpoint_bytes, 12 * adapter + 4 * 28);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* ---- shared GEMMs ---- */

enum { RANK = 3, LAYERS = 2, MICROBATCHES = 2 };

/* Counts the GEMMs of a phase, over all microbatches, whose result is (_,n), or (n,_) for gradients. */
static int gemms(const rfr_trace *t, rfr_phase phase, int dimension, int64_t n) {
  int count = 0;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    count += op->def->code == RFI_OP_matmul && op->phase == phase && t->values[op->out[0]].type.shape[dimension] == n;
  }
  return count;
}

/* A of q, k and v, and of gate and up, is one tensor unless these differ in some way. */
static void shared_gemms(void **state) {
  static const struct {
    const char *set;
    bool qkv, mlp;
  } cases[] = {{"adapter.rslora=false", true, true},
               {"adapter.rslora=true", true, true},
               {"adapter.type=dora", true, true},
               {"adapter.dropout=0.1", false, false},
               {"adapter.alphas={\"*.k_proj\": 5}", false, true},
               {"adapter.targets=[q_proj, k_proj, o_proj, up_proj, gate_proj, down_proj]", false, true},
               {"optimizer.frozen=[\"*.gate_proj.lora_A.weight\"]", true, false}};
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rft_record record = {0};
    rfr_run_options o = rft_run_options(&record);
    o.keep_traces = 1;
    o.overrides = &cases[i].set, o.n_overrides = 1;
    rfr_run *run = rft_run_open(
        ctx, "refrain: 1\n" LLAMA BF16 "adapter: {type: lora, rank: 3, alpha: 6}\n" DATA TWO_BATCHES FAST RUN, NULL,
        &o);
    const rfr_trace *t = rfr_program_trace(run->programs, rfr_run_program_index(run, RFR_RUN_TRAIN), "lower");
    assert_non_null(t);
    for (int k = 2; k <= 3; k++) { /* per microbatch one GEMM over k ranks for u, and one for the gradient of A */
      const int want = (k == 3 ? cases[i].qkv : cases[i].mlp) ? LAYERS * MICROBATCHES : 0;
      assert_int_equal(gemms(t, RFR_PHASE_FORWARD, 1, k * RANK), want);
      assert_int_equal(gemms(t, RFR_PHASE_WGRAD, 0, k * RANK), want);
    }
    if (i == 0) { /* A and its gradient are scaled once per step */
      int scales = 0;
      for (int k = 0; k < t->n_ops; k++) scales += t->ops[k].def->code == RFI_OP_scale;
      assert_int_equal(scales, 2 * 4 * LAYERS);
    }
    rfr_run_close(run);
  }
  rfr_ctx_destroy(ctx);
}

/* ---- folders ---- */

/* The run sends its events to `r` until it is closed. */
static rfr_status open_again(rfr_ctx *ctx, const char *config, const char *name, int programs, rft_record *r,
                             rfr_run **run) {
  rfr_run_options o = rft_run_options(r);
  o.resume = 1, o.programs = programs;
  o.config_folder = rft_run_root;
  return rfr_run_open(ctx, config, rft_run_folder(name), &o, run);
}

/* The base is initialized from the seed, so another seed gives another base. */
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

/* A checkpoint is an adapter folder. A run that starts from it begins with the same loss. */
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

static rfi_safetensors *open_weights(rfr_ctx *ctx, const char *folder) {
  char path[1200];
  rfi_safetensors *st;
  snprintf(path, sizeof path, "%s/" RFI_PEFT_WEIGHTS, folder);
  assert_int_equal(rfi_safetensors_open(ctx, path, &st), RFR_OK);
  return st;
}

/* The stored tensor of a parameter is bitwise equal to the run's tensor `name`. */
static void check_stored(rfr_run *run, rfi_safetensors *st, const char *name, const rfr_tensor *w) {
  char tensor[RFI_PEFT_NAME];
  rfr_tensor x;
  rfi_peft_name(w->name, false, tensor);
  const rfi_stored *stored = rfi_safetensors_find(st, tensor);
  assert_non_null(stored);
  assert_int_equal(stored->dtype, RFR_F32);
  assert_int_equal(rfr_programs_tensor(run->programs, name, &x), RFR_OK);
  assert_int_equal(stored->bytes, x.bytes);
  void *data = malloc((size_t)stored->bytes);
  assert_int_equal(rfi_safetensors_read(st, stored, data, (size_t)stored->bytes), RFR_OK);
  assert_memory_equal(data, x.data, (size_t)x.bytes);
  free(data);
}

/* A bf16 checkpoint stores the f32 master weights only once: as the adapter. */
static void masters_saved(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA BF16 LORA DATA TWO_BATCHES FAST RUN, "masters", &o);
  rft_run_steps(run, 3);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  char folder[1000], path[1200], master[128];
  snprintf(folder, sizeof folder, "%s/step-000003", rft_run_folder("masters"));
  rfi_safetensors *st = open_weights(ctx, folder);
  rfr_tensor x;
  int n = 0, rounded = 0;
  for (int i = 0; rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_TRAINABLE) continue;
    snprintf(master, sizeof master, "%s.master", x.name);
    check_stored(run, st, master, &x);
    rfr_tensor m;
    assert_int_equal(rfr_programs_tensor(run->programs, master, &m), RFR_OK);
    for (int64_t k = 0; k < x.bytes / 2; k++) {
      const float value = ((float *)m.data)[k];
      const uint16_t bits = ((uint16_t *)x.data)[k];
      assert_int_equal(bits, rfr_float_to_bits(RFR_BF16, value));
      rounded += rfr_float_from_bits(RFR_BF16, bits) != value;
    }
    n++;
  }
  assert_int_equal(n, 2 * 7 * 2);
  assert_true(rounded > 0);
  rfi_safetensors_close(st);
  snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
  assert_int_equal(rfi_safetensors_open(ctx, path, &st), RFR_OK);
  for (int k = 0; k < rfi_safetensors_count(st); k++)
    assert_false(rfi_ends_in(rfi_safetensors_at(st, k)->name, ".master"));
  rfi_safetensors_close(st);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* Without master weights a checkpoint stores the 16-bit weights. A run with master weights cannot continue from it. */
static void masters_needed(void **state) {
  (void)state;
  static const char config[] =
      "refrain: 1\n" LLAMA BF16 LORA DATA TWO_BATCHES RUN "optimizer: {lr: 1e-2, master_weights: false}\n";
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  char folder[1000];
  rfi_peft *p;
  rfr_run *run = rft_run_open(ctx, config, "rounded", &o);
  const rfr_model_config *c = &run->settings->spec.model;
  rft_run_steps(run, 2);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  snprintf(folder, sizeof folder, "%s/step-000002", rft_run_folder("rounded"));
  assert_int_equal(rfi_peft_open(ctx, folder, &p), RFR_OK);
  assert_int_equal(rfi_peft_check_f32(p, c, c->adapter->base_count), RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "is BF16, but a resume with master weights needs"));
  rfi_peft_close(p);
  rfr_run_close(run);
  o.resume = o.strict = 1;
  run = rft_run_open(ctx, config, "rounded", &o);
  rft_run_steps(run, 1);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* A run that is opened for reading keeps the keys of its adapter. */
static void own_keys(void **state) {
  (void)state;
  static const char *const sets[][2] = {{"adapter.alpha=1", "adapter.alpha is \"6\" in the checkpoint and \"1\""},
                                        {"adapter.rslora=true", "adapter.rslora is \"false\""},
                                        {"adapter.ranks={}", "adapter.ranks is"}};
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, "refrain: 1\n" LLAMA SINGLE LORA DATA TWO_BATCHES FAST RUN, "own", &o);
  rft_run_steps(run, 2);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
    o = rft_run_options(&r);
    o.programs = RFR_RUN_EVALUATE, o.overrides = sets[i], o.n_overrides = 1;
    assert_int_equal(rfr_run_open(ctx, NULL, rft_run_folder("own"), &o, &run), RFR_MISMATCH);
    assert_string_equal(rfr_last_error()->slug, "resume.mismatch");
    if (!strstr(rfr_last_error()->message, sets[i][1])) fail_msg("%s", rfr_last_error()->message);
  }
  static const char *const other[] = {"batch.microbatch=1"};
  o.overrides = other;
  assert_int_equal(rfr_run_open(ctx, NULL, rft_run_folder("own"), &o, &run), RFR_OK);
  rfr_run_close(run);
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
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bits_lora),     cmocka_unit_test(bits_dora),      cmocka_unit_test(planned_bytes),
      cmocka_unit_test(shared_gemms),  cmocka_unit_test(another_base),   cmocka_unit_test(start_from),
      cmocka_unit_test(masters_saved), cmocka_unit_test(masters_needed), cmocka_unit_test(own_keys),
      cmocka_unit_test(no_gradient),   cmocka_unit_test(refused)};
  return cmocka_run_group_tests_name("adapter runs", tests, rft_run_setup, rft_run_teardown);
}
