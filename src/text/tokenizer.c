/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokenizers: creation from a description, and encoding of a text from bytes to ids.
 *
 * Special tokens are matched in the caller's text first. So no special token is matched in a foreign span, and the text
 * is still tokenized as one string.
 */
#include "text/tokenizer.h"

#include <string.h>

#include "text/tokenizer_parts.h"

/* A trie of the texts of added tokens; children are a list of siblings. */
typedef struct trie_node {
  int32_t child, sibling, token; /* -1: none; token: index of an added token */
  unsigned char byte;
} trie_node;
typedef struct trie {
  trie_node *nodes; /* the first is the root; NULL: the trie is empty */
  size_t n, capacity;
  bool first[256]; /* bytes that begin a token */
} trie;

struct rfr_tokenizer {
  rfr_ctx *ctx;
  rfi_vocabulary v;
  rfi_unicode *categories;
  rfi_added_token *added; /* contents point into the vocabulary */
  int64_t n_added;
  trie raw_added, normal_added;
  uint8_t *is_special; /* by id */
  rfi_token_model model;
  rfi_bpe *bpe; /* only the one of the model's kind is set */
  rfi_unigram *unigram;
  rfi_wordpiece *wordpiece;
  rfi_normalizer *normalizer;
  rfi_decode_chain *chain;
  rfi_pretokenizer *pretokenizer;
  bool is_raw; /* the model reads bytes */
  int32_t *before, *after, *stop;
  int n_before, n_after, n_stop;
  int32_t bos, eos;
  rfi_hash hash;
};

/* ---- memory ---- */

rfr_status rfi_grow(rfr_ctx *ctx, void **array, size_t *capacity, size_t n, size_t want, size_t size) {
  if (want > UINT32_MAX) return rfi_fail(RFI_E_OVERFLOW, "the text has %zu parts; tokenize it in several calls", want);
  size_t more = *capacity ? 2 * *capacity : 256;
  void *grown;
  if (more < want) more = want;
  RFI_TRY(rfi_alloc(ctx, more * size, &grown));
  if (n) memcpy(grown, *array, n * size);
  rfi_free(ctx, *array);
  *array = grown;
  *capacity = more;
  return RFR_OK;
}

static rfr_status buffer_reserve(rfr_ctx *ctx, rfi_text_buffer *b, size_t more) {
  size_t capacity = b->capacity;
  if (b->capacity - b->n >= more) return RFR_OK;
  RFI_TRY(rfi_grow(ctx, (void **)&b->s, &capacity, b->n, b->n + more, 1));
  capacity = b->capacity;
  b->capacity = 0; /* until both arrays have grown */
  RFI_TRY(rfi_grow(ctx, (void **)&b->origin, &capacity, b->n, b->n + more, sizeof *b->origin));
  b->capacity = capacity;
  return RFR_OK;
}

rfr_status rfi_text_buffer_put(rfr_ctx *ctx, rfi_text_buffer *b, const char *s, size_t n, uint32_t origin) {
  RFI_TRY(buffer_reserve(ctx, b, n));
  for (size_t i = 0; i < n; i++) b->s[b->n] = s[i], b->origin[b->n++] = origin;
  return RFR_OK;
}

rfr_status rfi_text_buffer_copy(rfr_ctx *ctx, rfi_text_buffer *b, const rfi_view *v, size_t begin, size_t end) {
  const size_t n = end - begin;
  RFI_TRY(buffer_reserve(ctx, b, n));
  if (n == 0) return RFR_OK;
  memcpy(b->s + b->n, v->s + begin, n);
  for (size_t i = 0; i < n; i++) b->origin[b->n + i] = rfi_origin(v, begin + i);
  b->n += n;
  return RFR_OK;
}

rfr_status rfi_tokens_grow(rfr_ctx *ctx, rfr_tokens *t, size_t more) {
  size_t ids = (size_t)t->capacity, begins = (size_t)t->capacity;
  const size_t n = (size_t)t->n;
  t->capacity = 0; /* until both arrays have grown */
  RFI_TRY(rfi_grow(ctx, (void **)&t->ids, &ids, n, n + more, sizeof *t->ids));
  RFI_TRY(rfi_grow(ctx, (void **)&t->begins, &begins, n, n + more, sizeof *t->begins));
  t->capacity = (int64_t)ids;
  return RFR_OK;
}

static void buffer_deinit(rfr_ctx *ctx, rfi_text_buffer *b) {
  rfi_free(ctx, b->s);
  rfi_free(ctx, b->origin);
}

