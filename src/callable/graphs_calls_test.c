/* SPDX-License-Identifier: Apache-2.0
 *
 * Arguments and results of a step's calls: fixed memory, absent inputs, main gradients completed by each call, and
 * other schedules for the same graphs. The reference is a set of graphs that copies its inputs (graphs_test compares it
 * with one program). All results are equal bit by bit.
 */
#include <stdio.h>
#include <string.h>

#include "callable/graphed.h"
#include "core/rng.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C, BYTES = RFT_T * RFT_C * 4, SLOTS = 4, MOST_NAMES = 64 };

static rfr_schedule *schedule_of(const rft_scene *s) {
  rfr_schedule *schedule;
  OK(rfr_schedule_parse(ctx, "test", s->schedule, strlen(s->schedule), &schedule));
  OK(rfr_schedule_set_layers(schedule, &s->layers, 1));
  return schedule;
}

static void draw_all(const rft_scene *s, rft_buffers *b) {
  for (int m = 0; m < s->microbatches; m++) {
    rft_draw(s, b->x[m][0], 3, m, 1);
    rft_draw(s, b->dx[m][s->blocks], 3, m, 2);
  }
}

/* ---- a step, call by call ---- */

typedef struct calls {
  void (*call)(void *user, rfr_action_op op, int block, int m);
  void *user;
} calls;

/* F, I or B, W of every callable, in the order of the schedule. */
static void walk(const rft_scene *s, rfr_graphs *g, const rfr_schedule *schedule, calls c) {
  int n;
  const rfr_action *a = rfr_schedule_actions(schedule, 0, &n);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < s->layers; k++) {
      const int block = a[i].stage * s->layers + (a[i].op == RFR_ACTION_F ? k : s->layers - 1 - k);
      if (a[i].op == RFR_ACTION_W && rfr_graphs_ops(g, block, RFR_ACTION_W) == 0) continue;
      c.call(c.user, (rfr_action_op)a[i].op, block, a[i].microbatch);
    }
}

typedef struct plain { /* all inputs are copied */
  const rft_scene *s;
  rfr_graphs *g;
  rft_buffers *b;
} plain;

static void plain_call(void *user, rfr_action_op op, int block, int m) {
  const plain *p = user;
  if (op == RFR_ACTION_F) rft_forward(p->g, p->s, p->b, block, m);
  else if (op == RFR_ACTION_W) OK(rfr_graphs_wgrad(p->g, block, m));
  else rft_backward(p->g, p->s, p->b, block, m);
}

static void plain_step(const rft_scene *s, rfr_graphs *g, const rfr_schedule *schedule, rft_buffers *b) {
  OK(rfr_graphs_begin_step(g, NULL, 0));
  walk(s, g, schedule, (calls){plain_call, &(plain){s, g, b}});
  OK(rfr_graphs_end_step(g));
}

static void same_gradients(rfr_graphs *a, rfr_graphs *b) {
  for (int i = 0; i < a->m.store.n; i++) {
    const rfr_tensor *x = &a->m.store.named[i].tensor, *y = &b->m.store.named[i].tensor;
    if (a->m.store.named[i].parameter < 0) continue;
    if (memcmp(x->data, y->data, (size_t)x->bytes) != 0) fail_msg("%s differs", x->name);
  }
}

/* ---- the next call ---- */

static void expected_call(void *user, rfr_action_op op, int block, int m) {
  const plain *p = user;
  const int stage = block / p->s->layers;
  rfr_action a;
  int callable;
  OK(rfr_graphs_expected(p->g, &a, &callable));
  if (a.op != (int32_t)op || a.stage != stage || a.microbatch != m || callable != block)
    fail_msg("op %d of callable %d, stage %d, microbatch %d is expected", a.op, callable, a.stage, a.microbatch);
  plain_call(user, op, block, m);
}

static void nothing_expected(rfr_graphs *g, rfr_status want, const char *text) {
  rfr_action a = {0};
  int callable = 0;
  const rfr_status s = rfr_graphs_expected(g, &a, &callable);
  if (want == RFR_OK) OK(s);
  else rft_refused(s, "graphs.order", text);
  assert_true(a.op == -1 && a.stage == -1 && a.microbatch == -1 && callable == -1);
}

