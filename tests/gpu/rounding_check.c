/* SPDX-License-Identifier: Apache-2.0
 *
 * Stochastic rounding of weights on a GPU against the CPU, bit for bit:
 *
 *   rounding_check [DEVICE]    default: cuda
 *
 * The updates are exact in f32, so that the order of operations does not matter and only the draws decide: SGD and
 * momentum with whole gradients and a rate of 2^-12, AdamW with gradients of zero, whose update is the decay, 2^-9 of
 * the weight. Sizes take the paths of 4 adjacent elements, of single ones, and of 8-bit moments. One line per case; the
 * exit code is 1 if any line says BAD.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refrain/ctx.h"
#include "refrain/ops.h"
#include "refrain/program.h"

enum { WEIGHTS = 3, STEPS = 4 };
static const int64_t sizes[WEIGHTS] = {1 << 20, 70001, 3};
typedef enum kind { SGD, MOMENTUM, ADAMW, ADAMW8, KINDS } kind;
static const char *const kind_names[KINDS] = {"sgd", "momentum", "adamw", "adamw, 8-bit moments"};
static int bad;

static void must(rfr_status s, const char *what) {
  if (s == RFR_OK) return;
  printf("BAD %s: %s\n", what, rfr_last_error()->message);
  exit(1);
}

static rfr_value named(rfr_trace *t, const char *name, int i, rfr_role role, rfr_dtype dtype, int64_t n) {
  char full[16];
  snprintf(full, sizeof full, "%s%d", name, i);
  return rfr_input(t, full, role, dtype, 1, &n);
}

static rfr_trace *record(rfr_ctx *ctx, kind k) {
  rfr_trace *t;
  const int64_t one = 1;
  must(rfr_trace_create(ctx, &t), "trace");
  const rfr_value step = rfr_step_block(t);
  rfr_lr_options lr_options = rfr_lr_options_default();
  lr_options.base = 0x1p-12;
  const rfr_value lr = rfr_lr_schedule(t, step, &lr_options);
  const rfr_value skip = rfr_input(t, "skip", RFR_ROLE_INPUT, RFR_I32, 1, &one);
  for (int i = 0; i < WEIGHTS; i++) {
    const int64_t n = sizes[i], bytes = rfr_quant_bytes(RFR_QUANT_DYNAMIC8, 1, &n);
    const rfr_value w = named(t, "w", i, RFR_ROLE_TRAINABLE, RFR_BF16, n);
    const rfr_value g = named(t, "g", i, RFR_ROLE_INPUT, i == 1 ? RFR_BF16 : RFR_F32, n);
    if (k <= MOMENTUM) {
      const rfr_value b = k == SGD ? RFR_NONE : named(t, "b", i, RFR_ROLE_STATE, RFR_F32, n);
      rfr_sgd_stochastic(t, w, g, b, lr, RFR_NONE, skip, step, 0.0, 0.0, 1.0, i + 1);
      continue;
    }
    rfr_adamw_options o = rfr_adamw_options_default();
    o.decay = 8.0;
    o.draws = i + 1;
    const rfr_dtype dtype = k == ADAMW8 ? RFR_U8 : RFR_F32;
    const rfr_value m = named(t, "m", i, RFR_ROLE_STATE, dtype, k == ADAMW8 ? bytes : n);
    const rfr_value v = named(t, "v", i, RFR_ROLE_STATE, dtype, k == ADAMW8 ? bytes : n);
    rfr_adamw(t, w, g, m, v, RFR_NONE, lr, RFR_NONE, skip, step, &o);
  }
  rfr_step_end(t, step, skip);
  must(rfr_trace_finish(t), "trace");
  return t;
}

static void write_numbers(rfr_programs *p, const char *name, int i, float (*value)(int64_t k)) {
  char full[16];
  rfr_tensor x;
  snprintf(full, sizeof full, "%s%d", name, i);
  must(rfr_programs_tensor(p, full, &x), full);
  float *f = malloc((size_t)sizes[i] * 4);
  uint16_t *h = (uint16_t *)malloc((size_t)sizes[i] * 2);
  for (int64_t k = 0; k < sizes[i]; k++) {
    uint32_t bits;
    f[k] = value(k);
    memcpy(&bits, &f[k], 4);
    h[k] = (uint16_t)(bits >> 16); /* exact for these numbers */
  }
  must(rfr_programs_write(p, &x, x.type.dtype == RFR_F32 ? (const void *)f : h), full);
  free(f);
  free(h);
}

static float weight(int64_t k) { return (k % 2 ? -1.0f : 1.0f) * (1.0f + (float)(k % 128) / 128.0f); }
static float whole(int64_t k) { return (float)(k % 61 - 30); }
static float zero(int64_t k) { return 0.0f * (float)(k & 1); }

static void start(rfr_programs *p, kind k) {
  const int64_t block[4] = {0, 0, 20240229, 0};
  rfr_tensor x;
  must(rfr_programs_tensor(p, "step", &x), "step");
  must(rfr_programs_write(p, &x, block), "step");
  for (int i = 0; i < WEIGHTS; i++)
    write_numbers(p, "w", i, weight), write_numbers(p, "g", i, k <= MOMENTUM ? whole : zero);
}

static void *read_weight(rfr_programs *p, int i) {
  char full[16];
  rfr_tensor x;
  snprintf(full, sizeof full, "w%d", i);
  must(rfr_programs_tensor(p, full, &x), full);
  void *data = malloc((size_t)x.bytes);
  must(rfr_programs_read(p, &x, data), full);
  return data;
}

static void check(rfr_ctx *const ctx[2], kind k) {
  const rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p[2];
  printf("%s:", kind_names[k]);
  for (int d = 0; d < 2; d++) {
    rfr_trace *t = record(ctx[d], k);
    must(rfr_compile(ctx[d], 1, (const rfr_trace *const[]){t}, NULL, &o, &p[d]), "compile");
    rfr_trace_destroy(t);
    start(p[d], k);
    must(rfr_programs_load(p[d]), "load");
    must(rfr_program_capture(p[d], 0), "capture");
  }
  for (int step = 0; step < STEPS; step++)
    for (int d = 0; d < 2; d++)
      must(rfr_program_replay(p[d], 0, NULL, 0), "replay"), must(rfr_programs_wait(p[d]), "wait");
  for (int i = 0; i < WEIGHTS; i++) {
    uint16_t *cpu = read_weight(p[0], i), *gpu = read_weight(p[1], i);
    int64_t n = 0, moved = 0;
    for (int64_t j = 0; j < sizes[i]; j++) {
      uint32_t bits;
      const float was = weight(j);
      memcpy(&bits, &was, 4);
      n += cpu[j] != gpu[j];
      moved += cpu[j] != bits >> 16;
    }
    printf(" %lld of %lld moved", (long long)moved, (long long)sizes[i]);
    if (n > 0) bad = 1, printf(" BAD(%lld differ)", (long long)n);
    free(cpu);
    free(gpu);
  }
  printf("\n");
  fflush(stdout);
  for (int d = 0; d < 2; d++) rfr_programs_destroy(p[d]);
}

int main(int argc, char **argv) {
  rfr_ctx *ctx[2];
  for (int d = 0; d < 2; d++) {
    rfr_ctx_options o = rfr_ctx_options_default();
    o.device = d == 0 ? "cpu" : argc > 1 ? argv[1] : "cuda";
    must(rfr_ctx_create(&o, &ctx[d]), "context");
  }
  for (int k = 0; k < KINDS; k++) check(ctx, (kind)k);
  for (int d = 0; d < 2; d++) rfr_ctx_destroy(ctx[d]);
  return bad;
}
