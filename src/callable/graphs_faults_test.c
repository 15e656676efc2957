/* SPDX-License-Identifier: Apache-2.0
 *
 * Creation of graphs, a rebind and a step in which one call fails: the k-th allocation, each backend call, each hook,
 * for k = 1, 2, ... until nothing fails. After a failed creation or rebind the caller's memory (parameters, main
 * gradients, states, fixed memory, hook lists) is unchanged, no memory of device or context is leaked, and the next
 * attempt works, bitwise equal to an undisturbed one. After a failed call a step can only be aborted, and the next step
 * has the right bits.
 *
 * The device is the CPU with support/fault_backend in place of the library's choice (support/backend.h).
 */
#include <stdio.h>
#include <string.h>

#include "callable/graphed.h"
#include "refrain/op.h"
#include "support/backend.h"
#include "support/fault_backend.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C, BYTES = RFT_T * RFT_C * 4, BLOCKS = 2, MICROBATCHES = 2 };
enum { MOST_COUNT = 1000 };

/* ---- states ---- */

/* Counts its calls in an integer and keeps a decaying mean. The kernel fails if its state has impossible values, as
 * other bytes would. */
static rfr_status count(const rfr_call *call) {
  const float *x = call->in[0].data;
  int64_t *n = call->out[0].data;
  float *mean = call->out[1].data;
  if (*n < 0 || *n > MOST_COUNT || !(*mean > -100 && *mean < 100)) return RFR_NUMERIC;
  *n += 1;
  *mean = 0.5f * *mean + 0.5f * x[0];
  return RFR_OK;
}

static const char *count_shape(const rfr_infer *c) {
  c->out[0] = c->in[1];
  c->out[1] = c->in[2];
  return NULL;
}

static int64_t registered; /* live blocks of the context once the op is registered */

static int setup(void **state) {
  const rfr_op *op;
  rfr_op_desc d = rfr_op_desc_default();
  d.name = "test.count", d.operands = "x n mean", d.results = "n1@n mean1@mean", d.shape = count_shape, d.cpu = count;
  d.flags = RFR_OP_STATE;
  if (rft_context_setup(state) != 0 || rfr_op_register(ctx, &d, &op) != RFR_OK) return -1;
  registered = rfr_ctx_get_stats(ctx).live_blocks;
  return 0;
}

static int teardown(void **state) {
  const int left = rft_context_teardown(state);
  return left - (int)registered;
}

static rfr_value counting_block(rft_recorder *r, rfr_value x) {
  if (r->block > 0) return rft_block_mlp(r, x);
  rfr_value n = rfr_input(r->t, "n", RFR_ROLE_STATE, RFR_I64, 1, ((int64_t[]){1}));
  rfr_value mean = rfr_input(r->t, "mean", RFR_ROLE_STATE, RFR_F32, 1, ((int64_t[]){1}));
  rfr_record(r->t, rfr_op_find(ctx, "test.count"), 3, ((rfr_value[]){rfr_detach(r->t, x), n, mean}), NULL, NULL);
  return rft_block_linear(r, x);
}

/* ---- the caller's memory ---- */

typedef struct world {
  _Alignas(16) float w[C * C];
  _Alignas(16) float grad[C * C];
  _Alignas(16) int64_t n[2];
  _Alignas(16) float mean[4];
  _Alignas(16) unsigned char x[2][BYTES], y[2][BYTES];
  rfr_hooks hooks[BLOCKS];
  rfr_hook hook;
} world;

typedef struct events { /* hook calls */
  int calls, fails;     /* fails: the number of the hook call that fails; 0: none */
  bool failed;
} events;

static rfr_status listen(const rfr_hook_event *event, void *user) {
  events *t = user;
  (void)event;
  if (++t->calls != t->fails) return RFR_OK;
  t->failed = true;
  return RFR_IO;
}

static void set_world(world *x, events *t) {
  memset(x, 0, sizeof *x);
  for (int i = 0; i < 2; i++)
    rft_fill_by(&(rfr_tensor){.type = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}}, .data = i ? x->grad : x->w},
                7 + (uint64_t)i, 0.3f);
  x->n[0] = 3;
  x->mean[0] = 0.25f;
  memset(x->x, 0x3d, sizeof x->x);
  memset(x->y, 0x5a, sizeof x->y);
  x->hook = (rfr_hook){listen, t};
  for (int i = 0; i < BLOCKS; i++) {
    const rfr_hook_list list = {&x->hook, 1};
    x->hooks[i] = rfr_hooks_default();
    x->hooks[i].pre_forward = x->hooks[i].post_forward = x->hooks[i].pre_backward = list;
    x->hooks[i].post_backward = x->hooks[i].pre_wgrad = x->hooks[i].post_wgrad = list;
  }
}

