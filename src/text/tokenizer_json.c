/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads tokenizer.json as the Python package tokenizers writes it, and the files of its folder that name the tokens at
 * the ends of a text.
 *
 * Every component is either read with all its fields or refused by its key path. If a component were ignored, the ids
 * would differ from those that the model was trained on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json_file.h"
#include "text/model_file.h"
#include "text/tokenizer.h"

enum { FILE_LIMIT = 256 << 20, DEPTH = 8, IDS = 64 };

typedef struct reader {
  rfr_ctx *ctx;
  const char *file;
  rfi_tokenizer_spec spec;
  rfi_bytes *tokens;
  double *scores;
  rfi_merge *merges;
  rfi_added_token *added;
  rfi_step normalizers[RFI_STEPS_LIMIT], pre_tokenizers[RFI_STEPS_LIMIT], decoders[RFI_STEPS_LIMIT];
  int32_t before[IDS], after[IDS], stop[IDS];
  int32_t *index; /* Unigram: hash table of its tokens, -1: empty */
  size_t index_mask;
  char (*places)[64]; /* key paths of the steps */
  int n_places;
} reader;

#define REFUSE(r, ...) rfi_fail_at(RFI_E_TOKENIZER_UNSUPPORTED, (r)->file, 0, __VA_ARGS__)
#define BAD(r, ...) rfi_fail_at(RFI_E_TOKENIZER, (r)->file, 0, __VA_ARGS__)

static rfi_bytes text_of(const json_t *string) {
  return (rfi_bytes){json_string_value(string), json_string_length(string)};
}

/* ---- fields of a component ---- */

static rfr_status get_flag(const reader *r, const json_t *o, const char *where, const char *key, bool fallback,
                           bool *out) {
  const json_t *x = json_object_get(o, key);
  *out = fallback;
  if (!x || json_is_null(x)) return RFR_OK;
  if (!json_is_boolean(x)) return BAD(r, "%s.%s is neither true nor false", where, key);
  *out = json_is_true(x);
  return RFR_OK;
}

static rfr_status get_text(const reader *r, const json_t *o, const char *where, const char *key, rfi_bytes *out) {
  const json_t *x = json_object_get(o, key);
  if (!json_is_string(x)) return BAD(r, "%s.%s is not a string", where, key);
  *out = text_of(x);
  return RFR_OK;
}

static rfr_status get_count(const reader *r, const json_t *o, const char *where, const char *key, int64_t *out) {
  const json_t *x = json_object_get(o, key);
  if (!json_is_integer(x) || json_integer_value(x) < 0 || json_integer_value(x) > INT32_MAX)
    return BAD(r, "%s.%s is not an integer from 0 to 2^31 - 1", where, key);
  *out = json_integer_value(x);
  return RFR_OK;
}

/* {"String": text} or {"Regex": text} */
static rfr_status get_pattern(const reader *r, const json_t *o, const char *where, rfi_step *s) {
  const json_t *pattern = json_object_get(o, "pattern");
  const json_t *literal = json_object_get(pattern, "String"), *regex = json_object_get(pattern, "Regex");
  if (json_object_size(pattern) != 1 || (!json_is_string(literal) && !json_is_string(regex)))
    return BAD(r, "%s.pattern is neither {\"String\": text} nor {\"Regex\": text}", where);
  s->is_regex = regex != NULL;
  s->pattern = text_of(regex ? regex : literal);
  if (s->pattern.n == 0) return REFUSE(r, "%s.pattern is empty", where);
  return RFR_OK;
}

static rfr_status get_word(const reader *r, const json_t *o, const char *where, const char *key, const char *fallback,
                           const char *const *words, int n, int *out) {
  const json_t *x = json_object_get(o, key);
  const char *word = x && !json_is_null(x) ? json_string_value(x) : fallback;
  for (*out = 0; word && *out < n; ++*out)
    if (strcmp(words[*out], word) == 0) return RFR_OK;
  return REFUSE(r, "%s.%s is \"%s\", which is not known", where, key, word ? word : "");
}

