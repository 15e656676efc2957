/* SPDX-License-Identifier: Apache-2.0
 *
 * A layer of experts composed of its ops, in one program, with routing weights applied between or after the expert
 * GEMMs: every routing, replayed, against each token alone in double; with equal experts the result is that of one
 * expert; two runs are bitwise equal. Refusals of the ops name the mismatch.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "refrain/refrain.h"
#include "support/context.h"

enum { T = 37, E = 5, K = 2, C = 12, I = 7, REPLAYS = 6 };

static float *input_of(rfr_programs *p, const char *name) {
  rfr_tensor x;
  OK(rfr_programs_tensor(p, name, &x));
  return x.data;
}
static const void *output_of(rfr_programs *p, const char *name) {
  rfr_tensor x;
  OK(rfr_program_output(p, 0, name, &x));
  return x.data;
}

/* y (T,C) of x (T,C), logits (T,E), and the gradients of x and of both weights. */
static rfr_programs *make(bool between) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, (int64_t[]){T, C});
  const rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, (int64_t[]){T, E});
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 3, (int64_t[]){E, 2 * I, C});
  const rfr_value v = rfr_input(t, "v", RFR_ROLE_TRAINABLE, RFR_F32, 3, (int64_t[]){E, C, I});
  rfr_value index, order, place;
  const rfr_value weight = rfr_moe_route(t, logits, RFR_NONE, NULL, &index);
  const rfr_value splits = rfr_moe_sort(t, index, E, &order, &place);
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, T * K, NULL);
  rfr_value h = rfr_moe_permute(t, x, order, place, RFR_NONE);
  h = rfr_grouped_linear(t, h, w, offsets, RFR_NONE, RFR_NONE);
  const rfr_value gate = rfr_slice(t, h, 1, 0, I), up = rfr_slice(t, h, 1, I, I);
  h = between ? rfr_swiglu_weighted(t, gate, up, rfr_moe_row_weight(t, weight, order, place)) : rfr_swiglu(t, gate, up);
  h = rfr_grouped_linear(t, h, v, offsets, RFR_NONE, RFR_NONE);
  const rfr_value y = rfr_moe_unpermute(t, h, order, place, between ? RFR_NONE : weight);
  const rfr_value loss = rfr_sum(t, rfr_mul(t, y, y), -1);
  rfr_output(t, "y", y);
  rfr_output(t, "index", index);
  rfr_output(t, "dx", rfr_gradient(t, loss, x, RFR_F32));
  rfr_output(t, "dlogits", rfr_gradient(t, loss, logits, RFR_F32));
  rfr_output(t, "dw", rfr_gradient(t, loss, w, RFR_F32));
  rfr_output(t, "dv", rfr_gradient(t, loss, v, RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rfr_trace_destroy(t);
  return p;
}

/* Expert e's result for one token, in double. */
static void expert(const float *w, const float *v, const float *x, int e, double *y) {
  double h[I];
  for (int i = 0; i < I; i++) {
    double gate = 0, up = 0;
    for (int j = 0; j < C; j++) {
      gate += (double)w[(e * 2 * I + i) * C + j] * x[j];
      up += (double)w[(e * 2 * I + I + i) * C + j] * x[j];
    }
    h[i] = gate / (1 + exp(-gate)) * up;
  }
  for (int j = 0; j < C; j++) {
    y[j] = 0;
    for (int i = 0; i < I; i++) y[j] += (double)v[(e * C + j) * I + i] * h[i];
  }
}

/* Logits with which all tokens choose the same two experts, any experts, or all scores are equal. */
static void choose(float *logits, int kind) {
  for (int i = 0; i < T * E; i++) {
    const float draw = (float)((i * 2654435761u + (unsigned)kind * 40503u) >> 8 & 0xFFFF) / 32768.0f - 1;
    logits[i] = kind == 0 ? (i % E == 3 ? 4.0f : i % E == 1 ? 3.0f : -4.0f) : kind == 1 ? 0.25f : draw;
  }
}

static void check_replays(bool between) {
  rfr_programs *p = make(between);
  float *x = input_of(p, "x"), *logits = input_of(p, "logits"), *w = input_of(p, "w"), *v = input_of(p, "v");
  const float *y = output_of(p, "y");
  const int32_t *index = output_of(p, "index");
  static const char *const results[] = {"y", "index", "dx", "dlogits", "dw", "dv"};
  rft_fill_inputs(p);
  OK(rfr_program_capture(p, 0));
  for (int kind = 0; kind < REPLAYS; kind++) {
    choose(logits, kind);
    OK(rfr_program_replay(p, 0, NULL, 0));
    for (int t = 0; t < T; t++) {
      double want[C] = {0}, one[C], score[K], sum = 0;
      for (int k = 0; k < K; k++) sum += score[k] = exp(logits[t * E + index[t * K + k]]);
      for (int k = 0; k < K; k++) {
        expert(w, v, x + t * C, index[t * K + k], one);
        for (int j = 0; j < C; j++) want[j] += score[k] / sum * one[j];
      }
      for (int j = 0; j < C; j++) assert_true(fabs(y[t * C + j] - want[j]) < 1e-5);
    }
    if (kind == 0) assert_true(index[0] == 3 && index[1] == 1);
    if (kind == 1) assert_true(index[0] == 0 && index[1] == 1); /* equal scores: the smaller indices */
    /* eager results are bitwise equal */
    void *before[6];
    rfr_tensor r[6];
    for (int i = 0; i < 6; i++) {
      OK(rfr_program_output(p, 0, results[i], &r[i]));
      before[i] = malloc((size_t)r[i].bytes);
      assert_non_null(before[i]);
      memcpy(before[i], r[i].data, (size_t)r[i].bytes);
      memset(r[i].data, 0xFF, (size_t)r[i].bytes);
    }
    OK(rfr_program_run(p, 0));
    for (int i = 0; i < 6; i++) {
      assert_memory_equal(before[i], r[i].data, (size_t)r[i].bytes);
      free(before[i]);
    }
  }
  rfr_programs_destroy(p);
}

static void equals_single_tokens(void **state) {
  (void)state;
  check_replays(false);
  check_replays(true);
}

/* Routing weights applied between or after the expert GEMMs: all gradients agree up to rounding. */
static void weights_before_or_after(void **state) {
  (void)state;
  static const char *const results[] = {"y", "dx", "dlogits", "dw", "dv"};
  rfr_programs *p[2] = {make(false), make(true)};
  for (int k = 0; k < 2; k++) {
    rft_fill_inputs(p[k]);
    choose(input_of(p[k], "logits"), 2);
    OK(rfr_program_run(p[k], 0));
  }
  for (int i = 0; i < 5; i++) {
    rfr_tensor a, b;
    double largest = 0;
    OK(rfr_program_output(p[0], 0, results[i], &a));
    OK(rfr_program_output(p[1], 0, results[i], &b));
    for (int64_t n = 0; n < a.bytes / 4; n++) largest = fmax(largest, fabs(((float *)a.data)[n]));
    assert_true(largest > 0);
    for (int64_t n = 0; n < a.bytes / 4; n++)
      assert_true(fabs((double)((float *)a.data)[n] - ((float *)b.data)[n]) <= 4e-6 * largest);
  }
  rfr_programs_destroy(p[0]);
  rfr_programs_destroy(p[1]);
}

/* Weights are moved to the rows of their slots, and their gradients back, bitwise. A row without a slot has weight 0, a
 * slot without a row has gradient 0. */
static void row_weights(void **state) {
  (void)state;
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  for (int k = 0; k < 3; k++) {
    rfr_trace *t;
    rfr_value order, place;
    rfr_tensor x[6];
    OK(rfr_trace_create(ctx, &t));
    const rfr_value index = rfr_input(t, "index", RFR_ROLE_INPUT, RFR_I32, 2, (int64_t[]){T, K});
    const rfr_value weight = rfr_input(t, "weight", RFR_ROLE_INPUT_GRAD, types[k], 2, (int64_t[]){T, K});
    const rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, types[k], 1, (int64_t[]){T * K});
    rfr_moe_sort(t, index, E, &order, &place);
    const rfr_value rows = rfr_moe_row_weight(t, weight, order, place);
    rfr_output(t, "rows", rows);
    rfr_output(t, "order", order);
    rfr_output(t, "place", place);
    rfr_output(t, "d", rfr_gradient(t, rfr_sum(t, rfr_cast(t, rfr_mul(t, rows, r), RFR_F32), -1), weight, types[k]));
    OK(rfr_trace_finish(t));
    rfr_programs *p = rft_compile(t, NULL);
    rfr_trace_destroy(t);
    const size_t size = (size_t)rfr_dtype_bits(types[k]) / 8;
    OK(rfr_programs_tensor(p, "index", &x[0]));
    int used = 0;
    for (int i = 0; i < T * K; i++) used += (((int32_t *)x[0].data)[i] = i % 5 == 3 ? -1 : i * 7 % E) >= 0;
    OK(rfr_programs_tensor(p, "weight", &x[0]));
    OK(rfr_programs_tensor(p, "r", &x[1]));
    for (int i = 0; i < 2 * T * K; i++) { /* rounded to 8 bits */
      const uint32_t bits = rfr_float_to_bits(types[k], (float)(1 + i) * (i % 2 ? -1 : 1));
      memcpy((char *)x[i % 2].data + (size_t)(i / 2) * size, &bits, size);
    }
    OK(rfr_program_run(p, 0));
    static const char *const outputs[] = {"rows", "d", "order", "place"};
    for (int i = 0; i < 4; i++) OK(rfr_program_output(p, 0, outputs[i], &x[2 + i]));
    assert_true(x[2].type.rank == 1 && x[2].type.dtype == types[k] && x[3].type.rank == 2);
    static const char zero[4];
    for (int i = 0; i < T * K; i++) {
      const int32_t slot = ((int32_t *)x[4].data)[i], row = ((int32_t *)x[5].data)[i];
      assert_true((slot < 0) == (i >= used) && (slot < 0 || ((int32_t *)x[5].data)[slot] == i));
      const char *const weight_of = slot < 0 ? zero : (char *)x[0].data + (size_t)slot * size;
      const char *const gradient_of = row < 0 ? zero : (char *)x[1].data + (size_t)row * size;
      assert_memory_equal((char *)x[2].data + (size_t)i * size, weight_of, size);
      assert_memory_equal((char *)x[3].data + (size_t)i * size, gradient_of, size);
    }
    rfr_programs_destroy(p);
  }
}

