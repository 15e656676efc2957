/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks of programs: where in the step they run, results with and without them, the values that they read, what happens
 * if one fails, and what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/context.h"
#include "support/graphs_scene.h"

enum { ROWS = 3, WIDTH = 20, MICROBATCHES = 3 };

/* Two linear layers and a loss, all targets 0. With microbatches the sum of their losses is trained by SGD; without any
 * the program is one forward. With one microbatch a gradient is zeroed for the fused loss, before the forward has
 * ended. */
static rfr_trace *record(int microbatches) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const int64_t rows = ROWS * (microbatches ? microbatches : 1);
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){rows, WIDTH}));
  rfr_value w[2], loss = RFR_NONE;
  w[0] = rfr_input(t, "w0", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){WIDTH, WIDTH}));
  w[1] = rfr_input(t, "w1", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){WIDTH, WIDTH}));
  const rfr_value target = rfr_input(t, "target", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){rows}));
  const rfr_value inv = rfr_token_count(t, 1, &target, -100, NULL);
  for (int m = 0; m < (microbatches ? microbatches : 1); m++) {
    rfr_microbatch(t, microbatches ? m : -1);
    const rfr_value part = rfr_slice(t, x, 0, m * ROWS, ROWS), right = rfr_slice(t, target, 0, m * ROWS, ROWS);
    const rfr_value h = rfr_linear(t, rfr_silu(t, rfr_linear(t, part, w[0], RFR_NONE)), w[1], RFR_NONE);
    const rfr_value y = rfr_cross_entropy(t, h, right, inv, -100);
    loss = m ? rfr_add(t, loss, y) : y;
  }
  rfr_microbatch(t, -1);
  rfr_value g[2];
  for (int i = 0; i < 2 && microbatches; i++) g[i] = rfr_gradient(t, loss, w[i], RFR_F32);
  if (microbatches) {
    rfr_set_phase(t, RFR_PHASE_OPTIM);
    const rfr_value rate = rfr_fill(t, 1e-3, RFR_F32, 1, ((int64_t[]){1}));
    for (int i = 0; i < 2; i++) rfr_sgd(t, w[i], g[i], RFR_NONE, RFR_NONE, rate, RFR_NONE, RFR_NONE, 0, 0, 1);
  }
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  return t;
}

typedef struct notes { /* the calls of all hooks, as text; `fails`: the number of the call that fails */
  char text[512];
  int calls, fails;
  const rfr_programs *p; /* its tensors are compared with those of the event */
} notes;

static rfr_status note(const rfr_hook_event *e, void *user) {
  static const char points[] = "<>fFbBwW";
  notes *n = user;
  const size_t at = strlen(n->text);
  snprintf(n->text + at, sizeof n->text - at, "%c%d%s%s", points[e->point], e->microbatch, e->capture ? "c" : "",
           e->failed ? "!" : "");
  assert_int_equal(e->size, sizeof *e);
  assert_int_equal(e->callable, 0);
  assert_string_equal(e->name, "step");
  assert_int_equal(e->n_parameters, 2);
  assert_int_equal(e->n_inputs, 2);
  assert_int_equal(e->n_outputs, 1);
  assert_string_equal(e->inputs[0].name, "x");
  assert_string_equal(e->outputs[0].name, "loss");
  for (int i = 0; i < 2 && n->p; i++) {
    rfr_tensor w;
    OK(rfr_programs_tensor(n->p, i ? "w1" : "w0", &w));
    assert_ptr_equal(e->parameters[i].data, w.data);
  }
  return n->calls++ == n->fails ? RFR_IO : RFR_OK;
}

/* One hook at each point that a program with this many microbatches has. */
static rfr_hooks hooks_at(const rfr_hook *hook, int microbatches) {
  rfr_hooks h = rfr_hooks_default();
  h.pre_forward = h.post_forward = (rfr_hook_list){hook, 1};
  if (microbatches) h.pre_backward = h.post_backward = h.pre_forward;
  return h;
}

/* The compile copies hooks and lists, as the public header promises: the caller's may be freed afterwards. */
static rfr_programs *compile(const rfr_trace *t, notes *n, int microbatches, int debug, rfr_step_memory *step) {
  rfr_hook hook = {note, n};
  rfr_hooks h = hooks_at(&hook, microbatches);
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  o.hooks = n ? &h : NULL, o.n_hooks = n != NULL;
  o.debug = debug;
  o.step_memory = step;
  OK(rfr_compile(ctx, 1, &t, (const char *const[]){"step"}, &o, &p));
  memset(&h, 0, sizeof h);
  memset(&hook, 0, sizeof hook);
  rft_fill_inputs(p);
  return p;
}

