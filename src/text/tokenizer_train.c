/* SPDX-License-Identifier: Apache-2.0
 *
 * Trains a tokenizer and writes its files. They appear under their name when all of them are complete, and after the
 * reader of tokenizer.json has accepted them.
 */
#include <string.h>

#include "data/dataset.h"
#include "data/file.h"
#include "text/bpe_train.h"
#include "text/chat.h"
#include "text/tokenizer_parts.h"
#include "text/word_count.h"

static const char *const default_special[] = {"<|endoftext|>"};

rfr_tokenizer_train_options rfr_tokenizer_train_options_default(void) {
  return (rfr_tokenizer_train_options){
      .size = sizeof(rfr_tokenizer_train_options), .vocab_size = 32768, .min_frequency = 2};
}

/* ---- options ---- */

/* A special token must have several characters, so that it is not one of the byte tokens. */
static rfr_status check_special(const rfr_tokenizer_train_options *o, int64_t i) {
  const char *text = o->special[i];
  size_t first = 0;
  if (!text || !*text) return rfi_fail(RFI_E_ARGUMENT, "special token %lld is empty", (long long)i);
  const size_t n = strlen(text);
  if (n > RFI_TRAINED_TOKEN_BYTES || rfi_utf8_valid(text, n) != n)
    return rfi_fail(RFI_E_ARGUMENT, "special token %lld is not UTF-8 of at most %d bytes", (long long)i,
                    RFI_TRAINED_TOKEN_BYTES);
  rfi_utf8_next(text, &first);
  if (first == n)
    return rfi_fail(RFI_E_ARGUMENT, "special token \"%s\" has one character; at least two are needed", text);
  for (int64_t k = 0; k < i; k++)
    if (strcmp(o->special[k], text) == 0) return rfi_fail(RFI_E_ARGUMENT, "special token \"%s\" is given twice", text);
  return RFR_OK;
}

static rfr_status check_options(rfr_tokenizer_train_options *o, bool is_file) {
  if (!o->special) o->special = default_special, o->n_special = 1;
  if (o->n_special < 1 || o->n_special > RFI_TEXT_SPECIALS)
    return rfi_fail(RFI_E_ARGUMENT, "%lld special tokens; 1 to %d are supported", (long long)o->n_special,
                    RFI_TEXT_SPECIALS);
  for (int64_t i = 0; i < o->n_special; i++) RFI_TRY(check_special(o, i));
  if (o->vocab_size < 256 + o->n_special || o->vocab_size > RFI_TOKENS_LIMIT)
    return rfi_fail(
        RFI_E_ARGUMENT, "vocab_size is %lld; 256 bytes and %lld special tokens need %lld, and %d is the limit",
        (long long)o->vocab_size, (long long)o->n_special, (long long)(256 + o->n_special), RFI_TOKENS_LIMIT);
  if (o->pattern < RFR_WORDS_GPT2 || o->pattern > RFR_WORDS_QWEN2)
    return rfi_fail(RFI_E_ARGUMENT, "there is no pattern %d", (int)o->pattern);
  if (o->min_frequency < 1)
    return rfi_fail(RFI_E_ARGUMENT, "min_frequency is %lld; it must be at least 1", (long long)o->min_frequency);
  if (o->max_bytes < 0)
    return rfi_fail(RFI_E_ARGUMENT, "max_bytes is %lld; it must be at least 0", (long long)o->max_bytes);
  if (o->chat_template && is_file)
    return rfi_fail(RFI_E_ARGUMENT, "a chat template needs a folder, and the output ends in .json");
  return RFR_OK;
}

/* ---- words ---- */

/* The part of `limit` for a file: files share it in proportion to their sizes. */
static int64_t share(int64_t limit, int64_t size, int64_t all) {
  if (limit == 0 || limit >= all) return limit ? limit : -1;
  return (int64_t)((double)limit * ((double)size / (double)all));
}

