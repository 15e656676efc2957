/* SPDX-License-Identifier: Apache-2.0
 *
 * States shared by callables are accepted where every schedule gives the same values, and refused elsewhere. Reserved
 * names; microbatch numbers of more than one byte; a device that cannot run.
 */
#include <math.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C };

/* ---- shared states ---- */

/* A callable that uses the cache in one way: 'n' not at all, 'w' it writes it, 'r' the forward reads it, 'b' the
 * backward reads it. */
static rfr_trace *trace_of(char use, const char *output) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 3, ((int64_t[]){4, 2, 8}));
  rfr_value y = rfr_silu(t, x);
  if (use != 'n') {
    rfr_value cache = rfr_input(t, "cache", RFR_ROLE_STATE, RFR_F32, 3, ((int64_t[]){4, 2, 8}));
    rfr_value cursor = rfr_input(t, "cursor", RFR_ROLE_CONST, RFR_I64, 1, ((int64_t[]){4}));
    if (use == 'w') rfr_cache_write(t, cache, rfr_detach(t, x), cursor);
    if (use == 'r') rfr_output(t, "seen", rfr_copy(t, cache));
    if (use == 'b') y = rfr_mul(t, y, cache); /* its gradient reads it */
  }
  rfr_output(t, output, y);
  OK(rfr_trace_finish(t));
  return t;
}

/* Callables of two traces; the second is linked to the first, or not. The traces are destroyed afterwards. */
static rfr_status create_pair(rfr_trace *const t[2], const rfr_callable_link *link, const char *schedule_text,
                              int layers, rfr_graphs **g) {
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule;
  OK(rfr_schedule_parse(ctx, "test", schedule_text, strlen(schedule_text), &schedule));
  OK(rfr_schedule_set_layers(schedule, &layers, 1));
  for (int i = 0; i < 2; i++) c[i].trace = t[i];
  c[1].links = link, c[1].n_links = link != NULL;
  o.schedule = schedule;
  const rfr_status s = rfr_graphs_create(ctx, c, 2, &o, g);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
  return s;
}

static rfr_status create_two(char a, char b, const char *schedule_text, int layers, rfr_graphs **g) {
  return create_pair((rfr_trace *[]){trace_of(a, "y"), trace_of(b, "y")}, NULL, schedule_text, layers, g);
}

static void test_shared_states(void **state) {
  (void)state;
  static const char one[] = "0F0 0F1 0B0 0B1", two[] = "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1";
  static const struct {
    char a, b;
    bool two;
    const char *text; /* NULL: accepted */
  } cases[] = {{'w', 'r', false, NULL},
               {'r', 'w', false, NULL},
               {'w', 'w', false, NULL},
               {'r', 'r', true, NULL},
               {'r', 'b', true, NULL},
               {'w', 'n', true, NULL},
               {'w', 'r', true, "callable \"1\": state \"cache\" is written by callable \"0\" in another stage"},
               {'r', 'w', true, "callable \"0\": state \"cache\" is written by callable \"1\""},
               {'w', 'w', true, "callable \"1\": state \"cache\" is written by callable \"0\""},
               {'w', 'b', false, "in another part"},
               {'b', 'w', false, "callable \"0\": state \"cache\" is written by callable \"1\""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_graphs *g;
    const rfr_status s = create_two(cases[i].a, cases[i].b, cases[i].two ? two : one, cases[i].two ? 1 : 2, &g);
    if (cases[i].text) rft_refused(s, "graphs.callable", cases[i].text);
    else OK(s);
    rfr_graphs_destroy(g);
  }
}

/* ---- states that are outputs ---- */

/* Writes x into its cache and outputs the cache: as it is, under the state's name, reshaped, or as a copy. */
static rfr_trace *writer(char how) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 3, ((int64_t[]){4, 2, 8}));
  rfr_value cache = rfr_input(t, "cache", RFR_ROLE_STATE, RFR_F32, 3, ((int64_t[]){4, 2, 8}));
  rfr_value cursor = rfr_input(t, "cursor", RFR_ROLE_CONST, RFR_I64, 1, ((int64_t[]){4}));
  rfr_value now = rfr_cache_write(t, cache, x, cursor);
  if (how == 'v') now = rfr_reshape(t, now, 1, ((int64_t[]){64}));
  rfr_output(t, how == 'n' ? "cache" : "seen", how == 'c' ? rfr_copy(t, now) : now);
  OK(rfr_trace_finish(t));
  return t;
}

