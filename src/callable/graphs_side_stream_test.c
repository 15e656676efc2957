/* SPDX-License-Identifier: Apache-2.0
 *
 * W's on the side stream. The test adds a side stream to the CPU backend, which runs each graph as late as possible:
 * when a call waits for it. So a missing wait shows: the W reads memory that later calls have overwritten. This stream
 * does not run two kernels at the same time, so the plan is checked too, op by op.
 */
#include <stdio.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/backend.h"
#include "support/graphs_scene.h"

/* ---- the side stream ---- */

enum { MOST_QUEUED = 64 };

static struct {
  rfi_device *device[MOST_QUEUED];
  rfi_graph *graph[MOST_QUEUED];
  int n, most, launched, fails; /* fails: the launch that fails, from 1; 0: none */
} queue;

static rfr_status launch_late(rfi_device *d, rfi_graph *graph) {
  if (++queue.launched == queue.fails) return rfi_fail(RFI_E_CUDA, "injected");
  assert_true(queue.n < MOST_QUEUED);
  queue.device[queue.n] = d;
  queue.graph[queue.n++] = graph;
  if (queue.n > queue.most) queue.most = queue.n;
  return RFR_OK;
}

static rfr_status run_queued(rfi_device *d, int but) {
  int done = 0;
  for (; queue.n - done > but; done++) {
    assert_ptr_equal(queue.device[done], d);
    RFI_TRY(rfi_backend_cpu.launch(d, queue.graph[done], NULL));
  }
  queue.n -= done;
  memmove(queue.device, queue.device + done, sizeof *queue.device * (size_t)queue.n);
  memmove(queue.graph, queue.graph + done, sizeof *queue.graph * (size_t)queue.n);
  return RFR_OK;
}

static int use_late_stream(void **state) {
  rfi_backend *b = rft_change_backend();
  b->launch_side = launch_late;
  b->join_side = run_queued;
  memset(&queue, 0, sizeof queue);
  return rft_context_setup(state);
}

static int restore(void **state) {
  rft_backend = NULL;
  return rft_context_teardown(state) != 0 || queue.n > 0;
}

/* ---- results ---- */

#define B_TEXT "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n"
#define PAIR_TEXT "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n"
#define SPLIT_TEXT "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0I2 0W1 0I3 0W2 0W3\n"
#define LATE_TEXT "0F0 0F1 0I0 0I1 0W0 0W1 0F2 0I2 0F3 0W2 0I3 0W3\n"
#define MIXED_TEXT "0F0 0F1 0B0 0I1 0F2 0W1 0F3 0B2 0I3 0W3\n"
#define STAGES_TEXT "0F0 1F0 1I0 0F1 0I0 1F1 1W0 0W0 1B1 0F2 0B1 1F2 1B2 0B2 0F3 1F3 1I3 0I3 1W3 0W3\n"

static const rft_scene scenes[] = {
    {.block = rft_block_mlp, .blocks = 3, .schedule = B_TEXT, .layers = 3, .linked = true},
    {.block = rft_block_mlp, .blocks = 3, .schedule = PAIR_TEXT, .layers = 3},
    {.block = rft_block_transformer, .blocks = 4, .schedule = PAIR_TEXT, .layers = 4, .linked = true, .fuse = true},
    {.block = rft_block_transformer, .blocks = 4, .schedule = SPLIT_TEXT, .layers = 4, .linked = true, .fuse = true},
    {.block = rft_block_attention, .blocks = 2, .schedule = LATE_TEXT, .layers = 2, .linked = true},
    {.block = rft_block_experts, .blocks = 2, .schedule = SPLIT_TEXT, .layers = 2},
    {.block = rft_block_linear, .blocks = 4, .schedule = MIXED_TEXT, .layers = 4, .linked = true},
    {.block = rft_block_transformer, .blocks = 4, .schedule = STAGES_TEXT, .layers = 2, .linked = true},
    {.block = rft_block_mlp, .blocks = 4, .schedule = PAIR_TEXT, .layers = 4, .linked = true, .frozen = 2},
    {.block = rft_block_mlp, .blocks = 4, .schedule = SPLIT_TEXT, .layers = 4, .linked = true, .marked = 15},
    {.block = rft_block_transformer, .blocks = 4, .linked = true},
    {.block = rft_block_linear, .blocks = 3},
};
enum { SCENES = sizeof scenes / sizeof *scenes };

