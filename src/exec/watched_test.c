/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of watched values against sums in f64 over the values themselves, eager against replay, with and without
 * recomputation; what watching must not change; what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/context.h"

enum { ROWS = 6, MICROBATCHES = 2, IN = 19, HIDDEN = 37, OUT = 11 };

/* Two microbatches through two linear layers, SGD. */
static rfr_trace *record_step(bool has_step) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS * MICROBATCHES, IN}));
  rfr_value w[2] = {rfr_input(t, "up.weight", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){HIDDEN, IN})),
                    rfr_input(t, "down.weight", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){OUT, HIDDEN}))};
  rfr_value step = has_step ? rfr_step_block(t) : RFR_NONE, loss = RFR_NONE, g[2], skip;
  for (int m = 0; m < MICROBATCHES; m++) {
    char name[16];
    rfr_microbatch(t, m);
    rfr_scope(t, "mlp");
    rfr_value h = rfr_linear(t, rfr_slice(t, x, 0, m * ROWS, ROWS), w[0], RFR_NONE);
    rfr_value y = rfr_linear(t, rfr_gelu(t, h, 1), w[1], RFR_NONE);
    rfr_value part = rfr_sum(t, rfr_mul(t, y, y), -1);
    snprintf(name, sizeof name, "h%d", m);
    rfr_output(t, name, h);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_scope(t, "");
  const int64_t one = 1;
  for (int i = 0; i < 2; i++) g[i] = rfr_gradient(t, loss, w[i], RFR_F32);
  rfr_output(t, "g", g[0]);
  rfr_output(t, "loss", loss);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_value rate = rfr_fill(t, 0.001, RFR_F32, 1, &one);
  rfr_grad_norm(t, 2, g, &skip);
  for (int i = 0; i < 2; i++) rfr_sgd(t, w[i], g[i], RFR_NONE, RFR_NONE, rate, RFR_NONE, RFR_NONE, 0, 0, 1);
  if (has_step) rfr_step_end(t, step, skip);
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_programs *compile_watched(const rfr_trace *t, const char *pattern, int64_t slots, rfr_recompute recompute) {
  rfr_watch_options w = rfr_watch_options_default();
  rfr_compile_options o = rfr_compile_options_default();
  w.patterns = &pattern, w.n = 1, w.slots = slots;
  o.watch = &w;
  o.recompute = recompute;
  return rft_compile(t, &o);
}

static int find(const rfr_programs *p, const char *name) {
  for (int i = 0; rfr_programs_watched_name(p, i); i++)
    if (strcmp(rfr_programs_watched_name(p, i), name) == 0) return i;
  return -1;
}

static rfr_watched stats_of(const rfr_programs *p, int64_t step, const char *name) {
  rfr_watched w;
  const int i = find(p, name);
  if (i < 0) fail_msg("there is no %s", name);
  OK(rfr_programs_watched(p, step, i, &w));
  return w;
}

/* Adds f32 values to sums in f64. */
typedef struct sums {
  double n, sum, squares, largest, smallest, zeros, nans, infs;
} sums;
static void add(sums *s, const rfr_tensor *x) {
  for (int64_t i = 0; i < x->bytes / 4; i++) {
    const double v = ((const float *)x->data)[i], size = fabs(v);
    s->n++;
    if (isnan(v)) s->nans++;
    if (isinf(v)) s->infs++;
    if (!isfinite(v)) continue;
    s->sum += v, s->squares += v * v;
    if (size > s->largest) s->largest = size;
    if (size > 0 && (s->smallest == 0 || size < s->smallest)) s->smallest = size;
    s->zeros += v == 0;
  }
}
static void assert_stats(const rfr_watched *w, const sums *s) {
  const double n = s->n - s->nans - s->infs, rms = sqrt(s->squares / n);
  assert_true((double)w->elements == s->n && (double)w->nans == s->nans && (double)w->infs == s->infs);
  assert_true(fabs(w->mean - s->sum / n) <= 1e-12 * rms);
  assert_true(fabs(w->rms - rms) <= 1e-12 * rms);
  assert_true(w->largest == s->largest && w->smallest == s->smallest && w->zeros == s->zeros / s->n);
}

/* Row 1 is zeros; with `bad`, one element is NaN and one infinite. */
static void fill(rfr_programs *p, bool bad) {
  rfr_tensor x;
  rft_fill_inputs(p);
  OK(rfr_programs_tensor(p, "x", &x));
  memset((float *)x.data + IN, 0, IN * sizeof(float));
  if (bad) ((float *)x.data)[3] = NAN, ((float *)x.data)[ROWS * IN] = INFINITY;
  OK(rfr_programs_load(p));
}

static void check_values(rfr_programs *p, int64_t step) {
  sums h = {0}, g = {0}, w = {0};
  rfr_tensor x;
  for (int m = 0; m < MICROBATCHES; m++) {
    OK(rfr_program_output(p, 0, m ? "h1" : "h0", &x));
    add(&h, &x);
  }
  OK(rfr_program_output(p, 0, "g", &x));
  add(&g, &x);
  OK(rfr_programs_tensor(p, "up.weight", &x));
  add(&w, &x);
  const rfr_watched of_h = stats_of(p, step, "up.output"), of_g = stats_of(p, step, "grad:up.weight"),
                    of_w = stats_of(p, step, "up.weight");
  assert_stats(&of_h, &h);
  if (g.n > g.nans) assert_stats(&of_g, &g);
  if (w.n > w.nans) assert_stats(&of_w, &w);
}

static void test_values(void **state) {
  (void)state;
  for (int bad = 0; bad < 2; bad++) {
    rfr_trace *t = record_step(true);
    rfr_programs *p = compile_watched(t, "*", 2, RFR_RECOMPUTE_KEEP);
    fill(p, bad);
    for (int64_t step = 0; step < (bad ? 1 : 3); step++) {
      OK(rfr_program_run(p, 0));
      check_values(p, step);
    }
    rfr_watched w;
    if (!bad) { /* two slots */
      OK(rfr_programs_watched(p, 1, 0, &w));
      assert_int_equal(rfr_programs_watched(p, 0, 0, &w), RFR_INVALID);
      assert_string_equal(rfr_last_error()->slug, "program.order");
      assert_int_equal(rfr_programs_watched(p, 3, 0, &w), RFR_INVALID);
    }
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
}

static void assert_equal_rows(const rfr_programs *p, const rfr_programs *q, int64_t step) {
  int n = 0;
  for (; rfr_programs_watched_name(p, n); n++) {
    const char *name = rfr_programs_watched_name(p, n);
    const int k = find(q, name);
    rfr_watched a, b;
    OK(rfr_programs_watched(p, step, n, &a));
    if (k < 0) continue; /* a recomputed value may be removed by another fusion */
    OK(rfr_programs_watched(q, step, k, &b));
    assert_memory_equal(&a.elements, &b.elements, sizeof a - offsetof(rfr_watched, elements));
  }
  assert_true(n > 8);
}

static void assert_same_weights(const rfr_programs *p, const rfr_programs *q) {
  static const char *const names[] = {"up.weight", "down.weight"};
  rfr_tensor x, y;
  for (int i = 0; i < 2; i++) {
    OK(rfr_programs_tensor(p, names[i], &x));
    OK(rfr_programs_tensor(q, names[i], &y));
    assert_memory_equal(x.data, y.data, (size_t)x.bytes);
  }
}

/* Eager, replayed, recomputed and debugged programs have bitwise equal statistics, and the same weights as a program
 * that watches nothing. */
static void test_same_bits(void **state) {
  (void)state;
  rfr_trace *t = record_step(true);
  rfr_programs *plain = rft_compile(t, NULL), *eager = compile_watched(t, "*", 4, RFR_RECOMPUTE_KEEP);
  rfr_programs *replayed = compile_watched(t, "*", 4, RFR_RECOMPUTE_KEEP);
  rfr_programs *again = compile_watched(t, "*", 4, RFR_RECOMPUTE_ALL);
  const char *all = "*";
  rfr_watch_options w = rfr_watch_options_default();
  rfr_compile_options o = rfr_compile_options_default();
  w.patterns = &all, w.n = 1, w.slots = 4;
  o.watch = &w, o.debug = 1;
  rfr_programs *debugged = rft_compile(t, &o);
  rfr_programs *programs[] = {plain, eager, replayed, again, debugged};
  for (int i = 0; i < 5; i++) fill(programs[i], false);
  OK(rfr_program_capture(replayed, 0));
  for (int64_t step = 0; step < 4; step++) {
    for (int i = 0; i < 5; i++)
      if (i != 2) OK(rfr_program_run(programs[i], 0));
    OK(rfr_program_replay(replayed, 0, NULL, 0));
    assert_equal_rows(eager, replayed, step);
    assert_equal_rows(eager, again, step);
    assert_equal_rows(eager, debugged, step);
  }
  for (int i = 1; i < 5; i++) assert_same_weights(plain, programs[i]);
  assert_null(rfr_programs_watched_name(plain, 0));
  for (int i = 0; i < 5; i++) rfr_programs_destroy(programs[i]);
  rfr_trace_destroy(t);
}

/* ---- names ---- */

static void test_names(void **state) {
  (void)state;
  static const char *const names[] = {"up.weight",  "down.weight",     "grad:up.weight", "grad:down.weight",
                                      "up.output",  "down.output",     "mlp.gelu",       "mlp.mul",
                                      "mlp.gelu.1", "grad:down.input", "mlp.sum",        "up.output.1"};
  rfr_trace *t = record_step(true);
  rfr_programs *p = compile_watched(t, "*", 1, RFR_RECOMPUTE_KEEP);
  for (int i = 0; i < 12; i++) /* ambiguous names are numbered within a microbatch */
    if ((find(p, names[i]) >= 0) != (i != 8 && i < 10)) fail_msg("%s", names[i]);
  assert_non_null(strstr(rfr_program_report(p, 0, "lower"), "watched: \"*\": "));
  rfr_programs_destroy(p);
  p = compile_watched(t, "grad:*.weight", 1, RFR_RECOMPUTE_KEEP);
  assert_string_equal(rfr_programs_watched_name(p, 0), "grad:up.weight");
  assert_string_equal(rfr_programs_watched_name(p, 1), "grad:down.weight");
  assert_null(rfr_programs_watched_name(p, 2));
  assert_null(rfr_programs_watched_name(p, -1));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

static void assert_refused(const rfr_trace *t, const rfr_watch_options *w, const char *slug, const char *says) {
  rfr_programs *p;
  rfr_compile_options o = rfr_compile_options_default();
  o.watch = w;
  assert_int_equal(rfr_compile(ctx, 1, &t, NULL, &o, &p), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, says)) fail_msg("%s", rfr_last_error()->message);
  assert_null(p);
}

static void test_refused(void **state) {
  (void)state;
  static const char *const patterns[] = {"*", "*.wieght", "x", NULL};
  rfr_trace *t = record_step(true), *timeless = record_step(false);
  rfr_watch_options w = rfr_watch_options_default();
  w.n = 1, w.patterns = &patterns[0];
  assert_refused(timeless, &w, "argument", "record rfr_step_block");
  w.patterns = &patterns[1];
  assert_refused(t, &w, "watch.name", "the pattern \"*.wieght\" matches no value; the nearest is grad:up.weight");
  w.patterns = &patterns[2];
  assert_refused(t, &w, "watch.name", "matches only the input x (f32)");
  w.patterns = &patterns[3];
  assert_refused(t, &w, "argument", "pattern 0 is NULL");
  w.patterns = NULL;
  assert_refused(t, &w, "argument", "n 1, program 0 of 1 or slots 1 is out of range");
  w.patterns = patterns, w.program = 1;
  assert_refused(t, &w, "argument", "program 1 of 1");
  w.program = 0, w.slots = 0;
  assert_refused(t, &w, "argument", "slots 0 is out of range");
  w.slots = 1, w.size = 8;
  assert_refused(t, &w, "argument", "rfr_watch_options");
  rfr_programs *p = compile_watched(t, "up.weight", 1, RFR_RECOMPUTE_KEEP);
  rfr_watched x;
  assert_int_equal(rfr_programs_watched(p, 0, 1, &x), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "argument");
  assert_int_equal(rfr_programs_watched(p, -1, 0, &x), RFR_INVALID);
  assert_int_equal(rfr_programs_watched(p, 0, 0, NULL), RFR_INVALID);
  assert_int_equal(rfr_programs_watched(NULL, 0, 0, &x), RFR_INVALID);
  assert_int_equal(rfr_programs_watched(p, 0, 0, &x), RFR_INVALID); /* nothing was executed */
  assert_string_equal(rfr_last_error()->slug, "program.order");
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  rfr_trace_destroy(timeless);
}

/* ---- values that fusion removes ---- */

static void test_removed(void **state) {
  (void)state;
  const int64_t T = 6, C = 8, V = 33, one = 1;
  const char *pattern = "head.cross_entropy.lse";
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, &T);
  rfr_value w = rfr_input(t, "lm_head.weight", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){V, C}));
  rfr_step_block(t);
  rfr_scope(t, "head");
  rfr_value inv = rfr_fill(t, 0.5, RFR_F32, 1, &one);
  rfr_value loss = rfr_cross_entropy(t, rfr_linear(t, x, w, RFR_NONE), targets, inv, -100);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  rfr_watch_options o = rfr_watch_options_default();
  o.patterns = &pattern, o.n = 1;
  assert_refused(t, &o, "watch.name",
                 "matches only values that fusion removes, such as head.cross_entropy.lse; of the same layer");
  pattern = "targets";
  assert_refused(t, &o, "watch.name", "matches only the input targets (i32)");
  pattern = "lm_head.*";
  rfr_programs *p = compile_watched(t, pattern, 1, RFR_RECOMPUTE_KEEP);
  assert_non_null(strstr(rfr_program_report(p, 0, "lower"), "removes, such as lm_head.output"));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_values), rft_context_test(test_same_bits),
                                     rft_context_test(test_names), rft_context_test(test_refused),
                                     rft_context_test(test_removed)};
  return cmocka_run_group_tests_name("watched", tests, NULL, NULL);
}
