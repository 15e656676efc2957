/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphed callables compared with one program of all of them: outputs, input gradients, main gradients and the weights
 * after ten steps are equal bit by bit, for any schedule and each kind of block. Planned memory; calls that the
 * schedule or the signature refuses.
 *
 * graphs_test [--device NAME]
 *
 * With a device everything runs there except the tests with the caller's memory; exit code 77 if there is none.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/device.h"
#include "support/graphs_scene.h"
#include "support/thin.h"

enum { T = RFT_T, C = RFT_C };

/* ---- tests ---- */

static const rft_block blocks[] = {rft_block_linear, rft_block_mlp, rft_block_attention, rft_block_transformer,
                                   rft_block_experts};

static void test_blocks(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
    for (int variant = 0; variant < 8; variant++) {
      if (RFT_LEFT_OUT((int)i + variant, 3)) continue;
      rft_run_scene(&(rft_scene){.block = blocks[i],
                                 .blocks = 2,
                                 .microbatches = 2,
                                 .dtype = variant & 1 ? RFR_BF16 : RFR_F32,
                                 .fuse = variant >> 1 & 1,
                                 .linked = variant >> 2 & 1,
                                 .eager = variant == 5});
    }
}

static void test_schedules(void **state) {
  (void)state;
  static const struct {
    const char *text;
    int microbatches, stages;
  } schedules[] = {
      {"0F0 0B0", 1, 1},
      {"0F0 0F1 0F2 0B0 0B1 0B2", 3, 1},
      {"0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2", 3, 2},
      {"0F0 1F0 0F1 1F1 1I0 1W0 0I0 0W0 0F2 1F2 1I1 0I1 1I2 0I2 1W1 0W1 1W2 0W2", 3, 2},
      {"0F0 1F0 0F1 1F1 1I0 0I0 0F2 1F2 1I1 0I1 1I2 0I2 1W0 1W1 1W2 0W0 0W1 0W2", 3, 2},
      {"0F0 0F1 0I0 0I1 0W0 0W1", 2, 1},
      {"0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2", 3, 1},
      {"0F0 0F1 0F2 0I0 0F3 0I1 0W0 0F4 0I2 0W1 0F5 0I3 0W2 0F6 0I4 0W3 0F7 0I5 0W4 0I6 0W5 0I7 0W6 0W7", 8, 1},
  };
  for (size_t i = 0; i < sizeof schedules / sizeof *schedules; i++)
    for (int linked = 0; linked < 2; linked++)
      for (int kind = 0; kind < 2; kind++) {
        if (RFT_LEFT_OUT((int)i + linked + kind, 2)) continue;
        rft_run_scene(&(rft_scene){.block = kind ? rft_block_experts : rft_block_transformer,
                                   .blocks = 2 * schedules[i].stages,
                                   .microbatches = schedules[i].microbatches,
                                   .dtype = linked ? RFR_BF16 : RFR_F32,
                                   .fuse = true,
                                   .schedule = schedules[i].text,
                                   .layers = 2,
                                   .linked = linked});
      }
}

static void test_microbatches(void **state) {
  (void)state;
  static const int counts[] = {1, 3, 8};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    rft_run_scene(&(rft_scene){.block = rft_block_transformer,
                               .blocks = 3,
                               .microbatches = counts[i],
                               .dtype = RFR_F32,
                               .fuse = true,
                               .linked = i & 1});
}

static void test_frozen(void **state) {
  (void)state;
  for (unsigned frozen = 1; frozen < 8; frozen++)
    for (int delayed = 0; delayed < 2; delayed++) {
      const rft_scene s = {.block = rft_block_transformer,
                           .blocks = 3,
                           .microbatches = 2,
                           .dtype = RFR_F32,
                           .fuse = true,
                           .frozen = frozen,
                           .layers = 3,
                           .schedule = delayed ? "0F0 0F1 0I0 0I1 0W0 0W1" : "0F0 0F1 0B0 0B1"};
      if (frozen == 7 && delayed) continue; /* checked below: there is no W at all */
      rft_run_scene(&s);
      rfr_schedule *schedule;
      rfr_graphs *g = rft_make_graphs(&s, &schedule);
      for (int i = 0; i < 3; i++) assert_int_equal(rfr_graphs_ops(g, i, RFR_ACTION_W) == 0, (int)(frozen >> i & 1));
      rfr_graphs_destroy(g);
      rfr_schedule_destroy(schedule);
    }
}

/* ---- refusals ---- */