/* y = x w, where w is the state that the first callable writes; the gradient reads w after the next microbatch's
 * forward. */
static rfr_status create_seen(char how, bool linked, rfr_graphs **g) {
  const rfr_callable_link link = {"x", 0, how == 'n' ? "cache" : "seen"};
  const int rank = how == 'v' ? 1 : 3;
  const int64_t *shape = how == 'v' ? (const int64_t[]){64} : (const int64_t[]){4, 2, 8};
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, rank, shape);
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, rank, shape);
  rfr_output(t, "y", rfr_mul(t, x, w));
  OK(rfr_trace_finish(t));
  return create_pair((rfr_trace *[]){writer(how), t}, linked ? &link : NULL, "0F0 0F1 0B0 0B1", 2, g);
}

/* A written state does not belong to one microbatch: it may be an output only under its own name, and no input may be
 * linked to it. A copy of it is an ordinary output. */
static void test_state_outputs(void **state) {
  (void)state;
  static const rfr_type type = {.dtype = RFR_F32, .rank = 3, .shape = {4, 2, 8}};
  for (int linked = 0; linked < 2; linked++) {
    rfr_graphs *g;
    rfr_tensor seen[2], y, gradient;
    static float x[2][64], dy[2][64];
    const int64_t cursor[4] = {0, 4, 0, 0};
    const rfr_binding at = {"cursor", {.dtype = RFR_I64, .rank = 1, .shape = {4}}, cursor};
    rft_refused(create_seen('s', linked, &g), "graphs.callable", "output \"seen\" aliases state \"cache\"");
    rft_refused(create_seen('v', linked, &g), "graphs.callable", "output \"seen\" aliases state \"cache\"");
    const rfr_status named = create_seen('n', linked, &g);
    if (linked) rft_refused(named, "graphs.callable", "output rfr_copy of it, and link that");
    else OK(named);
    rfr_graphs_destroy(g);
    OK(create_seen('c', linked, &g));
    OK(rfr_graphs_begin_step(g, &at, 1));
    for (int m = 0; m < 2; m++) {
      for (int i = 0; i < 64; i++) x[m][i] = (float)(m + 1), dy[m][i] = (float)(3 - 2 * m);
      const rfr_binding given = {NULL, type, x[m]};
      OK(rfr_graphs_forward(g, 0, m, &given, 1, &seen[m], 1));
      const rfr_binding next = {NULL, type, seen[m].data};
      OK(rfr_graphs_forward(g, 1, m, &next, !linked, &y, 1));
    }
    for (int m = 0; m < 2; m++)
      for (int i = 0; i < 64; i++) assert_true(((float *)seen[m].data)[i] == (float)(m + 1));
    for (int m = 0; m < 2; m++) {
      const rfr_binding given = {NULL, type, dy[m]};
      rfr_tensor dx;
      OK(rfr_graphs_backward(g, 1, m, &given, 1, &dx, !linked));
    }
    OK(rfr_graphs_end_step(g));
    OK(rfr_graphs_gradient(g, "w", &gradient));
    for (int i = 0; i < 64; i++) assert_true(((float *)gradient.data)[i] == 3 * 1 + 1 * 2);
    rfr_graphs_destroy(g);
  }
}

/* ---- aliases ---- */

/* x is also an output, alone or besides y = 3 x, and is passed to a second callable of the same kind; an unused input
 * is accepted. Gradients are correct whichever value owns the memory. */
