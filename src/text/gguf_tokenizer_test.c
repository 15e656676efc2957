/* SPDX-License-Identifier: Apache-2.0
 *
 * Vocabularies of GGUF files: ids of the packages that trained them (tests/data/gguf/ids.json), the files that a folder
 * has, and files that are written and read again.
 */
#include "text/gguf_tokenizer.h"

#include <string.h>

#include "data/json_file.h"
#include "refrain/chat.h"
#include "support/folder.h"
#include "text/tokenizer.h"

#define FILES RFT_SOURCE_DIR "/tests/data/gguf/"
#define OK(call) assert_ok(call, #call, __LINE__)

static void assert_ok(rfr_status s, const char *call, int line) {
  if (s != RFR_OK) fail_msg("line %d: %s: %s", line, call, rfr_last_error()->message);
}

static void expect_ids(rfr_ctx *ctx, const char *path, const char *name, const json_t *known) {
  rfr_tokenizer *t;
  rfr_tokens tokens = {0};
  const char *text = json_string_value(json_object_get(known, "text"));
  const json_t *ids = json_object_get(known, name);
  OK(rfr_tokenizer_open(ctx, path, &t));
  OK(rfr_tokenizer_encode(t, text, strlen(text), NULL, &tokens));
  assert_int_equal(tokens.n, json_array_size(ids));
  for (int64_t i = 0; i < tokens.n; i++)
    assert_int_equal(tokens.ids[i], json_integer_value(json_array_get(ids, (size_t)i)));
  rfr_tokens_deinit(&tokens);
  rfr_tokenizer_destroy(t);
}

static void ids(void **state) {
  rft_folder *f = *state;
  json_t *known;
  OK(rfi_json_load(f->ctx, FILES "ids.json", &known));
  expect_ids(f->ctx, FILES "bytes.gguf", "bytes", known);
  expect_ids(f->ctx, FILES "pieces.gguf", "pieces", known);
  json_decref(known);
}

static json_t *file_of(rfr_ctx *ctx, const char *path, const char *name) {
  rfi_gguf *g;
  char *text;
  size_t n;
  json_t *o;
  OK(rfi_gguf_open(ctx, path, &g));
  OK(rfi_gguf_text_file(ctx, g, name, &text, &n));
  rfi_gguf_close(g);
  if (!text) return NULL;
  OK(rfi_json_parse(name, text, n, &o));
  rfi_free(ctx, text);
  return o;
}

static void files(void **state) {
  rft_folder *f = *state;
  json_t *o = file_of(f->ctx, FILES "pieces.gguf", "tokenizer_config.json");
  assert_string_equal(json_string_value(json_object_get(o, "bos_token")), "<s>");
  assert_string_equal(json_string_value(json_object_get(o, "unk_token")), "<unk>");
  assert_int_equal(json_array_size(json_object_get(o, "chat_template")), 2);
  json_decref(o);
  o = file_of(f->ctx, FILES "pieces.gguf", "generation_config.json"); /* the end of the text, and of a turn */
  assert_int_equal(json_integer_value(json_array_get(json_object_get(o, "eos_token_id"), 0)), 2);
  assert_int_equal(json_integer_value(json_array_get(json_object_get(o, "eos_token_id"), 1)), 3);
  json_decref(o);
  o = file_of(f->ctx, FILES "bytes.gguf", "generation_config.json");
  assert_int_equal(json_integer_value(json_object_get(o, "eos_token_id")), 0);
  json_decref(o);
  o = file_of(f->ctx, FILES "bytes.gguf", "tokenizer.json");
  const json_t *added = json_object_get(o, "added_tokens");
  assert_int_equal(json_array_size(added), 3);
  assert_true(json_is_true(json_object_get(json_array_get(added, 0), "special")));
  assert_true(json_is_false(json_object_get(json_array_get(added, 2), "special"))); /* <tool> */
  json_decref(o);
  assert_null(file_of(f->ctx, FILES "bytes.gguf", "merges.txt"));
  assert_null(file_of(f->ctx, FILES "llama.gguf", "tokenizer.json")); /* no vocabulary */
  /* The template of a file, through the public call. */
  rfr_chat_template *chat;
  OK(rfr_chat_template_open(f->ctx, FILES "bytes.gguf", NULL, &chat));
  rfr_chat_template_destroy(chat);
  OK(rfr_chat_template_open(f->ctx, FILES "pieces.gguf", "rag", &chat));
  rfr_chat_template_destroy(chat);
}

