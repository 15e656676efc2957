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

#define UNSUPPORTED(...) rfi_fail_at(RFI_E_TOKENIZER_UNSUPPORTED, rfi_gguf_path(g), 0, __VA_ARGS__)
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
  const char *names; /* values of tokenizer.ggml.pre; the first one is written */
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

/* Token types in tokenizer.ggml.token_type. */
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

/* Writes "vocab" and "added_tokens". Control tokens are special, user-defined ones are not. */
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

/* Writes the tokens that are added around a text. */
static rfr_status set_ends(const rfi_gguf *g, const vocabulary *v, bool bos, json_t *root) {
  bool eos = false;
  RFI_TRY(get_flag(g, "tokenizer.ggml.add_bos_token", &bos));
  RFI_TRY(get_flag(g, "tokenizer.ggml.add_eos_token", &eos));
  const int64_t ids[2] = {bos ? v->bos : -1, eos ? v->eos : -1};
  json_t *single = json_array(), *pair = json_array(), *special = json_object();
  json_t *post = json_pack("{s:s, s:o, s:o, s:o}", "type", "TemplateProcessing", "single", single, "pair", pair,
                           "special_tokens", special);
  rfr_status s =
      rfi_json_set(root, "post_processor", ids[0] < 0 && ids[1] < 0 && post ? json_null() : json_incref(post));
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
    if (strlen(name) == n && n > 0 && !strchr(name, ' ') && rfi_has_word(pres[i].names, name)) return RFR_OK;
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

enum { LONGEST = 256 }; /* maximum bytes of a token for which merges are generated */

/* A merge of two tokens to the token `to`. */
typedef struct merge {
  double score;
  int32_t to, left_characters, right_characters, at; /* at: length of the left token in bytes */
} merge;
typedef struct merges {
  rfr_ctx *ctx;
  merge *items;
  size_t n, capacity;
} merges;

/* In the order of descending scores, then of generate_merges in transformers. */
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
    const size_t capacity = m->capacity ? 2 * m->capacity : 1 << 10;
    RFI_TRY(RFI_ALLOC(m->ctx, capacity * sizeof *larger, &larger));
    if (m->n) memcpy(larger, m->items, m->n * sizeof *larger);
    rfi_free(m->ctx, m->items);
    m->items = larger;
    m->capacity = capacity;
  }
  m->items[m->n++] = one;
  return RFR_OK;
}

/* Lists all pairs of tokens that merge to this token. Control, byte and user-defined tokens never result from merging
 * text. */
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
    size_t n = 0; /* length of the right token in bytes */
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
  RFI_TRY(rfi_json_set(root, "normalizer",
                       prefix ? json_pack("{s:s, s:[{s:s, s:s}, o]}", "type", "Sequence", "normalizers", "type",
                                          "Prepend", "prepend", space, replace)
                              : replace));
  json_t *back = json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", space, "content", " ");
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
  if (kind) RFI_TRY(rfi_gguf_string(g, kind, &text, &n));
  const bool bytes = n == 4 && memcmp(text, "gpt2", 4) == 0, pieces = n == 5 && memcmp(text, "llama", 5) == 0;
  /* Each object becomes part of `root` before the next call that can fail. */
  RFI_TRY(rfi_json_set(root, "version", json_string("1.0")));
  json_t *model = json_object();
  RFI_TRY(rfi_json_set(root, "model", model));
  RFI_TRY(rfi_json_set(model, "type", json_string("BPE")));
  json_t *vocab = json_object();
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
      s = BAD("%.100s: its name is not valid UTF-8, or there is no memory", v->key);
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

