/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled programs end to end: pruned ops, saved activations, the plan against the memory that
 * is touched, eager against replay, the skipped step.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/context.h"
#include "support/rewrite.h"

/* ---- a chain of six linear layers without bias; every weight with an even index is frozen ---- */

enum { ROWS = 24, LINEARS = 6 };
static const int64_t width[LINEARS + 1] = {32, 64, 128, 64, 32, 64, 32};

static rfr_trace *chain(unsigned trainable, rfr_value *grads) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value h = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, width[0]})), w[LINEARS];
  rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, width[LINEARS]}));
  for (int i = 0; i < LINEARS; i++) {
    char name[8];
    snprintf(name, sizeof name, "w%d", i);
    w[i] = rfr_input(t, name, trainable >> i & 1 ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN, RFR_F32, 2,
                     ((int64_t[]){width[i + 1], width[i]}));
    h = rfr_linear(t, h, w[i], RFR_NONE);
  }
  rfr_value loss = rfr_sum(t, rfr_mul(t, h, r), -1);
  for (int i = 0; i < LINEARS; i++) {
    if (!(trainable >> i & 1)) continue;
    char name[8];
    snprintf(name, sizeof name, "g%d", i);
    grads[i] = rfr_gradient(t, loss, w[i], RFR_F32);
    rfr_output(t, name, grads[i]);
  }
  OK(rfr_trace_finish(t));
  return t;
}

/* Bytes of forward results that the backward reads. */
static int64_t saved_bytes(const rfr_trace *t) {
  int64_t bytes = 0;
  for (rfr_value v = 0; v < t->n_values; v++) {
    const rfi_value *x = &t->values[v];
    if (x->base != v || x->op < 0 || t->ops[x->op].phase != RFR_PHASE_FORWARD) continue;
    bool saved = false;
    for (int i = 0; i < t->n_ops; i++)
      for (int k = 0; k < t->ops[i].n_in; k++)
        saved = saved || (t->ops[i].phase > RFR_PHASE_FORWARD && !(t->ops[i].def->flags & RFI_VIEW) &&
                          t->ops[i].in[k] >= 0 && t->values[t->ops[i].in[k]].base == v);
    if (saved) bytes += rfi_bytes(&x->type);
  }
  return bytes;
}

/* Bitwise equal, and not all zeros. */
static void assert_same_sums(const rfr_tensor *a, const rfr_tensor *b) {
  assert_memory_equal(a->data, b->data, (size_t)a->bytes);
  double norm = 0;
  for (int64_t k = 0; k < a->bytes / 4; k++) norm += fabs(((float *)a->data)[k]);
  assert_true(norm > 0);
}