static void test_expected(void **state) {
  (void)state;
  static rft_buffers b;
  static const struct {
    const char *text;
    int layers;
    unsigned frozen;
  } cases[] = {{"0F0 0F1 0B0 0F2 0B1 0B2", 2, 0},
               {"0F0 0F1 1F0 1F1 1I0 1I1 0I0 1W0 0F2 0I1 0W0 1W1 0W1 1F2 1B2 0B2", 1, 0},
               {"0F0 0I0 0W0 0F1 0I1 0W1", 2, 1}}; /* the first block has no W */
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const rft_scene s = {.block = rft_block_linear,
                         .blocks = 2,
                         .dtype = RFR_F32,
                         .frozen = cases[i].frozen,
                         .schedule = cases[i].text,
                         .layers = cases[i].layers};
    rfr_schedule *schedule;
    rfr_graphs *g = rft_make_graphs(&s, &schedule);
    for (int step = 0; step < 2; step++) {
      nothing_expected(g, RFR_MISMATCH, "no step has begun");
      OK(rfr_graphs_begin_step(g, NULL, 0));
      walk(&s, g, schedule, (calls){expected_call, &(plain){&s, g, &b}});
      nothing_expected(g, RFR_OK, NULL);
      OK(rfr_graphs_end_step(g));
    }
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
  const rft_scene endless = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32, .layers = 2};
  rfr_schedule *none;
  rfr_graphs *g = rft_make_graphs(&endless, &none);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 3; m++)
    for (int k = 0; k < 4; k++)
      expected_call(&(plain){&endless, g, &b}, k < 2 ? RFR_ACTION_F : RFR_ACTION_B, k < 2 ? k : 3 - k, m);
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
}

/* ---- fixed memory ---- */

enum { IN, OUT, DOUT, DIN, KINDS };

typedef struct memory { /* the caller's memory: per block, kind and slot */
  _Alignas(16) unsigned char at[RFT_BLOCKS][KINDS][SLOTS][BYTES];
  void *address[RFT_BLOCKS][KINDS][SLOTS];
} memory;

typedef struct fixed {
  const rft_scene *s;
  rfr_graphs *g;
  const rfr_schedule *schedule;
  rft_buffers *b;
  memory *memory;
} fixed;

/* Each block's result is fixed memory that the next block reads in place; both have the same address per slot. */
static void lay_out(memory *own, bool handed) {
  memset(own, 0x5a, sizeof *own);
  for (int i = 0; i < RFT_BLOCKS; i++)
    for (int k = 0; k < KINDS; k++)
      for (int slot = 0; slot < SLOTS; slot++)
        own->address[i][k][slot] = handed && i > 0 && k == IN    ? own->at[i - 1][OUT][slot]
                                   : handed && i > 0 && k == DIN ? own->at[i - 1][DOUT][slot]
                                                                 : own->at[i][k][slot];
}

static rfr_status make_fixed(const rft_scene *s, const rfr_schedule *schedule, memory *own, rfr_graphs **g) {
  static const char *const port[KINDS] = {"x", "y", "y", "x"};
  rfr_callable c[RFT_BLOCKS];
  rfr_callable_fixed f[RFT_BLOCKS][KINDS];
  rfr_trace *t[RFT_BLOCKS];
  rfr_graphs_options o = rfr_graphs_options_default();
  for (int i = 0; i < s->blocks; i++) {
    const int slots = rfr_schedule_slots(schedule, i / s->layers);
    t[i] = rft_block_trace(s, i);
    c[i] = rfr_callable_default();
    c[i].trace = t[i];
    c[i].fixed = f[i], c[i].n_fixed = KINDS;
    for (int k = 0; k < KINDS; k++)
      f[i][k] = (rfr_callable_fixed){port[k], k == DOUT || k == DIN, own->address[i][k], slots};
  }
  o.schedule = schedule;
  o.warmup_iterations = 2;
  o.eager = s->eager;
  o.fuse = s->fuse;
  o.recompute = s->recompute;
  const rfr_status status = rfr_graphs_create(ctx, c, s->blocks, &o, g);
  for (int i = 0; i < s->blocks; i++) rfr_trace_destroy(t[i]);
  for (size_t k = 0; k < sizeof own->at; k++) assert_int_equal(((const unsigned char *)own->at)[k], 0x5a);
  return status;
}

/* The address to which another block has written the tensor that this call reads; NULL: the tensor comes from the
 * caller. */
static const void *made_at(const fixed *f, bool back, int block, int m) {
  const int from = back ? block + 1 : block - 1;
  if (from < 0 || from >= f->s->blocks) return NULL;
  return f->memory->address[from][back ? DIN : OUT][rfr_schedule_slot(f->schedule, from / f->s->layers, m)];
}

