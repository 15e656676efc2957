/* SPDX-License-Identifier: Apache-2.0
 *
 * Every quantizer on a GPU against the CPU's, all results bit for bit, at sizes of layers:
 *
 *   quantize_check [DEVICE [VALUES [FIRST [COUNT]]]]    default: cuda 0 0 14
 *
 * VALUES: at least so many for each quantizer, in tensors of 2048 x 4096, alternating between bf16 and f32. FIRST and
 * COUNT choose quantizers, so that several processes can share the work.
 *
 * Inputs alternate between random numbers of one scale, any bit pattern (subnormal, infinite and NaN too), finite
 * numbers of every exponent, mostly zeros with both signs, and zeros alone. One line per case; the exit code is 1 if
 * any line says BAD.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/ctx.h"
#include "refrain/ops.h"
#include "refrain/program.h"

enum { RESULTS = 7, TURNS = 5 };

static const char *const names[RESULTS] = {"row", "col", "row_scale", "col_scale", "row_global", "col_global", "amax"};
static int bad;

typedef struct quantizer {
  rfr_dtype format;
  rfr_scaling scaling;
  int bits;
} quantizer;

typedef struct results {
  void *data[RESULTS];
  int64_t bytes[RESULTS];
} results;

static void must(rfr_status s, const char *what) {
  if (s == RFR_OK) return;
  printf("BAD %s: %s\n", what, rfr_last_error()->message);
  exit(1);
}

static uint32_t draw(uint64_t i) {
  uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  return (uint32_t)((z ^ (z >> 27)) >> 16);
}

/* The bit pattern of an f32, whose upper half is that of a bf16. */
static uint32_t pattern(int turn, uint64_t i) {
  const uint32_t z = draw(i * TURNS + (uint64_t)turn), sign = z & 0x80000000u;
  const uint32_t any = draw(~i), moderate = sign | (120 + any % 12) << 23 | (z & 0x7FFFFF);
  if (turn == 0) return moderate;
  if (turn == 1) return any % 64 ? moderate : draw(i ^ 0x5555);
  if (turn == 2) return sign | any % 255 << 23 | (z & 0x7FFFFF);
  return turn == 3 && any % 16 == 0 ? moderate : sign;
}

static rfr_trace *record(rfr_ctx *ctx, const quantizer *q, rfr_dtype dtype, int64_t rows, int64_t columns) {
  rfr_trace *t;
  rfr_quantized out;
  rfr_quantize_options o = rfr_quantize_options_default();
  must(rfr_trace_create(ctx, &t), "trace");
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, dtype, 2, ((int64_t[]){rows, columns}));
  o.format = q->format, o.scaling = q->scaling, o.bits = q->bits;
  if (q->bits & RFR_QUANTIZE_STOCHASTIC) o.step = rfr_step_block(t);
  rfr_quantize(t, x, &o, &out);
  const rfr_value all[RESULTS] = {out.row,        out.col,        out.row_scale, out.col_scale,
                                  out.row_global, out.col_global, out.amax};
  const bool nv = q->format == RFR_E2M1;
  for (int i = 0; i < RESULTS; i++)
    if (all[i] >= 0 && (nv || (i != 4 && i != 5))) rfr_output(t, names[i], all[i]);
  must(rfr_trace_finish(t), "trace");
  return t;
}

static void fill(rfr_programs *p, int turn, int64_t round, rfr_dtype dtype) {
  rfr_tensor x;
  must(rfr_programs_tensor(p, "x", &x), "x");
  const int64_t n = x.bytes / (dtype == RFR_F32 ? 4 : 2);
  uint32_t *wide = malloc((size_t)n * 4);
  uint16_t *narrow = (uint16_t *)wide;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = pattern(turn, (uint64_t)(round * n + i));
    if (dtype == RFR_F32) wide[i] = u;
    else narrow[i] = (uint16_t)(u >> 16);
  }
  must(rfr_programs_write(p, &x, wide), "write");
  free(wide);
}

static void quantize(rfr_programs *p, results *to) {
  rfr_tensor x;
  must(rfr_program_replay(p, 0, NULL, 0), "replay");
  must(rfr_programs_wait(p), "wait");
  for (int i = 0; i < RESULTS; i++) {
    if (rfr_program_output(p, 0, names[i], &x) != RFR_OK) continue;
    to->bytes[i] = x.bytes;
    if (!to->data[i]) to->data[i] = malloc((size_t)x.bytes);
    must(rfr_programs_read(p, &x, to->data[i]), "read");
  }
}