/* Steps whose splits come from the caller: valid, negative, too large, valid again. An invalid step changes no weight
 * and is reported with layer and group; the next one is bitwise equal to a run without it. */
static void bad_splits_skip_a_step(void **state) {
  (void)state;
  enum { LAYERS = 3, G = 4, R = 10, D = 6, SLOTS = 4 };
  static const int64_t good[2][G] = {{1, 4, 0, 5}, {3, 3, 2, 1}};
  static const struct {
    int layer, group;
    int64_t value;
  } bad[] = {{0, 2, -1}, {2, 3, 100}, {1, 0, INT64_MIN}, {1, 1, INT64_MAX}};
  float after[2][LAYERS * G * D * D];
  for (int with = 0; with < 2; with++) {
    rfr_trace *t;
    rfr_value w[LAYERS], splits[LAYERS], flags[LAYERS], g[LAYERS], skip, which, group;
    rfr_tensor x;
    char name[16];
    OK(rfr_trace_create(ctx, &t));
    rfr_value h = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){R, D}), step = rfr_step_block(t);
    for (int l = 0; l < LAYERS; l++) {
      snprintf(name, sizeof name, "w%d", l);
      w[l] = rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 3, (int64_t[]){G, D, D});
      snprintf(name, sizeof name, "splits%d", l);
      splits[l] = rfr_input(t, name, RFR_ROLE_INPUT, RFR_I64, 1, (int64_t[]){G});
      const rfr_value offsets = rfr_splits_to_offsets(t, splits[l], R, &flags[l]);
      h = rfr_add(t, h, rfr_grouped_linear(t, h, w[l], offsets, RFR_NONE, RFR_NONE));
    }
    const rfr_value loss = rfr_sum(t, rfr_mul(t, h, h), -1), lr = rfr_lr_schedule(t, step, NULL);
    for (int l = 0; l < LAYERS; l++) g[l] = rfr_gradient(t, loss, w[l], RFR_F32);
    rfr_grad_norm(t, LAYERS, g, &skip);
    skip = rfr_skip_bad(t, skip, LAYERS, flags, &which, &group);
    for (int l = 0; l < LAYERS; l++) rfr_sgd(t, w[l], g[l], RFR_NONE, RFR_NONE, lr, RFR_NONE, skip, 0.0, 0.0, 1.0);
    const rfr_value metrics[3] = {skip, which, group};
    rfr_metrics_write(t, rfr_input(t, "metrics", RFR_ROLE_STATE, RFR_F64, 2, (int64_t[]){SLOTS, 4}), step, 3, metrics);
    rfr_step_end(t, step, skip);
    OK(rfr_trace_finish(t));
    rfr_programs *p = rft_compile(t, NULL);
    rfr_trace_destroy(t);
    rft_fill_inputs(p);
    OK(rfr_programs_tensor(p, "step", &x));
    memset(x.data, 0, (size_t)x.bytes);
    OK(rfr_program_capture(p, 0));
    for (int i = 0, done = 0; i < 2 + (with ? 4 : 0); i++) {
      const bool is_bad = with && i > 0 && i < 5;
      for (int l = 0; l < LAYERS; l++) {
        snprintf(name, sizeof name, "splits%d", l);
        OK(rfr_programs_tensor(p, name, &x));
        memcpy(x.data, good[i > 0], sizeof good[0]);
        if (is_bad && l == bad[i - 1].layer) ((int64_t *)x.data)[bad[i - 1].group] = bad[i - 1].value;
      }
      OK(rfr_program_replay(p, 0, NULL, 0));
      OK(rfr_programs_tensor(p, "metrics", &x));
      const double *m = (const double *)x.data + i % SLOTS * 4;
      assert_true(m[0] == i + 1 && m[1] == is_bad);
      assert_true(m[2] == (is_bad ? bad[i - 1].layer + 1 : 0) && m[3] == (is_bad ? bad[i - 1].group : 0));
      done += !is_bad;
      OK(rfr_programs_tensor(p, "step", &x));
      assert_true(((int64_t *)x.data)[0] == i + 1 && ((int64_t *)x.data)[1] == done);
    }
    for (int l = 0; l < LAYERS; l++) {
      snprintf(name, sizeof name, "w%d", l);
      OK(rfr_programs_tensor(p, name, &x));
      memcpy(after[with] + l * G * D * D, x.data, (size_t)x.bytes);
    }
    rfr_programs_destroy(p);
  }
  assert_memory_equal(after[0], after[1], sizeof after[0]);
}

