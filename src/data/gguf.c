/* SPDX-License-Identifier: Apache-2.0
 *
 * The metadata are read once into a buffer. The buffer grows with the bytes that the parser has accepted, so a small
 * file cannot cause a large allocation. The values stay in the buffer. Keys and names become C strings in place: the
 * NUL overwrites the type or rank after the name, once that has been read.
 */
#include "data/gguf.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/convert.h"

enum {
  FIRST_READ = 1 << 16,
  METADATA_LIMIT = 1 << 30,
  NAME_LIMIT = 64,
  KEY_LIMIT = 65535,
  ALIGNMENT = 32,
  ALIGNMENT_LIMIT = 1 << 16,
  KEY_BYTES = 8 + 1 + 4 + 1,            /* minimum bytes of a key: length, one byte, type, value */
  TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8, /* minimum bytes of a tensor: length, one byte, rank, dimension, type, offset */
  SLAB = 4 << 20,                       /* bytes of a tensor that are read at once */
  PIECE = 4096                          /* elements that a thread decodes at once */
};

struct rfi_gguf {
  rfr_ctx *ctx;
  rfi_file *file;
  int64_t size;
  uint8_t *data;           /* the first n bytes of the file */
  size_t n, capacity, pos; /* pos: position of the parser */
  uint32_t version;
  rfi_gguf_value *keys;
  rfi_gguf_tensor *tensors;
  const rfi_gguf_value **keys_by_name;
  const rfi_gguf_tensor **tensors_by_name;
  int n_keys, n_tensors;
};

#define BAD(...) rfi_fail_at(RFI_E_GGUF, rfi_file_path(g->file), 0, __VA_ARGS__)

/* ---- parsing ---- */

/* Makes bytes [pos, pos + n) available. */
static rfr_status need(rfi_gguf *g, uint64_t n) {
  if (n > (uint64_t)g->size - g->pos)
    return BAD("byte %zu: %" PRIu64 " more bytes are needed, and the file ends after %" PRId64, g->pos, n,
               g->size - (int64_t)g->pos);
  if (g->pos + n > METADATA_LIMIT) return BAD("the metadata have more than %d bytes", METADATA_LIMIT);
  const size_t end = g->pos + (size_t)n;
  if (end <= g->n) return RFR_OK;
  size_t want = g->n ? g->n : FIRST_READ;
  while (want < end) want *= 2;
  if ((int64_t)want > g->size) want = (size_t)g->size;
  uint8_t *larger;
  RFI_TRY(RFI_ALLOC(g->ctx, want + 1, &larger));
  if (g->n) memcpy(larger, g->data, g->n);
  rfi_free(g->ctx, g->data);
  g->data = larger;
  RFI_TRY(rfi_file_read_at(g->file, g->data + g->n, want - g->n, (int64_t)g->n));
  g->n = want;
  return RFR_OK;
}

static uint64_t little(const uint8_t *p, int bytes) {
  uint64_t x = 0;
  for (int i = 0; i < bytes; i++) x |= (uint64_t)p[i] << (8 * i);
  return x;
}

static rfr_status take(rfi_gguf *g, int bytes, uint64_t *out) {
  RFI_TRY(need(g, (uint64_t)bytes));
  *out = little(g->data + g->pos, bytes);
  g->pos += (size_t)bytes;
  return RFR_OK;
}

static const int sizes[RFI_GGUF_KINDS] = {
    [RFI_GGUF_U8] = 1,  [RFI_GGUF_I8] = 1,  [RFI_GGUF_U16] = 2, [RFI_GGUF_I16] = 2,
    [RFI_GGUF_U32] = 4, [RFI_GGUF_I32] = 4, [RFI_GGUF_F32] = 4, [RFI_GGUF_BOOL] = 1,
    [RFI_GGUF_U64] = 8, [RFI_GGUF_I64] = 8, [RFI_GGUF_F64] = 8};

