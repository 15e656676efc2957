/* SPDX-License-Identifier: Apache-2.0
 *
 * Debug mode: valid tensors are bitwise equal to those of graphs without it, for any schedule; dead buffers hold no
 * values. Errors of calls out of order name the reason: the microbatch is complete, not in flight, or there is no free
 * slot.
 */
#include <string.h>

#include "callable/graphed.h"
#include "support/graphs_scene.h"

enum { T = RFT_T, C = RFT_C };

/* Debug mode changes no result; a read of filled memory would make gradients NaN. */
static void test_bits(void **state) {
  (void)state;
  static const struct {
    const char *text;
    int microbatches, stages;
  } schedules[] = {{NULL, 2, 1},
                   {"0F0 0F1 0F2 0B0 0B1 0B2", 3, 1},
                   {"0F0 1F0 0F1 1F1 1I0 0I0 0F2 1F2 1I1 0I1 1I2 0I2 1W0 1W1 1W2 0W0 0W1 0W2", 3, 2},
                   {"0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2", 3, 1}};
  for (size_t i = 0; i < sizeof schedules / sizeof *schedules; i++)
    for (int kind = 0; kind < 4; kind++)
      rft_run_scene(&(rft_scene){.block = kind & 1 ? rft_block_experts : rft_block_transformer,
                                 .blocks = 2 * schedules[i].stages,
                                 .microbatches = schedules[i].microbatches,
                                 .dtype = kind & 1 ? RFR_F32 : RFR_BF16,
                                 .fuse = true,
                                 .schedule = schedules[i].text,
                                 .layers = 2,
                                 .linked = kind >> 1,
                                 .debug = true});
}

static bool is_poison(const void *data, int64_t bytes) {
  const unsigned char *x = data;
  for (int64_t i = 0; i < bytes; i++)
    if (x[i] != RFI_POISON) return false;
  return true;
}

static bool holds_values(const rfr_tensor *x) {
  for (int64_t i = 0; i < x->bytes / 4; i++)
    if (!(((const float *)x->data)[i] > -1e6f && ((const float *)x->data)[i] < 1e6f)) return false;
  return true;
}

/* Whether a stage's slot contains the fill byte everywhere except in `but`. */
static bool slot_is_poison(const rfr_graphs *g, int stage, int slot, const rfr_tensor *but) {
  const rfi_stage_plan *s = &g->stage[stage];
  const unsigned char *at = rfi_graphs_slot(g, s, slot), *kept = but->data;
  return is_poison(at, kept - at) && is_poison(kept + but->bytes, at + s->bytes - kept - but->bytes);
}

static void test_dead_buffers(void **state) {
  (void)state;
  static rft_buffers b;
  const rft_scene s = {.block = rft_block_mlp,
                       .blocks = 1,
                       .microbatches = 2,
                       .dtype = RFR_F32,
                       .debug = true,
                       .layers = 1,
                       .schedule = "0F0 0F1 0I0 0I1 0W1 0F2 0B2 0W0"};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const rfr_type type = rft_activation(&s);
  rfr_binding x[3], dy[3];
  rfr_tensor y[3], dx[3];
  for (int i = 0; i < g->m.store.n; i++)
    if (g->m.store.named[i].tensor.type.dtype == RFR_F32)
      rft_fill_by(&g->m.store.named[i].tensor, 3 + (uint64_t)i, 0.5f);
  for (int m = 0; m < 3; m++) {
    rft_draw(&s, b.x[m][0], 0, m, 1);
    rft_draw(&s, b.dx[m][1], 0, m, 2);
    x[m] = (rfr_binding){NULL, type, b.x[m][0]};
    dy[m] = (rfr_binding){NULL, type, b.dx[m][1]};
  }
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 2; m++) OK(rfr_graphs_forward(g, 0, m, &x[m], 1, &y[m], 1));
  for (int m = 0; m < 2; m++) OK(rfr_graphs_backward(g, 0, m, &dy[m], 1, &dx[m], 1));
  assert_true(holds_values(&y[0]) && holds_values(&y[1]) && holds_values(&dx[0]) && holds_values(&dx[1]));
  assert_true(is_poison(rfi_address(&g->m.layout, RFI_REGION_SHARED, 0), g->memory.shared_bytes));
  OK(rfr_graphs_wgrad(g, 0, 1)); /* the last call of microbatch 1: its output is dead, its input gradient is not */
  assert_true(holds_values(&y[0]) && holds_values(&dx[0]) && holds_values(&dx[1]) && is_poison(y[1].data, y[1].bytes));
  assert_true(slot_is_poison(g, 0, rfr_schedule_slot(schedule, 0, 1), &dx[1]));
  OK(rfr_graphs_forward(g, 0, 2, &x[2], 1, &y[2], 1)); /* in the slot of microbatch 1 */
  assert_int_equal(rfr_schedule_slot(schedule, 0, 2), rfr_schedule_slot(schedule, 0, 1));
  assert_true(holds_values(&y[0]) && holds_values(&dx[0]) && !holds_values(&dx[1]) && holds_values(&y[2]));
  OK(rfr_graphs_backward(g, 0, 2, &dy[2], 1, &dx[2], 1));
  OK(rfr_graphs_wgrad(g, 0, 0));
  assert_true(holds_values(&dx[0]) && holds_values(&dx[2]) && is_poison(y[0].data, y[0].bytes));
  OK(rfr_graphs_end_step(g));
  assert_true(holds_values(&dx[0]) && holds_values(&dx[2]));
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < 3; m++) assert_true(is_poison(dx[m].data, dx[m].bytes));
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

