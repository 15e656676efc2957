/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts are independent: several threads compile, capture and replay at once, each with its own context, and get
 * bitwise the results of a single thread. Under ThreadSanitizer this test detects hidden global state. The
 * floating-point mode of the host's threads does not change results, and is restored afterwards.
 */
#include <fenv.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "refrain/nn.h"
#include "refrain/program.h"

enum { THREADS = 4, STEPS = 6, TOKENS = 24 };

typedef struct job {
  uint64_t seed;
  float loss[STEPS];
  rfr_status status;
  char error[200];
} job;

static rfr_trace *step_trace(rfr_ctx *ctx, const rfr_model_config *c, rfr_value *parameter) {
  rfr_trace *t;
  if (rfr_trace_create(ctx, &t) != RFR_OK) return NULL;
  rfr_value tokens = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
  rfr_value targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_value step = rfr_step_block(t);
  rfr_model_declare(t, c, NULL, 0, parameter);
  rfr_value inv = rfr_token_count(t, 1, &targets, -100, NULL);
  rfr_value h = rfr_model_forward(t, c, parameter, tokens, offsets, step);
  rfr_value loss = rfr_cross_entropy(t, rfr_model_logits(t, c, parameter, h, RFR_F32), targets, inv, -100);
  rfr_value lr = rfr_fill(t, 0.1, RFR_F32, 1, ((int64_t[]){1}));
  rfr_value skip = rfr_fill(t, 0, RFR_I32, 1, ((int64_t[]){1}));
  for (int i = 0; i < rfr_model_parameter_count(c); i++)
    rfr_sgd(t, parameter[i], rfr_gradient(t, loss, parameter[i], RFR_F32), RFR_NONE, RFR_NONE, lr, RFR_NONE, skip, 0, 0,
            1);
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", loss);
  return t;
}

static rfr_status train(rfr_ctx *ctx, job *j) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfr_value parameter[64];
  rfr_programs *p = NULL;
  rfr_tensor x;
  c.hidden_size = 32;
  c.intermediate_size = 48;
  c.layers = 2;
  c.heads = c.kv_heads = 2;
  c.head_dim = 16;
  c.dropout = 0.1;
  rfr_trace *t = step_trace(ctx, &c, parameter);
  rfr_status s = t ? rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p) : RFR_NO_MEMORY;
  rfr_trace_destroy(t);
  for (int i = 0; s == RFR_OK && i < rfr_model_parameter_count(&c); i++) {
    rfr_parameter q;
    rfr_model_parameter(&c, i, &q);
    s = rfr_programs_tensor(p, q.name, &x);
    if (s == RFR_OK) s = rfr_parameter_fill(&q, j->seed, RFR_F32, 1, x.data);
  }
  const char *const names[] = {"tokens", "targets", "offsets", "step"};
  for (int i = 0; s == RFR_OK && i < 4; i++) {
    s = rfr_programs_tensor(p, names[i], &x);
    if (s != RFR_OK) break;
    for (int k = 0; i < 2 && k < TOKENS; k++) ((int32_t *)x.data)[k] = (k * 7 + i * 7 + (int)j->seed) % 64;
    if (i == 2) memcpy(x.data, (int32_t[]){0, 11, TOKENS}, 12);
    if (i == 3) ((int64_t *)x.data)[2] = (int64_t)j->seed;
  }
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  for (int i = 0; s == RFR_OK && i < STEPS; i++) {
    s = rfr_program_replay(p, 0, NULL, 0);
    if (s == RFR_OK) s = rfr_program_output(p, 0, "loss", &x);
    if (s == RFR_OK) j->loss[i] = *(float *)x.data;
  }
  rfr_programs_destroy(p);
  return s;
}

static void *work(void *arg) {
  job *j = arg;
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  j->status = rfr_ctx_create(&o, &ctx);
  if (j->status == RFR_OK) {
    j->status = train(ctx, j);
    rfr_ctx_destroy(ctx);
  }
  if (j->status != RFR_OK) strncpy(j->error, rfr_last_error()->message, sizeof j->error - 1);
  return NULL;
}

