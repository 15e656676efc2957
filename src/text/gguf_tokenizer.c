/* SPDX-License-Identifier: Apache-2.0
 *
 * Builds tokenizer.json as the converters of the transformers library do from the original files of a model.
 *
 * Sources: src/llama-vocab.cpp of llama.cpp for the pre-tokenizers and defaults; generate_merges of transformers for
 * the merges of a sentencepiece model, which GGUF leaves out.
 */
#include "text/gguf_tokenizer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

#define UNSUPPORTED(...) rfi_fail_at(RFI_E_UNSUPPORTED, rfi_gguf_path(g), 0, __VA_ARGS__)
#define BAD(...) rfi_fail_at(RFI_E_GGUF, rfi_gguf_path(g), 0, __VA_ARGS__)

/* ---- pre-tokenizers ---- */

#define BYTE_LEVEL(regex) \
  "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": " regex "}"
#define SPLIT(regex) \
  "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" regex "\"}, \"behavior\": \"Isolated\", \"invert\": false}"
#define SEQUENCE(list) "{\"type\": \"Sequence\", \"pretokenizers\": [" list "]}"
#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\\\p{L}+| ?\\\\p{N}+| ?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s+(?!\\\\S)"
#define ENDINGS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|"
#define SPACES "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define UPPER "[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]"
#define LOWER "[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]"
#define NOT_WORD "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?"

static const struct pre {
  const char *names; /* of tokenizer.ggml.pre; the first one is written */
  const char *json;
  bool nfc, ignore_merges, bos;
} pres[] = {
    {"smollm starcoder refact command-r codeshell exaone minerva-7b",
     SEQUENCE("{\"type\": \"Digits\", \"individual_digits\": true}, " BYTE_LEVEL("true")), false, false, false},
    {"gpt-2 phi-2 mpt olmo jais roberta-bpe trillion granite-docling", BYTE_LEVEL("true"), false, false, false},
    {"llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
     SEQUENCE(SPLIT(ENDINGS "\\\\p{N}{1,3}" SPACES) ", " BYTE_LEVEL("false")), false, true, true},
    {"dbrx smaug-bpe", SEQUENCE(SPLIT(ENDINGS "\\\\p{N}{1,3}" SPACES) ", " BYTE_LEVEL("false")), false, false, false},
    {"qwen2 deepseek-r1-qwen stablelm2", SEQUENCE(SPLIT(ENDINGS "\\\\p{N}" SPACES) ", " BYTE_LEVEL("false")), true,
     false, false},
    {"tekken",
     SEQUENCE(SPLIT(NOT_WORD UPPER
                    "*" LOWER "+|" NOT_WORD UPPER "+" LOWER "*|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{N}]+"
                    "[\\\\r\\\\n/]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+") ", " BYTE_LEVEL("false")),
     false, true, false},
    {"default",
     SEQUENCE(SPLIT("[\\\\p{P}\\\\$\\\\+<=>\\\\^~\\\\|]+") ", " SPLIT(GPT2) ", " SPLIT("\\\\p{N}+") ", " SPLIT(
         "[0-9][0-9][0-9]") ", " BYTE_LEVEL("false")),
     false, false, false}};

/* Kinds of tokens in tokenizer.ggml.token_type. */
enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };

typedef struct vocabulary {
  const rfi_gguf_value *tokens, *types, *scores, *merges;
  int64_t unknown, bos, eos; /* -1: none */
} vocabulary;

static rfr_status get_id(const rfi_gguf *g, const char *key, int64_t n, int64_t *out) {
  const rfi_gguf_value *v = rfi_gguf_key(g, key);
  if (!v) return RFR_OK;
  RFI_TRY(rfi_gguf_int(g, v, 0, out));
  if (*out >= 0 && *out < n) return RFR_OK;
  return BAD("%s is %" PRId64 "; the vocabulary has %" PRId64 " tokens", key, *out, n);
}

static rfr_status get_flag(const rfi_gguf *g, const char *key, bool *out) {
  const rfi_gguf_value *v = rfi_gguf_key(g, key);
  int64_t x;
  if (!v) return RFR_OK;
  if (v->kind != RFI_GGUF_BOOL) return BAD("%s is not a boolean", key);
  RFI_TRY(rfi_gguf_int(g, v, 0, &x));
  *out = x != 0;
  return RFR_OK;
}

