/* SPDX-License-Identifier: Apache-2.0
 *
 * Step memory: callables in training, their evaluation, callables in inference, an optimizer program and an evaluation
 * program use one range of bytes, one at a time. Results are bitwise equal to those with separate arenas, and the
 * planned bytes are the maximum instead of the sum. Calls that would run concurrently with another user, or read what
 * it has overwritten, are refused.
 */
#include <stdio.h>
#include <string.h>

#include "callable/graphed.h"
#include "exec/step_memory.h"
#include "support/graphs_scene.h"

enum { BLOCKS = 2, MOST = 2, STEPS = 3, NAMES = 2 * 4, UPDATE = 0, EVALUATE = 1, ELEMENTS = RFT_T * RFT_C };

static const char delayed[] = "0F0 1F0 0F1 1I0 0I0 1F1 1I1 1W0 0I1 0W0 1W1 0W1";

typedef struct world {
  rft_scene scene;
  rfr_step_memory *memory; /* NULL: separate arenas */
  rfr_programs *p;
  rfr_graphs *g, *inference;
  rfr_schedule *schedule;
  int64_t live; /* bytes of the context */
} world;

typedef struct result {
  float y[STEPS][MOST][ELEMENTS], dx[STEPS][MOST][ELEMENTS], evaluated[STEPS][ELEMENTS], inferred[STEPS][ELEMENTS];
  float w[STEPS][RFT_C * 48], norm[STEPS], loss[STEPS];
} result;

/* Gradient descent on all parameters; also the mean square of a gradient. */
static rfr_trace *update_trace(const rft_scene *s) {
  rfr_trace *t;
  rfr_value norm = RFR_NONE;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value lr = rfr_fill(t, 0.05, RFR_F32, 1, ((int64_t[]){1}));
  for (int b = 0; b < s->blocks; b++) {
    rfr_trace *block = rft_block_trace(s, b);
    for (int i = 0; i < block->n_inputs; i++) {
      const rfi_value *x = &block->values[block->inputs[i]];
      char name[48];
      if (x->role != RFR_ROLE_TRAINABLE) continue;
      snprintf(name, sizeof name, "d.%s", x->name);
      const rfr_value w = rfr_input(t, x->name, RFR_ROLE_TRAINABLE, s->dtype, x->type.rank, x->type.shape),
                      d = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, x->type.rank, x->type.shape);
      norm = rfr_mean(t, rfr_mul(t, d, d), -1);
      rfr_sgd(t, w, d, RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
    }
    rfr_trace_destroy(block);
  }
  rfr_output(t, "norm", norm);
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_trace *evaluate_trace(const rft_scene *s) {
  rft_recorder r = {.dtype = s->dtype, .offsets = RFR_NONE, .step = RFR_NONE};
  OK(rfr_trace_create(ctx, &r.t));
  rfr_value y = rfr_input(r.t, "x", RFR_ROLE_INPUT, s->dtype, 2, ((int64_t[]){RFT_T, RFT_C}));
  for (; r.block < s->blocks; r.block++) y = s->block(&r, y);
  rfr_output(r.t, "loss", rfr_mean(r.t, rfr_mul(r.t, y, y), -1));
  OK(rfr_trace_finish(r.t));
  return r.t;
}

static rfr_programs *make_programs(const rft_scene *s, rfr_step_memory *memory, bool plan_only) {
  rfr_trace *t[2] = {update_trace(s), evaluate_trace(s)};
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  o.step_memory = memory;
  o.plan_only = plan_only;
  o.debug = s->debug;
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)t, (const char *const[]){"update", "evaluate"}, &o, &p));
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  return p;
}

static int64_t failing; /* the allocation of a creation that fails; 0: none */

