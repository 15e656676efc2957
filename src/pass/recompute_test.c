/* SPDX-License-Identifier: Apache-2.0
 *
 * Recompute: it changes no bit, keeps within the budget or names the smallest one that
 * works, never repeats an effect, and its clones are the ops that they stand for.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "core/rng.h"
#include "exec/exec.h"
#include "pass/recompute_model.h"
#include "refrain/nn.h"

static rfr_ctx *ctx;
static int setup(void **state) {
  (void)state;
  return rfr_ctx_create(NULL, &ctx) == RFR_OK ? 0 : -1;
}
static int teardown(void **state) {
  (void)state;
  int live = (int)rfr_ctx_get_stats(ctx).live_blocks;
  rfr_ctx_destroy(ctx);
  return live;
}

#define OK(call)                                                                \
  do {                                                                          \
    if ((call) != RFR_OK) fail_msg("%s: %s", #call, rfr_last_error()->message); \
  } while (0)

/* ---- a training step of a small Llama ---- */

enum { TOKENS = 64, MOST = 512, VOCAB = 50 };

static rfr_model_config small(int64_t layers) {
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  c.vocab_size = VOCAB;
  c.hidden_size = 24;
  c.intermediate_size = 56;
  c.layers = layers;
  c.heads = 3;
  c.kv_heads = 1;
  c.head_dim = 8;
  c.dropout = 0.2;
  c.dtype = RFR_F32;
  return c;
}

static rfr_value update(rfr_trace *t, rfr_value w, rfr_value g, rfr_value rate, rfr_value clip, rfr_value skip,
                        rfr_value step) {
  rfr_adamw_options adam = rfr_adamw_options_default();
  rfr_type type = rfr_value_type(t, w);
  char m[128], v[128];
  snprintf(m, sizeof m, "%s.m", rfr_value_name(t, w));
  snprintf(v, sizeof v, "%s.v", rfr_value_name(t, w));
  return rfr_adamw(t, w, g, rfr_input(t, m, RFR_ROLE_STATE, RFR_F32, type.rank, type.shape),
                   rfr_input(t, v, RFR_ROLE_STATE, RFR_F32, type.rank, type.shape), RFR_NONE, rate, clip, skip, step,
                   &adam);
}

