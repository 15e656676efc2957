/* SPDX-License-Identifier: Apache-2.0
 *
 * rfr_compile: what it refuses, plans without memory, planned bytes by kind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "exec/exec.h"
#include "refrain/ops.h"
#include "support/context.h"

enum { ROWS = 64, IN = 40, OUT = 56 };

/* y = x wT with a frozen or trained w; trained: the update of w, its moments m and v, and a step count. */
static rfr_trace *linear_trace(rfr_ctx *of, int64_t rows, bool trained) {
  rfr_trace *t;
  OK(rfr_trace_create(of, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){rows, IN}));
  rfr_value w = rfr_input(t, "w", trained ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){OUT, IN}));
  rfr_value y = rfr_linear(t, x, w, RFR_NONE);
  if (trained) {
    rfr_value step = rfr_step_block(t);
    rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){OUT, IN}));
    rfr_value v = rfr_input(t, "v", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){OUT, IN}));
    rfr_value lr = rfr_input(t, "lr", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){1}));
    rfr_value g = rfr_gradient(t, rfr_sum(t, rfr_mul(t, y, y), -1), w, RFR_F32);
    rfr_adamw_options adam = rfr_adamw_options_default();
    rfr_set_phase(t, RFR_PHASE_OPTIM);
    rfr_adamw(t, w, g, m, v, RFR_NONE, lr, RFR_NONE, RFR_NONE, step, &adam);
  }
  rfr_output(t, "y", y);
  OK(rfr_trace_finish(t));
  return t;
}

static void expect_error(rfr_status got, rfr_status wanted, const char *slug, const char *text) {
  assert_int_equal(got, wanted);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, text)) fail_msg("%s", rfr_last_error()->message);
}

static void expect_refused(const rfr_trace *t, const char *text) {
  rfr_programs *p = (rfr_programs *)&p;
  expect_error(rfr_compile(ctx, 1, &t, NULL, NULL, &p), RFR_INVALID, "argument", text);
  assert_null(p);
}

/* Programs share inputs by name, so a name has one type and one role. */
static void test_shared_names(void **state) {
  (void)state;
  rfr_trace *same[2] = {linear_trace(ctx, ROWS, false), linear_trace(ctx, ROWS, false)};
  rfr_trace *other_type = linear_trace(ctx, ROWS + 1, false), *other_role = linear_trace(ctx, ROWS, true);
  const char *const names[2] = {"a", "b"};
  rfr_programs *p;
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)same, names, NULL, &p));
  rfr_programs_destroy(p);
  const rfr_trace *const types[2] = {same[0], other_type}, *const roles[2] = {same[0], other_role};
  expect_error(rfr_compile(ctx, 2, types, names, NULL, &p), RFR_INVALID, "program.state", "\"x\" has another type");
  expect_error(rfr_compile(ctx, 2, roles, names, NULL, &p), RFR_INVALID, "program.state", "\"w\" has another type");
  assert_non_null(strstr(rfr_last_error()->message, "in program \"b\" than in an earlier program"));
  rfr_trace_destroy(other_type);
  rfr_trace_destroy(other_role);
  for (int i = 0; i < 2; i++) rfr_trace_destroy(same[i]);
}

/* A trace of another context would be read after that context's end. */
static void test_other_context(void **state) {
  (void)state;
  rfr_ctx *other = rft_one_thread();
  rfr_trace *t = linear_trace(other, ROWS, false);
  expect_refused(t, "another context");
  rfr_trace_destroy(t);
  rfr_ctx_destroy(other);
}

static void test_unfinished(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  expect_refused(t, "no output");
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){4}));
  rfr_value y = rfr_add(t, x, x);
  expect_refused(t, "no output");
  rfr_output(t, "y", y);
  rfr_linear(t, x, x, RFR_NONE); /* latches trace.shape */
  rfr_programs *p;
  const rfr_trace *traces[] = {t};
  expect_error(rfr_compile(ctx, 1, traces, NULL, NULL, &p), RFR_INVALID, "trace.shape", "program 0 is unfinished");
  rfr_trace_destroy(t);
}