static void compare(const results *cpu, const results *gpu) {
  for (int i = 0; i < RESULTS; i++) {
    const unsigned char *a = cpu->data[i], *b = gpu->data[i];
    int64_t n = 0, first = -1;
    if (cpu->bytes[i] == 0 || memcmp(a, b, (size_t)cpu->bytes[i]) == 0) continue;
    for (int64_t k = 0; k < cpu->bytes[i]; k++)
      if (a[k] != b[k] && n++ == 0) first = k;
    bad = 1;
    printf(" BAD(%s: %lld bytes of %lld differ, the first at %lld: %02x, the CPU's %02x)", names[i], (long long)n,
           (long long)cpu->bytes[i], (long long)first, b[first], a[first]);
  }
}

static void check(rfr_ctx *const ctx[2], const quantizer *q, rfr_dtype dtype, int64_t rows, int64_t columns,
                  int64_t values) {
  const rfr_compile_options o = rfr_compile_options_default();
  results r[2] = {0};
  rfr_programs *p[2];
  printf("format %d scaling %d bits %d, %s (%lld,%lld):", (int)q->format, (int)q->scaling, q->bits,
         rfr_dtype_name(dtype), (long long)rows, (long long)columns);
  for (int k = 0; k < 2; k++) {
    rfr_trace *t = record(ctx[k], q, dtype, rows, columns);
    must(rfr_compile(ctx[k], 1, (const rfr_trace *const[]){t}, NULL, &o, &p[k]), "compile");
    rfr_trace_destroy(t);
    must(rfr_programs_load(p[k]), "load");
    must(rfr_program_capture(p[k], 0), "capture");
  }
  int64_t compared = 0;
  for (int64_t round = 0; round == 0 || compared < values; round++)
    for (int turn = 0; turn < TURNS; turn++, compared += rows * columns) {
      for (int k = 0; k < 2; k++) fill(p[k], turn, round, dtype), quantize(p[k], &r[k]);
      compare(&r[0], &r[1]);
    }
  printf(" %lld values done\n", (long long)compared);
  fflush(stdout);
  for (int k = 0; k < 2; k++) {
    rfr_programs_destroy(p[k]);
    for (int i = 0; i < RESULTS; i++) free(r[k].data[i]);
  }
}

int main(int argc, char **argv) {
  static const quantizer quantizers[] = {
      {RFR_E4M3, RFR_SCALING_TENSOR, 0},
      {RFR_E5M2, RFR_SCALING_TENSOR, 0},
      {RFR_E4M3, RFR_SCALING_TENSOR, RFR_QUANTIZE_POW2},
      {RFR_E4M3, RFR_SCALING_ROW128, 0},
      {RFR_E5M2, RFR_SCALING_ROW128, RFR_QUANTIZE_POW2},
      {RFR_E4M3, RFR_SCALING_BLOCK128, RFR_QUANTIZE_POW2},
      {RFR_E5M2, RFR_SCALING_BLOCK128, 0},
      {RFR_E4M3, RFR_SCALING_MX32, 0},
      {RFR_E5M2, RFR_SCALING_MX32, 0},
      {RFR_E4M3, RFR_SCALING_MX32X32, 0},
      {RFR_E2M1, RFR_SCALING_NV16, 0},
      {RFR_E2M1, RFR_SCALING_NV16, RFR_QUANTIZE_HADAMARD},
      {RFR_E2M1, RFR_SCALING_NV16, RFR_QUANTIZE_HADAMARD | RFR_QUANTIZE_STOCHASTIC},
      {RFR_E2M1, RFR_SCALING_NV16X16, 0},
  };
  static const int64_t shapes[][2] = {{2048, 4096}, {1056, 2080}, {32, 8224}};
  rfr_ctx *ctx[2];
  for (int k = 0; k < 2; k++) {
    rfr_ctx_options o = rfr_ctx_options_default();
    o.device = k == 0 ? "cpu" : argc > 1 ? argv[1] : "cuda";
    must(rfr_ctx_create(&o, &ctx[k]), "context");
  }
  const int all = (int)(sizeof quantizers / sizeof *quantizers);
  const int64_t values = argc > 2 ? atoll(argv[2]) : 0;
  const int first = argc > 3 ? atoi(argv[3]) : 0, count = argc > 4 ? atoi(argv[4]) : all;
  for (int i = first < 0 ? 0 : first; i < all && i < first + count; i++)
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
      check(ctx, &quantizers[i], RFR_BF16, shapes[s][0], shapes[s][1], s == 0 ? values / 2 : 0);
      check(ctx, &quantizers[i], RFR_F32, shapes[s][0], shapes[s][1], s == 0 ? values / 2 : 0);
    }
  for (int k = 0; k < 2; k++) rfr_ctx_destroy(ctx[k]);
  return bad;
}
