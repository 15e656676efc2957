/* SPDX-License-Identifier: Apache-2.0
 *
 * Shard: a step over ranks that are threads is bitwise equal with every rfr_shard, and equals one rank with as many
 * microbatches within rounding. With several microbatches per rank, RFR_SHARD_FULL has another order of sums and few
 * unreduced gradients. The pass places each gather one region ahead and refuses what it cannot shard.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "pass/pass.h"
#include "refrain/ops.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/text.h"

enum { T = 6, C = 67, HIDDEN = 71, LAYERS = 3, N = C * HIDDEN, STEPS = 4, MOST_RANKS = 3, WEIGHTS = 2 * LAYERS };

static float noise(int seed, int64_t i) {
  const uint32_t z = (uint32_t)seed * 2654435761u + (uint32_t)i * 40503u + 17u;
  return (float)((z ^ z >> 13) * 2246822519u >> 8) / 8388608.0f - 1.0f;
}

static rfr_value weight(rfr_trace *t, int k) {
  char name[8];
  snprintf(name, sizeof name, "w%d", k);
  return rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_BF16, 2, ((int64_t[]){k % 2 ? C : HIDDEN, k % 2 ? HIDDEN : C}));
}

static rfr_value state(rfr_trace *t, const char *kind, int k, bool bytes) {
  char name[16];
  int64_t n = rfr_quant_bytes(RFR_QUANT_DYNAMIC8, 1, (int64_t[]){N});
  snprintf(name, sizeof name, "w%d.%s", k, kind);
  if (bytes) return rfr_input(t, name, RFR_ROLE_STATE, RFR_U8, 1, &n);
  return rfr_input(t, name, RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){k % 2 ? C : HIDDEN, k % 2 ? HIDDEN : C}));
}

static void update(rfr_trace *t, const rfr_value *w, rfr_value *g, int ranks, bool bytes) {
  rfr_value skip, step = rfr_step_block(t);
  const rfr_value zeros = rfr_input(t, "zeros", RFR_ROLE_STATE, RFR_I32, 1, ((int64_t[]){WEIGHTS}));
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_scope(t, "optimizer");
  for (int k = 0; k < WEIGHTS && ranks > 1; k++) g[k] = rfr_all_reduce(t, g[k], ranks);
  const rfr_value lr = rfr_fill(t, 0.01, RFR_F32, 1, ((int64_t[]){1}));
  const rfr_value norm = rfr_grad_norm_zeros(t, WEIGHTS, g, zeros, &skip), clip = rfr_clip_scale(t, norm, 0.5);
  for (int k = 0; k < WEIGHTS; k++)
    rfr_adamw(t, w[k], g[k], state(t, "m", k, bytes), state(t, "v", k, bytes), state(t, "master", k, false), lr, clip,
              skip, step, NULL);
  rfr_step_end(t, step, skip);
  rfr_output(t, "norm", norm);
}

static rfr_trace *record_rows(rfr_ctx *own, int64_t rows, int ranks, int microbatches, bool bytes) {
  rfr_trace *t;
  rfr_value w[WEIGHTS], g[WEIGHTS], loss = RFR_NONE;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  for (int k = 0; k < WEIGHTS; k++) w[k] = weight(t, k);
  for (int m = 0; m < microbatches; m++) {
    char name[8];
    snprintf(name, sizeof name, "x%d", m);
    const rfr_value x = rfr_input(t, name, RFR_ROLE_INPUT, RFR_BF16, 2, ((int64_t[]){rows, C}));
    rfr_value h = x;
    rfr_microbatch(t, m);
    for (int l = 0; l < LAYERS; l++) {
      snprintf(name, sizeof name, "layer%d", l);
      rfr_scope(t, name);
      h = rfr_add(t, h, rfr_linear(t, rfr_gelu(t, rfr_linear(t, h, w[2 * l], RFR_NONE), 1), w[2 * l + 1], RFR_NONE));
    }
    rfr_scope(t, "head");
    const rfr_value one = rfr_sum(t, rfr_cast(t, rfr_mul(t, h, h), RFR_F32), -1);
    loss = loss == RFR_NONE ? one : rfr_add(t, loss, one);
  }
  rfr_microbatch(t, -1);
  for (int k = 0; k < WEIGHTS; k++) g[k] = rfr_gradient(t, loss, w[k], RFR_F32);
  update(t, w, g, ranks, bytes);
  return t;
}

static rfr_trace *record(rfr_ctx *own, int ranks, int microbatches, bool bytes) {
  return record_rows(own, T, ranks, microbatches, bytes);
}

typedef struct rank {
  int ranks, microbatches;
  rfr_shard shard;
  bool bytes;
  float weights[WEIGHTS][N], norm; /* weights: the master weights */
  int32_t zeros[WEIGHTS];
  int64_t persistent;
} rank;

