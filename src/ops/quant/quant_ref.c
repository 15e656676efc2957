/* SPDX-License-Identifier: Apache-2.0
 *
 * The quantizers and the scaled GEMMs as formulas, and their cases. Scales are f32 quotients by definition, and so they
 * are in the reference; with them every number in 8 or 4 bits is exactly determined. Elements are converted by
 * rfr_float_to_bits, which shares no code with the kernels.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "ops/quant/scaled.h"
#include "support/op_case.h"

/* One result of a slice: v (lines, length), already transposed and transformed. */
typedef struct lines {
  const rfi_call *call;
  const float *v;
  int64_t lines, length;
  int64_t q_at, q_row, scale_at, scale_row; /* as in quantize_cpu.c */
  int64_t e, e_line, e_step;
  int q, scale, global;
  float by, tensor_scale; /* tensor; nv16: 2688 / amax */
} lines;

static float limit(float x) { return x > FLT_MAX ? FLT_MAX : x; }

static float largest(const rfi_call *c) {
  return rfr_float_from_bits((rfr_dtype)c->attr[0].i, c->attr[0].i == RFR_E4M3   ? 0x7E
                                                      : c->attr[0].i == RFR_E5M2 ? 0x7B
                                                                                 : 7);
}

/* The overflow of a scale depends on x's type, which the reference does not know; quant_test covers it. */
static float factor(float amax, float most, bool pow2) {
  if (!(amax > 0) || isinf(amax)) return 1;
  float s = most / amax;
  if (isinf(s)) s = FLT_MAX;
  if (pow2 && s < FLT_MIN) return 0; /* a subnormal has no exponent bits */
  return pow2 ? (float)ldexp(1, ilogbf(s)) : s;
}

static float amax_of(const float *v, int64_t n) {
  float m = 0;
  for (int64_t i = 0; i < n; i++) m = isnan(m) || isnan(v[i]) ? NAN : fmaxf(m, fabsf(v[i]));
  return m;
}

static void store(const lines *l, int64_t i, int64_t k, float x) {
  const rfi_arg *y = &l->call->out[l->q];
  const rfr_dtype format = (rfr_dtype)l->call->attr[0].i;
  const int64_t at = i * l->q_row + l->q_at + k;
  uint32_t code = rfr_float_to_bits(format, x);
  if (!y->data) return;
  if (format != RFR_E2M1) {
    ((double *)y->data)[at] = rfr_float_from_bits(format, code);
    return;
  }
  if (l->call->attr[2].i & RFR_QUANTIZE_STOCHASTIC && !isnan(x)) {
    const int first = l->call->in[1].type.dtype == RFR_I32 ? 3 : 2;
    const int64_t *step = l->call->in[first].data, e = l->e + i * l->e_line + k * l->e_step;
    const uint64_t key = rfi_stream_key((uint64_t)step[2], (uint64_t)l->call->attr[4].i);
    const uint32_t microbatch = l->call->microbatch > 0 ? (uint32_t)l->call->microbatch : 0;
    const rfi_u32x4 draw = rfi_draw4(key, (uint64_t)e / 4, (uint32_t)l->call->attr[3].i, microbatch, (uint64_t)step[0]);
    const double u = (double)(draw.v[e % 4] >> (l->q == RFI_OUT_quantize_col ? 8 : 0) & 255) / 256;
    const double a = fabs((double)x), size = a < 2 ? 0.5 : a < 4 ? 1 : 2, t = (double)(float)(a + u * size);
    for (code = 7; code > 0 && rfr_float_from_bits(RFR_E2M1, code) > t;) code--;
    code |= signbit(x) ? 8 : 0;
  }
  uint8_t *q = (uint8_t *)y->data + at / 2;
  *q = (uint8_t)(at % 2 ? (*q & 15) | code << 4 : (*q & 240) | code);
}

