/* SPDX-License-Identifier: Apache-2.0
 *
 * A result may be passed in place to later calls while it is valid, which is until another microbatch or another call
 * uses its memory. Results are bitwise equal to those with a copy; invalid tensors are refused. Gathered parameters are
 * valid within calls.
 */
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C, BYTES = RFT_T * RFT_C * 4 };

typedef struct step_results {
  unsigned char y[3][2][BYTES], dx[3][2][BYTES];
} step_results;

static const char of_slots[] = "0F0 0F1 0B0 0F2 0B1 0B2"; /* microbatches 0 and 2 share a slot */

/* Makes a call with the last call's result, in place or as a copy. Before a call of microbatch 2 it tries all earlier
 * results in the slot: all but those in `good` must be refused. */
static void give(rfr_graphs *g, bool back, int block, int m, const rfr_tensor *from, bool copied, rfr_tensor given[4],
                 unsigned char *result) {
  static unsigned char copy[BYTES];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {T, C}};
  rfr_tensor out;
  memcpy(copy, from->data, BYTES);
  const unsigned good = !back ? (unsigned)block : block ? 3 : 3 | 8; /* a bit mask: y of 0, y of 1, dx of 0, dx of 1 */
  for (int k = 0; k < 4 && m == 2 && !copied; k++)
    for (int inner = 0; inner < 2; inner++) {
      const rfr_binding in = {NULL, type, (unsigned char *)given[k].data + (inner ? 16 : 0)};
      if (!inner && (good >> k & 1)) continue;
      const rfr_status s =
          back ? rfr_graphs_backward(g, block, m, &in, 1, &out, 1) : rfr_graphs_forward(g, block, m, &in, 1, &out, 1);
      rft_refused(s, "argument",
                  back ? "\"y\" points to slot memory that is no longer valid"
                       : "\"x\" points to slot memory that is no longer valid");
    }
  const rfr_binding in = {NULL, type, copied ? copy : from->data};
  if (back) OK(rfr_graphs_backward(g, block, m, &in, 1, &out, 1));
  else OK(rfr_graphs_forward(g, block, m, &in, 1, &out, 1));
  given[2 * back + block] = out;
  memcpy(result, out.data, BYTES);
}