void rfr_tokens_deinit(rfr_tokens *tokens) {
  if (!tokens) return;
  rfi_encoder *e = tokens->scratch;
  if (e) {
    rfr_ctx *ctx = e->ctx;
    rfi_pattern_release(e);
    for (int i = 0; i < e->n_parts; i++) rfr_tokens_deinit(&e->parts[i]);
    rfi_free(ctx, e->parts);
    for (int i = 0; i < 2; i++) {
      buffer_deinit(ctx, &e->normal[i]);
      buffer_deinit(ctx, &e->mapped[i]);
      rfi_free(ctx, e->pieces[i].items);
    }
    buffer_deinit(ctx, &e->repaired);
    rfi_free(ctx, e->cache);
    rfi_free(ctx, e->segments);
    rfi_free(ctx, e->symbols);
    rfi_free(ctx, e->paths);
    rfi_free(ctx, e->points[0]);
    rfi_free(ctx, e->points[1]);
    rfi_string_deinit(&e->word);
    rfi_free(ctx, e->heap);
    rfi_free(ctx, tokens->ids);
    rfi_free(ctx, tokens->begins);
    rfi_free(ctx, e);
  }
  *tokens = (rfr_tokens){0};
}

/* ---- the vocabulary ---- */

static uint32_t hash_text(const char *s, size_t n) { return (uint32_t)rfi_hash_bytes(s, n).low; }

int32_t rfi_vocabulary_find(const rfi_vocabulary *v, const char *s, size_t n) {
  for (uint32_t i = hash_text(s, n) & v->mask; v->table[i] >= 0; i = (i + 1) & v->mask) {
    const rfi_bytes t = rfi_vocabulary_at(v, v->table[i]);
    if (t.n == n && memcmp(t.text, s, n) == 0) return v->table[i];
  }
  return -1;
}

static rfr_status vocabulary_init(rfi_vocabulary *v, const rfi_tokenizer_spec *spec) {
  size_t bytes = 0;
  uint32_t size = 16;
  v->n = spec->n_tokens;
  for (int64_t i = 0; i < spec->n_added; i++)
    if (spec->added[i].id >= v->n) v->n = spec->added[i].id + 1;
  if (v->n < 1 || v->n > RFI_TOKENS_LIMIT)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "the vocabulary has %lld ids; 1 to %d are supported",
                       (long long)v->n, RFI_TOKENS_LIMIT);
  while (size < 2 * v->n) size *= 2;
  v->mask = size - 1;
  rfi_bytes *text;
  RFI_TRY(RFI_ALLOC(v->ctx, (size_t)v->n * sizeof *text, &text));
  for (int64_t i = 0; i < spec->n_tokens; i++) text[i] = spec->tokens[i];
  for (int64_t i = 0; i < spec->n_added; i++) text[spec->added[i].id] = spec->added[i].content;
  rfr_status s = RFR_OK;
  for (int64_t i = 0; i < v->n && s == RFR_OK; i++) {
    if (text[i].n >= RFI_TOKEN_BYTES_LIMIT || (text[i].n && rfi_utf8_valid(text[i].text, text[i].n) != text[i].n))
      s = rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "the text of token %lld is not UTF-8 of less than %d bytes",
                      (long long)i, RFI_TOKEN_BYTES_LIMIT);
    bytes += text[i].n + 1;
    if (text[i].n > v->longest) v->longest = text[i].n;
  }
  if (s == RFR_OK && bytes > UINT32_MAX)
    s = rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "the texts of the tokens have %zu bytes, which is too many", bytes);
  if (s == RFR_OK) s = RFI_ALLOC(v->ctx, bytes, &v->text);
  if (s == RFR_OK) s = RFI_ALLOC(v->ctx, ((size_t)v->n + 1) * sizeof *v->begin, &v->begin);
  if (s == RFR_OK) s = RFI_ALLOC(v->ctx, (size_t)v->n, &v->is_used);
  if (s == RFR_OK) s = RFI_ALLOC(v->ctx, (size_t)v->n, &v->is_mark);
  if (s == RFR_OK) s = RFI_ALLOC(v->ctx, size * sizeof *v->table, &v->table);
  for (int64_t i = 0; i < v->n && s == RFR_OK; i++) {
    if (text[i].n) memcpy(v->text + v->begin[i], text[i].text, text[i].n);
    v->begin[i + 1] = v->begin[i] + (uint32_t)text[i].n + 1;
    v->is_used[i] = text[i].text != NULL;
  }
  rfi_free(v->ctx, text);
  if (s != RFR_OK) return s;
  for (int64_t i = 0; i < spec->n_added; i++) {
    const rfi_bytes t = spec->added[i].content;
    size_t first = 0;
    if (t.n > 0) rfi_utf8_next(t.text, &first);
    v->is_mark[spec->added[i].id] = spec->added[i].special && first < t.n;
  }
  memset(v->table, -1, size * sizeof *v->table);
  for (int32_t id = 0; id < spec->n_tokens; id++) {
    const rfi_bytes t = spec->tokens[id];
    if (!t.text) continue;
    const int32_t other = rfi_vocabulary_find(v, t.text, t.n);
    if (other >= 0)
      return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "tokens %d and %d have the same text, \"%.*s\"", other, id,
                         t.n < 80 ? (int)t.n : 80, t.text);
    uint32_t i = hash_text(t.text, t.n) & v->mask;
    while (v->table[i] >= 0) i = (i + 1) & v->mask;
    v->table[i] = id;
  }
  return RFR_OK;
}

