/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokenizers: ids, offsets and decoded text of the small reference tokenizers (tools/make_reference_tokenizers.py),
 * foreign spans, streaming, invalid UTF-8, refused files, and patterns against PCRE2.
 */
#include "text/tokenizer.h"

#include <stdio.h>
#include <string.h>

#include "data/json_file.h"
#include "support/folder.h"
#include "support/random.h"
#include "text/tokenizer_parts.h"

#define FOLDER RFT_SOURCE_DIR "/tests/data/tokenizers/"

static void expect(rfr_status s, const char *what) {
  if (s != RFR_OK) fail_msg("%s: %s [%s]", what, rfr_last_error()->message, rfr_last_error()->slug);
}

/* ---- the reference tokenizers ---- */

typedef struct reference {
  json_t *root;
  rfr_tokenizer *tokenizer;
  rfr_decoder *decoder;
} reference;

static rfr_tokenizer *parse(rfr_ctx *ctx, const json_t *value) {
  rfi_string text = {.ctx = ctx};
  rfr_tokenizer *tokenizer;
  expect(rfi_json_print_compact(value, &text), "print");
  expect(rfi_tokenizer_parse(ctx, "tokenizer.json", text.data, text.n, &tokenizer), "parse");
  rfi_string_deinit(&text);
  return tokenizer;
}

static reference load(rfr_ctx *ctx, const char *name) {
  char path[512];
  reference r;
  snprintf(path, sizeof path, FOLDER "%s", name);
  expect(rfi_json_load(ctx, path, &r.root), path);
  r.tokenizer = parse(ctx, json_object_get(r.root, "tokenizer"));
  expect(rfr_decoder_create(r.tokenizer, 0, &r.decoder), path);
  return r;
}

static void unload(reference *r) {
  rfr_decoder_destroy(r->decoder);
  rfr_tokenizer_destroy(r->tokenizer);
  json_decref(r->root);
}

static void collect(const char *text, size_t n, void *user) {
  rfi_string *out = user;
  assert_int_equal(rfi_utf8_valid(text, n), n);
  expect(rfi_string_append(out, text, n), "collect");
}

static void check_ids(const char *name, const char *text, const rfr_tokens *t, const json_t *ids) {
  if ((size_t)t->n != json_array_size(ids))
    fail_msg("%s: \"%s\" has %lld tokens, not %zu", name, text, (long long)t->n, json_array_size(ids));
  for (int64_t i = 0; i < t->n; i++)
    if (t->ids[i] != json_integer_value(json_array_get(ids, (size_t)i)))
      fail_msg("%s: token %lld of \"%s\" is %d, not %lld", name, (long long)i, text, t->ids[i],
               (long long)json_integer_value(json_array_get(ids, (size_t)i)));
}

static void check_case(const char *name, const reference *r, const json_t *c, rfr_tokens *t) {
  const json_t *text = json_object_get(c, "text"), *begins = json_object_get(c, "begins");
  const char *s = json_string_value(text);
  const size_t n = json_string_length(text);
  rfr_encode_options o = rfr_encode_options_default();
  rfi_string decoded = {.ctx = rfi_tokenizer_ctx(r->tokenizer)};
  for (int pass = 0; pass < 2; pass++) { /* the second time from the cache */
    expect(rfr_tokenizer_encode(r->tokenizer, s, n, NULL, t), name);
    check_ids(name, s, t, json_object_get(c, "ids"));
    for (int64_t i = 0; i < t->n; i++)
      if (t->begins[i] != json_integer_value(json_array_get(begins, (size_t)i)))
        fail_msg("%s: token %lld of \"%s\" begins at %u, not %lld", name, (long long)i, s, t->begins[i],
                 (long long)json_integer_value(json_array_get(begins, (size_t)i)));
  }
  o.add_special = 1;
  expect(rfr_tokenizer_encode(r->tokenizer, s, n, &o, t), name);
  const json_t *special = json_object_get(c, "special");
  check_ids(name, s, t, special ? special : json_object_get(c, "ids"));
  for (int64_t i = 0; i < t->n; i++) expect(rfr_decoder_add(r->decoder, t->ids[i], collect, &decoded), name);
  expect(rfr_decoder_end(r->decoder, collect, &decoded), name);
  const json_t *wanted = json_object_get(c, "decoded");
  if (!wanted) wanted = text;
  if (decoded.n != json_string_length(wanted) ||
      memcmp(decoded.data ? decoded.data : "", json_string_value(wanted), decoded.n) != 0)
    fail_msg("%s: \"%s\" decodes to \"%s\", not \"%s\"", name, s, decoded.data, json_string_value(wanted));
  rfi_string_deinit(&decoded);
}