static const rft_scene scene = {.block = counting_block,
                                .blocks = BLOCKS,
                                .microbatches = MICROBATCHES,
                                .dtype = RFR_F32,
                                .fuse = true,
                                .schedule = "0F0 1F0 0F1 1F1 1I0 0I0 1I1 1W0 0I1 1W1 0W0 0W1",
                                .layers = 1};
static rfr_schedule *schedule;
static int64_t failing_allocation; /* the allocation of the next creation that fails; 0: none */

static rfr_status create(world *x, bool eager, rfr_graphs **g) {
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const rfr_binding tensors[3] = {{"b0.w", square, x->w},
                                  {"n", {.dtype = RFR_I64, .rank = 1, .shape = {1}}, x->n},
                                  {"mean", {.dtype = RFR_F32, .rank = 1, .shape = {1}}, x->mean}};
  const rfr_main_gradient gradient = rft_main_gradient("b0.w", square, x->grad, 1);
  void *const at_x[2] = {x->x[0], x->x[1]}, *const at_y[2] = {x->y[0], x->y[1]};
  const rfr_callable_fixed fixed[2] = {{"x", 0, at_x, 2}, {"y", 0, at_y, 2}};
  rfr_callable c[BLOCKS];
  rfr_trace *t[BLOCKS];
  rfr_graphs_options o = rfr_graphs_options_default();
  for (int i = 0; i < BLOCKS; i++) {
    t[i] = rft_block_trace(&scene, i);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
  }
  c[0].fixed = fixed, c[0].n_fixed = 2;
  o.schedule = schedule;
  o.eager = eager;
  o.tensors = tensors, o.n_tensors = 3;
  o.gradients = &gradient, o.n_gradients = 1;
  o.hooks = x->hooks, o.n_hooks = BLOCKS;
  o.warmup_iterations = 2;
  o.pre_warmup = o.post_warmup = (rfr_hook_list){&x->hook, 1};
  rfr_ctx_fail_alloc(ctx, failing_allocation);
  const rfr_status s = rfr_graphs_create(ctx, c, BLOCKS, &o, g);
  rfr_ctx_fail_alloc(ctx, 0);
  for (int i = 0; i < BLOCKS; i++) rfr_trace_destroy(t[i]);
  return s;
}

/* Group sizes in memory that the device cannot reach are refused, even if they pass through other ops. The same call
 * works with memory that the device can reach. */
static void moved_splits(int way) {
  enum { ROWS = 8, GROUPS = 2 };
  static const rfr_type rows = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, C}};
  static const rfr_type sizes = {.dtype = RFR_I64, .rank = 1, .shape = {GROUPS}};
  static float x[ROWS * C];
  int64_t splits[GROUPS] = {5, 3}, elsewhere[GROUPS] = {5, 3};
  rfr_callable c = rfr_callable_default();
  rfr_graphs *g;
  rfr_trace *t;
  rfr_tensor y;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value in = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, rows.shape);
  rfr_value given = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, sizes.shape);
  if (way == 1) given = rfr_slice(t, given, 0, 0, GROUPS);
  if (way == 2) given = rfr_reshape(t, rfr_cast(t, given, RFR_I32), 1, sizes.shape);
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 3, ((int64_t[]){GROUPS, C, C}));
  const rfr_value offsets = rfr_splits_to_offsets(t, given, ROWS, NULL);
  rfr_output(t, "y", rfr_grouped_linear(t, in, w, offsets, RFR_NONE, RFR_NONE));
  OK(rfr_trace_finish(t));
  c.name = "experts";
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_faults.away = elsewhere;
  rfr_binding b[2] = {{"x", rows, x}, {"splits", sizes, elsewhere}};
  rft_refused(rfr_graphs_forward(g, 0, 0, b, 2, &y, 1), "replay.signature",
              "callable \"experts\", \"splits\": group sizes must be device memory");
  b[1].data = splits;
  rft_faults.away = x; /* other inputs may be in any memory */
  OK(rfr_graphs_forward(g, 0, 0, b, 2, &y, 1));
  rft_faults.away = NULL;
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

static void test_moved_splits(void **state) {
  (void)state;
  for (int way = 0; way < 3; way++) moved_splits(way);
}