static void fixed_call(void *user, rfr_action_op op, int block, int m) {
  const fixed *f = user;
  const rfr_type type = rft_activation(f->s);
  const int slot = rfr_schedule_slot(f->schedule, block / f->s->layers, m);
  void *(*own)[SLOTS] = f->memory->address[block];
  rfr_tensor out;
  if (op == RFR_ACTION_W) {
    OK(rfr_graphs_wgrad(f->g, block, m));
    return;
  }
  const bool back = op != RFR_ACTION_F;
  rfr_binding in = {NULL, type, (char *)own[back ? DOUT : IN][slot] + 16};
  if (back) rft_refused(rfr_graphs_backward(f->g, block, m, &in, 1, &out, 1), "replay.signature", "\"y\": captured at");
  else rft_refused(rfr_graphs_forward(f->g, block, m, &in, 1, &out, 1), "replay.signature", "\"x\": captured at");
  in.data = own[back ? DOUT : IN][slot];
  if (in.data != made_at(f, back, block, m))
    memcpy(own[back ? DOUT : IN][slot], back ? f->b->dx[m][block + 1] : f->b->x[m][block], BYTES);
  if (back) OK(rfr_graphs_backward(f->g, block, m, &in, 1, &out, 1));
  else OK(rfr_graphs_forward(f->g, block, m, &in, 1, &out, 1));
  assert_ptr_equal(out.data, own[back ? DIN : OUT][slot]);
  memcpy(back ? f->b->dx[m][block] : f->b->x[m][block + 1], out.data, BYTES);
}

static void test_fixed(void **state) {
  (void)state;
  static rft_buffers ours, theirs;
  static memory own;
  static const char one[] = "0F0 0F1 0B0 0F2 0B1 0B2";
  static const char delayed[] = "0F0 0F1 1F0 1F1 1I0 1I1 0I0 1W0 0F2 0I1 0W0 1W1 0W1 1F2 1B2 0B2";
  /* both stages use the same slots */
  static const char in_step[] = "0F0 0F1 1F0 1F1 1I0 1I1 0I0 0W0 1W0 0I1 0F2 1F2 1W1 0W1 1B2 0B2";
  for (int k = 0; k < 8; k++) {
    const int i = k / 2;
    const rft_scene s = {.block = i < 2 ? rft_block_attention : rft_block_experts,
                         .blocks = 2,
                         .microbatches = 3,
                         .dtype = RFR_F32,
                         .fuse = i & 1,
                         .eager = i == 3,
                         .recompute = i == 1 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP,
                         .schedule = !(i & 1) ? one
                                     : k % 2  ? in_step
                                              : delayed,
                         .layers = i & 1 ? 1 : 2};
    rfr_schedule *schedule, *of_plain;
    memset(&ours, 0, sizeof ours);
    draw_all(&s, &ours);
    theirs = ours;
    schedule = schedule_of(&s);
    lay_out(&own, k % 2);
    rfr_graphs *a = rft_make_graphs(&s, &of_plain), *b;
    OK(make_fixed(&s, schedule, &own, &b));
    rft_fill_named(a);
    rft_fill_named(b);
    plain_step(&s, a, schedule, &theirs);
    OK(rfr_graphs_begin_step(b, NULL, 0));
    walk(&s, b, schedule, (calls){fixed_call, &(fixed){&s, b, schedule, &ours, &own}});
    OK(rfr_graphs_end_step(b));
    assert_memory_equal(&ours, &theirs, sizeof ours);
    same_gradients(a, b);
    assert_true(b->memory.slot_bytes < a->memory.slot_bytes);
    rfr_graphs_destroy(a);
    rfr_graphs_destroy(b);
    rfr_schedule_destroy(schedule);
    rfr_schedule_destroy(of_plain);
  }
}

/* Two stages share fixed memory, with the same or permuted slots: either it is refused, or the results are bitwise
 * equal to those with copies. */