static void test_references(void **state) {
  rft_folder *f = *state;
  rfi_paths names = {.ctx = f->ctx};
  rfr_tokens tokens = {0};
  expect(rfi_dir_list(FOLDER, &names), FOLDER);
  assert_true(names.n >= 20);
  for (int i = 0; i < names.n; i++) {
    reference r = load(f->ctx, names.items[i]);
    const json_t *cases = json_object_get(r.root, "cases");
    assert_true(json_array_size(cases) >= 15);
    for (size_t k = 0; k < json_array_size(cases); k++)
      check_case(names.items[i], &r, json_array_get(cases, k), &tokens);
    rfr_tokens_deinit(&tokens);
    unload(&r);
  }
  rfi_paths_deinit(&names);
}

/* ---- long texts ---- */

/* Concatenates all texts of a reference many times. */
static char *long_text(const reference *r, size_t *n) {
  const json_t *cases = json_object_get(r->root, "cases");
  size_t capacity = 0;
  *n = 0;
  for (size_t k = 0; k < json_array_size(cases); k++)
    capacity += json_string_length(json_object_get(json_array_get(cases, k), "text"));
  char *text = malloc(64 * capacity);
  assert_non_null(text);
  for (int i = 0; i < 64; i++)
    for (size_t k = 0; k < json_array_size(cases); k++) {
      const json_t *x = json_object_get(json_array_get(cases, (k + (size_t)i) % json_array_size(cases)), "text");
      memcpy(text + *n, json_string_value(x), json_string_length(x));
      *n += json_string_length(x);
    }
  return text;
}

static void test_threads(void **state) {
  static const char *const names[] = {"gpt2.json", "gemma.json", "unigram.json"};
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_ctx *ctx;
  (void)state;
  o.threads = 3;
  expect(rfr_ctx_create(&o, &ctx), "context");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    reference r = load(ctx, names[i]);
    rfr_tokens one = {0}, all = {0};
    rfr_encode_options e = rfr_encode_options_default();
    size_t n;
    char *text = long_text(&r, &n);
    expect(rfr_tokenizer_encode(r.tokenizer, text, n, &e, &one), names[i]);
    e.parallel = 1;
    expect(rfr_tokenizer_encode(r.tokenizer, text, n, &e, &all), names[i]);
    assert_true(one.n > 20000);
    assert_int_equal(one.n, all.n);
    assert_memory_equal(one.ids, all.ids, (size_t)one.n * sizeof *one.ids);
    assert_memory_equal(one.begins, all.begins, (size_t)one.n * sizeof *one.begins);
    free(text);
    rfr_tokens_deinit(&one);
    rfr_tokens_deinit(&all);
    unload(&r);
  }
  assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, 0);
  rfr_ctx_destroy(ctx);
}

/* 200 kB of one character are one piece of most patterns. */
static void test_long_piece(void **state) {
  rft_folder *f = *state;
  enum { N = 200000 };
  char *text = malloc(N);
  assert_non_null(text);
  for (int k = 0; k < 2; k++) {
    reference r = load(f->ctx, k ? "llama2.json" : "gpt2.json");
    rfr_tokens tokens = {0};
    memset(text, 'a', N);
    expect(rfr_tokenizer_encode(r.tokenizer, text, N, NULL, &tokens), "a");
    assert_true(tokens.n > N / 64);
    memset(text, ' ', N);
    expect(rfr_tokenizer_encode(r.tokenizer, text, N, NULL, &tokens), "blanks");
    assert_true(tokens.n > 0);
    rfr_tokens_deinit(&tokens);
    unload(&r);
  }
  free(text);
}

