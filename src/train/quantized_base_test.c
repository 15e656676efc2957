/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters on a quantized base (adapter.base): the bytes of its weights in closed form and without a copy in another
 * type; their contents are the quantization of the weights that the run would have without it; training, resumed
 * training and recompute are bitwise equal; an export has the loss of the run; another base than the run's, and a base
 * without an adapter, are refused. With a recipe, a base in FP8 is bitwise equal to one in the model's type, and no
 * base has a copy that lives from one GEMM to another.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "refrain/model.h"
#include "support/run.h"
#include "trace/trace.h"

#define ADAPTER(base) "adapter: {type: lora, rank: 4, base: " base "}\n"
#define DORA(base) "adapter: {type: dora, rank: 4, base: " base "}\n"
#define FOLDER "model: " RFT_SOURCE_DIR "/tests/models/llama\n"

enum { STEPS = 12 };

static rfr_run *open_with(rfr_ctx *ctx, const char *config, const char *set, rft_record *record) {
  rfr_run_options o = rft_run_options(record);
  o.overrides = &set;
  o.n_overrides = 1;
  return rft_run_open(ctx, config, NULL, &o);
}

static bool is_linear(const char *name) {
  return (strstr(name, "_proj") || strstr(name, "attn.c_") || strstr(name, "mlp.c_")) && !strstr(name, ".bias") &&
         !strstr(name, ".lora_");
}

/* Copies a tensor of the programs. */
static void *read_tensor(rfr_run *run, const char *name, rfr_tensor *x) {
  assert_int_equal(rfr_programs_tensor(rfr_run_programs(run), name, x), RFR_OK);
  void *data = malloc((size_t)x->bytes + 1);
  assert_int_equal(rfr_programs_read(rfr_run_programs(run), x, data), RFR_OK);
  return data;
}

/* Linear weights have the size of the format, and contain the quantized weights of the unquantized run. */
static void check_weights(rfr_ctx *ctx, const char *config, const char *set, rfr_quant format) {
  rft_record record = {0};
  rfr_run *plain = open_with(ctx, config, "adapter.base=model", &record), *run = open_with(ctx, config, set, &record);
  rft_run_steps(plain, 1);
  rft_run_steps(run, 1);
  rfr_tensor x;
  int linear = 0;
  for (int i = 0; rfr_programs_tensor_at(rfr_run_programs(run), i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_FROZEN) continue;
    rfr_tensor from, to;
    void *w = read_tensor(plain, x.name, &from), *q = read_tensor(run, x.name, &to);
    if (is_linear(x.name)) {
      const int64_t bytes = rfr_quant_bytes(format, from.type.rank, from.type.shape);
      uint8_t *want = malloc((size_t)bytes);
      linear++;
      assert_int_equal(x.type.dtype, RFR_U8);
      assert_int_equal(x.bytes, bytes);
      assert_int_equal(rfr_quant_encode(ctx, format, from.type.rank, from.type.shape, from.type.dtype, w, 1, want),
                       RFR_OK);
      if (memcmp(want, q, (size_t)bytes) != 0) fail_msg("%s is not the quantized weight", x.name);
      free(want);
    } else {
      assert_int_equal(x.bytes, from.bytes);
      assert_memory_equal(w, q, (size_t)from.bytes);
    }
    free(w);
    free(q);
  }
  assert_true(linear > 0);
  /* values with the shape of a weight are live for one GEMM only */
  const rfr_trace *t = rfr_program_trace(rfr_run_programs(run), 0, "lower");
  int dequantized = 0;
  assert_non_null(t);
  for (int i = 0; i < t->n_ops; i++) dequantized += t->ops[i].def->code == RFI_OP_dequantize;
  assert_true(dequantized > linear);
  rfr_run_close(plain);
  rfr_run_close(run);
}

