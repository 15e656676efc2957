/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens and masks of rows with a byte-level tokenizer without merges, so that a token is a byte or a special token.
 */
#include "text/row_encoder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/folder.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

enum { START = 256, END, BOS, VOCAB };

/* A folder with a tokenizer: 256 bytes, three special tokens, and BOS before a text. */
static void write_tokenizer(rft_folder *f) {
  char *text = malloc(16384), *at = text;
  at += sprintf(
      at, "{\"added_tokens\":[{\"id\":256,\"content\":\"<|im_start|>\",\"special\":true},"
          "{\"id\":257,\"content\":\"<|im_end|>\",\"special\":true},"
          "{\"id\":258,\"content\":\"<s>\",\"special\":true}],"
          "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
          "\"decoder\":{\"type\":\"ByteLevel\"},"
          "\"post_processor\":{\"type\":\"TemplateProcessing\","
          "\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],"
          "\"pair\":[{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},{\"Sequence\":{\"id\":\"B\",\"type_id\":0}}],"
          "\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[258],\"tokens\":[\"<s>\"]}}},"
          "\"model\":{\"type\":\"BPE\",\"vocab\":{");
  for (int b = 0; b < 256; b++) {
    char c[4];
    const int n = (int)rfi_utf8_put(rfi_byte_char((unsigned char)b), c);
    at += sprintf(at, "%s\"%s%.*s\":%d", b ? "," : "", *c == '"' || *c == '\\' ? "\\" : "", n, c, b);
  }
  at += sprintf(at, "},\"merges\":[]}}");
  rft_write(f, "tokenizer.json", text, (size_t)(at - text));
  free(text);
  static const char config[] = "{\"eos_token\":\"<|im_end|>\",\"bos_token\":\"<s>\"}";
  rft_write(f, "tokenizer_config.json", config, sizeof config - 1);
}

typedef struct scene {
  rfr_tokenizer *tokenizer;
  rfr_chat_template *chat;
  rfi_row_encoder encoder;
  rfi_row_tokens tokens;
} scene;

static scene open_scene(rft_folder *f, bool chat) {
  scene s = {0};
  write_tokenizer(f);
  assert_int_equal(rfr_tokenizer_open(f->ctx, f->path, &s.tokenizer), RFR_OK);
  if (chat) assert_int_equal(rfr_chat_template_open(f->ctx, "chatml", NULL, &s.chat), RFR_OK);
  s.encoder = (rfi_row_encoder){.ctx = f->ctx, .tokenizer = s.tokenizer, .chat = s.chat};
  return s;
}

static void close_scene(scene *s) {
  rfi_row_tokens_deinit(&s->tokens);
  rfr_chat_template_destroy(s->chat);
  rfr_tokenizer_destroy(s->tokenizer);
}

/* The tokens as text: special tokens as ^ (start), $ (end) and @ (BOS), trained tokens in brackets. */
static void show(const rfi_row_tokens *t, char *out) {
  bool trained = false;
  for (int64_t i = 0; i < t->n; i++) {
    const bool is = (t->ids[i] & RFI_TOKEN_TRAINED) != 0;
    if (t->ids[i] & RFI_TOKEN_REJECTED) {
      if (trained) *out++ = ']';
      trained = false;
      *out++ = '|';
    }
    const int id = RFI_TOKEN_ID(t->ids[i]);
    assert_true(id < VOCAB);
    if (is != trained) *out++ = is ? '[' : ']';
    trained = is;
    *out++ = id == START ? '^' : id == END ? '$' : id == BOS ? '@' : (char)id;
  }
  if (trained) *out++ = ']';
  *out = 0;
}

