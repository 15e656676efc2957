/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention beyond the op matrix: packed documents do not influence each other, compared bit by bit, forward and
 * backward; the forward is bitwise equal for any number of threads, the backward for the same number; keys outside a
 * window have no influence; the counted work is that of the pairs that attend to each other; wrong shapes are refused
 * when recorded; the gradient of a packed weight has the right type and phase.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/base.h"
#include "support/random.h"

enum { T = 150, H = 4, HK = 2, D = 24, CUT = 77, NQ = T * H * D, NK = T * HK * D };

typedef struct sample {
  float q[NQ], k[NK], v[NK], dy[NQ], o[NQ], lse[H * T], dq[NQ], dk[NK], dv[NK];
  int32_t offsets[3];
  int64_t window;
} sample;

static void fill(float *x, int n, uint64_t seed) {
  for (int i = 0; i < n; i++) x[i] = (float)rft_uniform(&seed);
}
static rfi_arg rows(float *x, int heads) {
  return (rfi_arg){x, {.dtype = RFR_F32, .rank = 3, .shape = {T, heads, D}}, {(int64_t)heads * D, D, 1}};
}

static void run(const rfi_kernel *kernel, rfi_call *call) {
  size_t bytes = kernel->workspace(call);
  call->workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  assert_non_null(call->workspace);
  memset(call->workspace, 0xff, bytes);
  assert_int_equal(kernel->run(call), RFR_OK);
  free(call->workspace);
}
static void attend(const char *isa, sample *s, int threads) {
  rfi_arg lse = {s->lse, {.dtype = RFR_F32, .rank = 2, .shape = {H, T}}, {T, 1}};
  rfi_arg offsets = {s->offsets, {.dtype = RFR_I32, .rank = 1, .shape = {3}}, {1}};
  rfi_arg q = rows(s->q, H), k = rows(s->k, HK), v = rows(s->v, HK), o = rows(s->o, H);
  const rfi_attr attr[5] = {rfi_f(0.2), rfi_i(1), rfi_i(s->window), rfi_f(0), rfi_i(0)};
  const rfi_arg in[] = {q, k, v, offsets}, out[] = {o, lse};
  rfi_call forward = {.n_in = 4, .n_out = 2, .in = in, .out = out, .attr = attr, .threads = threads};
  run(rfi_cpu_kernel(isa, RFI_OP_attention), &forward);
  const rfi_arg back_in[] = {rows(s->dy, H), q, k, v, o, lse, offsets};
  const rfi_arg back_out[] = {rows(s->dq, H), rows(s->dk, HK), rows(s->dv, HK)};
  rfi_call backward = {.n_in = 7, .n_out = 3, .in = back_in, .out = back_out, .attr = attr, .threads = threads};
  run(rfi_cpu_kernel(isa, RFI_OP_attention_bwd), &backward);
}

static sample *sample_make(void) {
  sample *s = calloc(1, sizeof *s);
  assert_non_null(s);
  fill(s->q, NQ, 1), fill(s->k, NK, 2), fill(s->v, NK, 3), fill(s->dy, NQ, 4);
  s->offsets[1] = CUT;
  s->offsets[2] = T;
  return s;
}

/* The best instruction set of this CPU; all sets are compiled from the same source. */
static const char *best_isa(rfr_ctx **ctx) {
  assert_int_equal(rfr_ctx_create(NULL, ctx), RFR_OK);
  return rfi_ctx_isa(*ctx);
}

