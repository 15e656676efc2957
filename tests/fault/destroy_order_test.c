/* SPDX-License-Identifier: Apache-2.0
 *
 * A context and its objects, destroyed in many orders: nothing reads freed memory (under the address
 * sanitizer), and the caller's allocator gets every block back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/dlpack.h"
#include "refrain/refrain.h"
#include "support/random.h"
#include "support/run.h"

enum { C = 8, T = 4 };

static int blocks; /* blocks of the caller's allocator */

static void *count_alloc(size_t bytes, size_t alignment, void *user) {
  (void)user;
  blocks++;
  return aligned_alloc(alignment, bytes);
}

static void count_free(void *memory, size_t bytes, void *user) {
  (void)user;
  blocks--;
  memset(memory, 0xdd, bytes); /* so that a later read is noticed even without a sanitizer */
  free(memory);
}

typedef struct objects {
  rfr_ctx *ctx;
  rfr_trace *trace, *layer;
  rfr_step_memory *step_memory; /* shared by both, or NULL */
  rfr_programs *programs;
  rfr_graphs *graphs;
  rfr_schedule *schedule;
  rfr_comm *comm[2];
  DLManagedTensorVersioned *tensor;
} objects;

static void destroy_ctx(objects *o) { rfr_ctx_destroy(o->ctx); }
static void destroy_trace(objects *o) { rfr_trace_destroy(o->trace); }
static void destroy_layer(objects *o) { rfr_trace_destroy(o->layer); }
static void destroy_programs(objects *o) { rfr_programs_destroy(o->programs); }
static void destroy_step_memory(objects *o) { rfr_step_memory_destroy(o->step_memory); }
static void destroy_graphs(objects *o) { rfr_graphs_destroy(o->graphs); }
static void destroy_schedule(objects *o) { rfr_schedule_destroy(o->schedule); }
static void destroy_comm(objects *o) {
  rfr_comm_destroy(o->comm[0]);
  rfr_comm_destroy(o->comm[1]);
}
static void destroy_tensor(objects *o) { o->tensor->deleter(o->tensor); }

static void (*const destroy[])(objects *) = {destroy_ctx,      destroy_trace,  destroy_layer,
                                             destroy_programs, destroy_graphs, destroy_schedule,
                                             destroy_comm,     destroy_tensor, destroy_step_memory};
enum { N = sizeof destroy / sizeof *destroy };

static void ok(rfr_status s) {
  if (s != RFR_OK) fail_msg("%s", rfr_last_error()->message);
}

static const char *twice_shape(const rfr_infer *c) {
  c->out[0] = c->in[0];
  return NULL;
}
static rfr_status twice_cpu(const rfr_call *c) {
  for (int64_t i = 0; i < T * C; i++) ((float *)c->out[0].data)[i] = 2 * ((const float *)c->in[0].data)[i];
  return RFR_OK;
}
static void twice_gradient(rfr_grad *g) { g->dx[0] = rfr_scale_at(g->t, g->at, g->dy[0], 2, RFR_NONE); }

static rfr_value linear(rfr_trace *t, const rfr_op *twice) {
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){T, C}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){C, C})), y;
  rfr_record_at(t, RFR_HERE, twice, 1, (rfr_value[]){rfr_linear(t, x, w, RFR_NONE)}, NULL, &y);
  return y;
}

