/* SPDX-License-Identifier: Apache-2.0
 *
 * Unusual programs and invalid calls: each is computed correctly or refused with a reason, and
 * none reads or writes memory outside its tensors.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "refrain/refrain.h"
#include "support/context.h"

#define SHAPE(...) ((int64_t[]){__VA_ARGS__})

static rfr_trace *new_trace(void) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  return t;
}

static rfr_value vector(rfr_trace *t, const char *name, rfr_role role, int64_t n) {
  return rfr_input(t, name, role, RFR_F32, 1, &n);
}

/* Expects that the trace, or its compilation, is refused with this slug; destroys the trace. */
static void refused(rfr_trace *t, const char *slug) {
  rfr_programs *p = NULL;
  rfr_status s = rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, NULL, &p);
  if (s == RFR_OK) fail_msg("compiled, but %s was expected", slug);
  assert_string_equal(rfr_last_error()->slug, slug);
  assert_int_not_equal(rfr_last_error()->status, RFR_INTERNAL);
  assert_null(p);
  rfr_trace_destroy(t);
}

static rfr_programs *compile(rfr_trace *t, const rfr_compile_options *o) {
  rfr_programs *p;
  OK(rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, o, &p));
  rfr_trace_destroy(t);
  return p;
}

static void set(rfr_programs *p, const char *name, float x) {
  rfr_tensor t;
  OK(rfr_programs_tensor(p, name, &t));
  for (int64_t i = 0; i < t.bytes / 4; i++) ((float *)t.data)[i] = x;
}
static float output(rfr_programs *p, const char *name, int64_t i) {
  rfr_tensor t;
  OK(rfr_program_output(p, 0, name, &t));
  assert_in_range(i, 0, t.bytes / 4 - 1);
  return ((const float *)t.data)[i];
}

/* ---- gradients ---- */

/* s = a + b is a term of the loss and is also squared: dl/dw = 1 + 2 (w + v). */
static void test_shared_part(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value w = vector(t, "w", RFR_ROLE_TRAINABLE, 1), v = vector(t, "v", RFR_ROLE_INPUT, 1);
  rfr_value s = rfr_add(t, rfr_copy(t, w), v), loss = rfr_add(t, s, rfr_mul(t, s, s));
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  rfr_programs *p = compile(t, NULL);
  set(p, "w", 2);
  set(p, "v", 3);
  OK(rfr_program_run(p, 0));
  assert_float_equal(output(p, "g", 0), 11, 1e-6);
  rfr_programs_destroy(p);
}

static void test_input_is_loss(void **state) {
  (void)state;
  for (int both = 0; both < 2; both++) {
    rfr_trace *t = new_trace();
    rfr_value w = vector(t, "w", RFR_ROLE_TRAINABLE, 1);
    rfr_value loss = rfr_scale(t, w, 3, RFR_NONE);
    if (both) loss = rfr_add(t, loss, rfr_mul(t, w, w));
    rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
    rfr_programs *p = compile(t, NULL);
    set(p, "w", 2);
    OK(rfr_program_run(p, 0));
    assert_float_equal(output(p, "g", 0), both ? 7 : 3, 1e-6);
    rfr_programs_destroy(p);
  }
}

static void test_coupled_microbatches(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value w = vector(t, "w", RFR_ROLE_TRAINABLE, 1);
  rfr_microbatch(t, 0);
  rfr_value a = rfr_silu(t, w);
  rfr_microbatch(t, 1);
  rfr_value b = rfr_mul(t, a, a);
  rfr_microbatch(t, -1);
  rfr_output(t, "g", rfr_gradient(t, rfr_add(t, a, b), w, RFR_F32));
  refused(t, "autodiff.coupled");
}

/* A gradient requested in bf16 is summed in bf16: 256 + 1 + 1 = 256. If it is requested in f32 as well, in either
 * order, both come from the f32 sum. */
