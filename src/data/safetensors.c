/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading and writing safetensors; the header file lists the checks and their order.
 *
 * The tensors are sorted by offset, which is how the tiling is checked and how a disk is read fastest; a second array
 * sorted by name serves lookups. Reads are pread into the caller's memory, so that a file shortened by another process
 * gives a status.
 *
 * The files of several ranks get one table of full tensors, with new offsets, in which the bytes of each
 * tensor are adjacent; segments map these offsets to files.
 */
#include "data/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "core/convert.h"

enum { HEADER_LIMIT = 100000000, CONVERT_CHUNK = 1 << 18 };

/* A range of the tensor data that is in one file. */
typedef struct segment {
  int64_t begin, bytes, offset; /* offset: within the file */
  rfi_file *file;
} segment;

struct rfi_safetensors {
  rfr_ctx *ctx;
  rfi_file *file; /* NULL: the files of `ranks` are used */
  rfi_safetensors **ranks;
  int n_ranks;
  segment *segments; /* in ascending order */
  int n_segments;
  char *names;    /* names of tensors whose parts are in the files of ranks */
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

static const char *path_of(const rfi_safetensors *st) {
  return rfi_file_path(st->file ? st->file : st->ranks[0]->file);
}

#define BAD(...) rfi_fail_at(RFI_E_SAFETENSORS, path_of(st), 0, __VA_ARGS__)

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

static rfr_status sort_names(rfi_safetensors *st) {
  RFI_TRY(RFI_ALLOC(st->ctx, ((size_t)st->n + 1) * sizeof *st->by_name, &st->by_name));
  for (int i = 0; i < st->n; i++) st->by_name[i] = &st->tensors[i];
  qsort(st->by_name, (size_t)st->n, sizeof *st->by_name, by_name);
  return RFR_OK;
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

  /* An entry takes more than 8 bytes of text, which bounds the count. */
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

  return sort_names(st);
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
  for (int r = 0; r < st->n_ranks; r++) rfi_safetensors_close(st->ranks[r]);
  rfi_free(st->ctx, st->ranks);
  rfi_free(st->ctx, st->segments);
  rfi_free(st->ctx, st->names);
  rfi_file_close(st->file);
  json_decref(st->header);
  rfi_free(st->ctx, st->tensors);
  rfi_free(st->ctx, st->by_name);
  rfi_free(st->ctx, st);
}

/* ---- files of several ranks ---- */

typedef struct part {
  const char *name; /* name of the full tensor */
  int64_t first;
  const rfi_safetensors *from;
  const rfi_stored *stored;
} part;

static int by_part(const void *a, const void *b) {
  const part *x = a, *y = b;
  const int order = strcmp(x->name, y->name);
  if (order) return order;
  return x->first < y->first ? -1 : x->first > y->first;
}

/* A decimal number of at most 18 digits; returns what follows it, or NULL. */
static const char *read_number(const char *text, int64_t *out) {
  const size_t n = strspn(text, "0123456789");
  *out = 0;
  if (n == 0 || n > 18) return NULL;
  for (size_t i = 0; i < n; i++) *out = 10 * *out + (text[i] - '0');
  return text + n;
}

/* Parses NAME@FIRST; copies the name to *to. */
static rfr_status read_part(const rfi_safetensors *st, const rfi_stored *stored, char **to, part *out) {
  const char *at = strrchr(stored->name, '@'), *end = at ? read_number(at + 1, &out->first) : NULL;
  if (!end || *end)
    return BAD("tensor \"%.200s\": in a file of one rank a name ends in @ and its first element", stored->name);
  out->name = *to;
  out->from = st;
  out->stored = stored;
  memcpy(*to, stored->name, (size_t)(at - stored->name));
  *to += at - stored->name + 1; /* the memory was zeroed */
  return RFR_OK;
}

static rfr_status read_shape(const rfi_safetensors *st, const char *name, rfi_stored *full) {
  const char *text = rfi_safetensors_metadata(st, name);
  if (!text) return BAD("__metadata__ has no shape of \"%.200s\"", name);
  for (full->rank = 0; text && *text; full->rank++) {
    if (full->rank == RFI_SAFETENSORS_RANK) return BAD("\"%.200s\": its shape has too many sizes", name);
    text = read_number(text, &full->shape[full->rank]);
    if (text && *text == ' ') text++;
  }
  return text ? RFR_OK : BAD("\"%.200s\": its shape is no list of sizes", name);
}

/* Adds the tensor with the parts p[0] to p[n - 1], and its segments. */
static rfr_status join_parts(rfi_safetensors *st, const part *p, int n, int64_t *end) {
  rfi_stored *full = &st->tensors[st->n];
  const rfi_stored *first = p->stored;
  *full = (rfi_stored){.name = p->name, .dtype_name = first->dtype_name, .dtype = first->dtype, .offset = *end};
  RFI_TRY(read_shape(p->from, p->name, full));
  const int bits = find_dtype(first->dtype_name, &full->dtype, &full->dtype_name);
  if (!count_bytes(full->shape, full->rank, bits, &full->elements, &full->bytes) ||
      __builtin_add_overflow(*end, full->bytes, end))
    return BAD("tensor \"%.200s\": its shape has no size in whole bytes below 2^63", p->name);
  int64_t at = 0, byte = full->offset;
  for (int i = 0; i < n; i++) {
    const rfi_stored *s = p[i].stored;
    rfi_stored same = *full;
    RFI_TRY(read_shape(p[i].from, p->name, &same));
    if (strcmp(s->dtype_name, full->dtype_name) != 0 || same.rank != full->rank ||
        memcmp(same.shape, full->shape, sizeof same.shape) != 0)
      return BAD("tensor \"%.200s\": %s has another type or shape of it", p->name, path_of(p[i].from));
    if (p[i].first != at)
      return BAD("tensor \"%.200s\": its part from element %lld is missing, or there twice", p->name, (long long)at);
    st->segments[st->n_segments++] = (segment){byte, s->bytes, s->offset, p[i].from->file};
    at += s->elements; /* no overflow: each is the size of a part of a file */
    byte += s->bytes;
  }
  if (at != full->elements)
    return BAD("tensor \"%.200s\": %lld of its %lld elements are there", p->name, (long long)at,
               (long long)full->elements);
  st->n++;
  return RFR_OK;
}

static rfr_status join_ranks(rfi_safetensors *st) {
  rfr_status s;
  size_t n = 0, bytes = 0;
  int64_t end = 0;
  part *parts = NULL;
  for (int r = 0; r < st->n_ranks; r++) {
    n += (size_t)st->ranks[r]->n;
    for (int i = 0; i < st->ranks[r]->n; i++) bytes += strlen(st->ranks[r]->tensors[i].name) + 1;
  }
  RFI_TRY(RFI_ALLOC(st->ctx, (n + 1) * sizeof *parts, &parts));
  RFI_GOTO(RFI_ALLOC(st->ctx, (n + 1) * sizeof *st->tensors, &st->tensors));
  RFI_GOTO(RFI_ALLOC(st->ctx, (n + 1) * sizeof *st->segments, &st->segments));
  RFI_GOTO(RFI_ALLOC(st->ctx, bytes + 1, &st->names));
  char *name = st->names;
  part *p = parts;
  for (int r = 0; r < st->n_ranks; r++)
    for (int i = 0; i < st->ranks[r]->n; i++) RFI_GOTO(read_part(st->ranks[r], &st->ranks[r]->tensors[i], &name, p++));
  qsort(parts, n, sizeof *parts, by_part);
  for (size_t i = 0, k; i < n; i = k) {
    for (k = i + 1; k < n && strcmp(parts[k].name, parts[i].name) == 0; k++) continue;
    RFI_GOTO(join_parts(st, parts + i, (int)(k - i), &end));
  }
  s = sort_names(st);
fail:
  rfi_free(st->ctx, parts);
  return s;
}

void rfi_safetensors_part_file(char name[RFI_PART_FILE], const char *kind, int rank, int ranks) {
  snprintf(name, RFI_PART_FILE, "%.20s-rank-%04d-of-%04d.safetensors", kind, rank, ranks);
}

/* The number of ranks of the files of a kind; 0: there are none. */
static rfr_status count_ranks(const char *folder, const char *kind, const rfi_paths *names, int *ranks) {
  enum { MOST = 1 << 16 };
  const size_t prefix = strlen(kind) + sizeof "-rank-" - 1;
  *ranks = 0;
  for (int i = 0; i < names->n; i++) {
    char own[RFI_PART_FILE];
    int64_t rank, of;
    const char *name = names->items[i], *rest = NULL;
    if (strncmp(name, kind, strlen(kind)) == 0 && strncmp(name + strlen(kind), "-rank-", 6) == 0)
      rest = read_number(name + prefix, &rank);
    if (rest) rest = strncmp(rest, "-of-", 4) == 0 ? read_number(rest + 4, &of) : NULL;
    if (!rest || of > MOST || rank >= of) continue;
    rfi_safetensors_part_file(own, kind, (int)rank, (int)of);
    if (strcmp(own, name) != 0) continue;
    if (*ranks > 0 && of != *ranks)
      return rfi_fail_at(RFI_E_SAFETENSORS, folder, 0, "has files of %d ranks and of %lld ranks: %s", *ranks,
                         (long long)of, name);
    *ranks = (int)of;
  }
  return RFR_OK;
}

static rfr_status open_rank(rfi_safetensors *st, const char *folder, const char *kind, int ranks) {
  char name[RFI_PART_FILE], *path;
  rfi_safetensors_part_file(name, kind, st->n_ranks, ranks);
  RFI_TRY(rfi_path_join(st->ctx, folder, name, &path));
  const rfr_status s = rfi_safetensors_open(st->ctx, path, &st->ranks[st->n_ranks]);
  rfi_free(st->ctx, path);
  st->n_ranks += s == RFR_OK;
  return s;
}

rfr_status rfi_safetensors_open_parts(rfr_ctx *ctx, const char *folder, const char *kind, rfi_safetensors **out) {
  rfr_status s;
  int ranks;
  rfi_safetensors *st = NULL;
  rfi_paths names = {.ctx = ctx};
  *out = NULL;
  RFI_GOTO(rfi_dir_list(folder, &names));
  RFI_GOTO(count_ranks(folder, kind, &names, &ranks));
  if (ranks == 0) goto fail;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *st, &st));
  st->ctx = ctx;
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)ranks * sizeof *st->ranks, &st->ranks));
  for (int r = 0; r < ranks; r++) RFI_GOTO(open_rank(st, folder, kind, ranks));
  RFI_GOTO(join_ranks(st));
  *out = st;
  st = NULL;
