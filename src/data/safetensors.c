/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading and writing safetensors; the header file lists the checks and their order.
 *
 * The tensors are sorted by offset, which is how the tiling is checked and how a disk is read fastest; a second array
 * sorted by name serves lookups. Reads are pread into the caller's memory, so that a file shortened by another process
 * gives a status.
 */
#include "data/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "core/convert.h"

enum { HEADER_LIMIT = 100000000, CONVERT_CHUNK = 1 << 18 };

struct rfi_safetensors {
  rfr_ctx *ctx;
  rfi_file *file;
  json_t *header; /* owns the names */
  rfi_stored *tensors;
  const rfi_stored **by_name;
  int n;
};

/* Types of the format that are stored and checked but not computed with. */
static const struct {
  const char *name;
  int bits;
} foreign[] = {
    {"I8", 8}, {"U16", 16}, {"I16", 16}, {"U32", 32}, {"U64", 64}, {"C64", 64}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
};

/* Bits per element, 0 for an unknown name. */
static int find_dtype(const char *name, rfr_dtype *dtype, const char **constant) {
  for (int d = 0; d < RFR_DTYPE_COUNT; d++) {
    *constant = rfr_dtype_safetensors_name((rfr_dtype)d);
    if (strcmp(name, *constant) == 0) {
      *dtype = (rfr_dtype)d;
      return rfr_dtype_bits(*dtype);
    }
  }
  *dtype = RFR_DTYPE_COUNT;
  for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
    *constant = foreign[i].name;
    if (strcmp(name, *constant) == 0) return foreign[i].bits;
  }
  return 0;
}

/* Product of the shape times bits, in bytes; false on overflow or if it is not a whole number of bytes. */
static bool count_bytes(const int64_t *shape, int rank, int bits, int64_t *elements, int64_t *bytes) {
  int64_t count = 1, total;
  for (int i = 0; i < rank; i++)
    if (shape[i] < 0 || __builtin_mul_overflow(count, shape[i], &count)) return false;
  if (__builtin_mul_overflow(count, (int64_t)bits, &total) || total % 8 != 0) return false;
  *elements = count;
  *bytes = total / 8;
  return true;
}

#define BAD(...) rfi_fail_at(RFI_E_SAFETENSORS, rfi_file_path(st->file), 0, __VA_ARGS__)

static rfr_status read_entry(const rfi_safetensors *st, const char *name, const json_t *entry, rfi_stored *out) {
  if (!json_is_object(entry)) return BAD("tensor \"%.200s\": its entry is no object", name);
  const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
  const json_t *offsets = json_object_get(entry, "data_offsets");
  if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) || json_object_size(entry) != 3)
    return BAD("tensor \"%.200s\": an entry has dtype, shape and data_offsets, nothing else", name);
  int bits = find_dtype(json_string_value(dtype), &out->dtype, &out->dtype_name);
  if (!bits) return BAD("tensor \"%.200s\": unknown dtype \"%.40s\"", name, json_string_value(dtype));

  if (json_array_size(shape) > RFI_SAFETENSORS_RANK)
    return BAD("tensor \"%.200s\": rank %zu, at most %d is read", name, json_array_size(shape), RFI_SAFETENSORS_RANK);
  out->name = name;
  out->rank = (int)json_array_size(shape);
  for (int i = 0; i < out->rank; i++) {
    const json_t *dim = json_array_get(shape, (size_t)i);
    if (!json_is_integer(dim) || json_integer_value(dim) < 0)
      return BAD("tensor \"%.200s\": dimension %d is no size", name, i);
    out->shape[i] = json_integer_value(dim);
  }
  const json_t *first = json_array_get(offsets, 0), *second = json_array_get(offsets, 1);
  if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(second))
    return BAD("tensor \"%.200s\": data_offsets are not two integers", name);
  int64_t begin = json_integer_value(first), end = json_integer_value(second);
  if (begin < 0 || begin > end)
    return BAD("tensor \"%.200s\": data_offsets [%lld, %lld] are no range", name, (long long)begin, (long long)end);
  if (!count_bytes(out->shape, out->rank, bits, &out->elements, &out->bytes))
    return BAD("tensor \"%.200s\": its shape has no size in whole bytes below 2^63", name);
  if (end - begin != out->bytes)
    return BAD("tensor \"%.200s\": its shape needs %lld bytes, its data_offsets hold %lld", name, (long long)out->bytes,
               (long long)(end - begin));
  out->offset = begin;
  return RFR_OK;
}