static rft_scene scene(int i, rfr_dtype dtype) {
  rft_scene s = scenes[i];
  s.microbatches = 4, s.dtype = dtype;
  return s;
}

/* Bitwise the results of one program, although every W runs as late as it may. */
static void test_results(void **state) {
  (void)state;
  for (int i = 0; i < SCENES; i++)
    for (int bf16 = 0; bf16 < 2; bf16++) {
      const rft_scene s = scene(i, bf16 ? RFR_BF16 : RFR_F32);
      queue.most = queue.launched = 0;
      rft_run_scene(&s);
      assert_true(queue.launched > 0 && queue.most > 0);
    }
}

/* ---- complete gradients ---- */

typedef struct pair { /* the same set twice: with W in order, and on the side stream */
  rft_scene s;
  rfr_schedule *schedule[2];
  rfr_graphs *g[2];
} pair;

/* Begins a step of both sets. */
static void begin_pair(pair *p, int scene_number, rft_buffers *b) {
  p->s = scene(scene_number, RFR_F32);
  for (int k = 0; k < 2; k++) {
    p->s.in_order = k == 0;
    p->g[k] = rft_make_graphs(&p->s, &p->schedule[k]);
    rft_fill_named(p->g[k]);
    OK(rfr_graphs_begin_step(p->g[k], NULL, 0));
  }
  for (int m = 0; m < p->s.microbatches; m++) {
    rft_draw(&p->s, b->x[m][0], 0, m, 1);
    rft_draw(&p->s, b->dx[m][p->s.blocks], 0, m, 2);
  }
}

static void end_pair(pair *p) {
  for (int k = 0; k < 2; k++) {
    OK(rfr_graphs_end_step(p->g[k]));
    rfr_graphs_destroy(p->g[k]);
    rfr_schedule_destroy(p->schedule[k]);
  }
}

/* Makes the next call of both sets; false: there is none. */
static bool next_call(const pair *p, rft_buffers *b) {
  rfr_action a;
  int callable;
  OK(rfr_graphs_expected(p->g[0], &a, &callable));
  if (a.op < 0 || a.microbatch >= p->s.microbatches) return false;
  for (int k = 0; k < 2; k++)
    if (a.op == RFR_ACTION_F) rft_forward(p->g[k], &p->s, b, callable, a.microbatch);
    else if (a.op == RFR_ACTION_W) OK(rfr_graphs_wgrad(p->g[k], callable, a.microbatch));
    else rft_backward(p->g[k], &p->s, b, callable, a.microbatch);
  return true;
}

static void expect_equal(const rfr_tensor *x, const rfr_tensor *y) {
  assert_int_equal(x->bytes, y->bytes);
  assert_memory_equal(x->data, y->data, (size_t)x->bytes);
}

/* A main gradient is the same as in order as soon as the caller may read it: after the call that completes it. */
static void test_complete(void **state) {
  (void)state;
  static const int some[] = {1, 3, 6, 10};
  static rft_buffers b;
  for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
    pair p;
    int seen = 0;
    begin_pair(&p, some[i], &b);
    rfr_graphs *const *g = p.g;
    while (next_call(&p, &b)) {
      rfr_tensor ready[2][32];
      int n[2];
      for (int k = 0; k < 2; k++) OK(rfr_graphs_grads_ready(g[k], ready[k], 32, &n[k]));
      assert_int_equal(n[0], n[1]);
      for (int x = 0; x < n[0]; x++) expect_equal(&ready[0][x], &ready[1][x]);
      seen += n[0];
      for (int block = 0; block < p.s.blocks && !p.schedule[0]; block++) {
        char name[16];
        rfr_tensor x, y;
        snprintf(name, sizeof name, "b%d.%s", block, "down");
        if (rfr_graphs_gradient(g[0], name, &x) != RFR_OK) continue;
        OK(rfr_graphs_gradient(g[1], name, &y));
        expect_equal(&x, &y);
        seen++;
      }
    }
    assert_true(seen > 0);
    end_pair(&p);
  }
}

