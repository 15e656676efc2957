/* SPDX-License-Identifier: Apache-2.0
 *
 * Which kernel runs the GEMMs of a grouped linear (forward, dgrad, wgrad), by types, layout, alignment, packed or
 * separate weights and bias: a table, for this CPU and for a simulated H200. The plan reports why a call cannot use the
 * faster kernel. Types of future quantization recipes are refused by name.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/library.h"
#include "exec/exec.h"
#include "support/context.h"

enum { ROWS = 64, MOST_GROUPS = 3073 };
typedef enum bias { NO_BIAS, BIAS, SCALED_BF16, SCALED_F32 } bias;

#define SM90 "sm90", "sm90", "sm90"
#define PANELS "panels", "panels", "panels"
#define ALL(why) why, why, why

typedef struct row {
  const char *name;
  rfr_dtype x, w;
  int64_t N, K;
  int groups;
  bool separate;
  int64_t before, after; /* x is a view: columns before and after x in its base */
  bias bias;
  const char *gpu[3]; /* forward, dgrad, wgrad: "sm90", or the reason against it */
  const char *cpu[3]; /* the same on the CPU: "panels", or the reason against it */
} row;

#define PLACE "an operand is not aligned to 16 bytes"
#define PITCH "row strides are not multiples of 16 bytes"
#define WIDTH "N or K is not a multiple of 8"
#define MIXED "types are mixed"
#define WIDE "operands are not 16-bit floats"
#define TYPE "operands are not bf16"
#define ADDS "a bias is added"
#define FEW "fewer than 32 rows or columns"
#define SMALL FEW, "panels", FEW
#define SMALL_ADDS ADDS, "panels", FEW

static const row rows[] = {
    {"bf16, packed", RFR_BF16, RFR_BF16, 24, 40, 3, false, 0, 0, NO_BIAS, {SM90}, {SMALL}},
    {"bf16, packed, bias", RFR_BF16, RFR_BF16, 24, 40, 3, false, 0, 0, BIAS, {SM90}, {SMALL_ADDS}},
    {"bf16, packed, bias times bf16", RFR_BF16, RFR_BF16, 24, 40, 3, false, 0, 0, SCALED_BF16, {SM90}, {SMALL_ADDS}},
    {"bf16, packed, bias times f32", RFR_BF16, RFR_BF16, 24, 40, 3, false, 0, 0, SCALED_F32, {SM90}, {SMALL_ADDS}},
    {"bf16, separate", RFR_BF16, RFR_BF16, 24, 40, 3, true, 0, 0, NO_BIAS, {SM90}, {SMALL}},
    {"bf16, separate, bias times f32", RFR_BF16, RFR_BF16, 24, 40, 3, true, 0, 0, SCALED_F32, {SM90}, {SMALL_ADDS}},
    {"bf16, 241 separate", RFR_BF16, RFR_BF16, 24, 40, 241, true, 0, 0, NO_BIAS, {SM90}, {SMALL}},
    {"f32, 3073 separate", RFR_F32, RFR_F32, 8, 8, 3073, true, 0, 0, NO_BIAS, {ALL(WIDE)}, {ALL(TYPE)}},
    {"f16, packed", RFR_F16, RFR_F16, 24, 40, 3, false, 0, 0, NO_BIAS, {SM90}, {ALL(TYPE)}},
    {"f16, separate", RFR_F16, RFR_F16, 24, 40, 3, true, 0, 0, BIAS, {SM90}, {ALL(TYPE)}},
    {"f32, packed", RFR_F32, RFR_F32, 24, 40, 3, false, 0, 0, NO_BIAS, {ALL(WIDE)}, {ALL(TYPE)}},
    {"f32, separate", RFR_F32, RFR_F32, 24, 40, 3, true, 0, 0, BIAS, {ALL(WIDE)}, {ALL(TYPE)}},
    {"bf16 by f32", RFR_BF16, RFR_F32, 24, 40, 3, false, 0, 0, NO_BIAS, {MIXED, MIXED, "sm90"}, {MIXED, MIXED, FEW}},
    {"bf16, K 100", RFR_BF16, RFR_BF16, 24, 100, 3, false, 0, 0, NO_BIAS, {ALL(WIDTH)}, {SMALL}},
    {"bf16, N 12", RFR_BF16, RFR_BF16, 12, 40, 3, true, 0, 0, NO_BIAS, {ALL(WIDTH)}, {SMALL}},
    {"bf16, x a view 16 bytes in", RFR_BF16, RFR_BF16, 24, 40, 3, false, 8, 0, NO_BIAS, {SM90}, {SMALL}},
    {"bf16, x a view 2 bytes in", RFR_BF16, RFR_BF16, 24, 40, 3, false, 1, 7, NO_BIAS, {PLACE, "sm90", PLACE}, {SMALL}},
    {"bf16, x a view of odd pitch",
     RFR_BF16,
     RFR_BF16,
     24,
     40,
     3,
     false,
     0,
     3,
     NO_BIAS,
     {PITCH, "sm90", PITCH},
     {SMALL}},
    {"bf16, 48 by 64", RFR_BF16, RFR_BF16, 48, 64, 3, false, 0, 0, NO_BIAS, {SM90}, {PANELS}},
    {"bf16, 48 by 64, separate", RFR_BF16, RFR_BF16, 48, 64, 3, true, 0, 0, NO_BIAS, {SM90}, {PANELS}},
    {"bf16, 48 by 64, odd pitch",
     RFR_BF16,
     RFR_BF16,
     48,
     64,
     3,
     false,
     0,
     3,
     NO_BIAS,
     {PITCH, "sm90", PITCH},
     {PANELS}},
};