static void vocabulary_deinit(rfi_vocabulary *v) {
  rfi_free(v->ctx, v->text);
  rfi_free(v->ctx, v->begin);
  rfi_free(v->ctx, v->is_used);
  rfi_free(v->ctx, v->is_mark);
  rfi_free(v->ctx, v->table);
}

/* GPT-2's printable characters: the visible ones of Latin-1 stand for themselves, the others are counted from 256. */
static bool is_visible(int b) { return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; }

uint32_t rfi_byte_char(unsigned char byte) {
  if (is_visible(byte)) return byte;
  if (byte <= 0x20) return 0x100u + byte;
  return byte == 0xAD ? 0x143 : 0x121u + (byte - 0x7Fu);
}

int rfi_char_byte(uint32_t c) {
  if (c < 0x100) return is_visible((int)c) ? (int)c : -1;
  if (c <= 0x120) return (int)c - 0x100;
  if (c <= 0x142) return (int)c - 0x121 + 0x7F;
  return c == 0x143 ? 0xAD : -1;
}

/* ---- added tokens ---- */

static rfr_status trie_add(rfr_ctx *ctx, trie *t, rfi_bytes text, int32_t token) {
  int32_t at = 0;
  if (!t->nodes) {
    RFI_TRY(rfi_grow(ctx, (void **)&t->nodes, &t->capacity, 0, 1, sizeof *t->nodes));
    t->nodes[t->n++] = (trie_node){-1, -1, -1, 0};
  }
  t->first[(unsigned char)text.text[0]] = true;
  for (size_t i = 0; i < text.n; i++) {
    const unsigned char byte = (unsigned char)text.text[i];
    int32_t next = t->nodes[at].child;
    while (next >= 0 && t->nodes[next].byte != byte) next = t->nodes[next].sibling;
    if (next < 0) {
      if (t->n == t->capacity)
        RFI_TRY(rfi_grow(ctx, (void **)&t->nodes, &t->capacity, t->n, t->n + 1, sizeof *t->nodes));
      next = (int32_t)t->n++;
      t->nodes[next] = (trie_node){-1, t->nodes[at].child, -1, byte};
      t->nodes[at].child = next;
    }
    at = next;
  }
  if (t->nodes[at].token < 0) t->nodes[at].token = token;
  return RFR_OK;
}

static bool is_foreign(const rfr_encode_options *o, size_t byte) {
  size_t low = 0, high = o->n_foreign;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (o->foreign[middle].end <= byte) low = middle + 1;
    else high = middle;
  }
  return low < o->n_foreign && o->foreign[low].begin <= byte;
}

/* The longest added token at `at`; a special one has no foreign byte. -1: none. */
static int32_t longest(const rfr_tokenizer *k, const trie *t, const rfi_view *v, size_t at, const rfr_encode_options *o,
                       size_t *end) {
  int32_t best = -1;
  bool foreign = false;
  for (int32_t node = 0; at < v->n; at++) {
    node = t->nodes[node].child;
    while (node >= 0 && t->nodes[node].byte != (unsigned char)v->s[at]) node = t->nodes[node].sibling;
    if (node < 0) break;
    if (o->n_foreign && !foreign) foreign = is_foreign(o, rfi_origin(v, at));
    const int32_t token = t->nodes[node].token;
    if (token < 0 || (foreign && k->added[token].special)) continue;
    best = token;
    *end = at + 1;
  }
  return best;
}

static bool touches_word(const rfr_tokenizer *k, const rfi_view *v, size_t begin, size_t end) {
  size_t i = begin;
  if (begin > 0) {
    do i--;
    while (rfi_utf8_continues(v->s[i]));
    if (rfi_is_word(k->categories, rfi_utf8_next(v->s, &i))) return true;
  }
  i = end;
  return end < v->n && rfi_is_word(k->categories, rfi_utf8_next(v->s, &i));
}

typedef struct match {
  int32_t token; /* index of an added token, -1: none */
  size_t begin, end;
} match;

/* The next added token at or after `from`, including the white space that it strips. */
static match next_added(const rfr_tokenizer *k, const trie *t, const rfi_view *v, size_t from,
                        const rfr_encode_options *o) {
  match m = {-1, v->n, v->n};
  size_t at = from;
  if (!t->nodes) return m;
  while (at < v->n) {
    if (!t->first[(unsigned char)v->s[at]]) {
      at++;
      continue;
    }
    const int32_t token = longest(k, t, v, at, o, &m.end);
    if (token < 0) {
      at++;
      continue;
    }
    const rfi_added_token *added = &k->added[token];
    if (added->single_word && touches_word(k, v, at, m.end)) {
      at = m.end;
      continue;
    }
    m.token = token;
    m.begin = at;
    while (added->lstrip && m.begin > from) {
      size_t i = m.begin - 1, next;
      while (rfi_utf8_continues(v->s[i])) i--;
      next = i;
      if (!rfi_is_space(rfi_utf8_next(v->s, &next))) break;
      m.begin = i;
    }
    while (added->rstrip && m.end < v->n) {
      size_t next = m.end;
      if (!rfi_is_space(rfi_utf8_next(v->s, &next))) break;
      m.end = next;
    }
    return m;
  }
  m.begin = m.end = v->n;
  return m;
}