/* Reads the name of a key or a tensor: bytes [*at, *at + *n). */
static rfr_status take_name(rfi_gguf *g, const char *what, uint64_t limit, size_t *at, size_t *n) {
  uint64_t length;
  const size_t start = g->pos;
  RFI_TRY(take(g, 8, &length));
  if (length == 0 || length > limit)
    return BAD("byte %zu: %s of %" PRIu64 " bytes; 1 to %" PRIu64 " are allowed", start, what, length, limit);
  RFI_TRY(need(g, length));
  for (size_t i = 0; i < length; i++)
    if (g->data[g->pos + i] < 0x20 || g->data[g->pos + i] == 0x7f)
      return BAD("byte %zu: %s has a control character", g->pos + i, what);
  *at = g->pos;
  *n = (size_t)length;
  g->pos += (size_t)length;
  return RFR_OK;
}

/* Moves past `count` elements. */
static rfr_status skip_elements(rfi_gguf *g, const char *key, rfi_gguf_kind kind, uint64_t count) {
  if (kind != RFI_GGUF_STRING) {
    const uint64_t left = (uint64_t)g->size - g->pos;
    if (count > left / (uint64_t)sizes[kind])
      return BAD("%.100s: %" PRIu64 " elements are more than the file has", key, count);
    RFI_TRY(need(g, count * (uint64_t)sizes[kind]));
    for (uint64_t i = 0; kind == RFI_GGUF_BOOL && i < count; i++)
      if (g->data[g->pos + i] > 1) return BAD("%.100s: element %" PRIu64 " is neither 0 nor 1", key, i);
    g->pos += (size_t)(count * (uint64_t)sizes[kind]);
    return RFR_OK;
  }
  if (count > ((uint64_t)g->size - g->pos) / 8)
    return BAD("%.100s: %" PRIu64 " strings are more than the file has", key, count);
  for (uint64_t i = 0; i < count; i++) {
    uint64_t length;
    RFI_TRY(take(g, 8, &length));
    RFI_TRY(need(g, length));
    g->pos += (size_t)length;
  }
  return RFR_OK;
}

/* Names are stored as offsets until the buffer has its final address. */
static rfr_status take_key(rfi_gguf *g, rfi_gguf_value *v, size_t *name) {
  size_t n;
  uint64_t kind, count = 1;
  char key[101] = "";
  RFI_TRY(take_name(g, "a key", KEY_LIMIT, name, &n));
  memcpy(key, g->data + *name, n < 100 ? n : 100);
  RFI_TRY(take(g, 4, &kind));
  g->data[*name + n] = 0;
  v->is_array = kind == RFI_GGUF_ARRAY;
  if (v->is_array) {
    RFI_TRY(take(g, 4, &kind));
    RFI_TRY(take(g, 8, &count));
    if (kind == RFI_GGUF_ARRAY) return BAD("%s: an array of arrays is not supported", key);
  }
  if (kind >= RFI_GGUF_KINDS) return BAD("%s: unknown value type %" PRIu64, key, kind);
  v->kind = (rfi_gguf_kind)kind;
  v->at = g->pos;
  RFI_TRY(skip_elements(g, key, v->kind, count));
  v->count = (int64_t)count;
  v->end = g->pos;
  return RFR_OK;
}

static rfr_status take_tensor(rfi_gguf *g, rfi_gguf_tensor *t, size_t *name) {
  size_t n;
  uint64_t rank, type, offset, size;
  char text[NAME_LIMIT + 1] = "";
  RFI_TRY(take_name(g, "a tensor name", NAME_LIMIT, name, &n));
  memcpy(text, g->data + *name, n);
  RFI_TRY(take(g, 4, &rank));
  g->data[*name + n] = 0;
  if (rank < 1 || rank > 4) return BAD("tensor %s has rank %" PRIu64 "; 1 to 4 are allowed", text, rank);
  t->rank = (int)rank;
  t->elements = 1;
  for (int i = t->rank - 1; i >= 0; i--) {
    RFI_TRY(take(g, 8, &size));
    if (size < 1 || size > INT64_MAX || __builtin_mul_overflow(t->elements, (int64_t)size, &t->elements))
      return BAD("tensor %s: its number of elements is not from 1 to 2^63 - 1", text);
    t->shape[i] = (int64_t)size;
  }
  RFI_TRY(take(g, 4, &type));
  RFI_TRY(take(g, 8, &offset));
  t->format = rfi_block_format_of((uint32_t)type);
  if (!t->format) return BAD("tensor %s has the unknown type %" PRIu64, text, type);
  if (t->shape[t->rank - 1] % t->format->elements)
    return BAD("tensor %s: rows of %" PRId64 " elements are not full blocks of %s (%d elements)", text,
               t->shape[t->rank - 1], t->format->name, t->format->elements);
  if (__builtin_mul_overflow(t->elements / t->format->elements, (int64_t)t->format->bytes, &t->bytes) ||
      t->bytes > g->size || offset > (uint64_t)g->size)
    return BAD("tensor %s: %" PRId64 " elements at offset %" PRIu64 " are more than the file has", text, t->elements,
               offset);
  t->offset = (int64_t)offset;
  return RFR_OK;
}