static void test_chain(void **state) {
  (void)state;
  rfr_value grads[LINEARS];
  rfr_trace *pruned = chain(0x2a, grads), *full = chain(0x3f, grads);
  rfr_programs *p = rft_compile(pruned, NULL), *q = rft_compile(full, NULL);
  const rfr_trace *t = rfr_program_trace(p, 0, "lower"), *u = rfr_program_trace(q, 0, "lower");
  assert_int_equal(rft_count_ops(t, RFI_OP_matmul, RFR_PHASE_WGRAD), 3);
  assert_int_equal(rft_count_ops(t, RFI_OP_matmul, RFR_PHASE_DGRAD), 4);
  assert_int_equal(rft_count_ops(u, RFI_OP_matmul, RFR_PHASE_WGRAD), 6);
  assert_int_equal(rft_count_ops(u, RFI_OP_matmul, RFR_PHASE_DGRAD), 5);
  /* the inputs of w1, w3 and w5; x is an input, and needs no saving */
  assert_int_equal(saved_bytes(t), ROWS * (width[1] + width[3] + width[5]) * 4);
  assert_int_equal(saved_bytes(u), ROWS * (width[1] + width[2] + width[3] + width[4] + width[5]) * 4);
  const char *report = rfr_program_report(p, 0, "autodiff");
  for (int i = 0; i < LINEARS; i++) {
    char line[48];
    snprintf(line, sizeof line, "gradient of frozen w%d:", i);
    assert_int_equal(strstr(report, line) != NULL, i % 2 == 0);
  }
  rft_fill_inputs(p);
  rfr_tensor a, b;
  for (int i = 0; rfr_programs_tensor_at(p, i, &a) == RFR_OK; i++) {
    OK(rfr_programs_tensor(q, a.name, &b));
    memcpy(b.data, a.data, (size_t)a.bytes);
  }
  OK(rfr_programs_load(p));
  OK(rfr_programs_load(q));
  OK(rfr_program_run(p, 0));
  OK(rfr_program_run(q, 0));
  for (int i = 1; i < LINEARS; i += 2) {
    char name[8];
    snprintf(name, sizeof name, "g%d", i);
    OK(rfr_program_output(p, 0, name, &a));
    OK(rfr_program_output(q, 0, name, &b));
    assert_same_sums(&a, &b);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(pruned);
  rfr_trace_destroy(full);
}

/* ---- a training step: two layers, dropout, several microbatches, AdamW ---- */

typedef struct step_shape {
  int microbatches;
  int64_t rows;
  bool frozen_first;
} step_shape;

static rfr_trace *training_step(step_shape s) {
  enum { IN = 20, HIDDEN = 36, CLASSES = 12 };
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  int64_t all = s.rows * s.microbatches;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){all, IN}));
  rfr_value target = rfr_input(t, "target", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){all}));
  rfr_value step = rfr_step_block(t),
            metrics = rfr_input(t, "metrics", RFR_ROLE_STATE, RFR_F64, 2, ((int64_t[]){3, 4}));
  rfr_value w[3] = {
      rfr_input(t, "w0", s.frozen_first ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){HIDDEN, IN})),
      rfr_input(t, "b0", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){HIDDEN})),
      rfr_input(t, "w1", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){CLASSES, HIDDEN}))};
  rfr_value inv = rfr_token_count(t, 1, &target, -100, NULL), loss = RFR_NONE;
  for (int m = 0; m < s.microbatches; m++) {
    rfr_microbatch(t, m);
    rfr_scope(t, "layer0.mlp");
    rfr_value h = rfr_linear(t, rfr_slice(t, x, 0, m * s.rows, s.rows), w[0], w[1]);
    h = rfr_dropout(t, rfr_gelu(t, h, 1), step, 0.1, 0);
    rfr_scope(t, "head");
    rfr_value part =
        rfr_cross_entropy(t, rfr_linear(t, h, w[2], RFR_NONE), rfr_slice(t, target, 0, m * s.rows, s.rows), inv, -100);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_scope(t, "");
  rfr_value grads[3], skip;
  int n = 0;
  for (int i = 0; i < 3; i++)
    if (i || !s.frozen_first) grads[n++] = rfr_gradient(t, loss, w[i], RFR_F32);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_lr_options lr = rfr_lr_options_default();
  lr.base = 0.01;
  rfr_adamw_options adam = rfr_adamw_options_default();
  rfr_value rate = rfr_lr_schedule(t, step, &lr), norm = rfr_grad_norm(t, n, grads, &skip);
  rfr_value clip = rfr_clip_scale(t, norm, 1);
  for (int i = 3 - n, k = 0; i < 3; i++, k++) {
    rfr_type type = rfr_value_type(t, w[i]);
    char name[2][16];
    snprintf(name[0], 16, "%s.m", rfr_value_name(t, w[i]));
    snprintf(name[1], 16, "%s.v", rfr_value_name(t, w[i]));
    rfr_value m = rfr_input(t, name[0], RFR_ROLE_STATE, RFR_F32, type.rank, type.shape);
    rfr_value v = rfr_input(t, name[1], RFR_ROLE_STATE, RFR_F32, type.rank, type.shape);
    rfr_adamw(t, w[i], grads[k], m, v, RFR_NONE, rate, clip, skip, step, &adam);
  }
  rfr_metrics_write(t, metrics, step, 3, ((rfr_value[]){loss, norm, skip}));
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", loss);
  OK(rfr_trace_finish(t));
  return t;
}

static void init_step(rfr_programs *p) {
  rfr_tensor x;
  const char *const random[] = {"x", "w0", "b0", "w1"};
  for (int i = 0; i < 4; i++) {
    OK(rfr_programs_tensor(p, random[i], &x));
    rft_fill(&x, 5 + (uint64_t)i);
  }
  OK(rfr_programs_tensor(p, "target", &x));
  for (int64_t i = 0; i < x.bytes / 4; i++) ((int32_t *)x.data)[i] = i % 9 == 4 ? -100 : (int32_t)(i * 7 % 12);
  OK(rfr_programs_tensor(p, "step", &x));
  ((int64_t *)x.data)[2] = 99; /* seed */
  OK(rfr_programs_load(p));
}