static rfr_status get_list(const rfi_gguf *g, const char *key, bool strings, int64_t n, const rfi_gguf_value **out) {
  *out = rfi_gguf_key(g, key);
  if (!*out) return RFR_OK;
  if (!(*out)->is_array || ((*out)->kind == RFI_GGUF_STRING) != strings)
    return BAD("%s is not a list of %s", key, strings ? "strings" : "numbers");
  if (n >= 0 && (*out)->count != n)
    return BAD("%s has %" PRId64 " elements; there are %" PRId64 " tokens", key, (*out)->count, n);
  return RFR_OK;
}

static rfr_status read_vocabulary(const rfi_gguf *g, vocabulary *v) {
  RFI_TRY(get_list(g, "tokenizer.ggml.tokens", true, -1, &v->tokens));
  if (!v->tokens) return RFR_OK;
  const int64_t n = v->tokens->count;
  if (n == 0 || n > INT32_MAX) return BAD("tokenizer.ggml.tokens has %" PRId64 " elements", n);
  RFI_TRY(get_list(g, "tokenizer.ggml.token_type", false, n, &v->types));
  RFI_TRY(get_list(g, "tokenizer.ggml.scores", false, n, &v->scores));
  RFI_TRY(get_list(g, "tokenizer.ggml.merges", true, -1, &v->merges));
  v->unknown = v->bos = v->eos = -1;
  RFI_TRY(get_id(g, "tokenizer.ggml.unknown_token_id", n, &v->unknown));
  RFI_TRY(get_id(g, "tokenizer.ggml.bos_token_id", n, &v->bos));
  return get_id(g, "tokenizer.ggml.eos_token_id", n, &v->eos);
}

static rfr_status type_of(const rfi_gguf *g, const vocabulary *v, int64_t i, int64_t *type) {
  *type = NORMAL;
  return v->types ? rfi_gguf_int(g, v->types, i, type) : RFR_OK;
}

static json_t *text_of(const char *text, size_t n) { return json_stringn(text, n); }

/* "vocab" and "added_tokens": control tokens are special, user-defined ones are not. */
static rfr_status add_tokens(const rfi_gguf *g, const vocabulary *v, json_t *root, json_t *vocab) {
  json_t *added = json_array();
  size_t cursor = 0;
  RFI_TRY(rfi_json_set(root, "added_tokens", added));
  for (int64_t i = 0; i < v->tokens->count; i++) {
    const char *text;
    size_t n;
    int64_t type;
    RFI_TRY(rfi_gguf_next_string(g, v->tokens, &cursor, &text, &n));
    RFI_TRY(type_of(g, v, i, &type));
    if (json_object_getn(vocab, text, n)) return BAD("tokenizer.ggml.tokens: token %" PRId64 " appears twice", i);
    if (json_object_setn_new(vocab, text, n, json_integer(i)) != 0)
      return BAD("tokenizer.ggml.tokens: token %" PRId64 " is not valid UTF-8, or there is no memory", i);
    if (type != CONTROL && type != USER_DEFINED && type != UNKNOWN) continue;
    json_t *token =
        json_pack("{s:I, s:o, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)i, "content", text_of(text, n),
                  "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", type != USER_DEFINED);
    if (json_array_append_new(added, token) != 0) return rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g));
  }
  return RFR_OK;
}

/* The text of token i. */
static rfr_status find_text(const rfi_gguf *g, const vocabulary *v, int64_t id, const char **text, size_t *n) {
  size_t cursor = 0;
  for (int64_t i = 0; i <= id; i++) RFI_TRY(rfi_gguf_next_string(g, v->tokens, &cursor, text, n));
  return RFR_OK;
}

static rfr_status set_token(const rfi_gguf *g, const vocabulary *v, json_t *o, const char *key, int64_t id) {
  const char *text;
  size_t n;
  if (id < 0) return RFR_OK;
  RFI_TRY(find_text(g, v, id, &text, &n));
  return rfi_json_set(o, key, text_of(text, n));
}

