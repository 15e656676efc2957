/* SPDX-License-Identifier: Apache-2.0
 *
 * Counts of distinct byte strings. The i-th distinct string has the index i.
 */
#ifndef RFI_WORD_TABLE_H
#define RFI_WORD_TABLE_H

#include "base/base.h"

typedef struct rfi_word {
  uint32_t begin, n; /* offsets in the table's text */
  int64_t count;
} rfi_word;

typedef struct rfi_word_slot {
  uint32_t hash, word; /* word: index + 1, 0: empty */
} rfi_word_slot;

/* Starts as {ctx}. */
typedef struct rfi_word_table {
  rfr_ctx *ctx;
  char *text;
  size_t n_text, text_capacity;
  rfi_word *words;
  size_t n, capacity;
  rfi_word_slot *slots;
  size_t n_slots; /* a power of two, or 0 */
} rfi_word_table;

/* Adds to the count of a string. Errors: overflow (4 GiB of distinct text), memory.alloc. */
rfr_status rfi_word_table_add(rfi_word_table *t, const char *s, size_t n, int64_t count);
/* The index of a string, -1: it is not in the table. */
int64_t rfi_word_table_find(const rfi_word_table *t, const char *s, size_t n);
/* Adds all counts of `from`. */
rfr_status rfi_word_table_join(rfi_word_table *t, const rfi_word_table *from);
void rfi_word_table_deinit(rfi_word_table *t);

#endif
