/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize and grouped_quantize on the CPU, the reference of the kernels on GPUs.
 *
 * Both results are the same computation: `row` quantizes the lines of x along K, `col` those along M. A side describes
 * the positions of its lines, and a part quantizes panels of lines, in chunks of at most CHUNK elements that are
 * gathered into f32. A block of scaling never crosses a chunk or a panel, so results do not depend on how panels are
 * split. Slices, which are groups of rows or matrices of a batch, run one after the other.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/grouped/grouped.h"
#include "ops/quant/scaled.h"
#include "ops/walk.h"

enum { CHUNK = 128, PANEL = 32 };

typedef struct side {
  int64_t at, line, step;    /* offset of the slice in x; strides between lines and along a line */
  int64_t lines, length;     /* size of this slice */
  int64_t e, e_line, e_step; /* offset and strides of element numbers, on which random numbers depend */
  int64_t q_at, q_row;       /* in elements of the result: start of the slice, length of a row */
  int64_t scale_at, scale_row;
  int q, scale, global; /* result indices */
  bool hadamard;
  float by, encode_global; /* factor of a tensor; factor of nv16 */
} side;

typedef struct job {
  rfi_call call; /* must be the first field: the parts get a pointer to it */
  rfi_scaling_info info;
  rfr_dtype format;
  int64_t options;
  const rfi_arg *scale;
  rfi_rounding random;
  side s;
} job;

typedef float chunk[CHUNK];

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t panel_lines(const job *j) { return j->info.rows > 1 ? j->info.rows : PANEL; }
static int64_t panels(const job *j) { return rfi_blocks_of(j->s.lines, panel_lines(j)); }

/* Reads m lines of n elements; a Hadamard transform pads n to a multiple of 16 with zeros. */
static int64_t gather(const job *j, int64_t line, int64_t m, int64_t k, int64_t n, chunk *x) {
  const side *s = &j->s;
  const rfi_arg *from = &j->call.in[0];
  const int64_t at = s->at + line * s->line + k * s->step;
  float buffer[RFI_BLOCK];
  if (s->line == 1 && s->step != 1)
    for (int64_t i = 0; i < n; i++) {
      const float *v = rfi_read(buffer, from, at + i * s->step, 1, m);
      for (int64_t l = 0; l < m; l++) x[l][i] = v[l];
    }
  else
    for (int64_t l = 0; l < m; l++) memcpy(x[l], rfi_read(buffer, from, at + l * s->line, s->step, n), (size_t)n * 4);
  if (!s->hadamard) return n;
  const int64_t padded = rfi_blocks_of(n, RFI_HADAMARD) * RFI_HADAMARD;
  for (int64_t l = 0; l < m; l++) {
    memset(x[l] + n, 0, (size_t)(padded - n) * 4);
    for (int64_t i = 0; i < padded; i += RFI_HADAMARD) rfi_hadamard(x[l] + i);
  }
  return padded;
}

static uint32_t amax_of(const float *x, int64_t n) {
  uint32_t m = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = rfi_magnitude(x[i]);
    m = u > m ? u : m;
  }
  return m;
}

/* ---- the largest magnitude ---- */

static void amax_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const job *j = (const job *)c;
  const int64_t lines = panel_lines(j);
  chunk x[CHUNK];
  uint32_t most = 0;
  for (int64_t p = begin; p < end; p++) {
    const int64_t m = least(j->s.lines - p * lines, lines);
    for (int64_t k = 0; k < j->s.length; k += CHUNK) {
      const int64_t n = gather(j, p * lines, m, k, least(j->s.length - k, CHUNK), x);
      for (int64_t l = 0; l < m; l++) {
        const uint32_t u = amax_of(x[l], n);
        most = u > most ? u : most;
      }
    }
  }
  ((uint32_t *)c->workspace)[part] = most;
}

static uint32_t amax_of_side(const job *j) {
  const int64_t n = panels(j), cost = panel_lines(j) * j->s.length;
  const uint32_t *found = j->call.workspace;
  uint32_t most = 0;
  if (n == 0) return 0;
  rfi_parallel(&j->call, n, cost, amax_part);
  for (int p = 0; p < rfi_parts(&j->call, n, cost); p++) most = found[p] > most ? found[p] : most;
  return most;
}

