/* SPDX-License-Identifier: Apache-2.0
 *
 * Byte-pair encoding: repeatedly merges the pair of symbols with the lowest rank; of equal pairs, the leftmost.
 *
 * Short pieces scan for the best pair; long ones use a heap, so that 100 kB of blanks take O(n log n) steps. Both give
 * the same tokens: a merged symbol covers more text than before, so a pair that was found earlier cannot become the
 * pair of another rank.
 *
 * The text can be cut between two characters that no merge joins; the tokens do not change. The cuts make vocabularies
 * without a pre-tokenizer (Llama 2, Gemma), whose piece is the full text, as fast as others.
 */
#include <string.h>

#include "text/tokenizer_parts.h"

enum { SHORT = 48, PAGE = 256, PAGES = RFI_CODE_POINTS / PAGE, CUT_BITS = 22 /* maximum */ };
#define NO_PAIR UINT64_MAX
#define NO_RANK UINT32_MAX

typedef struct pair {
  uint64_t key;
  uint32_t rank;
  int32_t id;
} pair;

struct rfi_bpe {
  const rfi_vocabulary *v;
  pair *pairs;
  int shift;
  uint64_t mask;
  bool raw, fuse_unknown, ignore_merges, has_affix, can_cut;
  char prefix[64], suffix[64];
  size_t n_prefix, n_suffix;
  int32_t unknown;
  int32_t byte_id[256];  /* raw: the symbol of each byte; otherwise the token <0xHH>, -1: none */
  int32_t *pages[PAGES]; /* pages with the ids of single characters, -1: no id; NULL: a page without ids */
  bool byte_fallback;
  int32_t *raw_table; /* raw with ignore_merges: hash table of ids, by their bytes */
  uint32_t raw_mask;
  uint64_t *cuts; /* bit set of the pairs of characters that some merge joins */
  int cut_shift;
};

static uint64_t key_of(int32_t a, int32_t b) { return (uint64_t)(uint32_t)a << 32 | (uint32_t)b; }
static uint64_t scatter(uint64_t key) { return key * 0x9E3779B97F4A7C15u; }

static const pair *find(const rfi_bpe *m, int32_t a, int32_t b) {
  const uint64_t key = key_of(a, b);
  for (uint64_t i = scatter(key) >> m->shift;; i = (i + 1) & m->mask) {
    if (m->pairs[i].key == key) return &m->pairs[i];
    if (m->pairs[i].key == NO_PAIR) return NULL;
  }
}

static int32_t char_id(const rfi_bpe *m, uint32_t c) {
  const int32_t *page = m->pages[c / PAGE];
  return page ? page[c % PAGE] : -1;
}

/* ---- creation ---- */

static rfr_status set_char(rfr_ctx *ctx, rfi_bpe *m, uint32_t c, int32_t id) {
  int32_t **page = &m->pages[c / PAGE];
  if (!*page) {
    RFI_TRY(RFI_ALLOC(ctx, PAGE * sizeof **page, page));
    memset(*page, -1, PAGE * sizeof **page);
  }
  (*page)[c % PAGE] = id;
  return RFR_OK;
}

/* Finds the tokens of one character, and the tokens that stand for bytes. */
static rfr_status find_symbols(rfr_ctx *ctx, rfi_bpe *m) {
  memset(m->byte_id, -1, sizeof m->byte_id);
  for (int b = 0; b < 256; b++) {
    char text[8];
    const size_t n = m->raw ? rfi_utf8_put(rfi_byte_char((unsigned char)b), text)
                            : (size_t)rfi_snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
    m->byte_id[b] = rfi_vocabulary_find(m->v, text, n);
  }
  for (int32_t id = 0; id < m->v->n; id++) {
    const rfi_bytes t = rfi_vocabulary_at(m->v, id);
    size_t i = 0;
    if (t.n == 0 || t.n > 4 || rfi_vocabulary_find(m->v, t.text, t.n) != id) continue;
    const uint32_t c = rfi_utf8_next(t.text, &i);
    if (i == t.n) RFI_TRY(set_char(ctx, m, c, id));
  }
  return RFR_OK;
}