/* A copy to the host waits for all launched work, also for W's that add to a main gradient before its last W. */
static void test_read(void **state) {
  (void)state;
  static const int some[] = {1, 3, 6, 10};
  static rft_buffers b;
  static unsigned char sum[2][1 << 16];
  for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
    pair p;
    begin_pair(&p, some[i], &b);
    rfr_graphs *const *g = p.g;
    queue.most = 0;
    while (next_call(&p, &b))
      for (int x = 0; x < g[0]->m.store.n; x++) {
        const rfi_named *named[2] = {&g[0]->m.store.named[x], &g[1]->m.store.named[x]};
        if (named[0]->parameter < 0) continue;
        assert_true(named[0]->tensor.bytes <= (int64_t)sizeof *sum);
        for (int k = 0; k < 2; k++) OK(rfr_graphs_read(g[k], &named[k]->tensor, sum[k]));
        assert_memory_equal(sum[0], sum[1], (size_t)named[0]->tensor.bytes);
      }
    assert_true(queue.most > 0);
    end_pair(&p);
  }
}

/* If an abort could not wait for the side stream, the next step does, before it clears the main gradients. */
static int failing_joins;
static rfr_status join_later(rfi_device *d, int but) {
  if (failing_joins > 0 && failing_joins--) return rfi_fail(RFI_E_CUDA, "injected");
  return run_queued(d, but);
}

static void test_failing_abort(void **state) {
  (void)state;
  static rft_buffers b;
  const rft_scene s = scene(1, RFR_F32);
  rfr_schedule *schedule;
  ((rfi_backend *)rft_backend)->join_side = join_later;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++)
    for (int i = 0; i < s.blocks; i++) rft_forward(g, &s, &b, i, m);
  rft_backward(g, &s, &b, 2, 0);
  assert_int_equal(queue.n, 1);
  failing_joins = 1;
  rft_refused(rfr_graphs_abort_step(g), "cuda", "injected");
  assert_int_equal(queue.n, 1);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  assert_int_equal(queue.n, 0);
  assert_int_equal(g->launched, 0);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* After a launch that fails, the step can be aborted, and what is queued has run. */
static void test_failure(void **state) {
  (void)state;
  static rft_buffers b;
  const rft_scene s = scene(1, RFR_F32);
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const rfr_binding dy = {"y", rft_activation(&s), b.dx[0][0]};
  rfr_tensor dx;
  queue.fails = 2;
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++)
    for (int i = 0; i < s.blocks; i++) rft_forward(g, &s, &b, i, m);
  rft_backward(g, &s, &b, 2, 0);
  rft_refused(rfr_graphs_backward(g, 1, 0, &dy, 1, &dx, 1), "cuda", "injected");
  rft_refused(rfr_graphs_end_step(g), "graphs.order", "abort it");
  assert_int_equal(queue.n, 1);
  OK(rfr_graphs_abort_step(g));
  assert_int_equal(queue.n, 0);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* ---- the plan ---- */

static bool overlap(const rfi_arg *a, const rfi_arg *b) {
  return a->data && b->data && rfi_overlaps(a->data, rfi_bytes(&a->type), b->data, rfi_bytes(&b->type));
}