/* ---- encoding ---- */

static void encode8(const job *j, uint8_t *restrict q, const float *restrict x, float by, int64_t n) {
  if (j->format == RFR_E4M3)
    for (int64_t i = 0; i < n; i++) q[i] = rfi_e4m3_encode(x[i], by);
  else
    for (int64_t i = 0; i < n; i++) q[i] = rfi_e5m2_encode(x[i], by);
}

/* Encodes elements from number e on; the first of two in a byte has the low bits. */
static void encode4(const job *j, uint8_t *q, const float *x, float by, int64_t n, int64_t e) {
  const bool random = j->options & RFR_QUANTIZE_STOCHASTIC;
  for (int64_t i = 0; i < n; i++) {
    const float v = x[i] * by;
    const uint32_t bits =
        random ? rfi_rounding_bits(&j->random, (uint64_t)(e + i * j->s.e_step), j->s.q == RFI_OUT_quantize_col) : 0;
    const uint8_t code = random ? rfi_e2m1_narrow_random(v, bits) : rfi_e2m1_narrow(v);
    q[i / 2] = (uint8_t)(i % 2 ? q[i / 2] | code << 4 : code);
  }
}

static void encode(const job *j, int64_t line, int64_t k, const float *x, float by, int64_t n) {
  const side *s = &j->s;
  uint8_t *q = j->call.out[s->q].data;
  const int64_t at = line * s->q_row + s->q_at + k;
  if (!q) return;
  if (j->format == RFR_E2M1) encode4(j, q + at / 2, x, by, n, s->e + line * s->e_line + k * s->e_step);
  else encode8(j, q + at, x, by, n);
}

static void store_scale(const job *j, int64_t line, int64_t block, const rfi_block_scale *scale) {
  void *to = j->call.out[j->s.scale].data;
  const int64_t at = line * j->s.scale_row + j->s.scale_at + block;
  if (!to) return;
  if (j->info.scale == RFR_F32) ((float *)to)[at] = scale->inverse;
  else ((uint8_t *)to)[at] = scale->stored;
}

/* Encodes a block of m lines that share a scale. */
static void encode_block(const job *j, int64_t line, int64_t m, int64_t k, const chunk *x, int64_t at, int64_t n) {
  const bool once = j->info.scale == RFR_F32;
  uint32_t amax = 0;
  for (int64_t l = 0; l < m; l++) {
    const uint32_t u = amax_of(x[l] + at, n);
    amax = u > amax ? u : amax;
  }
  const rfi_block_scale scale =
      rfi_block_scale_of(amax, j->info.scale, j->format, rfi_largest_input(j->call.in[0].type.dtype),
                         (j->options & RFR_QUANTIZE_POW2) != 0, j->s.encode_global);
  for (int64_t l = 0; l < m; l++) {
    encode(j, line + l, k + at, x[l] + at, scale.by, n);
    if (l == 0 || !once) store_scale(j, once ? line / j->info.rows : line + l, (k + at) / j->info.block, &scale);
  }
}

static void encode_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const job *j = (const job *)c;
  const int64_t lines = panel_lines(j), rows = j->info.rows > 0 ? j->info.rows : 1;
  chunk x[CHUNK];
  for (int64_t p = begin; p < end; p++) {
    const int64_t line = p * lines, m = least(j->s.lines - line, lines);
    for (int64_t k = 0; k < j->s.length; k += CHUNK) {
      const int64_t n = gather(j, line, m, k, least(j->s.length - k, CHUNK), x);
      if (j->info.block == 0)
        for (int64_t l = 0; l < m; l++) encode(j, line + l, k, x[l], j->s.by, n);
      for (int64_t at = 0; j->info.block > 0 && at < n; at += j->info.block)
        for (int64_t l = 0; l < m; l += rows)
          encode_block(j, line + l, least(m - l, rows), k, x + l, at, least(n - at, j->info.block));
    }
  }
}

/* ---- slices ---- */

static void put(const job *j, int result, int64_t slice, float x) {
  if (j->call.out[result].data) ((float *)j->call.out[result].data)[slice] = x;
}

static bool wanted(const job *j) { return j->call.out[j->s.q].data || (j->info.block && j->call.out[j->s.scale].data); }

