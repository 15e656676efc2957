/* SPDX-License-Identifier: Apache-2.0
 *
 * Tuning measures once: programs compiled with the stored choices of an earlier compile are bitwise equal in every
 * run, and a compile with a choice that is damaged, from another library version or missing is refused. Prints the
 * duration of the measurement and the choices.
 *
 *   tune_check [DEVICE]    default: cuda
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "refrain/ctx.h"
#include "refrain/ops.h"
#include "refrain/program.h"

enum { ROWS = 1536, IN = 768, OUT = 2304, MOST = 32, TIMES = 3, OUTPUTS = 4 };

static const char *const outputs[OUTPUTS] = {"y", "dx", "dw", "batched"};
static int wrong;

static void expect(const char *what, bool holds) {
  printf("%-70s %s\n", what, holds ? "ok" : "FAILED");
  fflush(stdout);
  wrong += !holds;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A layer with a bias, its gradients, and a batched GEMM. */
static rfr_status compile(rfr_ctx *ctx, const rfr_choice *choices, int n, rfr_programs **out) {
  rfr_trace *t;
  *out = NULL;
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_BF16, 2, (int64_t[]){ROWS, IN});
  const rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, RFR_BF16, 2, (int64_t[]){OUT, IN});
  const rfr_value b = rfr_input(t, "b", RFR_ROLE_FROZEN, RFR_BF16, 1, (int64_t[]){OUT});
  const rfr_value dy = rfr_input(t, "dy", RFR_ROLE_INPUT, RFR_BF16, 2, (int64_t[]){ROWS, OUT});
  const rfr_value many = rfr_input(t, "many", RFR_ROLE_INPUT, RFR_F32, 3, (int64_t[]){6, 128, 256});
  rfr_output(t, "y", rfr_linear(t, x, w, b));
  rfr_output(t, "dx", rfr_matmul(t, dy, w, RFR_NONE, 0, 0, RFR_BF16));
  rfr_output(t, "dw", rfr_matmul(t, dy, x, RFR_NONE, 1, 0, RFR_F32));
  rfr_output(t, "batched", rfr_matmul(t, many, many, RFR_NONE, 0, 1, RFR_F32));
  rfr_compile_options o = rfr_compile_options_default();
  o.tune = 1;
  o.choices = choices;
  o.n_choices = n;
  s = rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, &o, out);
  rfr_trace_destroy(t);
  return s;
}

/* Fills all inputs with reproducible numbers between -1 and 1. */
static rfr_status fill(rfr_programs *p) {
  rfr_tensor x;
  rfr_status s = RFR_OK;
  uint64_t state = 1;
  for (int i = 0; s == RFR_OK && rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    unsigned char *host = malloc((size_t)x.bytes);
    if (!host) return RFR_NO_MEMORY;
    const int size = x.type.dtype == RFR_F32 ? 4 : 2;
    for (int64_t k = 0; k < x.bytes / size; k++) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const float value = (float)(int32_t)(state >> 32) * 0x1p-31f;
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      if (size == 4) memcpy(host + 4 * k, &bits, 4);
      else memcpy(host + 2 * k, (const char *)&bits + 2, 2);
    }
    s = rfr_programs_write(p, &x, host);
    free(host);
  }
  return s;
}

/* Runs the program and hashes all outputs. */
static rfr_status run(rfr_programs *p, uint64_t *hash) {
  rfr_status s = rfr_program_run(p, 0);
  *hash = 0xcbf29ce484222325u;
  for (int i = 0; s == RFR_OK && i < OUTPUTS; i++) {
    rfr_tensor y;
    s = rfr_program_output(p, 0, outputs[i], &y);
    unsigned char *host = s == RFR_OK ? malloc((size_t)y.bytes) : NULL;
    if (s == RFR_OK) s = host ? rfr_programs_read(p, &y, host) : RFR_NO_MEMORY;
    for (int64_t k = 0; s == RFR_OK && k < y.bytes; k++) *hash = (*hash ^ host[k]) * 0x100000001b3u;
    free(host);
  }
  return s;
}

typedef struct kept { /* choices must outlive their programs */
  rfr_choice choice[MOST];
  char text[MOST][2][300];
  int n;
} kept;

static void keep(const rfr_programs *p, kept *k) {
  rfr_choice c;
  for (k->n = 0; k->n < MOST && rfr_programs_choice_at(p, k->n, &c) == RFR_OK; k->n++) {
    snprintf(k->text[k->n][0], sizeof k->text[0][0], "%s", c.name);
    snprintf(k->text[k->n][1], sizeof k->text[0][1], "%s", c.value);
    k->choice[k->n] = (rfr_choice){k->text[k->n][0], k->text[k->n][1]};
  }
}

static void expect_refused(rfr_ctx *ctx, const char *what, const kept *k, int n) {
  rfr_programs *p;
  const rfr_status s = compile(ctx, k->choice, n, &p);
  expect(what, s == RFR_MISMATCH && strcmp(rfr_last_error()->slug, "tune.stored") == 0);
  if (s != RFR_OK) printf("    %s\n", rfr_last_error()->message);
  rfr_programs_destroy(p);
}

static void check(rfr_ctx *ctx) {
  static kept first, again;
  rfr_programs *p;
  uint64_t hash, other;
  const double start = now();
  rfr_status s = compile(ctx, NULL, 0, &p);
  const double seconds = now() - start;
  if (s == RFR_OK) s = fill(p);
  if (s == RFR_OK) s = run(p, &hash);
  expect("measured and run", s == RFR_OK);
  if (s != RFR_OK) {
    printf("    %s\n", rfr_last_error()->message);
    rfr_programs_destroy(p);
    return;
  }
  keep(p, &first);
  rfr_programs_destroy(p);
  printf("%d choices in %.2f s with the compile\n", first.n, seconds);
  for (int i = 0; i < first.n; i++) printf("    %s: %s\n", first.choice[i].name, first.choice[i].value);
  expect("device, library and each product", first.n == 2 + OUTPUTS);
  for (int i = 0; i < TIMES; i++) {
    s = compile(ctx, first.choice, first.n, &p);
    if (s == RFR_OK) s = fill(p);
    if (s == RFR_OK) s = run(p, &other);
    keep(p, &again);
    expect("what was stored gives the same choices and bits",
           s == RFR_OK && other == hash && again.n == first.n &&
               memcmp(first.text, again.text, sizeof first.text) == 0);
    if (s != RFR_OK) printf("    %s\n", rfr_last_error()->message);
    rfr_programs_destroy(p);
  }
  char *digit = &first.text[first.n - 1][1][9];
  const char before = *digit;
  *digit = before == '0' ? '7' : '0';
  expect_refused(ctx, "a spoilt choice is refused", &first, first.n);
  *digit = before;
  expect_refused(ctx, "one that is missing is refused", &first, first.n - 1);
  snprintf(first.text[1][1], sizeof first.text[1][1], "cuBLASLt 9.9.9");
  expect_refused(ctx, "those of another library are refused", &first, first.n);
}

int main(int argc, char **argv) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.device = argc > 1 ? argv[1] : "cuda";
  if (rfr_ctx_create(&o, &ctx) != RFR_OK) {
    fprintf(stderr, "error: %s\n", rfr_last_error()->message);
    return 1;
  }
  check(ctx);
  rfr_ctx_destroy(ctx);
  return wrong > 0;
}