static rfr_status count_files(rfi_word_counter *counter, const rfi_paths *files, const rfr_tokenizer_train_options *o,
                              rfr_tokenizer_training *t) {
  int64_t all = 0, *sizes;
  rfr_ctx *ctx = files->ctx;
  rfi_file *f;
  rfr_status s = RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, ((size_t)files->n + 1) * sizeof *sizes, &sizes));
  for (int i = 0; i < files->n && s == RFR_OK; i++) {
    s = rfi_file_open(ctx, files->items[i], &f);
    if (s != RFR_OK) break;
    all += sizes[i] = rfi_file_size(f);
    rfi_file_close(f);
  }
  for (int i = 0; i < files->n && s == RFR_OK; i++) {
    int64_t left = share(o->max_bytes, sizes[i], all);
    if (left > 0 && left > o->max_bytes - t->bytes) left = o->max_bytes - t->bytes; /* compressed files of rows */
    s = rfi_word_counter_add_file(counter, files->items[i], &left, &t->bytes);
  }
  rfi_free(ctx, sizes);
  t->files = files->n;
  if (s == RFR_OK && t->bytes == 0) return rfi_fail(RFI_E_DATA_EMPTY, "the %d files have no text", files->n);
  return s;
}

/* Texts that no merge may make: special tokens whose characters all stand for bytes. */
static rfr_status add_reserved(const rfr_tokenizer_train_options *o, rfi_word_table *out) {
  rfi_string text = {.ctx = out->ctx};
  rfr_status s = RFR_OK;
  for (int64_t i = 0; i < o->n_special && s == RFR_OK; i++) {
    const char *special = o->special[i];
    const size_t n = strlen(special);
    bool is_bytes = true;
    text.n = 0;
    for (size_t k = 0; k < n && s == RFR_OK && is_bytes;) {
      const int byte = rfi_char_byte(rfi_utf8_next(special, &k));
      is_bytes = byte >= 0;
      if (is_bytes) s = rfi_string_append(&text, &(char){(char)byte}, 1);
    }
    if (s == RFR_OK && is_bytes) s = rfi_word_table_add(out, text.data, text.n, 1);
  }
  rfi_string_deinit(&text);
  return s;
}

/* ---- tokenizer.json ---- */

static rfr_status put(rfi_string *out, const char *text) { return rfi_string_append(out, text, strlen(text)); }

/* A JSON string. */
static rfr_status put_quoted(rfi_string *out, const char *s, size_t n) {
  RFI_TRY(put(out, "\""));
  for (size_t i = 0; i < n; i++) {
    if (s[i] == '"' || s[i] == '\\') RFI_TRY(put(out, "\\"));
    if ((unsigned char)s[i] < 0x20) RFI_TRY(rfi_string_printf(out, "\\u%04x", (unsigned char)s[i]));
    else RFI_TRY(rfi_string_append(out, s + i, 1));
  }
  return put(out, "\"");
}

/* The printable characters of a token, within a JSON string. */
static rfr_status put_printable(rfi_string *out, const rfi_trained_bpe *t, uint32_t id) {
  const rfi_word *w = &t->tokens.words[id - t->n_special];
  for (uint32_t i = 0; i < w->n; i++) {
    char text[5];
    const size_t n = rfi_utf8_put(rfi_byte_char((unsigned char)t->tokens.text[w->begin + i]), text + 1);
    const bool escape = n == 1 && (text[1] == '"' || text[1] == '\\');
    text[0] = '\\';
    RFI_TRY(rfi_string_append(out, text + !escape, n + escape));
  }
  return RFR_OK;
}

#define BYTE_LEVEL(prefix, regex) \
  "{\"type\": \"ByteLevel\", \"add_prefix_space\": " prefix ", \"trim_offsets\": true, \"use_regex\": " regex "}"

static rfr_status put_pre_tokenizer(rfi_string *out, rfr_word_pattern pattern) {
  const rfi_bytes text = rfi_word_pattern_text(pattern);
  if (pattern == RFR_WORDS_GPT2) return put(out, BYTE_LEVEL("false", "true"));
  RFI_TRY(
      put(out, "{\"type\": \"Sequence\", \"pretokenizers\": [\n    {\"type\": \"Split\", \"pattern\": {\"Regex\": "));
  RFI_TRY(put_quoted(out, text.text, text.n));
  RFI_TRY(put(out, "}, \"behavior\": \"Isolated\", \"invert\": false},\n    "));
  RFI_TRY(put(out, BYTE_LEVEL("false", "false")));
  return put(out, "\n  ]}");
}