static int compare_keys(const void *a, const void *b) {
  return strcmp((*(const rfi_gguf_value *const *)a)->key, (*(const rfi_gguf_value *const *)b)->key);
}

static int compare_tensors(const void *a, const void *b) {
  return strcmp((*(const rfi_gguf_tensor *const *)a)->name, (*(const rfi_gguf_tensor *const *)b)->name);
}

/* Sorts by name, so that duplicates are adjacent. */
static rfr_status sort_names(rfi_gguf *g) {
  RFI_TRY(RFI_ALLOC(g->ctx, ((size_t)g->n_keys + 1) * sizeof *g->keys_by_name, &g->keys_by_name));
  RFI_TRY(RFI_ALLOC(g->ctx, ((size_t)g->n_tensors + 1) * sizeof *g->tensors_by_name, &g->tensors_by_name));
  for (int i = 0; i < g->n_keys; i++) g->keys_by_name[i] = &g->keys[i];
  for (int i = 0; i < g->n_tensors; i++) g->tensors_by_name[i] = &g->tensors[i];
  qsort(g->keys_by_name, (size_t)g->n_keys, sizeof *g->keys_by_name, compare_keys);
  qsort(g->tensors_by_name, (size_t)g->n_tensors, sizeof *g->tensors_by_name, compare_tensors);
  for (int i = 1; i < g->n_keys; i++)
    if (strcmp(g->keys_by_name[i - 1]->key, g->keys_by_name[i]->key) == 0)
      return BAD("the key %.100s appears twice", g->keys_by_name[i]->key);
  for (int i = 1; i < g->n_tensors; i++)
    if (strcmp(g->tensors_by_name[i - 1]->name, g->tensors_by_name[i]->name) == 0)
      return BAD("the tensor %s appears twice", g->tensors_by_name[i]->name);
  return RFR_OK;
}

/* Rounds *x up to a multiple of `step`, a power of two; false on overflow. */
static bool round_up(int64_t *x, int64_t step) {
  if (__builtin_add_overflow(*x, step - 1, x)) return false;
  *x &= ~(step - 1);
  return true;
}

/* Checks that the tensors are adjacent, each aligned, and makes the offsets relative to the file. */
static rfr_status place_tensors(rfi_gguf *g) {
  const rfi_gguf_value *given = rfi_gguf_key(g, "general.alignment");
  int64_t alignment = ALIGNMENT, start = (int64_t)g->pos, next = 0;
  if (given) RFI_TRY(rfi_gguf_int(g, given, 0, &alignment));
  if (given && (given->is_array || alignment < 1 || alignment > ALIGNMENT_LIMIT || (alignment & (alignment - 1))))
    return BAD("general.alignment is %" PRId64 "; it must be a power of two and at most %d", alignment,
               ALIGNMENT_LIMIT);
  if (!round_up(&start, alignment)) return BAD("the aligned metadata end after byte 2^63 - 1");
  for (int i = 0; i < g->n_tensors; i++) {
    rfi_gguf_tensor *t = &g->tensors[i];
    if (t->offset != next)
      return BAD("tensor %s starts at offset %" PRId64 " of the data; the tensor before it ends at %" PRId64, t->name,
                 t->offset, next);
    if (__builtin_add_overflow(t->offset, start, &t->offset) || __builtin_add_overflow(next, t->bytes, &next) ||
        t->offset > g->size || t->bytes > g->size - t->offset || !round_up(&next, alignment))
      return BAD("tensor %s ends after byte %" PRId64 ", the end of the file: the file is cut off", t->name, g->size);
  }
  return RFR_OK;
}

