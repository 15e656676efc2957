/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs in callables with group sizes from the caller: new sizes at each replay, W with I or separate, with and
 * without recompute, captured or eager, all bitwise equal; invalid group sizes are reported once, with step, callable,
 * layer, microbatch and group.
 *
 *   graphs_splits_test [--device NAME]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "callable/graphed.h"
#include "core/rng.h"
#include "support/device.h"
#include "support/graphs_scene.h"

enum { ROWS = 29, IN = 16, HIDDEN = 24, GROUPS = 5, MICROBATCHES = 2, STEPS = 12, VARIANTS = 8 };

static const rfr_type rows_type = {.dtype = RFR_F32, .rank = 2, .shape = {ROWS, IN}};
static const rfr_type splits_type = {.dtype = RFR_I32, .rank = 1, .shape = {GROUPS}};

static rft_room room; /* for the splits of the current test */

static int set_up(void **state) {
  const int failed = rft_context_setup(state);
  if (!failed) room = rft_room_open(ctx, GROUPS * sizeof(int32_t));
  return failed;
}
static int tear_down(void **state) {
  rft_room_close(&room);
  return rft_context_teardown(state);
}

static rfr_trace *record(bool again) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, rows_type.shape);
  rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I32, 1, splits_type.shape);
  rfr_value up = rfr_input(t, "up", RFR_ROLE_TRAINABLE, RFR_F32, 3, ((int64_t[]){GROUPS, HIDDEN, IN}));
  rfr_value down = rfr_input(t, "down", RFR_ROLE_TRAINABLE, RFR_F32, 3, ((int64_t[]){GROUPS, IN, HIDDEN}));
  rfr_scope(t, "layer3.experts");
  rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
  if (again) rfr_set_recompute(t, RFR_POLICY_RECOMPUTE);
  rfr_value h = rfr_silu(t, rfr_grouped_linear(t, x, up, offsets, RFR_NONE, RFR_NONE));
  rfr_set_recompute(t, RFR_POLICY_AUTO);
  rfr_output(t, "y", rfr_add(t, x, rfr_grouped_linear(t, h, down, offsets, RFR_NONE, RFR_NONE)));
  OK(rfr_trace_finish(t));
  return t;
}

static const char *const orders[] = {"0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"};

/* A bit mask: 1: separate W, 2: recompute between the GEMMs, 4: eager. */
static rfr_graphs *create(int variant, bool scheduled) {
  rfr_trace *t = record(variant >> 1 & 1);
  rfr_callable c = rfr_callable_default();
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_schedule *schedule = NULL;
  rfr_graphs *g;
  rfr_tensor w;
  const char *order = orders[variant & 1];
  if (scheduled) OK(rfr_schedule_parse(ctx, "test", order, strlen(order), &schedule));
  c.name = "experts";
  c.trace = t;
  o.schedule = schedule;
  o.eager = variant >> 2 & 1;
  OK(rfr_graphs_create(ctx, &c, 1, &o, &g));
  for (int i = 0; i < 2; i++) {
    OK(rfr_graphs_tensor(g, i ? "up" : "down", &w));
    rfr_tensor copy = rft_of_graphs(g, &w);
    rft_fill_by(&copy, (uint64_t)i + 1, 0.3f);
    OK(rfr_graphs_write(g, &w, copy.data));
    free(copy.data);
  }
  rfr_trace_destroy(t);
  rfr_schedule_destroy(schedule);
  return g;
}

/* Group sizes are arbitrary and may be 0; some rows may belong to no group. */
static void draw_splits(int step, int m, int32_t *splits) {
  int left = ROWS;
  for (int k = 0; k < GROUPS; k++) {
    const uint32_t word = rfi_draw4(rfi_stream_key(9, 1), (uint64_t)k, 0, (uint32_t)m, (uint64_t)step).v[0];
    splits[k] = word % 4 == 0 ? 0 : (int32_t)(word / 4 % (uint32_t)(left + 1));
    left -= splits[k];
  }
}

typedef struct results {
  float y[MICROBATCHES][ROWS * IN], dx[MICROBATCHES][ROWS * IN];
  float gradient[2][GROUPS * HIDDEN * IN];
} results;

static void forward(rfr_graphs *g, int step, int m, int32_t *splits, float *y) {
  static float x[ROWS * IN];
  rfr_tensor out;
  rft_fill_by(&(rfr_tensor){.type = rows_type, .data = x}, (uint64_t)(100 * step + m), 1);
  const void *there = rft_room_put(&room, 0, splits, GROUPS * sizeof *splits);
  const rfr_binding in[2] = {{"x", rows_type, x}, {"splits", splits_type, there}};
  OK(rfr_graphs_forward(g, 0, m, in, 2, &out, 1));
  OK(rfr_graphs_read(g, &out, y));
}

static void backward(rfr_graphs *g, int step, int m, float *dx) {
  static float dy[ROWS * IN];
  rfr_tensor out[2];
  rft_fill_by(&(rfr_tensor){.type = rows_type, .data = dy}, (uint64_t)(100 * step + m + 50), 0.1f);
  const rfr_binding in = {"y", rows_type, dy};
  OK(rfr_graphs_backward(g, 0, m, &in, 1, out, 2));
  OK(rfr_graphs_read(g, &out[0], dx));
}

