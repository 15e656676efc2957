/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs against one GEMM per group, bit for bit, for every instruction set and number of threads, and for any
 * values in the rows outside all groups. Then the values that a gradient keeps alive: for all 16 sets of requested
 * gradients, packed and separate, the ops that remain and the bytes that they read. Refusals name the mismatch.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "pass/pass.h"
#include "support/context.h"
#include "support/random.h"
#include "support/rewrite.h"

/* ---- bitwise equality ---- */

enum { GIVEN = 4 };

static uint64_t random_state = 1;
static float next_float(void) { return (float)rft_uniform(&random_state); }

/* rows x cols with row stride `stride`; also elements between the rows are finite. */
static rfi_arg matrix(int64_t rows, int64_t cols, int64_t stride) {
  rfi_arg a = {calloc((size_t)(rows * stride) + 1, sizeof(float)),
               {.dtype = RFR_F32, .rank = 2, .shape = {rows, cols}},
               {stride, 1}};
  assert_non_null(a.data);
  for (int64_t i = 0; i < rows * stride; i++) ((float *)a.data)[i] = next_float();
  return a;
}
static rfi_arg groups_of(const rfi_arg *a, int64_t groups) {
  const int64_t rows = a->type.shape[0] / groups, cols = a->type.shape[1];
  return (rfi_arg){a->data, {.dtype = RFR_F32, .rank = 3, .shape = {groups, rows, cols}}, {rows * cols, cols, 1}};
}
static rfi_arg rows_of(const rfi_arg *a, int64_t first, int64_t n) {
  rfi_arg part = *a;
  part.data = (float *)a->data + first * a->stride[0];
  part.type.shape[0] = n;
  return part;
}

static void run(const char *isa, rfi_opcode code, int n_in, const rfi_arg *in, const rfi_arg *out, const rfi_attr *attr,
                int threads) {
  const rfi_kernel *kernel = rfi_cpu_kernel(isa, code);
  rfi_call call = {.n_in = n_in, .n_out = 1, .in = in, .out = out, .attr = attr, .microbatch = -1, .threads = threads};
  const size_t bytes = kernel->workspace ? kernel->workspace(&call) : 0;
  call.workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
  assert_non_null(call.workspace);
  memset(call.workspace, 0xFF, bytes);
  assert_int_equal(kernel->run(&call), RFR_OK);
  free(call.workspace);
}

typedef struct shape {
  int64_t N, K;
  int groups, rows, splits[GIVEN]; /* for more groups than GIVEN: random splits, a third of them empty */
} shape;

static const shape shapes[] = {
    {24, 8, 3, 40, {13, 0, 20}},
    {100, 127, 4, 301, {64, 65, 0, 161}},
    {127, 24, 1, 77, {70}},
    {8, 1000, 2, 9, {1, 8}},
    {1000, 100, 3, 600, {5, 590, 5}},
    {128, 96, 3, 320, {64, 96, 80}},
    {256, 256, 4, 256, {0}},
    /* any number of groups */
    {24, 40, 64, 300, {0}},
    {24, 40, 65, 300, {0}},
    {17, 9, 256, 700, {0}},
    {8, 24, 1000, 1500, {0}},
};
/* Whether a case is too slow to run with every instruction set and number of threads. */
static const shape large[] = {
    {128, 512, 1, 127, {127}},
    {128, 512, 8, 15, {0}},
    {128, 512, 8, 1027, {0}},
    {128, 512, 16, 10027, {0}},
    {3072, 768, 3, 2048, {1000, 0, 1048}},
    {3072, 768, 6, 4096, {0}},
};

/* at[g] is the first row of group g. */
static void splits_of(const shape *s, int32_t *at) {
  at[0] = 0;
  for (int g = 0; g < s->groups; g++) {
    int n = s->groups > GIVEN ? (int)((1 + next_float()) * (float)s->rows / (float)s->groups) : s->splits[g];
    if (s->groups > GIVEN && next_float() < -0.33f) n = 0;
    at[g + 1] = at[g] + (n < s->rows - at[g] ? n : s->rows - at[g]);
  }
}

