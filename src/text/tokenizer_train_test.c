/* SPDX-License-Identifier: Apache-2.0
 *
 * Training of tokenizers: merges of the Python package tokenizers for a small text, merges of a plain trainer for
 * random words, the same file for all numbers of threads, texts of all kinds, and refused inputs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json_file.h"
#include "refrain/chat.h"
#include "support/folder.h"
#include "support/random.h"
#include "text/bpe_train.h"
#include "text/tokenizer_parts.h"
#include "text/word_count.h"

static void expect(rfr_status s, const char *what) {
  if (s != RFR_OK) fail_msg("%s: %s [%s]", what, rfr_last_error()->message, rfr_last_error()->slug);
}

/* Trains on one text file of the folder, with paths of the folder. */
static rfr_status train(rft_folder *f, rfr_ctx *ctx, const char *path, const rfr_tokenizer_train_options *o,
                        const char *out, rfr_tokenizer_training *t) {
  const char *const paths[] = {rft_path(f, path)};
  return rfr_tokenizer_train(ctx, paths, 1, o, rft_path(f, out), t);
}

static rfr_tokenizer_train_options options(int64_t vocab_size) {
  rfr_tokenizer_train_options o = rfr_tokenizer_train_options_default();
  o.vocab_size = vocab_size;
  return o;
}

/* ---- merges ---- */

static const char golden_text[] =
    "the cat sat on the mat; the hat's on that cat.\nthey sat 1234 12345 times\n  then  they  ran\n\n"
    "\xc3\xbcn\xc3\xaf \xc3\xbcn\xc3\xaf \xc3\xbcn\xc3\xaf\n";

/* The package's BpeTrainer with min_frequency 2, one special token and all bytes as the initial alphabet. */
static void test_golden(void **state) {
  rft_folder *f = *state;
  static const struct {
    rfr_word_pattern pattern;
    const char *name, *merges;
  } rows[] = {
      {RFR_WORDS_GPT2, "gpt2",
       "a t|t h|th e|\xc4\xa0 the|n \xc3\x83|\xc2\xbc n\xc3\x83|\xc3\x83 \xc2\xbcn\xc3\x83|\xc3\x83\xc2\xbcn\xc3\x83 "
       "\xc2\xaf|1 2|3 4|c at|o "
       "n|s at|\xc4\xa0 \xc3\x83\xc2\xbcn\xc3\x83\xc2\xaf|\xc4\xa0 12|\xc4\xa0 cat|\xc4\xa0 on|\xc4\xa0 sat|\xc4\xa0"
       "12 34|"},
      {RFR_WORDS_LLAMA3, "llama3",
       "a t|t h|th e|\xc4\xa0 the|n \xc3\x83|\xc2\xbc n\xc3\x83|\xc3\x83 \xc2\xbcn\xc3\x83|\xc3\x83\xc2\xbcn\xc3\x83 "
       "\xc2\xaf|1 2|c at|o n|s "
       "at|\xc4\xa0 \xc3\x83\xc2\xbcn\xc3\x83\xc2\xaf|\xc4\xa0 cat|\xc4\xa0 on|\xc4\xa0 sat|12 3|"},
      {RFR_WORDS_QWEN2, "qwen2",
       "a t|t h|th e|\xc4\xa0 the|n \xc3\x83|\xc2\xbc n\xc3\x83|\xc3\x83 \xc2\xbcn\xc3\x83|\xc3\x83\xc2\xbcn\xc3\x83 "
       "\xc2\xaf|c at|o n|s "
       "at|\xc4\xa0 \xc3\x83\xc2\xbcn\xc3\x83\xc2\xaf|\xc4\xa0 cat|\xc4\xa0 on|\xc4\xa0 sat|"},
  };
  rft_write(f, "text", golden_text, sizeof golden_text - 1);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_tokenizer_train_options o = options(290);
    rfr_tokenizer_training t;
    char name[64];
    rfi_string got = {.ctx = f->ctx};
    json_t *root;
    o.pattern = rows[i].pattern;
    expect(train(f, f->ctx, "text", &o, rows[i].name, &t), rows[i].name);
    snprintf(name, sizeof name, "%s/tokenizer.json", rows[i].name);
    expect(rfi_json_load(f->ctx, rft_path(f, name), &root), name);
    const json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    for (size_t k = 0; k < json_array_size(merges); k++)
      expect(rfi_string_printf(&got, "%s|", json_string_value(json_array_get(merges, k))), "append");
    assert_string_equal(got.data, rows[i].merges);
    assert_int_equal(t.merges, json_array_size(merges));
    assert_int_equal(t.vocab_size, 257 + t.merges);
    assert_int_equal(t.least, 2);
    assert_int_equal(t.files, 1);
    assert_int_equal(t.bytes, sizeof golden_text - 1);
    rfi_string_deinit(&got);
    json_decref(root);
  }
}