static rfr_status read_metadata(const rfi_safetensors *st, const json_t *metadata) {
  if (!json_is_object(metadata)) return BAD("__metadata__ is no object");
  for (void *at = json_object_iter((json_t *)metadata); at; at = json_object_iter_next((json_t *)metadata, at))
    if (!json_is_string(json_object_iter_value(at)))
      return BAD("__metadata__: \"%.200s\" is no string", json_object_iter_key(at));
  return RFR_OK;
}

static int by_offset(const void *a, const void *b) {
  const rfi_stored *x = a, *y = b; /* empty tensors come before others at the same offset */
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(const rfi_stored *const *)a)->name, (*(const rfi_stored *const *)b)->name);
}

static rfr_status read_header(rfi_safetensors *st) {
  int64_t size = rfi_file_size(st->file);
  uint8_t prefix[8];
  if (size < 8) return BAD("%lld bytes, the length alone takes 8", (long long)size);
  RFI_TRY(rfi_file_read_at(st->file, prefix, 8, 0));
  uint64_t n = 0;
  for (int i = 0; i < 8; i++) n |= (uint64_t)prefix[i] << (8 * i);
  if (n > HEADER_LIMIT)
    return BAD("a header of %llu bytes, at most %d are allowed", (unsigned long long)n, HEADER_LIMIT);
  if ((int64_t)n > size - 8)
    return BAD("the header has %llu bytes and the file %lld: it is cut off", (unsigned long long)n, (long long)size);

  char *text;
  RFI_TRY(RFI_ALLOC(st->ctx, (size_t)n + 1, &text));
  rfr_status s = rfi_file_read_at(st->file, text, (size_t)n, 8);
  if (s == RFR_OK && (n == 0 || text[0] != '{')) s = BAD("the header does not start with {");
  if (s == RFR_OK) s = rfi_json_parse(rfi_file_path(st->file), text, (size_t)n, &st->header);
  rfi_free(st->ctx, text);
  RFI_TRY(s);

  /* An entry takes more than 8 bytes of text, so n bounds the count. */
  RFI_TRY(RFI_ALLOC(st->ctx, (json_object_size(st->header) + 1) * sizeof *st->tensors, &st->tensors));
  const char *name;
  json_t *entry;
  json_object_foreach(st->header, name, entry) {
    if (strcmp(name, "__metadata__") == 0) RFI_TRY(read_metadata(st, entry));
    else RFI_TRY(read_entry(st, name, entry, &st->tensors[st->n++]));
  }
  qsort(st->tensors, (size_t)st->n, sizeof *st->tensors, by_offset);
  int64_t end = 0;
  for (int i = 0; i < st->n; i++) {
    rfi_stored *t = &st->tensors[i];
    if (t->offset != end)
      return BAD("tensor \"%.200s\": starts at byte %lld, %s byte %lld", t->name, (long long)t->offset,
                 t->offset < end ? "inside the one that ends at" : "leaving a hole from", (long long)end);
    end += t->bytes; /* no overflow: the file has offset + bytes as an int64 */
  }
  int64_t present = size - 8 - (int64_t)n;
  if (end != present)
    return BAD("the tensors need %lld bytes and %lld are there: %s", (long long)end, (long long)present,
               end > present ? "the file is cut off" : "something follows them");
  for (int i = 0; i < st->n; i++) st->tensors[i].offset += 8 + (int64_t)n;

  RFI_TRY(RFI_ALLOC(st->ctx, ((size_t)st->n + 1) * sizeof *st->by_name, &st->by_name));
  for (int i = 0; i < st->n; i++) st->by_name[i] = &st->tensors[i];
  qsort(st->by_name, (size_t)st->n, sizeof *st->by_name, by_name);
  return RFR_OK;
}

