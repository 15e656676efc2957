/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench small: one GPT-2 layer that is so small that launch overhead dominates. Forward and backward of C 256,
 * 4 heads, 2 documents of 64 tokens, with the gradients of x and of every parameter. Reports the time of one replay
 * followed by a wait, and the time of one of many replays launched back to back. `refrain profile small` times its ops.
 * bench/peers/peers_gpu.py has the same layer.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "refrain/ops.h"
#include "refrain/program.h"

enum { C = 256, HEADS = 4, ROWS = 128, DOCUMENTS = 2, PARAMETERS = 12, ROUNDS = 200, MANY = 300, TIMES = 9 };

static const struct {
  const char *name;
  int64_t rows, columns; /* columns 0: a vector */
} parameters[PARAMETERS] = {{"n1.w", C, 0},     {"n1.b", C, 0},     {"qkv.w", 3 * C, C},  {"qkv.b", 3 * C, 0},
                            {"o.w", C, C},      {"o.b", C, 0},      {"n2.w", C, 0},       {"n2.b", C, 0},
                            {"up.w", 4 * C, C}, {"up.b", 4 * C, 0}, {"down.w", C, 4 * C}, {"down.b", C, 0}};

static rfr_value layer(rfr_trace *t, rfr_value x, rfr_value offsets, const rfr_value *p) {
  const rfr_attention_options causal = {.causal = 1, .longest = ROWS / DOCUMENTS};
  const int64_t heads[3] = {ROWS, HEADS, C / HEADS}, flat[2] = {ROWS, C};
  rfr_value qkv = rfr_linear(t, rfr_layernorm(t, x, p[0], p[1], 1e-5), p[2], p[3]), part[3];
  for (int i = 0; i < 3; i++) part[i] = rfr_reshape(t, rfr_slice(t, qkv, 1, i * C, C), 3, heads);
  rfr_value o = rfr_attention(t, part[0], part[1], part[2], offsets, &causal);
  x = rfr_add(t, x, rfr_linear(t, rfr_reshape(t, o, 2, flat), p[4], p[5]));
  rfr_value up = rfr_linear(t, rfr_layernorm(t, x, p[6], p[7], 1e-5), p[8], p[9]);
  return rfr_add(t, x, rfr_linear(t, rfr_gelu(t, up, 1), p[10], p[11]));
}

static rfr_status make_layer(rfr_ctx *ctx, rfr_dtype dtype, rfr_programs **out) {
  const int64_t x_shape[2] = {ROWS, C}, n_offsets = DOCUMENTS + 1;
  rfr_trace *t = NULL;
  rfr_value p[PARAMETERS];
  rfr_status s = rfr_trace_create(ctx, &t);
  if (s != RFR_OK) return s;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, dtype, 2, x_shape);
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, &n_offsets);
  for (int i = 0; i < PARAMETERS; i++) {
    const int64_t shape[2] = {parameters[i].rows, parameters[i].columns};
    p[i] = rfr_input(t, parameters[i].name, RFR_ROLE_TRAINABLE, dtype, shape[1] > 0 ? 2 : 1, shape);
  }
  rfr_value y = layer(t, x, offsets, p);
  rfr_value loss = rfr_sum(t, rfr_cast(t, y, RFR_F32), -1); /* dy is 1; the sum itself is not used */
  rfr_output(t, "y", y);
  rfr_output(t, "dx", rfr_gradient(t, loss, x, dtype));
  for (int i = 0; i < PARAMETERS; i++) {
    char name[32];
    snprintf(name, sizeof name, "d %s", parameters[i].name);
    rfr_output(t, name, rfr_gradient(t, loss, p[i], RFR_F32)); /* the type that an optimizer reads */
  }
  s = rfr_trace_finish(t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, out);
  rfr_trace_destroy(t);
  return s;
}

/* Values like those of a trained layer: norms scale by about 1, GEMMs keep the magnitude of their input. */
static rfr_status fill(rfr_programs *p, const rfr_tensor *x, const char *name) {
  char *host = malloc((size_t)x->bytes);
  if (!host) return RFR_NO_MEMORY;
  const int64_t width = x->type.rank > 1 ? x->type.shape[1] : 1;
  const bool scales = strcmp(name, "n1.w") == 0 || strcmp(name, "n2.w") == 0, is_x = strcmp(name, "x") == 0;
  const int size = x->type.dtype == RFR_F32 ? 4 : 2;
  uint32_t draw = 1;
  for (int64_t i = 0; i < x->bytes; i += size) {
    draw = draw * 1664525u + 1013904223u;
    const float by = is_x ? 1.0f : width > C ? 1.0f / 32 : width > 1 ? 1.0f / 16 : 0.1f; /* 1 / sqrt(width) */
    const float value = (scales ? 1.0f : 0.0f) + by * (float)(int32_t)draw * 0x1p-31f;
    const uint32_t bits = rfr_float_to_bits(x->type.dtype, value);
    if (size == 4) memcpy(host + i, &value, 4);
    else memcpy(host + i, &(uint16_t){(uint16_t)bits}, 2);
  }
  rfr_status s = rfr_programs_write(p, x, host);
  free(host);
  return s;
}

