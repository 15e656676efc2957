/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradient of SwiGLU recomputes its result. Steps with and without recomputation are bitwise equal: eager and
 * replayed, with weighted rows and without, packed and not, with one and two threads. The plan is smaller, and the
 * additional bytes moved are exactly those of the recomputed results. SwiGLU is cloned if the gradient must not
 * overwrite its dy, or if an op needs the result too early.
 *
 *   recompute_bwd_test [--device NAME]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "core/rng.h"
#include "exec/exec.h"
#include "ops/op_index.h"
#include "pass/recompute_model.h"
#include "support/context.h"
#include "support/device.h"
#include "support/rewrite.h"
#include "trace/live.h"

enum { T = 66, C = 24, I = 40, LAYERS = 3 };

typedef struct cell {
  rfr_dtype type;
  bool weighted, packed;
  int microbatches;
} cell;

static int n_names;
static char names[64][16];

static rfr_value parameter(rfr_trace *t, const char *what, int layer, int64_t rows, int64_t columns) {
  snprintf(names[n_names], sizeof names[0], "%s%d", what, layer);
  return rfr_input(t, names[n_names++], RFR_ROLE_TRAINABLE, RFR_F32, columns ? 2 : 1, ((int64_t[]){rows, columns}));
}

typedef struct layer {
  rfr_value gate, up, down, rows;
} layer;

static rfr_value block(rfr_trace *t, const cell *c, const layer *l, rfr_value x, rfr_policy policy) {
  rfr_value gate = rfr_linear(t, x, rfr_cast(t, l->gate, c->type), RFR_NONE), up;
  if (c->packed) up = rfr_slice(t, gate, 1, I, I), gate = rfr_slice(t, gate, 1, 0, I);
  else up = rfr_linear(t, x, rfr_cast(t, l->up, c->type), RFR_NONE);
  rfr_set_recompute(t, policy);
  const rfr_value h = c->weighted ? rfr_swiglu_weighted(t, gate, up, l->rows) : rfr_swiglu(t, gate, up);
  rfr_set_recompute(t, RFR_POLICY_AUTO);
  return rfr_add(t, x, rfr_linear(t, h, rfr_cast(t, l->down, c->type), RFR_NONE));
}