static rfr_status get_behavior(const reader *r, const json_t *o, const char *where, const char *fallback, rfi_step *s) {
  static const char *const words[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  int i;
  RFI_TRY(get_word(r, o, where, "behavior", fallback, words, 5, &i));
  s->behavior = (rfi_split_behavior)i;
  return RFR_OK;
}

/* Files of older versions have add_prefix_space instead of prepend_scheme. */
static rfr_status get_metaspace(const reader *r, const json_t *o, const char *where, rfi_step *s) {
  static const char *const words[] = {"never", "first", "always"};
  bool prefix;
  int i;
  RFI_TRY(get_text(r, o, where, "replacement", &s->content));
  RFI_TRY(get_flag(r, o, where, "add_prefix_space", true, &prefix));
  RFI_TRY(get_word(r, o, where, "prepend_scheme", prefix ? "always" : "never", words, 3, &i));
  s->scheme = (rfi_prepend_scheme)i;
  return get_flag(r, o, where, "split", true, &s->split);
}

/* ---- normalizers, pre-tokenizers, decoders ---- */

typedef rfr_status (*read_step)(const reader *r, const json_t *o, const char *type, rfi_step *s);

static rfr_status read_normalizer(const reader *r, const json_t *o, const char *type, rfi_step *s) {
  const char *where = s->where;
#define IS(name) (strcmp(type, name) == 0)
  if (IS("NFC")) s->kind = RFI_NORM_NFC;
  else if (IS("NFD")) s->kind = RFI_NORM_NFD;
  else if (IS("NFKC")) s->kind = RFI_NORM_NFKC;
  else if (IS("NFKD")) s->kind = RFI_NORM_NFKD;
  else if (IS("Lowercase")) s->kind = RFI_NORM_LOWERCASE;
  else if (IS("StripAccents")) s->kind = RFI_NORM_STRIP_ACCENTS;
  else if (IS("ByteLevel")) s->kind = RFI_NORM_BYTE_LEVEL;
  else if (IS("Strip")) {
    s->kind = RFI_NORM_STRIP;
    RFI_TRY(get_flag(r, o, where, "strip_left", true, &s->left));
    return get_flag(r, o, where, "strip_right", true, &s->right);
  } else if (IS("Replace")) {
    s->kind = RFI_NORM_REPLACE;
    RFI_TRY(get_pattern(r, o, where, s));
    return get_text(r, o, where, "content", &s->content);
  } else if (IS("Prepend")) {
    s->kind = RFI_NORM_PREPEND;
    return get_text(r, o, where, "prepend", &s->content);
  } else if (IS("BertNormalizer")) {
    s->kind = RFI_NORM_BERT;
    RFI_TRY(get_flag(r, o, where, "clean_text", true, &s->clean));
    RFI_TRY(get_flag(r, o, where, "handle_chinese_chars", true, &s->chinese));
    RFI_TRY(get_flag(r, o, where, "lowercase", true, &s->lowercase));
    return get_flag(r, o, where, "strip_accents", s->lowercase, &s->strip_accents);
  } else if (IS("Nmt")) s->kind = RFI_NORM_NMT;
  else if (IS("Precompiled")) {
    s->kind = RFI_NORM_PRECOMPILED;
    return get_text(r, o, where, "precompiled_charsmap", &s->content);
  } else return REFUSE(r, "%s: the normalizer \"%s\" is not supported", where, type);
  return RFR_OK;
}

static rfr_status read_pre_tokenizer(const reader *r, const json_t *o, const char *type, rfi_step *s) {
  const char *where = s->where;
  if (IS("Whitespace")) s->kind = RFI_PRE_WHITESPACE;
  else if (IS("WhitespaceSplit")) s->kind = RFI_PRE_WHITESPACE_SPLIT;
  else if (IS("BertPreTokenizer")) s->kind = RFI_PRE_BERT;
  else if (IS("Split")) {
    s->kind = RFI_PRE_SPLIT;
    RFI_TRY(get_pattern(r, o, where, s));
    RFI_TRY(get_behavior(r, o, where, NULL, s));
    return get_flag(r, o, where, "invert", false, &s->invert);
  } else if (IS("ByteLevel")) {
    s->kind = RFI_PRE_BYTE_LEVEL;
    RFI_TRY(get_flag(r, o, where, "add_prefix_space", true, &s->prefix));
    return get_flag(r, o, where, "use_regex", true, &s->use_regex);
  } else if (IS("Metaspace")) {
    s->kind = RFI_PRE_METASPACE;
    return get_metaspace(r, o, where, s);
  } else if (IS("Digits")) {
    s->kind = RFI_PRE_DIGITS;
    return get_flag(r, o, where, "individual_digits", false, &s->individual);
  } else if (IS("Punctuation")) {
    s->kind = RFI_PRE_PUNCTUATION;
    return get_behavior(r, o, where, "Isolated", s);
  } else return REFUSE(r, "%s: the pre-tokenizer \"%s\" is not supported", where, type);
  return RFR_OK;
}

static rfr_status read_decoder(const reader *r, const json_t *o, const char *type, rfi_step *s) {
  const char *where = s->where;
  if (IS("ByteLevel")) s->kind = RFI_DEC_BYTE_LEVEL;
  else if (IS("ByteFallback")) s->kind = RFI_DEC_BYTE_FALLBACK;
  else if (IS("Fuse")) s->kind = RFI_DEC_FUSE;
  else if (IS("Metaspace")) {
    s->kind = RFI_DEC_METASPACE;
    return get_metaspace(r, o, where, s);
  } else if (IS("Replace")) {
    s->kind = RFI_DEC_REPLACE;
    RFI_TRY(get_pattern(r, o, where, s));
    if (s->is_regex) return REFUSE(r, "%s.pattern: a decoder with a regular expression is not supported", where);
    return get_text(r, o, where, "content", &s->content);
  } else if (IS("Strip")) {
    s->kind = RFI_DEC_STRIP;
    RFI_TRY(get_text(r, o, where, "content", &s->content));
    RFI_TRY(get_count(r, o, where, "start", &s->start));
    return get_count(r, o, where, "stop", &s->stop);
  } else if (IS("WordPiece")) {
    s->kind = RFI_DEC_WORDPIECE;
    RFI_TRY(get_text(r, o, where, "prefix", &s->content));
    return get_flag(r, o, where, "cleanup", true, &s->cleanup);
  } else if (IS("BPEDecoder")) {
    s->kind = RFI_DEC_BPE;
    return get_text(r, o, where, "suffix", &s->content);
  } else return REFUSE(r, "%s: the decoder \"%s\" is not supported", where, type);
#undef IS
  return RFR_OK;
}

/* Reads a component, or the members of a Sequence, into a flat list. */
static rfr_status read_steps(reader *r, const json_t *o, const char *where, const char *members, read_step read,
                             int depth, rfi_step *steps, int *n) {
  const char *type = json_string_value(json_object_get(o, "type"));
  char inner[64];
  if (!o || json_is_null(o)) return RFR_OK;
  if (!type) return BAD(r, "%s has no \"type\"", where);
  if (strcmp(type, "Sequence") == 0) {
    const json_t *list = json_object_get(o, members);
    if (!json_is_array(list)) return BAD(r, "%s.%s is not a list", where, members);
    if (depth == DEPTH) return REFUSE(r, "%s: sequences are nested more than %d deep", where, DEPTH);
    for (size_t i = 0; i < json_array_size(list); i++) {
      rfi_snprintf(inner, sizeof inner, "%s.%s[%zu]", where, members, i);
      RFI_TRY(read_steps(r, json_array_get(list, i), inner, members, read, depth + 1, steps, n));
    }
    return RFR_OK;
  }
  if (*n == RFI_STEPS_LIMIT) return REFUSE(r, "%s: more than %d steps", where, RFI_STEPS_LIMIT);
  char *place = r->places[r->n_places++];
  rfi_snprintf(place, sizeof *r->places, "%s", where);
  steps[*n] = (rfi_step){.where = place};
  return read(r, o, type, &steps[(*n)++]);
}

/* ---- models ---- */

static rfr_status read_token(reader *r, rfi_bytes text, int64_t id) {
  if (id < 0 || id >= RFI_TOKENS_LIMIT)
    return BAD(r, "model.vocab: \"%.80s\" has the id %lld, at most %d is supported", text.text, (long long)id,
               RFI_TOKENS_LIMIT - 1);
  if (r->tokens[id].text)
    return BAD(r, "model.vocab: \"%.80s\" and \"%.80s\" have the id %lld", r->tokens[id].text, text.text,
               (long long)id);
  r->tokens[id] = text;
  return RFR_OK;
}

static rfr_status read_vocab(reader *r, json_t *vocab) {
  const char *text;
  size_t length;
  json_t *id;
  if (!json_is_object(vocab)) return BAD(r, "model.vocab is not an object");
  int64_t most = -1;
  json_object_keylen_foreach(vocab, text, length, id) {
    if (!json_is_integer(id)) return BAD(r, "model.vocab: the id of \"%.80s\" is not an integer", text);
    if (json_integer_value(id) > most) most = json_integer_value(id);
  }
  if (most >= RFI_TOKENS_LIMIT)
    return BAD(r, "model.vocab has the id %lld, at most %d is supported", (long long)most, RFI_TOKENS_LIMIT - 1);
  RFI_TRY(RFI_ALLOC(r->ctx, (size_t)(most + 1) * sizeof *r->tokens, &r->tokens));
  json_object_keylen_foreach(vocab, text, length, id)
      RFI_TRY(read_token(r, (rfi_bytes){text, length}, json_integer_value(id)));
  r->spec.tokens = r->tokens;
  r->spec.n_tokens = most + 1;
  return RFR_OK;
}

static int32_t find_token(const reader *r, rfi_bytes text, const json_t *vocab) {
  (void)r;
  const json_t *id = json_object_getn(vocab, text.text, text.n);
  return json_is_integer(id) ? (int32_t)json_integer_value(id) : -1;
}

/* "left right", or ["left", "right"] */
static rfr_status read_merges(reader *r, const json_t *merges) {
  const size_t n = json_array_size(merges);
  if (!json_is_array(merges)) return BAD(r, "model.merges is not a list");
  RFI_TRY(RFI_ALLOC(r->ctx, n * sizeof *r->merges, &r->merges));
  for (size_t i = 0; i < n; i++) {
    const json_t *x = json_array_get(merges, i);
    rfi_merge *m = &r->merges[i];
    if (json_is_string(x)) {
      const rfi_bytes both = text_of(x);
      const char *blank = memchr(both.text, ' ', both.n);
      const size_t left = blank ? (size_t)(blank - both.text) : 0;
      if (blank) *m = (rfi_merge){{both.text, left}, {blank + 1, both.n - left - 1}};
      if (!blank || memchr(m->right.text, ' ', m->right.n))
        return BAD(r, "model.merges[%zu]: \"%.80s\" is not two tokens with a blank between them", i, both.text);
    } else if (json_array_size(x) == 2 && json_is_string(json_array_get(x, 0)) &&
               json_is_string(json_array_get(x, 1))) {
      *m = (rfi_merge){text_of(json_array_get(x, 0)), text_of(json_array_get(x, 1))};
    } else {
      return BAD(r, "model.merges[%zu] is not a pair of tokens", i);
    }
  }
  r->spec.merges = r->merges;
  r->spec.n_merges = (int64_t)n;
  return RFR_OK;
}

static rfr_status read_unknown(reader *r, const json_t *model, bool required) {
  const json_t *unknown = json_object_get(model, "unk_token");
  if (unknown && !json_is_null(unknown) && !json_is_string(unknown)) return BAD(r, "model.unk_token is not a string");
  if (json_is_string(unknown)) {
    r->spec.unknown = find_token(r, text_of(unknown), json_object_get(model, "vocab"));
    if (r->spec.unknown < 0)
      return BAD(r, "model.unk_token \"%.80s\" is not in model.vocab", json_string_value(unknown));
  } else if (required) return BAD(r, "model.unk_token is missing");
  return RFR_OK;
}

static rfr_status read_bpe(reader *r, const json_t *model) {
  rfi_tokenizer_spec *p = &r->spec;
  const json_t *dropout = json_object_get(model, "dropout");
  const json_t *prefix = json_object_get(model, "continuing_subword_prefix");
  const json_t *suffix = json_object_get(model, "end_of_word_suffix");
  p->model = RFI_BPE;
  if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0.0)
    return REFUSE(r, "model.dropout: random merges are not supported");
  RFI_TRY(read_vocab(r, json_object_get(model, "vocab")));
  RFI_TRY(read_merges(r, json_object_get(model, "merges")));
  RFI_TRY(read_unknown(r, model, false));
  if (json_is_string(prefix)) p->continuing_prefix = text_of(prefix);
  if (json_is_string(suffix)) p->word_suffix = text_of(suffix);
  RFI_TRY(get_flag(r, model, "model", "fuse_unk", false, &p->fuse_unknown));
  RFI_TRY(get_flag(r, model, "model", "byte_fallback", false, &p->byte_fallback));
  return get_flag(r, model, "model", "ignore_merges", false, &p->ignore_merges);
}