/* Encodes one result of one slice; amax is that of the slice. */
static void quantize_side(job *j, int64_t slice, uint32_t amax) {
  side *s = &j->s;
  s->by = s->encode_global = 1;
  if (j->info.scale == RFR_E4M3) {
    const bool own = s->hadamard && (wanted(j) || j->call.out[s->global].data);
    s->encode_global = rfi_global_of(own ? amax_of_side(j) : amax);
  } else if (j->info.block == 0) {
    s->by = j->scale ? ((const float *)j->scale->data)[slice * j->scale->stride[0]]
                     : rfi_scale_of(amax, rfi_largest(j->format), RFI_F32_LARGEST, j->options & RFR_QUANTIZE_POW2);
    put(j, s->scale, slice, 1.0f / s->by);
  }
  put(j, s->global, slice, 1.0f / s->encode_global);
  if (wanted(j)) rfi_parallel(&j->call, panels(j), panel_lines(j) * s->length, encode_part);
}

static bool needs_amax(const job *j) {
  return j->call.out[RFI_OUT_quantize_amax].data || j->info.scale == RFR_E4M3 || (j->info.block == 0 && !j->scale);
}

static void quantize_slice(job *j, int64_t slice, const side *row, const side *col) {
  j->s = *row;
  const uint32_t amax = needs_amax(j) ? amax_of_side(j) : 0;
  put(j, RFI_OUT_quantize_amax, slice, rfi_number(amax));
  quantize_side(j, slice, amax);
  j->s = *col;
  quantize_side(j, slice, amax);
}

static job begin(const rfi_call *call, int scale) {
  job j = {.call = *call,
           .info = rfi_scaling_info_of(call->attr[RFI_AT_quantize_scaling].i),
           .format = (rfr_dtype)call->attr[RFI_AT_quantize_format].i,
           .options = call->attr[RFI_AT_quantize_options].i};
  const rfi_arg *given = call->n_in > scale ? &call->in[scale] : NULL;
  const rfi_arg *step = call->n_in > scale + 1 ? &call->in[scale + 1] : NULL;
  const rfi_arg *microbatch = call->n_in > scale + 2 ? &call->in[scale + 2] : NULL;
  if (given && given->data) j.scale = given;
  if (step && step->data) {
    const int64_t *block = step->data;
    const int32_t m = microbatch && microbatch->data ? *(const int32_t *)microbatch->data : call->microbatch;
    j.random = (rfi_rounding){
        .key = rfi_stream_key((uint64_t)block[2 * step->stride[0]], (uint64_t)call->attr[RFI_AT_quantize_stream].i),
        .attempted = (uint64_t)block[0],
        .site = (uint32_t)call->attr[RFI_AT_quantize_site].i,
        .microbatch = m > 0 ? (uint32_t)m : 0};
  }
  return j;
}

/* Calls for each block of a row or column of n elements. */
static int64_t scales_of(const job *j, int64_t n) { return j->info.block ? rfi_blocks_of(n, j->info.block) : 0; }
static int64_t scale_lines(const job *j, int64_t lines) {
  return j->info.scale == RFR_F32 && j->info.rows > 1 ? rfi_blocks_of(lines, j->info.rows) : lines;
}

static rfr_status run_quantize(const rfi_call *call) {
  const rfi_arg *x = &call->in[0];
  const int r = x->type.rank;
  const int64_t M = x->type.shape[r - 2], K = x->type.shape[r - 1], slices = r == 3 ? x->type.shape[0] : 1;
  const int64_t down = x->stride[r - 2], across = x->stride[r - 1];
  job j = begin(call, 1);
  for (int64_t g = 0; g < slices; g++) {
    const int64_t at = r == 3 ? g * x->stride[0] : 0, e = g * M * K, row_scales = scales_of(&j, K),
                  col_scales = scales_of(&j, M);
    const side row = {.at = at,
                      .line = down,
                      .step = across,
                      .lines = M,
                      .length = K,
                      .e = e,
                      .e_line = K,
                      .e_step = 1,
                      .q_at = e,
                      .q_row = K,
                      .scale_at = g * scale_lines(&j, M) * row_scales,
                      .scale_row = row_scales,
                      .q = RFI_OUT_quantize_row,
                      .scale = RFI_OUT_quantize_row_scale,
                      .global = RFI_OUT_quantize_row_global};
    const side col = {.at = at,
                      .line = across,
                      .step = down,
                      .lines = K,
                      .length = M,
                      .e = e,
                      .e_line = 1,
                      .e_step = K,
                      .q_at = e,
                      .q_row = M,
                      .scale_at = g * scale_lines(&j, K) * col_scales,
                      .scale_row = col_scales,
                      .q = RFI_OUT_quantize_col,
                      .scale = RFI_OUT_quantize_col_scale,
                      .global = RFI_OUT_quantize_col_global,
                      .hadamard = (j.options & RFR_QUANTIZE_HADAMARD) != 0};
    quantize_slice(&j, g, &row, &col);
  }
  return RFR_OK;
}