static uint16_t bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The elements of the full tensor in this rank's shard: returns the first, *n is their number. */
static int64_t shard_of(const rank *r, int number, const rfr_tensor *x, int64_t *n) {
  const int64_t all = rfi_count(&x->type), first = all == N ? 0 : all * number;
  (void)r;
  *n = first >= N ? 0 : N - first < all ? N - first : all;
  return first;
}

static rfr_status fill(const rank *r, int number, rfr_programs *p) {
  rfr_tensor w, master;
  char name[16];
  for (int k = 0; k < WEIGHTS; k++) {
    int64_t n;
    snprintf(name, sizeof name, "w%d", k);
    RFI_TRY(rfr_programs_tensor(p, name, &w));
    snprintf(name, sizeof name, "w%d.master", k);
    RFI_TRY(rfr_programs_tensor(p, name, &master));
    const int64_t first = shard_of(r, number, &w, &n);
    for (int64_t i = 0; i < n; i++) {
      ((float *)master.data)[i] = 0.1f * noise(50 + k, first + i);
      ((uint16_t *)w.data)[i] = bf16(((float *)master.data)[i]);
    }
  }
  return RFR_OK;
}

static rfr_status feed(const rank *r, int number, int step, rfr_programs *p) {
  rfr_tensor x;
  char name[8];
  for (int m = 0; m < r->microbatches; m++) {
    snprintf(name, sizeof name, "x%d", m);
    RFI_TRY(rfr_programs_tensor(p, name, &x));
    for (int i = 0; i < T * C; i++) ((uint16_t *)x.data)[i] = bf16(noise(10 * step + number * r->microbatches + m, i));
  }
  return RFR_OK;
}

static rfr_status collect(rank *r, int number, rfr_comm *comm, rfr_programs *p) {
  static const int most = MOST_RANKS * (N + 512);
  rfr_tensor x;
  char name[16];
  float *all;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *all * (size_t)most, &all));
  rfr_status s = RFR_OK;
  for (int k = 0; k < WEIGHTS && s == RFR_OK; k++) {
    snprintf(name, sizeof name, "w%d.master", k);
    s = rfr_programs_tensor(p, name, &x);
    if (s != RFR_OK) break;
    const int64_t n = rfi_count(&x.type);
    if (n != N) s = rfr_comm_all_gather(comm, x.data, all, n, RFR_F32);
    memcpy(r->weights[k], n == N ? x.data : all, sizeof r->weights[k]);
  }
  rfi_free(ctx, all);
  RFI_TRY(s);
  RFI_TRY(rfr_programs_tensor(p, "zeros", &x));
  memcpy(r->zeros, x.data, sizeof r->zeros);
  RFI_TRY(rfr_program_output(p, 0, "norm", &x));
  r->norm = *(float *)x.data;
  (void)number;
  return RFR_OK;
}

