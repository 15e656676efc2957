/* SPDX-License-Identifier: Apache-2.0
 *
 * Storage formats of quantized tensors: sizes, quantization on the host, and the op dequantize.
 *
 * A quantized weight is one frozen u8 input (formats.h has its layout). dequantize gives the values in a float type. It
 * is recorded once per weight. A pass then gives each GEMM that reads the weight a separate dequantize op
 * (pass/split_dequantize.c), so the values are live for one GEMM only. The codes have no gradient.
 *
 * Quantization rounds to the nearest number of the format; ties go to the smaller number, as in bitsandbytes' CUDA
 * kernels. A block of zeros has scale 0. fp8 has the arithmetic of the op quantize (scaling.h) instead, so that a GEMM
 * can read the stored codes directly.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "core/convert.h"
#include "ops/quant/dynamic8.h"
#include "ops/quant/scaling.h"
#include "ops/rule.h"

static const struct {
  const char *name;
} rows[] = {
#define QUANT_ROW(e, name, bits, block, scale) {name},
    RFR_QUANTS(QUANT_ROW)
#undef QUANT_ROW
};

static const float nf4[16] = {
#include "ops/quant/nf4.def"
};
static const float dynamic_signed[256] = {
#include "ops/quant/dynamic_signed.def"
};
static const float dynamic_unsigned[256] = {
#include "ops/quant/dynamic_unsigned.def"
};

static bool is_format(int64_t format) { return format > RFR_QUANT_NONE && format < RFR_QUANT_COUNT; }

const char *rfr_quant_name(rfr_quant format) { return (unsigned)format < RFR_QUANT_COUNT ? rows[format].name : "?"; }

int64_t rfr_quant_bytes(rfr_quant format, int rank, const int64_t *shape) {
  return is_format(format) ? rfi_quant_layout_for(format, rank, shape).bytes : 0;
}

/* ---- quantization ---- */

/* The larger of two numbers; NaN if one is NaN. */
static float larger(float a, float b) { return a > b || isnan(a) ? a : b; }

/* The largest magnitude; NaN if an element is NaN. */
static float largest(const float *x, int64_t n) {
  float most = 0;
  for (int64_t i = 0; i < n; i++) most = larger(most, fabsf(x[i]));
  return most;
}

static void encode_nf4(const float *x, int64_t n, float inverse, uint8_t *codes) {
  uint8_t code[RFI_NF4_BLOCK] = {0};
  for (int64_t i = 0; i < n; i++) {
    const float v = x[i] * inverse;
    int q = 0;
    for (int k = 0; k < 15; k++) q += v > (nf4[k] + nf4[k + 1]) / 2;
    code[i] = (uint8_t)q;
  }
  if (n % 2) code[n] = 7; /* zero */
  for (int64_t i = 0; i < n; i += 2) codes[i / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
}

static void encode_dynamic(const float *map, const float *x, int64_t n, float inverse, uint8_t *codes) {
  float middle[255];
  for (int k = 0; k < 255; k++) middle[k] = rfi_dynamic8_middle(map, k);
  for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)rfi_dynamic8_nearest(middle, x[i] * inverse);
}

static void encode_int8(const float *x, int64_t n, float most, uint8_t *codes) {
  const float factor = most > 0 ? 127.0f / most : 0;
  for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)(int8_t)rintf(x[i] * factor);
}

/* Encodes nf4's f32 scales: factors per RFI_NESTED scales, and one offset. */
static void nest_scales(const rfi_quant_layout *l, float *scale, uint8_t *out) {
  float *factor = (float *)(void *)(out + l->nested_at);
  const int64_t groups = (l->scales + RFI_NESTED - 1) / RFI_NESTED;
  double sum = 0;
  for (int64_t i = 0; i < l->scales; i++) sum += scale[i];
  const float offset = l->scales > 0 ? (float)(sum / (double)l->scales) : 0;
  for (int64_t g = 0; g < groups; g++) {
    float *block = scale + g * RFI_NESTED;
    const int64_t left = l->scales - g * RFI_NESTED, n = left < RFI_NESTED ? left : RFI_NESTED;
    for (int64_t i = 0; i < n; i++) block[i] -= offset;
    factor[g] = largest(block, n);
    encode_dynamic(dynamic_signed, block, n, rfi_dynamic8_inverse(factor[g]), out + l->scales_at + g * RFI_NESTED);
  }
  factor[groups] = offset;
}

/* One block of at most CHUNK elements; a longer row of int8 takes two passes. */
enum { CHUNK = 4096 };

