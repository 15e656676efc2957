/* SPDX-License-Identifier: Apache-2.0
 *
 * The trace: what is printed reads back equal, whatever is wrong is refused with its
 * place, lifetimes and live bytes are those of a hand count.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "support/context.h"
#include "support/text.h"
#include "trace/live.h"
#include "trace/trace.h"

static void print(const rfr_trace *t, int flat, rft_text *out) {
  rfr_print_options o = rfr_print_options_default();
  o.flat = flat;
  out->n = 0;
  assert_int_equal(rfr_trace_print(t, &o, rft_text_add, out), RFR_OK);
}

/* Two microbatches of a tied embedding model with an optimizer: views, versions, effects,
 * tokens, names that need quoting, absent operands, dead results. */
static rfr_trace *sample(void) {
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){6}));
  rfr_value target = rfr_input(t, "target \"a\\b\"\n", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){6}));
  rfr_value table = rfr_input(t, "table", RFR_ROLE_TRAINABLE, RFR_BF16, 2, ((int64_t[]){11, 8}));
  rfr_value master = rfr_input(t, "table.master", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){11, 8}));
  rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){11, 8}));
  rfr_value v = rfr_input(t, "v", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){11, 8}));
  rfr_value ring = rfr_input(t, "metrics", RFR_ROLE_STATE, RFR_F64, 2, ((int64_t[]){4, 3}));
  rfr_value step = rfr_step_block(t);
  rfr_value inv = rfr_token_count(t, 1, &target, -100, NULL);
  rfr_value loss = RFR_NONE;
  for (int mb = 0; mb < 2; mb++) {
    rfr_microbatch(t, mb);
    rfr_scope(t, "layer0.embed");
    rfr_value half = rfr_slice(t, ids, 0, 3 * mb, 3), want = rfr_slice(t, target, 0, 3 * mb, 3);
    rfr_value h = rfr_embedding(t, table, half);
    rfr_scope(t, "head");
    rfr_value logits = rfr_linear(t, h, table, RFR_NONE);
    rfr_value part = rfr_cross_entropy(t, logits, want, inv, -100);
    loss = mb ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_scope(t, "");
  rfr_value g = rfr_gradient(t, loss, table, RFR_F32), skip;
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_lr_options lr = rfr_lr_options_default();
  rfr_adamw_options adam = rfr_adamw_options_default();
  rfr_value rate = rfr_lr_schedule(t, step, &lr), norm = rfr_grad_norm(t, 1, &g, &skip);
  rfr_adamw(t, table, g, m, v, master, rate, rfr_clip_scale(t, norm, 1), skip, step, &adam);
  rfr_metrics_write(t, ring, step, 2, ((rfr_value[]){loss, norm}));
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", loss);
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  return t;
}

static void test_round_trip(void **state) {
  (void)state;
  rfr_trace *t = sample(), *back;
  rft_text first = {0}, second = {0};
  print(t, 1, &first);
  assert_int_equal(rfr_trace_parse(ctx, "sample", first.data, first.n, &back), RFR_OK);
  assert_true(rfr_trace_equal(t, back));
  print(back, 1, &second);
  assert_string_equal(first.data, second.data);
  assert_non_null(strstr(first.data, "effects=state,host"));
  assert_non_null(strstr(first.data, "scope=\"layer0.embed\""));
  /* any change that parse reads makes them unequal */
  back->ops[back->n_ops - 1].microbatch = 7;
  assert_false(rfr_trace_equal(t, back));
  rfr_trace_destroy(t);
  rfr_trace_destroy(back);
  free(first.data);
  free(second.data);
}

/* Every line cut off, and every byte of the text replaced: refused or equal in meaning, never a crash. */
static void test_parse_damaged(void **state) {
  (void)state;
  rfr_trace *t = sample(), *back;
  rft_text whole = {0};
  print(t, 1, &whole);
  char *copy = malloc(whole.n + 1);
  int refused = 0;
  for (size_t i = 0; i < whole.n; i++) {
    memcpy(copy, whole.data, whole.n);
    copy[i] = copy[i] == '7' ? '9' : '7';
    rfr_status s = rfr_trace_parse(ctx, "damaged", copy, whole.n, &back);
    assert_true((s == RFR_OK) == (back != NULL));
    refused += s != RFR_OK;
    rfr_trace_destroy(back);
    if (i % 7) continue;
    s = rfr_trace_parse(ctx, "cut", whole.data, i, &back);
    rfr_trace_destroy(back);
  }
  assert_true(refused > (int)whole.n / 4);
  rfr_trace_destroy(t);
  free(whole.data);
  free(copy);
}