/* A refused call runs nothing: the step continues, and its results are bitwise equal. */
static void test_order_and_signature(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_mlp,
                       .blocks = 2,
                       .microbatches = 2,
                       .dtype = RFR_F32,
                       .fuse = true,
                       .layers = 1,
                       .schedule = "0F0 1F0 0F1 1F1 1I0 0I0 1W0 0W0 1B1 0B1"};
  static rft_buffers b, again;
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const rfr_type type = rft_activation(&s);
  rfr_type other = type;
  rfr_tensor y, grad;
  rfr_graphs_memory m = {.size = sizeof m};
  for (int m0 = 0; m0 < 2; m0++) {
    rft_draw(&s, b.x[m0][0], 0, m0, 1);
    rft_draw(&s, b.dx[m0][2], 0, m0, 2);
  }
  rfr_binding x = {NULL, type, b.x[0][0]};
  OK(rfr_graphs_get_memory(g, &m));
  rfr_graphs_memory part = {.size = offsetof(rfr_graphs_memory, shared_bytes), .shared_bytes = 77}, none = {0};
  OK(rfr_graphs_get_memory(g, &part)); /* the struct of a program that knows only the first fields */
  assert_int_equal(part.slot_bytes, m.slot_bytes);
  assert_int_equal(part.shared_bytes, 77);
  assert_int_equal(part.size, offsetof(rfr_graphs_memory, shared_bytes));
  rft_refused(rfr_graphs_get_memory(g, &none), "argument", "set it to sizeof");
  assert_int_equal(m.slots, 4);
  assert_int_equal(m.graphs, 4 * 3); /* F, I and W of each */
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1), "graphs.order", "no step has begun");
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_refused(rfr_graphs_begin_step(g, NULL, 0), "graphs.order", "has begun");
  rft_refused(rfr_graphs_forward(g, 1, 0, &x, 1, &y, 1), "graphs.order",
              "expects forward of callable \"0\", microbatch 0");
  rft_refused(rfr_graphs_forward(g, 0, 1, &x, 1, &y, 1), "graphs.order",
              "expects forward of callable \"0\", microbatch 0");
  rft_refused(rfr_graphs_wgrad(g, 0, 0), "graphs.order", "expects forward");
  rft_refused(rfr_graphs_forward(g, 2, 0, &x, 1, &y, 1), "argument", "callable 2 of 2");
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 0, &y, 1), "replay.signature", "takes 1 inputs, not 0");
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 0), "replay.signature", "returns 1 outputs");
  other.shape[1] = C - 1;
  x.type = other;
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1), "replay.signature", "dimension 1 was 32, now 31");
  other.dtype = RFR_BF16;
  x.type = other;
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1), "replay.signature", "with type f32, now bf16");
  x = (rfr_binding){"z", type, b.x[0][0]};
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1), "replay.signature", "takes no input \"z\"");
  x = (rfr_binding){"x", type, NULL};
  rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1), "replay.signature", "no data");
  rft_forward(g, &s, &b, 0, 0);
  rft_refused(rfr_graphs_end_step(g), "graphs.order", "the next call is forward of callable \"1\", microbatch 0");
  OK(rfr_graphs_abort_step(g));
  for (int k = 0; k < 2; k++) { /* the second run has refused calls in between */
    rft_buffers *to = k ? &again : &b;
    memcpy(to, &b, sizeof b);
    OK(rfr_graphs_begin_step(g, NULL, 0));
    rft_forward(g, &s, to, 0, 0);
    rft_forward(g, &s, to, 1, 0);
    rft_forward(g, &s, to, 0, 1);
    rft_forward(g, &s, to, 1, 1);
    if (k)
      rft_refused(rfr_graphs_wgrad(g, 1, 0), "graphs.order", "expects backward (I) of callable \"1\", microbatch 0");
    rft_backward(g, &s, to, 1, 0);
    if (k) rft_refused(rfr_graphs_wgrad(g, 1, 0), "graphs.order", "expects backward (I) of callable \"0\"");
    rft_backward(g, &s, to, 0, 0);
    OK(rfr_graphs_wgrad(g, 1, 0));
    OK(rfr_graphs_wgrad(g, 0, 0));
    rft_backward(g, &s, to, 1, 1);
    if (k)
      rft_refused(rfr_graphs_wgrad(g, 1, 1), "graphs.order", "expects backward (B) of callable \"0\", microbatch 1");
    rft_backward(g, &s, to, 0, 1);
    rft_refused(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1), "graphs.order", "has no more");
    OK(rfr_graphs_end_step(g));
    OK(rfr_graphs_gradient(g, "b1.up", &grad));
    const rfr_tensor up = rft_of_graphs(g, &grad);
    if (k == 0) memcpy(b.x[7][0], up.data, sizeof b.x[7][0]);
    else assert_memory_equal(b.x[7][0], up.data, sizeof b.x[7][0]);
    free(up.data);
    assert_memory_equal(b.dx[1][0], to->dx[1][0], sizeof b.dx[1][0]);
  }
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* The output of h + linear(gelu(linear(h, w)), w) in bf16, h = silu(x), with w of a role. */
static void run_residual(rfr_role role, const uint16_t *values, uint16_t *out) {
  const rfr_type type = {.dtype = RFR_BF16, .rank = 2, .shape = {T, C}};
  const rfr_binding x = {NULL, type, values};
  rfr_callable c = rfr_callable_default();
  rfr_graphs *g;
  rfr_trace *t;
  rfr_tensor y;
  OK(rfr_trace_create(ctx, &t));
  rfr_value h = rfr_silu(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_BF16, 2, type.shape));
  rfr_value w = rfr_input(t, "w", role, RFR_BF16, 2, ((int64_t[]){C, C}));
  rfr_value inner = rfr_gelu(t, rfr_linear(t, h, w, RFR_NONE), 1);
  rfr_output(t, "y", rfr_add(t, h, rfr_linear(t, inner, w, RFR_NONE)));
  OK(rfr_trace_finish(t));
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  rft_fill_named(g);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1));
  OK(rfr_graphs_read(g, &y, out));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