/* Whether the ops may run at the same time. */
static bool disjoint(const rfi_bound *a, const rfi_bound *b) {
  const rfi_call *x = &a->call, *y = &b->call;
  bool clash =
      a->workspace > 0 && b->workspace > 0 && rfi_overlaps(x->workspace, a->workspace, y->workspace, b->workspace);
  for (int i = 0; i < x->n_in + x->n_out; i++) {
    const rfi_arg *one = i < x->n_in ? &x->in[i] : &x->out[i - x->n_in];
    clash |=
        b->workspace > 0 && one->data && rfi_overlaps(one->data, rfi_bytes(&one->type), y->workspace, b->workspace);
    for (int k = 0; k < y->n_in + y->n_out; k++)
      clash |= (i >= x->n_in || k >= y->n_in) && overlap(one, k < y->n_in ? &y->in[k] : &y->out[k - y->n_in]);
  }
  for (int k = 0; k < y->n_in + y->n_out; k++) {
    const rfi_arg *other = k < y->n_in ? &y->in[k] : &y->out[k - y->n_in];
    clash |= a->workspace > 0 && other->data &&
             rfi_overlaps(other->data, rfi_bytes(&other->type), x->workspace, a->workspace);
  }
  return !clash;
}

static void check_pair(const rfi_step_call *w, const rfi_step_call *call, rfi_part part) {
  const rfi_exec_unit *a = &w->of->u, *b = &call->of->u;
  for (int i = a->first[RFI_PART_W]; i < a->first[RFI_PART_W + 1]; i++)
    for (int k = b->first[part]; k < b->first[part + 1]; k++)
      if (!disjoint(&a->instance[w->slot].bound[i], &b->instance[call->slot].bound[k]))
        fail_msg("W of callable %d, microbatch %d, and op %d of part %d of callable %d, microbatch %d", a->index,
                 w->microbatch, k, (int)part, b->index, call->microbatch);
}

/* A part that may run at the same time as a W does not conflict with it, and the W's of a callable run in order.
 * Returns the number of such parts, over all W's. */
static int check_plan(const rfr_graphs *g) {
  int many = 0;
  for (int i = 0, last = 0; i < g->calls.n; i++) {
    const rfi_step_call *w = &g->calls.call[i];
    if (w->number == 0) continue;
    assert_int_equal(w->number, last + 1);
    last = w->number;
    for (int k = i + 1; k < g->calls.n && g->calls.call[k].waits < w->number; k++) {
      const rfi_step_call *call = &g->calls.call[k];
      for (int part = RFI_PART_F; part <= RFI_PART_W; part++) {
        if (part == RFI_PART_W && call->wgrad_waits >= w->number) break;
        if (!rfi_call_runs(call, (rfi_part)part) || (part == RFI_PART_W && call->number > 0)) continue;
        check_pair(w, call, (rfi_part)part);
        many++;
      }
      if (call->wgrad_waits >= w->number) break;
    }
  }
  return many;
}