static void test_types_of_sums(void **state) {
  (void)state;
  static const rfr_dtype wanted[][2] = {
      {RFR_F32, RFR_F32}, {RFR_BF16, RFR_BF16}, {RFR_BF16, RFR_F32}, {RFR_F32, RFR_BF16}, {RFR_BF16, RFR_F16}};
  static const char *const factors[] = {"v0", "v1", "v2"}, *const gradients[] = {"g0", "g1"};
  for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
    rfr_trace *t = new_trace();
    rfr_value w = vector(t, "w", RFR_ROLE_TRAINABLE, 1), loss = RFR_NONE;
    for (int m = 0; m < 3; m++) {
      rfr_microbatch(t, m);
      const rfr_value part = rfr_mul(t, w, vector(t, factors[m], RFR_ROLE_INPUT, 1));
      loss = loss == RFR_NONE ? part : rfr_add(t, loss, part);
    }
    rfr_microbatch(t, -1);
    for (int i = 0; i < 2; i++) rfr_output(t, gradients[i], rfr_gradient(t, loss, w, wanted[k][i]));
    rfr_programs *p = compile(t, NULL);
    for (int m = 0; m < 3; m++) set(p, factors[m], m ? 1 : 256);
    OK(rfr_program_run(p, 0));
    for (int i = 0; i < 2; i++) {
      rfr_tensor g;
      uint16_t bits;
      OK(rfr_program_output(p, 0, gradients[i], &g));
      memcpy(&bits, g.data, sizeof bits);
      const float x = wanted[k][i] == RFR_F32 ? *(const float *)g.data : rfr_float_from_bits(wanted[k][i], bits);
      assert_float_equal(x, k == 1 ? 256 : 258, 0);
    }
    rfr_programs_destroy(p);
  }
}

/* Two microbatches apply dropout to the same values at the same site: this must give two masks, not one shared op.
 * Recording never repeats a site, so the trace is parsed from text. */
static void test_masks_of_microbatches(void **state) {
  (void)state;
  static const char text[] = "refrain-trace 1\n"
                             "input %0 \"x\" input f32[64]\n"
                             "input %1 \"step\" state i64[4]\n"
                             "%2 f32[64] = dropout(%0, %1) p=0.5 site=0 stream=0 phase=forward mb=0\n"
                             "%3 f32[64] = dropout(%0, %1) p=0.5 site=0 stream=0 phase=forward mb=1\n"
                             "output \"a\" %2\n"
                             "output \"b\" %3\n";
  rfr_trace *t;
  OK(rfr_trace_parse(ctx, "text", text, sizeof text - 1, &t));
  rfr_programs *p = compile(t, NULL);
  rfr_tensor a, b;
  set(p, "x", 1);
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "a", &a));
  OK(rfr_program_output(p, 0, "b", &b));
  assert_memory_not_equal(a.data, b.data, (size_t)a.bytes);
  rfr_programs_destroy(p);
}

/* The factor of a scale is not differentiated, so this weight does not reach the loss. */
static void test_factor_alone(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value w = vector(t, "w", RFR_ROLE_TRAINABLE, 1), x = vector(t, "x", RFR_ROLE_INPUT, 5);
  rfr_value loss = rfr_sum(t, rfr_scale(t, x, 1, w), -1);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  refused(t, "autodiff.unreached");
}

/* ---- storage ---- */

static void test_strided_output(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, SHAPE(2, 3));
  rfr_output(t, "t", rfr_transpose(t, w, 0, 1));
  rfr_output(t, "g", rfr_gradient(t, rfr_sum(t, w, -1), w, RFR_F32));
  rfr_programs *p = compile(t, NULL);
  rfr_tensor x;
  OK(rfr_programs_tensor(p, "w", &x));
  for (int i = 0; i < 6; i++) ((float *)x.data)[i] = (float)i;
  OK(rfr_program_run(p, 0));
  for (int i = 0; i < 6; i++) {
    int64_t row = i / 2, column = i % 2;
    assert_float_equal(output(p, "t", i), (float)(column * 3 + row), 0);
    assert_float_equal(output(p, "g", i), 1, 0);
  }
  rfr_programs_destroy(p);
}

/* A GEMM could accumulate into g in place, but a view of g is an output. */
static void test_view_is_output(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, SHAPE(2, 2));
  rfr_value g = rfr_matmul(t, x, x, RFR_NONE, 0, 0, RFR_F32);
  rfr_output(t, "view", rfr_reshape(t, g, 1, SHAPE(4)));
  rfr_value product = rfr_matmul(t, x, x, RFR_NONE, 1, 0, RFR_F32);
  rfr_output(t, "sum", rfr_add(t, g, product));
  rfr_programs *p = compile(t, NULL);
  set(p, "x", 1);
  OK(rfr_program_run(p, 0));
  assert_float_equal(output(p, "view", 3), 2, 0);
  assert_float_equal(output(p, "sum", 3), 4, 0);
  rfr_programs_destroy(p);
}