static void test_threads(void **state) {
  (void)state;
  job alone[THREADS] = {0}, together[THREADS] = {0};
  pthread_t thread[THREADS];
  for (int i = 0; i < THREADS; i++) {
    alone[i].seed = together[i].seed = (uint64_t)(i + 1);
    work(&alone[i]);
    if (alone[i].status != RFR_OK) fail_msg("%s", alone[i].error);
  }
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&thread[i], NULL, work, &together[i]), 0);
  for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
  for (int i = 0; i < THREADS; i++) {
    if (together[i].status != RFR_OK) fail_msg("%s", together[i].error);
    assert_memory_equal(alone[i].loss, together[i].loss, sizeof alone[i].loss);
    assert_true(alone[i].loss[STEPS - 1] < alone[i].loss[0]);
  }
  assert_memory_not_equal(alone[0].loss, alone[1].loss, sizeof alone[0].loss);
}

/* ---- a host with other floating-point modes ---- */

enum { ROWS = 300, WIDTH = 257, POOL = 3 };

typedef struct rounded {
  int mode, debug;
  float y[ROWS * WIDTH];
  rfr_status status;
  int kept; /* pool threads that kept the floating-point mode they were given */
} rounded;

static rfr_status round_program(rfr_ctx *ctx, rounded *r) {
  rfr_trace *t;
  rfr_programs *p = NULL;
  rfr_tensor x;
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_value a = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, WIDTH}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){WIDTH, WIDTH}));
  rfr_output(t, "y", rfr_silu(t, rfr_linear(t, rfr_gelu(t, a, 1), w, RFR_NONE)));
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = r->debug;
  s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  for (int i = 0; s == RFR_OK && i < 2; i++) {
    s = rfr_programs_tensor(p, i ? "w" : "x", &x);
    for (int k = 0; s == RFR_OK && k < (i ? WIDTH : ROWS) * WIDTH; k++)
      ((float *)x.data)[k] = (float)(k * 37 % 1009 - 504) / 512.0f; /* exact in every rounding mode */
  }
  if (s == RFR_OK) s = rfr_programs_load(p);
  if (s == RFR_OK) s = rfr_program_run(p, 0);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "y", &x);
  if (s == RFR_OK) memcpy(r->y, x.data, sizeof r->y);
  rfr_programs_destroy(p);
  return s;
}

/* In a separate thread, so that the pool is new: OpenMP runtimes have one pool per thread. */
static void *round_host(void *arg) {
  rounded *r = arg;
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  int kept = 0;
  o.threads = POOL;
  r->status = rfr_ctx_create(&o, &ctx);
  if (r->status != RFR_OK) return NULL;
#pragma omp parallel num_threads(POOL)
  fesetround(r->mode);
  r->status = round_program(ctx, r);
#pragma omp parallel num_threads(POOL) reduction(+ : kept)
  kept = fegetround() == r->mode;
  r->kept = kept;
  rfr_ctx_destroy(ctx);
  return NULL;
}

static void test_rounding_mode(void **state) {
  (void)state;
  static rounded near = {.mode = FE_TONEAREST}, other;
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, round_host, &near), 0);
  pthread_join(thread, NULL);
  assert_int_equal(near.status, RFR_OK);
  const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  for (int i = 0; i < 6; i++) {
    memset(&other, 0, sizeof other);
    other.mode = modes[i % 3];
    other.debug = i / 3;
    assert_int_equal(pthread_create(&thread, NULL, round_host, &other), 0);
    pthread_join(thread, NULL);
    assert_int_equal(other.status, RFR_OK);
    assert_memory_equal(near.y, other.y, sizeof near.y);
    assert_int_equal(other.kept, near.kept); /* 1 without OpenMP */
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads), cmocka_unit_test(test_rounding_mode)};
  return cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