/* The ids that end a generated text: the end of text, of a turn and of a message. */
static rfr_status build_generation(const rfi_gguf *g, const vocabulary *v, json_t *root) {
  static const char *const keys[] = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
  if (v->bos >= 0) RFI_TRY(rfi_json_set(root, "bos_token_id", json_integer(v->bos)));
  int64_t seen[3];
  int n = 0;
  if (v->eos >= 0) seen[n++] = v->eos;
  for (size_t k = 0; k < 2; k++) {
    int64_t id = -1;
    RFI_TRY(get_id(g, keys[k], v->tokens->count, &id));
    bool known = id < 0;
    for (int i = 0; i < n; i++) known |= seen[i] == id;
    if (!known) seen[n++] = id;
  }
  json_t *ends = json_array();
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

/* ---- writing ---- */

typedef struct token_pair {
  const char *left, *right;
  size_t n_left, n_right;
} token_pair;

typedef struct token {
  const char *text; /* NULL: the id is not in use */
  size_t n;
  int type;
  double score;
} token;

typedef struct writer {
  const rfi_gguf_text_files *from;
  const json_t *model;
  token *tokens;
  int64_t n;
} writer;

#define NOT_WRITABLE(o, ...) rfi_fail_at(RFI_E_TOKENIZER_UNSUPPORTED, (o)->from->file, 0, __VA_ARGS__)
#define BAD_JSON(o, ...) rfi_fail_at(RFI_E_JSON, (o)->from->file, 0, __VA_ARGS__)

static const char *type_name(const json_t *o) {
  const char *type = json_string_value(json_object_get(o, "type"));
  return type ? type : "";
}

static bool is_type(const json_t *o, const char *name) { return strcmp(type_name(o), name) == 0; }

/* The first component with a type, also inside a sequence; NULL: there is none. */
static const json_t *find_component(const json_t *o, const char *members, const char *type) {
  if (is_type(o, type)) return o;
  const json_t *list = json_object_get(o, members);
  for (size_t i = 0; i < json_array_size(list); i++)
    if (is_type(json_array_get(list, i), type)) return json_array_get(list, i);
  return NULL;
}

/* The fields of a pre-tokenizer that affect tokens, as text. */
static rfr_status canonical(const json_t *o, rfi_string *out) {
  const json_t *list = json_object_get(o, "pretokenizers");
  if (is_type(o, "Sequence")) {
    for (size_t i = 0; i < json_array_size(list); i++) RFI_TRY(canonical(json_array_get(list, i), out));
    return RFR_OK;
  }
  const json_t *pattern = json_object_get(o, "pattern");
  const char *regex = json_string_value(json_object_get(pattern, "Regex"));
  const char *behavior = json_string_value(json_object_get(o, "behavior"));
  return rfi_string_printf(out, "%s %s %s %d%d%d%d;", type_name(o), regex ? regex : "", behavior ? behavior : "",
                           json_is_true(json_object_get(o, "invert")),
                           json_is_true(json_object_get(o, "add_prefix_space")),
                           is_type(o, "ByteLevel") && !json_is_false(json_object_get(o, "use_regex")),
                           json_is_true(json_object_get(o, "individual_digits")));
}

/* The name of the pre-tokenizer in GGUF. */
static rfr_status name_pre(rfr_ctx *ctx, const writer *o, const char **name, size_t *n) {
  const json_t *pre = json_object_get(o->from->tokenizer, "pre_tokenizer");
  const json_t *normalizer = json_object_get(o->from->tokenizer, "normalizer");
  const bool nfc = find_component(normalizer, "normalizers", "NFC") != NULL;
  const bool ignore_merges = json_is_true(json_object_get(o->model, "ignore_merges"));
  rfi_string have = {.ctx = ctx};
  rfr_status s = canonical(pre, &have);
  *n = 0;
  for (size_t i = 0; s == RFR_OK && *n == 0 && i < sizeof pres / sizeof pres[0]; i++) {
    rfi_string known = {.ctx = ctx};
    json_t *row;
    s = rfi_json_parse("tokenizer.ggml.pre", pres[i].json, strlen(pres[i].json), &row);
    if (s == RFR_OK) s = canonical(row, &known);
    if (s == RFR_OK && have.data && strcmp(have.data, known.data) == 0 && pres[i].nfc == nfc &&
        pres[i].ignore_merges == ignore_merges) {
      *name = pres[i].names;
      *n = strcspn(*name, " ");
    }
    json_decref(row);
    rfi_string_deinit(&known);
  }
  rfi_string_deinit(&have);
  if (s == RFR_OK && *n == 0)
    s = NOT_WRITABLE(o, "GGUF has no name for this pre_tokenizer with this normalizer and ignore_merges %d",
                     ignore_merges);
  return s;
}

static rfr_status set_text(writer *o, int64_t id, const json_t *text, int type) {
  if (id < 0 || id >= o->n)
    return NOT_WRITABLE(o, "token %" PRId64 " is outside of the model's vocabulary of %" PRId64, id, o->n);
  o->tokens[id] = (token){json_string_value(text), json_string_length(text), type, 0.0};
  return RFR_OK;
}

static bool is_byte_token(const char *text, size_t n) {
  return n == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>';
}

static rfr_status collect_tokens(writer *o, bool bytes) {
  const json_t *vocab = json_object_get(o->model, "vocab"),
               *added = json_object_get(o->from->tokenizer, "added_tokens");
  const json_t *unknown = json_object_get(o->model, "unk_token");
  for (void *at = json_object_iter((json_t *)vocab); at; at = json_object_iter_next((json_t *)vocab, at)) {
    const char *text = json_object_iter_key(at);
    const size_t n = json_object_iter_key_len(at);
    const json_t *id = json_object_iter_value(at);
    if (!json_is_integer(id)) return BAD_JSON(o, "model.vocab: the id of \"%.100s\" is not an integer", text);
    RFI_TRY(set_text(o, (int64_t)json_integer_value(id), NULL, NORMAL));
    token *t = &o->tokens[json_integer_value(id)];
    t->text = text;
    t->n = n;
    if (!bytes && is_byte_token(text, n)) t->type = BYTE;
  }
  for (size_t i = 0; i < json_array_size(added); i++) {
    const json_t *one = json_array_get(added, i), *id = json_object_get(one, "id");
    const json_t *text = json_object_get(one, "content");
    if (!json_is_integer(id) || !json_is_string(text)) return BAD_JSON(o, "added_tokens[%zu] has no id or content", i);
    const int type = json_is_true(json_object_get(one, "special")) ? CONTROL : USER_DEFINED;
    RFI_TRY(set_text(o, (int64_t)json_integer_value(id), text, type));
    if (!bytes && json_is_string(unknown) && strcmp(json_string_value(unknown), json_string_value(text)) == 0)
      o->tokens[json_integer_value(id)].type = UNKNOWN;
  }
  return RFR_OK;
}

/* A merge is a list of two tokens, in older files one text with a space. */
static bool split_merge(const json_t *merge, token_pair *out) {
  if (json_is_array(merge) && json_array_size(merge) == 2) {
    const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
    *out = (token_pair){json_string_value(left), json_string_value(right), json_string_length(left),
                        json_string_length(right)};
    return json_is_string(left) && json_is_string(right);
  }
  const char *text = json_string_value(merge), *space = text && *text ? strchr(text + 1, ' ') : NULL;
  if (!space) return false;
  *out = (token_pair){text, space + 1, (size_t)(space - text), json_string_length(merge) - (size_t)(space - text) - 1};
  return true;
}

static rfr_status put_merges(rfr_ctx *ctx, rfi_gguf_writer *w, const writer *o, const json_t *merges) {
  rfi_string text = {.ctx = ctx};
  rfr_status s = RFR_OK;
  rfi_gguf_put_list(w, "tokenizer.ggml.merges", RFI_GGUF_STRING, (int64_t)json_array_size(merges));
  for (size_t i = 0; s == RFR_OK && i < json_array_size(merges); i++) {
    token_pair m;
    if (!split_merge(json_array_get(merges, i), &m)) s = BAD_JSON(o, "model.merges[%zu] is not two tokens", i);
    text.n = 0;
    if (s == RFR_OK) s = rfi_string_append(&text, m.left, m.n_left);
    if (s == RFR_OK) s = rfi_string_append(&text, " ", 1);
    if (s == RFR_OK) s = rfi_string_append(&text, m.right, m.n_right);
    if (s == RFR_OK) rfi_gguf_put_item(w, text.data, text.n);
  }
  rfi_string_deinit(&text);
  return s;
}

/* Sentencepiece has scores instead of merges: earlier tokens have higher scores. Tokens that no merge makes come
 * last. */
static rfr_status set_scores(rfr_ctx *ctx, writer *o, const json_t *merges) {
  const json_t *vocab = json_object_get(o->model, "vocab");
  const double last = (double)json_array_size(merges);
  rfi_string text = {.ctx = ctx};
  rfr_status s = RFR_OK;
  for (int64_t i = 0; i < o->n; i++) o->tokens[i].score = o->tokens[i].type == NORMAL ? -last - 1.0 - (double)i : 0.0;
  for (size_t i = 0; s == RFR_OK && i < json_array_size(merges); i++) {
    token_pair m;
    if (!split_merge(json_array_get(merges, i), &m)) s = BAD_JSON(o, "model.merges[%zu] is not two tokens", i);
    text.n = 0;
    if (s == RFR_OK) s = rfi_string_append(&text, m.left, m.n_left);
    if (s == RFR_OK) s = rfi_string_append(&text, m.right, m.n_right);
    if (s != RFR_OK) break;
    const json_t *id = json_object_getn(vocab, text.data, text.n);
    if (!json_is_integer(id)) s = BAD_JSON(o, "model.merges[%zu] makes no token of the vocabulary", i);
    else if (o->tokens[json_integer_value(id)].score < -last) o->tokens[json_integer_value(id)].score = -(double)i;
  }
  rfi_string_deinit(&text);
  return s;
}

static void put_tokens(rfi_gguf_writer *w, const writer *o, bool scores) {
  rfi_gguf_put_list(w, "tokenizer.ggml.tokens", RFI_GGUF_STRING, o->n);
  for (int64_t i = 0; i < o->n; i++) {
    char unused[40];
    const int n = rfi_snprintf(unused, sizeof unused, "[PAD%" PRId64 "]", i);
    const token *t = &o->tokens[i];
    rfi_gguf_put_item(w, t->text ? t->text : unused, t->text ? t->n : (size_t)n);
  }
  rfi_gguf_put_list(w, "tokenizer.ggml.token_type", RFI_GGUF_I32, o->n);
  for (int64_t i = 0; i < o->n; i++) rfi_gguf_put_number(w, o->tokens[i].text ? o->tokens[i].type : UNUSED);
  if (!scores) return;
  rfi_gguf_put_list(w, "tokenizer.ggml.scores", RFI_GGUF_F32, o->n);
  for (int64_t i = 0; i < o->n; i++) rfi_gguf_put_number(w, o->tokens[i].score);
}

/* The id of a token that a field names: a text, or an object with "content"; -1: none. */
static int64_t id_of(const writer *o, const json_t *field) {
  const json_t *text = json_is_object(field) ? json_object_get(field, "content") : field;
  if (!json_is_string(text)) return -1;
  for (int64_t i = 0; i < o->n; i++)
    if (o->tokens[i].text && o->tokens[i].n == json_string_length(text) &&
        memcmp(o->tokens[i].text, json_string_value(text), o->tokens[i].n) == 0)
      return i;
  return -1;
}

static int64_t id_or(const writer *o, const char *token_key, const char *id_key) {
  const int64_t id = id_of(o, json_object_get(o->from->config, token_key));
  const json_t *given = json_object_get(o->from->generation, id_key);
  if (json_is_array(given)) given = json_array_get(given, 0);
  return id >= 0 || !json_is_integer(given) ? id : (int64_t)json_integer_value(given);
}

static void put_ids(rfi_gguf_writer *w, const writer *o) {
  const int64_t bos = id_or(o, "bos_token", "bos_token_id"), eos = id_or(o, "eos_token", "eos_token_id");
  int64_t unknown = id_of(o, json_object_get(o->from->config, "unk_token"));
  if (unknown < 0) unknown = id_of(o, json_object_get(o->model, "unk_token"));
  const int64_t pad = id_of(o, json_object_get(o->from->config, "pad_token"));
  if (bos >= 0) rfi_gguf_put_u32(w, "tokenizer.ggml.bos_token_id", bos);
  if (eos >= 0) rfi_gguf_put_u32(w, "tokenizer.ggml.eos_token_id", eos);
  if (unknown >= 0) rfi_gguf_put_u32(w, "tokenizer.ggml.unknown_token_id", unknown);
  if (pad >= 0) rfi_gguf_put_u32(w, "tokenizer.ggml.padding_token_id", pad);
  /* Another id that ends a text is taken as the end of a turn. */
  const json_t *ends = json_object_get(o->from->generation, "eos_token_id");
  for (size_t i = 0; i < json_array_size(ends); i++) {
    const json_t *id = json_array_get(ends, i);
    if (!json_is_integer(id) || json_integer_value(id) == eos) continue;
    rfi_gguf_put_u32(w, "tokenizer.ggml.eot_token_id", (int64_t)json_integer_value(id));
    break;
  }
  const json_t *post =
      find_component(json_object_get(o->from->tokenizer, "post_processor"), "processors", "TemplateProcessing");
  const json_t *single = json_object_get(post, "single");
  const size_t n = json_array_size(single);
  rfi_gguf_put_bool(w, "tokenizer.ggml.add_bos_token",
                    n > 0 && json_object_get(json_array_get(single, 0), "SpecialToken") != NULL);
  rfi_gguf_put_bool(w, "tokenizer.ggml.add_eos_token",
                    n > 0 && json_object_get(json_array_get(single, n - 1), "SpecialToken") != NULL);
}

static void put_template(rfi_gguf_writer *w, const rfi_gguf_text_files *from) {
  static const char key[] = "tokenizer.chat_template";
  const json_t *given = json_object_get(from->config, "chat_template");
  if (from->chat_template) rfi_gguf_put_text(w, key, from->chat_template, from->n_template);
  else if (json_is_string(given)) rfi_gguf_put_text(w, key, json_string_value(given), json_string_length(given));
  for (size_t i = 0; i < json_array_size(given); i++) {
    const json_t *one = json_array_get(given, i), *text = json_object_get(one, "template");
    const char *name = json_string_value(json_object_get(one, "name"));
    char named[128];
    if (!name || !json_is_string(text)) continue;
    const bool is_default = strcmp(name, "default") == 0;
    if (is_default && from->chat_template) continue;
    rfi_snprintf(named, sizeof named, is_default ? "%s" : "%s.%.80s", key, name);
    rfi_gguf_put_text(w, named, json_string_value(text), json_string_length(text));
  }
}

static rfr_status put_sentencepiece(rfr_ctx *ctx, rfi_gguf_writer *w, writer *o, const json_t *merges) {
  const json_t *tokenizer = o->from->tokenizer;
  const json_t *space = find_component(json_object_get(tokenizer, "pre_tokenizer"), "pretokenizers", "Metaspace");
  const char *scheme = json_string_value(json_object_get(space, "prepend_scheme"));
  const bool prefix = find_component(json_object_get(tokenizer, "normalizer"), "normalizers", "Prepend") != NULL ||
                      (space && (!scheme || strcmp(scheme, "never") != 0));
  RFI_TRY(set_scores(ctx, o, merges));
  rfi_gguf_put_text(w, "tokenizer.ggml.model", "llama", 5);
  rfi_gguf_put_text(w, "tokenizer.ggml.pre", "default", 7);
  rfi_gguf_put_bool(w, "tokenizer.ggml.add_space_prefix", prefix);
  put_tokens(w, o, true);
  return RFR_OK;
}

static rfr_status put_bytes(rfr_ctx *ctx, rfi_gguf_writer *w, const writer *o, const json_t *merges) {
  const char *pre;
  size_t n;
  RFI_TRY(name_pre(ctx, o, &pre, &n));
  rfi_gguf_put_text(w, "tokenizer.ggml.model", "gpt2", 4);
  rfi_gguf_put_text(w, "tokenizer.ggml.pre", pre, n);
  put_tokens(w, o, false);
  return put_merges(ctx, w, o, merges);
}

rfr_status rfi_gguf_put_text_files(rfr_ctx *ctx, rfi_gguf_writer *w, const rfi_gguf_text_files *from,
                                   int64_t vocab_size) {
  writer o = {.from = from, .model = json_object_get(from->tokenizer, "model"), .n = vocab_size};
  const json_t *pre = json_object_get(from->tokenizer, "pre_tokenizer"), *merges = json_object_get(o.model, "merges");
  const bool bytes = find_component(pre, "pretokenizers", "ByteLevel") != NULL;
  if (!is_type(o.model, "BPE") || !json_is_object(json_object_get(o.model, "vocab")) || !json_is_array(merges))
    return NOT_WRITABLE(&o, "a tokenizer of type %.40s cannot be written as GGUF; BPE can", type_name(o.model));
  if (!bytes && !json_is_true(json_object_get(o.model, "byte_fallback")))
    return NOT_WRITABLE(&o, "BPE without ByteLevel and without byte_fallback cannot be written as GGUF");
  RFI_TRY(RFI_ALLOC(ctx, (size_t)vocab_size * sizeof *o.tokens, &o.tokens));
  rfr_status s = collect_tokens(&o, bytes);
  if (s == RFR_OK) s = bytes ? put_bytes(ctx, w, &o, merges) : put_sentencepiece(ctx, w, &o, merges);
  if (s == RFR_OK) put_ids(w, &o);
  if (s == RFR_OK) put_template(w, from);
  rfi_free(ctx, o.tokens);
  return s;
}
