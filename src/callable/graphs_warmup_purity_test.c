/* SPDX-License-Identifier: Apache-2.0
 *
 * Warm-up changes nothing: every byte of the caller's parameters, states, constants, accumulated main gradients, step
 * block and random streams is unchanged, and the first steps are bitwise equal to those of graphs without warm-up, with
 * and without recompute. graphs_faults_test has the failures.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/context.h"
#include "support/graphs_scene.h"

enum { ROWS = 6, WIDTH = 16, CALLABLES = 2, EDGE = 64 };

/* ---- two callables ---- */

/* Each has a norm, a GEMM and dropout masks of both random streams. The first counts in a state; the second is frozen
 * except for its bias. */
static rfr_trace *record(int i) {
  rfr_trace *t;
  char name[8];
  const int64_t activation[2] = {ROWS, WIDTH}, square[2] = {WIDTH, WIDTH}, row[1] = {WIDTH};
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, activation);
  const rfr_role role = i == 0 ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN;
  snprintf(name, sizeof name, "norm%d", i);
  rfr_value h = rfr_rmsnorm(t, x, rfr_input(t, name, role, RFR_F32, 1, row), 1e-5);
  snprintf(name, sizeof name, "w%d", i);
  rfr_value w = rfr_input(t, name, role, RFR_F32, 2, square);
  snprintf(name, sizeof name, "b%d", i);
  h = rfr_linear(t, h, w, rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 1, row));
  rfr_set_recompute(t, RFR_POLICY_RECOMPUTE);
  h = rfr_dropout(t, rfr_gelu(t, h, 1), rfr_rng_stream(t, "tp"), 0.5, 0);
  rfr_set_recompute(t, RFR_POLICY_AUTO);
  h = rfr_dropout(t, rfr_mul(t, h, rfr_input(t, "table", RFR_ROLE_CONST, RFR_F32, 2, activation)), rfr_step_block(t),
                  0.25, 0);
  rfr_output(t, "y", rfr_add(t, x, h));
  if (i == 0) {
    rfr_value count = rfr_input(t, "count", RFR_ROLE_STATE, RFR_F32, 2, activation);
    rfr_output(t, "count",
               rfi_record(t, RFR_HERE, RFI_OP_accumulate, 2, (rfr_value[]){rfr_detach(t, x), count}, NULL, NULL));
  }
  OK(rfr_trace_finish(t));
  return t;
}

/* ---- the caller's memory ---- */

typedef struct callers { /* with guard bytes between */
  _Alignas(64) float norm0[WIDTH], norm1[WIDTH], b0[WIDTH], b1[WIDTH];
  unsigned char edge0[EDGE];
  _Alignas(64) float w0[WIDTH * WIDTH], w1[WIDTH * WIDTH];
  unsigned char edge1[EDGE];
  _Alignas(64) float table[ROWS * WIDTH], count[ROWS * WIDTH];
  unsigned char edge2[EDGE];
  _Alignas(64) int64_t step[4];
  _Alignas(64) int64_t tp[4];
  unsigned char edge3[EDGE];
  _Alignas(64) float grad_norm0[WIDTH], grad_b0[WIDTH], grad_b1[WIDTH];
  unsigned char edge4[EDGE];
  _Alignas(64) float grad_w0[WIDTH * WIDTH];
  unsigned char edge5[EDGE];
} callers;

/* Some accumulated gradients are -0, which would become 0 if warm-up added its zeros to them. */
static void fill(callers *m) {
  float *f = (float *)m;
  for (size_t i = 0; i < sizeof *m / sizeof *f; i++) f[i] = (float)((i * 7919) % 1000) / 2000 - 0.25f;
  for (int i = 0; i < WIDTH; i += 3) m->grad_norm0[i] = m->grad_b0[i] = m->grad_b1[i] = m->grad_w0[5 * i] = -0.0f;
  memcpy(m->step, (int64_t[4]){3, 2, 77, 1}, sizeof m->step);
  memcpy(m->tp, (int64_t[4]){5, 0, 78, 0}, sizeof m->tp);
}

typedef struct choices {
  const char *schedule;
  int warmup;
  rfr_recompute recompute;
  bool eager;
} choices;

