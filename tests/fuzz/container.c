/* SPDX-License-Identifier: Apache-2.0 */
#include "container.h"

#include <stdlib.h>
#include <string.h>

#include "data/block_formats.h"

static uint64_t number(const uint8_t *data, int bytes) {
  uint64_t x = 0;
  memcpy(&x, data, (size_t)bytes);
  return x;
}

/* ---- safetensors ---- */

size_t rft_safetensors_header(const uint8_t *data, size_t n) {
  if (n < 10 || data[8] != '{' || data[7] || data[6]) return 0;
  const uint64_t header = number(data, 8);
  return header <= n - 8 ? (size_t)header : n - 8;
}

/* Bits of an element by the name of its dtype: 8 for BOOL, otherwise the first number in the name. */
static int64_t bits_of(const char *dtype) {
  return strcmp(dtype, "BOOL") == 0 ? 8 : atoi(dtype + strcspn(dtype, "0123456789"));
}

int64_t rft_safetensors_tile(json_t *header) {
  enum { MOST = 1 << 20 };
  const char *name;
  json_t *entry, *size;
  int64_t at = 0;
  json_object_foreach(header, name, entry) {
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape");
    int64_t bits = dtype ? bits_of(dtype) : 0;
    size_t i;
    if (!dtype || !json_is_array(shape)) continue;
    json_array_foreach(shape, i, size) {
      const json_int_t d = json_integer_value(size);
      bits = d < 0 || d > MOST || bits < 0 || bits * d > MOST ? -1 : bits * d;
    }
    if (bits < 0 || bits % 8 || at > MOST) continue;
    json_object_set_new(entry, "data_offsets", json_pack("[I, I]", (json_int_t)at, (json_int_t)(at + bits / 8)));
    at += bits / 8;
  }
  return at;
}

size_t rft_safetensors_seal(uint8_t *data, size_t header, size_t most) {
  json_t *o = json_loadb((const char *)data + 8, header, JSON_REJECT_DUPLICATES, NULL);
  size_t n = 8 + header;
  if (json_is_object(o)) {
    const size_t bytes = (size_t)rft_safetensors_tile(o);
    char *text = json_dumps(o, JSON_COMPACT);
    const size_t length = text ? strlen(text) : 0;
    if (text && 8 + length + bytes <= most) {
      memcpy(data + 8, text, length);
      memset(data + 8 + length, 0, bytes);
      header = length;
      n = 8 + length + bytes;
    }
    free(text);
  }
  json_decref(o);
  const uint64_t prefix = header;
  memcpy(data, &prefix, 8);
  return n;
}

/* ---- GGUF ---- */

typedef struct cursor {
  const uint8_t *data;
  size_t n, at;
  bool failed;
} cursor;

static uint64_t take(cursor *c, int bytes) {
  c->failed = c->failed || (size_t)bytes > c->n - c->at;
  if (c->failed) return 0;
  c->at += (size_t)bytes;
  return number(c->data + c->at - bytes, bytes);
}

static void skip(cursor *c, uint64_t count, uint64_t size) {
  c->failed = c->failed || (count && size > (c->n - c->at) / count);
  if (!c->failed) c->at += (size_t)(count * size);
}

static uint64_t take_field(cursor *c, rft_gguf_part *p, int bytes) {
  if (p->n_fields < 8) p->fields[p->n_fields++] = c->at;
  return take(c, bytes);
}

static void find_values(cursor *c, uint64_t kind, uint64_t count) {
  static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  c->failed = c->failed || kind >= sizeof sizes || kind == 9;
  if (!c->failed && kind != 8) skip(c, count, sizes[kind]);
  for (uint64_t i = 0; kind == 8 && i < count && !c->failed; i++) {
    const uint64_t length = take(c, 8);
    skip(c, 1, length);
  }
}

static bool find_part(cursor *c, bool is_tensor, rft_gguf_part *p) {
  enum { ARRAY = 9 };
  *p = (rft_gguf_part){.is_tensor = is_tensor, .begin = c->at};
  const uint64_t length = take(c, 8);
  p->name = c->at;
  skip(c, 1, length);
  if (is_tensor) {
    const uint64_t rank = take_field(c, p, 4);
    for (uint64_t i = 0; i < rank && i < 4; i++) take_field(c, p, 8);
    take_field(c, p, 4);
    take_field(c, p, 8);
    c->failed = c->failed || rank > 4;
  } else {
    uint64_t kind = take_field(c, p, 4), count = 1;
    if (kind == ARRAY) {
      kind = take_field(c, p, 4);
      count = take_field(c, p, 8);
    }
    find_values(c, kind, count);
  }
  p->end = c->at;
  return !c->failed;
}

void rft_gguf_find(const uint8_t *data, size_t n, rft_gguf_parts *out) {
  cursor c = {data, n, 8, n < 24};
  const uint64_t n_tensors = take(&c, 8), n_keys = take(&c, 8);
  const int most = sizeof out->items / sizeof *out->items;
  out->n = 0;
  for (uint64_t i = 0; i < n_keys && out->n < most && find_part(&c, false, &out->items[out->n]); i++) out->n++;
  for (uint64_t i = 0; i < n_tensors && out->n < most && find_part(&c, true, &out->items[out->n]); i++) out->n++;
}

void rft_gguf_count(uint8_t *data, bool tensors, int change) {
  uint64_t count = number(data + (tensors ? 8 : 16), 8) + (uint64_t)change;
  memcpy(data + (tensors ? 8 : 16), &count, 8);
}

/* Bytes of a tensor; 0 if they cannot be determined. */
static uint64_t tensor_bytes(const uint8_t *data, const rft_gguf_part *p) {
  const int rank = p->n_fields - 3;
  const rfi_block_format *f = rfi_block_format_of((uint32_t)number(data + p->fields[1 + rank], 4));
  uint64_t elements = 1;
  for (int i = 0; i < rank; i++)
    if (__builtin_mul_overflow(elements, number(data + p->fields[1 + i], 8), &elements) || elements > 1 << 20) return 0;
  return f ? elements / (uint64_t)f->elements * (uint64_t)f->bytes : 0;
}

size_t rft_gguf_seal(uint8_t *data, size_t n, size_t most) {
  static const char key[] = "general.alignment";
  rft_gguf_parts parts;
  uint64_t alignment = 32, offset = 0;
  rft_gguf_find(data, n, &parts);
  for (int i = 0; i < parts.n; i++) {
    const rft_gguf_part *p = &parts.items[i];
    if (p->fields[0] - p->name == sizeof key - 1 && memcmp(data + p->name, key, sizeof key - 1) == 0 &&
        p->end == p->fields[0] + 8)
      alignment = number(data + p->fields[0] + 4, 4);
  }
  if (parts.n == 0 || alignment < 1 || alignment > 4096) return n;
  for (int i = 0; i < parts.n; i++) {
    const rft_gguf_part *p = &parts.items[i];
    if (!p->is_tensor) continue;
    offset = (offset + alignment - 1) / alignment * alignment;
    memcpy(data + p->end - 8, &offset, 8);
    offset += tensor_bytes(data, p);
  }
  const uint64_t start = (parts.items[parts.n - 1].end + alignment - 1) / alignment * alignment;
  if (start + offset > most) return n;
  if (start + offset > n) memset(data + n, 0, (size_t)(start + offset) - n);
  return (size_t)(start + offset);
}