static rfr_trace *record(const cell *c, rfr_policy policy) {
  rfr_trace *t;
  layer l[LAYERS];
  rfr_value loss = RFR_NONE;
  OK(rfr_trace_create(ctx, &t));
  n_names = 0;
  for (int i = 0; i < LAYERS; i++) {
    l[i] =
        (layer){parameter(t, "gate", i, c->packed ? 2 * I : I, C), RFR_NONE, parameter(t, "down", i, C, I), RFR_NONE};
    if (!c->packed) l[i].up = parameter(t, "up", i, I, C);
    if (c->weighted) l[i].rows = parameter(t, "rows", i, T, 0);
  }
  for (int m = 0; m < c->microbatches; m++) {
    char name[16];
    rfr_microbatch(t, m);
    snprintf(name, sizeof name, "x%d", m);
    rfr_value h = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    snprintf(name, sizeof name, "r%d", m);
    const rfr_value r = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    h = rfr_cast(t, h, c->type);
    for (int i = 0; i < LAYERS; i++) h = block(t, c, &l[i], h, policy);
    const rfr_value part = rfr_sum(t, rfr_mul(t, rfr_cast(t, h, RFR_F32), r), -1);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_output(t, "loss", loss);
  for (int k = 0, n = n_names; k < n; k++)
    for (rfr_value w = 0; w < t->n_values; w++)
      if (t->values[w].role == RFR_ROLE_TRAINABLE && strcmp(t->values[w].name, names[k]) == 0)
        rfr_output(t, names[k], rfr_gradient(t, loss, w, RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

static void *must(void *memory) {
  assert_non_null(memory);
  return memory;
}

static rfr_programs *run(const rfr_trace *t, bool replay) {
  rfr_tensor x;
  rfr_programs *p = rft_compile(t, NULL);
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    float *to = must(malloc((size_t)x.bytes));
    for (int64_t k = 0; k < x.bytes / 4; k++)
      to[k] = (float)(rfi_draw4(rfi_stream_key(17 + (uint64_t)i, 0), (uint64_t)k, 0, 0, 0).v[0] >> 8) / 8388608.0f - 1;
    OK(rfr_programs_write(p, &x, to));
    free(to);
  }
  OK(rfr_programs_load(p));
  if (replay) OK(rfr_program_capture(p, 0));
  if (replay) OK(rfr_program_replay(p, 0, NULL, 0));
  else OK(rfr_program_run(p, 0));
  return p;
}

static bool has_result(const rfi_opr *op) {
  return op->n_out > 0 && op->def->only_onto[op->n_out - 1] && op->out[op->n_out - 1] >= 0;
}

static void check(const cell *c) {
  rfr_trace *kept = record(c, RFR_POLICY_AUTO), *marked = record(c, RFR_POLICY_RECOMPUTE);
  for (int replay = 0; replay < 2; replay++) {
    rfr_programs *p = run(marked, replay), *q = run(kept, replay);
    const rfr_trace *u = rfr_program_trace(p, 0, "lower"), *v = rfr_program_trace(q, 0, "lower");
    double more = 0;
    int n = 0;
    for (int i = 0; i < u->n_ops; i++) {
      const rfi_opr *op = &u->ops[i];
      assert_int_equal(op->clone_of, -1);
      n += has_result(op);
      if (has_result(op)) assert_int_equal(u->values[op->out[op->n_out - 1]].base, u->values[op->in[0]].base);
      more += op->cost.bytes;
    }
    for (int i = 0; i < v->n_ops; i++) more -= v->ops[i].cost.bytes;
    assert_int_equal(u->n_ops, v->n_ops);
    assert_in_range(n, LAYERS - 1, LAYERS * c->microbatches);
    const int64_t h = T * I * rfr_dtype_bits(c->type) / 8;
    assert_int_equal((int64_t)more, n * h);
    rfr_plan_summary with, without;
    OK(rfr_program_plan(p, 0, &with));
    OK(rfr_program_plan(q, 0, &without));
    assert_true(with.planned_bytes < without.planned_bytes);
    for (int k = 0; k < n_names; k++) {
      if (!rft_same_output(p, q, names[k]))
        fail_msg("%s, weighted %d, packed %d, %d microbatches, replay %d: %s has other bits", rfr_dtype_name(c->type),
                 c->weighted, c->packed, c->microbatches, replay, names[k]);
    }
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
  }
  rfr_trace_destroy(kept);
  rfr_trace_destroy(marked);
}

static void bits(void **state) {
  (void)state;
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  for (int threads = 1; threads <= 2; threads++) {
    rfr_ctx *const own = ctx;
    rfr_ctx_options o = rfr_ctx_options_default();
    o.threads = threads;
    OK(rfr_ctx_create(&o, &ctx));
    for (int i = 0; i < 3; i++)
      for (int k = 0; k < 8; k++)
        check(&(cell){types[i], .weighted = k & 1, .packed = k & 2, .microbatches = k & 4 ? 2 : 1});
    rfr_ctx_destroy(ctx);
    ctx = own;
  }
}

/* ---- a backward by hand ---- */

typedef enum variant { PLAIN, EARLY, READ_AFTER, OUTPUT, READ_BETWEEN, SWAPPED, VARIANTS } variant;

/* *at: the op swiglu. dw reads its result before swiglu_bwd runs. */
static rfr_trace *by_hand(variant how, int *at) {
  rfr_trace *t;
  rfr_value d[RFI_MAX_NAMES];
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, I}));
  const rfr_value gate = rfr_silu(t, x), up = rfr_gelu(t, x, 0), h = rfr_swiglu(t, gate, up), q = rfr_silu(t, h);
  *at = t->values[h].op;
  rfr_output(t, "q", rfr_sum(t, q, -1));
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  if (how == EARLY) rfr_output(t, "e", rfr_sum(t, q, 0));
  const rfr_value dy = rfr_mul(t, x, x);
  rfr_set_phase(t, RFR_PHASE_WGRAD);
  const rfr_value dw = rfr_concat(t, 4, ((rfr_value[]){h, x, x, x}), 1); /* so large that the peak is here */
  rfr_output(t, "dw", dw);
  if (how == READ_BETWEEN) rfr_output(t, "z", rfr_silu(t, dw));
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  const bool swapped = how == SWAPPED;
  rfi_record(t, RFR_HERE, RFI_OP_swiglu_bwd, 3, (rfr_value[]){dy, swapped ? up : gate, swapped ? gate : up}, NULL, d);
  rfr_output(t, "dgate", d[RFI_OUT_swiglu_bwd_dgate]);
  assert_int_equal(d[RFI_OUT_swiglu_bwd_h], RFR_NONE);
  if (how == READ_AFTER) rfr_output(t, "s", rfr_sum(t, dy, -1));
  if (how == OUTPUT) rfr_output(t, "dy", dy);
  OK(rfr_trace_finish(t));
  return t;
}

