/* SPDX-License-Identifier: Apache-2.0
 *
 * The optimizer beyond the op matrix: the schedule's corners, skipped updates that change nothing, results that do not
 * depend on the number of threads, refused options.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "core/rng.h"
#include "ops/optim/rounding.h"
#include "ops/quant/formats.h"
#include "support/op_check.h"

static void parse(const char *text, rfr_dtype type, rft_case *c) {
  const char *wrong = rft_case_parse(text, type, c);
  if (wrong) fail_msg("%s: %s", text, wrong);
}

static const rfi_kernel *kernel_of(const rft_case *c) {
  const char *isas[3];
  rft_isas(isas);
  return rfi_cpu_kernel(isas[0], c->def->code);
}

/* ---- the schedule ---- */

static double rate(const char *format, long long applied) {
  char text[200];
  rft_case c;
  rft_run run;
  snprintf(text, sizeof text, format, applied);
  parse(text, RFR_F32, &c);
  rft_run_init(&run, &c, RFT_DENSE, 0xFF, 0);
  assert_null(rft_run_kernel(&run, kernel_of(&c), 1));
  double lr = rft_get(&run.out_arg[0], 0);
  rft_run_deinit(&run);
  return lr;
}

static void test_schedule(void **state) {
  const char *cosine = "lr_schedule(I[4]=0,%lld,1,0) kind=2 base=0.5 min=0.125 warmup=4 total=20 decay=0";
  const char *linear = "lr_schedule(I[4]=0,%lld,1,0) kind=1 base=0.5 min=0.125 warmup=4 total=20 decay=0";
  const char *wsd = "lr_schedule(I[4]=0,%lld,1,0) kind=3 base=0.5 min=0.125 warmup=4 total=20 decay=8";
  const char *constant = "lr_schedule(I[4]=0,%lld,1,0) kind=0 base=0.5 min=0.125 warmup=4 total=0 decay=0";
  const char *all[] = {cosine, linear, wsd, constant};
  (void)state;
  for (int i = 0; i < 4; i++) {
    assert_float_equal(rate(all[i], 0), 0.125, 1e-7); /* not 0, because the first step counts */
    assert_float_equal(rate(all[i], 1), 0.25, 1e-7);
    assert_float_equal(rate(all[i], 3), 0.5, 1e-7); /* warmup is complete */
    assert_float_equal(rate(all[i], 4), 0.5, 1e-7);
    assert_float_equal(rate(all[i], 20), i < 3 ? 0.125 : 0.5, 1e-7);
    assert_float_equal(rate(all[i], 1000000), i < 3 ? 0.125 : 0.5, 1e-7);
  }
  assert_float_equal(rate(cosine, 12), 0.3125, 1e-7); /* half way: half of the difference */
  assert_float_equal(rate(linear, 8), 0.40625, 1e-7);
  assert_float_equal(rate(wsd, 12), 0.5, 1e-7); /* the last constant step */
  assert_float_equal(rate(wsd, 16), 0.3125, 1e-7);
}

/* ---- bitwise results ---- */

static void assert_same_bits_over_threads(const char *text, rfr_dtype type) {
  rft_case c;
  rft_run one;
  parse(text, type, &c);
  rft_run_init(&one, &c, RFT_DENSE, 0xFF, 0);
  assert_null(rft_run_kernel(&one, kernel_of(&c), 1));
  for (int threads = 2; threads < 6; threads++) {
    rft_run more;
    rft_run_init(&more, &c, RFT_DENSE, 0x11, 0);
    assert_null(rft_run_kernel(&more, kernel_of(&c), threads));
    for (int j = 0; j < c.def->n_results; j++)
      if (one.out_arg[j].data)
        assert_memory_equal(one.out_arg[j].data, more.out_arg[j].data, (size_t)rfi_bytes(&one.out_arg[j].type));
    rft_run_deinit(&more);
  }
  rft_run_deinit(&one);
}

static void test_threads(void **state) {
  (void)state;
  assert_same_bits_over_threads("grad_norm(_, f[67,1031], F[3], f[7,7919], f[0,2])", RFR_F32);
  assert_same_bits_over_threads("grad_norm(_, f[67,1031], F[3], f[7,7919], f[0,2])", RFR_BF16);
  assert_same_bits_over_threads(
      "adamw(f[67,1031], f[67,1031], f[67,1031], F[67,1031]>0, F[67,1031], F[1]=0.01, F[1]=0.7, i[1]=0, I[4]=9,8,1,1) "
      "beta1=0.9 beta2=0.95 eps=1e-08 decay=0.1 lr_scale=2",
      RFR_BF16);
}

