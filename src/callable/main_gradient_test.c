/* SPDX-License-Identifier: Apache-2.0
 *
 * Main gradients of grouped weights, packed or separate, with W directly after I or later: they are bitwise equal, and
 * no memory is used for the gradients of all experts at once. They are in f32 or 16 bits, zeroed or accumulated, as
 * their entries specify, available only after the last W, and checked like tensors.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "core/rng.h"
#include "refrain/ops.h"
#include "support/context.h"
#include "support/device.h"
#include "support/graphs_scene.h"

enum { GROUPS = 4, ROWS = 21, IN = 40, OUT = 72, FROZEN = 1, MICROBATCHES = 2, MOST = GROUPS + 3 };

/* A GEMM before a grouped GEMM; main[] are the entries for main gradients. */
typedef struct scene {
  bool separate, frozen, delayed, eager;
  rfr_dtype dtype;
  int n_main;
  rfr_main_gradient main[MOST];
} scene;

static rfr_main_gradient entry(const char *parameter, int accumulate, rfr_dtype dtype) {
  return rft_main_gradient(parameter, (rfr_type){.dtype = dtype}, NULL, accumulate);
}

static const char *const weight_names[GROUPS] = {"w0", "w1", "w2", "w3"};

static rfr_trace *record(const scene *s) {
  rfr_trace *t;
  rfr_value w[GROUPS];
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, s->dtype, 2, ((int64_t[]){ROWS, IN}));
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, ((int64_t[]){GROUPS}));
  const rfr_value front = rfr_input(t, "front", RFR_ROLE_TRAINABLE, s->dtype, 2, ((int64_t[]){IN, IN}));
  const rfr_value norm = rfr_input(t, "norm", RFR_ROLE_TRAINABLE, s->dtype, 1, ((int64_t[]){IN}));
  const rfr_value bias = rfr_input(t, "bias", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){GROUPS, OUT}));
  for (int g = 0; g < (s->separate ? GROUPS : 1); g++)
    w[g] = rfr_input(t, weight_names[g], s->frozen && g == FROZEN ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, s->dtype,
                     s->separate ? 2 : 3, (int64_t[]){GROUPS, OUT, IN} + s->separate);
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
  const rfr_value h = rfr_rmsnorm(t, rfr_linear(t, x, front, RFR_NONE), norm, 1e-5);
  rfr_output(t, "y",
             s->separate ? rfr_grouped_linear_separate(t, h, GROUPS, w, offsets, bias, RFR_NONE)
                         : rfr_grouped_linear(t, h, w[0], offsets, bias, RFR_NONE));
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_status make(const scene *s, rfr_graphs **g, rfr_schedule **schedule) {
  const char *text = s->delayed ? "0F0 0F1 0I0 0I1 0W0 0W1" : "0F0 0B0 0F1 0B1";
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_trace *t = record(s);
  rfr_main_gradient main[MOST];
  for (int i = 0; i < s->n_main; i++) { /* the parameter's shape, unless the test sets another one */
    main[i] = s->main[i];
    const rfr_type type = t->values[t->inputs[rfi_names_find(&t->input_names, main[i].parameter)]].type;
    if (main[i].type.rank == 0)
      main[i].type = (rfr_type){main[i].type.dtype, type.rank, {type.shape[0], type.shape[1], type.shape[2]}};
  }
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), schedule));
  c.trace = t;
  o.schedule = *schedule;
  o.eager = s->eager;
  o.gradients = main, o.n_gradients = s->n_main;
  const rfr_status st = rfr_graphs_create(ctx, &c, 1, &o, g);
  rfr_trace_destroy(t);
  if (st == RFR_OK) return st;
  rfr_schedule_destroy(*schedule);
  return st;
}

/* ---- values ---- */

static float of_bits(rfr_dtype d, const void *data, int64_t i) {
  return d == RFR_F32 ? ((const float *)data)[i] : (float)rfr_float_from_bits(d, ((const uint16_t *)data)[i]);
}

/* Pseudo-random values; the caller frees them. */
static void *draw(const rfr_type *type, uint64_t seed) {
  const int64_t n = rfi_count(type);
  void *data = calloc((size_t)n + 1, 4);
  assert_non_null(data);
  for (int64_t i = 0; i < n; i++) {
    const float v = (float)(rfi_draw4(rfi_stream_key(seed, 3), (uint64_t)i, 0, 0, 0).v[0] >> 8) / 8388608.0f - 1;
    if (type->dtype == RFR_F32) ((float *)data)[i] = v;
    else ((uint16_t *)data)[i] = (uint16_t)rfr_float_to_bits(type->dtype, v);
  }
  return data;
}

