/* SPDX-License-Identifier: Apache-2.0 */
#include "data/gguf_write.h"

#include <inttypes.h>
#include <string.h>

#include "base/arena.h"

enum { ALIGNMENT = 32, SLAB = 1 << 20 };

typedef struct tensor {
  const rfi_block_format *format;
  int64_t width, rows; /* the last dimension, and the product of the others */
  int64_t bytes;
} tensor;

struct rfi_gguf_writer {
  rfr_ctx *ctx;
  rfr_status status;      /* the first error */
  rfi_string keys, infos; /* as in the file */
  uint64_t n_keys;
  rfi_gguf_kind list_kind; /* kind of the list that is being written */
  rfi_arena *arena;
  tensor *tensors;
  int n, capacity;
  int current;  /* the tensor whose rows are written */
  int64_t done; /* number of its rows so far */
  int64_t bytes;
};

rfr_status rfi_gguf_writer_create(rfr_ctx *ctx, rfi_gguf_writer **out) {
  rfi_gguf_writer *w;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *w, &w));
  *w = (rfi_gguf_writer){.ctx = ctx, .keys = {.ctx = ctx}, .infos = {.ctx = ctx}};
  const rfr_status s = rfi_arena_create(ctx, &w->arena);
  if (s == RFR_OK) *out = w;
  else rfi_gguf_writer_destroy(w);
  return s;
}

void rfi_gguf_writer_destroy(rfi_gguf_writer *w) {
  if (!w) return;
  rfi_string_deinit(&w->keys);
  rfi_string_deinit(&w->infos);
  rfi_arena_destroy(w->arena);
  rfi_free(w->ctx, w);
}

static void put_bytes(rfi_gguf_writer *w, rfi_string *to, const void *data, size_t n) {
  if (w->status == RFR_OK && n > 0) w->status = rfi_string_append(to, data, n);
}

static void put_integer(rfi_gguf_writer *w, rfi_string *to, uint64_t x, int bytes) {
  char little[8];
  for (int i = 0; i < bytes; i++) little[i] = (char)(x >> (8 * i));
  put_bytes(w, to, little, (size_t)bytes);
}

static void put_string(rfi_gguf_writer *w, rfi_string *to, const char *text, size_t n) {
  put_integer(w, to, n, 8);
  put_bytes(w, to, text, n);
}

static void put_float(rfi_gguf_writer *w, rfi_string *to, double x) {
  const float value = (float)x;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  put_integer(w, to, bits, 4);
}

static void put_key(rfi_gguf_writer *w, const char *key, rfi_gguf_kind kind) {
  put_string(w, &w->keys, key, strlen(key));
  put_integer(w, &w->keys, kind, 4);
  w->n_keys++;
}

void rfi_gguf_put_u32(rfi_gguf_writer *w, const char *key, int64_t x) {
  if (w->status == RFR_OK && (x < 0 || x > UINT32_MAX))
    w->status = rfi_fail(RFI_E_GGUF, "%s: %" PRId64 " does not fit in 32 bits", key, x);
  put_key(w, key, RFI_GGUF_U32);
  put_integer(w, &w->keys, (uint64_t)x, 4);
}

void rfi_gguf_put_f32(rfi_gguf_writer *w, const char *key, double x) {
  put_key(w, key, RFI_GGUF_F32);
  put_float(w, &w->keys, x);
}

void rfi_gguf_put_bool(rfi_gguf_writer *w, const char *key, bool x) {
  put_key(w, key, RFI_GGUF_BOOL);
  put_integer(w, &w->keys, x, 1);
}

void rfi_gguf_put_text(rfi_gguf_writer *w, const char *key, const char *text, size_t n) {
  put_key(w, key, RFI_GGUF_STRING);
  put_string(w, &w->keys, text, n);
}

void rfi_gguf_put_list(rfi_gguf_writer *w, const char *key, rfi_gguf_kind kind, int64_t count) {
  put_key(w, key, RFI_GGUF_ARRAY);
  put_integer(w, &w->keys, kind, 4);
  put_integer(w, &w->keys, (uint64_t)count, 8);
  w->list_kind = kind;
}

void rfi_gguf_put_item(rfi_gguf_writer *w, const char *text, size_t n) { put_string(w, &w->keys, text, n); }