static void quantize_lines(const lines *l) {
  const rfi_call *c = l->call;
  const rfi_scaling_info info = rfi_scaling_info_of(c->attr[1].i);
  const int64_t block = info.block ? info.block : 1, rows = info.rows ? info.rows : 1;
  double *scale = c->out[l->scale].data;
  for (int64_t i0 = 0; i0 < l->lines; i0 += rows)
    for (int64_t k0 = 0; k0 < l->length; k0 += block) {
      float amax = 0, by = l->by;
      double stored = 0;
      const int64_t i1 = i0 + rows < l->lines ? i0 + rows : l->lines,
                    k1 = k0 + block < l->length ? k0 + block : l->length;
      for (int64_t i = i0; i < i1; i++) {
        const float m = amax_of(l->v + i * l->length + k0, k1 - k0);
        amax = isnan(m) || isnan(amax) ? NAN : fmaxf(amax, m);
      }
      if (info.block && info.scale == RFR_F32) {
        by = factor(amax, largest(c), c->attr[2].i & RFR_QUANTIZE_POW2);
        stored = 1.0f / by;
      } else if (info.scale == RFR_E8M0) {
        const uint32_t e = rfr_float_to_bits(RFR_E8M0, amax * (1.0f / largest(c)));
        stored = rfr_float_from_bits(RFR_E8M0, e);
        by = e == 0xFF ? NAN : (float)ldexp(1, 127 - (int)e);
      } else if (info.scale == RFR_E4M3) {
        stored =
            rfr_float_from_bits(RFR_E4M3, rfr_float_to_bits(RFR_E4M3, limit(amax * (l->tensor_scale * (1.0f / 6)))));
        by = limit(1.0f / ((float)stored * (1.0f / l->tensor_scale)));
      }
      for (int64_t i = i0; i < i1; i++) {
        if (info.block && scale && c->attr[1].i != RFR_SCALING_BLOCK128)
          scale[i * l->scale_row + l->scale_at + k0 / block] = stored;
        for (int64_t k = k0; k < k1; k++) store(l, i, k, l->v[i * l->length + k] * by);
      }
      if (scale && c->attr[1].i == RFR_SCALING_BLOCK128)
        scale[i0 / rows * l->scale_row + l->scale_at + k0 / block] = stored;
    }
}

