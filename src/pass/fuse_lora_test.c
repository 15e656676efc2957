/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters as one op. The forward and dgrad of a layer with LoRA become lora_matmul, also where dx is a sum over
 * several layers. Gradients equal those without the fusion, except for rounding. Recompute drops the results, and
 * gradients stay bitwise equal. A narrow GEMM that reads another operand is not fused. GEMMs in FP8 accumulate into the
 * result of the narrow GEMM.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ops/op_index.h"
#include "pass/pass.h"
#include "refrain/recipe.h"
#include "support/context.h"
#include "support/rewrite.h"

enum { T = 32, C = 64, RANK = 4, OUTS = 3, DEPTH = 4, MOST = 2 * (OUTS + DEPTH) };

/* y = x wT + bias + 0.5 (dropout(x) aT) bT */
static rfr_value layer(rfr_trace *t, const char *name, rfr_value x, int64_t out, bool bias, rfr_value step,
                       const rfr_recipe *recipe, rfr_value *trained, int *n) {
  char text[4][24];
  static const char *const parts[] = {"w", "bias", "a", "b"};
  for (int i = 0; i < 4; i++) snprintf(text[i], sizeof text[i], "%s.%s", name, parts[i]);
  const rfr_value w = rfr_input(t, text[0], RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){out, C}));
  const rfr_value c = bias ? rfr_input(t, text[1], RFR_ROLE_FROZEN, RFR_F32, 1, &out) : RFR_NONE;
  const rfr_value a = rfr_input(t, text[2], RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){RANK, C}));
  const rfr_value b = rfr_input(t, text[3], RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){out, RANK}));
  trained[(*n)++] = a;
  trained[(*n)++] = b;
  rfr_recipe_begin(t, recipe);
  rfr_value y = rfr_matmul(t, x, w, c, 0, 1, RFR_F32);
  rfr_recipe_end(t);
  if (step != RFR_NONE) x = rfr_dropout(t, x, step, 0.25, 1);
  rfr_value u = rfr_scale(t, rfr_matmul(t, x, a, RFR_NONE, 0, 1, RFR_F32), 0.5, RFR_NONE);
  return rfr_add(t, y, rfr_matmul(t, u, b, RFR_NONE, 0, 1, RFR_F32));
}

/* A chain of layers, followed by layers that all read its result, whose dx has a pair of terms per layer. */
static rfr_trace *record(bool dropout, const rfr_recipe *recipe) {
  static const int64_t outs[OUTS] = {48, 16, 16};
  rfr_trace *t;
  rfr_value trained[MOST], loss = RFR_NONE;
  int n = 0;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value step = dropout ? rfr_step_block(t) : RFR_NONE;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  for (int i = 0; i < DEPTH; i++) {
    char name[8];
    snprintf(name, sizeof name, "deep%d", i);
    x = rfr_silu(t, layer(t, name, x, C, i == 1, step, recipe, trained, &n));
  }
  for (int i = 0; i < OUTS; i++) {
    char name[8];
    snprintf(name, sizeof name, "out%d", i);
    rfr_value part = rfr_sum(t, rfr_silu(t, layer(t, name, x, outs[i], i == 1, step, recipe, trained, &n)), -1);
    loss = i ? rfr_add(t, loss, part) : part;
  }
  for (int i = 0; i < n; i++) {
    char name[32];
    snprintf(name, sizeof name, "d_%s", rfr_value_name(t, trained[i]));
    rfr_output(t, name, rfr_copy(t, rfr_gradient(t, loss, trained[i], RFR_F32)));
  }
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  return t;
}

static int count(const rfr_programs *p, const char *pass, rfi_opcode code, int phase) {
  return rft_count_ops(rfr_program_trace(p, 0, pass), code, phase);
}

static rfr_programs *compile(const rfr_trace *t, int fuse, rfr_recompute recompute) {
  rfr_compile_options o = rfr_compile_options_default();
  o.fuse = fuse;
  o.recompute = recompute;
  o.keep_traces = 1;
  return rft_run_filled(t, &o);
}

/* Compares all outputs; tolerance 0: bitwise. */
static void compare(const rfr_trace *t, const rfr_programs *p, const rfr_programs *q, double tolerance) {
  for (int i = 0; i < t->n_outputs; i++) {
    rfr_tensor a, b;
    double d = 0, s = 0;
    OK(rfr_program_output(p, 0, t->outputs[i].name, &a));
    OK(rfr_program_output(q, 0, t->outputs[i].name, &b));
    for (int64_t k = 0; k < a.bytes / 4; k++) {
      const double x = ((const float *)a.data)[k], y = ((const float *)b.data)[k];
      d += (x - y) * (x - y), s += y * y;
    }
    assert_true(s > 0);
    if (!(d <= tolerance * tolerance * s)) fail_msg("%s differs by %g", t->outputs[i].name, sqrt(d / s));
  }
}

