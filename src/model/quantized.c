/* SPDX-License-Identifier: Apache-2.0 */
#include "model/quantized.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "core/convert.h"

enum { BLOCK = 128, NAME = 256, LARGEST_BLOCK = 1 << 16 };

typedef struct reader {
  const rfi_tensor_files *files;
  const char *path, *name;
} reader;

#define BAD(...) rfi_fail_at(RFI_E_MODEL_WEIGHTS, r->path, 0, __VA_ARGS__)

/* Reads NAME + suffix as f32 (or as bytes) with exactly n elements; free with rfi_free. */
static rfr_status read_part(const reader *r, const char *suffix, rfr_dtype dtype, int64_t n, void **out) {
  char name[NAME];
  rfi_safetensors *file;
  const rfi_stored *stored;
  *out = NULL;
  snprintf(name, sizeof name, "%s%s", r->name, suffix);
  RFI_TRY(r->files->find(r->files->user, name, &file, &stored));
  if (!stored) return BAD("tensor %s is quantized, and there is no tensor %s", r->name, name);
  if (stored->elements != n || (dtype == RFR_U8 && stored->dtype != RFR_U8))
    return BAD("tensor %s has %" PRId64 " elements of %s; %" PRId64 " are needed", name, stored->elements,
               stored->dtype_name, n);
  RFI_TRY(RFI_ALLOC(r->files->ctx, (size_t)n * (size_t)rfr_dtype_bits(dtype) / 8 + 1, out));
  return rfi_safetensors_read_as(file, stored, dtype, *out, n);
}

static int64_t blocks_of(int64_t n, int64_t block) { return n / block + (n % block != 0); }

/* ---- fp8 ---- */

static rfr_status read_fp8(const reader *r, rfi_safetensors *file, const rfi_stored *stored, const int64_t *shape,
                           rfr_dtype dtype, char *data) {
  rfr_ctx *ctx = r->files->ctx;
  const int64_t rows = shape[0], columns = shape[1], grid = blocks_of(columns, BLOCK);
  const int64_t size = rfr_dtype_bits(dtype) / 8;
  uint8_t *codes = NULL;
  void *scales = NULL;
  float table[256], values[BLOCK];
  rfr_status s = read_part(r, "_scale_inv", RFR_F32, blocks_of(rows, BLOCK) * grid, &scales);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (size_t)stored->bytes + 1, &codes);
  if (s == RFR_OK) s = rfi_safetensors_read(file, stored, codes, (size_t)stored->bytes);
  for (uint32_t i = 0; i < 256; i++) table[i] = rfr_float_from_bits(RFR_E4M3, i);
  for (int64_t i = 0; s == RFR_OK && i < rows; i++)
    for (int64_t b = 0; b < grid; b++) {
      const int64_t first = b * BLOCK, n = columns - first < BLOCK ? columns - first : BLOCK;
      const float scale = ((float *)scales)[i / BLOCK * grid + b];
      for (int64_t k = 0; k < n; k++) values[k] = table[codes[i * columns + first + k]] * scale;
      rfi_convert(dtype, data + (i * columns + first) * size, RFR_F32, values, n);
    }
  rfi_free(ctx, codes);
  rfi_free(ctx, scales);
  return s;
}

/* ---- bitsandbytes ---- */

typedef struct state {
  int64_t block, nested_block; /* nested_block 0: scales are f32 */
  double offset;
  rfr_dtype dtype;
} state;

static rfr_status parse_state(const reader *r, const json_t *o, int rank, const int64_t *shape, state *out) {
  const json_t *dims = json_object_get(o, "shape");
  const char *dtype = NULL;
  RFI_TRY(rfi_json_get_int(o, r->path, "blocksize", true, 2, LARGEST_BLOCK, &out->block));
  RFI_TRY(rfi_json_get_int(o, r->path, "nested_blocksize", false, 1, LARGEST_BLOCK, &out->nested_block));
  RFI_TRY(rfi_json_get_real(o, r->path, "nested_offset", false, &out->offset));
  RFI_TRY(rfi_json_get_string(o, r->path, "dtype", true, &dtype));
  out->dtype = strcmp(dtype, "bfloat16") == 0  ? RFR_BF16
               : strcmp(dtype, "float16") == 0 ? RFR_F16
               : strcmp(dtype, "float32") == 0 ? RFR_F32
                                               : RFR_DTYPE_COUNT;
  bool same = (int)json_array_size(dims) == rank && out->dtype != RFR_DTYPE_COUNT;
  for (int d = 0; same && d < rank; d++)
    same = json_integer_value(json_array_get(dims, (size_t)d)) == (json_int_t)shape[d];
  return same ? RFR_OK : BAD("the quantization state of %s has another shape or dtype than config.json", r->name);
}