/* A callable without gradients in a set that trains computes the bits of a trained one. */
static void test_frozen_bits(void **state) {
  (void)state;
  static uint16_t x[T * C], trained[T * C], frozen[T * C];
  const rfr_type type = {.dtype = RFR_BF16, .rank = 2, .shape = {T, C}};
  rft_fill_by(&(rfr_tensor){.type = type, .data = x}, 1, 1);
  run_residual(RFR_ROLE_TRAINABLE, x, trained);
  run_residual(RFR_ROLE_FROZEN, x, frozen);
  assert_memory_equal(trained, frozen, sizeof trained);
}

static rfr_status try_create(rfr_callable *c, int n, const rfr_graphs_options *o) {
  rfr_graphs *g;
  const rfr_status s = rfr_graphs_create(ctx, c, n, o, &g);
  assert_true((s == RFR_OK) == (g != NULL));
  rfr_graphs_destroy(g);
  return s;
}

/* After frozen callables a linked input needs no gradient, like one that is passed. The last callable's weights are
 * bitwise equal to those of a callable alone. */
static void test_frozen_links(void **state) {
  (void)state;
  enum { N = 3 };
  static float x[T * C], dy[T * C], between[T * C], want[C * C], got[C * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = N, .dtype = RFR_F32, .frozen = 3};
  const rfr_type type = rft_activation(&s);
  rfr_callable c[N], alone = rfr_callable_default();
  rfr_callable_link link[N];
  rfr_graphs *g, *one;
  rfr_tensor y, dw, dx, w;
  for (int i = 0; i < N; i++) {
    link[i] = (rfr_callable_link){"x", i - 1, "y"};
    c[i] = rfr_callable_default();
    c[i].trace = rft_block_trace(&s, i);
    if (i > 0) c[i].links = &link[i], c[i].n_links = 1;
  }
  rfr_trace *given;
  OK(rfr_trace_create(ctx, &given)); /* x of the first callable has no gradient */
  rfr_output(given, "y", rfr_silu(given, rfr_input(given, "x", RFR_ROLE_INPUT, RFR_F32, 2, type.shape)));
  OK(rfr_trace_finish(given));
  rfr_trace_destroy((rfr_trace *)c[0].trace);
  c[0].trace = given;
  alone.trace = c[N - 1].trace;
  OK(rfr_graphs_create(ctx, c, N, NULL, &g));
  OK(rfr_graphs_create(ctx, &alone, 1, NULL, &one));
  assert_int_equal(rfr_graphs_ops(g, 1, RFR_ACTION_I), 0);
  assert_true(rfr_graphs_ops(g, 2, RFR_ACTION_I) < rfr_graphs_ops(one, 0, RFR_ACTION_I));
  rft_fill_by(&(rfr_tensor){.type = type, .data = x}, 1, 1);
  rft_fill_by(&(rfr_tensor){.type = type, .data = dy}, 2, 1);
  for (int i = 0; i < N; i++) {
    rfr_graphs *of = i == 2 ? one : g;
    OK(rfr_graphs_tensor(of, i == 1 ? "b1.w" : "b2.w", &w));
    const rfr_tensor copy = rft_of_graphs(of, &w);
    rft_fill_by(&copy, i == 1 ? 4 : 3, 0.5f);
    OK(rfr_graphs_write(of, &w, copy.data));
    free(copy.data);
  }
  const rfr_binding in = {NULL, type, x}, back = {NULL, type, dy}, again = {NULL, type, between};
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int i = 0; i < N; i++) {
    OK(rfr_graphs_forward(g, i, 0, &in, i == 0, &y, 1));
    if (i == 1) OK(rfr_graphs_read(g, &y, between));
  }
  OK(rfr_graphs_backward(g, N - 1, 0, &back, 1, NULL, 0));
  OK(rfr_graphs_end_step(g)); /* the others have no gradient */
  OK(rfr_graphs_gradient(g, "b2.w", &dw));
  OK(rfr_graphs_read(g, &dw, want));
  OK(rfr_graphs_begin_step(one, NULL, 0));
  OK(rfr_graphs_forward(one, 0, 0, &again, 1, &y, 1));
  OK(rfr_graphs_backward(one, 0, 0, &back, 1, &dx, 1));
  OK(rfr_graphs_end_step(one));
  OK(rfr_graphs_gradient(one, "b2.w", &dw));
  OK(rfr_graphs_read(one, &dw, got));
  assert_memory_equal(want, got, sizeof want);
  rfr_graphs_destroy(g);
  rfr_graphs_destroy(one);
  for (int i = 0; i < N; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
}