static rfr_status put_model(rfi_string *out, const rfi_trained_bpe *t, const rfr_tokenizer_train_options *o) {
  RFI_TRY(put(out,
              "{\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
              "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n"
              "    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n    \"vocab\": {"));
  for (int64_t i = 0; i < o->n_special; i++) {
    RFI_TRY(put(out, i ? ",\n      " : "\n      "));
    RFI_TRY(put_quoted(out, o->special[i], strlen(o->special[i])));
    RFI_TRY(rfi_string_printf(out, ": %lld", (long long)i));
  }
  for (size_t i = 0; i < t->tokens.n; i++) {
    const uint32_t id = (uint32_t)i + (uint32_t)o->n_special;
    RFI_TRY(put(out, ",\n      \""));
    RFI_TRY(put_printable(out, t, id));
    RFI_TRY(rfi_string_printf(out, "\": %u", id));
  }
  RFI_TRY(put(out, "\n    },\n    \"merges\": ["));
  /* a text with a blank in between, because printable characters contain none */
  for (size_t i = 0; i < t->n_merges; i++) {
    RFI_TRY(put(out, i ? ",\n      \"" : "\n      \""));
    RFI_TRY(put_printable(out, t, t->merges[i].left));
    RFI_TRY(put(out, " "));
    RFI_TRY(put_printable(out, t, t->merges[i].right));
    RFI_TRY(put(out, "\""));
  }
  return put(out, t->n_merges ? "\n    ]\n  }" : "]\n  }");
}

static rfr_status put_tokenizer(rfi_string *out, const rfi_trained_bpe *t, const rfr_tokenizer_train_options *o) {
  RFI_TRY(put(out, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  \"added_tokens\": ["));
  for (int64_t i = 0; i < o->n_special; i++) {
    RFI_TRY(rfi_string_printf(out, "%s\n    {\"id\": %lld, \"content\": ", i ? "," : "", (long long)i));
    RFI_TRY(put_quoted(out, o->special[i], strlen(o->special[i])));
    RFI_TRY(put(out, ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
                     "\"special\": true}"));
  }
  RFI_TRY(put(out, "\n  ],\n  \"normalizer\": null,\n  \"pre_tokenizer\": "));
  RFI_TRY(put_pre_tokenizer(out, o->pattern));
  RFI_TRY(put(out, ",\n  \"post_processor\": null,\n  \"decoder\": " BYTE_LEVEL("true", "true") ",\n  \"model\": "));
  RFI_TRY(put_model(out, t, o));
  return put(out, "\n}\n");
}

static rfr_status put_config(rfi_string *out, const rfr_tokenizer_train_options *o) {
  RFI_TRY(put(out,
              "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n  \"clean_up_tokenization_spaces\": false,\n"
              "  \"eos_token\": "));
  RFI_TRY(put_quoted(out, o->special[0], strlen(o->special[0])));
  RFI_TRY(put(out, ",\n  \"additional_special_tokens\": ["));
  for (int64_t i = 1; i < o->n_special; i++) {
    if (i > 1) RFI_TRY(put(out, ", "));
    RFI_TRY(put_quoted(out, o->special[i], strlen(o->special[i])));
  }
  return put(out, "]\n}\n");
}

/* ---- files ---- */

static rfr_status write_in(rfr_ctx *ctx, const char *folder, const char *name, const char *data, size_t n) {
  char *path;
  RFI_TRY(rfi_path_join(ctx, folder, name, &path));
  const rfr_status s = rfi_file_write(ctx, path, data, n);
  rfi_free(ctx, path);
  return s;
}

static rfr_status write_folder(rfr_ctx *ctx, const char *out, const rfi_string *tokenizer, const rfi_string *config,
                               const rfr_chat_template *chat) {
  char *temporary = NULL, *folder = NULL, *parent = NULL;
  rfr_status s;
  size_t n = strlen(out), chat_n = 0;
  const char *chat_text = chat ? rfi_chat_template_text(chat, &chat_n) : NULL;
  while (n > 1 && out[n - 1] == '/') n--;
  RFI_GOTO(RFI_ALLOC(ctx, n + 1, &folder));
  memcpy(folder, out, n);
  RFI_GOTO(rfi_path_parent(ctx, folder, &parent));
  RFI_GOTO(rfi_path_temporary(ctx, folder, &temporary));
  RFI_GOTO(rfi_tree_remove(ctx, temporary)); /* left by a dead process that had our process id */
  RFI_GOTO(rfi_dir_create(temporary));
  s = write_in(ctx, temporary, "tokenizer.json", tokenizer->data, tokenizer->n);
  if (s == RFR_OK) s = write_in(ctx, temporary, "tokenizer_config.json", config->data, config->n);
  if (s == RFR_OK && chat) s = write_in(ctx, temporary, "chat_template.jinja", chat_text, chat_n);
  if (s == RFR_OK) s = rfi_file_rename(ctx, temporary, folder);
  if (s != RFR_OK) rfi_tree_discard(temporary);
fail: /* reached on success too */
  rfi_free(ctx, temporary);
  rfi_free(ctx, folder);
  rfi_free(ctx, parent);
  return s;
}