/* Callables whose parameters and main gradients are inputs of the programs. */
static rfr_status make_graphs(const world *w, const rfr_programs *p, bool inference, int64_t budget, int warmups,
                              rfr_graphs **out) {
  const rft_scene *s = &w->scene;
  rfr_callable c[BLOCKS];
  rfr_trace *t[BLOCKS];
  rfr_binding tensor[NAMES];
  rfr_main_gradient gradient[NAMES];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_tensor x, d;
  char name[48];
  for (int i = 0; i < s->blocks; i++) {
    t[i] = rft_block_trace(s, i);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    c[i].inference = inference;
  }
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    if (x.role != RFR_ROLE_TRAINABLE) continue;
    snprintf(name, sizeof name, "d.%s", x.name);
    OK(rfr_programs_tensor(p, name, &d));
    gradient[o.n_tensors] = rft_main_gradient(x.name, d.type, d.data, 0);
    tensor[o.n_tensors++] = (rfr_binding){x.name, x.type, x.data};
  }
  if (x.data || o.n_tensors > 0) o.tensors = tensor;
  o.gradients = gradient;
  o.n_gradients = inference ? 0 : o.n_tensors;
  o.schedule = inference ? NULL : w->schedule;
  o.fuse = s->fuse, o.eager = s->eager, o.debug = s->debug;
  o.budget = budget;
  o.warmup_iterations = warmups;
  o.step_memory = w->memory;
  rfr_ctx_fail_alloc(ctx, failing);
  const rfr_status status = rfr_graphs_create(ctx, c, s->blocks, &o, out);
  rfr_ctx_fail_alloc(ctx, 0);
  for (int i = 0; i < s->blocks; i++) rfr_trace_destroy(t[i]);
  return status;
}

static world make_world(const rft_scene *s, bool shared) {
  world w = {.scene = *s};
  rfr_tensor x;
  const int64_t before = rfr_ctx_get_stats(ctx).live_bytes;
  if (shared) OK(rfr_step_memory_create(ctx, 0, &w.memory));
  if (s->schedule) {
    OK(rfr_schedule_parse(ctx, "test", s->schedule, strlen(s->schedule), &w.schedule));
    OK(rfr_schedule_set_layers(w.schedule, &s->layers, 1));
  }
  w.p = make_programs(s, w.memory, false);
  OK(make_graphs(&w, w.p, false, 0, 1, &w.g));
  OK(make_graphs(&w, w.p, true, 0, 0, &w.inference));
  for (int i = 0; rfr_programs_tensor_at(w.p, i, &x) == RFR_OK; i++)
    if (x.role == RFR_ROLE_TRAINABLE) rft_fill_by(&x, 100 + (uint64_t)x.bytes, 0.3f);
  OK(rfr_programs_load(w.p));
  for (int i = 0; i < 2 && !s->eager; i++) OK(rfr_program_capture(w.p, i));
  w.live = rfr_ctx_get_stats(ctx).live_bytes - before;
  return w;
}

static void destroy(world *w) {
  rfr_graphs_destroy(w->inference);
  rfr_graphs_destroy(w->g);
  rfr_programs_destroy(w->p);
  rfr_schedule_destroy(w->schedule);
  rfr_step_memory_destroy(w->memory);
}

static rfr_status run_program(const world *w, int program) {
  const bool eager = w->scene.eager || w->scene.debug;
  return eager ? rfr_program_run(w->p, program) : rfr_program_replay(w->p, program, NULL, 0);
}

static void read_output(rfr_programs *p, int program, const char *name, float *to) {
  rfr_tensor x;
  OK(rfr_program_output(p, program, name, &x));
  OK(rfr_programs_read(p, &x, to));
}

static void forwards(rfr_graphs *g, const rft_scene *s, int microbatches, float *to) {
  static rft_buffers b;
  for (int m = 0; m < microbatches; m++) {
    rft_draw(s, b.x[m][0], 77, m, 1);
    for (int i = 0; i < s->blocks; i++) rft_forward(g, s, &b, i, m);
    memcpy(to, b.x[m][s->blocks], ELEMENTS * sizeof *to);
  }
  OK(rfr_graphs_end_step(g));
}