static void check_small(rfr_ctx *ctx, const char *json, const char *text, const int32_t *ids, int n) {
  rfr_tokenizer *k;
  rfr_tokens tokens = {0};
  expect(rfi_tokenizer_parse(ctx, "t.json", json, strlen(json), &k), "parse");
  expect(rfr_tokenizer_encode(k, text, strlen(text), NULL, &tokens), text);
  if (tokens.n != n) fail_msg("\"%s\" has %lld tokens, not %d", text, (long long)tokens.n, n);
  for (int i = 0; i < n; i++)
    if (tokens.ids[i] != ids[i]) fail_msg("token %d of \"%s\" is %d, not %d", i, text, tokens.ids[i], ids[i]);
  rfr_tokens_deinit(&tokens);
  rfr_tokenizer_destroy(k);
}

/* Of equal pairs the leftmost is merged, in short and in long pieces. */
static void test_leftmost(void **state) {
  static const char json[] = "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"aa\":1},\"merges\":[\"a a\"]}}";
  rft_folder *f = *state;
  char text[102] = "aaa";
  int32_t ids[51];
  for (int i = 0; i < 51; i++) ids[i] = 1;
  ids[1] = 0;
  check_small(f->ctx, json, text, ids, 2);
  memset(text, 'a', 101);
  ids[1] = 1;
  ids[50] = 0;
  check_small(f->ctx, json, text, ids, 51);
}

/* Two paths have equal sums with the scores as tokenizers reads them: the first one is kept. */
static void test_score(void **state) {
  static const char json[] = "{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"u\",-20.0],"
                             "[\"a\",-10.626903632435095],[\"b\",0.0],[\"ab\",-10.626903632435097]]}}";
  rft_folder *f = *state;
  check_small(f->ctx, json, "ab", (const int32_t[]){3}, 1);
}

/* A mark does not compose across a mark of its own class. */
static void test_blocked(void **state) {
  static const char json[] =
      "{\"normalizer\":{\"type\":\"NFC\"},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"\\u0310\":1,"
      "\"\\u0301\":2,\"\\u00e1\":3,\"\\u1ea1\":4},\"merges\":[]}}";
  rft_folder *f = *state;
  check_small(f->ctx, json, "a\xCC\x81", (const int32_t[]){3}, 1);
  check_small(f->ctx, json, "a\xCC\x90\xCC\x81", (const int32_t[]){0, 1, 2}, 3);
  check_small(f->ctx, json, "a\xCC\x81\xCC\xA3", (const int32_t[]){4, 2}, 2); /* sorted before they compose */
}

/* ---- foreign spans ---- */

static int count_id(const rfr_tokens *t, int32_t id) {
  int n = 0;
  for (int64_t i = 0; i < t->n; i++) n += t->ids[i] == id;
  return n;
}

/* In "<|end|>x<|end|>" each span that overlaps a special token suppresses it, even by one byte; the other token
 * stays. */
