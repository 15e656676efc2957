/* SPDX-License-Identifier: Apache-2.0
 *
 * Times of adapters and quantized weights on a GPU:
 *
 *   lora_check [DEVICE]    default: cuda
 *
 * lora: for shapes of Llama 3 8B, 8192 rows, rank 16, forward and dgrad: the base GEMM alone; u = x AT alone;
 * lora_matmul, less u's time; the base GEMM with u BT added by a second GEMM; and u BT with the base GEMM accumulated
 * into it. The results of the forms must agree. dequantize: time and bandwidth of NF4 and int8 to bf16. One line per
 * case; the exit code is 1 if any line says BAD.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "refrain/ctx.h"
#include "refrain/ops.h"
#include "refrain/program.h"

enum { M = 8192, R = 16, TIMES = 50, ROUNDS = 3 };

typedef enum form { BASE, NARROW, FUSED, TWO, FIRST } form;

static int bad;

static void must(rfr_status s, const char *what) {
  if (s == RFR_OK) return;
  printf("BAD %s: %s\n", what, rfr_last_error()->message);
  exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static rfr_value matrix(rfr_trace *t, const char *name, int64_t rows, int64_t columns) {
  return rfr_input(t, name, RFR_ROLE_INPUT, RFR_BF16, 2, ((int64_t[]){rows, columns}));
}

/* Forward (tb): y (M,n) = x (M,k) WT + u BT, W (n,k). dgrad: y (M,k) = x (M,n) W + u A. */
static rfr_trace *record(rfr_ctx *ctx, form f, int tb, int64_t n, int64_t k) {
  rfr_trace *t;
  must(rfr_trace_create(ctx, &t), "trace");
  const rfr_value x = matrix(t, "x", M, tb ? k : n);
  const rfr_value a = tb ? matrix(t, "a", R, k) : matrix(t, "a", n, R); /* the factor that multiplies x */
  const rfr_value b = tb ? matrix(t, "b", n, R) : matrix(t, "b", R, k);
  rfr_value u = f >= TWO ? matrix(t, "u", M, R) : rfr_matmul(t, x, a, RFR_NONE, 0, tb, RFR_BF16), y = u;
  const rfr_value first = f == FIRST ? rfr_matmul(t, u, b, RFR_NONE, 0, tb, RFR_BF16) : RFR_NONE;
  if (f != NARROW) y = rfr_matmul(t, x, matrix(t, "w", n, k), RFR_NONE, 0, tb, RFR_BF16);
  if (f == FUSED || f == TWO) y = rfr_add(t, y, rfr_matmul(t, u, b, RFR_NONE, 0, tb, RFR_BF16));
  if (f == FIRST) y = rfr_add(t, first, y);
  rfr_output(t, "y", y);
  must(rfr_trace_finish(t), "trace");
  return t;
}

static void fill(rfr_programs *p) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) {
    uint16_t *host = malloc((size_t)x.bytes);
    uint64_t h = 88172645463325252u + strlen(x.name) * 977 + (unsigned char)x.name[0];
    for (int64_t k = 0; k < x.bytes / 2; k++) {
      h ^= h << 13, h ^= h >> 7, h ^= h << 17;
      const float v = (float)((double)(h >> 40) / 16777216.0 - 0.5);
      host[k] = x.type.dtype == RFR_BF16 ? (uint16_t)rfr_float_to_bits(RFR_BF16, v) : (uint16_t)(h >> 20 & 0x3FFF);
    }
    must(rfr_programs_write(p, &x, host), "write");
    free(host);
  }
}

/* Microseconds of a replay: the minimum of ROUNDS means. `y` gets the result, if given. */
static double measure(rfr_ctx *ctx, rfr_trace *t, uint16_t *y, const uint16_t *u) {
  rfr_programs *p;
  rfr_tensor out, in;
  double best = 1e9;
  rfr_compile_options o = rfr_compile_options_default();
  must(rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, &o, &p), "compile");
  fill(p);
  if (u && rfr_programs_tensor(p, "u", &in) == RFR_OK) must(rfr_programs_write(p, &in, u), "write");
  must(rfr_programs_load(p), "load");
  must(rfr_program_capture(p, 0), "capture");
  must(rfr_program_output(p, 0, "y", &out), "output");
  for (int r = 0; r <= ROUNDS; r++) {
    const double start = now();
    for (int i = 0; i < TIMES; i++) must(rfr_program_replay(p, 0, NULL, 0), "replay");
    must(rfr_programs_wait(p), "wait");
    const double mean = (now() - start) / TIMES * 1e6;
    if (r > 0 && mean < best) best = mean; /* the first round is a warm-up */
  }
  if (y) must(rfr_programs_read(p, &out, y), "read");
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  return best;
}