static void train(const world *w, int step, result *to) {
  static rft_buffers b;
  const rft_scene *s = &w->scene;
  rfr_action a;
  int i;
  OK(rfr_graphs_begin_step(w->g, NULL, 0));
  for (int m = 0; m < s->microbatches; m++) {
    rft_draw(s, b.x[m][0], step, m, 1);
    rft_draw(s, b.dx[m][s->blocks], step, m, 2);
  }
  for (int calls = 0;; calls++) {
    OK(rfr_graphs_expected(w->g, &a, &i));
    if (a.op < 0 || (!s->schedule && a.microbatch == s->microbatches)) break;
    if (a.op == RFR_ACTION_F) rft_forward(w->g, s, &b, i, a.microbatch);
    else if (a.op == RFR_ACTION_W) OK(rfr_graphs_wgrad(w->g, i, a.microbatch));
    else rft_backward(w->g, s, &b, i, a.microbatch);
  }
  OK(rfr_graphs_end_step(w->g));
  for (int m = 0; m < s->microbatches; m++) {
    memcpy(to->y[step][m], b.x[m][s->blocks], sizeof to->y[0][0]);
    memcpy(to->dx[step][m], b.dx[m][0], sizeof to->dx[0][0]);
  }
}

/* Training, with evaluations of all kinds between the steps. */
static void run(world *w, result *to) {
  rfr_tensor x;
  memset(to, 0, sizeof *to);
  for (int step = 0; step < STEPS; step++) {
    train(w, step, to);
    OK(run_program(w, UPDATE));
    read_output(w->p, UPDATE, "norm", &to->norm[step]);
    OK(rfr_graphs_begin_evaluation(w->g, NULL, 0));
    forwards(w->g, &w->scene, 3, to->evaluated[step]);
    OK(rfr_programs_tensor(w->p, "x", &x));
    rft_fill_by(&x, 9, 1);
    OK(run_program(w, EVALUATE));
    read_output(w->p, EVALUATE, "loss", &to->loss[step]);
    OK(rfr_graphs_begin_step(w->inference, NULL, 0));
    forwards(w->inference, &w->scene, 2, to->inferred[step]);
    OK(rfr_programs_tensor(w->p, "b1.down", &x));
    OK(rfr_programs_read(w->p, &x, to->w[step]));
    OK(rfr_programs_check(w->p));
  }
}

static rfr_graphs_memory memory_of(const rfr_graphs *g) {
  rfr_graphs_memory m = {.size = sizeof m};
  OK(rfr_graphs_get_memory(g, &m));
  return m;
}

static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

/* The planned bytes: all persistent arenas, plus the largest step-scoped part once. */
static void check_bytes(const world *separate, const world *shared) {
  const rfr_graphs_memory a = memory_of(separate->g), i = memory_of(separate->inference), b = memory_of(shared->g),
                          k = memory_of(shared->inference);
  rfr_plan_summary plan, now;
  rfr_memory kinds;
  OK(rfr_program_plan(separate->p, UPDATE, &plan));
  OK(rfr_program_plan(shared->p, UPDATE, &now));
  const int64_t of_programs = plan.planned_bytes - plan.persistent_bytes,
                of_graphs = a.planned_bytes - a.persistent_bytes, of_inference = i.planned_bytes - i.persistent_bytes,
                most = max(of_programs, max(of_graphs, of_inference)), sum = of_programs + of_graphs + of_inference;
  assert_true(of_programs > 0 && of_graphs > 0 && of_inference > 0);
  assert_int_equal(a.step_memory_bytes, 0);
  assert_int_equal(rfr_step_memory_bytes(shared->memory), most);
  assert_int_equal(b.step_memory_bytes, most);
  assert_int_equal(b.planned_bytes, a.persistent_bytes + most);
  assert_int_equal(k.planned_bytes, i.persistent_bytes + most);
  assert_int_equal(b.slot_bytes, a.slot_bytes);
  assert_int_equal(now.persistent_bytes, plan.persistent_bytes);
  assert_int_equal(now.planned_bytes, plan.persistent_bytes + most);
  OK(rfr_programs_memory(shared->p, &kinds));
  assert_int_equal(kinds.total, now.planned_bytes);
  assert_int_equal(kinds.weights + kinds.optimizer + kinds.states + kinds.inputs + kinds.loaded + kinds.activations +
                       kinds.gradients + kinds.workspaces + kinds.outputs + kinds.unused,
                   kinds.total);
  assert_true(shared->live <= separate->live - (sum - most) + 1024); /* plus another guard, and the object */
  assert_true(rfr_programs_touched_bytes(shared->p) <= now.planned_bytes);
}