enum { WORDS = 40, LONGEST = 24, MERGES = 60 };

/* The definition: count all pairs, merge the best one everywhere, repeat. */
static int plain_trainer(uint32_t words[WORDS][LONGEST], int n[WORDS], const int64_t count[WORDS], uint32_t next,
                         struct rfi_trained_merge out[MERGES]) {
  static int64_t counts[256 + MERGES][256 + MERGES];
  for (int m = 0; m < MERGES; m++) {
    struct rfi_trained_merge best = {0};
    memset(counts, 0, sizeof counts);
    for (int w = 0; w < WORDS; w++)
      for (int i = 0; i + 1 < n[w]; i++) counts[words[w][i]][words[w][i + 1]] += count[w];
    for (uint32_t a = 0; a < next; a++)
      for (uint32_t b = 0; b < next; b++)
        if (counts[a][b] > counts[best.left][best.right]) best = (struct rfi_trained_merge){a, b};
    if (counts[best.left][best.right] < 1) return m;
    for (int w = 0; w < WORDS; w++) {
      int k = 0;
      for (int i = 0; i < n[w]; i++)
        if (i + 1 < n[w] && words[w][i] == best.left && words[w][i + 1] == best.right) words[w][k++] = next, i++;
        else words[w][k++] = words[w][i];
      n[w] = k;
    }
    next++;
    out[m] = best;
  }
  return MERGES;
}

static void test_plain(void **state) {
  rft_folder *f = *state;
  uint64_t seed = 7;
  const rfi_word_table reserved = {.ctx = f->ctx};
  for (int round = 0; round < 60; round++) {
    rfi_word_table table = {.ctx = f->ctx};
    rfi_trained_bpe trained = {0};
    static uint32_t words[WORDS][LONGEST];
    int n[WORDS];
    int64_t count[WORDS];
    struct rfi_trained_merge wanted[MERGES];
    const uint32_t letters = 1 + (uint32_t)round % 4;
    for (int w = 0; w < WORDS; w++) {
      char text[LONGEST];
      n[w] = 1 + (int)rft_below(&seed, LONGEST - 1);
      count[w] = 1 + rft_below(&seed, 3);
      for (int i = 0; i < n[w]; i++) {
        text[i] = (char)('a' + rft_below(&seed, letters));
        words[w][i] = (uint32_t)text[i] - 0x21u; /* ids of bytes: the visible characters come first */
      }
      expect(rfi_word_table_add(&table, text, (size_t)n[w], count[w]), "add");
    }
    const int merges = plain_trainer(words, n, count, 256, wanted);
    expect(rfi_bpe_train(f->ctx, &table, &reserved, 256 + merges, 1, &trained), "train");
    /* The reference trainer gives two ids to a text that can be made in two ways; such rounds are not compared. */
    size_t same = trained.n_merges;
    for (size_t i = 0; i < trained.n_merges && i < same; i++)
      if (trained.merges[i].left != wanted[i].left || trained.merges[i].right != wanted[i].right) same = i;
    if ((int)trained.tokens.n == 256 + (int)trained.n_merges && same < trained.n_merges)
      fail_msg("round %d: merge %zu is %u %u, not %u %u", round, same, trained.merges[same].left,
               trained.merges[same].right, wanted[same].left, wanted[same].right);
    assert_true(trained.n_merges >= 5);
    rfi_trained_bpe_deinit(f->ctx, &trained);
    rfi_word_table_deinit(&table);
  }
}

/* ---- words ---- */