/* y = gelu(x): no op has a gradient. */
static rfr_trace *without_gradients(void) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_output(t, "y", rfr_gelu(t, rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C})), 1));
  OK(rfr_trace_finish(t));
  return t;
}

/* Without gradients, outputs are valid until the slot's next forward or the next step. This holds in inference, and in
 * a training set whose callables have no backward. */
static void test_no_gradients(void **state) {
  (void)state;
  static float x[2][T * C];
  static const char *const schedules[] = {NULL, "0F0 0F1"};
  const rft_scene s = {.block = rft_block_linear, .blocks = 2, .dtype = RFR_F32, .frozen = 3};
  const rfr_type type = rft_activation(&s);
  for (int kind = 0; kind < 3; kind++) { /* kind 2 trains */
    const char *const text = schedules[kind % 2];
    rfr_schedule *schedule = NULL;
    rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
    rfr_graphs_options o = rfr_graphs_options_default();
    rfr_graphs *g;
    rfr_tensor y[2][2];
    if (text) OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &schedule));
    if (text) OK(rfr_schedule_set_layers(schedule, &(int){2}, 1));
    for (int i = 0; i < 2; i++) {
      c[i].trace = kind == 2 ? without_gradients() : rft_block_trace(&s, i);
      c[i].inference = kind < 2;
      rft_fill_by(&(rfr_tensor){.type = type, .data = x[i]}, 5 + (uint64_t)i, 1);
    }
    o.debug = 1, o.schedule = schedule;
    OK(rfr_graphs_create(ctx, c, 2, &o, &g));
    for (int step = 0; step < 2; step++) {
      OK(rfr_graphs_begin_step(g, NULL, 0));
      for (int i = 0; step == 1 && i < 2; i++) assert_true(is_poison(y[1][i].data, y[1][i].bytes));
      for (int m = 0; m < 2; m++)
        for (int i = 0; i < 2; i++) {
          const rfr_binding in = {NULL, type, x[m]};
          OK(rfr_graphs_forward(g, i, m, &in, 1, &y[m][i], 1));
          for (int k = 0; k <= i; k++) assert_true(holds_values(&y[m][k]));
        }
      OK(rfr_graphs_end_step(g));
      for (int i = 0; i < 2; i++) assert_true(holds_values(&y[1][i]));
    }
    rfr_graphs_destroy(g);
    rfr_schedule_destroy(schedule);
    for (int i = 0; i < 2; i++) rfr_trace_destroy((rfr_trace *)c[i].trace);
  }
}

/* ---- error texts of refused calls ---- */