static rfr_trace *training(const rfr_model_config *model, int microbatches, rfr_policy policy) {
  rfr_trace *t;
  rfr_model_config c = *model;
  rfr_value parameter[MOST], grad[MOST], targets[8], tokens[8], loss = RFR_NONE, skip;
  OK(rfr_trace_create(ctx, &t));
  for (int m = 0; m < microbatches; m++) {
    char name[2][16];
    snprintf(name[0], 16, "tokens%d", m);
    snprintf(name[1], 16, "targets%d", m);
    tokens[m] = rfr_input(t, name[0], RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
    targets[m] = rfr_input(t, name[1], RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
  }
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_value step = rfr_step_block(t);
  rfr_model_declare(t, &c, NULL, 0, parameter);
  rfr_value inv = rfr_token_count(t, microbatches, targets, -100, NULL);
  for (int m = 0; m < microbatches; m++) {
    rfr_microbatch(t, m);
    rfr_set_recompute(t, policy);
    rfr_value h = rfr_model_forward(t, &c, parameter, tokens[m], offsets, step);
    rfr_set_recompute(t, RFR_POLICY_AUTO);
    rfr_value part = rfr_cross_entropy(t, rfr_model_logits(t, &c, parameter, h, RFR_F32), targets[m], inv, -100);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_scope(t, "");
  int n = rfr_model_parameter_count(&c);
  for (int i = 0; i < n; i++) grad[i] = rfr_gradient(t, loss, parameter[i], RFR_F32);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_lr_options lr = rfr_lr_options_default();
  lr.base = 0.003;
  rfr_value rate = rfr_lr_schedule(t, step, &lr), norm = rfr_grad_norm(t, n, grad, &skip);
  rfr_value clip = rfr_clip_scale(t, norm, 1);
  for (int i = 0; i < n; i++) update(t, parameter[i], grad[i], rate, clip, skip, step);
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_trace *llama(int64_t layers, int microbatches, rfr_policy policy) {
  rfr_model_config c = small(layers);
  return training(&c, microbatches, policy);
}

static void init_model(rfr_programs *p, const rfr_model_config *model, int microbatches) {
  rfr_model_config c = *model;
  rfr_tensor x;
  for (int i = 0; i < rfr_model_parameter_count(&c); i++) {
    rfr_parameter parameter;
    OK(rfr_model_parameter(&c, i, &parameter));
    OK(rfr_programs_tensor(p, parameter.name, &x));
    OK(rfr_parameter_fill(&parameter, 7, c.dtype, x.data));
  }
  for (int m = 0; m < microbatches; m++)
    for (int k = 0; k < 2; k++) {
      char name[16];
      snprintf(name, 16, k ? "targets%d" : "tokens%d", m);
      OK(rfr_programs_tensor(p, name, &x));
      for (int i = 0; i < TOKENS; i++) ((int32_t *)x.data)[i] = (int32_t)((i + k) * (i + k) * 3 + m * 5) % VOCAB;
    }
  OK(rfr_programs_tensor(p, "offsets", &x));
  memcpy(x.data, ((int32_t[]){0, 17, TOKENS}), 12);
  OK(rfr_programs_tensor(p, "step", &x));
  ((int64_t *)x.data)[2] = 1234;
  OK(rfr_programs_load(p));
}

static void init(rfr_programs *p, int64_t layers, int microbatches) {
  rfr_model_config c = small(layers);
  init_model(p, &c, microbatches);
}

static rfr_programs *compile(const rfr_trace *t, rfr_recompute recompute, int64_t budget) {
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  o.recompute = recompute;
  o.budget = budget;
  OK(rfr_compile(ctx, 1, &t, NULL, &o, &p));
  return p;
}

static rfr_plan_summary plan_of(const rfr_programs *p) {
  rfr_plan_summary s;
  OK(rfr_program_plan(p, 0, &s));
  return s;
}

static int clones_of(const rfr_programs *p) {
  const rfr_trace *t = rfr_program_trace(p, 0, "lower");
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) n += t->ops[i].clone_of >= 0 && !(t->ops[i].def->flags & RFI_VIEW);
  return n;
}

static uint64_t state_hash(rfr_programs *p) {
  uint64_t h = 1;
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    for (int64_t k = 0; k < x.bytes; k++) h = (h ^ ((unsigned char *)x.data)[k]) * 0x100000001b3u;
  return h;
}

/* A budget between the largest and the smallest plan. */
static int64_t between(const rfr_trace *t, double part) {
  rfr_programs *none = compile(t, RFR_RECOMPUTE_KEEP, 0), *all = compile(t, RFR_RECOMPUTE_ALL, 0);
  int64_t high = plan_of(none).planned_bytes, low = plan_of(all).planned_bytes;
  assert_true(low < high);
  rfr_programs_destroy(none);
  rfr_programs_destroy(all);
  return low + (int64_t)((double)(high - low) * part);
}

/* ---- bits ---- */

static void test_bits(void **state) {
  (void)state;
  enum { LAYERS = 3, MICROBATCHES = 2, STEPS = 50, RUNS = 7 };
  rfr_trace *t = llama(LAYERS, MICROBATCHES, RFR_POLICY_AUTO);
  int64_t budget = between(t, 0.5);
  rfr_programs *p[RUNS];
  for (int i = 0; i < RUNS; i++) {
    int policy = i < 6 ? i / 2 : RFR_RECOMPUTE_ALL;
    rfr_compile_options o = rfr_compile_options_default();
    o.recompute = (rfr_recompute)policy;
    o.budget = policy == RFR_RECOMPUTE_AUTO ? budget : 0;
    o.debug = i == 6; /* every value on its own, what is not live is poisoned */
    OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p[i]));
    init(p[i], LAYERS, MICROBATCHES);
    if (i % 2) OK(rfr_program_capture(p[i], 0));
  }
  int none = clones_of(p[0]), all = clones_of(p[2]), some = clones_of(p[4]);
  assert_int_equal(none, 0);
  assert_true(some > 0 && some < all);
  float first = 0, loss[RUNS];
  for (int k = 0; k < STEPS; k++) {
    for (int i = 0; i < RUNS; i++) {
      rfr_tensor x;
      if (i % 2) OK(rfr_program_replay(p[i], 0, NULL, 0));
      else OK(rfr_program_run(p[i], 0));
      OK(rfr_program_output(p[i], 0, "loss", &x));
      loss[i] = *(float *)x.data;
      assert_memory_equal(&loss[i], &loss[0], sizeof loss[0]);
    }
    if (k == 0) first = loss[0];
  }
  assert_true(loss[0] < 0.9f * first);
  for (int i = 1; i < RUNS; i++) assert_true(state_hash(p[i]) == state_hash(p[0]));
  for (int i = 0; i < RUNS; i++) {
    OK(rfr_programs_check(p[i]));
    rfr_programs_destroy(p[i]);
  }
  rfr_trace_destroy(t);
}

/* GPT-2 in bf16: biases, packed projections read through views, a table that is also the
 * head, gradients of a residual that add up in place. */
static void test_bits_gpt2(void **state) {
  (void)state;
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_GPT2);
  c.vocab_size = VOCAB;
  c.hidden_size = 24;
  c.intermediate_size = 72;
  c.layers = 3;
  c.heads = c.kv_heads = 3;
  c.head_dim = 8;
  c.max_positions = TOKENS;
  c.dropout = 0.1;
  c.tie_embeddings = 1;
  c.dtype = RFR_BF16;
  rfr_trace *t = training(&c, 3, RFR_POLICY_AUTO);
  rfr_programs *none = compile(t, RFR_RECOMPUTE_KEEP, 0), *all = compile(t, RFR_RECOMPUTE_ALL, 0);
  assert_true(clones_of(all) > 20);
  assert_true(plan_of(all).planned_bytes < plan_of(none).planned_bytes);
  init_model(none, &c, 3);
  init_model(all, &c, 3);
  OK(rfr_program_capture(all, 0));
  for (int i = 0; i < 6; i++) {
    OK(rfr_program_run(none, 0));
    OK(rfr_program_replay(all, 0, NULL, 0));
  }
  assert_true(state_hash(none) == state_hash(all));
  rfr_programs_destroy(none);
  rfr_programs_destroy(all);
  rfr_trace_destroy(t);
}