static rfr_status index_tokens(reader *r, size_t n) {
  size_t size = 16;
  while (size < 2 * n) size *= 2;
  r->index_mask = size - 1;
  RFI_TRY(RFI_ALLOC(r->ctx, size * sizeof *r->index, &r->index));
  memset(r->index, -1, size * sizeof *r->index);
  for (size_t k = 0; k < n; k++) {
    size_t i = rfi_hash_bytes(r->tokens[k].text, r->tokens[k].n).low & r->index_mask;
    while (r->index[i] >= 0) i = (i + 1) & r->index_mask;
    r->index[i] = (int32_t)k;
  }
  return RFR_OK;
}

/* The value that serde_json, the JSON parser of tokenizers, reads from the shortest text of x. It rounds twice: first
 * the digits as an integer, then the quotient by a power of ten. Ties between two paths depend on the last bit. */
static double rounded_twice(double x) {
  char text[32], power[16];
  uint64_t digits = 0;
  int exponent = 0;
  bool is_fraction = false;
  rfi_format_double(text, x);
  for (const char *s = text; *s; s++) {
    if (*s >= '0' && *s <= '9') digits = 10 * digits + (uint64_t)(*s - '0'), exponent -= is_fraction;
    else if (*s == '.') is_fraction = true;
    else if (*s == 'e') {
      exponent += atoi(s + 1);
      break;
    } else if (*s != '-') return x; /* infinite */
  }
  if (exponent < -308 || exponent > 308) return x;
  rfi_snprintf(power, sizeof power, "1e%d", exponent < 0 ? -exponent : exponent);
  const double scale = rfi_strtod(power, NULL), y = exponent < 0 ? (double)digits / scale : (double)digits * scale;
  return x < 0.0 ? -y : y;
}