static void documents(void **state) {
  (void)state;
  rfr_ctx *ctx;
  const char *isa = best_isa(&ctx);
  sample *a = sample_make(), *b = sample_make();
  for (int i = CUT * HK * D; i < NK; i++) b->k[i] += 1, b->v[i] -= 2; /* changes the second document */
  for (int i = CUT * H * D; i < NQ; i++) b->q[i] *= 3, b->dy[i] += 1;
  attend(isa, a, 2);
  attend(isa, b, 2);
  assert_memory_equal(a->o, b->o, sizeof(float) * CUT * H * D);
  assert_memory_equal(a->dq, b->dq, sizeof(float) * CUT * H * D);
  assert_memory_equal(a->dk, b->dk, sizeof(float) * CUT * HK * D);
  assert_memory_equal(a->dv, b->dv, sizeof(float) * CUT * HK * D);
  assert_memory_not_equal(a->o + CUT * H * D, b->o + CUT * H * D, sizeof(float) * (T - CUT) * H * D);
  for (int h = 0; h < H; h++) /* a document's first row attends only to itself */
    for (int d = 0; d < D; d++)
      assert_true(fabsf(a->o[(CUT * H + h) * D + d] - a->v[(CUT * HK + h / 2) * D + d]) < 1e-6f);
  free(a);
  free(b);
  rfr_ctx_destroy(ctx);
}

static void threads(void **state) {
  (void)state;
  rfr_ctx *ctx;
  const char *isa = best_isa(&ctx);
  sample *one = sample_make();
  attend(isa, one, 1);
  for (int n = 2; n <= 5; n++) {
    sample *a = sample_make(), *b = sample_make();
    attend(isa, a, n);
    attend(isa, b, n);
    assert_memory_equal(a, b, sizeof *a);
    assert_memory_equal(a->o, one->o, sizeof a->o);
    assert_memory_equal(a->lse, one->lse, sizeof a->lse);
    assert_memory_equal(a->dq, one->dq, sizeof a->dq);
    for (int i = 0; i < NK; i++) {
      assert_true(fabsf(a->dk[i] - one->dk[i]) < 1e-5f);
      assert_true(fabsf(a->dv[i] - one->dv[i]) < 1e-5f);
    }
    free(a);
    free(b);
  }
  free(one);
  rfr_ctx_destroy(ctx);
}

/* Keys outside a window have no influence. */
static void windows(void **state) {
  (void)state;
  enum { W = 13 };
  rfr_ctx *ctx;
  const char *isa = best_isa(&ctx);
  sample *a = sample_make(), *b = sample_make(), *full = sample_make();
  const int from = CUT + 60; /* rows from here on attend to no key before from - W + 1 */
  a->window = b->window = W;
  full->window = T;
  for (int i = CUT * HK * D; i < (from - W + 1) * HK * D; i++) b->k[i] += 1, b->v[i] -= 2;
  attend(isa, a, 2);
  attend(isa, b, 2);
  assert_memory_equal(a->o + from * H * D, b->o + from * H * D, sizeof(float) * (T - from) * H * D);
  assert_memory_equal(a->dq + from * H * D, b->dq + from * H * D, sizeof(float) * (T - from) * H * D);
  assert_memory_not_equal(a->o + (from - 1) * H * D, b->o + (from - 1) * H * D, sizeof(float) * H * D);
  attend(isa, full, 2);
  a->window = 0;
  attend(isa, a, 2);
  full->window = 0;
  assert_memory_equal(a, full, sizeof *a); /* a window of T rows has no effect */
  free(a);
  free(b);
  free(full);
  rfr_ctx_destroy(ctx);
}

static rfr_value input(rfr_trace *t, const char *name, int64_t heads, int64_t width) {
  const int64_t shape[3] = {10, heads, width};
  return rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 3, shape);
}

