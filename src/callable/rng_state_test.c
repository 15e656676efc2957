/* SPDX-License-Identifier: Apache-2.0
 *
 * Named streams of random numbers: drawn numbers are compared with the function of their stream, step, site and
 * element. Get, set and fork are used as by the ranks of a tensor-parallel group. In callables, masks of the backward
 * equal those of the forward, recomputed or not, and change from step to step, because the graphs advance the step
 * counter.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "refrain/graphs.h"
#include "support/context.h"
#include "support/text.h"
#include "trace/trace.h"

enum { N = 200 };
static const double P = 0.4;

static rfr_value ones(rfr_trace *t) { return rfr_fill(t, 1, RFR_F32, 1, (int64_t[]){N}); }

/* ---- programs ---- */

/* Replaces a trace by the result of parsing its printed form: streams keep their numbers. */
static rfr_trace *reread(rfr_trace *t) {
  rft_text text = {0};
  rfr_trace *again;
  rfr_print_options o = rfr_print_options_default();
  o.flat = 1;
  OK(rfr_trace_print(t, &o, rft_text_add, &text));
  OK(rfr_trace_parse(ctx, "printed", text.data, text.n, &again));
  assert_int_equal(rfr_trace_equal(t, again), 1);
  free(text.data);
  rfr_trace_destroy(t);
  return again;
}

/* Masks of the default stream, of "left", and of "right" twice, once under an explicit number. */
static rfr_programs *three_streams(bool ends) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value step = rfr_step_block(t), left = rfr_rng_stream(t, "left"), right = rfr_rng_stream(t, "right");
  rfr_value x = ones(t);
  rfr_output(t, "default", rfr_dropout(t, x, step, P, 0));
  rfr_output(t, "left", rfr_dropout(t, x, left, P, 0));
  rfr_output(t, "right", rfr_dropout(t, x, right, P, 0));
  rfr_output(t, "right1", rfr_dropout(t, x, right, P, 1));
  if (ends) {
    rfr_value skip = rfr_fill(t, 0, RFR_I32, 1, (int64_t[]){1});
    rfr_output(t, "rng.left", rfr_step_end(t, left, skip));
  }
  OK(rfr_trace_finish(t));
  t = reread(t);
  rfr_programs *p = rft_compile(t, NULL);
  rfr_trace_destroy(t);
  return p;
}

static void mask_of(rfr_programs *p, const char *name, float *mask) {
  rfr_tensor x;
  OK(rfr_program_output(p, 0, name, &x));
  assert_int_equal(x.bytes, N * sizeof *mask);
  OK(rfr_programs_read(p, &x, mask));
}

/* The expected mask at site `site` of the stream with this number. */
static void expected(rfr_rng rng, uint64_t stream, uint32_t site, float *mask) {
  for (int i = 0; i < N; i++) {
    const uint32_t word =
        rfi_draw4(rfi_stream_key(rng.seed, stream), (uint64_t)i / 4, site, 0, (uint64_t)rng.step).v[i % 4];
    mask[i] = word >= P * 0x1p32 ? (float)(1 / (1 - P)) : 0;
  }
}

static void test_addresses(void **state) {
  (void)state;
  static float got[4][N], want[N];
  static const char *const names[] = {"default", "left", "right", "right1"};
  const rfr_rng rng = {0xFEEDFACECAFEBEEFu, 41};
  rfr_programs *p = three_streams(false);
  OK(rfr_programs_set_rng(p, NULL, &rng));
  OK(rfr_programs_set_rng(p, "left", &rng));
  OK(rfr_programs_set_rng(p, "right", &rng));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  for (int i = 0; i < 4; i++) {
    mask_of(p, names[i], got[i]);
    expected(rng, i == 0 ? 0 : rfi_stream_id(i == 1 ? "left" : "right") + (i == 3), (uint32_t)i, want);
    assert_memory_equal(got[i], want, sizeof want);
  }
  rfr_programs_destroy(p);
}

static int differences(const float *a, const float *b) {
  int n = 0;
  for (int i = 0; i < N; i++) n += a[i] != b[i];
  return n;
}

