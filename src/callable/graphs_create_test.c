/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of rfr_graphs_create: traces of another context or unfinished ones, NULL out parameters, default random sites
 * in a pipeline, unused parameters, samples, hook lists that are malformed or cannot run; and the fields of hook
 * events.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"
#include "support/text.h"

enum { N = 8 };
static const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {N, N}};
static const rft_scene linear = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};

static rfr_status create(const rfr_callable *c, int n, const rfr_graphs_options *o) {
  rfr_graphs *g;
  const rfr_status s = rfr_graphs_create(ctx, c, n, o, &g);
  if (s != RFR_OK) assert_null(g);
  rfr_graphs_destroy(g);
  return s;
}

/* ---- contexts and traces ---- */

static rfr_trace *record_linear(rfr_ctx *of, bool finish) {
  rfr_trace *t;
  OK(rfr_trace_create(of, &t));
  const rfr_value x = rfr_input_at(t, RFR_HERE, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, square.shape);
  const rfr_value w = rfr_input_at(t, RFR_HERE, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, square.shape);
  rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
  if (finish) OK(rfr_trace_finish(t));
  return t;
}

static void test_other_context(void **state) {
  (void)state;
  rfr_ctx *other;
  rfr_schedule *schedule;
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  OK(rfr_ctx_create(NULL, &other));
  rfr_trace *foreign = record_linear(other, true), *own = record_linear(ctx, true);
  c.trace = foreign;
  rft_refused(create(&c, 1, NULL), "graphs.callable", "callable \"0\": its trace was recorded in another context");
  OK(rfr_schedule_parse(other, "test", "0F0 0B0", 7, &schedule));
  c.trace = own, o.schedule = schedule;
  rft_refused(create(&c, 1, &o), "argument", "rfr_graphs_options.schedule belongs to another context");
  rfr_graphs *g;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  rft_refused(rfr_graphs_reschedule(g, schedule), "argument", "belongs to another context");
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  rfr_trace_destroy(foreign);
  rfr_trace_destroy(own);
  rfr_ctx_destroy(other);
}

static void test_unfinished(void **state) {
  (void)state;
  rfr_callable c = rfr_callable_default();
  rfr_trace *t = record_linear(ctx, false);
  c.trace = t;
  rft_refused(create(&c, 1, NULL), "graphs.callable", "callable \"0\": its trace is not finished");
  OK(rfr_trace_finish(t));
  OK(create(&c, 1, NULL));
  rfr_output(t, "z", rfr_silu(t, t->inputs[0])); /* rejected once the trace is finished */
  rft_refused(create(&c, 1, NULL), "graphs.callable", "not finished");
  rfr_trace_destroy(t);
}