/* ---- a step ---- */

typedef struct results {
  unsigned char y[MICROBATCHES][BYTES], dx[MICROBATCHES][BYTES];
} results;

static rfr_status forward(rfr_graphs *g, world *x, int block, int m, results *r) {
  const rfr_binding in = {NULL, rft_activation(&scene), block == 0 ? x->x[m] : x->y[m]};
  rfr_tensor y;
  if (block == 0) rft_draw(&scene, x->x[m], 1, m, 1);
  const rfr_status s = rfr_graphs_forward(g, block, m, &in, 1, &y, 1);
  if (s == RFR_OK && block == 1) memcpy(r->y[m], y.data, BYTES);
  return s;
}

static rfr_status backward(rfr_graphs *g, int block, int m, results *r) {
  static unsigned char between[BYTES];
  const rfr_binding in = {NULL, rft_activation(&scene), between};
  rfr_tensor dx;
  if (block == 1) rft_draw(&scene, between, 1, m, 2);
  const rfr_status s = rfr_graphs_backward(g, block, m, &in, 1, &dx, 1);
  if (s == RFR_OK) memcpy(block == 1 ? between : r->dx[m], dx.data, BYTES);
  return s;
}

/* Runs the step until it succeeds. */
static rfr_status step(rfr_graphs *g, world *x, results *r) {
  const int64_t block[4] = {5, 5, 77, 0};
  const rfr_binding now = {"step", {.dtype = RFR_I64, .rank = 1, .shape = {4}}, block};
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
  rfr_status s = rfr_graphs_begin_step(g, &now, 1);
  for (int i = 0; i < n && s == RFR_OK; i++)
    s = a[i].op == RFR_ACTION_F   ? forward(g, x, a[i].stage, a[i].microbatch, r)
        : a[i].op == RFR_ACTION_W ? rfr_graphs_wgrad(g, a[i].stage, a[i].microbatch)
                                  : backward(g, a[i].stage, a[i].microbatch, r);
  return s == RFR_OK ? rfr_graphs_end_step(g) : s;
}

/* Initializes the parameters that the graphs own. */
static void init(rfr_graphs *g) {
  for (int i = 0; i < g->m.store.n; i++) {
    const rfi_named *x = &g->m.store.named[i];
    if (x->parameter < 0 && x->offset >= 0 && x->tensor.type.dtype == RFR_F32)
      rft_fill_by(&x->tensor, 30 + (uint64_t)x->tensor.bytes, 0.3f);
  }
}

/* ---- what fails ---- */

enum { ALLOCATION = RFT_ENTRY_N, HOOK, FAULTS };

static events heard;

static void arm(int fault, int64_t k) {
  const int64_t calls[3] = {rft_faults.devices, rft_faults.blocks, rft_faults.graphs}, bytes = rft_faults.arena_bytes;
  rft_faults = (rft_fault){.devices = (int)calls[0], .blocks = (int)calls[1], .graphs = (int)calls[2]};
  rft_faults.arena_bytes = bytes;
  heard = (events){0};
  if (fault < RFT_ENTRY_N) rft_faults.entry = (rft_entry)fault, rft_faults.k = k;
  if (fault == HOOK) heard.fails = (int)k;
  failing_allocation = fault == ALLOCATION ? k : 0;
}

static const char *name_of(int fault) {
  return fault < RFT_ENTRY_N ? rft_entry_name((rft_entry)fault) : fault == HOOK ? "hook" : "allocation";
}

static void check_status(int fault, int64_t k, rfr_status s) {
  const char *slug = fault == HOOK ? "graphs.hook" : fault == ALLOCATION ? "memory.alloc" : "cuda";
  if (strcmp(rfr_last_error()->slug, slug) != 0 || rfr_last_error()->status != s)
    fail_msg("%s %lld: %s [%s]", name_of(fault), (long long)k, rfr_last_error()->message, rfr_last_error()->slug);
}

static void set_up(world *x, results *undisturbed) {
  rfr_graphs *g;
  rft_faults = (rft_fault){0};
  OK(rfr_schedule_parse(ctx, "test", scene.schedule, strlen(scene.schedule), &schedule));
  set_world(x, &heard);
  arm(FAULTS, 0);
  OK(create(x, false, &g));
  init(g);
  OK(step(g, x, undisturbed));
  assert_int_equal(x->n[0], 3 + MICROBATCHES);
  rfr_graphs_destroy(g);
  set_world(x, &heard);
}

/* ---- creation ---- */