/* Routings and losses with wrong operands. */
static void refuses(void **state) {
  (void)state;
  static const char *const texts[] = {"k is 6",
                                      "does not match this library",
                                      "groups is 3",
                                      "score is 7",
                                      "x has 37 rows; it must have 36",
                                      "and 0 experts",
                                      "shape must be [37]",
                                      "weight and place",
                                      "shape must be [37]",
                                      "rank"};
  for (int k = 0; k < 10; k++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){T, C});
    const rfr_value logits = rfr_input(t, "logits", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){k == 4 ? T - 1 : T, E});
    const rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){T - 1});
    rfr_moe_options o = rfr_moe_options_default();
    rfr_value index, order, place;
    if (k == 0) o.k = 6;
    if (k == 1) o.size = 8;
    if (k == 2) o.groups = 3;
    if (k == 3) o.score = (rfr_moe_score)7;
    rfr_moe_route(t, logits, RFR_NONE, &o, &index);
    rfr_moe_sort(t, index, k == 5 ? 0 : E, &order, &place);
    rfr_moe_permute(t, x, order, place, RFR_NONE);
    if (k == 6) rfr_moe_loss(t, logits, index, targets, 0, 1.0, 0.0, -100);
    if (k == 7) rfr_moe_row_weight(t, logits, order, place);
    const rfr_value rows = rfr_input(t, "rows", RFR_ROLE_INPUT, RFR_F32, 1, (int64_t[]){T - (k == 8)});
    if (k == 8) rfr_swiglu_weighted(t, x, x, rows);
    if (k == 9) rfr_swiglu_weighted(t, rows, rows, rows);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    if (!strstr(rfr_last_error()->message, texts[k])) fail_msg("%s", rfr_last_error()->message);
    rfr_trace_destroy(t);
  }
}

/* A NaN, at any position, is chosen only if no number is left. */
static void nan_is_last(void **state) {
  (void)state;
  enum { ROWS = 3 };
  static const float rows[ROWS][E] = {{NAN, 1, 0.5f, 2, 0}, {0, NAN, NAN, NAN, -1}, {NAN, NAN, -INFINITY, NAN, NAN}};
  static const int32_t chosen[ROWS][K] = {{3, 1}, {0, 4}, {2, 0}};
  rfr_trace *t;
  rfr_value index;
  OK(rfr_trace_create(ctx, &t));
  rfr_moe_route(t, rfr_input(t, "logits", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){ROWS, E}), RFR_NONE, NULL, &index);
  rfr_output(t, "index", index);
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rfr_trace_destroy(t);
  memcpy(input_of(p, "logits"), rows, sizeof rows);
  OK(rfr_program_run(p, 0));
  assert_memory_equal(output_of(p, "index"), chosen, sizeof chosen);
  rfr_programs_destroy(p);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(equals_single_tokens), rft_context_test(weights_before_or_after), rft_context_test(row_weights),
      rft_context_test(nan_is_last),          rft_context_test(bad_splits_skip_a_step),  rft_context_test(refuses)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
