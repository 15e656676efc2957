/* SPDX-License-Identifier: Apache-2.0
 *
 * The scaled GEMMs on the CPU, the reference of what tensor cores do with 8 and 4 bits.
 *
 * Tiles of fixed size are decoded into scratch, step by step along K, and multiplied by the register tile of the other
 * GEMMs. An 8-bit or 4-bit number is exact in f32, and so is its product with an E8M0 or E4M3 scale, so these scales
 * are applied on decoding. The product with the f32 scale of 128 elements is not exact. There a step is one block, and
 * its partial sum is multiplied by both scales before it is added. Scales of a tensor are applied after the sum, one by
 * one, because their product alone might underflow. One thread computes a tile completely, so results do not depend on
 * the number of threads.
 */
#include "backend/cpu/cpu.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/tile.h"
#include "ops/quant/scaled.h"

enum {
  STEP = 256,
  STEP_SCALED = 128,
  TILE_M = 96, /* a multiple of every RFI_MR */
  TILE_N = 128,
  A_FLOATS = TILE_M * STEP,
  B_FLOATS = TILE_N * STEP,
  C_FLOATS = TILE_M * TILE_N,
  SCRATCH = A_FLOATS + B_FLOATS + 2 * C_FLOATS, /* C twice: the sum, and a block's part of it */
  MIN_TILE_WORK = 1 << 18, /* with fewer multiply-adds per thread, another thread is not worthwhile */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- operands ---- */

typedef struct operand {
  const uint8_t *q;
  const void *scale;
  const float *global; /* NULL: none */
  rfr_dtype dtype;
  int64_t scaling, rows, row, scale_row; /* a row in elements; of scales */
} operand;

static operand operand_of(const rfi_call *c, int q, int scale, int global) {
  const rfr_type *x = &c->in[q].type, *s = &c->in[scale].type;
  return (operand){.q = c->in[q].data,
                   .scale = c->in[scale].data,
                   .global = global < c->n_in ? c->in[global].data : NULL,
                   .dtype = x->dtype,
                   .scaling = rfi_scaling_of(x, s),
                   .rows = x->shape[x->rank - 2],
                   .row = x->shape[x->rank - 1] * (x->dtype == RFR_U8 ? 2 : 1),
                   .scale_row = s->shape[s->rank - 1]};
}

/* The matrix of a batch. */
static operand slice_of(operand x, int64_t g) {
  const rfi_scaling_info info = rfi_scaling_info_of(x.scaling);
  const int64_t lines = x.scaling == RFR_SCALING_BLOCK128 ? rfi_blocks_of(x.rows, 128) : x.rows;
  x.q += g * x.rows * x.row / (x.dtype == RFR_U8 ? 2 : 1);
  if (info.block) x.scale = (const char *)x.scale + g * lines * x.scale_row * (info.scale == RFR_F32 ? 4 : 1);
  return x;
}

static bool has_parts(const operand *x) {
  return x->scaling == RFR_SCALING_ROW128 || x->scaling == RFR_SCALING_BLOCK128;
}

static float part_scale(const operand *x, int64_t row, int64_t k) {
  if (!has_parts(x)) return 1;
  return ((const float *)x->scale)[(x->scaling == RFR_SCALING_BLOCK128 ? row / 128 : row) * x->scale_row + k / 128];
}

/* The factor after the sum: the scale of tensor number `slice`, or its global scale. */
static float late_scale(const operand *x, int64_t slice) {
  const float scale = x->scaling == RFR_SCALING_TENSOR ? ((const float *)x->scale)[slice] : 1;
  return x->global ? scale * x->global[slice] : scale;
}

static void decode8(float *restrict to, const uint8_t *restrict from, rfr_dtype dtype, int64_t n) {
  if (dtype == RFR_E4M3)
    for (int64_t i = 0; i < n; i++) to[i] = rfi_e4m3_widen(from[i]);
  else
    for (int64_t i = 0; i < n; i++) to[i] = rfi_e5m2_widen(from[i]);
}

/* Elements k ... k + n - 1 of a row, times scales of 32 or 16; k begins a block. */
static void decode(float *to, const operand *x, int64_t row, int64_t k, int64_t n) {
  const int64_t at = row * x->row + k;
  if (x->dtype != RFR_U8) decode8(to, x->q + at, x->dtype, n);
  else
    for (int64_t i = 0; i < n; i++) to[i] = rfi_e2m1_widen((uint8_t)(x->q[(at + i) / 2] >> (at + i) % 2 * 4));
  if (x->scaling != RFR_SCALING_MX32 && x->scaling != RFR_SCALING_NV16) return;
  const int64_t block = rfi_scaling_info_of(x->scaling).block;
  const uint8_t *scale = (const uint8_t *)x->scale + row * x->scale_row + k / block;
  for (int64_t i = 0; i < n; i++) {
    const uint8_t s = scale[i / block];
    to[i] *= x->scaling == RFR_SCALING_MX32 ? rfi_e8m0_widen(s) : rfi_e4m3_widen(s);
  }
}

/* Decodes rows of b as columns of a panel of RFI_NR; columns from n on are zero. */
static void decode_panel(float *panel, const operand *b, int64_t row, int64_t k0, int64_t k, int64_t n) {
  float line[STEP];
  for (int64_t j = 0; j < RFI_NR; j++) {
    if (j < n) decode(line, b, row + j, k0, k);
    else memset(line, 0, sizeof line);
    for (int64_t i = 0; i < k; i++) panel[i * RFI_NR + j] = line[i];
  }
}

/* ---- tiles ---- */

typedef struct tile {
  int64_t i, j, m, n; /* rows of a, rows of b */
  int64_t k, K;       /* elements of a row, from k on */
} tile;

static void add_part(const operand *a, const operand *b, const tile *t, int64_t k, const float *part, float *c) {
  float by[TILE_N];
  for (int64_t j = 0; j < t->n; j++) by[j] = part_scale(b, t->j + j, k);
  for (int64_t i = 0; i < t->m; i++) {
    const float s = part_scale(a, t->i + i, k);
    for (int64_t j = 0; j < t->n; j++) c[i * TILE_N + j] += part[i * TILE_N + j] * s * by[j];
  }
}

/* Returns C (TILE_M, TILE_N) in scratch, without the late scales. */
static float *multiply(const operand *a, const operand *b, const tile *t, float *scratch) {
  const bool parts = has_parts(a) || has_parts(b);
  const int64_t step = parts ? STEP_SCALED : STEP;
  float *ap = scratch, *bp = ap + A_FLOATS, *c = bp + B_FLOATS, *to = parts ? c + C_FLOATS : c;
  if (t->K == 0 || parts) memset(c, 0, sizeof *c * C_FLOATS);
  for (int64_t k0 = 0; k0 < t->K; k0 += step) {
    const int64_t k = least(t->K - k0, step);
    for (int64_t j = 0; j < t->n; j += RFI_NR)
      decode_panel(bp + j * k, b, t->j + j, t->k + k0, k, least(t->n - j, RFI_NR));
    for (int64_t i = 0; i < t->m; i++) decode(ap + i * k, a, t->i + i, t->k + k0, k);
    for (int64_t j = 0; j < t->n; j += RFI_NR)
      for (int64_t i = 0; i < t->m; i += RFI_MR)
        rfi_tile_n((int)least(t->m - i, RFI_MR), k, ap + i * k, k, bp + j * k, RFI_NR, to + i * TILE_N + j, TILE_N,
                   !parts && k0 > 0);
    if (parts) add_part(a, b, t, t->k + k0, to, c);
  }
  return c;
}

typedef struct finish {
  float scale_a, scale_b;
  const rfi_arg *bias, *bias_scale; /* NULL: none */
  int64_t bias_at;                  /* index of the bias of b's row 0 */
  const rfi_arg *y;
  int64_t y_at; /* index of the result of rows 0, 0 */
  bool accumulate;
} finish;

/* y rows = C scale_a scale_b + bias + acc, rounded once. */
static void store(const finish *f, const tile *t, int64_t N, float *c) {
  const rfr_dtype to = f->y->type.dtype;
  for (int64_t i = 0; i < t->m; i++) {
    float *row = c + i * TILE_N;
    const int64_t at = f->y_at + (t->i + i) * N + t->j;
    const float by = f->bias_scale ? rfi_get(f->bias_scale->data, f->bias_scale->type.dtype, t->i + i) : 1;
    for (int64_t j = 0; j < t->n; j++) row[j] = row[j] * f->scale_a * f->scale_b;
    for (int64_t j = 0; f->bias && j < t->n; j++)
      row[j] += by * rfi_get(f->bias->data, f->bias->type.dtype, f->bias_at + t->j + j);
    for (int64_t j = 0; f->accumulate && j < t->n; j++) row[j] += rfi_get(f->y->data, to, at + j);
    rfi_narrow((void *)rfi_at(f->y->data, to, at), to, row, t->n);
  }
}

static const rfi_arg *given(const rfi_call *c, int i) { return i < c->n_in && c->in[i].data ? &c->in[i] : NULL; }

static int threads_of(const rfi_call *c, int64_t work) {
  const int64_t most = work / MIN_TILE_WORK;
  return c->threads < 1 || most < 2 ? 1 : (int)least(c->threads, most);
}

static float *scratch_of(const rfi_call *c) { return (float *)c->workspace + SCRATCH * (int64_t)rfi_thread(); }

/* ---- matmul_scaled ---- */

static int64_t work_of(const rfi_call *c) {
  const rfr_type *a = &c->in[0].type;
  return rfi_count(&c->out[0].type) * a->shape[1] * (a->dtype == RFR_U8 ? 2 : 1);
}

static size_t workspace(const rfi_call *c) { return (size_t)threads_of(c, work_of(c)) * SCRATCH * sizeof(float); }

static rfr_status run(const rfi_call *call) {
  const operand a =
      operand_of(call, RFI_IN_matmul_scaled_a, RFI_IN_matmul_scaled_scale_a, RFI_IN_matmul_scaled_global_a);
  const operand b =
      operand_of(call, RFI_IN_matmul_scaled_b, RFI_IN_matmul_scaled_scale_b, RFI_IN_matmul_scaled_global_b);
  const finish f = {.scale_a = late_scale(&a, 0),
                    .scale_b = late_scale(&b, 0),
                    .bias = given(call, RFI_IN_matmul_scaled_bias),
                    .y = &call->out[0],
                    .accumulate = given(call, RFI_IN_matmul_scaled_acc)};
  const int64_t across = rfi_blocks_of(b.rows, TILE_N), tiles = rfi_blocks_of(a.rows, TILE_M) * across;
  const int threads = threads_of(call, work_of(call));
  (void)threads; /* unused without OpenMP */
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < tiles; k++) {
    tile t = {.i = k / across * TILE_M, .j = k % across * TILE_N, .K = a.row};
    t.m = least(a.rows - t.i, TILE_M), t.n = least(b.rows - t.j, TILE_N);
    store(&f, &t, b.rows, multiply(&a, &b, &t, scratch_of(call)));
  }
  return RFR_OK;
}

