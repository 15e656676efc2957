/* SPDX-License-Identifier: Apache-2.0
 *
 * A bump allocator over the context's allocator: all its memory is freed at once.
 */
#ifndef RFI_ARENA_H
#define RFI_ARENA_H

#include <stdbool.h>
#include <stddef.h>

#include "refrain/ctx.h"

typedef struct rfi_arena rfi_arena;

rfr_status rfi_arena_create(rfr_ctx *ctx, rfi_arena **out);
void rfi_arena_destroy(rfi_arena *arena); /* accepts NULL */
/* Zeroed memory aligned to 16 bytes, or NULL (the error is set). */
void *rfi_arena_alloc(rfi_arena *arena, size_t bytes);
/* Copies of strings; NULL when out of memory. */
char *rfi_arena_strdup(rfi_arena *arena, const char *s);
char *rfi_arena_strndup(rfi_arena *arena, const char *s, size_t n);
char *rfi_arena_printf(rfi_arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Grows an array in the arena to hold at least `want` elements (doubling; the old block
 * stays in the arena); returns false when out of memory. */
bool rfi_arena_grow(rfi_arena *arena, void **array, int *capacity, int want, size_t element);

#endif
