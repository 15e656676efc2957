/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusions that are reported as exact: with the pass and without it, a program gives bitwise the same gradients, for
 * every subset of trained parameters. The pass makes the expected fusions and computes only the gradients that the
 * subset requests. There is one microbatch, because gradients that are accumulated into those of an earlier one are
 * rounded in another way, as the report says. A softcapped loss head is not exact and agrees within rounding.
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
#include "support/context.h"
#include "support/rewrite.h"

enum { T = 70, HEADS = 3, D = 8, C = HEADS * D, N_PARAMETERS = 8 };

static const char *const names[N_PARAMETERS] = {"table", "scale1", "bias1", "qkv", "qkv_bias", "proj", "scale2", "w2"};
enum { TABLE, SCALE1, BIAS1, QKV, QKV_BIAS, PROJ, SCALE2, W2 };

static rfr_value parameter(rfr_trace *t, unsigned trained, int i, int rank, int64_t a, int64_t b) {
  return rfr_input(t, names[i], trained >> i & 1 ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN, RFR_F32, rank,
                   ((int64_t[]){a, b}));
}

/* Two blocks with a residual stream in `type`: packed attention after a layernorm, a GEMM after an rmsnorm. */
static rfr_trace *blocks(rfr_ctx *ctx, unsigned trained, rfr_dtype type) {
  rfr_trace *t;
  rfr_value p[N_PARAMETERS];
  OK(rfr_trace_create(ctx, &t));
  p[TABLE] = parameter(t, trained, TABLE, 2, 11, C);
  p[SCALE1] = parameter(t, trained, SCALE1, 1, C, 0);
  p[BIAS1] = parameter(t, trained, BIAS1, 1, C, 0);
  p[QKV] = parameter(t, trained, QKV, 2, 3 * C, C);
  p[QKV_BIAS] = parameter(t, trained, QKV_BIAS, 1, 3 * C, 0);
  p[PROJ] = parameter(t, trained, PROJ, 2, C, C);
  p[SCALE2] = parameter(t, trained, SCALE2, 1, C, 0);
  p[W2] = parameter(t, trained, W2, 2, C, C);
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){3}));
  rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){T})), head[3];
  rfr_value x = rfr_cast(t, rfr_embedding(t, p[TABLE], ids), type);
  rfr_value h = rfr_layernorm(t, x, p[SCALE1], p[BIAS1], 1e-5);
  rfr_value qkv = rfr_linear(t, h, rfr_cast(t, p[QKV], type), rfr_cast(t, p[QKV_BIAS], type));
  for (int i = 0; i < 3; i++) head[i] = rfr_reshape(t, rfr_slice(t, qkv, 1, i * C, C), 3, ((int64_t[]){T, HEADS, D}));
  rfr_value o = rfr_attention(t, head[0], head[1], head[2], offsets, &(rfr_attention_options){.causal = 1});
  o = rfr_linear(t, rfr_reshape(t, o, 2, ((int64_t[]){T, C})), rfr_cast(t, p[PROJ], type), RFR_NONE);
  rfr_output(t, "x0", x); /* so that no GEMM accumulates into the stream in place, which rounds differently */
  x = rfr_add(t, x, o);
  rfr_output(t, "x1", x);
  h = rfr_rmsnorm(t, x, p[SCALE2], 1e-5);
  x = rfr_add(t, x, rfr_linear(t, h, rfr_cast(t, p[W2], type), RFR_NONE));
  rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  rfr_value loss = rfr_sum(t, rfr_mul(t, rfr_cast(t, x, RFR_F32), r), -1);
  for (int i = 0; i < N_PARAMETERS; i++)
    if (trained >> i & 1) rfr_output(t, names[i], rfr_gradient(t, loss, p[i], RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_programs *run(rfr_ctx *ctx, const rfr_trace *t, int fuse) {
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p;
  rfr_tensor x;
  o.fuse = fuse;
  OK(rfr_compile(ctx, 1, &t, NULL, &o, &p));
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    for (int64_t k = 0; k < rfi_count(&x.type); k++) {
      uint32_t draw = rfi_draw4(rfi_stream_key(17 + (uint64_t)i, 0), (uint64_t)k, 0, 0, 0).v[0];
      if (x.type.dtype == RFR_F32) ((float *)x.data)[k] = (float)(draw >> 8) / 8388608.0f - 1.0f;
      else ((int32_t *)x.data)[k] = (int32_t)(draw % 11);
    }
  if (rfr_programs_tensor(p, "offsets", &x) == RFR_OK) memcpy(x.data, ((int32_t[]){0, 29, T}), 3 * sizeof(int32_t));
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  return p;
}

static void check(rfr_ctx *ctx, unsigned trained, rfr_dtype type) {
  rfr_trace *t = blocks(ctx, trained, type);
  rfr_programs *p = run(ctx, t, 1), *q = run(ctx, t, 0);
  for (int i = 0; i < N_PARAMETERS; i++) {
    rfr_tensor a, b;
    bool zero = true;
    if (!(trained >> i & 1)) continue;
    OK(rfr_program_output(p, 0, names[i], &a));
    OK(rfr_program_output(q, 0, names[i], &b));
    for (int64_t n = 0; n < rfi_count(&a.type); n++) zero = zero && ((float *)a.data)[n] == 0;
    assert_false(zero);
    if (memcmp(a.data, b.data, (size_t)a.bytes) != 0)
      fail_msg("the gradient of %s, trained %#x, %s, has other bits", names[i], trained, rfr_dtype_name(type));
  }
  /* dx is needed if something before the norm is trained */
  bool dx1 = trained & 1u << TABLE, dx2 = trained & ((1u << SCALE2) - 1);
  bool dw1 = trained & 1u << SCALE1, db1 = trained & 1u << BIAS1, dw2 = trained & 1u << SCALE2;
  assert_int_equal(rft_count_lowered(p, RFI_OP_layernorm_bwd), dx1); /* the residual stream always has a gradient */
  assert_int_equal(rft_count_lowered(p, RFI_OP_rmsnorm_bwd), dx2);
  assert_int_equal(rft_count_lowered(p, RFI_OP_layernorm_dw), (!dx1 && dw1));
  assert_int_equal(rft_count_lowered(p, RFI_OP_layernorm_db), (!dx1 && db1));
  assert_int_equal(rft_count_lowered(p, RFI_OP_rmsnorm_dw), (!dx2 && dw2));
  assert_int_equal(rft_count_lowered(p, RFI_OP_layernorm_dx) + rft_count_lowered(p, RFI_OP_rmsnorm_dx), 0);
  assert_int_equal(rft_count_lowered(p, RFI_OP_add_rmsnorm), 1);
  assert_int_equal(rft_count_lowered(q, RFI_OP_add_rmsnorm), 0);
  /* all gradients of slices are packed, and no separate sum of the stream's gradients is left */
  assert_int_equal(rft_count_lowered(p, RFI_OP_attention_bwd_packed), (trained & ((1u << PROJ) - 1)) != 0);
  assert_int_equal(rft_count_lowered(p, RFI_OP_attention_bwd) + rft_count_lowered(p, RFI_OP_concat), 0);
  assert_int_equal(rft_count_lowered(p, RFI_OP_pad), 0);
  const rfr_trace *u = rfr_program_trace(p, 0, "lower");
  for (int i = 0; i < u->n_ops; i++)
    if (u->ops[i].def->code == RFI_OP_layernorm_bwd) {
      assert_int_equal(u->ops[i].out[1] >= 0, dw1);
      assert_int_equal(u->ops[i].out[2] >= 0, db1);
      assert_true(u->ops[i].in[5] >= 0);
    } else if (u->ops[i].def->code == RFI_OP_rmsnorm_bwd) {
      assert_int_equal(u->ops[i].out[1] >= 0, dw2);
    }
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(t);
}

static void test_exact(void **state) {
  (void)state;
  static const int threads[] = {1, 3};
  for (int n = 0; n < 2; n++) {
    rfr_ctx_options o = rfr_ctx_options_default();
    rfr_ctx *ctx;
    o.threads = threads[n];
    OK(rfr_ctx_create(&o, &ctx));
    for (unsigned trained = 1; trained < 1u << N_PARAMETERS; trained += n ? 37 : 1) {
      check(ctx, trained, RFR_F32);
      check(ctx, trained, RFR_BF16);
    }
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
    rfr_ctx_destroy(ctx);
  }
}

/* The fusions rely on this invariant: a sum over rows is bitwise the same for dense rows (split over rows) and strided
 * rows (split over columns), with any number of threads. */
static void test_sum_over_rows(void **state) {
  (void)state;
  enum { ROWS = 101, COLUMNS = 531 };
  float first[COLUMNS];
  for (int threads = 1; threads <= 4; threads += 3) {
    rfr_ctx_options o = rfr_ctx_options_default();
    rfr_ctx *ctx;
    rfr_trace *t;
    rfr_tensor dense, strided;
    o.threads = threads;
    OK(rfr_ctx_create(&o, &ctx));
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){ROWS, 2 * COLUMNS}));
    rfr_value half = rfr_slice(t, x, 1, COLUMNS, COLUMNS);
    rfr_output(t, "strided", rfr_sum(t, half, 0));
    rfr_output(t, "dense", rfr_sum(t, rfr_copy(t, half), 0));
    OK(rfr_trace_finish(t));
    rfr_programs *p = run(ctx, t, 1);
    OK(rfr_program_output(p, 0, "strided", &strided));
    OK(rfr_program_output(p, 0, "dense", &dense));
    if (threads == 1) memcpy(first, strided.data, sizeof first);
    assert_memory_equal(strided.data, first, sizeof first);
    assert_memory_equal(dense.data, first, sizeof first);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
    rfr_ctx_destroy(ctx);
  }
}