static rfr_status write_files(rfr_ctx *ctx, const char *out, bool is_file, const rfi_trained_bpe *t,
                              const rfr_tokenizer_train_options *o, const rfr_chat_template *chat) {
  rfi_string text = {.ctx = ctx}, config = {.ctx = ctx};
  rfr_tokenizer *tokenizer = NULL;
  char *parent = NULL;
  rfr_status s;
  RFI_GOTO(put_tokenizer(&text, t, o));
  RFI_GOTO(put_config(&config, o));
  RFI_GOTO(rfi_tokenizer_parse(ctx, "tokenizer.json", text.data, text.n, &tokenizer));
  RFI_GOTO(rfi_path_parent(ctx, out, &parent));
  RFI_GOTO(rfi_dir_create(parent));
  s = is_file ? rfi_file_write(ctx, out, text.data, text.n) : write_folder(ctx, out, &text, &config, chat);
fail: /* reached on success too */
  rfr_tokenizer_destroy(tokenizer);
  rfi_string_deinit(&text);
  rfi_string_deinit(&config);
  rfi_free(ctx, parent);
  return s;
}

/* ---- the call ---- */

static rfr_status train(rfr_ctx *ctx, const char *const *paths, int n, const rfr_tokenizer_train_options *o,
                        const char *out, bool is_file, rfr_tokenizer_training *t) {
  rfi_paths files = {.ctx = ctx};
  rfi_word_table reserved = {.ctx = ctx};
  rfi_word_counter *counter = NULL;
  const rfi_word_table *words;
  rfi_trained_bpe trained = {.n_special = o->n_special};
  rfr_chat_template *chat = NULL;
  rfr_status s;
  if (o->chat_template) RFI_TRY(rfr_chat_template_open(ctx, o->chat_template, NULL, &chat));
  RFI_GOTO(rfi_find_files("", paths, n, &files));
  RFI_GOTO(rfi_word_counter_create(ctx, o->pattern, &counter));
  RFI_GOTO(count_files(counter, &files, o, t));
  RFI_GOTO(rfi_word_counter_finish(counter, &words));
  RFI_GOTO(add_reserved(o, &reserved));
  RFI_GOTO(rfi_bpe_train(ctx, words, &reserved, o->vocab_size, o->min_frequency, &trained));
  t->words = (int64_t)words->n;
  t->vocab_size = o->n_special + (int64_t)trained.tokens.n;
  t->merges = (int64_t)trained.n_merges;
  t->least = trained.least;
  RFI_GOTO(write_files(ctx, out, is_file, &trained, o, chat));
fail: /* reached on success too */
  rfr_chat_template_destroy(chat);
  rfi_trained_bpe_deinit(ctx, &trained);
  rfi_word_counter_destroy(counter);
  rfi_word_table_deinit(&reserved);
  rfi_paths_deinit(&files);
  return s;
}

rfr_status rfr_tokenizer_train(rfr_ctx *ctx, const char *const *paths, int64_t n,
                               const rfr_tokenizer_train_options *options, const char *out,
                               rfr_tokenizer_training *training) {
  rfr_tokenizer_train_options o = rfr_tokenizer_train_options_default();
  rfr_tokenizer_training t = {0};
  char kind;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!paths || n < 1 || n > 1 << 20 || !out || !*out)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_train: paths is empty, or out is missing");
  for (int64_t i = 0; i < n; i++)
    if (!paths[i]) return rfi_fail(RFI_E_ARGUMENT, "rfr_tokenizer_train: path %lld is NULL", (long long)i);
  if (options) {
    RFI_TRY(rfi_check_options("rfr_tokenizer_train_options", options, options->size, sizeof o));
    o = *options;
  }
  if (training) *training = t;
  const bool is_file = rfi_ends_in(out, ".json");
  RFI_TRY(check_options(&o, is_file));
  RFI_TRY(rfi_path_kind(out, &kind));
  if (kind) return rfi_fail(RFI_E_EXPORT_EXISTS, "%s exists; nothing was written", out);
  const rfr_status s = train(ctx, paths, (int)n, &o, out, is_file, &t);
  if (s == RFR_OK && training) *training = t;
  return s;
}