static void run_with_inputs(const rft_scene *s, bool copied, step_results *out) {
  static unsigned char x[3][BYTES];
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(s, &schedule);
  rfr_tensor given[2][4];
  rft_fill_named(g);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
  for (int i = 0; i < n; i++) {
    const int m = a[i].microbatch;
    rfr_tensor *own = given[rfr_schedule_slot(schedule, 0, m)], first = {.data = x[m]};
    rft_draw(s, x[m], 0, m, 1);
    for (int k = 0; k < 2; k++) { /* the loss is half of y's squares: dy is y */
      if (a[i].op == RFR_ACTION_F) give(g, false, k, m, k ? &own[0] : &first, copied, own, out->y[m][k]);
      else give(g, true, 1 - k, m, k ? &own[3] : &own[1], copied, own, out->dx[m][1 - k]);
    }
  }
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* Results of earlier calls of the same microbatch may be passed in place; slot memory of another microbatch is
 * refused. */
static void test_given_from_slot(void **state) {
  (void)state;
  static step_results plain, direct;
  for (int kind = 0; kind < 4; kind++) {
    const rft_scene s = {.block = kind & 1 ? rft_block_experts : rft_block_attention,
                         .blocks = 2,
                         .dtype = RFR_F32,
                         .eager = kind >> 1,
                         .debug = kind == 2,
                         .schedule = of_slots,
                         .layers = 2};
    run_with_inputs(&s, true, &plain);
    run_with_inputs(&s, false, &direct);
    assert_memory_equal(&plain, &direct, sizeof plain);
  }
}

/* A result in another stage's slot may be passed until that slot has its next microbatch; an output only until the last
 * gradient of its own microbatch. */
static void test_given_between(void **state) {
  (void)state;
  static rft_buffers b;
  static unsigned char copy[BYTES];
  const rft_scene s = {.block = rft_block_linear,
                       .blocks = 2,
                       .dtype = RFR_F32,
                       .schedule = "0F0 1F0 1B0 0F1 1F1 0B0 1B1 0B1",
                       .layers = 1};
  const rfr_type type = rft_activation(&s);
  const rfr_binding x = {NULL, type, b.x[0][0]};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  rfr_tensor y[2], z, d, dx;
  rft_fill_named(g);
  rft_draw(&s, b.x[0][0], 0, 0, 1);
  for (int step = 0; step < 2; step++) {
    OK(rfr_graphs_begin_step(g, NULL, 0));
    const rfr_binding before = {NULL, type, d.data}; /* of the last step */
    if (step > 0)
      rft_refused(rfr_graphs_forward(g, 0, 0, &before, 1, &y[0], 1), "argument", "\"x\" points to slot memory");
    OK(rfr_graphs_forward(g, 0, 0, &x, 1, &y[0], 1));
    OK(rfr_graphs_forward(g, 1, 0, &(rfr_binding){NULL, type, y[0].data}, 1, &z, 1));
    OK(rfr_graphs_backward(g, 1, 0, &x, 1, &d, 1));
    memcpy(copy, d.data, BYTES);
    OK(rfr_graphs_forward(g, 0, 1, &(rfr_binding){NULL, type, d.data}, 1, &y[1], 1)); /* still valid */
    OK(rfr_graphs_forward(g, 1, 1, &(rfr_binding){NULL, type, y[1].data}, 1, &z, 1));
    const rfr_binding late = {NULL, type, d.data}, copied = {NULL, type, copy}, over = {NULL, type, y[0].data};
    rft_refused(rfr_graphs_backward(g, 0, 0, &late, 1, &dx, 1), "argument",
                "callable \"0\", \"y\" points to slot memory");
    OK(rfr_graphs_backward(g, 0, 0, &copied, 1, &dx, 1));
    rft_refused(rfr_graphs_read(g, &y[0], copy), "argument", "\"y\" points to slot memory");
    OK(rfr_graphs_read(g, &dx, copy));
    rft_refused(rfr_graphs_backward(g, 1, 1, &over, 1, &d, 1), "argument",
                "callable \"1\", \"y\" points to slot memory");
    OK(rfr_graphs_backward(g, 1, 1, &(rfr_binding){NULL, type, z.data}, 1, &d, 1));
    OK(rfr_graphs_backward(g, 0, 1, &(rfr_binding){NULL, type, d.data}, 1, &dx, 1));
    OK(rfr_graphs_end_step(g));
    OK(rfr_graphs_read(g, &d, copy));
    rft_refused(rfr_graphs_read(g, &z, copy), "argument", "\"y\" points to slot memory");
  }
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_refused(rfr_graphs_read(g, &d, copy), "argument", "\"grad.x\" points to slot memory");
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* Without gradients an output is valid until its slot's next forward. */
static void test_given_in_inference(void **state) {
  (void)state;
  static float values[T * C];
  static const char text[] = "0F0 1F0 0F1 0F2 1F1 1F2";
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  const rfr_type type = rft_activation(&s);
  const rfr_binding x = {NULL, type, values};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c[2];
  rfr_schedule *schedule;
  rfr_graphs *g;
  rfr_tensor y[3], z;
  OK(rfr_schedule_parse(ctx, "test", text, sizeof text - 1, &schedule));
  assert_int_equal(rfr_schedule_slots(schedule, 0), 1);
  for (int i = 0; i < 2; i++) {
    c[i] = rfr_callable_default();
    c[i].trace = rft_block_trace(&s, i), c[i].inference = 1;
  }
  o.schedule = schedule;
  OK(rfr_graphs_create(ctx, c, 2, &o, &g));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, &x, 1, &y[0], 1));
  OK(rfr_graphs_forward(g, 1, 0, &(rfr_binding){NULL, type, y[0].data}, 1, &z, 1));
  rft_refused(rfr_graphs_forward(g, 0, 1, &(rfr_binding){NULL, type, y[0].data}, 1, &y[1], 1), "argument", "\"x\"");
  for (int m = 1; m < 3; m++) OK(rfr_graphs_forward(g, 0, m, &x, 1, &y[m], 1));
  assert_ptr_equal(y[1].data, y[2].data); /* the address is the same, but the value is that of microbatch 2 */
  OK(rfr_graphs_forward(g, 1, 1, &x, 1, &z, 1));
  OK(rfr_graphs_forward(g, 1, 2, &(rfr_binding){NULL, type, y[2].data}, 1, &z, 1));
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  for (int i = 0; i < 2; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
}

/* The same holds for a set that trains, if nothing in the stage has a gradient. */
static void test_given_by_frozen(void **state) {
  (void)state;
  static float values[T * C], copy[T * C];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {T, C}};
  const rfr_binding x = {NULL, type, values};
  rfr_callable c = rfr_callable_default();
  rfr_graphs *g;
  rfr_trace *t;
  rfr_tensor y;
  OK(rfr_trace_create(ctx, &t));
  rfr_output(t, "y", rfr_silu(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, type.shape)));
  OK(rfr_trace_finish(t));
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1));
  OK(rfr_graphs_read(g, &y, copy));
  rft_refused(rfr_graphs_forward(g, 0, 1, &(rfr_binding){NULL, type, y.data}, 1, &y, 1), "argument", "\"x\"");
  OK(rfr_graphs_end_step(g));
  OK(rfr_graphs_read(g, &y, copy));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