static void test_foreign(void **state) {
  rft_folder *f = *state;
  reference r = load(f->ctx, "gpt2.json");
  static const char text[] = "<|end|>x<|end|>";
  const size_t n = sizeof text - 1;
  rfr_tokens tokens = {0};
  rfr_encode_options o = rfr_encode_options_default();
  const int32_t end = rfr_tokenizer_id(r.tokenizer, "<|end|>", 7);
  assert_true(end >= 0 && rfr_tokenizer_is_special(r.tokenizer, end));
  expect(rfr_tokenizer_encode(r.tokenizer, text, n, &o, &tokens), "no span");
  assert_int_equal(count_id(&tokens, end), 2);
  for (size_t begin = 0; begin < n; begin++)
    for (size_t stop = begin; stop <= n; stop++) {
      const rfr_span span = {begin, stop};
      o.foreign = &span;
      o.n_foreign = 1;
      expect(rfr_tokenizer_encode(r.tokenizer, text, n, &o, &tokens), "a span");
      const bool first = begin < 7 && stop > begin, second = stop > 8 && stop > begin;
      assert_int_equal(count_id(&tokens, end), !first + !second);
    }
  static const rfr_span two[] = {{0, 3}, {9, 10}}, bad[] = {{3, 5}, {4, 6}};
  o.foreign = two;
  o.n_foreign = 2;
  expect(rfr_tokenizer_encode(r.tokenizer, text, n, &o, &tokens), "two spans");
  assert_int_equal(count_id(&tokens, end), 0);
  o.foreign = bad;
  assert_int_equal(rfr_tokenizer_encode(r.tokenizer, text, n, &o, &tokens), RFR_INVALID);
  /* The text around a suppressed token is one string: its tokens are those of the text without special tokens. */
  static const rfr_span all = {0, sizeof text - 1};
  o.foreign = &all;
  o.n_foreign = 1;
  expect(rfr_tokenizer_encode(r.tokenizer, text, n, &o, &tokens), "all");
  assert_true(tokens.n > 6 && tokens.begins[0] == 0);
  rfr_tokens_deinit(&tokens);
  unload(&r);
}

/* The text of a special token is also in the model's vocabulary: the model must not make the token from foreign
 * text. */
static void test_foreign_vocabulary(void **state) {
  rft_folder *f = *state;
  static const char *const models[] = {
      "{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"u\",-9.0],[\"<s>\",0.0],[\"<\",-9.0],[\"s\",-9.0],[\">\",-9.0]]"
      "}",
      "{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"u\",-9.0],[\"<s>\",0.0]]}",
      "{\"type\":\"WordPiece\",\"unk_token\":\"u\",\"continuing_subword_prefix\":\"##\",\"max_input_chars_per_word\":9,"
      "\"vocab\":{\"u\":0,\"<s>\":1,\"<\":2,\"##s\":3,\"##>\":4}}",
      "{\"type\":\"BPE\",\"ignore_merges\":true,\"vocab\":{\"u\":0,\"<s>\":1,\"<\":2,\"s\":3,\">\":4},\"merges\":[]}",
      "{\"type\":\"BPE\",\"vocab\":{\"u\":0,\"<s>\":1,\"<\":2,\"s\":3,\">\":4,\"<s\":5},\"merges\":[\"< s\",\"<s "
      ">\"]}"};
  static const int counts[] = {3, 1, 3, 3, 2};
  for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
    char json[400];
    rfr_tokenizer *k;
    rfr_tokens tokens = {0};
    const rfr_span all = {0, 3};
    rfr_encode_options o = rfr_encode_options_default();
    snprintf(json, sizeof json, "{\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true}],\"model\":%s}",
             models[i]);
    expect(rfi_tokenizer_parse(f->ctx, "t.json", json, strlen(json), &k), models[i]);
    expect(rfr_tokenizer_encode(k, "<s>", 3, &o, &tokens), models[i]);
    assert_int_equal(count_id(&tokens, 1), 1);
    o.foreign = &all;
    o.n_foreign = 1;
    expect(rfr_tokenizer_encode(k, "<s>", 3, &o, &tokens), models[i]);
    if (tokens.n != counts[i] || count_id(&tokens, 1) != 0)
      fail_msg("%s makes %d tokens from the text of a special token", models[i], (int)tokens.n);
    rfr_tokens_deinit(&tokens);
    rfr_tokenizer_destroy(k);
  }
}