static void test_bits_and_bytes(void **state) {
  static result separate, shared;
  (void)state;
  for (int kind = 0; kind < 8; kind++) {
    rft_scene s = {.block = rft_block_mlp, .blocks = BLOCKS, .microbatches = MOST, .dtype = RFR_F32, .fuse = true};
    s.schedule = kind & 1 ? delayed : NULL, s.layers = 1;
    s.eager = kind & 2, s.debug = kind & 4;
    world a = make_world(&s, false), b = make_world(&s, true);
    run(&a, &separate);
    run(&b, &shared);
    assert_memory_equal(&separate, &shared, sizeof shared);
    assert_memory_not_equal(shared.w[0], shared.w[1], sizeof shared.w[0]);
    assert_true(shared.norm[0] > 0 && shared.loss[0] > 0 && shared.inferred[0][0] != 0);
    check_bytes(&a, &b);
    destroy(&a);
    destroy(&b);
  }
}

/* ---- refusals ---- */

static const rft_scene scene = {
    .block = rft_block_mlp, .blocks = BLOCKS, .microbatches = 1, .dtype = RFR_F32, .fuse = true};

static void test_a_step_has_begun(void **state) {
  static float values[ELEMENTS];
  static const char slug[] = "memory.in_use", text[] = "a step of graphs that share it has begun";
  world w = make_world(&scene, true);
  rfr_graphs *more;
  rfr_op_time times[64];
  int n;
  (void)state;
  for (int evaluation = 0; evaluation < 2; evaluation++) {
    OK(evaluation ? rfr_graphs_begin_evaluation(w.g, NULL, 0) : rfr_graphs_begin_step(w.g, NULL, 0));
    rft_refused(rfr_program_run(w.p, UPDATE), slug, text);
    rft_refused(rfr_program_replay(w.p, EVALUATE, NULL, 0), slug, text);
    rft_refused(rfr_program_profile(w.p, UPDATE, times, 64, &n), slug, text);
    rft_refused(rfr_programs_load(w.p), slug, text);
    rft_refused(rfr_graphs_begin_step(w.inference, NULL, 0), slug, text);
    rft_refused(rfr_graphs_begin_evaluation(w.inference, NULL, 0), slug, text);
    rft_refused(make_graphs(&w, w.p, false, 0, 1, &more), slug, text); /* its warm-up would run a part */
    OK(make_graphs(&w, w.p, false, 0, 0, &more));
    rfr_graphs_destroy(more);
    OK(rfr_graphs_abort_step(w.g));
    OK(rfr_program_run(w.p, UPDATE));
  }
  OK(rfr_graphs_begin_step(w.inference, NULL, 0)); /* the refused step was not begun */
  forwards(w.inference, &scene, 1, values);
  OK(rfr_graphs_begin_step(w.g, NULL, 0));
  rfr_graphs_destroy(w.g); /* released when its step ends */
  w.g = NULL;
  OK(rfr_program_run(w.p, UPDATE));
  destroy(&w);
}