static rfr_status train(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  rfr_programs *p = NULL;
  rfr_memory memory = {0};
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = comm;
  o.shard = r->shard;
  rfr_trace *t = record(own, r->ranks, r->microbatches, r->bytes);
  rfr_status s = t ? rfr_trace_finish(t) : RFR_NO_MEMORY;
  if (s == RFR_OK) s = rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  if (s == RFR_OK) s = fill(r, number, p);
  for (int step = 0; step < STEPS && s == RFR_OK; step++) {
    s = feed(r, number, step, p);
    if (s == RFR_OK) s = step % 2 ? rfr_program_run(p, 0) : rfr_program_replay(p, 0, NULL, 0);
  }
  if (s == RFR_OK) s = collect(r, number, comm, p);
  if (s == RFR_OK) s = rfr_programs_memory(p, &memory);
  r->persistent = memory.weights + memory.optimizer;
  rfr_programs_destroy(p);
  return s;
}

static void check_against(const rank *a, const rank *b, double most) {
  double worst = fabs((double)a->norm - b->norm) / fabs((double)b->norm);
  for (int k = 0; k < WEIGHTS; k++)
    for (int i = 0; i < N; i++) {
      const double d = fabs((double)a->weights[k][i] - b->weights[k][i]);
      if (d > worst) worst = d;
    }
  if (!(worst <= most)) fail_msg("difference %g, at most %g", worst, most);
}

static void check_same(const rank *a, const rank *b) {
  assert_memory_equal(a->weights, b->weights, sizeof a->weights);
  assert_memory_equal(a->zeros, b->zeros, sizeof a->zeros);
  assert_memory_equal(&a->norm, &b->norm, sizeof a->norm);
}

static void check_modes(int ranks, int microbatches, bool bytes) {
  static rank one, many[RFR_SHARD_FULL + 1][MOST_RANKS];
  for (int mode = RFR_SHARD_NONE; mode <= RFR_SHARD_FULL; mode++) {
    for (int i = 0; i < ranks; i++)
      many[mode][i] = (rank){.ranks = ranks, .microbatches = microbatches, .shard = (rfr_shard)mode, .bytes = bytes};
    rft_run_ranks(ranks, many[mode], sizeof **many, train);
    const bool same = mode < RFR_SHARD_FULL || microbatches == 1;
    for (int i = 0; i < ranks; i++) check_same(&many[mode][i], &many[same ? 0 : mode][0]);
  }
  assert_true(many[RFR_SHARD_FULL][0].persistent * ranks < many[0][0].persistent * 5 / 4);
  one = (rank){.ranks = 1, .microbatches = microbatches * ranks, .bytes = bytes};
  rft_run_ranks(1, &one, sizeof one, train);
  if (bytes) return;
  check_against(&many[0][0], &one, 1e-3);
  check_against(&many[RFR_SHARD_FULL][0], &one, 1e-3);
}

static void test_modes(void **none) {
  (void)none;
  for (int ranks = 2; ranks <= MOST_RANKS; ranks++)
    for (int microbatches = 1; microbatches <= 2; microbatches++)
      for (int bytes = 0; bytes < 2; bytes++) check_modes(ranks, microbatches, bytes);
}

/* ---- the trace ---- */

static void shard(rfr_trace *t, rfr_shard mode, rfi_report *report, rfr_trace **joint, rfr_trace **out) {
  const rfi_pass_options o = {.shard = mode, .ranks = 2};
  OK(rfr_trace_finish(t));
  OK(rfi_pass_autodiff(t, &o, report, joint));
  OK(rfi_pass_shard(*joint, &o, report, out));
}

/* Checks the order of gathers, reductions, sums of shards and GEMMs, by layer; with `wgrads` also that of the ops of
 * the wgrad phase (w). */
static void check_order(rfr_trace *t, bool wgrads, const char *want) {
  rfi_report report = {.text = {.ctx = ctx}};
  rfr_trace *joint, *sharded;
  char order[128] = "";
  size_t n = 0;
  shard(t, RFR_SHARD_FULL, &report, &joint, &sharded);
  for (int i = 0; i < sharded->n_ops; i++) {
    const rfi_opr *op = &sharded->ops[i];
    const int code = (int)op->def->code, layer = strncmp(op->scope, "layer", 5) == 0 ? op->scope[5] : op->scope[0];
    const char kind = code == RFI_OP_all_gather                                                ? 'g'
                      : code == RFI_OP_reduce_scatter                                          ? 'r'
                      : code == RFI_OP_accumulate                                              ? '+'
                      : code == RFI_OP_matmul && op->phase != RFR_PHASE_WGRAD                  ? 'm'
                      : wgrads && op->phase == RFR_PHASE_WGRAD && !(op->def->flags & RFI_VIEW) ? 'w'
                                                                                               : 0;
    if (!kind || (n >= 2 && order[n - 2] == kind && order[n - 1] == layer)) continue;
    order[n++] = kind, order[n++] = (char)layer, order[n] = '\0';
    assert_true(n + 2 < sizeof order);
  }
  assert_string_equal(order, want);
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t), rfr_trace_destroy(joint), rfr_trace_destroy(sharded);
}