/* ---- the budget ---- */

static void test_budget(void **state) {
  (void)state;
  enum { LAYERS = 3, MICROBATCHES = 2, STEPS = 16 };
  rfr_trace *t = llama(LAYERS, MICROBATCHES, RFR_POLICY_AUTO);
  int64_t low = between(t, 0), high = between(t, 1);
  double flops = 0;
  uint64_t hash = 0;
  for (int i = 0; i <= STEPS; i++) {
    int64_t budget = high - (high - low) * i / STEPS;
    rfr_programs *p = compile(t, RFR_RECOMPUTE_AUTO, budget);
    rfr_plan_summary s = plan_of(p);
    if (s.planned_bytes > budget) fail_msg("%lld planned, %lld allowed", (long long)s.planned_bytes, (long long)budget);
    double ratio = (double)s.transient_planned_bytes / (double)s.transient_lower_bound_bytes;
    /* real shapes are held to 1.01 in plan_shapes_test; here, with the oldest kernels' workspaces, 1.024 was seen */
    if (ratio > 1.03) fail_msg("budget %d: %f of the bytes live at once", i, ratio);
    if (i == 0) assert_int_equal(clones_of(p), 0);
    else assert_true(clones_of(p) > 0);
    if (i == STEPS) assert_true(rfr_program_flops(p, 0) > flops); /* only the last bytes cost products */
    if (i == 0) flops = rfr_program_flops(p, 0);
    init(p, LAYERS, MICROBATCHES);
    OK(rfr_program_run(p, 0));
    if (i == 0) hash = state_hash(p);
    assert_true(state_hash(p) == hash);
    assert_true(rfr_programs_touched_bytes(p) <= s.planned_bytes);
    OK(rfr_programs_check(p));
    rfr_programs_destroy(p);
  }
  /* below, the smallest budget that works is named: it works, one byte less does not */
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  o.recompute = RFR_RECOMPUTE_AUTO;
  o.budget = low / 2;
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p), RFR_NO_FIT);
  assert_string_equal(rfr_last_error()->slug, "plan.over_budget");
  const char *needs = strstr(rfr_last_error()->message, "needs ");
  assert_non_null(needs);
  int64_t smallest = strtoll(needs + 6, NULL, 10);
  assert_true(smallest > o.budget && smallest <= low);
  p = compile(t, RFR_RECOMPUTE_AUTO, smallest);
  assert_true(plan_of(p).planned_bytes <= smallest);
  rfr_programs_destroy(p);
  o.budget = smallest - 1;
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p), RFR_NO_FIT);
  assert_null(p);
  rfr_trace_destroy(t);
}

/* Programs share the step-scoped part: one that fits as it is recomputes nothing. */
static void test_programs(void **state) {
  (void)state;
  rfr_trace *t[2] = {llama(3, 2, RFR_POLICY_AUTO), llama(1, 1, RFR_POLICY_AUTO)};
  rfr_compile_options o = rfr_compile_options_default();
  o.recompute = RFR_RECOMPUTE_AUTO;
  o.budget = between(t[0], 0.4);
  rfr_programs *p;
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)t, NULL, &o, &p));
  assert_true(plan_of(p).planned_bytes <= o.budget);
  assert_true(clones_of(p) > 0);
  assert_null(strstr(rfr_program_report(p, 1, "recompute"), "recomputed"));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t[0]);
  rfr_trace_destroy(t[1]);
}