/* Makes words from texts that contain all kinds of characters next to line feeds. */
static void random_text(uint64_t *seed, char *text, size_t n) {
  static const char *const parts[] = {"a",        "Bc",   "7",   "123", " ",        "  ", "\t",       "\n",
                                      "\n\n",     "\r\n", ".",   "'s",  "'",        "-",  "\xc3\xa9", "\xff",
                                      "\xe2\x82", "x\n",  ".\n", "it",  "\xc5\xbf", "5\n"};
  size_t at = 0;
  while (at + 4 < n) {
    const char *part = parts[rft_below(seed, sizeof parts / sizeof *parts)];
    memcpy(text + at, part, strlen(part));
    at += strlen(part);
  }
  memset(text + at, 'z', n - at);
}

static rfi_word_table count(rfr_ctx *ctx, rfr_word_pattern pattern, const char *text, const size_t *cuts, int n) {
  rfi_word_counter *counter;
  const rfi_word_table *words;
  rfi_word_table copy = {.ctx = ctx};
  expect(rfi_word_counter_create(ctx, pattern, &counter), "create");
  for (int i = 0; i < n; i++) expect(rfi_word_counter_add(counter, text + cuts[i], cuts[i + 1] - cuts[i]), "add");
  expect(rfi_word_counter_finish(counter, &words), "finish");
  expect(rfi_word_table_join(&copy, words), "join");
  rfi_word_counter_destroy(counter);
  return copy;
}

static void assert_same_words(const rfi_word_table *a, const rfi_word_table *b) {
  assert_int_equal(a->n, b->n);
  for (size_t i = 0; i < a->n; i++) {
    const rfi_word *w = &a->words[i];
    const int64_t k = rfi_word_table_find(b, a->text + w->begin, w->n);
    if (k < 0 || b->words[k].count != w->count) fail_msg("\"%.*s\"", (int)w->n, a->text + w->begin);
  }
}

static void test_cuts(void **state) {
  rft_folder *f = *state;
  enum { BYTES = 4096, MOST = 2000 };
  static char text[BYTES];
  static size_t cuts[MOST];
  uint64_t seed = 3;
  for (int round = 0; round < 30; round++) {
    const size_t all[] = {0, BYTES};
    int n = 0;
    random_text(&seed, text, BYTES);
    for (size_t at = 1; at < BYTES; cuts[++n] = at) at = rfi_words_cut(text, BYTES, at + 1);
    assert_true(n > 10);
    assert_int_equal(cuts[n], BYTES);
    const rfr_word_pattern pattern = (rfr_word_pattern)(round % 3);
    rfi_word_table one = count(f->ctx, pattern, text, all, 1), many = count(f->ctx, pattern, text, cuts, n);
    assert_same_words(&one, &many);
    rfi_word_table_deinit(&one);
    rfi_word_table_deinit(&many);
  }
}

/* A text of several units: the written file is bitwise equal for every number of threads, and if a pattern names the
 * same files. */
static void test_threads(void **state) {
  rft_folder *f = *state;
  enum { BYTES = 1 << 20 };
  uint64_t seed = 5;
  char *text = NULL, *first = NULL;
  size_t n_first = 0;
  expect(rfi_alloc(f->ctx, BYTES, (void **)&text), "alloc");
  random_text(&seed, text, BYTES);
  rft_write(f, "a.txt", text, BYTES / 4);
  rft_write(f, "b.txt", text + BYTES / 4, BYTES - BYTES / 4);
  rfi_free(f->ctx, text);
  for (int threads = 1; threads <= 4; threads++) {
    rfr_ctx_options co = rfr_ctx_options_default();
    rfr_ctx *ctx;
    const rfr_tokenizer_train_options o = options(400);
    char name[32], file[64];
    size_t n;
    co.threads = threads;
    expect(rfr_ctx_create(&co, &ctx), "context");
    snprintf(name, sizeof name, "t%d", threads);
    snprintf(file, sizeof file, "t%d/tokenizer.json", threads);
    if (threads % 2) {
      expect(train(f, ctx, "*.txt", &o, name, NULL), name);
    } else {
      const char *const paths[] = {rft_path(f, "b.txt"), rft_path(f, "a.txt"), rft_path(f, "b.txt")};
      expect(rfr_tokenizer_train(ctx, paths, 3, &o, rft_path(f, name), NULL), name);
    }
    char *bytes = rft_read(f, file, &n);
    if (threads == 1) {
      first = bytes;
      n_first = n;
    } else {
      assert_int_equal(n, n_first);
      assert_memory_equal(bytes, first, n);
      free(bytes);
    }
    rfr_ctx_destroy(ctx);
  }
  free(first);
}

