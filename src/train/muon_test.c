/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs with Muon: a step against the formulas in f64, for each kind of packed weight; bitwise equal eager, replayed,
 * resumed and over ranks; what is refused.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/context.h"
#include "support/ranks.h"
#include "support/run.h"
#include "support/thin.h"
#include "trace/trace.h"
#include "train/state.h"

#define MUON "optimizer: {name: muon, lr: 3e-3, weight_decay: 0.1, clip: 1.0}\n"
#define BF16 "precision: {dtype: bf16}\n"
#define WITH(model, rest) "refrain: 1\n" model DATA TWO_BATCHES MUON rest RUN

enum { STEPS = 20 };

/* ---- against f64 ---- */

/* c (M,N) = a (M,K) b (K,N), of which one may be transposed */
static void multiply(double *c, const double *a, bool ta, const double *b, bool tb, int64_t M, int64_t K, int64_t N) {
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++) sum += (ta ? a[k * M + i] : a[i * K + k]) * (tb ? b[j * K + k] : b[k * N + j]);
      c[i * N + j] = sum;
    }
}

/* Orthogonalizes x (M,N), with a leading batch dimension, and multiplies it by the factor; always by way of x xT. */
static void orthogonal(double *at, int64_t stride, int64_t M, int64_t N, double factor) {
  double *x = calloc((size_t)(M * N), sizeof *x), *y = calloc((size_t)(M * N), sizeof *x), norm = 0;
  double *g = calloc((size_t)(M * M), sizeof *g), *p = calloc((size_t)(M * M), sizeof *g);
  for (int64_t i = 0; i < M * N; i++) x[i] = at[i / N * stride + i % N], norm += x[i] * x[i];
  for (int64_t i = 0; i < M * N; i++) x[i] /= sqrt(norm) + 1e-7;
  for (int k = 0; k < 5; k++) {
    multiply(g, x, false, x, true, M, N, M);
    multiply(p, g, false, g, false, M, M, M);
    for (int64_t i = 0; i < M * M; i++) p[i] = -4.7750 * g[i] + 2.0315 * p[i] + (i / M == i % M ? 3.4445 : 0);
    multiply(y, p, false, x, false, M, M, N);
    memcpy(x, y, (size_t)(M * N) * sizeof *x);
  }
  for (int64_t i = 0; i < M * N; i++) at[i / N * stride + i % N] = factor * x[i];
  free(x), free(y), free(g), free(p);
}

static double *values_of(rfr_run *run, const char *name, const char *suffix, rfr_type *type) {
  char full[160];
  rfr_tensor x;
  snprintf(full, sizeof full, "%s%s", name, suffix);
  assert_int_equal(rfr_programs_tensor(run->programs, full, &x), RFR_OK);
  const int64_t n = rfi_count(&x.type);
  float *f = malloc((size_t)x.bytes);
  double *d = malloc((size_t)n * sizeof *d);
  assert_int_equal(x.type.dtype, RFR_F32);
  assert_int_equal(rfr_programs_read(run->programs, &x, f), RFR_OK);
  for (int64_t i = 0; i < n; i++) d[i] = f[i];
  *type = x.type;
  free(f);
  return d;
}

/* How a weight consists of matrices: `across` by `down` of them, in each slice of rank 3. With `unequal` the rows are
 * divided 2 : 1 : 1. */
typedef struct packed {
  const char *name;
  int across, down;
  bool unequal, inputs_first;
} packed;

/* After the first step of a run the gradient g follows from the momentum b: b = 0.05 g, u = 0.05 g + 0.95 b = 1.95
 * b. */
static void check_weight(rfr_run *run, const packed *w, double *const before, bool rms) {
  rfr_type type;
  double *after = values_of(run, w->name, "", &type), *u = values_of(run, w->name, ".momentum", &type);
  const int64_t slices = type.rank == 3 ? type.shape[0] : 1, R = type.shape[type.rank - 2],
                C = type.shape[type.rank - 1];
  for (int64_t i = 0; i < slices * R * C; i++) u[i] *= 1.95;
  for (int64_t k = 0; k < slices; k++)
    for (int64_t row = 0, part = 0; row < R; part++) {
      const int64_t rows = w->unequal ? (part == 0 ? R / 2 : R / 4) : R / w->down, columns = C / w->across;
      for (int64_t column = 0; column < C; column += columns) {
        const double out = (double)(w->inputs_first ? columns : rows), in = (double)(w->inputs_first ? rows : columns);
        orthogonal(u + (k * R + row) * C + column, C, rows, columns,
                   rms ? 0.2 * sqrt(fmax(rows, columns)) : sqrt(fmax(1, out / in)));
      }
      row += rows;
    }
  double most = 0;
  for (int64_t i = 0; i < slices * R * C; i++) {
    const double want = before[i] - 3e-3 * (u[i] + 0.1 * before[i]);
    most = fmax(most, fabs(after[i] - want));
  }
  if (most > 2e-7) fail_msg("%s: %g", w->name, most); /* 1 ulp of the largest weights is 1e-8 */
  free(after), free(u);
}

static void check_step(const char *config, bool rms, const packed *weights, int n) {
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, config, NULL, &o);
  double *before[8];
  rfr_type type;
  assert_int_equal(rfi_state_prepare(run, false), RFR_OK);
  for (int i = 0; i < n; i++) before[i] = values_of(run, weights[i].name, "", &type);
  rft_run_steps(run, 1);
  for (int i = 0; i < n; i++) check_weight(run, &weights[i], before[i], rms);
  for (int i = 0; i < n; i++) free(before[i]);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