static void choices(void **state) {
  (void)state;
  for (variant how = PLAIN; how < VARIANTS; how++)
    for (int split = 0; split < 2; split++) {
      int at;
      rfr_trace *t = by_hand(how, &at), *u;
      const rfi_pass_options o = {.split_phases = split, .copies = 1};
      rfi_recompute_model m;
      OK(rfi_recompute_model_init(&m, t, &o));
      assert_int_equal(m.by[at].bwd >= 0, how <= EARLY && !split);
      m.chosen[at] = true;
      m.chosen[at + 1] = how == EARLY && m.can[at + 1]; /* q, which needs h before the gradient */
      if (split) goto next;
      const rfi_choice_cost c = rfi_recompute_evaluate(&m);
      assert_true(c.possible);
      OK(rfi_recompute_apply(&m, NULL, &u));
      int64_t peak;
      OK(rfi_live_peak(u, &peak));
      assert_int_equal(c.peak, peak);
      assert_int_equal(c.clones, how == PLAIN ? 0 : how == EARLY ? 2 : 1);
      assert_int_equal(c.recomputed, how == EARLY ? 2 : 1);
      assert_int_equal(rft_count_ops(u, RFI_OP_swiglu, -1), how == PLAIN ? 1 : 2);
      if (how == PLAIN) assert_int_equal((int64_t)c.bytes, T * I * 4);
      for (int i = 0; i < u->n_ops && how == PLAIN; i++)
        if (u->ops[i].def->code == RFI_OP_swiglu_bwd) {
          assert_true(has_result(&u->ops[i]));
          assert_int_equal(u->ops[i + 1].in[0], u->ops[i].out[RFI_OUT_swiglu_bwd_h]); /* dw has moved after it */
        }
      rfr_trace_destroy(u);
    next:
      rfi_recompute_model_deinit(&m);
      rfr_trace_destroy(t);
    }
}

/* Two SwiGLUs, whose gradients recompute them. A reader of the first one must pass the gradient of the second, and
 *   0  nothing else: both are possible
 *   1  also reads the dy that the second gradient overwrites
 *   2  is the second gradient */
static rfr_trace *record_two(int how, int at[2]) {
  rfr_trace *t;
  rfr_value d[RFI_MAX_NAMES];
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, I}));
  const rfr_value gate = rfr_silu(t, x), up = rfr_gelu(t, x, 0), other = rfr_mul(t, x, x), h = rfr_swiglu(t, gate, up),
                  h2 = rfr_swiglu(t, how == 2 ? h : up, other);
  at[0] = t->values[h].op, at[1] = t->values[h2].op;
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  const rfr_value dy2 = rfr_mul(t, x, x), dy = rfr_silu(t, dy2);
  rfr_set_phase(t, RFR_PHASE_WGRAD);
  if (how < 2) rfr_output(t, "dw", rfr_concat(t, 2, ((rfr_value[]){h, how == 1 ? dy2 : x}), 1));
  rfr_output(t, "dw2", rfr_silu(t, h2));
  rfr_set_phase(t, RFR_PHASE_DGRAD);
  rfi_record(t, RFR_HERE, RFI_OP_swiglu_bwd, 3, (rfr_value[]){dy2, how == 2 ? h : up, other}, NULL, d);
  rfr_output(t, "d2", d[RFI_OUT_swiglu_bwd_dgate]);
  rfi_record(t, RFR_HERE, RFI_OP_swiglu_bwd, 3, (rfr_value[]){dy, gate, up}, NULL, d);
  rfr_output(t, "d", d[RFI_OUT_swiglu_bwd_dgate]);
  OK(rfr_trace_finish(t));
  return t;
}

static void two(void **state) {
  (void)state;
  for (int how = 0; how < 3; how++) {
    const rfi_pass_options o = {.copies = 1};
    rfi_recompute_model m;
    int at[2];
    rfr_trace *t = record_two(how, at);
    OK(rfi_recompute_model_init(&m, t, &o));
    assert_true(m.by[at[1]].bwd >= 0);
    assert_int_equal(m.by[at[0]].bwd >= 0, how == 0);
    rfi_recompute_model_deinit(&m);
    rfr_trace_destroy(t);
  }
}

int main(int argc, char **argv) {
  if (!rft_device_named(&argc, argv)) return 77;
  const struct CMUnitTest tests[] = {rft_context_test(bits), rft_context_test(choices), rft_context_test(two)};
  return cmocka_run_group_tests_name("recompute_bwd", tests, NULL, NULL);
}