/* The search walks over the trace as often for a deep model as for a shallow one. */
static void test_linear(void **state) {
  (void)state;
  int looks[2];
  for (int i = 0; i < 2; i++) {
    rfr_trace *t = llama(i ? 32 : 8, 2, RFR_POLICY_AUTO);
    rfr_programs *p = compile(t, RFR_RECOMPUTE_KEEP, 0);
    rfi_pass_options o = {.prune = true, .recompute = RFR_RECOMPUTE_ALL};
    rfi_report report = {.text = {.ctx = ctx}};
    rfr_trace *u;
    OK(rfi_pass_recompute(rfr_program_trace(p, 0, "fuse"), &o, &report, &u));
    const char *weighed = strstr(report.text.data, " choices weighed");
    assert_non_null(weighed);
    while (weighed[-1] >= '0' && weighed[-1] <= '9') weighed--;
    looks[i] = atoi(weighed);
    rfi_string_deinit(&report.text);
    rfr_trace_destroy(u);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
  if (looks[1] * 2 > looks[0] * 3) fail_msg("%d choices for 8 layers, %d for 32", looks[0], looks[1]);
}

static void test_frontier(void **state) {
  (void)state;
  enum { ROOM = 24 };
  rfr_trace *t = llama(4, 2, RFR_POLICY_AUTO);
  rfr_programs *p = compile(t, RFR_RECOMPUTE_KEEP, 0);
  rfr_frontier_point f[ROOM];
  int n;
  OK(rfr_program_frontier(p, 0, f, ROOM, &n));
  assert_in_range(n, 10, ROOM);
  assert_int_equal(f[0].recomputed, 0);
  assert_int_equal(f[0].planned_bytes, plan_of(p).planned_bytes);
  for (int i = 1; i < n; i++) {
    assert_true(f[i].planned_bytes < f[i - 1].planned_bytes);
    assert_true(f[i].extra_bytes + 1.0 / 32 * f[i].extra_flops >
                f[i - 1].extra_bytes + 1.0 / 32 * f[i - 1].extra_flops);
  }
  /* every point is a budget that is enough; below the last there is none */
  for (int i = 0; i < n; i += 5) {
    rfr_programs *q = compile(t, RFR_RECOMPUTE_AUTO, f[i].planned_bytes);
    assert_true(plan_of(q).planned_bytes <= f[i].planned_bytes);
    rfr_programs_destroy(q);
  }
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *q;
  o.recompute = RFR_RECOMPUTE_AUTO;
  o.budget = f[n - 1].planned_bytes - 1;
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &q), RFR_NO_FIT);
  assert_int_equal(rfr_program_frontier(p, 0, f, 1, &n), RFR_INVALID);
  o = rfr_compile_options_default();
  o.keep_traces = 0;
  OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &q));
  assert_int_equal(rfr_program_frontier(q, 0, f, ROOM, &n), RFR_INVALID);
  rfr_programs_destroy(q);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* ---- clones ---- */

typedef struct text {
  char *data;
  size_t n;
} text;
static void collect(const char *s, size_t n, void *user) {
  text *t = user;
  t->data = realloc(t->data, t->n + n + 1);
  memcpy(t->data + t->n, s, n);
  t->n += n;
  t->data[t->n] = 0;
}

static void check_round_trip(const rfr_trace *t, int count, const char *const *words) {
  rfr_print_options o = rfr_print_options_default();
  text s = {0};
  rfr_trace *again;
  o.flat = 1;
  OK(rfr_trace_print(t, &o, collect, &s));
  OK(rfr_trace_parse(ctx, "printed", s.data, s.n, &again));
  assert_true(rfr_trace_equal(t, again));
  for (int i = 0; i < count; i++) assert_non_null(strstr(s.data, words[i]));
  rfr_trace_destroy(again);
  free(s.data);
}