/* If a longer special token overlaps a span, a shorter one outside the span is matched instead. */
static void test_foreign_prefix(void **state) {
  rft_folder *f = *state;
  static const char json[] = "{\"added_tokens\":[{\"id\":2,\"content\":\"<s>\",\"special\":true},{\"id\":3,\"content\":"
                             "\"<s>a\",\"special\":true}],"
                             "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}";
  rfr_tokenizer *k;
  rfr_tokens tokens = {0};
  rfr_encode_options o = rfr_encode_options_default();
  const rfr_span span = {3, 5};
  expect(rfi_tokenizer_parse(f->ctx, "t.json", json, sizeof json - 1, &k), "parse");
  expect(rfr_tokenizer_encode(k, "<s>ab", 5, &o, &tokens), "plain");
  assert_int_equal(tokens.n, 2);
  assert_int_equal(tokens.ids[0], 3);
  o.foreign = &span;
  o.n_foreign = 1;
  expect(rfr_tokenizer_encode(k, "<s>ab", 5, &o, &tokens), "span");
  assert_int_equal(tokens.n, 3);
  assert_int_equal(tokens.ids[0], 2);
  rfr_tokens_deinit(&tokens);
  rfr_tokenizer_destroy(k);
}

/* ---- bytes that are not UTF-8 ---- */