/* A head with a softcap, or a cap that another op reads too. `per_row`: the sum of the squares of the rows' losses. */
static rfr_trace *capped_head(rfr_ctx *ctx, unsigned trained, rfr_dtype type, bool shown, bool per_row) {
  enum { V = 11 };
  static const char *const wanted[2] = {"table", "w2"};
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value w[2] = {parameter(t, trained, TABLE, 2, T, C), parameter(t, trained, W2, 2, V, C)};
  rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){T}));
  rfr_value logits = rfr_gelu(t, rfr_cast(t, w[0], type), 0);
  logits = rfr_matmul(t, logits, rfr_cast(t, w[1], type), RFR_NONE, 0, 1, RFR_F32);
  logits = rfr_softcap(t, logits, 1.5);
  rfr_value loss;
  if (per_row) {
    const rfr_value nll = rfr_token_loss(t, logits, ids, 3);
    loss = rfr_sum(t, rfr_mul(t, nll, nll), -1);
  } else {
    loss = rfr_cross_entropy(t, logits, ids, rfr_token_count(t, 1, &ids, 3, NULL), 3);
  }
  rfr_output(t, "loss", loss);
  if (shown) rfr_output(t, "logits", logits);
  for (int i = 0; i < 2; i++)
    if (trained >> (i ? W2 : TABLE) & 1) rfr_output(t, wanted[i], rfr_gradient(t, loss, w[i], RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

/* Gate and up are halves of one GEMM, in the order of the slices, so their gradients are one result. In the other order
 * they are not fused, because the halves of that result would be swapped. */
static void test_gate_and_up(void **state) {
  (void)state;
  const unsigned trained = 1u << W2 | 1u << TABLE;
  rfr_ctx *ctx;
  OK(rfr_ctx_create(NULL, &ctx));
  for (int k = 0; k < 8; k++) {
    /* after a split into heads, the halves of a row are not the halves of each head */
    const int swapped = k % 2, heads = k / 4;
    const rfr_dtype type = k / 2 % 2 ? RFR_BF16 : RFR_F32;
    rfr_tensor a, b;
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = rfr_gelu(t, rfr_cast(t, parameter(t, trained, TABLE, 2, T, C), type), 0);
    rfr_value w = parameter(t, trained, W2, 2, 2 * C, C);
    rfr_value y = rfr_linear(t, x, rfr_cast(t, w, type), RFR_NONE);
    rfr_value gate = rfr_slice(t, y, 1, swapped * C, C), up = rfr_slice(t, y, 1, (1 - swapped) * C, C);
    if (heads) gate = rfr_reshape(t, gate, 3, ((int64_t[]){T, HEADS, D}));
    if (heads) up = rfr_reshape(t, up, 3, ((int64_t[]){T, HEADS, D}));
    y = rfr_swiglu(t, gate, up);
    if (heads) y = rfr_reshape(t, y, 2, ((int64_t[]){T, C}));
    rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    rfr_output(t, "w2", rfr_gradient(t, rfr_sum(t, rfr_mul(t, rfr_cast(t, y, RFR_F32), r), -1), w, RFR_F32));
    OK(rfr_trace_finish(t));
    rfr_programs *p = run(ctx, t, 1), *q = run(ctx, t, 0);
    assert_int_equal(rft_count_lowered(p, RFI_OP_swiglu_bwd_packed), !swapped && !heads);
    assert_int_equal(rft_count_lowered(p, RFI_OP_swiglu_bwd), swapped || heads);
    assert_int_equal(rft_count_lowered(p, RFI_OP_concat), swapped || heads);
    OK(rfr_program_output(p, 0, "w2", &a));
    OK(rfr_program_output(q, 0, "w2", &b));
    assert_memory_equal(a.data, b.data, a.bytes);
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* The same with row weights, whose gradient is another result of that op if it is needed. */
static void test_weighted_gate_and_up(void **state) {
  (void)state;
  rfr_ctx *ctx;
  OK(rfr_ctx_create(NULL, &ctx));
  for (int k = 0; k < 12; k++) {
    const int wanted = 1 + k % 3, swapped = k / 3 % 2; /* 1: the GEMM's weight is frozen, 2: the rows' weights are */
    const unsigned trained = (wanted & 1u ? 1u << W2 : 0) | (wanted & 2u ? 1u << BIAS1 : 0);
    const rfr_dtype type = k / 6 ? RFR_BF16 : RFR_F32;
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    rfr_value w[2] = {parameter(t, trained, W2, 2, 2 * C, C), parameter(t, trained, BIAS1, 1, T, 0)};
    rfr_value y = rfr_linear(t, rfr_cast(t, x, type), rfr_cast(t, w[0], type), RFR_NONE);
    y = rfr_swiglu_weighted(t, rfr_slice(t, y, 1, swapped * C, C), rfr_slice(t, y, 1, (1 - swapped) * C, C), w[1]);
    rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    const rfr_value loss = rfr_sum(t, rfr_mul(t, rfr_cast(t, y, RFR_F32), r), -1);
    for (int i = 0; i < 2; i++)
      if (wanted >> i & 1) rfr_output(t, i ? "weight" : "w2", rfr_gradient(t, loss, w[i], RFR_F32));
    OK(rfr_trace_finish(t));
    rfr_programs *p = run(ctx, t, 1), *q = run(ctx, t, 0);
    const rfr_trace *u = rfr_program_trace(p, 0, "fuse");
    const bool packed = !swapped && wanted & 1;
    assert_int_equal(rft_count_lowered(p, RFI_OP_swiglu_weighted_bwd_packed), packed);
    assert_int_equal(rft_count_lowered(p, RFI_OP_swiglu_weighted_bwd), !packed);
    for (int i = 0; i < u->n_ops; i++) {
      const rfi_opr *op = &u->ops[i];
      if (op->def->code != RFI_OP_swiglu_weighted_bwd_packed && op->def->code != RFI_OP_swiglu_weighted_bwd) continue;
      assert_int_equal(op->out[0] >= 0, wanted >> 1);
      for (int j = 1; j < op->n_out; j++) assert_int_equal(op->out[j] >= 0, wanted & 1 && !op->def->only_onto[j]);
    }
    for (int i = 0; i < 2; i++) {
      rfr_tensor a, b;
      if (!(wanted >> i & 1)) continue;
      OK(rfr_program_output(p, 0, i ? "weight" : "w2", &a));
      OK(rfr_program_output(q, 0, i ? "weight" : "w2", &b));
      assert_memory_equal(a.data, b.data, a.bytes);
    }
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* Experts with two GEMMs and row weights; the halves of the first result are gate and up. */
typedef struct experts {
  rfr_dtype type;
  bool swapped, biased, separate, shared; /* flags: up precedes gate; h has another reader */
  bool forward, itself;                   /* flags: no other readers; a column of gate weights the rows */
} experts;

enum { GROUPS = 3, WIDE = 12 };

static rfr_value expert_weight(rfr_trace *t, const char *name, int64_t rows, int64_t columns) {
  return rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 3, ((int64_t[]){GROUPS, rows, columns}));
}

static rfr_value expert_product(rfr_trace *t, const experts *e, rfr_value x, rfr_value w, rfr_value offsets,
                                rfr_value bias) {
  const rfr_type type = rfr_value_type(t, w);
  rfr_value each[GROUPS];
  w = rfr_cast(t, w, e->type);
  for (int g = 0; g < GROUPS && e->separate; g++) each[g] = rfr_reshape(t, rfr_slice(t, w, 0, g, 1), 2, type.shape + 1);
  return e->separate ? rfr_grouped_linear_separate(t, x, GROUPS, each, offsets, bias, RFR_NONE)
                     : rfr_grouped_linear(t, x, w, offsets, bias, RFR_NONE);
}

static rfr_trace *expert_layer(rfr_ctx *ctx, const experts *e) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value table = rfr_input(t, "table", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){T, C}));
  const rfr_value w1 = expert_weight(t, "up", 2 * WIDE, C), w2 = expert_weight(t, "down", C, WIDE);
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){GROUPS}));
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, T, NULL);
  rfr_value bias = RFR_NONE;
  if (e->biased) bias = rfr_input(t, "bias", RFR_ROLE_FROZEN, e->type, 2, ((int64_t[]){GROUPS, 2 * WIDE}));
  const rfr_value y = expert_product(t, e, rfr_cast(t, table, e->type), w1, offsets, bias);
  const rfr_value gate = rfr_slice(t, y, 1, e->swapped * WIDE, WIDE), up = rfr_slice(t, y, 1, !e->swapped * WIDE, WIDE);
  const rfr_value weight = rfr_input(t, "weight", RFR_ROLE_INPUT_GRAD, RFR_F32, 1, ((int64_t[]){T}));
  const rfr_value by =
      e->itself ? rfr_reshape(t, rfr_slice(t, y, 1, 0, 1), 1, ((int64_t[]){T})) : rfr_scale(t, weight, 0.5, RFR_NONE);
  const rfr_value h = rfr_swiglu_weighted(t, gate, up, by);
  const rfr_value z = rfr_cast(t, expert_product(t, e, h, w2, offsets, RFR_NONE), RFR_F32);
  rfr_output(t, "z", z);
  if (!e->forward) {
    const rfr_value r = rfr_input(t, "r", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
    rfr_value loss = rfr_sum(t, rfr_mul(t, z, r), -1);
    if (e->shared) loss = rfr_add(t, loss, rfr_sum(t, rfr_cast(t, rfr_mul(t, h, h), RFR_F32), -1));
    rfr_output(t, "dtable", rfr_gradient(t, loss, table, RFR_F32));
    rfr_output(t, "dup", rfr_gradient(t, loss, w1, RFR_F32));
    rfr_output(t, "ddown", rfr_gradient(t, loss, w2, RFR_F32));
    rfr_output(t, "dweight", rfr_gradient(t, loss, weight, RFR_F32));
  }
  OK(rfr_trace_finish(t));
  return t;
}

