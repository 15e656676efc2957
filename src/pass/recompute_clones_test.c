/* SPDX-License-Identifier: Apache-2.0
 *
 * A clone computes the same results as the original op. No op with an effect is cloned, and every clone saves memory.
 * The memory model of clones agrees with the new trace.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "core/rng.h"
#include "exec/exec.h"
#include "pass/recompute_model.h"
#include "support/graphs_scene.h"
#include "support/text.h"
#include "support/training.h"

static void check_round_trip(const rfr_trace *t, int count, const char *const *words) {
  rfr_print_options o = rfr_print_options_default();
  rft_text s = {0};
  rfr_trace *again;
  o.flat = 1;
  OK(rfr_trace_print(t, &o, rft_text_add, &s));
  OK(rfr_trace_parse(ctx, "printed", s.data, s.n, &again));
  assert_true(rfr_trace_equal(t, again));
  for (int i = 0; i < count; i++) assert_non_null(strstr(s.data, words[i]));
  rfr_trace_destroy(again);
  free(s.data);
}

/* Lowering fuses a sum and its norm to one op; the original of a clone may be either. */
static bool is_part_of(rfi_opcode part, rfi_opcode whole) {
  return (whole == RFI_OP_add_layernorm && (part == RFI_OP_add || part == RFI_OP_layernorm)) ||
         (whole == RFI_OP_add_rmsnorm && (part == RFI_OP_add || part == RFI_OP_rmsnorm));
}

static void test_clones(void **state) {
  (void)state;
  rfr_trace *t = rft_llama(3, 2, RFR_POLICY_AUTO);
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_ALL, 0);
  static const char *const stages[] = {"recompute", "lower"};
  for (int s = 0; s < 2; s++) {
    const rfr_trace *u = rfr_program_trace(p, 0, stages[s]);
    int dropouts = 0, gemms = 0;
    OK(rfr_trace_verify(u));
    check_round_trip(u, 2, (const char *const[]){" clone_of=", "recompute of %"});
    for (int i = 0; i < u->n_ops; i++) {
      const rfi_opr *c = &u->ops[i];
      if (c->clone_of < 0) continue;
      const rfi_opr *o = &u->ops[c->clone_of];
      assert_true(c->def == o->def || is_part_of(c->def->code, o->def->code));
      /* including the site of a mask */
      assert_memory_equal(c->attr, o->attr, sizeof *c->attr * (size_t)c->def->n_attrs);
      assert_int_equal(c->microbatch, o->microbatch);
      assert_string_equal(c->scope, o->scope);
      assert_true(c->phase == RFR_PHASE_DGRAD || c->phase == RFR_PHASE_WGRAD);
      assert_int_equal(o->phase, RFR_PHASE_FORWARD);
      assert_false(c->def->flags & (RFI_STATE | RFI_HOST));
      for (int j = 0; j < c->n_out; j++) /* no clone writes in place */
        if (c->out[j] >= 0 && !(c->def->flags & RFI_VIEW)) assert_int_equal(u->values[c->out[j]].base, c->out[j]);
      for (int k = i + 1; k < u->n_ops; k++) /* one clone per microbatch, not one each for dgrad and wgrad */
        assert_false(u->ops[k].clone_of == c->clone_of);
      dropouts += c->def->code == RFI_OP_dropout;
      gemms += c->def->code == RFI_OP_matmul;
    }
    assert_true(dropouts > 0);
    assert_true(gemms > 0);
  }
  const char *report = rfr_program_report(p, 0, "recompute");
  assert_non_null(strstr(report, "recomputed: %"));
  assert_non_null(strstr(report, "bytes moved"));
  /* for example, the GEMM before a rope: only the forward reads its result */
  assert_non_null(strstr(report, "for another clone"));
  assert_non_null(strstr(report, "peak of live bytes"));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* A block of clones comes directly before the op that needs its last clone. */
static void test_lazy(void **state) {
  (void)state;
  rfr_trace *t = rft_llama(3, 1, RFR_POLICY_AUTO);
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_ALL, 0);
  const rfr_trace *u = rfr_program_trace(p, 0, "recompute");
  for (int i = 0; i < u->n_ops; i++) {
    if (u->ops[i].clone_of < 0) continue;
    int user = i + 1;
    while (u->ops[user].clone_of >= 0) user++;
    bool needed = false; /* read within the block, or by the op after it */
    for (int k = i + 1; k <= user; k++)
      for (int n = 0; n < u->ops[k].n_in; n++)
        for (int j = 0; j < u->ops[i].n_out; j++)
          needed = needed || (u->ops[k].in[n] >= 0 && u->ops[k].in[n] == u->ops[i].out[j]);
    if (!needed) fail_msg("op %d (%s) is cloned before it is needed", i, u->ops[i].def->name);
  }
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* ---- ops that may be cloned, and ops that save no memory ---- */

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
  return rft_recompute(t, recompute, 0);
}