/* Forward, dgrad, wgrad and bgrad: computes each group separately, and all groups in one call. */
static void check(const char *isa, const shape *s, int threads) {
  const int64_t N = s->N, K = s->K, G = s->groups, R = s->rows;
  int32_t *at = malloc((size_t)(G + 1) * sizeof *at);
  rfi_arg *separate = malloc((size_t)(G + 5) * sizeof *separate);
  assert_true(at && separate);
  splits_of(s, at);
  const rfi_arg offsets = {at, {.dtype = RFR_I32, .rank = 1, .shape = {G + 1}}, {1}}, none = {.type = {.rank = -1}};
  /* x is a view at an odd row of a wider matrix */
  rfi_arg full = matrix(R + 1, K + 3, K + 3), x = rows_of(&full, 1, R);
  x.type.shape[1] = K;
  rfi_arg w = matrix(G * N, K, K), bias = matrix(G, N, N), dy = matrix(R, N, N);
  rfi_arg y[2] = {matrix(R, N, N), matrix(R, N, N)}, dx[2] = {matrix(R, K, K), matrix(R, K, K)};
  rfi_arg dw[2] = {matrix(G * N, K, K), matrix(G * N, K, K)}, db[2] = {matrix(G, N, N), matrix(G, N, N)};
  memcpy(dw[1].data, dw[0].data, (size_t)(G * N * K) * 4); /* both accumulate into these values */
  memset((float *)dy.data + at[G] * N, 0xFF, (size_t)((R - at[G]) * N) * 4);
  for (int64_t r = at[G]; r < R; r++) memset((float *)x.data + r * x.stride[0], 0xFF, (size_t)K * 4);
  const rfi_arg w3 = groups_of(&w, G), dw3 = groups_of(&dw[0], G);
  const rfi_attr tn[2] = {rfi_i(1), rfi_i(RFR_F32)}, nn[2] = {rfi_i(0), rfi_i(RFR_F32)}, to = rfi_i(RFR_F32);
  const rfi_attr wgrad[2] = {rfi_i(RFR_F32), rfi_i(G)};
  run(isa, RFI_OP_grouped_matmul, 4, (rfi_arg[]){x, w3, offsets, bias}, &y[0], tn, threads);
  run(isa, RFI_OP_grouped_matmul, 3, (rfi_arg[]){dy, w3, offsets}, &dx[0], nn, threads);
  run(isa, RFI_OP_grouped_wgrad, 4, (rfi_arg[]){dy, x, offsets, dw3}, &dw3, wgrad, threads);
  run(isa, RFI_OP_grouped_dbias, 2, (rfi_arg[]){dy, offsets}, &db[0], &to, threads);
  memcpy(separate, (rfi_arg[]){x, none, offsets, bias, none}, 5 * sizeof *separate);
  for (int g = 0; g < G; g++) {
    const int64_t n = at[g + 1] - at[g];
    const rfi_arg xg = rows_of(&x, at[g], n), dyg = rows_of(&dy, at[g], n), wg = rows_of(&w, g * N, N);
    const rfi_arg yg = rows_of(&y[1], at[g], n), dxg = rows_of(&dx[1], at[g], n), dwg = rows_of(&dw[1], g * N, N);
    rfi_arg bg = rows_of(&bias, g, 1), dbg = rows_of(&db[1], g, 1);
    bg.type = dbg.type = (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {N}};
    bg.stride[0] = dbg.stride[0] = 1;
    const rfi_attr f[3] = {rfi_i(0), rfi_i(1), rfi_i(RFR_F32)}, d[3] = {rfi_i(0), rfi_i(0), rfi_i(RFR_F32)};
    const rfi_attr v[3] = {rfi_i(1), rfi_i(0), rfi_i(RFR_F32)}, rows[2] = {rfi_i(0), rfi_i(RFR_F32)};
    separate[5 + g] = wg;
    run(isa, RFI_OP_matmul, 4, (rfi_arg[]){xg, wg, bg, none}, &yg, f, 1);
    run(isa, RFI_OP_matmul, 2, (rfi_arg[]){dyg, wg}, &dxg, d, 1);
    run(isa, RFI_OP_matmul, 4, (rfi_arg[]){dyg, xg, none, dwg}, &dwg, v, 1);
    run(isa, RFI_OP_sum, 2, (rfi_arg[]){dyg, none}, &dbg, rows, 1);
  }
  memset((float *)y[1].data + at[G] * N, 0, (size_t)((R - at[G]) * N) * 4);
  memset((float *)dx[1].data + at[G] * K, 0, (size_t)((R - at[G]) * K) * 4);
  assert_memory_equal(y[0].data, y[1].data, (size_t)(R * N) * 4);
  assert_memory_equal(dx[0].data, dx[1].data, (size_t)(R * K) * 4);
  assert_memory_equal(dw[0].data, dw[1].data, (size_t)(G * N * K) * 4);
  assert_memory_equal(db[0].data, db[1].data, (size_t)(G * N) * 4);
  memset(y[1].data, 0xFF, (size_t)(R * N) * 4);
  run(isa, RFI_OP_grouped_matmul, 5 + s->groups, separate, &y[1], tn, threads);
  assert_memory_equal(y[0].data, y[1].data, (size_t)(R * N) * 4);
  rfi_arg *const all[] = {&full, &w, &bias, &dy, &y[0], &y[1], &dx[0], &dx[1], &dw[0], &dw[1], &db[0], &db[1]};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
  free(separate);
  free(at);
}