static void test_clones(void **state) {
  (void)state;
  rfr_trace *t = llama(3, 2, RFR_POLICY_AUTO);
  rfr_programs *p = compile(t, RFR_RECOMPUTE_ALL, 0);
  static const char *const stages[] = {"recompute", "lower"};
  for (int s = 0; s < 2; s++) {
    const rfr_trace *u = rfr_program_trace(p, 0, stages[s]);
    int dropouts = 0, products = 0;
    OK(rfr_trace_verify(u));
    check_round_trip(u, 2, (const char *const[]){" clone_of=", "recompute of %"});
    for (int i = 0; i < u->n_ops; i++) {
      const rfi_opr *c = &u->ops[i];
      if (c->clone_of < 0) continue;
      const rfi_opr *o = &u->ops[c->clone_of];
      assert_ptr_equal(c->def, o->def);
      assert_memory_equal(c->attr, o->attr, sizeof *c->attr * (size_t)c->def->n_attrs); /* the site of a mask too */
      assert_int_equal(c->microbatch, o->microbatch);
      assert_string_equal(c->scope, o->scope);
      assert_true(c->phase == RFR_PHASE_DGRAD || c->phase == RFR_PHASE_WGRAD);
      assert_int_equal(o->phase, RFR_PHASE_FORWARD);
      assert_false(c->def->flags & (RFI_STATE | RFI_HOST));
      for (int j = 0; j < c->n_out; j++) /* nothing is written in place */
        if (c->out[j] >= 0 && !(c->def->flags & RFI_VIEW)) assert_int_equal(u->values[c->out[j]].base, c->out[j]);
      for (int k = i + 1; k < u->n_ops; k++) /* once per microbatch, not for dgrad and wgrad each */
        assert_false(u->ops[k].clone_of == c->clone_of);
      dropouts += c->def->code == RFI_OP_dropout;
      products += c->def->code == RFI_OP_matmul;
    }
    assert_true(dropouts > 0);
    assert_true(products > 0);
  }
  const char *report = rfr_program_report(p, 0, "recompute");
  assert_non_null(strstr(report, "recomputed: %"));
  assert_non_null(strstr(report, "bytes moved"));
  assert_non_null(strstr(report, "for another clone")); /* what only the forward read, the product below a rope */
  assert_non_null(strstr(report, "peak of live bytes"));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* A block of clones stands right before the op that needs its last one. */
static void test_lazy(void **state) {
  (void)state;
  rfr_trace *t = llama(3, 1, RFR_POLICY_AUTO);
  rfr_programs *p = compile(t, RFR_RECOMPUTE_ALL, 0);
  const rfr_trace *u = rfr_program_trace(p, 0, "recompute");
  for (int i = 0; i < u->n_ops; i++) {
    if (u->ops[i].clone_of < 0) continue;
    int user = i + 1;
    while (u->ops[user].clone_of >= 0) user++;
    bool needed = false; /* by the block or its user */
    for (int k = i + 1; k <= user; k++)
      for (int n = 0; n < u->ops[k].n_in; n++)
        for (int j = 0; j < u->ops[i].n_out; j++)
          needed = needed || (u->ops[k].in[n] >= 0 && u->ops[k].in[n] == u->ops[i].out[j]);
    if (!needed) fail_msg("op %d (%s) is cloned before it is needed", i, u->ops[i].def->name);
  }
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* ---- what may be cloned, and what gains nothing ---- */

enum { ROWS = 32, WIDTH = 48 };

static rfr_trace *begin(rfr_value *x, rfr_value *w) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  *x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, WIDTH}));
  *w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){WIDTH, WIDTH}));
  return t;
}

static rfr_programs *finish(rfr_trace *t, rfr_value h, rfr_value w, rfr_recompute recompute) {
  rfr_value loss = rfr_sum(t, rfr_mul(t, h, h), -1);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  return compile(t, recompute, 0);
}

static int clones_named(const rfr_programs *p, rfi_opcode code) {
  const rfr_trace *t = rfr_program_trace(p, 0, "recompute");
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) n += t->ops[i].clone_of >= 0 && t->ops[i].def->code == code;
  return n;
}

/* silu of silu of ... of x w: the chain is long, so that there is a peak to lower. */
static rfr_value silus(rfr_trace *t, rfr_value h, rfr_value w, int n) {
  for (int i = 0; i < n; i++) h = rfr_linear(t, rfr_silu(t, h), w, RFR_NONE);
  return h;
}

static void test_policies(void **state) {
  (void)state;
  for (int marked = 0; marked < 3; marked++)
    for (int option = 0; option < 2; option++) {
      rfr_value x, w;
      rfr_trace *t = begin(&x, &w);
      rfr_set_recompute(t, (rfr_policy)marked);
      rfr_value h = silus(t, rfr_linear(t, x, w, RFR_NONE), w, 6);
      rfr_set_recompute(t, RFR_POLICY_AUTO);
      rfr_programs *p = finish(t, h, w, option ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP);
      bool expected = marked == RFR_POLICY_RECOMPUTE || (marked == RFR_POLICY_AUTO && option);
      assert_int_equal(clones_named(p, RFI_OP_silu) > 0, expected);
      if (marked) {
        const char *word = marked == RFR_POLICY_KEEP ? " policy=keep" : " policy=recompute";
        check_round_trip(rfr_program_trace(p, 0, "recompute"), 1, &word);
        check_round_trip(t, 1, &word);
      }
      rfr_programs_destroy(p);
      rfr_trace_destroy(t);
    }
  /* the policy is part of the trace */
  rfr_value x, w;
  rfr_trace *a = begin(&x, &w), *b = begin(&x, &w);
  rfr_set_recompute(b, RFR_POLICY_KEEP);
  rfr_place at = {"f.c", 1};
  rfr_silu_at(a, at, x);
  rfr_silu_at(b, at, x);
  assert_false(rfr_trace_equal(a, b));
  rfr_trace_destroy(a);
  rfr_trace_destroy(b);
}

