/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the caller that two callables use. It may overlap memory that a callable writes in two cases only: one
 * callable passes a result to the other, or both accumulate into a main gradient. This is checked at creation, after a
 * rebind, and for another schedule.
 */
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C };

/* Places x, y, dy and dx (one slot each), w and its main gradient; `at` is in multiples of a slot's size. */
static rfr_status try_disjoint(const float at[6], int rebound) {
  static _Alignas(16) float memory[16 * T * C];
  static const char *const port[4] = {"x", "y", "y", "x"};
  const rft_scene s = {.block = rft_block_linear, .blocks = 1, .dtype = RFR_F32};
  void *address[6];
  rfr_callable_fixed f[4];
  rfr_callable c = rfr_callable_default();
  rfr_trace *t = rft_block_trace(&s, 0);
  rfr_graphs *g;
  for (int k = 0; k < 6; k++) address[k] = memory + (int)(at[k] * T * C);
  for (int k = 0; k < 4; k++) f[k] = (rfr_callable_fixed){port[k], k >= 2, &address[k], 1};
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const rfr_binding w = {"b0.w", square, address[4]};
  const rfr_main_gradient gradient = rft_main_gradient("b0.w", square, address[5], 0),
                          before = rft_main_gradient("b0.w", square, memory + 12 * T * C, 0);
  rfr_graphs_options o = rfr_graphs_options_default();
  c.trace = t, c.fixed = f, c.n_fixed = 4;
  o.tensors = &w, o.n_tensors = 1;
  o.gradients = rebound ? &before : &gradient, o.n_gradients = 1;
  rfr_status status = rfr_graphs_create(ctx, &c, 1, &o, &g);
  if (status == RFR_OK && rebound) status = rfr_graphs_rebind(g, NULL, 0, &gradient, 1, NULL, 0);
  rfr_graphs_destroy(g);
  rfr_trace_destroy(t);
  return status;
}

/* Memory that a callable writes must not overlap any of its other memory, not even by one element. Memory that it only
 * reads may overlap. */
static void test_disjoint(void **state) {
  (void)state;
  static const float end = 1 - 4.0f / (T * C); /* overlaps the next part by one element; still a multiple of 16 bytes */
  static const struct {
    float at[6];
    const char *text; /* NULL: accepted */
  } cases[] = {{{0, 1, 2, 3, 4, 8}, NULL},
               {{0, 1, 0, 3, 4, 8}, NULL}, /* x and dy, which are read */
               {{0, 0, 2, 3, 4, 8}, "overlap in memory that is written"},
               {{0, end, 2, 3, 4, 8}, "\"x\" and \"y\" overlap in memory that is written"},
               {{end, 0, 2, 3, 4, 8}, "\"y\" and \"x\" overlap in memory that is written"},
               {{0, 1, 2, 2, 4, 8}, "the gradient of \""},
               {{0, 1, 2, 1, 4, 8}, "\"y\""},
               {{0, 1, 2, 3, 4, 4}, "the main gradient of \"b0.w\""},
               {{0, 1, 2, 3, 4, 3}, "the main gradient of \"b0.w\""},
               {{0, 4, 2, 3, 4, 8}, "\"b0.w\""},
               {{4.25f, 5.25f, 2, 3, 4, 8}, "\"b0.w\" and \"y\""}}; /* x lies within w, and w extends past x */
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int rebound = 0; rebound < 2; rebound++) {
      if (cases[i].text) rft_refused(try_disjoint(cases[i].at, rebound), "graphs.callable", cases[i].text);
      else OK(try_disjoint(cases[i].at, rebound));
    }
}

/* Two callables, in one stage or in one stage each. Each has one port in fixed memory; the array index is the
 * callable. */
typedef struct shared {
  const char *schedule, *port[2];
  bool gradient[2];
  int layers, at[2][2], n[2];
  bool half; /* the second callable's ports have half the size */
} shared;