/* A separate weight has the values of its part of the packed weight. */
static void init(rfr_graphs *g, const scene *s) {
  static const char *const names[] = {"front", "norm", "bias", "w0", "w1", "w2", "w3"};
  rfr_tensor x;
  for (int i = 0; i < MOST; i++) {
    if (rfr_graphs_tensor(g, names[i], &x) != RFR_OK) continue;
    rfr_type all = x.type;
    if (i >= 3) all = (rfr_type){.dtype = s->dtype, .rank = 3, .shape = {GROUPS, OUT, IN}};
    void *data = draw(&all, i < 3 ? (uint64_t)i : 9);
    OK(rfr_graphs_write(g, &x, (char *)data + (i > 3 ? (i - 3) * x.bytes : 0)));
    free(data);
  }
}

/* One step with fixed values over MICROBATCHES. */
static void run(rfr_graphs *g, const scene *s, const rfr_schedule *schedule) {
  const int64_t splits[MICROBATCHES][GROUPS] = {{5, 0, 9, 4}, {0, 7, 7, 7}};
  rft_room room = rft_room_open(ctx, sizeof splits);
  const int64_t *there = rft_room_put(&room, 0, splits, sizeof splits);
  const rfr_type tx = {.dtype = s->dtype, .rank = 2, .shape = {ROWS, IN}};
  const rfr_type ty = {.dtype = s->dtype, .rank = 2, .shape = {ROWS, OUT}};
  const rfr_type ts = {.dtype = RFR_I64, .rank = 1, .shape = {GROUPS}};
  rfr_tensor y, dx[2];
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int i = 0; i < n; i++) {
    const int m = a[i].microbatch;
    int64_t used = 0; /* rows in groups; the output's gradient is NaN in the other rows */
    for (int k = 0; k < GROUPS; k++) used += splits[m][k];
    void *x = draw(&tx, 20 + (uint64_t)m);
    char *dy = draw(&ty, 30 + (uint64_t)m);
    const int64_t row = OUT * rfr_dtype_bits(s->dtype) / 8;
    memset(dy + used * row, 0xFF, (size_t)((ROWS - used) * row));
    const rfr_binding in[2] = {{"x", tx, x}, {"splits", ts, there + m * GROUPS}};
    const rfr_binding grad = {"y", ty, dy};
    if (a[i].op == RFR_ACTION_F) OK(rfr_graphs_forward(g, 0, m, in, 2, &y, 1));
    if (a[i].op == RFR_ACTION_I || a[i].op == RFR_ACTION_B) OK(rfr_graphs_backward(g, 0, m, &grad, 1, dx, 2));
    if (a[i].op == RFR_ACTION_W) OK(rfr_graphs_wgrad(g, 0, m));
    OK(rfr_graphs_wait(g));
    free(x);
    free(dy);
  }
  OK(rfr_graphs_end_step(g));
  rft_room_close(&room);
}

/* The bytes of a main gradient, all finite; the caller frees them. */
static void *gradient(rfr_graphs *g, const char *name, rfr_tensor *x) {
  OK(rfr_graphs_gradient(g, name, x));
  void *data = malloc((size_t)x->bytes);
  assert_non_null(data);
  OK(rfr_graphs_read(g, x, data));
  for (int64_t i = 0; i < rfi_count(&x->type); i++)
    if (!isfinite(of_bits(x->type.dtype, data, i))) fail_msg("%s has an element that is not a number", name);
  return data;
}

/* ---- grouped weights ---- */

/* Every result that is as large as one expert's gradient is written in place. */
static void has_no_weight_buffer(const rfr_graphs *g) {
  const rfr_trace *t = rfr_graphs_trace(g, 0);
  int products = 0;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    if (x->op < 0 || x->base != v) continue;
    if (rfi_count(&x->type) >= OUT * IN) fail_msg("%s makes room for a weight", t->ops[x->op].def->name);
  }
  for (int i = 0; i < t->n_ops; i++) {
    if (t->ops[i].def->code != RFI_OP_grouped_wgrad) continue;
    products++;
    assert_int_equal(t->ops[i].attr[1].i, GROUPS); /* all experts, because the choice of kernel depends on this count */
  }
  assert_true(products > 0);
}

