/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute in graphed callables: by marks, by `all` or by a budget, in any schedule, results are bitwise equal to
 * those of one program that keeps everything; an op is recomputed at most once in each part; the plan shrinks by what
 * is reported.
 *
 *   graphs_recompute_test [--device NAME]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "support/device.h"
#include "support/graphs_scene.h"
#include "support/thin.h"

/* ---- regions ---- */

/* Attention is one marked region. In the MLP the ops up to its activation are marked, with one kept value among
 * them. */
static rfr_value mixed(rft_recorder *r, rfr_value x) {
  rft_policy(r, RFR_POLICY_RECOMPUTE);
  x = rft_block_attention(r, x);
  rft_policy(r, RFR_POLICY_KEEP);
  return rft_block_mlp(r, x);
}

/* A kept value within a marked region, followed by ops without a mark. */
static rfr_value nested(rft_recorder *r, rfr_value x) {
  char name[8];
  rfr_value w[2];
  for (int i = 0; i < 2; i++) {
    snprintf(name, sizeof name, "b%d.w%d", r->block, i);
    w[i] = rfr_input(r->t, name, RFR_ROLE_TRAINABLE, r->dtype, 2, ((int64_t[]){RFT_C, RFT_C}));
  }
  if (r->step == RFR_NONE) r->step = rfr_step_block(r->t);
  rft_policy(r, RFR_POLICY_RECOMPUTE);
  rfr_value a = rfr_gelu(r->t, rfr_linear(r->t, x, w[0], RFR_NONE), 1);
  rft_policy(r, RFR_POLICY_KEEP);
  rfr_value b = rfr_silu(r->t, rfr_dropout(r->t, a, r->step, 0.5, 0));
  rft_policy(r, RFR_POLICY_RECOMPUTE);
  rfr_value c = rfr_softcap(r->t, rfr_add(r->t, a, b), 1);
  rft_policy(r, RFR_POLICY_AUTO);
  return rfr_add(r->t, x, rfr_linear(r->t, rfr_dropout(r->t, c, r->step, 0.25, 0), w[1], RFR_NONE));
}

static const struct {
  const char *text;
  int microbatches, stages;
} schedules[] = {
    {NULL, 2, 1},
    {"0F0 0F1 0F2 0B0 0B1 0B2", 3, 1},
    {"0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2", 3, 2},
    {"0F0 1F0 0F1 1F1 1I0 1W0 0I0 0W0 0F2 1F2 1I1 0I1 1I2 0I2 1W1 0W1 1W2 0W2", 3, 2},
    {"0F0 0F1 0I0 0I1 0W0 0W1", 2, 1},
    {"0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2", 3, 1},
};
enum { SCHEDULES = sizeof schedules / sizeof *schedules };

static rft_scene scene_of(rft_block block, int schedule, int variant) {
  return (rft_scene){.block = block,
                     .blocks = 2 * schedules[schedule].stages,
                     .microbatches = schedules[schedule].microbatches,
                     .dtype = variant & 1 ? RFR_BF16 : RFR_F32,
                     .fuse = !(variant & 2),
                     .linked = variant & 1,
                     .schedule = schedules[schedule].text,
                     .layers = 2};
}

static rfr_graphs_memory memory_of(const rft_scene *s) {
  rfr_schedule *schedule;
  rfr_graphs_memory m = {.size = sizeof m};
  rfr_graphs *g = rft_make_graphs(s, &schedule);
  OK(rfr_graphs_get_memory(g, &m));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  return m;
}

static void test_all(void **state) {
  (void)state;
  static const rft_block blocks[] = {rft_block_mlp, rft_block_transformer, rft_block_experts};
  for (int k = 0; k < SCHEDULES; k++)
    for (int i = 0; i < 3; i++) {
      if (RFT_LEFT_OUT(k + i, 3)) continue;
      rft_scene s = scene_of(blocks[i], k, k + i);
      s.recompute = RFR_RECOMPUTE_ALL;
      s.debug = i == 1; /* dead buffers are filled: recomputed ops do not read them */
      assert_true(memory_of(&s).recomputed > 0);
      rft_run_scene(&s);
    }
}