/* The bytes for which a printable token stands; false if one of its characters stands for no byte. */
static bool raw_bytes(rfi_bytes t, char *out, size_t *n) {
  *n = 0;
  for (size_t i = 0; i < t.n;) {
    const int byte = rfi_char_byte(rfi_utf8_next(t.text, &i));
    if (byte < 0) return false;
    out[(*n)++] = (char)byte;
  }
  return true;
}

static rfr_status index_raw(rfr_ctx *ctx, rfi_bpe *m) {
  char *bytes = NULL;
  rfr_status s;
  size_t n;
  m->raw_mask = m->v->mask;
  RFI_GOTO(RFI_ALLOC(ctx, m->v->longest + 1, &bytes));
  RFI_GOTO(RFI_ALLOC(ctx, ((size_t)m->raw_mask + 1) * sizeof *m->raw_table, &m->raw_table));
  memset(m->raw_table, -1, ((size_t)m->raw_mask + 1) * sizeof *m->raw_table);
  for (int32_t id = 0; id < m->v->n; id++) {
    const rfi_bytes t = rfi_vocabulary_at(m->v, id);
    if (t.n == 0 || rfi_vocabulary_find_text(m->v, t.text, t.n) != id || !raw_bytes(t, bytes, &n)) continue;
    uint32_t i = (uint32_t)rfi_hash_bytes(bytes, n).low & m->raw_mask;
    while (m->raw_table[i] >= 0) i = (i + 1) & m->raw_mask;
    m->raw_table[i] = id;
  }
fail: /* reached on success too */
  rfi_free(ctx, bytes);
  return s;
}

/* Whether the bytes of a token equal s. */
static bool is_raw_text(rfi_bytes t, const char *s, size_t n) {
  size_t at = 0;
  for (size_t i = 0; i < t.n; at++)
    if (at == n || rfi_char_byte(rfi_utf8_next(t.text, &i)) != (unsigned char)s[at]) return false;
  return at == n;
}

static int32_t full_token(const rfi_bpe *m, const char *s, size_t n) {
  if (!m->raw) return rfi_vocabulary_find_text(m->v, s, n);
  for (uint32_t i = (uint32_t)rfi_hash_bytes(s, n).low & m->raw_mask; m->raw_table[i] >= 0; i = (i + 1) & m->raw_mask)
    if (is_raw_text(rfi_vocabulary_at(m->v, m->raw_table[i]), s, n)) return m->raw_table[i];
  return -1;
}

static uint64_t cut_bit(const rfi_bpe *m, uint32_t a, uint32_t b) {
  return scatter(key_of((int32_t)a, (int32_t)b)) >> m->cut_shift;
}

static rfr_status add_merge(rfi_bpe *m, const rfi_tokenizer_spec *spec, int64_t rank, char *joined) {
  const rfi_merge *x = &spec->merges[rank];
  const int32_t a = rfi_vocabulary_find(m->v, x->left.text, x->left.n);
  const int32_t b = rfi_vocabulary_find(m->v, x->right.text, x->right.n);
  const size_t skip = m->n_prefix;
  if (a < 0 || b < 0 || x->left.n == 0 || x->right.n <= skip)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "model.merges[%lld]: \"%.*s\" is not in model.vocab",
                       (long long)rank, (int)(a < 0 ? x->left.n : x->right.n), a < 0 ? x->left.text : x->right.text);
  const size_t n = x->left.n + x->right.n - skip;
  if (n >= RFI_TOKEN_BYTES_LIMIT)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "model.merges[%lld] produces a token of %zu bytes",
                       (long long)rank, n);
  memcpy(joined, x->left.text, x->left.n);
  memcpy(joined + x->left.n, x->right.text + skip, x->right.n - skip);
  const int32_t id = rfi_vocabulary_find(m->v, joined, n);
  if (id < 0)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0,
                       "model.merges[%lld]: the merged token \"%.*s\" is not in model.vocab", (long long)rank, (int)n,
                       joined);
  if (m->v->is_mark[id]) return RFR_OK;
  const uint64_t key = key_of(a, b);
  uint64_t i = scatter(key) >> m->shift;
  while (m->pairs[i].key != NO_PAIR && m->pairs[i].key != key) i = (i + 1) & m->mask;
  m->pairs[i] = (pair){key, (uint32_t)rank, id}; /* of equal pairs, the last one is used */
  if (!m->can_cut) return RFR_OK;
  size_t last = x->left.n - 1, first = 0;
  while (last > 0 && rfi_utf8_continues(x->left.text[last])) last--;
  const uint64_t bit = cut_bit(m, rfi_utf8_next(x->left.text, &last), rfi_utf8_next(x->right.text, &first));
  m->cuts[bit / 64] |= (uint64_t)1 << bit % 64;
  return RFR_OK;
}