static void test_shared_fixed_memory(void **state) {
  (void)state;
  static rft_buffers first, ours, theirs;
  static memory own;
  static const char *const texts[] = {"0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2",
                                      "0F0 0F1 1F0 1B0 1F1 0B0 1B1 0F2 0B1 1F2 1B2 0B2",
                                      "0F0 1F0 0F1 1F1 1I0 0I0 0W0 0F2 1I1 1W0 0I1 1F2 1I2 0I2 0W1 1W1 0W2 1W2",
                                      "0F0 0F1 1F1 1F0 1I0 1W0 0I0 0W0 1I1 0I1 0F2 1F2 0W1 1W1 1I2 0I2 1W2 0W2"};
  int taken = 0, refused = 0;
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    const rft_scene s = {
        .block = rft_block_mlp, .blocks = 2, .microbatches = 3, .dtype = RFR_F32, .schedule = texts[i], .layers = 1};
    rfr_schedule *schedule = schedule_of(&s), *of_plain;
    const int slots[2] = {rfr_schedule_slots(schedule, 0), rfr_schedule_slots(schedule, 1)};
    rfr_graphs *a = rft_make_graphs(&s, &of_plain), *b;
    rft_fill_named(a);
    memset(&first, 0, sizeof first);
    draw_all(&s, &first);
    theirs = first;
    plain_step(&s, a, schedule, &theirs);
    assert_true(slots[0] <= 2 && slots[1] <= 2);
    for (int map = 1; map < 81; map++) { /* assigns memory to each slot of x and dx of the later stage */
      const int of[4] = {map % 3, map / 3 % 3, map / 9 % 3, map / 27};
      bool fits = true;
      lay_out(&own, false);
      for (int k = 0; k < 4; k++) {
        const int slot = k % 2, back = k / 2;
        fits = fits && (of[k] == 0 || (slot < slots[1] && of[k] <= slots[0]));
        if (of[k] > 0) own.address[1][back ? DIN : IN][slot] = own.at[0][back ? DOUT : OUT][of[k] - 1];
      }
      if (!fits) continue;
      if (make_fixed(&s, schedule, &own, &b) != RFR_OK) {
        assert_string_equal(rfr_last_error()->slug, "graphs.callable");
        refused++;
        continue;
      }
      rft_fill_named(b);
      ours = first;
      OK(rfr_graphs_begin_step(b, NULL, 0));
      walk(&s, b, schedule, (calls){fixed_call, &(fixed){&s, b, schedule, &ours, &own}});
      OK(rfr_graphs_end_step(b));
      if (memcmp(&ours, &theirs, sizeof ours) != 0) fail_msg("schedule %d, map %d", (int)i, map);
      same_gradients(a, b);
      rfr_graphs_destroy(b);
      taken++;
    }
    rfr_graphs_destroy(a);
    rfr_schedule_destroy(schedule);
    rfr_schedule_destroy(of_plain);
  }
  print_message("%d taken, %d refused\n", taken, refused);
  assert_true(taken > 10 && refused > 10);
}

static rfr_status try_fixed(rfr_callable_fixed f, const rfr_callable_link *link) {
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  rfr_callable c[2];
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  rfr_graphs *g;
  for (int i = 0; i < 2; i++) c[i] = rfr_callable_default(), c[i].trace = t[i];
  c[1].fixed = &f, c[1].n_fixed = 1;
  c[1].links = link, c[1].n_links = link ? 1 : 0;
  const rfr_status status = rfr_graphs_create(ctx, c, 2, NULL, &g);
  rfr_graphs_destroy(g);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  return status;
}

static void test_fixed_refusals(void **state) {
  (void)state;
  static _Alignas(16) float memory[T * C + 4];
  void *const good[2] = {memory, memory}, *const misaligned[1] = {memory + 1}, *const none[1] = {NULL};
  const rfr_callable_link link = {"x", 0, "y"};
  const char *const slug = "graphs.callable";
  OK(try_fixed((rfr_callable_fixed){"x", 0, good, 1}, NULL));
  OK(try_fixed((rfr_callable_fixed){"y", 0, good, 1}, &link));
  rft_refused(try_fixed((rfr_callable_fixed){"x", 0, good, 1}, &link), slug, "it is linked");
  rft_refused(try_fixed((rfr_callable_fixed){"x", 0, good, 2}, NULL), slug, "2 addresses for 1 slots");
  rft_refused(try_fixed((rfr_callable_fixed){"x", 0, NULL, 1}, NULL), slug, "0 addresses");
  rft_refused(try_fixed((rfr_callable_fixed){"x", 0, misaligned, 1}, NULL), slug, "multiple of 16");
  rft_refused(try_fixed((rfr_callable_fixed){"x", 0, none, 1}, NULL), slug, "data is NULL");
  rft_refused(try_fixed((rfr_callable_fixed){"z", 1, good, 1}, NULL), slug, "the gradient of \"z\": there is no such");
  rft_refused(try_fixed((rfr_callable_fixed){NULL, 0, good, 1}, NULL), slug, "there is no such");
}

/* An output that is an input, or a part of another value, has no memory that could be fixed; an input without a
 * gradient has no gradient memory. */