/* ---- texts ---- */

static void collect(const char *text, size_t n, void *user) { expect(rfi_string_append(user, text, n), "collect"); }

/* Reads the written files: special tokens, the end of a text, and every byte. */
static void test_round_trip(void **state) {
  rft_folder *f = *state;
  static const char *const special[] = {"<|end|>", "<|im_start|>", "\"\\\n"};
  rfr_tokenizer_train_options o = options(300);
  rfr_tokenizer *tokenizer;
  rfr_chat_template *chat;
  rfr_decoder *decoder;
  rfr_tokens tokens = {0};
  rfi_string text = {.ctx = f->ctx}, decoded = {.ctx = f->ctx};
  o.special = special;
  o.n_special = 3;
  o.chat_template = "chatml";
  rft_write(f, "text", golden_text, sizeof golden_text - 1);
  expect(train(f, f->ctx, "text", &o, "made/here/", NULL), "train");
  expect(rfr_tokenizer_open(f->ctx, rft_path(f, "made/here"), &tokenizer), "open");
  expect(rfr_chat_template_open(f->ctx, rft_path(f, "made/here"), NULL, &chat), "template");
  for (int i = 0; i < 3; i++) {
    assert_int_equal(rfr_tokenizer_id(tokenizer, special[i], strlen(special[i])), i);
    assert_true(rfr_tokenizer_is_special(tokenizer, i));
  }
  assert_int_equal(rfr_tokenizer_eos(tokenizer), 0);
  assert_int_equal(rfr_tokenizer_stop(tokenizer, 0), 0);
  assert_int_equal(rfr_tokenizer_bos(tokenizer), -1);
  for (uint32_t c = 1; c < 0x10000; c += c < 0x800 ? 1 : 37) {
    char bytes[4];
    if (c >= 0xD800 && c < 0xE000) continue;
    expect(rfi_string_append(&text, bytes, rfi_utf8_put(c, bytes)), "append");
  }
  expect(rfi_string_append(&text, golden_text, sizeof golden_text - 1), "append");
  expect(rfr_tokenizer_encode(tokenizer, text.data, text.n, NULL, &tokens), "encode");
  expect(rfr_decoder_create(tokenizer, 1, &decoder), "decoder");
  for (int64_t i = 0; i < tokens.n; i++) expect(rfr_decoder_add(decoder, tokens.ids[i], collect, &decoded), "decode");
  expect(rfr_decoder_end(decoder, collect, &decoded), "decode");
  assert_int_equal(decoded.n, text.n);
  assert_memory_equal(decoded.data, text.data, text.n);
  rfr_decoder_destroy(decoder);
  rfr_tokens_deinit(&tokens);
  rfr_chat_template_destroy(chat);
  rfr_tokenizer_destroy(tokenizer);
  rfi_string_deinit(&text);
  rfi_string_deinit(&decoded);
}

/* All texts of rows are counted, as are text files; an output path that ends in .json gets only the tokenizer. */
static void test_rows(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *name, *text;
  } files[] = {
      {"t.jsonl", "{\"text\": \"ab ab\"}\n\n{\"text\": \"cd\\ncd\"}\n"},
      {"c.jsonl",
       "{\"messages\": [{\"role\": \"user\", \"content\": \"ef ef\"}, {\"role\": \"assistant\", \"content\": "
       "[{\"type\": \"text\", \"text\": \"gh gh\"}]}]}\n"},
      {"p.jsonl", "{\"prompt\": \"ij ij\", \"completion\": \"kl kl\"}\n"},
      {"d.jsonl", "{\"prompt\": \"mn mn\", \"chosen\": \"op op\", \"rejected\": \"qr qr\"}\n"},
      {"bad.txt", "st\xff"
                  "st st\xff"
                  "st"},
      {"empty.txt", ""},
  };
  const rfr_tokenizer_train_options o = options(2000);
  rfr_tokenizer_training t;
  char text[1 << 16];
  size_t n;
  for (size_t i = 0; i < sizeof files / sizeof *files; i++)
    rft_write(f, files[i].name, files[i].text, strlen(files[i].text));
  expect(train(f, f->ctx, "*", &o, "out.json", &t), "train");
  assert_int_equal(t.files, 6);
  assert_int_equal(t.bytes, 9 * 5 + 11);
  char *made = rft_read(f, "out.json", &n);
  snprintf(text, sizeof text, "%.*s", (int)n, made);
  free(made);
  static const char *const pairs[] = {"\"a b\"",
                                      "\"c d\"",
                                      "\"e f\"",
                                      "\"g h\"",
                                      "\"i j\"",
                                      "\"k l\"",
                                      "\"m n\"",
                                      "\"o p\"",
                                      "\"q r\"",
                                      "\"s t\"",
                                      "\"\xc2\xbf \xc2\xbd\""};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    if (!strstr(text, pairs[i])) fail_msg("no merge %s", pairs[i]);
}