rfr_status rfi_bpe_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_vocabulary *v, bool raw,
                          rfi_bpe **out) {
  rfr_status s;
  rfi_bpe *m = NULL;
  char *joined = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *m, &m));
  m->v = v;
  m->n_prefix = spec->continuing_prefix.n;
  m->n_suffix = spec->word_suffix.n;
  m->has_affix = m->n_prefix + m->n_suffix > 0;
  if (m->n_prefix > sizeof m->prefix || m->n_suffix > sizeof m->suffix)
    RFI_GOTO(rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0,
                         "model.continuing_subword_prefix and end_of_word_suffix have at most %zu bytes",
                         sizeof m->prefix));
  if (m->n_prefix) memcpy(m->prefix, spec->continuing_prefix.text, m->n_prefix);
  if (m->n_suffix) memcpy(m->suffix, spec->word_suffix.text, m->n_suffix);
  m->raw = raw;
  m->fuse_unknown = spec->fuse_unknown;
  m->ignore_merges = spec->ignore_merges;
  m->byte_fallback = spec->byte_fallback && !m->raw;
  m->unknown = spec->unknown;
  m->can_cut = !m->raw && !m->has_affix && !m->ignore_merges;
  RFI_GOTO(find_symbols(ctx, m));
  if (m->raw && m->ignore_merges) RFI_GOTO(index_raw(ctx, m));
  int bits = 4;
  while (((int64_t)1 << bits) < 2 * spec->n_merges) bits++;
  m->shift = 64 - bits;
  m->mask = ((uint64_t)1 << bits) - 1;
  RFI_GOTO(RFI_ALLOC(ctx, (m->mask + 1) * sizeof *m->pairs, &m->pairs));
  memset(m->pairs, -1, (m->mask + 1) * sizeof *m->pairs);
  m->cut_shift = 64 - (bits + 5 < CUT_BITS ? bits + 5 : CUT_BITS);
  if (m->can_cut) RFI_GOTO(RFI_ALLOC(ctx, ((size_t)1 << (64 - m->cut_shift)) / 8, &m->cuts));
  RFI_GOTO(RFI_ALLOC(ctx, 2 * v->longest + 1, &joined));
  for (int64_t i = 0; i < spec->n_merges; i++) RFI_GOTO(add_merge(m, spec, i, joined));
  rfi_free(ctx, joined);
  *out = m;
  return RFR_OK;
fail:
  rfi_free(ctx, joined);
  rfi_bpe_destroy(ctx, m);
  return s;
}

void rfi_bpe_destroy(rfr_ctx *ctx, rfi_bpe *m) {
  if (!m) return;
  for (int i = 0; i < PAGES; i++) rfi_free(ctx, m->pages[i]);
  rfi_free(ctx, m->pairs);
  rfi_free(ctx, m->raw_table);
  rfi_free(ctx, m->cuts);
  rfi_free(ctx, m);
}

/* ---- cutting ---- */

bool rfi_bpe_cuts(const rfi_bpe *m) { return m->can_cut; }

rfr_status rfi_bpe_cut(const rfi_bpe *m, rfr_ctx *ctx, const char *s, const rfi_pieces *in, rfi_pieces *out) {
  out->n = 0;
  for (size_t k = 0; k < in->n; k++) {
    size_t begin = in->items[k].begin, i = begin;
    const size_t end = in->items[k].end;
    uint32_t before = rfi_utf8_next(s, &i);
    bool known = char_id(m, before) >= 0;
    while (i < end) {
      const size_t at = i;
      const uint32_t c = rfi_utf8_next(s, &i);
      const bool is_known = char_id(m, c) >= 0;
      const uint64_t bit = cut_bit(m, before, c);
      /* Characters missing from the vocabulary become bytes, or one unknown token together with adjacent ones. */
      if (known && is_known && !(m->cuts[bit / 64] >> bit % 64 & 1)) {
        RFI_TRY(rfi_pieces_add(ctx, out, begin, at));
        begin = at;
      }
      before = c;
      known = is_known;
    }
    RFI_TRY(rfi_pieces_add(ctx, out, begin, end));
  }
  return RFR_OK;
}