static void test_updates(void **state) {
  (void)state;
  for (int kind = 0; kind < 4; kind++) {
    rfr_trace *t = new_trace();
    rfr_value w = rfr_input(t, "w", kind ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN, RFR_F32, 2, SHAPE(2, 3));
    rfr_value g = rfr_input(t, "g", RFR_ROLE_INPUT, RFR_F32, 2, kind == 1 ? SHAPE(3, 2) : SHAPE(2, 3));
    rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_F32, 2, SHAPE(2, 3));
    rfr_value lr = rfr_fill(t, 1, RFR_F32, 1, SHAPE(1)), step = rfr_step_block(t);
    if (kind == 1) w = rfr_transpose(t, w, 0, 1);
    if (kind == 2) w = rfr_copy(t, w);
    if (kind < 3) rfr_sgd(t, w, g, RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
    else rfr_adamw(t, w, g, m, m, RFR_NONE, lr, RFR_NONE, RFR_NONE, step, NULL);
    refused(t, "trace.state");
  }
}

static void test_phase_load(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value x = vector(t, "x", RFR_ROLE_INPUT, 3);
  rfr_set_phase(t, RFR_PHASE_LOAD);
  rfr_output(t, "y", rfr_add(t, x, x));
  refused(t, "trace.state");
}

/* ---- sizes ---- */

static void test_sizes(void **state) {
  (void)state;
  int64_t wide = (int64_t)1 << 40;
  rfr_trace *t = new_trace(); /* each size is valid, but their sum overflows */
  for (int i = 0; i < 32; i++) {
    char name[3] = {'a', (char)('a' + i), 0};
    rfr_output(t, name, rfr_input(t, name, RFR_ROLE_INPUT, RFR_U8, 1, SHAPE((int64_t)1 << 59)));
  }
  refused(t, "overflow");
  t = new_trace(); /* a GEMM of two empty operands */
  rfr_value a = rfr_input(t, "a", RFR_ROLE_INPUT, RFR_F32, 2, SHAPE(wide, 0));
  rfr_value b = rfr_input(t, "b", RFR_ROLE_INPUT, RFR_F32, 2, SHAPE(0, wide));
  rfr_output(t, "y", rfr_matmul(t, a, b, RFR_NONE, 0, 0, RFR_F32));
  refused(t, "overflow");
  t = new_trace();
  rfr_microbatch(t, INT32_MAX);
  refused(t, "argument");
  t = new_trace();
  rfr_microbatch(t, -2);
  refused(t, "argument");
}

/* ---- missing parts ---- */

static void test_nothing_given(void **state) {
  (void)state;
  rfr_value x, none[1] = {RFR_NONE};
  rfr_trace *t = new_trace();
  rfr_scope(t, NULL);
  x = vector(t, "x", RFR_ROLE_INPUT, 3);
  rfr_value_set_name(t, x, NULL);
  OK(rfr_trace_finish(t));
  rfr_output(t, NULL, x);
  refused(t, "trace.name");
#define REFUSED(slug, call)                \
  do {                                     \
    t = new_trace();                       \
    x = vector(t, "x", RFR_ROLE_INPUT, 3); \
    call;                                  \
    refused(t, slug);                      \
  } while (0)
  REFUSED("argument", rfr_input(t, "y", RFR_ROLE_INPUT, RFR_F32, 2, NULL));
  REFUSED("argument", rfr_reshape(t, x, 2, NULL));
  REFUSED("argument", rfr_fill(t, 1, RFR_F32, 2, NULL));
  REFUSED("argument", rfr_concat(t, 2, NULL, 0));
  REFUSED("argument", rfr_grad_norm(t, 2, NULL, NULL));
  REFUSED("argument", rfr_metrics_write(t, x, x, 2, NULL));
  REFUSED("argument", rfr_set_phase(t, (rfr_phase)257));
  REFUSED("argument", rfr_set_recompute(t, (rfr_policy)-1));
  REFUSED("trace.value", rfr_concat(t, 1, none, 0));
  rfr_trace *missing = (rfr_trace *)ctx;
  assert_int_equal(rfr_trace_create(NULL, &missing), RFR_INVALID);
  assert_null(missing);
  rfr_run_request_stop(NULL);
}

