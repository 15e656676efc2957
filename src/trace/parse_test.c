/* SPDX-License-Identifier: Apache-2.0
 *
 * The text of a trace: a printed trace parses back to an equal one; invalid text is refused, and the error names the
 * line.
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
#include "refrain/ops.h"
#include "support/trace_sample.h"
#include "trace/trace.h"
static void test_round_trip(void **state) {
  (void)state;
  rfr_trace *t = rft_trace_sample(), *back;
  rft_text first = {0}, second = {0};
  rft_trace_print(t, 1, &first);
  assert_int_equal(rfr_trace_parse(ctx, "sample", first.data, first.n, &back), RFR_OK);
  assert_true(rfr_trace_equal(t, back));
  rft_trace_print(back, 1, &second);
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

/* Cuts off every line, and replaces every byte of the text: the result is refused or has the same meaning, never a
 * crash. */
static void test_parse_damaged(void **state) {
  (void)state;
  rfr_trace *t = rft_trace_sample(), *back;
  rft_text text = {0};
  rft_trace_print(t, 1, &text);
  char *copy = malloc(text.n + 1);
  int refused = 0;
  for (size_t i = 0; i < text.n; i++) {
    memcpy(copy, text.data, text.n);
    copy[i] = copy[i] == '7' ? '9' : '7';
    rfr_status s = rfr_trace_parse(ctx, "damaged", copy, text.n, &back);
    assert_true((s == RFR_OK) == (back != NULL));
    refused += s != RFR_OK;
    rfr_trace_destroy(back);
    if (i % 7) continue;
    s = rfr_trace_parse(ctx, "cut", text.data, i, &back);
    rfr_trace_destroy(back);
  }
  assert_true(refused > (int)text.n / 4);
  rfr_trace_destroy(t);
  free(text.data);
  free(copy);
}

/* A view in another type: offset and strides count its own elements. */
static void test_bytes_as(void **state) {
  static const char *const lines = "refrain-trace 1\ninput %0 \"q\" frozen u8[36]\n"
                                   "%1 f32[1]@%0+8{1} = bytes_as(%0) to=f32 start=32 shape=[1] phase=load\n"
                                   "%2 e4m3[2,16]@%0 = bytes_as(%0) to=e4m3 start=0 shape=[2,16] phase=load\n"
                                   "%3 e4m3[16,2] = transposed(%2) phase=load\n";
  rfr_trace *t, *back;
  rft_text text = {0};
  (void)state;
  assert_int_equal(rfr_trace_parse(ctx, "stored", lines, strlen(lines), &t), RFR_OK);
  assert_int_equal(t->values[1].offset, 8);
  rft_trace_print(t, 1, &text);
  assert_int_equal(rfr_trace_parse(ctx, "printed", text.data, text.n, &back), RFR_OK);
  assert_true(rfr_trace_equal(t, back));
  free(text.data);
  rfr_trace_destroy(t);
  rfr_trace_destroy(back);
}

#define ROPE                                                                                      \
  "refrain-trace 1\ninput %0 \"x\" input f32[2,1,4]\ninput %1 \"p\" input i32[2]\n%2 f32[2,1,4] " \
  "= rope_table(%0, %1) "