static int clones_named(const rfr_programs *p, rfi_opcode code) {
  const rfr_trace *t = rfr_program_trace(p, 0, "recompute");
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) n += t->ops[i].clone_of >= 0 && t->ops[i].def->code == code;
  return n;
}

/* A chain of silu and linear, long enough that the peak can be lowered. */
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
  /* the policy is part of the printed trace */
  rfr_value x, w;
  rfr_trace *a = begin(&x, &w), *b = begin(&x, &w);
  rfr_set_recompute(b, RFR_POLICY_KEEP);
  rfr_source at = {"f.c", 1};
  rfr_silu_at(a, at, x);
  rfr_silu_at(b, at, x);
  assert_false(rfr_trace_equal(a, b));
  rfr_trace_destroy(a);
  rfr_trace_destroy(b);
}

/* A cast that halves the saved bytes: recomputing it would keep its operand, which is twice as large. */
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
      /* recomputed only together with its operand, unless the operand is an input, which is live anyway */
      int maker = u->values[u->ops[i].in[0]].op;
      assert_true(maker < 0 || u->ops[maker].clone_of >= 0);
    }
  assert_true(line.stage[4].peak <= line.stage[3].peak);
  rfi_pipeline_deinit(&line);
  rfr_trace_destroy(t);
}

/* An op that reads a state before its next version is not recomputed after it, even if its result is needed late. The
 * op that writes the state is never recomputed. */
static void test_effects(void **state) {
  (void)state;
  rfr_value x, w, skip;
  rfr_trace *t = begin(&x, &w);
  rfr_value ring = rfr_input(t, "ring", RFR_ROLE_STATE, RFR_F64, 2, ((int64_t[]){2, 2})), step = rfr_step_block(t);
  rfr_value other = rfr_input(t, "other", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){ROWS, WIDTH}));
  rfr_value h = rfr_silu(t, rfr_mul(t, other, x)); /* reads the version that sgd overwrites */
  rfr_value norm = rfr_grad_norm(t, 1, &other, &skip), rate;
  rfr_lr_options lr = rfr_lr_options_default();
  rate = rfr_lr_schedule(t, step, &lr);
  rfr_sgd(t, other, x, RFR_NONE, RFR_NONE, rate, RFR_NONE, skip, 0, 0, 1);
  rfr_metrics_write(t, ring, step, 1, &norm);
  h = silus(t, rfr_linear(t, h, w, RFR_NONE), w, 6);
  rfr_value loss = rfr_sum(t, rfr_mul(t, h, h), -1);
  rfr_output(t, "g", rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_ALL, 0);
  const rfr_trace *u = rfr_program_trace(p, 0, "recompute");
  OK(rfr_trace_verify(u));
  assert_true(rft_clones(p) > 0);
  for (int i = 0; i < u->n_ops; i++)
    if (u->ops[i].clone_of >= 0) {
      assert_false(u->ops[i].def->flags & (RFI_STATE | RFI_HOST));
      assert_int_not_equal(u->ops[i].def->code, RFI_OP_mul);
    }
  /* a choice that contains it is impossible */
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
  assert_false(rfi_recompute_evaluate(&m).possible);
  rfi_recompute_model_deinit(&m);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Neither a value that the forward overwrites in place nor the op that overwrites it is recomputed. */
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

/* A clone belongs to one microbatch, so a value that several microbatches read is kept. */
static void test_shared(void **state) {
  (void)state;
  rfr_trace *t = rft_llama(2, 3, RFR_POLICY_AUTO);
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_KEEP, 0);
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

/* clone_of follows its original through a rewrite, even if ops before it are removed. */
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
  assert_int_equal(u->ops[2].clone_of, -1); /* its original was removed, so it is not a clone any more */
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(t);
  rfr_trace_destroy(u);
}