typedef struct source {
  rfr_dtype dtype;
  const char *data;
} source;

static const float *read_block(const source *s, int64_t from, int64_t n, float *buffer) {
  if (s->dtype == RFR_F32) return (const float *)(const void *)s->data + from;
  const uint16_t *x = (const uint16_t *)(const void *)s->data + from;
  for (int64_t i = 0; i < n; i++) buffer[i] = rfr_float_from_bits(s->dtype, x[i]);
  return buffer;
}

static void encode_block(rfr_quant format, const rfi_quant_layout *l, const source *s, int64_t b, float *scale,
                         uint8_t *out) {
  float buffer[CHUNK];
  const int64_t begin = b * l->block, end = begin + l->block < l->n ? begin + l->block : l->n;
  float most = 0;
  for (int64_t i = begin; i < end; i += CHUNK) {
    const int64_t n = end - i < CHUNK ? end - i : CHUNK;
    most = larger(most, largest(read_block(s, i, n, buffer), n));
  }
  scale[b] = most;
  for (int64_t i = begin; i < end; i += CHUNK) {
    const int64_t n = end - i < CHUNK ? end - i : CHUNK;
    const float *x = read_block(s, i, n, buffer);
    switch (format) {
      case RFR_QUANT_NF4: encode_nf4(x, n, rfi_dynamic8_inverse(most), out + i / 2); break;
      case RFR_QUANT_INT8: encode_int8(x, n, most, out + i); break;
      default:
        encode_dynamic(format == RFR_QUANT_DYNAMIC8 ? dynamic_signed : dynamic_unsigned, x, n,
                       rfi_dynamic8_inverse(most), out + i);
    }
  }
}

/* One matrix of l->block elements. Its magnitude comes first; it does not depend on the order. */
static void encode_fp8(const rfi_quant_layout *l, const source *s, int64_t b, int threads, float *scale, uint8_t *out) {
  const int64_t begin = b * l->block, chunks = (l->block + CHUNK - 1) / CHUNK;
  uint32_t most = 0; /* the pattern of a NaN is the largest */
  (void)threads;     /* unused without OpenMP */
#pragma omp parallel for num_threads(threads) if (l->block >= CHUNK) schedule(static) reduction(max : most)
  for (int64_t c = 0; c < chunks; c++) {
    float buffer[CHUNK];
    const int64_t n = l->block - c * CHUNK < CHUNK ? l->block - c * CHUNK : CHUNK;
    const float *x = read_block(s, begin + c * CHUNK, n, buffer);
    for (int64_t i = 0; i < n; i++) most = rfi_magnitude(x[i]) > most ? rfi_magnitude(x[i]) : most;
  }
  const float by = rfi_scale_of(most, rfi_largest(RFR_E4M3), RFI_F32_LARGEST, 0);
  scale[b] = 1.0f / by;
#pragma omp parallel for num_threads(threads) if (l->block >= CHUNK) schedule(static)
  for (int64_t c = 0; c < chunks; c++) {
    float buffer[CHUNK];
    const int64_t at = begin + c * CHUNK, n = l->block - c * CHUNK < CHUNK ? l->block - c * CHUNK : CHUNK;
    const float *x = read_block(s, at, n, buffer);
    for (int64_t i = 0; i < n; i++) out[at + i] = rfi_e4m3_encode(x[i], by);
  }
}

rfr_status rfr_quant_encode(rfr_ctx *ctx, rfr_quant format, int rank, const int64_t *shape, rfr_dtype dtype,
                            const void *data, int threads, void *out) {
  if (!is_format(format)) return rfi_fail(RFI_E_ARGUMENT, "%d is not an rfr_quant", (int)format);
  if (dtype != RFR_F32 && dtype != RFR_BF16 && dtype != RFR_F16)
    return rfi_fail(RFI_E_ARGUMENT, "%s quantizes f32, bf16 and f16, not %s", rows[format].name, rfr_dtype_name(dtype));
  if (threads < 1 || threads > RFI_MAX_THREADS)
    return rfi_fail(RFI_E_ARGUMENT, "threads is %d; it must be 1 to %d", threads, RFI_MAX_THREADS);
  const rfi_quant_layout l = rfi_quant_layout_for(format, rank, shape);
  const source s = {dtype, data};
  float *nested = NULL;
  if (format == RFR_QUANT_NF4) RFI_TRY(RFI_ALLOC(ctx, sizeof *nested * ((size_t)l.scales + 1), &nested));
  const rfr_status status = threads > 1 && l.n >= CHUNK ? rfi_check_fork(threads) : RFR_OK;
  if (status == RFR_OK) {
    memset(out, 0, (size_t)l.bytes);
    float *scale = nested ? nested : (float *)(void *)((uint8_t *)out + l.scales_at);
    for (int64_t b = 0; format == RFR_QUANT_FP8 && b < l.scales; b++) encode_fp8(&l, &s, b, threads, scale, out);
    const int64_t blocks = format == RFR_QUANT_FP8 ? 0 : l.scales;
#pragma omp parallel for num_threads(threads) if (l.n >= CHUNK) schedule(static)
    for (int64_t b = 0; b < blocks; b++) encode_block(format, &l, &s, b, scale, out);
    if (nested) nest_scales(&l, nested, out);
  }
  rfi_free(ctx, nested);
  return status;
}