static void weights(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(2);
  check_weights(ctx, "refrain: 1\n" LLAMA ADAPTER("model") DATA TWO_BATCHES ADAM RUN, "adapter.base=nf4",
                RFR_QUANT_NF4);
  check_weights(ctx, "refrain: 1\n" GPT2 ADAPTER("model") DATA TWO_BATCHES ADAM RUN, "adapter.base=int8",
                RFR_QUANT_INT8);
  check_weights(ctx, "refrain: 1\n" FOLDER SINGLE ADAPTER("model") DATA TWO_BATCHES ADAM RUN, "adapter.base=nf4",
                RFR_QUANT_NF4);
  check_weights(ctx, "refrain: 1\n" LLAMA ADAPTER("model") DATA TWO_BATCHES ADAM RUN, "adapter.base=fp8",
                RFR_QUANT_FP8);
  rfr_ctx_destroy(ctx);
}

/* Training, resumed training, and training with recompute are bitwise equal. */
static void same_bits(const char *config, const char *name) {
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record all = {0}, resumed = {0}, small = {0};
  rfr_run_options o = rft_run_options(&all);
  rfr_run *a = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(a, STEPS);
  assert_true(isfinite(all.loss[STEPS]) && all.loss[STEPS] < all.loss[1]);
  rfr_run *b = open_with(ctx, config, "memory.recompute=all", &small);
  rft_run_steps(b, STEPS);
  rft_assert_same_state(a, b);
  rfr_run_close(b);
  o = rft_run_options(&resumed);
  b = rft_run_open(ctx, config, name, &o);
  rft_run_steps(b, STEPS / 2);
  assert_int_equal(rfr_run_save(b), RFR_OK);
  rfr_run_close(b);
  o.resume = o.strict = 1;
  b = rft_run_open(ctx, config, name, &o);
  rft_run_steps(b, STEPS - STEPS / 2);
  rft_assert_same_state(a, b);
  for (int i = 1; i <= STEPS; i++) assert_true(all.loss[i] == resumed.loss[i] && all.loss[i] == small.loss[i]);
  rfr_run_close(a);
  rfr_run_close(b);
  rfr_ctx_destroy(ctx);
}

static void bits_nf4(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA ADAPTER("nf4") DATA TWO_BATCHES ADAM RUN, "nf4");
}
static void bits_int8_gpt2_dora(void **state) {
  (void)state;
  same_bits("refrain: 1\n" GPT2 DORA("int8") DATA TWO_BATCHES ADAM RUN, "int8");
}

static void bits_fp8(void **state) {
  (void)state;
  same_bits("refrain: 1\n" LLAMA ADAPTER("fp8") DATA TWO_BATCHES ADAM RUN, "fp8");
}

/* ---- with a recipe ---- */

static const char *const models[] = {
    "model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,\n"
    "        num_attention_heads: 4, num_key_value_heads: 2}\n",
    "model: {model_type: gpt2, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}\n",
    "model: {model_type: mixtral, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_experts: 4,\n"
    "        num_attention_heads: 4}\n"};
enum { MODELS = sizeof models / sizeof *models };

static rfr_run *open_recipe(rfr_ctx *ctx, const char *model, const char *base, const char *recipe, const char *set,
                            rft_record *record) {
  char config[2400];
  snprintf(config, sizeof config,
           "refrain: 1\n%sadapter: {type: lora, rank: 4, base: %s}\nprecision: {dtype: bf16, recipe: %s, keep: []}\n%s",
           model, base, recipe, DATA TWO_BATCHES ADAM RUN);
  *record = (rft_record){0};
  return open_with(ctx, config, set, record);
}

/* Checks ops on stored weights: each result has one reader, at most two ops later, of the same phase and microbatch.
 * Returns the number of ops with `code`. */