rfr_status rfi_safetensors_open(rfr_ctx *ctx, const char *path, rfi_safetensors **out) {
  rfr_status s;
  rfi_safetensors *st = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *st, &st));
  st->ctx = ctx;
  RFI_GOTO(rfi_file_open(ctx, path, &st->file));
  RFI_GOTO(read_header(st));
  *out = st;
  return RFR_OK;
fail:
  rfi_safetensors_close(st);
  return s;
}

void rfi_safetensors_close(rfi_safetensors *st) {
  if (!st) return;
  rfi_file_close(st->file);
  json_decref(st->header);
  rfi_free(st->ctx, st->tensors);
  rfi_free(st->ctx, st->by_name);
  rfi_free(st->ctx, st);
}

int rfi_safetensors_count(const rfi_safetensors *st) { return st->n; }
const rfi_stored *rfi_safetensors_at(const rfi_safetensors *st, int i) { return &st->tensors[i]; }

const rfi_stored *rfi_safetensors_find(const rfi_safetensors *st, const char *name) {
  const rfi_stored key = {.name = name}, *p = &key;
  const rfi_stored **found = bsearch(&p, st->by_name, (size_t)st->n, sizeof *st->by_name, by_name);
  return found ? *found : NULL;
}

const char *rfi_safetensors_metadata(const rfi_safetensors *st, const char *key) {
  return json_string_value(json_object_get(json_object_get(st->header, "__metadata__"), key));
}

rfr_status rfi_safetensors_read(rfi_safetensors *st, const rfi_stored *stored, void *data, size_t bytes) {
  if ((uint64_t)stored->bytes != bytes)
    return BAD("tensor \"%.200s\": has %lld bytes, %zu are wanted", stored->name, (long long)stored->bytes, bytes);
  return rfi_file_read_at(st->file, data, bytes, stored->offset);
}

rfr_status rfi_safetensors_read_range(rfi_safetensors *st, const rfi_stored *stored, rfr_dtype dtype, void *data,
                                      int64_t first, int64_t n) {
  if (first < 0 || n < 0 || n > stored->elements - first)
    return BAD("tensor \"%.200s\": has %lld elements, %lld from %lld are wanted", stored->name,
               (long long)stored->elements, (long long)n, (long long)first);
  const int64_t bits = stored->dtype == RFR_DTYPE_COUNT ? 0 : rfr_dtype_bits(stored->dtype);
  if (stored->dtype == dtype && bits % 8 == 0)
    return rfi_file_read_at(st->file, data, (size_t)(n * bits / 8), stored->offset + first * bits / 8);
  if (bits == 0 || !rfr_dtype_is_float(stored->dtype) || !rfr_dtype_is_float(dtype) || bits % 8 ||
      rfr_dtype_bits(dtype) % 8)
    return rfi_fail_at(RFI_E_UNSUPPORTED, rfi_file_path(st->file), 0, "tensor \"%.200s\": %s cannot be read as %s",
                       stored->name, stored->dtype_name, rfr_dtype_safetensors_name(dtype));
  const int64_t from = bits / 8, to = rfr_dtype_bits(dtype) / 8;
  const int64_t step = n < CONVERT_CHUNK / from ? n : CONVERT_CHUNK / from;
  char *chunk;
  RFI_TRY(RFI_ALLOC(st->ctx, (size_t)(step * from), &chunk));
  rfr_status s = RFR_OK;
  for (int64_t i = 0; i < n && s == RFR_OK; i += step) {
    const int64_t some = n - i < step ? n - i : step;
    s = rfi_file_read_at(st->file, chunk, (size_t)(some * from), stored->offset + (first + i) * from);
    if (s == RFR_OK) rfi_convert(dtype, (char *)data + i * to, stored->dtype, chunk, some);
  }
  rfi_free(st->ctx, chunk);
  return s;
}

