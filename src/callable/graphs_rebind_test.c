/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters, main gradients and fixed memory that move between steps: rebound graphs are bitwise equal, do not touch
 * the old memory, refuse old addresses, and are unchanged after a failure.
 */
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C };

static const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
static const rft_scene scene = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};

typedef struct memory { /* the caller's memory */
  _Alignas(16) float w[C * C], grad[C * C];
} memory;

/* If a callable is sharded, its tensors are flat shards; over one rank a shard is the full tensor. */
static rfr_type type_of(bool sharded) {
  return sharded ? (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {C * C}} : square;
}

static rfr_graphs *make(memory *own, bool eager, bool sharded) {
  rfr_trace *t = rft_block_trace(&scene, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  const rfr_binding tensors = {"b0.w", type_of(sharded), own->w};
  const rfr_main_gradient gradient = rft_main_gradient("b0.w", type_of(sharded), own->grad, 1);
  rfr_graphs *g;
  rfr_tensor bias;
  c.trace = t, c.sharded = sharded;
  o.tensors = &tensors, o.n_tensors = 1;
  o.gradients = &gradient, o.n_gradients = 1;
  o.eager = eager;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  rfr_trace_destroy(t);
  OK(rfr_graphs_tensor(g, "b0.bias", &bias));
  rft_fill_by(&bias, 4, 0.5f);
  return g;
}

static void init(memory *own) {
  rft_fill_by(&(rfr_tensor){.type = square, .data = own->w}, 1, 0.3f);
  memset(own->grad, 0, sizeof own->grad);
}

static void run(rfr_graphs *g, rft_buffers *b) {
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_draw(&scene, b->x[0][0], 1, 0, 1);
  rft_draw(&scene, b->dx[0][1], 1, 0, 2);
  rft_forward(g, &scene, b, 0, 0);
  rft_backward(g, &scene, b, 0, 0);
  OK(rfr_graphs_end_step(g));
}

static rfr_status rebind(rfr_graphs *g, memory *to, bool sharded) {
  const rfr_binding tensors = {"b0.w", type_of(sharded), to->w};
  const rfr_main_gradient gradient = rft_main_gradient("b0.w", type_of(sharded), to->grad, 0);
  return rfr_graphs_rebind(g, &tensors, 1, &gradient, 1, NULL, 0);
}

static void test_moved(void **state) {
  (void)state;
  static memory stays, from, to, poisoned;
  static rft_buffers ours, theirs;
  for (int variant = 0; variant < 4; variant++) {
    const bool eager = variant & 1, sharded = variant >> 1;
    init(&stays);
    init(&from);
    rfr_graphs *still = make(&stays, eager, sharded), *g = make(&from, eager, sharded);
    const int graphs = g->memory.graphs;
    run(still, &theirs);
    run(g, &ours);
    memcpy(&to, &from, sizeof to);
    memset(&from, 0xff, sizeof from);
    memset(&poisoned, 0xff, sizeof poisoned);
    OK(rebind(g, &to, sharded));
    for (int step = 0; step < 2; step++) { /* the gradient accumulates, as declared */
      run(still, &theirs);
      run(g, &ours);
      assert_memory_equal(&ours, &theirs, sizeof ours);
      assert_memory_equal(&to, &stays, sizeof to);
      to.w[step] += 1, stays.w[step] += 1;
    }
    assert_memory_equal(&from, &poisoned, sizeof from);
    assert_int_equal(g->memory.graphs, graphs);
    rfr_graphs_destroy(still);
    rfr_graphs_destroy(g);
  }
}

/* Every call that takes an address refuses old ones. */
static void test_stale(void **state) {
  (void)state;
  static memory from, to;
  static float values[C * C];
  rfr_graphs *g = make(&from, false, false);
  rfr_tensor w, grad, bias;
  rfr_binding b = {"b0.w", square, from.w};
  OK(rfr_graphs_tensor(g, "b0.w", &w));
  OK(rfr_graphs_gradient(g, "b0.w", &grad));
  OK(rfr_graphs_tensor(g, "b0.bias", &bias));
  OK(rfr_graphs_begin_step(g, &b, 1));
  rft_refused(rebind(g, &to, false), "graphs.order", "end or abort");
  OK(rfr_graphs_abort_step(g));
  OK(rebind(g, &to, false));
  rft_refused(rfr_graphs_begin_step(g, &b, 1), "replay.signature", "\"b0.w\": captured at");
  rft_refused(rfr_graphs_write(g, &w, values), "replay.signature", "query it again");
  rft_refused(rfr_graphs_read(g, &grad, values), "replay.signature", "query it again");
  OK(rfr_graphs_read(g, &bias, values));
  b.data = to.w;
  b.type.shape[0]++;
  rft_refused(rfr_graphs_begin_step(g, &b, 1), "replay.signature", "dimension 0 was 32, now 33");
  b.type = square;
  b.type.dtype = RFR_BF16;
  rft_refused(rfr_graphs_begin_step(g, &b, 1), "replay.signature", "type f32, now bf16");
  b.type = square;
  OK(rfr_graphs_begin_step(g, &b, 1));
  OK(rfr_graphs_abort_step(g));
  OK(rfr_graphs_tensor(g, "b0.w", &w));
  assert_ptr_equal(w.data, to.w);
  w.data = to.w + C, w.bytes = 4 * C, w.type = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {C}}; /* a slice */
  OK(rfr_graphs_write(g, &w, values));
  w.bytes = sizeof to.w;
  rft_refused(rfr_graphs_write(g, &w, values), "argument", "bytes is 4096, its type has 128");
  w.type = square;
  rft_refused(rfr_graphs_write(g, &w, values), "replay.signature", "query it again");
  rfr_graphs_destroy(g);
}