static bool runs(const char *isa) {
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *has;
  o.isa = isa;
  const bool there = rfr_ctx_create(&o, &has) == RFR_OK;
  rfr_ctx_destroy(there ? has : NULL);
  return there;
}

static void equals_separate_gemms(void **state) {
  static const char *const isas[] = {"v4", "v3", "v2"};
  (void)state;
  bool first = true;
  for (int i = 0; i < 3; i++) {
    if (!runs(isas[i])) continue;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
      for (int threads = 1; threads <= 3; threads++) check(isas[i], &shapes[k], threads);
    for (size_t k = 0; first && k < sizeof large / sizeof *large; k++) check(isas[i], &large[k], 2);
    first = false;
  }
}

/* All pairs of widths, of which at most one is a multiple of the kernels' tile. */
static void equals_in_every_width(void **state) {
  static const char *const isas[] = {"v4", "v3", "v2"};
  static const int64_t widths[] = {8, 24, 100, 127, 1000};
  (void)state;
  for (int i = 0; i < 3; i++)
    for (int n = 0; n < 5; n++)
      for (int k = 0; k < 5 && runs(isas[i]); k++)
        check(isas[i], &(shape){widths[n], widths[k], 3, 23, {9, 0, 11}}, 1 + (n + k) % 3);
}

/* ---- saved activations ---- */

enum { X_WANTED = 1, W_WANTED = 2, BIAS_WANTED = 4, SCALE_WANTED = 8 };
enum { ROWS = 12, GROUPS = 3, IN = 5, OUT = 7 };

/* Bytes of the forward's float operands that backward ops read, each operand counted once. */
static int64_t kept(const rfr_trace *t) {
  int64_t bytes = 0;
  for (int v = 0; v < t->n_values; v++) {
    bool read = false;
    for (int i = 0; i < t->n_ops; i++)
      for (int k = 0; k < t->ops[i].n_in && t->ops[i].phase != RFR_PHASE_FORWARD; k++)
        read |= t->ops[i].in[k] == v && strncmp(t->ops[i].def->name, "grouped", 7) == 0;
    const int op = t->values[v].op;
    const bool forward = op < 0 || (t->ops[op].phase == RFR_PHASE_FORWARD && t->ops[op].def->code == RFI_OP_silu);
    if (read && forward && t->values[v].type.dtype == RFR_F32) bytes += rfi_bytes(&t->values[v].type);
  }
  return bytes;
}