/* A vocabulary that is written to a GGUF file must give the same files again. */
static void written(void **state) {
  rft_folder *f = *state;
  static const char *const names[] = {"bytes", "pieces"};
  for (int i = 0; i < 2; i++) {
    char path[512];
    rfi_gguf_writer *w;
    rfi_file *file;
    snprintf(path, sizeof path, FILES "%s.gguf", names[i]);
    const rfi_gguf_text_files from = {"tokenizer.json",
                                      file_of(f->ctx, path, "tokenizer.json"),
                                      file_of(f->ctx, path, "tokenizer_config.json"),
                                      file_of(f->ctx, path, "generation_config.json"),
                                      NULL,
                                      0};
    const int64_t n = (int64_t)json_object_size(json_object_get(json_object_get(from.tokenizer, "model"), "vocab"));
    OK(rfi_gguf_writer_create(f->ctx, &w));
    OK(rfi_gguf_put_text_files(f->ctx, w, &from, n));
    OK(rfi_file_create(f->ctx, rft_path(f, names[i]), &file));
    OK(rfi_gguf_write_header(w, file));
    OK(rfi_file_finish(file, NULL));
    rfi_gguf_writer_destroy(w);
    json_t *again[3] = {file_of(f->ctx, rft_path(f, names[i]), "tokenizer.json"),
                        file_of(f->ctx, rft_path(f, names[i]), "tokenizer_config.json"),
                        file_of(f->ctx, rft_path(f, names[i]), "generation_config.json")};
    const json_t *first[3] = {from.tokenizer, from.config, from.generation};
    for (int k = 0; k < 3; k++) {
      if (!json_equal(first[k], again[k])) fail_msg("%s: file %d differs", names[i], k);
      json_decref(again[k]);
      json_decref((json_t *)first[k]);
    }
  }
}

/* A vocabulary with one change each. */
static void refused(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *key, *value;
    const char *says;
  } rows[] = {{"tokenizer.ggml.model", "bert", "tokenizer.ggml.model is \"bert\""},
              {"tokenizer.ggml.pre", "chameleon", "tokenizer.ggml.pre is chameleon"},
              {"tokenizer.ggml.pre", "smollm starcoder", "tokenizer.ggml.pre is smollm starcoder"},
              {"tokenizer.ggml.merges", "", "merge 0 is not two tokens"},
              {"tokenizer.ggml.tokens", "a", "token 1 appears twice"}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    rfi_gguf_writer *w;
    rfi_gguf *g;
    rfi_file *file;
    char *data;
    size_t n;
    const bool is[4] = {
        strcmp(rows[i].key, "tokenizer.ggml.model") == 0, strcmp(rows[i].key, "tokenizer.ggml.pre") == 0,
        strcmp(rows[i].key, "tokenizer.ggml.merges") == 0, strcmp(rows[i].key, "tokenizer.ggml.tokens") == 0};
    const char *model = is[0] ? rows[i].value : "gpt2", *pre = is[1] ? rows[i].value : "gpt-2";
    OK(rfi_gguf_writer_create(f->ctx, &w));
    rfi_gguf_put_text(w, "tokenizer.ggml.model", model, strlen(model));
    rfi_gguf_put_text(w, "tokenizer.ggml.pre", pre, strlen(pre));
    rfi_gguf_put_list(w, "tokenizer.ggml.tokens", RFI_GGUF_STRING, 2);
    rfi_gguf_put_item(w, "a", 1);
    rfi_gguf_put_item(w, is[3] ? "a" : "b", 1);
    rfi_gguf_put_list(w, "tokenizer.ggml.merges", RFI_GGUF_STRING, 1);
    rfi_gguf_put_item(w, is[2] ? "ab" : "a b", is[2] ? 2 : 3);
    rfi_tree_discard(rft_path(f, "v.gguf"));
    OK(rfi_file_create(f->ctx, rft_path(f, "v.gguf"), &file));
    OK(rfi_gguf_write_header(w, file));
    OK(rfi_file_finish(file, NULL));
    rfi_gguf_writer_destroy(w);
    OK(rfi_gguf_open(f->ctx, rft_path(f, "v.gguf"), &g));
    if (rfi_gguf_text_file(f->ctx, g, "tokenizer.json", &data, &n) == RFR_OK ||
        !strstr(rfr_last_error()->message, rows[i].says))
      fail_msg("row %zu: %s", i, rfr_last_error()->message);
    rfi_gguf_close(g);
  }
}