#define STORED "refrain-trace 1\ninput %0 \"q\" frozen u8[36]\n"
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
      {"refrain-trace 1\n%0 f32[3] = fill() value=1 to=f32 shape=[2] phase=forward\n", "differs from the inferred"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2]\n", "phase is missing"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 shape=[2] phase=forward\n", "attribute is missing"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 value=1 to=f32 shape=[2] phase=forward\n", "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward phase=forward\n", "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward mb=1 mb=1\n", "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward scope=\"\" scope=\"\"\n",
       "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward policy=keep policy=keep\n",
       "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward token=-1 token=-1\n", "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward clone_of=-1 clone_of=-1\n",
       "given twice"},
      {"refrain-trace 1\n%0 f32[2] = fill() value=1 to=f32 shape=[2] phase=forward effects= effects=\n", "given twice"},
      {"refrain-trace 1\ninput %0 \"x\" input f32[4294967296,4294967296]\n", "the size overflows"},
      {"refrain-trace 1\ninput %0 \"x\" input f32[4294967296,2147483648,0]\n", "the size overflows"},
      {"refrain-trace 1\ninput %0 \"x\" input f32[4294967296,1]\ninput %1 \"y\" input f32[4294967296,1]\n"
       "%2 f32[4294967296,4294967296] = matmul(%0, %1, _, _) ta=0 tb=1 to=f32 phase=forward\n",
       "overflows"},
      {"refrain-trace 1\noutput \"y\" %0\n", "not a value of this trace"},
      {ROPE "inverse=0 scale=1 frequency=1 phase=forward\n", "expected a list"},
      {ROPE "inverse=0 scale=1 frequency=[1 2] phase=forward\n", "expected , between numbers"},
      {ROPE "inverse=0 scale=1 frequency=[1,] phase=forward\n", "expected a number"},
      {ROPE "inverse=0 scale=1 frequency=[1,2\n", "expected , between numbers"},
      {ROPE "inverse=0 scale=1 frequency=[] phase=forward\n", "0 frequencies"},
      {ROPE "inverse=0 scale=1 frequency=[1,2,3] phase=forward\n", "3 frequencies"},
      {ROPE "inverse=0 scale=0 frequency=[1,2] phase=forward\n", "scale is 0"},
      {STORED "%1 f32[1] = bytes_as(%0) to=f32 start=30 shape=[1] phase=load\n", "not an element of f32"},
      {STORED "%1 f32[2] = bytes_as(%0) to=f32 start=32 shape=[2] phase=load\n", "the values need 40"},
      {STORED "%1 i32[1] = bytes_as(%0) to=i32 start=32 shape=[1] phase=load\n", "to is i32"},
      {STORED "%1 e4m3[37] = bytes_as(%0) to=e4m3 start=0 shape=[37] phase=load\n", "the values need 37"},
      {STORED "%1 u8[1,36] = transposed(%0) phase=load\n", "rank"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_trace *t;
    assert_int_not_equal(rfr_trace_parse(ctx, "f", cases[i].text, strlen(cases[i].text), &t), RFR_OK);
    if (!strstr(rfr_last_error()->message, cases[i].message))
      fail_msg("\"%s\" is not in \"%s\"", cases[i].message, rfr_last_error()->message);
    assert_null(t);
  }
}

/* The memory for a text is linear in its length, whatever is repeated on a line. */
static void test_parse_memory(void **state) {
  (void)state;
  enum { REPEATS = 20000, PER_BYTE = 200 };
  static const char *const lines[][2] = {{"input %0 \"x\" input f32[2]\n%1 f32[2] = add(%0, %0) ", "scope=\"\" "},
                                         {"", "_ \"\" f32[2]@%0, "},
                                         {"%0 f32[2] = concat(", "_, "}};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    rft_text text = {0};
    rfr_ctx_stats stats;
    rfr_trace *t;
    rft_text_add("refrain-trace 1\n", 16, &text);
    rft_text_add(lines[i][0], strlen(lines[i][0]), &text);
    for (int k = 0; k < REPEATS; k++) rft_text_add(lines[i][1], strlen(lines[i][1]), &text);
    assert_int_not_equal(rfr_trace_parse(ctx, "f", text.data, text.n, &t), RFR_OK);
    stats = rfr_ctx_get_stats(ctx);
    if (stats.peak_bytes > (int64_t)text.n * PER_BYTE)
      fail_msg("%lld bytes for %zu of text", (long long)stats.peak_bytes, text.n);
    free(text.data);
  }
}

static void test_null(void **state) {
  (void)state;
  rfr_trace *t = rft_trace_sample(), *back;
  assert_int_equal(rfr_trace_parse(ctx, "f", "", 0, NULL), RFR_INVALID);
  assert_int_equal(rfr_trace_parse(ctx, "f", NULL, 4, &back), RFR_INVALID);
  assert_null(back);
  assert_int_equal(rfr_trace_parse(ctx, NULL, "refrain-trace 2", 15, &back), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "trace:1: "));
  assert_int_equal(rfr_trace_create(ctx, NULL), RFR_INVALID);
  assert_int_equal(rfr_trace_print(t, NULL, NULL, NULL), RFR_INVALID);
  assert_int_equal(rfr_trace_diff(t, t, NULL, NULL), RFR_INVALID);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_round_trip),   rft_context_test(test_bytes_as),     rft_context_test(test_parse_damaged),
      rft_context_test(test_parse_errors), rft_context_test(test_parse_memory), rft_context_test(test_null),
  };
  return cmocka_run_group_tests_name("parse", tests, NULL, NULL);
}