/* If only one of GROUPS weights needs a gradient, only the rows of its group are read. */
static void leaves_frozen_groups_alone(void **state) {
  (void)state;
  for (int wanted = 0; wanted < 1 << GROUPS; wanted++) {
    rfr_trace *t, *joint, *live;
    rfi_report report = {.text = {.ctx = ctx}};
    const rfi_pass_options options = {.prune = true};
    rfr_value w[GROUPS];
    OK(rfr_trace_create(ctx, &t));
    const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){ROWS, IN});
    for (int g = 0; g < GROUPS; g++) {
      const char name[] = {'w', (char)('0' + g), 0};
      w[g] =
          rfr_input(t, name, wanted >> g & 1 ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN, RFR_F32, 2, (int64_t[]){OUT, IN});
    }
    const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, (int64_t[]){GROUPS});
    const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
    const rfr_value y = rfr_grouped_linear_separate(t, x, GROUPS, w, offsets, RFR_NONE, RFR_NONE);
    const rfr_value loss = rfr_sum(t, rfr_mul(t, y, y), -1);
    rfr_output(t, "loss", loss);
    static const char *const names[] = {"d0", "d1", "d2"};
    for (int g = 0; g < GROUPS; g++)
      if (wanted >> g & 1) rfr_output(t, names[g], rfr_gradient(t, loss, w[g], RFR_F32));
    OK(rfr_trace_finish(t));
    OK(rfi_pass_autodiff(t, &options, &report, &joint));
    OK(rfi_pass_prune(joint, &options, &report, &live));
    int64_t made = 0;
    for (int i = 0; i < live->n_ops; i++) {
      if (live->ops[i].def->code != RFI_OP_grouped_wgrad) continue;
      made += live->values[live->ops[i].out[0]].type.shape[0];
      assert_int_equal(live->ops[i].attr[1].i, GROUPS); /* the choice of kernels depends on it, as for packed weights */
    }
    assert_int_equal(made, __builtin_popcount((unsigned)wanted));
    rfi_string_deinit(&report.text);
    rfr_trace_destroy(live);
    rfr_trace_destroy(joint);
    rfr_trace_destroy(t);
  }
}

/* Packed and separate weights have bitwise equal gradients; gradients that no weight needs are not computed. */
static rfr_programs *compile(bool packed) {
  rfr_trace *t;
  rfr_value w[GROUPS];
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, (int64_t[]){ROWS, IN});
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, (int64_t[]){GROUPS});
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
  if (packed) {
    w[0] = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 3, (int64_t[]){GROUPS, OUT, IN});
  } else {
    for (int g = 0; g < GROUPS; g++) {
      const char name[] = {'w', (char)('0' + g), 0};
      w[g] = rfr_input(t, name, g == 1 ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32, 2, (int64_t[]){OUT, IN});
    }
  }
  const rfr_value y = packed ? rfr_grouped_linear(t, x, w[0], offsets, RFR_NONE, RFR_NONE)
                             : rfr_grouped_linear_separate(t, x, GROUPS, w, offsets, RFR_NONE, RFR_NONE);
  const rfr_value loss = rfr_sum(t, rfr_mul(t, y, y), -1);
  rfr_output(t, "y", y);
  rfr_output(t, "dx", rfr_gradient(t, loss, x, RFR_F32));
  rfr_output(t, packed ? "dw" : "d0", rfr_gradient(t, loss, w[0], RFR_F32));
  if (!packed) rfr_output(t, "d2", rfr_gradient(t, loss, w[2], RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rfr_trace_destroy(t);
  return p;
}

static void packed_equals_separate(void **state) {
  (void)state;
  rfr_programs *p[2] = {compile(true), compile(false)};
  rfr_tensor a, b;
  rft_fill_inputs(p[0]);
  OK(rfr_programs_tensor(p[0], "x", &a));
  OK(rfr_programs_tensor(p[1], "x", &b));
  memcpy(b.data, a.data, (size_t)a.bytes);
  OK(rfr_programs_tensor(p[0], "w", &a));
  for (int g = 0; g < GROUPS; g++) {
    OK(rfr_programs_tensor(p[1], (const char *[]){"w0", "w1", "w2"}[g], &b));
    memcpy(b.data, (float *)a.data + g * OUT * IN, (size_t)b.bytes);
  }
  for (int i = 0; i < 2; i++) {
    OK(rfr_programs_tensor(p[i], "splits", &a));
    memcpy(a.data, (int64_t[]){5, 4, 2}, sizeof(int64_t[GROUPS]));
    OK(rfr_programs_load(p[i]));
    OK(rfr_program_run(p[i], 0));
  }
  static const struct {
    const char *packed, *separate;
    int64_t at;
  } same[] = {{"y", "y", 0}, {"dx", "dx", 0}, {"dw", "d0", 0}, {"dw", "d2", 2 * OUT * IN}};
  for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
    OK(rfr_program_output(p[0], 0, same[i].packed, &a));
    OK(rfr_program_output(p[1], 0, same[i].separate, &b));
    assert_memory_equal((float *)a.data + same[i].at, b.data, (size_t)b.bytes);
  }
  for (int i = 0; i < 2; i++) rfr_programs_destroy(p[i]);
}