/* Two ranks have the same state of one stream, and a different fork each of the other. */
static void test_ranks(void **state) {
  (void)state;
  static float mask[3][2][N], again[N];
  const rfr_rng rng = {5, 3};
  for (int rank = 0; rank < 3; rank++) {
    rfr_programs *p = three_streams(false);
    rfr_rng own;
    OK(rfr_programs_set_rng(p, "left", &rng));
    OK(rfr_programs_get_rng(p, "left", &own));
    assert_int_equal(own.seed, rng.seed);
    assert_int_equal(own.step, rng.step);
    own = rfr_rng_fork(own, (uint64_t)rank);
    assert_int_equal(own.step, rng.step);
    assert_true(own.seed != rng.seed);
    OK(rfr_programs_set_rng(p, "right", &own));
    OK(rfr_programs_load(p));
    OK(rfr_program_run(p, 0));
    mask_of(p, "left", mask[rank][0]);
    mask_of(p, "right", mask[rank][1]);
    /* set to another state, then restored */
    const rfr_rng other = {5, 4};
    OK(rfr_programs_set_rng(p, "right", &other));
    OK(rfr_program_run(p, 0));
    mask_of(p, "right", again);
    assert_true(differences(again, mask[rank][1]) > N / 4);
    OK(rfr_programs_set_rng(p, "right", &own));
    OK(rfr_program_run(p, 0));
    mask_of(p, "right", again);
    assert_memory_equal(again, mask[rank][1], sizeof again);
    rfr_programs_destroy(p);
  }
  for (int a = 0; a < 3; a++) {
    assert_true(differences(mask[a][0], mask[a][1]) > N / 4);
    for (int b = 0; b < a; b++) {
      assert_memory_equal(mask[a][0], mask[b][0], sizeof mask[a][0]);
      assert_true(differences(mask[a][1], mask[b][1]) > N / 4);
    }
  }
}

/* The end of a step also advances a stream, also in a replay. */
static void test_steps(void **state) {
  (void)state;
  static float mask[4][N];
  const rfr_rng rng = {9, 0};
  rfr_rng now;
  rfr_programs *p = three_streams(true);
  OK(rfr_programs_set_rng(p, "left", &rng));
  OK(rfr_programs_load(p));
  OK(rfr_program_capture(p, 0));
  for (int i = 0; i < 4; i++) {
    if (i == 3) OK(rfr_programs_set_rng(p, "left", &rng));
    OK(rfr_program_replay(p, 0, NULL, 0));
    mask_of(p, "left", mask[i]);
    OK(rfr_programs_get_rng(p, "left", &now));
    assert_int_equal(now.step, i == 3 ? 1 : i + 1);
    assert_int_equal(now.seed, rng.seed);
  }
  assert_true(differences(mask[0], mask[1]) > N / 4);
  assert_true(differences(mask[1], mask[2]) > N / 4);
  assert_memory_equal(mask[0], mask[3], sizeof mask[0]);
  rfr_programs_destroy(p);
}

/* ---- callables ---- */

/* y = dropout(w . f(dropout(x))). For an x of ones, y and dx are 0 where a mask is 0. */
static rfr_graphs *callable(rfr_recompute recompute, const char *schedule_text, rfr_schedule **schedule) {
  rfr_trace *t;
  rfr_graphs *g;
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  OK(rfr_schedule_parse(ctx, "test", schedule_text, strlen(schedule_text), schedule));
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, ((int64_t[]){N}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){N}));
  rfr_value tp = rfr_rng_stream(t, "tp");
  rfr_value h = rfr_silu(t, rfr_dropout(t, x, tp, P, 0));
  rfr_output(t, "y", rfr_dropout(t, rfr_mul(t, rfr_silu(t, h), w), tp, P, 0));
  OK(rfr_trace_finish(t));
  c.trace = t;
  o.schedule = *schedule;
  o.recompute = recompute;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  rfr_trace_destroy(t);
  return g;
}

static const rfr_type row = {.dtype = RFR_F32, .rank = 1, .shape = {N}};

/* Two microbatches; y and dx of each. */
static void run_callable(rfr_graphs *g, bool delayed, float out[2][2][N]) {
  static float one[N];
  rfr_tensor y, dx;
  for (int i = 0; i < N; i++) one[i] = 1;
  const rfr_binding x = {NULL, row, one};
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++) {
    OK(rfr_graphs_forward(g, 0, m, &x, 1, &y, 1));
    OK(rfr_graphs_read(g, &y, out[m][0]));
  }
  for (int m = 0; m < 2; m++) {
    OK(rfr_graphs_backward(g, 0, m, &x, 1, &dx, 1));
    OK(rfr_graphs_read(g, &dx, out[m][1]));
  }
  for (int m = 0; m < 2 && delayed; m++) OK(rfr_graphs_wgrad(g, 0, m));
  OK(rfr_graphs_end_step(g));
}