static void test_experts(void **state) {
  (void)state;
  static const char *const outputs[] = {"z", "dtable", "dup", "ddown", "dweight"};
  rfr_ctx *ctx;
  OK(rfr_ctx_create(NULL, &ctx));
  for (int k = 0; k < 66; k++) {
    const experts e = {.type = k % 2 ? RFR_BF16 : RFR_F32,
                       .swapped = k / 2 % 2,
                       .biased = k / 4 % 2,
                       .separate = k / 8 % 2,
                       .shared = k / 16 % 2,
                       .forward = k / 32,
                       .itself = k / 64};
    rfr_trace *t = expert_layer(ctx, &e);
    rfr_programs *p = run(ctx, t, 1), *q = run(ctx, t, 0);
    const bool one = !e.swapped && !e.separate;
    const bool forward = one && !e.biased && !e.itself;
    assert_int_equal(rft_count_lowered(p, RFI_OP_grouped_swiglu), forward);
    assert_int_equal(rft_count_lowered(p, RFI_OP_swiglu_weighted), !forward);
    assert_int_equal(rft_count_lowered(q, RFI_OP_grouped_swiglu), 0);
    for (int i = 0; i < (e.forward ? 1 : 5); i++)
      if (!rft_same_output(p, q, outputs[i])) fail_msg("case %d: %s has other bits", k, outputs[i]);
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* Tensor cores take operands of one type, so GEMMs of the backward have such operands even if a result of the forward
 * is wider. */
static void check_operands(const rfr_programs *p) {
  const rfr_trace *t = rfr_program_trace(p, 0, "lower");
  for (int i = 0; i < t->n_ops; i++) {
    const rfr_value *in = t->ops[i].in;
    if (t->ops[i].def->code == RFI_OP_matmul)
      assert_int_equal(t->values[in[0]].type.dtype, t->values[in[1]].type.dtype);
  }
}

static void test_softcapped_head(void **state) {
  (void)state;
  static const unsigned subsets[] = {1u << TABLE | 1u << W2, 1u << TABLE, 1u << W2, 0};
  static const char *const outputs[] = {"loss", "table", "w2"};
  rfr_ctx *ctx;
  OK(rfr_ctx_create(NULL, &ctx));
  for (int k = 0; k < 32; k++) {
    const bool shown = k / 4 % 2, per_row = k >= 16;
    const rfr_dtype type = k % 16 < 8 ? RFR_F32 : RFR_BF16;
    rfr_trace *t = capped_head(ctx, subsets[k % 4], type, shown, per_row);
    rfr_programs *p = run(ctx, t, 1), *q = run(ctx, t, 0);
    check_operands(q);
    assert_int_equal(rft_count_lowered(p, RFI_OP_linear_cross_entropy), !shown && !per_row);
    assert_int_equal(rft_count_lowered(p, RFI_OP_linear_token_loss), !shown && per_row ? 1 + (subsets[k % 4] != 0) : 0);
    assert_int_equal(rft_count_lowered(p, RFI_OP_softcap), shown);
    assert_int_equal(rft_count_lowered(p, RFI_OP_softcap_bwd), shown && subsets[k % 4]);
    for (int i = 0; i < 3; i++) {
      rfr_tensor a, b;
      if (rfr_program_output(p, 0, outputs[i], &a) != RFR_OK) continue;
      OK(rfr_program_output(q, 0, outputs[i], &b));
      for (int64_t n = 0; n < rfi_count(&a.type); n++)
        assert_float_equal(((float *)a.data)[n], ((float *)b.data)[n], type == RFR_F32 ? 1e-6 : 1e-4);
    }
    rfr_programs_destroy(p);
    rfr_programs_destroy(q);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

/* A head is fused even if its weight gradient is accumulated into a narrow state; the sum is rounded once. */
static void test_head_accumulates(void **state) {
  (void)state;
  enum { V = 11 };
  rfr_ctx *ctx;
  float wide[V * C];
  OK(rfr_ctx_create(NULL, &ctx));
  for (int narrow = 0; narrow < 2; narrow++) {
    rfr_trace *t;
    rfr_tensor x;
    OK(rfr_trace_create(ctx, &t));
    const rfr_value h = rfr_input(t, "h", RFR_ROLE_INPUT, RFR_BF16, 2, ((int64_t[]){T, C}));
    const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_BF16, 2, ((int64_t[]){V, C}));
    const rfr_value sum = rfr_input(t, "sum", RFR_ROLE_STATE, narrow ? RFR_BF16 : RFR_F32, 2, ((int64_t[]){V, C}));
    const rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){T}));
    const rfr_value logits = rfr_matmul(t, h, w, RFR_NONE, 0, 1, RFR_F32);
    const rfr_value loss = rfr_cross_entropy(t, logits, ids, rfr_token_count(t, 1, &ids, 3, NULL), 3);
    rfr_output(t, "loss", loss);
    rfr_output(t, "dw", rfr_gradient_onto(t, loss, w, sum));
    OK(rfr_trace_finish(t));
    const rfr_trace *const traces[] = {t};
    rfr_programs *p;
    OK(rfr_compile(ctx, 1, traces, NULL, NULL, &p));
    assert_int_equal(rft_count_lowered(p, RFI_OP_linear_cross_entropy), 1);
    for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
      for (int64_t k = 0; k < rfi_count(&x.type); k++) {
        if (x.type.dtype == RFR_I32) ((int32_t *)x.data)[k] = (int32_t)(k * 7 % V);
        else if (strcmp(x.name, "sum") != 0)
          ((uint16_t *)x.data)[k] = (uint16_t)rfr_float_to_bits(RFR_BF16, (float)(k * 37 % 101 - 50) / 50);
      }
    OK(rfr_program_run(p, 0));
    OK(rfr_programs_tensor(p, "sum", &x));
    if (!narrow) memcpy(wide, x.data, sizeof wide);
    for (int k = 0; k < V * C && narrow; k++)
      assert_int_equal(((uint16_t *)x.data)[k], rfr_float_to_bits(RFR_BF16, wide[k]));
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_exact),
                                     cmocka_unit_test(test_sum_over_rows),
                                     cmocka_unit_test(test_gate_and_up),
                                     cmocka_unit_test(test_softcapped_head),
                                     cmocka_unit_test(test_head_accumulates),
                                     cmocka_unit_test(test_weighted_gate_and_up),
                                     cmocka_unit_test(test_experts)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