static uint64_t state_hash(rfr_programs *p) {
  uint64_t h = 1;
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    for (int64_t k = 0; k < x.bytes; k++) h = (h ^ ((unsigned char *)x.data)[k]) * 0x100000001b3u;
  return h;
}

static float loss_of(rfr_programs *p) {
  rfr_tensor x;
  OK(rfr_program_output(p, 0, "loss", &x));
  return *(float *)x.data;
}

static void test_eager_equals_replay(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){3, 21, false});
  rfr_programs *eager = rft_compile(t, NULL), *replay = rft_compile(t, NULL);
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = 1;
  rfr_programs *debug = rft_compile(t, &o);
  init_step(eager);
  init_step(replay);
  init_step(debug);
  OK(rfr_program_capture(replay, 0));
  float first = 0;
  for (int i = 0; i < 50; i++) {
    OK(rfr_program_run(eager, 0));
    OK(rfr_program_replay(replay, 0, NULL, 0));
    OK(rfr_program_run(debug, 0));
    float a = loss_of(eager), b = loss_of(replay), c = loss_of(debug);
    assert_memory_equal(&a, &b, sizeof a);
    assert_memory_equal(&a, &c, sizeof a);
    if (i == 0) first = a;
  }
  assert_true(loss_of(eager) < 0.8f * first);
  assert_true(state_hash(eager) == state_hash(replay));
  assert_true(state_hash(eager) == state_hash(debug));
  OK(rfr_programs_check(eager));
  rfr_programs_destroy(eager);
  rfr_programs_destroy(replay);
  rfr_programs_destroy(debug);
  rfr_trace_destroy(t);
}

/* One batch, and the same rows in three microbatches, differ by rounding only. Without dropout, because masks depend on
 * the microbatch. */
static void test_passes_off(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){3, 21, true});
  rfr_compile_options off = rfr_compile_options_default();
  off.prune = 0;
  rfr_programs *a = rft_compile(t, NULL), *b = rft_compile(t, &off);
  off.fuse = 0;
  rfr_programs *c = rft_compile(t, &off);
  init_step(a);
  init_step(b);
  init_step(c);
  for (int i = 0; i < 5; i++) {
    OK(rfr_program_run(a, 0));
    OK(rfr_program_run(b, 0));
    OK(rfr_program_run(c, 0));
  }
  /* pruning keeps results bitwise equal; fusion changes the order of some sums */
  assert_true(state_hash(a) == state_hash(b));
  assert_true(fabsf(loss_of(a) - loss_of(c)) < 1e-5f);
  /* with the head fused the logits are never stored in full */
  const rfr_trace *fused = rfr_program_trace(a, 0, "lower");
  assert_int_equal(rft_count_ops(fused, RFI_OP_linear_cross_entropy, RFR_PHASE_FORWARD), 3);
  assert_int_equal(rft_count_ops(fused, RFI_OP_cross_entropy, RFR_PHASE_FORWARD), 0);
  for (rfr_value v = 0; v < fused->n_values; v++)
    assert_false(fused->values[v].op >= 0 && fused->values[v].type.rank == 2 && fused->values[v].type.shape[0] == 21 &&
                 fused->values[v].type.shape[1] == 12);
  rfr_programs_destroy(a);
  rfr_programs_destroy(b);
  rfr_programs_destroy(c);
  rfr_trace_destroy(t);
}

/* Weight gradients of later microbatches accumulate into the first one's memory, without a temporary. */
static void test_accumulates_in_place(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){4, 16, false});
  rfr_programs *p = rft_compile(t, NULL);
  const rfr_trace *u = rfr_program_trace(p, 0, "lower");
  assert_int_equal(rft_count_ops(u, RFI_OP_add, RFR_PHASE_WGRAD), 0);
  int storages = 0;
  for (rfr_value v = 0; v < u->n_values; v++)
    storages += u->values[v].base == v && u->values[v].op >= 0 && u->values[v].type.rank == 2 &&
                u->values[v].type.shape[0] == 36 && u->values[v].type.shape[1] == 20;
  assert_int_equal(storages, 1);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Each cache line of a value was written; the padding of a workspace need not be. */