rfr_status rfi_safetensors_read_as(rfi_safetensors *st, const rfi_stored *stored, rfr_dtype dtype, void *data,
                                   int64_t elements) {
  if (stored->elements != elements)
    return BAD("tensor \"%.200s\": has %lld elements, %lld are wanted", stored->name, (long long)stored->elements,
               (long long)elements);
  if (stored->dtype == dtype) return rfi_safetensors_read(st, stored, data, (size_t)stored->bytes);
  return rfi_safetensors_read_range(st, stored, dtype, data, 0, elements);
}

/* ---- writing ---- */

static json_t *entry_of(const rfi_safetensors_entry *e, int64_t begin, int64_t end) {
  json_t *shape = json_array();
  for (int i = 0; shape && i < e->rank; i++)
    if (json_array_append_new(shape, json_integer(e->shape[i])) != 0) {
      json_decref(shape);
      return NULL;
    }
  return json_pack("{s:s, s:o, s:[I, I]}", "dtype", rfr_dtype_safetensors_name(e->dtype), "shape", shape,
                   "data_offsets", (json_int_t)begin, (json_int_t)end);
}

static rfr_status build_header(json_t *header, const rfi_safetensors_entry *entries, int n, const char *const *metadata,
                               int n_metadata, int64_t *bytes) {
  json_t *strings = json_object();
  RFI_TRY(rfi_json_set(header, "__metadata__", strings));
  RFI_TRY(rfi_json_set(strings, "format", json_string("pt")));
  for (int i = 0; i < n_metadata; i++)
    RFI_TRY(rfi_json_set(strings, metadata[2 * i], json_string(metadata[2 * i + 1])));
  int64_t at = 0;
  for (int i = 0; i < n; i++) {
    const rfi_safetensors_entry *e = &entries[i];
    int64_t elements, size, end;
    if (json_object_get(header, e->name)) return rfi_fail(RFI_E_SAFETENSORS, "two tensors are called \"%s\"", e->name);
    if (e->rank < 0 || e->rank > RFI_SAFETENSORS_RANK)
      return rfi_fail(RFI_E_SAFETENSORS, "tensor \"%s\": rank %d, at most %d is written", e->name, e->rank,
                      RFI_SAFETENSORS_RANK);
    if (!count_bytes(e->shape, e->rank, rfr_dtype_bits(e->dtype), &elements, &size) ||
        __builtin_add_overflow(at, size, &end))
      return rfi_fail(RFI_E_SAFETENSORS, "tensor \"%s\": its shape has no size in whole bytes below 2^63", e->name);
    RFI_TRY(rfi_json_set(header, e->name, entry_of(e, at, end)));
    at = end;
  }
  if (bytes) *bytes = at;
  return RFR_OK;
}

rfr_status rfi_safetensors_write_header(rfr_ctx *ctx, rfi_file *file, const rfi_safetensors_entry *entries, int n,
                                        const char *const *metadata, int n_metadata, int64_t *bytes) {
  rfr_status s;
  rfi_string text = {.ctx = ctx};
  json_t *header = json_object();
  if (!header) return rfi_fail(RFI_E_NO_MEMORY, "a safetensors header");
  RFI_GOTO(build_header(header, entries, n, metadata, n_metadata, bytes));
  RFI_GOTO(rfi_json_print_compact(header, &text));
  size_t padded = (text.n + 7) / 8 * 8; /* the data starts 8-aligned */
  if (padded > HEADER_LIMIT)
    RFI_GOTO(rfi_fail(RFI_E_SAFETENSORS, "a header of %zu bytes, the format allows %d", padded, HEADER_LIMIT));
  uint8_t prefix[8];
  for (int i = 0; i < 8; i++) prefix[i] = (uint8_t)((uint64_t)padded >> (8 * i));
  RFI_GOTO(rfi_file_append(file, prefix, 8));
  RFI_GOTO(rfi_file_append(file, text.data, text.n));
  RFI_GOTO(rfi_file_append(file, "        ", padded - text.n));
fail:
  rfi_string_deinit(&text);
  json_decref(header);
  return s;
}