static void test_pass_through(void **state) {
  (void)state;
  static float x[8], idle[8], dsame[8], dy[8];
  const rfr_type type = {.dtype = RFR_F32, .rank = 1, .shape = {8}};
  for (int i = 0; i < 8; i++) x[i] = (float)i - 3, dsame[i] = 0.5f + (float)i, dy[i] = 2 - (float)i;
  for (int alone = 0; alone < 2; alone++)
    for (int linked = 0; linked < 2; linked++) {
      rfr_trace *t;
      rfr_graphs *g;
      rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
      const rfr_callable_link link = {"x", 0, "same"};
      OK(rfr_trace_create(ctx, &t));
      rfr_value in = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, type.shape);
      rfr_input(t, "idle", RFR_ROLE_INPUT, RFR_F32, 1, type.shape);
      rfr_output(t, "same", in);
      if (!alone) rfr_output(t, "y", rfr_scale(t, in, 3, RFR_NONE));
      OK(rfr_trace_finish(t));
      for (int i = 0; i < 2; i++) c[i].trace = t;
      c[1].links = &link, c[1].n_links = linked;
      OK(rfr_graphs_create(ctx, c, 2, NULL, &g));
      const rfr_binding given[2] = {{"x", type, x}, {"idle", type, idle}};
      const rfr_binding grads[2] = {{"same", type, dsame}, {"y", type, dy}};
      rfr_tensor out[2], dx[2], last[2];
      OK(rfr_graphs_begin_step(g, NULL, 0));
      OK(rfr_graphs_forward(g, 0, 0, given, 2, out, alone ? 1 : 2));
      OK(rfr_graphs_forward(g, 1, 0, &given[linked], 2 - linked, out, alone ? 1 : 2));
      assert_memory_equal(out[0].data, x, sizeof x);
      for (int i = 0; i < 8 && !alone; i++) assert_true(((float *)out[1].data)[i] == 3 * x[i]);
      OK(rfr_graphs_backward(g, 1, 0, grads, alone ? 1 : 2, last, 2 - linked));
      OK(rfr_graphs_backward(g, 0, 0, &grads[linked], (alone ? 1 : 2) - linked, dx, 2));
      OK(rfr_graphs_end_step(g));
      for (int i = 0; i < 8; i++) {
        const float once = dsame[i] + (alone ? 0 : 3 * dy[i]), twice = once + (alone ? 0 : 3 * dy[i]);
        assert_true(((float *)dx[0].data)[i] == (linked ? twice : once));
      }
      assert_null(dx[1].data);
      rfr_graphs_destroy(g);
      rfr_trace_destroy(t);
    }
}

/* ---- names ---- */

static void test_names(void **state) {
  (void)state;
  static const char *const names[] = {"grad.b0.w", "grad.", "unreduced.x", "graphs.microbatch", "graphs.skip"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (int as_output = 0; as_output < 2; as_output++) {
      rfr_trace *t;
      rfr_graphs *g;
      rfr_callable c = rfr_callable_default();
      OK(rfr_trace_create(ctx, &t));
      rfr_value x = rfr_input(t, as_output ? "x" : names[i], RFR_ROLE_INPUT_GRAD, RFR_F32, 1, ((int64_t[]){C}));
      rfr_output(t, as_output ? names[i] : "y", rfr_silu(t, x));
      OK(rfr_trace_finish(t));
      c.trace = t;
      rft_refused(rfr_graphs_create(ctx, &c, 1, NULL, &g), "graphs.callable", names[i]);
      rfr_trace_destroy(t);
    }
  rfr_graphs *g;
  rfr_trace *t = trace_of('n', "gradient"); /* without a reserved prefix */
  rfr_callable c = rfr_callable_default();
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

/* The tensors of the options must not be main gradients or unreduced gradients. */
static void test_gradients_by_name(void **state) {
  (void)state;
  static const char *const names[] = {"grad.b0.w", "unreduced.grad.b0.w"};
  _Alignas(16) static float memory[C * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  rfr_trace *t = rft_block_trace(&s, 0);
  for (int sharded = 0; sharded < 2; sharded++)
    for (int flat = 0; flat < 2; flat++)
      for (int i = 0; i < 2; i++) {
        const rfr_type type = {.dtype = RFR_F32, .rank = flat ? 1 : 2, .shape = {flat ? C * C : C, flat ? 0 : C}};
        const rfr_binding given = {names[i], type, memory};
        rfr_graphs_options o = rfr_graphs_options_default();
        rfr_callable c = rfr_callable_default();
        rfr_graphs *g;
        c.trace = t, c.sharded = sharded;
        o.tensors = &given, o.n_tensors = 1;
        rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "program.name", names[i]);
      }
  rfr_trace_destroy(t);
}

/* Entries of a shape after its rank are ignored. */
static void test_types_of_the_callers(void **state) {
  (void)state;
  _Alignas(16) static float memory[C * C];
  static float x[T * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_type w, in;
  memset(&w, 0x5a, sizeof w);
  w.dtype = RFR_F32, w.rank = 2, w.shape[0] = w.shape[1] = C;
  in = w;
  in.shape[0] = T;
  rfr_binding given = {"b0.w", w, memory}, sample = {"x", in, x};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  rfr_graphs *g;
  rfr_tensor y;
  c.trace = t, c.samples = &sample, c.n_samples = 1;
  o.tensors = &given, o.n_tensors = 1;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  OK(rfr_graphs_begin_step(g, &given, 1));
  OK(rfr_graphs_forward(g, 0, 0, &sample, 1, &y, 1));
  rfr_graphs_destroy(g);
  given.type.shape[1]++;
  rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "program.state", "its type is f32[32,33], needed is f32[32,32]");
  given.type = w, given.type.rank = 3;
  rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "program.state", "its type is f32[32,32,");
  given.type = w, given.type.dtype = RFR_BF16;
  rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "program.state", "its type is bf16[32,32]");
  given.type = w, given.data = NULL;
  rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "program.state", "data is NULL");
  rfr_trace_destroy(t);
}