/* ---- symbols ---- */

/* The id of the character s[begin, end) in a piece of n bytes with the prefix and the suffix. */
static int32_t affixed(const rfi_bpe *m, const char *s, size_t begin, size_t end, size_t n) {
  char text[4 + sizeof m->prefix + sizeof m->suffix];
  size_t at = 0;
  if (begin > 0) memcpy(text, m->prefix, m->n_prefix), at = m->n_prefix;
  memcpy(text + at, s + begin, end - begin);
  at += end - begin;
  if (end == n) memcpy(text + at, m->suffix, m->n_suffix), at += m->n_suffix;
  return rfi_vocabulary_find(m->v, text, at);
}

static bool has_bytes(const rfi_bpe *m, const char *s, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (m->byte_id[(unsigned char)s[i]] < 0) return false;
  return true;
}

/* A character that has no token, no fallback and no unknown token is dropped, as tokenizers does. */
static size_t split_chars(const rfi_bpe *m, const char *s, size_t n, rfi_symbol *x) {
  size_t count = 0, end;
  rfi_symbol unknown = {.id = -1};
  for (size_t begin = 0; begin < n; begin = end) {
    end = begin;
    const uint32_t c = rfi_utf8_next(s, &end);
    const int32_t id = m->has_affix ? affixed(m, s, begin, end, n) : char_id(m, c);
    if (id >= 0) {
      if (unknown.id >= 0) x[count++] = unknown;
      unknown.id = -1;
      x[count++] = (rfi_symbol){.id = id, .begin = (uint32_t)begin, .end = (uint32_t)end};
    } else if (m->byte_fallback && has_bytes(m, s + begin, end - begin)) {
      for (size_t i = begin; i < end; i++)
        x[count++] = (rfi_symbol){.id = m->byte_id[(unsigned char)s[i]], .begin = (uint32_t)i, .end = (uint32_t)i + 1};
    } else if (m->unknown >= 0) {
      if (unknown.id >= 0 && m->fuse_unknown) {
        unknown.end = (uint32_t)end;
        continue;
      }
      if (unknown.id >= 0) x[count++] = unknown;
      unknown = (rfi_symbol){.id = m->unknown, .begin = (uint32_t)begin, .end = (uint32_t)end};
    }
  }
  if (unknown.id >= 0) x[count++] = unknown;
  return count;
}

static size_t split_bytes(const rfi_bpe *m, const char *s, size_t n, rfi_symbol *x) {
  size_t count = 0;
  for (size_t i = 0; i < n; i++) {
    const int32_t id = m->byte_id[(unsigned char)s[i]];
    if (id >= 0) x[count++] = (rfi_symbol){.id = id, .begin = (uint32_t)i, .end = (uint32_t)i + 1};
  }
  return count;
}

/* ---- merging ---- */

static size_t merge_short(const rfi_bpe *m, rfi_symbol *x, size_t n) {
  uint32_t rank[SHORT];
  int32_t id[SHORT];
  for (size_t i = 0; i + 1 < n; i++) {
    const pair *p = find(m, x[i].id, x[i + 1].id);
    rank[i] = p ? p->rank : NO_RANK;
    id[i] = p ? p->id : -1;
  }
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; i++)
      if (rank[i] < rank[best]) best = i;
    if (rank[best] == NO_RANK) break;
    x[best].id = id[best];
    x[best].end = x[best + 1].end;
    n--;
    for (size_t i = best + 1; i < n; i++) x[i] = x[i + 1];
    for (size_t i = best + 1; i + 1 < n; i++) rank[i] = rank[i + 1], id[i] = id[i + 1];
    for (size_t i = best - (best > 0); i <= best && i + 1 < n; i++) {
      const pair *p = find(m, x[i].id, x[i + 1].id);
      rank[i] = p ? p->rank : NO_RANK;
      id[i] = p ? p->id : -1;
    }
  }
  return n;
}