static rfr_trace *record(const row *r) {
  static rfr_value w[MOST_GROUPS];
  char name[16];
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value full =
      rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, r->x, 2, (int64_t[]){ROWS, r->before + r->K + r->after});
  const rfr_value x = r->before + r->after > 0 ? rfr_slice(t, full, 1, r->before, r->K) : full;
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){r->groups});
  const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
  rfr_value bias = RFR_NONE, scale = RFR_NONE;
  if (r->bias != NO_BIAS) bias = rfr_input(t, "bias", RFR_ROLE_FROZEN, r->w, 2, (int64_t[]){r->groups, r->N});
  if (r->bias > BIAS)
    scale = rfr_input(t, "scale", RFR_ROLE_INPUT, r->bias == SCALED_F32 ? RFR_F32 : RFR_BF16, 1, (int64_t[]){ROWS});
  const int n = r->separate ? r->groups : 1;
  for (int g = 0; g < n; g++) {
    snprintf(name, sizeof name, "w%d", g);
    w[g] = r->separate ? rfr_input(t, name, RFR_ROLE_TRAINABLE, r->w, 2, (int64_t[]){r->N, r->K})
                       : rfr_input(t, name, RFR_ROLE_TRAINABLE, r->w, 3, (int64_t[]){r->groups, r->N, r->K});
  }
  const rfr_value y = r->separate ? rfr_grouped_linear_separate(t, x, n, w, offsets, bias, scale)
                                  : rfr_grouped_linear(t, x, w[0], offsets, bias, scale);
  const rfr_value wide = rfr_cast(t, y, RFR_F32), loss = rfr_sum(t, rfr_mul(t, wide, wide), -1);
  rfr_output(t, "dx", rfr_gradient(t, loss, full, r->x));
  for (int g = 0; g < n; g++) {
    snprintf(name, sizeof name, "d%d", g);
    rfr_output(t, name, rfr_gradient(t, loss, w[g], RFR_F32));
  }
  OK(rfr_trace_finish(t));
  return t;
}

/* 0: forward, 1: dgrad, 2: wgrad; -1: another op. */
static int kind_of(const rfi_opr *op) {
  if (op->def->code == RFI_OP_grouped_wgrad) return 2;
  return op->def->code == RFI_OP_grouped_matmul ? op->phase == RFR_PHASE_DGRAD : -1;
}