/* ---- microbatch numbers ---- */

/* Masks differ between microbatches whose numbers share their low byte, and are equal for equal numbers. */
static void test_microbatch_numbers(void **state) {
  (void)state;
  enum { N = 260 };
  static float y[2][N][T * C], x[T * C];
  const rft_scene s = {.block = rft_block_mlp, .blocks = 1, .dtype = RFR_F32};
  rfr_schedule *none;
  rfr_graphs *g = rft_make_graphs(&s, &none);
  const rfr_binding in = {NULL, rft_activation(&s), x};
  rfr_tensor out, dx;
  for (int i = 0; i < g->m.store.n; i++)
    if (g->m.store.named[i].tensor.type.dtype == RFR_F32)
      rft_fill_by(&g->m.store.named[i].tensor, 3 + (uint64_t)i, 0.5f);
  rft_fill_by(&(rfr_tensor){.type = rft_activation(&s), .data = x}, 1, 1);
  for (int step = 0; step < 2; step++) { /* the same step block, so the same masks */
    OK(rfr_graphs_set_rng(g, NULL, &(rfr_rng){7, 3}));
    OK(rfr_graphs_begin_step(g, NULL, 0));
    for (int m = 0; m < N; m++) {
      OK(rfr_graphs_forward(g, 0, m, &in, 1, &out, 1));
      memcpy(y[step][m], out.data, sizeof y[step][m]);
      OK(rfr_graphs_backward(g, 0, m, &in, 1, &dx, 1));
    }
    OK(rfr_graphs_end_step(g));
  }
  assert_memory_equal(y[0], y[1], sizeof y[0]);
  for (int m = 0; m < N - 256; m++) assert_memory_not_equal(y[0][m], y[0][m + 256], sizeof y[0][m]);
  for (int m = 1; m < N; m++) assert_memory_not_equal(y[0][m - 1], y[0][m], sizeof y[0][m]);
  rfr_graphs_destroy(g);
}

/* ---- a missing device ---- */

static void test_no_device(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_callable c = rfr_callable_default();
  rfr_ctx_options device = rfr_ctx_options_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_ctx *plans;
  rfr_graphs *g;
  device.device = "cuda:none";
  OK(rfr_ctx_create(&device, &plans));
  c.trace = t;
  rft_refused(rfr_graphs_create(plans, &c, 1, NULL, &g), "backend.missing", "rfr_graphs_options.eager");
  o.eager = 1, o.warmup_iterations = 1;
  rft_refused(rfr_graphs_create(plans, &c, 1, &o, &g), "backend.missing", "no warm-up");
  rfr_ctx_destroy(plans);
  rfr_trace_destroy(t);
}