/* Three microbatches. Of separate weights, all or all except the second need gradients. */
static rfr_programs *accumulating(bool packed, int wanted) {
  enum { MICROBATCHES = 3 };
  static const char *const names[] = {"w0", "w1", "w2"}, *const gradients[] = {"d0", "d1", "d2"};
  rfr_trace *t;
  rfr_value w[GROUPS], y[MICROBATCHES], loss = RFR_NONE;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){MICROBATCHES * ROWS, IN});
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, (int64_t[]){GROUPS});
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
  if (packed) w[0] = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 3, (int64_t[]){GROUPS, OUT, IN});
  for (int g = 0; g < GROUPS && !packed; g++)
    w[g] = rfr_input(t, names[g], wanted >> g & 1 ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN, RFR_F32, 2,
                     (int64_t[]){OUT, IN});
  for (int m = 0; m < MICROBATCHES; m++) {
    rfr_microbatch(t, m);
    const rfr_value part = rfr_slice(t, x, 0, m * ROWS, ROWS);
    y[m] = packed ? rfr_grouped_linear(t, part, w[0], offsets, RFR_NONE, RFR_NONE)
                  : rfr_grouped_linear_separate(t, part, GROUPS, w, offsets, RFR_NONE, RFR_NONE);
    const rfr_value one = rfr_sum(t, rfr_mul(t, y[m], y[m]), -1);
    loss = m == 0 ? one : rfr_add(t, loss, one);
  }
  rfr_microbatch(t, -1);
  if (packed) rfr_output(t, "dw", rfr_gradient(t, loss, w[0], RFR_F32));
  for (int g = 0; g < GROUPS && !packed; g++)
    if (wanted >> g & 1) rfr_output(t, gradients[g], rfr_gradient(t, loss, w[g], RFR_F32));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, NULL);
  rfr_trace_destroy(t);
  return p;
}