/* ---- grouped_matmul_scaled ---- */

static rfr_status run_grouped(const rfi_call *call) {
  const operand a = operand_of(call, RFI_IN_grouped_matmul_scaled_a, RFI_IN_grouped_matmul_scaled_scale_a,
                               RFI_IN_grouped_matmul_scaled_global_a);
  const operand w = operand_of(call, RFI_IN_grouped_matmul_scaled_w, RFI_IN_grouped_matmul_scaled_scale_w,
                               RFI_IN_grouped_matmul_scaled_global_w);
  const rfi_arg *y = &call->out[0];
  const int32_t *offsets = call->in[RFI_IN_grouped_matmul_scaled_offsets].data;
  const int64_t G = call->in[RFI_IN_grouped_matmul_scaled_offsets].type.shape[0] - 1, R = a.rows,
                across = rfi_blocks_of(w.rows, TILE_N);
  const int64_t size = w.rows * (y->type.dtype == RFR_F32 ? 4 : 2);
  const int threads = threads_of(call, work_of(call));
  (void)threads;
  for (int64_t g = 0; g < G; g++) {
    const int64_t begin = rfi_group_begin(offsets, g, R), rows = rfi_group_end(offsets, g, R) - begin;
    const int64_t tiles = rfi_blocks_of(rows, TILE_M) * across;
    const operand b = slice_of(w, g);
    const finish f = {.scale_a = late_scale(&a, g),
                      .scale_b = late_scale(&b, g),
                      .bias = given(call, RFI_IN_grouped_matmul_scaled_bias),
                      .bias_scale = given(call, RFI_IN_grouped_matmul_scaled_scale),
                      .bias_at = g * w.rows,
                      .y = y};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < tiles; k++) {
      tile t = {.i = begin + k / across * TILE_M, .j = k % across * TILE_N, .K = a.row};
      t.m = least(begin + rows - t.i, TILE_M), t.n = least(w.rows - t.j, TILE_N);
      store(&f, &t, w.rows, multiply(&a, &b, &t, scratch_of(call)));
    }
  }
  const int64_t first = rfi_group_begin(offsets, 0, R), last = rfi_group_begin(offsets, G, R);
  memset(y->data, 0, (size_t)(first * size));
  memset((char *)y->data + last * size, 0, (size_t)((R - last) * size));
  return RFR_OK;
}

