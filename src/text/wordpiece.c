/* SPDX-License-Identifier: Apache-2.0
 *
 * WordPiece: the longest token at each place of a word; a word that cannot be covered is the unknown token.
 */
#include <string.h>

#include "text/tokenizer_parts.h"

struct rfi_wordpiece {
  const rfi_vocabulary *v;
  char prefix[64]; /* prefix of tokens that continue a word */
  size_t n_prefix, longest;
  int32_t unknown;
  int64_t max_word;
};

rfr_status rfi_wordpiece_create(rfr_ctx *ctx, const rfi_tokenizer_spec *spec, const rfi_vocabulary *v,
                                rfi_wordpiece **out) {
  *out = NULL;
  if (spec->unknown < 0) return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "model.unk_token is missing");
  if (spec->continuing_prefix.n > sizeof(*out)->prefix)
    return rfi_fail_at(RFI_E_TOKENIZER, spec->name, 0, "model.continuing_subword_prefix has more than %zu bytes",
                       sizeof(*out)->prefix);
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  rfi_wordpiece *m = *out;
  m->v = v;
  m->n_prefix = spec->continuing_prefix.n;
  if (m->n_prefix) memcpy(m->prefix, spec->continuing_prefix.text, m->n_prefix);
  m->unknown = spec->unknown;
  m->max_word = spec->max_word;
  for (int64_t i = 0; i < spec->n_tokens; i++)
    if (spec->tokens[i].n > m->longest) m->longest = spec->tokens[i].n;
  return RFR_OK;
}

void rfi_wordpiece_destroy(rfr_ctx *ctx, rfi_wordpiece *m) { rfi_free(ctx, m); }

/* The longest token at s[begin]; *end is where it ends. */
static rfr_status longest_token(const rfi_wordpiece *m, rfi_encoder *e, const char *s, size_t n, size_t begin,
                                size_t *end, int32_t *id) {
  const size_t prefix = begin > 0 ? m->n_prefix : 0;
  const size_t most = n - begin < m->longest ? n - begin : m->longest;
  for (*end = begin + most; *end > begin; --*end) {
    if (*end < n && rfi_utf8_continues(s[*end])) continue;
    e->word.n = 0;
    RFI_TRY(rfi_string_append(&e->word, m->prefix, prefix));
    RFI_TRY(rfi_string_append(&e->word, s + begin, *end - begin));
    *id = rfi_vocabulary_find_text(m->v, e->word.data, e->word.n);
    if (*id >= 0) return RFR_OK;
  }
  *id = -1;
  return RFR_OK;
}

rfr_status rfi_wordpiece_encode(const rfi_wordpiece *m, rfi_encoder *e, const char *s, size_t n, rfr_tokens *out) {
  const int64_t first = out->n;
  int64_t chars = 0;
  size_t begin = 0, end;
  int32_t id;
  e->word.ctx = e->ctx;
  for (size_t i = 0; i < n; i++) chars += !rfi_utf8_continues(s[i]);
  while (chars <= m->max_word && begin < n) {
    RFI_TRY(longest_token(m, e, s, n, begin, &end, &id));
    if (id < 0) break;
    RFI_TRY(rfi_tokens_reserve(e->ctx, out, 1));
    rfi_tokens_put(out, id, (uint32_t)begin);
    begin = end;
  }
  if (begin == n) return RFR_OK;
  out->n = first;
  RFI_TRY(rfi_tokens_reserve(e->ctx, out, 1));
  rfi_tokens_put(out, m->unknown, 0);
  return RFR_OK;
}