/* A cast that halves what is saved: making it again would keep twice its bytes. */
static void test_gains_nothing(void **state) {
  (void)state;
  rfr_value x, w;
  rfr_trace *t = begin(&x, &w);
  rfr_value h = x, half;
  for (int i = 0; i < 5; i++) {
    half = rfr_cast(t, h, RFR_BF16);
    h = rfr_matmul(t, half, rfr_cast(t, w, RFR_BF16), RFR_NONE, 0, 1, RFR_F32);
  }
  rfi_pipeline line;
  rfr_value loss = rfr_sum(t, rfr_mul(t, h, h), -1);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  rfi_pass_options o = {.prune = true, .recompute = RFR_RECOMPUTE_ALL};
  OK(rfi_pipeline_run(t, &o, &line));
  const rfr_trace *u = line.stage[4].trace;
  for (int i = 0; i < u->n_ops; i++)
    if (u->ops[i].clone_of >= 0 && u->ops[i].def->code == RFI_OP_cast) {
      /* not without its operand, unless that is an input and lives anyway */
      int maker = u->values[u->ops[i].in[0]].op;
      assert_true(maker < 0 || u->ops[maker].clone_of >= 0);
    }
  assert_true(line.stage[4].peak <= line.stage[3].peak);
  rfi_pipeline_deinit(&line);
  rfr_trace_destroy(t);
}

/* What reads a state before its next version is not made again after it, though its value
 * is wanted late; nor is the op that writes. */
static void test_effects(void **state) {
  (void)state;
  rfr_value x, w, skip;
  rfr_trace *t = begin(&x, &w);
  rfr_value ring = rfr_input(t, "ring", RFR_ROLE_STATE, RFR_F64, 2, ((int64_t[]){2, 2})), step = rfr_step_block(t);
  rfr_value other = rfr_input(t, "other", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){ROWS, WIDTH}));
  rfr_value h = rfr_silu(t, rfr_mul(t, other, x)); /* reads the version that sgd overwrites next */
  rfr_value norm = rfr_grad_norm(t, 1, &other, &skip), rate;
  rfr_lr_options lr = rfr_lr_options_default();
  rate = rfr_lr_schedule(t, step, &lr);
  rfr_sgd(t, other, x, RFR_NONE, RFR_NONE, rate, RFR_NONE, skip, 0, 0, 1);
  rfr_metrics_write(t, ring, step, 1, &norm);
  h = silus(t, rfr_linear(t, h, w, RFR_NONE), w, 6);
  rfr_value loss = rfr_sum(t, rfr_mul(t, h, h), -1);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = compile(t, RFR_RECOMPUTE_ALL, 0);
  const rfr_trace *u = rfr_program_trace(p, 0, "recompute");
  OK(rfr_trace_verify(u));
  assert_true(clones_of(p) > 0);
  for (int i = 0; i < u->n_ops; i++)
    if (u->ops[i].clone_of >= 0) {
      assert_false(u->ops[i].def->flags & (RFI_STATE | RFI_HOST));
      assert_int_not_equal(u->ops[i].def->code, RFI_OP_mul);
    }
  /* chosen all the same, it is recognised as impossible */
  const rfr_trace *fused = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.recompute = RFR_RECOMPUTE_ALL};
  rfi_recompute_model m;
  OK(rfi_recompute_model_init(&m, fused, &o));
  for (int i = 0; i < fused->n_ops; i++)
    if (fused->ops[i].def->flags & (RFI_STATE | RFI_HOST)) assert_false(m.can[i]);
  for (int i = 0; i < fused->n_ops; i++) {
    if (fused->ops[i].scope[0] == 0 && fused->ops[i].def->code == RFI_OP_silu && m.can[i] && !m.chosen[i]) {
      m.chosen[i] = m.chosen[fused->values[fused->ops[i].in[0]].op] = true;
      break;
    }
  }
  assert_false(rfi_recompute_evaluate(&m, 0).possible);
  rfi_recompute_model_deinit(&m);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* What is written onto in the forward, and what writes onto it, are not made again. */