/* 16 numbers times the matrix whose element (i, j) is sign i * (-1)^(bits of i & j) / 4. */
static void transform(float *v) {
  static const int sign[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  float x[16];
  for (int i = 0; i < 16; i++) x[i] = (float)sign[i] * v[i];
  for (int h = 1; h < 16; h *= 2) { /* in the order of the definition: pairs at distance 1, 2, 4, 8 */
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = i & h ? x[i - h] - x[i] : x[i] + x[i + h];
    memcpy(x, y, sizeof x);
  }
  for (int i = 0; i < 16; i++) v[i] = rfr_float_from_bits(RFR_BF16, rfr_float_to_bits(RFR_BF16, x[i] / 4));
}

static void put(const rfi_call *c, int result, int64_t slice, double x) {
  if (c->out[result].data) ((double *)c->out[result].data)[slice] = x;
}

/* A slice of x (rows, K) with row results from row q_row on, and col results from column q_col on. */
static void quantize_slice(const rfi_call *c, int64_t slice, const double *x, int64_t rows, int64_t K,
                           const double *given, lines row, lines col) {
  const rfi_scaling_info info = rfi_scaling_info_of(c->attr[1].i);
  const bool hadamard = c->attr[2].i & RFR_QUANTIZE_HADAMARD;
  const int64_t length = hadamard ? (rows + 15) / 16 * 16 : rows;
  float *a = calloc((size_t)(rows * K) + 1, sizeof *a), *b = calloc((size_t)(length * K) + 1, sizeof *b);
  if (!a || !b) abort();
  for (int64_t i = 0; i < rows; i++)
    for (int64_t k = 0; k < K; k++) b[k * length + i] = a[i * K + k] = (float)x[i * K + k];
  for (int64_t i = 0; i < length * K && hadamard; i += 16) transform(b + i);
  const float amax = amax_of(a, rows * K), other = hadamard ? amax_of(b, length * K) : amax;
  row.call = col.call = c;
  row.v = a, row.lines = rows, row.length = K, row.q = RFI_OUT_quantize_row, row.scale = RFI_OUT_quantize_row_scale;
  col.v = b, col.lines = K, col.length = length, col.q = RFI_OUT_quantize_col, col.scale = RFI_OUT_quantize_col_scale;
  row.by = col.by = given ? (float)given[slice] : factor(amax, largest(c), c->attr[2].i & RFR_QUANTIZE_POW2);
  row.tensor_scale = limit(factor(amax, 2688, false));
  col.tensor_scale = limit(factor(other, 2688, false));
  put(c, RFI_OUT_quantize_amax, slice, amax);
  put(c, RFI_OUT_quantize_row_global, slice, info.scale == RFR_E4M3 ? 1.0f / row.tensor_scale : 1);
  put(c, RFI_OUT_quantize_col_global, slice, info.scale == RFR_E4M3 ? 1.0f / col.tensor_scale : 1);
  if (info.block == 0) put(c, RFI_OUT_quantize_row_scale, slice, 1.0f / row.by);
  if (info.block == 0) put(c, RFI_OUT_quantize_col_scale, slice, 1.0f / col.by);
  quantize_lines(&row);
  quantize_lines(&col);
  free(a);
  free(b);
}

static int64_t scales(int64_t n, int block) { return block ? (n + block - 1) / block : 0; }

RFT_REF(quantize) {
  const rfr_type *x = &call->in[0].type;
  const rfi_scaling_info info = rfi_scaling_info_of(call->attr[1].i);
  const int64_t M = x->shape[x->rank - 2], K = x->shape[x->rank - 1], G = x->rank == 3 ? x->shape[0] : 1;
  const bool square = call->attr[1].i == RFR_SCALING_BLOCK128;
  for (int64_t g = 0; g < G; g++) {
    const int64_t e = g * M * K, rs = scales(K, info.block), cs = scales(M, info.block);
    const lines row = {.q_at = e,
                       .q_row = K,
                       .scale_at = g * (square ? cs : M) * rs,
                       .scale_row = rs,
                       .e = e,
                       .e_line = K,
                       .e_step = 1};
    const lines col = {.q_at = e,
                       .q_row = M,
                       .scale_at = g * (square ? rs : K) * cs,
                       .scale_row = cs,
                       .e = e,
                       .e_line = 1,
                       .e_step = K};
    quantize_slice(call, g, (const double *)call->in[0].data + e, M, K, call->in[1].data, row, col);
  }
}

static void zero(const rfi_arg *y) {
  const int64_t n = rfi_count(&y->type);
  if (y->data) memset(y->data, 0, (size_t)n * (y->type.dtype == RFR_U8 ? 1 : sizeof(double)));
  for (int64_t i = 0; y->data && i < n && y->type.dtype != RFR_U8; i++) ((double *)y->data)[i] = 0;
}

RFT_REF(grouped_quantize) {
  const int64_t R = call->in[0].type.shape[0], K = call->in[0].type.shape[1], G = call->in[1].type.shape[0] - 1;
  const rfi_scaling_info info = rfi_scaling_info_of(call->attr[1].i);
  const int64_t block = info.block ? info.block : 128, columns = (scales(R, (int)block) + G) * block;
  const int32_t *offsets = call->in[1].data;
  for (int j = 0; j <= RFI_OUT_quantize_col_scale; j++)
    if (j < RFI_OUT_quantize_row_scale || info.block) zero(&call->out[j]);
  for (int64_t g = 0; g < G; g++) {
    const int64_t e = offsets[g] * K, rs = scales(K, info.block), at = offsets[g] / block + g;
    const lines row = {
        .q_at = e, .q_row = K, .scale_at = offsets[g] * rs, .scale_row = rs, .e = e, .e_line = K, .e_step = 1};
    const lines col = {.q_at = at * block,
                       .q_row = columns,
                       .scale_at = at,
                       .scale_row = columns / block,
                       .e = e,
                       .e_line = 1,
                       .e_step = K};
    quantize_slice(call, g, (const double *)call->in[0].data + e, offsets[g + 1] - offsets[g], K, call->in[2].data, row,
                   col);
  }
}

RFT_CASES(quantize) = {
    "quantize(f[7,13]) format=e4m3",
    "quantize(f[1,17]) format=e5m2",
    "quantize(f[19,1]) format=e4m3 options=1",
    "quantize(f[67,521]) format=e5m2",
    "quantize(f[131,37]>0) format=e4m3",
    "quantize(f[5,1031], F[1]=37.5) format=e4m3",
    "quantize(f[3,5]=0) format=e4m3",
    "quantize(f[3,4]=inf) format=e5m2",
    "quantize(f[4,3]=1e-37) format=e4m3",
    "quantize(f[2,9]=3e38) format=e4m3 options=1",
    "quantize(f[0,5]) format=e4m3",
    "quantize(f[5,0]) format=e4m3",
    "quantize(f[23,11]^T) format=e5m2",
    "quantize(f[3,14,9]) format=e4m3",
    "quantize(f[256,384]) format=e4m3",
    "quantize(f[128,256], F[1]=37.5) format=e5m2",
    "quantize(f[2,128,128]@9=nan, F[2]=3) format=e4m3",
    "quantize(f[2,7,5], F[2]=3) format=e5m2",
    "quantize(f[9,4]@3=nan) format=e4m3",
    "quantize(f[7,13]) format=e4m3 scaling=1",
    "quantize(f[259,131]) format=e5m2 scaling=1 options=1",
    "quantize(f[131,262]@3=nan) format=e4m3 scaling=1",
    "quantize(f[9,4]@2=inf) format=e4m3 scaling=1",
    "quantize(f[3,130]=1e-35) format=e4m3 scaling=1",
    "quantize(f[3,7]=0) format=e4m3 scaling=1",
    "quantize(f[2,137,9]) format=e4m3 scaling=1",
    "quantize(f[0,5]) format=e4m3 scaling=1",
    "quantize(f[256,384]) format=e4m3 scaling=1 options=1",
    "quantize(f[2,128,256]@1=nan) format=e5m2 scaling=1",
    "quantize(f[384,256]) format=e4m3 scaling=2 options=1",
    "quantize(f[2,256,128]@1=inf) format=e4m3 scaling=2",
    "quantize(f[5,9]) format=e4m3 scaling=2",
    "quantize(f[259,131]) format=e4m3 scaling=2 options=1",
    "quantize(f[2,131,140]) format=e5m2 scaling=2",
    "quantize(f[7,13]) format=e4m3 scaling=3",
    "quantize(f[70,131]) format=e4m3 scaling=3",
    "quantize(f[37,70]@3=nan) format=e5m2 scaling=3",
    "quantize(f[5,33]@3=inf) format=e4m3 scaling=3",
    "quantize(f[5,33]=0) format=e4m3 scaling=3",
    "quantize(f[3,33]=1e-38) format=e4m3 scaling=3",
    "quantize(f[3,40,71]) format=e4m3 scaling=4",
    "quantize(f[70,131]) format=e5m2 scaling=4",
    "quantize(f[8,14]) format=e2m1 scaling=5",
    "quantize(f[146,70]) format=e2m1 scaling=5",
    "quantize(f[32,18]) format=e2m1 scaling=5 options=4",
    "quantize(f[144,260]) format=e2m1 scaling=5 options=4",
    "quantize(f[34,50], _, I[4]=3,2,77,0) format=e2m1 scaling=5 options=2 site=4 stream=9",
    "quantize(f[48,20], _, I[4]=1,1,5,0) @mb=3 format=e2m1 scaling=5 options=6 site=2",
    "quantize(f[4,18]@1=nan) format=e2m1 scaling=5",
    "quantize(f[4,18]=0) format=e2m1 scaling=5",
    "quantize(f[3,34,18]) format=e2m1 scaling=6",
    "quantize(f[18,130]) format=e2m1 scaling=6",
    "quantize(f[0,4]) format=e2m1 scaling=5",
    NULL,
};
RFT_CASES(grouped_quantize) = {
    "grouped_quantize(f[11,7], i[4]=0,4,4,9) format=e4m3",
    "grouped_quantize(f[13,5], i[3]=0,13,13, F[2]=7) format=e5m2",
    "grouped_quantize(f[300,9], i[4]=0,131,131,290) format=e4m3 scaling=1",
    "grouped_quantize(f[67,140], i[4]=0,33,64,65) format=e4m3 scaling=1 options=1",
    "grouped_quantize(f[300,256], i[4]=0,131,131,290) format=e4m3",
    "grouped_quantize(f[300,128], i[4]=3,131,140,300, F[3]=7) format=e5m2",
    "grouped_quantize(f[300,256]@1=nan, i[4]=0,131,131,290) format=e4m3 scaling=1 options=1",
    "grouped_quantize(f[500,128], i[36]=0,13,26,39,52,65,78,91,104,117,130,143,156,169,182,195,208,221,"
    "234,247,260,273,286,299,312,325,338,351,364,377,390,403,416,429,442,455) format=e4m3 options=1",
    "grouped_quantize(f[500,128], i[36]=0,13,26,39,52,65,78,91,104,117,130,143,156,169,182,195,208,221,"
    "234,247,260,273,286,299,312,325,338,351,364,377,390,403,416,429,442,455) format=e4m3 scaling=1",
    "grouped_quantize(f[67,37], i[4]=0,33,64,65) format=e5m2 scaling=3",
    "grouped_quantize(f[67,38], i[4]=0,31,64,65) format=e2m1 scaling=5",
    "grouped_quantize(f[67,38], i[5]=0,31,64,65,67) format=e2m1 scaling=5 options=4",
    "grouped_quantize(f[35,6], i[3]=0,17,33, _, I[4]=3,2,77,0) format=e2m1 scaling=5 options=2 site=1",
    "grouped_quantize(f[0,4], i[3]=0,0,0) format=e4m3",
    "grouped_quantize(f[5,4], i[1]=0) format=e4m3 scaling=1",
    "grouped_quantize(f[5,0], i[3]=0,2,4) format=e4m3 scaling=3",
    NULL,
};

/* ---- scaled GEMMs ---- */

static double code(const rfi_arg *q, int64_t i) {
  if (q->type.dtype != RFR_U8) return ((const double *)q->data)[i];
  return rfr_float_from_bits(RFR_E2M1, ((const uint8_t *)q->data)[i / 2] >> i % 2 * 4 & 15u);
}

/* The value of element (row, k) of slice g. */
static double value(const rfi_call *c, int q, int scale, int global, int64_t g, int64_t row, int64_t k) {
  const rfi_arg *x = &c->in[q], *s = &c->in[scale];
  const int r = x->type.rank;
  const int64_t rows = x->type.shape[r - 2], length = x->type.shape[r - 1] * (x->type.dtype == RFR_U8 ? 2 : 1);
  const int64_t at = (r == 3 ? g * rows * length : 0) + row * length + k;
  const double *by = s->data, *second = global < c->n_in ? c->in[global].data : NULL;
  double v = code(x, at) * (second ? second[g] : 1);
  if (s->type.rank == 1) return v * by[g];
  const int64_t lines = s->type.shape[r - 2], each = s->type.shape[r - 1];
  const int64_t block = x->type.dtype == RFR_U8 ? 16 : each == (length + 31) / 32 && length > 32 ? 32 : 128;
  const int64_t line = lines == rows ? row : row / 128;
  return v * by[(r == 3 ? g * lines * each : 0) + line * each + k / block];
}

RFT_REF(matmul_scaled) {
  const double *bias = call->in[RFI_IN_matmul_scaled_bias].data, *acc = call->in[RFI_IN_matmul_scaled_acc].data;
  double *y = call->out[0].data;
  const rfr_type *a = &call->in[0].type;
  int64_t M = a->shape[0], K = a->shape[1] * (a->dtype == RFR_U8 ? 2 : 1), N = call->in[1].type.shape[0];
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++)
        sum +=
            value(call, RFI_IN_matmul_scaled_a, RFI_IN_matmul_scaled_scale_a, RFI_IN_matmul_scaled_global_a, 0, i, k) *
            value(call, RFI_IN_matmul_scaled_b, RFI_IN_matmul_scaled_scale_b, RFI_IN_matmul_scaled_global_b, 0, j, k);
      y[i * N + j] = sum + (bias ? bias[j] : 0) + (acc ? acc[i * N + j] : 0);
    }
}
RFT_CASES(matmul_scaled) = {
    "matmul_scaled(e[7,13], e[5,13], F[1]=0.01, F[1]=0.37) to=f",
    "matmul_scaled(e[1,17], g[31,17], F[1]=1, F[1]=0.5, _, _, f[31]) to=f",
    "matmul_scaled(g[19,1], e[3,1], F[1]=0.3, F[1]=7) to=f32",
    "matmul_scaled(e[23,11], e[1,11], F[1]=0.3, F[1]=0.7, _, _, _, F[23,1]) to=f32",
    "matmul_scaled(e[5,9], e[6,9], F[1]=0.2, F[1]=0.3, F[1]=2, _, f[6], f[5,6]) to=f",
    "matmul_scaled(e[67,521], e[71,521], F[1]=0.02, F[1]=0.03, _, _, f[71]) to=f",
    "matmul_scaled(e[263,19], e[293,19], F[1]=0.1, F[1]=0.2) to=f",
    "matmul_scaled(e[64,48], g[80,48], F[1]=0.1, F[1]=0.2, _, _, f[80], f[64,80]) to=f",
    "matmul_scaled(e[7,5], e[3,5], F[1]=1e-17, F[1]=1e-17) to=f32",
    "matmul_scaled(e[0,4], e[3,4], F[1]=1, F[1]=1, _, _, f[3]) to=f",
    "matmul_scaled(e[5,4], e[0,4], F[1]=1, F[1]=1) to=f",
    "matmul_scaled(e[5,0], e[3,0], F[1]=1, F[1]=1, _, _, f[3]) to=f",
    "matmul_scaled(e[7,262], g[5,262], F[7,3], F[5,3]) to=f",
    "matmul_scaled(e[67,521], e[131,521], F[67,5], F[2,5], _, _, f[131]) to=f",
    "matmul_scaled(e[131,140], e[133,140], F[2,2], F[2,2], _, _, _, F[131,133]) to=f32",
    "matmul_scaled(e[9,140], g[3,140], F[9,2], F[1]=0.3) to=f",
    "matmul_scaled(e[64,256], e[80,256], F[64,2]>0, F[1,2]>0) to=bf16",
    "matmul_scaled(e[144,640], e[272,640], F[144,5]>0, F[3,5]>0) to=bf16",
    "matmul_scaled(g[400,384], e[144,384], F[4,3]>0, F[144,3]>0) to=bf16",
    "matmul_scaled(e[272,512], e[144,512], F[272,4]>0, F[144,4]>0) to=bf16",
    "matmul_scaled(e[7,70], e[5,70], p[7,3]>0, p[5,3]>0) to=f",
    "matmul_scaled(e[101,292], g[131,292], p[101,10]>0, p[131,10]>0, _, _, f[131], f[101,131]) to=f",
    "matmul_scaled(b[7,9]<256, b[5,9]<256, e[7,2], e[5,2], F[1]=0.1, F[1]=0.3) to=f",
    "matmul_scaled(b[101,137]<256, b[131,137]<256, e[101,18], e[131,18], F[1]=0.1, F[1]=2, f[131]) to=f",
    "matmul_scaled(b[3,70]<256, e[5,140], e[3,9], F[5,2], F[1]=0.1) to=f",
    NULL,
};