static void test_invalid(void **state) {
  static const struct {
    const char *text, *repaired;
    size_t n;
    uint32_t after; /* where "z" begins in the text */
  } rows[] = {{"a\xFFz", "a\xEF\xBF\xBDz", 3, 2},
              {"\xE4\xB8z", "\xEF\xBF\xBDz", 3, 2},
              {"\xED\xA0\x80z", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz", 4, 3},
              {"\xF0\x9F\x98z", "\xEF\xBF\xBDz", 4, 3},
              {"\xC0\x80z", "\xEF\xBF\xBD\xEF\xBF\xBDz", 3, 2},
              {"\xF4\x90\x80\x80z", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz", 5, 4}};
  rft_folder *f = *state;
  reference r = load(f->ctx, "gpt2.json");
  rfr_tokens a = {0}, b = {0};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    expect(rfr_tokenizer_encode(r.tokenizer, rows[i].text, rows[i].n, NULL, &a), "text");
    expect(rfr_tokenizer_encode(r.tokenizer, rows[i].repaired, strlen(rows[i].repaired), NULL, &b), "repaired");
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.ids, b.ids, (size_t)a.n * sizeof *a.ids);
    assert_int_equal(a.begins[a.n - 1], rows[i].after);
  }
  rfr_tokens_deinit(&a);
  rfr_tokens_deinit(&b);
  unload(&r);
}

/* ---- streaming ---- */

/* The ids of bytes F0 9F 98 80, one at a time: nothing is written before the last one. */
static void test_stream(void **state) {
  rft_folder *f = *state;
  reference r = load(f->ctx, "gpt2.json");
  rfi_string out = {.ctx = f->ctx};
  static const unsigned char bytes[] = {0xF0, 0x9F, 0x98, 0x80};
  int32_t ids[4];
  for (int i = 0; i < 4; i++) {
    char c[4];
    ids[i] = rfr_tokenizer_id(r.tokenizer, c, rfi_utf8_put(rfi_byte_char(bytes[i]), c));
    assert_true(ids[i] >= 0);
  }
  for (int i = 0; i < 4; i++) {
    expect(rfr_decoder_add(r.decoder, ids[i], collect, &out), "add");
    assert_int_equal(out.n, i < 3 ? 0 : 4);
  }
  out.n = 0;
  for (int i = 0; i < 2; i++) expect(rfr_decoder_add(r.decoder, ids[i], collect, &out), "add");
  assert_int_equal(out.n, 0);
  expect(rfr_decoder_end(r.decoder, collect, &out), "end");
  assert_string_equal(out.data, "\xEF\xBF\xBD");
  out.n = 0;
  expect(rfr_decoder_add(r.decoder, ids[0], collect, &out), "add");
  expect(rfr_decoder_add(r.decoder, ids[0], collect, &out), "add");
  assert_int_equal(out.n, 3); /* the first cannot be continued */
  expect(rfr_decoder_add(r.decoder, 1 << 20, collect, &out), "an id that is not in use");
  expect(rfr_decoder_end(r.decoder, collect, &out), "end");
  assert_int_equal(out.n, 6);
  rfi_string_deinit(&out);
  unload(&r);
}

/* ---- files ---- */

static void test_folder(void **state) {
  static const char tokenizer[] =
      "{\"added_tokens\":[{\"id\":0,\"content\":\"<s>\",\"special\":true}],"
      "\"model\":{\"type\":\"BPE\",\"vocab\":{\"<s>\":0,\"</s>\":1,\"a\":2},\"merges\":[]}}";
  static const char config[] = "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"</s>\","
                               "\"model_max_length\":1000000000000000019884624838656}";
  static const char generation[] = "{\"eos_token_id\":[2, 0]}";
  rft_folder *f = *state;
  rfr_tokenizer *k;
  rft_write(f, "tokenizer.json", tokenizer, sizeof tokenizer - 1);
  expect(rfr_tokenizer_open(f->ctx, f->path, &k), "without other files");
  assert_int_equal(rfr_tokenizer_bos(k), -1);
  assert_int_equal(rfr_tokenizer_stop(k, 0), -1);
  const rfi_hash hash = rfi_tokenizer_hash(k);
  rfr_tokenizer_destroy(k);
  rft_write(f, "tokenizer_config.json", config, sizeof config - 1);
  rft_write(f, "generation_config.json", generation, sizeof generation - 1);
  expect(rfr_tokenizer_open(f->ctx, f->path, &k), "a folder");
  assert_int_equal(rfr_tokenizer_bos(k), 0);
  assert_int_equal(rfr_tokenizer_eos(k), 1);
  assert_int_equal(rfr_tokenizer_vocab_size(k), 3);
  static const int32_t stop[] = {2, 0, 1, -1};
  for (int i = 0; i < 4; i++) assert_int_equal(rfr_tokenizer_stop(k, i), stop[i]);
  assert_true(rfi_hash_equal(rfi_tokenizer_hash(k), hash));
  rfr_tokenizer_destroy(k);
  assert_int_equal(rfr_tokenizer_open(f->ctx, rft_path(f, "none"), &k), RFR_IO);
  assert_null(k);
}

#define MODEL "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"
static void test_refused(void **state) {
  static const struct {
    const char *text, *slug, *part; /* part of the message */
  } rows[] = {
      {"{}", "tokenizer", "model is missing"},
      {"[", "json", ""},
      {"{\"model\":{\"type\":\"WordLevel\",\"vocab\":{}}}", "tokenizer.unsupported", "model.type is \"WordLevel\""},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}", "tokenizer",
       "model.merges[0]: \"b\""},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[[\"a\",\"b\"]]}}", "tokenizer",
       "the merged token \"ab\""},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"\"]}}", "tokenizer", "model.merges[0]"},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", "tokenizer", "has the id -1"},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":16777216},\"merges\":[]}}", "tokenizer", "16777216"},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "tokenizer", "have the id 0"},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1}}", "tokenizer.unsupported",
       "model.dropout"},
      {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"u\"}}", "tokenizer",
       "model.unk_token \"u\""},
      {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",\"x\"]]}}", "tokenizer", "model.vocab[0]"},
      {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0.5]],\"unk_id\":1}}", "tokenizer", "model.unk_id"},
      {"{\"added_tokens\":[{\"id\":7,\"content\":\"x\"}]," MODEL "}", "tokenizer",
       "has the id 7, but the vocabulary gives it 3"},
      {"{\"added_tokens\":[{\"id\":3,\"content\":\"\"}]," MODEL "}", "tokenizer", "added token 3 is empty"},
      {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Odd\"}]}," MODEL "}",
       "tokenizer.unsupported", "normalizer.normalizers[1]: the normalizer \"Odd\""},
      {"{\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}," MODEL "}", "tokenizer.unsupported",
       "pre_tokenizer: the pre-tokenizer \"UnicodeScripts\""},
      {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?<x>a)\"},\"behavior\":\"Isolated\"}," MODEL
       "}",
       "tokenizer.unsupported", "pre_tokenizer.pattern, byte 0: this kind of group"},
      {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a(\"},\"behavior\":\"Isolated\"}," MODEL "}",
       "tokenizer", "is not a regular expression"},
      {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{Odd}\"},\"behavior\":\"Isolated\"}," MODEL
       "}",
       "tokenizer.unsupported", "the property \\p{Odd}"},
      {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Odd\"}," MODEL "}",
       "tokenizer.unsupported", "pre_tokenizer.behavior is \"Odd\""},
      {"{\"decoder\":{\"type\":\"CTC\"}," MODEL "}", "tokenizer.unsupported", "decoder: the decoder \"CTC\""},
      {"{\"post_processor\":{\"type\":\"Odd\"}," MODEL "}", "tokenizer.unsupported", "the post-processor \"Odd\""},
      {"{\"post_processor\":{\"type\":\"BertProcessing\",\"sep\":[\"a\",99],\"cls\":[\"a\",0]}," MODEL "}", "tokenizer",
       "no id 99"},
      {"{\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"AAAA\"}," MODEL "}", "tokenizer",
       "is truncated"},
  };
  rft_folder *f = *state;
  rfr_tokenizer *k;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const rfr_status s = rfi_tokenizer_parse(f->ctx, "t.json", rows[i].text, strlen(rows[i].text), &k);
    const rfr_error *e = rfr_last_error();
    if (s == RFR_OK || strcmp(e->slug, rows[i].slug) != 0 || !strstr(e->message, rows[i].part))
      fail_msg("row %zu: status %d, %s: %s", i, s, e->slug, e->message);
    assert_null(k);
  }
}