/* Gradients are found by name. An output with a gradient must not have the name of a trained parameter, but may have
 * the name of an input. */
static void test_names_of_outputs(void **state) {
  (void)state;
  static const char *const names[] = {"w", "x", "frozen"};
  for (int k = 0; k < 3; k++) {
    rfr_trace *t;
    rfr_callable c = rfr_callable_default();
    const int64_t act[2] = {T, C}, square[2] = {C, C};
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, act);
    rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, square);
    rfr_value frozen = rfr_input(t, "frozen", RFR_ROLE_FROZEN, RFR_F32, 2, square);
    rfr_output(t, names[k], rfr_linear(t, rfr_linear(t, x, w, RFR_NONE), frozen, RFR_NONE));
    OK(rfr_trace_finish(t));
    c.trace = t;
    if (k == 0) rft_refused(try_create(&c, 1, NULL), "graphs.callable", "cannot both be named \"w\"");
    else OK(try_create(&c, 1, NULL));
    rfr_trace_destroy(t);
  }
}

static void test_descriptions(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)}, *unused;
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule;
  c[0].trace = t[0], c[1].trace = t[1];
  OK(try_create(c, 2, NULL));
  c[1].inference = 1;
  rft_refused(try_create(c, 2, NULL), "graphs.callable", "callable 1 is for inference");
  c[1].inference = 0;
  c[1].trace = NULL;
  rft_refused(try_create(c, 2, NULL), "argument", "callable 1: trace is NULL");
  c[1].trace = t[1];
  const rfr_callable_link link = {"x", 0, "z"};
  c[1].links = &link, c[1].n_links = 1;
  rft_refused(try_create(c, 2, NULL), "graphs.callable", "output \"z\" of callable \"0\"");
  c[1].n_links = 0;
  const char *const outputs[] = {"y", NULL, "y"};
  c[0].outputs = outputs, c[0].n_outputs = 3;
  rft_refused(try_create(c, 2, NULL), "graphs.callable", "repeats output \"y\"");
  c[0].n_outputs = 2;
  OK(try_create(c, 2, NULL));
  c[0].outputs = NULL, c[0].n_outputs = 0;
  OK(rfr_schedule_parse(ctx, "test", "0F0 0B0 0OPT", 12, &schedule));
  o.schedule = schedule;
  rft_refused(try_create(c, 1, &o), "graphs.callable", "OPT");
  rfr_schedule_destroy(schedule);
  OK(rfr_schedule_parse(ctx, "test", "0F0 0B0", 7, &schedule));
  o.schedule = schedule;
  rft_refused(try_create(c, 2, &o), "graphs.callable", "have 1 layers, but there are 2 callables");
  OK(try_create(c, 1, &o));
  rfr_schedule_destroy(schedule);
  o = rfr_graphs_options_default();
  o.budget = 100;
  rft_refused(try_create(c, 2, &o), "plan.over_budget", "the budget is 100");
  o.budget = 0;
  const rfr_binding unknown = {"w", {.dtype = RFR_F32, .rank = 1, .shape = {1}}, &o};
  o.tensors = &unknown, o.n_tensors = 1;
  rft_refused(try_create(c, 2, &o), "program.name", "\"w\"");
  struct {
    rfr_graphs_options known;
    int64_t tail;
  } longer = {rfr_graphs_options_default(), 0};
  longer.known.size = sizeof longer;
  OK(try_create(c, 2, &longer.known));
  longer.tail = 1;
  rft_refused(try_create(c, 2, &longer.known), "argument", "rfr_graphs_options");
  /* an input_grad for an input that reaches no output */
  OK(rfr_trace_create(ctx, &unused));
  rfr_value x = rfr_input(unused, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){T, C}));
  rfr_input(unused, "idle", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, ((int64_t[]){3}));
  rfr_value w = rfr_input(unused, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){C, C}));
  rfr_value y = rfr_linear(unused, x, w, RFR_NONE);
  rfr_output(unused, "y", y);
  rfr_output(unused, "same", rfr_detach(unused, y));
  OK(rfr_trace_finish(unused));
  rfr_callable loose = rfr_callable_default();
  loose.trace = unused;
  o = rfr_graphs_options_default();
  rft_refused(try_create(&loose, 1, &o), "graphs.callable", "input \"idle\" needs a gradient");
  o.allow_unused_input = 1;
  static _Alignas(16) float weight[C * C + 1], gradient[C * C + 1];
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const rfr_binding aligned[2] = {{"w", square, weight}, {"w", square, gradient}},
                    unaligned = {"w", square, weight + 1};
  const rfr_main_gradient sums[2] = {rft_main_gradient("w", square, gradient, 0),
                                     rft_main_gradient("w", square, weight, 0)},
                          sum_unaligned = rft_main_gradient("w", square, gradient + 1, 0);
  o.tensors = aligned, o.n_tensors = 2;
  rft_refused(try_create(&loose, 1, &o), "program.state", "twice");
  o.tensors = &unaligned, o.n_tensors = 1;
  rft_refused(try_create(&loose, 1, &o), "program.state", "multiple of 16 bytes");
  o.tensors = aligned, o.gradients = sums, o.n_gradients = 2;
  rft_refused(try_create(&loose, 1, &o), "program.state", "twice");
  o.gradients = &sum_unaligned, o.n_gradients = 1;
  rft_refused(try_create(&loose, 1, &o), "program.state", "multiple of 16 bytes");
  o.gradients = sums;
  OK(try_create(&loose, 1, &o));
  o.tensors = NULL, o.gradients = NULL, o.n_tensors = o.n_gradients = 0;
  rfr_graphs *g;
  OK(rfr_graphs_create(ctx, &loose, 1, &o, &g));
  static float values[T * C], three[3];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {T, C}};
  const rfr_binding in[2] = {{"idle", {.dtype = RFR_F32, .rank = 1, .shape = {3}}, three}, {"x", type, values}};
  const rfr_binding dy = {NULL, type, values}; /* only y has a gradient: detach blocks the other path */
  rfr_tensor out[2], dx[2];
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, in, 2, out, 2));
  OK(rfr_graphs_backward(g, 0, 0, &dy, 1, dx, 2));
  assert_non_null(dx[0].data);
  assert_null(dx[1].data);
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(unused);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