static void test_null_out(void **state) {
  (void)state;
  rfr_callable c = rfr_callable_default();
  rfr_trace *t = record_linear(ctx, true);
  rfr_graphs *g;
  rfr_action action;
  rfr_tensor x;
  rfr_rng rng = {0};
  float values[N * N];
  int n;
  c.trace = t;
  rft_refused(rfr_graphs_create(ctx, &c, 1, NULL, NULL), "argument", "is NULL");
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_refused(rfr_graphs_expected(g, NULL, &n), "argument", "is NULL");
  rft_refused(rfr_graphs_expected(g, &action, NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_grads_ready(g, NULL, 0, NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_forward(g, 0, 0, NULL, 1, &x, 1), "replay.signature", "takes 1 inputs");
  rft_refused(rfr_graphs_forward(g, 0, 0, &(rfr_binding){NULL, square, values}, 1, NULL, 1), "replay.signature",
              "room");
  OK(rfr_graphs_abort_step(g));
  rft_refused(rfr_graphs_tensor(g, "w", NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_gradient(g, "w", NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_tensor(g, NULL, &x), "program.name", "");
  OK(rfr_graphs_tensor(g, "w", &x));
  rft_refused(rfr_graphs_write(g, NULL, values), "argument", "is NULL");
  rft_refused(rfr_graphs_write(g, &x, NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_read(g, NULL, values), "argument", "is NULL");
  rft_refused(rfr_graphs_read(g, &x, NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_get_rng(g, NULL, NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_set_rng(g, NULL, NULL), "argument", "is NULL");
  rft_refused(rfr_graphs_set_rng(g, NULL, &rng), "program.name", "");
  rft_refused(rfr_graphs_get_memory(g, NULL), "argument", "is NULL");
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

/* A read or write must transfer exactly the bytes of the tensor's type, within memory of these graphs. */
static void test_bytes(void **state) {
  (void)state;
  rfr_callable c = rfr_callable_default();
  rfr_trace *t = record_linear(ctx, true);
  rfr_graphs *g;
  rfr_tensor w;
  static float values[2 * N * N];
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  OK(rfr_graphs_tensor(g, "w", &w));
  rfr_tensor x = w;
  x.bytes *= 2;
  rft_refused(rfr_graphs_write(g, &x, values), "argument", "\"w\": bytes is 512, its type has 256");
  x.type.shape[0] *= 2;
  rft_refused(rfr_graphs_write(g, &x, values), "argument", "\"w\": bytes is 512, the graphs have 256");
  x = w, x.bytes = -1;
  rft_refused(rfr_graphs_read(g, &x, values), "argument", "bytes is -1");
  x = w, x.type.shape[0] = x.type.shape[1] = (int64_t)1 << 32, x.bytes = 0;
  rft_refused(rfr_graphs_read(g, &x, values), "argument", "\"w\" has no valid type");
  x = w, x.name = NULL, x.data = values;
  rft_refused(rfr_graphs_write(g, &x, values), "argument", "is not memory of these graphs");
  OK(rfr_graphs_write(g, &w, values));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

/* ---- random sites ---- */

static rfr_status create_pipeline(const char *text, int rank, const int64_t *sites, int n) {
  const rft_scene s = {.block = rft_block_mlp, .blocks = 1, .dtype = RFR_F32};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_schedule *schedule;
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  assert_int_equal(rfr_trace_sites(t[0]), 1);
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule));
  for (int i = 0; i < 2; i++) c[i].trace = t[i], c[i].first_site = sites[i];
  o.schedule = schedule, o.rank = rank;
  const rfr_status st = create(c, n, &o);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  rfr_schedule_destroy(schedule);
  return st;
}

static void test_first_site(void **state) {
  (void)state;
  static const char text[] = "0F0 0B0\n1F0 1B0";
  static const char *const why =
      "draws random numbers in stage 1 of a schedule of 2 ranks: set rfr_callable.first_site";
  rfr_trace *t;
  OK(create_pipeline("0F0 1F0 1B0 0B0", 0, (int64_t[]){-1, -1}, 2)); /* this rank has all stages */
  rft_refused(create_pipeline(text, 1, (int64_t[]){-1, -1}, 1), "graphs.callable", why);
  OK(create_pipeline(text, 1, (int64_t[]){1, -1}, 1));
  OK(create_pipeline(text, 0, (int64_t[]){0, -1}, 1));
  /* a parsed trace also has its sites */
  const rft_scene s = {.block = rft_block_transformer, .blocks = 1, .dtype = RFR_F32};
  rfr_trace *recorded = rft_block_trace(&s, 0);
  rfr_print_options o = rfr_print_options_default();
  rft_text printed = {0};
  o.flat = 1;
  OK(rfr_trace_print(recorded, &o, rft_text_add, &printed));
  OK(rfr_trace_parse(ctx, "printed", printed.data, printed.n, &t));
  free(printed.data);
  assert_int_equal(rfr_trace_sites(recorded), 2);
  assert_int_equal(rfr_trace_sites(t), 2);
  rfr_trace_destroy(recorded);
  rfr_trace_destroy(t);
}

/* Numbers that would repeat the masks of another site or microbatch are refused. */
static void test_ranges(void **state) {
  (void)state;
  static float values[RFT_T * RFT_C];
  const rft_scene s = {.block = rft_block_mlp, .blocks = 1, .dtype = RFR_F32};
  const rfr_binding x = {NULL, rft_activation(&s), values};
  const int last = (1 << 20) - 1, wrong[] = {-1, last + 1, INT32_MAX};
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  rfr_tensor y;
  c.trace = t;
  for (int i = 0; i < 3; i++) {
    o.first_microbatch = wrong[i];
    rft_refused(create(&c, 1, &o), "argument", "first_microbatch");
  }
  o.first_microbatch = last;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  OK(rfr_graphs_begin_evaluation(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1));
  rft_refused(rfr_graphs_forward(g, 0, 1, &x, 1, &y, 1), "argument", "microbatch 1 + ");
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  c.first_site = (1 << 24) + 1;
  rft_refused(create(&c, 1, NULL), "argument", "first_site is 16777217");
  c.first_site = -1, c.first_linear = INT64_MAX;
  rft_refused(create(&c, 1, NULL), "argument", "first_linear is 9223372036854775807");
  c.first_linear = -1, c.n_inputs = 1;
  rft_refused(create(&c, 1, NULL), "argument", "a list is NULL");
  rfr_trace_destroy(t);
}

/* ---- unused parameters ---- */

static rfr_trace *record_unused(void) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input_at(t, RFR_HERE, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, square.shape);
  const rfr_value w = rfr_input_at(t, RFR_HERE, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, square.shape);
  rfr_input_at(t, RFR_HERE, "idle", RFR_ROLE_TRAINABLE, RFR_F32, 2, square.shape);
  rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
  OK(rfr_trace_finish(t));
  return t;
}

/* `given`, the entry of the main gradient: 'n' none, 'o' memory of the graphs, 'c' the caller's memory, cleared, 'k'
 * the caller's memory, accumulated. */
static void step_unused(char given, bool warm_up) {
  static _Alignas(16) float memory[N * N];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  rfr_graphs *g;
  rfr_trace *t = record_unused();
  rfr_tensor y, dx, grad;
  float values[N * N] = {1}, read[N * N];
  const rfr_binding in = {NULL, square, values};
  int n;
  for (int i = 0; i < N * N; i++) memory[i] = 7;
  rfr_main_gradient m = rft_main_gradient("idle", square, given == 'o' ? NULL : memory, given == 'k');
  c.trace = t;
  o.allow_unused_input = 1, o.warmup_iterations = warm_up;
  if (given != 'n') o.gradients = &m, o.n_gradients = 1;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  OK(rfr_graphs_tensor(g, "idle", &y));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, &in, 1, &y, 1));
  OK(rfr_graphs_backward(g, 0, 0, &in, 1, &dx, 1));
  OK(rfr_graphs_end_step(g));
  OK(rfr_graphs_grads_ready(g, NULL, 0, &n));
  assert_int_equal(n, given == 'n' ? 1 : 2);
  if (given == 'n') {
    rft_refused(rfr_graphs_gradient(g, "idle", &grad), "program.name", "no callable trains \"idle\"");
  } else {
    OK(rfr_graphs_gradient(g, "idle", &grad));
    OK(rfr_graphs_read(g, &grad, read));
    for (int i = 0; i < N * N; i++) assert_true(read[i] == (given == 'k' ? 7 : 0));
  }
  OK(rfr_graphs_gradient(g, "w", &grad));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

static void test_unused_parameter(void **state) {
  (void)state;
  rfr_callable c = rfr_callable_default();
  rfr_trace *t = record_unused();
  c.trace = t;
  rft_refused(create(&c, 1, NULL), "graphs.callable",
              "parameter \"idle\" needs a gradient, but no output depends on it: make it frozen, or set");
  rfr_trace_destroy(t);
  for (const char *given = "nock"; *given; given++)
    for (int warm_up = 0; warm_up < 2; warm_up++) step_unused(*given, warm_up);
}

/* ---- hooks ---- */

typedef struct seen {
  int events;
  bool frozen;
} seen;

static rfr_status look_at_event(const rfr_hook_event *e, void *user) {
  seen *s = user;
  s->events++;
  assert_string_equal(e->name, "layer");
  assert_int_equal(e->n_parameters, 2);
  for (int i = 0; i < 2; i++) {
    const bool w = strcmp(e->parameters[i].name, "b0.w") == 0;
    assert_string_equal(e->parameters[i].name, w ? "b0.w" : "b0.bias");
    assert_int_equal(e->parameters[i].type.rank, 1 + w);
    assert_non_null(e->parameters[i].data);
  }
  assert_int_equal(e->has_wgrad, !s->frozen);
  assert_int_equal(e->wgrad_reads, 0);
  return RFR_OK;
}

static void test_events(void **state) {
  (void)state;
  for (int frozen = 0; frozen < 2; frozen++) {
    rft_scene scene = linear;
    scene.frozen = (unsigned)frozen;
    seen s = {.frozen = frozen};
    const rfr_hook hook = {look_at_event, &s};
    rfr_hooks h = rfr_hooks_default();
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_callable c = rfr_callable_default();
    rfr_trace *t = rft_block_trace(&scene, 0);
    c.trace = t, c.name = "layer";
    h.pre_forward = h.post_forward = h.pre_backward = h.post_backward = (rfr_hook_list){&hook, 1};
    o.hooks = &h, o.n_hooks = 1, o.warmup_iterations = 1;
    OK(create(&c, 1, &o));
    assert_int_equal(s.events, 8);
    rfr_trace_destroy(t);
  }
}

/* W recomputes from parameters: a hook that frees them after the backward frees them too early. */
static rfr_status look_at_reads(const rfr_hook_event *e, void *user) {
  assert_int_equal(e->wgrad_reads, 1);
  ++*(int *)user;
  return RFR_OK;
}

static void test_wgrad_reads(void **state) {
  (void)state;
  int events = 0;
  const rfr_hook hook = {look_at_reads, &events};
  rfr_hooks h = rfr_hooks_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  rft_scene s = {.block = rft_block_transformer, .blocks = 1, .dtype = RFR_F32, .fuse = true, .marked = 1};
  rfr_schedule *schedule;
  rfr_trace *t = rft_block_trace(&s, 0);
  OK(rfr_schedule_parse(ctx, "test", "0F0 0F1 0I0 0I1 0W0 0W1", 23, &schedule));
  c.trace = t, o.schedule = schedule;
  h.post_backward = (rfr_hook_list){&hook, 1};
  o.hooks = &h, o.n_hooks = 1;
  OK(create(&c, 1, &o));
  assert_true(events > 0);
  rfr_trace_destroy(t);
  rfr_schedule_destroy(schedule);
}

static rfr_status never(const rfr_hook_event *e, void *user) {
  (void)e, (void)user;
  fail();
  return RFR_OK;
}

static void test_hooks_that_never_run(void **state) {
  (void)state;
  const rfr_hook hook = {never, NULL};
  const rfr_hook_list list = {&hook, 1};
  for (int k = 0; k < 4; k++) {
    static const char *const names[] = {"pre_backward", "post_backward", "pre_wgrad", "post_wgrad"};
    char text[64];
    rfr_hooks h = rfr_hooks_default();
    rfr_hook_list *const lists[] = {&h.pre_backward, &h.post_backward, &h.pre_wgrad, &h.post_wgrad};
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_callable c = rfr_callable_default();
    rft_scene scene = linear;
    scene.frozen = k >= 2;
    rfr_trace *t = rft_block_trace(&scene, 0);
    c.trace = t, c.inference = k < 2;
    *lists[k] = list;
    o.hooks = &h, o.n_hooks = 1;
    snprintf(text, sizeof text, "callable \"0\" has %s hooks, which never run", names[k]);
    rft_refused(create(&c, 1, &o), "graphs.callable", text);
    rfr_trace_destroy(t);
  }
}

/* ---- samples ---- */

static rfr_status look_at_sample(const rfr_hook_event *e, void *user) {
  int *looked = user;
  const float first = ((const float *)e->inputs[0].data)[0];
  if (e->capture) return RFR_OK;
  looked[e->callable]++;
  return first == (e->callable == 0 && e->point < RFR_HOOK_PRE_BACKWARD ? 0.75f : 0) ? RFR_OK : RFR_NUMERIC;
}

/* Every iteration of warm-up reads the samples, or zeros where there is none. */
static void test_samples(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  static float x[RFT_T * RFT_C];
  const rfr_type type = rft_activation(&s), other = {.dtype = RFR_F32, .rank = 1, .shape = {RFT_T * RFT_C}};
  const rfr_binding good = {"x", type, x};
  const struct {
    rfr_binding sample;
    const char *text;
  } bad[] = {{{"y", type, x}, "there is no such input"},
             {{NULL, type, x}, "there is no such"},
             {{"x", other, x}, "its type is f32[768], needed is f32[24,32]"},
             {{"x", {.dtype = (rfr_dtype)99, .rank = 2}, x}, "its type is no type, needed is f32[24,32]"},
             {{"x", {.dtype = RFR_F32, .rank = 1000}, x}, "its type is no type"},
             {{"x", {.dtype = RFR_F32, .rank = -1}, x}, "its type is no type"},
             {{"x", type, NULL}, "no data"}};
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  int looked[2] = {0, 0};
  const rfr_hook hook = {look_at_sample, looked};
  rfr_hooks hooks[2] = {rfr_hooks_default(), rfr_hooks_default()};
  rfr_graphs *g;
  for (int i = 0; i < RFT_T * RFT_C; i++) x[i] = 0.75f;
  for (int i = 0; i < 2; i++) {
    c[i].trace = t[i];
    hooks[i].pre_forward = hooks[i].post_forward = hooks[i].pre_backward = (rfr_hook_list){&hook, 1};
  }
  c[0].samples = &good, c[0].n_samples = 1;
  o.hooks = hooks, o.n_hooks = 2;
  o.warmup_iterations = 3;
  OK(rfr_graphs_create(ctx, c, 2, &o, &g));
  rfr_graphs_destroy(g);
  assert_true(looked[0] == 9 && looked[1] == 9);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    c[0].samples = &bad[i].sample;
    rft_refused(rfr_graphs_create(ctx, c, 2, &o, &g), "graphs.callable", bad[i].text);
  }
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

/* ---- malformed hooks ---- */

static rfr_status no_hook(const rfr_hook_event *e, void *user) {
  (void)e, (void)user;
  fail_msg("a hook was called");
  return RFR_OK;
}

/* Every misuse is refused before anything runs. */
static void test_hook_misuse(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  const rfr_hook good = {no_hook, NULL}, without = {NULL, NULL};
  enum { NONE, FEWER, MORE, NEGATIVE, NO_LIST, SIZE, NO_FUNCTION, NO_HOOKS, COUNT, WARMUP, ITERATIONS, TAIL, CASES };
  static const char *const texts[CASES] = {"hooks has 0 entries",  "hooks has 1 entries",   "hooks has 3 entries",
                                           "hooks has -1 entries", "hooks has 2 entries",   "hooks 1: size",
                                           "without a function",   "a hook list is NULL",   "a hook list is NULL",
                                           "without a function",   "-1 warm-up iterations", "rfr_graphs_options"};
  for (int i = 0; i < 2; i++) c[i].trace = t[i];
  for (int k = 0; k < CASES; k++) {
    struct {
      rfr_graphs_options o;
      int64_t tail;
    } longer = {rfr_graphs_options_default(), 0};
    rfr_graphs_options *o = &longer.o;
    rfr_hooks hooks[3] = {rfr_hooks_default(), rfr_hooks_default(), rfr_hooks_default()};
    rfr_graphs *g;
    for (int i = 0; i < 3; i++) hooks[i].pre_forward = (rfr_hook_list){&good, 1};
    o->hooks = k == NO_LIST ? NULL : hooks;
    o->n_hooks = k == NONE ? 0 : k == FEWER ? 1 : k == MORE ? 3 : k == NEGATIVE ? -1 : 2;
    o->warmup_iterations = k == ITERATIONS ? -1 : 1;
    o->pre_warmup = (rfr_hook_list){k == WARMUP ? &without : &good, 1};
    if (k == SIZE) hooks[1].size += 8;
    if (k == NO_FUNCTION) hooks[1].post_wgrad = (rfr_hook_list){&without, 1};
    if (k == NO_HOOKS) hooks[0].post_backward = (rfr_hook_list){NULL, 1};
    if (k == COUNT) hooks[0].pre_wgrad.n = -1;
    if (k == TAIL) longer.o.size = sizeof longer, longer.tail = 1;
    rft_refused(rfr_graphs_create(ctx, c, 2, o, &g), "argument", texts[k]);
    assert_null(g);
  }
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_other_context),    rft_context_test(test_unfinished),
      rft_context_test(test_null_out),         rft_context_test(test_bytes),
      rft_context_test(test_first_site),       rft_context_test(test_ranges),
      rft_context_test(test_unused_parameter), rft_context_test(test_events),
      rft_context_test(test_wgrad_reads),      rft_context_test(test_hooks_that_never_run),
      rft_context_test(test_samples),          rft_context_test(test_hook_misuse),
  };
  return cmocka_run_group_tests_name("graphs_create", tests, NULL, NULL);
}