static rfr_status read_unigram(reader *r, const json_t *model) {
  rfi_tokenizer_spec *p = &r->spec;
  const json_t *vocab = json_object_get(model, "vocab"), *unknown = json_object_get(model, "unk_id");
  const size_t n = json_array_size(vocab);
  p->model = RFI_UNIGRAM;
  if (!json_is_array(vocab) || n > RFI_TOKENS_LIMIT) return BAD(r, "model.vocab is not a list of tokens and scores");
  RFI_TRY(RFI_ALLOC(r->ctx, n * sizeof *r->tokens, &r->tokens));
  RFI_TRY(RFI_ALLOC(r->ctx, n * sizeof *r->scores, &r->scores));
  for (size_t i = 0; i < n; i++) {
    const json_t *x = json_array_get(vocab, i), *text = json_array_get(x, 0), *score = json_array_get(x, 1);
    if (json_array_size(x) != 2 || !json_is_string(text) || !json_is_number(score))
      return BAD(r, "model.vocab[%zu] is not [token, score]", i);
    r->tokens[i] = text_of(text);
    r->scores[i] = rounded_twice(json_number_value(score));
  }
  RFI_TRY(index_tokens(r, n));
  if (unknown && !json_is_null(unknown)) {
    if (!json_is_integer(unknown) || json_integer_value(unknown) < 0 || (size_t)json_integer_value(unknown) >= n)
      return BAD(r, "model.unk_id is not an index of model.vocab");
    p->unknown = (int32_t)json_integer_value(unknown);
  }
  p->tokens = r->tokens;
  p->scores = r->scores;
  p->n_tokens = (int64_t)n;
  return get_flag(r, model, "model", "byte_fallback", false, &p->byte_fallback);
}

