/* SPDX-License-Identifier: Apache-2.0
 *
 * All words are one array of symbols with separators between them. A merged symbol stays at the position of its first
 * byte, and its length is stored at its first and its last position, so both adjacent tokens are found in one step.
 * Each pair has a list of positions where it stood when they were added; a position whose symbols have changed since is
 * skipped. So a merge visits its own occurrences alone, whatever the length of words, and all merges together take
 * about as many visits as the words have bytes.
 *
 * Counts in the heap may be too large, never too small: a pair whose count has fallen is pushed again with its count.
 * The count of a merged pair stays as it was. A pair can come back after its merge, if another merge makes a text that
 * is a token already; then its count is larger than all others and it is merged at once, as an encoder would.
 */
#include "text/bpe_train.h"

#include <string.h>

#include "text/tokenizer_parts.h"

enum { SEPARATOR = 0xFFFFFFFF, DEAD = 0xFFFFFFFE };
#define NONE 0u /* index of a node */

typedef struct pair {
  uint64_t key; /* left << 32 | right */
  int64_t count;
  uint32_t head, tail; /* nodes */
  bool is_touched, is_merged;
} pair;

typedef struct node {
  uint32_t position, next;
} node;

typedef struct candidate {
  int64_t count;
  uint64_t key;
} candidate;

typedef struct trainer {
  rfr_ctx *ctx;
  const rfi_word_table *words;
  uint32_t *id, *length, *word; /* by position */
  size_t n;
  pair *pairs;
  size_t n_pairs, pairs_capacity;
  uint32_t *slots; /* index of a pair + 1, 0: empty */
  size_t n_slots;
  node *nodes; /* the first is not used */
  size_t n_nodes, nodes_capacity;
  uint32_t unused; /* list of nodes */
  candidate *heap;
  size_t n_heap, heap_capacity;
  uint32_t *touched; /* pairs that got new positions in this merge */
  size_t n_touched, touched_capacity;
  rfi_string text;
} trainer;

static uint64_t key_of(uint32_t left, uint32_t right) { return (uint64_t)left << 32 | right; }

/* ---- pairs ---- */

static size_t slot_of(uint64_t key, size_t n_slots) {
  const uint64_t x = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
  return (size_t)(x ^ x >> 32) & (n_slots - 1);
}

static rfr_status grow_slots(trainer *t) {
  const size_t n = t->n_slots ? 2 * t->n_slots : 1 << 12;
  uint32_t *slots;
  RFI_TRY(RFI_ALLOC(t->ctx, n * sizeof *slots, &slots));
  for (size_t i = 0; i < t->n_pairs; i++) {
    size_t at = slot_of(t->pairs[i].key, n);
    while (slots[at]) at = (at + 1) & (n - 1);
    slots[at] = (uint32_t)i + 1;
  }
  rfi_free(t->ctx, t->slots);
  t->slots = slots;
  t->n_slots = n;
  return RFR_OK;
}

/* The index of a pair; adds the pair if it is new. */
static rfr_status find_pair(trainer *t, uint64_t key, uint32_t *out) {
  if (2 * t->n_pairs >= t->n_slots) RFI_TRY(grow_slots(t));
  size_t at = slot_of(key, t->n_slots);
  for (; t->slots[at]; at = (at + 1) & (t->n_slots - 1))
    if (t->pairs[t->slots[at] - 1].key == key) return *out = t->slots[at] - 1, RFR_OK;
  if (t->n_pairs == t->pairs_capacity)
    RFI_TRY(rfi_grow(t->ctx, (void **)&t->pairs, &t->pairs_capacity, t->n_pairs, t->n_pairs + 1, sizeof *t->pairs));
  t->pairs[t->n_pairs] = (pair){.key = key};
  *out = (uint32_t)t->n_pairs++;
  t->slots[at] = *out + 1;
  return RFR_OK;
}

