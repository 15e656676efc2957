/* SPDX-License-Identifier: Apache-2.0
 *
 * A bump allocator: a list of chunks, the newest first, each twice the size of the previous one up to a limit.
 *
 * Invariant: a byte is handed out once and is never freed before the arena is destroyed, so it is still zero from the
 * context's allocator and is not cleared here. A block larger than the next chunk gets a chunk of its own size; the
 * rest of the old chunk is lost, at most half of the arena's bytes.
 */
#include "base/arena.h"

#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include "base/base.h"

enum { ALIGNMENT = 16, FIRST_CHUNK = 4096, LARGEST_CHUNK = 1 << 20 };

typedef struct chunk {
  struct chunk *next;
  size_t used, size; /* bytes of this block, header included */
} chunk;

struct rfi_arena {
  rfr_ctx *ctx;
  chunk *chunks;
  size_t next_size;
};

static size_t round_up(size_t n) { return (n + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1); }

rfr_status rfi_arena_create(rfr_ctx *ctx, rfi_arena **out) {
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  (*out)->ctx = ctx;
  (*out)->next_size = FIRST_CHUNK;
  return RFR_OK;
}

void rfi_arena_destroy(rfi_arena *arena) {
  if (arena == NULL) return;
  for (chunk *c = arena->chunks, *next; c != NULL; c = next) {
    next = c->next;
    rfi_free(arena->ctx, c);
  }
  rfi_free(arena->ctx, arena);
}

void *rfi_arena_alloc(rfi_arena *arena, size_t bytes) {
  const size_t header = round_up(sizeof(chunk));
  if (bytes > (SIZE_MAX >> 1) - header - ALIGNMENT) {
    rfi_fail(RFI_E_OVERFLOW, "an arena block of %zu bytes is too large", bytes);
    return NULL;
  }
  bytes = bytes == 0 ? ALIGNMENT : round_up(bytes); /* distinct blocks have distinct addresses */
  chunk *c = arena->chunks;
  if (c == NULL || c->size - c->used < bytes) {
    size_t size = arena->next_size < header + bytes ? header + bytes : arena->next_size;
    if (RFI_ALLOC(arena->ctx, size, &c) != RFR_OK) return NULL;
    c->next = arena->chunks;
    c->used = header;
    c->size = size;
    arena->chunks = c;
    if (arena->next_size < LARGEST_CHUNK) arena->next_size *= 2;
  }
  void *memory = (char *)c + c->used;
  c->used += bytes;
  return memory;
}

char *rfi_arena_strndup(rfi_arena *arena, const char *s, size_t n) {
  n = strnlen(s, n);
  char *copy = rfi_arena_alloc(arena, n + 1);
  if (copy != NULL) memcpy(copy, s, n);
  return copy;
}

char *rfi_arena_strdup(rfi_arena *arena, const char *s) { return rfi_arena_strndup(arena, s, strlen(s)); }

char *rfi_arena_printf(rfi_arena *arena, const char *format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  char *text = NULL;
  int n = rfi_vsnprintf(NULL, 0, format, args);
  if (n < 0) {
    rfi_fail(RFI_E_INTERNAL, "the C library refuses the format: %s", format);
  } else {
    text = rfi_arena_alloc(arena, (size_t)n + 1);
    if (text != NULL) rfi_vsnprintf(text, (size_t)n + 1, format, again);
  }
  va_end(again);
  va_end(args);
  return text;
}

bool rfi_arena_grow(rfi_arena *arena, void **array, int *capacity, int want, size_t element) {
  if (want <= *capacity) return true;
  int64_t grown = 2 * (int64_t)*capacity;
  if (grown < 8) grown = 8;
  if (grown < want) grown = want;
  if (grown > INT_MAX) grown = INT_MAX;
  size_t bytes;
  if (__builtin_mul_overflow((size_t)grown, element, &bytes)) {
    rfi_fail(RFI_E_OVERFLOW, "an array of %lld elements of %zu bytes is too large", (long long)grown, element);
    return false;
  }
  void *memory = rfi_arena_alloc(arena, bytes), *old;
  if (memory == NULL) return false;
  /* memcpy, because the caller's pointer is not a void * and may not be accessed as one */
  memcpy(&old, array, sizeof old);
  if (*capacity > 0) memcpy(memory, old, (size_t)*capacity * element);
  memcpy(array, &memory, sizeof memory);
  *capacity = (int)grown;
  return true;
}