/* Results that another user has overwritten cannot be read. */
static void test_validity(void **state) {
  static rft_buffers b;
  static float values[ELEMENTS];
  const rfr_binding x = {NULL, rft_activation(&scene), values}, dy = {NULL, rft_activation(&scene), b.dx[0][2]};
  world w = make_world(&scene, true);
  rfr_tensor y, dx, norm, other;
  (void)state;
  OK(rfr_program_run(w.p, UPDATE));
  OK(rfr_program_output(w.p, UPDATE, "norm", &norm));
  OK(rfr_programs_read(w.p, &norm, values));
  OK(rfr_graphs_begin_step(w.g, NULL, 0));
  rft_refused(rfr_programs_read(w.p, &norm, values), "tensor", "has been used by others");
  OK(rfr_graphs_forward(w.g, 0, 0, &x, 1, &y, 1));
  const rfr_binding next = {NULL, x.type, y.data};
  OK(rfr_graphs_forward(w.g, 1, 0, &next, 1, &other, 1));
  OK(rfr_graphs_backward(w.g, 1, 0, &dy, 1, &dx, 1));
  const rfr_binding dx1 = {NULL, x.type, dx.data};
  OK(rfr_graphs_backward(w.g, 0, 0, &dx1, 1, &dx, 1));
  OK(rfr_graphs_end_step(w.g));
  OK(rfr_graphs_read(w.g, &dx, values));
  const rfr_binding stale = {NULL, x.type, dx.data};
  OK(rfr_graphs_begin_step(w.inference, NULL, 0));
  rft_refused(rfr_graphs_read(w.g, &dx, values), "argument", "slot memory that is no longer valid");
  rft_refused(rfr_graphs_forward(w.inference, 0, 0, &stale, 1, &y, 1), "argument", "no longer valid");
  OK(rfr_graphs_abort_step(w.inference));
  OK(rfr_program_run(w.p, UPDATE));
  OK(rfr_programs_read(w.p, &norm, values));
  /* a program's output as a parameter */
  rfr_trace *t = rft_block_trace(&scene, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  const rfr_binding bound = {"b0.norm", {.dtype = RFR_F32, .rank = 1, .shape = {RFT_C}}, norm.data};
  c.trace = t;
  o.tensors = &bound, o.n_tensors = 1, o.step_memory = w.memory;
  rft_refused(rfr_graphs_create(ctx, &c, 1, &o, &g), "program.state", "it is in the step memory");
  rfr_trace_destroy(t);
  destroy(&w);
}

static bool is_idle;
static rfr_status poll(rfi_device *d, bool *idle) {
  (void)d;
  *idle = is_idle;
  return RFR_OK;
}
static void *own_stream(const rfi_device *d) { return (void *)d; }
static void *one_stream(const rfi_device *d) {
  (void)d;
  return &is_idle;
}

/* On a GPU the work of the last user may still run when the next user begins. */
static void test_streams(void **state) {
  world w = make_world(&scene, true);
  const rfi_backend *cpu = w.g->m.backend;
  rfi_backend gpu = *cpu;
  (void)state;
  gpu.poll = poll, gpu.stream = own_stream;
  w.g->m.backend = w.p->m.backend = w.inference->m.backend = &gpu;
  is_idle = false;
  OK(rfr_program_run(w.p, UPDATE));
  OK(rfr_program_run(w.p, EVALUATE)); /* of the same user */
  rft_refused(rfr_graphs_begin_step(w.g, NULL, 0), "memory.in_use", "may still run in another stream");
  is_idle = true;
  OK(rfr_graphs_begin_step(w.g, NULL, 0));
  OK(rfr_graphs_abort_step(w.g));
  is_idle = false;
  rft_refused(rfr_program_run(w.p, UPDATE), "memory.in_use", "may still run in another stream");
  gpu.stream = one_stream;
  OK(rfr_program_run(w.p, UPDATE));
  w.g->m.backend = w.p->m.backend = w.inference->m.backend = cpu;
  destroy(&w);
}

static void test_sizes(void **state) {
  world w = make_world(&scene, true);
  const int64_t most = rfr_step_memory_bytes(w.memory), all = memory_of(w.g).planned_bytes;
  rfr_step_memory *m;
  rfr_graphs *g;
  rfr_tensor norm;
  (void)state;
  /* a budget of all planned bytes */
  rft_refused(make_graphs(&w, w.p, false, all - 1, 1, &g), "plan.over_budget", "the plan needs");
  OK(make_graphs(&w, w.p, false, all, 1, &g));
  rfr_graphs_destroy(g);
  const int64_t less = memory_of(w.inference).planned_bytes - 1;
  rft_refused(make_graphs(&w, w.p, true, less, 0, &g), "plan.over_budget", "more for others that use the step memory");
  destroy(&w);
  /* anything created after the memory is allocated must fit into it */
  for (int reserved = 0; reserved < 2; reserved++) {
    w = (world){.scene = scene};
    OK(rfr_step_memory_create(ctx, reserved ? most : 0, &w.memory));
    w.p = make_programs(&scene, w.memory, false);
    OK(rfr_program_output(w.p, UPDATE, "norm", &norm));
    assert_null(norm.data);
    assert_int_equal(rfr_programs_touched_bytes(w.p), -1);
    rft_refused(rfr_programs_check(w.p), "program.order", "step memory is attached when");
    rft_refused(rfr_programs_read(w.p, &norm, &w), "tensor", "not within a tensor");
    OK(rfr_program_run(w.p, UPDATE));
    OK(rfr_program_output(w.p, UPDATE, "norm", &norm));
    assert_non_null(norm.data);
    if (reserved) OK(make_graphs(&w, w.p, false, 0, 0, &w.g));
    else rft_refused(make_graphs(&w, w.p, false, 0, 0, &w.g), "plan.over_budget", "create the largest user first");
    OK(rfr_program_run(w.p, UPDATE));
    destroy(&w);
  }
  OK(rfr_step_memory_create(ctx, 100, &m));
  assert_int_equal(rfr_step_memory_bytes(m), 100);
  rfr_programs *p = make_programs(&scene, m, true);
  assert_true(rfr_step_memory_bytes(m) > 100 && !m->data);
  rfr_programs_destroy(p);
  assert_int_equal(rfr_step_memory_bytes(m), 100);
  rfr_step_memory_destroy(m);
  rft_refused(rfr_step_memory_create(ctx, -1, &m), "argument", "-1 bytes");
  rft_refused(rfr_step_memory_create(ctx, INT64_MAX, &m), "argument", "9223372036854775807 bytes");
}

static void test_another_context(void **state) {
  rfr_ctx *other;
  rfr_step_memory *m;
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  rfr_trace *t = update_trace(&scene);
  (void)state;
  OK(rfr_ctx_create(NULL, &other));
  OK(rfr_step_memory_create(other, 0, &m));
  o.step_memory = m;
  rft_refused(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p), "argument", "another context");
  rfr_step_memory_destroy(m);
  rfr_ctx_destroy(other);
  rfr_trace_destroy(t);
}