/* ---- groups ---- */

static void clear(const rfi_arg *y, int64_t first_row, int64_t rows) {
  const int64_t row = y->type.shape[1];
  const int64_t bytes = row * (rfr_dtype_bits(y->type.dtype) / 8);
  if (y->data && rows > 0) memset((char *)y->data + first_row * bytes, 0, (size_t)(rows * bytes));
}

static rfr_status run_grouped(const rfi_call *call) {
  const rfi_arg *x = &call->in[0];
  const int32_t *offsets = call->in[1].data;
  const int64_t R = x->type.shape[0], K = x->type.shape[1], G = call->in[1].type.shape[0] - 1;
  const int64_t down = x->stride[0], across = x->stride[1], scaling = call->attr[RFI_AT_quantize_scaling].i;
  const int64_t block = rfi_group_block(scaling), columns = rfi_group_columns(scaling, R, G);
  job j = begin(call, 2);
  const bool blocks = j.info.block > 0;
  const int64_t row_scales = scales_of(&j, K), first = rfi_group_begin(offsets, 0, R),
                last = rfi_group_begin(offsets, G, R);
  clear(&call->out[RFI_OUT_quantize_col], 0, K);
  clear(&call->out[RFI_OUT_quantize_row], 0, first);
  clear(&call->out[RFI_OUT_quantize_row], last, R - last);
  if (blocks) {
    clear(&call->out[RFI_OUT_quantize_col_scale], 0, K);
    clear(&call->out[RFI_OUT_quantize_row_scale], 0, first);
    clear(&call->out[RFI_OUT_quantize_row_scale], last, R - last);
  }
  for (int64_t g = 0; g < G; g++) {
    const int64_t begin = rfi_group_begin(offsets, g, R), rows = rfi_group_end(offsets, g, R) - begin;
    const int64_t at = begin * down, e = begin * K, start = rfi_group_start(begin, g, block);
    const side row = {.at = at,
                      .line = down,
                      .step = across,
                      .lines = rows,
                      .length = K,
                      .e = e,
                      .e_line = K,
                      .e_step = 1,
                      .q_at = e,
                      .q_row = K,
                      .scale_at = begin * row_scales,
                      .scale_row = row_scales,
                      .q = RFI_OUT_quantize_row,
                      .scale = RFI_OUT_quantize_row_scale,
                      .global = RFI_OUT_quantize_row_global};
    const side col = {.at = at,
                      .line = across,
                      .step = down,
                      .lines = K,
                      .length = rows,
                      .e = e,
                      .e_line = 1,
                      .e_step = K,
                      .q_at = start * block,
                      .q_row = columns,
                      .scale_at = start,
                      .scale_row = columns / block,
                      .q = RFI_OUT_quantize_col,
                      .scale = RFI_OUT_quantize_col_scale,
                      .global = RFI_OUT_quantize_col_global,
                      .hadamard = (j.options & RFR_QUANTIZE_HADAMARD) != 0};
    quantize_slice(&j, g, &row, &col);
  }
  return RFR_OK;
}

static size_t workspace(const rfi_call *c) { return (size_t)(c->threads > 1 ? c->threads : 1) * sizeof(uint32_t); }

const rfi_kernel RFI_CPU(quantize) = {run_quantize, workspace};
const rfi_kernel RFI_CPU(grouped_quantize) = {run_grouped, workspace};