static void test_views_are_not_fixed(void **state) {
  (void)state;
  static _Alignas(16) float memory[T * C];
  void *const address[1] = {memory};
  static const struct {
    const char *port, *text;
    int gradient;
  } cases[] = {{"same", "aliases an input or another value", 0},
               {"part", "aliases an input or another value", 0},
               {"idle", "it has no gradient", 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfr_trace *t;
    rfr_graphs *g;
    rfr_callable c = rfr_callable_default();
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){T, C}));
    rfr_value idle = rfr_input(t, "idle", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    rfr_value y = rfr_add(t, rfr_silu(t, x), idle);
    rfr_output(t, "same", x);
    rfr_output(t, "y", y);
    rfr_output(t, "part", rfr_slice(t, y, 0, 2, 5));
    OK(rfr_trace_finish(t));
    const rfr_callable_fixed f = {cases[i].port, cases[i].gradient, address, 1};
    c.trace = t, c.fixed = &f, c.n_fixed = 1;
    rft_refused(rfr_graphs_create(ctx, &c, 1, NULL, &g), "graphs.callable", cases[i].text);
    rfr_trace_destroy(t);
  }
}

/* ---- the order of arguments ---- */

typedef struct given {
  float y[2][T * C], dx[2][T * C];
} given;

/* Forward and backward of silu(a) + b and silu(b): arguments by name, in port order or in another order. */
static void run_named(bool eager, bool turned, given *out) {
  static float x[2][T * C], dy[2][T * C];
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {T, C}};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_callable c = rfr_callable_default();
  rfr_trace *t;
  rfr_graphs *g;
  rfr_tensor y[2], dx[2];
  OK(rfr_trace_create(ctx, &t));
  rfr_value a = rfr_input(t, "a", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, type.shape);
  rfr_value b = rfr_input(t, "b", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, type.shape);
  rfr_output(t, "sum", rfr_add(t, rfr_silu(t, a), b));
  rfr_output(t, "other", rfr_silu(t, b));
  OK(rfr_trace_finish(t));
  c.trace = t, o.eager = eager;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  for (int i = 0; i < 2; i++) {
    rft_fill_by(&(rfr_tensor){.type = type, .data = x[i]}, 1 + (uint64_t)i, 1);
    rft_fill_by(&(rfr_tensor){.type = type, .data = dy[i]}, 3 + (uint64_t)i, 1);
  }
  rfr_binding in[2], grads[2];
  in[turned] = (rfr_binding){"a", type, x[0]}, in[!turned] = (rfr_binding){"b", type, x[1]};
  grads[turned] = (rfr_binding){"sum", type, dy[0]}, grads[!turned] = (rfr_binding){"other", type, dy[1]};
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_forward(g, 0, 0, in, 2, y, 2));
  for (int i = 0; i < 2; i++) memcpy(out->y[i], y[i].data, sizeof out->y[i]);
  OK(rfr_graphs_backward(g, 0, 0, grads, 2, dx, 2));
  for (int i = 0; i < 2; i++) memcpy(out->dx[i], dx[i].data, sizeof out->dx[i]);
  OK(rfr_graphs_end_step(g));
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

static void test_order_of_names(void **state) {
  (void)state;
  static given plain, now;
  run_named(true, false, &plain);
  for (int turned = 0; turned < 2; turned++) {
    run_named(false, turned, &now);
    assert_memory_equal(&now, &plain, sizeof now);
  }
}

/* ---- absent inputs ---- */

static void test_absent_inputs(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  static const char *const inputs[] = {NULL, "x", NULL}, *const outputs[] = {NULL, "y"}, *const lacking[] = {NULL},
                           *const unknown[] = {"x", "b0.w"}, *const twice[] = {"x", "x"};
  static float x[T * C], dy[T * C];
  const rfr_type type = rft_activation(&s);
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs *g, *all;
  rfr_tensor y[2], dx[3], whole, dwhole;
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &all));
  c.inputs = lacking, c.n_inputs = 1;
  rft_refused(rfr_graphs_create(ctx, &c, 1, NULL, &g), "graphs.callable",
              "rfr_callable.inputs does not list input \"x\"");
  c.inputs = unknown, c.n_inputs = 2;
  rft_refused(rfr_graphs_create(ctx, &c, 1, NULL, &g), "graphs.callable", "no input \"b0.w\"");
  c.inputs = twice;
  rft_refused(rfr_graphs_create(ctx, &c, 1, NULL, &g), "graphs.callable", "rfr_callable.inputs repeats input \"x\"");
  c.inputs = inputs, c.n_inputs = 3;
  c.outputs = outputs, c.n_outputs = 2;
  OK(rfr_graphs_create(ctx, &c, 1, NULL, &g));
  rft_fill_named(g);
  rft_fill_named(all);
  rft_fill_by(&(rfr_tensor){.type = type, .data = x}, 1, 1);
  rft_fill_by(&(rfr_tensor){.type = type, .data = dy}, 2, 1);
  rfr_binding in[3] = {{0}, {NULL, type, x}, {0}}, grad = {NULL, type, dy};
  OK(rfr_graphs_begin_step(g, NULL, 0));
  OK(rfr_graphs_begin_step(all, NULL, 0));
  in[2].data = x;
  rft_refused(rfr_graphs_forward(g, 0, 0, in, 3, y, 2), "replay.signature", "captured as absent");
  in[2].data = NULL;
  OK(rfr_graphs_forward(g, 0, 0, in, 3, y, 2));
  OK(rfr_graphs_forward(all, 0, 0, &in[1], 1, &whole, 1));
  OK(rfr_graphs_backward(g, 0, 0, &grad, 1, dx, 3));
  OK(rfr_graphs_backward(all, 0, 0, &grad, 1, &dwhole, 1));
  assert_true(!y[0].data && !dx[0].data && !dx[2].data);
  assert_memory_equal(y[1].data, whole.data, sizeof x);
  assert_memory_equal(dx[1].data, dwhole.data, sizeof x);
  rfr_graphs_destroy(g);
  rfr_graphs_destroy(all);
  rfr_trace_destroy(t);
}