static void spread(double *x, int64_t rows, int64_t n, const int32_t *offsets, int64_t G) {
  for (int64_t i = offsets[G] * n; i < rows * n && G >= 0; i++) x[i] = NAN;
}

RFT_REF(grouped_matmul_scaled) {
  const int32_t *offsets = call->in[RFI_IN_grouped_matmul_scaled_offsets].data;
  const double *bias = call->in[RFI_IN_grouped_matmul_scaled_bias].data,
               *scale = call->in[RFI_IN_grouped_matmul_scaled_scale].data;
  double *y = call->out[0].data;
  const rfr_type *a = &call->in[0].type;
  int64_t R = a->shape[0], K = a->shape[1] * (a->dtype == RFR_U8 ? 2 : 1), N = call->in[1].type.shape[1];
  for (int64_t i = 0; i < R * N; i++) y[i] = 0;
  for (int64_t g = 0; g < call->in[1].type.shape[0]; g++)
    for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
      for (int64_t j = 0; j < N; j++) {
        double sum = 0;
        for (int64_t k = 0; k < K; k++)
          sum += value(call, RFI_IN_grouped_matmul_scaled_a, RFI_IN_grouped_matmul_scaled_scale_a,
                       RFI_IN_grouped_matmul_scaled_global_a, g, r, k) *
                 value(call, RFI_IN_grouped_matmul_scaled_w, RFI_IN_grouped_matmul_scaled_scale_w,
                       RFI_IN_grouped_matmul_scaled_global_w, g, j, k);
        y[r * N + j] = sum + (bias ? bias[g * N + j] * (scale ? scale[r] : 1) : 0);
      }
}
RFT_OPERANDS(grouped_matmul_scaled) {
  if (call->in[0].type.dtype != RFR_U8)
    spread(call->in[0].data, call->in[0].type.shape[0], call->in[0].type.shape[1], call->in[2].data,
           call->in[2].type.shape[0] - 1);
}
RFT_CASES(grouped_matmul_scaled) = {
    "grouped_matmul_scaled(e[11,7], e[3,5,7], i[4]=0,4,4,9, F[3]>0, F[3]>0) to=f",
    "grouped_matmul_scaled(e[13,9], g[4,6,9], i[5]=0,1,7,7,12, F[4]>0, F[4]>0, _, _, f[4,6], f[13]) to=f",
    "grouped_matmul_scaled(e[301,140], e[5,100,140], i[6]=0,64,129,129,257,290, F[301,2], F[5,1,2], _, _, f[5,100]) "
    "to=f",
    "grouped_matmul_scaled(e[67,262], e[2,131,262], i[3]=0,33,65, F[67,3], F[2,131,3]) to=f32",
    "grouped_matmul_scaled(e[301,144], e[5,104,144], i[6]=0,64,129,129,257,290, F[301,2]>0, F[5,1,2]>0, _, _, "
    "f[5,104]) to=bf16",
    "grouped_matmul_scaled(g[203,272], e[3,136,272], i[4]=0,70,70,199, F[3]>0, F[3]>0) to=bf16",
    "grouped_matmul_scaled(g[70,75], e[2,31,75], i[3]=0,3,70, p[70,3]>0, p[2,31,3]>0) to=f",
    "grouped_matmul_scaled(b[70,20]<256, b[2,31,20]<256, i[3]=0,3,69, e[70,3], e[2,31,3], F[2]>0, F[2]>0) to=f",
    "grouped_matmul_scaled(e[0,4], e[2,3,4], i[3]=0,0,0, F[2]>0, F[2]>0) to=f",
    "grouped_matmul_scaled(e[5,4], e[0,3,4], i[1]=0, F[0], F[0]) to=f",
    "grouped_matmul_scaled(e[5,0], e[2,3,0], i[3]=0,2,4, F[2]>0, F[2]>0, _, _, f[2,3]) to=f",
    NULL,
};