/* A step that is not ended; `spoil`: microbatch 1 has an invalid split. */
static void run_step(rfr_graphs *g, int variant, int step, int32_t spoil, results *r) {
  int32_t splits[MICROBATCHES][GROUPS];
  OK(rfr_graphs_begin_step(g, NULL, 0));
  for (int m = 0; m < MICROBATCHES; m++) {
    draw_splits(step, m, splits[m]);
    if (m == 1 && spoil) splits[m][2] = spoil;
    forward(g, step, m, splits[m], r->y[m]);
  }
  for (int m = 0; m < MICROBATCHES; m++) backward(g, step, m, r->dx[m]);
  for (int m = 0; m < MICROBATCHES && variant & 1; m++) OK(rfr_graphs_wgrad(g, 0, m));
  for (int i = 0; i < 2; i++) {
    rfr_tensor x;
    OK(rfr_graphs_gradient(g, i ? "up" : "down", &x));
    OK(rfr_graphs_read(g, &x, r->gradient[i]));
  }
}

/* ---- fresh splits ---- */

static void test_fresh_splits(void **state) {
  (void)state;
  static results first[STEPS], now;
  for (int variant = 0; variant < VARIANTS; variant++) {
    rfr_graphs *g = create(variant, true);
    rfr_graphs_memory m = {.size = sizeof m};
    OK(rfr_graphs_get_memory(g, &m));
    assert_int_equal(m.recomputed > 0, variant >> 1 & 1);
    for (int step = 0; step < STEPS; step++) {
      run_step(g, variant, step, 0, &now);
      OK(rfr_graphs_end_step(g));
      if (variant == 0) first[step] = now;
      assert_memory_equal(&now, &first[step], sizeof now);
    }
    rfr_graphs_destroy(g);
  }
  assert_memory_not_equal(&first[0], &first[1], sizeof first[0]);
}

/* ---- invalid splits ---- */

/* A negative size, and a size that exceeds the rows: reported once; the other steps are unchanged. */
static void test_bad_splits(void **state) {
  (void)state;
  static results good, now;
  for (int variant = 0; variant < VARIANTS; variant++) {
    rfr_graphs *g = create(variant, true), *other = create(variant, true);
    for (int step = 0; step < 6; step++) {
      const int32_t spoil = step == 2 ? -3 : step == 4 ? ROWS + 1 : 0;
      run_step(other, variant, step, 0, &good);
      OK(rfr_graphs_end_step(other));
      run_step(g, variant, step, spoil, &now);
      if (!spoil) {
        OK(rfr_graphs_end_step(g));
        assert_memory_equal(&now, &good, sizeof now);
        continue;
      }
      char text[128];
      snprintf(text, sizeof text, "step %d, callable \"experts\", in layer3.experts, microbatch 1: the size of group 2",
               step);
      /* a device may report it later */
      rfr_status s = step == 2 ? rfr_graphs_wait(g) : rfr_graphs_end_step(g);
      if (s == RFR_OK && step == 4) s = rfr_graphs_wait(g);
      rft_refused(s, "graphs.splits", text);
      if (step == 2) OK(rfr_graphs_end_step(g));                 /* reported once */
      assert_memory_equal(now.y[0], good.y[0], sizeof now.y[0]); /* the other microbatch has valid splits */
    }
    rfr_graphs_destroy(g);
    rfr_graphs_destroy(other);
  }
}

/* Errors of an aborted step are never reported. */
static void test_aborted(void **state) {
  (void)state;
  static results r;
  rfr_graphs *g = create(0, true);
  run_step(g, 0, 0, -1, &r);
  OK(rfr_graphs_abort_step(g));
  OK(rfr_graphs_wait(g));
  run_step(g, 0, 1, 0, &r);
  OK(rfr_graphs_end_step(g));
  OK(rfr_graphs_wait(g));
  rfr_graphs_destroy(g);
}

/* More forwards than ring entries: each entry is read before it is overwritten, and the first error is reported. */
static void test_many_forwards(void **state) {
  (void)state;
  static float y[ROWS * IN], dx[ROWS * IN];
  int32_t splits[GROUPS];
  for (int bad = 0; bad < 200; bad += 66) {
    rfr_graphs *g = create(0, false);
    OK(rfr_graphs_begin_step(g, NULL, 0));
    for (int m = 0; m < 200; m++) {
      draw_splits(0, m, splits);
      if (m == bad || m == bad + 1) splits[m == bad ? 4 : 0] = -1;
      forward(g, 0, m, splits, y);
      backward(g, 0, m, dx);
    }
    char text[64];
    snprintf(text, sizeof text, "microbatch %d: the size of group 4", bad);
    const rfr_status s = rfr_graphs_end_step(g);
    rft_refused(s == RFR_OK ? rfr_graphs_wait(g) : s, "graphs.splits", text);
    OK(rfr_graphs_begin_step(g, NULL, 0));
    OK(rfr_graphs_abort_step(g));
    rfr_graphs_destroy(g);
  }
}

#define in_room(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(int argc, char **argv) {
  if (!rft_device_named(&argc, argv)) return 77;
  const struct CMUnitTest tests[] = {
      in_room(test_fresh_splits),
      in_room(test_bad_splits),
      in_room(test_aborted),
      in_room(test_many_forwards),
  };
  return cmocka_run_group_tests_name("graphs_splits", tests, NULL, NULL);
}