/* ---- creation ---- */

enum { CACHED_BYTES = 512 };

/* Creates the state of an encoder for a text of n bytes. A short text needs no cache. */
static rfr_status prepare(const rfr_tokenizer *k, rfr_tokens *t, size_t n) {
  rfi_encoder *e = t->scratch;
  if (!e) {
    RFI_TRY(RFI_ALLOC(k->ctx, sizeof *e, &e));
    t->scratch = e;
    e->ctx = k->ctx;
  }
  if (e->ctx != k->ctx) return rfi_fail(RFI_E_ARGUMENT, "the rfr_tokens was used with a tokenizer of another context");
  if (!e->cache && n > CACHED_BYTES) RFI_TRY(RFI_ALLOC(e->ctx, sizeof *e->cache << RFI_CACHE_BITS, &e->cache));
  if (e->owner != k && e->cache) memset(e->cache, 0, sizeof *e->cache << RFI_CACHE_BITS);
  e->owner = k;
  return RFR_OK;
}

/* `vocabulary` NULL: ids need not be in it. */
static rfr_status copy_ids(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const char *what, const int32_t *ids, int n,
                           const rfi_vocabulary *vocabulary, int32_t **out) {
  for (int i = 0; i < n; i++)
    if (ids[i] < 0 || (vocabulary && (ids[i] >= vocabulary->n || !vocabulary->is_used[ids[i]])))
      return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "%s: the vocabulary has no id %d", what, ids[i]);
  if (n == 0) return RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n * sizeof **out, out));
  memcpy(*out, ids, (size_t)n * sizeof **out);
  return RFR_OK;
}

/* An added token is matched in normalized text, so its own text is normalized too. */
static rfr_status add_normalized(rfr_tokenizer *k, rfi_encoder *e, int32_t token) {
  const rfi_bytes text = k->added[token].content;
  rfi_view v = {.s = text.text, .n = text.n};
  RFI_TRY(rfi_normalize(k->normalizer, e, &v));
  return v.n ? trie_add(k->ctx, &k->normal_added, (rfi_bytes){v.s, v.n}, token) : RFR_OK;
}

static rfr_status add_tokens(rfr_tokenizer *k, const rfi_tokenizer_spec *spec, rfi_encoder *e) {
  RFI_TRY(RFI_ALLOC(k->ctx, (size_t)spec->n_added * sizeof *k->added, &k->added));
  for (int64_t i = 0; i < spec->n_added; i++) {
    rfi_added_token *a = &k->added[i];
    *a = spec->added[i];
    if (a->content.n == 0) return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "added token %d is empty", a->id);
    a->content = rfi_vocabulary_at(&k->v, a->id);
    k->is_special[a->id] |= a->special;
    if (a->normalized) RFI_TRY(add_normalized(k, e, (int32_t)i));
    else RFI_TRY(trie_add(k->ctx, &k->raw_added, a->content, (int32_t)i));
    k->n_added++;
  }
  return RFR_OK;
}

static void hash_bytes(rfi_hasher *h, rfi_bytes b) {
  rfi_hasher_add_u64(h, b.text ? b.n : UINT64_MAX);
  if (b.n) rfi_hasher_add(h, b.text, b.n);
}

static void hash_steps(rfi_hasher *h, const rfi_step *x, int n) {
  rfi_hasher_add_u64(h, (uint64_t)n);
  for (int i = 0; i < n; i++) {
    const bool flags[] = {x[i].is_regex,      x[i].invert,    x[i].left,   x[i].right,     x[i].clean, x[i].chinese,
                          x[i].strip_accents, x[i].lowercase, x[i].prefix, x[i].use_regex, x[i].split, x[i].individual};
    rfi_hasher_add_u64(h, (uint64_t)x[i].kind << 32 | (uint64_t)x[i].behavior << 8 | (uint64_t)x[i].scheme);
    hash_bytes(h, x[i].pattern);
    hash_bytes(h, x[i].content);
    for (size_t f = 0; f < sizeof flags / sizeof *flags; f++) rfi_hasher_add_u64(h, flags[f]);
  }
}