static void check_places(int microbatches, const char *want) {
  check_order(record(ctx, 2, microbatches, false), false, want);
}

/* A gather comes one region before the region that needs it. A reduction comes directly after its bucket's last
 * gradient. The sum with earlier microbatches comes after the next reduction. */
static void test_places(void **none) {
  (void)none;
  check_places(1, "g0g1m0g2m1g1m2r2g0m1r1m0r0go");
  check_places(2, "g0g1m0g2m1g1m2r2g0m1r1g1m0r0m0g2m1g1m2r2g0m1r1+2m0r0+1+0go");
}

/* An embedding and two layers of two weights each; a weight has `rows` x `width` elements. `tied`: the weights of
 * layer 0 are one, so that an op adds its two gradients. */
static rfr_trace *record_embedding(int64_t rows, int64_t width, bool tied) {
  enum { TOKENS = 8, MOST = 5 };
  const int n = tied ? MOST - 1 : MOST;
  rfr_trace *t;
  rfr_value w[MOST], g[MOST], skip;
  const int64_t wide[2] = {rows, width}, tall[2] = {width, rows}, tokens = TOKENS;
  OK(rfr_trace_create(ctx, &t));
  for (int k = 0; k < n; k++) {
    const char name[3] = {'w', (char)('0' + k), '\0'};
    w[k] = rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_BF16, 2, k == 0 || k % 2 ? wide : tall);
  }
  rfr_scope(t, "embed");
  rfr_value h = rfr_embedding(t, w[0], rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, &tokens));
  for (int l = 0; l < 2; l++) {
    rfr_scope(t, l ? "layer1" : "layer0");
    const rfr_value first = w[tied ? 1 + l : 2 * l + 1], second = w[tied ? 1 + 2 * l : 2 * l + 2];
    h = rfr_add(t, h, rfr_linear(t, rfr_gelu(t, rfr_linear(t, h, first, RFR_NONE), 1), second, RFR_NONE));
  }
  rfr_scope(t, "head");
  const rfr_value loss = rfr_sum(t, rfr_cast(t, rfr_mul(t, h, h), RFR_F32), -1), step = rfr_step_block(t);
  for (int k = 0; k < n; k++) g[k] = rfr_gradient(t, loss, w[k], RFR_F32);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_scope(t, "optimizer");
  for (int k = 0; k < n; k++) g[k] = rfr_all_reduce(t, g[k], 2);
  const rfr_value lr = rfr_fill(t, 0.01, RFR_F32, 1, ((int64_t[]){1}));
  const rfr_value norm = rfr_grad_norm(t, n, g, &skip), clip = rfr_clip_scale(t, norm, 0.5);
  for (int k = 0; k < n; k++) {
    const char m[3] = {'m', (char)('0' + k), '\0'}, v[3] = {'v', (char)('0' + k), '\0'};
    const int64_t *shape = k == 0 || k % 2 ? wide : tall;
    rfr_adamw(t, w[k], g[k], rfr_input(t, m, RFR_ROLE_STATE, RFR_F32, 2, shape),
              rfr_input(t, v, RFR_ROLE_STATE, RFR_F32, 2, shape), RFR_NONE, lr, clip, skip, step, NULL);
  }
  rfr_step_end(t, step, skip);
  rfr_output(t, "norm", norm);
  return t;
}