/* Each file contributes its beginning, in complete characters. */
static void test_max_bytes(void **state) {
  rft_folder *f = *state;
  rfr_tokenizer_train_options o = options(300);
  rfr_tokenizer_training t;
  rft_write(f, "a.txt",
            "ababab\xc3\xa9"
            "cdcdcdcdcdcd",
            20);
  rft_write(f, "b.txt", "xyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxy", 40);
  o.max_bytes = 21;
  o.min_frequency = 1;
  expect(train(f, f->ctx, "*.txt", &o, "out", &t), "train");
  assert_int_equal(t.bytes, 6 + 14); /* 7 bytes would end inside a character */
  assert_int_equal(t.words, 2);
  size_t n;
  char *made = rft_read(f, "out/tokenizer.json", &n);
  assert_null(memmem(made, n, "\"c d\"", 5));
  assert_non_null(memmem(made, n, "\"x y\"", 5));
  free(made);
}

/* Merges never make a special token that text could spell; a token has at most 16384 bytes. */
static void test_limits(void **state) {
  rft_folder *f = *state;
  static const char *const special[] = {"<|end|>", "abab"};
  rfr_tokenizer_train_options o = options(300);
  rfr_tokenizer *tokenizer;
  rfr_tokenizer_training t;
  enum { BYTES = 1 << 17 };
  char *text;
  o.special = special;
  o.n_special = 2;
  rft_write(f, "a.txt", "ababababab ababababab", 21);
  expect(train(f, f->ctx, "a.txt", &o, "a", &t), "train");
  expect(rfr_tokenizer_open(f->ctx, rft_path(f, "a"), &tokenizer), "open");
  for (int32_t id = 2; id < t.vocab_size; id++)
    assert_string_not_equal(rfr_tokenizer_token(tokenizer, id, NULL), "abab");
  rfr_tokenizer_destroy(tokenizer);
  expect(rfi_alloc(f->ctx, BYTES, (void **)&text), "alloc");
  memset(text, 'a', BYTES);
  rft_write(f, "b.txt", text, BYTES);
  rfi_free(f->ctx, text);
  expect(train(f, f->ctx, "b.txt", &o, "b", &t), "train");
  assert_true(t.merges >= 14 && t.vocab_size < 300);
}

/* ---- refused ---- */