static void test_creation(void **state) {
  (void)state;
  static world x, before;
  static results undisturbed, r;
  set_up(&x, &undisturbed);
  before = x;
  const int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  for (int fault = 0; fault < FAULTS; fault++)
    for (int64_t k = 1;; k++) {
      rfr_graphs *g;
      arm(fault, k);
      const rfr_status s = create(&x, false, &g);
      const bool failed = s != RFR_OK;
      if (failed) check_status(fault, k, s);
      arm(FAULTS, 0);
      if (memcmp(&x, &before, sizeof x) != 0) fail_msg("%s %lld: memory of the caller's", name_of(fault), (long long)k);
      if (!failed) {
        const bool never = fault == RFT_ENTRY_copy || fault == RFT_ENTRY_inspect || fault == RFT_ENTRY_memory_use ||
                           fault == RFT_ENTRY_choose || fault == RFT_ENTRY_run_timed || fault == RFT_ENTRY_launch ||
                           fault == RFT_ENTRY_poll;
        print_message("%s: %lld failed\n", name_of(fault), (long long)k - 1);
        assert_true(never ? k == 1 : k > 1);
        init(g);
        OK(step(g, &x, &r)); /* after all failures the results are bitwise equal */
        assert_memory_equal(&r, &undisturbed, sizeof r);
        x = before;
      }
      rfr_graphs_destroy(g);
      assert_true(rft_faults.devices == 0 && rft_faults.blocks == 0 && rft_faults.graphs == 0);
      assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
      if (!failed) break;
    }
  rfr_schedule_destroy(schedule);
}

/* ---- a rebind ---- */

static rfr_status rebind(rfr_graphs *g, world *to) {
  const rfr_binding tensor = {"b0.w", {.dtype = RFR_F32, .rank = 2, .shape = {C, C}}, to->w};
  const rfr_main_gradient gradient = rft_main_gradient("b0.w", tensor.type, to->grad, 0);
  void *const at_x[2] = {to->x[0], to->x[1]}, *const at_y[2] = {to->y[0], to->y[1]};
  const rfr_callable_moved fixed[2] = {{0, {"x", 0, at_x, 2}}, {0, {"y", 0, at_y, 2}}};
  return rfr_graphs_rebind(g, &tensor, 1, &gradient, 1, fixed, 2);
}

static void test_rebind(void **state) {
  (void)state;
  static world x, before, moved;
  static results undisturbed, r;
  rfr_graphs *g;
  set_up(&x, &undisturbed);
  before = x;
  OK(create(&x, false, &g));
  init(g);
  memset(&moved, 0xff, sizeof moved);
  const int graphs = rft_faults.graphs;
  const int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  static const int faults[] = {ALLOCATION, RFT_ENTRY_capture, RFT_ENTRY_wait};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
    for (int64_t k = 1;; k++) {
      arm(faults[i], k);
      rfr_ctx_fail_alloc(ctx, failing_allocation);
      const rfr_status s = rebind(g, &moved);
      rfr_ctx_fail_alloc(ctx, 0);
      arm(FAULTS, 0);
      assert_int_equal(rft_faults.graphs, graphs);
      assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
      if (s == RFR_OK) {
        assert_true(k > 1);
        OK(rebind(g, &x));
        break;
      }
      OK(step(g, &x, &r));
      assert_memory_equal(&r, &undisturbed, sizeof r);
      x = before;
    }
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* ---- memory of another device ---- */

/* Memory that the device cannot reach is refused with its name, and a failed rebind changes nothing. */
static void test_places(void **state) {
  (void)state;
  static world x, moved;
  static results undisturbed, r;
  set_up(&x, &undisturbed);
  const struct {
    const void *at, *moved;
    const char *slug, *text;
  } places[] = {{x.w, moved.w, "program.state", "\"b0.w\""},
                {x.n, NULL, "program.state", "\"n\""},
                {x.grad, moved.grad, "program.state", "b0.w\": it is not memory of the device"},
                {x.x[1], moved.x[1], "graphs.callable", "fixed memory for \"x\": it is not memory of the device"}};
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    rfr_graphs *g;
    rft_faults.away = places[i].at;
    rft_refused(create(&x, false, &g), places[i].slug, places[i].text);
    rft_faults.away = NULL;
    OK(create(&x, false, &g));
    init(g);
    memset(&moved, 0xff, sizeof moved);
    rft_faults.away = places[i].moved;
    if (places[i].moved) rft_refused(rebind(g, &moved), places[i].slug, "it is not memory of the device");
    rft_faults.away = NULL;
    OK(step(g, &x, &r));
    assert_memory_equal(&r, &undisturbed, sizeof r);
    rfr_graphs_destroy(g);
    set_world(&x, &heard);
  }
  rfr_schedule_destroy(schedule);
}