static rfr_status new_node(trainer *t, uint32_t position, uint32_t *out) {
  if (t->unused) {
    *out = t->unused;
    t->unused = t->nodes[*out].next;
  } else {
    if (t->n_nodes == t->nodes_capacity)
      RFI_TRY(rfi_grow(t->ctx, (void **)&t->nodes, &t->nodes_capacity, t->n_nodes, t->n_nodes + 1, sizeof *t->nodes));
    *out = (uint32_t)t->n_nodes++;
  }
  t->nodes[*out] = (node){position, NONE};
  return RFR_OK;
}

/* Adds an occurrence of a pair at `position` in a word that occurs `count` times. */
static rfr_status add_pair(trainer *t, uint64_t key, int64_t count, uint32_t position) {
  uint32_t i, x;
  RFI_TRY(find_pair(t, key, &i));
  RFI_TRY(new_node(t, position, &x));
  pair *p = &t->pairs[i];
  p->count += count;
  if (p->head == NONE) p->head = x;
  else t->nodes[p->tail].next = x;
  p->tail = x;
  if (p->is_touched) return RFR_OK;
  if (t->n_touched == t->touched_capacity)
    RFI_TRY(rfi_grow(t->ctx, (void **)&t->touched, &t->touched_capacity, t->n_touched, t->n_touched + 1,
                     sizeof *t->touched));
  t->touched[t->n_touched++] = i;
  t->pairs[i].is_touched = true;
  return RFR_OK;
}

static rfr_status remove_pair(trainer *t, uint64_t key, int64_t count) {
  uint32_t i;
  RFI_TRY(find_pair(t, key, &i));
  t->pairs[i].count -= count;
  return RFR_OK;
}

/* ---- the heap ---- */

static bool is_before(candidate a, candidate b) { return a.count != b.count ? a.count > b.count : a.key < b.key; }

static rfr_status push(trainer *t, candidate c) {
  if (t->n_heap == t->heap_capacity)
    RFI_TRY(rfi_grow(t->ctx, (void **)&t->heap, &t->heap_capacity, t->n_heap, t->n_heap + 1, sizeof *t->heap));
  size_t i = t->n_heap++;
  for (size_t up; i > 0 && is_before(c, t->heap[up = (i - 1) / 2]); i = up) t->heap[i] = t->heap[up];
  t->heap[i] = c;
  return RFR_OK;
}

static candidate pop(trainer *t) {
  const candidate top = t->heap[0], last = t->heap[--t->n_heap];
  size_t i = 0;
  for (size_t down = 1; down < t->n_heap; down = 2 * i + 1) {
    if (down + 1 < t->n_heap && is_before(t->heap[down + 1], t->heap[down])) down++;
    if (!is_before(t->heap[down], last)) break;
    t->heap[i] = t->heap[down];
    i = down;
  }
  if (t->n_heap) t->heap[i] = last;
  return top;
}

static rfr_status push_touched(trainer *t) {
  for (size_t i = 0; i < t->n_touched; i++) {
    pair *p = &t->pairs[t->touched[i]];
    p->is_touched = false;
    if (p->count > 0) RFI_TRY(push(t, (candidate){p->count, p->key}));
  }
  t->n_touched = 0;
  return RFR_OK;
}

/* ---- symbols ---- */

/* The bytes of the words as symbols. `first`: the id of each byte. Words of one byte have no pair. */
static rfr_status lay_out(trainer *t, const uint32_t first[256]) {
  size_t n = 1;
  for (size_t i = 0; i < t->words->n; i++)
    if (t->words->words[i].n > 1) n += t->words->words[i].n + 1u;
  if (n >= DEAD) return rfi_fail(RFI_E_OVERFLOW, "the distinct words of the text have %zu bytes; use less text", n);
  RFI_TRY(RFI_ALLOC(t->ctx, n * sizeof *t->id, &t->id));
  RFI_TRY(RFI_ALLOC(t->ctx, n * sizeof *t->length, &t->length));
  RFI_TRY(RFI_ALLOC(t->ctx, n * sizeof *t->word, &t->word));
  t->id[t->n++] = SEPARATOR;
  for (size_t i = 0; i < t->words->n; i++) {
    const rfi_word *w = &t->words->words[i];
    if (w->n < 2) continue;
    for (uint32_t k = 0; k < w->n; k++) {
      t->id[t->n] = first[(unsigned char)t->words->text[w->begin + k]];
      t->length[t->n] = 1;
      t->word[t->n++] = (uint32_t)i;
    }
    t->id[t->n++] = SEPARATOR;
  }
  return RFR_OK;
}