/* Gradients of later microbatches are accumulated inside the GEMM, for packed and separate weights. */
static void accumulates_in_gemm(void **state) {
  (void)state;
  static const char *const names[] = {"w0", "w1", "w2"}, *const gradients[] = {"d0", "d1", "d2"};
  rfr_programs *full = accumulating(true, 0);
  rfr_tensor a, b;
  rft_fill_inputs(full);
  OK(rfr_programs_tensor(full, "splits", &a));
  memcpy(a.data, (int64_t[]){5, 4, 2}, sizeof(int64_t[GROUPS]));
  OK(rfr_programs_load(full));
  OK(rfr_program_run(full, 0));
  for (int wanted = 1; wanted < 1 << GROUPS; wanted++) {
    rfr_programs *p = accumulating(false, wanted);
    const rfr_trace *t = rfr_program_trace(p, 0, "lower");
    assert_int_equal(rft_count_ops(t, RFI_OP_add, RFR_PHASE_WGRAD), 0);
    int storages = 0;
    for (rfr_value v = 0; v < t->n_values; v++)
      storages += t->values[v].base == v && t->values[v].op >= 0 && t->values[v].type.rank == 3;
    assert_int_equal(storages, wanted == 5 ? 2 : 1); /* one per sequence of adjacent weights */
    for (int i = 0; i < 2; i++) {
      OK(rfr_programs_tensor(full, i ? "splits" : "x", &a));
      OK(rfr_programs_tensor(p, i ? "splits" : "x", &b));
      memcpy(b.data, a.data, (size_t)a.bytes);
    }
    OK(rfr_programs_tensor(full, "w", &a));
    for (int g = 0; g < GROUPS; g++) {
      OK(rfr_programs_tensor(p, names[g], &b));
      memcpy(b.data, (float *)a.data + g * OUT * IN, (size_t)b.bytes);
    }
    OK(rfr_programs_load(p));
    OK(rfr_program_run(p, 0));
    OK(rfr_program_output(full, 0, "dw", &a));
    for (int g = 0; g < GROUPS; g++) {
      if (!(wanted >> g & 1)) continue;
      OK(rfr_program_output(p, 0, gradients[g], &b));
      assert_memory_equal((float *)a.data + g * OUT * IN, b.data, (size_t)b.bytes);
    }
    rfr_programs_destroy(p);
  }
  rfr_programs_destroy(full);
}

/* Any number of separate weights, each with its gradient. */
static void any_number_of_weights(void **state) {
  (void)state;
  static const int counts[] = {1, 64, 65, 1000};
  for (int i = 0; i < 4; i++) {
    enum { MOST_GROUPS = 1000 };
    const int groups = counts[i];
    static rfr_value w[MOST_GROUPS];
    char name[16];
    rfr_trace *t;
    rfr_tensor x;
    OK(rfr_trace_create(ctx, &t));
    const rfr_value in = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){2 * groups, 1});
    const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, (int64_t[]){groups});
    const rfr_value offsets = rfr_splits_to_offsets(t, splits, 2 * groups, NULL);
    for (int g = 0; g < groups; g++) {
      snprintf(name, sizeof name, "w%d", g);
      w[g] = rfr_input(t, name, RFR_ROLE_TRAINABLE, RFR_F32, 2, (int64_t[]){1, 1});
    }
    const rfr_value loss = rfr_sum(t, rfr_grouped_linear_separate(t, in, groups, w, offsets, RFR_NONE, RFR_NONE), -1);
    for (int g = 0; g < groups; g++) {
      snprintf(name, sizeof name, "d%d", g);
      rfr_output(t, name, rfr_gradient(t, loss, w[g], RFR_F32));
    }
    OK(rfr_trace_finish(t));
    rfr_programs *p = rft_compile(t, NULL);
    rft_fill_inputs(p);
    OK(rfr_programs_tensor(p, "splits", &x));
    for (int g = 0; g < groups; g++) ((int64_t *)x.data)[g] = g % 3; /* the rows of group g: g % 3 */
    OK(rfr_programs_load(p));
    OK(rfr_program_run(p, 0));
    OK(rfr_programs_tensor(p, "x", &x));
    const float *row = x.data;
    for (int g = 0; g < groups; g++) {
      rfr_tensor d;
      float sum = 0;
      snprintf(name, sizeof name, "d%d", g);
      OK(rfr_program_output(p, 0, name, &d));
      for (int k = 0; k < g % 3; k++) sum += *row++;
      assert_true(*(float *)d.data == sum);
    }
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
}