/* ---- a step ---- */

static void test_step(void **state) {
  (void)state;
  static world x, before;
  static results undisturbed, r;
  static const int faults[] = {RFT_ENTRY_move, RFT_ENTRY_fill, RFT_ENTRY_launch, RFT_ENTRY_run};
  set_up(&x, &undisturbed);
  before = x;
  for (int eager = 0; eager < 2; eager++) {
    rfr_graphs *g;
    OK(create(&x, eager, &g));
    init(g);
    const rfr_ctx_stats stats = rfr_ctx_get_stats(ctx);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
      for (int64_t k = 1;; k++) {
        arm(faults[i], k);
        const rfr_status s = step(g, &x, &r);
        const bool failed = s != RFR_OK;
        rfr_action next;
        int callable;
        if (failed) check_status(faults[i], k, s);
        arm(FAULTS, 0);
        if (failed) {
          rft_refused(rfr_graphs_wgrad(g, 0, 0), "graphs.order", "abort it");
          rft_refused(rfr_graphs_end_step(g), "graphs.order", "abort it");
          rft_refused(rfr_graphs_expected(g, &next, &callable), "graphs.order", "abort it");
          OK(rfr_graphs_abort_step(g));
          x = before; /* the caller restores states and accumulated gradients */
          OK(step(g, &x, &r));
        }
        assert_memory_equal(&r, &undisturbed, sizeof r);
        x = before;
        if (!failed) break;
      }
    assert_int_equal(rfr_ctx_get_stats(ctx).alloc_calls, stats.alloc_calls);
    rfr_graphs_destroy(g);
  }
  rfr_schedule_destroy(schedule);
}

/* ---- copies ---- */

/* A captured copy reads from the sources of its own call, even if they have moved since the last call, and no copy is
 * enqueued before the graph. Eager calls enqueue copies. Inputs that are already in the slot or in fixed memory are not
 * copied. */
static void test_copies(void **state) {
  (void)state;
  static world x;
  static results undisturbed;
  static unsigned char from[2 * MICROBATCHES][BYTES];
  set_up(&x, &undisturbed);
  for (int eager = 0; eager < 2; eager++) {
    rfr_graphs *g;
    rfr_tensor t;
    OK(create(&x, eager, &g));
    init(g);
    int n;
    const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
    OK(rfr_graphs_begin_step(g, NULL, 0));
    for (int i = 0, k = 0; i < n; i++) {
      const bool back = a[i].op == RFR_ACTION_I, first = a[i].stage == 0;
      const bool fixed = first && !back;
      if (a[i].op == RFR_ACTION_W) {
        OK(rfr_graphs_wgrad(g, a[i].stage, a[i].microbatch));
        continue;
      }
      unsigned char *source = fixed ? x.x[a[i].microbatch] : from[k++ % (2 * MICROBATCHES)];
      const rfr_binding in = {NULL, rft_activation(&scene), source};
      rft_draw(&scene, source, 1, i, 3);
      arm(FAULTS, 0);
      if (back) OK(rfr_graphs_backward(g, a[i].stage, a[i].microbatch, &in, 1, &t, 1));
      else OK(rfr_graphs_forward(g, a[i].stage, a[i].microbatch, &in, 1, &t, 1));
      assert_int_equal(rft_faults.calls[RFT_ENTRY_move], eager && !fixed);
      assert_int_equal(rft_faults.calls[RFT_ENTRY_launch], !eager);
      if (!eager && !fixed) assert_ptr_equal(rft_faults.from[0], source);
      const rfi_port *p = back ? g->callable[a[i].stage].out : g->callable[a[i].stage].in;
      rfi_step_call call = g->calls.call[i];
      const rfr_tensor in_slot = rfi_port_tensor(g, call.slot, p, back);
      assert_memory_equal(in_slot.data, source, BYTES);
    }
    OK(rfr_graphs_end_step(g));
    rfr_graphs_destroy(g);
  }
  rfr_schedule_destroy(schedule);
}

int main(void) {
  rft_backend = &rft_fault_backend;
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_creation, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_rebind, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_places, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_moved_splits, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_step, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_copies, setup, teardown)};
  return cmocka_run_group_tests_name("failing graphs", tests, NULL, NULL);
}