static rfr_status read_header(rfi_gguf *g) {
  uint64_t magic, version, n_tensors, n_keys;
  size_t *names;
  RFI_TRY(take(g, 4, &magic));
  if (memcmp(g->data, "GGUF", 4) != 0) return BAD("the file does not start with \"GGUF\"");
  RFI_TRY(take(g, 4, &version));
  if (version && !(version & 0xffff)) return BAD("the file is big-endian, which is not supported");
  if (version != 2 && version != 3) return BAD("version %" PRIu64 " is not supported; 2 and 3 are", version);
  g->version = (uint32_t)version;
  RFI_TRY(take(g, 8, &n_tensors));
  RFI_TRY(take(g, 8, &n_keys));
  const uint64_t left = (uint64_t)g->size - g->pos;
  if (n_keys > left / KEY_BYTES || n_tensors > left / TENSOR_BYTES || n_keys > INT32_MAX || n_tensors > INT32_MAX)
    return BAD("%" PRIu64 " keys and %" PRIu64 " tensors are more than a file of %" PRId64 " bytes has", n_keys,
               n_tensors, g->size);
  RFI_TRY(RFI_ALLOC(g->ctx, ((size_t)n_keys + 1) * sizeof *g->keys, &g->keys));
  RFI_TRY(RFI_ALLOC(g->ctx, ((size_t)n_tensors + 1) * sizeof *g->tensors, &g->tensors));
  RFI_TRY(RFI_ALLOC(g->ctx, ((size_t)n_keys + (size_t)n_tensors + 1) * sizeof *names, &names));
  rfr_status s = RFR_OK;
  for (uint64_t i = 0; s == RFR_OK && i < n_keys; i++) s = take_key(g, &g->keys[i], &names[i]);
  for (uint64_t i = 0; s == RFR_OK && i < n_tensors; i++) s = take_tensor(g, &g->tensors[i], &names[n_keys + i]);
  if (s == RFR_OK) { /* the buffer has its final place */
    g->n_keys = (int)n_keys;
    g->n_tensors = (int)n_tensors;
    for (int i = 0; i < g->n_keys; i++) g->keys[i].key = (const char *)g->data + names[i];
    for (int i = 0; i < g->n_tensors; i++) g->tensors[i].name = (const char *)g->data + names[g->n_keys + i];
  }
  rfi_free(g->ctx, names);
  RFI_TRY(s);
  RFI_TRY(sort_names(g));
  return place_tensors(g);
}

rfr_status rfi_gguf_open(rfr_ctx *ctx, const char *path, rfi_gguf **out) {
  rfr_status s;
  rfi_gguf *g = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *g, &g));
  g->ctx = ctx;
  RFI_GOTO(rfi_file_open(ctx, path, &g->file));
  g->size = rfi_file_size(g->file);
  RFI_GOTO(read_header(g));
  *out = g;
  return RFR_OK;
fail:
  rfi_gguf_close(g);
  return s;
}

void rfi_gguf_close(rfi_gguf *g) {
  if (!g) return;
  rfi_file_close(g->file);
  rfi_free(g->ctx, g->data);
  rfi_free(g->ctx, g->keys);
  rfi_free(g->ctx, g->tensors);
  rfi_free(g->ctx, g->keys_by_name);
  rfi_free(g->ctx, g->tensors_by_name);
  rfi_free(g->ctx, g);
}

rfr_status rfi_gguf_is(rfr_ctx *ctx, const char *path, bool *is) {
  rfi_file *file;
  char kind, magic[4];
  *is = false;
  RFI_TRY(rfi_path_kind(path, &kind));
  if (kind != 'f') return RFR_OK;
  RFI_TRY(rfi_file_open(ctx, path, &file));
  rfr_status s = RFR_OK;
  if (rfi_file_size(file) >= 4) {
    s = rfi_file_read_at(file, magic, 4, 0);
    *is = s == RFR_OK && memcmp(magic, "GGUF", 4) == 0;
  }
  rfi_file_close(file);
  return s;
}