/* ---- completed main gradients ---- */

typedef struct watched { /* a step that checks main gradients after each call */
  plain p;
  rfr_tensor ready[MOST_NAMES]; /* copies from the time when they were reported complete */
  int n, at[MOST_NAMES], call;
  unsigned char *before[MOST_NAMES], *final[MOST_NAMES];
} watched;

static void take_ready(watched *w) {
  int n;
  OK(rfr_graphs_grads_ready(w->p.g, NULL, 0, &n));
  assert_true(w->n + n <= MOST_NAMES);
  if (n > 0)
    rft_refused(rfr_graphs_grads_ready(w->p.g, w->ready, n - 1, &n), "argument", "main gradients are complete");
  OK(rfr_graphs_grads_ready(w->p.g, w->ready + w->n, n, &n));
  for (int i = w->n; i < w->n + n; i++) {
    w->at[i] = w->call;
    w->final[i] = test_malloc((size_t)w->ready[i].bytes);
    memcpy(w->final[i], w->ready[i].data, (size_t)w->ready[i].bytes);
    for (int k = 0; k < i; k++) assert_string_not_equal(w->ready[k].name, w->ready[i].name);
  }
  w->n += n;
}

static void watched_call(void *user, rfr_action_op op, int block, int m) {
  watched *w = user;
  rfr_graphs *g = w->p.g;
  for (int i = 0; i < g->m.store.n; i++)
    if (w->before[i]) memcpy(w->before[i], g->m.store.named[i].tensor.data, (size_t)g->m.store.named[i].tensor.bytes);
  plain_call(&w->p, op, block, m);
  w->call++;
  const int had = w->n;
  take_ready(w);
  /* not reported too late: this call has accumulated into each of them */
  for (int k = had; k < w->n; k++)
    for (int i = 0; i < g->m.store.n; i++)
      if (w->before[i] && g->m.store.named[i].tensor.data == w->ready[k].data)
        assert_memory_not_equal(w->before[i], w->final[k], (size_t)w->ready[k].bytes);
}