static void check_touched(const rfr_programs *p) {
  const rfi_plan *plan = &p->program[0].plan;
  const unsigned char *base = rfi_address(&p->m.layout, RFI_REGION_SLOT, 0);
  int64_t workspaces = 0;
  for (int64_t line = 0; line < plan->bytes; line += RFI_ALIGNMENT) {
    bool value = false, workspace = false, written = false;
    for (int i = 0; i < plan->n; i++) {
      const rfi_buffer *b = &plan->buffer[i];
      if (line < b->offset || line >= b->offset + b->bytes) continue;
      value = value || b->value >= 0;
      workspace = workspace || b->value < 0;
    }
    for (int i = 0; i < RFI_ALIGNMENT; i++) written = written || base[line + i] != RFI_PATTERN;
    assert_true(written || (workspace && !value));
    workspaces += !written;
  }
  rfr_plan_summary s;
  OK(rfr_program_plan(p, 0, &s));
  assert_int_equal(rfr_programs_touched_bytes(p), s.planned_bytes - workspaces * RFI_ALIGNMENT);
}

static void test_plan(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){3, 21, false});
  rfr_programs *p = rft_compile(t, NULL);
  rfr_plan_summary s;
  OK(rfr_program_plan(p, 0, &s));
  assert_true(s.transient_planned_bytes >= s.transient_lower_bound_bytes);
  assert_true((double)s.transient_planned_bytes <= 1.01 * (double)s.transient_lower_bound_bytes);
  assert_int_equal(s.planned_bytes, s.persistent_bytes + s.transient_planned_bytes);
  /* buffers that are live at the same time do not overlap; all lie in the arena */
  for (int i = 0; i < s.n_buffers; i++) {
    rfr_plan_buffer a, b;
    OK(rfr_program_plan_buffer(p, 0, i, &a));
    assert_true(a.offset >= 0 && a.offset + a.bytes <= s.planned_bytes);
    for (int k = 0; k < i; k++) {
      OK(rfr_program_plan_buffer(p, 0, k, &b));
      bool together = a.first <= b.last && b.first <= a.last;
      assert_false(together && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes);
    }
  }
  init_step(p);
  int64_t values = 0; /* nothing has run, so all are unwritten */
  for (int i = 0; i < p->program[0].plan.n; i++)
    if (p->program[0].plan.buffer[i].value >= 0) values += p->program[0].plan.buffer[i].bytes;
  assert_int_equal(rfr_program_unwritten_bytes(p, 0), values);
  OK(rfr_program_capture(p, 0));
  rfr_ctx_stats before = rfr_ctx_get_stats(ctx);
  for (int i = 0; i < 10; i++) OK(rfr_program_replay(p, 0, NULL, 0));
  rfr_ctx_stats ten = rfr_ctx_get_stats(ctx);
  for (int i = 0; i < 990; i++) OK(rfr_program_replay(p, 0, NULL, 0));
  rfr_ctx_stats after = rfr_ctx_get_stats(ctx);
  assert_int_equal(after.alloc_calls, before.alloc_calls);
  assert_int_equal(after.live_bytes, ten.live_bytes);
  check_touched(p);
  assert_int_equal(rfr_program_unwritten_bytes(p, 0), 0);
  OK(rfr_programs_check(p));
  /* a budget one byte below the plan is refused, and the error names the bytes needed */
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *q;
  o.budget = s.planned_bytes;
  q = rft_compile(t, &o);
  rfr_programs_destroy(q);
  o.budget--;
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &q), RFR_NO_FIT);
  assert_null(q);
  char needs[32];
  snprintf(needs, sizeof needs, "%lld", (long long)s.planned_bytes);
  assert_non_null(strstr(rfr_last_error()->message, needs));
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* A step with a non-finite gradient changes no weight and no moment, and is counted. The next good step gives the same
 * result as without it. The debug mode reports op and layer. */