/* Sequences nested past the limit are refused. */
static void test_nesting(void **state) {
  rft_folder *f = *state;
  rfi_string text = {.ctx = f->ctx};
  rfr_tokenizer *k;
  expect(rfi_string_printf(&text, "{\"normalizer\":"), "text");
  for (int i = 0; i < 100; i++) expect(rfi_string_printf(&text, "{\"type\":\"Sequence\",\"normalizers\":["), "text");
  for (int i = 0; i < 100; i++) expect(rfi_string_printf(&text, "]}"), "text");
  expect(rfi_string_printf(&text, "," MODEL "}"), "text");
  assert_int_equal(rfi_tokenizer_parse(f->ctx, "t.json", text.data, text.n, &k), RFR_UNSUPPORTED);
  rfi_string_deinit(&text);
}

/* ---- our matchers against PCRE2 ---- */

/* Putting the same pattern in a group disables the matcher, so PCRE2 runs it. */
static void test_matchers(void **state) {
  static const char *const names[] = {"gpt2.json", "llama3.json", "qwen2.json"};
  static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
  static const uint32_t points[] = {' ',   ' ',   '\n',   '\r',    '\t',   '\'',    '\'',   's',     'S',    'l',
                                    'L',   'v',   'e',    'r',     'd',    'M',     't',    '0',     '7',    '.',
                                    '-',   0x17F, 0xE9,   0x301,   0x4E2D, 0xA0,    0x3000, 0x2028,  0x180E, 0x85,
                                    0x660, 0xBD,  0x2167, 0x1F600, 0x200D, 0x2EBF0, 0x1C89, 0x10FFFF};
  rft_folder *f = *state;
  uint64_t seed = 1;
  for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
    reference r = load(f->ctx, names[k]);
    rfr_tokens a = {0}, b = {0};
    json_t *other = json_deep_copy(json_object_get(r.root, "tokenizer"));
    json_t *pre = json_object_get(other, "pre_tokenizer"), *list = json_object_get(pre, "pretokenizers");
    if (list) {
      json_t *pattern = json_object_get(json_array_get(list, 0), "pattern");
      char text[512];
      snprintf(text, sizeof text, "(?:%s)", json_string_value(json_object_get(pattern, "Regex")));
      json_object_set_new(pattern, "Regex", json_string(text));
    } else {
      char text[512];
      snprintf(text, sizeof text, "(?:%s)", gpt2);
      json_object_set_new(other, "pre_tokenizer",
                          json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b}]}", "type", "Sequence",
                                    "pretokenizers", "type", "Split", "pattern", "Regex", text, "behavior", "Isolated",
                                    "invert", 0, "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0));
    }
    rfr_tokenizer *pcre = parse(f->ctx, other);
    for (int round = 0; round < 3000; round++) {
      char text[256];
      size_t n = 0;
      for (int i = 0; i < 40; i++)
        n += rfi_utf8_put(points[rft_below(&seed, sizeof points / sizeof *points)], text + n);
      expect(rfr_tokenizer_encode(r.tokenizer, text, n, NULL, &a), "ours");
      expect(rfr_tokenizer_encode(pcre, text, n, NULL, &b), "PCRE2");
      if (a.n != b.n || memcmp(a.ids, b.ids, (size_t)a.n * sizeof *a.ids) != 0)
        fail_msg("%s: \"%.*s\" splits differently with PCRE2", names[k], (int)n, text);
    }
    rfr_tokens_deinit(&a);
    rfr_tokens_deinit(&b);
    rfr_tokenizer_destroy(pcre);
    json_decref(other);
    unload(&r);
  }
}