static void test_grads_ready(void **state) {
  (void)state;
  static rft_buffers b;
  static const struct {
    const char *text;
    int microbatches, layers;
  } schedules[] = {{"0F0 0B0", 1, 2},
                   {"0F0 0F1 0F2 0I0 0I2 0W2 0I1 0W0 0W1", 3, 2},
                   {"0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", 2, 1},
                   {"0F0 1F0 0F1 1F1 1I0 0I0 0W0 1I1 0I1 0W1 1W1 1W0", 2, 1}};
  for (size_t i = 0; i < sizeof schedules / sizeof *schedules; i++) {
    const rft_scene s = {.block = rft_block_linear,
                         .blocks = 2,
                         .microbatches = schedules[i].microbatches,
                         .dtype = RFR_F32,
                         .schedule = schedules[i].text,
                         .layers = schedules[i].layers};
    rfr_schedule *schedule;
    watched w = {.p = {&s, rft_make_graphs(&s, &schedule), &b}};
    rfr_graphs *g = w.p.g;
    int n, trained = 0;
    rft_fill_named(g);
    draw_all(&s, &b);
    for (int k = 0; k < g->m.store.n; k++)
      if (g->m.store.named[k].parameter >= 0)
        w.before[k] = test_malloc((size_t)g->m.store.named[k].tensor.bytes), trained++;
    OK(rfr_graphs_grads_ready(g, NULL, 0, &n));
    assert_int_equal(n, 0);
    OK(rfr_graphs_begin_step(g, NULL, 0));
    take_ready(&w);
    assert_int_equal(w.n, 0);
    walk(&s, g, schedule, (calls){watched_call, &w});
    OK(rfr_graphs_end_step(g));
    assert_int_equal(w.n, trained);
    for (int k = 0; k < w.n; k++) { /* not reported too early: later calls have changed nothing */
      assert_memory_equal(w.final[k], w.ready[k].data, (size_t)w.ready[k].bytes);
      test_free(w.final[k]);
    }
    OK(rfr_graphs_grads_ready(g, NULL, 0, &n));
    assert_int_equal(n, 0);
    for (int k = 0; k < g->m.store.n; k++)
      if (w.before[k]) test_free(w.before[k]);
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
}

/* Without a schedule main gradients are complete only after rfr_graphs_end_step, because any microbatch may be the last
 * one. An aborted step completes none. */
static void test_grads_ready_without_schedule(void **state) {
  (void)state;
  static rft_buffers b;
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .microbatches = 2, .dtype = RFR_F32, .frozen = 2};
  rfr_schedule *none;
  rfr_graphs *g = rft_make_graphs(&s, &none);
  rfr_tensor ready[4];
  int n;
  for (int left = 0; left < 2; left++) {
    OK(rfr_graphs_begin_step(g, NULL, 0));
    for (int m = 0; m < 2; m++) {
      for (int k = 0; k < 2; k++) rft_forward(g, &s, &b, k, m);
      for (int k = 1; k >= 0; k--) rft_backward(g, &s, &b, k, m);
      OK(rfr_graphs_grads_ready(g, ready, 4, &n));
      assert_int_equal(n, 0);
    }
    OK(left ? rfr_graphs_abort_step(g) : rfr_graphs_end_step(g));
    OK(rfr_graphs_grads_ready(g, ready, 4, &n));
    assert_int_equal(n, left ? 0 : 2);
  }
  rfr_graphs_destroy(g);
}

/* ---- other schedules ---- */

/* Graphs captured for one schedule run another one: results are bitwise equal to those of graphs created for it, and
 * nothing is captured again. */
static void test_reschedule(void **state) {
  (void)state;
  static rft_buffers ours, theirs;
  const rft_scene s = {.block = rft_block_transformer,
                       .blocks = 2,
                       .dtype = RFR_F32,
                       .schedule = "0F0 0F1 0F2 1F0 1F1 1F2 1I0 1I1 1W0 1W1 1B2 0I0 0I1 0W1 0W0 0B2",
                       .layers = 1};
  static const char *const others[] = {"0F0 1F0 1B0 0B0",
                                       "0F0 0F1 1F0 1B0 0B0 1F1 0F2 0F3 1I1 1W1 0B1 1F2 1B2 0B2 1F3 1I3 1W3 0I3 0W3",
                                       "0F0 0F1 1F0 1I0 0I0 1F1 1I1 0I1 1W1 1W0 0W1 0W0"};
  static const int microbatches[] = {1, 4, 2};
  rfr_schedule *first, *second, *none;
  rfr_graphs *g = rft_make_graphs(&s, &first);
  const int graphs = g->memory.graphs;
  rft_fill_named(g);
  for (int i = 0; i < 3; i++) {
    rft_scene other = s;
    other.schedule = others[i];
    other.microbatches = microbatches[i];
    draw_all(&other, &ours);
    theirs = ours;
    rfr_graphs *made = rft_make_graphs(&other, &second);
    rft_fill_named(made);
    OK(rfr_graphs_set_rng(made, NULL, &(rfr_rng){0, i})); /* g has counted as many steps */
    OK(rfr_graphs_reschedule(g, second));
    plain_step(&other, g, second, &ours);
    plain_step(&other, made, second, &theirs);
    assert_memory_equal(&ours, &theirs, sizeof ours);
    same_gradients(g, made);
    rfr_graphs_destroy(made);
    rfr_schedule_destroy(second);
  }
  assert_int_equal(g->memory.graphs, graphs);
  rft_refused(rfr_graphs_reschedule(g, NULL), "graphs.schedule", "but 2 were captured");
  assert_int_equal(g->memory.live, 4); /* the maximum is at the last of them */
  OK(rfr_schedule_parse(ctx, "test", others[0], strlen(others[0]), &second));
  OK(rfr_graphs_reschedule(g, second));
  assert_int_equal(g->memory.live, 2);
  assert_int_equal(g->memory.live_bytes, g->stage[0].bytes + g->stage[1].bytes);
  rfr_schedule_destroy(second);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_refused(rfr_graphs_reschedule(g, first), "graphs.order", "end or abort");
  OK(rfr_graphs_abort_step(g));
  OK(rfr_graphs_reschedule(g, first));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(first);
  /* without a schedule, then with one */
  const rft_scene free_running = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32, .layers = 2};
  g = rft_make_graphs(&free_running, &none);
  rft_scene tight = free_running;
  tight.schedule = "0F0 0B0 0F1 0B1 0F2 0B2";
  second = schedule_of(&tight);
  OK(rfr_graphs_reschedule(g, second));
  tight.microbatches = 3;
  draw_all(&tight, &ours);
  plain_step(&tight, g, second, &ours);
  OK(rfr_graphs_reschedule(g, NULL));
  rfr_schedule_destroy(second);
  rfr_graphs_destroy(g);
}