static void test_nonfinite_step(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){2, 21, false});
  rfr_programs *p = rft_compile(t, NULL);
  init_step(p);
  rfr_tensor x, w, m, step;
  OK(rfr_programs_tensor(p, "x", &x));
  OK(rfr_programs_tensor(p, "w1", &w));
  OK(rfr_programs_tensor(p, "w1.m", &m));
  OK(rfr_programs_tensor(p, "step", &step));
  OK(rfr_program_run(p, 0));
  float *kept = malloc((size_t)w.bytes), *kept_m = malloc((size_t)m.bytes), good = ((float *)x.data)[3];
  memcpy(kept, w.data, (size_t)w.bytes);
  memcpy(kept_m, m.data, (size_t)m.bytes);
  ((float *)x.data)[3] = INFINITY;
  OK(rfr_program_run(p, 0));
  assert_memory_equal(kept, w.data, (size_t)w.bytes);
  assert_memory_equal(kept_m, m.data, (size_t)m.bytes);
  const int64_t *counts = step.data;
  assert_int_equal(counts[0], 2);
  assert_int_equal(counts[1], 1);
  assert_int_equal(counts[3], 1);
  ((float *)x.data)[3] = good;
  OK(rfr_program_run(p, 0));
  assert_int_equal(counts[1], 2);
  assert_memory_not_equal(kept, w.data, (size_t)w.bytes);
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = 1;
  rfr_programs *debug = rft_compile(t, &o);
  init_step(debug);
  OK(rfr_programs_tensor(debug, "x", &x));
  ((float *)x.data)[3] = INFINITY;
  assert_int_equal(rfr_program_run(debug, 0), RFR_NUMERIC);
  assert_string_equal(rfr_last_error()->slug, "debug.nonfinite");
  assert_non_null(strstr(rfr_last_error()->message, "matmul in layer0.mlp"));
  rfr_programs_destroy(debug);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  free(kept);
  free(kept_m);
}

static void test_replay_signature(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){2, 21, false});
  rfr_programs *p = rft_compile(t, NULL);
  init_step(p);
  assert_int_equal(rfr_program_replay(p, 0, NULL, 0), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "program.order");
  OK(rfr_program_capture(p, 0));
  rfr_tensor x;
  OK(rfr_programs_tensor(p, "x", &x));
  rfr_binding b = {"x", x.type, x.data};
  OK(rfr_program_replay(p, 0, &b, 1));
  uint64_t before = state_hash(p);
  b.type.shape[1]++;
  assert_int_equal(rfr_program_replay(p, 0, &b, 1), RFR_MISMATCH);
  assert_non_null(strstr(rfr_last_error()->message, "\"x\": dimension 1 was 20, now 21"));
  b = (rfr_binding){"x", x.type, (char *)x.data + 64};
  assert_int_equal(rfr_program_replay(p, 0, &b, 1), RFR_MISMATCH);
  b = (rfr_binding){"absent", x.type, x.data};
  assert_int_equal(rfr_program_replay(p, 0, &b, 1), RFR_MISMATCH);
  assert_true(state_hash(p) == before); /* nothing was executed */
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* ---- several programs over one state and one arena ---- */

static rfr_trace *doubling(int64_t rows, const char *input) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, input, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){rows, 32}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){48, 32}));
  rfr_value half = rfr_cast(t, w, RFR_BF16); /* depends only on a frozen weight: phase load */
  rfr_output(t, "y", rfr_linear(t, rfr_cast(t, x, RFR_BF16), half, RFR_NONE));
  OK(rfr_trace_finish(t));
  return t;
}

/* The plan lists every persistent byte: inputs, and the results of phase load of each program. */
static void check_persistent(const rfr_programs *p, const rfr_plan_summary *sum, int loaded) {
  int64_t bytes = 0;
  for (int i = 0; i < sum->n_buffers; i++) {
    rfr_plan_buffer b;
    OK(rfr_program_plan_buffer(p, 0, i, &b));
    assert_int_equal(b.offset < sum->persistent_bytes,
                     strcmp(b.kind, "weight") == 0 || strcmp(b.kind, "input") == 0 || strcmp(b.kind, "load") == 0);
    if (b.offset < sum->persistent_bytes) bytes += rfi_align(b.bytes);
    if (strcmp(b.kind, "load") == 0) assert_string_equal(b.name, "w"), loaded--;
  }
  assert_int_equal(loaded, 0);
  assert_int_equal(bytes, sum->persistent_bytes);
}