/* The memory is freed after its last user, whatever the order of destruction. */
static void test_order_of_destruction(void **state) {
  (void)state;
  for (int order = 0; order < 6; order++) {
    world w = make_world(&scene, true);
    for (int i = 0; i < 3; i++) {
      const int what = i == 0 ? order / 2 : (order / 2 + (order % 2 ? i : 3 - i)) % 3;
      if (what == 0) rfr_step_memory_destroy(w.memory), w.memory = NULL;
      if (what == 1) rfr_graphs_destroy(w.g), rfr_graphs_destroy(w.inference), w.g = w.inference = NULL;
      if (what == 2) rfr_programs_destroy(w.p), w.p = NULL;
      if (w.p) OK(rfr_program_run(w.p, EVALUATE));
    }
  }
}

/* Each allocation fails once, of the programs or the graphs. */
static void test_faults(void **state) {
  (void)state;
  for (int graphs = 0; graphs < 2; graphs++)
    for (int64_t k = 1;; k++) {
      world w = {.scene = scene};
      OK(rfr_step_memory_create(ctx, 0, &w.memory));
      w.p = make_programs(&scene, w.memory, false);
      failing = graphs ? k : 0;
      rfr_ctx_fail_alloc(ctx, graphs ? 0 : k);
      const rfr_status s = graphs ? make_graphs(&w, w.p, true, 0, 0, &w.g) : rfr_program_run(w.p, UPDATE);
      rfr_ctx_fail_alloc(ctx, 0);
      failing = 0;
      if (s != RFR_OK) rft_refused(s, "memory.alloc", "");
      OK(rfr_program_run(w.p, EVALUATE));
      destroy(&w);
      if (s == RFR_OK && k > 1) break;
      assert_true(s != RFR_OK);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_bits_and_bytes), rft_context_test(test_a_step_has_begun),
      rft_context_test(test_validity),       rft_context_test(test_streams),
      rft_context_test(test_sizes),          rft_context_test(test_another_context),
      rft_context_test(test_faults),         rft_context_test(test_order_of_destruction),
  };
  return cmocka_run_group_tests_name("graphs_step_memory", tests, NULL, NULL);
}