/* The gradients of all experts, of packed or separate weights, without those of a frozen one. */
static void *experts(rfr_graphs *g, const scene *s) {
  rfr_tensor x;
  if (!s->separate) return gradient(g, "w0", &x);
  char *all = calloc(GROUPS * OUT * IN, 4);
  assert_non_null(all);
  for (int i = 0; i < GROUPS; i++) {
    if (s->frozen && i == FROZEN) continue;
    void *data = gradient(g, weight_names[i], &x);
    memcpy(all + i * x.bytes, data, (size_t)x.bytes);
    free(data);
  }
  return all;
}

static void test_grouped(void **state) {
  (void)state;
  static const rfr_dtype dtypes[] = {RFR_F32, RFR_BF16}, mains[] = {RFR_F32, RFR_BF16};
  for (int kind = 0; kind < 4; kind++) {
    char *first = NULL;
    const rfr_dtype main = mains[kind / 2];
    for (int way = 0; way < 12; way++) {
      scene s = {
          .separate = way & 1, .delayed = way & 2, .eager = way & 4, .frozen = way >= 8, .dtype = dtypes[kind % 2]};
      for (int i = 0; i < GROUPS; i++) s.main[s.n_main++] = entry(weight_names[i], 0, main);
      if (!s.separate) s.n_main = 1, s.frozen = false;
      else if (s.frozen) s.main[FROZEN] = s.main[--s.n_main];
      rfr_schedule *schedule;
      rfr_graphs *g;
      OK(make(&s, &g, &schedule));
      has_no_weight_buffer(g);
      init(g, &s);
      run(g, &s, schedule);
      char *all = experts(g, &s);
      if (!first) first = all;
      const int64_t each = OUT * IN * rfr_dtype_bits(main) / 8;
      for (int i = 0; i < GROUPS; i++)
        if (!(s.frozen && i == FROZEN) && memcmp(all + i * each, first + i * each, (size_t)each) != 0)
          fail_msg("kind %d, way %d: the gradient of weight %d has other bits", kind, way, i);
      if (all != first) free(all);
      rfr_graphs_destroy(g);
      rfr_schedule_destroy(schedule);
    }
    free(first);
  }
}

/* ---- types, zeroing and accumulation ---- */

/* A narrow main gradient equals the f32 one, except that a narrow sum over two microbatches is rounded twice, each time
 * from f32. */
static void test_narrow(void **state) {
  (void)state;
  static const char *const names[] = {"front", "norm", "bias", "w0"};
  static const double of_one[] = {[RFR_F32] = 1.2e-7, [RFR_BF16] = 3.91e-3, [RFR_F16] = 4.89e-4};
  for (int narrow = RFR_BF16; narrow <= RFR_F16; narrow++)
    for (int dtype = 0; dtype < 2; dtype++) {
      scene wide = {.dtype = dtype ? RFR_BF16 : RFR_F32}, s = wide;
      rfr_schedule *schedule[2];
      rfr_graphs *g[2];
      for (int i = 0; i < 4; i++) s.main[s.n_main++] = entry(names[i], 0, (rfr_dtype)narrow);
      OK(make(&wide, &g[0], &schedule[0]));
      OK(make(&s, &g[1], &schedule[1]));
      for (int k = 0; k < 2; k++) {
        init(g[k], &wide);
        run(g[k], &wide, schedule[k]);
      }
      for (int i = 0; i < 4; i++) {
        rfr_tensor x, y;
        void *a = gradient(g[0], names[i], &x), *b = gradient(g[1], names[i], &y);
        assert_int_equal(x.type.dtype, RFR_F32);
        assert_int_equal(y.type.dtype, narrow);
        double most = 0, off = 0;
        for (int64_t k = 0; k < rfi_count(&x.type); k++) {
          const double want = of_bits(RFR_F32, a, k), got = of_bits((rfr_dtype)narrow, b, k);
          if (fabs(want) > most) most = fabs(want);
          if (fabs(want - got) > off) off = fabs(want - got);
        }
        assert_true(most > 0.1 && off > 0); /* it is narrow */
        if (off > 2 * of_one[narrow] * most) fail_msg("%s: off by %g of %g", names[i], off, most);
        free(a);
        free(b);
      }
      for (int k = 0; k < 2; k++) {
        rfr_graphs_destroy(g[k]);
        rfr_schedule_destroy(schedule[k]);
      }
    }
}