/* The same plan as with memory, and no memory: the context's peak stays far below the plan. */
static void test_plan_only(void **state) {
  (void)state;
  enum { MANY = 1 << 20 }; /* rows: x alone has 160 MiB */
  rfr_compile_options o = rfr_compile_options_default();
  rfr_trace *t = linear_trace(ctx, MANY, true);
  rfr_plan_summary sum;
  rfr_tensor x, y;
  rfr_op_time time;
  rfr_rng rng;
  int n;
  o.plan_only = 1;
  o.budget = 1; /* ignored with plan_only; the caller compares */
  rfr_programs *p = rft_compile(t, &o);
  OK(rfr_program_plan(p, 0, &sum));
  assert_true(sum.planned_bytes > (int64_t)MANY * (IN + OUT) * 4);
  assert_true(rfr_ctx_get_stats(ctx).peak_bytes < 1 << 24);
  OK(rfr_programs_tensor(p, "x", &x));
  OK(rfr_program_output(p, 0, "y", &y));
  assert_null(x.data);
  assert_null(y.data);
  assert_int_equal(x.host + y.host, 0);
  assert_int_equal(x.bytes, (int64_t)MANY * IN * 4);
  OK(rfr_program_profile(p, 0, NULL, 0, &n));
  float bytes[4];
  x.bytes = sizeof bytes;
#define NEEDS_MEMORY(call) expect_error(call, RFR_INVALID, "program.plan_only", "plan_only")
  NEEDS_MEMORY(rfr_programs_load(p));
  NEEDS_MEMORY(rfr_program_run(p, 0));
  NEEDS_MEMORY(rfr_program_capture(p, 0));
  NEEDS_MEMORY(rfr_program_replay(p, 0, NULL, 0));
  NEEDS_MEMORY(rfr_program_profile(p, 0, &time, n, &n));
  NEEDS_MEMORY(rfr_programs_write(p, &x, bytes));
  NEEDS_MEMORY(rfr_programs_read(p, &x, bytes));
  NEEDS_MEMORY(rfr_programs_get_rng(p, NULL, &rng));
  NEEDS_MEMORY(rfr_programs_check(p));
  assert_int_equal(rfr_programs_touched_bytes(p), -1);
  assert_int_equal(rfr_program_unwritten_bytes(p, 0), -1);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);

  t = linear_trace(ctx, ROWS, true);
  rfr_plan_summary with;
  o.budget = 0;
  p = rft_compile(t, &o);
  OK(rfr_program_plan(p, 0, &sum));
  rfr_programs_destroy(p);
  p = rft_compile(t, NULL);
  OK(rfr_program_plan(p, 0, &with));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  assert_int_equal(sum.planned_bytes, with.planned_bytes);
  assert_int_equal(sum.persistent_bytes, with.persistent_bytes);
  assert_int_equal(sum.n_buffers, with.n_buffers);
}

static void test_memory_by_kind(void **state) {
  (void)state;
  rfr_trace *one = linear_trace(ctx, ROWS, true);
  rfr_programs *p = rft_compile(one, NULL);
  rfr_memory m;
  rfr_plan_summary sum;
  OK(rfr_programs_memory(p, &m));
  OK(rfr_program_plan(p, 0, &sum));
  assert_int_equal(m.weights, OUT * IN * 4);
  assert_int_equal(m.optimizer, 2 * OUT * IN * 4);
  assert_int_equal(m.states, 256);                 /* the step block, aligned */
  assert_int_equal(m.inputs, ROWS * IN * 4 + 256); /* x, lr */
  assert_true(m.outputs >= ROWS * OUT * 4);        /* y */
  assert_true(m.gradients >= OUT * IN * 4);
  assert_int_equal(m.total, sum.planned_bytes);
  assert_int_equal(m.weights + m.optimizer + m.states + m.inputs + m.loaded + m.activations + m.gradients +
                       m.workspaces + m.outputs + m.unused,
                   m.total);
  assert_int_equal(m.unused, sum.transient_planned_bytes - sum.transient_lower_bound_bytes);
  rfr_programs_destroy(p);
  rfr_trace_destroy(one);
}

/* The LM head computes its gradients in the forward phase; every table must still list them as gradients. */
static void test_kind_of_head_gradients(void **state) {
  (void)state;
  enum { T = 16, C = 24, V = 40 };
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){T, C}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){V, C}));
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){T}));
  rfr_value inv = rfr_token_count(t, 1, &targets, -100, NULL);
  rfr_value h = rfr_add(t, x, x);
  rfr_value loss = rfr_cross_entropy(t, rfr_linear(t, h, w, RFR_NONE), targets, inv, -100);
  rfr_output(t, "loss", loss);
  rfr_output(t, "gx", rfr_gradient(t, loss, x, RFR_F32));
  rfr_output(t, "gw", rfr_scale(t, rfr_gradient(t, loss, w, RFR_F32), 2, RFR_NONE));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rfr_plan_summary sum;
  int found = 0;
  OK(rfr_program_plan(p, 0, &sum));
  for (int i = 0; i < sum.n_buffers; i++) {
    rfr_plan_buffer b;
    rfr_plan_op op;
    OK(rfr_program_plan_buffer(p, 0, i, &b));
    OK(rfr_program_op(p, 0, b.first, &op));
    if (strcmp(op.name, "linear_cross_entropy") != 0 || (b.bytes != T * C * 4 && b.bytes != V * C * 4)) continue;
    if (b.last <= b.first || strcmp(b.kind, "workspace") == 0 || strcmp(b.kind, "output") == 0) continue;
    if (b.offset < sum.persistent_bytes) continue;
    assert_string_equal(b.kind, "gradient");
    found++;
  }
  assert_true(found > 0);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* The host fills a ring even if a pass has removed the op that reads it. */