/* With skip set no byte of any state changes, not even by conversion. */
static void test_skip(void **state) {
  static const char *const texts[] = {
      "adamw(f[7,131], f[7,131], f[7,131], f[7,131]>0, F[7,131], F[1]=0.01, F[1]=1, i[1]=1, I[4]=9,7,1,2) beta1=0.9 "
      "beta2=0.95 eps=1e-08 decay=0.1 lr_scale=1",
      "sgd(f[7,131], f[7,131], f[7,131], F[7,131], F[1]=0.1, _, i[1]=1) momentum=0.9 decay=0.1 lr_scale=1"};
  (void)state;
  for (int k = 0; k < 2; k++) {
    rft_case c;
    rft_run before, after;
    parse(texts[k], RFR_BF16, &c);
    rft_run_init(&before, &c, RFT_DENSE, 0xFF, 0);
    rft_run_init(&after, &c, RFT_DENSE, 0xFF, 0);
    for (int i = 1; i < c.n_in; i++) /* the gradient of a skipped step is not finite */
      if (i == 1) rft_set(&after.in_arg[i], 5, NAN);
    assert_null(rft_run_kernel(&after, kernel_of(&c), 2));
    for (int i = 0; i < c.n_in; i++)
      if (i != 1 && before.in_arg[i].data)
        assert_memory_equal(before.in_arg[i].data, after.in_arg[i].data, (size_t)rfi_bytes(&before.in_arg[i].type));
    rft_run_deinit(&before);
    rft_run_deinit(&after);
  }
}

/* A weight with a master weight becomes the rounded master, whatever its value was. Sizes: a small one, and one that is
 * written with non-temporal stores, by parts that begin at odd elements. */
static void test_master(void **state) {
  (void)state;
  for (int large = 0; large < 2; large++) {
    rft_case c;
    rft_run run;
    char text[200];
    const int64_t n = large ? 530017 : 1031;
    snprintf(text, sizeof text,
             "adamw(f[%lld], F[%lld], F[%lld], F[%lld]>0, F[%lld], F[1]=0.003, _, i[1]=0, I[4]=0,0,1,0) beta1=0.9 "
             "beta2=0.999 eps=1e-06 decay=0.01 lr_scale=0.5",
             (long long)n, (long long)n, (long long)n, (long long)n, (long long)n);
    parse(text, RFR_BF16, &c);
    rft_run_init(&run, &c, RFT_DENSE, 0xFF, 0);
    assert_null(rft_run_kernel(&run, kernel_of(&c), 1 + 2 * large));
    for (int64_t i = 0; i < n; i++) {
      float master = (float)rft_get(&run.out_arg[3], i);
      assert_true(rft_get(&run.out_arg[0], i) == rfr_float_from_bits(RFR_BF16, rfr_float_to_bits(RFR_BF16, master)));
    }
    rft_run_deinit(&run);
  }
}

/* ---- 8-bit moments ---- */

enum { N8 = 1031, BLOCK = 256 };

/* The weight equals that of unrounded moments; the new moments equal theirs up to the rounding of a block. Results do
 * not depend on the number of threads. A skipped step changes nothing. */