static rfr_status read_wordpiece(reader *r, const json_t *model) {
  r->spec.model = RFI_WORDPIECE;
  RFI_TRY(read_vocab(r, json_object_get(model, "vocab")));
  RFI_TRY(read_unknown(r, model, true));
  RFI_TRY(get_text(r, model, "model", "continuing_subword_prefix", &r->spec.continuing_prefix));
  return get_count(r, model, "model", "max_input_chars_per_word", &r->spec.max_word);
}

/* Files of older versions have no type. */
static rfr_status read_model(reader *r, const json_t *model) {
  const char *type = json_string_value(json_object_get(model, "type"));
  if (!json_is_object(model)) return BAD(r, "model is missing");
  if (!type)
    type = json_object_get(model, "merges")                 ? "BPE"
           : json_is_array(json_object_get(model, "vocab")) ? "Unigram"
                                                            : "WordPiece";
  if (strcmp(type, "BPE") == 0) return read_bpe(r, model);
  if (strcmp(type, "Unigram") == 0) return read_unigram(r, model);
  if (strcmp(type, "WordPiece") == 0) return read_wordpiece(r, model);
  return REFUSE(r, "model.type is \"%.40s\"; BPE, Unigram and WordPiece are supported", type);
}

/* ---- added tokens ---- */

static int32_t model_id(const reader *r, const json_t *model, rfi_bytes text) {
  const json_t *vocab = json_object_get(model, "vocab");
  if (json_is_object(vocab)) return find_token(r, text, vocab);
  if (!r->index) return -1;
  for (size_t i = rfi_hash_bytes(text.text, text.n).low & r->index_mask; r->index[i] >= 0;
       i = (i + 1) & r->index_mask) {
    const rfi_bytes t = r->tokens[r->index[i]];
    if (t.n == text.n && memcmp(t.text, text.text, text.n) == 0) return r->index[i];
  }
  return -1;
}

/* As in tokenizers, a token that the model lacks gets the next free id, not the id in the file. A file with a different
 * id is refused, because the ids would not be those of the file. */
