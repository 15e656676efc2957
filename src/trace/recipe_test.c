/* SPDX-License-Identifier: Apache-2.0
 *
 * Recipes in a trace: which calls get a label, nested scopes, patterns, allowed recipes, and the text of labels.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/context.h"
#include "support/text.h"
#include "trace/trace.h"

static rfr_value input(rfr_trace *t, const char *name, rfr_role role, int64_t m, int64_t n) {
  return rfr_input(t, name, role, RFR_F32, 2, ((int64_t[]){m, n}));
}

static rfi_label last_label(const rfr_trace *t) { return t->ops[t->n_ops - 1].label; }

static void scopes(void **state) {
  (void)state;
  const char *const keep[] = {"*.head"};
  rfr_recipe outer = rfr_recipe_default(RFR_RECIPE_FP8_BLOCK), inner = rfr_recipe_default(RFR_RECIPE_MXFP8);
  outer.keep = keep, outer.n_keep = 1;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = input(t, "x", RFR_ROLE_INPUT, 16, 32), w = input(t, "a.w", RFR_ROLE_TRAINABLE, 32, 32);
  const rfr_value head = input(t, "a.head", RFR_ROLE_TRAINABLE, 48, 32);
  rfr_linear(t, x, w, RFR_NONE);
  assert_int_equal(last_label(t).recipe, 0);
  rfr_recipe_begin(t, &outer);
  rfr_value h = rfr_linear(t, x, w, RFR_NONE);
  assert_int_equal(last_label(t).recipe, 1);
  assert_int_equal(last_label(t).linear, 0);
  rfr_recipe_begin(t, &inner);
  h = rfr_linear(t, h, w, RFR_NONE);
  assert_int_equal(last_label(t).recipe, 2);
  assert_int_equal(last_label(t).linear, 1);
  rfr_recipe_begin(t, NULL);
  h = rfr_linear(t, h, w, RFR_NONE);
  assert_int_equal(last_label(t).recipe, 0);
  rfr_recipe_end(t);
  rfr_recipe_end(t);
  rfr_linear(t, h, rfr_reshape(t, head, 2, ((int64_t[]){48, 32})), RFR_NONE); /* the weight is found through the view */
  assert_int_equal(last_label(t).recipe, RFI_RECIPE_KEEP);
  rfr_matmul(t, h, h, RFR_NONE, 1, 0, RFR_F32); /* the first operand is transposed, so this is not a linear */
  assert_int_equal(last_label(t).recipe, 0);
  rfr_gelu(t, h, 0);
  assert_int_equal(last_label(t).recipe, 0);
  rfr_recipe_end(t);
  OK(rfr_trace_status(t));
  rfr_recipe_end(t);
  assert_int_equal(rfr_trace_status(t), RFR_INVALID);
  rfr_trace_destroy(t);
}

/* Refused: weights that are trained in FP8, and inputs that are already quantized. */
static void quantized_operands(void **state) {
  (void)state;
  for (int of_weight = 0; of_weight < 2; of_weight++) {
    const rfr_recipe fp8 = rfr_recipe_default(RFR_RECIPE_FP8_CURRENT);
    const int64_t x_shape[] = {16, 32}, w_shape[] = {48, 32};
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_recipe_begin(t, &fp8);
    const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, of_weight ? RFR_BF16 : RFR_E4M3, 2, x_shape);
    const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, of_weight ? RFR_E4M3 : RFR_BF16, 2, w_shape);
    OK(rfr_trace_status(t));
    rfr_linear(t, x, w, RFR_NONE);
    assert_int_equal(rfr_trace_status(t), RFR_INVALID);
    assert_non_null(strstr(rfr_last_error()->message, "e4m3"));
    assert_non_null(strstr(rfr_last_error()->message, "rfr_matmul_scaled"));
    rfr_trace_destroy(t);
  }
}

