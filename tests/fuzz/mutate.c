/* SPDX-License-Identifier: Apache-2.0
 *
 * libFuzzer's mutator of all targets. Random bytes break a format at its first check, so most mutants are made of the
 * input's own parts: values of JSON, words and lines of text, fields and descriptions of a container. After that the
 * lengths and offsets of a container are often repaired, so that later checks are reached. The first bytes of an input
 * determine its format.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "container.h"
#include "fuzz.h"
#include "json_text.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t most, unsigned seed);

enum { PIECE = 4096 };

static uint64_t random_state;

static size_t draw(size_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return n ? (size_t)(random_state >> 20) % n : 0;
}

typedef struct span {
  size_t begin, end;
} span;

/* Replaces a span by `with`, which must not lie in `data`. Returns the new size; the size is unchanged if there is no
 * space. */
static size_t splice(uint8_t *data, size_t n, size_t most, span at, const void *with, size_t n_with) {
  const size_t after = n - (at.end - at.begin) + n_with;
  if (after > most) return n;
  memmove(data + at.begin + n_with, data + at.end, n - at.end);
  if (n_with) memcpy(data + at.begin, with, n_with);
  return after;
}

/* Replaces a span by a copy of another span. */
static size_t copy_span(uint8_t *data, size_t n, size_t most, span from, span to) {
  uint8_t piece[PIECE];
  const size_t length = from.end - from.begin;
  if (length > PIECE) return n;
  memcpy(piece, data + from.begin, length);
  return splice(data, n, most, to, piece, length);
}

/* Lets libFuzzer change the bytes of a span: its dictionary, comparisons and random bytes. */
static size_t mutate_span(uint8_t *data, size_t n, size_t most, span at) {
  uint8_t piece[PIECE];
  const size_t length = at.end - at.begin;
  if (length > PIECE / 2) return n;
  memcpy(piece, data + at.begin, length);
  return splice(data, n, most, at, piece, LLVMFuzzerMutate(piece, length, PIECE));
}

static size_t set_extreme(uint8_t *data, size_t n, size_t most, span at) {
  const char *text = rft_extremes[draw(RFT_EXTREMES)];
  return splice(data, n, most, at, text, strlen(text));
}

/* ---- JSON ---- */

static bool find_value(const uint8_t *data, size_t n, span *out) {
  const char *text = (const char *)data, *end = text + n, *at = rft_json_next_value(text + draw(n), end, ":[,");
  if (!at) at = rft_json_next_value(text, end, ":[,");
  if (!at) return false;
  *out = (span){(size_t)(at - text), (size_t)(rft_json_value_end(at, end) - text)};
  return true;
}

/* Finds the string before a colon. */
static bool find_key(const uint8_t *data, size_t n, span *out) {
  const size_t start = draw(n);
  for (size_t k = 0; k < n; k++) {
    const size_t i = (start + k) % n;
    if (data[i] != ':' || i < 2 || data[i - 1] != '"') continue;
    size_t begin = i - 2;
    while (begin > 0 && data[begin] != '"') begin--;
    *out = (span){begin, i};
    return true;
  }
  return false;
}

/* Removes the value with its key and the comma after it. */
static size_t remove_value(uint8_t *data, size_t n, size_t most, span at) {
  while (at.end < n && (data[at.end] == ' ' || data[at.end] == '\n')) at.end++;
  at.end += at.end < n && data[at.end] == ',';
  if (at.begin >= 2 && (data[at.begin - 1] == ':' || data[at.begin - 2] == ':')) {
    while (at.begin > 0 && data[at.begin] != ':') at.begin--;
    at.begin -= at.begin > 0;
    for (at.begin -= at.begin > 0; at.begin > 0 && data[at.begin] != '"';) at.begin--;
  }
  return splice(data, n, most, at, NULL, 0);
}

static size_t mutate_json(uint8_t *data, size_t n, size_t most) {
  span at, other;
  if (!find_value(data, n, &at) || !find_value(data, n, &other)) return LLVMFuzzerMutate(data, n, most);
  switch (draw(8)) {
    case 0:
    case 1: return set_extreme(data, n, most, at);
    case 2: return copy_span(data, n, most, other, at);
    case 3: return mutate_span(data, n, most, at);
    case 4: return remove_value(data, n, most, at);
    case 5: /* [a, b] becomes [a,a, b] */
      if (n + 1 + at.end - at.begin > most) return n;
      n = splice(data, n, most, (span){at.end, at.end}, ",", 1);
      return copy_span(data, n, most, at, (span){at.end + 1, at.end + 1});
    case 6:
      if (!find_key(data, n, &at) || !find_key(data, n, &other)) return n;
      return copy_span(data, n, most, other, at);
    default:
      if (!find_key(data, n, &at)) return n;
      return mutate_span(data, n, most, (span){at.begin + 1, at.end - 1});
  }
}