static void test_programs_share(void **state) {
  (void)state;
  rfr_trace *t[2] = {doubling(64, "a"), doubling(16, "b")};
  rfr_programs *p, *alone;
  OK(rfr_compile(ctx, 2, (const rfr_trace *const *)t, (const char *const[]){"long", "short"}, NULL, &p));
  alone = rft_compile(t[0], NULL);
  rfr_plan_summary both, one;
  OK(rfr_program_plan(p, 0, &both));
  OK(rfr_program_plan(alone, 0, &one));
  assert_int_equal(both.planned_bytes - both.persistent_bytes, one.planned_bytes - one.persistent_bytes);
  check_persistent(p, &both, 2);
  check_persistent(alone, &one, 1);
  assert_int_equal(rft_count_ops(rfr_program_trace(p, 0, "lower"), RFI_OP_cast, RFR_PHASE_LOAD), 1);
  rft_fill_inputs(p);
  OK(rfr_programs_load(p));
  rfr_tensor a, b, y;
  OK(rfr_programs_tensor(p, "a", &a));
  OK(rfr_programs_tensor(p, "b", &b));
  memcpy(b.data, a.data, (size_t)b.bytes);
  OK(rfr_program_run(p, 0));
  OK(rfr_program_output(p, 0, "y", &y));
  assert_int_equal(y.type.shape[0], 64);
  void *first = malloc(16 * 48 * 2);
  memcpy(first, y.data, 16 * 48 * 2);
  OK(rfr_program_run(p, 1));
  OK(rfr_program_output(p, 1, "y", &y));
  const uint16_t *u = first, *v = y.data;
  for (int i = 0; i < 16 * 48; i++)
    assert_true(fabsf(rfr_float_from_bits(RFR_BF16, u[i]) - rfr_float_from_bits(RFR_BF16, v[i])) < 0.1f);
  free(first);
  rfr_programs_destroy(p);
  rfr_programs_destroy(alone);
  rfr_trace_destroy(t[0]);
  rfr_trace_destroy(t[1]);
}

static void test_refused(void **state) {
  (void)state;
  static const char *const slugs[] = {"autodiff.unreached", "autodiff.role", "autodiff.no_rule", "autodiff.coupled"};
  for (int i = 0; i < 4; i++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){5}));
    rfr_value other = rfr_input(t, "other", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){5}));
    rfr_value skip, y = rfr_mul(t, w, w);
    if (i == 2) y = rfr_grad_norm(t, 1, &y, &skip);
    if (i == 3) {
      rfr_microbatch(t, 1);
      y = rfr_mul(t, y, w);
      rfr_microbatch(t, 0);
      y = rfr_mul(t, y, w);
      rfr_microbatch(t, -1);
    }
    rfr_value loss = rfr_sum(t, y, -1);
    rfr_output(t, "g", rfr_gradient(t, loss, i == 0 ? other : i == 1 ? y : w, RFR_F32));
    rfr_programs *p;
    if (i == 1) { /* refused where it is recorded */
      assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
      assert_string_equal(rfr_last_error()->slug, slugs[i]);
      rfr_trace_destroy(t);
      continue;
    }
    OK(rfr_trace_finish(t));
    assert_int_not_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p), RFR_OK);
    assert_string_equal(rfr_last_error()->slug, slugs[i]);
    assert_null(p);
    if (i == 0) assert_non_null(strstr(rfr_last_error()->message, "\"other\""));
    rfr_trace_destroy(t);
  }
}

/* ---- gradients that are accumulated into a state ---- */

enum { ONTO_ROWS = 13, ONTO_K = 24, ONTO_N = 40, ONTO_MICROBATCHES = 3 };

/* Two layers, the first weight used twice; `onto`: the gradients of one microbatch are accumulated into states. */
static rfr_trace *onto_trace(int microbatches, bool onto) {
  static const char *const names[] = {"w0", "w1", "norm", "bias"};
  static const int64_t shape[][2] = {{ONTO_K, ONTO_K}, {ONTO_N, ONTO_K}, {ONTO_K}, {ONTO_N}};
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value w[4], loss = RFR_NONE;
  for (int i = 0; i < 4; i++) w[i] = rfr_input(t, names[i], RFR_ROLE_TRAINABLE, RFR_F32, i < 2 ? 2 : 1, shape[i]);
  for (int m = 0; m < microbatches; m++) {
    char name[8];
    snprintf(name, sizeof name, "x%d", m);
    rfr_microbatch(t, m);
    rfr_value x = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ONTO_ROWS, ONTO_K}));
    rfr_value h = rfr_rmsnorm(t, rfr_linear(t, rfr_linear(t, x, w[0], RFR_NONE), w[0], RFR_NONE), w[2], 1e-5);
    rfr_value y = rfr_linear(t, h, w[1], w[3]), part = rfr_sum(t, rfr_mul(t, y, y), -1);
    rfr_microbatch(t, -1);
    loss = m == 0 ? part : rfr_add(t, loss, part);
  }
  for (int i = 0; i < 4; i++) {
    char name[8];
    snprintf(name, sizeof name, "g%d", i);
    rfr_value main = onto ? rfr_input(t, name, RFR_ROLE_STATE, RFR_F32, i < 2 ? 2 : 1, shape[i]) : RFR_NONE;
    rfr_output(t, name, onto ? rfr_gradient_onto(t, loss, w[i], main) : rfr_gradient(t, loss, w[i], RFR_F32));
  }
  OK(rfr_trace_finish(t));
  return t;
}

