/* SPDX-License-Identifier: Apache-2.0
 *
 * The side stream: which ops it gets, which ops wait for it, and that ops that may run at the same time never share a
 * byte that one of them writes, in random programs.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/base.h"
#include "core/rng.h"
#include "pass/branch.h"
#include "pass/plan.h"
#include "support/context.h"

static uint32_t draw(uint64_t seed, uint64_t i) { return rfi_draw4(rfi_stream_key(seed, 4), i, 0, 0, 0).v[0]; }

/* Op indices: op 0 computes a. On the side stream: 1 and 4, both read a; 4 may start together with 2. On the main
 * stream: 2 and 3, which read a; 5, which reads the result of 1; 6. */
static void test_waits(void **state) {
  (void)state;
  rfr_trace *t;
  rfi_side_op *side;
  const int64_t size = 100;
  int64_t workspace[7] = {0};
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value a = rfr_fill(t, 1, RFR_F32, 1, &size);
  rfr_set_phase(t, RFR_PHASE_WGRAD);
  rfr_value b = rfr_copy(t, a);
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  rfr_copy(t, rfr_copy(t, a));
  rfr_set_phase(t, RFR_PHASE_WGRAD);
  rfr_copy(t, a);
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  rfr_value e = rfr_copy(t, b);
  rfr_copy(t, e);
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  assert_int_equal(rfi_branch(t, workspace, &side), RFR_OK);
  assert_non_null(side);
  const rfi_side_op wanted[7] = {[1] = {1, 5}, [4] = {2, 5}};
  assert_memory_equal(side, wanted, sizeof wanted);
  rfi_free(ctx, side);
  workspace[1] = workspace[4] = 32 << 20; /* a kernel with a workspace of this size fills the device */
  assert_int_equal(rfi_branch(t, workspace, &side), RFR_OK);
  assert_null(side);
  rfr_trace_destroy(t);
}

/* The main stream waits for a gather at its reader. It waits for a reduction when a later reduction, with a dgrad op
 * between the two, has begun, or at the reader of the result if that is earlier. */
static void check_collectives(rfr_phase between, const rfi_side_op wanted[12]) {
  rfr_trace *t;
  rfi_side_op *side;
  const int64_t size = 100, workspace[12] = {0};
  rfr_value reduced[3];
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value a = rfr_fill(t, 1, RFR_F32, 1, &size), all = rfr_all_gather(t, a, 2);
  rfr_set_phase(t, RFR_PHASE_WGRAD); /* in a trace with collectives small ops stay on the main stream */
  rfr_copy(t, a);
  rfr_copy(t, all);
  rfr_set_phase(t, between);
  for (int k = 0; k < 3; k++) {
    reduced[k] = rfr_reduce_scatter(t, all, 2);
    rfr_copy(t, a);
  }
  rfr_copy(t, reduced[0]);
  rfr_copy(t, reduced[2]);
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  assert_int_equal(rfi_branch(t, workspace, &side), RFR_OK);
  assert_non_null(side);
  assert_memory_equal(side, wanted, 12 * sizeof *wanted);
  rfi_free(ctx, side);
  rfr_trace_destroy(t);
}

static void test_collectives(void **state) {
  (void)state;
  check_collectives(RFR_PHASE_DGRAD, (rfi_side_op[12]){[1] = {1, 3}, [4] = {4, 7}, [6] = {6, 9}, [8] = {8, 11}});
  check_collectives(RFR_PHASE_FORWARD, (rfi_side_op[12]){[1] = {1, 3}, [4] = {4, 7}, [6] = {6, 9}, [8] = {8, 11}});
  check_collectives(RFR_PHASE_WGRAD, (rfi_side_op[12]){[1] = {1, 3}, [4] = {4, 10}, [6] = {6, 12}, [8] = {8, 11}});
}

/* Random copies of earlier values; a third of them have phase wgrad. */
static rfr_trace *random_trace(uint64_t seed, int n) {
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value last[8];
  for (int i = 0; i < n; i++) {
    const uint32_t d = draw(seed, (uint64_t)i);
    const int64_t size = 16 * (1 + d / 64 % 200);
    rfr_set_phase(t, d % 3 == 0 ? RFR_PHASE_WGRAD : RFR_PHASE_DGRAD);
    last[i % 8] = i < 8 || d / 8 % 4 == 0 ? rfr_fill(t, 1, RFR_F32, 1, &size) : rfr_copy(t, last[d / 1024 % 8]);
  }
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  return t;
}

static const rfi_buffer *buffer_of(const rfi_plan *p, rfr_value storage) {
  for (int i = 0; i < p->n; i++)
    if (p->buffer[i].value == storage) return &p->buffer[i];
  return NULL;
}

/* The storage of op i: its workspace, or that of its k-th operand or result. */
static const rfi_buffer *nth(const rfr_trace *t, const rfi_plan *p, int i, int k) {
  const rfi_opr *op = &t->ops[i];
  if (k < op->n_in + op->n_out) return buffer_of(p, t->values[k < op->n_in ? op->in[k] : op->out[k - op->n_in]].base);
  for (int b = 0; b < p->n; b++)
    if (p->buffer[b].value == RFR_NONE && p->buffer[b].first == i) return &p->buffer[b];
  return NULL;
}

static void check_pair(const rfr_trace *t, const rfi_plan *p, int i, int j) {
  const rfi_opr *a = &t->ops[i], *b = &t->ops[j];
  for (int x = 0; x <= a->n_in + a->n_out; x++)
    for (int y = 0; y <= b->n_in + b->n_out; y++) {
      const rfi_buffer *u = nth(t, p, i, x), *v = nth(t, p, j, y);
      if (!u || !v || (x < a->n_in && y < b->n_in)) continue;
      assert_true(u->offset + u->bytes <= v->offset || v->offset + v->bytes <= u->offset);
    }
}

static void test_bytes(void **state) {
  (void)state;
  int pairs = 0;
  for (uint64_t seed = 0; seed < 60; seed++) {
    rfr_trace *t = random_trace(seed, 40 + (int)seed);
    int64_t *workspace = calloc((size_t)t->n_ops, sizeof *workspace);
    for (int i = 0; i < t->n_ops; i += 5) workspace[i] = 1000 + i;
    rfi_side_op *side;
    rfi_plan p;
    assert_int_equal(rfi_branch(t, workspace, &side), RFR_OK);
    assert_non_null(side);
    assert_int_equal(rfi_plan_make(t, workspace, side, &p), RFR_OK);
    for (int i = 0; i < t->n_ops; i++)
      for (int j = side[i].from; j < side[i].until; j++) {
        if (side[j].until) continue; /* both on the side stream, so one runs after the other */
        check_pair(t, &p, i, j);
        pairs++;
      }
    rfi_plan_deinit(&p);
    rfi_free(ctx, side);
    rfr_trace_destroy(t);
    free(workspace);
  }
  assert_true(pairs > 1000);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_waits), rft_context_test(test_collectives),
                                     rft_context_test(test_bytes)};
  return cmocka_run_group_tests_name("branch", tests, NULL, NULL);
}