static void check(rft_folder *f, scene *s, rfi_row_form form, const char *text, const char *wanted) {
  rfi_row row;
  char shown[1024];
  assert_int_equal(rfi_row_read(f->ctx, form, "a.jsonl", 3, text, strlen(text), &row), RFR_OK);
  const rfr_status status = rfi_row_encode(&s->encoder, &row, "a.jsonl", 3, &s->tokens);
  if (status != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  rfi_row_deinit(f->ctx, &row);
  show(&s->tokens, shown);
  assert_string_equal(shown, wanted);
}

#define USER(text) "{\"role\":\"user\",\"content\":\"" text "\"}"
#define ANSWER(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"
#define CHAT(list) "{\"messages\":[" list "]}"

static void test_chat(void **state) {
  rft_folder *f = *state;
  scene s = open_scene(f, true);
  const char *two = CHAT(USER("a") "," ANSWER("b") "," USER("c") "," ANSWER("d\\u00e9"));
  check(f, &s, RFI_ROW_chat, two, "^user\na$\n^assistant\n[b$]\n^user\nc$\n^assistant\n[d\xc3\xa9$]\n");
  s.encoder.loss = RFI_ROW_LOSS_COMPLETION;
  check(f, &s, RFI_ROW_chat, two, "^user\na$\n^assistant\nb$\n^user\nc$\n^assistant\n[d\xc3\xa9$]\n");
  s.encoder.loss = RFI_ROW_LOSS_ALL;
  check(f, &s, RFI_ROW_chat, CHAT(USER("a") "," ANSWER("b")), "^[user\na$\n^assistant\nb$\n]");
  s.encoder.loss = RFI_ROW_LOSS_AUTO;
  /* Special tokens in a message are tokenized as text, for the user and for the assistant. */
  check(f, &s, RFI_ROW_chat, CHAT(USER("<|im_end|>") "," ANSWER("<|im_start|>")),
        "^user\n<|im_end|>$\n^assistant\n[<|im_start|>$]\n");
  check(f, &s, RFI_ROW_sharegpt,
        "{\"conversations\":[{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":\"b\"}]}",
        "^user\na$\n^assistant\n[b$]\n");
  close_scene(&s);
}

static void test_prompts(void **state) {
  rft_folder *f = *state;
  scene s = open_scene(f, true);
  const char *pair = "{\"prompt\":\"a<s>\",\"completion\":\"b\"}";
  check(f, &s, RFI_ROW_completion, pair, "^user\na<s>$\n^assistant\n[b$]\n");
  check(f, &s, RFI_ROW_alpaca, "{\"instruction\":\"a\",\"input\":\"x\",\"output\":\"b\"}",
        "^user\na\n\nx$\n^assistant\n[b$]\n");
  check(f, &s, RFI_ROW_completion,
        "{\"prompt\":[" USER("a") "," ANSWER("b") "," USER("c") "],\"completion\":[" ANSWER("d") "]}",
        "^user\na$\n^assistant\nb$\n^user\nc$\n^assistant\n[d$]\n");
  close_scene(&s);
  s = open_scene(f, false);
  check(f, &s, RFI_ROW_completion, pair, "@a<s>[b$]");
  s.encoder.loss = RFI_ROW_LOSS_ALL;
  check(f, &s, RFI_ROW_completion, pair, "@[a<s>b$]");
  rfi_hash a, b;
  assert_int_equal(rfi_row_encoder_hash(&s.encoder, &a), RFR_OK);
  s.encoder.loss = RFI_ROW_LOSS_AUTO;
  assert_int_equal(rfi_row_encoder_hash(&s.encoder, &b), RFR_OK);
  assert_false(rfi_hash_equal(a, b));
  close_scene(&s);
}

/* The chosen sequence, a bar, and the rejected one. */
static void test_preferences(void **state) {
  rft_folder *f = *state;
  scene s = open_scene(f, true);
  const char *texts = "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\"}";
  check(f, &s, RFI_ROW_preference, texts, "^user\na$\n^assistant\n[b$]\n|^user\na$\n^assistant\n[c$]\n");
  const char *turns = "^user\na$\n^assistant\nb$\n^user\nc$\n^assistant\n[d$]\n|"
                      "^user\na$\n^assistant\nb$\n^user\nc$\n^assistant\n[e$]\n";
  check(f, &s, RFI_ROW_preference,
        "{\"prompt\":[" USER("a") "," ANSWER("b") "," USER("c") "],\"chosen\":[" ANSWER("d") "],\"rejected\":[" ANSWER(
            "e") "]}",
        turns);
  /* Without a prompt, the prompt is the common beginning of both answers. */
  check(f, &s, RFI_ROW_preference,
        "{\"chosen\":[" USER("a") "," ANSWER("b") "," USER("c") "," ANSWER("d") "],\"rejected\":[" USER("a") "," ANSWER(
            "b") "," USER("c") "," ANSWER("e") "]}",
        turns);
  check(f, &s, RFI_ROW_preference,
        "{\"chosen\":[" USER("a") "," ANSWER("b") "," ANSWER("c") "],\"rejected\":[" USER("a") "," ANSWER(
            "b") "," ANSWER("d") "]}",
        "^user\na$\n^assistant\nb$\n^assistant\n[c$]\n|^user\na$\n^assistant\nb$\n^assistant\n[d$]\n");
  close_scene(&s);
  s = open_scene(f, false);
  check(f, &s, RFI_ROW_preference, texts, "@a[b$]|@a[c$]");
  close_scene(&s);
}

/* Special tokens in a text row are matched. */
static void test_texts(void **state) {
  rft_folder *f = *state;
  scene s = open_scene(f, true);
  char shown[64];
  check(f, &s, RFI_ROW_text, "{\"text\":\"ab<|im_end|>c\"}", "@[ab$c$]");
  check(f, &s, RFI_ROW_text, "{\"text\":\"ab<|im_end|>\"}", "@[ab$]");
  check(f, &s, RFI_ROW_text, "{\"text\":\"\"}", "");
  int64_t bytes = 0;
  assert_int_equal(rfi_text_encode(&s.encoder, "a\n\xf0\x9f\x8e\x89", 6, true, &s.tokens), RFR_OK);
  show(&s.tokens, shown);
  assert_string_equal(shown, "@[a\n\xf0\x9f\x8e\x89$]");
  for (int64_t i = 0; i < s.tokens.n; i++) bytes += s.tokens.widths[i];
  assert_int_equal(bytes, 6);
  close_scene(&s);
}

static void test_errors(void **state) {
  rft_folder *f = *state;
  scene s = open_scene(f, false);
  rfi_row row;
  const char *text = CHAT(USER("a"));
  assert_int_equal(rfi_row_read(f->ctx, RFI_ROW_chat, "a.jsonl", 3, text, strlen(text), &row), RFR_OK);
  assert_int_equal(rfi_row_encode(&s.encoder, &row, "a.jsonl", 3, &s.tokens), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.format");
  assert_non_null(strstr(rfr_last_error()->message, "a.jsonl:3: messages need a chat template"));
  rfi_row_deinit(f->ctx, &row);
  close_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_chat),  rft_folder_test(test_prompts), rft_folder_test(test_preferences),
      rft_folder_test(test_texts), rft_folder_test(test_errors),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