/* ---- getters ---- */

const char *rfi_gguf_path(const rfi_gguf *g) { return rfi_file_path(g->file); }
uint32_t rfi_gguf_version(const rfi_gguf *g) { return g->version; }
int rfi_gguf_key_count(const rfi_gguf *g) { return g->n_keys; }
const rfi_gguf_value *rfi_gguf_key_at(const rfi_gguf *g, int i) { return &g->keys[i]; }
int rfi_gguf_tensor_count(const rfi_gguf *g) { return g->n_tensors; }
const rfi_gguf_tensor *rfi_gguf_tensor_at(const rfi_gguf *g, int i) { return &g->tensors[i]; }

const rfi_gguf_value *rfi_gguf_key(const rfi_gguf *g, const char *key) {
  const rfi_gguf_value wanted = {.key = key}, *p = &wanted;
  const rfi_gguf_value **found = bsearch(&p, g->keys_by_name, (size_t)g->n_keys, sizeof *g->keys_by_name, compare_keys);
  return found ? *found : NULL;
}

const rfi_gguf_tensor *rfi_gguf_tensor_find(const rfi_gguf *g, const char *name) {
  const rfi_gguf_tensor wanted = {.name = name}, *p = &wanted;
  const rfi_gguf_tensor **found =
      bsearch(&p, g->tensors_by_name, (size_t)g->n_tensors, sizeof *g->tensors_by_name, compare_tensors);
  return found ? *found : NULL;
}

static rfr_status check_index(const rfi_gguf *g, const rfi_gguf_value *v, int64_t i) {
  if (i >= 0 && i < v->count) return RFR_OK;
  return BAD("%.100s has %" PRId64 " elements; element %" PRId64 " is needed", v->key, v->count, i);
}

rfr_status rfi_gguf_int(const rfi_gguf *g, const rfi_gguf_value *v, int64_t i, int64_t *out) {
  RFI_TRY(check_index(g, v, i));
  if (v->kind == RFI_GGUF_STRING || v->kind == RFI_GGUF_F32 || v->kind == RFI_GGUF_F64)
    return BAD("%.100s is not an integer", v->key);
  const int size = sizes[v->kind];
  const uint64_t bits = little(g->data + v->at + (size_t)i * (size_t)size, size);
  switch (v->kind) {
    case RFI_GGUF_I8: *out = (int8_t)bits; break;
    case RFI_GGUF_I16: *out = (int16_t)bits; break;
    case RFI_GGUF_I32: *out = (int32_t)bits; break;
    default: *out = (int64_t)bits; break;
  }
  if (v->kind == RFI_GGUF_U64 && bits > INT64_MAX) return BAD("%.100s is above 2^63 - 1", v->key);
  return RFR_OK;
}

rfr_status rfi_gguf_real(const rfi_gguf *g, const rfi_gguf_value *v, int64_t i, double *out) {
  if (v->kind != RFI_GGUF_F32 && v->kind != RFI_GGUF_F64) {
    int64_t integer;
    RFI_TRY(rfi_gguf_int(g, v, i, &integer));
    *out = (double)integer;
    return RFR_OK;
  }
  RFI_TRY(check_index(g, v, i));
  const uint64_t bits = little(g->data + v->at + (size_t)i * (size_t)sizes[v->kind], sizes[v->kind]);
  if (v->kind == RFI_GGUF_F32) {
    const uint32_t low = (uint32_t)bits;
    float x;
    memcpy(&x, &low, 4);
    *out = (double)x;
  } else {
    memcpy(out, &bits, 8);
  }
  return RFR_OK;
}