static void recording(void **state) {
  (void)state;
  static const struct {
    int64_t H, Hk, Dk;
    rfr_attention_options options;
    const char *text; /* expected error; NULL: none */
  } cases[] = {{6, 2, 16, {.causal = 1}, NULL},
               {6, 2, 16, {.causal = 1, .window = 3, .cap = 50}, NULL},
               {6, 4, 16, {.causal = 1}, "do not divide"},
               {6, 0, 16, {.causal = 1}, "do not divide"},
               {6, 2, 8, {.causal = 1}, "rows of 8"},
               {6, 2, 16, {.causal = 0, .window = 3}, "window is 3"},
               {6, 2, 16, {.causal = 1, .window = -1}, "window is -1"},
               {6, 2, 16, {.causal = 1, .cap = -2}, "cap is -2"},
               {6, 2, 16, {.causal = 1, .cap = INFINITY}, "cap is inf"},
               {6, 2, 16, {.causal = 1, .longest = -5}, "longest is -5"}};
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    rfr_trace *t;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    const int64_t three = 3;
    rfr_value q = input(t, "q", cases[i].H, 16), k = input(t, "k", cases[i].Hk, cases[i].Dk);
    rfr_value v = input(t, "v", cases[i].Hk, cases[i].Dk);
    rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, &three);
    rfr_value o = rfr_attention(t, q, k, v, offsets, &cases[i].options);
    if (cases[i].text) {
      assert_int_equal(o, RFR_NONE);
      assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
      assert_non_null(strstr(rfr_last_error()->message, cases[i].text));
      assert_non_null(strstr(rfr_last_error()->message, "attention_test.c"));
    } else {
      assert_int_equal(rfr_trace_finish(t), RFR_OK);
      assert_true(t->ops[t->n_ops - 1].attr[0].f == 0.25); /* the default is resolved at recording */
    }
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* Compares multiply-adds with pairs counted one by one, for documents of the maximum length. */
static void work(void **state) {
  (void)state;
  static const rfr_attention_options cases[] = {{.causal = 0},
                                                {.causal = 1},
                                                {.causal = 1, .longest = 5},
                                                {.causal = 0, .longest = 2},
                                                {.causal = 1, .window = 3},
                                                {.causal = 1, .window = 3, .longest = 5},
                                                {.causal = 1, .window = 7, .longest = 5},
                                                {.causal = 1, .window = 1, .longest = 77}};
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const rfr_attention_options *o = &cases[i];
    const int64_t longest = o->longest > 0 ? o->longest : 10, three = 3;
    rfr_trace *t;
    int pairs = 0;
    assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
    rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, &three);
    rfr_attention(t, input(t, "q", 6, 16), input(t, "k", 2, 16), input(t, "v", 2, 16), offsets, o);
    assert_int_equal(rfr_trace_finish(t), RFR_OK);
    for (int q = 0; q < 10; q++)
      for (int k = 0; k < 10; k++)
        pairs += q / longest == k / longest && (!o->causal || k <= q) && (!o->window || k > q - o->window);
    double flops = t->ops[t->n_ops - 1].cost.flops;
    if (flops != 2.0 * 2 * pairs * 6 * 16) fail_msg("case %zu: %g FLOPs for %d pairs", i, flops, pairs);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* A NaN or an infinity in v affects the rows that attend to it; all other rows stay bitwise equal. */
static void not_finite(void **state) {
  (void)state;
  enum { AT = CUT + 5 };
  rfr_ctx *ctx;
  const char *isa = best_isa(&ctx);
  for (int i = 0; i < 4; i++) {
    sample *clean = sample_make(), *a = sample_make();
    clean->window = a->window = i >= 2 ? 9 : 0;
    a->v[(AT * HK + 1) * D + 3] = i % 2 ? INFINITY : NAN;
    attend(isa, clean, 2);
    attend(isa, a, 2);
    for (int t = 0; t < T; t++)
      for (int h = 0; h < H; h++) {
        const bool sees = h / (H / HK) == 1 && t >= AT && (!a->window || t < AT + a->window);
        const float *o = a->o + (t * H + h) * D;
        if (sees) assert_false(isfinite(o[3]));
        else assert_memory_equal(o, clean->o + (t * H + h) * D, D * sizeof *o);
      }
    assert_memory_equal(a->lse, clean->lse, sizeof a->lse);
    free(clean);
    free(a);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(documents), cmocka_unit_test(threads),
                                     cmocka_unit_test(windows),   cmocka_unit_test(recording),
                                     cmocka_unit_test(work),      cmocka_unit_test(not_finite)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