static void test_8bit(void **state) {
  (void)state;
  for (int skip = 0; skip < 2; skip++) {
    static const rfr_quant formats[2] = {RFR_QUANT_DYNAMIC8, RFR_QUANT_DYNAMIC8U};
    const int64_t shape = N8, bytes = rfr_quant_bytes(RFR_QUANT_DYNAMIC8, 1, &shape);
    assert_int_equal(bytes, (N8 + 15) / 16 * 16 + 4 * ((N8 + BLOCK - 1) / BLOCK));
    rft_case c;
    rft_run run, other;
    rfr_ctx *ctx;
    char text[200];
    static float values[2][N8], before[2][N8], after[2][N8];
    snprintf(
        text, sizeof text,
        "adamw(f[%d], F[%d], b[%lld]<256, b[%lld]<256, F[%d], F[1]=0.01, F[1]=0.5, i[1]=%d, I[4]=7,6,1,0) beta1=0.9 "
        "beta2=0.95 eps=1e-08 decay=0.1 lr_scale=1",
        N8, N8, (long long)bytes, (long long)bytes, N8, skip);
    assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
    parse(text, RFR_BF16, &c);
    rft_run_init(&run, &c, RFT_DENSE, 0xFF, 0);
    rft_run_init(&other, &c, RFT_DENSE, 0xFF, 0);
    for (int64_t i = 0; i < N8; i++) {
      values[0][i] = sinf((float)i * 0.37f) * (i % 7 == 0 ? 1e-3f : 1.0f);
      values[1][i] = i / BLOCK == 2 ? 0 : values[0][i] * values[0][i] + 1e-4f; /* a block of zeros */
    }
    for (int s = 0; s < 2; s++) {
      uint8_t *codes = run.in_arg[2 + s].data;
      assert_int_equal(rfr_quant_encode(ctx, formats[s], 1, &shape, RFR_F32, values[s], 1, codes), RFR_OK);
      memcpy(other.in_arg[2 + s].data, codes, (size_t)bytes);
      rfi_quant_decode(formats[s], 1, &shape, codes, before[s]);
    }
    static double master[N8], gradient[N8];
    for (int64_t i = 0; i < N8; i++) master[i] = rft_get(&run.in_arg[4], i), gradient[i] = rft_get(&run.in_arg[1], i);
    assert_null(rft_run_kernel(&run, kernel_of(&c), 1));
    assert_null(rft_run_kernel(&other, kernel_of(&c), 3));
    for (int j = 0; j < 4; j++)
      assert_memory_equal(run.out_arg[j].data, other.out_arg[j].data, (size_t)rfi_bytes(&run.out_arg[j].type));
    for (int s = 0; s < 2; s++) rfi_quant_decode(formats[s], 1, &shape, run.out_arg[1 + s].data, after[s]);
    for (int64_t i = 0; i < N8; i++) {
      const double x = 0.5 * gradient[i];
      values[0][i] = (float)(0.9 * before[0][i] + 0.1 * x);
      values[1][i] = (float)(0.95 * before[1][i] + 0.05 * x * x);
      const double mean = values[0][i] / (1 - pow(0.9, 7)), square = values[1][i] / (1 - pow(0.95, 7));
      const double w = master[i] - 0.01 * (mean / (sqrt(square) + 1e-8) + 0.1 * master[i]);
      assert_true(fabs(rft_get(&run.out_arg[3], i) - (skip ? master[i] : w)) < 1e-6 * (1 + fabs(w)));
    }
    for (int s = 0; s < 2; s++) {
      static float nearest[N8];
      uint8_t codes[1100] __attribute__((aligned(16)));
      assert_int_equal(rfr_quant_encode(ctx, formats[s], 1, &shape, RFR_F32, values[s], 1, codes), RFR_OK);
      rfi_quant_decode(formats[s], 1, &shape, codes, nearest);
      for (int64_t i = 0; i < N8; i++) /* a value halfway between two numbers may become either */
        assert_true(skip ? after[s][i] == before[s][i]
                         : fabs(after[s][i] - values[s][i]) <= 1.0001 * fabs(nearest[i] - values[s][i]) + 1e-7);
    }
    rft_run_deinit(&run);
    rft_run_deinit(&other);
    rfr_ctx_destroy(ctx);
  }
}

/* ---- stochastic rounding ---- */

enum { N_DRAWN = 1031, FIRST = 259 };

/* One update of SGD whose f32 arithmetic is exact: w - 2^-12 g, with w in bf16 and g an integer. Returns the weights'
 * bits; *value: the unrounded result. */
static void update_exactly(int64_t step, int threads, uint16_t *bits, double *value) {
  rft_case c;
  rft_run run;
  char text[200];
  snprintf(text, sizeof text,
           "sgd(h[%d], F[%d], _, _, F[1]=0.000244140625, _, i[1]=0, I[4]=%lld,%lld,123456789,0) momentum=0 decay=0 "
           "lr_scale=1 draws=7 first=%d",
           N_DRAWN, N_DRAWN, (long long)step, (long long)step, FIRST);
  parse(text, RFR_F32, &c);
  rft_run_init(&run, &c, RFT_DENSE, 0xFF, 0);
  for (int64_t i = 0; i < N_DRAWN; i++) {
    rft_set(&run.in_arg[0], i, (i % 2 ? -1.0 : 1.0) * (1 + (double)(i % 128) / 128)); /* steps of 2^-7 */
    rft_set(&run.in_arg[1], i, (double)(i % 61) - 30);
    value[i] = rft_get(&run.in_arg[0], i) - 0x1p-12 * rft_get(&run.in_arg[1], i);
  }
  assert_null(rft_run_kernel(&run, kernel_of(&c), threads));
  memcpy(bits, run.out_arg[0].data, N_DRAWN * sizeof *bits);
  rft_run_deinit(&run);
}

/* Each weight is one of the two bf16 values adjacent to its exact value, chosen by the addressed draw; the mean over
 * steps is the exact value. The number of threads does not matter. */