#define LAYER "model.layers.0."
static void test_step(void **state) {
  (void)state;
  check_step(WITH(LLAMA, SINGLE), true,
             (packed[]){{.name = LAYER "self_attn.q_proj.weight", .across = 1, .down = 1},
                        {.name = LAYER "self_attn.k_proj.weight", .across = 1, .down = 1},
                        {.name = LAYER "mlp.up_proj.weight", .across = 1, .down = 1},
                        {.name = LAYER "mlp.down_proj.weight", .across = 1, .down = 1}},
             4);
  check_step(WITH(EXPERTS, SINGLE), true,
             (packed[]){{.name = LAYER "mlp.experts.gate_up_proj", .across = 1, .down = 2},
                        {.name = LAYER "mlp.experts.down_proj", .across = 1, .down = 1}},
             2);
#define G "transformer.h.0."
  check_step("refrain: 1\n"
             "model: {model_type: gpt2, vocab_size: 256, hidden_size: 24, num_hidden_layers: 2,\n"
             "        num_attention_heads: 3, max_position_embeddings: 64}\n" DATA TWO_BATCHES SINGLE
             "optimizer: {name: muon, lr: 3e-3, weight_decay: 0.1, clip: 1.0, muon_scale: shape}\n" RUN,
             false,
             (packed[]){{.name = G "attn.c_attn.weight", .across = 3, .down = 1, .inputs_first = true},
                        {.name = G "mlp.c_fc.weight", .across = 1, .down = 1, .inputs_first = true},
                        {.name = G "mlp.c_proj.weight", .across = 1, .down = 1, .inputs_first = true}},
             3);
}

/* ---- runs ---- */

static bool has(rfr_run *run, const char *name) {
  rfr_tensor x;
  return rfr_programs_tensor(run->programs, name, &x) == RFR_OK;
}

static void test_states(void **state) {
  (void)state;
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, WITH(EXPERTS, BF16), NULL, &o);
  assert_true(has(run, LAYER "mlp.experts.down_proj.momentum") && !has(run, LAYER "mlp.experts.down_proj.exp_avg"));
  assert_true(has(run, LAYER "mlp.gate.weight.exp_avg") && !has(run, LAYER "mlp.gate.weight.momentum"));
  assert_true(has(run, "model.embed_tokens.weight.exp_avg") && has(run, "lm_head.weight.exp_avg"));
  assert_true(has(run, LAYER "input_layernorm.weight.exp_avg"));
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static void same_bits(const char *config, const char *name) {
  const rft_record r = rft_assert_same_bits(config, name, STEPS);
  assert_true(r.loss[STEPS] < 0.95 * r.loss[1]);
  assert_int_equal(r.skipped, 0);
}

static void test_runs(void **state) {
  (void)state;
  same_bits(WITH(LLAMA, SINGLE), "f32");
  same_bits(WITH(EXPERTS, BF16), "bf16");
  same_bits(WITH(LLAMA, HALF), "f16");
}

static void expect_refusal(const char *config, const char *text) {
  rfr_ctx *ctx = rft_run_ctx(1);
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  o.config_folder = rft_run_root;
  assert_int_not_equal(rfr_run_open(ctx, config, NULL, &o, &run), RFR_OK);
  if (!strstr(rfr_last_error()->message, text)) fail_msg("%s", rfr_last_error()->message);
  rfr_ctx_destroy(ctx);
}

static void test_refused(void **state) {
  (void)state;
  expect_refusal("refrain: 1\n" LLAMA DATA TWO_BATCHES "optimizer: {name: muon, lr: 1e-2, state_dtype: u8}\n" RUN,
                 "u8 is for adamw");
  expect_refusal(WITH(LLAMA, "adapter: {type: lora, rank: 2}\n"), "frozen with an adapter");
}

/* ---- ranks ---- */

typedef struct job {
  const char *config;
  rfi_hash hash;
} job;

static rfr_status train(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  job *j = rank;
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.comm = comm;
  rfr_status s = rfr_run_open(own, j->config, NULL, &o, &run);
  for (int i = 0; i < STEPS && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rft_hash_state(run, &j->hash);
  rfr_run_close(run);
  return s;
}

static rfr_status expect_shard_refusal(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  const char *const *config = rank;
  rft_record r = {0};
  rfr_run_options o = rft_run_options(&r);
  rfr_run *run;
  (void)number;
  o.config_folder = rft_run_root;
  o.comm = comm;
  const rfr_status s = rfr_run_open(own, *config, NULL, &o, &run);
  const bool refused = s == RFR_UNSUPPORTED && strstr(rfr_last_error()->message, "complete matrices");
  rfr_run_close(run);
  return refused ? RFR_OK : rfi_fail(RFI_E_INTERNAL, "not refused");
}

static void test_ranks(void **state) {
  job jobs[2];
  const char *refused[2];
  (void)state;
  for (int r = 0; r < 2; r++) jobs[r] = (job){.config = WITH(EXPERTS, SINGLE)};
  rft_run_ranks(2, jobs, sizeof *jobs, train);
  assert_memory_equal(&jobs[0].hash, &jobs[1].hash, sizeof jobs[0].hash);
  for (int r = 0; r < 2; r++) refused[r] = WITH(EXPERTS, SINGLE "parallel: {shard: optimizer}\n");
  rft_run_ranks(2, refused, sizeof *refused, expect_shard_refusal);
  for (int r = 0; r < 2; r++) jobs[r] = (job){.config = WITH(LLAMA, SINGLE "parallel: {pipeline: 2}\n")};
  rft_run_ranks(2, jobs, sizeof *jobs, train);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_one_thread_test(test_step), rft_one_thread_test(test_states),
                                     rft_one_thread_test(test_runs), rft_one_thread_test(test_refused),
                                     rft_context_test(test_ranks)};
  return cmocka_run_group_tests(tests, rft_run_setup, rft_run_teardown);
}