/* Every allocation of opening and encoding fails once. */
static void test_allocations(void **state) {
  static const char *const names[] = {"bert.json", "unigram.json", "gpt4o.json"};
  rft_folder *f = *state;
  for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
    char path[512];
    json_t *root;
    rfi_string text = {.ctx = f->ctx};
    snprintf(path, sizeof path, FOLDER "%s", names[k]);
    expect(rfi_json_load(f->ctx, path, &root), path);
    expect(rfi_json_print_compact(json_object_get(root, "tokenizer"), &text), "print");
    const int64_t before = rfr_ctx_get_stats(f->ctx).live_blocks;
    rfr_status s = RFR_NO_MEMORY;
    int64_t at = 0;
    while (s == RFR_NO_MEMORY && at++ < 2000) {
      rfr_tokenizer *tokenizer;
      rfr_decoder *decoder = NULL;
      rfr_tokens tokens = {0};
      rfr_ctx_fail_alloc(f->ctx, at);
      s = rfi_tokenizer_parse(f->ctx, "t.json", text.data, text.n, &tokenizer);
      if (s == RFR_OK) s = rfr_tokenizer_encode(tokenizer, "Caf\xC3\xA9 a\xCC\x81 \xFF 12 <|end|>", 23, NULL, &tokens);
      if (s == RFR_OK) s = rfr_decoder_create(tokenizer, 1, &decoder);
      for (int64_t i = 0; i < tokens.n && s == RFR_OK; i++) s = rfr_decoder_add(decoder, tokens.ids[i], NULL, NULL);
      if (s == RFR_OK) s = rfr_decoder_end(decoder, NULL, NULL);
      rfr_ctx_fail_alloc(f->ctx, 0);
      rfr_decoder_destroy(decoder);
      rfr_tokens_deinit(&tokens);
      rfr_tokenizer_destroy(tokenizer);
      assert_int_equal(rfr_ctx_get_stats(f->ctx).live_blocks, before);
    }
    assert_int_equal(s, RFR_OK);
    assert_true(at > 20);
    rfi_string_deinit(&text);
    json_decref(root);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(test_references),     rft_folder_test(test_threads),
                                     rft_folder_test(test_long_piece),     rft_folder_test(test_score),
                                     rft_folder_test(test_leftmost),       rft_folder_test(test_blocked),
                                     rft_folder_test(test_foreign),        rft_folder_test(test_foreign_vocabulary),
                                     rft_folder_test(test_foreign_prefix), rft_folder_test(test_invalid),
                                     rft_folder_test(test_stream),         rft_folder_test(test_folder),
                                     rft_folder_test(test_refused),        rft_folder_test(test_nesting),
                                     rft_folder_test(test_matchers),       rft_folder_test(test_allocations)};
  return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
