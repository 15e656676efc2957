/* SPDX-License-Identifier: Apache-2.0 */
#include "text/word_table.h"

#include <string.h>

#include "text/tokenizer_parts.h"

enum { FIRST_SLOTS = 1024 };

static rfi_word_slot *find_slot(const rfi_word_table *t, const char *s, size_t n, uint32_t hash) {
  const size_t mask = t->n_slots - 1;
  for (size_t i = hash & mask;; i = (i + 1) & mask) {
    rfi_word_slot *slot = &t->slots[i];
    if (slot->word == 0) return slot;
    const rfi_word *w = &t->words[slot->word - 1];
    if (slot->hash == hash && w->n == n && memcmp(t->text + w->begin, s, n) == 0) return slot;
  }
}

static rfr_status grow_slots(rfi_word_table *t) {
  const size_t n = t->n_slots ? 2 * t->n_slots : FIRST_SLOTS;
  rfi_word_slot *slots;
  RFI_TRY(RFI_ALLOC(t->ctx, n * sizeof *slots, &slots));
  for (size_t i = 0; i < t->n_slots; i++) {
    size_t at = t->slots[i].hash & (n - 1);
    if (t->slots[i].word == 0) continue;
    while (slots[at].word) at = (at + 1) & (n - 1);
    slots[at] = t->slots[i];
  }
  rfi_free(t->ctx, t->slots);
  t->slots = slots;
  t->n_slots = n;
  return RFR_OK;
}

rfr_status rfi_word_table_add(rfi_word_table *t, const char *s, size_t n, int64_t count) {
  const uint32_t hash = (uint32_t)rfi_hash_bytes(s, n).low;
  if (2 * t->n >= t->n_slots) RFI_TRY(grow_slots(t));
  rfi_word_slot *slot = find_slot(t, s, n, hash);
  if (slot->word) {
    t->words[slot->word - 1].count += count;
    return RFR_OK;
  }
  if (t->n == t->capacity)
    RFI_TRY(rfi_grow(t->ctx, (void **)&t->words, &t->capacity, t->n, t->n + 1, sizeof *t->words));
  if (t->text_capacity - t->n_text < n)
    RFI_TRY(rfi_grow(t->ctx, (void **)&t->text, &t->text_capacity, t->n_text, t->n_text + n, 1));
  if (n) memcpy(t->text + t->n_text, s, n);
  t->words[t->n] = (rfi_word){(uint32_t)t->n_text, (uint32_t)n, count};
  t->n_text += n;
  *slot = (rfi_word_slot){hash, (uint32_t)++t->n};
  return RFR_OK;
}

int64_t rfi_word_table_find(const rfi_word_table *t, const char *s, size_t n) {
  return t->n ? (int64_t)find_slot(t, s, n, (uint32_t)rfi_hash_bytes(s, n).low)->word - 1 : -1;
}

rfr_status rfi_word_table_join(rfi_word_table *t, const rfi_word_table *from) {
  for (size_t i = 0; i < from->n; i++)
    RFI_TRY(rfi_word_table_add(t, from->text + from->words[i].begin, from->words[i].n, from->words[i].count));
  return RFR_OK;
}

void rfi_word_table_deinit(rfi_word_table *t) {
  rfi_free(t->ctx, t->text);
  rfi_free(t->ctx, t->words);
  rfi_free(t->ctx, t->slots);
  *t = (rfi_word_table){.ctx = t->ctx};
}