/* ---- grouped_wgrad_scaled ---- */

static rfr_status run_wgrad(const rfi_call *call) {
  const operand dy = operand_of(call, RFI_IN_grouped_wgrad_scaled_dy, RFI_IN_grouped_wgrad_scaled_scale_dy,
                                RFI_IN_grouped_wgrad_scaled_global_dy);
  const operand x = operand_of(call, RFI_IN_grouped_wgrad_scaled_x, RFI_IN_grouped_wgrad_scaled_scale_x,
                               RFI_IN_grouped_wgrad_scaled_global_x);
  const int32_t *offsets = call->in[RFI_IN_grouped_wgrad_scaled_offsets].data;
  const int64_t G = call->out[0].type.shape[0], first = call->attr[2].i, block = rfi_group_block(dy.scaling);
  const int64_t across = rfi_blocks_of(x.rows, TILE_N), each = rfi_blocks_of(dy.rows, TILE_M) * across;
  const int threads = threads_of(call, work_of(call));
  (void)threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < G * each; k++) {
    const int64_t g = k / each, begin = rfi_group_begin(offsets, g, dy.row);
    const int64_t start = rfi_group_start(begin, first + g, block) * block;
    const int64_t rows = least(rfi_group_end(offsets, g, dy.row) - begin, dy.row - start);
    const finish f = {.scale_a = late_scale(&dy, g),
                      .scale_b = late_scale(&x, g),
                      .y = &call->out[0],
                      .y_at = g * dy.rows * x.rows,
                      .accumulate = given(call, RFI_IN_grouped_wgrad_scaled_acc)};
    tile t = {.i = k % each / across * TILE_M, .j = k % across * TILE_N, .k = start, .K = rows > 0 ? rows : 0};
    t.m = least(dy.rows - t.i, TILE_M), t.n = least(x.rows - t.j, TILE_N);
    if (rows > 0 || !f.accumulate) store(&f, &t, x.rows, multiply(&dy, &x, &t, scratch_of(call)));
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(matmul_scaled) = {run, workspace};
const rfi_kernel RFI_CPU(grouped_matmul_scaled) = {run_grouped, workspace};
const rfi_kernel RFI_CPU(grouped_wgrad_scaled) = {run_wgrad, workspace};