static void test_refusals(void **state) {
  (void)state;
  static memory own, to;
  rfr_graphs *g = make(&own, false, false);
  rfr_type other = square;
  other.shape[1] = 7;
  const struct {
    rfr_binding tensors[2];
    const char *slug, *text;
    int n;
  } cases[] = {{{{"b0.v", square, to.w}}, "program.name", "\"b0.v\"", 1},
               {{{NULL, square, to.w}}, "program.name", "\"\"", 1},
               {{{"grad.b0.w", square, to.w}}, "program.name", "\"grad.b0.w\"", 1},
               {{{"b0.bias", square, to.w}}, "program.state", "memory of the graphs", 1},
               {{{"b0.w", square, to.w + 1}}, "program.state", "multiple of 16", 1},
               {{{"b0.w", square, NULL}}, "program.state", "data is NULL", 1},
               {{{"b0.w", other, to.w}}, "replay.signature", "dimension 1 was 32, now 7", 1},
               {{{"b0.w", square, to.w}, {"b0.w", square, to.w}}, "program.state", "listed twice", 2},
               {{{0}}, "argument", "-1 tensors", -1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    rft_refused(rfr_graphs_rebind(g, cases[i].tensors, cases[i].n, NULL, 0, NULL, 0), cases[i].slug, cases[i].text);
  const rfr_main_gradient ours =
      rft_main_gradient("b0.bias", (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {C}}, to.grad, 0);
  const rfr_main_gradient none = rft_main_gradient("b0.v", square, to.grad, 0);
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &ours, 1, NULL, 0), "program.state", "memory of the graphs");
  rfr_tensor bias;
  OK(rfr_graphs_tensor(g, "b0.bias", &bias));
  rft_refused(rfr_graphs_rebind(g, &(rfr_binding){"b0.w", square, bias.data}, 1, NULL, 0, NULL, 0), "program.state",
              "\"b0.w\": it is in memory of these graphs");
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &none, 1, NULL, 0), "program.name", "\"b0.v\"");
  OK(rfr_graphs_rebind(g, NULL, 0, NULL, 0, NULL, 0));
  const int64_t dense[2] = {C, 1}, turned[2] = {1, C};
  rfr_main_gradient good[2], view, narrow, unknown;
  good[0] = good[1] = view = narrow = unknown = rft_main_gradient("b0.w", square, to.grad, 0);
  good[0].strides = dense, view.strides = turned, good[0].n_strides = view.n_strides = 2;
  narrow.type.dtype = RFR_BF16, narrow.bytes /= 2, unknown.type.dtype = (rfr_dtype)99;
  good[1].data = own.grad;
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &view, 1, NULL, 0), "program.state", "strides [1,32] are not dense");
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &narrow, 1, NULL, 0), "program.state", "captured as f32, now bf16");
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &unknown, 1, NULL, 0), "program.state", "must have dtype f32, bf16 or f16");
  for (int i = 0; i < 2; i++) OK(rfr_graphs_rebind(g, NULL, 0, &good[i], 1, NULL, 0));
  rfr_graphs_destroy(g);
}

