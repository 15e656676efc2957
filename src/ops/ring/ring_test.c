/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings over many steps: each step sees its own entry and writes no other; a second thread never finds a step's number
 * in another step's entry.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "support/op_check.h"

enum { SLOTS = 3, METRICS = 3 };

static const rfi_kernel *kernel_of(rfi_opcode code) {
  const char *isas[3];
  rft_isas(isas);
  return rfi_cpu_kernel(isas[0], code);
}

static void test_read_follows_the_step(void **state) {
  int32_t ring[SLOTS][2] = {{10, 11}, {20, 21}, {30, 31}}, x[2];
  int64_t step[4] = {0};
  rfi_arg in[2] = {{ring, {.dtype = RFR_I32, .rank = 2, .shape = {SLOTS, 2}}, {2, 1}},
                   {step, {.dtype = RFR_I64, .rank = 1, .shape = {4}}, {1}}};
  rfi_arg out[1] = {{x, {.dtype = RFR_I32, .rank = 1, .shape = {2}}, {1}}};
  rfi_call call = {.n_in = 2, .n_out = 1, .in = in, .out = out, .threads = 1};
  (void)state;
  for (step[0] = 0; step[0] < 10; step[0]++) {
    assert_int_equal(kernel_of(RFI_OP_ring_read)->run(&call), RFR_OK);
    assert_memory_equal(x, ring[step[0] % SLOTS], sizeof x);
  }
}

typedef struct metrics {
  double ring[SLOTS][1 + METRICS];
  int done;
} metrics;

/* The host's side: counts the step numbers that are in another step's entry. */
static void *watch(void *user) {
  metrics *m = user;
  intptr_t wrong = 0;
  while (!__atomic_load_n(&m->done, __ATOMIC_ACQUIRE))
    for (int s = 0; s < SLOTS; s++) {
      double sequence;
      __atomic_load(&m->ring[s][0], &sequence, __ATOMIC_ACQUIRE);
      if (sequence > 0 && ((int64_t)sequence - 1) % SLOTS != s) wrong++;
    }
  return (void *)wrong;
}

static void test_metrics(void **state) {
  metrics m = {0};
  float loss;
  int32_t skip = 0;
  int64_t step[4] = {0}, tokens;
  rfr_type one = {.rank = 1, .shape = {1}};
  rfi_arg in[5] = {{m.ring, {.dtype = RFR_F64, .rank = 2, .shape = {SLOTS, 1 + METRICS}}, {1 + METRICS, 1}},
                   {step, {.dtype = RFR_I64, .rank = 1, .shape = {4}}, {1}},
                   {&loss, one, {1}},
                   {&skip, one, {1}},
                   {&tokens, one, {1}}};
  in[2].type.dtype = RFR_F32;
  in[3].type.dtype = RFR_I32;
  in[4].type.dtype = RFR_I64;
  rfi_call call = {.n_in = 5, .n_out = 1, .in = in, .out = in, .threads = 1};
  pthread_t host;
  void *wrong;
  (void)state;
  assert_int_equal(pthread_create(&host, NULL, watch, &m), 0);
  for (step[0] = 0; step[0] < 3000; step[0]++) {
    double other[SLOTS][1 + METRICS];
    int64_t slot = step[0] % SLOTS;
    memcpy(other, m.ring, sizeof other);
    loss = 1.0f / (float)(step[0] + 1);
    tokens = step[0] * 4096;
    assert_int_equal(kernel_of(RFI_OP_metrics_write)->run(&call), RFR_OK);
    assert_true(m.ring[slot][0] == (double)(step[0] + 1) && m.ring[slot][1] == loss && m.ring[slot][2] == 0 &&
                m.ring[slot][3] == (double)tokens);
    for (int s = 0; s < SLOTS; s++)
      if (s != slot) assert_memory_equal(m.ring[s], other[s], sizeof other[s]);
  }
  __atomic_store_n(&m.done, 1, __ATOMIC_RELEASE);
  assert_int_equal(pthread_join(host, &wrong), 0);
  assert_int_equal((intptr_t)wrong, 0);
}

static void test_refused(void **state) {
  rfr_ctx *ctx;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (int k = 0; k < 3; k++) {
    rfr_trace *t;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value step = rfr_step_block(t);
    rfr_value ring =
        rfr_input(t, "ring", RFR_ROLE_STATE, k == 0 ? RFR_F32 : RFR_F64, 2, (int64_t[]){k == 1 ? 0 : 2, 2});
    rfr_value loss = rfr_input(t, "loss", RFR_ROLE_INPUT, RFR_F32, 1, (int64_t[]){1});
    rfr_value values[] = {loss, loss};
    rfr_metrics_write(t, ring, step, k == 2 ? 2 : 1, values);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_read_follows_the_step), cmocka_unit_test(test_metrics),
                                     cmocka_unit_test(test_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