RFT_REF(grouped_wgrad_scaled) {
  const int32_t *offsets = call->in[RFI_IN_grouped_wgrad_scaled_offsets].data;
  const rfr_type *s = &call->in[RFI_IN_grouped_wgrad_scaled_scale_dy].type;
  const int64_t block = s->rank == 1 || s->dtype == RFR_F32 ? 128 : call->in[0].type.dtype == RFR_U8 ? 16 : 32;
  double *dw = call->out[0].data;
  const int64_t G = call->out[0].type.shape[0], N = call->out[0].type.shape[1], K = call->out[0].type.shape[2];
  const bool accumulate =
      call->n_in > RFI_IN_grouped_wgrad_scaled_acc && call->in[RFI_IN_grouped_wgrad_scaled_acc].data;
  /* the reference sees f64, so the type of the scales follows from the length of their rows */
  const int64_t length = call->in[0].type.shape[1] * (call->in[0].type.dtype == RFR_U8 ? 2 : 1);
  const int64_t own = s->rank == 1 ? block : length / (s->shape[1] > 0 ? s->shape[1] : 1);
  for (int64_t g = 0; g < G; g++) {
    const int64_t at = (offsets[g] / own + g + call->attr[2].i) * own;
    for (int64_t n = 0; n < N; n++)
      for (int64_t k = 0; k < K; k++) {
        double sum = 0, *to = &dw[(g * N + n) * K + k];
        for (int64_t r = 0; r < offsets[g + 1] - offsets[g]; r++)
          sum += value(call, RFI_IN_grouped_wgrad_scaled_dy, RFI_IN_grouped_wgrad_scaled_scale_dy,
                       RFI_IN_grouped_wgrad_scaled_global_dy, g, n, at + r) *
                 value(call, RFI_IN_grouped_wgrad_scaled_x, RFI_IN_grouped_wgrad_scaled_scale_x,
                       RFI_IN_grouped_wgrad_scaled_global_x, g, k, at + r);
        *to = accumulate ? *to + sum : sum;
      }
  }
}
RFT_CASES(grouped_wgrad_scaled) = {
    "grouped_wgrad_scaled(e[7,512], e[5,512], i[4]=0,4,4,9, F[3]>0, F[3]>0) to=f32 of=3",
    "grouped_wgrad_scaled(e[7,512], g[5,512], i[4]=0,4,4,9, F[3]>0, F[3]>0, _, _, F[3,7,5]) to=f32 of=3",
    "grouped_wgrad_scaled(e[9,768], e[131,768], i[4]=0,131,131,290, F[9,6], F[131,6]) to=f of=3",
    "grouped_wgrad_scaled(e[9,768], e[13,768], i[3]=131,131,290, F[9,6], F[13,6], _, _, f[2,9,13]) to=f of=3 first=1",
    "grouped_wgrad_scaled(e[136,640], e[264,640], i[4]=0,128,128,256, F[136,5]>0, F[264,5]>0) to=bf16 of=3",
    "grouped_wgrad_scaled(g[40,640], e[72,640], i[4]=0,128,128,256, F[3]>0, F[3]>0) to=bf16 of=3",
    "grouped_wgrad_scaled(g[37,192], e[6,192], i[4]=0,33,64,65, p[37,6]>0, p[6,6]>0) to=f32 of=3",
    "grouped_wgrad_scaled(b[38,64]<256, b[6,64]<256, i[4]=0,31,64,65, e[38,8], e[6,8], F[3]>0, F[3]>0) to=f of=3",
    "grouped_wgrad_scaled(e[4,256], e[3,256], i[3]=0,0,0, F[2]>0, F[2]>0) to=f of=2",
    "grouped_wgrad_scaled(e[4,128], e[3,128], i[1]=0, F[0], F[0]) to=f32",
    NULL,
};