static rfr_status count_pairs(trainer *t) {
  for (size_t p = 1; p + 1 < t->n; p++)
    if (t->id[p] != SEPARATOR && t->id[p + 1] != SEPARATOR)
      RFI_TRY(add_pair(t, key_of(t->id[p], t->id[p + 1]), t->words->words[t->word[p]].count, (uint32_t)p));
  return push_touched(t);
}

/* Joins the symbol at p and the one after it. */
static rfr_status merge_at(trainer *t, uint32_t p, uint32_t id) {
  const uint32_t middle = p + t->length[p], end = middle + t->length[middle];
  const uint32_t left = t->id[p], right = t->id[middle];
  const int64_t count = t->words->words[t->word[p]].count;
  t->id[middle] = DEAD;
  t->id[p] = id;
  t->length[p] = t->length[end - 1] = end - p;
  if (t->id[p - 1] != SEPARATOR) {
    const uint32_t before = p - t->length[p - 1];
    RFI_TRY(remove_pair(t, key_of(t->id[before], left), count));
    RFI_TRY(add_pair(t, key_of(t->id[before], id), count, before));
  }
  if (t->id[end] != SEPARATOR) {
    RFI_TRY(remove_pair(t, key_of(right, t->id[end]), count));
    RFI_TRY(add_pair(t, key_of(id, t->id[end]), count, p));
  }
  return RFR_OK;
}

static rfr_status merge_all(trainer *t, uint32_t i, uint32_t id) {
  const uint64_t key = t->pairs[i].key;
  const uint32_t left = (uint32_t)(key >> 32), right = (uint32_t)key;
  uint32_t x = t->pairs[i].head;
  t->pairs[i].head = t->pairs[i].tail = NONE;
  while (x != NONE) {
    const node at = t->nodes[x];
    t->nodes[x].next = t->unused;
    t->unused = x;
    if (t->id[at.position] == left && t->id[at.position + t->length[at.position]] == right)
      RFI_TRY(merge_at(t, at.position, id));
    x = at.next;
  }
  return push_touched(t);
}

/* ---- merges ---- */

/* Whether the pair may be merged. *id: the id of its text, which becomes a new token if it is not one yet. */
static rfr_status make_token(trainer *t, const rfi_word_table *reserved, uint64_t key, rfi_trained_bpe *out, bool *may,
                             uint32_t *id) {
  const size_t offset = (size_t)out->n_special;
  const uint32_t parts[] = {(uint32_t)(key >> 32), (uint32_t)key};
  t->text.n = 0;
  for (int i = 0; i < 2; i++) {
    const rfi_word *w = &out->tokens.words[parts[i] - offset];
    RFI_TRY(rfi_string_append(&t->text, out->tokens.text + w->begin, w->n));
  }
  *may = t->text.n <= RFI_TRAINED_TOKEN_BYTES && rfi_word_table_find(reserved, t->text.data, t->text.n) < 0;
  if (!*may) return RFR_OK;
  RFI_TRY(rfi_word_table_add(&out->tokens, t->text.data, t->text.n, 1));
  *id = (uint32_t)(offset + (size_t)rfi_word_table_find(&out->tokens, t->text.data, t->text.n));
  return RFR_OK;
}

static rfr_status add_merge(trainer *t, uint32_t i, int64_t count, rfi_trained_bpe *out) {
  pair *p = &t->pairs[i];
  if (p->is_merged) return RFR_OK;
  p->is_merged = true;
  if (out->n_merges == out->merges_capacity)
    RFI_TRY(rfi_grow(t->ctx, (void **)&out->merges, &out->merges_capacity, out->n_merges, out->n_merges + 1,
                     sizeof *out->merges));
  out->merges[out->n_merges++] = (struct rfi_trained_merge){(uint32_t)(p->key >> 32), (uint32_t)p->key};
  out->least = count;
  return RFR_OK;
}