static void assert_same(const rfr_programs *p, const rfr_programs *q) {
  rfr_tensor a, b;
  for (int i = 0; rfr_programs_tensor_at(p, i, &a) == RFR_OK; i++) {
    OK(rfr_programs_tensor(q, a.name, &b));
    assert_memory_equal(a.data, b.data, (size_t)a.bytes);
  }
  OK(rfr_program_output(p, 0, "loss", &a));
  OK(rfr_program_output(q, 0, "loss", &b));
  assert_memory_equal(a.data, b.data, (size_t)a.bytes);
  assert_true(isfinite(*(float *)a.data) && *(float *)a.data != 0);
}

static void order_and_bits(int microbatches, const char *order) {
  rfr_trace *t = record(microbatches);
  rfr_programs *plain = compile(t, NULL, microbatches, 0, NULL);
  for (int i = 0; i < 2; i++) OK(rfr_program_run(plain, 0));
  for (int debug = 0; debug < 2; debug++) {
    notes n = {.fails = -1};
    rfr_programs *p = compile(t, &n, microbatches, debug, NULL);
    n.p = p;
    assert_int_equal(n.calls, 0);
    OK(rfr_program_run(p, 0));
    assert_string_equal(n.text, order);
    OK(rfr_program_run(p, 0));
    assert_same(plain, p);
    rfr_programs_destroy(p);
  }
  rfr_programs_destroy(plain);
  rfr_trace_destroy(t);
}

static void test_order_and_bits(void **state) {
  (void)state;
  order_and_bits(MICROBATCHES, "f0F0b0B0f1F1b1B1f2F2b2B2");
  order_and_bits(1, "f0F0b0B0");
  order_and_bits(0, "f-1F-1");
}

/* One hook gathers the weights before the forward, another one frees them after it. */
static rfr_status gather(const rfr_hook_event *e, void *user) {
  const float *shadow = user;
  for (int i = 0; i < e->n_parameters; i++)
    for (int64_t k = 0; k < e->parameters[i].bytes / 4; k++)
      ((float *)e->parameters[i].data)[k] = e->point == RFR_HOOK_PRE_FORWARD ? shadow[k] : NAN;
  return RFR_OK;
}

static void test_gather(void **state) {
  (void)state;
  float shadow[WIDTH * WIDTH];
  for (int k = 0; k < WIDTH * WIDTH; k++) shadow[k] = (float)(k % 7) / 8 - 0.25f;
  rfr_trace *t = record(0);
  rfr_programs *plain = compile(t, NULL, 0, 0, NULL), *p;
  rfr_tensor w, a, b;
  for (int i = 0; i < 2; i++) {
    OK(rfr_programs_tensor(plain, i ? "w1" : "w0", &w));
    memcpy(w.data, shadow, sizeof shadow);
  }
  OK(rfr_program_run(plain, 0));
  const rfr_hook hook = {gather, shadow};
  const rfr_hooks h = hooks_at(&hook, 0);
  rfr_compile_options o = rfr_compile_options_default();
  o.hooks = &h, o.n_hooks = 1;
  OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p));
  rft_fill_inputs(p);
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(plain, 0, "loss", &a));
  OK(rfr_program_output(p, 0, "loss", &b));
  assert_memory_equal(a.data, b.data, (size_t)a.bytes);
  OK(rfr_programs_tensor(p, "w0", &w));
  assert_true(isnan(*(float *)w.data));
  rfr_programs_destroy(plain);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* After each failure the weights are as before, since the optimizer comes last. The next run is bitwise equal to the
 * first. */
static void test_failures(void **state) {
  (void)state;
  static const struct {
    int fails;
    const char *text, *error;
  } cases[] = {{0, "f0", "pre_forward hook 0 of program 0, microbatch 0, in a run"},
               {1, "f0F0", "post_forward hook 0 of program 0, microbatch 0, in a run"},
               {6, "f0F0b0B0f1F1b1", "pre_backward hook 0 of program 0, microbatch 1, in a run"},
               {11, "f0F0b0B0f1F1b1B1f2F2b2B2", "post_backward hook 0 of program 0, microbatch 2, in a run"}};
  rfr_trace *t = record(MICROBATCHES);
  rfr_programs *plain = compile(t, NULL, MICROBATCHES, 0, NULL);
  OK(rfr_program_run(plain, 0));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    notes n = {.fails = cases[i].fails};
    rfr_programs *p = compile(t, &n, MICROBATCHES, 0, NULL);
    rft_refused(rfr_program_run(p, 0), "graphs.hook", cases[i].error);
    assert_int_equal(rfr_last_error()->status, RFR_IO);
    assert_string_equal(n.text, cases[i].text);
    OK(rfr_program_run(p, 0));
    assert_same(plain, p);
    rfr_programs_destroy(p);
  }
  rfr_programs_destroy(plain);
  rfr_trace_destroy(t);
}