/* ---- hooks ---- */

typedef struct record { /* calls of all hooks; the one that fails */
  char text[8192];
  int calls, fails;
  rfr_hook hook;
  rfr_hook_list list;
} record;

static rfr_status note(const rfr_hook_event *e, void *user) {
  static const char *const points[] = {"<", ">", "f", "F", "b", "B", "w", "W"};
  record *r = user;
  const size_t n = strlen(r->text);
  snprintf(r->text + n, sizeof r->text - n, "%s%s", points[e->point], e->failed ? "!" : "");
  if (e->callable >= 0)
    snprintf(r->text + strlen(r->text), 32, "%d.%d%s", e->callable, e->microbatch, e->capture ? "c" : "");
  strcat(r->text, " ");
  assert_int_equal(e->size, sizeof *e);
  for (int i = 0; i < e->n_inputs; i++) assert_non_null(e->inputs[i].data);
  for (int i = 0; i < e->n_outputs; i++) assert_non_null(e->outputs[i].data);
  return ++r->calls == r->fails ? RFR_IO : RFR_OK;
}

static rfr_status create_with_hooks(const char *schedule_text, int blocks_n, unsigned frozen, int iterations, record *r,
                                    const rfr_binding *tensors, int n_tensors, const rfr_main_gradient *gradients,
                                    rfr_graphs **g) {
  const rft_scene s = {.block = rft_block_linear, .blocks = blocks_n, .dtype = RFR_F32, .frozen = frozen};
  rfr_schedule *schedule = NULL;
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_hooks hooks[RFT_BLOCKS];
  rfr_callable c[RFT_BLOCKS];
  rfr_trace *t[RFT_BLOCKS];
  r->text[0] = 0;
  r->calls = 0;
  r->hook = (rfr_hook){note, r};
  r->list = (rfr_hook_list){&r->hook, 1};
  for (int i = 0; i < blocks_n; i++) {
    t[i] = rft_block_trace(&s, i);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    hooks[i] = rfr_hooks_default();
    hooks[i].pre_forward = hooks[i].post_forward = hooks[i].pre_backward = hooks[i].post_backward = r->list;
    if (!(frozen >> i & 1)) hooks[i].pre_wgrad = hooks[i].post_wgrad = r->list;
  }
  if (schedule_text) OK(rfr_schedule_parse(ctx, "test", schedule_text, strlen(schedule_text), &schedule));
  o.schedule = schedule;
  o.hooks = hooks, o.n_hooks = blocks_n;
  o.warmup_iterations = iterations;
  o.pre_warmup = o.post_warmup = r->list;
  o.tensors = tensors, o.n_tensors = n_tensors;
  o.gradients = gradients, o.n_gradients = gradients ? 1 : 0;
  const rfr_status st = rfr_graphs_create(ctx, c, blocks_n, &o, g);
  for (int i = 0; i < blocks_n; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
  return st;
}

static void test_hooks(void **state) {
  (void)state;
  static record r;
  rfr_graphs *g;
  OK(create_with_hooks(NULL, 2, 0, 0, &r, NULL, 0, NULL, &g));
  assert_string_equal(r.text, "f0.0c F0.0c f1.0c F1.0c b1.0c B1.0c w1.0c W1.0c b0.0c B0.0c w0.0c W0.0c ");
  rfr_graphs_destroy(g);
  OK(create_with_hooks(NULL, 2, 2, 3, &r, NULL, 0, NULL, &g)); /* nothing is trained, so there is no W */
  assert_string_equal(r.text, "< f0.0 F0.0 f1.0 F1.0 b1.0 B1.0 b0.0 B0.0 w0.0 W0.0 "
                              "f0.0 F0.0 f1.0 F1.0 b1.0 B1.0 b0.0 B0.0 w0.0 W0.0 "
                              "f0.0 F0.0 f1.0 F1.0 b1.0 B1.0 b0.0 B0.0 w0.0 W0.0 > "
                              "f0.0c F0.0c f1.0c F1.0c b1.0c B1.0c b0.0c B0.0c w0.0c W0.0c ");
  rfr_graphs_destroy(g);
  /* two microbatches are in flight in stage 0; the third reuses the slots of the first */
  OK(create_with_hooks("0F0 1F0 0F1 1I0 0I0 1W0 0W0 1F1 0F2 1B1 0B1 1F2 1B2 0B2", 2, 0, 1, &r, NULL, 0, NULL, &g));
  assert_string_equal(r.text,
                      "< f0.0 F0.0 f1.0 F1.0 f0.1 F0.1 b1.0 B1.0 b0.0 B0.0 w1.0 W1.0 w0.0 W0.0 b0.1 B0.1 w0.1 W0.1 > "
                      "f0.0c F0.0c f1.0c F1.0c f0.1c F0.1c b1.0c B1.0c b0.0c B0.0c w1.0c W1.0c w0.0c W0.0c b0.1c B0.1c "
                      "w0.1c W0.1c ");
  rfr_graphs_destroy(g);
}

/* Each hook fails once: post hooks run for everything that was begun, the status is that of the hook, the caller's
 * memory is unchanged and nothing leaks; the next creation works. */
static void test_failing_hooks(void **state) {
  (void)state;
  static record r, whole;
  static float w[C * C], grad[C * C], w_before[C * C], grad_before[C * C];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const rfr_tensor tensors[2] = {{.type = type, .data = w}, {.type = type, .data = grad}};
  const rfr_binding binding = {"b0.w", type, w};
  const rfr_main_gradient main_gradient = rft_main_gradient("b0.w", type, grad, 1);
  rfr_graphs *g;
  for (int i = 0; i < 2; i++) rft_fill_by(&tensors[i], 3 + (uint64_t)i, 1);
  memcpy(w_before, w, sizeof w);
  memcpy(grad_before, grad, sizeof grad);
  const int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  OK(create_with_hooks(NULL, 2, 0, 1, &whole, &binding, 1, &main_gradient, &g));
  rfr_graphs_destroy(g);
  assert_int_equal(whole.calls, 26);
  for (r.fails = 1; r.fails <= whole.calls; r.fails++) {
    assert_int_equal(create_with_hooks(NULL, 2, 0, 1, &r, &binding, 1, &main_gradient, &g), RFR_IO);
    assert_null(g);
    assert_string_equal(rfr_last_error()->slug, "graphs.hook");
    assert_memory_equal(w, w_before, sizeof w);
    assert_memory_equal(grad, grad_before, sizeof grad);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
    /* calls 1 and 14 of 26 enclose the warm-up: a failure between them ends it */
    assert_int_equal(strstr(r.text, ">!") != NULL, r.fails > 1 && r.fails < 14);
    assert_int_equal(r.calls, r.fails + (r.fails > 1 && r.fails < 14));
    if (r.fails == 2) assert_string_equal(r.text, "< f0.0 >! ");
    if (r.fails == 3) assert_string_equal(r.text, "< f0.0 F0.0 >! ");
  }
  r.fails = 0;
  OK(create_with_hooks(NULL, 2, 0, 2, &r, &binding, 1, &main_gradient, &g));
  assert_memory_equal(w, w_before, sizeof w);
  assert_memory_equal(grad, grad_before, sizeof grad);
  rfr_graphs_destroy(g);
}

typedef struct step_of { /* of one hook in a list */
  char name;
  bool fails;
  char *text;
} step_of;

static rfr_status say(const rfr_hook_event *e, void *user) {
  const step_of *x = user;
  const size_t n = strlen(x->text);
  snprintf(x->text + n, 64 - n, "%c%s", x->name, e->failed ? "!" : "");
  return x->fails ? RFR_IO : RFR_OK;
}

/* The hook calls of a forward, in warm-up or in capture: pre hooks A, B and post hooks b, a; the hooks in `fails`
 * fail. */
static rfr_status hook_lists(const char *fails, int iterations, char text[64]) {
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  step_of x[4];
  rfr_hook pre[2], post[2], around[2];
  rfr_hooks h = rfr_hooks_default();
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  step_of outer = {'z', strchr(fails, 'z') != NULL, text};
  text[0] = 0;
  for (int i = 0; i < 4; i++) {
    x[i] = (step_of){"ABba"[i], strchr(fails, "ABba"[i]) != NULL, text};
    (i < 2 ? pre : post)[i % 2] = (rfr_hook){say, &x[i]};
  }
  around[0] = around[1] = (rfr_hook){say, &outer};
  h.pre_forward = (rfr_hook_list){pre, 2};
  h.post_forward = (rfr_hook_list){post, 2};
  c.trace = rft_block_trace(&s, 0);
  o.hooks = &h, o.n_hooks = 1, o.warmup_iterations = iterations;
  o.post_warmup = (rfr_hook_list){around, 2};
  const rfr_status status = rfr_graphs_create(ctx, &c, 1, &o, &g);
  rfr_trace_destroy((rfr_trace *)c.trace);
  rfr_graphs_destroy(g);
  return status;
}

/* After any failure every post hook is called once, and the first error is returned. */
static void test_post_lists(void **state) {
  (void)state;
  static const struct {
    const char *fails, *text, *warm, *error;
  } cases[] = {{"A", "A", "Az!z!", "pre_forward hook 0"},
               {"B", "ABb!a!", "ABb!a!z!z!", "pre_forward hook 1"},
               {"b", "ABba!", "ABba!z!z!", "post_forward hook 0"},
               {"a", "ABba", "ABbaz!z!", "post_forward hook 1"},
               {"Bb", "ABb!a!", "ABb!a!z!z!", "pre_forward hook 1"},
               {"ba", "ABba!", "ABba!z!z!", "post_forward hook 0"},
               {"bz", "ABba!", "ABba!z!z!", "post_forward hook 0"}};
  char text[64];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int warm = 0; warm < 2; warm++) {
      rft_refused(hook_lists(cases[i].fails, warm, text), "graphs.hook", cases[i].error);
      assert_string_equal(text, warm ? cases[i].warm : cases[i].text);
      assert_int_equal(rfr_last_error()->status, RFR_IO);
    }
  rft_refused(hook_lists("z", 1, text), "graphs.hook", "post_warmup hook 0");
  assert_string_equal(text, "ABbazz!");
  OK(hook_lists("", 0, text));
  assert_string_equal(text, "ABba");
}