static void test_marked(void **state) {
  (void)state;
  for (int k = 0; k < SCHEDULES; k++)
    for (unsigned marked = 1; marked < 4; marked++) {
      if (RFT_LEFT_OUT((unsigned)k + marked, 3)) continue;
      rft_scene s = scene_of(rft_block_transformer, k, (int)marked);
      s.marked = marked;
      assert_true(memory_of(&s).recomputed > 0);
      rft_run_scene(&s);
    }
}

static void test_mixed(void **state) {
  (void)state;
  for (int k = 0; k < SCHEDULES; k++) {
    if (RFT_LEFT_OUT(k, 2)) continue;
    rft_scene s = scene_of(mixed, k, k);
    assert_true(memory_of(&s).recomputed > 0);
    rft_run_scene(&s);
    /* in bf16 one program fuses across blocks of this kind, so its results differ */
    s = scene_of(nested, k, k & 1 ? 3 : 0);
    for (int all = 0; all < 2; all++) {
      s.recompute = all ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP;
      rft_run_scene(&s);
    }
  }
}

/* Ops that are marked but kept are reported with the reason. */
static void test_report(void **state) {
  (void)state;
  const rft_scene s = scene_of(nested, 4, 0); /* the values that W reads must not be recomputed */
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const char *report = rfr_graphs_report(g, 0, "recompute");
  assert_non_null(strstr(report, "marked for recompute: recomputing it does not lower the peak"));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* ---- a budget ---- */

/* Budgets between the smallest plan and the one without recompute: each is met, and smaller budgets recompute more. */
static void test_budget(void **state) {
  (void)state;
  for (int k = 0; k < SCHEDULES; k++) {
    if (RFT_LEFT_OUT(k, 3)) continue;
    rft_scene s = scene_of(rft_block_transformer, k, 1);
    s.in_order = true; /* scratch for a side stream would take what is left of the budget */
    const rfr_graphs_memory keep = memory_of(&s);
    s.recompute = RFR_RECOMPUTE_ALL;
    const rfr_graphs_memory all = memory_of(&s);
    assert_int_equal(keep.recomputed, 0);
    assert_int_equal(keep.saved_bytes, 0);
    assert_int_equal(all.saved_bytes, keep.slot_bytes + keep.shared_bytes - all.slot_bytes - all.shared_bytes);
    assert_int_equal(keep.planned_bytes - all.planned_bytes, all.saved_bytes);
    assert_true(all.saved_bytes * 6 > keep.slot_bytes);
    assert_true(all.recomputed_flops > 0);
    s.recompute = RFR_RECOMPUTE_AUTO;
    assert_int_equal(memory_of(&s).recomputed, 0);
    int last = 0;
    for (int part = 0; part <= 4; part++) {
      s.budget = keep.planned_bytes - (keep.planned_bytes - all.planned_bytes) * part / 4;
      const rfr_graphs_memory m = memory_of(&s);
      assert_true(m.planned_bytes <= s.budget);
      assert_true(m.recomputed >= last);
      assert_int_equal(m.recomputed > 0, part > 0);
      assert_int_equal(keep.planned_bytes - m.planned_bytes, m.saved_bytes);
      last = m.recomputed;
      if (part == 2) rft_run_scene(&s);
    }
  }
}

static void test_over_budget(void **state) {
  (void)state;
  rft_scene s = scene_of(rft_block_transformer, 1, 0);
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(&s, 1)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  long long least;
  for (int i = 0; i < 2; i++) c[i].trace = t[i];
  o.recompute = RFR_RECOMPUTE_AUTO;
  o.budget = 1;
  rft_refused(rfr_graphs_create(ctx, c, 2, &o, &g), "plan.over_budget", "the smallest budget that works");
  const char *needs = strstr(rfr_last_error()->message, "needs ");
  assert_non_null(needs);
  assert_int_equal(sscanf(needs, "needs %lld", &least), 1);
  o.budget = least - 1;
  rft_refused(rfr_graphs_create(ctx, c, 2, &o, &g), "plan.over_budget", "the smallest budget that works");
  o.budget = least;
  OK(rfr_graphs_create(ctx, c, 2, &o, &g));
  rfr_graphs_destroy(g);
  o.recompute = (rfr_recompute)3;
  rft_refused(rfr_graphs_create(ctx, c, 2, &o, &g), "argument", "recompute 3");
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
}

/* Callables so small that packing decides the size of the plan: one more level may need more memory. */
enum { TINY_T = 8, TINY_C = 16, TINY = 3 };

static rfr_trace *tiny_trace(char kind, bool marked, rfr_dtype dtype, int block) {
  static const int64_t act[2] = {TINY_T, TINY_C}, square[2] = {TINY_C, TINY_C};
  rfr_trace *t;
  rfr_value w[3], h, x, z = RFR_NONE;
  OK(rfr_trace_create(ctx, &t));
  x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, dtype, 2, act);
  if (kind == 'z') z = rfr_input(t, "z", RFR_ROLE_INPUT_GRAD, dtype, 2, act);
  for (int i = 0; i < 3; i++) {
    char name[16];
    const bool vector = i == (kind == 'g' ? 1 : kind == 'n' ? 0 : 3);
    snprintf(name, sizeof name, "b%d.w%d", block, i);
    w[i] = i < (kind == 'n' ? 3 : 2) ? rfr_input(t, name, RFR_ROLE_TRAINABLE, dtype, vector ? 1 : 2, square) : RFR_NONE;
  }
  if (marked) rfr_set_recompute(t, RFR_POLICY_RECOMPUTE);
  if (kind == 'g') {
    h = rfr_gelu(t, rfr_linear(t, x, w[0], w[1]), 1);
  } else if (kind == 'z') {
    h = rfr_swiglu(t, rfr_linear(t, x, w[0], RFR_NONE), rfr_linear(t, z, w[1], RFR_NONE));
    rfr_output(t, "y2", rfr_mul(t, h, z));
  } else {
    h = rfr_gelu(t, rfr_linear(t, rfr_rmsnorm(t, x, w[0], 1e-5), w[1], RFR_NONE), 1);
    if (marked) rfr_set_recompute(t, RFR_POLICY_KEEP);
    h = rfr_silu(t, rfr_linear(t, h, w[2], RFR_NONE));
    if (marked) rfr_set_recompute(t, RFR_POLICY_RECOMPUTE);
    rfr_output(t, "out", rfr_detach(t, h));
    rfr_output(t, "through", x);
  }
  rfr_output(t, "y", rfr_add(t, x, h));
  OK(rfr_trace_finish(t));
  return t;
}