static bool is_before(const rfi_candidate *a, const rfi_candidate *b) {
  return a->rank < b->rank || (a->rank == b->rank && a->position < b->position);
}

static void sift_up(rfi_candidate *heap, size_t i) {
  const rfi_candidate x = heap[i];
  for (size_t up; i > 0 && (up = (i - 1) / 2, is_before(&x, &heap[up])); i = up) heap[i] = heap[up];
  heap[i] = x;
}

static void sift_down(rfi_candidate *heap, size_t n, size_t i) {
  const rfi_candidate x = heap[i];
  for (size_t down; (down = 2 * i + 1) < n; i = down) {
    if (down + 1 < n && is_before(&heap[down + 1], &heap[down])) down++;
    if (!is_before(&heap[down], &x)) break;
    heap[i] = heap[down];
  }
  heap[i] = x;
}

static rfr_status push(const rfi_bpe *m, rfi_encoder *e, size_t *n, int32_t at) {
  const rfi_symbol *x = &e->symbols[at];
  const pair *p = x->next < 0 ? NULL : find(m, x->id, e->symbols[x->next].id);
  if (!p) return RFR_OK;
  if (*n == e->heap_capacity)
    RFI_TRY(rfi_grow(e->ctx, (void **)&e->heap, &e->heap_capacity, *n, *n + 1, sizeof *e->heap));
  e->heap[*n] = (rfi_candidate){p->rank, (uint32_t)at, p->id};
  sift_up(e->heap, (*n)++);
  return RFR_OK;
}

static rfr_status merge_long(const rfi_bpe *m, rfi_encoder *e, size_t *n) {
  rfi_symbol *x = e->symbols;
  size_t queued = 0, left = 0;
  const int32_t count = (int32_t)*n;
  for (int32_t i = 0; i < count; i++) x[i].previous = i - 1, x[i].next = i + 1 < count ? i + 1 : -1;
  for (int32_t i = 0; i + 1 < count; i++) RFI_TRY(push(m, e, &queued, i));
  while (queued > 0) {
    const rfi_candidate top = e->heap[0];
    e->heap[0] = e->heap[--queued];
    if (queued) sift_down(e->heap, queued, 0);
    rfi_symbol *a = &x[top.position];
    if (a->id < 0 || a->next < 0) continue;
    rfi_symbol *b = &x[a->next];
    const pair *p = find(m, a->id, b->id);
    if (!p || p->id != top.id) continue;
    a->id = p->id;
    a->end = b->end;
    a->next = b->next;
    b->id = -1;
    if (a->next >= 0) x[a->next].previous = (int32_t)top.position;
    if (a->previous >= 0) RFI_TRY(push(m, e, &queued, a->previous));
    RFI_TRY(push(m, e, &queued, (int32_t)top.position));
  }
  for (int32_t i = 0; i < count; i++)
    if (x[i].id >= 0) x[left++] = x[i];
  *n = left;
  return RFR_OK;
}

rfr_status rfi_bpe_encode(const rfi_bpe *m, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out) {
  const int32_t full = m->ignore_merges ? full_token(m, s, n) : -1;
  if (full >= 0) {
    RFI_TRY(rfi_tokens_reserve(e->ctx, out, 1));
    rfi_tokens_put(out, full, 0);
    return RFR_OK;
  }
  if (n > INT32_MAX) return rfi_fail(RFI_E_OVERFLOW, "a piece of text has %zu bytes", n);
  if (n > e->symbols_capacity)
    RFI_TRY(rfi_grow(e->ctx, (void **)&e->symbols, &e->symbols_capacity, 0, n, sizeof *e->symbols));
  size_t count = m->raw ? split_bytes(m, s, n, e->symbols) : split_chars(m, s, n, e->symbols);
  if (count <= SHORT) count = merge_short(m, e->symbols, count);
  else RFI_TRY(merge_long(m, e, &count));
  RFI_TRY(rfi_tokens_reserve(e->ctx, out, count));
  for (size_t i = 0; i < count; i++) rfi_tokens_put(out, e->symbols[i].id, e->symbols[i].begin);
  return RFR_OK;
}