/* Accumulating microbatches into a state, one program run each, is bitwise equal to accumulating them in one trace. No
 * temporary is used; after the fuse pass GEMMs and sums write into the state themselves. */
static void test_gradient_accumulates(void **state) {
  (void)state;
  for (int fuse = 0; fuse < 2; fuse++) {
    rfr_compile_options o = rfr_compile_options_default();
    o.fuse = fuse;
    rfr_trace *full = onto_trace(ONTO_MICROBATCHES, false), *one = onto_trace(1, true);
    rfr_programs *p = rft_compile(full, &o), *q = rft_compile(one, &o);
    const rfr_trace *lowered = rfr_program_trace(q, 0, "lower");
    int separate = 0;
    for (int i = 0; i < lowered->n_ops; i++) separate += lowered->ops[i].def->code == RFI_OP_accumulate;
    assert_int_equal(separate, fuse ? 0 : 5); /* w0 has two gradients */
    rft_fill_inputs(p);
    rfr_tensor a, b;
    for (int i = 0; rfr_programs_tensor_at(q, i, &b) == RFR_OK; i++)
      if (rfr_programs_tensor(p, b.name, &a) == RFR_OK) memcpy(b.data, a.data, (size_t)a.bytes);
    OK(rfr_program_run(p, 0));
    for (int m = 0; m < ONTO_MICROBATCHES; m++) {
      char name[8];
      snprintf(name, sizeof name, "x%d", m);
      OK(rfr_programs_tensor(p, name, &a));
      OK(rfr_programs_tensor(q, "x0", &b));
      memcpy(b.data, a.data, (size_t)a.bytes);
      OK(rfr_program_run(q, 0));
    }
    for (int i = 0; i < 4; i++) {
      char name[8];
      snprintf(name, sizeof name, "g%d", i);
      OK(rfr_program_output(p, 0, name, &a));
      OK(rfr_programs_tensor(q, name, &b));
      rfr_tensor shown;
      OK(rfr_program_output(q, 0, name, &shown));
      assert_ptr_equal(shown.data, b.data);
      assert_same_sums(&a, &b);
    }
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
    rfr_trace_destroy(full);
    rfr_trace_destroy(one);
  }
}