static void test_callables(void **state) {
  (void)state;
  static float out[2][3][2][2][N], w[N];
  static float mask[2][N];
  for (int i = 0; i < N; i++) w[i] = 1;
  for (int all = 0; all < 2; all++) {
    rfr_schedule *schedule;
    rfr_graphs *g = callable(all ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP,
                             all ? "0F0 0F1 0I0 0I1 0W0 0W1" : "0F0 0F1 0B0 0B1", &schedule);
    rfr_tensor x;
    rfr_graphs_memory m = {.size = sizeof m};
    OK(rfr_graphs_get_memory(g, &m));
    assert_int_equal(m.recomputed > 0, all);
    OK(rfr_graphs_tensor(g, "w", &x));
    OK(rfr_graphs_write(g, &x, w));
    for (int step = 0; step < 3; step++) {
      const rfr_rng rng = {77, step == 2 ? 0 : step};
      OK(rfr_graphs_set_rng(g, "tp", &rng));
      run_callable(g, all, out[all][step]);
    }
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
  }
  assert_memory_equal(out[0], out[1], sizeof out[0]);
  assert_memory_equal(out[0][0], out[0][2], sizeof out[0][0]);
  assert_true(differences(out[0][0][0][0], out[0][1][0][0]) > N / 4);
  assert_true(differences(out[0][0][0][0], out[0][0][1][0]) > N / 4);
  for (int site = 0; site < 2; site++) expected((rfr_rng){77, 0}, rfi_stream_id("tp"), (uint32_t)site, mask[site]);
  for (int i = 0; i < N; i++) {
    assert_int_equal(out[0][0][0][0][i] != 0, mask[0][i] != 0 && mask[1][i] != 0);
    assert_int_equal(out[0][0][0][1][i] != 0, mask[0][i] != 0 && mask[1][i] != 0);
  }
}

/* ---- steps of callables are counted ---- */

static const char *const two_of_one[] = {"0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"};

static void write_weight(rfr_graphs *g) {
  float w[N];
  rfr_tensor x;
  for (int i = 0; i < N; i++) w[i] = 1;
  OK(rfr_graphs_tensor(g, "w", &x));
  OK(rfr_graphs_write(g, &x, w));
}

static void state_is(rfr_graphs *g, const char *name, int64_t attempted, int64_t applied, int64_t seed,
                     int64_t skipped) {
  int64_t block[4];
  rfr_tensor x;
  OK(rfr_graphs_tensor(g, name, &x));
  OK(rfr_graphs_read(g, &x, block));
  assert_memory_equal(block, ((int64_t[]){attempted, applied, seed, skipped}), sizeof block);
}

static void rng_is(rfr_graphs *g, const char *stream, uint64_t seed, int64_t step) {
  rfr_rng rng;
  OK(rfr_graphs_get_rng(g, stream, &rng));
  assert_true(rng.seed == seed && rng.step == step);
}

/* Without a set call, masks differ from step to step, with and without recompute. After a rewind, after an abort and a
 * retry, and in new graphs, steps with the same number have the same masks. */
static void test_counted_steps(void **state) {
  (void)state;
  static float out[4][2][2][N], again[2][2][N], mask[2][N];
  for (int all = 0; all < 2; all++) {
    rfr_schedule *schedule[2];
    rfr_graphs *g = callable(all ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP, two_of_one[all], &schedule[0]);
    rfr_rng before;
    write_weight(g);
    state_is(g, "rng.tp", 0, 0, 0, 0);
    for (int step = 0; step < 4; step++) {
      rng_is(g, "tp", 0, step);
      run_callable(g, all, out[step]);
      for (int k = 0; k < step; k++) assert_true(differences(out[k][0][0], out[step][0][0]) > N / 4);
      for (int k = 0; k < step; k++) assert_true(differences(out[k][0][1], out[step][0][1]) > N / 4);
      for (int k = 0; k < 2; k++) expected((rfr_rng){0, step}, rfi_stream_id("tp"), (uint32_t)k, mask[k]);
      for (int i = 0; i < N; i++) {
        assert_int_equal(out[step][0][0][i] != 0, mask[0][i] != 0 && mask[1][i] != 0);
        assert_int_equal(out[step][0][1][i] != 0, mask[0][i] != 0 && mask[1][i] != 0);
      }
    }
    state_is(g, "rng.tp", 4, 4, 0, 0);
    OK(rfr_graphs_abort_step(g)); /* there is none */
    state_is(g, "rng.tp", 4, 4, 0, 0);
    OK(rfr_graphs_set_rng(g, "tp", &(rfr_rng){0, 1}));
    OK(rfr_graphs_get_rng(g, "tp", &before));
    OK(rfr_graphs_begin_step(g, NULL, 0));
    OK(rfr_graphs_abort_step(g)); /* skipped */
    state_is(g, "rng.tp", 2, 4, 0, 1);
    run_callable(g, all, again);
    assert_memory_equal(again, out[2], sizeof again);
    state_is(g, "rng.tp", 3, 5, 0, 1);
    OK(rfr_graphs_set_rng(g, "tp", &before));
    run_callable(g, all, again);
    assert_memory_equal(again, out[1], sizeof again);
    rfr_graphs *resumed = callable(RFR_RECOMPUTE_KEEP, two_of_one[all], &schedule[1]);
    write_weight(resumed);
    OK(rfr_graphs_get_rng(g, "tp", &before));
    OK(rfr_graphs_set_rng(resumed, "tp", &before));
    run_callable(resumed, all, again);
    assert_memory_equal(again, out[2], sizeof again);
    rfr_graphs_destroy(g);
    rfr_graphs_destroy(resumed);
    for (int i = 0; i < 2; i++) rfr_schedule_destroy(schedule[i]);
  }
}