static rfr_status fail_alone(const rfr_hook_event *e, void *user) {
  (void)e, (void)user;
  return RFR_INVALID;
}

static rfr_status parse_nothing(const rfr_hook_event *e, void *user) {
  rfr_schedule *schedule;
  const rfr_status s = rfr_schedule_parse(ctx, "of-a-hook.txt", "0F0\n0G0", 7, &schedule);
  (void)e;
  return *(const int *)user ? s : RFR_IO;
}

/* If a library call fails within a hook and the hook returns its status, the error contains the message of the call. */
static void test_hook_errors(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  for (int passed = 0; passed < 3; passed++) {
    const rfr_hook hook = {passed == 2 ? fail_alone : parse_nothing, &passed};
    rfr_hooks h = rfr_hooks_default();
    rfr_callable c = rfr_callable_default();
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    c.trace = rft_block_trace(&s, 0);
    h.post_forward = (rfr_hook_list){&hook, 1};
    o.hooks = &h, o.n_hooks = 1;
    rfr_graphs_wait(NULL);
    assert_int_equal(rfr_last_error()->status, RFR_INVALID); /* an earlier error */
    rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "graphs.hook", "in capture");
    assert_int_equal(strstr(rfr_last_error()->message, "in capture: schedule.") != NULL, passed == 1);
    assert_int_equal(strstr(rfr_last_error()->message, "of-a-hook.txt:2: ") != NULL, passed == 1);
    assert_int_equal(strstr(rfr_last_error()->message, "in capture:") != NULL, passed == 1);
    assert_int_equal(rfr_last_error()->status, passed ? RFR_INVALID : RFR_IO);
    rfr_trace_destroy((rfr_trace *)c.trace);
  }
}