/* Tokens around a text. */
static rfr_status set_ends(const rfi_gguf *g, const vocabulary *v, bool bos, json_t *root) {
  bool eos = false;
  RFI_TRY(get_flag(g, "tokenizer.ggml.add_bos_token", &bos));
  RFI_TRY(get_flag(g, "tokenizer.ggml.add_eos_token", &eos));
  const int64_t ids[2] = {bos ? v->bos : -1, eos ? v->eos : -1};
  json_t *single = json_array(), *pair = json_array(), *special = json_object();
  json_t *post = json_pack("{s:s, s:o, s:o, s:o}", "type", "TemplateProcessing", "single", single, "pair", pair,
                           "special_tokens", special);
  RFI_TRY(rfi_json_set(root, "post_processor", ids[0] < 0 && ids[1] < 0 && post ? json_null() : json_incref(post)));
  rfr_status s = RFR_OK;
  int wrong = 0;
  for (int k = 0; s == RFR_OK && k < 2; k++) {
    wrong |= json_array_append_new(single, json_pack("{s:{s:s, s:i}}", "Sequence", "id", "A", "type_id", 0));
    wrong |= json_array_append_new(pair, json_pack("{s:{s:s, s:i}}", "Sequence", "id", k ? "B" : "A", "type_id", k));
    if (k) wrong |= json_array_remove(single, json_array_size(single) - 1);
  }
  for (int k = 0; s == RFR_OK && k < 2; k++) {
    const char *text;
    size_t n;
    if (ids[k] < 0) continue;
    if ((s = find_text(g, v, ids[k], &text, &n)) != RFR_OK) break;
    json_t *piece = json_pack("{s:{s:o, s:i}}", "SpecialToken", "id", text_of(text, n), "type_id", 0);
    wrong |= k ? json_array_append(single, piece) : json_array_insert(single, 0, piece);
    wrong |= k ? json_array_append(pair, piece) : json_array_insert(pair, 0, piece);
    json_decref(piece);
    piece =
        json_pack("{s:o, s:[I], s:[o]}", "id", text_of(text, n), "ids", (json_int_t)ids[k], "tokens", text_of(text, n));
    wrong |= json_object_setn_new(special, text, n, piece);
  }
  json_decref(post);
  if (s == RFR_OK && wrong) s = rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g));
  return s;
}

/* ---- byte-level BPE ---- */

static rfr_status add_merges(const rfi_gguf *g, const vocabulary *v, json_t *merges) {
  size_t cursor = 0;
  for (int64_t i = 0; v->merges && i < v->merges->count; i++) {
    const char *text;
    size_t n;
    RFI_TRY(rfi_gguf_next_string(g, v->merges, &cursor, &text, &n));
    /* Tokens of byte-level BPE contain no space: it is written as another character. */
    const char *space = n > 1 ? memchr(text + 1, ' ', n - 1) : NULL;
    if (!space || space == text + n - 1) return BAD("tokenizer.ggml.merges: merge %" PRId64 " is not two tokens", i);
    const size_t left = (size_t)(space - text);
    if (json_array_append_new(merges, json_pack("[o, o]", text_of(text, left), text_of(space + 1, n - left - 1))) != 0)
      return BAD("tokenizer.ggml.merges: merge %" PRId64 " is not valid UTF-8, or there is no memory", i);
  }
  return RFR_OK;
}

static rfr_status find_pre(const rfi_gguf *g, const struct pre **out) {
  const rfi_gguf_value *v = rfi_gguf_key(g, "tokenizer.ggml.pre");
  const char *text = "default";
  size_t n = 7;
  char name[64];
  if (v) RFI_TRY(rfi_gguf_string(g, v, &text, &n));
  rfi_snprintf(name, sizeof name, "%.*s", n < 63 ? (int)n : 63, text);
  for (size_t i = 0; i < sizeof pres / sizeof pres[0]; i++) {
    *out = &pres[i];
    if (strlen(name) == n && n > 0 && rfi_has_word(pres[i].names, name)) return RFR_OK;
  }
  return UNSUPPORTED("tokenizer.ggml.pre is %s, which is not supported", name);
}

static rfr_status set_bytes(const rfi_gguf *g, const vocabulary *v, json_t *root, json_t *model) {
  const struct pre *p;
  json_t *merges = json_array(), *pre = NULL;
  RFI_TRY(rfi_json_set(model, "merges", merges));
  RFI_TRY(find_pre(g, &p));
  if (!v->merges) return BAD("tokenizer.ggml.merges is missing");
  RFI_TRY(rfi_json_parse("tokenizer.ggml.pre", p->json, strlen(p->json), &pre));
  RFI_TRY(rfi_json_set(root, "pre_tokenizer", pre));
  RFI_TRY(rfi_json_set(root, "normalizer", p->nfc ? json_pack("{s:s}", "type", "NFC") : json_null()));
  RFI_TRY(rfi_json_set(root, "decoder",
                       json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 1, "trim_offsets", 1,
                                 "use_regex", 1)));
  RFI_TRY(rfi_json_set(model, "ignore_merges", json_boolean(p->ignore_merges)));
  RFI_TRY(add_merges(g, v, merges));
  return set_ends(g, v, p->bos, root);
}