/* Hashes everything that affects ids; decoders and stop ids do not. */
static rfr_status hash_spec(rfr_tokenizer *k, const rfi_tokenizer_spec *p) {
  rfi_hasher *h;
  RFI_TRY(rfi_hasher_create(k->ctx, &h));
  const uint64_t numbers[] = {(uint64_t)p->model,         (uint64_t)p->n_tokens, (uint64_t)p->n_merges,
                              (uint64_t)p->unknown,       p->fuse_unknown,       p->byte_fallback,
                              (uint64_t)p->ignore_merges, (uint64_t)p->max_word, (uint64_t)p->n_added};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) rfi_hasher_add_u64(h, numbers[i]);
  hash_bytes(h, p->continuing_prefix);
  hash_bytes(h, p->word_suffix);
  for (int64_t i = 0; i < p->n_tokens; i++) hash_bytes(h, p->tokens[i]);
  if (p->scores)
    for (int64_t i = 0; i < p->n_tokens; i++) {
      uint64_t bits;
      memcpy(&bits, &p->scores[i], sizeof bits);
      rfi_hasher_add_u64(h, bits);
    }
  for (int64_t i = 0; i < p->n_merges; i++) hash_bytes(h, p->merges[i].left), hash_bytes(h, p->merges[i].right);
  for (int64_t i = 0; i < p->n_added; i++) {
    const rfi_added_token *a = &p->added[i];
    hash_bytes(h, a->content);
    rfi_hasher_add_u64(h, (uint64_t)a->id << 8 | (uint64_t)a->special << 4 | (uint64_t)a->normalized << 3 |
                              (uint64_t)a->lstrip << 2 | (uint64_t)a->rstrip << 1 | (uint64_t)a->single_word);
  }
  hash_steps(h, p->normalizers, p->n_normalizers);
  hash_steps(h, p->pre_tokenizers, p->n_pre_tokenizers);
  for (int i = 0; i < p->n_before; i++) rfi_hasher_add_u64(h, (uint64_t)p->before[i]);
  rfi_hasher_add_u64(h, UINT64_MAX);
  for (int i = 0; i < p->n_after; i++) rfi_hasher_add_u64(h, (uint64_t)p->after[i]);
  k->hash = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return RFR_OK;
}

/* BPE can read bytes directly if the last step is ByteLevel. A byte without a token would become the unknown token,
 * which only the general form of the model supports. */
static bool reads_bytes(const rfr_tokenizer *k, const rfi_tokenizer_spec *spec) {
  const int n = spec->n_pre_tokenizers;
  if (spec->model != RFI_BPE || n == 0 || spec->pre_tokenizers[n - 1].kind != RFI_PRE_BYTE_LEVEL) return false;
  for (int i = 0; i < n - 1; i++)
    if (spec->pre_tokenizers[i].kind == RFI_PRE_BYTE_LEVEL) return false;
  if (spec->byte_fallback || spec->continuing_prefix.n || spec->word_suffix.n) return false;
  for (int b = 0; b < 256 && spec->unknown >= 0; b++) {
    char text[4];
    if (rfi_vocabulary_find(&k->v, text, rfi_utf8_put(rfi_byte_char((unsigned char)b), text)) < 0) return false;
  }
  return true;
}

static rfr_status check_spec(const rfi_tokenizer_spec *spec) {
  if (spec->n_normalizers > RFI_STEPS_LIMIT || spec->n_pre_tokenizers > RFI_STEPS_LIMIT ||
      spec->n_decoders > RFI_STEPS_LIMIT)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "a sequence has more than %d steps", RFI_STEPS_LIMIT);
  if (spec->n_tokens < 0 || spec->n_tokens > RFI_TOKENS_LIMIT || spec->n_added < 0 ||
      spec->n_added > RFI_TOKENS_LIMIT || spec->n_merges < 0 || spec->n_merges > 4 * (int64_t)RFI_TOKENS_LIMIT)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "the vocabulary is too large: at most %d ids are supported",
                       RFI_TOKENS_LIMIT);
  for (int64_t i = 0; i < spec->n_added; i++)
    if (spec->added[i].id < 0 || spec->added[i].id >= RFI_TOKENS_LIMIT)
      return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "the id %d of an added token is out of range",
                         spec->added[i].id);
  if (spec->unknown >= spec->n_tokens)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "the unknown token's id %d is not in the vocabulary",
                       spec->unknown);
  return RFR_OK;
}

