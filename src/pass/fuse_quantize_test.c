/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion with quantize: the same program with the pass and without it gives the same results bit for bit, for every
 * recipe, both norms, two types, with recompute and without. The recipe decides which ops are fused, and a result that
 * another op reads is still stored.
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/context.h"
#include "support/rewrite.h"

enum { T = 48, C = 32, I = 64 };

typedef struct cell {
  rfr_recipe_kind recipe;
  rfr_dtype type;
  bool layernorm, shown, high; /* shown: the quantized results are also outputs */
  rfr_recompute recompute;
} cell;

enum { X, OTHER, NORM1, GATE, UP, DOWN, NORM2, LAST, TRAINED };
static const char *const trained[TRAINED] = {"x", "other", "norm1", "gate", "up", "down", "norm2", "last"};

static void parameters(rfr_trace *t, rfr_value w[TRAINED]) {
  static const int64_t shape[TRAINED][2] = {{T, C}, {T, C}, {C}, {I, C}, {I, C}, {C, I}, {C}, {I, C}};
  for (int i = 0; i < TRAINED; i++)
    w[i] = rfr_input(t, trained[i], i == OTHER ? RFR_ROLE_INPUT_GRAD : RFR_ROLE_TRAINABLE, RFR_F32, shape[i][1] ? 2 : 1,
                     shape[i]);
}

static rfr_value linear(rfr_trace *t, const cell *c, rfr_value x, rfr_value w) {
  return rfr_linear(t, x, rfr_cast(t, w, c->type), RFR_NONE);
}

static rfr_value norm(rfr_trace *t, const cell *c, rfr_value x, rfr_value w) {
  return c->layernorm ? rfr_layernorm(t, x, w, RFR_NONE, 1e-5) : rfr_rmsnorm(t, x, w, 1e-5);
}

/* `up` has a separate input: otherwise a GEMM would accumulate two gradients of h, which rounds differently. */
static rfr_trace *record(const cell *c) {
  rfr_recipe recipe = rfr_recipe_default(c->recipe);
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  recipe.high_backward = c->high;
  rfr_step_block(t);
  rfr_value w[TRAINED];
  parameters(t, w);
  const rfr_value other = rfr_cast(t, w[OTHER], c->type);
  const rfr_value x = rfr_cast(t, w[X], c->type);
  rfr_output(t, "x0", x); /* so that no GEMM accumulates into it in place, which rounds differently */
  rfr_recipe_begin(t, &recipe);
  const rfr_value h = norm(t, c, x, w[NORM1]);
  const rfr_value a = rfr_swiglu(t, linear(t, c, h, w[GATE]), linear(t, c, other, w[UP]));
  const rfr_value sum = rfr_add(t, x, linear(t, c, a, w[DOWN])), h2 = norm(t, c, sum, w[NORM2]);
  const rfr_value z = linear(t, c, h2, w[LAST]);
  rfr_recipe_end(t);
  rfr_output(t, "sum", sum);
  if (c->shown) rfr_output(t, "h", h), rfr_output(t, "a", a), rfr_output(t, "h2", h2);
  const rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, I}));
  const rfr_value loss = rfr_sum(t, rfr_mul(t, rfr_cast(t, z, RFR_F32), r), -1);
  rfr_output(t, "loss", loss);
  for (int i = 0; i < TRAINED; i++) rfr_output(t, trained[i], rfr_gradient(t, loss, w[i], RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_programs *run(const cell *c, const rfr_trace *t, bool fuse) {
  rfr_compile_options o = rfr_compile_options_default();
  rfr_tensor x;
  o.fuse = fuse, o.recompute = c->recompute;
  rfr_programs *p = rft_compile(t, &o);
  rft_fill_inputs(p);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    if (strcmp(x.name, RFR_RECIPE_HISTORY) == 0) memset(x.data, 0, (size_t)x.bytes);
    for (int64_t k = 0; strcmp(x.name, RFR_RECIPE_SCALE) == 0 && k < rfi_count(&x.type); k++)
      ((float *)x.data)[k] = 1 + (float)k;
  }
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  return p;
}

static void check_ops(const cell *c, const rfr_programs *p) {
  const bool tensor = c->recipe == RFR_RECIPE_FP8_CURRENT || c->recipe == RFR_RECIPE_FP8_DELAYED;
  const int again = c->recompute == RFR_RECOMPUTE_ALL, l = c->layernorm,
            l_sum = rft_count_lowered(p, RFI_OP_add_layernorm_quantize);
  assert_in_range(rft_count_lowered(p, RFI_OP_swiglu_quantize), tensor, tensor * (1 + again));
  assert_int_equal(rft_count_lowered(p, RFI_OP_swiglu_bwd_quantize), tensor && !c->high);
  assert_in_range(rft_count_lowered(p, l ? RFI_OP_layernorm_quantize : RFI_OP_rmsnorm_quantize), tensor,
                  tensor * (2 + again));
  assert_in_range(l ? l_sum : rft_count_lowered(p, RFI_OP_add_rmsnorm_quantize), tensor, tensor);
  const rfr_trace *t = rfr_program_trace(p, 0, "lower");
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].def->code == RFI_OP_swiglu_quantize && t->ops[i].clone_of < 0)
      assert_int_equal(t->ops[i].out[0] >= 0, c->shown || (c->high && !again));
}

static void check(const cell *c) {
  static const char *const outputs[] = {"loss", "sum",   "x",    "other", "norm1", "gate", "up",
                                        "down", "norm2", "last", "h",     "a",     "h2"};
  rfr_trace *t = record(c);
  rfr_programs *p = run(c, t, true), *q = run(c, t, false);
  check_ops(c, p);
  for (int i = 0; i < (c->shown ? 13 : 10); i++)
    if (!rft_same_output(p, q, outputs[i]))
      fail_msg("%s, %s, %s%s%s: %s has other bits", rfr_recipe_name(c->recipe), rfr_dtype_name(c->type),
               c->layernorm ? "layernorm" : "rmsnorm", c->shown ? ", shown" : "", c->high ? ", high backward" : "",
               outputs[i]);
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(t);
}

static void bits(void **state) {
  (void)state;
  static const rfr_recipe_kind recipes[] = {RFR_RECIPE_NONE, RFR_RECIPE_FP8_CURRENT, RFR_RECIPE_FP8_DELAYED,
                                            RFR_RECIPE_FP8_BLOCK, RFR_RECIPE_MXFP8};
  for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++)
    for (int k = 0; k < 32; k++)
      check(&(cell){.recipe = recipes[r],
                    .type = k % 2 ? RFR_BF16 : RFR_F32,
                    .layernorm = k / 2 % 2,
                    .shown = k / 4 % 2,
                    .high = k / 8 % 2,
                    .recompute = k / 16 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP});
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(bits)};
  return cmocka_run_group_tests_name("fuse_quantize", tests, NULL, NULL);
}