static rfr_graphs *create(callers *m, const choices *x) {
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {WIDTH, WIDTH}};
  const rfr_type row = {.dtype = RFR_F32, .rank = 1, .shape = {WIDTH}};
  const rfr_type activation = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, WIDTH}};
  const rfr_type block = {.dtype = RFR_I64, .rank = 1, .shape = {4}};
  const rfr_binding tensors[] = {{"norm0", row, m->norm0},
                                 {"norm1", row, m->norm1},
                                 {"b0", row, m->b0},
                                 {"b1", row, m->b1},
                                 {"w0", square, m->w0},
                                 {"w1", square, m->w1},
                                 {"table", activation, m->table},
                                 {"count", activation, m->count},
                                 {"step", block, m->step},
                                 {"rng.tp", block, m->tp}};
  const rfr_main_gradient gradients[] = {
      rft_main_gradient("norm0", row, m->grad_norm0, 1), rft_main_gradient("w0", square, m->grad_w0, 1),
      rft_main_gradient("b0", row, m->grad_b0, 0), rft_main_gradient("b1", row, m->grad_b1, 1)};
  const rfr_binding sample = {"x", activation, m->w1};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule = NULL;
  rfr_trace *t[CALLABLES];
  rfr_callable c[CALLABLES];
  rfr_graphs *g;
  const int layers = CALLABLES;
  for (int i = 0; i < CALLABLES; i++) {
    t[i] = record(i);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    c[i].samples = &sample, c[i].n_samples = 1;
  }
  if (x->schedule) {
    OK(rfr_schedule_parse(ctx, "test", x->schedule, strlen(x->schedule), &schedule));
    OK(rfr_schedule_set_layers(schedule, &layers, 1));
  }
  o.schedule = schedule;
  o.warmup_iterations = x->warmup;
  o.recompute = x->recompute;
  o.eager = x->eager;
  o.tensors = tensors, o.n_tensors = sizeof tensors / sizeof *tensors;
  o.gradients = gradients, o.n_gradients = sizeof gradients / sizeof *gradients;
  OK(rfr_graphs_create(ctx, c, CALLABLES, &o, &g));
  for (int i = 0; i < CALLABLES; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
  return g;
}

static void unchanged(const callers *m, const callers *before, const char *what) {
  if (memcmp(m, before, sizeof *m) == 0) return;
  size_t at = 0;
  while (((const unsigned char *)m)[at] == ((const unsigned char *)before)[at]) at++;
  fail_msg("%s: byte %zu of %zu was written", what, at, sizeof *m);
}

/* ---- steps ---- */

typedef struct results { /* of two microbatches */
  float y[2][ROWS * WIDTH], dx[2][ROWS * WIDTH];
} results;

static void run_step(rfr_graphs *g, bool delayed, results *r) {
  static float values[ROWS * WIDTH];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, WIDTH}};
  rfr_tensor y[2], dx;
  for (int i = 0; i < ROWS * WIDTH; i++) values[i] = (float)(i % 13) / 13 - 0.5f;
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++) {
    for (int c = 0; c < CALLABLES; c++) {
      const rfr_binding x = {NULL, type, c == 0 ? values : r->y[m]};
      OK(rfr_graphs_forward(g, c, m, &x, 1, y, c == 0 ? 2 : 1));
      OK(rfr_graphs_read(g, &y[0], r->y[m]));
    }
    for (int c = CALLABLES - 1; c >= 0 && !delayed; c--) {
      const rfr_binding dy[2] = {{"y", type, c == CALLABLES - 1 ? values : r->dx[m]}};
      OK(rfr_graphs_backward(g, c, m, dy, 1, &dx, 1));
      OK(rfr_graphs_read(g, &dx, r->dx[m]));
    }
  }
  for (int m = 0; m < 2 && delayed; m++)
    for (int c = CALLABLES - 1; c >= 0; c--) {
      const rfr_binding dy[2] = {{"y", type, c == CALLABLES - 1 ? values : r->dx[m]}};
      OK(rfr_graphs_backward(g, c, m, dy, 1, &dx, 1));
      OK(rfr_graphs_read(g, &dx, r->dx[m]));
    }
  for (int m = 0; m < 2 && delayed; m++)
    for (int c = CALLABLES - 1; c >= 0; c--) OK(rfr_graphs_wgrad(g, c, m));
  OK(rfr_graphs_end_step(g));
}

static const char *const schedules[] = {NULL, "0F0 0F1 0I0 0I1 0W0 0W1"};

static void test_warm_up(void **state) {
  (void)state;
  static const int iterations[] = {0, 1, 3};
  for (int delayed = 0; delayed < 2; delayed++) {
    static callers m, before, after;
    static results first, now;
    fill(&before);
    for (int k = 0; k < 12; k++) {
      const choices x = {.schedule = schedules[delayed],
                         .warmup = iterations[k % 3],
                         .recompute = k / 3 & 1 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP,
                         .eager = k / 6};
      m = before;
      rfr_graphs *g = create(&m, &x);
      unchanged(&m, &before, "creation");
      for (int step = 0; step < 2; step++) run_step(g, delayed, &now);
      rfr_graphs_destroy(g);
      if (k == 0) first = now, after = m;
      assert_memory_equal(&now, &first, sizeof now);
      unchanged(&m, &after, "two steps");
    }
    /* gradients were accumulated, the state was updated, nothing else has changed */
    assert_memory_not_equal(after.grad_w0, before.grad_w0, sizeof before.grad_w0);
    assert_memory_not_equal(after.count, before.count, sizeof before.count);
    assert_memory_equal(&after, &before, offsetof(callers, count));
    assert_memory_equal(after.edge2, before.edge2, offsetof(callers, grad_norm0) - offsetof(callers, edge2));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_warm_up),
  };
  return cmocka_run_group_tests_name("graphs_warmup_purity", tests, NULL, NULL);
}
