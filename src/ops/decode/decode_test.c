/* SPDX-License-Identifier: Apache-2.0
 *
 * Text generation beyond the op matrix: draws have the frequencies given by the logits; a text taken in chunks of any
 * size leaves the same caches; wrong shapes are refused when recorded.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "ops/decode/cursor.h"
#include "refrain/ops.h"
#include "refrain/program.h"

static void *tensor(rfr_programs *p, const char *name) {
  rfr_tensor x;
  assert_int_equal(rfr_programs_tensor(p, name, &x), RFR_OK);
  return x.data;
}

static rfr_programs *compile(rfr_ctx *ctx, rfr_trace *t) {
  rfr_programs *p;
  if (rfr_trace_finish(t) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p), RFR_OK);
  rfr_trace_destroy(t);
  return p;
}

static rfr_value vector(rfr_trace *t, const char *name, rfr_role role, rfr_dtype dtype, int64_t n) {
  return rfr_input(t, name, role, dtype, 1, &n);
}

enum { POSITIONS = 4000, V = 4 };

/* Counts how often each token is drawn at positions 1 ... POSITIONS from the same logits. */
static void count_draws(double temperature, int64_t top_k, double top_p, double min_p, int64_t dropped, int seen[V]) {
  rfr_ctx *ctx;
  rfr_trace *t;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value text = vector(t, "text", RFR_ROLE_STATE, RFR_I32, POSITIONS + 1);
  rfr_value cursor = vector(t, "cursor", RFR_ROLE_STATE, RFR_I64, 4);
  rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){1, V}));
  text = rfr_text_append(t, text, logits, cursor, vector(t, "sampling", RFR_ROLE_INPUT, RFR_F64, RFI_SAMPLING_N), 1);
  rfr_text_end(t, cursor, text, 1);
  rfr_programs *p = compile(ctx, t);
  memcpy(tensor(p, "logits"), (float[V]){0.0f, 2.0f, 1.0f, -50.0f}, V * sizeof(float));
  memcpy(tensor(p, "cursor"), (int64_t[4]){0, 1, dropped, 17}, 4 * sizeof(int64_t));
  memcpy(tensor(p, "sampling"), (double[RFI_SAMPLING_N]){temperature, (double)top_k, top_p, min_p, 1.0},
         RFI_SAMPLING_N * sizeof(double));
  assert_int_equal(rfr_program_capture(p, 0), RFR_OK);
  for (int i = 0; i < POSITIONS + 3; i++) assert_int_equal(rfr_program_replay(p, 0, NULL, 0), RFR_OK);
  /* stops at the end of the text */
  assert_memory_equal(tensor(p, "cursor"), ((int64_t[4]){POSITIONS, POSITIONS + 1, dropped, 17}), 4 * sizeof(int64_t));
  memset(seen, 0, V * sizeof *seen);
  for (int i = 1; i <= POSITIONS; i++) seen[((int32_t *)tensor(p, "text"))[i]]++;
  rfr_programs_destroy(p);
  rfr_ctx_destroy(ctx);
}

static void draws(void **state) {
  int seen[V], other[V];
  const double e[3] = {1.0, exp(2.0), exp(1.0)}, total = e[0] + e[1] + e[2], bar = 5 * sqrt(POSITIONS * 0.25);
  (void)state;
  count_draws(1.0, 0, 1.0, 0, 0, seen);
  for (int i = 0; i < 3; i++) assert_true(fabs(seen[i] - POSITIONS * e[i] / total) < bar);
  assert_int_equal(seen[3], 0);
  count_draws(1.0, 0, 1.0, 0, POSITIONS, other); /* the draw's address includes the dropped tokens */
  assert_memory_not_equal(seen, other, sizeof seen);
  count_draws(2.0, 0, 1.0, 0, 0, seen);
  assert_true(fabs(seen[1] - POSITIONS * exp(1.0) / (1 + exp(1.0) + exp(0.5))) < bar);
  count_draws(1.0, 0, 0.8, 0, 0, seen); /* 0.665 + 0.245 reach top_p */
  assert_true(seen[0] == 0 && fabs(seen[2] - POSITIONS * e[2] / (e[1] + e[2])) < bar);
  count_draws(1.0, 2, 1.0, 0, 0, other);
  assert_memory_equal(seen, other, sizeof seen);
  /* relative to the most probable token, the third has e^-1 = 0.37, the first 0.14 */
  count_draws(1.0, 0, 1.0, 0.3, 0, seen);
  assert_memory_equal(seen, other, sizeof seen - sizeof *seen);
  count_draws(1.0, 1, 1.0, 0, 0, seen);
  assert_int_equal(seen[1], POSITIONS);
  count_draws(0.0, 0, 1.0, 0, 0, seen);
  assert_int_equal(seen[1], POSITIONS);
}