static void test_in_place(void **state) {
  (void)state;
  rfr_value x, w;
  rfr_trace *t = begin(&x, &w);
  rfr_value h = rfr_linear(t, x, w, RFR_NONE);
  h = rfr_add(t, h, rfr_linear(t, rfr_silu(t, x), w, RFR_NONE));
  h = silus(t, h, w, 6);
  rfr_programs *p = finish(t, h, w, RFR_RECOMPUTE_ALL);
  const rfr_trace *u = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.prune = true};
  rfi_recompute_model m;
  int written = 0;
  OK(rfi_recompute_model_init(&m, u, &o));
  for (int i = 0; i < u->n_ops; i++) {
    const rfi_opr *op = &u->ops[i];
    if (op->phase != RFR_PHASE_FORWARD || op->def->code != RFI_OP_matmul || op->in[3] < 0) continue;
    assert_false(m.can[i]);
    assert_false(m.can[u->values[op->in[3]].op]);
    written++;
  }
  assert_int_equal(written, 1);
  rfi_recompute_model_deinit(&m);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* A clone belongs to one microbatch: what several read is kept. */
static void test_shared(void **state) {
  (void)state;
  rfr_trace *t = llama(2, 3, RFR_POLICY_AUTO);
  rfr_programs *p = compile(t, RFR_RECOMPUTE_KEEP, 0);
  const rfr_trace *u = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.prune = true};
  rfi_recompute_model m;
  int shared = 0;
  OK(rfi_recompute_model_init(&m, u, &o));
  for (int i = 0; i < u->n_ops; i++)
    if (u->ops[i].def->code == RFI_OP_positions) {
      assert_false(m.can[i]);
      shared++;
    }
  assert_int_equal(shared, 1);
  rfi_recompute_model_deinit(&m);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* clone_of follows its original through a rewrite, also when ops before it go. */
static void test_clone_of_moves(void **state) {
  (void)state;
  static const char text[] = "refrain-trace 1\n"
                             "input %0 \"x\" input f32[4]\n"
                             "%1 f32[4] = silu(%0) phase=forward\n"
                             "%2 f32[4] = silu(%0) phase=forward\n"
                             "%3 f32[4] = silu(%0) phase=dgrad clone_of=1\n"
                             "%4 f32[4] = silu(%0) phase=dgrad clone_of=0\n"
                             "output \"a\" %2\n"
                             "output \"b\" %3\n"
                             "output \"c\" %4\n";
  rfr_trace *t, *u;
  rfi_report report = {.text = {.ctx = ctx}};
  OK(rfr_trace_parse(ctx, "text", text, sizeof text - 1, &t));
  OK(rfi_dce(t, &report, &u));
  assert_int_equal(u->n_ops, 3);
  assert_int_equal(u->ops[1].clone_of, 0);
  assert_int_equal(u->ops[2].clone_of, -1); /* its original went: it is the only one */
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
  rfr_trace_destroy(u);
}

/* The planner decides: a workspace that only the lowered trace shows is counted too. */
static rfr_status hidden_workspace(void *user, const rfr_trace *t, int64_t *bytes) {
  int *calls = user;
  for (int i = 0; i < t->n_ops; i++) bytes[i] = *calls ? 6000 : 0;
  ++*calls;
  return RFR_OK;
}