typedef struct tiny_case {
  const char *schedule, *kinds, *marks; /* per callable */
  int layers[2];
  rfr_dtype dtype;
  bool fuse, linked;
} tiny_case;

/* The bytes of the plan; if the budget is too small, the bytes that the error suggests. */
static int64_t plan_tiny(const tiny_case *x, rfr_recompute recompute, int64_t budget, bool *fits) {
  const int n = (int)strlen(x->kinds);
  const rfr_callable_link link = {"x", 0, "y"};
  rfr_callable c[TINY];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs_memory m = {.size = sizeof m};
  rfr_graphs *g;
  rfr_schedule *schedule;
  for (int i = 0; i < n; i++) {
    c[i] = rfr_callable_default();
    c[i].trace = tiny_trace(x->kinds[i], x->marks[i] == 'm', x->dtype, i);
    if (i == 1 && x->linked) c[i].links = &link, c[i].n_links = 1;
  }
  OK(rfr_schedule_parse(ctx, "test", x->schedule, strlen(x->schedule), &schedule));
  OK(rfr_schedule_set_layers(schedule, x->layers, x->layers[1] ? 2 : 1));
  o.schedule = schedule, o.recompute = recompute, o.budget = budget, o.fuse = x->fuse, o.eager = 1;
  o.wgrad_side_stream = 0; /* its scratch is not part of what recompute compares */
  *fits = rfr_graphs_create(ctx, c, n, &o, &g) == RFR_OK;
  if (*fits) {
    OK(rfr_graphs_get_memory(g, &m));
  } else {
    long long least = 0;
    assert_string_equal(rfr_last_error()->slug, "plan.over_budget");
    assert_int_equal(sscanf(rfr_last_error()->message, "the plan needs %lld bytes, the smallest", &least), 1);
    m.planned_bytes = least;
  }
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  for (int i = 0; i < n; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
  return m.planned_bytes;
}

/* A plan with `all` is never larger than one without recompute. The size of a plan is itself a valid budget, and the
 * budget that an error suggests is the smallest that works. */
static void test_packed(void **state) {
  (void)state;
  static const tiny_case cases[] = {
      {"0F0 0F1 0F2 0B0 0F3 0F4 0B1 0B2 0B3 0B4", "g", "-", {1}, RFR_F32, true, false},
      {"0F0 0F1 0F2 0B0 0B1 0B2", "gz", "m-", {2}, RFR_F32, true, true},
      {"0F0 1F0 1B0 0B0", "zn", "-m", {1, 1}, RFR_BF16, false, false},
      {"0F0 1F0 1B0 0B0", "zn", "m-", {1, 1}, RFR_F32, true, false},
  };
  bool fits;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const tiny_case *x = &cases[i];
    const int64_t keep = plan_tiny(x, RFR_RECOMPUTE_KEEP, 0, &fits), all = plan_tiny(x, RFR_RECOMPUTE_ALL, 0, &fits);
    int64_t now = all;
    print_message("%zu: %lld, all %lld\n", i, (long long)keep, (long long)all);
    assert_true(all <= keep);
    for (int k = 0; k < 3; k++) {
      const int64_t bytes = plan_tiny(x, RFR_RECOMPUTE_AUTO, now, &fits);
      assert_true(fits && bytes <= now);
      now = bytes;
    }
    const int64_t least = plan_tiny(x, RFR_RECOMPUTE_AUTO, 1, &fits);
    assert_true(!fits && least <= now);
    assert_int_equal(plan_tiny(x, RFR_RECOMPUTE_AUTO, least, &fits), least);
    assert_true(fits);
    assert_int_equal(plan_tiny(x, RFR_RECOMPUTE_AUTO, least - 1, &fits), least);
    assert_true(!fits);
  }
}

