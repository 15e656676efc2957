/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation with a training set of callables: forwards between two steps. Training is bitwise equal with and without
 * evaluations, with dropout, linked callables, sharded callables, schedules and debug mode.
 */
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"

enum { BLOCKS = 2, STEPS = 3 };

typedef struct result { /* of the training set */
  float y[STEPS][RFT_T * RFT_C], dw[STEPS][RFT_C * 48];
  rfr_rng rng;
} result;

static rfr_binding binding(float *x) {
  return (rfr_binding){NULL, {.dtype = RFR_F32, .rank = 2, .shape = {RFT_T, RFT_C}}, x};
}

static void evaluate(rfr_graphs *g, bool linked, int microbatches) {
  static float x[RFT_T * RFT_C], first[RFT_T * RFT_C], last[RFT_T * RFT_C];
  const rfr_binding in = binding(x);
  rfr_action call;
  rfr_tensor y;
  int n, callable;
  rft_fill_by(&(rfr_tensor){.type = in.type, .data = x}, 9, 1);
  OK(rfr_graphs_begin_evaluation(g, NULL, 0));
  for (int m = 0; m < microbatches; m++)
    for (int i = 0; i < BLOCKS; i++) {
      OK(rfr_graphs_expected(g, &call, &callable));
      assert_true(call.op == RFR_ACTION_F && call.microbatch == m && callable == i);
      OK(rfr_graphs_forward(g, i, m, &in, !(linked && i > 0), &y, 1));
      if (i < BLOCKS - 1) rft_refused(rfr_graphs_end_step(g), "graphs.order", "the step is not complete");
      if (i == BLOCKS - 1) OK(rfr_graphs_read(g, &y, m == 0 ? first : last));
      OK(rfr_graphs_grads_ready(g, NULL, 0, &n));
      assert_int_equal(n, 0);
    }
  rft_refused(rfr_graphs_backward(g, 0, 0, &in, 1, &y, 1), "graphs.order", "the evaluation expects forward");
  OK(rfr_graphs_end_step(g));
}