static void test_unread_ring(void **state) {
  (void)state;
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const int64_t shape[3] = {2, 3, 5};
  rfr_ring_read(t, rfr_input(t, "ring", RFR_ROLE_INPUT, RFR_I32, 3, shape), rfr_step_block(t));
  rfr_output(t, "y", rfr_scale(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, shape), 2, RFR_NONE));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  const rfi_named *ring = rfi_storage_find(&p->m.store, "ring"), *x = rfi_storage_find(&p->m.store, "x");
  assert_true(ring && ring->region == RFI_REGION_RING);
  assert_true(x && x->region != RFI_REGION_RING);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* A NULL for a result is an error that names the type, never a crash. */
static void test_null_results(void **state) {
  (void)state;
  rfr_trace *t = linear_trace(ctx, ROWS, true);
  const rfr_trace *traces[] = {t};
  rfr_programs *p = rft_compile(t, NULL);
  rfr_tensor x;
  OK(rfr_programs_tensor(p, "x", &x));
#define NULL_RESULT(call) expect_error(call, RFR_INVALID, "argument", "is NULL")
  NULL_RESULT(rfr_compile(ctx, 1, traces, NULL, NULL, NULL));
  NULL_RESULT(rfr_programs_tensor(p, "x", NULL));
  NULL_RESULT(rfr_programs_tensor_at(p, 0, NULL));
  NULL_RESULT(rfr_program_output(p, 0, "y", NULL));
  NULL_RESULT(rfr_programs_choice_at(p, 0, NULL));
  NULL_RESULT(rfr_programs_write(p, NULL, &x));
  NULL_RESULT(rfr_programs_read(p, NULL, &x));
  NULL_RESULT(rfr_programs_get_rng(p, NULL, NULL));
  NULL_RESULT(rfr_programs_set_rng(p, NULL, NULL));
  NULL_RESULT(rfr_programs_poll(p, NULL));
  NULL_RESULT(rfr_program_profile(p, 0, NULL, 0, NULL));
  NULL_RESULT(rfr_program_plan(p, 0, NULL));
  NULL_RESULT(rfr_program_plan_buffer(p, 0, 0, NULL));
  NULL_RESULT(rfr_program_op(p, 0, 0, NULL));
  NULL_RESULT(rfr_programs_memory_use(p, NULL));
  NULL_RESULT(rfr_programs_memory(p, NULL));
  NULL_RESULT(rfr_program_frontier(p, 0, NULL, 2, &(int){0}));
  NULL_RESULT(rfr_program_frontier(p, 0, &(rfr_frontier_point){0}, 2, NULL));
  assert_int_equal(rfr_programs_write(p, &x, NULL), RFR_INVALID);
  assert_int_equal(rfr_programs_read(p, &x, NULL), RFR_INVALID);
  assert_int_equal(rfr_program_replay(p, 0, NULL, 1), RFR_INVALID);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* A copy must stay within one tensor of the programs, whatever size the caller's rfr_tensor has. */
static void test_copies(void **state) {
  (void)state;
  rfr_trace *t = linear_trace(ctx, ROWS, false);
  rfr_programs *p = rft_compile(t, NULL);
  float host[ROWS * OUT] = {0}, seen = 0;
  rfr_tensor x, y, part;
  OK(rfr_programs_tensor(p, "x", &x));
  OK(rfr_program_output(p, 0, "y", &y));
  OK(rfr_programs_write(p, &x, host));
  OK(rfr_programs_read(p, &y, host));
  part = x, part.data = (float *)x.data + 3, part.bytes = sizeof seen;
  OK(rfr_programs_write(p, &part, &(float){7}));
  OK(rfr_programs_read(p, &part, &seen));
  assert_true(seen == 7);
#define OUTSIDE(change)                                                                               \
  do {                                                                                                \
    part = x;                                                                                         \
    change;                                                                                           \
    expect_error(rfr_programs_write(p, &part, host), RFR_INVALID, "tensor", "rfr_programs_write of"); \
    expect_error(rfr_programs_read(p, &part, host), RFR_INVALID, "tensor", "rfr_programs_read of");   \
  } while (0)
  OUTSIDE(part.bytes += 4);
  OUTSIDE(part.data = (float *)x.data + 1);
  OUTSIDE(part.data = (float *)x.data - 1);
  OUTSIDE(part.data = host);
  OUTSIDE(part.data = NULL);
  OUTSIDE(part.type.dtype = RFR_I32);
  OUTSIDE(part.type.shape[0]--);
  part = x, part.bytes = -1;
  assert_int_equal(rfr_programs_write(p, &part, host), RFR_INVALID);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_shared_names),   rft_context_test(test_other_context),
      rft_context_test(test_unfinished),     rft_context_test(test_plan_only),
      rft_context_test(test_memory_by_kind), rft_context_test(test_kind_of_head_gradients),
      rft_context_test(test_unread_ring),    rft_context_test(test_null_results),
      rft_context_test(test_copies),
  };
  return cmocka_run_group_tests_name("compile", tests, NULL, NULL);
}