static void test_stochastic(void **state) {
  enum { DRAWS = 3000 };
  static double value[N_DRAWN], sum[N_DRAWN];
  uint16_t bits[N_DRAWN], more[N_DRAWN];
  const uint64_t key = rfi_stream_key(123456789, 0x726F756E64696E67u);
  double worst = 0, all = 0;
  (void)state;
  memset(sum, 0, sizeof sum);
  for (int64_t step = 0; step < DRAWS; step++) {
    update_exactly(step, 1, bits, value);
    for (int64_t i = 0; i < N_DRAWN; i++) {
      const uint64_t at = (uint64_t)(FIRST + i);
      const uint32_t word = rfi_draw4(key, at / 8, 7, 0, (uint64_t)step).v[at % 8 / 2] >> 16 * (at % 2) & 0xFFFFu;
      const double size = fabs(value[i]), unit = size < 1 ? 0x1p-8 : size < 2 ? 0x1p-7 : 0x1p-6;
      /* the fraction of draws that round away from zero */
      const double low = floor(size / unit) * unit, share = (size - low) / unit;
      const double want = copysign(low + (word + share * 65536 >= 65536 ? unit : 0), value[i]);
      const double x = (double)rfr_float_from_bits(RFR_BF16, bits[i]);
      if (x != want) fail_msg("step %lld, element %lld: %.9g, want %.9g", (long long)step, (long long)i, x, want);
      sum[i] += x;
    }
  }
  for (int64_t i = 0; i < N_DRAWN; i++) {
    const double error = (sum[i] / DRAWS - value[i]) / 0x1p-7;
    worst = fmax(worst, fabs(error)), all += error / N_DRAWN;
  }
  assert_true(worst < 5 * 0.5 / sqrt(DRAWS)); /* 5 standard deviations of the mean of draws */
  assert_true(fabs(all) < 5 * 0.5 / sqrt((double)DRAWS * N_DRAWN));
  update_exactly(11, 1, bits, value);
  for (int threads = 2; threads < 5; threads++) {
    update_exactly(11, threads, more, value);
    assert_memory_equal(bits, more, sizeof bits);
  }
}

/* NaN stays NaN and infinities stay infinite, whatever the draw. */
static void test_stochastic_special(void **state) {
  (void)state;
  for (uint32_t draw = 0; draw < 0x10000; draw += 0xFFF) {
    assert_int_equal(rfi_round_bf16(0x7F800000u, draw), 0x7F80);
    assert_int_equal(rfi_round_bf16(0xFF800000u, draw), 0xFF80);
    assert_true((rfi_round_bf16(0x7F800001u, draw) & 0x7FFF) > 0x7F80);
    assert_true((rfi_round_bf16(0xFFFFFFFFu, draw) & 0x7FFF) > 0x7F80);
    assert_int_equal(rfi_round_bf16(0x3F800000u, draw), 0x3F80); /* a bf16 value is not changed */
  }
}

static void test_norm_not_finite(void **state) {
  static const double bad[] = {NAN, INFINITY, -INFINITY};
  (void)state;
  for (int k = 0; k < 3; k++) {
    rft_case c;
    rft_run run;
    parse("grad_norm(_, f[31], f[5,1031])", RFR_BF16, &c);
    rft_run_init(&run, &c, RFT_DENSE, 0xFF, 0);
    rft_set(&run.in_arg[2], 4099, bad[k]);
    assert_null(rft_run_kernel(&run, kernel_of(&c), 2));
    assert_int_equal(rft_get(&run.out_arg[1], 0), 1);
    rft_run_deinit(&run);
  }
}

/* ---- recording ---- */