static void test_planner_decides(void **state) {
  (void)state;
  rfr_trace *t = llama(3, 2, RFR_POLICY_AUTO), *u, *lowered;
  rfr_programs *p = compile(t, RFR_RECOMPUTE_KEEP, 0);
  int calls = 0;
  rfi_report report = {.text = {.ctx = ctx}};
  rfi_pass_options o = {.prune = true, .recompute = RFR_RECOMPUTE_AUTO, .workspace = hidden_workspace, .user = &calls};
  o.budget = plan_of(p).transient_planned_bytes - 40000;
  OK(rfi_pass_recompute(rfr_program_trace(p, 0, "fuse"), &o, &report, &u));
  assert_true(calls > 1);
  OK(rfi_pass_lower(u, &o, &report, &lowered));
  int64_t *workspace = calloc((size_t)lowered->n_ops, sizeof *workspace);
  OK(hidden_workspace(&calls, lowered, workspace));
  rfi_plan plan;
  OK(rfi_plan_make(lowered, workspace, &plan));
  assert_true(plan.bytes <= o.budget);
  free(workspace);
  rfi_plan_deinit(&plan);
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(u);
  rfr_trace_destroy(lowered);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* What phase load makes lives beside the step: the budget counts it. */
static void test_load_counts(void **state) {
  (void)state;
  rfr_value x, w;
  rfr_trace *t = begin(&x, &w);
  rfr_value big = rfr_input(t, "big", RFR_ROLE_FROZEN, RFR_BF16, 2, ((int64_t[]){8 * WIDTH, WIDTH}));
  rfr_value h = silus(t, rfr_linear(t, x, w, RFR_NONE), w, 6);
  h = rfr_linear(t, h, rfr_cast(t, big, RFR_F32), RFR_NONE);
  rfr_value loss = rfr_sum(t, h, -1);
  rfr_output(t, "loss", loss);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = compile(t, RFR_RECOMPUTE_AUTO, between(t, 0.3));
  assert_int_equal(rfr_program_trace(p, 0, "lower")->ops[0].phase, RFR_PHASE_LOAD);
  assert_true(clones_of(p) > 0);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* The model's account of memory is that of the trace it writes. */
static void test_account(void **state) {
  (void)state;
  rfr_trace *t = llama(3, 2, RFR_POLICY_AUTO);
  rfr_programs *p = compile(t, RFR_RECOMPUTE_KEEP, 0);
  const rfr_trace *fused = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.prune = true};
  rfi_recompute_model m;
  OK(rfi_recompute_model_init(&m, fused, &o));
  for (uint64_t seed = 0; seed < 40; seed++) {
    rfr_trace *u;
    for (int i = 0; i < fused->n_ops; i++)
      m.chosen[i] = m.can[i] && rfi_draw4(rfi_stream_key(seed, 0), (uint64_t)i, 0, 0, 0).v[0] % 40 < seed;
    rfi_choice_cost c = rfi_recompute_evaluate(&m, 0);
    assert_true(c.possible);
    OK(rfi_recompute_apply(&m, NULL, &u));
    int64_t *live, peak = 0;
    int clones = 0;
    OK(rfi_live_bytes(u, &live));
    for (int i = 0; i < u->n_ops; i++) {
      if (live[i] > peak) peak = live[i];
      clones += u->ops[i].clone_of >= 0 && !(u->ops[i].def->flags & RFI_VIEW);
    }
    assert_int_equal(c.peak, peak);
    assert_int_equal(c.clones, clones);
    rfi_free(ctx, live);
    rfr_trace_destroy(u);
  }
  rfi_recompute_model_deinit(&m);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Every allocation of recomputing fails once: a status each time, nothing leaks. */
static void test_allocation_faults(void **state) {
  (void)state;
  rfr_trace *t = llama(2, 1, RFR_POLICY_AUTO);
  rfr_programs *p = compile(t, RFR_RECOMPUTE_KEEP, 0);
  const rfr_trace *fused = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.prune = true, .recompute = RFR_RECOMPUTE_AUTO, .budget = 1};
  int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  for (int64_t k = 1;; k++) {
    rfi_report report = {.text = {.ctx = ctx}};
    rfr_trace *u;
    rfr_ctx_fail_alloc(ctx, k);
    rfr_status s = rfi_pass_recompute(fused, &o, &report, &u);
    rfr_ctx_fail_alloc(ctx, 0);
    rfi_string_deinit(&report.text);
    if (s == RFR_OK) {
      assert_true(k > 20);
      rfr_trace_destroy(u);
      break;
    }
    if (s != RFR_NO_MEMORY) fail_msg("allocation %lld: %s", (long long)k, rfr_last_error()->message);
    assert_null(u);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
  }
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_bits, setup, teardown),
      cmocka_unit_test_setup_teardown(test_bits_gpt2, setup, teardown),
      cmocka_unit_test_setup_teardown(test_budget, setup, teardown),
      cmocka_unit_test_setup_teardown(test_programs, setup, teardown),
      cmocka_unit_test_setup_teardown(test_linear, setup, teardown),
      cmocka_unit_test_setup_teardown(test_frontier, setup, teardown),
      cmocka_unit_test_setup_teardown(test_clones, setup, teardown),
      cmocka_unit_test_setup_teardown(test_lazy, setup, teardown),
      cmocka_unit_test_setup_teardown(test_policies, setup, teardown),
      cmocka_unit_test_setup_teardown(test_gains_nothing, setup, teardown),
      cmocka_unit_test_setup_teardown(test_effects, setup, teardown),
      cmocka_unit_test_setup_teardown(test_in_place, setup, teardown),
      cmocka_unit_test_setup_teardown(test_shared, setup, teardown),
      cmocka_unit_test_setup_teardown(test_clone_of_moves, setup, teardown),
      cmocka_unit_test_setup_teardown(test_planner_decides, setup, teardown),
      cmocka_unit_test_setup_teardown(test_load_counts, setup, teardown),
      cmocka_unit_test_setup_teardown(test_account, setup, teardown),
      cmocka_unit_test_setup_teardown(test_allocation_faults, setup, teardown),
  };
  return cmocka_run_group_tests_name("recompute", tests, NULL, NULL);
}