/* Files of tests/data/fuzz/gguf whose vocabulary has a wrong type, length or id: classes of advisories for other
 * readers of GGUF. */
static void hostile(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *file, *says;
  } rows[] = {{"model-not-text", "tokenizer.ggml.model is not a string"},
              {"tokens-not-strings", "tokenizer.ggml.tokens is not a list of strings"},
              {"tokens-scalar", "tokenizer.ggml.tokens is not a list of strings"},
              {"scores-strings", "tokenizer.ggml.scores is not a list of numbers"},
              {"scores-short", "tokenizer.ggml.scores has 1 elements; there are 8 tokens"},
              {"types-real", "tokenizer.ggml.token_type is not an integer"},
              {"types-short", "tokenizer.ggml.token_type has 2 elements; there are 8 tokens"},
              {"merges-bytes", "tokenizer.ggml.merges is not a list of strings"},
              {"eos-outside", "tokenizer.ggml.bos_token_id is above 2^63 - 1"},
              {"no-utf8", "tokenizer.ggml.tokens: token 0 is not valid UTF-8"}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    char path[512];
    rfi_gguf *g;
    char *data;
    size_t n;
    snprintf(path, sizeof path, "%s/tests/data/fuzz/gguf/%s", RFT_SOURCE_DIR, rows[i].file);
    OK(rfi_gguf_open(f->ctx, path, &g));
    if (rfi_gguf_text_file(f->ctx, g, "tokenizer.json", &data, &n) == RFR_OK ||
        !strstr(rfr_last_error()->message, rows[i].says))
      fail_msg("%s: %s", rows[i].file, rfr_last_error()->message);
    rfi_gguf_close(g);
  }
}

static void append(const char *text, size_t n, void *user) {
  char *out = user;
  strncat(out, text, n);
}

/* "<0x-1>" of the type of bytes is a text: a byte token has exactly two hexadecimal digits. */
static void byte_token(void **state) {
  rft_folder *f = *state;
  rfr_tokenizer *t;
  rfr_decoder *decoder;
  char text[64] = "";
  OK(rfr_tokenizer_open(f->ctx, RFT_SOURCE_DIR "/tests/data/fuzz/gguf/byte-token", &t));
  OK(rfr_decoder_create(t, false, &decoder));
  for (int32_t id = 6; id < 8; id++) OK(rfr_decoder_add(decoder, id, append, text));
  OK(rfr_decoder_end(decoder, append, text));
  assert_string_equal(text, "\n<0x-1>");
  rfr_decoder_destroy(decoder);
  rfr_tokenizer_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(ids),     rft_folder_test(files),   rft_folder_test(written),
                                     rft_folder_test(refused), rft_folder_test(hostile), rft_folder_test(byte_token)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