/* The table assumes a CPU with AMX or AVX512-BF16 and the oneDNN module; returns the expected entry for this CPU. */
static const char *on_this_cpu(const char *wanted) {
  rfi_cpu_library *library;
  OK(rfi_cpu_library_open(ctx, &library));
  const bool loaded = rfi_cpu_library_loaded(library), own = strstr(rfi_cpu_library_describe(library), " + own ");
  rfi_cpu_library_close(library);
  if (strcmp(wanted, MIXED) == 0 || strcmp(wanted, TYPE) == 0) return wanted;
  if (!loaded) return "oneDNN is not used";
  return own || strcmp(wanted, ADDS) == 0 ? wanted : "neither AMX nor AVX512-BF16";
}

/* GEMMs before SwiGLU, of experts of width I. */
static const struct {
  const char *name;
  rfr_dtype type;
  int64_t K, I;
  const char *gpu, *cpu;
} before_swiglu[] = {
    {"SwiGLU, bf16", RFR_BF16, 40, 24, "sm90", "panels"},
    {"SwiGLU, f16", RFR_F16, 40, 24, "sm90", TYPE},
    {"SwiGLU, f32", RFR_F32, 40, 24, WIDE, TYPE},
    {"SwiGLU, bf16, I 12", RFR_BF16, 40, 12, "half of N is not a multiple of 8", FEW},
    {"SwiGLU, bf16, K 100", RFR_BF16, 100, 32, WIDTH, "panels"},
};

static rfr_trace *record_experts(rfr_dtype type, int64_t K, int64_t I) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, type, 2, (int64_t[]){ROWS, K});
  const rfr_value weight = rfr_input(t, "weight", RFR_ROLE_INPUT, RFR_F32, 1, (int64_t[]){ROWS});
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, type, 3, (int64_t[]){3, 2 * I, K});
  const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){3});
  const rfr_value y = rfr_grouped_linear(t, x, w, rfr_splits_to_offsets(t, splits, ROWS, NULL), RFR_NONE, RFR_NONE);
  rfr_output(t, "h", rfr_swiglu_weighted(t, rfr_slice(t, y, 1, 0, I), rfr_slice(t, y, 1, I, I), weight));
  OK(rfr_trace_finish(t));
  return t;
}

