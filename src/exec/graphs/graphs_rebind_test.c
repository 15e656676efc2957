/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters and main gradients that move between steps: graphs that follow them give the bits of graphs whose memory
 * stays, touch nothing of the old place, refuse whoever still means it, and are as before after a failure.
 */
#include <string.h>

#include "exec/graphs/graphed.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C };

static const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
static const rft_scene scene = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};

typedef struct memory { /* of the caller's */
  _Alignas(16) float w[C * C], grad[C * C];
} memory;

/* Of a sharded callable tensors are parts, flat: over one rank all of it. */
static rfr_type type_of(bool sharded) {
  return sharded ? (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {C * C}} : square;
}

static rfr_graphs *make(memory *own, bool eager, bool sharded) {
  rfr_trace *t = rft_block_trace(&scene, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  const rfr_binding tensors = {"b0.w", type_of(sharded), own->w};
  const rfr_main_gradient gradient = {"b0.w", own->grad, 1};
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
  const rfr_main_gradient gradient = {"b0.w", to->grad, 0};
  return rfr_graphs_rebind(g, &tensors, 1, &gradient, 1);
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
    for (int step = 0; step < 2; step++) { /* the gradient accumulates on, as was declared */
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

/* Who means the place from before is refused, whichever way. */
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
  rft_refused(rfr_graphs_write(g, &w, values), "replay.signature", "ask for it anew");
  rft_refused(rfr_graphs_read(g, &grad, values), "replay.signature", "ask for it anew");
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
  w.data = to.w + C, w.bytes = 4 * C; /* a part */
  OK(rfr_graphs_write(g, &w, values));
  w.bytes = sizeof to.w;
  rft_refused(rfr_graphs_write(g, &w, values), "replay.signature", "ask for it anew");
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
               {{{"b0.bias", square, to.w}}, "program.state", "own memory", 1},
               {{{"b0.w", square, to.w + 1}}, "program.state", "multiple of 16", 1},
               {{{"b0.w", square, NULL}}, "program.state", "no data", 1},
               {{{"b0.w", other, to.w}}, "replay.signature", "dimension 1 was 32, now 7", 1},
               {{{"b0.w", square, to.w}, {"b0.w", square, to.w}}, "program.state", "given twice", 2},
               {{{0}}, "argument", "-1 tensors", -1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    rft_refused(rfr_graphs_rebind(g, cases[i].tensors, cases[i].n, NULL, 0), cases[i].slug, cases[i].text);
  const rfr_main_gradient ours = {"b0.bias", to.grad, 0}, none = {"b0.v", to.grad, 0};
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &ours, 1), "program.state", "own memory");
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &none, 1), "program.name", "\"b0.v\"");
  OK(rfr_graphs_rebind(g, NULL, 0, NULL, 0));
  const int64_t dense[2] = {C, 1}, turned[2] = {1, C};
  const rfr_main_gradient view = {"b0.w", to.grad, 0, 0, turned}, narrow = {"b0.w", to.grad, 0, RFR_BF16, NULL};
  const rfr_main_gradient unknown = {"b0.w", to.grad, 0, (rfr_dtype)99, NULL};
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &view, 1), "program.state", "strides [1,32], which cannot be seen as flat");
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &narrow, 1), "program.state", "captured as f32, and is now bf16");
  rft_refused(rfr_graphs_rebind(g, NULL, 0, &unknown, 1), "program.state", "captured as f32");
  const rfr_main_gradient good[2] = {{"b0.w", to.grad, 0, RFR_F32, dense}, {"b0.w", own.grad, 0, 0, NULL}};
  for (int i = 0; i < 2; i++) OK(rfr_graphs_rebind(g, NULL, 0, &good[i], 1));
  rfr_graphs_destroy(g);
}

/* Each allocation fails once: addresses and graphs are those of before, to the bit. */
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
      assert_true(k > 4); /* two lists, and graphs of F, I and W */
      break;
    }
    assert_int_equal(s, RFR_NO_MEMORY);
    run(g, &after);
    assert_memory_equal(&before, &after, sizeof before);
  }
  rfr_graphs_destroy(g);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_moved), rft_context_test(test_stale),
                                     rft_context_test(test_refusals), rft_context_test(test_failures)};
  return cmocka_run_group_tests_name("rebinding graphs", tests, NULL, NULL);
}