void rfi_quant_decode(rfr_quant format, int rank, const int64_t *shape, const void *x, float *values) {
  const rfi_quant_layout l = rfi_quant_layout_for(format, rank, shape);
  const uint8_t *codes = x;
  const float *factor = (const float *)(const void *)(codes + l.nested_at);
  for (int64_t i = 0; i < l.n; i++) {
    const int64_t b = i / l.block;
    if (format == RFR_QUANT_NF4) {
      const volatile float product = dynamic_signed[codes[l.scales_at + b]] * factor[b / RFI_NESTED];
      const float scale = product + factor[(l.scales + RFI_NESTED - 1) / RFI_NESTED];
      values[i] = nf4[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * scale;
      continue;
    }
    const float scale = ((const float *)(const void *)(codes + l.scales_at))[b];
    if (format == RFR_QUANT_INT8) values[i] = (float)(int8_t)codes[i] * scale * RFI_INT8_STEP;
    else if (format == RFR_QUANT_FP8) values[i] = rfi_e4m3_widen(codes[i]) * scale;
    else values[i] = (format == RFR_QUANT_DYNAMIC8 ? dynamic_signed : dynamic_unsigned)[codes[i]] * scale;
  }
}

/* ---- the op ---- */

rfr_status rfi_infer_dequantize(const rfi_infer *c) {
  const rfr_type *x = &c->in[0];
  const rfi_shape *shape = &c->attr[2].s;
  const rfr_dtype to = (rfr_dtype)c->attr[1].i;
  int64_t bits = 64; /* with capacity for the scales: an int8 row of one element takes five bytes */
  if (!is_format(c->attr[0].i))
    return rfi_fail(RFI_E_TRACE_SHAPE, "format is %lld, which is not an rfr_quant", (long long)c->attr[0].i);
  if (to != RFR_F32 && to != RFR_BF16 && to != RFR_F16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  if (shape->rank < 0 || shape->rank > RFR_MAX_RANK)
    return rfi_fail(RFI_E_TRACE_SHAPE, "rank is %d; it must be at most %d", shape->rank, RFR_MAX_RANK);
  const rfr_quant format = (rfr_quant)c->attr[0].i;
  c->out[0] = (rfr_type){.dtype = to, .rank = shape->rank};
  for (int d = 0; d < shape->rank; d++) {
    if (shape->dim[d] < 0 || __builtin_mul_overflow(bits, shape->dim[d] ? shape->dim[d] : 1, &bits))
      return rfi_fail(RFI_E_TRACE_SHAPE, "dimension %d is %lld, or the size overflows", d, (long long)shape->dim[d]);
    c->out[0].shape[d] = shape->dim[d];
  }
  const int64_t bytes = rfr_quant_bytes(format, shape->rank, shape->dim);
  if (x->dtype != RFR_U8 || x->rank != 1 || x->shape[0] != bytes)
    return rfi_fail(RFI_E_TRACE_SHAPE, "x must be u8 (%lld), the bytes of this shape in %s", (long long)bytes,
                    rows[format].name);
  return RFR_OK;
}

rfr_value rfr_dequantize_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_quant format, int rank, const int64_t *shape,
                            rfr_dtype to) {
  rfi_attr attr[3] = {rfi_i(format), rfi_i(to), rfi_i(0)};
  if (rank < 0 || rank > RFR_MAX_RANK || (rank > 0 && !shape))
    return rfi_trace_fail(t, at, "dequantize", RFI_E_ARGUMENT, "rank is %d, or shape is NULL", rank);
  attr[2].s.rank = rank;
  for (int d = 0; d < rank; d++) attr[2].s.dim[d] = shape[d];
  return rfi_record(t, at, RFI_OP_dequantize, 1, &x, attr, NULL);
}