/* Results of phase load are live during the entire step; the budget includes them. */
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
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_AUTO, rft_between(t, 0.3));
  assert_int_equal(rfr_program_trace(p, 0, "lower")->ops[0].phase, RFR_PHASE_LOAD);
  assert_true(rft_clones(p) > 0);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* The memory model must agree with the trace that is recorded. */
static void test_account(void **state) {
  (void)state;
  rfr_trace *t = rft_llama(3, 2, RFR_POLICY_AUTO);
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_KEEP, 0);
  const rfr_trace *fused = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.prune = true};
  rfi_recompute_model m;
  OK(rfi_recompute_model_init(&m, fused, &o));
  for (uint64_t seed = 0; seed < 40; seed++) {
    rfr_trace *u;
    for (int i = 0; i < fused->n_ops; i++)
      m.chosen[i] = m.can[i] && rfi_draw4(rfi_stream_key(seed, 0), (uint64_t)i, 0, 0, 0).v[0] % 40 < seed;
    rfi_choice_cost c = rfi_recompute_evaluate(&m);
    assert_true(c.possible);
    OK(rfi_recompute_apply(&m, NULL, &u));
    int64_t peak;
    int clones = 0;
    OK(rfi_live_peak(u, &peak));
    for (int i = 0; i < u->n_ops; i++) clones += u->ops[i].clone_of >= 0 && !(u->ops[i].def->flags & RFI_VIEW);
    assert_int_equal(c.peak, peak);
    assert_int_equal(c.clones, clones);
    rfr_trace_destroy(u);
  }
  rfi_recompute_model_deinit(&m);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Live bytes of a trace with split phases: the peak, and the bytes that live across the start of a phase. */
static int64_t live_across(const rfr_trace *t, int phase, int64_t *peak) {
  int begin = 0;
  int64_t across = 0, *live = calloc((size_t)t->n_ops + 2, sizeof *live);
  assert_non_null(live);
  while (begin < t->n_ops && t->ops[begin].phase < phase) begin++;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    int first = -1, last = -1;
    if (x->base != v) continue;
    if (x->op < 0 ? x->role != RFR_ROLE_INPUT && x->role != RFR_ROLE_INPUT_GRAD
                  : t->ops[x->op].phase <= RFR_PHASE_SETUP)
      continue;
    for (int i = 0; i < t->n_ops; i++) {
      const rfi_opr *op = &t->ops[i];
      for (int k = 0; k < op->n_in + op->n_out && !(op->def->flags & RFI_VIEW); k++) {
        const rfr_value u = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
        if (u < 0 || t->values[u].base != v) continue;
        if (first < 0) first = i;
        last = i;
      }
    }
    for (int i = 0; i < t->n_outputs; i++)
      if (t->values[t->outputs[i].value].base == v) last = t->n_ops;
    if (first < 0) continue;
    if (first < begin && last >= begin) across += rfi_storage_bytes(&x->type);
    for (int i = first; i <= last; i++) live[i] += rfi_storage_bytes(&x->type);
  }
  for (int i = 0; i <= t->n_ops; i++)
    if (live[i] > *peak) *peak = live[i];
  free(live);
  return across;
}

/* The same for the parts of a callable, with clones for dgrad, wgrad or both. */
static void test_account_apart(void **state) {
  (void)state;
  enum { COPIES = 5 };
  const rft_scene s = {.block = rft_block_transformer, .blocks = 1, .dtype = RFR_F32, .fuse = true};
  rfr_schedule *schedule;
  rfr_graphs *g = rft_make_graphs(&s, &schedule);
  const rfr_trace *t = rfr_graphs_trace(g, 0);
  int own = 0;
  for (int delayed = 0; delayed < 2; delayed++) {
    rfi_pass_options o = {.prune = true, .split_phases = true, .copies = COPIES, .separate_wgrad = delayed};
    rfi_recompute_model m;
    OK(rfi_recompute_model_init(&m, t, &o));
    for (uint64_t seed = 0; seed < 60; seed++) {
      rfr_trace *u;
      for (int i = 0; i < 2 * t->n_ops; i++)
        m.chosen[i] = m.can[i % t->n_ops] && rfi_draw4(rfi_stream_key(seed, 0), (uint64_t)i, 0, 0, 0).v[0] % 60 < seed;
      rfi_choice_cost c = rfi_recompute_evaluate(&m);
      assert_true(c.possible);
      OK(rfi_recompute_apply(&m, NULL, &u));
      int64_t peak = 0, held = live_across(u, RFR_PHASE_DGRAD, &peak), later = live_across(u, RFR_PHASE_WGRAD, &peak);
      if (delayed && later > held) held = later;
      assert_int_equal(c.across, held);
      assert_int_equal(c.peak, peak + (COPIES - 1) * held);
      for (int i = 1; i < u->n_ops; i++) {
        assert_true(u->ops[i].phase >= u->ops[i - 1].phase);
        own += u->ops[i].clone_of >= 0 && u->ops[i].phase == RFR_PHASE_WGRAD;
      }
      rfr_trace_destroy(u);
    }
    rfi_recompute_model_deinit(&m);
  }
  assert_true(own > 100);
  rfr_graphs_destroy(g);
}

