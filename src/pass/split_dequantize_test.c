/* SPDX-License-Identifier: Apache-2.0
 *
 * A frozen quantized weight in a step with two microbatches. Just before each GEMM there is a dequantize op, and only
 * this GEMM reads its result. No dequantize is in a phase that runs once. Gradients are bitwise equal to those of a
 * program whose weights are the dequantized values, with any recompute.
 */
#include <stdio.h>
#include <string.h>

#include "support/context.h"
#include "trace/trace.h"

enum { T = 5, K = 96, H = 64, N = 32, MICROBATCHES = 2, W1 = H * K, W2 = N * H };

static rfr_value weight(rfr_trace *t, const char *name, rfr_quant format, int64_t n, int64_t k) {
  const int64_t shape[2] = {n, k}, bytes = rfr_quant_bytes(format, 2, shape);
  if (format == RFR_QUANT_NONE) return rfr_input(t, name, RFR_ROLE_FROZEN, RFR_F32, 2, shape);
  return rfr_input(t, name, RFR_ROLE_FROZEN, RFR_U8, 1, &bytes);
}

/* Records the op once per microbatch, as a model does. */
static rfr_value values_of(rfr_trace *t, rfr_value w, rfr_quant format, int64_t n, int64_t k) {
  const int64_t shape[2] = {n, k};
  return format == RFR_QUANT_NONE ? w : rfr_dequantize(t, w, format, 2, shape, RFR_F32);
}

static rfr_trace *record(rfr_quant format) {
  rfr_trace *t;
  rfr_value loss = RFR_NONE;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value w1 = weight(t, "w1", format, H, K), w2 = weight(t, "w2", format, N, H);
  const rfr_value s = rfr_input(t, "s", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){T, K}));
  for (int m = 0; m < MICROBATCHES; m++) {
    char name[8];
    snprintf(name, sizeof name, "x%d", m);
    rfr_microbatch(t, m);
    rfr_value x = rfr_add(t, rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, K})), s);
    rfr_value h = rfr_silu(t, rfr_linear(t, x, values_of(t, w1, format, H, K), RFR_NONE));
    rfr_value part = rfr_sum(t, rfr_silu(t, rfr_linear(t, h, values_of(t, w2, format, N, H), RFR_NONE)), -1);
    rfr_microbatch(t, -1);
    loss = m == 0 ? part : rfr_add(t, loss, part);
  }
  rfr_output(t, "d_s", rfr_copy(t, rfr_gradient(t, loss, s, RFR_F32)));
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  return t;
}

/* Checks that every dequantize op has one reader, the op directly after it, of the same phase and microbatch. Returns
 * their number. */
static int check_ops(const rfr_trace *t) {
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i], *next = &t->ops[i + 1];
    if (op->def->code != RFI_OP_dequantize) continue;
    n++;
    assert_true(i + 1 < t->n_ops);
    assert_int_equal(next->def->code, RFI_OP_matmul);
    assert_int_equal(next->in[1], op->out[0]);
    assert_int_equal(next->phase, op->phase);
    assert_int_equal(next->microbatch, op->microbatch);
    assert_true(op->phase == RFR_PHASE_FORWARD || op->phase == RFR_PHASE_DGRAD);
    for (int k = i + 2; k < t->n_ops; k++)
      for (int j = 0; j < t->ops[k].n_in; j++) assert_int_not_equal(t->ops[k].in[j], op->out[0]);
  }
  return n;
}

/* Runs once; returns d_s. */
static void run(const rfr_trace *t, rfr_quant format, rfr_recompute recompute, int fuse, const float *const *w,
                float *d, int *dequantized) {
  static const int64_t shapes[2][2] = {{H, K}, {N, H}};
  rfr_compile_options o = rfr_compile_options_default();
  rfr_tensor x;
  o.recompute = recompute;
  o.fuse = fuse;
  o.keep_traces = 1;
  rfr_programs *p = rft_compile(t, &o);
  rft_fill_inputs(p);
  for (int i = 0; i < 2; i++) {
    OK(rfr_programs_tensor(p, i ? "w2" : "w1", &x));
    if (format == RFR_QUANT_NONE) memcpy(x.data, w[i], (size_t)x.bytes);
    else OK(rfr_quant_encode(ctx, format, 2, shapes[i], RFR_F32, w[i], 1, x.data));
  }
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "d_s", &x));
  memcpy(d, x.data, (size_t)x.bytes);
  const rfr_trace *last = rfr_program_trace(p, 0, "lower");
  assert_non_null(last);
  *dequantized = check_ops(last);
  rfr_programs_destroy(p);
}

/* The values of a quantized weight, by a program of one op. */
static void decode(rfr_quant format, const int64_t *shape, const float *w, float *out) {
  rfr_trace *t;
  rfr_tensor x;
  const int64_t bytes = rfr_quant_bytes(format, 2, shape);
  OK(rfr_trace_create(ctx, &t));
  rfr_value q = rfr_input(t, "q", RFR_ROLE_INPUT, RFR_U8, 1, &bytes);
  rfr_output(t, "y", rfr_dequantize(t, q, format, 2, shape, RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  OK(rfr_programs_tensor(p, "q", &x));
  OK(rfr_quant_encode(ctx, format, 2, shape, RFR_F32, w, 1, x.data));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "y", &x));
  memcpy(out, x.data, (size_t)x.bytes);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

static void test_steps(void **state) {
  static float w1[W1], w2[W2], v1[W1], v2[W2];
  (void)state;
  for (int i = 0; i < W1; i++) w1[i] = (float)(i * 37 % 101 - 50) / 400;
  for (int i = 0; i < W2; i++) w2[i] = (float)(i * 53 % 97 - 48) / 300;
  for (int format = RFR_QUANT_NF4; format <= RFR_QUANT_INT8; format++) {
    float want[T * K], d[T * K];
    int n;
    decode((rfr_quant)format, (int64_t[]){H, K}, w1, v1);
    decode((rfr_quant)format, (int64_t[]){N, H}, w2, v2);
    rfr_trace *plain = record(RFR_QUANT_NONE), *t = record((rfr_quant)format);
    run(plain, RFR_QUANT_NONE, RFR_RECOMPUTE_KEEP, 1, (const float *const[]){v1, v2}, want, &n);
    assert_int_equal(n, 0);
    run(t, (rfr_quant)format, RFR_RECOMPUTE_KEEP, 1, (const float *const[]){w1, w2}, d, &n);
    assert_memory_equal(d, want, sizeof want);
    assert_int_equal(n, MICROBATCHES * 2 * 2); /* two weights, forward and dgrad */
    run(t, (rfr_quant)format, RFR_RECOMPUTE_ALL, 1, (const float *const[]){w1, w2}, d, &n);
    assert_memory_equal(d, want, sizeof want);
    assert_true(n >= MICROBATCHES * 2 * 2);
    run(plain, RFR_QUANT_NONE, RFR_RECOMPUTE_KEEP, 0, (const float *const[]){v1, v2}, want, &n);
    run(t, (rfr_quant)format, RFR_RECOMPUTE_KEEP, 0, (const float *const[]){w1, w2}, d, &n);
    assert_memory_equal(d, want, sizeof want);
    assert_int_equal(n, MICROBATCHES * 2 * 2);
    rfr_trace_destroy(plain);
    rfr_trace_destroy(t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_steps)};
  return cmocka_run_group_tests_name("quantize", tests, NULL, NULL);
}