/* A linked output is valid until its reader has run: until then it may be read and passed to calls. */
static void test_linked_from_slot(void **state) {
  (void)state;
  static float values[T * C], copy[T * C], out[2][T * C];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {T, C}};
  const rfr_callable_link link = {"p", 0, "y"};
  const rfr_binding x = {NULL, type, values};
  rfr_callable c[3];
  rfr_graphs *g;
  rfr_tensor y, z, u, dx[2];
  for (int i = 0; i < 3; i++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value p = rfr_input(t, i == 2 ? "p" : "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, type.shape);
    if (i == 2) p = rfr_mul(t, p, rfr_input(t, "q", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, type.shape));
    rfr_output(t, "y", rfr_silu(t, p));
    OK(rfr_trace_finish(t));
    c[i] = rfr_callable_default(), c[i].trace = t;
  }
  c[2].links = &link, c[2].n_links = 1;
  OK(rfr_graphs_create(ctx, c, 3, NULL, &g));
  rft_fill_by(&(rfr_tensor){.type = type, .data = values}, 3, 1);
  for (int copied = 0; copied < 2; copied++) {
    OK(rfr_graphs_begin_step(g, NULL, 0));
    OK(rfr_graphs_forward(g, 0, 0, &x, 1, &y, 1));
    OK(rfr_graphs_read(g, &y, copy));
    const rfr_binding linked = {NULL, type, copied ? (void *)copy : y.data}, there = {NULL, type, y.data};
    OK(rfr_graphs_forward(g, 1, 0, &linked, 1, &z, 1));
    OK(rfr_graphs_forward(g, 2, 0, &linked, 1, &u, 1));
    memcpy(out[copied], u.data, BYTES);
    rft_refused(rfr_graphs_read(g, &y, copy), "argument", "\"y\" points to slot memory that is no longer valid");
    rft_refused(rfr_graphs_backward(g, 2, 0, &there, 1, dx, 1), "argument",
                "callable \"2\", \"y\" points to slot memory");
    OK(rfr_graphs_abort_step(g));
  }
  assert_memory_equal(out[0], out[1], BYTES);
  rfr_graphs_destroy(g);
  for (int i = 0; i < 3; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
}

/* ---- casts of parameters, gathered around the calls ---- */

/* y = x bf16(w)'. If w is always in memory, its cast is computed once per step. */
static rfr_trace *cast_trace(const char *name, bool frozen) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_BF16, 2, ((int64_t[]){T, C}));
  rfr_value w = rfr_input(t, name, frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){C, C}));
  rfr_output(t, "y", rfr_gelu(t, rfr_linear(t, x, rfr_cast(t, w, RFR_BF16), RFR_NONE), 1));
  OK(rfr_trace_finish(t));
  return t;
}

typedef struct buffer { /* of both layers, whose weights are in `weight` */
  _Alignas(16) float shared[C * C];
  float weight[2][C * C];
} buffer;

static void gather_layer(buffer *b, int layer) { memcpy(b->shared, b->weight[layer], sizeof b->shared); }
static void drop_layer(buffer *b) { memset(b->shared, 0xff, sizeof b->shared); }
static rfr_status gather_hook(const rfr_hook_event *e, void *user) {
  gather_layer(user, e->callable);
  return RFR_OK;
}
static rfr_status drop_hook(const rfr_hook_event *e, void *user) {
  (void)e;
  drop_layer(user);
  return RFR_OK;
}

typedef struct cast_results {
  uint16_t y[2][2][2][T * C], dx[2][2][2][T * C]; /* step, microbatch, layer */
  float dw[2][2][C * C];
} cast_results;