rfr_status rfi_tokenizer_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, rfr_tokenizer **out) {
  rfr_status s;
  rfr_tokenizer *k = NULL;
  rfr_tokens tokens = {0};
  *out = NULL;
  RFI_TRY(check_spec(spec));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *k, &k));
  k->ctx = k->v.ctx = ctx;
  k->bos = spec->bos;
  k->eos = spec->eos;
  k->model = spec->model;
  RFI_GOTO(vocabulary_init(&k->v, spec));
  RFI_GOTO(rfi_unicode_create(ctx, &k->categories));
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)k->v.n, &k->is_special));
  RFI_GOTO(rfi_normalizer_create(ctx, spec, k->categories, &k->normalizer));
  RFI_GOTO(prepare(k, &tokens, 0));
  RFI_GOTO(add_tokens(k, spec, tokens.scratch));
  rfr_tokens_deinit(&tokens);
  k->is_raw = reads_bytes(k, spec);
  RFI_GOTO(rfi_pretokenizer_create(ctx, spec, k->categories, k->is_raw, &k->pretokenizer));
  if (spec->model == RFI_BPE) RFI_GOTO(rfi_bpe_create(ctx, spec, &k->v, k->is_raw, &k->bpe));
  if (spec->model == RFI_UNIGRAM) RFI_GOTO(rfi_unigram_create(ctx, spec, &k->v, &k->unigram));
  if (spec->model == RFI_WORDPIECE) RFI_GOTO(rfi_wordpiece_create(ctx, spec, &k->v, &k->wordpiece));
  RFI_GOTO(rfi_decode_chain_create(ctx, spec, &k->chain));
  RFI_GOTO(copy_ids(ctx, spec, "post_processor", spec->before, spec->n_before, &k->v, &k->before));
  RFI_GOTO(copy_ids(ctx, spec, "post_processor", spec->after, spec->n_after, &k->v, &k->after));
  RFI_GOTO(copy_ids(ctx, spec, "the ids that end a text", spec->stop, spec->n_stop, NULL, &k->stop));
  k->n_before = spec->n_before;
  k->n_after = spec->n_after;
  k->n_stop = spec->n_stop;
  RFI_GOTO(hash_spec(k, spec));
  *out = k;
  return RFR_OK;
fail:
  rfr_tokens_deinit(&tokens);
  rfr_tokenizer_destroy(k);
  return s;
}

void rfr_tokenizer_destroy(rfr_tokenizer *k) {
  if (!k) return;
  rfr_ctx *ctx = k->ctx;
  rfi_bpe_destroy(ctx, k->bpe);
  rfi_unigram_destroy(ctx, k->unigram);
  rfi_wordpiece_destroy(ctx, k->wordpiece);
  rfi_normalizer_destroy(ctx, k->normalizer);
  rfi_decode_chain_destroy(ctx, k->chain);
  rfi_pretokenizer_destroy(ctx, k->pretokenizer);
  rfi_free(ctx, k->raw_added.nodes);
  rfi_free(ctx, k->normal_added.nodes);
  rfi_free(ctx, k->added);
  rfi_free(ctx, k->is_special);
  rfi_free(ctx, k->categories);
  rfi_free(ctx, k->before);
  rfi_free(ctx, k->after);
  rfi_free(ctx, k->stop);
  vocabulary_deinit(&k->v);
  rfi_free(ctx, k);
}

/* ---- accessors ---- */

const rfi_decode_chain *rfi_tokenizer_chain(const rfr_tokenizer *k) { return k->chain; }
rfr_ctx *rfi_tokenizer_ctx(const rfr_tokenizer *k) { return k->ctx; }

rfi_hash rfi_tokenizer_hash(const rfr_tokenizer *k) { return k->hash; }
int64_t rfr_tokenizer_vocab_size(const rfr_tokenizer *k) { return k ? k->v.n : 0; }
int32_t rfr_tokenizer_bos(const rfr_tokenizer *k) { return k ? k->bos : -1; }
int32_t rfr_tokenizer_eos(const rfr_tokenizer *k) { return k ? k->eos : -1; }

static bool is_used(const rfr_tokenizer *k, int32_t id) { return k && id >= 0 && id < k->v.n && k->v.is_used[id]; }

const char *rfr_tokenizer_token(const rfr_tokenizer *k, int32_t id, size_t *n) {
  if (n) *n = 0;
  if (!is_used(k, id)) return NULL;
  const rfi_bytes t = rfi_vocabulary_at(&k->v, id);
  if (n) *n = t.n;
  return t.text;
}

int32_t rfr_tokenizer_id(const rfr_tokenizer *k, const char *text, size_t n) {
  if (!k || (!text && n)) return -1;
  for (int64_t i = 0; i < k->n_added; i++)
    if (k->added[i].content.n == n && memcmp(k->added[i].content.text, text, n) == 0) return k->added[i].id;
  return rfi_vocabulary_find(&k->v, text, n);
}

int rfr_tokenizer_is_special(const rfr_tokenizer *k, int32_t id) { return is_used(k, id) && k->is_special[id]; }

int32_t rfr_tokenizer_stop(const rfr_tokenizer *k, int i) {
  bool has_eos = !k || k->eos < 0;
  if (!k || i < 0) return -1;
  if (i < k->n_stop) return k->stop[i];
  for (int j = 0; j < k->n_stop; j++) has_eos |= k->stop[j] == k->eos;
  return i == k->n_stop && !has_eos ? k->eos : -1;
}

/* ---- encoding ---- */

rfr_encode_options rfr_encode_options_default(void) { return (rfr_encode_options){.size = sizeof(rfr_encode_options)}; }

static uint64_t load(const char *s, size_t n) {
  uint64_t x = 0;
  memcpy(&x, s, n);
  return x;
}