static double distance(const uint16_t *a, const uint16_t *b, int64_t n) {
  double d = 0, s = 0;
  for (int64_t i = 0; i < n; i++) {
    const double x = rfr_float_from_bits(RFR_BF16, a[i]), y = rfr_float_from_bits(RFR_BF16, b[i]);
    d += (x - y) * (x - y), s += y * y;
  }
  return sqrt(d / (s + 1e-30));
}

static void check_shape(rfr_ctx *ctx, int tb, int64_t n, int64_t k) {
  const int64_t columns = tb ? n : k;
  uint16_t *u = malloc(sizeof *u * M * R), *fused = malloc(sizeof *u * (size_t)(M * columns)),
           *two = malloc(sizeof *u * (size_t)(M * columns));
  const double narrow = measure(ctx, record(ctx, NARROW, tb, n, k), u, NULL);
  const double base = measure(ctx, record(ctx, BASE, tb, n, k), NULL, NULL);
  const double one = measure(ctx, record(ctx, FUSED, tb, n, k), fused, NULL) - narrow;
  const double both = measure(ctx, record(ctx, TWO, tb, n, k), two, u);
  const double onto = measure(ctx, record(ctx, FIRST, tb, n, k), two, u);
  const double d = distance(fused, two, M * columns), tflops = 2e-6 * M * (double)n * (double)k;
  const bool agrees = d < 6e-3;
  bad |= !agrees;
  printf("%-8s N %5lld K %5lld  base %7.1f us (%4.0f TFLOP/s)  u %5.1f  fused %7.1f (%+5.1f %%)  two GEMMs %7.1f "
         "(%+5.1f %%)  "
         "narrow first %7.1f (%+5.1f %%)  distance %.1e %s\n",
         tb ? "forward" : "dgrad", (long long)n, (long long)k, base, tflops / base, narrow, one, 100 * (one / base - 1),
         both, 100 * (both / base - 1), onto, 100 * (onto / base - 1), d, agrees ? "ok" : "BAD");
  fflush(stdout);
  free(u), free(fused), free(two);
}

static void check_dequantize(rfr_ctx *ctx, rfr_quant format, int64_t n, int64_t k) {
  const int64_t shape[2] = {n, k}, bytes = rfr_quant_bytes(format, 2, shape);
  rfr_trace *t;
  must(rfr_trace_create(ctx, &t), "trace");
  const rfr_value q = rfr_input(t, "q", RFR_ROLE_INPUT, RFR_U8, 1, &bytes);
  rfr_output(t, "y", rfr_dequantize(t, q, format, 2, shape, RFR_BF16));
  must(rfr_trace_finish(t), "trace");
  const double us = measure(ctx, t, NULL, NULL);
  printf("%-8s N %5lld K %5lld  %7.1f us  %5.0f GB/s\n", rfr_quant_name(format), (long long)n, (long long)k, us,
         1e-3 * (double)(bytes + 2 * n * k) / us);
  fflush(stdout);
}

int main(int argc, char **argv) {
  static const int64_t shapes[][2] = {{4096, 4096}, {1024, 4096}, {14336, 4096}, {4096, 14336}};
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *ctx;
  o.device = argc > 1 ? argv[1] : "cuda";
  must(rfr_ctx_create(&o, &ctx), "context");
  for (int tb = 1; tb >= 0; tb--)
    for (int i = 0; i < 4; i++) check_shape(ctx, tb, shapes[i][0], shapes[i][1]);
  for (int i = 0; i < 4; i++) {
    check_dequantize(ctx, RFR_QUANT_NF4, shapes[i][0], shapes[i][1]);
    check_dequantize(ctx, RFR_QUANT_INT8, shapes[i][0], shapes[i][1]);
  }
  rfr_ctx_destroy(ctx);
  return bad;
}