/* ---- streams ---- */

static void test_no_stream(void **state) {
  (void)state;
  static rft_buffers b;
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  rfr_schedule *none;
  rfr_graphs *g = rft_make_graphs(&s, &none);
  OK(rfr_graphs_set_stream(g, NULL));
  rft_refused(rfr_graphs_set_stream(g, &b), "argument", "the CPU has none");
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_forward(g, &s, &b, 0, 0);
  rft_backward(g, &s, &b, 0, 0);
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
}

/* ---- values computed once ---- */

enum { BY_STEP, BY_WRITE, BY_POINTER, FROZEN_BY_WRITE, WAYS };

/* y of the second step: values that depend only on a constant and a frozen weight are recomputed, whichever way these
 * were written. */
static void run_written(int way, float first, float *y) {
  static float x[C], values[C];
  const rfr_type type = {.dtype = RFR_F32, .rank = 1, .shape = {C}};
  rfr_callable c = rfr_callable_default();
  rfr_trace *t;
  rfr_graphs *g;
  rfr_tensor k, w, out;
  OK(rfr_trace_create(ctx, &t));
  rfr_value in = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, type.shape);
  rfr_value constant = rfr_input(t, "k", RFR_ROLE_CONST, RFR_F32, 1, type.shape);
  rfr_value frozen = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 1, type.shape);
  rfr_output(t, "y", rfr_mul(t, rfr_mul(t, in, rfr_silu(t, constant)), rfr_gelu(t, frozen, 1)));
  OK(rfr_trace_finish(t));
  c.trace = t, c.inference = 1;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  const rfr_trace *made = rfr_graphs_trace(g, 0);
  int loads = 0;
  for (int i = 0; i < made->n_ops; i++) loads += made->ops[i].phase == RFR_PHASE_LOAD;
  assert_true(loads >= 2);
  OK(rfr_graphs_tensor(g, "k", &k));
  OK(rfr_graphs_tensor(g, "w", &w));
  for (int i = 0; i < C; i++) x[i] = 1 + (float)i;
  for (int step = 0; step < 2; step++) {
    const rfr_binding now = {"k", type, values}, give = {NULL, type, x};
    for (int i = 0; i < C; i++) values[i] = step == 0 ? first : 2 + 0.25f * (float)i;
    if (step == 0 || way == BY_WRITE) OK(rfr_graphs_write(g, &k, values));
    if (step == 0 || way == FROZEN_BY_WRITE) OK(rfr_graphs_write(g, &w, values));
    if (step == 1 && way == BY_POINTER) {
      memcpy(k.data, values, sizeof values);
      OK(rfr_graphs_changed(g));
    }
    OK(rfr_graphs_begin_step(g, &now, step == 1 && way == BY_STEP));
    OK(rfr_graphs_forward(g, 0, 0, &give, 1, &out, 1));
    memcpy(y, out.data, sizeof x);
    OK(rfr_graphs_end_step(g));
  }
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

static double silu(double x) { return x / (1 + exp(-x)); }
static double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

static void test_written(void **state) {
  (void)state;
  for (int way = 0; way < WAYS; way++) {
    float y[C];
    run_written(way, 0.5f, y);
    for (int i = 0; i < C; i++) {
      const double last = 2 + 0.25 * i, k = way == FROZEN_BY_WRITE ? 0.5 : last,
                   w = way == FROZEN_BY_WRITE ? last : 0.5;
      const double want = (1 + i) * silu(k) * gelu(w);
      if (!(fabs(y[i] - want) <= 1e-5 * fabs(want))) fail_msg("way %d, %d: %g, not %g", way, i, (double)y[i], want);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_shared_states),
                                     rft_context_test(test_state_outputs),
                                     rft_context_test(test_names),
                                     rft_context_test(test_gradients_by_name),
                                     rft_context_test(test_types_of_the_callers),
                                     rft_context_test(test_pass_through),
                                     rft_context_test(test_microbatch_numbers),
                                     rft_context_test(test_no_device),
                                     rft_context_test(test_no_stream),
                                     rft_context_test(test_written)};
  return cmocka_run_group_tests_name("what graphs share", tests, NULL, NULL);
}