static void test_profile(void **state) {
  (void)state;
  enum { T = 12, H = 2, D = 8, IN = 24, CAPACITY = 40, WINDOW = 11, MOST = 16 };
  static const int32_t documents[3] = {0, 4, 12};
  static const int64_t text[4] = {7, 14, 0, 0}; /* seven tokens are cached, the next seven are processed */
  rfr_op_time times[MOST];
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, IN}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_F32, 2, ((int64_t[]){H * D, IN}));
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_value q = rfr_reshape(t, rfr_linear(t, x, w, RFR_NONE), 3, ((int64_t[]){T, H, D}));
  rfr_output(t, "y", rfr_attention(t, q, q, q, offsets, &(rfr_attention_options){.causal = 1}));
  rfr_value cache = rfr_input(t, "cache", RFR_ROLE_INPUT, RFR_F32, 3, ((int64_t[]){CAPACITY, H, D}));
  rfr_value cursor = rfr_input(t, "cursor", RFR_ROLE_INPUT, RFR_I64, 1, ((int64_t[]){4}));
  rfr_attention_options windowed = {.causal = 1, .window = WINDOW};
  rfr_output(t, "next", rfr_attention_cached(t, q, cache, cache, cursor, &windowed));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rft_fill_inputs(p);
  rfr_tensor tensor, y;
  OK(rfr_programs_tensor(p, "offsets", &tensor));
  memcpy(tensor.data, documents, sizeof documents);
  OK(rfr_programs_tensor(p, "cursor", &tensor));
  memcpy(tensor.data, text, sizeof text);
  OK(rfr_programs_load(p));
  OK(rfr_program_capture(p, 0));
  OK(rfr_program_replay(p, 0, NULL, 0));
  OK(rfr_program_output(p, 0, "y", &y));
  float replayed[T * H * D];
  memcpy(replayed, y.data, sizeof replayed);
  memset(y.data, 0, sizeof replayed);

  int n = -1;
  OK(rfr_program_profile(p, 0, NULL, 0, &n)); /* returns the count, runs nothing */
  assert_int_equal(n, p->program[0].u.n_bound - p->program[0].u.first[RFI_PART_F]);
  assert_in_range(n, 2, MOST);
  assert_int_equal(rfr_program_profile(p, 0, times, n - 1, &n), RFR_INVALID);
  assert_int_equal(rfr_program_profile(p, 1, times, MOST, &n), RFR_INVALID);
  for (int i = 0; i < T * H * D; i++) assert_true(((const float *)y.data)[i] == 0);
  OK(rfr_program_profile(p, 0, times, MOST, &n));
  assert_memory_equal(y.data, replayed, sizeof replayed);
  double end = 0;
  bool gemm = false, attention = false, cached = false;
  for (int i = 0; i < n; i++) {
    rfr_plan_op op;
    OK(rfr_program_op(p, 0, times[i].op, &op));
    assert_true(times[i].start >= end && times[i].seconds >= 0);
    end = times[i].start + times[i].seconds;
    assert_true(times[i].kernel[0] != '\0');
    assert_int_equal(times[i].dtype, RFR_F32);
    if (strcmp(op.name, "matmul") == 0) {
      gemm = true;
      assert_true(times[i].flops == 2.0 * T * IN * H * D);
      assert_true(times[i].bytes == 4.0 * (T * IN + H * D * IN + T * H * D));
    } else if (strcmp(op.name, "attention") == 0) {
      attention = true; /* two GEMMs over the pairs of a causal mask within each document */
      assert_true(fabs(times[i].flops - 2.0 * 2 * (4 * 5 / 2 + 8 * 9 / 2) * H * D) < 1e-6);
      assert_string_equal(times[i].kernel, rfi_ctx_isa(ctx));
    } else if (strcmp(op.name, "attention_cached") == 0) {
      cached = true; /* positions 7 to 13: the first four see all previous positions, the others a window */
      assert_true(fabs(times[i].flops - 2.0 * 2 * (8 + 9 + 10 + 4 * WINDOW) * H * D) < 1e-6);
    }
  }
  assert_true(gemm && attention && cached);
  rfr_programs_destroy(p);

  rfr_compile_options debug = rfr_compile_options_default();
  debug.debug = 1;
  p = rft_compile(t, &debug);
  assert_int_equal(rfr_program_profile(p, 0, times, MOST, &n), RFR_INVALID);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Every allocation of compile fails once: each failure is a status, and no memory leaks. */
static void test_allocation_faults(void **state) {
  (void)state;
  rfr_trace *t = training_step((step_shape){2, 8, true});
  int64_t live = rfr_ctx_get_stats(ctx).live_blocks;
  for (int64_t k = 1;; k++) {
    rfr_programs *p;
    rfr_ctx_fail_alloc(ctx, k);
    rfr_status s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p);
    rfr_ctx_fail_alloc(ctx, 0);
    if (s == RFR_OK) {
      assert_true(k > 50);
      rfr_programs_destroy(p);
      break;
    }
    if (s != RFR_NO_MEMORY) fail_msg("allocation %lld: %s", (long long)k, rfr_last_error()->message);
    assert_null(p);
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, live);
  }
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_chain),
      rft_context_test(test_eager_equals_replay),
      rft_context_test(test_passes_off),
      rft_context_test(test_accumulates_in_place),
      rft_context_test(test_plan),
      rft_context_test(test_nonfinite_step),
      rft_context_test(test_replay_signature),
      rft_context_test(test_programs_share),
      rft_context_test(test_refused),
      rft_context_test(test_gradient_accumulates),
      rft_context_test(test_profile),
      rft_context_test(test_allocation_faults),
  };
  return cmocka_run_group_tests_name("programs", tests, NULL, NULL);
}