static int check_one_reader(const rfr_trace *t, rfi_opcode code) {
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    const rfi_opr *from = op->n_in > 0 && t->values[op->in[0]].op >= 0 ? &t->ops[t->values[op->in[0]].op] : NULL;
    const bool quantizes = op->def->code == RFI_OP_quantize && from && from->def->code == RFI_OP_dequantize;
    n += op->def->code == code;
    if (!(op->def->flags & RFI_LOCAL) && !quantizes) continue;
    for (int k = i + 1; k < t->n_ops; k++)
      for (int j = 0; j < t->ops[k].n_in; j++) {
        const rfr_value v = t->ops[k].in[j];
        if (v < 0 || t->values[v].op != i) continue;
        assert_true(k <= i + 2);
        assert_int_equal(t->ops[k].phase, op->phase);
        assert_int_equal(t->ops[k].microbatch, op->microbatch);
      }
  }
  return n;
}

static void recipes_are_local(void **state) {
  static const char *const bases[] = {"nf4", "int8", "fp8"}, *const recipes[] = {"fp8_current", "fp8_delayed",
                                                                                 "fp8_block", "mxfp8", "nvfp4"};
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(2);
  for (int m = 0; m < MODELS; m++)
    for (int b = 0; b < 3; b++)
      for (int r = 0; r < 5; r++) {
        rft_record record;
        rfr_run *run = open_recipe(ctx, models[m], bases[b], recipes[r], "memory.recompute=none", &record);
        const rfr_trace *t = rfr_program_trace(rfr_run_programs(run), 0, "lower");
        const bool as_it_is = b == 2 && r < 2; /* E4M3 with one scale per matrix needs no dequantization */
        assert_non_null(t);
        assert_int_equal(check_one_reader(t, RFI_OP_dequantize) > 0, !as_it_is);
        assert_int_equal(check_one_reader(t, RFI_OP_transposed) > 0, as_it_is);
        for (int i = 0; i < t->n_ops; i++) /* no copy of a weight is computed once and kept */
          for (int j = 0; j < t->ops[i].n_out && t->ops[i].phase <= RFR_PHASE_SETUP; j++)
            if (t->ops[i].out[j] >= 0 && !(t->ops[i].def->flags & RFI_VIEW) && t->ops[i].in &&
                rfi_bytes(&t->values[t->ops[i].out[j]].type) >= 1024)
              fail_msg("%s with %s: op %d %s is made once", bases[b], recipes[r], i, t->ops[i].def->name);
        rfr_run_close(run);
      }
  rfr_ctx_destroy(ctx);
}

/* The codes equal those that the recipe would compute from the weights: same losses, same adapter. */
static void stored_fp8_equals_recipe(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(2);
  for (int m = 0; m < MODELS; m++) {
    rft_record wide, stored, small;
    rfr_run *a = open_recipe(ctx, models[m], "model", "fp8_current", "run.seed=7", &wide);
    rfr_run *b = open_recipe(ctx, models[m], "fp8", "fp8_current", "run.seed=7", &stored);
    rft_run_steps(a, STEPS);
    rft_run_steps(b, STEPS);
    rfr_tensor x;
    int adapters = 0;
    for (int i = 0; rfr_programs_tensor_at(rfr_run_programs(a), i, &x) == RFR_OK; i++) {
      if (x.role != RFR_ROLE_TRAINABLE) continue;
      rfr_tensor from, to;
      void *want = read_tensor(a, x.name, &from), *have = read_tensor(b, x.name, &to);
      adapters++;
      assert_memory_equal(want, have, (size_t)x.bytes);
      free(want);
      free(have);
    }
    assert_true(adapters > 0);
    rft_assert_same_losses(&wide, &stored);
    rfr_run_close(a);
    a = open_recipe(ctx, models[m], "fp8", "fp8_current", "memory.recompute=all", &small);
    rfr_run_close(b);
    b = open_recipe(ctx, models[m], "fp8", "fp8_current", "memory.recompute=none", &stored);
    rft_run_steps(a, STEPS);
    rft_run_steps(b, STEPS);
    rft_assert_same_losses(&small, &stored);
    rft_assert_same_state(a, b);
    rfr_run_close(a);
    rfr_run_close(b);
  }
  rfr_ctx_destroy(ctx);
}