fail:
  rfi_safetensors_close(st);
  rfi_paths_deinit(&names);
  return s;
}

/* ---- reading ---- */

static rfr_status read_at(const rfi_safetensors *st, void *data, int64_t n, int64_t offset) {
  if (!st->segments) return rfi_file_read_at(st->file, data, (size_t)n, offset);
  int low = 0, high = st->n_segments - 1; /* the last segment that begins at or before `offset` */
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (st->segments[middle].begin <= offset) low = middle;
    else high = middle - 1;
  }
  for (int64_t done = 0; done < n; low++) {
    const segment *g = &st->segments[low];
    const int64_t skip = offset + done - g->begin, some = g->bytes - skip < n - done ? g->bytes - skip : n - done;
    RFI_TRY(rfi_file_read_at(g->file, (char *)data + done, (size_t)some, g->offset + skip));
    done += some;
  }
  return RFR_OK;
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
  return read_at(st, data, stored->bytes, stored->offset);
}

rfr_status rfi_safetensors_read_range(rfi_safetensors *st, const rfi_stored *stored, rfr_dtype dtype, void *data,
                                      int64_t first, int64_t n) {
  if (first < 0 || n < 0 || n > stored->elements - first)
    return BAD("tensor \"%.200s\": has %lld elements, %lld from %lld are wanted", stored->name,
               (long long)stored->elements, (long long)n, (long long)first);
  const int64_t bits = stored->dtype == RFR_DTYPE_COUNT ? 0 : rfr_dtype_bits(stored->dtype);
  if (stored->dtype == dtype && bits % 8 == 0)
    return read_at(st, data, n * bits / 8, stored->offset + first * bits / 8);
  if (bits == 0 || !rfr_dtype_is_float(stored->dtype) || !rfr_dtype_is_float(dtype) || bits % 8 ||
      rfr_dtype_bits(dtype) % 8)
    return rfi_fail_at(RFI_E_UNSUPPORTED, path_of(st), 0, "tensor \"%.200s\": %s cannot be read as %s", stored->name,
                       stored->dtype_name, rfr_dtype_safetensors_name(dtype));
  const int64_t from = bits / 8, to = rfr_dtype_bits(dtype) / 8;
  const int64_t step = n < CONVERT_CHUNK / from ? n : CONVERT_CHUNK / from;
  char *chunk;
  RFI_TRY(RFI_ALLOC(st->ctx, (size_t)(step * from), &chunk));
  rfr_status s = RFR_OK;
  for (int64_t i = 0; i < n && s == RFR_OK; i += step) {
    const int64_t some = n - i < step ? n - i : step;
    s = read_at(st, chunk, some * from, stored->offset + (first + i) * from);
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
      return rfi_fail(RFI_E_SAFETENSORS,
                      "tensor \"%s\": the size of its shape is not a whole number of bytes below 2^63", e->name);
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
    RFI_GOTO(rfi_fail(RFI_E_SAFETENSORS, "the header has %zu bytes; the format allows %d", padded, HEADER_LIMIT));
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

/* The name of part i and, as a pair of metadata, the name and the shape of its tensor. */
typedef struct part_text {
  char name[280], shape[RFI_SAFETENSORS_RANK * 21];
} part_text;

static rfr_status describe_part(const rfi_safetensors_part *p, part_text *text, rfi_safetensors_entry *entry) {
  size_t n = 0;
  const int length = snprintf(text->name, sizeof text->name, "%s@%" PRId64, p->full.name, p->first);
  if (length < 0 || (size_t)length >= sizeof text->name)
    return rfi_fail(RFI_E_SAFETENSORS, "tensor \"%.200s\": its name is too long", p->full.name);
  for (int d = 0; d < p->full.rank; d++)
    n += (size_t)snprintf(text->shape + n, sizeof text->shape - n, "%s%" PRId64, d ? " " : "", p->full.shape[d]);
  *entry = (rfi_safetensors_entry){.name = text->name, .dtype = p->full.dtype, .rank = 1, .shape = {p->count}};
  return RFR_OK;
}

rfr_status rfi_safetensors_write_parts_header(rfr_ctx *ctx, rfi_file *file, const rfi_safetensors_part *parts, int n) {
  rfr_status s;
  part_text *texts = NULL;
  rfi_safetensors_entry *entries = NULL;
  const char **pairs = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, ((size_t)n + 1) * sizeof *texts, &texts));
  RFI_GOTO(RFI_ALLOC(ctx, ((size_t)n + 1) * sizeof *entries, &entries));
  RFI_GOTO(RFI_ALLOC(ctx, ((size_t)n + 1) * 2 * sizeof *pairs, &pairs));
  for (int i = 0; i < n; i++) {
    RFI_GOTO(describe_part(&parts[i], &texts[i], &entries[i]));
    pairs[2 * i] = parts[i].full.name;
    pairs[2 * i + 1] = texts[i].shape;
  }
  s = rfi_safetensors_write_header(ctx, file, entries, n, pairs, n, NULL);
fail:
  rfi_free(ctx, texts);
  rfi_free(ctx, entries);
  rfi_free(ctx, pairs);
  return s;
}