static void test_reasons(void **state) {
  (void)state;
  static rft_buffers b;
  const rft_scene s = {.block = rft_block_linear,
                       .blocks = 2,
                       .microbatches = 3,
                       .dtype = RFR_F32,
                       .layers = 2,
                       .schedule = "0F0 0F1 0B0 0F2 0B1 0B2"};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const rfr_binding x = {NULL, rft_activation(&s), b.x[0][0]};
  rfr_tensor y;
  const char *const slug = "graphs.order";
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_refused(rfr_graphs_backward(g, 1, 0, &x, 1, &y, 1), slug, "microbatch 0, which is not in flight: the schedule");
  for (int m = 0; m < 2; m++)
    for (int k = 0; k < 2; k++) rft_forward(g, &s, &b, k, m);
  rft_refused(rfr_graphs_forward(g, 0, 2, &x, 1, &y, 1), slug, "but all 2 slots hold a microbatch");
  rft_refused(rfr_graphs_backward(g, 1, 1, &x, 1, &y, 1), slug, "microbatch 1: the schedule expects");
  for (int k = 1; k >= 0; k--) rft_backward(g, &s, &b, k, 0);
  rft_refused(rfr_graphs_backward(g, 1, 0, &x, 1, &y, 1), slug, "microbatch 0, which is complete and has no slot");
  rft_refused(rfr_graphs_wgrad(g, 1, 2), slug, "microbatch 2, which is not in flight");
  for (int k = 0; k < 2; k++) rft_forward(g, &s, &b, k, 2);
  rft_refused(rfr_graphs_forward(g, 0, 3, &x, 1, &y, 1), slug, "microbatch 3, but all 2 slots hold a microbatch");
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
  rft_scene endless = s;
  endless.schedule = NULL;
  g = rft_make_graphs(&endless, &schedule);
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int k = 0; k < 2; k++) rft_forward(g, &s, &b, k, 0);
  rft_refused(rfr_graphs_forward(g, 0, 1, &x, 1, &y, 1), slug, "but all 1 slots hold a microbatch");
  for (int k = 1; k >= 0; k--) rft_backward(g, &s, &b, k, 0);
  rft_refused(rfr_graphs_backward(g, 1, 0, &x, 1, &y, 1), slug, "which is complete");
  rft_refused(rfr_graphs_backward(g, 1, 1, &x, 1, &y, 1), slug, "which is not in flight");
  rfr_graphs_destroy(g);
}

/* A refused call writes neither to the arena nor to its results. */
static void test_refused_calls_write_nothing(void **state) {
  (void)state;
  static rft_buffers b;
  static _Alignas(16) float moved[C * C];
  const rft_scene s = {.block = rft_block_linear,
                       .blocks = 1,
                       .microbatches = 2,
                       .dtype = RFR_F32,
                       .layers = 1,
                       .schedule = "0F0 0F1 0I0 0I1 0W0 0W1"};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const rfr_type type = rft_activation(&s);
  const rfr_binding x = {NULL, type, b.x[0][0]};
  rfr_binding bad[4] = {x, x, x, {"z", type, b.x[0][0]}};
  rfr_tensor y, untouched, poisoned;
  const size_t bytes = (size_t)g->memory.planned_bytes;
  unsigned char *before = test_malloc(bytes);
  bad[0].type.shape[0]++, bad[1].type.dtype = RFR_BF16, bad[2].data = NULL;
  OK(rfr_graphs_begin_step(g, NULL, 0));
  rft_draw(&s, b.x[0][0], 0, 0, 1);
  rft_forward(g, &s, &b, 0, 0);
  memcpy(before, g->m.layout.arena, bytes);
  memset(&poisoned, 0x77, sizeof poisoned);
  y = untouched = poisoned;
  for (int i = 0; i < 4; i++) assert_int_equal(rfr_graphs_forward(g, 0, 1, &bad[i], 1, &y, 1), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_forward(g, 0, 1, &x, 0, &y, 1), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_forward(g, 0, 1, &x, 1, &y, 0), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_forward(g, 0, 2, &x, 1, &y, 1), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_backward(g, 0, 0, &x, 1, &y, 1), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_wgrad(g, 0, 0), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_end_step(g), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_begin_step(g, NULL, 0), RFR_MISMATCH);
  assert_memory_equal(before, g->m.layout.arena, bytes);
  rft_forward(g, &s, &b, 0, 1);
  memcpy(before, g->m.layout.arena, bytes);
  for (int i = 0; i < 3; i++) assert_int_equal(rfr_graphs_backward(g, 0, 0, &bad[i], 1, &y, 1), RFR_MISMATCH);
  assert_int_equal(rfr_graphs_forward(g, 0, 2, &x, 1, &y, 1), RFR_MISMATCH); /* too many microbatches in flight */
  OK(rfr_graphs_abort_step(g));
  const rfr_binding elsewhere = {"b0.w", {.dtype = RFR_F32, .rank = 2, .shape = {C, C}}, moved};
  assert_int_equal(rfr_graphs_begin_step(g, &elsewhere, 1), RFR_MISMATCH);
  assert_memory_equal(before, g->m.layout.arena, bytes);
  assert_memory_equal(&y, &untouched, sizeof y);
  test_free(before);
  rfr_graphs_destroy(g);
  rfr_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_bits), rft_context_test(test_dead_buffers),
                                     rft_context_test(test_no_gradients), rft_context_test(test_reasons),
                                     rft_context_test(test_refused_calls_write_nothing)};
  return cmocka_run_group_tests_name("debugging graphs", tests, NULL, NULL);
}