/* A forward whose x and scale are computed values, so that they must be saved. */
static rfr_value forward(rfr_trace *t, bool separate, int wanted, rfr_value in[4], rfr_value w[GROUPS]) {
  const rfr_role weight = wanted & W_WANTED ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN;
  const rfr_role bias = wanted & BIAS_WANTED ? RFR_ROLE_TRAINABLE : RFR_ROLE_FROZEN;
  const rfr_role x = wanted & X_WANTED ? RFR_ROLE_INPUT_GRAD : RFR_ROLE_INPUT;
  const rfr_role scale = wanted & SCALE_WANTED ? RFR_ROLE_INPUT_GRAD : RFR_ROLE_INPUT;
  in[0] = rfr_input(t, "x", x, RFR_F32, 2, (int64_t[]){ROWS, IN});
  for (int g = 0; g < (separate ? GROUPS : 1); g++)
    w[g] = rfr_input(t, (const char *[]){"w0", "w1", "w2"}[g], weight, RFR_F32, separate ? 2 : 3,
                     (int64_t[]){GROUPS, OUT, IN} + separate);
  in[1] = w[0];
  in[2] = rfr_input(t, "bias", bias, RFR_F32, 2, (int64_t[]){GROUPS, OUT});
  in[3] = rfr_input(t, "scale", scale, RFR_F32, 1, (int64_t[]){ROWS});
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I64, 1, (int64_t[]){GROUPS});
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
  const rfr_value silu = rfr_silu(t, in[0]), by = rfr_silu(t, in[3]);
  return separate ? rfr_grouped_linear_separate(t, silu, GROUPS, w, offsets, in[2], by)
                  : rfr_grouped_linear(t, silu, w[0], offsets, in[2], by);
}

/* For one set of needed gradients: checks the ops that remain, and the bytes of the forward that they read. */
static void keeps(bool separate, int wanted) {
  static const char *const names[4] = {"dx", "dw", "dbias", "dscale"}, *const others[] = {"", "dw1", "dw2"};
  rfr_trace *t, *joint, *live;
  rfi_report report = {.text = {.ctx = ctx}};
  const rfi_pass_options options = {.prune = true};
  rfr_value in[4], w[GROUPS];
  OK(rfr_trace_create(ctx, &t));
  const rfr_value loss = rfr_sum(t, forward(t, separate, wanted, in, w), -1);
  rfr_output(t, "loss", loss);
  for (int i = 0; i < 4; i++)
    if (wanted >> i & 1) rfr_output(t, names[i], rfr_gradient(t, loss, in[i], RFR_F32));
  for (int g = 1; g < GROUPS && separate && wanted & W_WANTED; g++)
    rfr_output(t, others[g], rfr_gradient(t, loss, w[g], RFR_F32));
  OK(rfr_trace_finish(t));
  OK(rfi_pass_autodiff(t, &options, &report, &joint));
  OK(rfi_pass_prune(joint, &options, &report, &live));
  assert_int_equal(rft_count_ops(live, RFI_OP_grouped_matmul, RFR_PHASE_FORWARD), 1);
  assert_int_equal(rft_count_ops(live, RFI_OP_grouped_matmul, RFR_PHASE_DGRAD), wanted & X_WANTED ? 1 : 0);
  assert_int_equal(rft_count_ops(live, RFI_OP_grouped_wgrad, RFR_PHASE_WGRAD), wanted & W_WANTED ? 1 : 0);
  assert_int_equal(rft_count_ops(live, RFI_OP_grouped_dbias, RFR_PHASE_WGRAD), wanted & BIAS_WANTED ? 1 : 0);
  assert_int_equal(rft_count_ops(live, RFI_OP_grouped_dscale, RFR_PHASE_DGRAD), wanted & SCALE_WANTED ? 1 : 0);
  assert_int_equal(kept(live), 4 * ((wanted & X_WANTED ? GROUPS * OUT * IN : 0) + (wanted & W_WANTED ? ROWS * IN : 0) +
                                    (wanted & BIAS_WANTED ? ROWS : 0) + (wanted & SCALE_WANTED ? GROUPS * OUT : 0)));
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(live);
  rfr_trace_destroy(joint);
  rfr_trace_destroy(t);
}