static void test_step(void **state) {
  (void)state;
  for (int dropout = 0; dropout < 2; dropout++) {
    rfr_trace *t = record(dropout, NULL);
    rfr_programs *plain = compile(t, 0, RFR_RECOMPUTE_KEEP), *fused = compile(t, 1, RFR_RECOMPUTE_KEEP);
    rfr_programs *small = compile(t, 1, RFR_RECOMPUTE_ALL);
    assert_int_equal(count(plain, "fuse", RFI_OP_lora_matmul, -1), 0);
    assert_int_equal(count(fused, "fuse", RFI_OP_lora_matmul, RFR_PHASE_FORWARD), DEPTH + OUTS);
    /* no gradient of the input x: the first layer has no dgrad. With dropout, du A is multiplied by the mask. */
    assert_int_equal(count(fused, "fuse", RFI_OP_lora_matmul, RFR_PHASE_DGRAD), dropout ? 0 : DEPTH - 1 + OUTS);
    assert_int_equal(count(fused, "lower", RFI_OP_lora_matmul, -1), 0); /* the CPU runs two GEMMs */
    compare(t, fused, plain, 1e-5);
    compare(t, small, fused, 0);
    const rfr_trace *after = rfr_program_trace(small, 0, "recompute");
    int clones = 0;
    for (int i = 0; i < after->n_ops; i++)
      clones += after->ops[i].clone_of >= 0 && after->ops[i].def->code == RFI_OP_lora_matmul;
    assert_true(clones > 0);
    rfr_programs_destroy(plain);
    rfr_programs_destroy(fused);
    rfr_programs_destroy(small);
    rfr_trace_destroy(t);
  }
}

/* In FP8 each sum begins with the narrow GEMM: in the forward, and in the backward for dx of one layer and of several
 * layers. */
static void test_scaled(void **state) {
  (void)state;
  const rfr_recipe recipe = rfr_recipe_default(RFR_RECIPE_FP8_CURRENT);
  rfr_trace *t = record(false, &recipe);
  rfr_programs *plain = compile(t, 0, RFR_RECOMPUTE_KEEP), *fused = compile(t, 1, RFR_RECOMPUTE_KEEP);
  rfr_programs *small = compile(t, 1, RFR_RECOMPUTE_ALL);
  const rfr_trace *after = rfr_program_trace(fused, 0, "lower");
  int onto = 0, scaled = 0;
  for (int i = 0; i < after->n_ops; i++) {
    const rfi_opr *op = &after->ops[i];
    if (op->def->code == RFI_OP_matmul && op->n_in > 3 && op->in[3] >= 0)
      assert_int_equal(after->ops[after->values[op->in[3]].op].def->code, RFI_OP_matmul);
    if (op->def->code != RFI_OP_matmul_scaled) continue;
    scaled++;
    onto += op->n_in > RFI_IN_matmul_scaled_acc && op->in[RFI_IN_matmul_scaled_acc] >= 0;
  }
  assert_int_equal(scaled, DEPTH + OUTS + DEPTH - 1 + OUTS);
  assert_int_equal(onto, scaled);
  compare(t, fused, plain, 2e-2);
  compare(t, small, fused, 0);
  rfr_programs_destroy(plain);
  rfr_programs_destroy(fused);
  rfr_programs_destroy(small);
  rfr_trace_destroy(t);
}

/* x w + u b where u is unrelated to x, where u is wider, and where a result has a second reader. */
static void test_left_alone(void **state) {
  rfr_trace *t;
  (void)state;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  const rfr_value z = rfr_input(t, "z", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  const rfr_value v = rfr_input(t, "v", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){C, C}));
  const rfr_value c = rfr_input(t, "c", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){C, C}));
  const rfr_value a = rfr_input(t, "a", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){RANK, C}));
  const rfr_value b = rfr_input(t, "b", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){C, RANK}));
  const rfr_value full = rfr_linear(t, rfr_linear(t, z, c, RFR_NONE), w, RFR_NONE);
  const rfr_value other = rfr_linear(t, rfr_linear(t, z, a, RFR_NONE), b, RFR_NONE);
  const rfr_value shared = rfr_linear(t, rfr_linear(t, v, a, RFR_NONE), b, RFR_NONE);
  rfr_output(t, "other", rfr_add(t, rfr_linear(t, x, w, RFR_NONE), other));
  rfr_output(t, "full", rfr_add(t, rfr_linear(t, z, w, RFR_NONE), full));
  rfr_output(t, "shared", rfr_add(t, rfr_linear(t, v, w, RFR_NONE), shared));
  rfr_output(t, "narrow", rfr_silu(t, shared));
  OK(rfr_trace_finish(t));
  rfr_programs *p = compile(t, 1, RFR_RECOMPUTE_KEEP);
  assert_int_equal(count(p, "fuse", RFI_OP_lora_matmul, -1), 0);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_step), rft_context_test(test_scaled),
                                     rft_context_test(test_left_alone)};
  return cmocka_run_group_tests_name("fuse_lora", tests, NULL, NULL);
}