static void refused(void **state) {
  (void)state;
  static const struct {
    rfr_recipe r;
    const char *says;
  } cases[] = {
      {{.size = 1}, "size is 1"},
      {{.kind = (rfr_recipe_kind)6}, "not a recipe"},
      {{.kind = RFR_RECIPE_FP8_CURRENT, .history = 4}, "only fp8_delayed"},
      {{.kind = RFR_RECIPE_FP8_CURRENT, .margin = 1}, "only fp8_delayed"},
      {{.kind = RFR_RECIPE_FP8_CURRENT, .rule = RFR_AMAX_MOST_RECENT}, "only fp8_delayed"},
      {{.kind = RFR_RECIPE_FP8_DELAYED}, "history must be 1 to 4096"},
      {{.kind = RFR_RECIPE_FP8_DELAYED, .history = 4097}, "history must be 1 to 4096"},
      {{.kind = RFR_RECIPE_FP8_DELAYED, .history = 1, .margin = 17}, "margin"},
      {{.kind = RFR_RECIPE_NVFP4, .format = RFR_RECIPE_FORMAT_HYBRID}, "one format"},
      {{.kind = RFR_RECIPE_MXFP8, .powers_of_two = 1}, "powers_of_two"},
      {{.kind = RFR_RECIPE_MXFP8, .high_backward = 2}, "0 nor 1"},
      {{.kind = RFR_RECIPE_MXFP8, .n_keep = 1}, "keep is NULL"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_recipe r = cases[i].r;
    if (r.size == 0) r.size = sizeof r;
    assert_int_equal(rfr_recipe_check(&r), RFR_INVALID);
    if (!strstr(rfr_last_error()->message, cases[i].says)) fail_msg("%zu: %s", i, rfr_last_error()->message);
  }
  for (int kind = RFR_RECIPE_NONE; kind <= RFR_RECIPE_NVFP4; kind++) {
    const rfr_recipe r = rfr_recipe_default((rfr_recipe_kind)kind);
    OK(rfr_recipe_check(&r));
  }
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  for (int i = 0; i < RFI_MAX_RECIPE_SCOPES; i++) rfr_recipe_begin(t, NULL);
  OK(rfr_trace_status(t));
  rfr_recipe_begin(t, NULL);
  assert_int_equal(rfr_trace_status(t), RFR_INVALID);
  rfr_trace_destroy(t);
}

/* One linear with each recipe; every field differs from its default. */
static void text(void **state) {
  (void)state;
  rfr_trace *t, *again;
  OK(rfr_trace_create(ctx, &t));
  const char *const keep[] = {"kept"};
  const rfr_value x = input(t, "x", RFR_ROLE_INPUT, 16, 32), w = input(t, "w", RFR_ROLE_TRAINABLE, 32, 32);
  const rfr_value kept = input(t, "kept", RFR_ROLE_TRAINABLE, 32, 32);
  for (int kind = RFR_RECIPE_FP8_DELAYED; kind <= RFR_RECIPE_NVFP4; kind++)
    for (int other = 0; other < 2; other++) {
      rfr_recipe r = rfr_recipe_default((rfr_recipe_kind)kind);
      r.high_backward = other;
      if (other && kind == RFR_RECIPE_FP8_DELAYED) r.margin = 3, r.history = 17, r.rule = RFR_AMAX_MOST_RECENT;
      if (other && kind != RFR_RECIPE_NVFP4)
        r.format = r.format == RFR_RECIPE_FORMAT_E4M3 ? RFR_RECIPE_FORMAT_HYBRID : RFR_RECIPE_FORMAT_E4M3;
      if (other && kind == RFR_RECIPE_FP8_CURRENT) r.powers_of_two = 1;
      r.keep = keep, r.n_keep = 1;
      rfr_recipe_begin(t, &r);
      rfr_linear(t, x, w, RFR_NONE);
      rfr_linear(t, x, kept, RFR_NONE);
      rfr_recipe_end(t);
    }
  OK(rfr_trace_finish(t));
  assert_int_equal(t->n_recipes, 10);
  rft_text out = {0};
  rfr_print_options o = rfr_print_options_default();
  o.flat = 1;
  OK(rfr_trace_print(t, &o, rft_text_add, &out));
  OK(rfr_trace_parse(ctx, "again", out.data, out.n, &again));
  assert_true(rfr_trace_equal(t, again));
  again->ops[0].label.linear++;
  assert_false(rfr_trace_equal(t, again));
  again->ops[0].label.linear--;
  again->recipes[0].margin++;
  assert_false(rfr_trace_equal(t, again));
  rfr_trace_destroy(again);
  static const char *const bad[][2] = {{"fp8_delayed format", "fp9 format"},
                                       {"history=1024", "history=4097"},
                                       {"margin=0", "margin=x"},
                                       {" linear=0", ""},
                                       {"backward=quantized", "backward="},
                                       {"linear=0", "linear=-1"},
                                       {"recipe=\"keep\"", "recipe=\"kee\""}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    char *at = strstr(out.data, bad[i][0]);
    assert_non_null(at);
    rft_text changed = {0};
    rft_text_add(out.data, (size_t)(at - out.data), &changed);
    rft_text_add(bad[i][1], strlen(bad[i][1]), &changed);
    at += strlen(bad[i][0]);
    rft_text_add(at, out.n - (size_t)(at - out.data), &changed);
    assert_int_equal(rfr_trace_parse(ctx, "bad", changed.data, changed.n, &again), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "trace.parse");
    free(changed.data);
  }
  free(out.data);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(scopes), rft_context_test(quantized_operands),
                                     rft_context_test(refused), rft_context_test(text)};
  return cmocka_run_group_tests_name("recipe", tests, NULL, NULL);
}