/* ---- sentencepiece BPE ---- */

enum { LONGEST = 256 }; /* bytes of a token that gets merges */

/* A merge of two tokens to the token `to`. */
typedef struct merge {
  double score;
  int32_t to, left_characters, right_characters, at; /* at: bytes of the left token */
} merge;
typedef struct merges {
  rfr_ctx *ctx;
  merge *items;
  size_t n, capacity;
} merges;

/* In the order of falling scores, then of generate_merges in transformers. */
static int compare_merges(const void *a, const void *b) {
  const merge *x = a, *y = b;
  if (x->score != y->score) return x->score > y->score ? -1 : 1;
  if (x->left_characters != y->left_characters) return x->left_characters > y->left_characters ? -1 : 1;
  if (x->right_characters != y->right_characters) return x->right_characters > y->right_characters ? -1 : 1;
  return x->to < y->to ? -1 : x->to > y->to;
}

static rfr_status add_merge(merges *m, merge one) {
  if (m->n == m->capacity) {
    merge *larger;
    const size_t capacity = m->capacity ? 2 * m->capacity : 1 << 16;
    RFI_TRY(RFI_ALLOC(m->ctx, capacity * sizeof *larger, &larger));
    if (m->n) memcpy(larger, m->items, m->n * sizeof *larger);
    rfi_free(m->ctx, m->items);
    m->items = larger;
    m->capacity = capacity;
  }
  m->items[m->n++] = one;
  return RFR_OK;
}

/* All ways to make a token of two others. Control, byte and user-defined tokens are never made of text. */
static rfr_status split_token(const json_t *vocab, const char *text, size_t n, double score, int64_t id, merges *out) {
  int32_t characters = 0, left = 0;
  for (size_t i = 0; i < n; i++) characters += ((unsigned char)text[i] & 0xc0) != 0x80;
  for (size_t at = 1; at < n && n <= LONGEST; at++) {
    if (((unsigned char)text[at] & 0xc0) == 0x80) continue;
    left++;
    if (!json_object_getn(vocab, text, at) || !json_object_getn(vocab, text + at, n - at)) continue;
    RFI_TRY(add_merge(out, (merge){score, (int32_t)id, left, characters - left, (int32_t)at}));
  }
  return RFR_OK;
}

static rfr_status make_merges(const rfi_gguf *g, const vocabulary *v, const json_t *vocab, merges *made, json_t *out) {
  const char **texts;
  size_t cursor = 0;
  RFI_TRY(RFI_ALLOC(made->ctx, ((size_t)v->tokens->count + 1) * sizeof *texts, &texts));
  rfr_status s = RFR_OK;
  for (int64_t i = 0; s == RFR_OK && i < v->tokens->count; i++) {
    size_t n = 0;
    int64_t type = NORMAL;
    double score = 0.0;
    s = rfi_gguf_next_string(g, v->tokens, &cursor, &texts[i], &n);
    if (s == RFR_OK) s = type_of(g, v, i, &type);
    if (s == RFR_OK) s = rfi_gguf_real(g, v->scores, i, &score);
    if (s == RFR_OK && score != score) s = BAD("tokenizer.ggml.scores: element %" PRId64 " is NaN", i);
    if (s == RFR_OK && type == NORMAL) s = split_token(vocab, texts[i], n, score, i, made);
  }
  if (s == RFR_OK && made->n) qsort(made->items, made->n, sizeof *made->items, compare_merges);
  for (size_t i = 0; s == RFR_OK && i < made->n; i++) {
    const merge *m = &made->items[i];
    const char *text = texts[m->to], *right = text + m->at;
    size_t n = 0; /* bytes of the right token */
    for (int32_t k = 0; k < m->right_characters; k++) do
        n++;
      while (((unsigned char)right[n] & 0xc0) == 0x80);
    if (json_array_append_new(out, json_pack("[o, o]", text_of(text, (size_t)m->at), text_of(right, n))) != 0)
      s = rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g));
  }
  rfi_free(made->ctx, texts);
  return s;
}