rfr_status rfi_gguf_next_string(const rfi_gguf *g, const rfi_gguf_value *v, size_t *cursor, const char **text,
                                size_t *n) {
  if (v->kind != RFI_GGUF_STRING) return BAD("%.100s is not a string", v->key);
  if (*cursor >= v->end - v->at) return BAD("%.100s has only %" PRId64 " strings", v->key, v->count);
  const uint8_t *at = g->data + v->at + *cursor; /* the parser has checked the lengths */
  *n = (size_t)little(at, 8);
  *text = (const char *)at + 8;
  *cursor += 8 + *n;
  return RFR_OK;
}

rfr_status rfi_gguf_string(const rfi_gguf *g, const rfi_gguf_value *v, const char **text, size_t *n) {
  size_t cursor = 0;
  if (v->is_array) return BAD("%.100s is an array; a string is needed", v->key);
  return rfi_gguf_next_string(g, v, &cursor, text, n);
}

/* ---- tensor data ---- */

/* The index in the model of stored row r. */
static int64_t place(int64_t r, int64_t head_dim) {
  if (head_dim == 0) return r;
  const int64_t i = r % head_dim;
  return r - i + i / 2 + i % 2 * (head_dim / 2);
}

typedef struct reading {
  const rfi_block_format *format;
  int64_t width, blocks; /* size of a row, in elements and in blocks */
  int64_t head_dim;
  rfr_dtype dtype;
  char *out;
} reading;

/* Decodes n blocks (at most PIECE elements), starting with block b of the tensor's rows. */
static void decode_piece(const reading *r, const uint8_t *from, int64_t b, int64_t n) {
  const int64_t size = rfr_dtype_bits(r->dtype) / 8;
  float values[PIECE];
  while (n > 0) {
    const int64_t row = b / r->blocks, column = b % r->blocks, left = r->blocks - column, k = n < left ? n : left;
    char *to = r->out + (place(row, r->head_dim) * r->width + column * r->format->elements) * size;
    r->format->decode(from, k, values);
    rfi_convert(r->dtype, to, RFR_F32, values, k * r->format->elements);
    from += k * r->format->bytes;
    b += k;
    n -= k;
  }
}

rfr_status rfi_gguf_read(rfi_gguf *g, const rfi_gguf_tensor *t, int64_t first, int64_t rows, int64_t head_dim,
                         rfr_dtype dtype, void *out) {
  const rfi_block_format *f = t->format;
  const int64_t width = t->shape[t->rank - 1], blocks = width / f->elements;
  RFI_CHECK(first >= 0 && rows >= 0 && rows <= t->elements / width - first);
  RFI_CHECK(head_dim == 0 || (first % head_dim == 0 && rows % head_dim == 0 && head_dim % 2 == 0));
  if (!f->decode)
    return rfi_fail_at(RFI_E_UNSUPPORTED, rfi_file_path(g->file), 0, "tensor %s has type %s; supported are %s", t->name,
                       f->name, rfi_block_formats_decoded);
  const int64_t offset = t->offset + first * blocks * f->bytes;
  if (f->dtype == dtype && head_dim == 0)
    return rfi_file_read_at(g->file, out, (size_t)(rows * blocks * f->bytes), offset);
  const reading r = {f, width, blocks, head_dim, dtype, out};
  const int64_t piece = PIECE / f->elements, all = rows * blocks, most = SLAB / f->bytes / piece * piece;
  const int64_t slab = all < most ? all : most; /* blocks */
  const int threads = rfi_ctx_threads(g->ctx);
  uint8_t *stored;
  RFI_TRY(rfi_check_fork(threads));
  RFI_TRY(RFI_ALLOC(g->ctx, (size_t)(slab * f->bytes), &stored));
  rfr_status s = RFR_OK;
  for (int64_t b = 0; s == RFR_OK && b < all; b += slab) {
    const int64_t n = all - b < slab ? all - b : slab;
    s = rfi_file_read_at(g->file, stored, (size_t)(n * f->bytes), offset + b * f->bytes);
    if (s != RFR_OK) break;
#pragma omp parallel for num_threads(threads) if (n > piece)
    for (int64_t i = 0; i < n; i += piece)
      decode_piece(&r, stored + i * f->bytes, b + i, n - i < piece ? n - i : piece);
  }
  rfi_free(g->ctx, stored);
  return s;
}
