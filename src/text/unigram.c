/* SPDX-License-Identifier: Apache-2.0
 *
 * Unigram: the segmentation of a piece with the largest sum of scores, by dynamic programming over its bytes (Kudo,
 * 2018). Of equal sums the one that was found first is kept, as tokenizers does. Neighbouring unknown characters are
 * one token.
 */
#include <string.h>

#include "text/tokenizer_parts.h"

#define UNKNOWN_PENALTY 10.0

/* An edge of the trie of all tokens. */
typedef struct edge {
  uint64_t key; /* (node << 8 | byte) + 1; 0: empty */
  uint32_t child;
} edge;

struct rfi_unigram {
  const rfi_vocabulary *v;
  double *scores;
  double unknown_score;
  int32_t unknown;
  bool byte_fallback;
  int32_t byte_id[256];
  edge *edges;
  uint64_t mask;
  int32_t *token; /* token that ends at a node, -1: none */
};

/* The best path that ends at a byte. */
typedef struct node {
  double score;
  uint32_t begin; /* start of its last token */
  int32_t id;     /* -1: no path ends here */
} node;

static edge *find_edge(const rfi_unigram *m, uint32_t from, unsigned char byte) {
  const uint64_t key = ((uint64_t)from << 8 | byte) + 1;
  uint64_t i = key * 0x9E3779B97F4A7C15u >> 20 & m->mask;
  while (m->edges[i].key && m->edges[i].key != key) i = (i + 1) & m->mask;
  return &m->edges[i];
}

static rfr_status build_trie(rfr_ctx *ctx, rfi_unigram *m, const rfi_tokenizer_spec *spec) {
  size_t bytes = 1, size = 16;
  uint32_t n = 1;
  for (int64_t i = 0; i < spec->n_tokens; i++) bytes += spec->tokens[i].n;
  while (size < 2 * bytes) size *= 2;
  m->mask = size - 1;
  RFI_TRY(RFI_ALLOC(ctx, size * sizeof *m->edges, &m->edges));
  RFI_TRY(RFI_ALLOC(ctx, bytes * sizeof *m->token, &m->token));
  memset(m->token, -1, bytes * sizeof *m->token);
  for (int32_t id = 0; id < spec->n_tokens; id++) {
    uint32_t at = 0;
    for (size_t i = 0; i < spec->tokens[id].n; i++) {
      const unsigned char byte = (unsigned char)spec->tokens[id].text[i];
      edge *e = find_edge(m, at, byte);
      if (!e->key) *e = (edge){((uint64_t)at << 8 | byte) + 1, n++};
      at = e->child;
    }
    if (at && !m->v->is_mark[id]) m->token[at] = id;
  }
  return RFR_OK;
}

rfr_status rfi_unigram_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_vocabulary *v,
                              rfi_unigram **out) {
  rfr_status s;
  rfi_unigram *m = NULL;
  *out = NULL;
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *m, &m));
  m->v = v;
  m->unknown = spec->unknown;
  m->byte_fallback = spec->byte_fallback;
  RFI_GOTO(RFI_ALLOC(ctx, (size_t)spec->n_tokens * sizeof *m->scores, &m->scores));
  for (int64_t i = 0; i < spec->n_tokens; i++) {
    m->scores[i] = spec->scores[i];
    if (i == 0 || m->scores[i] < m->unknown_score) m->unknown_score = m->scores[i];
  }
  m->unknown_score -= UNKNOWN_PENALTY;
  for (int b = 0; b < 256; b++) {
    char text[8];
    m->byte_id[b] = rfi_vocabulary_find(v, text, (size_t)rfi_snprintf(text, sizeof text, "<0x%02X>", (unsigned)b));
  }
  RFI_GOTO(build_trie(ctx, m, spec));
  *out = m;
  return RFR_OK;
fail:
  rfi_unigram_destroy(ctx, m);
  return s;
}

void rfi_unigram_destroy(rfr_ctx *ctx, rfi_unigram *m) {
  if (!m) return;
  rfi_free(ctx, m->scores);
  rfi_free(ctx, m->edges);
  rfi_free(ctx, m->token);
  rfi_free(ctx, m);
}

static void reach(node *to, double score, size_t begin, int32_t id) {
  if (to->id < 0 || score > to->score) *to = (node){score, (uint32_t)begin, id};
}

static rfr_status missing_unknown(void) {
  return rfi_fail(RFI_E_TOKENIZER, "the text has a character that the vocabulary lacks, and model.unk_id is missing");
}

/* Fills best[0 .. n]. */
static rfr_status find_paths(const rfi_unigram *m, const char *s, size_t n, node *best) {
  for (size_t i = 0; i <= n; i++) best[i] = (node){.id = -1};
  for (size_t i = 0, next; i < n; i = next) {
    uint32_t at = 0;
    bool has_char = false;
    next = i;
    rfi_utf8_next(s, &next);
    for (size_t k = i; k < n; k++) {
      const edge *e = find_edge(m, at, (unsigned char)s[k]);
      if (!e->key) break;
      at = e->child;
      const int32_t id = m->token[at];
      if (id < 0) continue;
      reach(&best[k + 1], m->scores[id] + best[i].score, i, id);
      has_char |= k + 1 == next;
    }
    if (has_char) continue;
    if (m->unknown < 0) return missing_unknown();
    reach(&best[next], m->unknown_score + best[i].score, i, m->unknown);
  }
  return RFR_OK;
}

static rfr_status put(const rfi_unigram *m, rfr_ctx *ctx, const char *s, size_t begin, size_t end, rfr_tokens *out) {
  const int32_t id = rfi_vocabulary_find_text(m->v, s + begin, end - begin);
  bool has_bytes = id < 0 && m->byte_fallback;
  for (size_t i = begin; i < end && has_bytes; i++) has_bytes = m->byte_id[(unsigned char)s[i]] >= 0;
  RFI_TRY(rfi_tokens_reserve(ctx, out, has_bytes ? end - begin : 1));
  if (id < 0 && !has_bytes && m->unknown < 0) return missing_unknown();
  if (!has_bytes) rfi_tokens_put(out, id >= 0 ? id : m->unknown, (uint32_t)begin);
  for (size_t i = begin; i < end && has_bytes; i++)
    rfi_tokens_put(out, m->byte_id[(unsigned char)s[i]], (uint32_t)begin);
  return RFR_OK;
}

static rfr_status add_end(rfi_encoder *e, size_t n, size_t end) {
  if (n == e->segments_capacity)
    RFI_TRY(rfi_grow(e->ctx, (void **)&e->segments, &e->segments_capacity, n, n + 1, sizeof *e->segments));
  e->segments[n].end = (uint32_t)end;
  return RFR_OK;
}

rfr_status rfi_unigram_encode(const rfi_unigram *m, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out) {
  if (n + 1 > e->paths_capacity) RFI_TRY(rfi_grow(e->ctx, &e->paths, &e->paths_capacity, 0, n + 1, sizeof(node)));
  node *best = e->paths;
  size_t count = 0;
  RFI_TRY(find_paths(m, s, n, best));
  /* Follows the path from its end. */
  for (size_t end = n; end > 0; count++) {
    size_t begin = best[end].begin;
    while (best[end].id == m->unknown && begin > 0 && best[begin].id == m->unknown) begin = best[begin].begin;
    RFI_TRY(add_end(e, count, end));
    end = begin;
  }
  size_t begin = 0;
  while (count-- > 0) {
    const size_t end = e->segments[count].end;
    RFI_TRY(put(m, e->ctx, s, begin, end, out));
    begin = end;
  }
  return RFR_OK;
}