void rfi_gguf_put_number(rfi_gguf_writer *w, double x) {
  if (w->list_kind == RFI_GGUF_F32) put_float(w, &w->keys, x);
  else put_integer(w, &w->keys, (uint64_t)(int64_t)x, 4);
}

/* Bytes up to the next multiple of the alignment. */
static int64_t padding(int64_t n) { return (ALIGNMENT - n % ALIGNMENT) % ALIGNMENT; }

void rfi_gguf_put_tensor(rfi_gguf_writer *w, const char *name, const rfi_block_format *format, int rank,
                         const int64_t *shape) {
  if (w->status != RFR_OK) return;
  if (strlen(name) > 64 || rank < 1 || rank > 4 || shape[rank - 1] % format->elements) {
    w->status = rfi_fail(RFI_E_GGUF, "tensor %s: more than 64 bytes of name or 4 dimensions, or no full blocks", name);
    return;
  }
  if (!rfi_arena_grow(w->arena, (void **)&w->tensors, &w->capacity, w->n + 1, sizeof *w->tensors)) {
    w->status = RFR_NO_MEMORY;
    return;
  }
  tensor *t = &w->tensors[w->n++];
  *t = (tensor){.format = format, .width = shape[rank - 1], .rows = 1};
  for (int d = 0; d < rank - 1; d++) t->rows *= shape[d];
  t->bytes = t->rows * (t->width / format->elements) * format->bytes;
  put_string(w, &w->infos, name, strlen(name));
  put_integer(w, &w->infos, (uint64_t)rank, 4);
  for (int d = rank - 1; d >= 0; d--) put_integer(w, &w->infos, (uint64_t)shape[d], 8);
  put_integer(w, &w->infos, format->id, 4);
  put_integer(w, &w->infos, (uint64_t)w->bytes, 8);
  w->bytes += t->bytes + padding(t->bytes);
}

int64_t rfi_gguf_writer_bytes(const rfi_gguf_writer *w) { return w->bytes; }

static const char zeros[ALIGNMENT];

rfr_status rfi_gguf_write_header(rfi_gguf_writer *w, rfi_file *file) {
  rfi_string head = {.ctx = w->ctx};
  put_bytes(w, &head, "GGUF", 4);
  put_integer(w, &head, 3, 4);
  put_integer(w, &head, (uint64_t)w->n, 8);
  put_integer(w, &head, w->n_keys, 8);
  rfr_status s = w->status;
  if (s == RFR_OK) s = rfi_file_append(file, head.data, head.n);
  rfi_string_deinit(&head);
  if (s == RFR_OK && w->keys.n) s = rfi_file_append(file, w->keys.data, w->keys.n);
  if (s == RFR_OK && w->infos.n) s = rfi_file_append(file, w->infos.data, w->infos.n);
  RFI_TRY(s);
  return rfi_file_append(file, zeros, (size_t)padding(rfi_file_size(file)));
}

rfr_status rfi_gguf_write_rows(rfi_gguf_writer *w, rfi_file *file, const float *values, int64_t rows) {
  RFI_CHECK(w->current < w->n);
  const tensor *t = &w->tensors[w->current];
  const rfi_block_format *f = t->format;
  RFI_CHECK(rows <= t->rows - w->done && f->encode);
  const int64_t all = rows * (t->width / f->elements), slab = SLAB / f->elements;
  const int threads = rfi_ctx_threads(w->ctx);
  uint8_t *encoded;
  RFI_TRY(rfi_check_fork(threads));
  RFI_TRY(RFI_ALLOC(w->ctx, (size_t)(slab * f->bytes), &encoded));
  rfr_status s = RFR_OK;
  for (int64_t b = 0; s == RFR_OK && b < all; b += slab) {
    enum { PIECE = 4096 };
    const int64_t n = all - b < slab ? all - b : slab;
#pragma omp parallel for num_threads(threads) if (n > PIECE)
    for (int64_t i = 0; i < n; i += PIECE)
      f->encode(values + (b + i) * f->elements, n - i < PIECE ? n - i : PIECE, encoded + i * f->bytes);
    s = rfi_file_append(file, encoded, (size_t)(n * f->bytes));
  }
  rfi_free(w->ctx, encoded);
  RFI_TRY(s);
  w->done += rows;
  if (w->done < t->rows) return RFR_OK;
  w->current++;
  w->done = 0;
  return rfi_file_append(file, zeros, (size_t)padding(t->bytes));
}