static void test_refused(void **state) {
  rft_folder *f = *state;
  static const char *const none[] = {""}, *const one[] = {"x"}, *const twice[] = {"<a>", "<a>"},
                           *const wrong[] = {"a\xff"};
  const struct {
    rfr_tokenizer_train_options o;
    const char *path, *out, *slug, *says;
  } rows[] = {
      {options(256), "text", "out", "argument", "vocab_size is 256; 256 bytes and 1 special tokens need 257"},
      {options((int64_t)1 << 40), "text", "out", "argument", "is the limit"},
      {{.size = sizeof(rfr_tokenizer_train_options), .vocab_size = 300},
       "text",
       "out",
       "argument",
       "min_frequency is 0"},
      {{.size = sizeof(rfr_tokenizer_train_options),
        .vocab_size = 300,
        .min_frequency = 1,
        .special = none,
        .n_special = 1},
       "text",
       "out",
       "argument",
       "special token 0 is empty"},
      {{.size = sizeof(rfr_tokenizer_train_options),
        .vocab_size = 300,
        .min_frequency = 1,
        .special = one,
        .n_special = 1},
       "text",
       "out",
       "argument",
       "special token \"x\" has one character"},
      {{.size = sizeof(rfr_tokenizer_train_options),
        .vocab_size = 300,
        .min_frequency = 1,
        .special = twice,
        .n_special = 2},
       "text",
       "out",
       "argument",
       "special token \"<a>\" is given twice"},
      {{.size = sizeof(rfr_tokenizer_train_options),
        .vocab_size = 300,
        .min_frequency = 1,
        .special = wrong,
        .n_special = 1},
       "text",
       "out",
       "argument",
       "special token 0 is not UTF-8"},
      {{.size = sizeof(rfr_tokenizer_train_options), .vocab_size = 300, .min_frequency = 1, .pattern = 7},
       "text",
       "out",
       "argument",
       "there is no pattern 7"},
      {{.size = sizeof(rfr_tokenizer_train_options), .vocab_size = 300, .min_frequency = 1, .max_bytes = -1},
       "text",
       "out",
       "argument",
       "max_bytes is -1"},
      {{.size = sizeof(rfr_tokenizer_train_options), .vocab_size = 300, .min_frequency = 1, .chat_template = "chatml"},
       "text",
       "out.json",
       "argument",
       "a chat template needs a folder"},
      {{.size = sizeof(rfr_tokenizer_train_options), .vocab_size = 300, .min_frequency = 1, .chat_template = "/none"},
       "text",
       "out",
       "file.open",
       "/none"},
      {options(300), "text", "text", "export.exists", "text exists"},
      {options(300), "none*", "out", "data.empty", "matches no file"},
      {options(300), "empty", "out", "data.empty", "the 1 files have no text"},
      {options(300), "nul", "out", "data.binary", "has a NUL byte at offset 3"},
      {options(300), "rows.jsonl", "out", "data.row", "rows.jsonl:2"},
      {options(300), "form.jsonl", "out", "data.format", "form.jsonl"},
  };
  rft_write(f, "text", "some text", 9);
  rft_write(f, "empty", "", 0);
  rft_write(f, "nul", "abc\0def", 7);
  rft_write(f, "rows.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n", 27);
  rft_write(f, "form.jsonl", "{\"other\": 3}\n", 13);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char kind;
    if (train(f, f->ctx, rows[i].path, &rows[i].o, rows[i].out, NULL) == RFR_OK) fail_msg("%s", rows[i].says);
    const rfr_error *e = rfr_last_error();
    if (strcmp(e->slug, rows[i].slug) != 0 || !strstr(e->message, rows[i].says))
      fail_msg("\"%s\" [%s], not \"%s\" [%s]", e->message, e->slug, rows[i].says, rows[i].slug);
    expect(rfi_path_kind(rft_path(f, "out"), &kind), "kind");
    assert_int_equal(kind, 0);
  }
}

/* Every allocation fails once, and the folder has no file except the text. */
static void test_allocations(void **state) {
  rft_folder *f = *state;
  const rfr_tokenizer_train_options o = options(280);
  rft_write(f, "text", golden_text, sizeof golden_text - 1);
  rfi_tree_discard(rft_path(f, "none"));
  const int64_t before = rfr_ctx_get_stats(f->ctx).live_blocks;
  rfr_status s = RFR_NO_MEMORY;
  int64_t at = 0;
  while (s == RFR_NO_MEMORY && at++ < 5000) {
    rfi_paths names = {.ctx = f->ctx};
    rfr_ctx_fail_alloc(f->ctx, at);
    s = train(f, f->ctx, "text", &o, "out", NULL);
    rfr_ctx_fail_alloc(f->ctx, 0);
    assert_int_equal(rfr_ctx_get_stats(f->ctx).live_blocks, before);
    expect(rfi_dir_list(f->path, &names), "list");
    assert_int_equal(names.n, s == RFR_OK ? 2 : 1);
    rfi_paths_deinit(&names);
  }
  assert_int_equal(s, RFR_OK);
  assert_true(at > 50);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(test_golden),     rft_folder_test(test_plain),
                                     rft_folder_test(test_cuts),       rft_folder_test(test_threads),
                                     rft_folder_test(test_round_trip), rft_folder_test(test_rows),
                                     rft_folder_test(test_max_bytes),  rft_folder_test(test_limits),
                                     rft_folder_test(test_refused),    rft_folder_test(test_allocations)};
  return cmocka_run_group_tests_name("tokenizer_train", tests, NULL, NULL);
}