static rfr_status set_sentencepiece(rfr_ctx *ctx, const rfi_gguf *g, const vocabulary *v, json_t *root, json_t *model,
                                    const json_t *vocab) {
  bool prefix = true, extra = false, bytes = false;
  json_t *list = json_array();
  merges made = {.ctx = ctx};
  RFI_TRY(rfi_json_set(model, "merges", list));
  if (!v->scores) return BAD("tokenizer.ggml.scores is missing");
  RFI_TRY(get_flag(g, "tokenizer.ggml.add_space_prefix", &prefix));
  RFI_TRY(get_flag(g, "tokenizer.ggml.remove_extra_whitespaces", &extra));
  if (extra) return UNSUPPORTED("tokenizer.ggml.remove_extra_whitespaces is true, which is not supported");
  for (int64_t i = 0; !bytes && i < v->tokens->count; i++) {
    int64_t type;
    RFI_TRY(type_of(g, v, i, &type));
    bytes = type == BYTE;
  }
  static const char space[] = "\xe2\x96\x81";
  json_t *replace = json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", " ", "content", space);
  json_t *back = json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", space, "content", " ");
  RFI_TRY(rfi_json_set(root, "normalizer",
                       prefix ? json_pack("{s:s, s:[{s:s, s:s}, o]}", "type", "Sequence", "normalizers", "type",
                                          "Prepend", "prepend", space, replace)
                              : replace));
  json_t *decoders = json_pack("[o, {s:s}, {s:s}]", back, "type", "ByteFallback", "type", "Fuse");
  if (prefix && decoders &&
      json_array_append_new(
          decoders, json_pack("{s:s, s:s, s:i, s:i}", "type", "Strip", "content", " ", "start", 1, "stop", 0)) != 0) {
    json_decref(decoders);
    decoders = NULL;
  }
  RFI_TRY(rfi_json_set(root, "decoder", json_pack("{s:s, s:o}", "type", "Sequence", "decoders", decoders)));
  RFI_TRY(rfi_json_set(root, "pre_tokenizer", json_null()));
  RFI_TRY(rfi_json_set(model, "byte_fallback", json_boolean(bytes)));
  RFI_TRY(rfi_json_set(model, "fuse_unk", json_true()));
  RFI_TRY(set_token(g, v, model, "unk_token", v->unknown >= 0 ? v->unknown : 0));
  const rfr_status s = make_merges(g, v, vocab, &made, list);
  rfi_free(ctx, made.items);
  RFI_TRY(s);
  return set_ends(g, v, true, root);
}

/* ---- files ---- */

static rfr_status build_tokenizer(rfr_ctx *ctx, const rfi_gguf *g, const vocabulary *v, json_t *root) {
  const rfi_gguf_value *kind = rfi_gguf_key(g, "tokenizer.ggml.model");
  const char *text = "";
  size_t n = 0;
  json_t *model = json_object(), *vocab = json_object();
  if (kind) RFI_TRY(rfi_gguf_string(g, kind, &text, &n));
  const bool bytes = n == 4 && memcmp(text, "gpt2", 4) == 0, pieces = n == 5 && memcmp(text, "llama", 5) == 0;
  RFI_TRY(rfi_json_set(root, "version", json_string("1.0")));
  RFI_TRY(rfi_json_set(root, "model", model));
  RFI_TRY(rfi_json_set(model, "type", json_string("BPE")));
  RFI_TRY(rfi_json_set(model, "vocab", vocab));
  RFI_TRY(add_tokens(g, v, root, vocab));
  if (bytes) return set_bytes(g, v, root, model);
  if (pieces) return set_sentencepiece(ctx, g, v, root, model, vocab);
  return UNSUPPORTED("tokenizer.ggml.model is \"%.*s\"; gpt2 and llama are supported", n < 60 ? (int)n : 60, text);
}