/* ---- fixed memory ---- */

enum { IN, OUT, DOUT, DIN, KINDS, SLOTS = 2, BYTES = T * C * 4 };
static const char *const ports[KINDS] = {"x", "y", "y", "x"};

typedef struct fixed_memory { /* the caller's memory: per kind and slot */
  _Alignas(16) unsigned char at[KINDS][SLOTS][BYTES];
} fixed_memory;

typedef struct places {
  void *of[KINDS][SLOTS];
  rfr_callable_moved list[KINDS];
} places;

/* Slots in ascending order, or not. */
static void places_in(fixed_memory *m, bool turned, places *p) {
  for (int k = 0; k < KINDS; k++) {
    for (int slot = 0; slot < SLOTS; slot++) p->of[k][slot] = m->at[k][turned ? SLOTS - 1 - slot : slot];
    p->list[k] = (rfr_callable_moved){0, {ports[k], k == DOUT || k == DIN, p->of[k], SLOTS}};
  }
}

static rfr_graphs *make_fixed(const places *p, bool eager) {
  static const char text[] = "0F0 0F1 0I0 0I1 0W1 0W0";
  rfr_trace *t = rft_block_trace(&scene, 0);
  rfr_callable c = rfr_callable_default();
  rfr_callable_fixed fixed[KINDS];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule;
  rfr_graphs *g;
  rfr_tensor w;
  OK(rfr_schedule_parse(ctx, "test", text, sizeof text - 1, &schedule));
  for (int k = 0; k < KINDS; k++) fixed[k] = p->list[k].to;
  c.trace = t, c.fixed = fixed, c.n_fixed = KINDS;
  o.schedule = schedule, o.eager = eager;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  rfr_trace_destroy(t);
  rfr_schedule_destroy(schedule);
  OK(rfr_graphs_tensor(g, "b0.w", &w));
  rft_fill_by(&w, 4, 0.5f);
  return g;
}

typedef struct fixed_results {
  unsigned char y[SLOTS][BYTES], dx[SLOTS][BYTES];
  float dw[C * C];
} fixed_results;

/* `old`: addresses that calls must refuse; NULL: none. */
static void run_fixed(rfr_graphs *g, const places *p, const places *old, fixed_results *out) {
  rfr_tensor t;
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int call = 0; call < 2 * SLOTS; call++) {
    const int m = call % SLOTS, back = call / SLOTS, in = back ? DOUT : IN;
    rfr_binding b = {NULL, rft_activation(&scene), old ? old->of[in][m] : NULL};
    if (old)
      rft_refused(back ? rfr_graphs_backward(g, 0, m, &b, 1, &t, 1) : rfr_graphs_forward(g, 0, m, &b, 1, &t, 1),
                  "replay.signature", "captured at");
    b.data = p->of[in][m];
    rft_draw(&scene, p->of[in][m], 0, m, 1 + back);
    if (back) OK(rfr_graphs_backward(g, 0, m, &b, 1, &t, 1));
    else OK(rfr_graphs_forward(g, 0, m, &b, 1, &t, 1));
    assert_ptr_equal(t.data, p->of[back ? DIN : OUT][m]);
    memcpy(back ? out->dx[m] : out->y[m], t.data, BYTES);
  }
  for (int m = SLOTS - 1; m >= 0; m--) OK(rfr_graphs_wgrad(g, 0, m));
  OK(rfr_graphs_end_step(g));
  OK(rfr_graphs_gradient(g, "b0.w", &t));
  memcpy(out->dw, t.data, sizeof out->dw);
}