static rfr_status try_shared(const shared *x, const char *later) {
  static _Alignas(16) float memory[3][T * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32},
                  half = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_BF16};
  void *address[2][2];
  rfr_callable_fixed f[2];
  rfr_callable c[2];
  rfr_schedule *schedule[2];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  rfr_trace *t[2] = {rft_block_trace(&s, 0), rft_block_trace(x->half ? &half : &s, 1)};
  for (int i = 0; i < 2; i++) {
    for (int k = 0; k < 2; k++) address[i][k] = (char *)memory[x->at[i][k] / 2] + x->at[i][k] % 2 * 16;
    f[i] = (rfr_callable_fixed){x->port[i], x->gradient[i], address[i], x->n[i]};
    c[i] = rfr_callable_default(), c[i].trace = t[i], c[i].fixed = &f[i], c[i].n_fixed = 1;
    const char *text = i == 0 || !later ? x->schedule : later;
    OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule[i]));
    OK(rfr_schedule_set_layers(schedule[i], &x->layers, 1));
  }
  o.schedule = schedule[0];
  rfr_status status = rfr_graphs_create(ctx, c, 2, &o, &g);
  if (later) {
    OK(status);
    const int calls = g->calls.n;
    status = rfr_graphs_reschedule(g, schedule[1]);
    if (status != RFR_OK) assert_int_equal(g->calls.n, calls);
  }
  rfr_graphs_destroy(g);
  for (int i = 0; i < 2; i++) {
    rfr_schedule_destroy(schedule[i]);
    rfr_trace_destroy(t[i]);
  }
  return status;
}

/* A later callable may read memory that an earlier one writes, if it always reads the result of its own microbatch. The
 * same holds for gradients in the other direction. No other written memory may overlap. */