static void swiglu_runs_where_the_table_says(bool gpu) {
  for (size_t i = 0; i < sizeof before_swiglu / sizeof *before_swiglu; i++) {
    rfr_trace *t = record_experts(before_swiglu[i].type, before_swiglu[i].K, before_swiglu[i].I);
    rfr_programs *p = rft_compile(t, NULL);
    const rfi_program *program = &p->program[0];
    const char *wanted = gpu ? before_swiglu[i].gpu : on_this_cpu(before_swiglu[i].cpu);
    const bool fast = strcmp(wanted, gpu ? "sm90" : "panels") == 0;
    int seen = 0;
    for (int k = 0; k < program->u.n_bound; k++) {
      const rfi_bound *b = &program->u.bound[k];
      if (program->u.trace->ops[b->op].def->code != RFI_OP_grouped_swiglu) continue;
      seen++;
      printf("%-32s %-8s%s%s%s\n", before_swiglu[i].name, b->kernel, b->why ? " (" : "", b->why ? b->why : "",
             b->why ? ")" : "");
      assert_string_equal(b->kernel, fast ? wanted : gpu ? "sm80" : rfi_ctx_isa(ctx));
      if (!fast) assert_string_equal(b->why, wanted);
      else assert_null(b->why);
    }
    assert_int_equal(seen, 1);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
}

static void runs_where_the_table_says(bool gpu) {
  printf("%-32s %-8s %-8s %-8s\n", gpu ? "cuda:none" : "cpu", "forward", "dgrad", "wgrad");
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_trace *t = record(&rows[i]);
    rfr_programs *p = rft_compile(t, NULL);
    const rfi_program *program = &p->program[0];
    const char *report = rfr_program_report(p, 0, "lower");
    int seen[3] = {0};
    printf("%-32s", rows[i].name);
    for (int k = 0; k < program->u.n_bound; k++) {
      const rfi_bound *b = &program->u.bound[k];
      const int kind = kind_of(&program->u.trace->ops[b->op]);
      char line[128];
      if (kind < 0) continue;
      seen[kind]++;
      const char *wanted = gpu ? rows[i].gpu[kind] : on_this_cpu(rows[i].cpu[kind]);
      const bool fast = strcmp(wanted, gpu ? "sm90" : "panels") == 0;
      printf(" %-8s%s%s%s", b->kernel, b->why ? " (" : "", b->why ? b->why : "", b->why ? ")" : "");
      assert_string_equal(b->kernel, fast ? wanted : gpu ? "sm80" : rfi_ctx_isa(ctx));
      if (!fast) assert_string_equal(b->why, wanted);
      else assert_null(b->why);
      snprintf(line, sizeof line, "kernel: op %d %s on %s%s", b->op, program->u.trace->ops[b->op].def->name, b->kernel,
               b->why ? ": " : "\n");
      assert_non_null(strstr(report, line));
    }
    printf("\n");
    for (int k = 0; k < 3; k++) assert_true(seen[k] > 0);
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
}

static void on_the_cpu(void **state) {
  (void)state;
  runs_where_the_table_says(false);
  swiglu_runs_where_the_table_says(false);
}

static void on_a_gpu(void **state) {
  rfr_ctx_options o = rfr_ctx_options_default();
  const rfi_backend *backend;
  (void)state;
  o.device = "cuda:none";
  OK(rfr_ctx_create(&o, &ctx));
  if (rfi_backend_find(ctx, &backend) == RFR_OK) {
    runs_where_the_table_says(true);
    swiglu_runs_where_the_table_says(true);
  } else {
    printf("not built: %s\n", rfr_last_error()->message);
  }
  rfr_ctx_destroy(ctx);
  ctx = NULL;
}

/* Quantized types of other recipes are refused, not computed in another type. */
static void refuses_future_types(void **state) {
  (void)state;
  static const struct {
    const char *recipe;
    rfr_dtype dtype;
    const char *text;
  } recipes[] = {{"fp8 delayed", RFR_E4M3, "is e4m3, not f32, bf16 or f16: grouped GEMMs do not support FP8"},
                 {"fp8 current", RFR_E4M3, "support FP8"},
                 {"fp8 block", RFR_E4M3, "support FP8"},
                 {"fp8 of gradients", RFR_E5M2, "is e5m2, not f32, bf16 or f16: grouped GEMMs do not support FP8 gr"},
                 {"mxfp8", RFR_E4M3, "and MXFP8; pass the tensor before"},
                 {"nvfp4", RFR_E2M1, "is e2m1, not f32, bf16 or f16: grouped GEMMs do not support NVFP4"}};
  for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
    for (int which = 0; which < 2; which++) {
      rfr_trace *t;
      OK(rfr_trace_create(ctx, &t));
      const rfr_dtype other = RFR_BF16;
      const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, which ? other : recipes[i].dtype, 2, (int64_t[]){ROWS, 32});
      const rfr_value w =
          rfr_input(t, "w", RFR_ROLE_INPUT, which ? recipes[i].dtype : other, 3, (int64_t[]){3, 16, 32});
      const rfr_value splits = rfr_input(t, "splits", RFR_ROLE_INPUT, RFR_I32, 1, (int64_t[]){3});
      const rfr_value offsets = rfr_splits_to_offsets(t, splits, ROWS, NULL);
      assert_int_equal(rfr_grouped_linear(t, x, w, offsets, RFR_NONE, RFR_NONE), RFR_NONE);
      assert_int_equal(rfr_trace_finish(t), RFR_INVALID);
      if (!strstr(rfr_last_error()->message, recipes[i].text))
        fail_msg("%s: %s", recipes[i].recipe, rfr_last_error()->message);
      rfr_trace_destroy(t);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(on_the_cpu), cmocka_unit_test(on_a_gpu),
                                     rft_context_test(refuses_future_types)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