static void test_fixed_moved(void **state) {
  (void)state;
  static fixed_memory from, to, poisoned;
  static fixed_results plain, now;
  places first, second, turned;
  places_in(&from, false, &first);
  places_in(&to, false, &second);
  places_in(&to, true, &turned);
  memset(&poisoned, 0xff, sizeof poisoned);
  for (int eager = 0; eager < 2; eager++) {
    rfr_graphs *g = make_fixed(&first, eager);
    const int graphs = g->memory.graphs;
    run_fixed(g, &first, NULL, &plain);
    memset(&from, 0xff, sizeof from);
    OK(rfr_graphs_rebind(g, NULL, 0, NULL, 0, second.list, KINDS));
    run_fixed(g, &second, &first, &now);
    assert_memory_equal(&now, &plain, sizeof now);
    OK(rfr_graphs_rebind(g, NULL, 0, NULL, 0, turned.list, KINDS)); /* the slots swap their memory in one call */
    run_fixed(g, &turned, &second, &now);
    assert_memory_equal(&now, &plain, sizeof now);
    assert_memory_equal(&from, &poisoned, sizeof from);
    assert_int_equal(g->memory.graphs, graphs);
    rfr_graphs_destroy(g);
  }
}

static void test_fixed_refusals(void **state) {
  (void)state;
  static fixed_memory from, to;
  static fixed_results plain, now;
  places first, second;
  places_in(&from, false, &first);
  places_in(&to, false, &second);
  rfr_graphs *g = make_fixed(&first, false);
  run_fixed(g, &first, NULL, &plain);
  void *const misaligned[SLOTS] = {to.at[0][0] + 4, to.at[0][1]}, *const none[SLOTS] = {to.at[0][0], NULL};
  void *const over[SLOTS] = {to.at[0][0], from.at[OUT][0]}; /* y of slot 0 */
  const rfr_callable_moved x = second.list[IN];
  const struct {
    rfr_callable_moved list[2];
    const char *slug, *text;
    int n;
  } cases[] = {{{{1, x.to}}, "argument", "callable 1 of 1", 1},
               {{{0, {"z", 0, misaligned, SLOTS}}}, "graphs.callable", "\"z\": there is no such", 1},
               {{{0, {"x", 0, second.of[IN], 1}}}, "graphs.callable", "1 addresses for 2 slots", 1},
               {{{0, {"x", 0, NULL, SLOTS}}}, "graphs.callable", "0 addresses", 1},
               {{{0, {"x", 0, misaligned, SLOTS}}}, "graphs.callable", "multiple of 16", 1},
               {{{0, {"x", 0, none, SLOTS}}}, "graphs.callable", "data is NULL", 1},
               {{{0, {"x", 0, over, SLOTS}}}, "graphs.callable", "overlap in memory that is written", 1},
               {{x, x}, "program.state", "\"x\" is listed twice", 2},
               {{x}, "argument", "-1 fixed", -1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rft_refused(rfr_graphs_rebind(g, NULL, 0, NULL, 0, cases[i].list, cases[i].n), cases[i].slug, cases[i].text);
    run_fixed(g, &first, NULL, &now);
    assert_memory_equal(&now, &plain, sizeof now);
  }
  rfr_graphs_destroy(g);
  static memory own;
  g = make(&own, false, false);
  rft_refused(rfr_graphs_rebind(g, NULL, 0, NULL, 0, &(rfr_callable_moved){0, {"x", 0, second.of[IN], 1}}, 1),
              "graphs.callable", "it was not fixed at creation");
  rfr_graphs_destroy(g);
}

/* ---- failures ---- */

/* Each allocation fails once; then addresses, graphs and results are unchanged. */
static void test_failures(void **state) {
  (void)state;
  static memory own, to;
  static rft_buffers before, after;
  init(&own);
  rfr_graphs *g = make(&own, false, false);
  run(g, &before);
  const int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  memset(&to, 0xff, sizeof to);
  for (int64_t k = 1;; k++) {
    rfr_ctx_fail_alloc(ctx, k);
    const rfr_status s = rebind(g, &to, false);
    rfr_ctx_fail_alloc(ctx, 0);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
    if (s == RFR_OK) {
      assert_true(k > 4); /* the allocations: two lists, and graphs of F, I and W */
      break;
    }
    assert_int_equal(s, RFR_NO_MEMORY);
    run(g, &after);
    assert_memory_equal(&before, &after, sizeof before);
  }
  rfr_graphs_destroy(g);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_moved),          rft_context_test(test_stale),
                                     rft_context_test(test_refusals),       rft_context_test(test_fixed_moved),
                                     rft_context_test(test_fixed_refusals), rft_context_test(test_failures)};
  return cmocka_run_group_tests_name("rebinding graphs", tests, NULL, NULL);
}