static void train(const rft_scene *s, int evaluations, bool abort, result *to) {
  static rft_buffers b;
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(s, &schedule);
  rfr_tensor w;
  rft_fill_named(g);
  for (int step = 0; step < STEPS; step++) {
    for (int k = 0; k < evaluations; k++) evaluate(g, s->linked, 1 + k);
    if (abort) {
      OK(rfr_graphs_begin_evaluation(g, NULL, 0));
      OK(rfr_graphs_abort_step(g));
    }
    OK(rfr_graphs_begin_step(g, NULL, 0));
    rft_draw(s, b.x[0][0], step, 0, 1);
    rft_draw(s, b.dx[0][BLOCKS], step, 0, 2);
    for (int i = 0; i < BLOCKS; i++) rft_forward(g, s, &b, i, 0);
    for (int i = BLOCKS - 1; i >= 0; i--) rft_backward(g, s, &b, i, 0);
    OK(rfr_graphs_end_step(g));
    memcpy(to->y[step], b.x[0][BLOCKS], sizeof to->y[step]);
    if (evaluations > 1) evaluate(g, s->linked, 1); /* main gradients are unchanged */
    OK(rfr_graphs_gradient(g, "b0.down", &w));
    OK(rfr_graphs_read(g, &w, to->dw[step]));
  }
  OK(rfr_graphs_get_rng(g, NULL, &to->rng));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

static void test_training_continues(void **state) {
  (void)state;
  static result without, with;
  for (int kind = 0; kind < 8; kind++) {
    rft_scene s = {.block = rft_block_mlp, .blocks = BLOCKS, .microbatches = 1, .dtype = RFR_F32, .fuse = true};
    s.linked = kind & 1, s.eager = kind & 2, s.debug = kind & 4;
    memset(&without, 0, sizeof without);
    memset(&with, 0, sizeof with);
    train(&s, 0, false, &without);
    train(&s, 3, true, &with);
    assert_memory_equal(&without, &with, sizeof with);
    assert_memory_not_equal(with.y[0], with.y[1], sizeof with.y[0]);
  }
}

/* With a schedule of two stages the calls are the same: F of every callable, microbatch by microbatch. */
static void test_schedule(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_mlp,
                       .blocks = BLOCKS,
                       .microbatches = 2,
                       .dtype = RFR_F32,
                       .schedule = "0F0 1F0 0F1 1I0 0I0 1F1 1I1 1W0 0I1 0W0 1W1 0W1",
                       .layers = 1};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  rft_fill_named(g);
  evaluate(g, false, 5);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* A sharded callable gathers in each call, with or without UNSHARD and RESHARD in the schedule. */
static void test_sharded(void **state) {
  (void)state;
  static const char *const texts[] = {
      NULL, "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1REDUCE 1RESHARD 0UNSHARD 0B0 0REDUCE 0RESHARD"};
  static float values[RFT_T * RFT_C], y[3][RFT_T * RFT_C];
  for (int k = 0; k < 3; k++) { /* k = 0: not sharded */
    const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
    rfr_trace *t[BLOCKS] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
    rfr_callable c[BLOCKS] = {rfr_callable_default(), rfr_callable_default()};
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_schedule *schedule = NULL;
    rfr_graphs *g;
    rfr_tensor x;
    rfr_binding in = binding(values);
    if (k == 2) OK(rfr_schedule_parse(ctx, "test", texts[1], strlen(texts[1]), &schedule));
    for (int i = 0; i < BLOCKS; i++) c[i].trace = t[i], c[i].sharded = k > 0;
    o.schedule = schedule, o.debug = 1;
    OK(rfr_graphs_create(ctx, c, BLOCKS, &o, &g));
    for (int i = 0; i < BLOCKS; i++) {
      OK(rfr_graphs_tensor(g, i ? "b1.w" : "b0.w", &x));
      rft_fill_by(&x, 5 + (uint64_t)i, 0.3f);
    }
    rft_fill_by(&(rfr_tensor){.type = in.type, .data = values}, 9, 1);
    OK(rfr_graphs_begin_evaluation(g, NULL, 0));
    for (int m = 0; m < 3; m++) {
      OK(rfr_graphs_forward(g, 0, m, &in, 1, &x, 1));
      const rfr_binding next = {NULL, in.type, x.data};
      OK(rfr_graphs_forward(g, 1, m, &next, 1, &x, 1));
    }
    OK(rfr_graphs_read(g, &x, y[k]));
    OK(rfr_graphs_end_step(g));
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
    for (int i = 0; i < BLOCKS; i++) rfr_trace_destroy(t[i]);
    assert_memory_equal(y[k], y[0], sizeof y[0]);
  }
}

static void test_refusals(void **state) {
  (void)state;
  const int64_t shape[1] = {4};
  const rft_scene s = {.block = rft_block_mlp, .blocks = 1, .dtype = RFR_F32};
  const int64_t block[4] = {0};
  const rfr_binding step = {"step", {.dtype = RFR_I64, .rank = 1, .shape = {4}}, block};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  rft_refused(rfr_graphs_begin_evaluation(g, &step, 1), "program.name", "\"step\" is a state");
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_refused(rfr_graphs_begin_evaluation(g, NULL, 0), "graphs.order", "a step has begun");
  OK(rfr_graphs_abort_step(g));
  rfr_graphs_destroy(g);
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input_at(t, RFR_HERE, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, shape);
  const rfr_value sum = rfr_input_at(t, RFR_HERE, "sum", RFR_ROLE_STATE, RFR_F32, 1, shape);
  rfr_output(t, "sum", rfi_record(t, RFR_HERE, RFI_OP_accumulate, 2, (rfr_value[]){rfr_detach(t, x), sum}, NULL, NULL));
  rfr_output(t, "y", rfr_silu(t, x));
  OK(rfr_trace_finish(t));
  rfr_callable c = rfr_callable_default();
  c.trace = t, c.name = "counts";
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  rft_refused(rfr_graphs_begin_evaluation(g, NULL, 0), "graphs.callable",
              "callable \"counts\" writes state \"sum\" in its forward");
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_training_continues),
      rft_context_test(test_schedule),
      rft_context_test(test_sharded),
      rft_context_test(test_refusals),
  };
  return cmocka_run_group_tests_name("graphs_evaluation", tests, NULL, NULL);
}