static void test_reschedule_refusals(void **state) {
  (void)state;
  const rft_scene s = {
      .block = rft_block_linear, .blocks = 2, .dtype = RFR_F32, .schedule = "0F0 0F1 0B0 0B1", .layers = 2};
  static const struct {
    const char *text, *slug, *message;
    int layers;
  } cases[] = {{"0F0 0F1 0F2 0B0 0B1 0B2", "graphs.schedule",
                "3 microbatches of stage 0 in flight, but 2 slots were captured", 2},
               {"0F0 0I0 0W0", "graphs.schedule", "separate W actions", 2},
               {"0F0 1F0 1B0 0B0", "graphs.schedule", "2 stages on this rank, but 1 were captured", 1},
               {"0F0 0F1", "graphs.callable", "is for inference", 2},
               {"0F0 0B0", "graphs.callable", "have 3 layers, but there are 2 callables", 3},
               {"0F0 0B0 0OPT", "graphs.callable", "OPT", 2}};
  rfr_schedule *first;
  rfr_graphs *g = rft_make_graphs(&s, &first);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rft_scene other = s;
    other.schedule = cases[i].text, other.layers = cases[i].layers;
    rfr_schedule *schedule = schedule_of(&other);
    rft_refused(rfr_graphs_reschedule(g, schedule), cases[i].slug, cases[i].message);
    rfr_schedule_destroy(schedule);
  }
  /* on this rank the stage is another one, or missing */
  rfr_schedule *later = rft_generate(RFR_SCHEDULE_1F1B, 2, 4, 0);
  g->options.rank = 1;
  rft_refused(rfr_graphs_reschedule(g, later), "graphs.callable", "have 1 layers");
  rfr_schedule_destroy(later);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(first);
}

/* One capture serves 1F1B with any number of microbatches that is at least the number of ranks, because only those in
 * flight need slots. */
static void test_more_microbatches(void **state) {
  (void)state;
  rfr_graphs *g;
  rfr_schedule *small = rft_generate(RFR_SCHEDULE_1F1B, 4, 4, 0), *large = rft_generate(RFR_SCHEDULE_1F1B, 4, 64, 0);
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  static float x[T * C];
  const rfr_binding in = {NULL, rft_activation(&s), x};
  rfr_tensor out;
  int n;
  c.trace = t, o.schedule = small;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  assert_int_equal(g->memory.slots, 4);
  OK(rfr_graphs_reschedule(g, large));
  const int64_t live = rfr_ctx_get_stats(ctx).alloc_calls;
  OK(rfr_graphs_begin_step(g, NULL, 0));
  const rfr_action *a = rfr_schedule_actions(large, 0, &n);
  assert_int_equal(n, 128);
  for (int i = 0; i < n; i++)
    OK(a[i].op == RFR_ACTION_F ? rfr_graphs_forward(g, 0, a[i].microbatch, &in, 1, &out, 1)
                               : rfr_graphs_backward(g, 0, a[i].microbatch, &in, 1, &out, 1));
  OK(rfr_graphs_end_step(g));
  assert_int_equal(rfr_ctx_get_stats(ctx).alloc_calls, live);
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
  rfr_schedule_destroy(small);
  rfr_schedule_destroy(large);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_expected),
      rft_context_test(test_fixed),
      rft_context_test(test_shared_fixed_memory),
      rft_context_test(test_fixed_refusals),
      rft_context_test(test_views_are_not_fixed),
      rft_context_test(test_order_of_names),
      rft_context_test(test_absent_inputs),
      rft_context_test(test_grads_ready),
      rft_context_test(test_grads_ready_without_schedule),
      rft_context_test(test_reschedule),
      rft_context_test(test_reschedule_refusals),
      rft_context_test(test_more_microbatches),
  };
  return cmocka_run_group_tests_name("calls of graphs", tests, NULL, NULL);
}