/* An op fails: the post hooks of its part run with `failed` set, no later hooks run, and the error of the op is
 * returned. */
static void test_failing_op(void **state) {
  (void)state;
  notes n = {.fails = -1};
  rfr_tensor x;
  rfr_trace *t = record(MICROBATCHES);
  rfr_programs *p = compile(t, &n, MICROBATCHES, 1, NULL);
  OK(rfr_programs_tensor(p, "x", &x));
  ((float *)x.data)[ROWS * WIDTH] = NAN; /* in microbatch 1 */
  rft_refused(rfr_program_run(p, 0), "debug.nonfinite", "not finite");
  assert_string_equal(n.text, "f0F0b0B0f1F1!");
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

static void test_capture(void **state) {
  (void)state;
  notes n = {.fails = -1};
  rfr_trace *t = record(0);
  rfr_programs *plain = compile(t, NULL, 0, 0, NULL), *p = compile(t, &n, 0, 0, NULL);
  OK(rfr_program_run(plain, 0));
  OK(rfr_program_capture(p, 0));
  OK(rfr_program_replay(p, 0, NULL, 0));
  OK(rfr_program_replay(p, 0, NULL, 0));
  assert_string_equal(n.text, "f-1cF-1c");
  assert_same(plain, p);
  n.fails = n.calls; /* the first hook of the next capture fails, so the program has no graph */
  rft_refused(rfr_program_capture(p, 0), "graphs.hook", "microbatch -1, in capture");
  rft_refused(rfr_program_replay(p, 0, NULL, 0), "program.order", "call rfr_program_capture first");
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);

  OK(rfr_trace_create(ctx, &t)); /* a forward, and an op of the step */
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){ROWS})), y = rfr_silu(t, x);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_output(t, "z", rfr_mul(t, y, y));
  OK(rfr_trace_finish(t));
  p = compile(t, &n, 0, 0, NULL);
  rft_refused(rfr_program_capture(p, 0), "argument", "its hooks run within");
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);

  t = record(MICROBATCHES);
  n = (notes){.fails = -1};
  p = compile(t, &n, MICROBATCHES, 0, NULL);
  rft_refused(rfr_program_capture(p, 0), "argument", "program \"step\" cannot be captured: its hooks run within");
  assert_int_equal(n.calls, 0);
  int ops;
  rfr_op_time times[64];
  rft_refused(rfr_program_profile(p, 0, times, 64, &ops), "argument", "has hooks");
  rfr_programs_destroy(plain);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Only one of two programs has hooks; the other is captured without. */
static void test_one_of_two(void **state) {
  (void)state;
  notes n = {.fails = -1};
  const rfr_hook hook = {note, &n};
  const rfr_hooks h[2] = {hooks_at(&hook, MICROBATCHES), rfr_hooks_default()};
  rfr_trace *t[] = {record(MICROBATCHES), record(0)};
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  o.hooks = h, o.n_hooks = 2;
  OK(rfr_compile(ctx, 1, (const rfr_trace *const *)t, NULL, NULL, &p));
  rfr_programs_destroy(p);
  const rfr_status s = rfr_compile(ctx, 2, (const rfr_trace *const *)t, (const char *const[]){"step", "other"}, &o, &p);
  rft_refused(s, "program.state", "\"x\""); /* another shape */
  rfr_trace_destroy(t[1]);
  t[1] = record(MICROBATCHES);
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)t, (const char *const[]){"step", "other"}, &o, &p));
  rft_fill_inputs(p);
  OK(rfr_program_capture(p, 1));
  OK(rfr_program_replay(p, 1, NULL, 0));
  OK(rfr_program_run(p, 1));
  assert_int_equal(n.calls, 0);
  OK(rfr_program_run(p, 0));
  assert_int_equal(n.calls, 4 * MICROBATCHES);
  rfr_programs_destroy(p);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

typedef struct reentry { /* a hook that runs programs; slug: the error that it got */
  rfr_programs *p;
  char slug[32];
} reentry;