/* The number of plans before a refusal does not depend on the number of callables, so allocations grow linearly. */
static int64_t allocations_of_refusal(int n) {
  enum { MOST_CALLABLES = 32 };
  rfr_callable c[MOST_CALLABLES];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  const rft_scene s = {.block = rft_block_mlp, .blocks = 1, .dtype = RFR_F32, .fuse = true};
  rfr_trace *t = rft_block_trace(&s, 0);
  const int layers = n;
  rfr_schedule *schedule;
  OK(rfr_schedule_parse(ctx, "test", "0F0 0F1 0B0 0B1", 15, &schedule));
  OK(rfr_schedule_set_layers(schedule, &layers, 1));
  for (int i = 0; i < n; i++) c[i] = rfr_callable_default(), c[i].trace = t;
  o.schedule = schedule, o.budget = 1, o.recompute = RFR_RECOMPUTE_AUTO;
  const int64_t before = rfr_ctx_get_stats(ctx).alloc_calls;
  rft_refused(rfr_graphs_create(ctx, c, n, &o, &g), "plan.over_budget", "the smallest budget that works");
  rfr_trace_destroy(t);
  rfr_schedule_destroy(schedule);
  return rfr_ctx_get_stats(ctx).alloc_calls - before;
}

static void test_refusal_is_linear(void **state) {
  (void)state;
  const int64_t few = allocations_of_refusal(8), many = allocations_of_refusal(32);
  print_message("8 callables: %lld allocations, 32: %lld\n", (long long)few, (long long)many);
  assert_true(many < 4 * few);
}

/* ---- phases of recomputed ops ---- */

/* The number of recomputed ops in a phase; `twice`: only those that an earlier phase recomputes too. No phase has two
 * clones of an op. */
static int clones_in(const rfr_trace *t, int phase, bool twice) {
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->clone_of < 0 || (op->def->flags & RFI_VIEW)) continue;
    int others = 0;
    for (int k = 0; k < i; k++) {
      if (t->ops[k].clone_of != op->clone_of) continue;
      assert_int_not_equal(t->ops[k].phase, op->phase);
      others++;
    }
    assert_int_equal(t->ops[op->clone_of].phase, RFR_PHASE_FORWARD);
    n += op->phase == phase && (!twice || others > 0);
  }
  return n;
}