static void refused(rfr_ctx *ctx, void (*record)(rfr_trace *t, rfr_value step), const char *why) {
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  record(t, rfr_step_block(t));
  assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, why));
  rfr_trace_destroy(t);
}
static void schedule_with(rfr_trace *t, rfr_value step, rfr_lr_options o) { rfr_lr_schedule(t, step, &o); }
static void without_total(rfr_trace *t, rfr_value step) {
  rfr_lr_options o = rfr_lr_options_default();
  o.kind = RFR_LR_COSINE;
  schedule_with(t, step, o);
}
static void decay_too_long(rfr_trace *t, rfr_value step) {
  rfr_lr_options o = rfr_lr_options_default();
  o.kind = RFR_LR_WSD;
  o.warmup = 10;
  o.total = 20;
  o.decay = 11;
  schedule_with(t, step, o);
}
static void negative_rate(rfr_trace *t, rfr_value step) {
  rfr_lr_options o = rfr_lr_options_default();
  o.base = -1;
  schedule_with(t, step, o);
}
static void no_size(rfr_trace *t, rfr_value step) { schedule_with(t, step, (rfr_lr_options){.base = 1}); }
static void negative_clip(rfr_trace *t, rfr_value step) {
  (void)step;
  rfr_clip_scale(t, rfr_input(t, "norm", RFR_ROLE_INPUT, RFR_F32, 1, (int64_t[]){1}), -1);
}
static void beta_of_one(rfr_trace *t, rfr_value step) {
  rfr_adamw_options o = rfr_adamw_options_default();
  o.beta2 = 1;
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, (int64_t[]){3});
  rfr_adamw(t, w, w, w, w, RFR_NONE, w, RFR_NONE, RFR_NONE, step, &o);
}
static void other_shape(rfr_trace *t, rfr_value step) {
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, (int64_t[]){3});
  rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){3});
  rfr_value v = rfr_input(t, "v", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){4});
  rfr_adamw(t, w, w, m, v, RFR_NONE, rfr_lr_schedule(t, step, NULL), RFR_NONE, RFR_NONE, step, NULL);
}

static void masters_and_draws(rfr_trace *t, rfr_value step) {
  rfr_adamw_options o = rfr_adamw_options_default();
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_BF16, 1, (int64_t[]){3});
  rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){3});
  rfr_value v = rfr_input(t, "v", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){3});
  rfr_value master = rfr_input(t, "master", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){3});
  o.draws = 1;
  rfr_adamw(t, w, w, m, v, master, rfr_lr_schedule(t, step, NULL), RFR_NONE, RFR_NONE, step, &o);
}
static void draws_without_step(rfr_trace *t, rfr_value step) {
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_BF16, 1, (int64_t[]){3});
  rfr_sgd_stochastic(t, w, w, RFR_NONE, rfr_lr_schedule(t, step, NULL), RFR_NONE, RFR_NONE, RFR_NONE, 0, 0, 1, 1);
}
static void draws_of_f32(rfr_trace *t, rfr_value step) {
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, (int64_t[]){3});
  rfr_sgd_stochastic(t, w, w, RFR_NONE, rfr_lr_schedule(t, step, NULL), RFR_NONE, RFR_NONE, step, 0, 0, 1, 1);
}
static void narrow_average(rfr_trace *t, rfr_value step) {
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_BF16, 1, (int64_t[]){3});
  rfr_value average = rfr_input(t, "average", RFR_ROLE_STATE, RFR_BF16, 1, (int64_t[]){3});
  rfr_ema(t, average, w, RFR_NONE, step, 0.9, 0, 0);
}
static void decay_of_one(rfr_trace *t, rfr_value step) {
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, (int64_t[]){3});
  rfr_value average = rfr_input(t, "average", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){3});
  rfr_ema(t, average, w, RFR_NONE, step, 1, 0, 0);
}

static void one_8bit(rfr_trace *t, rfr_value step) {
  const int64_t bytes = 16 + 4;
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, (int64_t[]){3});
  rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_U8, 1, &bytes);
  rfr_value v = rfr_input(t, "v", RFR_ROLE_STATE, RFR_F32, 1, (int64_t[]){3});
  rfr_adamw(t, w, w, m, v, RFR_NONE, rfr_lr_schedule(t, step, NULL), RFR_NONE, RFR_NONE, step, NULL);
}

static void test_refused(void **state) {
  rfr_ctx *ctx;
  (void)state;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  refused(ctx, without_total, "total must be more than warmup");
  refused(ctx, decay_too_long, "decay must fit");
  refused(ctx, negative_rate, "at least 0");
  refused(ctx, no_size, "options.size");
  refused(ctx, negative_clip, "at least 0");
  refused(ctx, beta_of_one, "beta");
  refused(ctx, other_shape, "moments");
  refused(ctx, one_8bit, "both must be u8");
  refused(ctx, masters_and_draws, "bf16 without a master weight");
  refused(ctx, draws_without_step, "needs the operand step");
  refused(ctx, draws_of_f32, "bf16 without a master weight");
  refused(ctx, narrow_average, "average must have its shape, in f32");
  refused(ctx, decay_of_one, "decay must be in [0, 1)");
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_schedule),
                                     cmocka_unit_test(test_threads),
                                     cmocka_unit_test(test_skip),
                                     cmocka_unit_test(test_master),
                                     cmocka_unit_test(test_norm_not_finite),
                                     cmocka_unit_test(test_refused),
                                     cmocka_unit_test(test_8bit),
                                     cmocka_unit_test(test_stochastic),
                                     cmocka_unit_test(test_stochastic_special)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