static rfr_status run_programs(const rfr_hook_event *e, void *user) {
  reentry *r = user;
  if (e->point != RFR_HOOK_POST_FORWARD) return RFR_OK;
  assert_int_not_equal(rfr_program_run(r->p, 0), RFR_OK);
  snprintf(r->slug, sizeof r->slug, "%s", rfr_last_error()->slug);
  return rfr_program_capture(r->p, 0) == RFR_OK && r->slug[0] == 'p' ? RFR_IO : RFR_OK;
}

/* A hook can run neither its own programs nor others in the same step memory. */
static void test_reentry(void **state) {
  (void)state;
  rfr_trace *t = record(MICROBATCHES);
  rfr_step_memory *step;
  OK(rfr_step_memory_create(ctx, 0, &step));
  rfr_programs *plain = compile(t, NULL, MICROBATCHES, 0, step), *p;
  for (int own = 0; own < 2; own++) {
    reentry r = {plain, ""};
    const rfr_hook hook = {run_programs, &r};
    const rfr_hooks h = hooks_at(&hook, MICROBATCHES);
    rfr_compile_options o = rfr_compile_options_default();
    o.hooks = &h, o.n_hooks = 1;
    o.step_memory = step;
    OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p));
    rft_fill_inputs(p);
    if (own) r.p = p;
    OK(rfr_program_run(p, 0));
    assert_string_equal(r.slug, own ? "program.order" : "memory.in_use");
    OK(rfr_program_run(plain, 0)); /* the memory is free after the run */
    rfr_programs_destroy(p);
  }
  rfr_programs_destroy(plain);
  rfr_step_memory_destroy(step);
  rfr_trace_destroy(t);
}

static void test_refused(void **state) {
  (void)state;
  const rfr_hook hook = {note, NULL}, none = {NULL, NULL};
  const rfr_hook_list list = {&hook, 1};
  rfr_trace *t[] = {record(0), record(MICROBATCHES)};
  rfr_programs *p;
  const struct {
    int trace, n, point;
    rfr_hook_list list;
    size_t size;
    const char *text;
  } cases[] = {{1, 2, 0, list, 0, "rfr_compile_options.hooks has 2 entries for 1 programs"},
               {1, 1, 0, {NULL, 1}, 0, "a hook list is NULL"},
               {1, 1, 1, {&none, 1}, 0, "has a hook without a function"},
               {1, 1, 0, list, 8, "hooks 0: size is 8"},
               {0, 1, 2, list, 0, "program \"step\" has pre_backward hooks, which never run: it has no backward"},
               {0, 1, 3, list, 0, "has post_backward hooks, which never run: it has no backward"},
               {1, 1, 4, list, 0, "has pre_wgrad hooks, which never run: it has no wgrad: weight gradients are part"},
               {1, 1, 5, list, 0, "has post_wgrad hooks"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_hooks h = rfr_hooks_default();
    rfr_compile_options o = rfr_compile_options_default();
    *(rfr_hook_list *)rfi_hooks_at(&h, RFR_HOOK_PRE_FORWARD + cases[i].point) = cases[i].list;
    if (cases[i].size) h.size = cases[i].size;
    o.hooks = &h, o.n_hooks = cases[i].n;
    const rfr_trace *of = t[cases[i].trace];
    rft_refused(rfr_compile(ctx, 1, &of, (const char *const[]){"step"}, &o, &p), "argument", cases[i].text);
    assert_null(p);
  }
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

/* Each allocation of a compile with hooks fails once; destroying the context reports leaks. */
static void test_no_memory(void **state) {
  (void)state;
  notes n = {.fails = -1};
  const rfr_hook hook = {note, &n};
  const rfr_hooks h = hooks_at(&hook, MICROBATCHES);
  rfr_trace *t = record(MICROBATCHES);
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p = NULL;
  int64_t k = 0;
  o.hooks = &h, o.n_hooks = 1;
  for (rfr_status s = RFR_NO_MEMORY; s != RFR_OK;) {
    rfr_ctx_fail_alloc(ctx, ++k);
    s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, (const char *const[]){"step"}, &o, &p);
    rfr_ctx_fail_alloc(ctx, 0);
    if (s != RFR_OK) assert_int_equal(s, RFR_NO_MEMORY);
  }
  assert_true(k > 10);
  rft_fill_inputs(p);
  OK(rfr_program_run(p, 0));
  assert_int_equal(n.calls, 4 * MICROBATCHES);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_order_and_bits), rft_context_test(test_gather),  rft_context_test(test_failures),
      rft_context_test(test_failing_op),     rft_context_test(test_capture), rft_context_test(test_one_of_two),
      rft_context_test(test_reentry),        rft_context_test(test_refused), rft_context_test(test_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