static rfr_status read_added(reader *r, const json_t *root) {
  const json_t *list = json_object_get(root, "added_tokens"), *model = json_object_get(root, "model");
  const json_t *vocab = json_object_get(model, "vocab");
  const int64_t n_model = json_is_object(vocab) ? (int64_t)json_object_size(vocab) : (int64_t)json_array_size(vocab);
  const size_t n = json_array_size(list);
  int64_t most = -1;
  if (list && !json_is_null(list) && !json_is_array(list)) return BAD(r, "added_tokens is not a list");
  RFI_TRY(RFI_ALLOC(r->ctx, n * sizeof *r->added, &r->added));
  for (size_t i = 0; i < n; i++) {
    const json_t *o = json_array_get(list, i), *id = json_object_get(o, "id");
    rfi_added_token *a = &r->added[i];
    char where[40];
    rfi_snprintf(where, sizeof where, "added_tokens[%zu]", i);
    RFI_TRY(get_text(r, o, where, "content", &a->content));
    RFI_TRY(get_flag(r, o, where, "special", false, &a->special));
    RFI_TRY(get_flag(r, o, where, "normalized", !a->special, &a->normalized));
    RFI_TRY(get_flag(r, o, where, "lstrip", false, &a->lstrip));
    RFI_TRY(get_flag(r, o, where, "rstrip", false, &a->rstrip));
    RFI_TRY(get_flag(r, o, where, "single_word", false, &a->single_word));
    if (!json_is_integer(id)) return BAD(r, "%s.id is not an integer", where);
    int64_t expected = model_id(r, model, a->content);
    if (expected < 0) expected = most >= n_model || n_model == 0 ? most + 1 : n_model;
    if (json_integer_value(id) != expected || expected >= RFI_TOKENS_LIMIT)
      return BAD(r, "%s: \"%.80s\" has the id %lld, but the vocabulary gives it %lld", where, a->content.text,
                 (long long)json_integer_value(id), (long long)expected);
    a->id = (int32_t)expected;
    if (expected > most) most = expected;
  }
  r->spec.added = r->added;
  r->spec.n_added = (int64_t)n;
  return RFR_OK;
}

/* ---- post-processors ---- */

static rfr_status put_id(const reader *r, const char *where, int32_t *ids, int *n, int64_t id) {
  if (id < 0 || id >= RFI_TOKENS_LIMIT) return BAD(r, "%s: %lld is not an id", where, (long long)id);
  if (*n == IDS) return REFUSE(r, "%s adds more than %d tokens", where, IDS);
  ids[(*n)++] = (int32_t)id;
  return RFR_OK;
}

/* The ids that the step adds before and after the tokens of earlier steps. */
static rfr_status wrap(reader *r, const char *where, const int32_t *before, int n_before, const int32_t *after,
                       int n_after) {
  rfi_tokenizer_spec *p = &r->spec;
  if (p->n_before + n_before > IDS) return REFUSE(r, "%s adds more than %d tokens", where, IDS);
  memmove(r->before + n_before, r->before, (size_t)p->n_before * sizeof *r->before);
  if (n_before) memcpy(r->before, before, (size_t)n_before * sizeof *before);
  p->n_before += n_before;
  for (int i = 0; i < n_after; i++) RFI_TRY(put_id(r, where, r->after, &p->n_after, after[i]));
  return RFR_OK;
}

/* [{"SpecialToken": {"id": name}}, {"Sequence": {"id": "A"}}, ...] with special_tokens[name].ids */
static rfr_status read_template(reader *r, const json_t *o, const char *where) {
  const json_t *single = json_object_get(o, "single"), *names = json_object_get(o, "special_tokens");
  int32_t ids[2][IDS];
  int n[2] = {0, 0}, side = 0;
  if (!json_is_array(single)) return REFUSE(r, "%s.single is not a list", where);
  for (size_t i = 0; i < json_array_size(single); i++) {
    const json_t *piece = json_array_get(single, i), *token = json_object_get(piece, "SpecialToken");
    const char *sequence = json_string_value(json_object_get(json_object_get(piece, "Sequence"), "id"));
    if (sequence && strcmp(sequence, "A") == 0 && side == 0) {
      side = 1;
      continue;
    }
    const char *name = json_string_value(json_object_get(token, "id"));
    const json_t *list = name ? json_object_get(json_object_get(names, name), "ids") : NULL;
    if (sequence || !json_is_array(list))
      return REFUSE(r, "%s.single[%zu] is neither a known special token nor the one sequence A", where, i);
    for (size_t k = 0; k < json_array_size(list); k++)
      RFI_TRY(put_id(r, where, ids[side], &n[side], json_integer_value(json_array_get(list, k))));
  }
  if (side == 0) return REFUSE(r, "%s.single has no sequence A", where);
  return wrap(r, where, ids[0], n[0], ids[1], n[1]);
}