/* ---- amax history ---- */

RFT_REF(collect_amax) {
  double *y = call->out[0].data;
  const int64_t n = 2 * call->attr[0].i;
  for (int64_t s = 0; s < n && !call->in[0].data; s++) y[s] = 0;
  for (int i = 1; i < call->n_in; i++)
    for (int64_t k = 0; k < call->in[i].type.shape[0]; k++) {
      const double x = fabs(((const double *)call->in[i].data)[k]);
      double *at = &y[(int64_t)call->attr[1].l.x[i - 1]];
      if (isfinite(x) && x > *at) *at = x;
    }
}
RFT_CASES(collect_amax) = {
    "collect_amax(F[2,3]>0, F[1]>0, F[7]>0, F[1]>0) slots=3 at=[0,5,0]",
    "collect_amax(_, F[1]>0, F[5], F[3]=inf, F[1]=1e-38, F[1]=0) slots=4 at=[7,1,3,2,0]",
    "collect_amax(F[2,5]>0, F[2]>0) slots=5 at=[9]",
    "collect_amax(_, F[1]=inf, F[300]>0) slots=2 at=[2,2]",
    NULL,
};

RFT_REF(scale_update) {
  double *history = call->out[0].data, *scale = call->out[1].data;
  const int64_t H = call->in[0].type.shape[0], S = call->in[0].type.shape[1];
  if (call->in[2].data && *(const int32_t *)call->in[2].data) return;
  for (int64_t s = 0; s < S; s++) {
    double amax = 0;
    int64_t row = 0;
    for (int64_t r = 0; r < call->in[3].type.shape[0]; r++) {
      const double x = fabs(((const double *)call->in[3].data)[r * S + s]);
      if (isfinite(x) && x > amax) amax = x, row = r;
    }
    if (amax == 0) continue;
    for (int64_t h = H - 1; h > 0; h--) history[h * S + s] = history[(h - 1) * S + s];
    history[s] = amax;
    for (int64_t h = 0; h < H; h++)
      if (!call->attr[1].i && history[h * S + s] > amax) amax = history[h * S + s];
    const float most = (float)ldexp(row % 2 ? 57344 : 448, -(int)call->attr[0].i);
    scale[s] = fminf(most / (float)amax, FLT_MAX);
  }
}
RFT_CASES(scale_update) = {
    "scale_update(F[5,3]>0, F[3]>0, i[1]=0, F[2,3]>0)",
    "scale_update(F[7,2]>0, F[2]>0, i[1]=1, F[2,2]>0)",
    "scale_update(F[1,3]>0, F[3]>0, _, F[2,3]=1e-38) margin=3",
    "scale_update(F[4,5]>0, F[5]>0, i[1]=0, F[6,5]>0) newest=1",
    NULL,
};