static rfr_status encode_model(const rfr_tokenizer *k, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out) {
  if (k->bpe) return rfi_bpe_encode(k->bpe, e, s, n, out);
  if (k->unigram) return rfi_unigram_encode(k->unigram, e, s, n, out);
  return rfi_wordpiece_encode(k->wordpiece, e, s, n, out);
}

/* Appends the tokens of a piece; `begin` is relative to the piece. */
static rfr_status encode_piece(const rfr_tokenizer *k, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out) {
  uint64_t key[2], other[2];
  rfi_cache_entry *x;
  if (n >= sizeof x->key + 1 || !e->cache) return encode_model(k, e, s, n, out);
  key[0] = load(s, n < 8 ? n : 8);
  key[1] = (n > 8 ? load(s + 8, n - 8) : 0) | (uint64_t)n << 56;
  const uint64_t hash = (key[0] ^ (key[1] * 0xA24BAED4963EE407u)) * 0x9FB21C651E98DF25u;
  x = &e->cache[(hash ^ hash >> 32) * 0x9E3779B97F4A7C15u >> (64 - RFI_CACHE_BITS)];
  memcpy(other, x, sizeof other);
  if (other[0] == key[0] && other[1] == key[1]) {
    for (int i = 0; i < x->count; i++) rfi_tokens_put(out, x->ids[i], x->begin[i]);
    return RFR_OK;
  }
  const int64_t first = out->n;
  RFI_TRY(encode_model(k, e, s, n, out));
  const int64_t count = out->n - first;
  if (count > 3) return RFR_OK;
  memcpy(x, key, sizeof key);
  x->count = (uint8_t)count;
  for (int i = 0; i < count; i++) x->ids[i] = out->ids[first + i], x->begin[i] = (uint8_t)out->begins[first + i];
  return RFR_OK;
}

static rfr_status encode_pieces(const rfr_tokenizer *k, rfi_encoder *e, const rfi_view *v, const rfi_piece *pieces,
                                size_t n, rfr_tokens *out) {
  for (size_t i = 0; i < n; i++) {
    const int64_t first = out->n;
    RFI_TRY(rfi_tokens_reserve(e->ctx, out, 3));
    RFI_TRY(encode_piece(k, e, v->s + pieces[i].begin, pieces[i].end - pieces[i].begin, out));
    for (int64_t j = first; j < out->n; j++) {
      size_t at = pieces[i].begin + out->begins[j];
      while (rfi_utf8_continues(v->s[at])) at--; /* a token may begin inside a character */
      out->begins[j] = rfi_origin(v, at);
    }
  }
  return RFR_OK;
}

/* Minimum number of pieces per thread. */
enum { PARALLEL_PIECES = 8192 };

static rfr_status make_parts(const rfr_tokenizer *k, rfi_encoder *e, int n) {
  if (e->n_parts < n) {
    rfr_tokens *parts;
    RFI_TRY(RFI_ALLOC(e->ctx, (size_t)n * sizeof *parts, &parts));
    if (e->n_parts) memcpy(parts, e->parts, (size_t)e->n_parts * sizeof *parts);
    rfi_free(e->ctx, e->parts);
    e->parts = parts;
    e->n_parts = n;
  }
  for (int i = 0; i < n; i++) RFI_TRY(prepare(k, &e->parts[i], SIZE_MAX));
  return RFR_OK;
}

/* Each thread encodes a share of the pieces into a separate list of tokens. */
static rfr_status encode_shares(const rfr_tokenizer *k, rfi_encoder *e, const rfi_view *v, const rfi_pieces *pieces,
                                int threads, rfr_tokens *out) {
  const size_t n = pieces->n;
  bool failed = false;
  RFI_TRY(rfi_check_fork(threads));
  RFI_TRY(make_parts(k, e, threads));
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(|| : failed)
  for (int i = 0; i < threads; i++) {
    const size_t begin = n * (size_t)i / (size_t)threads, end = n * ((size_t)i + 1) / (size_t)threads;
    rfr_tokens *part = &e->parts[i];
    part->n = 0;
    failed = encode_pieces(k, part->scratch, v, pieces->items + begin, end - begin, part) != RFR_OK;
  }
  if (failed) return encode_pieces(k, e, v, pieces->items, n, out); /* sets the error of this thread */
  for (int i = 0; i < threads; i++) {
    const rfr_tokens *part = &e->parts[i];
    RFI_TRY(rfi_tokens_reserve(e->ctx, out, (size_t)part->n));
    if (part->n == 0) continue;
    memcpy(out->ids + out->n, part->ids, (size_t)part->n * sizeof *part->ids);
    memcpy(out->begins + out->n, part->begins, (size_t)part->n * sizeof *part->begins);
    out->n += part->n;
  }
  return RFR_OK;
}