/* "cls": [text, id], "sep": [text, id] */
static rfr_status read_pair(reader *r, const json_t *o, const char *where) {
  const json_t *cls = json_array_get(json_object_get(o, "cls"), 1), *sep = json_array_get(json_object_get(o, "sep"), 1);
  if (!json_is_integer(cls) || !json_is_integer(sep)) return BAD(r, "%s: cls or sep is not [token, id]", where);
  int32_t before[1], after[1];
  int n = 0, m = 0;
  RFI_TRY(put_id(r, where, before, &n, json_integer_value(cls)));
  RFI_TRY(put_id(r, where, after, &m, json_integer_value(sep)));
  return wrap(r, where, before, 1, after, 1);
}

static rfr_status read_post_processor(reader *r, const json_t *o, const char *where, int depth) {
  const char *type = json_string_value(json_object_get(o, "type"));
  char inner[64];
  if (!o || json_is_null(o)) return RFR_OK;
  if (!type) return BAD(r, "%s has no \"type\"", where);
  if (strcmp(type, "ByteLevel") == 0) return RFR_OK; /* affects only offsets */
  if (strcmp(type, "TemplateProcessing") == 0) return read_template(r, o, where);
  if (strcmp(type, "BertProcessing") == 0 || strcmp(type, "RobertaProcessing") == 0) return read_pair(r, o, where);
  if (strcmp(type, "Sequence") != 0) return REFUSE(r, "%s: the post-processor \"%.40s\" is not supported", where, type);
  const json_t *list = json_object_get(o, "processors");
  if (!json_is_array(list)) return BAD(r, "%s.processors is not a list", where);
  if (depth == DEPTH) return REFUSE(r, "%s: sequences are nested more than %d deep", where, DEPTH);
  for (size_t i = 0; i < json_array_size(list); i++) {
    rfi_snprintf(inner, sizeof inner, "%s.processors[%zu]", where, i);
    RFI_TRY(read_post_processor(r, json_array_get(list, i), inner, depth + 1));
  }
  return RFR_OK;
}

/* ---- the file ---- */

static rfr_status read_root(reader *r, const json_t *root) {
  rfi_tokenizer_spec *p = &r->spec;
  if (!json_is_object(root)) return BAD(r, "the file is not a JSON object");
  RFI_TRY(read_model(r, json_object_get(root, "model")));
  RFI_TRY(read_added(r, root));
  p->normalizers = r->normalizers;
  p->pre_tokenizers = r->pre_tokenizers;
  p->decoders = r->decoders;
  RFI_TRY(read_steps(r, json_object_get(root, "normalizer"), "normalizer", "normalizers", read_normalizer, 0,
                     r->normalizers, &p->n_normalizers));
  RFI_TRY(read_steps(r, json_object_get(root, "pre_tokenizer"), "pre_tokenizer", "pretokenizers", read_pre_tokenizer, 0,
                     r->pre_tokenizers, &p->n_pre_tokenizers));
  RFI_TRY(read_steps(r, json_object_get(root, "decoder"), "decoder", "decoders", read_decoder, 0, r->decoders,
                     &p->n_decoders));
  p->before = r->before;
  p->after = r->after;
  return read_post_processor(r, json_object_get(root, "post_processor"), "post_processor", 0);
}

static rfr_status reader_create(rfr_ctx *ctx, const char *file, reader **out) {
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  **out = (reader){.ctx = ctx, .file = file};
  (*out)->spec = (rfi_tokenizer_spec){.name = file, .unknown = -1, .bos = -1, .eos = -1, .stop = (*out)->stop};
  return RFI_ALLOC(ctx, 3 * RFI_STEPS_LIMIT * sizeof *(*out)->places, &(*out)->places);
}

static void reader_destroy(rfr_ctx *ctx, reader *r) {
  if (!r) return;
  rfi_free(ctx, r->tokens);
  rfi_free(ctx, r->scores);
  rfi_free(ctx, r->merges);
  rfi_free(ctx, r->added);
  rfi_free(ctx, r->places);
  rfi_free(ctx, r->index);
  rfi_free(ctx, r);
}

/* ---- files in the folder of tokenizer.json ---- */