static rfr_status export_f32(rfr_ctx *ctx, const char *model, const char *name, char out[512]) {
  char from[512];
  rfr_export_options o = rfr_export_options_default();
  o.dtype = "f32";
  snprintf(from, sizeof from, "%s", model); /* copied, because `model` may be the buffer of rft_run_folder */
  snprintf(out, 512, "%s", rft_run_folder(name));
  return rfr_export(ctx, from, out, &o);
}

static double loss_of(rfr_run *run) {
  rfr_evaluation e;
  assert_int_equal(rfr_run_evaluate(run, &e), RFR_OK);
  rfr_run_close(run);
  return e.loss;
}

/* The adapter can be merged into the quantized base, and into no other base. */
static void exported(void **state) {
  (void)state;
  static const char *const sets[] = {"adapter.base=nf4", "adapter.base=int8", "adapter.base=fp8", "adapter.base=model",
                                     "adapter.type=dora"};
  rfr_ctx *ctx = rft_run_ctx(2);
  for (int i = 0; i < 5; i++) {
    char base[512], merged[512], name[16], config[2400];
    rft_record record = {0};
    assert_int_equal(export_f32(ctx, RFT_SOURCE_DIR "/tests/models/llama", "base", base), RFR_OK);
    snprintf(config, sizeof config, "refrain: 1\nmodel: %s\n%s%s", base, SINGLE DATA TWO_BATCHES ADAM RUN,
             i == 4 ? ADAPTER("nf4") : ADAPTER("model"));
    rfr_run_options o = rft_run_options(&record);
    o.overrides = &sets[i], o.n_overrides = 1;
    snprintf(name, sizeof name, "export-%d", i);
    rfr_run *run = rft_run_open(ctx, config, name, &o);
    rft_run_steps(run, STEPS);
    assert_int_equal(rfr_run_save(run), RFR_OK);
    const double want = loss_of(run);
    if (export_f32(ctx, rft_run_folder(name), "merged", merged) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
    snprintf(config, sizeof config, "refrain: 1\nmodel: %s\n%s", merged, SINGLE DATA TWO_BATCHES ADAM RUN);
    o = rft_run_options(&record);
    const double got = loss_of(rft_run_open(ctx, config, NULL, &o));
    if (fabs(got - want) > 1e-6 * want) fail_msg("%s: the run has loss %.9g, its export %.9g", sets[i], want, got);
    rfi_tree_discard(merged);
    rfi_tree_discard(base);
    rfr_export_options other = rfr_export_options_default();
    other.dtype = "f16";
    assert_int_equal(rfr_export(ctx, RFT_SOURCE_DIR "/tests/models/llama", base, &other), RFR_OK);
    assert_int_equal(export_f32(ctx, rft_run_folder(name), "merged", merged), RFR_MISMATCH);
    assert_string_equal(rfr_last_error()->slug, "adapter.base");
    rfi_tree_discard(base);
  }
  rfr_ctx_destroy(ctx);
}

static void refused(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rfr_run_options o = rft_run_options(NULL);
  rfr_run *run;
  const char *text = "refrain: 1\n" LLAMA "adapter: {base: nf4}\n" DATA TWO_BATCHES ADAM RUN;
  assert_int_not_equal(rfr_run_open(ctx, text, NULL, &o, &run), RFR_OK);
  assert_non_null(strstr(rfr_last_error()->message, "adapter.base: there is no adapter"));
  assert_null(run);
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(weights),  cmocka_unit_test(bits_nf4),          cmocka_unit_test(bits_int8_gpt2_dora),
      cmocka_unit_test(bits_fp8), cmocka_unit_test(recipes_are_local), cmocka_unit_test(stored_fp8_equals_recipe),
      cmocka_unit_test(exported), cmocka_unit_test(refused),
  };
  return cmocka_run_group_tests_name("quantized_base", tests, rft_run_setup, rft_run_teardown);
}