static void test_parse_errors(void **state) {
  (void)state;
  static const struct {
    const char *text, *message;
  } cases[] = {
      {"", "f:1: the text is empty"},
      {"refrain-trace 2\n", "f:1: expected \"refrain-trace 1\""},
      {"refrain-trace 1\ninput %0 \"x\" input f32[2\n", "f:2: expected , between dimensions"},
      {"refrain-trace 1\ninput %1 \"x\" input f32[2]\n", "numbered"},
      {"refrain-trace 1\ninput %0 \"x\" input f33[2]\n", "unknown element type"},
      {"refrain-trace 1\ninput %0 \"x\" input f32[-2]\n", "dimension 0 is -2"},
      {"refrain-trace 1\ninput %0 \"x\" guest f32[2]\n", "unknown role"},
      {"refrain-trace 1\n%0 f32[2] = nosuch() phase=forward\n", "f:2: unknown op"},
      {"refrain-trace 1\n%0 f32[3] = fill() value=1 to=f32 shape=[2] phase=forward\n", "another type"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2]\n", "phase is missing"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 shape=[2] phase=forward\n", "attribute is missing"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 value=1 to=f32 shape=[2] phase=forward\n", "given twice"},
      {"refrain-trace 1\noutput \"y\" %0\n", "no value of this trace"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_trace *t;
    assert_int_not_equal(rfr_trace_parse(ctx, "f", cases[i].text, strlen(cases[i].text), &t), RFR_OK);
    if (!strstr(rfr_last_error()->message, cases[i].message))
      fail_msg("\"%s\" is not in \"%s\"", cases[i].message, rfr_last_error()->message);
    assert_null(t);
  }
}

static void test_latched_error(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value a = rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){3, 5}));
  rfr_value b = rfr_input(t, "b", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){4, 7}));
  rfr_scope(t, "layer2.mlp");
  int line = __LINE__ + 1;
  rfr_value y = rfr_linear(t, a, b, RFR_NONE);
  assert_int_equal(y, RFR_NONE);
  assert_int_equal(rfr_add(t, y, a), RFR_NONE); /* does not replace the first error */
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  char place[32];
  snprintf(place, sizeof place, "trace_test.c:%d: ", line);
  assert_non_null(strstr(rfr_last_error()->message, place));
  assert_non_null(strstr(rfr_last_error()->message, "layer2.mlp"));
  assert_string_equal(rfr_last_error()->slug, "trace.shape");
  rfr_trace_destroy(t);
}

static void test_names(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 0, NULL);
  rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 0, NULL);
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "trace.name");
  rfr_trace_destroy(t);
}

static void test_stale_version(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value step = rfr_step_block(t);
  rfr_value skip = rfr_fill(t, 0, RFR_I32, 1, ((int64_t[]){1}));
  rfr_step_end(t, step, skip);
  rfr_lr_options lr = rfr_lr_options_default();
  rfr_lr_schedule(t, step, &lr); /* the old step, after its next version was made */
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "trace.stale_version");
  rfr_trace_destroy(t);
}

/* Two equal layers print as one; the bytes are those of a count by hand. */
static void test_pretty(void **state) {
  (void)state;
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value h = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){16, 16}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){16, 16}));
  for (int l = 0; l < 3; l++) {
    char scope[16];
    snprintf(scope, sizeof scope, "layer%d.mlp", l);
    rfr_scope(t, scope);
    h = rfr_linear(t, h, w, RFR_NONE);
  }
  rfr_output(t, "y", h);
  int64_t *live;
  assert_int_equal(rfi_live_bytes(t, &live), RFR_OK);
  assert_int_equal(live[0], 1024);
  assert_int_equal(live[1], 2048);
  assert_int_equal(live[2], 2048);
  rfi_free(ctx, live);
  rft_text out = {0};
  print(t, 0, &out);
  assert_non_null(strstr(out.data, "layer[0..2] {"));
  assert_null(strstr(out.data, "layer[1"));
  assert_non_null(strstr(out.data, "live 1.0 KiB"));
  free(out.data);
  rfr_trace_destroy(t);
}

static void test_diff(void **state) {
  (void)state;
  rfr_trace *a = sample(), *b = sample();
  rft_text out = {0};
  assert_int_equal(rfr_trace_diff(a, b, rft_text_add, &out), RFR_OK);
  assert_int_equal(out.n, 0);
  rfi_attr attr[3];
  memcpy(attr, b->ops[2].attr, sizeof attr);
  attr[1].i++; /* a slice that starts elsewhere */
  b->ops[2].attr = attr;
  assert_int_equal(rfr_trace_diff(a, b, rft_text_add, &out), RFR_OK);
  assert_int_equal(out.data[0], '-');
  assert_non_null(strstr(out.data, "\n+ "));
  int lines = 0;
  for (size_t i = 0; i < out.n; i++) lines += out.data[i] == '\n';
  assert_int_equal(lines, 2);
  free(out.data);
  rfr_trace_destroy(a);
  rfr_trace_destroy(b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_round_trip),    rft_context_test(test_parse_damaged), rft_context_test(test_parse_errors),
      rft_context_test(test_latched_error), rft_context_test(test_names),         rft_context_test(test_stale_version),
      rft_context_test(test_pretty),        rft_context_test(test_diff),
  };
  return cmocka_run_group_tests_name("trace", tests, NULL, NULL);
}