static rfr_status fill_all(rfr_programs *p) {
  rfr_tensor x;
  const int32_t offsets[DOCUMENTS + 1] = {0, ROWS / DOCUMENTS, ROWS};
  rfr_status s = rfr_programs_tensor(p, "offsets", &x);
  if (s == RFR_OK) s = rfr_programs_write(p, &x, offsets);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "x", &x);
  if (s == RFR_OK) s = fill(p, &x, "x");
  for (int i = 0; i < PARAMETERS && s == RFR_OK; i++) {
    s = rfr_programs_tensor(p, parameters[i].name, &x);
    if (s == RFR_OK) s = fill(p, &x, parameters[i].name);
  }
  return s;
}

static rfr_status replays(rfr_programs *p, int n, double *seconds) {
  rfr_status s = RFR_OK;
  const double start = cli_now();
  for (int i = 0; i < n && s == RFR_OK; i++) s = rfr_program_replay(p, 0, NULL, 0);
  if (s == RFR_OK) s = rfr_programs_wait(p);
  *seconds = cli_now() - start;
  return s;
}

/* Median seconds per replay; *n: number of replays in a row, fewer if one is slow. */
static rfr_status measure(rfr_programs *p, double *alone, double *in_a_row, int *n) {
  double one[ROUNDS] = {0}, many[TIMES];
  const double warm = cli_now();
  rfr_status s = rfr_program_capture(p, 0);
  do
    if (s == RFR_OK) s = replays(p, 1, &one[0]);
  while (s == RFR_OK && cli_now() - warm < 1.0);
  const int rounds = one[0] > 1e-3 ? ROUNDS / 10 : ROUNDS;
  *n = one[0] > 1e-3 ? MANY / 30 : MANY;
  for (int i = 0; i < rounds && s == RFR_OK; i++) s = replays(p, 1, &one[i]);
  for (int i = 0; i < TIMES && s == RFR_OK; i++) s = replays(p, *n, &many[i]);
  *alone = s == RFR_OK ? cli_median(one, rounds) : 0;
  *in_a_row = s == RFR_OK ? cli_median(many, TIMES) / *n : 0;
  return s;
}

rfr_status bench_small_open(cli *c, rfr_dtype *dtype, rfr_programs **out) {
  *out = NULL;
  rfr_status s = bench_dtype(c, dtype);
  if (s == RFR_OK) s = make_layer(c->ctx, *dtype, out);
  if (s == RFR_OK) s = fill_all(*out);
  return s == RFR_OK ? rfr_programs_load(*out) : s;
}

rfr_status bench_small(cli *c) {
  double alone = 0, in_a_row = 0;
  int ops = 0, in_a_row_n = 0;
  char device[160];
  rfr_programs *p = NULL;
  rfr_dtype dtype;
  rfr_status s = bench_small_open(c, &dtype, &p);
  if (s == RFR_OK) s = rfr_program_profile(p, 0, NULL, 0, &ops);
  if (s == RFR_OK) s = measure(p, &alone, &in_a_row, &in_a_row_n);
  rfr_plan_summary plan = {0};
  if (s == RFR_OK) s = rfr_program_plan(p, 0, &plan);
  if (s == RFR_OK && !c->json)
    printf("small (one layer forward and backward, C %d, %d heads, %d x %d tokens, %d ops, %d of them on the side "
           "stream), "
           "%s, %s\n  %.1f us for one replay and a wait, %.1f us each of %d in a row\n",
           C, HEADS, DOCUMENTS, ROWS / DOCUMENTS, ops, plan.branch_ops, rfr_dtype_name(dtype), cli_device(c, device),
           1e6 * alone, 1e6 * in_a_row, in_a_row_n);
  rfr_programs_destroy(p);
  if (s != RFR_OK) return s;
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "name", "small");
    json_text(&j, "device", cli_device(c, device));
    json_text(&j, "dtype", rfr_dtype_name(dtype));
    json_int(&j, "ops", ops);
    json_int(&j, "branch_ops", plan.branch_ops);
    json_double(&j, "one_us", 1e6 * alone);
    json_double(&j, "in_a_row_us", 1e6 * in_a_row);
    json_end(&j, '}');
    putchar('\n');
  }
  return RFR_OK;
}