/* Every allocation of recomputing fails once: each failure is a status, and no memory leaks. */
static void test_allocation_faults(void **state) {
  (void)state;
  rfr_trace *t = rft_llama(2, 1, RFR_POLICY_AUTO);
  rfr_programs *p = rft_recompute(t, RFR_RECOMPUTE_KEEP, 0);
  const rfr_trace *fused = rfr_program_trace(p, 0, "fuse");
  rfi_pass_options o = {.prune = true, .recompute = RFR_RECOMPUTE_ALL};
  int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  for (int64_t k = 1;; k++) {
    rfi_report report = {.text = {.ctx = ctx}};
    rfr_trace *u;
    rfr_ctx_fail_alloc(ctx, k);
    rfr_frontier_point point;
    rfi_frontier *frontier = NULL;
    rfr_status s = rfi_pass_recompute(fused, &o, &report, &u);
    if (s == RFR_OK) s = rfi_frontier_create(fused, &o, false, &frontier);
    if (s == RFR_OK) s = rfi_frontier_plan(frontier, rfi_frontier_top(frontier), 0, &point);
    rfi_frontier_destroy(frontier);
    rfr_ctx_fail_alloc(ctx, 0);
    rfi_string_deinit(&report.text);
    rfr_trace_destroy(u);
    if (s == RFR_OK) {
      assert_true(k > 20);
      break;
    }
    if (s != RFR_NO_MEMORY) fail_msg("allocation %lld: %s", (long long)k, rfr_last_error()->message);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
  }
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* With fully sharded parameters, the work of a clone includes the gather of a parameter that no op of the backward
 * reads in its layer: that of w, which an op of another layer reads, but not that of v. */
static void test_gathers(void **state) {
  (void)state;
  enum { ROWS = 50, C = 6, TOKENS = 9 };
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){ROWS, C})),
                  v = rfr_input(t, "v", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){TOKENS, C})),
                  ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){TOKENS}));
  rfr_scope(t, "embed");
  const rfr_value x = rfr_embedding(t, w, ids);
  rfr_scope(t, "layer0.mlp");
  const rfr_value y = rfr_mul(t, x, v);
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  rfr_scope(t, "head");
  rfr_output(t, "h", rfr_silu(t, w));
  rfr_scope(t, "layer0.norm");
  rfr_output(t, "d", rfr_mul(t, rfr_mul(t, x, v), rfr_silu(t, y)));
  OK(rfr_trace_finish(t));
  double bytes[2][2];
  for (int full = 0; full < 2; full++)
    for (int which = 0; which < 2; which++) {
      const rfi_pass_options o = {.ranks = 2, .shard = full ? RFR_SHARD_FULL : RFR_SHARD_OPTIMIZER, .copies = 1};
      rfi_recompute_model m;
      OK(rfi_recompute_model_init(&m, t, &o));
      m.chosen[t->values[which ? y : x].op] = true;
      bytes[full][which] = rfi_recompute_evaluate(&m).bytes;
      rfi_recompute_model_deinit(&m);
    }
  assert_int_equal((int64_t)(bytes[1][0] - bytes[0][0]), ROWS * C * 4);
  assert_true(bytes[0][1] > 0 && bytes[1][1] == bytes[0][1]);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_clones),        rft_context_test(test_lazy),
      rft_context_test(test_policies),      rft_context_test(test_gains_nothing),
      rft_context_test(test_effects),       rft_context_test(test_in_place),
      rft_context_test(test_shared),        rft_context_test(test_clone_of_moves),
      rft_context_test(test_load_counts),   rft_context_test(test_account),
      rft_context_test(test_account_apart), rft_context_test(test_allocation_faults),
      rft_context_test(test_gathers),
  };
  return cmocka_run_group_tests_name("recompute_clones", tests, NULL, NULL);
}