static int32_t id_of(const reader *r, const json_t *model, rfi_bytes text) {
  for (int64_t i = 0; i < r->spec.n_added; i++)
    if (r->added[i].content.n == text.n && memcmp(r->added[i].content.text, text.text, text.n) == 0)
      return r->added[i].id;
  return model_id(r, model, text);
}

/* A text, or {"content": text} */
static int32_t named_id(const reader *r, const json_t *model, const json_t *config, const char *key) {
  const json_t *x = json_object_get(config, key);
  if (json_is_object(x)) x = json_object_get(x, "content");
  return json_is_string(x) ? id_of(r, model, text_of(x)) : -1;
}

/* *out NULL: the file does not exist. Integers are read as reals: model_max_length may have 31 digits. */
static rfr_status load_sibling(rfr_ctx *ctx, const char *folder, const char *name, json_t **out) {
  char *path = NULL, *text;
  size_t n;
  *out = NULL;
  RFI_TRY(rfi_model_file(ctx, folder, name, RFI_JSON_LIMIT, &text, &n));
  rfr_status s = rfi_path_join(ctx, folder, name, &path);
  if (s == RFR_OK && text) s = rfi_json_parse_reals(path, text, n, out);
  rfi_free(ctx, text);
  rfi_free(ctx, path);
  return s;
}

static rfr_status put_stop(reader *r, const json_t *id) {
  const double x = json_number_value(id);
  if (!json_is_number(id)) return RFR_OK;
  return put_id(r, "eos_token_id of generation_config.json", r->stop, &r->spec.n_stop,
                x >= 0 && x < 1e9 ? (int64_t)x : -1);
}

static rfr_status read_ends(reader *r, const json_t *model, const char *folder) {
  json_t *config = NULL, *map = NULL, *generation = NULL;
  rfr_status s;
  RFI_GOTO(load_sibling(r->ctx, folder, "tokenizer_config.json", &config));
  RFI_GOTO(load_sibling(r->ctx, folder, "special_tokens_map.json", &map));
  RFI_GOTO(load_sibling(r->ctx, folder, "generation_config.json", &generation));
  r->spec.bos = named_id(r, model, config, "bos_token");
  r->spec.eos = named_id(r, model, config, "eos_token");
  if (r->spec.bos < 0) r->spec.bos = named_id(r, model, map, "bos_token");
  if (r->spec.eos < 0) r->spec.eos = named_id(r, model, map, "eos_token");
  const json_t *stop = json_object_get(generation, "eos_token_id");
  RFI_GOTO(put_stop(r, stop));
  for (size_t i = 0; i < json_array_size(stop); i++) RFI_GOTO(put_stop(r, json_array_get(stop, i)));
fail: /* reached on success too */
  json_decref(config);
  json_decref(map);
  json_decref(generation);
  return s;
}

/* `folder` NULL: there are no other files. */
static rfr_status create_from(rfr_ctx *ctx, const char *name, const char *text, size_t n, const char *folder,
                              rfr_tokenizer **out) {
  json_t *root = NULL;
  reader *r = NULL;
  rfr_status s;
  RFI_GOTO(rfi_json_parse(name, text, n, &root));
  RFI_GOTO(reader_create(ctx, name, &r));
  RFI_GOTO(read_root(r, root));
  if (folder) RFI_GOTO(read_ends(r, json_object_get(root, "model"), folder));
  RFI_GOTO(rfi_tokenizer_create(ctx, &r->spec, out));
fail: /* reached on success too */
  reader_destroy(ctx, r);
  json_decref(root);
  return s;
}

rfr_status rfi_tokenizer_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_tokenizer **out) {
  *out = NULL;
  return create_from(ctx, name, text, n, NULL, out);
}

rfr_status rfr_tokenizer_open(rfr_ctx *ctx, const char *path, rfr_tokenizer **out) {
  char *file = NULL, *text = NULL;
  size_t n;
  bool is_model;
  rfr_status s;
  if (!out) return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_open: out is NULL");
  *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!path) return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_open: path is NULL");
  RFI_TRY(rfi_model_has_files(ctx, path, &is_model));
  if (is_model) {
    RFI_GOTO(rfi_path_join(ctx, path, "tokenizer.json", &file));
    RFI_GOTO(rfi_model_file(ctx, path, "tokenizer.json", FILE_LIMIT, &text, &n));
  }
  if (!text) RFI_GOTO(rfi_file_read_limited(ctx, file ? file : path, FILE_LIMIT, &text, &n));
  RFI_GOTO(create_from(ctx, file ? file : path, text, n, is_model ? path : NULL, out));
fail: /* reached on success too */
  rfi_free(ctx, text);
  rfi_free(ctx, file);
  return s;
}