/* Writes the rows of x to a cache, `rows` at a time. */
static void chunks(void **state) {
  enum { CAPACITY = 23, KNOWN = 17, HEADS = 2, D = 3 };
  (void)state;
  for (int64_t rows = 1; rows <= 20; rows++) {
    rfr_ctx *ctx;
    rfr_trace *t;
    assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value text = vector(t, "text", RFR_ROLE_STATE, RFR_I32, CAPACITY + 1), positions, last;
    rfr_value cursor = vector(t, "cursor", RFR_ROLE_STATE, RFR_I64, 4);
    rfr_value table = rfr_input(t, "table", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){KNOWN, HEADS * D}));
    rfr_value cache = rfr_input(t, "cache", RFR_ROLE_STATE, RFR_F32, 3, ((int64_t[]){CAPACITY, HEADS, D}));
    rfr_value x = rfr_embedding(t, table, rfr_text_read(t, text, cursor, rows, &positions, &last));
    rfr_cache_write(t, cache, rfr_reshape(t, x, 3, ((int64_t[]){rows, HEADS, D})), cursor);
    rfr_output(t, "last", rfr_embedding(t, x, last));
    rfr_text_end(t, cursor, text, rows);
    rfr_programs *p = compile(ctx, t);
    float *values = tensor(p, "table"), *cached = tensor(p, "cache");
    for (int i = 0; i < KNOWN * HEADS * D; i++) values[i] = (float)(i + 1);
    for (int i = 0; i < KNOWN; i++) ((int32_t *)tensor(p, "text"))[i] = i;
    int64_t *at = tensor(p, "cursor");
    at[1] = KNOWN;
    while (at[1] == KNOWN) assert_int_equal(rfr_program_run(p, 0), RFR_OK);
    assert_true(at[0] == KNOWN && at[1] == KNOWN + 1);
    assert_memory_equal(cached, values, KNOWN * HEADS * D * sizeof *values);
    for (int i = KNOWN * HEADS * D; i < CAPACITY * HEADS * D; i++) assert_true(cached[i] == 0);
    rfr_tensor y;
    assert_int_equal(rfr_program_output(p, 0, "last", &y), RFR_OK);
    assert_memory_equal(y.data, values + (KNOWN - 1) * HEADS * D, HEADS * D * sizeof *values);
    rfr_programs_destroy(p);
    rfr_ctx_destroy(ctx);
  }
}

static void refused(void **state) {
  static const char *const texts[] = {"its shape must be [4]", "has 2 heads of 5",
                                      "logits must be one row of each text", "rows is -1", "its shape must be [5]"};
  rfr_ctx *ctx;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (int k = 0; k < 5; k++) {
    rfr_trace *t;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value text = vector(t, "text", RFR_ROLE_STATE, RFR_I32, 8);
    rfr_value cursor = vector(t, "cursor", RFR_ROLE_STATE, RFR_I64, k == 0 ? 5 : 4);
    rfr_value cache = rfr_input(t, "cache", RFR_ROLE_STATE, RFR_F32, 3, ((int64_t[]){7, 2, 5}));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 3, ((int64_t[]){3, k == 1 ? 5 : 2, k == 1 ? 2 : 5}));
    rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){k == 2 ? 2 : 1, 9}));
    rfr_cache_write(t, cache, x, cursor);
    rfr_value sampling = vector(t, "sampling", RFR_ROLE_INPUT, RFR_F64, k == 4 ? 3 : RFI_SAMPLING_N);
    rfr_text_append(t, text, logits, cursor, sampling, k == 3 ? -1 : 3);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    if (!strstr(rfr_last_error()->message, texts[k])) fail_msg("%d: %s", k, rfr_last_error()->message);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(draws), cmocka_unit_test(chunks), cmocka_unit_test(refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