/* *found false: the tensor is not quantized. */
static rfr_status read_state(const reader *r, int rank, const int64_t *shape, state *out, bool *found) {
  static const char *const kinds[] = {"nf4", "fp4"};
  rfi_safetensors *file = NULL;
  const rfi_stored *stored = NULL;
  char name[NAME], *text;
  json_t *o = NULL;
  for (int i = 0; i < 2 && !stored; i++) {
    snprintf(name, sizeof name, "%s.quant_state.bitsandbytes__%s", r->name, kinds[i]);
    RFI_TRY(r->files->find(r->files->user, name, &file, &stored));
  }
  *found = stored != NULL;
  if (!stored) return RFR_OK;
  if (stored->dtype != RFR_U8 || stored->bytes > 1 << 16) return BAD("tensor %s is not a quantization state", name);
  RFI_TRY(RFI_ALLOC(r->files->ctx, (size_t)stored->bytes + 1, &text));
  rfr_status s = rfi_safetensors_read(file, stored, text, (size_t)stored->bytes);
  if (s == RFR_OK) s = rfi_json_parse(name, text, (size_t)stored->bytes, &o);
  if (s == RFR_OK) s = parse_state(r, o, rank, shape, out);
  json_decref(o);
  rfi_free(r->files->ctx, text);
  return s;
}

/* Reads the scale of each block; free with rfi_free. */
static rfr_status read_scales(const reader *r, const state *q, int64_t n, float **out) {
  rfr_ctx *ctx = r->files->ctx;
  void *codes = NULL, *map = NULL, *nested = NULL;
  if (q->nested_block == 0) return read_part(r, ".absmax", RFR_F32, n, (void **)out);
  rfr_status s = read_part(r, ".absmax", RFR_U8, n, &codes);
  if (s == RFR_OK) s = read_part(r, ".nested_quant_map", RFR_F32, 256, &map);
  if (s == RFR_OK) s = read_part(r, ".nested_absmax", RFR_F32, blocks_of(n, q->nested_block), &nested);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (size_t)n * sizeof **out + 1, out);
  for (int64_t i = 0; s == RFR_OK && i < n; i++) {
    const float scaled = ((float *)map)[((uint8_t *)codes)[i]] * ((float *)nested)[i / q->nested_block];
    (*out)[i] = scaled + (float)q->offset;
  }
  rfi_free(ctx, codes);
  rfi_free(ctx, map);
  rfi_free(ctx, nested);
  return s;
}

static rfr_status read_4bit(const reader *r, const state *q, int64_t n, rfr_dtype dtype, char *data) {
  enum { PIECE = 4096 };
  rfr_ctx *ctx = r->files->ctx;
  const int64_t size = rfr_dtype_bits(dtype) / 8;
  void *codes = NULL, *map = NULL;
  float *scales = NULL, values[PIECE];
  rfr_status s = read_part(r, "", RFR_U8, blocks_of(n, 2), &codes);
  if (s == RFR_OK) s = read_part(r, ".quant_map", RFR_F32, 16, &map);
  if (s == RFR_OK) s = read_scales(r, q, blocks_of(n, q->block), &scales);
  for (int64_t i = 0; s == RFR_OK && i < n; i += PIECE) {
    const int64_t m = n - i < PIECE ? n - i : PIECE;
    for (int64_t k = 0; k < m; k++) {
      const uint8_t two = ((uint8_t *)codes)[(i + k) / 2];
      const float x = ((float *)map)[(i + k) % 2 ? two & 15 : two >> 4] * scales[(i + k) / q->block];
      values[k] = rfr_float_from_bits(q->dtype, rfr_float_to_bits(q->dtype, x));
    }
    rfi_convert(dtype, data + i * size, RFR_F32, values, m);
  }
  rfi_free(ctx, codes);
  rfi_free(ctx, map);
  rfi_free(ctx, scales);
  return s;
}

rfr_status rfi_quantized_read(const rfi_tensor_files *files, const char *path, const char *name, int rank,
                              const int64_t *shape, rfr_dtype dtype, void *data, bool *done) {
  const reader reading = {files, path, name}, *r = &reading;
  rfi_safetensors *file;
  const rfi_stored *stored;
  state q = {0};
  int64_t n = 1;
  *done = false;
  RFI_TRY(files->find(files->user, name, &file, &stored));
  if (!stored || (stored->dtype != RFR_E4M3 && stored->dtype != RFR_U8)) return RFR_OK;
  for (int d = 0; d < rank; d++) n *= shape[d];
  if (stored->dtype == RFR_U8) {
    RFI_TRY(read_state(r, rank, shape, &q, done));
    return *done ? read_4bit(r, &q, n, dtype, data) : RFR_OK;
  }
  *done = true;
  if (rank != 2 || stored->rank != 2 || stored->shape[0] != shape[0] || stored->shape[1] != shape[1])
    return BAD("tensor %s is F8_E4M3 and has another shape than config.json describes", name);
  return read_fp8(r, file, stored, shape, dtype, data);
}