/* ---- words and lines ---- */

static bool in_word(uint8_t c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c >= 0x80;
}

/* A sequence of letters and digits, or one other byte. */
static span find_word(const uint8_t *data, size_t n) {
  size_t begin = draw(n), end;
  while (begin > 0 && in_word(data[begin]) && in_word(data[begin - 1])) begin--;
  for (end = begin + 1; end < n && in_word(data[begin]) && in_word(data[end]);) end++;
  return (span){begin, end};
}

static span find_line(const uint8_t *data, size_t n) {
  size_t begin = draw(n), end = begin;
  while (begin > 0 && data[begin - 1] != '\n') begin--;
  while (end < n && data[end] != '\n') end++;
  return (span){begin, end + (end < n)};
}

static size_t mutate_text(uint8_t *data, size_t n, size_t most) {
  const bool lines = draw(3) == 0;
  const span at = lines ? find_line(data, n) : find_word(data, n),
             other = lines ? find_line(data, n) : find_word(data, n);
  switch (draw(6)) {
    case 0: return splice(data, n, most, at, NULL, 0);
    case 1: return copy_span(data, n, most, at, (span){at.end, at.end});
    case 2: return lines ? copy_span(data, n, most, other, (span){at.end, at.end}) : set_extreme(data, n, most, at);
    case 3: return mutate_span(data, n, most, at);
    default: return copy_span(data, n, most, other, at);
  }
}

/* ---- containers ---- */

/* Changes the header of a safetensors file and its length. */
static size_t mutate_safetensors(uint8_t *data, size_t n, size_t most) {
  size_t header = rft_safetensors_header(data, n);
  if (draw(8) == 0) return LLVMFuzzerMutate(data, n, most);
  const size_t room = most - 8;
  header = mutate_json(data + 8, header, header + 512 < room ? header + 512 : room);
  return draw(8) ? rft_safetensors_seal(data, header, most) : 8 + header;
}

/* Changes a field of the descriptions of keys and tensors, or a description. */
static size_t mutate_gguf(uint8_t *data, size_t n, size_t most) {
  static const uint64_t numbers[] = {0,          1,          2,          3,          4,          5,          7,
                                     8,          9,          10,         12,         13,         32,         64,
                                     65536,      0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 42, 1ull << 61,
                                     1ull << 62, 1ull << 63, INT64_MAX,  UINT64_MAX};
  rft_gguf_parts parts;
  rft_gguf_find(data, n, &parts);
  if (parts.n == 0 || draw(6) == 0) return LLVMFuzzerMutate(data, n, most);
  const rft_gguf_part *p = &parts.items[draw((size_t)parts.n)], *q = &parts.items[draw((size_t)parts.n)];
  const span at = {p->begin, p->end}, other = {q->begin, q->end};
  const span field = {p->fields[draw((size_t)p->n_fields)], 0};
  uint64_t number = numbers[draw(sizeof numbers / sizeof *numbers)];
  switch (draw(6)) {
    case 0:
    case 1: memcpy(data + field.begin, &number, draw(2) ? 4 : field.begin + 8 <= p->end ? 8 : 4); break;
    case 2: return mutate_span(data, n, most, (span){p->name, p->fields[0]});
    case 3: return mutate_span(data, n, most, (span){p->fields[0], p->end});
    case 4:
      if (p->is_tensor != q->is_tensor) return n;
      n = copy_span(data, n, most, other, at);
      break;
    default:
      if (draw(2)) {
        n = splice(data, n, most, at, NULL, 0);
        rft_gguf_count(data, p->is_tensor, -1);
      } else if (n + (q->end - q->begin) <= most) {
        n = copy_span(data, n, most, other, (span){q->end, q->end});
        rft_gguf_count(data, q->is_tensor, 1);
      }
      break;
  }
  return draw(8) ? rft_gguf_seal(data, n, most) : n;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t most, unsigned seed) {
  random_state = seed * 0x9E3779B97F4A7C15u + 1;
  draw(1);
  if (n < 4 || draw(5) == 0) return LLVMFuzzerMutate(data, n, most);
  size_t out;
  if (memcmp(data, "GGUF", 4) == 0) out = mutate_gguf(data, n, most);
  else if (rft_safetensors_header(data, n)) out = mutate_safetensors(data, n, most);
  else if (memchr(data, '{', n) && draw(3)) out = mutate_json(data, n, most);
  else if (memchr(data, 0, n < 16 ? n : 16)) out = LLVMFuzzerMutate(data, n, most);
  else out = mutate_text(data, n, most);
  return out ? out : LLVMFuzzerMutate(data, n, most);
}