/* Encodes a text without added tokens that are not normalized. */
static rfr_status encode_text(const rfr_tokenizer *k, rfi_encoder *e, rfi_view v, const rfr_encode_options *o,
                              rfr_tokens *out) {
  rfi_pieces *pieces;
  RFI_TRY(rfi_pretokenize(k->pretokenizer, e, &v, &pieces));
  if (k->bpe && rfi_bpe_cuts(k->bpe)) {
    rfi_pieces *cut = pieces == &e->pieces[0] ? &e->pieces[1] : &e->pieces[0];
    RFI_TRY(rfi_bpe_cut(k->bpe, e->ctx, v.s, pieces, cut));
    pieces = cut;
  }
  int threads = rfi_ctx_threads(e->ctx);
  if (threads > (int64_t)(pieces->n / PARALLEL_PIECES)) threads = (int)(pieces->n / PARALLEL_PIECES);
  if (o->parallel && threads > 1) return encode_shares(k, e, &v, pieces, threads, out);
  return encode_pieces(k, e, &v, pieces->items, pieces->n, out);
}

typedef rfr_status (*encode_gap)(const rfr_tokenizer *k, rfi_encoder *e, rfi_view v, const rfr_encode_options *o,
                                 rfr_tokens *out);

/* Finds the added tokens of one trie; `gap` encodes the text between them. */
static rfr_status encode_added(const rfr_tokenizer *k, const trie *t, rfi_encoder *e, const rfi_view *v,
                               const rfr_encode_options *o, encode_gap gap, rfr_tokens *out) {
  for (size_t from = 0; from < v->n;) {
    const match m = next_added(k, t, v, from, o);
    if (from < m.begin) RFI_TRY(gap(k, e, rfi_view_part(v, from, m.begin), o, out));
    if (m.token < 0) break;
    RFI_TRY(rfi_tokens_reserve(e->ctx, out, 1));
    rfi_tokens_put(out, k->added[m.token].id, rfi_origin(v, m.begin));
    from = m.end;
  }
  return RFR_OK;
}

static rfr_status encode_normalized(const rfr_tokenizer *k, rfi_encoder *e, rfi_view v, const rfr_encode_options *o,
                                    rfr_tokens *out) {
  RFI_TRY(rfi_normalize(k->normalizer, e, &v));
  return encode_added(k, &k->normal_added, e, &v, o, encode_text, out);
}

rfr_status rfi_repair(rfi_encoder *e, rfi_view *v, size_t valid) {
  rfi_text_buffer *b = &e->repaired;
  b->n = 0;
  RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, 0, valid));
  for (size_t i = valid; i < v->n;) {
    const int length = rfi_utf8_length(v->s + i, v->n - i);
    const size_t end = i + (size_t)(length < 0 ? -length : length);
    if (length < 0) RFI_TRY(rfi_text_buffer_put(e->ctx, b, "\xEF\xBF\xBD", 3, (uint32_t)i));
    else RFI_TRY(rfi_text_buffer_copy(e->ctx, b, v, i, end));
    i = end;
  }
  *v = rfi_text_buffer_view(b);
  return RFR_OK;
}

static rfr_status put_ids(rfr_ctx *ctx, const int32_t *ids, int n, size_t begin, rfr_tokens *out) {
  RFI_TRY(rfi_tokens_reserve(ctx, out, (size_t)n));
  for (int i = 0; i < n; i++) rfi_tokens_put(out, ids[i], (uint32_t)begin);
  return RFR_OK;
}

rfr_status rfr_tokenizer_encode(const rfr_tokenizer *k, const char *text, size_t n, const rfr_encode_options *options,
                                rfr_tokens *out) {
  rfr_encode_options o = rfr_encode_options_default();
  if (out) out->n = 0;
  RFI_TRY(rfi_check_handle(k, "rfr_tokenizer"));
  if (options) {
    RFI_TRY(rfi_check_options("rfr_encode_options", options, options->size, sizeof o));
    o = *options;
  }
  if (!out || (!text && n) || (!o.foreign && o.n_foreign))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_encode: text, tokens or spans are NULL");
  if (n >= UINT32_MAX)
    return rfi_fail(RFI_E_ARGUMENT, "the text has %zu bytes, at most 4 GiB are tokenized at once", n);
  for (size_t i = 0; i < o.n_foreign; i++)
    if (o.foreign[i].begin > o.foreign[i].end || o.foreign[i].end > n ||
        (i && o.foreign[i].begin < o.foreign[i - 1].end))
      return rfi_fail(RFI_E_ARGUMENT, "span %zu, bytes %zu to %zu, is not in the text, or not after the span before it",
                      i, o.foreign[i].begin, o.foreign[i].end);
  RFI_TRY(prepare(k, out, n));
  rfi_encoder *e = out->scratch;
  rfi_view v = {.s = text, .n = n};
  const size_t valid = rfi_utf8_valid(text, n);
  if (valid < n) RFI_TRY(rfi_repair(e, &v, valid));
  if (o.add_special) RFI_TRY(put_ids(e->ctx, k->before, k->n_before, 0, out));
  RFI_TRY(encode_added(k, &k->raw_added, e, &v, &o, encode_normalized, out));
  return o.add_special ? put_ids(e->ctx, k->after, k->n_after, n, out) : RFR_OK;
}