static void keeps_requested(void **state) {
  (void)state;
  for (int wanted = 0; wanted < 16; wanted++)
    for (int separate = 0; separate < 2; separate++) keeps(separate, wanted);
}

/* ---- refusals ---- */

static void refuses(void **state) {
  (void)state;
  static const char *const texts[] = {"not i32 or i64",    "w has 3 groups",    "inner dimensions differ",
                                      "bias is f32[3,8]",  "without a bias",    "scale is f32[11]",
                                      "x is i32, not f32", "rows is 2147483648"};
  for (int k = 0; k < 8; k++) {
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    const rfr_value splits =
        rfr_input(t, "splits", RFR_ROLE_INPUT, k == 0 ? RFR_F32 : RFR_I32, 1, (int64_t[]){k == 1 ? 4 : 3});
    const rfr_value x =
        rfr_input(t, "x", RFR_ROLE_INPUT, k == 6 ? RFR_I32 : RFR_F32, 2, (int64_t[]){12, k == 2 ? 6 : 5});
    const rfr_value w = rfr_input(t, "w", RFR_ROLE_INPUT, RFR_F32, 3, (int64_t[]){3, 7, 5});
    const rfr_value bias = rfr_input(t, "bias", RFR_ROLE_INPUT, RFR_F32, 2, (int64_t[]){3, k == 3 ? 8 : 7});
    const rfr_value scale = rfr_input(t, "scale", RFR_ROLE_INPUT, RFR_F32, 1, (int64_t[]){k == 5 ? 11 : 12});
    const rfr_value offsets = rfr_splits_to_offsets(t, splits, k == 7 ? (int64_t)INT32_MAX + 1 : 12, NULL);
    assert_int_equal(rfr_grouped_linear(t, x, w, offsets, k == 4 ? RFR_NONE : bias, scale), RFR_NONE);
    assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
    assert_non_null(strstr(rfr_last_error()->message, texts[k]));
    assert_non_null(strstr(rfr_last_error()->message, "grouped_test.c"));
    rfr_trace_destroy(t);
  }
}

/* Kernels count rows in 32 bits and round them up to tiles of 64; larger counts are refused on any device. */
static void counts_rows_in_32_bits(void **state) {
  (void)state;
  const int64_t most = ((int64_t)1 << 31) - 64;
  for (int k = 0; k < 5; k++) { /* 0: the maximum number */
    rfr_trace *t;
    OK(rfr_trace_create(ctx, &t));
    const int64_t rows = k < 3 ? most + (k > 0) : 12, N = k == 3 ? most + 1 : 8, K = k == 4 ? most + 1 : 8;
    const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){3});
    const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_BF16, 2, (int64_t[]){rows, K});
    const rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_BF16, 3, (int64_t[]){3, N, K});
    const rfr_value offsets = rfr_splits_to_offsets(t, splits, k == 1 ? rows : 12, NULL);
    const rfr_value y = rfr_grouped_linear(t, x, w, offsets, RFR_NONE, RFR_NONE);
    if (k == 0) rfr_output(t, "dw", rfr_gradient(t, rfr_sum(t, rfr_cast(t, y, RFR_F32), -1), w, RFR_F32));
    assert_int_equal(rfr_trace_finish(t), k == 0 ? RFR_OK : RFR_INVALID);
    if (k > 0) {
      assert_non_null(strstr(rfr_last_error()->message, "2147483584"));
      assert_non_null(
          strstr(rfr_last_error()->message, k == 1 ? "rows is 2147483585" : "has 2147483585 rows or columns"));
    }
    rfr_trace_destroy(t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(equals_separate_gemms),  cmocka_unit_test(equals_in_every_width),
      rft_context_test(keeps_requested),        rft_context_test(leaves_frozen_groups_alone),
      rft_context_test(packed_equals_separate), rft_context_test(accumulates_in_gemm),
      rft_context_test(any_number_of_weights),  rft_context_test(refuses),
      rft_context_test(counts_rows_in_32_bits)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