static void test_program_calls(void **state) {
  (void)state;
  rfr_trace *t = new_trace();
  rfr_value x = vector(t, "x", RFR_ROLE_INPUT, 3);
  rfr_output(t, "y", rfr_add(t, x, x));
  rfr_programs *p = NULL;
  assert_int_equal(rfr_compile(ctx, 1, NULL, NULL, NULL, &p), RFR_INVALID);
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const[]){NULL}, NULL, NULL, &p), RFR_INVALID);
  assert_int_equal(rfr_compile(NULL, 1, (const rfr_trace *const[]){t}, NULL, NULL, &p), RFR_INVALID);
  const struct {
    size_t size;
    int64_t budget, chunk;
    int recompute;
  } wrong[] = {{3, 0, 0, 0}, {1 << 30, 0, 0, 0}, {0, -1, 0, 0}, {0, 0, -1, 0}, {0, 0, 0, 3}, {0, 0, 0, -1}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    rfr_compile_options o = rfr_compile_options_default();
    if (wrong[i].size) o.size = wrong[i].size;
    o.budget = wrong[i].budget;
    o.loss_chunk = wrong[i].chunk;
    o.recompute = (rfr_recompute)wrong[i].recompute;
    assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, &o, &p), RFR_INVALID);
    assert_string_equal(rfr_last_error()->slug, "argument");
  }
  p = compile(t, NULL);
  rfr_tensor y;
  rfr_binding nameless = {0};
  assert_int_equal(rfr_programs_tensor(p, NULL, &y), RFR_INVALID);
  assert_int_equal(rfr_program_output(p, 0, NULL, &y), RFR_INVALID);
  assert_null(rfr_program_trace(p, 0, NULL));
  assert_null(rfr_program_report(p, 0, NULL));
  OK(rfr_program_capture(p, 0));
  assert_int_equal(rfr_program_replay(p, 0, &nameless, 1), RFR_MISMATCH);
  rfr_programs_destroy(p);
}

/* A parsed trace owns its file names; programs compiled from it must not need them after it is destroyed. */
static void test_parsed_places(void **state) {
  (void)state;
  static const char text[] = "refrain-trace 1\n"
                             "input %0 \"x\" input f32[3] at \"a/file/of/its/own.c\":7\n"
                             "%1 f32[3] = add(%0, %0) phase=forward at \"a/file/of/its/own.c\":8\n"
                             "output \"y\" %1\n";
  rfr_trace *t;
  OK(rfr_trace_parse(ctx, "text", text, sizeof text - 1, &t));
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = 1;
  o.keep_traces = 0;
  o.prune = 0;
  rfr_programs *p = compile(t, &o);
  float infinity = 3e38f;
  set(p, "x", infinity);
  assert_int_equal(rfr_program_run(p, 0), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->file, "a/file/of/its/own.c");
  assert_int_equal(rfr_last_error()->line, 8);
  rfr_programs_destroy(p);
}

/* ---- main ---- */

/* An allocator that overwrites freed memory at once, so that a read of it is noticed. */
static void *give(size_t bytes, size_t alignment, void *user) {
  (void)user;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
static void take(void *memory, size_t bytes, void *user) {
  (void)user;
  memset(memory, 'x', bytes);
  free(memory);
}

static int setup(void **state) {
  (void)state;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.alloc = give;
  o.free = take;
  return rfr_ctx_create(&o, &ctx) == RFR_OK ? 0 : -1;
}
static int teardown(void **state) {
  (void)state;
  int live = (int)rfr_ctx_get_stats(ctx).live_blocks;
  rfr_ctx_destroy(ctx);
  return live;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_shared_part, setup, teardown),
      cmocka_unit_test_setup_teardown(test_input_is_loss, setup, teardown),
      cmocka_unit_test_setup_teardown(test_coupled_microbatches, setup, teardown),
      cmocka_unit_test_setup_teardown(test_types_of_sums, setup, teardown),
      cmocka_unit_test_setup_teardown(test_masks_of_microbatches, setup, teardown),
      cmocka_unit_test_setup_teardown(test_factor_alone, setup, teardown),
      cmocka_unit_test_setup_teardown(test_strided_output, setup, teardown),
      cmocka_unit_test_setup_teardown(test_view_is_output, setup, teardown),
      cmocka_unit_test_setup_teardown(test_updates, setup, teardown),
      cmocka_unit_test_setup_teardown(test_phase_load, setup, teardown),
      cmocka_unit_test_setup_teardown(test_sizes, setup, teardown),
      cmocka_unit_test_setup_teardown(test_nothing_given, setup, teardown),
      cmocka_unit_test_setup_teardown(test_program_calls, setup, teardown),
      cmocka_unit_test_setup_teardown(test_parsed_places, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