static void test_plan(void **state) {
  (void)state;
  for (int i = 0; i < SCENES; i++) {
    rft_scene s = scene(i, RFR_F32);
    rfr_schedule *schedule;
    rfr_graphs *g = rft_make_graphs(&s, &schedule);
    assert_true(check_plan(g) > 0);
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
}

/* ---- choices ---- */

static void expect_report(rfr_graphs *g, int callable, const char *text) {
  const char *report = rfr_graphs_report(g, callable, "wgrad");
  assert_non_null(report);
  if (!strstr(report, text)) fail_msg("\"%s\" is not in: %s", text, report);
}

static void test_report(void **state) {
  (void)state;
  rft_scene s = scene(1, RFR_F32);
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  expect_report(g, 0, "microbatch 0: in order: no later call can run at the same time\n");
  expect_report(g, 1, "microbatch 0: side stream, until wgrad of callable \"0\", microbatch 0\n");
  expect_report(g, 2, "microbatch 3: in order: completes a main gradient\n");
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  s.in_order = true;
  g = rft_make_graphs(&s, &schedule);
  expect_report(g, 0, "in order: rfr_graphs_options.wgrad_side_stream is 0\n");
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* Memory of the caller's that it may use between calls keeps a W in order. */
static void test_reasons(void **state) {
  (void)state;
  static _Alignas(16) float x[RFT_T * RFT_C], sum[RFT_C * RFT_C];
  static const char *const why[] = {": side stream, ", "W uses fixed memory", "its parameters are valid only",
                                    "the caller may add to its main gradients"};
  const rft_scene s = {.block = rft_block_linear, .dtype = RFR_F32};
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {RFT_C, RFT_C}};
  const rfr_main_gradient gradient = rft_main_gradient("b1.w", square, sum, 1);
  void *address = x;
  const rfr_callable_fixed fixed = {"x", 0, &address, 1};
  for (int i = 0; i < 4; i++) {
    rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
    rfr_callable c[2];
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    for (int k = 0; k < 2; k++) c[k] = rfr_callable_default(), c[k].trace = t[k];
    if (i == 1) c[1].fixed = &fixed, c[1].n_fixed = 1;
    if (i == 2) c[1].gathered = 1;
    if (i == 3) o.gradients = &gradient, o.n_gradients = 1;
    OK(rfr_graphs_create(ctx, c, 2, &o, &g));
    expect_report(g, 1, why[i]);
    rfr_graphs_destroy(g);
    for (int k = 0; k < 2; k++) rfr_trace_destroy(t[k]);
  }
}

/* W's run on the side stream with exactly the budget of that plan, and in order with one byte less. */
static void test_budget(void **state) {
  (void)state;
  rft_scene s = scene(2, RFR_F32);
  rfr_graphs_memory in_order = {.size = sizeof in_order}, side_stream = in_order, now = in_order;
  rfr_schedule *schedule;
  for (int pass = 0; pass < 4; pass++) {
    s.in_order = pass == 0;
    s.budget = pass < 2 ? 0 : pass == 2 ? side_stream.planned_bytes : side_stream.planned_bytes - 1;
    rfr_graphs *g = rft_make_graphs(&s, &schedule);
    OK(rfr_graphs_get_memory(g, pass == 0 ? &in_order : pass == 1 ? &side_stream : &now));
    if (pass == 1) assert_true(side_stream.planned_bytes > in_order.planned_bytes);
    if (pass == 2) assert_true(now.planned_bytes == side_stream.planned_bytes);
    if (pass == 3) assert_true(now.planned_bytes == in_order.planned_bytes);
    if (pass == 3) expect_report(g, 0, "in order: too little memory for its scratch\n");
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
}

/* dpos = dy * m, and m is in the caller's memory: the caller may write it between calls. */
static void test_read_of_callers(void **state) {
  (void)state;
  static float m[RFT_T * RFT_C];
  const rft_scene s = {.block = rft_block_linear, .dtype = RFR_F32};
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {RFT_T, RFT_C}};
  const rfr_binding mine = {"m", type, m};
  rfr_trace *t[2] = {rft_block_trace(&s, 0), NULL};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  OK(rfr_trace_create(ctx, &t[1]));
  const rfr_value in = rfr_input(t[1], "x", RFR_ROLE_INPUT, RFR_F32, 2, type.shape);
  const rfr_value pos = rfr_input(t[1], "pos", RFR_ROLE_TRAINABLE, RFR_F32, 2, type.shape);
  const rfr_value mask = rfr_input(t[1], "m", RFR_ROLE_FROZEN, RFR_F32, 2, type.shape);
  rfr_output(t[1], "y", rfr_add(t[1], in, rfr_mul(t[1], pos, mask)));
  OK(rfr_trace_finish(t[1]));
  for (int k = 0; k < 2; k++) c[k].trace = t[k];
  for (int callers = 0; callers < 2; callers++) {
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    if (callers) o.tensors = &mine, o.n_tensors = 1;
    OK(rfr_graphs_create(ctx, c, 2, &o, &g));
    expect_report(g, 1, callers ? "in order: W reads memory of the caller" : ": side stream, ");
    rfr_graphs_destroy(g);
  }
  for (int k = 0; k < 2; k++) rfr_trace_destroy(t[k]);
}

/* A device that has room only for the plan in order: for the arena, or for step memory. */
static int64_t device_bytes;
static rfr_status alloc_some(rfi_device *d, rfi_memory kind, size_t bytes, void **out) {
  *out = NULL;
  if (kind != RFI_MEMORY_RING && (int64_t)bytes > device_bytes) return rfi_fail(RFI_E_NO_MEMORY, "a small device");
  return rfi_backend_cpu.alloc(d, kind, bytes, out);
}

static void test_small_device(void **state) {
  (void)state;
  rfi_backend *backend = (rfi_backend *)rft_backend;
  for (int shared = 0; shared < 2; shared++) {
    rft_scene s = scene(2, RFR_F32);
    rfr_graphs_memory m = {.size = sizeof m}, now = m;
    rfr_schedule *schedule;
    if (shared) OK(rfr_step_memory_create(ctx, 0, &s.step_memory));
    s.in_order = true;
    rfr_graphs *g = rft_make_graphs(&s, &schedule);
    OK(rfr_graphs_get_memory(g, &m));
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
    device_bytes = (shared ? m.step_memory_bytes : m.planned_bytes) + rfi_backend_cpu.guard;
    backend->alloc = alloc_some;
    s.in_order = false;
    if (!shared) rft_run_scene(&s);
    g = rft_make_graphs(&s, &schedule);
    expect_report(g, 0, "in order: too little memory for its scratch\n");
    OK(rfr_graphs_get_memory(g, &now));
    assert_int_equal(now.planned_bytes, m.planned_bytes);
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
    backend->alloc = rfi_backend_cpu.alloc;
    rfr_step_memory_destroy(s.step_memory);
  }
}

/* dpos is the sum of dx, which the caller scales in place after the call that returns it. */
static void test_changed(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .dtype = RFR_F32};
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {RFT_T, RFT_C}};
  static float x[RFT_T * RFT_C], dy[RFT_T * RFT_C];
  rfr_trace *t[2] = {rft_block_trace(&s, 0), NULL};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs *g;
  rfr_tensor out, dx, sum;
  OK(rfr_trace_create(ctx, &t[1]));
  const rfr_value in = rfr_input(t[1], "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, type.shape);
  const rfr_value pos = rfr_input(t[1], "pos", RFR_ROLE_TRAINABLE, RFR_F32, 2, type.shape);
  rfr_output(t[1], "y", rfr_add(t[1], in, pos));
  OK(rfr_trace_finish(t[1]));
  for (int k = 0; k < 2; k++) c[k].trace = t[k];
  OK(rfr_graphs_create(ctx, c, 2, NULL, &g));
  rft_fill_named(g);
  for (int i = 0; i < RFT_T * RFT_C; i++) dy[i] = (float)i;
  const rfr_binding bx = {"x", type, x}, by = {"y", type, dy};
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int k = 0; k < 2; k++) OK(rfr_graphs_forward(g, k, 0, &bx, 1, &out, 1));
  OK(rfr_graphs_backward(g, 1, 0, &by, 1, &dx, 1));
  memset(dx.data, 0, (size_t)dx.bytes);
  OK(rfr_graphs_gradient(g, "pos", &sum));
  assert_memory_equal(sum.data, dy, sizeof dy);
  expect_report(g, 1, "in order: W uses an input gradient");
  rfr_graphs_destroy(g);
  for (int k = 0; k < 2; k++) rfr_trace_destroy(t[k]);
}

#define LATE(f) cmocka_unit_test_setup_teardown(f, use_late_stream, restore)

int main(void) {
  const struct CMUnitTest tests[] = {
      LATE(test_results), LATE(test_complete),        LATE(test_read),   LATE(test_failing_abort),
      LATE(test_changed), LATE(test_failure),         LATE(test_plan),   LATE(test_report),
      LATE(test_reasons), LATE(test_read_of_callers), LATE(test_budget), LATE(test_small_device)};
  return cmocka_run_group_tests_name("W on a side stream", tests, NULL, NULL);
}