/* The template as a text, or as a list of named ones. */
static rfr_status set_template(const rfi_gguf *g, json_t *root) {
  static const char key[] = "tokenizer.chat_template";
  json_t *list = json_array(), *first = NULL;
  rfr_status s = list ? RFR_OK : rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g));
  for (int i = 0; s == RFR_OK && i < rfi_gguf_key_count(g); i++) {
    const rfi_gguf_value *v = rfi_gguf_key_at(g, i);
    const char *rest = strncmp(v->key, key, sizeof key - 1) == 0 ? v->key + sizeof key - 1 : "x", *text;
    size_t n;
    if (*rest && *rest != '.') continue;
    if ((s = rfi_gguf_string(g, v, &text, &n)) != RFR_OK) break;
    json_t *template = text_of(text, n);
    if (!template) s = BAD("%.100s is not valid UTF-8, or there is no memory", v->key);
    if (s == RFR_OK && !*rest) first = json_incref(template);
    if (s == RFR_OK && json_array_append_new(list, json_pack("{s:s, s:O}", "name", *rest ? rest + 1 : "default",
                                                             "template", template)) != 0)
      s = rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g));
    json_decref(template);
  }
  const size_t n = json_array_size(list);
  if (s == RFR_OK && n > 0) s = rfi_json_set(root, "chat_template", json_incref(n == 1 && first ? first : list));
  json_decref(first);
  json_decref(list);
  return s;
}

static rfr_status build_config(const rfi_gguf *g, const vocabulary *v, json_t *root) {
  int64_t pad = -1;
  RFI_TRY(get_id(g, "tokenizer.ggml.padding_token_id", v->tokens->count, &pad));
  RFI_TRY(rfi_json_set(root, "tokenizer_class", json_string("PreTrainedTokenizerFast")));
  RFI_TRY(rfi_json_set(root, "clean_up_tokenization_spaces", json_false()));
  RFI_TRY(set_token(g, v, root, "bos_token", v->bos));
  RFI_TRY(set_token(g, v, root, "eos_token", v->eos));
  RFI_TRY(set_token(g, v, root, "unk_token", v->unknown));
  RFI_TRY(set_token(g, v, root, "pad_token", pad));
  return set_template(g, root);
}

/* The ids that end a generated text: the end of the text, of a turn and of a message. */
static rfr_status build_generation(const rfi_gguf *g, const vocabulary *v, json_t *root) {
  static const char *const keys[] = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
  json_t *ends = json_array();
  if (v->bos >= 0) RFI_TRY(rfi_json_set(root, "bos_token_id", json_integer(v->bos)));
  int64_t seen[3];
  int n = 0;
  if (v->eos >= 0) seen[n++] = v->eos;
  for (size_t k = 0; k < 2; k++) {
    int64_t id = -1;
    const rfr_status s = get_id(g, keys[k], v->tokens->count, &id);
    if (s != RFR_OK) json_decref(ends);
    RFI_TRY(s);
    bool known = id < 0;
    for (int i = 0; i < n; i++) known |= seen[i] == id;
    if (!known) seen[n++] = id;
  }
  int wrong = 0;
  for (int i = 0; i < n; i++) wrong |= json_array_append_new(ends, json_integer(seen[i]));
  json_t *value = wrong ? NULL : n == 1 ? json_incref(json_array_get(ends, 0)) : json_incref(ends);
  json_decref(ends);
  return rfi_json_set(root, "eos_token_id", n == 0 && value ? (json_decref(value), json_null()) : value);
}

rfr_status rfi_gguf_text_file(rfr_ctx *ctx, const rfi_gguf *g, const char *name, char **data, size_t *n) {
  rfr_status s;
  vocabulary v = {0};
  rfi_string text = {.ctx = ctx};
  const bool tokenizer = strcmp(name, "tokenizer.json") == 0, config = strcmp(name, "tokenizer_config.json") == 0;
  *data = NULL;
  *n = 0;
  if (!tokenizer && !config && strcmp(name, "generation_config.json") != 0) return RFR_OK;
  RFI_TRY(read_vocabulary(g, &v));
  if (!v.tokens) return RFR_OK;
  json_t *root = json_object();
  s = !root       ? rfi_fail(RFI_E_NO_MEMORY, "reading %s", rfi_gguf_path(g))
      : tokenizer ? build_tokenizer(ctx, g, &v, root)
      : config    ? build_config(g, &v, root)
                  : build_generation(g, &v, root);
  if (s == RFR_OK) s = tokenizer ? rfi_json_print_compact(root, &text) : rfi_json_print(root, &text);
  json_decref(root);
  if (s != RFR_OK) rfi_string_deinit(&text);
  *data = text.data;
  *n = text.n;
  return s;
}