/* The wgrads of layer 0 follow the gradient of the embedding and overlap with its reduction, unless another op reads
 * them. Large gradients of layer 0 are reduced one by one, small ones together. */
static void test_embedding(void **none) {
  (void)none;
  check_order(record_embedding(64, 32, false), true, "geg0g1m0g0m1w1m1w1r1m0werew0r0go");
  check_order(record_embedding(2048, 1024, false), true, "geg0g1m0g0m1w1m1w1r1m0werew0r0w0r0go");
  check_order(record_embedding(32, 32, true), true, "geg0g1m0g0m1w1m1w1r1m0w0m0w0r0werego");
}

static rfr_plan_summary planned(const rfr_trace *t, rfr_comm *comm, int64_t budget) {
  rfr_programs *p;
  rfr_plan_summary plan;
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = comm;
  o.shard = RFR_SHARD_FULL;
  o.plan_only = 1;
  o.recompute = budget > 0 ? RFR_RECOMPUTE_AUTO : RFR_RECOMPUTE_KEEP;
  o.budget = budget;
  OK(rfr_compile(ctx, 1, &t, NULL, &o, &p));
  OK(rfr_program_plan(p, 0, &plan));
  rfr_programs_destroy(p);
  return plan;
}

/* At most two layers have live unreduced gradients, whatever the number of microbatches. The plans may differ by what
 * the planner leaves unused between buffers. */
static void test_unreduced(void **none) {
  (void)none;
  rfr_comm *ends[2];
  rfr_plan_summary plan[2];
  OK(rfr_comm_threads_create(ctx, 2, 60, ends));
  for (int k = 0; k < 2; k++) {
    rfr_trace *t = record(ctx, 2, k ? 12 : 6, false);
    OK(rfr_trace_finish(t));
    plan[k] = planned(t, ends[0], 0);
    rfr_trace_destroy(t);
  }
  assert_int_equal(plan[1].transient_lower_bound_bytes, plan[0].transient_lower_bound_bytes);
  assert_true(plan[1].transient_planned_bytes < plan[0].transient_planned_bytes * 1.02);
  rfr_comm_destroy(ends[0]), rfr_comm_destroy(ends[1]);
}

/* The budget includes the bytes that this pass adds after `recompute`. */
static void test_budget(void **none) {
  (void)none;
  rfr_comm *ends[2];
  rfr_trace *t = record_rows(ctx, 1024, 2, 2, false);
  OK(rfr_trace_finish(t));
  OK(rfr_comm_threads_create(ctx, 2, 60, ends));
  const int64_t all = planned(t, ends[0], 0).planned_bytes, least = planned(t, ends[0], 1).planned_bytes;
  assert_true(least < all);
  for (int k = 2; k < 32; k++) {
    const int64_t budget = least + (all - least) * k / 32;
    const int64_t bytes = planned(t, ends[0], budget).planned_bytes;
    assert_in_range(bytes, least, budget);
    assert_true(bytes >= budget / 10 * 9); /* a larger budget recomputes less than the smallest plan */
  }
  rfr_comm_destroy(ends[0]), rfr_comm_destroy(ends[1]);
  rfr_trace_destroy(t);
}

static void test_refused(void **none) {
  (void)none;
  rfi_report report = {.text = {.ctx = ctx}};
  const rfi_pass_options o = {.shard = RFR_SHARD_FULL, .ranks = 2};
  rfr_trace *t = record(ctx, 1, 1, false), *joint, *out;
  OK(rfr_trace_finish(t));
  OK(rfi_pass_autodiff(t, &o, &report, &joint));
  assert_int_equal(rfi_pass_shard(joint, &o, &report, &out), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "dist.shard");
  assert_non_null(strstr(rfr_last_error()->message, "\"w0\""));
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t), rfr_trace_destroy(joint);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_modes),     rft_context_test(test_places),
                                     rft_context_test(test_embedding), rft_context_test(test_unreduced),
                                     rft_context_test(test_budget),    rft_context_test(test_refused)};
  return cmocka_run_group_tests_name("shard", tests, NULL, NULL);
}