/* Overwrites all tensors of the event, as an in-place reduction would. */
static rfr_status spoil(const rfr_hook_event *e, void *user) {
  if (e->capture) return RFR_OK;
  assert_int_equal(e->n_outputs, 2);
  for (int i = 0; i < e->n_outputs; i++) {
    float *x = e->outputs[i].data;
    for (int64_t k = 0; k < e->outputs[i].bytes / 4; k++) assert_true(x[k] == 0); /* zeros added to zeros */
  }
  for (int i = 0; i < e->n_outputs; i++)
    for (int64_t k = 0; k < e->outputs[i].bytes / 4; k++) ((float *)e->outputs[i].data)[k] = 7 + (float)i;
  for (int i = 0; i < e->n_outputs; i++)
    for (int64_t k = 0; k < e->outputs[i].bytes / 4; k++) assert_true(((float *)e->outputs[i].data)[k] == 7 + (float)i);
  ++*(int *)user;
  return RFR_OK;
}

/* In warm-up, wgrad hooks see the gradients that the part wrote to scratch memory. */
static void test_hooks_of_gradients(void **state) {
  (void)state;
  static float grad[C * C], before[C * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const rfr_main_gradient main_gradient = rft_main_gradient("b0.w", square, grad, 1);
  int calls = 0;
  const rfr_hook hook = {spoil, &calls};
  rfr_hooks h[2] = {rfr_hooks_default(), rfr_hooks_default()};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  for (int i = 0; i < C * C; i++) grad[i] = before[i] = 1 + (float)i;
  for (int i = 0; i < 2; i++) {
    c[i].trace = rft_block_trace(&s, i);
    h[i].post_wgrad = (rfr_hook_list){&hook, 1};
  }
  o.hooks = h, o.n_hooks = 2, o.warmup_iterations = 2;
  o.gradients = &main_gradient, o.n_gradients = 1;
  OK(rfr_graphs_create(ctx, c, 2, &o, &g));
  assert_int_equal(calls, 4);
  assert_memory_equal(grad, before, sizeof grad);
  for (int i = 0; i < g->m.store.n; i++)
    if (g->m.store.named[i].offset >= 0 && g->m.store.named[i].parameter >= 0) {
      const float *ours = g->m.store.named[i].tensor.data;
      for (int64_t k = 0; k < g->m.store.named[i].tensor.bytes / 4; k++) assert_true(ours[k] == 0);
    }
  rfr_graphs_destroy(g);
  for (int i = 0; i < 2; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
}

/* Every allocation of creation fails once: each failure is a status, and no memory leaks. */
static void test_allocation_faults(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32, .fuse = true};
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_callable c = rfr_callable_default();
  c.trace = t;
  rfr_graphs_destroy(rft_create_after_faults(&c, NULL, 20));
  rfr_trace_destroy(t);
}

/* Slots are adjacent and each is packed, so memory is close to the lower bound. */
static void test_memory(void **state) {
  (void)state;
  static const char *const texts[] = {"0F0 0B0", "0F0 0F1 0F2 0B0 0B1 0B2", "0F0 0F1 0I0 0I1 0W0 0W1"};
  int64_t one = 0;
  for (int i = 0; i < 3; i++) {
    const rft_scene s = {.block = rft_block_transformer,
                         .blocks = 4,
                         .dtype = RFR_F32,
                         .fuse = true,
                         .linked = true,
                         .in_order = true,
                         .layers = 4,
                         .schedule = texts[i]};
    rfr_schedule *schedule;
    rfr_graphs *g = rft_make_graphs(&s, &schedule);
    rfr_graphs_memory m = {.size = sizeof m};
    OK(rfr_graphs_get_memory(g, &m));
    assert_int_equal(m.slots, i == 0 ? 1 : i == 1 ? 3 : 2);
    assert_int_equal(m.planned_bytes, m.persistent_bytes + m.slot_bytes + m.shared_bytes + m.scratch_bytes);
    assert_true(100 * (m.slot_bytes + m.shared_bytes) <= 101 * m.lower_bound_bytes);
    if (i == 0) one = m.slot_bytes;
    else assert_true(m.slot_bytes / m.slots < one * (i == 1 ? 1.0 : 1.6));
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_blocks),
      rft_context_test(test_schedules),
      rft_context_test(test_microbatches),
      rft_context_test(test_frozen),
      rft_context_test(test_order_and_signature),
      rft_context_test(test_memory),
      rft_context_test(test_names_of_outputs),
      rft_context_test(test_frozen_bits),
      rft_context_test(test_frozen_links),
      rft_context_test(test_hooks),
  };
  const struct CMUnitTest on_the_host[] = {
      rft_context_test(test_descriptions),  rft_context_test(test_allocation_faults),
      rft_context_test(test_failing_hooks), rft_context_test(test_post_lists),
      rft_context_test(test_hook_errors),   rft_context_test(test_hooks_of_gradients),
  };
  if (!rft_device_named(&argc, argv)) return 77;
  const int failed = cmocka_run_group_tests_name("graphs", tests, NULL, NULL);
  return failed || getenv("REFRAIN_DEVICE") ? failed : cmocka_run_group_tests_name("graphs", on_the_host, NULL, NULL);
}