static void test_disjoint_between(void **state) {
  (void)state;
  static const char two[] = "0F0 0F1 0B0 0B1", by_turns[] = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1";
  static const char late[] = "0F0 1F0 1I0 0I0 0W0 0F1 1W0 1F1 1I1 0I1 0W1 1W1"; /* 0F1 writes before 1W0 reads */
  static const char split[] = "0F0 1F0 1I0 0I0 0W0 1W0 0F1 1F1 1I1 0I1 0W1 1W1";
  static const char uneven[] = "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"; /* stage 0 has two microbatches in flight */
  static const struct {
    shared x;
    const char *text; /* NULL: accepted */
  } cases[] = {
      {{two, {"y", "x"}, {0, 0}, 2, {{0, 2}, {0, 2}}, {2, 2}}, NULL},
      {{two, {"y", "x"}, {1, 1}, 2, {{0, 2}, {0, 2}}, {2, 2}}, NULL},
      {{two, {"x", "x"}, {0, 0}, 2, {{0, 0}, {0, 0}}, {2, 2}}, NULL},
      {{two, {"x", "y"}, {0, 1}, 2, {{0, 2}, {2, 0}}, {2, 2}}, NULL}, /* all read */
      {{two, {"y", "x"}, {0, 0}, 2, {{0, 0}, {0, 0}}, {2, 2}},
       "callable \"0\": \"y\" and \"y\" overlap in memory that is written"},
      {{two, {"y", "x"}, {0, 0}, 2, {{0, 2}, {2, 0}}, {2, 2}}, "\"y\""},       /* another microbatch's result */
      {{two, {"x", "y"}, {0, 0}, 2, {{0, 2}, {0, 2}}, {2, 2}}, "callable \""}, /* the later one writes */
      {{two, {"x", "x"}, {1, 0}, 2, {{0, 2}, {0, 2}}, {2, 2}}, "the gradient of \"x\""},
      {{two, {"y", "y"}, {0, 0}, 2, {{0, 2}, {0, 2}}, {2, 2}}, "\"y\" and callable \""},
      {{two, {"y", "x"}, {0, 1}, 2, {{0, 2}, {0, 2}}, {2, 2}}, "the gradient of \"x\""},
      {{two, {"y", "x"}, {0, 0}, 2, {{0, 2}, {1, 3}}, {2, 2}},
       /* partial overlap of the slots */
       "callable \"0\": \"y\" and callable \"1\": \"x\" overlap in memory that is written"},
      {{by_turns, {"y", "x"}, {0, 0}, 1, {{0, 0}, {0, 0}}, {1, 1}, true}, "\"x\""}, /* partial overlap within a slot */
      {{by_turns, {"y", "x"}, {0, 0}, 1, {{0, 0}, {0, 0}}, {1, 1}}, NULL},
      {{by_turns, {"y", "x"}, {1, 1}, 1, {{0, 0}, {0, 0}}, {1, 1}}, NULL},
      {{split, {"y", "x"}, {0, 0}, 1, {{0, 0}, {0, 0}}, {1, 1}}, NULL},
      {{late, {"y", "x"}, {0, 0}, 1, {{0, 0}, {0, 0}}, {1, 1}}, "callable \""},
      {{late, {"y", "x"}, {1, 1}, 1, {{0, 0}, {0, 0}}, {1, 1}}, "the gradient of"},
      {{uneven, {"y", "x"}, {0, 0}, 1, {{0, 2}, {0, 0}}, {2, 1}}, "callable \""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (cases[i].text) rft_refused(try_shared(&cases[i].x, NULL), "graphs.callable", cases[i].text);
    else OK(try_shared(&cases[i].x, NULL));
  }
  const shared x = {split, {"y", "x"}, {0, 0}, 1, {{0, 0}, {0, 0}}, {1, 1}};
  OK(try_shared(&x, by_turns));
  rft_refused(try_shared(&x, late), "graphs.callable", "overlap in memory that is written");
}

/* Two weights, then their main gradients; each digit of `at` is the index of a C x C matrix in memory. */
static rfr_status try_squares(const char at[4], bool first_adds, bool second_adds, bool rebound) {
  static _Alignas(16) float memory[9][C * C];
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32};
  const rfr_type square = {.dtype = RFR_F32, .rank = 2, .shape = {C, C}};
  const bool adds[2] = {first_adds, second_adds};
  static const char *const name[2] = {"b0.w", "b1.w"};
  rfr_callable c[2];
  rfr_binding tensors[2][2];
  rfr_main_gradient gradients[2][2];
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g;
  for (int i = 0; i < 2; i++) {
    c[i] = rfr_callable_default();
    c[i].trace = rft_block_trace(&s, i);
    for (int k = 0; k < 2; k++) { /* k = 0: the addresses before the rebind */
      tensors[k][i] = (rfr_binding){name[i], square, memory[k ? at[i] - '0' : 4 + i]};
      gradients[k][i] = rft_main_gradient(name[i], square, memory[k ? at[2 + i] - '0' : 6 + i], adds[i]);
    }
  }
  o.tensors = tensors[!rebound], o.n_tensors = 2;
  o.gradients = gradients[!rebound], o.n_gradients = 2;
  rfr_status status = rfr_graphs_create(ctx, c, 2, &o, &g);
  if (rebound) {
    OK(status);
    status = rfr_graphs_rebind(g, tensors[1], 2, gradients[1], 2, NULL, 0);
  }
  rfr_graphs_destroy(g);
  for (int i = 0; i < 2; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
  return status;
}

static void test_disjoint_names(void **state) {
  (void)state;
  static const struct {
    const char *at;
    bool adds[2];
    const char *text; /* NULL: accepted */
  } cases[] = {{"0123", {0, 0}, NULL},
               {"0023", {0, 0}, NULL},
               {"0122", {1, 1}, NULL},
               {"0122", {0, 1}, "the main gradient of \"b0.w\""},
               {"0122", {1, 0}, "the main gradient of \"b1.w\""},
               {"0122", {0, 0}, "the main gradient of \"b1.w\""},
               {"0113", {1, 1}, "callable \"1\""},
               {"0120", {0, 0}, "callable \"0\""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int rebound = 0; rebound < 2; rebound++) {
      const rfr_status s = try_squares(cases[i].at, cases[i].adds[0], cases[i].adds[1], rebound);
      if (cases[i].text) rft_refused(s, "graphs.callable", cases[i].text);
      else OK(s);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_disjoint), rft_context_test(test_disjoint_between),
                                     rft_context_test(test_disjoint_names)};
  return cmocka_run_group_tests_name("shared memory of graphs", tests, NULL, NULL);
}