static void test_places(void **state) {
  (void)state;
  for (int delayed = 0; delayed < 2; delayed++) {
    rft_scene s = scene_of(rft_block_transformer, delayed ? 4 : 1, 0);
    s.marked = 3;
    rfr_schedule *schedule;
    rfr_graphs *g = rft_make_graphs(&s, &schedule);
    for (int i = 0; i < s.blocks; i++) {
      const rfr_trace *t = rfr_graphs_trace(g, i);
      /* if W follows directly, it reads I's clones; if W may run later, it has its own clones */
      if (!delayed) assert_true(clones_in(t, RFR_PHASE_DGRAD, false) > 3);
      if (!delayed) assert_int_equal(clones_in(t, RFR_PHASE_WGRAD, true), 0);
      if (delayed) assert_true(clones_in(t, RFR_PHASE_WGRAD, false) > 3);
      const char *report = rfr_graphs_report(g, i, "recompute");
      assert_non_null(strstr(report, "live across programs: "));
      assert_int_equal(strstr(report, "recomputed for wgrad: ") != NULL, delayed);
    }
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
}

/* ---- masks ---- */

static void test_masks(void **state) {
  (void)state;
  static rft_buffers b;
  static unsigned char y[3][RFT_T * RFT_C * 4], dx[3][RFT_T * RFT_C * 4];
  const rft_scene s = {.block = rft_block_mlp,
                       .blocks = 1,
                       .microbatches = 1,
                       .dtype = RFR_F32,
                       .fuse = true,
                       .recompute = RFR_RECOMPUTE_ALL};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  rfr_tensor w;
  static const char *const names[] = {"b0.norm", "b0.up", "b0.down"};
  for (int i = 0; i < 3; i++) {
    OK(rfr_graphs_tensor(g, names[i], &w));
    rfr_tensor copy = rft_of_graphs(g, &w);
    rft_fill_by(&copy, (uint64_t)i, 1);
    OK(rfr_graphs_write(g, &w, copy.data));
    free(copy.data);
  }
  rft_draw(&s, b.x[0][0], 0, 0, 1);
  rft_draw(&s, b.dx[0][1], 0, 0, 2);
  for (int i = 0; i < 3; i++) {
    const int64_t step = i == 2 ? 0 : i, block[4] = {step, step, 77, 0};
    const rfr_binding now = {"step", {.dtype = RFR_I64, .rank = 1, .shape = {4}}, block};
    OK(rfr_graphs_begin_step(g, &now, 1));
    rft_forward(g, &s, &b, 0, 0);
    rft_backward(g, &s, &b, 0, 0);
    OK(rfr_graphs_end_step(g));
    memcpy(y[i], b.x[0][1], sizeof y[i]);
    memcpy(dx[i], b.dx[0][0], sizeof dx[i]);
  }
  assert_memory_not_equal(y[0], y[1], sizeof y[0]);
  assert_memory_not_equal(dx[0], dx[1], sizeof dx[0]);
  assert_memory_equal(y[0], y[2], sizeof y[0]);
  assert_memory_equal(dx[0], dx[2], sizeof dx[0]);
  rfr_graphs_destroy(g);
}

/* ---- without recompute ---- */

static void test_inference(void **state) {
  (void)state;
  rft_scene s = {.block = rft_block_transformer, .blocks = 1, .dtype = RFR_F32, .fuse = true};
  rfr_graphs_memory m[2] = {{.size = sizeof *m}, {.size = sizeof *m}};
  for (int marked = 0; marked < 2; marked++) {
    s.marked = (unsigned)marked;
    rfr_trace *t = rft_block_trace(&s, 0);
    rfr_callable c = rfr_callable_default();
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    c.trace = t;
    c.inference = 1;
    o.recompute = marked ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP;
    OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
    OK(rfr_graphs_get_memory(g, &m[marked]));
    rfr_graphs_destroy(g);
    rfr_trace_destroy(t);
  }
  assert_memory_equal(&m[0], &m[1], sizeof m[0]);
}

/* Another callable's forward writes the state before the backward runs: nothing that depends on the state is
 * recomputed, and a gradient that needs it is refused. */
static void test_written_states(void **state) {
  (void)state;
  enum { N = 16 };
  const int64_t shape[2] = {N, N};
  for (int product = 0; product < 2; product++) {
    rfr_trace *t[2];
    rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g = NULL;
    for (int i = 0; i < 2; i++) {
      OK(rfr_trace_create(ctx, &t[i]));
      rfr_value x = rfr_input(t[i], "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, shape);
      rfr_value s = rfr_input(t[i], "s", RFR_ROLE_STATE, RFR_F32, 2, shape);
      rfr_value sum = rfr_silu(t[i], x);
      if (i == 0)
        rfr_output(t[i], "s",
                   rfi_record(t[i], RFR_HERE, RFI_OP_accumulate, 2, (rfr_value[]){rfr_detach(t[i], x), s}, NULL, NULL));
      else x = product ? rfr_mul(t[i], x, s) : rfr_add(t[i], x, s);
      sum = rfr_add(t[i], sum, rfr_silu(t[i], x));
      rfr_output(t[i], "y", rfr_gelu(t[i], rfr_add(t[i], sum, x), 1));
      OK(rfr_trace_finish(t[i]));
      c[i].trace = t[i];
    }
    o.recompute = RFR_RECOMPUTE_ALL;
    const rfr_status s = rfr_graphs_create(ctx, c, 2, &o, &g);
    if (product) {
      rft_refused(s, "graphs.callable", "in another part");
    } else {
      OK(s);
      const rfr_trace *b = rfr_graphs_trace(g, 1);
      int made = 0;
      for (int i = 0; i < b->n_ops; i++) {
        made += b->ops[i].clone_of >= 0;
        for (int k = 0; k < b->ops[i].n_in && b->ops[i].phase != RFR_PHASE_FORWARD; k++)
          if (b->ops[i].in[k] >= 0) assert_string_not_equal(b->values[b->ops[i].in[k]].name, "s");
      }
      assert_true(made > 0);
    }
    rfr_graphs_destroy(g);
    for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  }
}

/* A frozen callable has no W; the ops that its I needs are recomputed. */
static void test_frozen(void **state) {
  (void)state;
  for (unsigned frozen = 1; frozen < 4; frozen++) {
    rft_scene s = scene_of(rft_block_transformer, frozen == 2 ? 4 : 1, 0);
    if (frozen == 3) s.schedule = "0F0 0F1 0F2 0B0 0B1 0B2";
    s.frozen = frozen;
    s.recompute = RFR_RECOMPUTE_ALL;
    rft_run_scene(&s);
  }
}

/* Every allocation fails once while frontiers are searched and plans are made: each failure is a status, and no memory
 * leaks. */
static void test_allocation_faults(void **state) {
  (void)state;
  const rft_scene s = {.block = rft_block_mlp, .blocks = 1, .dtype = RFR_F32, .fuse = true};
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs_memory m = {.size = sizeof m};
  rfr_graphs *g;
  c.trace = t;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  OK(rfr_graphs_get_memory(g, &m));
  rfr_graphs_destroy(g);
  o.recompute = RFR_RECOMPUTE_AUTO;
  o.budget = m.planned_bytes - 1;
  g = rft_create_after_faults(&c, &o, 60);
  OK(rfr_graphs_get_memory(g, &m));
  assert_true(m.recomputed > 0);
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
}

int main(int argc, char **argv) {
  if (!rft_device_named(&argc, argv)) return 77;
  const struct CMUnitTest tests[] = {
      rft_context_test(test_all),
      rft_context_test(test_marked),
      rft_context_test(test_mixed),
      rft_context_test(test_report),
      rft_context_test(test_written_states),
      rft_context_test(test_budget),
      rft_context_test(test_over_budget),
      rft_context_test(test_packed),
      rft_context_test(test_refusal_is_linear),
      rft_context_test(test_places),
      rft_context_test(test_masks),
      rft_context_test(test_inference),
      rft_context_test(test_frozen),
      rft_context_test(test_allocation_faults),
  };
  return cmocka_run_group_tests_name("graphs_recompute", tests, NULL, NULL);
}