/* y = dropout(x), with the step block and two streams; the callable advances the second stream itself. */
static rfr_trace *three_counts(void) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){N}));
  rfr_value step = rfr_step_block(t), left = rfr_rng_stream(t, "left"), right = rfr_rng_stream(t, "right");
  rfr_value h = rfr_dropout(t, rfr_dropout(t, rfr_dropout(t, x, step, P, 0), left, P, 0), right, P, 0);
  rfr_output(t, "y", h);
  rfr_output(t, "rng.left", rfr_step_end(t, left, rfr_fill(t, 0, RFR_I32, 1, (int64_t[]){1})));
  OK(rfr_trace_finish(t));
  return t;
}

/* Counters in the caller's memory, and counters that a callable writes, are not advanced. Warm-up and capture do not
 * count as steps. */
static void test_counts(void **state) {
  (void)state;
  static const rfr_type block = {.dtype = RFR_I64, .rank = 1, .shape = {4}};
  static float one[N];
  _Alignas(16) int64_t own[4] = {50, 40, 30, 20}, given[4] = {7, 0, 9, 0};
  const rfr_binding tensor = {"rng.right", block, own}, now = {"step", block, given}, x = {NULL, row, one};
  for (int eager = 0; eager < 2; eager++) {
    rfr_callable c = rfr_callable_default();
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    rfr_tensor y[2];
    c.trace = three_counts();
    o.tensors = &tensor, o.n_tensors = 1, o.warmup_iterations = 2, o.eager = eager;
    OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
    rfr_trace_destroy((rfr_trace *)c.trace);
    rng_is(g, NULL, 0, 0);
    rng_is(g, "left", 0, 0);
    for (int step = 1; step <= 3; step++) {
      OK(rfr_graphs_begin_step(g, &now, step == 2));
      OK(rfr_graphs_forward(g, 0, 0, &x, 1, y, 2));
      if (step == 2) rng_is(g, NULL, 9, 7);
      OK(rfr_graphs_end_step(g));
      rng_is(g, NULL, step < 2 ? 0 : 9, step < 2 ? step : 6 + step);
      rng_is(g, "left", 0, step);
      rng_is(g, "right", 30, 50);
    }
    assert_memory_equal(own, ((int64_t[]){50, 40, 30, 20}), sizeof own);
    rfr_graphs_destroy(g);
  }
}

/* ---- refusals ---- */

static void refused(rfr_status s, const char *slug, const char *text) {
  assert_true(s != RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  assert_non_null(strstr(rfr_last_error()->message, text));
}

static void test_errors(void **state) {
  (void)state;
  char name[102];
  rfr_rng rng = {1, 2};
  memset(name, 'n', sizeof name);
  name[101] = 0;
  for (int i = 0; i < 3; i++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_rng_stream(t, i == 0 ? name : i == 1 ? "" : NULL);
    refused(rfr_trace_status(t), "argument", "1 to 100 characters");
    rfr_trace_destroy(t);
  }
  rfr_programs *p = three_streams(false);
  refused(rfr_programs_get_rng(p, "absent", &rng), "program.name", "rng.absent");
  assert_int_equal(rng.seed, 0);
  refused(rfr_programs_set_rng(p, name, &rng), "program.name", "nnn");
  rfr_programs_destroy(p);
  rfr_schedule *schedule;
  rfr_graphs *g = callable(RFR_RECOMPUTE_KEEP, "0F0 0F1 0B0 0B1", &schedule);
  refused(rfr_graphs_set_rng(g, NULL, &rng), "program.name", "step");
  OK(rfr_graphs_begin_step(g, NULL, 0));
  refused(rfr_graphs_set_rng(g, "tp", &rng), "graphs.order", "end or abort the step first");
  OK(rfr_graphs_abort_step(g));
  OK(rfr_graphs_set_rng(g, "tp", &rng));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_addresses), rft_context_test(test_ranks),  rft_context_test(test_steps),
      rft_context_test(test_callables), rft_context_test(test_errors), rft_context_test(test_counted_steps),
      rft_context_test(test_counts),
  };
  return cmocka_run_group_tests_name("rng_state", tests, NULL, NULL);
}