static void make(objects *o, bool shared) {
  rfr_ctx_options options = rfr_ctx_options_default();
  options.alloc = count_alloc;
  options.free = count_free;
  options.threads = 1;
  options.use_onednn = 0;
  ok(rfr_ctx_create(&options, &o->ctx));
  rfr_op_desc d = rfr_op_desc_default();
  const rfr_op *twice;
  d.name = "test.twice";
  d.operands = "x";
  d.shape = twice_shape;
  d.gradient = twice_gradient;
  d.cpu = twice_cpu;
  ok(rfr_op_register(o->ctx, &d, &twice));
  ok(rfr_trace_create(o->ctx, &o->trace));
  rfr_output(o->trace, "loss", rfr_mean(o->trace, linear(o->trace, twice), -1));
  ok(rfr_trace_finish(o->trace));
  ok(rfr_trace_create(o->ctx, &o->layer));
  rfr_output(o->layer, "y", linear(o->layer, twice));
  ok(rfr_trace_finish(o->layer));
  if (shared) ok(rfr_step_memory_create(o->ctx, 1 << 16, &o->step_memory));
  rfr_compile_options p = rfr_compile_options_default();
  p.step_memory = o->step_memory;
  ok(rfr_compile(o->ctx, 1, (const rfr_trace *const *)&o->trace, NULL, &p, &o->programs));
  ok(rfr_program_capture(o->programs, 0));
  ok(rfr_program_replay(o->programs, 0, NULL, 0));
  static const char text[] = "0F0 0B0 0F1 0B1\n";
  ok(rfr_schedule_parse(o->ctx, "text", text, sizeof text - 1, &o->schedule));
  rfr_callable callable = rfr_callable_default();
  callable.trace = o->layer;
  rfr_graphs_options g = rfr_graphs_options_default();
  g.schedule = o->schedule;
  g.step_memory = o->step_memory;
  ok(rfr_graphs_create(o->ctx, &callable, 1, &g, &o->graphs));
  ok(rfr_comm_threads_create(o->ctx, 2, 0, o->comm));
  rfr_tensor w;
  ok(rfr_programs_tensor(o->programs, "w", &w));
  ok(rfr_tensor_to_dlpack(o->ctx, &w, NULL, NULL, &o->tensor));
}

static void test_orders(void **state) {
  (void)state;
  uint64_t random = 1;
  for (int round = 0; round < 300; round++) {
    objects o = {0};
    int order[N];
    make(&o, round % 2 || round < N);
    for (int i = 0; i < N; i++)
      order[i] = (i + round) % N; /* in the first rounds each object is destroyed first and last */
    for (int i = N - 1; round >= N && i > 0; i--) {
      const int k = (int)rft_below(&random, (uint32_t)i + 1), other = order[k];
      order[k] = order[i];
      order[i] = other;
    }
    for (int i = 0; i < N; i++) destroy[order[i]](&o);
    assert_int_equal(blocks, 0);
  }
}

/* Objects of a context remain usable after the caller has destroyed the context. */
static void test_use_after_context(void **state) {
  (void)state;
  objects o = {0};
  rfr_tensor loss;
  make(&o, true);
  rfr_ctx_destroy(o.ctx);
  assert_true(blocks > 0);
  ok(rfr_program_replay(o.programs, 0, NULL, 0));
  ok(rfr_program_output(o.programs, 0, "loss", &loss));
  for (int i = 1; i < N; i++) destroy[i](&o);
  assert_int_equal(blocks, 0);
}

static void test_run(void **state) {
  (void)state;
  static const char config[] =
      "refrain: 1\n" LLAMA SINGLE DATA ADAM "batch: {tokens: 64, microbatch: 4}\nrun: {steps: 50}\n";
  for (int i = 0; i < 2; i++) {
    rfr_ctx_options options = rfr_ctx_options_default();
    rfr_run_options o = rfr_run_options_default();
    rfr_ctx *ctx;
    rfr_run *run;
    options.alloc = count_alloc;
    options.free = count_free;
    o.config_folder = rft_run_root;
    blocks = 0;
    ok(rfr_ctx_create(&options, &ctx));
    ok(rfr_run_open(ctx, config, NULL, &o, &run));
    ok(rfr_run_step(run));
    if (i == 0) rfr_ctx_destroy(ctx);
    rfr_run_close(run);
    if (i == 1) rfr_ctx_destroy(ctx);
    assert_int_equal(blocks, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_orders), cmocka_unit_test(test_use_after_context),
                                     cmocka_unit_test(test_run)};
  return cmocka_run_group_tests_name("destroy_order", tests, rft_run_setup, rft_run_teardown);
}