/* Two steps with the same values: accumulated gradients are the sum of both steps, cleared ones those of the second. */
static void test_kept_and_cleared(void **state) {
  (void)state;
  scene s = {.separate = true, .delayed = true, .dtype = RFR_BF16};
  for (int i = 0; i < GROUPS; i++) s.main[s.n_main++] = entry(weight_names[i], i % 2, i < 2 ? RFR_F32 : RFR_BF16);
  rfr_schedule *schedule;
  rfr_graphs *g;
  OK(make(&s, &g, &schedule));
  init(g, &s);
  void *once[GROUPS];
  rfr_tensor x;
  for (int step = 0; step < 2; step++) {
    run(g, &s, schedule);
    for (int i = 0; i < GROUPS; i++) {
      void *now = gradient(g, weight_names[i], &x);
      assert_int_equal(x.type.dtype, i < 2 ? RFR_F32 : RFR_BF16);
      double most = 0, off = 0;
      for (int64_t k = 0; k < OUT * IN && step; k++) {
        const double want = (1 + i % 2) * of_bits(x.type.dtype, once[i], k), got = of_bits(x.type.dtype, now, k);
        if (fabs(want) > most) most = fabs(want);
        if (fabs(want - got) > off) off = fabs(want - got);
      }
      if (step) assert_true(most > 0.1 && (i % 2 ? off <= 0.01 * most : off == 0));
      if (step) free(once[i]);
      once[i] = now;
    }
  }
  for (int i = 0; i < GROUPS; i++) free(once[i]);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* ---- refusals ---- */

static void refused(rfr_status st, const char *slug, const char *text) {
  const rfr_error *e = rfr_last_error();
  if (st == RFR_OK) fail_msg("taken, but should be %s: %s", slug, text);
  if (strcmp(e->slug, slug) != 0 || !strstr(e->message, text)) fail_msg("%s: %s", e->slug, e->message);
}

/* A dense view is accepted; for a strided one the message has its shape and strides. */
static void test_views(void **state) {
  (void)state;
  static const int64_t dense[2] = {IN, 1}, padded[2] = {IN + 8, 1}, turned[2] = {1, IN};
  rfr_schedule *schedule;
  rfr_graphs *g;
  scene s = {.dtype = RFR_F32, .n_main = 1, .main = {entry("front", 0, RFR_F32)}};
  s.main[0].strides = dense, s.main[0].n_strides = 2;
  OK(make(&s, &g, &schedule));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  s.main[0].strides = padded;
  refused(make(&s, &g, &schedule), "program.state", "\"front\", shape [40,40]: strides [48,1] are not dense");
  s.main[0].strides = turned;
  refused(make(&s, &g, &schedule), "program.state", "strides [1,40]");
  s.main[0].n_strides = 1;
  refused(make(&s, &g, &schedule), "program.state", "\"front\": 1 strides for rank 2");
}

/* A main gradient must have a complete type and memory of that size: otherwise creation fails and clears nothing. */
static void test_types(void **state) {
  (void)state;
  static _Alignas(16) unsigned char memory[IN * IN * 4];
  const rfr_type square = {.dtype = RFR_BF16, .rank = 2, .shape = {IN, IN}};
  rfr_schedule *schedule;
  rfr_graphs *g;
  scene s = {.dtype = RFR_BF16, .n_main = 1, .main = {entry("front", 0, RFR_I32)}};
  refused(make(&s, &g, &schedule), "program.state", "\"front\": its type must have dtype f32, bf16 or f16");
  s.main[0] = rft_main_gradient("front", square, memory, 0);
  if (strcmp(rfi_ctx_device(ctx), "cpu") == 0) { /* a GPU cannot access this memory */
    memset(memory, 1, sizeof memory);
    OK(make(&s, &g, &schedule));
    OK(rfr_graphs_begin_step(g, NULL, 0));
    OK(rfr_graphs_abort_step(g));
    for (size_t i = 0; i < sizeof memory; i++) assert_int_equal(memory[i], i >= sizeof memory / 2);
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
  s.main[0].type.dtype = (rfr_dtype)0; /* f64 */
  refused(make(&s, &g, &schedule), "program.state", "\"front\": its type must have");
  s.main[0].type.dtype = RFR_F32; /* memory for bf16 */
  refused(make(&s, &g, &schedule), "program.state", "bytes is 3200, f32[40,40] needs 6400");
  s.main[0] = rft_main_gradient("front", (rfr_type){.dtype = RFR_F32, .rank = 2, .shape = {IN, OUT}}, NULL, 0);
  refused(make(&s, &g, &schedule), "program.state", "its type is f32[40,72], needed is f32[40,40]");
  s.main[0] = entry("front", 0, RFR_F32), s.main[0].bytes = 4;
  refused(make(&s, &g, &schedule), "program.state", "data NULL needs 0");
  s.main[0] = entry("front", 0, RFR_F32), s.main[0].size = 8;
  refused(make(&s, &g, &schedule), "argument", "rfr_main_gradient_default sets");
  s.main[0] = entry(NULL, 0, RFR_F32);
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  rfr_trace *t = record(&s);
  c.trace = t, o.gradients = s.main, o.n_gradients = 1;
  refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "argument", "parameter is NULL");
  rfr_trace_destroy(t);
}

static rfr_status ask(const rfr_graphs *g, const char *name) {
  rfr_tensor x;
  return rfr_graphs_gradient(g, name, &x);
}

static void test_presence(void **state) {
  (void)state;
  for (int delayed = 0; delayed < 2; delayed++) {
    const scene s = {.dtype = RFR_F32, .delayed = delayed};
    const int64_t splits[GROUPS] = {1, 2, 3, 4};
    rft_room room = rft_room_open(ctx, sizeof splits);
    const rfr_type tx = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, IN}};
    const rfr_type ty = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, OUT}};
    float *x = draw(&tx, 1), *dy = draw(&ty, 2);
    const rfr_type ts = {.dtype = RFR_I64, .rank = 1, .shape = {GROUPS}};
    const rfr_binding in[2] = {{"x", tx, x}, {"splits", ts, rft_room_put(&room, 0, splits, sizeof splits)}};
    const rfr_binding grad = {"y", ty, dy};
    rfr_tensor y, dx[2];
    rfr_schedule *schedule;
    rfr_graphs *g;
    OK(make(&s, &g, &schedule));
    OK(ask(g, "front")); /* its memory, between steps */
    OK(rfr_graphs_begin_step(g, NULL, 0));
    const char *const last =
        delayed ? "wgrad of callable \"0\", microbatch 1" : "backward (B) of callable \"0\", microbatch 1";
    refused(ask(g, "front"), "graphs.order", last);
    refused(rfr_graphs_wgrad(g, 0, 0), "graphs.order", "expects forward");
    for (int m = 0; m < 2; m++) {
      OK(rfr_graphs_forward(g, 0, m, in, 2, &y, 1));
      if (!delayed) OK(rfr_graphs_backward(g, 0, m, &grad, 1, dx, 2));
      if (m == 0) refused(ask(g, "front"), "graphs.order", last);
    }
    for (int m = 0; m < 2 && delayed; m++) OK(rfr_graphs_backward(g, 0, m, &grad, 1, dx, 2));
    for (int m = 0; m < 2 && delayed; m++) {
      refused(ask(g, "w0"), "graphs.order", last);
      OK(rfr_graphs_wgrad(g, 0, m));
    }
    OK(ask(g, "w0")); /* within the step, after everything that adds to it has run */
    refused(rfr_graphs_wgrad(g, 0, 1), "graphs.order", "has no more");
    OK(rfr_graphs_end_step(g));
    OK(ask(g, "front"));
    OK(rfr_graphs_begin_step(g, NULL, 0));
    refused(ask(g, "front"), "graphs.order", last);
    OK(rfr_graphs_abort_step(g));
    OK(ask(g, "front"));
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
    rft_room_close(&room);
    free(x);
    free(dy);
  }
}

int main(int argc, char **argv) {
  if (!rft_device_named(&argc, argv)) return 77;
  const struct CMUnitTest tests[] = {
      rft_context_test(test_grouped), rft_context_test(test_narrow), rft_context_test(test_kept_and_cleared),
      rft_context_test(test_views),   rft_context_test(test_types),  rft_context_test(test_presence),
  };
  return cmocka_run_group_tests_name("main gradients", tests, NULL, NULL);
}