static rfr_status merge_loop(trainer *t, const rfi_word_table *reserved, int64_t vocab_size, int64_t min_frequency,
                             rfi_trained_bpe *out) {
  while (t->n_heap && (int64_t)out->tokens.n + out->n_special < vocab_size) {
    const candidate top = pop(t);
    uint32_t i, id = 0;
    bool may;
    RFI_TRY(find_pair(t, top.key, &i));
    const int64_t count = t->pairs[i].count;
    if (t->pairs[i].head == NONE) continue; /* a second heap entry of a merged pair */
    if (count != top.count) {
      if (count > 0) RFI_TRY(push(t, (candidate){count, top.key}));
      continue;
    }
    if (count < min_frequency) break;
    RFI_TRY(make_token(t, reserved, top.key, out, &may, &id));
    if (!may) continue;
    RFI_TRY(add_merge(t, i, count, out));
    RFI_TRY(merge_all(t, i, id));
  }
  return RFR_OK;
}

/* The 256 bytes as tokens; `first` gets their ids. */
static rfr_status add_bytes(rfi_trained_bpe *out, uint32_t first[256]) {
  for (uint32_t c = 0; c < 0x180; c++) {
    const int byte = rfi_char_byte(c);
    if (byte < 0) continue;
    first[byte] = (uint32_t)(out->n_special + (int64_t)out->tokens.n);
    RFI_TRY(rfi_word_table_add(&out->tokens, &(char){(char)byte}, 1, 1));
  }
  return RFR_OK;
}

rfr_status rfi_bpe_train(rfr_ctx *ctx, const rfi_word_table *words, const rfi_word_table *reserved, int64_t vocab_size,
                         int64_t min_frequency, rfi_trained_bpe *out) {
  trainer t = {.ctx = ctx, .words = words, .n_nodes = 1, .text = {.ctx = ctx}};
  uint32_t first[256];
  rfr_status s;
  out->tokens.ctx = ctx;
  RFI_GOTO(add_bytes(out, first));
  RFI_GOTO(rfi_grow(ctx, (void **)&t.nodes, &t.nodes_capacity, 0, 1, sizeof *t.nodes));
  RFI_GOTO(lay_out(&t, first));
  RFI_GOTO(count_pairs(&t));
  RFI_GOTO(merge_loop(&t, reserved, vocab_size, min_frequency < 1 ? 1 : min_frequency, out));
fail: /* reached on success too */
  rfi_free(ctx, t.id);
  rfi_free(ctx, t.length);
  rfi_free(ctx, t.word);
  rfi_free(ctx, t.pairs);
  rfi_free(ctx, t.slots);
  rfi_free(ctx, t.nodes);
  rfi_free(ctx, t.heap);
  rfi_free(ctx, t.touched);
  rfi_string_deinit(&t.text);
  return s;
}

void rfi_trained_bpe_deinit(rfr_ctx *ctx, rfi_trained_bpe *t) {
  t->tokens.ctx = ctx;
  rfi_word_table_deinit(&t->tokens);
  rfi_free(ctx, t->merges);
  t->merges = NULL;
}

/* ---- cuts ---- */

/* Cuts after a line feed that follows a visible ASCII character and precedes a letter. With all patterns the line feed
 * ends a word there, whether the text continues or not. (After a blank, GPT-2's pattern would make one word of both at
 * the end of a text, and two before a letter.) The cut is next to ASCII characters, so it does not change how invalid
 * bytes are read. */
size_t rfi_words_cut(const char *s, size_t n, size_t from) {
  for (size_t i = from < 2 ? 2 : from; i < n; i++) {
    const char *line = memchr(s + i - 1, '\n', n - i);
    if (!line) return n;
    i = (size_t)(line - s) + 1;
    const char next = s[i], before = s[i - 2];
    const bool is_letter = (next >= 'a' && next <= 'z') || (next >= 'A' && next <= 'Z');
    if (is_letter && before > 0x20 && before < 0x7F) return i;
  }
  return n;
}