/* How parameters are gathered: 'h' they stay in memory, 'g' rfr_callable.gathered, 'w' by warm-up hooks. */
static void run_cast(char how, const char *text, bool frozen, cast_results *r) {
  static const rfr_type square = {RFR_F32, 2, {C, C}}, half = {RFR_BF16, 2, {T, C}};
  static const char *const names[2] = {"w0", "w1"};
  buffer b;
  rfr_graphs *g;
  rfr_schedule *schedule;
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_hooks hooks[2] = {rfr_hooks_default(), rfr_hooks_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  const rfr_hook gather = {gather_hook, &b}, drop = {drop_hook, &b};
  const rfr_binding tensors[2] = {{names[0], square, b.shared}, {names[1], square, b.shared}};
  memset(r, 0, sizeof *r);
  drop_layer(&b);
  for (int i = 0; i < 2; i++) {
    rft_fill_by(&(rfr_tensor){.type = square, .data = b.weight[i]}, (uint64_t)(60 + i), 0.3f);
    c[i].trace = cast_trace(names[i], frozen);
    c[i].gathered = how == 'g';
    hooks[i].pre_forward = hooks[i].pre_backward = (rfr_hook_list){&gather, 1};
    hooks[i].post_forward = hooks[i].post_backward = (rfr_hook_list){&drop, 1};
  }
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule));
  OK(rfr_schedule_set_layers(schedule, &(int){2}, 1));
  o.schedule = schedule;
  o.recompute = RFR_RECOMPUTE_ALL;
  if (how != 'h') o.tensors = tensors, o.n_tensors = 2;
  if (how == 'w') o.hooks = hooks, o.n_hooks = 2, o.warmup_iterations = 1;
  OK(rfr_graphs_create(ctx, c, 2, &o, &g));
  for (int i = 0; i < 2; i++) {
    rfr_tensor w;
    OK(rfr_graphs_tensor(g, names[i], &w));
    if (how == 'h') OK(rfr_graphs_write(g, &w, b.weight[i]));
    int ahead = 0;
    for (int k = 0; k < rfr_graphs_trace(g, i)->n_ops; k++)
      ahead += rfr_graphs_trace(g, i)->ops[k].phase < RFR_PHASE_FORWARD;
    assert_int_equal(ahead > 0, how == 'h');
  }
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
  for (int step = 0; step < 2; step++) {
    OK(rfr_graphs_begin_step(g, NULL, 0));
    for (int i = 0; i < 2 * n; i++) {
      const int op = a[i / 2].op, m = a[i / 2].microbatch, layer = op == RFR_ACTION_F ? i % 2 : 1 - i % 2;
      uint16_t in[T * C];
      rfr_tensor out;
      const rfr_binding given = {NULL, half, in};
      for (int k = 0; k < T * C; k++) in[k] = (uint16_t)(0x3f00 + (step * 31 + m * 7 + op + k * 5) % 200);
      if (op == RFR_ACTION_W && frozen) continue;
      if (op != RFR_ACTION_W) gather_layer(&b, layer);
      if (op == RFR_ACTION_F) OK(rfr_graphs_forward(g, layer, m, &given, 1, &out, 1));
      else if (op == RFR_ACTION_W) OK(rfr_graphs_wgrad(g, layer, m));
      else OK(rfr_graphs_backward(g, layer, m, &given, 1, &out, 1));
      if (op != RFR_ACTION_W) OK(rfr_graphs_read(g, &out, (op == RFR_ACTION_F ? r->y : r->dx)[step][m][layer]));
      drop_layer(&b);
    }
    OK(rfr_graphs_end_step(g));
    for (int i = 0; i < 2 && !frozen; i++) {
      rfr_tensor dw;
      OK(rfr_graphs_gradient(g, names[i], &dw));
      OK(rfr_graphs_read(g, &dw, r->dw[step][i]));
    }
  }
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  for (int i = 0; i < 2; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
}

/* Gathered parameters are valid only within calls, so each call computes their casts. Results are bitwise equal. */
static void test_made_of_gathered(void **state) {
  static const char *const schedules[] = {"0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"};
  static cast_results held, got;
  (void)state;
  for (int i = 0; i < 2; i++)
    for (int frozen = 0; frozen < 2; frozen++) {
      run_cast('h', schedules[i], frozen, &held);
      for (const char *how = "gw"; *how; how++) {
        run_cast(*how, schedules[i], frozen, &got);
        assert_memory_equal(&held, &got, sizeof got);
      }
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_given_from_slot),    rft_context_test(test_given_between),
      rft_context_test(test_given_in_inference), rft_context_test(test_given_by_frozen),
      rft_context_test(test_linked_from_slot),   rft_context_test(test_made_of_gathered)};
  return cmocka_run_group_tests_name("slots' memory given to graphs", tests, NULL, NULL);
}
